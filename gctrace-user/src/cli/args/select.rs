//! Flags that select what is traced, of a run and of `gctrace top`.

use std::path::PathBuf;

use clap::Args as ClapArgs;

use crate::{
    cli::parse::{self, Pids},
    discover::Selection,
};

/// What to trace: the union of all that is given.
#[derive(Debug, ClapArgs)]
pub struct SelectArgs {
    /// Trace every Ruby process, running now or started later
    #[arg(long)]
    pub all_ruby: bool,

    /// Trace these processes and their descendants, now or later (repeatable, or a list: --pid 17,42, --pid "$(pgrep puma)");
    /// `gctrace 4242` is short for it. They may start a Ruby later. The run ends when all of them have ended
    #[arg(long = "pid", short = 'p', value_name = "PID", value_parser = parse::pids)]
    pub pids: Vec<Pids>,

    /// Trace these processes without their descendants; with a single pid, other Ruby processes are not slowed down
    #[arg(long = "only-pid", value_name = "PID", value_parser = parse::pids)]
    pub only_pids: Vec<Pids>,

    /// Trace Ruby programs of this name and their descendants, now or later: the name of the executable, of the script (with
    /// or without .rb), of the main thread, or the first word of a title such as `puma: cluster worker 0` (repeatable).
    /// Programs that end before their script or title can be read are counted, not traced
    #[arg(long = "name", value_name = "NAME")]
    pub names: Vec<String>,

    /// Trace the processes of this systemd unit, now or later, e.g. puma.service (repeatable)
    #[arg(long = "unit", value_name = "UNIT")]
    pub units: Vec<String>,

    /// Trace the processes in this cgroup or below it, now or later: a folder below /sys/fs/cgroup, or a path as in
    /// /proc/PID/cgroup, e.g. /system.slice/puma.service (repeatable)
    #[arg(long = "cgroup", value_name = "PATH")]
    pub cgroups: Vec<PathBuf>,

    /// Trace the processes in this container, now or later: its id, at least 8 digits of it, or its name (repeatable)
    #[arg(long = "container", value_name = "ID|NAME")]
    pub containers: Vec<String>,
}

/// Running processes to look at once, besides those named by pid.
#[derive(Debug, ClapArgs)]
pub struct RunningArgs {
    /// Also Ruby programs of this name that run now, and their descendants: the name of the executable, of the script (with or
    /// without .rb), of the main thread, or the first word of a title such as `puma: cluster worker 0` (repeatable)
    #[arg(long = "name", value_name = "NAME")]
    pub names: Vec<String>,

    /// Also the processes that this systemd unit has now, e.g. puma.service (repeatable)
    #[arg(long = "unit", value_name = "UNIT")]
    pub units: Vec<String>,

    /// Also the processes that are in this cgroup or below it now: a folder below /sys/fs/cgroup, or a path as in
    /// /proc/PID/cgroup (repeatable)
    #[arg(long = "cgroup", value_name = "PATH")]
    pub cgroups: Vec<PathBuf>,

    /// Also the processes that are in this container now: its id, at least 8 digits of it, or its name (repeatable)
    #[arg(long = "container", value_name = "ID|NAME")]
    pub containers: Vec<String>,
}

impl RunningArgs {
    /// The selection that these flags alone describe.
    pub(in crate::cli) fn selection(self, all: bool) -> Selection {
        let Self { names, units, cgroups, containers } = self;
        Selection { all, names, cgroups, units, containers, ..Selection::default() }
    }
}

impl SelectArgs {
    /// Whether no selecting flag is given.
    pub(in crate::cli) fn is_empty(&self) -> bool {
        let Self { all_ruby, pids, only_pids, names, units, cgroups, containers } = self;
        let lists = [names, units, containers];
        !all_ruby
            && pids.is_empty()
            && only_pids.is_empty()
            && cgroups.is_empty()
            && lists.iter().all(|list| list.is_empty())
    }
}
