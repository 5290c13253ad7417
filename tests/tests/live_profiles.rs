//! The profiles by stack: every format shows the same time, which is the count of the kernel side.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::ledger;
use gctrace_tests::live::Live;
use gctrace_tests::pprof::{self, Profile};
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::Script;
use serde_json::Value;

/// The files of a run.
struct Files {
    pprof: PathBuf,
    folded: PathBuf,
    svg: PathBuf,
    speedscope: PathBuf,
    firefox: PathBuf,
}

impl Files {
    fn new(dir: &Path) -> Self {
        Self {
            pprof: dir.join("run.pb.gz"),
            folded: dir.join("run.folded"),
            svg: dir.join("run.svg"),
            speedscope: dir.join("run.speedscope.json"),
            firefox: dir.join("run.json"),
        }
    }

    fn flags(&self) -> [&std::ffi::OsStr; 10] {
        [
            "--pprof".as_ref(),
            self.pprof.as_ref(),
            "--folded".as_ref(),
            self.folded.as_ref(),
            "--flamegraph".as_ref(),
            self.svg.as_ref(),
            "--speedscope".as_ref(),
            self.speedscope.as_ref(),
            "--firefox".as_ref(),
            self.firefox.as_ref(),
        ]
    }
}

fn json(path: &Path) -> Result<Value> {
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    Ok(serde_json::from_str(&text)?)
}

fn numbers(value: &Value) -> Result<Vec<f64>> {
    let list = value.as_array().with_context(|| format!("not a list: {value}"))?;
    list.iter().map(|number| number.as_f64().context("not a number")).collect()
}

/// Time in collapsed stacks.
fn folded_ns(text: &str) -> Result<u64> {
    let count = |line: &str| Ok(line.rsplit_once(' ').context("no count")?.1.parse::<u64>()?);
    text.lines().map(count).sum()
}

fn speedscope_ns(file: &Value) -> Result<u64> {
    let mut total = 0;
    for profile in file["profiles"].as_array().context("no profiles")? {
        ensure!(profile["unit"] == "nanoseconds", "unit {}", profile["unit"]);
        let weights = numbers(&profile["weights"])?;
        let samples = profile["samples"].as_array().context("no samples")?;
        ensure!(samples.len() == weights.len(), "samples and weights");
        // A sample without frames is a gap. The profile of all threads contains what each of them has.
        let empty = |sample: &&Value| sample.as_array().is_some_and(Vec::is_empty);
        let time =
            samples.iter().zip(weights).filter(|(sample, _)| !empty(sample)).map(|(_, ns)| ns).sum::<f64>();
        if !profile["name"].as_str().is_some_and(|name| name.starts_with("all threads")) {
            total += time as u64;
        }
    }
    Ok(total)
}

/// Time by weights, time by CPU deltas, and the number of GC pauses.
fn firefox_sums(file: &Value) -> Result<(u64, u64, u64)> {
    let (mut time, mut cpu, mut pauses) = (0, 0, 0);
    for thread in file["threads"].as_array().context("no threads")? {
        let samples = &thread["samples"];
        let weights = numbers(&samples["weight"])?;
        time += weights.iter().map(|ms| (ms * 1e6).round() as u64).sum::<u64>();
        cpu += numbers(&samples["threadCPUDelta"])?.iter().sum::<f64>() as u64;
        let markers = thread["markers"]["data"].as_array().context("no markers")?;
        pauses += markers.iter().filter(|data| data["type"] == "GcPause").count() as u64;
    }
    Ok((time, cpu, pauses))
}

/// All five files of one run agree with each other, with the lines and with the ledger.
#[test]
fn formats_agree() -> Result<()> {
    let live = Live::beside_others()?;
    Ruby::first_and_last(|ruby| {
        let files = Files::new(&live.dir(&format!("profiles{}", ruby.label()))?);
        let mut args: Vec<&std::ffi::OsStr> = vec!["--rate".as_ref(), "499".as_ref()];
        args.extend(files.flags());
        let (_, gctrace) = Script::under([Script::unwitnessed(&live, ruby, "pressure.rb")?], args)?;
        let (report, _) = gctrace.done()?;
        ledger::check_lossless(&report)?;
        let user = &report.ledger.as_ref().context("no ledger")?.user;
        let stacks = user.get("stacks").and_then(Value::as_u64).context("no stacks in the ledger")?;
        // Another Ruby on this machine may have been seen before the recording started.
        let early = user.get("profile_samples_early").and_then(Value::as_u64).context("no early samples")?;
        let stacks = stacks - early;
        gctrace_tests::ensure_times!(stacks > 50, "{stacks} stacks are too few to compare anything");

        let profile = Profile::open(&files.pprof)?;
        let cpu = profile.total("cpu/nanoseconds")?;
        assert_eq!(profile.total("samples/count")?, stacks);
        assert_eq!(profile.total("wall/nanoseconds")?, 0, "wall time was not measured");
        assert_eq!(folded_ns(&std::fs::read_to_string(&files.folded)?)?, cpu, "collapsed stacks");
        let svg = std::fs::read_to_string(&files.svg)?;
        ensure!(svg.contains(&format!("total_samples=\"{cpu}\"")), "the flame graph has another total");
        assert_eq!(speedscope_ns(&json(&files.speedscope)?)?, cpu, "speedscope");
        let firefox = json(&files.firefox)?;
        let began = firefox["meta"]["startTime"].as_f64().context("no start")? / 1e3;
        let recorded = report.gcs.iter().filter(|line| line.ts >= began);
        let steps = recorded.map(|line| line.steps).sum::<u64>();
        assert_eq!(firefox_sums(&firefox)?, (cpu, cpu, steps), "Firefox: weights, CPU, pauses");
        let counters = firefox["counters"].as_array().context("no counters")?;
        ensure!(counters.iter().any(|counter| counter["category"] == "Memory"), "no memory in {counters:?}");
        Ok(())
    })
}

/// `go tool pprof` shows the program's own methods, and pauses under the methods that triggered them.
#[test]
fn pprof_names_methods() -> Result<()> {
    let live = Live::beside_others()?;
    let path = live.path("run.pb.gz");
    let args: [&std::ffi::OsStr; 4] = ["--rate".as_ref(), "499".as_ref(), "--pprof".as_ref(), path.as_ref()];
    let (_, gctrace) = Script::under([Script::unwitnessed(&live, &Ruby::main()?, "pressure.rb")?], args)?;
    gctrace.done()?;
    for (sample_type, names) in
        [("cpu", &["<main>", "Work.small"][..]), ("gc", &["Work.small", "(garbage collection)"])]
    {
        let index = format!("-sample_index={sample_type}");
        let top = pprof::go_tool_pprof(&["-top", "-cum", &index], &path)?;
        for name in names {
            ensure!(top.contains(name), "no {name} in\n{top}");
        }
    }
    Ok(())
}

/// Text names the trigger of a cycle, and at the end the hottest methods.
#[test]
fn text_names_methods() -> Result<()> {
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    let mut gctrace = Invocation::new(["--all-ruby", "--rate", "499"])?.start()?;
    gctrace.wait_ready()?;
    let done = Script::unwitnessed(&live, &ruby, "pressure.rb")?.run()?;
    let finished = gctrace.interrupt()?;
    ensure!(finished.status.success(), "{}: {}", finished.status, finished.errors());
    let lines = &finished.stdout;
    let by = |line: &&String| line.contains("  by ") && line.contains("support.rb:");
    ensure!(lines.iter().any(|line| by(&line)), "no trigger in the lines: {:?}", lines.get(1));
    let heading = lines.iter().position(|line| {
        line.contains(&format!("(pid {})", done.pid)) && line.contains(" s of CPU time in ")
    });
    let heading = heading.with_context(|| format!("no summary of {} in {lines:?}", done.pid))?;
    let methods = &lines[heading + 1..];
    ensure!(methods.first().is_some_and(|line| line.contains("SELF  TOTAL  METHOD")), "{methods:?}");
    ensure!(methods.iter().any(|line| line.contains("Work.small  ")), "{methods:?}");
    Ok(())
}

/// With filters, every file has exactly what the ledger counts as recorded. The rest is counted and reported.
#[test]
fn filters() -> Result<()> {
    let live = Live::beside_others()?;
    Ruby::first_and_last(|ruby| {
        for (flags, is_kept) in [
            (&["--focus", "Work.small"][..], (|line| line.contains(";Work.small")) as fn(&str) -> bool),
            (&["--app-only"], |line| {
                !line.contains("[k]") && !line.contains("Integer#") && !line.contains("lib")
            }),
            (&["--thread", "/^no such thread$/"], |_| false),
        ] {
            let files = Files::new(&live.dir(&format!("filters{}{}", ruby.label(), flags[0]))?);
            let mut args: Vec<&std::ffi::OsStr> = vec!["--rate".as_ref(), "499".as_ref()];
            args.extend(flags.iter().map(std::ffi::OsStr::new));
            args.extend(files.flags());
            let (_, gctrace) = Script::under([Script::unwitnessed(&live, ruby, "pressure.rb")?], args)?;
            let (report, _) = gctrace.done()?;
            ledger::check_lossless(&report)?;
            let count = |name| ledger::user(&report, name);
            let all = count("stacks")? - count("profile_samples_early")?;
            assert_eq!(all, count("profile_samples")?, "samples handed to profiles");
            let (ns, kept) = (count("profile_ns")?, count("profile_ns_recorded")?);
            ensure!(ns > 0 && kept <= ns, "{kept} ns of {ns} ns");
            let folded = std::fs::read_to_string(&files.folded)?;
            let unexpected: Vec<&str> = folded.lines().filter(|line| !is_kept(line)).collect();
            ensure!(unexpected.is_empty(), "{flags:?}: {unexpected:#?}");
            assert_eq!(folded_ns(&folded)?, kept, "collapsed stacks");
            let profile = Profile::open(&files.pprof)?;
            assert_eq!(profile.total("cpu/nanoseconds")?, kept, "pprof");
            assert_eq!(profile.total("samples/count")?, count("profile_samples_recorded")?);
            assert_eq!(speedscope_ns(&json(&files.speedscope)?)?, kept, "speedscope");
            assert_eq!(firefox_sums(&json(&files.firefox)?)?.0, kept, "Firefox");
            let dropped = ns - kept;
            match flags[0] {
                "--focus" => ensure!(dropped == count("profile_ns_out_of_focus")? && kept > 0 && dropped > 0),
                "--app-only" => ensure!(dropped == 0 && count("profile_frames_hidden")? > 0),
                _ => ensure!(kept == 0 && dropped == count("profile_ns_other_threads")?),
            }
            let svg = std::fs::read_to_string(&files.svg)?;
            // Its lines may be broken between any two words.
            let said: String = svg.split('<').filter_map(|part| Some(part.split_once('>')?.1)).collect();
            ensure!(
                kept == 0 || said.contains("dropped by --focus") || said.contains("hidden by --app-only"),
                "not said"
            );
        }
        Ok(())
    })
}
