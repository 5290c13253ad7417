//! Loading the BPF object: ABI check, read-only configuration, verification of the programs that the options need.

use aya::{
    Ebpf, EbpfLoader,
    programs::{Program, ProgramType},
    sys::{BpfHelper, is_helper_supported},
};
use gctrace_common::{
    config::{Config, SELECT_ALL, SELECT_CGROUP_IDS, SELECT_CGROUPS, SELECT_LISTED, SELECT_NAMES},
    memory::MemoryLayout,
};

use super::{
    attach::{Probes, names, phases::PHASE_PROGRAMS},
    errors::LoadError,
    execs::{self, ExecReader},
    gvl::{self, GvlOptions, GvlReader},
    kernel_types, leak,
    links::Link,
    malloc,
    multi::{Multi, MultiError},
    parallel,
    programs::{GC_PROGRAMS, Programs, TRACEPOINTS, check_abi, load_one, object, optional_program},
    requests::{self, RequestOptions, RequestReader},
    rings::{AwayMap, CounterReader, Rings, StackRing},
    sample::{self, StackOptions},
    tracepoint::LifeOffsets,
    unwind::NativeMaps,
};
use crate::ruby::plan::OptionalEvent;

/// What decides which processes are traced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Select {
    /// No selection: every process that hits a probe.
    All,
    /// Listed processes.
    Listed,
    /// Processes in selected cgroups.
    Cgroups,
    /// Listed processes and those in selected cgroups.
    ListedOrCgroups,
}

impl Select {
    fn bits(self) -> u32 {
        match self {
            Self::All => SELECT_ALL,
            Self::Listed => SELECT_LISTED,
            Self::Cgroups => SELECT_CGROUPS,
            Self::ListedOrCgroups => SELECT_LISTED | SELECT_CGROUPS,
        }
    }
}

/// Options for loading the programs.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a separate choice")]
pub struct LoadOptions<'a> {
    /// How processes are selected.
    pub select: Select,
    /// Whether some of the listed processes are selected by name.
    pub names: bool,
    /// The tgid of gctrace.
    pub own_pid: u32,
    /// Where tracefs is mounted.
    pub tracefs: &'a std::path::Path,
    /// Whether to use attach cookies where the kernel has them.
    pub cookies: bool,
    /// Whether to attach many probes by one link where the kernel supports it.
    pub multi: bool,
    /// Whether to read memory counters in the kernel if their layout is known.
    pub memory: bool,
    /// Size of the GC ring in bytes; `None`: the default.
    pub gc_ring_bytes: Option<u32>,
    /// Which stacks are taken in addition to those of GC starts.
    pub stacks: Option<StackOptions>,
    /// Whether and how the GVL is watched.
    pub gvl: Option<GvlOptions>,
    /// Whether and how requests are traced.
    pub requests: Option<RequestOptions>,
    /// Which optional events are traced.
    pub optional: &'a [OptionalEvent],
    /// Whether to take a stack when a thread takes the free slots of a heap page.
    pub alloc_stacks: bool,
}

impl LoadOptions<'_> {
    /// Number of programs that a run loads at its start.
    pub fn programs(&self) -> usize {
        let watched = self.gvl.is_some_and(|gvl| self.cookies || gvl.futex);
        needed(
            self.stacks,
            self.gvl.filter(|_| watched),
            self.requests.is_some() && self.cookies,
            self.optional,
            false,
        )
        .len()
    }

    /// Whether native stacks are walked.
    pub(super) fn native(&self) -> bool {
        self.stacks.is_some_and(|stacks| stacks.native)
    }
}

/// The loaded object, split by the parts of gctrace that use it.
pub struct Loaded {
    /// Attaching and selection, which are not time-critical.
    pub probes: Probes,
    /// The rings that the data thread reads.
    pub rings: Rings,
    /// The ring of stacks.
    pub stacks: StackRing,
    /// The kernel's counters.
    pub counters: CounterReader,
    /// The threads that are off their CPU, if these are tracked.
    pub away: Option<AwayMap>,
    /// The maps for unwind tables, if native stacks are walked.
    pub unwind: Option<NativeMaps>,
    /// The GVL state of threads, if the GVL is watched.
    pub gvl: Option<GvlReader>,
    /// Requests, if they are traced.
    pub requests: Option<RequestReader>,
    /// When processes started their programs.
    pub execs: ExecReader,
}

/// Loads the object and the programs that the options need, and attaches the lifecycle tracepoints.
pub fn load(options: &LoadOptions<'_>) -> Result<Loaded, LoadError> {
    let lives = LifeOffsets::read(options.tracefs)?;
    let wanted = Verified { options: *options, lives, everything: false };
    let (mut programs, config) = verified(&wanted)?;
    let mut links = Vec::new();
    for (program, category, name) in TRACEPOINTS {
        links.push(Link::at_tracepoint(&mut programs.ebpf, program, category, name)?);
    }
    #[cfg(feature = "bpf-log")]
    super::lines::start(&mut programs.ebpf);
    let native = options.native();
    let stages = sample::link_stages(&mut programs, options.stacks, options.gvl)?;
    let ebpf = &mut programs.ebpf;
    let clocks = sample::start(ebpf, options.stacks, &mut links)?;
    let rings = Rings::take(ebpf)?;
    let stacks = StackRing::take(ebpf)?;
    let counters = CounterReader::take(ebpf)?;
    let wall = options.stacks.is_some_and(|stacks| stacks.wall);
    let away = wall.then(|| AwayMap::take(ebpf)).transpose()?;
    let unwind = native.then(|| NativeMaps::take(ebpf)).transpose()?;
    let gvl = options.gvl.filter(|_| config.gvl != 0);
    let gvl = gvl.map(|options| GvlReader::take(ebpf, options)).transpose()?;
    let requests = options.requests.is_some() && config.has_cookie != 0;
    let reader = requests.then(|| RequestReader::take(ebpf)).transpose()?;
    let execs = ExecReader::take(ebpf)?;
    let probes = Probes::new(programs, &config, requests, (stages, clocks), links)?;
    Ok(Loaded { probes, rings, stacks, counters, away, unwind, gvl, requests: reader, execs })
}

/// Parameters of loading in addition to the options.
pub(super) struct Verified<'a> {
    pub(super) options: LoadOptions<'a>,
    pub(super) lives: LifeOffsets,
    /// Whether to include programs that are otherwise loaded on demand ([`LATE`]).
    pub(super) everything: bool,
}

/// The layout of the kernel's memory counters; `deepest`: as on the largest machine, so that the verifier's work does not
/// depend on the number of CPUs.
fn memory_layout(deepest: bool) -> MemoryLayout {
    match kernel_types::memory() {
        Ok(layout) if deepest => kernel_types::deepest_memory(layout),
        Ok(layout) => {
            if layout.shape == MemoryLayout::COUNTS {
                log::info!(
                    "memory is approximate: this machine can have too many CPUs for gctrace to read the counter of each"
                );
            }
            layout
        }
        Err(error) => {
            log::info!("{error}; memory is read in /proc, after the event");
            MemoryLayout::default()
        }
    }
}

/// Programs that few runs need, loaded when something is to be attached to them: those of fallback probes, the return probe of
/// Rubies up to 3.1, and the one for packets of servers.
const LATE: [&str; 5] =
    ["phase_begin", "phase_end", "phase_return", gvl::AT_RETURN, requests::ARRIVALS_PROGRAM];

/// Loads the object and lets the kernel verify its programs. Nothing is attached.
pub(super) fn verified(wanted: &Verified<'_>) -> Result<(Programs, Config), LoadError> {
    let Verified {
        options:
            LoadOptions {
                select,
                names,
                own_pid,
                cookies,
                gc_ring_bytes,
                stacks,
                tracefs,
                gvl,
                multi,
                memory,
                requests,
                optional,
                alloc_stacks,
            },
        lives,
        everything,
    } = *wanted;
    check_abi(object())?;
    let memory = if memory { memory_layout(everything) } else { MemoryLayout::default() };
    let task_thread_pointer = kernel_types::task_thread_pointer().unwrap_or_else(|error| {
        log::info!("{error}; the per-thread counters of Ruby 4.0 cannot be read");
        0
    });
    let mut config = Config {
        select: select.bits() | if names && select != Select::All { SELECT_NAMES } else { 0 },
        own_tgid: own_pid,
        has_cookie: u32::from(cookies),
        newtask_pid: lives.newtask_pid,
        newtask_clone_flags: lives.newtask_clone_flags,
        task_thread_pointer,
        tick_ns: 0,
        task_stack: kernel_types::task_stack().unwrap_or(0),
        gvl: 0,
        reserved: 0,
        gvl_threshold_ns: 0,
        gvl_span_ns: 0,
        futex_address: 0,
        futex_op: 0,
        task_pid: 0,
        task_state: 0,
        task_charged: 0,
        at_return: 0,
        off_cpu_min_ns: 0,
        off_cpu_stacks: 0,
    };
    sample::configure(&mut config, stacks);
    gvl::configure(&mut config, gvl.filter(|gvl| cookies || gvl.futex), tracefs)?;
    // Whether uprobes may query the ancestors of a cgroup is probed as well.
    if config.select & SELECT_CGROUPS != 0 && !asks_ancestors(cookies) {
        config.select = config.select & !SELECT_CGROUPS | SELECT_CGROUP_IDS;
    }
    // Cookie support is probed by loading: kernels before 5.15 refuse the helper, and with the flag off the verifier
    // never sees it.
    let programs = match load_programs(
        (config, memory),
        gc_ring_bytes,
        stacks,
        (gvl, requests.filter(|_| cookies)),
        (optional, alloc_stacks),
        multi && cookies,
        everything,
    ) {
        Ok(programs) => programs,
        // Any program may be the one that needs cookies, and it may fail for other reasons as well.
        Err(LoadError::Program { program, .. }) if cookies && !gives_cookies() => {
            log::debug!("without attach cookies, since {program} does not load");
            config.has_cookie = 0;
            // Without cookies the site of a hit is unknown, so only futexes remain.
            config.gvl = u32::from(gvl.is_some_and(|gvl| gvl.futex));
            load_programs(
                (config, memory),
                gc_ring_bytes,
                stacks,
                (gvl, None),
                (optional, alloc_stacks),
                false,
                everything,
            )?
        }
        Err(error) => return Err(error),
    };
    Ok((programs, config))
}

/// Whether the kernel has the helper that returns a uprobe's cookie.
fn gives_cookies() -> bool {
    is_helper_supported(ProgramType::KProbe, BpfHelper::BPF_FUNC_get_attach_cookie).unwrap_or(false)
}

/// Whether uprobes can query the ancestors of a cgroup. A kernel without cookies is treated as an old one. The kernel counts levels from
/// the root of the hierarchy, which is not visible inside a cgroup namespace.
fn asks_ancestors(cookies: bool) -> bool {
    /// The initial cgroup namespace (`PROC_CGROUP_INIT_INO`, `include/linux/proc_ns.h`).
    const FIRST: &str = "cgroup:[4026531835]";
    let own = std::fs::read_link("/proc/self/ns/cgroup");
    let sees_root = own.map_or(true, |namespace| namespace == std::path::Path::new(FIRST));
    let helper = BpfHelper::BPF_FUNC_get_current_ancestor_cgroup_id;
    cookies && sees_root && is_helper_supported(ProgramType::KProbe, helper).unwrap_or(false)
}

fn load_programs(
    (config, memory): (Config, MemoryLayout),
    gc_ring_bytes: Option<u32>,
    stacks: Option<StackOptions>,
    (gvl, requests): (Option<GvlOptions>, Option<RequestOptions>),
    (optional, alloc_stacks): (&[OptionalEvent], bool),
    multi: bool,
    everything: bool,
) -> Result<Programs, LoadError> {
    let mut loader = EbpfLoader::new();
    loader.override_global("CONFIG", &config, true);
    loader.override_global("MEMORY", &memory, true);
    if let Some(bytes) = gc_ring_bytes {
        loader.map_max_entries("GC_RING", bytes);
    }
    sample::size_maps(&mut loader, stacks, gvl.is_some_and(|gvl| gvl.futex))?;
    gvl::size_maps(&mut loader, config.gvl != 0);
    names::size_maps(&mut loader, config.select & SELECT_NAMES != 0);
    let watches_requests = u32::from(requests.is_some());
    loader.override_global("REQUESTS", &watches_requests, true);
    let traced = OptionalEvent::ALL.map(|event| u32::from(everything || optional.contains(&event)));
    for (event, traced) in OptionalEvent::ALL.into_iter().zip(&traced) {
        loader.override_global(optional_program(event).1, traced, true);
    }
    let alloc_stacks = u32::from(alloc_stacks);
    loader.override_global("ALLOC_STACKS", &alloc_stacks, true);
    let signal = kernel_types::task_signal().unwrap_or_else(|error| {
        log::info!("{error}; the end of a process's first thread is treated as the end of the process");
        [0; 2]
    });
    loader.override_global("SIGNAL", &signal, true);
    let socket = requests::socket_layout(requests.is_some());
    loader.override_global("SOCKET", &socket, true);
    let faults = requests::faults_offset(requests.is_some());
    loader.override_global("FAULTS", &faults, true);
    let copies_states = u32::from(requests.is_some_and(|requests| requests.states));
    loader.override_global("UNIT_STATES", &copies_states, true);
    requests::size_maps(&mut loader, requests, everything || optional.contains(&OptionalEvent::Refill))?;
    execs::size_map(&mut loader, sample::cpus()?);
    if !stacks.is_some_and(|stacks| stacks.native) {
        for map in NativeMaps::NAMES {
            loader.map_max_entries(map, 1);
        }
    }
    #[cfg(feature = "bpf-log")]
    let level = log::max_level() as u8;
    #[cfg(feature = "bpf-log")]
    super::lines::configure(&mut loader, &level);
    let object = object();
    let mut ebpf = loader.load(object)?;
    let mut names = needed(stacks, gvl.filter(|_| config.gvl != 0), requests.is_some(), optional, everything);
    log::debug!("loading {} BPF programs: {}", names.len(), names.join(" "));
    let multi = if multi { load_multi(&ebpf, object, &names) } else { None };
    names.retain(|name| multi.as_ref().is_none_or(|multi| multi.program(name).is_none()));
    load_all(&mut ebpf, &names)?;
    Ok(Programs { ebpf, multi })
}

/// The programs that these options need.
fn needed(
    stacks: Option<StackOptions>,
    gvl: Option<GvlOptions>,
    requests: bool,
    optional: &[OptionalEvent],
    everything: bool,
) -> Vec<&'static str> {
    let mut names: Vec<&'static str> = GC_PROGRAMS.into_iter().chain(PHASE_PROGRAMS).collect();
    let traced = OptionalEvent::ALL.into_iter().filter(|event| everything || optional.contains(event));
    names.extend(traced.map(|event| optional_program(event).0));
    // Runs never need these: they belong to commands that load them separately.
    names.extend(
        everything.then_some([leak::PROGRAM, malloc::PROGRAM, sample::PROBE_NATIVE]).into_iter().flatten(),
    );
    names.extend(sample::names(stacks));
    names.extend(gvl::programs(gvl));
    names.extend(
        requests
            .then_some([
                requests::PROGRAM,
                requests::JOBS_PROGRAM,
                requests::BLOCKING_PROGRAM,
                requests::ARRIVALS_PROGRAM,
            ])
            .into_iter()
            .flatten(),
    );
    names.extend(sample::stages_for(gvl).into_iter().filter(|name| !sample::names(stacks).contains(name)));
    names.extend(TRACEPOINTS.map(|(program, _, _)| program));
    names.retain(|name| everything || !LATE.contains(name));
    names
}

/// Loads the uprobes among the programs for multi-uprobe links, if the kernel supports them. Those of fallback probes stay with Aya: a probe
/// with a semaphore must be attached individually.
fn load_multi(ebpf: &Ebpf, object: &[u8], names: &[&'static str]) -> Option<Multi> {
    let uprobes: Vec<&'static str> = names
        .iter()
        .filter(|name| !PHASE_PROGRAMS.contains(name))
        .filter(|name| matches!(ebpf.program(name), Some(Program::UProbe(_))))
        .copied()
        .collect();
    match Multi::load(ebpf, object, &uprobes) {
        Ok(multi) => Some(multi),
        Err(error @ MultiError::Unsupported) => {
            log::debug!("{error}; each probe is attached separately");
            None
        }
        // Aya then loads them, and reports more if they cannot be loaded.
        Err(error) => {
            log::warn!("{error}; each probe is attached separately");
            None
        }
    }
}

/// Loads programs in parallel, so that the kernel verifies one per CPU.
fn load_all(ebpf: &mut Ebpf, names: &[&'static str]) -> Result<(), LoadError> {
    if let Some(missing) = names.iter().find(|name| ebpf.program(name).is_none()) {
        return Err(LoadError::Missing(missing));
    }
    let wanted = ebpf.programs_mut().filter_map(|(name, program)| {
        names.iter().find(|wanted| **wanted == name).map(|name| (*name, program))
    });
    let wanted: Vec<_> = wanted.collect();
    let loaded = parallel::each(wanted.into_iter(), |(program, code)| {
        load_one(code).map_err(|source| LoadError::Program { program, source })
    });
    let mut failed = None;
    for error in loaded.into_iter().filter_map(Result::err) {
        // Each error with the verifier's log; the message that is reported shows only its first line.
        log::debug!("{error}");
        failed.get_or_insert(error);
    }
    failed.map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests;
