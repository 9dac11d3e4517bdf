//! The members of a cluster as its clients see them: where they are, and what each says of itself.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result};
use sqlx::{Connection as _, MySqlConnection, PgConnection};
use support::{MySql, Postgres, Server as _};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::cluster::{Engine, group, patroni};

/// How long a member has to answer.
const ANSWER: Duration = Duration::from_secs(3);

pub(crate) struct Members {
    pub(super) engine: Engine,
    pub(super) addresses: Vec<IpAddr>,
}

impl Members {
    pub(crate) fn all(&self) -> Vec<u8> {
        (0..).zip(&self.addresses).map(|(member, _)| member).collect()
    }

    pub(crate) fn others(&self, member: u8) -> Vec<u8> {
        self.all().into_iter().filter(|it| *it != member).collect()
    }

    /// Where a member listens for clients.
    pub(crate) fn socket(&self, member: u8) -> SocketAddr {
        let port = if self.engine.is_patroni() { patroni::PORT } else { group::PORT };
        (self.addresses[usize::from(member)], port).into()
    }

    /// The administrator's URL of a database by way of this member.
    pub(crate) fn url(&self, member: u8, database: &str) -> String {
        let scheme = if self.engine.is_patroni() { "postgres" } else { "mysql" };
        format!("{scheme}://root@{}/{database}", self.socket(member))
    }

    /// Whether a member says that it leads, and takes writes.
    pub(crate) async fn leads(&self, member: u8) -> bool {
        if self.engine.is_patroni() {
            self.patroni(member, "GET /primary").await == Some(200)
        } else {
            self.role(member).await.is_some_and(|it| it == "PRIMARY")
        }
    }

    /// Whether this member of a group sees fewer than all.
    pub(crate) async fn has_lost_one(&self, member: u8) -> bool {
        let ask = async {
            let mut conn = MySqlConnection::connect(&self.url(member, "")).await.ok()?;
            let sql = "SELECT COUNT(*) FROM performance_schema.replication_group_members";
            let seen = MySql::fetch_i64(&mut conn, sql).await.ok()?;
            let _ = conn.close().await;
            seen
        };
        let seen = timeout(ANSWER, ask).await.ok().flatten().and_then(|it| usize::try_from(it).ok());
        seen.is_some_and(|it| it < self.addresses.len())
    }

    /// Whether the leader of `PostgreSQL` has all others as replicas, one of them synchronous if one is to be.
    pub(crate) async fn are_replicas(&self) -> bool {
        self.are_streamed_to().await && (self.engine != Engine::PatroniSync || self.have_an_heir().await)
    }

    /// Whether Patroni has noted which member is synchronous. Without that note no other one may lead, and the server
    /// knows it earlier.
    async fn have_an_heir(&self) -> bool {
        for member in self.all() {
            if self.patroni(member, "GET /synchronous").await == Some(200) {
                return true;
            }
        }
        false
    }

    async fn are_streamed_to(&self) -> bool {
        let ask = async {
            let leader = self.leader_among(&self.all()).await?;
            let mut conn = PgConnection::connect(&self.url(leader, "postgres")).await.ok()?;
            let sql = "SELECT count(*) * 10 + count(*) FILTER (WHERE sync_state = 'sync')
                       FROM pg_stat_replication WHERE state = 'streaming'";
            let found = Postgres::fetch_i64(&mut conn, sql).await.ok()?;
            let _ = conn.close().await;
            found
        };
        let all = i64::try_from(self.addresses.len()).unwrap_or(i64::MAX) - 1;
        let synchronous = i64::from(self.engine == Engine::PatroniSync);
        timeout(ANSWER, ask).await.ok().flatten() == Some(all * 10 + synchronous)
    }

    /// The first of these members that leads.
    pub(crate) async fn leader_among(&self, members: &[u8]) -> Option<u8> {
        for member in members {
            if self.leads(*member).await {
                return Some(*member);
            }
        }
        None
    }

    /// Asks a member's Patroni, and returns the code of its answer.
    pub(crate) async fn patroni(&self, member: u8, request: &str) -> Option<u16> {
        let address = SocketAddr::new(self.addresses[usize::from(member)], patroni::REST);
        timeout(ANSWER, status_of(address, request)).await.ok()?.ok()
    }

    /// PRIMARY or SECONDARY, if the member says that it is online.
    async fn role(&self, member: u8) -> Option<String> {
        let ask = async {
            let mut conn = MySqlConnection::connect(&self.url(member, "")).await.ok()?;
            let sql = "SELECT member_role FROM performance_schema.replication_group_members
                       WHERE member_id = @@server_uuid AND member_state = 'ONLINE'";
            let role = MySql::fetch_text(&mut conn, sql).await.ok()?;
            let _ = conn.close().await;
            role
        };
        timeout(ANSWER, ask).await.ok()?
    }
}

/// Sends a request, a method and a path and perhaps a body in JSON, and returns the code of the answer.
async fn status_of(address: SocketAddr, request: &str) -> Result<u16> {
    let mut stream = TcpStream::connect(address).await?;
    let (head, body) = request.split_once('\n').unwrap_or((request, ""));
    let length = body.len();
    let request =
        format!("{head} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer.split(' ').nth(1).context("no status")?.parse()?)
}
