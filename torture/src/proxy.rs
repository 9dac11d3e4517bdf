//! A TCP proxy between the workers and their server. It knows one word of the protocols: COMMIT.

use std::cell::{Cell, RefCell};
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, spawn_local};
use tokio::time::{Instant, sleep, sleep_until};
use url::Url;

/// What the network does now. Each field is a fault of its own.
#[derive(Clone, Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fault, and any may come with any other")]
pub(crate) struct Weather {
    /// Packets vanish in both directions, for ever on the connections that are open in this weather or made in it.
    pub(crate) half_open: bool,
    /// Requests are held back until this ends.
    pub(crate) requests_stall: bool,
    /// Answers are held back until this ends.
    pub(crate) answers_stall: bool,
    /// Answers vanish; the server has done what it was asked.
    pub(crate) answers_vanish: bool,
    /// New connections are refused.
    pub(crate) refuses: bool,
    /// New connections reach the server this late.
    pub(crate) connects_late: Duration,
    /// Every burst is this late.
    pub(crate) delay: Duration,
    /// Every answer is this much later.
    pub(crate) answers_late: Duration,
    /// One in this many COMMITs does not reach the server: the connection is reset before.
    pub(crate) commits_cut: Option<u32>,
    /// The answer to one in this many COMMITs is lost.
    pub(crate) commits_lost: Option<u32>,
    /// The answer to each COMMIT is this late.
    pub(crate) commits_late: Duration,
}

/// How the connection goes on whose COMMIT's answer is lost.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lost {
    No,
    /// Reset as soon as the server has answered.
    Reset,
    /// Silent for longer than a ttl, then reset.
    Silent,
}

pub(crate) struct Proxy {
    shared: Rc<Shared>,
    url: String,
    accepting: JoinHandle<()>,
}

struct Shared {
    upstream: RefCell<String>,
    weather: watch::Sender<Weather>,
    /// How often all connections were cut.
    cuts: watch::Sender<u32>,
    /// How long a silent connection stays so.
    silence: Duration,
    commits_cut: Cell<u32>,
    commits_lost: Cell<u32>,
}

impl Proxy {
    /// Starts a proxy in front of the server in this URL. Must be called within a `LocalSet`.
    pub(crate) async fn start(url: &str, silence: Duration) -> Result<Self> {
        let mut url = Url::parse(url)?;
        let upstream = format!("{}:{}", url.host_str().context("a host")?, url.port().context("a port")?);
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        url.set_host(Some("127.0.0.1"))?;
        url.set_port(Some(listener.local_addr()?.port())).ok().context("a URL with a port")?;
        let shared = Rc::new(Shared {
            upstream: RefCell::new(upstream),
            weather: watch::Sender::new(Weather::default()),
            cuts: watch::Sender::new(0),
            silence,
            commits_cut: Cell::new(0),
            commits_lost: Cell::new(0),
        });
        let accepting = spawn_local(accept(listener, Rc::clone(&shared)));
        Ok(Self { shared, url: url.into(), accepting })
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    pub(crate) fn set(&self, weather: Weather) {
        self.shared.weather.send_replace(weather);
    }

    /// Resets all connections.
    pub(crate) fn cut(&self) {
        self.shared.cuts.send_modify(|cuts| *cuts += 1);
    }

    /// Leads new connections to another server.
    pub(crate) fn lead_to(&self, address: SocketAddr) {
        *self.shared.upstream.borrow_mut() = address.to_string();
    }

    /// How many COMMITs did not reach the server.
    pub(crate) fn commits_cut(&self) -> u32 {
        self.shared.commits_cut.get()
    }

    /// How many answers to COMMIT were lost.
    pub(crate) fn commits_lost(&self) -> u32 {
        self.shared.commits_lost.get()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
        self.cut();
    }
}

async fn accept(listener: TcpListener, shared: Rc<Shared>) {
    while let Ok((client, _)) = listener.accept().await {
        if shared.weather.borrow().refuses {
            let _ = client.set_zero_linger();
            continue;
        }
        spawn_local(connect(client, Rc::clone(&shared)));
    }
}

/// One connection.
struct Line {
    shared: Rc<Shared>,
    /// Nothing gets through any more.
    dead: Cell<bool>,
    lost: watch::Sender<Lost>,
    /// When the next answer may pass.
    late: Cell<Option<Instant>>,
}

async fn connect(client: TcpStream, shared: Rc<Shared>) -> io::Result<()> {
    let mut cuts = shared.cuts.subscribe();
    let mut weather = shared.weather.subscribe();
    let line =
        Rc::new(Line { shared, dead: Cell::new(false), lost: watch::Sender::new(Lost::No), late: Cell::new(None) });
    if weather.borrow_and_update().half_open {
        // As if the first packet was lost: nobody ever answers.
        let _ = cuts.changed().await;
        return client.set_zero_linger();
    }
    let connects_late = weather.borrow().connects_late;
    sleep(connects_late).await;
    let upstream = line.shared.upstream.borrow().clone();
    let Ok(server) = TcpStream::connect(upstream).await else {
        return client.set_zero_linger();
    };
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let mut lost = line.lost.subscribe();
    let silence = line.shared.silence;
    let mut lost_answer = async || {
        // The sender lives as long as the line.
        let _ = lost.wait_for(|lost| *lost != Lost::No).await;
        match *lost.borrow() {
            // The server answers within this time, and nobody hears it.
            Lost::Reset => sleep(Duration::from_millis(30)).await,
            _ => sleep(silence).await,
        }
    };
    let dies = async {
        while !weather.borrow_and_update().half_open {
            if weather.changed().await.is_err() {
                return;
            }
        }
        line.dead.set(true);
        std::future::pending::<()>().await;
    };
    let pumps = async {
        let (mut requests, mut answers) = ((from_client, to_server), (from_server, to_client));
        let ended = tokio::select! {
            it = pump(&mut requests, &line, true) => it,
            it = pump(&mut answers, &line, false) => it,
        };
        // Whoever is still there hears of the end.
        let _ = (requests.1.shutdown().await, answers.1.shutdown().await);
        ended
    };
    tokio::select! {
        biased;
        // Dropping the halves with what was not read resets the connection.
        _ = cuts.changed() => Ok(()),
        () = lost_answer() => Ok(()),
        () = dies => Ok(()),
        ended = pumps => ended,
    }
}

/// Copies bytes until the end of the stream, as the weather lets them through.
async fn pump((from, to): &mut (OwnedReadHalf, OwnedWriteHalf), line: &Line, requests: bool) -> io::Result<()> {
    let mut weather = line.shared.weather.subscribe();
    let mut buffer = vec![0; 16 * 1024];
    loop {
        let length = from.read(&mut buffer).await;
        if line.dead.get() {
            if matches!(length, Ok(1..)) {
                continue;
            }
            if !requests {
                // The client does not hear that the server is gone.
                std::future::pending::<()>().await;
            }
            // The client's kernel repeats the end of the connection until the server has heard it.
            let _ = weather.wait_for(|weather| !weather.half_open).await;
            return Ok(());
        }
        let length = length?;
        let stalls = |weather: &Weather| if requests { weather.requests_stall } else { weather.answers_stall };
        let now = weather.wait_for(|weather| !stalls(weather)).await.map(|it| it.clone()).unwrap_or_default();
        if !now.delay.is_zero() {
            sleep(now.delay.mul_f64(0.5 + fastrand::f64())).await;
        }
        if !requests && !now.answers_late.is_zero() {
            sleep(now.answers_late).await;
        }
        if length == 0 {
            return Ok(());
        }
        if line.dead.get() {
            continue;
        }
        let is_lost = *line.lost.borrow() != Lost::No;
        if !requests && (now.answers_vanish || is_lost) {
            continue;
        }
        if requests && !now.commits_late.is_zero() && has_commit(&buffer[..length]) {
            line.late.set(Some(Instant::now() + now.commits_late));
        }
        if !requests && let Some(late) = line.late.take() {
            sleep_until(late).await;
        }
        let meets_one = |one_in: Option<u32>| {
            requests && !is_lost && one_in.is_some_and(|it| fastrand::u32(0..it) == 0) && has_commit(&buffer[..length])
        };
        if meets_one(now.commits_cut) {
            line.shared.commits_cut.set(line.shared.commits_cut.get() + 1);
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        if meets_one(now.commits_lost) {
            line.shared.commits_lost.set(line.shared.commits_lost.get() + 1);
            line.lost.send_replace(if fastrand::bool() { Lost::Reset } else { Lost::Silent });
        }
        to.write_all(&buffer[..length]).await?;
    }
}

/// Whether a COMMIT is in it, and not only READ COMMITTED.
fn has_commit(burst: &[u8]) -> bool {
    let tail = |at: usize| burst.get(at + 6..at + 9).is_none_or(|it| !it.eq_ignore_ascii_case(b"TED"));
    (0..burst.len()).any(|at| burst.get(at..at + 6).is_some_and(|it| it.eq_ignore_ascii_case(b"COMMIT")) && tail(at))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_commit_is_seen_in_a_burst() {
        assert!(has_commit(b"Q\0\0\0\x0bCOMMIT\0"));
        assert!(has_commit(b"\x10\0\0\0\x03RELEASE SAVEPOINT a; COMMIT; SET x"));
        assert!(has_commit(b"Q\0\0\0\x0bBEGIN ISOLATION LEVEL READ COMMITTED; COMMIT"));
        assert!(!has_commit(b"Q\0\0\0\x0bBEGIN ISOLATION LEVEL READ COMMITTED\0"));
        assert!(!has_commit(b"Q\0\0\0\x0bROLLBACK\0"));
    }

    #[tokio::test]
    async fn nothing_passes_a_half_open_connection_again_and_new_ones_do_after_the_heal() {
        let local = tokio::task::LocalSet::new();
        local
            .run_until(async {
                let echo = TcpListener::bind("127.0.0.1:0").await.expect("listen");
                let port = echo.local_addr().expect("an address").port();
                spawn_local(async move {
                    while let Ok((mut stream, _)) = echo.accept().await {
                        spawn_local(async move {
                            let (mut from, mut to) = stream.split();
                            let _ = tokio::io::copy(&mut from, &mut to).await;
                        });
                    }
                });
                let proxy = Proxy::start(&format!("postgres://127.0.0.1:{port}/x"), Duration::from_secs(9)).await;
                let proxy = proxy.expect("a proxy");
                let address = Url::parse(proxy.url()).expect("a URL").port().map(|it| ("127.0.0.1", it));
                let address = address.expect("a port");
                let mut old = TcpStream::connect(address).await.expect("connect");
                assert!(echoes(&mut old).await);
                proxy.set(Weather { half_open: true, ..Weather::default() });
                assert!(!echoes(&mut old).await);
                let mut during = TcpStream::connect(address).await.expect("connect");
                assert!(!echoes(&mut during).await);
                proxy.set(Weather::default());
                assert!(!echoes(&mut old).await);
                assert!(!echoes(&mut during).await);
                let mut new = TcpStream::connect(address).await.expect("connect");
                assert!(echoes(&mut new).await);
            })
            .await;
    }

    async fn echoes(stream: &mut TcpStream) -> bool {
        let mut byte = [0];
        stream.write_all(b"x").await.expect("write");
        tokio::time::timeout(Duration::from_millis(300), stream.read_exact(&mut byte)).await.is_ok()
    }
}
