//! Schedules from fresh seeds, and what makes their results worth something: a run repeats exactly, and a store that
//! breaks its promises is caught.

use std::{
    env,
    io::{Write, stderr},
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use lockkit_sim::{
    Counts,
    plan::{Bug, Fault, Kind, Plan, Profile, fresh_seed},
    run,
    shrink::{fails_alike, shrink},
};

/// How many schedules a run of the tests tries.
const SCHEDULES: u64 = 10_000;

/// Runs the schedules of these seeds on all processors. Returns the violations, each with its seed.
fn violations(from: u64, count: u64) -> (Counts, Vec<(u64, String)>) {
    let next = AtomicU64::new(from);
    let found = Mutex::new((Counts::default(), Vec::new()));
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(2, usize::from) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= from + count || found.lock().unwrap().1.len() >= 10 {
                        return;
                    }
                    let outcome = run(&Plan::of(seed, None, None), false);
                    let mut found = found.lock().unwrap();
                    found.0.add(&outcome.counts);
                    found.1.extend(outcome.violations.into_iter().take(1).map(|it| (seed, it)));
                }
            });
        }
    });
    found.into_inner().unwrap()
}

#[test]
fn locks_keep_their_promises() {
    let from = env::var("LOCKKIT_SIM_FROM").map_or_else(|_| fresh_seed(), |it| it.parse().expect("a number"));
    let (counts, found) = violations(from, SCHEDULES);
    // Also of a test that passes, whose printed text is not shown.
    writeln!(stderr(), "{SCHEDULES} schedules from seed {from}: {counts:?}").unwrap();
    if let Some((seed, violation)) = found.first() {
        let least = shrink(&Plan::of(*seed, None, None), |it| fails_alike(it, violation));
        let replay = format!("cargo run -p lockkit-sim -- run -v --seed {seed}");
        panic!("{} failed: {found:#?}\n`{replay}` replays the first, of which this is left: {least:#?}", found.len());
    }
    assert!(counts.leases > SCHEDULES && counts.handed_over > 0 && counts.losses > 0, "{counts:?}");
    assert!(counts.commits.iter().all(|it| *it > 0), "{counts:?}");
    let Counts { takes, updates, conflicts, unanswered, .. } = counts;
    assert!(takes > SCHEDULES && updates > 0 && conflicts > 0, "{counts:?}");
    assert!(unanswered.iter().all(|it| *it > 0), "{counts:?}");
}

#[test]
fn a_seed_repeats_its_run() {
    for seed in 0..100 {
        let digests =
            [0, 1].map(|_| thread::spawn(move || run(&Plan::of(seed, None, None), false).digest).join().unwrap());
        assert_eq!(digests[0], digests[1], "seed {seed}");
    }
}

#[test]
fn a_failing_plan_is_made_as_small_as_it_can_be() {
    let has_stop = |plan: &Plan| plan.faults.iter().any(|(_, it)| matches!(it, Fault::Stop { .. }));
    let plan = (0..100).map(|seed| Plan::of(seed, Some(Profile::Mix), None)).find(has_stop).unwrap();
    let least = shrink(&plan, has_stop);
    assert_eq!(least.faults.len(), 1);
    assert!(least.processes.iter().all(|it| it.tasks.is_empty()), "{least:#?}");
}

/// The bugs of a store that seeds find, each with the trouble in which it shows.
const CAUGHT: [(Bug, Kind, Profile); 15] = [
    (Bug::GrantsTheHeld, Kind::Sql, Profile::Calm),
    (Bug::GrantsTheLocked, Kind::Sql, Profile::Stop),
    (Bug::RepeatsFences, Kind::Sql, Profile::Calm),
    (Bug::SkipsRenewals, Kind::Sql, Profile::Calm),
    (Bug::RenewsByName, Kind::Sql, Profile::Steal),
    (Bug::ReleasesByName, Kind::Sql, Profile::Stop),
    (Bug::SkipsReleases, Kind::Sql, Profile::Calm),
    (Bug::ReleasesThePinned, Kind::Sql, Profile::Steal),
    (Bug::LosesCommits, Kind::Sql, Profile::Calm),
    (Bug::CommitsForAnyone, Kind::Sql, Profile::Steal),
    (Bug::KeepsLateExpiries, Kind::Sql, Profile::Back),
    (Bug::GrantsAtOnce, Kind::Redis, Profile::Restart),
    (Bug::CountsFences, Kind::Redis, Profile::Restart),
    (Bug::GuardsNothing, Kind::Redis, Profile::Stop),
    (Bug::TrustsAfterSilence, Kind::ZooKeeper, Profile::Stop),
];

#[test]
fn a_store_that_breaks_a_promise_is_caught() {
    thread::scope(|scope| {
        for (bug, kind, profile) in CAUGHT {
            scope.spawn(move || {
                let caught = (0..2000).find(|seed| {
                    let mut plan = Plan::of(*seed, Some(profile), Some(kind));
                    plan.settings.bug = Some(bug);
                    !run(&plan, false).violations.is_empty()
                });
                println!("{bug:?}: seed {caught:?}");
                assert!(caught.is_some(), "{bug:?} is not caught");
            });
        }
    });
}
