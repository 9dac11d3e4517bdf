//! The page that compares common recipes and lockkit's locks: rates from `docs/benchmarks`, and what each survives.

use std::{collections::BTreeMap, fmt::Write, fs, path::Path};

use anyhow::{Context, Result};

use crate::text::wrapped;

const INTRODUCTION: [&str; 4] = [
    "Recipes that let one caller in at a time while nothing fails, and lockkit's locks, in one table. Rates and p99 \
     are medians of the rounds of a benchmark, to which the rate links. The five columns on the right each answer a \
     question, and link to the exhibit, the test or the source that shows it. Two need none: *no clock*, the lock \
     does not depend on the time of day; *in the row*, the version is kept or forgotten together with the data. Where \
     there is no number: *no lock*, a version takes none; *cannot wait*, the recipe refuses all callers but one; *not \
     run*, the benchmark has no such contender; *rate only*, the benchmark of the stores measures no p99.",
    "*Alone*: one task takes and frees a lock that nobody else wants. *Hot*: four processes with four tasks each \
     change one row under the lock. Rates are per second, p99 is the wait in milliseconds that 1 of 100 requests \
     exceeds. All ran on one machine with two cores, against PostgreSQL 15, Redis 7.0 and one node of ZooKeeper 3.8 \
     whose commits do not wait for a disk. The rates of leases are without `lease.commit` or `lease.guard`, on which \
     *pause*, *fail-over* and *clock* depend.",
    "*Crash*: when is the lock of a killed process free: at once, or when its time, its ttl or its session is over? \
     *Pause*: a holder is stopped for longer than its lock lasts, and goes on. Is the data safe from it? \
     *Fail-over*: the server forgets its last write. Is the data safe from two holders? *Clock*: is it safe although \
     a clock is set back, or jumps ahead? *Lost answer*: the lock was granted, and the answer is lost. Does the \
     caller get the lock when it asks again? For a version it is the answer to the commit; lockkit then returns \
     `OutcomeUnknown`.",
    "*Guarded*: each transaction calls `lease.guard`, and the database refuses a lower fence. rslock (Rust) and \
     Curator (Java) are client libraries. Galera is a cluster of MariaDB in which every node takes writes.",
];

/// A recipe, where its two rates are, and what it survives.
struct Row {
    recipe: &'static str,
    alone: Measured,
    hot: Measured,
    crash: &'static str,
    pause: &'static str,
    fail_over: &'static str,
    clock: &'static str,
    lost_answer: &'static str,
}

/// Where a rate and a p99 are.
#[derive(Clone, Copy)]
enum Measured {
    /// A contender in `results.csv` of a folder: folder, scenario, tasks, contender.
    In(&'static str, &'static str, u32, &'static str),
    /// The rate of lockkit with one task in the table of `stores/results.md`, which has no p99.
    Store(&'static str),
    /// Nowhere, and why.
    Not(&'static str),
}

use Measured::{In, Not, Store};

const ROWS: &[Row] = &[
    Row {
        recipe: "row lock, `FOR UPDATE`",
        alone: In("all", "row-lock", 1, "floor"),
        hot: In("compare", "hot-row", 16, "floor: FOR UPDATE"),
        crash: "[at once][rk]",
        pause: "[yes, others wait][2]",
        fail_over: "[yes, one node][g]",
        clock: "no clock",
        lost_answer: "[as a crash][rk]",
    },
    Row {
        recipe: "**lockkit** row lock",
        alone: In("all", "row-lock", 1, "lockkit"),
        hot: In("compare", "hot-row", 16, "lockkit row"),
        crash: "[at once][rk]",
        pause: "[yes, others wait 10 s][2]",
        fail_over: "[yes, one node][g]",
        clock: "no clock",
        lost_answer: "[as a crash][rk]",
    },
    Row {
        recipe: "version (SQLAlchemy)",
        alone: Not("no lock"),
        hot: In("compare", "hot-row", 16, "SQLAlchemy version_id_col"),
        crash: "[holds nothing][v]",
        pause: "[yes][14]",
        fail_over: "yes, in the row",
        clock: "[yes, if a number][14]",
        lost_answer: "[unknown][o]",
    },
    Row {
        recipe: "**lockkit** version",
        alone: Not("no lock"),
        hot: In("compare", "hot-row", 16, "lockkit version"),
        crash: "[holds nothing][v]",
        pause: "[yes][14]",
        fail_over: "[yes][gu]",
        clock: "[yes][t]",
        lost_answer: "[`OutcomeUnknown`][o]",
    },
    Row {
        recipe: "unique-key table, random owner",
        alone: In("compare", "uncontended", 1, "floor"),
        hot: Not("cannot wait"),
        crash: "[its time][15]",
        pause: "[no][9]",
        fail_over: "[no][10]",
        clock: "[no][x]",
        lost_answer: "[no][la]",
    },
    Row {
        recipe: "**lockkit** lease",
        alone: In("compare", "uncontended", 1, "lockkit lease"),
        hot: In("compare", "hot-row", 16, "lockkit lease"),
        crash: "[its ttl][lk]",
        pause: "[yes][ls]",
        fail_over: "[yes][10]",
        clock: "yes: [set back][lc], [ahead][ls]",
        lost_answer: "[yes][k]",
    },
    Row {
        recipe: "`SET NX PX` and script (rslock)",
        alone: In("compare", "uncontended", 1, "rslock"),
        hot: In("compare", "hot-row", 16, "rslock"),
        crash: "[its time][7]",
        pause: "[no][9]",
        fail_over: "[no][10]",
        clock: "[no][x]",
        lost_answer: "[no][la]",
    },
    Row {
        recipe: "**lockkit** Redis lease, guarded",
        alone: In("compare", "uncontended", 1, "lockkit-redis lease"),
        hot: In("compare", "hot-row", 16, "lockkit-redis lease"),
        crash: "[its ttl][rc]",
        pause: "[yes][f]",
        fail_over: "[yes][rf]",
        clock: "yes: [set back][rc], [ahead][f]",
        lost_answer: "[yes][k]",
    },
    Row {
        recipe: "ephemeral nodes (Curator)",
        alone: In("compare", "uncontended", 1, "Curator"),
        hot: In("compare", "hot-row", 16, "Curator"),
        crash: "[its session][zk]",
        pause: "[no][9]",
        fail_over: "[yes][zl]",
        clock: "no clock",
        lost_answer: "yes, by [`withProtection`][w]",
    },
    Row {
        recipe: "**lockkit** ZooKeeper lease, guarded",
        alone: Store("ZooKeeper"),
        hot: Not("not run"),
        crash: "[its session][zk]",
        pause: "[yes][f]",
        fail_over: "[yes][zl]",
        clock: "no clock",
        lost_answer: "[yes][k]",
    },
];

/// Names in the cells, where they lead, and the test that is there.
const SOURCES: &[(&str, &str, &str)] = &[
    ("2", "02-for-update.md", ""),
    ("7", "07-overrun.md", ""),
    ("9", "09-stale-writer.md", ""),
    ("10", "10-fail-over.md", ""),
    ("14", "14-same-second.md", ""),
    ("15", "15-same-owner.md", ""),
    ("a", "../benchmarks/all/results.md", ""),
    ("c", "../benchmarks/compare/results.md", ""),
    ("s", "../benchmarks/stores/results.md", ""),
    ("rk", "../../tests/integration/processes.rs", "processes::a_killed_holders_row_lock_is_free_at_once"),
    ("g", "../operating.md#galera", ""),
    (
        "gu",
        "../../tests/integration/galera.rs",
        "galera::a_transaction_that_another_node_undid_is_transient_and_repeated",
    ),
    ("v", "../../tests/integration/processes.rs", "processes::processes_with_versions_sell_exactly_what_there_is"),
    ("t", "../../tests/integration/versions.rs", "versions::timestamps_serve_as_versions_at_every_precision"),
    ("o", "../../tests/integration/commits.rs", "commits::a_commit_without_an_answer_is_of_unknown_outcome"),
    ("la", "../../museum/src/world/toy.rs", "toy::a_caller_that_missed_its_answer_is_refused_by_its_own_lock"),
    ("x", "../../lockkit/src/testing/oracle.rs", "oracle::a_clock_that_jumps_ahead_makes_two_holders"),
    (
        "lk",
        "../../tests/integration/processes.rs",
        "processes::a_killed_holders_lease_is_free_after_its_ttl_and_not_before",
    ),
    ("ls", "../../tests/integration/processes.rs", "processes::a_holder_that_was_stopped_past_its_ttl_cannot_commit"),
    (
        "lc",
        "../../tests/integration/clocks.rs",
        "clocks::when_the_clock_is_set_back_a_dead_holder_is_replaced_within_its_ttl",
    ),
    (
        "k",
        "../../lockkit/src/testing/conformance/checks.rs",
        "conformance::the_token_that_holds_is_granted_again_with_the_same_fence",
    ),
    ("f", "../../tests/integration/fence_guard.rs", "fence_guard::a_stale_holder_of_a_lease_elsewhere_cannot_commit"),
    (
        "rf",
        "../../stores/redis/tests/redis/failover.rs",
        "failover::a_replica_that_lagged_behind_grants_no_lease_twice",
    ),
    ("rc", "../../stores/redis/tests/redis/clocks.rs", "clocks::a_dead_holder_is_replaced_within_its_ttl"),
    (
        "zk",
        "../../stores/zookeeper/tests/zookeeper/processes.rs",
        "processes::a_stopped_or_killed_holder_has_an_heir_after_its_session_and_hears_of_it",
    ),
    (
        "w",
        "https://github.com/apache/curator/tree/HEAD/curator-recipes/src/main/java/org/apache/curator/framework/\
         recipes",
        "",
    ),
    (
        "zl",
        "../../stores/zookeeper/tests/zookeeper/ensemble.rs",
        "ensemble::leases_exclude_each_other_while_leaders_die_and_a_quorum_is_lost",
    ),
];

/// The text of the page, with the numbers of the results in `docs/benchmarks`.
///
/// # Errors
/// A number of the table is not there any more.
pub(crate) fn comparison(benchmarks: &Path) -> Result<String> {
    let introduction = INTRODUCTION.map(|it| wrapped(it, 120)).join("\n");
    let mut text = format!(
        "# Common locks and lockkit, compared\n\n{introduction}\n\
         | recipe | alone | p99 | hot | p99 | crash | pause | fail-over | clock | lost answer |\n\
         |---|--:|--:|--:|--:|---|---|---|---|---|\n"
    );
    for Row { recipe, alone, hot, crash, pause, fail_over, clock, lost_answer } in ROWS {
        let [alone, hot] = [alone.cells(benchmarks)?, hot.cells(benchmarks)?];
        let _ = writeln!(
            text,
            "| {recipe} | {alone} | {hot} | {crash} | {pause} | {fail_over} | {clock} | {lost_answer} |"
        );
    }
    text.push_str("\nThe tests behind the answers:\n\n");
    for (name, _, test) in SOURCES.iter().filter(|it| !it.2.is_empty()) {
        let _ = writeln!(text, "- [{name}]: `{test}`");
    }
    text.push('\n');
    for (name, address, _) in SOURCES {
        let _ = writeln!(text, "[{name}]: {address}");
    }
    Ok(text)
}

impl Measured {
    /// The rate and the p99, as two cells.
    fn cells(self, benchmarks: &Path) -> Result<String> {
        let read = |folder: &str, file: &str| {
            let path = benchmarks.join(folder).join(file);
            fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))
        };
        match self {
            Not(why) => Ok(format!("{why} |")),
            Store(store) => {
                let results = read("stores", "results.md")?;
                let mut rows = results.lines().map(|it| it.split('|').map(str::trim).collect::<Vec<_>>());
                let row = rows.find(|it| it.get(1..3) == Some(&[store, "1"])).and_then(|it| it.get(4)?.parse().ok());
                let rate: f64 = row.with_context(|| format!("no {store} in stores/results.md"))?;
                Ok(format!("[{}][s] | rate only", thousands(rate)))
            }
            In(folder, scenario, tasks, contender) => {
                let results = read(folder, "results.csv")?;
                let samples: Vec<_> = samples(&results)
                    .filter(|it| {
                        let [of, database, by] = ["scenario", "database", "contender"].map(|column| it.get(column));
                        of == Some(&scenario) && database == Some(&"PostgreSQL") && by == Some(&contender)
                    })
                    .filter(|it| it.get("tasks").and_then(|it| it.parse().ok()) == Some(tasks))
                    .collect();
                let rate = median(&samples, "rate");
                let (rate, p99) = rate.zip(median(&samples, "p99_ms")).with_context(|| {
                    format!("no `{contender}` with {tasks} tasks in `{scenario}` of {folder}/results.csv")
                })?;
                let p99 = if p99 < 10.0 { format!("{p99:.2}") } else { format!("{p99:.0}") };
                Ok(format!("[{}][{}] | {p99}", thousands(rate), &folder[..1]))
            }
        }
    }
}

/// The rows of a CSV file, each with the names of its columns.
fn samples(text: &str) -> impl Iterator<Item = BTreeMap<&str, &str>> {
    let mut lines = text.lines();
    let columns: Vec<_> = lines.next().unwrap_or_default().split(',').collect();
    lines.map(move |it| columns.iter().copied().zip(it.split(',')).collect())
}

fn median(samples: &[BTreeMap<&str, &str>], column: &str) -> Option<f64> {
    let mut numbers: Vec<f64> = samples.iter().filter_map(|it| it.get(column)?.parse().ok()).collect();
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied()
}

/// `14208.3` as `14,208`.
fn thousands(number: f64) -> String {
    let digits = format!("{number:.0}");
    match digits.len() {
        4.. => format!("{},{}", &digits[..digits.len() - 3], &digits[digits.len() - 3..]),
        _ => digits,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_the_median_of_its_samples_and_one_that_is_missing_is_an_error() {
        let folder = tempfile::tempdir().expect("make a folder");
        fs::create_dir(folder.path().join("all")).expect("make a folder");
        let csv = "scenario,database,tasks,contender,rate,p99_ms\n\
                   s,PostgreSQL,1,c,3000.4,1\ns,PostgreSQL,1,c,1,0.5\ns,PostgreSQL,1,c,9000,20\n\
                   s,MySQL,1,c,7,7\ns,PostgreSQL,2,c,7,7\n";
        fs::write(folder.path().join("all/results.csv"), csv).expect("write");
        assert_eq!(In("all", "s", 1, "c").cells(folder.path()).expect("it is there"), "[3,000][a] | 1.00");
        let err = In("all", "s", 3, "c").cells(folder.path()).expect_err("there is none");
        assert_eq!(err.to_string(), "no `c` with 3 tasks in `s` of all/results.csv");
    }

    #[test]
    fn every_answer_has_a_source_or_is_one_that_needs_none() {
        for Row { recipe, crash, pause, fail_over, clock, lost_answer, .. } in ROWS {
            for answer in [crash, pause, fail_over, clock, lost_answer] {
                let is_plain = ["no clock", "yes, in the row"].contains(answer);
                assert!(is_plain || answer.contains("]["), "{recipe}: {answer}");
            }
        }
    }

    #[test]
    fn every_source_has_a_name_and_every_name_a_source() {
        let text = comparison(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/benchmarks")).expect("the results");
        for (name, _, _) in SOURCES {
            assert!(text.contains(&format!("][{name}]")), "{name} is not used");
        }
        for name in text.split("][").skip(1).filter_map(|it| it.split(']').next()) {
            assert!(SOURCES.iter().any(|it| it.0 == name), "{name} has no source");
        }
    }
}
