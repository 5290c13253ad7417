//! `gctrace malloc` on several processes: each has its own tables, compared with an extension inside that makes a known number of calls.

use std::path::Path;

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
    let script = Script::unwitnessed(live, ruby, "malloc_forks.rb")?;
    let mut script = script.env("GCTRACE_TEST_MALLOC_WITNESS", malloc_extension(ruby)?).start()?;
    script.wait_for("counting")?;
    Ok(script)
}

fn malloc(live: &Live, select: &[&str], more: &[&str]) -> Result<Gctrace> {
    let cache = live.path("cache").to_string_lossy().into_owned();
    let args = ["malloc", "--cache-dir", &cache, "--format", "jsonl", "--duration", "60s"];
    Invocation::new(args.iter().chain(select).chain(more))?.start_ready()
}

fn parsed(finished: &Finished) -> Result<Vec<Value>> {
    finished.stdout.iter().map(|line| Ok(serde_json::from_str(line)?)).collect()
}

/// The first line of a process.
fn head(lines: &[Value], pid: u64) -> Result<&Value> {
    let its = lines.iter().find(|line| line["type"] == "malloc" && line["pid"] == pid);
    its.with_context(|| format!("nothing of {pid} in {lines:?}"))
}

/// The line of a process for the size class up to this size.
fn row(lines: &[Value], pid: u64, up_to: u64) -> Option<&Value> {
    lines.iter().find(|line| line["type"] == "malloc_size" && line["pid"] == pid && line["up_to"] == up_to)
}

/// Both processes have exactly their own calls, with and without stacks, including the one that ends meanwhile, with its calls until then. A
/// child that is forked meanwhile counts towards neither. The total is the sum.
#[test]
fn each_has_its_own_calls() -> Result<()> {
    let live = Live::beside_others()?;
    Ruby::each(|ruby| {
        for sample in ["0", "64KiB"] {
            let dir = live.dir(&format!("several-{}", ruby.label()))?;
            let (pprof, folded) = (dir.join("m.pb.gz"), dir.join("m.folded"));
            let files = [("--pprof", &pprof), ("--folded", &folded)]
                .map(|(flag, path)| [flag.to_owned(), path.display().to_string()]);
            let files = files.iter().flatten().map(String::as_str).filter(|_| sample != "0");
            let more: Vec<&str> = ["--budget", "100", "--sample", sample].into_iter().chain(files).collect();
            let mut script = script(&live, ruby)?;
            let pid = script.pid().to_string();
            let gctrace = malloc(&live, &["--pid", &pid, "--children"], &more)?;
            script.say("go")?;
            script.wait_for("counted")?;
            let finished = gctrace.interrupt()?;
            script.say("end")?;
            let done = script.finish()?;
            ensure!(finished.status.success(), "{:?}\n{}", finished.status, finished.errors());
            let lines = parsed(&finished)?;
            let (parent, child) = (u64::from(done.report.pid), done.report.extra_u64("child")?);
            let (own, its) = (head(&lines, parent)?, head(&lines, child)?);
            eprintln!("{}: {own}\n{its}", ruby.label());
            ensure!(own["ended_by"] == "signal" && its["ended_by"] == "process", "{own} {its}");
            for head in [own, its] {
                let zero = ["overflow", "unread", "lost", "reallocs_unpaired"];
                ensure!(head["adds_up"] == true && zero.iter().all(|name| head[name] == 0), "{head}");
            }
            let small = row(&lines, parent, 4 * MIB).context("nothing up to 4 MiB")?;
            ensure!(
                small["calls"]["malloc"] == 20 && small["freed"]["0"] == 20 && small["live"] == 0,
                "{small}"
            );
            let large = row(&lines, parent, 32 * MIB).context("nothing up to 32 MiB")?;
            ensure!(large["calls"]["malloc"] == 7 && large["live"] == 7, "{large}");
            let calloc = row(&lines, child, 8 * MIB).context("nothing of the child")?;
            ensure!(calloc["calls"]["calloc"] == 15 && calloc["live_bytes"] == 75 * MIB, "{calloc}");
            for (pid, up_to) in [(parent, 8), (child, 4), (child, 32)] {
                ensure!(row(&lines, pid, up_to * MIB).is_none(), "{up_to} MiB of {pid}");
            }
            let heads = lines.iter().filter(|line| line["type"] == "malloc").count();
            let total = lines.last().context("no line")?;
            ensure!(heads == 2 && total["type"] == "malloc_total" && total["processes"] == 2, "{lines:?}");
            for (of, name) in
                [("calls", "malloc"), ("calls", "calloc"), ("bytes", "malloc"), ("bytes", "calloc")]
            {
                let sum = own[of][name].as_u64().zip(its[of][name].as_u64()).map(|(one, two)| one + two);
                ensure!(sum.is_some() && total[of][name].as_u64() == sum, "{of} {name}: {total}");
            }
            for name in ["frees", "followed", "live", "live_bytes"] {
                let sum = own[name].as_u64().zip(its[name].as_u64()).map(|(one, two)| one + two);
                ensure!(sum.is_some() && total[name].as_u64() == sum, "{name}: {total}");
            }
            if sample != "0" {
                one_profile(&pprof, &folded, parent, child)?;
            }
        }
        Ok(())
    })
}

/// The files of a window attribute calls to their own process. All of these calls are larger than the period, so each was sampled.
fn one_profile(pprof: &Path, folded: &Path, parent: u64, child: u64) -> Result<()> {
    let profile = Profile::open(pprof)?;
    let value = |name: &str, of: u64, function: Option<&str>| -> Result<u64> {
        let at = profile.index(name)?;
        let its = profile.samples.iter().filter(|sample| {
            sample.labels.contains(&format!("pid:[{of}]"))
                && function.is_none_or(|name| sample.stack.iter().any(|frame| frame.name == name))
        });
        Ok(its.map(|sample| sample.values[at]).sum())
    };
    // The child may have ended before its frames were named. Its other allocations are less than a MiB.
    for (pid, function, asked, left) in [
        (parent, Some("MallocWitness.malloc"), 20 * 3, 0),
        (parent, Some("MallocWitness.malloc2"), 7 * 20, 7 * 20),
        (parent, Some("MallocWitness.calloc"), 0, 0),
        (child, Some("MallocWitness.malloc"), 0, 0),
        (child, None, 15 * 5, 15 * 5),
    ] {
        let of = |name: &str| Ok::<_, anyhow::Error>(value(name, pid, function)? / MIB);
        let (alloc, inuse) = (of("alloc_space/bytes")?, of("inuse_space/bytes")?);
        ensure!(
            (alloc, inuse) == (asked, left),
            "{function:?} of {pid}: {alloc} MiB asked, {inuse} MiB left"
        );
    }
    let text = std::fs::read_to_string(folded)?;
    for pid in [parent, child] {
        let root = |line: &&str| line.split(';').next().is_some_and(|root| root.contains(&pid.to_string()));
        ensure!(text.lines().any(|line| root(&line)), "no root of {pid} in {text}");
    }
    Ok(())
}

/// The budget applies to each process: the window of a process that makes too many calls ends, and that of the other one continues. Without
/// --children the child is not counted. A named process that is not Ruby is reported, with status 1 and the tables of the other processes.
#[test]
fn windows_are_separate() -> Result<()> {
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    let mut script = script(&live, &ruby)?;
    let pid = script.pid();
    let child = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
    let both = format!("{pid},{}", child.trim());
    let mut gctrace = malloc(&live, &["--pid", &both], &["--budget", "1", "--sample", "0"])?;
    script.say("churn")?;
    script.wait_for("counted")?;
    ensure!(gctrace.running()?, "ended");
    let lines = parsed(&gctrace.interrupt()?)?;
    let (own, its) = (head(&lines, pid.into())?, head(&lines, child.trim().parse()?)?);
    ensure!(own["ended_by"] == "budget" && its["ended_by"] == "signal", "{own} {its}");
    let calloc = row(&lines, child.trim().parse()?, 8 * MIB).context("nothing of the child")?;
    ensure!(calloc["calls"]["calloc"] == 15, "{calloc}");

    let (own_pid, pid) = (std::process::id().to_string(), pid.to_string());
    let cache = live.path("cache").to_string_lossy().into_owned();
    let args = ["malloc", "--cache-dir", &cache, "--duration", "1s", "--pid", &pid, "--pid", &own_pid];
    let finished = Invocation::new(args)?.run()?;
    let errors = finished.errors();
    ensure!(finished.status.code() == Some(1) && errors.contains(&format!("pid {own_pid}: ")), "{errors}");
    let text = finished.stdout.join("\n");
    ensure!(text.contains(&format!("(pid {pid}), Ruby ")) && !text.contains("processes"), "{text}");
    script.say("end")?;
    script.finish()?;
    Ok(())
}
