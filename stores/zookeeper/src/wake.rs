//! Waiting: each place watches the one before it, so a release wakes one waiter.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use lockkit::{Key, store::Token};
use tokio::{sync::watch, time::sleep};
use zookeeper_client::Error as Zk;

use crate::{
    claimed::{Claimed, Phase},
    layout::{Place, queue},
    session::{Shared, in_session},
};

/// Pause after a request that got no answer.
const PAUSE: Duration = Duration::from_millis(100);

/// Pause before a key without a holder is reported as free, so that a request that waits for it together with other
/// keys does not query the servers without a pause.
const FREE: Duration = Duration::from_millis(250);

/// The shortest time in which the owner of the first place must take the lease.
const LEAST_PATIENCE: Duration = Duration::from_secs(1);

/// Keeps a place of the queue: calls its owner when it is the first, and gives it up if the owner does not claim it in
/// the ttl of the claim.
pub(crate) async fn keep_place(shared: Weak<Shared>, number: u64, token: Token) {
    loop {
        let Some((strong, session)) = in_session(&shared, number) else { return };
        let Some((dir, waiting)) = strong.claims().get(token).and_then(|claim| match claim {
            Claimed { dir, phase: Phase::Waiting(waiting), .. } => Some((dir.clone(), waiting.clone())),
            _ => None,
        }) else {
            return;
        };
        let before = match session.client.list_children(&dir).await {
            Ok(children) => before(&children, &waiting.place),
            // The key was deleted, and the place with it. The owner finds that out with its next request.
            Err(Zk::NoNode) => None,
            Err(_) => {
                drop((strong, session));
                sleep(PAUSE).await;
                continue;
            }
        };
        let Some(before) = before else {
            waiting.called.send_replace(true);
            drop((strong, session));
            sleep(waiting.ttl.max(LEAST_PATIENCE)).await;
            // On its own: this task is stopped when the place is given up.
            if let Some((strong, _)) = in_session(&shared, number) {
                strong.runtime.spawn(give_up_unclaimed(shared, number, token));
            }
            return;
        };
        let watch = session.watch(&format!("{dir}/{}", before.name)).await;
        drop((strong, session));
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
    let Some((shared, session)) = in_session(&shared, number) else { return };
    let Some(turn) = shared.claims().turn(token) else { return };
    let _turn = turn.lock_owned().await;
    let is_waiting = shared.claims().get(token).is_some_and(|it| matches!(it.phase, Phase::Waiting(_)));
    if is_waiting {
        shared.give_up(&session, token).await;
    }
}

impl Shared {
    /// Returns when the lease may have been released: a place of this process is the first, or the holder's child is
    /// gone.
    pub(crate) async fn freed(self: Arc<Self>, key: Key) {
        let mut called: Vec<_> = self.claims().waiting(&key).map(|it| it.called.subscribe()).collect();
        if !called.is_empty() {
            return any(&mut called).await;
        }
        let dir = self.dir(&key);
        loop {
            let session = self.session().await;
            let first = match session.client.list_children(&dir).await {
                Ok(children) => queue(&children).into_iter().next(),
                Err(Zk::NoNode) => None,
                Err(_) => {
                    sleep(PAUSE).await;
                    continue;
                }
            };
            let Some(first) = first else { return sleep(FREE).await };
            let watch = session.watch(&format!("{dir}/{}", first.name)).await;
            drop(session);
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
