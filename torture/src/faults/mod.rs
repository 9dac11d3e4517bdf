//! The faults: what each one does to the workers, the server or the network between, and what it excuses.

mod leader;
mod network;
mod processes;
mod server;
mod statements;

use std::time::Duration;

use anyhow::Result;
use clap::ValueEnum;
use support::Server as _;
use tokio::time::Instant;

use crate::clock;
use crate::cluster::{Cluster, Engine};
use crate::crew::{Crew, Recipe};
use crate::oracle::Excuses;
use crate::proxy::Proxy;
use crate::rig::Rig;
use crate::server::{PrivateServer, Settings, faketime};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Fault {
    /// Nothing but contention.
    None,
    /// SIGKILL of a holder.
    Kill,
    /// SIGSTOP of a holder for longer than its ttl.
    Stop,
    /// A holder aborts while its commit is on its way.
    Abort,
    /// Every other operation is dropped at some moment, as `tokio::select!`, a timeout or an abort drops it.
    Drop,
    /// The answer to a COMMIT is lost: the connection is reset, or silent for longer than a ttl.
    LostCommits,
    /// Packets vanish in both directions; the connections of before stay silent for ever.
    HalfOpen,
    /// SIGKILL of the server, and its restart.
    Restart,
    /// SIGSTOP of the server for longer than a ttl.
    Freeze,
    /// `pg_terminate_backend` or KILL of all sessions.
    Terminate,
    /// `pg_cancel_backend` or KILL QUERY of all sessions.
    Cancel,
    /// An operator takes leases away.
    Steal,
    /// The sweeper deletes at once what is free.
    Sweep,
    /// SERIALIZABLE by default.
    Isolation,
    /// The server's own short timeouts.
    Timeouts,
    /// No connection is left for anybody else.
    Connections,
    /// The server is read-only for a while.
    ReadOnly,
    /// The server's disk is full for a while.
    DiskFull,
    /// The server's clock steps forward and back.
    Clock,
    /// All connections are reset.
    Cut,
    /// All answers are lost for longer than a ttl.
    LostAnswers,
    /// Both directions stall for longer than a ttl, then go on.
    Stall,
    /// Requests stall for longer than a ttl, then arrive.
    StallRequests,
    /// Answers stall for longer than a ttl, then arrive.
    StallAnswers,
    /// Every packet is some 50 ms late.
    Slow,
    /// Each process has a pool of one connection, shared with its leases.
    PoolOfOne,
    /// Each process has a pool of two connections, shared with its leases.
    PoolOfTwo,
    /// The primary dies, and an asynchronous replica takes its place.
    Promote,
    /// The primary dies, and a synchronous replica takes its place.
    PromoteSync,
    /// The workers' connections go through `PgBouncer` in transaction mode.
    PgBouncer,
    /// An operator makes another member of a cluster the leader.
    SwitchOver,
    /// SIGKILL of all processes of a cluster's leader, and their restart.
    KillLeader,
    /// SIGSTOP of all processes of a cluster's leader until another one leads, and longer. Half of the workers stay
    /// with it.
    FreezeLeader,
    /// No packet passes between a cluster's leader and the other members. Half of the workers stay with it.
    CutLeader,
}

impl Fault {
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map(|it| it.get_name().to_owned()).unwrap_or_default()
    }

    /// Why it cannot be injected here.
    pub(crate) fn left_out<S: Rig>(self, on_a_private_server: bool, engine: Option<Engine>) -> Option<&'static str> {
        use Fault::{
            Abort, Clock, Connections, DiskFull, Drop, Freeze, Isolation, Kill, None as Nothing, PgBouncer, PoolOfOne,
            PoolOfTwo, Promote, PromoteSync, ReadOnly, Restart, Steal, Stop, Sweep, Timeouts,
        };
        let of_processes = matches!(self, Nothing | Kill | Stop | Abort | Drop | Steal | Sweep | PoolOfOne | PoolOfTwo);
        if !S::HAS_SERVER && !of_processes {
            return Some("there is no server");
        }
        match (self.is_of_a_leader(), engine) {
            (true, None) if S::NODES > 1 && self == Self::CutLeader && on_a_private_server => return None,
            (true, None) => return Some("for clusters whose leader changes"),
            (false, Some(_)) if !of_processes => return Some("for single servers only"),
            (true, Some(engine)) if engine.has_several_primaries() && self == Self::SwitchOver => {
                return Some("each member is a primary");
            }
            (true, _) => return None,
            _ => {}
        }
        if S::NODES > 1 && !of_processes {
            return Some("for single servers only");
        }
        let of_server =
            [Restart, Freeze, Isolation, Timeouts, Connections, ReadOnly, DiskFull, Clock, Promote, PromoteSync];
        if !on_a_private_server && (of_server.contains(&self) || self == PgBouncer) {
            return Some("the server is not the rack's own");
        }
        match self {
            Promote | PromoteSync | PgBouncer if S::NAME != support::Postgres::NAME => Some("for PostgreSQL only"),
            Clock if faketime().is_none() => Some("libfaketime is not installed"),
            // It runs with libraries of its own, which libfaketime's would have to match.
            Clock if S::CODE == support::MySql::CODE => Some("libfaketime does not fit this server"),
            _ => None,
        }
    }

    /// What the server needs for it.
    pub(crate) fn settings<S: Rig>(self) -> Settings {
        let postgres = S::NAME == support::Postgres::NAME;
        let arguments = |list: &[&str]| list.iter().map(|it| (*it).to_owned()).collect();
        let mut settings = Settings { clock: self == Self::Clock, ..Settings::default() };
        if self == Self::DiskFull {
            settings.disk = Some(if postgres { 220 } else { 400 });
        }
        settings.arguments = match (self, postgres) {
            (Self::Isolation, true) => arguments(&["-c", "default_transaction_isolation=serializable"]),
            (Self::Isolation, false) => arguments(&["--transaction-isolation=SERIALIZABLE"]),
            (Self::Timeouts, true) => arguments(&[
                "-c",
                "statement_timeout=150ms",
                "-c",
                "lock_timeout=100ms",
                "-c",
                "idle_in_transaction_session_timeout=300ms",
            ]),
            (Self::Timeouts, false) => arguments(&["--innodb-lock-wait-timeout=1", "--wait-timeout=1"]),
            (Self::Connections, true) => arguments(&["-c", "max_connections=60"]),
            (Self::Connections, false) => arguments(&["--max-connections=60"]),
            (Self::Promote | Self::PromoteSync, _) => {
                arguments(&["-c", "wal_level=replica", "-c", "max_wal_senders=4", "-c", "hot_standby=on"])
            }
            _ => Vec::new(),
        };
        settings
    }

    /// How the workers differ.
    pub(crate) fn adapt(self, recipe: &mut Recipe) {
        match self {
            Self::Drop => recipe.drops = true,
            Self::PoolOfOne => (recipe.pool, recipe.own) = (1, 0),
            Self::PoolOfTwo => (recipe.pool, recipe.own) = (2, 0),
            // What a session lock says of it is its own test.
            Self::PgBouncer => recipe.kinds.retain(|it| *it != crate::event::Kind::Session),
            _ => {}
        }
    }

    /// What nobody can promise under it.
    pub(crate) fn excuses<S: Rig>(self, engine: Option<Engine>) -> Excuses {
        use Fault::{
            Abort, Clock, Drop, Freeze, Isolation, Kill, None as Nothing, PoolOfOne, PoolOfTwo, Promote, PromoteSync,
            Slow, Steal, Stop, Sweep,
        };
        // A new leader that has received whatever was acknowledged decides as the old one did.
        let forgets = self.is_of_a_leader() && engine.is_some_and(Engine::forgets);
        let beliefs = match self {
            Steal => Some("an operator took the lease by force"),
            Clock => Some("the clock that decides was moved"),
            Promote | PromoteSync => Some("another server decides"),
            _ if forgets => Some("an asynchronous standby had not heard of the grant"),
            _ => None,
        };
        let missing = (self == Promote || forgets).then_some("an asynchronous replica had not heard of it");
        let keeps_sessions =
            [Nothing, Kill, Stop, Abort, Drop, Freeze, Steal, Sweep, Isolation, PoolOfOne, PoolOfTwo, Slow, Clock];
        let sessions =
            (!keeps_sessions.contains(&self)).then_some("a session lock ends with its connection, unheard at first");
        // Their locks are those of one node.
        let many = S::NODES > 1 || engine.is_some_and(Engine::has_several_primaries);
        let nodes = many.then_some("this lock excludes nobody on another node");
        Excuses { beliefs, missing, sessions: sessions.or(nodes), names: nodes }
    }

    fn is_of_a_leader(self) -> bool {
        matches!(self, Self::SwitchOver | Self::KillLeader | Self::FreezeLeader | Self::CutLeader)
    }

    /// Whether the network and server are well at the end, so that every process must work again.
    pub(crate) fn heals(self) -> bool {
        !matches!(self, Self::Drop | Self::Timeouts | Self::PoolOfOne | Self::PoolOfTwo)
    }
}

/// Where a fault happens.
pub(crate) struct Stage<'a> {
    pub(crate) server: Option<&'a mut PrivateServer>,
    pub(crate) cluster: Option<&'a mut Cluster>,
    pub(crate) proxy: Option<&'a Proxy>,
    pub(crate) crew: &'a mut Crew,
    /// The lane's database, not by way of the proxy.
    pub(crate) url: String,
    pub(crate) ttl: Duration,
    pub(crate) marks: Vec<Mark>,
}

/// When a fault was there, for the timeline.
#[derive(Clone, Debug, serde::Serialize)]
pub(crate) struct Mark {
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) text: String,
}

impl Stage<'_> {
    /// Notes a fault that lasted from this instant until now.
    fn mark(&mut self, from: u64, text: impl Into<String>) {
        self.marks.push(Mark { from, to: clock::now(), text: text.into() });
    }

    /// Injects a fault, again and again, until the time is over; then all is well again.
    pub(crate) async fn inject<S: Rig>(&mut self, fault: Fault, lasts: Duration) -> Result<()> {
        let end = Instant::now() + lasts;
        match fault {
            Fault::None
            | Fault::Drop
            | Fault::Isolation
            | Fault::Timeouts
            | Fault::PoolOfOne
            | Fault::PoolOfTwo
            | Fault::PgBouncer => {
                tokio::time::sleep_until(end).await;
                Ok(())
            }
            Fault::Kill => self.kill_holders(end).await,
            Fault::Stop => self.stop_holders(end).await,
            Fault::Abort => self.abort_in_commits(end).await,
            Fault::LostCommits
            | Fault::HalfOpen
            | Fault::Cut
            | Fault::LostAnswers
            | Fault::Stall
            | Fault::StallRequests
            | Fault::StallAnswers
            | Fault::Slow => self.spoil_the_network(fault, end).await,
            Fault::Terminate => self.end_sessions::<S>(end).await,
            Fault::Cancel => self.cancel_statements::<S>(end).await,
            Fault::Steal => self.steal::<S>(end).await,
            Fault::Sweep => self.sweep::<S>(end).await,
            Fault::Connections => self.use_up_connections::<S>(end).await,
            Fault::ReadOnly => self.make_read_only::<S>(end).await,
            Fault::Restart => self.restart_server::<S>(end).await,
            Fault::Freeze => self.freeze_server(end).await,
            Fault::DiskFull => self.fill_the_disk::<S>(end).await,
            Fault::Clock => self.move_the_clock(end).await,
            Fault::Promote | Fault::PromoteSync => self.promote_the_replica(fault, end).await,
            Fault::CutLeader if S::NODES > 1 => self.isolate_a_node::<S>(end).await,
            Fault::SwitchOver | Fault::KillLeader | Fault::FreezeLeader | Fault::CutLeader => {
                self.change_the_leader(fault, end).await
            }
        }
    }
}
