//! One of everything that can be seen, with a distinct value in every field.

use std::{collections::BTreeMap, sync::Arc};

use gctrace_common::event::WorkPhase;

use crate::{
    model::{
        Container, EndReason, GcCycle, GcState, GcWork, Image, Memory, MemorySource, Origin, Pause, Process,
        Runtime, Shares,
        gvl::{
            GvlBlocked, GvlBlocker, GvlCoverage, GvlDoing, GvlGc, GvlProcessSummary, GvlSpan, GvlSplit,
            GvlSums, GvlTaskTimes, GvlThreadSummary, GvlTimes, GvlWait, GvlWho, Histogram,
        },
        gvl_so_far::GvlSoFar,
        load::{AcceptQueue, ServerLoad},
        request::{Allocated, GcTime, Job, PageFaults, Request, RequestMemory, States, UnitStates},
        seen::{AllocStack, AllocSum, CyclesBefore, ProcessEnd, Seen},
        stack::{Frame, FrameKind, GcActivity, Stack, StackSample, ThreadState},
        trace::{Caller, Span, Trace, TraceOrigin},
    },
    ruby::{PauseKind, RubyVersion, fallback::Method, stat, stat::GcInfo},
};

pub(super) fn frame(at: u64) -> Arc<Frame> {
    Arc::new(Frame {
        kind: if at.is_multiple_of(2) { FrameKind::Ruby } else { FrameKind::Native },
        name: format!("Größe#{at}").into(),
        file: (!at.is_multiple_of(3)).then(|| format!("/srv/{at}.rb").into()),
        line: at as u32,
        first_line: 1,
        address: at << 40,
    })
}

fn stack(at: u64) -> Stack {
    (at..at + 5).map(frame).collect()
}

fn version() -> RubyVersion {
    RubyVersion { major: 3, minor: 4, teeny: 7 }
}

pub(crate) fn process() -> Process {
    let text = |text: &str| Some(text.to_owned());
    Process {
        pid: 4242,
        ns_pid: Some(1),
        ppid: Some(2),
        comm: "puma: \u{1b}[1m".to_owned(),
        cmdline: Some(vec!["ruby".to_owned(), String::new(), "a b".to_owned()]),
        start_ts: Some(1_700_000_000.123_456_7),
        uid: Some(1000),
        hostname: text("host"),
        container: Container {
            id: text("id"),
            runtime: Some(Runtime::CriO),
            name: text("name"),
            pod_uid: text("uid"),
            pod: text("pod"),
            namespace: text("ns"),
            unit: text("unit"),
            cgroup: text("/cgroup"),
        },
        gc_env: Some(BTreeMap::from([("RUBY_GC_HEAP_INIT_SLOTS".to_owned(), "1".to_owned())])),
        gc_env_refused: vec!["RUBY_GC_\n".to_owned()],
        origin: Arc::new(Origin {
            service: "shop".to_owned(),
            container: text("c"),
            pod: text("p"),
            namespace: text("n"),
            attributes: vec![("a".to_owned(), "b".to_owned())],
        }),
        image: Arc::new(Image {
            index: 3,
            path: std::ffi::OsString::from("/usr/lib/libruby.so").into(),
            version: version(),
            build_id: text("abcdef"),
            stat_keys: stat::keys(version()).iter().map(|key| key.name).collect(),
            heap_keys: stat::heap_keys(version()).iter().map(|key| key.name).collect(),
            method: Method::UsdtPauses,
            probes: 17,
            gvl: Some(GvlCoverage { holds: true, ends: false, only_blocked: true, woken: false }),
            has_symbols: true,
        }),
    }
}

pub(crate) fn state(at: u64) -> GcState {
    let image = process().image;
    let heap: Vec<u64> = (0..image.heap_keys.len() as u64).map(|value| value * at).collect();
    GcState {
        ts_ns: at,
        tid: 7,
        stat: (0..image.stat_keys.len() as u64).map(|value| u64::MAX - value).collect(),
        heaps: vec![heap.clone(), heap],
        info: GcInfo {
            major_by: Some("nofree"),
            need_major_by: Some(None),
            gc_by: None,
            have_finalizer: true,
            immediate_sweep: false,
            state: "sweeping",
            weak_references: Some((5, Some(4))),
        },
        memory: Some(Memory {
            rss: 1,
            peak_rss: 2,
            anon: 3,
            file: 4,
            shmem: 5,
            swap: 6,
            source: MemorySource::KernelApproximate,
            shares: Some(Shares { pss: 7, private_dirty: 8, read_ns: Some(9) }),
        }),
    }
}

fn who(tid: u32) -> GvlWho {
    GvlWho { tid, comm: format!("thread {tid}").into() }
}

fn times(ns: u64) -> GvlTimes {
    GvlTimes { count: ns + 1, ns, max_ns: ns / 2 }
}

fn span(at: u64) -> GvlSpan {
    GvlSpan { who: who(8), id: 9, doing: GvlDoing::Holding, begin_ns: at, ns: 11 }
}

fn sums() -> GvlSums {
    let mut waits = Histogram::default();
    waits.add([1, 0, 3]);
    GvlSums {
        wall_ns: 1,
        watched_ns: 2,
        wait: times(3),
        hold: Some(times(4)),
        away: None,
        split: Some(split(5)),
        waits,
    }
}

fn split(ns: u64) -> GvlSplit {
    let task = |ns| GvlTaskTimes { cpu_ns: ns, runnable_ns: ns + 1, blocked_ns: ns + 2 };
    GvlSplit { waiting: task(ns), holding: task(ns + 1), away: task(ns + 2) }
}

/// A span for every even number.
fn span_at(at: u64) -> Option<Span> {
    at.is_multiple_of(2).then(|| Span { trace_id: u128::MAX - u128::from(at), span_id: u64::MAX - at })
}

pub(super) fn sample(at: u64, stack: Stack) -> StackSample {
    StackSample {
        span: span_at(at),
        ts_ns: at,
        tid: 12,
        comm: Arc::from("worker"),
        state: ThreadState::Runnable,
        cpu_ns: 13,
        wall_ns: 14,
        gc: GcActivity::Compacting,
        request: Some(at),
        stack,
    }
}

fn coverage() -> GvlCoverage {
    GvlCoverage { holds: false, ends: true, only_blocked: false, woken: true }
}

pub(crate) fn cycle(at: u64) -> GcCycle {
    let pause = Pause {
        tid: 3,
        begin_ns: at,
        ns: 60,
        kind: Some(PauseKind::Rest),
        mark_ns: 10,
        sweep_ns: 20,
        other_ns: 30,
    };
    GcCycle {
        span: span_at(at + 1),
        comm: "starter".to_owned(),
        count: 5,
        start: state(at),
        end: Some(state(at + 100)),
        pauses: vec![pause, Pause { kind: None, ..pause }],
        trigger: Some(stack(at)),
        request: Some(77),
        lost: 2,
    }
}

fn gvl(at: u64, see: &mut dyn FnMut(&Process, Seen<'_>)) {
    let process = process();
    let blocker = GvlBlocker {
        hold: span(at),
        until: Some(stack(1)),
        ran: vec![(3, stack(2)), (1, Arc::from([]))],
        first: true,
    };
    let wait = GvlWait {
        who: who(1),
        id: 2,
        thread: Some(u64::MAX),
        request: Some(7),
        begin_ns: at,
        ns: 4,
        blocker: Some(blocker),
        stack: Some(Arc::from([])),
    };
    see(&process, Seen::GvlWait(&wait));
    see(
        &process,
        Seen::GvlWait(&GvlWait { blocker: None, stack: None, thread: None, request: None, ..wait.clone() }),
    );
    see(&process, Seen::GvlSpan(&span(at)));
    let thread = GvlThreadSummary {
        coverage: coverage(),
        who: who(0),
        id: 5,
        last: Some((GvlDoing::Away, at)),
        thread: None,
        begin_ns: at,
        end_ns: at + 1,
        ended: true,
        sums: sums(),
    };
    see(&process, Seen::GvlThread(&thread));
    let so_far = GvlSoFar::of_counts(Box::new([6; gctrace_common::gvl::BUCKETS]), 7, 8);
    see(&process, Seen::GvlSoFar(&so_far));
    let summary = GvlProcessSummary {
        coverage: coverage(),
        threads: 4,
        span_ns: 5,
        end_ns: at,
        sums: sums(),
        gc: Some(GvlGc { pause_ns: 6, wait_ns: None }),
        blocked: vec![GvlBlocked { waiter: Some(who(1)), holder: None, times: times(9) }],
    };
    see(&process, Seen::GvlProcess(&summary));
}

/// A request with all fields set.
pub(crate) fn request(at: u64) -> Request {
    Request {
        id: 1,
        tid: 2,
        begin_ns: at,
        end_ns: Some(at + 3),
        method: Some("PATCH"),
        path: Some("/orders/:id".to_owned()),
        status: Some(418),
        queue_ns: Some(7),
        first_byte_ns: Some(4),
        last_byte_ns: None,
        response_bytes: Some(16),
        gcs: Some(5),
        gc_ns: Some(6),
        gc_pauses: Some(7),
        gc_other: Some(GcTime { pauses: 8, ns: 9 }),
        gvl_wait_ns: Some(10),
        states: Some(States { cpu_ns: 11, runnable_ns: 12, blocked_ns: 13 }),
        split: Some(split(20)),
        alloc: Some(Allocated { slots: 14, bytes: 15 * 40 }),
        memory: RequestMemory {
            faults: Some(PageFaults { minor: 21, major: 22 }),
            rss_growth: Some(-23 * 4096),
        },
        handler: Some(frame(2)),
        job: None,
        is_run: false,
        gc_states: Some(Box::new(UnitStates { begin: state(at), end: state(at + 3) })),
        trace: Some(Trace {
            trace_id: u128::MAX - u128::from(at),
            caller: Some(Caller { span_id: at + 1, sampled: at.is_multiple_of(2) }),
            origin: TraceOrigin::Traceparent,
        }),
    }
}

/// Everything.
pub(crate) fn all(at: u64, see: &mut dyn FnMut(&Process, Seen<'_>)) {
    let process = process();
    see(&process, Seen::Process { state: Some(&state(at)), now_ns: at, since_ns: at });
    see(&process, Seen::Cycle(&cycle(at)));
    see(&process, Seen::Cycle(&GcCycle { end: None, trigger: None, request: None, ..cycle(at) }));
    let work = GcWork { phase: WorkPhase::Continue, tid: 1, comm: "w".to_owned(), begin_ns: at, ns: 2 };
    see(&process, Seen::Work(&work));
    let request = request(at);
    see(&process, Seen::Request(&request));
    see(
        &process,
        Seen::Request(&Request { gcs: Some(0), gc_ns: Some(0), gc_pauses: Some(0), ..request.clone() }),
    );
    see(
        &process,
        Seen::Request(&Request {
            gcs: None,
            gc_ns: None,
            gc_pauses: None,
            gc_other: None,
            gvl_wait_ns: None,
            states: None,
            split: None,
            alloc: Some(Allocated { slots: 15, bytes: 600 }),
            handler: None,
            gc_states: None,
            trace: None,
            ..request.clone()
        }),
    );
    let job = Job {
        queue: Some("low".to_owned()),
        jid: Some("1f".to_owned()),
        enqueued_us: Some(17),
        latency_ns: Some(19),
    };
    for job in [job, Job::default()] {
        let trace = request.trace.map(|trace| Trace { origin: TraceOrigin::Job, ..trace });
        see(&process, Seen::Request(&Request { job: Some(job), trace, ..request.clone() }));
    }
    let run = Request { is_run: true, ..request.clone() };
    see(&process, Seen::Request(&run));
    let published = Trace { trace_id: 9, caller: None, origin: TraceOrigin::Thread };
    see(&process, Seen::Request(&Request { trace: Some(published), ..request.clone() }));
    see(&process, Seen::Stack(&sample(at, stack(3))));
    gvl(at, see);
    // Its name may change, and other processes share its image.
    let renamed = Process { comm: "renamed".to_owned(), cmdline: None, ..process.clone() };
    let sum = AllocSum {
        begin_ns: at,
        end_ns: at + 1,
        slots: BTreeMap::from([(40, 5), (640, (1 << 40) - 1)]),
        refills: 2,
        lost: 1,
    };
    see(&renamed, Seen::Alloc(&sum));
    let alloc = AllocStack {
        span: span_at(at),
        ts_ns: at,
        tid: 7,
        comm: Arc::from("worker"),
        slot_size: 640,
        slots: (1 << 40) - 1,
        request: None,
        stack: stack(2),
    };
    see(&renamed, Seen::AllocStack(&alloc));
    let queue = |inode, waiting| AcceptQueue { inode, waiting };
    see(
        &renamed,
        Seen::Load(&ServerLoad { ts_ns: at, busy: Some(3), queues: vec![queue(u64::MAX, 128), queue(7, 0)] }),
    );
    see(&renamed, Seen::Load(&ServerLoad { ts_ns: at, ..ServerLoad::default() }));
    let other = Process { pid: 1, start_ts: None, ..process.clone() };
    see(&other, Seen::Stack(&sample(at, stack(4))));
    let end = |reason, shutdown, before| ProcessEnd {
        reason,
        ts_ns: at,
        since_ns: 1,
        outside_ns: 2,
        beyond_ns: 0,
        shutdown,
        cycles: 3,
        before,
        lost: 4,
    };
    let ends = [
        end(EndReason::Exited, Some(state(at)), CyclesBefore::Earlier(5)),
        end(EndReason::Execed, None, CyclesBefore::Missed(6)),
        end(EndReason::Detached, None, CyclesBefore::Unknown),
    ];
    for end in &ends {
        see(&process, Seen::Ended(end));
    }
}
