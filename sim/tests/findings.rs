//! Defects that a simulation has found, each as the schedules that showed it. All of them failed before the mend.

use lockkit_sim::{
    plan::{Bug, End, Fault, Kind, Link, Name, Op, Plan, Process, Profile, Settings, Terms, What, Work},
    run,
};

const TTL: u64 = 120;

fn plan(profile: Profile, processes: Vec<Vec<Vec<Op>>>) -> Plan {
    let settings = Settings {
        kind: Kind::Sql,
        session: 0,
        ttl: TTL,
        wait: 20_000,
        hand_over: 32,
        notifies: 0.0,
        batches: false,
        shows_writes_at_once: true,
        segments: 0,
        connections: 1,
        bug: None,
    };
    let processes = processes.into_iter().map(|tasks| Process { fast_ppm: 0, tasks }).collect();
    Plan { seed: 1, profile, settings, processes, faults: Vec::new() }
}

/// A task that does this once, so many milliseconds after the beginning.
fn at(pause: u64, what: What) -> Vec<Op> {
    vec![Op { pause, what }]
}

fn work(hold: u64) -> Work {
    Work { holds: vec![hold], extends: false, end: End::Release }
}

/// Acquires the lease `a`, and releases it after this long.
fn holds(hold: u64) -> What {
    let terms = Terms { ttl_times: 1, min_hold: 0, wait: None };
    What::Acquire { key: Name::A, terms, dropped: None, work: work(hold) }
}

/// No run of these plans breaks a promise.
fn all_pass(plans: impl IntoIterator<Item = Plan>) {
    for plan in plans {
        let violations = run(&plan, false).violations;
        assert!(violations.is_empty(), "{violations:#?} by {plan:#?}");
    }
}

#[test]
fn close_waits_for_a_release_in_flight() {
    // Granted by 6 ms, the lease is released by 30 ms, and the answer comes by 36 ms.
    all_pass((10..40).map(|closes| {
        let mut plan = plan(Profile::Calm, vec![vec![at(0, holds(20)), at(closes, What::Close)]]);
        plan.settings.ttl = 3000;
        plan
    }));
}

#[test]
fn an_unanswered_list_does_not_keep_a_free_lease_from_a_process_for_long() {
    // The second process waits from 10 ms on, and looks for tickets again and again. The first one releases the lease
    // at 400 ms.
    all_pass((50..400).step_by(5).map(|cut| {
        let mut plan = plan(Profile::Net, vec![vec![at(0, holds(400))], vec![at(10, holds(1))]]);
        let silent = Link { lost_answers: 1.0, silent: 1.0, ..Link::GOOD };
        plan.faults.push((cut, Fault::Link { process: 1, link: silent }));
        plan.faults.push((cut + 20, Fault::Link { process: 1, link: Link::GOOD }));
        plan
    }));
}

#[test]
fn a_read_lease_that_is_lost_while_the_writer_is_looked_for_is_not_returned() {
    all_pass((0..300).map(|seed| {
        let reads = What::Read { work: work(1) };
        let mut plan = plan(Profile::Net, vec![vec![at(5, reads)]]);
        plan.seed = seed;
        let slow = Link { slow: 1.0, slow_us: 2 * TTL * 1000, ..Link::GOOD };
        plan.faults.push((1, Fault::Link { process: 0, link: slow }));
        plan
    }));
}

#[test]
fn a_claim_that_arrives_twice_leaves_an_extended_lease_as_it_is() {
    let plans = || {
        (0..300).map(|seed| {
            let extends = What::Acquire {
                key: Name::A,
                terms: Terms { ttl_times: 1, min_hold: 0, wait: None },
                dropped: None,
                work: Work { holds: vec![2], extends: true, end: End::Share(4 * TTL) },
            };
            let mut plan = plan(Profile::Net, vec![vec![at(5, extends)]]);
            plan.seed = seed;
            let repeats = Link { repeated: 1.0, slow: 0.5, slow_us: TTL * 1000, ..Link::GOOD };
            plan.faults.push((1, Fault::Link { process: 0, link: repeats }));
            plan
        })
    };
    // The store of the simulation keeps the later expiry, as those of lockkit do (`testing::conformance`).
    all_pass(plans());
    let mut broken = plans().map(|mut plan| {
        plan.settings.bug = Some(Bug::ShortensByRepeats);
        plan
    });
    assert!(broken.any(|plan| !run(&plan, false).violations.is_empty()), "a store that does not is not noticed");
}

#[test]
fn a_process_that_was_stopped_takes_no_lease_in_a_session_that_is_about_to_end() {
    let plans = || {
        // The second process is stopped while it waits, and goes on at about the end of its session. It notices no
        // silence, because it was notified of the release meanwhile.
        (900..1250).step_by(10).flat_map(|lasts| (0..4).map(move |seed| (lasts, seed))).map(|(lasts, seed)| {
            let mut plan = plan(Profile::Stop, vec![vec![at(0, holds(400))], vec![at(10, holds(300))]]);
            (plan.settings.kind, plan.settings.session, plan.settings.notifies) = (Kind::ZooKeeper, 1000, 1.0);
            plan.seed = seed;
            plan.faults.push((100, Fault::Stop { process: 1, lasts }));
            plan
        })
    };
    // The client of the simulation knows that it was stopped, as that of `lockkit-zookeeper` does (`pulse`).
    all_pass(plans());
    let mut broken = plans().map(|mut plan| {
        plan.settings.bug = Some(Bug::TrustsAfterSilence);
        plan
    });
    assert!(broken.any(|plan| !run(&plan, false).violations.is_empty()), "a client that does not is not noticed");
}

#[test]
fn steal_if_spares_the_holder_to_whom_the_lease_was_handed_over_since_its_look() {
    // The first task releases the lease at about 30 ms, and so hands it over to the second.
    all_pass((15..45).flat_map(|steals| (0..10).map(move |seed| (steals, seed))).map(|(steals, seed)| {
        let steal = What::Steal { key: Name::A, looks: true };
        let mut plan = plan(Profile::Steal, vec![vec![at(0, holds(25)), at(8, holds(60)), at(steals, steal)]]);
        plan.settings.ttl = 3000;
        plan.seed = seed;
        plan
    }));
}
