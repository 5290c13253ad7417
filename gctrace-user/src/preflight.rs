//! Requirements that are checked before anything is loaded, each with its remedy.

use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
    process::Child,
    sync::OnceLock,
};

use crate::host::proc_root;
use rustix::{
    mount::{MountFlags, mount},
    process::{Pid, Resource, Rlimit, getrlimit, prlimit, setrlimit},
    thread::{CapabilitySet, CapabilitySets},
};

/// A missing privilege or kernel feature.
#[derive(Debug, thiserror::Error)]
pub enum Missing {
    /// Not root, or root without the required capabilities.
    #[error("{}", unprivileged(*uid, lacking))]
    Privilege {
        /// Effective user.
        uid: u32,
        /// What is missing.
        lacking: Lacking,
    },
    /// Inside a user namespace.
    #[error("{USER_NAMESPACE}: {OUTSIDE_OF_IT}")]
    UserNamespace,
    /// `/proc` is missing or something else.
    #[error("/proc is not mounted: {MOUNT_PROC}")]
    NoProc,
    /// `/sys` is missing or something else.
    #[error("/sys is not mounted: {MOUNT_SYS}")]
    NoSys,
    /// Inside a container.
    #[error(
        "gctrace runs in its own pid namespace (a container), where the kernel's pids are not valid: run it on the \
         host, start the container with --pid=host, or mount the host's /proc in it and name that with --proc"
    )]
    PidNamespace,
    /// `--proc` does not name the host's `/proc`.
    #[error("--proc {}: {reason}; it must be the host's /proc, e.g. `-v /proc:/host/proc` and --proc /host/proc", proc.display())]
    Proc {
        /// The folder.
        proc: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A kernel older than the BPF ring buffer.
    #[error(
        "this kernel is {0}; gctrace needs Linux 5.10 or later (BPF tail calls in programs with functions)"
    )]
    Kernel(String),
    /// tracefs is not mounted, and could not be mounted.
    #[error(
        "tracefs is not mounted and mounting it failed ({0}): run `mount -t tracefs nodev /sys/kernel/tracing` as root"
    )]
    Tracefs(io::Error),
    /// Kernel without uprobes.
    #[error("this kernel has no uprobes ({0} is missing): it needs CONFIG_UPROBES and CONFIG_PERF_EVENTS")]
    Uprobes(&'static str),
}

/// A privilege that a run needs.
#[derive(Debug)]
pub struct Privilege {
    /// Its name.
    pub name: &'static str,
    /// Any of these is enough.
    any_of: CapabilitySet,
    /// What it is needed for.
    pub purpose: &'static str,
}

impl Privilege {
    /// Whether this process has it.
    pub fn is_held(&self, effective: CapabilitySet) -> bool {
        effective.intersects(self.any_of)
    }
}

/// The missing privileges.
#[derive(Debug)]
pub struct Lacking(Vec<&'static Privilege>);

/// What root can do about missing capabilities.
pub const GIVE_CAPABILITIES: &str = "a container (--cap-drop, or none added), a service unit (CapabilityBoundingSet=) or the program that \
                                     started gctrace may have dropped what is missing: grant it there, or run gctrace outside";

/// What a user namespace means for gctrace.
const USER_NAMESPACE: &str = "gctrace runs in a user namespace (that of a rootless container, --userns or `unshare --user`), whose capabilities do \
                              not count for the kernel's BPF and probes";

/// What to do in a user namespace.
pub const OUTSIDE_OF_IT: &str = "run gctrace on the host, or in a container without a user namespace (`docker run --userns=host`, \
                                 `sudo podman run`)";

/// How `/proc` is mounted.
pub const MOUNT_PROC: &str =
    "run `mount -t proc proc /proc` as root; container engines mount it by themselves";

/// How `/sys` is mounted.
pub const MOUNT_SYS: &str =
    "run `mount -t sysfs sysfs /sys` as root, or start the container with the host's (`-v /sys:/sys:ro`)";

/// The message about missing privileges.
fn unprivileged(uid: u32, lacking: &Lacking) -> String {
    if uid == 0 {
        return format!("gctrace runs as root, but lacks {lacking}: {GIVE_CAPABILITIES}");
    }
    format!(
        "gctrace needs root: run it with sudo. (As uid {uid} it lacks {lacking}; a service or container can be given these capabilities \
         instead.)"
    )
}

/// The remedy for missing privileges.
pub fn remedy(uid: u32) -> &'static str {
    if uid == 0 {
        GIVE_CAPABILITIES
    } else {
        "run it with sudo, or give the service or container the missing capabilities"
    }
}

impl Lacking {
    /// The privileges that `effective` does not include; `None`: nothing is missing.
    pub fn of(effective: CapabilitySet) -> Option<Self> {
        let lacking: Vec<_> = PRIVILEGES.iter().filter(|privilege| !privilege.is_held(effective)).collect();
        (!lacking.is_empty()).then_some(Self(lacking))
    }

    /// Their names.
    pub fn names(&self) -> String {
        let names: Vec<&str> = self.0.iter().map(|privilege| privilege.name).collect();
        names.join(", ")
    }
}

impl fmt::Display for Lacking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, privilege) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(f, "{comma}{} ({})", privilege.name, privilege.purpose)?;
        }
        Ok(())
    }
}

/// Privileges that a run needs (include/uapi/linux/capability.h). The smaller `CAP_BPF`, `CAP_PERFMON` and
/// `CAP_CHECKPOINT_RESTORE` do not replace `CAP_SYS_ADMIN`: since 6.16, and in stable updates of older series, the kernel
/// requires it for uprobes (`perf_uprobe_event_init`, kernel/events/core.c).
pub static PRIVILEGES: [Privilege; 3] = [
    Privilege {
        name: "CAP_SYS_ADMIN",
        any_of: CapabilitySet::SYS_ADMIN,
        purpose: "loads BPF programs, attaches probes and opens the files that processes have mapped",
    },
    Privilege { name: "CAP_SYS_PTRACE", any_of: CapabilitySet::SYS_PTRACE, purpose: "reads other processes" },
    Privilege {
        name: "CAP_DAC_READ_SEARCH",
        any_of: CapabilitySet::DAC_READ_SEARCH.union(CapabilitySet::DAC_OVERRIDE),
        purpose: "reads tracefs and other users' processes",
    },
];

const TRACEFS: [&str; 2] = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];
const UPROBE_PMU: &str = "/sys/bus/event_source/devices/uprobe/type";
/// The first user namespace (`PROC_USER_INIT_INO`, `include/linux/proc_ns.h`).
const HOST_USERS: &str = "user:[4026531837]";

/// Results of the checks.
#[derive(Debug)]
pub struct Host {
    /// Mount point of tracefs.
    pub tracefs: PathBuf,
}

/// Checks the requirements, mounts tracefs if necessary, and raises the limit of open files (one per probe).
pub fn check() -> Result<Host, Missing> {
    proc()?;
    user_namespace()?;
    privileges()?;
    pid_namespace()?;
    kernel()?;
    sys()?;
    uprobes()?;
    raise_open_files();
    raise_locked_memory();
    Ok(Host { tracefs: tracefs()? })
}

/// Drops capabilities that a run does not need, irrevocably, also for programs that it executes. `writes`: files are written to places
/// where root needs `CAP_DAC_OVERRIDE`; `gives`: these files are given to another user; `requests`: packets of servers are inspected
/// (`bpf_prog_attach_check_attach_type`, kernel/bpf/syscall.c). Must be called before any thread is started, because each
/// thread has its own capabilities.
pub fn drop_privileges(writes: bool, gives: bool, requests: bool) {
    let keep = PRIVILEGES.iter().fold(CapabilitySet::empty(), |keep, privilege| keep | privilege.any_of);
    // `CAP_LEASE` is for leases of files that belong to other users (`generic_setlease`, fs/locks.c).
    let optional = CapabilitySet::SYSLOG | CapabilitySet::LEASE;
    let mut keep = keep.difference(CapabilitySet::DAC_OVERRIDE) | optional;
    if writes {
        keep |= CapabilitySet::DAC_OVERRIDE;
        if gives {
            keep |= CapabilitySet::CHOWN;
        }
    }
    if requests {
        keep |= CapabilitySet::NET_ADMIN;
    }
    if let Err(error) = rustix::thread::set_no_new_privs(true) {
        log::info!("no_new_privs: {error}");
    }
    let dropped = rustix::thread::capabilities(None).and_then(|sets| {
        let permitted = sets.permitted & keep;
        let effective = sets.effective & keep;
        let sets = CapabilitySets { effective, permitted, inheritable: CapabilitySet::empty() };
        rustix::thread::clear_ambient_capability_set()?;
        rustix::thread::set_capabilities(None, sets)
    });
    if let Err(error) = dropped {
        // Excess capabilities are no reason to fail.
        log::info!("capabilities that are not needed are not dropped: {error}");
    }
}

/// The effective capabilities of this process.
pub fn capabilities() -> CapabilitySet {
    rustix::thread::capabilities(None).map_or(CapabilitySet::empty(), |sets| sets.effective)
}

/// The privileges that a run needs and this process lacks.
pub fn lacking() -> Option<Lacking> {
    Lacking::of(capabilities())
}

/// Whether this process has the privileges for a run.
pub fn privileges() -> Result<(), Missing> {
    let uid = rustix::process::geteuid().as_raw();
    lacking().map_or(Ok(()), |lacking| Err(Missing::Privilege { uid, lacking }))
}

/// Whether gctrace is in the host's user namespace: only its capabilities count for BPF and perf events (`capable`, kernel/capability.c).
pub fn user_namespace() -> Result<(), Missing> {
    // A kernel without user namespaces has no such file.
    let other = fs::read_link("/proc/self/ns/user").is_ok_and(|link| link.as_os_str() != HOST_USERS);
    if other { Err(Missing::UserNamespace) } else { Ok(()) }
}

/// Whether `/proc` is mounted. Everything about processes, and about gctrace itself, is read there.
pub fn proc() -> Result<(), Missing> {
    if Path::new("/proc/self/stat").exists() { Ok(()) } else { Err(Missing::NoProc) }
}

/// Whether `/sys` is mounted. The kernel describes its CPUs, probes and types there.
pub fn sys() -> Result<(), Missing> {
    let there = ["/sys/devices/system/cpu/online", UPROBE_PMU].iter().any(|path| Path::new(path).exists());
    if there { Ok(()) } else { Err(Missing::NoSys) }
}

/// Whether pids in the `/proc` that is read are those in the kernel's events.
pub fn pid_namespace() -> Result<(), Missing> {
    let wrong = |reason| Missing::Proc { proc: proc_root::root().to_owned(), reason };
    match (proc_root::shows_the_host(), proc_root::is_named()) {
        (Ok(true), _) => Ok(()),
        (Ok(false), false) => Err(Missing::PidNamespace),
        (Ok(false), true) => Err(wrong("it shows the processes of another pid namespace".to_owned())),
        (Err(error), _) => Err(wrong(format!("its processes cannot be inspected: {error}"))),
    }
}

/// The oldest kernel that loads the programs. Before, the verifier refuses those that take stacks: "`tail_calls` are not allowed in programs with
/// bpf-to-bpf calls" (`check_map_func_compatibility`, kernel/bpf/verifier.c, up to Linux 5.9). Ring buffers exist from 5.8 on.
const OLDEST: (u32, u32) = (5, 10);

/// Whether the kernel is recent enough.
pub fn kernel() -> Result<(), Missing> {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    if parse_release(&release).is_some_and(|version| version < OLDEST) {
        return Err(Missing::Kernel(release));
    }
    Ok(())
}

/// Whether the kernel has uprobes.
pub fn uprobes() -> Result<(), Missing> {
    if Path::new(UPROBE_PMU).exists() { Ok(()) } else { Err(Missing::Uprobes(UPROBE_PMU)) }
}

/// Whether this process may mount file systems.
pub fn may_mount() -> bool {
    capabilities().contains(CapabilitySet::SYS_ADMIN)
}

/// Mount point of tracefs, `None` if it is not mounted. `Err`: unknown, because this process lacks permission to look.
pub fn mounted_tracefs() -> io::Result<Option<PathBuf>> {
    let mut denied = None;
    for dir in TRACEFS {
        match Path::new(dir).join("events").metadata() {
            Ok(_) => return Ok(Some(PathBuf::from(dir))),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => denied = Some(error),
            Err(_) => {}
        }
    }
    denied.map_or(Ok(None), Err)
}

fn tracefs() -> Result<PathBuf, Missing> {
    if let Ok(Some(dir)) = mounted_tracefs() {
        return Ok(dir);
    }
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount("nodev", TRACEFS[0], "tracefs", flags, None).map_err(|error| Missing::Tracefs(error.into()))?;
    log::info!("mounted tracefs on {}", TRACEFS[0]);
    Ok(PathBuf::from(TRACEFS[0]))
}

/// The original values of the limits that gctrace raises.
static OPEN_FILES: OnceLock<Rlimit> = OnceLock::new();
static LOCKED_MEMORY: OnceLock<Rlimit> = OnceLock::new();

/// Starts a command with the user's limits instead of those that gctrace raised: programs behave differently with other limits. gctrace
/// itself has the user's limits during the start. If gctrace has more files open than the user's limit, no process could be started
/// that way; the limit of the command is then set right after its start.
///
/// # Errors
///
/// It cannot be started.
pub fn with_users_limits(start: impl FnOnce() -> io::Result<Child>) -> io::Result<Child> {
    let (mut lowered, mut later) = (Vec::new(), None);
    for (resource, before) in [(Resource::Nofile, &OPEN_FILES), (Resource::Memlock, &LOCKED_MEMORY)] {
        let raised = getrlimit(resource);
        let Some(before) = before.get().filter(|before| before.current != raised.current) else { continue };
        if resource == Resource::Nofile
            && before.current.is_some_and(|limit| limit <= highest_descriptor() + SPARE)
        {
            later = Some(Rlimit { current: before.current, maximum: raised.maximum });
            continue;
        }
        match setrlimit(resource, Rlimit { current: before.current, maximum: raised.maximum }) {
            Ok(()) => lowered.push((resource, raised)),
            Err(error) => log::info!("the command has gctrace's limit ({resource:?}): {error}"),
        }
    }
    let started = start();
    for (resource, raised) in lowered {
        if let Err(error) = setrlimit(resource, raised) {
            log::warn!("gctrace has the command's limit from now on ({resource:?}): {error}");
        }
    }
    if let (Ok(child), Some(limit)) = (&started, later) {
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        if let Err(error) = prlimit(pid, Resource::Nofile, limit) {
            log::info!("the command has gctrace's limit of open files: {error}");
        }
    }
    started
}

/// Number of descriptors that starting a process needs.
const SPARE: u64 = 16;

/// The highest open descriptor of gctrace.
fn highest_descriptor() -> u64 {
    let own = fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    own.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).max().unwrap_or_default()
}

/// Raises the limit of open files. Each probe needs a descriptor: the usual soft limit of 1024 is too low for a host with many Rubies.
pub fn raise_open_files() {
    let limit = getrlimit(Resource::Nofile);
    // Only once: a second start must not take the raised limit for the user's own.
    let _set_before = OPEN_FILES.set(limit);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        log::info!("the limit of open files stays at {:?}: {error}", limit.current);
    }
}

/// Whether this kernel charges BPF maps to the user's locked memory, as kernels before 5.11 do.
pub fn locks_maps() -> bool {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    parse_release(&release).is_some_and(|version| version < (5, 11))
}

/// Raises the limit of locked memory on kernels that charge maps to it: the usual limit of 64 KiB is less than one ring.
pub fn raise_locked_memory() {
    if !locks_maps() {
        return;
    }
    let _set_before = LOCKED_MEMORY.set(getrlimit(Resource::Memlock));
    let unlimited = Rlimit { current: None, maximum: None };
    if let Err(error) = setrlimit(Resource::Memlock, unlimited) {
        log::info!("the limit of locked memory stays as it is: {error}");
    }
}

fn parse_release(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Releases of distributions are parsed; an unknown format is not taken for an old kernel.
    #[test]
    fn releases() {
        assert_eq!(parse_release("6.18.44-fc-v657"), Some((6, 18)));
        assert_eq!(parse_release("5.4.0-150-generic"), Some((5, 4)));
        assert_eq!(parse_release("strange"), None);
    }
    /// A missing file system is named with the command that mounts it, and a user namespace with a way out of it; here are none of these.
    #[test]
    fn surroundings() {
        for (missing, words) in [
            (Missing::NoProc, ["/proc is not mounted", "mount -t proc "]),
            (Missing::NoSys, ["/sys is not mounted", "-v /sys:/sys:ro"]),
            (Missing::UserNamespace, ["in a user namespace", "on the host"]),
        ] {
            let said = missing.to_string();
            assert!(words.iter().all(|word| said.contains(word)) && !said.contains("CONFIG_"), "{said}");
        }
        assert!(proc().is_ok() && sys().is_ok());
        let users = fs::read_link("/proc/self/ns/user").unwrap();
        assert_eq!(user_namespace().is_ok(), users.as_os_str() == HOST_USERS);
    }

    /// Root is not advised to use sudo, but learns what is missing and what may have dropped it.
    #[test]
    fn privileges_of_root() {
        let lacking = || Lacking::of(CapabilitySet::all().difference(CapabilitySet::SYS_PTRACE)).unwrap();
        let root = Missing::Privilege { uid: 0, lacking: lacking() }.to_string();
        assert!(root.contains("lacks CAP_SYS_PTRACE (reads other processes)"), "{root}");
        assert!(root.contains("CapabilityBoundingSet=") && !root.contains("sudo"), "{root}");
        assert!(!remedy(0).contains("sudo"));
        let other = Missing::Privilege { uid: 1000, lacking: lacking() }.to_string();
        assert!(other.contains("run it with sudo") && other.contains("uid 1000"), "{other}");
        assert!(Lacking::of(CapabilitySet::all()).is_none());
    }
}
