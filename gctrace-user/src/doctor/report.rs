//! The findings of doctor: the data behind both output formats.

use std::path::PathBuf;

use crate::{
    discover::{Denied, Miss, Subject},
    preflight,
    ruby::fallback::Method,
};

/// All findings.
#[derive(Debug)]
pub struct Report {
    /// The host.
    pub host: HostReport,
    /// The images.
    pub images: Vec<ImageReport>,
    /// The processes.
    pub processes: Vec<ProcessReport>,
    /// Named subjects that are not Ruby, or cannot be inspected.
    pub misses: Vec<Miss>,
    /// Processes that could not be inspected.
    pub denied: Vec<Denied>,
    /// The summary.
    pub summary: Summary,
}

/// The host.
#[derive(Debug)]
pub struct HostReport {
    /// Its name.
    pub hostname: String,
    /// Kernel release.
    pub kernel: String,
    /// Processor architecture.
    pub machine: String,
    /// Effective user of gctrace.
    pub uid: u32,
    /// The checks, in the order of the report.
    pub checks: Vec<HostCheck>,
    /// Number of instructions that the verifier walked for each program, of at most a million; empty before Linux 5.16.
    pub verified: Vec<(String, u32)>,
}

/// One check of the host.
#[derive(Debug, PartialEq, Eq)]
pub struct HostCheck {
    /// Stable name.
    pub name: String,
    /// Outcome.
    pub status: Status,
    /// What was found, or why it was not checked.
    pub detail: String,
    /// What to do about it.
    pub remedy: Option<String>,
}

/// Outcome of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Status {
    /// As required.
    Ok,
    /// A fact that does not matter to gctrace.
    Info,
    /// It could not be checked.
    Unknown,
    /// gctrace works, but with restrictions.
    Limited,
    /// gctrace does not work.
    Missing,
}

impl Status {
    /// The name in JSON output.
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

/// How reliable the reading of an image is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Confidence {
    /// Known from the file's own symbols or debug information.
    Exact,
    /// Derived from the machine code, and every check passed.
    Proven,
    /// The layout is that of the usual build of this release.
    Table,
    /// A part of it is unknown.
    Partial,
    /// Not traced.
    None,
}

impl Confidence {
    /// Its name.
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
    /// Version as stated in the file.
    pub version: Option<String>,
    /// The output of `ruby -v`.
    pub description: Option<String>,
    /// Build id, hexadecimal.
    pub build_id: Option<String>,
    /// How reliable its reading is, and the reason.
    pub confidence: (Confidence, String),
    /// How its GC work is traced; `None`: not at all.
    pub method: Option<Method>,
    /// How it is traced by its event sites.
    pub tracing: Option<Tracing>,
    /// If fallback probes are used: their number, and how many of them the kernel single-steps.
    pub fallback: Option<(usize, usize)>,
    /// Why it is not traced by its event sites.
    pub refused: Option<Refused>,
    /// The features, with what they lack.
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

    /// Whether the image is relevant: it runs, or it was named.
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
    /// Source of the symbols that confirm the sites.
    pub symbols_from: Option<String>,
    /// The acceptance checks: name, and `None` if passed, otherwise the reason why the check does not apply.
    pub checks: Vec<(String, Option<String>)>,
    /// How the layout is known.
    pub layout: String,
    /// The `GC.stat` keys.
    pub stat_keys: Vec<KeySource>,
    /// Whether the analysis came from the cache.
    pub cached: bool,
    /// Duration of the analysis, microseconds.
    pub took_us: u128,
}

/// A `GC.stat` key that is read.
#[derive(Debug, PartialEq, Eq)]
pub struct KeySource {
    /// Its name.
    pub name: &'static str,
    /// How the location of its value is known: `table and code`, `table` or `code`.
    pub known_by: &'static str,
}

/// The sites of one event.
#[derive(Debug, PartialEq, Eq)]
pub struct SiteCount {
    /// Name of the event.
    pub event: &'static str,
    /// Jumps found from the hook call behind the test.
    pub guard: usize,
    /// Jumps found by the test alone.
    pub scan: usize,
    /// Calls of a function that contains the test.
    pub call: usize,
    /// Of all these, sites where a register holds the objspace.
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

/// A feature of gctrace.
#[derive(Debug)]
pub struct Feature {
    /// Stable name.
    pub name: &'static str,
    /// What is missing, and the remedy; `None` if the feature works.
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
    /// Outcome of the live check.
    pub proof: Proof,
}

impl ProcessReport {
    /// Whether a run would trace it with all features. `image` is its image.
    pub fn works(&self, image: &ImageReport) -> bool {
        image.works() && !matches!(self.proof, Proof::Failed(_) | Proof::NotTried)
    }
}

/// Outcome of the live check of a process.
#[derive(Debug, PartialEq, Eq)]
pub enum Proof {
    /// It passed; some values that were read.
    Passed {
        /// `GC.count`
        count: u64,
        /// `heap_live_slots`, if it can be read outside an event.
        live_slots: Option<u64>,
        /// `heap_available_slots`
        available_slots: Option<u64>,
    },
    /// It is deferred to the first GC; the reason why.
    Later(&'static str),
    /// Memory could not be read.
    Unreadable(String),
    /// It failed: a run reports nothing of this process.
    Failed(String),
    /// The image is not traced by its event sites, so nothing of the VM is read.
    NotTried,
}

/// Which processes were inspected, besides those that were named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Looked {
    /// Their number.
    pub at: usize,
    /// Number of them that could not be inspected.
    pub denied: usize,
    /// Whether all processes were searched for those that run an image.
    pub searched: bool,
}

impl Looked {
    /// Returns `found`, the number of processes found; `None` if none was found and others may exist: not all could be searched.
    pub fn known(self, found: usize) -> Option<usize> {
        (found > 0 || self.searched && self.denied == 0).then_some(found)
    }

    /// The text for an image of which no process was found.
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

/// The summary.
#[derive(Debug, PartialEq, Eq)]
pub struct Summary {
    /// Images found.
    pub images: usize,
    /// Images that are traced with all features.
    pub images_working: usize,
    /// Images whose analysis came from the cache.
    pub images_cached: usize,
    /// Processes found.
    pub processes: usize,
    /// Processes that would be traced with all features.
    pub processes_working: usize,
    /// Named subjects that are not Ruby, or cannot be inspected.
    pub misses: usize,
    /// Which processes were inspected.
    pub looked: Looked,
    /// Whether a run could start.
    pub host_ready: bool,
    /// The exit status; see docs/doctor.md.
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

/// The subject of a miss as text.
pub(super) fn subject(subject: &Subject) -> String {
    match subject {
        Subject::Pid(pid) => format!("pid {pid}"),
        Subject::File(path) => path.display().to_string(),
        Subject::Sought(flags) => flags.clone(),
    }
}

/// A reason for which a failed attempt says nothing about the kernel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Untried {
    /// The reason.
    pub(super) why: &'static str,
    /// What to do first.
    pub(super) first: &'static str,
    /// Whether the error is shown: without a file system it only repeats the reason, or guesses at another one.
    pub(super) tells: bool,
}

/// Why failed attempts say nothing about the kernel; `None`: they do.
pub(super) fn untried() -> Option<Untried> {
    if preflight::user_namespace().is_err() {
        return Some(Untried {
            why: "in a user namespace",
            first: "run gctrace doctor on the host",
            tells: true,
        });
    }
    if preflight::privileges().is_err() {
        return Some(Untried {
            why: "for lack of privilege",
            first: "run gctrace doctor with sudo",
            tells: true,
        });
    }
    if preflight::proc().is_err() {
        return Some(Untried { why: "without /proc", first: preflight::MOUNT_PROC, tells: false });
    }
    preflight::sys().is_err().then_some(Untried {
        why: "without /sys",
        first: preflight::MOUNT_SYS,
        tells: false,
    })
}
