//! What profiles contain about the recording itself: its length, comparability, and nothing secret about the host.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::PATIENCE;
use gctrace_tests::ensure_times;
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::live::Live;
use gctrace_tests::perfetto::Trace;
use gctrace_tests::pprof;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::Script;
use gctrace_tests::timing::settled;
use serde_json::Value;

/// The flag of every profile format, with the name of its file.
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

/// How long each thread of a process was runnable without a CPU, nanoseconds. A thread that cannot be read has ended.
fn run_delays(pid: u32) -> BTreeMap<OsString, u64> {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return BTreeMap::new() };
    let delay = |task: std::fs::DirEntry| -> Option<(OsString, u64)> {
        let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        Some((task.file_name(), text.split_whitespace().nth(1)?.parse().ok()?))
    };
    tasks.filter_map(|task| delay(task.ok()?)).collect()
}

/// The sum of the time that each thread has waited for a CPU since `before`, seconds.
fn delayed_s(before: &BTreeMap<OsString, u64>, after: &BTreeMap<OsString, u64>) -> f64 {
    let since =
        |(tid, ns): (&OsString, &u64)| ns.saturating_sub(before.get(tid).copied().unwrap_or_default());
    after.iter().map(since).sum::<u64>() as f64 / 1e9
}

/// Time that a hypervisor has taken from this machine's CPUs since boot, seconds, with the resolution of ticks (proc(5)).
fn stolen_s() -> Result<f64> {
    let text = std::fs::read_to_string("/proc/stat")?;
    let ticks: u64 = text.split_whitespace().nth(8).context("no stolen time in /proc/stat")?.parse()?;
    Ok(ticks as f64 / 100.0)
}

/// A run of gctrace.
struct Recorded {
    /// Its output.
    printed: String,
    /// By how much gctrace may have been late, seconds: its threads waited for a CPU, and a hypervisor took time.
    late_s: f64,
    /// How long the program's threads waited for a CPU, seconds.
    delayed_s: f64,
}

/// Runs gctrace on the program for this duration, with all formats and these additional flags.
fn record(dir: &Path, duration: &str, flags: &[&str]) -> Result<Recorded> {
    let live_ruby = Ruby::main()?;
    let mut command = live_ruby.command()?;
    command.args(["-e", PROGRAM]);
    let mut program = gctrace_tests::child::Guarded::start("ruby", &mut command)?;
    program.wait_stdout(PATIENCE, "idle", |line| line == "idle")?;
    let pid = program.pid().to_string();
    let mut args: Vec<OsString> =
        ["--pid", &pid, "--duration", duration].iter().map(OsString::from).collect();
    args.extend(flags.iter().map(OsString::from));
    for (flag, file) in FORMATS {
        args.extend([OsStr::new(flag).to_owned(), dir.join(file).into_os_string()]);
    }
    let (stolen, program_before) = (stolen_s()?, run_delays(program.pid()));
    let mut gctrace = Invocation::jsonl(args)?.start_ready()?;
    let before = run_delays(gctrace.pid());
    let mut after = before.clone();
    // After the duration it writes the files, so the last reading is from after that time.
    while gctrace.running()? {
        after.extend(run_delays(gctrace.pid()));
        std::thread::sleep(Duration::from_millis(10));
    }
    let delayed = delayed_s(&program_before, &run_delays(program.pid()));
    // The kernel counts in ticks, per CPU.
    let late_s = delayed_s(&before, &after) + stolen_s()? - stolen + 0.02;
    let finished = gctrace.wait()?;
    ensure!(finished.status.success(), "{}: {}", finished.status, finished.errors());
    drop(program);
    let printed = finished.stdout.join("\n") + "\n" + &finished.errors();
    Ok(Recorded { printed, late_s, delayed_s: delayed })
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

/// `--duration 5s` is five seconds in every format, and not the time for which gctrace ran, since it had to load its programs first.
#[test]
fn durations() -> Result<()> {
    settled(compare_durations)
}

fn compare_durations() -> Result<()> {
    let live = Live::begin()?;
    let dir = live.dir("durations")?;
    let recorded = record(&dir, "5s", &["--wall", "--gvl", "--gvl-budget", "50"])?;
    let file = |at: usize| -> PathBuf { dir.join(FORMATS[at].1) };
    // Name, duration, and rounding error of its text, seconds.
    let mut found: Vec<(&str, f64, f64)> = Vec::new();
    let mut sums: Vec<f64> = Vec::new();
    let raw = pprof::go_tool_pprof(&["-raw"], &file(0))?;
    let duration = raw.lines().find_map(|line| line.strip_prefix("Duration: ")).context("no duration")?;
    found.push(("pprof", duration.trim().trim_end_matches('s').parse()?, 0.01));
    let svg = std::fs::read_to_string(file(2))?;
    let (before, _) = svg.split_once(" s of recording").context("no duration in the flame graph")?;
    found.push(("SVG", before.rsplit([' ', '>']).next().unwrap_or_default().parse()?, 0.05));
    let speedscope = json(&file(3))?;
    for profile in speedscope["profiles"].as_array().context("profiles")? {
        if !profile["name"].as_str().is_some_and(|name| name.starts_with("all threads")) {
            sums.push(profile["endValue"].as_f64().context("a number")? / 1e9);
        }
    }
    ensure!(sums.len() >= 2, "{sums:?}");
    let firefox = json(&file(4))?;
    found.push(("Firefox", firefox["meta"]["profilingEndTime"].as_f64().context("a number")? / 1e3, 0.0));
    let trace = Trace::open(&file(5))?;
    let run = trace.slices.iter().find(|slice| slice.name == "run").context("no run")?;
    let measured = (run.end_ns - run.begin_ns) as f64 / 1e9;
    let first = trace.slices.iter().map(|slice| slice.begin_ns).min().context("slices")?;
    ensure!(first >= run.begin_ns, "a slice begins {} ns before the recording", run.begin_ns - first);
    // The duration is measured once, from when gctrace is ready until the time is over and one of gctrace's threads notices that.
    ensure_times!(
        (5.0..=5.2 + recorded.late_s).contains(&measured),
        "{measured} s; gctrace waited {} s for a CPU",
        recorded.late_s
    );
    for (format, seconds, rounded) in &found {
        ensure!(
            (seconds - measured).abs() <= 0.01 + rounded,
            "{format}: {seconds} s, not {measured}: {found:?}"
        );
    }
    // speedscope's profile of a thread is the sum of its parts: measured off-CPU times, and 10.1 ms per tick on the CPU. Of 495 ticks, about
    // half hit by chance, ± sqrt(495 / 4) of them: 0.11 s. A thread that waits for a CPU is not hit, nor is one
    // whose CPU is taken away.
    let chance = 0.2 + 4.0 * 0.112 + recorded.late_s + recorded.delayed_s;
    for seconds in &sums {
        ensure_times!(
            (seconds - measured).abs() <= chance,
            "speedscope: {sums:?} s, not {measured} ± {chance}"
        );
    }
    Ok(())
}

/// Kernel frames have names, with and without native frames, and no output contains a kernel address.
#[test]
fn kernel_addresses_stay_secret() -> Result<()> {
    let live = Live::beside_others()?;
    for (name, flags) in [("native", &["--wall"][..]), ("ruby", &["--wall", "--no-native"])] {
        let dir = live.dir(name)?;
        // One second is enough to get names.
        let printed = record(&dir, "1s", flags)?.printed;
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
    let live = Live::beside_others()?;
    let (plain, gvl) = (live.path("plain.pb.gz"), live.path("gvl.pb.gz"));
    for (path, flags) in [(&plain, &[][..]), (&gvl, &["--gvl", "--wall"])] {
        let mut args: Vec<&OsStr> = vec!["--pprof".as_ref(), path.as_ref()];
        args.extend(flags.iter().map(OsStr::new));
        let script = Script::unwitnessed(&live, &Ruby::main()?, "pressure.rb")?;
        Script::under([script], args)?.1.done()?;
    }
    for (base, of) in [(&plain, &gvl), (&gvl, &plain)] {
        let alone = pprof::go_tool_pprof(&["-top", "-sample_index=cpu"], of)?;
        ensure!(alone.contains("Work.small"), "{alone}");
        let base = format!("-diff_base={}", base.display());
        let top = pprof::go_tool_pprof(&["-top", "-sample_index=cpu", &base], of)?;
        // A function with equally many samples in both is not shown; that can happen to any single function.
        ensure!(top.contains("Type: cpu") && top.contains("Work."), "{top}");
    }
    Ok(())
}
