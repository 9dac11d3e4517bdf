//! The server's clock: what a step back costs, and that no renewal is believed by the clock of the client.

use std::time::Duration;

use lockkit::{
    Answered, Error, Idempotent, LeaseStore, Leases,
    idempotent::Attempt,
    store::{Acquired, Answer, Claim, LeaseRecord, Previous, Renewal, Token},
};
use sqlx::pool::PoolOptions;
use support::{Backend, JoinSet, Proxy, Server, TestDb, on_every_database, on_every_server};
use tokio::time::{Instant, sleep};

const MILLIS: fn(u64) -> Duration = Duration::from_millis;
const SECONDS: fn(u64) -> Duration = Duration::from_secs;

/// The step of the clock, longer than any of these tests lasts.
const STEP: Duration = Duration::from_secs(600);

/// How long a waiter may have to wait on a busy machine. Less than [`STEP`] by far.
const PATIENCE: Duration = Duration::from_secs(30);

/// A claim that nobody renews: the process dies right after it.
fn claim(key: &str, ttl: Duration) -> Claim {
    Claim::new(key, Token::random(), "dead", ttl)
}

/// Grants the claim.
async fn take<L: LeaseStore>(store: &L, claim: &Claim) -> lockkit::Fence {
    match store.lease_acquire(claim).await.unwrap() {
        Acquired::Granted(grant) => grant.fence,
        held @ Acquired::Held { .. } => panic!("{held:?}"),
    }
}

async fn look<L: LeaseStore>(store: &L, key: &str) -> LeaseRecord {
    store.lease_look(&key.into()).await.unwrap().expect("it is held")
}

async fn renew<L: LeaseStore>(store: &L, claim: &Claim, ttl: Duration) -> Answer {
    let renewal = Renewal::new(claim.key.clone(), claim.token, ttl);
    store.lease_renew(&[renewal]).await.unwrap()[0]
}

/// Sets the server's clock back as the rows of leases see it: all that was written before is in the future.
async fn set_back<S: Backend>(db: &TestDb<S>, by: Duration) {
    let by = by.as_micros();
    db.execute(&format!(
        "UPDATE lockkit_lease SET expires_us = expires_us + {by}, acquired_us = acquired_us + {by}, fence = fence + {by}
         WHERE token IS NOT NULL"
    ))
    .await;
}

on_every_database! {
    async fn when_the_clock_is_set_back_a_dead_holder_is_replaced_within_its_ttl<S>(db: TestDb<S>) {
        let dead = claim("k", MILLIS(700));
        let fence = take(&db.pool, &dead).await;
        set_back(&db, STEP).await;

        let lease = Leases::new(db.pool.clone()).lease("k").wait(PATIENCE).acquire().await.unwrap();

        assert!(lease.fence() > fence);
        assert!(
            matches!(lease.previous(), Some(Previous { holder, .. }) if holder == "dead"),
            "{:?}",
            lease.previous()
        );
    }

    async fn when_the_clock_is_set_back_several_leases_are_free_within_their_ttl<S>(db: TestDb<S>) {
        for key in ["a", "b"] {
            take(&db.pool, &claim(key, MILLIS(700))).await;
        }
        set_back(&db, STEP).await;

        drop(Leases::new(db.pool.clone()).all(["a", "b", "c"]).wait(PATIENCE).acquire().await.unwrap());
    }

    async fn when_the_clock_is_set_back_permits_readers_and_tickets_are_free_within_their_ttl<S>(db: TestDb<S>) {
        let dead = ["s/permit/0", "s/permit/1", "rw/reader/7", "q", "q/queue/1"];
        for key in dead {
            take(&db.pool, &claim(key, MILLIS(700))).await;
        }
        set_back(&db, STEP).await;

        let leases = Leases::builder(db.pool.clone()).wait(PATIENCE).build().unwrap();
        drop(leases.semaphore("s", 2).acquire().await.unwrap());
        drop(leases.rw("rw").write().acquire().await.unwrap());
        drop(leases.lease("q").fair().acquire().await.unwrap());
    }

    async fn when_the_clock_is_set_back_an_answer_stays_and_an_attempt_that_has_begun_is_known<S>(db: TestDb<S>) {
        let leases = Leases::new(db.pool.clone());
        let pay = || Idempotent::key("paid").run(&db.pool, async |_| Ok::<_, Error>(7));
        assert_eq!(pay().await.unwrap(), Answered::Now(7));
        let failed = Idempotent::key("begun").outside(&leases, async |_| Err::<(), _>(Error::conflict()));
        failed.await.unwrap_err();
        let by = STEP.as_micros();
        let set = format!("made_us = made_us + {by}, keep_until_us = keep_until_us + {by}");
        db.execute(&format!("UPDATE lockkit_answer SET {set}")).await;

        assert_eq!(pay().await.unwrap(), Answered::Before(7));
        let again = Idempotent::key("begun").outside(&leases, async |work| {
            let Attempt::After { ago, .. } = work.attempt() else { panic!("an attempt has begun") };
            Ok::<_, Error>(ago)
        });
        assert_eq!(again.await.unwrap(), Answered::Now(Duration::ZERO));
    }

    async fn when_the_clock_is_set_back_a_living_holder_keeps_its_lease<S>(db: TestDb<S>) {
        let ttl = SECONDS(3);
        let leases = Leases::builder(db.pool.clone()).ttl(ttl).build().unwrap();
        let lease = leases.lease("k").acquire().await.unwrap();
        let others = db.pool_of(2).await;
        let mut asked = 0;
        for _ in 0..3 {
            set_back(&db, STEP).await;
            // Longer than the ttl, so that the lease lives by its renewals alone.
            let until = Instant::now() + ttl + MILLIS(500);
            while Instant::now() < until {
                let refused = others.lease_acquire(&claim("k", ttl)).await.unwrap();
                let Acquired::Held { free_in } = refused else { panic!("granted after {asked} refusals: {refused:?}") };
                assert!(free_in.is_none_or(|it| it <= ttl), "{free_in:?}");
                asked += 1;
                sleep(MILLIS(5)).await;
            }
        }
        assert!(lease.is_trusted());
        let held = look(&others, "k").await;
        assert!(held.info.renewals > 0 && held.info.expires_in <= ttl, "{held:?}");
        println!("refused {asked} times on {}", S::NAME);
    }

    async fn what_is_shown_after_the_clock_was_set_back_is_at_most_the_ttl<S>(db: TestDb<S>) {
        let ttl = SECONDS(20);
        take(&db.pool, &claim("k", ttl)).await;
        // It has been held for 10 s when the clock is set back.
        db.execute("UPDATE lockkit_lease SET acquired_us = acquired_us - 10000000").await;
        set_back(&db, STEP).await;

        let listed = db.pool.lease_list("", 10).await.unwrap();
        assert!(listed[0].info.expires_in <= ttl, "{listed:?}");
        let Acquired::Held { free_in: Some(free_in) } = db.pool.lease_acquire(&claim("k", ttl)).await.unwrap() else {
            panic!("it is held, and by nobody who has it locked");
        };
        assert!(free_in <= ttl && free_in > ttl / 2, "{free_in:?}");
        let held = look(&db.pool, "k").await;
        assert!(held.info.expires_in <= ttl, "{held:?}");
        assert!(held.info.held_for >= SECONDS(10) && held.info.held_for < SECONDS(30), "{held:?}");
    }

    async fn a_renewal_after_the_clock_was_set_back_lives_for_its_ttl<S>(db: TestDb<S>) {
        let held = claim("k", MILLIS(700));
        take(&db.pool, &held).await;
        db.execute("UPDATE lockkit_lease SET acquired_us = acquired_us - 10000000").await;
        set_back(&db, STEP).await;

        assert_eq!(renew(&db.pool, &held, SECONDS(20)).await, Answer::Done);
        let expires_us = db.fetch_i64("SELECT expires_us - acquired_us FROM lockkit_lease").await.unwrap();
        assert!((30_000_000..60_000_000).contains(&expires_us), "held for 10 s and for 20 s more: {expires_us}");
        let info = look(&db.pool, "k").await.info;
        assert!(info.expires_in > SECONDS(10) && info.expires_in <= SECONDS(20), "{info:?}");
        assert!(info.held_for >= SECONDS(10) && info.held_for < SECONDS(30), "{info:?}");
    }

    async fn a_key_that_stays_taken_by_nobody_is_free_after_what_was_left_of_it<S>(db: TestDb<S>) {
        let ttl = SECONDS(20);
        for (key, set_back_first) in [("first", true), ("then", false)] {
            let held = claim(key, ttl);
            take(&db.pool, &held).await;
            if set_back_first {
                set_back(&db, STEP).await;
            }
            assert_eq!(db.pool.lease_release(&held.key, held.token, SECONDS(60)).await.unwrap(), Answer::Done);
            if !set_back_first {
                set_back(&db, STEP).await;
            }
            let info = look(&db.pool, key).await.info;
            assert!(info.expires_in <= SECONDS(60) && info.expires_in > SECONDS(30), "{info:?}");
        }
        let dead = claim("short", ttl);
        take(&db.pool, &dead).await;
        db.pool.lease_release(&dead.key, dead.token, MILLIS(700)).await.unwrap();
        set_back(&db, STEP).await;
        drop(Leases::new(db.pool.clone()).lease("short").wait(PATIENCE).acquire().await.unwrap());
    }

    async fn a_lease_that_was_extended_is_believed_for_its_extension<S>(db: TestDb<S>) {
        let held = claim("k", SECONDS(5));
        take(&db.pool, &held).await;
        renew(&db.pool, &held, SECONDS(60)).await;
        renew(&db.pool, &held, SECONDS(5)).await;
        let expires_in = look(&db.pool, "k").await.info.expires_in;
        assert!(expires_in > SECONDS(30), "{expires_in:?}");

        set_back(&db, STEP).await;
        let expires_in = look(&db.pool, "k").await.info.expires_in;
        assert!(expires_in > SECONDS(30) && expires_in <= SECONDS(60), "{expires_in:?}");
    }

    async fn a_lease_whose_ttl_is_not_in_its_row_is_believed<S>(db: TestDb<S>) {
        let held = claim("k", SECONDS(5));
        take(&db.pool, &held).await;
        set_back(&db, STEP).await;
        // As if it had been acquired before the row had a place for it.
        db.execute("UPDATE lockkit_lease SET ttl_us = NULL").await;

        assert_eq!(renew(&db.pool, &held, SECONDS(5)).await, Answer::Done);
        assert!(matches!(db.pool.lease_acquire(&claim("k", SECONDS(5))).await.unwrap(), Acquired::Held { .. }));
        let expires_in = look(&db.pool, "k").await.info.expires_in;
        assert!(expires_in > STEP / 2, "{expires_in:?}");
    }

    async fn looks_and_renewals_at_once_never_shorten_a_lease<S>(db: TestDb<S>) {
        let ttl = SECONDS(60);
        let held = claim("k", ttl);
        take(&db.pool, &held).await;
        let mut working = JoinSet::new();
        for number in 0..4 {
            let (pool, held) = (db.pool.clone(), held.clone());
            working.spawn(async move {
                for _ in 0..40 {
                    if number == 0 {
                        pool.lease_acquire(&claim("k", ttl)).await.unwrap();
                        continue;
                    }
                    let sent = Instant::now();
                    if renew(&pool, &held, ttl).await == Answer::Done {
                        let expires_in = look(&pool, "k").await.info.expires_in;
                        // SQLite's clock is that of milliseconds.
                        let since = sent.elapsed() + MILLIS(2);
                        assert!(expires_in + since >= ttl, "{expires_in:?} left {since:?} after it was sent");
                    }
                }
            });
        }
        working.join_all().await;
    }
}

on_every_server! {
    async fn a_renewal_that_renewed_nothing_does_not_say_done_however_slow_the_answers<S>(db: TestDb<S>) {
        let proxy = Proxy::start(&db.url);
        let options = PoolOptions::<<S as Server>::DB>::new().max_connections(1).test_before_acquire(false);
        let slow = options.connect(proxy.url()).await.unwrap();
        let mut other = lockkit::begin(&db.pool).await.unwrap();
        let ttl = SECONDS(20);
        let claims = [claim("a", ttl), claim("b", ttl)];
        for claim in &claims {
            take(&db.pool, claim).await;
        }
        S::execute(&mut other, "SELECT 1 FROM lockkit_lease WHERE name = 'a' FOR UPDATE").await.unwrap();

        proxy.delay_replies(SECONDS(1));
        let renewals = claims.each_ref().map(|it| Renewal::new(it.key.clone(), it.token, ttl));
        assert_eq!(slow.lease_renew(&renewals).await.unwrap(), [Answer::Busy, Answer::Done]);
        proxy.delay_replies(Duration::ZERO);
        other.rollback().await.unwrap();
        assert_eq!(slow.lease_renew(&renewals).await.unwrap(), [Answer::Done, Answer::Done]);
    }
}
