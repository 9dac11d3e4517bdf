//! `web`: the page of `lockkit-web`, for those who have no service to nest it in.

use std::net::IpAddr;

use anyhow::{Context, Result};
use axum::http::{HeaderMap, header, request::Parts};
use lockkit::{LeaseStore, Leases};
use lockkit_inspect::Inspect;
use lockkit_web::{Access, Inspector};
use sqlx::Pool;
use tokio::{net::TcpListener, signal::ctrl_c};

use crate::{
    args::{On, WebArgs},
    block_on,
    exit::{Exit, tell},
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

/// Whether the browser was told to go to this machine: the name of another web site can be made to point to it. The
/// port may be that of a tunnel.
fn is_meant(headers: &HeaderMap) -> bool {
    let host = headers.get(header::HOST).and_then(|it| it.to_str().ok()).unwrap_or_default();
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|it| it.is_ascii_digit()) => name,
        _ => host,
    };
    let ip = name.strip_prefix('[').and_then(|it| it.strip_suffix(']')).unwrap_or(name).parse::<IpAddr>();
    name.eq_ignore_ascii_case("localhost") || ip.is_ok_and(|it| it.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_of_another_site_is_not_meant() {
        let is_meant = |host: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::HOST, header::HeaderValue::from_static(host));
            is_meant(&headers)
        };
        for host in ["127.0.0.1:8642", "localhost:9000", "localhost", "[::1]:8642", "127.0.0.1"] {
            assert!(is_meant(host), "{host}");
        }
        for host in ["evil.example:8642", "127.0.0.1.evil.example:8642", "localhost.evil.example", "", "10.0.0.1:8642"]
        {
            assert!(!is_meant(host), "{host}");
        }
        assert!(!super::is_meant(&HeaderMap::new()));
    }
}
