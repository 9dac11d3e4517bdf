//! `lockkit explain`: who blocks whom.

use std::time::Duration;

use lockkit::{Leases, NamedLock, SessionLock, Wait};
use lockkit_inspect::Waits;
use serde_json::Value;
use sqlx::Connection;
use support::{Server, TestDb, User, on_databases, on_every_server};
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};

use crate::{PATIENCE, lockkit, output, url};

/// What `explain` knows, as soon as there is this of it.
async fn picture(on: &[String], arguments: &[&str], is_there: impl Fn(&Value) -> bool) -> Value {
    let looking = async {
        loop {
            let shown = output(lockkit(on, &[&["explain", "--json"], arguments].concat())).await;
            assert!(shown.status.success(), "{shown:?}");
            let picture: Value = serde_json::from_slice(&shown.stdout).expect("JSON");
            if is_there(&picture) {
                return picture;
            }
            // MariaDB keeps an answer for those who ask again within 0.1 s.
            sleep(Duration::from_millis(150)).await;
        }
    };
    timeout(PATIENCE, looking).await.expect("it is shown")
}

fn id_of<S: Server>() -> &'static str {
    if S::NAME == "PostgreSQL" { "SELECT pg_backend_pid()" } else { "SELECT CONNECTION_ID()" }
}

on_every_server! {
    async fn a_chain_of_sessions_is_a_tree_and_ends_with_its_first<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE items (item_id INT PRIMARY KEY, stock INT)").await;
        db.execute("INSERT INTO items VALUES (1, 9), (2, 9), (3, 9)").await;
        let take = |item: usize| format!("UPDATE items SET stock = stock - 1 WHERE item_id = {item}");
        // Each session has a row, and wants that of the one before.
        let (mut sessions, mut ids) = (Vec::new(), Vec::new());
        for number in 1..=4 {
            let mut tx = lockkit::begin(&db.pool).await.unwrap();
            ids.push(S::fetch_i64(&mut tx, id_of::<S>()).await.unwrap().expect("a number"));
            if number < 4 {
                S::execute(&mut tx, &take(number)).await.unwrap();
            }
            sessions.push(tx);
        }
        let mut waiting = JoinSet::new();
        for (at, mut tx) in sessions.drain(1..).enumerate() {
            let take = take(at + 1);
            waiting.spawn(async move {
                S::execute(&mut tx, &take).await.unwrap();
                tx.commit().await.unwrap();
            });
        }
        let on = url(&db.url);
        let picture = picture(&on, &[], |it| it["waits"].as_array().is_some_and(|it| it.len() == 3)).await;
        let mut waits: Vec<(i64, &str, &Value)> = Vec::new();
        for wait in picture["waits"].as_array().expect("a list") {
            waits.push((wait["waiter"].as_i64().unwrap(), wait["lock"].as_str().unwrap(), &wait["holders"]));
        }
        waits.sort_by_key(|it| it.1);
        let holders: Vec<Value> = ids.iter().map(|it| serde_json::json!([it])).collect();
        let lock = |item: usize| format!("items (item_id={item})");
        for (at, wait) in waits.iter().enumerate() {
            assert_eq!(*wait, (ids[at + 1], &*lock(at + 1), &holders[at]), "{picture}");
        }
        let shown = output(lockkit(&on, &["explain"])).await;
        let shown = String::from_utf8(shown.stdout).expect("UTF-8");
        println!("{}\n{shown}", S::NAME);
        let lines: Vec<&str> = shown.lines().collect();
        let starts = ["", "└ ", "  └ ", "    └ "];
        for (at, (start, id)) in starts.iter().zip(&ids).enumerate() {
            assert!(lines[at + 1].starts_with(&format!("{start}{id} ")), "{shown}");
        }
        let end = lines.last().and_then(|it| it.strip_prefix(&format!("to end session {}: ", ids[0])));
        db.execute(end.unwrap_or_else(|| panic!("no statement that ends the first:\n{shown}"))).await;
        timeout(PATIENCE, waiting.join_all()).await.expect("the others go on");
        assert!(sessions.remove(0).commit().await.is_err(), "it was ended");
    }

    async fn waits_for_names_sessions_and_leases_are_in_one_picture<S>(db: TestDb<S>) {
        let mut holder = lockkit::begin(&db.pool).await.unwrap();
        NamedLock::new("order:7").lock(&mut holder).await.unwrap();
        let leader = SessionLock::new("leader").acquire(&db.pool).await.unwrap();
        let leases = |name: &str| Leases::builder(db.pool.clone()).holder(name).build().unwrap();
        let (first, second) = (leases("api-1"), leases("api-2"));
        let lease = first.lease("nightly").acquire().await.unwrap();
        let mut waiting = JoinSet::new();
        let pool = db.pool.clone();
        waiting.spawn(async move {
            let mut tx = lockkit::begin(&pool).await.unwrap();
            NamedLock::new("order:7").wait(Wait::Unbounded).lock(&mut tx).await.unwrap();
            tx.commit().await.unwrap();
        });
        let pool = db.pool.clone();
        waiting.spawn(async move {
            let session = SessionLock::new("leader").wait(Wait::Unbounded).acquire(&pool).await.unwrap();
            session.release().await.unwrap();
        });
        waiting.spawn(async move {
            let lease = second.lease("nightly").wait(Wait::Unbounded).acquire().await.unwrap();
            lease.release().await.unwrap();
        });
        let has = |picture: &Value, lock: &str| {
            let waits = picture["waits"].as_array().expect("a list");
            waits.iter().any(|it| it["lock"] == lock && it["holders"].as_array().is_some_and(|it| it.len() == 1))
        };
        let keys = match S::NAME {
            // It can tell the name of one session lock alone.
            "MariaDB" => &["--key", "leader"][..],
            _ => &["--key", "leader", "--key", "order:7"],
        };
        let all = |it: &Value| {
            has(it, "named lock order:7") && has(it, "session lock leader") && it["leases"] != serde_json::json!([])
        };
        let picture = picture(&url(&db.url), keys, all).await;
        let queue = &picture["leases"][0];
        assert_eq!((&queue["key"], &queue["holder"]["name"]), (&"nightly".into(), &"api-1".into()));
        assert_eq!(queue["holder"]["fence"], lease.fence().get());
        assert_eq!(queue["waiters"][0]["holder"], "api-2");
        holder.commit().await.unwrap();
        leader.release().await.unwrap();
        lease.release().await.unwrap();
        timeout(PATIENCE, waiting.join_all()).await.expect("they go on");
    }

    async fn a_user_who_may_not_see_others_is_told_what_to_grant<S>(db: TestDb<S>) {
        let user = User::new(&db).await;
        match S::NAME {
            "PostgreSQL" => db.execute(&format!("GRANT SELECT ON lockkit_lease TO {}", user.name)).await,
            _ => db.execute(&format!("GRANT SELECT ON {}.* TO {}", db.name(), user.name)).await,
        };
        let shown = output(lockkit(&url(&user.url), &["explain"])).await;
        let said = String::from_utf8(shown.stderr).expect("UTF-8");
        assert!(shown.status.success(), "{said}");
        let grant = if S::NAME == "PostgreSQL" { "GRANT pg_monitor TO " } else { "GRANT PROCESS ON *.* TO " };
        assert!(said.contains(grant) && said.contains(&user.name), "{said}");
        user.delete(&db).await;
    }
}

on_every_server! {
    async fn a_session_that_waits_for_a_table_is_shown<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE items (item_id INT PRIMARY KEY, stock INT)").await;
        let mut reader = lockkit::begin(&db.pool).await.unwrap();
        S::execute(&mut reader, "SELECT * FROM items").await.unwrap();
        let id = S::fetch_i64(&mut reader, id_of::<S>()).await.unwrap().expect("a number");
        let pool = db.pool.clone();
        let altered = tokio::spawn(async move {
            let mut conn = pool.acquire().await.unwrap();
            S::execute(&mut conn, "ALTER TABLE items ADD more INT").await.unwrap();
        });
        let on = url(&db.url);
        let picture = picture(&on, &[], |it| it["waits"] != serde_json::json!([])).await;
        let wait = &picture["waits"][0];
        if S::NAME == "MariaDB" {
            assert_eq!((&wait["lock"], &wait["holders"]), (&"a table that others use".into(), &serde_json::json!([])));
            assert!(picture["unseen"][0].as_str().unwrap().contains("metadata_lock_info"), "{picture}");
        } else {
            assert!(wait["lock"].as_str().unwrap().contains("items"), "{picture}");
            assert_eq!(wait["holders"], serde_json::json!([id]), "{picture}");
        }
        reader.commit().await.unwrap();
        timeout(PATIENCE, altered).await.expect("it goes on").unwrap();
    }
}

on_databases! { [mariadb, mysql]
    async fn one_look_asks_for_the_version_of_the_server_once<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE items (item_id INT PRIMARY KEY, stock INT)").await;
        db.execute("INSERT INTO items VALUES (1, 9)").await;
        let take = "UPDATE items SET stock = stock - 1 WHERE item_id = 1";
        let mut holder = lockkit::begin(&db.pool).await.unwrap();
        S::execute(&mut holder, take).await.unwrap();
        let pool = db.pool.clone();
        let waiting = tokio::spawn(async move {
            let mut tx = lockkit::begin(&pool).await.unwrap();
            S::execute(&mut tx, take).await.unwrap();
            tx.commit().await.unwrap();
        });
        let mut conn = db.connect().await;
        let id = S::fetch_i64(&mut conn, id_of::<S>()).await.unwrap().expect("a number");
        db.execute("SET GLOBAL log_output = 'TABLE'").await;
        db.execute("SET GLOBAL general_log = ON").await;
        let looking = async {
            let mut looks = 1;
            while Waits::of::<<S as Server>::DB>(&mut conn, &[]).await.unwrap().sessions.len() != 2 {
                looks += 1;
                sleep(Duration::from_millis(150)).await;
            }
            looks
        };
        let looks: i64 = timeout(PATIENCE, looking).await.expect("both are seen");
        db.execute("SET GLOBAL general_log = OFF").await;
        let asked = format!(
            "SELECT COUNT(*) FROM mysql.general_log
             WHERE thread_id = {id} AND command_type = 'Execute' AND argument LIKE '%VERSION()%'"
        );
        assert_eq!(db.fetch_i64(&asked).await, Some(looks));
        holder.commit().await.unwrap();
        timeout(PATIENCE, waiting).await.expect("it goes on").unwrap();
    }
}

on_every_server! {
    async fn a_prepared_transaction_is_named_and_ended_by_what_it_says<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE items (item_id INT PRIMARY KEY, stock INT)").await;
        db.execute("INSERT INTO items VALUES (1, 9)").await;
        let take = "UPDATE items SET stock = stock - 1 WHERE item_id = 1";
        let name = format!("prepared for {}'s", db.name());
        let quoted = name.replace('\'', "''");
        let mut conn = db.connect().await;
        for statement in if S::NAME == "PostgreSQL" {
            ["BEGIN".to_owned(), take.to_owned(), format!("PREPARE TRANSACTION '{quoted}'")].to_vec()
        } else {
            let xa = |step| format!("XA {step} '{quoted}', 'branch', 7");
            [xa("START"), take.to_owned(), xa("END"), xa("PREPARE")].to_vec()
        } {
            S::execute(&mut conn, &statement).await.unwrap();
        }
        // Its session ends, and the locks stay.
        conn.close().await.unwrap();
        let pool = db.pool.clone();
        let waiting = tokio::spawn(async move {
            let mut tx = lockkit::begin(&pool).await.unwrap();
            S::execute(&mut tx, take).await.unwrap();
            tx.commit().await.unwrap();
        });
        let on = url(&db.url);
        let picture = picture(&on, &[], |it| it["waits"] != serde_json::json!([])).await;
        assert_eq!(picture["waits"][0]["holders"], serde_json::json!([0]), "{picture}");
        let sessions = picture["sessions"].as_array().expect("a list");
        let prepared = sessions.iter().find(|it| it["id"] == 0).expect("it is listed");
        assert_eq!((&prepared["name"], &prepared["state"]), (&format!("prepared: {name}").into(), &"prepared".into()));
        db.execute(prepared["end_by"].as_str().expect("a statement")).await;
        timeout(PATIENCE, waiting).await.expect("it goes on").unwrap();
        assert_eq!(db.fetch_i64("SELECT stock FROM items").await, Some(8));
    }
}
