//! `cargo xtask bench --tune`: whether the predictions of `gctrace tune` hold.
//!
//! A program is traced, and `gctrace tune` advises. Then the same work is done with and without the advice, in turns; each turn gives
//! one ratio of time in GC pauses, as gctrace measures it. The prediction follows from the advice: each advice gives a factor for a kind of
//! cycles, and the first run gives the share of the time in which each kind marks and sweeps.

mod app;

use std::{collections::BTreeMap, ffi::OsString, fs, path::Path, process::Command};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::{
    gctrace::{self, Invocation},
    live::Live,
    report::Report,
    ruby::Ruby,
    script::{Report as ScriptReport, Script},
};
use serde_json::Value;

use super::Spread;
use xtask::util::{progress, target_dir};

/// Scripts, each with the name of what it counts: an allocation-heavy loop of requests, a large live heap, long strings.
const PROGRAMS: [(&str, &str); 3] =
    [("requests.rb", "requests"), ("large_heap.rb", "rounds"), ("strings.rb", "rounds")];
/// Seconds of the first run.
const SECONDS: &str = "10";
/// Cycles that begin because no free slot is left.
const SLOTS: &str = "minor cycles by newobj";

pub(super) use app::run as run_app;

/// Runs it with this many turns for each program.
pub(super) fn run(turns: u32, json: bool) -> Result<()> {
    let gctrace = target_dir()?.join("release/gctrace");
    let ruby = Ruby::main()?;
    for (script, unit) in PROGRAMS {
        let live = Live::begin()?;
        let sets = live.dir("sets")?;
        let options = ["--tunemygc".into(), sets.clone().into_os_string()];
        let first = trace(&gctrace, &live, &ruby, script, &[SECONDS.to_owned()], &[], &options)?;
        let advice = advice(&gctrace, &sets)?;
        let predicted = predicted(&first.0, &first.1, &advice)?;
        let settings: Vec<(String, String)> = advice
            .iter()
            .flat_map(|advice| advice["set"].as_array().into_iter().flatten())
            .filter_map(|set| Some((set["variable"].as_str()?.to_owned(), set["value"].to_string())))
            .collect();
        let text =
            settings.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ");
        progress(format!("bench: {script} on Ruby {}: advised {text:?}", ruby.version()));
        if settings.is_empty() {
            println!("{script:<16} nothing was advised");
            continue;
        }
        let work = ["1".to_owned(), first.1.extra_u64(unit)?.to_string()];
        let (mut ratios, mut least) = (Vec::new(), (f64::INFINITY, f64::INFINITY));
        for turn in 1..=turns {
            let before = trace(&gctrace, &live, &ruby, script, &work, &[], &[])?;
            let after = trace(&gctrace, &live, &ruby, script, &work, &settings, &[])?;
            let (before, after) = (time(&before.0, &before.1)?, time(&after.0, &after.1)?);
            progress(format!(
                "bench: {script} {turn}/{turns}: {before:.3} s in GC pauses, {after:.3} s as advised"
            ));
            ratios.push(after / before);
            least = (before.min(least.0), after.min(least.1));
        }
        // Other load of the machine makes a run longer, never shorter.
        let least = least.1 / least.0;
        let found = Spread::of(ratios.into_iter());
        if json {
            println!(
                r#"{{"script":{script:?},"ruby":{:?},"advised":{text:?},"predicted":{predicted:.3},"least":{least:.3},"median":{:.3},"min":{:.3},"max":{:.3}}}"#,
                ruby.version(),
                found.median,
                found.min,
                found.max
            );
        } else {
            println!(
                "{script:<16} time in GC x {least:.2} by the least of each (turns: median {:.2}, {:.2} to {:.2}), predicted x {predicted:.2}",
                found.median, found.min, found.max
            );
        }
    }
    Ok(())
}

/// Traces a script.
fn trace(
    binary: &Path,
    live: &Live,
    ruby: &Ruby,
    script: &str,
    arguments: &[String],
    settings: &[(String, String)],
    options: &[OsString],
) -> Result<(Report, ScriptReport)> {
    let mut script = Script::unwitnessed(live, ruby, script)?;
    for argument in arguments {
        script = script.arg(argument);
    }
    let (command, mut env, outputs) = script.into_parts()?;
    env.extend(settings.iter().map(|(name, value)| (name.into(), value.into())));
    let mut all: Vec<OsString> = vec!["--format".into(), "jsonl".into()];
    all.extend_from_slice(options);
    all.push("--".into());
    all.extend(command);
    let finished = Invocation::of(binary, all).envs(env).run()?;
    let (report, _) = outputs.read("")?;
    Ok((gctrace::read(&finished)?, report))
}

/// Seconds in GC pauses of the cycles of its work.
fn time(report: &Report, script: &ScriptReport) -> Result<f64> {
    Ok(by_kind(report, script)?.values().map(|time| time.all).sum::<u64>() as f64 / 1e9)
}

/// Cycles of a kind, and their time in nanoseconds.
#[derive(Default)]
struct Time {
    cycles: u64,
    all: u64,
    sweeping: u64,
}

/// Times by kind of cycle, nanoseconds, in the words of `gctrace tune`.
fn by_kind(report: &Report, script: &ScriptReport) -> Result<BTreeMap<String, Time>> {
    let counts = script.counts()?;
    let mut kinds = BTreeMap::new();
    for line in report.gcs_of(script.pid).filter(|line| counts.contains(&line.count)) {
        let word = |key: &str| line.latest_gc_info.get(key).and_then(Value::as_str);
        let kind = match word("major_by") {
            Some(by) => format!("major cycles by {by}"),
            None => format!("minor cycles by {}", word("gc_by").unwrap_or("unknown")),
        };
        let time: &mut Time = kinds.entry(kind).or_default();
        time.cycles += 1;
        time.all += line.pause_ns;
        time.sweeping += line.phases.sweep_ns;
    }
    Ok(kinds)
}

/// The advice for speed.
fn advice(binary: &Path, sets: &Path) -> Result<Vec<Value>> {
    let output = Command::new(binary).args(["tune", "--format", "json"]).arg(sets).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for entry in fs::read_dir(sets)? {
        fs::remove_file(entry?.path())?;
    }
    let told: Value = serde_json::from_slice(&output.stdout)?;
    let advice = told["programs"][0]["report"]["plans"][0]["advice"].as_array();
    advice.cloned().context("a plan for speed")
}

/// The predicted factor on the time in GC. Marking starts anew in each cycle, so it decreases with their number; sweeping is the
/// same work for the same garbage, whatever starts it. Each cycle that malloc no longer starts would have cut
/// short an interval between two cycles that a lack of slots starts: by half of it on average.
fn predicted(report: &Report, script: &ScriptReport, advice: &[Value]) -> Result<f64> {
    let factors: BTreeMap<&str, f64> = advice
        .iter()
        .filter_map(|advice| {
            Some((advice["effect"]["metric"].as_str()?, advice["effect"]["factor"].as_f64()?))
        })
        .collect();
    let kinds = by_kind(report, script)?;
    let factor = |kind: &str| factors.get(kind).copied().unwrap_or(1.0);
    let fewer = |kind: &str| kinds.get(kind).map_or(0.0, |time| time.cycles as f64 * (1.0 - factor(kind)));
    let displaced = 0.5 * (fewer("minor cycles by malloc") + fewer("major cycles by oldmalloc"));
    let all: u64 = kinds.values().map(|time| time.all).sum();
    let after = kinds.iter().map(|(kind, time)| {
        let more = if kind == SLOTS { displaced / time.cycles.max(1) as f64 } else { 0.0 };
        (factor(kind) * (1.0 + more))
            .mul_add(time.all.saturating_sub(time.sweeping) as f64, time.sweeping as f64)
    });
    Ok(after.sum::<f64>() / all.max(1) as f64)
}
