//! Deletes the children of claims that have ended, whatever happens meanwhile.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use lockkit::store::Token;
use tokio::time::{Instant, sleep, sleep_until};
use zookeeper_client::Error as Zk;

use crate::{
    child::Child,
    claimed::{Phase, Waiting},
    error::{Failure, is_silence},
    layout::{Place, queue},
    note::{Content, Note},
    session::{Session, Shared, in_session, lock},
};

/// Pause before a request whose answer was lost is sent again. The client sends it when it is connected.
const PAUSE: Duration = Duration::from_millis(50);

/// A child of an earlier session that may still be there. The server deletes it with that session, which may take a
/// session timeout from the moment when the servers have a quorum again.
#[derive(Debug)]
pub(crate) struct Stray {
    pub(crate) dir: String,
    /// `None` if it is not known whether there is a child.
    pub(crate) name: Option<String>,
    pub(crate) token: Token,
    /// Its holder may trust in it until then.
    pub(crate) trusted_until: Instant,
}

impl Shared {
    /// Deletes the child, and replaces the note of this version in the same act. Returns whether the child was there.
    /// Repeats the request until it is answered or the session has ended; then the next session deletes the child.
    pub(crate) async fn remove(
        self: &Arc<Self>,
        number: u64,
        token: Token,
        dir: &str,
        child: &Place,
        note: Option<(&Note, i32)>,
    ) -> Result<bool, Failure> {
        loop {
            let Some(session) = self.session_of(number) else {
                self.leave(dir, Some(child), token);
                return Err(Failure::Silence("the session has ended".to_owned()));
            };
            match delete(&session, dir, &child.name, note).await {
                Ok(was_there) => return Ok(was_there),
                Err(err) if is_silence(&err) => sleep(PAUSE).await,
                Err(err) => return Err(err.into()),
            }
        }
    }

    /// Ends a claim whose caller is gone: deletes its child. The caller has the claim's turn.
    pub(crate) async fn give_up(self: &Arc<Self>, session: &Session, token: Token) {
        let Some(claimed) = self.claims().remove(token) else { return };
        match claimed.phase {
            // The answer of its creation may be lost.
            Phase::Claiming => {
                self.runtime.spawn(find_and_remove(Arc::downgrade(self), session.number, claimed.dir, token));
            }
            Phase::Waiting(Waiting { place, .. }) => {
                drop(self.remove(claimed.session, token, &claimed.dir, &place, None).await);
            }
            Phase::Held(held) | Phase::Ending(held) => {
                let note = held.replaced_by(&Note::Free);
                drop(self.remove(claimed.session, token, &claimed.dir, &held.place, note).await);
            }
        }
    }

    /// Leaves the child to the next session. It may be there already.
    pub(crate) fn leave(self: &Arc<Self>, dir: &str, child: Option<&Place>, token: Token) {
        let name = child.map(|it| it.name.clone());
        lock(&self.strays).push(Stray { dir: dir.to_owned(), name, token, trusted_until: Instant::now() });
        self.remove_strays();
    }

    /// Deletes the children that earlier sessions have left.
    pub(crate) fn remove_strays(self: &Arc<Self>) {
        let Some(session) = self.current() else { return };
        for Stray { dir, name, token, trusted_until } in std::mem::take(&mut *lock(&self.strays)) {
            let shared = Arc::downgrade(self);
            let number = session.number;
            self.runtime.spawn(async move {
                sleep_until(trusted_until).await;
                let Some(name) = name else { return find_and_remove(shared, number, dir, token).await };
                let (Some(shared), Some(child)) = (shared.upgrade(), Place::of(&name)) else { return };
                // If this session has ended, too, the child is left to the next one.
                drop(shared.remove(number, token, &dir, &child, None).await);
            });
        }
    }
}

/// Deletes the child with this token, if there is one.
async fn find_and_remove(shared: Weak<Shared>, number: u64, dir: String, token: Token) {
    loop {
        let Some((shared, session)) = in_session(&shared, number) else {
            if let Some(shared) = shared.upgrade() {
                shared.leave(&dir, None, token);
            }
            return;
        };
        // The proof comes after every request of an earlier connection, so the list has what that one created.
        let proof = session.prove(&shared.settings.root);
        let (proof, children) = tokio::join!(proof, session.client.list_children(&dir));
        let found = match proof.and(children) {
            Ok(children) => queue(&children).into_iter().find(|it| it.token() == Some(token)),
            Err(err) if is_silence(&err) => {
                drop((shared, session));
                sleep(PAUSE).await;
                continue;
            }
            Err(_) => None,
        };
        if let Some(child) = found
            && is_of(&session, &dir, &child, token).await
        {
            drop(shared.remove(number, token, &dir, &child, None).await);
        }
        return;
    }
}

/// Whether the child still is that of this token. After a release, it may stay for the least holding time with
/// another one.
async fn is_of(session: &Session, dir: &str, child: &Place, token: Token) -> bool {
    match session.client.get_data(&format!("{dir}/{}", child.name)).await {
        Ok((data, _)) => Child::decode(&data).is_none_or(|it| it.token == token),
        Err(_) => true,
    }
}

/// Deletes the child, and replaces the note of this version in the same act. If the note cannot be replaced, only
/// deletes the child. `false` if it was not there.
pub(crate) async fn delete(session: &Session, dir: &str, name: &str, note: Option<(&Note, i32)>) -> Result<bool, Zk> {
    let path = format!("{dir}/{name}");
    let mut note = note;
    loop {
        let deleted = match note {
            Some((note, version)) => {
                let mut both = session.client.new_multi_writer();
                both.add_delete(&path, None)?;
                both.add_set_data(dir, &note.encode(), Some(version))?;
                both.commit().await.map(drop).map_err(Zk::from)
            }
            None => session.client.delete(&path, None).await,
        };
        match (deleted, note) {
            (Ok(()), _) => return Ok(true),
            (Err(Zk::NoNode), _) => return Ok(false),
            (Err(Zk::BadVersion), Some((text, _))) => {
                note = note_version(session, dir).await?.map(|version| (text, version));
            }
            (Err(err), Some(_)) if is_refused(&err) => note = None,
            (Err(err), _) => return Err(err),
        }
    }
}

/// The version of the note in this node. `None` if it has none that can be replaced: another owner may have written
/// the node meanwhile.
pub(crate) async fn note_version(session: &Session, dir: &str) -> Result<Option<i32>, Zk> {
    match session.client.get_data(dir).await {
        Ok((data, stat)) => Ok(matches!(Content::of(&data), Content::Note(_)).then_some(stat.version)),
        Err(err) if is_silence(&err) => Err(err),
        Err(_) => Ok(None),
    }
}

/// Whether the server refused to write a node that exists, for example for want of rights or for a quota.
pub(crate) fn is_refused(err: &Zk) -> bool {
    !is_silence(err) && *err != Zk::NoNode
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        claimed::UNKNOWN,
        faults::{
            Outcome::{Lost, Refused},
            Request::{Delete, GetData, List, Multi},
            SESSION, child, data, inside, inside_behind_proxy, is_deleted, own_root, session, take,
        },
    };

    const FREE: Note = Note::Free;

    #[test]
    fn a_server_refuses_with_an_answer_about_a_node_that_exists() {
        for refused in [Zk::NoAuth, Zk::QuotaExceeded, Zk::BadVersion] {
            assert!(is_refused(&refused), "{refused}");
        }
        for other in [Zk::NoNode, Zk::ConnectionLoss, Zk::SessionExpired, Zk::Timeout] {
            assert!(!is_refused(&other), "{other}");
        }
    }

    #[tokio::test]
    async fn a_child_that_may_not_be_deleted_is_an_error_and_not_tried_again() {
        let (shared, proxy) = inside_behind_proxy(&own_root()).await;
        let (token, held) = take(&shared, "k").await;
        proxy.plan(&[(Delete, Refused)]);
        let removed = shared.remove(0, token, &shared.dir("k"), &held.place, None).await;
        assert!(matches!(removed, Err(Failure::Client(Zk::NoAuth))), "{removed:?}");
    }

    #[tokio::test]
    async fn a_child_of_a_session_that_has_ended_is_deleted_by_the_next_one() {
        let shared = inside(&own_root()).await;
        let (dir, token) = (shared.dir("k"), Token::random());
        let place = child(&shared, &dir, token, b"").await;
        let earlier = session(&shared).number + 1;
        assert!(shared.remove(earlier, token, &dir, &place, None).await.is_err());
        is_deleted(&shared, &format!("{dir}/{}", place.name)).await;
    }

    #[tokio::test]
    async fn a_child_is_found_by_its_token_when_answers_are_lost() {
        let (shared, proxy) = inside_behind_proxy(&own_root()).await;
        let (dir, token) = (shared.dir("k"), Token::random());
        let find = || find_and_remove(Arc::downgrade(&shared), 0, dir.clone(), token);
        // There is no node.
        find().await;
        let path = format!("{dir}/{}", child(&shared, &dir, token, b"").await.name);
        proxy.plan(&[(List, Lost)]);
        find().await;
        assert!(data(&shared, &path).await.is_none() && proxy.is_done());
    }

    #[tokio::test]
    async fn a_child_that_another_token_keeps_is_left() {
        let shared = inside(&own_root()).await;
        let (dir, token) = (shared.dir("k"), Token::random());
        let kept = Child { token: Token::nobody(), ttl: SESSION, holder: String::new() };
        let path = format!("{dir}/{}", child(&shared, &dir, token, &kept.encode()).await.name);
        find_and_remove(Arc::downgrade(&shared), 0, dir, token).await;
        assert!(data(&shared, &path).await.is_some());
    }

    #[tokio::test]
    async fn a_child_is_deleted_without_its_note_only_if_the_server_refuses_to_write_that() {
        let (shared, proxy) = inside_behind_proxy(&own_root()).await;
        let (session, dir) = (session(&shared), shared.dir("k"));
        let (_, held) = take(&shared, "k").await;
        let note = held.replaced_by(&FREE);
        proxy.plan(&[(Multi, Lost)]);
        assert_eq!(delete(&session, &dir, &held.place.name, note).await, Err(Zk::ConnectionLoss));
        proxy.plan(&[(Multi, Refused)]);
        assert_eq!(delete(&session, &dir, &held.place.name, note).await, Ok(true));
        let left = data(&shared, &dir).await.and_then(|it| Note::decode(&it));
        assert!(matches!(left, Some(Note::Held(_))), "{left:?}");
        assert_eq!(delete(&session, &dir, &held.place.name, note).await, Ok(false));
    }

    #[tokio::test]
    async fn data_of_another_owner_are_left_when_the_version_of_the_note_is_not_known() {
        let shared = inside(&own_root()).await;
        let session = session(&shared);
        for version in 0..4 {
            let dir = shared.dir(&version.to_string());
            let place = child(&shared, &dir, Token::random(), b"{}").await;
            for before in 0..version {
                session.client.set_data(&dir, b"{}", Some(before)).await.expect("it is written");
            }
            assert_eq!(delete(&session, &dir, &place.name, Some((&FREE, UNKNOWN))).await, Ok(true));
            assert_eq!(data(&shared, &dir).await.as_deref(), Some(&b"{}"[..]), "version {version}");
        }
    }

    #[tokio::test]
    async fn the_version_of_a_note_is_not_known_without_an_answer() {
        let (shared, proxy) = inside_behind_proxy(&own_root()).await;
        let (session, dir) = (session(&shared), shared.dir("k"));
        let (_, held) = take(&shared, "k").await;
        assert_eq!(note_version(&session, &dir).await, Ok(held.note));
        proxy.plan(&[(GetData, Refused), (GetData, Lost)]);
        assert_eq!(note_version(&session, &dir).await, Ok(None));
        assert_eq!(note_version(&session, &dir).await, Err(Zk::ConnectionLoss));
    }
}
