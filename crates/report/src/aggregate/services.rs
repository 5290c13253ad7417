//! GC figures by service: counters that only grow, and the last known state of the running processes. Memory is bounded:
//! services beyond a limit are added up as one, which is labelled as such.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
};

pub use super::times::Times;
use super::{heap_figures::HeapFigures, service_requests::ServiceRequests};
use crate::model::{
    GcCycle, GcState, GcWork, Image, Origin, Process, Shares,
    gvl::GvlWait,
    gvl_so_far::GvlSoFar,
    load::ServerLoad,
    request::Request,
    seen::{AllocSum, Observer, ProcessEnd, Seen},
};

/// Upper bounds of the buckets of waits for the GVL, nanoseconds: 8 µs to 4.3 s. The kernel side counts waits in finer buckets,
/// none of which crosses one of these bounds.
pub const GVL_BOUNDS: [u64; 20] = {
    let mut bounds = [0; 20];
    let mut at = 0;
    while at < bounds.len() {
        bounds[at] = (1 << (13 + at)) - 1;
        at += 1;
    }
    bounds
};
/// Maximum number of distinguished endpoints of all services together.
const MAX_ENDPOINTS: usize = 10_000;
/// Maximum number of distinguished services.
const MAX_SERVICES: usize = 200;
/// Name of the sum of the services beyond that limit.
pub(crate) const BEYOND: &str = "(beyond gctrace's limit of services)";

/// The key by which processes are added up.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServiceKey {
    /// Name.
    pub service: String,
    /// Id of the container; empty if there is none.
    pub container: String,
    /// Pid, if figures are kept per process.
    pub pid: Option<u32>,
}

/// The key by which cycles are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CycleKey {
    /// `minor` or `major`.
    pub kind: &'static str,
    /// What triggered it.
    pub gc_by: Option<&'static str>,
    /// Why it is a major cycle.
    pub major_by: Option<&'static str>,
}

impl CycleKey {
    /// The key of a cycle.
    pub fn of(cycle: &GcCycle) -> Self {
        let info = &cycle.start.info;
        Self { kind: cycle.kind(), gc_by: info.gc_by, major_by: info.major_by }
    }
}

/// Figures of a process at its last GC event, or their sum over processes: of those that are not always known, `None` if one is not known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gauges {
    /// Number of slots with objects, if known.
    pub live_slots: Option<u64>,
    /// Number of free slots, if known.
    pub free_slots: Option<u64>,
    /// Number of slots of objects whose finalizers have not run, if known.
    pub final_slots: Option<u64>,
    /// Number of pages of the heap, if known.
    pub pages: Option<u64>,
    /// Number of old objects, if known.
    pub old_objects: Option<u64>,
    /// Bytes allocated by `malloc` since the last cycle, if known.
    pub malloc_increase: Option<u64>,
    /// The same since the last major cycle.
    pub oldmalloc_increase: Option<u64>,
    /// Number of used and of free slots, by slot size in bytes. Empty for Rubies that do not count objects by size.
    pub pools: BTreeMap<u64, (u64, u64)>,
    /// Resident memory, bytes, if it was read.
    pub rss: Option<u64>,
    /// How it is shared, as sums; `None` unless it was read for each process.
    pub shares: Option<Shares>,
    /// Number of serving threads when last read; `None` unless it is known for each process that has a pool of such threads.
    pub busy: Option<u64>,
    /// Connections in the accept queues that were read, by inode of the socket: processes may share one.
    pub queues: BTreeMap<u64, u32>,
}

impl Gauges {
    /// Those of a service without running processes, the last of which had this Ruby: it has no value that it had not before.
    fn nothing(image: Option<&Image>) -> Self {
        let has = |name: &str| image.is_some_and(|image| image.stat_keys.contains(&name));
        let of = |name: &str| has(name).then_some(0);
        Self {
            live_slots: Some(0),
            free_slots: Some(0),
            final_slots: of("heap_final_slots"),
            pages: of("heap_allocated_pages"),
            old_objects: of("old_objects"),
            malloc_increase: of("malloc_increase_bytes"),
            oldmalloc_increase: of("oldmalloc_increase_bytes"),
            rss: Some(0),
            ..Self::default()
        }
    }

    fn add(&mut self, other: &Self) {
        // A sum without one of the processes would be too small.
        let sum = |one: Option<u64>, other: Option<u64>| one.zip(other).map(|(one, other)| one + other);
        self.live_slots = sum(self.live_slots, other.live_slots);
        self.free_slots = sum(self.free_slots, other.free_slots);
        self.final_slots = sum(self.final_slots, other.final_slots);
        self.pages = sum(self.pages, other.pages);
        self.old_objects = sum(self.old_objects, other.old_objects);
        self.malloc_increase = sum(self.malloc_increase, other.malloc_increase);
        self.oldmalloc_increase = sum(self.oldmalloc_increase, other.oldmalloc_increase);
        for (size, (used, free)) in &other.pools {
            let sum = self.pools.entry(*size).or_default();
            *sum = (sum.0 + used, sum.1 + free);
        }
        self.rss = sum(self.rss, other.rss);
        self.shares = self.shares.zip(other.shares).map(|(one, other)| Shares {
            pss: one.pss + other.pss,
            private_dirty: one.private_dirty + other.private_dirty,
            read_ns: one.read_ns.min(other.read_ns),
        });
    }
}

/// Load of the processes of a service.
#[derive(Clone, Debug, Default)]
struct Load {
    busy: Option<u64>,
    /// Whether it is unknown for some pool how many of its threads are busy.
    is_unknown: bool,
    queues: BTreeMap<u64, u32>,
}

impl Load {
    fn add(&mut self, of: &Running, is_parent: bool) {
        match of.load.busy {
            Some(busy) => self.busy = Some(self.busy.unwrap_or_default() + u64::from(busy)),
            None => self.is_unknown |= of.may_have_pool(is_parent),
        }
        for queue in &of.load.queues {
            let of_socket = self.queues.entry(queue.inode).or_default();
            *of_socket = (*of_socket).max(queue.waiting);
        }
    }
}

/// Figures of a service since gctrace first saw it.
#[derive(Clone, Debug)]
pub struct Service {
    /// What its first process belongs to.
    pub origin: Arc<Origin>,
    /// Host name of its first process.
    pub hostname: Option<String>,
    /// The Ruby of its last process.
    pub image: Option<Arc<Image>>,
    /// Whether cycles of any of its processes are seen.
    pub has_cycles: bool,
    /// Whether the GVL of any of its processes was traced.
    pub has_gvl: bool,
    /// Whether the time for which the GVL was held is unknown: one of its processes does not show it, and none had shown any before.
    pub holds_unknown: bool,
    /// When it was first seen, `CLOCK_MONOTONIC` nanoseconds.
    pub since_ns: u64,
    /// Number of traced processes, including those that have ended.
    pub seen: u64,
    /// Number of processes that are currently traced.
    pub running: u64,
    /// Number of cycles, including unfinished ones.
    pub cycles: BTreeMap<CycleKey, u64>,
    /// Single pauses of minor cycles, and of major cycles.
    pub pauses: [Times; 2],
    /// Total pause times of minor cycles, and of major cycles.
    pub cycle_pauses: [Times; 2],
    /// Time in pauses, nanoseconds: marking, sweeping, neither.
    pub phases: [u64; 3],
    /// Time in pauses outside reported cycles, of processes whose tracing has ended, nanoseconds.
    pub outside_ns: u64,
    /// GC work of images without event sites, by what was timed: number of intervals, and nanoseconds.
    pub work: BTreeMap<&'static str, (u64, u64)>,
    /// Growth of `total_allocated_objects`.
    pub allocated: u64,
    /// Growth of `total_freed_objects`.
    pub freed: u64,
    /// Number of slots handed out for objects, by slot size in bytes, where that is counted.
    pub handed_out: BTreeMap<u32, u64>,
    /// Long waits for the GVL.
    pub gvl_long_waits: Times,
    /// Waits for the GVL of every length.
    pub gvl_waits: Times,
    /// Time for which the GVL was held, nanoseconds.
    pub gvl_held_ns: u64,
    /// Requests by endpoint.
    pub requests: ServiceRequests,
    /// Number of GC records that the kernel lost.
    pub lost: u64,
}

impl Service {
    fn new(process: &Process, since_ns: u64) -> Self {
        Self {
            origin: process.origin.clone(),
            hostname: process.hostname.clone(),
            image: None,
            has_cycles: false,
            has_gvl: false,
            holds_unknown: false,
            since_ns,
            seen: 0,
            running: 0,
            cycles: BTreeMap::new(),
            pauses: Default::default(),
            cycle_pauses: Default::default(),
            phases: [0; 3],
            outside_ns: 0,
            work: BTreeMap::new(),
            allocated: 0,
            freed: 0,
            handed_out: BTreeMap::new(),
            gvl_long_waits: Times::default(),
            gvl_waits: Times::within(&GVL_BOUNDS),
            gvl_held_ns: 0,
            requests: ServiceRequests::default(),
            lost: 0,
        }
    }
}

#[derive(Clone, Debug)]
struct Running {
    service: ServiceKey,
    /// `None` until its VM has been read.
    gauges: Option<Gauges>,
    /// `total_allocated_objects` and `total_freed_objects`, once they are known.
    totals: Option<(u64, u64)>,
    /// The part of its threads' GVL sums that has already been added.
    gvl: GvlSoFar,
    /// Number of GC records that were lost before its cycles.
    lost: u64,
    load: ServerLoad,
    ppid: Option<u32>,
    server: MayServe,
}

/// Whether a process may have a pool of threads that serve requests, as Puma has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MayServe {
    /// It has one: its title says that it is a worker of a cluster, or its pool was seen.
    Yes,
    /// Its command line is that of Puma: in single mode, a worker, or the master of a cluster, which has no pool.
    Puma,
    /// Its command line does not tell (`rails server`, `ruby app.rb`).
    Unknown,
    /// It is another server.
    No,
}

impl MayServe {
    fn of(process: &Process) -> Self {
        match process.server() {
            _ if process.is_puma_worker() => Self::Yes,
            Some(_) if process.is_puma() => Self::Puma,
            Some(_) => Self::No,
            None => Self::Unknown,
        }
    }
}

impl Running {
    /// `is_parent`: another process of the service that may have a pool is a child of this one.
    fn may_have_pool(&self, is_parent: bool) -> bool {
        match self.server {
            MayServe::Yes => true,
            MayServe::Puma => !is_parent,
            // A server listens on a socket.
            MayServe::Unknown => !is_parent && self.listens(),
            MayServe::No => false,
        }
    }

    fn listens(&self) -> bool {
        !self.load.queues.is_empty()
    }

    /// Its parent, unless it is not a server.
    fn master(&self) -> Option<u32> {
        let serves = match self.server {
            MayServe::Yes | MayServe::Puma => true,
            MayServe::Unknown => self.listens(),
            MayServe::No => false,
        };
        self.ppid.filter(|_| serves)
    }
}

/// Figures by service.
#[derive(Clone, Debug, Default)]
pub struct Services {
    by_pid: bool,
    known: BTreeMap<ServiceKey, Service>,
    running: HashMap<u32, Running>,
    /// Number of processes counted in the sum of services beyond the limit.
    pub beyond: u64,
}

impl Observer for Services {
    fn see(&mut self, process: &Process, seen: Seen<'_>) {
        match seen {
            Seen::Process { state, now_ns, .. } => self.process(process, state, now_ns),
            Seen::Cycle(cycle) => self.cycle(process, cycle),
            Seen::Work(work) => self.work(process, work),
            Seen::Request(request) => self.request(process, request),
            Seen::GvlWait(wait) => self.gvl_wait(process, wait),
            Seen::GvlSoFar(so_far) => self.gvl_so_far(process, so_far),
            Seen::Alloc(sum) => self.handed_out(process, sum),
            Seen::Load(load) => self.load(process, load),
            Seen::Ended(end) => self.ended(process, end),
            _ => {}
        }
    }
}

impl Services {
    /// Empty figures; with `by_pid`, they are kept per process.
    pub fn new(by_pid: bool) -> Self {
        Self { by_pid, ..Self::default() }
    }

    /// A process is traced from now on.
    fn process(&mut self, process: &Process, state: Option<&GcState>, now_ns: u64) {
        self.gone(process.pid);
        let key = self.key(process);
        let service = self.known.entry(key.clone()).or_insert_with(|| {
            let service = Service::new(process, now_ns);
            if key.service != BEYOND {
                return service;
            }
            // The sum belongs to none of the services in it.
            let origin = Arc::new(Origin { service: BEYOND.to_owned(), ..Origin::default() });
            Service { origin, hostname: None, ..service }
        });
        service.seen += 1;
        service.running += 1;
        service.image = Some(process.image.clone());
        service.has_cycles |= process.image.method.sees_cycles();
        // Of processes with different Rubies, the last one does not decide: a counter that disappears and comes back counts as restarted.
        if let Some(gvl) = process.image.gvl {
            service.has_gvl = true;
            service.holds_unknown |= !gvl.holds && service.gvl_held_ns == 0;
        }
        let (gvl, load) = (GvlSoFar::default(), ServerLoad::default());
        let (ppid, server) = (process.ppid, MayServe::of(process));
        let running = Running { service: key, gauges: None, totals: None, gvl, lost: 0, load, ppid, server };
        self.running.insert(process.pid, running);
        if let Some(state) = state {
            self.state(process, state);
        }
    }

    /// Adds a cycle of a process.
    fn cycle(&mut self, process: &Process, cycle: &GcCycle) {
        self.state(process, &cycle.start);
        if let Some(end) = &cycle.end {
            self.state(process, end);
        }
        if let Some(running) = self.running.get_mut(&process.pid) {
            running.lost += cycle.lost;
        }
        let Some(service) = self.of(process.pid) else { return };
        *service.cycles.entry(CycleKey::of(cycle)).or_default() += 1;
        service.lost += cycle.lost;
        // The time of a cycle that was cut off in its first pause is unknown.
        if !cycle.pauses.is_empty() {
            service.cycle_pauses[usize::from(cycle.is_major())].add(cycle.pause_ns());
        }
        for pause in &cycle.pauses {
            service.pauses[usize::from(cycle.is_major())].add(pause.ns);
            for (sum, ns) in service.phases.iter_mut().zip([pause.mark_ns, pause.sweep_ns, pause.other_ns]) {
                *sum += ns;
            }
        }
    }

    /// Adds GC work of an image without event sites.
    fn work(&mut self, process: &Process, work: &GcWork) {
        let Some(service) = self.of(process.pid) else { return };
        let (count, ns) = service.work.entry(work.phase.name()).or_default();
        *count += 1;
        *ns += work.ns;
    }

    /// Adds a request.
    fn request(&mut self, process: &Process, request: &Request) {
        let endpoints: usize = self.known.values().map(|service| service.requests.endpoints()).sum();
        if let Some(service) = self.of(process.pid) {
            service.requests.add(request, endpoints < MAX_ENDPOINTS);
        }
    }

    /// Sets the load of a server.
    fn load(&mut self, process: &Process, load: &ServerLoad) {
        if let Some(running) = self.running.get_mut(&process.pid) {
            running.load = load.clone();
            if load.busy.is_some() {
                running.server = MayServe::Yes;
            }
        }
    }

    /// Adds slots that were handed out.
    fn handed_out(&mut self, process: &Process, sum: &AllocSum) {
        let Some(service) = self.of(process.pid) else { return };
        for (size, slots) in &sum.slots {
            *service.handed_out.entry(*size).or_default() += slots;
        }
    }

    /// Adds a long wait for the GVL.
    fn gvl_wait(&mut self, process: &Process, wait: &GvlWait) {
        if let Some(service) = self.of(process.pid) {
            service.gvl_long_waits.add(wait.ns);
        }
    }

    /// Adds what the threads of a process have done with the GVL since the last report.
    fn gvl_so_far(&mut self, process: &Process, so_far: &GvlSoFar) {
        let Some(running) = self.running.get_mut(&process.pid) else { return };
        let grown = so_far.growth(&mut running.gvl);
        let Some(service) = self.known.get_mut(&running.service) else { return };
        for (most, count) in grown.waits() {
            service.gvl_waits.count_in(most, count);
        }
        service.gvl_waits.ns = service.gvl_waits.ns.saturating_add(grown.wait_ns);
        service.gvl_held_ns = service.gvl_held_ns.saturating_add(grown.hold_ns);
    }

    /// Tracing of a process ended.
    fn ended(&mut self, process: &Process, end: &ProcessEnd) {
        if let Some(state) = &end.shutdown {
            self.state(process, state);
        }
        // This includes records lost after its last cycle.
        if let Some(running) = self.running.get(&process.pid)
            && let Some(service) = self.known.get_mut(&running.service)
        {
            service.lost += end.lost.saturating_sub(running.lost);
            service.outside_ns += end.outside_ns;
        }
        self.gone(process.pid);
    }

    /// The services, each with the sum of the gauges of its known processes; `None`: none of its running processes is known.
    pub fn iter(&self) -> impl Iterator<Item = (&ServiceKey, &Service, Option<Gauges>)> {
        let masters: HashSet<u32> = self.running.values().filter_map(Running::master).collect();
        let mut gauges: HashMap<&ServiceKey, (Option<Gauges>, bool)> = HashMap::new();
        let mut loads: HashMap<&ServiceKey, Load> = HashMap::new();
        for (pid, running) in &self.running {
            loads.entry(&running.service).or_default().add(running, masters.contains(pid));
            let (sum, unknown) = gauges.entry(&running.service).or_default();
            match (sum.as_mut(), &running.gauges) {
                (_, None) => *unknown = true,
                (Some(sum), Some(gauges)) => sum.add(gauges),
                (None, gauges) => sum.clone_from(gauges),
            }
        }
        let sum = move |key: &ServiceKey| match gauges.get(key) {
            // A service without running processes holds no memory.
            None => {
                let known = self.known.get(key).filter(|service| service.has_cycles);
                known.map(|service| Gauges::nothing(service.image.as_deref()))
            }
            Some((Some(sum), true)) => Some(Gauges { shares: None, ..sum.clone() }),
            Some((sum, _)) => sum.clone(),
        };
        // The load covers all processes, including those whose VM has not been read.
        let with_load = move |key: &ServiceKey| {
            let Load { busy, is_unknown, queues } = loads.get(key).cloned().unwrap_or_default();
            let busy = busy.filter(|_| !is_unknown);
            sum(key).map(|gauges| Gauges { busy, queues, ..gauges })
        };
        self.known.iter().map(move |(key, service)| (key, service, with_load(key)))
    }

    fn of(&mut self, pid: u32) -> Option<&mut Service> {
        self.known.get_mut(&self.running.get(&pid)?.service)
    }

    fn gone(&mut self, pid: u32) {
        let Some(running) = self.running.remove(&pid) else { return };
        if let Some(service) = self.known.get_mut(&running.service) {
            service.running -= 1;
        }
    }

    /// The key of a process. If there is no room for it, the oldest service without processes is dropped first.
    fn key(&mut self, process: &Process) -> ServiceKey {
        let key = ServiceKey {
            service: process.origin.service.clone(),
            container: process.origin.container.clone().unwrap_or_default(),
            pid: self.by_pid.then_some(process.pid),
        };
        if self.known.contains_key(&key) || self.known.len() < MAX_SERVICES {
            return key;
        }
        let idle = self.known.iter().filter(|(key, service)| service.running == 0 && key.service != BEYOND);
        let oldest = idle.min_by_key(|(_, service)| service.since_ns).map(|(key, _)| key.clone());
        if let Some(oldest) = oldest {
            self.known.remove(&oldest);
            return key;
        }
        self.beyond += 1;
        ServiceKey { service: BEYOND.to_owned(), container: String::new(), pid: None }
    }

    fn state(&mut self, process: &Process, state: &GcState) {
        let Some(running) = self.running.get_mut(&process.pid) else { return };
        let get = |name: &str| state.value(&process.image, name);
        let pools = HeapFigures::of(&process.image, state).pools;
        let before = running.gauges.as_ref();
        running.gauges = Some(Gauges {
            live_slots: get("heap_live_slots"),
            free_slots: get("heap_free_slots"),
            final_slots: get("heap_final_slots"),
            pages: get("heap_allocated_pages"),
            old_objects: get("old_objects"),
            malloc_increase: get("malloc_increase_bytes"),
            oldmalloc_increase: get("oldmalloc_increase_bytes"),
            pools: pools.iter().map(|pool| (pool.slot_size, (pool.used, pool.free))).collect(),
            // If the process is gone, the last known memory is kept.
            rss: state.memory.map(|memory| memory.rss).or(before.and_then(|before| before.rss)),
            shares: state.memory.and_then(|memory| memory.shares).or(before.and_then(|before| before.shares)),
            ..Gauges::default()
        });
        let Some(totals) = get("total_allocated_objects").zip(get("total_freed_objects")) else { return };
        let before = running.totals.replace(totals).unwrap_or(totals);
        if let Some(service) = self.known.get_mut(&running.service) {
            service.allocated += totals.0.saturating_sub(before.0);
            service.freed += totals.1.saturating_sub(before.1);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
