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
/// After so many bytes it is looked whether that is due.
const PIECE: usize = 4096;

/// When the work was begun or resumed.
#[derive(Debug, Default)]
pub struct Bursts(AtomicU64);

impl Bursts {
    /// Between two short pieces of work: sleeps if that is due.
    pub fn pause(&self) {
        if is_due(self.0.load(Relaxed), monotonic_ns()) {
            std::thread::sleep(REST);
            self.0.store(monotonic_ns(), Relaxed);
        }
    }
}

fn is_due(since_ns: u64, now_ns: u64) -> bool {
    u128::from(now_ns.saturating_sub(since_ns)) >= BURST.as_nanos()
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

    #[test]
    fn due() {
        assert!(is_due(0, 150_000) && is_due(1_000, 151_000));
        assert!(!is_due(1_000, 150_999) && !is_due(1_000, 0));
    }

    /// Work is cut into bursts, and what is written is written.
    #[test]
    fn bursts() {
        let bursts = Bursts::default();
        let begun = Instant::now();
        let mut rests = 0;
        while begun.elapsed() < Duration::from_millis(20) {
            let before = bursts.0.load(Relaxed);
            bursts.pause();
            rests += u32::from(bursts.0.load(Relaxed) != before);
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
