//! Comparisons of times. They hold on a machine that gives a program the CPUs that it asks for.
//!
//! A hypervisor that takes a CPU away shifts every clock reading around that moment, by tens of milliseconds at a time. The kernel counts the
//! stolen time (`steal` in `/proc/stat`), but not from which task. A comparison of times that fails is therefore repeated with another run
//! of the program. A defect fails each time, and so does [`settled`]. A result that does not depend on the machine's load (a count of events, their
//! order, their names) is checked by `ensure!`, whose failure is never repeated. What follows from times is a comparison of times, too: which
//! method takes the largest share, how many samples there are in so many seconds.
//!
//! How often a comparison was repeated is part of the account of `cargo xtask test`: one that needs it often is too strict, or hides a defect.
//!
//! The guests and the build that `cargo xtask test --kernels` runs beside the tests disturb times likewise: they have idle priority, but the
//! kernel's work for them (interrupts, its own threads) does not. They are paused while a comparison is repeated.

use std::{
    fmt::{self, Display, Formatter},
    fs::File,
    time::Duration,
};

use anyhow::{Context as _, Result};

use crate::live::account;

/// Number of failed attempts at a comparison of times after which its test fails.
const ATTEMPTS: usize = 3;
const TICK_NS: u64 = 10_000_000;

/// Two times that do not agree.
#[derive(Debug)]
pub struct Disagreement(pub String);

impl Display for Disagreement {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Disagreement {}

/// Like `ensure!`, for a condition on times.
#[macro_export]
macro_rules! ensure_times {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err($crate::timing::Disagreement(format!($($message)+)).into());
        }
    };
}

/// Time that a hypervisor has taken from this machine's CPUs since boot, nanoseconds, with the resolution of ticks (proc(5)).
pub fn stolen_ns() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/stat")?;
    let ticks = text.lines().next().and_then(|line| line.split_whitespace().nth(8));
    Ok(ticks.and_then(|ticks| ticks.parse::<u64>().ok()).unwrap_or(0) * TICK_NS)
}

/// Until it is dropped, nothing else of the same `cargo xtask test` runs beside this test (xtask/src/test/background.rs).
struct Quiet {
    /// Unlocked when closed, even if the test is killed.
    _lock: File,
}

impl Quiet {
    fn begin() -> Result<Self> {
        let path = std::env::temp_dir().join("gctrace-live-tests.quiet");
        let lock = File::options().create(true).truncate(false).write(true).open(&path);
        let lock = lock.with_context(|| format!("cannot open {}", path.display()))?;
        lock.lock_shared().with_context(|| format!("cannot lock {}", path.display()))?;
        // The lock is polled every 50 ms.
        std::thread::sleep(Duration::from_millis(300));
        Ok(Self { _lock: lock })
    }
}

/// Repeats a measurement if its only error was a [`Disagreement`].
pub fn settled<T>(mut measure: impl FnMut() -> Result<T>) -> Result<T> {
    for attempt in 1.. {
        let _quiet = if attempt > 1 { Some(Quiet::begin()?) } else { None };
        let stolen = stolen_ns()?;
        let error = match measure() {
            Ok(value) => {
                if attempt > 1 {
                    account(&format!("repeated {}", attempt - 1));
                }
                return Ok(value);
            }
            Err(error) => error,
        };
        let of_times = error.chain().any(<dyn std::error::Error>::is::<Disagreement>);
        if !of_times || attempt == ATTEMPTS {
            return Err(error);
        }
        let stolen = stolen_ns()?.saturating_sub(stolen) / 1_000_000;
        println!("attempt {attempt}, {stolen} ms stolen by the hypervisor: {error:#}");
    }
    unreachable!("the last attempt returns")
}

#[cfg(test)]
mod tests {
    use anyhow::{Context as _, ensure};

    use super::*;

    fn once(fails: usize, run: &mut usize) -> Result<usize> {
        *run += 1;
        crate::ensure_times!(*run > fails, "too long in run {run}");
        Ok(*run)
    }

    #[test]
    fn only_times_are_measured_again() -> Result<()> {
        let mut run = 0;
        ensure!(settled(|| once(2, &mut run).context("with a context"))? == 3, "{run}");
        let mut run = 0;
        ensure!(settled(|| once(3, &mut run)).is_err() && run == 3, "{run}");
        let mut run = 0;
        let count = settled(|| -> Result<()> {
            run += 1;
            anyhow::bail!("a count")
        });
        ensure!(count.is_err() && run == 1, "{run}");
        Ok(())
    }
}
