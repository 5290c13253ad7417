//! Decides which images contain the GC that a process runs, and whether that is certain; shared by runs and `gctrace doctor`.
//! Nothing here reads a process; both callers pass what they have read.

use std::{
    fmt, io,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
};

use procfs::ProcError;

use super::{
    installed,
    mappings::{ExecutableMapping, is_shortage, load_bias},
    state::VmState,
};
use crate::{
    elf::{ElfError, LoadSegment, ReadAt, RubyPresence, probe_ruby},
    host::proc_root,
    preflight::{self, Lacking},
};

/// The content of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// A CRuby interpreter.
    Interpreter,
    /// A GC library for a Ruby built `--with-modular-gc`.
    GcLibrary,
    /// No Ruby.
    Other,
    /// By its name it should be an interpreter, but its content is not understood, for this reason.
    Damaged(String),
}

impl Content {
    /// The content of an open file; `shown` is the path that messages name. `Err`: it cannot be read, which says nothing about the content.
    pub(super) fn of(file: &(impl ReadAt + ?Sized), shown: &Path) -> io::Result<Self> {
        Ok(match probe_ruby(file) {
            Ok(Some(RubyPresence::Defines)) => Self::Interpreter,
            Ok(Some(RubyPresence::GcLibrary)) => Self::GcLibrary,
            Ok(Some(RubyPresence::Needs { .. }) | None) => Self::Other,
            Err(ElfError::Io { source, .. }) => return Err(source),
            Err(error) if installed::names_ruby(shown) => Self::Damaged(format!(
                "by its name it holds a CRuby interpreter, but the file is damaged: {error}"
            )),
            Err(error) => {
                // A broken file that does not look like a Ruby is not reported.
                log::debug!("{}: {error}", shown.display());
                Self::Other
            }
        })
    }
}

/// The role of an image in a process that maps it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Role<'a> {
    /// No Ruby.
    Other,
    /// A Ruby that can be traced.
    Ruby {
        /// Its load segments.
        segments: &'a [LoadSegment],
        /// Whether its event sites are known; otherwise it has only fallback probes.
        sites: bool,
        /// Whether it was built `--with-modular-gc`.
        modular: bool,
    },
    /// A Ruby that is not traced.
    Refused,
    /// A GC library.
    GcLibrary,
}

/// The GCs that a process runs. Numbers are indexes into its mappings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Gcs {
    /// Whether it maps a Ruby at all, traced or not.
    pub(super) ruby: bool,
    /// Images that contain their own GC, each with its load bias.
    pub(super) own: Vec<(usize, u64)>,
    /// Images that are not traced.
    pub(super) refused: Vec<usize>,
    /// The chosen GC, if the Ruby chooses it when the VM is set up.
    pub(super) chosen: Option<Chosen>,
}

/// The GC of a Ruby built `--with-modular-gc`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Chosen {
    /// The one inside the Ruby, as far as the mappings show ([`built_in`]). The process may still choose a library until its VM is
    /// set up.
    BuiltIn {
        /// The Ruby.
        ruby: usize,
        /// Its load bias.
        bias: u64,
    },
    /// The GC of a library ([`linked_library`]).
    Library {
        /// The library.
        library: usize,
        /// The Ruby.
        ruby: usize,
        /// The Ruby's load bias.
        bias: u64,
    },
    /// The GC of a library about which nothing can be known ([`NO_SITES`]).
    Unknown {
        /// The library.
        library: usize,
    },
}

/// Why [`Chosen::Unknown`] is not traced.
pub(super) const NO_SITES: &str = "modular GC: the process runs the GC of this library, and its Ruby is not traced by event \
                                   sites, so nothing is known about it";

/// Decides which GCs a process runs, from its mappings and the roles of their files.
pub(super) fn gcs<'a>(mapped: impl IntoIterator<Item = (&'a ExecutableMapping, Role<'a>)>) -> Gcs {
    let mut gcs = Gcs::default();
    let (mut modular_ruby, mut gc_library, mut fallback) = (None, None, false);
    for (index, (mapping, role)) in mapped.into_iter().enumerate() {
        gcs.ruby |= matches!(role, Role::Ruby { .. } | Role::Refused);
        match role {
            Role::Other => {}
            Role::Refused => gcs.refused.push(index),
            Role::GcLibrary => gc_library = Some(index),
            Role::Ruby { segments, sites, modular } => {
                fallback |= !sites;
                // `None`: this mapping of the file is not the one with its code.
                let found = load_bias(mapping, segments).map(|bias| (index, bias));
                if modular {
                    modular_ruby = modular_ruby.or(found);
                } else {
                    gcs.own.extend(found);
                }
            }
        }
    }
    gcs.chosen = match (modular_ruby, gc_library) {
        (Some((ruby, bias)), None) => Some(Chosen::BuiltIn { ruby, bias }),
        (Some((ruby, bias)), Some(library)) => Some(Chosen::Library { library, ruby, bias }),
        (None, Some(library)) if fallback => Some(Chosen::Unknown { library }),
        (None, _) => None,
    };
    gcs
}

/// Whether an image is the one whose events a process has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sure {
    /// Yes.
    Yes,
    /// Its first event will show.
    NotYet,
    /// No, for this reason.
    No(&'static str),
}

/// Whether a process runs the GC inside its Ruby. `state`: the result of reading its VM; `loaded`: whether it has loaded a library.
pub(super) fn built_in<E>(state: &Result<VmState, E>, loaded: impl FnOnce() -> Option<bool>) -> Sure {
    match state {
        Ok(VmState::NotSetUp | VmState::Unreadable(_)) => Sure::NotYet,
        _ if loaded() == Some(false) => Sure::Yes,
        _ => Sure::NotYet,
    }
}

/// Whether a process runs the GC library that it maps. `state`: the result of reading its VM; `linked`: whether the library refers to the
/// VM of its Ruby.
pub(super) fn linked_library<E>(state: &Result<VmState, E>, linked: impl FnOnce() -> Option<bool>) -> Sure {
    match state {
        Ok(VmState::NotSetUp | VmState::Unreadable(_)) => Sure::Yes,
        _ if linked() == Some(false) => {
            Sure::No("its GC library does not refer to the VM of its Ruby; nothing is reported for it")
        }
        _ => Sure::Yes,
    }
}

/// Why an id that a user gave as a pid is not that of a process.
pub(super) fn not_a_process(pid: u32) -> Option<String> {
    let process = proc_root::process_of_thread(pid)?;
    Some(format!("it is a thread of process {process}: give --pid {process}"))
}

/// Why the mappings of a process could not be read; and whether it may still be a Ruby.
pub(super) fn unreadable(error: &ProcError) -> (String, bool) {
    match error {
        ProcError::NotFound(_) => match preflight::proc() {
            Ok(()) => ("no such process".to_owned(), false),
            Err(missing) => (missing.to_string(), true),
        },
        ProcError::PermissionDenied(_) if preflight::user_namespace().is_err() => {
            (format!("its mappings cannot be read from a user namespace: {}", preflight::OUTSIDE_OF_IT), true)
        }
        ProcError::PermissionDenied(path) => {
            let lacking = preflight::lacking();
            (denied(path.as_deref(), rustix::process::geteuid().is_root(), lacking.as_ref()), true)
        }
        error => (format!("its mappings cannot be read: {error}"), true),
    }
}

/// Why the kernel denies reading a file of a process, and the remedy.
fn denied(path: Option<&Path>, root: bool, lacking: Option<&Lacking>) -> String {
    if !root {
        return "its mappings cannot be read: it is another user's, or protected by the system; run gctrace as root (sudo), on the host"
            .to_owned();
    }
    let file = path.map_or_else(|| "its file in /proc".to_owned(), |path| path.display().to_string());
    if let Some(lacking) = lacking {
        return format!(
            "its mappings cannot be read: the kernel refuses {file} (permission denied): gctrace is root, but lacks {}; {}",
            lacking.names(),
            preflight::GIVE_CAPABILITIES
        );
    }
    format!(
        "its mappings cannot be read: the kernel refuses {file} (permission denied) although gctrace is root: a container or a security \
         module (AppArmor, SELinux) may forbid it; run gctrace on the host"
    )
}

/// A file that a process maps and that cannot be opened.
#[derive(Debug)]
pub(super) struct Unopened {
    pub(super) path: PathBuf,
    pub(super) error: io::Error,
}

impl Unopened {
    /// Of the files that a process maps and that cannot be opened, in address order, the one that decides: the first that by its name is a Ruby,
    /// otherwise the first, which is its program if that is among them.
    pub(super) fn decisive(files: Vec<Self>) -> Option<Self> {
        let at = files.iter().position(|file| file.refusal().is_some()).unwrap_or_default();
        files.into_iter().nth(at)
    }

    /// Whether it is the program of a process, or a Ruby by its name: nothing can be said about the process without it. `exe`: target of
    /// `/proc/PID/exe`, if that can be read.
    pub(super) fn is_program(&self, exe: Option<&Path>) -> bool {
        let is = |exe: &Path| {
            let exe = exe.as_os_str().as_bytes();
            exe.strip_suffix(b" (deleted)").unwrap_or(exe) == self.path.as_os_str().as_bytes()
        };
        exe.is_none_or(is) || installed::names_ruby(&self.path)
    }

    /// Like [`Unopened::is_program`], of a process.
    pub(super) fn is_program_of(&self, pid: u32) -> bool {
        self.is_program(std::fs::read_link(proc_root::path(pid, "exe")).ok().as_deref())
    }

    /// Why the process is not traced, if the file should be its Ruby. A lack of descriptors or memory says nothing about it.
    pub(super) fn refusal(&self) -> Option<String> {
        let concerns = installed::names_ruby(&self.path) && !is_shortage(&self.error);
        concerns.then(|| {
            format!("by its name it holds a CRuby interpreter, but it cannot be opened: {}", self.error)
        })
    }
}

impl fmt::Display for Unopened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "its program cannot be opened: {}: {}", self.path.display(), self.error)
    }
}

/// Whether an error about the file of a mapping says that the process or the mapping is gone.
pub(super) fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

/// Why a process whose exit has been reported cannot be read.
pub(super) const ZOMBIE: &str = "it has exited: it is a zombie, for which its parent has not waited yet";

/// Why a process with this many executable mappings is not a Ruby.
pub(super) fn no_ruby(mappings: usize) -> String {
    match mappings {
        0 => "not a Ruby process: it has no program (a kernel thread, or it is exiting)".to_owned(),
        count => {
            format!("not a Ruby process: none of its {count} executable mappings holds a CRuby interpreter")
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use rustix::thread::CapabilitySet;

    use super::*;
    use crate::address::{FileOffset, Svma};

    fn mapping(start: u64) -> ExecutableMapping {
        ExecutableMapping { start, end: start + 0x1000, offset: 0x1000, inode: 1, path: "/x".into() }
    }

    fn segments() -> Vec<LoadSegment> {
        vec![LoadSegment {
            address: Svma(0x1000),
            offset: FileOffset(0x1000),
            file_size: 0x1000,
            memory_size: 0x1000,
            executable: true,
            writable: false,
        }]
    }

    fn decide(roles: &[Role<'_>]) -> Gcs {
        let mappings: Vec<_> = (1..=roles.len() as u64).map(|n| mapping(n << 16)).collect();
        gcs(mappings.iter().zip(roles.iter().copied()))
    }

    /// Every combination of a plain Ruby, a modular one, fallback probes, a refused one, and a library has one answer.
    #[test]
    fn every_mix() {
        let code = segments();
        let ruby = |sites, modular| Role::Ruby { segments: &code, sites, modular };
        let (plain, fallback, modular) = (ruby(true, false), ruby(false, false), ruby(true, true));
        let bias = |index: u64| ((index + 1) << 16) - 0x1000;
        assert_eq!(decide(&[]), Gcs::default());
        assert_eq!(decide(&[Role::Other, Role::GcLibrary]), Gcs::default(), "no process chose that library");
        let gcs = decide(&[Role::Other, plain]);
        assert_eq!((gcs.ruby, gcs.own, gcs.chosen), (true, vec![(1, bias(1))], None));
        let gcs = decide(&[Role::Refused, plain, plain]);
        assert_eq!((gcs.refused, gcs.own), (vec![0], vec![(1, bias(1)), (2, bias(2))]));
        let gcs = decide(&[modular, modular]);
        assert_eq!((gcs.own, gcs.chosen), (Vec::new(), Some(Chosen::BuiltIn { ruby: 0, bias: bias(0) })));
        for order in [[modular, Role::GcLibrary], [Role::GcLibrary, modular]] {
            let chosen = decide(&order).chosen.unwrap();
            let at = usize::from(matches!(order[1], Role::Ruby { .. }));
            assert_eq!(
                chosen,
                Chosen::Library { library: 1 - at, ruby: at, bias: bias(at as u64) },
                "in any order"
            );
        }
        let gcs = decide(&[fallback, Role::GcLibrary]);
        assert_eq!((gcs.own.len(), gcs.chosen), (1, Some(Chosen::Unknown { library: 1 })));
        let empty = Role::Ruby { segments: &[], sites: true, modular: true };
        let gcs = decide(&[empty, Role::GcLibrary]);
        assert_eq!((gcs.ruby, gcs.chosen), (true, None), "its code is not mapped there");
    }

    fn unopened_at(path: &str, code: i32) -> Unopened {
        Unopened { path: path.into(), error: io::Error::from_raw_os_error(code) }
    }

    /// Of several files that cannot be opened, the Ruby decides, wherever it is mapped; otherwise the first one.
    #[test]
    fn which_unopened_file_decides() {
        let (ruby, library) = ("/mnt/bin/ruby", "/mnt/lib/ruby/3.4.0/enc/encdb.so");
        let decisive = |files: &[(&str, i32)]| {
            let files = files.iter().map(|&(path, code)| unopened_at(path, code)).collect();
            Unopened::decisive(files).map(|file| file.path.to_str().unwrap().to_owned())
        };
        assert_eq!(decisive(&[(ruby, libc::EACCES), (library, libc::EACCES)]).as_deref(), Some(ruby));
        assert_eq!(decisive(&[(library, libc::EACCES), (ruby, libc::EACCES)]).as_deref(), Some(ruby));
        assert_eq!(decisive(&[("/a", libc::EACCES), ("/b", libc::EIO)]).as_deref(), Some("/a"));
        // A shortage says nothing about the file.
        assert_eq!(decisive(&[("/a", libc::EACCES), (ruby, libc::EMFILE)]).as_deref(), Some("/a"));
        assert_eq!(decisive(&[]), None);
    }

    /// A library that cannot be opened does not hide that a process is no Ruby; its program does, also if it has been deleted.
    #[test]
    fn unopened_programs() {
        let is = |path, exe: Option<&str>| unopened_at(path, libc::EACCES).is_program(exe.map(Path::new));
        assert!(is("/mnt/app", Some("/mnt/app")) && is("/mnt/app", Some("/mnt/app (deleted)")));
        assert!(is("/mnt/libruby.so.3.4", Some("/bin/app")) && is("/mnt/app", None));
        assert!(!is("/mnt/plugin.so", Some("/mnt/app")));
    }

    /// A GC library counts as the process's unless it is linked with another VM; the GC inside a Ruby only if no library is loaded.
    #[test]
    fn certainty() {
        let read = || Ok::<_, ()>(VmState::Busy);
        let early = || [Ok(VmState::NotSetUp), Ok::<_, ()>(VmState::Unreadable(io::ErrorKind::Other.into()))];
        for state in early() {
            assert_eq!(built_in(&state, || Some(false)), Sure::NotYet);
            assert_eq!(linked_library(&state, || Some(false)), Sure::Yes);
        }
        assert_eq!(built_in(&read(), || Some(false)), Sure::Yes);
        for loaded in [Some(true), None] {
            assert_eq!(built_in(&read(), || loaded), Sure::NotYet);
        }
        assert!(matches!(linked_library(&read(), || Some(false)), Sure::No(_)));
        for linked in [Some(true), None] {
            assert_eq!(linked_library(&read(), || linked), Sure::Yes);
        }
    }

    /// A user who is root is not advised to become root; the message names what was denied.
    #[test]
    fn denials() {
        let path = Path::new("/proc/1/maps");
        assert!(denied(Some(path), false, None).contains("run gctrace as root (sudo)"));
        let lacking = Lacking::of(CapabilitySet::all().difference(CapabilitySet::SYS_PTRACE)).unwrap();
        let why = denied(Some(path), true, Some(&lacking));
        assert!(why.contains("lacks CAP_SYS_PTRACE; ") && !why.contains("sudo"), "{why}");
        for (path, file) in [(Some(path), "/proc/1/maps"), (None, "its file in /proc")] {
            let why = denied(path, true, None);
            assert!(why.contains(&format!("refuses {file} (permission denied)")), "{why}");
            assert!(why.contains("container") && !why.contains("sudo"), "{why}");
        }
    }

    /// A file that root may not open is named with the reason, and its process is refused if it should be a Ruby; that of a process that is gone is
    /// no such file.
    #[test]
    fn unopened() {
        let of = |path: &str, code| Unopened { path: path.into(), error: io::Error::from_raw_os_error(code) };
        let ruby = of("/mnt/home/bin/ruby", libc::EACCES);
        assert_eq!(
            ruby.to_string(),
            "its program cannot be opened: /mnt/home/bin/ruby: Permission denied (os error 13)"
        );
        let reason = ruby.refusal().unwrap();
        assert!(reason.ends_with("it cannot be opened: Permission denied (os error 13)"), "{reason}");
        assert!(of("/usr/lib/libruby.so.3.4", libc::ESTALE).refusal().is_some());
        assert_eq!(of("/mnt/home/bin/app", libc::EACCES).refusal(), None);
        assert_eq!(of("/mnt/home/bin/ruby", libc::ENOMEM).refusal(), None);
        for (code, gone) in
            [(libc::ENOENT, true), (libc::ESRCH, true), (libc::EACCES, false), (libc::ENOTCONN, false)]
        {
            assert_eq!(is_gone(&io::Error::from_raw_os_error(code)), gone, "{code}");
        }
    }

    /// A file that is not understood is a damaged Ruby if its name says so, and otherwise nothing.
    #[test]
    fn content() {
        let mut damaged = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        damaged.truncate(1 << 10);
        for (path, ruby) in
            [("/usr/lib/libruby-3.1.so.3.1", true), ("/opt/bin/ruby", true), ("/usr/lib/libc.so.6", false)]
        {
            let content = Content::of(damaged.as_slice(), Path::new(path)).unwrap();
            assert_eq!(matches!(content, Content::Damaged(_)), ruby, "{path}: {content:?}");
        }
        assert_eq!(
            Content::of(b"#!/bin/sh\n".as_slice(), Path::new("/usr/bin/ruby")).unwrap(),
            Content::Other
        );
    }

    /// A file on a file server that fails once.
    struct Failing(Cell<bool>, Vec<u8>);

    impl ReadAt for Failing {
        fn size(&self) -> io::Result<u64> {
            Ok(self.1.len() as u64)
        }

        fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
            if self.0.replace(false) {
                return Err(io::Error::from_raw_os_error(libc::EIO));
            }
            self.1.as_slice().read_exact_at(buffer, offset)
        }
    }

    /// A read that fails condemns no file.
    #[test]
    fn failed_reads() {
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        for path in ["/usr/lib/libruby-3.1.so.3.1", "/usr/bin/app"] {
            let file = Failing(Cell::new(true), own.clone());
            assert_eq!(Content::of(&file, Path::new(path)).unwrap_err().raw_os_error(), Some(libc::EIO));
            assert_eq!(Content::of(&file, Path::new(path)).unwrap(), Content::Other);
        }
    }
}
