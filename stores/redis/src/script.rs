//! The scripts: one for each operation, so that each is atomic and takes one round trip.

use std::{fmt, time::Duration};

use redis::{Cmd, Script, Value};

use crate::{claim::SPARE, connection::Connection, error::Failure, layout::Layout};

/// One script, as the server knows it.
pub(crate) struct Text {
    code: String,
    hash: String,
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Text({})", self.hash)
    }
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
        let text = |parts: &[&str]| {
            let code = format!("local SPARE = {SPARE}\n{lock}\n{}\n{}", include_str!("lua/row.lua"), parts.join("\n"));
            let hash = Script::new(&code).get_hash().to_owned();
            Text { code, hash }
        };
        let (common, server) = (include_str!("lua/common.lua"), include_str!("lua/server.lua"));
        // A function costs its script some time even if it is not called, so the shortest way comes first.
        Self {
            acquire: text(&[include_str!("lua/grant.lua"), common, server, include_str!("lua/acquire.lua")]),
            raise: text(&[common, include_str!("lua/raise.lua")]),
            renew: text(&[common, include_str!("lua/renew.lua")]),
            release: text(&[include_str!("lua/free.lua"), common, include_str!("lua/release.lua")]),
            list: text(&[common, server, include_str!("lua/list.lua")]),
            sweep: text(&[common, include_str!("lua/sweep.lua")]),
            declare: text(&[common, server, include_str!("lua/declare.lua")]),
        }
    }
}

impl Text {
    /// Runs the script. `add` adds the number of keys, the keys and the arguments to the command, and gets the
    /// `run_id` of the server. A server that does not know the script, such as after `SCRIPT FLUSH`, gets its text in a
    /// second request.
    pub(crate) async fn run(&self, connection: &Connection, add: impl Fn(&mut Cmd, &str)) -> Result<Value, Failure> {
        let command = |name: &str, script: &str, run: &str| {
            let mut command = redis::cmd(name);
            command.arg(script);
            add(&mut command, run);
            command
        };
        match connection.query(|run| command("EVALSHA", &self.hash, run)).await {
            Err(failure) if failure.is_no_script() => connection.query(|run| command("EVAL", &self.code, run)).await,
            answer => answer,
        }
    }
}

/// Whole milliseconds, rounded up.
pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros().div_ceil(1000)).unwrap_or(u64::MAX)
}
