//! Comparisons of times: they hold on a machine that gives a program the CPUs that it asks for.
//!
//! A hypervisor that takes a CPU away moves every clock that is read around it, by tens of milliseconds at a time. The kernel counts
//! what was taken (`steal` in `/proc/stat`), not from whom. A comparison of times that fails is therefore made again with another run
//! of the program; a defect fails each time, and so does [`settled`]. Whatever is counted, ordered or named is never asked twice.

use std::fmt::{self, Display, Formatter};

use anyhow::Result;

/// So often a comparison of times may fail before its test does.
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

/// Time that a hypervisor has taken from this machine's CPUs since it booted, nanoseconds, in ticks (proc(5)).
pub fn stolen_ns() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/stat")?;
    let ticks = text.lines().next().and_then(|line| line.split_whitespace().nth(8));
    Ok(ticks.and_then(|ticks| ticks.parse::<u64>().ok()).unwrap_or(0) * TICK_NS)
}

/// Makes a measurement again if all that it found was a [`Disagreement`].
pub fn settled<T>(mut measure: impl FnMut() -> Result<T>) -> Result<T> {
    for attempt in 1.. {
        let stolen = stolen_ns()?;
        let error = match measure() {
            Ok(value) => return Ok(value),
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
