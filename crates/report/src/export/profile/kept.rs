//! What was recorded for profiles, in memory: written in any format, as often as that is asked for.

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

/// Keeps what a run of outputs sees.
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
    /// Keeps sums, and with `timeline` times. `gvl`, `wall`: whether the GVL is watched, and threads off their CPU.
    pub fn new(timeline: bool, (gvl, wall): (bool, bool), clock: WallClock) -> Self {
        let recording = Recording::new(timeline, Limits::default(), Filter::default()).with_traces(true);
        let state = Rc::new(RefCell::new(State { recording, ledger: Ledger::default() }));
        Self { state, clock, gvl, wall }
    }

    /// What is to be handed everything. Files say what was refused, so the exporter that counts that is among them.
    pub fn exporters(&self) -> Vec<Box<dyn Exporter>> {
        vec![Box::new(Environment::new(|_| {})), Box::new(Filler(self.state.clone()))]
    }

    /// What was kept, when the exporters are gone; `None` while they are there.
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
        self.0.borrow_mut().recording.gvl_gaps.push(gap);
    }

    fn add_counts(&self, counts: &mut UserCounts) {
        super::add_counts(&self.0.borrow().recording, counts);
    }

    fn finish(&mut self, ledger: &Ledger) -> Result<(), ExportError> {
        self.0.borrow_mut().ledger = ledger.clone();
        Ok(())
    }
}

/// What was recorded.
#[derive(Debug)]
pub struct Kept {
    recording: Recording,
    ledger: Ledger,
    clock: WallClock,
    gvl: bool,
    wall: bool,
}

impl Kept {
    /// Writes it as a file of this format would have it, Firefox's compressed. Timelines need what was kept with times.
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

    /// The methods with most CPU time, up to a number, and how many more there are.
    pub fn hottest(&self, most: usize) -> (Vec<HotMethod>, usize) {
        hottest::of_all(&self.recording, most)
    }

    /// CPU samples.
    pub fn has_samples(&self) -> bool {
        !self.recording.samples.is_empty()
    }

    /// The account when the outputs were finished.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }
}
