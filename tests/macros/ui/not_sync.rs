use std::cell::Cell;

use lockkit::{Error, with_lock};

#[with_lock(version, attempts = 2)]
async fn retried(count: Cell<u8>) -> Result<u8, Error> {
    tokio::task::yield_now().await;
    Ok(count.get())
}

fn is_send(_: impl Send) {}

fn main() {
    is_send(retried(Cell::new(1)));
}
