//! The witness inside the Ruby process: builds the C extension and reads its log.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::live::{rubies_dir, work_dir};
use crate::ruby::Ruby;

/// The path of the extension, built for `ruby` by this machine's compiler. It uses nothing of the C library that older
/// or newer versions lack. It is built once per source, Ruby and compiler flags. If processes build it at the same time,
/// each builds its own copy and the last one wins.
pub fn extension(ruby: &Ruby) -> Result<PathBuf> {
    build(ruby, "witness", &[])
}

/// Like [`extension`], for the witness of the GVL.
pub fn gvl_extension(ruby: &Ruby) -> Result<PathBuf> {
    build(ruby, "gvl_witness", &[])
}

/// Like [`extension`], for the extension that calls allocation functions.
pub fn malloc_extension(ruby: &Ruby) -> Result<PathBuf> {
    build(ruby, "malloc_witness", &[])
}

/// The extension that publishes spans, built with these flags, which select how its thread-local variable is found.
pub fn spans_extension(ruby: &Ruby, flags: &[&str]) -> Result<PathBuf> {
    build(ruby, "spans", flags)
}

/// The variable with the directory of witnesses compiled elsewhere, for a machine without a compiler. It is in [`work_dir`],
/// because Rubies with separate roots see nothing else.
const READY: &str = "GCTRACE_WITNESSES";

fn build(ruby: &Ruby, name: &str, more: &[&str]) -> Result<PathBuf> {
    if let Some(dir) = std::env::var_os(READY) {
        let library = Path::new(&dir).join(ruby.label()).join(name).with_extension(ruby.config("DLEXT"));
        ensure!(library.is_file(), "no {} ({READY} says that it is there)", library.display());
        return Ok(library);
    }
    let source = rubies_dir().join("witness").join(name).with_extension("c");
    let text = std::fs::read(&source).with_context(|| format!("cannot read {}", source.display()))?;
    let compiler = if ruby.root().is_some() { "cc" } else { ruby.config("CC") };
    let compiler = compiler.split_whitespace().map(ToOwned::to_owned).collect::<Vec<_>>();
    let flags = ["-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Wno-unused-parameter"];
    let includes = ["rubyarchhdrdir", "rubyhdrdir"].map(|key| ruby.host_path(ruby.config(key)));
    let includes = includes.map(|dir| format!("-I{}", dir.display()));

    let mut hash = DefaultHasher::new();
    (&text, &compiler, flags, more, &includes, ruby.version(), ruby.exe()).hash(&mut hash);
    let dir = work_dir()?.join(format!("witness-{:016x}", hash.finish()));
    // The name of the file determines the name of its Init function.
    let library = dir.join(name).with_extension(ruby.config("DLEXT"));
    if library.is_file() {
        return Ok(library);
    }

    std::fs::create_dir_all(&dir)?;
    let built = tempfile::Builder::new().prefix("witness-").suffix(".part").tempfile_in(&dir)?;
    let (program, arguments) = compiler.split_first().context("this Ruby names no C compiler")?;
    let output = Command::new(program)
        .args(arguments)
        .args(flags)
        .args(more)
        .args(&includes)
        .arg("-o")
        .args([built.path(), &source])
        .output()
        .with_context(|| {
            format!("cannot run {program}: run `cargo xtask test`, which installs a C compiler")
        })?;
    ensure!(
        output.status.success(),
        "the witness extension does not build (are Ruby's headers there? `cargo xtask test` installs them):\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    built.persist(&library).with_context(|| format!("cannot write {}", library.display()))?;
    Ok(library)
}

/// The kind of an event in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// `GC_START`.
    Start,
    /// `GC_END_MARK`.
    EndMark,
    /// `GC_END_SWEEP`.
    EndSweep,
    /// `GC_ENTER`.
    Enter,
    /// `GC_EXIT`.
    Exit,
}

/// Memory as the process itself read it in the hook, in kB.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct Memory {
    /// `VmRSS` in `/proc/self/status`: the kernel's counters.
    #[serde(rename = "VmRSS")]
    pub rss: u64,
    /// `VmHWM` in `/proc/self/status`.
    #[serde(rename = "VmHWM")]
    pub peak: u64,
    /// `RssAnon` in `/proc/self/status`.
    #[serde(rename = "RssAnon")]
    pub anon: u64,
    /// `RssFile` in `/proc/self/status`.
    #[serde(rename = "RssFile")]
    pub file: u64,
    /// `RssShmem` in `/proc/self/status`.
    #[serde(rename = "RssShmem")]
    pub shmem: u64,
    /// `VmSwap` in `/proc/self/status`.
    #[serde(rename = "VmSwap")]
    pub swap: u64,
    /// `Rss` in `/proc/self/smaps_rollup`: the result of a walk of the page tables.
    #[serde(rename = "Rss")]
    pub walked: u64,
}

/// One event as the witness saw it.
#[derive(Clone, Debug, Deserialize)]
pub struct Event {
    /// What happened.
    #[serde(rename = "ev")]
    pub kind: Kind,
    /// `CLOCK_MONOTONIC`, nanoseconds.
    pub ns: u64,
    /// Native thread id.
    pub tid: u32,
    /// How often the kernel had preempted the thread by then.
    pub preempted: u64,
    /// Whether no other thread of the process could allocate at this event.
    pub alone: bool,
    /// `GC.stat` at `GC_START` and `GC_END_SWEEP`, in its order; empty at other events.
    #[serde(default)]
    pub stat: Map<String, Value>,
    /// `GC.latest_gc_info` at these events.
    #[serde(default)]
    pub info: Map<String, Value>,
    /// Memory at these events, if the script asked for it.
    pub memory: Option<Memory>,
}

impl Event {
    /// `GC.stat[:count]` at this event.
    pub fn count(&self) -> u64 {
        self.stat.get("count").and_then(Value::as_u64).unwrap_or(0)
    }

    /// A string of `latest_gc_info`, or `None` if it is nil.
    pub fn reason(&self, key: &str) -> Option<&str> {
        self.info.get(key).and_then(Value::as_str)
    }

    /// "major" if the collection has a `major_by`, else "minor".
    pub fn cycle_kind(&self) -> &'static str {
        if self.reason("major_by").is_some() { "major" } else { "minor" }
    }
}

/// One pause as the witness saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pause {
    /// Time of `GC_ENTER`, nanoseconds.
    pub begin_ns: u64,
    /// Time of `GC_EXIT`, nanoseconds.
    pub end_ns: u64,
    /// The count of the cycle that it works for.
    pub count: u64,
    /// Whether the kernel preempted the thread between the event before the pause and the end of the pause.
    pub preempted: bool,
}

/// A complete log.
#[derive(Clone, Debug)]
pub struct Log {
    /// The process.
    pub pid: u32,
    /// When it began, `CLOCK_MONOTONIC` nanoseconds.
    pub begin_ns: u64,
    /// When it ended, likewise.
    pub end_ns: u64,
    /// `CLOCK_REALTIME` minus `CLOCK_MONOTONIC` at the beginning of the log, nanoseconds.
    pub epoch_offset_ns: i64,
    /// Whether the collector was in the middle of a cycle at the beginning of the log.
    pub begins_in_a_cycle: bool,
    /// All events in order.
    pub events: Vec<Event>,
    /// Minor page faults, until the end of the log, of the threads that did not write it.
    pub faults_of_others: u64,
}

#[derive(Deserialize)]
struct Begin {
    ns: u64,
    real_ns: u64,
    pid: u32,
    state: String,
}

#[derive(Deserialize)]
struct Finish {
    ns: u64,
    events: usize,
    dropped: u64,
    unstable: u64,
    faults_of_others: u64,
}

impl Log {
    /// Reads a log. An incomplete log, or one whose witness changed what it observed, is an error.
    pub fn read(path: &Path) -> Result<Self> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("no witness log at {}", path.display()))?;
        Self::parse(&text).with_context(|| format!("witness log {}", path.display()))
    }

    fn parse(text: &str) -> Result<Self> {
        let lines = text.lines().collect::<Vec<_>>();
        let [first, middle @ .., last] = lines.as_slice() else { bail!("too short") };
        let begin: Begin = serde_json::from_str(first).context("its first line")?;
        let finish: Finish = serde_json::from_str(last).context("its last line")?;
        let events =
            middle.iter().map(|line| serde_json::from_str(line)).collect::<Result<Vec<Event>, _>>()?;
        ensure!(finish.events == events.len(), "{} events announced, {} there", finish.events, events.len());
        ensure!(finish.dropped == 0, "the witness's buffer was too small for {} events", finish.dropped);
        ensure!(finish.unstable == 0, "reading GC.stat in the hook changed it {} times", finish.unstable);
        Ok(Self {
            pid: begin.pid,
            begin_ns: begin.ns,
            end_ns: finish.ns,
            begins_in_a_cycle: begin.state != "none",
            epoch_offset_ns: i64::try_from(begin.real_ns)? - i64::try_from(begin.ns)?,
            events,
            faults_of_others: finish.faults_of_others,
        })
    }

    /// The `GC_START` events, in order.
    pub fn starts(&self) -> impl Iterator<Item = &Event> {
        self.events.iter().filter(|event| event.kind == Kind::Start)
    }

    /// The `GC_END_SWEEP` events, in order.
    pub fn ends(&self) -> impl Iterator<Item = &Event> {
        self.events.iter().filter(|event| event.kind == Kind::EndSweep)
    }

    /// The pauses of cycles. A pause that contains a `GC_START` belongs to the cycle that starts there, any other pause to the
    /// running cycle. From 3.4 on, the VM also enters and leaves the GC while no cycle is running, only to find that there is
    /// nothing to continue (`gc_continue`, gc/default/default.c): those pauses belong to no cycle.
    pub fn pauses(&self) -> Result<Vec<Pause>> {
        let mut count = self.events.iter().find(|event| !event.stat.is_empty()).map_or(0, |event| {
            // Before its GC_START, the count was one less.
            event.count() - u64::from(event.kind == Kind::Start)
        });
        let mut open: Option<&Event> = None;
        // An earlier cycle may still be marked or swept.
        let mut running = self.begins_in_a_cycle;
        let mut part_of_a_cycle = true;
        let mut pauses = Vec::new();
        let mut previous: Option<&Event> = None;
        let mut before_enter: Option<&Event> = None;
        for event in &self.events {
            match event.kind {
                Kind::Enter => {
                    ensure!(open.is_none(), "a pause inside a pause at {}", event.ns);
                    open = Some(event);
                    before_enter = previous;
                    part_of_a_cycle = running;
                }
                Kind::Start => {
                    count = event.count();
                    running = true;
                    part_of_a_cycle = true;
                }
                Kind::Exit => {
                    let enter =
                        open.take().with_context(|| format!("an exit without an enter at {}", event.ns))?;
                    ensure!(enter.tid == event.tid, "a pause changes its thread at {}", event.ns);
                    if part_of_a_cycle {
                        // Earlier events of another thread say nothing about this thread.
                        let before = before_enter.filter(|before| before.tid == event.tid);
                        let preempted = before.is_none_or(|before| before.preempted != event.preempted);
                        pauses.push(Pause { begin_ns: enter.ns, end_ns: event.ns, count, preempted });
                    }
                }
                Kind::EndSweep => running = false,
                Kind::EndMark => {}
            }
            previous = Some(event);
        }
        ensure!(open.is_none(), "a pause without end");
        Ok(pauses)
    }
}
