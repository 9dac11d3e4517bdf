//! `lockkit ls`: which leases it shows, and how.

use std::time::Duration;

use lockkit::Leases;
use serde_json::Value;
use support::{Server, TestDb, User, on_databases, on_every_database, on_every_server};

use crate::{lockkit, output, url};

/// The leases that `ls` shows as JSON.
async fn listed(on: &[String], arguments: &[&str]) -> Vec<Value> {
    let shown = output(lockkit(on, &[&["ls", "--json"], arguments].concat())).await;
    let text = String::from_utf8(shown.stdout.clone()).expect("UTF-8");
    assert!(shown.status.success(), "{shown:?}");
    text.lines().map(|it| serde_json::from_str(it).expect("JSON")).collect()
}

/// The texts of these keys.
fn texts<'v, const N: usize>(lease: &'v Value, keys: [&str; N]) -> [&'v str; N] {
    keys.map(|it| lease[it].as_str().unwrap_or_default())
}

on_every_database! {
    async fn a_row_that_cannot_be_read_hides_no_other<S>(db: TestDb<S>) {
        let leases = Leases::new(db.pool.clone());
        let _good = leases.lease("good").acquire().await.unwrap();
        let copy = "INSERT INTO lockkit_lease (name, token, holder, fence, acquired_us, expires_us, renewals, ttl_us) \
                    SELECT";
        let from = "FROM lockkit_lease WHERE name = 'good'";
        let (least, most) = (i64::MIN, i64::MAX);
        for row in [
            format!("'before', token, 'me', fence, {least}, expires_us, renewals, ttl_us"),
            format!("'far', token, 'me', fence, {most}, expires_us, renewals, ttl_us"),
            format!("'later', token, 'me', fence, acquired_us, {most}, renewals, -1"),
            format!("'renewed', token, 'me', fence, acquired_us, {most}, {least}, {least}"),
        ] {
            db.execute(&format!("{copy} {row} {from}")).await;
        }
        let mut expected = vec![
            ["before", "unreadable", "it was acquired before 1970 or after 9999"],
            ["far", "unreadable", "it was acquired before 1970 or after 9999"],
            ["good", "held", ""],
            ["later", "unreadable", "its ttl is negative"],
            ["renewed", "unreadable", "its ttl is negative"],
        ];
        // Elsewhere the column has the right length.
        if S::NAME == "PostgreSQL" || S::NAME == "SQLite" {
            let row = "'token', substr(token, 2), 'me', fence, acquired_us, expires_us, renewals, ttl_us";
            db.execute(&format!("{copy} {row} {from}")).await;
            expected.push(["token", "unreadable", "its token does not have 16 bytes"]);
        }
        let on = url(&db.url);
        let seen = listed(&on, &[]).await;
        let seen: Vec<_> = seen.iter().map(|it| texts(it, ["key", "state", "flaw"])).collect();
        assert_eq!(seen, expected);
        let shown = output(lockkit(&on, &["ls"])).await;
        let shown = String::from_utf8(shown.stdout).expect("UTF-8");
        assert!(shown.lines().count() == expected.len() + 1, "{shown}");
        assert!(shown.contains("unreadable: its ttl is negative"), "{shown}");
    }

    async fn a_lease_whose_holder_died_is_shown_with_all_until_another_takes_it<S>(db: TestDb<S>) {
        let leases = Leases::new(db.pool.clone());
        let of = async |key: &str| leases.lease(key).acquire().await.unwrap();
        let (dead, _held) = (of("dead").await, of("held").await);
        of("released").await.release().await.unwrap();
        // Its row still has a token after its end.
        leases.lease("kept").min_hold(Duration::from_secs(3600)).acquire().await.unwrap().release().await.unwrap();
        db.execute("UPDATE lockkit_lease SET expires_us = expires_us - 90000000 WHERE name = 'dead'").await;
        db.execute("UPDATE lockkit_lease SET expires_us = 1000000 WHERE name = 'kept'").await;
        let on = url(&db.url);
        let seen = |listed: Vec<Value>| {
            listed.iter().map(|it| texts(it, ["key", "state"]).map(str::to_owned)).collect::<Vec<_>>()
        };
        assert_eq!(seen(listed(&on, &[]).await), [["held", "held"]]);
        let all = listed(&on, &["--all"]).await;
        let died = &all[1];
        assert_eq!((&died["holder"], &died["fence"]), (&all[0]["holder"], &dead.fence().get().into()));
        assert!((60_000..120_000).contains(&died["expired_ms"].as_u64().expect("a time")), "{died}");
        assert_eq!(seen(all), [["held", "held"], ["dead", "died"]]);
        assert_eq!(seen(listed(&on, &["--all", "hel"]).await), [["held", "held"]]);
        let shown = output(lockkit(&on, &["ls", "--all", "dea"])).await;
        assert!(String::from_utf8(shown.stdout).expect("UTF-8").contains("died 1m"));
        let next = leases.lease("dead").acquire().await.unwrap();
        assert_eq!(seen(listed(&on, &["--all"]).await), [["dead", "held"], ["held", "held"]]);
        next.release().await.unwrap();
    }
}

on_every_server! {
    async fn a_user_who_may_not_read_the_leases_learns_what_the_server_refused<S>(db: TestDb<S>) {
        let user = User::new(&db).await;
        // MySQL and MariaDB let a user without any right not even connect to the database.
        if S::NAME != "PostgreSQL" {
            db.execute(&format!("GRANT SELECT ON lockkit_stock TO {}", user.name)).await;
        }
        let refused = output(lockkit(&url(&user.url), &["ls"])).await;
        let said = String::from_utf8(refused.stderr).expect("UTF-8");
        assert_eq!(refused.status.code(), Some(1), "{said}");
        let cause = if S::NAME == "PostgreSQL" { "permission denied for" } else { "SELECT command denied to user" };
        assert!(said.contains("while listing leases: ") && said.matches(cause).count() == 1, "{said}");
        user.delete(&db).await;
    }
}

on_every_database! {
    async fn of_two_who_steal_at_once_one_takes_the_lease<S>(db: TestDb<S>) {
        let leases = Leases::new(db.pool.clone());
        let lease = leases.lease("nightly").acquire().await.unwrap();
        let (on, fence) = (url(&db.url), lease.fence().to_string());
        let steal = || output(lockkit(&on, &["steal", "nightly", "--yes", "--fence", &fence]));
        let (one, other) = tokio::join!(steal(), steal());
        let mut codes = [one.status.code(), other.status.code()];
        codes.sort_unstable();
        assert_eq!(codes, [Some(0), Some(79)], "{one:?} {other:?}");
        assert!(leases.show("nightly").await.unwrap().is_none());
    }
}

on_databases! { [postgres]
    async fn of_more_than_ten_thousand_leases_the_first_are_listed_and_it_says_so<S>(db: TestDb<S>) {
        let _lease = Leases::new(db.pool.clone()).lease("first").acquire().await.unwrap();
        db.execute(
            "INSERT INTO lockkit_lease (name, token, holder, fence, acquired_us, expires_us, renewals, ttl_us)
             SELECT 'order:' || i, token, holder, fence, acquired_us, expires_us, renewals, ttl_us
             FROM lockkit_lease, generate_series(1, 10000) AS i",
        )
        .await;
        for (prefix, lines, note) in [("", 10_000, true), ("order:99", 111, false)] {
            let shown = output(lockkit(&url(&db.url), &["ls", "--json", prefix])).await;
            let [listed, said] = [shown.stdout, shown.stderr].map(|it| String::from_utf8(it).expect("UTF-8"));
            assert_eq!((listed.lines().count(), said.contains("give a PREFIX")), (lines, note), "{said}");
        }
    }
}
