//! Taking stacks: the stages that walk them, and the clock that triggers them.

use std::{collections::BTreeMap, os::fd::AsFd as _, sync::LazyLock, time::Duration};

use aya::{
    Ebpf, EbpfLoader,
    maps::{MapData, MapError, ProgramArray},
    programs::{
        PerfEvent, Program,
        perf_event::{PerfEventConfig, PerfEventLink, PerfEventScope, SamplePolicy, SoftwareEvent},
    },
};

use gctrace_common::{
    config::{Config, MAX_AWAY, MAX_SCOPES, OFF_CPU_WINDOW_NS, PROBE_SLOTS},
    stack::stage,
};

use super::{
    cpus::OnlineCpus,
    errors::{LoadError, brief},
    gvl::GvlOptions,
    kernel_types,
    links::Link,
    lru, multi,
    programs::Programs,
    raw,
};

/// Programs of the sampling clock: the tick and its later stage.
pub(super) const TICK_PROGRAMS: [&str; 2] = ["cpu_sample", "tick_ruby"];
/// The stage that walks the native stack of a tick.
pub(super) const NATIVE_PROGRAM: &str = "tick_native";
/// Programs of the scheduler's tracepoints: program and name of the tracepoint.
const SWITCH_PROGRAMS: [(&str, &str); 2] =
    [("sched_switch", "sched_switch"), ("sched_wakeup", "sched_wakeup")];
/// The later stage of stacks taken by these programs or by [`RETURN_PROGRAM`].
const RETURN_STAGE: &str = "return_ruby";
/// The raw tracepoint after a context switch, and its program.
const RETURN_TRACEPOINT: &str = "sched_exit_tp";
const RETURN_PROGRAM: &str = "sched_return";
/// Later stages of stacks taken at a futex tracepoint.
const SWITCH_STAGES: [&str; 1] = ["switch_ruby"];
/// Later stages of stacks taken at a uprobe.
pub(super) const PROBE_STAGES: [&str; 1] = ["probe_ruby"];

/// The stage that walks the native stack at a uprobe. The traced program waits meanwhile, so only `gctrace malloc`
/// loads it, whose samples are limited by a budget.
pub(super) const PROBE_NATIVE: &str = "probe_native";

/// The stage map of each family of programs, and its stages.
const STAGES: [(&str, &[(u32, &str)]); 4] = [
    ("TICK_STAGES", &[(stage::NATIVE, NATIVE_PROGRAM), (stage::RUBY, "tick_ruby")]),
    ("PROBE_STAGES", &[(stage::NATIVE, PROBE_NATIVE), (stage::RUBY, "probe_ruby")]),
    ("SWITCH_STAGES", &[(stage::RUBY, "switch_ruby")]),
    ("RETURN_STAGES", &[(stage::RUBY, RETURN_STAGE)]),
];

/// Which stacks are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StackOptions {
    /// Ticks per second and CPU.
    pub rate: u32,
    /// Whether threads that leave their CPU are traced as well.
    pub wall: bool,
    /// Minimum off-CPU time to be reported.
    pub off_cpu_min: Duration,
    /// Maximum number of off-CPU stacks per second and CPU.
    pub off_cpu_stacks: u32,
    /// Whether native stacks are walked.
    pub native: bool,
    /// Whether only threads that hold the GVL while another thread waits for it are sampled.
    pub only_blockers: bool,
}

impl StackOptions {
    /// For watching the GVL without a profile: samples the threads that keep others waiting for it.
    pub const BLOCKERS: Self = Self {
        rate: 99,
        wall: false,
        off_cpu_min: Duration::ZERO,
        off_cpu_stacks: Self::OFF_CPU_STACKS,
        native: false,
        only_blockers: true,
    };
    /// Default maximum number of off-CPU stacks per second and CPU.
    pub const OFF_CPU_STACKS: u32 = 1000;

    /// Maximum number of off-CPU stacks per counting window of the programs.
    fn off_cpu_quota(self) -> u32 {
        let quota = u64::from(self.off_cpu_stacks) * OFF_CPU_WINDOW_NS / 1_000_000_000;
        u32::try_from(quota.max(1)).unwrap_or(u32::MAX)
    }

    /// CPU time between two ticks, in nanoseconds.
    fn tick_ns(self) -> u64 {
        1_000_000_000 / u64::from(self.rate.max(1))
    }
}

/// The stages of each family; must be kept while the programs are to tail-call them.
pub(super) type Stages = Vec<ProgramArray<MapData>>;

/// Registers the stages of each family for its programs.
pub(super) fn link_stages(
    programs: &mut Programs,
    options: Option<StackOptions>,
    gvl: Option<GvlOptions>,
) -> Result<Stages, LoadError> {
    let mut loaded = names(options);
    loaded.extend(stages_for(gvl));
    link_loaded(programs, &loaded)
}

/// Like [`link_stages`], for the given loaded programs.
pub(super) fn link_loaded(programs: &mut Programs, loaded: &[&str]) -> Result<Stages, LoadError> {
    let Programs { ebpf, multi } = programs;
    let loaded = |name: &str| loaded.contains(&name);
    let link = |(map, list): (&'static str, &[(u32, &'static str)])| {
        let taken = ebpf.take_map(map).ok_or(LoadError::Missing(map))?;
        let data = multi::data(&taken).ok_or(LoadError::Missing(map))?;
        let fd = data.fd().as_fd().try_clone_to_owned();
        let fd = fd.map_err(|source| LoadError::Map { map, source: MapError::IoError(source) })?;
        let mut stages = ProgramArray::try_from(taken).map_err(|source| LoadError::Map { map, source })?;
        for &(stage, name) in list.iter().filter(|(_, name)| loaded(name)) {
            if let Some(program) = multi.as_ref().and_then(|multi| multi.program(name)) {
                raw::set_stage(fd.as_fd(), stage, program)
                    .map_err(|source| LoadError::Map { map, source: MapError::IoError(source) })?;
                continue;
            }
            let program = ebpf.program(name).ok_or(LoadError::Missing(name))?;
            let fd = match program {
                Program::UProbe(program) => program.fd(),
                Program::PerfEvent(program) => program.fd(),
                Program::TracePoint(program) => program.fd(),
                Program::RawTracePoint(program) => program.fd(),
                _ => return Err(LoadError::Missing(name)),
            };
            let fd = fd.map_err(|source| LoadError::Program { program: name, source })?;
            stages.set(stage, fd, 0).map_err(|source| LoadError::Map { map, source })?;
        }
        Ok(stages)
    };
    STAGES.into_iter().map(link).collect()
}

/// Number of CPUs that the host may have.
pub(super) fn cpus() -> Result<u32, LoadError> {
    aya::util::nr_cpus().map(|cpus| cpus as u32).map_err(|(_, source)| LoadError::Cpus(source))
}

/// Sizes the maps for the options.
pub(super) fn size_maps(
    loader: &mut EbpfLoader<'_>,
    options: Option<StackOptions>,
    futex: bool,
) -> Result<(), LoadError> {
    let cpus = cpus()?;
    for map in ["SCOPES", "PHASES"] {
        loader.map_max_entries(map, lru::entries(MAX_SCOPES, cpus));
    }
    loader.map_max_entries("TICK_SCRATCH", cpus);
    loader.map_max_entries("PROBE_SCRATCH", cpus * PROBE_SLOTS);
    let wall = options.is_some_and(|options| options.wall);
    if wall || futex {
        loader.map_max_entries("SWITCH_SCRATCH", cpus);
    }
    if wall {
        loader.map_max_entries("AWAY", lru::entries(MAX_AWAY, cpus));
    }
    Ok(())
}

/// Configuration for the programs: the clock and the scheduler.
pub(super) fn configure(config: &mut Config, options: Option<StackOptions>) {
    let Some(options) = options else { return };
    config.tick_ns = if options.only_blockers { 0 } else { options.tick_ns() };
    if options.wall {
        match kernel_types::task_members() {
            Ok([pid, state, _]) => (config.task_pid, config.task_state) = (pid, state),
            Err(error) => log::warn!("off-CPU times are not reported: {error}"),
        }
        config.off_cpu_min_ns = u64::try_from(options.off_cpu_min.as_nanos()).unwrap_or(u64::MAX);
        config.off_cpu_stacks = options.off_cpu_quota();
        config.at_return = u32::from(tells_returns());
    }
}

/// Whether the kernel reports the end of a context switch.
fn tells_returns() -> bool {
    static TELLS: LazyLock<bool> =
        LazyLock::new(|| kernel_types::has_raw_tracepoint(RETURN_TRACEPOINT).unwrap_or(false));
    *TELLS
}

/// The programs that these options need.
pub(super) fn names(options: Option<StackOptions>) -> Vec<&'static str> {
    let mut names: Vec<&'static str> = PROBE_STAGES.into_iter().collect();
    let Some(options) = options else { return names };
    names.extend(TICK_PROGRAMS);
    if options.native {
        names.push(NATIVE_PROGRAM);
    }
    if options.wall {
        names.extend(SWITCH_PROGRAMS.map(|(program, _)| program));
        names.push(RETURN_STAGE);
        names.extend(tells_returns().then_some(RETURN_PROGRAM));
    }
    names
}

/// The stages that the futex programs need for stacks of GVL waits.
pub(super) fn stages_for(gvl: Option<GvlOptions>) -> Vec<&'static str> {
    if gvl.is_some_and(|gvl| gvl.futex) { SWITCH_STAGES.to_vec() } else { Vec::new() }
}

/// Starts what the options enable and returns the clocks; adds the other links to `links`.
pub(super) fn start(
    ebpf: &mut Ebpf,
    options: Option<StackOptions>,
    links: &mut Vec<Link>,
) -> Result<Option<Clocks>, LoadError> {
    let Some(options) = options else { return Ok(None) };
    let clocks = Clocks::start(ebpf, options.tick_ns())?;
    if !options.wall {
        return Ok(Some(clocks));
    }
    for (program, name) in SWITCH_PROGRAMS {
        links.push(Link::at_tracepoint(ebpf, program, "sched", name)?);
    }
    if !tells_returns() {
        return Ok(Some(clocks));
    }
    links.push(Link::at_tracepoint(ebpf, RETURN_PROGRAM, "sched", RETURN_TRACEPOINT)?);
    Ok(Some(clocks))
}

/// The sampling clocks of the online CPUs.
pub(super) struct Clocks {
    tick_ns: u64,
    cpus: OnlineCpus,
    links: BTreeMap<u32, PerfEventLink>,
}

impl Clocks {
    /// Starts the clock of every online CPU.
    fn start(ebpf: &mut Ebpf, tick_ns: u64) -> Result<Self, LoadError> {
        let cpus = OnlineCpus::now().map_err(LoadError::Cpus)?;
        let program = program(ebpf)?;
        let links = cpus.known().map(|cpu| Ok((cpu, attach(program, tick_ns, cpu)?)));
        let links = links.collect::<Result<_, LoadError>>()?;
        Ok(Self { tick_ns, cpus, links })
    }

    /// Starts the clocks of CPUs that have come online since the last check.
    pub(super) fn look(&mut self, ebpf: &mut Ebpf) -> Result<(), LoadError> {
        let Some(change) = self.cpus.change().map_err(LoadError::Cpus)? else { return Ok(()) };
        for cpu in change.gone {
            log::info!("CPU {cpu} has gone offline");
            self.links.remove(&cpu);
        }
        for cpu in change.come {
            match attach(program(ebpf)?, self.tick_ns, cpu) {
                Ok(link) => {
                    log::info!("CPU {cpu} has come online: sampled from now on");
                    self.links.insert(cpu, link);
                }
                Err(error) if self.cpus.retry(cpu) => {
                    log::warn!("{}; no stacks of this CPU until an attempt succeeds", brief(&error));
                }
                Err(_) => {}
            }
        }
        Ok(())
    }
}

/// The program of the clocks.
fn program(ebpf: &mut Ebpf) -> Result<&mut PerfEvent, LoadError> {
    let name = TICK_PROGRAMS[0];
    match ebpf.program_mut(name) {
        Some(Program::PerfEvent(program)) => Ok(program),
        _ => Err(LoadError::Missing(name)),
    }
}

/// Starts the clock of one CPU.
fn attach(program: &mut PerfEvent, tick_ns: u64, cpu: u32) -> Result<PerfEventLink, LoadError> {
    let link = program.attach(
        PerfEventConfig::Software(SoftwareEvent::CpuClock),
        PerfEventScope::AllProcessesOneCpu { cpu },
        SamplePolicy::Period(tick_ns),
        false,
    );
    link.and_then(|link| program.take_link(link)).map_err(|source| LoadError::Clock { cpu, source })
}
