//! What must be there before anything is loaded, each with its remedy.

use std::{
    io,
    path::{Path, PathBuf},
};

use rustix::{
    mount::{MountFlags, mount},
    process::{Resource, Rlimit, getrlimit, setrlimit},
};

/// A missing privilege or kernel feature.
#[derive(Debug, thiserror::Error)]
pub enum Missing {
    /// Not root.
    #[error(
        "gctrace needs root (it is running as uid {0}): run it with sudo, or as a service with CAP_BPF, CAP_PERFMON, \
         CAP_SYS_PTRACE and CAP_SYS_ADMIN"
    )]
    Privilege(u32),
    /// A kernel older than the ring buffer.
    #[error("this kernel is {0}; gctrace needs Linux 5.8 or later (BPF ring buffer)")]
    Kernel(String),
    /// No tracefs, and it could not be mounted.
    #[error(
        "tracefs is not mounted and mounting it failed ({0}): run `mount -t tracefs nodev /sys/kernel/tracing` as root"
    )]
    Tracefs(io::Error),
    /// Kernel without uprobes.
    #[error("this kernel has no uprobes ({0} is missing): it needs CONFIG_UPROBES and CONFIG_PERF_EVENTS")]
    Uprobes(&'static str),
}

const TRACEFS: [&str; 2] = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];
const UPROBE_PMU: &str = "/sys/bus/event_source/devices/uprobe/type";

/// What the checks found.
#[derive(Debug)]
pub struct Host {
    /// Where tracefs is.
    pub tracefs: PathBuf,
}

/// Checks, mounts tracefs if need be, and raises the limit of open files (one per probe).
pub fn check() -> Result<Host, Missing> {
    let uid = rustix::process::geteuid();
    if !uid.is_root() {
        return Err(Missing::Privilege(uid.as_raw()));
    }
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    if parse_release(&release).is_some_and(|version| version < (5, 8)) {
        return Err(Missing::Kernel(release));
    }
    if !Path::new(UPROBE_PMU).exists() {
        return Err(Missing::Uprobes(UPROBE_PMU));
    }
    raise_open_files();
    Ok(Host { tracefs: tracefs()? })
}

fn tracefs() -> Result<PathBuf, Missing> {
    let mounted = |dir: &&str| Path::new(dir).join("events").is_dir();
    if let Some(dir) = TRACEFS.iter().find(|dir| mounted(dir)) {
        return Ok(PathBuf::from(dir));
    }
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount("nodev", TRACEFS[0], "tracefs", flags, None).map_err(|error| Missing::Tracefs(error.into()))?;
    log::info!("mounted tracefs on {}", TRACEFS[0]);
    Ok(PathBuf::from(TRACEFS[0]))
}

/// One descriptor per probe: the usual soft limit of 1024 is too low for a host with many Rubies.
fn raise_open_files() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        log::info!("the limit of open files stays at {:?}: {error}", limit.current);
    }
}

fn parse_release(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Releases of distributions parse; nonsense does not pass for an old kernel.
    #[test]
    fn releases() {
        assert_eq!(parse_release("6.18.44-fc-v657"), Some((6, 18)));
        assert_eq!(parse_release("5.4.0-150-generic"), Some((5, 4)));
        assert_eq!(parse_release("strange"), None);
    }
}
