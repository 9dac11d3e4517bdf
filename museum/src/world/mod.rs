//! What the participants act on: Redis or a toy of it, a database, and lockkit's leases.

mod leases;
mod place;
mod redis;
mod shop;
mod sql;
mod toy;

use self::redis::Link;
pub(crate) use self::{
    leases::{Client, LeaseWorld, holder, shift_leases},
    place::{Kind, Place, Servers},
    redis::Redis,
    shop::Shop,
    sql::{Changed, Id, Item, Nums, Sql, Text},
    toy::Toy,
};
