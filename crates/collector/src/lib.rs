//! A server that receives TuneMyGC sample sets ([`server`]) and keeps them ([`store`]). `docs/collector.md` describes it for
//! its users.
#![forbid(unsafe_code)]

use gctrace_tunemygc::{printable, tune, wire};

pub mod server;
pub mod store;
