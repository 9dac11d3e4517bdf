//! `test-nightly`: a process that runs the nightly job of `docs/guide/jobs.md`, as it is written there, when it is told
//! `go`.

#![allow(dead_code, unused_imports, unused_variables, missing_debug_implementations, clippy::all, clippy::pedantic)]

include!(concat!(env!("OUT_DIR"), "/readme.rs"));

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(url), Some(night)) = (arguments.next(), arguments.next()) else {
        panic!("usage: test-nightly URL NIGHT; the tests start it themselves");
    };
    let shop = Shop::open(&url).await?;
    println!("ready");
    std::io::stdin().read_line(&mut String::new())?;
    shop.nightly(&night).await?;
    shop.leases.close().await?;
    Ok(())
}
