//! `gctrace heap`: the heap of a running process, against what `ObjectSpace` says inside of it.

use std::cell::Cell;
use std::collections::{BTreeSet, HashMap};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::child::Finished;
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::live::Live;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::{Running, Script};
use serde_json::Value;

/// `gctrace heap` of a process with these flags.
fn heap(live: &Live, pid: u32, flags: &[&str]) -> Result<Finished> {
    let cache = live.path("cache").to_string_lossy().into_owned();
    let pid = pid.to_string();
    let args = ["heap", "--pid", &pid, "--cache-dir", &cache];
    Invocation::new(args.iter().chain(flags))?.run()
}

/// The first line of a census, and its rows without those of what keeps pages.
fn parsed(finished: &Finished) -> Result<(Value, Vec<Value>)> {
    ensure!(finished.status.success(), "{:?}\n{}", finished.status, finished.errors());
    let mut lines: Vec<Value> =
        finished.stdout.iter().map(|line| serde_json::from_str(line)).collect::<Result<_, _>>()?;
    lines.retain(|line| line["type"] != "keeper");
    let (first, rows) = lines.split_first().context("no line")?;
    ensure!(first["type"] == "census" && rows.iter().all(|row| row["type"] == "heap"), "{lines:?}");
    Ok((first.clone(), rows.to_vec()))
}

fn census(live: &Live, pid: u32, by: &str) -> Result<(Value, Vec<Value>)> {
    parsed(&heap(live, pid, &["--by", by, "--format", "jsonl"])?)
}

fn count(rows: &[Value], name: &str) -> Option<u64> {
    rows.iter().find(|row| row["name"] == name)?["count"].as_u64()
}

fn sum(rows: &[Value], field: &str) -> u64 {
    rows.iter().filter_map(|row| row[field].as_u64()).sum()
}

/// Types, FREE and TOTAL are those of `ObjectSpace.count_objects`, to the object; classes are those of `each_object`; and
/// whatever the rows stand for, they add up to the same heap. A second look sees the same.
#[test]
fn equals_object_space() -> Result<()> {
    let live = Live::begin()?;
    let named = Cell::new(0);
    Ruby::each(|ruby| {
        let mut script = Script::unwitnessed(&live, ruby, "heap_census.rb")?.start()?;
        script.wait_for("counting")?;
        // It counts once more after that line and then allocates nothing, which two equal looks in a row show.
        let mut looks = vec![census(&live, script.pid(), "type")?];
        for _ in 0..50 {
            std::thread::sleep(std::time::Duration::from_millis(20));
            looks.push(census(&live, script.pid(), "type")?);
            let [.., one, two] = looks.as_slice() else { continue };
            if one == two {
                break;
            }
        }
        let (head, types) = looks.pop().context("no census")?;
        // A release that no table has yet is counted, and its classes are not named.
        let classes = match census(&live, script.pid(), "class") {
            Ok((_, classes)) => Some(classes),
            Err(error) if error.to_string().contains("no layout is known for CRuby") => None,
            Err(error) => return Err(error),
        };
        let (_, sizes) = census(&live, script.pid(), "size")?;
        let (_, pages) = census(&live, script.pid(), "page")?;
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
            named.set(named.get() + 1);
            ensure!(count(&classes, "Order") == Some(5_000), "{classes:?}");
            ensure!(count(&classes, "LargeOrder") == Some(300), "{classes:?}");
            ensure!(count(&classes, "(class without a name)").is_some_and(|n| n >= 70), "{classes:?}");
            ensure!(sum(&classes, "count") == live_objects, "{classes:?}");
            // memsize_of counts the slot and what is owned outside of it.
            for (class, key) in [("OwnString", "strings"), ("OwnArray", "arrays")] {
                let row = classes.iter().find(|row| row["name"] == class).context("no row")?;
                let counted = row["bytes"].as_u64().zip(row["owned_bytes"].as_u64()).context("bytes")?;
                ensure!(counted.0 + counted.1 == done.report.extra_u64(key)?, "{row} {key}");
            }
        }
        // Old objects as the collector itself counts them.
        ensure!(head["old"] == done.report.extra["old"], "{head} {:?}", done.report.extra["old"]);
        ensure!(sum(&types, "old") == head["old"].as_u64().unwrap_or(0), "{types:?}");
        let ages = head["ages"].as_array().context("ages")?;
        ensure!(ages.iter().filter_map(Value::as_u64).sum::<u64>() == live_objects, "{head}");
        let compacted = done.report.extra_u64("compacted")? > 0;
        ensure!(head.get("pinned").is_some() == compacted, "{head}");
        ensure!(sum(&sizes, "count") == live_objects, "{sizes:?}");
        let slots = head["slots"].as_u64().context("slots")?;
        ensure!(sum(&sizes, "free") + live_objects == slots, "{sizes:?}");
        ensure!(sum(&pages, "count") == head["pages"].as_u64().context("pages")?, "{pages:?}");
        ensure!(sum(&pages, "free") == head["free"].as_u64().context("free")?, "{pages:?}");
        Ok(())
    })?;
    ensure!(named.get() > 0, "no Ruby whose classes could be named");
    Ok(())
}

/// A program that allocates and collects all the time is counted, and it is said that the sums are of no one moment.
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

/// What is no Ruby, or not there, is one clear line and status 1.
#[test]
fn others_are_refused() -> Result<()> {
    let live = Live::begin()?;
    let cache = live.path("cache").to_string_lossy().into_owned();
    let own = std::process::id().to_string();
    for (pid, reason) in [(own.as_str(), "not a Ruby process"), ("4194304", "no such process")] {
        let finished = Invocation::new(["heap", "--pid", pid, "--cache-dir", &cache])?.run()?;
        ensure!(finished.status.code() == Some(1), "{:?}", finished.status);
        ensure!(finished.stdout.is_empty() && finished.errors().contains(reason), "{}", finished.errors());
    }
    Ok(())
}

/// Whatever a program does to its heap meanwhile, each census is a heap, or a refusal that says so; it is never called
/// consistent if a collection ran.
#[test]
fn a_heap_that_changes() -> Result<()> {
    let live = Live::begin()?;
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

/// Nobody stops or traces the program while its heap is read, and what it gets done goes on.
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

/// A large heap takes no more memory of ours than a small one: it is read page by page.
#[test]
fn memory_is_bounded() -> Result<()> {
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    let peak = |objects: &str| -> Result<(u64, u64)> {
        let mut script = Script::unwitnessed(&live, &ruby, "heap_large.rb")?.arg(objects).start()?;
        script.wait_for("running")?;
        census(&live, script.pid(), "type")?;
        let cache = live.path("cache").to_string_lossy().into_owned();
        let pid = script.pid().to_string();
        let args = ["heap", "--pid", &pid, "--by", "class", "--format", "jsonl", "--cache-dir", &cache];
        let mut gctrace = Invocation::new(args)?.start()?;
        let status = format!("/proc/{}/status", gctrace.pid());
        let mut peak = 0;
        while gctrace.running()? {
            let text = std::fs::read_to_string(&status).unwrap_or_default();
            let found = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
            let kb = found.and_then(|text| text.trim().strip_suffix(" kB")?.parse().ok());
            peak = peak.max(kb.unwrap_or(0));
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        let (head, _) = parsed(&gctrace.wait()?)?;
        Ok((peak, head["live_bytes"].as_u64().context("live_bytes")?))
    };
    let (small, _) = peak("1000")?;
    let (large, bytes) = peak("2000000")?;
    ensure!(bytes > 80_000_000, "{bytes}");
    ensure!(
        small > 1000 && large < small + 8_000,
        "{large} kB for {bytes} bytes, {small} kB for a small heap"
    );
    Ok(())
}

/// The picture has a cell for each page, and its text is of the same heap as the rows.
#[test]
fn picture() -> Result<()> {
    let live = Live::begin()?;
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
    // What is no file is refused before anything is read.
    let finished = heap(&live, std::process::id(), &["--svg", "/dev/null"])?;
    ensure!(
        finished.status.code() == Some(2) && finished.errors().contains("/dev/null"),
        "{}",
        finished.errors()
    );
    Ok(())
}

/// What grew between two censuses is what the program made, in two files, against the process, and while it is watched.
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
    // It has counted once when another growth is seen, whichever look it comes in.
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

/// Objects of a dump by their addresses.
fn dumped(text: &str) -> Result<HashMap<String, Value>> {
    let mut objects = HashMap::new();
    for line in text.lines() {
        let object: Value = serde_json::from_str(line)?;
        // Ruby lists free slots and shapes, too.
        let other = object["type"] == "NONE" || object["type"] == "SHAPE";
        if let Some(address) = object["address"].as_str().filter(|_| !other) {
            ensure!(objects.insert(address.to_owned(), object.clone()).is_none(), "{line}");
        }
    }
    Ok(objects)
}

/// A dump has the objects of Ruby's own, with the same types, classes, sizes and references.
#[test]
fn dump_equals_object_space() -> Result<()> {
    const READ: [&str; 11] = [
        "ARRAY", "STRING", "HASH", "STRUCT", "FLOAT", "BIGNUM", "RATIONAL", "COMPLEX", "REGEXP", "MATCH",
        "SYMBOL",
    ];
    let live = Live::begin()?;
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

        let expected = dumped(&String::from_utf8_lossy(&std::fs::read(&theirs)?))?;
        let ours = dumped(&text)?;
        let end: Value = serde_json::from_str(text.lines().last().context("no line")?)?;
        ensure!(end["root"] == "gctrace" && end["changed"] == 0, "{end}");
        ensure!(end["objects"].as_u64() == Some(ours.len() as u64), "{end}");
        let missing: Vec<&Value> = expected
            .iter()
            .filter(|(address, _)| !ours.contains_key(*address))
            .map(|(_, object)| object)
            .collect();
        ensure!(missing.is_empty(), "{}: {} missing: {:?}", ruby.label(), missing.len(), missing.first());
        // What dumping itself made after it had been there: a few.
        ensure!(ours.len() - expected.len() < 50, "{} and {}", ours.len(), expected.len());
        let set = |object: &Value| -> BTreeSet<String> {
            let references = object["references"].as_array().into_iter().flatten();
            references.filter_map(|value| value.as_str().map(ToOwned::to_owned)).collect()
        };
        let mut compared: HashMap<String, u64> = HashMap::new();
        for (address, theirs) in &expected {
            let own = &ours[address];
            ensure!(own["type"] == theirs["type"], "{own} {theirs}");
            // Ruby up to 3.1 takes what internal objects have in that place for a class.
            ensure!(own["type"] == "IMEMO" || own["class"] == theirs["class"], "{own} {theirs}");
            ensure!(theirs.get("slot_size").is_none_or(|size| own["slot_size"] == *size), "{own} {theirs}");
            ensure!(own.get("memsize").is_none_or(|size| theirs["memsize"] == *size), "{own} {theirs}");
            ensure!(own["flags"].get("old") == theirs["flags"].get("old"), "{own} {theirs}");
            let kind = own["type"].as_str().unwrap_or_default();
            // Of strings and arrays, those without other variables say their size.
            let plain = !["STRING", "ARRAY"].contains(&kind) || own.get("memsize").is_some();
            if own.get("references").is_some() || (READ.contains(&kind) && plain) {
                ensure!(set(own) == set(theirs), "{}: {own} {theirs}", ruby.label());
                *compared.entry(kind.to_owned()).or_default() += 1;
            }
        }
        let of = |kind: &str| compared.get(kind).copied().unwrap_or(0);
        ensure!(READ.iter().all(|kind| of(kind) > 0), "{compared:?}");
        ensure!(of("HASH") > 120 && of("STRUCT") > 90, "{compared:?}");
        ensure!(ruby.is_at_least(3, 2) || of("OBJECT") >= 300, "{compared:?}");
        Ok(())
    })
}

/// The parts of the memory add up to what the kernel says is resident, and a large heap is in the pages of objects.
#[test]
fn memory_adds_up() -> Result<()> {
    let live = Live::begin()?;
    Ruby::first_and_last(|ruby| {
        let mut script = Script::unwitnessed(&live, ruby, "heap_large.rb")?.arg("400000").start()?;
        script.wait_for("running")?;
        let finished = heap(&live, script.pid(), &["--by", "memory", "--format", "jsonl"])?;
        ensure!(finished.status.success(), "{}", finished.errors());
        let lines: Vec<Value> =
            finished.stdout.iter().map(|line| serde_json::from_str(line)).collect::<Result<_, _>>()?;
        let (head, parts) = lines.split_first().context("no line")?;
        let rss = head["rss"].as_u64().context("rss")?;
        ensure!(sum(parts, "bytes") == rss, "{lines:?}");
        let rollup = std::fs::read_to_string(format!("/proc/{}/smaps_rollup", script.pid()))?;
        let witness = rollup.lines().find_map(|line| line.strip_prefix("Rss:")?.trim().strip_suffix(" kB"));
        let witness: u64 = witness.context("no Rss")?.trim().parse()?;
        // A waiting program changes little: a few pages that its other threads touch.
        ensure!(rss.abs_diff(witness * 1024) < 1 << 20, "{rss} {witness} kB");
        let objects = head["objects"].as_u64().context("objects")?;
        let slots = head["slots_live"].as_u64().context("slots")?;
        ensure!(slots > 400_000 * 40 && objects >= slots && objects < rss, "{head}");
        Ok(())
    })
}

/// Programs that keep more and more are found out, with what holds it; stable ones, and one that never collects, are not.
#[test]
fn leaks() -> Result<()> {
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    let cases = [
        ("cache", "growth", Some(("Order", "Array"))),
        ("closures", "growth", Some(("Proc", "Array"))),
        ("strings", "growth", Some(("String", "Hash"))),
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
        if let Some((class, holder)) = suspect {
            let leak = found.iter().find(|line| line["name"] == class).context("the class is not named")?;
            ensure!(leak["old"].as_u64() > leak["old_before"].as_u64(), "{leak}");
            ensure!(leak["holders"][0]["class"] == holder, "{leak}");
        }
        script.say("end")?;
        script.finish()?;
    }
    Ok(())
}
