//! Tells waiters of releases: one connection for the subscriptions of a store, open while somebody waits.

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
    home,
    server::{Limits, Server, within},
    trouble::Trouble,
};

/// How long a subscription outlives its last waiter, so that requests which follow each other share it.
const LINGER: Duration = Duration::from_secs(1);

/// How often to check that the connection still answers.
const CHECK: Duration = Duration::from_secs(5);

/// Pauses between two attempts to connect.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// The releases that a server publishes. Clones share their connection.
#[derive(Clone)]
pub(crate) struct Releases(Arc<Shared>);

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
    rings: watch::Sender<()>,
}

impl Releases {
    pub(crate) fn new(server: Server, limits: Limits) -> Self {
        Self(Arc::new(Shared { server, limits, state: Mutex::default(), changed: Notify::new() }))
    }

    /// Completes when something was published on the channel since the first poll, or may have been.
    pub(crate) fn freed(&self, channel: String) -> impl Future<Output = ()> + Send + 'static {
        let shared = self.0.clone();
        async move {
            let mut seat = Seat::take(shared, channel);
            // Cannot fail: the seat keeps the channel.
            let _ = seat.rings.changed().await;
        }
    }
}

/// A waiter of a channel. The channel is left on drop.
struct Seat {
    shared: Arc<Shared>,
    channel: String,
    rings: watch::Receiver<()>,
}

impl Seat {
    fn take(shared: Arc<Shared>, channel: String) -> Self {
        let mut state = shared.state();
        let entry = state.channels.entry(channel.clone()).or_insert_with(Channel::new);
        entry.waiters += 1;
        let rings = entry.rings.subscribe();
        let is_listening = std::mem::replace(&mut state.is_listening, true);
        drop(state);
        if is_listening {
            shared.changed.notify_one();
        } else if home::spawn(listen(shared.clone())).is_err() {
            // Without a thread, waiters poll. The next one tries again.
            shared.state().is_listening = false;
        }
        Self { shared, channel, rings }
    }
}

impl Drop for Seat {
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
        Self { waiters: 0, rings: watch::Sender::new(()) }
    }
}

impl Shared {
    /// Ignores poisoning: no code panics while it holds the lock.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ring(&self, channel: &str) {
        if let Some(entry) = self.state().channels.get(channel) {
            entry.rings.send_replace(());
        }
    }

    fn wanted(&self) -> HashSet<String> {
        self.state().channels.keys().cloned().collect()
    }

    /// Ends the task, unless somebody waits.
    fn is_done(&self) -> bool {
        let mut state = self.state();
        state.is_listening = !state.channels.is_empty();
        !state.is_listening
    }
}

async fn listen(shared: Arc<Shared>) {
    let (shortest, longest) = PAUSES;
    let mut pause = shortest;
    loop {
        let begun = Instant::now();
        match subscribed(&shared).await {
            Ok(()) => return,
            Err(_) if begun.elapsed() > longest => pause = shortest,
            // Waiters poll in the meantime.
            Err(_) => pause = (pause * 2).min(longest),
        }
        sleep(pause).await;
        if shared.is_done() {
            return;
        }
    }
}

/// Passes on messages until nobody has waited for a while.
async fn subscribed(shared: &Shared) -> Result<(), Trouble> {
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
            // A release before the subscription was not heard.
            for channel in &new {
                shared.ring(channel);
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
                Some(message) => shared.ring(message.get_channel_name()),
                None => return Err(Trouble::silent("listening", Duration::ZERO)),
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

impl fmt::Debug for Releases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Releases").field("channels", &self.0.state().channels.len()).finish_non_exhaustive()
    }
}
