//! Migrations by the `sqlx` command, by `lockkit::migrate` and by hand: each ends in the same state, and they can be
//! mixed. The command runs in a project outside of the repository, with the files that lockkit has written into it.

use std::fs;
use std::path::Path;

use lockkit::Leases;
use support::migrations::{apply_by_hand, assert_leases_work, files, history, repository};
use support::{Backend, Server, TestDb, on_every_database};
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

/// A project with `lockkit`'s migrations in it.
fn a_project<S: Backend>() -> TempDir {
    let project = tempfile::tempdir().expect("make a folder");
    lockkit::dialect::write_migrations::<S::DB>(project.path().join("lockkit-migrations"))
        .expect("write the migrations");
    project
}

/// Runs `sqlx migrate COMMAND` on the migrations in the folder, and returns what it prints.
async fn sqlx_migrate<S: Backend>(db: &TestDb<S>, command: &str, source: &Path) -> String {
    sqlx_command(db, source, &["migrate", command, "--source", "."]).await
}

/// Runs the `sqlx` command in this folder, and returns what it prints.
async fn sqlx_command<S: Backend>(db: &TestDb<S>, folder: &Path, args: &[&str]) -> String {
    let mut sqlx = Command::new(env!("CARGO_BIN_EXE_test-sqlx"));
    sqlx.current_dir(folder).args(args).args(["--no-dotenv", "--database-url", &db.url]);
    let output = sqlx.output().await.expect("run sqlx");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{sqlx:?}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// Runs `sqlx migrate COMMAND` on `lockkit`'s migrations in a project, as the text beside the migrations says.
async fn sqlx_migrate_lockkit<S: Backend>(db: &TestDb<S>, command: &str) -> String {
    let readme = readme();
    let documented = readme.split('`').find(|it| it.starts_with("sqlx migrate run ")).expect("the command");
    let args = documented.trim_start_matches("sqlx ").replace("migrate run", &format!("migrate {command}"));
    sqlx_command(db, a_project::<S>().path(), &args.split(' ').collect::<Vec<_>>()).await
}

fn readme() -> String {
    fs::read_to_string(repository().join("migrations/README.md")).expect("read the text")
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
                sqlx_migrate(&db, "run", own.path()).await;
            } else {
                sqlx_migrate(&db, "run", own.path()).await;
                sqlx_migrate_lockkit(&db, "run").await;
            }

            assert_eq!(sqlx_migrate(&db, "run", own.path()).await, "");
            assert_eq!(sqlx_migrate_lockkit(&db, "run").await, "");
            lockkit::migrate(&db.pool).await.unwrap();

            assert_eq!(sqlx_migrate(&db, "info", own.path()).await, "20240101000000/installed item\n");
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
        sqlx_migrate(&db, "run", &mixed).await;

        lockkit::dialect::write_migrations::<<S as Server>::DB>(own.path().join("lockkit-migrations")).unwrap();
        let readme = readme();
        let command = readme.lines().find(|it| it.starts_with("for file in ")).expect("a command to copy them");
        let copied = Command::new("sh").args(["-c", command]).current_dir(own.path()).status();
        assert!(copied.await.expect("run a shell").success(), "{command}");
        fs::write(mixed.join("0005_more.sql"), "CREATE TABLE more (id INT PRIMARY KEY);").expect("write a migration");
        sqlx_migrate(&db, "run", &mixed).await;

        assert_eq!(sqlx_migrate(&db, "run", &mixed).await, "");
        let applied = i64::try_from(3 + files::<S>().len()).expect("a number");
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM _sqlx_migrations").await, Some(applied));
        assert_leases_work::<S>(&db.pool).await;
        db.assert_nothing_left().await;
        lockkit::migrate(&db.pool).await.unwrap();
        assert_eq!(sqlx_migrate(&db, "run", &mixed).await, "");
    }

    async fn the_files_that_are_written_into_a_project_are_those_of_the_repository<S>(_db: TestDb<S>) {
        let project = a_project::<S>();
        let written = project.path().join("lockkit-migrations");
        let mut names: Vec<_> = files::<S>();
        names.push(repository().join("migrations/sqlx.toml"));
        assert_eq!(fs::read_dir(&written).unwrap().count(), names.len());
        for file in &names {
            let copy = written.join(file.file_name().expect("a file"));
            assert_eq!(fs::read_to_string(copy).unwrap(), fs::read_to_string(file).unwrap());
        }

        // Again they are left alone, and so is a file of the application.
        lockkit::dialect::write_migrations::<<S as Server>::DB>(&written).unwrap();
        let own = written.join("0001_lockkit.sql");
        fs::write(&own, "SELECT 1").unwrap();
        let refused = lockkit::dialect::write_migrations::<<S as Server>::DB>(&written).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::AlreadyExists);
        assert!(refused.to_string().contains("0001_lockkit.sql"), "{refused}");
        assert_eq!(fs::read_to_string(own).unwrap(), "SELECT 1");
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
