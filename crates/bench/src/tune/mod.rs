//! `cargo xtask bench --tune`: whether the predictions of `gctrace tune` are right.
//!
//! A program is traced, and `gctrace tune` gives advice. Then the same work is done alternately with and without the advice. Time in GC is that
//! of the pauses, as gctrace measures it; the program itself reports its major cycles (`GC.stat`), its memory peak (`VmHWM`), and the
//! time that Ruby measures (`GC.stat(:time)`, from 3.1 on). They are compared with the price in the advice.

mod app;
mod prices;

use std::{ffi::OsString, fs, path::Path, process::Command};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::{
    gctrace::{self, Invocation},
    live::Live,
    report::Report,
    ruby::Ruby,
    script::{Report as ScriptReport, Script},
};
use serde_json::{Value, json};

use super::Spread;
use prices::{Predicted, Turn};
use xtask::util::{progress, target_dir};

/// The scripts, each with the name of the unit that it counts.
const PROGRAMS: [(&str, &str); 6] = [
    ("requests.rb", "requests"),
    ("large_heap.rb", "rounds"),
    ("strings.rb", "rounds"),
    ("blobs.rb", "rounds"),
    ("cache.rb", "rounds"),
    ("rows.rb", "rounds"),
];
/// Length of the first run, seconds.
const SECONDS: &str = "8";
/// Share of the first run's work that a turn does, percent.
const PART: u64 = 70;

pub(super) use app::run as run_app;

/// Runs the measurement with this number of turns for each program, on one Ruby of each series.
pub(super) fn run(turns: u32, json: bool) -> Result<()> {
    let gctrace = target_dir()?.join("release/gctrace");
    let mut done: Vec<String> = Vec::new();
    for ruby in Ruby::all()? {
        let series: Vec<&str> = ruby.version().split('.').take(2).collect();
        let series = series.join(".");
        if done.contains(&series) {
            continue;
        }
        for (script, unit) in PROGRAMS {
            program(&gctrace, &ruby, script, unit, turns, json)?;
        }
        done.push(series);
    }
    Ok(())
}

/// Measures one program on one Ruby.
fn program(gctrace: &Path, ruby: &Ruby, script: &str, unit: &str, turns: u32, json: bool) -> Result<()> {
    let live = Live::begin()?;
    let _resident = ruby.resident()?;
    let name = format!("{} {}", ruby.version(), script.trim_end_matches(".rb"));
    let sets = live.dir("sets")?;
    let options = ["--tunemygc".into(), sets.clone().into_os_string()];
    let (_, first) = trace(gctrace, &live, ruby, script, &[SECONDS.to_owned()], &[], &options)?;
    let plan = plan(gctrace, &sets, first.pid)?;
    let settings: Vec<(String, String)> = plan["advice"]
        .as_array()
        .into_iter()
        .flatten()
        .flat_map(|advice| advice["set"].as_array().into_iter().flatten())
        .filter_map(|set| Some((set["variable"].as_str()?.to_owned(), set["value"].to_string())))
        .collect();
    let text = settings.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ");
    if settings.is_empty() {
        if json {
            println!("{}", json!({ "program": name, "advised": "", "refusals": plan["refusals"] }));
        } else {
            println!("{name}: no change is advised");
        }
        return Ok(());
    }
    progress(format!("bench: {name}: advised {text:?}"));
    let work = ["1".to_owned(), (first.extra_u64(unit)? * PART / 100).max(1).to_string()];
    let mut found = Vec::new();
    for turn in 1..=turns {
        let run = |settings: &[(String, String)]| -> Result<Turn> {
            let (report, script) = trace(gctrace, &live, ruby, script, &work, settings, &[])?;
            Turn::of(&report, &script)
        };
        let (before, after) = (run(&[])?, run(&settings)?);
        progress(format!("bench: {name} {turn}/{turns}: {before}; as advised {after}"));
        found.push((before, after));
    }
    let predicted: Predicted =
        serde_json::from_value(plan["price"].clone()).context("the price of the plan")?;
    prices::report(&name, &text, &predicted, &found, json);
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
    let mut script = Script::unwitnessed(live, ruby, script)?.seeing_proc();
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

/// The plan for speed for this process.
fn plan(binary: &Path, sets: &Path, pid: u32) -> Result<Value> {
    let output = Command::new(binary).args(["tune", "--format", "json"]).arg(sets).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for entry in fs::read_dir(sets)? {
        fs::remove_file(entry?.path())?;
    }
    let report: Value = serde_json::from_slice(&output.stdout)?;
    let programs = report["programs"].as_array().context("programs")?;
    let program = programs.iter().find(|program| program["pid"] == pid);
    let program = program.with_context(|| format!("process {pid} is not among the programs"))?;
    Ok(program["report"]["plans"][0].clone())
}
