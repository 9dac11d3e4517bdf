//! Models of what lockkit's promises rest on: every order of events within the bounds is tried.
//!
//! `README.md` says what the models contain and what they leave out.
#![expect(clippy::too_many_lines, reason = "an arm for each action")]
#![expect(clippy::struct_excessive_bools, reason = "each is a fault of its own, or says that it has happened")]

mod life;
// The file of the store itself, so that the model cannot drift away from it.
#[path = "../../stores/zookeeper/src/pulse.rs"]
mod pulse;
/// What `life/state.rs` imports.
mod value {
    pub(crate) mod error {
        pub(crate) use lockkit::LossReason;
    }
}

pub mod check;
pub mod guard;
pub mod quorum;
pub mod sessions;
pub mod stops;
pub mod table;
