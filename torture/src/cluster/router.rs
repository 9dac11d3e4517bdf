//! Leads clients to the leader, as `HAProxy` does in front of Patroni, or MySQL Router in front of a group.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use anyhow::Result;
use tokio::task::{JoinHandle, spawn_local};
use tokio::time::sleep;

use crate::cluster::members::Members;
use crate::proxy::{Proxy, Weather};

/// How often each member is asked whether it leads.
const CHECK: Duration = Duration::from_millis(250);
/// After how many checks in a row the leader counts as gone.
const GONE: u32 = 2;

pub(crate) struct Router {
    proxy: Rc<Proxy>,
    /// The members that its clients can reach.
    sees: Rc<RefCell<Vec<u8>>>,
    checking: JoinHandle<()>,
}

impl Router {
    /// Leads to the database of whichever member leads. Must be called within a `LocalSet`.
    pub(crate) async fn start(members: &Rc<Members>, leader: u8, database: &str, silence: Duration) -> Result<Self> {
        let proxy = Rc::new(Proxy::start(&members.url(leader, database), silence).await?);
        let sees = Rc::new(RefCell::new(members.all()));
        let checking = spawn_local(follow(Rc::clone(members), Rc::clone(&proxy), Rc::clone(&sees), leader));
        Ok(Self { proxy, sees, checking })
    }

    pub(crate) fn url(&self) -> &str {
        self.proxy.url()
    }

    /// From now on its clients reach these members only. With one alone they stay, whatever it says of itself: they are
    /// on its side of the cut, and have no router there.
    pub(crate) fn see(&self, members: &[u8]) {
        *self.sees.borrow_mut() = members.to_vec();
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        self.checking.abort();
        self.proxy.cut();
    }
}

async fn follow(members: Rc<Members>, proxy: Rc<Proxy>, sees: Rc<RefCell<Vec<u8>>>, first: u8) {
    let (mut leader, mut missed) = (Some(first), 0);
    loop {
        sleep(CHECK).await;
        let sees = sees.borrow().clone();
        if sees.len() == 1 {
            continue;
        }
        if let Some(old) = leader {
            let leads = sees.contains(&old) && members.leads(old).await;
            missed = if leads { 0 } else { missed + 1 };
            if missed < GONE {
                continue;
            }
            proxy.set(Weather { refuses: true, ..Weather::default() });
            proxy.cut();
        }
        leader = members.leader_among(&sees).await;
        if let Some(new) = leader {
            missed = 0;
            proxy.lead_to(members.socket(new));
            proxy.set(Weather::default());
        }
    }
}
