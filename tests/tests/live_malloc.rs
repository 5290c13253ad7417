//! `gctrace malloc`: calls of the allocation functions, compared with an extension inside the process that makes a known number of calls.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::child::Finished;
use gctrace_tests::gctrace::{Gctrace, Invocation};
use gctrace_tests::live::Live;
use gctrace_tests::pprof::Profile;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::{Running, Script};
use gctrace_tests::witness::malloc_extension;
use serde_json::Value;

const MIB: u64 = 1 << 20;

fn script(live: &Live, ruby: &Ruby) -> Result<Running> {
    let script = Script::unwitnessed(live, ruby, "malloc_calls.rb")?;
    let mut script = script.env("GCTRACE_TEST_MALLOC_WITNESS", malloc_extension(ruby)?).start()?;
    script.wait_for("counting")?;
    Ok(script)
}

/// Starts counting in a process, for a minute or until a signal.
fn malloc(live: &Live, pid: u32, budget: &str, more: &[&str]) -> Result<Gctrace> {
    let (pid, cache) = (pid.to_string(), live.path("cache").to_string_lossy().into_owned());
    let args = ["malloc", "--pid", &pid, "--cache-dir", &cache, "--format", "jsonl"];
    let args = args.into_iter().chain(["--duration", "60s", "--budget", budget]);
    Invocation::new(args.chain(more.iter().copied()))?.start_ready()
}

/// The first line, the lines of size classes by their largest size, and the lines of sites.
struct Lines {
    head: Value,
    sizes: BTreeMap<u64, Value>,
    places: Vec<Value>,
}

fn parsed(finished: &Finished) -> Result<Lines> {
    ensure!(finished.status.success(), "{:?}\n{}", finished.status, finished.errors());
    let lines: Vec<Value> =
        finished.stdout.iter().map(|line| serde_json::from_str(line)).collect::<Result<_, _>>()?;
    let (first, rows) = lines.split_first().context("no line")?;
    let known = |row: &Value| row["type"] == "malloc_size" || row["type"] == "malloc_site";
    ensure!(first["type"] == "malloc" && rows.iter().all(known), "{lines:?}");
    let sizes = rows.iter().filter_map(|row| Some((row["up_to"].as_u64()?, row.clone()))).collect();
    let places = rows.iter().filter(|row| row["type"] == "malloc_site").cloned().collect();
    Ok(Lines { head: first.clone(), sizes, places })
}

/// Calls and bytes by function, ages of freed memory, and what is left equal those of the extension exactly.
#[test]
fn calls_are_those_of_the_extension() -> Result<()> {
    let live = Live::begin()?;
    Ruby::each(|ruby| {
        let mut script = script(&live, ruby)?;
        let gctrace = malloc(&live, script.pid(), "100", &["--sample", "0"])?;
        script.say("go")?;
        script.wait_for("counted")?;
        let finished = gctrace.interrupt()?;
        script.say("end")?;
        let done = script.finish()?;
        let extra = |name: &str| done.report.extra_u64(name);
        let Lines { head, sizes: rows, places: sites } = parsed(&finished)?;
        ensure!(sites.is_empty() && head["sample"] == 0, "stacks that nobody asked for: {sites:?}");
        eprintln!("{}: {head}", ruby.label());

        let row = |size: u64| rows.get(&size).with_context(|| format!("nothing up to {size} in {rows:?}"));
        let is = |row: &Value, calls: [u64; 3], bytes: [u64; 3], freed: &[(u64, u64)], left: u64| {
            let names = ["malloc", "calloc", "realloc"];
            let freed: serde_json::Map<String, Value> =
                freed.iter().map(|(age, count)| (age.to_string(), (*count).into())).collect();
            let all = names.iter().zip(calls).all(|(name, calls)| row["calls"][name] == calls)
                && names.iter().zip(bytes).all(|(name, bytes)| row["bytes"][name] == bytes)
                && row["freed"] == Value::Object(freed.clone())
                && row["live"] == left;
            ensure!(all, "{}: {row}, not {calls:?} {bytes:?} {freed:?} {left}", ruby.label());
            Ok(())
        };
        ensure!(
            extra("at_once")? == 0 && extra("later")? >= 2 && extra("moved")? >= 3,
            "{:?}",
            done.report.extra
        );
        // 20 blocks that were freed at once, and 10 that were then moved to another size class.
        is(row(4 * MIB)?, [30, 0, 0], [90 * MIB, 0, 0], &[(0, 20)], 0)?;
        is(row(8 * MIB)?, [0, 15, 0], [0, 75 * MIB, 0], &[(extra("later")?, 15)], 0)?;
        is(row(16 * MIB)?, [0, 0, 10], [0, 0, 100 * MIB], &[(extra("moved")?, 10)], 0)?;
        is(row(32 * MIB)?, [7, 0, 0], [140 * MIB, 0, 0], &[], 7)?;
        // Allocated before counting started: its free is counted, and nothing else is known about it.
        ensure!(!rows.contains_key(&(64 * MIB)) && !rows.contains_key(&(1 << 62)), "{rows:?}");
        ensure!(head["frees_unknown"].as_u64() >= Some(5), "{head}");
        ensure!(extra("refused")? == 1 && head["failed"].as_u64() >= Some(1), "{head}");
        // A few more than the script's own: the interpreter may also have a buffer of that size.
        let strings = row(1 << 17)?["calls"]["malloc"].as_u64().context("calls")?;
        ensure!((extra("strings")?..extra("strings")? + 20).contains(&strings), "{strings} strings");

        let zero = ["overflow", "unread", "lost", "reallocs_unpaired"];
        ensure!(head["adds_up"] == true && zero.iter().all(|name| head[name] == 0), "{head}");
        ensure!(head["ended_by"] == "signal" && head["pid"] == done.pid, "{head}");
        Ok(())
    })
}

/// Mean number of bytes per sampled stack.
const PERIOD: f64 = 65_536.0;
/// Number of standard errors by which an estimate may be off; one of the comparisons below then fails by chance in some 50,000 runs.
const ERRORS: f64 = 5.0;

/// What one site allocates: calls, bytes per call, and how much of it is left.
struct AllocationSite {
    name: &'static str,
    method: &'static str,
    function: &'static str,
    calls: f64,
    size: f64,
    left: f64,
}

impl AllocationSite {
    /// The standard errors of the estimates of this number of calls, and of their bytes.
    fn errors(&self, calls: f64) -> (f64, f64) {
        let probability = (self.size / PERIOD).min(1.0);
        let calls = (calls * (1.0 - probability) / probability).sqrt();
        (calls, calls * self.size)
    }

    /// Compares an estimate with the truth.
    fn check(&self, what: &str, estimate: &Value, calls: f64) -> Result<()> {
        let number = |name: &str| estimate[name].as_f64().with_context(|| format!("no {name} in {estimate}"));
        let (in_calls, in_bytes) = self.errors(calls);
        let off = (number("calls")? - calls, number("bytes")? - calls * self.size);
        eprintln!("{} {what}: {estimate}, off by {off:?}, errors {:?}", self.name, (in_calls, in_bytes));
        // Exact values are exact up to the rounding of numbers.
        let within = |off: f64, error: f64| off.abs() <= (ERRORS * error).max(1e-6);
        ensure!(within(off.0, in_calls) && within(off.1, in_bytes), "{} {what}: {estimate}", self.name);
        Ok(())
    }
}

const fn place(
    name: &'static str,
    function: &'static str,
    calls: u32,
    size: u32,
    left: u32,
) -> AllocationSite {
    let method = match name.as_bytes() {
        b"moved" => "kept",
        _ => name,
    };
    AllocationSite { name, method, function, calls: calls as f64, size: size as f64, left: left as f64 }
}

/// The sites of `malloc_calls.rb`. A block that is moved belongs to the call that moved it.
const PLACES: [AllocationSite; 6] = [
    place("tiny", "witness_churn", 100_000, 48, 0),
    place("small", "witness_churn", 4_000, 4096, 0),
    place("large", "witness_churn", 50, 3 << 20, 0),
    place("kept", "witness_malloc", 600, 9_000, 0),
    place("moved", "witness_realloc", 600, 20_000, 600),
    place("stays", "witness_malloc", 40, 70_000, 40),
];

/// The estimates of what each line allocates, and of what is left of it, are correct within their standard errors. Calls above the period
/// are counted individually. Sums by size stay exact. The profile has the same values.
#[test]
fn places_ask_for_what_they_ask_for() -> Result<()> {
    let live = Live::begin()?;
    Ruby::each(|ruby| {
        let dir = live.dir(&format!("malloc-{}", ruby.label()))?;
        let (pprof, folded) = (dir.join("m.pb.gz"), dir.join("m.folded"));
        let path = |path: &std::path::Path| path.to_str().map(ToOwned::to_owned).context("a path");
        let (pprof_arg, folded_arg) = (path(&pprof)?, path(&folded)?);
        let files = ["--pprof", &pprof_arg, "--folded", &folded_arg, "--flamegraph-of", "malloc-live"];
        let more = [["--sample", "64KiB"].as_slice(), &files].concat();
        let mut script = script(&live, ruby)?;
        let gctrace = malloc(&live, script.pid(), "100", &more)?;
        script.say("places")?;
        script.wait_for("counted")?;
        let finished = gctrace.interrupt()?;
        script.say("end")?;
        let done = script.finish()?;
        let Lines { head, sizes, places: sites } = parsed(&finished)?;
        eprintln!("{}: {head}", ruby.label());

        ensure!(
            head["stacks"].as_u64() >= Some(300)
                && head["stacks_lost"] == 0
                && head["stacks_lost_bytes"] == 0,
            "{head}"
        );
        ensure!(sizes.get(&(4 * MIB)).is_some_and(|row| row["calls"]["malloc"] == 50), "{sizes:?}");
        ensure!(head["adds_up"] == true && head["overflow"] == 0, "{head}");

        for place in &PLACES {
            let number = done.report.extra_u64(place.name)?;
            // The interpreter itself allocates some memory in that line, which may also be sampled.
            let its = |site: &&Value| {
                let ends = |name: &str, end: &str| site[name].as_str().is_some_and(|it| it.ends_with(end));
                site["line"] == number
                    && ends("file", "malloc_calls.rb")
                    && ends("library", "malloc_witness.so")
            };
            let its: Vec<&Value> = sites.iter().filter(its).collect();
            let [site] = its.as_slice() else { anyhow::bail!("{}: {its:?} of {sites:?}", place.name) };
            ensure!(site["method"] == format!("Places.{}", place.method), "{site}");
            ensure!(site["symbol"] == place.function, "{site}");
            place.check("asked", &site["asked"], place.calls)?;
            place.check("left", &site["left"], place.left)?;
        }
        // Strings created by the interpreter itself in a block, each larger than the period, so all of them are counted. Small ones of that line
        // belong to sites of other functions.
        let number = done.report.extra_u64("strings")?;
        let of_strings = |site: &&Value| {
            site["line"] == number && site["library"].as_str().is_some_and(|it| it.contains("ruby"))
        };
        let left = |site: &Value, of: &str| site["left"][of].as_f64().unwrap_or_default();
        let strings = sites.iter().filter(of_strings);
        let strings = strings.max_by(|one, two| left(one, "bytes").total_cmp(&left(two, "bytes")));
        let strings = left(strings.context("no strings")?, "calls");
        let kept = done.report.extra_u64("kept_strings")? as f64;
        ensure!((kept..kept + 2.0).contains(&strings), "{strings} of {kept} strings in {sites:?}");

        // All sites together add up to what was counted.
        let sum =
            |what: &str, of: &str| -> f64 { sites.iter().filter_map(|site| site[what][of].as_f64()).sum() };
        let error = |what: &str| -> f64 {
            let of = |site: &Value| site[what]["bytes_error"].as_f64();
            sites.iter().filter_map(of).map(|error| error * error).sum::<f64>().sqrt()
        };
        let counted = |of: &str| head[of].as_u64().with_context(|| format!("no {of}"));
        let asked: u64 = head["bytes"].as_object().context("bytes")?.values().filter_map(Value::as_u64).sum();
        for (what, truth) in [("asked", asked), ("left", counted("live_bytes")?)] {
            let (estimate, error) = (sum(what, "bytes"), error(what));
            eprintln!("{}: {what} {estimate} ± {error}, truly {truth}", ruby.label());
            ensure!(
                (estimate - truth as f64).abs() <= ERRORS * error,
                "{what}: {estimate} ± {error}, {truth}"
            );
        }

        // Each sample of a profile is rounded.
        let profile = Profile::open(&pprof)?;
        let near = |one: f64, two: f64| (one - two).abs() <= profile.samples.len() as f64;
        for (name, truth) in [
            ("alloc_objects/count", sum("asked", "calls")),
            ("alloc_space/bytes", sum("asked", "bytes")),
            ("inuse_objects/count", sum("left", "calls")),
            ("inuse_space/bytes", sum("left", "bytes")),
        ] {
            let total = profile.total(name)?;
            ensure!(near(total as f64, truth), "{name}: {total} in the profile, {truth} in the lines");
        }
        let space = profile.index("alloc_space/bytes")?;
        let large = profile.samples.iter().filter(|sample| {
            let has = |name: &str| sample.stack.iter().any(|frame| frame.name == name);
            has("Places.large") && has("witness_churn")
        });
        let large: u64 = large.map(|sample| sample.values[space]).sum();
        ensure!(large == 50 * 3 * MIB, "{large} bytes of Places.large in the profile");
        let text = std::fs::read_to_string(&folded)?;
        let widths = text.lines().filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok());
        ensure!(
            widths.sum::<u64>() == profile.total("inuse_space/bytes")?,
            "collapsed stacks of other bytes"
        );
        Ok(())
    })
}

/// More stacks at once than can be read: what they represent is still known.
#[test]
fn lost_stacks_are_accounted_for() -> Result<()> {
    let live = Live::begin()?;
    let mut script = script(&live, &Ruby::main()?)?;
    let gctrace = malloc(&live, script.pid(), "100", &["--sample", "64KiB"])?;
    script.say("burst")?;
    script.wait_for("counted")?;
    let Lines { head, places: sites, .. } = parsed(&gctrace.interrupt()?)?;
    script.say("end")?;
    script.finish()?;
    eprintln!("{head}");
    let number = |name: &str| head[name].as_u64().with_context(|| format!("no {name}"));
    // As large as the period, so every stack is taken.
    ensure!(number("stacks")? + number("stacks_lost")? >= 20_000, "{head}");
    let of = |name: &str| -> f64 { sites.iter().filter_map(|site| site["asked"][name].as_f64()).sum() };
    let asked: u64 = head["bytes"].as_object().context("bytes")?.values().filter_map(Value::as_u64).sum();
    let errors = sites.iter().filter_map(|site| site["asked"]["bytes_error"].as_f64());
    let error = errors.map(|error| error * error).sum::<f64>().sqrt();
    let estimate = of("bytes") + number("stacks_lost_bytes")? as f64;
    // The rest, some hundred small calls, may have no stack: that is an error of less than a period per kilobyte of them.
    let rest = (asked - 20_000 * (1 << 16)) as f64;
    let bound = ERRORS * error.max((rest * PERIOD).sqrt());
    ensure!((estimate - asked as f64).abs() <= bound, "{estimate} ± {bound}, truly {asked}");
    Ok(())
}

/// If the calls of a process cost more than the budget, counting ends early, and the process continues.
#[test]
fn budget_ends_the_window() -> Result<()> {
    let live = Live::begin()?;
    let mut script = script(&live, &Ruby::main()?)?;
    let gctrace = malloc(&live, script.pid(), "1", &[])?;
    script.say("churn")?;
    let Lines { head, sizes: rows, .. } = parsed(&gctrace.wait()?)?;
    ensure!(head["ended_by"] == "budget" && head["seconds"].as_f64() < Some(60.0), "{head}");
    // 400,000 pairs take twice as many hits.
    let churned = rows.get(&64).and_then(|row| row["calls"]["malloc"].as_u64()).context("no calls")?;
    ensure!(churned > 0 && head["hits"].as_u64() >= Some(churned), "{head} {churned}");
    script.wait_for("counted")?;
    script.say("end")?;
    script.finish()?;
    Ok(())
}

/// The calls of two programs in one process are not added up.
#[test]
fn a_program_that_is_replaced() -> Result<()> {
    let live = Live::begin()?;
    let mut script = Script::unwitnessed(&live, &Ruby::main()?, "replaced.rb")?.start()?;
    script.wait_for("ready")?;
    let gctrace = malloc(&live, script.pid(), "100", &[])?;
    script.say("now")?;
    script.wait_for("replaced")?;
    let finished = gctrace.interrupt()?;
    ensure!(
        finished.status.code() == Some(2) && finished.errors().contains("it replaced its program"),
        "{:?}: {:?} {}",
        finished.status,
        finished.stdout,
        finished.errors()
    );
    script.say("end")?;
    script.finish()?;
    Ok(())
}

/// A process that is not Ruby leads to one clear line and status 1.
#[test]
fn others_are_refused() -> Result<()> {
    let live = Live::begin()?;
    let (own, cache) = (std::process::id().to_string(), live.path("cache").to_string_lossy().into_owned());
    let finished = Invocation::new(["malloc", "--pid", &own, "--cache-dir", &cache])?.run()?;
    ensure!(finished.status.code() == Some(1), "{:?}", finished.status);
    ensure!(
        finished.stdout.is_empty() && finished.errors().contains("not a Ruby process"),
        "{}",
        finished.errors()
    );
    Ok(())
}
