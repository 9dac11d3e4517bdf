//! A toy Redis: the commands that recipes for locks use, each of them atomic, on Tokio's clock.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use anyhow::Result;
use tokio::{task::yield_now, time::Instant};

use crate::stage::View;

#[derive(Debug, Clone, Default)]
pub(crate) struct Toy(Arc<Mutex<Server>>);

#[derive(Debug, Default)]
struct Server {
    keys: Keys,
    /// As the replica has them: without the last write.
    replica: Keys,
    /// How far its clock is ahead of Tokio's.
    ahead: Duration,
}

type Keys = BTreeMap<&'static str, Value>;

#[derive(Debug, Clone)]
struct Value {
    text: String,
    expires: Option<Instant>,
}

impl Toy {
    /// `SETNX key value`: 1 if the key was free.
    pub(crate) async fn set_nx(&self, key: &'static str, value: &str) -> i64 {
        yield_now().await;
        i64::from(self.server().insert(key, value, None))
    }

    /// `SET key value NX PX ttl`.
    pub(crate) async fn set_nx_px(&self, key: &'static str, value: &str, ttl: Duration) -> Option<String> {
        yield_now().await;
        self.server().insert(key, value, Some(ttl)).then(|| "OK".to_owned())
    }

    /// `GET key`.
    pub(crate) async fn get(&self, key: &'static str) -> Option<String> {
        yield_now().await;
        self.server().live(key).map(|it| it.text.clone())
    }

    /// `GETSET key value`: the value before.
    pub(crate) async fn get_set(&self, key: &'static str, value: &str) -> Option<String> {
        yield_now().await;
        let mut server = self.server();
        let before = server.live(key).map(|it| it.text.clone());
        server.write().insert(key, Value { text: value.to_owned(), expires: None });
        before
    }

    /// `EXPIRE key ttl`: 1 if the key exists.
    pub(crate) async fn expire(&self, key: &'static str, ttl: Duration) -> i64 {
        yield_now().await;
        i64::from(self.server().extend(key, ttl, |_| true))
    }

    /// `DEL key`: how many keys there were.
    pub(crate) async fn del(&self, key: &'static str) -> i64 {
        yield_now().await;
        i64::from(self.server().remove(key, |_| true))
    }

    /// The script that deletes a key if it has this value: `if redis.call("get", …) == ARGV[1] then del`.
    pub(crate) async fn delete_if(&self, key: &'static str, value: &str) -> i64 {
        yield_now().await;
        i64::from(self.server().remove(key, |it| it == value))
    }

    /// The script that renews a key if it has this value.
    pub(crate) async fn extend_if(&self, key: &'static str, value: &str, ttl: Duration) -> i64 {
        yield_now().await;
        i64::from(self.server().extend(key, ttl, |it| it == value))
    }

    /// The master dies before it has sent its last write to the replica, and the replica takes its place.
    pub(crate) async fn fail_over(&self) {
        yield_now().await;
        let mut server = self.server();
        server.keys = server.replica.clone();
    }

    /// Moves its clock, where Tokio's is not paused.
    pub(crate) async fn pass(self, time: Duration) -> Result<()> {
        self.server().ahead += time;
        yield_now().await;
        Ok(())
    }

    /// For a stage: the value of the key.
    pub(crate) async fn view(self, key: &'static str) -> Result<View> {
        let value = self.get(key).await;
        Ok(value.unwrap_or_else(|| "free".to_owned()).into())
    }

    fn server(&self) -> MutexGuard<'_, Server> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Server {
    fn now(&self) -> Instant {
        Instant::now() + self.ahead
    }

    fn live(&self, key: &str) -> Option<&Value> {
        self.keys.get(key).filter(|it| it.expires.is_none_or(|at| at > self.now()))
    }

    /// The keys, to write once.
    fn write(&mut self) -> &mut Keys {
        self.replica = self.keys.clone();
        &mut self.keys
    }

    fn insert(&mut self, key: &'static str, value: &str, ttl: Option<Duration>) -> bool {
        let is_free = self.live(key).is_none();
        if is_free {
            let expires = ttl.map(|it| self.now() + it);
            self.write().insert(key, Value { text: value.to_owned(), expires });
        }
        is_free
    }

    fn extend(&mut self, key: &'static str, ttl: Duration, is_meant: impl Fn(&str) -> bool) -> bool {
        let live = self.live(key).filter(|it| is_meant(&it.text)).cloned();
        let Some(mut value) = live else {
            return false;
        };
        value.expires = Some(self.now() + ttl);
        self.write().insert(key, value);
        true
    }

    fn remove(&mut self, key: &'static str, is_meant: impl Fn(&str) -> bool) -> bool {
        let is_there = self.live(key).is_some_and(|it| is_meant(&it.text));
        if is_there {
            self.write().remove(key);
        }
        is_there
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::sleep;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn a_key_is_free_after_its_ttl_and_a_script_touches_its_own_value_only() {
        let redis = Toy::default();
        assert_eq!(redis.set_nx_px("k", "a", SECOND * 10).await.as_deref(), Some("OK"));
        assert_eq!((redis.set_nx("k", "b").await, redis.delete_if("k", "b").await), (0, 0));
        assert_eq!((redis.extend_if("k", "b", SECOND).await, redis.extend_if("k", "a", SECOND * 20).await), (0, 1));
        sleep(SECOND * 19).await;
        assert_eq!(redis.get_set("k", "b").await.as_deref(), Some("a"));
        assert_eq!((redis.expire("k", SECOND).await, redis.expire("other", SECOND).await), (1, 0));
        sleep(SECOND).await;
        assert_eq!((redis.get("k").await, redis.del("k").await), (None, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_that_missed_its_answer_is_refused_by_its_own_lock() {
        let redis = Toy::default();
        drop(redis.set_nx_px("k", "a", SECOND * 10).await); // "OK", which does not arrive.
        assert_eq!(redis.set_nx_px("k", "a", SECOND * 10).await, None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_fail_over_loses_the_last_write_and_no_other() {
        let redis = Toy::default();
        redis.set_nx("first", "a").await;
        redis.set_nx("last", "a").await;
        redis.fail_over().await;
        assert_eq!((redis.get("first").await.as_deref(), redis.get("last").await), (Some("a"), None));
    }
}
