//! The exhibits, in the order of the tour: one file each.

mod below_zero;
mod check_then_delete;
mod client_clocks;
mod empty_segment;
mod expire_by_losers;
mod fail_over;
mod for_update;
mod full_scan;
mod loser_unlocks;
mod lost_renewal;
mod lottery;
mod overrun;
mod pool_drained;
mod same_owner;
mod same_second;
mod same_snapshot;
mod setnx_expire;
mod stale_writer;
mod unlock_before_commit;
mod with_leases;

use crate::exhibit::Exhibit;

/// All exhibits. The first one has number 1.
pub(crate) fn all() -> [Exhibit; 19] {
    [
        lottery::exhibit(),
        for_update::exhibit(),
        full_scan::exhibit(),
        setnx_expire::exhibit(),
        loser_unlocks::exhibit(),
        expire_by_losers::exhibit(),
        overrun::exhibit(),
        check_then_delete::exhibit(),
        stale_writer::exhibit(),
        fail_over::exhibit(),
        empty_segment::exhibit(),
        pool_drained::exhibit(),
        same_snapshot::exhibit(),
        same_second::exhibit(),
        same_owner::exhibit(),
        unlock_before_commit::exhibit(),
        client_clocks::exhibit(),
        lost_renewal::exhibit(),
        below_zero::exhibit(),
    ]
}

/// Exhibits with a mistake: a recipe that was cured, or a cure that breaks. With what they must fail.
#[cfg(test)]
pub(crate) fn planted() -> [(Exhibit, &'static str); 9] {
    [
        lottery::planted(),
        setnx_expire::planted(),
        loser_unlocks::planted(),
        full_scan::planted(),
        check_then_delete::planted(),
        stale_writer::planted(),
        same_snapshot::planted(),
        client_clocks::planted(),
        lost_renewal::planted(),
    ]
}
