//! The chunks of the last minutes, and the state before the first of them. Pure.
//!
//! A chunk has its own tables, so any chunk can be read without the ones before it. What a recording states once, at
//! its start (the existing processes, that tracing has begun), and what counts from the start of the run (accounts,
//! sums of the GVL), is remembered for the dropped part.

use std::{collections::VecDeque, sync::Arc};

use crate::model::Process;

/// Maximum number of refusals remembered from the dropped part.
const REFUSALS: usize = 64;
/// Approximate memory of a process in addition to its strings, bytes.
const PROCESS_BYTES: usize = 600;

/// The chunks between two accounts. They are dropped together, so that what remains starts right after an account.
#[derive(Debug, Default)]
struct Segment {
    /// Start, `CLOCK_MONOTONIC` nanoseconds.
    begin_ns: u64,
    chunks: Vec<Arc<[u8]>>,
    /// The last of them, with the account at its end; kept if the others had to be dropped, because what follows counts from there.
    last: Option<Arc<[u8]>>,
    entries: u64,
    /// Bytes of the chunks, and of the processes remembered that appeared in this segment.
    bytes: u64,
    /// Whether a part of it had to be dropped before it was complete.
    is_torn: bool,
}

/// A process, with the numbers of the segments in which it appeared and in which it ended.
#[derive(Debug)]
struct Life {
    process: Process,
    came: u64,
    went: Option<u64>,
}

/// A process or image that is not traced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) pid: Option<u32>,
    pub(super) path: Arc<str>,
    pub(super) reason: Arc<str>,
}

/// Numbers of dropped entries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Dropped {
    /// Dropped because they were too old.
    pub(super) expired: u64,
    /// Dropped because the size limit was exceeded.
    pub(super) displaced: u64,
}

/// What is kept, and what is needed to read it.
#[derive(Debug)]
pub(super) struct Kept {
    /// Start of the kept time, `CLOCK_MONOTONIC` nanoseconds.
    pub(super) from_ns: u64,
    /// Chunks, oldest first.
    pub(super) chunks: Vec<Arc<[u8]>>,
    /// The last chunk before these, which ends with an account; `None` if nothing was dropped.
    pub(super) before: Option<Arc<[u8]>>,
    /// Processes that existed at the start.
    pub(super) processes: Vec<Process>,
    /// Refusals before the start.
    pub(super) refusals: Vec<Refusal>,
    /// Whether tracing had begun before the start.
    pub(super) had_begun: bool,
    /// Whether older entries were dropped because of the size limit, not because of their age.
    pub(super) is_short: bool,
}

/// The chunks of the last minutes.
#[derive(Debug)]
pub(super) struct Ring {
    keep_ns: u64,
    keep_bytes: u64,
    /// Complete segments, oldest first.
    segments: VecDeque<Segment>,
    open: Segment,
    /// Number of the first segment; that of `open` if there are no others.
    first: u64,
    bytes: u64,
    entries: u64,
    before: Option<Arc<[u8]>>,
    lives: Vec<Life>,
    refusals: VecDeque<(u64, Refusal)>,
    began: Option<u64>,
    is_short: bool,
    dropped: Dropped,
}

fn bytes_of(process: &Process) -> u64 {
    let words = process.cmdline.iter().flatten().map(|word| word.len() + size_of::<String>());
    let variables = process
        .gc_env
        .iter()
        .flatten()
        .map(|(name, value)| name.len() + value.len() + 2 * size_of::<String>());
    (PROCESS_BYTES + words.sum::<usize>() + variables.sum::<usize>()) as u64
}

impl Ring {
    /// Keeps entries that are not older than `keep_ns`, and at most `keep_bytes` bytes.
    pub(super) fn new(keep_ns: u64, keep_bytes: u64, now_ns: u64) -> Self {
        Self {
            keep_ns,
            keep_bytes,
            segments: VecDeque::new(),
            open: Segment { begin_ns: now_ns, ..Segment::default() },
            first: 0,
            bytes: 0,
            entries: 0,
            before: None,
            lives: Vec::new(),
            refusals: VecDeque::new(),
            began: None,
            is_short: false,
            dropped: Dropped::default(),
        }
    }

    /// Number of the segment being filled.
    pub(super) fn now(&self) -> u64 {
        self.first + self.segments.len() as u64
    }

    /// A process is traced from here on.
    pub(super) fn came(&mut self, process: &Process) {
        self.went(process.pid);
        let bytes = bytes_of(process);
        self.open.bytes += bytes;
        self.bytes += bytes;
        self.lives.push(Life { process: process.clone(), came: self.now(), went: None });
    }

    /// A process is not traced any more.
    pub(super) fn went(&mut self, pid: u32) {
        let now = self.now();
        let open = |life: &&mut Life| life.process.pid == pid && life.went.is_none();
        if let Some(life) = self.lives.iter_mut().rev().find(open) {
            life.went = Some(now);
        }
    }

    /// Something is not traced.
    pub(super) fn refused(&mut self, refusal: Refusal) {
        if self.refusals.len() >= REFUSALS {
            self.refusals.pop_front();
        }
        self.refusals.push_back((self.now(), refusal));
    }

    /// Tracing has begun.
    pub(super) fn began(&mut self) {
        self.began.get_or_insert(self.now());
    }

    /// Adds a chunk.
    pub(super) fn push(&mut self, chunk: Arc<[u8]>, entries: u64) {
        self.bytes += chunk.len() as u64;
        self.open.bytes += chunk.len() as u64;
        self.open.entries += entries;
        self.entries += entries;
        self.open.last = Some(Arc::clone(&chunk));
        self.open.chunks.push(chunk);
        while self.bytes > self.keep_bytes && self.drop_first() {
            self.is_short = true;
        }
        if self.bytes > self.keep_bytes {
            self.tear();
        }
    }

    /// Handles an open segment that exceeds the limit by itself.
    fn tear(&mut self) {
        self.open.is_torn = true;
        self.is_short = true;
        self.entries -= self.open.entries;
        self.dropped.displaced += std::mem::take(&mut self.open.entries);
        self.bytes -= std::mem::take(&mut self.open.bytes);
        self.open.chunks.clear();
    }

    /// Ends the segment at an account, and drops segments that are too old.
    pub(super) fn account(&mut self, now_ns: u64) {
        let next = Segment { begin_ns: now_ns, ..Segment::default() };
        let whole = std::mem::replace(&mut self.open, next);
        let is_torn = whole.is_torn;
        self.segments.push_back(whole);
        if is_torn {
            // The rest of this segment does not start right after an account.
            while self.drop_first() {}
            return;
        }
        let oldest = now_ns.saturating_sub(self.keep_ns);
        while self.segments.get(1).unwrap_or(&self.open).begin_ns <= oldest && !self.segments.is_empty() {
            let displaced = self.dropped.displaced;
            if self.drop_first() {
                self.dropped.expired += self.dropped.displaced - displaced;
                self.dropped.displaced = displaced;
                self.is_short = false;
            }
        }
    }

    /// Drops the first complete segment because of the size limit. Returns `false` if there is none.
    fn drop_first(&mut self) -> bool {
        let Some(segment) = self.segments.pop_front() else { return false };
        self.first += 1;
        self.bytes -= segment.bytes;
        self.entries -= segment.entries;
        self.dropped.displaced += segment.entries;
        self.before = segment.last;
        let first = self.first;
        self.lives.retain(|life| life.went.is_none_or(|went| went >= first));
        true
    }

    /// Start of the kept time, and time of the last account, `CLOCK_MONOTONIC` nanoseconds.
    pub(super) fn times(&self) -> (u64, u64) {
        let until_ns = self.open.begin_ns;
        (self.segments.front().map_or(until_ns, |first| first.begin_ns), until_ns)
    }

    /// Whether older entries were dropped because of the size limit, not because of their age.
    pub(super) fn is_short(&self) -> bool {
        self.is_short
    }

    /// Numbers of the entries dropped so far.
    pub(super) fn dropped(&self) -> Dropped {
        self.dropped
    }

    /// Number of kept entries.
    pub(super) fn entries(&self) -> u64 {
        self.entries
    }

    /// Bytes kept, without processes whose start has been dropped.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether any process was ever traced.
    pub(super) fn has_processes(&self) -> bool {
        self.first > 0 || !self.lives.is_empty()
    }

    /// Everything that is kept.
    pub(super) fn kept(&self) -> Kept {
        let all = || self.segments.iter().chain([&self.open]);
        let was_before = |number: u64| number < self.first;
        let there = |life: &&Life| was_before(life.came) && !life.went.is_some_and(was_before);
        let refusals = self.refusals.iter().filter(|(number, _)| was_before(*number));
        Kept {
            from_ns: all().next().map_or(0, |segment| segment.begin_ns),
            chunks: all().flat_map(|segment| segment.chunks.iter().cloned()).collect(),
            before: self.before.clone(),
            processes: self.lives.iter().filter(there).map(|life| life.process.clone()).collect(),
            refusals: refusals.map(|(_, refusal)| refusal.clone()).collect(),
            had_begun: self.began.is_some_and(was_before),
            is_short: self.is_short,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace_file::tests::process_with;
    use proptest::prelude::*;

    const S: u64 = 1_000_000_000;

    fn chunk(second: u64, bytes: usize) -> Arc<[u8]> {
        let mut chunk = vec![0; bytes.max(8)];
        chunk[..8].copy_from_slice(&second.to_le_bytes());
        chunk.into()
    }

    fn second(chunk: &[u8]) -> u64 {
        u64::from_le_bytes(chunk[..8].try_into().unwrap())
    }

    fn pids(kept: &Kept) -> Vec<u32> {
        kept.processes.iter().map(|process| process.pid).collect()
    }

    /// Existing processes are carried over, and facts that are stated once remain known.
    #[test]
    fn carried() {
        let mut ring = Ring::new(2 * S, 1 << 20, 0);
        ring.began();
        let refusal = Refusal { pid: Some(9), path: "/ruby".into(), reason: "why".into() };
        ring.refused(refusal.clone());
        ring.came(&process_with(1));
        ring.came(&process_with(2));
        ring.push(chunk(0, 10), 1);
        let kept = ring.kept();
        assert!(
            !kept.had_begun && kept.before.is_none() && pids(&kept).is_empty() && kept.refusals.is_empty()
        );
        ring.account(S);
        ring.went(2);
        ring.came(&process_with(3));
        ring.push(chunk(1, 10), 1);
        ring.account(2 * S);
        // The first second is still needed; after that it is dropped.
        assert_eq!((ring.kept().from_ns, ring.dropped()), (0, Dropped::default()));
        ring.push(chunk(2, 10), 1);
        ring.account(3 * S);
        let kept = ring.kept();
        assert_eq!((kept.from_ns, pids(&kept)), (S, vec![1, 2]), "2 went in the second that is kept");
        assert!(kept.had_begun && !kept.is_short);
        assert_eq!((second(kept.before.as_deref().unwrap()), kept.refusals), (0, vec![refusal]));
        ring.account(4 * S);
        assert_eq!((pids(&ring.kept()), ring.lives.len()), (vec![1, 3], 2));
        assert_eq!(ring.dropped(), Dropped { expired: 2, displaced: 0 });
        // Another program with the same pid.
        ring.came(&process_with(1));
        for at in 5..9 {
            ring.account(at * S);
        }
        assert_eq!((pids(&ring.kept()), ring.lives.len()), (vec![3, 1], 2));
    }

    /// If not even one second fits, it is dropped, and nothing is kept that does not start right after an account.
    #[test]
    fn too_much() {
        let mut ring = Ring::new(60 * S, 1000, 0);
        ring.push(chunk(0, 400), 4);
        ring.account(S);
        ring.push(chunk(1, 700), 7);
        assert_eq!((ring.entries(), ring.bytes(), ring.dropped().displaced), (7, 700, 4));
        ring.push(chunk(1, 400), 3);
        assert_eq!((ring.entries(), ring.bytes(), ring.dropped().displaced), (0, 0, 14));
        ring.push(chunk(1, 200), 2);
        ring.account(2 * S);
        assert_eq!((ring.entries(), ring.dropped().displaced), (0, 16));
        ring.push(chunk(2, 500), 5);
        let kept = ring.kept();
        assert!(kept.is_short && kept.from_ns == 2 * S);
        assert_eq!((kept.chunks.len(), second(kept.before.as_deref().unwrap())), (1, 1));
        // The chunk with the account is itself too large: what follows counts from that account.
        ring.push(chunk(3, 1200), 2);
        ring.account(3 * S);
        ring.push(chunk(4, 500), 5);
        let kept = ring.kept();
        assert_eq!((kept.chunks.len(), second(kept.before.as_deref().unwrap())), (1, 3));
    }

    /// The number of remembered refusals is bounded.
    #[test]
    fn refusals() {
        let mut ring = Ring::new(S, 1 << 20, 0);
        for pid in 0..10_000 {
            ring.refused(Refusal { pid: Some(pid), path: "/ruby".into(), reason: "why".into() });
        }
        assert_eq!(ring.refusals.len(), REFUSALS);
    }

    proptest! {
        /// What is kept is a tail of whole seconds that covers the time, unless it would be too large; every entry is accounted for.
        #[test]
        fn bounds(
            seconds in proptest::collection::vec(proptest::collection::vec(8_usize..300, 0..4), 1..60),
            keep in 1_u64..20,
            most in 500_u64..4000,
        ) {
            let mut ring = Ring::new(keep * S, most, 0);
            let mut pushed = 0;
            for (at, chunks) in seconds.iter().enumerate() {
                let at = at as u64;
                for &bytes in chunks {
                    ring.push(chunk(at, bytes), 1);
                    pushed += 1;
                    prop_assert!(ring.bytes() <= most);
                }
                ring.account((at + 1) * S);
                let kept = ring.kept();
                let Dropped { expired, displaced } = ring.dropped();
                prop_assert_eq!(pushed, ring.entries() + expired + displaced);
                prop_assert_eq!(kept.chunks.len() as u64, ring.entries());
                prop_assert_eq!(kept.chunks.iter().map(|chunk| chunk.len() as u64).sum::<u64>(), ring.bytes());
                let from = kept.from_ns / S;
                let expected: Vec<u64> = (from..=at).flat_map(|at| vec![at; seconds[at as usize].len()]).collect();
                prop_assert_eq!(kept.chunks.iter().map(|chunk| second(chunk)).collect::<Vec<_>>(), expected);
                prop_assert!(kept.is_short || from <= (at + 1).saturating_sub(keep));
                prop_assert!(from + keep >= at, "not much more is kept");
            }
        }
    }
}
