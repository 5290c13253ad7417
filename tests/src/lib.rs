//! Harness of the end-to-end tests: it runs gctrace and real Ruby programs side by side, with an independent witness
//! inside the Ruby processes, and compares what the two saw.
//!
//! Live tests need root, a kernel with BPF, Ruby with its headers, and a C compiler; `cargo xtask test` installs what is
//! missing. A test never skips: if a requirement is missing, it fails and names it.
//!
//! * [`live`]: the preconditions, the lock that serializes live tests, the scratch directory
//! * [`gctrace`]: starts, stops and reads gctrace; the [`ledger`] of every finished run is checked
//! * [`ruby`] and [`script`]: the Rubies under test and the scripts in `tests/rubies`
//! * [`witness`]: the C extension that logs the same events from inside the process, and its log
//! * [`puma`]: a server; [`lock_step`]: threads that take turns with the GVL
//! * [`timing`]: comparisons of times on machines that share their CPUs
//! * [`report`]: gctrace's jsonl; [`compare`]: compares gctrace's lines with the witness's log
//! * [`container`]: real containers of the lab's Rubies, and cgroups
//! * [`doctor`]: the output of `gctrace doctor`
//! * [`tunemygc`], [`pprof`], [`stack_log`]: independent readers of the output files
//! * [`collector`]: a running collector and sets for it; [`http`]: the client side, byte by byte
//! * [`receiver`]: a server that receives pushes; [`python`]: packages that decode the pushes; [`postgres`]: a database
//! * [`screen`]: a terminal; [`browser`]: a browser
//! * [`memory`]: whether the code of a process equals its file
//!
//! Environment: `GCTRACE_BIN` (the binary under test; default: the one built beside the tests), `GCTRACE_RUBIES`
//! (colon-separated Ruby executables, which may be in a root of `cargo xtask lab`; default: `ruby` and all of these roots),
//! `GCTRACE_SLOWNESS` (see [`slowness`]), `GCTRACE_WITNESSES` (a directory of witnesses compiled elsewhere: `LABEL/witness.so`).

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

/// Timeout of everything that a test waits for; far above what anything takes on a slow and busy machine.
pub const PATIENCE: Duration = Duration::from_mins(2);

/// The factor by which this machine is slower than a physical one: 1, or the value of `GCTRACE_SLOWNESS`, for example in an emulated
/// machine. Everything with a known duration on a physical machine may take this many times as long.
pub fn slowness() -> u64 {
    std::env::var("GCTRACE_SLOWNESS").ok().and_then(|text| text.parse().ok()).unwrap_or(1)
}

/// A free port, for a server that cannot choose one itself. Each test gets a different one. The ports are below the range that the kernel
/// gives to clients, so no client takes one before the server does.
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
