//! What the `Leases` may have left in the store, and nobody here has: claims without an answer, and leases that are to
//! be released. Knows no store.
//!
//! | event | becomes a leftover | is none any more |
//! |---|---|---|
//! | a claim: [late](while_awaited), or its caller has gone | yes | |
//! | a claim that is granted, or refused for good | | yes |
//! | a claim of which something may be left ([`claim`](super::request)) | yes | |
//! | claims of several leases that others undid | where it is seen | |
//! | a lease that no caller got, and whose release begins | yes | |
//! | a lease that is lost, and pinned or with a call that has no answer | where it is asked for | |
//! | a lease whose release begins, and a call that locks its row has no answer | yes | |
//! | one that is noted for nothing else: all calls are answered, and its release waits for a pin | | yes: that has it |
//! | a lease that was pinned, and whose release has not found it | yes | |
//! | the release of a caller's lease: late, unless one may pin it; without an answer | yes | |
//! | the commit of a caller's lease, without an answer | yes | |
//! | a release that has found it | | soon: what was asked before is answered later |
//! | a release that has not found it, whose calls are all answered | | soon |
//!
//! It stays one if its release finds nothing: a lease that had expired is held again if the clock is set back. If a
//! call of it has no answer (it is *open*), that release proves nothing: the call may still be on its way, or wait in
//! COMMIT with the row locked, where a release sees only that the lease has expired. Nothing will tell when that is
//! over, so requests ask again.
//!
//! Such a claim may also be in the store where nobody sees it. A server that waits for its replicas in COMMIT keeps the
//! row locked for as long as that takes, which can be longer than the ttl, and its client is gone. So a refusal without
//! a visible holder says nothing of other processes, until a later claim of this process is granted, or another holder
//! is seen.

use std::{
    collections::BTreeMap,
    pin::{Pin, pin},
    slice,
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::{
    sync::Notify,
    time::{Instant, timeout},
};

use crate::{
    lease::{bounded::LIMIT, life::kept::Kept, queue::wait::FIRST_ANSWER},
    mutex::Mutex,
    value::{key::Key, token::Token},
};

/// For how long a leftover counts after it was noted, or seen.
const LASTS: Duration = Duration::from_mins(10);

/// For how long one is known that a release has found: until what was asked before is answered, and the attempt after
/// that, too.
pub(super) const GONE_LASTS: Duration = LIMIT.saturating_mul(3);

/// How many of the last leftovers of a key are known.
const MOST: usize = 256;

/// What the `Leases` may have left in the store.
#[derive(Debug, Default)]
pub(crate) struct Leftovers {
    noted: Mutex<Noted>,
    /// Notified when one is gone.
    changed: Notify,
}

#[derive(Debug, Default)]
struct Noted {
    by_key: BTreeMap<Key, OfKey>,
    /// At how many keys those are forgotten that do not count any more.
    room: usize,
}

#[derive(Debug, Default)]
struct OfKey {
    left: Vec<Leftover>,
    /// The leases that somebody here has.
    held: Vec<Weak<Kept>>,
}

/// Keys of leases.
#[derive(Debug, Clone, Copy)]
pub(super) enum Keys<'k> {
    These(&'k [Key]),
    /// Those with this prefix and a name of their own without `/`.
    Below(&'k str),
}

/// What may be left of some keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Left {
    Nothing,
    /// It was not in the store at a later time, where it may still arrive, or others undid it.
    Absent,
    /// Its release is over and has not found it, but it is open: it may keep the row locked where nobody sees it.
    Unseen,
    /// It may be in the store, visible or not.
    Perhaps,
}

#[derive(Debug, Clone, Copy)]
struct Leftover {
    token: Token,
    /// When it was last known that it may be in the store.
    noted: Instant,
    left: Left,
    open: Open,
    /// Its release has found it.
    is_gone: bool,
}

/// Whether a call of a leftover that locks its row has no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Open {
    No,
    Yes,
    /// Yes, and it is a leftover for no other reason.
    Only,
}

impl Leftover {
    fn counts(&self) -> bool {
        self.noted.elapsed() < if self.is_gone { GONE_LASTS } else { LASTS }
    }
}

impl OfKey {
    fn counts(&self) -> bool {
        self.left.iter().any(Leftover::counts) || self.held.iter().any(|it| it.strong_count() > 0)
    }

    fn add(&mut self, token: Token, noted: Instant, left: Left, open: Open) {
        let before = self.left.iter().find(|it| it.token == token);
        let open = before.filter(|it| it.open != open).map_or(open, |_| Open::Yes);
        let noted = before.map_or(noted, |it| noted.max(it.noted));
        self.left.retain(|it| it.token != token && it.counts());
        if self.left.len() == MOST {
            self.left.remove(self.left.iter().position(|it| it.is_gone).unwrap_or(0));
        }
        self.left.push(Leftover { token, noted, left, open, is_gone: false });
    }

    /// Looks which leases are lost whose row this process may have locked. `seen` is what it has looked at, to be
    /// dropped when no mutex is locked: that may run code of the application.
    fn look(&mut self, seen: &mut Vec<Arc<Kept>>) {
        for held in std::mem::take(&mut self.held) {
            let Some(kept) = held.upgrade() else { continue };
            if let Some(lost) = kept.lost_and_locked() {
                self.add(kept.token, lost, Left::Unseen, Open::Yes);
            } else {
                self.held.push(held);
            }
            seen.push(kept);
        }
    }
}

impl Noted {
    fn each(&mut self, keys: Keys<'_>, mut what: impl FnMut(&mut OfKey)) {
        match keys {
            Keys::These(keys) => {
                for key in keys {
                    self.by_key.get_mut(key).into_iter().for_each(&mut what);
                }
            }
            Keys::Below(prefix) => {
                let from_prefix = self.by_key.range_mut(Key::from(prefix)..);
                let below = from_prefix.map_while(|(key, it)| Some((key.strip_prefix(prefix)?, it)));
                below.filter(|(name, _)| !name.contains('/')).for_each(|(_, it)| what(it));
            }
        }
    }

    fn of_key(&mut self, key: &Key) -> &mut OfKey {
        if self.by_key.len() >= self.room && !self.by_key.contains_key(key) {
            self.by_key.retain(|_, it| it.counts());
            self.room = 2 * self.by_key.len().max(8);
        }
        self.by_key.entry(key.clone()).or_default()
    }
}

impl Leftovers {
    /// Somebody here has the lease. If it is lost while a call or a transaction of this process may have its row
    /// locked, it becomes a leftover.
    pub(super) fn watch(&self, kept: &Arc<Kept>) {
        let mut noted = self.noted.lock();
        let held = &mut noted.of_key(&kept.key).held;
        held.retain(|it| it.strong_count() > 0);
        held.push(Arc::downgrade(kept));
    }

    /// It may be in the store, and nobody here has it. A call of it has no answer.
    pub(super) fn note(&self, key: &Key, token: Token) {
        self.add(key, token, Open::Yes);
    }

    /// Its release begins, and a call of it has no answer.
    pub(super) fn note_open(&self, key: &Key, token: Token) {
        self.add(key, token, Open::Only);
    }

    /// It may be in the store, and nobody here has it. Its calls that were not noted before are answered.
    pub(super) fn note_answered(&self, key: &Key, token: Token) {
        self.add(key, token, Open::No);
    }

    fn add(&self, key: &Key, token: Token, open: Open) {
        self.noted.lock().of_key(key).add(token, Instant::now(), Left::Perhaps, open);
    }

    /// It never was in the store, and is not on its way, or somebody here has it.
    pub(super) fn never_were(&self, key: &Key, token: Token) {
        self.forget(key, |it| it.token == token);
    }

    /// All calls of it are answered, and its row is locked: a transaction of this process may pin it.
    pub(super) fn pinned(&self, key: &Key, token: Token) {
        self.forget(key, |it| it.token == token && it.open == Open::Only);
    }

    fn forget(&self, key: &Key, which: impl Fn(&Leftover) -> bool) {
        let mut noted = self.noted.lock();
        let Some(of_key) = noted.by_key.get_mut(key) else { return };
        let before = of_key.left.len();
        of_key.left.retain(|it| !which(it));
        if of_key.left.len() < before {
            drop(noted);
            self.changed.notify_waiters();
        }
    }

    /// Its release has found it, or nothing.
    pub(super) fn released(&self, key: &Key, token: Token, was_found: bool) {
        self.change(key, |it| {
            if it.token == token {
                let seen = if was_found || it.open == Open::No { Left::Absent } else { Left::Unseen };
                // A later claim may have told more before.
                it.left = it.left.min(seen);
            }
            if it.token == token && was_found {
                (it.noted, it.is_gone) = (Instant::now(), true);
            }
        });
    }

    /// An error has answered its claim, which others undid. Only if it is seen all the same is it in the way.
    pub(super) fn undone(&self, key: &Key, token: Token) {
        self.change(key, |it| {
            if it.token == token {
                it.left = Left::Absent;
            }
        });
    }

    fn change(&self, key: &Key, change: impl FnMut(&mut Leftover)) {
        let mut noted = self.noted.lock();
        if let Some(of_key) = noted.by_key.get_mut(key).filter(|it| !it.left.is_empty()) {
            of_key.left.iter_mut().for_each(change);
            drop(noted);
            self.changed.notify_waiters();
        }
    }

    /// Makes leftovers of the leases that have become some.
    fn look(&self, keys: Keys<'_>) {
        let mut seen = Vec::new();
        self.noted.lock().each(keys, |it| it.look(&mut seen));
    }

    /// Waits until `are_gone`.
    pub(super) async fn until(&self, are_gone: impl Fn() -> bool) {
        loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            if are_gone() {
                return;
            }
            changed.await;
        }
    }

    /// A claim or a look that was sent at this time has found the lease free, or held by another.
    pub(super) fn absent(&self, key: &Key, sent: Instant) {
        self.look(Keys::These(slice::from_ref(key)));
        self.change(key, |it| {
            if it.noted < sent {
                it.left = Left::Absent;
            }
        });
    }

    /// Whether the holder with this token, who is in the store, is a leftover.
    pub(super) fn recognises(&self, key: &Key, token: Token) -> bool {
        self.look(Keys::These(slice::from_ref(key)));
        let mut noted = self.noted.lock();
        let found = noted.by_key.get_mut(key).and_then(|it| it.left.iter_mut().find(|it| it.token == token));
        found.is_some_and(|it| {
            if !it.is_gone {
                (it.noted, it.left) = (Instant::now(), Left::Perhaps);
            }
            true
        })
    }

    /// What may be left of any of these keys, but for these tokens. What is gone counts only for who has asked `since`
    /// an earlier time.
    pub(super) fn of(&self, keys: Keys<'_>, since: Instant, but: &[Token]) -> Left {
        let counts = |it: &&Leftover| it.counts() && !(it.is_gone && it.noted < since) && !but.contains(&it.token);
        let mut most = Left::Nothing;
        let mut seen = Vec::new();
        self.noted.lock().each(keys, |of_key| {
            of_key.look(&mut seen);
            most = of_key.left.iter().filter(counts).map(|it| it.left).fold(most, Left::max);
        });
        most
    }
}

/// The answer of a call for which somebody waits. `is_late` is told that it has taken so long that no one may wait for
/// it any more.
pub(super) async fn while_awaited<F: Future>(mut call: Pin<&mut F>, is_late: impl FnOnce()) -> F::Output {
    if let Ok(answer) = timeout(FIRST_ANSWER, &mut call).await {
        return answer;
    }
    is_late();
    call.await
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Before all that a test does.
    pub(super) fn started() -> Instant {
        Instant::now() - 2 * LASTS
    }

    #[tokio::test(start_paused = true)]
    async fn a_leftover_counts_until_it_is_gone_or_old() {
        let (leftovers, [a, b]) = (Leftovers::default(), ["a", "b"].map(Key::from));
        let tokens = [(); MOST + 1].map(|()| Token::random());
        for token in tokens {
            leftovers.note(&a, token);
        }
        let of = |key: &Key| leftovers.of(Keys::These(slice::from_ref(key)), started(), &[]);
        assert_eq!(leftovers.of(Keys::These(&[b.clone(), a.clone()]), started(), &[]), Left::Perhaps);
        assert_eq!(of(&b), Left::Nothing);
        assert!(
            !leftovers.recognises(&a, tokens[0])
                && leftovers.recognises(&a, tokens[1])
                && !leftovers.recognises(&b, tokens[1])
        );
        leftovers.note(&b, tokens[0]);
        leftovers.note(&b, tokens[1]);
        leftovers.never_were(&b, tokens[0]);
        assert_eq!(of(&b), Left::Perhaps);
        leftovers.never_were(&b, tokens[1]);
        assert_eq!(of(&b), Left::Nothing);
        tokio::time::advance(LASTS).await;
        assert_eq!(of(&a), Left::Nothing);
    }

    #[tokio::test(start_paused = true)]
    async fn those_below_a_prefix_are_told_from_those_beside_it_and_further_below() {
        let leftovers = Leftovers::default();
        for key in ["c", "c.d/1", "c/d", "c/d/1", "c/d/e/1", "c/dd"] {
            leftovers.note(&Key::from(key), Token::random());
        }
        let below = ["c/d/", "c/", "c/d/e/", "", "c/d/1", "c/d/1/", "c/e/"]
            .map(|it| leftovers.of(Keys::Below(it), started(), &[]));
        let (yes, no) = (Left::Perhaps, Left::Nothing);
        assert_eq!(below, [yes, yes, yes, yes, yes, no, no]);
    }

    #[tokio::test(start_paused = true)]
    async fn it_is_absent_for_what_was_asked_since_until_it_is_seen() {
        let (leftovers, key) = (Leftovers::default(), Key::from("k"));
        let of = || leftovers.of(Keys::These(slice::from_ref(&key)), started(), &[]);
        let [first, second] = [(); 2].map(|()| Token::random());
        let before = Instant::now();
        tokio::time::advance(Duration::from_millis(1)).await;
        leftovers.note(&key, first);
        leftovers.absent(&key, before);
        assert_eq!(of(), Left::Perhaps, "it may have arrived after the question");
        tokio::time::advance(Duration::from_millis(1)).await;
        leftovers.absent(&key, Instant::now());
        assert_eq!(of(), Left::Absent);
        leftovers.note(&key, second);
        leftovers.absent(&key, Instant::now());
        assert_eq!(of(), Left::Perhaps, "it may have arrived in the same instant");
        tokio::time::advance(Duration::from_millis(1)).await;
        leftovers.absent(&key, Instant::now());
        assert!(!leftovers.recognises(&key, Token::random()));
        assert_eq!(of(), Left::Absent);
        assert!(leftovers.recognises(&key, first));
        assert_eq!(of(), Left::Perhaps);
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_a_release_has_found_counts_until_what_was_asked_before_is_answered() {
        let (leftovers, key, token) = (Leftovers::default(), Key::from("k"), Token::random());
        let of = || leftovers.of(Keys::These(slice::from_ref(&key)), started(), &[]);
        leftovers.note_answered(&key, token);
        leftovers.released(&key, token, false);
        assert_eq!(of(), Left::Absent);
        leftovers.note(&key, token);
        leftovers.note_answered(&key, token);
        leftovers.released(&key, token, false);
        assert_eq!(of(), Left::Unseen, "a call of it may be on its way");
        leftovers.released(&key, token, true);
        assert!(leftovers.recognises(&key, token));
        assert_eq!(of(), Left::Absent);
        let of_later = || leftovers.of(Keys::These(slice::from_ref(&key)), Instant::now(), &[]);
        assert_eq!(of_later(), Left::Absent, "it was asked at that moment");
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!(of_later(), Left::Nothing);
        tokio::time::advance(GONE_LASTS).await;
        assert_eq!(of(), Left::Nothing);
    }

    #[tokio::test(start_paused = true)]
    async fn a_loss_that_is_seen_late_makes_no_leftover_older() {
        let (mut of_key, token, now) = (OfKey::default(), Token::random(), Instant::now());
        of_key.add(token, now, Left::Perhaps, Open::Yes);
        of_key.add(token, now - LASTS, Left::Unseen, Open::Yes);
        assert!(of_key.counts());
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_is_open_of_its_own_leftover_only() {
        let (leftovers, key) = (Leftovers::default(), Key::from("k"));
        let [first, second] = [(); 2].map(|()| Token::random());
        leftovers.note(&key, first);
        leftovers.note_answered(&key, second);
        leftovers.released(&key, first, true);
        leftovers.released(&key, second, false);
        assert_eq!(leftovers.of(Keys::These(&[key]), started(), &[]), Left::Absent);
    }

    #[tokio::test(start_paused = true)]
    async fn leftovers_that_do_not_count_are_forgotten_when_others_are_noted() {
        let leftovers = Leftovers::default();
        for number in 0..1000 {
            leftovers.note(&Key::from(format!("{number}")), Token::random());
            tokio::time::advance(LASTS / 4).await;
        }
        assert!(leftovers.noted.lock().by_key.len() <= 16);
    }

    #[tokio::test(start_paused = true)]
    async fn leftovers_are_looked_through_when_their_number_has_doubled() {
        let leftovers = Leftovers::default();
        for number in 0..20 {
            leftovers.note(&Key::from(format!("{number}")), Token::random());
        }
        assert_eq!(leftovers.noted.lock().room, 32);
    }

    #[tokio::test(start_paused = true)]
    async fn a_leftover_that_is_noted_again_takes_the_place_of_no_other() {
        let (leftovers, key) = (Leftovers::default(), Key::from("k"));
        let [first, second] = [(); 2].map(|()| Token::random());
        leftovers.note(&key, first);
        for _ in 0..MOST {
            leftovers.note(&key, second);
        }
        assert!(leftovers.recognises(&key, first));
    }
}

/// The promise that `Contended` never stands for what this process itself has left in the store.
#[cfg(test)]
mod refusals {
    use std::{future::pending, sync::Arc};

    use tokio::{
        task::{JoinSet, yield_now},
        time::sleep,
    };

    use crate::{
        Error, Fault, Lease, LeaseStore, Leases,
        lease::{
            in_transaction::{LeaseTx, commit},
            life::state::Pin,
            store::{Acquired, Answer, Claim, Profile, Release, Renewal, pass_on},
        },
        testing::{
            Failure, MemoryStore, Operation,
            scripted::{Call, Scripted, failed},
        },
    };

    use super::{tests::started, *};

    const SECOND: Duration = Duration::from_secs(1);

    const MILLI: Duration = Duration::from_millis(1);

    fn pair() -> (MemoryStore, Leases<MemoryStore>, Leases<MemoryStore>) {
        let store = MemoryStore::new();
        let (here, there) = (Leases::new(store.client()), Leases::new(store.client()));
        (store, here, there)
    }

    /// Releases of this process do not reach the store.
    fn no_releases(leases: &Leases<MemoryStore>) {
        leases.store().faults().script(Operation::Release, [Failure::Refused; 1000]);
    }

    fn lost(leases: &Leases<MemoryStore>) {
        leases.store().faults().script(Operation::Acquire, [Failure::AnswerLost]);
    }

    #[track_caller]
    fn not_refused<T: std::fmt::Debug>(acquired: Result<Option<T>, Error>) {
        match acquired {
            Ok(None) => panic!("Ok(None): told that somebody else has it"),
            Err(err) if err.is_contended() => panic!("told that somebody else has it: {err:?}"),
            _ => {}
        }
    }

    #[track_caller]
    fn unavailable<T: std::fmt::Debug>(acquired: Result<T, Error>) {
        let err = acquired.unwrap_err();
        assert!(matches!(err, Error::Database { fault: Fault::Unavailable, .. }), "{err:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn leases_are_watched_for_as_long_as_somebody_has_them() {
        let (store, here, _) = pair();
        let first = here.lease("k").acquire().await.unwrap();
        store.steal("k");
        let held = |key| here.0.leftovers.noted.lock().by_key.get(&Key::from(key)).map(|it| it.held.len());
        let second = here.lease("k").acquire().await.unwrap();
        assert_eq!(held("k"), Some(2));
        for number in 0..100 {
            here.lease(format!("{number}")).acquire().await.unwrap().release().await.unwrap();
            here.lease("l").acquire().await.unwrap().release().await.unwrap();
        }
        let mut handed_over = here.lease("l").acquire().await.unwrap();
        for _ in 0..20 {
            let next = tokio::spawn(here.lease("l").acquire());
            sleep(MILLI).await;
            handed_over.release().await.unwrap();
            handed_over = next.await.unwrap().unwrap();
        }
        assert_eq!((held("k"), held("l")), (Some(2), Some(2)), "the last two");
        assert!(here.0.leftovers.noted.lock().by_key.len() <= 16);
        drop((first, second));
    }

    #[tokio::test(start_paused = true)]
    async fn a_lost_lease_of_which_all_is_answered_leaves_nothing() {
        let (store, here, _) = pair();
        let lease = here.lease("k").acquire().await.unwrap();
        store.steal("k");
        let of = || here.0.leftovers.of(Keys::These(&[Key::from("k")]), started(), &[]);
        assert_eq!(of(), Left::Nothing);
        lease.release().await.unwrap();
        assert_eq!(of(), Left::Nothing);
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_is_looked_at_before_it_is_told_from_others() {
        let (store, here, _) = pair();
        let leftovers = &here.0.leftovers;
        for is_seen in [true, false] {
            let lease = here.lease("k").acquire().await.unwrap();
            lease.verify_by(async { Ok(true) }).await.unwrap();
            store.steal("k");
            lease.lost().await;
            sleep(MILLI).await;
            let key = Key::from("k");
            if is_seen {
                assert!(leftovers.recognises(&key, lease.kept.token));
            } else {
                // The first one learns of the loss.
                for _ in 0..2 {
                    leftovers.absent(&key, Instant::now());
                    sleep(MILLI).await;
                }
            }
            let left = if is_seen { Left::Perhaps } else { Left::Absent };
            assert_eq!(leftovers.of(Keys::These(slice::from_ref(&key)), started(), &[]), left);
            leftovers.never_were(&key, lease.kept.token);
        }
    }

    /// A store in which a transaction has a row locked, so that no release finds it.
    #[derive(Clone, Default)]
    struct Locked {
        store: MemoryStore,
        is_locked: Arc<Mutex<bool>>,
    }

    impl LeaseStore for Locked {
        pass_on!(lease_acquire, lease_look, lease_renew, lease_list, lease_sweep);

        async fn lease_release(&self, key: &Key, token: Token, min_hold: Duration) -> Result<Answer, Error> {
            let is_locked = *self.is_locked.lock();
            if is_locked { Ok(Answer::Busy) } else { self.store.lease_release(key, token, min_hold).await }
        }
    }

    /// Leases in such a store, whose first renewal takes this long.
    fn with_renewal(takes: Duration) -> Leases<Locked> {
        let leases = Leases::builder(Locked::default()).ttl(9 * SECOND).build().unwrap();
        leases.store().store.faults().script(Operation::Renew, [Failure::Slow(takes)]);
        leases
    }

    async fn until_renewing<S: LeaseStore>(lease: &Lease<S>) {
        while !lease.kept.is_open() {
            sleep(MILLI).await;
        }
        sleep(MILLI).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_that_a_transaction_pins_is_held_as_soon_as_its_renewal_is_answered() {
        for is_handed_over in [false, true] {
            for is_pinned in [true, false] {
                let here = with_renewal(200 * MILLI);
                let mut lease = here.lease("k").acquire().await.unwrap();
                if is_handed_over {
                    until_renewing(&lease).await;
                    let next = tokio::spawn(here.lease("k").acquire());
                    sleep(MILLI).await;
                    lease.release().await.unwrap();
                    lease = next.await.unwrap().unwrap();
                }
                if is_pinned {
                    lease.verify_by(async { Ok(true) }).await.unwrap();
                }
                *here.store().is_locked.lock() = true;
                until_renewing(&lease).await;
                let releasing = tokio::spawn(lease.release());
                sleep(MILLI).await;
                let of = || here.0.leftovers.of(Keys::These(&[Key::from("k")]), started(), &[]);
                assert_eq!(of(), Left::Perhaps, "the renewal may have the row locked");
                sleep(250 * MILLI).await;
                let asked = here.lease("k").wait(Duration::ZERO).acquire().await;
                if is_pinned {
                    assert!(asked.unwrap_err().is_contended());
                } else {
                    unavailable(asked);
                }
                *here.store().is_locked.lock() = false;
                releasing.await.unwrap().unwrap();
                assert!(here.lease("k").wait(Duration::ZERO).acquire().await.is_ok());
            }
        }
    }

    /// A transaction that another one has undone.
    struct Undone;

    impl LeaseTx for Undone {
        async fn check_open(&mut self) -> Result<(), Error> {
            Err(failed(Fault::Serialization))
        }

        async fn renew(&mut self, _renewal: &Renewal) -> Result<Answer, Error> {
            unreachable!()
        }

        async fn release(&mut self, _release: &Release, _pin: Pin) -> Result<bool, Error> {
            unreachable!()
        }

        async fn commit(self) -> Result<(), Error> {
            unreachable!()
        }

        async fn roll_back(self) -> bool {
            true
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_is_over_does_not_hide_the_transaction_that_pins_the_lease() {
        let commit_is_undone = async |lease: &Lease<_>| drop(commit(&[lease.share()], Undone).await);
        let verify_is_undone = async |lease: &Lease<_>| {
            lease.verify_by(async { Err(failed(Fault::Serialization)) }).await.unwrap_err();
        };
        for case in 0..4 {
            let here = Leases::builder(Locked::default()).ttl(9 * SECOND).build().unwrap();
            let lease = here.lease("k").acquire().await.unwrap();
            lease.verify_by(async { Ok(true) }).await.unwrap();
            *here.store().is_locked.lock() = true;
            match case {
                0 => commit_is_undone(&lease).await,
                1 => verify_is_undone(&lease).await,
                _ => {}
            }
            if case == 2 {
                assert!(timeout(105 * MILLI, lease.release()).await.is_err(), "dropped while it waits");
            } else {
                drop(lease);
            }
            sleep(SECOND).await;
            let err = here.lease("k").wait(Duration::ZERO).acquire().await.unwrap_err();
            assert!(err.is_contended(), "{case}: {err:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_transaction_that_is_over_does_not_hold_a_lease_whose_renewal_hangs() {
        let here = with_renewal(2 * SECOND);
        let lease = here.lease("k").acquire().await.unwrap();
        lease.verify_by(async { Ok(true) }).await.unwrap();
        *here.store().is_locked.lock() = true;
        until_renewing(&lease).await;
        drop(lease);
        sleep(1992 * MILLI).await;
        // Refused before the renewal is answered, and judged after that.
        here.store().store.faults().script(Operation::Acquire, [Failure::Slow(8 * MILLI)]);
        let asking = tokio::spawn(here.lease("k").wait(Duration::ZERO).acquire());
        sleep(5 * MILLI).await;
        *here.store().is_locked.lock() = false;
        not_refused(asking.await.unwrap().map(Some));
    }

    #[tokio::test(start_paused = true)]
    async fn a_release_that_is_late_is_no_other_holder() {
        for is_renewed in [false, true] {
            let here = with_renewal(2 * SECOND);
            let lease = here.lease("k").acquire().await.unwrap();
            if is_renewed {
                until_renewing(&lease).await;
            }
            here.store().store.faults().script(Operation::Release, [Failure::Slow(4 * SECOND)]);
            drop(lease);
            sleep(FIRST_ANSWER * 9 / 10).await;
            let of = || here.0.leftovers.of(Keys::These(&[Key::from("k")]), started(), &[]);
            assert_eq!(of() != Left::Nothing, is_renewed);
            sleep(SECOND).await;
            unavailable(here.lease("k").wait(Duration::ZERO).acquire().await);
            sleep(4 * SECOND).await;
            assert!(here.lease("k").wait(Duration::ZERO).acquire().await.is_ok());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_pin_ends_what_is_left_for_no_other_reason_than_an_open_call() {
        let (leftovers, key, token) = (Leftovers::default(), Key::from("k"), Token::random());
        let of = || leftovers.of(Keys::These(slice::from_ref(&key)), started(), &[]);
        let notes: [fn(&Leftovers, &Key, Token); 3] = [Leftovers::note_open, Leftovers::note, Leftovers::note_answered];
        for (first, second) in (0..9).map(|it| (it / 3, it % 3)) {
            notes[first](&leftovers, &key, token);
            notes[second](&leftovers, &key, token);
            leftovers.pinned(&key, Token::random());
            assert_eq!(of(), Left::Perhaps);
            leftovers.pinned(&key, token);
            assert_eq!(of() == Left::Nothing, (first, second) == (0, 0));
            leftovers.never_were(&key, token);
        }
    }

    /// A store that executes the first claims at once, and never answers them.
    #[derive(Clone, Default)]
    struct Mute {
        store: MemoryStore,
        mute: Arc<Mutex<u32>>,
    }

    impl LeaseStore for Mute {
        pass_on!(lease_look, lease_renew, lease_list, lease_sweep, lease_release);

        async fn lease_acquire(&self, claim: &Claim) -> Result<Acquired, Error> {
            let answer = self.store.lease_acquire(claim).await;
            let is_mute = {
                let mut mute = self.mute.lock();
                *mute = mute.saturating_sub(1);
                *mute > 0
            };
            if is_mute { pending().await } else { answer }
        }
    }

    #[derive(Clone, Default)]
    struct Queueing {
        store: MemoryStore,
        places: Arc<Mutex<Vec<(Key, Token)>>>,
    }

    impl LeaseStore for Queueing {
        pass_on!(lease_look, lease_renew, lease_list, lease_sweep);

        async fn lease_acquire(&self, claim: &Claim) -> Result<Acquired, Error> {
            let first = {
                let mut places = self.places.lock();
                if claim.queue && !places.contains(&(claim.key.clone(), claim.token)) {
                    places.push((claim.key.clone(), claim.token));
                }
                places.iter().find(|it| it.0 == claim.key).map(|it| it.1)
            };
            if first.is_some_and(|it| it != claim.token) {
                return Ok(Acquired::Held { free_in: None });
            }
            let acquired = self.store.lease_acquire(claim).await?;
            if matches!(acquired, Acquired::Granted(_)) {
                self.places.lock().retain(|it| it.1 != claim.token);
            }
            Ok(acquired)
        }

        async fn lease_release(&self, key: &Key, token: Token, min_hold: Duration) -> Result<Answer, Error> {
            let answer = self.store.lease_release(key, token, min_hold).await?;
            let mut places = self.places.lock();
            let before = places.len();
            places.retain(|it| it.1 != token);
            Ok(if places.len() < before { Answer::Done } else { answer })
        }

        fn profile(&self) -> Profile {
            Profile { queues: true, ..Profile::default() }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_claim_whose_caller_has_gone_at_once_is_no_other_holder() {
        let here = Leases::new(Mute::default());
        *here.store().mute.lock() = 2;
        assert!(timeout(100 * MILLI, here.lease("k").acquire()).await.is_err());
        not_refused(here.lease("k").try_acquire().await);
    }

    #[tokio::test(start_paused = true)]
    async fn nor_for_a_caller_that_waits() {
        let here = Leases::new(Mute::default());
        *here.store().mute.lock() = 2;
        assert!(timeout(100 * MILLI, here.lease("k").acquire()).await.is_err());
        not_refused(here.lease("k").wait(200 * MILLI).acquire().await.map(Some));
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_that_is_just_being_released_is_asked_for_again() {
        for wait in [None, Some(Duration::ZERO)] {
            let (_, here, _) = pair();
            here.store().faults().slow(20 * MILLI);
            assert!(timeout(10 * MILLI, here.lease("k").acquire()).await.is_err());
            let lease = match wait {
                None => here.lease("k").try_acquire().await.unwrap().expect("nobody else has it"),
                Some(wait) => here.lease("k").wait(wait).acquire().await.unwrap(),
            };
            assert!(lease.is_trusted());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_that_is_over_before_the_queue_has_an_answer_gets_that_answer() {
        for wait in [Duration::ZERO, 2 * MILLI] {
            let (_, here, _) = pair();
            let started = Instant::now();
            here.store().faults().script(Operation::Acquire, [Failure::Slow(20 * MILLI)]);
            let second = async {
                yield_now().await;
                here.lease("k").wait(wait).acquire().await.map(drop)
            };
            let (first, second) = tokio::join!(here.lease("k").acquire(), second);
            assert!(first.unwrap().is_trusted() && second.unwrap_err().is_contended());
            assert!(started.elapsed() < 30 * MILLI, "{:?}", started.elapsed());
            assert_eq!(here.health().unreachable_for, None);
        }
        // The first caller is told that it is held, and waits on.
        let here = Leases::new(Scripted::new(Profile::default()));
        here.store().fail(Call::Acquire, (0..1000).map(|_| failed(Fault::Serialization)));
        let first = tokio::spawn(here.lease("k").acquire());
        yield_now().await;
        let started = Instant::now();
        assert!(here.lease("k").wait(Duration::ZERO).acquire().await.unwrap_err().is_contended());
        assert!(started.elapsed() < 30 * MILLI, "{:?}", started.elapsed());
        first.abort();

        let (_, here, _) = pair();
        here.store().faults().script(Operation::Acquire, [Failure::Silent; 1000]);
        let second = async {
            yield_now().await;
            here.lease("k").wait(Duration::ZERO).acquire().await.map(drop)
        };
        let (first, second) = tokio::join!(here.lease("k").wait(SECOND).acquire(), second);
        unavailable(first);
        unavailable(second);
    }

    #[tokio::test(start_paused = true)]
    async fn what_others_may_have_too_is_granted_to_all_whose_wait_is_over() {
        for wait in [Duration::ZERO, 3 * MILLI] {
            let (_, here, there) = pair();
            let _permit = there.semaphore("s", 10).acquire().await.unwrap();
            here.store().faults().slow(2 * MILLI);
            let mut asking = JoinSet::new();
            for number in 0..9 {
                let any = (number < 3).then(|| here.any(["a", "b", "c"]).wait(wait).acquire());
                let permits = (number < 3).then(|| here.semaphore("p", 10).take(3).wait(wait).acquire());
                let (reader, permit) = (here.rw("k").read().wait(wait), here.semaphore("s", 10).wait(wait));
                asking.spawn(async move {
                    let any = async { if let Some(any) = any { Some(any.await.unwrap()) } else { None } };
                    let permits = async { if let Some(it) = permits { Some(it.await.unwrap()) } else { None } };
                    let (reader, permit, any, permits) = tokio::join!(reader.acquire(), permit.acquire(), any, permits);
                    (reader.unwrap(), permit.unwrap(), any, permits)
                });
            }
            let _leases = asking.join_all().await;
            assert!(here.semaphore("s", 10).wait(wait).acquire().await.unwrap_err().is_contended());
            assert!(here.any(["a", "b", "c"]).wait(wait).acquire().await.unwrap_err().is_contended());
            assert!(here.rw("k").write().wait(wait).acquire().await.unwrap_err().is_contended());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_last_attempt_of_a_caller_learns_what_those_before_it_learn() {
        // A release is tried every 0.4 s.
        let here = Leases::builder(MemoryStore::new()).ttl(4 * SECOND).build().unwrap();
        lost(&here);
        no_releases(&here);
        unavailable(here.lease("k").try_acquire().await);
        let first = here.lease("k").wait(SECOND).acquire();
        let second = async {
            yield_now().await;
            here.lease("k").acquire().await
        };
        let healed = async {
            sleep(SECOND + 50 * MILLI).await;
            here.store().faults().heal();
            here.store().faults().script(Operation::Acquire, [Failure::Slow(40 * MILLI)]);
        };
        let (first, second, ()) = tokio::join!(first, second, healed);
        assert!(second.unwrap().is_trusted());
        let err = first.unwrap_err();
        assert!(err.is_contended(), "{err:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_claim_that_is_answered_is_not_on_its_way() {
        let leases = Leases::new(Scripted::new(Profile::default()));
        leases.store().fail(Call::Acquire, [failed(Fault::Serialization)]);
        drop(leases.all(["a", "b"]).try_acquire().await.unwrap().expect("it is asked again"));
        let keys = ["a", "b"].map(Key::from);
        assert_eq!(leases.0.leftovers.of(Keys::These(&keys), started(), &[]), Left::Absent);
        sleep(GONE_LASTS).await;
        assert_eq!(leases.0.leftovers.of(Keys::These(&keys), started(), &[]), Left::Nothing);
    }

    /// A store whose batches take nothing.
    #[derive(Clone, Default)]
    struct OneByOne {
        store: MemoryStore,
    }

    impl LeaseStore for OneByOne {
        pass_on!(lease_acquire, lease_look, lease_renew, lease_release, lease_list, lease_sweep);

        fn profile(&self) -> Profile {
            Profile { batches: true, ..Profile::default() }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_claim_that_a_batch_did_not_take_leaves_nothing() {
        let here = Leases::new(OneByOne::default());
        let there = Leases::new(here.store().store.client());
        let keys: Vec<_> = (0..40).map(|it| Key::from(format!("k{it}"))).collect();
        let mut held = JoinSet::new();
        for key in &keys {
            let (there, key) = (there.clone(), key.clone());
            held.spawn(async move { there.lease(key).acquire().await.unwrap() });
        }
        let _held = held.join_all().await;
        here.store().store.faults().slow(10 * MILLI);
        let mut tries = JoinSet::new();
        for key in &keys {
            let (here, key) = (here.clone(), key.clone());
            tries.spawn(async move { here.lease(key).try_acquire().await.unwrap().is_none() });
        }
        assert!(tries.join_all().await.into_iter().all(|it| it));
        sleep(SECOND).await;
        assert_eq!(here.0.leftovers.of(Keys::These(&keys), started(), &[]), Left::Nothing);
        assert_eq!(here.store().store.faults().calls(Operation::Release), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_behind_others_waits_for_what_is_just_being_released() {
        let (_, here, _) = pair();
        here.store().faults().script(Operation::Acquire, [Failure::Slow(20 * MILLI)]);
        here.store().faults().script(Operation::Release, [Failure::Slow(40 * MILLI)]);
        assert!(timeout(15 * MILLI, here.lease("k").acquire()).await.is_err());
        sleep(6 * MILLI).await;
        let request = || here.lease("k").wait(Duration::ZERO).acquire();
        let (first, second) = tokio::join!(request(), request());
        let (lease, err) = if first.is_ok() { (first, second) } else { (second, first) };
        assert!(lease.unwrap().is_trusted() && err.unwrap_err().is_contended());
    }

    #[tokio::test(start_paused = true)]
    async fn a_release_without_an_answer_leaves_no_other_holder() {
        let (_, here, _) = pair();
        let lease = here.lease("k").acquire().await.unwrap();
        no_releases(&here);
        unavailable(lease.release().await);
        not_refused(here.lease("k").try_acquire().await);
    }

    #[tokio::test(start_paused = true)]
    async fn a_late_grant_whose_release_is_not_answered_is_no_other_holder() {
        let (_, here, _) = pair();
        here.store().faults().script(Operation::Acquire, [Failure::Slow(200 * MILLI)]);
        no_releases(&here);
        assert!(timeout(100 * MILLI, here.lease("k").acquire()).await.is_err());
        sleep(SECOND).await;
        not_refused(here.lease("k").try_acquire().await);
    }

    #[tokio::test(start_paused = true)]
    async fn a_late_grant_that_its_caller_got_is_another_holder() {
        let (_, here, _) = pair();
        here.store().faults().script(Operation::Acquire, [Failure::Slow(FIRST_ANSWER + 100 * MILLI)]);
        let lease = here.lease("k").acquire().await.unwrap();
        assert!(here.lease("k").try_acquire().await.unwrap().is_none());
        assert!(here.lease("k").wait(SECOND).acquire().await.unwrap_err().is_contended());
        drop(lease);
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_backed_out_is_no_other_reader() {
        let (_, here, there) = pair();
        let writer = there.rw("k").write().acquire().await.unwrap();
        no_releases(&here);
        unavailable(here.rw("k").read().try_acquire().await);
        writer.release().await.unwrap();
        not_refused(here.rw("k").write().try_acquire().await);
    }

    #[tokio::test(start_paused = true)]
    async fn a_ticket_whose_caller_has_gone_while_it_was_claimed_is_before_nobody() {
        let (store, here, there) = pair();
        let held = there.lease("k").acquire().await.unwrap();
        // The first look for tickets, and the claim of the lease, are fast.
        here.store().faults().script(Operation::Acquire, [Failure::None, Failure::Slow(100 * MILLI)]);
        no_releases(&here);
        assert!(timeout(80 * MILLI, here.lease("k").fair().acquire()).await.is_err());
        sleep(100 * MILLI).await;
        held.release().await.unwrap();
        let tickets = store.lease_list("k/queue/", 10).await.unwrap();
        assert_eq!(tickets.len(), 1, "precondition");
        assert_eq!(tickets[0].info.holder, **here.0.keeper.holder(), "precondition: it is of this process");
        not_refused(here.lease("k").fair().try_acquire().await);
    }

    #[tokio::test(start_paused = true)]
    async fn permits_that_a_request_gives_back_are_not_held_by_others() {
        let (store, here, there) = pair();
        let one = async || there.semaphore("k", 2).acquire().await.unwrap();
        let mut leases = vec![one().await, one().await];
        let gathering = tokio::spawn(here.semaphore("k", 2).take(2).wait(60 * SECOND).acquire());
        sleep(SECOND).await;
        leases.pop().unwrap().release().await.unwrap();
        sleep(SECOND).await;
        store.steal("k/permit/gather").unwrap();
        no_releases(&here);
        let claim = Claim::new("k/permit/gather", Token::random(), Arc::from("another"), 12 * SECOND);
        assert!(matches!(store.lease_acquire(&claim).await.unwrap(), Acquired::Granted(_)));
        // The theft is noticed by a renewal (ttl 30 s), and the gathered permit is given back.
        sleep(11 * SECOND).await;
        gathering.abort();
        sleep(MILLI).await;
        leases.pop().unwrap().release().await.unwrap();
        store.lease_release(&Key::from("k/permit/gather"), claim.token, Duration::ZERO).await.unwrap();
        let holder = here.0.keeper.holder().clone();
        let held = store.lease_list("k/permit/", 10).await.unwrap();
        let of_permits: Vec<_> = held.iter().filter(|it| !it.info.key.contains("queue")).collect();
        assert!(of_permits.len() == 1 && of_permits[0].info.holder == *holder, "precondition: {of_permits:?}");
        not_refused(here.semaphore("k", 2).take(2).try_acquire().await);
    }

    #[tokio::test(start_paused = true)]
    async fn a_claim_that_was_executed_and_failed_is_no_other_holder() {
        let here = Leases::new(Scripted::new(Profile::default()));
        here.store().store.faults().script(Operation::Release, [Failure::Refused; 1000]);
        here.store().fail(Call::Acquire, [failed(Fault::Other)]);
        assert!(here.lease("k").try_acquire().await.is_err());
        not_refused(here.lease("k").try_acquire().await);
    }

    #[tokio::test(start_paused = true)]
    async fn an_outage_of_many_claims_leaves_no_other_holder() {
        let (_, here, _) = pair();
        no_releases(&here);
        lost(&here);
        unavailable(here.lease("k").try_acquire().await);
        here.store().faults().script(Operation::Acquire, [Failure::Refused; 200]);
        for _ in 0..200 {
            unavailable(here.lease("k").try_acquire().await);
        }
        not_refused(here.lease("k").try_acquire().await);
    }

    #[tokio::test(start_paused = true)]
    async fn a_permit_of_a_larger_semaphore_is_not_counted() {
        let (_, here, there) = pair();
        no_releases(&here);
        lost(&here);
        unavailable(here.semaphore("k", 1).try_acquire().await);
        unavailable(here.semaphore("k", 1).try_acquire().await);
        // It blocks nobody who asks for one of one.
        let _beyond = there.lease("k/permit/1").acquire().await.unwrap();
        not_refused(here.semaphore("k", 1).try_acquire().await);
    }

    #[tokio::test(start_paused = true)]
    async fn the_ticket_of_a_caller_is_no_permit_that_others_hold() {
        let (_, here, _) = pair();
        no_releases(&here);
        lost(&here);
        unavailable(here.semaphore("k", 1).try_acquire().await);
        let first = here.semaphore("k", 1).wait(3 * SECOND).acquire();
        let second = async {
            sleep(10 * MILLI).await;
            here.semaphore("k", 1).wait(SECOND).acquire().await
        };
        let (first, second) = tokio::join!(first, second);
        unavailable(first);
        not_refused(second.map(Some));
    }

    #[tokio::test(start_paused = true)]
    async fn the_lease_of_a_writer_that_waits_is_not_that_of_another_process() {
        let (_, here, _) = pair();
        no_releases(&here);
        lost(&here);
        unavailable(here.rw("k").read().try_acquire().await);
        let first = here.rw("k").write().wait(3 * SECOND).acquire();
        let second = async {
            sleep(10 * MILLI).await;
            here.rw("k").write().wait(SECOND).acquire().await
        };
        let (first, second) = tokio::join!(first, second);
        unavailable(first);
        not_refused(second.map(Some));
    }

    #[tokio::test(start_paused = true)]
    async fn a_place_in_the_queue_of_the_store_is_given_up_with_its_request() {
        let here = Leases::new(Queueing::default());
        let there = Leases::new(Queueing { store: here.store().store.client(), places: here.store().places.clone() });
        let held = there.lease("k").acquire().await.unwrap();
        assert!(timeout(SECOND, here.lease("k").acquire()).await.is_err());
        here.store().store.faults().script(Operation::Release, [Failure::Refused; 5]);
        held.release().await.unwrap();
        assert_eq!(here.store().places.lock().len(), 1, "precondition");
        not_refused(here.lease("k").try_acquire().await);
    }

    #[tokio::test(start_paused = true)]
    async fn what_a_release_has_found_is_no_leftover() {
        let here = Leases::new(Scripted::new(Profile::default()));
        here.store().store.faults().script(Operation::Acquire, [Failure::AnswerLost]);
        unavailable(here.lease("k").try_acquire().await);
        sleep(SECOND).await;
        assert_eq!((here.show("k").await.unwrap(), here.store().calls(Call::Release)), (None, 1), "precondition");
        sleep(GONE_LASTS).await;
        assert!(
            here.0.leftovers.of(Keys::These(&[Key::from("k")]), started(), &[]) == Left::Nothing,
            "a note is left, though its release was answered"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn what_the_release_of_a_permit_has_found_is_no_leftover() {
        let (_, here, _) = pair();
        lost(&here);
        unavailable(here.semaphore("k", 1000).try_acquire().await);
        for _ in 0..10 {
            let permit: Lease<_> = here.semaphore("k", 1000).acquire().await.unwrap();
            permit.release().await.unwrap();
        }
        sleep(GONE_LASTS).await;
        assert!(
            here.0.leftovers.of(Keys::Below("k/permit/"), started(), &[]) == Left::Nothing,
            "a note is left, though its release was answered"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_look_says_nothing_of_a_claim_that_is_later_than_it() {
        let (_, here, there) = pair();
        let held = there.lease("k").acquire().await.unwrap();
        no_releases(&here);
        here.store().faults().script(Operation::Look, [Failure::Slow(40 * MILLI)]);
        let first = tokio::spawn(here.lease("k").wait(Duration::ZERO).acquire());
        sleep(25 * MILLI).await;
        held.release().await.unwrap();
        lost(&here);
        unavailable(here.lease("k").try_acquire().await);
        assert!(first.await.unwrap().unwrap_err().is_contended(), "precondition");
        not_refused(here.lease("k").try_acquire().await);
    }

    #[tokio::test(start_paused = true)]
    async fn a_ticket_of_a_request_that_waits_counts_beside_one_that_was_given_up() {
        for fair in [true, false] {
            let (store, here, there) = pair();
            let held = there.lease("k").acquire().await.unwrap();
            no_releases(&here);
            assert!(timeout(80 * MILLI, here.lease("k").fair().acquire()).await.is_err());
            let request = if fair { here.lease("k").fair() } else { here.lease("k") };
            let waiting = tokio::spawn(request.wait(60 * SECOND).acquire());
            sleep(SECOND).await;
            assert!(!waiting.is_finished());
            let live = store.lease_list("k/queue/", 10).await.unwrap().len();
            here.store().faults().heal();
            held.release().await.unwrap();
            let passes = here.lease("k").fair().try_acquire().await;
            assert!(matches!(passes, Ok(None)), "{fair} {live}: {passes:?}");
            drop(waiting.await.unwrap().unwrap());
        }
    }
}
