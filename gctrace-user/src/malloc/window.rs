//! The window: attaches probes, watches their cost, and ends.

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
    select::select,
};
use crate::{
    bpf::{MallocCost, MallocProbes, ProbeStacks, Scope},
    cli::MallocSettings,
    clock::{WallClock, monotonic_ns},
    console::{self, say},
    elf::ElfImage,
    export::{self, profile::MallocProfile},
    heap::Target,
    host::{proc::has_shadow_stack, proc_root},
    preflight,
    ruby::malloc::malloc_sites,
    signals::Signals,
    sudo,
    words::plural,
};

/// Interval at which the cost is checked.
const TICK: Duration = Duration::from_millis(50);
/// Cost of a probe hit for the process, nanoseconds: the trap, and the BPF program with its lookups (docs/malloc.md).
const HIT_NS: u64 = 1_500;
/// Additional cost of a stack, nanoseconds.
const STACK_NS: u64 = 25_000;
/// Minimum time over which the cost is judged: in a shorter time it may be the start of a burst, or the total.
const SHORTEST: Duration = Duration::from_secs(1);

/// Counts the calls of each process until the time is over, the process ends or its budget is exceeded, with one profile for all processes.
/// If several are selected, `fail` is called with the reason for each that cannot be counted.
pub(super) fn watch(
    settings: &MallocSettings,
    mut fail: impl FnMut(&MallocFailure),
) -> Result<(Vec<Report>, MallocProfile), MallocFailure> {
    if settings.sample == 0 && !settings.files.is_empty() {
        return Err(MallocFailure::Usage("profiles are made of stacks: --sample 0 takes none".into()));
    }
    preflight::check()?;
    if !settings.files.is_empty() {
        sudo::own_files(Some(settings.as_root)).map_err(|wrong| MallocFailure::Usage(wrong.into()))?;
    }
    for (path, _) in &settings.files {
        export::check_path(path)?;
    }
    let (pids, failures) = select(settings)?;
    failures.iter().for_each(&mut fail);
    let mut windows = Vec::new();
    for &pid in &pids {
        match Window::attach(pid, settings) {
            Ok(window) => windows.push(window),
            Err(failure) if pids.len() == 1 => return Err(failure),
            Err(failure) => fail(&failure),
        }
    }
    let mut profile = MallocProfile::new(WallClock::measure(), monotonic_ns(), settings.sample);
    if windows.is_empty() {
        return Ok((Vec::new(), profile));
    }
    let signals = Signals::install()
        .map_err(|source| MallocFailure::System { what: "installing signal handlers", source })?;
    signals.tracing();
    for window in &mut windows {
        window.open(&mut profile)?;
    }
    let probes = windows.iter().map(|window| window.sites as u64).sum();
    let of: Vec<String> = windows.iter().map(|window| window.target.pid.to_string()).collect();
    say(&format!(
        "gctrace: ready: counting calls of malloc, calloc, realloc and free of pid {} ({}) for {:?}",
        of.join(", "),
        plural(probes, "probe"),
        settings.duration
    ));
    let mut reports: Vec<Option<Report>> = windows.iter().map(|_| None).collect();
    let mut open: Vec<(usize, Window)> = windows.into_iter().enumerate().collect();
    let several = open.len() > 1;
    // Hits of closed windows.
    let mut over = 0;
    loop {
        let ending = signals.take_end();
        let hits: Vec<u64> = open
            .iter()
            .map(|(_, window)| Ok(window.probes.cost()?.hits))
            .collect::<Result<_, MallocFailure>>()?;
        let all = over + hits.iter().sum::<u64>();
        let mut still = Vec::with_capacity(open.len());
        for ((at, mut window), hits) in open.into_iter().zip(hits) {
            let Some(ended) = window.look(settings, ending, all - hits, &mut profile)? else {
                still.push((at, window));
                continue;
            };
            over += hits;
            let pid = window.target.pid;
            match window.close(ended, &mut profile) {
                Ok(report) => reports[at] = Some(report),
                Err(failure) if !several => return Err(failure),
                Err(failure) => {
                    profile.forget(pid);
                    fail(&failure);
                }
            }
        }
        open = still;
        if open.is_empty() {
            profile.close(monotonic_ns());
            return Ok((reports.into_iter().flatten().collect(), profile));
        }
        wait(&signals, open.iter().map(|(_, window)| window.left(settings)).min().unwrap_or(TICK))?;
    }
}

/// The window of one process.
struct Window {
    target: Target,
    /// Number of its probes.
    sites: usize,
    objspace: u64,
    /// `GC.count` when it was opened.
    gc_count: Option<u64>,
    probes: MallocProbes,
    sampling: Option<Sampling>,
    begin: Instant,
}

impl Window {
    /// Attaches everything; nothing is counted yet.
    fn attach(pid: u32, settings: &MallocSettings) -> Result<Self, MallocFailure> {
        let target = Target::find(pid, settings.cache_dir.as_deref())?;
        if has_shadow_stack(pid) {
            return Err(MallocFailure::ShadowStack(pid));
        }
        let unreadable = |reason: String| MallocFailure::File { pid, reason };
        let (file, shown) = target.file().map_err(unreadable)?;
        let image = ElfImage::read(&file).map_err(|error| unreadable(error.to_string()))?;
        let sites = malloc_sites(&image).map_err(|source| MallocFailure::Calls { pid, source })?;
        drop(image);
        let (objspace, before) = target.state().map_err(|error| target.failure(error))?;
        let options = ProbeStacks { stacks: settings.sample != 0, native: proc_root::shares_pids() };
        let programs = MallocProbes::programs(options) as u64;
        console::starting(&format!("loading {}", plural(programs, "BPF program")));
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
        let sampling = Sampling::start(&target, &shown, &mut probes, settings.sample)?;
        // The kernel expects pids of gctrace's own namespace.
        let scope = NonZeroU32::new(pid).filter(|_| proc_root::shares_pids()).map_or(Scope::All, Scope::One);
        let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        probes.attach(counted, &sites, &path, scope).map_err(|error| error.of_file(&shown))?;
        let gc_count = target.plan.layout.count.read(&before);
        Ok(Self { target, sites: sites.len(), objspace, gc_count, probes, sampling, begin: Instant::now() })
    }

    /// Starts counting.
    fn open(&mut self, profile: &mut MallocProfile) -> Result<(), MallocFailure> {
        // Attaching the other processes took some time.
        if let Ok((_, data)) = self.target.state() {
            self.gc_count = self.target.plan.layout.count.read(&data);
        }
        if let Some(sampling) = &self.sampling {
            sampling.open(profile);
        }
        self.begin = Instant::now();
        Ok(self.probes.open()?)
    }

    /// The remaining time.
    fn left(&self, settings: &MallocSettings) -> Duration {
        settings.duration.saturating_sub(self.begin.elapsed())
    }

    /// Takes what has arrived; says whether, and why, the window ends now. `elsewhere` is the number of hits counted in other windows.
    fn look(
        &mut self,
        settings: &MallocSettings,
        ending: bool,
        elsewhere: u64,
        profile: &mut MallocProfile,
    ) -> Result<Option<Ended>, MallocFailure> {
        if let Some(sampling) = &mut self.sampling {
            sampling.take(&self.probes, profile)?;
        }
        let lasted = self.begin.elapsed();
        Ok(if !self.target.is_there() {
            Some(Ended::Process)
        } else if lasted >= settings.duration {
            Some(Ended::Time)
        } else if ending {
            Some(Ended::Signal)
        } else {
            let mut cost = self.probes.cost()?;
            // Each process has its own budget.
            cost.other_hits = cost.other_hits.saturating_sub(elsewhere);
            let above = is_above(cost, lasted, settings.budget_ppm);
            above.then_some(Ended::Budget { ppm: settings.budget_ppm })
        })
    }

    /// Ends the window and reports it.
    fn close(mut self, ended: Ended, profile: &mut MallocProfile) -> Result<Report, MallocFailure> {
        let lasted = self.begin.elapsed();
        self.probes.close()?;
        let after = self.target.state();
        let read = self.probes.finish()?;
        let after = match after {
            Ok((now, _)) if now != self.objspace => return Err(MallocFailure::Replaced(self.target.pid)),
            Ok((_, data)) => self.target.plan.layout.count.read(&data),
            // The opened memory is that of a program that is gone.
            Err(_) if self.target.is_there() => return Err(MallocFailure::Replaced(self.target.pid)),
            Err(_) => None,
        };
        let Target { pid, command, .. } = &self.target;
        let who = Who { pid: *pid, command: command.clone(), ruby: self.target.ruby() };
        let mut report = Report::of(who, &read, lasted, ended, [self.gc_count, after]);
        report.sampled = self.sampling.map(|sampling| sampling.finish(&read.live, profile));
        Ok(report)
    }
}

/// Prints which frames stacks will lack.
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

/// Waits for a signal, at most for this time.
fn wait(signals: &Signals, left: Duration) -> Result<(), MallocFailure> {
    let tick = left.min(TICK);
    let timeout = Timespec { tv_sec: 0, tv_nsec: i64::from(tick.subsec_nanos()) };
    let end = signals.end_fd();
    match poll(&mut [PollFd::new(&end, PollFlags::IN)], Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(MallocFailure::System { what: "waiting", source: error.into() }),
    }
}

/// Whether the cost exceeds the budget, which is in millionths of the time.
fn is_above(cost: MallocCost, lasted: Duration, budget_ppm: u64) -> bool {
    let allowed = lasted.max(SHORTEST).as_nanos() * u128::from(budget_ppm) / 1_000_000;
    let MallocCost { hits, other_hits, stacks } = cost;
    u128::from(hits + other_hits) * u128::from(HIT_NS) + u128::from(stacks) * u128::from(STACK_NS) > allowed
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tenth of a second per second is within ten percent; one more hit is not, unless the window is longer.
    #[test]
    fn budgets() {
        let within = 100_000_000 / HIT_NS;
        let hits = |hits| MallocCost { hits: hits / 2, other_hits: hits - hits / 2, stacks: 0 };
        for lasted in [Duration::ZERO, Duration::from_secs(1)] {
            assert!(!is_above(hits(within), lasted, 100_000));
            assert!(is_above(hits(within + 1), lasted, 100_000));
            assert!(is_above(MallocCost { hits: within, other_hits: 0, stacks: 1 }, lasted, 100_000));
        }
        assert!(!is_above(hits(within + 1), Duration::from_secs(2), 100_000));
    }
}
