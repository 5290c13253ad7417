//! gctrace's summary of a process at its end, compared with the lines of the same run and with the program itself.

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::child::Guarded;
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::live::Live;
use gctrace_tests::puma::Puma;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::{PATIENCE, ensure_times};
use serde_json::Value;

/// Collects in several ways, prints its `GC.stat`, and ends.
const WORK: &str = "
def work; Array.new(20_000) { |i| 'x' + i.to_s }; end
60.times { |i| work; GC.start if i % 10 == 0; GC.start(full_mark: false) if i % 15 == 1 }
s = GC.stat
puts [s[:count], s[:minor_gc_count], s[:major_gc_count]].join(' ')
";

/// The value at this rank of the sorted list, counted as by the nearest-rank method.
fn quantile(sorted: &[u64], quantile: f64) -> u64 {
    let rank = (sorted.len() as f64 * quantile).ceil() as usize;
    sorted[rank.max(1) - 1]
}

fn number(value: &Value, name: &str) -> Result<u64> {
    value[name].as_u64().with_context(|| format!("no number {name} in {value}"))
}

/// Checks that a value is at most one percent too high, and not too low.
fn close(said: u64, exact: u64, what: &str) -> Result<()> {
    ensure!(said >= exact && said as f64 <= exact as f64 * 1.01, "{what}: {said}, but exactly {exact}");
    Ok(())
}

/// Every number of the `summary` line follows from the `gc` lines of the same run, and counts equal the program's own.
#[test]
fn summary_of_json_lines() -> Result<()> {
    let _live = Live::begin()?;
    Ruby::each(|ruby| {
        let program = ruby.argv()?;
        let args = ["--".into()].into_iter().chain(program).chain(["-e".into(), WORK.into()]);
        let finished = Invocation::jsonl(args)?.run()?;
        let lines: Vec<Value> =
            finished.stdout.iter().filter_map(|line| serde_json::from_str(line).ok()).collect();
        let summaries: Vec<&Value> = lines.iter().filter(|line| line["type"] == "summary").collect();
        ensure!(summaries.len() == 1, "{} summaries", summaries.len());
        let summary = summaries[0];
        let own = finished.stdout.iter().chain(&finished.stderr).find_map(|line| {
            let numbers: Vec<u64> = line.split(' ').map(str::parse).collect::<Result<_, _>>().ok()?;
            <[u64; 3]>::try_from(numbers).ok()
        });
        let [count, minor, major] = own.context("the program printed no counts")?;
        let cycles: Vec<&Value> = lines.iter().filter(|line| line["type"] == "gc").collect();
        // The VM may collect again at its end.
        ensure!(number(summary, "cycles")? == cycles.len() as u64, "{summary}");
        let first = number(cycles[0], "count")?;
        // In a separate root COMMAND is not the Ruby itself: that is found when it runs, and a busy machine can be late. What is missed
        // then is counted.
        ensure!(first == 1 || ruby.root().is_some(), "the first cycle seen is {first}");
        let exit = lines.iter().find(|line| line["type"] == "exit").context("no exit line")?;
        ensure!(exit["cycles_missed"].as_u64() == Some(first - 1), "the first cycle seen is {first}: {exit}");
        ensure_times!(first == 1, "the first cycle seen is {first}");
        let of_script = cycles.iter().filter(|cycle| cycle["count"].as_u64() <= Some(count));
        let kinds = of_script.fold([0_u64; 2], |[minors, majors], cycle| {
            if cycle["kind"] == "major" { [minors, majors + 1] } else { [minors + 1, majors] }
        });
        ensure!(kinds == [minor, major], "{kinds:?}, but the program counted {minor} and {major}");
        // Memory is that at the first event, however early the process was found.
        ensure!(number(summary, "rss_first")? == number(cycles[0], "rss")?, "{}: {summary}", cycles[0]);
        let mut totals = Vec::new();
        let mut stops = Vec::new();
        for cycle in &cycles {
            let pauses = cycle["pauses"].as_array().context("no pauses")?;
            let pauses: Vec<u64> = pauses.iter().map(|pause| number(pause, "ns")).collect::<Result<_>>()?;
            let longest = pauses.iter().copied().max().unwrap_or_default();
            ensure!(number(cycle, "max_pause_ns")? == longest, "{cycle}");
            totals.push(number(cycle, "pause_ns")?);
            stops.extend(pauses);
        }
        let sum: u64 = totals.iter().sum();
        ensure!(number(summary, "pause_ns")? == sum, "{sum} ns: {summary}");
        let worst = totals.iter().copied().max().unwrap_or_default();
        ensure!(number(&summary["worst"], "pause_ns")? == worst, "{worst} ns: {summary}");
        for (name, mut values) in [("pauses", stops), ("cycle_pauses", totals)] {
            values.sort_unstable();
            let said = &summary[name];
            ensure!(number(said, "count")? == values.len() as u64, "{name}: {said}");
            ensure!(Some(&number(said, "max_ns")?) == values.last(), "{name}: {said}");
            close(number(said, "p50_ns")?, quantile(&values, 0.5), &format!("median of {name}"))?;
            close(number(said, "p99_ns")?, quantile(&values, 0.99), &format!("p99 of {name}"))?;
        }
        let by_cause: u64 = summary["causes"]
            .as_array()
            .context("no causes")?
            .iter()
            .map(|cause| number(cause, "cycles"))
            .sum::<Result<_>>()?;
        ensure!(by_cause == cycles.len() as u64, "{summary}");
        let traced = number(summary, "traced_ns")?;
        let share = summary["gc_share"].as_f64().context("no share")?;
        let outside = number(summary, "outside_pause_ns")?;
        ensure!((share - (sum + outside) as f64 / traced as f64).abs() < 1e-9 && share < 1.0, "{summary}");
        // It was traced at least from its first cycle until its end.
        let span = cycles.last().and_then(|cycle| cycle["ts"].as_f64()).unwrap_or_default()
            - cycles[0]["ts"].as_f64().unwrap_or_default();
        ensure!(traced as f64 / 1e9 >= span, "traced for {traced} ns, and cycles over {span} s");
        Ok(())
    })
}

/// The text has a summary even with `--quiet` and without lines, and its counts equal the program's own.
#[test]
fn summary_of_text() -> Result<()> {
    let _live = Live::beside_others()?;
    let mut args: Vec<_> = vec!["--quiet".into(), "--".into()];
    args.extend(Ruby::main()?.argv()?);
    args.extend(["-e".into(), WORK.into()]);
    let finished = Invocation::new(args)?.run()?;
    let text = finished.stdout.join("\n");
    ensure!(finished.status.success(), "{}:\n{}", finished.status, finished.errors());
    ensure!(!text.contains("TIME "), "lines despite --quiet:\n{text}");
    let own = finished.stdout.iter().chain(&finished.stderr).find_map(|line| {
        let numbers: Vec<u64> = line.split(' ').map(str::parse).collect::<Result<_, _>>().ok()?;
        <[u64; 3]>::try_from(numbers).ok()
    });
    let [_, minor, major] = own.context("the program printed no counts")?;
    let of = |kind: &str| -> Result<u64> {
        let row = finished.stdout.iter().find(|line| line.trim_start().starts_with(kind));
        let count = row.and_then(|row| row.split_whitespace().nth(1)?.strip_suffix(':')?.parse().ok());
        count.with_context(|| format!("no row of {kind} in\n{text}"))
    };
    ensure!(of("minor")? == minor, "{minor} minor cycles:\n{text}");
    // The VM may collect again at its end.
    ensure!((major..=major + 1).contains(&of("major")?), "{major} major cycles:\n{text}");
    for word in ["% of the time", "longest", "p99", "RSS", "by "] {
        ensure!(text.contains(word), "no {word:?} in\n{text}");
    }
    ensure!(finished.errors().contains("cycles, nothing lost"), "{}", finished.errors());
    Ok(())
}

/// `--min-pause` hides cycles and reports their number; `--interval` prints lines of processes instead of cycles.
#[test]
fn fewer_lines() -> Result<()> {
    let _live = Live::beside_others()?;
    let ruby = Ruby::main()?;
    let mut program = ruby.argv()?;
    program.extend(["-e".into(), WORK.into()]);
    let run = |flags: &[&str]| -> Result<Vec<String>> {
        let mut args: Vec<std::ffi::OsString> = flags.iter().map(Into::into).collect();
        args.push("--".into());
        args.extend(program.iter().cloned());
        Ok(Invocation::new(args)?.run()?.stdout)
    };
    let is_cycle = |line: &&String| line.split_whitespace().any(|word| matches!(word, "minor" | "major"));
    let hidden = run(&["--min-pause", "1h"])?;
    ensure!(hidden.iter().all(|line| !line.contains(" #") || line.contains("worst")), "{hidden:?}");
    ensure!(
        hidden.iter().any(|line| line.contains("without a stop of") && !line.starts_with('0')),
        "{hidden:?}"
    );
    let all = run(&["--min-pause", "1ms"])?;
    ensure!(all.iter().filter(is_cycle).count() > 2, "{all:?}");
    let intervals = run(&["--interval", "100ms"])?;
    ensure!(intervals[0].contains("CYCLES") && intervals.len() > 3, "{intervals:?}");
    ensure!(
        !intervals
            .iter()
            .any(|line| line.contains(" newobj ") && line.contains('#') && !line.contains("worst")),
        "{intervals:?}"
    );
    Ok(())
}

/// For a server whose requests were not watched, the summary says what would show them; not for a server whose requests were watched, nor
/// for another program. A report says the same as the live run.
#[test]
fn server_without_requests() -> Result<()> {
    const HINT: &str = "not watched: requests and jobs of puma; --requests shows them (docs/requests.md)";
    let live = Live::beside_others()?;
    let puma = Puma::start(&live, "requests.ru", "0")?;
    let file = live.path("puma.gctrace");
    let pid = puma.process.pid().to_string();
    let file = file.to_str().context("a path")?;
    let text = |args: &[&str]| -> Result<String> {
        let finished = Invocation::new(args)?.run()?;
        ensure!(finished.status.success(), "{args:?}: {}", finished.errors());
        Ok(finished.stdout.join("\n"))
    };
    let (watch, record) = (["--pid", &pid, "--duration", "1s"], ["record", "-o", file]);
    for (more, hints) in [(&[][..], true), (&["--requests"], false)] {
        let live = text(&[&watch[..], more].concat())?;
        ensure!(live.contains(HINT) == hints, "{more:?}:\n{live}");
        text(&[&record[..], &watch, more].concat())?;
        let report = text(&["report", "--lines", file])?;
        ensure!(report.contains(HINT) == hints, "the report of {more:?}:\n{report}");
    }
    let mut other = vec!["--".into()];
    other.extend(Ruby::main()?.argv()?);
    other.extend(["-e".into(), WORK.into(), "puma".into()]);
    let other = Invocation::new(other)?.run()?.stdout.join("\n");
    ensure!(other.contains("cycles") && !other.contains("not watched"), "{other}");
    Ok(())
}

/// Forks during a sweep, which each child continues without a cycle of its own, as in the workers of a server that preloads. Each child prints
/// by its own clocks when it started and for how long it collected. Then it forks many short-lived children.
const FORKS: &str = r#"
$stdout.sync = true
real = -> { Process.clock_gettime(Process::CLOCK_REALTIME, :nanosecond) }
# Wall time minus CPU time.
apart = -> { [Process::CLOCK_MONOTONIC, Process::CLOCK_PROCESS_CPUTIME_ID].map { |clock| Process.clock_gettime(clock, :nanosecond) }.reduce(:-) }
3.times do
  garbage = Array.new(600_000) { |i| "k#{i}" * 2 }
  kept = garbage[0, 100_000]
  garbage = nil
  GC.start(full_mark: true, immediate_sweep: false)
  before = real.call
  pid = fork do
    begun = real.call
    gc, without = GC.total_time, 0
    10.times { from = apart.call; 20_000.times { |i| "q" * 2 }; without += apart.call - from; sleep 0.005 }
    puts "child #{$$} #{before} #{begun} #{real.call} #{GC.total_time - gc} #{without}"
    exit!
  end
  Process.wait(pid)
end
50.times { 2.times.map { fork { GC.start; exit! } }.each { |pid| Process.wait(pid) } }
"#;

/// What a forked child collects before its first cycle counts towards its figures, which cover its life since the fork, accurate to a millisecond.
#[test]
fn forked_children() -> Result<()> {
    // `GC.total_time` is CPU time, which is less than the time of the pauses by the time for which the thread had no CPU.
    let _live = Live::begin()?;
    Ruby::each(|ruby| {
        if !ruby.is_at_least(3, 1) {
            // GC.total_time is new in 3.1.
            return Ok(());
        }
        let mut args: Vec<std::ffi::OsString> =
            ["--quiet", "--gvl", "--format", "jsonl", "--"].map(Into::into).into();
        args.extend(ruby.argv()?);
        args.extend(["-e".into(), FORKS.into()]);
        let finished = Invocation::new(args)?.run()?;
        ensure!(finished.status.success(), "{}:\n{}", finished.status, finished.errors());
        let lines: Vec<Value> =
            finished.stdout.iter().filter_map(|line| serde_json::from_str(line).ok()).collect();
        let summaries: Vec<&Value> = lines.iter().filter(|line| line["type"] == "summary").collect();
        let said =
            finished.stdout.iter().chain(&finished.stderr).filter_map(|line| line.strip_prefix("child "));
        let mut children = 0;
        for line in said {
            let words = line.split(' ').map(str::parse).collect::<Result<Vec<u64>, _>>()?;
            let [pid, before, begun, ended, gc_ns, waited_ns] = words[..] else { anyhow::bail!("{line}") };
            let summary = summaries.iter().find(|summary| summary["pid"] == pid).context("no summary")?;
            let ns = number(summary, "pause_ns")? + number(summary, "outside_pause_ns")?;
            ensure!(gc_ns > 1_000_000, "it collected nothing: {line}");
            // Ruby reads its clocks inside the pause, or (3.1) just outside, with a probe's hit of about a microsecond in between.
            ensure!(ns >= gc_ns - gc_ns / 20, "{ns} ns of {gc_ns}: {summary}");
            ensure_times!(
                ns < gc_ns + gc_ns / 4 + waited_ns + 2_000_000,
                "{ns} ns of {gc_ns}, {waited_ns} ns without a CPU: {summary}"
            );
            let since = summary["since_ts"].as_f64().context("no begin")?;
            let seconds = |ns: u64| ns as f64 / 1e9;
            let slack = 0.000_5;
            ensure!(
                (seconds(before) - slack..seconds(begun) + slack).contains(&since),
                "{since}, {line}: {summary}"
            );
            let traced = number(summary, "traced_ns")?;
            ensure!(traced >= ended - begun, "traced for {traced} ns: {line}");
            children += 1;
        }
        ensure!(children == 3, "{children} children: {}", finished.errors());
        let shares: Vec<f64> = summaries.iter().filter_map(|summary| summary["gc_share"].as_f64()).collect();
        ensure!(shares.len() > 50 && shares.iter().all(|share| *share <= 1.0), "{shares:?}");
        Ok(())
    })
}

/// A program that a shell has become by an exec is traced since that exec, not since the start of the shell.
#[test]
fn programs_of_a_shell() -> Result<()> {
    let live = Live::beside_others()?;
    Ruby::first_and_last(|ruby| {
        let name = format!("since_exec_{}", std::process::id());
        let script = live.path(&format!("{name}.rb"));
        std::fs::write(
            &script,
            "puts Process.clock_gettime(Process::CLOCK_REALTIME)\n$stdout.flush\n$stdin.gets\n5.times { GC.start }\n",
        )?;
        let mut gctrace = Invocation::new(["--format", "jsonl", "--name", &name])?.start_ready()?;
        let started = epoch();
        let command = ["sh", "-c", "sleep 1.5; exec \"$@\"", "sh"].map(std::ffi::OsString::from);
        let words = [command.to_vec(), ruby.argv()?, vec![script.clone().into()]].concat();
        let mut program = Guarded::start("sh", std::process::Command::new(&words[0]).args(&words[1..]))?;
        let ran: f64 = program.wait_stdout(PATIENCE, "its time", |_| true)?.trim().parse()?;
        // It collects once its Ruby is probed.
        gctrace.wait_line("process", program.pid())?;
        program.say("collect")?;
        let output = program.finish(PATIENCE)?;
        ensure!(output.status.success(), "{}", output.errors());
        let finished = gctrace.interrupt()?;
        let mut lines = finished.stdout.iter().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let summary = lines.rfind(|line| line["type"] == "summary").context("no summary")?;
        let since = summary["since_ts"].as_f64().context("no begin")?;
        ensure!(since > started + 1.5 && since < ran, "{started}, {since}, {ran}: {summary}");
        Ok(())
    })
}

/// Seconds since the epoch.
fn epoch() -> f64 {
    std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(0.0, |time| time.as_secs_f64())
}
