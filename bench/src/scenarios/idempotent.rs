//! A request that is done once: with a new key, and with one that was answered before.

use anyhow::{Result, ensure};
use lockkit::{Answered, Error, Idempotent};
use sha2::{Digest, Sha256};

use super::{Bench, Subject, WAIT};
use crate::clock;
use crate::floors::{StoredByHand, name};
use crate::load::Step;

/// What a service answers, as JSON of 64 bytes.
const ANSWER: &str = "\"0f7d6a51-8e03-978e-40d5-a3f1c2b4d6e8/2026-11-26T03:00:00.000000Z\"";

/// What is requested.
const REQUEST: u32 = 1999;

/// A new key each time.
pub(super) async fn new_key<DB: Subject>(bench: &Bench<DB>) -> Result<Option<Step>> {
    let key = format!("pay:{:032x}", fastrand::u128(..));
    let is_new = match bench.job.contender.as_str() {
        "floor" => by_hand(bench, &key).await?,
        _ => lockkit(bench, &key).await?,
    };
    ensure!(is_new, "{key} was answered before");
    Ok(Some(Step::since(clock::now())))
}

/// A key of few, which all were answered while the tasks warmed up.
pub(super) async fn answered_before<DB: Subject>(bench: &Bench<DB>, key: u32) -> Result<Option<Step>> {
    let key = name(key);
    if bench.job.contender != "floor" {
        lockkit(bench, &key).await?;
    } else if let Some(stored) = DB::answer_read(&bench.pool, &key).await? {
        check(&key, &fingerprint()?, &stored)?;
    } else {
        by_hand(bench, &key).await?;
    }
    Ok(Some(Step::since(clock::now())))
}

/// Locks the name, looks for its answer, and stores one. Returns whether there was none.
async fn by_hand<DB: Subject>(bench: &Bench<DB>, key: &str) -> Result<bool> {
    let mut tx = DB::open_transaction(&bench.pool).await?;
    DB::answer_lock(&mut tx, key).await?;
    let (stored, fingerprint) = (DB::answer_read_locked(&mut tx, key).await?, fingerprint()?);
    match &stored {
        Some(stored) => check(key, &fingerprint, stored)?,
        None => DB::answer_write(&mut tx, key, &fingerprint, ANSWER).await?,
    }
    DB::end_transaction(tx).await?;
    Ok(stored.is_none())
}

/// The hash of the request, so that another request with the same key is noticed.
fn fingerprint() -> Result<[u8; 32]> {
    Ok(Sha256::digest(serde_json::to_vec(&REQUEST)?).into())
}

fn check(key: &str, fingerprint: &[u8], (of, answer): &StoredByHand) -> Result<()> {
    ensure!(of == fingerprint && answer == ANSWER, "{key} was answered with {answer}");
    Ok(())
}

async fn lockkit<DB: Subject>(bench: &Bench<DB>, key: &str) -> Result<bool> {
    let text = ANSWER.trim_matches('"');
    let answered =
        Idempotent::key(key).request(&REQUEST).wait(WAIT).run(&bench.pool, async |_| Ok::<_, Error>(text.to_owned()));
    match answered.await? {
        Answered::Now(answer) => {
            ensure!(answer == text, "{key} was answered with {answer}");
            Ok(true)
        }
        Answered::Before(answer) => {
            ensure!(answer == text, "{key} was answered with {answer} before");
            Ok(false)
        }
    }
}
