//! Values that lockkit did not write: they stay as they are, and an error says what is there.

use std::{error::Error as _, time::Duration};

use lockkit::{
    Error, Leases,
    store::{Answer, LeaseStore, Release, Renewal},
};
use lockkit_redis::Layout;
use lockkit_store_servers::redis::Redis;
use proptest::{
    collection::vec,
    prelude::{Strategy, any},
    sample::Index,
    strategy::ValueTree,
    test_runner::{Config, TestRunner},
};
use redis::aio::MultiplexedConnection;
use tokio::time::sleep;

use crate::support::{Row, builder, claim, declared, is_refused, plain, send, store, take};

const TTL: Duration = Duration::from_secs(30);

/// A command that writes each type of value, at the name `NAME`.
const VALUES: [(&str, &str); 6] = [
    ("string", "SET NAME {\"host\":\"db1\"}"),
    ("list", "RPUSH NAME a"),
    ("set", "SADD NAME a"),
    ("zset", "ZADD NAME 1 a"),
    ("hash", "HSET NAME host db1"),
    ("stream", "XADD NAME 1-1 a b"),
];

async fn dump(conn: &mut MultiplexedConnection, name: &str) -> Vec<u8> {
    send(conn, &format!("DUMP {name}")).await
}

/// The error with all of its sources.
fn chain(err: &Error) -> String {
    let (mut texts, mut source) = (vec![err.to_string()], err.source());
    while let Some(it) = source {
        texts.push(it.to_string());
        source = it.source();
    }
    texts.join(": ")
}

#[tokio::test]
async fn a_value_of_another_type_stays_and_the_error_says_what_it_is() {
    let server = Redis::start();
    let mut conn = plain(&server).await;
    for (layout, own) in [(Layout::Token, "string"), (Layout::Redisson, "")] {
        let store = declared(builder(&server).layout(layout)).await;
        let leases = Leases::new(store.clone());
        for (kind, command) in VALUES.iter().filter(|it| it.0 != own) {
            let name = format!("{layout:?}:{kind}");
            send::<redis::Value>(&mut conn, &command.replace("NAME", &name)).await;
            let before = dump(&mut conn, &name).await;
            let held = claim(&name, TTL);
            let what = format!("`{name}` has a value of the type {kind}");
            for refused in [
                store.lease_acquire(&held).await.err(),
                store.lease_acquire_all(&[claim("a", TTL), held.clone()]).await.err(),
                leases.show(&*name).await.err(),
                leases.steal(&*name).await.err(),
            ] {
                let text = chain(&refused.expect("it is no lock"));
                assert!(text.contains(&what), "{text}");
            }
            let renewal = [Renewal::new(&held.key, held.token, TTL)];
            assert_eq!(store.lease_renew(&renewal).await.unwrap(), [Answer::Gone]);
            assert_eq!(store.lease_release(&held.key, held.token, TTL).await.unwrap(), Answer::Gone);
            assert!(leases.list("").await.unwrap().is_empty());
            store.lease_sweep(Duration::from_millis(1), 100).await.unwrap();
            assert_eq!(dump(&mut conn, &name).await, before, "{name}");
        }
        assert!(store.lease_look(&"a".into()).await.unwrap().is_none(), "nothing was taken");
    }
}

#[tokio::test]
async fn a_value_without_an_expiry_may_be_data_so_it_is_refused_and_never_freed() {
    let server = Redis::start();
    let (store, mut conn) = (store(&server).await, plain(&server).await);
    let leases = Leases::new(store.clone());
    send::<()>(&mut conn, "SET app:config {\"host\":\"db1\",\"pool\":20}").await;
    assert!(is_refused(&store, &claim("app:config", TTL)).await);
    let shown = leases.show("app:config").await.unwrap().expect("it is in the way");
    assert_eq!(shown.holder, "another client: {\"host\":…, without an expiry");
    let text = chain(&leases.steal("app:config").await.unwrap_err());
    assert!(text.contains("`app:config` has a value of the type string"), "{text}");
    assert_eq!(send::<String>(&mut conn, "GET app:config").await, "{\"host\":\"db1\",\"pool\":20}");

    // With other releases in one call, only this one fails.
    let ours = claim("k", TTL);
    take(&store, &ours).await;
    let theirs = store.lease_look(&"app:config".into()).await.unwrap().unwrap().token;
    let releases = [("app:config".into(), theirs), (ours.key.clone(), ours.token)]
        .map(|(key, token): (lockkit::Key, _)| Release::new(key, token, Duration::ZERO));
    assert!(store.lease_release_all(&releases).await.is_err());
    assert_eq!(send::<usize>(&mut conn, "EXISTS app:config").await, 1);
    assert!(store.lease_look(&ours.key).await.unwrap().is_none());
}

#[tokio::test]
async fn values_at_lockkits_own_names_stay_and_are_named() {
    for name in ["lockkit:names", "lockkit:times", "lockkit:epoch", "lockkit:open", "lockkit:{k}"] {
        for (kind, command) in VALUES.iter().filter(|it| it.0 != "zset" || !name.ends_with("es")) {
            let server = Redis::start();
            let (store, mut conn) = (store(&server).await, plain(&server).await);
            send::<i64>(&mut conn, &format!("DEL {name}")).await;
            send::<redis::Value>(&mut conn, &command.replace("NAME", name)).await;
            let before = dump(&mut conn, name).await;
            let text = chain(&store.lease_acquire(&claim("k", TTL)).await.expect_err(name));
            assert!(text.contains(&format!("`{name}` has a value of the type {kind}")), "{text}");
            drop((store.lease_list("", 10).await, store.lease_sweep(Duration::from_millis(1), 10).await));
            if name == "lockkit:epoch" {
                let text = chain(&store.declare_new().await.unwrap_err());
                assert!(text.contains(&format!("`{name}` has a value of the type {kind}")), "{text}");
            }
            assert_eq!(dump(&mut conn, name).await, before, "{name} {kind}");
            assert_eq!(send::<usize>(&mut conn, "EXISTS k").await, 0, "nothing was taken");
        }
    }
}

#[tokio::test]
async fn what_was_put_over_one_lease_harms_no_other() {
    for command in ["SET NAME theirs", "HSET NAME host db1", "APPEND NAME more", "SETRANGE NAME 24 theirs"] {
        let server = Redis::start();
        let (store, mut conn) = (store(&server).await, plain(&server).await);
        let (one, other) = (claim("a", TTL), claim("b", TTL));
        take(&store, &one).await;
        take(&store, &other).await;
        let foreign = !command.contains("NAME more");
        if command.starts_with('H') {
            send::<i64>(&mut conn, "DEL lockkit:{a}").await;
        }
        send::<redis::Value>(&mut conn, &command.replace("NAME", "lockkit:{a}")).await;
        let before = dump(&mut conn, "lockkit:{a}").await;

        let renewals = [&one, &other].map(|it| Renewal::new(&it.key, it.token, TTL));
        assert_eq!(store.lease_renew(&renewals).await.unwrap(), [Answer::Done, Answer::Done], "{command}");
        let listed = store.lease_list("", 10).await.unwrap();
        assert_eq!(listed.iter().map(|it| it.info.key.as_str()).collect::<Vec<_>>(), ["a", "b"], "{command}");
        let releases = [&one, &other].map(|it| Release::new(&it.key, it.token, Duration::ZERO));
        assert_eq!(store.lease_release_all(&releases).await.unwrap(), [Answer::Done, Answer::Done], "{command}");
        assert!(is_free(&mut conn).await);
        sleep(Duration::from_millis(5)).await;
        store.lease_sweep(Duration::from_millis(1), 10).await.unwrap();
        assert_eq!(send::<usize>(&mut conn, "EXISTS lockkit:{b}").await, 0, "{command}: it is forgotten");
        if foreign {
            assert_eq!(dump(&mut conn, "lockkit:{a}").await, before, "{command}");
        }
    }
}

// Many releases that are sent together. One that is sent again alone gets the error.
#[tokio::test]
async fn a_release_in_a_batch_leaves_what_need_not_be_a_lock_and_frees_the_others() {
    let server = Redis::start();
    let (store, mut conn) = (store(&server).await, plain(&server).await);
    let [first, last] = ["first", "last"].map(|it| claim(it, TTL));
    take(&store, &first).await;
    take(&store, &last).await;
    send::<()>(&mut conn, "SET data db1").await;
    let data = store.lease_look(&"data".into()).await.unwrap().expect("it looks like a lock").token;
    let releases = [("first", first.token), ("data", data), ("last", last.token)];
    let releases = releases.map(|(key, token)| Release::new(key, token, Duration::ZERO));
    let answers = store.lease_release_all_unpinned(&releases).await.unwrap();
    assert_eq!(answers, [Answer::Done, Answer::Busy, Answer::Done]);
    assert_eq!(send::<usize>(&mut conn, "EXISTS first data last").await, 1);
    let again = store.lease_release_all_unpinned(&releases).await.unwrap();
    assert_eq!(again, [Answer::Gone, Answer::Busy, Answer::Gone]);
    assert!(store.lease_release_all(&releases).await.is_err());
}

#[tokio::test]
async fn a_row_that_lockkit_did_not_write_is_refused_and_stays() {
    let server = Redis::start();
    let (store, mut conn) = (store(&server).await, plain(&server).await);
    let held = claim("k", Duration::from_millis(50));
    take(&store, &held).await;
    let row = || async { Row::of(&mut plain(&server).await, "model").await };
    Row::of(&mut conn, "k").await.put(&mut conn, "model").await;
    send::<i64>(&mut conn, "DEL k lockkit:{k}").await;
    let length = row().await.0.len();
    let changed = |at: usize, bytes: &[u8], row: Row| {
        let mut row = row.0;
        row.splice(at..at + bytes.len(), bytes.iter().copied());
        Row(row)
    };
    let mut rows = vec![
        Row(Vec::new()),
        Row(b"1".to_vec()),
        Row(b"lockkit1".to_vec()),
        Row(Row::released(1, 1).0[..23].to_vec()),
        changed(7, b"2", Row::released(1, 1)),
        Row([Row::released(1, 1).0, vec![0]].concat()),
        Row([row().await.0, vec![0]].concat()),
        changed(24, &u32::MAX.to_le_bytes(), row().await),
        changed(24, &31_u32.to_le_bytes(), row().await),
    ];
    for at in 25..length {
        rows.push(Row(row().await.0[..at].to_vec()));
    }
    for number in [1 << 53, (1 << 53) + 1, 1 << 63, u64::MAX] {
        rows.extend([Row::released(number, 1), Row::released(1, number)]);
        for at in [Row::LAST, Row::USED, Row::FENCE, Row::ACQUIRED, Row::TTL] {
            rows.push(row().await.with(at, number));
        }
    }
    for it in rows {
        it.put(&mut conn, "k").await;
        let text = chain(&store.lease_acquire(&claim("k", TTL)).await.expect_err("it is no row"));
        assert!(text.contains("`lockkit:{k}` has a value of the type string"), "{text}");
        let together = store.lease_acquire_each(&[claim("k", TTL), claim("other", TTL)]).await.unwrap();
        assert!(together[0].is_none() && together[1].is_some(), "{:?}", it.0);
        send::<i64>(&mut conn, "DEL other").await;
        drop((store.lease_list("", 10).await.unwrap(), store.lease_sweep(Duration::ZERO, 10).await.unwrap()));
        assert_eq!(Row::of(&mut conn, "k").await.0, it.0);
        assert_eq!(send::<usize>(&mut conn, "EXISTS k").await, 0, "nothing was taken");
    }
}

#[tokio::test]
async fn random_bytes_in_a_row_harm_no_other_lease_and_stay_if_they_are_no_row() {
    let server = Redis::start();
    let (store, mut conn) = (store(&server).await, plain(&server).await);
    let other = claim("other", TTL);
    take(&store, &other).await;
    let mut runner = TestRunner::new(Config { failure_persistence: None, ..Config::default() });
    let changes = vec((any::<Index>(), any::<u8>(), 0..3_u8), 1..4);
    for number in 0..300 {
        let ours = claim(&format!("k{number}"), TTL);
        take(&store, &ours).await;
        let mut row = Row::of(&mut conn, &ours.key).await;
        for (at, byte, how) in changes.new_tree(&mut runner).unwrap().current() {
            let at = at.index(row.0.len() + 1);
            match how {
                0 => row.0.insert(at, byte),
                1 => row.0.truncate(at),
                _ => row.0.iter_mut().skip(at).take(1).for_each(|it| *it = byte),
            }
        }
        row.put(&mut conn, &ours.key).await;
        let renewals = [&ours, &other].map(|it| Renewal::new(&it.key, it.token, TTL));
        assert_eq!(store.lease_renew(&renewals).await.unwrap(), [Answer::Done; 2], "{:?}", row.0);
        drop((store.lease_look(&ours.key).await, store.lease_acquire(&ours).await));
        let listed = store.lease_list("", 10).await.unwrap();
        assert!(listed.iter().any(|it| it.token == other.token), "{:?}", row.0);
        let released = store.lease_release(&ours.key, ours.token, Duration::ZERO).await;
        assert_eq!(released.unwrap(), Answer::Done, "{:?}", row.0);
        drop((store.lease_acquire(&claim(&ours.key, TTL)).await, store.lease_sweep(Duration::ZERO, 10).await.unwrap()));
        if !row.0.starts_with(b"lockkit1") {
            assert_eq!(Row::of(&mut conn, &ours.key).await.0, row.0);
        }
        send::<i64>(&mut conn, &format!("DEL {key} lockkit:{{{key}}}", key = ours.key)).await;
    }
}

#[tokio::test]
async fn the_row_of_an_older_lockkit_is_refused_and_stays() {
    let server = Redis::start();
    let (store, mut conn) = (store(&server).await, plain(&server).await);
    send::<i64>(&mut conn, "HSET lockkit:{k} fence 7 last 134 token  holder a acquired 7 expires 9 ttl 30000").await;
    let before = dump(&mut conn, "lockkit:{k}").await;
    let text = chain(&store.lease_acquire(&claim("k", TTL)).await.expect_err("it is a hash"));
    assert!(text.contains("`lockkit:{k}` has a value of the type hash, which is no record of lockkit"), "{text}");
    assert_eq!(dump(&mut conn, "lockkit:{k}").await, before);
}

#[tokio::test]
async fn fences_stay_exact_up_to_the_last_one() {
    let server = Redis::start();
    let (store, mut conn) = (store(&server).await, plain(&server).await);
    let most = (1 << 53) - 1;
    for (last, fence) in
        [(most - 129, Some(most - 128)), (most - 128, Some(most - 127)), (most - 127, None), (most, None)]
    {
        for is_new in [true, false] {
            Row::released(last, 1).put(&mut conn, "k").await;
            let held = claim("k", TTL);
            // The first way is that of a lease on a server that was checked a moment ago.
            if is_new {
                send::<i64>(&mut conn, "DEL lockkit:open").await;
            } else {
                take(&store, &claim("other", Duration::from_millis(50))).await;
                send::<i64>(&mut conn, "DEL other").await;
                Row::released(1, 1).put(&mut conn, "other").await;
            }
            let granted = store.lease_acquire(&held).await;
            let Some(fence) = fence else {
                assert!(chain(&granted.unwrap_err()).contains("cannot rise any more"));
                let together = store.lease_acquire_each(&[claim("k", TTL), claim("third", TTL)]).await.unwrap();
                assert!(together[0].is_none() && together[1].is_some());
                assert_eq!(send::<usize>(&mut conn, "EXISTS k").await, 0, "nothing was taken");
                continue;
            };
            let Ok(lockkit::store::Acquired::Granted(grant)) = granted else { panic!("{granted:?}") };
            assert_eq!(grant.fence.get(), fence);
            assert_eq!(store.lease_look(&held.key).await.unwrap().unwrap().info.fence.get(), fence);
            assert_eq!(store.lease_renew(&[Renewal::new("k", held.token, TTL)]).await.unwrap(), [Answer::Done]);
            let row = Row::of(&mut conn, "k").await;
            assert_eq!((row.number(Row::LAST), row.number(Row::FENCE)), (fence + 127, fence));
            store.lease_release(&held.key, held.token, Duration::ZERO).await.unwrap();
            assert_eq!(Row::of(&mut conn, "k").await.number(Row::LAST), fence + 127);
        }
    }
}

async fn is_free(conn: &mut MultiplexedConnection) -> bool {
    send::<usize>(conn, "EXISTS a b").await == 0
}

#[tokio::test]
async fn releases_and_renewals_need_no_sorted_sets() {
    let server = Redis::start();
    let (store, mut conn) = (store(&server).await, plain(&server).await);
    let held = claim("a", TTL);
    take(&store, &held).await;
    for name in ["lockkit:names", "lockkit:times"] {
        send::<()>(&mut conn, &format!("SET {name} theirs")).await;
    }
    assert_eq!(store.lease_renew(&[Renewal::new("a", held.token, TTL)]).await.unwrap(), [Answer::Done]);
    assert_eq!(store.lease_release(&held.key, held.token, Duration::ZERO).await.unwrap(), Answer::Done);
    assert_eq!(send::<String>(&mut conn, "GET lockkit:names").await, "theirs");
}

#[tokio::test]
async fn of_another_clients_value_only_the_beginning_is_shown() {
    let server = Redis::start();
    let (store, mut conn) = (store(&server).await, plain(&server).await);
    let leases = Leases::builder(store).wait(Duration::ZERO).build().unwrap();
    redis::cmd("SET")
        .arg("k")
        .arg("5f4d\x1b[2J\n-secret-session")
        .arg("PX")
        .arg(30_000)
        .exec_async(&mut conn)
        .await
        .unwrap();
    let shown = leases.show("k").await.unwrap().expect("it is held");
    let refused = leases.lease("k").acquire().await.unwrap_err();
    let stolen = leases.steal("k").await.unwrap().expect("it is held");
    for text in [format!("{shown:?}"), format!("{refused} {refused:?}"), format!("{stolen:?}")] {
        assert!(text.contains("another client: 5f4d[2J-…"), "{text}");
        assert!(!text.contains("secret") && !text.contains('\x1b'), "{text}");
    }
}
