//! What tasks do with stocks and with rows that have versions, drawn from a seed. Times are in milliseconds.

use fastrand::Rng;

use crate::plan::pick;

/// How many stocks and rows there are.
const STOCKS: u32 = 2;
const ROWS: i64 = 3;

/// How many segments a stock may have.
const SEGMENTS: [u32; 3] = [1, 2, 4];

/// What a task does.
#[derive(Debug, Clone)]
pub enum Deal {
    /// `Stock::put`.
    Put { stock: u32, amount: u64, segments: u32 },
    /// Calls of `Stock::take`, each in a task of its own.
    Takes { stock: u32, takers: Vec<Taker> },
    /// A transaction with a `Stock::take_in` of each amount.
    Order { stock: u32, amounts: Vec<u64>, pause: u64, commits: bool, dropped: Option<u64> },
    /// `Stock::rebalance`.
    Rebalance { stock: u32, segments: u32 },
    /// Adds one to a row, with retries.
    Update(Update),
}

/// A call of `Stock::take`.
#[derive(Debug, Clone)]
pub struct Taker {
    /// The pause before it.
    pub pause: u64,
    pub amount: u64,
    /// Its wait.
    pub wait: u64,
    /// After how long it is dropped.
    pub dropped: Option<u64>,
}

/// A retry that reads rows, and writes them if their versions are still the same.
#[derive(Debug, Clone)]
pub struct Update {
    /// One row, or several in one transaction.
    pub rows: Vec<i64>,
    /// Whether one row is read and written in a transaction too.
    pub in_tx: bool,
    pub attempts: u32,
    pub deadline: u64,
    /// The pause between the read and the write.
    pub pause: u64,
    /// After how long all of it is dropped.
    pub dropped: Option<u64>,
}

/// What the deals of a run have in common.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::struct_excessive_bools, reason = "each is a kind of its own")]
pub(crate) struct Market {
    /// How many segments a `put` spreads pieces over, unless each has a number of its own.
    pub(crate) segments: u32,
    resizes: bool,
    /// How many connections a pool has.
    pub(crate) connections: u32,
    drops: bool,
    short_waits: bool,
    orders: bool,
    updates: bool,
    scarce: bool,
    /// Whether many calls come at once.
    is_crowded: bool,
    /// Whether an attempt may outlast a turn.
    hangs: bool,
    /// How many rows are updated.
    rows: i64,
}

impl Market {
    pub(crate) fn of(random: &mut Rng) -> Self {
        Self {
            segments: *pick(random, &SEGMENTS),
            connections: *pick(random, &[1, 2, 5]),
            resizes: random.u32(..10) < 3,
            drops: random.u32(..10) < 5,
            short_waits: random.u32(..10) < 3,
            orders: random.bool(),
            updates: random.u32(..10) < 6,
            scarce: random.bool(),
            is_crowded: random.bool(),
            hangs: random.u32(..10) < 2,
            rows: *pick(random, &[1, ROWS]),
        }
    }

    pub(crate) fn deal(self, random: &mut Rng) -> Deal {
        let stock = random.u32(..STOCKS);
        match random.u32(..20) {
            0..3 => Deal::Put {
                stock,
                amount: if self.scarce { random.u64(1..6) } else { random.u64(5..60) },
                segments: self.spread(random),
            },
            3 => Deal::Rebalance { stock, segments: self.spread(random) },
            4..8 if self.orders => Deal::Order {
                stock,
                amounts: (0..random.usize(1..=2)).map(|_| random.u64(1..4)).collect(),
                pause: random.u64(..40),
                commits: random.u32(..4) > 0,
                dropped: self.dropped(random, 60),
            },
            8..15 if self.updates => Deal::Update(self.update(random)),
            _ => {
                let most = if self.is_crowded { 16 } else { 6 };
                Deal::Takes { stock, takers: (0..random.usize(1..=most)).map(|_| self.taker(random)).collect() }
            }
        }
    }

    /// How many segments pieces are spread over.
    fn spread(self, random: &mut Rng) -> u32 {
        if self.resizes { *pick(random, &SEGMENTS) } else { self.segments }
    }

    fn taker(self, random: &mut Rng) -> Taker {
        Taker {
            pause: random.u64(..if self.is_crowded { 3 } else { 8 }),
            amount: if random.u32(..5) == 0 { random.u64(3..12) } else { random.u64(1..4) },
            wait: if self.short_waits && random.bool() { random.u64(..100) } else { 10_000 },
            dropped: self.dropped(random, 20),
        }
    }

    fn update(self, random: &mut Rng) -> Update {
        let several = random.u32(..4) == 0;
        let mut rows: Vec<_> = (0..if several { 2 } else { 1 }).map(|_| random.i64(0..self.rows)).collect();
        rows.dedup();
        Update {
            in_tx: rows.len() > 1 || random.bool(),
            rows,
            attempts: *pick(random, &[1, 3, 20, 20]),
            deadline: if random.u32(..4) == 0 { random.u64(5..300) } else { 4000 },
            pause: if self.hangs && random.u32(..4) == 0 { random.u64(200..400) } else { random.u64(..20) },
            dropped: self.dropped(random, 60),
        }
    }

    fn dropped(self, random: &mut Rng, most: u64) -> Option<u64> {
        (self.drops && random.u32(..3) == 0).then(|| random.u64(..most))
    }
}

/// The name of a stock.
pub(crate) fn name(stock: u32) -> String {
    format!("stock {stock}")
}

/// All stocks.
pub(crate) fn stocks() -> impl Iterator<Item = u32> {
    0..STOCKS
}

/// All rows.
pub(crate) fn rows() -> impl Iterator<Item = i64> {
    0..ROWS
}
