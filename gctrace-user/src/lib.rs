//! gctrace: watches the GC of every CRuby process on a Linux host from the kernel.
//!
//! See `ARCHITECTURE.md` for the map and the invariants. Data flows one way: ring → [`decode`] → [`host`] →
//! [`aggregate`] → [`export`]; control flows `/proc` → [`discover`] → [`gctrace_cruby`] → [`bpf`].
#![deny(unsafe_code)]

/// Knowledge of CRuby and of ELF files, under short names.
pub(crate) use gctrace_cruby::{address, elf, ruby};
/// Models, aggregation and outputs, under short names.
pub use gctrace_report::{
    aggregate, clock, console, diff, export, ledger, model, private_dir, terminal, tls, trace_file, words,
};

// Shared with the tests of the crate of CRuby knowledge.
#[cfg(test)]
#[path = "../../crates/cruby/src/damaged.rs"]
mod damaged;
#[cfg(test)]
#[path = "../../crates/cruby/src/debian.rs"]
#[allow(dead_code, reason = "each of the two crates uses a part of it")]
mod debian;

pub mod app;
pub mod bpf;
pub mod cache;
pub mod cli;
pub mod command;
pub mod debuginfo;
pub mod decode;
pub mod discover;
pub mod doctor;
pub mod dump;
pub mod heap;
pub mod host;
pub mod images;
pub mod malloc;
pub mod native;
pub mod pipeline;
pub mod preflight;
pub mod signals;
pub mod stacks;
pub mod sudo;
pub mod top;
