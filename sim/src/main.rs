//! `sim`: runs schedules, replays and shrinks one. See the README of the crate.

use std::{
    collections::BTreeMap,
    process::ExitCode,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use clap::{Parser, Subcommand};
use lockkit_sim::{
    Counts,
    plan::{Bug, Kind, Plan, Profile, fresh_seed},
    run,
    shrink::{fails_alike, shrink},
};

/// The lease code of lockkit in virtual time, under seeded faults.
#[derive(Debug, Parser)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Runs the schedule of one seed.
    Run {
        #[command(flatten)]
        which: Which,
        /// Prints the plan and the timeline.
        #[arg(short, long)]
        verbose: bool,
    },
    /// Makes the failing schedule of a seed smaller, and prints what is left of it with its timeline.
    Shrink {
        #[command(flatten)]
        which: Which,
    },
    /// Runs schedules until one fails, or the time is over.
    Soak {
        /// How long, in minutes.
        #[arg(long, default_value_t = 10.0)]
        minutes: f64,
        /// Stops after so many schedules.
        #[arg(long)]
        schedules: Option<u64>,
        /// The first seed. Drawn from the clock if it is not given.
        #[arg(long)]
        from: Option<u64>,
        /// Goes on after a failure.
        #[arg(long)]
        keep_going: bool,
        /// Only this kind of trouble.
        #[arg(long)]
        profile: Option<Profile>,
        /// Only this kind of store.
        #[arg(long)]
        store: Option<Kind>,
        /// A promise that the store breaks.
        #[arg(long)]
        bug: Option<Bug>,
        /// How many threads run schedules.
        #[arg(long, default_value_t = 2)]
        threads: usize,
    },
}

#[derive(Debug, clap::Args)]
struct Which {
    /// The seed.
    #[arg(long)]
    seed: u64,
    /// The kind of trouble, if it is not that of the seed.
    #[arg(long)]
    profile: Option<Profile>,
    /// The kind of store, if it is not that of the seed.
    #[arg(long)]
    store: Option<Kind>,
    /// A promise that the store breaks.
    #[arg(long)]
    bug: Option<Bug>,
}

impl Which {
    fn plan(&self) -> Plan {
        let mut plan = Plan::of(self.seed, self.profile, self.store);
        plan.settings.bug = self.bug;
        plan
    }
}

fn main() -> ExitCode {
    match Args::parse().command {
        Command::Run { which, verbose } => replay(&which.plan(), verbose),
        Command::Shrink { which } => {
            let plan = which.plan();
            let Some(violation) = run(&plan, false).violations.into_iter().next() else {
                println!("Seed {} has no violation.", which.seed);
                return ExitCode::SUCCESS;
            };
            replay(&shrink(&plan, |it| fails_alike(it, &violation)), true)
        }
        Command::Soak { minutes, schedules, from, keep_going, profile, store, bug, threads } => {
            let from = from.unwrap_or_else(fresh_seed);
            let limit = Duration::from_secs_f64(60.0 * minutes);
            let plan = |nth| Which { seed: from + nth, profile, store, bug }.plan();
            println!("from seed {from}");
            soak(plan, schedules.unwrap_or(u64::MAX), limit, keep_going, threads)
        }
    }
}

fn replay(plan: &Plan, verbose: bool) -> ExitCode {
    let outcome = run(plan, verbose);
    if verbose {
        println!("{plan:#?}");
        outcome.timeline.iter().for_each(|it| println!("{it}"));
    }
    println!("{:?}", outcome.counts);
    outcome.violations.iter().for_each(|it| println!("VIOLATION: {it}"));
    if outcome.violations.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// What many runs have done.
#[derive(Debug, Default)]
struct Totals {
    ran: u64,
    counts: Counts,
    /// By kind: how often a violation was found, the first seed with it, and its text.
    failed: BTreeMap<String, (u64, u64, String)>,
}

fn soak(
    plan: impl Fn(u64) -> Plan + Sync,
    schedules: u64,
    limit: Duration,
    keep_going: bool,
    threads: usize,
) -> ExitCode {
    let (next, began) = (AtomicU64::new(0), Instant::now());
    let totals = Mutex::new(Totals::default());
    thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(|| {
                while began.elapsed() < limit {
                    let nth = next.fetch_add(1, Ordering::Relaxed);
                    if nth >= schedules || !keep_going && !totals.lock().expect("no thread panics").failed.is_empty() {
                        return;
                    }
                    let plan = plan(nth);
                    let outcome = run(&plan, false);
                    let mut totals = totals.lock().expect("no thread panics");
                    totals.ran += 1;
                    totals.counts.add(&outcome.counts);
                    if let Some(violation) = outcome.violations.into_iter().next() {
                        let kind = violation.chars().filter(|it| !it.is_ascii_digit()).take(40).collect();
                        totals.failed.entry(kind).or_insert((0, plan.seed, violation)).0 += 1;
                    }
                }
            });
        }
    });
    let Totals { ran, counts, failed } = totals.into_inner().expect("no thread panics");
    let took = began.elapsed().as_secs_f64();
    #[expect(clippy::cast_precision_loss, reason = "it is shown with no decimals")]
    let rate = ran as f64 / took;
    println!("{ran} schedules in {took:.0} s, {rate:.0} a second; {counts:?}");
    for (times, seed, violation) in failed.values() {
        println!("VIOLATION: {times} times, first with seed {seed}: {violation}");
        println!("    cargo run -p lockkit-sim -- run -v --seed {seed}");
    }
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
