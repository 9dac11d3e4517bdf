//! Tests with a pooler in transaction mode and with a server that only pretends to lock, in a process of their own:
//! what is known about them is known for all of it.

mod feigned;
mod pooler;
