//! Folds the GC events of one process into cycles and pauses.

use gctrace_common::event::PauseEvent;

use crate::{
    model::{GcCycle, GcState, Pause, stack::Stack, trace::Span},
    ruby::{PauseKind, stat::Mode},
};

/// Maximum number of pauses of a cycle; further ones count as outside it. A lazy sweep of a large heap takes some thousands.
const MAX_PAUSES: usize = 1 << 20;

/// The result of folding one event.
#[derive(Debug, Default)]
pub struct Folded {
    /// Cycles that are now complete (or cut short by the next one).
    pub cycles: Vec<GcCycle>,
}

/// Counters of what could not be attributed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FoldCounts {
    /// `GC_END_SWEEP` events of cycles whose start was not seen (gctrace attached in the middle of the cycle, or records were lost).
    pub end_without_start: u64,
    /// Pauses outside all cycles whose start was seen.
    pub pauses_outside: u64,
    /// Cycles whose end had not been seen when the next one started (records were lost).
    pub cut_short: u64,
}

/// The running cycle of one process, if any.
#[derive(Debug, Default)]
pub struct CycleFold {
    open: Option<GcCycle>,
    /// The open cycle has been swept; the pause that finished the sweep has not been reported yet.
    swept: bool,
    last_seq: u64,
    lost: u64,
    /// State at a GC enter event that may be the VM's shutdown.
    shutdown: Option<GcState>,
    counts: FoldCounts,
}

impl CycleFold {
    /// A fold that continues after record number `seq` of its process.
    pub fn after(seq: u64) -> Self {
        Self { last_seq: seq, ..Self::default() }
    }

    /// Notes the sequence number of a record. Returns the number of records that the kernel lost before it.
    pub fn sequence(&mut self, seq: u64) -> u64 {
        let gap = seq.saturating_sub(self.last_seq.saturating_add(1));
        self.lost += gap;
        self.last_seq = self.last_seq.max(seq);
        gap
    }

    /// The highest sequence number so far.
    pub fn last_seq(&self) -> u64 {
        self.last_seq
    }

    /// The process ended after record number `seq`: records missing at the end were lost, too. Returns the number of lost records.
    pub fn sequence_end(&mut self, seq: u64) -> u64 {
        self.sequence(seq.saturating_add(1))
    }

    /// What could not be attributed so far.
    pub fn counts(&self) -> FoldCounts {
        self.counts
    }

    /// A cycle starts, but too little is known about it to report it.
    pub fn cut(&mut self) -> Folded {
        self.shutdown = None;
        let mut folded = Folded::default();
        if let Some(cut) = self.close() {
            self.counts.cut_short += 1;
            folded.cycles.push(cut);
        }
        self.swept = false;
        folded
    }

    /// Handles `GC_START`.
    pub fn start(&mut self, comm: String, count: u64, state: GcState) -> Folded {
        let folded = self.cut();
        self.open = Some(GcCycle {
            comm,
            count,
            start: state,
            end: None,
            pauses: Vec::new(),
            trigger: None,
            request: None,
            span: None,
            lost: 0,
        });
        folded
    }

    /// Sets the stack that started the open cycle, and the span that was active then, if the cycle's snapshot was taken at that time; `false`:
    /// they belong to another cycle.
    pub fn trigger(&mut self, ts_ns: u64, stack: &Stack, span: Option<Span>) -> bool {
        let Some(cycle) = self.open.as_mut().filter(|cycle| cycle.start.ts_ns == ts_ns) else { return false };
        (cycle.trigger, cycle.span) = (Some(Stack::clone(stack)), span);
        true
    }

    /// Sets the request in which the open cycle was started.
    pub fn of_request(&mut self, request: Option<u64>) {
        if let Some(cycle) = self.open.as_mut() {
            cycle.request = request;
        }
    }

    /// Handles `GC_END_SWEEP`. The cycle is reported with its last sweeping pause, which ends after this event.
    pub fn end_sweep(&mut self, count: u64, state: GcState) {
        match self.open.as_mut() {
            Some(cycle) if cycle.count == count => {
                cycle.end = Some(state);
                self.swept = true;
            }
            _ => self.counts.end_without_start += 1,
        }
    }

    /// Handles a GC enter event with GC forbidden and no cycle running: the VM's shutdown, unless a `GC_START` follows.
    pub fn maybe_shutdown(&mut self, state: GcState) {
        self.shutdown = Some(state);
    }

    /// A pause has ended. `mode` is the GC mode at its start, `kind` is the kind of its site.
    pub fn pause(
        &mut self,
        event: &PauseEvent,
        mode: Mode,
        kind: Option<PauseKind>,
    ) -> (Pause, bool, Folded) {
        let pause = split(event, mode, kind);
        let belongs = event.start_ns != 0 || mode != Mode::None;
        let expected = event.count + u64::from(event.start_ns != 0);
        let mut folded = Folded::default();
        let Some(cycle) = self.open.as_mut().filter(|cycle| belongs && cycle.count == expected) else {
            self.counts.pauses_outside += 1;
            return (pause, false, folded);
        };
        let has_room = cycle.pauses.len() < MAX_PAUSES;
        if has_room {
            cycle.pauses.push(pause);
        } else {
            self.counts.pauses_outside += 1;
        }
        if self.swept && event.end_sweep_ns != 0 {
            folded.cycles.extend(self.close());
        }
        (pause, has_room, folded)
    }

    /// The process or tracing ended. Returns the open cycle as it is, and the state at shutdown if the VM shut down.
    pub fn finish(&mut self) -> (Option<GcCycle>, Option<GcState>) {
        (self.close(), self.shutdown.take())
    }

    fn close(&mut self) -> Option<GcCycle> {
        let mut cycle = self.open.take()?;
        cycle.lost = std::mem::take(&mut self.lost);
        self.swept = false;
        Some(cycle)
    }
}

/// Splits a pause into phases by the marks inside it and the mode at its start.
fn split(event: &PauseEvent, mode: Mode, kind: Option<PauseKind>) -> Pause {
    let (begin, end) = (event.begin_ns, event.header.ts_ns.max(event.begin_ns));
    let inside = |ts: u64| (ts != 0).then(|| ts.clamp(begin, end));
    let (start, marked, swept) =
        (inside(event.start_ns), inside(event.end_mark_ns), inside(event.end_sweep_ns));
    let mark_from = start.or((mode == Mode::Marking).then_some(begin));
    let mark_ns = mark_from.map_or(0, |from| marked.unwrap_or(end).saturating_sub(from));
    let sweep_from =
        marked.or((matches!(mode, Mode::Sweeping | Mode::Compacting) && start.is_none()).then_some(begin));
    let sweep_ns = sweep_from.map_or(0, |from| swept.unwrap_or(end).saturating_sub(from));
    let ns = end - begin;
    // A pause in which a cycle starts has kind `Start`; a nested pause may have any kind.
    let started = (start.is_some() && event.nested == 0).then_some(PauseKind::Start);
    let other_ns = ns.saturating_sub(mark_ns + sweep_ns);
    Pause { tid: event.header.tid, begin_ns: begin, ns, kind: kind.or(started), mark_ns, sweep_ns, other_ns }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ruby::stat::GcInfo;
    use gctrace_common::event::{Header, Kind, Point};

    fn state(ts_ns: u64) -> GcState {
        let info = GcInfo::decode(0x100, None, Mode::None, None);
        GcState { ts_ns, tid: 1, stat: vec![], heaps: vec![], info, memory: None }
    }

    fn pause(begin: u64, end: u64, marks: (u64, u64, u64), count: u64) -> PauseEvent {
        let header = Header {
            kind: Kind::Pause as u32,
            point: Point::GcExit as u32,
            tgid: 1,
            tid: 1,
            ts_ns: end,
            seq: 1,
            image: 0,
            execs: 0,
        };
        PauseEvent {
            header,
            begin_ns: begin,
            start_ns: marks.0,
            end_mark_ns: marks.1,
            end_sweep_ns: marks.2,
            count,
            enter_site: 0,
            flags: 0,
            nested: 0,
            request_ns: 0,
        }
    }

    /// A full GC in one pause: the cycle is reported once, with all phases.
    #[test]
    fn immediate() {
        let mut fold = CycleFold::default();
        assert!(fold.start("ruby".into(), 5, state(110)).cycles.is_empty());
        fold.end_sweep(5, state(190));
        let (_, inside, folded) = fold.pause(&pause(100, 200, (110, 150, 190), 4), Mode::None, None);
        assert!(inside);
        let cycle = &folded.cycles[0];
        assert_eq!((cycle.count, cycle.pause_ns()), (5, 100));
        let p = cycle.pauses[0];
        assert_eq!((p.mark_ns, p.sweep_ns, p.other_ns), (40, 40, 20));
        assert!(cycle.end.is_some());
    }

    /// Marking, then lazy sweep steps in later pauses, the last of which contains the end.
    #[test]
    fn lazy_sweep() {
        let mut fold = CycleFold::default();
        fold.start("ruby".into(), 5, state(110));
        assert!(fold.pause(&pause(100, 200, (110, 150, 0), 4), Mode::None, None).2.cycles.is_empty());
        assert!(fold.pause(&pause(300, 310, (0, 0, 0), 5), Mode::Sweeping, None).2.cycles.is_empty());
        fold.end_sweep(5, state(405));
        let folded = fold.pause(&pause(400, 410, (0, 0, 405), 5), Mode::Sweeping, None).2;
        assert_eq!(folded.cycles[0].pauses.len(), 3);
        assert_eq!(folded.cycles[0].pause_ns(), 120);
        assert_eq!(folded.cycles[0].pauses[2].sweep_ns, 5);
    }

    /// A cycle that was running when gctrace attached is counted, not reported.
    #[test]
    fn attached_in_the_middle() {
        let mut fold = CycleFold::default();
        let (_, inside, _) = fold.pause(&pause(100, 200, (0, 0, 0), 4), Mode::Sweeping, None);
        assert!(!inside);
        fold.end_sweep(4, state(300));
        assert_eq!(fold.counts(), FoldCounts { end_without_start: 1, pauses_outside: 1, cut_short: 0 });
        assert!(fold.finish().0.is_none());
    }

    /// Pauses above the maximum of a cycle are counted, and the cycle still ends.
    #[test]
    fn too_many_pauses() {
        let mut fold = CycleFold::default();
        fold.start("ruby".into(), 5, state(110));
        let sweep = |end_sweep_ns| pause(200, 201, (0, 0, end_sweep_ns), 5);
        assert!((0..MAX_PAUSES).all(|_| fold.pause(&sweep(0), Mode::Sweeping, None).1));
        fold.end_sweep(5, state(201));
        let (_, inside, folded) = fold.pause(&sweep(201), Mode::Sweeping, None);
        assert!(!inside);
        assert_eq!((folded.cycles[0].pauses.len(), fold.counts().pauses_outside), (MAX_PAUSES, 1));
    }

    /// A gap in the sequence is reported once, with the next cycle.
    #[test]
    fn lost_records() {
        let mut fold = CycleFold::default();
        assert_eq!(fold.sequence(1), 0);
        assert_eq!(fold.sequence(5), 3);
        fold.start("ruby".into(), 1, state(1));
        fold.start("ruby".into(), 2, state(2));
        let (last, _) = fold.finish();
        assert_eq!(last.unwrap().lost, 0);
        assert_eq!(fold.counts().cut_short, 1);
    }

    /// The state at shutdown survives the finalizers' pause, and a GC.start under GC.disable is not a shutdown.
    #[test]
    fn shutdown() {
        let mut fold = CycleFold::default();
        fold.maybe_shutdown(state(1));
        fold.start("ruby".into(), 1, state(2));
        assert!(fold.finish().1.is_none());
        fold.maybe_shutdown(state(3));
        fold.pause(&pause(3, 4, (0, 0, 0), 1), Mode::None, None);
        assert_eq!(fold.finish().1.unwrap().ts_ns, 3);
    }
}
