//! A recording for profiles, in memory: it can be written in any format, any number of times.

use std::{
    cell::RefCell,
    io::{self, Write},
    rc::Rc,
};

use super::{Context, Format, HotMethod, hottest, write};
use crate::{
    aggregate::recording::{Filter, Limits, Recording},
    clock::WallClock,
    export::{ExportError, Exporter, environment::Environment},
    ledger::{Ledger, UserCounts},
    model::{
        Process,
        gvl::GvlGap,
        seen::{Observer as _, Seen},
    },
};

/// Keeps what the outputs of a run see.
#[derive(Debug)]
pub struct Keeper {
    state: Rc<RefCell<State>>,
    clock: WallClock,
    gvl: bool,
    wall: bool,
}

#[derive(Debug)]
struct State {
    recording: Recording,
    ledger: Ledger,
}

impl Keeper {
    /// Keeps sums, and with `timeline` also times. `gvl`, `wall`: whether the GVL is traced, and whether threads off their CPU are recorded.
    pub fn new(timeline: bool, (gvl, wall): (bool, bool), clock: WallClock) -> Self {
        let recording = Recording::new(timeline, Limits::default(), Filter::default()).with_traces(true);
        let state = Rc::new(RefCell::new(State { recording, ledger: Ledger::default() }));
        Self { state, clock, gvl, wall }
    }

    /// The exporters that fill the recording. Files say how many variables were refused, so the exporter that counts these is among them.
    pub fn exporters(&self) -> Vec<Box<dyn Exporter>> {
        vec![Box::new(Environment::new(|_| {})), Box::new(Filler(self.state.clone()))]
    }

    /// The recording, once the exporters have been dropped; `None` while they exist.
    pub fn kept(self) -> Option<Kept> {
        let Self { state, clock, gvl, wall } = self;
        let State { recording, ledger } = Rc::into_inner(state)?.into_inner();
        Some(Kept { recording, ledger, clock, gvl, wall })
    }
}

struct Filler(Rc<RefCell<State>>);

impl Exporter for Filler {
    fn see(&mut self, process: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        self.0.borrow_mut().recording.see(process, seen);
        Ok(())
    }

    fn outside(&mut self, process: &Process, seen: Seen<'_>) {
        self.0.borrow_mut().recording.outside(process, seen);
    }

    fn began(&mut self, ts_ns: u64) {
        self.0.borrow_mut().recording.began_ns = Some(ts_ns);
    }

    fn closed(&mut self, ts_ns: u64) {
        self.0.borrow_mut().recording.closed_ns = Some(ts_ns);
    }

    fn gvl_gap(&mut self, gap: GvlGap) {
        gap.add_to(&mut self.0.borrow_mut().recording.gvl_gaps);
    }

    fn add_counts(&self, counts: &mut UserCounts) {
        super::add_counts(&self.0.borrow().recording, counts);
    }

    fn finish(&mut self, ledger: &Ledger) -> Result<(), ExportError> {
        self.0.borrow_mut().ledger = ledger.clone();
        Ok(())
    }
}

/// The recorded data.
#[derive(Debug)]
pub struct Kept {
    recording: Recording,
    ledger: Ledger,
    clock: WallClock,
    gvl: bool,
    wall: bool,
}

impl Kept {
    /// Writes the recording as a file of this format, Firefox's compressed. Timeline formats need a recording with times.
    ///
    /// # Errors
    ///
    /// Those of `out`.
    pub fn write(&self, format: Format, out: &mut dyn Write) -> io::Result<()> {
        let Self { recording, ledger, clock, gvl, wall } = self;
        // The end is known: a replay closes everything.
        let (began_ns, ended_ns) = recording.span(0);
        let filtered = recording.filtered().text(recording.filter());
        let (clock, gvl, wall) = (*clock, *gvl, *wall);
        let context = Context { ledger, clock, began_ns, ended_ns, gvl, wall, filtered, said: None };
        write(format, true, recording, &context, out).map(drop)
    }

    /// The methods with the most CPU time, at most `most`, and the number of further ones.
    pub fn hottest(&self, most: usize) -> (Vec<HotMethod>, usize) {
        hottest::of_all(&self.recording, most)
    }

    /// Whether there are CPU samples.
    pub fn has_samples(&self) -> bool {
        !self.recording.samples.is_empty()
    }

    /// The account at the time when the outputs were finished.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }
}
