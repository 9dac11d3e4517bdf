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
};

use redis::{
    Cmd, Value,
    aio::{ConnectionLike, MultiplexedConnection},
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
    /// When the first request was sent that has had no answer since. `None` if the last request was answered.
    silent_since: Mutex<Option<Instant>>,
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
    /// A connection that broke while it was unused is replaced first, because the command has not been sent. After
    /// other errors the server may have executed the command.
    pub(crate) async fn query(&self, command: impl Fn(&str) -> Cmd) -> Result<Value, Failure> {
        let mut is_first = true;
        loop {
            let socket = self.current().await?;
            let command = command(&socket.state.run);
            let (answer, was_sent) = socket.query(&command, self.limits).await;
            if let Err(failure) = &answer
                && failure.ends_connection()
            {
                socket.state.is_broken.store(true, Ordering::Relaxed);
                if is_first && !was_sent {
                    is_first = false;
                    continue;
                }
            }
            return answer;
        }
    }

    /// The current connection. Opens one, if the last one broke or does not answer.
    async fn current(&self) -> Result<Socket, Failure> {
        within(self.server.patience(self.limits), "waiting for a connection", async {
            let mut place = self.socket.clone().lock_owned().await;
            if let Some(socket) = &*place
                && socket.is_usable(self.limits)
            {
                return Ok(socket.clone());
            }
            *place = None;
            let (server, limits) = (self.server.clone(), self.limits);
            // A task of its own, so that a caller that goes away, or whose runtime is not driven, does not end or delay
            // what others wait for.
            let opening = runtime::spawn(async move {
                let (conn, run) = server.connect(limits).await?;
                let state = State { run, is_broken: false.into(), silent_since: None.into() };
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
    fn is_usable(&self, limits: Limits) -> bool {
        let is_silent = self.state.silent_since().is_some_and(|it| it.elapsed() > limits.answer);
        !is_silent && !self.state.is_broken.load(Ordering::Relaxed)
    }

    /// Also returns whether the command may have been sent.
    async fn query(&self, cmd: &Cmd, limits: Limits) -> (Result<Value, Failure>, bool) {
        let mut conn = self.conn.clone();
        self.state.silent_since().get_or_insert_with(Instant::now);
        let mut was_sent = false;
        let answer = {
            let mut request = pin!(conn.req_packed_command(cmd));
            // The client refuses at its first poll, if the task that drives the connection has ended. That task has a
            // thread of its own, so a poll that is slow may also find the answer.
            let request = poll_fn(|context| {
                let answer = request.as_mut().poll(context);
                was_sent |= answer.is_pending();
                match answer {
                    Poll::Ready(answer) => Poll::Ready(answer.and_then(Value::extract_error)),
                    Poll::Pending => Poll::Pending,
                }
            });
            timeout(limits.answer, request).await
        };
        match answer {
            Ok(Ok(value)) => {
                self.state.answered();
                (Ok(value), true)
            }
            Ok(Err(err)) => {
                was_sent |= !err.is_io_error();
                let failure = Failure::from(err);
                if !failure.ends_connection() {
                    self.state.answered();
                }
                (Err(failure), was_sent)
            }
            Err(_) => (Err(Failure::silent("answering", limits.answer)), true),
        }
    }
}

impl State {
    fn answered(&self) {
        *self.silent_since() = None;
    }

    /// Ignores poisoning: no code panics while it holds the lock.
    fn silent_since(&self) -> MutexGuard<'_, Option<Instant>> {
        self.silent_since.lock().unwrap_or_else(PoisonError::into_inner)
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
        time::Duration,
    };

    use redis::{Client, Parser, cmd};

    use super::*;

    const LIMITS: Limits = Limits { connect: Duration::from_mins(1), answer: Duration::from_mins(1) };

    /// The commands that a server received, but for those with which a client begins, and the connections that it had.
    #[derive(Debug, Default)]
    struct Received {
        commands: Vec<String>,
        connections: usize,
    }

    /// Longer than a client takes to poll a request for the first time.
    const PAUSE: Duration = Duration::from_millis(200);

    /// A server that closes the connection after `BREAK`, refuses `REFUSE`, never answers `WAIT`, and answers all else.
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
                "CLIENT" | "HELLO" => "+OK\r\n",
                name => {
                    received.lock().unwrap().commands.push(name.to_owned());
                    match name {
                        "BREAK" => return thread::sleep(PAUSE),
                        "WAIT" => continue,
                        "REFUSE" => "-ERR refused\r\n",
                        _ => "+OK\r\n",
                    }
                }
            };
            socket.write_all(answer.as_bytes()).expect("it is read");
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
        assert!(state.silent_since().is_none(), "a refusal is an answer");
        send(&connection, "OTHER").await.expect("it is answered");
        assert_eq!(received.lock().unwrap().commands, ["BREAK", "REFUSE", "OTHER"]);
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
        assert!(state.silent_since().is_some());
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
