//! A lease around the handling of a request.

mod grpc;
mod held;
mod layer;
mod wanted;

pub use self::{
    held::{Held, NotHeld},
    layer::{LeaseLayer, LeaseService},
    wanted::IntoLease,
};
