//! The promises of a store, on one server.

use lockkit::testing::conformance;
use lockkit_zookeeper::Layout;

use crate::support::{SESSION, own_root, shared_server, store, store_on};

#[tokio::test]
async fn the_store_keeps_the_promises_of_stores() {
    let root = own_root();
    let store = store(&root).await;
    conformance::run(async || store.clone()).await;
}

#[tokio::test]
async fn it_keeps_them_among_sessions_and_with_the_names_of_kazoo() {
    let root = own_root();
    conformance::run(async || store_on(shared_server(), &root, SESSION, Layout::Kazoo).await).await;
}
