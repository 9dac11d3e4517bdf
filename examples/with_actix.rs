//! Actix Web and lockkit: payments that a client may send again, and a handler under a lease, with errors as HTTP
//! answers that name no key and no SQL.
//!
//! ```text
//! DATABASE_URL=postgres://user:password@localhost/shop cargo run --example with_actix
//! curl -i -X POST 127.0.0.1:3000/users/42/payments --json 1999 -H 'Idempotency-Key: 8e03978e'
//! curl -i -X POST 127.0.0.1:3000/items/1/restock
//! ```
//!
//! With `--check` a client sends requests at once, disconnects and repeats them, to these handlers and to naive ones,
//! and counts the rows. The example creates its tables, named `t_…`, in an empty database.

#[path = "actix/check.rs"]
mod check;

use std::{env, time::Duration};

use actix_web::{
    App, HttpRequest, HttpResponse, HttpServer, ResponseError,
    dev::Server,
    http::{StatusCode, header::RETRY_AFTER},
    web,
};
use anyhow::{Context, Result};
use lockkit::{Error, Fault, Idempotent, Leases};
use serde::{Deserialize, Serialize};
use sqlx::{PgConnection, PgPool};
use tokio::time::sleep;

#[derive(Clone)]
struct Shop {
    db: PgPool,
    leases: Leases<PgPool>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Receipt {
    payment_id: i64,
}

/// `POST /users/{user_id}/payments`: done once for each key of the user, however often the client sends it.
///
/// A real service takes the user from the session, not from the path.
async fn pay(
    shop: web::Data<Shop>,
    user_id: web::Path<i64>,
    cents: web::Json<i64>,
    request: HttpRequest,
) -> Result<HttpResponse, ApiError> {
    let key = request.headers().get("idempotency-key").and_then(|it| it.to_str().ok()).ok_or(ApiError::NoKey)?;
    // With the user in it, so that keys of two users never meet. `key!` escapes what the client has sent.
    let paid = Idempotent::key(lockkit::key!("pay:{user_id}:{key}"))
        .request(&*cents) // Err(Mismatch) if the key was used for another request
        .run(&shop.db, async |tx| insert_payment(tx, *user_id, *cents).await)
        .await?;
    let is_before = paid.is_before().to_string();
    Ok(HttpResponse::Created().insert_header(("idempotent-replayed", is_before)).json(paid.into_inner()))
}

/// `POST /items/{item_id}/restock`: one at a time for each item, in all processes. The body is dropped when the lease
/// is lost, and commits only if it still has it.
async fn restock(shop: web::Data<Shop>, item_id: web::Path<i64>) -> Result<HttpResponse, ApiError> {
    let lease = shop.leases.lease(lockkit::key!("restock:{item_id}")).wait(Duration::from_secs(2));
    lease
        .run(async |lease| {
            let stock = stock_after_delivery(&shop.db, *item_id).await?;
            let mut tx = lockkit::begin(&shop.db).await?;
            set_stock(&mut tx, *item_id, stock).await?;
            lease.commit(tx).await?;
            Ok(HttpResponse::NoContent().finish())
        })
        .await
}

async fn insert_payment(conn: &mut PgConnection, user_id: i64, cents: i64) -> Result<Receipt, ApiError> {
    let insert = sqlx::query_scalar("INSERT INTO t_payments (user_id, cents) VALUES ($1, $2) RETURNING payment_id");
    Ok(Receipt { payment_id: insert.bind(user_id).bind(cents).fetch_one(conn).await? })
}

/// Orders a piece from the supplier, which takes too long for a transaction.
async fn stock_after_delivery(db: &PgPool, item_id: i64) -> Result<i64, ApiError> {
    let query = sqlx::query_scalar("SELECT stock FROM t_items WHERE item_id = $1");
    let stock: i64 = query.bind(item_id).fetch_one(db).await?;
    sleep(Duration::from_millis(20)).await;
    Ok(stock + 1)
}

async fn set_stock(conn: &mut PgConnection, item_id: i64, stock: i64) -> Result<(), ApiError> {
    let update = sqlx::query("UPDATE t_items SET stock = $2 WHERE item_id = $1");
    update.bind(item_id).bind(stock).execute(conn).await?;
    Ok(())
}

#[derive(Debug, thiserror::Error)]
enum ApiError {
    #[error("no Idempotency-Key")]
    NoKey,
    #[error(transparent)]
    Lock(#[from] Error),
    #[error(transparent)]
    Database(#[from] sqlx::Error),
}

impl ApiError {
    /// The status, and whether the client may repeat the request a moment later.
    fn answer(&self) -> (StatusCode, bool) {
        match self {
            Self::NoKey | Self::Lock(Error::InvalidKey { .. }) => (StatusCode::BAD_REQUEST, false),
            Self::Lock(err) if err.is_contended() || err.is_conflict() => (StatusCode::CONFLICT, true),
            Self::Lock(Error::Mismatch { .. }) => (StatusCode::UNPROCESSABLE_ENTITY, false),
            // A part of the work may be done.
            Self::Lock(err) if err.is_lost() => (StatusCode::SERVICE_UNAVAILABLE, false),
            Self::Lock(
                Error::Closed { .. }
                | Error::PoolStarved { .. }
                | Error::Database { fault: Fault::Unavailable | Fault::ReadOnly, .. },
            ) => (StatusCode::SERVICE_UNAVAILABLE, true),
            Self::Lock(err) if err.is_transient() => (StatusCode::SERVICE_UNAVAILABLE, true),
            Self::Lock(_) | Self::Database(_) => (StatusCode::INTERNAL_SERVER_ERROR, false),
        }
    }
}

impl ResponseError for ApiError {
    fn status_code(&self) -> StatusCode {
        self.answer().0
    }

    /// The text of the error, which names keys and tables, goes to the log alone.
    fn error_response(&self) -> HttpResponse {
        let (status, may_repeat) = self.answer();
        if status.is_server_error() {
            tracing::error!(error = self as &dyn std::error::Error, "request failed");
        }
        let mut answer = HttpResponse::build(status);
        if may_repeat {
            answer.insert_header((RETRY_AFTER, "1"));
        }
        answer.body(status.canonical_reason().unwrap_or_default())
    }
}

fn serve(shop: &Shop, port: u16) -> Result<(Server, u16)> {
    let shop = web::Data::new(shop.clone());
    let app = move || {
        App::new()
            .app_data(shop.clone())
            .route("/users/{user_id}/payments", web::post().to(pay))
            .route("/items/{item_id}/restock", web::post().to(restock))
            .configure(check::naive)
    };
    // A client that disconnects ends its request: the handler is dropped, its transaction rolled back, its lease free.
    let server = HttpServer::new(app).h1_allow_half_closed(false).workers(2).bind(("127.0.0.1", port))?;
    let port = server.addrs()[0].port();
    Ok((server.run(), port))
}

#[tokio::main]
async fn main() -> Result<()> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let url = env::var("DATABASE_URL").context("DATABASE_URL must name a PostgreSQL database")?;
    let db = PgPool::connect(&url).await?;
    lockkit::migrate(&db).await?;
    let tables = "CREATE TABLE t_payments (payment_id BIGSERIAL PRIMARY KEY, user_id BIGINT NOT NULL,
                                           cents BIGINT NOT NULL CHECK (cents > 0));
                  CREATE TABLE t_items (item_id BIGINT PRIMARY KEY, stock BIGINT NOT NULL);
                  INSERT INTO t_items VALUES (1, 0), (2, 0)";
    sqlx::raw_sql(tables).execute(&db).await?;
    let shop = Shop { leases: Leases::new(db.clone()), db };
    if env::args().any(|it| it == "--check") {
        return check::run(&shop).await;
    }
    let (server, port) = serve(&shop, 3000)?;
    println!("listening on http://127.0.0.1:{port}");
    server.await?; // ends at SIGTERM or ctrl-c, after the requests that are under way
    shop.leases.close().await?;
    Ok(())
}
