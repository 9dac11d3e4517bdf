//! A list for each runtime, and a task of that runtime which checks it. Knows no store and no database.
//!
//! A runtime that is not driven, or has ended, holds up the members of no other.

use std::{collections::HashMap, sync::Arc, time::Duration};

use tokio::{
    runtime::{Handle, Id},
    time::sleep,
};

use crate::{
    body::guard::{Guard, Hold},
    mutex::Mutex,
};

/// A runtime has a list while its task runs.
type Lists<T> = HashMap<Id, Vec<T>>;

pub(crate) struct PerRuntime<T>(Arc<Mutex<Lists<T>>>);

/// A list that has no task yet.
#[must_use = "nothing checks the list until `check_every` is called"]
pub(crate) struct NewList<T: Send>(Guard<List<T>>);

struct List<T> {
    lists: Arc<Mutex<Lists<T>>>,
    runtime: Id,
}

impl<T: Send + 'static> PerRuntime<T> {
    /// Adds to the list of the current runtime. Returns the list if it is new.
    pub(crate) fn push(&self, member: T) -> Option<NewList<T>> {
        let runtime = Handle::current().id();
        let mut lists = self.0.lock();
        let is_new = !lists.contains_key(&runtime);
        lists.entry(runtime).or_default().push(member);
        drop(lists);
        is_new.then(|| NewList(Guard::new(List { lists: self.0.clone(), runtime })))
    }

    /// Changes the list of the current runtime, if it has one.
    pub(crate) fn change<R>(&self, change: impl FnOnce(&mut Vec<T>) -> R) -> Option<R> {
        self.0.lock().get_mut(&Handle::current().id()).map(change)
    }

    #[cfg(test)]
    pub(crate) fn runtimes(&self) -> usize {
        self.0.lock().len()
    }
}

impl<T: Send + 'static> NewList<T> {
    /// Starts the task, which calls `check` at this interval until the list is empty. What `check` returns runs after
    /// the mutex is unlocked.
    pub(crate) fn check_every<F: FnOnce() + Send>(
        self,
        interval: Duration,
        mut check: impl FnMut(&mut Vec<T>) -> F + Send + 'static,
    ) {
        let Self(list) = self;
        tokio::spawn(async move {
            loop {
                sleep(interval).await;
                let Some(then) = list.check(&mut check) else { break };
                then();
            }
            drop(list.defuse());
        });
    }
}

impl<T> List<T> {
    /// `None` if the list was empty, and is removed.
    fn check<F>(&self, check: &mut impl FnMut(&mut Vec<T>) -> F) -> Option<F> {
        let mut lists = self.lists.lock();
        let members = lists.get_mut(&self.runtime)?;
        if members.is_empty() {
            lists.remove(&self.runtime);
            return None;
        }
        Some(check(members))
    }
}

impl<T: Send> Hold for List<T> {
    /// Its runtime has ended.
    fn abandon(self) {
        let members = self.lists.lock().remove(&self.runtime);
        drop(members);
    }
}

impl<T> Default for PerRuntime<T> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

#[cfg(test)]
mod tests {
    use std::mem;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_list_can_be_changed_until_it_was_found_empty() {
        let second = Duration::from_secs(1);
        let lists = PerRuntime::default();
        assert_eq!(lists.change(|all| all.len()), None);
        let new = lists.push(1).expect("it is the first");
        assert!(lists.push(2).is_none());
        new.check_every(second, |_| || ());
        sleep(2 * second).await;
        assert_eq!(lists.change(mem::take), Some(vec![1, 2]));
        sleep(2 * second).await;
        assert_eq!(lists.runtimes(), 0);
    }
}
