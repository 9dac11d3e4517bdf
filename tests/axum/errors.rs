//! What a client is told of each error.

use std::time::Duration;

use axum::{Router, extract::Path, response::IntoResponse, routing::post};
use lockkit::testing::MemoryStore;
use lockkit::{Error, Fault, Fence, Idempotent, Key, Leases, LossReason, RetryPolicy, RowLock, Stock};
use lockkit_axum::LockError;
use reqwest::StatusCode;
use sqlx::{SqlitePool, sqlite::SqlitePoolOptions};

use crate::server::{Server, problem};

async fn pool() -> SqlitePool {
    SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await.expect("a database")
}

/// The error of this name, as lockkit makes it. Each has the secret in its key or table.
async fn error(name: &str) -> Error {
    let key = "secret:42";
    let leases = Leases::new(MemoryStore::new());
    let database = |fault| Error::database("acquiring leases", &Key::from(key), fault, "SELECT secret FROM t_secret");
    match name {
        "contended" => Error::contended(key, Duration::ZERO, None),
        "lost" => Error::lost(key, Fence::from(1), LossReason::Expired),
        "fenced" => Error::fenced(key, Fence::from(1), Fence::from(2)),
        "conflict" => Error::conflict(),
        "exhausted" => {
            let policy = RetryPolicy::new().attempts(1);
            policy.retry(|_| async { Err::<(), _>(database(Fault::Deadlock)) }).await.unwrap_err()
        }
        "unavailable" => database(Fault::Unavailable),
        "read-only" => database(Fault::ReadOnly),
        "blocked" => database(Fault::Contended),
        "deadlock" => database(Fault::Deadlock),
        "failed" => database(Fault::Other),
        "closed" => {
            leases.close().await.unwrap();
            leases.lease(key).acquire().await.unwrap_err()
        }
        "bad-key" => leases.lease("secret\n42").acquire().await.unwrap_err(),
        "bad-option" => leases.lease(key).ttl(Duration::ZERO).acquire().await.unwrap_err(),
        "not-migrated" => Idempotent::key(key).run(&pool().await, async |_| Ok::<_, Error>(())).await.unwrap_err(),
        "no-row" | "sold-out" | "mismatch" => {
            let pool = pool().await;
            lockkit::migrate(&pool).await.unwrap();
            match name {
                "no-row" => {
                    sqlx::query("CREATE TABLE secret (id INTEGER PRIMARY KEY)").execute(&pool).await.unwrap();
                    let mut tx = lockkit::begin(&pool).await.unwrap();
                    RowLock::table("secret").by("id", 42).lock(&mut tx).await.unwrap_err()
                }
                "sold-out" => Stock::new(pool, key).take(1).await.unwrap_err(),
                _ => {
                    let run =
                        |request: u8| Idempotent::key(key).request(&request).run(&pool, async |_| Ok::<_, Error>(()));
                    run(1).await.unwrap();
                    run(2).await.unwrap_err()
                }
            }
        }
        _ => panic!("{name} is no error"),
    }
}

#[tokio::test]
async fn each_error_has_its_status_and_gives_nothing_away() {
    let app = Router::new()
        .route("/{name}", post(async |Path(name): Path<String>| LockError::from(error(&name).await).into_response()));
    let server = Server::of(app).await;
    for (name, status, may_repeat) in [
        ("contended", 409, true),
        ("conflict", 409, true),
        ("blocked", 409, true),
        ("sold-out", 409, false),
        ("mismatch", 422, false),
        ("no-row", 404, false),
        ("bad-key", 400, false),
        ("lost", 503, false),
        ("fenced", 503, false),
        ("closed", 503, true),
        ("unavailable", 503, true),
        ("read-only", 503, true),
        ("deadlock", 503, true),
        ("exhausted", 503, true),
        ("failed", 500, false),
        ("bad-option", 500, false),
        ("not-migrated", 500, false),
    ] {
        let err = error(name).await;
        let answer = server.post(&format!("/{name}")).send().await.unwrap();
        assert_eq!(answer.status().as_u16(), status, "{name}: {err}");
        let retry_after = answer.headers().get("retry-after").map(|it| it.to_str().unwrap().to_owned());
        assert_eq!(retry_after.as_deref(), may_repeat.then_some("1"), "{name}");
        let (title, detail) = problem(answer).await;
        assert_eq!(Some(&*title), StatusCode::from_u16(status).unwrap().canonical_reason());
        let told = format!("{title} {detail}").to_lowercase();
        for secret in ["secret", "42", "select", "lockkit"] {
            assert!(!told.contains(secret), "{name}: {told}");
        }
        assert_eq!(LockError(err).status().as_u16(), status);
    }
}
