//! A store of leases of one's own: one JSON file under a file lock, written against the public `LeaseStore` trait
//! alone. The public conformance suite says whether it is one.
//!
//! ```text
//! cargo run --example json_store                  # in a temporary file
//! cargo run --example json_store -- leases.json   # several processes may use one file
//! ```
//!
//! It is a toy: every operation reads and writes the whole file. But it keeps every promise of the trait, so waiting,
//! renewal, loss, semaphores, readers and writers come with it.

use std::{
    collections::BTreeMap,
    env,
    fs::{File, OpenOptions},
    io::{self, Read, Seek, Write},
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Result, ensure};
use lockkit::{
    Error, Fault, Fence, Key, LeaseStore, Leases,
    store::{Acquired, Answer, Claim, Grant, LeaseInfo, LeaseRecord, Previous, Renewal, Token},
    testing::{Oracle, conformance},
};
use serde::{Deserialize, Serialize};
use tokio::task::{JoinSet, spawn_blocking};

const ROUNDS: u64 = 20;

/// Leases in one file.
#[derive(Debug, Clone)]
struct JsonStore {
    path: PathBuf,
}

type Rows = BTreeMap<String, Row>;

/// One key. It stays in the file after its release, so that its fences rise. Times are in microseconds.
#[derive(Debug, Serialize, Deserialize)]
struct Row {
    token: Option<[u8; 16]>,
    holder: String,
    fence: u64,
    acquired: u64,
    expires: u64,
    renewals: u64,
}

impl Row {
    fn is_held(&self, now: u64) -> bool {
        self.token.is_some() && self.expires > now
    }

    fn is_held_by(&self, token: Token, now: u64) -> bool {
        self.token == Some(*token.as_bytes()) && self.expires > now
    }

    fn held(&self, key: &str, now: u64) -> Option<LeaseRecord> {
        let token = Token::from_bytes(self.token.filter(|_| self.is_held(now))?);
        let acquired_at = UNIX_EPOCH + Duration::from_micros(self.acquired);
        let mut info = LeaseInfo::new(key.into(), &self.holder, Fence::from(self.fence), acquired_at);
        info.held_for = Duration::from_micros(now - self.acquired.min(now));
        info.expires_in = Duration::from_micros(self.expires - now);
        info.renewals = self.renewals;
        Some(LeaseRecord::new(token, info))
    }

    /// Whom the lease is taken over from: nobody, if it was released.
    fn previous(self, now: u64) -> Option<Previous> {
        let token = Token::from_bytes(self.token?);
        let expired_for = Duration::from_micros(now - self.expires);
        let Self { holder, fence, .. } = self;
        (!token.is_nobody()).then_some(Previous::new(holder, Fence::from(fence), expired_for))
    }
}

impl JsonStore {
    /// One atomic act: with the file locked, reads it, changes the rows, and writes them back.
    async fn act<T: Send + 'static>(
        &self,
        doing: &'static str,
        act: impl FnOnce(&mut Rows, u64) -> T + Send + 'static,
    ) -> lockkit::Result<T> {
        let path = self.path.clone();
        let done = spawn_blocking(move || {
            let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
            // Held for moments only, and released by the system when a process dies.
            file.lock()?;
            let mut rows = read(&mut file)?;
            // The clock of this machine, read under the lock: for all who can open the file it is the same one.
            let answer = act(&mut rows, micros(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()));
            let text = serde_json::to_vec(&rows)?;
            file.rewind()?;
            file.write_all(&text)?;
            file.set_len(text.len() as u64)?;
            Ok(answer)
        });
        let done = done.await.unwrap_or_else(|err| Err(io::Error::other(err)));
        done.map_err(|err| Error::database(doing, None, Fault::Unavailable, err))
    }
}

fn read(file: &mut File) -> io::Result<Rows> {
    let mut text = Vec::new();
    file.read_to_end(&mut text)?;
    if text.is_empty() { Ok(Rows::new()) } else { Ok(serde_json::from_slice(&text)?) }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

impl LeaseStore for JsonStore {
    async fn lease_acquire(&self, claim: &Claim) -> lockkit::Result<Acquired> {
        let Claim { key, token, holder, ttl, .. } = claim.clone();
        self.act("acquiring lease", move |rows, now| {
            let expires = now.saturating_add(micros(ttl));
            let before = rows.remove(key.as_str());
            let (row, answer) = match before {
                Some(row) if row.token == Some(*token.as_bytes()) => {
                    let grant = Grant::from(Fence::from(row.fence));
                    let expires = expires.max(row.expires);
                    (Row { expires, renewals: row.renewals + 1, ..row }, Acquired::Granted(grant))
                }
                Some(row) if row.is_held(now) => {
                    let free_in = Some(Duration::from_micros(row.expires - now));
                    (row, Acquired::Held { free_in })
                }
                before => {
                    let fence = before.as_ref().map_or(now, |it| now.max(it.fence + 1));
                    let previous = before.and_then(|it| it.previous(now));
                    let token = Some(*token.as_bytes());
                    let row = Row { token, holder: holder.to_string(), fence, acquired: now, expires, renewals: 0 };
                    (row, Acquired::Granted(Grant::from(Fence::from(fence)).after(previous)))
                }
            };
            rows.insert(key.to_string(), row);
            answer
        })
        .await
    }

    async fn lease_look(&self, key: &Key) -> lockkit::Result<Option<LeaseRecord>> {
        let key = key.clone();
        self.act("looking at lease", move |rows, now| rows.get(key.as_str())?.held(&key, now)).await
    }

    async fn lease_renew(&self, renewals: &[Renewal]) -> lockkit::Result<Vec<Answer>> {
        let renewals = renewals.to_vec();
        self.act("renewing leases", move |rows, now| {
            let renew = |Renewal { key, token, ttl, .. }: &Renewal| {
                let Some(row) = rows.get_mut(key.as_str()).filter(|it| it.is_held_by(*token, now)) else {
                    return Answer::Gone;
                };
                row.expires = row.expires.max(now.saturating_add(micros(*ttl)));
                row.renewals += 1;
                Answer::Done
            };
            renewals.iter().map(renew).collect()
        })
        .await
    }

    async fn lease_release(&self, key: &Key, token: Token, min_hold: Duration) -> lockkit::Result<Answer> {
        let key = key.clone();
        self.act("releasing lease", move |rows, now| {
            let Some(row) = rows.get_mut(key.as_str()).filter(|it| it.is_held_by(token, now)) else {
                return Answer::Gone;
            };
            let free = row.acquired.saturating_add(micros(min_hold));
            (row.token, row.expires) = if free > now { (Some(*Token::nobody().as_bytes()), free) } else { (None, 0) };
            Answer::Done
        })
        .await
    }

    async fn lease_list(&self, prefix: &str, limit: u32) -> lockkit::Result<Vec<LeaseRecord>> {
        let prefix = prefix.to_owned();
        self.act("listing leases", move |rows, now| {
            let held =
                rows.iter().filter(|(key, _)| key.starts_with(&prefix)).filter_map(|(key, row)| row.held(key, now));
            held.take(limit as usize).collect()
        })
        .await
    }

    async fn lease_sweep(&self, retention: Duration, limit: u32) -> lockkit::Result<u64> {
        self.act("sweeping leases", move |rows, now| {
            // A fence above the clock must not be forgotten: the next one is made from the clock.
            let then = now.saturating_sub(micros(retention));
            let old = rows.iter().filter(|(_, it)| it.expires < then && it.fence < then);
            let old: Vec<_> = old.take(limit as usize).map(|(key, _)| key.clone()).collect();
            old.iter().filter_map(|it| rows.remove(it)).count() as u64
        })
        .await
    }
}

/// Two `Leases`, as in two processes, take one lease in turn; returns how often each had it.
async fn compete(path: &Path) -> Result<[u64; 2]> {
    let oracle = Oracle::new();
    let mut competing = JoinSet::new();
    for number in 0..2 {
        let store = oracle.watch(JsonStore { path: path.to_owned() });
        let leases = Leases::builder(store).holder(format!("process {number}")).build()?;
        competing.spawn(async move {
            for _ in 0..ROUNDS {
                let lease = leases.lease("the one").acquire().await?;
                tokio::task::yield_now().await;
                lease.release().await?;
            }
            lockkit::Result::Ok(ROUNDS)
        });
    }
    let rounds = competing.join_all().await.into_iter().collect::<lockkit::Result<Vec<_>>>()?;
    // More, when one had to queue: its place there is a lease as well.
    ensure!(oracle.assert_exclusive() >= ROUNDS * 2, "the oracle saw fewer leases than were held");
    Ok([rounds[0], rounds[1]])
}

#[tokio::main]
async fn main() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = env::args().nth(1).map_or_else(|| folder.path().join("leases.json"), PathBuf::from);

    let promises = conformance::run(async || JsonStore { path: path.clone() }).await;
    println!("{promises} promises kept by a store in one JSON file");
    let [one, other] = compete(&path).await?;
    println!("{one} and {other} times two holders had one lease, never at the same time");
    Ok(())
}
