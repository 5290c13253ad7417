//! Running processes selected by name or group, for one-shot commands: `gctrace dump` and `gctrace malloc`.

use std::collections::BTreeSet;
use std::ffi::OsStr;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::child::Finished;
use gctrace_tests::container::{Cgroup, Engine};
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::live::Live;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::{Running, Script};
use gctrace_tests::witness::malloc_extension;
use serde_json::Value;

/// The arguments of each command besides the selection, and the type of the line that it prints for each process.
const COMMANDS: [(&[&str], &str); 2] =
    [(&["dump"], "process"), (&["malloc", "--duration", "1s", "--sample", "0"], "malloc")];

fn run(live: &Live, command: &[&str], selection: &[&OsStr]) -> Result<Finished> {
    let cache = live.path("cache");
    let common = ["--format".as_ref(), "jsonl".as_ref(), "--cache-dir".as_ref(), cache.as_os_str()];
    Invocation::new(command.iter().map(OsStr::new).chain(common).chain(selection.iter().copied()))?.run()
}

/// The processes that a command reports.
fn reported(live: &Live, command: &(&[&str], &str), selection: &[&OsStr]) -> Result<BTreeSet<u32>> {
    let finished = run(live, command.0, selection)?;
    ensure!(finished.status.success(), "{:?}\n{}", finished.status, finished.errors());
    let lines: Vec<Value> =
        finished.stdout.iter().map(|line| serde_json::from_str(line)).collect::<Result<_, _>>()?;
    let pids = lines.iter().filter(|line| line["type"] == command.1).map(|line| line["pid"].as_u64());
    pids.map(|pid| Ok(u32::try_from(pid.context("no pid")?)?)).collect()
}

/// A process with a child.
fn family(live: &Live, ruby: &Ruby) -> Result<(Running, BTreeSet<u32>)> {
    let script = Script::unwitnessed(live, ruby, "malloc_forks.rb")?;
    let mut script = script.env("GCTRACE_TEST_MALLOC_WITNESS", malloc_extension(ruby)?).start()?;
    script.wait_for("counting")?;
    let pid = script.pid();
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
    Ok((script, BTreeSet::from([pid, children.trim().parse()?])))
}

/// A name selects a program and its descendants, and nothing else, even if it is given twice. A name without a match is reported, with status 1,
/// and does not hide what else is selected.
#[test]
fn names() -> Result<()> {
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    let (_running, family) = family(&live, &ruby)?;
    let mut other = Script::unwitnessed(&live, &ruby, "dumped.rb")?.arg("").arg("0").start()?;
    other.wait_for("dumped")?;
    let pid = other.pid().to_string();
    let of =
        |names: &[&str]| names.iter().flat_map(|name| ["--name", name]).map(String::from).collect::<Vec<_>>();
    for command in &COMMANDS {
        let named =
            |args: &[String]| reported(&live, command, &args.iter().map(OsStr::new).collect::<Vec<_>>());
        for names in
            [&["malloc_forks"][..], &["malloc_forks.rb", "malloc_forks"], &["no_such", "malloc_forks"]]
        {
            ensure!(named(&of(names))? == family, "{names:?}");
        }
        let mut all = family.clone();
        all.insert(other.pid());
        let more = [of(&["malloc_forks"]), vec!["--pid".into(), pid.clone()]].concat();
        ensure!(named(&more)? == all, "{more:?}");
        let nothing = run(&live, command.0, &["--name".as_ref(), "no_such".as_ref()])?;
        let errors = nothing.errors();
        ensure!(nothing.status.code() == Some(1) && errors.contains("--name no_such"), "{errors}");
        ensure!(nothing.stdout.is_empty() && errors.lines().count() == 1, "{errors}");
    }
    Ok(())
}

/// A cgroup selects the processes that are in it or below it at that moment.
#[test]
fn cgroups() -> Result<()> {
    let live = Live::beside_others()?;
    let (_running, family) = family(&live, &Ruby::main()?)?;
    let (first, last) = family.first().zip(family.last()).context("no child")?;
    let outer = Cgroup::new(None, "present.service")?;
    let inner = outer.below("inner")?;
    let name = outer.path().file_name().context("no name")?;
    for command in &COMMANDS {
        let inside = |selection: &[&OsStr]| reported(&live, command, selection);
        let path: [&OsStr; 2] = ["--cgroup".as_ref(), outer.path().as_os_str()];
        let below: [&OsStr; 2] = ["--cgroup".as_ref(), inner.path().as_os_str()];
        let unit: [&OsStr; 2] = ["--unit".as_ref(), name];
        let empty = run(&live, command.0, &path)?;
        ensure!(empty.status.code() == Some(1) && empty.errors().contains("--cgroup"), "{}", empty.errors());
        inner.take(*last)?;
        for selection in [&path, &below, &unit] {
            ensure!(inside(selection)? == BTreeSet::from([*last]), "{selection:?}");
        }
        outer.take(*first)?;
        ensure!(inside(&path)? == family && inside(&unit)? == family);
        ensure!(inside(&below)? == BTreeSet::from([*last]));
        for pid in [first, last] {
            outer.release(*pid)?;
        }
    }
    Ok(())
}

/// A container is selected by its name and by its id.
#[test]
fn containers() -> Result<()> {
    let live = Live::beside_others()?;
    let ruby = Ruby::rooted()?.pop().context("no Ruby of the lab")?;
    let engine = Engine::of(&live, &ruby)?;
    let name = engine.name("present");
    let script = Script::new(&live, &ruby, "explicit.rb")?.arg("1").waiting();
    let mut container = engine.start(&name, script, "")?;
    for command in &COMMANDS {
        for text in [&name, &container.id] {
            let selection: [&OsStr; 2] = ["--container".as_ref(), text.as_ref()];
            ensure!(reported(&live, command, &selection)? == BTreeSet::from([container.pid]), "{text}");
        }
    }
    container.say("go")?;
    container.finish()?;
    Ok(())
}
