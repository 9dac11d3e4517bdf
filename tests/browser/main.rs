//! The page of the inspector in a real browser, headless.

mod driver;
mod pictures;

use std::net::SocketAddr;
use std::time::Duration;

use axum::{Router, http::request::Parts, response::Html, routing::get};
use lockkit::testing::{MemoryStore, Operation};
use lockkit::{Leases, LossReason, Tx};
use lockkit_web::{Access, Inspector};
use serde_json::json;
use support::{Postgres, Server, TestDb};
use tokio::{
    net::TcpListener,
    task::{JoinHandle, JoinSet},
    time::sleep,
};

use crate::driver::Browser;

/// A service on loopback, until it is dropped.
struct Service {
    address: SocketAddr,
    serving: JoinHandle<()>,
}

impl Service {
    async fn of(app: Router) -> Self {
        Self::at("127.0.0.1:0".parse().expect("an address"), app).await
    }

    async fn at(address: SocketAddr, app: Router) -> Self {
        let listener = TcpListener::bind(address).await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let serving = tokio::spawn(async move { axum::serve(listener, app).await.expect("serve") });
        Self { address, serving }
    }

    fn url(&self) -> String {
        format!("http://{}/admin/locks", self.address)
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

fn app(leases: &Leases<MemoryStore>, access: impl Fn(&Parts) -> Access + Send + Sync + 'static) -> Router {
    Router::new().nest("/admin/locks", Inspector::new(leases.clone()).access(access).router())
}

fn operator(_: &Parts) -> Access {
    Access::Steal { by: "ann".to_owned() }
}

fn leases() -> Leases<MemoryStore> {
    Leases::builder(MemoryStore::new()).holder("api-1").wait(Duration::from_secs(60)).build().unwrap()
}

/// Whether the row of the key contains this text.
fn row_has(key: &str, text: &str) -> String {
    let (key, text) = (json!(key), json!(text));
    let has = format!("it.cells[0].textContent === {key} && it.innerText.includes({text})");
    format!("[...document.querySelectorAll('tbody tr')].some(it => {has})")
}

/// Whether the page has so many leases, held or not.
fn rows_are(count: usize) -> String {
    format!("document.querySelectorAll('#leases tr:has(td)').length === {count}")
}

/// Whether the row of the key is below those that are held, among the leases whose holder died.
fn row_is_dead(key: &str) -> String {
    format!("[...document.querySelectorAll('#died tr:has(td)')].some(it => it.cells[0].textContent === {})", json!(key))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_is_taken_with_the_fence_that_the_page_showed() {
    let leases = leases();
    let service = Service::of(app(&leases, operator)).await;
    let first = leases.lease("nightly").acquire().await.unwrap();
    let browser = Browser::at(&service.url()).await;
    browser.until(&row_has("nightly", &first.fence().to_string())).await;

    // While the question is open, another holder gets the lease.
    browser.click("tbody button").await;
    browser.until("document.getElementById('ask').open").await;
    first.release().await.unwrap();
    let second = leases.lease("nightly").acquire().await.unwrap();
    browser.until(&row_has("nightly", &second.fence().to_string())).await;
    browser.click("#steal").await;
    browser.until("document.getElementById('news').textContent.includes('does not have the lease any more')").await;
    assert!(second.is_trusted());
    // The browser reports each answer that is an error.
    assert!(browser.console().await.iter().all(|it| it.contains("409")));

    browser.click("tbody button").await;
    browser.click("#steal").await;
    browser.until("document.getElementById('news').textContent.includes('nightly was taken from api-1.')").await;
    assert_eq!(second.lost().await, LossReason::Stolen);
    browser.until(&row_has("nightly", "free for")).await;
    browser.until("document.querySelectorAll('.lane .mark.stolen').length === 1").await;
    assert_eq!(browser.console().await, [""; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_page_works_with_the_keyboard_and_a_screen_reader() {
    let leases = leases();
    let service = Service::of(app(&leases, operator)).await;
    let lease = leases.lease("a").acquire().await.unwrap();
    let browser = Browser::at(&service.url()).await;
    browser.until(&row_has("a", "api-1 (this process)")).await;
    // The service writes rows as well, for browsers without script, and the keys go to those of the script.
    browser.has("tbody button").await;
    let focused = "document.activeElement.getAttribute('aria-label') === 'Take a from its holder'";
    let (tab, enter, escape) = ("\u{e004}", "\u{e007}", "\u{e00c}");
    // The filter, then the first row.
    browser.press(&format!("{tab}{tab}")).await;
    browser.until(focused).await;
    // Rows come and go around it.
    let _before = leases.lease("0").acquire().await.unwrap();
    browser.until(&row_has("0", "api-1")).await;
    browser.until(focused).await;
    browser.press(enter).await;
    browser.until("document.getElementById('ask').open && document.activeElement.id === 'cancel'").await;
    browser.press(escape).await;
    browser.until(&format!("!document.getElementById('ask').open && {focused}")).await;
    assert!(lease.is_trusted());

    for (selector, role, label) in [
        ("table", "table", ""),
        ("tbody th", "rowheader", "0"),
        ("thead th", "columnheader", "Key"),
        ("#contains", "searchbox", "Key or holder contains"),
        ("#news", "status", ""),
        ("tbody button", "button", "Take 0 from its holder"),
        (".lane", "image", "Holders: 1, died: 0, taken: 0"),
        ("tbody progress", "progressbar", "Time left"),
    ] {
        assert_eq!(browser.spoken(selector).await, (role.to_owned(), label.to_owned()), "{selector}");
    }
}

/// A session has a row of stock 1, and each of the others has a row and waits for that of the one before.
async fn chain_of_sessions(db: &TestDb<Postgres>) -> (Tx<sqlx::Postgres>, JoinSet<()>) {
    db.execute("CREATE TABLE stock (item_id INT PRIMARY KEY, left_over INT)").await;
    db.execute("INSERT INTO stock SELECT i, 9 FROM generate_series(1, 4) AS i").await;
    let take = |item: usize| format!("UPDATE stock SET left_over = left_over - 1 WHERE item_id = {item}");
    let mut sessions = Vec::new();
    for item in 1..=4 {
        let mut tx = lockkit::begin(&db.pool).await.unwrap();
        let name = format!("SET LOCAL application_name = 'api-{item}'");
        Postgres::execute(&mut tx, &name).await.unwrap();
        Postgres::execute(&mut tx, &take(item)).await.unwrap();
        sessions.push(tx);
    }
    let first = sessions.remove(0);
    let mut waiting = JoinSet::new();
    for (at, mut tx) in sessions.into_iter().enumerate() {
        let take = take(at + 1);
        waiting.spawn(async move {
            Postgres::execute(&mut tx, &take).await.unwrap();
            tx.commit().await.unwrap();
        });
        sleep(Duration::from_millis(50)).await;
    }
    (first, waiting)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_sessions_of_the_database_are_a_tree_until_the_first_has_ended() {
    let Some(db) = TestDb::<Postgres>::unless_left_out().await else { return };
    let leases = Leases::builder(db.pool.clone()).holder("api-1").build().unwrap();
    let _lease = leases.lease("nightly:invoices").acquire().await.unwrap();
    let inspector = Inspector::new(leases.clone()).database(db.pool.clone()).access(operator);
    let service = Service::of(Router::new().nest("/admin/locks", inspector.router())).await;
    let browser = Browser::at(&service.url()).await;
    browser.until("document.getElementById('nobody').checkVisibility()").await;
    let (first, waiting) = chain_of_sessions(&db).await;
    browser.until("document.querySelectorAll('#waits tbody tr').length === 4").await;
    browser.until("!document.getElementById('nobody').checkVisibility()").await;
    for (at, branches) in ["", "└ ", "  └ ", "    └ "].iter().enumerate() {
        let row = format!("document.querySelectorAll('#waits tbody tr')[{at}]");
        browser.until(&format!("{row}.cells[0].textContent.startsWith('{branches}')")).await;
        browser.until(&format!("{row}.cells[0].textContent.endsWith('api-{}')", at + 1)).await;
        if at > 0 {
            browser.until(&format!("{row}.cells[2].textContent === 'stock (item_id={at})'")).await;
        }
    }
    browser.until("document.getElementById('notes').textContent.includes('pg_terminate_backend')").await;
    pictures::size(&browser, 1280, 420).await;
    pictures::draw("sessions", &browser).await;
    first.commit().await.unwrap();
    waiting.join_all().await;
    browser.until("document.getElementById('nobody').checkVisibility()").await;
    browser.until("document.querySelectorAll('#waits tbody tr').length === 0").await;
    assert_eq!(browser.console().await, [""; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_whose_holder_died_is_shown_apart_until_another_takes_it() {
    let leases = leases();
    let service = Service::of(app(&leases, operator)).await;
    let dead = leases.lease("dead").acquire().await.unwrap();
    leases.lease("released").acquire().await.unwrap().release().await.unwrap();
    let [_first, _last] = [leases.lease("a").acquire().await.unwrap(), leases.lease("z").acquire().await.unwrap()];
    // Nobody looks at that time.
    leases.store().expire("dead").expect("it was held");
    let browser = Browser::start().await;
    // As it is without JavaScript, and then with it.
    for script in [false, true] {
        browser.set("Emulation.setScriptExecutionDisabled", json!({ "value": !script })).await;
        browser.open(&service.url()).await;
        browser.until(&rows_are(3)).await;
        browser.until(&row_is_dead("dead")).await;
        for text in ["api-1", &dead.fence().to_string(), "died ", " ago"] {
            browser.until(&row_has("dead", text)).await;
        }
        browser.until("document.getElementById('died').innerText.startsWith('Holder died: ')").await;
        browser.until("document.getElementById('summary').textContent.startsWith('2 held, 0 waiting, 1 died')").await;
        assert_eq!(browser.get(&row_is_dead("a")).await, false);
    }
    // The focus stays on a row while another one moves down, and up again.
    browser.has("[aria-label='Take z from its holder']").await;
    browser.get("document.querySelector(\"[aria-label='Take z from its holder']\").focus()").await;
    leases.store().expire("a").expect("it was held");
    browser.until(&row_is_dead("a")).await;
    browser.until("document.getElementById('news').textContent.includes('a: the holder api-1 died.')").await;
    browser.until("document.querySelectorAll('#died tr:has(td)').length === 2").await;
    let _next = (leases.lease("a").acquire().await.unwrap(), leases.lease("dead").acquire().await.unwrap());
    browser.until("document.getElementById('died').hidden").await;
    browser.until(&rows_are(3)).await;
    let focused = "document.activeElement.getAttribute('aria-label') === 'Take z from its holder'";
    assert_eq!(browser.get(focused).await, true);
    assert_eq!(browser.console().await, [""; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_are_text_and_the_filter_selects_among_them() {
    let leases = leases();
    let service = Service::of(app(&leases, operator)).await;
    let keys =
        ["<script>document.title = 'broken'</script>", "<img src=x onerror=\"document.title = 'broken'\">", "a'\"&b"];
    let mut held = Vec::new();
    for key in keys {
        held.push(leases.lease(key).acquire().await.unwrap());
    }
    let browser = Browser::at(&service.url()).await;
    for key in keys {
        browser.until(&row_has(key, "api-1")).await;
    }
    browser.click("#contains").await;
    browser.press("'\"&").await;
    browser.until(&rows_are(1)).await;
    browser.until(&row_has(keys[2], "api-1")).await;
    assert_eq!(browser.get("document.title").await, "Leases");
    assert_eq!(browser.get("document.images.length").await, 0);
    assert_eq!(browser.console().await, [""; 0], "nothing was refused, nothing failed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_viewer_cannot_steal_and_nobody_else_can_look() {
    let leases = leases();
    let lease = leases.lease("nightly").acquire().await.unwrap();
    let service = Service::of(app(&leases, |_| Access::ReadOnly)).await;
    let browser = Browser::at(&service.url()).await;
    browser.until(&row_has("nightly", "api-1")).await;
    assert_eq!(browser.get("document.querySelectorAll('tbody button').length").await, 0);
    let post = "fetch('steal', { method: 'POST', headers: { 'X-Lockkit': '1', 'Content-Type': 'application/json' }, \
                body: JSON.stringify({ key: 'nightly', fence: FENCE }) }).then(it => it.status)";
    let post = post.replace("FENCE", &json!(lease.fence().to_string()).to_string());
    assert_eq!(browser.get(&post).await, 403);
    assert!(lease.is_trusted());

    let closed = Router::new().nest("/admin/locks", Inspector::new(leases.clone()).router());
    let closed = Service::of(closed).await;
    browser.open(&closed.url()).await;
    browser.until("document.body.innerText.includes('.access(|parts| Access::ReadOnly)')").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_page_of_another_origin_cannot_steal() {
    let leases = leases();
    let lease = leases.lease("nightly").acquire().await.unwrap();
    let service = Service::of(app(&leases, operator)).await;
    // A form can send JSON as text: the `=` between name and value is in a string.
    let page = format!(
        "<form method=post enctype=text/plain action=\"{url}/steal\">
         <input name='{{\"key\":\"nightly\",\"fence\":\"{fence}\",\"x\":\"' value='\"}}'>
         <button>Win a prize</button></form>
         <script>const sent = Promise.allSettled(['text/plain', 'application/json'].map(type => fetch('{url}/steal', {{
             method: 'POST', mode: type === 'text/plain' ? 'no-cors' : 'cors', credentials: 'include',
             headers: {{ 'Content-Type': type, ...(type === 'text/plain' ? {{}} : {{ 'X-Lockkit': '1' }}) }},
             body: JSON.stringify({{ key: 'nightly', fence: '{fence}' }}) }})))</script>",
        url = service.url(),
        fence = lease.fence(),
    );
    let foreign = Service::of(Router::new().route("/", get(async move || Html(page)))).await;
    let browser = Browser::start().await;
    // Another name for the same machine is another site.
    browser.open(&format!("http://localhost:{}/", foreign.address.port())).await;
    let results = browser.get("sent.then(it => it.map(it => it.status))").await;
    assert_eq!(results, json!(["fulfilled", "rejected"]), "the first is sent, without an answer for the script");
    browser.click("button").await;
    browser.until("document.body.innerText.includes('does not come from the page')").await;
    assert!(lease.is_trusted());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_tabs_share_the_reads_of_one() {
    let leases = leases();
    let _lease = leases.lease("nightly").acquire().await.unwrap();
    let service = Service::of(app(&leases, operator)).await;
    let browser = Browser::at(&service.url()).await;
    browser.open_tab(&service.url()).await;
    browser.open_tab(&service.url()).await;
    browser.until(&row_has("nightly", "api-1")).await;
    let reads = || leases.store().faults().calls(Operation::List);
    let (before, started) = (reads(), std::time::Instant::now());
    sleep(Duration::from_secs(5)).await;
    // Each asks for those that are held, and for those whose holder died.
    let (read, seconds) = ((reads() - before) / 2, started.elapsed().as_secs());
    assert!((2..=seconds * 10 / 9 + 2).contains(&read), "{read} in {seconds} s");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_page_says_when_the_service_or_its_store_is_gone_and_goes_on_after_it() {
    let leases = leases();
    let _lease = leases.lease("nightly").acquire().await.unwrap();
    let service = Service::of(app(&leases, operator)).await;
    let browser = Browser::at(&service.url()).await;
    browser.until(&row_has("nightly", "api-1")).await;
    let news = |text: &str| format!("document.getElementById('news').textContent.includes('{text}')");
    leases.store().faults().partition();
    browser.until(&news("talking to a store")).await;
    assert_eq!(browser.get("document.body.className").await, "stale");
    leases.store().faults().heal();
    browser.until(&news("Connected again.")).await;

    let address = service.address;
    drop(service);
    browser.until(&news("does not answer")).await;
    let _again = Service::at(address, app(&leases, operator)).await;
    browser.until(&news("Connected again.")).await;
    assert_eq!(browser.get("document.body.className").await, "");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_javascript_there_is_a_table() {
    let leases = leases();
    let lease = leases.lease("nightly").acquire().await.unwrap();
    let service = Service::of(app(&leases, operator)).await;
    let browser = Browser::start().await;
    browser.set("Emulation.setScriptExecutionDisabled", json!({ "value": true })).await;
    browser.open(&service.url()).await;
    let text = browser.get("document.body.innerText").await;
    let text = text.as_str().expect("text");
    for part in ["Without JavaScript", "nightly", "api-1", &lease.fence().to_string(), "1 held"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(browser.get("document.querySelectorAll('tbody progress').length").await, 1);
    assert_eq!(browser.get(&rows_are(1)).await, true);
}
