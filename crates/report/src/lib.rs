//! What was seen of CRuby processes, and the outputs made of it: [`model`] defines what can be seen, [`aggregate`] adds it up,
//! [`export`] writes it in the formats that people and programs read, [`ledger`] accounts for every event.
//!
//! Nothing here accesses a kernel, `/proc` or the memory of a process: `Seen` comes in, bytes go out.
#![forbid(unsafe_code)]

/// The knowledge of CRuby, under its short name.
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
