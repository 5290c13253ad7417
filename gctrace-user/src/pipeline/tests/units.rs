//! What requests are reported to have caused, while their process is not traced yet, or not at all.

use gctrace_common::{
    event::PauseEvent,
    gvl::{GvlKey, GvlThread, GvlWaitEvent},
    memory::MemoryUse,
};

use super::*;
use crate::{
    decode::GvlRecord,
    model::{
        gvl::GvlWait,
        gvl_so_far::GvlSoFar,
        request::{PageFaults, Request, RequestMemory},
    },
};

/// What was reported of requests and the GVL.
#[derive(Default)]
struct Reported {
    requests: Vec<Request>,
    waits: Vec<GvlWait>,
    so_far: Vec<GvlSoFar>,
}

struct Collector(Rc<RefCell<Reported>>);

impl Exporter for Collector {
    fn see(&mut self, _: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        match seen {
            Seen::Request(request) => self.0.borrow_mut().requests.push(request.clone()),
            Seen::GvlWait(wait) => self.0.borrow_mut().waits.push(wait.clone()),
            Seen::GvlSoFar(so_far) => self.0.borrow_mut().so_far.push(so_far.clone()),
            _ => {}
        }
        Ok(())
    }
}

fn collecting() -> (Pipeline, Rc<RefCell<Reported>>, ObjspaceLayout) {
    let (pipeline, _, layout) = pipeline();
    let reported = Rc::new(RefCell::new(Reported::default()));
    let outputs = Outputs::new(vec![Box::new(Collector(reported.clone()))]);
    (Pipeline { outputs, ..pipeline }, reported, layout)
}

fn header(seq: u64, ts_ns: u64) -> Header {
    exit(seq, ts_ns).header
}

fn pause(seq: u64, (begin_ns, end_ns): (u64, u64)) -> PauseEvent {
    PauseEvent { header: header(seq, end_ns), begin_ns, ..PauseEvent::new_zeroed() }
}

fn wait(request_ns: u64, (begin_ns, end_ns): (u64, u64)) -> GvlWaitEvent {
    GvlWaitEvent { header: header(0, end_ns), begin_ns, id: 1, request_ns, ..GvlWaitEvent::new_zeroed() }
}

fn take_wait(pipeline: &mut Pipeline, event: GvlWaitEvent) {
    pipeline.stack_record(Record::Event(OwnedEvent::Gvl(GvlRecord::Wait(Box::new(event)))));
}

fn take_request(pipeline: &mut Pipeline, (begin_ns, end_ns): (u64, u64)) {
    let event = RequestEvent { header: header(0, end_ns), begin_ns, ..RequestEvent::new_zeroed() };
    pipeline.unit_record(&Event::Request(RequestEnd::Closed, &event));
}

/// A forked child is traced from its first cycle on. What its first request paused for before that is not known.
#[test]
fn pauses_before_the_first_cycle() {
    let (mut pipeline, reported, layout) = collecting();
    pipeline.gc_event(&Event::Pause(pause(1, (100, 200))));
    let mut event = snapshot(&layout, 2, 0);
    event.header.ts_ns = 300;
    pipeline.snapshot(Point::GcStart, &event);
    take_request(&mut pipeline, (50, 400));
    take_request(&mut pipeline, (500, 600));
    pipeline.report_requests();
    let requests = &reported.borrow().requests;
    let of = |request: &Request| (request.gcs, request.gc_ns, request.gc_pauses, request.gc_other);
    assert_eq!(of(&requests[0]), (None, None, None, None));
    assert_eq!(of(&requests[1]), (Some(0), Some(0), Some(0), Some(GcTime::default())));
}

/// Page faults and growth of a request, in bytes of this machine's pages, unless they are unknown or the thread did not see the end.
#[test]
fn memory_of_requests() {
    let page = rustix::param::page_size() as i64;
    let faults = Some(PageFaults { minor: 3, major: 0 });
    let used = MemoryUse { minor_faults: 3, major_faults: 0, resident: -2 };
    let unknown = RequestMemory::default();
    for (end, used, expected) in [
        (RequestEnd::Closed, used, RequestMemory { faults, rss_growth: Some(-2 * page) }),
        (
            RequestEnd::Kept,
            MemoryUse { resident: MemoryUse::PAGES_UNKNOWN, ..used },
            RequestMemory { faults, rss_growth: None },
        ),
        (
            RequestEnd::Kept,
            MemoryUse { resident: 0, ..MemoryUse::UNKNOWN },
            RequestMemory { faults: None, rss_growth: Some(0) },
        ),
        (RequestEnd::Kept, MemoryUse::UNKNOWN, unknown),
        (RequestEnd::Left, used, unknown),
        (RequestEnd::Gone, used, unknown),
    ] {
        let (mut pipeline, reported, layout) = collecting();
        pipeline.snapshot(Point::GcStart, &snapshot(&layout, 1, 0));
        let header = header(0, monotonic_ns());
        let begin_ns = header.ts_ns - 1;
        let event = RequestEvent { header, begin_ns, memory: used, ..RequestEvent::new_zeroed() };
        pipeline.unit_record(&Event::Request(end, &event));
        pipeline.report_requests();
        assert_eq!(reported.borrow().requests[0].memory, expected, "{end:?} {used:?}");
    }
}

/// Records that were lost between such pauses may be of any time before.
#[test]
fn lost_before_the_first_cycle() {
    let (mut pipeline, reported, layout) = collecting();
    pipeline.gc_event(&Event::Pause(pause(1, (100, 200))));
    pipeline.gc_event(&Event::Pause(pause(5, (400, 500))));
    let mut event = snapshot(&layout, 6, 0);
    event.header.ts_ns = 600;
    pipeline.snapshot(Point::GcStart, &event);
    take_request(&mut pipeline, (250, 300));
    pipeline.report_requests();
    let reported = reported.borrow();
    assert_eq!((reported.requests[0].gcs, reported.requests[0].gc_other), (None, None));
}

/// A child that only finished its parent's sweep leaves nothing to the program that it executes, and what was lost of it is counted.
#[test]
fn pauses_before_an_exec() {
    for kind in [Kind::Exec, Kind::Exit] {
        let (mut pipeline, _, layout) = collecting();
        pipeline.gc_event(&Event::Pause(pause(1, (100, 200))));
        pipeline.gc_event(&Event::Pause(pause(3, (250, 260))));
        pipeline.life(kind, &exit(5, 300));
        assert_eq!(pipeline.counts.lost_records, 3);
        for (seq, ts_ns) in [(1, 400), (3, 500)] {
            let mut event = snapshot(&layout, seq, 0);
            event.header.ts_ns = ts_ns;
            pipeline.snapshot(Point::GcStart, &event);
        }
        let traced = &pipeline.traced[&PID];
        assert_eq!((traced.outside_ns, traced.lost), (0, 1));
        assert!(traced.since_ns >= 300, "{}", traced.since_ns);
        assert_eq!(pipeline.counts.lost_records, 4);
    }
}

/// A wait that is the first that is seen of a process names its request as the request itself does.
#[test]
fn first_record_is_a_wait() {
    let (mut pipeline, reported, _) = collecting();
    take_wait(&mut pipeline, wait(50, (60, 100)));
    take_request(&mut pipeline, (50, 400));
    pipeline.report_requests();
    let reported = reported.borrow();
    assert_eq!(reported.waits[0].request, Some(reported.requests[0].id));
    assert_eq!(pipeline.units.counts().unknown, 0);
}

/// A child's first record may be in another ring than its fork, and be handled first.
#[test]
fn first_record_is_before_the_fork() {
    let (mut pipeline, _, layout) = collecting();
    let parent = std::process::id();
    let mut event = snapshot(&layout, 1, 0);
    (event.header.tgid, event.header.tid, event.header.ts_ns) = (parent, parent, monotonic_ns());
    pipeline.snapshot(Point::GcStart, &event);
    let forked_ns = monotonic_ns();
    let mut fork = exit(1, forked_ns);
    (fork.header.tgid, fork.other) = (parent, PID);
    pipeline.lives.push_back((Kind::Fork, fork));
    let seen_ns = monotonic_ns();
    take_wait(&mut pipeline, wait(seen_ns, (seen_ns, seen_ns + 1)));
    let (of_parent, child) = (&pipeline.traced[&parent], &pipeline.traced[&PID]);
    assert_eq!((child.process.ppid, child.since_ns), (Some(parent), forked_ns));
    assert_eq!(child.process.cmdline, of_parent.process.cmdline);
    pipeline.lives_until(u64::MAX);
    pipeline.snapshot(Point::GcStart, &snapshot(&layout, 1, 0));
    assert_eq!(pipeline.traced[&PID].beginning.ended(false).0, CyclesBefore::Missed(0));
}

/// Waits of a refused process take no room for the requests of others.
#[test]
fn refused_processes_have_no_requests() {
    let (mut pipeline, reported, layout) = collecting();
    let of_own = |header| Header { tgid: std::process::id(), ..header };
    pipeline.refuse_process(PID, "/libruby.so", "test", 1);
    for begin_ns in 1..=70_000 {
        take_wait(&mut pipeline, wait(begin_ns, (begin_ns, begin_ns + 1)));
    }
    let mut event = snapshot(&layout, 1, 0);
    event.header = of_own(event.header);
    pipeline.snapshot(Point::GcStart, &event);
    let event = RequestEvent { header: of_own(header(0, 400)), begin_ns: 50, ..RequestEvent::new_zeroed() };
    pipeline.unit_record(&Event::Request(RequestEnd::Closed, &event));
    pipeline.report_requests();
    assert_eq!((reported.borrow().requests.len(), pipeline.request_counts.requests_no_room), (1, 0));
    assert_eq!((pipeline.units.open(), pipeline.counts().gvl.gvl_refused), (0, 70_000));
}

/// The GVL sums of a process whose probes were detached are not part of those of its next image.
#[test]
fn gvl_sums_of_an_image_that_was_left() {
    let (mut pipeline, reported, layout) = collecting();
    let own = std::process::id();
    let thread = |id, image, wait_ns| {
        let mut thread = Box::new(GvlThread::blank());
        thread.header = Header { tgid: own, image, ..header(0, 10) };
        (thread.id, thread.waits, thread.wait_ns) = (id, 1, wait_ns);
        thread
    };
    let ended = |pipeline: &mut Pipeline, thread| {
        pipeline.stack_record(Record::Event(OwnedEvent::Gvl(GvlRecord::Thread(thread))));
    };
    let running = |thread: Box<GvlThread>| (GvlKey { at: thread.id, tgid: own, execs: 0 }, *thread);
    let mut event = snapshot(&layout, 1, 0);
    event.header.tgid = own;
    pipeline.snapshot(Point::GcStart, &event);
    ended(&mut pipeline, thread(1, 0, 5000));
    pipeline.gvl_so_far_with(vec![running(thread(2, 0, 300))]);
    pipeline.leave_process(own, 0, "/libruby.so", "test", 20);
    pipeline.gvl_so_far_with(vec![running(thread(2, 0, 300))]);
    pipeline.add_process(own, 1, None);
    ended(&mut pipeline, thread(3, 1, 70));
    pipeline.gvl_so_far_with(vec![running(thread(2, 0, 300)), running(thread(4, 1, 9))]);
    let mut end = exit(1, monotonic_ns());
    end.header.tgid = own;
    pipeline.life(Kind::Exit, &end);
    let sums: Vec<u64> = reported.borrow().so_far.iter().map(|so_far| so_far.wait_ns).collect();
    assert_eq!(sums, [5300, 79, 70]);
}

/// A GC record that is being written when its request ends is waited for, however soon the ring is read again, but not forever.
#[test]
fn requests_wait_for_records() {
    for comes in [true, false] {
        let (mut pipeline, reported, layout) = collecting();
        pipeline.snapshot(Point::GcStart, &snapshot(&layout, 1, 0));
        let begin_ns = monotonic_ns();
        take_request(&mut pipeline, (begin_ns, begin_ns + 10));
        pipeline.numbered.insert(PID, Numbered::new(Some(2), begin_ns + 20));
        for now_ns in [100, 101, 102, lives::AWAIT_LAST_RECORD_NS] {
            pipeline.report_requests_at(begin_ns + now_ns);
        }
        assert!(reported.borrow().requests.is_empty());
        if comes {
            let mut event = snapshot(&layout, 2, 0);
            (event.header.ts_ns, event.request_ns) = (begin_ns + 5, begin_ns);
            pipeline.snapshot(Point::GcStart, &event);
            pipeline.report_requests_at(begin_ns + 200);
        } else {
            pipeline.report_requests_at(begin_ns + lives::AWAIT_LAST_RECORD_NS + 101);
        }
        let requests: Vec<_> = reported.borrow().requests.iter().map(|request| request.gcs).collect();
        assert_eq!(requests, [comes.then_some(1)]);
        assert!(pipeline.numbered.is_empty());
        // What was lost is not waited for again.
        let later_ns = begin_ns + 5 * lives::AWAIT_LAST_RECORD_NS;
        take_request(&mut pipeline, (later_ns, later_ns + 10));
        pipeline.numbered.insert(PID, Numbered::new(Some(2), later_ns + 20));
        pipeline.report_requests_at(later_ns + 30);
        assert_eq!(reported.borrow().requests.len(), 2);
    }
}

/// A run whose cycle was not reported because its pause is unknown has an unknown number of cycles.
#[test]
fn runs_with_a_cycle_that_is_not_reported() {
    let (mut pipeline, _, layout) = collecting();
    let mut cycle = |seq, depth| {
        pipeline.snapshot(Point::GcStart, &SnapshotEvent { depth, ..snapshot(&layout, seq, 0) });
        pipeline.traced[&PID].has_all_cycles(CyclesBefore::Missed(0))
    };
    assert_eq!([cycle(1, 1), cycle(2, 0), cycle(3, 1)], [true, false, false]);
    assert_eq!(pipeline.counts.starts_outside, 1);
}

/// A process that is killed right after a request: the kernel has forgotten how many records it had, but that of its end has the number.
#[test]
fn killed_after_a_request() {
    for lost in [0, 1] {
        let (mut pipeline, reported, layout) = collecting();
        pipeline.snapshot(Point::GcStart, &snapshot(&layout, 1, 0));
        let begin_ns = monotonic_ns();
        take_request(&mut pipeline, (begin_ns, begin_ns + 10));
        pipeline.numbered.insert(PID, Numbered::new(None, begin_ns + 20));
        pipeline.report_requests_at(begin_ns + 30);
        assert!(reported.borrow().requests.is_empty());
        pipeline.life(Kind::Exit, &exit(1 + lost, begin_ns + 40));
        let requests: Vec<_> = reported.borrow().requests.iter().map(|request| request.gcs).collect();
        assert_eq!(requests, [(lost == 0).then_some(0)]);
    }
}
