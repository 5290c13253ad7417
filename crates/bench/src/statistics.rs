//! The kernel's own run statistics of BPF programs (Documentation/admin-guide/sysctl/kernel.rst, `bpf_stats_enabled`; Linux 5.1).

use std::{
    collections::BTreeMap,
    fs,
    path::PathBuf,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};

use xtask::util::Running;

const SWITCH: &str = "/proc/sys/kernel/bpf_stats_enabled";
/// `BPF_PROG_TYPE_KPROBE`, which is also the type of uprobes (include/uapi/linux/bpf.h).
pub(super) const KPROBE: u64 = 2;
/// `BPF_PROG_TYPE_PERF_EVENT`.
pub(super) const PERF_EVENT: u64 = 7;

/// The statistics are enabled until this is dropped or this process ends in any way, because they cost every program of the host time. To
/// that end, a shell that ignores Ctrl-C restores the old setting as soon as its input ends.
pub(super) struct Statistics {
    keeper: Running,
}

impl Statistics {
    /// Enables the statistics.
    pub(super) fn on() -> Result<Self> {
        let before = fs::read_to_string(SWITCH).with_context(|| format!("cannot read {SWITCH}"))?;
        let script = r#"trap "" INT TERM HUP; cat > /dev/null; echo "$1" > "$2""#;
        let mut command = Command::new("sh");
        command.args(["-c", script, "sh", before.trim(), SWITCH]).stdin(Stdio::piped());
        let keeper = Running::start(&mut command)?;
        fs::write(SWITCH, "1").with_context(|| format!("cannot write {SWITCH}"))?;
        Ok(Self { keeper })
    }
}

impl Drop for Statistics {
    fn drop(&mut self) {
        drop(self.keeper.child().stdin.take());
        let ended = self.keeper.wait(Duration::from_secs(10));
        if !ended.as_ref().is_ok_and(std::process::ExitStatus::success) {
            eprintln!("xtask: {SWITCH} may have stayed on: {ended:?}");
        }
    }
}

/// The statistics of a program so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Program {
    /// `BPF_PROG_TYPE_*`.
    pub(super) kind: u64,
    /// Hash of its instructions: the same in each run of the same gctrace.
    pub(super) tag: String,
    /// Number of runs.
    pub(super) runs: u64,
    /// Total run time, including the programs that it tail-called, nanoseconds.
    pub(super) ns: u64,
}

/// The BPF programs that a process has open.
pub(super) fn programs(pid: u32) -> Result<Vec<Program>> {
    let dir = PathBuf::from(format!("/proc/{pid}/fdinfo"));
    let mut programs = BTreeMap::new();
    for entry in fs::read_dir(&dir).with_context(|| format!("cannot list {}", dir.display()))? {
        // A descriptor may have been closed meanwhile.
        let text = fs::read_to_string(entry?.path()).unwrap_or_default();
        if let Some((id, program)) = program(&text).with_context(|| format!("unknown figures in {text}"))? {
            programs.insert(id, program);
        }
    }
    ensure!(!programs.is_empty(), "process {pid} has no BPF programs");
    Ok(programs.into_values().collect())
}

/// The program of one descriptor, with its id; `None` if the descriptor is not a program.
fn program(fdinfo: &str) -> Result<Option<(u64, Program)>> {
    let field = |name: &str| {
        let line = fdinfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.map(str::trim)
    };
    let number = |name: &str| -> Result<u64> {
        let text = field(name).with_context(|| format!("no {name}"))?;
        text.parse().with_context(|| format!("{name} is {text:?}"))
    };
    if field("prog_type").is_none() {
        return Ok(None);
    }
    let program = Program {
        kind: number("prog_type")?,
        tag: field("prog_tag").context("no prog_tag")?.to_owned(),
        runs: number("run_cnt")?,
        ns: number("run_time_ns")?,
    };
    Ok(Some((number("prog_id")?, program)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel's text for a program, for a link to one, and for a file; a kernel without statistics is an error, not zero.
    #[test]
    fn descriptors() {
        let text = "pos:\t0\nflags:\t02000002\nprog_type:\t2\nprog_jited:\t1\nprog_tag:\tbaf3e2ee3f2c3d0d\nmemlock:\t4096\n\
            prog_id:\t41\nrun_time_ns:\t36100\nrun_cnt:\t95\nrecursion_misses:\t0\n";
        let wanted = Program { kind: KPROBE, tag: "baf3e2ee3f2c3d0d".into(), runs: 95, ns: 36_100 };
        assert_eq!(program(text).unwrap(), Some((41, wanted)));
        for other in [
            "pos:\t0\nflags:\t0\n",
            "link_type:\tperf\nlink_id:\t4\nprog_tag:\tbaf3e2ee3f2c3d0d\nprog_id:\t41\n",
        ] {
            assert_eq!(program(other).unwrap(), None);
        }
        let old = text.replace("run_cnt", "other");
        assert_eq!(program(&old).unwrap_err().to_string(), "no run_cnt");
    }
}
