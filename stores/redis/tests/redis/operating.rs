//! lockkit's requests on one server, round trips, and holders that were stopped.

use std::{process::Stdio, time::Duration};

use lockkit::{
    Leases, Released,
    store::{Acquired, AcquiredAll, Answer, Claim, LeaseStore, Release, Renewal},
    testing::Oracle,
};
use lockkit_redis::{Quorum, RedisStore, RedisStoreBuilder};
use lockkit_store_servers::redis::Redis;
use redis::Client;
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::Command,
    task::JoinSet,
    time::sleep,
};

use crate::support::{PATIENCE, Row, builder, calls, claim, declared, is_refused, plain, send, store, take, until};

const TTL: Duration = Duration::from_secs(30);

/// Two processes with leases in the same server.
async fn two(server: &Redis) -> [Leases<RedisStore>; 2] {
    [Leases::new(declared(builder(server)).await), Leases::new(builder(server).connect().await.unwrap())]
}

#[tokio::test]
async fn permits_readers_and_writers_exclude_across_processes() {
    let server = Redis::start();
    let [here, there] = two(&server).await;
    let (first, second) = (here.semaphore("s", 2).acquire().await.unwrap(), there.semaphore("s", 2).acquire().await);
    assert!(here.semaphore("s", 2).try_acquire().await.unwrap().is_none());
    first.release().await.unwrap();
    let third = there.semaphore("s", 2).acquire().await.unwrap();
    assert!(here.semaphore("s", 2).take(2).try_acquire().await.unwrap().is_none());
    drop((second.unwrap(), third));

    let (one, other) = (here.rw("c").read().acquire().await.unwrap(), there.rw("c").read().acquire().await.unwrap());
    assert!(here.rw("c").write().try_acquire().await.unwrap().is_none());
    one.release().await.unwrap();
    other.release().await.unwrap();
    let writer = here.rw("c").write().acquire().await.unwrap();
    assert!(there.rw("c").read().try_acquire().await.unwrap().is_none());
    drop(writer);
}

#[tokio::test]
async fn a_sweep_goes_past_leases_in_use_and_finds_rows_though_the_set_of_times_was_lost() {
    let server = Redis::start();
    let store = declared(builder(&server)).await;
    let free = async |key: &str| {
        let claim = claim(key, TTL);
        take(&store, &claim).await;
        store.lease_release(&claim.key, claim.token, Duration::ZERO).await.unwrap();
    };
    for key in ["used:1", "used:2", "used:3"] {
        take(&store, &claim(key, TTL)).await;
    }
    for key in ["1", "2", "3", "4"] {
        free(key).await;
    }
    sleep(Duration::from_millis(20)).await;
    assert_eq!(store.lease_sweep(Duration::from_millis(1), 2).await.unwrap(), 2);
    assert_eq!(store.lease_sweep(Duration::from_millis(1), 10).await.unwrap(), 2);

    free("5").await;
    let mut conn = plain(&server).await;
    send::<i64>(&mut conn, "DEL lockkit:times").await;
    // The next claim of the key that checks the server.
    sleep(Duration::from_secs(1)).await;
    free("5").await;
    sleep(Duration::from_millis(20)).await;
    assert_eq!(store.lease_sweep(Duration::from_millis(1), 10).await.unwrap(), 1);
}

#[tokio::test]
async fn fair_requests_of_many_processes_are_exclusive_and_all_are_served() {
    let server = Redis::start();
    let oracle = Oracle::new();
    declared(builder(&server)).await;
    let mut working = JoinSet::new();
    for _ in 0..4 {
        let leases = Leases::builder(builder(&server).connect().await.unwrap()).wait(PATIENCE).build().unwrap();
        let oracle = oracle.clone();
        working.spawn(async move {
            for _ in 0..5 {
                let lease = leases.lease("k").fair().acquire().await.unwrap();
                let held = oracle.hold(&lease);
                sleep(Duration::from_millis(2)).await;
                drop(held);
                lease.release().await.unwrap();
            }
        });
    }
    working.join_all().await;
    assert_eq!(oracle.assert_exclusive(), 20);
}

#[tokio::test]
async fn operators_list_show_steal_and_sweep() {
    let server = Redis::start();
    let [here, there] = two(&server).await;
    let lease = here.lease("job:1").acquire().await.unwrap();
    let listed = there.list("job:").await.unwrap();
    assert_eq!((listed.len(), listed[0].fence, listed[0].ttl), (1, lease.fence(), Some(TTL)));
    let stolen = there.steal("job:1").await.unwrap().expect("it is held");
    assert_eq!(stolen.fence, lease.fence());
    let heir = there.lease("job:1").acquire().await.unwrap();
    assert!(heir.fence().get() > lease.fence().get() + 127);
    assert_eq!(lease.release().await.unwrap(), Released::AlreadyLost);
    assert_eq!(there.show("job:1").await.unwrap().unwrap().fence, heir.fence());
    heir.release().await.unwrap();
    let store = there.store();
    until("it can be forgotten", async || store.lease_sweep(Duration::from_millis(1), 10).await.unwrap() > 0).await;
    let mut conn = plain(&server).await;
    until("only what is known of the server is left", async || {
        send::<Vec<String>>(&mut conn, "KEYS *").await == ["lockkit:epoch"]
    })
    .await;
    assert_eq!(store.profile().fence_domain, "redis");
}

#[tokio::test]
async fn each_operation_is_one_request_whatever_the_number_of_leases() {
    const LEASES: usize = 500;
    let server = Redis::start();
    let (store, mut conn) = (store(&server).await, plain(&server).await);
    let claims: Vec<_> = (0..LEASES).map(|it| claim(&format!("k{it:03}"), TTL)).collect();
    let renewals: Vec<_> = claims.iter().map(|it| Renewal::new(&it.key, it.token, TTL)).collect();
    let releases: Vec<_> = claims.iter().map(|it| Release::new(&it.key, it.token, Duration::ZERO)).collect();
    for round in ["loading the scripts", "measured"] {
        let before = (calls(&mut conn, "evalsha").await, calls(&mut conn, "eval").await);
        store.lease_acquire_all(&claims).await.unwrap();
        assert_eq!(store.lease_renew(&renewals).await.unwrap(), vec![Answer::Done; LEASES]);
        assert_eq!(store.lease_list("", 1000).await.unwrap().len(), LEASES);
        assert_eq!(store.lease_release_all(&releases).await.unwrap(), vec![Answer::Done; LEASES]);
        let after = (calls(&mut conn, "evalsha").await, calls(&mut conn, "eval").await);
        if round == "measured" {
            assert_eq!((after.0 - before.0, after.1 - before.1), (4, 0), "{LEASES} leases");
        }
    }
}

#[tokio::test]
async fn claims_that_follow_each_other_check_the_server_once() {
    const CLAIMS: u64 = 200;
    let server = Redis::start();
    let (store, mut conn) = (store(&server).await, plain(&server).await);
    let before = calls(&mut conn, "info").await;
    for _ in 0..CLAIMS {
        let held = claim("k", TTL);
        take(&store, &held).await;
        store.lease_release(&held.key, held.token, Duration::ZERO).await.unwrap();
    }
    let checks = calls(&mut conn, "info").await - before;
    assert!(checks < CLAIMS, "{checks} calls of INFO");
}

#[tokio::test]
async fn a_key_that_one_request_names_twice_is_granted_once() {
    let server = Redis::start();
    let (store, mut conn) = (store(&server).await, plain(&server).await);
    // The first claim checks the server, the later ones do not.
    for round in ["checks", "does not check"] {
        let twice = [claim("k", TTL), claim("k", TTL)];
        let answers = store.lease_acquire_each(&twice).await.unwrap();
        let [Some(Acquired::Granted(_)), Some(Acquired::Held { .. })] = &answers[..] else {
            panic!("{round}: {answers:?}")
        };
        store.lease_release(&twice[0].key, twice[0].token, Duration::ZERO).await.unwrap();
        let all = store.lease_acquire_all(&twice).await.unwrap();
        assert!(matches!(all, AcquiredAll::Held { .. }), "{round}: {all:?}");
        assert_eq!(send::<usize>(&mut conn, "EXISTS k").await, 0, "{round}");
    }
}

#[tokio::test]
async fn a_check_does_not_count_for_longer_because_the_clock_was_set_back() {
    let server = Redis::start();
    let (store, mut conn) = (declared(builder(&server)).await, plain(&server).await);
    take(&store, &claim("k", TTL)).await;
    // As if the clock had been set back by an hour: keys expire at a time of the clock.
    assert_eq!(send::<usize>(&mut conn, "PEXPIRE lockkit:open 3600000").await, 1);
    sleep(Duration::from_millis(1100)).await;
    let before = calls(&mut conn, "info").await;
    take(&store, &claim("other", TTL)).await;
    // One of them counts.
    assert!(calls(&mut conn, "info").await > before + 1);
}

#[tokio::test]
async fn a_quarantine_that_a_list_begins_ends_the_check_before_it() {
    let server = Redis::start();
    let (store, mut conn) = (declared(builder(&server)).await, plain(&server).await);
    take(&store, &claim("k", TTL)).await;
    // As if it had been another server when the epoch was written.
    let _written: usize = send(&mut conn, "HSET lockkit:epoch run abc").await;
    assert!(store.lease_list("", 10).await.is_err(), "it may have forgotten leases");
    assert!(is_refused(&store, &claim("other", TTL)).await, "nothing is granted in a quarantine");
}

#[tokio::test]
async fn a_lease_that_is_taken_again_after_a_list_is_listed() {
    let server = Redis::start();
    let store = store(&server).await;
    for _ in 0..3 {
        let held = [claim("a", TTL), claim("b", TTL)];
        take(&store, &held[0]).await;
        assert!(store.lease_acquire_each(&held[1..]).await.unwrap()[0].is_some());
        assert_eq!(store.lease_list("", 10).await.unwrap().len(), 2);
        let releases = held.map(|it| Release::new(it.key, it.token, Duration::ZERO));
        assert_eq!(store.lease_release_all(&releases).await.unwrap(), [Answer::Done; 2]);
        assert!(store.lease_list("", 10).await.unwrap().is_empty());
    }
}

#[tokio::test]
async fn a_list_looks_at_1000_names_in_a_call_and_forgets_released_ones() {
    let server = Redis::start();
    let (store, mut conn) = (store(&server).await, plain(&server).await);
    let claims: Vec<_> = (0..2500).map(|it| claim(&format!("k{it:04}"), TTL)).collect();
    for some in claims.chunks(500) {
        store.lease_acquire_all(some).await.unwrap();
    }
    let is_kept = |it: &Claim| it.key.ends_with("99");
    let free: Vec<_> = claims.iter().filter(|it| !is_kept(it)).collect();
    for some in free.chunks(500) {
        let releases: Vec<_> = some.iter().map(|it| Release::new(&it.key, it.token, Duration::ZERO)).collect();
        store.lease_release_all(&releases).await.unwrap();
    }
    let kept: Vec<_> = claims.iter().filter(|it| is_kept(it)).map(|it| it.key.clone()).collect();
    let mut list = async |limit: u32| {
        let before = calls(&mut conn, "evalsha").await + calls(&mut conn, "eval").await;
        let listed: Vec<_> = store.lease_list("k", limit).await.unwrap().into_iter().map(|it| it.info.key).collect();
        (listed, calls(&mut conn, "evalsha").await + calls(&mut conn, "eval").await - before)
    };
    list(1).await;
    assert_eq!(list(12).await, (kept[..12].to_vec(), 2), "1200 names, of which 99 were forgotten");
    assert_eq!(list(100).await, (kept.clone(), 2), "1300 names are left to look at");
    assert_eq!(list(100).await, (kept, 1));
}

#[tokio::test]
async fn holders_and_keys_may_be_any_text() {
    let texts = ["", " ", "a b\nc\r\n", "\0", "lockkit1", "{k}", "\u{1f512}é", "%d %s", &"long".repeat(20_000)];
    let server = Redis::start();
    let store = store(&server).await;
    for holder in texts {
        for text in texts {
            let key = format!("k{text}").chars().take(100).collect::<String>();
            let dead = Claim::new(&key, lockkit::store::Token::random(), holder, Duration::from_millis(50));
            let fence = take(&store, &dead).await.fence;
            let shown = store.lease_look(&dead.key).await.unwrap();
            assert!(shown.is_none_or(|it| it.info.holder == dead.holder.to_string() && it.info.key == dead.key));
            until("it has expired", async || store.lease_look(&dead.key).await.unwrap().is_none()).await;
            let heir = Claim::new(&key, lockkit::store::Token::random(), text, TTL);
            let previous = take(&store, &heir).await.previous.expect("it was not released");
            assert_eq!((previous.holder.as_str(), previous.fence), (&*dead.holder, fence));
            assert_eq!(store.lease_renew(&[Renewal::new(&*key, heir.token, TTL)]).await.unwrap(), [Answer::Done]);
            let listed = store.lease_list(&key, 10).await.unwrap().pop().expect("it is held");
            assert_eq!((listed.info.key, listed.info.holder.as_str()), (heir.key.clone(), text));
            assert_eq!((listed.info.renewals, listed.info.ttl), (1, Some(TTL)));
            store.lease_release(&heir.key, heir.token, Duration::ZERO).await.unwrap();
        }
    }
}

#[tokio::test]
async fn a_grant_has_room_for_127_more_fences() {
    let server = Redis::start();
    let store = store(&server).await;
    take(&store, &claim("k", Duration::from_millis(50))).await;
    until("it has expired", async || store.lease_look(&"k".into()).await.unwrap().is_none()).await;
    // Above the clock, so that each fence is made from the last one.
    let ahead = send::<Vec<u64>>(&mut plain(&server).await, "TIME").await[0] * 1_000_000 + 3_600_000_000;
    Row::released(ahead, 0).put(&mut plain(&server).await, "k").await;
    let mut last = ahead;
    for _ in 0..100 {
        let held = claim("k", TTL);
        let grant = take(&store, &held).await;
        assert!(grant.fence.get() > last, "{} was given out before", grant.fence);
        assert_eq!(grant.spare_fences, 127);
        last = grant.fence.get() + grant.spare_fences;
        store.lease_release(&held.key, held.token, Duration::ZERO).await.unwrap();
    }
}

#[tokio::test]
async fn a_repeated_claim_hears_of_the_former_holder_again() {
    let server = Redis::start();
    let store = store(&server).await;
    let dead = Claim::new("k", lockkit::store::Token::random(), "dead", Duration::from_millis(50));
    let fence = take(&store, &dead).await.fence;
    until("it has expired", async || store.lease_look(&dead.key).await.unwrap().is_none()).await;
    let heir = claim("k", TTL);
    for _ in 0..2 {
        let previous = take(&store, &heir).await.previous.expect("it was not released");
        assert_eq!((previous.holder.as_str(), previous.fence), ("dead", fence));
    }
}

#[test]
fn public_futures_can_be_spawned() {
    fn can_be_sent(_: impl Send) {}
    let _ = |store: RedisStore, quorum: Quorum, builder: RedisStoreBuilder| {
        can_be_sent(store.declare_new());
        can_be_sent(store.quarantined_for());
        can_be_sent(store.lease_freed(&"k".into()));
        can_be_sent(quorum.declare_new());
        can_be_sent(quorum.lease_freed(&"k".into()));
        can_be_sent(quorum.lease_acquire(&claim("k", TTL)));
        can_be_sent(Quorum::with([builder.clone()]));
        can_be_sent(builder.connect());
    };
}

/// The address of the server, for the process that this test stops.
const HOLDER: &str = "LOCKKIT_TEST_HOLDER";

/// The test is its own holder: it starts itself in a second process.
#[tokio::test]
async fn a_process_that_was_stopped_past_its_ttl_changes_nothing() {
    const SHORT: Duration = Duration::from_millis(400);
    if let Ok(url) = std::env::var(HOLDER) {
        let store = RedisStore::connect(Client::open(url).unwrap()).await.unwrap();
        let leases = Leases::builder(store).ttl(SHORT).build().unwrap();
        let lease = leases.lease("k").acquire().await.unwrap();
        println!("\nholds {}", lease.fence());
        lease.lost().await;
        println!("\nreleased {:?}", lease.release().await);
        return;
    }
    let server = Redis::start();
    let [_, there] = two(&server).await;
    let mut holder = Command::new(std::env::current_exe().unwrap())
        .args(["operating::a_process_that_was_stopped_past_its_ttl_changes_nothing", "--exact", "--nocapture"])
        .env(HOLDER, server.url())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(holder.stdout.take().unwrap()).lines();
    let mut said = async |what: &str| loop {
        let line = lines.next_line().await.unwrap().expect("the holder goes on");
        if let Some(text) = line.strip_prefix(what) {
            return text.to_owned();
        }
    };
    let fence: u64 = said("holds ").await.parse().unwrap();
    let pid = holder.id().unwrap().to_string();
    let signal = async |it: &str| assert!(Command::new("kill").args([it, &*pid]).status().await.unwrap().success());
    signal("-STOP").await;
    let heir = there.lease("k").wait(PATIENCE).acquire().await.unwrap();
    assert!(heir.fence().get() > fence + 127);
    assert_eq!(heir.previous().expect("it had expired").fence.get(), fence);
    signal("-CONT").await;
    assert_eq!(said("released ").await, "Ok(AlreadyLost)");
    let shown = there.show("k").await.unwrap().expect("the heir holds it");
    assert_eq!(shown.fence, heir.fence());
    assert!(heir.is_trusted());
    assert!(holder.wait().await.unwrap().success());
}
