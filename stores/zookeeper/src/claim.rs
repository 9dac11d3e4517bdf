//! Claims: create a child, and see whether it is the first.

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use lockkit::store::{Acquired, Claim, Grant, Previous, Token};
use tokio::{
    sync::{oneshot, watch},
    task::yield_now,
    time::{Instant, sleep_until},
};
use zookeeper_client::{CreateMode, Error as Zk, Stat};

use crate::{
    child::{Child, SPARE_FENCES, fence},
    claimed::{Held, Phase, UNKNOWN, Waiting},
    error::{Failure, Foreign},
    layout::{Place, queue},
    note::{Content, Last, Note},
    pulse::Stopped,
    session::{Session, Shared, in_session},
    wake::keep_place,
};

/// How often a claim begins anew because the node of its key or its place was deleted meanwhile.
const TRIES: u32 = 5;

/// More often than the session's task needs to be polled to send a request.
const YIELDS: u32 = 4;

/// The largest number of a child. The server counts with 32 bits.
const LAST_NUMBER: u64 = i32::MAX as u64 - 1;

/// What a claim sees of its key.
struct View {
    children: Vec<String>,
    /// The note in the key's node. `None` if another client created the node.
    note: Option<Note>,
    stat: Stat,
}

impl View {
    /// A failure if the node is no lock.
    fn new(dir: &str, children: Vec<String>, (data, stat): (Vec<u8>, Stat)) -> Result<Self, Failure> {
        let note = match Content::of(&data) {
            Content::Note(note) => Some(note),
            Content::Lock => None,
            Content::Foreign => return Err(Failure::Foreign(Foreign::new(dir, &data))),
        };
        Ok(Self { children, note, stat })
    }
}

impl Shared {
    /// Answers the claim. If the caller is gone, gives up what the claim got.
    pub(crate) async fn acquire(self: Arc<Self>, claim: Claim, mut answer: oneshot::Sender<Result<Acquired, Failure>>) {
        let session = tokio::select! {
            session = self.session() => session,
            () = answer.closed() => return,
        };
        let dir = self.dir(&claim.key);
        let _turn = loop {
            let turn = self.claims().turn_of(&claim, &dir, session.number);
            let held = turn.clone().lock_owned().await;
            if self.claims().is_turn_of(claim.token, &turn) {
                break held;
            }
            if answer.is_closed() {
                return;
            }
        };
        let before = self.claims().held_fence(claim.token);
        let answered = self.claim(&session, &claim, &dir).await;
        let now = self.claims().held_fence(claim.token);
        // An earlier call got it. It stays held even if this call failed, or its caller is gone.
        let is_kept = now.is_some() && now == before;
        let is_due = match &answered {
            Ok(Acquired::Granted(_)) => true,
            Ok(Acquired::Held { .. }) => claim.queue,
            Err(_) => false,
        };
        if !is_due && !is_kept {
            // Neither granted nor queued: nothing may be left behind.
            self.give_up(&session, claim.token).await;
        }
        if answer.send(answered).is_err() && !is_kept {
            self.give_up(&session, claim.token).await;
        }
    }

    async fn claim(self: &Arc<Self>, session: &Arc<Session>, claim: &Claim, dir: &str) -> Result<Acquired, Failure> {
        let token = claim.token;
        for _ in 0..TRIES {
            let sent = Instant::now();
            if let Some(Stopped { lasted, left }) = session.pulse().stopped(sent) {
                let reason =
                    format!("the process did not run for {lasted:?}, so its session may end for {left:?} more");
                return Err(Failure::Silence(reason));
            }
            let phase = self.claims().get(token).filter(|it| it.session == session.number).map(|it| it.phase.clone());
            let (waiting, view) = match phase {
                Some(Phase::Claiming) => match self.create(session, claim, dir).await? {
                    Some(created) => created,
                    None => continue,
                },
                Some(Phase::Waiting(waiting)) => match self.view(session, dir).await {
                    // Another client has deleted the key.
                    Err(Failure::Client(Zk::NoNode)) => {
                        self.claims().set(token, Phase::Claiming);
                        continue;
                    }
                    view => (waiting, view?),
                },
                Some(Phase::Held(held)) => {
                    if let Some(grant) = self.hold_on(session, claim, dir, &held).await? {
                        return Ok(Acquired::Granted(grant));
                    }
                    self.claims().set(token, Phase::Claiming);
                    continue;
                }
                Some(Phase::Ending(_)) | None => return Err(Failure::Silence("the session has ended".to_owned())),
            };
            let queue = queue(&view.children);
            if !queue.contains(&waiting.place) {
                // Another client has deleted the child.
                self.claims().set(token, Phase::Claiming);
                continue;
            }
            if queue.first() == Some(&waiting.place) {
                let grant = self.grant(session, claim, dir, waiting, view, sent)?;
                // Lets the session, which runs on this thread, send the note before the caller can die of what it does
                // with the lease.
                for _ in 0..YIELDS {
                    yield_now().await;
                }
                return Ok(Acquired::Granted(grant));
            }
            waiting.called.send_replace(false);
            return Ok(Acquired::Held { free_in: None });
        }
        Err(Failure::Client(Zk::NoNode))
    }

    /// Creates the child of the claim. `None` if the node of the key had to be created first.
    async fn create(
        self: &Arc<Self>,
        session: &Arc<Session>,
        claim: &Claim,
        dir: &str,
    ) -> Result<Option<(Waiting, View)>, Failure> {
        let Claim { token, holder, ttl, .. } = claim;
        let prefix = format!("{dir}/{}", self.settings.layout.prefix(*token));
        let child = Child { token: *token, ttl: *ttl, holder: holder.to_string() };
        let options = CreateMode::EphemeralSequential.with_acls(self.settings.acls);
        // Sent together. A session's requests are answered in their order, so the list has the new child.
        let created = session.client.create(&prefix, &child.encode(), &options);
        let (children, data) = (session.client.list_children(dir), session.client.get_data(dir));
        let (created, children, data) = tokio::join!(created, children, data);
        let (stat, number) = match created {
            Ok(created) => created,
            Err(Zk::NoNode) => {
                self.create_dir(session, dir).await?;
                return Ok(None);
            }
            Err(err) => return Err(err.into()),
        };
        let waiting = Waiting {
            place: Place {
                name: format!("{}{number}", self.settings.layout.prefix(*token)),
                number: u64::try_from(number.into_i64()).unwrap_or(u64::MAX),
            },
            fence: fence(stat.czxid)?,
            ctime: stat.ctime,
            created: Instant::now(),
            ttl: *ttl,
            called: watch::Sender::new(false),
        };
        let is_countable = waiting.place.number < LAST_NUMBER;
        if !self.claims().set(*token, Phase::Waiting(waiting.clone())) {
            self.leave(dir, Some(&waiting.place), *token);
            return Err(Failure::Silence("the session has ended".to_owned()));
        }
        if !is_countable {
            return Err(Failure::NoNumber);
        }
        let view = View::new(dir, children?, data?)?;
        if claim.queue {
            let keeping = self.runtime.spawn(keep_place(Arc::downgrade(self), session.number, *token));
            self.claims().set_task(*token, &keeping);
        }
        Ok(Some((waiting, view)))
    }

    /// Creates the node of the key, and those above it. Its data say that it is one of lockkit.
    async fn create_dir(&self, session: &Session, dir: &str) -> Result<(), Failure> {
        let options = CreateMode::Persistent.with_acls(self.settings.acls);
        loop {
            match session.client.create(dir, &Note::Free.encode(), &options).await {
                Ok(_) | Err(Zk::NodeExists) => return Ok(()),
                Err(Zk::NoNode) => session.client.mkdir(&self.settings.root, &options).await?,
                Err(err) => return Err(err.into()),
            }
        }
    }

    /// What the claim sees of its key now, proven by a write.
    async fn view(&self, session: &Session, dir: &str) -> Result<View, Failure> {
        let proof = session.prove(&self.settings.root);
        let (children, data) = (session.client.list_children(dir), session.client.get_data(dir));
        let (proof, children, data) = tokio::join!(proof, children, data);
        proof?;
        View::new(dir, children?, data?)
    }

    /// Grants again what the claim holds. `None` if it does not hold it any more.
    async fn hold_on(
        &self,
        session: &Session,
        claim: &Claim,
        dir: &str,
        held: &Held,
    ) -> Result<Option<Grant>, Failure> {
        // From now, so that the timer does not end it meanwhile.
        if self.claims().prolong(claim.token, claim.ttl).is_none() {
            return Ok(None);
        }
        let proof = session.prove(&self.settings.root);
        let there = session.client.check_stat(&format!("{dir}/{}", held.place.name));
        let (proof, there) = tokio::join!(proof, there);
        proof?;
        if there?.is_none() {
            return Ok(None);
        }
        self.claims().count_renewal(claim.token);
        Ok(Some(grant(held.fence, None, session)))
    }

    /// The claim is the first.
    fn grant(
        self: &Arc<Self>,
        session: &Arc<Session>,
        claim: &Claim,
        dir: &str,
        waiting: Waiting,
        view: View,
        sent: Instant,
    ) -> Result<Grant, Failure> {
        let Waiting { place, fence, ctime, created, ttl: shown_ttl, called } = waiting;
        let View { children: _, note, stat } = view;
        let waited = i64::try_from(created.elapsed().as_millis()).unwrap_or(i64::MAX);
        let server_time = ctime.saturating_add(waited);
        let held = Held {
            place,
            fence,
            acquired_at: time(server_time),
            granted: sent,
            until: sent + claim.ttl,
            ttl: claim.ttl,
            shown_ttl,
            renewals: 0,
            note: note.as_ref().map(|_| UNKNOWN),
        };
        if !self.claims().set(claim.token, Phase::Held(held)) {
            return Err(Failure::Silence("the session has ended".to_owned()));
        }
        called.send_replace(true);
        if note.is_some() {
            let last = Last { token: claim.token, fence, holder: claim.holder.to_string() };
            let (shared, session) = (self.clone(), session.clone());
            let (dir, token) = (dir.to_owned(), claim.token);
            // Not waited for, because it is for the next holder. A stale one has the wrong version.
            self.runtime.spawn(async move {
                let written = session.client.set_data(&dir, &Note::Held(last).encode(), Some(stat.version)).await;
                if let Ok(stat) = written {
                    shared.claims().noted(token, stat.version);
                }
            });
        }
        let expiring = self.runtime.spawn(expire(Arc::downgrade(self), session.number, claim.token));
        self.claims().set_task(claim.token, &expiring);
        let previous = note.and_then(|it| it.previous(stat.mtime, server_time));
        Ok(grant(fence, previous, session))
    }
}

fn grant(fence: lockkit::Fence, previous: Option<Previous>, session: &Session) -> Grant {
    let mut grant = Grant::from(fence).after(previous);
    (grant.spare_fences, grant.ttl) = (SPARE_FENCES, Some(session.trusted));
    grant
}

/// Ends the lease at its ttl unless it is renewed. The server would only do so with the session.
pub(crate) async fn expire(shared: std::sync::Weak<Shared>, number: u64, token: Token) {
    loop {
        let Some(until) = shared.upgrade().and_then(|it| it.claims().until(token, number)) else { return };
        sleep_until(until).await;
        let Some((shared, _)) = in_session(&shared, number) else { return };
        let Some((dir, held, last)) = shared.claims().end(token, true) else { continue };
        let note = if token.is_nobody() { Note::Free } else { Note::Expired(last) };
        // A failure leaves a stray, which is removed later.
        drop(shared.remove(number, token, &dir, &held.place, held.replaced_by(&note)).await);
        shared.claims().remove(token);
    }
}

/// The time of the server's clock.
pub(crate) fn time(millis: i64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(u64::try_from(millis).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::faults::{Outcome, Request, claim, inside_behind_proxy, own_root};

    #[test]
    fn the_time_of_the_server_is_after_the_epoch() {
        assert_eq!(time(1_500), UNIX_EPOCH + Duration::from_millis(1_500));
        assert_eq!(time(-1), UNIX_EPOCH);
    }

    #[tokio::test]
    async fn a_key_whose_children_have_no_more_numbers_is_not_granted() {
        // The next number but one would be negative.
        let last = u32::try_from(i32::MAX).expect("it is positive") - 1;
        for (number, is_refused) in [(last - 1, false), (last, true)] {
            let (shared, proxy) = inside_behind_proxy(&own_root()).await;
            // The first attempt creates the node of the key.
            proxy.plan(&[(Request::Create, Outcome::Passes); 2]);
            proxy.plan(&[(Request::Create, Outcome::Numbered(number))]);
            let (answering, answered) = oneshot::channel();
            shared.acquire(claim("k"), answering).await;
            let answer = answered.await.expect("an answer");
            assert_eq!(matches!(answer, Err(Failure::NoNumber)), is_refused, "{number}: {answer:?}");
        }
    }
}
