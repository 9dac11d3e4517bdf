//! `lockkit doctor`: what it finds on servers that are wrong in one way, and that the statement it prints mends it.

use serde_json::Value;
use support::{PgBouncer, Server, TestDb, User, on_databases, on_every_database, on_every_server};

use crate::{lockkit, output, url};

/// The exit code, and the findings that are a warning or worse.
async fn examined(url_of: &str, arguments: &[&str]) -> (Option<i32>, Vec<Value>) {
    let ended = output(lockkit(&url(url_of), &[&["doctor", "--json"], arguments].concat())).await;
    let lines = String::from_utf8(ended.stdout.clone()).expect("UTF-8");
    let findings = lines.lines().map(|it| serde_json::from_str(it).expect("JSON"));
    // How fast the machine is does not matter here.
    let is_bad = |it: &Value| (it["level"] == "warn" || it["level"] == "fail") && it["check"] != "latency";
    let bad = findings.filter(is_bad).collect();
    assert!(!lines.is_empty(), "{ended:?}");
    (ended.status.code(), bad)
}

fn checks(findings: &[Value]) -> Vec<(&str, &str)> {
    findings.iter().map(|it| (it["level"].as_str().expect("text"), it["check"].as_str().expect("text"))).collect()
}

/// The database with settings that make a server of the tests a good one. It does not wait for its disk.
fn good<S: Server>(db_url: &str) -> String {
    let settings = "?options[tcp_keepalives_idle]=30&options[synchronous_commit]=on";
    if S::NAME == "PostgreSQL" { db_url.to_owned() + settings } else { db_url.to_owned() }
}

/// What the servers of the tests have in common.
fn usual<S: Server>() -> Vec<(&'static str, &'static str)> {
    if S::NAME == "SQLite" { Vec::new() } else { vec![("warn", "durability")] }
}

on_every_database! {
    async fn a_good_server_has_nothing_to_mend_and_says_which_ttl_is_safe<S>(db: TestDb<S>) {
        let (code, bad) = examined(&good::<S>(&db.url), &["--latency"]).await;
        assert_eq!((code, checks(&bad)), (Some(0), usual::<S>()), "{bad:?}");
        let shown = output(lockkit(&url(&good::<S>(&db.url)), &["doctor", "--latency"])).await;
        let shown = String::from_utf8(shown.stdout).expect("UTF-8");
        assert!(shown.contains("latency") && shown.contains(" ms or more is safe"), "{shown}");
        println!("{}\n{shown}", S::NAME);
        let (code, _) = examined(&good::<S>(&db.url), &["--strict"]).await;
        assert_eq!(code, Some(i32::from(S::NAME != "SQLite")), "a warning is an error if the caller says so");
    }

    async fn missing_tables_are_found_and_made_by_what_it_says<S>(db: TestDb<S>) {
        drop(db);
        let db = TestDb::<S>::empty(2).await;
        let (code, bad) = examined(&good::<S>(&db.url), &[]).await;
        assert!(code == Some(2) && checks(&bad).contains(&("fail", "tables")), "{bad:?}");
        let mend = bad.iter().find(|it| it["check"] == "tables").expect("it is there")["mend"].as_str();
        let mend = mend.and_then(|it| it.strip_prefix("lockkit ")).expect("a command of lockkit");
        assert!(output(lockkit(&url(&db.url), &[mend])).await.status.success());
        assert_eq!(examined(&good::<S>(&db.url), &[]).await.0, Some(0));
    }

    async fn a_statement_that_scans_is_found_and_one_with_an_index_is_not<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE item (id INT PRIMARY KEY, owner INT, stock INT)").await;
        db.execute("INSERT INTO item VALUES (1, 7, 1), (2, 8, 1)").await;
        let query = async |by: &str| {
            let statement = format!("SELECT * FROM item WHERE {by}");
            let (code, bad) = examined(&good::<S>(&db.url), &["--query", &statement]).await;
            (code, bad.iter().any(|it| it["check"] == "query"))
        };
        assert_eq!(query("id = 1").await, (Some(0), false));
        assert_eq!(query("owner = 7").await, (Some(2), true));
        db.execute("CREATE INDEX item_owner ON item (owner)").await;
        assert_eq!(query("owner = 7").await, (Some(0), false));
        // These are quotes and comments on every database.
        assert_eq!(query("id = 1 AND ';' <> 'a' /* ; */; -- ;").await, (Some(0), false));
        for several in ["SELECT 1; DROP TABLE item", "SELECT ';'; DROP TABLE item", "SELECT 1 /* ; */; DROP TABLE item"]
        {
            let refused = output(lockkit(&url(&db.url), &["doctor", "--query", several])).await;
            assert_eq!((refused.status.code(), db.fetch_i64("SELECT COUNT(*) FROM item").await), (Some(1), Some(2)));
        }
    }
}

on_every_server! {
    async fn pools_that_are_too_large_for_the_server_are_found<S>(db: TestDb<S>) {
        let (_, bad) = examined(&good::<S>(&db.url), &["--pools", "2x10"]).await;
        assert_eq!(checks(&bad), usual::<S>());
        let (code, bad) = examined(&good::<S>(&db.url), &["--pools", "1000x10", "--strict"]).await;
        let found = bad.iter().find(|it| it["check"] == "connections").expect("it is found");
        let mend = found["mend"].as_str().expect("a statement");
        assert!(code == Some(1) && mend.contains("max_connections = 12500"), "{found}");
    }

    async fn a_missing_privilege_is_found_and_granted_by_what_it_says<S>(db: TestDb<S>) {
        let user = User::new(&db).await;
        for table in ["lease", "stock", "stock_batch", "fence", "answer", "named"] {
            let rights = if table == "lease" { "SELECT, INSERT, UPDATE" } else { "SELECT, INSERT, UPDATE, DELETE" };
            if table != "named" || S::NAME != "PostgreSQL" {
                db.execute(&format!("GRANT {rights} ON lockkit_{table} TO {}", user.name)).await;
            }
        }
        let (code, bad) = examined(&good::<S>(&user.url), &[]).await;
        let wrong: Vec<&Value> = bad.iter().filter(|it| it["level"] == "fail").collect();
        assert_eq!((code, wrong.len(), wrong[0]["check"].as_str()), (Some(2), 1, Some("privileges")), "{bad:?}");
        db.execute(wrong[0]["mend"].as_str().expect("a statement")).await;
        assert_eq!(examined(&good::<S>(&user.url), &[]).await.0, Some(0));
        if S::NAME == "PostgreSQL" {
            db.execute(&format!("REVOKE UPDATE ON lockkit_fence FROM {}", user.name)).await;
            assert_eq!(examined(&good::<S>(&db.url), &["--role", &user.name]).await.0, Some(2));
        }
        user.delete(&db).await;
    }
}

on_databases! { [postgres]
    async fn settings_that_harm_locks_are_found<S>(db: TestDb<S>) {
        let with = |setting: &str| format!("{}&{setting}", good::<S>(&db.url));
        for (setting, level, check) in [
            ("options[tcp_keepalives_idle]=7200", "warn", "keepalive"),
            ("options[synchronous_commit]=off", "warn", "durability"),
            ("options[default_transaction_read_only]=on", "fail", "server"),
        ] {
            let (code, bad) = examined(&with(setting), &[]).await;
            let name = setting.trim_start_matches("options[").split(']').next().expect("a name");
            let is_it = |it: &&Value| {
                // Of a server that is read-only, the reason counts.
                it["check"] == check && (level == "fail" || it["what"].as_str().is_some_and(|it| it.contains(name)))
            };
            assert_eq!(bad.iter().find(is_it).map(|it| &it["level"]), Some(&Value::from(level)), "{setting}: {bad:?}");
            assert_eq!(code, Some(if level == "fail" { 2 } else { 0 }), "{setting}: {bad:?}");
        }
    }

    async fn a_pooler_that_shares_sessions_is_found<S>(db: TestDb<S>) {
        let url = db.url.clone();
        let pooler = tokio::task::spawn_blocking(move || PgBouncer::start(&url, "transaction")).await.expect("start");
        let (_, bad) = examined(pooler.url(), &[]).await;
        assert!(checks(&bad).contains(&("warn", "sessions")), "{bad:?}");
    }
}

on_databases! { [sqlite]
    async fn a_journal_that_makes_readers_wait_is_found_and_changed_by_what_it_says<S>(db: TestDb<S>) {
        let change = "PRAGMA journal_mode = DELETE";
        db.pool.close().await;
        let mut conn = db.connect().await;
        S::execute(&mut conn, change).await.expect("change the journal");
        let (code, bad) = examined(&db.url, &["--strict"]).await;
        assert_eq!((code, checks(&bad)), (Some(1), vec![("warn", "journal")]));
        S::execute(&mut conn, bad[0]["mend"].as_str().expect("a statement")).await.expect("mend it");
        assert_eq!(examined(&db.url, &["--strict"]).await.0, Some(0));
    }
}

on_every_server! {
    async fn a_statement_is_planned_and_never_run<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE item (id INT PRIMARY KEY, stock INT)").await;
        db.execute("INSERT INTO item VALUES (1, 1)").await;
        for option in ["ANALYZE DELETE FROM item", "(ANALYZE) DELETE FROM item", "/**/ DELETE FROM item"] {
            let refused = output(lockkit(&url(&db.url), &["doctor", "--query", option])).await;
            assert_eq!(refused.status.code(), Some(64), "{refused:?}");
        }
        if S::NAME == "PostgreSQL" {
            let quoted = "SELECT * FROM item WHERE id = length($$;$$) AND E'\\';' <> 'a'";
            assert_eq!(examined(&good::<S>(&db.url), &["--query", quoted]).await.0, Some(0));
        }
        let (code, bad) = examined(&good::<S>(&db.url), &["--query", "DELETE FROM item"]).await;
        assert!(code == Some(2) && checks(&bad).contains(&("fail", "query")), "{bad:?}");
        if S::NAME != "PostgreSQL" {
            let writes = "CREATE FUNCTION writes() RETURNS INT MODIFIES SQL DATA BEGIN \
                          INSERT INTO item VALUES (2, 2); RETURN 2; END";
            db.execute(writes).await;
            let query = "SELECT * FROM (SELECT writes() AS id) AS d";
            output(lockkit(&url(&db.url), &["doctor", "--query", query])).await;
        }
        assert_eq!(db.fetch_i64("SELECT count(*) FROM item").await, Some(1));
    }
}
