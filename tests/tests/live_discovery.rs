//! Which processes are traced, and from when on.

use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::child::Guarded;
use gctrace_tests::gctrace::{Gctrace, Invocation};
use gctrace_tests::live::Live;
use gctrace_tests::report::{GcLine, Report};
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::{Report as ScriptReport, Script};
use gctrace_tests::timing::settled;
use gctrace_tests::witness::{Kind, Log};
use gctrace_tests::{PATIENCE, compare, ensure_times, ledger, tunemygc};

/// Checks that all cycles of the process during the script's work are reported, and equal to the witness's if there was one.
fn all_counted(report: &Report, script: &ScriptReport, log: Option<&Log>) -> Result<()> {
    ledger::check_lossless(report)?;
    let lines = report.gcs_of(script.pid).collect::<Vec<_>>();
    compare::program(&lines, script)?;
    if let Some(log) = log {
        compare::cycles(&lines, log).demand_equal()?;
    }
    Ok(())
}

/// Whether a text contains this number as a whole number.
fn names(text: &str, number: u32) -> bool {
    text.split(|c: char| !c.is_ascii_digit()).any(|word| word.parse() == Ok(number))
}

/// The pid of a process that has ended.
fn vanished_pid() -> Result<u32> {
    let mut child = Command::new("true").spawn().context("cannot run `true`")?;
    let pid = child.id();
    child.wait()?;
    Ok(pid)
}

/// Two Rubies at once, one started before and one after gctrace.
#[test]
fn one_before_and_one_after() -> Result<()> {
    let live = Live::begin()?;
    Ruby::first_and_last(|ruby| {
        let mut before = Script::new(&live, ruby, "explicit.rb")?.arg("30").waiting().start()?;
        before.wait_for("ready")?;
        let gctrace = Gctrace::all_ruby(&live)?;
        let mut after = Script::new(&live, ruby, "explicit.rb")?.arg("25").waiting().start()?;
        after.wait_for("ready")?;
        // Both run at the same time.
        before.say("go")?;
        after.say("go")?;
        let (before, after) = (before.finish()?, after.finish()?);
        let report = gctrace.stop()?;
        for done in [&before, &after] {
            all_counted(&report, &done.report, done.witness.as_ref())?;
        }
        let lines = report.gcs_of(after.pid).collect::<Vec<_>>();
        compare::one_life(&report, after.pid)?;
        compare::pauses(&lines, after.log()?)?;
        compare::pauses(&report.gcs_of(before.pid).collect::<Vec<_>>(), before.log()?)?;
        Ok(())
    })
}

/// On kernels before 5.15, which do not pass cookies to uprobes, image and load bias come from /proc;
/// the reported numbers are the same.
#[test]
fn without_attach_cookies() -> Result<()> {
    let live = Live::begin()?;
    Ruby::first_and_last(|ruby| {
        let mut script = Script::new(&live, ruby, "explicit.rb")?.arg("20").waiting().start()?;
        script.wait_for("ready")?;
        let gctrace = Invocation::jsonl(["--all-ruby", "--without-cookies"])?.start_ready()?;
        script.say("go")?;
        let done = script.finish()?;
        all_counted(&gctrace.stop()?, &done.report, done.witness.as_ref())?;
        Ok(())
    })
}

/// A process is in the middle of a cycle when gctrace starts: that cycle is not reported, nothing of it counts as
/// lost, and every later cycle is exact.
#[test]
fn attached_in_the_middle_of_a_cycle() -> Result<()> {
    let live = Live::begin()?;
    Ruby::first_and_last(|ruby| {
        let mut script = Script::new(&live, ruby, "midcycle.rb")?.waiting().start()?;
        script.wait_for("ready")?;
        let gctrace = Gctrace::all_ruby(&live)?;
        script.say("go")?;
        let done = script.finish()?;
        let report = gctrace.stop()?;
        assert_eq!(done.report.extra["state"], "sweeping", "the script was not in the middle of a cycle");
        let first = done.report.counts()?.next().context("no cycles")?;
        all_counted(&report, &done.report, done.witness.as_ref())?;
        let earlier = report.gcs_of(done.pid).filter(|line| line.count < first).count();
        assert_eq!(earlier, 0, "lines of a cycle whose start was not seen");
        compare::pauses(&report.gcs_of(done.pid).collect::<Vec<_>>(), done.log()?)?;
        Ok(())
    })
}

/// Compares whole cycles, which follow each other, with the part of the log in which they happened.
fn are_the_witnesss(lines: &[&GcLine], log: &Log) -> Result<()> {
    let [first, .., last] = lines else { anyhow::bail!("{} whole cycles", lines.len()) };
    let place =
        |kind, count| log.events.iter().position(|event| event.kind == kind && event.count() == count);
    let start = place(Kind::Start, first.count).context("its start is not in the log")?;
    let end = place(Kind::EndSweep, last.count).context("its end is not in the log")?;
    let enter =
        log.events[..start].iter().rposition(|event| event.kind == Kind::Enter).context("no enter")?;
    let exit = log.events[end..].iter().position(|event| event.kind == Kind::Exit).context("no exit")? + end;
    let part = Log {
        begin_ns: enter.checked_sub(1).map_or(log.begin_ns, |before| log.events[before].ns),
        end_ns: log.events[exit].ns,
        begins_in_a_cycle: false,
        events: log.events[enter..=exit].to_vec(),
        ..log.clone()
    };
    let compared = compare::cycles(lines, &part);
    compared.demand_equal()?;
    ensure!(
        (compared.starts, compared.ends) == (lines.len(), lines.len()),
        "{} starts and {} ends of {}",
        compared.starts,
        compared.ends,
        lines.len()
    );
    compare::pauses(lines, &part)?;
    Ok(())
}

/// Programs collect garbage continuously while gctrace attaches and while it stops: from the first line on, no cycle is missing, and nothing
/// counts as lost, because nothing was. State and pauses of all whole cycles are those of the witness.
#[test]
fn attached_to_busy_programs() -> Result<()> {
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    for round in 0..3 {
        let witnessed = round == 0;
        let script = || {
            let new = if witnessed { Script::new } else { Script::unwitnessed };
            new(&live, &ruby, "steady.rb")
        };
        let mut programs = (0..2).map(|_| script()?.arg("lazy").start()).collect::<Result<Vec<_>>>()?;
        for program in &mut programs {
            program.wait_for("ready")?;
        }
        let mut gctrace = Gctrace::all_ruby(&live)?;
        for program in &programs {
            gctrace.wait_line("gc", program.pid())?;
        }
        let report = gctrace.stop()?;
        ledger::check_lossless(&report)?;
        for mut program in programs {
            let counts = report.gcs_of(program.pid()).map(|line| line.count).collect::<Vec<_>>();
            ensure!(counts.windows(2).all(|pair| pair[0] + 1 == pair[1]), "cycles {counts:?}");
            let processes = report.processes_of(program.pid()).count();
            ensure!(processes == 1, "{processes} process lines");
            program.say("stop")?;
            let done = program.finish_any()?;
            if let Some(log) = &done.witness {
                let whole = report.gcs_of(done.pid).filter(|line| line.complete).collect::<Vec<_>>();
                ensure!(whole.len() + 1 >= counts.len(), "{} whole cycles of {counts:?}", whole.len());
                are_the_witnesss(&whole, log)?;
            }
        }
    }
    Ok(())
}

/// The `process` line describes the process.
#[test]
fn process_lines_describe_the_process() -> Result<()> {
    settled(a_process_line)
}

fn a_process_line() -> Result<()> {
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    let now = || std::time::UNIX_EPOCH.elapsed().map(|epoch| epoch.as_secs_f64());
    let (begun, started) = (Instant::now(), now()?);
    let gctrace = Gctrace::all_ruby(&live)?;
    let script = Script::unwitnessed(&live, &ruby, "explicit.rb")?;
    let before = now()?;
    let mut script =
        script.env("RUBY_GC_HEAP_GROWTH_FACTOR", "1.5").env("RUBY_GC_TOKEN", "s3cr3t").waiting().start()?;
    let after = now()?;
    script.wait_for("ready")?;
    script.say("go")?;
    let done = script.finish()?;
    let (report, finished) = gctrace.stop_by(rustix::process::Signal::INT)?;
    let processes = report.processes_of(done.pid).collect::<Vec<_>>();
    let [process] = processes.as_slice() else { anyhow::bail!("not one process line: {processes:?}") };
    assert_eq!(process.ruby, ruby.version());
    assert_eq!(process.ns_pid, Some(done.pid));
    assert_eq!(process.ppid, Some(std::process::id()));
    let env = process.env.as_ref().context("the environment is unknown")?;
    assert_eq!(env.get("RUBY_GC_HEAP_GROWTH_FACTOR").and_then(|value| value.as_str()), Some("1.5"));
    assert!(
        process.cmdline.iter().flatten().any(|word| word.ends_with("explicit.rb")),
        "{:?}",
        process.cmdline
    );
    let hostname = std::fs::read_to_string("/proc/sys/kernel/hostname")?;
    assert_eq!(process.hostname.as_deref(), Some(hostname.trim()));
    let start = process.start_ts.context("no start_ts")?;
    let set = now()? - started - begun.elapsed().as_secs_f64();
    ensure_times!(set.abs() < 0.005, "the clock was set by {set} s meanwhile");
    // The kernel keeps start times in ticks of 10 ms, rounded down.
    assert!(
        (before - 0.02..=after + 0.01).contains(&start),
        "start_ts {start}, but it was {before} to {after}"
    );
    assert!(!finished.stdout.iter().any(|line| line.contains("s3cr3t")), "the token is shown");
    assert!(!finished.errors().contains("s3cr3t"), "the token is shown");
    assert!(report.exits.iter().any(|exit| exit.pid == done.pid), "no exit line");
    Ok(())
}

/// Cycles of a forked child, and of its child, are reported under their own pids.
#[test]
fn fork() -> Result<()> {
    let live = Live::begin()?;
    Ruby::first_and_last(|ruby| {
        let gctrace = Gctrace::all_ruby(&live)?;
        let running = Script::new(&live, ruby, "forker.rb")?.start()?;
        let outputs = running.outputs();
        let done = running.finish()?;
        let report = gctrace.stop()?;
        all_counted(&report, &done.report, done.witness.as_ref())?;
        compare::one_life(&report, done.pid)?;
        let mut parent = done.pid;
        for (key, suffix) in [("child", ".child"), ("grandchild", ".grandchild")] {
            let (child, log) = outputs.read(suffix)?;
            assert_ne!(child.pid, parent);
            assert!(child.growth("count")? > 0, "the {key} did not collect");
            all_counted(&report, &child, log.as_ref())?;
            let process =
                report.processes_of(child.pid).next().with_context(|| format!("no line about the {key}"))?;
            assert_eq!(process.ppid, Some(parent), "parent of the {key}");
            parent = child.pid;
        }
        Ok(())
    })
}

/// A daemon forks twice: its parent is the process between, which has ended and never collected, and its count continues that of the first.
#[test]
fn daemon() -> Result<()> {
    let live = Live::begin()?;
    let source = "$stdout.sync = true; GC.start; first = GC.count; \
                  fork { fork { 4.times { GC.start }; puts \"daemon #{$$} #{first} #{GC.count}\"; $stdin.readpartial(4) }; puts \"between #{$$}\"; exit!(0) }; \
                  Process.waitall; $stdin.readpartial(4)";
    let mut command = Ruby::main()?.command()?;
    command.args(["--disable-gems", "-e", source]);
    let gctrace = Gctrace::all_ruby(&live)?;
    let mut program = Guarded::start("ruby", &mut command)?;
    let mut numbers = |word: &str| -> Result<Vec<u64>> {
        let printed = program.wait_stdout(PATIENCE, word, |line| line.starts_with(word))?;
        Ok(printed.split(' ').skip(1).map(str::parse).collect::<Result<_, _>>()?)
    };
    let (between, daemon) = (numbers("between")?, numbers("daemon")?);
    let pid = u32::try_from(daemon[0])?;
    program.say("end")?;
    program.say("end")?;
    program.finish(PATIENCE)?;
    let report = gctrace.stop()?;
    let process = report.processes_of(pid).next().context("no line about the daemon")?;
    assert_eq!(process.ppid.map(u64::from), Some(between[0]));
    assert_eq!(report.gcs_of(pid).count() as u64, daemon[2] - daemon[1]);
    let exit = report.exits.iter().find(|exit| exit.pid == pid).context("no end of the daemon")?;
    assert_eq!((exit.cycles_before, exit.cycles_missed), (Some(0), Some(0)));
    ledger::check(&report)
}

/// A fork of a process that ran before gctrace.
#[test]
fn fork_of_an_earlier_process() -> Result<()> {
    let live = Live::begin()?;
    let mut running = Script::new(&live, &Ruby::main()?, "forker.rb")?.waiting().start()?;
    running.wait_for("ready")?;
    let gctrace = Gctrace::all_ruby(&live)?;
    running.say("go")?;
    let outputs = running.outputs();
    let done = running.finish()?;
    let report = gctrace.stop()?;
    all_counted(&report, &done.report, done.witness.as_ref())?;
    for suffix in [".child", ".grandchild"] {
        let (child, log) = outputs.read(suffix)?;
        all_counted(&report, &child, log.as_ref())?;
    }
    Ok(())
}

/// Tracing of a single --pid continues after an exec of that process.
#[test]
fn selected_pid_execs() -> Result<()> {
    execs(&Live::beside_others()?, None)
}

/// The same if a thread other than the main one calls exec. The main thread then ends first: the kernel reports its exit before the exec.
#[test]
fn selected_pid_execs_in_a_thread() -> Result<()> {
    execs(&Live::beside_others()?, Some("thread"))
}

fn execs(live: &Live, arg: Option<&str>) -> Result<()> {
    Ruby::first_and_last(|ruby| {
        let script = Script::new(live, ruby, "execer.rb")?.waiting();
        let script = match arg {
            Some(arg) => script.arg(arg),
            None => script,
        };
        let mut running = script.start()?;
        running.wait_for("ready")?;
        let gctrace = Invocation::jsonl(["--pid", &running.pid().to_string()])?.start_ready()?;
        running.say("go")?;
        let outputs = running.outputs();
        let done = running.finish()?;
        let report = gctrace.stop()?;
        let (after, _) = outputs.read(".after")?;
        let lines = report.gcs_of(done.pid).collect::<Vec<&GcLine>>();
        let second =
            lines.windows(2).position(|pair| pair[1].count <= pair[0].count).context("no second program")?;
        let (first, second) = lines.split_at(second + 1);
        compare::program(first, &done.report)?;
        compare::program(second, &after)?;
        ledger::check_lossless(&report)?;
        Ok(())
    })
}

/// A program that execs another Ruby program: two programs under one pid, two sample sets.
#[test]
fn exec() -> Result<()> {
    let live = Live::begin()?;
    Ruby::first_and_last(|ruby| {
        let index = ruby.label();
        let sets = live.dir(&format!("sets{index}"))?;
        let args = [OsArg::from("--all-ruby"), "--tunemygc".into(), sets.clone().into()];
        let gctrace = Invocation::jsonl(args)?.start_ready()?;
        let running = Script::new(&live, ruby, "execer.rb")?.start()?;
        let outputs = running.outputs();
        let done = running.finish()?;
        let report = gctrace.stop()?;
        ledger::check_lossless(&report)?;
        let (after, after_log) = outputs.read(".after")?;
        assert_eq!(after.pid, done.pid, "exec keeps the pid");

        // Counts restart, so the lines of the two programs are separated at the restart.
        let lines = report.gcs_of(done.pid).collect::<Vec<&GcLine>>();
        let second =
            lines.windows(2).position(|pair| pair[1].count <= pair[0].count).context("no second program")?;
        let (first, second) = lines.split_at(second + 1);
        for (lines, script, log) in
            [(first, &done.report, done.witness.as_ref()), (second, &after, after_log.as_ref())]
        {
            compare::whole_life(lines, done.pid)?;
            compare::program(lines, script)?;
            compare::cycles(lines, log.context("no log")?).demand_equal()?;
        }
        let last = report.processes_of(done.pid).last().context("no process line")?;
        let last_word = last.cmdline.iter().flatten().next_back();
        assert_eq!(last_word.map(String::as_str), Some("after"), "the line is about the new program");
        let sets = tunemygc::Set::read_dir(&sets)?;
        assert_eq!(sets.iter().filter(|set| set.pid == done.pid).count(), 2, "one sample set per program");
        Ok(())
    })
}

type OsArg = std::ffi::OsString;

/// A script that lives for 0.3 s while no other Ruby runs, and a second one after it.
#[test]
fn short_lives() -> Result<()> {
    let live = Live::begin()?;
    Ruby::first_and_last(|ruby| {
        let gctrace = Gctrace::all_ruby(&live)?;
        let first = Script::unwitnessed(&live, ruby, "short.rb")?.run()?;
        let second = Script::new(&live, ruby, "short.rb")?.run()?;
        let report = gctrace.stop()?;
        for done in [&first, &second] {
            assert!(done.report.growth("count")? > 0, "the script did not collect");
            all_counted(&report, &done.report, done.witness.as_ref())?;
            compare::one_life(&report, done.pid)?;
        }
        Ok(())
    })
}

/// `-- COMMAND` starts a program, traces it and ends with it.
#[test]
fn command() -> Result<()> {
    let live = Live::begin()?;
    Ruby::first_and_last(|ruby| {
        let (command, env, outputs) = Script::new(&live, ruby, "explicit.rb")?.arg("12").into_parts()?;
        let args = std::iter::once(OsArg::from("--")).chain(command);
        let (report, _) = Invocation::jsonl(args)?.envs(env).start()?.done()?;
        let (script, log) = outputs.read("")?;
        all_counted(&report, &script, log.as_ref())?;
        let others = report.gcs.iter().filter(|line| line.pid != script.pid).count();
        assert_eq!(others, 0, "only the command was selected");
        Ok(())
    })
}

/// `--pid` selects that process and nothing else, not even a process of the same image.
#[test]
fn only_the_selected_pid() -> Result<()> {
    let live = Live::beside_others()?;
    Ruby::first_and_last(|ruby| {
        let mut wanted = Script::new(&live, ruby, "explicit.rb")?.waiting().start()?;
        let mut other = Script::new(&live, ruby, "explicit.rb")?.waiting().start()?;
        wanted.wait_for("ready")?;
        other.wait_for("ready")?;
        let gctrace = Invocation::jsonl(["--pid", &wanted.pid().to_string()])?.start_ready()?;
        other.say("go")?;
        wanted.say("go")?;
        let (wanted, other) = (wanted.finish()?, other.finish()?);
        let report = gctrace.stop()?;
        all_counted(&report, &wanted.report, wanted.witness.as_ref())?;
        assert!(other.report.growth("count")? > 0, "the other one did not collect");
        assert!(
            report.gcs.iter().all(|line| line.pid == wanted.pid),
            "lines of processes that were not selected"
        );
        assert!(report.processes.iter().all(|process| process.pid == wanted.pid), "{:?}", report.processes);
        Ok(())
    })
}

/// A pid that is not a Ruby and a pid that is gone lead to one clear line each, and the other pids are traced.
#[test]
fn bad_pids_do_not_stop_the_others() -> Result<()> {
    let live = Live::beside_others()?;
    let no_ruby = Guarded::start("sleep", Command::new("sleep").arg("600"))?;
    let gone = vanished_pid()?;
    let mut script = Script::new(&live, &Ruby::main()?, "explicit.rb")?.waiting().start()?;
    script.wait_for("ready")?;
    let pids = [gone, no_ruby.pid(), script.pid()].map(|pid| pid.to_string());
    let gctrace = Invocation::jsonl(pids.iter().flat_map(|pid| ["--pid", pid]))?.start_ready()?;
    script.say("go")?;
    let done = script.finish()?;
    let (report, finished) = gctrace.stop_by(rustix::process::Signal::INT)?;
    all_counted(&report, &done.report, done.witness.as_ref())?;
    for pid in [gone, no_ruby.pid()] {
        let lines = finished.stderr.iter().filter(|line| names(line, pid)).collect::<Vec<_>>();
        assert_eq!(lines.len(), 1, "lines about {pid}: {:?}", finished.stderr);
        assert!(!report.gcs.iter().any(|line| line.pid == pid));
    }
    Ok(())
}

/// gctrace does not trace itself, and an idle Ruby has a process line and no cycles.
#[test]
fn own_process_and_idle_ruby() -> Result<()> {
    let live = Live::begin()?;
    let mut idle = Script::unwitnessed(&live, &Ruby::main()?, "idle.rb")?.start()?;
    idle.wait_for("idle")?;
    let mut gctrace = Gctrace::all_ruby(&live)?;
    let own = gctrace.pid();
    gctrace.wait_line("process", idle.pid())?;
    let report = gctrace.stop()?;
    let pid = idle.pid();
    idle.say("end")?;
    idle.finish()?;
    assert_eq!(report.gcs_of(pid).count(), 0, "cycles of an idle program");
    assert_eq!(report.processes_of(pid).count(), 1);
    assert!(report.processes.iter().all(|process| process.pid != own), "gctrace lists itself");
    assert!(report.refused.iter().all(|refused| refused.pid != Some(own)), "gctrace looks at itself");
    Ok(())
}

/// Processes start and end while gctrace inspects them: many short-lived ones at once, all counted.
#[test]
fn many_short_lives() -> Result<()> {
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    let gctrace = Gctrace::all_ruby(&live)?;
    let mut noise = Command::new("sh");
    noise.args([
        "-c",
        "for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do true; /bin/true; done",
    ]);
    let noise = Guarded::start("sh", noise.stdin(Stdio::null()))?;
    let mut all = Vec::new();
    for _ in 0..12 {
        let pair = (0..2)
            .map(|_| Script::unwitnessed(&live, &ruby, "explicit.rb")?.arg("3").start())
            .collect::<Result<Vec<_>>>()?;
        for running in pair {
            all.push(running.finish()?);
        }
    }
    ensure!(noise.finish(PATIENCE)?.status.success());
    let report = gctrace.stop()?;
    for done in &all {
        all_counted(&report, &done.report, None)?;
        compare::one_life(&report, done.pid)?;
    }
    Ok(())
}

/// Forked children that soon exec another program or end are reported as they were until then: with the command line, settings and service of
/// their parent, not with those of the program that they became before gctrace could inspect them.
#[test]
fn forked_and_gone() -> Result<()> {
    const CHILDREN: usize = 30;
    let live = Live::beside_others()?;
    let script = live.path("forks-and-execs.rb");
    std::fs::write(
        &script,
        format!(
            "children = Array.new({CHILDREN}) {{ |n| fork {{ 60.times {{ Array.new(100) {{ 'x' * 50 }} }}; GC.start; n.even? ? exec({{'RUBY_GC_HEAP_GROWTH_FACTOR' => '3'}}, '/bin/sleep', '0.2') : exit! }} }}
             children.each {{ |pid| Process.wait(pid) }}"
        ),
    )?;
    let ruby = Ruby::main()?;
    // gctrace inspects them late, because it analyses their Ruby first.
    let mut args: Vec<std::ffi::OsString> = vec!["--no-cache".into(), "--".into()];
    args.extend(ruby.argv()?);
    args.push(script.clone().into_os_string());
    let (report, finished) = Invocation::jsonl(args)?.start_ready()?.done()?;
    ledger::check(&report)?;
    let parent = report.processes.first().with_context(|| finished.errors())?;
    let command = parent.cmdline.as_ref().context("no command line")?;
    ensure!(command.last().map(String::as_str) == script.to_str(), "{command:?}");
    let children: Vec<_> = report.processes.iter().filter(|line| line.pid != parent.pid).collect();
    ensure!(children.len() == CHILDREN, "{} children: {}", children.len(), finished.errors());
    for child in children {
        ensure!(child.cmdline.as_ref() == Some(command) && child.comm == parent.comm, "{child:?}");
        ensure!(
            child.env.as_ref().is_some_and(serde_json::Map::is_empty) && child.ppid == Some(parent.pid),
            "{child:?}"
        );
    }
    let services = report.summaries.iter().filter(|line| line["service"] == "forks-and-execs.rb");
    ensure!(services.count() == CHILDREN + 1, "{:?}", report.summaries);
    Ok(())
}
