//! Figures add up, memory is bounded, and unknown is not zero.

use super::*;
use crate::{
    model::{EndReason, Memory, Pause, load::AcceptQueue, seen::CyclesBefore},
    ruby::{RubyVersion, fallback::Method, stat::GcInfo},
};

pub(crate) const END: ProcessEnd = ProcessEnd {
    reason: EndReason::Exited,
    ts_ns: 10,
    since_ns: 0,
    outside_ns: 0,
    beyond_ns: 0,
    shutdown: None,
    cycles: 0,
    before: CyclesBefore::Unknown,
    lost: 0,
};

/// Shared memory of a service is known once it has been read for each of its processes, and from then on.
#[test]
fn shares() {
    let mut services = Services::new(false);
    let with = |pss| {
        let mut state = state(10, 100);
        let shares = Shares { pss, private_dirty: pss / 2, read_ns: Some(pss) };
        state.memory = Some(Memory { shares: Some(shares), ..Memory::default() });
        state
    };
    let of = |services: &Services| services.iter().next().unwrap().2.unwrap().shares;
    services.process(&process(1, "web"), Some(&with(100)), 1);
    assert_eq!(of(&services).map(|shares| (shares.pss, shares.private_dirty)), Some((100, 50)));
    services.process(&process(2, "web"), Some(&state(10, 100)), 2);
    assert_eq!(of(&services), None);
    services.state(&process(2, "web"), &with(30));
    assert_eq!(of(&services).map(|shares| (shares.pss, shares.private_dirty)), Some((130, 65)));
    // Between two readings the last one applies.
    services.state(&process(1, "web"), &state(10, 100));
    assert_eq!(of(&services).map(|shares| shares.pss), Some(130));
}

/// Busy threads are a sum, known once they are known for each process that may have some; a socket shared by processes counts once, and
/// an ended process has neither.
#[test]
fn loads() {
    let mut services = Services::new(false);
    let of = |services: &Services| {
        let gauges = services.iter().next().unwrap().2.unwrap();
        (gauges.busy, gauges.queues.into_iter().collect::<Vec<_>>())
    };
    for pid in [1, 2] {
        let state = state(1, 1);
        services.see(&process(pid, "web"), Seen::Process { state: Some(&state), now_ns: 1, since_ns: 1 });
    }
    assert_eq!(of(&services), (None, vec![]));
    let queue = |inode, waiting| AcceptQueue { inode, waiting };
    let load = |busy, queues| ServerLoad { ts_ns: 1, busy, queues };
    services.see(&process(1, "web"), Seen::Load(&load(Some(3), vec![queue(7, 4), queue(8, 1)])));
    services.see(&process(2, "web"), Seen::Load(&load(None, vec![queue(7, 5)])));
    // The second process listens, and what its threads do is unknown.
    assert_eq!(of(&services), (None, vec![(7, 5), (8, 1)]));
    services.see(&process(2, "web"), Seen::Load(&load(Some(2), vec![queue(7, 0)])));
    services.see(&process(1, "web"), Seen::Load(&load(Some(0), vec![queue(7, 0)])));
    assert_eq!(of(&services), (Some(2), vec![(7, 0)]));
    services.see(&process(2, "web"), Seen::Ended(&END));
    assert_eq!(of(&services), (Some(0), vec![(7, 0)]));
}

/// The master of a cluster and other programs have no pool of threads that could be busy; each worker has one, and each Puma in single mode.
#[test]
fn servers() {
    let of = |pid, ppid, words: &[&str]| {
        let cmdline = Some(words.iter().map(|&word| word.to_owned()).collect());
        Process { ppid: Some(ppid), cmdline, ..process(pid, "web") }
    };
    let load = |busy, inode: Option<u64>| {
        let queues = inode.map(|inode| AcceptQueue { inode, waiting: 0 });
        ServerLoad { ts_ns: 1, busy, queues: queues.into_iter().collect() }
    };
    // The sum for these processes, whether or not their VMs have been read.
    let busy = |all: &[(Process, Option<ServerLoad>)]| {
        let mut services = Services::new(false);
        for (at, (process, load)) in all.iter().enumerate() {
            let state = (at != 1).then(|| state(1, 1));
            let seen = Seen::Process { state: state.as_ref(), now_ns: 1, since_ns: 1 };
            services.see(process, seen);
            if let Some(load) = load {
                services.see(process, Seen::Load(load));
            }
        }
        services.iter().next().unwrap().2.unwrap().busy
    };
    let title = "puma 5.6.5 (tcp://0.0.0.0:9292) [shop]";
    let master = (of(10, 1, &[title]), Some(load(None, Some(7))));
    let worker = |pid, title: &str, busy| (of(pid, 10, &[title]), Some(load(busy, Some(7))));
    let first = |busy| worker(11, "puma: cluster worker 0: 10 [shop]", busy);
    let second = |busy| worker(12, "puma: cluster worker 1: 10 [shop]", busy);
    assert_eq!(busy(&[master.clone(), first(Some(1)), second(Some(2))]), Some(3));
    assert_eq!(busy(&[master.clone(), first(Some(1)), second(None)]), None);
    assert_eq!(busy(&[master.clone(), first(None), second(None)]), None);
    // A worker forked while its master was traced has the master's title, and may not have been read yet.
    assert_eq!(busy(&[master.clone(), first(Some(1)), worker(12, title, Some(2))]), Some(3));
    assert_eq!(busy(&[master.clone(), first(Some(1)), worker(12, title, None)]), None);
    assert_eq!(busy(&[master.clone(), first(Some(1)), (of(12, 10, &[title]), None)]), None);
    // Two processes that are not a cluster.
    let single = |pid, busy| (of(pid, 1, &[title]), Some(load(busy, Some(u64::from(pid)))));
    assert_eq!(busy(&[single(20, Some(1)), single(21, None)]), None);
    assert_eq!(busy(&[single(20, Some(1)), single(21, Some(0))]), Some(1));
    // Another program that listens may be a Puma, unless it is a cluster's master.
    let rails =
        |pid, ppid, busy, inode| (of(pid, ppid, &["ruby", "bin/rails", "server"]), Some(load(busy, inode)));
    assert_eq!(busy(&[single(20, Some(1)), rails(30, 1, None, Some(9))]), None);
    assert_eq!(busy(&[rails(30, 1, None, Some(9)), rails(31, 30, Some(2), Some(9))]), Some(2));
    assert_eq!(busy(&[rails(30, 1, None, Some(9)), rails(31, 30, None, Some(9))]), None);
    // These are not servers.
    assert_eq!(
        busy(&[single(20, Some(1)), rails(30, 1, None, None), (of(31, 1, &["ruby", "job.rb"]), None)]),
        Some(1)
    );
    let others = [of(40, 1, &["sidekiq 6.5.7 shop [0 of 5 busy]"]), of(41, 1, &["unicorn worker[0]"])];
    let [sidekiq, unicorn] = others.map(|process| (process, Some(load(None, Some(8)))));
    assert_eq!(busy(&[single(20, Some(1)), sidekiq, unicorn]), Some(1));
}

/// A process of a service.
pub(crate) fn process(pid: u32, service: &str) -> Process {
    let image = Image {
        index: 0,
        path: "/ruby".into(),
        version: RubyVersion { major: 3, minor: 3, teeny: 0 },
        build_id: None,
        stat_keys: vec!["heap_live_slots", "total_allocated_objects", "total_freed_objects"],
        heap_keys: Vec::new(),
        method: Method::Sites,
        probes: 0,
        gvl: None,
        has_symbols: false,
    };
    Process {
        pid,
        ns_pid: None,
        ppid: None,
        comm: "ruby".to_owned(),
        cmdline: None,
        start_ts: None,
        uid: None,
        hostname: None,
        container: crate::model::Container::default(),
        gc_env: Some(BTreeMap::new()),
        gc_env_refused: Vec::new(),
        origin: Arc::new(Origin { service: service.to_owned(), ..Origin::default() }),
        image: Arc::new(image),
    }
}

pub(crate) fn state(live: u64, allocated: u64) -> GcState {
    let info = GcInfo {
        major_by: None,
        need_major_by: None,
        gc_by: Some("newobj"),
        have_finalizer: false,
        immediate_sweep: false,
        state: "none",
        weak_references: None,
    };
    let memory = Some(Memory { rss: 1000, peak_rss: 1000, ..Memory::default() });
    GcState { ts_ns: 1, tid: 1, stat: vec![live, allocated, 0], heaps: Vec::new(), info, memory }
}

pub(crate) fn cycle(count: u64, live: u64, allocated: u64, ns: u64) -> GcCycle {
    let pause = Pause { tid: 1, begin_ns: 1, ns, kind: None, mark_ns: ns, sweep_ns: 0, other_ns: 0 };
    let start = state(live, allocated);
    GcCycle {
        span: None,
        comm: "ruby".into(),
        count,
        start,
        end: None,
        pauses: vec![pause],
        trigger: None,
        request: None,
        lost: 0,
    }
}

/// Counters outlive processes and never shrink; gauges cover running processes only; each pause is in its bucket.
#[test]
fn adds_up() {
    let mut services = Services::new(false);
    let (a, b) = (process(1, "web"), process(2, "web"));
    services.process(&a, Some(&state(10, 100)), 5);
    services.process(&b, None, 6);
    // A figure unknown for one process is missing from the sum.
    assert_eq!(services.iter().next().unwrap().2.unwrap().live_slots, Some(10));
    services.cycle(&a, &cycle(1, 20, 150, 50_000));
    services.cycle(&b, &cycle(1, 30, 1000, 50_001));
    services.cycle(&b, &cycle(2, 40, 1500, u64::MAX / 2));
    {
        let (key, web, gauges) = services.iter().next().unwrap();
        let gauges = gauges.unwrap();
        assert_eq!((key.service.as_str(), web.running, web.since_ns), ("web", 2, 5));
        assert_eq!((web.allocated, gauges.live_slots, gauges.rss), (550, Some(60), Some(2000)));
        assert_eq!(web.cycles.values().sum::<u64>(), 3);
        assert_eq!(
            (web.pauses[0].buckets[0], web.pauses[0].buckets[1], web.pauses[0].buckets[15]),
            (1, 1, 1)
        );
    }
    // The time of a cycle that was cut off in its first pause is unknown.
    services.cycle(&b, &GcCycle { pauses: Vec::new(), ..cycle(3, 40, 1500, 0) });
    {
        let (_, web, _) = services.iter().next().unwrap();
        assert_eq!((web.cycles.values().sum::<u64>(), web.cycle_pauses[0].count()), (4, 3));
    }
    // The count of lost records covers the whole process: 2 before a cycle, and 3 after the last one.
    services.cycle(&b, &GcCycle { lost: 2, ..cycle(4, 40, 1500, 1) });
    let end = ProcessEnd { lost: 5, outside_ns: 70, ..END };
    services.ended(&b, &end);
    services.ended(&b, &end);
    // The same pid again is another process: its totals start anew.
    services.process(&process(1, "web"), Some(&state(7, 3)), 9);
    let (_, web, gauges) = services.iter().next().unwrap();
    assert_eq!((web.lost, web.outside_ns), (5, 70));
    assert_eq!((web.seen, web.running, web.allocated, gauges.unwrap().live_slots), (3, 1, 550, Some(7)));
}

/// Nothing is known of processes that have not been read; a service without running processes holds no memory.
#[test]
fn unknown_is_not_zero() {
    let mut services = Services::new(false);
    let gauges = |services: &Services| services.iter().next().unwrap().2;
    services.process(&process(1, "web"), None, 1);
    assert_eq!(gauges(&services), None);
    services.process(&process(2, "web"), Some(&GcState { memory: None, ..state(5, 0) }), 1);
    assert_eq!(gauges(&services).map(|sum| (sum.live_slots, sum.rss)), Some((Some(5), None)));
    services.ended(&process(1, "web"), &END);
    // A sum of the memory that could be read would be too small.
    services.process(&process(3, "web"), Some(&state(6, 0)), 1);
    assert_eq!(gauges(&services).map(|sum| (sum.live_slots, sum.rss)), Some((Some(11), None)));
    services.ended(&process(2, "web"), &END);
    assert_eq!(gauges(&services).and_then(|sum| sum.rss), Some(1000));
    services.ended(&process(3, "web"), &END);
    assert_eq!(gauges(&services).map(|sum| (sum.live_slots, sum.rss)), Some((Some(0), Some(0))));
}

/// The number of services is bounded: those without processes are dropped first, and the rest are added up as one.
#[test]
fn bounded() {
    let mut services = Services::new(false);
    let names = |n: usize| format!("s{n}");
    for n in 0..MAX_SERVICES {
        services.process(&process(n as u32, &names(n)), None, n as u64);
    }
    services.ended(&process(3, &names(3)), &END);
    services.process(&process(1000, "new"), None, 1000);
    assert_eq!(services.beyond, 0);
    services.process(&process(1001, "newer"), None, 1001);
    services.process(&process(1002, "newest"), None, 1002);
    assert_eq!(services.beyond, 2);
    assert!(services.iter().all(|(key, _, _)| key.service != names(3) && key.service != "newer"));
    let beyond = services.iter().find(|(key, _, _)| key.service == BEYOND).unwrap();
    assert_eq!((beyond.1.running, services.iter().count()), (2, MAX_SERVICES + 1));
    assert_eq!((beyond.1.origin.service.as_str(), &beyond.1.hostname), (BEYOND, &None));
}
