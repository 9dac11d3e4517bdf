//! Optimistic versions: a write succeeds only if no other write happened since the read.

mod bump;
mod conflict;
mod contention;
pub(crate) mod ops;
mod record;
mod row;
mod save;

pub use bump::{Bumped, Expected};
pub use conflict::OrConflict;
pub use record::{Columns, VersionField, VersionedStruct};
pub use row::{Versioned, VersionedRow, load};
pub use save::Saved;
