//! A running `gctrace collector`, and sample sets to send to it.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Pid, Signal};
use serde_json::{Value, json};

use crate::PATIENCE;
use crate::child::{Finished, Guarded};
use crate::http::{self, Answer};
use crate::live::{Live, gctrace_binary};
use crate::postgres::Postgres;

/// The example of a complete set from the protocol.
pub const EXAMPLE: &str = include_str!("../fixtures/tunemygc_seed.json");

/// A collector. Dropping it kills it.
#[derive(Debug)]
pub struct Collector {
    process: Guarded,
    /// The address that it listens on.
    pub address: SocketAddr,
}

impl Collector {
    /// Starts a collector on a free port, with its store in this file and with these additional arguments.
    pub fn start(store: &Path, args: &[&str]) -> Result<Self> {
        Self::on("127.0.0.1:0", store, args)
    }

    /// Like [`Self::start`], on this address.
    pub fn on(listen: &str, store: &Path, args: &[&str]) -> Result<Self> {
        Self::with_store(listen, &format!("sqlite:{}", store.display()), args)
    }

    /// Like [`Self::on`], with a store of any kind.
    pub fn with_store(listen: &str, store: &str, args: &[&str]) -> Result<Self> {
        Self::with_command(Command::new(gctrace_binary()?), listen, store, args)
    }

    /// Like [`Self::with_store`], with a command that may have its own environment.
    pub fn with_command(mut command: Command, listen: &str, store: &str, args: &[&str]) -> Result<Self> {
        command.args(["collector", "--listen", listen, "--store", store]).args(args);
        let mut process = Guarded::start("collector", &mut command)?;
        let line =
            process.wait_stderr(PATIENCE, "its address", |line| line.contains("collector listens on"))?;
        let address = line.split("://").nth(1).and_then(|rest| rest.split(',').next());
        let address = address.and_then(|address| address.parse().ok());
        Ok(Self { process, address: address.with_context(|| format!("no address in {line:?}"))? })
    }

    /// Registers an application and returns its token.
    pub fn register(&self) -> Result<String> {
        let answer = self.form("/accounts", "email=someone%40example.com&app=shop")?;
        ensure!(answer.code == 200, "{answer:?}");
        Ok(answer.text())
    }

    /// Posts a form.
    pub fn form(&self, path: &str, form: &str) -> Result<Answer> {
        let kind = [("Content-Type", "application/x-www-form-urlencoded")];
        http::post(self.address, path, &kind, form.as_bytes())
    }

    /// Posts a set as the agent does.
    pub fn send(&self, set: &str) -> Result<Answer> {
        self.send_bytes(set.as_bytes(), &[])
    }

    /// Posts bytes with additional headers.
    pub fn send_bytes(&self, body: &[u8], headers: &[(&str, &str)]) -> Result<Answer> {
        let mut all = vec![("Content-Type", "application/json"), ("User-Agent", "TuneMyGC 1.0.71")];
        all.extend(headers);
        http::post(self.address, "/ruby", &all, body)
    }

    /// Sends a GET request for a path.
    pub fn get(&self, path: &str) -> Result<Answer> {
        http::get(self.address, path)
    }

    /// The value of a metric of `/metrics`.
    pub fn metric(&self, name: &str) -> Result<u64> {
        let text = self.get("/metrics")?.text();
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok());
        value.with_context(|| format!("no {name} in\n{text}"))
    }

    /// Its peak memory, bytes.
    pub fn peak_memory(&self) -> Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.pid()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB")).context("no VmHWM")?;
        Ok(kib.trim().parse::<u64>()? * 1024)
    }

    /// Its pid.
    pub fn pid(&self) -> Result<Pid> {
        i32::try_from(self.process.pid()).ok().and_then(Pid::from_raw).context("a pid is positive")
    }

    /// Stops it as an operator does, with SIGTERM.
    pub fn stop(self) -> Result<Finished> {
        self.process.signal(Signal::TERM)?;
        let finished = self.process.finish(PATIENCE)?;
        ensure!(finished.status.success(), "{}: {}", finished.status, finished.errors());
        Ok(finished)
    }
}

/// Waits at least `time`, and until clients have added this many accepted sets to the `before` earlier ones. Each is a commit, whose time is
/// the disk's. The caller checks the count: if it is not reached in time, the wait ends all the same.
pub fn wait_accepted(accepted: &Mutex<Vec<String>>, before: usize, more: usize, time: Duration) {
    let begun = Instant::now();
    let there = || accepted.lock().map_or(0, |accepted| accepted.len());
    while begun.elapsed() < time || (there() < before + more && begun.elapsed() < PATIENCE) {
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Runs a test once per kind of store, with the name of the store.
pub fn each_store(test: impl Fn(&str) -> Result<()>) -> Result<()> {
    let live = Live::without_gctrace()?;
    test(&format!("sqlite:{}", live.path("sets.db").display())).context("SQLite")?;
    let postgres = Postgres::start()?;
    test(&postgres.address()).context("PostgreSQL")
}

/// The output of `gctrace apps` for a store.
pub fn apps(store: &str, args: &[&str]) -> Result<String> {
    let output = Command::new(gctrace_binary()?).args(["apps", "--store", store]).args(args).output()?;
    ensure!(output.status.success(), "{}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

/// The protocol's example with this token and pid.
pub fn example(token: &str, pid: u64) -> Result<Value> {
    let mut set: Value = serde_json::from_str(EXAMPLE)?;
    set[0][0] = json!(token);
    set[0][10] = json!(pid);
    Ok(set)
}

/// A cycle of an invented program.
#[derive(Clone, Copy, Debug)]
pub struct Cycle {
    /// `gc_by`.
    pub by: &'static str,
    /// `major_by`.
    pub major: Option<&'static str>,
    /// Old objects at its end, of 100 000 at its start.
    pub old_after: u64,
}

/// A set of a program that runs these cycles one after the other, ten per second. Each allocates 50 000 objects and takes 30 ms, in a heap of
/// 400 000 slots (100 000 during the first five cycles), of which 200 000 are live. It uses 2 GiB, to which no advice adds much.
pub fn set(token: &str, ruby: &str, env: &Value, cycles: &[Cycle]) -> Value {
    let mut keys =
        vec!["count", "heap_available_slots", "heap_live_slots", "total_allocated_objects", "old_objects"];
    let counts_time = ruby >= "3.1";
    keys.extend(counts_time.then_some("time"));
    let header = json!([token, ruby, "0.0", env, "1.0.71", [], {}, keys, "host", 1, 4242]);
    let mut set = vec![header];
    for (at, cycle) in cycles.iter().enumerate() {
        let n = at as u64;
        let slots = if n < 5 { 100_000 } else { 400_000 };
        let state = |live: u64, old: u64, time: u64| {
            let mut stat = vec![n + 1, slots, live, (n + 1) * 50_000, old];
            stat.extend(counts_time.then_some(time));
            stat
        };
        let info =
            json!({"major_by": cycle.major, "gc_by": cycle.by, "immediate_sweep": false, "state": "none"});
        let ts = 1_700_000_000.0 + n as f64 / 10.0;
        let start = state(slots, 100_000, n * 30);
        let end = state(slots.min(200_000), cycle.old_after, n * 30 + 30);
        set.push(json!([ts, 2_u64 << 30, 2_u64 << 30, "GC_CYCLE_STARTED", start, info, null, null]));
        set.push(json!([ts + 0.05, 2_u64 << 30, 2_u64 << 30, "GC_CYCLE_ENDED", end, info, null, null]));
    }
    Value::Array(set)
}

/// The given number of cycles of each kind, interleaved.
pub fn cycles(kinds: &[(Cycle, usize)]) -> Vec<Cycle> {
    let mut left: Vec<(Cycle, usize)> = kinds.to_vec();
    let mut mixed = Vec::new();
    while left.iter().any(|(_, n)| *n > 0) {
        for (cycle, n) in &mut left {
            if *n > 0 {
                *n -= 1;
                mixed.push(*cycle);
            }
        }
    }
    mixed
}
