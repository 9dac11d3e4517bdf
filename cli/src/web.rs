//! `web`: the page of `lockkit-web`, for those who have no service to nest it in.

use anyhow::{Context, Result};
use axum::http::request::Parts;
use lockkit::{LeaseStore, Leases};
use lockkit_inspect::Inspect;
use lockkit_web::{Access, Inspector};
use sqlx::Pool;
use tokio::{net::TcpListener, signal::ctrl_c};

use crate::{
    args::{On, WebArgs},
    block_on,
    exit::{Exit, tell},
    host::is_meant,
    secret::Secrets,
    target::{Act, ActOnDatabase, BadUrl, Target},
};

pub(crate) fn web(on: &On, args: &WebArgs, secrets: &mut Secrets) -> Result<Exit> {
    let target = Target::of(on, secrets)?;
    if !args.bind.ip().is_loopback() {
        let why = "can be reached from other machines, and the page asks nobody who they are: bind 127.0.0.1, and \
                   reach it by `ssh -L`, or nest lockkit-web in a service that knows its users";
        return Err(BadUrl(format!("`{}` {why}", args.bind)).into());
    }
    let page = Page(args);
    if target.kind().is_ok() { block_on(target.act_on_database(page)) } else { block_on(target.act(page)) }
}

struct Page<'a>(&'a WebArgs);

impl ActOnDatabase for Page<'_> {
    type Output = Exit;

    async fn on<DB: Inspect>(self, pool: Pool<DB>) -> Result<Exit>
    where
        Pool<DB>: LeaseStore,
    {
        self.serve(Inspector::new(Leases::new(pool.clone())).database(pool)).await
    }
}

impl Act for Page<'_> {
    type Output = Exit;

    async fn on<S: LeaseStore>(self, store: S) -> Result<Exit> {
        self.serve(Inspector::new(Leases::new(store))).await
    }
}

impl Page<'_> {
    /// Serves the page until somebody ends it.
    async fn serve<S: LeaseStore>(self, inspector: Inspector<S>) -> Result<Exit> {
        let Self(args) = self;
        let listener = TcpListener::bind(args.bind).await.with_context(|| format!("cannot bind {}", args.bind))?;
        let address = listener.local_addr()?;
        let by = args.steal.then(|| std::env::var("USER").unwrap_or_else(|_| "lockkit web".to_owned()));
        let access = move |parts: &Parts| match &by {
            _ if !is_meant(&parts.headers) => Access::None,
            Some(by) => Access::Steal { by: by.clone() },
            None => Access::ReadOnly,
        };
        tell(format_args!("http://{address}/"));
        // Its connections have an end, so those that are open need not be waited for.
        tokio::select! {
            served = axum::serve(listener, inspector.access(access).router::<()>()) => served?,
            ended = ctrl_c() => ended?,
        }
        Ok(Exit::Success)
    }
}
