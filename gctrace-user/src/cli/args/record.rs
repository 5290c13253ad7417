//! Flags of `gctrace record` and `gctrace report`.

use std::{ffi::OsString, path::PathBuf};

use clap::Args as ClapArgs;

use super::{
    CacheArgs, keep::KeepArgs, look::LookArgs, output::OutputArgs, select::SelectArgs, usage::UsageError,
};
use crate::{
    aggregate::condition::Condition,
    cli::parse::{self, Moment, Pids},
    export::window::Window,
    trace_file::Header,
};

/// Flags of `gctrace record`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "Examples:\n  \
        sudo gctrace record --name puma --gvl --duration 1m -o puma.gctrace\n  \
        sudo gctrace record -o script.gctrace -- ruby script.rb\n  \
        sudo gctrace record --all-ruby -o app.gctrace --keep 10m --dump-on 'gc.pause > 200ms'\n  \
        \x20                                                  the last 10 minutes whenever a GC pause is long\n  \
        gctrace report puma.gctrace                        one screen about it\n  \
        gctrace report puma.gctrace --flamegraph cpu.svg   any output of a run\n  \
        ssh web-1 sudo gctrace record --name puma --duration 30s -o - | gctrace report -\n\n\
        Exit status: 0 done, 1 nothing matched, 2 error or bad usage, 3 missing privilege or kernel feature.\n\
        A recording can be read up to its last second if gctrace is killed (docs/recording.md).")]
pub struct RecordArgs {
    /// What to record.
    #[command(flatten)]
    pub select: SelectArgs,

    /// What to look at.
    #[command(flatten)]
    pub look: LookArgs,

    /// The recording; when its first part is written, it replaces a file of that name. `-`: standard output, e.g. for `ssh`. With --keep the beginning of
    /// the names of files
    #[arg(long, short, value_name = "FILE", value_parser = parse::output())]
    pub output: PathBuf,

    /// End the run when the recording has this size, e.g. 500MiB; what its end adds (sums of processes) comes on top
    #[arg(long, value_name = "SIZE", value_parser = parse::recorded, conflicts_with = "keep")]
    pub max_size: Option<u64>,

    /// Whether it is kept in memory.
    #[command(flatten)]
    pub keep: KeepArgs,

    /// Under sudo, run COMMAND as root and leave the file to root, not to the user who called sudo
    #[arg(long)]
    pub as_root: bool,

    /// Where the host's /proc is mounted, if gctrace runs in a container without the host's pids
    #[arg(long, value_name = "DIR", hide_short_help = true, conflicts_with = "command")]
    pub proc: Option<PathBuf>,

    /// The cache of analyses.
    #[command(flatten)]
    pub cache: CacheArgs,

    /// Pids: short for --pid
    #[arg(value_name = "PID", hide = true)]
    pub words: Vec<String>,

    /// Start this command and record it and everything it starts
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// Flags of `gctrace report`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "Examples:\n  \
        gctrace report puma.gctrace                        one screen: where the time went, what stands out\n  \
        gctrace report puma.gctrace -q                     the summary that a run prints at its end\n  \
        gctrace report puma.gctrace --lines                the lines of a run, too\n  \
        gctrace report puma.gctrace --format jsonl         the same as JSON lines\n  \
        gctrace report puma.gctrace --from 10s --to 1m     what was in between\n  \
        gctrace report puma.gctrace --flamegraph cpu.svg --firefox run.json.gz\n\n\
        Exit status: 0 done, 1 no process was recorded, 2 error, bad usage or a damaged recording.\n\
        No privilege is needed.")]
pub struct ReportFileArgs {
    /// The recording, written by `gctrace record` or --record
    #[arg(value_name = "FILE", value_parser = parse::recording())]
    pub file: PathBuf,

    /// Print what a run prints, with a line per cycle (--min-pause, --interval and --slower-than imply it)
    #[arg(long, conflicts_with = "quiet")]
    pub lines: bool,

    /// Begin here: a time after the beginning of the recording, e.g. 10s, a time of the day in UTC as lines have it, e.g. 14:00:41.979Z, or
    /// a date, e.g. 2026-11-23T14:00:00Z
    #[arg(long, value_name = "TIME", value_parser = parse::moment)]
    pub from: Option<Moment>,

    /// End there, likewise
    #[arg(long, value_name = "TIME", value_parser = parse::moment)]
    pub to: Option<Moment>,

    /// Only these processes (repeatable)
    #[arg(long = "pid", short = 'p', value_name = "PID", value_parser = parse::pids)]
    pub pids: Vec<Pids>,

    /// Only processes of this service (repeatable)
    #[arg(long = "service", value_name = "NAME")]
    pub services: Vec<String>,

    /// Only records of which this is true, e.g. 'gc.pause > 10ms and gc.kind = major' (docs/recording.md)
    #[arg(long = "where", value_name = "EXPR")]
    pub condition: Option<Condition>,

    /// What to write.
    #[command(flatten)]
    pub outputs: OutputArgs,
}

impl ReportFileArgs {
    /// The requested part of the recording.
    ///
    /// # Errors
    ///
    /// It ends before it begins.
    pub fn window(&self, header: &Header) -> Result<Window, UsageError> {
        let services = self.services.iter().cloned().collect();
        let part = part(header, self.from, self.to, &self.pids)?;
        Ok(Window { services, condition: self.condition.clone(), ..part })
    }
}

/// A part of a recording.
pub(in crate::cli) fn part(
    header: &Header,
    from: Option<Moment>,
    to: Option<Moment>,
    pids: &[Pids],
) -> Result<Window, UsageError> {
    let at = |moment: Moment| match moment {
        Moment::After(time) => {
            header.begun_ns.saturating_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
        }
        Moment::At(epoch_ns) => u64::try_from(epoch_ns.saturating_sub(header.clock.offsets().0)).unwrap_or(0),
        Moment::OfDay(ns) => {
            const DAY_NS: i64 = 86_400_000_000_000;
            // Lines have whole milliseconds: the first of them may seem to be earlier than the beginning.
            const EARLY_NS: i64 = 1_000_000;
            // Pages of a live run have what it has kept, which may begin days after the run.
            let from_ns = header.dump.as_ref().map_or(header.begun_ns, |dump| dump.from_ns);
            let after_ns = ns - header.clock.epoch_nanos(from_ns) + EARLY_NS;
            from_ns.saturating_add_signed(after_ns.rem_euclid(DAY_NS) - EARLY_NS)
        }
    };
    let (from_ns, to_ns) = (from.map(at), to.map(at));
    if let (Some(from_ns), Some(to_ns)) = (from_ns, to_ns)
        && from_ns >= to_ns
    {
        return Err(UsageError::NoTime);
    }
    let pids = pids.iter().flat_map(|pids| pids.0.iter().copied()).collect();
    Ok(Window { pids, from_ns, to_ns, ..Window::default() })
}
