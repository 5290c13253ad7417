//! A server that receives TuneMyGC sample sets ([`server`]) and stores them ([`store`]), the commands of its operator ([`admin`]), and what
//! pages show of sets ([`digest`]). `docs/collector.md` describes it for its users.
#![forbid(unsafe_code)]

use std::time::{SystemTime, UNIX_EPOCH};

use gctrace_tunemygc::{printable, tune, wire};

pub mod admin;
pub mod digest;
pub mod server;
pub mod store;

/// The current time, epoch seconds.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}
