//! Reading a heap that contains garbage, and a heap whose process ends meanwhile: gctrace ends within bounds, with an answer or an error.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::child::Finished;
use gctrace_tests::heap::heap;
use gctrace_tests::live::Live;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::{Running, Script};
use serde_json::Value;

/// Far longer than reading a heap of some megabytes takes.
const LONG: Duration = Duration::from_mins(1);

/// The arguments of all ways of reading a heap. `dump` is the file for a dump.
fn ways(dump: &str) -> Vec<Vec<&str>> {
    let mut ways: Vec<Vec<&str>> = ["type", "class", "line", "size", "page", "age", "memory"]
        .into_iter()
        .map(|by| vec!["--by", by, "--format", "jsonl"])
        .collect();
    ways.push(vec!["--dump", dump]);
    ways.push(vec!["--leaks", "2s"]);
    ways
}

fn start(live: &Live, ruby: &Ruby, mode: &str) -> Result<Running> {
    let mut script = Script::unwitnessed(live, ruby, "heap_hostile.rb")?.arg(mode).start()?;
    script.wait_for("hostile")?;
    Ok(script)
}

/// Checks that gctrace did not panic, was not ended by a signal, and did not print without bounds.
fn bounded(finished: &Finished, way: &[&str], codes: &[i32]) -> Result<()> {
    let said = finished.errors();
    let code = finished.status.code();
    ensure!(code.is_some_and(|code| codes.contains(&code)), "{way:?}: {}: {said}", finished.status);
    ensure!(!said.contains("panicked"), "{way:?}: {said}");
    let printed: usize = finished.stdout.iter().map(String::len).sum();
    ensure!(printed < 10_000_000, "{way:?}: {printed} bytes");
    ensure!(code == Some(0) || said.contains("gctrace: "), "{way:?}: no word of why");
    Ok(())
}

/// Slots with wild pointers, lengths and types, classes with circular superclasses, and a class that is gone.
#[test]
fn garbage() -> Result<()> {
    let live = Live::beside_others()?;
    Ruby::each(|ruby| {
        let mut script = start(&live, ruby, "waiting")?;
        let dump = live.path("hostile.json").to_string_lossy().into_owned();
        for way in ways(&dump) {
            let began = Instant::now();
            let finished = heap(&live, script.pid(), &way)?;
            ensure!(began.elapsed() < LONG, "{way:?} took {:?}", began.elapsed());
            bounded(&finished, &way, &[0])?;
            if way[0] == "--by" && way[1] == "class" {
                let rows: Vec<Value> = finished
                    .stdout
                    .iter()
                    .map(|line| serde_json::from_str(line))
                    .collect::<Result<_, _>>()?;
                let unreadable = rows.iter().any(|row| row["name"] == "(class that cannot be read)");
                ensure!(unreadable, "{}: {rows:?}", ruby.label());
            }
        }
        // Other tools can read it, whatever it contains.
        let text = std::fs::read_to_string(&dump)?;
        ensure!(text.len() < 100_000_000, "a dump of {} bytes", text.len());
        for line in text.lines() {
            serde_json::from_str::<Value>(line).with_context(|| line.to_owned())?;
        }
        script.say("go")?;
        script.wait_for("alive")
    })
}

/// The process ends at some point while it is read: the result is an answer, or one error.
#[test]
fn a_process_that_ends_meanwhile() -> Result<()> {
    let live = Live::beside_others()?;
    let ruby = Ruby::main()?;
    let dump = live.path("dying.json").to_string_lossy().into_owned();
    for way in ways(&dump) {
        for _ in 0..3 {
            let script = start(&live, &ruby, "dying")?;
            bounded(&heap(&live, script.pid(), &way)?, &way, &[0, 1, 2])?;
            drop(script);
        }
    }
    Ok(())
}
