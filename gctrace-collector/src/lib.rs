//! TuneMyGC sample sets: their wire format ([`wire`]), what they say about GC settings ([`tune`], [`offline`]), and a
//! server that receives them ([`server`]) and keeps them ([`store`]).
//!
//! [`wire`] and [`tune`] are pure: no I/O, no clock. `docs/collector.md` describes the whole for its users.
#![forbid(unsafe_code)]

#[cfg(test)]
mod fuzz;
pub mod offline;
pub mod printable;
pub mod server;
pub mod store;
pub mod tune;
pub mod wire;
