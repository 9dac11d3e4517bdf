//! The lease, whatever store it is in.

use std::{cell::OnceCell, future::Future, pin::Pin, time::Instant};

use anyhow::Result;
use lockkit::{Lease, LeaseRequest, LeaseStore, Leases, LossReason, Released, Wait};

use crate::{
    args::RunArgs,
    target::{Act, Database},
};

type Answer<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// A held lease.
pub(super) trait Held {
    fn key(&self) -> &str;
    fn fence(&self) -> u64;
    /// The fence and the name of a holder that died.
    fn previous(&self) -> Option<String>;
    fn guard(&self) -> Option<String>;
    fn trusted_until(&self) -> Instant;
    fn lost(&self) -> Answer<'_, LossReason>;
    fn release(self: Box<Self>) -> Answer<'static, lockkit::Result<Released>>;
}

struct Of<S: LeaseStore> {
    lease: Lease<S>,
    guard: Option<String>,
}

impl<S: LeaseStore> Held for Of<S> {
    fn key(&self) -> &str {
        self.lease.key()
    }

    fn fence(&self) -> u64 {
        self.lease.fence().get()
    }

    fn previous(&self) -> Option<String> {
        self.lease.previous().map(|it| format!("{} {}", it.fence, it.holder))
    }

    fn guard(&self) -> Option<String> {
        self.guard.clone()
    }

    fn trusted_until(&self) -> Instant {
        self.lease.trusted_until()
    }

    fn lost(&self) -> Answer<'_, LossReason> {
        Box::pin(self.lease.lost())
    }

    fn release(self: Box<Self>) -> Answer<'static, lockkit::Result<Released>> {
        Box::pin(self.lease.release())
    }
}

/// Gives back what a request has taken that was dropped.
pub(super) type GiveBack = Box<dyn Fn() -> Answer<'static, ()>>;

/// Acquires the lease that the user wants.
pub(super) struct Acquire<'a> {
    pub(super) args: &'a RunArgs,
    pub(super) database: Option<Database>,
    /// Is set before the request is sent.
    pub(super) give_back: &'a OnceCell<GiveBack>,
}

impl Act for Acquire<'_> {
    type Output = Box<dyn Held>;

    async fn on<S: LeaseStore>(self, store: S) -> Result<Box<dyn Held>> {
        let Self { args, database, give_back } = self;
        let mut builder = Leases::builder(store).ttl(args.ttl).sweep_every(None);
        if let Some(holder) = &args.holder {
            builder = builder.holder(holder);
        }
        let leases = builder.build()?;
        let closed = leases.clone();
        _ = give_back.set(Box::new(move || {
            let leases = closed.clone();
            Box::pin(async move { _ = leases.close().await })
        }));
        let mut request: LeaseRequest<S> = match args.permits {
            Some(permits) => leases.semaphore(&args.name, permits),
            None if args.shared => leases.rw(&args.name).read(),
            None => leases.lease(&args.name),
        };
        request = request.wait(if args.nonblock { Wait::Never } else { args.wait });
        if !args.at_least.is_zero() {
            request = request.min_hold(args.at_least);
        }
        if args.fair {
            request = request.fair();
        }
        let lease = request.acquire().await?;
        let guard = database.map(|it| it.guard(&lease)).transpose()?;
        Ok(Box::new(Of { lease, guard }))
    }
}
