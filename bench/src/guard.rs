//! `--quick`: a short run, and ratios that a change must not fall far below. Never a time.

use crate::args::RunArgs;
use crate::lines::Line;
use crate::scenarios::Scenario;
use crate::servers::Kind;

/// A ratio that one round must reach: the scenario, the contender, the tasks, and the ratio to the baseline.
const LEAST: &[(Scenario, &str, u32, f64)] =
    &[(Scenario::Lease, "lockkit", 8, 0.3), (Scenario::HotLease, "lockkit", 64, 5.0)];

/// Sets what the command line has left open.
pub(crate) fn shorten(args: &mut RunArgs) {
    args.common.seconds = args.common.seconds.min(0.25);
    args.common.warm = args.common.warm.min(0.05);
    if args.scenarios.is_empty() {
        args.scenarios = LEAST.iter().map(|it| it.0).collect();
    }
    if args.databases.is_empty() {
        args.databases = vec![Kind::Postgres, Kind::Sqlite];
    }
}

/// The crowds of a scenario in a short run.
pub(crate) fn crowds(scenario: Scenario) -> Vec<(u32, u32)> {
    LEAST.iter().filter(|it| it.0 == scenario).map(|it| (it.2, 1)).collect()
}

/// Whether a contender takes part in a short run: the baseline and what is guarded.
pub(crate) fn takes_part(scenario: Scenario, contender: &str, is_baseline: bool) -> bool {
    is_baseline || LEAST.iter().any(|it| it.0 == scenario && it.1 == contender)
}

/// The ratios that were not reached in any round.
pub(crate) fn complaints(lines: &[Line]) -> Vec<String> {
    let mut complaints = Vec::new();
    for line in lines {
        let setting = line.setting;
        let rule = LEAST.iter().find(|(scenario, contender, tasks, _)| {
            *scenario == setting.scenario && *contender == line.contender && *tasks == setting.tasks
        });
        let Some((_, contender, tasks, least)) = rule else { continue };
        // The best round, because a busy machine spoils some of them.
        let Some(ratio) = line.ratio().map(|it| it.greatest).filter(|it| it < least) else { continue };
        complaints.push(format!(
            "{contender} of {} on {} with {tasks} tasks reached {ratio:.2} of the baseline in its best round, at \
             least {least} is expected",
            setting.scenario.name(),
            setting.database.name(),
        ));
    }
    complaints
}
