//! The screen that `gctrace report` prints for a recording, compared with the JSON lines of the same recording.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::child::Finished;
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::live::gctrace_binary;
use serde_json::Value;

/// If this variable is set, the test writes the screens instead of comparing them.
const WRITE: &str = "GCTRACE_WRITE_DOCS";

fn recordings() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/recordings")
}

/// Runs `gctrace report` in the directory of the recordings.
fn run(words: &[&str]) -> Result<Finished> {
    let invocation = Invocation::new([&["report"], words].concat())?;
    let in_place = |command: &mut Command| {
        command.current_dir(recordings());
    };
    invocation.with(in_place).run()
}

/// Its standard output.
fn report(words: &[&str]) -> Result<Vec<String>> {
    let finished = run(words)?;
    ensure!(finished.status.success(), "{words:?}: {}", finished.errors());
    Ok(finished.stdout)
}

/// A printed time in nanoseconds, and the value of one unit of its last digit.
fn nanos(text: &str) -> Result<(f64, f64)> {
    let (number, unit) = [("µs", 1e3), ("ms", 1e6), ("s", 1e9)]
        .into_iter()
        .find_map(|(name, unit)| Some((text.strip_suffix(name)?, unit)))
        .with_context(|| format!("no time: {text}"))?;
    let digits = number.split_once('.').map_or(0, |(_, digits)| digits.len());
    Ok((number.parse::<f64>()? * unit, unit / 10_f64.powi(digits as i32)))
}

#[test]
fn one_screen() -> Result<()> {
    let mut differ = Vec::new();
    for series in ["2.7", "3.1", "3.3", "3.4", "puma"] {
        let name = format!("{series}.gctrace");
        let screen = report(&[&name])?;
        ensure!(screen.len() <= 36, "{series}: {} rows", screen.len());
        ensure!(screen.iter().all(|row| row.chars().count() <= 100 || row.starts_with("  ")), "{screen:#?}");
        let lines = report(&[&name, "--format=jsonl"])?;
        let lines: Vec<Value> =
            lines.iter().map(|line| Ok(serde_json::from_str(line)?)).collect::<Result<_>>()?;
        let of = |kind: &str| -> Vec<&Value> { lines.iter().filter(|line| line["type"] == kind).collect() };
        // The only process: its cycles, and its longest stop, which is also the first of the longest pauses.
        let cycles = of("gc");
        let longest = cycles.iter().filter_map(|gc| gc["max_pause_ns"].as_f64()).fold(0.0, f64::max);
        let head =
            screen.iter().position(|row| row.trim_start().starts_with("GC TIME")).context("no table")?;
        let row: Vec<&str> = screen[head + 1].split_whitespace().collect();
        ensure!(row[2] == cycles.len().to_string(), "{series}: {} cycles: {row:?}", cycles.len());
        let pauses = screen.iter().position(|row| row.starts_with("PAUSES")).context("no pauses")?;
        for text in [row[3], screen[pauses + 1].split_whitespace().next().context("no pause")?] {
            let (shown, digit) = nanos(text)?;
            ensure!((shown - longest).abs() <= digit / 2.0 + 1.0, "{series}: {text} for {longest}");
        }
        let pid = cycles[0]["pid"].to_string();
        ensure!(screen[head + 1].contains(&format!("(pid {pid}")), "{screen:#?}");
        let expected = recordings().join(format!("{series}.screen.txt"));
        let screen = screen.join("\n") + "\n";
        if std::env::var_os(WRITE).is_some() {
            fs::write(&expected, screen)?;
        } else if fs::read_to_string(&expected)? != screen {
            differ.push(screen);
        }
    }
    ensure!(
        differ.is_empty(),
        "other screens; if that is meant, write them with {WRITE}=1:\n{}",
        differ.join("\n")
    );
    Ok(())
}

/// The output of `gctrace info` and `gctrace diff` for committed recordings has not changed.
#[test]
fn documents() -> Result<()> {
    let mut differ = Vec::new();
    for (words, name) in [
        (&["info", "2.7.gctrace"][..], "2.7.info.txt"),
        (&["info", "puma.gctrace"], "puma.info.txt"),
        (&["info", "puma.gctrace", "--format=json"], "puma.info.json"),
        (&["diff", "2.7.gctrace", "puma.gctrace"], "2.7-puma.diff.txt"),
        (&["diff", "2.7.gctrace", "puma.gctrace", "--format=json"], "2.7-puma.diff.json"),
    ] {
        let in_place = |command: &mut Command| {
            command.current_dir(recordings());
        };
        let finished = Invocation::new(words)?.with(in_place).run()?;
        // Each recording has things that the other lacks, and of such short runs only shares can be compared.
        let expected = if words[0] == "info" { &[0][..] } else { &[0, 2] };
        ensure!(finished.status.code().is_some_and(|code| expected.contains(&code)), "{}", finished.errors());
        let found = finished.stdout.join("\n") + "\n";
        let path = recordings().join(name);
        if std::env::var_os(WRITE).is_some() {
            fs::write(&path, found)?;
        } else {
            let expected = fs::read_to_string(&path)?;
            let line = expected.lines().zip(found.lines()).find(|(before, now)| before != now);
            if found != expected {
                differ.push(format!("{name}: the first line that differs: {line:#?}\n{found}"));
            }
        }
    }
    ensure!(differ.is_empty(), "other documents; if that is meant, {WRITE}=1:\n{}", differ.join("\n"));
    Ok(())
}

/// A second report is identical. Flags of a run produce the outputs of a run instead of the screen. A part without a process is an error.
#[test]
fn other_outputs() -> Result<()> {
    let screen = report(&["3.4.gctrace"])?;
    ensure!(screen == report(&["3.4.gctrace"])?, "{screen:?}");
    for flags in [&["-q"][..], &["--lines"], &["--min-pause=1ms"], &["--format=jsonl"]] {
        let printed = report(&[&["3.4.gctrace"], flags].concat())?;
        ensure!(!printed.iter().any(|row| row.starts_with("PAUSES")), "{flags:?}: {printed:?}");
    }
    let none = run(&["3.4.gctrace", "--pid=1"])?;
    ensure!(
        none.status.code() == Some(1)
            && none.errors().contains("contains no process; the recording has")
            && none.stdout.is_empty(),
        "{}",
        none.errors()
    );
    Ok(())
}

/// The `summary` of a process has its requests by endpoint, with and without their lines: the figures are those of the lines.
#[test]
fn endpoints_of_summaries() -> Result<()> {
    let lines = |flags: &[&str]| -> Result<Vec<Value>> {
        let all = report(&[&["puma.gctrace", "--format=jsonl"], flags].concat())?;
        all.iter().map(|line| Ok(serde_json::from_str(line)?)).collect()
    };
    let of_type = |lines: &[Value], kind: &str| -> Vec<Value> {
        lines.iter().filter(|line| line["type"] == kind).cloned().collect()
    };
    let all = lines(&[])?;
    let summaries = of_type(&all, "summary");
    let quiet = lines(&["--quiet"])?;
    ensure!(of_type(&quiet, "request").is_empty() && of_type(&quiet, "summary") == summaries);
    let requests = of_type(&all, "request");
    let mut found = 0;
    for summary in &summaries {
        ensure!(summary["endpoints_more"] == 0, "{summary}");
        for endpoint in summary["endpoints"].as_array().context("no endpoints")? {
            let own: Vec<&Value> = requests
                .iter()
                .filter(|line| line["pid"] == summary["pid"] && line["endpoint"] == endpoint["endpoint"])
                .collect();
            let values = |name: &str| -> Vec<u64> {
                let mut all: Vec<u64> = own.iter().filter_map(|line| line[name].as_u64()).collect();
                all.sort_unstable();
                all
            };
            let durations = values("duration_ns");
            found += own.len();
            ensure!(!own.is_empty() && endpoint["count"] == own.len(), "{endpoint}");
            let failed = values("status").iter().filter(|status| **status >= 500).count();
            ensure!(endpoint["failed"] == failed, "{endpoint}");
            ensure!(endpoint["duration_ns"] == durations.iter().sum::<u64>(), "{endpoint}: {durations:?}");
            ensure!(endpoint["max_ns"].as_u64() == durations.last().copied(), "{endpoint}: {durations:?}");
            let median = durations[(durations.len() - 1) / 2] as f64;
            let p50 = endpoint["p50_ns"].as_f64().context("no median")?;
            ensure!((median..=median * 1.01 + 1.0).contains(&p50), "{endpoint}: {durations:?}");
            for (part, name) in [
                ("gc_own", "gc_own_ns"),
                ("gvl_wait", "gvl_wait_ns"),
                ("cpu", "cpu_ns"),
                ("blocked", "blocked_ns"),
            ] {
                let known: Vec<&&Value> = own.iter().filter(|line| line[name].is_u64()).collect();
                let sum = |name: &str| known.iter().filter_map(|line| line[name].as_u64()).sum::<u64>();
                let expected = match known.len() {
                    0 => Value::Null,
                    _ => serde_json::json!({ "ns": sum(name), "of_ns": sum("duration_ns") }),
                };
                ensure!(endpoint[part] == expected, "{part}: {endpoint}");
            }
            let bytes = values("alloc_bytes");
            ensure!(endpoint["alloc_of"] == bytes.len(), "{endpoint}");
            ensure!(bytes.is_empty() || endpoint["alloc_bytes"] == bytes.iter().sum::<u64>(), "{endpoint}");
        }
    }
    ensure!(found == requests.len() && found > 10, "{found} of {} requests", requests.len());
    Ok(())
}

/// `--min-pause` keeps the cycles with at least such a pause, in text lines and in JSON lines, and reports the number of the other cycles.
/// `--slower-than` lists the requests that took at least so long, and reports their number and that of all requests. It changes text only: JSON
/// lines have each request, and a note says so.
#[test]
fn thresholds() -> Result<()> {
    let values = |name: &str, kind: &str, member: &str| -> Result<Vec<u64>> {
        let lines = lines_of(&report(&[name, "--format=jsonl", "--brief"])?, &[kind]);
        let value = |line: &String| -> Result<Option<u64>> {
            Ok(serde_json::from_str::<Value>(line)?[member].as_u64())
        };
        let mut found: Vec<u64> =
            lines.iter().filter_map(|line| value(line).transpose()).collect::<Result<_>>()?;
        found.sort_unstable();
        Ok(found)
    };
    // Exactly this duration, which is long enough.
    let ms = |ns: u64| format!("{}.{:06}ms", ns / 1_000_000, ns % 1_000_000);
    for name in ["2.7.gctrace", "3.4.gctrace", "puma.gctrace"] {
        let pauses = values(name, "gc", "max_pause_ns")?;
        let least = pauses[pauses.len() / 2];
        let long = pauses.iter().filter(|ns| **ns >= least).count();
        ensure!(long > 1 && long < pauses.len(), "{name}: {pauses:?}");
        let flag = format!("--min-pause={}", ms(least));
        let lines = lines_of(&report(&[name, "--format=jsonl", "--brief", &flag])?, &["gc"]);
        ensure!(lines.len() == long, "{name} {flag}: {} JSON lines, not {long} of {pauses:?}", lines.len());
        let text = report(&[name, &flag])?;
        let lines = text.iter().filter(|line| {
            line.split_whitespace().skip(1).take(5).any(|word| word.starts_with('#')) && line.contains("Z ")
        });
        let lines = lines.count();
        ensure!(lines == long, "{name} {flag}: {lines} lines, not {long} of {pauses:?}: {text:#?}");
        let hidden = format!("{} cycles without a stop of", pauses.len() - long);
        ensure!(text.iter().any(|line| line.contains(&hidden)), "{name} {flag}: no {hidden}: {text:#?}");
    }
    let durations = values("puma.gctrace", "request", "duration_ns")?;
    let least = durations[durations.len() / 2];
    let slow = durations.iter().filter(|ns| **ns >= least).count();
    let flag = format!("--slower-than={}", ms(least));
    ensure!(slow > 1 && slow < durations.len(), "{durations:?}");
    let text = report(&["puma.gctrace", &flag])?;
    let words = format!("{slow} of {} ", durations.len());
    ensure!(text.iter().any(|line| line.starts_with(&words)), "{flag}: no {words:?}: {text:#?}");
    let mut listed = Vec::new();
    for line in text.iter().filter(|line| line.contains("Z ") && line.contains("  GET /")) {
        listed.push(nanos(line.split_whitespace().nth(1).context("a duration")?)?);
    }
    listed.sort_by(|one, other| one.0.total_cmp(&other.0));
    let are_equal =
        |((shown, digit), ns): (&(f64, f64), &u64)| (shown - *ns as f64).abs() <= digit / 2.0 + 1.0;
    let long = &durations[durations.len() - slow..];
    ensure!(
        listed.len() == slow && listed.iter().zip(long).all(are_equal),
        "{flag}: {listed:?}, not {long:?}: {text:#?}"
    );
    let finished = run(&["puma.gctrace", "--format=jsonl", &flag])?;
    ensure!(finished.status.success(), "{}", finished.errors());
    ensure!(finished.stdout == report(&["puma.gctrace", "--format=jsonl"])?, "{flag} changes JSON lines");
    ensure!(
        finished
            .errors()
            .contains("--slower-than changes text and profiles only: JSON lines have duration_ns"),
        "{}",
        finished.errors()
    );
    Ok(())
}

/// The name of a recording is quoted for a shell in the printed commands, and none of its control characters reach the terminal.
#[test]
fn hostile_name() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("a b'\u{1b}[31m.gctrace");
    fs::copy(recordings().join("3.4.gctrace"), &path)?;
    let printed = report(&[path.to_str().context("no text")?])?.join("\n");
    ensure!(!printed.contains('\u{1b}'), "{printed:?}");
    ensure!(printed.contains(r"a b'\''\u{1b}[31m.gctrace'"), "{printed}");
    Ok(())
}

/// A recording is not overwritten by its own outputs, whatever name they use for it.
#[test]
fn itself() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("run.gctrace");
    fs::copy(recordings().join("3.4.gctrace"), &path)?;
    let other = dir.path().join("other.csv");
    std::os::unix::fs::symlink(&path, &other)?;
    let before = fs::read(&path)?;
    let (path, other) = (path.display().to_string(), other.display().to_string());
    for words in [["-o", &path], ["--csv", &other], ["--pprof", &path], ["--flamegraph", &other]] {
        let finished = run(&[[path.as_str()].as_slice(), &words].concat())?;
        ensure!(!finished.status.success(), "{words:?}");
        ensure!(
            finished.errors().contains("is the recording that is read"),
            "{words:?}: {}",
            finished.errors()
        );
        ensure!(fs::read(&path)? == before, "{words:?} changed it");
    }
    Ok(())
}

/// Filters apply to profiles only, not to the screen, and gctrace says so.
#[test]
fn filters() -> Result<()> {
    let finished = run(&["3.4.gctrace", "--thread", "worker"])?;
    ensure!(
        finished.status.success() && finished.errors().contains("change profiles only"),
        "{}",
        finished.errors()
    );
    let finished = run(&["3.4.gctrace"])?;
    ensure!(!finished.errors().contains("change profiles only"), "{}", finished.errors());
    Ok(())
}

/// The lines of these types.
fn lines_of(lines: &[String], kinds: &[&str]) -> Vec<String> {
    let begins = |line: &&String| kinds.iter().any(|kind| line.starts_with(&format!(r#"{{"type":"{kind}""#)));
    lines.iter().filter(begins).cloned().collect()
}

/// A merged recording has the lines of both recordings, each once. A recording cannot be merged with itself or overwritten.
#[test]
fn merged() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let merge = |from: [&Path; 2], to: &Path| {
        let mut words: Vec<&std::ffi::OsStr> = vec!["merge".as_ref()];
        words.extend(from.map(Path::as_os_str));
        words.extend(["-o".as_ref(), to.as_os_str()]);
        Invocation::new(words)?.run()
    };
    let (first, second) = (recordings().join("3.3.gctrace"), recordings().join("3.4.gctrace"));
    let both = dir.path().join("both.gctrace");
    let text = |path: &Path| path.to_str().map(str::to_owned).context("a path");
    let kinds = ["process", "gc", "gvl", "exit", "summary"];
    let mut expected = Vec::new();
    for path in [&first, &second] {
        expected.extend(lines_of(&report(&[&text(path)?, "--format=jsonl"])?, &kinds));
    }
    // In any order, and over the file of the previous merge.
    for from in [[&first, &second], [&second, &first]] {
        let finished = merge(from.map(PathBuf::as_path), &both)?;
        ensure!(finished.status.success(), "{}", finished.errors());
        let found = lines_of(&report(&[&text(&both)?, "--format=jsonl"])?, &kinds);
        ensure!(
            found.len() > 30 && without_times(&found)? == without_times(&expected)?,
            "{found:#?}\n{expected:#?}"
        );
        let info = Invocation::new(["info", &text(&both)?])?.run()?;
        ensure!(
            info.stdout
                .iter()
                .any(|line| line.starts_with("account    32 cycles in 2 processes, nothing lost")),
            "{info:?}"
        );
    }

    let before = fs::read(&both)?;
    for (from, to, words) in [
        ([&first, &first], &dir.path().join("new.gctrace"), "is named twice"),
        ([&both, &second], &both, "is one of the recordings"),
    ] {
        let finished = merge(from.map(PathBuf::as_path), to)?;
        let errors = finished.errors();
        ensure!(finished.status.code() == Some(2) && errors.contains(words), "{errors}");
        ensure!(errors.contains("nothing was written") && errors.lines().count() == 1, "{errors}");
    }
    ensure!(fs::read(&both)? == before && fs::read_dir(dir.path())?.count() == 1, "something was written");
    Ok(())
}

/// Lines without times, sorted: the recordings are from two boots, whose clocks are aligned.
fn without_times(lines: &[String]) -> Result<Vec<String>> {
    let line = |line: &String| -> Result<String> {
        let mut value: Value = serde_json::from_str(line)?;
        drop_times(&mut value);
        Ok(value.to_string())
    };
    let mut all: Vec<String> = lines.iter().map(line).collect::<Result<_>>()?;
    all.sort();
    Ok(all)
}

/// Removes times.
fn drop_times(value: &mut Value) {
    let Value::Object(members) = value else { return };
    members.retain(|name, _| !name.ends_with("ts") && name != "begin_ns");
    for member in members.values_mut() {
        match member {
            Value::Array(all) => all.iter_mut().for_each(drop_times),
            member => drop_times(member),
        }
    }
}

/// A recording is read from a pipe just as from a file.
#[test]
fn from_a_pipe() -> Result<()> {
    for name in ["3.4.gctrace", "puma.gctrace"] {
        let file = fs::File::open(recordings().join(name))?;
        let mut cat = Command::new("cat").stdin(file).stdout(std::process::Stdio::piped()).spawn()?;
        let pipe = cat.stdout.take().context("no pipe")?;
        let mut command = Command::new(gctrace_binary()?);
        let output = command.args(["report", "-", "--format=jsonl"]).stdin(pipe).output()?;
        ensure!(
            cat.wait()?.success() && output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        let lines = String::from_utf8(output.stdout)?;
        let expected = report(&[name, "--format=jsonl"])?;
        ensure!(expected.len() > 20 && lines.lines().eq(&expected), "{name} from a pipe is another one");
    }
    Ok(())
}

/// `--fields` keeps only these members, in lines of all types, and reports a name that no line has.
#[test]
fn fields() -> Result<()> {
    const NAMES: [&str; 4] = ["type", "pid", "pause_ns", "comm"];
    let recording = "3.1.gctrace";
    let all = report(&[recording, "--format", "jsonl"])?;
    let asked = ["--fields", "pid, pause_ns,comm,stat.heap_live_slots,no.such,stat.no_such"];
    let finished = run(&[&[recording, "--format", "jsonl"][..], &asked].concat())?;
    ensure!(finished.status.success(), "{}", finished.errors());
    let said = finished.errors();
    ensure!(said.lines().filter(|line| line.contains("--fields")).count() == 2, "{said}");
    for name in ["no.such", "stat.no_such"] {
        ensure!(said.lines().any(|line| line.ends_with(&format!("--fields: no line has {name}"))), "{said}");
    }
    ensure!(all.len() == finished.stdout.len() && all.len() > 10, "{} lines", all.len());
    let mut stats = 0;
    for (whole, part) in all.iter().zip(&finished.stdout) {
        let (whole, part): (Value, Value) = (serde_json::from_str(whole)?, serde_json::from_str(part)?);
        let mut expected = serde_json::Map::new();
        for (name, value) in whole.as_object().context("an object")? {
            if NAMES.contains(&name.as_str()) {
                expected.insert(name.clone(), value.clone());
            } else if name == "stat" && value["heap_live_slots"].is_u64() {
                expected
                    .insert(name.clone(), serde_json::json!({ "heap_live_slots": value["heap_live_slots"] }));
                stats += 1;
            }
        }
        ensure!(part == Value::Object(expected), "{part} of {whole}");
    }
    ensure!(stats > 5, "{stats} lines have GC.stat");
    let refused = run(&[recording, "--format", "jsonl", "--fields", "pid,"])?;
    ensure!(
        refused.status.code() == Some(2) && refused.errors().contains("an empty name"),
        "{}",
        refused.errors()
    );
    Ok(())
}

/// `--tunemygc-mib` deletes the oldest sample sets beyond that size; without it they all stay.
#[test]
fn least_recent_sets() -> Result<()> {
    for (flags, stays) in [(&[][..], true), (&["--tunemygc-mib=1"], false)] {
        let dir = tempfile::tempdir()?;
        let old = dir.path().join("tunemygc-1-1.00.json");
        let path = dir.path().to_str().context("a path")?;
        fs::write(&old, vec![b'x'; 1 << 20])?;
        let time = std::time::SystemTime::now() - std::time::Duration::from_hours(1);
        fs::File::options().write(true).open(&old)?.set_modified(time)?;
        report(&[&["3.4.gctrace", "--tunemygc", path], flags].concat())?;
        let sets = fs::read_dir(dir.path())?.count();
        ensure!(old.exists() == stays && sets == 1 + usize::from(stays), "{flags:?}: {sets} sets");
    }
    Ok(())
}

/// `--program` compares the processes of the program with this name, and no others.
#[test]
fn compared_program() -> Result<()> {
    let diff = |program: &[&str]| -> Result<(Option<i32>, Value)> {
        let words = [&["diff", "3.3.gctrace", "3.4.gctrace", "--format=json"], program].concat();
        let in_place = |command: &mut Command| {
            command.current_dir(recordings());
        };
        let finished = Invocation::new(words)?.with(in_place).run()?;
        Ok((finished.status.code(), serde_json::from_str(&finished.stdout.join("\n"))?))
    };
    let (status, all) = diff(&[])?;
    ensure!(all["tables"].as_array().is_some_and(|tables| !tables.is_empty()), "{all}");
    ensure!(diff(&["--program", "golden"])? == (status, all.clone()), "{all}");
    let (status, none) = diff(&["--program", "gold"])?;
    let said: Vec<String> = serde_json::from_value(none["nothing"].clone())?;
    ensure!(status == Some(2) && none["tables"] == serde_json::json!([]), "{status:?}: {none}");
    ensure!(said == ["A has no such process", "B has no such process"], "{said:?}");
    Ok(())
}
