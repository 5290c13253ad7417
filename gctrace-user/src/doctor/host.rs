//! Checks of the host: kernel, privileges, and relevant settings.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use super::report::{HostCheck, HostReport, Status, Untried, untried};
use crate::{
    bpf::{CheckResult, KernelCheck},
    host::proc_root,
    preflight::{self, Missing, PRIVILEGES},
};

/// Checks the host. `tracefs`: where it is mounted, or why that is unknown.
pub(super) fn examine(
    tracefs: &io::Result<Option<PathBuf>>,
    kernel: &KernelCheck,
    cache: Option<&Path>,
) -> HostReport {
    let uname = rustix::system::uname();
    let mut checks = vec![preflighted("kernel", preflight::kernel(), kernel_detail())];
    let (proc, sys) = (preflight::proc(), preflight::sys());
    let (has_proc, has_sys) = (proc.is_ok(), sys.is_ok());
    let without = |dir: &str, name: &str| check(name, Status::Unknown, format!("not checked, without {dir}"));
    let of_proc = |name: &str, result, detail| {
        if has_proc { preflighted(name, result, detail) } else { without("/proc", name) }
    };
    checks.push(preflighted("proc", proc, "mounted".to_owned()));
    checks.push(of_proc("user_namespace", preflight::user_namespace(), "the host's own".to_owned()));
    checks.extend(privileges());
    checks.push(of_proc("pid_namespace", preflight::pid_namespace(), pids_detail()));
    checks.push(container());
    checks.push(preflighted("sys", sys, "mounted".to_owned()));
    checks.push(if has_sys {
        preflighted("uprobes", preflight::uprobes(), "built into the kernel".to_owned())
    } else {
        without("/sys", "uprobes")
    });
    checks.push(mounted_tracefs(tracefs));
    checks.extend(bpf(kernel, matches!(tracefs, Ok(Some(_)))));
    checks.extend(locked_memory());
    checks.extend(settings());
    checks.extend([bpffs(), cgroups(), cached(cache)]);
    HostReport {
        hostname: uname.nodename().to_string_lossy().into_owned(),
        kernel: uname.release().to_string_lossy().into_owned(),
        machine: uname.machine().to_string_lossy().into_owned(),
        uid: rustix::process::geteuid().as_raw(),
        checks,
        verified: kernel.verified.clone(),
    }
}

fn check(name: &str, status: Status, detail: impl Into<String>) -> HostCheck {
    HostCheck { name: name.to_owned(), status, detail: detail.into(), remedy: None }
}

impl HostCheck {
    fn with(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = Some(remedy.into());
        self
    }
}

/// A check that a run fails without. What the message of the error ends with is not repeated if it is the remedy.
fn preflighted(name: &str, result: Result<(), Missing>, detail: String) -> HostCheck {
    match result {
        Ok(()) => check(name, Status::Ok, detail),
        Err(missing) => {
            let text = missing.to_string();
            let remedy = match &missing {
                Missing::PidNamespace => {
                    "run gctrace on the host, start the container with --pid=host, or give it the host's /proc (--proc)"
                }
                Missing::Proc { .. } => "mount the host's /proc into the container and name it with --proc",
                Missing::UserNamespace => preflight::OUTSIDE_OF_IT,
                Missing::NoProc => preflight::MOUNT_PROC,
                Missing::NoSys => preflight::MOUNT_SYS,
                Missing::Kernel(_) => "boot Linux 5.10 or later",
                Missing::Uprobes(_) => "boot a kernel with CONFIG_UPROBES and CONFIG_PERF_EVENTS",
                Missing::Privilege { .. } | Missing::Tracefs(_) => "run gctrace with sudo",
            };
            let detail = text.strip_suffix(remedy).map_or(text.as_str(), |text| text.trim_end_matches(": "));
            check(name, Status::Missing, detail).with(remedy)
        }
    }
}

fn pids_detail() -> String {
    if proc_root::shares_pids() {
        return "the host's own".to_owned();
    }
    format!(
        "separate, the host's processes are in {}; native frames and a command need the host's pid namespace",
        proc_root::root().display()
    )
}

fn kernel_detail() -> String {
    let uname = rustix::system::uname();
    format!("Linux {}, 5.10 or later is needed", uname.release().to_string_lossy())
}

fn privileges() -> Vec<HostCheck> {
    let effective = preflight::capabilities();
    let counts = preflight::user_namespace().is_ok();
    let one = |privilege: &preflight::Privilege| {
        let name = privilege.name.to_lowercase();
        if !counts && privilege.is_held(effective) {
            let detail =
                format!("held in a user namespace only, where it does not count; it {}", privilege.purpose);
            return check(&name, Status::Missing, detail).with(preflight::OUTSIDE_OF_IT);
        }
        if privilege.is_held(effective) {
            return check(&name, Status::Ok, format!("held; {}", privilege.purpose));
        }
        check(&name, Status::Missing, format!("not held; it {}", privilege.purpose))
            .with(preflight::remedy(rustix::process::geteuid().as_raw()))
    };
    PRIVILEGES.iter().map(one).collect()
}

/// Only informative: what matters is the pid namespace.
fn container() -> HostCheck {
    let marks = ["/.dockerenv", "/run/.containerenv"];
    let named = fs::read_to_string("/run/systemd/container").ok().map(|name| name.trim().to_owned());
    match named.or_else(|| marks.iter().find(|mark| Path::new(mark).exists()).map(|m| (*m).to_owned())) {
        Some(mark) => check("container", Status::Info, format!("gctrace seems to run inside one: {mark}")),
        None => check("container", Status::Info, "no sign that gctrace runs inside one"),
    }
}

fn mounted_tracefs(tracefs: &io::Result<Option<PathBuf>>) -> HostCheck {
    match tracefs {
        Ok(Some(dir)) => check("tracefs", Status::Ok, format!("mounted on {}", dir.display())),
        Ok(None) if preflight::sys().is_err() => {
            check("tracefs", Status::Unknown, "not checked, without /sys")
        }
        Ok(None) if preflight::may_mount() => {
            check("tracefs", Status::Info, "not mounted; a run mounts it on /sys/kernel/tracing")
        }
        Ok(None) => {
            check("tracefs", Status::Missing, "not mounted, and CAP_SYS_ADMIN to mount it is not held")
                .with("run `mount -t tracefs nodev /sys/kernel/tracing` as root")
        }
        Err(error) => check("tracefs", Status::Unknown, format!("not checked: {error}"))
            .with("run gctrace doctor with sudo"),
    }
}

/// The number of verified instructions, if the kernel reports it.
fn verified(kernel: &KernelCheck) -> String {
    let count = kernel.verified.len();
    kernel.verified.first().map_or_else(
        || "all loaded and verified".to_owned(),
        |(program, most)| {
            format!("{count} loaded and verified; the verifier walked {most} instructions at most ({program}) of 1000000")
        },
    )
}

/// The results of trying BPF. Without privileges, for example, a failure says nothing about the kernel.
fn bpf(kernel: &KernelCheck, tracefs: bool) -> Vec<HostCheck> {
    let untried = untried();
    let tried =
        |name: &str, tried: &CheckResult, works: &str, status: Status, remedy: &str| match (tried, untried) {
            (Ok(()), _) => check(name, Status::Ok, works),
            (Err(error), Some(Untried { why, first, tells })) => {
                let detail = if tells {
                    format!("not checked, {why}: {error}")
                } else {
                    format!("not checked, {why}")
                };
                check(name, Status::Unknown, detail).with(first)
            }
            (Err(error), None) => check(name, status, error.clone()).with(remedy),
        };
    // What needs loaded programs was not tried without them: that says nothing about the kernel, either.
    let with_programs =
        |name: &str, outcome: &CheckResult, works: &str, status: Status, remedy: &str| match outcome {
            Err(error) if untried.is_none() && kernel.programs.is_err() => {
                check(name, Status::Unknown, error.clone())
            }
            outcome => tried(name, outcome, works, status, remedy),
        };
    let config = "check that the kernel has CONFIG_BPF_SYSCALL and CONFIG_BPF_EVENTS, and that no security policy (lockdown, seccomp, \
                  SELinux) forbids BPF";
    let ring_buffer = match preflight::kernel() {
        Ok(()) => config,
        Err(_) => "boot Linux 5.10 or later",
    };
    let mut checks = vec![
        tried("bpf_ring_buffer", &kernel.ring_buffer, "a map was created", Status::Missing, ring_buffer),
        tried("bpf_programs", &kernel.programs, &verified(kernel), Status::Missing, config),
        with_programs(
            "bpf_cookies",
            &kernel.cookies,
            "given to uprobes",
            Status::Limited,
            "no action is needed: without cookies, the first collections of a process that starts during a run can be \
             missed",
        ),
        with_programs(
            "uprobe_attach",
            &kernel.uprobe,
            "attached to gctrace's own code and detached",
            Status::Missing,
            "check `dmesg` and the security policy (lockdown, SELinux): uprobes are refused",
        ),
        tried(
            "perf_events",
            &kernel.mappings,
            "new executable mappings can be watched",
            Status::Missing,
            "check the security policy: perf_event_open is refused (seccomp does so in many containers)",
        ),
        tried(
            "kernel_types",
            &kernel.kernel_types,
            "BTF describes threads, memory and sockets",
            Status::Limited,
            "boot a kernel with CONFIG_DEBUG_INFO_BTF: without its types there are no stacks and per-thread counters of \
             Ruby 4.0, no queue times and sizes of responses, no states of threads without the GVL",
        ),
        tried(
            "memory_counters",
            &kernel.memory,
            "RSS is read in the kernel, at its event",
            Status::Limited,
            "RSS is approximate or read after its event, as `rss_source` says (docs/memory.md)",
        ),
    ];
    for (name, outcome) in &kernel.tracepoints {
        let id = format!("tracepoint {name}");
        checks.push(if tracefs || untried.is_some() {
            with_programs(
                &id,
                outcome,
                "attached and detached",
                Status::Missing,
                "check that tracefs has this tracepoint, and that no security policy (lockdown, SELinux) forbids it",
            )
        } else {
            check(&id, Status::Unknown, "not checked: tracefs is not mounted")
        });
    }
    checks
}

/// `None` on kernels where the limit does not matter.
fn locked_memory() -> Option<HostCheck> {
    if !preflight::locks_maps() {
        return None;
    }
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock);
    Some(match limit.current {
        None => check("memlock", Status::Ok, "unlimited"),
        Some(bytes) => {
            check("memlock", Status::Limited, format!("{bytes} bytes, and BPF maps count on this kernel"))
                .with("run `ulimit -l unlimited` before, or set LimitMEMLOCK=infinity in the service")
        }
    })
}

/// Settings that can restrict gctrace; the attempts above show whether they do here.
fn settings() -> Vec<HostCheck> {
    let mut checks = Vec::new();
    let of = if preflight::user_namespace().is_ok() { "" } else { " on the host" };
    let read = |path: &str| fs::read_to_string(path).map(|text| text.trim().to_owned());
    checks.push(match read("/sys/kernel/security/lockdown") {
        Ok(text) => match text.split_once('[').and_then(|(_, rest)| rest.split_once(']')) {
            Some(("confidentiality", _)) => check(
                "lockdown",
                Status::Missing,
                "confidentiality: it forbids tracefs and reading memory from BPF",
            )
            .with("boot with lockdown=integrity or none"),
            Some((mode, _)) => {
                check("lockdown", Status::Ok, format!("{mode}: forbids nothing that gctrace does"))
            }
            None => check("lockdown", Status::Unknown, format!("not understood: {text}")),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => check("lockdown", Status::Ok, "not in use"),
        Err(error) => check("lockdown", Status::Unknown, format!("not checked: {error}")),
    });
    for (name, path) in [
        ("perf_event_paranoid", "/proc/sys/kernel/perf_event_paranoid"),
        ("unprivileged_bpf_disabled", "/proc/sys/kernel/unprivileged_bpf_disabled"),
    ] {
        let Ok(value) = read(path) else { continue };
        checks.push(check(name, Status::Info, format!("{value}; does not matter with CAP_SYS_ADMIN{of}")));
    }
    if let Ok(scope) = read("/proc/sys/kernel/yama/ptrace_scope") {
        checks.push(if scope == "3" {
            check("ptrace_scope", Status::Limited, "3: no process may read another one's memory")
                .with("no action is needed: each process is proven at its first GC instead of beforehand")
        } else {
            check("ptrace_scope", Status::Info, format!("{scope}; does not matter with CAP_SYS_PTRACE{of}"))
        });
    }
    checks
}

fn bpffs() -> HostCheck {
    let mounted = fs::read_to_string("/proc/self/mounts")
        .is_ok_and(|text| text.lines().any(|line| line.split(' ').nth(2) == Some("bpf")));
    let detail = if mounted { "mounted; not needed" } else { "not mounted; not needed" };
    check("bpffs", Status::Info, detail)
}

fn cgroups() -> HostCheck {
    let has = |path: &str| Path::new(path).exists();
    let detail = if has("/sys/fs/cgroup/cgroup.controllers") {
        "v2"
    } else if has("/sys/fs/cgroup/unified/cgroup.controllers") {
        "v1 with v2 beside it (hybrid)"
    } else if has("/sys/fs/cgroup") {
        "v1"
    } else {
        "none mounted on /sys/fs/cgroup"
    };
    check("cgroups", Status::Info, detail)
}

fn cached(cache: Option<&Path>) -> HostCheck {
    match cache {
        Some(path) => check("cache", Status::Info, format!("analyses are stored in {}", path.display())),
        None => {
            check("cache", Status::Info, "analyses are not stored: every start analyses every Ruby again")
        }
    }
}
