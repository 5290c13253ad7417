//! A recording of a program whose names are hostile.

use gctrace_user::{
    export::{ExportError, Exporter},
    ledger::Ledger,
    model::{GcCycle, Process, seen::Seen, stack::StackSample},
    trace_file::Recorder,
};

/// What a program that wants to run something in its reader's browser calls its threads.
pub(crate) const HOSTILE: &str = "</text></svg><script>alert(1)</script>\"'><img src=x onerror=alert(2)>";

/// Records everything under hostile names.
pub(crate) struct Hostile(pub(crate) Recorder);

impl Exporter for Hostile {
    fn see(&mut self, process: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        let mut process = process.clone();
        HOSTILE.clone_into(&mut process.comm);
        process.cmdline = Some(vec![HOSTILE.to_owned()]);
        match seen {
            Seen::Cycle(cycle) => {
                self.0.see(&process, Seen::Cycle(&GcCycle { comm: HOSTILE.to_owned(), ..cycle.clone() }))
            }
            Seen::Stack(sample) => {
                self.0.see(&process, Seen::Stack(&StackSample { comm: HOSTILE.into(), ..sample.clone() }))
            }
            Seen::GvlSpan(span) => {
                let mut span = span.clone();
                span.who.comm = HOSTILE.into();
                self.0.see(&process, Seen::GvlSpan(&span))
            }
            Seen::GvlWait(wait) => {
                let mut wait = wait.clone();
                wait.who.comm = HOSTILE.into();
                self.0.see(&process, Seen::GvlWait(&wait))
            }
            seen => self.0.see(&process, seen),
        }
    }
    fn began(&mut self, ts_ns: u64) {
        self.0.began(ts_ns);
    }
    fn closed(&mut self, ts_ns: u64) {
        self.0.closed(ts_ns);
    }
    fn finish(&mut self, ledger: &Ledger) -> Result<(), ExportError> {
        self.0.finish(ledger)
    }
    fn settled(&mut self, ledger: &Ledger) -> Result<(), ExportError> {
        self.0.settled(ledger)
    }
}
