//! Converts monotonic time to epoch time, with one offset for the whole run, so that all times of a run share one base.

use rustix::time::{ClockId, clock_gettime};

/// Converts `CLOCK_MONOTONIC` nanoseconds to epoch seconds, and to `CLOCK_BOOTTIME`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WallClock {
    /// Realtime minus monotonic, nanoseconds.
    offset_ns: i128,
    /// Boot time minus monotonic, nanoseconds: the time for which the host had been suspended when this was measured.
    suspended_ns: i64,
}

impl WallClock {
    /// Measures the offset now: of several tries, the one with the shortest window around the realtime read.
    pub fn measure() -> Self {
        let suspended_ns = (nanos(ClockId::Boottime) - nanos(ClockId::Monotonic)) as i64;
        let mut best: Option<(i128, i128)> = None;
        for _ in 0..16 {
            let before = nanos(ClockId::Monotonic);
            let real = nanos(ClockId::Realtime);
            let after = nanos(ClockId::Monotonic);
            let window = after - before;
            if best.is_none_or(|(w, _)| window < w) {
                best = Some((window, real - (before + window / 2)));
            }
        }
        Self { offset_ns: best.map_or(0, |(_, offset)| offset), suspended_ns }
    }

    /// The clock of another run: realtime minus monotonic, and boot time minus monotonic, nanoseconds.
    pub fn with_offsets(offset_ns: i64, suspended_ns: i64) -> Self {
        Self { offset_ns: offset_ns.into(), suspended_ns }
    }

    /// Realtime minus monotonic, and boot time minus monotonic, nanoseconds.
    pub fn offsets(self) -> (i64, i64) {
        (self.offset_ns as i64, self.suspended_ns)
    }

    /// `CLOCK_BOOTTIME` nanoseconds of a monotonic time, if the host has not been suspended since the clock was measured.
    pub fn boottime_nanos(self, monotonic_ns: u64) -> u64 {
        monotonic_ns.saturating_add_signed(self.suspended_ns)
    }

    /// Epoch seconds of a monotonic time.
    pub fn epoch_seconds(self, monotonic_ns: u64) -> f64 {
        let ns = i128::from(monotonic_ns) + self.offset_ns;
        // Split before converting: 2^53 ns is only 104 days.
        (ns.div_euclid(1_000_000_000)) as f64 + (ns.rem_euclid(1_000_000_000)) as f64 / 1e9
    }

    /// Epoch nanoseconds of a monotonic time.
    pub fn epoch_nanos(self, monotonic_ns: u64) -> i64 {
        (i128::from(monotonic_ns) + self.offset_ns) as i64
    }
}

/// `CLOCK_BOOTTIME` now, nanoseconds.
pub fn boottime_ns() -> u64 {
    nanos(ClockId::Boottime) as u64
}

/// `CLOCK_MONOTONIC` now, nanoseconds.
pub fn monotonic_ns() -> u64 {
    nanos(ClockId::Monotonic) as u64
}

fn nanos(clock: ClockId) -> i128 {
    let t = clock_gettime(clock);
    i128::from(t.tv_sec) * 1_000_000_000 + i128::from(t.tv_nsec)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The converted time is the system's own, within a millisecond.
    #[test]
    fn agrees_with_the_system() {
        let clock = WallClock::measure();
        let ours = clock.epoch_seconds(monotonic_ns());
        let system =
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64();
        assert!((ours - system).abs() < 0.001, "{ours} {system}");
    }
}
