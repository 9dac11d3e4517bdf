//! Who blocks whom, as data. Knows no database and no terminal.

use std::time::Duration;

use lockkit::store::LeaseInfo;
use serde::Serialize;

/// The sessions and leases that others wait for, and those who wait.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(crate) struct Picture {
    /// The sessions in `waits`.
    pub(crate) sessions: Vec<Session>,
    /// The locks of the database that are waited for: of rows, names and sessions.
    pub(crate) waits: Vec<Wait>,
    /// The leases that are waited for.
    pub(crate) leases: Vec<Queue>,
    /// What the user may not see, and the statement that grants it.
    pub(crate) unseen: Vec<String>,
}

/// A session of the database server.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Session {
    /// The number that ends it.
    pub(crate) id: i64,
    /// User, address and application.
    pub(crate) name: String,
    /// How old its transaction is, if it has one that the user may see.
    pub(crate) transaction_ms: Option<u64>,
    /// What it is doing, in the server's words.
    pub(crate) state: String,
    /// Its statement, or on PostgreSQL the last one. Empty if the user may not see it.
    pub(crate) statement: String,
    /// The statement that ends it.
    pub(crate) end_by: String,
}

/// A session that waits for others.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Wait {
    pub(crate) waiter: i64,
    pub(crate) waits_ms: u64,
    /// What it waits for, with the key of the row where that can be read.
    pub(crate) lock: String,
    /// Those who hold it, or are before the waiter. Empty if the server does not say.
    pub(crate) holders: Vec<i64>,
}

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

impl Picture {
    /// The sessions that wait for this one, with what they wait for.
    pub(crate) fn behind(&self, holder: i64) -> impl Iterator<Item = &Wait> {
        self.waits.iter().filter(move |it| it.holders.contains(&holder))
    }

    /// The sessions from which to read: they block others and do not wait. Of sessions that wait for each other, the
    /// one that has waited longest is among them.
    pub(crate) fn first(&self) -> Vec<i64> {
        let waits = |id: i64| self.waits.iter().any(|it| it.waiter == id && !it.holders.is_empty());
        let mut first: Vec<i64> = Vec::new();
        for holder in self.waits.iter().flat_map(|it| &it.holders) {
            if !waits(*holder) && !first.contains(holder) {
                first.push(*holder);
            }
        }
        // Who waits for a holder that the server does not tell.
        first.extend(self.waits.iter().filter(|it| it.holders.is_empty()).map(|it| it.waiter));
        let mut reached = Vec::new();
        for id in &first {
            self.reach(*id, &mut reached);
        }
        for wait in &self.waits {
            if !reached.contains(&wait.waiter) {
                first.push(wait.waiter);
                self.reach(wait.waiter, &mut reached);
            }
        }
        first
    }

    fn reach(&self, id: i64, reached: &mut Vec<i64>) {
        if !reached.contains(&id) {
            reached.push(id);
            for wait in self.behind(id) {
                self.reach(wait.waiter, reached);
            }
        }
    }
}

/// The leases that have tickets. A ticket of the lease `k` is the lease `k/queue/7`.
pub(crate) fn queues(leases: &[LeaseInfo]) -> Vec<Queue> {
    let mut tickets: Vec<(&str, &LeaseInfo)> = leases
        .iter()
        .filter_map(|it| it.key.as_str().rsplit_once("/queue/").map(|(key, number)| (key, number, it)))
        .filter(|(_, number, _)| !number.is_empty() && number.bytes().all(|it| it.is_ascii_digit()))
        .map(|(key, _, ticket)| (key, ticket))
        .collect();
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

    fn wait(waiter: i64, holders: &[i64]) -> Wait {
        Wait { waiter, waits_ms: 0, lock: String::new(), holders: holders.to_vec() }
    }

    #[test]
    fn those_who_wait_for_each_other_are_shown_too() {
        let first = |waits: &[Wait]| Picture { waits: waits.to_vec(), ..Picture::default() }.first();
        assert_eq!(first(&[wait(2, &[1]), wait(3, &[2]), wait(4, &[3, 1])]), [1]);
        assert_eq!(first(&[wait(2, &[1]), wait(4, &[3])]), [1, 3]);
        assert_eq!(first(&[wait(1, &[2]), wait(2, &[1]), wait(3, &[2])]), [1]);
        assert_eq!(first(&[wait(1, &[])]), [1]);
    }

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
