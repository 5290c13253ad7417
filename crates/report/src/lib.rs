//! What was seen of CRuby processes, and what is made of it: [`model`] says what can be seen, [`aggregate`] adds it up,
//! [`export`] writes it in the formats that people and programs read, [`ledger`] accounts for every event.
//!
//! Nothing here knows a kernel, `/proc` or memory of a process; `Seen` comes in, bytes go out.
#![forbid(unsafe_code)]

/// What is known of CRuby, by its short name.
pub(crate) use gctrace_cruby::ruby;

pub mod aggregate;
pub mod clock;
pub mod console;
pub mod export;
pub mod ledger;
pub mod model;
pub mod private_dir;
pub mod terminal;
pub mod tls;
pub mod words;
