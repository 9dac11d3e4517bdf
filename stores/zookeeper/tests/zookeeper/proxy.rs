//! A proxy that cuts connections, and holds back or swallows what the server says.

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::watch,
};

/// What becomes of the answers of the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answers {
    Pass,
    /// They pass later.
    Wait,
    /// They never arrive.
    Vanish,
}

/// A proxy in front of one server.
#[derive(Debug)]
pub(crate) struct Proxy {
    port: u16,
    requests: watch::Sender<Answers>,
    answers: watch::Sender<Answers>,
    cuts: watch::Sender<u64>,
}

impl Proxy {
    /// A proxy in front of this server, on a port of its own.
    pub(crate) async fn to(server: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let port = listener.local_addr().expect("an address").port();
        let (requests, answers) = (watch::Sender::new(Answers::Pass), watch::Sender::new(Answers::Pass));
        let cuts = watch::Sender::new(0);
        let proxy = Self { port, requests: requests.clone(), answers: answers.clone(), cuts: cuts.clone() };
        let server = server.to_owned();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let Ok(server) = TcpStream::connect(&server).await else { continue };
                let (requests, answers, mut cut) = (requests.subscribe(), answers.subscribe(), cuts.subscribe());
                tokio::spawn(async move {
                    let (from_client, to_client) = client.into_split();
                    let (from_server, to_server) = server.into_split();
                    tokio::select! {
                        () = pass(from_client, to_server, requests) => {}
                        () = pass(from_server, to_client, answers) => {}
                        _ = cut.changed() => {}
                    }
                });
            }
        });
        proxy
    }

    pub(crate) fn host(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    pub(crate) fn answers(&self, become_of_them: Answers) {
        self.answers.send_replace(become_of_them);
    }

    /// Nothing passes in either direction until it is joined again. Connections stay open.
    pub(crate) fn part(&self) {
        self.requests.send_replace(Answers::Wait);
        self.answers.send_replace(Answers::Wait);
    }

    /// Everything passes again.
    pub(crate) fn join(&self) {
        self.requests.send_replace(Answers::Pass);
        self.answers.send_replace(Answers::Pass);
    }

    /// Closes all connections.
    pub(crate) fn cut(&self) {
        self.cuts.send_modify(|it| *it += 1);
    }
}

async fn pass(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin, mut what: watch::Receiver<Answers>) {
    let mut buffer = [0; 4096];
    while let Ok(read @ 1..) = from.read(&mut buffer).await {
        let Ok(what) = what.wait_for(|it| *it != Answers::Wait).await.map(|it| *it) else { return };
        if what == Answers::Pass && to.write_all(&buffer[..read]).await.is_err() {
            return;
        }
    }
}
