//! Long work for one process that leaves its CPU again and again.
//!
//! The kernel lets two threads that compute on one CPU take turns of one tick and more (4 ms at 250 Hz): while gctrace works, a thread of the
//! program that it looks at may wait as long, if no other CPU is free. A lower priority does not help: it counts within one control group only,
//! and a reader that got no CPU while the kernel has locked the mappings of the program for it would hold up what maps memory there. So gctrace
//! works in short bursts: who sleeps is in nobody's way, whatever its group.

use std::{
    io::{self, Write},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use crate::clock::monotonic_ns;

/// After so much work it sleeps.
const BURST: Duration = Duration::from_micros(150);
/// For so long, and for as long as the kernel combines timers (50 µs).
const REST: Duration = Duration::from_micros(20);
/// Where others have the CPU when it wakes up, it works for this part of the time that it waited for them. Short bursts there would be no
/// help to a program that waits for its turn anyway, and the work would take many times as long, or not end at all.
const PART_OF_WAIT: u32 = 8;
/// But not for longer than the kernel would leave it the CPU, a tick at 250 Hz.
const LONGEST: Duration = Duration::from_millis(4);
/// After so many bytes it is looked whether that is due.
const PIECE: usize = 4096;

/// The burst that is under way.
#[derive(Debug, Default)]
pub struct Bursts {
    /// When its work is to end. 0: before the first.
    until_ns: AtomicU64,
}

impl Bursts {
    /// Between two short pieces of work: sleeps if that is due.
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

/// How long to work after a rest that took so long.
fn burst_after(rest: Duration) -> Duration {
    (rest / PART_OF_WAIT).clamp(BURST, LONGEST)
}

/// Writes in bursts.
pub struct Restful<'a> {
    out: &'a mut dyn Write,
    bursts: &'a Bursts,
    /// Bytes since it was looked.
    written: usize,
}

impl<'a> Restful<'a> {
    /// Writes to `out`, with the same rests as what is read meanwhile.
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

    /// Short, unless others have the CPU: then a ninth of the time, up to a tick at once.
    #[test]
    fn lengths() {
        assert_eq!(burst_after(Duration::from_micros(70)), BURST);
        assert_eq!(burst_after(Duration::from_micros(1_200)), BURST);
        assert_eq!(burst_after(Duration::from_millis(4)), Duration::from_micros(500));
        assert_eq!(burst_after(Duration::from_secs(1)), LONGEST);
    }

    /// Work is cut into bursts, and what is written is written.
    #[test]
    fn bursts() {
        let bursts = Bursts::default();
        let begun = Instant::now();
        let mut rests = 0;
        while begun.elapsed() < Duration::from_millis(20) {
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
