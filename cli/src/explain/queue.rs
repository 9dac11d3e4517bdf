//! The queues of leases, as data.

use std::time::Duration;

use lockkit::store::LeaseInfo;
use lockkit_inspect::waited_for;
use serde::Serialize;

/// A lease with the tickets of the processes that wait for it, the oldest first.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Queue {
    pub(crate) key: String,
    /// `None` if it is free at this moment.
    pub(crate) holder: Option<Holder>,
    pub(crate) waiters: Vec<Ticket>,
}

/// The holder of a lease.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Holder {
    pub(crate) name: String,
    pub(crate) fence: u64,
    pub(crate) held_ms: u64,
    pub(crate) expires_in_ms: u64,
}

/// A process that waits for a lease.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Ticket {
    pub(crate) holder: String,
    pub(crate) waits_ms: u64,
}

/// The leases that have tickets.
pub(crate) fn queues(leases: &[LeaseInfo]) -> Vec<Queue> {
    let mut tickets: Vec<(&str, &LeaseInfo)> =
        leases.iter().filter_map(|ticket| Some((waited_for(ticket.key.as_str())?, ticket))).collect();
    tickets.sort_by_key(|(key, ticket)| (*key, ticket.fence));
    let mut queues: Vec<Queue> = Vec::new();
    for (key, ticket) in tickets {
        let waiter = Ticket { holder: ticket.holder.clone(), waits_ms: millis(ticket.held_for) };
        match queues.last_mut() {
            Some(queue) if queue.key == key => queue.waiters.push(waiter),
            _ => {
                let is_part = |it: &LeaseInfo| {
                    let rest = it.key.as_str().strip_prefix(key);
                    rest.is_some_and(|it| {
                        it.is_empty() || it == "/writer" || it.starts_with("/permit/") || it.starts_with("/reader/")
                    })
                };
                let holder = leases.iter().find(|it| is_part(it)).map(|it| Holder {
                    name: it.holder.clone(),
                    fence: it.fence.get(),
                    held_ms: millis(it.held_for),
                    expires_in_ms: millis(it.expires_in),
                });
                queues.push(Queue { key: key.to_owned(), holder, waiters: vec![waiter] });
            }
        }
    }
    queues
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    #[test]
    fn tickets_are_the_queue_of_their_lease_in_the_order_of_their_fences() {
        let lease = |key: &str, holder: &str, fence: u64| {
            LeaseInfo::new(key.into(), holder, fence.into(), SystemTime::UNIX_EPOCH)
        };
        let leases = [
            lease("nightly", "api-1", 5),
            lease("nightly/queue/0", "api-3", 9),
            lease("nightly/queue/1", "api-2", 7),
            lease("report/permit/3", "api-4", 8),
            lease("report/queue/0", "api-5", 9),
            lease("a/queue/of", "no ticket", 1),
        ];
        let queues = queues(&leases);
        let seen: Vec<(&str, Option<&str>, Vec<&str>)> = queues
            .iter()
            .map(|it| {
                let waiters = it.waiters.iter().map(|it| &*it.holder).collect();
                (&*it.key, it.holder.as_ref().map(|it| &*it.name), waiters)
            })
            .collect();
        let expected = [("nightly", Some("api-1"), vec!["api-2", "api-3"]), ("report", Some("api-4"), vec!["api-5"])];
        assert_eq!(seen, expected);
    }
}
