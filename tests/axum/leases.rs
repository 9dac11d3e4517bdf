//! A lease around a handler.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::{
    Json, Router,
    extract::{Path, Query},
    http::{HeaderMap, StatusCode},
    routing::post,
};
use lockkit::testing::MemoryStore;
use lockkit::{LeaseRequest, LeaseStore, Leases, Released};
use lockkit_axum::{Held, IntoLease, LeaseLayer, LockError};
use support::{Server as _, TestDb, on_every_database};
use tokio::{
    sync::{Notify, mpsc},
    task::JoinSet,
    time::{sleep, timeout},
};

use crate::server::{Server, problem};

const WAIT: Duration = Duration::from_secs(60);

fn leases() -> Leases<MemoryStore> {
    Leases::builder(MemoryStore::new()).wait(WAIT).build().unwrap()
}

/// The lease of the path.
fn by_path<S: LeaseStore>(leases: &Leases<S>) -> impl Fn(Path<String>) -> LeaseRequest<S> + use<S> {
    let leases = leases.clone();
    move |Path(name)| leases.lease(format!("report:{name}"))
}

/// Waits until nobody holds the lease.
async fn freed(leases: &Leases<impl LeaseStore>, key: &str) {
    let freed = async {
        while leases.show(key).await.unwrap().is_some() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(Duration::from_secs(20), freed).await.expect("the lease is released long before its ttl");
}

/// Tells of its end.
struct Ends(mpsc::UnboundedSender<&'static str>);

impl Drop for Ends {
    fn drop(&mut self) {
        let _ = self.0.send("dropped");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_with_one_key_are_handled_one_after_the_other() {
    let running = Arc::new(Mutex::new(std::collections::HashMap::<String, usize>::new()));
    let most = Arc::new(AtomicUsize::new(0));
    let handler = {
        let (running, most) = (running.clone(), most.clone());
        async move |Path(name): Path<String>| {
            let now = {
                let mut running = running.lock().unwrap();
                let now = running.entry(name.clone()).or_default();
                *now += 1;
                *now
            };
            most.fetch_max(now, SeqCst);
            sleep(Duration::from_millis(2)).await;
            *running.lock().unwrap().get_mut(&name).unwrap() -= 1;
        }
    };
    let leases = leases();
    let app = Router::new().route("/reports/{name}", post(handler)).route_layer(LeaseLayer::new(by_path(&leases)));
    let server = Server::of(app).await;
    let mut requests = JoinSet::new();
    for number in 0..40 {
        requests.spawn(server.post(&format!("/reports/{}", number % 4)).send());
    }
    for answer in requests.join_all().await {
        assert_eq!(answer.unwrap().status(), 200);
    }
    assert_eq!(most.load(SeqCst), 1);
    freed(&leases, "report:0").await;
}

#[tokio::test]
async fn another_key_is_not_waited_for_and_the_wait_for_a_held_one_ends_with_409() {
    let leases = leases();
    let wanted = {
        let by_path = by_path(&leases);
        move |path| by_path(path).wait(Duration::from_millis(50))
    };
    let app = Router::new().route("/reports/{name}", post(async || "done")).route_layer(LeaseLayer::new(wanted));
    let server = Server::of(app).await;
    let held = leases.lease("report:secret").acquire().await.unwrap();

    let refused = server.post("/reports/secret").send().await.unwrap();
    assert_eq!((refused.status().as_u16(), refused.headers()["retry-after"].as_bytes()), (409, &b"1"[..]));
    let (title, detail) = problem(refused).await;
    assert_eq!(title, "Conflict");
    assert!(!detail.contains("secret"), "{detail}");
    assert_eq!(server.post("/reports/other").send().await.unwrap().status(), 200);
    assert_eq!(held.release().await.unwrap(), Released::WhileHeld);
    let answer = server.post("/reports/secret").send().await.unwrap();
    assert_eq!((answer.status().as_u16(), answer.text().await.unwrap()), (200, "done".to_owned()));
}

#[tokio::test]
async fn a_lost_lease_ends_the_handler_and_the_answer_is_503() {
    let (tell, mut told) = mpsc::unbounded_channel();
    let handler = async move || {
        let _ends = Ends(tell.clone());
        tell.send("running").unwrap();
        std::future::pending::<()>().await;
    };
    let leases = leases();
    let app = Router::new().route("/reports/{name}", post(handler)).route_layer(LeaseLayer::new(by_path(&leases)));
    let server = Server::of(app).await;
    let request = tokio::spawn(server.post("/reports/a").send());
    assert_eq!(told.recv().await, Some("running"));
    leases.steal("report:a").await.unwrap().expect("it is held");

    let answer = request.await.unwrap().unwrap();
    assert_eq!((answer.status().as_u16(), answer.headers().get("retry-after")), (503, None));
    problem(answer).await;
    assert_eq!(told.recv().await, Some("dropped"));
}

#[tokio::test]
async fn a_lease_outlives_its_ttl_while_the_handler_runs() {
    let ttl = Duration::from_millis(300);
    let leases = Leases::builder(MemoryStore::new()).ttl(ttl).build().unwrap();
    let handler = async move |Held(lease): Held<MemoryStore>| {
        sleep(3 * ttl).await;
        lease.is_trusted().to_string()
    };
    let app = Router::new().route("/reports/{name}", post(handler)).route_layer(LeaseLayer::new(by_path(&leases)));
    let answer = Server::of(app).await.post("/reports/a").send().await.unwrap();
    assert_eq!(answer.text().await.unwrap(), "true");
}

#[tokio::test]
async fn a_client_that_disconnects_and_a_handler_that_panics_leave_no_lease() {
    let (tell, mut told) = mpsc::unbounded_channel();
    let handler = async move |Path(name): Path<String>| {
        let _ends = Ends(tell.clone());
        tell.send("running").unwrap();
        assert_ne!(name, "bug", "a bug of the application");
        std::future::pending::<()>().await;
    };
    let leases = leases();
    let app = Router::new().route("/reports/{name}", post(handler)).route_layer(LeaseLayer::new(by_path(&leases)));
    let server = Server::of(app).await;
    let gone = tokio::spawn(server.post("/reports/gone").send());
    assert_eq!(told.recv().await, Some("running"));
    assert!(leases.show("report:gone").await.unwrap().is_some());
    gone.abort();
    assert_eq!(told.recv().await, Some("dropped"));
    freed(&leases, "report:gone").await;

    server.post("/reports/bug").send().await.expect_err("the connection ends");
    freed(&leases, "report:bug").await;
}

#[tokio::test]
async fn a_handle_that_leaves_the_handler_is_of_no_use_after_it() {
    let kept = Arc::new(Mutex::new(None));
    let handler = {
        let kept = kept.clone();
        async move |held: Held<MemoryStore>| {
            let fence = held.fence().get();
            *kept.lock().unwrap() = Some(held);
            Json(fence)
        }
    };
    let leases = leases();
    let app = Router::new().route("/reports/{name}", post(handler)).route_layer(LeaseLayer::new(by_path(&leases)));
    let answer = Server::of(app).await.post("/reports/a").send().await.unwrap();
    let fence: u64 = answer.json().await.unwrap();
    let kept = kept.lock().unwrap().take().unwrap();
    assert_eq!((kept.fence().get(), kept.is_trusted()), (fence, false));
    freed(&leases, "report:a").await;
}

#[tokio::test]
async fn a_request_may_need_no_lease_or_be_refused() {
    #[derive(serde::Deserialize)]
    struct Wish {
        dry_run: bool,
    }
    let leases = leases();
    let by_query = {
        let leases = leases.clone();
        move |(Query(Wish { dry_run }), headers): (Query<Wish>, HeaderMap)| {
            if dry_run {
                return Ok::<_, (StatusCode, &str)>(None);
            }
            let tenant = headers.get("x-tenant").ok_or((StatusCode::UNAUTHORIZED, "sign in"))?;
            Ok(Some(leases.lease(format!("import:{}", tenant.to_str().unwrap_or_default()))))
        }
    };
    let held = async |held: Option<Held<MemoryStore>>| held.map_or_else(String::new, |it| it.key().to_string());
    let app = Router::new()
        .route("/imports", post(held).layer(LeaseLayer::new(by_query)))
        .route("/none", post(async |Held(_): Held<MemoryStore>| {}));
    let server = Server::of(app).await;
    let text = async |answer: reqwest::RequestBuilder| {
        let answer = answer.send().await.unwrap();
        (answer.status().as_u16(), answer.text().await.unwrap())
    };
    let tenant = |tenant: &str| server.post("/imports?dry_run=false").header("x-tenant", tenant);
    assert_eq!(text(tenant("7")).await, (200, "import:7".to_owned()));
    assert_eq!(text(server.post("/imports?dry_run=true")).await, (200, String::new()));
    assert_eq!(text(server.post("/imports?dry_run=false")).await, (401, "sign in".to_owned()));
    // The extractor's own answer.
    assert_eq!(text(server.post("/imports?dry_run=x")).await.0, 400);
    // A key that a client has made.
    assert_eq!(text(tenant(&"x".repeat(10_000))).await.0, 400);
    // A mistake in the program.
    assert_eq!(server.post("/none").send().await.unwrap().status(), 500);
}

#[tokio::test]
async fn a_semaphore_lets_as_many_in_as_it_has_permits() {
    let (leases, arrived, go) = (leases(), Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
    let handler = {
        let (arrived, go) = (arrived.clone(), go.clone());
        async move || {
            arrived.fetch_add(1, SeqCst);
            go.notified().await;
        }
    };
    let wanted = {
        let leases = leases.clone();
        move |()| leases.semaphore("import", 2).wait(Duration::from_millis(50))
    };
    let server = Server::of(Router::new().route("/imports", post(handler)).layer(LeaseLayer::new(wanted))).await;
    let two: Vec<_> = (0..2).map(|_| tokio::spawn(server.post("/imports").send())).collect();
    while arrived.load(SeqCst) < 2 {
        sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(server.post("/imports").send().await.unwrap().status(), 409);
    go.notify_waiters();
    for one in two {
        assert_eq!(one.await.unwrap().unwrap().status(), 200);
    }
}

#[tokio::test]
async fn a_service_that_closes_its_leases_refuses_with_503() {
    let leases = leases();
    let app = Router::new().route("/reports/{name}", post(async || {})).layer(LeaseLayer::new(by_path(&leases)));
    // Before the path is matched, there are no parameters of it.
    let server = Server::of(Router::new().fallback(async || {}).layer(LeaseLayer::new(by_path(&leases)))).await;
    assert_eq!(server.post("/reports/a").send().await.unwrap().status(), 500);
    let server = Server::of(app).await;
    assert_eq!(server.post("/reports/a").send().await.unwrap().status(), 200);
    leases.close().await.unwrap();
    assert_eq!(server.post("/reports/a").send().await.unwrap().status(), 503);
}

#[test]
fn what_a_function_may_return() {
    let leases = leases();
    let lease = || leases.lease("a");
    assert!(lease().into_lease().unwrap().is_some());
    assert!(Some(lease()).into_lease().unwrap().is_some());
    assert!(None::<LeaseRequest<MemoryStore>>.into_lease().unwrap().is_none());
    assert!(Ok::<_, StatusCode>(Some(lease())).into_lease().unwrap().is_some());
    let refused = Err::<LeaseRequest<MemoryStore>, _>(StatusCode::GONE).into_lease();
    assert_eq!(refused.unwrap_err().status(), StatusCode::GONE);
}

on_every_database! {
    async fn a_handler_commits_with_its_lease<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE t_closed (name VARCHAR(9))").await;
        let leases = Leases::new(db.pool.clone());
        let handler = {
            let pool = db.pool.clone();
            async move |Path(name): Path<String>, Held(lease): Held<sqlx::Pool<<S as support::Server>::DB>>| {
                if name == "stolen" {
                    // As by another process: this one has not heard of it.
                    Leases::new(pool.clone()).steal(lease.key()).await?;
                }
                let mut tx = lockkit::begin(&pool).await?;
                S::execute(&mut tx, "INSERT INTO t_closed VALUES ('a')").await.expect("a row");
                lease.commit(tx).await?;
                Ok::<_, LockError>("closed")
            }
        };
        let app = Router::new().route("/months/{name}", post(handler)).route_layer(LeaseLayer::new(by_path(&leases)));
        let server = Server::of(app).await;
        let answer = server.post("/months/a").send().await.unwrap();
        assert_eq!((answer.status().as_u16(), answer.text().await.unwrap()), (200, "closed".to_owned()));
        freed(&leases, "report:a").await;
        assert_eq!(server.post("/months/stolen").send().await.unwrap().status(), 503);
        assert_eq!(db.fetch_i64("SELECT COUNT(*) FROM t_closed").await, Some(1));
        db.assert_nothing_left().await;
    }
}
