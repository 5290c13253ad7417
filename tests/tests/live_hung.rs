//! Programs that hang: threads that sleep from before tracing starts until after it has ended.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::ledger;
use gctrace_tests::live::Live;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::Script;
use gctrace_tests::stack_log::{self, Sample};
use rustix::process::Signal;

/// How long the program is watched while it hangs.
const WATCHED: Duration = Duration::from_millis(1500);

/// How often each thread of a process has left a CPU, according to the kernel.
fn switches(pid: u32) -> Result<BTreeMap<u32, Vec<String>>> {
    let mut all = BTreeMap::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let entry = entry?;
        let tid = entry.file_name().to_string_lossy().parse().context("the name of a thread's folder")?;
        let status = std::fs::read_to_string(entry.path().join("status"))?;
        let counts = status.lines().filter(|line| line.contains("ctxt_switches"));
        all.insert(tid, counts.map(str::to_owned).collect());
    }
    Ok(all)
}

/// The methods of `hung.rb` and their callees. Each of its threads is in one of them.
const METHODS: [(&str, &str); 5] = [
    ("#held", "select"),
    ("#locking_a", "synchronize"),
    ("#locking_b", "synchronize"),
    ("#locking_c", "lock"),
    ("#joining", "join"),
];

/// Each thread of a hanging program is shown with its Ruby stack and the time of the run, and has not run because it was inspected.
#[test]
fn each_thread_is_there() -> Result<()> {
    let live = Live::beside_others()?;
    Ruby::each(|ruby| {
        let path = live.path(&format!("hung-{}.stacks", ruby.label()));
        let mut script = Script::unwitnessed(&live, ruby, "hung.rb")?.start()?;
        script.wait_for("hung")?;
        // Wait until the last thread sleeps.
        let mut before = switches(script.pid())?;
        loop {
            std::thread::sleep(Duration::from_millis(200));
            let now = switches(script.pid())?;
            if now == before {
                break;
            }
            before = now;
        }
        let pid = script.pid();
        let (pids, path_arg) = (pid.to_string(), path.to_string_lossy());
        let words = ["--pid", &pids, "--wall", "--stack-log", &path_arg];
        let begun = Instant::now();
        let gctrace = Invocation::jsonl(words)?.start_ready()?;
        let ready = Instant::now();
        std::thread::sleep(WATCHED);
        let least = ready.elapsed();
        let (report, finished) = gctrace.stop_by(Signal::INT)?;
        let most = begun.elapsed();
        let after = switches(pid)?;
        script.say("")?;
        script.finish()?;

        let of_script = stack_log::of_process(&path, pid)?;
        let asleep: BTreeSet<u32> = before
            .iter()
            .filter(|(tid, counts)| after.get(tid) == Some(counts))
            .map(|(tid, _)| *tid)
            .collect();
        ensure!(asleep.len() >= METHODS.len(), "{before:?} became {after:?}");
        // No thread is left out, whatever its stack.
        for tid in &asleep {
            let wall: u64 = of_script.iter().filter(|s| s.tid == *tid).map(|sample| sample.wall_ns).sum();
            ensure!(
                (least.as_nanos()..most.as_nanos()).contains(&u128::from(wall)),
                "thread {tid} has {wall} ns of {least:?} to {most:?}"
            );
        }
        // A release with unknown layouts has no Ruby stacks at all, and gctrace says so.
        if finished.errors().contains("its Ruby stacks are not read") {
            ensure!(!ruby.has_tables(), "{}", finished.errors());
            let unread = |sample: &Sample| sample.stack.iter().any(|f| f.name == "(Ruby stack not readable)");
            ensure!(of_script.iter().all(unread), "{of_script:?}");
            return Ok(());
        }
        let mut seen = BTreeSet::new();
        for (method, callee) in METHODS {
            let inside: Vec<&Sample> = of_script
                .iter()
                .filter(|sample| sample.stack.iter().any(|frame| frame.name.ends_with(method)))
                .collect();
            let names: Vec<_> = inside.iter().map(|s| (s.tid, &s.state)).collect();
            ensure!(inside.len() == 1, "{method} has the samples {names:?} of {of_script:?}");
            let sample = inside[0];
            ensure!(sample.state == "blocked", "{method} is {}", sample.state);
            let ruby_frames: Vec<&str> = sample
                .stack
                .iter()
                .filter(|frame| frame.kind == "cfunction" || frame.kind == "ruby")
                .map(|frame| frame.name.as_str())
                .collect();
            let leaf = ruby_frames.first().context("no frames")?;
            ensure!(leaf.ends_with(callee), "{method} is in {leaf}: {ruby_frames:?}");
            ensure!(sample.stack.iter().all(|frame| frame.kind != "missing"), "{:?}", sample.stack);
            ensure!(seen.insert(sample.tid), "two methods in thread {}", sample.tid);
        }
        let sleepers = ledger::user(&report, "sleepers")?;
        ensure!(sleepers >= asleep.len() as u64, "{sleepers} sleepers, {} threads slept", asleep.len());
        Ok(())
    })
}
