//! Tests with a pooler in transaction mode, in a process of their own: what is known about poolers is known for all of it.

mod pooler;
