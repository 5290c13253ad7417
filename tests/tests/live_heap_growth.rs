//! `gctrace heap --diff`, `--every` and `--leaks`: what grows, and what holds it.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use gctrace_tests::PATIENCE;
use gctrace_tests::child::Finished;
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::heap::heap;
use gctrace_tests::live::Live;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::{Running, Script};
use serde_json::Value;

/// The growth between two censuses is what the program made: from two files, against the process, and while it is watched.
#[test]
fn growth() -> Result<()> {
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    let mut script = Script::unwitnessed(&live, &ruby, "heap_grow.rb")?.start()?;
    script.wait_for("ready")?;
    let save = |script: &Running, name: &str| -> Result<String> {
        let finished = heap(&live, script.pid(), &["--by", "class", "--format", "jsonl"])?;
        let file = live.path(name);
        std::fs::write(&file, finished.stdout.join("\n"))?;
        Ok(file.to_string_lossy().into_owned())
    };
    let lines = |finished: &Finished| -> Result<Vec<Value>> {
        ensure!(finished.status.success(), "{}", finished.errors());
        Ok(finished.stdout.iter().map(|line| serde_json::from_str(line)).collect::<Result<_, _>>()?)
    };
    let orders = |lines: &[Value]| -> Option<(u64, u64)> {
        let row = lines.iter().find(|line| line["name"] == "Order")?;
        row["count_before"].as_u64().zip(row["count"].as_u64())
    };
    let none = save(&script, "none.jsonl")?;
    script.say("1000")?;
    script.wait_for("grown")?;
    let some = save(&script, "some.jsonl")?;
    let both = Invocation::new(["heap", "--diff", &none, &some, "--format", "jsonl"])?.run()?;
    ensure!(orders(&lines(&both)?) == Some((0, 1000)), "{:?}", both.stdout);
    let unchanged = Invocation::new(["heap", "--diff", &some, &some])?.run()?;
    ensure!(unchanged.stdout.iter().any(|line| line == "nothing has changed"), "{:?}", unchanged.stdout);

    script.say("500")?;
    script.wait_for("grown")?;
    let now = heap(&live, script.pid(), &["--diff", &some, "--format", "jsonl"])?;
    ensure!(orders(&lines(&now)?) == Some((1000, 1500)), "{:?}", now.stdout);

    let pid = script.pid().to_string();
    let cache = live.path("cache").to_string_lossy().into_owned();
    let watch = ["heap", "--pid", &pid, "--by", "class", "--every", "200ms", "--format", "jsonl"];
    let mut gctrace = Invocation::new(watch.into_iter().chain(["--cache-dir", &cache]))?.start()?;
    // It has counted once another growth is seen, in whichever census that is.
    let mut told = 0;
    let since = Instant::now();
    while told == 0 {
        ensure!(since.elapsed() < PATIENCE, "no growth of Order is told: {:?}", gctrace.stdout_so_far());
        script.say("10")?;
        script.wait_for("grown")?;
        std::thread::sleep(Duration::from_millis(50));
        told = gctrace.stdout_so_far().iter().filter(|line| line.contains(r#""name":"Order""#)).count();
        ensure!(gctrace.running()?, "it has ended");
    }
    script.say("end")?;
    script.finish()?;
    let watched = gctrace.wait()?;
    ensure!(watched.errors().contains("has ended"), "{}", watched.errors());
    let growths = lines(&watched)?;
    ensure!(
        growths
            .iter()
            .all(|line| line["type"] == "growth" && line["count"].as_u64() > line["count_before"].as_u64())
    );
    Ok(())
}

/// A verdict on less than this many censuses is not asked for: what grows must grow by more than the program's other objects of the same
/// class might vary by. Each census is of another round of the program.
const CENSUSES: u64 = 8;

/// The first line and the classes of `--leaks`. Where the machine is too slow for the program to have had so many rounds, or for the heap
/// to be read while it is there, it is watched again for twice the time.
fn leaks(live: &Live, pid: u32) -> Result<(Value, Vec<Value>)> {
    let mut seen = Vec::new();
    for time in ["4s", "8s", "16s"] {
        let (head, found) = leaks_in(live, pid, time)?;
        let read = found.iter().take(5).all(|line| line["end"].is_string());
        if head["censuses"].as_u64().is_some_and(|censuses| censuses >= CENSUSES) && read {
            return Ok((head, found));
        }
        seen.push((head, found));
    }
    bail!("watched in vain: {seen:#?}")
}

/// The same for exactly this time.
fn leaks_in(live: &Live, pid: u32, time: &str) -> Result<(Value, Vec<Value>)> {
    let watched = heap(live, pid, &["--leaks", time, "--format", "jsonl"])?;
    ensure!(watched.status.success(), "{}", watched.errors());
    let lines: Vec<Value> =
        watched.stdout.iter().map(|line| serde_json::from_str(line)).collect::<Result<_, _>>()?;
    let (head, found) = lines.split_first().context("no line")?;
    ensure!(head["type"] == "leaks" && found.iter().all(|line| line["type"] == "leak"), "{lines:?}");
    Ok((head.clone(), found.to_vec()))
}

/// What is said of a class that grows: how much there was and is of it, and what holds it at once.
fn suspect<'a>(found: &'a [Value], class: &str, holder: &str) -> Result<&'a Value> {
    let leak = found.iter().find(|line| line["name"] == class);
    let leak = leak.with_context(|| format!("{class} is not named: {found:#?}"))?;
    ensure!(leak["old"].as_u64() > leak["old_before"].as_u64(), "{leak}");
    ensure!(leak["holders"][0]["class"] == holder, "{leak}");
    Ok(leak)
}

/// What grows in one program on this Ruby is found, each with what holds it.
fn all_found(live: &Live, ruby: &Ruby) -> Result<()> {
    let mut script = Script::unwitnessed(live, ruby, "heap_leaks.rb")?.arg("all").start()?;
    script.wait_for("ready")?;
    let (head, found) = leaks(live, script.pid())?;
    script.say("end")?;
    script.finish()?;
    ensure!(head["verdict"] == "growth", "{head}");
    let constants = [
        ("Order", "Array", "CACHE"),
        ("Proc", "Array", "CLOSURES"),
        ("String", "Hash", "Shop::Names::BY_ID"),
    ];
    for (class, holder, constant) in constants {
        let leak = suspect(&found, class, holder)?;
        ensure!(leak["constant"] == constant && leak["end"] == "constant", "{leak}");
    }
    let leak = suspect(&found, "Item", "Array")?;
    let code = leak["holders"][1]["code"].as_str().with_context(|| format!("no closure: {leak}"))?;
    ensure!(code.starts_with("counter ") || code.starts_with("Object#counter "), "{code}");
    ensure!(code.contains("rubies/heap_leaks.rb:"), "{code}");
    Ok(())
}

/// A program that keeps more and more in four ways: what grows is found, with what holds it, on every Ruby. The constant is named, nested
/// and private ones as well, and so is the method whose variables a closure keeps. All Rubies at once: most of the time is waited for.
#[test]
fn what_grows_and_what_holds_it() -> Result<()> {
    let live = Live::begin()?;
    let rubies = Ruby::all()?;
    let mut failures = Vec::new();
    let live = &live;
    std::thread::scope(|scope| {
        let running: Vec<_> =
            rubies.iter().map(|ruby| (ruby, scope.spawn(move || all_found(live, ruby)))).collect();
        for (ruby, thread) in running {
            if let Err(error) = thread.join().expect("a thread panicked") {
                failures.push(format!("Ruby {} ({}): {error:?}", ruby.version(), ruby.label()));
            }
        }
    });
    ensure!(failures.is_empty(), "{} Rubies fail.\n{}", failures.len(), failures.join("\n"));
    Ok(())
}

/// A stable program is not suspected, and nothing is said of one that never collects.
#[test]
fn what_does_not_grow() -> Result<()> {
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    let start = |program: &str| -> Result<Running> {
        Script::unwitnessed(&live, &ruby, "heap_leaks.rb")?.arg(program).start()
    };
    let (mut stable, mut idle) = (start("stable")?, start("idle")?);
    stable.wait_for("ready")?;
    idle.wait_for("ready")?;
    let (head, found) = leaks(&live, stable.pid())?;
    ensure!(head["verdict"] == "no_leak" && found.is_empty(), "{head} {found:#?}");
    let (head, found) = leaks_in(&live, idle.pid(), "200ms")?;
    ensure!(head["verdict"] == "too_few_majors" && found.is_empty(), "{head} {found:#?}");
    for mut script in [stable, idle] {
        script.say("end")?;
        script.finish()?;
    }
    Ok(())
}
