//! Holds a lease until its standard input ends, and reports its loss.
//!
//! ```text
//! cargo run -p lockkit-etcd --example hold -- http://127.0.0.1:2379 nightly 10
//! ```
//! The last argument is the ttl in seconds.

use std::{env, error::Error, time::Duration};

use lockkit::Leases;
use lockkit_etcd::EtcdStore;
use tokio::io::{AsyncReadExt, stdin};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [endpoints, key, ttl] = &*arguments else {
        return Err("usage: hold ENDPOINTS KEY SECONDS".into());
    };
    let ttl = Duration::from_secs_f64(ttl.parse()?);
    let builder = EtcdStore::builder(endpoints.split(',')).session_ttl(Duration::from_secs(2));
    let store = builder.connect().await?;
    let leases = Leases::builder(store).ttl(ttl).build()?;
    let lease = leases.lease(key.as_str()).wait(Duration::from_secs(60)).acquire().await?;
    println!("holding {}", lease.fence());
    let (mut input, mut end) = (stdin(), Vec::new());
    tokio::select! {
        reason = lease.lost() => println!("lost: {reason}"),
        _ = input.read_to_end(&mut end) => println!("{:?}", lease.release().await?),
    }
    Ok(())
}
