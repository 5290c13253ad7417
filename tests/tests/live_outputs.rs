//! The output files: they contain the same as the lines, in the format that their readers expect.

#[path = "product/mod.rs"]
mod product;

use std::ffi::OsStr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::gctrace::{Gctrace, Invocation};
use gctrace_tests::ledger;
use gctrace_tests::live::Live;
use gctrace_tests::pprof::{self, Profile};
use gctrace_tests::report::{GcLine, Report};
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::{Done, Report as ScriptReport, Script};
use gctrace_tests::tunemygc::{self, Sample, Set};
use gctrace_tunemygc::tune::Series;
use serde_json::{Map, Value};

/// Starts gctrace on all Rubies with this option before the path and jsonl output, and waits until it is ready.
fn writing(option: &str, path: &Path) -> Result<Gctrace> {
    Invocation::jsonl(["--all-ruby".as_ref(), option.as_ref(), path.as_os_str()])?.start_ready()
}

/// The only set of a process.
fn set_of(sets: &[Set], pid: u32) -> Result<&Set> {
    let of_pid = sets.iter().filter(|set| set.pid == pid).collect::<Vec<_>>();
    ensure!(of_pid.len() == 1, "{} sets of process {pid}", of_pid.len());
    Ok(of_pid[0])
}

/// Checks that a sample contains the same as the line.
fn same_state(sample: &Sample, stat: &Map<String, Value>, info: &Map<String, Value>) -> Result<()> {
    let values = stat.values().map(|value| value.as_u64().unwrap_or(u64::MAX)).collect::<Vec<_>>();
    ensure!(sample.stat == values, "stat {:?}, the line has {values:?}", sample.stat);
    ensure!(&sample.info == info, "info {:?}, the line has {info:?}", sample.info);
    Ok(())
}

/// Checks that the set of a process has the events of its lines and nothing else.
fn set_equals_lines(set: &Set, report: &Report, script: &ScriptReport) -> Result<()> {
    let pid = script.pid;
    ensure!(set.ruby == script.ruby, "Ruby {}", set.ruby);
    ensure!(set.ppid == script.ppid, "parent {}", set.ppid);
    ensure!(set.keys.iter().eq(script.before.keys()), "keys {:?}", set.keys);
    // These two are either the program's own values or absent.
    for (index, said) in [(5, &script.opts), (6, &script.constants)] {
        let ours = &set.header[index];
        let absent =
            ours.as_array().is_some_and(Vec::is_empty) || ours.as_object().is_some_and(Map::is_empty);
        ensure!(absent || ours == said, "header element {index} is {ours}, the program says {said}");
    }

    let lines = report.gcs_of(pid).collect::<Vec<&GcLine>>();
    let started = set.of("GC_CYCLE_STARTED").collect::<Vec<_>>();
    ensure!(started.len() == lines.len(), "{} cycles started, {} lines", started.len(), lines.len());
    for (sample, line) in started.iter().zip(&lines) {
        let place = format!("cycle {} of {pid} started", line.count);
        same_state(sample, &line.stat, &line.latest_gc_info).context(place.clone())?;
        ensure!((sample.ts - line.ts).abs() < 2e-6, "{place} at {}, the line has {}", sample.ts, line.ts);
        ensure!(
            (sample.rss, sample.peak_rss) == (line.rss, line.peak_rss),
            "{place} with RSS {:?}, the line has {:?}",
            sample.rss,
            line.rss
        );
        let thread = (line.tid != pid).then_some(u64::from(line.tid));
        ensure!(sample.thread == thread, "{place} on {:?}, the line has {thread:?}", sample.thread);
        ensure!(
            sample.info.get("state").is_some_and(|state| state == "none"),
            "{place} in state {:?}",
            sample.info
        );
    }
    let complete = lines.iter().filter(|line| line.complete).collect::<Vec<_>>();
    let ended = set.of("GC_CYCLE_ENDED").collect::<Vec<_>>();
    ensure!(
        ended.len() == complete.len(),
        "{} cycles ended, {} lines are complete",
        ended.len(),
        complete.len()
    );
    for (sample, line) in ended.iter().zip(&complete) {
        let place = format!("cycle {} of {pid} ended", line.count);
        let (stat, info) = (line.stat_end.as_ref(), line.latest_gc_info_end.as_ref());
        let (stat, info) = stat.zip(info).with_context(|| format!("{place}: no state in the line"))?;
        same_state(sample, stat, info).context(place.clone())?;
        ensure!(sample.ts >= line.ts, "{place} before it started");
        ensure!(
            (sample.rss, sample.peak_rss) == (line.rss_end, line.peak_rss_end),
            "{place} with RSS {:?}, the line has {:?}",
            sample.rss,
            line.rss_end
        );
        ensure!(info.get("state").is_some_and(|state| state == "sweeping"), "{place} in state {info:?}");
    }
    Ok(())
}

/// Whether a process was found, with its VM set up, before its first cycle.
fn is_found_before(set: &Set, report: &Report) -> Result<bool> {
    let booted = set.of("BOOTED").next().context("never booted")?;
    let first = report.gcs_of(set.pid).next().context("no lines")?;
    ensure!(booted.ts < first.ts + 2e-6, "booted at {}, after its first cycle at {}", booted.ts, first.ts);
    Ok(booted.ts < first.ts - 2e-6)
}

/// Checks the `BOOTED` event of a process: it is when the process was found, with the state of its line, or at the start of its first cycle.
fn booted_equals_lines(set: &Set, report: &Report) -> Result<()> {
    let booted = set.of("BOOTED").next().context("never booted")?;
    let stat = if is_found_before(set, report)? {
        report
            .processes_of(set.pid)
            .find_map(|process| process.stat.as_ref())
            .context("found without a state")?
    } else {
        &report.gcs_of(set.pid).next().context("no lines")?.stat
    };
    let stat = stat.values().map(|value| value.as_u64().unwrap_or(u64::MAX)).collect::<Vec<_>>();
    ensure!(booted.stat == stat, "booted with {:?}, the line has {stat:?}", booted.stat);
    Ok(())
}

/// Checks that from 3.2 on the first and the last sample of a whole life, and no other, have the heaps in their `meta`. The last sample is of
/// the end of the process, which is in no line of a cycle.
fn heaps_equal_lines(set: &Set, report: &Report) -> Result<()> {
    let heaps = |sample: &Sample| sample.meta.get("stat_heap").cloned();
    let with_heaps: Vec<usize> = set
        .samples
        .iter()
        .enumerate()
        .filter(|(_, sample)| heaps(sample).is_some())
        .map(|(at, _)| at)
        .collect();
    if Series::parse(&set.ruby).context("a known series")? < Series(3, 2) {
        ensure!(
            with_heaps.is_empty(),
            "Ruby {} has one heap, but samples {with_heaps:?} have more",
            set.ruby
        );
        return Ok(());
    }
    let last = set.samples.len() - 1;
    ensure!(with_heaps == [0, last], "samples {with_heaps:?} of {last} have heaps");
    for sample in [&set.samples[0], &set.samples[last]] {
        // The heaps are of the same moment as the totals beside them.
        for (total, parts) in [
            ("heap_available_slots", &["heap_eden_slots", "heap_tomb_slots"][..]),
            ("total_allocated_objects", &["total_allocated_objects"]),
        ] {
            let of_heap = |heap: &Value| -> Option<u64> {
                let known: Vec<u64> = parts.iter().filter_map(|part| heap[*part].as_u64()).collect();
                (!known.is_empty()).then(|| known.iter().sum())
            };
            let heaps = heaps(sample).context("heaps")?;
            let sum: Option<u64> = heaps.as_object().context("an object")?.values().map(of_heap).sum();
            // Ruby 3.2 does not count objects per heap.
            let Some(sum) = sum else { continue };
            let at = set.keys.iter().position(|key| key == total).with_context(|| format!("no {total}"))?;
            ensure!(
                sum > 0 && sum == sample.stat[at],
                "{}: {total} {} of {heaps}",
                sample.event,
                sample.stat[at]
            );
        }
    }
    let first = report.gcs_of(set.pid).next().context("no lines")?;
    let line = first.stat_heap.as_ref().context("the line has no heaps")?;
    let ours = heaps(&set.samples[0]).context("heaps")?;
    let ours = ours.as_object().context("an object")?;
    if !is_found_before(set, report)? {
        ensure!(ours == line, "{ours:?}, the first line has {line:?}");
        return Ok(());
    }
    // It was found before its first cycle, with its VM set up: its heaps have allocated less than by then.
    for (heap, (ours, line)) in ours.values().zip(line.values()).enumerate() {
        let given = |heap: &Value| heap["total_allocated_objects"].as_u64();
        ensure!(given(ours) <= given(line), "heap {heap}: {ours}, the first line has {line}");
    }
    Ok(())
}

/// Checks the life of a process that was traced from its start to its end: booted once, and terminated once, at the end.
fn whole_life(set: &Set) -> Result<()> {
    let events = set.samples.iter().map(|sample| sample.event.as_str()).collect::<Vec<_>>();
    ensure!(set.of("BOOTED").count() == 1, "booted {} times: {events:?}", set.of("BOOTED").count());
    ensure!(
        set.of("TERMINATED").count() == 1,
        "terminated {} times: {events:?}",
        set.of("TERMINATED").count()
    );
    ensure!(events.last() == Some(&"TERMINATED"), "the end is {:?}", events.last());
    Ok(())
}

/// One sample set per process, with the same cycles and states as the lines. gctrace's own reader reads it, too.
#[test]
fn sample_sets_equal_the_lines() -> Result<()> {
    let live = Live::begin()?;
    Ruby::first_and_last(|ruby| {
        let index = ruby.label();
        let dir = live.dir(&format!("sets{index}"))?;
        let gctrace = writing("--tunemygc", &dir)?;
        // Its environment is read from /proc, so it must still be running when its first cycle is read from the ring.
        let explicit = Script::unwitnessed(&live, ruby, "explicit.rb")?.arg("200");
        let explicit =
            explicit.env("RUBY_GC_HEAP_GROWTH_FACTOR", "1.3").env("RUBY_GC_TOKEN", "s3cr3t").run()?;
        let threads = Script::unwitnessed(&live, ruby, "threads.rb")?.run()?;
        let forker = Script::unwitnessed(&live, ruby, "forker.rb")?.start()?;
        let outputs = forker.outputs();
        let forker = forker.finish()?;
        let report = gctrace.stop()?;
        ledger::check_lossless(&report)?;

        let sets = Set::read_dir(&dir)?;
        for set in &sets {
            let again = product::reread(&set.text).with_context(|| format!("set of {}", set.pid))?;
            ensure!(
                again == serde_json::from_str::<Value>(&set.text)?,
                "the set of {} is read differently",
                set.pid
            );
            ensure!(!set.text.contains("s3cr3t"), "the token is in the set of {}", set.pid);
        }
        for done in [&explicit, &threads, &forker] {
            let set = set_of(&sets, done.pid)?;
            ensure!(set.samples.iter().all(|sample| sample.rss.is_some()), "memory of {}", done.pid);
            set_equals_lines(set, &report, &done.report)?;
            whole_life(set).with_context(|| format!("set of {}", done.pid))?;
            booted_equals_lines(set, &report).with_context(|| format!("set of {}", done.pid))?;
            heaps_equal_lines(set, &report).with_context(|| format!("set of {}", done.pid))?;
        }
        for suffix in [".child", ".grandchild"] {
            let (child, _) = outputs.read(suffix)?;
            set_equals_lines(set_of(&sets, child.pid)?, &report, &child).context(suffix)?;
        }
        let env = &set_of(&sets, explicit.pid)?.env;
        assert_eq!(env.get("RUBY_GC_HEAP_GROWTH_FACTOR").and_then(Value::as_str), Some("1.3"));
        Ok(())
    })
}

/// Files appear only when they are complete, and nothing else is left in the directory.
#[test]
fn files_appear_complete() -> Result<()> {
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    let dir = live.dir("sets")?;
    let gctrace = writing("--tunemygc", &dir)?;
    let over = AtomicBool::new(false);
    let (seen, (runs, report)) = std::thread::scope(|scope| -> Result<_> {
        let watcher = scope.spawn(|| -> Result<usize> {
            let mut looks = 0;
            loop {
                let last = over.load(Ordering::Acquire);
                for path in tunemygc::files(&dir)? {
                    if path.extension().is_some_and(|extension| extension == "json") {
                        let text = std::fs::read_to_string(&path)?;
                        Set::parse(&text).with_context(|| format!("{} is not complete", path.display()))?;
                        looks += 1;
                    }
                }
                if last {
                    return Ok(looks);
                }
            }
        });
        let run = || -> Result<(Vec<Done>, Report)> {
            let scripts =
                ["explicit.rb", "stress.rb", "explicit.rb", "modes.rb", "explicit.rb", "explicit.rb"];
            let runs = scripts.iter().map(|name| Script::unwitnessed(&live, &ruby, name)?.run());
            Ok((runs.collect::<Result<_>>()?, gctrace.stop()?))
        };
        let runs = run();
        over.store(true, Ordering::Release);
        let seen = watcher.join().map_err(|_| anyhow::anyhow!("the watcher panicked"))??;
        Ok((seen, runs?))
    })?;
    let sets = Set::read_dir(&dir)?;
    ensure!(seen > 0, "the watcher saw nothing");
    for done in runs {
        let set = set_of(&sets, done.pid)?;
        set_equals_lines(set, &report, &done.report)?;
        whole_life(set)?;
    }
    Ok(())
}

/// `go tool pprof` opens the profile, and its totals equal those of the lines.
#[test]
fn pprof_totals_equal_the_lines() -> Result<()> {
    let live = Live::beside_others()?;
    Ruby::first_and_last(|ruby| {
        let index = ruby.label();
        let path = live.path(&format!("gc{index}.pb.gz"));
        let scripts = ["explicit.rb", "pressure.rb", "threads.rb"]
            .map(|name| Script::unwitnessed(&live, ruby, name))
            .into_iter()
            .collect::<Result<Vec<_>>>()?;
        let (done, gctrace) = Script::under(scripts, [OsStr::new("--pprof"), path.as_os_str()])?;
        let (report, _) = gctrace.done()?;
        ledger::check_lossless(&report)?;

        let profile = Profile::open(&path)?;
        assert_eq!(
            profile.types,
            [
                "samples/count",
                "cpu/nanoseconds",
                "wall/nanoseconds",
                "gc_pauses/count",
                "gc/nanoseconds",
                "gvl_waits/count",
                "gvl_wait/nanoseconds",
                "gvl_hold/nanoseconds",
                "alloc_objects/count",
                "alloc_space/bytes",
            ]
        );
        let pauses = report.gcs.iter().map(|line| line.steps).sum::<u64>();
        let time = report.gcs.iter().map(|line| line.pause_ns).sum::<u64>();
        assert_eq!(profile.total("gc_pauses/count")?, pauses, "number of pauses");
        assert_eq!(profile.total("gc/nanoseconds")?, time, "time of pauses");
        for pid in done.iter().map(|done| done.pid) {
            let lines = report.gcs_of(pid).collect::<Vec<_>>();
            for kind in ["minor", "major"] {
                let of_kind = lines.iter().filter(|line| line.kind == kind).collect::<Vec<_>>();
                let samples = profile.samples.iter().filter(|sample| {
                    sample.label("pid").and_then(|label| label.split(' ').next()) == Some(&pid.to_string())
                        && sample.label("gc kind") == Some(kind)
                });
                let sums = samples.fold((0, 0), |sums, s| (sums.0 + s.values[3], sums.1 + s.values[4]));
                let expected = of_kind.iter().fold((0, 0), |sums, l| (sums.0 + l.steps, sums.1 + l.pause_ns));
                assert_eq!(sums, expected, "pauses and time of {kind} cycles of {pid}");
            }
        }
        // A sample represents a stack or a pause.
        for sample in &profile.samples {
            let pause = ["comm", "pid", "thread id", "thread name", "gc kind", "gc reason", "gc phase"];
            let stack = ["comm", "pid", "thread id", "thread name", "state"];
            for label in if sample.values[0] > 0 { &stack[..] } else { &pause[..] } {
                ensure!(sample.label(label).is_some(), "no label {label} in {sample:?}");
            }
        }
        let top = pprof::go_tool_pprof(&["-top", "-sample_index=gc"], &path)?;
        assert!(top.contains("Type: gc\n") && top.contains("100%"), "{top}");
        Ok(())
    })
}

/// Text output: one line per cycle of the process, with its number, kind and reason; none with --quiet.
#[test]
fn text_lines() -> Result<()> {
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    for quiet in [false, true] {
        let mut args = vec!["--all-ruby"];
        args.extend(quiet.then_some("--quiet"));
        let mut gctrace = Invocation::new(args)?.start()?;
        gctrace.wait_ready()?;
        let done = Script::unwitnessed(&live, &ruby, "explicit.rb")?.run()?;
        let finished = gctrace.interrupt()?;
        ensure!(finished.status.success(), "{}: {}", finished.status, finished.errors());
        if quiet {
            let cycles = finished.stdout.iter().filter(|line| line.starts_with(|c: char| c.is_ascii_digit()));
            ensure!(cycles.count() == 0, "--quiet, but {:?}", finished.stdout);
            let summary = format!("explicit.rb (pid {})", done.pid);
            ensure!(finished.stdout.iter().any(|line| line.starts_with(&summary)), "{:?}", finished.stdout);
            continue;
        }
        let pid = done.pid.to_string();
        let has = |line: &str, word: &str| line.split([' ', ',']).any(|other| other == word);
        let lines = finished.stdout.iter().filter(|line| has(line, &pid)).collect::<Vec<_>>();
        for count in done.report.counts()? {
            let number = format!("#{count}");
            let of_cycle = lines.iter().filter(|line| has(line, &number)).collect::<Vec<_>>();
            ensure!(of_cycle.len() == 1, "{} lines of cycle {count}: {of_cycle:?}", of_cycle.len());
        }
        for one in done.report.extra.get("explicit").and_then(Value::as_array).context("no explicit list")? {
            let number = format!("#{}", one["count"]);
            let shown = lines.iter().find(|line| has(line, &number)).context("no line")?;
            let kind = if one["major_by"].is_null() { "minor" } else { "major" };
            let reasons = [Some(kind), one["gc_by"].as_str(), one["major_by"].as_str()];
            for word in reasons.into_iter().flatten() {
                ensure!(has(shown, word), "no {word} in {shown}");
            }
        }
    }
    Ok(())
}

/// Lines are printed while the program runs, not only at the end.
#[test]
fn lines_come_at_once() -> Result<()> {
    let live = Live::begin()?;
    let mut gctrace = Gctrace::all_ruby(&live)?;
    let mut program = Script::unwitnessed(&live, &Ruby::main()?, "steady.rb")?.start()?;
    program.wait_for("ready")?;
    gctrace.wait_line("process", program.pid())?;
    gctrace.wait_line("gc", program.pid())?;
    program.say("stop")?;
    let pid = program.pid();
    program.finish_any()?;
    gctrace.wait_line("exit", pid)?;
    let finished = gctrace.interrupt()?;
    let report = gctrace_tests::gctrace::read(&finished)?;
    ensure!(report.gcs_of(pid).count() > 0, "no cycles");
    Ok(())
}
