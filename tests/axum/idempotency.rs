//! The header `Idempotency-Key`, on every database.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::{
    Json, Router,
    body::{Body, Bytes},
    extract::{DefaultBodyLimit, Path},
    http::{HeaderName, HeaderValue, StatusCode, header},
    response::{AppendHeaders, IntoResponse},
    routing::post,
};
use http_body::Frame;
use lockkit::dialect::IdempotentOps;
use lockkit::{Error, Fault, Tx};
use lockkit_axum::{IdempotencyKey, LockError};
use reqwest::{RequestBuilder, Response};
use serde::{Deserialize, Serialize};
use sqlx::{Pool, sqlite::SqlitePoolOptions};
use support::{Backend, PlainSql, TestDb, on_every_database};
use tokio::{
    sync::{Notify, mpsc},
    task::JoinSet,
    time::timeout,
};

use crate::server::{Server, problem};

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Payment {
    cents: i64,
    note: String,
}

/// The work: a row.
async fn charge<DB: IdempotentOps + PlainSql>(tx: &mut Tx<DB>, user: &str) -> Result<(), LockError> {
    let charged = DB::execute(&mut *tx, &format!("INSERT INTO t_charges VALUES ('{user}')")).await;
    charged.map(drop).map_err(|err| Error::database("charging", None, Fault::Other, err).into())
}

async fn charges<S: Backend>(db: &TestDb<S>) -> i64 {
    db.fetch_i64("SELECT COUNT(*) FROM t_charges").await.unwrap()
}

async fn with_charges<S: Backend>(db: &TestDb<S>) {
    db.execute("CREATE TABLE t_charges (name VARCHAR(99))").await;
}

fn pay(server: &Server, path: &str, key: &str, cents: i64) -> RequestBuilder {
    server.post(path).header("idempotency-key", key).json(&Payment { cents, note: "ü \"x\"\u{0}".to_owned() })
}

/// Status, chosen headers and bytes of the body.
async fn parts(answer: Response) -> (u16, Vec<Option<String>>, Bytes) {
    let text = |name| answer.headers().get(name).map(|it| it.to_str().unwrap().to_owned());
    let headers = ["content-type", "location", "x-receipt"].map(text).to_vec();
    (answer.status().as_u16(), headers, answer.bytes().await.unwrap())
}

fn is_replayed(answer: &Response) -> bool {
    answer.headers().get("idempotent-replayed").is_some_and(|it| it == "true")
}

on_every_database! {
    async fn a_repeated_request_gets_the_first_answer_byte_for_byte<S>(db: TestDb<S>) {
        with_charges(&db).await;
        let numbers = Arc::new(AtomicUsize::new(0));
        let handler = {
            let pool = db.pool.clone();
            async move |Path(user): Path<String>, key: IdempotencyKey, Json(payment): Json<Payment>| {
                let receipt = HeaderName::from_static("x-receipt");
                let request = key.for_user(&user).request(&payment).store_header(receipt.clone());
                let paid = request.run(&pool, async |tx| {
                    charge(tx, &user).await?;
                    let number = numbers.fetch_add(1, SeqCst).to_string();
                    let headers = [
                        (header::LOCATION, format!("/payments/{number}")),
                        (receipt, number.clone()),
                        (header::SET_COOKIE, "session=1".to_owned()),
                    ];
                    Ok((StatusCode::CREATED, AppendHeaders(headers), Json((number, payment.clone()))))
                });
                paid.await.map_err(LockError::into_response)
            }
        };
        let server = Server::of(Router::new().route("/{user}/payments", post(handler))).await;
        for (round, key) in ["8e03", "\"8e03\"", "8e03"].into_iter().enumerate() {
            let answer = pay(&server, "/7/payments", key, 1999).send().await.unwrap();
            assert_eq!(is_replayed(&answer), round > 0);
            // What is not stored is for the first request.
            assert_eq!(answer.headers().contains_key("set-cookie"), round == 0);
            let (status, headers, body) = parts(answer).await;
            let text = |text: &str| Some(text.to_owned());
            assert_eq!((status, headers), (201, vec![text("application/json"), text("/payments/0"), text("0")]));
            assert_eq!(body, r#"["0",{"cents":1999,"note":"ü \"x\"\u0000"}]"#);
        }
        assert_eq!(charges(&db).await, 1);

        // Another payload or query under the key of this user; and the same of another user.
        for (path, cents) in [("/7/payments", 5), ("/7/payments?express", 1999)] {
            let refused = pay(&server, path, "8e03", cents).send().await.unwrap();
            assert_eq!(refused.status(), 422);
            problem(refused).await;
        }
        let other = pay(&server, "/8/payments", "8e03", 1999).send().await.unwrap();
        assert_eq!((other.status().as_u16(), is_replayed(&other)), (201, false));
        assert_eq!(charges(&db).await, 2);
        db.assert_nothing_left().await;
    }

    async fn requests_at_the_same_time_do_the_work_once<S>(db: TestDb<S>) {
        with_charges(&db).await;
        let numbers = Arc::new(AtomicUsize::new(0));
        let handler = {
            let (pool, numbers) = (db.pool.clone(), numbers.clone());
            async move |key: IdempotencyKey, body: Bytes| {
                let request = key.for_user(7).request_bytes(&body).wait(Duration::from_secs(60));
                let paid = request.run(&pool, async |tx| {
                    charge(tx, "7").await?;
                    Ok(numbers.fetch_add(1, SeqCst).to_string())
                });
                paid.await.map_err(LockError::into_response)
            }
        };
        let server = Server::of(Router::new().route("/payments", post(handler))).await;
        let mut requests = JoinSet::new();
        for number in 0..36 {
            let key = format!("key-{}", number % 3);
            let request = pay(&server, "/payments", &key, 1999);
            requests.spawn(async move { (key, parts(request.send().await.unwrap()).await) });
        }
        let answers = requests.join_all().await;
        for number in 0..3 {
            let name = format!("key-{number}");
            let of_key: Vec<_> = answers.iter().filter(|(key, _)| *key == name).map(|(_, answer)| answer).collect();
            assert_eq!((of_key.len(), of_key[0].0), (12, 200));
            assert!(of_key.iter().all(|it| *it == of_key[0]), "{answers:?}");
        }
        assert_eq!((numbers.load(SeqCst), charges(&db).await), (3, 3));
        db.assert_nothing_left().await;
    }

    async fn a_request_that_is_being_processed_is_refused_with_409_after_the_wait<S>(db: TestDb<S>) {
        let (running, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let handler = {
            let (pool, running, go) = (db.pool.clone(), running.clone(), go.clone());
            async move |key: IdempotencyKey| {
                let request = key.for_user(7).request(&()).wait(Duration::ZERO);
                let paid = request.run(&pool, async |_| {
                    running.notify_one();
                    go.notified().await;
                    Ok::<_, LockError>("paid")
                });
                paid.await
            }
        };
        let server = Server::of(Router::new().route("/payments", post(handler))).await;
        let request = || server.post("/payments").header("idempotency-key", "8e03").send();
        let first = tokio::spawn(request());
        running.notified().await;
        let refused = request().await.unwrap();
        assert_eq!((refused.status().as_u16(), refused.headers()["retry-after"].as_bytes()), (409, &b"1"[..]));
        problem(refused).await;
        go.notify_one();
        assert_eq!(first.await.unwrap().unwrap().text().await.unwrap(), "paid");
        let again = request().await.unwrap();
        assert!(is_replayed(&again));
        assert_eq!(again.text().await.unwrap(), "paid");
    }

    async fn what_fails_leaves_nothing_and_the_next_request_does_the_work<S>(db: TestDb<S>) {
        with_charges(&db).await;
        let (tell, mut told) = mpsc::unbounded_channel();
        let handler = {
            let pool = db.pool.clone();
            async move |Path(way): Path<String>, key: IdempotencyKey| {
                let paid = key.for_user(7).request(&()).max_answer(100).run(&pool, async |tx| {
                    charge(tx, "7").await?;
                    tell.send(()).unwrap();
                    Ok(match &*way {
                        "fails" => return Err(LockError(Error::conflict())),
                        "panics" => panic!("a bug of the application"),
                        "hangs" => std::future::pending().await,
                        "streams" => Body::new(Frames(9)).into_response(),
                        "large" => "x".repeat(101).into_response(),
                        _ => (StatusCode::PAYMENT_REQUIRED, "x".repeat(100)).into_response(),
                    })
                });
                paid.await
            }
        };
        let server = Server::of(Router::new().route("/{way}", post(handler))).await;
        for way in ["fails", "panics", "hangs", "streams", "large"] {
            let request = || server.post(&format!("/{way}")).header("idempotency-key", "8e03").send();
            for _ in 0..2 {
                let sent = tokio::spawn(request());
                told.recv().await.expect("the work has begun");
                match way {
                    "fails" => assert_eq!(sent.await.unwrap().unwrap().status(), 409),
                    "panics" => assert!(sent.await.unwrap().is_err()),
                    "hangs" => sent.abort(),
                    _ => assert_eq!(sent.await.unwrap().unwrap().status(), 500),
                }
            }
        }
        db.assert_nothing_left().await;
        assert_eq!(charges(&db).await, 0);
        // An answer that says no is stored as any other.
        for replayed in [false, true] {
            let answer = server.post("/declines").header("idempotency-key", "8e03").send().await.unwrap();
            assert_eq!((answer.status().as_u16(), is_replayed(&answer)), (402, replayed));
            assert_eq!(answer.bytes().await.unwrap().len(), 100);
        }
        assert_eq!(charges(&db).await, 1);
    }

    async fn an_answer_of_any_bytes_is_replayed<S>(db: TestDb<S>) {
        let all: Vec<u8> = (0..=255).collect();
        let handler = {
            let (pool, all) = (db.pool.clone(), all.clone());
            async move |key: IdempotencyKey| {
                let got = key.for_user(7).request(&()).run(&pool, async |_| {
                    let opaque = HeaderValue::from_bytes(b"</a>; title=\"\xff\"").unwrap();
                    let links = [opaque, HeaderValue::from_static("</b>")].map(|it| (header::LINK, it));
                    Ok::<_, LockError>((AppendHeaders(links), all.clone()))
                });
                got.await
            }
        };
        let server = Server::of(Router::new().route("/files", post(handler))).await;
        for replayed in [false, true] {
            let answer = server.post("/files").header("idempotency-key", "8e03").send().await.unwrap();
            assert_eq!(is_replayed(&answer), replayed);
            let links: Vec<_> = answer.headers().get_all("link").iter().map(HeaderValue::as_bytes).collect();
            assert_eq!(links, [&b"</a>; title=\"\xff\""[..], b"</b>"]);
            assert_eq!(answer.headers()["content-type"], "application/octet-stream");
            assert_eq!(answer.bytes().await.unwrap(), all);
        }
    }
}

/// A body of so many frames, of which nobody knows the length.
struct Frames(u8);

impl http_body::Body for Frames {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0 = self.0.saturating_sub(1);
        Poll::Ready((self.0 > 0).then(|| Ok(Frame::data(Bytes::from_static(b"x")))))
    }
}

async fn sqlite() -> Pool<sqlx::Sqlite> {
    let pool = SqlitePoolOptions::new().max_connections(1).connect("sqlite::memory:").await.unwrap();
    lockkit::migrate(&pool).await.unwrap();
    pool
}

#[tokio::test]
async fn a_request_without_a_usable_key_or_with_too_large_a_body_is_refused() {
    let pool = sqlite().await;
    let required = async move |key: IdempotencyKey, body: Bytes| {
        key.for_user(7).request_bytes(&body).run(&pool, async |_| Ok::<_, LockError>("done")).await
    };
    let optional =
        async |key: Option<IdempotencyKey>| key.map_or_else(|| "none".to_owned(), |it| it.as_str().to_owned());
    let app = Router::new()
        .route("/required", post(required))
        .route("/optional", post(optional))
        .layer(DefaultBodyLimit::max(1000));
    let server = Server::of(app).await;
    let with =
        |path: &str, key: &[u8]| server.post(path).header("idempotency-key", HeaderValue::from_bytes(key).unwrap());

    let missing = server.post("/required").send().await.unwrap();
    assert_eq!(missing.status(), 400);
    assert_eq!(problem(missing).await.0, "Idempotency-Key is missing");
    for (key, title) in [
        (&b""[..], "Idempotency-Key is empty"),
        (b"\"\"", "Idempotency-Key is empty"),
        (&[b'x'; 10 << 10], "Idempotency-Key is too long"),
        (b"\xff", "Idempotency-Key is malformed"),
        ("ключ".as_bytes(), "Idempotency-Key is malformed"),
        (b"a, b", "Idempotency-Key is malformed"),
    ] {
        for path in ["/required", "/optional"] {
            let refused = with(path, key).send().await.unwrap();
            assert_eq!(refused.status(), 400);
            assert_eq!(problem(refused).await.0, title);
        }
    }
    let twice = with("/required", b"a").header("idempotency-key", "b").send().await.unwrap();
    assert_eq!(problem(twice).await.0, "Idempotency-Key is repeated");

    assert_eq!(with("/required", b"a").body(vec![0; 1001]).send().await.unwrap().status(), 413);
    assert_eq!(with("/required", b"a").body(vec![0; 1000]).send().await.unwrap().text().await.unwrap(), "done");
    // Other bytes.
    assert_eq!(with("/required", b"a").body(vec![0; 999]).send().await.unwrap().status(), 422);
    assert_eq!(server.post("/optional").send().await.unwrap().text().await.unwrap(), "none");
    assert_eq!(with("/optional", b"\"a\"").send().await.unwrap().text().await.unwrap(), "a");
}

#[tokio::test]
async fn another_path_is_another_request_in_a_nested_router_as_well() {
    let pool = sqlite().await;
    let handler = async move |key: IdempotencyKey| {
        key.for_user(7).request(&()).run(&pool, async |_| Ok::<_, LockError>("done")).await
    };
    let shops = Router::new().route("/payments", post(handler.clone())).route("/refunds", post(handler));
    let server = Server::of(Router::new().nest("/shops/{shop}", shops)).await;
    let post = |path: &str| server.post(path).header("idempotency-key", "8e03").send();
    assert_eq!(post("/shops/1/payments").await.unwrap().status(), 200);
    for path in ["/shops/2/payments", "/shops/1/refunds"] {
        assert_eq!(post(path).await.unwrap().status(), 422, "{path}");
    }
    assert!(is_replayed(&post("/shops/1/payments").await.unwrap()));
}

#[tokio::test]
async fn no_two_users_make_one_key() {
    let pool = sqlite().await;
    let handler = {
        let pool = pool.clone();
        async move |Path(user): Path<String>, key: IdempotencyKey| {
            key.for_user(&user).request(&()).run(&pool, async |_| Ok::<_, LockError>(user.clone())).await
        }
    };
    let server = Server::of(Router::new().route("/{user}", post(handler))).await;
    // `a:b` with `c` and `a` with `b:c`, and a user whose name has the escape of a colon.
    for (user, key) in [("a:b", "c"), ("a", "b:c"), ("a%253Ab", "c")] {
        let answer = server.post(&format!("/{user}")).header("idempotency-key", key).send().await.unwrap();
        assert_eq!((answer.status().as_u16(), is_replayed(&answer)), (200, false), "{user} {key}");
    }
    let mut names: Vec<String> =
        sqlx::query_scalar("SELECT CAST(name AS TEXT) FROM lockkit_answer").fetch_all(&pool).await.unwrap();
    names.sort_unstable();
    assert_eq!(names, ["http:a%253Ab:c", "http:a%3Ab:c", "http:a:b:c"]);
}

#[tokio::test]
async fn a_user_without_a_name_is_refused_and_nothing_is_done() {
    let pool = sqlite().await;
    for user in ["", " ", "\t"] {
        let handler = {
            let pool = pool.clone();
            async move |key: IdempotencyKey| {
                let request = key.for_user(user).request(&()).keep(Duration::from_secs(60)).wait(Duration::ZERO);
                let run = request.run(&pool, async |_| -> Result<&str, LockError> { panic!("for nobody") });
                let refused = run.await.unwrap_err();
                assert!(refused.to_string().starts_with("`for_user` needs the name of a user"), "{refused}");
                Err::<(), _>(refused)
            }
        };
        let server = Server::of(Router::new().route("/", post(handler))).await;
        // A mistake in the program.
        assert_eq!(server.post("/").header("idempotency-key", "a").send().await.unwrap().status(), 500);
    }
    let answers: i64 = sqlx::query_scalar("SELECT COUNT(*) FROM lockkit_answer").fetch_one(&pool).await.unwrap();
    assert_eq!(answers, 0);
}

#[tokio::test]
async fn an_answer_that_was_stored_by_other_code_is_an_error_and_the_work_is_not_done() {
    let pool = sqlite().await;
    let handler = {
        let pool = pool.clone();
        async move |key: IdempotencyKey| {
            let run = key.for_user(7).request(&()).run(&pool, async |_| Ok::<_, LockError>("done"));
            timeout(Duration::from_secs(20), run).await.expect("an answer")
        }
    };
    let server = Server::of(Router::new().route("/", post(handler))).await;
    let request = || server.post("/").header("idempotency-key", "a").send();
    assert_eq!(request().await.unwrap().status(), 200);
    for answer in
        [r#"{"status":99,"headers":[],"body":""}"#, r#"{"status":200,"headers":[["a b","c"]],"body":""}"#, "7"]
    {
        sqlx::query("UPDATE lockkit_answer SET answer = ?").bind(answer.as_bytes()).execute(&pool).await.unwrap();
        assert_eq!(request().await.unwrap().status(), 500);
    }
}
