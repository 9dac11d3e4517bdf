//! How the answers of the scripts are read. Pure.

use lockkit::store::Answer;
use redis::{FromRedisValue, Value, from_redis_value};

use crate::error::Failure;

pub(crate) fn read<T: FromRedisValue>(value: Value) -> Result<T, Failure> {
    from_redis_value(value).map_err(|err| unexpected(&err))
}

pub(crate) fn parsed<T: std::str::FromStr>(text: &str) -> Result<T, Failure> {
    text.parse().map_err(|_| unexpected(&text))
}

pub(crate) fn unexpected(answer: &dyn std::fmt::Display) -> Failure {
    Failure::Unexpected(answer.to_string())
}

/// One answer to each renewal or release.
pub(crate) fn answers(number: usize, value: Value) -> Result<Vec<Answer>, Failure> {
    let answers: Vec<u8> = read::<Vec<i64>>(value)?.into_iter().map(|it| u8::from(it == 1)).collect();
    if answers.len() != number {
        return Err(unexpected(&format!("{} times to {number} requests", answers.len())));
    }
    Ok(answers.into_iter().map(|it| if it == 1 { Answer::Done } else { Answer::Gone }).collect())
}
