//! What a run must have left in the tables, and what it did leave there.

use std::collections::BTreeMap;

use anyhow::Result;
use sqlx::Pool;

use crate::{
    draws::Plan,
    sale::{Strategy, stock_of},
    shop::Shop,
    worker::Report,
};

/// One line of the table.
#[derive(Debug)]
pub(crate) struct Verdict {
    pub(crate) strategy: Strategy,
    pub(crate) given_out: u64,
    pub(crate) stock: u64,
    pub(crate) oversold: u64,
    pub(crate) double_wins: u64,
    pub(crate) retries: u64,
    pub(crate) gave_up: u64,
    pub(crate) per_second: f64,
    pub(crate) p50_ms: f64,
    pub(crate) p99_ms: f64,
    /// What is wrong in the tables; empty when the run was exact.
    pub(crate) faults: Vec<String>,
}

/// Reads the tables after a run, and compares them with the plan and with what the workers counted.
pub(crate) async fn verdict<DB: Shop>(
    pool: &Pool<DB>,
    strategy: Strategy,
    plan: &Plan,
    report: &Report,
) -> Result<Verdict> {
    let mut left: BTreeMap<i64, i64> = DB::left(pool).await?.into_iter().collect();
    if strategy == Strategy::Stock {
        for (item_id, left) in &mut left {
            *left = stock_of(pool, *item_id).left().await?.try_into()?;
        }
    }
    let mut given: BTreeMap<i64, u64> = BTreeMap::new();
    let mut double_wins = 0;
    for win in DB::wins(pool).await? {
        let times = u64::try_from(win.times)?;
        *given.entry(win.item_id).or_default() += times;
        double_wins += times - 1;
    }

    let demand = plan.demand();
    let mut oversold = 0;
    let mut faults = Vec::new();
    for item in &plan.items {
        let of = |map: &BTreeMap<i64, u64>| map.get(&item.item_id).copied().unwrap_or(0);
        let (given, demand, gave_up, counted) = (of(&given), of(&demand), of(&report.gave_up), of(&report.won));
        let stock = u64::from(item.stock);
        let left = left.get(&item.item_id).copied().unwrap_or(0);
        oversold += given.saturating_sub(stock);
        // Exactly one piece for each buyer who drew the item, until it is sold out. A draw that gave up may be missing.
        let (least, most) = (stock.min(demand.saturating_sub(gave_up)), stock.min(demand));
        let name = &item.name;
        if given < least || given > most {
            faults.push(format!("{name}: {given} given out, not {most} (stock {stock}, {demand} buyers drew it)"));
        }
        if i128::from(left) != i128::from(stock) - i128::from(given) {
            faults.push(format!("{name}: {left} left of {stock} after {given} were given out"));
        }
        if given != counted {
            faults.push(format!("{name}: {given} wins in the table, but the workers were told of {counted}"));
        }
    }
    if double_wins > 0 {
        faults.push(format!("{double_wins} times a buyer won an item that he held already"));
    }

    let mut latencies = report.latencies.clone();
    latencies.sort_unstable();
    let draws = u32::try_from(latencies.len())?;
    Ok(Verdict {
        strategy,
        given_out: given.values().sum(),
        stock: plan.stock(),
        oversold,
        double_wins,
        retries: report.retries,
        gave_up: report.gave_up.values().sum(),
        per_second: f64::from(draws) / report.elapsed.as_secs_f64(),
        p50_ms: millis(percentile(&latencies, 50)),
        p99_ms: millis(percentile(&latencies, 99)),
        faults,
    })
}

/// The least value that so many percent of the values do not exceed; 0 if there are none.
fn percentile(sorted: &[u64], percent: usize) -> u64 {
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0)
}

#[expect(clippy::cast_precision_loss, reason = "a latency has far fewer than 53 bits")]
fn millis(micros: u64) -> f64 {
    micros as f64 / 1000.0
}

/// The columns of the table.
pub(crate) const HEADER: &str =
    "strategy  given out    stock  oversold  double wins  retries  gave up  draws/s   p50 ms   p99 ms";

impl Verdict {
    /// One line under [`HEADER`].
    pub(crate) fn line(&self) -> String {
        let Self { strategy, given_out, stock, oversold, double_wins, retries, gave_up, .. } = self;
        let Self { per_second, p50_ms, p99_ms, faults, .. } = self;
        format!(
            "{:<8}  {given_out:>9}  {stock:>7}  {oversold:>8}  {double_wins:>11}  {retries:>7}  {gave_up:>7}  \
             {per_second:>7.0}  {p50_ms:>7.2}  {p99_ms:>7.2}  {}",
            strategy.name(),
            if faults.is_empty() { "exact" } else { "WRONG" },
        )
    }
}
