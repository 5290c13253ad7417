//! What doctor found: the data behind both output formats.

use std::path::PathBuf;

use crate::{
    discover::{Denied, Miss, Subject},
    preflight,
    ruby::fallback::Method,
};

/// Everything.
#[derive(Debug)]
pub struct Report {
    /// The host.
    pub host: HostReport,
    /// The images.
    pub images: Vec<ImageReport>,
    /// The processes.
    pub processes: Vec<ProcessReport>,
    /// What was named and is no Ruby, or cannot be inspected.
    pub misses: Vec<Miss>,
    /// Processes that could not be looked at.
    pub denied: Vec<Denied>,
    /// The sum.
    pub summary: Summary,
}

/// The host.
#[derive(Debug)]
pub struct HostReport {
    /// Its name.
    pub hostname: String,
    /// Release of the kernel.
    pub kernel: String,
    /// Processor architecture.
    pub machine: String,
    /// Effective user of gctrace.
    pub uid: u32,
    /// The checks, in the order in which they are reported.
    pub checks: Vec<HostCheck>,
    /// How many instructions the verifier walked for each program, of a million at most; empty before Linux 5.16.
    pub verified: Vec<(String, u32)>,
}

/// One check of the host.
#[derive(Debug, PartialEq, Eq)]
pub struct HostCheck {
    /// Stable name.
    pub name: String,
    /// Outcome.
    pub status: Status,
    /// What was found, or why it was not looked at.
    pub detail: String,
    /// What to do.
    pub remedy: Option<String>,
}

/// Outcome of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Status {
    /// As needed.
    Ok,
    /// A fact that changes nothing.
    Info,
    /// Could not be checked.
    Unknown,
    /// gctrace works, with less.
    Limited,
    /// gctrace does not work.
    Missing,
}

impl Status {
    /// The word on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Info => "info",
            Self::Unknown => "unknown",
            Self::Limited => "limited",
            Self::Missing => "missing",
        }
    }
}

/// How sure the way to read an image is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Confidence {
    /// Said by the file's own symbols or debug information.
    Exact,
    /// Derived from the machine code, and every check passed.
    Proven,
    /// The layout is that of this release as it is usually built.
    Table,
    /// Some of it is not known.
    Partial,
    /// Not traced.
    None,
}

impl Confidence {
    /// The word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Proven => "proven",
            Self::Table => "table",
            Self::Partial => "partial",
            Self::None => "none",
        }
    }
}

/// A Ruby image.
#[derive(Debug)]
pub struct ImageReport {
    /// Its path.
    pub path: PathBuf,
    /// Version, as the file says.
    pub version: Option<String>,
    /// What `ruby -v` prints.
    pub description: Option<String>,
    /// Build id, hexadecimal.
    pub build_id: Option<String>,
    /// How sure its reading is, and what that rests on.
    pub confidence: (Confidence, String),
    /// How its GC work is seen; `None`: it is not traced.
    pub method: Option<Method>,
    /// How it is traced by its event sites.
    pub tracing: Option<Tracing>,
    /// With fallback probes: their number, and how many of them the kernel single-steps.
    pub fallback: Option<(usize, usize)>,
    /// Why it is not traced by its event sites.
    pub refused: Option<Refused>,
    /// What works.
    pub features: Vec<Feature>,
    /// Number of processes that run it.
    pub processes: usize,
    /// Whether the user named it.
    pub named: bool,
}

impl ImageReport {
    /// Whether it is traced and every feature works.
    pub fn works(&self) -> bool {
        self.tracing.is_some() && self.features.iter().all(|feature| feature.lack.is_none())
    }

    /// Whether anybody cares: it runs, or it was named.
    pub fn matters(&self) -> bool {
        self.named || self.processes > 0
    }
}

/// How an image is traced.
#[derive(Debug)]
pub struct Tracing {
    /// Sites by event.
    pub sites: Vec<SiteCount>,
    /// Sites on instructions that the kernel single-steps.
    pub slow_sites: usize,
    /// Whether the file has a symbol table.
    pub symbols: bool,
    /// Where the symbols come from that confirm the sites.
    pub symbols_from: Option<String>,
    /// The acceptance checks: name, and `None` for passed or else the reason why it does not apply.
    pub checks: Vec<(String, Option<String>)>,
    /// How the layout is known.
    pub layout: String,
    /// The `GC.stat` keys.
    pub stat_keys: Vec<KeySource>,
    /// Whether the analysis came from the cache.
    pub cached: bool,
    /// How long it took, microseconds.
    pub took_us: u128,
}

/// A `GC.stat` key that is read.
#[derive(Debug, PartialEq, Eq)]
pub struct KeySource {
    /// Its name.
    pub name: &'static str,
    /// By what it is known where its value lies: `table`.
    pub known_by: &'static str,
}

/// The sites of one event.
#[derive(Debug, PartialEq, Eq)]
pub struct SiteCount {
    /// Name of the event.
    pub event: &'static str,
    /// Found from the hook call behind the test.
    pub guard: usize,
    /// Found by the test alone.
    pub scan: usize,
    /// Calls that test inside.
    pub call: usize,
    /// Of all, those where a register holds the objspace.
    pub with_register: usize,
}

impl SiteCount {
    /// All sites of the event.
    pub fn total(&self) -> usize {
        self.guard + self.scan + self.call
    }
}

/// Why an image is not traced.
#[derive(Debug)]
pub struct Refused {
    /// The reason, naming the check that failed.
    pub reason: String,
    /// What to do.
    pub remedy: String,
}

/// Something that gctrace does.
#[derive(Debug)]
pub struct Feature {
    /// Stable name.
    pub name: &'static str,
    /// What is missing, and what to do; `None` if it works.
    pub lack: Option<(String, String)>,
}

/// A Ruby process.
#[derive(Debug)]
pub struct ProcessReport {
    /// Pid.
    pub pid: u32,
    /// Index of its image.
    pub image: usize,
    /// Its command line.
    pub command: Option<String>,
    /// The live proof.
    pub proof: Proof,
}

impl ProcessReport {
    /// Whether a run would trace it with all features; `image` is its image.
    pub fn works(&self, image: &ImageReport) -> bool {
        image.works() && !matches!(self.proof, Proof::Failed(_) | Proof::NotTried)
    }
}

/// Outcome of the live proof.
#[derive(Debug, PartialEq, Eq)]
pub enum Proof {
    /// It holds; some values that were read.
    Passed {
        /// `GC.count`
        count: u64,
        /// `heap_live_slots`, where it can be read outside an event.
        live_slots: Option<u64>,
        /// `heap_available_slots`
        available_slots: Option<u64>,
    },
    /// It will be made at the first GC, and why not now.
    Later(&'static str),
    /// Memory could not be read.
    Unreadable(String),
    /// It failed: nothing of this process is reported.
    Failed(String),
    /// The image is not traced by its event sites, so that nothing of the VM is read.
    NotTried,
}

/// Which processes were looked at, besides those that were named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Looked {
    /// How many.
    pub at: usize,
    /// How many of them could not be inspected.
    pub denied: usize,
    /// Whether all were looked for that run an image.
    pub searched: bool,
}

impl Looked {
    /// How many processes there are, of which so many were found; `None`: that none was found means nothing.
    pub fn known(self, found: usize) -> Option<usize> {
        (found > 0 || self.searched && self.denied == 0).then_some(found)
    }

    /// What is said where none was found.
    pub fn none(self) -> String {
        match self.denied {
            _ if !self.searched => "not looked for".to_owned(),
            0 => "no process runs it now".to_owned(),
            denied => {
                format!("none seen; {denied} of {} processes cannot be inspected", self.at)
            }
        }
    }
}

/// The sum.
#[derive(Debug, PartialEq, Eq)]
pub struct Summary {
    /// Images found.
    pub images: usize,
    /// Those traced with all features.
    pub images_working: usize,
    /// Those whose analysis came from the cache.
    pub images_cached: usize,
    /// Processes found.
    pub processes: usize,
    /// Those that would be traced with all features.
    pub processes_working: usize,
    /// Named things that are no Ruby, or cannot be inspected.
    pub misses: usize,
    /// Which processes were looked at.
    pub looked: Looked,
    /// Whether a run could start.
    pub host_ready: bool,
    /// See the documentation of the command.
    pub exit_status: u8,
}

impl Summary {
    pub(super) fn of(
        host: &HostReport,
        images: &[ImageReport],
        processes: &[ProcessReport],
        misses: &[Miss],
        looked: Looked,
    ) -> Self {
        let processes_working = processes.iter().filter(|p| p.works(&images[p.image])).count();
        let host_ready = host.checks.iter().all(|check| check.status != Status::Missing);
        let broken = images.iter().any(|image| image.matters() && !image.works())
            || processes_working < processes.len()
            || misses.iter().any(|miss| miss.denied);
        let exit_status = if !host_ready {
            3
        } else if broken {
            2
        } else {
            u8::from(images.is_empty() || !misses.is_empty())
        };
        Self {
            images: images.len(),
            images_working: images.iter().filter(|image| image.works()).count(),
            images_cached: images.iter().filter(|i| i.tracing.as_ref().is_some_and(|t| t.cached)).count(),
            processes: processes.len(),
            processes_working,
            misses: misses.len(),
            looked,
            host_ready,
            exit_status,
        }
    }
}

/// What a miss is about, in words.
pub(super) fn subject(subject: &Subject) -> String {
    match subject {
        Subject::Pid(pid) => format!("pid {pid}"),
        Subject::File(path) => path.display().to_string(),
    }
}

/// Whether gctrace lacks privileges, so that a failed attempt says nothing about the kernel.
pub(super) fn unprivileged() -> bool {
    preflight::privileges().is_err()
}
