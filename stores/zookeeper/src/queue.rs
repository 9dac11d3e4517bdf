//! Waiting: each place watches the one before it, so a release wakes one waiter.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use lockkit::{Key, store::Token};
use tokio::{sync::watch, time::sleep};
use zookeeper_client::Error as Zk;

use crate::{
    layout::{Place, queue},
    link::{Shared, linked},
    mine::{Mine, Phase},
};

/// Pause after a request that got no answer.
const PAUSE: Duration = Duration::from_millis(100);

/// Pause before a key without a holder is reported as free, so that a request that waits for it together with other
/// keys does not ask without a pause.
const FREE: Duration = Duration::from_millis(250);

/// The shortest time in which the owner of the first place must take the lease.
const LEAST_PATIENCE: Duration = Duration::from_secs(1);

/// Keeps a place of the queue: calls its owner when it is the first, and gives it up if the owner does not come in
/// the ttl of the claim.
pub(crate) async fn stand(shared: Weak<Shared>, number: u64, token: Token) {
    loop {
        let Some((strong, link)) = linked(&shared, number) else { return };
        let Some((dir, waiting)) = strong.mines().get(token).and_then(|it| match it {
            Mine { dir, phase: Phase::Waiting(waiting), .. } => Some((dir.clone(), waiting.clone())),
            _ => None,
        }) else {
            return;
        };
        let before = match link.client.list_children(&dir).await {
            Ok(children) => before(&children, &waiting.place),
            // The key was deleted, and the place with it. The owner finds that out when it asks again.
            Err(Zk::NoNode) => None,
            Err(_) => {
                drop((strong, link));
                sleep(PAUSE).await;
                continue;
            }
        };
        let Some(before) = before else {
            waiting.called.send_replace(true);
            drop((strong, link));
            sleep(waiting.ttl.max(LEAST_PATIENCE)).await;
            // On its own: this task is stopped when the place is given up.
            if let Some((strong, _)) = linked(&shared, number) {
                strong.runtime.spawn(give_up_unclaimed(shared, number, token));
            }
            return;
        };
        let watch = link.watch(&format!("{dir}/{}", before.name)).await;
        drop((strong, link));
        match watch {
            Ok(watch) => watch.changed().await,
            Err(Zk::NoNode) => {}
            Err(_) => sleep(PAUSE).await,
        }
    }
}

/// The place right before this one.
fn before(children: &[String], own: &Place) -> Option<Place> {
    queue(children).into_iter().rev().find(|it| it.number < own.number)
}

async fn give_up_unclaimed(shared: Weak<Shared>, number: u64, token: Token) {
    let Some((shared, link)) = linked(&shared, number) else { return };
    let Some(turn) = shared.mines().turn(token) else { return };
    let _turn = turn.lock_owned().await;
    let is_waiting = shared.mines().get(token).is_some_and(|it| matches!(it.phase, Phase::Waiting(_)));
    if is_waiting {
        shared.give_up(&link, token).await;
    }
}

impl Shared {
    /// Returns when the lease may have been released: a place of this process is the first, or the holder's child is
    /// gone.
    pub(crate) async fn freed(self: Arc<Self>, key: Key) {
        let mut called: Vec<_> = self.mines().waiting(&key).map(|it| it.called.subscribe()).collect();
        if !called.is_empty() {
            return any(&mut called).await;
        }
        let dir = self.dir(&key);
        loop {
            let link = self.link().await;
            let first = match link.client.list_children(&dir).await {
                Ok(children) => queue(&children).into_iter().next(),
                Err(Zk::NoNode) => None,
                Err(_) => {
                    sleep(PAUSE).await;
                    continue;
                }
            };
            let Some(first) = first else { return sleep(FREE).await };
            let watch = link.watch(&format!("{dir}/{}", first.name)).await;
            drop(link);
            match watch {
                Ok(watch) => return watch.changed().await,
                Err(Zk::NoNode) => return,
                Err(_) => sleep(PAUSE).await,
            }
        }
    }
}

/// Returns when one of these places is the first or was given up.
async fn any(called: &mut [watch::Receiver<bool>]) {
    let mut waits: Vec<_> = called.iter_mut().map(|it| Box::pin(it.wait_for(|called| *called))).collect();
    std::future::poll_fn(|context| {
        let is_called = waits.iter_mut().any(|it| it.as_mut().poll(context).is_ready());
        if is_called { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
}
