//! TuneMyGC sample sets: their wire format ([`wire`]), and the GC settings that they suggest ([`tune`], and [`offline`] for
//! files). [`printable`] makes text from outside safe to show; everything that prints uses it.
//!
//! [`wire`] and [`tune`] are pure: no I/O, no clock. `docs/collector.md` describes them for users.
#![forbid(unsafe_code)]

#[cfg(test)]
mod fuzz;
pub mod offline;
pub mod printable;
pub mod tune;
pub mod wire;
