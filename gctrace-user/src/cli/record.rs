//! `gctrace record` is a run that writes everything to a file; `gctrace report` writes the outputs of a run from that file.

use clap::Parser as _;

use super::{
    Args, Settings, UsageError,
    args::{
        FormatArg, GvlArg,
        look::LookArgs,
        record::{RecordArgs, ReportFileArgs},
    },
    reports::{FILTERS, Format},
};
use crate::{
    export::{
        digest::{Recorded, quoted},
        window::Window,
    },
    trace_file::{Header, Subjects},
};

/// The arguments of a run without flags.
fn bare() -> Result<Args, UsageError> {
    Args::try_parse_from(["gctrace"]).map_err(|error| UsageError::Flags(error.to_string()))
}

/// Resolves `gctrace record` to a run.
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
    let is_piped = output.as_os_str() == "-";
    let record = Some(output);
    let mut run = Args { select, look, record, keep, as_root, cache, words, command, ..bare()? };
    run.outputs.reports.quiet = true;
    let mut settings = Settings::resolve(run, own_pid)?;
    if is_piped && std::mem::take(&mut settings.memory_account) {
        // Standard output has the recording.
        settings.notes.push("--memory-account has no effect on a recording: use gctrace heap --by memory");
    }
    Ok(Settings { record_most: max_size, ..settings })
}

/// The selected part of a recording as command-line words, each with a leading space. Times are relative to its beginning.
fn words(window: &Window, header: &Header) -> String {
    let after = |(flag, ns): (&str, Option<u64>)| {
        let seconds = ns?.saturating_sub(header.begun_ns) as f64 / 1e9;
        Some(format!(" {flag} {seconds}s"))
    };
    let times = [("--from", window.from_ns), ("--to", window.to_ns)].into_iter().filter_map(after);
    let pids = window.pids.iter().map(|pid| format!(" --pid {pid}"));
    let services = window.services.iter().map(|name| format!(" --service {}", quoted(name)));
    let condition = window.condition.iter().map(|is| format!(" --where {}", quoted(&is.to_string())));
    times.chain(pids).chain(services).chain(condition).collect()
}

/// Resolves `gctrace report` to the outputs of a run with the same subjects as the recording.
///
/// # Errors
///
/// The outputs contradict each other, or the recording lacks what they show.
pub fn report(args: ReportFileArgs, header: &Header) -> Result<Settings, UsageError> {
    let window = args.window(header)?;
    let part = words(&window, header);
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
        cuts_time: window.cuts_time(),
        pids: window.pids,
        part,
        dump: header.dump.as_ref().map(|dump| (dump.why.clone(), dump.at_ns)),
        host: header.host.name.clone(),
        clock: header.clock,
        begun_ns: header.begun_ns,
        samples,
        gvl,
        lacking: flags.into_iter().filter_map(|(flag, there)| (!there).then_some(flag)).collect(),
    });
    reports.quiet |= !asked && text;
    let mut run = Args { outputs, ..bare()? };
    // The recording contains only what was selected when it was made.
    run.select.all_ruby = true;
    let gvl = gvl.then_some(GvlArg::Exact);
    run.look = LookArgs { rate: samples.then_some(1), wall, gvl, requests, ..run.look };
    run.look.optional.alloc = alloc;
    let hottest = samples && run.outputs.format == FormatArg::Text && one_screen.is_none();
    // No process has pid 0, so the check for gctrace's own pid never matches.
    let settings = Settings::resolve(run, 0)?;
    let mut notes = settings.notes;
    // These three describe what the recording contains; they are not flags of the user, so notes about them are dropped.
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
    use crate::{
        aggregate::request_summary::By,
        cli::{Subcommand, args::record::part, parse::Moment},
        clock::WallClock,
        trace_file::{Dump, Host},
    };

    const DAY_NS: u64 = 86_400_000_000_000;

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

    /// A recording contains stacks and GVL states, and no line is printed.
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
        assert_eq!(run(&["record", "-o", "/dev/stdout", "4"]).unwrap().record, Some("-".into()));
        let settings = run(&["record", "-o", "-", "4", "--memory-account"]).unwrap();
        assert!(!settings.memory_account && settings.notes.len() == 1, "{:?}", settings.notes);
        for words in [
            &["gctrace", "--proc", "/p", "--", "ruby"][..],
            &["gctrace", "record", "-o", "x", "--proc", "/p", "--", "ruby"],
            &["gctrace", "serve", "--live", "--proc", "/p", "--", "ruby"],
        ] {
            assert!(Args::try_parse_from(words).is_err(), "{words:?}");
        }
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

    /// Without flags the report is one screen, with --quiet it is the summary of a run; flags that show cycles print lines.
    #[test]
    fn reported() {
        let run = |words: &[&str], header: &Header| match parsed(&[&["report", "x"], words].concat()) {
            Subcommand::Report(args) => report(*args, header),
            _ => panic!("not report"),
        };
        let both = header(true, true);
        for name in ["/dev/stdout", "/dev/fd/1"] {
            assert_eq!(run(&["-o", name, "--format=jsonl"], &both).unwrap().output, None, "{name}");
        }
        // A profile of slow requests; times of the day are the first ones after the beginning.
        let slow = run(&["--slower-than=5ms", "--flamegraph=x.svg"], &both).unwrap();
        assert_eq!((slow.filter.slower_than_ns, slow.notes), (Some(5_000_000), Vec::new()));
        let begun = Header { begun_ns: 50_441_979_400_000, ..header(true, true) };
        let from = |time: &str| match parsed(&["report", "x", "--from", time]) {
            Subcommand::Report(args) => args.window(&begun).unwrap().from_ns.unwrap(),
            _ => panic!("not report"),
        };
        assert_eq!(from("14:00:41.979Z"), 50_441_979_000_000);
        assert_eq!(from("14:00:42Z"), 50_442_000_000_000);
        assert_eq!(from("14:00:41Z"), 50_441_000_000_000 + DAY_NS);
        // A dump has the last minutes of a run that may have begun days before.
        let from_ns = begun.begun_ns + 2 * DAY_NS;
        let of_dump = Dump { why: String::new(), at_ns: from_ns, from_ns, carried: 0, open: 0 };
        let kept = Header { dump: Some(of_dump), ..begun };
        let at = part(&kept, Some(Moment::OfDay(50_442_000_000_000)), None, &[]).unwrap().from_ns;
        assert_eq!(at, Some(50_442_000_000_000 + 2 * DAY_NS));
        let bare = run(&[], &both).unwrap();
        assert!(!bare.reports.streams() && !bare.hottest && bare.gvl.is_some() && bare.notes.is_empty());
        let screen = bare.one_screen.unwrap();
        let of = ["--from=1.5s", "--to=3s", "-p7", "--service=a b", "--where=gc.pause > 1ms"];
        let part = run(&of, &both).unwrap().one_screen.unwrap().part;
        assert_eq!(part, " --from 1.5s --to 3s --pid 7 --service 'a b' --where 'gc.pause > 1ms'");
        assert!(
            screen.part.is_empty()
                && screen.path == "x"
                && screen.samples
                && screen.gvl
                && screen.lacking == ["--alloc"]
        );
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
