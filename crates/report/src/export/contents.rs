//! The contents of a recording, as text and as one JSON document.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    io::{self, Write},
    rc::Rc,
};

use gctrace_tunemygc::printable::printable_json;
use serde::Serialize;

use super::{
    ExportError, Exporter,
    place::{clip, program},
};
use crate::{
    clock::WallClock,
    diff::Looked,
    ledger::Ledger,
    model::{Process, gvl::GvlGap, seen::Seen},
    words::{data_size, date_time, plural},
};

/// Maximum number of processes listed in text.
const PROCESSES: usize = 20;
/// Maximum number of processes kept.
const MOST: usize = 10_000;

/// What is known about the file apart from its entries.
#[derive(Clone, Debug)]
pub struct Found {
    /// Its name.
    pub file: String,
    /// Its length in bytes, if it is a regular file.
    pub size: Option<u64>,
    /// Version of the format.
    pub format: u32,
    /// Version of the gctrace that wrote it.
    pub gctrace: String,
    /// Its clock.
    pub clock: WallClock,
    /// When recording began, `CLOCK_MONOTONIC` nanoseconds.
    pub begun_ns: u64,
    /// If a flight recorder wrote it: why and when (`CLOCK_MONOTONIC` nanoseconds).
    pub dump: Option<(String, u64)>,
    /// What was recorded.
    pub looked: Looked,
    /// Name of its host.
    pub host: Option<String>,
    /// Its kernel.
    pub kernel: Option<String>,
    /// Its processor architecture.
    pub machine: Option<String>,
    /// Number of its CPUs.
    pub cpus: Option<u32>,
    /// Number of complete chunks.
    pub chunks: u64,
    /// Stored bytes up to the end of the last complete chunk.
    pub stored: u64,
    /// Uncompressed bytes of the chunks.
    pub expanded: u64,
    /// How it ends.
    pub end: End,
}

/// How a recording ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// It ends with its last chunk.
    Complete,
    /// It was cut off. The value is the number of bytes of the incomplete chunk at the end.
    CutOff(u64),
    /// It is damaged from some position on.
    Damaged(String),
    /// From some position on it has something that a later gctrace records.
    Unknown(String),
}

#[derive(Debug)]
struct OneProcess {
    pid: u32,
    program: String,
    ruby: String,
    first_ns: u64,
    ended: Option<(u64, &'static str)>,
}

/// Counters.
#[derive(Debug, Default)]
struct Counted {
    kinds: BTreeMap<&'static str, u64>,
    processes: Vec<OneProcess>,
    more_processes: u64,
    current: BTreeMap<u32, usize>,
    hosts: BTreeSet<String>,
    began_ns: Option<u64>,
    last_ns: u64,
    /// The last gap, which the next one may continue.
    gap: Option<GvlGap>,
    ledger: Ledger,
}

/// Counts what is replayed.
#[derive(Clone, Debug, Default)]
pub struct Contents(Rc<RefCell<Counted>>);

impl Exporter for Contents {
    fn see(&mut self, process: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        let mut counted = self.0.borrow_mut();
        *counted.kinds.entry(seen.plural()).or_default() += 1;
        match seen {
            Seen::Process { now_ns, .. } => counted.process(process, now_ns),
            Seen::Ended(end) => {
                if let Some(at) = counted.current.remove(&process.pid) {
                    counted.processes[at].ended = Some((end.ts_ns, end.reason.name()));
                    counted.processes[at].first_ns = end.since_ns;
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn refused(&mut self, _: Option<u32>, _: &str, _: &str) -> Result<(), ExportError> {
        *self.0.borrow_mut().kinds.entry("refusals").or_default() += 1;
        Ok(())
    }

    fn gvl_gap(&mut self, gap: GvlGap) {
        let mut counted = self.0.borrow_mut();
        let before = counted.gap.replace(gap);
        let continues = |before: GvlGap| before.to_ns == gap.from_ns && before.summed == gap.summed;
        if !before.is_some_and(continues) {
            *counted.kinds.entry("gaps in GVL waits").or_default() += 1;
        }
    }

    fn began(&mut self, ts_ns: u64) {
        self.0.borrow_mut().began_ns.get_or_insert(ts_ns);
    }

    fn closed(&mut self, ts_ns: u64) {
        let mut counted = self.0.borrow_mut();
        counted.last_ns = counted.last_ns.max(ts_ns);
    }

    fn flush(&mut self, now_ns: u64) -> Result<(), ExportError> {
        self.closed(now_ns);
        Ok(())
    }

    fn settled(&mut self, ledger: &Ledger) -> Result<(), ExportError> {
        self.0.borrow_mut().ledger = ledger.clone();
        Ok(())
    }
}

impl Counted {
    fn process(&mut self, process: &Process, first_ns: u64) {
        self.hosts.extend(process.hostname.clone());
        if self.processes.len() >= MOST {
            self.more_processes += 1;
            return;
        }
        self.current.insert(process.pid, self.processes.len());
        self.processes.push(OneProcess {
            pid: process.pid,
            program: program(process),
            ruby: process.image.version.to_string(),
            first_ns,
            ended: None,
        });
    }
}

#[derive(Serialize)]
struct Document<'a> {
    file: &'a str,
    size: Option<u64>,
    format: u32,
    gctrace: &'a str,
    host: Option<&'a str>,
    kernel: Option<&'a str>,
    machine: Option<&'a str>,
    cpus: Option<u32>,
    begun_ts: f64,
    dump: Option<DumpLine<'a>>,
    /// The time from which everything was traced.
    complete_from_ts: Option<f64>,
    seconds: f64,
    recorded: Vec<&'static str>,
    /// `complete`, `cut off` or `damaged`.
    end: &'static str,
    unread_bytes: Option<u64>,
    damage: Option<&'a str>,
    chunks: u64,
    stored_bytes: u64,
    expanded_bytes: u64,
    entries: &'a BTreeMap<&'static str, u64>,
    processes: Vec<ProcessLine<'a>>,
    more_processes: u64,
    lost: u64,
    account: String,
    kernel_counters: BTreeMap<&'static str, u64>,
    user_counters: BTreeMap<&'static str, u64>,
}

#[derive(Serialize)]
struct DumpLine<'a> {
    at_ts: f64,
    why: &'a str,
}

#[derive(Serialize)]
struct ProcessLine<'a> {
    pid: u32,
    program: &'a str,
    ruby: &'a str,
    since_ts: f64,
    until_ts: Option<f64>,
    reason: Option<&'static str>,
}

/// What was recorded, by the names of the flags.
fn recorded(looked: Looked) -> Vec<&'static str> {
    let Looked { samples, wall, gvl, requests, alloc } = looked;
    let all = [(samples, "samples"), (wall, "wall"), (gvl, "gvl"), (requests, "requests"), (alloc, "alloc")];
    std::iter::once("gc").chain(all.into_iter().filter_map(|(is, name)| is.then_some(name))).collect()
}

impl Contents {
    /// The exporter to replay the recording to.
    pub fn exporter(&self) -> Box<dyn Exporter> {
        Box::new(self.clone())
    }

    fn seconds(&self, found: &Found) -> f64 {
        self.0.borrow().last_ns.saturating_sub(found.begun_ns) as f64 / 1e9
    }

    /// Writes the contents as text.
    ///
    /// # Errors
    ///
    /// Writing fails.
    pub fn write_text(&self, found: &Found, out: &mut dyn Write) -> io::Result<()> {
        let counted = self.0.borrow();
        let text =
            |text: &Option<String>| text.as_deref().map_or("not recorded".to_owned(), |text| clip(text, 80));
        let mut row = |label: &str, text: String| writeln!(out, "{label:<11}{text}");
        row("file", clip(&found.file, 200))?;
        row(
            "size",
            format!(
                "{}{} of contents in {}",
                found.size.map_or_else(String::new, |size| format!("{}, ", data_size(size))),
                data_size(found.expanded),
                plural(found.chunks, "chunk")
            ),
        )?;
        row("written by", format!("gctrace {}, format {}", clip(&found.gctrace, 40), found.format))?;
        let host = match &found.host {
            Some(host) => clip(host, 80),
            None if counted.hosts.is_empty() => "not recorded".to_owned(),
            None => clip(&counted.hosts.iter().cloned().collect::<Vec<_>>().join(", "), 80),
        };
        let cpus = found.cpus.map_or_else(String::new, |cpus| format!(", {}", plural(cpus.into(), "CPU")));
        row("host", host)?;
        let machine =
            found.machine.as_deref().map_or_else(String::new, |name| format!(" {}", clip(name, 20)));
        row("kernel", format!("{}{machine}{cpus}", text(&found.kernel)))?;
        row("begun", date_time(found.clock.epoch_seconds(found.begun_ns)))?;
        if let Some((why, at_ns)) = &found.dump {
            let at = date_time(found.clock.epoch_seconds(*at_ns));
            row("dump", format!("of a flight recorder, {at}: {}", clip(why, 200)))?;
        }
        row("duration", format!("{:.1} s", self.seconds(found)))?;
        row(
            "end",
            match &found.end {
                End::Complete => "whole".to_owned(),
                End::CutOff(0) => "cut off after a whole chunk".to_owned(),
                End::CutOff(bytes) => {
                    format!("cut off: {} of an incomplete chunk follow", plural(*bytes, "byte"))
                }
                End::Unknown(_) => format!(
                    "something of another gctrace after {}: the data below is from before that",
                    data_size(found.stored)
                ),
                End::Damaged(_) => {
                    format!("damaged after {}: the data below is from before that", data_size(found.stored))
                }
            },
        )?;
        row("recorded", recorded(found.looked).join(", "))?;
        let lost = match counted.ledger.kernel {
            None => "unknown: the recording has no account".to_owned(),
            Some(_) => counted.ledger.summary(),
        };
        row("account", lost)?;
        writeln!(out, "\nENTRIES{}", if counted.kinds.is_empty() { "  none" } else { "" })?;
        for (kind, count) in &counted.kinds {
            writeln!(out, "{count:>10}  {kind}")?;
        }
        if counted.processes.is_empty() {
            return writeln!(out, "\nNo process was recorded.");
        }
        writeln!(out, "\n{:>10}  {:<12}{:<12}{:<10}PROGRAM", "PID", "RUBY", "FROM", "TO")?;
        for process in counted.processes.iter().take(PROCESSES) {
            let after = |ns: u64| format!("{:.1} s", ns.saturating_sub(found.begun_ns) as f64 / 1e9);
            let to = process.ended.map_or_else(|| "?".to_owned(), |(ns, _)| after(ns));
            writeln!(
                out,
                "{:>10}  {:<12}{:<12}{to:<10}{}",
                process.pid,
                process.ruby,
                after(process.first_ns),
                process.program
            )?;
        }
        let more = (counted.processes.len() as u64 + counted.more_processes).saturating_sub(PROCESSES as u64);
        if more > 0 {
            writeln!(out, "{more:>10}  more; --format json has them")?;
        }
        Ok(())
    }

    /// Writes the contents as JSON.
    ///
    /// # Errors
    ///
    /// Writing fails.
    pub fn write_json(&self, found: &Found, out: &mut dyn Write) -> io::Result<()> {
        let counted = self.0.borrow();
        let epoch = |ns: u64| found.clock.epoch_seconds(ns);
        let not_zero =
            |all: Vec<(&'static str, u64)>| all.into_iter().filter(|(_, count)| *count > 0).collect();
        let processes = counted.processes.iter().map(|process| ProcessLine {
            pid: process.pid,
            program: &process.program,
            ruby: &process.ruby,
            since_ts: epoch(process.first_ns),
            until_ts: process.ended.map(|(ns, _)| epoch(ns)),
            reason: process.ended.map(|(_, reason)| reason),
        });
        let document = Document {
            file: &found.file,
            size: found.size,
            format: found.format,
            gctrace: &found.gctrace,
            host: found.host.as_deref(),
            kernel: found.kernel.as_deref(),
            machine: found.machine.as_deref(),
            cpus: found.cpus,
            begun_ts: epoch(found.begun_ns),
            dump: found.dump.as_ref().map(|(why, at_ns)| DumpLine { at_ts: epoch(*at_ns), why }),
            complete_from_ts: counted.began_ns.map(epoch),
            seconds: self.seconds(found),
            recorded: recorded(found.looked),
            end: match found.end {
                End::Complete => "complete",
                End::CutOff(_) => "cut off",
                End::Damaged(_) => "damaged",
                End::Unknown(_) => "not known",
            },
            unread_bytes: match found.end {
                End::CutOff(bytes) => Some(bytes),
                _ => None,
            },
            damage: match &found.end {
                End::Damaged(why) | End::Unknown(why) => Some(why),
                _ => None,
            },
            chunks: found.chunks,
            stored_bytes: found.stored,
            expanded_bytes: found.expanded,
            entries: &counted.kinds,
            processes: processes.collect(),
            more_processes: counted.more_processes,
            lost: counted.ledger.lost(),
            account: counted.ledger.summary(),
            kernel_counters: not_zero(counted.ledger.kernel_counters()),
            user_counters: not_zero(counted.ledger.user_counters()),
        };
        let text = serde_json::to_string_pretty(&document).map_err(io::Error::from)?;
        writeln!(out, "{}", printable_json(&text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A recording without entries has no tables.
    #[test]
    fn nothing_recorded() {
        let found = Found {
            file: "x.gctrace".to_owned(),
            size: None,
            format: 1,
            gctrace: "1".to_owned(),
            host: None,
            kernel: None,
            machine: None,
            cpus: None,
            clock: WallClock::with_offsets(0, 0),
            begun_ns: 0,
            dump: None,
            looked: Looked::default(),
            chunks: 0,
            stored: 0,
            expanded: 0,
            end: End::CutOff(0),
        };
        let mut out = Vec::new();
        Contents::default().write_text(&found, &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.ends_with("\nENTRIES  none\n\nNo process was recorded.\n"), "{text}");
    }
}
