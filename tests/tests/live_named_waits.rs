//! What threads off their CPU wait for, by name.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::ensure_times;
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::ledger;
use gctrace_tests::live::Live;
use gctrace_tests::pprof::{Profile, Sample};
use gctrace_tests::report::GvlSplitLine;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::Script;
use gctrace_tests::witness;

const GVL: &str = "(GVL wait)";
const BLOCKED: &str = "(blocked)";
const CPU: &str = "(CPU wait)";
const MUTEX: &str = "(Mutex wait)";
const IO: [&str; 2] = ["(I/O wait)", "(I/O or timeout wait)"];

/// The error if no Ruby could be tested.
const NO_HOLDS: &str = "no Ruby shows how long a thread holds the GVL";

/// What each thread of the script waits for, besides the GVL.
const WAITS: [(&str, &[&str]); 11] = [
    ("sleeps", &["(sleep)"]),
    ("inner", &["(sleep)"]),
    ("feeds", &["(sleep)", MUTEX]),
    ("mutex", &[MUTEX]),
    ("monitor", &["(Monitor wait)"]),
    ("condition", &["(ConditionVariable wait)", MUTEX]),
    ("queue", &["(Queue wait)"]),
    ("io", &IO),
    ("process", &["(process wait)"]),
    ("thread", &["(thread wait)"]),
    ("spins", &[]),
];

/// The marks of stacks without Ruby frames: of a native thread that has no Ruby thread, not yet or no longer, and up to 3.1 also while a thread
/// acquires or releases the GVL.
const NO_FRAMES: [&str; 3] = ["(Ruby context in transition)", "(no Ruby context)", "(no Ruby frames)"];

/// A stack of a process: thread name, last row, nanoseconds, and whether it lacks Ruby frames.
struct Wait<'a> {
    path: &'a str,
    thread: &'a str,
    row: &'a str,
    ns: u64,
    unknown: bool,
}

/// Whether a row names what a thread off its CPU waited for, other than a CPU.
fn is_wait(row: &str) -> bool {
    row != CPU && (row.ends_with(" wait)") || ["(sleep)", BLOCKED].contains(&row))
}

/// The waits of a process's threads off their CPU, according to a file.
fn waits(folded: &str, pid: u32) -> Result<Vec<Wait<'_>>> {
    let mut waits = Vec::new();
    for line in folded.lines() {
        let (path, ns) = line.rsplit_once(' ').context("no weight")?;
        let mut names = path.split(';');
        let (process, thread) = (names.next().context("no process")?, names.next().context("no thread")?);
        let row = names.next_back().context("no row")?;
        // A child has the thread names of its parent.
        if process.ends_with(&format!("(pid {pid})")) && is_wait(row) {
            let unknown = NO_FRAMES.iter().any(|mark| path.contains(mark));
            waits.push(Wait { path, thread, row, ns: ns.parse()?, unknown });
        }
    }
    Ok(waits)
}

/// Each wait has its name. The total time of waits for the GVL, and that of all other waits, agree with the GVL account, which is computed
/// from other events.
#[test]
fn waits_have_names() -> Result<()> {
    let live = Live::begin()?;
    let mut tried = 0;
    Ruby::each(|ruby| {
        if !ruby.tells_holds() {
            return Ok(());
        }
        tried += 1;
        let path = live.path(&format!("waits-{}.folded", ruby.label()));
        let flags =
            ["--all-ruby", "--gvl", "--gvl-budget", "100", "--wall", "--stack-root", "thread", "--folded"];
        let pprof = live.path(&format!("waits-{}.pb.gz", ruby.label()));
        let files = [path.as_os_str(), "--pprof".as_ref(), pprof.as_os_str()];
        let words = flags.iter().map(AsRef::as_ref).chain(files);
        let gctrace = Invocation::jsonl(words)?.start_ready()?;
        let done = Script::unwitnessed(&live, ruby, "named_waits.rb")?.run()?;
        let report = gctrace.stop()?;
        ledger::check_lossless(&report)?;
        let folded = fs::read_to_string(&path)?;
        let waits = waits(&folded, done.pid)?;
        let sum = |of: &dyn Fn(&Wait<'_>) -> bool| -> u64 {
            waits.iter().filter(|wait| of(wait)).map(|wait| wait.ns).sum()
        };
        let splits = |of: &dyn Fn(&str) -> bool| -> Result<Vec<GvlSplitLine>> {
            let lines = report.gvl_threads.iter().filter(|line| line.pid == done.pid && of(&line.comm));
            lines.map(|line| line.split.with_context(|| format!("no split of {line:?}"))).collect()
        };
        // Short times off the CPU have no sample.
        let near = |told: u64, least: u64, most: u64| {
            let slack = most / 50 + 10_000_000;
            told + slack >= least && told <= most + slack
        };
        // Summed over all threads, because a thread's first wait is before it has its name and before its native thread is known.
        let gvl = sum(&|wait| wait.row == GVL);
        let waited: u64 = splits(&|_| true)?.iter().map(|split| split.wait.blocked_ns).sum();
        let unknown = sum(&|wait| wait.row == BLOCKED && wait.unknown);
        ensure_times!(
            near(gvl, waited.saturating_sub(unknown), waited),
            "waited {waited} ns for the GVL, {gvl} have that name"
        );
        ensure!(gvl > 1_000_000_000, "waited {gvl} ns for the GVL");
        let profile = Profile::open(&pprof)?;
        let wall = profile.index("wall/nanoseconds")?;
        let pid = done.pid.to_string();
        for row in [GVL, MUTEX, "(sleep)", BLOCKED] {
            let own = |sample: &&Sample| {
                sample.label("pid") == Some(&pid)
                    && sample.label("wait").map(|wait| format!("({wait})")).as_deref() == Some(row)
            };
            let labelled: u64 = profile.samples.iter().filter(own).map(|sample| sample.values[wall]).sum();
            let in_rows = sum(&|wait| wait.row == row);
            ensure!(labelled == in_rows, "{row}: {in_rows} ns in rows, {labelled} by label");
        }
        for (name, own) in WAITS {
            let is_own = |wait: &Wait<'_>| wait.thread == name && own.contains(&wait.row);
            let without = |wait: &Wait<'_>| wait.thread == name && (wait.unknown || wait.row == BLOCKED);
            let (named, unknown) = (sum(&is_own), sum(&without));
            let of_thread = || waits.iter().filter(|wait| wait.thread == name && !wait.unknown);
            let wrong =
                of_thread().find(|wait| ![GVL, BLOCKED].contains(&wait.row) && !own.contains(&wait.row));
            ensure!(wrong.is_none(), "{name}: {}", wrong.map_or("", |wait| wait.path));
            // Up to 3.1, a thread whose time slice is over waits until another one holds the GVL, and only then for it. Threads also wait for
            // locks of the VM.
            let locks: u64 = of_thread().filter(|wait| wait.row == BLOCKED).map(|wait| wait.ns).sum();
            ensure_times!(locks < 10_000_000, "{name} was blocked for {locks} ns without a reason");
            let blocked = |split: &GvlSplitLine| split.away.blocked_ns + split.hold.blocked_ns;
            let elsewhere: u64 = splits(&|comm| comm == name)?.iter().map(blocked).sum();
            ensure_times!(
                near(named, elsewhere.saturating_sub(unknown), elsewhere),
                "{name} waited {elsewhere} ns, {named} have a name, {unknown} no stack"
            );
        }
        Ok(())
    })?;
    ensure!(tried > 0, "{NO_HOLDS}");
    Ok(())
}

/// A thread's first wait for the GVL counts as one, and so does a wait that is not over when tracing ends.
#[test]
fn first_and_last_waits() -> Result<()> {
    let live = Live::begin()?;
    let tried = AtomicBool::new(false);
    Ruby::two_at_a_time(|ruby| {
        if !ruby.tells_holds() {
            return Ok(());
        }
        tried.store(true, Ordering::Relaxed);
        let path = live.path(&format!("unfinished-{}.folded", ruby.label()));
        let flags =
            ["--all-ruby", "--gvl", "--gvl-budget", "100", "--wall", "--stack-root", "thread", "--folded"];
        let words = flags.iter().map(AsRef::as_ref).chain([path.as_os_str()]);
        let script = Script::unwitnessed(&live, ruby, "gvl_unfinished.rb")?;
        let mut script = script.env("GCTRACE_TEST_GVL_WITNESS", witness::gvl_extension(ruby)?).start()?;
        script.wait_for("ready")?;
        let gctrace = Invocation::jsonl(words)?.start_ready()?;
        script.say("go")?;
        script.wait_for("holding")?;
        std::thread::sleep(Duration::from_millis(1_500));
        let report = gctrace.stop()?;
        ledger::check_lossless(&report)?;
        let folded = fs::read_to_string(&path)?;
        let waits = waits(&folded, script.pid())?;
        let sum = |of: &dyn Fn(&Wait<'_>) -> bool| -> u64 {
            waits.iter().filter(|wait| of(wait)).map(|wait| wait.ns).sum()
        };
        let last = sum(&|wait| wait.thread == "late" && wait.row == GVL);
        ensure_times!(last > 1_000_000_000, "{}: the last wait has {last} ns: {folded}", ruby.label());
        let first = sum(&|wait| wait.thread != "late" && wait.row == GVL);
        // From 3.2 on, a native thread has no context before it acquires the GVL, and nothing else identifies its thread.
        let told = !ruby.is_at_least(3, 2);
        ensure_times!(
            !told || first > 1_000_000_000,
            "{}: first waits have {first} ns: {folded}",
            ruby.label()
        );
        let blocked = sum(&|wait| wait.row == BLOCKED);
        ensure_times!(!told || blocked < 100_000_000, "{}: {blocked} ns: {folded}", ruby.label());
        Ok(())
    })?;
    ensure!(tried.into_inner(), "{NO_HOLDS}");
    Ok(())
}
