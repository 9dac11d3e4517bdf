//! Reads who holds leases, also those of other processes and other clients.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use lockkit::{
    Key,
    store::{LeaseInfo, LeaseRecord, Token},
};
use tokio::time::Instant;
use zookeeper_client::{Error as Zk, Stat};

use crate::{
    child::{Child, fence, foreign_token},
    claim::time,
    claimed::{Claimed, Held, Phase},
    error::Failure,
    key::unescape,
    layout::{Place, queue},
    session::{Session, Shared},
};

/// How many keys are read at once.
const BATCH: usize = 100;

/// The first child of a key, as read from the server.
pub(crate) struct First {
    pub(crate) place: Place,
    pub(crate) token: Token,
    /// What lockkit wrote into it. `None` for another client's.
    child: Option<Child>,
    stat: Stat,
}

impl Shared {
    /// The first child of the key's node.
    pub(crate) async fn first(&self, session: &Session, dir: &str) -> Result<Option<First>, Failure> {
        loop {
            let children = match session.client.list_children(dir).await {
                Err(Zk::NoNode) => return Ok(None),
                children => children?,
            };
            let Some(place) = queue(&children).into_iter().next() else { return Ok(None) };
            let path = format!("{dir}/{}", place.name);
            let read = match session.client.get_data(&path).await {
                // Its data may be read by its owner only.
                Err(Zk::NoAuth) => session.client.check_stat(&path).await.map(|it| it.map(|it| (Vec::new(), it))),
                read => read.map(Some),
            };
            match read {
                Ok(Some((data, stat))) => return Ok(Some(First::new(place, &data, stat))),
                // It was released in between, so another one is the first.
                Ok(None) | Err(Zk::NoNode) => {}
                Err(err) => return Err(err.into()),
            }
        }
    }

    pub(crate) async fn look(self: Arc<Self>, key: Key) -> Result<Option<LeaseRecord>, Failure> {
        let session = self.session().await;
        let dir = self.dir(&key);
        let children = match session.client.list_children(&dir).await {
            Err(Zk::NoNode) => return Ok(None),
            children => children?,
        };
        let Some(place) = queue(&children).into_iter().next() else { return Ok(None) };
        if let Known::Answer(record) = self.known(&key, &place) {
            return Ok(record);
        }
        let Some(first) = self.first(&session, &dir).await? else { return Ok(None) };
        // Another child may be the first by now.
        match self.known(&key, &first.place) {
            Known::Answer(record) => Ok(record),
            Known::Nothing => first.record(key, session.client.session_timeout()).map(Some),
        }
    }

    pub(crate) async fn list(self: Arc<Self>, prefix: String, limit: usize) -> Result<Vec<LeaseRecord>, Failure> {
        let session = self.session().await;
        // A follower that lags behind has to catch up with the proof before it answers the reads.
        let proof = session.prove(&self.settings.root);
        let (proof, names) = tokio::join!(proof, session.client.list_children(&self.settings.root));
        proof?;
        let names = match names {
            Err(Zk::NoNode) => return Ok(Vec::new()),
            names => names?,
        };
        let mut keys: Vec<_> =
            names.iter().filter_map(|it| unescape(it)).filter(|it| it.starts_with(&prefix)).collect();
        keys.sort_unstable();
        let mut records = Vec::new();
        for batch in keys.chunks(BATCH) {
            if records.len() >= limit {
                break;
            }
            let dirs: Vec<_> = batch.iter().map(|it| self.dir(it)).collect();
            let answers: Vec<_> = dirs.iter().map(|it| session.client.list_children(it)).collect();
            let mut firsts = Vec::new();
            for ((key, dir), answer) in batch.iter().zip(&dirs).zip(answers) {
                let children = match answer.await {
                    // It may be read by its owner only.
                    Err(Zk::NoNode | Zk::NoAuth) => continue,
                    children => children?,
                };
                if let Some(place) = queue(&children).into_iter().next() {
                    firsts.push((Key::from(key), dir, place));
                }
            }
            let answers: Vec<_> =
                firsts.iter().map(|(_, dir, it)| session.client.get_data(&format!("{dir}/{}", it.name))).collect();
            for ((key, dir, place), answer) in firsts.into_iter().zip(answers) {
                let first = match answer.await {
                    Ok((data, stat)) => Some(First::new(place, &data, stat)),
                    Err(Zk::NoNode | Zk::NoAuth) => self.first(&session, dir).await?,
                    Err(err) => return Err(err.into()),
                };
                let Some(first) = first else { continue };
                match self.known(&key, &first.place) {
                    Known::Answer(record) => records.extend(record),
                    Known::Nothing => records.push(first.record(key, session.client.session_timeout())?),
                }
            }
        }
        records.truncate(limit);
        Ok(records)
    }

    /// What this process knows of the first child of the key.
    fn known(&self, key: &Key, first: &Place) -> Known {
        let claims = self.claims();
        let Some((token, Claimed { holder, phase, .. })) = claims.with_child(key, first) else { return Known::Nothing };
        let now = Instant::now();
        Known::Answer(match phase {
            // It is free for the owner of the place, which is a request of this process.
            Phase::Claiming | Phase::Waiting(_) => None,
            Phase::Held(Held { fence, acquired_at, granted, until, ttl, renewals, .. }) => {
                let mut info = LeaseInfo::new(key.clone(), holder.to_string(), *fence, *acquired_at);
                info.held_for = now.saturating_duration_since(*granted);
                info.expires_in = until.saturating_duration_since(now);
                (info.renewals, info.ttl) = (*renewals, Some(*ttl));
                Some(LeaseRecord::new(token, info))
            }
            // It is free in a moment. Its record has the fence.
            Phase::Ending(_) => return Known::Nothing,
        })
    }
}

/// What this process knows of a child.
enum Known {
    /// It is one of its own.
    Answer(Option<LeaseRecord>),
    Nothing,
}

impl First {
    fn new(place: Place, data: &[u8], stat: Stat) -> Self {
        let child = Child::decode(data);
        let token = child.as_ref().map_or_else(|| foreign_token(&place, &stat), |it| it.token);
        Self { place, token, child, stat }
    }

    /// Whether it outlives every session, so that it is no claim.
    pub(crate) fn is_persistent(&self) -> bool {
        self.stat.ephemeral_owner == 0
    }

    /// The description of another process's lease. How often it was renewed is not known, and neither is its expiry:
    /// its holder writes nothing when it renews, unless the ttl changes.
    fn record(self, key: Key, session_timeout: Duration) -> Result<LeaseRecord, Failure> {
        let Self { place: _, token, child, stat } = self;
        let (holder, ttl) = match child {
            Some(Child { holder, ttl, .. }) => (holder, Some(ttl)),
            None => (format!("another client, session {:#x}", stat.ephemeral_owner), None),
        };
        let acquired_at = time(stat.ctime);
        let mut info = LeaseInfo::new(key, holder, fence(stat.czxid)?, acquired_at);
        info.held_for = SystemTime::now().duration_since(acquired_at).unwrap_or_default();
        (info.expires_in, info.ttl) = (ttl.unwrap_or(session_timeout), ttl);
        Ok(LeaseRecord::new(token, info))
    }
}
