//! Harness of the end-to-end tests: runs gctrace and real Ruby programs side by side, has an independent witness inside
//! the Ruby processes, and compares what the two saw.
//!
//! Live tests need root, a kernel with BPF, Ruby with its headers and a C compiler; `cargo xtask test` installs what is
//! missing. A test never skips: its requirements are met, or it fails and names what is missing.
//!
//! * [`live`]: the preconditions, the lock that keeps live tests apart, the scratch directory
//! * [`gctrace`]: starts, stops and reads gctrace; every finished run has its [`ledger`] checked
//! * [`ruby`] and [`script`]: the Rubies to test on and the scripts under `tests/rubies`
//! * [`witness`]: the C extension that logs the same events from inside, and its log
//! * [`puma`]: a server; [`lock_step`]: threads that take turns with the GVL
//! * [`timing`]: comparisons of times, on machines that share their CPUs
//! * [`report`]: gctrace's jsonl; [`compare`]: gctrace's lines against the witness's log
//! * [`container`]: real containers of the lab's Rubies, and cgroups
//! * [`doctor`]: the output of `gctrace doctor`
//! * [`tunemygc`], [`pprof`], [`stack_log`]: independent readers of the output files
//! * [`collector`]: a running collector and sets for it; [`http`]: its clients' side, byte by byte
//! * [`receiver`]: a server that is pushed to; [`python`]: packages that decode the pushes; [`postgres`]: a database
//! * [`screen`]: a terminal; [`browser`]: a browser
//! * [`memory`]: whether a process's code is what its file says
//!
//! Environment: `GCTRACE_BIN` (the binary to test; default: the one built beside the tests) and `GCTRACE_RUBIES`
//! (colon-separated Ruby executables, those in a root of `cargo xtask lab` among them; default: `ruby` and all of these),
//! `GCTRACE_SLOWNESS` (see [`slowness`]), `GCTRACE_WITNESSES` (a folder of witnesses compiled elsewhere: `LABEL/witness.so`).

pub mod browser;
pub mod child;
pub mod collector;
pub mod compare;
pub mod container;
pub mod doctor;
pub mod gctrace;
pub mod heap;
pub mod http;
pub mod ledger;
pub mod live;
pub mod lock_step;
pub mod memory;
pub mod perfetto;
pub mod postgres;
pub mod pprof;
pub mod puma;
pub mod python;
pub mod receiver;
pub mod report;
pub mod ruby;
pub mod screen;
pub mod script;
pub mod sidekiq;
pub mod stack_log;
pub mod timing;
pub mod traceparent;
pub mod tunemygc;
pub mod unix_server;
pub mod witness;

use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result};

/// How long anything may take before a test fails; far longer than it ever takes on a slow and busy machine.
pub const PATIENCE: Duration = Duration::from_mins(2);

/// By how much this machine is slower than a real one: 1, or the value of `GCTRACE_SLOWNESS`, as in an emulated machine.
/// Everything with a known duration on a real machine may take this many times as long.
pub fn slowness() -> u64 {
    std::env::var("GCTRACE_SLOWNESS").ok().and_then(|text| text.parse().ok()).unwrap_or(1)
}

/// A port on which nobody listens, for a server that cannot choose one itself. Each test gets another one, and it is below those that the
/// kernel gives to clients, so that nobody takes it before the server does.
pub fn free_port() -> Result<u16> {
    const FIRST: u16 = 10_000;
    const COUNT: u32 = 20_000;
    static TAKEN: AtomicU32 = AtomicU32::new(0);
    let start = std::process::id().wrapping_mul(997);
    let mut ports = (0..COUNT).map(|_| {
        let number = start.wrapping_add(TAKEN.fetch_add(1, Ordering::Relaxed)) % COUNT;
        FIRST + u16::try_from(number).unwrap_or_default()
    });
    ports.find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok()).context("no port is free")
}
