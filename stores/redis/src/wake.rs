//! Wakes waiters when a release is published: one connection for the subscriptions of a store, open while a caller
//! waits.

use std::{
    collections::{HashMap, HashSet},
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures_util::StreamExt;
use tokio::{
    sync::{Notify, watch},
    time::{Instant, sleep, sleep_until},
};

use crate::{
    error::Failure,
    runtime,
    server::{Limits, Server, within},
};

/// How long a subscription outlives its last waiter, so that requests which follow each other share it.
const LINGER: Duration = Duration::from_secs(1);

/// How often to check that the connection still answers.
const CHECK: Duration = Duration::from_secs(5);

/// Pauses between two attempts to connect.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// The subscriptions to the releases that a server publishes. Clones share their connection.
#[derive(Clone)]
pub(crate) struct Subscriptions(Arc<Shared>);

struct Shared {
    server: Server,
    limits: Limits,
    state: Mutex<State>,
    /// The channels with waiters have changed.
    changed: Notify,
}

#[derive(Default)]
struct State {
    channels: HashMap<String, Channel>,
    /// Whether a task listens.
    is_listening: bool,
}

/// A channel with waiters.
struct Channel {
    waiters: usize,
    published: watch::Sender<()>,
}

impl Subscriptions {
    pub(crate) fn new(server: Server, limits: Limits) -> Self {
        Self(Arc::new(Shared { server, limits, state: Mutex::default(), changed: Notify::new() }))
    }

    /// Completes when something was published on the channel since the first poll, or may have been.
    pub(crate) fn freed(&self, channel: String) -> impl Future<Output = ()> + Send + 'static {
        let shared = self.0.clone();
        async move {
            let mut waiter = Waiter::new(shared, channel);
            // Cannot fail: the waiter keeps the channel.
            let _ = waiter.published.changed().await;
        }
    }
}

/// A waiter of a channel. The channel is left on drop.
struct Waiter {
    shared: Arc<Shared>,
    channel: String,
    published: watch::Receiver<()>,
}

impl Waiter {
    fn new(shared: Arc<Shared>, channel: String) -> Self {
        let mut state = shared.state();
        let entry = state.channels.entry(channel.clone()).or_insert_with(Channel::new);
        entry.waiters += 1;
        let published = entry.published.subscribe();
        let is_listening = std::mem::replace(&mut state.is_listening, true);
        drop(state);
        if is_listening {
            shared.changed.notify_one();
        } else if runtime::spawn(listen(shared.clone())).is_err() {
            // Without a thread, waiters poll. The next one tries again.
            shared.state().is_listening = false;
        }
        Self { shared, channel, published }
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        if let Some(entry) = state.channels.get_mut(&self.channel) {
            entry.waiters -= 1;
            if entry.waiters == 0 {
                state.channels.remove(&self.channel);
                drop(state);
                self.shared.changed.notify_one();
            }
        }
    }
}

impl Channel {
    fn new() -> Self {
        Self { waiters: 0, published: watch::Sender::new(()) }
    }
}

impl Shared {
    /// Ignores poisoning: no code panics while it holds the lock.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self, channel: &str) {
        if let Some(entry) = self.state().channels.get(channel) {
            entry.published.send_replace(());
        }
    }

    fn wanted(&self) -> HashSet<String> {
        self.state().channels.keys().cloned().collect()
    }

    /// Ends the task, unless a caller waits.
    fn is_done(&self) -> bool {
        let mut state = self.state();
        state.is_listening = !state.channels.is_empty();
        !state.is_listening
    }
}

/// The pause after an attempt that lasted so long. It doubles unless the subscription was there for a while.
fn next_pause(pause: Duration, lasted: Duration) -> Duration {
    let (shortest, longest) = PAUSES;
    if lasted > longest { shortest } else { (pause * 2).min(longest) }
}

async fn listen(shared: Arc<Shared>) {
    let (mut pause, _) = PAUSES;
    loop {
        let begun = Instant::now();
        if subscribed(&shared).await.is_ok() {
            return;
        }
        // Waiters poll in the meantime.
        pause = next_pause(pause, begun.elapsed());
        sleep(pause).await;
        if shared.is_done() {
            return;
        }
    }
}

/// Passes on messages until no caller has waited for a while.
async fn subscribed(shared: &Shared) -> Result<(), Failure> {
    let answer = shared.limits.answer;
    let (mut sink, mut messages) = shared.server.listen(shared.limits).await?.split();
    let mut subscribed: HashSet<String> = HashSet::new();
    let mut tidy_at: Option<Instant> = None;
    let mut check_at = Instant::now() + CHECK;
    loop {
        let wanted = shared.wanted();
        let new: Vec<_> = wanted.difference(&subscribed).cloned().collect();
        if !new.is_empty() {
            within(answer, "subscribing", async { Ok(sink.subscribe(&new).await?) }).await?;
            // A release before the subscription was not received.
            for channel in &new {
                shared.wake(channel);
            }
            subscribed.extend(new);
        }
        if subscribed.len() > wanted.len() {
            tidy_at.get_or_insert_with(|| Instant::now() + LINGER);
        } else {
            tidy_at = None;
        }
        tokio::select! {
            message = messages.next() => match message {
                Some(message) => shared.wake(message.get_channel_name()),
                None => return Err(Failure::silent("listening", Duration::ZERO)),
            },
            () = shared.changed.notified() => {}
            () = async { sleep_until(tidy_at.unwrap_or_else(Instant::now)).await }, if tidy_at.is_some() => {
                tidy_at = None;
                let wanted = shared.wanted();
                if wanted.is_empty() && shared.is_done() {
                    return Ok(());
                }
                let unused: Vec<_> = subscribed.difference(&wanted).cloned().collect();
                // Without a channel, UNSUBSCRIBE ends all subscriptions.
                if !unused.is_empty() {
                    within(answer, "unsubscribing", async { Ok(sink.unsubscribe(&unused).await?) }).await?;
                    subscribed.retain(|it| wanted.contains(it));
                }
            }
            () = sleep_until(check_at) => {
                check_at = Instant::now() + CHECK;
                within(answer, "checking a subscription", async { Ok(sink.ping::<redis::Value>().await?) }).await?;
            }
        }
    }
}

impl fmt::Debug for Subscriptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subscriptions").field("channels", &self.0.state().channels.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_and_are_short_again_after_a_subscription_that_lasted() {
        let (shortest, longest) = PAUSES;
        let failing = |pause| next_pause(pause, Duration::ZERO);
        assert_eq!(failing(shortest), shortest * 2);
        assert_eq!((failing(longest.saturating_sub(shortest)), failing(longest)), (longest, longest));
        assert_eq!(next_pause(longest, longest), longest);
        assert_eq!(next_pause(longest, longest + shortest), shortest);
    }
}
