//! One check for each promise.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use tokio::{
    task::{JoinSet, yield_now},
    time::{Instant, sleep},
};

use super::{Check, Failed, ensure};
use crate::{
    lease::store::{Acquired, AcquiredAll, Answer, Claim, Grant, LeaseRecord, LeaseStore, Renewal},
    value::{fence::Fence, key::Key, token::Token},
};

/// So long that nothing expires before the check is over.
const LONG: Duration = Duration::from_secs(600);

/// So long that most of [`LONG`] is left.
const LESS: Duration = Duration::from_secs(300);

/// A ttl that a store with a busy machine still grants in time.
const SHORT: Duration = Duration::from_millis(250);

/// Writes [`PROMISES`] and `check` from the names of the functions below.
macro_rules! promises {
    ($($name:ident),+ $(,)?) => {
        /// The names of the checks, each a sentence.
        pub const PROMISES: &[&str] = &[$(stringify!($name)),+];

        pub(super) async fn check<S: LeaseStore>(promise: &str, store: S) -> Check {
            let store = Subject::new(store);
            match promise {
                $(stringify!($name) => $name(store).await,)+
                other => panic!("`{other}` is none of the promises"),
            }
        }
    };
}

promises![
    a_free_lease_is_granted_and_shown,
    a_held_lease_is_refused_and_stays_as_it_was,
    of_many_simultaneous_claims_one_is_granted,
    there_is_never_more_than_one_holder,
    the_token_that_holds_is_granted_again_with_the_same_fence,
    fences_rise_across_release,
    fences_rise_across_expiry_and_the_new_holder_hears_of_the_old,
    fences_rise_across_a_sweep,
    a_renewal_makes_a_lease_live_longer_and_is_counted,
    a_renewal_never_shortens_a_lease,
    renewals_are_answered_each_in_its_place,
    a_lease_that_expired_is_not_renewed,
    a_lease_that_was_released_is_not_renewed,
    a_lease_that_was_released_is_free,
    a_stale_token_changes_nothing,
    a_lease_stays_taken_by_nobody_for_its_least_holding_time,
    a_least_holding_time_that_is_over_holds_nothing,
    a_least_holding_time_ends,
    a_list_has_the_held_leases_of_a_prefix_in_order,
    a_prefix_is_text_and_not_a_pattern,
    a_sweep_forgets_no_lease_that_is_held,
    a_sweep_forgets_no_more_than_its_limit,
    several_leases_are_granted_in_the_order_of_the_claims,
    several_leases_are_granted_all_or_none,
    of_two_requests_for_the_same_leases_one_is_refused,
    claims_sent_together_are_answered_each_in_its_place,
    keys_that_differ_in_any_byte_are_different_leases,
];

/// A store, and a prefix of its own for the keys of one check.
struct Subject<S> {
    store: S,
    prefix: String,
    /// A ttl that is soon over.
    short: Duration,
}

impl<S: LeaseStore> Subject<S> {
    fn new(store: S) -> Self {
        let short = store.profile().least_ttl.mul_f64(1.2).max(SHORT);
        Self { store, prefix: format!("conformance/{:016x}/", fastrand::u64(..)), short }
    }

    fn claim(&self, name: &str, ttl: Duration) -> Claim {
        let key = Key::from(format!("{}{name}", self.prefix));
        Claim::new(key, Token::random(), "conformance", ttl)
    }

    /// Acquires what is free.
    async fn take(&self, claim: &Claim) -> Result<Grant, Failed> {
        let called = Instant::now();
        match self.store.lease_acquire(claim).await? {
            Acquired::Granted(grant) => {
                let sent = grant.sent.map_or(called, Instant::from);
                ensure!(
                    called <= sent && sent <= Instant::now(),
                    "a claim is sent while the call lasts, not at {sent:?}"
                );
                Ok(grant)
            }
            held @ Acquired::Held { .. } => {
                Err(Failed::new(format!("`{}` is free, and asked for it says {held:?}", claim.key)))
            }
        }
    }

    async fn release(&self, claim: &Claim, min_hold: Duration) -> Result<Answer, Failed> {
        Ok(self.store.lease_release(&claim.key, claim.token, min_hold).await?)
    }

    async fn renew(&self, claim: &Claim, ttl: Duration) -> Result<Answer, Failed> {
        let renewal = Renewal { key: claim.key.clone(), token: claim.token, ttl };
        let answers = self.store.lease_renew(&[renewal]).await?;
        match *answers {
            [answer] => Ok(answer),
            _ => Err(Failed::new(format!("{} answers to one renewal", answers.len()))),
        }
    }

    async fn look(&self, claim: &Claim) -> Result<Option<LeaseRecord>, Failed> {
        Ok(self.store.lease_look(&claim.key).await?)
    }

    /// Who holds the lease, which must be this claim.
    async fn held(&self, claim: &Claim) -> Result<LeaseRecord, Failed> {
        match self.look(claim).await? {
            Some(held) if held.token == claim.token => Ok(held),
            other => Err(Failed::new(format!("`{}` is held, and looked at it says {other:?}", claim.key))),
        }
    }

    async fn list(&self, prefix: &str, limit: u32) -> Result<Vec<String>, Failed> {
        let held = self.store.lease_list(&format!("{}{prefix}", self.prefix), limit).await?;
        Ok(held.into_iter().map(|it| it.info.key.as_str().trim_start_matches(&self.prefix).to_owned()).collect())
    }

    /// Waits until the lease, whose time is short, is over.
    async fn expired(&self, claim: &Claim) -> Check {
        let begun = Instant::now();
        while self.look(claim).await?.is_some() {
            ensure!(begun.elapsed() < self.short + Duration::from_secs(5), "`{}` does not expire", claim.key);
            sleep(self.short / 4).await;
        }
        Ok(())
    }

    /// Forgets all that can be forgotten.
    async fn sweep(&self) -> Check {
        sleep(self.short / 2).await;
        while self.store.lease_sweep(Duration::from_millis(1), 500).await? > 0 {}
        Ok(())
    }
}

async fn a_free_lease_is_granted_and_shown<S: LeaseStore>(store: Subject<S>) -> Check {
    let claim = store.claim("k", LONG);
    ensure!(store.look(&claim).await?.is_none(), "a lease that nobody ever had is held");
    let Grant { fence, previous, .. } = store.take(&claim).await?;
    ensure!(previous.is_none(), "a lease that nobody ever had was taken over from {previous:?}");
    let info = store.held(&claim).await?.info;
    ensure!(info.key == claim.key && info.holder == *claim.holder, "it shows {info:?}");
    ensure!(info.fence == fence, "it was granted with fence {fence} and shows {}", info.fence);
    ensure!(info.renewals == 0, "it was never renewed and shows {} renewals", info.renewals);
    let (expires_in, held_for) = (info.expires_in, info.held_for);
    ensure!(expires_in > LESS && expires_in <= LONG, "it lives {LONG:?} and shows {expires_in:?} after the grant");
    ensure!(held_for < LESS, "it was granted just now and shows that it is held for {held_for:?}");
    Ok(())
}

async fn a_held_lease_is_refused_and_stays_as_it_was<S: LeaseStore>(store: Subject<S>) -> Check {
    let (holder, other) = (store.claim("k", LONG), store.claim("k", LONG * 2));
    let fence = store.take(&holder).await?.fence;
    for _ in 0..3 {
        match store.store.lease_acquire(&other).await? {
            Acquired::Held { free_in: None } => {}
            Acquired::Held { free_in: Some(free_in) } => {
                ensure!(free_in > LESS && free_in <= LONG, "it lives {LONG:?}, and others hear {free_in:?}");
            }
            granted @ Acquired::Granted(_) => {
                return Err(Failed::new(format!("asked for a held lease it says {granted:?}")));
            }
        }
    }
    let info = store.held(&holder).await?.info;
    ensure!(info.fence == fence, "its fence was {fence} and is {}", info.fence);
    ensure!(info.expires_in <= LONG, "being asked for makes it live {:?}", info.expires_in);
    Ok(())
}

async fn of_many_simultaneous_claims_one_is_granted<S: LeaseStore>(store: Subject<S>) -> Check {
    for round in 0..8 {
        let mut asking = JoinSet::new();
        for _ in 0..8 {
            let (store, claim) = (store.store.clone(), store.claim(&format!("k{round}"), LONG));
            asking.spawn(async move { (store.lease_acquire(&claim).await, claim) });
        }
        let mut granted = Vec::new();
        for (answer, claim) in asking.join_all().await {
            if let Acquired::Granted(_) = answer? {
                granted.push(claim);
            }
        }
        ensure!(granted.len() <= 1, "{} of 8 who asked at once were granted it", granted.len());
        // All of them may have stood in each other's way.
        if let [holder] = &*granted {
            store.held(holder).await?;
        }
    }
    Ok(())
}

async fn there_is_never_more_than_one_holder<S: LeaseStore>(store: Subject<S>) -> Check {
    let (inside, store) = (Arc::new(AtomicU32::new(0)), Arc::new(store));
    let mut working = JoinSet::new();
    for _ in 0..4 {
        let (inside, store) = (inside.clone(), store.clone());
        working.spawn(async move {
            let mut fences = Vec::new();
            let begun = Instant::now();
            while fences.len() < 10 && begun.elapsed() < Duration::from_secs(20) {
                let claim = store.claim("k", LONG);
                let Acquired::Granted(grant) = store.store.lease_acquire(&claim).await? else {
                    sleep(Duration::from_millis(1)).await;
                    continue;
                };
                let others = inside.fetch_add(1, Ordering::SeqCst);
                ensure!(others == 0, "it was granted while somebody else held it");
                yield_now().await;
                inside.fetch_sub(1, Ordering::SeqCst);
                while store.release(&claim, Duration::ZERO).await? == Answer::Busy {
                    yield_now().await;
                }
                fences.push(grant.fence);
            }
            Ok(fences)
        });
    }
    let mut all: Vec<Fence> = Vec::new();
    for fences in working.join_all().await {
        let fences = fences?;
        ensure!(fences.is_sorted(), "the fences of one holder after the other do not rise: {fences:?}");
        all.extend(fences);
    }
    all.sort_unstable();
    ensure!(!all.is_empty(), "nobody was ever granted it");
    ensure!(all.windows(2).all(|it| it[0] < it[1]), "two grants have the same fence");
    Ok(())
}

async fn the_token_that_holds_is_granted_again_with_the_same_fence<S: LeaseStore>(store: Subject<S>) -> Check {
    let claim = store.claim("k", LESS);
    let fence = store.take(&claim).await?.fence;
    let again = store.take(&Claim { ttl: LONG, ..claim.clone() }).await?;
    ensure!(again.fence == fence, "its fence was {fence} and is {}", again.fence);
    ensure!(again.previous.is_none(), "it was taken over from itself: {:?}", again.previous);
    let info = store.held(&claim).await?.info;
    ensure!(info.fence == fence, "its fence was {fence} and shows as {}", info.fence);
    ensure!(info.expires_in > LESS, "it asked for {LONG:?} and lives {:?}", info.expires_in);
    store.take(&Claim { ttl: Duration::from_secs(1), ..claim.clone() }).await?;
    let expires_in = store.held(&claim).await?.info.expires_in;
    ensure!(expires_in > LESS, "it lived {LONG:?}, and after another claim for 1 s it lives {expires_in:?}");
    Ok(())
}

async fn fences_rise_across_release<S: LeaseStore>(store: Subject<S>) -> Check {
    let mut last = Fence::from(0);
    for _ in 0..5 {
        let claim = store.claim("k", LONG);
        let Grant { fence, previous, .. } = store.take(&claim).await?;
        ensure!(fence > last, "fence {fence} was granted after fence {last}");
        ensure!(previous.is_none(), "it had been released and was taken over from {previous:?}");
        last = fence;
        store.release(&claim, Duration::ZERO).await?;
    }
    Ok(())
}

async fn fences_rise_across_expiry_and_the_new_holder_hears_of_the_old<S: LeaseStore>(store: Subject<S>) -> Check {
    let mut last: Option<Fence> = None;
    for _ in 0..3 {
        let claim = store.claim("k", store.short);
        let Grant { fence, previous, .. } = store.take(&claim).await?;
        if let Some(last) = last {
            ensure!(fence > last, "fence {fence} was granted after fence {last}");
            ensure!(
                previous.as_ref().is_some_and(|it| it.fence == last && it.holder == *claim.holder),
                "it expired with fence {last} and was taken over from {previous:?}"
            );
        }
        last = Some(fence);
        store.expired(&claim).await?;
    }
    Ok(())
}

async fn fences_rise_across_a_sweep<S: LeaseStore>(store: Subject<S>) -> Check {
    let mut last = Fence::from(0);
    for round in 0..4 {
        let claim = store.claim("k", if round % 2 == 0 { LONG } else { store.short });
        let fence = store.take(&claim).await?.fence;
        ensure!(fence > last, "fence {fence} was granted after fence {last}, which was swept");
        last = fence;
        if round % 2 == 0 {
            store.release(&claim, Duration::ZERO).await?;
        } else {
            store.expired(&claim).await?;
        }
        store.sweep().await?;
    }
    Ok(())
}

async fn a_renewal_makes_a_lease_live_longer_and_is_counted<S: LeaseStore>(store: Subject<S>) -> Check {
    let claim = store.claim("k", Duration::from_secs(10));
    let fence = store.take(&claim).await?.fence;
    for _ in 0..2 {
        let renewed = store.renew(&claim, LONG).await?;
        ensure!(renewed == Answer::Done, "the renewal of a held lease says {renewed:?}");
    }
    let info = store.held(&claim).await?.info;
    ensure!(info.expires_in > LESS, "it was renewed for {LONG:?} and lives {:?}", info.expires_in);
    let counted = if store.store.profile().counts_renewals { 2 } else { 0 };
    ensure!(info.renewals == counted, "it was renewed twice and shows {} renewals", info.renewals);
    ensure!(info.fence == fence, "its fence was {fence} and is {}", info.fence);
    Ok(())
}

async fn a_renewal_never_shortens_a_lease<S: LeaseStore>(store: Subject<S>) -> Check {
    let claim = store.claim("k", LONG);
    store.take(&claim).await?;
    store.renew(&claim, Duration::from_secs(1)).await?;
    let expires_in = store.held(&claim).await?.info.expires_in;
    ensure!(expires_in > LESS, "it lived {LONG:?}, and after a renewal for 1 s it lives {expires_in:?}");
    Ok(())
}

async fn renewals_are_answered_each_in_its_place<S: LeaseStore>(store: Subject<S>) -> Check {
    let claims = ["d", "a", "c", "b", "e", "never"].map(|name| store.claim(name, LONG));
    for claim in &claims[..5] {
        store.take(claim).await?;
    }
    for gone in [&claims[1], &claims[4]] {
        store.release(gone, Duration::ZERO).await?;
    }
    let renewals = claims.each_ref().map(|it| Renewal { key: it.key.clone(), token: it.token, ttl: LONG });
    let answers = store.store.lease_renew(&renewals).await?;
    let expected = [Answer::Done, Answer::Gone, Answer::Done, Answer::Done, Answer::Gone, Answer::Gone];
    ensure!(answers == expected, "it should say {expected:?} and says {answers:?}");
    let none = store.store.lease_renew(&[]).await?;
    ensure!(none.is_empty(), "no renewals are answered with {none:?}");
    Ok(())
}

async fn a_lease_that_expired_is_not_renewed<S: LeaseStore>(store: Subject<S>) -> Check {
    let claim = store.claim("k", store.short);
    store.take(&claim).await?;
    store.expired(&claim).await?;
    let renewed = store.renew(&claim, LONG).await?;
    ensure!(renewed == Answer::Gone, "its renewal says {renewed:?}");
    ensure!(store.look(&claim).await?.is_none(), "its renewal brought it back");
    Ok(())
}

async fn a_lease_that_was_released_is_not_renewed<S: LeaseStore>(store: Subject<S>) -> Check {
    let claim = store.claim("k", LONG);
    store.take(&claim).await?;
    store.release(&claim, Duration::ZERO).await?;
    let renewed = store.renew(&claim, LONG).await?;
    ensure!(renewed == Answer::Gone, "its renewal says {renewed:?}");
    ensure!(store.look(&claim).await?.is_none(), "its renewal brought it back");
    Ok(())
}

async fn a_lease_that_was_released_is_free<S: LeaseStore>(store: Subject<S>) -> Check {
    let claim = store.claim("k", LONG);
    store.take(&claim).await?;
    let released = store.release(&claim, Duration::ZERO).await?;
    ensure!(released == Answer::Done, "releasing it says {released:?}");
    ensure!(store.look(&claim).await?.is_none(), "it was released and shows as held");
    let again = store.release(&claim, Duration::ZERO).await?;
    ensure!(again == Answer::Gone, "releasing it a second time says {again:?}");
    store.take(&store.claim("k", LONG)).await?;
    Ok(())
}

async fn a_stale_token_changes_nothing<S: LeaseStore>(store: Subject<S>) -> Check {
    let stale = store.claim("k", store.short);
    store.take(&stale).await?;
    store.expired(&stale).await?;
    let late = store.release(&stale, Duration::ZERO).await?;
    ensure!(late == Answer::Gone, "releasing what expired says {late:?}");

    let holder = store.claim("k", LESS);
    let fence = store.take(&holder).await?.fence;
    let released = store.release(&stale, Duration::ZERO).await?;
    ensure!(released == Answer::Gone, "releasing what somebody else holds says {released:?}");
    let kept = store.release(&stale, LONG).await?;
    ensure!(kept == Answer::Gone, "releasing later what somebody else holds says {kept:?}");
    let renewed = store.renew(&stale, LONG).await?;
    ensure!(renewed == Answer::Gone, "renewing what somebody else holds says {renewed:?}");
    let info = store.held(&holder).await?.info;
    ensure!(info.fence == fence && info.renewals == 0 && info.expires_in <= LESS, "the holder's lease became {info:?}");
    Ok(())
}

async fn a_lease_stays_taken_by_nobody_for_its_least_holding_time<S: LeaseStore>(store: Subject<S>) -> Check {
    let claim = store.claim("k", Duration::from_secs(20));
    let fence = store.take(&claim).await?.fence;
    let released = store.release(&claim, LONG).await?;
    ensure!(released == Answer::Done, "releasing it says {released:?}");
    let refused = store.store.lease_acquire(&store.claim("k", LONG)).await?;
    ensure!(matches!(refused, Acquired::Held { .. }), "it stays taken for {LONG:?}, and asked for it says {refused:?}");
    let Some(LeaseRecord { token, info }) = store.look(&claim).await? else {
        return Err(Failed::new(format!("it stays taken for {LONG:?} and shows as free")));
    };
    ensure!(token.is_nobody(), "it is held by nobody, but its token is not made by `Token::nobody`");
    ensure!(info.expires_in > LESS, "it stays taken for {LONG:?} and shows {:?}", info.expires_in);
    let (renewed, again) = (store.renew(&claim, LONG).await?, store.release(&claim, Duration::ZERO).await?);
    ensure!((renewed, again) == (Answer::Gone, Answer::Gone), "its old token can still do {renewed:?}, {again:?}");

    // As an operator frees it.
    let freed = store.store.lease_release(&claim.key, token, Duration::ZERO).await?;
    ensure!(freed == Answer::Done, "freeing it with the token that it shows says {freed:?}");
    let next = store.take(&store.claim("k", LONG)).await?;
    ensure!(next.fence > fence, "fence {} was granted after fence {fence}", next.fence);
    ensure!(next.previous.is_none(), "it had been released and was taken over from {:?}", next.previous);
    Ok(())
}

async fn a_least_holding_time_that_is_over_holds_nothing<S: LeaseStore>(store: Subject<S>) -> Check {
    let claim = store.claim("k", LONG);
    store.take(&claim).await?;
    sleep(store.short).await;
    store.release(&claim, store.short / 4).await?;
    store.take(&store.claim("k", LONG)).await?;
    Ok(())
}

async fn a_least_holding_time_ends<S: LeaseStore>(store: Subject<S>) -> Check {
    let claim = store.claim("k", LONG);
    store.take(&claim).await?;
    store.release(&claim, store.short).await?;
    store.expired(&claim).await?;
    let next = store.take(&store.claim("k", LONG)).await?;
    ensure!(next.previous.is_none(), "it had been released and was taken over from {:?}", next.previous);
    Ok(())
}

async fn a_list_has_the_held_leases_of_a_prefix_in_order<S: LeaseStore>(store: Subject<S>) -> Check {
    let [b, a, c] = ["job/b", "job/a", "job/c"].map(|name| store.claim(name, LONG));
    let (other, expired) = (store.claim("other", LONG), store.claim("job/expired", store.short));
    for claim in [&b, &a, &c, &other, &expired] {
        store.take(claim).await?;
    }
    store.release(&c, Duration::ZERO).await?;
    store.expired(&expired).await?;
    let jobs = store.list("job/", 10).await?;
    ensure!(jobs == ["job/a", "job/b"], "job/a and job/b are held, and it lists {jobs:?}");
    let first = store.list("", 2).await?;
    ensure!(first == ["job/a", "job/b"], "job/a, job/b and other are held, and the first two are {first:?}");
    let none = store.list("nothing", 10).await?;
    ensure!(none.is_empty(), "nothing begins so, and it lists {none:?}");

    let listed = store.store.lease_list(a.key.as_str(), 10).await?;
    let looked = store.held(&a).await?;
    let is_same = |it: &LeaseRecord| it.token == looked.token && it.info.fence == looked.info.fence;
    ensure!(listed.len() == 1 && is_same(&listed[0]), "it lists {listed:?} and shows {looked:?}");
    Ok(())
}

async fn a_prefix_is_text_and_not_a_pattern<S: LeaseStore>(store: Subject<S>) -> Check {
    for name in ["a_b", "axb", "a%b", "ayyb", "a\\b", "A_b", "[a]*?"] {
        store.take(&store.claim(name, LONG)).await?;
    }
    for (prefix, expected) in [("a_", "a_b"), ("a%", "a%b"), ("a\\", "a\\b"), ("A", "A_b"), ("[", "[a]*?")] {
        let listed = store.list(prefix, 10).await?;
        ensure!(listed == [expected], "only {expected} begins with {prefix}, and it lists {listed:?}");
    }
    Ok(())
}

async fn a_sweep_forgets_no_lease_that_is_held<S: LeaseStore>(store: Subject<S>) -> Check {
    let (held, kept) = (store.claim("held", LONG), store.claim("kept", LONG));
    let fence = store.take(&held).await?.fence;
    store.take(&kept).await?;
    store.release(&kept, LONG).await?;
    store.sweep().await?;
    let after = store.held(&held).await?.info.fence;
    ensure!(after == fence, "its fence was {fence} and is {after}");
    ensure!(store.look(&kept).await?.is_some(), "a lease that stays taken by nobody was swept");
    Ok(())
}

async fn a_sweep_forgets_no_more_than_its_limit<S: LeaseStore>(store: Subject<S>) -> Check {
    for number in 0..3 {
        let claim = store.claim(&format!("k{number}"), LONG);
        store.take(&claim).await?;
        store.release(&claim, Duration::ZERO).await?;
    }
    sleep(store.short / 2).await;
    let mut forgotten = 0;
    loop {
        let swept = store.store.lease_sweep(Duration::from_millis(1), 2).await?;
        ensure!(swept <= 2, "asked to forget 2 at most it forgot {swept}");
        if swept == 0 {
            break;
        }
        forgotten += swept;
    }
    let has_to = store.store.profile().sweeps;
    ensure!(forgotten >= 3 || !has_to, "3 were free for long enough, and it forgot {forgotten}");
    Ok(())
}

async fn several_leases_are_granted_in_the_order_of_the_claims<S: LeaseStore>(store: Subject<S>) -> Check {
    let claims = ["a", "b", "c"].map(|name| store.claim(name, LONG));
    let granted = store.store.lease_acquire_all(&claims).await?;
    let AcquiredAll::Granted(grants) = granted else {
        return Err(Failed::new(format!("three free leases, asked for together, say {granted:?}")));
    };
    ensure!(grants.len() == 3, "{} grants for three claims", grants.len());
    for (claim, grant) in claims.iter().zip(&grants) {
        let fence = store.held(claim).await?.info.fence;
        ensure!(fence == grant.fence, "`{}` was granted with fence {} and has {fence}", claim.key, grant.fence);
    }
    let again = store.store.lease_acquire_all(&claims).await?;
    let is_same = |again: &[Grant]| {
        again.len() == grants.len()
            && again.iter().zip(&grants).all(|(now, then)| Grant { sent: then.sent, ..now.clone() } == *then)
    };
    let same = matches!(&again, AcquiredAll::Granted(again) if is_same(again));
    ensure!(same, "asked again with the same tokens it says {again:?} after {grants:?}");
    Ok(())
}

async fn several_leases_are_granted_all_or_none<S: LeaseStore>(store: Subject<S>) -> Check {
    for taken in 0..3 {
        let claims = ["a", "b", "c"].map(|name| store.claim(&format!("{taken}/{name}"), LONG));
        let holder = store.claim(&format!("{taken}/{}", ["a", "b", "c"][taken]), LONG);
        let fence = store.take(&holder).await?.fence;
        let answer = store.store.lease_acquire_all(&claims).await?;
        let AcquiredAll::Held { key, .. } = &answer else {
            return Err(Failed::new(format!("one of three is held, and asked for them together it says {answer:?}")));
        };
        ensure!(*key == holder.key, "`{}` is held, and it blames `{key}`", holder.key);
        ensure!(store.held(&holder).await?.info.fence == fence, "the holder of `{}` lost it", holder.key);
        for claim in claims.iter().filter(|it| it.key != holder.key) {
            ensure!(store.look(claim).await?.is_none(), "`{}` was taken all the same", claim.key);
        }
    }
    Ok(())
}

async fn of_two_requests_for_the_same_leases_one_is_refused<S: LeaseStore>(store: Subject<S>) -> Check {
    for round in 0..5 {
        let mut asking = JoinSet::new();
        for _ in 0..3 {
            let claims = ["a", "b", "c"].map(|name| store.claim(&format!("{round}/{name}"), LONG));
            let store = store.store.clone();
            asking.spawn(async move { (store.lease_acquire_all(&claims).await, claims) });
        }
        let mut winners = Vec::new();
        for (answer, claims) in asking.join_all().await {
            if let AcquiredAll::Granted(_) = answer? {
                winners.push(claims);
            }
        }
        ensure!(winners.len() <= 1, "{} of 3 who asked at once were granted the same leases", winners.len());
        for claim in winners.iter().flatten() {
            store.held(claim).await?;
        }
        if winners.is_empty() {
            let left = store.list(&format!("{round}/"), 10).await?;
            ensure!(left.is_empty(), "nobody was granted them, and {left:?} are held");
        }
    }
    Ok(())
}

async fn claims_sent_together_are_answered_each_in_its_place<S: LeaseStore>(store: Subject<S>) -> Check {
    let before = ["a", "b", "d", "f"].map(|name| store.claim(name, if name == "f" { store.short } else { LONG }));
    let mut fences = Vec::new();
    for claim in &before {
        fences.push(store.take(claim).await?.fence);
    }
    let [released, held, also_released, expired] = &before;
    store.release(released, Duration::ZERO).await?;
    store.release(also_released, Duration::ZERO).await?;
    store.expired(expired).await?;

    let claims = ["a", "b", "c", "d", "e", "f"].map(|name| store.claim(name, LESS));
    let called = Instant::now();
    let answers = store.store.lease_acquire_each(&claims).await?;
    ensure!(answers.len() == claims.len(), "{} answers for {} claims", answers.len(), claims.len());
    for (claim, answer) in claims.iter().zip(answers) {
        let last = before.iter().zip(&fences).find(|(it, _)| it.key == claim.key);
        match answer {
            Some(Acquired::Granted(grant)) => {
                let info = store.held(claim).await?.info;
                let fence = info.fence;
                ensure!(fence == grant.fence, "`{}` was granted with fence {} and has {fence}", claim.key, grant.fence);
                ensure!(LESS / 2 < info.expires_in && info.expires_in <= LESS, "it expires in {:?}", info.expires_in);
                ensure!(info.renewals == 0, "a lease just granted has {} renewals", info.renewals);
                ensure!(last.is_none_or(|it| fence > *it.1), "fence {fence} was granted after {last:?}");
                let sent = grant.sent.map_or(called, Instant::from);
                ensure!(called <= sent && sent <= Instant::now(), "it says that it was sent at {sent:?}");
                let named = grant.previous.is_some();
                ensure!(named == (claim.key == expired.key), "`{}` has the previous {:?}", claim.key, grant.previous);
            }
            Some(Acquired::Held { free_in }) => {
                ensure!(claim.key == held.key, "`{}` is free, and it says that it is held", claim.key);
                ensure!(free_in.is_none_or(|it| LESS < it && it <= LONG), "it says that it is free in {free_in:?}");
            }
            None => {
                let taken = store.look(claim).await?.is_some_and(|it| it.token == claim.token);
                ensure!(!taken, "`{}` was taken, and it says nothing of it", claim.key);
            }
        }
    }
    ensure!(store.held(held).await?.info.fence == fences[1], "the holder of `{}` lost it", held.key);

    // As after an answer that was lost: the leases that they hold are granted again, or the claims are sent alone.
    let again = claims.map(|it| Claim { ttl: LONG, ..it });
    let answers = store.store.lease_acquire_each(&again).await?;
    for (claim, answer) in again.iter().zip(answers).filter(|it| it.0.key != held.key) {
        let expires_in = store.look(claim).await?.map(|it| it.info.expires_in);
        match answer {
            Some(Acquired::Granted(_)) => {
                ensure!(expires_in > Some(LESS), "`{}` was granted again, and expires in {expires_in:?}", claim.key);
            }
            answer => ensure!(answer.is_none(), "`{}` is held by this claim itself, or free", claim.key),
        }
    }
    Ok(())
}

async fn keys_that_differ_in_any_byte_are_different_leases<S: LeaseStore>(store: Subject<S>) -> Check {
    let longest = store.store.profile().longest_key;
    let long = "x".repeat(longest.min(251) - 1 - store.prefix.len());
    let names =
        ["abc", "ABC", "abc ", "ab", "é", "e\u{301}", "'; --", "%", "_", "\\", "🔑", &long, &format!("{long}y")];
    let claims = names.map(|it| store.claim(it, LONG));
    let mut fences = Vec::new();
    for claim in &claims {
        fences.push(store.take(claim).await?.fence);
    }
    for (claim, fence) in claims.iter().zip(fences) {
        let info = store.held(claim).await?.info;
        ensure!(info.key == claim.key, "`{}` shows as `{}`", claim.key, info.key);
        ensure!(info.fence == fence, "`{}` was granted with fence {fence} and has {}", claim.key, info.fence);
    }
    Ok(())
}
