//! The window: attached, watched and ended.

use std::{
    num::NonZeroU32,
    os::fd::AsRawFd as _,
    path::PathBuf,
    time::{Duration, Instant},
};

use gctrace_common::malloc::MallocTarget;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{
    failure::MallocFailure,
    report::{Ended, Report, Who},
    sampling::Sampling,
};
use crate::{
    bpf::{MallocCost, MallocProbes, ProbeStacks, Scope},
    cli::MallocSettings,
    console::{self, say},
    elf::ElfImage,
    export,
    heap::Target,
    host::{proc::has_shadow_stack, proc_root},
    preflight,
    ruby::malloc::malloc_sites,
    signals::Signals,
    words::plural,
};

/// How often the cost is looked at.
const TICK: Duration = Duration::from_millis(50);
/// What a hit costs the process, nanoseconds: the trap, and the program with its look-ups (docs/malloc.md).
const HIT_NS: u64 = 1_500;
/// What a stack costs it besides, nanoseconds.
const STACK_NS: u64 = 25_000;
/// The cost of a shorter time is not held against the budget: start of a burst, or all there is.
const SHORTEST: Duration = Duration::from_secs(1);

/// Counts the calls of the process until the time, the process or the budget ends.
pub(super) fn watch(settings: &MallocSettings) -> Result<Report, MallocFailure> {
    if settings.sample == 0 && !settings.files.is_empty() {
        return Err(MallocFailure::Usage("profiles are made of stacks: --sample 0 takes none"));
    }
    preflight::check()?;
    for (path, _) in &settings.files {
        export::check_path(path)?;
    }
    let target = Target::find(settings.pid, settings.cache_dir.as_deref())?;
    let pid = target.pid;
    if has_shadow_stack(pid) {
        return Err(MallocFailure::ShadowStack(pid));
    }
    let unreadable = |reason: String| MallocFailure::File { pid, reason };
    let (file, shown) = target.file().map_err(unreadable)?;
    let image = ElfImage::read(&file).map_err(|error| unreadable(error.to_string()))?;
    let sites = malloc_sites(&image).map_err(|source| MallocFailure::Calls { pid, source })?;
    drop(image);
    let state = |target: &Target| target.state().map_err(|error| target.failure(error));
    let (objspace, before) = state(&target)?;
    let gc_count = |data: &[u8]| target.plan.layout.count.read(data);

    let options = ProbeStacks { stacks: settings.sample != 0, native: proc_root::shares_pids() };
    console::starting(&format!("loading {}", plural(MallocProbes::programs(options) as u64, "BPF program")));
    let probes = MallocProbes::load(options);
    console::end_progress();
    let mut probes = probes?;
    let config = &target.plan.config;
    let counted = MallocTarget {
        gc_count: objspace.wrapping_add(u64::from(config.count)),
        flags: objspace.wrapping_add(u64::from(config.flags)),
        period: settings.sample,
        tgid: pid,
        mode_mask: config.mode_mask,
        mode_shift: config.stack.mode_shift,
        reserved: 0,
    };
    if options.stacks {
        say_what_stacks_lack(&target, options);
    }
    let mut sampling = Sampling::start(&target, &shown, &mut probes, settings.sample)?;
    // The kernel takes pids of gctrace's own namespace.
    let scope = NonZeroU32::new(pid).filter(|_| proc_root::shares_pids()).map_or(Scope::All, Scope::One);
    let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    probes.attach(counted, &sites, &path, scope)?;
    let signals = Signals::install()
        .map_err(|source| MallocFailure::System { what: "installing signal handlers", source })?;
    signals.tracing();
    let begin = Instant::now();
    probes.open()?;
    say(&format!(
        "gctrace: ready: counting calls of malloc, calloc, realloc and free of pid {pid} ({}) for {:.1} s",
        plural(sites.len() as u64, "probe"),
        settings.duration.as_secs_f64()
    ));
    let ended = wait(&probes, &target, settings, (&signals, begin), sampling.as_mut())?;
    let lasted = begin.elapsed();
    probes.close()?;
    let after = target.state();
    let read = probes.finish()?;
    let after = match after {
        Ok((now, _)) if now != objspace => return Err(MallocFailure::Replaced(pid)),
        Ok((_, data)) => gc_count(&data),
        Err(_) => None,
    };
    let who = Who { pid, command: target.command.clone(), ruby: target.ruby() };
    let mut report = Report::of(who, &read, lasted, ended, [gc_count(&before), after]);
    report.sampled = sampling.map(|sampling| sampling.finish(&read.live));
    Ok(report)
}

/// Says which frames stacks will not have.
fn say_what_stacks_lack(target: &Target, options: ProbeStacks) {
    if let Err(why) = &target.plan.frames {
        say(&format!("gctrace: stacks have no Ruby frames: {why}"));
    }
    if !options.native {
        say(
            "gctrace: stacks have no native frames: in its own pid namespace gctrace cannot see which code processes load; use \
             --pid=host (hostPID: true) for them",
        );
    }
}

fn wait(
    probes: &MallocProbes,
    target: &Target,
    settings: &MallocSettings,
    (signals, begin): (&Signals, Instant),
    mut sampling: Option<&mut Sampling>,
) -> Result<Ended, MallocFailure> {
    loop {
        let lasted = begin.elapsed();
        if let Some(sampling) = &mut sampling {
            sampling.take(probes)?;
        }
        let left = settings.duration.saturating_sub(lasted);
        if left.is_zero() {
            return Ok(Ended::Time);
        }
        if signals.take_end() {
            return Ok(Ended::Signal);
        }
        if !target.is_there() {
            return Ok(Ended::Process);
        }
        if is_above(probes.cost()?, lasted, settings.budget_ppm) {
            return Ok(Ended::Budget { ppm: settings.budget_ppm });
        }
        let tick = left.min(TICK);
        let timeout = Timespec { tv_sec: 0, tv_nsec: i64::from(tick.subsec_nanos()) };
        let end = signals.end_fd();
        match poll(&mut [PollFd::new(&end, PollFlags::IN)], Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                return Err(MallocFailure::System { what: "waiting", source: error.into() });
            }
        }
    }
}

/// Whether this costs more than the budget, in millionths of the time.
fn is_above(cost: MallocCost, lasted: Duration, budget_ppm: u64) -> bool {
    let allowed = lasted.max(SHORTEST).as_nanos() * u128::from(budget_ppm) / 1_000_000;
    let MallocCost { hits, stacks } = cost;
    u128::from(hits) * u128::from(HIT_NS) + u128::from(stacks) * u128::from(STACK_NS) > allowed
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tenth of a second in one second is within ten percent; one hit more is not, unless the time goes on.
    #[test]
    fn budgets() {
        let within = 100_000_000 / HIT_NS;
        let hits = |hits| MallocCost { hits, stacks: 0 };
        for lasted in [Duration::ZERO, Duration::from_secs(1)] {
            assert!(!is_above(hits(within), lasted, 100_000));
            assert!(is_above(hits(within + 1), lasted, 100_000));
            assert!(is_above(MallocCost { hits: within, stacks: 1 }, lasted, 100_000));
        }
        assert!(!is_above(hits(within + 1), Duration::from_secs(2), 100_000));
    }
}
