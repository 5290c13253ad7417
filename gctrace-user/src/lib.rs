//! gctrace: watches the GC of every CRuby process on a Linux host from the kernel.
//!
//! See `ARCHITECTURE.md` for the map and the invariants. Data flows one way: ring → [`decode`] → [`enrich`] →
//! [`aggregate`] → [`export`]; control flows `/proc` → [`discover`] → [`ruby`] → [`bpf`].
#![deny(unsafe_code)]

pub mod address;
pub mod aggregate;
pub mod app;
pub mod bpf;
pub mod cache;
pub mod cli;
pub mod console;
#[cfg(test)]
mod debian;
pub mod decode;
pub mod discover;
pub mod doctor;
pub mod elf;
pub mod enrich;
pub mod export;
pub mod images;
pub mod ledger;
pub mod model;
pub mod native;
pub mod pipeline;
pub mod preflight;
mod private_dir;
pub mod ruby;
pub mod signals;
pub mod stacks;
pub mod words;
