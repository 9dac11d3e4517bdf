//! What the codes of the servers mean.

use std::time::Duration;

use lockkit::{Error, Fault, NamedLock, RowLock, SessionLock, VersionedRow};
use support::{Server, TestDb, on_databases, on_every_server, spawn};

on_every_server! {
    async fn a_code_of_the_server_has_its_fault<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t (id BIGINT PRIMARY KEY, version BIGINT)").await;
        db.execute("INSERT INTO t VALUES (1, 1)").await;
        let codes: &[(&str, Fault)] = match S::NAME {
            "PostgreSQL" => &[
                ("55P03", Fault::Contended),
                ("57014", Fault::Contended),
                ("40P01", Fault::Deadlock),
                ("40001", Fault::Serialization),
                ("25P03", Fault::NoTransaction),
                ("53300", Fault::Unavailable),
                ("08P01", Fault::Unavailable),
                ("57P01", Fault::Unavailable),
                ("25006", Fault::ReadOnly),
                ("P0001", Fault::Other),
            ],
            _ => &[
                ("1205", Fault::Contended),
                ("1317", Fault::Contended),
                ("1969", Fault::Contended),
                ("3024", Fault::Contended),
                ("1213", Fault::Deadlock),
                ("1020", Fault::Serialization),
                ("1305", Fault::NoTransaction),
                ("1040", Fault::Unavailable),
                ("1047", Fault::Unavailable),
                ("1180", Fault::Unavailable),
                ("1203", Fault::Unavailable),
                ("1226", Fault::Unavailable),
                ("1290", Fault::ReadOnly),
                ("1644", Fault::Other),
            ],
        };
        for (code, expected) in codes {
            if S::NAME == "PostgreSQL" {
                db.execute(&format!(
                    "CREATE OR REPLACE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql
                     AS $$ BEGIN RAISE EXCEPTION 'refused' USING ERRCODE = '{code}'; END $$"
                )).await;
                db.execute("DROP TRIGGER IF EXISTS refused ON t").await;
                db.execute("CREATE TRIGGER refused BEFORE UPDATE ON t FOR EACH ROW EXECUTE FUNCTION refuse()").await;
            } else {
                refuse::<S>(&db, "t", "UPDATE", code).await;
            }
            let mut conn = db.connect().await;
            let refused = VersionedRow::table("t").by("id", 1_i64).expected(1_i64).bump(&mut conn).await.unwrap_err();
            assert!(matches!(&refused, Error::Database { fault, .. } if fault == expected), "{code}: {refused:?}");
        }
    }

    async fn a_wait_that_the_servers_own_bound_ends_is_contended<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t (id BIGINT PRIMARY KEY, n BIGINT)").await;
        db.execute("INSERT INTO t VALUES (1, 0)").await;
        let bound = match S::NAME {
            "PostgreSQL" => "SET LOCAL statement_timeout = '200ms'",
            "MariaDB" => "SET max_statement_time = 0.2",
            _ => "SET max_execution_time = 200",
        };
        let mut holder = lockkit::begin(&db.pool).await.unwrap();
        RowLock::table("t").by("id", 1_i64).lock(&mut *holder).await.unwrap();
        let mut tx = lockkit::begin(&db.pool_of(1).await).await.unwrap();
        S::execute(&mut tx, bound).await.unwrap();
        let refused = RowLock::table("t").by("id", 1_i64).lock(&mut *tx).await.unwrap_err();
        assert!(refused.is_contended(), "{refused:?}");
        holder.rollback().await.unwrap();
    }

    async fn a_wait_for_a_session_lock_that_is_cut_short_goes_on<S>(db: TestDb<S>) {
        let mut other = db.connect().await;
        for round in 0..20 {
            let holder = SessionLock::new("k").acquire(&db.pool).await.unwrap();
            let pool = db.pool.clone();
            let waiter = spawn(async move {
                SessionLock::new("k").wait(Duration::from_secs(30)).acquire(&pool).await
            });
            let id = waiting_session::<S>(&mut other, &waiter).await;
            let cancel = if S::NAME == "PostgreSQL" {
                format!("SELECT pg_cancel_backend({id})")
            } else {
                format!("KILL QUERY {id}")
            };
            if round % 2 == 0 {
                S::execute(&mut other, &cancel).await.unwrap();
                holder.release().await.unwrap();
            } else {
                // In the same instant, so that the lock may be granted to the statement that is cut short.
                let (cancelled, released) = tokio::join!(S::execute(&mut other, &cancel), holder.release());
                cancelled.unwrap();
                released.unwrap();
            }
            waiter.await.unwrap().unwrap().release().await.unwrap();
        }
    }
}

/// The session of the server that waits for a session lock.
async fn waiting_session<S: support::Backend>(
    conn: &mut <S::DB as sqlx::Database>::Connection,
    waiter: &tokio::task::JoinHandle<Result<lockkit::Session<S::DB>, Error>>,
) -> i64 {
    let waiting = match S::NAME {
        "PostgreSQL" => {
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' LIMIT 1"
        }
        "MySQL" => {
            "SELECT id FROM performance_schema.processlist WHERE db = DATABASE() AND state = 'User lock' LIMIT 1"
        }
        _ => "SELECT id FROM information_schema.processlist WHERE db = DATABASE() AND state = 'User lock' LIMIT 1",
    };
    loop {
        assert!(!waiter.is_finished(), "it does not wait");
        if let Some(id) = S::fetch_i64(conn, waiting).await.unwrap() {
            return id;
        }
    }
}

on_databases! {
    [mariadb, mysql]
    async fn a_binary_log_of_statements_is_named_with_what_to_set<S>(db: TestDb<S>) {
        refuse::<S>(&db, "lockkit_named", "INSERT", "1665").await;
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let refused = NamedLock::new("k").lock(&mut *tx).await.unwrap_err();
        assert!(refused.to_string().contains("binlog_format"), "{refused}");
    }
}

/// Makes the server refuse a statement on a table with this error number.
async fn refuse<S: support::Backend>(db: &TestDb<S>, table: &str, statement: &str, number: &str) {
    db.execute("DROP TRIGGER IF EXISTS refused").await;
    db.execute(&format!(
        "CREATE TRIGGER refused BEFORE {statement} ON {table} FOR EACH ROW
         SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = {number}, MESSAGE_TEXT = 'refused'"
    ))
    .await;
}
