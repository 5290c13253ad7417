//! Converts monotonic time to epoch time. Outputs whose times belong together, such as lines and recordings, have one offset for the whole run;
//! others measure it again where something new begins, because the host's clock may have been set since.

use rustix::time::{ClockId, clock_gettime};

/// Converts `CLOCK_MONOTONIC` nanoseconds to epoch seconds, and to `CLOCK_BOOTTIME`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WallClock {
    /// Realtime minus monotonic, nanoseconds.
    offset_ns: i128,
    /// Boot time minus monotonic, nanoseconds: the time for which the host had been suspended when this was measured.
    suspended_ns: i64,
    /// Whether it is this host's clock, and not that of another run.
    own: bool,
}

impl WallClock {
    /// Measures the offsets now.
    pub fn measure() -> Self {
        Self::of((0..16).map(|_| Readings {
            before: nanos(ClockId::Monotonic),
            real: nanos(ClockId::Realtime),
            boot: nanos(ClockId::Boottime),
            after: nanos(ClockId::Monotonic),
        }))
    }

    /// The offsets by the readings with the shortest window: a CPU that is taken away between two of them shifts those of its window only.
    fn of(readings: impl Iterator<Item = Readings>) -> Self {
        let offsets =
            readings.min_by_key(|reading| reading.after - reading.before).map_or((0, 0), |reading| {
                let middle = reading.before + (reading.after - reading.before) / 2;
                (reading.real - middle, reading.boot - middle)
            });
        Self { offset_ns: offsets.0, suspended_ns: offsets.1 as i64, own: true }
    }

    /// The clock of another run: realtime minus monotonic, and boot time minus monotonic, nanoseconds.
    pub fn with_offsets(offset_ns: i64, suspended_ns: i64) -> Self {
        Self { offset_ns: offset_ns.into(), suspended_ns, own: false }
    }

    /// The clock as it is now. That of another run stays as it was. Measurements of a clock that was not set differ by the time that they
    /// take: then it is the same clock, so that all outputs of a run have the same times.
    #[must_use]
    pub fn again(self) -> Self {
        /// Smaller differences are of the measurement, or not worth one, nanoseconds. `CLOCK_MONOTONIC` is adjusted with `CLOCK_REALTIME`
        /// (kernel/time/timekeeping.c), so only setting the clock, a leap second and suspending the host change the offsets.
        const SAME_NS: i128 = 1_000_000;
        if !self.own {
            return self;
        }
        let now = Self::measure();
        let differs = |now: i128, before: i128| (now - before).abs() >= SAME_NS;
        let changed = differs(now.offset_ns, self.offset_ns)
            || differs(now.suspended_ns.into(), self.suspended_ns.into());
        if changed { now } else { self }
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
        self.seconds(monotonic_ns.into())
    }

    /// Epoch seconds of a time of `CLOCK_BOOTTIME`, given with boot time minus monotonic at that time. A time before a suspension can be
    /// before the zero of the monotonic clock.
    pub fn epoch_of_boottime(self, boottime_ns: u64, suspended_ns: u64) -> f64 {
        self.seconds(i128::from(boottime_ns) - i128::from(suspended_ns))
    }

    fn seconds(self, monotonic_ns: i128) -> f64 {
        let ns = monotonic_ns + self.offset_ns;
        // Split before converting: 2^53 ns is only 104 days.
        (ns.div_euclid(1_000_000_000)) as f64 + (ns.rem_euclid(1_000_000_000)) as f64 / 1e9
    }

    /// Epoch nanoseconds of a monotonic time.
    pub fn epoch_nanos(self, monotonic_ns: u64) -> i64 {
        (i128::from(monotonic_ns) + self.offset_ns) as i64
    }
}

/// Readings of the clocks, one after the other, nanoseconds.
#[derive(Clone, Copy, Debug)]
struct Readings {
    /// `CLOCK_MONOTONIC`.
    before: i128,
    real: i128,
    boot: i128,
    /// `CLOCK_MONOTONIC`.
    after: i128,
}

/// Notices that the host's clock was set during a run, or that the host was suspended.
#[derive(Debug)]
pub struct ClockWatch {
    /// The clock of which the user knows.
    known: WallClock,
    /// When it was last compared, `CLOCK_MONOTONIC` nanoseconds.
    looked_ns: u64,
}

impl ClockWatch {
    /// How often it is compared, nanoseconds.
    const EVERY_NS: u64 = 5_000_000_000;
    /// Smaller changes are not told, nanoseconds.
    const LEAST_NS: i128 = 1_000_000_000;

    /// Compares with the clock at the start of the run.
    pub fn new(start: WallClock) -> Self {
        Self { known: start, looked_ns: 0 }
    }

    /// What the user must know about a change since the last one that was told.
    pub fn look(&mut self) -> Option<String> {
        let now_ns = monotonic_ns();
        if now_ns.saturating_sub(self.looked_ns) < Self::EVERY_NS {
            return None;
        }
        self.looked_ns = now_ns;
        self.compare(WallClock::measure())
    }

    fn compare(&mut self, now: WallClock) -> Option<String> {
        let moved_ns = now.offset_ns - self.known.offset_ns;
        if moved_ns.abs() <= Self::LEAST_NS {
            return None;
        }
        // The monotonic clock stands still while the host is suspended.
        let suspended_ns = i128::from(now.suspended_ns - self.known.suspended_ns);
        self.known = now;
        let seconds = |ns: i128| ns as f64 / 1e9;
        let set_ns = moved_ns - suspended_ns;
        let mut what = Vec::new();
        if suspended_ns > Self::LEAST_NS / 2 {
            what.push(format!("the host was suspended for {:.1} s", seconds(suspended_ns)));
        }
        if set_ns.abs() > Self::LEAST_NS / 2 {
            what.push(format!("the clock was set by {:+.1} s", seconds(set_ns)));
        }
        let what = what.join(", and ");
        Some(format!("{what}; times of JSON lines and recordings remain on the clock of the start"))
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

    /// A long pause anywhere between the readings does not matter, if there are others without one.
    #[test]
    fn the_shortest_window_counts() {
        const PAUSE: i128 = 20_000_000;
        let readings = |pauses: [i128; 3]| {
            let before = 1_000_000_000;
            let (real, boot) = (before + 30 + pauses[0], before + 60 + pauses[0] + pauses[1]);
            Readings { before, real: real + 7_000_000, boot: boot + 5_000_000, after: boot + 30 + pauses[2] }
        };
        for at in 0..3 {
            let mut pauses = [0; 3];
            pauses[at] = PAUSE;
            for tries in [[pauses, [0; 3]], [[0; 3], pauses]] {
                let clock = WallClock::of(tries.into_iter().map(readings));
                assert_eq!((clock.offset_ns, clock.suspended_ns, clock.own), (6_999_985, 5_000_015, true));
            }
        }
        // What each measures is wrong by at most half of its window.
        let clock = WallClock::of([[PAUSE, 0, 0]].into_iter().map(readings));
        assert_eq!(clock.offset_ns, 6_999_985 + PAUSE / 2);
    }

    /// A change is told once, whatever made it; smaller ones are not.
    #[test]
    fn changes() {
        const SECOND: i64 = 1_000_000_000;
        let at = |offset: i64, suspended: i64| WallClock::with_offsets(offset * SECOND, suspended * SECOND);
        let mut watch = ClockWatch::new(at(1000, 5));
        let mut told = |offset, suspended| {
            let line = watch.compare(at(offset, suspended))?;
            let (what, rest) = line.split_once("; ").unwrap();
            assert_eq!(rest, "times of JSON lines and recordings remain on the clock of the start");
            Some(what.to_owned())
        };
        assert_eq!((told(1000, 5), told(1001, 5), told(999, 5)), (None, None, None));
        assert_eq!(told(4600, 5).as_deref(), Some("the clock was set by +3600.0 s"));
        assert_eq!(told(4600, 5), None);
        assert_eq!(told(4598, 5).as_deref(), Some("the clock was set by -2.0 s"));
        assert_eq!(told(4698, 105).as_deref(), Some("the host was suspended for 100.0 s"));
        let both = "the host was suspended for 10.0 s, and the clock was set by +5.0 s";
        assert_eq!(told(4713, 115).as_deref(), Some(both));
        assert_eq!(ClockWatch::new(WallClock::measure()).look(), None);
    }

    /// The clock of another run is not this host's.
    #[test]
    fn again() {
        let other = WallClock::with_offsets(7, 0);
        assert_eq!(other.again(), other);
        assert!(WallClock::measure().again().offset_ns > 1_000_000_000_000_000_000);
    }

    /// Measurements differ, but the clock is the same until it is set or the host is suspended.
    #[test]
    fn the_same_again() {
        let start = WallClock::measure();
        let measured = WallClock { offset_ns: start.offset_ns + 300_000, ..start };
        assert_eq!((start.again(), measured.again()), (start, measured));
        for moved_ns in [-2_000_000, 2_000_000] {
            let set = WallClock { offset_ns: start.offset_ns + moved_ns, ..start };
            let again = set.again();
            assert!((again.offset_ns - start.offset_ns).abs() < 1_000_000, "{again:?} {start:?}");
            let suspended = WallClock { suspended_ns: start.suspended_ns + moved_ns as i64, ..start };
            let again = suspended.again();
            assert!((again.suspended_ns - start.suspended_ns).abs() < 1_000_000, "{again:?} {start:?}");
        }
    }
}
