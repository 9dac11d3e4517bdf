//! Migrations by the `sqlx` command, by `lockkit::migrate` and by hand: each ends in the same state, and they can be mixed.

use std::fs;
use std::path::Path;

use lockkit::Leases;
use support::migrations::{apply_by_hand, assert_leases_work, files, folder, history, repository};
use support::{Backend, TestDb, on_every_database};
use tempfile::TempDir;
use tokio::process::Command;

/// As `sqlx migrate info` prints them once they are applied.
fn installed<S: Backend>() -> String {
    let names = files::<S>().into_iter().map(|it| {
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
    sqlx_migrate(db, command, &folder::<S>(), Some("migrations/sqlx.toml")).await
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
        assert_leases_work::<S>(&db.pool).await;
        db.assert_nothing_left().await;
    }

    async fn migrate_leaves_nothing_to_do_for_the_sqlx_command<S>(_db: TestDb<S>) {
        let db = TestDb::<S>::empty(2).await;
        lockkit::migrate(&db.pool).await.unwrap();
        let before = history(&db).await;

        assert_eq!(sqlx_migrate_lockkit(&db, "run").await, "");
        assert_eq!(sqlx_migrate_lockkit(&db, "info").await, installed::<S>());

        assert_eq!(history(&db).await, before);
        assert_leases_work::<S>(&db.pool).await;
        db.assert_nothing_left().await;
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
            assert_leases_work::<S>(&db.pool).await;
            db.assert_nothing_left().await;
        }
    }

    async fn lockkits_migrations_go_into_the_folder_of_an_application_as_its_readme_says<S>(_db: TestDb<S>) {
        let db = TestDb::<S>::empty(2).await;
        let own = tempfile::tempdir().expect("make a folder");
        fs::create_dir(own.path().join("migrations")).expect("make a folder");
        let mixed = own.path().join("migrations");
        for (file, sql) in [
            ("0001_item.sql", "CREATE TABLE item (id INT PRIMARY KEY);"),
            ("0004_part.sql", "CREATE TABLE part (id INT PRIMARY KEY);"),
        ] {
            fs::write(mixed.join(file), sql).expect("write a migration");
        }
        sqlx_migrate(&db, "run", &mixed, None).await;

        let readme = fs::read_to_string(repository().join("migrations/README.md")).expect("read the text");
        let command = readme.lines().find(|it| it.starts_with("for file in ")).expect("a command to copy them");
        let command = command.replace("migrations/postgres", &folder::<S>().to_string_lossy());
        let lockkit = repository().join("lockkit");
        let copied = Command::new("sh").args(["-c", &command]).current_dir(own.path()).env("LOCKKIT", lockkit).status();
        assert!(copied.await.expect("run a shell").success(), "{command}");
        fs::write(mixed.join("0005_more.sql"), "CREATE TABLE more (id INT PRIMARY KEY);").expect("write a migration");
        sqlx_migrate(&db, "run", &mixed, None).await;

        assert_eq!(sqlx_migrate(&db, "run", &mixed, None).await, "");
        let applied = i64::try_from(3 + files::<S>().len()).expect("a number");
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM _sqlx_migrations").await, Some(applied));
        assert_leases_work::<S>(&db.pool).await;
        db.assert_nothing_left().await;
        lockkit::migrate(&db.pool).await.unwrap();
        assert_eq!(sqlx_migrate(&db, "run", &mixed, None).await, "");
    }

    async fn tables_made_by_hand_are_enough_and_can_be_migrated_later<S>(_db: TestDb<S>) {
        let db = TestDb::<S>::empty(2).await;
        apply_by_hand(&db, files::<S>()).await;
        assert_leases_work::<S>(&db.pool).await;
        db.assert_nothing_left().await;

        lockkit::migrate(&db.pool).await.unwrap();
        assert_eq!(sqlx_migrate_lockkit(&db, "run").await, "");
        history(&db).await;
        assert_leases_work::<S>(&db.pool).await;
        db.assert_nothing_left().await;
    }
}
