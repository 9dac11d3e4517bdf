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
                Err(Zk::BadVersion) if held.note.is_some() => {
                    // Without an answer, after the pause.
                    if let Ok(version) = note_version(&session, dir).await {
                        held.note = version;
                        continue;
                    }
                }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::faults::{
        Outcome::{Lost, Passes, Refused, Unanswered},
        Request::{Delete, GetData, Multi},
        SESSION, data, inside, inside_behind_proxy, own_root, take,
    };

    fn is_no_auth<T>(answer: &Result<T, Failure>) -> bool {
        matches!(answer, Err(Failure::Client(Zk::NoAuth)))
    }

    fn child_of(dir: &str, held: &Held) -> String {
        format!("{dir}/{}", held.place.name)
    }

    #[tokio::test]
    async fn a_lease_is_kept_for_its_least_time_when_answers_are_lost() {
        let (shared, proxy) = inside_behind_proxy(&own_root()).await;
        for (number, lost) in [
            &[(Multi, Lost)][..],
            &[(Multi, Unanswered)],
            // The version of the note is not known afterwards.
            &[(Multi, Unanswered), (GetData, Lost)],
        ]
        .into_iter()
        .enumerate()
        {
            let key = number.to_string();
            let (token, held) = take(&shared, &key).await;
            proxy.plan(lost);
            let answer = shared.clone().release(Key::from(&*key), token, SESSION).await;
            assert!(matches!(answer, Ok(Answer::Done)) && proxy.is_done(), "{lost:?}: {answer:?}");
            let dir = shared.dir(&key);
            let child = data(&shared, &child_of(&dir, &held)).await.and_then(|it| Child::decode(&it));
            assert!(child.is_some_and(|it| it.token.is_nobody()));
            assert_eq!(data(&shared, &dir).await, Some(Note::Free.encode()));
        }
    }

    #[tokio::test]
    async fn a_lease_whose_note_may_not_be_written_is_kept_for_its_least_time() {
        let (shared, proxy) = inside_behind_proxy(&own_root()).await;
        let (token, held) = take(&shared, "k").await;
        proxy.plan(&[(Multi, Refused)]);
        let answer = shared.clone().release(Key::from("k"), token, SESSION).await;
        assert!(matches!(answer, Ok(Answer::Done)) && proxy.is_done(), "{answer:?}");
        let child = data(&shared, &child_of(&shared.dir("k"), &held)).await.and_then(|it| Child::decode(&it));
        assert!(child.is_some_and(|it| it.token.is_nobody()));
    }

    #[tokio::test]
    async fn a_lease_whose_child_may_not_be_written_ends_at_its_release() {
        let (shared, proxy) = inside_behind_proxy(&own_root()).await;
        let (token, held) = take(&shared, "k").await;
        // With the note, and without it.
        proxy.plan(&[(Multi, Refused); 2]);
        let answer = shared.clone().release(Key::from("k"), token, SESSION).await;
        assert!(is_no_auth(&answer) && proxy.is_done(), "{answer:?}");
        assert_eq!(data(&shared, &child_of(&shared.dir("k"), &held)).await, None);
        assert!(shared.claims().get(token).is_none());
    }

    #[tokio::test]
    async fn the_lease_of_another_process_is_taken_away_when_answers_are_lost() {
        let root = own_root();
        let (holder, (shared, proxy)) = (inside(&root).await, inside_behind_proxy(&root).await);
        for lost in [Lost, Unanswered] {
            let (token, held) = take(&holder, "k").await;
            proxy.plan(&[(Multi, lost)]);
            let answer = shared.clone().release(Key::from("k"), token, Duration::ZERO).await;
            assert!(matches!(answer, Ok(Answer::Done)) && proxy.is_done(), "{lost:?}: {answer:?}");
            assert_eq!(data(&shared, &child_of(&shared.dir("k"), &held)).await, None);
        }
    }

    #[tokio::test]
    async fn the_lease_of_another_process_stays_if_its_child_may_not_be_deleted() {
        let root = own_root();
        let (holder, (shared, proxy)) = (inside(&root).await, inside_behind_proxy(&root).await);
        let (token, held) = take(&holder, "k").await;
        proxy.plan(&[(Multi, Refused), (Delete, Refused)]);
        let answer = shared.clone().release(Key::from("k"), token, Duration::ZERO).await;
        assert!(is_no_auth(&answer) && proxy.is_done(), "{answer:?}");
        assert!(data(&shared, &child_of(&shared.dir("k"), &held)).await.is_some());
    }

    #[tokio::test]
    async fn the_lease_of_another_process_is_taken_away_without_its_note_if_that_may_not_be_read() {
        let root = own_root();
        let (holder, (shared, proxy)) = (inside(&root).await, inside_behind_proxy(&root).await);
        let (token, held) = take(&holder, "k").await;
        let child = child_of(&shared.dir("k"), &held);
        // The child is read first.
        proxy.plan(&[(GetData, Passes), (GetData, Lost)]);
        let answer = shared.clone().release(Key::from("k"), token, Duration::ZERO).await;
        assert!(answer.is_err() && proxy.is_done(), "{answer:?}");
        assert!(data(&shared, &child).await.is_some(), "its note may be there");
        proxy.plan(&[(GetData, Passes), (GetData, Refused)]);
        let answer = shared.clone().release(Key::from("k"), token, Duration::ZERO).await;
        assert!(matches!(answer, Ok(Answer::Done)) && proxy.is_done(), "{answer:?}");
        assert_eq!(data(&shared, &child).await, None);
    }
}
