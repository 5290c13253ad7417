//! What was observed of CRuby processes, and the outputs made from it: [`model`] defines what can be observed, [`aggregate`] adds it up,
//! [`export`] writes it in formats for people and programs, [`ledger`] accounts for every event.
//!
//! Nothing here accesses a kernel, `/proc` or the memory of a process: the input is `Seen`, the output is bytes.
#![forbid(unsafe_code)]

/// The knowledge about CRuby, under a short name.
pub(crate) use gctrace_cruby::ruby;

pub mod aggregate;
pub mod clock;
pub mod console;
pub mod diff;
pub mod export;
pub mod ledger;
pub mod model;
pub mod private_dir;
pub mod terminal;
pub mod tls;
pub mod trace_file;
pub mod words;
