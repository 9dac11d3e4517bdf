//! Migrations: every way to make `lockkit`'s tables ends in the same state, and the ways can be mixed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use lockkit::{Error, LeaseStore, Leases, NamedLock};
use sqlx::Database;
use support::{Backend, Server, TestDb, on_databases, on_every_database, on_every_server};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, Command};
use tokio::task::JoinSet;
use tokio::time::timeout;
use url::Url;

const SECONDS: fn(u64) -> Duration = Duration::from_secs;

fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the tests are in a folder of the repository")
}

/// The folder of `lockkit`'s migrations for this kind of database, from the root of the repository.
fn lockkits_migrations<S: Backend>() -> PathBuf {
    Path::new("migrations").join(<S::DB as Database>::URL_SCHEMES[0])
}

/// The files in it, in their order.
fn migrations<S: Backend>() -> Vec<PathBuf> {
    let folder = repository().join(lockkits_migrations::<S>());
    let mut files: Vec<_> =
        fs::read_dir(folder).expect("read the folder").map(|it| it.expect("read the folder").path()).collect();
    files.sort();
    files
}

/// As `sqlx migrate info` prints them once they are applied.
fn installed<S: Backend>() -> String {
    let names = migrations::<S>().into_iter().map(|it| {
        let name = it.file_stem().expect("a file").to_string_lossy().into_owned();
        let (number, name) = name.split_once('_').expect("a number and a name");
        format!("{}/installed {}\n", number.trim_start_matches('0'), name.replace('_', " "))
    });
    names.collect()
}

/// A service's own migrations: one, which makes the table `item`.
fn an_applications_migrations() -> TempDir {
    let folder = tempfile::tempdir().expect("make a folder");
    let file = folder.path().join("20240101000000_item.sql");
    fs::write(file, "CREATE TABLE item (id INT PRIMARY KEY);").expect("write a migration");
    folder
}

/// Runs `sqlx migrate COMMAND` on the migrations in the folder, and returns what it prints.
async fn sqlx_migrate<S: Backend>(db: &TestDb<S>, command: &str, source: &Path, config: Option<&str>) -> String {
    let mut sqlx = Command::new(env!("CARGO_BIN_EXE_test-sqlx"));
    sqlx.current_dir(repository()).args(["migrate", command, "--no-dotenv", "--database-url", &db.url]);
    sqlx.arg("--source").arg(source);
    if let Some(config) = config {
        sqlx.args(["--config", config]);
    }
    let output = sqlx.output().await.expect("run sqlx");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{sqlx:?}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// Runs `sqlx migrate COMMAND` on `lockkit`'s migrations, as its documentation says.
async fn sqlx_migrate_lockkit<S: Backend>(db: &TestDb<S>, command: &str) -> String {
    sqlx_migrate(db, command, &lockkits_migrations::<S>(), Some("migrations/sqlx.toml")).await
}

/// How long each migration took, to the nanosecond: whoever applies one anew writes another number.
async fn history<S: Backend>(db: &TestDb<S>) -> Option<i64> {
    let applied = db.fetch_i64("SELECT COUNT(*) FROM _lockkit_migrations").await;
    assert_eq!(applied, i64::try_from(migrations::<S>().len()).ok());
    db.fetch_i64("SELECT SUM(execution_time) FROM _lockkit_migrations").await
}

async fn assert_leases_work<S: Backend>(db: &TestDb<S>) {
    let leases = Leases::new(db.pool.clone());
    leases.lease("k").acquire().await.expect("acquire").release().await.expect("release");
    db.assert_nothing_left().await;
}

/// A process that is connected, and migrates when a line is written to it.
async fn a_process_about_to_migrate(url: &str) -> Child {
    let mut process = Command::new(env!("CARGO_BIN_EXE_test-migrate"))
        .arg(url)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("start a process");
    let mut said = String::new();
    let stdout = process.stdout.as_mut().expect("its output");
    BufReader::new(stdout).read_line(&mut said).await.expect("read from the process");
    assert_eq!(said, "connected\n");
    process
}

on_databases! {
    [sqlite]
    async fn views_and_triggers_of_the_application_do_not_stop_a_migration<S>(_db: TestDb<S>) {
        let db = TestDb::<S>::empty(1).await;
        for file in migrations::<S>().into_iter().filter(|it| !it.ends_with("0004_ttl.sql")) {
            db.execute(&fs::read_to_string(file).expect("read the migration")).await;
        }
        for sql in [
            "CREATE VIEW held AS SELECT name FROM lockkit_lease",
            "CREATE TABLE gone (n INT)",
            "CREATE VIEW of_nothing AS SELECT n FROM gone",
            "DROP TABLE gone",
            "CREATE TRIGGER forgets AFTER DELETE ON lockkit_stock BEGIN DELETE FROM lockkit_lease WHERE name = OLD.name; END",
        ] {
            db.execute(sql).await;
        }

        lockkit::migrate(&db.pool).await.unwrap();

        assert_leases_work(&db).await;
    }
}

on_every_database! {
    async fn the_sqlx_command_leaves_nothing_to_do_for_migrate<S>(_db: TestDb<S>) {
        let db = TestDb::<S>::empty(2).await;
        let printed = sqlx_migrate_lockkit(&db, "run").await;
        assert!(printed.contains("Applied 1/migrate lockkit"), "{printed}");
        let before = history(&db).await;

        lockkit::migrate(&db.pool).await.unwrap();
        Leases::new(db.pool.clone()).migrate().await.unwrap();

        assert_eq!(history(&db).await, before);
        assert_leases_work(&db).await;
    }

    async fn migrate_leaves_nothing_to_do_for_the_sqlx_command<S>(_db: TestDb<S>) {
        let db = TestDb::<S>::empty(2).await;
        lockkit::migrate(&db.pool).await.unwrap();
        let before = history(&db).await;

        assert_eq!(sqlx_migrate_lockkit(&db, "run").await, "");
        assert_eq!(sqlx_migrate_lockkit(&db, "info").await, installed::<S>());

        assert_eq!(history(&db).await, before);
        assert_leases_work(&db).await;
    }

    async fn an_application_has_migrations_of_its_own_beside_lockkits<S>(_db: TestDb<S>) {
        let own = an_applications_migrations();
        for lockkit_first in [true, false] {
            let db = TestDb::<S>::empty(2).await;
            if lockkit_first {
                sqlx_migrate_lockkit(&db, "run").await;
                sqlx_migrate(&db, "run", own.path(), None).await;
            } else {
                sqlx_migrate(&db, "run", own.path(), None).await;
                sqlx_migrate_lockkit(&db, "run").await;
            }

            assert_eq!(sqlx_migrate(&db, "run", own.path(), None).await, "");
            assert_eq!(sqlx_migrate_lockkit(&db, "run").await, "");
            lockkit::migrate(&db.pool).await.unwrap();

            assert_eq!(sqlx_migrate(&db, "info", own.path(), None).await, "20240101000000/installed item\n");
            assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM _sqlx_migrations").await, Some(1));
            assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM item").await, Some(0));
            assert_leases_work(&db).await;
        }
    }

    async fn lockkits_migrations_go_into_the_folder_of_an_application_as_its_readme_says<S>(_db: TestDb<S>) {
        let db = TestDb::<S>::empty(2).await;
        let own = tempfile::tempdir().expect("make a folder");
        fs::create_dir(own.path().join("migrations")).expect("make a folder");
        let folder = own.path().join("migrations");
        for (file, sql) in [
            ("0001_item.sql", "CREATE TABLE item (id INT PRIMARY KEY);"),
            ("0004_part.sql", "CREATE TABLE part (id INT PRIMARY KEY);"),
        ] {
            fs::write(folder.join(file), sql).expect("write a migration");
        }
        sqlx_migrate(&db, "run", &folder, None).await;

        let readme = fs::read_to_string(repository().join("migrations/README.md")).expect("read the text");
        let command = readme.lines().find(|it| it.starts_with("for file in ")).expect("a command to copy them");
        let command = command.replace("migrations/postgres", &lockkits_migrations::<S>().to_string_lossy());
        let lockkit = repository().join("lockkit");
        let copied = Command::new("sh").args(["-c", &command]).current_dir(own.path()).env("LOCKKIT", lockkit).status();
        assert!(copied.await.expect("run a shell").success(), "{command}");
        fs::write(folder.join("0005_more.sql"), "CREATE TABLE more (id INT PRIMARY KEY);").expect("write a migration");
        sqlx_migrate(&db, "run", &folder, None).await;

        assert_eq!(sqlx_migrate(&db, "run", &folder, None).await, "");
        let applied = i64::try_from(3 + migrations::<S>().len()).expect("a number");
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM _sqlx_migrations").await, Some(applied));
        assert_leases_work(&db).await;
        lockkit::migrate(&db.pool).await.unwrap();
        assert_eq!(sqlx_migrate(&db, "run", &folder, None).await, "");
    }

    async fn tables_made_by_hand_are_enough_and_can_be_migrated_later<S>(_db: TestDb<S>) {
        let db = TestDb::<S>::empty(2).await;
        for file in migrations::<S>() {
            db.execute(&fs::read_to_string(file).expect("read the migration")).await;
        }
        assert_leases_work(&db).await;

        lockkit::migrate(&db.pool).await.unwrap();
        assert_eq!(sqlx_migrate_lockkit(&db, "run").await, "");
        history(&db).await;
        assert_leases_work(&db).await;
    }

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
        for file in migrations::<S>().into_iter().filter(|it| !it.ends_with("0004_ttl.sql")) {
            db.execute(&fs::read_to_string(file).expect("read the migration")).await;
        }
        let fence = 1 << 60;
        let token = if S::NAME == "PostgreSQL" { "'\\x0102030405060708090a0b0c0d0e0f10'" } else { "X'0102030405060708090a0b0c0d0e0f10'" };
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
        assert_leases_work(&db).await;
    }

    async fn eight_processes_can_migrate_at_once<S>(_db: TestDb<S>) {
        let db = TestDb::<S>::empty(2).await;
        let mut processes = Vec::new();
        for _ in 0..8 {
            processes.push(a_process_about_to_migrate(&db.url).await);
        }
        for process in &mut processes {
            process.stdin.as_mut().expect("its input").write_all(b"\n").await.expect("write to the process");
        }
        for process in processes {
            let output = process.wait_with_output().await.expect("wait for the process");
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
        history(&db).await;
        assert_leases_work(&db).await;
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
        assert_leases_work(&db).await;
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
        assert_leases_work(&db).await;
    }
}

/// Makes a user who may read and write every table of the database and create none, and returns the user's name and URL.
async fn a_user_who_may_not_create_tables<S: Backend>(db: &TestDb<S>) -> (String, String) {
    let mut url = Url::parse(&db.url).expect("a URL made by TestDb");
    let database = url.path().trim_start_matches('/').to_owned();
    let user = format!("u{}", database.trim_start_matches("lockkit_"));
    let sql = match S::NAME {
        "PostgreSQL" => format!(
            "CREATE ROLE {user} LOGIN PASSWORD 'secret';
             REVOKE CREATE ON SCHEMA public FROM PUBLIC;
             ALTER DEFAULT PRIVILEGES GRANT SELECT, INSERT, UPDATE, DELETE ON TABLES TO {user}"
        ),
        _ => format!(
            "CREATE USER {user} IDENTIFIED BY 'secret';
             GRANT SELECT, INSERT, UPDATE, DELETE ON {database}.* TO {user}"
        ),
    };
    db.execute(&sql).await;
    url.set_username(&user).expect("a URL with a host");
    url.set_password(Some("secret")).expect("a URL with a host");
    (user, url.into())
}

async fn drop_user<S: Backend>(db: &TestDb<S>, user: &str) {
    match S::NAME {
        "PostgreSQL" => db.execute(&format!("DROP OWNED BY {user}; DROP ROLE {user}")).await,
        _ => db.execute(&format!("DROP USER {user}")).await,
    };
}

on_every_server! {
    async fn a_user_who_may_not_create_tables_is_told_so_and_holds_up_nobody<S>(_db: TestDb<S>) {
        let db = TestDb::<S>::empty(2).await;
        let (user, url) = a_user_who_may_not_create_tables(&db).await;
        let pool = sqlx::Pool::<<S as Server>::DB>::connect(&url).await.unwrap();

        let refused = lockkit::migrate(&pool).await.unwrap_err();
        assert!(matches!(refused, Error::Migration { .. }), "{refused:?}");
        db.assert_nothing_left().await;

        timeout(SECONDS(10), lockkit::migrate(&db.pool)).await.expect("no lock in the way").unwrap();
        Leases::new(pool.clone()).lease("k").acquire().await.unwrap().release().await.unwrap();

        pool.close().await;
        drop_user(&db, &user).await;
    }

    async fn a_user_who_may_not_create_tables_migrates_where_nothing_is_to_do<S>(_db: TestDb<S>) {
        let db = TestDb::<S>::empty(2).await;
        let (user, url) = a_user_who_may_not_create_tables(&db).await;
        let pool = sqlx::Pool::<<S as Server>::DB>::connect(&url).await.unwrap();
        lockkit::migrate(&db.pool).await.unwrap();

        lockkit::migrate(&pool).await.unwrap();

        pool.close().await;
        drop_user(&db, &user).await;
    }
}

on_every_server! {
    async fn leases_go_on_while_a_migration_waits_for_a_transaction<S>(_db: TestDb<S>) {
        let db = TestDb::<S>::empty(4).await;
        for file in migrations::<S>().into_iter().filter(|it| !it.ends_with("0004_ttl.sql")) {
            db.execute(&fs::read_to_string(file).expect("read the migration")).await;
        }
        let mut tx = db.pool.begin().await.unwrap();
        S::execute(&mut tx, "DELETE FROM lockkit_lease WHERE name = 'k'").await.unwrap();
        let pool = db.pool.clone();
        let migrating = tokio::spawn(async move { lockkit::migrate(&pool).await });

        // What processes of the version before do all the time.
        for _ in 0..4 {
            let asked = db.execute("UPDATE lockkit_lease SET renewals = 0 WHERE name = 'other'");
            timeout(SECONDS(10), asked).await.expect("it does not wait for the transaction");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }

        assert!(!migrating.is_finished());
        tx.rollback().await.unwrap();
        migrating.await.unwrap().unwrap();
        assert_leases_work(&db).await;
    }
}
