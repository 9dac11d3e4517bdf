//! Leases that are held while something else is measured.

use anyhow::Result;
use tokio::task::JoinSet;

use super::{Bench, Subject};

/// How many leases are acquired at the same time.
const AT_ONCE: u32 = 16;

/// Acquires and keeps as many leases as the job says.
pub(super) async fn hold<DB: Subject>(bench: &mut Bench<DB>) -> Result<()> {
    let mut tasks = JoinSet::new();
    for first in 0..AT_ONCE {
        let (leases, rows) = (bench.leases.clone(), bench.job.rows);
        tasks.spawn(async move {
            let mut held = Vec::new();
            for number in (first..rows).step_by(AT_ONCE as usize) {
                held.push(leases.lease(format!("held:{number}")).acquire().await?);
            }
            Ok::<_, lockkit::Error>(held)
        });
    }
    while let Some(held) = tasks.join_next().await {
        bench.held.extend(held??);
    }
    Ok(())
}

/// All are still held.
pub(super) fn violations<DB: Subject>(bench: &Bench<DB>) -> Vec<String> {
    let lost = bench.held.iter().filter(|it| !it.is_trusted()).count();
    if lost > 0 { vec![format!("lost lease: {lost} of {} held leases", bench.held.len())] } else { Vec::new() }
}
