//! The claims of this process: which places they have in the queues, and until when each lease is held. Sends nothing.

use std::{collections::HashMap, sync::Arc, time::Duration};

use lockkit::{
    Fence, Key,
    store::{Claim, Token},
};
use tokio::{sync::Mutex as Turn, task::JoinHandle, time::Instant};

use crate::{
    child::Child,
    claimed::{Claimed, Held, Phase, Task, UNKNOWN, Waiting},
    layout::Place,
    note::Last,
    remove::Stray,
};

/// The claims of the current session, by their tokens.
#[derive(Debug, Default)]
pub(crate) struct Claims(HashMap<Token, Claimed>);

/// The child of a lease that is renewed.
#[derive(Debug)]
pub(crate) struct Renewed {
    pub(crate) session: u64,
    pub(crate) path: String,
    /// What the child is to show from now on, if its ttl has changed.
    pub(crate) child: Option<Child>,
}

impl Claims {
    /// The turn of the claim, which is made if it is new.
    pub(crate) fn turn_of(&mut self, claim: &Claim, dir: &str, session: u64) -> Arc<Turn<()>> {
        let new = || Claimed {
            key: claim.key.clone(),
            dir: dir.to_owned(),
            holder: claim.holder.clone(),
            session,
            turn: Arc::default(),
            phase: Phase::Claiming,
            task: None,
        };
        self.0.entry(claim.token).or_insert_with(new).turn.clone()
    }

    /// Whether the claim is still the one with this turn.
    pub(crate) fn is_turn_of(&self, token: Token, turn: &Arc<Turn<()>>) -> bool {
        self.turn(token).is_some_and(|it| Arc::ptr_eq(&it, turn))
    }

    pub(crate) fn turn(&self, token: Token) -> Option<Arc<Turn<()>>> {
        Some(self.0.get(&token)?.turn.clone())
    }

    pub(crate) fn get(&self, token: Token) -> Option<&Claimed> {
        self.0.get(&token)
    }

    /// Sets the phase. Returns `false` if the claim has ended.
    pub(crate) fn set(&mut self, token: Token, phase: Phase) -> bool {
        self.0.get_mut(&token).map(|it| it.phase = phase).is_some()
    }

    /// Replaces the task of the claim. The task before is stopped.
    pub(crate) fn set_task<T>(&mut self, token: Token, task: &JoinHandle<T>) {
        let task = Task::of(task);
        if let Some(claimed) = self.0.get_mut(&token) {
            claimed.task = Some(task);
        }
    }

    /// The note of the holder was written, with this version.
    pub(crate) fn noted(&mut self, token: Token, version: i32) {
        if let Some(Claimed { phase: Phase::Held(held), .. }) = self.0.get_mut(&token)
            && held.note == Some(UNKNOWN)
        {
            held.note = Some(version);
        }
    }

    pub(crate) fn remove(&mut self, token: Token) -> Option<Claimed> {
        self.0.remove(&token)
    }

    /// Keeps the child of a released lease until then, for the token of nobody.
    pub(crate) fn keep_for_nobody(&mut self, from: Token, nobody: Token, until: Instant, ttl: Duration, held: Held) {
        if let Some(mut claimed) = self.0.remove(&from) {
            claimed.phase = Phase::Held(Held { until, ttl, shown_ttl: ttl, renewals: 0, ..held });
            (claimed.holder, claimed.task) = ("".into(), None);
            self.0.insert(nobody, claimed);
        }
    }

    /// When the held lease is over. `None` if it is not held in this session.
    pub(crate) fn until(&self, token: Token, session: u64) -> Option<Instant> {
        match self.0.get(&token)? {
            Claimed { phase: Phase::Held(held), session: own, .. } if *own == session => Some(held.until),
            _ => None,
        }
    }

    /// The fence of the held lease.
    pub(crate) fn held_fence(&self, token: Token) -> Option<Fence> {
        match &self.0.get(&token)?.phase {
            Phase::Held(held) => Some(held.fence),
            _ => None,
        }
    }

    /// Makes a held lease live for at least this long from now, unless it is over.
    pub(crate) fn prolong(&mut self, token: Token, ttl: Duration) -> Option<Renewed> {
        let now = Instant::now();
        let claimed = self.0.get_mut(&token)?;
        let Phase::Held(held) = &mut claimed.phase else { return None };
        if held.until <= now {
            return None;
        }
        let until = now + ttl;
        if until > held.until {
            (held.until, held.ttl) = (until, ttl);
        }
        let ttl = held.ttl;
        let child = (ttl != held.shown_ttl).then(|| Child { token, ttl, holder: claimed.holder.to_string() });
        Some(Renewed { session: claimed.session, path: format!("{}/{}", claimed.dir, held.place.name), child })
    }

    pub(crate) fn count_renewal(&mut self, token: Token) {
        if let Some(Claimed { phase: Phase::Held(held), .. }) = self.0.get_mut(&token) {
            held.renewals += 1;
        }
    }

    /// Notes the ttl that the child of the held lease shows.
    pub(crate) fn shows(&mut self, token: Token, ttl: Duration) {
        if let Some(Claimed { phase: Phase::Held(held), .. }) = self.0.get_mut(&token) {
            held.shown_ttl = ttl;
        }
    }

    /// Ends a held lease. With `only_if_over`, only after its ttl. Returns what it was.
    pub(crate) fn end(&mut self, token: Token, only_if_over: bool) -> Option<(String, Held, Last)> {
        let claimed = self.0.get_mut(&token)?;
        let Phase::Held(held) = &claimed.phase else { return None };
        if only_if_over && held.until > Instant::now() {
            return None;
        }
        let held = held.clone();
        let last = Last { token, fence: held.fence, holder: claimed.holder.to_string() };
        claimed.phase = Phase::Ending(held.clone());
        Some((claimed.dir.clone(), held, last))
    }

    /// The places of the key in the queue.
    pub(crate) fn waiting<'a>(&'a self, key: &'a Key) -> impl Iterator<Item = &'a Waiting> {
        self.0.values().filter(move |it| it.key == *key).filter_map(|claim| match &claim.phase {
            Phase::Waiting(waiting) => Some(waiting),
            _ => None,
        })
    }

    /// The claim of the key with this child.
    pub(crate) fn with_child(&self, key: &str, child: &Place) -> Option<(Token, &Claimed)> {
        let is_child = |it: &Claimed| {
            *it.key == *key
                && match &it.phase {
                    Phase::Claiming => false,
                    Phase::Waiting(Waiting { place, .. })
                    | Phase::Held(Held { place, .. })
                    | Phase::Ending(Held { place, .. }) => place == child,
                }
        };
        // The name has the token, unless the key stays taken after a release.
        let by_token = child.token().and_then(|it| self.0.get_key_value(&it));
        let named = by_token.filter(|(_, it)| is_child(it));
        let found = named.or_else(|| self.0.iter().filter(|(token, _)| token.is_nobody()).find(|(_, it)| is_child(it)));
        found.map(|(token, claimed)| (*token, claimed))
    }

    /// Ends all claims, because their session has ended. Returns the children that may be left. Those of held leases
    /// are trusted for so long at most.
    pub(crate) fn end_all(&mut self, trusted: Duration) -> Vec<Stray> {
        let now = Instant::now();
        let left = |(token, claimed): (Token, Claimed)| {
            let (name, trusted_until) = match claimed.phase {
                Phase::Claiming => (None, now),
                Phase::Waiting(Waiting { place, .. }) | Phase::Ending(Held { place, .. }) => (Some(place.name), now),
                Phase::Held(Held { place, until, .. }) => (Some(place.name), until.min(now + trusted)),
            };
            Stray { dir: claimed.dir, name, token, trusted_until }
        };
        self.0.drain().map(left).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::{future::pending, time::SystemTime};

    use tokio::time::advance;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// The session of the claims.
    const SESSION: u64 = 7;

    fn claim(key: &str) -> Claim {
        Claim::new(key, Token::random(), "holder", SECOND * 20)
    }

    fn place(token: Token) -> Place {
        Place { name: format!("{}__lock__0000000001", token.to_hex()), number: 1 }
    }

    /// A lease of 20 s, of which 10 s are left.
    fn held(token: Token) -> Held {
        let now = Instant::now();
        Held {
            place: place(token),
            fence: Fence::from(256),
            acquired_at: SystemTime::UNIX_EPOCH,
            granted: now,
            until: now + SECOND * 10,
            ttl: SECOND * 20,
            shown_ttl: SECOND * 20,
            renewals: 3,
            note: None,
        }
    }

    /// A claim of the key `k` that holds it.
    fn taken(claims: &mut Claims) -> Token {
        let claim = claim("k");
        claims.turn_of(&claim, "/locks/k", SESSION);
        claims.set(claim.token, Phase::Held(held(claim.token)));
        claim.token
    }

    fn held_by(claims: &Claims, token: Token) -> &Held {
        match &claims.get(token).expect("a claim").phase {
            Phase::Held(held) => held,
            other => panic!("it is not held: {other:?}"),
        }
    }

    #[test]
    fn a_claim_that_is_made_anew_has_another_turn() {
        let (mut claims, claim) = (Claims::default(), claim("k"));
        let before = claims.turn_of(&claim, "/locks/k", SESSION);
        assert!(claims.is_turn_of(claim.token, &before));
        claims.remove(claim.token);
        assert!(!claims.is_turn_of(claim.token, &before));
        claims.turn_of(&claim, "/locks/k", SESSION);
        assert!(!claims.is_turn_of(claim.token, &before));
    }

    #[tokio::test]
    async fn the_task_of_a_claim_is_stopped_by_the_next_one_and_with_the_claim() {
        let mut claims = Claims::default();
        let token = taken(&mut claims);
        let [first, second] = [(); 2].map(|()| tokio::spawn(pending::<()>()));
        claims.set_task(token, &first);
        claims.set_task(token, &second);
        assert!(first.await.is_err_and(|it| it.is_cancelled()));
        claims.remove(token);
        assert!(second.await.is_err_and(|it| it.is_cancelled()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_is_held_in_its_session_only() {
        let mut claims = Claims::default();
        let token = taken(&mut claims);
        assert_eq!(claims.held_fence(token), Some(Fence::from(256)));
        assert_eq!(claims.until(token, SESSION), Some(Instant::now() + SECOND * 10));
        assert_eq!(claims.until(token, SESSION + 1), None);
        claims.set(token, Phase::Claiming);
        assert_eq!((claims.held_fence(token), claims.until(token, SESSION)), (None, None));
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_that_is_kept_for_nobody_shows_its_new_ttl_and_no_renewals() {
        let mut claims = Claims::default();
        let (token, nobody) = (taken(&mut claims), Token::nobody());
        let until = Instant::now() + SECOND * 5;
        claims.keep_for_nobody(token, nobody, until, SECOND * 4, held(token));
        assert!(claims.get(token).is_none());
        let held = held_by(&claims, nobody);
        assert_eq!((held.until, held.ttl, held.shown_ttl, held.renewals), (until, SECOND * 4, SECOND * 4, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_renewal_that_prolongs_nothing_changes_nothing() {
        let mut claims = Claims::default();
        let token = taken(&mut claims);
        let until = held_by(&claims, token).until;
        for ttl in [SECOND * 9, SECOND * 10] {
            assert!(claims.prolong(token, ttl).expect("it is held").child.is_none());
            assert_eq!((held_by(&claims, token).until, held_by(&claims, token).ttl), (until, SECOND * 20));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_ttl_that_is_shown_is_not_written_again() {
        let mut claims = Claims::default();
        let token = taken(&mut claims);
        let ttl = SECOND * 30;
        assert_eq!(claims.prolong(token, ttl).and_then(|it| it.child).map(|it| it.ttl), Some(ttl));
        claims.shows(token, ttl);
        assert!(claims.prolong(token, ttl).expect("it is held").child.is_none());
        assert_eq!(held_by(&claims, token).until, Instant::now() + ttl);
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_ends_at_its_ttl_and_not_before() {
        let mut claims = Claims::default();
        let token = taken(&mut claims);
        assert!(claims.end(token, true).is_none());
        advance(SECOND * 10).await;
        let (dir, _, last) = claims.end(token, true).expect("its ttl is over");
        assert_eq!((dir.as_str(), last.token, &*last.holder), ("/locks/k", token, "holder"));
        assert!(claims.end(token, false).is_none(), "it has ended before");
    }

    #[tokio::test(start_paused = true)]
    async fn a_child_is_that_of_the_claim_with_its_key_and_its_place() {
        let mut claims = Claims::default();
        let token = taken(&mut claims);
        let own = place(token);
        assert!(claims.with_child("k", &own).is_some_and(|(it, _)| it == token));
        assert!(claims.with_child("other", &own).is_none());
        assert!(claims.with_child("k", &Place { name: own.name.replace("01", "02"), number: 2 }).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_left_of_a_session_is_trusted_until_its_end_at_most() {
        let now = Instant::now();
        for (trusted, until) in [(SECOND * 5, SECOND * 5), (SECOND * 15, SECOND * 10)] {
            let mut claims = Claims::default();
            let token = taken(&mut claims);
            let [stray] = &claims.end_all(trusted)[..] else { panic!("one claim") };
            assert_eq!((stray.name.as_deref(), stray.trusted_until), (Some(&*place(token).name), now + until));
        }
    }
}
