//! Named and session locks that several share, and who holds them.

use std::time::Duration;

use lockkit::{Error, Holder, NamedLock, Result, RowLock, SessionLock, Wait, with_lock};
use sqlx::Pool;
use support::{Backend, Server, TestDb, on_databases, on_every_server, spawn};

const MILLIS: fn(u64) -> Duration = Duration::from_millis;
const PATIENCE: Duration = Duration::from_secs(20);

/// The server's name of a session: what its statements say of themselves.
async fn id<S: Server>(conn: &mut <S::DB as sqlx::Database>::Connection) -> i64 {
    let sql = if S::NAME == "PostgreSQL" { "SELECT pg_backend_pid()" } else { "SELECT CONNECTION_ID()" };
    S::fetch_i64(conn, sql).await.expect("an answer").expect("a number")
}

fn holder_in<T>(result: Result<T>) -> Option<Holder> {
    match result {
        Err(Error::Contended { holder, .. }) => holder.map(|it| *it),
        Err(err) => panic!("{err:?}"),
        Ok(_) => panic!("it is held by somebody else"),
    }
}

/// The number of the session that the error names, in its text too.
fn named_in<T>(result: Result<T>) -> Option<i64> {
    let err = result.err().expect("it is held by somebody else");
    let text = err.to_string();
    let holder = holder_in::<T>(Err(err))?;
    assert!(text.ends_with(&format!("): {holder}")), "{text}");
    assert!(!holder.is_this_process());
    let session = holder.as_session().expect("a session of the server");
    assert!(holder.to_string().starts_with(&format!("session {}", session.id)), "{holder}");
    Some(session.id)
}

#[with_lock(named, on = pool, key = "order:42", wait = "100ms", tx = tx)]
async fn order<S: Backend>(pool: &Pool<S::DB>) -> Result<()> {
    S::execute(&mut tx, "SELECT 1").await.expect("a transaction");
    Ok(())
}

on_every_server! {
    async fn transactions_share_a_name_and_keep_out_one_that_wants_it_alone<S>(db: TestDb<S>) {
        let name = || NamedLock::new("prices").wait(Wait::Never);
        // On MySQL and MariaDB the first transaction ever makes the name, and has it alone.
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        name().share().lock(&mut *tx).await.unwrap();
        tx.commit().await.unwrap();

        for wait in [Wait::Never, Wait::AtMost(PATIENCE), Wait::Unbounded] {
            let (mut one, mut two) = (lockkit::begin(&db.pool).await.unwrap(), lockkit::begin(&db.pool).await.unwrap());
            let shared = || NamedLock::new("prices").share().wait(wait);
            shared().lock(&mut *one).await.unwrap();
            shared().lock(&mut *two).await.unwrap();
            shared().lock(&mut *one).await.expect("taking it again is free");

            let mut alone = lockkit::begin(&db.pool).await.unwrap();
            assert!(name().lock(&mut *alone).await.unwrap_err().is_contended());
            alone.rollback().await.unwrap();
            let mut alone = lockkit::begin(&db.pool).await.unwrap();
            assert!(name().wait(MILLIS(100)).lock(&mut *alone).await.unwrap_err().is_contended());
            alone.rollback().await.unwrap();
            one.commit().await.unwrap();
            two.rollback().await.unwrap();

            let mut alone = lockkit::begin(&db.pool).await.unwrap();
            name().lock(&mut *alone).await.expect("nobody shares it any more");
            let mut reader = lockkit::begin(&db.pool).await.unwrap();
            assert!(name().share().lock(&mut *reader).await.unwrap_err().is_contended());
            reader.rollback().await.unwrap();
            alone.commit().await.unwrap();
        }
        db.assert_nothing_left().await;
    }

    async fn the_holder_of_a_session_lock_is_named<S>(db: TestDb<S>) {
        let lock = || SessionLock::new("leader");
        assert_eq!(lock().holder(&db.pool).await.unwrap(), None);
        let leader = lock().acquire(&db.pool).await.unwrap();

        let seen = lock().holder(&db.pool).await.unwrap().expect("it is held");
        let mut conn = db.pool.acquire().await.unwrap();
        assert_eq!(lock().holder(&mut *conn).await.unwrap().expect("it is held").id, seen.id);
        assert_ne!(seen.id, id::<S>(&mut conn).await);
        assert!(seen.user.is_some() && seen.host.is_some(), "{seen:?}");
        assert_eq!(seen.held_at_most.is_some(), S::NAME == "PostgreSQL");
        assert_eq!(SessionLock::new("another").holder(&db.pool).await.unwrap(), None);
        for wait in [Duration::ZERO, MILLIS(100)] {
            assert_eq!(named_in(lock().wait(wait).acquire(&db.pool).await).expect("a holder"), seen.id);
        }

        leader.release().await.unwrap();
        assert_eq!(lock().holder(&db.pool).await.unwrap(), None);
    }

    async fn the_holder_of_a_named_lock_can_be_queried_in_a_transaction<S>(db: TestDb<S>) {
        let name = NamedLock::new("order:42");
        assert_eq!(name.holder(&db.pool).await.unwrap(), None);
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        assert_eq!(name.holder(&mut *tx).await.unwrap(), None);
        tx.commit().await.unwrap();
    }
}

on_databases! {
    [mysql]
    // Its list of processes cannot be read with the texts of their statements while one of them has such bytes.
    async fn the_holder_is_named_while_a_statement_with_bytes_runs<S>(db: TestDb<S>) {
        let (name, lock) = (|| NamedLock::new("order:42").wait(Wait::Never), || SessionLock::new("leader"));
        let leader = lock().acquire(&db.pool).await.unwrap();
        // A name that a transaction makes has no lock that is listed until somebody asks for it.
        let mut maker = lockkit::begin(&db.pool).await.unwrap();
        name().lock(&mut *maker).await.unwrap();
        maker.commit().await.unwrap();
        let mut holder = lockkit::begin(&db.pool).await.unwrap();
        name().lock(&mut *holder).await.unwrap();
        let mut other = db.connect().await;
        let running = spawn(async move {
            let bytes: &[u8] = &[0x88, 0x39, 0x53, 0x10, 0xC4, 0xAA];
            sqlx::query("SELECT SLEEP(2), ?").bind(bytes).execute(&mut other).await.unwrap();
        });
        while !running.is_finished() {
            assert!(lock().holder(&db.pool).await.unwrap().expect("it is held").user.is_some());
            assert!(name().holder(&db.pool).await.unwrap().expect("it is held").user.is_some());
            tokio::time::sleep(MILLIS(50)).await;
        }
        running.await.unwrap();
        holder.commit().await.unwrap();
        leader.release().await.unwrap();
    }
}

on_databases! {
    [postgres, mysql]
    async fn the_holder_of_a_named_lock_is_named<S>(db: TestDb<S>) {
        let name = || NamedLock::new("order:42").wait(Wait::Never);
        for _ in 0..2 {
            // The first round makes the name on MySQL, the second finds it.
            let mut holder = lockkit::begin(&db.pool).await.unwrap();
            name().lock(&mut *holder).await.unwrap();
            let held_by = id::<S>(&mut holder).await;

            let mut other = lockkit::begin(&db.pool).await.unwrap();
            let refused = named_in(name().lock(&mut *other).await);
            assert_eq!(refused.expect("a holder"), held_by);
            other.rollback().await.unwrap();
            assert_eq!(name().holder(&db.pool).await.unwrap().expect("a holder").id, held_by);
            // Under the attribute, whose transaction is over by then.
            assert_eq!(named_in(order::<S>(&db.pool).await).expect("a holder"), held_by);
            holder.commit().await.unwrap();
            assert_eq!(name().holder(&db.pool).await.unwrap(), None);
        }
        db.assert_nothing_left().await;
    }
}

#[with_lock(row, on = pool, table = "item", by(id = 1_i64), wait = "100ms", tx = tx)]
async fn sell<S: Backend>(pool: &Pool<S::DB>) -> Result<()>
where
    i64: for<'v> sqlx::Encode<'v, S::DB> + sqlx::Type<S::DB>,
{
    S::execute(&mut tx, "SELECT 1").await.expect("a transaction");
    Ok(())
}

on_databases! {
    [postgres, mysql]
    async fn the_holder_of_a_row_is_named_while_it_is_the_only_one_that_locks_rows_of_the_table<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE item (id BIGINT PRIMARY KEY, n BIGINT)").await;
        db.execute("INSERT INTO item VALUES (1, 0), (2, 0)").await;
        let row = |id: i64| RowLock::table("item").by("id", id);
        let mut holder = lockkit::begin(&db.pool).await.unwrap();
        row(1).lock(&mut *holder).await.unwrap();
        let held_by = id::<S>(&mut holder).await;

        assert_eq!(named_in(sell::<S>(&db.pool).await).expect("a holder"), held_by);
        if S::NAME == "MySQL" {
            // A wait that ran out has failed the transaction on PostgreSQL.
            let mut tx = lockkit::begin(&db.pool).await.unwrap();
            let refused = row(1).wait(Wait::Never).lock(&mut *tx).await;
            assert_eq!(named_in(refused).expect("a holder"), held_by);
            tx.rollback().await.unwrap();
        }

        // Who holds which of the two rows, nobody can tell.
        let mut other = lockkit::begin(&db.pool).await.unwrap();
        row(2).lock(&mut *other).await.unwrap();
        assert_eq!(holder_in(sell::<S>(&db.pool).await), None);
        other.commit().await.unwrap();
        holder.commit().await.unwrap();
        sell::<S>(&db.pool).await.unwrap();
        db.assert_nothing_left().await;
    }
}

on_databases! {
    [mariadb]
    async fn the_holder_of_a_named_lock_is_named_while_somebody_waits_for_it<S>(db: TestDb<S>) {
        let name = || NamedLock::new("order:42").wait(PATIENCE);
        let mut holder = lockkit::begin(&db.pool).await.unwrap();
        name().lock(&mut *holder).await.unwrap();
        let held_by = id::<S>(&mut holder).await;
        let pool = db.pool.clone();
        let waiting = spawn(async move {
            let mut tx = lockkit::begin(&pool).await?;
            name().lock(&mut *tx).await?;
            tx.commit().await
        });
        let seen = loop {
            if let Some(seen) = NamedLock::new("order:42").holder(&db.pool).await.unwrap() {
                break seen;
            }
            // MariaDB keeps an answer for those who ask again within 0.1 s.
            tokio::time::sleep(MILLIS(150)).await;
        };
        assert_eq!(seen.id, held_by);
        holder.commit().await.unwrap();
        waiting.await.unwrap().unwrap();
    }
}

on_databases! {
    [postgres]
    async fn sessions_share_a_lock_and_keep_out_one_that_wants_it_alone<S>(db: TestDb<S>) {
        let lock = || SessionLock::new("catalog").wait(Wait::Never);
        let one = lock().share().acquire(&db.pool).await.unwrap();
        let two = lock().share().acquire(&db.pool).await.unwrap();
        assert!(one.is_alive().await && two.is_alive().await);
        assert!(lock().try_acquire(&db.pool).await.unwrap().is_none());
        assert!(lock().wait(MILLIS(100)).acquire(&db.pool).await.unwrap_err().is_contended());
        one.release().await.unwrap();
        assert!(lock().try_acquire(&db.pool).await.unwrap().is_none());
        two.release().await.unwrap();

        let alone = lock().acquire(&db.pool).await.unwrap();
        assert!(lock().share().try_acquire(&db.pool).await.unwrap().is_none());
        alone.release().await.unwrap();
        db.assert_nothing_left().await;
    }

    async fn a_user_who_may_not_see_the_holder_is_still_told_that_the_lock_is_held<S>(db: TestDb<S>) {
        let user = db.fetch_text("SELECT current_database() || '_user'").await.unwrap();
        db.execute(&format!("CREATE ROLE {user} LOGIN PASSWORD 'p'")).await;
        let leader = SessionLock::new("leader").acquire(&db.pool).await.unwrap();
        let mut url = url::Url::parse(&db.url).unwrap();
        url.set_username(&user).unwrap();
        url.set_password(Some("p")).unwrap();
        let pool = sqlx::PgPool::connect(url.as_str()).await.unwrap();

        let refused = SessionLock::new("leader").wait(Wait::Never).acquire(&pool).await;
        let seen = SessionLock::new("leader").holder(&pool).await.unwrap().expect("its number and user");
        assert_eq!(named_in(refused), Some(seen.id));
        assert!(seen.user.is_some() && seen.host.is_none() && seen.held_at_most.is_none(), "{seen:?}");

        pool.close().await;
        leader.release().await.unwrap();
        db.execute(&format!("DROP ROLE {user}")).await;
    }
}

on_databases! {
    [mysql]
    async fn a_look_that_is_refused_does_not_hide_that_the_name_is_locked<S>(db: TestDb<S>) {
        let name = db.fetch_text("SELECT DATABASE()").await.unwrap();
        let user = format!("u{}", name.len() + std::process::id() as usize);
        db.execute(&format!("CREATE USER '{user}'@'%' IDENTIFIED BY 'p'")).await;
        db.execute(&format!("GRANT ALL ON {name}.* TO '{user}'@'%'")).await;
        let mut url = url::Url::parse(&db.url).unwrap();
        url.set_username(&user).unwrap();
        url.set_password(Some("p")).unwrap();
        let pool = sqlx::MySqlPool::connect(url.as_str()).await.unwrap();
        let mut holder = lockkit::begin(&db.pool).await.unwrap();
        NamedLock::new("order:42").lock(&mut *holder).await.unwrap();

        let mut tx = lockkit::begin(&pool).await.unwrap();
        let refused = NamedLock::new("order:42").wait(Wait::Never).lock(&mut *tx).await;
        assert_eq!(holder_in(refused), None);
        tx.rollback().await.unwrap();
        let refused = NamedLock::new("order:42").holder(&pool).await.unwrap_err();
        assert!(matches!(refused, Error::Database { .. }), "{refused:?}");

        holder.commit().await.unwrap();
        pool.close().await;
        db.execute(&format!("DROP USER '{user}'@'%'")).await;
    }
}

on_databases! {
    [mariadb, mysql]
    async fn a_session_lock_that_cannot_be_shared_is_refused_with_what_to_write_instead<S>(db: TestDb<S>) {
        let refused = SessionLock::new("catalog").share().acquire(&db.pool).await.unwrap_err();
        assert!(matches!(refused, Error::InvalidOption { option: "share", .. }), "{refused:?}");
        assert_eq!(
            refused.to_string(),
            "`share` needs PostgreSQL: MySQL and MariaDB have no shared session locks; leave it out, or use \
             `Leases::rw(key).read()` or `NamedLock::share`"
        );
        db.assert_nothing_left().await;
    }
}

on_databases! {
    [sqlite]
    async fn a_shared_name_is_the_write_lock_of_the_database_as_every_name_is<S>(db: TestDb<S>) {
        let mut one = lockkit::begin(&db.pool).await.unwrap();
        NamedLock::new("prices").share().lock(&mut *one).await.unwrap();
        let mut other = db.pool.begin().await.unwrap();
        let refused = NamedLock::new("prices").share().wait(Wait::Never).lock(&mut *other).await;
        assert_eq!(holder_in(refused), None);
        other.rollback().await.unwrap();
        assert_eq!(NamedLock::new("prices").holder(&db.pool).await.unwrap(), None);
        one.commit().await.unwrap();
    }
}
