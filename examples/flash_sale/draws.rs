//! Who draws what: the same for every run with the same seed. Knows no database.

use std::collections::{BTreeMap, BTreeSet};

use fastrand::Rng;
use serde::{Deserialize, Serialize};

use crate::shop::Offer;

/// Everything that decides who draws what.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Plan {
    pub(crate) items: Vec<Offer>,
    pub(crate) buyers: u32,
    pub(crate) draws: u32,
    pub(crate) processes: u32,
    pub(crate) tasks: u32,
    pub(crate) seed: u64,
}

/// One buyer tries to win one item.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Draw {
    pub(crate) item_id: i64,
    pub(crate) buyer_id: i64,
}

impl Plan {
    /// The draws of one task of one process.
    pub(crate) fn draws_of(&self, process: u32, task: u32) -> impl Iterator<Item = Draw> {
        let (tasks, number) = (self.processes * self.tasks, process * self.tasks + task);
        let draws = self.draws / tasks + u32::from(number < self.draws % tasks);
        // Neighbouring seeds give related streams, so each task draws its own seed from the common one first.
        let mut rng = Rng::with_seed(self.seed);
        let mut rng = Rng::with_seed((0..=number).fold(0, |_, _| rng.u64(..)));
        let ends: Vec<u64> = self
            .items
            .iter()
            .scan(0, |end, item| {
                *end += u64::from(item.weight);
                Some(*end)
            })
            .collect();
        let all = ends.last().copied().unwrap_or(0);
        (0..draws).map(move |_| {
            let point = rng.u64(..all);
            let item = &self.items[ends.partition_point(|end| *end <= point)];
            Draw { item_id: item.item_id, buyer_id: rng.i64(1..=i64::from(self.buyers)) }
        })
    }

    /// How many different buyers draw each item: with its stock, this decides how many pieces must be given out.
    pub(crate) fn demand(&self) -> BTreeMap<i64, u64> {
        let mut buyers: BTreeMap<i64, BTreeSet<i64>> = BTreeMap::new();
        for process in 0..self.processes {
            for task in 0..self.tasks {
                for draw in self.draws_of(process, task) {
                    buyers.entry(draw.item_id).or_default().insert(draw.buyer_id);
                }
            }
        }
        buyers.into_iter().map(|(item_id, buyers)| (item_id, buyers.len() as u64)).collect()
    }

    pub(crate) fn stock(&self) -> u64 {
        self.items.iter().map(|it| u64::from(it.stock)).sum()
    }
}
