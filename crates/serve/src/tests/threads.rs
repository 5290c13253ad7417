//! Threads that run one after the other on one native thread.

use std::sync::{Arc, Mutex};

use gctrace_report::{
    export::{ExportError, Exporter, Outputs},
    ledger::Ledger,
    model::{
        Process,
        gvl::{GvlCoverage, GvlSums, GvlThreadSummary, GvlTimes, GvlWho},
        seen::Seen,
    },
    trace_file::{self, Recording},
};

use super::GOLDEN;
use crate::{columns::Columns, figures::Figures};

/// Keeps the first process that it sees.
#[derive(Clone, Default)]
struct First(Arc<Mutex<Option<Process>>>);

impl Exporter for First {
    fn see(&mut self, process: &Process, _: Seen<'_>) -> Result<(), ExportError> {
        self.0.lock().unwrap().get_or_insert_with(|| process.clone());
        Ok(())
    }

    fn finish(&mut self, _: &Ledger) -> Result<(), ExportError> {
        Ok(())
    }
}

/// The GVL shares of a native thread are those of all Ruby threads that it ran.
#[test]
fn shares_of_all() {
    let first = First::default();
    let mut outputs = Outputs::new(vec![Box::new(first.clone())]);
    trace_file::replay(&mut Recording::open(GOLDEN.as_ref()).unwrap(), &mut outputs).unwrap();
    let process = first.0.lock().unwrap().clone().unwrap();
    let mut figures = Figures::new(Columns::new(0, None));
    for (id, seconds, waited) in [(1, 60, 54), (2, 1, 0)] {
        let ns = |seconds: u64| seconds * 1_000_000_000;
        let thread = GvlThreadSummary {
            coverage: GvlCoverage::default(),
            who: GvlWho { tid: 7, comm: "worker".into() },
            id,
            last: None,
            thread: None,
            begin_ns: 1,
            end_ns: 1 + ns(seconds),
            ended: true,
            sums: GvlSums {
                wall_ns: ns(seconds),
                watched_ns: ns(seconds),
                wait: GvlTimes { count: 1, ns: ns(waited), max_ns: ns(waited) },
                ..GvlSums::default()
            },
        };
        figures.see(&process, Seen::GvlThread(&thread));
    }
    let of = &figures.threads[&(process.pid, 7)];
    let sums = of.gvl.as_ref().unwrap();
    assert_eq!((sums.watched_ns, sums.wait.ns), (61_000_000_000, 54_000_000_000));
}
