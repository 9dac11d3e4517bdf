//! One process of the service: it takes payments over HTTP, and knows nothing of the faults.

use std::process;
use std::time::Duration;

use anyhow::{Result, bail};
use axum::extract::{Path, State};
use axum::http::{HeaderValue, StatusCode, header::LOCATION};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use clap::{Args, ValueEnum};
use lockkit_axum::{IDEMPOTENT_REPLAYED, IdempotencyKey, LockError};
use sqlx::{Database, Pool, pool::PoolOptions};
use support::{MariaDb, MySql, Postgres, Sqlite};
use tokio::net::TcpListener;
use tokio::time::sleep;

use crate::rig::Rig;

/// Who sees to it that a key is charged once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Handler {
    /// `IdempotencyKey` of `lockkit-axum`.
    Key,
    /// Control: looks for the answer; if there is none, charges, and then stores the answer.
    ByHand,
}

impl Handler {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Key => "`IdempotencyKey`",
            Self::ByHand => "control: check, then insert",
        }
    }
}

#[derive(Args, Clone, Debug)]
pub(crate) struct ServiceArgs {
    #[arg(long)]
    server: String,
    #[arg(long)]
    url: String,
    #[arg(long)]
    handler: Handler,
    /// Transactions follow each other on a connection.
    #[arg(long)]
    reuse: bool,
}

/// The tables of the payments, and of the answers of the control.
pub(super) const TABLES: [&str; 2] = [
    "CREATE TABLE payment (id BIGINT NOT NULL PRIMARY KEY, name VARCHAR(40) NOT NULL, cents BIGINT NOT NULL)",
    "CREATE TABLE receipt (name VARCHAR(40) NOT NULL PRIMARY KEY, payment BIGINT NOT NULL)",
];

/// Connections of a process.
const CONNECTIONS: u32 = 8;
/// How long a request waits for another one with its key, and then gets 409.
const WAIT: Duration = Duration::from_millis(500);

/// Serves until it is killed, and says where.
pub(crate) async fn run(args: ServiceArgs) -> Result<()> {
    // axum would go on after a panic in a handler.
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        process::abort();
    }));
    match args.server.as_str() {
        Postgres::CODE => listen::<Postgres>(args).await,
        MariaDb::CODE => listen::<MariaDb>(args).await,
        MySql::CODE => listen::<MySql>(args).await,
        Sqlite::CODE => listen::<Sqlite>(args).await,
        other => bail!("{other} is not a server"),
    }
}

async fn listen<S: Rig>(args: ServiceArgs) -> Result<()> {
    let ServiceArgs { server: _, url, handler, reuse } = args;
    let options = PoolOptions::<S::DB>::new().max_connections(CONNECTIONS).acquire_timeout(Duration::from_secs(1));
    let pool = options.connect_lazy(&url)?;
    if reuse {
        lockkit::dialect::reuse_connections(&pool);
    }
    let route = match handler {
        Handler::Key => post(pay::<S>),
        Handler::ByHand => post(pay_by_hand::<S>),
    };
    let app = Router::new().route("/users/{user}/payments", route).with_state(pool);
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    println!("{}", listener.local_addr()?);
    Ok(axum::serve(listener, app).await?)
}

async fn pay<S: Rig>(
    Path(user): Path<u32>,
    key: IdempotencyKey,
    State(pool): State<Pool<S::DB>>,
    Json(cents): Json<i64>,
) -> Result<Response, PayError> {
    let name = key.as_str().to_owned();
    let request = key.for_user(user).request(&cents).wait(WAIT);
    request
        .run(&pool, async |tx| {
            let payment = fastrand::i64(1..1 << 53);
            S::execute(&mut *tx, &charge(payment, &name, cents)).await?;
            takes_a_while().await;
            Ok::<_, PayError>(receipt(payment, &name, cents))
        })
        .await
}

async fn pay_by_hand<S: Rig>(
    Path(_): Path<u32>,
    key: IdempotencyKey,
    State(pool): State<Pool<S::DB>>,
    Json(cents): Json<i64>,
) -> Result<Response, PayError> {
    let name = key.as_str();
    let mut conn = pool.acquire().await?;
    let stored = format!("SELECT payment FROM receipt WHERE name = '{name}'");
    if let Some(payment) = S::fetch_i64(&mut conn, &stored).await? {
        let mut answer = receipt(payment, name, cents);
        answer.headers_mut().insert(IDEMPOTENT_REPLAYED, HeaderValue::from_static("true"));
        return Ok(answer);
    }
    let payment = fastrand::i64(1..1 << 53);
    committed::<S>(&mut conn, &charge(payment, name, cents)).await?;
    takes_a_while().await;
    committed::<S>(&mut conn, &format!("INSERT INTO receipt VALUES ('{name}', {payment})")).await?;
    Ok(receipt(payment, name, cents))
}

/// Runs a statement in a transaction, in one message.
async fn committed<S: Rig>(conn: &mut <S::DB as Database>::Connection, sql: &str) -> sqlx::Result<()> {
    let begin = if S::HAS_SERVER { "BEGIN" } else { "BEGIN IMMEDIATE" };
    let done = S::execute(conn, &format!("{begin}; {sql}; COMMIT")).await;
    if done.is_err() {
        // Also where there is nothing to roll back.
        drop(S::execute(conn, "ROLLBACK").await);
    }
    done.map(drop)
}

fn charge(payment: i64, name: &str, cents: i64) -> String {
    format!("INSERT INTO payment VALUES ({payment}, '{name}', {cents})")
}

/// What the client gets. The payment has a random number, so another one would be another answer.
fn receipt(payment: i64, name: &str, cents: i64) -> Response {
    let location = [(LOCATION, format!("/payments/{payment}"))];
    let body = serde_json::json!({ "payment": payment, "key": name, "cents": cents, "note": "Grüße, \u{1f512} \"\\" });
    (StatusCode::CREATED, location, Json(body)).into_response()
}

/// Stands for the rest of the work.
async fn takes_a_while() {
    sleep(Duration::from_micros(fastrand::u64(0..6_000))).await;
}

#[derive(Debug, thiserror::Error)]
enum PayError {
    #[error(transparent)]
    Lock(#[from] lockkit::Error),
    #[error(transparent)]
    Database(#[from] sqlx::Error),
}

impl IntoResponse for PayError {
    fn into_response(self) -> Response {
        match self {
            Self::Lock(err) => LockError(err).into_response(),
            Self::Database(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        }
    }
}
