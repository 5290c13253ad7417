//! Stacks as the kernel takes them: their depth, their threads, on and off the CPU, and that every loss is counted.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::ensure_times;
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::live::Live;
use gctrace_tests::report::Report;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::{Done, Script};
use gctrace_tests::stack_log::{self, Sample};
use serde_json::Value;

/// The name of the frame that stands for the missing root end, if there is one.
fn missing(sample: &Sample) -> Option<&str> {
    sample.stack.last().filter(|frame| frame.kind == "missing").map(|frame| frame.name.as_str())
}

/// The samples of a script, and its own report.
struct WatchedRun {
    samples: Vec<Sample>,
    report: Report,
    done: Done,
}

impl WatchedRun {
    /// Describes samples of more than 100 ms, and the ledger's counters of stacks.
    fn long(&self) -> String {
        let long = self.samples.iter().filter(|sample| sample.wall_ns > 100_000_000);
        let brief = |sample: &Sample| {
            let frames: Vec<&str> = sample.stack.iter().take(4).map(|frame| frame.name.as_str()).collect();
            format!("{} {} {} ns {frames:?}", sample.tid, sample.state, sample.wall_ns)
        };
        let long: Vec<String> = long.map(brief).collect();
        let ledger = self.report.ledger.iter().flat_map(|ledger| ledger.kernel.iter().chain(&ledger.user));
        let counts: Vec<String> = ledger
            .filter(|(name, value)| {
                (name.starts_with("off_cpu") || name.starts_with("stack")) && value.as_u64() != Some(0)
            })
            .map(|(name, value)| format!("{name} {value}"))
            .collect();
        format!("long ones: {long:#?}; counted: {counts:?}")
    }
}

fn watch(live: &Live, ruby: &Ruby, script: &str, args: &[&str], flags: &[&str]) -> Result<WatchedRun> {
    let path = live.path(&format!("{script}-{}.stacks", ruby.label()));
    let mut words = vec!["--stack-log".as_ref(), path.as_os_str()];
    words.extend(flags.iter().map(std::ffi::OsStr::new));
    let script = args.iter().fold(Script::unwitnessed(live, ruby, script)?, Script::arg);
    let (mut done, gctrace) = Script::under([script], words)?;
    let (report, done) = (gctrace.done()?.0, done.pop().context("no script")?);
    let samples = stack_log::of_process(&path, done.pid)?;
    ensure!(!samples.is_empty(), "no samples of process {}", done.pid);
    Ok(WatchedRun { samples, report, done })
}

fn kernel_counter(report: &Report, name: &str) -> Result<u64> {
    let ledger = report.ledger.as_ref().context("no ledger line")?;
    ledger.kernel.get(name).and_then(Value::as_u64).with_context(|| format!("no counter {name}"))
}

/// A recursion is reported with every one of its calls: exactly as deep as it is.
#[test]
fn recursion_is_whole() -> Result<()> {
    let live = Live::beside_others()?;
    Ruby::each(|ruby| {
        let seen = watch(&live, ruby, "deep.rb", &["800"], &["--no-native"])?;
        let inside = seen.samples.iter().filter(|sample| sample.frames_of("#spin") > 0).collect::<Vec<_>>();
        ensure!(inside.len() >= 10, "{} samples in spin", inside.len());
        for sample in inside {
            let calls = sample.frames_of("#descend");
            ensure!(calls == 800, "{calls} calls of 800");
            ensure!(missing(sample).is_none(), "{:?}", missing(sample));
            ensure!(sample.cpu_ns > 0 && sample.state == "running", "{} {}", sample.cpu_ns, sample.state);
        }
        ensure!(kernel_counter(&seen.report, "stack_truncated")? == 0, "stacks were cut");
        Ok(())
    })
}

/// A stack that is too deep reports that its root end is missing, and is counted.
#[test]
fn too_deep_is_said() -> Result<()> {
    let live = Live::beside_others()?;
    Ruby::each(|ruby| {
        let seen = watch(&live, ruby, "deep.rb", &["3000"], &["--no-native"])?;
        let inside = seen.samples.iter().filter(|sample| sample.frames_of("#spin") > 0).collect::<Vec<_>>();
        ensure!(inside.len() >= 10, "{} samples in spin", inside.len());
        for sample in &inside {
            ensure!(missing(sample) == Some("(truncated)"), "{:?}", sample.stack.last());
            // Some of the 2048 frames are `spin` and the function that reads the clock.
            let calls = sample.frames_of("#descend");
            ensure!((2040..2048).contains(&calls), "{calls} calls");
        }
        let cut = kernel_counter(&seen.report, "stack_truncated")?;
        ensure!(cut >= inside.len() as u64, "{cut} counted, {} seen", inside.len());
        Ok(())
    })
}

/// Blocked threads are seen for as long as they were blocked, in the method in which they were; so are waits for a CPU.
#[test]
fn blocked_time_is_whole() -> Result<()> {
    let live = Live::begin()?;
    Ruby::two_at_a_time(|ruby| {
        let seen = watch(&live, ruby, "off_cpu.rb", &[], &["--wall"])?;
        let took = seen.done.report.extra.get("took").and_then(Value::as_object).context("no `took`")?;
        for (name, ns) in took {
            let took = ns.as_f64().context("not a number")?;
            let method = format!("#{name}");
            let of = |state: &str| -> Vec<&Sample> {
                let there = |s: &&Sample| s.state == state && s.frames_of(&method) > 0;
                seen.samples.iter().filter(there).collect()
            };
            let blocked: u64 = of("blocked").iter().map(|sample| sample.wall_ns).sum();
            let runnable: u64 = of("runnable").iter().map(|sample| sample.wall_ns).sum();
            let off = (blocked + runnable) as f64;
            ensure_times!(off <= took, "{name}: {off} ns off the CPU, took {took} ns");
            // Up to 2.7, the VM knows only the thread that holds the GVL: a thread that has released it for another one has no
            // Ruby stack when it leaves its CPU, and its time is reported without one.
            if !ruby.is_at_least(3, 0) {
                continue;
            }
            // Times below a millisecond are not reported, and there is some CPU time in between.
            ensure_times!(off >= 0.9 * took, "{name}: {off} ns off the CPU, took {took} ns; {}", seen.long());
            ensure_times!(
                blocked as f64 >= 0.5 * took,
                "{name}: {blocked} ns blocked, took {took} ns; {}",
                seen.long()
            );
            let tids =
                of("blocked").iter().map(|sample| sample.tid).collect::<std::collections::BTreeSet<_>>();
            ensure!(tids.len() == 1, "{name} blocks in threads {tids:?}");
        }
        ensure!(took.len() == 3, "{took:?}");
        ensure!(kernel_counter(&seen.report, "off_cpu_submitted")? > 0, "nothing was off its CPU");
        Ok(())
    })
}

/// A thread that blocks until after tracing ends is reported with the time until then.
#[test]
fn blocked_at_the_end() -> Result<()> {
    const ASLEEP: Duration = Duration::from_millis(1500);
    let live = Live::beside_others()?;
    Ruby::each(|ruby| {
        let path = live.path(&format!("asleep-{}.stacks", ruby.label()));
        let mut script = Script::unwitnessed(&live, ruby, "asleep.rb")?.waiting().start()?;
        script.wait_for("ready")?;
        let pid = script.pid().to_string();
        let words = ["--pid", &pid, "--wall", "--stack-log"].map(std::ffi::OsStr::new);
        let gctrace = Invocation::jsonl(words.into_iter().chain([path.as_os_str()]))?.start_ready()?;
        let begun = Instant::now();
        script.say("go")?;
        script.wait_for("asleep")?;
        let asleep = Instant::now();
        std::thread::sleep(ASLEEP);
        let stopping = asleep.elapsed();
        let report = gctrace.stop()?;
        let longest = begun.elapsed();
        script.say("")?;
        let done = script.finish()?;
        let samples = stack_log::of_process(&path, done.pid)?;
        let blocked = samples.iter().filter(|s| s.state == "blocked");
        // Up to 2.7, a thread without the GVL has no Ruby stack.
        let there = blocked.filter(|s| s.frames_of("#forever") > 0 || !ruby.is_at_least(3, 0));
        let most = there.map(|sample| u128::from(sample.wall_ns)).max().context("no thread blocks")?;
        ensure!(
            (stopping.as_nanos()..longest.as_nanos()).contains(&most),
            "{most} ns in forever, which were {stopping:?} to {longest:?}"
        );
        let user = &report.ledger.as_ref().context("no ledger line")?.user;
        let still = user.get("off_cpu_still").and_then(Value::as_u64).context("no off_cpu_still")?;
        ensure!(still >= 2, "{still} threads were away at the end; there were two");
        Ok(())
    })
}
