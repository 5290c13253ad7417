//! Where objects were allocated, from the table of a program that traces its allocations, compared with what `ObjectSpace` reports inside it.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::heap::{census, heap, parsed};
use gctrace_tests::live::Live;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::Script;
use serde_json::{Value, json};

/// The objects of a dump, by address.
fn dumped(text: &str) -> Result<HashMap<String, Value>> {
    let mut objects = HashMap::new();
    for line in text.lines() {
        let object: Value = serde_json::from_str(line).with_context(|| line.to_owned())?;
        let other = object["type"] == "NONE" || object["type"] == "SHAPE";
        if let Some(address) = object["address"].as_str().filter(|_| !other) {
            objects.insert(address.to_owned(), object.clone());
        }
    }
    Ok(objects)
}

/// File, line, method and generation.
fn place(object: &Value) -> Value {
    json!([object["file"], object["line"], object["method"], object["generation"]])
}

/// The rows of a census by line: the count by file, line and class.
fn rows(rows: &[Value]) -> BTreeMap<(String, u64, String), u64> {
    let row = |row: &Value| {
        let place =
            (row["file"].as_str()?.to_owned(), row["line"].as_u64()?, row["class"].as_str()?.to_owned());
        Some((place, row["count"].as_u64()?))
    };
    rows.iter().filter_map(row).collect()
}

/// The results of the comparison for a mode of the program.
struct Compared {
    /// Number of objects with the same place in both dumps.
    same: u64,
    /// Number of objects to which Ruby assigns a place that belongs to another object.
    others: u64,
    /// Number of objects without a place in both dumps.
    none: u64,
    end: Value,
}

fn compared(live: &Live, ruby: &Ruby, mode: &str) -> Result<Compared> {
    let theirs = live.path(&format!("places-{mode}-{}.json", ruby.version()));
    let mut script = Script::unwitnessed(live, ruby, "heap_places.rb")?.arg(mode).arg(&theirs).start()?;
    script.wait_for("dumped")?;
    let file = live.path("ours.json");
    let finished = heap(live, script.pid(), &["--dump", &file.to_string_lossy()])?;
    ensure!(finished.status.success(), "{}", finished.errors());
    let (head, lines) = census(live, script.pid(), "line")?;
    script.say("go")?;
    let done = script.finish()?;

    let text = std::fs::read_to_string(&file)?;
    let end: Value = serde_json::from_str(text.lines().last().context("no line")?)?;
    let (ours, theirs) = (dumped(&text)?, dumped(&String::from_utf8_lossy(&std::fs::read(&theirs)?))?);
    let label = format!("{} {mode}", ruby.label());
    let mut found = Compared { same: 0, others: 0, none: 0, end };
    let mut by_line: BTreeMap<(String, u64, String), u64> = BTreeMap::new();
    let mut kinds: BTreeMap<String, u64> = BTreeMap::new();
    for (address, theirs) in &theirs {
        let own = ours.get(address).with_context(|| format!("{label}: {theirs} is missing"))?;
        if own.get("generation").is_none() {
            if theirs.get("generation").is_some() {
                found.others += 1;
                *kinds
                    .entry(format!("{} {} {}", own["type"], theirs["file"], theirs["line"]))
                    .or_default() += 1;
            } else {
                found.none += 1;
            }
            continue;
        }
        ensure!(place(own) == place(theirs), "{label}: {own} {theirs}");
        found.same += 1;
        let class =
            own["class"].as_str().and_then(|class| ours.get(class)).and_then(|class| class["name"].as_str());
        if let Some((class, (file, line))) = class.zip(own["file"].as_str().zip(own["line"].as_u64())) {
            *by_line.entry((file.to_owned(), line, class.to_owned())).or_default() += 1;
        }
    }
    eprintln!(
        "{label}: {} same, {} of others {kinds:?}, {} without, {} and {} objects, {}",
        found.same,
        found.others,
        found.none,
        ours.len(),
        theirs.len(),
        found.end
    );
    // The methods of ObjectSpace agree with its dump.
    let said = done.report.extra["places"].as_object().context("no places")?;
    ensure!(said.len() > 2000, "{label}: {} places", said.len());
    for (address, said) in said {
        let own = place(ours.get(address).with_context(|| address.clone())?);
        ensure!(own == *said || own == json!([null, null, null, null]), "{label}: {own} {said}");
    }
    let of_class = |class: &str| {
        let of = |(address, object): (&String, &Value)| {
            let is = object["class"]
                .as_str()
                .and_then(|class| ours.get(class))
                .is_some_and(|of| of["name"] == class);
            is.then(|| (address.clone(), object.clone()))
        };
        ours.iter().filter_map(of).collect::<HashMap<_, _>>()
    };
    // An object that took the slot of another one has no place.
    let late = of_class("Late");
    ensure!(late.values().all(|object| object.get("generation").is_none()), "{label}");
    if mode == "stopped" || mode == "block" {
        let reused = late.keys().filter(|address| theirs[*address].get("generation").is_some()).count();
        ensure!(late.len() == 3000 && reused > 100, "{label}: {reused} of {} in used slots", late.len());
    }
    // The rows cover the same objects.
    let lines_found = rows(&lines);
    for class in ["Order", "Pair", "Late"] {
        for ((file, line, of), count) in by_line.iter().filter(|((_, _, of), _)| of == class) {
            // A few objects have a singleton class, whose name is not in a dump.
            let shown = lines_found.get(&(file.clone(), *line, of.clone())).copied().unwrap_or(0);
            ensure!(
                (*count..=*count + 10).contains(&shown),
                "{label}: {file}:{line} {of}: {count}, shown {shown}"
            );
        }
    }
    let counted: u64 = lines.iter().filter_map(|row| row["count"].as_u64()).sum();
    ensure!(Some(counted) == head["live"].as_u64(), "{label}: {head}");
    ensure!(head["consistent"] == true && head["no_places"] == found.end["no_places"], "{label}: {head}");
    Ok(found)
}

/// Each object has the file, line, method and generation that Ruby's own dump and methods report, and no other object has a place.
#[test]
fn places_equal_object_space() -> Result<()> {
    let live = Live::beside_others()?;
    Ruby::each(|ruby| {
        for mode in ["started", "nested", "cleared", "debug"] {
            let found = compared(&live, ruby, mode)?;
            ensure!(found.same > 3000 && found.none > 300 && found.others == 0, "{mode}: {}", found.end);
            ensure!(
                found.end["tracing"] == "running" && found.end["table_changed"] == false,
                "{}",
                found.end
            );
        }
        // In these modes nothing deletes the entries of freed objects.
        for mode in ["stopped", "block"] {
            let found = compared(&live, ruby, mode)?;
            ensure!(found.same > 3000 && found.others > 100, "{mode}: {} same, {}", found.same, found.end);
            ensure!(found.end["tracing"] == "stopped", "{}", found.end);
        }
        let found = compared(&live, ruby, "never")?;
        ensure!(
            found.same == 0 && found.others == 0 && found.end["no_places"] == "not traced",
            "{}",
            found.end
        );
        let found = compared(&live, ruby, "compacted")?;
        if ruby.is_at_least(3, 4) {
            ensure!(found.same > 3000, "{}", found.end);
        } else {
            let why = found.end["no_places"].as_str().unwrap_or_default();
            ensure!(found.same == 0 && why.contains("compacted"), "{}", found.end);
        }
        Ok(())
    })
}

/// For a program that does not trace its allocations, gctrace says what to do. Text from the program is escaped.
#[test]
fn shown() -> Result<()> {
    let live = Live::beside_others()?;
    Ruby::first_and_last(|ruby| {
        let file = live.path("unused.json");
        let start = |mode: &str| -> Result<_> {
            let mut script =
                Script::unwitnessed(&live, ruby, "heap_places.rb")?.arg(mode).arg(&file).start()?;
            script.wait_for("dumped")?;
            Ok(script)
        };
        let mut script = start("never")?;
        let finished = heap(&live, script.pid(), &["--by", "line"])?;
        let text = finished.stdout.join("\n");
        ensure!(finished.status.success() && text.contains("trace_object_allocations_start"), "{text}");
        ensure!(text.contains("--leaks") && !text.contains("COUNT"), "{text}");
        let finished = heap(&live, script.pid(), &["--by", "line", "--every", "1s"])?;
        let said = finished.errors();
        ensure!(
            finished.status.code() == Some(2) && said.contains("trace_object_allocations_start"),
            "{said}"
        );
        script.say("go")?;
        script.finish()?;

        let mut script = start("evil")?;
        let finished = heap(&live, script.pid(), &["--by", "line", "--top", "5000"])?;
        let text = finished.stdout.join("\n");
        ensure!(text.contains("evil\\u{1b}[2J\\u{202e}.rb:7 Order") && !text.contains('\u{1b}'), "{text}");
        ensure!(text.contains("FILE:LINE CLASS") && text.contains("(not traced)"), "{text}");
        let finished = heap(&live, script.pid(), &["--by", "line", "--format", "jsonl"])?;
        let (_, lines) = parsed(&finished)?;
        let evil = ("evil\u{1b}[2J\u{202e}.rb".to_owned(), 7, "Order".to_owned());
        ensure!(rows(&lines).get(&evil) == Some(&7), "{lines:?}");
        ensure!(!finished.stdout.join("\n").contains(['\u{1b}', '\u{202e}']), "{lines:?}");
        // Nothing has changed since.
        let saved = live.path("before.jsonl");
        std::fs::write(&saved, finished.stdout.join("\n"))?;
        let dump = live.path("evil.json");
        let finished = heap(&live, script.pid(), &["--dump", &dump.to_string_lossy()])?;
        ensure!(finished.status.success(), "{}", finished.errors());
        let dump = std::fs::read_to_string(&dump)?;
        ensure!(!dump.contains(['\u{1b}', '\u{202e}']) && dump.contains("evil\\u001b[2J"));
        let saved = saved.to_string_lossy();
        let finished = heap(&live, script.pid(), &["--diff", &saved, "--format", "jsonl"])?;
        ensure!(finished.status.success() && finished.stdout.is_empty(), "{:?}", finished.stdout);
        script.say("go")?;
        script.finish().map(|_| ())
    })
}

/// While a program allocates and collects all the time, every reported place is correct.
#[test]
fn a_busy_program() -> Result<()> {
    let live = Live::beside_others()?;
    let counted = Cell::new(0);
    Ruby::each(|ruby| {
        let file = live.path("unused.json");
        let mut script =
            Script::unwitnessed(&live, ruby, "heap_places.rb")?.arg("busy").arg(&file).start()?;
        script.wait_for("dumped")?;
        let (mut most, mut looks) = (0, 0);
        // How much of the table is read before it changes depends on the machine: the faster the program, the less.
        for at in 0..40 {
            if at >= 5 && most >= 500 {
                break;
            }
            let (head, lines) = match census(&live, script.pid(), "line") {
                // A release that is newer than its table is refused if its layout cannot be proven.
                Err(error) if error.to_string().contains("the heap changes too fast to prove") => continue,
                looked => looked?,
            };
            looks += 1;
            let lines = rows(&lines);
            let orders = lines.iter().filter(|((_, _, class), _)| class == "Order");
            // Both lines are in methods of this file that allocate nothing else of these classes.
            for ((file, line, class), count) in orders {
                ensure!(file.ends_with("heap_places.rb"), "{file}:{line} {class} {count}");
                most = most.max(*count);
            }
            let pairs: Vec<_> = lines.keys().filter(|(_, _, class)| class == "Pair").collect();
            ensure!(pairs.len() <= 1, "{head} {pairs:?}");
            let wrong = lines.keys().find(|(_, line, class)| class == "Late" || *line == 0);
            ensure!(wrong.is_none(), "{head} {wrong:?}");
        }
        ensure!(looks == 0 || most >= 500, "{}: {most} objects of one line", ruby.label());
        counted.set(counted.get() + looks);
        Ok(())
    })?;
    ensure!(counted.get() > 0, "no Ruby whose heap could be counted");
    Ok(())
}
