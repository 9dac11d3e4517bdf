//! A proxy that cuts connections, and swallows what the server says.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::watch,
};

/// A proxy in front of one server.
#[derive(Debug)]
pub(crate) struct Proxy {
    port: u16,
    muted: Arc<AtomicBool>,
    cuts: watch::Sender<u64>,
}

impl Proxy {
    /// A proxy in front of this server, on a port of its own.
    pub(crate) async fn to(server: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let port = listener.local_addr().expect("an address").port();
        let (muted, cuts) = (Arc::new(AtomicBool::new(false)), watch::Sender::new(0));
        let (server, is_muted, cut) = (server.to_owned(), muted.clone(), cuts.clone());
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let Ok(server) = TcpStream::connect(&server).await else { continue };
                let (is_muted, mut cut) = (is_muted.clone(), cut.subscribe());
                tokio::spawn(async move {
                    let (from_client, to_client) = client.into_split();
                    let (from_server, to_server) = server.into_split();
                    tokio::select! {
                        () = pass(from_client, to_server, || false) => {}
                        () = pass(from_server, to_client, || is_muted.load(Ordering::SeqCst)) => {}
                        _ = cut.changed() => {}
                    }
                });
            }
        });
        Self { port, muted, cuts }
    }

    pub(crate) fn host(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Whether all that the server says is swallowed.
    pub(crate) fn mute(&self, muted: bool) {
        self.muted.store(muted, Ordering::SeqCst);
    }

    /// Closes all connections.
    pub(crate) fn cut(&self) {
        self.cuts.send_modify(|it| *it += 1);
    }
}

async fn pass(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin, is_swallowed: impl Fn() -> bool) {
    let mut buffer = [0; 4096];
    while let Ok(read @ 1..) = from.read(&mut buffer).await {
        if !is_swallowed() && to.write_all(&buffer[..read]).await.is_err() {
            return;
        }
    }
}
