//! `gctrace report`: the outputs of a run from its recording.

use std::{cell::RefCell, collections::BTreeSet, rc::Rc};

use super::{Failure, Outcome, outputs};
use crate::{
    aggregate::condition::{Condition, Kind},
    cli::{self, ReportFileArgs, UsageError},
    console::say,
    export::{
        ExportError, Exporter, Outputs,
        window::{Tally, Windowed},
    },
    ledger::{Extent, Ledger},
    model::{Process, seen::Seen},
    sudo,
    trace_file::{self, Dump, Ending, Recording},
    words::{plural, span, utc},
};

/// Maximum number of pids that are named if nothing was selected.
const NAMED: usize = 8;

/// Writes the requested outputs.
///
/// # Errors
///
/// The recording cannot be read, or is damaged; the outputs then contain what precedes the damage.
pub fn report(args: ReportFileArgs) -> Result<Outcome, Failure> {
    let mut recording = Recording::open(&args.file)?;
    let path = args.file.display().to_string();
    let window = args.window(recording.header())?;
    let file = args.file.clone();
    let settings = cli::report(args, recording.header())?;
    let outputs = settings.output.iter().chain(&settings.csv).chain(&settings.stack_log);
    let outputs = outputs.chain(settings.profiles.iter().map(|(path, _)| path));
    for output in outputs {
        if trace_file::is_same_file(&file, output) {
            return Err(UsageError::Recording(output.clone()).into());
        }
    }
    for note in &settings.notes {
        say(&format!("gctrace: {note}"));
    }
    sudo::own_files(None).map_err(Failure::Control)?;
    let clock = recording.header().clock;
    let outputs = Rc::new(RefCell::new(Outputs::new(outputs::exporters(
        &settings,
        clock,
        recording.header().subjects.requests,
    )?)));
    let tally = Rc::new(RefCell::new(Tally::default()));
    let part = Windowed::new(window.clone(), outputs.clone(), tally.clone());
    let pids = Rc::new(RefCell::new(BTreeSet::new()));
    let mut all = Outputs::new(vec![Box::new(part), Box::new(Pids(pids.clone()))]);
    let replayed = trace_file::replay(&mut recording, &mut all)?;
    let dump = recording.header().dump.as_ref();
    let begun_ns = dump.map_or(recording.header().begun_ns, |dump| dump.from_ns);
    if let Some(Dump { why, at_ns, from_ns, .. }) = dump {
        let at = utc(clock.epoch_nanos(*at_ns).div_euclid(1_000_000_000));
        let kept = span(replayed.last_ns.saturating_sub(*from_ns));
        say(&format!("gctrace: {path} has {kept} up to {at} (trigger: {why})"));
    }
    if let Ending::CutOff(bytes) = replayed.ending {
        let seconds = replayed.last_ns.saturating_sub(begun_ns) as f64 / 1e9;
        let incomplete = match bytes {
            0 => String::new(),
            bytes => format!(", {bytes} bytes of an incomplete chunk were not read"),
        };
        say(&format!("gctrace: {path} was cut off: it ends after {seconds:.1} s{incomplete}"));
    }
    if settings.reports.verbose {
        for line in replayed.ledger.details() {
            say(&format!("gctrace: {line}"));
        }
    }
    let whole = if window.is_all() { "" } else { "the whole recording: " };
    say(&format!("gctrace: {whole}{}", replayed.ledger.summary()));
    if window.cuts_time() && recording.header().subjects.gvl {
        say("gctrace: GVL sums cover whole lives of threads; a part of the recording has none");
    }
    if replayed.ledger.extent == Extent::CutOff && recording.header().subjects.wall {
        say("gctrace: off-CPU time still in progress at the end of the file is not included");
    }
    if !outputs.borrow().failures().is_empty() {
        return Ok(Outcome::OutputFailed);
    }
    if let Some(condition) = &window.condition {
        say(&format!("gctrace: --where {condition}: {}", kept(condition, &tally.borrow())));
    }
    if tally.borrow().processes == 0 {
        let name = if is_standard_input(&path) { "standard input" } else { &path };
        let said = if window.is_all() {
            format!("{name} contains no process")
        } else {
            let seconds = replayed.last_ns.saturating_sub(begun_ns) as f64 / 1e9;
            let processes = plural(replayed.processes, "process");
            format!(
                "this part of {name} contains no process; the recording has {seconds:.1} s and {processes}{}",
                listed(&path, &pids.borrow())
            )
        };
        say(&format!("gctrace: {said}"));
        return Ok(Outcome::NothingMatched);
    }
    Ok(Outcome::Done)
}

/// The pids of a recording, as many as are named and one more.
struct Pids(Rc<RefCell<BTreeSet<u32>>>);

impl Exporter for Pids {
    fn see(&mut self, process: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        let mut pids = self.0.borrow_mut();
        if matches!(seen, Seen::Process { .. }) && pids.len() <= NAMED {
            pids.insert(process.pid);
        }
        Ok(())
    }

    fn finish(&mut self, _: &Ledger) -> Result<(), ExportError> {
        Ok(())
    }
}

fn is_standard_input(path: &str) -> bool {
    matches!(path, "-" | "/dev/stdin" | "/dev/fd/0" | "/proc/self/fd/0")
}

/// Which processes a recording has: the command that lists them or, since a pipe cannot be read twice, their pids.
fn listed(path: &str, pids: &BTreeSet<u32>) -> String {
    if path != "-" && !path.starts_with("/dev/") && !path.starts_with("/proc/") {
        return format!(" (gctrace info {path} lists them)");
    }
    let named: Vec<String> = pids.iter().take(NAMED).map(u32::to_string).collect();
    let more = if pids.len() > NAMED { ", …" } else { "" };
    if named.is_empty() { String::new() } else { format!(" (pid {}{more})", named.join(", ")) }
}

/// What a condition selected, in words.
fn kept(condition: &Condition, tally: &Tally) -> String {
    let mut parts = Vec::new();
    let mut untouched = Vec::new();
    for kind in Kind::ALL {
        let judged = tally.judged.get(&kind).copied().unwrap_or_default();
        if condition.applies_to(kind) {
            let lacking = match judged.unknown {
                0 => String::new(),
                1 => " (1 lacks what it asks for)".to_owned(),
                some => format!(" ({some} lack what it asks for)"),
            };
            parts.push(format!("kept {} of {} {}{lacking}", judged.kept, judged.all, kind.name()));
        } else if judged.all > 0 {
            untouched.push(kind.name());
        }
    }
    if !untouched.is_empty() {
        parts.push(format!("it does not concern: {}", untouched.join(", ")));
    }
    parts.join("; ")
}

#[cfg(test)]
mod tests {
    use std::{
        fmt::Write as _,
        io::Read as _,
        path::{Path, PathBuf},
    };

    use clap::Parser as _;
    use sha2::{Digest as _, Sha256};

    use super::*;
    use crate::{
        cli::{Args, Subcommand},
        export::window::Judged,
    };

    /// If this variable is set, the files are written.
    const WRITE: &str = "GCTRACE_WRITE_DOCS";
    /// The outputs written for each recording, with the suffix of the file name.
    const EXPECTED: [(&[&str], &str); 5] = [
        (&["--lines", "-o"], "txt"),
        (&["--format=jsonl", "--brief", "-o"], "jsonl"),
        (&["--folded"], "folded"),
        (&["--stack-lines", "--folded"], "lines.folded"),
        (&["--flamegraph-of=alloc", "--folded"], "alloc.folded"),
    ];
    /// Flags of other outputs, and the first bytes of their files. Their contents are too long to be stored: lengths and digests are.
    const OTHERS: [(&[&str], &[u8]); 20] = [
        (&["--callgrind"], b"# callgrind format"),
        (&["--top-lines"], b"By line: "),
        (&["--csv"], b"time_utc,pid,"),
        (&["--pprof"], &[0x1f, 0x8b]),
        (&["--flamegraph"], b"<?xml"),
        (&["--speedscope"], b"{"),
        (&["--firefox"], b"{"),
        (&["--perfetto"], &[0x0a]),
        (&["--stack-log"], b"{"),
        (&["--format=jsonl", "-o"], b"{"),
        (&["--interval=100ms", "-o"], b""),
        (&["--min-pause=1ms", "-o"], b""),
        (&["--flamegraph-of=gc", "--folded"], b""),
        (&["--flamegraph-of=gvl-wait", "--folded"], b""),
        (&["--stack-root=thread", "--folded"], b""),
        (&["--app-only", "--folded"], b""),
        (&["--tunemygc"], b"[["),
        // For recordings that cover these.
        (&["--flamegraph-of=wall", "--folded"], b""),
        (&["--slower-than=1ms", "-o"], b""),
        (&["--by=endpoint", "-o"], b""),
    ];

    fn recordings() -> Vec<PathBuf> {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/recordings");
        let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
        let mut found: Vec<_> =
            entries.filter(|path| path.extension().is_some_and(|name| name == "gctrace")).collect();
        found.sort();
        assert!(found.len() >= 4, "{found:?}");
        found
    }

    fn run(recording: &Path, flags: &[&str], file: &Path) -> Vec<u8> {
        let words = ["gctrace", "report"].iter().copied().chain(flags.iter().copied());
        let words = words.map(PathBuf::from).chain([file.to_owned(), recording.to_owned()]);
        let Some(Subcommand::Report(args)) = Args::try_parse_from(words).unwrap().subcommand else {
            panic!("not report");
        };
        assert_eq!(report(*args).unwrap(), Outcome::Done, "{flags:?}");
        let mut bytes = Vec::new();
        std::fs::File::open(file).unwrap().read_to_end(&mut bytes).unwrap();
        bytes
    }

    /// Two parts of a recording together have all its cycles and samples exactly once; a process that spans both is in both.
    #[test]
    fn parts() {
        let dir = tempfile::tempdir().unwrap();
        for recording in recordings() {
            let lines = |flags: &[&str], kind: &str| -> Vec<String> {
                let flags = [flags, &["--format=jsonl", "--brief", "-o"]].concat();
                let text = String::from_utf8(run(&recording, &flags, &dir.path().join("out"))).unwrap();
                let kind = format!("{{\"type\":\"{kind}\"");
                text.lines().filter(|line| line.starts_with(&kind)).map(ToOwned::to_owned).collect()
            };
            let header = Recording::open(&recording).unwrap().header().clone();
            let begun = header.clock.epoch_seconds(header.begun_ns);
            let of = |line: &String| -> f64 {
                let (_, rest) = line.split_once("\"ts\":").unwrap();
                rest.split([',', '}']).next().unwrap().parse().unwrap()
            };
            let all = lines(&[], "gc");
            let middle = of(&all[all.len() / 2]) - begun - 1e-6;
            let middle = format!("{middle:.6}s");
            let (first, last) = (lines(&["--to", &middle], "gc"), lines(&["--from", &middle], "gc"));
            assert!(!first.is_empty() && !last.is_empty(), "{middle}: {all:?}");
            assert_eq!([first, last].concat(), all);
            assert_eq!(lines(&["--from", &middle], "process").len(), 1);
            assert_eq!(lines(&["--to", &middle], "exit").len(), 1);
            let summary = &lines(&["--from", "0", "--to", &middle], "summary")[0];
            assert!(summary.contains("\"reason\":\"detached\""), "{summary}");
            let samples = |flags: &[&str]| -> u64 {
                let flags = [flags, &["--folded"]].concat();
                let text = String::from_utf8(run(&recording, &flags, &dir.path().join("out"))).unwrap();
                text.lines().map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum()
            };
            let parts = samples(&["--to", &middle]) + samples(&["--from", &middle]);
            assert_eq!(parts, samples(&[]));
            let gone = [recording.to_str().unwrap(), "--pid=1"];
            let words = ["gctrace", "report", "-q"].into_iter().chain(gone);
            let Some(Subcommand::Report(args)) = Args::try_parse_from(words).unwrap().subcommand else {
                panic!("not report");
            };
            assert_eq!(report(*args).unwrap(), Outcome::NothingMatched);
        }
    }

    /// A condition and its negation together have all records; kinds of records that it does not concern are in both.
    #[test]
    fn conditions() {
        let dir = tempfile::tempdir().unwrap();
        for recording in recordings() {
            let lines = |flags: &[&str], kind: &str| -> Vec<String> {
                let flags = [flags, &["--format=jsonl", "--brief", "-o"]].concat();
                let text = String::from_utf8(run(&recording, &flags, &dir.path().join("out"))).unwrap();
                let kind = format!("{{\"type\":\"{kind}\"");
                text.lines().filter(|line| line.starts_with(&kind)).map(ToOwned::to_owned).collect()
            };
            let all = lines(&[], "gc");
            let major = lines(&["--where", "gc.kind = major"], "gc");
            let minor = lines(&["--where", "not gc.kind = major"], "gc");
            assert!(!major.is_empty() && !minor.is_empty());
            assert_eq!(major.len() + minor.len(), all.len());
            assert!(
                major.iter().all(|line| all.contains(line) && line.contains("\"kind\":\"major\"")),
                "{major:?}"
            );
            let summary = &lines(&["--where", "gc.kind = major"], "exit")[0];
            assert!(summary.contains(&format!("\"cycles\":{}", major.len())), "{summary}");
            let folded = |flags: &[&str]| {
                let flags = [flags, &["--folded"]].concat();
                String::from_utf8(run(&recording, &flags, &dir.path().join("out"))).unwrap()
            };
            assert_eq!(folded(&["--where", "gc.kind = major"]), folded(&[]));
            let none = ["--where", "thread = no-such-thread"];
            assert_eq!((folded(&none), lines(&none, "gc")), (String::new(), Vec::new()));
            let service = |name: &str| {
                let words = ["gctrace", "report", "-q", recording.to_str().unwrap(), "--service", name];
                let Some(Subcommand::Report(args)) = Args::try_parse_from(words).unwrap().subcommand else {
                    panic!("not report");
                };
                report(*args).unwrap()
            };
            assert_eq!((service("golden"), service("gold")), (Outcome::Done, Outcome::NothingMatched));
            let words = ["gctrace", "report", "x", "--where", "gc.paus > 1ms"];
            let error = Args::try_parse_from(words).unwrap_err().to_string();
            assert!(error.contains("`gc.paus` is not a field"), "{error}");
        }
    }

    /// The costs of a call graph equal those of the flame graphs; each is in exactly one function.
    #[test]
    fn call_graphs() {
        let dir = tempfile::tempdir().unwrap();
        for recording in recordings() {
            let text =
                |flags: &[&str]| String::from_utf8(run(&recording, flags, &dir.path().join("out"))).unwrap();
            let graph = text(&["--callgrind"]);
            let numbers =
                |line: &str| -> Vec<u64> { line.split(' ').map(|cost| cost.parse().unwrap()).collect() };
            let total = numbers(graph.lines().find_map(|line| line.strip_prefix("summary: ")).unwrap());
            let (mut own, mut is_call) = (vec![0; total.len()], false);
            for line in graph.lines() {
                if line.starts_with(|c: char| c.is_ascii_digit()) && !is_call {
                    own.iter_mut().zip(&numbers(line)[1..]).for_each(|(sum, cost)| *sum += cost);
                }
                is_call = line.starts_with("calls=");
            }
            assert_eq!(own, total);
            let folded = |flags: &[&str]| -> u64 {
                let text = text(&[flags, &["--folded"]].concat());
                text.lines().map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum()
            };
            assert_eq!(
                [total[0], total[3]],
                ["cpu", "gc"].map(|of| folded(&[&format!("--flamegraph-of={of}")]))
            );
            let rows = text(&["--csv"]).lines().count();
            let cycles = text(&["--format=jsonl", "--brief", "-o"]).matches("{\"type\":\"gc\"").count();
            assert_eq!(rows, cycles + 1);
        }
    }

    /// The self values of all lines are the collapsed stacks of the same measure and filters; a line's total is never below its self value.
    #[test]
    fn tables_of_lines() {
        let dir = tempfile::tempdir().unwrap();
        for recording in recordings() {
            let text =
                |flags: &[&str]| String::from_utf8(run(&recording, flags, &dir.path().join("out"))).unwrap();
            let exact = |figure: &str| figure.replace('.', "").parse::<u64>().unwrap();
            for flags in [
                &[][..],
                &["--flamegraph-of=gc"],
                &["--flamegraph-of=alloc"],
                &["--flamegraph-of=gvl-wait"],
                &["--focus", "Order"],
                &["--hide", "Order"],
                &["--thread", "golden"],
                &["--app-only"],
            ] {
                let folded = text(&[flags, &["--folded"]].concat());
                let table = text(&[flags, &["--top-lines"]].concat());
                let sum: u64 = folded.lines().map(|line| exact(line.rsplit(' ').next().unwrap())).sum();
                let mut own_sum = 0;
                for row in table.lines().skip(2) {
                    let figures: Vec<&str> = row.split_whitespace().collect();
                    let (own, total) = (exact(figures[2]), exact(figures[3]));
                    assert!(own <= total && total <= sum, "{row}");
                    own_sum += own;
                }
                assert_eq!(own_sum, sum, "{flags:?} {}: {table}", recording.display());
                assert_eq!(sum > 0, table.lines().count() > 2);
            }
        }
    }

    /// By lines, methods have the same total time, in more rows.
    #[test]
    fn stacks_by_line() {
        let dir = tempfile::tempdir().unwrap();
        let mut others = 0;
        for recording in recordings() {
            // The row names of each path, without the locations, with their time.
            let names = |flags: &[&str]| {
                let text = String::from_utf8(run(&recording, flags, &dir.path().join("out"))).unwrap();
                let mut paths = std::collections::BTreeMap::<String, u64>::new();
                for line in text.lines() {
                    let (path, ns) = line.rsplit_once(' ').unwrap();
                    let name = |row: &str| match row.rsplit_once(" (") {
                        // For a script in an argument, methods have only `-e`.
                        Some((name, place)) if place.ends_with(')') => name.to_owned(),
                        _ => row.to_owned(),
                    };
                    let path = path.split(';').map(name).collect::<Vec<_>>().join(";");
                    *paths.entry(path).or_default() += ns.parse::<u64>().unwrap();
                }
                (paths, text)
            };
            let (methods, lines) = (names(&["--folded"]), names(&["--stack-lines", "--folded"]));
            assert_eq!(methods.0, lines.0);
            assert!(methods.1.lines().count() <= lines.1.lines().count());
            others += usize::from(methods.1 != lines.1);
        }
        // For a program with one line per method, both are the same.
        assert!(others >= 4, "{others}");
    }

    /// The description of a condition.
    #[test]
    fn said() {
        let mut tally = Tally::default();
        let judged = |all, kept, unknown| Judged { all, kept, unknown };
        tally.judged.insert(Kind::Cycle, judged(45, 3, 0));
        tally.judged.insert(Kind::Request, judged(7, 4, 2));
        tally.judged.insert(Kind::Sample, judged(9, 9, 0));
        let condition = "gc.pause > 1ms or request.duration > 1s".parse().unwrap();
        assert_eq!(
            kept(&condition, &tally),
            "kept 3 of 45 GC cycles; kept 4 of 7 requests (2 lack what it asks for); it does not concern: stack samples"
        );
    }

    /// Committed recordings of each Ruby give the committed outputs; `cargo xtask recordings` writes what they give now.
    #[test]
    fn golden() {
        let dir = tempfile::tempdir().unwrap();
        let mut differ = Vec::new();
        for recording in recordings() {
            for (flags, extension) in EXPECTED {
                let expected = recording.with_extension(extension);
                let found = String::from_utf8(run(&recording, flags, &dir.path().join("out"))).unwrap();
                // The ledger grows with each new counter; it is compared with that of the run itself where that exists.
                let found: Vec<&str> =
                    found.lines().filter(|line| !line.starts_with("{\"type\":\"ledger\"")).collect();
                let found = found.join("\n") + "\n";
                if std::env::var_os(WRITE).is_some() {
                    std::fs::write(&expected, found).unwrap();
                } else {
                    differ.extend(first_difference(&expected, &found));
                }
            }
            let subjects = Recording::open(&recording).unwrap().header().subjects;
            let mut digests = String::new();
            for (flags, begin) in OTHERS {
                let needs_requests = ["--slower-than=1ms", "--by=endpoint"].contains(&flags[0]);
                if (flags[0] == "--flamegraph-of=wall" && !subjects.wall)
                    || (needs_requests && !subjects.requests)
                {
                    continue;
                }
                let found = match flags {
                    ["--tunemygc"] => sets(&recording),
                    flags => without_ledger(&run(&recording, flags, &dir.path().join("out"))),
                };
                let flags = flags.join(" ");
                assert!(found.starts_with(begin), "{flags} {}", recording.display());
                let (bytes, digest) = digest(found);
                writeln!(digests, "{flags} {bytes} bytes {digest}").unwrap();
            }
            let expected = recording.with_extension("digests");
            if std::env::var_os(WRITE).is_some() {
                std::fs::write(&expected, digests).unwrap();
            } else {
                differ.extend(first_difference(&expected, &digests));
            }
        }
        assert!(
            differ.is_empty(),
            "other outputs; if that is meant: `cargo xtask recordings`:\n{}",
            differ.join("\n")
        );
    }

    /// Where the first difference is; `None`: no difference. A line of digests starts with the flags of its output.
    fn first_difference(expected: &Path, found: &str) -> Option<String> {
        let text = std::fs::read_to_string(expected).unwrap();
        if text == found {
            return None;
        }
        let name = expected.file_name().unwrap().to_string_lossy();
        let (before, now) = (text.lines().chain([""]), found.lines().chain([""]));
        let differ = before.zip(now).zip(1..).find(|((before, now), _)| before != now);
        let ((before, now), line) = differ.unwrap_or((("", ""), text.lines().count()));
        Some(format!("{name}:{line}\n  was: {before}\n  now: {now}"))
    }

    /// The sample sets of all processes, concatenated.
    fn sets(recording: &Path) -> Vec<u8> {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("lines");
        run(recording, &["--tunemygc", dir.path().to_str().unwrap(), "-o"], &out);
        std::fs::remove_file(out).unwrap();
        let mut files: Vec<PathBuf> =
            std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        files.iter().flat_map(|file| std::fs::read(file).unwrap()).collect()
    }

    /// JSON lines without the ledger, which grows with each new counter.
    fn without_ledger(file: &[u8]) -> Vec<u8> {
        let lines = file.split_inclusive(|byte| *byte == b'\n');
        lines.filter(|line| !line.starts_with(b"{\"type\":\"ledger\"")).flatten().copied().collect()
    }

    /// Length and digest of a file; if it is compressed, of its uncompressed contents, which do not depend on the version of the library.
    fn digest(file: Vec<u8>) -> (usize, String) {
        let file = if file.starts_with(&[0x1f, 0x8b]) {
            let mut bytes = Vec::new();
            flate2::read::GzDecoder::new(&*file).read_to_end(&mut bytes).unwrap();
            bytes
        } else {
            file
        };
        let mut digest = String::new();
        for byte in Sha256::digest(&file).iter().take(16) {
            write!(digest, "{byte:02x}").unwrap();
        }
        (file.len(), digest)
    }

    /// A pipe cannot be read again, so its pids are named.
    #[test]
    fn processes_of_a_pipe() {
        let of = |pids: std::ops::Range<u32>| listed("/dev/stdin", &pids.collect());
        assert_eq!([of(0..0), of(7..9)], ["", " (pid 7, 8)"]);
        assert_eq!(of(1..10), " (pid 1, 2, 3, 4, 5, 6, 7, 8, …)");
        assert_eq!(listed("a.gctrace", &BTreeSet::new()), " (gctrace info a.gctrace lists them)");
        assert!(is_standard_input("/dev/stdin") && !is_standard_input("/dev/fd/63"));
    }
}
