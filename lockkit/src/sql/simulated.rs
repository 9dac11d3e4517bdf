//! What a simulated database implements, so that stocks and versions run over it as over the real ones: the operations
//! of a database, and access to what they get and return.

pub use crate::sql::{
    dialect::{AsConnection, Dialect, Driver, Known, sealed::Sealed},
    query::{SaveQuery, Values, VersionQuery},
    stock::{
        ops::{Look, Note, Portion, StockOps, StockStatements},
        segment::Segment,
    },
    version::ops::{VersionOps, VersionStatements},
};

use sqlx::Database;

use crate::value::token::Token;

/// The number of a note whose batch was refused.
pub const VOID: i64 = Note::VOID;

/// The id of the note, and the number of its batch.
pub fn note(Note { id, number }: Note) -> (Token, i64) {
    (id, number)
}

/// What a batch took.
pub fn portion(segment: u32, takers: usize) -> Portion {
    Portion { segment, takers }
}

/// A segment with this number of pieces.
pub fn segment(number: u32, quantity: u64) -> Segment {
    Segment { number, quantity }
}

/// The number of the segment, and its pieces.
pub fn pieces(Segment { number, quantity }: &Segment) -> (u32, u64) {
    (*number, *quantity)
}

/// A current read of these segments.
pub fn look(segments: Vec<Segment>) -> Look {
    Look { segments, is_current: true }
}

/// The bound values.
pub fn arguments<DB: Database>(values: Values<DB>) -> DB::Arguments {
    values.arguments
}
