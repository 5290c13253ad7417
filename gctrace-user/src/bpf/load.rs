//! Loading the BPF object: ABI check, read-only configuration, verification of every program.

use std::path::PathBuf;

use aya::{
    Ebpf, EbpfError, EbpfLoader,
    maps::MapError,
    programs::{Program, ProgramError},
};
use gctrace_common::{
    ABI_HASH,
    config::{Config, SELECT_ALL, SELECT_LISTED},
};

use super::{
    attach::{AttachError, Probes},
    kernel_types,
    phases::PHASE_PROGRAMS,
    rings::{CounterReader, Rings},
};
use crate::elf;

/// The committed object of this architecture (`gctrace-ebpf/prebuilt`).
#[cfg(target_arch = "x86_64")]
static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../gctrace-ebpf/prebuilt/gctrace.bpfel.x86_64.o"
));
#[cfg(target_arch = "aarch64")]
static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../gctrace-ebpf/prebuilt/gctrace.bpfel.aarch64.o"
));

/// Programs that sit on GC points, in the order of their `Point`.
pub(super) const GC_PROGRAMS: [&str; 5] = ["gc_start", "gc_end_mark", "gc_end_sweep", "gc_enter", "gc_exit"];
/// Programs on tracepoints: program, category, name.
pub(super) const TRACEPOINTS: [(&str, &str, &str); 3] = [
    ("task_newtask", "task", "task_newtask"),
    ("sched_process_exec", "sched", "sched_process_exec"),
    ("sched_process_exit", "sched", "sched_process_exit"),
];

/// Why the object could not be brought into the kernel.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Binary and object were built from different ABI sources.
    #[error(
        "the BPF object inside this binary speaks another ABI (object {object}, binary {binary:#018x}); \
         rebuild it with `cargo xtask ebpf`, then rebuild gctrace"
    )]
    Abi {
        /// What the object says, if anything.
        object: String,
        /// What the binary was built with.
        binary: u64,
    },
    /// The object could not be parsed or a map could not be created.
    #[error(
        "loading the BPF object: {0} (needs Linux 5.8 or later with CONFIG_BPF_SYSCALL, and CAP_BPF or root)"
    )]
    Object(#[from] EbpfError),
    /// The verifier or the kernel refused a program.
    #[error("loading the BPF program `{program}`: {source}")]
    Program {
        /// The program's name.
        program: &'static str,
        /// The kernel's answer.
        #[source]
        source: ProgramError,
    },
    /// The object lacks a program or a map that this binary needs.
    #[error("the BPF object has no `{0}`; rebuild it with `cargo xtask ebpf`")]
    Missing(&'static str),
    /// A map is not what it should be.
    #[error("opening the BPF map `{map}`: {source}")]
    Map {
        /// The map's name.
        map: &'static str,
        /// The reason.
        #[source]
        source: MapError,
    },
    /// The gate could not be closed.
    #[error("closing the gate: {0}")]
    Gate(#[source] Box<AttachError>),
    /// A tracepoint's format file could not be read or lacks a field.
    #[error("reading the format of the tracepoint {tracepoint} in {path}: {reason}")]
    TracepointFormat {
        /// Category and name.
        tracepoint: &'static str,
        /// The file.
        path: PathBuf,
        /// What was wrong.
        reason: String,
    },
    /// A tracepoint could not be attached.
    #[error("attaching to the tracepoint {tracepoint}: {source}")]
    Tracepoint {
        /// Category and name.
        tracepoint: String,
        /// The reason.
        #[source]
        source: ProgramError,
    },
}

/// What the programs must know.
#[derive(Clone, Copy, Debug)]
pub struct LoadOptions<'a> {
    /// Every process that hits a probe is traced; else only listed ones.
    pub all: bool,
    /// The tgid of gctrace.
    pub own_pid: u32,
    /// Where tracefs is mounted.
    pub tracefs: &'a std::path::Path,
    /// Use attach cookies where the kernel has them.
    pub cookies: bool,
    /// Bytes of the GC ring, if not the default.
    pub gc_ring_bytes: Option<u32>,
}

/// The loaded object, split by who uses which part.
pub struct Loaded {
    /// Attaching and selection: the slow path.
    pub probes: Probes,
    /// The records.
    pub rings: Rings,
    /// The kernel's counters.
    pub counters: CounterReader,
}

/// Loads the object, verifies all programs and attaches the lifecycle tracepoints.
pub fn load(options: &LoadOptions<'_>) -> Result<Loaded, LoadError> {
    let newtask = newtask_offsets(options.tracefs)?;
    let thread_pointer = kernel_types::task_thread_pointer().unwrap_or_else(|error| {
        log::info!("{error}; what Ruby 4.0 counts per thread cannot be read");
        0
    });
    let (mut ebpf, config) = verified(
        options.all,
        options.own_pid,
        options.cookies,
        options.gc_ring_bytes,
        newtask,
        thread_pointer,
    )?;
    for (program, category, name) in TRACEPOINTS {
        let Some(Program::TracePoint(tracepoint)) = ebpf.program_mut(program) else {
            return Err(LoadError::Missing(program));
        };
        tracepoint
            .attach(category, name)
            .map_err(|source| LoadError::Tracepoint { tracepoint: format!("{category}:{name}"), source })?;
    }
    let rings = Rings::take(&mut ebpf)?;
    let counters = CounterReader::take(&mut ebpf)?;
    let probes = Probes::new(ebpf, config.has_cookie != 0, thread_pointer != 0)?;
    Ok(Loaded { probes, rings, counters })
}

/// Offsets in `task:task_newtask` that the verifier accepts, for loading where nothing is attached.
pub(super) const TRIED_NEWTASK: (u32, u32) = (8, 32);

/// Loads the object and has every program verified. Nothing is attached.
pub(super) fn verified(
    all: bool,
    own_pid: u32,
    cookies: bool,
    gc_ring_bytes: Option<u32>,
    newtask: (u32, u32),
    thread_pointer: u32,
) -> Result<(Ebpf, Config), LoadError> {
    check_abi(OBJECT)?;
    let mut config = Config {
        select: if all { SELECT_ALL } else { SELECT_LISTED },
        own_tgid: own_pid,
        has_cookie: u32::from(cookies),
        newtask_pid: newtask.0,
        newtask_clone_flags: newtask.1,
        task_thread_pointer: thread_pointer,
    };
    // Cookies are probed for by doing: kernels before 5.15 refuse the helper, and with the flag off the verifier
    // never sees it.
    let ebpf = match load_programs(config, gc_ring_bytes) {
        Ok(ebpf) => ebpf,
        Err(first @ LoadError::Program { .. }) if cookies => {
            config.has_cookie = 0;
            load_programs(config, gc_ring_bytes).map_err(|_| first)?
        }
        Err(error) => return Err(error),
    };
    Ok((ebpf, config))
}

fn load_programs(config: Config, gc_ring_bytes: Option<u32>) -> Result<Ebpf, LoadError> {
    let mut loader = EbpfLoader::new();
    loader.override_global("CONFIG", &config, true);
    if let Some(bytes) = gc_ring_bytes {
        loader.map_max_entries("GC_RING", bytes);
    }
    let mut ebpf = loader.load(OBJECT)?;
    for program in GC_PROGRAMS.into_iter().chain(PHASE_PROGRAMS) {
        let Some(Program::UProbe(uprobe)) = ebpf.program_mut(program) else {
            return Err(LoadError::Missing(program));
        };
        uprobe.load().map_err(|source| LoadError::Program { program, source })?;
    }
    for (program, _, _) in TRACEPOINTS {
        let Some(Program::TracePoint(tracepoint)) = ebpf.program_mut(program) else {
            return Err(LoadError::Missing(program));
        };
        tracepoint.load().map_err(|source| LoadError::Program { program, source })?;
    }
    Ok(ebpf)
}

/// Refuses an object whose ABI is not this binary's.
fn check_abi(object: &[u8]) -> Result<(), LoadError> {
    match elf::read_symbol_u64(object, "GCTRACE_ABI") {
        Some(ABI_HASH) => Ok(()),
        other => Err(LoadError::Abi {
            object: other.map_or_else(|| "has no ABI mark".to_owned(), |hash| format!("{hash:#018x}")),
            binary: ABI_HASH,
        }),
    }
}

/// Byte offsets of `pid` and `clone_flags` in the `task:task_newtask` record of the running kernel.
pub(super) fn newtask_offsets(tracefs: &std::path::Path) -> Result<(u32, u32), LoadError> {
    let path = tracefs.join("events/task/task_newtask/format");
    let error = |reason: String| LoadError::TracepointFormat {
        tracepoint: "task:task_newtask",
        path: path.clone(),
        reason,
    };
    let text = std::fs::read_to_string(&path).map_err(|e| error(e.to_string()))?;
    let offset =
        |field| format_offset(&text, field).ok_or_else(|| error(format!("it has no field `{field}`")));
    Ok((offset("pid")?, offset("clone_flags")?))
}

/// Finds the offset of a `field:` line in a tracepoint's format file.
fn format_offset(text: &str, field: &str) -> Option<u32> {
    text.lines().find_map(|line| {
        let mut parts = line.trim().split(';').map(str::trim);
        let declared = parts.next()?.strip_prefix("field:")?;
        if declared.rsplit(' ').next()? != field {
            return None;
        }
        parts.next()?.strip_prefix("offset:")?.parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The committed object speaks this binary's ABI.
    #[test]
    fn committed_object_matches() {
        check_abi(OBJECT).unwrap();
    }

    /// An object of another ABI is refused before anything reaches the kernel.
    #[test]
    fn foreign_object_is_refused() {
        let mut object = OBJECT.to_vec();
        let needle = ABI_HASH.to_le_bytes();
        let mut planted = 0;
        for at in 0..object.len() - 8 {
            if object[at..at + 8] == needle {
                object[at] ^= 0xff;
                planted += 1;
            }
        }
        assert!(planted > 0);
        let text = check_abi(&object).unwrap_err().to_string();
        assert!(text.contains("another ABI") && text.contains("cargo xtask ebpf"), "{text}");
        assert!(check_abi(b"not an object").is_err());
    }

    /// Field offsets are taken from the format text, whatever the type is called.
    #[test]
    fn tracepoint_format() {
        let text = "format:\n\tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;\n\n\
                    \tfield:pid_t pid;\toffset:8;\tsize:4;\tsigned:1;\n\
                    \tfield:unsigned long clone_flags;\toffset:32;\tsize:8;\tsigned:0;\n";
        assert_eq!(format_offset(text, "pid"), Some(8));
        assert_eq!(format_offset(text, "clone_flags"), Some(32));
        assert_eq!(format_offset(text, "comm"), None);
    }
}
