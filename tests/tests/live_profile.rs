//! Where the time goes: stacks compared with the programs' own reports.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use gctrace_tests::ensure_times;
use gctrace_tests::gctrace::{Gctrace, Invocation};
use gctrace_tests::ledger;
use gctrace_tests::live::{Live, rubies_dir};
use gctrace_tests::pprof::{Frame, Profile, Sample};
use gctrace_tests::report::Report;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::{Done, Script};
use rustix::process::Signal;

/// Ticks of the sampling clock per second: many, so that short scripts produce enough samples.
const RATE: &str = "499";
/// Number of standard deviations of counting by which the share of a run's CPU samples may be off by chance.
const DEVIATIONS: f64 = 4.0;

/// A script's run under gctrace: its CPU samples, the lines, and its own report.
struct Profiled {
    samples: Vec<Sample>,
    /// CPU time of each sample, in the order of `samples`.
    cpu: Vec<u64>,
    /// Samples of allocation.
    allocated: Vec<Sample>,
    report: Report,
    done: Done,
}

impl Profiled {
    fn new(path: &Path, report: Report, done: Done) -> Result<Self> {
        let profile = Profile::open(path)?;
        let index = profile.index("cpu/nanoseconds")?;
        let pid = done.pid.to_string();
        let of_script = |sample: &Sample| sample.label("pid") == Some(&pid) && sample.values[index] > 0;
        let allocated = profile.index("alloc_objects/count")?;
        let has_objects =
            |sample: &&Sample| sample.label("pid") == Some(&pid) && sample.values[allocated] > 0;
        let allocated: Vec<Sample> = profile.samples.iter().filter(has_objects).cloned().collect();
        let samples: Vec<Sample> = profile.samples.into_iter().filter(of_script).collect();
        ensure!(!samples.is_empty(), "no CPU samples of process {pid}");
        let cpu = samples.iter().map(|sample| sample.values[index]).collect();
        Ok(Self { samples, cpu, allocated, report, done })
    }

    /// CPU time of the samples that satisfy a condition.
    fn cpu_of(&self, wanted: impl Fn(&Sample) -> bool) -> u64 {
        self.samples.iter().zip(&self.cpu).filter(|(sample, _)| wanted(sample)).map(|(_, cpu)| cpu).sum()
    }
}

fn profile(live: &Live, ruby: &Ruby, name: &str) -> Result<Profiled> {
    profile_of(live, ruby, name, |script| script)
}

fn profile_of(
    live: &Live,
    ruby: &Ruby,
    name: &str,
    prepare: impl FnOnce(Script) -> Script,
) -> Result<Profiled> {
    let path = live.path(&format!("{name}-{}.pb.gz", ruby.label()));
    let args = arguments(&path, &[]);
    let gctrace = Invocation::jsonl(std::iter::once("--all-ruby".as_ref()).chain(args))?.start_ready()?;
    let done = prepare(Script::unwitnessed(live, ruby, name)?).run()?;
    Profiled::new(&path, gctrace.stop()?, done)
}

/// Like [`profile`], if it does not matter how the program is found: gctrace sees only this process, from before the script's work on.
fn profile_alone(live: &Live, ruby: &Ruby, name: &str, args: &[&str], options: &[&str]) -> Result<Profiled> {
    let path = live.path(&format!("{name}-{}.pb.gz", ruby.label()));
    let script = args.iter().fold(Script::unwitnessed(live, ruby, name)?, Script::arg);
    let (mut done, gctrace) = Script::under([script], arguments(&path, options))?;
    Profiled::new(&path, gctrace.done()?.0, done.pop().context("no script")?)
}

/// The common arguments of both.
fn arguments<'a>(path: &'a Path, options: &'a [&str]) -> impl Iterator<Item = &'a OsStr> {
    let common = ["--rate".as_ref(), RATE.as_ref(), "--pprof".as_ref(), path.as_os_str()];
    common.into_iter().chain(options.iter().map(AsRef::as_ref))
}

/// CPU nanoseconds that the script measured, by name.
fn measured(done: &Done, key: &str) -> Result<BTreeMap<String, f64>> {
    let map = done
        .report
        .extra
        .get(key)
        .and_then(|value| value.as_object())
        .with_context(|| format!("no {key}"))?;
    map.iter()
        .map(|(name, value)| {
            Ok((name.clone(), value.as_f64().with_context(|| format!("{name} is {value}"))?))
        })
        .collect()
}

/// Checks that the samples have the measured shares, within the error of counting.
fn same_shares(measured: &BTreeMap<String, f64>, sampled: &BTreeMap<String, u64>) -> Result<()> {
    let period = 1e9 / RATE.parse::<f64>()?;
    let all: f64 = measured.values().sum();
    let count: f64 = sampled.values().map(|&ns| ns as f64 / period).sum();
    ensure_times!(count > 100.0, "only {count} samples");
    for (name, ns) in measured {
        let share = ns / all;
        let seen = sampled.get(name).copied().unwrap_or_default() as f64 / period;
        let expected = count * share;
        let error = DEVIATIONS * (expected * (1.0 - share)).sqrt() + 1.0;
        ensure_times!(
            (seen - expected).abs() <= error,
            "{name} has {seen:.0} of {count:.0} samples, expected are {expected:.0} ± {error:.0}; \
             measured {measured:?}, sampled {sampled:?}"
        );
    }
    Ok(())
}

fn has(sample: &Sample, name: &str) -> bool {
    sample.stack.iter().any(|frame| frame.name == name)
}

/// The shares of methods, C functions and threads in the samples equal their shares of CPU time.
#[test]
fn shares_are_those_of_the_cpu_clock() -> Result<()> {
    let live = Live::begin()?;
    Ruby::first_and_last(|ruby| {
        let run = profile(&live, ruby, "shares.rb")?;
        let by_method = |names: &BTreeMap<String, f64>| {
            names
                .keys()
                .map(|name| (name.clone(), run.cpu_of(|sample| has(sample, &format!("Object#{name}")))))
                .collect::<BTreeMap<_, _>>()
        };
        for key in ["shares", "functions"] {
            let measured = measured(&run.done, key)?;
            same_shares(&measured, &by_method(&measured)).context(key)?;
        }
        let threads = measured(&run.done, "threads")?;
        let sampled = threads
            .keys()
            .map(|name| (name.clone(), run.cpu_of(|sample| sample.label("thread name") == Some(name))))
            .collect();
        same_shares(&threads, &sampled).context("threads")?;
        for (method, function) in [
            ("Object#sorting", "Array#sort"),
            ("Object#matching", "String#match?"),
            ("Object#compressing", "deflate"),
        ] {
            let all = run.cpu_of(|sample| has(sample, method));
            let inside = run.cpu_of(|sample| {
                has(sample, method) && sample.stack.iter().any(|frame| frame.name.ends_with(function))
            });
            ensure_times!(
                inside as f64 >= 0.95 * all as f64,
                "{function} is seen in {inside} of the {all} ns of {method}"
            );
        }
        Ok(())
    })
}

/// Stacks of threads of Ractors and of the M:N scheduler, whose native threads change, reach from the work to the
/// block that they started with. Threads that share one GVL get the shares of the work that they did.
#[test]
fn ractors_and_scheduled_threads() -> Result<()> {
    let live = Live::begin()?;
    Ruby::each(|ruby| {
        let ways: &[(&str, bool)] = match ruby {
            ruby if ruby.is_at_least(3, 3) => &[("ractors", false), ("threads", true)],
            ruby if ruby.is_at_least(3, 0) => &[("ractors", false)],
            _ => &[],
        };
        for &(way, mn) in ways {
            let run = profile_of(&live, ruby, "ractors.rb", |script| {
                let script = script.arg(way);
                if mn { script.env("RUBY_MN_THREADS", "1") } else { script }
            })
            .context(way)?;
            let rounds = measured(&run.done, "rounds")?;
            let mut sampled = BTreeMap::new();
            for (sample, cpu) in run.samples.iter().zip(&run.cpu) {
                let ruby: Vec<&str> = sample
                    .stack
                    .iter()
                    .filter(|frame| !frame.native)
                    .map(|frame| frame.name.as_str())
                    .collect();
                let Some(at) = ruby.iter().position(|name| *name == "Object#round") else { continue };
                let Some((block, below)) = ruby[at + 1..].split_first() else { bail!("{way}: {ruby:?}") };
                // Iterators of Ruby itself, and then the method.
                let iterators = below
                    .iter()
                    .take_while(|name| ["Integer#", "Enumer"].iter().any(|class| name.starts_with(class)));
                let iterators = iterators.count();
                let [method, rest @ ..] = &below[iterators..] else { bail!("{way}: {ruby:?}") };
                let name = method.strip_prefix("Object#").with_context(|| format!("{way}: {ruby:?}"))?;
                ensure!(
                    *block == format!("block in Object#{name}")
                        && iterators > 0
                        && rest.iter().any(|name| name.starts_with("block ") && name.ends_with("<main>")),
                    "{way}: {ruby:?}"
                );
                *sampled.entry(name.to_owned()).or_insert(0) += cpu;
            }
            if mn {
                // One thread at a time, so each round costs the same.
                same_shares(&rounds, &sampled).context(way)?;
            }
            // In parallel, the cost of a round depends on other load of the CPU, but is never twice as high.
            let (sum, seen) = (rounds.values().sum::<f64>(), sampled.values().sum::<u64>() as f64);
            for (name, count) in &rounds {
                let ns = sampled.get(name).copied().unwrap_or_default() as f64;
                let expected = seen * count / sum;
                ensure_times!(
                    ns > expected / 2.0 && ns < expected * 2.0,
                    "{way}: {name} has {ns} ns of {seen}"
                );
            }
            let (named, all): (u64, u64) = (sampled.values().sum(), run.cpu.iter().sum());
            ensure_times!(named as f64 > 0.8 * all as f64, "{way}: {named} of {all} ns are in the work");
        }
        Ok(())
    })
}

/// The method's name without its class, as in the labels of Rubies before 3.4.
fn unqualified(name: &str) -> String {
    let (prefix, method) = name.rsplit_once(" in ").map_or(("", name), |(prefix, method)| (prefix, method));
    let method = if method.starts_with('<') {
        method
    } else {
        method.rfind(['#', '.']).map_or(method, |at| &method[at + 1..])
    };
    if prefix.is_empty() { method.to_owned() } else { format!("{prefix} in {method}") }
}

fn is_ruby(frame: &Frame) -> bool {
    frame.line > 0
}

/// Checks that every stack at a known place equals the one that Ruby's `caller_locations` gave there, and that every place was seen.
fn stacks_are_those_of_caller(ruby: &Ruby, live: &Live) -> Result<()> {
    let run = profile_alone(live, ruby, "callers.rb", &[], &[])?;
    let places =
        run.done.report.extra.get("places").and_then(|value| value.as_array()).context("no places")?;
    let qualified = ruby.is_at_least(3, 4);
    let label = |name: &str| if qualified { name.to_owned() } else { unqualified(name) };
    // A stack according to Ruby, and the name of its place. Ruby gives a C function the place of its caller.
    let mut expected: BTreeMap<Vec<(String, String, u64)>, String> = BTreeMap::new();
    for place in places {
        let name = place[0].as_str().context("a place without a name")?;
        let frames = place[1].as_array().context("a place without frames")?;
        let stack = frames
            .iter()
            .map(|frame| {
                let text = |index: usize| frame[index].as_str().unwrap_or_default().to_owned();
                (text(2), text(0), frame[1].as_u64().unwrap_or_default())
            })
            .collect();
        expected.insert(stack, name.to_owned());
    }
    let mut seen = BTreeSet::new();
    let mut wrong = BTreeMap::new();
    for sample in &run.samples {
        let Some(burn) = sample.stack.iter().position(|frame| frame.name == "Oracle.burn") else { continue };
        let mut stack: Vec<(String, String, u64)> = Vec::new();
        // From the root, so that a C function gets the place of the frame that called it.
        let (mut file, mut row) = (String::new(), 0);
        for frame in sample.stack[burn + 1..].iter().rev().filter(|frame| !frame.native) {
            if is_ruby(frame) {
                (file, row) = (frame.file.clone(), u64::from(frame.line));
            }
            stack.push((label(&frame.name), file.clone(), row));
        }
        stack.reverse();
        match expected.get(&stack) {
            Some(name) => {
                seen.insert(name.clone());
            }
            None => *wrong.entry(stack).or_insert(0) += 1,
        }
    }
    if let Some((stack, count)) = wrong.first_key_value() {
        bail!(
            "{} stacks, one of them {count} times, are not among Ruby's own; seen were {seen:?}; the first: {:#?}",
            wrong.len(),
            &stack[..stack.len().min(12)]
        );
    }
    let missing: Vec<&String> = expected.values().filter(|name| !seen.contains(*name)).collect();
    // Each place spins for a time of its own CPU clock, by which samples are taken, too.
    ensure_times!(missing.is_empty(), "never seen: {missing:?}");
    Ok(())
}

/// Stacks of every kind of code equal Ruby's own.
#[test]
fn stacks_equal_callers() -> Result<()> {
    let live = Live::beside_others()?;
    Ruby::each(|ruby| stacks_are_those_of_caller(ruby, &live))
}

/// Runs a check with each Ruby that has YJIT, of which there must be one.
fn each_with_yjit(mut check: impl FnMut(&Ruby) -> Result<()>) -> Result<()> {
    let mut tried = 0;
    Ruby::each(|ruby| {
        let yjit = ruby.clone().with_option("--yjit");
        if !yjit.command()?.args(["-e", "exit RubyVM::YJIT.enabled?"]).output()?.status.success() {
            return Ok(());
        }
        tried += 1;
        check(&yjit)
    })?;
    ensure!(tried > 0, "none of the Rubies has YJIT");
    Ok(())
}

/// The same with JIT-compiled code.
#[test]
fn stacks_equal_callers_with_yjit() -> Result<()> {
    let live = Live::beside_others()?;
    each_with_yjit(|yjit| stacks_are_those_of_caller(yjit, &live))
}

/// A compiled method that runs has its name, and no line: the place that Ruby's memory has for it is that of an earlier call.
#[test]
fn compiled_methods_have_no_line() -> Result<()> {
    let live = Live::beside_others()?;
    each_with_yjit(|yjit| {
        let file = live.path("lines.txt");
        let mut args = vec!["--quiet".into(), "--top-lines".into(), file.clone().into(), "--".into()];
        args.extend(yjit.argv()?);
        args.push(rubies_dir().join("compiled_leaf.rb").into());
        let finished = Invocation::new(args)?.run()?;
        ensure!(finished.status.success(), "{}", finished.errors());
        let table = std::fs::read_to_string(&file)?;
        let own_percent =
            |row: &str| row.trim_start().split('%').next().and_then(|own| own.parse::<f64>().ok());
        let rows: Vec<(f64, &str)> = table
            .lines()
            .filter(|row| row.ends_with("  Object#leaf"))
            .filter_map(|row| Some((own_percent(row)?, row)))
            .collect();
        let (without, with): (Vec<_>, Vec<_>) =
            rows.iter().partition(|(_, row)| row.contains("compiled_leaf.rb  Object#leaf"));
        let sum = |rows: &[&(f64, &str)]| rows.iter().map(|(own, _)| own).sum::<f64>();
        // It is interpreted until it is compiled, and Ruby itself starts first.
        ensure_times!(sum(&without) > 60.0 && sum(&with) < 5.0, "{table}");
        Ok(())
    })
}

/// The stack of a collection points to the line that allocates.
#[test]
fn triggers_are_the_allocating_lines() -> Result<()> {
    let live = Live::beside_others()?;
    Ruby::each(|ruby| {
        let run = profile_alone(&live, ruby, "triggers.rb", &[], &["--alloc"])?;
        let parts =
            run.done.report.extra.get("parts").and_then(|value| value.as_array()).context("no parts")?;
        for part in parts {
            let method = part[0].as_str().context("no method")?;
            let number = |index: usize| part[index].as_u64().with_context(|| format!("{part}"));
            let (row, first, last) = (number(1)?, number(2)?, number(3)?);
            ensure!(last >= first, "{method} triggered nothing");
            for gc in run.report.gcs_of(run.done.pid).filter(|gc| (first..=last).contains(&gc.count)) {
                let stack = gc
                    .stack
                    .as_ref()
                    .with_context(|| format!("{method}: cycle {} has no stack", gc.count))?;
                let top = stack.iter().find(|frame| frame.contains(".rb:"));
                let fits = top
                    .is_some_and(|top| top.ends_with(&format!("/triggers.rb:{row}")) && top.contains(method));
                ensure!(fits, "cycle {}: expected {method} line {row}, the stack is {stack:?}", gc.count);
            }
        }
        // Samples of allocation have the same lines.
        let mut seen = BTreeMap::new();
        for sample in &run.allocated {
            let Some(top) = sample.stack.iter().find(|frame| frame.file.ends_with("/triggers.rb")) else {
                continue;
            };
            for part in parts {
                let (method, row) = (part[0].as_str().unwrap_or_default(), part[1].as_u64());
                if top.name.ends_with(method) {
                    ensure!(
                        Some(u64::from(top.line)) == row,
                        "{method} allocates at {row:?}: {:?}",
                        sample.stack
                    );
                    *seen.entry(method).or_insert(0) += 1;
                }
            }
        }
        let expected = if counts_allocation() { parts.len() - 1 } else { 0 };
        ensure!(seen.len() == expected, "all but `explicit` allocate: {seen:?}");
        Ok(())
    })
}

/// Whether allocation is counted on this kernel: from Linux 5.15 on, which has attach cookies.
fn counts_allocation() -> bool {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next()) else { return true };
    (major, minor) >= (5, 15)
}

/// All cycles that start while gctrace has no CPU get their stacks afterwards.
#[test]
fn triggers_wait_for_their_cycles() -> Result<()> {
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    let gctrace = Gctrace::all_ruby(&live)?;
    // The first run makes gctrace attach the probes of the image.
    Script::unwitnessed(&live, &ruby, "explicit.rb")?.run()?;
    gctrace.signal(Signal::STOP)?;
    let ended = Script::unwitnessed(&live, &ruby, "explicit.rb")?.arg("400").run();
    gctrace.signal(Signal::CONT)?;
    let done = ended?;
    let report = gctrace.stop()?;
    ledger::check_lossless(&report)?;
    let without = report.gcs_of(done.pid).filter(|gc| gc.stack.is_none()).count();
    let all = report.gcs_of(done.pid).count();
    ensure!(all >= 400 && without == 0, "{without} of {all} cycles have no stack");
    ensure!(ledger::user(&report, "triggers_unclaimed")? == 0, "stacks were dropped");
    Ok(())
}

/// Code that is created and freed while the heap is collected and compacted is never named wrongly.
#[test]
fn churning_code_is_never_misnamed() -> Result<()> {
    let live = Live::beside_others()?;
    Ruby::each(|ruby| {
        let run = profile_alone(&live, ruby, "churn.rb", &["4"], &[])?;
        let mut right = 0;
        for frame in run.samples.iter().flat_map(|sample| &sample.stack) {
            let method = frame.name.rsplit(['#', ' ']).next().unwrap_or_default();
            let Some(number) = method.strip_prefix('m').and_then(|digits| digits.parse::<u32>().ok()) else {
                continue;
            };
            let class = frame.name.rsplit(' ').next().unwrap_or_default().strip_suffix(&format!("#{method}"));
            ensure!(class.is_none_or(|class| class == format!("Churn{number}")), "{frame:?}");
            ensure!(frame.file == format!("churn{number}.rb"), "{frame:?}");
            // 2.7 places a `nop` without a line after the call of `-@` (`ruby --dump=insns` shows it), and a tick may hit it.
            let no_line = frame.line == 0 && !ruby.is_at_least(3, 0);
            ensure!(no_line || (number..number + 9).contains(&frame.line), "{frame:?}");
            right += 1;
        }
        ensure_times!(right > 100, "only {right} frames of churning code were named");
        Ok(())
    })
}

/// Nearly every frame of a script that lives for half a second has a name.
#[test]
fn short_scripts_are_named() -> Result<()> {
    let live = Live::begin()?;
    Ruby::each(|ruby| {
        let run = profile(&live, ruby, "short.rb")?;
        let frames = run.samples.iter().flat_map(|sample| &sample.stack);
        let (all, missing) = frames.fold((0_u32, 0_u32), |(all, missing), frame| {
            (all + 1, missing + u32::from(frame.name.starts_with("(unnamed")))
        });
        ensure_times!(all > 100, "only {all} frames");
        // Frames are named while the script lives; a frame that cannot be named is unnamed in each run.
        ensure_times!(f64::from(missing) <= 0.01 * f64::from(all), "{missing} of {all} frames have no name");
        Ok(())
    })
}

/// Samples in the collector have a frame with the kind of the cycle, which is the kind that the method requested. While the collector neither
/// marks nor sweeps, there is no such frame.
#[test]
fn kinds_of_collections() -> Result<()> {
    let live = Live::beside_others()?;
    Ruby::each(|ruby| {
        let run = profile_alone(&live, ruby, "gc_kinds.rb", &[], &[])?;
        let kinds = |method: &str| {
            let mut kinds = BTreeMap::new();
            for (sample, ns) in run.samples.iter().zip(&run.cpu) {
                let at = |wanted: &str| sample.stack.iter().position(|frame| frame.name == wanted);
                let (Some(gc), Some(_)) = (at("(garbage collection)"), at(method)) else { continue };
                let names: Vec<&str> = sample.stack[..gc].iter().map(|frame| frame.name.as_str()).collect();
                let kind = names.iter().find(|name| name.ends_with(" GC)")).copied();
                let phase = names.iter().find(|name| ["(marking)", "(sweeping)"].contains(name));
                ensure!(kind.is_some() == phase.is_some(), "{names:?}");
                ensure!(kind.is_none() || kind == names.last().copied(), "{names:?}");
                *kinds.entry(kind.unwrap_or("none").to_owned()).or_insert(0) += ns;
            }
            Ok(kinds)
        };
        if !ruby.has_tables() {
            return Ok(());
        }
        let (minor, major) = (kinds("Object#minor_ones")?, kinds("Object#major_ones")?);
        // The program's own counts: it had no cycles of the other kind.
        for (key, other) in [("by_minor", 1), ("by_major", 0)] {
            let counts = run.done.report.extra.get(key).with_context(|| key.to_owned())?;
            ensure!(counts[other] == 0 && counts[1 - other].as_u64() > Some(0), "{key}: {counts}");
        }
        ensure!(
            !minor.contains_key("(major GC)") && !major.contains_key("(minor GC)"),
            "{minor:?} {major:?}"
        );
        ensure_times!(minor.contains_key("(minor GC)"), "{minor:?}");
        ensure_times!(major.contains_key("(major GC)"), "{major:?}");
        Ok(())
    })
}
