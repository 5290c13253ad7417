//! `/metrics` for Prometheus: figures by service, and gctrace's own counters. Scrapes read a copy, so tracing never waits for one.

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{ExportError, Exporter};
use crate::{
    aggregate::services::Services,
    clock::monotonic_ns,
    ledger::Ledger,
    model::{
        Process,
        seen::{Observer as _, Seen},
    },
};

mod server;
mod text;

/// The data that scrapes are answered from.
struct Shared {
    figures: Mutex<(Services, Ledger)>,
    /// When the data thread last reported, `CLOCK_MONOTONIC` nanoseconds.
    alive_ns: AtomicU64,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, (Services, Ledger)> {
        self.figures.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Adds up figures and serves them.
pub struct Prometheus {
    shared: Arc<Shared>,
}

impl Prometheus {
    /// Listens on an address; `by_pid` reports processes separately. `say` reports the address.
    pub fn start(address: SocketAddr, by_pid: bool, say: fn(&str)) -> Result<Self, ExportError> {
        let shared = Arc::new(Shared {
            figures: Mutex::new((Services::new(by_pid), Ledger::default())),
            alive_ns: AtomicU64::new(monotonic_ns()),
        });
        let local = server::start(address, Arc::clone(&shared))
            .map_err(|source| ExportError::Listen { address, source })?;
        if !local.ip().is_loopback() {
            say(
                "gctrace: anyone who can reach this address can read service names and figures: there is no sign-in and no TLS",
            );
        }
        say(&format!("gctrace: metrics on http://{local}/metrics"));
        Ok(Self { shared })
    }
}

impl Exporter for Prometheus {
    fn see(&mut self, process: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        self.shared.lock().0.see(process, seen);
        Ok(())
    }

    fn account(&mut self, ledger: &Ledger) {
        self.shared.lock().1 = ledger.clone();
    }

    fn finish(&mut self, ledger: &Ledger) -> Result<(), ExportError> {
        self.account(ledger);
        Ok(())
    }

    fn flush(&mut self, _now_ns: u64) -> Result<(), ExportError> {
        self.shared.alive_ns.store(monotonic_ns(), Ordering::Relaxed);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An address that other hosts can reach gives a warning; a loopback address does not.
    #[test]
    fn open_to_others() {
        static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());
        let said = |ip: [u8; 4]| {
            SAID.lock().unwrap().clear();
            Prometheus::start((ip, 0).into(), false, |line| SAID.lock().unwrap().push(line.to_owned()))
                .unwrap();
            SAID.lock().unwrap().join("\n")
        };
        let warning = "anyone who can reach this address can read service names";
        assert!(said([0, 0, 0, 0]).contains(warning));
        let local = said([127, 0, 0, 1]);
        assert!(!local.contains(warning) && local.contains("metrics on http://127.0.0.1:"), "{local}");
    }
}
