//! Locks and stock divided between two servers.

use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use lockkit::{Error, Leases, Result, Stock, Taken};
use sqlx::{MySql, MySqlPool};
use support::{JoinSet, MariaDb, TestDb};

/// Two servers of one type, or `None` if one of them is left out.
async fn two_servers() -> Option<(TestDb<MariaDb>, TestDb<support::MySql>)> {
    Some((TestDb::unless_left_out().await?, TestDb::unless_left_out().await?))
}

fn pools(mariadb: &TestDb<MariaDb>, mysql: &TestDb<support::MySql>) -> [(&'static str, MySqlPool); 2] {
    [("mariadb", mariadb.pool.clone()), ("mysql", mysql.pool.clone())]
}

/// The recipe of `docs/scale.md`: the database that the key belongs to: the one whose name and the key together have
/// the greatest hash.
fn shard_of<'a, T>(shards: &'a [(&'static str, T)], key: &str) -> &'a T {
    let hash = |name: &str| {
        let fnv = [name, "/", key]
            .concat()
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
        // The last bytes of keys differ most, and FNV alone leaves them in the lowest bits.
        (fnv ^ (fnv >> 32)).wrapping_mul(0xff51_afd7_ed55_8ccd)
    };
    &shards.iter().max_by_key(|(name, _)| hash(name)).expect("there is at least one").1
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_of_two_servers_exclude_and_share_the_keys() {
    let Some((mariadb, mysql)) = two_servers().await else { return };
    let processes: Vec<_> =
        (0..2).map(|_| pools(&mariadb, &mysql).map(|(name, pool)| (name, Leases::new(pool)))).collect();
    let inside: Arc<[AtomicU32; 8]> = Arc::default();
    let mut tasks = JoinSet::new();
    for task in 0..8 {
        let (shards, inside) = (processes[task % 2].clone(), inside.clone());
        tasks.spawn(async move {
            for turn in 0..16 {
                let number = (task + turn) % 8;
                let key = format!("order:{number}");
                let lease = shard_of(&shards, &key).lease(&*key).wait(Duration::from_secs(60)).acquire().await.unwrap();
                assert_eq!(inside[number].fetch_add(1, Ordering::SeqCst), 0, "two holders of {key}");
                tokio::task::yield_now().await;
                assert_eq!(inside[number].fetch_sub(1, Ordering::SeqCst), 1);
                lease.release().await.unwrap();
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    let rows = [&mariadb.pool, &mysql.pool].map(|pool| async move {
        let rows: Vec<String> =
            sqlx::query_scalar("SELECT CONVERT(name USING utf8mb4) FROM lockkit_lease WHERE name LIKE 'order:_'")
                .fetch_all(pool)
                .await
                .unwrap();
        rows.into_iter().collect::<HashSet<_>>()
    });
    let [one, other] = rows;
    let (one, other) = (one.await, other.await);
    assert!(!one.is_empty() && !other.is_empty() && one.is_disjoint(&other), "{one:?} {other:?}");
    assert_eq!(one.len() + other.len(), 8);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_gone_takes_only_its_own_keys_with_it() {
    let Some((mariadb, mysql)) = two_servers().await else { return };
    let gone = mysql.pool_of(2).await;
    let shards = [("here", Leases::new(mariadb.pool.clone())), ("gone", Leases::new(gone.clone()))];
    let ttl = Duration::from_secs(3);
    let held: Vec<_> = {
        let mut held = Vec::new();
        for key in ["a", "b", "c", "d", "e", "f"] {
            held.push(shard_of(&shards, key).lease(key).ttl(ttl).acquire().await.unwrap());
        }
        held
    };
    gone.close().await;
    let (here, lost): (Vec<_>, Vec<_>) =
        held.iter().partition(|it| shard_of(&shards, it.key().as_str()).store().size() > 0);
    assert!(!here.is_empty() && !lost.is_empty(), "{} here, {} lost", here.len(), lost.len());
    for lease in lost {
        tokio::time::timeout(Duration::from_secs(30), lease.lost()).await.expect("its server is gone");
    }
    // Longer than the ttl, so that the others have lived by their renewals alone.
    tokio::time::sleep(ttl).await;
    for lease in here {
        assert!(lease.is_trusted(), "{}: on the server that is there", lease.key());
    }
}

/// Takes a piece where the buyer belongs, and elsewhere once nothing is left there.
async fn take(stocks: &[(&'static str, Stock<MySql>)], buyer: &str) -> Result<Taken> {
    let mut taken = shard_of(stocks, buyer).take(1).await;
    for (_, stock) in stocks {
        let Err(Error::SoldOut { .. }) = taken else { break };
        taken = stock.take(1).await;
    }
    taken
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stock_over_two_servers_sells_each_piece_once() {
    let Some((mariadb, mysql)) = two_servers().await else { return };
    let stocks = pools(&mariadb, &mysql).map(|(name, pool)| (name, Stock::new(pool, "sku:42")));
    for ((_, stock), pieces) in stocks.iter().zip([30, 70]) {
        stock.put(pieces).await.unwrap();
    }
    let sold: Arc<Mutex<u32>> = Arc::default();
    let mut tasks = JoinSet::new();
    for task in 0..8 {
        let (stocks, sold) = (stocks.clone(), sold.clone());
        tasks.spawn(async move {
            for turn in 0.. {
                match take(&stocks, &format!("buyer:{task}:{turn}")).await {
                    Ok(_) => *sold.lock().unwrap() += 1,
                    Err(Error::SoldOut { .. }) => return,
                    Err(err) => panic!("{err}"),
                }
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    assert_eq!(*sold.lock().unwrap(), 100);
}
