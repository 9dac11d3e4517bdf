//! The promises of a store.

use std::time::Instant;

use lockkit::testing::conformance;

use crate::server::store;

#[tokio::test]
async fn every_promise_is_kept() {
    let store = store().await;
    let began = Instant::now();
    let kept = conformance::run(async || store.clone()).await;
    assert_eq!(kept, conformance::PROMISES.len());
    println!("{kept} promises in {:?}", began.elapsed());
}
