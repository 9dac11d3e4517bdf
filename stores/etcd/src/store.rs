//! The store: what its operations share.

use std::{
    fmt,
    io::{self, ErrorKind},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use etcd_client::{Client, GetOptions, GetResponse, KeyValue, Txn, TxnOpResponse, TxnResponse};
use lockkit::{
    Error, Fault, Key, LeaseStore, Result,
    store::{Acquired, AcquiredAll, Answer, BoxError, Claim, LeaseRecord, Profile, Release, Renewal, Token},
};

use tokio::sync::OnceCell;

use crate::{
    claims::Claims,
    keeper,
    layout::Place,
    lost::{self, Lost},
    members::{Members, Source, Trouble},
    options::{Options, SetupError, TakeOver},
    sessions::Sessions,
};

/// The shortest ttl: a few round trips.
const LEAST_TTL: Duration = Duration::from_millis(100);

/// The source of an error of lockkit when the database of the cluster is full. Waiting does not help.
const NO_SPACE: &str = "etcd has no space left (database space exceeded), so it takes no claims: compact and defragment \
                        it or raise `--quota-backend-bytes`, and then run `etcdctl alarm disarm`";

/// Leases in etcd. Make one per process; clones are handles to the same one.
///
/// See the [crate](crate) for the layout, for what a lease survives and for how it compares with others.
///
/// ```no_run
/// use lockkit::Leases;
/// use lockkit_etcd::{EtcdStore, Options};
///
/// # async fn f() -> Result<(), Box<dyn std::error::Error>> {
/// let store = EtcdStore::connect(["http://10.0.0.1:2379", "http://10.0.0.2:2379"], Options::new()).await?;
/// let leases = Leases::new(store);
/// let lease = leases.lease("nightly").acquire().await?;
/// println!("fence {}", lease.fence());
/// lease.release().await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct EtcdStore(Arc<Inner>);

pub(crate) struct Inner {
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
    /// Connects to a cluster. `endpoints` are addresses of its members, such as `http://127.0.0.1:2379`. One member is
    /// asked at a time; if it does not answer, the next one is.
    ///
    /// Reconnects by itself, also on another runtime after the first one has ended.
    ///
    /// # Errors
    /// [`SetupError`], if a setting is invalid or no member answers within 5 s.
    ///
    /// # Cancel safety
    /// Dropping this future leaves nothing behind.
    pub async fn connect<E: AsRef<str>>(
        endpoints: impl IntoIterator<Item = E>,
        options: Options,
    ) -> Result<Self, SetupError> {
        let endpoints: Vec<_> = endpoints.into_iter().map(|it| it.as_ref().to_owned()).collect();
        if endpoints.is_empty() {
            return Err(SetupError::NoEndpoints);
        }
        let names = endpoints.iter().map(|it| without_user(it)).collect::<Vec<_>>().join(", ");
        let client = options.connect();
        let store = Self::of(Source::Endpoints(endpoints, Box::new(client)), options)?;
        let options = GetOptions::new().with_count_only();
        match store.0.get("connecting to etcd", None, "lockkit/", options).await {
            Ok(_) => {
                // A member that does not answer must not delay the first lease.
                store.0.waits(&store.0.members()).await;
                Ok(store)
            }
            Err(source) => Err(SetupError::Unreachable { endpoints: names, source }),
        }
    }

    /// A store on a client that is connected already. The options of the client in `options` have no effect.
    ///
    /// The client's connections live on the runtime on which it was made. If that runtime ends, so does the use of this
    /// store; [`connect`](Self::connect) has no such limit. Give the client a connect timeout, HTTP/2 keep-alive and
    /// `with_require_leader(true)`.
    ///
    /// # Errors
    /// [`SetupError`], if a setting is invalid.
    pub fn new(client: Client, options: Options) -> Result<Self, SetupError> {
        Self::of(Source::Client(Arc::new(client)), options)
    }

    fn of(source: Source, options: Options) -> Result<Self, SetupError> {
        options.check()?;
        let Options { prefix, session_ttl, take_over, client: _ } = options;
        let claims = Claims::default();
        Ok(Self(Arc::new(Inner {
            prefix,
            source,
            members: Mutex::default(),
            sessions: Arc::new(Sessions::new(session_ttl, claims.sooner.clone())),
            claims,
            lost: Lost::default(),
            take_over,
            waits: OnceCell::new(),
        })))
    }
}

impl Inner {
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
        let ask = async || match self.take_over {
            TakeOver::AtOnce => false,
            TakeOver::AfterTtl => true,
            TakeOver::ByVersion => {
                let versions = members.versions().await;
                versions.is_empty() || !versions.iter().flatten().all(|it| lost::is_fixed(it))
            }
        };
        *self.waits.get_or_init(ask).await
    }

    pub(crate) async fn txn(&self, members: &Members, txn: Txn) -> Result<TxnResponse, Trouble> {
        self.txn_counted(members, txn).await.map(|(answer, _)| answer)
    }

    /// As [`txn`](Self::txn). Also returns whether it was sent only once.
    pub(crate) async fn txn_counted(&self, members: &Members, txn: Txn) -> Result<(TxnResponse, bool), Trouble> {
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
        self.members().call(call).await.map_err(|err| failed(doing, key, err))
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Its keeper ends, and revokes the sessions.
        self.claims.sooner.notify_one();
    }
}

/// The error of lockkit for a call that failed.
pub(crate) fn failed<'k>(doing: &'static str, key: impl Into<Option<&'k Key>>, trouble: Trouble) -> Error {
    let (fault, source): (_, BoxError) = match trouble {
        Trouble::Refused { err, only: _ } => (Fault::Other, err.into()),
        Trouble::Foreign(what) => (Fault::Other, what.into()),
        Trouble::NoSpace { .. } => (Fault::Unavailable, NO_SPACE.into()),
        Trouble::NoLease => (Fault::Unavailable, "the etcd lease of this process has ended".into()),
        Trouble::Silent(err) => (Fault::Unavailable, err.into()),
    };
    Error::database(doing, key, fault, source)
}

/// The address without a user name and password.
fn without_user(endpoint: &str) -> String {
    let (scheme, rest) = endpoint.split_once("://").map_or(("", endpoint), |(scheme, rest)| (scheme, rest));
    let (authority, _) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    if scheme.is_empty() { host.to_owned() } else { format!("{scheme}://{host}") }
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
        Some(failed("asking etcd", None, Trouble::Silent(io::Error::new(ErrorKind::TimedOut, why))))
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
