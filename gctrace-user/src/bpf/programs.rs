//! The programs of the object: their names, and loading one.

use aya::{
    Ebpf,
    programs::{Program, ProgramError},
};
use gctrace_common::ABI_HASH;

use super::{
    errors::{LoadError, uninterrupted},
    multi::Multi,
};
use crate::{elf, ruby::plan::OptionalEvent};

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

/// The object to load.
pub(super) fn object() -> &'static [u8] {
    #[cfg(feature = "bpf-log")]
    return super::lines::object(OBJECT);
    #[cfg(not(feature = "bpf-log"))]
    OBJECT
}

/// Programs at GC points, in the order of their `Point`.
pub(super) const GC_PROGRAMS: [&str; 5] = ["gc_start", "gc_end_mark", "gc_end_sweep", "gc_enter", "gc_exit"];
/// The program of an optional event, and the global that enables the event in other programs.
pub(super) const fn optional_program(event: OptionalEvent) -> (&'static str, &'static str) {
    match event {
        OptionalEvent::Refill => ("refill", "ALLOC"),
    }
}
/// Programs on tracepoints: program, category, name.
pub(super) const TRACEPOINTS: [(&str, &str, &str); 3] = [
    ("task_newtask", "task", "task_newtask"),
    ("sched_process_exec", "sched", "sched_process_exec"),
    ("sched_process_exit", "sched", "sched_process_exit"),
];

/// The loaded programs.
pub(super) struct Programs {
    pub(super) ebpf: Ebpf,
    /// The uprobes, if one link can attach many.
    pub(super) multi: Option<Multi>,
}

/// Loads a program that was not loaded at the start.
pub(super) fn load_late(program: &mut Program) -> Result<(), ProgramError> {
    let loaded = match program {
        Program::UProbe(program) => program.fd().is_ok(),
        Program::CgroupSkb(program) => program.fd().is_ok(),
        _ => true,
    };
    if loaded { Ok(()) } else { load_one(program) }
}

pub(super) fn load_one(program: &mut Program) -> Result<(), ProgramError> {
    uninterrupted(|| match program {
        Program::UProbe(program) => program.load(),
        Program::PerfEvent(program) => program.load(),
        Program::TracePoint(program) => program.load(),
        Program::RawTracePoint(program) => program.load(),
        Program::CgroupSkb(program) => program.load(),
        _ => Err(ProgramError::UnexpectedProgramType),
    })
}

/// Rejects an object whose ABI differs from this binary's.
pub(super) fn check_abi(object: &[u8]) -> Result<(), LoadError> {
    match elf::read_symbol_u64(object, "GCTRACE_ABI") {
        Some(ABI_HASH) => Ok(()),
        other => Err(LoadError::Abi {
            object: other.map_or_else(|| "has no ABI mark".to_owned(), |hash| format!("{hash:#018x}")),
            binary: ABI_HASH,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The committed object has this binary's ABI.
    #[test]
    fn committed_object_matches() {
        check_abi(OBJECT).unwrap();
    }

    /// The scheduler is traced at raw tracepoints: the kernel skips programs at ordinary ones when a thread was preempted in a
    /// bpf(2) call, as gctrace's own are.
    #[test]
    fn the_scheduler_is_seen_raw() {
        let object = aya_obj::Object::parse(OBJECT).unwrap();
        for name in ["sched_switch", "sched_wakeup", "sched_return", "gvl_switch", "gvl_wakeup"] {
            let section = &object.programs[name].section;
            assert!(matches!(section, aya_obj::ProgramSection::RawTracePoint), "{name}: {section:?}");
        }
    }

    /// An object with another ABI is rejected before anything reaches the kernel.
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
}
