//! The outputs of a run: each receives everything, and a failing output never affects the others.

use super::{ExportError, Exporter, sink::Closed};
use crate::{console::say, ledger::UserCounts};

/// Maximum number of distinct failures reported.
const FAILURES: usize = 100;

/// The exporters of a run, in the order in which they are called.
pub struct Outputs {
    exporters: Vec<Output>,
    failures: Vec<String>,
    failed: u64,
    /// The destinations of lines whose readers have closed them.
    closed: Vec<Closed>,
    after: After,
}

struct Output {
    exporter: Box<dyn Exporter>,
    /// Whether the reader of its lines is gone: it writes no more.
    is_closed: bool,
}

/// What follows when the reader of the lines has closed them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum After {
    /// Nothing, and it is not told: a recording is read to its end.
    Nothing,
    /// The run ends: the lines are all that it writes.
    End,
    /// The run goes on for its other outputs.
    Others,
}

impl Outputs {
    /// Outputs with these exporters.
    pub fn new(exporters: Vec<Box<dyn Exporter>>) -> Self {
        let exporters = exporters.into_iter().map(|exporter| Output { exporter, is_closed: false });
        Self {
            exporters: exporters.collect(),
            failures: Vec::new(),
            failed: 0,
            closed: Vec::new(),
            after: After::Nothing,
        }
    }

    /// The same for a run. `others`: whether there are outputs besides the lines.
    #[must_use]
    pub fn of_run(self, others: bool) -> Self {
        Self { after: if others { After::Others } else { After::End }, ..self }
    }

    /// Calls each exporter. Failures are reported.
    pub fn hand(&mut self, mut hand: impl FnMut(&mut dyn Exporter) -> Result<(), ExportError>) {
        for Output { exporter, is_closed } in &mut self.exporters {
            if *is_closed && self.after == After::Others {
                continue;
            }
            let Err(error) = hand(exporter.as_mut()) else { continue };
            let error = if let Some(closed) = error.closed() {
                *is_closed = true;
                if self.after == After::Nothing || self.closed.contains(&closed) {
                    continue;
                }
                let go_on = if self.after == After::Others { "; the other outputs go on" } else { "" };
                let told = format!("the reader of {closed} has closed it{go_on}");
                let has_failed = self.after == After::Others && closed != Closed::Stdout;
                self.closed.push(closed);
                if !has_failed {
                    say(&format!("gctrace: {told}"));
                    continue;
                }
                told
            } else {
                error.to_string()
            };
            self.failed += 1;
            // Every distinct failure is reported once, even if it repeats.
            if self.failures.len() < FAILURES && !self.failures.contains(&error) {
                say(&format!("gctrace: {error}"));
                self.failures.push(error);
            }
        }
    }

    /// Calls each exporter with something that cannot fail.
    pub fn tell(&mut self, mut tell: impl FnMut(&mut dyn Exporter)) {
        self.exporters.iter_mut().for_each(|output| tell(output.exporter.as_mut()));
    }

    /// Adds the counters of the exporters, and the number of failures.
    pub fn add_counts(&self, counts: &mut UserCounts) {
        counts.pipeline.export_failures += self.failed;
        for output in &self.exporters {
            output.exporter.add_counts(counts);
        }
    }

    /// Whether nobody reads the lines any more, and there is nothing else to write.
    pub fn is_over(&self) -> bool {
        self.after == After::End && !self.closed.is_empty()
    }

    /// Whether any exporter has reached its limit.
    pub fn is_any_full(&self) -> bool {
        self.exporters.iter().any(|output| output.exporter.is_full())
    }

    /// The failures to write, as reported.
    pub fn failures(&self) -> &[String] {
        &self.failures
    }
}

#[cfg(test)]
mod tests {
    use std::{
        cell::Cell,
        io::{self, Write as _},
        rc::Rc,
    };

    use super::*;
    use crate::{export::sink::Sink, ledger::Ledger};

    /// Counts its calls, and writes to a pipe whose reader is gone.
    struct Counted(Rc<Cell<u32>>, Option<Sink>);

    impl Exporter for Counted {
        fn flush(&mut self, _: u64) -> Result<(), ExportError> {
            self.0.set(self.0.get() + 1);
            match &mut self.1 {
                Some(sink) => sink.write_all(b"x\n").map_err(ExportError::Stdout),
                None => Ok(()),
            }
        }
    }

    /// A pipe whose reader has closed it ends the run if it was the only output; otherwise it is a failed output, and the others go on.
    #[test]
    fn pipes_without_readers() {
        for (others, failures) in [(false, 0), (true, 1)] {
            let (reader, writer) = io::pipe().unwrap();
            let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&writer));
            let sink = Sink::open(Some(path.as_ref())).unwrap();
            drop(reader);
            let calls: [Rc<Cell<u32>>; 2] = Default::default();
            let exporters: Vec<Box<dyn Exporter>> = vec![
                Box::new(Counted(calls[0].clone(), Some(sink))),
                Box::new(Counted(calls[1].clone(), None)),
            ];
            let mut outputs = Outputs::new(exporters).of_run(others);
            for _ in 0..3 {
                outputs.hand(|exporter| exporter.flush(1));
            }
            assert_eq!((outputs.is_over(), outputs.failures().len()), (!others, failures));
            assert_eq!((calls[0].get(), calls[1].get()), (if others { 1 } else { 3 }, 3));
            if others {
                let wanted = format!("the reader of {path} has closed it; the other outputs go on");
                assert_eq!(outputs.failures(), [wanted]);
            }
        }
    }

    /// Fails with one error after the other, and counts its calls.
    struct Fails {
        errors: Vec<&'static str>,
        calls: Rc<Cell<usize>>,
    }

    impl Exporter for Fails {
        fn finish(&mut self, _ledger: &Ledger) -> Result<(), ExportError> {
            self.calls.set(self.calls.get() + 1);
            self.errors.pop().map_or(Ok(()), |error| Err(ExportError::Stdout(io::Error::other(error))))
        }
    }

    /// A failure keeps no other output from being called. Each is counted, and each different one is reported once.
    #[test]
    fn failures_are_counted_and_reported_once() {
        let calls = [(); 3].map(|()| Rc::new(Cell::new(0)));
        let errors = [vec!["one", "one"], vec!["another"], vec![]];
        let exporters = errors.into_iter().zip(&calls).map(|(errors, calls)| {
            let exporter: Box<dyn Exporter> = Box::new(Fails { errors, calls: Rc::clone(calls) });
            exporter
        });
        let mut outputs = Outputs::new(exporters.collect());
        for round in 1..=3 {
            outputs.hand(|exporter| exporter.finish(&Ledger::default()));
            assert_eq!(calls.each_ref().map(|calls| calls.get()), [round; 3]);
        }
        assert_eq!(outputs.failures().len(), 2, "{:?}", outputs.failures());
        let mut counts = UserCounts::default();
        outputs.add_counts(&mut counts);
        assert_eq!((counts.pipeline.export_failures, outputs.is_over()), (3, false));
    }
}
