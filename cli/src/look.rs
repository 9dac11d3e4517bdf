//! The commands that show leases, and the one that takes a lease away.

use std::{
    io::{IsTerminal, Write, stderr, stdin, stdout},
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use lockkit::{Fence, LeaseStore, Leases, store::LeaseInfo};
use tokio::time::sleep;

use crate::{
    args::{CheckArgs, LsArgs, On, ShowArgs, StealArgs},
    block_on,
    exit::{Exit, print, tell},
    secret::Secrets,
    table::{json, json_of_died, printable, rounded, table},
    target::{Act, Target},
};

/// How many leases [`Leases::list`] and [`Leases::expired`] read at most.
const MOST: usize = 10_000;

pub(crate) fn ls(on: &On, args: &LsArgs, secrets: &mut Secrets) -> Result<Exit> {
    act(on, secrets, Ls(args))
}

pub(crate) fn show(on: &On, args: ShowArgs, secrets: &mut Secrets) -> Result<Exit> {
    act(on, secrets, Show(args))
}

pub(crate) fn steal(on: &On, args: StealArgs, secrets: &mut Secrets) -> Result<Exit> {
    act(on, secrets, Steal(args))
}

pub(crate) fn check(on: &On, args: CheckArgs, secrets: &mut Secrets) -> Result<Exit> {
    act(on, secrets, Check(args))
}

fn act(on: &On, secrets: &mut Secrets, act: impl Act<Output = Exit>) -> Result<Exit> {
    let target = Target::of(on, secrets)?;
    block_on(target.act(act))
}

struct Ls<'a>(&'a LsArgs);

impl Act for Ls<'_> {
    type Output = Exit;

    async fn on<S: LeaseStore>(self, store: S) -> Result<Exit> {
        let (args, leases) = (self.0, Leases::new(store));
        loop {
            let listed = leases.list(&args.prefix).await?;
            let died = if args.all { leases.expired(&args.prefix).await? } else { Vec::new() };
            let mut text = String::new();
            if args.json {
                for lease in listed.iter().map(json).chain(died.iter().map(json_of_died)) {
                    text += &lease.to_string();
                    text.push('\n');
                }
            } else if !listed.is_empty() || !died.is_empty() || stdout().is_terminal() {
                text = table(&listed, &died) + "\n";
            }
            if args.watch.is_some() && !args.json && stdout().is_terminal() {
                // The cursor goes to the top, and what was there is cleared.
                text.insert_str(0, "\u{1b}[H\u{1b}[2J");
            }
            print(&text)?;
            if listed.len().max(died.len()) >= MOST {
                tell(format_args!("the first {MOST} are listed, and there may be more: give a PREFIX"));
            }
            let Some(every) = args.watch else { return Ok(Exit::Success) };
            sleep(every.max(Duration::from_millis(100))).await;
        }
    }
}

struct Show(ShowArgs);

impl Act for Show {
    type Output = Exit;

    async fn on<S: LeaseStore>(self, store: S) -> Result<Exit> {
        let Self(args) = self;
        let Some(lease) = Leases::new(store).show(&args.name).await? else { return Ok(not_held(&args.name)) };
        let text = if args.json { json(&lease).to_string() } else { table(&[lease], &[]) };
        print(&text)?;
        Ok(Exit::Success)
    }
}

struct Check(CheckArgs);

impl Act for Check {
    type Output = Exit;

    async fn on<S: LeaseStore>(self, store: S) -> Result<Exit> {
        let Self(args) = self;
        let Some(lease) = Leases::new(store).show(&args.name).await? else { return Ok(not_held(&args.name)) };
        if lease.fence == Fence::from(args.fence) {
            return Ok(Exit::Success);
        }
        eprintln!("lockkit: {}", another_holds(&lease));
        Ok(Exit::Lost)
    }
}

struct Steal(StealArgs);

impl Act for Steal {
    type Output = Exit;

    async fn on<S: LeaseStore>(self, store: S) -> Result<Exit> {
        let (Self(args), leases) = (self, Leases::new(store));
        if args.if_dead {
            return died(&leases, &args.name).await;
        }
        let Some(lease) = leases.show(&args.name).await? else { return Ok(not_held(&args.name)) };
        if args.fence.is_some_and(|it| lease.fence != Fence::from(it)) {
            eprintln!("lockkit: {}", another_holds(&lease));
            return Ok(Exit::Lost);
        }
        if !args.yes {
            if !stdin().is_terminal() {
                bail!("nobody is there to be asked: give --yes --fence {}", lease.fence);
            }
            eprintln!("{}", table(std::slice::from_ref(&lease), &[]));
            eprint!("Its holder may be in the middle of its work. Type the name to take the lease away: ");
            stderr().flush()?;
            let mut typed = String::new();
            stdin().read_line(&mut typed)?;
            if typed.trim_end_matches(['\r', '\n']) != args.name {
                bail!("that is not `{}`: nothing was changed", printable(&args.name));
            }
        }
        let Some(stolen) = leases.steal_if(&args.name, lease.fence).await? else {
            if let Some(flaw) = lease.flaw {
                bail!("nothing was taken: lockkit has not written this lease, {flaw}; set its token to NULL");
            }
            eprintln!("lockkit: the lease has changed its holder meanwhile: nothing was taken");
            return Ok(Exit::Lost);
        };
        let holder = printable(&stolen.holder);
        eprintln!(
            "lockkit: taken from {holder}, which learns of it at its next renewal; its commits under it fail now"
        );
        Ok(Exit::Success)
    }
}

/// Waits until the lease is free or has been renewed. A lease that is free needs no theft: the next holder gets it.
async fn died<S: LeaseStore>(leases: &Leases<S>, name: &str) -> Result<Exit> {
    let Some(first) = leases.show(name).await? else {
        eprintln!("lockkit: `{}` is free", printable(name));
        return Ok(Exit::Success);
    };
    let expiry = Instant::now() + first.expires_in;
    loop {
        sleep(expiry.saturating_duration_since(Instant::now()).min(Duration::from_secs(1))).await;
        let is_over = Instant::now() >= expiry;
        match leases.show(name).await? {
            None => {
                eprintln!("lockkit: `{}` is free: {} did not renew it", printable(name), printable(&first.holder));
                return Ok(Exit::Success);
            }
            Some(lease) if is_over || (lease.fence, lease.renewals) != (first.fence, first.renewals) => {
                eprintln!("lockkit: {}: nothing was taken", another_holds(&lease));
                return Ok(Exit::Busy);
            }
            Some(_) => {}
        }
    }
}

fn not_held(name: &str) -> Exit {
    eprintln!("lockkit: nobody holds `{}`", printable(name));
    Exit::Lost
}

fn another_holds(lease: &LeaseInfo) -> String {
    format!(
        "`{}` is held with fence {} by {}, for {}",
        printable(lease.key.as_str()),
        lease.fence,
        printable(&lease.holder),
        rounded(lease.held_for)
    )
}
