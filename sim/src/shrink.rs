//! Makes a failing plan smaller, as long as it still fails.

use crate::{
    plan::{End, Fault, Op, Plan, What, Work},
    run::run,
    trade::Deal,
};

/// The smallest plan that was found. Each step leaves out one thing, or makes one simpler.
pub fn shrink(plan: &Plan, fails: impl Fn(&Plan) -> bool) -> Plan {
    let mut least = plan.clone();
    while let Some(smaller) = smaller(&least).into_iter().find(|it| fails(it)) {
        least = smaller;
    }
    least
}

/// Whether a run of the plan has a violation of the same kind as this one: its text without numbers.
pub fn fails_alike(plan: &Plan, violation: &str) -> bool {
    run(plan, false).violations.iter().any(|it| kind(it) == kind(violation))
}

/// The text of a violation without its numbers.
fn kind(violation: &str) -> String {
    violation.chars().filter(|it| !it.is_ascii_digit()).take(60).collect()
}

/// All plans that are one step smaller, the smallest first.
fn smaller(plan: &Plan) -> Vec<Plan> {
    let mut plans = Vec::new();
    let mut with = |change: &dyn Fn(&mut Plan)| {
        let mut changed = plan.clone();
        change(&mut changed);
        plans.push(changed);
    };
    // A process without tasks has no part in the run, and keeps the numbers of the others.
    for process in 0..plan.processes.len() {
        if !plan.processes[process].tasks.is_empty() {
            with(&|it| it.processes[process].tasks.clear());
        }
    }
    for fault in 0..plan.faults.len() {
        with(&|it| drop(it.faults.remove(fault)));
    }
    let lists = lists(plan);
    for list in (0..lists).filter(|it| tasks_len(plan, *it) > 0) {
        with(&|it| tasks_of(it, list).clear());
    }
    for list in 0..lists {
        for op in 0..tasks_len(plan, list) {
            with(&|it| drop(tasks_of(it, list).remove(op)));
        }
    }
    for list in 0..lists {
        for op in 0..tasks_len(plan, list) {
            with_simpler_work(plan, list, op, &mut plans);
            with_fewer_takers(plan, list, op, &mut plans);
        }
    }
    plans
}

/// The number of lists of operations: one for each task, also of those after a restart.
fn lists(plan: &Plan) -> usize {
    all_tasks(&mut plan.clone()).len()
}

fn tasks_len(plan: &Plan, list: usize) -> usize {
    tasks_of(&mut plan.clone(), list).len()
}

fn tasks_of(plan: &mut Plan, list: usize) -> &mut Vec<Op> {
    all_tasks(plan).swap_remove(list)
}

fn all_tasks(plan: &mut Plan) -> Vec<&mut Vec<Op>> {
    let Plan { processes, faults, .. } = plan;
    let again = faults.iter_mut().filter_map(|(_, it)| match it {
        Fault::Kill { tasks, .. } => Some(tasks),
        _ => None,
    });
    processes.iter_mut().map(|it| &mut it.tasks).chain(again).flatten().collect()
}

fn with_simpler_work(plan: &Plan, list: usize, op: usize, plans: &mut Vec<Plan>) {
    let mut with = |change: &dyn Fn(&mut Work) -> bool| {
        let mut changed = plan.clone();
        if work(&mut tasks_of(&mut changed, list)[op].what).is_some_and(change) {
            plans.push(changed);
        }
    };
    with(&|it| std::mem::replace(&mut it.extends, false));
    with(&|it| it.holds.len() > 1 && it.holds.pop().is_some());
    with(&|it| !matches!(std::mem::replace(&mut it.end, End::Release), End::Release));
}

fn with_fewer_takers(plan: &Plan, list: usize, op: usize, plans: &mut Vec<Plan>) {
    let mut plan = plan.clone();
    let What::Deal(Deal::Takes { takers, .. }) = &mut tasks_of(&mut plan, list)[op].what else { return };
    let takers = std::mem::take(takers);
    for taker in 0..takers.len() {
        let (mut plan, mut fewer) = (plan.clone(), takers.clone());
        fewer.remove(taker);
        if let What::Deal(Deal::Takes { takers, .. }) = &mut tasks_of(&mut plan, list)[op].what {
            *takers = fewer;
        }
        plans.push(plan);
    }
}

fn work(what: &mut What) -> Option<&mut Work> {
    match what {
        What::Try { work, .. }
        | What::Acquire { work, .. }
        | What::Run { work, .. }
        | What::Any { work }
        | What::Permits { work, .. }
        | What::Read { work }
        | What::Write { work } => Some(work),
        What::All { .. } | What::Steal { .. } | What::Look { .. } | What::Close | What::Deal(_) => None,
    }
}
