//! Every Ruby accepts its recommendations: the variables of each rule, as the whole line that is set.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::collector::{Cycle, cycles, set};
use gctrace_tests::live::{Live, gctrace_binary};
use gctrace_tests::ruby::Ruby;
use gctrace_tunemygc::tune::{InForce, Series, environment::unheeded, ruby::VARIABLES, rules::settable};
use serde_json::{Value, json};

/// The indexes of `heap_available_slots`, `total_allocated_objects` and `time` in the samples of [`set`].
const SLOTS: usize = 1;
const ALLOCATED: usize = 3;
const TIME: usize = 5;
/// Slot sizes of Ruby 3.3 to 4.0, bytes.
const SLOT_SIZES: [u64; 5] = [40, 80, 160, 320, 640];

/// A recommended variable.
#[derive(Clone, Debug)]
struct Advised {
    rule: String,
    value: f64,
    text: String,
    /// Its default value, according to the advice.
    default: f64,
}

/// Sets of programs that together give a reason for each rule.
fn programs(version: &str) -> Vec<Value> {
    let cycle = |by, major, old_after| Cycle { by, major, old_after };
    let kinds = [
        // Too few slots, old objects that stay, malloc limits, objects without write barriers.
        vec![
            (cycle("newobj", None, 0), 300),
            (cycle("malloc", None, 0), 60),
            (cycle("newobj", Some("oldgen"), 99_000), 40),
            (cycle("newobj", Some("shady"), 99_000), 15),
            (cycle("malloc", Some("oldmalloc"), 99_000), 15),
        ],
        // Major cycles that free too little, in a heap that grows at the start.
        vec![(cycle("method", None, 0), 200), (cycle("newobj", Some("nofree"), 99_000), 40)],
        // Malloc limits that cost much of the time.
        vec![(cycle("malloc", None, 0), 200), (cycle("newobj", Some("oldgen"), 99_000), 20)],
        vec![(cycle("newobj", None, 0), 150), (cycle("malloc", Some("oldmalloc"), 99_000), 100)],
        // Old objects that die.
        vec![(cycle("newobj", None, 0), 900), (cycle("newobj", Some("oldgen"), 30_000), 12)],
    ];
    let plain: Vec<Value> = kinds.iter().map(|kind| set("", version, &json!({}), &cycles(kind))).collect();
    // The heap grows by 100 000 slots with each of the first cycles.
    let steps = stats(&plain[0], |at, stat| stat[SLOTS] = json!((at / 2 + 1).min(20) * 100_000));
    // A short-lived program: a quarter of its cycles ran before its heap reached its size.
    let young = stats(&plain[1], |at, stat| stat[SLOTS] = json!((at / 2 + 1).min(60) * 10_000));
    // Twice as many objects between two cycles.
    let more = stats(&plain[0], |_, stat| stat[ALLOCATED] = json!(stat[ALLOCATED].as_u64().map(|n| n * 2)));
    let units = with_units(&plain[0]);
    // It spends little of its time in the GC and has little memory: some memory is worth some time.
    let mut lean = stats(&plain[plain.len() - 1], |_, stat| {
        if let Some(time) = stat[TIME].as_u64() {
            stat[TIME] = json!(time / 10);
        }
    });
    for sample in lean.as_array_mut().into_iter().flatten().skip(1) {
        (sample[1], sample[2]) = (json!(20 << 20), json!(20 << 20));
    }
    let heaps = plain.clone().into_iter().map(with_heaps);
    heaps.chain(plain.clone()).chain([steps, young, more, units, lean]).collect()
}

/// The set with changed figures in its samples.
fn stats(set: &Value, change: impl Fn(u64, &mut Value)) -> Value {
    let mut set = set.clone();
    for (at, sample) in set.as_array_mut().into_iter().flatten().skip(1).enumerate() {
        change(at as u64, &mut sample[4]);
    }
    set
}

/// The set with units of work that last four cycles each.
fn with_units(set: &Value) -> Value {
    let mut samples = Vec::new();
    for (at, sample) in set.as_array().into_iter().flatten().enumerate() {
        samples.push(sample.clone());
        let event = match at % 8 {
            1 => "PROCESSING_STARTED",
            0 if at > 0 => "PROCESSING_ENDED",
            _ => continue,
        };
        let mut unit = sample.clone();
        unit[3] = json!(event);
        unit[5] = json!({});
        samples.push(unit);
    }
    Value::Array(samples)
}

/// Adds the sizes of five heaps to the first and the last sample. These heaps allocate most of the program's objects.
fn with_heaps(mut set: Value) -> Value {
    let last = set.as_array().map_or(0, |samples| samples.len() - 1);
    for (at, times) in [(1, 0), (last, 1_000)] {
        let heaps: serde_json::Map<String, Value> = SLOT_SIZES
            .iter()
            .enumerate()
            .map(|(heap, size)| {
                let allocated = times * 10_000;
                let state =
                    json!({"slot_size": size, "heap_eden_slots": 80_000, "total_allocated_objects": allocated});
                (heap.to_string(), state)
            })
            .collect();
        set[at][6] = json!({"stat_heap": heaps});
    }
    set
}

/// The advice of `gctrace tune` for a set, by variable: one map per strategy.
fn advised(live: &Live, name: &str, set: &Value) -> Result<Vec<BTreeMap<String, Advised>>> {
    let path = live.path(name);
    std::fs::write(&path, set.to_string())?;
    let output = Command::new(gctrace_binary()?).args(["tune", "--format", "json"]).arg(&path).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let said: Value = serde_json::from_slice(&output.stdout)?;
    let report = &said["programs"][0]["report"];
    ensure!(report["insufficient"] == json!([]), "{report}");
    let plans = report["plans"].as_array().context("plans")?;
    plans.iter().map(plan).collect()
}

fn plan(plan: &Value) -> Result<BTreeMap<String, Advised>> {
    let mut all = BTreeMap::new();
    for advice in plan["advice"].as_array().context("advice")? {
        for change in advice["set"].as_array().context("set")? {
            ensure!(change["default"] == json!(true), "the environment is empty: {change}");
            let advised = Advised {
                rule: advice["rule"].as_str().context("a rule")?.to_owned(),
                value: change["value"].as_f64().context("a value")?,
                text: change["value"].to_string(),
                default: change["current"].as_f64().context("a default")?,
            };
            let name = change["variable"].as_str().context("a name")?.to_owned();
            let earlier = all.insert(name, advised);
            ensure!(earlier.is_none(), "set twice: {change}");
        }
    }
    Ok(all)
}

/// Runs a Ruby with a whole line of variables. Ruby must name each variable with the intended value, and must not warn. It silently ignores
/// variables that it does not read.
fn check_taken(ruby: &Ruby, line: &BTreeMap<String, Advised>) -> Result<()> {
    let environment = line.iter().map(|(name, advised)| (name, &advised.text));
    let output = ruby.command()?.args(["--disable-gems", "-W2", "-e", "exit"]).envs(environment).output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "{said}");
    let mut lines: Vec<&str> = said.lines().collect();
    for (name, advised) in line {
        let named = |line: &&str| line.strip_prefix(name.as_str()).is_some_and(|rest| rest.starts_with('='));
        let at = lines.iter().position(named).with_context(|| format!("{name} is ignored: {said}"))?;
        let taken = lines.remove(at);
        // `NAME=VALUE (default value: VALUE)`, and nothing after it.
        let values = taken.split_once('=').and_then(|(_, rest)| rest.strip_suffix(')'));
        let values = values.and_then(|values| values.split_once(" (default value: "));
        let (value, default) = values.with_context(|| format!("not taken: {taken}"))?;
        let same = |said: &str, meant: f64| said.parse().is_ok_and(|said: f64| (said - meant).abs() < 1e-6);
        ensure!(same(value, advised.value), "{name} shall be {}: {taken}", advised.text);
        ensure!(same(default, advised.default), "{name} is {} by default: {taken}", advised.default);
    }
    ensure!(lines.is_empty(), "it says besides: {lines:?}");
    Ok(())
}

/// Each variable of each rule is advised to some program, and each Ruby accepts it in the line in which it is advised.
#[test]
fn rubies_take_what_is_recommended() -> Result<()> {
    let live = Live::without_gctrace()?;
    Ruby::each(|ruby| {
        let series = Series::parse(ruby.version()).context("a known series")?;
        let mut left: BTreeSet<(&str, &str)> = settable(series).collect();
        for (at, program) in programs(ruby.version()).iter().enumerate() {
            let name = format!("{}-{at}.json", ruby.version());
            for line in advised(&live, &name, program)?.iter().filter(|line| !line.is_empty()) {
                check_taken(ruby, line).with_context(|| format!("program {at}: {line:?}"))?;
                left.retain(|(rule, name)| line.get(*name).is_none_or(|advised| advised.rule != *rule));
            }
        }
        ensure!(left.is_empty(), "no program is advised {left:?}");
        Ok(())
    })
}

/// What a Ruby with this environment uses, according to `-W2`: the variables that it names without a reason for ignoring them.
fn followed(ruby: &Ruby, environment: &BTreeMap<String, String>) -> Result<BTreeMap<String, f64>> {
    let output = ruby.command()?.args(["--disable-gems", "-W2", "-e", "exit"]).envs(environment).output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "{said}");
    let mut taken = BTreeMap::new();
    for line in said.lines().filter(|line| line.ends_with(')')) {
        let Some((name, rest)) = line.split_once('=') else { continue };
        let Some((value, _)) = rest.split_once(" (default value: ") else { continue };
        taken.insert(name.to_owned(), value.parse().with_context(|| format!("no number: {line}"))?);
    }
    Ok(taken)
}

/// gctrace considers in force exactly what Ruby says that it uses, whatever the values of the variables. All others are reported.
#[test]
fn what_is_in_force() -> Result<()> {
    const TEXTS: [&str; 30] = [
        "",
        "0",
        "0.0",
        "1",
        "1.0",
        "1.1",
        "2",
        "0.5",
        "0.25",
        "0.7",
        ".5",
        "5.",
        "-1",
        "-0.5",
        "1e3",
        "1e-1",
        "0x10",
        "010",
        "16m",
        "16M ",
        " 16",
        "1_000",
        "1.5k",
        "16mb",
        "0.5 ",
        " 0.5",
        "inf",
        "nan",
        "abc",
        "99999999999999999999",
    ];
    /// Minimum, goal and maximum ratios of free slots.
    const RATIOS: [[&str; 3]; 10] = [
        ["0.1", "0.2", "0.4"],
        ["0.3", "0.3", "0.3"],
        ["0.3", "0.2", "0.6"],
        ["0.3", "0.7", "0.6"],
        ["0.0", "0.1", "0.5"],
        ["0.3", "0.0", "0.6"],
        ["0.7", "0.8", "0.9"],
        ["0.9", "0.95", "0.5"],
        ["0.5", "1.0", "1.0"],
        ["0.5", "1.2", "1.1"],
    ];
    let _live = Live::without_gctrace()?;
    Ruby::each(|ruby| {
        let series = Series::parse(ruby.version()).context("a known series")?;
        // Some Rubies do not start with heaps of odd sizes; the same code reads the limits.
        let own = |name: &&str| {
            !name.ends_with("LIBRARY") && (!name.contains("_SLOTS") || name.contains("_MAX_SLOTS"))
        };
        let names = || VARIABLES.iter().map(|variable| variable.name).filter(own);
        let mut environments: Vec<BTreeMap<String, String>> = TEXTS
            .iter()
            .map(|text| names().map(|name| (name.to_owned(), (*text).to_owned())).collect())
            .collect();
        let ratio = |name: &str| format!("RUBY_GC_HEAP_FREE_SLOTS_{name}_RATIO");
        for texts in RATIOS.into_iter().chain(TEXTS.map(|text| [text, "0.5", "0.6"])) {
            let values = ["MIN", "GOAL", "MAX"].into_iter().zip(texts);
            environments.push(values.map(|(name, text)| (ratio(name), text.to_owned())).collect());
        }
        let mut wrong = Vec::new();
        for environment in &environments {
            let followed = followed(ruby, environment)?;
            let in_force = InForce::of(environment, series);
            let reported: BTreeSet<String> =
                unheeded(environment, series).into_iter().map(|unheeded| unheeded.variable).collect();
            for variable in VARIABLES.iter().filter(|variable| environment.contains_key(variable.name)) {
                let name = variable.name;
                let (theirs, ours) = (followed.get(name), in_force.value(variable));
                // `%f` has six decimals.
                let same = (ours - theirs.unwrap_or(&variable.default)).abs() < 1e-6;
                // An empty value is not a setting.
                let told = reported.contains(name) != theirs.is_some() || environment[name].is_empty();
                if !same || !told {
                    let text = &environment[name];
                    wrong.push(format!("{name}={text:?}: {theirs:?}, not {ours} (reported: {})", !told));
                }
            }
        }
        ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
        Ok(())
    })
}
