//! Recordings: `gctrace report` produces the same outputs as the run itself, and written data survive a kill and a full disk.

use std::ffi::OsString;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::child::Guarded;
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::live::Live;
use gctrace_tests::puma::Puma;
use gctrace_tests::report::Report;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::Script;
use gctrace_tests::timing::settled;
use gctrace_tests::{PATIENCE, ensure_times, ledger, memory};
use gctrace_user::export::{ExportError, Exporter, Outputs};
use gctrace_user::ledger::Ledger as Account;
use gctrace_user::model::gvl::GvlGap;
use gctrace_user::model::seen::Seen;
use gctrace_user::model::{Container, Image, Origin, Process};
use gctrace_user::trace_file::{self, Header, Host, Recorder, Recording};
use rustix::process::Signal;
use serde_json::Value;

/// The flag of every output that is a file, and the name of the file.
pub(super) const FILES: [(&str, &str); 11] = [
    ("--pprof", "run.pb.gz"),
    ("--folded", "run.folded"),
    ("--flamegraph", "run.svg"),
    ("--speedscope", "run.speedscope.json"),
    ("--firefox", "run.json.gz"),
    ("--perfetto", "run.pftrace"),
    ("--stack-log", "stacks.jsonl"),
    ("--callgrind", "callgrind.out.run"),
    ("--top-lines", "lines.txt"),
    ("--csv", "gc.csv"),
    ("--tunemygc", "sets"),
];
/// All data sources.
pub(super) const LOOK: [&str; 6] =
    ["--wall", "--gvl", "--gvl-budget=100", "--alloc", "--requests", "--shares"];

/// Threads that compute, wait for the GVL, sleep and collect, for about a second.
const PROGRAM: &str =
    "3.times.map { Thread.new { 60.times { (1..4000).map { |x| \"s#{x}\" }.sort.first; sleep 0.002 } } }.each(&:join)
    GC.start";
/// The same, endlessly.
const ENDLESS: &str =
    "3.times.map { Thread.new { loop { (1..3000).map { |x| \"s#{x}\" }.sort.first; sleep 0.002 } } }
    $stdout.puts 'busy'; $stdout.flush; sleep";

pub(super) fn outputs(dir: &Path) -> Vec<OsString> {
    let pairs = FILES.iter().map(|(flag, file)| [OsString::from(flag), dir.join(file).into_os_string()]);
    pairs.flatten().collect()
}

fn command(ruby: &Ruby, program: &str) -> Result<Vec<OsString>> {
    Ok([vec!["--".into()], ruby.argv()?, vec!["-e".into(), program.into()]].concat())
}

/// The names and contents of the files below a directory.
pub(super) fn contents(dir: &Path) -> Result<Vec<(OsString, Vec<u8>)>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            found.extend(contents(&entry.path())?);
        } else {
            found.push((entry.file_name(), std::fs::read(entry.path())?));
        }
    }
    found.sort();
    Ok(found)
}

/// All outputs of a run at once, and the same outputs from its recording: equal byte for byte, including the ledger.
#[test]
fn every_output() -> Result<()> {
    let live = Live::beside_others()?;
    Ruby::each(|ruby| {
        let (run, again) = (live.dir("run")?, live.dir("again")?);
        live.dir("run/sets")?;
        live.dir("again/sets")?;
        let recording = live.path("run.gctrace").into_os_string();
        let mut program = ruby.command()?;
        let waiting = format!("$stdout.puts 'waits'; $stdout.flush; $stdin.gets\n{PROGRAM}");
        let mut program = Guarded::start("ruby", program.args(["-e", &waiting]))?;
        program.wait_stdout(Duration::from_mins(1), "waits", |line| line == "waits")?;
        let args: Vec<OsString> = [
            outputs(&run),
            LOOK.map(OsString::from).to_vec(),
            vec!["--pid".into(), program.pid().to_string().into()],
            vec!["--record".into(), recording.clone()],
        ]
        .concat();
        let gctrace = Invocation::jsonl(args)?.start_ready()?;
        program.say("go")?;
        let (report, finished) = gctrace.done()?;
        ensure!(report.gcs.len() > 5, "{}", finished.errors());
        let args =
            [vec!["report".into(), "--format".into(), "jsonl".into(), recording], outputs(&again)].concat();
        let replayed = Invocation::new(args)?.run()?;
        ensure!(replayed.status.success(), "{}", replayed.errors());
        ensure!(replayed.stdout == finished.stdout, "JSON lines differ: {}", ruby.label());
        let (ours, theirs) = (contents(&run)?, contents(&again)?);
        ensure!(ours.len() >= FILES.len(), "{}", ours.len());
        for (ours, theirs) in ours.iter().zip(&theirs) {
            ensure!(ours == theirs, "{} differs: {}", ours.0.display(), ruby.label());
        }
        ensure!(ours.len() == theirs.len());
        std::fs::remove_dir_all(&run)?;
        std::fs::remove_dir_all(&again)?;
        Ok(())
    })
}

/// Text lines are the same, too, including those of intervals, which depend on time.
#[test]
fn text() -> Result<()> {
    let live = Live::beside_others()?;
    let ruby = Ruby::main()?;
    for (flags, of_report) in [
        (&["--wall"][..], &["--lines"][..]),
        (&["--interval=100ms"], &["--interval=100ms"]),
        (&["--min-pause=1ms"], &["--min-pause=1ms"]),
    ] {
        let (recording, lines) = (live.path("run.gctrace"), live.path("lines"));
        let run = ["--gvl", "--gvl-budget=100", "-o"].map(OsString::from).to_vec();
        let args = [
            run,
            vec![lines.clone().into()],
            flags.iter().map(OsString::from).collect(),
            vec!["--record".into(), recording.clone().into()],
            command(&ruby, PROGRAM)?,
        ];
        let finished = Invocation::new(args.concat())?.run()?;
        ensure!(finished.status.success(), "{}", finished.errors());
        let mut args: Vec<OsString> = vec!["report".into(), recording.into()];
        args.extend(of_report.iter().map(OsString::from));
        let replayed = Invocation::new(args)?.run()?;
        let lines = std::fs::read_to_string(&lines)?;
        ensure!(lines.lines().count() > 5, "{lines}");
        ensure!(
            replayed.stdout.join("\n") + "\n" == lines,
            "{flags:?}:\n{lines}\n{}",
            replayed.stdout.join("\n")
        );
    }
    Ok(())
}

/// The lines of cycles among JSON lines.
fn cycles(lines: &str) -> Vec<&str> {
    lines.lines().filter(|line| line.starts_with("{\"type\":\"gc\"")).collect()
}

/// A recording that is killed at any moment has all lines except those of about the last second.
#[test]
fn killed() -> Result<()> {
    let live = Live::beside_others()?;
    let mut program = Ruby::main()?.command()?;
    let mut program = Guarded::start("ruby", program.args(["-e", ENDLESS]))?;
    program.wait_stdout(Duration::from_mins(1), "busy", |line| line == "busy")?;
    // Two at a time, because they mostly wait.
    let (live, pid) = (&live, program.pid());
    for pair in [[1100, 3010], [1370, 2490], [1730, 2110]] {
        settled(|| {
            std::thread::scope(|scope| {
                let both = pair.map(|ms| scope.spawn(move || killed_after(live, pid, ms)));
                both.into_iter().try_for_each(|one| one.join().expect("no panic"))
            })
        })?;
    }
    Ok(())
}

/// Waits until a recording has more than its header, which is its first chunk (docs/recording.md). It may not exist yet.
fn wait_for_entries(recording: &Path) -> Result<()> {
    let since = Instant::now();
    loop {
        let bytes = std::fs::read(recording).unwrap_or_default();
        // The length of the chunk is behind the 12 bytes of the file's head and the kind of the chunk.
        let length = bytes.get(16..20).and_then(|length| Some(u32::from_le_bytes(length.try_into().ok()?)));
        if length.is_some_and(|length| bytes.len() > 12 + 16 + length as usize) {
            return Ok(());
        }
        ensure!(since.elapsed() < PATIENCE, "{} bytes are recorded", bytes.len());
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn killed_after(live: &Live, pid: u32, ms: u64) -> Result<()> {
    let (recording, lines) = (live.path(&format!("{ms}.gctrace")), live.path(&format!("{ms}.lines")));
    if recording.exists() {
        std::fs::remove_file(&recording)?;
    }
    let mut args: Vec<OsString> = vec!["--pid".into(), pid.to_string().into(), "--gvl".into()];
    args.extend(["--brief".into(), "-o".into(), lines.clone().into()]);
    args.extend(["--record".into(), recording.clone().into_os_string()]);
    let gctrace = Invocation::jsonl(args)?.start_ready()?;
    wait_for_entries(&recording)?;
    std::thread::sleep(Duration::from_millis(ms));
    gctrace.kill()?;
    let args = [OsString::from("report"), recording.into(), "--brief".into(), "--format=jsonl".into()];
    let replayed = Invocation::new(args)?.run()?;
    ensure!(replayed.status.success(), "{}", replayed.errors());
    ensure!(replayed.errors().contains(" was cut off: it ends after "), "{}", replayed.errors());
    ensure!(!replayed.errors().contains("DO NOT ADD UP"), "{}", replayed.errors());
    let (lines, replayed) = (std::fs::read_to_string(&lines)?, replayed.stdout.join("\n"));
    let (lines, replayed) = (cycles(&lines), cycles(&replayed));
    ensure!(!replayed.is_empty(), "no cycle after {ms} ms");
    ensure!(lines.starts_with(&replayed), "other cycles after {ms} ms");
    let ts = |cycle: Option<&&str>| -> Result<f64> {
        let cycle: Value = serde_json::from_str(cycle.context("a cycle")?)?;
        cycle["ts"].as_f64().context("its time")
    };
    // A line that the kill cut off does not count. A chunk is one second, and a drain may be late.
    let lost = ts(lines.iter().rev().nth(1))? - ts(replayed.last())?;
    ensure_times!(lost < 1.5, "{lost} s are lost after {ms} ms");
    Ok(())
}

/// gctrace is killed at 50 moments, from before the file exists until it has some chunks: the file is read up to its last complete chunk, and
/// one line says so. The traced program has the result and the code of one that was left alone.
#[test]
fn killed_at_50_moments() -> Result<()> {
    /// Maximum number of milliseconds after which gctraces are killed, half of them counted from their start, half from when they trace: before the
    /// file exists, and until about the third chunk.
    const LATEST: u64 = 2500;
    let live = Live::begin()?;
    let mut program = Script::unwitnessed(&live, &Ruby::main()?, "steady.rb")?.start()?;
    program.wait_for("ready")?;
    let pid = program.pid();
    let (events, code) = (memory::uprobe_events()?, memory::changed_code(pid)?);
    let mut moments = Vec::new();
    for _ in 0..50 {
        let mut random = [0; 8];
        std::fs::File::open("/dev/urandom")?.read_exact(&mut random)?;
        moments.push(u64::from_le_bytes(random) % LATEST);
    }
    let (mut with_cycles, mut cut_chunks) = (0, 0);
    for some in moments.chunks(10) {
        let killed = std::thread::scope(|scope| {
            let one = |(number, ms): (usize, &u64)| -> Result<PathBuf> {
                let recording = live.path(&format!("{number}.gctrace"));
                let args = ["--pid".into(), pid.to_string().into(), "--record".into()];
                let args = [&args[..], &[recording.clone().into_os_string()]].concat();
                let invocation = Invocation::jsonl(args)?;
                let gctrace = if number % 2 == 0 { invocation.start()? } else { invocation.start_ready()? };
                std::thread::sleep(Duration::from_millis(*ms));
                let finished = gctrace.kill()?;
                ensure!(!finished.status.success(), "it was not killed after {ms} ms: {}", finished.errors());
                Ok(recording)
            };
            let running: Vec<_> =
                some.iter().enumerate().map(|one_of| scope.spawn(move || one(one_of))).collect();
            running.into_iter().map(|one| one.join().expect("no panic")).collect::<Result<Vec<_>>>()
        })?;
        for (recording, ms) in killed.iter().zip(some) {
            let Ok(bytes) = std::fs::read(recording) else { continue };
            let args =
                [OsString::from("report"), recording.into(), "--brief".into(), "--format=jsonl".into()];
            let replayed = Invocation::new(args)?.run()?;
            let (errors, lines) = (replayed.errors(), replayed.stdout.join("\n"));
            if bytes.is_empty() {
                ensure!(errors.trim_end().ends_with("it is not a gctrace recording"), "{ms} ms: {errors}");
            } else {
                ensure!(errors.matches(" was cut off: it ends after ").count() == 1, "{ms} ms: {errors}");
                ensure!(
                    !errors.contains("DO NOT ADD UP") && !errors.contains("damaged"),
                    "{ms} ms: {errors}"
                );
                cut_chunks += u64::from(errors.contains(" bytes of an incomplete chunk were not read"));
            }
            let counts: Vec<u64> = cycles(&lines)
                .iter()
                .map(|cycle| serde_json::from_str::<Value>(cycle)?["count"].as_u64().context("its count"))
                .collect::<Result<_>>()?;
            ensure!(counts.is_sorted_by(|one, next| one + 1 == *next), "{ms} ms: {counts:?}");
            with_cycles += u64::from(!counts.is_empty());
            std::fs::remove_file(recording)?;
        }
    }
    eprintln!("{with_cycles} recordings have cycles, {cut_chunks} end within a chunk");
    ensure!(with_cycles > 0, "no recording has a cycle: all were killed too early");
    let deadline = Instant::now() + Duration::from_mins(1);
    while memory::changed_code(pid)? != code {
        ensure!(Instant::now() < deadline, "the program's code is still changed");
        std::thread::sleep(Duration::from_millis(50));
    }
    ensure!(memory::uprobe_events()? == events, "probes are left in uprobe_events");
    ensure!(program.running()?, "the program has ended by itself");
    program.say("stop")?;
    let done = program.finish_any()?.finished;
    ensure!(done.status.code() == Some(7) && done.stderr.is_empty(), "{}: {}", done.status, done.errors());
    ensure!(done.stdout == ["ready", "checksum 524657833"], "it printed {:?}", done.stdout);
    Ok(())
}

/// On a full disk, the recording keeps what it has, and gctrace continues and reports it in its exit status.
#[test]
fn full_disk() -> Result<()> {
    let live = Live::beside_others()?;
    let disk = live.dir("disk")?;
    let mount = |args: &[&str]| -> Result<()> {
        let done = std::process::Command::new(args[0]).args(&args[1..]).arg(&disk).status()?;
        ensure!(done.success(), "{args:?}: {done}");
        Ok(())
    };
    mount(&["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs"])?;
    let found = (|| {
        let recording = disk.join("full.gctrace").into_os_string();
        let ruby = Ruby::main()?;
        let args = [
            vec!["--gvl".into(), "--gvl-budget=100".into(), "--record".into(), recording.clone()],
            command(&ruby, &PROGRAM.replace("60.times", "1200.times"))?,
        ];
        let finished = Invocation::jsonl(args.concat())?.run()?;
        let errors = finished.errors();
        ensure!(finished.status.code() == Some(2), "{}: {errors}", finished.status);
        ensure!(errors.matches("the recording ends before this").count() == 1, "{errors}");
        let account = Report::parse(&finished.stdout)?;
        ledger::check(&account)?;
        let user = account.ledger.as_ref().context("no ledger")?.user.clone();
        let dropped = user.get("recorded_dropped").and_then(Value::as_u64).context("no counter")?;
        ensure!(dropped > 0 && errors.contains(" not in the recording"), "{dropped}: {errors}");
        let all = finished.stdout.join("\n");
        let replayed =
            Invocation::new(["report".into(), recording, OsString::from("--format=jsonl")])?.run()?;
        ensure!(replayed.status.success(), "{}", replayed.errors());
        let errors = replayed.errors();
        ensure!(errors.contains(" was cut off") && !errors.contains("were not read"), "{errors}");
        let replayed = replayed.stdout.join("\n");
        let (all, replayed) = (cycles(&all), cycles(&replayed));
        ensure!(!replayed.is_empty() && replayed.len() < all.len() && all.starts_with(&replayed));
        Ok(())
    })();
    mount(&["umount"])?;
    found
}

/// Records everything except what identifies the machine.
struct Anonymous(Recorder);

impl Exporter for Anonymous {
    fn see(&mut self, process: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        let mut process = process.clone();
        let library = process.image.path.file_name().map_or(Path::new("ruby"), Path::new);
        let path = Path::new("/usr/lib").join(library);
        process.image = Arc::new(Image { path, ..(*process.image).clone() });
        process.hostname = Some("host".to_owned());
        process.container = Container::default();
        // The first word of a Puma's command line says where it listens.
        process.cmdline = process.cmdline.map(|words| match words.first() {
            Some(first) if first.starts_with("puma") => vec!["puma".to_owned()],
            _ => words,
        });
        process.origin = Arc::new(Origin { service: "golden".to_owned(), ..Origin::default() });
        self.0.see(&process, seen)
    }
    fn began(&mut self, ts_ns: u64) {
        self.0.began(ts_ns);
    }
    fn closed(&mut self, ts_ns: u64) {
        self.0.closed(ts_ns);
    }
    fn gvl_gap(&mut self, gap: GvlGap) {
        self.0.gvl_gap(gap);
    }
    fn account(&mut self, ledger: &Account) {
        self.0.account(ledger);
    }
    fn finish(&mut self, ledger: &Account) -> Result<(), ExportError> {
        self.0.finish(ledger)
    }
    fn settled(&mut self, ledger: &Account) -> Result<(), ExportError> {
        self.0.settled(ledger)
    }
    fn flush(&mut self, now_ns: u64) -> Result<(), ExportError> {
        self.0.flush(now_ns)
    }
}

/// Writes the recordings that host tests replay (`cargo xtask recordings --again`).
#[test]
#[ignore = "it replaces files of the repository"]
fn golden() -> Result<()> {
    let live = Live::begin()?;
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/recordings");
    std::fs::create_dir_all(&dir)?;
    Ruby::each(|ruby| {
        let program = "$stdout.puts 'waits'; $stdout.flush; $stdin.gets
            class Order; def total(n) = (1..n).map { |x| \"s#{x}\" }.sort.first; end
            2.times.map { Thread.new { 6.times { Order.new.total(6000); sleep 0.01 } } }.each(&:join)
            GC.start";
        let program =
            program.replace("def total(n) = ", "def total(n); ").replace(".first; end", ".first; end; end");
        let mut program = Guarded::start("ruby", ruby.command()?.args(["-e", &program]))?;
        program.wait_stdout(Duration::from_mins(1), "waits", |line| line == "waits")?;
        let (major, rest) = ruby.version().split_once('.').context("a version")?;
        let minor = rest.split('.').next().context("a version")?;
        let recorded = live.path("named.gctrace");
        let pid = program.pid().to_string();
        let args = ["record", "--pid", &pid, "--gvl", "--gvl-budget=100", "--alloc", "--no-native", "-o"];
        let args = args.iter().map(OsString::from).chain([recorded.clone().into_os_string()]);
        let gctrace = Invocation::new(args)?.start_ready()?;
        program.say("go")?;
        let finished = gctrace.wait()?;
        ensure!(finished.status.success(), "{}", finished.errors());
        keep(&recorded, &dir.join(format!("{major}.{minor}.gctrace")))
    })
}

/// Writes the recording of a Puma that host tests replay, with requests, off-CPU time and native frames (`cargo xtask recordings --again`).
#[test]
#[ignore = "it replaces files of the repository"]
fn golden_requests() -> Result<()> {
    let live = Live::begin()?;
    let puma = Puma::start_by_name(&live, "requests.ru")?;
    let recorded = live.path("named.gctrace");
    let pid = puma.process.pid().to_string();
    let args = [
        "record",
        "--pid",
        &pid,
        "--requests",
        "--wall",
        "--gvl",
        "--gvl-budget=100",
        "--alloc",
        "--rate=999",
        "-o",
    ];
    let args = args.iter().map(OsString::from).chain([recorded.clone().into_os_string()]);
    let gctrace = Invocation::new(args)?.start_ready()?;
    for round in 0..6 {
        for path in ["gc", "lazy", "slow", "missing"] {
            let mut connection = puma.connect()?;
            let head =
                format!("GET /orders/{round}/{path}/name HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
            connection.write_all(head.as_bytes())?;
            let mut answer = String::new();
            connection.read_to_string(&mut answer)?;
            ensure!(answer.starts_with("HTTP/1.1 "), "{answer}");
        }
    }
    puma.process.signal(Signal::TERM)?;
    let finished = gctrace.wait()?;
    ensure!(finished.status.success(), "{}", finished.errors());
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/recordings");
    let path = dir.join("puma.gctrace");
    keep(&recorded, &path)?;
    let size = std::fs::metadata(&path)?.len();
    ensure!(size < 150_000, "{size} bytes are too many for the repository");
    Ok(())
}

/// Copies a recording to this path, without what identifies the machine.
fn keep(recorded: &Path, path: &Path) -> Result<()> {
    let mut recording = Recording::open(recorded)?;
    let header = Header { host: Host::default(), ..recording.header().clone() };
    let anonymous = Anonymous(Recorder::create(path, &header)?);
    let mut outputs = Outputs::new(vec![Box::new(anonymous)]);
    trace_file::replay(&mut recording, &mut outputs)?;
    ensure!(outputs.failures().is_empty());
    Ok(std::fs::set_permissions(path, PermissionsExt::from_mode(0o644))?)
}
