//! Optimistic versions: writes that succeed only if nobody else wrote since the read.

mod bumped;
mod conflict;
pub(crate) mod ops;
mod row;
mod saved;
mod stored;

pub use bumped::{Bumped, Expected};
pub use conflict::OrConflict;
pub use row::{Versioned, VersionedRow, load};
pub use saved::Saved;
pub use stored::{Columns, VersionField, VersionedStruct};
