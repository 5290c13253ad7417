//! What profiles say about the recording itself: its length, what can be compared, and that nothing of the host leaks.

use std::ffi::{OsStr, OsString};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::live::Live;
use gctrace_tests::perfetto::Trace;
use gctrace_tests::pprof;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::Script;
use serde_json::Value;

/// Every format of profile, with the file that it goes to.
const FORMATS: [(&str, &str); 6] = [
    ("--pprof", "run.pb.gz"),
    ("--folded", "run.folded"),
    ("--flamegraph", "run.svg"),
    ("--speedscope", "run.speedscope.json"),
    ("--firefox", "run.json.gz"),
    ("--perfetto", "run.pftrace"),
];

/// A program that computes, blocks and collects until it is told to end.
const PROGRAM: &str = "t = Thread.new { loop { sleep 0.01 } }; $stdout.puts 'idle'; $stdout.flush; \
    Thread.new { $stdin.gets; exit! }; loop { 2000.times { Object.new }; sleep 0.001 }";

/// Runs gctrace for five seconds on the program, with all formats and these additional flags; returns its output.
fn record(dir: &Path, flags: &[&str]) -> Result<String> {
    let live_ruby = Ruby::main()?;
    let mut command = live_ruby.command()?;
    command.args(["-e", PROGRAM]);
    let mut program = gctrace_tests::child::Guarded::start("ruby", &mut command)?;
    program.wait_stdout(Duration::from_mins(1), "idle", |line| line == "idle")?;
    let pid = program.pid().to_string();
    let mut args: Vec<OsString> = ["--pid", &pid, "--duration", "5s"].iter().map(OsString::from).collect();
    args.extend(flags.iter().map(OsString::from));
    for (flag, file) in FORMATS {
        args.extend([OsStr::new(flag).to_owned(), dir.join(file).into_os_string()]);
    }
    let finished = Invocation::jsonl(args)?.run()?;
    ensure!(finished.status.success(), "{}: {}", finished.status, finished.errors());
    drop(program);
    Ok(finished.stdout.join("\n") + "\n" + &finished.errors())
}

fn contents(path: &Path) -> Result<Vec<u8>> {
    let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
    if !bytes.starts_with(&[0x1f, 0x8b]) {
        return Ok(bytes);
    }
    let mut plain = Vec::new();
    flate2::read::GzDecoder::new(&bytes[..]).read_to_end(&mut plain)?;
    Ok(plain)
}

fn json(path: &Path) -> Result<Value> {
    Ok(serde_json::from_slice(&contents(path)?)?)
}

/// `--duration 5s` is five seconds in every format: not the time for which gctrace ran, which had to load its programs first.
#[test]
fn durations() -> Result<()> {
    let live = Live::begin()?;
    let dir = live.dir("durations")?;
    record(&dir, &["--wall", "--gvl", "--gvl-budget", "50"])?;
    let file = |at: usize| -> PathBuf { dir.join(FORMATS[at].1) };
    let mut found: Vec<(&str, f64)> = Vec::new();
    let raw = pprof::go_tool_pprof(&["-raw"], &file(0))?;
    let duration = raw.lines().find_map(|line| line.strip_prefix("Duration: ")).context("no duration")?;
    found.push(("pprof", duration.trim().trim_end_matches('s').parse()?));
    let svg = std::fs::read_to_string(file(2))?;
    let (before, _) = svg.split_once(" s of recording").context("no duration in the flame graph")?;
    found.push(("SVG", before.rsplit([' ', '>']).next().unwrap_or_default().parse()?));
    let speedscope = json(&file(3))?;
    for profile in speedscope["profiles"].as_array().context("profiles")? {
        if !profile["name"].as_str().is_some_and(|name| name.starts_with("all threads")) {
            found.push(("speedscope", profile["endValue"].as_f64().context("a number")? / 1e9));
        }
    }
    ensure!(found.len() >= 4, "{found:?}");
    let firefox = json(&file(4))?;
    found.push(("Firefox", firefox["meta"]["profilingEndTime"].as_f64().context("a number")? / 1e3));
    let trace = Trace::open(&file(5))?;
    let run = trace.slices.iter().find(|slice| slice.name == "run").context("no run")?;
    found.push(("Perfetto", (run.end_ns - run.begin_ns) as f64 / 1e9));
    let first = trace.slices.iter().map(|slice| slice.begin_ns).min().context("slices")?;
    ensure!(first >= run.begin_ns, "a slice begins {} ns before the recording", run.begin_ns - first);
    // speedscope's profile of a thread is the sum of what it has: measured times off the CPU, and on the CPU 10.1 ms for each tick. Of
    // 495 ticks half may hit by chance, give or take sqrt(495 / 4) of them: 0.11 s.
    let deviation = 0.112;
    for (format, seconds) in &found {
        let chance = if *format == "speedscope" { 4.0 * deviation } else { 0.0 };
        ensure!((seconds - 5.0).abs() <= 0.2 + chance, "{format}: {seconds} s; all: {found:?}");
    }
    Ok(())
}

/// Kernel frames have names, with native frames and without, and no output has a kernel address.
#[test]
fn kernel_addresses_stay_secret() -> Result<()> {
    let live = Live::begin()?;
    for (name, flags) in [("native", &["--wall"][..]), ("ruby", &["--wall", "--no-native"])] {
        let dir = live.dir(name)?;
        let printed = record(&dir, flags)?;
        let mut texts = vec![("standard output".to_owned(), printed)];
        for (_, file) in FORMATS {
            texts.push((file.to_owned(), String::from_utf8_lossy(&contents(&dir.join(file))?).into_owned()));
        }
        texts.push(("pprof -raw".to_owned(), pprof::go_tool_pprof(&["-raw"], &dir.join(FORMATS[0].1))?));
        for (file, text) in &texts {
            for address in
                ["0xffffffff", "0xffff", "ffffffff8", "ffffffff9", "ffffffffa", "ffffffffb", "ffffffffc"]
            {
                let at = text.find(address);
                ensure!(
                    at.is_none(),
                    "{name}: {address} in {file}: {:?}",
                    at.and_then(|at| text.get(at..at + 40))
                );
            }
        }
        let folded = &texts.iter().find(|(file, _)| file == "run.folded").context("folded")?.1;
        let named =
            |line: &str| line.split(';').any(|frame| frame.contains("schedule") && frame.contains("_[k]"));
        ensure!(
            folded.lines().any(named),
            "{name}: kernel frames have no names:\n{}",
            folded.lines().take(5).collect::<String>()
        );
    }
    Ok(())
}

/// Profiles of runs with different flags can be compared.
#[test]
fn comparable() -> Result<()> {
    let live = Live::begin()?;
    let (plain, gvl) = (live.path("plain.pb.gz"), live.path("gvl.pb.gz"));
    for (path, flags) in [(&plain, &[][..]), (&gvl, &["--gvl", "--wall"])] {
        let mut args: Vec<&OsStr> = vec!["--all-ruby".as_ref(), "--pprof".as_ref(), path.as_ref()];
        args.extend(flags.iter().map(OsStr::new));
        let gctrace = Invocation::jsonl(args)?.start_ready()?;
        Script::unwitnessed(&live, &Ruby::main()?, "pressure.rb")?.run()?;
        gctrace.stop()?;
    }
    for (base, of) in [(&plain, &gvl), (&gvl, &plain)] {
        let alone = pprof::go_tool_pprof(&["-top", "-sample_index=cpu"], of)?;
        ensure!(alone.contains("Work.small"), "{alone}");
        let base = format!("-diff_base={}", base.display());
        let top = pprof::go_tool_pprof(&["-top", "-sample_index=cpu", &base], of)?;
        // A function with as many samples in both is not shown, which can happen to any one of them.
        ensure!(top.contains("Type: cpu") && top.contains("Work."), "{top}");
    }
    Ok(())
}
