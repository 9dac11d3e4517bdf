//! Deletes the nodes of keys that were not used for long.

use std::{sync::Arc, time::Duration};

use zookeeper_client::{CreateMode, Error as Zk, Stat};

use crate::{
    error::Failure,
    key::unescape,
    link::{Link, Shared},
    note::Note,
};

/// How many keys are asked for at once.
const BATCH: usize = 100;

/// The name of a node that is not that of a key. Writing it tells the server's time.
const CLOCK: &str = "%clock";

impl Shared {
    /// Deletes nodes of keys without children that were last written that long ago. Leaves the nodes that lockkit has
    /// not written: another client may count on them.
    pub(crate) async fn sweep(self: Arc<Self>, retention: Duration, limit: u64) -> Result<u64, Failure> {
        let link = self.link().await;
        let retention = i64::try_from(retention.as_millis()).unwrap_or(i64::MAX);
        let until = self.server_time(&link).await?.saturating_sub(retention);
        let names = link.client.list_children(&self.settings.root).await?;
        let dirs: Vec<_> = names.iter().filter_map(|it| unescape(it)).map(|it| self.dir(&it)).collect();
        let mut deleted = 0;
        for batch in dirs.chunks(BATCH) {
            let asked: Vec<_> = batch.iter().map(|it| link.client.get_data(it)).collect();
            for (dir, asked) in batch.iter().zip(asked) {
                let (data, stat) = match asked.await {
                    Err(Zk::NoNode) => continue,
                    read => read?,
                };
                if deleted < limit && stat.num_children == 0 && stat.mtime < until {
                    deleted += u64::from(forget(&link, dir, &data, &stat).await?);
                }
            }
            if deleted == limit {
                break;
            }
        }
        Ok(deleted)
    }

    /// The time of the server's clock, in milliseconds.
    async fn server_time(&self, link: &Link) -> Result<i64, Failure> {
        let path = format!("{}/{CLOCK}", self.settings.root);
        let options = CreateMode::Persistent.with_acls(self.settings.acls);
        loop {
            match link.client.set_data(&path, b"", None).await {
                Err(Zk::NoNode) => link.client.mkdir(&path, &options).await?,
                written => return Ok(written?.mtime),
            }
        }
    }
}

/// Deletes the node of a key, unless it was used in between.
async fn forget(link: &Link, dir: &str, data: &[u8], stat: &Stat) -> Result<bool, Failure> {
    let done = match Note::decode(data) {
        None => return Ok(false),
        // Its holder's session has ended at an unknown time. The note is written again, so that the key is kept for
        // the retention from now.
        Some(Note::Held(last)) => {
            let note = Note::Expired(last).encode();
            link.client.set_data(dir, &note, Some(stat.version)).await.map(|_| false)
        }
        Some(Note::Free | Note::Expired(_)) => link.client.delete(dir, Some(stat.version)).await.map(|()| true),
    };
    match done {
        Ok(deleted) => Ok(deleted),
        Err(Zk::NoNode | Zk::NotEmpty | Zk::BadVersion) => Ok(false),
        Err(err) => Err(err.into()),
    }
}
