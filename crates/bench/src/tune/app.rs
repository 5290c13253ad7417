//! `cargo xtask bench --tune --app`: whether following `gctrace tune` improves a web application.
//!
//! A shop on Puma, Sinatra and SQLite (`tests/rubies/web/shop.ru`) is traced under load, and restarted with the advised settings, until
//! nothing more is advised. Then it runs untraced, alternately with and without all of these settings. The witness is Ruby's own
//! `GC.stat(:time)` for the requests of a turn; throughput and latency according to wrk are reported beside it, and the memory peak.

use std::{collections::BTreeMap, ffi::OsString, fs, io::ErrorKind, path::Path, process::Command};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::{gctrace::Invocation, live::Live, ruby::Ruby};
use serde_json::Value;

use super::Spread;
use crate::gvl::load::{self, Load, Puma};
use xtask::util::{progress, target_dir};

/// Kinds of work: path, and description.
const SHAPES: [(&str, &str); 3] =
    [("api", "orders as JSON"), ("page", "HTML with a large cache"), ("job", "imports of CSV")];
/// Seconds of load before a measurement, so that caches are full and the heap has grown.
const WARM_UP_SECONDS: u32 = 6;
/// Seconds of a traced run, from its first request on: under load, which shows the number of concurrent requests (`TRACED_SECONDS`); and from
/// one connection, as only units of work that no other one overlaps have a size (`ALONE_SECONDS`).
const TRACED_SECONDS: u32 = 40;
const ALONE_SECONDS: u32 = 10;
/// Minimum number of the latter requests; the advice needs as many.
const UNITS: u64 = 30;
const MEASURED_SECONDS: u32 = 12;
/// Number of steps within which following the advice reaches a fixed point.
const STEPS: usize = 4;

type Settings = BTreeMap<String, String>;

/// The results of a turn.
struct Turn {
    gc_ms_per_1000: f64,
    load: Load,
    peak_kib: f64,
}

/// Runs the measurement with this number of turns for each kind of work.
pub(in super::super) fn run(turns: u32, json: bool) -> Result<()> {
    load::check()?;
    let gctrace = target_dir()?.join("release/gctrace");
    let ruby = Ruby::main()?;
    for (shape, what) in SHAPES {
        let live = Live::begin()?;
        let (settings, steps) = follow(&gctrace, &live, shape)?;
        let text =
            settings.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ");
        progress(format!("bench: {shape} ({what}) on Ruby {}: after {steps} steps {text:?}", ruby.version()));
        if settings.is_empty() {
            let share = share(&live, shape)?;
            if json {
                println!(
                    r#"{{"shape":{shape:?},"ruby":{:?},"steps":{steps},"advised":"","gc_of_requests":{share:.4}}}"#,
                    ruby.version()
                );
            } else {
                println!("{shape:<6} nothing is advised; {:.1} % of the requests' time is GC", share * 100.0);
            }
            continue;
        }
        let mut found: Vec<(Turn, Turn)> = Vec::new();
        for turn in 1..=turns {
            let before = measure(&live, shape, &Settings::new())?;
            let after = measure(&live, shape, &settings)?;
            progress(format!(
                "bench: {shape} {turn}/{turns}: {:.0} ms of GC per 1000 requests, {:.0} as advised",
                before.gc_ms_per_1000, after.gc_ms_per_1000
            ));
            found.push((before, after));
        }
        report(shape, &ruby, &text, steps, &found, json);
    }
    Ok(())
}

/// Follows the advice until there is none. Returns the settings, and the number of steps.
fn follow(gctrace: &Path, live: &Live, shape: &str) -> Result<(Settings, usize)> {
    let sets = live.dir(&format!("sets-{shape}"))?;
    let mut settings = Settings::new();
    for step in 0..=STEPS {
        let pid = trace(gctrace, live, shape, &settings, &sets)?;
        let (next, refusal) = advised(gctrace, &sets, pid, &settings)?;
        if next == settings {
            progress(format!("bench: {shape}: no more is advised; room in the heap: {refusal}"));
            return Ok((settings, step));
        }
        if step == STEPS {
            progress(format!("bench: {shape}: after {STEPS} steps the advice still changes, to {next:?}"));
            return Ok((settings, step));
        }
        progress(format!("bench: {shape}: step {}: {next:?}", step + 1));
        settings = next;
    }
    unreachable!("the last step returns")
}

/// Traces the application until its end, with its requests as units of work, and returns the pid of its process.
fn trace(gctrace: &Path, live: &Live, shape: &str, settings: &Settings, sets: &Path) -> Result<u32> {
    let mut puma = start(live, shape, settings)?;
    let pid = puma.pid();
    let running = Invocation::of(gctrace, traced(pid, sets)).start_ready()?;
    puma.load(shape, TRACED_SECONDS)?;
    let alone = puma.load_from(1, shape, ALONE_SECONDS)?.requests;
    ensure!(
        alone >= UNITS,
        "{alone} requests in {ALONE_SECONDS} s from one connection, at least {UNITS} are needed"
    );
    puma.end()?;
    let finished = running.wait()?;
    ensure!(finished.status.success(), "{}", finished.errors());
    Ok(pid)
}

/// The arguments of gctrace that select what is traced.
fn traced(pid: u32, sets: &Path) -> [OsString; 6] {
    // Quiet, because requests print many lines.
    let flags = ["--quiet", "--requests", "--pid"].map(OsString::from);
    let [quiet, requests, of] = flags;
    [quiet, requests, of, pid.to_string().into(), "--tunemygc".into(), sets.into()]
}

/// All recommended settings, according to the sets of this process, and why the rule that helps most gives no advice, if it does not.
fn advised(gctrace: &Path, sets: &Path, pid: u32, settings: &Settings) -> Result<(Settings, String)> {
    let output = Command::new(gctrace).args(["tune", "--format", "json"]).arg(sets).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout)?;
    let programs = report["programs"].as_array().context("programs")?;
    let program = programs.iter().find(|program| program["pid"] == pid);
    let program =
        program.with_context(|| format!("process {pid} is not among the programs of {}", sets.display()))?;
    let size = request_size(&program["report"]["evidence"])?;
    progress(format!("bench: a request allocates {size} objects"));
    let plan = &program["report"]["plans"][0];
    let refusals = plan["refusals"].as_array().context("refusals")?;
    let refusal = refusals.iter().find(|refusal| refusal["rule"] == "free-slots");
    let why = refusal.and_then(|refusal| refusal["reason"].as_str()).unwrap_or("advised");
    Ok((state(plan, settings)?, why.to_owned()))
}

/// Number of objects that a request allocates, according to this evidence.
fn request_size(evidence: &Value) -> Result<u64> {
    evidence["objects_in_a_unit"].as_u64().context("no request was traced that no other one overlapped")
}

/// The settings of a plan, added to those in force.
fn state(plan: &Value, settings: &Settings) -> Result<Settings> {
    if let Some(to) = plan["withdrawal"]["to"].as_object() {
        return Ok(to.iter().map(|(name, value)| (name.clone(), value.to_string())).collect());
    }
    let mut next = settings.clone();
    for set in plan["advice"]
        .as_array()
        .context("a plan for speed")?
        .iter()
        .filter_map(|advice| advice["set"].as_array())
        .flatten()
    {
        let name = set["variable"].as_str().context("a variable")?;
        next.insert(name.to_owned(), set["value"].to_string());
    }
    Ok(next)
}

fn start(live: &Live, shape: &str, settings: &Settings) -> Result<Puma> {
    let database = live.path("shop.sqlite");
    for suffix in ["", "-wal", "-shm"] {
        let mut path = database.clone().into_os_string();
        path.push(suffix);
        match fs::remove_file(path) {
            // The first time it does not exist.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            removed => removed?,
        }
    }
    let mut environment: Vec<(OsString, OsString)> =
        settings.iter().map(|(name, value)| (name.into(), value.into())).collect();
    if shape == "page" {
        environment.push(("SHOP_CACHE".into(), "full".into()));
    }
    environment.push(("SHOP_DB".into(), database.into()));
    Puma::start_with("shop.ru", &environment, &live.path("puma.log"))
}

/// `GC.stat` of the application.
fn stats(puma: &Puma) -> Result<Value> {
    let body = puma.get("stats")?;
    serde_json::from_str(&body).with_context(|| format!("/stats answered {body:?}"))
}

/// Milliseconds that Ruby has spent in GC so far.
fn gc_ms(puma: &Puma) -> Result<f64> {
    stats(puma)?["time"].as_f64().context("this Ruby has no GC.stat(:time): 3.1 or later is needed")
}

fn measure(live: &Live, shape: &str, settings: &Settings) -> Result<Turn> {
    let mut puma = start(live, shape, settings)?;
    puma.load(shape, WARM_UP_SECONDS)?;
    let before = gc_ms(&puma)?;
    let load = puma.load(shape, MEASURED_SECONDS)?;
    let gc = gc_ms(&puma)? - before;
    let status = fs::read_to_string(format!("/proc/{}/status", puma.pid()))?;
    let peak =
        status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse().ok());
    puma.end()?;
    Ok(Turn { gc_ms_per_1000: gc * 1000.0 / load.requests as f64, load, peak_kib: peak.context("no VmHWM")? })
}

/// Share of GC in the time of all requests, untraced and with Ruby's defaults.
fn share(live: &Live, shape: &str) -> Result<f64> {
    let turn = measure(live, shape, &Settings::new())?;
    Ok(turn.gc_ms_per_1000 * turn.load.per_second / 1e6)
}

fn report(shape: &str, ruby: &Ruby, advised: &str, steps: usize, turns: &[(Turn, Turn)], json: bool) {
    let ratio =
        |of: &dyn Fn(&Turn) -> f64| Spread::of(turns.iter().map(|(before, after)| of(after) / of(before)));
    let figures: [(&str, Spread); 5] = [
        ("gc_per_request", ratio(&|turn| turn.gc_ms_per_1000)),
        ("throughput", ratio(&|turn| turn.load.per_second)),
        ("p50", ratio(&|turn| turn.load.p50_us.unwrap_or(f64::NAN))),
        ("p99", ratio(&|turn| turn.load.p99_us.unwrap_or(f64::NAN))),
        ("peak_rss", ratio(&|turn| turn.peak_kib)),
    ];
    if json {
        let figures: Vec<String> = figures
            .iter()
            .map(|(name, found)| {
                format!(
                    r#""{name}":{{"median":{:.3},"min":{:.3},"max":{:.3}}}"#,
                    found.median, found.min, found.max
                )
            })
            .collect();
        println!(
            r#"{{"shape":{shape:?},"ruby":{:?},"steps":{steps},"advised":{advised:?},{}}}"#,
            ruby.version(),
            figures.join(",")
        );
        return;
    }
    println!("{shape:<6} {advised}  ({steps} steps)");
    for (name, found) in figures {
        println!("       {name:<16} x {:.2} ({:.2} to {:.2})", found.median, found.min, found.max);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(pairs: &[(&str, &str)]) -> Settings {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    /// Requests are traced as units of work, and the evidence has the size of a unit.
    #[test]
    fn requests_are_units() {
        let args = traced(7, Path::new("sets"));
        assert_eq!(args, ["--quiet", "--requests", "--pid", "7", "--tunemygc", "sets"]);
        assert_eq!(request_size(&serde_json::json!({ "objects_in_a_unit": 63 })).unwrap(), 63);
        request_size(&serde_json::json!({ "objects_in_a_unit": null })).unwrap_err();
    }

    /// Advice is added to the existing settings, and a withdrawal replaces them.
    #[test]
    fn states() {
        let plan = serde_json::json!({
            "advice": [{ "set": [{ "variable": "A", "value": 5 }, { "variable": "B", "value": 1.5 }] }, { "set": [] }],
            "withdrawal": null
        });
        let now = settings(&[("A", "1"), ("C", "7")]);
        assert_eq!(state(&plan, &now).unwrap(), settings(&[("A", "5"), ("B", "1.5"), ("C", "7")]));
        let back = serde_json::json!({ "advice": [], "withdrawal": { "to": { "A": 1 }, "why": "slower" } });
        assert_eq!(state(&back, &now).unwrap(), settings(&[("A", "1")]));
        state(&serde_json::json!({}), &now).unwrap_err();
    }
}
