//! The `Idempotency-Key` header, on top of [`lockkit::Idempotent`].

mod answer;
mod header;
mod key;
mod request;

pub use self::{
    answer::IDEMPOTENT_REPLAYED,
    header::IdempotencyKeyRejection,
    key::{IdempotencyKey, UserKey},
    request::IdempotentRequest,
};
