//! Passwords: in no `Debug` of lockkit's types, and in no error of a driver that lockkit passes on.

use std::error::Error as _;
use std::time::Duration;

use lockkit::store::ShedLockTable;
use lockkit::{Error, Leases, NamedLock, SessionLock, Stock, begin};
use sqlx::pool::PoolOptions;
use sqlx::{MySqlPool, PgPool};

const SECRET: &str = "s3cr3t";

/// Nothing listens there.
const ADDRESS: &str = "lockkit:s3cr3t@127.0.0.1:1/none";

/// The texts of an error: with its sources, and for developers.
fn texts(err: &Error) -> Vec<String> {
    let mut texts = vec![format!("{err:?}"), format!("{err}")];
    let mut source = err.source();
    while let Some(it) = source {
        texts.extend([format!("{it:?}"), format!("{it}")]);
        source = it.source();
    }
    texts
}

macro_rules! assert_silent {
    ($pool:expr) => {{
        let pool = $pool;
        let leases = Leases::builder(pool.clone()).own_connections(1).wait(Duration::ZERO).build().unwrap();
        let table = ShedLockTable::new(pool.clone());
        let stock = Stock::new(pool.clone(), "s");
        let mut texts = vec![
            format!("{leases:?} {:?} {:?}", leases.store(), leases.lease("k")),
            format!("{table:?} {:?}", Leases::new(table.clone())),
            format!("{stock:?} {:?} {:?}", NamedLock::new("k"), SessionLock::new("k")),
        ];
        for err in [
            leases.lease("k").acquire().await.err(),
            leases.list("").await.err(),
            Leases::builder(table).wait(Duration::ZERO).build().unwrap().lease("k").acquire().await.err(),
            stock.take(1).await.err(),
            begin(&pool).await.err(),
            SessionLock::new("k").wait(Duration::ZERO).acquire(&pool).await.err(),
            lockkit::migrate(&pool).await.err(),
        ] {
            texts.extend(self::texts(&err.expect("nothing listens there")));
        }
        for text in texts {
            assert!(!text.contains(SECRET), "{text}");
        }
    }};
}

#[tokio::test]
async fn no_type_and_no_error_shows_the_password_of_a_pool() {
    let limit = Duration::from_millis(300);
    let postgres: PgPool =
        PoolOptions::new().acquire_timeout(limit).connect_lazy(&format!("postgres://{ADDRESS}")).unwrap();
    assert_silent!(postgres);
    let mysql: MySqlPool =
        PoolOptions::new().acquire_timeout(limit).connect_lazy(&format!("mysql://{ADDRESS}")).unwrap();
    assert_silent!(mysql);
}
