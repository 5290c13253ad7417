//! TuneMyGC sample sets: their wire format ([`wire`]), and what they say about GC settings ([`tune`], and for files
//! [`offline`]). [`printable`] makes text from outside safe to show; everything that prints uses it.
//!
//! [`wire`] and [`tune`] are pure: no I/O, no clock. `docs/collector.md` describes the whole for its users.
#![forbid(unsafe_code)]

#[cfg(test)]
mod fuzz;
pub mod offline;
pub mod printable;
pub mod tune;
pub mod wire;
