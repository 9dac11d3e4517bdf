//! Redis as the recipes see it: the toy, or a server.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::Result;
use redis::{Connection, FromRedisValue, cmd};
use tokio::{task::spawn_blocking, time::Instant};

use super::{Place, Toy};
use crate::stage::View;

#[derive(Debug, Clone)]
pub(crate) enum Redis {
    Toy(Toy),
    Server(Link),
}

/// Deletes a key that has this value.
const UNLOCK: &str = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0";

/// Renews a key that has this value.
const RENEW: &str = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end \
                     return 0";

impl Redis {
    /// The server that the reader has named, or else the toy.
    pub(crate) async fn open(place: &Place) -> Result<Self> {
        Ok(match place.redis() {
            Some(url) => Self::Server(Link::open(url).await?),
            None => Self::Toy(Toy::default()),
        })
    }

    /// `SETNX key value`: 1 if the key was free.
    pub(crate) async fn set_nx(&self, key: &'static str, value: &str) -> Result<i64> {
        match self {
            Self::Toy(toy) => Ok(toy.set_nx(key, value).await),
            Self::Server(link) => link.query(&["SETNX", key, value]).await,
        }
    }

    /// `SET key value NX PX ttl`.
    pub(crate) async fn set_nx_px(&self, key: &'static str, value: &str, ttl: Duration) -> Result<Option<String>> {
        match self {
            Self::Toy(toy) => Ok(toy.set_nx_px(key, value, ttl).await),
            Self::Server(link) => link.query(&["SET", key, value, "NX", "PX", &millis(ttl)]).await,
        }
    }

    /// `GET key`.
    pub(crate) async fn get(&self, key: &'static str) -> Result<Option<String>> {
        match self {
            Self::Toy(toy) => Ok(toy.get(key).await),
            Self::Server(link) => link.query(&["GET", key]).await,
        }
    }

    /// `GETSET key value`: the value before.
    pub(crate) async fn get_set(&self, key: &'static str, value: &str) -> Result<Option<String>> {
        match self {
            Self::Toy(toy) => Ok(toy.get_set(key, value).await),
            Self::Server(link) => link.query(&["GETSET", key, value]).await,
        }
    }

    /// `EXPIRE key ttl`: 1 if the key exists.
    pub(crate) async fn expire(&self, key: &'static str, ttl: Duration) -> Result<i64> {
        match self {
            Self::Toy(toy) => Ok(toy.expire(key, ttl).await),
            Self::Server(link) => link.query(&["PEXPIRE", key, &millis(ttl)]).await,
        }
    }

    /// `DEL key`: how many keys there were.
    pub(crate) async fn del(&self, key: &'static str) -> Result<i64> {
        match self {
            Self::Toy(toy) => Ok(toy.del(key).await),
            Self::Server(link) => link.query(&["DEL", key]).await,
        }
    }

    /// The script that deletes a key if it has this value.
    pub(crate) async fn delete_if(&self, key: &'static str, value: &str) -> Result<i64> {
        match self {
            Self::Toy(toy) => Ok(toy.delete_if(key, value).await),
            Self::Server(link) => link.query(&["EVAL", UNLOCK, "1", key, value]).await,
        }
    }

    /// The script that renews a key if it has this value.
    pub(crate) async fn extend_if(&self, key: &'static str, value: &str, ttl: Duration) -> Result<i64> {
        match self {
            Self::Toy(toy) => Ok(toy.extend_if(key, value, ttl).await),
            Self::Server(link) => link.query(&["EVAL", RENEW, "1", key, value, &millis(ttl)]).await,
        }
    }

    /// Moves its clock, where Tokio's is not paused.
    pub(crate) async fn pass(self, time: Duration) -> Result<()> {
        match self {
            Self::Toy(toy) => toy.pass(time).await,
            Self::Server(link) => link.pass(time).await,
        }
    }

    /// For a stage: the value of the key.
    pub(crate) async fn view(self, key: &'static str) -> Result<View> {
        let value = self.get(key).await?;
        Ok(value.unwrap_or_else(|| "free".to_owned()).into())
    }
}

fn millis(time: Duration) -> String {
    time.as_millis().to_string()
}

/// A connection to a server whose keys expire by the clock of the run.
///
/// Before each command, the expiries of all keys are moved by the time that has passed in the run and not on the
/// server. A command runs on a thread of its own: meanwhile Tokio's paused clock stands still.
#[derive(Clone)]
pub(crate) struct Link(Arc<Mutex<State>>);

struct State {
    conn: Connection,
    /// How far the clock of the run is ahead of Tokio's.
    ahead: Duration,
    /// The two clocks when they were last compared: that of the run, and the real one.
    seen: (Instant, std::time::Instant),
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").finish_non_exhaustive()
    }
}

/// Moves the expiries of all keys. One that is over deletes its key.
const SHIFT: &str = "for _, key in ipairs(redis.call('KEYS', '*')) do
                         local left = redis.call('PTTL', key)
                         if left >= 0 then redis.call('PEXPIRE', key, left - ARGV[1]) end
                     end";

impl Link {
    pub(crate) async fn open(url: &str) -> Result<Self> {
        let client = redis::Client::open(url)?;
        let conn = spawn_blocking(move || client.get_connection()).await??;
        let seen = (Instant::now(), std::time::Instant::now());
        Ok(Self(Arc::new(Mutex::new(State { conn, ahead: Duration::ZERO, seen }))))
    }

    async fn query<T: FromRedisValue + Send + 'static>(&self, words: &[&str]) -> Result<T> {
        let words: Vec<_> = words.iter().map(|&it| it.to_owned()).collect();
        self.on_time(move |conn| Ok(cmd(&words[0]).arg(&words[1..]).query(conn)?)).await
    }

    /// Runs this when the server's clock is that of the run.
    pub(crate) async fn on_time<T: Send + 'static>(
        &self,
        act: impl FnOnce(&mut Connection) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (state, now) = (self.0.clone(), Instant::now());
        spawn_blocking(move || {
            let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
            state.keep_time(now)?;
            act(&mut state.conn)
        })
        .await?
    }

    async fn pass(self, time: Duration) -> Result<()> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).ahead += time;
        self.on_time(|_conn| Ok(())).await
    }
}

impl State {
    fn keep_time(&mut self, now: Instant) -> Result<()> {
        // Of two commands at once, the later one may come first.
        let now = ((now + self.ahead).max(self.seen.0), std::time::Instant::now());
        let run = i64::try_from(now.0.duration_since(self.seen.0).as_millis())?;
        let server = i64::try_from(now.1.duration_since(self.seen.1).as_millis())?;
        cmd("EVAL").arg(SHIFT).arg(0).arg(run - server).exec(&mut self.conn)?;
        self.seen = now;
        Ok(())
    }
}
