//! Servers that fork, and short-lived scripts: all cycles of every process are reported.

use std::collections::BTreeMap;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::child::Guarded;
use gctrace_tests::free_port;
use gctrace_tests::gctrace::{Invocation, read};
use gctrace_tests::live::{Live, rubies_dir};
use gctrace_tests::perfetto::Trace;
use gctrace_tests::report::{GcLine, Report};
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::Script;
use gctrace_tests::timing::settled;
use gctrace_tests::tunemygc::Set;
use gctrace_tests::witness::{self, Log};
use gctrace_tests::{PATIENCE, compare, ensure_times, http, ledger};
use rustix::process::Signal;
use serde_json::{Value, json};

/// A worker's own report.
#[derive(Clone, Debug)]
struct Worker {
    ppid: u32,
    /// `GC.count` when it started.
    first: u64,
    /// `GC.count` when it ended.
    last: u64,
    /// The log of its witness for the time in between.
    log: Option<Log>,
}

/// A web server under test.
struct Server {
    process: Guarded,
    counts: PathBuf,
    /// Prefix of the witness logs of workers, without the pid.
    logs: PathBuf,
    port: u16,
}

impl Server {
    fn start(live: &Live, program: &str) -> Result<Self> {
        let counts = live.path("counts");
        let port = free_port()?;
        let web = rubies_dir().join("web");
        let mut command = Command::new(program);
        let settings = web.join(format!("{program}.rb"));
        match program {
            "puma" => command.arg("-C").arg(settings).arg("-b").arg(format!("tcp://127.0.0.1:{port}")),
            _ => command.arg("-c").arg(settings).arg("-l").arg(format!("127.0.0.1:{port}")),
        };
        command.arg(web.join("config.ru")).current_dir(&web);
        let logs = live.path("witness");
        command.env("GCTRACE_TEST_COUNTS", &counts).env("RACK_ENV", "production");
        // The servers are Debian's, and run on Debian's Ruby.
        let extension = witness::extension(&Ruby::at(Path::new("/usr/bin/ruby"))?)?;
        command.env("GCTRACE_TEST_WITNESS", extension).env("GCTRACE_TEST_LOG", &logs);
        let server = Self { process: Guarded::start(program, &mut command)?, counts, logs, port };
        server.wait_for("workers", |server| Ok(server.lines("begin")?.len() >= 2))?;
        server.wait_for("its port", |server| Ok(TcpStream::connect(("127.0.0.1", server.port)).is_ok()))?;
        Ok(server)
    }

    fn wait_for(&self, what: &str, there: impl Fn(&Self) -> Result<bool>) -> Result<()> {
        let since = Instant::now();
        while !there(self)? {
            ensure!(since.elapsed() < PATIENCE, "no {what} of the server");
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    fn lines(&self, kind: &str) -> Result<Vec<(u32, u32, u64)>> {
        lines(&self.counts, kind)
    }

    fn load(&self) -> Result<()> {
        let mut wrk = Command::new("wrk");
        wrk.args(["-t1", "-c4", "-d2s", &format!("http://127.0.0.1:{}/", self.port)]);
        let output = wrk.output().context("cannot run wrk")?;
        ensure!(output.status.success(), "wrk: {}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    }

    /// Ends it. Returns its pid and its workers' reports.
    fn stop(self, signal: Signal) -> Result<(u32, BTreeMap<u32, Worker>)> {
        let Self { process, counts, logs, .. } = self;
        let pid = process.pid();
        process.signal(signal)?;
        let finished = process.finish(PATIENCE)?;
        let ends: BTreeMap<u32, u64> =
            lines(&counts, "end")?.into_iter().map(|(pid, _, count)| (pid, count)).collect();
        let mut workers = BTreeMap::new();
        for (pid, ppid, first) in lines(&counts, "begin")? {
            let last = *ends.get(&pid).with_context(|| format!("worker {pid}: {}", finished.errors()))?;
            let log = Some(Log::read(&logs.with_extension(pid.to_string()))?);
            workers.insert(pid, Worker { ppid, first, last, log });
        }
        Ok((pid, workers))
    }
}

/// Pid, parent pid and `GC.count` of each line of this kind.
fn lines(counts: &Path, kind: &str) -> Result<Vec<(u32, u32, u64)>> {
    let text = match std::fs::read_to_string(counts) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        text => text?,
    };
    let mut found = Vec::new();
    for line in text.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let [event, pid, parent, count] = words[..] else { anyhow::bail!("line {line}") };
        if event == kind {
            found.push((pid.parse()?, parent.parse()?, count.parse()?));
        }
    }
    Ok(found)
}

/// Checks that every cycle that a worker counted is reported once, without gaps, and none from before the fork.
fn all_there(report: &Report, workers: &BTreeMap<u32, Worker>) -> Result<()> {
    ledger::check_lossless(report)?;
    for (pid, worker) in workers {
        let counts: Vec<u64> = report.gcs_of(*pid).map(|line| line.count).collect();
        ensure!(worker.last > worker.first, "worker {pid} did not collect");
        ensure!(counts.windows(2).all(|pair| pair[0] + 1 == pair[1]), "worker {pid}: {counts:?}");
        // A cycle's number equals GC.count from its start on. Cycles during boot and exit come in addition.
        let (first, last) = (counts.first().copied(), counts.last().copied());
        ensure!(
            first.is_some_and(|first| first <= worker.first + 1) && last >= Some(worker.last),
            "worker {pid}: cycles {first:?} to {last:?}, it counted {} to {}",
            worker.first,
            worker.last
        );
        if let Some(log) = &worker.log {
            let lines: Vec<&GcLine> = report.gcs_of(*pid).collect();
            ensure!(log.starts().count() > 0, "the witness in {pid} saw nothing");
            compare::cycles(&lines, log).demand_equal().with_context(|| format!("worker {pid}"))?;
        }
        let [process] = report.processes_of(*pid).collect::<Vec<_>>()[..] else {
            anyhow::bail!("worker {pid} has not one process line")
        };
        ensure!(process.ppid == Some(worker.ppid), "parent of {pid}: {process:?}");
    }
    Ok(())
}

/// Checks that the set of each worker has its parent and the reported cycles.
fn sets(dir: &Path, report: &Report, workers: &BTreeMap<u32, Worker>) -> Result<()> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(dir)? {
        let set = Set::parse(&std::fs::read_to_string(entry?.path())?)?;
        let started = set.samples.iter().filter(|sample| sample.event == "GC_CYCLE_STARTED").count();
        let (ppid, cycles) = found.entry(set.pid).or_insert((set.ppid, 0));
        ensure!(*ppid == set.ppid, "parents of {}", set.pid);
        *cycles += started;
    }
    for (pid, worker) in workers {
        let expected = (worker.ppid, report.gcs_of(*pid).count());
        ensure!(found.get(pid) == Some(&expected), "set of {pid}: {:?}, not {expected:?}", found.get(pid));
    }
    Ok(())
}

/// A Puma cluster under load, whose workers are replaced one by one meanwhile.
#[test]
fn puma_with_phased_restart() -> Result<()> {
    let live = Live::begin()?;
    let dir = live.dir("sets")?;
    let gctrace =
        Invocation::jsonl(["--all-ruby".as_ref(), "--tunemygc".as_ref(), dir.as_os_str()])?.start_ready()?;
    let server = Server::start(&live, "puma")?;
    server.load()?;
    server.process.signal(Signal::USR1)?;
    server.load()?;
    server.wait_for("new workers", |server| {
        Ok(server.lines("begin")?.len() >= 4 && server.lines("end")?.len() >= 2)
    })?;
    server.load()?;
    let (master, workers) = server.stop(Signal::TERM)?;
    let finished = gctrace.interrupt()?;
    let report = read(&finished)?;
    ensure!(workers.len() >= 4, "{:?}", workers.keys());
    ensure!(workers.values().all(|worker| worker.ppid == master), "parents: not all {master}");
    all_there(&report, &workers)?;
    sets(&dir, &report, &workers)
}

/// Unicorn's workers, forked from a master that has loaded the program.
#[test]
fn unicorn() -> Result<()> {
    let live = Live::begin()?;
    let dir = live.dir("sets")?;
    let gctrace =
        Invocation::jsonl(["--all-ruby".as_ref(), "--tunemygc".as_ref(), dir.as_os_str()])?.start_ready()?;
    let server = Server::start(&live, "unicorn")?;
    server.load()?;
    let (master, workers) = server.stop(Signal::QUIT)?;
    let finished = gctrace.interrupt()?;
    let report = read(&finished)?;
    ensure!(workers.len() >= 2, "{:?}", workers.keys());
    ensure!(workers.values().all(|worker| worker.ppid == master), "parents: not all {master}");
    all_there(&report, &workers)?;
    sets(&dir, &report, &workers)
}

/// A server that has loaded everything forks one child per job, and concurrent children that run commands: each has its
/// own cycles and its own set, under its parent.
#[test]
fn a_child_per_job() -> Result<()> {
    let live = Live::begin()?;
    Ruby::first_and_last(|ruby| {
        let dir = live.dir(&format!("sets-{}", ruby.version()))?;
        let gctrace = Invocation::jsonl(["--all-ruby".as_ref(), "--tunemygc".as_ref(), dir.as_os_str()])?
            .start_ready()?;
        let running = Script::new(&live, ruby, "fork_server.rb")?.start()?;
        let outputs = running.outputs();
        let done = running.finish()?;
        let report = read(&gctrace.interrupt()?)?;
        ensure!(
            done.report.extra["statuses"] == json!([0, 1, 2, 3, 4, 5, 6, 7, 100, 101, 102, 103]),
            "{:?}",
            done.report.extra
        );
        let lines: Vec<&GcLine> = report.gcs_of(done.pid).collect();
        compare::cycles(&lines, done.log()?).demand_equal()?;
        let mut workers = BTreeMap::new();
        let jobs = (0..8).map(|number| format!(".job{number}"));
        for suffix in jobs.chain((0..4).map(|number| format!(".command{number}"))) {
            let (child, log) = outputs.read(&suffix)?;
            ensure!(child.ppid == done.pid && child.pid != done.pid, "{suffix}: {child:?}");
            let lines: Vec<&GcLine> = report.gcs_of(child.pid).collect();
            compare::program(&lines, &child).with_context(|| suffix.clone())?;
            ensure!(
                report.exits.iter().any(|exit| exit.pid == child.pid && exit.lost == 0),
                "no end: {suffix}"
            );
            let counts = child.counts()?;
            let worker = Worker { ppid: done.pid, first: counts.start() - 1, last: *counts.end(), log };
            ensure!(workers.insert(child.pid, worker).is_none(), "pid {} came again", child.pid);
        }
        all_there(&report, &workers)?;
        sets(&dir, &report, &workers)
    })
}

/// Short scripts: they work for 10 to 200 ms of CPU time after starting up, and print the number of collections. The
/// collections at the exit, after that, are few.
const SHORT: &str = "n = Integer(ARGV[0]); kept = []
    n.times { |i| kept << i.to_s; [i, i.to_s]; GC.start if i % 20_000 == 19_999 }
    puts \"#{Process.pid} #{GC.count}\"";

/// Two hundred short-lived processes, in two concurrent sequences: each has a complete set from its first to its last cycle, with its end.
#[test]
fn two_hundred_short_lives() -> Result<()> {
    const LIVES: usize = 200;
    let live = Live::begin()?;
    let dir = live.dir("sets")?;
    let gctrace =
        Invocation::jsonl(["--all-ruby".as_ref(), "--tunemygc".as_ref(), dir.as_os_str()])?.start_ready()?;
    let ruby = Ruby::main()?;
    let half = |from: usize| -> Result<Vec<(u32, u64)>> {
        let one = |number: usize| {
            let rounds = 5_000 + 45_000 * (number % 10) / 9;
            let output = ruby.command()?.args(["-e", SHORT, &rounds.to_string()]).output()?;
            let said = String::from_utf8(output.stdout)?;
            let (pid, count) = said.trim().split_once(' ').context("it said nothing")?;
            Ok((pid.parse()?, count.parse()?))
        };
        (from..LIVES).step_by(2).map(one).collect()
    };
    let all = std::thread::scope(|scope| {
        let halves = [0, 1].map(|from| scope.spawn(move || half(from)));
        halves.into_iter().map(|half| half.join().expect("no panic")).collect::<Result<Vec<_>>>()
    })?;
    let mut counts = BTreeMap::new();
    for (pid, count) in all.concat() {
        ensure!(counts.insert(pid, count).is_none(), "pid {pid} came again");
    }
    let report = read(&gctrace.interrupt()?)?;
    ledger::check_lossless(&report)?;
    for (pid, count) in &counts {
        let cycles: Vec<u64> = report.gcs_of(*pid).map(|line| line.count).collect();
        let last = cycles.last().copied().unwrap_or_default();
        ensure!(
            cycles.iter().copied().eq(1..=last) && last >= *count,
            "{pid}: {cycles:?}, it counted {count}"
        );
        ensure!(report.exits.iter().any(|exit| exit.pid == *pid && exit.lost == 0), "no end of {pid}");
    }
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(&dir)? {
        let set = Set::parse(&std::fs::read_to_string(entry?.path())?)?;
        let started = set.samples.iter().filter(|sample| sample.event == "GC_CYCLE_STARTED").count();
        if !counts.contains_key(&set.pid) {
            continue;
        }
        let ended = set.samples.last().is_some_and(|last| last.event == "TERMINATED");
        ensure!(ended, "the set of {} has no end", set.pid);
        ensure!(found.insert(set.pid, started).is_none(), "two sets of {}", set.pid);
    }
    for pid in counts.keys() {
        let expected = report.gcs_of(*pid).count();
        ensure!(
            found.get(pid) == Some(&expected),
            "set of {pid}: {:?} cycles, not {expected}",
            found.get(pid)
        );
    }
    Ok(())
}

/// A forked child that writes to memory shared with its parent, between two collections.
const WRITER: &str = "$stdout.sync = true
    big = Array.new(40) { 'x' * (1 << 20) }
    own = -> { File.read('/proc/self/smaps_rollup')[/Private_Dirty:\\s+(\\d+)/, 1].to_i * 1024 }
    Process.wait(fork do
      GC.disable
      puts \"pid #{Process.pid}\"
      GC.start
      before = own.call
      gets
      big.each { |text| (0...text.bytesize).step(4096) { |at| text.setbyte(at, 121) } }
      GC.start
      puts \"dirty #{before} #{own.call}\"
      gets
    end)";

/// The copied memory of a child is in the line of its next collection, as the child reads it itself. Profiles and metrics have the same values as
/// the lines.
#[test]
fn copied_on_write() -> Result<()> {
    settled(children_copy_on_write)
}

fn children_copy_on_write() -> Result<()> {
    const SLACK: i64 = 8 << 20;
    let live = Live::begin()?;
    let mut command = Ruby::main()?.command()?;
    let (firefox, perfetto) = (live.path("firefox.json"), live.path("perfetto"));
    let path = |path: &Path| path.to_str().map(str::to_owned).context("a path");
    let mut gctrace = Invocation::jsonl([
        "--all-ruby",
        "--shares",
        "--prometheus=127.0.0.1:0",
        "--prometheus-pid",
        &format!("--firefox={}", path(&firefox)?),
        &format!("--perfetto={}", path(&perfetto)?),
    ])?
    .start()?;
    let told = gctrace.wait_error("metrics on")?;
    let address = told.split("http://").nth(1).and_then(|rest| rest.split('/').next());
    let address = address.context(told.clone())?.parse()?;
    gctrace.wait_ready()?;
    let mut writer = Guarded::start("writer", command.args(["--disable-gems", "-e", WRITER]))?;
    let said = |writer: &mut Guarded, word: &str| {
        let told = writer.wait_stdout(PATIENCE, word, |line| line.starts_with(word));
        told.map(|line| line[word.len() + 1..].to_owned())
    };
    let pid: u32 = said(&mut writer, "pid")?.parse()?;
    let readings = || -> Vec<Value> {
        let lines = gctrace.stdout_so_far();
        let values = lines.iter().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let its = values.filter(|value| value["type"] == "gc" && value["pid"].as_u64() == Some(pid.into()));
        its.filter(|value| value["private_dirty_end"].is_i64()).collect()
    };
    let of = |readings: &[Value], key: &str| -> Vec<i64> {
        readings.iter().filter_map(|value| value[key].as_i64()).collect()
    };
    let dirty = || of(&readings(), "private_dirty_end");
    let wait = |number: usize| -> Result<()> {
        let since = Instant::now();
        while dirty().len() < number {
            ensure!(since.elapsed() < PATIENCE, "only {:?} of {number} readings", dirty());
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    };
    wait(1)?;
    // Readings are limited to one per second.
    std::thread::sleep(Duration::from_millis(1100));
    writer.say("go")?;
    let own = said(&mut writer, "dirty")?;
    wait(2)?;
    // The gauges have the values of the last cycle.
    let since = Instant::now();
    for (name, key) in [("private_dirty", "private_dirty_end"), ("proportional", "pss_end")] {
        let last = of(&readings(), key).last().copied().context("no reading")?;
        let is_its = |line: &str| {
            line.starts_with(&format!("cruby_{name}_memory_bytes{{"))
                && line.contains(&format!("pid=\"{pid}\""))
                && line.ends_with(&format!(" {last}"))
        };
        loop {
            let text = http::get(address, "/metrics")?.text();
            if text.lines().any(is_its) {
                break;
            }
            ensure!(since.elapsed() < PATIENCE, "no {name} of {last}:\n{text}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    writer.say("end")?;
    let own: Vec<i64> = own.split(' ').map(str::parse).collect::<Result<_, _>>()?;
    let all = readings();
    let seen = dirty();
    gctrace.stop()?;
    let trace = Trace::open(&perfetto)?;
    let markers = markers(&firefox)?;
    for (key, counter, field) in [("private_dirty_end", "private dirty", "dirty"), ("pss_end", "PSS", "pss")]
    {
        let drawn = trace.counters.get(counter).context("no counter")?;
        let mut times = Vec::new();
        for (reading, value) in all.iter().zip(of(&all, key)) {
            let at = drawn.iter().find(|point| i64::try_from(point.1) == Ok(value));
            let (ts_ns, _) = at.with_context(|| format!("no {counter} of {value}: {drawn:?}"))?;
            let said = reading["shares_ts"].as_f64().context("no time")?;
            let end = reading["end_ts"].as_f64().context("no end")?;
            ensure!(said > end, "{said} is not after {end}");
            ensure_times!(said < end + 1.0, "{said} is not right after {end}");
            times.push((*ts_ns as f64 / 1e9, said));
            ensure!(markers.iter().any(|data| data[field] == value), "no marker of {value}: {markers:?}");
        }
        let apart = |of: fn(&(f64, f64)) -> f64| times.last().map_or(0.0, of) - times.first().map_or(0.0, of);
        ensure!((apart(|at| at.0) - apart(|at| at.1)).abs() < 1e-5, "drawn at other times: {times:?}");
    }
    let ([before, after], [seen_before, seen_after]) = (&own[..], &seen[..]) else {
        anyhow::bail!("{own:?}, {seen:?}")
    };
    // The child compares with itself: it shares memory with a living parent.
    ensure!(after - before >= 40 << 20, "the child wrote to nothing shared: {own:?}");
    ensure!(
        (seen_before - before).abs() <= SLACK && (seen_after - after).abs() <= SLACK,
        "{own:?}, {seen:?}"
    );
    Ok(())
}

/// The data of all markers about shared memory.
fn markers(firefox: &Path) -> Result<Vec<Value>> {
    let file: Value = serde_json::from_slice(&std::fs::read(firefox)?)?;
    let threads = file["threads"].as_array().context("no threads")?;
    let all = threads.iter().filter_map(|thread| thread["markers"]["data"].as_array()).flatten();
    Ok(all.filter(|data| data["type"] == "Shares").cloned().collect())
}
