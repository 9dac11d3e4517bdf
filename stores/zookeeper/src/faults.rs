//! For the unit tests: the inside of a store behind a proxy, which fails chosen requests of its session.

use std::{
    collections::{HashMap, VecDeque},
    io,
    sync::{Arc, Mutex},
    time::Duration,
};

use lockkit::store::{Acquired, Claim, Token};
use lockkit_store_servers::zookeeper::ZooKeeper;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::oneshot,
    time::{sleep, timeout},
};
use zookeeper_client::{Acls, Client, CreateMode, Error as Zk};

use crate::{
    claimed::{Held, Phase, UNKNOWN},
    layout::{Layout, Place, queue},
    session::{Session, Settings, Shared, lock, open_first},
};

/// Longer than any test lasts, so that no session ends. After some 25 s, the process counts as stopped.
pub(crate) const SESSION: Duration = Duration::from_secs(120);

/// The kinds of requests that are failed, by their numbers in the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Request {
    Delete = 2,
    Exists = 3,
    GetData = 4,
    SetData = 5,
    List = 8,
    Multi = 14,
    Create = 15,
}

/// What becomes of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Passes,
    /// It is answered with `NoAuth`, and the server does not get it.
    Refused,
    /// The connection breaks before the server gets it.
    Lost,
    /// The connection breaks before its answer arrives.
    Unanswered,
    /// The child that it creates gets this number, as far as the client is told.
    Numbered(u32),
}

/// What becomes of the next requests, those of each kind in their order.
#[derive(Debug, Clone, Default)]
pub(crate) struct Proxy(Arc<Mutex<VecDeque<(Request, Outcome)>>>);

impl Proxy {
    pub(crate) fn plan(&self, outcomes: &[(Request, Outcome)]) {
        lock(&self.0).extend(outcomes);
    }

    /// Whether all that was planned has happened.
    pub(crate) fn is_done(&self) -> bool {
        lock(&self.0).is_empty()
    }

    fn next(&self, request: i32) -> Outcome {
        let mut planned = lock(&self.0);
        let next = planned.iter().position(|(kind, _)| *kind as i32 == request);
        next.and_then(|it| planned.remove(it)).map_or(Outcome::Passes, |(_, outcome)| outcome)
    }
}

/// A root that no other test uses.
pub(crate) fn own_root() -> String {
    format!("/tests/{}", Token::random().to_hex())
}

/// The inside of a store on the shared server. Its tasks run on the runtime of the test.
pub(crate) async fn inside(root: &str) -> Arc<Shared> {
    inside_at(ZooKeeper::shared().to_owned(), root).await
}

/// As `inside`, behind a proxy.
pub(crate) async fn inside_behind_proxy(root: &str) -> (Arc<Shared>, Proxy) {
    // Its start may take longer than a process may stand still.
    ZooKeeper::shared();
    let proxy = Proxy::default();
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let host = listener.local_addr().expect("an address").to_string();
    let accepting = proxy.clone();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let proxy = accepting.clone();
            tokio::spawn(async move { pass(client, &proxy).await });
        }
    });
    (inside_at(host, root).await, proxy)
}

async fn inside_at(hosts: String, root: &str) -> Arc<Shared> {
    let settings = Settings {
        hosts,
        root: root.to_owned(),
        session_timeout: SESSION,
        layout: Layout::Curator,
        connector: Client::connector(),
        acls: Acls::anyone_all(),
    };
    open_first(settings).await.expect("a session")
}

pub(crate) fn session(shared: &Shared) -> Arc<Session> {
    shared.current().expect("it has not ended")
}

pub(crate) fn claim(key: &str) -> Claim {
    Claim::new(key, Token::random(), "test", SESSION)
}

/// Claims the lease of a key. Waits until its note is written.
pub(crate) async fn take(shared: &Arc<Shared>, key: &str) -> (Token, Held) {
    let claim = claim(key);
    let (answering, answered) = oneshot::channel();
    shared.clone().acquire(claim.clone(), answering).await;
    let answer = answered.await.expect("an answer");
    assert!(matches!(answer, Ok(Acquired::Granted(_))), "{answer:?}");
    loop {
        let phase = shared.claims().get(claim.token).expect("it is held").phase.clone();
        match phase {
            Phase::Held(held) if held.note != Some(UNKNOWN) => return (claim.token, held),
            _ => sleep(Duration::from_millis(2)).await,
        }
    }
}

/// Creates a child as a claim of this token does, with these data. Its node has these data, too.
pub(crate) async fn child(shared: &Shared, dir: &str, token: Token, data: &[u8]) -> Place {
    let client = &session(shared).client;
    let acls = Acls::anyone_all();
    client.create(dir, data, &CreateMode::Persistent.with_acls(acls)).await.expect("a node");
    let prefix = format!("{dir}/{}", shared.settings.layout.prefix(token));
    client.create(&prefix, data, &CreateMode::EphemeralSequential.with_acls(acls)).await.expect("a child");
    let children = client.list_children(dir).await.expect("the children");
    queue(&children).into_iter().next().expect("the child")
}

/// The data of a node. `None` if it does not exist.
pub(crate) async fn data(shared: &Shared, path: &str) -> Option<Vec<u8>> {
    match session(shared).client.get_data(path).await {
        Ok((data, _)) => Some(data),
        Err(Zk::NoNode) => None,
        Err(err) => panic!("read {path}: {err}"),
    }
}

/// Waits until the node is gone, which is long before its session would have timed out.
pub(crate) async fn is_deleted(shared: &Shared, path: &str) {
    let gone = async {
        while data(shared, path).await.is_some() {
            sleep(Duration::from_millis(2)).await;
        }
    };
    timeout(SESSION / 2, gone).await.unwrap_or_else(|_| panic!("{path} is there"));
}

/// Passes the messages of a connection on, until one of the sides or a planned outcome breaks it.
async fn pass(client: TcpStream, proxy: &Proxy) {
    let Ok(server) = TcpStream::connect(ZooKeeper::shared()).await else { return };
    let (mut from_client, to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let to_client = tokio::sync::Mutex::new(to_client);
    // Of the requests whose answers do not pass as they are, by their numbers.
    let sent = Mutex::new(HashMap::new());
    let requests = async {
        // The request for a session has no head.
        to_server.write_all(&message(&mut from_client).await?).await?;
        loop {
            let request = message(&mut from_client).await?;
            let (number, kind) = (word(&request, 4), word(&request, 8));
            match proxy.next(kind) {
                Outcome::Passes => {}
                Outcome::Lost => return io::Result::Ok(()),
                Outcome::Refused => {
                    let answer = [&[0, 0, 0, 16][..], &request[4..8], &[0; 8], &(-102_i32).to_be_bytes()].concat();
                    to_client.lock().await.write_all(&answer).await?;
                    continue;
                }
                outcome => drop(lock(&sent).insert(number, outcome)),
            }
            to_server.write_all(&request).await?;
        }
    };
    let answers = async {
        loop {
            let mut answer = message(&mut from_server).await?;
            let outcome = lock(&sent).remove(&word(&answer, 4));
            match outcome {
                Some(Outcome::Unanswered) => return io::Result::Ok(()),
                Some(Outcome::Numbered(number)) => {
                    // The path that was created comes after the head, and ends with the number.
                    let end = 24 + usize::try_from(word(&answer, 20)).expect("a length");
                    answer[end - 10..end].copy_from_slice(format!("{number:010}").as_bytes());
                }
                _ => {}
            }
            to_client.lock().await.write_all(&answer).await?;
        }
    };
    let _ = tokio::select! {
        ended = requests => ended,
        ended = answers => ended,
    };
}

/// One message, with its length before it.
async fn message(from: &mut (impl AsyncRead + Unpin)) -> io::Result<Vec<u8>> {
    let mut message = vec![0; 4];
    from.read_exact(&mut message).await?;
    message.resize(4 + usize::try_from(word(&message, 0)).expect("a length"), 0);
    from.read_exact(&mut message[4..]).await?;
    Ok(message)
}

fn word(message: &[u8], at: usize) -> i32 {
    i32::from_be_bytes(message[at..at + 4].try_into().expect("four bytes"))
}
