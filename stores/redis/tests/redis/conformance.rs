//! The promises of every store.

use std::time::Duration;

use lockkit::testing::conformance;
use lockkit_redis::{Layout, RedisStore};
use lockkit_store_servers::redis::Redis;
use redis::Client;

use crate::support::{builder, declared, store};

#[tokio::test]
async fn the_store_keeps_all_promises() {
    let server = Redis::start();
    let store = store(&server).await;
    conformance::run(async || store.clone()).await;
}

#[tokio::test]
async fn the_store_keeps_all_promises_in_resp3_and_another_database() {
    let server = Redis::start();
    let client = Client::open(format!("{}3?protocol=resp3", server.url())).unwrap();
    let store = declared(RedisStore::builder(client).longest_ttl(Duration::from_hours(1))).await;
    conformance::run(async || store.clone()).await;
}

#[tokio::test]
async fn the_store_keeps_all_promises_in_the_layout_of_redisson() {
    let server = Redis::start();
    let store = declared(builder(&server).layout(Layout::Redisson).longest_ttl(Duration::from_hours(1))).await;
    conformance::run(async || store.clone()).await;
}
