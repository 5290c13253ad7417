//! Long work on one process that yields the CPU repeatedly.
//!
//! The kernel alternates two threads that compete for a CPU in slices of one tick and more (4 ms at 250 Hz): while gctrace works, a thread of the
//! inspected program may wait that long if no other CPU is free. A lower priority does not help: it only applies within one control group,
//! and a reader that gets no CPU while it holds the kernel's lock on the program's mappings would block threads that map memory there. So gctrace
//! works in short bursts: a sleeping thread delays nobody, whatever its group.

use std::{
    io::{self, Write},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use crate::clock::monotonic_ns;

/// Duration of a burst of work before it sleeps.
const BURST: Duration = Duration::from_micros(150);
/// Duration of the sleep, to which the kernel adds its timer slack (50 µs).
const REST: Duration = Duration::from_micros(20);
/// If other threads have the CPU when it wakes up, it works for this fraction of the time that it waited for them. Short bursts would not
/// help a program that waits for its turn anyway, and the work would take many times as long, or never end.
const PART_OF_WAIT: u32 = 8;
/// Maximum length of a burst: what the kernel would leave it the CPU for, a tick at 250 Hz.
const LONGEST: Duration = Duration::from_millis(4);
/// Number of bytes after which it checks whether a pause is due.
const PIECE: usize = 4096;

/// The current burst.
#[derive(Debug, Default)]
pub struct Bursts {
    /// When the current burst ends. 0: none has started yet.
    until_ns: AtomicU64,
}

impl Bursts {
    /// Called between short pieces of work: sleeps if a pause is due.
    pub fn pause(&self) {
        let now = monotonic_ns();
        if now < self.until_ns.load(Relaxed) {
            return;
        }
        std::thread::sleep(REST);
        let awake = monotonic_ns();
        let next = burst_after(Duration::from_nanos(awake.saturating_sub(now)));
        self.until_ns.store(awake + next.as_nanos() as u64, Relaxed);
    }
}

/// Length of the burst after a rest of this duration.
fn burst_after(rest: Duration) -> Duration {
    (rest / PART_OF_WAIT).clamp(BURST, LONGEST)
}

/// Writes in bursts.
pub struct Restful<'a> {
    out: &'a mut dyn Write,
    bursts: &'a Bursts,
    /// Bytes written since the last check.
    written: usize,
}

impl<'a> Restful<'a> {
    /// Writes to `out`, sharing the bursts of concurrent reads.
    pub fn new(out: &'a mut dyn Write, bursts: &'a Bursts) -> Self {
        Self { out, bursts, written: 0 }
    }
}

impl Write for Restful<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.written += written;
        if self.written >= PIECE {
            self.written = 0;
            self.bursts.pause();
        }
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    /// Bursts are short, unless other threads have the CPU: then a ninth of the time, up to one tick at once.
    #[test]
    fn lengths() {
        assert_eq!(burst_after(Duration::from_micros(70)), BURST);
        assert_eq!(burst_after(Duration::from_micros(1_200)), BURST);
        assert_eq!(burst_after(Duration::from_millis(4)), Duration::from_micros(500));
        assert_eq!(burst_after(Duration::from_secs(1)), LONGEST);
    }

    /// Work is divided into bursts, and all output is written.
    #[test]
    fn bursts() {
        let bursts = Bursts::default();
        let begun = Instant::now();
        let mut rests = 0;
        // Whatever time a busy machine takes for them.
        while begun.elapsed() < Duration::from_millis(20)
            || (rests <= 2 && begun.elapsed() < Duration::from_mins(1))
        {
            let before = bursts.until_ns.load(Relaxed);
            bursts.pause();
            rests += u32::from(bursts.until_ns.load(Relaxed) != before);
        }
        assert!(rests > 2, "{rests} rests");
        let mut out = Vec::new();
        let mut restful = Restful::new(&mut out, &bursts);
        for _ in 0..PIECE {
            restful.write_all(b"abc").unwrap();
        }
        restful.flush().unwrap();
        assert!(restful.written < PIECE);
        assert_eq!(out, b"abc".repeat(PIECE));
    }
}
