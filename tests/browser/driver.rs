//! A headless Chromium, by the protocol of `WebDriver`.
//!
//! Few of its commands are needed. A library for them would switch on `serde_json/preserve_order` in the whole
//! workspace, under which stored answers are not tested as most services have them.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use base64::{Engine, prelude::BASE64_STANDARD};
use lockkit_store_servers::{Program, free_port};
use reqwest::{Client, Method};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::time::sleep;

/// Longer than any page takes to change.
const LIMIT: Duration = Duration::from_secs(30);

/// The name of the reference to an element in the JSON of `WebDriver`.
const ELEMENT: &str = "element-6066-11e4-a52e-4f735466cecf";

/// One browser with its own driver. Both end when this is dropped.
pub(crate) struct Browser {
    client: Client,
    driver: Program,
    session: String,
    _folder: TempDir,
}

impl Browser {
    pub(crate) async fn start() -> Self {
        let folder = TempDir::new().expect("make a folder");
        let port = free_port();
        let driver = Program::start("chromedriver", &[&format!("--port={port}")], folder.path(), port);
        let client = Client::builder().timeout(2 * LIMIT).build().expect("a client");
        let profile = format!("--user-data-dir={}", folder.path().join("profile").display());
        // In a container, Chromium has no sandbox and little shared memory.
        let arguments = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            &profile,
        ];
        let wanted = json!({ "capabilities": { "alwaysMatch": {
            "goog:chromeOptions": { "args": arguments },
            "goog:loggingPrefs": { "browser": "ALL" },
        } } });
        let mut browser = Self { client, driver, session: String::new(), _folder: folder };
        // On a busy machine, Chromium now and then exits while it starts.
        let mut session = browser.answer(Method::POST, "/session", Some(&wanted)).await;
        for _ in 0..2 {
            if session.is_err() {
                session = browser.answer(Method::POST, "/session", Some(&wanted)).await;
            }
        }
        let session = session.expect("Chromium starts");
        browser.session = format!("/session/{}", session["sessionId"].as_str().expect("a session"));
        browser
    }

    /// Starts with this page.
    pub(crate) async fn at(url: &str) -> Self {
        let browser = Self::start().await;
        browser.open(url).await;
        browser
    }

    async fn post(&self, command: &str, body: Value) -> Value {
        self.send(Method::POST, command, Some(body)).await
    }

    async fn send(&self, method: Method, command: &str, body: Option<Value>) -> Value {
        let answer = self.answer(method, command, body.as_ref()).await;
        answer.unwrap_or_else(|err| panic!("{command}: {err}"))
    }

    /// The value of the driver's answer, or its error.
    async fn answer(&self, method: Method, command: &str, body: Option<&Value>) -> Result<Value, Value> {
        let url = format!("http://127.0.0.1:{}{}{command}", self.driver.port, self.session);
        let request = self.client.request(method, url);
        let request = if let Some(body) = body { request.json(body) } else { request };
        let answer = request.send().await.expect("an answer of the driver");
        let is_ok = answer.status().is_success();
        let mut answer: Value = answer.json().await.expect("JSON of the driver");
        let value = answer["value"].take();
        if is_ok { Ok(value) } else { Err(value) }
    }

    pub(crate) async fn open(&self, url: &str) {
        self.post("/url", json!({ "url": url })).await;
    }

    /// Opens another tab, and makes it the current one.
    pub(crate) async fn open_tab(&self, url: &str) {
        let tab = self.post("/window/new", json!({ "type": "tab" })).await;
        self.post("/window", json!({ "handle": tab["handle"] })).await;
        self.open(url).await;
    }

    /// The result of a script: the value of an expression.
    pub(crate) async fn get(&self, expression: &str) -> Value {
        self.post("/execute/sync", json!({ "script": format!("return {expression}"), "args": [] })).await
    }

    /// Waits until the expression is true.
    pub(crate) async fn until(&self, expression: &str) {
        let deadline = Instant::now() + LIMIT;
        while self.get(expression).await != Value::Bool(true) {
            let text = || self.get("document.body.innerText");
            assert!(Instant::now() < deadline, "not true in {LIMIT:?}: {expression}\n{:#}", text().await);
            sleep(Duration::from_millis(50)).await;
        }
    }

    /// Waits until the page has such an element.
    pub(crate) async fn has(&self, selector: &str) {
        self.until(&format!("document.querySelector({}) !== null", json!(selector))).await;
    }

    async fn element(&self, selector: &str) -> String {
        self.has(selector).await;
        let element = self.post("/element", json!({ "using": "css selector", "value": selector })).await;
        format!("/element/{}", element[ELEMENT].as_str().expect("an element"))
    }

    /// Clicks with the mouse, which needs an element that can be seen.
    pub(crate) async fn click(&self, selector: &str) {
        let element = self.element(selector).await;
        self.post(&format!("{element}/click"), json!({})).await;
    }

    /// Presses keys, wherever the focus is.
    pub(crate) async fn press(&self, keys: &str) {
        let press = |key: char| {
            let key = key.to_string();
            [json!({ "type": "keyDown", "value": key }), json!({ "type": "keyUp", "value": key })]
        };
        let actions: Vec<_> = keys.chars().flat_map(press).collect();
        self.post("/actions", json!({ "actions": [{ "type": "key", "id": "keys", "actions": actions }] })).await;
    }

    /// The role and the name by which a screen reader knows the element.
    pub(crate) async fn spoken(&self, selector: &str) -> (String, String) {
        let element = self.element(selector).await;
        let [role, label] = ["computedrole", "computedlabel"].map(|it| format!("{element}/{it}"));
        let text = |value: Value| value.as_str().expect("text").to_owned();
        (text(self.send(Method::GET, &role, None).await), text(self.send(Method::GET, &label, None).await))
    }

    /// A command of Chromium's own protocol.
    pub(crate) async fn set(&self, command: &str, parameters: Value) {
        self.post("/goog/cdp/execute", json!({ "cmd": command, "params": parameters })).await;
    }

    /// What the browser shows, as a PNG.
    pub(crate) async fn picture(&self) -> Vec<u8> {
        let picture = self.send(Method::GET, "/screenshot", None).await;
        BASE64_STANDARD.decode(picture.as_str().expect("text")).expect("base64")
    }

    /// What the console has shown since the last call, without what Chromium says of its own pages.
    pub(crate) async fn console(&self) -> Vec<String> {
        let entries = self.post("/se/log", json!({ "type": "browser" })).await;
        let entries = entries.as_array().cloned().unwrap_or_default();
        let messages = entries.iter().map(|it| it["message"].as_str().unwrap_or_default());
        messages.filter(|it| !it.starts_with("chrome://")).map(str::to_owned).collect()
    }
}

impl Drop for Browser {
    /// Ends the browser, which would outlive its driver.
    fn drop(&mut self) {
        let Ok(mut driver) = TcpStream::connect(("127.0.0.1", self.driver.port)) else { return };
        let request = format!("DELETE {} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", self.session);
        let _ = driver.set_read_timeout(Some(LIMIT));
        let _ = driver.write_all(request.as_bytes());
        let _ = driver.read(&mut [0; 1024]);
    }
}
