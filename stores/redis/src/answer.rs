//! How the answers of the scripts are read. Pure.

use lockkit::store::Answer;
use redis::{FromRedisValue, Value, from_redis_value};

use crate::error::Failure;

pub(crate) fn read<T: FromRedisValue>(value: Value) -> Result<T, Failure> {
    from_redis_value(value).map_err(|err| unexpected(&err))
}

pub(crate) fn unexpected(answer: &dyn std::fmt::Display) -> Failure {
    Failure::Unexpected(answer.to_string())
}

/// One code for each renewal or release.
pub(crate) fn codes(number: usize, value: Value) -> Result<Vec<i64>, Failure> {
    let codes: Vec<i64> = read(value)?;
    if codes.len() != number {
        return Err(unexpected(&format!("{} times to {number} requests", codes.len())));
    }
    Ok(codes)
}

pub(crate) fn answer(code: i64) -> Answer {
    if code == 1 { Answer::Done } else { Answer::Gone }
}
