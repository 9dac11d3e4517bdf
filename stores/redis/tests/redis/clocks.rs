//! A server whose clock is set back. Its keys then look as if they had been written in the future.

use std::time::Duration;

use lockkit::store::{Answer, LeaseStore, Renewal};
use lockkit_store_servers::redis::Redis;
use tokio::time::Instant;

use crate::support::{PATIENCE, Row, claim, is_refused, plain, send, store, take, until_granted};

const STEP: Duration = Duration::from_secs(600);
const TTL: Duration = Duration::from_millis(700);

/// Sets the clock back as the keys of a lease see it.
async fn set_back(server: &Redis, key: &str) {
    let (mut conn, step) = (plain(server).await, STEP.as_millis());
    let expires: u128 = send(&mut conn, &format!("PEXPIRETIME {key}")).await;
    send::<i64>(&mut conn, &format!("PEXPIREAT {key} {}", expires + step)).await;
    let mut row = Row::of(&mut conn, key).await;
    for at in [Row::LAST, Row::USED, Row::FENCE, Row::ACQUIRED] {
        let later = row.number(at) + u64::try_from(STEP.as_micros()).unwrap();
        row = row.with(at, later);
    }
    row.put(&mut conn, key).await;
}

#[tokio::test]
async fn a_dead_holder_is_replaced_within_its_ttl() {
    let server = Redis::start();
    let store = store(&server).await;
    let fence = take(&store, &claim("k", TTL)).await.fence;
    set_back(&server, "k").await;
    let began = Instant::now();
    assert!(is_refused(&store, &claim("k", TTL)).await, "its holder may have renewed it right before the step");
    let (grant, _) = until_granted(&store, &claim("k", TTL)).await;
    // Redis counts in whole milliseconds.
    assert!(began.elapsed() + Duration::from_millis(1) >= TTL, "held for {:?}", began.elapsed());
    assert!(began.elapsed() < PATIENCE);
    let last = fence.get() + u64::try_from(STEP.as_micros()).unwrap() + 127;
    assert_eq!(grant.fence.get(), last + 1, "it rises, above the clock");
}

#[tokio::test]
async fn every_operation_cuts_the_expiry_and_a_living_holder_goes_on() {
    let server = Redis::start();
    let store = store(&server).await;
    let ttl = Duration::from_secs(30);
    let held = claim("k", ttl);
    take(&store, &held).await;
    for operation in ["look", "list", "renew"] {
        set_back(&server, "k").await;
        let info = match operation {
            "look" => store.lease_look(&held.key).await.unwrap().unwrap().info,
            "list" => store.lease_list("k", 1).await.unwrap().pop().unwrap().info,
            _ => {
                let renewed = store.lease_renew(&[Renewal::new("k", held.token, ttl)]).await.unwrap();
                assert_eq!(renewed, [Answer::Done]);
                store.lease_look(&held.key).await.unwrap().unwrap().info
            }
        };
        assert!(info.expires_in <= ttl && info.expires_in > ttl / 2, "{operation}: {:?}", info.expires_in);
        assert!(info.held_for < STEP, "{operation}: {:?}", info.held_for);
    }
    let released = store.lease_release(&held.key, held.token, Duration::ZERO).await.unwrap();
    assert_eq!(released, Answer::Done);
}

#[tokio::test]
async fn a_fence_above_the_clock_is_not_swept() {
    let server = Redis::start();
    let store = store(&server).await;
    let held = claim("k", TTL);
    take(&store, &held).await;
    set_back(&server, "k").await;
    store.lease_release(&held.key, held.token, Duration::ZERO).await.unwrap();
    assert_eq!(store.lease_sweep(Duration::ZERO, 10).await.unwrap(), 0);
}
