//! A TCP proxy between a test and its server, which counts round trips and breaks connections.
//!
//! All it knows of the protocols is a ping.

use std::io;
use std::net;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::sleep;
use url::Url;

/// The whole of a ping, as sqlx sends it: `COM_PING` to MySQL and MariaDB, `Sync` to PostgreSQL.
const PINGS: [&[u8]; 2] = [b"\x01\0\0\0\x0e", b"S\0\0\0\x04"];

/// A proxy in front of one server. Its connections end when it is dropped.
#[derive(Debug)]
pub struct Proxy {
    url: String,
    state: Arc<State>,
    accepting: JoinHandle<()>,
}

#[derive(Debug)]
struct State {
    server: String,
    round_trips: AtomicU64,
    pings: AtomicU64,
    stalled: watch::Sender<bool>,
    drops_replies: AtomicBool,
    reply_delay_ms: AtomicU64,
    /// The number of the next connection, of the first that is not silent, and of the first that is not broken.
    connections: AtomicU64,
    first_heard: AtomicU64,
    first_whole: watch::Sender<u64>,
    /// What a request must contain for all replies to be held back from then on.
    holds_replies_to: Mutex<Option<&'static str>>,
    holds_replies: watch::Sender<bool>,
    /// A text in requests, and one of the same length that the server gets instead.
    replaced: Mutex<Option<(&'static str, &'static str)>>,
}

impl Proxy {
    /// Starts a proxy in front of the server in this URL, such as [`TestDb::url`](crate::TestDb::url), or that of a
    /// store, with its port.
    ///
    /// # Panics
    /// If the URL is not that of a server, or outside a tokio runtime.
    pub fn start(url: &str) -> Self {
        let mut url = Url::parse(url).expect("a URL");
        let host = url.host_str().expect("the URL of a server");
        // The proxy reads what is said. A database of the user's may offer encryption.
        let (default_port, unencrypted) = match url.scheme() {
            "postgres" | "postgresql" => (Some(5432), Some("disable")),
            "mysql" | "mariadb" => (Some(3306), Some("disabled")),
            _ => (None, None),
        };
        let state = Arc::new(State {
            server: format!("{host}:{}", url.port().or(default_port).expect("the port of the server")),
            round_trips: AtomicU64::new(0),
            pings: AtomicU64::new(0),
            stalled: watch::Sender::new(false),
            drops_replies: AtomicBool::new(false),
            reply_delay_ms: AtomicU64::new(0),
            connections: AtomicU64::new(0),
            first_heard: AtomicU64::new(0),
            first_whole: watch::Sender::new(0),
            holds_replies_to: Mutex::default(),
            holds_replies: watch::Sender::new(false),
            replaced: Mutex::default(),
        });
        let listener = net::TcpListener::bind("127.0.0.1:0").expect("listen on a free port");
        listener.set_nonblocking(true).expect("make the listener non-blocking");
        let port = listener.local_addr().expect("the proxy's address").port();
        let listener = TcpListener::from_std(listener).expect("listen within the runtime");
        url.set_host(Some("127.0.0.1")).expect("a URL with a host");
        url.set_port(Some(port)).expect("a URL with a port");
        if let Some(mode) = unencrypted {
            url.query_pairs_mut().append_pair("sslmode", mode);
        }

        let accepting = tokio::spawn(accept(listener, Arc::clone(&state)));
        Self { url: url.into(), state, accepting }
    }

    /// The URL of the same database or store, by way of the proxy.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// How often a client has asked and waited for the answer: changes of direction from server to client and back.
    pub fn round_trips(&self) -> u64 {
        self.state.round_trips.load(Ordering::SeqCst)
    }

    /// How many connections clients have opened.
    pub fn connections(&self) -> u64 {
        self.state.connections.load(Ordering::SeqCst)
    }

    /// How many of the round trips were a ping of sqlx's pool, which lends and takes back no connection without.
    pub fn pings(&self) -> u64 {
        self.state.pings.load(Ordering::SeqCst)
    }

    /// Holds everything back, in both directions and on new connections as well, until told otherwise.
    pub fn stall(&self, stalled: bool) {
        self.state.stalled.send_replace(stalled);
    }

    /// Throws away what the server sends: it does what it is asked, and the client never hears of it.
    pub fn drop_replies(&self, dropped: bool) {
        self.state.drops_replies.store(dropped, Ordering::SeqCst);
    }

    /// Makes all connections half-open: their packets vanish, in both directions and for ever, and nobody is told. New
    /// ones can be made.
    pub fn half_open(&self) {
        self.state.first_heard.store(self.state.connections.load(Ordering::SeqCst), Ordering::SeqCst);
    }

    /// Holds all replies back from when a client next sends this text, until [`pass_replies`](Self::pass_replies).
    pub fn hold_replies_to(&self, text: &'static str) {
        *self.state.holds_replies_to.lock().expect("no code panics while it holds the lock") = Some(text);
    }

    /// Waits until a client has sent the text of [`hold_replies_to`](Self::hold_replies_to).
    ///
    /// # Panics
    /// Never: this proxy keeps what it waits for.
    pub async fn replies_are_held(&self) {
        self.state.holds_replies.subscribe().wait_for(|it| *it).await.expect("the proxy lives");
    }

    /// Lets the replies go on that [`hold_replies_to`](Self::hold_replies_to) holds back.
    pub fn pass_replies(&self) {
        *self.state.holds_replies_to.lock().expect("no code panics while it holds the lock") = None;
        self.state.holds_replies.send_replace(false);
    }

    /// Sends the server `by` instead of this text from now on.
    ///
    /// # Panics
    /// If the two differ in length: the messages state theirs.
    pub fn replace(&self, text: &'static str, by: &'static str) {
        assert_eq!(text.len(), by.len(), "`{text}` and `{by}` have one length");
        *self.state.replaced.lock().expect("no code panics while it holds the lock") = Some((text, by));
    }

    /// Holds each reply back for so long, as a slow network does.
    pub fn delay_replies(&self, delay: Duration) {
        let millis = u64::try_from(delay.as_millis()).expect("a delay of less than an age");
        self.state.reply_delay_ms.store(millis, Ordering::SeqCst);
    }

    /// Breaks all connections; new ones can be made. What was held back until now does not get through.
    pub fn reset(&self) {
        // One that is about to look whether its gate is shut finds that it is silent, whatever is opened after this.
        self.half_open();
        self.state.first_whole.send_replace(self.state.first_heard.load(Ordering::SeqCst));
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn accept(listener: TcpListener, state: Arc<State>) {
    let mut connections = JoinSet::new(); // Aborts them when it is dropped.
    while let Ok((client, _)) = listener.accept().await {
        connections.spawn(connect(client, Arc::clone(&state)));
        while connections.try_join_next().is_some() {}
    }
}

async fn connect(mut client: TcpStream, state: Arc<State>) -> io::Result<()> {
    let number = state.connections.fetch_add(1, Ordering::SeqCst);
    let is_silent = || number < state.first_heard.load(Ordering::SeqCst);
    let mut server = TcpStream::connect(&state.server).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;

    let (mut from_client, mut to_client) = client.split();
    let (mut from_server, mut to_server) = server.split();
    let server_spoke_last = AtomicBool::new(true);
    let (requests_gates, replies_gates) = ([&state.stalled], [&state.stalled, &state.holds_replies]);
    let requested = |request: &mut [u8]| {
        // Asked before its text is reported, so that a `reset` after the report does not keep it from the server.
        let passes = !is_silent();
        if server_spoke_last.swap(false, Ordering::SeqCst) {
            state.round_trips.fetch_add(1, Ordering::SeqCst);
            if PINGS.contains(&&*request) {
                state.pings.fetch_add(1, Ordering::SeqCst);
            }
        }
        let held = *state.holds_replies_to.lock().expect("no code panics while it holds the lock");
        if held.is_some_and(|it| request.windows(it.len()).any(|part| part == it.as_bytes())) {
            state.holds_replies.send_replace(true);
        }
        let replaced = *state.replaced.lock().expect("no code panics while it holds the lock");
        if let Some((text, by)) = replaced {
            while let Some(at) = request.windows(text.len()).position(|part| part == text.as_bytes()) {
                request[at..at + by.len()].copy_from_slice(by.as_bytes());
            }
        }
        passes
    };
    let requests = pump(&mut from_client, &mut to_server, &requests_gates, requested, || Duration::ZERO);
    let answered = |_: &mut [u8]| {
        server_spoke_last.store(true, Ordering::SeqCst);
        !state.drops_replies.load(Ordering::SeqCst) && !is_silent()
    };
    let delay = || Duration::from_millis(state.reply_delay_ms.load(Ordering::SeqCst));
    let replies = pump(&mut from_server, &mut to_client, &replies_gates, answered, delay);
    let mut first_whole = state.first_whole.subscribe();
    tokio::select! {
        Ok(_) = first_whole.wait_for(|first| number < *first) => {
            client.set_zero_linger()?;
            server.set_zero_linger()?;
        }
        result = async { tokio::try_join!(requests, replies) } => {
            result?;
        }
    }
    Ok(())
}

/// Copies bytes until the end of the stream, unless one of the gates is shut, asking before each burst how long to hold
/// it back and whether to pass it on.
async fn pump(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    gates: &[&watch::Sender<bool>],
    passes: impl Fn(&mut [u8]) -> bool,
    delay: impl Fn() -> Duration,
) -> io::Result<()> {
    let mut buffer = vec![0; 16 * 1024];
    loop {
        let length = from.read(&mut buffer).await?;
        for gate in gates {
            gate.subscribe().wait_for(|shut| !shut).await.expect("BUG: the state has the sender");
        }
        if length == 0 {
            return to.shutdown().await;
        }
        let delay = delay();
        if !delay.is_zero() {
            sleep(delay).await;
        }
        if passes(&mut buffer[..length]) {
            to.write_all(&buffer[..length]).await?;
        }
    }
}
