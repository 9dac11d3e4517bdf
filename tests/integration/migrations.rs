//! Migrations by `lockkit::migrate`: at once, cut short, without the right to, and while leases are held.

use std::time::Duration;

use lockkit::{Error, LeaseStore, Leases, NamedLock};
use support::migrations::{apply_by_hand, assert_leases_work, files, history};
use support::{
    Backend, JoinSet, Process, Server, TestDb, User, on_databases, on_every_database, on_every_server, spawn,
};
use tokio::time::timeout;

const SECONDS: fn(u64) -> Duration = Duration::from_secs;

on_databases! {
    [sqlite]

    async fn views_and_triggers_of_the_application_do_not_stop_a_migration<S>(_db: TestDb<S>) {
        let db = TestDb::<S>::empty(1).await;
        apply_by_hand(&db, files::<S>().into_iter().filter(|it| !it.ends_with("0004_ttl.sql"))).await;
        for sql in [
            "CREATE VIEW held AS SELECT name FROM lockkit_lease",
            "CREATE TABLE gone (n INT)",
            "CREATE VIEW of_nothing AS SELECT n FROM gone",
            "DROP TABLE gone",
            "CREATE TRIGGER forgets AFTER DELETE ON lockkit_stock BEGIN DELETE FROM lockkit_lease WHERE name = \
             OLD.name; END",
        ] {
            db.execute(sql).await;
        }

        lockkit::migrate(&db.pool).await.unwrap();

        assert_leases_work::<S>(&db.pool).await;
        db.assert_nothing_left().await;
    }
}

on_every_database! {
    async fn a_history_that_was_lost_is_written_anew_and_leases_stay_held<S>(db: TestDb<S>) {
        let leases = Leases::new(db.pool.clone());
        let lease = leases.lease("k").acquire().await.unwrap();
        db.execute("DROP TABLE _lockkit_migrations").await;

        lockkit::migrate(&db.pool).await.unwrap();

        history(&db).await;
        assert_eq!(leases.show("k").await.unwrap().unwrap().fence, lease.fence());
    }

    async fn leases_stay_held_while_their_table_gets_a_column<S>(_db: TestDb<S>) {
        let db = TestDb::<S>::empty(2).await;
        apply_by_hand(&db, files::<S>().into_iter().filter(|it| !it.ends_with("0004_ttl.sql"))).await;
        let fence = 1 << 60;
        let token = if S::NAME == "PostgreSQL" {
            "'\\x0102030405060708090a0b0c0d0e0f10'"
        } else {
            "X'0102030405060708090a0b0c0d0e0f10'"
        };
        db.execute(&format!(
            "INSERT INTO lockkit_lease (name, token, holder, fence, acquired_us, expires_us, renewals)
             VALUES ('k', {token}, 'old', {fence}, 1, {fence}, 7)"
        ))
        .await;

        for _ in 0..2 {
            lockkit::migrate(&db.pool).await.unwrap();
            let held = db.pool.lease_look(&"k".into()).await.unwrap().expect("it is held");
            assert_eq!((held.info.holder.as_str(), held.info.fence.get(), held.info.renewals), ("old", fence, 7));
            db.execute("DROP TABLE _lockkit_migrations").await;
        }
        db.execute("UPDATE lockkit_lease SET ttl_us = 5, expires_us = 0").await;
        lockkit::migrate(&db.pool).await.unwrap();
        assert_eq!(db.fetch_i64("SELECT ttl_us FROM lockkit_lease").await, Some(5));
        assert_leases_work::<S>(&db.pool).await;
        db.assert_nothing_left().await;
    }

    async fn eight_processes_can_migrate_at_once<S>(_db: TestDb<S>) {
        let db = TestDb::<S>::empty(2).await;
        let mut processes = Vec::new();
        for _ in 0..8 {
            let mut process = Process::start(env!("CARGO_BIN_EXE_test-migrate"), &[&db.url]);
            process.says("connected").await;
            processes.push(process);
        }
        for process in &mut processes {
            process.go().await;
        }
        for process in processes {
            process.succeeds().await;
        }
        history(&db).await;
        assert_leases_work::<S>(&db.pool).await;
        db.assert_nothing_left().await;
    }

    async fn eight_tasks_can_migrate_at_once<S>(_db: TestDb<S>) {
        let db = TestDb::<S>::empty(8).await;
        let mut tasks = JoinSet::new();
        for _ in 0..8 {
            let pool = db.pool.clone();
            tasks.spawn(async move { lockkit::migrate(&pool).await });
        }
        for migrated in tasks.join_all().await {
            migrated.unwrap();
        }
        history(&db).await;
        assert_leases_work::<S>(&db.pool).await;
        db.assert_nothing_left().await;
    }

    async fn without_its_tables_a_lease_says_what_to_run<S>(_db: TestDb<S>) {
        let db = TestDb::<S>::empty(2).await;
        let leases = Leases::builder(db.pool.clone()).wait(SECONDS(60)).build().unwrap();

        let acquire = timeout(SECONDS(10), leases.lease("k").acquire()).await.expect("no waiting for what cannot come");
        let refusals = [
            acquire.map(drop),
            leases.lease("k").try_acquire().await.map(drop),
            leases.show("k").await.map(drop),
            leases.list("").await.map(drop),
            leases.steal("k").await.map(drop),
            db.pool.lease_sweep(SECONDS(1), 1).await.map(drop),
        ];
        for refused in refusals {
            let Err(Error::NotMigrated { hint, .. }) = refused else { panic!("{refused:?}") };
            assert!(hint.contains("lockkit::migrate(&pool)") && hint.contains("sqlx migrate run"), "{hint}");
        }
        db.assert_nothing_left().await;

        leases.migrate().await.unwrap();
        leases.lease("k").acquire().await.unwrap().release().await.unwrap();
    }
}

on_databases! {
    [mariadb, mysql]

    async fn without_its_table_a_named_lock_says_what_to_run<S>(_db: TestDb<S>) {
        let db = TestDb::<S>::empty(2).await;
        let mut tx = lockkit::begin(&db.pool).await.unwrap();

        let refused = NamedLock::new("k").lock(&mut *tx).await.unwrap_err();
        assert!(matches!(refused, Error::NotMigrated { .. }), "{refused:?}");
        drop(tx);
        db.assert_nothing_left().await;
    }

    async fn a_migration_that_was_cut_short_is_run_again<S>(db: TestDb<S>) {
        // DDL commits as it goes, so a process that dies between two statements leaves this behind.
        db.execute("UPDATE _lockkit_migrations SET success = FALSE, execution_time = -1").await;
        db.execute("DROP TABLE lockkit_named").await;

        lockkit::migrate(&db.pool).await.unwrap();

        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM _lockkit_migrations WHERE NOT success").await, Some(0));
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM lockkit_named").await, Some(0));
        assert_leases_work::<S>(&db.pool).await;
        db.assert_nothing_left().await;
    }
}

/// Makes a user who may read and write every table of the database, and create none.
async fn a_user_who_may_not_create_tables<S: Backend>(db: &TestDb<S>) -> User {
    let user = User::new(db).await;
    let rights = "SELECT, INSERT, UPDATE, DELETE";
    match S::NAME {
        "PostgreSQL" => {
            db.execute(&format!("ALTER DEFAULT PRIVILEGES GRANT {rights} ON TABLES TO {}", user.name)).await
        }
        _ => db.execute(&format!("GRANT {rights} ON {}.* TO {}", db.name(), user.name)).await,
    };
    user
}

on_every_server! {
    async fn a_user_who_may_not_create_tables_is_told_so_and_holds_up_nobody<S>(_db: TestDb<S>) {
        let db = TestDb::<S>::empty(2).await;
        let user = a_user_who_may_not_create_tables(&db).await;
        let pool = sqlx::Pool::<<S as Server>::DB>::connect(&user.url).await.unwrap();

        let refused = lockkit::migrate(&pool).await.unwrap_err();
        assert!(matches!(refused, Error::Migration { .. }), "{refused:?}");
        db.assert_nothing_left().await;

        timeout(SECONDS(10), lockkit::migrate(&db.pool)).await.expect("no lock in the way").unwrap();
        Leases::new(pool.clone()).lease("k").acquire().await.unwrap().release().await.unwrap();

        pool.close().await;
        user.delete(&db).await;
    }

    async fn a_user_who_may_not_create_tables_migrates_where_nothing_is_to_do<S>(_db: TestDb<S>) {
        let db = TestDb::<S>::empty(2).await;
        let user = a_user_who_may_not_create_tables(&db).await;
        let pool = sqlx::Pool::<<S as Server>::DB>::connect(&user.url).await.unwrap();
        lockkit::migrate(&db.pool).await.unwrap();

        lockkit::migrate(&pool).await.unwrap();

        pool.close().await;
        user.delete(&db).await;
    }
}

on_every_server! {
    async fn leases_go_on_while_a_migration_waits_for_a_transaction<S>(_db: TestDb<S>) {
        let db = TestDb::<S>::empty(4).await;
        apply_by_hand(&db, files::<S>().into_iter().filter(|it| !it.ends_with("0004_ttl.sql"))).await;
        let mut tx = db.pool.begin().await.unwrap();
        S::execute(&mut tx, "DELETE FROM lockkit_lease WHERE name = 'k'").await.unwrap();
        let pool = db.pool.clone();
        let migrating = spawn(async move { lockkit::migrate(&pool).await });

        // What processes of the version before do all the time.
        for _ in 0..4 {
            let asked = db.execute("UPDATE lockkit_lease SET renewals = 0 WHERE name = 'other'");
            timeout(SECONDS(10), asked).await.expect("it does not wait for the transaction");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }

        assert!(!migrating.is_finished(), "it did not wait for the transaction: {:?}", migrating.await);
        tx.rollback().await.unwrap();
        migrating.await.unwrap().unwrap();
        assert_leases_work::<S>(&db.pool).await;
        db.assert_nothing_left().await;
    }
}
