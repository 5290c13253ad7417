//! `gctrace dump`: what the threads of a running process are doing, compared with Ruby's own view.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::child::Finished;
use gctrace_tests::container::Engine;
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::live::Live;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::{Running, Script};
use rustix::process::Signal;
use rustix::time::{ClockId, clock_gettime};
use serde_json::Value;

/// Maximum number of attempts to see something that is present most of the time.
const LOOKS: u32 = 200;

fn dump(live: &Live, pid: u32, more: &[&str]) -> Result<Finished> {
    let (pid, cache) = (pid.to_string(), live.path("cache").to_string_lossy().into_owned());
    let args = ["dump", "--pid", &pid, "--format", "jsonl", "--cache-dir", &cache];
    Invocation::new(args.iter().chain(more).copied())?.run()
}

/// The line of the process, and its threads by name. The main thread is `main`.
fn threads(live: &Live, pid: u32) -> Result<(Value, BTreeMap<String, Value>)> {
    threads_with(live, pid, &[])
}

fn threads_with(live: &Live, pid: u32, more: &[&str]) -> Result<(Value, BTreeMap<String, Value>)> {
    let finished = dump(live, pid, more)?;
    ensure!(finished.status.success(), "{:?}\n{}", finished.status, finished.errors());
    let lines: Vec<Value> =
        finished.stdout.iter().map(|line| serde_json::from_str(line)).collect::<Result<_, _>>()?;
    let (first, rest) = lines.split_first().context("no line")?;
    ensure!(first["type"] == "process" && rest.iter().all(|line| line["type"] == "thread"), "{lines:?}");
    let name = |line: &Value| match line["main"].as_bool() {
        Some(true) => "main".to_owned(),
        _ => line["name"].as_str().unwrap_or_default().to_owned(),
    };
    Ok((first.clone(), rest.iter().map(|line| (name(line), line.clone())).collect()))
}

fn started(live: &Live, ruby: &Ruby, args: [&str; 2]) -> Result<Running> {
    let script = Script::unwitnessed(live, ruby, "dumped.rb")?.arg(args[0]).arg(args[1]);
    let mut script = script.start()?;
    script.wait_for("dumped")?;
    Ok(script)
}

/// `label` without the class before its method: releases up to 3.3 do not print it, and gctrace always does.
fn bare(label: &str) -> String {
    let (prefix, method) = label.rsplit_once(' ').map_or(("", label), |(prefix, method)| (prefix, method));
    let method = method.rsplit(['#', '.']).next().unwrap_or(method);
    format!("{prefix} {method}")
}

/// A line of `Thread#backtrace`: place and label.
fn ruby_line(line: &str) -> Result<(String, String)> {
    let (place, label) = line.split_once(":in ").with_context(|| line.to_owned())?;
    Ok((place.to_owned(), bare(label.trim_matches(['`', '\'']))))
}

/// The same for a thread of the dump. Ruby shows C functions at the place of their callers.
fn dumped_lines(thread: &Value) -> Result<Vec<(String, String)>> {
    let stack = thread["stack"].as_array().context("stack")?;
    let place = |frame: &Value| Some(format!("{}:{}", frame["file"].as_str()?, frame["line"].as_u64()?));
    let lines = (0..stack.len()).map(|at| {
        let at_or_below = stack[at..].iter().find_map(place).unwrap_or_default();
        (at_or_below, bare(stack[at]["name"].as_str().unwrap_or_default()))
    });
    Ok(lines.collect())
}

/// Sleeping threads have the frames that `Thread#backtrace` shows, including the lines. The reason of each wait is right, the two threads that
/// deadlock each other are named, and no thread has run because it was inspected.
#[test]
fn equals_thread_backtrace() -> Result<()> {
    let live = Live::beside_others()?;
    Ruby::each(|ruby| {
        let mut script = started(&live, ruby, ["", "0"])?;
        let pid = script.pid();
        let switches = |tid: &Value| {
            let path = format!("/proc/{pid}/task/{tid}/status");
            let status = std::fs::read_to_string(path).unwrap_or_default();
            status
                .lines()
                .filter(|line| line.contains("ctxt_switches"))
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        let (_, first) = threads(&live, pid)?;
        let before: Vec<_> = first.values().map(|thread| switches(&thread["tid"])).collect();
        let (process, found) = threads(&live, pid)?;
        let (_, native) = threads_with(&live, pid, &["--native"])?;
        let after: Vec<_> = first.values().map(|thread| switches(&thread["tid"])).collect();
        script.say("go")?;
        let report = script.finish()?.report;

        if process["no_stacks"].is_string() {
            ensure!(!ruby.has_tables(), "{process}");
            return Ok(());
        }
        // The timer thread of some releases runs by itself. It is not a Ruby thread.
        ensure!(
            before
                .iter()
                .zip(&after)
                .zip(first.values())
                .all(|((one, two), t)| one == two || t["ruby"] == false)
        );
        let expected = report.extra["backtraces"].as_object().context("backtraces")?;
        for (name, lines) in expected {
            let thread =
                found.get(name).with_context(|| format!("no thread {name:?} in {:?}", found.keys()))?;
            ensure!(thread["stack_read"] == "slept", "{thread}");
            let lines = lines.as_array().context("lines")?.iter();
            let lines =
                lines.map(|line| ruby_line(line.as_str().unwrap_or_default())).collect::<Result<Vec<_>>>()?;
            let dumped = dumped_lines(thread)?;
            ensure!(dumped == lines, "{} {name:?}: {dumped:?}, Ruby says {lines:?}", ruby.label());
        }
        ensure!(
            found["main"]["open_on"].as_str().is_some_and(|on| on.starts_with("pipe:[")),
            "{}",
            found["main"]
        );
        let tid = |name: &str| found[name]["tid"].as_u64().unwrap_or_default();
        for (one, other) in [("locks a", "locks b"), ("locks b", "locks a")] {
            let thread = &found[one];
            ensure!(thread["state"] == "mutex_wait" && thread["mutex_holder"] == tid(other), "{thread}");
            ensure!(thread["mutexes_held"] == 1, "{thread}");
        }
        native_frames(&found, &native).with_context(|| ruby.label())?;
        for name in ["reads", "naps", "evil\u{1b}[2J\nname", "main"] {
            ensure!(found[name]["state"] == "blocked" && found[name]["mutexes_held"] == 0, "{}", found[name]);
            ensure!(found[name]["holds_gvl"] == false, "{}", found[name]);
        }
        let circle: BTreeSet<u64> = process["deadlocks"][0]
            .as_array()
            .context("deadlock")?
            .iter()
            .filter_map(Value::as_u64)
            .collect();
        ensure!(circle == BTreeSet::from([tid("locks a"), tid("locks b")]), "{process}");
        ensure!(process["deadlocks"].as_array().is_some_and(|all| all.len() == 1), "{process}");
        Ok(())
    })
}

/// Each sleeping thread has the frames of a dump without native frames, in the same order, with native frames among them: the system call
/// is innermost, and the extension is shown where it calls back.
fn native_frames(without: &BTreeMap<String, Value>, with: &BTreeMap<String, Value>) -> Result<()> {
    let frames = |thread: &Value| thread["stack"].as_array().cloned().context("stack");
    let is_native = |frame: &Value| frame["kind"] == "native";
    for (name, thread) in with.iter().filter(|(_, thread)| thread["ruby"] == true) {
        ensure!(without[name]["native_read"].is_null(), "{}", without[name]);
        let all = frames(thread)?;
        let others: Vec<Value> = all.iter().filter(|frame| !is_native(frame)).cloned().collect();
        ensure!(others == frames(&without[name])?, "{name:?}: {thread}");
        if !cfg!(target_arch = "x86_64") {
            ensure!(thread["native_read"] == "cut", "{thread}");
            continue;
        }
        ensure!(thread["native_read"] == "in_order" && thread["native_missing"].is_null(), "{thread}");
        // Before glibc 2.34, some calls were in a separate library.
        let libc = |file: &str| file.contains("/libc") || file.contains("/libpthread");
        let in_libc = |frame: &Value| frame["file"].as_str().is_some_and(libc);
        ensure!(all.first().is_some_and(|leaf| is_native(leaf) && in_libc(leaf)), "{name:?}: {thread}");
    }
    if cfg!(target_arch = "x86_64") {
        let all = frames(&with["zips"])?;
        let at = |wanted: &dyn Fn(&Value) -> bool| all.iter().position(wanted);
        let named = |name: &'static str| {
            move |frame: &Value| frame["name"].as_str().is_some_and(|whole| whole.ends_with(name))
        };
        let extension = |frame: &Value| frame["file"].as_str().is_some_and(|file| file.ends_with("/zlib.so"));
        let places = [at(&named("Sink#write")), at(&extension), at(&named("zipping"))];
        ensure!(places.iter().all(Option::is_some) && places.is_sorted(), "{}", with["zips"]);
    }
    Ok(())
}

/// Running threads: of two that compute, one holds the GVL and the other waits for it; one thread is inside a C function, and one collects.
#[test]
fn running_threads() -> Result<()> {
    let live = Live::begin()?;
    Ruby::first_and_last(|ruby| {
        let mut script = started(&live, ruby, ["computing,computing,printing,collecting", "0"])?;
        let pid = script.pid();
        let (mut waited, mut computed, mut in_c, mut collected) = (false, false, false, false);
        for _ in 0..LOOKS {
            let finished = dump(&live, pid, &[])?;
            ensure!(finished.status.success(), "{}", finished.errors());
            let lines: Vec<Value> =
                finished.stdout.iter().map(|line| serde_json::from_str(line)).collect::<Result<_, _>>()?;
            let holders: Vec<&Value> = lines.iter().filter(|line| line["holds_gvl"] == true).collect();
            collected |= lines[0]["collecting"] == true;
            for line in &lines[1..] {
                let leaf = line["stack"][0]["name"].as_str().unwrap_or_default();
                let waits = line["state"] == "gvl_wait";
                // The holder is one of the running threads, and never the waiting thread itself.
                let holder = &line["gvl_holder"];
                let busy = |tid: &Value| lines[1..].iter().any(|other| &other["tid"] == tid && other != line);
                ensure!(!waits || holder.is_null() || busy(holder), "{line}");
                waited |= waits && !holder.is_null();
                let on = line["stack_read"] == "agreed" && holders.contains(&line);
                computed |= on && leaf == "Object#computing";
                in_c |= on && leaf == "Integer#to_s" && line["stack"][1]["name"] == "Object#printing";
            }
            if waited && computed && in_c && collected {
                break;
            }
        }
        script.say("go")?;
        script.finish()?;
        ensure!(
            waited && computed && in_c && collected,
            "{}: waited {waited}, computed {computed}, in C {in_c}, collected {collected}",
            ruby.label()
        );
        Ok(())
    })
}

/// For threads without a native thread (M:N), the dump shows which waits for which, and says that deadlocks among them cannot be known.
#[test]
fn waiting_without_a_native_thread() -> Result<()> {
    let live = Live::beside_others()?;
    let ruby =
        Ruby::all()?.into_iter().rfind(|ruby| ruby.is_at_least(3, 3)).context("no Ruby with M:N threads")?;
    let program = "a, b = Mutex.new, Mutex.new
        [['one', a, b], ['two', b, a]].each do |name, first, second|
          Thread.new { Thread.current.name = name; first.lock; sleep 0.2; second.lock }
        end
        Thread.new { loop { sleep 0.1 } }
        sleep";
    let mut child = ruby.command()?;
    child.env("RUBY_MN_THREADS", "1").args(["-W0", "--disable-gems", "-e", program]);
    let mut child = child.spawn()?;
    let (pid, cache) = (child.id().to_string(), live.path("cache").to_string_lossy().into_owned());
    let looked = (0..LOOKS).try_fold(false, |found, _| {
        if found {
            return Ok(true);
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
        let text = Invocation::new(["dump", "--pid", &pid, "--cache-dir", &cache])?.run()?.stdout.join("\n");
        ensure!(!text.contains("DEADLOCK"), "{text}");
        // These threads are identified by their addresses.
        let is_address = |word: &str| word.starts_with("0x");
        ensure!(!text.contains("thread -"), "{text}");
        let text = text.split(' ').map(|word| if is_address(word) { "-" } else { word });
        let text = text.collect::<Vec<_>>().join(" ");
        let said = |(waits, holds)| {
            text.contains(&format!(
                "thread - \"{waits}\": on no native thread now (M:N), waiting for a Mutex, held by thread - \"{holds}\", holds 1 Mutex"
            ))
        };
        Ok([("one", "two"), ("two", "one")].into_iter().all(said)
            && text.contains("deadlocks: unknown for 2 threads on no native thread (M:N)"))
    });
    child.kill()?;
    child.wait()?;
    ensure!(looked.with_context(|| ruby.label())?, "{}: not seen", ruby.label());
    Ok(())
}

/// Threads of Ractors that constantly change their native threads are shown once in each dump.
#[test]
fn threads_that_move() -> Result<()> {
    const RACTORS: usize = 4;
    let live = Live::beside_others()?;
    let ruby =
        Ruby::all()?.into_iter().rfind(|ruby| ruby.is_at_least(3, 3)).context("no Ruby with M:N threads")?;
    let methods = (0..RACTORS).map(|n| format!("def works_{n} = loop {{ sleep 0.0002 }}\n"));
    let methods = methods.collect::<Vec<_>>().concat();
    let program = format!(
        "{methods}{RACTORS}.times {{ |n| Ractor.new(n) {{ |n| __send__(\"works_#{{n}}\") }} }}; sleep"
    );
    let mut child = ruby.command()?.args(["-W0", "--disable-gems", "-e", &program]).spawn()?;
    let looked = dumps_of_ractors(&live, child.id(), RACTORS).with_context(|| ruby.label());
    child.kill()?;
    child.wait()?;
    looked
}

fn dumps_of_ractors(live: &Live, pid: u32, ractors: usize) -> Result<()> {
    let mut begun = false;
    for _ in 0..LOOKS {
        let finished = dump(live, pid, &[])?;
        let lines: Vec<Value> =
            finished.stdout.iter().map(|line| serde_json::from_str(line)).collect::<Result<_, _>>()?;
        let threads: Vec<&Value> = lines.iter().filter(|line| line["ruby"] == true).collect();
        let works = |thread: &Value, name: &str| {
            let stack = thread["stack"].as_array().into_iter().flatten();
            stack.filter_map(|frame| frame["name"].as_str()).any(|frame| frame.ends_with(name))
        };
        let shown: Vec<usize> = (0..ractors)
            .map(|n| threads.iter().filter(|thread| works(thread, &format!("works_{n}"))).count())
            .collect();
        begun |= shown.iter().all(|&times| times == 1);
        ensure!(shown.iter().all(|&times| times <= 1), "shown {shown:?} times: {threads:#?}");
        ensure!(
            !begun || threads.len() == ractors + 1,
            "{} of {} threads: {threads:#?}",
            threads.len(),
            ractors + 1
        );
    }
    ensure!(begun, "the Ractors were never seen");
    Ok(())
}

/// The clock that the programs under test read, nanoseconds. Like the scheduler's clock it is not slewed: on a machine whose time is being
/// corrected, `CLOCK_MONOTONIC` may be slewed by up to a tenth (adjtimex(2), `ADJ_TICK`).
fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::MonotonicRaw);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Time that all CPUs together have spent in interrupts and lost to other guests, nanoseconds: an upper bound of the time for which their
/// clocks may have stood still.
fn still_ns() -> Result<u64> {
    let stat = std::fs::read_to_string("/proc/stat")?;
    let fields: Vec<u64> = stat
        .lines()
        .next()
        .context("/proc/stat")?
        .split_whitespace()
        .skip(1)
        .map(str::parse)
        .collect::<Result<_, _>>()?;
    let [_, _, _, _, _, irq, softirq, steal, ..] = fields[..] else { anyhow::bail!("{stat}") };
    Ok((irq + softirq + steal) * 10_000_000)
}

/// How long threads have not run: at most the time since they themselves recorded that they were about to sleep, and at least the time since
/// the kernel was seen to have them asleep. For running threads, nothing is reported.
#[test]
fn how_long_they_have_not_run() -> Result<()> {
    let live = Live::begin()?;
    Ruby::each(|ruby| {
        let mut script = started(&live, ruby, ["computing", "3"])?;
        let pid = script.pid();
        let task = |tid: &Value| {
            let status =
                std::fs::read_to_string(format!("/proc/{pid}/task/{tid}/status")).unwrap_or_default();
            let wanted = |line: &&str| line.starts_with("State") || line.contains("ctxt_switches");
            status.lines().filter(wanted).map(str::to_owned).collect::<Vec<_>>()
        };
        let (_, first) = threads(&live, pid)?;
        let before: BTreeMap<&String, _> =
            first.iter().map(|(name, thread)| (name, task(&thread["tid"]))).collect();
        let (asleep, still) = (now_ns(), still_ns()?);
        std::thread::sleep(std::time::Duration::from_millis(700));
        let begin = now_ns();
        let (_, found) = threads(&live, pid)?;
        let (end, still) = (now_ns(), still_ns()? - still);
        let unchanged: BTreeSet<&String> = before
            .iter()
            .filter(|(name, task_before)| {
                task_before.iter().any(|line| line.contains("sleeping"))
                    && task(&first[**name]["tid"]) == **task_before
            })
            .map(|(name, _)| *name)
            .collect();
        // The kernel forgets when a thread left its CPU if it migrates the thread: `migrate_task_rq_fair` (kernel/sched/fair.c). Linux 6.12
        // and later may do that even with threads that have just gone to sleep.
        let forgotten = |name: &str| -> Result<bool> {
            let path = format!("/proc/{pid}/task/{}/sched", first[name]["tid"]);
            let text = std::fs::read_to_string(&path).with_context(|| path.clone())?;
            let noted = text.lines().find(|line| line.starts_with("se.exec_start")).context(path)?;
            Ok(noted.ends_with(" 0.000000"))
        };
        let forgotten: BTreeSet<&String> = unchanged
            .iter()
            .filter_map(|name| forgotten(name).map(|is| is.then_some(*name)).transpose())
            .collect::<Result<_>>()?;
        script.say("go")?;
        let report = script.finish()?.report;
        let noted = report.extra["slept"].as_object().context("slept")?;
        ensure!(noted.len() == 6, "{noted:?}");
        // The main thread of some releases runs by itself now and then.
        for name in noted.keys() {
            ensure!(unchanged.contains(name), "{name:?} has run: {before:?}");
        }
        ensure!(!noted.keys().all(|name| forgotten.contains(name)), "{forgotten:?}");
        for name in unchanged {
            if forgotten.contains(name) {
                ensure!(found[name]["not_run_ns"].is_null(), "{}", found[name]);
                continue;
            }
            let ns = found[name]["not_run_ns"].as_u64().with_context(|| found[name].to_string())?;
            // Each CPU counts three kinds of time in whole ticks of 10 ms (`USER_HZ`).
            let cpus = std::thread::available_parallelism()?.get() as u64;
            let least = (begin - asleep).saturating_sub(still + cpus * 30_000_000);
            // Both clocks are derived from the TSC, each with a rounded factor.
            let noted = noted.get(name).and_then(Value::as_u64);
            let most = noted.map_or(u64::MAX, |noted| (end - noted) + (end - noted) / 10_000);
            ensure!(
                (least..=most).contains(&ns),
                "{} {name:?}: {ns}, between {least} and {most} expected",
                ruby.label()
            );
        }
        let runs = |thread: &&Value| matches!(thread["state"].as_str(), Some("running" | "runnable"));
        let runs: Vec<&Value> = found.values().filter(runs).collect();
        // Of the three threads that compute, one has the GVL.
        ensure!(!runs.is_empty() && runs.iter().all(|thread| thread["not_run_ns"].is_null()), "{runs:?}");
        Ok(())
    })
}

/// Two hundred threads are all shown, even for a stopped process. A second dump is the same.
#[test]
fn many_threads() -> Result<()> {
    let live = Live::beside_others()?;
    let ruby = Ruby::main()?;
    let mut script = started(&live, &ruby, ["", "200"])?;
    let (first, found) = threads(&live, script.pid())?;
    script.signal(Signal::STOP)?;
    let mut stopped = threads(&live, script.pid())?;
    for _ in 0..LOOKS {
        if stopped.1.values().all(|thread| thread["state"] == "stopped") {
            break;
        }
        stopped = threads(&live, script.pid())?;
    }
    script.signal(Signal::CONT)?;
    script.say("go")?;
    script.finish()?;
    ensure!((0..200).all(|at| found.contains_key(&format!("many {at}"))), "{first}");
    ensure!(stopped.1.values().all(|thread| thread["state"] == "stopped"), "{:?}", stopped.0);
    ensure!(found.keys().eq(stopped.1.keys()), "other threads");
    ensure!(found.iter().all(|(name, thread)| thread["stack"] == stopped.1[name]["stack"]), "other stacks");
    Ok(())
}

/// A process that is not Ruby, does not exist, or ends while it is read leads to one sentence and its exit status.
#[test]
fn nothing_to_see() -> Result<()> {
    let live = Live::begin()?;
    let own = std::process::id();
    let other = dump(&live, own, &[])?;
    ensure!(
        other.status.code() == Some(1) && other.errors().contains("not a Ruby process"),
        "{}",
        other.errors()
    );
    let mut child = std::process::Command::new("true").spawn()?;
    let gone = child.id();
    child.wait()?;
    let gone = dump(&live, gone, &[])?;
    ensure!(gone.status.code() == Some(1) && gone.errors().contains("no such process"), "{}", gone.errors());
    ensure!(gone.stdout.is_empty() && other.stdout.is_empty());
    let ruby = Ruby::main()?;
    for nth in 0..10 {
        let mut child =
            ruby.command()?.args(["-e", "Thread.new { loop { [1].map(&:to_s) } }; sleep 0.15"]).spawn()?;
        std::thread::sleep(std::time::Duration::from_millis(nth * 20));
        let finished = dump(&live, child.id(), &["--native"])?;
        child.wait()?;
        ensure!(matches!(finished.status.code(), Some(0 | 1)), "{:?} {}", finished.status, finished.errors());
        ensure!(finished.errors().lines().count() <= 1, "{}", finished.errors());
    }
    Ok(())
}

/// A process in a container is shown with the pids of the host and, beside them, its own ones.
#[test]
fn in_a_container() -> Result<()> {
    let live = Live::beside_others()?;
    let ruby = Ruby::rooted()?.pop().context("no Ruby of the lab")?;
    let engine = Engine::of(&live, &ruby)?;
    let script = Script::new(&live, &ruby, "explicit.rb")?.arg("1").waiting();
    let mut container = engine.start(&engine.name("dumped"), script, "")?;
    let (process, found) = threads(&live, container.pid)?;
    container.say("go")?;
    container.finish()?;
    let main = found.get("main").with_context(|| process.to_string())?;
    ensure!(main["own_tid"] == 1 && main["tid"] == process["pid"], "{main}");
    ensure!(main["stack"].as_array().is_some_and(|stack| !stack.is_empty()), "{main}");
    Ok(())
}
