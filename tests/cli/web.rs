//! `lockkit web`: the page without a service.

use std::process::Stdio;

use lockkit::Leases;
use rustix::process::Signal;
use support::{Server, TestDb, on_every_database};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::TcpStream,
};

use crate::{exit_code, lockkit, send, url};

/// The answer to a request for this path, with this name of the machine.
async fn get(address: &str, path: &str, host: &str) -> String {
    let mut stream = TcpStream::connect(address).await.expect("connect");
    let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.expect("send");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("an answer");
    answer
}

on_every_database! {
    async fn the_page_shows_the_leases_to_this_machine_until_it_is_ended<S>(db: TestDb<S>) {
        let lease = Leases::new(db.pool.clone()).lease("nightly").acquire().await.unwrap();
        let mut command = lockkit(&url(&db.url), &["web", "--bind", "127.0.0.1:0"]);
        let mut page = command.stderr(Stdio::piped()).spawn().expect("run lockkit");
        let mut said = BufReader::new(page.stderr.take().expect("a pipe")).lines();
        let said = said.next_line().await.expect("it says").expect("where it is");
        let address = said.strip_prefix("lockkit: http://").and_then(|it| it.strip_suffix('/')).expect("an address");
        let shown = get(address, "/", address).await;
        assert!(shown.starts_with("HTTP/1.1 200") && shown.contains(&lease.fence().to_string()), "{shown}");
        assert!(shown.contains("data-access=\"look\""), "it may not steal: {shown}");
        let sessions = get(address, "/leases.json", address).await;
        assert!(sessions.contains("\"sessions\":{\"lines\":[]"), "{sessions}");
        assert!(get(address, "/", "evil.example").await.starts_with("HTTP/1.1 403"));
        send(&page, Signal::INT);
        assert_eq!(exit_code(&mut page).await, Some(0), "{}", S::NAME);
        lease.release().await.unwrap();
    }
}
