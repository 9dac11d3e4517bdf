//! Optimistic versions: writes that succeed only if nobody else wrote since the read.

mod bump;
mod conflict;
pub(crate) mod ops;
mod record;
mod row;
mod save;

pub use bump::{Bumped, Expected};
pub use conflict::OrConflict;
pub use record::{Columns, VersionField, VersionedStruct};
pub use row::{Versioned, VersionedRow, load};
pub use save::Saved;
