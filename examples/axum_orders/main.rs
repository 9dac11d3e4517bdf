//! A web service with everything on, and a client that does its worst to it: handlers under `#[with_lock]`, a handler
//! under a lease by `LeaseLayer`, payments by `Idempotency-Key`, `/readyz`, `/metrics`, traces, and an orderly end.
//!
//! ```text
//! cargo run --example axum_orders -- --demo               # the service and the client, in one process
//! cargo run --example axum_orders                         # the service alone, on 127.0.0.1:3000
//! cargo run --example axum_orders -- --client 127.0.0.1:3000
//! curl -i -X POST 127.0.0.1:3000/orders/42
//! curl -i -X POST 127.0.0.1:3000/items/1/take
//! curl -i -X POST 127.0.0.1:3000/items/1/count
//! curl -i -X POST 127.0.0.1:3000/users/42/payments --json 1999 -H 'Idempotency-Key: "8e03978e"'
//! curl -i 127.0.0.1:3000/items
//! curl -i 127.0.0.1:3000/readyz
//! curl -s 127.0.0.1:3000/metrics | grep lockkit
//! ```
//!
//! `DATABASE_URL` names the database; without it, a temporary SQLite file is used. The same code runs on PostgreSQL:
//!
//! ```text
//! DATABASE_URL=postgres://user:password@localhost/shop cargo run --example axum_orders --features orders-on-postgres
//! ```
//!
//! `LOG=debug` prints more of what happens, with each lock that was held and for how long.
//!
//! A client that disconnects makes axum drop the handler, wherever it is waiting. Its transaction is rolled back then,
//! and its lock is free. At SIGTERM or ctrl-c the service finishes its requests, gives back its leases, and ends.

mod client;

use std::{env, net::SocketAddr, time::Duration};

use anyhow::{Context, Result};
use axum::{
    Json, Router,
    extract::{Path, State},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use clap::Parser;
use lockkit::{Leases, with_lock};
use lockkit_axum::{Held, IdempotencyKey, LeaseLayer, LockError};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use rustix::process::{Signal, getpid, kill_process};
use serde::{Deserialize, Serialize};
use sqlx::{Pool, migrate};
use tokio::{net::TcpListener, time::sleep};
use tracing_subscriber::{filter::LevelFilter, fmt::format::FmtSpan};

#[cfg(not(feature = "orders-on-postgres"))]
type Db = sqlx::Sqlite;
#[cfg(feature = "orders-on-postgres")]
type Db = sqlx::Postgres;

#[derive(Debug, Clone)]
struct Shop {
    db: Pool<Db>,
    leases: Leases<Pool<Db>>,
}

#[derive(Debug, Serialize)]
struct Order {
    user_id: i64,
}

#[derive(Debug, Serialize, Deserialize, sqlx::FromRow)]
struct Product {
    item_id: i64,
    name: String,
    stock: i64,
}

/// `POST /orders/{user_id}`: one order for each user. There is no row to lock yet, so the user's name is locked.
#[with_lock(named, on = &shop.db, key = "order:{user_id}", wait = "5s", tx = tx)]
async fn order(State(shop): State<Shop>, Path(user_id): Path<i64>) -> Result<(StatusCode, Json<Order>), ApiError> {
    let orders: i64 = sqlx::query_scalar("SELECT COUNT(*) FROM t_orders WHERE user_id = $1")
        .bind(user_id)
        .fetch_one(&mut *tx)
        .await?;
    if orders > 0 {
        return Err(ApiError::OrderedBefore);
    }
    sqlx::query("INSERT INTO t_orders (user_id) VALUES ($1)").bind(user_id).execute(&mut *tx).await?;
    charge(user_id).await;
    Ok((StatusCode::CREATED, Json(Order { user_id })))
}

/// `POST /items/{item_id}/take`: one piece, as long as there is one.
#[with_lock(row, on = &shop.db, table = "t_catalogue", by(item_id = item_id), wait = "5s", tx = tx)]
async fn take(State(shop): State<Shop>, Path(item_id): Path<i64>) -> Result<Json<Product>, ApiError> {
    let mut item: Product = sqlx::query_as("SELECT item_id, name, stock FROM t_catalogue WHERE item_id = $1")
        .bind(item_id)
        .fetch_one(&mut *tx)
        .await?;
    if item.stock == 0 {
        return Err(ApiError::SoldOut);
    }
    item.stock -= 1;
    sqlx::query("UPDATE t_catalogue SET stock = $1 WHERE item_id = $2")
        .bind(item.stock)
        .bind(item_id)
        .execute(&mut *tx)
        .await?;
    Ok(Json(item))
}

/// `POST /users/{user_id}/payments`: done once for each key of the user, however often the client sends it.
///
/// A real service takes the user from the session, not from the path.
async fn pay(
    State(shop): State<Shop>,
    Path(user_id): Path<i64>,
    key: IdempotencyKey,
    Json(cents): Json<i64>,
) -> Result<Response, ApiError> {
    key.for_user(user_id)
        .request(&cents)
        .run(&shop.db, async |tx| {
            let payment_id = fastrand::i64(1..1 << 53);
            sqlx::query("INSERT INTO t_payments (payment_id, user_id, cents) VALUES ($1, $2, $3)")
                .bind(payment_id)
                .bind(user_id)
                .bind(cents)
                .execute(&mut **tx)
                .await?;
            Ok::<_, ApiError>((StatusCode::CREATED, Json(payment_id)))
        })
        .await
}

/// `POST /items/{item_id}/count`: goes to the warehouse, which takes too long for a transaction. The `LeaseLayer` lets
/// one request in at a time. The result is written only if this one still has the lease.
async fn count(
    State(shop): State<Shop>,
    Path(item_id): Path<i64>,
    Held(lease): Held<Pool<Db>>,
) -> Result<StatusCode, ApiError> {
    sleep(Duration::from_millis(10)).await;
    let mut tx = lockkit::begin(&shop.db).await?;
    sqlx::query("UPDATE t_catalogue SET counted = counted + 1 WHERE item_id = $1")
        .bind(item_id)
        .execute(&mut *tx)
        .await?;
    lease.commit(tx).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// `GET /readyz`: whether to send requests here. It asks nobody, so that a slow database does not make it slow.
async fn readyz(State(shop): State<Shop>) -> StatusCode {
    if shop.leases.health().is_ready() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

/// `GET /items`: reading needs no lock.
async fn items(State(shop): State<Shop>) -> Result<Json<Vec<Product>>, ApiError> {
    let items =
        sqlx::query_as("SELECT item_id, name, stock FROM t_catalogue ORDER BY item_id").fetch_all(&shop.db).await?;
    Ok(Json(items))
}

/// Stands for a call to a payment service. A client that disconnects now leaves no order and no lock behind.
async fn charge(_user_id: i64) {
    sleep(Duration::from_millis(20)).await;
}

#[derive(Debug, thiserror::Error)]
enum ApiError {
    #[error("this user has ordered before")]
    OrderedBefore,
    #[error("sold out")]
    SoldOut,
    #[error(transparent)]
    Lock(#[from] lockkit::Error),
    #[error(transparent)]
    Database(#[from] sqlx::Error),
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        match self {
            Self::OrderedBefore => (StatusCode::CONFLICT, self.to_string()).into_response(),
            Self::SoldOut => (StatusCode::GONE, self.to_string()).into_response(),
            // 409 where another request is in the way, 404 without the row, 503 without the database, …
            Self::Lock(err) => LockError(err).into_response(),
            Self::Database(err) => {
                tracing::error!(error = &err as &dyn std::error::Error, "request failed");
                StatusCode::INTERNAL_SERVER_ERROR.into_response()
            }
        }
    }
}

/// Orders and takes items over HTTP, under locks.
#[derive(Debug, Parser)]
#[command(name = "axum_orders")]
struct Args {
    /// Where to listen
    #[arg(long, default_value = "127.0.0.1:3000")]
    listen: SocketAddr,

    /// Be the client of a service that listens here
    #[arg(long, value_name = "ADDRESS")]
    client: Option<SocketAddr>,

    /// Run the service and the client, then stop
    #[arg(long)]
    demo: bool,
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    if let Some(service) = args.client {
        return client::run(service).await;
    }

    // Each span of lockkit is printed when it ends, with its time: the wait for a lock, and how long it was held.
    let level = env::var("LOG").ok().and_then(|it| it.parse().ok()).unwrap_or(LevelFilter::WARN);
    tracing_subscriber::fmt().with_max_level(level).with_span_events(FmtSpan::CLOSE).init();
    // Before anything is counted.
    let metrics = PrometheusBuilder::new().set_buckets(&[0.001, 0.01, 0.1, 1.0, 10.0])?.install_recorder()?;

    let folder = tempfile::tempdir()?;
    let url = env::var("DATABASE_URL")
        .unwrap_or_else(|_| format!("sqlite://{}?mode=rwc", folder.path().join("orders.db").display()));
    let db = Pool::<Db>::connect(&url).await.with_context(|| {
        format!("cannot connect to DATABASE_URL; this build is for {}", <Db as sqlx::Database>::NAME)
    })?;
    // lockkit keeps a history of its own, so its migrations and the application's do not meet.
    lockkit::migrate(&db).await?;
    migrate!("axum_orders/migrations").run(&db).await?;
    let shop = Shop { leases: Leases::new(db.clone()), db };

    if !args.demo {
        let listener = TcpListener::bind(args.listen).await?;
        println!("listening on http://{}, with {}", listener.local_addr()?, <Db as sqlx::Database>::NAME);
        return serve(listener, shop, metrics).await;
    }
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let service = listener.local_addr()?;
    let serving = tokio::spawn(serve(listener, shop, metrics));
    client::run(service).await?;
    // As the orchestrator does.
    kill_process(getpid(), Signal::TERM)?;
    serving.await?
}

/// Serves until it is asked to stop, and then ends in order: requests, leases, connections.
async fn serve(listener: TcpListener, shop: Shop, metrics: PrometheusHandle) -> Result<()> {
    let Shop { db, leases } = shop.clone();
    let one_count_at_a_time = {
        let leases = leases.clone();
        LeaseLayer::new(move |Path(item_id): Path<i64>| {
            leases.lease(lockkit::key!("count:{item_id}")).wait(Duration::from_secs(5))
        })
    };
    let app = Router::new()
        .route("/orders/{user_id}", post(order))
        .route("/users/{user_id}/payments", post(pay))
        .route("/items/{item_id}/take", post(take))
        .route("/items/{item_id}/count", post(count).layer(one_count_at_a_time))
        .route("/items", get(items))
        .route("/readyz", get(readyz))
        .route("/metrics", get(async move || metrics.render()))
        .with_state(shop);
    axum::serve(listener, app).with_graceful_shutdown(asked_to_stop()).await?;
    leases.close().await?;
    db.close().await;
    println!("stopped; every request that was under way has been answered, and no lease is left");
    Ok(())
}

/// Resolves on ctrl-c, and where there is such a thing on SIGTERM.
async fn asked_to_stop() {
    let interrupted = tokio::signal::ctrl_c();
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        if let Ok(mut terminated) = signal(SignalKind::terminate()) {
            tokio::select! {
                _ = interrupted => {}
                _ = terminated.recv() => {}
            }
            return;
        }
    }
    let _ = interrupted.await;
}
