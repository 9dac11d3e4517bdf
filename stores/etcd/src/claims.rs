//! The claims of this process: which keys it may have in etcd, and until when. Pure but for the clock.
//!
//! A claim is noted before its first request is sent, and forgotten when its key is known to be gone. So a lost answer
//! or a dropped future leaves no key that is never removed.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use lockkit::{Key, store::Token};
use tokio::{sync::Notify, time::Instant};

use crate::{
    claimed::{Claimed, Phase},
    layout::Place,
    session::Session,
};

/// When to try again to remove a key.
const REMOVE_AGAIN: Duration = Duration::from_millis(500);

/// A waiting claim that no request mentions for this long, or its ttl if that is longer, loses its place.
const FORGOTTEN: Duration = Duration::from_secs(5);

/// A key that stays after its release until an instant, on an etcd lease of its own.
#[derive(Debug, Clone)]
pub(crate) struct Left {
    pub(crate) path: String,
    pub(crate) lease: i64,
}

/// What is to be removed now.
#[derive(Debug, Default)]
pub(crate) struct Due {
    pub(crate) claims: Vec<Claimed>,
    pub(crate) left: Vec<Left>,
    pub(crate) next: Option<Instant>,
}

/// The claims of this process.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    state: Mutex<State>,
    /// Notified when something is due earlier than before.
    pub(crate) sooner: Arc<Notify>,
}

#[derive(Debug, Default)]
struct State {
    claims: HashMap<Token, Claimed>,
    /// The claims to each lease, the oldest first.
    of_key: HashMap<Key, Vec<Token>>,
    due: BinaryHeap<Reverse<(Instant, Token)>>,
    left: Vec<(Instant, Left)>,
    /// How many claims there have been.
    count: u64,
}

impl State {
    /// Returns whether this is earlier than everything else.
    fn schedule(&mut self, at: Instant, token: Token) -> bool {
        let is_sooner = self.due.peek().is_none_or(|Reverse((first, _))| at < *first);
        match self.claims.get_mut(&token) {
            Some(claimed) if claimed.scheduled.is_none_or(|it| at < it) => claimed.scheduled = Some(at),
            // It is looked at earlier, and scheduled again then.
            _ => return false,
        }
        self.due.push(Reverse((at, token)));
        is_sooner
    }

    fn remove(&mut self, token: Token) -> Option<Claimed> {
        let claimed = self.claims.remove(&token)?;
        if let Some(tokens) = self.of_key.get_mut(&claimed.place.name) {
            tokens.retain(|it| *it != token);
            if tokens.is_empty() {
                self.of_key.remove(&claimed.place.name);
            }
        }
        Some(claimed)
    }
}

impl Claims {
    /// Notes that a request to create the key of the claim is about to be sent, and returns the key.
    ///
    /// Returns `None` if the claim is being removed. When it is forgotten, its token may be used again. Its key is not,
    /// so a late request to remove it does not remove the next one.
    pub(crate) fn begin(
        &self,
        place: &Arc<Place>,
        token: Token,
        session: &Arc<Session>,
        ttl: Duration,
        record: &str,
    ) -> Option<String> {
        let until = Instant::now() + ttl;
        let mut state = self.state();
        let is_new = !state.claims.contains_key(&token);
        state.count += u64::from(is_new);
        let number = state.count;
        let claimed = state.claims.entry(token).or_insert_with(|| Claimed {
            place: place.clone(),
            token,
            path: place.path(token, number),
            session: session.clone(),
            phase: Phase::Claiming,
            record: String::new(),
            written: 0,
            doubts: Vec::new(),
            ended: false,
            stays: None,
            left_to: None,
            until,
            renewals: 0,
            ttl,
            scheduled: None,
        });
        if claimed.ended {
            return None;
        }
        let path = claimed.path.clone();
        claimed.session = session.clone();
        claimed.doubts.push(session.clone());
        (claimed.until, claimed.ttl) = (claimed.until.max(until), ttl);
        record.clone_into(&mut claimed.record);
        if is_new {
            state.of_key.entry(place.name.clone()).or_default().push(token);
        }
        let is_sooner = state.schedule(until, token);
        drop(state);
        self.notify(is_sooner);
        Some(path)
    }

    /// Notes that the key exists since this revision, or does not exist.
    ///
    /// Returns `false` if the claim was given up meanwhile.
    pub(crate) fn answered(&self, token: Token, revision: Option<i64>) -> bool {
        let mut state = self.state();
        let Some(claimed) = state.claims.get_mut(&token) else { return false };
        match revision {
            None => claimed.phase = Phase::Claiming,
            Some(_) if claimed.revision() == revision => {}
            Some(revision) => {
                claimed.phase = Phase::Waiting { revision };
                claimed.written = revision;
            }
        }
        !claimed.ended
    }

    /// Notes that a request to write the key of the claim, which exists, is about to be sent.
    pub(crate) fn doubt(&self, token: Token, session: &Arc<Session>) {
        if let Some(claimed) = self.state().claims.get_mut(&token) {
            claimed.doubts.push(session.clone());
        }
    }

    /// Notes that a request to write the key was executed or refused, and that nothing more will come of it.
    pub(crate) fn settled(&self, token: Token, session: &Arc<Session>) {
        if let Some(claimed) = self.state().claims.get_mut(&token)
            && let Some(at) = claimed.doubts.iter().position(|it| Arc::ptr_eq(it, session))
        {
            claimed.doubts.swap_remove(at);
        }
    }

    /// Notes that the claim holds the lease. `since`: when the request was sent.
    ///
    /// Returns `false` if the claim was given up or has expired meanwhile.
    pub(crate) fn granted(&self, token: Token, revision: i64, since: Instant) -> bool {
        let mut state = self.state();
        let Some(claimed) = state.claims.get_mut(&token) else { return false };
        match &mut claimed.phase {
            Phase::Held { revision: before, .. } if *before == revision => claimed.renewals += 1,
            phase => {
                *phase = Phase::Held { revision, since };
                // A claim that waits may stay longer than a lease that is held.
                claimed.until = since + claimed.ttl;
            }
        }
        let (is_held, until) = (claimed.held_since().is_some(), claimed.until);
        let is_sooner = state.schedule(until, token);
        drop(state);
        self.notify(is_sooner);
        is_held
    }

    /// Notes that a claim with this key is sent again, and returns the key. `record` is the value that it has if the
    /// claim is granted.
    ///
    /// Returns `None` if the claim is being removed.
    pub(crate) fn again(&self, token: Token, session: &Arc<Session>, ttl: Duration, record: &str) -> Option<String> {
        let until = Instant::now() + ttl;
        let mut state = self.state();
        let claimed = state.claims.get_mut(&token).filter(|it| !it.ended)?;
        (claimed.until, claimed.ttl) = (claimed.until.max(until), ttl);
        claimed.doubts.push(session.clone());
        record.clone_into(&mut claimed.record);
        Some(claimed.path.clone())
    }

    /// Forgets a claim that was refused and left nothing behind. One that is in doubt is removed first.
    pub(crate) fn refused(&self, token: Token) {
        let mut state = self.state();
        let Some(claimed) = state.claims.get_mut(&token) else { return };
        if claimed.is_in_doubt() {
            claimed.ended = true;
            let is_sooner = state.schedule(Instant::now(), token);
            drop(state);
            self.notify(is_sooner);
        } else {
            state.remove(token);
        }
    }

    pub(crate) fn get(&self, token: Token) -> Option<Claimed> {
        self.state().claims.get(&token).cloned()
    }

    /// Ends the claim and returns what it was. If its key is not removed soon, it is removed in the background.
    pub(crate) fn end(&self, token: Token) -> Option<Claimed> {
        let mut state = self.state();
        let claimed = state.claims.get_mut(&token)?;
        let before = claimed.clone();
        claimed.ended = true;
        // Also if it was to be looked at earlier: the caller's request comes first.
        claimed.scheduled = None;
        let is_sooner = state.schedule(Instant::now() + REMOVE_AGAIN * 4, token);
        drop(state);
        self.notify(is_sooner);
        Some(before)
    }

    /// Notes that the key is to stay after the release until an instant. If that is not done soon, it is done in the
    /// background.
    pub(crate) fn stay(&self, token: Token, until: Instant) {
        if let Some(claimed) = self.state().claims.get_mut(&token) {
            claimed.stays = Some(until);
        }
    }

    /// Notes that the key stays after the release, on this etcd lease, until an instant.
    pub(crate) fn leave(&self, token: Token, lease: i64, until: Instant) {
        let mut state = self.state();
        let Some(claimed) = state.claims.get_mut(&token) else { return };
        claimed.left_to = Some(lease);
        let left = Left { path: claimed.path.clone(), lease };
        state.left.push((until, left));
        drop(state);
        self.notify(true);
    }

    /// The key of the claim is gone.
    pub(crate) fn forget(&self, token: Token) {
        self.state().remove(token);
    }

    /// Notes a renewal of a held lease.
    pub(crate) fn renewed(&self, token: Token, until: Instant) -> bool {
        let mut state = self.state();
        let Some(claimed) = state.claims.get_mut(&token) else { return false };
        if claimed.held_since().is_none() {
            return false;
        }
        claimed.until = claimed.until.max(until);
        claimed.renewals += 1;
        true
    }

    /// Notes that the key of a held lease was written at this revision, and is on this etcd lease.
    pub(crate) fn moved(&self, token: Token, session: &Arc<Session>, revision: i64) {
        if let Some(claimed) = self.state().claims.get_mut(&token) {
            claimed.session = session.clone();
            claimed.written = revision;
        }
    }

    /// Notes the revision at which the key was last written.
    pub(crate) fn written(&self, token: Token, revision: i64) {
        if let Some(claimed) = self.state().claims.get_mut(&token) {
            claimed.written = revision;
        }
    }

    /// Notes the value that the key of a held lease has, and the ttl in it.
    pub(crate) fn recorded(&self, token: Token, record: String, ttl: Duration) {
        if let Some(claimed) = self.state().claims.get_mut(&token) {
            (claimed.record, claimed.ttl) = (record, ttl);
        }
    }

    /// Notes that a caller waits for the lease, so its waiting claims keep their places. Not the one whose key is
    /// `before` others: only its own requests keep it, so that it does not block the others if none come.
    pub(crate) fn touch(&self, key: &Key, before: &[u8]) {
        let now = Instant::now();
        let mut state = self.state();
        let State { claims, of_key, .. } = &mut *state;
        for token in of_key.get(key).into_iter().flatten() {
            if let Some(claimed) = claims.get_mut(token)
                && !claimed.ended
                && claimed.path.as_bytes() != before
                && matches!(claimed.phase, Phase::Waiting { .. })
            {
                claimed.until = claimed.until.max(now + claimed.ttl.max(FORGOTTEN));
            }
        }
    }

    /// The revision of the only waiting claim to this lease. `None` if there is none, or more than one.
    pub(crate) fn waiting(&self, key: &Key) -> Option<i64> {
        let state = self.state();
        let tokens = state.of_key.get(key).into_iter().flatten();
        let mut waiting = tokens.filter_map(|token| match state.claims.get(token)? {
            Claimed { phase: Phase::Waiting { revision }, ended: false, .. } => Some(*revision),
            _ => None,
        });
        waiting.next().filter(|_| waiting.next().is_none())
    }

    /// Whether any claim is on this etcd lease.
    pub(crate) fn use_session(&self, session: i64) -> bool {
        let uses = |it: &Claimed| it.session.id == session || it.doubts.iter().any(|it| it.id == session);
        self.state().claims.values().any(uses)
    }

    /// Takes what is to be removed now. It is due again a little later, until it is forgotten.
    pub(crate) fn take_due(&self) -> Due {
        let now = Instant::now();
        let mut state = self.state();
        let mut due = Due::default();
        while let Some(Reverse((at, token))) = state.due.peek().copied().filter(|Reverse((at, _))| *at <= now) {
            state.due.pop();
            let Some(claimed) = state.claims.get_mut(&token).filter(|it| it.scheduled == Some(at)) else { continue };
            claimed.scheduled = None;
            let next = if !claimed.ended && claimed.until > now {
                claimed.until
            } else {
                claimed.ended = true;
                due.claims.push(claimed.clone());
                now + REMOVE_AGAIN
            };
            state.schedule(next, token);
        }
        due.left = state.left.extract_if(.., |(until, _)| *until <= now).map(|(_, left)| left).collect();
        let next = state.due.peek().map(|Reverse((at, _))| *at);
        due.next = next.into_iter().chain(state.left.iter().map(|(until, _)| *until)).min();
        due
    }

    fn notify(&self, is_sooner: bool) {
        if is_sooner {
            self.sooner.notify_one();
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const INSTANT: Duration = Duration::from_millis(1);

    /// Waits until the last instant before this time has passed.
    async fn advance_almost(time: Duration) {
        advance(time.saturating_sub(INSTANT)).await;
    }

    fn session(id: i64) -> Arc<Session> {
        Arc::new(Session::new(id, SECOND * 60, Instant::now()))
    }

    /// Begins a claim to the lease `k`.
    fn begin(claims: &Claims, session: &Arc<Session>, ttl: Duration) -> Token {
        let place = Arc::new(Place::new("p/", &Key::from("k"), "testing").expect("a place"));
        let token = Token::random();
        claims.begin(&place, token, session, ttl, "record").expect("it is new");
        token
    }

    /// Begins a claim that waits since this revision.
    fn wait(claims: &Claims, session: &Arc<Session>, revision: i64) -> Token {
        let token = begin(claims, session, SECOND);
        assert!(claims.answered(token, Some(revision)));
        token
    }

    fn get(claims: &Claims, token: Token) -> Claimed {
        claims.get(token).expect("it is not forgotten")
    }

    fn due(claims: &Claims) -> Vec<Token> {
        claims.take_due().claims.iter().map(|it| it.token).collect()
    }

    /// Whether the keeper was woken since the last call.
    async fn woken(claims: &Claims) -> bool {
        tokio::select! {
            biased;
            () = claims.sooner.notified() => true,
            () = std::future::ready(()) => false,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_keeper_is_woken_for_what_is_due_before_everything_else() {
        let (claims, session) = (Claims::default(), session(1));
        for (ttl, sooner) in [(60, true), (60, false), (61, false), (1, true)] {
            begin(&claims, &session, SECOND * ttl);
            assert_eq!(woken(&claims).await, sooner, "{ttl} s");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_claim_is_removed_when_its_ttl_has_passed_and_again_until_it_is_forgotten() {
        let (claims, session) = (Claims::default(), session(1));
        let token = begin(&claims, &session, SECOND * 5);
        advance_almost(SECOND * 5).await;
        assert_eq!(due(&claims), []);
        advance(INSTANT).await;
        assert_eq!(due(&claims), [token]);
        assert_eq!(due(&claims), []);
        advance(REMOVE_AGAIN).await;
        assert_eq!(due(&claims), [token]);
        claims.forget(token);
        advance(REMOVE_AGAIN).await;
        assert_eq!(due(&claims), []);
    }

    #[tokio::test(start_paused = true)]
    async fn a_claim_that_was_given_up_is_removed_soon_though_it_is_granted_late() {
        let (claims, session) = (Claims::default(), session(1));
        let token = begin(&claims, &session, SECOND * 60);
        assert!(claims.end(token).is_some());
        assert!(!claims.granted(token, 7, Instant::now()));
        advance_almost(REMOVE_AGAIN * 4).await;
        assert_eq!(due(&claims), [], "the caller's own request comes first");
        advance(INSTANT).await;
        assert_eq!(due(&claims), [token]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_granted_claim_ends_with_its_ttl_though_it_could_have_waited_longer() {
        let (claims, session) = (Claims::default(), session(1));
        let token = begin(&claims, &session, SECOND * 60);
        assert!(claims.answered(token, Some(5)));
        assert!(claims.again(token, &session, SECOND, "record").is_some());
        assert!(claims.granted(token, 5, Instant::now()));
        advance(SECOND).await;
        assert_eq!(due(&claims), [token]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_is_held_until_the_instant_at_which_its_ttl_has_passed() {
        let (claims, session) = (Claims::default(), session(1));
        let token = wait(&claims, &session, 5);
        assert!(!get(&claims, token).held_once());
        assert!(claims.granted(token, 5, Instant::now()));
        advance_almost(SECOND).await;
        assert!(get(&claims, token).held_since().is_some());
        advance(INSTANT).await;
        let claimed = get(&claims, token);
        assert!(claimed.held_once() && claimed.held_since().is_none() && claimed.unexpired_since().is_none());
        assert!(!claims.renewed(token, Instant::now() + SECOND), "an expired lease is not renewed");
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_is_repeated_leaves_the_lease_held_since_its_grant() {
        let (claims, session) = (Claims::default(), session(1));
        let (token, since) = (begin(&claims, &session, SECOND * 60), Instant::now());
        assert!(claims.answered(token, Some(5)) && claims.granted(token, 5, since));
        advance(SECOND).await;
        assert!(claims.answered(token, Some(5)) && claims.granted(token, 5, Instant::now()));
        let claimed = get(&claims, token);
        assert_eq!((claimed.held_since(), claimed.renewals), (Some(since), 1));
        // The key was created again.
        assert!(claims.granted(token, 9, Instant::now()));
        let claimed = get(&claims, token);
        assert_eq!((claimed.revision(), claimed.renewals), (Some(9), 1));
        assert_eq!(claimed.held_since(), Some(Instant::now()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_claim_that_is_forgotten_leaves_the_others_their_places() {
        let (claims, session, key) = (Claims::default(), session(1), Key::from("k"));
        let [first, second] = [5, 6].map(|revision| wait(&claims, &session, revision));
        assert_eq!(claims.waiting(&key), None, "there are two");
        claims.forget(first);
        assert_eq!(claims.waiting(&key), Some(6));
        claims.forget(second);
        assert_eq!(claims.waiting(&key), None);
    }

    #[tokio::test(start_paused = true)]
    async fn places_are_kept_while_a_caller_waits_but_for_the_first_and_those_given_up() {
        let (claims, session, key) = (Claims::default(), session(1), Key::from("k"));
        let [first, second, given_up] = [5, 6, 7].map(|revision| wait(&claims, &session, revision));
        claims.end(given_up);
        let before = get(&claims, first);
        claims.touch(&key, before.path.as_bytes());
        assert_eq!(get(&claims, first).until, before.until);
        assert_eq!(get(&claims, second).until, Instant::now() + FORGOTTEN);
        assert_eq!(get(&claims, given_up).until, before.until);
    }

    #[tokio::test(start_paused = true)]
    async fn a_claim_is_in_doubt_until_each_of_its_requests_is_settled() {
        let (claims, session) = (Claims::default(), session(1));
        let token = begin(&claims, &session, SECOND * 60);
        claims.doubt(token, &session);
        claims.settled(token, &session);
        assert!(get(&claims, token).is_in_doubt());
        claims.settled(token, &session);
        assert!(!get(&claims, token).is_in_doubt());
    }

    #[tokio::test(start_paused = true)]
    async fn a_refused_claim_is_forgotten_and_one_in_doubt_is_removed_first() {
        let (claims, session) = (Claims::default(), session(1));
        let [settled, doubtful] = [(); 2].map(|()| begin(&claims, &session, SECOND * 60));
        claims.settled(settled, &session);
        assert!(woken(&claims).await);
        claims.refused(settled);
        claims.refused(doubtful);
        assert!(claims.get(settled).is_none());
        assert!(woken(&claims).await);
        assert_eq!(due(&claims), [doubtful]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_session_is_used_by_the_claims_on_it_and_by_those_in_doubt_on_it() {
        let (claims, [first, second]) = (Claims::default(), [1, 2].map(session));
        let used = || [1, 2, 3].map(|it| claims.use_session(it));
        let token = begin(&claims, &first, SECOND * 60);
        claims.settled(token, &first);
        assert_eq!(used(), [true, false, false]);
        claims.doubt(token, &first);
        claims.moved(token, &second, 9);
        assert_eq!(used(), [true, true, false]);
        claims.settled(token, &first);
        assert_eq!(used(), [false, true, false]);
        claims.forget(token);
        assert_eq!(used(), [false, false, false]);
    }

    #[tokio::test(start_paused = true)]
    async fn the_next_request_is_made_of_what_was_written_last() {
        let (claims, session) = (Claims::default(), session(1));
        let token = begin(&claims, &session, SECOND);
        claims.moved(token, &session, 9);
        assert_eq!(get(&claims, token).written, 9);
        claims.written(token, 12);
        claims.recorded(token, "longer".to_owned(), SECOND * 8);
        let Claimed { written, record, ttl, .. } = get(&claims, token);
        assert_eq!((written, &*record, ttl), (12, "longer", SECOND * 8));
    }

    #[tokio::test(start_paused = true)]
    async fn a_key_that_stays_for_its_minimum_time_is_removed_after_it() {
        let (claims, session) = (Claims::default(), session(1));
        let token = begin(&claims, &session, SECOND * 60);
        assert!(woken(&claims).await);
        claims.leave(token, 77, Instant::now() + SECOND * 3);
        assert!(woken(&claims).await);
        let Claimed { left_to, path, .. } = get(&claims, token);
        assert_eq!(left_to, Some(77));
        claims.forget(token);
        advance_almost(SECOND * 3).await;
        let Due { left, next, .. } = claims.take_due();
        assert!(left.is_empty());
        assert_eq!(next, Some(Instant::now() + INSTANT));
        advance(INSTANT).await;
        let left = claims.take_due().left;
        assert_eq!(left.iter().map(|it| (&*it.path, it.lease)).collect::<Vec<_>>(), [(&*path, 77)]);
    }
}
