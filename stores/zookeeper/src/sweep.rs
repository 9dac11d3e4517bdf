//! Deletes the nodes of keys that were not used for long.

use std::{sync::Arc, time::Duration};

use zookeeper_client::{CreateMode, Error as Zk, Stat};

use crate::{
    error::Failure,
    key::unescape,
    note::{Content, Note},
    session::{Session, Shared},
};

/// How many keys are read at once.
const BATCH: usize = 100;

/// The start of the name of a node that is not that of a key. Its creation has the server's time.
const CLOCK: &str = "%clock-";

impl Shared {
    /// Deletes nodes of keys without children that were last written that long ago. Leaves the nodes that have no note
    /// of lockkit: they belong to others.
    pub(crate) async fn sweep(self: Arc<Self>, retention: Duration, limit: u64) -> Result<u64, Failure> {
        let session = self.session().await;
        let retention = i64::try_from(retention.as_millis()).unwrap_or(i64::MAX);
        let until = self.server_time(&session).await?.saturating_sub(retention);
        let names = session.client.list_children(&self.settings.root).await?;
        let dirs: Vec<_> = names.iter().filter_map(|it| unescape(it)).map(|it| self.dir(&it)).collect();
        let mut deleted = 0;
        for batch in dirs.chunks(BATCH) {
            let answers: Vec<_> = batch.iter().map(|it| session.client.get_data(it)).collect();
            for (dir, answer) in batch.iter().zip(answers) {
                let (data, stat) = match answer.await {
                    // The node of another owner, who alone may read it.
                    Err(Zk::NoNode | Zk::NoAuth) => continue,
                    read => read?,
                };
                if deleted < limit && stat.num_children == 0 && stat.mtime < until {
                    deleted += u64::from(forget(&session, dir, &data, &stat).await?);
                }
            }
            if deleted == limit {
                break;
            }
        }
        Ok(deleted)
    }

    /// The time of the server's clock, in milliseconds.
    async fn server_time(&self, session: &Session) -> Result<i64, Failure> {
        let path = format!("{}/{CLOCK}", self.settings.root);
        let options = |mode: CreateMode| mode.with_acls(self.settings.acls);
        loop {
            match session.client.create(&path, b"", &options(CreateMode::EphemeralSequential)).await {
                Err(Zk::NoNode) => {
                    session.client.mkdir(&self.settings.root, &options(CreateMode::Persistent)).await?;
                }
                created => {
                    let (stat, number) = created?;
                    // If it cannot be deleted, it ends with the session.
                    drop(session.client.delete(&format!("{path}{number}"), None).await);
                    return Ok(stat.ctime);
                }
            }
        }
    }
}

/// Deletes the node of a key, unless it was used in between.
async fn forget(session: &Session, dir: &str, data: &[u8], stat: &Stat) -> Result<bool, Failure> {
    let Content::Note(note) = Content::of(data) else { return Ok(false) };
    let done = match note {
        // Its holder's session has ended at an unknown time. The note is written again, so that the key is kept for
        // the retention from now.
        Note::Held(last) => {
            let note = Note::Expired(last).encode();
            match session.client.set_data(dir, &note, Some(stat.version)).await {
                // One that may not be written does not end the sweep of the others.
                Err(Zk::NoAuth) => Ok(false),
                written => written.map(|_| false),
            }
        }
        Note::Free | Note::Expired(_) => session.client.delete(dir, Some(stat.version)).await.map(|()| true),
    };
    match done {
        Ok(deleted) => Ok(deleted),
        Err(Zk::NoNode | Zk::NotEmpty | Zk::BadVersion) => Ok(false),
        Err(err) => Err(err.into()),
    }
}

#[cfg(test)]
mod tests {
    use zookeeper_client::Acls;

    use super::*;
    use crate::faults::{inside, own_root, session};

    #[tokio::test]
    async fn a_sweep_reads_all_keys_or_ends_at_its_limit() {
        let shared = inside(&own_root()).await;
        let client = &session(&shared).client;
        let persistent = CreateMode::Persistent.with_acls(Acls::anyone_all());
        let keys = BATCH * 2 + 1;
        let nodes: Vec<_> = (0..keys).map(|it| shared.dir(&it.to_string())).collect();
        let creating: Vec<_> =
            nodes.iter().map(|it| async { client.create(it, &Note::Free.encode(), &persistent).await }).collect();
        for created in creating {
            created.await.expect("a node");
        }
        // Those of the last moment are kept.
        tokio::time::sleep(Duration::from_millis(10)).await;
        let left = keys as u64 - 1;
        assert_eq!(shared.clone().sweep(Duration::ZERO, 1).await.expect("an answer"), 1);
        assert_eq!(shared.clone().sweep(Duration::ZERO, left + 1).await.expect("an answer"), left);
    }
}
