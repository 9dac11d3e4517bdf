//! A statement for `lockkit doctor --query`.
#![no_main]

use sqlx::{Connection, SqliteConnection};
use tokio::runtime::{Builder, Runtime};

thread_local! {
    static RUNTIME: Runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
}

libfuzzer_sys::fuzz_target!(|statement: &str| RUNTIME.with(|runtime| runtime.block_on(async {
    let mut conn = SqliteConnection::connect("sqlite::memory:").await.expect("a database");
    lockkit_inspect::check_statement(&mut conn, statement).await;
})));
