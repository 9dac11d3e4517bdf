//! What the participants act on: a toy Redis, a database, and lockkit's leases.

mod leases;
mod shop;
mod toy;

pub(crate) use self::{
    leases::{LeaseWorld, holder, shift_leases},
    shop::Shop,
    toy::Toy,
};
