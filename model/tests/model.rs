//! The real protocols have their properties within the bounds, each planted bug breaks one, and `README.md` says so.

use lockkit_model::{
    check::{Protocol, tables},
    guard::Guard,
    quorum::Quorum,
    sessions::Sessions,
    stops::Stops,
    table::Table,
};

/// Whether `README.md` has the tables of the model.
fn check<M: Protocol>() {
    let tables = tables::<M>();
    assert!(include_str!("../README.md").contains(&tables), "README.md does not have:\n\n{tables}");
}

#[test]
fn leases_in_a_table() {
    check::<Table>();
}

#[test]
fn the_fence_guard() {
    check::<Guard>();
}

#[test]
fn a_quorum_of_redis_servers() {
    check::<Quorum>();
}

#[test]
fn sessions_of_zookeeper() {
    check::<Sessions>();
}

#[test]
fn a_process_of_zookeeper_that_is_stopped() {
    check::<Stops>();
}
