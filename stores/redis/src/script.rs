//! The scripts: one for each operation, so that each is atomic and takes one round trip.

use std::time::Duration;

use redis::{Cmd, Script, ToRedisArgs, Value};

use crate::{connection::Connection, error::Failure, layout::Layout};

/// One script, as the server knows it.
#[derive(Debug)]
pub(crate) struct Text {
    code: String,
    hash: String,
}

/// The scripts of a layout.
#[derive(Debug)]
pub(crate) struct Scripts {
    pub(crate) acquire: Text,
    pub(crate) raise: Text,
    pub(crate) renew: Text,
    pub(crate) release: Text,
    pub(crate) list: Text,
    pub(crate) sweep: Text,
    pub(crate) declare: Text,
}

impl Scripts {
    pub(crate) fn of(layout: Layout) -> Self {
        let lock = match layout {
            Layout::Token => include_str!("lua/token.lua"),
            Layout::Redisson => include_str!("lua/redisson.lua"),
        };
        let text = |operation: &str| {
            let code = [lock, include_str!("lua/common.lua"), operation].join("\n");
            let hash = Script::new(&code).get_hash().to_owned();
            Text { code, hash }
        };
        Self {
            acquire: text(include_str!("lua/acquire.lua")),
            raise: text(include_str!("lua/raise.lua")),
            renew: text(include_str!("lua/renew.lua")),
            release: text(include_str!("lua/release.lua")),
            list: text(include_str!("lua/list.lua")),
            sweep: text(include_str!("lua/sweep.lua")),
            declare: text(include_str!("lua/declare.lua")),
        }
    }
}

/// One call of a script.
#[derive(Debug)]
pub(crate) struct Call<'s> {
    text: &'s Text,
    keys: Vec<String>,
    arguments: Vec<Vec<u8>>,
}

impl Text {
    pub(crate) fn call(&self) -> Call<'_> {
        Call { text: self, keys: Vec::new(), arguments: Vec::new() }
    }
}

impl Call<'_> {
    pub(crate) fn key(mut self, key: impl Into<String>) -> Self {
        self.keys.push(key.into());
        self
    }

    pub(crate) fn arg(mut self, argument: impl ToRedisArgs) -> Self {
        argument.write_redis_args(&mut self.arguments);
        self
    }

    /// Runs the script. A server that does not know it, such as after `SCRIPT FLUSH`, gets its text in a second
    /// request.
    pub(crate) async fn run(self, connection: &Connection) -> Result<Value, Failure> {
        let answer = connection.query(&self.command("EVALSHA", &self.text.hash, None)).await;
        match answer {
            Err(failure) if failure.is_no_script() => {
                connection.query(&self.command("EVAL", &self.text.code, None)).await
            }
            answer => answer,
        }
    }

    /// As [`run`](Self::run), for a script whose first argument is 1 if it must check the server: on a connection that
    /// has not done so for a while, and on a server that does not know the script, which may be another one.
    pub(crate) async fn run_checked(self, connection: &Connection) -> Result<Value, Failure> {
        let known = |checks| self.command("EVALSHA", &self.text.hash, Some(checks));
        match connection.query_checked(known).await {
            Err(failure) if failure.is_no_script() => {
                connection.query_checked(|_| self.command("EVAL", &self.text.code, Some(true))).await
            }
            answer => answer,
        }
    }

    fn command(&self, name: &str, script: &str, checks: Option<bool>) -> Cmd {
        let mut command = redis::cmd(name);
        command.arg(script).arg(self.keys.len()).arg(&self.keys);
        command.arg(checks.map(u8::from)).arg(&self.arguments);
        command
    }
}

/// Whole milliseconds, rounded up.
pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros().div_ceil(1000)).unwrap_or(u64::MAX)
}
