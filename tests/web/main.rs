//! The HTTP contract of the inspector: who may look, who may steal, what is read of the store, and what is answered.

mod hostile;

use std::time::Duration;

use axum::{
    Router,
    body::Body,
    http::{HeaderMap, Request, StatusCode, request::Parts},
    response::Response,
};
use http_body_util::BodyExt;
use lockkit::testing::{MemoryStore, Operation};
use lockkit::{LeaseStore, Leases, LossReason};
use lockkit_web::{Access, Inspector};
use serde_json::{Value, json};
use support::{Server, TestDb, on_every_database, on_every_server};
use tokio::{task::JoinSet, time::sleep};
use tower::ServiceExt;

const SECOND: Duration = Duration::from_secs(1);

/// An application that lets everybody do what the header `user` says.
fn app<S: LeaseStore>(leases: &Leases<S>) -> Router {
    let access = |parts: &Parts| match parts.headers.get("user").and_then(|it| it.to_str().ok()) {
        Some("viewer") => Access::ReadOnly,
        Some(by) => Access::Steal { by: by.to_owned() },
        None => Access::None,
    };
    Router::new().nest("/locks", Inspector::new(leases.clone()).access(access).router())
}

async fn get(app: &Router, path: &str) -> Response {
    let request = Request::get(path).header("user", "viewer").body(Body::empty()).unwrap();
    app.clone().oneshot(request).await.unwrap()
}

async fn text(answer: Response) -> String {
    String::from_utf8(answer.into_body().collect().await.unwrap().to_bytes().into()).unwrap()
}

async fn json_of(answer: Response) -> Value {
    assert_eq!(answer.headers()["content-type"], "application/json");
    serde_json::from_str(&text(answer).await).unwrap()
}

async fn leases_json(app: &Router) -> Value {
    let answer = get(app, "/locks/leases.json").await;
    assert_eq!(answer.status(), StatusCode::OK);
    json_of(answer).await
}

/// What the page sends for an operator, with other headers in the place of these.
async fn steal(app: &Router, other: &[(&'static str, &'static str)], body: &str) -> Response {
    let ours =
        [("user", "ann"), ("sec-fetch-site", "same-origin"), ("x-lockkit", "1"), ("content-type", "application/json")];
    let mut request = Request::post("/locks/steal");
    for (name, value) in ours.iter().filter(|(name, _)| !other.iter().any(|it| it.0 == *name)).chain(other) {
        if !value.is_empty() {
            request = request.header(*name, *value);
        }
    }
    app.clone().oneshot(request.body(Body::from(body.to_owned())).unwrap()).await.unwrap()
}

fn row<'v>(view: &'v Value, key: &str) -> &'v Value {
    let rows = view["rows"].as_array().unwrap();
    rows.iter().find(|it| it["key"] == key).unwrap_or_else(|| panic!("no row `{key}`: {view}"))
}

/// How the holders of the key in its lane have ended.
fn ends(view: &Value, key: &str) -> Vec<String> {
    let lane = row(view, key)["lane"].as_array().unwrap();
    lane.iter().map(|it| it["end"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn the_page_is_closed_until_the_application_says_who_may_look() {
    let leases = Leases::new(MemoryStore::new());
    let closed = Router::new().nest("/locks", Inspector::new(leases.clone()).router());
    let nobody = Router::new().nest("/locks", Inspector::new(leases.clone()).access(|_| Access::None).router());
    for path in ["", "/inspector.js", "/inspector.css", "/leases.json", "/events"].map(|it| format!("/locks{it}")) {
        for (app, says) in [(&closed, ".access(|parts| Access::ReadOnly)"), (&nobody, "You may not look")] {
            let answer = get(app, &path).await;
            assert_eq!(answer.status(), StatusCode::FORBIDDEN, "{path}");
            assert!(text(answer).await.contains(says), "{path}");
        }
    }
    for app in [&closed, &nobody] {
        assert_eq!(steal(app, &[], "{}").await.status(), StatusCode::FORBIDDEN);
    }
    assert_eq!(leases.store().faults().calls(Operation::List), 0);
}

on_every_database! {
    async fn a_row_that_cannot_be_read_is_marked_and_hides_no_other<S>(db: TestDb<S>) {
        let leases = Leases::new(db.pool.clone());
        let app = app(&leases);
        let _held = (leases.lease("bad").acquire().await.unwrap(), leases.lease("good").acquire().await.unwrap());
        db.execute("UPDATE lockkit_lease SET ttl_us = -1, expires_us = 9223372036854775807 WHERE name = 'bad'").await;
        let view = leases_json(&app).await;
        let seen = ["bad", "good"].map(|key| (&row(&view, key)["state"], &row(&view, key)["flaw"]));
        let flaw = json!("its ttl is negative");
        assert_eq!(seen, [(&json!("unreadable"), &flaw), (&json!("held"), &Value::Null)]);
        assert!(text(get(&app, "/locks").await).await.contains("unreadable: its ttl is negative"));
    }
}

#[tokio::test]
async fn every_answer_forbids_scripts_and_frames_of_others() {
    let leases = Leases::new(MemoryStore::new());
    let app = app(&leases);
    let check = |headers: &HeaderMap| {
        let policy = headers["content-security-policy"].to_str().unwrap();
        for part in ["default-src 'none'", "script-src 'self'", "form-action 'none'", "frame-ancestors 'none'"] {
            assert!(policy.contains(part), "{policy}");
        }
        assert_eq!(
            (&headers["x-content-type-options"], &headers["cache-control"]),
            (&"nosniff".parse().unwrap(), &"no-store".parse().unwrap())
        );
    };
    for (path, kind) in [
        ("", "text/html; charset=utf-8"),
        ("/inspector.js", "text/javascript; charset=utf-8"),
        ("/inspector.css", "text/css; charset=utf-8"),
        ("/leases.json", "application/json"),
        ("/events", "text/event-stream"),
    ] {
        let answer = get(&app, &format!("/locks{path}")).await;
        assert_eq!((answer.status(), &answer.headers()["content-type"]), (StatusCode::OK, &kind.parse().unwrap()));
        check(answer.headers());
    }
    check(steal(&app, &[], "{}").await.headers());
    check(steal(&app, &[("user", "")], "{}").await.headers());
}

#[tokio::test]
async fn links_are_relative_to_where_the_router_is_nested() {
    let leases = Leases::new(MemoryStore::new());
    let inspector = || Inspector::new(leases.clone()).access(|_| Access::ReadOnly);
    let deep = Router::new().nest("/admin/locks", inspector().router());
    let page = text(get(&deep, "/admin/locks").await).await;
    assert!(page.contains("<base href=\"locks/\">") && page.contains("src=\"inspector.js\""), "{page}");
    assert_eq!(get(&deep, "/admin/locks/inspector.js").await.status(), StatusCode::OK);
    let alone: Router = inspector().router();
    let page = text(get(&alone, "/").await).await;
    assert!(!page.contains("<base"), "{page}");
}

#[tokio::test]
async fn a_viewer_may_not_steal() {
    let leases = Leases::new(MemoryStore::new());
    let lease = leases.lease("nightly").acquire().await.unwrap();
    let app = app(&leases);
    assert!(text(get(&app, "/locks").await).await.contains("data-access=\"look\""));
    let body = json!({ "key": "nightly", "fence": lease.fence().to_string() }).to_string();
    let answer = steal(&app, &[("user", "viewer")], &body).await;
    assert_eq!(answer.status(), StatusCode::FORBIDDEN);
    assert!(lease.is_trusted());
}

#[tokio::test]
async fn a_forged_request_is_refused() {
    let leases = Leases::new(MemoryStore::new());
    let lease = leases.lease("nightly").acquire().await.unwrap();
    let app = app(&leases);
    let body = json!({ "key": "nightly", "fence": lease.fence().to_string() }).to_string();
    for (forged, status) in [
        (&[("sec-fetch-site", "cross-site")][..], StatusCode::FORBIDDEN),
        (&[("sec-fetch-site", "same-site")], StatusCode::FORBIDDEN),
        (&[("sec-fetch-site", "")], StatusCode::FORBIDDEN),
        (&[("sec-fetch-site", ""), ("host", "shop"), ("origin", "http://evil")], StatusCode::FORBIDDEN),
        (&[("x-lockkit", "")], StatusCode::FORBIDDEN),
        // What a form can send.
        (&[("content-type", "text/plain")], StatusCode::UNSUPPORTED_MEDIA_TYPE),
        (&[("content-type", "application/x-www-form-urlencoded")], StatusCode::UNSUPPORTED_MEDIA_TYPE),
    ] {
        assert_eq!(steal(&app, forged, &body).await.status(), status, "{forged:?}");
    }
    assert!(lease.is_trusted());
    // Over plain HTTP, browsers send the origin alone.
    let plain = [("sec-fetch-site", ""), ("host", "shop"), ("origin", "http://shop")];
    assert_eq!(steal(&app, &plain, &body).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn only_the_holder_that_the_page_showed_loses_its_lease() {
    let leases = Leases::new(MemoryStore::new());
    let first = leases.lease("nightly").acquire().await.unwrap();
    let app = app(&leases);
    let view = leases_json(&app).await;
    let shown = json!({ "key": "nightly", "fence": row(&view, "nightly")["fence"] }).to_string();
    first.release().await.unwrap();
    let second = leases.lease("nightly").acquire().await.unwrap();
    let answer = steal(&app, &[], &shown).await;
    assert_eq!(answer.status(), StatusCode::CONFLICT);
    assert!(json_of(answer).await["error"].as_str().unwrap().contains("does not have the lease"));
    assert!(second.is_trusted());

    let now = json!({ "key": "nightly", "fence": second.fence().to_string() }).to_string();
    let answer = steal(&app, &[], &now).await;
    assert_eq!(answer.status(), StatusCode::OK);
    assert!(json_of(answer).await["holder"].as_str().unwrap().contains(&std::process::id().to_string()));
    assert_eq!(second.lost().await, LossReason::Stolen);
    // The second of two operators.
    assert_eq!(steal(&app, &[], &now).await.status(), StatusCode::CONFLICT);
    for (wrong, status) in [
        (r#"{"key": "nightly", "fence": "x"}"#.to_owned(), StatusCode::BAD_REQUEST),
        (r#"{"key": "", "fence": "1"}"#.to_owned(), StatusCode::BAD_REQUEST),
        (r#"{"key": "nightly"}"#.to_owned(), StatusCode::UNPROCESSABLE_ENTITY),
        ("{".to_owned(), StatusCode::BAD_REQUEST),
    ] {
        assert_eq!(steal(&app, &[], &wrong).await.status(), status, "{wrong}");
    }
}

#[tokio::test]
async fn keys_and_holders_are_text() {
    let leases = Leases::builder(MemoryStore::new()).holder("<img src=x>").build().unwrap();
    let key = "<script>alert(1)</script>\"'&";
    let _lease = leases.lease(key).acquire().await.unwrap();
    let app = app(&leases);
    let page = text(get(&app, "/locks").await).await;
    assert!(!page.contains("<script>alert") && !page.contains("<img"), "{page}");
    assert!(page.contains("&lt;script&gt;alert(1)&lt;/script&gt;&quot;&#39;&amp;"), "{page}");
    assert_eq!(row(&leases_json(&app).await, key)["holder"], "<img src=x>");
}

/// Reads this many events of one connection, and returns the last of them.
async fn events(app: &Router, count: usize) -> Option<Value> {
    let mut body = get(app, "/locks/events?contains=").await.into_body();
    let mut last = None;
    for _ in 0..count {
        let frame = body.frame().await?.unwrap().into_data().unwrap();
        let text = std::str::from_utf8(&frame).unwrap();
        assert!(text.contains("event: leases\n") && text.contains("retry: 100\n"), "{text}");
        let data = text.lines().find_map(|it| it.strip_prefix("data: ")).unwrap();
        last = Some(serde_json::from_str(data).unwrap());
    }
    last
}

#[tokio::test(start_paused = true)]
async fn all_viewers_share_one_read_a_second_and_without_viewers_there_is_none() {
    let leases = Leases::new(MemoryStore::new());
    let _lease = leases.lease("nightly").acquire().await.unwrap();
    let app = app(&leases);
    let reads = || leases.store().faults().calls(Operation::List);
    let before = reads();
    sleep(3600 * SECOND).await;
    assert_eq!(reads(), before, "nobody looks");

    let viewers: Vec<_> = (0..20)
        .map(|number| {
            let app = app.clone();
            tokio::spawn(async move {
                // Not all at the same moment.
                sleep(SECOND * number / 20).await;
                events(&app, 5).await.unwrap()
            })
        })
        .collect();
    for viewer in viewers {
        assert_eq!(viewer.await.unwrap()["held"], 1);
    }
    // Each asks for those that are held, and for those whose holder died.
    let for_all = reads() - before;
    assert!((5..=7).contains(&(for_all / 2)), "{for_all}");
    sleep(3600 * SECOND).await;
    assert_eq!(reads() - before, for_all, "they are gone");
}

#[tokio::test(start_paused = true)]
async fn a_connection_ends_after_ten_seconds_so_that_a_service_can_shut_down() {
    let leases = Leases::new(MemoryStore::new());
    let app = app(&leases);
    assert!(events(&app, 10).await.is_some());
    assert!(events(&app, 11).await.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_store_that_does_not_answer_is_reported_and_not_asked_by_each_viewer() {
    let leases = Leases::new(MemoryStore::new());
    let app = app(&leases);
    leases.store().faults().partition();
    let before = leases.store().faults().calls(Operation::List);
    for path in ["/locks", "/locks/leases.json", "/locks/leases.json"] {
        let answer = get(&app, path).await;
        assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE, "{path}");
        let text = text(answer).await;
        assert!(text.contains("talking to a store"), "{path}: {text}");
    }
    assert!(leases.store().faults().calls(Operation::List) - before <= 2);
    leases.store().faults().heal();
    sleep(SECOND).await;
    assert_eq!(leases_json(&app).await["held"], 0);
}

#[tokio::test(start_paused = true)]
async fn deaths_thefts_releases_and_waiters_are_seen() {
    let store = MemoryStore::new();
    let leases = Leases::builder(store.client()).holder("here").build().unwrap();
    let there = Leases::builder(store.client()).holder("there").wait(3600 * SECOND).build().unwrap();
    let app = app(&leases);
    let look = async || {
        sleep(SECOND).await;
        leases_json(&app).await
    };
    let dies = there.lease("dies").ttl(30 * SECOND).acquire().await.unwrap();
    let released = leases.lease("released").acquire().await.unwrap();
    let kept = leases.lease("kept").min_hold(60 * SECOND).acquire().await.unwrap();
    let stolen = leases.lease("stolen").acquire().await.unwrap();
    let waiting = tokio::spawn(there.lease("stolen").acquire());
    let view = look().await;
    assert_eq!((&view["held"], &view["waiting"], &view["died"]), (&json!(4), &json!(1), &json!(0)), "{view}");
    let shown = row(&view, "stolen");
    assert_eq!((&shown["waiting"], &shown["here"], &shown["state"]), (&json!(1), &json!(true), &json!("held")));
    assert_eq!((&shown["ttl"], &row(&view, "dies")["here"]), (&json!(30_000), &json!(false)));

    released.release().await.unwrap();
    kept.release().await.unwrap();
    let body = json!({ "key": "stolen", "fence": stolen.fence().to_string() }).to_string();
    assert_eq!(steal(&app, &[], &body).await.status(), StatusCode::OK);
    let view = look().await;
    assert_eq!(
        (ends(&view, "released"), row(&view, "released")["state"].clone()),
        (vec!["released".to_owned()], json!("free"))
    );
    assert_eq!(
        (ends(&view, "kept"), row(&view, "kept")["state"].clone()),
        (vec!["released".to_owned()], json!("kept"))
    );
    assert_eq!(ends(&view, "stolen"), ["stolen", "held"], "the waiter has it");
    let _next = waiting.await.unwrap().unwrap();

    there.store().faults().partition();
    let mut view = look().await;
    for _ in 0..31 {
        view = look().await;
    }
    assert_eq!((ends(&view, "dies"), row(&view, "dies")["state"].clone()), (vec!["died".to_owned()], json!("died")));
    assert!(!dies.is_trusted());
    let taken = leases.lease("dies").acquire().await.unwrap();
    let view = look().await;
    assert_eq!((ends(&view, "dies"), &view["died"]), (vec!["died".to_owned(), "held".to_owned()], &json!(1)), "{view}");
    assert_eq!(row(&view, "dies")["fence"], taken.fence().to_string());
    // Nobody looks for ten minutes.
    sleep(610 * SECOND).await;
    assert_eq!(ends(&look().await, "dies"), ["held"]);
}

on_every_database! {
    async fn leases_whose_holder_died_come_last_until_another_takes_them<S>(db: TestDb<S>) {
        let leases = Leases::builder(db.pool.clone()).holder("api-1").build().unwrap();
        let of = async |key: &str| leases.lease(key).acquire().await.unwrap();
        of("released").await.release().await.unwrap();
        // The last one is the ticket of a process that waited, and no lease of its own.
        let (_held, a, z, _ticket) = (of("held").await, of("a").await, of("z").await, of("held/queue/7").await);
        assert!(text(get(&app(&leases), "/locks").await).await.contains("<tbody id=\"died\" hidden>"));
        let died = "UPDATE lockkit_lease SET expires_us = expires_us - 160000000";
        db.execute(&format!("{died} WHERE token IS NOT NULL AND name <> 'held'")).await;
        // Nobody has seen them alive on this page.
        let app = app(&leases);
        let view = leases_json(&app).await;
        let rows = view["rows"].as_array().unwrap().iter().map(|it| (it["key"].clone(), it["state"].clone()));
        let expected = [("held", "held"), ("a", "died"), ("z", "died")];
        assert_eq!(rows.collect::<Vec<_>>(), expected.map(|(key, state)| (json!(key), json!(state))), "{view}");
        let died = row(&view, "a");
        assert_eq!((&died["fence"], &died["holder"]), (&json!(a.fence().to_string()), &json!("api-1")));
        assert_eq!((&died["held"], &died["waiting"]), (&Value::Null, &json!(0)));
        assert!((120_000..180_000).contains(&died["left"].as_u64().unwrap()), "{died}");
        assert_eq!((&view["held"], &view["died"], &view["waiting"]), (&json!(1), &json!(2), &json!(0)));
        let page = text(get(&app, "/locks").await).await;
        let (above, below) = page.split_once("<tbody id=\"died\">").unwrap();
        // Two keys that are taken in one millisecond have one fence.
        let has = |part: &str, key: &str| part.contains(&format!("<th scope=\"row\">{key}</th>"));
        assert!(has(above, "held") && !has(above, "a") && !has(above, "z"), "{page}");
        assert!(!has(below, "held") && has(below, "a") && has(below, "z"), "{page}");
        assert!(below.contains(&z.fence().to_string()) && below.contains("died 2 min ago"), "{page}");

        let next = leases.lease("a").acquire().await.unwrap();
        sleep(SECOND).await;
        let view = leases_json(&app).await;
        assert_eq!((&row(&view, "a")["state"], &view["died"]), (&json!("held"), &json!(1)), "{view}");
        next.release().await.unwrap();
    }
}

#[tokio::test]
async fn a_page_of_ten_thousand_leases_is_bounded() {
    let leases = Leases::new(MemoryStore::new());
    let keys: Vec<_> = (0..10_000).map(|it| format!("order:{it:05}")).collect();
    let mut held = Vec::new();
    for key in &keys {
        held.push(leases.lease(key.as_str()).acquire().await.unwrap());
    }
    for key in (0..60).map(|it| format!("dead:{it:02}")) {
        held.push(leases.lease(&*key).acquire().await.unwrap());
        leases.store().expire(key).expect("it was held");
    }
    let app = app(&leases);
    let started = std::time::Instant::now();
    let page = text(get(&app, "/locks").await).await;
    println!("{} bytes in {:?}", page.len(), started.elapsed());
    assert!(page.len() < 100_000 && page.contains("10000 held") && page.contains("9810 more"), "{}", page.len());
    let view = leases_json(&app).await;
    assert_eq!((view["rows"].as_array().unwrap().len(), &view["more"]), (200 + 50, &json!(9_800 + 10)));
    let view = json_of(get(&app, "/locks/leases.json?contains=:0999").await).await;
    assert_eq!((&view["held"], &view["more"], &view["rows"][0]["key"]), (&json!(10), &json!(0), &json!("order:09990")));
}

on_every_database! {
    async fn leases_are_shown_and_stolen<S>(db: TestDb<S>) {
        let leases = Leases::new(db.pool.clone());
        let lease = leases.lease("nightly").acquire().await.unwrap();
        let app = app(&leases);
        let view = leases_json(&app).await;
        let shown = row(&view, "nightly");
        assert_eq!((&shown["fence"], &shown["here"]), (&json!(lease.fence().to_string()), &json!(true)));
        let body = json!({ "key": "nightly", "fence": shown["fence"] }).to_string();
        assert_eq!(steal(&app, &[], &body).await.status(), StatusCode::OK);
        assert_eq!(lease.lost().await, LossReason::Stolen);
    }
}

on_every_server! {
    async fn sessions_that_wait_are_a_tree_with_the_statement_that_ends_the_first<S>(db: TestDb<S>) {
        db.execute("CREATE TABLE items (item_id INT PRIMARY KEY, note VARCHAR(20))").await;
        db.execute("INSERT INTO items VALUES (1, '')").await;
        let access = |_: &Parts| Access::ReadOnly;
        // One connection: what the look left on it would be seen below.
        let pool = db.pool_of(1).await;
        let inspector = Inspector::new(Leases::new(db.pool.clone())).database(pool.clone()).access(access);
        let app = Router::new().nest("/locks", inspector.router());
        let view = leases_json(&app).await;
        assert_eq!(view["sessions"], json!({ "lines": [], "notes": [] }));

        let set = "UPDATE items SET note = '<b>' WHERE item_id = 1";
        let mut first = lockkit::begin(&db.pool).await.unwrap();
        S::execute(&mut first, set).await.unwrap();
        let mut waiting = JoinSet::new();
        for _ in 0..5 {
            let mut tx = lockkit::begin(&db.pool).await.unwrap();
            waiting.spawn(async move {
                S::execute(&mut tx, set).await.unwrap();
                tx.commit().await.unwrap();
            });
        }
        let sessions = loop {
            let sessions = leases_json(&app).await["sessions"].take();
            if sessions["lines"].as_array().unwrap().len() == 6 {
                break sessions;
            }
            sleep(SECOND).await;
        };
        let line = |at: usize| &sessions["lines"][at];
        for at in 1..6 {
            assert_eq!(line(at)["lock"], "items (item_id=1)", "{sessions}");
            assert!(line(at)["does"].as_str().unwrap().ends_with(set) && line(at)["waits"].is_u64(), "{sessions}");
        }
        let ends = sessions["notes"].as_array().unwrap();
        let id = line(0)["session"].as_str().unwrap().split(' ').next().unwrap();
        let end = ends[0].as_str().unwrap().strip_prefix(&format!("To end session {id}: "));
        let page = text(get(&app, "/locks").await).await;
        assert!(page.contains("SET note = &#39;&lt;b&gt;&#39;") && !page.contains("<b>"), "{page}");

        db.execute(end.unwrap_or_else(|| panic!("no statement that ends the first: {sessions}"))).await;
        assert!(first.commit().await.is_err(), "it was ended");
        waiting.join_all().await;
        sleep(SECOND).await;
        assert_eq!(leases_json(&app).await["sessions"]["lines"], json!([]));
        if S::NAME == "PostgreSQL" {
            let mut conn = pool.acquire().await.unwrap();
            let limit = S::fetch_i64(&mut conn, "SELECT setting::bigint FROM pg_settings WHERE name = 'lock_timeout'");
            assert_eq!(limit.await.unwrap(), Some(0), "the setting of the look has stayed");
        }
    }
}
