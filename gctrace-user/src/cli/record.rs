//! `gctrace record` is a run that writes everything to a file; `gctrace report` writes from that file what a run writes.

use std::{ffi::OsString, path::PathBuf};

use clap::{Args as ClapArgs, Parser as _};

use super::{
    Args, Settings, UsageError,
    args::{CacheArgs, FormatArg, GvlArg},
    keep_args::KeepArgs,
    look_args::LookArgs,
    output_args::OutputArgs,
    parse::{self, Moment, Pids},
    reports::FILTERS,
    select_args::SelectArgs,
    settings::Format,
};
use crate::{
    aggregate::condition::Condition,
    export::{digest::Recorded, window::Window},
    trace_file::{Header, Subjects},
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

    /// The recording; a file that is there is emptied first. `-`: standard output, e.g. for `ssh`. With --keep the beginning of
    /// the names of files
    #[arg(long, short, value_name = "FILE")]
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
    #[arg(long, value_name = "DIR", hide_short_help = true)]
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

    /// Begin here: a time after the begin of the recording, e.g. 10s, or a date, e.g. 2026-11-23T14:00:00Z
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
    /// The part of the recording that was asked for.
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
pub(super) fn part(
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

/// A run without flags.
fn bare() -> Result<Args, UsageError> {
    Args::try_parse_from(["gctrace"]).map_err(|error| UsageError::Flags(error.to_string()))
}

/// The run that `gctrace record` is.
///
/// # Errors
///
/// The selection is not valid, or the file cannot be a recording.
pub fn record(args: RecordArgs, own_pid: u32) -> Result<Settings, UsageError> {
    let RecordArgs { select, look, output, max_size, keep, as_root, proc: _, cache, words, command } = args;
    if output.as_os_str() == "-" {
        if keep.keep.is_some() {
            return Err(UsageError::Dash);
        }
        if !command.is_empty() {
            return Err(UsageError::CommandOnStdout);
        }
    }
    let record = Some(output);
    let mut run = Args { select, look, record, keep, as_root, cache, words, command, ..bare()? };
    run.outputs.reports.quiet = true;
    let settings = Settings::resolve(run, own_pid)?;
    Ok(Settings { record_most: max_size, ..settings })
}

/// What `gctrace report` writes of a recording: what a run with its subjects writes.
///
/// # Errors
///
/// The outputs contradict each other, or the recording lacks what they show.
pub fn report(args: ReportFileArgs, header: &Header) -> Result<Settings, UsageError> {
    let ReportFileArgs { file, lines, from: _, to: _, pids: _, services: _, condition: _, mut outputs } =
        args;
    let Subjects { samples, wall, gvl, requests, alloc } = header.subjects;
    let reports = &mut outputs.reports;
    let of_requests = [
        ("--slower-than", reports.slower_than.is_some()),
        ("--by", reports.by.is_some()),
        ("--endpoint", !outputs.profile.endpoints.is_empty()),
    ];
    for (flag, given) in of_requests {
        if given && !requests {
            return Err(UsageError::NoRequests(flag));
        }
    }
    let asked =
        lines || reports.min_pause.is_some() || reports.interval.is_some() || reports.slower_than.is_some();
    let text = Format::from(outputs.format) == Format::Text;
    let plain = text && !asked && !reports.quiet && reports.by.is_none() && outputs.output.is_none();
    let flags = [("--gvl", gvl), ("--requests", requests), ("--alloc", alloc)];
    let one_screen = plain.then(|| Recorded {
        path: file.display().to_string(),
        host: header.host.name.clone(),
        clock: header.clock,
        begun_ns: header.begun_ns,
        samples,
        gvl,
        lacking: flags.into_iter().filter_map(|(flag, there)| (!there).then_some(flag)).collect(),
    });
    reports.quiet |= !asked && text;
    let mut run = Args { outputs, ..bare()? };
    // Nothing is selected here: the recording has what was.
    run.select.all_ruby = true;
    let gvl = gvl.then_some(GvlArg::Exact);
    run.look = LookArgs { rate: samples.then_some(1), wall, gvl, requests, ..run.look };
    run.look.optional.alloc = alloc;
    let hottest = samples && run.outputs.format == FormatArg::Text && one_screen.is_none();
    // No process has pid 0: gctrace itself is not looked for.
    let settings = Settings::resolve(run, 0)?;
    let mut notes = settings.notes;
    // Whether samples, threads off their CPU and allocation are in it are facts of the recording, not flags.
    let facts = ["--wall", "--rate", "--alloc"];
    notes.retain(|note| !facts.iter().any(|fact| note.starts_with(fact)));
    if one_screen.is_some()
        && settings.filter.is_any()
        && settings.profiles.is_empty()
        && !notes.contains(&FILTERS)
    {
        notes.push(FILTERS);
    }
    Ok(Settings { one_screen, notes, hottest, ..settings })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{aggregate::request_summary::By, cli::Subcommand, clock::WallClock, trace_file::Host};

    fn parsed(words: &[&str]) -> Subcommand {
        Args::try_parse_from([&["gctrace"], words].concat()).unwrap().subcommand.unwrap()
    }

    fn header(samples: bool, requests: bool) -> Header {
        let subjects = Subjects { samples, wall: true, gvl: true, requests, alloc: false };
        Header {
            gctrace: String::new(),
            clock: WallClock::with_offsets(0, 0),
            begun_ns: 0,
            subjects,
            host: Host::default(),
            dump: None,
        }
    }

    /// A recording has stacks and GVL states, and no line is printed.
    #[test]
    fn recorded() {
        let run = |words: &[&str]| match parsed(words) {
            Subcommand::Record(args) => record(args, 7),
            _ => panic!("not record"),
        };
        let settings = run(&["record", "--gvl", "-o", "x", "-p", "4", "5", "--", "ruby"]).unwrap();
        assert_eq!((settings.record, settings.output), (Some("x".into()), None));
        assert_eq!(settings.selection.pids, [4, 5]);
        assert_eq!(settings.selection.command.unwrap(), ["ruby"]);
        assert!(settings.stacks.is_some() && settings.gvl.unwrap().spans && !settings.reports.streams());
        assert_eq!(run(&["record", "-o", "x"]).unwrap_err(), UsageError::NothingSelected);
        let settings = run(&["record", "-o", "-", "4", "--max-size", "64KiB"]).unwrap();
        assert_eq!((settings.record, settings.record_most), (Some("-".into()), Some(64 << 10)));
        let kept = run(&["record", "-o", "-", "4", "--keep", "1m"]);
        assert_eq!(kept.unwrap_err(), UsageError::Dash);
        let mixed = run(&["record", "-o", "-", "--", "ruby"]);
        assert_eq!(mixed.unwrap_err(), UsageError::CommandOnStdout);
        assert!(Args::try_parse_from(["gctrace", "4", "--record", "-"]).is_err());
        let also = Args::try_parse_from(["gctrace", "4", "--record", "a", "--pprof", "a"]).unwrap();
        assert_eq!(Settings::resolve(also, 7).unwrap_err(), UsageError::SameFile("a".into()));
    }

    /// `summary` is another name of `report`.
    #[test]
    fn alias() {
        assert!(
            matches!(parsed(&["summary", "x"]), Subcommand::Report(args) if args.file.as_os_str() == "x")
        );
    }

    /// Without flags it is one screen, with --quiet the summary of a run; what shows cycles prints lines.
    #[test]
    fn reported() {
        let run = |words: &[&str], header: &Header| match parsed(&[&["report", "x"], words].concat()) {
            Subcommand::Report(args) => report(*args, header),
            _ => panic!("not report"),
        };
        let both = header(true, true);
        let bare = run(&[], &both).unwrap();
        assert!(!bare.reports.streams() && !bare.hottest && bare.gvl.is_some() && bare.notes.is_empty());
        let screen = bare.one_screen.unwrap();
        assert!(screen.path == "x" && screen.samples && screen.gvl && screen.lacking == ["--alloc"]);
        assert!(bare.stacks.is_some_and(|stacks| stacks.wall) && bare.record.is_none());
        for flags in
            [&["--lines"][..], &["--interval", "1s"], &["--format", "jsonl"], &["--slower-than", "1ms"]]
        {
            assert!(run(flags, &both).unwrap().reports.streams(), "{flags:?}");
        }
        for flags in [&["-q"][..], &["--lines"], &["--format=jsonl"], &["--by=endpoint"], &["-o", "y"]] {
            assert!(run(flags, &both).unwrap().one_screen.is_none(), "{flags:?}");
        }
        assert!(run(&["-q"], &both).unwrap().hottest);
        assert!(!run(&["-q"], &header(false, true)).unwrap().hottest);
        let slow = run(&["--slower-than", "1ms"], &header(true, false));
        assert_eq!(slow.unwrap_err(), UsageError::NoRequests("--slower-than"));
        let by = ["--by", "endpoint"];
        assert_eq!(run(&by, &header(true, false)).unwrap_err(), UsageError::NoRequests("--by"));
        let reports = run(&by, &both).unwrap().reports;
        assert!(reports.by == Some(By::Endpoint) && !reports.streams());
    }
}
