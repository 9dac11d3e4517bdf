//! The connection to a server, replaced when it breaks or does not answer.

use std::{
    fmt,
    future::poll_fn,
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::Poll,
    time::Duration,
};

use redis::{
    Cmd, Value,
    aio::{ConnectionLike, MultiplexedConnection},
    cmd,
};
use tokio::{
    sync::Mutex as AsyncMutex,
    time::{Instant, timeout},
};

use crate::{
    error::Failure,
    runtime,
    server::{Limits, Server, within},
};

/// For how long a connection is not asked whether it has ended meanwhile, so that a busy one never is.
const FRESH: Duration = Duration::from_millis(10);

/// The connection of a store. Requests of many tasks share it.
pub(crate) struct Connection {
    server: Server,
    limits: Limits,
    socket: Arc<AsyncMutex<Option<Socket>>>,
}

/// One connection. Clones are the same one.
#[derive(Clone)]
struct Socket {
    conn: MultiplexedConnection,
    state: Arc<State>,
}

struct State {
    /// The id of the server's process. Empty if it does not report one.
    run: String,
    is_broken: AtomicBool,
    times: Mutex<Times>,
}

struct Times {
    /// When the last request was sent.
    used: Instant,
    /// When the first request was sent that has had no answer since. `None` if the last request was answered.
    silent_since: Option<Instant>,
}

impl Connection {
    pub(crate) fn new(server: Server, limits: Limits) -> Self {
        Self { server, limits, socket: Arc::default() }
    }

    /// Opens the connection, if there is none. Returns the id of the server's process.
    pub(crate) async fn open(&self) -> Result<String, Failure> {
        Ok(self.current().await?.state.run.clone())
    }

    /// Sends a command, which is made for the id of the server's process, and waits for its answer.
    ///
    /// A connection that ended while it was unused is replaced first. After an error the server may have executed the
    /// command, so it is not sent again.
    pub(crate) async fn query(&self, command: impl Fn(&str) -> Cmd) -> Result<Value, Failure> {
        let socket = self.current().await?;
        let answer = socket.query(&command(&socket.state.run), self.limits).await;
        if answer.as_ref().is_err_and(Failure::ends_connection) {
            socket.state.is_broken.store(true, Ordering::Relaxed);
        }
        answer
    }

    /// The current connection. Opens one, if the last one broke or does not answer.
    async fn current(&self) -> Result<Socket, Failure> {
        within(self.server.patience(self.limits), "waiting for a connection", async {
            let mut place = self.socket.clone().lock_owned().await;
            if let Some(socket) = &*place
                && socket.is_usable(self.limits).await
            {
                return Ok(socket.clone());
            }
            *place = None;
            let (server, limits) = (self.server.clone(), self.limits);
            // A task of its own, so that a caller that goes away, or whose runtime is not driven, does not end or delay
            // what others wait for.
            let opening = runtime::spawn(async move {
                let (conn, run) = server.connect(limits).await?;
                let times = Times { used: Instant::now(), silent_since: None };
                let state = State { run, is_broken: false.into(), times: times.into() };
                let socket = Socket { conn, state: Arc::new(state) };
                *place = Some(socket.clone());
                Ok(socket)
            });
            let opening = opening.map_err(Failure::NoThread)?;
            opening.await.unwrap_or(Err(Failure::Panicked))
        })
        .await
    }
}

impl Socket {
    async fn is_usable(&self, limits: Limits) -> bool {
        let Times { used, silent_since } = *self.state.times();
        let is_silent = silent_since.is_some_and(|it| it.elapsed() > limits.answer);
        let is_broken = self.state.is_broken.load(Ordering::Relaxed);
        !is_silent && !is_broken && (used.elapsed() < FRESH || !self.has_ended().await)
    }

    /// Hands the client a `PING` for whose answer nobody waits. It refuses at once, if the connection has ended.
    ///
    /// With the command itself that could not be told from a server that has executed it and then closed: it is the
    /// same error, which a slow first poll may find, too.
    async fn has_ended(&self) -> bool {
        let mut conn = self.conn.clone();
        let ping = cmd("PING");
        let mut ping = pin!(conn.req_packed_command(&ping));
        poll_fn(|context| Poll::Ready(matches!(ping.as_mut().poll(context), Poll::Ready(Err(_))))).await
    }

    async fn query(&self, cmd: &Cmd, limits: Limits) -> Result<Value, Failure> {
        let mut conn = self.conn.clone();
        self.state.sent();
        match timeout(limits.answer, conn.req_packed_command(cmd)).await {
            Ok(answer) => {
                let answer = answer.and_then(Value::extract_error).map_err(Failure::from);
                if !answer.as_ref().is_err_and(Failure::ends_connection) {
                    self.state.answered();
                }
                answer
            }
            Err(_) => Err(Failure::silent("answering", limits.answer)),
        }
    }
}

impl State {
    fn sent(&self) {
        let mut times = self.times();
        let now = Instant::now();
        times.used = now;
        times.silent_since.get_or_insert(now);
    }

    fn answered(&self) {
        self.times().silent_since = None;
    }

    /// Ignores poisoning: no code panics while it holds the lock.
    fn times(&self) -> MutexGuard<'_, Times> {
        self.times.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("server", &self.server).field("limits", &self.limits).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufReader, Write},
        net::{TcpListener, TcpStream},
        sync::{Arc, Mutex},
        thread,
    };

    use redis::{Client, Parser};
    use tokio::time::sleep;

    use super::*;

    const LIMITS: Limits = Limits { connect: Duration::from_mins(1), answer: Duration::from_mins(1) };

    /// The commands that a server received, but for those with which a client begins, and the connections that it had.
    #[derive(Debug, Default, PartialEq, Eq)]
    struct Received {
        commands: Vec<String>,
        connections: usize,
    }

    /// A server that closes the connection after `BREAK` and after the answer to `LEAVE`, refuses `REFUSE`, never
    /// answers `WAIT`, and answers all else.
    fn server() -> (Server, Arc<Mutex<Received>>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let client =
            Client::open(format!("redis://{}/", listener.local_addr().expect("an address"))).expect("a client");
        let received = Arc::<Mutex<Received>>::default();
        let shared = received.clone();
        thread::spawn(move || {
            for socket in listener.incoming().map_while(Result::ok) {
                shared.lock().unwrap().connections += 1;
                let shared = shared.clone();
                thread::spawn(move || serve(&socket, &shared));
            }
        });
        (client.into(), received)
    }

    fn serve(mut socket: &TcpStream, received: &Mutex<Received>) {
        let (mut parser, mut reader) = (Parser::new(), BufReader::new(socket));
        while let Ok(command) = parser.parse_value(&mut reader) {
            let words: Vec<String> = redis::from_redis_value(command).expect("words");
            let answer = match &*words[0] {
                "INFO" => "$5\r\nx:y\r\n\r\n",
                "CLIENT" | "HELLO" | "PING" => "+OK\r\n",
                name => {
                    received.lock().unwrap().commands.push(name.to_owned());
                    match name {
                        "BREAK" => return,
                        "WAIT" => continue,
                        "REFUSE" => "-ERR refused\r\n",
                        _ => "+OK\r\n",
                    }
                }
            };
            socket.write_all(answer.as_bytes()).expect("it is read");
            if words[0] == "LEAVE" {
                return;
            }
        }
    }

    async fn send(connection: &Connection, name: &str) -> Result<Value, Failure> {
        connection.query(|_| cmd(name)).await
    }

    #[tokio::test]
    async fn a_command_that_may_have_been_executed_is_not_sent_again() {
        let (server, received) = server();
        let connection = Connection::new(server, LIMITS);
        for name in ["BREAK", "REFUSE"] {
            assert!(send(&connection, name).await.is_err(), "{name}");
        }
        let state = connection.current().await.expect("it is open").state;
        assert!(state.times().silent_since.is_none(), "a refusal is an answer");
        send(&connection, "OTHER").await.expect("it is answered");
        assert_eq!(received.lock().unwrap().commands, ["BREAK", "REFUSE", "OTHER"]);
    }

    #[tokio::test]
    async fn a_connection_that_ended_while_it_was_unused_is_replaced() {
        let (server, received) = server();
        let connection = Connection::new(server, LIMITS);
        let names = ["OTHER", "LEAVE", "OTHER"];
        for name in names {
            send(&connection, name).await.expect("it is answered");
            sleep(50 * FRESH).await;
        }
        let commands = names.map(str::to_owned).into();
        assert_eq!(*received.lock().unwrap(), Received { commands, connections: 2 });
    }

    #[tokio::test]
    async fn a_command_that_waits_for_its_answer_ends_no_connection() {
        let (server, received) = server();
        let connection = Arc::new(Connection::new(server, LIMITS));
        let waiting = tokio::spawn({
            let connection = connection.clone();
            async move { send(&connection, "WAIT").await }
        });
        while received.lock().unwrap().commands.is_empty() {
            tokio::task::yield_now().await;
        }
        let state = connection.current().await.expect("it is open").state;
        assert!(state.times().silent_since.is_some());
        assert_eq!(received.lock().unwrap().connections, 1);
        waiting.abort();
    }

    #[tokio::test]
    async fn a_script_that_failed_is_not_sent_again_as_a_text() {
        let (server, _) = server();
        let connection = Connection::new(server, LIMITS);
        let sent = Mutex::new(0);
        let scripts = crate::script::Scripts::of(crate::layout::Layout::Token);
        let refused = scripts.renew.run(&connection, |call, _| {
            *sent.lock().unwrap() += 1;
            *call = cmd("REFUSE");
        });
        assert!(refused.await.is_err());
        assert_eq!(sent.into_inner().unwrap(), 1);
    }
}
