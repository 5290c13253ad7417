//! The price that advice states, compared with what following it costs: peak memory, major cycles and time in GC.

use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::ensure_times;
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::live::{Live, gctrace_binary};
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::{Report, Script};
use gctrace_tests::timing::settled;
use serde_json::Value;

/// Factor by which a likely figure may be off.
const OFF: f64 = 1.5;

/// The cost of a run of a program.
#[derive(Clone, Copy, Debug)]
struct Taken {
    /// Peak resident memory, bytes.
    peak: f64,
    majors: f64,
    /// GC time, milliseconds, by `GC.stat(:time)`.
    gc: f64,
}

impl Taken {
    fn of(report: &Report) -> Result<Self> {
        Ok(Self {
            peak: report.extra_u64("peak_rss_kib")? as f64 * 1024.0,
            majors: report.growth("major_gc_count")? as f64,
            gc: report.growth("time")? as f64,
        })
    }
}

/// Traces a program, gets advice, and runs the same work with and without the advice, untraced. Memory and time must be within a factor of 1.5 of
/// the likely figures, and within the stated ranges; the number of major cycles must be within its range.
fn holds(script: &str, unit: &str) -> Result<()> {
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    let sets = live.path("sets");
    let traced = Script::unwitnessed(&live, &ruby, script)?.seeing_proc().arg("6");
    let (command, env, outputs) = traced.into_parts()?;
    let mut args = vec!["--quiet".into(), "--tunemygc".into(), sets.clone().into_os_string(), "--".into()];
    args.extend(command);
    let finished = Invocation::new(args)?.envs(env).run()?;
    ensure!(finished.status.success(), "{}", finished.errors());
    let work = (outputs.read("")?.0.extra_u64(unit)? * 2 / 3).to_string();

    let output = Command::new(gctrace_binary()?).args(["tune", "--format", "json"]).arg(&sets).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let tuned: Value = serde_json::from_slice(&output.stdout)?;
    let plan = &tuned["programs"][0]["report"]["plans"][0];
    ensure!(plan["strategy"] == "speed", "{plan:#}");
    let advice = plan["advice"].as_array().filter(|advice| !advice.is_empty());
    let advice = advice.with_context(|| format!("nothing is advised: {plan:#}"))?;
    let settings: Vec<(&str, String)> = advice
        .iter()
        .flat_map(|advice| advice["set"].as_array().into_iter().flatten())
        .filter_map(|set| Some((set["variable"].as_str()?, set["value"].to_string())))
        .collect();

    let run = |settings: &[(&str, String)]| -> Result<Taken> {
        let mut script = Script::unwitnessed(&live, &ruby, script)?.seeing_proc().arg("1").arg(&work);
        for (name, value) in settings {
            script = script.env(name, value);
        }
        Taken::of(&script.run()?.report)
    };
    let price = &plan["price"];
    settled(|| {
        let (before, after) = (run(&[])?, run(&settings)?);
        eprintln!("{script} on {}: {settings:?}: {before:?} became {after:?}; {price}", ruby.version());
        is_price(price, before, after).with_context(|| format!("{before:?} became {after:?} by {settings:?}"))
    })
}

/// Checks the stated price. Memory and time are measured again without what runs beside the tests: large heaps compete with it for memory, and one
/// run is not the least of several.
fn is_price(price: &Value, before: Taken, after: Taken) -> Result<()> {
    // If only a range can be stated, there is no likely figure.
    let number = |name: &str| match &price[name] {
        Value::Null if name == "likely_gc_time" => Ok(None),
        value => value.as_f64().map(Some).with_context(|| format!("no {name} in {price}")),
    };
    for (name, found, likely) in [
        ("peak_rss", after.peak, Some("likely_peak_rss")),
        ("gc_time", after.gc / before.gc, Some("likely_gc_time")),
        ("majors", after.majors / before.majors, None),
    ] {
        let range: [f64; 2] =
            serde_json::from_value(price[name].clone()).with_context(|| format!("no {name} in {price}"))?;
        let likely = likely.map(number).transpose()?.flatten();
        let is_in = (range[0]..=range[1]).contains(&found);
        let is_near = likely.is_none_or(|said| found <= said * OFF && said <= found * OFF);
        let said = format!("{name} is {found:.2}; {range:.2?} was stated, and {likely:.2?} was likely");
        if name == "majors" {
            ensure!(is_in && is_near, "{said}");
        } else {
            ensure_times!(is_in && is_near, "{said}");
        }
    }
    Ok(())
}

#[test]
fn large_heap() -> Result<()> {
    holds("large_heap.rb", "rounds")
}

#[test]
fn requests() -> Result<()> {
    holds("requests.rb", "requests")
}
