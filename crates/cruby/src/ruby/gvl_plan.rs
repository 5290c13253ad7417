//! How the GVL of an image is observed: which of the sites are probed, and how threads and their GVL are identified there.

use gctrace_common::{
    config::StackPath,
    gvl::{FutexPath, GvlPath, GvlPoint},
};

use super::{
    GvlEvent, Outcome, RubyAnalysis, RubyVersion, ThreadEvent, ThreadOperand,
    tables::{self, Table},
};
use crate::{
    address::{FileOffset, Svma},
    elf::{LoadSegment, Machine, code_offset},
};

/// What is observed of the GVL in an image, besides waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own about what is seen")]
pub struct GvlCoverage {
    /// Times with and without the GVL: no thread can release it unobserved (in 3.2 threads can).
    pub holds: bool,
    /// The ends of threads (from 3.2 on). Without them a thread's life is reported up to the last time that it was seen to release
    /// the GVL.
    pub ends: bool,
    /// Only waits for which a thread had to block are seen (futexes are observed instead of the program).
    pub only_blocked: bool,
    /// Waits of threads that another thread woke are seen: from a `Queue`, a `Mutex`, a `join`.
    pub woken: bool,
}

impl GvlCoverage {
    /// What is missing, as text for people; empty if nothing is missing.
    pub fn lacks(self) -> &'static str {
        match (self.only_blocked, self.woken, self.holds) {
            (true, true, _) => "only waits for which a thread had to block (--gvl=futex), and no holds",
            (true, false, _) => {
                "only waits for which a thread had to block (--gvl=futex), not those of threads that another one wakes (Queue, Mutex, join, wakeup), and no holds"
            }
            (false, _, false) => {
                "only waits: the yields of Ruby 3.2 have no event, so how long it is held is not known"
            }
            (false, ..) => "",
        }
    }
}

/// An instruction to be probed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GvlProbe {
    /// What happens there.
    pub point: GvlPoint,
    /// Stated address.
    pub address: Svma,
    /// File offset of that address.
    pub file_offset: FileOffset,
    /// Where the thread pointer is; `None` for the running thread.
    pub place: Option<ThreadOperand>,
    /// Whether it probes the return of the function that starts there. Only up to 3.1: from 3.3 on a thread may return
    /// on another native thread, and the kernel's return probes would crash the program.
    pub at_return: bool,
}

/// How the GVL of an image is observed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GvlPlan {
    /// How threads and their GVL are identified.
    pub path: GvlPath,
    /// The probes.
    pub probes: Vec<GvlProbe>,
    /// Which parts are observed.
    pub coverage: GvlCoverage,
}

/// Why the GVL is not observed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoGvl {
    /// The sites are searched for in x86-64 code only.
    #[error("the GVL is watched on x86-64 only")]
    Machine,
    /// A GC library: threads are in the Ruby that has loaded it.
    #[error(
        "the process runs a GC library (RUBY_GC_LIBRARY), and the GVL is watched only with the compiled-in GC"
    )]
    GcLibrary,
    /// Not all sites were found.
    #[error("not all places where threads wait for the GVL were found: {0}")]
    Sites(String),
    /// The thread of a site is not known.
    #[error("the thread of the site at {0} was not found")]
    Thread(Svma),
    /// The Ractor of a thread is not known.
    #[error("the layout of rb_thread_t in CRuby {0} is not known")]
    Layout(RubyVersion),
    /// The place where threads wait is not known.
    #[error("it is unknown where the threads of CRuby {0} wait for the GVL: its layout table has no `{1}`")]
    Member(RubyVersion, &'static str),
    /// Condition variables of another libc.
    #[error("its libc is not glibc, whose condition variables show which thread waits")]
    Libc,
    /// The running thread cannot be identified.
    #[error("the running thread cannot be identified: its Ruby stacks cannot be read either")]
    Context,
    /// A site is not in an executable segment of the file.
    #[error("the place at {0} is not inside an executable segment")]
    NotExecutable(Svma),
}

/// Whether it is Ruby 3.2, whose `thread_sched_yield` releases the GVL without an event, and whose hooks do not receive the thread.
fn is_first_with_events(version: RubyVersion) -> bool {
    version.at_least(3, 2) && !version.at_least(3, 3)
}

/// Decides how the GVL of an image is observed. `stack` is how its stacks are walked.
pub fn plan(
    segments: &[LoadSegment],
    analysis: &RubyAnalysis,
    own: Option<&Table>,
    stack: &StackPath,
) -> Result<GvlPlan, NoGvl> {
    let version = analysis.version;
    if analysis.machine != Machine::X86_64 {
        return Err(NoGvl::Machine);
    }
    if analysis.vm.anchor.is_some() {
        return Err(NoGvl::GcLibrary);
    }
    let probe = |point, address, place, at_return| {
        let file_offset = code_offset(segments, address).ok_or(NoGvl::NotExecutable(address))?;
        Ok(GvlProbe { point, address, file_offset, place, at_return })
    };
    if !version.at_least(3, 2) {
        passed(&analysis.gvl.outcome)?;
        let sites = analysis.gvl.sites.iter();
        let of = |event| sites.clone().filter(move |site| site.event == event).map(|site| site.address);
        // The return itself of the acquiring function is probed: not all of its returning instructions are emulated.
        let waits = of(GvlEvent::Wait).map(|address| (GvlPoint::Ready, address, false));
        let returns = of(GvlEvent::Wait).map(|address| (GvlPoint::Resumed, address, true));
        let releases = of(GvlEvent::Release).map(|address| (GvlPoint::Suspended, address, false));
        let all = returns.chain(waits).chain(releases);
        let probes = all.map(|(point, address, at_return)| probe(point, address, None, at_return));
        let path = GvlPath { by: GvlPath::BY_TID, ..GvlPath::default() };
        let coverage = GvlCoverage { holds: true, woken: true, ..GvlCoverage::default() };
        return Ok(GvlPlan { path, probes: probes.collect::<Result<_, _>>()?, coverage });
    }
    passed(&analysis.thread.outcome)?;
    let thread_ractor = ractor_offset(analysis, own).ok_or(NoGvl::Layout(version))?;
    let by_tid = is_first_with_events(version);
    if by_tid && stack.place == StackPath::NONE {
        return Err(NoGvl::Context);
    }
    let probes = analysis.thread.sites.iter().map(|site| {
        let place = if by_tid { None } else { Some(site.thread.ok_or(NoGvl::Thread(site.address))?) };
        let point = match site.event {
            ThreadEvent::Started => GvlPoint::Started,
            ThreadEvent::Ready => GvlPoint::Ready,
            ThreadEvent::Resumed => GvlPoint::Resumed,
            ThreadEvent::Suspended => GvlPoint::Suspended,
            ThreadEvent::Exited => GvlPoint::Exited,
        };
        probe(point, site.address, place, false)
    });
    let by = if by_tid { GvlPath::BY_TID } else { GvlPath::BY_THREAD };
    let path = GvlPath { by, thread_ractor, ..GvlPath::default() };
    let coverage = GvlCoverage { holds: !by_tid, ends: true, woken: true, only_blocked: false };
    Ok(GvlPlan { path, probes: probes.collect::<Result<_, _>>()?, coverage })
}

/// Size of an entry of glibc's dynamic thread vector, bytes.
pub(super) const GLIBC_DTV_ENTRY: u32 = 16;

/// Decides how waits are identified by futexes alone.
///
/// A wrong offset cannot produce a wait: the kernel side treats a futex call as one only if the thread's own memory, found
/// by these offsets, leads back to the thread.
pub fn futex_plan(analysis: &RubyAnalysis, own: Option<&Table>, stack: &StackPath) -> Result<GvlPlan, NoGvl> {
    let version = analysis.version;
    if analysis.vm.anchor.is_some() {
        return Err(NoGvl::GcLibrary);
    }
    // With musl's condition variables, waiters wait on their own stacks.
    if analysis.derived.ec.dtv_entry != GLIBC_DTV_ENTRY {
        return Err(NoGvl::Libc);
    }
    let table = own.or_else(|| Table::of(version).ok());
    if table.is_none() && !tables::knows_series(version) {
        return Err(NoGvl::Layout(version));
    }
    if stack.place == StackPath::NONE {
        return Err(NoGvl::Context);
    }
    let futex = futex_path(version, table)?;
    let path = GvlPath { by: GvlPath::BY_FUTEX, futex, ..GvlPath::default() };
    let coverage =
        GvlCoverage { holds: false, ends: true, only_blocked: true, woken: !version.at_least(3, 3) };
    Ok(GvlPlan { path, probes: Vec::new(), coverage })
}

/// Where threads wait for the GVL.
pub(super) fn futex_path(version: RubyVersion, table: Option<&Table>) -> Result<FutexPath, NoGvl> {
    let offset = |tag: &'static str, name: &'static str| {
        let own = table.and_then(|table| table.structure(tag)?.field(name));
        let field = own.or_else(|| tables::newest_structure(version, tag)?.field(name));
        field.map(|field| field.offset).ok_or(NoGvl::Member(version, name))
    };
    let thread = |name| offset("rb_thread_struct", name);
    let mut futex = FutexPath::default();
    if version.at_least(3, 2) {
        futex.native = thread("nt")?;
        futex.cond = offset("rb_native_thread", "cond.readyq")?;
    } else {
        futex.cond = thread("native_thread_data.cond.gvlq")?;
        futex.thread_id = thread("thread_id")?;
    }
    if version.at_least(3, 3) {
        futex.ready = thread("sched.node.readyq")?;
    } else {
        futex.unblock = thread("unblock.func")?;
        (futex.owner_in, futex.owner) = match (version.at_least(3, 2), version.at_least(3, 0)) {
            (true, _) => (thread("ractor")?, offset("rb_ractor_struct", "threads.sched.running")?),
            (_, true) => (thread("ractor")?, offset("rb_ractor_struct", "threads.gvl.owner")?),
            _ => (thread("vm")?, offset("rb_vm_struct", "gvl.owner")?),
        };
    }
    Ok(futex)
}

fn passed(outcome: &Outcome) -> Result<(), NoGvl> {
    match outcome {
        Outcome::Passed => Ok(()),
        Outcome::Failed(reason) | Outcome::NotApplicable(reason) => Err(NoGvl::Sites(reason.clone())),
    }
}

/// Byte offset of `ractor` in `rb_thread_t`, which is the same in all releases of a series. In a series without a table the code shows
/// it: from 4.0 on `GC.stat` goes through it. (If both have it, they agree, or the image is refused.)
fn ractor_offset(analysis: &RubyAnalysis, own: Option<&Table>) -> Option<u32> {
    const TAG: &str = "rb_thread_struct";
    let version = analysis.version;
    let table = own.or_else(|| Table::of(version).ok());
    let structure = table.and_then(|table| table.structure(TAG));
    let structure = structure.or_else(|| tables::newest_structure(version, TAG));
    let offset = match structure {
        Some(structure) => structure.field("ractor").map(|field| field.offset),
        None => analysis.derived.thread.as_ref().ok().map(|thread| thread.thread_ractor),
    };
    offset.filter(|&offset| offset > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        debian::{libruby_analysis, libruby_image},
        ruby::derive::ThreadLayout,
    };

    /// Every release whose threads are identified by their address has the offset of their Ractor.
    #[test]
    fn ractors() {
        let mut analysis = libruby_analysis().clone();
        for table in tables::tables() {
            let (major, minor, teeny) = table.to;
            let version = RubyVersion::new(major, minor, teeny);
            analysis.version = version;
            assert_eq!(ractor_offset(&analysis, None).is_some(), version.at_least(3, 0), "{version}");
        }
    }

    /// For a release of a series without a table, it comes from the code of the image, or it is unknown. Without any probe, more
    /// offsets would have to be known.
    #[test]
    fn ractors_of_a_new_series() {
        let mut analysis = libruby_analysis().clone();
        analysis.version = RubyVersion::new(9, 1, 0);
        assert_eq!(ractor_offset(&analysis, None), None);
        analysis.derived.thread = Ok(ThreadLayout {
            module: Some(Svma(0x1000)),
            ec: 8,
            local: 16,
            ec_thread: 0x30,
            thread_ractor: 0x18,
            ractor_cache: 0x140,
            dtv_entry: GLIBC_DTV_ENTRY,
            local_module: None,
        });
        assert_eq!(ractor_offset(&analysis, None), Some(0x18));
        let stack = StackPath { place: StackPath::GLOBAL, ..StackPath::default() };
        assert_eq!(futex_plan(&analysis, None, &stack), Err(NoGvl::Layout(analysis.version)));
    }

    /// Every release with a table has the members that identify its waits by futexes.
    #[test]
    fn futexes() {
        let mut analysis = libruby_analysis().clone();
        let stack = StackPath { place: StackPath::GLOBAL, ..StackPath::default() };
        for table in tables::tables() {
            let (major, minor, teeny) = table.to;
            analysis.version = RubyVersion::new(major, minor, teeny);
            let plan = futex_plan(&analysis, None, &stack).unwrap();
            let futex = plan.path.futex;
            assert!(plan.probes.is_empty() && !plan.coverage.holds);
            assert_eq!(futex.ready != 0, analysis.version.at_least(3, 3), "{futex:?}");
            assert_eq!(futex.unblock != 0 && futex.owner_in != 0, futex.ready == 0, "{futex:?}");
            assert_eq!(futex.native != 0, futex.thread_id == 0, "{futex:?}");
        }
        assert_eq!(futex_plan(&analysis, None, &StackPath::default()), Err(NoGvl::Context));
        analysis.derived.ec.dtv_entry = 8;
        assert_eq!(futex_plan(&analysis, None, &stack), Err(NoGvl::Libc));
    }

    /// Up to 3.1 a thread waits from the entry of one function to its return, and releases the GVL in many places.
    #[test]
    fn before_the_events() {
        let image = libruby_image();
        let plan = plan(image.segments(), libruby_analysis(), None, &StackPath::default()).unwrap();
        let of = |point| plan.probes.iter().filter(move |probe| probe.point == point).collect::<Vec<_>>();
        let (ready, resumed) = (of(GvlPoint::Ready), of(GvlPoint::Resumed));
        assert_eq!((ready.len(), resumed.len()), (1, 1));
        assert_eq!(ready[0].address, resumed[0].address);
        assert!(!ready[0].at_return && resumed[0].at_return);
        assert!(of(GvlPoint::Suspended).len() >= 4);
        assert_eq!(plan.coverage, GvlCoverage { holds: true, woken: true, ..GvlCoverage::default() });
        assert_eq!(plan.path, GvlPath { by: GvlPath::BY_TID, ..GvlPath::default() });
    }
}
