//! `doctor`: what harms locks on this database, each with the statement that mends it. `lockkit-inspect` looks.

use std::{
    process::id,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use lockkit::{Error, LeaseStore, Leases};
use lockkit_inspect::{Finding, Inspect, Level, Plan, SetMost, with_causes};
use sqlx::Pool;
use tokio::time::timeout;

use crate::{
    args::{DoctorArgs, On},
    block_on,
    exit::{Exit, print},
    secret::Secrets,
    table::printable,
    target::{ActOnDatabase, BadUrl, Target},
};

/// How long the server may take to plan a statement.
const PLANNING: Duration = Duration::from_secs(5);

/// How often a lease is acquired to see how long that takes.
const ROUNDS: usize = 50;

pub(crate) fn doctor(on: &On, args: &DoctorArgs, secrets: &mut Secrets) -> Result<Exit> {
    let mut findings = block_on(Target::of(on, secrets)?.act_on_database(Examine(args)))?;
    findings.sort_by_key(|it| std::cmp::Reverse(it.level));
    for finding in &findings {
        if args.json {
            print(&serde_json::to_string(finding)?)?;
            continue;
        }
        let level = match finding.level {
            Level::Ok => "ok",
            Level::Note => "note",
            Level::Warn => "warn",
            Level::Fail => "FAIL",
        };
        print(&format!("{level:<5} {:<12} {}", finding.check, printable(&finding.what)))?;
        if let Some(mend) = &finding.mend {
            print(&format!("{:19}{}", "", printable(mend)))?;
        }
    }
    let worst = findings.iter().map(|it| it.level).max();
    Ok(match worst {
        Some(Level::Fail) => Exit::MustMend,
        Some(Level::Warn) if args.strict => Exit::Failure,
        _ => Exit::Success,
    })
}

struct Examine<'a>(&'a DoctorArgs);

impl ActOnDatabase for Examine<'_> {
    type Output = Vec<Finding>;

    async fn on<DB: Inspect>(self, pool: Pool<DB>) -> Result<Vec<Finding>>
    where
        Pool<DB>: LeaseStore,
    {
        let Self(args) = self;
        let mut conn = pool.acquire().await?;
        let findings = DB::findings(&mut conn, args.role.as_deref()).await;
        let mut findings = findings.context("cannot look at the server")?;
        for statement in &args.query {
            let statement = statement.trim();
            if !Plan::is_for(statement) {
                return Err(
                    BadUrl(format!("--query takes a statement that reads or writes rows, not `{statement}`")).into()
                );
            }
            let plan = timeout(PLANNING, DB::plan(&mut conn, statement)).await.with_context(|| {
                format!("the server has not planned `{statement}` within {PLANNING:?}: a table of it may be locked")
            })?;
            let plan = plan.with_context(|| format!("cannot plan `{statement}`"))?;
            findings.push(match plan {
                Plan::Index => Finding::new(Level::Ok, "query", format!("an index serves `{statement}`")),
                Plan::Scan(plan) => {
                    let what = format!(
                        "`{statement}` reads a whole table or index, and on MySQL locks it: it needs an index on the \
                         columns by which it selects. The plan: {plan}"
                    );
                    Finding::new(Level::Fail, "query", what)
                }
            });
        }
        if let Some(pools) = args.pools
            && let Some((most, set)) = DB::most_connections(&mut conn).await.context("cannot look at the server")?
        {
            findings.push(connections(pools, most, set));
        }
        drop(conn);
        if let Some(Err(err)) = DB::session_locks(&pool).await {
            let what = format!("session locks are refused: {}", with_causes(&err));
            findings.push(Finding::new(Level::Warn, "sessions", what));
        }
        let leases = Leases::builder(pool).ttl(args.ttl).sweep_every(None).build()?;
        match leases.show("lockkit/doctor").await {
            Err(Error::NotMigrated { .. }) => {
                let what = "lockkit's tables are missing or out of date";
                findings.push(Finding::new(Level::Fail, "tables", what).mend("lockkit migrate"));
            }
            Ok(_) if args.latency && findings.iter().all(|it| it.level < Level::Fail) => {
                findings.push(latency(&leases, args.ttl).await?);
            }
            _ => {}
        }
        Ok(findings)
    }
}

/// Whether the pools of all processes fit into the server, which has a fifth of its connections for others.
fn connections((processes, each): (u32, u32), most: u64, set: SetMost) -> Finding {
    let wanted = u64::from(processes) * u64::from(each);
    let what = format!("{processes} processes with {each} connections each take {wanted} of {most}");
    if wanted * 5 > most * 4 {
        let what = what + ": a process that gets none cannot renew its leases";
        Finding::new(Level::Warn, "connections", what).mend(set((wanted * 5).div_ceil(4)))
    } else {
        Finding::new(Level::Ok, "connections", what)
    }
}

/// How long the calls of a lease take.
async fn latency<S: LeaseStore>(leases: &Leases<S>, ttl: Duration) -> Result<Finding> {
    let key = format!("lockkit/doctor/{}", id());
    let (mut acquire, mut renew, mut release) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let start = Instant::now();
        let lease = leases.lease(&*key).acquire().await?;
        let acquired = Instant::now();
        lease.extend(ttl).await?;
        let renewed = Instant::now();
        lease.release().await?;
        acquire.push(acquired - start);
        renew.push(renewed - acquired);
        release.push(renewed.elapsed());
    }
    let mut slow: Vec<Duration> = acquire.iter().chain(&renew).copied().collect();
    slow.sort_unstable();
    // One of twenty may be slower.
    let slow = slow[slow.len() * 19 / 20];
    let [acquire, renew, release] = [acquire, renew, release].map(|mut times| {
        times.sort_unstable();
        times[times.len() / 2].as_secs_f64() * 1e3
    });
    // A third of the ttl is between two renewals, and a renewal that is ten times as slow fits in.
    let safe = slow * 30;
    let times = format!(
        "acquire {acquire:.1} ms, renew {renew:.1} ms, release {release:.1} ms (p95 {:.1} ms)",
        slow.as_secs_f64() * 1e3
    );
    let safe_ms = safe.as_millis().max(1);
    Ok(if ttl < safe {
        let what = format!("{times}: a ttl of {ttl:?} leaves no time for a slow renewal; {safe_ms} ms or more is safe");
        Finding::new(Level::Warn, "latency", what)
    } else {
        Finding::new(Level::Ok, "latency", format!("{times}: a ttl of {safe_ms} ms or more is safe here"))
    })
}
