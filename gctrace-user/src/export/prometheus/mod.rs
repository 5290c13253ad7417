//! `/metrics` for Prometheus: figures by service and what gctrace counts of itself. Scrapes read a copy: tracing never waits
//! for one.

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{ExportError, Exporter, ProcessEnd};
use crate::{
    aggregate::{gvl_so_far::GvlSoFar, services::Services},
    host::clock::monotonic_ns,
    ledger::Ledger,
    model::{GcCycle, GcState, GcWork, Process, gvl::GvlWait},
};

mod server;
mod text;

/// What scrapes are answered from.
struct Shared {
    figures: Mutex<(Services, Ledger)>,
    /// When the data thread was last heard of, `CLOCK_MONOTONIC` nanoseconds.
    alive_ns: AtomicU64,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, (Services, Ledger)> {
        self.figures.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Adds up, and serves what it has.
pub struct Prometheus {
    shared: Arc<Shared>,
}

impl Prometheus {
    /// Listens on an address; `by_pid` tells processes apart. `say` tells where it listens.
    pub fn start(address: SocketAddr, by_pid: bool, say: fn(&str)) -> Result<Self, ExportError> {
        let shared = Arc::new(Shared {
            figures: Mutex::new((Services::new(by_pid), Ledger::default())),
            alive_ns: AtomicU64::new(monotonic_ns()),
        });
        let local = server::start(address, Arc::clone(&shared))
            .map_err(|source| ExportError::Listen { address, source })?;
        say(&format!("gctrace: metrics on http://{local}/metrics"));
        Ok(Self { shared })
    }
}

impl Exporter for Prometheus {
    fn process(&mut self, process: &Process, state: Option<&GcState>) -> Result<(), ExportError> {
        self.shared.lock().0.process(process, state, monotonic_ns());
        Ok(())
    }

    fn cycle(&mut self, process: &Process, cycle: &GcCycle) -> Result<(), ExportError> {
        self.shared.lock().0.cycle(process, cycle);
        Ok(())
    }

    fn work(&mut self, process: &Process, work: &GcWork) -> Result<(), ExportError> {
        self.shared.lock().0.work(process, work);
        Ok(())
    }

    fn gvl_wait(&mut self, process: &Process, wait: &GvlWait) -> Result<(), ExportError> {
        self.shared.lock().0.gvl_wait(process, wait);
        Ok(())
    }

    fn gvl_so_far(&mut self, process: &Process, so_far: &GvlSoFar) -> Result<(), ExportError> {
        self.shared.lock().0.gvl_so_far(process, so_far);
        Ok(())
    }

    fn ended(&mut self, process: &Process, end: &ProcessEnd) -> Result<(), ExportError> {
        self.shared.lock().0.ended(process, end.shutdown.as_ref());
        Ok(())
    }

    fn account(&mut self, ledger: &Ledger) {
        self.shared.lock().1 = ledger.clone();
    }

    fn finish(&mut self, ledger: &Ledger) -> Result<(), ExportError> {
        self.account(ledger);
        Ok(())
    }

    fn flush(&mut self) -> Result<(), ExportError> {
        self.shared.alive_ns.store(monotonic_ns(), Ordering::Relaxed);
        Ok(())
    }
}
