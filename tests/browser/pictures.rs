//! Ten leases that move, a death and a theft: what the page shows of them, and the pictures in `docs/inspector`.

use std::fs;
use std::path::Path;
use std::time::Duration;

use axum::{Router, body::Body, http::Request};
use lockkit::testing::MemoryStore;
use lockkit::{Lease, Leases};
use serde_json::json;
use tokio::time::{pause, resume, sleep};
use tower::ServiceExt;

use crate::driver::Browser;
use crate::{Service, app, operator, row_has, rows_are};

const SECOND: Duration = Duration::from_secs(1);

/// The pictures are drawn anew when this is set.
const DRAW: &str = "LOCKKIT_DRAW";

/// The keys, each with the pause in seconds after which the next process gets it, if one does.
const KEYS: [(&str, Option<u64>); 10] = [
    ("cache:prices", Some(23)),
    ("import:acme", None),
    ("leader:eu", None),
    ("nightly:invoices", None),
    ("nightly:mail", None),
    ("reindex:products", Some(71)),
    ("report:2026-11", Some(113)),
    ("stock:17", Some(17)),
    ("sync:warehouse", Some(47)),
    ("thumbnails", Some(37)),
];

const TTL: Duration = Duration::from_mins(1);

struct Process(Leases<MemoryStore>);

impl Process {
    fn new(store: &MemoryStore, name: &str) -> Self {
        Self(Leases::builder(store.client()).holder(format!("{name}/4711/9f3a")).build().expect("leases"))
    }

    async fn acquire(&self, key: &str, ttl: Duration) -> Option<Lease<MemoryStore>> {
        Some(self.0.lease(key).ttl(ttl).acquire().await.expect("a free lease"))
    }

    /// It renews its leases no more.
    fn is_cut_off(&self) {
        self.0.store().faults().partition();
    }
}

/// Ten minutes in which somebody looks every second, and in which no time passes outside. Returns the leases that are
/// held at their end, among them one of `dying`.
async fn ten_minutes(app: &Router, apis: [&Process; 3], dying: &Process) -> Vec<Option<Lease<MemoryStore>>> {
    let store = dying.0.store();
    let [dead, slow] = ["api-4", "api-6"].map(|it| Process::new(store, it));
    // Of its ttl, less than a third is left ten minutes later.
    let mut held = Vec::new();
    for (number, (key, _)) in KEYS.iter().enumerate() {
        held.push(match *key {
            "leader:eu" => slow.acquire(key, 15 * TTL).await,
            "nightly:mail" => dead.acquire(key, TTL).await,
            _ => apis[number % 3].acquire(key, TTL).await,
        });
    }
    slow.is_cut_off();
    for now in 1..600 {
        for (number, (key, moves)) in KEYS.iter().enumerate() {
            let Some(moves) = moves else { continue };
            if now % moves == 0 {
                drop(held[number].take());
            }
            // Free for two seconds.
            if now % moves == 2 && held[number].is_none() {
                let next = usize::try_from(now / moves).expect("a small number") + number;
                held[number] = apis[next % 3].acquire(key, TTL).await;
            }
        }
        match now {
            200 => dead.is_cut_off(),
            330 => held[4] = apis[2].acquire("nightly:mail", TTL).await,
            400 => held[1] = None,
            410 => held[1] = dying.acquire("import:acme", TTL / 6).await,
            _ => {}
        }
        sleep(SECOND).await;
        let request = Request::get("/admin/locks/leases.json").body(Body::empty()).expect("a request");
        app.clone().oneshot(request).await.expect("an answer");
    }
    held
}

#[tokio::test]
async fn ten_leases_move_one_holder_dies_and_one_is_robbed() {
    let store = MemoryStore::new();
    let [api_1, api_2, api_3, dying, waits @ ..] =
        [1, 2, 3, 5, 7, 8].map(|it| Process::new(&store, &format!("api-{it}")));
    let app = app(&api_1.0, operator);
    let browser = Browser::start().await;
    pause();
    let _held = ten_minutes(&app, [&api_1, &api_2, &api_3], &dying).await;
    let waiting = waits.each_ref().map(|it| tokio::spawn(it.0.lease("nightly:invoices").wait(10 * TTL).acquire()));
    resume();

    let service = Service::of(app).await;
    size(&browser, 1280, 680).await;
    browser.open(&service.url()).await;
    browser.until(&rows_are(10)).await;
    browser.until(&row_has("nightly:invoices", "api-1/4711/9f3a (this process)")).await;
    browser.until("document.querySelectorAll('.lane i').length > 60").await;
    browser.until("document.querySelectorAll('.lane .mark.died').length >= 1").await;

    dying.is_cut_off();
    // The holder of `import:acme` dies while the page is open, and `report:2026-11` is taken.
    browser
        .until("document.getElementById('news').textContent.includes('import:acme: the holder api-5/4711/9f3a died.')")
        .await;
    browser.until(&row_has("import:acme", "died")).await;
    browser.click("[aria-label='Take report:2026-11 from its holder']").await;
    browser.click("#steal").await;
    browser.until(&row_has("report:2026-11", "free for")).await;
    let _next = api_2.acquire("report:2026-11", TTL).await;
    browser.until(&row_has("report:2026-11", "api-2")).await;
    browser.until("document.querySelectorAll('.lane .mark.stolen').length === 1").await;
    browser.until("document.querySelectorAll('tbody tr.low').length === 1").await;
    assert_eq!(browser.console().await, [""; 0]);

    draw("light", &browser).await;
    let dark = json!({ "features": [{ "name": "prefers-color-scheme", "value": "dark" }] });
    browser.set("Emulation.setEmulatedMedia", dark).await;
    draw("dark", &browser).await;
    browser.set("Emulation.setEmulatedMedia", json!({ "features": [] })).await;
    size(&browser, 400, 800).await;
    browser.until("document.documentElement.scrollWidth === 400").await;
    draw("narrow", &browser).await;
    waiting.iter().for_each(tokio::task::JoinHandle::abort);
}

pub(crate) async fn size(browser: &Browser, width: u32, height: u32) {
    let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
    browser.set("Emulation.setDeviceMetricsOverride", size).await;
}

pub(crate) async fn draw(name: &str, browser: &Browser) {
    if std::env::var_os(DRAW).is_some() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/inspector");
        fs::create_dir_all(&folder).expect("make a folder");
        fs::write(folder.join(format!("{name}.png")), browser.picture().await).expect("write a picture");
    }
}
