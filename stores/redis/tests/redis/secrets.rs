//! Passwords: in no `Debug` of a type, and in no error.

use std::{error::Error, time::Duration};

use lockkit::Leases;
use lockkit_redis::{Quorum, RedisStore, RedisStoreBuilder, Server};
use lockkit_store_servers::redis::Redis;
use redis::{
    Client, ConnectionAddr,
    sentinel::{SentinelClientBuilder, SentinelServerType},
};

use crate::support::{PATIENCE, plain, send};

const SECRET: &str = "s3cr3t";

fn texts(err: &dyn Error) -> Vec<String> {
    let mut texts = vec![format!("{err:?}"), format!("{err}")];
    let mut source = err.source();
    while let Some(it) = source {
        texts.extend([format!("{it:?}"), format!("{it}")]);
        source = it.source();
    }
    texts
}

fn with_password(port: u16, password: &str) -> RedisStoreBuilder {
    let client = Client::open(format!("redis://lockkit:{password}@127.0.0.1:{port}/")).unwrap();
    RedisStore::builder(client).connect_timeout(PATIENCE).answer_timeout(PATIENCE)
}

#[tokio::test]
async fn no_type_and_no_error_shows_a_password() {
    let server = Redis::start();
    let mut conn = plain(&server).await;
    send::<()>(&mut conn, &format!("ACL SETUSER lockkit on >{SECRET} ~* &* +@all")).await;
    let right = with_password(server.program.port, SECRET);
    let store = right.clone().connect().await.unwrap();
    let address = ConnectionAddr::Tcp("127.0.0.1".to_owned(), 1);
    let sentinel = SentinelClientBuilder::new([address], "leases", SentinelServerType::Master).unwrap();
    let sentinel = sentinel.set_client_to_redis_password(SECRET).set_client_to_sentinel_password(SECRET);
    let sentinel = Server::from(sentinel.build().unwrap());
    let refused = with_password(1, SECRET).connect().await.unwrap_err();
    assert!(refused.to_string().contains("127.0.0.1:1:"), "the address is named: {refused}");
    let mut texts = vec![
        format!("{right:?} {store:?} {:?}", Leases::new(store.clone())),
        format!("{sentinel:?} {:?}", RedisStore::builder(sentinel.clone())),
    ];
    for err in [
        with_password(server.program.port, &format!("{SECRET}-wrong")).connect().await.unwrap_err(),
        refused,
        RedisStore::connect(sentinel).await.unwrap_err(),
        Quorum::with([1, 1, 1].map(|port| with_password(port, SECRET))).await.unwrap_err(),
    ] {
        texts.extend(self::texts(&err));
    }
    drop(server);
    let leases = Leases::builder(store).wait(Duration::ZERO).build().unwrap();
    texts.extend(self::texts(&leases.lease("k").acquire().await.unwrap_err()));
    for text in texts {
        assert!(!text.contains(SECRET), "{text}");
    }
}
