//! Where a slow request was, by the samples of its thread: the lines of the application (or, without any, of Ruby code) with the most time on a
//! CPU and, with `--wall`, off it.

use std::{collections::BTreeMap, io::Write};

use super::{Pending, Recent, WIDTH};
use crate::{
    export::{place::started_by_within, text::duration},
    model::stack::{Stack, StackSample, ThreadState},
    words::{percent, plural},
};

/// Maximum number of lines shown per request and state.
const SHOWN: usize = 3;
/// Columns before a line of code.
const INDENT: usize = 14;

/// A sample of a thread that served a request.
pub(super) struct Sampled {
    request: u64,
    begin_ns: u64,
    on_cpu: bool,
    /// Time that it represents, nanoseconds.
    ns: u64,
    stack: Stack,
}

impl Sampled {
    /// The sample, if it belongs to a request that is known.
    pub(super) fn of(sample: &StackSample) -> Option<Self> {
        let request = sample.request.filter(|id| *id != 0)?;
        let on_cpu = sample.state == ThreadState::Running;
        let ns = if on_cpu { sample.cpu_ns } else { sample.wall_ns };
        Some(Self { request, begin_ns: sample.ts_ns, on_cpu, ns, stack: Stack::clone(&sample.stack) })
    }

    pub(super) fn begin_ns(&self) -> u64 {
        self.begin_ns
    }
}

/// Writes the lines of a request; none if nothing was sampled in it.
pub(super) fn write(
    out: &mut impl Write,
    samples: &Recent<Sampled>,
    Pending { pid, request, ns, .. }: &Pending,
) -> std::io::Result<()> {
    if samples.dropped_ns >= request.begin_ns {
        return writeln!(out, "  samples: not shown: there were too many to keep since it began");
    }
    for (on_cpu, what) in [(true, "on a CPU"), (false, "off the CPU")] {
        let of_it = |sample: &&Sampled| sample.request == request.id && sample.on_cpu == on_cpu;
        let mut places: BTreeMap<String, u64> = BTreeMap::new();
        let (mut count, mut sum_ns) = (0, 0);
        for sample in samples.since(*pid, request.begin_ns).filter(of_it) {
            let place = started_by_within(&sample.stack, WIDTH - INDENT);
            let place = place.unwrap_or_else(|| "(no Ruby frame)".to_owned());
            *places.entry(place).or_default() += sample.ns;
            count += 1;
            sum_ns += sample.ns;
        }
        if count == 0 {
            continue;
        }
        writeln!(out, "  {what}: {} of {}", plural(count, "sample"), duration(sum_ns))?;
        let mut places: Vec<(String, u64)> = places.into_iter().collect();
        places.sort_by_key(|(_, ns)| std::cmp::Reverse(*ns));
        for (place, place_ns) in places.iter().take(SHOWN) {
            let share = percent(*place_ns, *ns);
            writeln!(out, "    {} ({share}) in", duration(*place_ns))?;
            writeln!(out, "{:INDENT$}{place}", "")?;
        }
        if let Some(more) = places.len().checked_sub(SHOWN).filter(|more| *more > 0) {
            writeln!(out, "    and {}", plural(more as u64, "other line"))?;
        }
    }
    Ok(())
}
