//! The store: its calls, and what they share.

use std::{
    fmt,
    io::{self, ErrorKind},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use etcd_client::{Client, GetOptions, GetResponse, KeyValue, Txn, TxnOpResponse, TxnResponse};
use lockkit::{
    Error, Key, LeaseStore, Result,
    store::{Acquired, AcquiredAll, Answer, Claim, LeaseRecord, Profile, Release, Renewal, Token},
};
use tokio::sync::OnceCell;

use crate::{
    builder::{EtcdStoreBuilder, TakeOver},
    claims::Claims,
    error::{ConnectError, Failure},
    keeper,
    layout::Place,
    lost::{self, Lost},
    members::{Members, Source},
    sessions::Sessions,
};

/// The shortest ttl: a few round trips.
const LEAST_TTL: Duration = Duration::from_millis(100);

/// Leases in etcd. Make one per process; clones are handles to the same one.
///
/// See the [crate](crate) for the layout, for what a lease survives and for how it compares with others.
///
/// ```no_run
/// use lockkit::Leases;
/// use lockkit_etcd::EtcdStore;
///
/// # async fn f() -> Result<(), Box<dyn std::error::Error>> {
/// let store = EtcdStore::connect(["http://10.0.0.1:2379", "http://10.0.0.2:2379"]).await?;
/// let leases = Leases::new(store);
/// let lease = leases.lease("nightly").acquire().await?;
/// println!("fence {}", lease.fence());
/// lease.release().await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct EtcdStore(pub(crate) Arc<Shared>);

pub(crate) struct Shared {
    pub(crate) prefix: String,
    source: Source,
    members: Mutex<Option<Arc<Members>>>,
    pub(crate) sessions: Arc<Sessions>,
    pub(crate) claims: Claims,
    pub(crate) lost: Lost,
    take_over: TakeOver,
    waits: OnceCell<bool>,
}

impl EtcdStore {
    /// Connects with the defaults of [`EtcdStoreBuilder`].
    ///
    /// # Errors
    /// Those of [`EtcdStoreBuilder::connect`].
    ///
    /// # Cancel safety
    /// Dropping this future leaves nothing behind.
    pub async fn connect(endpoints: impl IntoIterator<Item = impl AsRef<str>>) -> Result<Self, ConnectError> {
        Self::builder(endpoints).connect().await
    }

    /// A builder for a store with your own settings. `endpoints` are addresses of members of the cluster, such as
    /// `http://127.0.0.1:2379`. One member is queried at a time; if it does not answer, the next one is.
    ///
    /// The store reconnects by itself, also on another runtime after the first one has ended.
    pub fn builder(endpoints: impl IntoIterator<Item = impl AsRef<str>>) -> EtcdStoreBuilder {
        EtcdStoreBuilder::new(endpoints.into_iter().map(|it| it.as_ref().to_owned()).collect())
    }

    /// A builder for a store on a client that is connected already.
    ///
    /// The client's connections live on the runtime on which it was made. If that runtime ends, so does the use of this
    /// store; that of [`builder`](Self::builder) has no such limit. Give the client a connect timeout, HTTP/2
    /// keep-alive and `with_require_leader(true)`.
    pub fn builder_with_client(client: Client) -> EtcdStoreBuilder {
        EtcdStoreBuilder::with_client(client)
    }

    pub(crate) fn new(source: Source, prefix: String, session_ttl: Duration, take_over: TakeOver) -> Self {
        let claims = Claims::default();
        Self(Arc::new(Shared {
            prefix,
            source,
            members: Mutex::default(),
            sessions: Arc::new(Sessions::new(session_ttl, claims.sooner.clone())),
            claims,
            lost: Lost::default(),
            take_over,
            waits: OnceCell::new(),
        }))
    }

    /// Waits until a member answers.
    pub(crate) async fn reach(&self) -> Result<()> {
        let options = GetOptions::new().with_count_only();
        self.0.get("connecting to etcd", None, "lockkit/", options).await?;
        // Here, so that a member that does not answer does not delay the first lease.
        self.0.waits(&self.0.members()).await;
        Ok(())
    }
}

impl Shared {
    /// The clients, on a runtime that lives.
    pub(crate) fn members(self: &Arc<Self>) -> Arc<Members> {
        let mut members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(members) = members.as_ref().filter(|it| !it.have_ended()) {
            return members.clone();
        }
        let new = Arc::new(Members::new(self.source.clone()));
        *members = Some(new.clone());
        drop(members);
        keeper::start(self, new.clone());
        new
    }

    pub(crate) fn place(&self, doing: &'static str, key: &Key) -> Result<Arc<Place>> {
        Place::new(&self.prefix, key, doing).map(Arc::new)
    }

    /// Whether a lease without its key is taken only after its ttl.
    pub(crate) async fn waits(&self, members: &Members) -> bool {
        let is_unfixed = async || match self.take_over {
            TakeOver::AtOnce => false,
            TakeOver::AfterTtl => true,
            TakeOver::ByVersion => {
                let versions = members.versions().await;
                versions.is_empty() || !versions.iter().flatten().all(|it| lost::is_fixed(it))
            }
        };
        *self.waits.get_or_init(is_unfixed).await
    }

    pub(crate) async fn txn(&self, members: &Members, txn: Txn) -> Result<TxnResponse, Failure> {
        self.txn_counted(members, txn).await.map(|(answer, _)| answer)
    }

    /// As [`txn`](Self::txn). Also returns whether it was sent only once.
    pub(crate) async fn txn_counted(&self, members: &Members, txn: Txn) -> Result<(TxnResponse, bool), Failure> {
        let call = |client: Arc<Client>| {
            let txn = txn.clone();
            async move { client.kv_client().txn(txn).await }
        };
        members.call_counted(call).await
    }

    /// A linearizable read.
    pub(crate) async fn get(
        self: &Arc<Self>,
        doing: &'static str,
        key: Option<&Key>,
        path: &str,
        options: GetOptions,
    ) -> Result<GetResponse> {
        let call = |client: Arc<Client>| {
            let options = options.clone();
            async move { client.kv_client().get(path, Some(options)).await }
        };
        self.members().call(call).await.map_err(|err| err.while_doing(doing, key))
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Its keeper ends, and revokes the sessions.
        self.claims.sooner.notify_one();
    }
}

/// The keys and values of a read in a transaction.
pub(crate) fn kvs(answer: Option<&TxnOpResponse>) -> &[KeyValue] {
    match answer {
        Some(TxnOpResponse::Get(answer)) => answer.kvs(),
        _ => &[],
    }
}

impl LeaseStore for EtcdStore {
    async fn lease_acquire(&self, claim: &Claim) -> Result<Acquired> {
        self.0.acquire(claim).await
    }

    async fn lease_acquire_all(&self, claims: &[Claim]) -> Result<AcquiredAll> {
        self.0.acquire_all(claims).await
    }

    async fn lease_look(&self, key: &Key) -> Result<Option<LeaseRecord>> {
        self.0.look(key).await
    }

    async fn lease_renew(&self, renewals: &[Renewal]) -> Result<Vec<Answer>> {
        self.0.renew(renewals).await
    }

    async fn lease_release(&self, key: &Key, token: Token, min_hold: Duration) -> Result<Answer> {
        self.0.release(key, token, min_hold).await
    }

    async fn lease_release_all(&self, releases: &[Release]) -> Result<Vec<Answer>> {
        self.0.release_all(releases).await
    }

    async fn lease_list(&self, prefix: &str, limit: u32) -> Result<Vec<LeaseRecord>> {
        self.0.list(prefix, limit).await
    }

    async fn lease_sweep(&self, retention: Duration, limit: u32) -> Result<u64> {
        self.0.sweep(retention, limit).await
    }

    async fn unanswered(&self) -> Option<Error> {
        let why = self.0.members().last_failure()?;
        // Waiting requests take it as no answer, and go on.
        Some(Failure::Silent(io::Error::new(ErrorKind::TimedOut, why)).while_doing("querying etcd", None))
    }

    async fn lease_freed(&self, key: &Key) {
        self.0.freed(key).await;
    }

    fn profile(&self) -> Profile {
        let mut profile = Profile::default();
        profile.least_ttl = LEAST_TTL;
        // A release deletes all that there is. Only the record of a holder that died is left to sweep.
        profile.sweeps = false;
        profile.queues = true;
        profile.fence_domain = "etcd";
        profile
    }
}

impl fmt::Debug for EtcdStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdStore").field("prefix", &self.0.prefix).finish_non_exhaustive()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use lockkit_store_servers::etcd::Etcd as Server;
    use tokio::time::sleep;

    use super::*;

    pub(crate) const SECOND: Duration = Duration::from_secs(1);

    /// Longer than anything takes that is waited for, and shorter than the ttl of the claims.
    const LONG: Duration = Duration::from_secs(20);

    /// The inside of a store whose sessions outlive the test.
    pub(crate) async fn store_at(server: &Server) -> Arc<Shared> {
        store_of(EtcdStore::builder(server.endpoints()).session_ttl(SECOND * 60)).await
    }

    pub(crate) async fn store_of(builder: EtcdStoreBuilder) -> Arc<Shared> {
        builder.connect().await.expect("connect").0
    }

    /// The inside of a store whose cluster cannot be reached.
    pub(crate) fn store_of_nothing() -> Arc<Shared> {
        EtcdStore::new(members_of_nothing(), "p/".to_owned(), SECOND * 10, TakeOver::AtOnce).0
    }

    pub(crate) fn members_of_nothing() -> Source {
        Source::Endpoints(vec!["http://127.0.0.1:1".to_owned()], Box::default())
    }

    /// A client for what the store does not do.
    pub(crate) async fn client_at(server: &Server) -> Client {
        Client::connect(server.endpoints(), None).await.expect("connect")
    }

    pub(crate) fn claim(key: &str) -> Claim {
        Claim::new(key, Token::random(), "test", SECOND * 40)
    }

    /// A claim that waits for its turn.
    pub(crate) fn queued(key: &str) -> Claim {
        let mut claim = claim(key);
        claim.queue = true;
        claim
    }

    pub(crate) async fn take(store: &Arc<Shared>, claim: &Claim) {
        let answer = store.acquire(claim).await.expect("it is answered");
        assert!(matches!(answer, Acquired::Granted(_)), "{answer:?}");
    }

    pub(crate) async fn is_held(store: &Arc<Shared>, claim: &Claim) {
        let answer = store.acquire(claim).await.expect("it is answered");
        assert!(matches!(answer, Acquired::Held { .. }), "{answer:?}");
    }

    /// How many keys have this start.
    pub(crate) async fn keys(client: &Client, start: &str) -> i64 {
        let options = GetOptions::new().with_prefix().with_count_only();
        client.kv_client().get(start, Some(options)).await.expect("count keys").count()
    }

    /// Whether etcd has forgotten this lease.
    pub(crate) async fn is_revoked(client: &Client, lease: i64) -> bool {
        client.lease_client().time_to_live(lease, None).await.expect("it is answered").ttl() == -1
    }

    pub(crate) async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
        let begun = std::time::Instant::now();
        while !holds().await {
            assert!(begun.elapsed() < LONG, "not so after {LONG:?}: {what}");
            sleep(Duration::from_millis(20)).await;
        }
    }

    #[tokio::test]
    async fn a_lost_lease_is_waited_for_unless_each_member_that_answers_is_fixed() {
        let server = Server::alone();
        let status = client_at(&server).await.maintenance_client().status().await.expect("it is answered");
        let is_unfixed = !lost::is_fixed(status.version());
        let builder = || EtcdStore::builder(server.endpoints());
        for (take_over, waits) in
            [(TakeOver::ByVersion, is_unfixed), (TakeOver::AtOnce, false), (TakeOver::AfterTtl, true)]
        {
            let store = store_of(builder().take_over(take_over)).await;
            assert_eq!(store.waits(&store.members()).await, waits, "{take_over:?}");
        }
        let store = EtcdStore::new(members_of_nothing(), "p/".to_owned(), SECOND * 10, TakeOver::ByVersion).0;
        assert!(store.waits(&store.members()).await, "no member answers");
    }

    #[tokio::test(start_paused = true)]
    async fn a_cluster_that_does_not_answer_is_reported_to_those_who_wait() {
        let store = EtcdStore(store_of_nothing());
        assert!(store.unanswered().await.is_none());
        assert!(store.lease_look(&Key::from("k")).await.is_err());
        let told = store.unanswered().await;
        assert!(matches!(told, Some(Error::Database { fault: lockkit::Fault::Unavailable, .. })), "{told:?}");
    }
}
