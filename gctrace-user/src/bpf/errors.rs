//! Errors of the kernel and of the BPF object.

use std::{
    error::Error,
    path::{Path, PathBuf},
};

use aya::{EbpfError, maps::MapError, programs::ProgramError};
use gctrace_common::config::MAX_IMAGES;
use rustix::process::{Resource, getrlimit};

/// Why the object could not be loaded into the kernel.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Binary and object were built from different ABI sources.
    #[error(
        "the BPF object inside this binary has another ABI (object {object}, binary {binary:#018x}); \
         rebuild it with `cargo xtask ebpf`, then rebuild gctrace"
    )]
    Abi {
        /// The object's ABI, or that it states none.
        object: String,
        /// The ABI that the binary was built with.
        binary: u64,
    },
    /// The object could not be parsed or a map could not be created.
    #[error("loading the BPF object: {0} ({remedy})", remedy = object_remedy(.0))]
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
    /// A map has an unexpected type or layout.
    #[error("opening the BPF map `{map}`: {source}")]
    Map {
        /// The map's name.
        map: &'static str,
        /// The reason.
        #[source]
        source: MapError,
    },
    /// The CPUs could not be listed.
    #[error("listing the CPUs: {0}")]
    Cpus(#[source] std::io::Error),
    /// The sampling clock of a CPU could not be started.
    #[error(
        "sampling CPU {cpu} (perf_event_open): {source} (run gctrace as root; a security policy such as seccomp may refuse it, too)"
    )]
    Clock {
        /// The CPU.
        cpu: u32,
        /// The kernel's answer.
        #[source]
        source: ProgramError,
    },
    /// The gate could not be closed.
    #[error("closing the gate: {0}")]
    Gate(#[source] Box<AttachError>),
    /// A tracepoint's format file could not be read or lacks a field.
    #[error("reading the format of the tracepoint {tracepoint} in {path}: {reason}")]
    TracepointFormat {
        /// Category and name.
        tracepoint: String,
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

/// Advice for when the object is refused. The release of the kernel has been checked before.
fn object_remedy(error: &EbpfError) -> String {
    limit(error).unwrap_or_else(|| {
        let advice = match code_of(error) {
            // Exceeding the limit of locked memory returns EPERM (`bpf_charge_memlock`, kernel/bpf/syscall.c, up to Linux 5.10).
            Some(libc::EPERM | libc::EACCES) => {
                "needs CAP_BPF or root, and no security policy (lockdown, seccomp, SELinux) that forbids BPF; before Linux 5.11 also \
                 `ulimit -l unlimited`"
            }
            Some(libc::ENOSYS) => "needs a kernel with CONFIG_BPF_SYSCALL, and no seccomp policy that forbids bpf(2)",
            _ => "needs Linux 5.10 or later with CONFIG_BPF_SYSCALL, and CAP_BPF or root",
        };
        advice.to_owned()
    })
}

/// The kernel's error code (`errno(3)`) among the causes of an error.
fn code_of(error: &(dyn Error + 'static)) -> Option<i32> {
    let mut causes = std::iter::successors(Some(error), |error: &&(dyn Error + 'static)| (**error).source());
    causes.find_map(|error| {
        // Aya displays some of these transparently; they are then missing from the chain of sources.
        let answer = match (error.downcast_ref(), error.downcast_ref()) {
            (Some(ProgramError::IOError(error)), _) | (_, Some(MapError::IoError(error))) => Some(error),
            _ => error.downcast_ref::<std::io::Error>(),
        };
        answer?.raw_os_error()
    })
}

/// The limit that was reached and how to raise it, if the error shows one.
fn limit(error: &(dyn Error + 'static)) -> Option<String> {
    match code_of(error)? {
        libc::EMFILE => Some(
            "the limit of open files of gctrace is too low: `ulimit -n 4096`, or LimitNOFILE= of its systemd unit".to_owned(),
        ),
        libc::ENFILE => Some("the limit of open files of the machine is reached: sysctl fs.file-max".to_owned()),
        libc::ENOMEM => Some(no_memory(getrlimit(Resource::As).current)),
        _ => None,
    }
}

/// Which limit of memory was reached; `addresses`: that of gctrace's address space, bytes.
fn no_memory(addresses: Option<u64>) -> String {
    match addresses {
        Some(bytes) => format!(
            "the address space of gctrace is limited to {} KiB (RLIMIT_AS): `ulimit -v unlimited`, or LimitAS=infinity in its systemd unit",
            bytes >> 10
        ),
        None => "the memory limit of gctrace's cgroup is too low (MemoryMax= of its systemd unit, the limit of its container), or the \
                 machine has no memory left"
            .to_owned(),
    }
}

/// Maximum number of attempts to load a program while signals interrupt its verification; as in libbpf.
const TRIES: usize = 5;

/// Loads a program. The verifier gives up when the thread has a pending signal (EAGAIN, `do_check`, kernel/bpf/verifier.c).
pub(super) fn uninterrupted<T, E: Error + 'static>(mut load: impl FnMut() -> Result<T, E>) -> Result<T, E> {
    for _ in 1..TRIES {
        match load() {
            Err(error) if code_of(&error) == Some(libc::EAGAIN) => {}
            loaded => return loaded,
        }
    }
    load()
}

/// Why an image could not be probed.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// More images are in use at the same time than the object has room for.
    #[error(
        "more than {MAX_IMAGES} different Ruby images are in use on this host; additional ones are not traced"
    )]
    TooManyImages,
    /// A site does not fit the attach cookie.
    #[error("the {point} site at {address:#x} of {path} does not fit an attach cookie")]
    Cookie {
        /// Event name.
        point: &'static str,
        /// Stated virtual address.
        address: u64,
        /// The image.
        path: PathBuf,
    },
    /// The kernel refused the probe.
    #[error("attaching the {point} probe at file offset {offset:#x} of {path}: {source}")]
    Attach {
        /// Event name.
        point: &'static str,
        /// File offset.
        offset: u64,
        /// The image.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// The kernel refused a fallback probe.
    #[error("attaching the {phase} probe at file offset {offset:#x} of {path}: {source}")]
    Phase {
        /// Phase name.
        phase: &'static str,
        /// File offset.
        offset: u64,
        /// The image.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// The kernel refused a tracepoint.
    #[error("attaching to the tracepoint {category}:{tracepoint}: {source}")]
    Tracepoint {
        /// Its category.
        category: &'static str,
        /// Its name.
        tracepoint: &'static str,
        /// The kernel's answer.
        #[source]
        source: Box<ProgramError>,
    },
    /// A map could not be written.
    #[error("writing the BPF map `{map}`: {source}")]
    Map {
        /// The map's name.
        map: &'static str,
        /// The kernel's answer.
        #[source]
        source: Box<MapError>,
    },
    /// A map could not be read.
    #[error("reading the BPF map `{map}`: {source}")]
    ReadMap {
        /// The map's name.
        map: &'static str,
        /// The kernel's answer.
        #[source]
        source: Box<MapError>,
    },
    /// The object lacks a program; this cannot happen after loading.
    #[error("the BPF object has no program `{0}`")]
    NoProgram(&'static str),
}

impl AttachError {
    /// The error with the path by which the user knows the file, instead of the path of a descriptor through which it was attached.
    #[must_use]
    pub fn of_file(mut self, shown: &Path) -> Self {
        match &mut self {
            Self::Cookie { path, .. } | Self::Attach { path, .. } | Self::Phase { path, .. } => {
                shown.clone_into(path);
            }
            Self::TooManyImages
            | Self::Tracepoint { .. }
            | Self::Map { .. }
            | Self::ReadMap { .. }
            | Self::NoProgram(_) => {}
        }
        self
    }
}

/// The first line of an error with its innermost cause. (Several errors of aya do not show their cause, and the
/// verifier's log is long.) If the cause is a limit, it is named.
pub fn brief(error: &(dyn Error + 'static)) -> String {
    let line = |text: &str| text.lines().next().unwrap_or_default().trim_end().to_owned();
    let mut text = line(&error.to_string());
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    let cause = line(&innermost.to_string());
    if !text.contains(&cause) {
        text = format!("{text}: {cause}");
    }
    match limit(error) {
        Some(limit) if !text.contains(&limit) => format!("{text}; {limit}"),
        _ => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A brief error keeps the innermost cause and drops the rest.
    #[test]
    fn brief_errors() {
        let cause = std::io::Error::from_raw_os_error(1);
        let error = LoadError::TracepointFormat {
            tracepoint: "task:task_newtask".to_owned(),
            path: "/x".into(),
            reason: format!("{cause}\nline\nline"),
        };
        assert!(brief(&error).ends_with("Operation not permitted (os error 1)"), "{}", brief(&error));
        let error = LoadError::Map {
            map: "GATE",
            source: MapError::CreateError { name: "GATE".to_owned(), io_error: cause },
        };
        assert!(brief(&error).contains("Operation not permitted"), "{}", brief(&error));
    }

    /// A limit that was reached is named once, wherever it is in the chain; a missing permission is not a limit.
    #[test]
    fn limits() {
        let map = |code| MapError::CreateError {
            name: "EXECS".to_owned(),
            io_error: std::io::Error::from_raw_os_error(code),
        };
        for (code, limit) in [
            (libc::ENOMEM, "the memory limit of gctrace's cgroup is too low (MemoryMax= of its systemd unit"),
            (
                libc::EMFILE,
                "the limit of open files of gctrace is too low: `ulimit -n 4096`, or LimitNOFILE=",
            ),
        ] {
            let program = ProgramError::IOError(std::io::Error::from_raw_os_error(code));
            let errors = [
                LoadError::Object(EbpfError::MapError(map(code))),
                LoadError::Map { map: "EXECS", source: map(code) },
                LoadError::Map {
                    map: "EXECS",
                    source: MapError::IoError(std::io::Error::from_raw_os_error(code)),
                },
                LoadError::Program { program: "gc_start", source: program },
            ];
            for error in errors {
                let said = brief(&error);
                assert_eq!(said.matches(limit).count(), 1, "{said}");
                assert!(said.contains(&format!("(os error {code})")) && !said.contains("CAP_BPF"), "{said}");
            }
        }
        let forbidden = brief(&LoadError::Object(EbpfError::MapError(map(libc::EPERM))));
        assert!(forbidden.contains("CAP_BPF or root") && !forbidden.contains("too low"), "{forbidden}");
    }

    /// Where the address space of gctrace is limited, that is named, and not the cgroup.
    #[test]
    fn limits_of_memory() {
        let of_addresses = no_memory(Some(200_000 << 10));
        assert!(
            of_addresses.contains("200000 KiB (RLIMIT_AS)") && of_addresses.contains("`ulimit -v unlimited`")
        );
        assert!(!of_addresses.contains("cgroup"), "{of_addresses}");
        assert!(no_memory(None).contains("MemoryMax="));
    }

    /// A refused probe is named with the file that the user knows, not with a descriptor of gctrace.
    #[test]
    fn files() {
        let of = |path: &Path| {
            let (path, source) = (path.to_owned(), Box::from("refused"));
            AttachError::Attach { point: "GC_START", offset: 0x1000, path, source }
        };
        let shown = Path::new("/usr/lib/libruby.so");
        let said = of(Path::new("/proc/self/fd/96")).of_file(shown).to_string();
        assert_eq!(said, of(shown).to_string());
    }

    /// Loading is retried a few times when a signal interrupts it; other failures are not retried.
    #[test]
    fn interrupted() {
        for (code, interruptions, tries) in
            [(libc::EAGAIN, 3, 4), (libc::EAGAIN, 100, 5), (libc::EACCES, 100, 1)]
        {
            let mut tried = 0;
            let loaded = uninterrupted(|| {
                tried += 1;
                if tried > interruptions { Ok(()) } else { Err(std::io::Error::from_raw_os_error(code)) }
            });
            assert_eq!((loaded.is_ok(), tried), (interruptions < 5, tries));
        }
    }
}
