//! Rows of `ShedLock`'s table that other programs wrote, and programs that poll it.

use std::error::Error as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use lockkit::{Error, Leases, store::ShedLockTable};
use support::{JoinSet, Server, TestDb, on_every_database, on_every_server};
use tokio::time::sleep;

use crate::shedlock::{Java, javas_table, our_table, pool};

/// What a request for the lock of a row gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Expected {
    Held,
    Granted,
    /// An error that says what is there.
    Refused,
}

use Expected::{Granted, Held, Refused};

/// `lock_until` and `locked_at` of rows that neither ShedLock nor lockkit writes.
fn odd_times(server: &str) -> Vec<(&'static str, &'static str, Expected)> {
    match server {
        "PostgreSQL" => vec![
            ("'infinity'", "'2026-01-01'", Held),
            ("'infinity'", "'infinity'", Held),
            ("'294276-12-31'", "'294276-12-31'", Held),
            ("'2026-01-01'", "'infinity'", Refused),
            ("'2026-01-01'", "'294276-12-31'", Refused),
            ("'-infinity'", "'-infinity'", Granted),
            ("'0044-03-15 BC'", "'0044-03-15 BC'", Granted),
        ],
        "SQLite" => vec![
            ("9223372036854775807", "9223372036854775807", Held),
            ("0", "9223372036854775807", Refused),
            ("1.5", "1.5", Granted),
            ("0", "-9223372036854775807", Granted),
        ],
        _ => vec![
            ("'9999-12-31 23:59:59.999999'", "'9999-12-31 23:59:59.999999'", Held),
            ("'2026-01-01'", "'9999-12-31 23:59:59.999999'", Refused),
            ("'0000-00-00'", "'0000-00-00'", Granted),
            ("'9999-12-31 23:59:59.999999'", "'0000-00-00'", Held),
            ("'1000-01-01'", "'1000-01-01'", Granted),
        ],
    }
}

on_every_database! {
    async fn one_odd_row_ends_no_list_and_is_not_granted_with_a_fence_that_cannot_rise<S>(db: TestDb<S>) {
        db.execute(&our_table(S::NAME, "shedlock")).await;
        let mut conn = db.connect().await;
        if ["MySQL", "MariaDB", "Galera"].contains(&S::NAME) {
            // Others keep no zero date.
            S::execute(&mut conn, "SET SESSION sql_mode = ''").await.unwrap();
        }
        let rows = odd_times(S::NAME);
        for (number, (until, at, _)) in rows.iter().enumerate() {
            let row = format!("('odd{number}', {until}, {at}, 'other')");
            let insert = format!("INSERT INTO shedlock (name, lock_until, locked_at, locked_by) VALUES {row}");
            S::execute(&mut conn, &insert).await.unwrap();
        }
        let leases = Leases::new(ShedLockTable::new(db.pool.clone()));
        let lease = leases.lease("job").acquire().await.unwrap();
        let listed = leases.list("").await.expect("a list").len();
        assert_eq!(listed, 1 + rows.iter().filter(|it| it.2 == Held).count());
        for (number, (until, at, expected)) in rows.into_iter().enumerate() {
            let (key, what) = (format!("odd{number}"), format!("{until} {at}"));
            let shown = leases.show(&*key).await.expect(&what);
            assert_eq!(shown.is_some(), expected == Held, "{what}: {shown:?}");
            match leases.lease(&*key).try_acquire().await {
                Ok(None) => assert_eq!(expected, Held, "{what}"),
                Ok(Some(granted)) => {
                    assert_eq!(expected, Granted, "{what}");
                    // Of this century.
                    assert!(granted.fence().get() > 946_684_800_000_000, "{what}: {}", granted.fence());
                    granted.release().await.unwrap();
                }
                Err(err) => {
                    assert_eq!(expected, Refused, "{what}: {err:?}");
                    let source = err.source().expect("what is there").to_string();
                    assert!(source.contains(&format!("`locked_at` of the row `{key}`")), "{source}");
                    let kept = format!("SELECT COUNT(*) FROM shedlock WHERE name = '{key}' AND locked_by = 'other'");
                    assert_eq!(db.fetch_i64(&kept).await, Some(1), "{what}");
                }
            }
        }
        lease.release().await.unwrap();
        assert_eq!(leases.list("job").await.unwrap().len(), 0);
    }

    async fn of_a_foreign_holders_name_only_the_printable_beginning_is_shown<S>(db: TestDb<S>) {
        db.execute(&our_table(S::NAME, "shedlock")).await;
        let (until, at) = match S::NAME {
            "SQLite" => ("9000000000000000", "0"),
            _ => ("'9000-01-01'", "'2026-01-01'"),
        };
        let name = format!("node-7\u{1b}\n{}-secret", "x".repeat(80));
        let row = format!("('job', {until}, {at}, '{name}')");
        db.execute(&format!("INSERT INTO shedlock (name, lock_until, locked_at, locked_by) VALUES {row}")).await;
        let leases = Leases::builder(ShedLockTable::new(db.pool.clone())).wait(Duration::ZERO).build().unwrap();
        let shown = leases.show("job").await.unwrap().expect("it is held");
        let refused = leases.lease("job").acquire().await.unwrap_err();
        assert!(matches!(refused, Error::Contended { .. }), "{refused:?}");
        assert_eq!(shown.holder, format!("node-7{}…", "x".repeat(58)));
        for text in [format!("{shown:?}"), format!("{refused:?}"), refused.to_string()] {
            assert!(!text.contains("secret") && !text.contains('\u{1b}'), "{text}");
        }
    }
}

on_every_server! {
    async fn a_waiter_is_not_starved_by_programs_that_poll<S>(db: TestDb<S>) {
        const PAUSE: Duration = Duration::from_millis(5);
        db.execute(javas_table(S::NAME)).await;
        let pool = pool::<S>(&db.url);
        let (polled, is_over) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
        let mut polling = JoinSet::new();
        for _ in 0..3 {
            let (java, polled, is_over) = (Java::<S> { pool: pool.clone() }, polled.clone(), is_over.clone());
            polling.spawn(async move {
                while !is_over.load(Ordering::Relaxed) {
                    if java.lock(600.0).await {
                        polled.fetch_add(1, Ordering::Relaxed);
                        sleep(PAUSE).await;
                        assert!(java.unlock(0.0).await);
                    }
                    sleep(PAUSE).await;
                }
            });
        }
        let leases = Leases::builder(ShedLockTable::new(pool)).wait(Duration::from_secs(60)).build().unwrap();
        // A busy machine holds up one round or another; a waiter that is starved loses each.
        let mut rounds = Vec::new();
        let is_served = loop {
            let before = polled.load(Ordering::Relaxed);
            for _ in 0..20 {
                let lease = leases.lease("job").acquire().await.unwrap();
                sleep(PAUSE).await;
                lease.release().await.unwrap();
                sleep(PAUSE).await;
            }
            rounds.push(polled.load(Ordering::Relaxed) - before);
            let is_served = rounds.last().is_some_and(|polled| *polled < 20 * 20);
            if is_served || rounds.len() == 3 {
                break is_served;
            }
        };
        is_over.store(true, Ordering::Relaxed);
        polling.join_all().await;
        let told =
            format!("{}: 20 grants to a waiter beside {rounds:?} to three programs that poll every {PAUSE:?}", S::NAME);
        println!("{told}");
        assert!(is_served, "{told}");
    }
}
