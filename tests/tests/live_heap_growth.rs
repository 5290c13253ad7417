//! `gctrace heap --diff`, `--every` and `--leaks`: what grows, and what holds it.

use anyhow::{Context as _, Result, ensure};
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
    while told == 0 {
        script.say("10")?;
        script.wait_for("grown")?;
        std::thread::sleep(std::time::Duration::from_millis(50));
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

/// The constant that holds the growing objects is named on every Ruby, nested and private ones as well, and so is the method whose
/// variables a closure keeps.
#[test]
fn constants_and_closures_that_hold() -> Result<()> {
    let live = Live::begin()?;
    Ruby::each(|ruby| {
        for (program, constant) in [("cache", "CACHE"), ("strings", "Shop::Names::BY_ID")] {
            let mut script = Script::unwitnessed(&live, ruby, "heap_leaks.rb")?.arg(program).start()?;
            script.wait_for("ready")?;
            let watched = heap(&live, script.pid(), &["--leaks", "4s", "--format", "jsonl"])?;
            ensure!(watched.status.success(), "{}", watched.errors());
            script.say("end")?;
            script.finish()?;
            let lines: Vec<Value> =
                watched.stdout.iter().map(|line| serde_json::from_str(line)).collect::<Result<_, _>>()?;
            let named = lines.iter().any(|line| line["constant"] == constant && line["end"] == "constant");
            ensure!(named, "{} {program}: {lines:#?}", ruby.label());
        }
        let mut script = Script::unwitnessed(&live, ruby, "heap_leaks.rb")?.arg("captured").start()?;
        script.wait_for("ready")?;
        let watched = heap(&live, script.pid(), &["--leaks", "4s", "--format", "jsonl"])?;
        script.say("end")?;
        script.finish()?;
        let lines: Vec<Value> =
            watched.stdout.iter().map(|line| serde_json::from_str(line)).collect::<Result<_, _>>()?;
        let leak = lines.iter().find(|line| line["name"] == "Order").context("Order is not named")?;
        let code = leak["holders"][1]["code"].as_str().context("no closure")?;
        ensure!(code.starts_with("counter ") || code.starts_with("Object#counter "), "{code}");
        ensure!(code.contains("rubies/heap_leaks.rb:"), "{code}");
        Ok(())
    })
}

/// Programs that keep more and more are found, with what holds it; stable ones, and one that never collects, are not.
#[test]
fn leaks() -> Result<()> {
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    let cases = [
        ("cache", "growth", Some(("Order", "Array", "CACHE"))),
        ("closures", "growth", Some(("Proc", "Array", "CLOSURES"))),
        ("strings", "growth", Some(("String", "Hash", "Shop::Names::BY_ID"))),
        ("garbage", "no_leak", None),
        ("ring", "no_leak", None),
        ("full", "no_leak", None),
        ("idle", "too_few_majors", None),
    ];
    for (program, verdict, suspect) in cases {
        let mut script = Script::unwitnessed(&live, &ruby, "heap_leaks.rb")?.arg(program).start()?;
        script.wait_for("ready")?;
        let time = if program == "idle" { "200ms" } else { "6s" };
        let watched = heap(&live, script.pid(), &["--leaks", time, "--format", "jsonl"])?;
        ensure!(watched.status.success(), "{}", watched.errors());
        let lines: Vec<Value> =
            watched.stdout.iter().map(|line| serde_json::from_str(line)).collect::<Result<_, _>>()?;
        let (head, found) = lines.split_first().context("no line")?;
        ensure!(head["type"] == "leaks" && head["verdict"] == verdict, "{program}: {lines:?}");
        ensure!(found.is_empty() == suspect.is_none(), "{program}: {found:?}");
        if let Some((class, holder, constant)) = suspect {
            let leak = found.iter().find(|line| line["name"] == class).context("the class is not named")?;
            ensure!(leak["old"].as_u64() > leak["old_before"].as_u64(), "{leak}");
            ensure!(leak["holders"][0]["class"] == holder, "{leak}");
            ensure!(leak["constant"] == constant && leak["end"] == "constant", "{leak}");
        }
        script.say("end")?;
        script.finish()?;
    }
    Ok(())
}
