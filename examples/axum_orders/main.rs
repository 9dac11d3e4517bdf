//! A web service whose handlers carry `#[with_lock]`, and a client that does its worst to it.
//!
//! ```text
//! cargo run --example axum_orders -- --demo               # the service and the client, in one process
//! cargo run --example axum_orders                         # the service alone, on 127.0.0.1:3000
//! cargo run --example axum_orders -- --client 127.0.0.1:3000
//! curl -i -X POST 127.0.0.1:3000/orders/42
//! curl -i -X POST 127.0.0.1:3000/items/1/take
//! curl -i 127.0.0.1:3000/items
//! ```
//!
//! `DATABASE_URL` names the database; without it, a temporary SQLite file is used. The same code runs on PostgreSQL:
//!
//! ```text
//! DATABASE_URL=postgres://user:password@localhost/shop cargo run --example axum_orders --features orders-on-postgres
//! ```
//!
//! A client that disconnects makes axum drop the handler, wherever it is waiting. Its transaction is rolled back then,
//! and its lock is free.

mod client;

use std::{env, net::SocketAddr, time::Duration};

use anyhow::{Context, Result};
use axum::{
    Json, Router,
    extract::{Path, State},
    http::{StatusCode, header::RETRY_AFTER},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use clap::Parser;
use lockkit::with_lock;
use serde::{Deserialize, Serialize};
use sqlx::{Pool, migrate};
use tokio::{net::TcpListener, time::sleep};

#[cfg(not(feature = "orders-on-postgres"))]
type Db = sqlx::Sqlite;
#[cfg(feature = "orders-on-postgres")]
type Db = sqlx::Postgres;

#[derive(Debug, Clone)]
struct Shop {
    db: Pool<Db>,
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
            Self::Lock(lockkit::Error::NoSuchRow { .. }) => StatusCode::NOT_FOUND.into_response(),
            Self::Lock(err) if err.is_contended() || err.is_transient() => {
                (StatusCode::SERVICE_UNAVAILABLE, [(RETRY_AFTER, "1")], "busy, try again").into_response()
            }
            Self::Lock(_) | Self::Database(_) => {
                eprintln!("{:#}", anyhow::Error::new(self));
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

    let folder = tempfile::tempdir()?;
    let url = env::var("DATABASE_URL")
        .unwrap_or_else(|_| format!("sqlite://{}?mode=rwc", folder.path().join("orders.db").display()));
    let db = Pool::<Db>::connect(&url).await.with_context(|| {
        format!("cannot connect to DATABASE_URL; this build is for {}", <Db as sqlx::Database>::NAME)
    })?;
    // lockkit keeps a history of its own, so its migrations and the application's do not meet.
    lockkit::migrate(&db).await?;
    migrate!("axum_orders/migrations").run(&db).await?;

    let app = Router::new()
        .route("/orders/{user_id}", post(order))
        .route("/items/{item_id}/take", post(take))
        .route("/items", get(items))
        .with_state(Shop { db: db.clone() });
    if args.demo {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let service = listener.local_addr()?;
        tokio::spawn(async move { axum::serve(listener, app).await });
        return client::run(service).await;
    }
    let listener = TcpListener::bind(args.listen).await?;
    println!("listening on http://{}, with {}", listener.local_addr()?, <Db as sqlx::Database>::NAME);
    axum::serve(listener, app).with_graceful_shutdown(asked_to_stop()).await?;
    db.close().await;
    println!("stopped; every request that was under way has been answered");
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
