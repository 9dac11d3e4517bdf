//! A process's client of the store: each call is a message there and one back.

use std::{fmt, future::Future, io, time::Duration};

use lockkit::{
    Error, Fault, Key, LeaseStore, Result,
    store::{Acquired, AcquiredAll, Answer, Claim, LeaseRecord, Profile, Release, Renewal, Token},
    testing::simulation::{CommitSent, LeaseTx, Pin, outcome_unknown, transaction_ended},
};
use tokio::{sync::oneshot, time::timeout};

use crate::{
    plan::Kind,
    store::{Reply, Request, TxId, Write},
    tables::ConnId,
    world::Shared,
};

/// Longest time for a rollback. After it the connection is closed.
const ROLL_BACK_LIMIT: Duration = Duration::from_secs(1);

/// The store, as one start of a process sees it.
#[derive(Clone)]
pub(crate) struct Client {
    world: Shared,
    process: usize,
    generation: u32,
    profile: Profile,
    /// Whether transactions can pin leases.
    has_pins: bool,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("process", &self.process).finish_non_exhaustive()
    }
}

impl Client {
    pub(crate) fn new(world: &Shared, process: usize) -> Self {
        let mut profile = Profile::default();
        let (generation, has_pins) = {
            let world = world.lock();
            profile.batches = world.settings.batches;
            profile.shows_writes_at_once = world.settings.shows_writes_at_once;
            if world.settings.kind.has_sessions() {
                (profile.queues, profile.batches) = (true, false);
            }
            (world.places[process].generation, world.settings.kind == Kind::Sql)
        };
        Self { world: world.clone(), process, generation, profile, has_pins }
    }

    /// Sends a request, and waits for its answer. `None` if the connection breaks.
    pub(crate) async fn sends(&self, request: Request) -> Option<Reply> {
        let (sender, receiver) = oneshot::channel();
        self.world.lock().send(self.process, self.generation, request, sender);
        receiver.await.ok().flatten()
    }

    /// As `sends`, with an error for a connection that breaks.
    async fn call(&self, request: Request, key: Option<&Key>) -> Result<Reply> {
        let unavailable = |kind, why| {
            let source = io::Error::new(kind, why);
            Err(Error::database("talking to the simulated store", key, Fault::Unavailable, source))
        };
        match self.sends(request).await {
            None => unavailable(io::ErrorKind::ConnectionReset, "the connection broke"),
            Some(Reply::Unknown) => unavailable(io::ErrorKind::TimedOut, "the store cannot say it for now"),
            Some(reply) => Ok(reply),
        }
    }

    async fn answers(&self, request: Request) -> Result<Vec<Answer>> {
        match self.call(request, None).await? {
            Reply::Answers(answers) => Ok(answers),
            other => unexpected(&other),
        }
    }

    /// Takes one lease after the other, as lockkit does for a store that has no such operation.
    async fn acquire_in_order(&self, claims: &[Claim]) -> Result<AcquiredAll> {
        let mut grants = Vec::new();
        for claim in claims {
            let acquired = self.lease_acquire(claim).await;
            if let Ok(Acquired::Granted(grant)) = acquired {
                grants.push(grant);
                continue;
            }
            for Claim { key, token, .. } in &claims[..grants.len()] {
                self.lease_release(key, *token, Duration::ZERO).await?;
            }
            return acquired.map(|it| match it {
                Acquired::Held { free_in } => AcquiredAll::Held { key: claim.key.clone(), free_in },
                Acquired::Granted(_) => unreachable!("it was not granted"),
            });
        }
        Ok(AcquiredAll::Granted(grants))
    }

    /// The number of a connection that is opened now.
    pub(crate) fn opens(&self) -> ConnId {
        self.world.lock().opens(self.process)
    }

    /// The connection is closed.
    pub(crate) fn closes(&self, conn: ConnId) {
        self.world.lock().closes(conn);
    }

    /// Begins a transaction.
    pub(crate) async fn begin(&self) -> Result<Tx> {
        let id = self.world.lock().number();
        let tx = Tx { client: self.clone(), id, writes: Vec::new(), is_over: false };
        self.call(Request::Begin(id), None).await?;
        Ok(tx)
    }
}

/// A reply of another kind than the request asks for is a mistake of the simulation.
fn unexpected(reply: &Reply) -> ! {
    panic!("BUG: the store has answered {reply:?}")
}

impl LeaseStore for Client {
    async fn lease_acquire(&self, claim: &Claim) -> Result<Acquired> {
        match self.call(Request::Acquire(vec![claim.clone()]), Some(&claim.key)).await? {
            Reply::All(AcquiredAll::Granted(mut grants)) if grants.len() == 1 => {
                Ok(Acquired::Granted(grants.remove(0)))
            }
            Reply::All(AcquiredAll::Held { free_in, .. }) => Ok(Acquired::Held { free_in }),
            other => unexpected(&other),
        }
    }

    async fn lease_acquire_all(&self, claims: &[Claim]) -> Result<AcquiredAll> {
        if self.profile.queues {
            return self.acquire_in_order(claims).await;
        }
        match self.call(Request::Acquire(claims.to_vec()), None).await? {
            Reply::All(answer) => Ok(answer),
            other => unexpected(&other),
        }
    }

    async fn lease_acquire_each(&self, claims: &[Claim]) -> Result<Vec<Option<Acquired>>> {
        match self.call(Request::AcquireEach(claims.to_vec()), None).await? {
            Reply::Each(answers) => Ok(answers),
            other => unexpected(&other),
        }
    }

    async fn lease_look(&self, key: &Key) -> Result<Option<LeaseRecord>> {
        match self.call(Request::Look(key.clone()), Some(key)).await? {
            Reply::Found(found) => Ok(found),
            other => unexpected(&other),
        }
    }

    async fn lease_renew(&self, renewals: &[Renewal]) -> Result<Vec<Answer>> {
        self.answers(Request::Renew(renewals.to_vec())).await
    }

    async fn lease_release(&self, key: &Key, token: Token, min_hold: Duration) -> Result<Answer> {
        let release = Release::new(key.clone(), token, min_hold);
        Ok(self.answers(Request::Release(vec![release])).await?[0])
    }

    async fn lease_release_unpinned(&self, key: &Key, token: Token) -> Result<Answer> {
        let release = Release::new(key.clone(), token, Duration::ZERO);
        Ok(self.lease_release_all_unpinned(&[release]).await?[0])
    }

    async fn lease_release_all(&self, releases: &[Release]) -> Result<Vec<Answer>> {
        self.answers(Request::Release(releases.to_vec())).await
    }

    async fn lease_release_all_unpinned(&self, releases: &[Release]) -> Result<Vec<Answer>> {
        let releases = releases.to_vec();
        let request = if self.has_pins { Request::ReleaseUnpinned(releases) } else { Request::Release(releases) };
        self.answers(request).await
    }

    async fn lease_list(&self, prefix: &str, limit: u32) -> Result<Vec<LeaseRecord>> {
        match self.call(Request::List(prefix.to_owned(), limit), None).await? {
            Reply::List(list) => Ok(list),
            other => unexpected(&other),
        }
    }

    async fn lease_sweep(&self, retention: Duration, limit: u32) -> Result<u64> {
        match self.call(Request::Sweep(retention, limit), None).await? {
            Reply::Number(swept) => Ok(swept),
            other => unexpected(&other),
        }
    }

    fn lease_freed(&self, key: &Key) -> impl Future<Output = ()> + Send {
        let freed = self.world.lock().listen(self.process, key);
        async {
            let Some(freed) = freed else { return std::future::pending().await };
            if freed.await.is_err() {
                // The process has ended.
                std::future::pending::<()>().await;
            }
        }
    }

    fn profile(&self) -> Profile {
        self.profile
    }
}

/// An open transaction. Dropping it closes its connection.
#[derive(Debug)]
pub(crate) struct Tx {
    client: Client,
    id: TxId,
    writes: Vec<Write>,
    is_over: bool,
}

impl Tx {
    /// Locks the row of a lease. Returns whether it was there.
    pub(crate) async fn pin(&self, key: &Key, token: Token) -> Result<bool> {
        self.row(Request::Pin(self.id, key.clone(), token), key).await
    }

    /// The fence guard. Returns whether it has let this fence in.
    pub(crate) async fn guard(&self, key: &Key, fence: u64) -> Result<bool> {
        self.row(Request::Guard(self.id, key.clone(), fence), key).await
    }

    /// The number that the key has now.
    pub(crate) async fn read(&self, key: &Key) -> Result<u64> {
        match self.call(Request::Read(self.id, key.clone()), key).await? {
            Reply::Number(value) => Ok(value),
            other => unexpected(&other),
        }
    }

    /// Adds what the commit will write.
    pub(crate) fn write(&mut self, write: Write) {
        self.writes.push(write);
    }

    async fn row(&self, request: Request, key: &Key) -> Result<bool> {
        match self.call(request, key).await? {
            Reply::Row(was_there) => Ok(was_there),
            other => unexpected(&other),
        }
    }

    async fn call(&self, request: Request, key: &Key) -> Result<Reply> {
        match self.client.call(request, Some(key)).await? {
            Reply::NoTransaction => Err(ended()),
            reply => Ok(reply),
        }
    }
}

fn ended() -> Error {
    transaction_ended("the transaction has ended")
}

impl LeaseTx for Tx {
    async fn check_open(&mut self) -> Result<()> {
        Ok(())
    }

    async fn renew(&mut self, renewal: &Renewal) -> Result<Answer> {
        match self.call(Request::RenewInTx(self.id, renewal.clone()), &renewal.key).await? {
            Reply::Answers(answers) => Ok(answers[0]),
            other => unexpected(&other),
        }
    }

    async fn release(&mut self, release: &Release, pin: Pin) -> Result<bool> {
        self.row(Request::ReleaseInTx(self.id, release.clone(), pin), &release.key).await
    }

    async fn commit(mut self) -> Result<()> {
        let _sent = CommitSent::now();
        let writes = std::mem::take(&mut self.writes);
        match self.client.call(Request::Commit(self.id, writes), None).await {
            Ok(Reply::Done) => {
                self.is_over = true;
                Ok(())
            }
            Ok(_) => Err(ended()),
            Err(err) => Err(outcome_unknown(err)),
        }
    }

    async fn roll_back(mut self) -> bool {
        let rolled_back = timeout(ROLL_BACK_LIMIT, self.client.call(Request::RollBack(self.id), None)).await;
        self.is_over = matches!(rolled_back, Ok(Ok(_)));
        self.is_over
    }
}

impl Drop for Tx {
    fn drop(&mut self) {
        if !self.is_over {
            self.client.world.lock().abandon(self.id);
        }
    }
}
