//! Checks piece by piece what the kernel lets gctrace do: the object is loaded as for a run, but attached only to
//! gctrace itself and the kernel's own tracepoints, with its gate closed.

use std::{num::NonZeroU32, path::Path, time::Duration};

use aya::{maps::MapType, sys::is_map_supported};
use gctrace_common::{
    event::Point,
    memory::{MAX_SUMMED_CPUS, MemoryLayout},
};

use super::{
    GvlOptions, MappingWatch, Probes, RequestOptions, Scope,
    errors::{LoadError, brief},
    kernel_types,
    links::Link,
    load::{LoadOptions, Select, Verified, verified},
    programs::TRACEPOINTS,
    sample::{self, StackOptions},
    tracepoint::LifeOffsets,
};
use crate::{
    address::{FileOffset, Svma},
    host::proc_root,
    ruby::plan::ProbeSite,
};

/// The outcome of one check: success, or the reason of the failure.
pub type CheckResult = Result<(), String>;

/// The outcomes of all checks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelCheck {
    /// Creating a ring buffer map (Linux 5.8).
    pub ring_buffer: CheckResult,
    /// Loading every program and map of a run through the verifier.
    pub programs: CheckResult,
    /// Number of instructions that the verifier walked for each program, largest first; its limit is one million. Empty
    /// before Linux 5.16, which does not report it.
    pub verified: Vec<(String, u32)>,
    /// Attach cookies (Linux 5.15).
    pub cookies: CheckResult,
    /// Attaching a uprobe to an instruction of gctrace itself, for this process only.
    pub uprobe: CheckResult,
    /// Attaching to the lifecycle tracepoints: category and name of each.
    pub tracepoints: Vec<(String, CheckResult)>,
    /// Watching for new executable mappings (`perf_event_open`).
    pub mappings: CheckResult,
    /// The kernel's type information (BTF), and in it the offset of the user thread pointer.
    pub kernel_types: CheckResult,
    /// Reading the memory counters of a process in the kernel; if that is not possible, the reason.
    pub memory: CheckResult,
}

/// Runs all checks. `own_code`: file offset in `/proc/self/exe` of an instruction that is never executed.
pub fn check(tracefs: Option<&Path>, own_code: Option<u64>, cookies: bool) -> KernelCheck {
    let not_tried = || Err("not tried: the programs cannot be loaded".to_owned());
    let mut check = KernelCheck {
        ring_buffer: match is_map_supported(MapType::RingBuf) {
            Ok(true) => Ok(()),
            Ok(false) => Err("the kernel has no ring buffer map".to_owned()),
            Err(error) => Err(brief(&error)),
        },
        programs: not_tried(),
        verified: Vec::new(),
        cookies: not_tried(),
        uprobe: not_tried(),
        tracepoints: TRACEPOINTS
            .map(|(_, category, name)| (format!("{category}:{name}"), not_tried()))
            .to_vec(),
        mappings: MappingWatch::start(false).map(drop).map_err(|error| brief(&error)),
        kernel_types: kernel_types::task_thread_pointer().map(drop).map_err(|error| brief(&error)),
        memory: match kernel_types::memory() {
            Ok(layout) if layout.shape == MemoryLayout::COUNTS => Err(format!(
                "this machine can have more than {MAX_SUMMED_CPUS} CPUs, or their numbers have gaps"
            )),
            Ok(_) => Ok(()),
            Err(error) => Err(brief(&error)),
        },
    };
    match probes(tracefs, cookies) {
        Err(error) => check.programs = Err(brief(&error)),
        Ok(mut probes) => {
            check.programs = Ok(());
            check.verified = probes.verified_instructions();
            check.cookies = if probes.has_cookie() {
                Ok(())
            } else {
                Err("the kernel has no attach cookies (Linux 5.15 has them)".to_owned())
            };
            check.tracepoints = TRACEPOINTS
                .map(|(program, category, name)| {
                    (format!("{category}:{name}"), tracepoint(&mut probes, program, category, name))
                })
                .to_vec();
            check.uprobe = uprobe(&mut probes, own_code);
        }
    }
    check
}

/// Loads the programs of a run with their gate closed.
fn probes(tracefs: Option<&Path>, cookies: bool) -> Result<Probes, LoadError> {
    // Without tracefs the offsets only have to satisfy the verifier.
    let lives = tracefs.map_or(Ok(LifeOffsets::TRIED), LifeOffsets::read)?;
    // To measure off-CPU time, the programs need the fields of the tracepoint records, which tracefs describes.
    let stacks = StackOptions {
        rate: 99,
        wall: tracefs.is_some(),
        off_cpu_min: Duration::ZERO,
        off_cpu_stacks: StackOptions::OFF_CPU_STACKS,
        native: true,
        only_blockers: false,
    };
    let options = LoadOptions {
        select: Select::ListedOrCgroups,
        names: true,
        own_pid: proc_root::own_pid(),
        tracefs: tracefs.unwrap_or(Path::new("/")),
        cookies,
        // The verifier's instruction counts are only available for programs that Aya loads.
        multi: false,
        memory: true,
        gc_ring_bytes: None,
        stacks: Some(stacks),
        optional: &[],
        alloc_stacks: false,
        requests: Some(RequestOptions::new(None, true)),
        gvl: tracefs.map(|_| GvlOptions {
            futex: false,
            threshold: Duration::from_millis(1),
            spans: true,
            budget_ppm: 0,
        }),
    };
    let wanted = Verified { options, lives, everything: true };
    let (mut programs, config) = verified(&wanted)?;
    let stages = sample::link_stages(&mut programs, Some(stacks), options.gvl)?;
    let mut probes = Probes::new(programs, &config, false, (stages, None), Vec::new())?;
    probes.close().map_err(|error| LoadError::Gate(Box::new(error)))?;
    Ok(probes)
}

fn tracepoint(probes: &mut Probes, program: &'static str, category: &str, name: &str) -> CheckResult {
    let program = probes.program_mut(program).ok_or_else(|| LoadError::Missing(program).to_string())?;
    Link::to_tracepoint(program, category, name).map(drop).map_err(|error| brief(&error))
}

fn uprobe(probes: &mut Probes, own_code: Option<u64>) -> CheckResult {
    let offset = own_code.ok_or("gctrace's own code was not found in /proc/self/maps")?;
    // perf_event_open takes pids of the caller's own namespace.
    let pid = NonZeroU32::new(std::process::id()).ok_or("gctrace has no pid")?;
    let site = ProbeSite {
        point: Point::GcStart,
        address: Svma(offset),
        file_offset: FileOffset(offset),
        register: None,
    };
    let attached = probes.attach(0, &[site], Path::new("/proc/self/exe"), Scope::One(pid));
    attached.map_err(|error| brief(&error))
}
