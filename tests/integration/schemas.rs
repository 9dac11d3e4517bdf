//! Where `lockkit`'s tables are, and what `migrate` does when a table, a right or part of the history is missing.

use std::error::Error as _;
use std::time::Duration;

use lockkit::{Error, Leases};
use sqlx::postgres::{PgConnectOptions, PgPool};
use sqlx::{Connection, Pool};
use support::migrations::assert_leases_work;
use support::{Backend, Server, TestDb, User, on_databases, on_every_database, on_every_server};
use tokio::time::timeout;

/// More than one attempt needs, and less than fifty.
const NO_RETRIES: Duration = Duration::from_secs(4);

/// The error and its sources, as an application prints them.
fn text(err: &Error) -> String {
    let mut texts = vec![err.to_string()];
    let mut source = err.source();
    while let Some(err) = source {
        texts.push(err.to_string());
        source = err.source();
    }
    texts.join(": ")
}

on_every_database! {
    async fn a_table_that_was_dropped_is_made_again<S>(db: TestDb<S>) {
        for table in ["lockkit_lease", "lockkit_stock", "lockkit_fence"] {
            db.execute(&format!("DROP TABLE {table}")).await;
            if table == "lockkit_lease" {
                let refused = Leases::new(db.pool.clone()).lease("k").try_acquire().await.unwrap_err();
                let Error::NotMigrated { hint, .. } = refused else { panic!("{refused:?}") };
                assert!(hint.contains("delete the rows of `_lockkit_migrations`"), "{hint}");
            }

            lockkit::migrate(&db.pool).await.unwrap();

            assert_eq!(db.fetch_i64(&format!("SELECT COUNT(*) FROM {table}")).await, Some(0));
        }
        assert_leases_work::<S>(&db.pool).await;
    }

    async fn a_migration_that_is_marked_as_cut_short_is_run_again_at_once<S>(db: TestDb<S>) {
        db.execute("UPDATE _lockkit_migrations SET success = FALSE WHERE version = 3").await;

        timeout(NO_RETRIES, lockkit::migrate(&db.pool)).await.expect("no retries").unwrap();

        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM _lockkit_migrations WHERE NOT success").await, Some(0));
        assert_leases_work::<S>(&db.pool).await;
    }
}

/// Makes a user with these rights on everything, and with all that leases need on `tables`.
async fn a_user<S: Backend>(db: &TestDb<S>, rights: &str, tables: &[&str]) -> User {
    let (user, database) = (User::new(db).await, db.name());
    if !rights.is_empty() {
        db.execute(&format!("GRANT {rights} ON {database}.* TO {}", user.name)).await;
    }
    let prefix = if S::NAME == "PostgreSQL" { String::new() } else { format!("{database}.") };
    for table in tables {
        db.execute(&format!("GRANT SELECT, INSERT, UPDATE, DELETE ON {prefix}{table} TO {}", user.name)).await;
    }
    user
}

on_every_server! {
    async fn rights_on_the_tables_are_enough_where_nothing_is_to_do<S>(db: TestDb<S>) {
        let mut tables = vec!["lockkit_lease", "lockkit_stock", "lockkit_fence", "lockkit_answer"];
        if S::NAME != "PostgreSQL" {
            tables.extend(["lockkit_named", "lockkit_stock_batch"]);
        }
        let user = a_user(&db, "", &tables).await;
        let pool = Pool::<<S as Server>::DB>::connect(&user.url).await.unwrap();

        lockkit::migrate(&pool).await.unwrap();
        assert_leases_work::<S>(&pool).await;

        db.execute("DROP TABLE lockkit_stock").await;
        let refused = lockkit::migrate(&pool).await.unwrap_err();
        assert!(text(&refused).contains("the right to read `_lockkit_migrations`"), "{}", text(&refused));

        pool.close().await;
        user.delete(&db).await;
    }
}

on_databases! {
    [mariadb, mysql]

    async fn a_mark_that_may_not_be_removed_is_named_with_its_table_at_once<S>(db: TestDb<S>) {
        db.execute("UPDATE _lockkit_migrations SET success = FALSE WHERE version = 3").await;
        let user = a_user(&db, "SELECT, INSERT, UPDATE, CREATE, ALTER, INDEX", &[]).await;
        let pool = Pool::<<S as Server>::DB>::connect(&user.url).await.unwrap();

        let refused = timeout(NO_RETRIES, lockkit::migrate(&pool)).await.expect("no retries").unwrap_err();
        let text = text(&refused);
        assert!(text.contains("`_lockkit_migrations`") && !text.contains("_sqlx_migrations"), "{text}");

        pool.close().await;
        user.delete(&db).await;
    }
}

/// A pool whose connections look for tables in these schemas.
async fn in_schemas(db: &TestDb<support::Postgres>, search_path: &str) -> PgPool {
    let options: PgConnectOptions = db.url.parse().expect("a URL made by TestDb");
    PgPool::connect_with(options.options([("search_path", search_path)])).await.unwrap()
}

on_databases! {
    [postgres]

    async fn each_search_path_has_its_own_leases_in_any_order_of_starts<S>(_db: TestDb<S>) {
        for app_first in [true, false] {
            let db = TestDb::<S>::empty(2).await;
            db.execute("CREATE SCHEMA app2").await;
            let (app, public) = (in_schemas(&db, "app2,public").await, in_schemas(&db, "public").await);
            for pool in if app_first { [&app, &public] } else { [&public, &app] } {
                lockkit::migrate(pool).await.unwrap();
            }
            for schema in ["app2", "public"] {
                let tables = format!("SELECT COUNT(*) FROM pg_tables WHERE schemaname = '{schema}' AND tablename LIKE \
                                      '%lockkit%'");
                assert_eq!(db.fetch_i64(&tables).await, Some(6), "in {schema}, app first: {app_first}");
            }
            let here = Leases::new(public.clone()).lease("k").acquire().await.unwrap();
            let there = Leases::new(app.clone()).lease("k").try_acquire().await.unwrap();
            assert!(there.is_some(), "app first: {app_first}");
            drop((here, there));
            // Both find everything done, and do nothing.
            lockkit::migrate(&app).await.unwrap();
            lockkit::migrate(&public).await.unwrap();
            app.close().await;
            public.close().await;
        }
    }

    async fn a_table_that_was_dropped_is_not_looked_for_in_another_schema<S>(db: TestDb<S>) {
        db.execute("CREATE SCHEMA app2").await;
        let app = in_schemas(&db, "app2,public").await;
        lockkit::migrate(&app).await.unwrap();
        db.execute("DROP TABLE app2.lockkit_lease").await;

        lockkit::migrate(&app).await.unwrap();

        let mut conn = sqlx::PgConnection::connect(&db.url).await.unwrap();
        assert_eq!(S::fetch_i64(&mut conn, "SELECT COUNT(*) FROM app2.lockkit_lease").await.unwrap(), Some(0));
        app.close().await;
    }
}
