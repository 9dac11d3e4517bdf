//! Releases: of a lease of this process, of a place in the queue, and of another process's lease by an operator.

use std::{sync::Arc, time::Duration};

use lockkit::{
    Key,
    store::{Answer, Token},
};
use tokio::time::Instant;
use zookeeper_client::Error as Zk;

use crate::{
    child::Child,
    claim::expire,
    claimed::{Held, Phase},
    error::{Failure, Foreign, is_silence},
    look::First,
    note::{Content, Note},
    remove::{delete, is_refused, note_version},
    session::{Session, Shared},
};

impl Shared {
    pub(crate) async fn release(
        self: Arc<Self>,
        key: Key,
        token: Token,
        min_hold: Duration,
    ) -> Result<Answer, Failure> {
        let Some(turn) = self.claims().turn(token) else {
            return self.take_away(&key, token).await;
        };
        let _turn = turn.lock_owned().await;
        let Some((number, is_held)) = self.claims().get(token).filter(|it| it.key == key).map(|claim| {
            let is_held = matches!(&claim.phase, Phase::Held(held) if held.until > Instant::now());
            (claim.session, is_held)
        }) else {
            return Ok(Answer::Gone);
        };
        let Some(session) = self.session_of(number) else { return Ok(Answer::Gone) };
        if !is_held {
            let is_waiting = self.claims().get(token).is_some_and(|it| matches!(it.phase, Phase::Waiting(_)));
            if is_waiting {
                self.give_up(&session, token).await;
            }
            return Ok(Answer::Gone);
        }
        let Some((dir, held, _)) = self.claims().end(token, false) else { return Ok(Answer::Gone) };
        let until = held.granted + min_hold;
        if until > Instant::now() {
            return self.keep_taken(number, token, &dir, held, until).await;
        }
        let removed = self.remove(number, token, &dir, &held.place, held.replaced_by(&Note::Free)).await;
        self.claims().remove(token);
        Ok(if removed? { Answer::Done } else { Answer::Gone })
    }

    /// Leaves the child where it is until then, without a holder.
    async fn keep_taken(
        self: &Arc<Self>,
        number: u64,
        token: Token,
        dir: &str,
        held: Held,
        until: Instant,
    ) -> Result<Answer, Failure> {
        let nobody = Token::nobody();
        let ttl = until.saturating_duration_since(Instant::now());
        let child = Child { token: nobody, ttl, holder: String::new() };
        let path = format!("{dir}/{}", held.place.name);
        let mut held = held;
        loop {
            let Some(session) = self.session_of(number) else {
                return Err(Failure::Silence("the session has ended".to_owned()));
            };
            let mut both = session.client.new_multi_writer();
            both.add_set_data(&path, &child.encode(), None)?;
            if let Some((note, version)) = held.replaced_by(&Note::Free) {
                both.add_set_data(dir, &note.encode(), Some(version))?;
            }
            match both.commit().await.map_err(Zk::from) {
                Ok(_) => {
                    held.note = held.note.map(|it| it.wrapping_add(1));
                    break;
                }
                Err(Zk::NoNode) => {
                    self.claims().remove(token);
                    return Ok(Answer::Gone);
                }
                Err(Zk::BadVersion) if held.note.is_some() => match note_version(&session, dir).await {
                    Err(err) if !is_silence(&err) => return Err(err.into()),
                    Err(_) => {}
                    Ok(version) => {
                        held.note = version;
                        continue;
                    }
                },
                Err(err) if held.note.is_some() && is_refused(&err) => {
                    held.note = None;
                    continue;
                }
                Err(err) if is_silence(&err) && until > Instant::now() => {}
                Err(err) => {
                    drop(self.remove(number, token, dir, &held.place, held.replaced_by(&Note::Free)).await);
                    self.claims().remove(token);
                    return Err(err.into());
                }
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        self.claims().keep_for_nobody(token, nobody, until, ttl, held);
        let expiring = self.runtime.spawn(expire(Arc::downgrade(self), number, nobody));
        self.claims().set_task(nobody, &expiring);
        Ok(Answer::Done)
    }

    /// Frees what another process holds with this token.
    async fn take_away(self: &Arc<Self>, key: &Key, token: Token) -> Result<Answer, Failure> {
        let session = self.session().await;
        let dir = self.dir(key);
        let mut is_repeated = false;
        loop {
            let Some(first) = self.first(&session, &dir).await? else {
                return Ok(if is_repeated { Answer::Done } else { Answer::Gone });
            };
            if first.token != token {
                return Ok(if is_repeated { Answer::Done } else { Answer::Gone });
            }
            let note = self.check_lock(&session, &dir, &first).await?.map(|version| (&Note::Free, version));
            match delete(&session, &dir, &first.place.name, note).await {
                Ok(true) => return Ok(Answer::Done),
                Ok(false) => return Ok(if is_repeated { Answer::Done } else { Answer::Gone }),
                Err(err) if is_silence(&err) && !session.client.state().is_terminated() => is_repeated = true,
                Err(err) => return Err(err.into()),
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// A failure if the node or its first child is not that of a lock. Returns the version of the node's note.
    async fn check_lock(&self, session: &Session, dir: &str, first: &First) -> Result<Option<i32>, Failure> {
        if first.is_persistent() {
            let path = format!("{dir}/{}", first.place.name);
            let (data, _) = session.client.get_data(&path).await?;
            return Err(Failure::Foreign(Foreign::new(path, &data)));
        }
        match session.client.get_data(dir).await {
            Ok((data, stat)) => match Content::of(&data) {
                Content::Note(_) => Ok(Some(stat.version)),
                Content::Lock => Ok(None),
                Content::Foreign => Err(Failure::Foreign(Foreign::new(dir, &data))),
            },
            Err(err) if is_refused(&err) => Ok(None),
            Err(err) => Err(err.into()),
        }
    }
}
