//! `gctrace heap`: the heap of a running process, compared with `ObjectSpace` inside it.

use std::collections::{BTreeSet, HashMap};
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::ensure_times;
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::heap::{census, count, heap, parsed, sum};
use gctrace_tests::ledger;
use gctrace_tests::live::{Live, gctrace_binary};
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::{Running, Script};
use gctrace_tests::timing::settled;
use rustix::process::Signal;
use serde_json::Value;

/// A user without privileges.
const NOBODY: u32 = 65_534;

/// Types, FREE and TOTAL equal those of `ObjectSpace.count_objects` exactly, classes equal those of `each_object`, and
/// rows of any kind add up to the same heap. A second census is the same.
#[test]
fn equals_object_space() -> Result<()> {
    let live = Live::beside_others()?;
    let named = AtomicU32::new(0);
    Ruby::two_at_a_time(|ruby| same_heap(&live, ruby, None, &named))?;
    ensure!(named.into_inner() > 0, "no Ruby whose classes could be named");
    Ok(())
}

/// The same for heaps that were compacted, that Ractors filled, in which each allocation collected, and of JIT-compiled code.
#[test]
fn equals_object_space_in_other_modes() -> Result<()> {
    const YJIT: &str = "--yjit";
    let live = Live::beside_others()?;
    for (mode, has) in [
        ("compact", "GC.respond_to?(:compact)"),
        ("ractors", "defined?(Ractor)"),
        ("stress", "true"),
        (YJIT, "RubyVM::YJIT.enabled?"),
    ] {
        let (tried, named) = (AtomicU32::new(0), AtomicU32::new(0));
        Ruby::two_at_a_time(|ruby| {
            let ruby = if mode == YJIT { &ruby.clone().with_option(YJIT) } else { ruby };
            let has = ruby.command()?.args(["-e", &format!("exit(({has}) ? true : false)")]).output()?;
            if !has.status.success() {
                return Ok(());
            }
            tried.fetch_add(1, Ordering::Relaxed);
            let argument = Some(mode).filter(|mode| *mode != YJIT);
            same_heap(&live, ruby, argument, &named).with_context(|| mode.to_owned())
        })?;
        ensure!(tried.into_inner() > 0, "no Ruby has the mode {mode}");
        ensure!(named.into_inner() > 0, "{mode}: no Ruby whose classes could be named");
    }
    Ok(())
}

fn same_heap(live: &Live, ruby: &Ruby, mode: Option<&str>, named: &AtomicU32) -> Result<()> {
    let script = Script::unwitnessed(live, ruby, "heap_census.rb")?;
    let mut script = mode.into_iter().fold(script, Script::arg).start()?;
    script.wait_for("counting")?;
    // The program counts again after that line and then allocates nothing; two equal consecutive censuses show that.
    let mut looks = vec![census(live, script.pid(), "type")?];
    for _ in 0..50 {
        std::thread::sleep(Duration::from_millis(20));
        looks.push(census(live, script.pid(), "type")?);
        let [.., one, two] = looks.as_slice() else { continue };
        if one == two {
            break;
        }
    }
    let (head, types) = looks.pop().context("no census")?;
    // For a release without a table, objects are counted but classes are not named.
    let classes = match census(live, script.pid(), "class") {
        Ok((_, classes)) => Some(classes),
        Err(error) if error.to_string().contains("no layout is known for CRuby") => None,
        Err(error) => return Err(error),
    };
    let (_, sizes) = census(live, script.pid(), "size")?;
    let (_, pages) = census(live, script.pid(), "page")?;
    if classes.is_none() {
        // Not even those of objects that keep pages.
        let shown = heap(live, script.pid(), &["--by", "page"])?.stdout.join("\n");
        ensure!(shown.contains("(class at 0x") && !shown.contains("without a name"), "{shown}");
    }
    script.say("go")?;
    let done = script.finish()?;

    ensure!(head["gc_count"] == head["gc_count_after"], "{head}");
    let expected = done.report.extra["counts"].as_object().context("no counts")?;
    let differing: Vec<String> = expected
        .iter()
        .filter(|(name, expected)| count(&types, name).unwrap_or(0) != expected.as_u64().unwrap_or(0))
        .map(|(name, expected)| format!("{name}: {expected}, gctrace {:?}", count(&types, name)))
        .collect();
    ensure!(differing.is_empty(), "{}: {}", ruby.label(), differing.join("; "));
    let unexpected: Vec<&Value> =
        types.iter().filter(|row| !expected.contains_key(row["name"].as_str().unwrap_or(""))).collect();
    ensure!(unexpected.is_empty(), "{unexpected:?}");

    let live_objects = head["live"].as_u64().context("live")?;
    ensure!(done.report.extra_u64("orders")? == 5_000 && done.report.extra_u64("large")? == 300);
    if let Some(classes) = classes {
        named.fetch_add(1, Ordering::Relaxed);
        ensure!(count(&classes, "Order") == Some(5_000), "{classes:?}");
        ensure!(count(&classes, "LargeOrder") == Some(300), "{classes:?}");
        ensure!(count(&classes, "(class without a name)").is_some_and(|n| n >= 70), "{classes:?}");
        ensure!(sum(&classes, "count") == live_objects, "{classes:?}");
        // memsize_of counts the slot and the memory that it owns outside of the heap.
        for (class, key) in [("OwnString", "strings"), ("OwnArray", "arrays")] {
            let row = classes.iter().find(|row| row["name"] == class).context("no row")?;
            let counted = row["bytes"].as_u64().zip(row["owned_bytes"].as_u64()).context("bytes")?;
            ensure!(counted.0 + counted.1 == done.report.extra_u64(key)?, "{row} {key}");
        }
    }
    // The number of old objects, as counted by the collector.
    ensure!(head["old"] == done.report.extra["old"], "{head} {:?}", done.report.extra["old"]);
    ensure!(sum(&types, "old") == head["old"].as_u64().unwrap_or(0), "{types:?}");
    let ages = head["ages"].as_array().context("ages")?;
    ensure!(ages.iter().filter_map(Value::as_u64).sum::<u64>() == live_objects, "{head}");
    // A collection without compaction determines no pins.
    ensure!(head.get("pinned").is_some() == (mode == Some("compact")), "{head}");
    ensure!(sum(&sizes, "count") == live_objects, "{sizes:?}");
    let slots = head["slots"].as_u64().context("slots")?;
    ensure!(sum(&sizes, "free") + live_objects == slots, "{sizes:?}");
    ensure!(sum(&pages, "count") == head["pages"].as_u64().context("pages")?, "{pages:?}");
    ensure!(sum(&pages, "free") == head["free"].as_u64().context("free")?, "{pages:?}");
    Ok(())
}

/// Pins are those that a compacting collection found, until the next major one starts without them; then they are unknown.
#[test]
fn pins_are_of_the_last_compaction() -> Result<()> {
    let live = Live::beside_others()?;
    for (arguments, known) in [(&["compact"][..], true), (&["compact", "forget"], false)] {
        let script = Script::unwitnessed(&live, &Ruby::main()?, "heap_census.rb")?;
        let mut script = arguments.iter().copied().fold(script, Script::arg).start()?;
        script.wait_for("counting")?;
        let (head, _) = census(&live, script.pid(), "type")?;
        script.say("go")?;
        let done = script.finish()?;
        ensure!(done.report.extra_u64("compacted")? > 0);
        let pinned = head.get("pinned").and_then(Value::as_u64);
        ensure!(pinned.is_some() == known && pinned != Some(0), "{arguments:?}: {head}");
    }
    Ok(())
}

/// A program that allocates and collects all the time is counted, and the output says that the sums are not a consistent snapshot.
#[test]
fn a_busy_heap_is_reported_as_such() -> Result<()> {
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    let mut script = Script::unwitnessed(&live, &ruby, "steady.rb")?.start()?;
    script.wait_for("ready")?;
    let mut busy = false;
    for _ in 0..20 {
        let (head, rows) = census(&live, script.pid(), "type")?;
        ensure!(count(&rows, "TOTAL") == head["slots"].as_u64(), "{head}");
        let consistent = head["consistent"].as_bool().context("consistent")?;
        let moved = head["gc_count"] != head["gc_count_after"]
            || head["allocated_meanwhile"] != 0
            || head["sweeping"] == true;
        ensure!(consistent != moved, "{head}");
        busy |= moved;
        if busy {
            break;
        }
    }
    ensure!(busy, "the program allocated nothing");
    Ok(())
}

/// A process that is not Ruby, or does not exist, leads to one clear line and status 1.
#[test]
fn others_are_refused() -> Result<()> {
    let live = Live::beside_others()?;
    let cache = live.path("cache").to_string_lossy().into_owned();
    let own = std::process::id().to_string();
    for (pid, reason) in [(own.as_str(), "not a Ruby process"), ("4194304", "no such process")] {
        let finished = Invocation::new(["heap", "--pid", pid, "--cache-dir", &cache])?.run()?;
        ensure!(finished.status.code() == Some(1), "{:?}", finished.status);
        ensure!(finished.stdout.is_empty() && finished.errors().contains(reason), "{}", finished.errors());
    }
    Ok(())
}

/// Whatever a program does to its heap meanwhile, each census is valid, or is refused with the reason. It is never called
/// consistent if a collection ran.
#[test]
fn a_heap_that_changes() -> Result<()> {
    let live = Live::beside_others()?;
    let yjit = Ruby::main()?.with_option("--yjit");
    let has_yjit = yjit.command()?.args(["-e", "exit(RubyVM::YJIT.enabled?)"]).output()?.status.success();
    Ruby::first_and_last(|ruby| {
        for mode in ["stress", "compact", "ractors"] {
            let ruby = if has_yjit && ruby.label() == Ruby::main()?.label() { &yjit } else { ruby };
            let mut script = Script::unwitnessed(&live, ruby, "heap_busy.rb")?.arg(mode).start()?;
            script.wait_for("ready")?;
            for by in ["type", "page"] {
                let finished = heap(&live, script.pid(), &["--by", by, "--format", "jsonl"])?;
                if finished.status.code() == Some(2) {
                    ensure!(
                        finished.errors().contains("its heap could not be counted"),
                        "{}",
                        finished.errors()
                    );
                    ensure!(finished.stdout.is_empty(), "{:?}", finished.stdout);
                    continue;
                }
                let (head, rows) = parsed(&finished)?;
                let of = |field: &str| head[field].as_u64().unwrap_or(0);
                ensure!(of("live") + of("free") == of("slots") && of("slots") > 0, "{mode}: {head}");
                ensure!(head["consistent"] != true || head["gc_count"] == head["gc_count_after"], "{head}");
                if by == "type" {
                    ensure!(sum(&rows, "count") == of("live") + of("free") + of("slots"), "{mode}: {head}");
                }
            }
            ensure!(script.running()?, "{mode}: the program has ended");
        }
        Ok(())
    })
}

/// The program is neither stopped nor traced while its heap is read.
#[test]
fn nobody_is_stopped() -> Result<()> {
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    let mut script = Script::unwitnessed(&live, &ruby, "heap_busy.rb")?.arg("churn").start()?;
    script.wait_for("ready")?;
    let cache = live.path("cache").to_string_lossy().into_owned();
    let pid = script.pid().to_string();
    let mut looks = 0;
    for by in ["type", "class", "page"] {
        let mut gctrace =
            Invocation::new(["heap", "--pid", &pid, "--by", by, "--cache-dir", &cache])?.start()?;
        while gctrace.running()? {
            let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
            let of = |key: &str| status.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
            let state = of("State:").context("no state")?;
            ensure!(of("TracerPid:") == Some("0") && !state.starts_with(['t', 'T']), "{status}");
            looks += 1;
        }
    }
    ensure!(looks > 10, "looked {looks} times");
    Ok(())
}

/// A program that reads the clock on gctrace's CPU, and how often it was asked for its gaps.
struct Clock(Running, u32);

impl Clock {
    /// Number of gaps above a millisecond in four seconds, while `meanwhile` runs.
    fn gaps(&mut self, meanwhile: impl FnOnce() -> Result<()>) -> Result<u64> {
        self.gaps_in("4", meanwhile)
    }

    /// The same in this many seconds.
    fn gaps_in(&mut self, seconds: &str, meanwhile: impl FnOnce() -> Result<()>) -> Result<u64> {
        let Self(script, turn) = self;
        *turn += 1;
        script.say(seconds)?;
        meanwhile()?;
        let said = script.wait_for_end(&format!(" turn={turn}"))?;
        let gaps = said.split(' ').find_map(|word| word.strip_prefix("gaps=")).context("no gaps")?;
        Ok(gaps.parse()?)
    }
}

/// A thread of the program that shares its CPU with gctrace does not wait for gctrace as it would for any other program: gctrace leaves the
/// CPU before the thread would notice.
#[test]
fn work_is_done_in_bursts() -> Result<()> {
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    let objects = "6000000";
    let script = Script::unwitnessed(&live, &ruby, "bench_stalls.rb")?.arg("1000000").arg(objects).start()?;
    let (process, pid) = (script.pid(), script.pid().to_string());
    let mut clock = Clock(script, 0);
    // Once it answers, its objects exist; after the census, gctrace's analysis of its Ruby is in the cache.
    clock.gaps_in("0", || Ok(()))?;
    census(&live, process, "type")?;
    pin(process)?;
    let (cache, file) = (live.path("cache"), live.path("heap.json"));
    let (cache, file) = (cache.to_string_lossy(), file.to_string_lossy());
    settled(|| {
        // The baseline: gaps caused by everything else on this machine.
        let alone = clock.gaps(|| Ok(()))?;
        let other = clock.gaps(|| {
            let mut spin = Command::new("sh").args(["-c", "while :; do :; done"]).spawn()?;
            let pinned = pin(spin.id());
            std::thread::sleep(Duration::from_millis(3800));
            spin.kill()?;
            spin.wait()?;
            pinned
        })?;
        for what in [&["--by", "class"][..], &["--dump", &file]] {
            let mut finished = None;
            let ours = clock.gaps(|| {
                let mut args = vec!["heap", "--pid", &pid, "--cache-dir", &cache];
                args.extend(what);
                let gctrace = Invocation::new(args)?.start()?;
                pin(gctrace.pid())?;
                finished = Some(gctrace.wait()?);
                Ok(())
            })?;
            let finished = finished.context("not run")?;
            ensure!(finished.status.success(), "{}", finished.errors());
            let more = |gaps: u64| gaps.saturating_sub(alone);
            ensure_times!(
                more(ours) * 4 < more(other),
                "{what:?}: {ours} gaps, {other} beside another program, {alone} alone"
            );
        }
        Ok(())
    })
}

/// Pins a process to the first CPU.
fn pin(pid: u32) -> Result<()> {
    let done = Command::new("taskset").args(["-a", "-c", "-p", "0", &pid.to_string()]).output()?;
    ensure!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    Ok(())
}

/// The picture has a cell for each page, and its text describes the same heap as the rows.
#[test]
fn picture() -> Result<()> {
    let live = Live::beside_others()?;
    let ruby = Ruby::main()?;
    let mut script = Script::unwitnessed(&live, &ruby, "heap_census.rb")?.start()?;
    script.wait_for("counting")?;
    let file = live.path("heap.svg").to_string_lossy().into_owned();
    let finished = heap(&live, script.pid(), &["--by", "page", "--format", "jsonl", "--svg", &file])?;
    let (head, rows) = parsed(&finished)?;
    let text = std::fs::read_to_string(&file)?;
    let cells = text.matches("<g><title>").count() as u64;
    ensure!(Some(cells) == head["pages"].as_u64(), "{cells} cells, {head}");
    ensure!(text.ends_with("</svg>\n") && text.contains("slots of 40 bytes"), "{text}");
    let nearly = rows.iter().find(|row| row["name"] == "1-25 %").context("no row")?["count"].as_u64();
    ensure!(text.contains(&format!("{} page", nearly.unwrap_or(0))), "{nearly:?}");
    script.say("go")?;
    script.finish()?;
    // A path that is not a regular file is refused before anything is read.
    let finished = heap(&live, std::process::id(), &["--svg", "/dev/null"])?;
    ensure!(
        finished.status.code() == Some(2) && finished.errors().contains("/dev/null"),
        "{}",
        finished.errors()
    );
    Ok(())
}

/// The objects of a dump, by address.
fn dumped(text: &str) -> Result<HashMap<String, Value>> {
    let mut objects = HashMap::new();
    for line in text.lines() {
        let object: Value = serde_json::from_str(line)?;
        // Ruby also lists free slots and shapes.
        let other = object["type"] == "NONE" || object["type"] == "SHAPE";
        if let Some(address) = object["address"].as_str().filter(|_| !other) {
            ensure!(objects.insert(address.to_owned(), object.clone()).is_none(), "{line}");
        }
    }
    Ok(objects)
}

/// The objects that global variables hold, according to a dump. Ruby lists an object again if two variables hold it.
fn globals_of(text: &str) -> Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    for line in text.lines().filter(|line| line.contains("global_tbl")) {
        let root: Value = serde_json::from_str(line)?;
        if root["root"] == "global_tbl" {
            let references = root["references"].as_array().into_iter().flatten();
            found.extend(references.filter_map(|value| value.as_str().map(ToOwned::to_owned)));
        }
    }
    Ok(found)
}

/// A dump has the same objects as Ruby's own dump, with the same types, classes, sizes and references, and the same objects in global variables.
#[test]
fn dump_equals_object_space() -> Result<()> {
    const READ: [&str; 12] = [
        "OBJECT", "ARRAY", "STRING", "HASH", "STRUCT", "FLOAT", "BIGNUM", "RATIONAL", "COMPLEX", "REGEXP",
        "MATCH", "SYMBOL",
    ];
    let live = Live::beside_others()?;
    Ruby::each(|ruby| {
        let name = format!("dump-{}.json", ruby.version());
        let theirs = live.path(&name);
        let mut script = Script::unwitnessed(&live, ruby, "heap_dump.rb")?.arg(&theirs).start()?;
        script.wait_for("dumped")?;
        let file = live.path("ours.json");
        let finished = heap(&live, script.pid(), &["--dump", &file.to_string_lossy()])?;
        ensure!(finished.status.success(), "{}", finished.errors());
        let text = std::fs::read_to_string(&file)?;
        script.say("go")?;
        script.finish()?;

        let expected = String::from_utf8_lossy(&std::fs::read(&theirs)?).into_owned();
        let (own, globals) = (globals_of(&text)?, globals_of(&expected)?);
        ensure!(own == globals && own.len() > 4, "{}: {own:?} {globals:?}", ruby.label());
        let expected = dumped(&expected)?;
        let ours = dumped(&text)?;
        let kinds: BTreeSet<&str> = own.iter().filter_map(|address| ours[address]["type"].as_str()).collect();
        ensure!(["ARRAY", "STRING", "DATA"].iter().all(|kind| kinds.contains(kind)), "{kinds:?}");
        let end: Value = serde_json::from_str(text.lines().last().context("no line")?)?;
        ensure!(end["root"] == "gctrace" && end["changed"] == 0, "{end}");
        ensure!(end["objects"].as_u64() == Some(ours.len() as u64), "{end}");
        let missing: Vec<&Value> = expected
            .iter()
            .filter(|(address, _)| !ours.contains_key(*address))
            .map(|(_, object)| object)
            .collect();
        ensure!(missing.is_empty(), "{}: {} missing: {:?}", ruby.label(), missing.len(), missing.first());
        // A few objects were created by the dump itself afterwards.
        ensure!(ours.len() - expected.len() < 50, "{} and {}", ours.len(), expected.len());
        let set = |object: &Value| -> BTreeSet<String> {
            let references = object["references"].as_array().into_iter().flatten();
            references.filter_map(|value| value.as_str().map(ToOwned::to_owned)).collect()
        };
        let mut compared: HashMap<String, u64> = HashMap::new();
        let mut named = 0;
        for (address, theirs) in &expected {
            let own = &ours[address];
            ensure!(own["type"] == theirs["type"], "{own} {theirs}");
            // Ruby up to 3.1 interprets what internal objects have in that place as a class.
            ensure!(own["type"] == "IMEMO" || own["class"] == theirs["class"], "{own} {theirs}");
            ensure!(theirs.get("slot_size").is_none_or(|size| own["slot_size"] == *size), "{own} {theirs}");
            ensure!(own.get("memsize").is_none_or(|size| theirs["memsize"] == *size), "{own} {theirs}");
            ensure!(own["flags"].get("old") == theirs["flags"].get("old"), "{own} {theirs}");
            let kind = own["type"].as_str().unwrap_or_default();
            if ["CLASS", "MODULE"].contains(&kind) {
                let (own_name, name) = (own["name"].as_str(), theirs["name"].as_str());
                // gctrace does not read names that are not permanent. 2.7 names a singleton class like the class below it.
                let may_lack = name.is_some_and(|name| name.starts_with("#<")) || !ruby.is_at_least(3, 0);
                ensure!(own_name == name || own_name.is_none() && may_lack, "{own} {theirs}");
                named += u64::from(own_name.is_some());
            }
            // Only strings and arrays without additional variables have a size.
            let plain = !["STRING", "ARRAY"].contains(&kind) || own.get("memsize").is_some();
            if own.get("references").is_some() || (READ.contains(&kind) && plain) {
                ensure!(set(own) == set(theirs), "{}: {own} {theirs}", ruby.label());
                *compared.entry(kind.to_owned()).or_default() += 1;
            }
        }
        ensure!(named > 100, "{named} classes with names");
        let of = |kind: &str| compared.get(kind).copied().unwrap_or(0);
        ensure!(READ.iter().all(|kind| of(kind) > 0), "{compared:?}");
        ensure!(of("HASH") > 120 && of("STRUCT") > 90, "{compared:?}");
        ensure!(of("OBJECT") >= 400, "{compared:?}");
        Ok(())
    })
}

/// Two concurrent censuses of one process see the same heap, even beside a run that traces the process.
#[test]
fn two_at_a_time() -> Result<()> {
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    let mut script = Script::unwitnessed(&live, &ruby, "heap_large.rb")?.arg("400000").start()?;
    script.wait_for("running")?;
    let (expected, _) = census(&live, script.pid(), "type")?;
    let tracing = Invocation::jsonl(["--all-ruby", "--rate", "99"])?.start_ready()?;
    let (cache, pid) = (live.path("cache").to_string_lossy().into_owned(), script.pid().to_string());
    let start = |by: &str| {
        Invocation::new(["heap", "--pid", &pid, "--by", by, "--format", "jsonl", "--cache-dir", &cache])?
            .start()
    };
    let both = [start("class")?, start("type")?];
    for gctrace in both {
        let (head, _) = parsed(&gctrace.wait()?)?;
        ensure!(head["consistent"] == true, "{head}");
        for field in ["slots", "live", "free", "pages", "old"] {
            ensure!(head[field] == expected[field], "{field}: {head} {expected}");
        }
    }
    ledger::check_lossless(&tracing.stop()?)?;
    Ok(())
}

/// A process that ends while it is read leads to one line and status 1; a process of another user to one line and status 3.
#[test]
fn a_process_that_ends() -> Result<()> {
    let live = Live::beside_others()?;
    let ruby = Ruby::main()?;
    let mut ended = 0;
    for by in ["memory", "type", "class", "page"] {
        for delay in [0, 5, 20, 60, 150] {
            let mut script = Script::unwitnessed(&live, &ruby, "heap_large.rb")?.arg("300000").start()?;
            script.wait_for("running")?;
            let (pid, cache) = (script.pid().to_string(), live.path("cache").to_string_lossy().into_owned());
            let args = ["heap", "--pid", &pid, "--by", by, "--format", "jsonl", "--cache-dir", &cache];
            let gctrace = Invocation::new(args)?.start()?;
            std::thread::sleep(Duration::from_millis(delay));
            script.signal(Signal::KILL)?;
            let finished = gctrace.wait()?;
            if finished.status.success() {
                continue;
            }
            ended += 1;
            let errors = finished.errors();
            ensure!(
                finished.status.code() == Some(1),
                "{by} after {delay} ms: {:?} {errors}",
                finished.status
            );
            ensure!(errors.lines().count() == 1 && finished.stdout.is_empty(), "{by}: {errors}");
            ensure!(
                [
                    "has ended",
                    "no such process",
                    "not a Ruby process",
                    "it exited while it was inspected",
                    "it is a zombie"
                ]
                .iter()
                .any(|reason| errors.contains(reason)),
                "{by} after {delay} ms: {errors}"
            );
        }
    }
    ensure!(ended > 0, "none has ended early enough");

    let mut script = Script::unwitnessed(&live, &ruby, "heap_large.rb")?.arg("1000").start()?;
    script.wait_for("running")?;
    let pid = script.pid().to_string();
    for by in ["memory", "type"] {
        let mut command = Command::new(gctrace_binary()?);
        command
            .args(["heap", "--pid", &pid, "--by", by, "--no-cache"])
            .uid(NOBODY)
            .gid(NOBODY)
            .current_dir("/");
        let output = command.output()?;
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.code() == Some(3) && output.stdout.is_empty(), "{:?} {errors}", output.status);
        ensure!(errors.lines().count() == 1 && errors.contains(&pid), "{errors}");
    }
    Ok(())
}
