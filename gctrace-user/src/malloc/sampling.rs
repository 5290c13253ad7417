//! The stacks of some calls: named as they arrive, summed up by allocation site, and looked up again at the end for the memory that is left.

use std::{
    collections::HashMap,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use gctrace_common::malloc::{MallocBlock, malloc_stands_for, malloc_threshold};

use super::{failure::MallocFailure, site::Site};
use crate::{
    aggregate::{
        estimate::CallsAndBytes,
        recording::{MallocCall, MallocKey},
    },
    bpf::MallocProbes,
    clock::{WallClock, monotonic_ns},
    discover::site_image,
    export::profile::MallocProfile,
    heap::Target,
    host::{environ::Environment, names::Names, proc::describe, proc_root},
    images::{GcOf, Images, KnownImage},
    model::Process,
    native::Tables,
    stacks::{Finished, Reader, Record, StackOf, Stacks},
};

/// Interval at which the mappings of the process are read again: it may have loaded another library.
const REFRESH: Duration = Duration::from_secs(1);
/// Maximum number of remembered calls; above it those whose memory was freed are dropped.
const MAX_CALLS: usize = 1 << 19;

/// The probability with which the stack of a call was to be taken.
pub(super) fn probability(size: u64, period: u64) -> f64 {
    malloc_threshold(size, period) as f64 / (1_u64 << 32) as f64
}

/// An allocation site, with what was allocated there, and what is left of it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct SiteRow {
    /// The site; `None`: memory that is left, but whose stacks were lost.
    pub(super) site: Option<Site>,
    pub(super) asked: CallsAndBytes,
    pub(super) left: CallsAndBytes,
}

/// The result of sampling.
pub(super) struct Sampled {
    /// Bytes per stack.
    pub(super) period: u64,
    /// Number of stacks that arrived.
    pub(super) stacks: u64,
    /// Bytes that these stacks represent.
    pub(super) stood_for: u64,
    /// Allocation sites, most bytes first.
    pub(super) rows: Vec<SiteRow>,
}

/// A call whose memory may still be there.
struct Call {
    key: MallocKey,
    row: usize,
}

/// Collects the stacks of a window.
pub(super) struct Sampling {
    process: Process,
    period: u64,
    stacks: Stacks,
    tables: Option<Tables>,
    refreshed: Instant,
    taken: u64,
    stood_for: u64,
    rows: Vec<SiteRow>,
    by_site: HashMap<Site, usize>,
    /// By thread and time.
    calls: HashMap<(u32, u64), Call>,
}

impl Sampling {
    /// Prepares everything; `None` if no stacks are requested.
    pub(super) fn start(
        target: &Target,
        shown: &Path,
        probes: &mut MallocProbes,
        period: u64,
    ) -> Result<Option<Self>, MallocFailure> {
        let Some((ring, unwind)) = probes.take_stacks() else { return Ok(None) };
        let (pid, plan) = (target.pid, &target.plan);
        probes.set_ruby(pid, target.bias, &plan.config)?;
        let image = Arc::new(site_image(0, shown, plan));
        let images = Images::default();
        images.add(KnownImage {
            image: Arc::clone(&image),
            reading: None,
            frames: plan.frames.as_ref().ok().cloned(),
            threads: None,
            gc: GcOf::Itself,
        });
        let mut tables = unwind.map(Tables::new);
        if let Some(tables) = &mut tables {
            tables.refresh(pid);
        }
        let namer = tables.as_ref().map(Tables::namer);
        let reader = Reader::start(ring, images, namer.is_some()).map_err(|source| {
            MallocFailure::System { what: "starting the thread that reads stacks", source }
        })?;
        let place = Names::below(&proc_root::file_root(), None).place(pid);
        let environment = Environment::of(pid);
        let comm = target.command.as_deref().unwrap_or("ruby");
        let process = describe(pid, comm, image, place, environment.as_ref(), WallClock::measure());
        Ok(Some(Self {
            process,
            period,
            stacks: Stacks::new(Some(reader), namer),
            tables,
            refreshed: Instant::now(),
            taken: 0,
            stood_for: 0,
            rows: Vec::new(),
            by_site: HashMap::new(),
            calls: HashMap::new(),
        }))
    }

    /// Calls count from now on.
    pub(super) fn open(&self, profile: &mut MallocProfile) {
        profile.add(&self.process, monotonic_ns());
    }

    /// Takes the stacks that have arrived.
    pub(super) fn take(
        &mut self,
        probes: &MallocProbes,
        profile: &mut MallocProfile,
    ) -> Result<(), MallocFailure> {
        if self.refreshed.elapsed() > REFRESH {
            self.refreshed = Instant::now();
            if let Some(tables) = &mut self.tables {
                tables.refresh(self.process.pid);
            }
        }
        self.drain(profile);
        if self.calls.len() > MAX_CALLS {
            let left = probes.sampled_now()?;
            self.calls.retain(|key, _| left.contains(key));
        }
        Ok(())
    }

    fn drain(&mut self, profile: &mut MallocProfile) {
        for record in self.stacks.take() {
            if let Record::Stack(named) = record
                && let Some(finished) = self.stacks.finish(*named)
                && finished.of == StackOf::Malloc
            {
                self.call(&finished, profile);
            }
        }
    }

    fn call(&mut self, finished: &Finished, profile: &mut MallocProfile) {
        let Finished { tid, comm, ts_ns, weight: bytes, above, stack, .. } = finished;
        let probability = probability(*bytes, self.period);
        self.taken += 1;
        self.stood_for += malloc_stands_for(*bytes, self.period);
        let call = MallocCall { ts_ns: *ts_ns, tid: *tid, comm, stack, bytes: *bytes, probability };
        let key = profile.asked(&self.process, &call);
        let row = self.row(Site::of(stack, above));
        self.rows[row].asked.add(*bytes, probability);
        self.calls.insert((*tid, *ts_ns), Call { key, row });
    }

    fn row(&mut self, site: Site) -> usize {
        *self.by_site.entry(site).or_insert_with_key(|site| {
            let none = CallsAndBytes::default();
            self.rows.push(SiteRow { site: Some(site.clone()), asked: none, left: none });
            self.rows.len() - 1
        })
    }

    /// Ends the window; `live` is the memory that is left.
    pub(super) fn finish(mut self, live: &[MallocBlock], profile: &mut MallocProfile) -> Sampled {
        self.drain(profile);
        let now_ns = monotonic_ns();
        let mut unknown = CallsAndBytes::default();
        for block in live.iter().filter(|block| block.sampled_ns != 0) {
            let probability = probability(block.size, self.period);
            let call = self.calls.get(&(block.tid, block.sampled_ns));
            let key = call.map(|call| call.key);
            profile.left(&self.process, key, now_ns, (block.size, probability));
            let left = call.map_or(&mut unknown, |call| &mut self.rows[call.row].left);
            left.add(block.size, probability);
        }
        let mut rows = self.rows;
        if unknown.taken > 0 {
            rows.push(SiteRow { site: None, asked: CallsAndBytes::default(), left: unknown });
        }
        rows.sort_by(|one, two| {
            let by_bytes = two.asked.bytes.sum.total_cmp(&one.asked.bytes.sum);
            by_bytes.then_with(|| one.site.cmp(&two.site))
        });
        Sampled { period: self.period, stacks: self.taken, stood_for: self.stood_for, rows }
    }
}
