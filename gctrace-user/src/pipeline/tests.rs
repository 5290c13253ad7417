//! Fabricated snapshots through the pipeline.

use std::{cell::RefCell, rc::Rc, sync::atomic::AtomicBool};

use gctrace_common::{
    event::{Header, Kind, LifeEvent, Point, RefillEvent, SNAPSHOT_BYTES, SnapshotEvent},
    job::JobEvent,
    memory::MemoryPages,
    request::{RequestEnd, RequestEvent, UnitEvent, UnitPoint},
};
use proptest::prelude::*;
use zerocopy::{FromBytes, FromZeros as _, IntoBytes};

use super::*;
use crate::{
    aggregate::endpoint,
    decode::Event,
    host::proc_root,
    images::Reading,
    model::Image,
    ruby::{RubyVersion, layout::ObjspaceLayout, live_check},
};

mod units;

/// Records the names of what it receives.
struct Notes(Rc<RefCell<Vec<&'static str>>>);

impl Exporter for Notes {
    fn see(&mut self, _: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        self.0.borrow_mut().push(match seen {
            Seen::Process { .. } => "process",
            Seen::Cycle(_) => "cycle",
            Seen::Ended(_) => "ended",
            Seen::Request(_) => "request",
            Seen::GvlWait(_) => "wait",
            _ => "other",
        });
        Ok(())
    }
    fn refused(&mut self, _: Option<u32>, _: &str, _: &str) -> Result<(), ExportError> {
        self.0.borrow_mut().push("refused");
        Ok(())
    }
}

/// Above the kernel's largest pid, so that no process of this machine is described.
const PID: u32 = 1 << 23;
const DURING_GC: u32 = 0x20;

fn pipeline() -> (Pipeline, Rc<RefCell<Vec<&'static str>>>, ObjspaceLayout) {
    let version = RubyVersion::new(3, 1, 2);
    let layout = ObjspaceLayout::of(version, false).unwrap();
    let images = Images::default();
    for index in [0, 1] {
        let image = Image {
            index,
            path: "/libruby.so".into(),
            version,
            build_id: None,
            stat_keys: layout.keys.iter().map(|key| key.name).collect(),
            heap_keys: vec![],
            method: crate::ruby::fallback::Method::Sites,
            probes: 5,
            gvl: None,
            has_symbols: false,
        };
        let reading = Reading {
            layout: layout.clone(),
            during_gc: DURING_GC,
            pause_kinds: HashMap::new(),
            proven: AtomicBool::default(),
        };
        let (image, gc) = (Arc::new(image), GcOf::Itself);
        images.add(KnownImage { image, reading: Some(reading), frames: None, threads: None, gc });
    }
    let notes = Rc::new(RefCell::new(Vec::new()));
    (Pipeline::new(vec![Box::new(Notes(notes.clone()))], images, None, None, None), notes, layout)
}

/// A snapshot at `GC_START` of a healthy 3.1 heap, with its `minor_gc_count` moved by `shift`.
fn snapshot(layout: &ObjspaceLayout, seq: u64, shift: u64) -> SnapshotEvent {
    let words =
        [(440, 10), (384, 6 + shift), (392, 3), (120, 20_000), (24, 50_000), (448, 40_000), (16, 0x20)];
    let data = live_check::read_spans(layout, 0x1000, |address, buffer| {
        for (at, byte) in buffer.iter_mut().enumerate() {
            let offset = address - 0x1000 + at as u64;
            let word = words.iter().find(|(start, _)| (*start..start + 8).contains(&offset));
            *byte =
                word.map_or(0, |(start, value): &(u64, u64)| value.to_le_bytes()[(offset - start) as usize]);
        }
        true
    });
    let mut bytes = [0; SNAPSHOT_BYTES];
    bytes.copy_from_slice(&data.unwrap());
    let header = Header {
        kind: Kind::Snapshot as u32,
        point: Point::GcStart as u32,
        tgid: PID,
        tid: PID,
        ts_ns: seq,
        seq,
        image: 0,
        execs: 0,
    };
    SnapshotEvent {
        header,
        bias: 0,
        objspace: 0x1000,
        register: 0x1000,
        comm: [0; 16],
        slots: layout.spans.len() as u32,
        depth: 1,
        request_ns: 0,
        memory: MemoryPages::default(),
        data: bytes,
    }
}

/// One event that violates an invariant ends the process's tracing; sound events after it are not reported, either.
#[test]
fn a_failed_proof_is_final() {
    let (mut pipeline, notes, layout) = pipeline();
    pipeline.snapshot(Point::GcStart, &snapshot(&layout, 1, 0));
    assert_eq!(*notes.borrow(), ["process"]);
    pipeline.snapshot(Point::GcStart, &snapshot(&layout, 2, 1));
    pipeline.snapshot(Point::GcStart, &snapshot(&layout, 3, 0));
    assert_eq!(*notes.borrow(), ["process", "cycle", "ended", "refused"]);
    assert_eq!((pipeline.counts().pipeline.refused_records, pipeline.counts().pipeline.refused), (2, 1));
}

/// Ractors lose some of their counts: once the layout is proven, a negative number of live slots is accepted.
#[test]
fn lost_counts() {
    let lost = |layout: &ObjspaceLayout, seq| {
        let mut event = snapshot(layout, seq, 0);
        let allocated = 50_000_u64.to_le_bytes();
        let at = event.data.windows(8).position(|word| word == allocated).unwrap();
        event.data[at..at + 8].copy_from_slice(&39_000_u64.to_le_bytes());
        event
    };
    let (mut pipeline, notes, layout) = pipeline();
    pipeline.snapshot(Point::GcStart, &snapshot(&layout, 1, 0));
    pipeline.snapshot(Point::GcStart, &lost(&layout, 2));
    assert_eq!(
        (notes.borrow().as_slice(), pipeline.counts().pipeline.refused),
        (&["process", "cycle"][..], 0)
    );
    let (mut pipeline, notes, layout) = self::pipeline();
    pipeline.snapshot(Point::GcStart, &lost(&layout, 1));
    assert_eq!(*notes.borrow(), ["refused"], "nothing shows that the layout is right");
}

/// /proc describes the program that a forked child has become since, or nothing: until its exec the child is what its parent is.
#[test]
fn forked_children() {
    let (mut pipeline, _, layout) = pipeline();
    let of = |pid, ts_ns| {
        let mut event = snapshot(&layout, 1, 0);
        (event.header.tgid, event.header.tid, event.header.ts_ns) = (pid, pid, ts_ns);
        event
    };
    let parent = std::process::id();
    let mut sleeps = [(); 3].map(|()| std::process::Command::new("sleep").arg("60").spawn().unwrap());
    let [forked, execed, queued] = [sleeps[0].id(), sleeps[1].id(), sleeps[2].id()];
    // A program has its arguments only after its exec has let its parent continue.
    for sleep in &sleeps {
        while proc_root::cmdline(sleep.id()).unwrap().is_empty() {
            std::thread::yield_now();
        }
    }
    pipeline.snapshot(Point::GcStart, &of(parent, 1));
    for child in [forked, execed, queued, PID] {
        pipeline.parents.insert(child, (parent, 10));
    }
    pipeline.execs.insert(execed, 15);
    // The record of its exec is still pending.
    let mut exec = exit(0, 15);
    exec.header.tgid = queued;
    pipeline.lives.push_back((Kind::Exec, exec));
    for child in [forked, execed, queued, PID] {
        pipeline.snapshot(Point::GcStart, &of(child, 20));
    }
    let command = |pid| pipeline.traced[&pid].process.cmdline.clone();
    let service = |pid| pipeline.traced[&pid].process.origin.service.clone();
    assert!(command(parent).is_some());
    for child in [forked, PID] {
        assert_eq!((command(child), service(child)), (command(parent), service(parent)));
        assert_eq!(pipeline.traced[&child].process.ppid, Some(parent));
    }
    for child in [execed, queued] {
        assert_eq!(command(child), Some(vec!["sleep".to_owned(), "60".to_owned()]));
    }
    for sleep in &mut sleeps {
        sleep.kill().unwrap();
        sleep.wait().unwrap();
    }
}

/// The parent of a process is the one that forked it, even if that has ended. After a lost end, the fork may be of another process.
#[test]
fn parents_that_have_ended() {
    let own = std::process::id();
    let (ended, forked_ns) = (PID + 1, monotonic_ns());
    for (at, parent) in [(forked_ns, Some(ended)), (10, Some(std::os::unix::process::parent_id()))] {
        let (mut pipeline, _, layout) = pipeline();
        pipeline.parents.insert(own, (ended, at));
        let mut event = snapshot(&layout, 1, 0);
        (event.header.tgid, event.header.tid) = (own, own);
        pipeline.snapshot(Point::GcStart, &event);
        assert_eq!(pipeline.traced[&own].process.ppid, parent);
    }
}

/// The count at the fork passes through a process that does not collect itself.
#[test]
fn forks_of_processes_without_cycles() {
    let (mut pipeline, _, layout) = pipeline();
    pipeline.snapshot(Point::GcStart, &snapshot(&layout, 1, 0));
    let count = pipeline.traced[&PID].beginning.count;
    assert!(count.is_some());
    for (parent, child, seq) in [(PID, PID + 1, 1), (PID + 1, PID + 2, 0), (PID + 1, PID + 3, 2)] {
        let mut fork = exit(seq, monotonic_ns());
        (fork.header.tgid, fork.other) = (parent, child);
        pipeline.life(Kind::Fork, &fork);
    }
    let at_fork = [1, 2, 3].map(|n| pipeline.beginnings.count_at_fork(PID + n));
    assert_eq!(at_fork, [count, count, None]);
}

/// A process whose probes were detached, and which is refused when it is inspected again, counts once; an image counts separately.
#[test]
fn refused_processes_count_once() {
    let (mut pipeline, notes, layout) = pipeline();
    pipeline.snapshot(Point::GcStart, &snapshot(&layout, 1, 0));
    pipeline.leave_process(PID, 0, "/libruby.so", "opened for writing", 10);
    pipeline.refuse(Some(PID), "/libruby.so", "written to");
    assert_eq!(*notes.borrow(), ["process", "cycle", "ended", "refused", "refused"]);
    assert_eq!(pipeline.counts().pipeline.refused, 1);
    pipeline.refuse(Some(PID + 1), "/libruby.so", "written to");
    pipeline.refuse(None, "/libruby.so", "why");
    pipeline.refuse(None, "/ruby", "why");
    assert_eq!(pipeline.counts().pipeline.refused, 4);
}

/// A site whose register holds something other than the objspace is caught at its first event.
#[test]
fn a_wrong_register_is_refused() {
    let (mut pipeline, notes, layout) = pipeline();
    let event = SnapshotEvent { register: 0x2000, ..snapshot(&layout, 1, 0) };
    pipeline.snapshot(Point::GcStart, &event);
    assert_eq!(*notes.borrow(), ["refused"]);
    assert!(!pipeline.has_reported());
}

/// A process that was found sound and whose first event disproves this has reported nothing; one with a cycle has.
#[test]
fn disproven_processes() {
    for (cycle, has_reported) in [(false, false), (true, true)] {
        let (mut pipeline, _, layout) = pipeline();
        if cycle {
            pipeline.snapshot(Point::GcStart, &snapshot(&layout, 1, 0));
        } else {
            let known = pipeline.images.get(0).unwrap();
            pipeline.trace(PID, "ruby", &known, None, 1);
        }
        assert!(pipeline.has_reported());
        pipeline.refuse_process(PID, "/libruby.so", "test", 1);
        assert_eq!(pipeline.has_reported(), has_reported);
    }
}

/// A process whose state failed the proof when it was found is not reported by its events, however sound they are.
#[test]
fn an_unproven_process_stays_refused() {
    let (mut pipeline, notes, layout) = pipeline();
    pipeline.refuse_process(PID, "/libruby.so", "test", 1);
    pipeline.snapshot(Point::GcStart, &snapshot(&layout, 1, 0));
    pipeline.add_process(PID, 0, None);
    assert_eq!(*notes.borrow(), ["refused"]);
}

/// A process whose probes were detached continues where it was once it is found with another image, and not before.
#[test]
fn a_process_that_was_left_comes_back() {
    let (mut pipeline, notes, layout) = pipeline();
    let own = std::process::id();
    let of_own = |seq, image| {
        let mut event = snapshot(&layout, seq, 0);
        (event.header.tgid, event.header.image) = (own, image);
        event
    };
    pipeline.snapshot(Point::GcStart, &of_own(1, 0));
    pipeline.leave_process(own, 0, "/libruby.so", "test", 1);
    assert_eq!(*notes.borrow(), ["process", "cycle", "ended", "refused"]);
    pipeline.snapshot(Point::GcStart, &of_own(2, 0));
    pipeline.add_process(own, 0, None);
    assert_eq!(*notes.borrow(), ["process", "cycle", "ended", "refused"]);
    assert_eq!((pipeline.counts.refused_records, pipeline.counts.lost_records), (1, 0));
    pipeline.add_process(own, 1, None);
    // One record was lost in between.
    pipeline.snapshot(Point::GcStart, &of_own(4, 1));
    assert_eq!(*notes.borrow(), ["process", "cycle", "ended", "refused", "process"]);
    assert_eq!((pipeline.counts.refused_records, pipeline.counts.lost_records), (1, 1));
    // Data that the kernel side still has of its previous image does not belong to another program.
    assert!(pipeline.process_of(own, 0, "ruby", 5).is_none());
    assert_eq!(*notes.borrow(), ["process", "cycle", "ended", "refused", "process"]);
}

/// A GC that is entered before the heap exists (3.3 does so at boot) does not disprove the layout; an event on a heap
/// of zeros does.
#[test]
fn a_heap_that_is_not_set_up_proves_nothing() {
    let (mut pipeline, notes, layout) = pipeline();
    let mut early = snapshot(&layout, 1, 0);
    early.data = [0; SNAPSHOT_BYTES];
    pipeline.snapshot(Point::GcEnter, &early);
    assert!(!pipeline.refused.contains_key(&PID), "{:?}", notes.borrow());
    pipeline.snapshot(Point::GcStart, &snapshot(&layout, 2, 0));
    assert_eq!((pipeline.counts.cycles_started, pipeline.counts.lost_records), (1, 0));
    early.header.seq = 3;
    pipeline.snapshot(Point::GcStart, &early);
    assert!(pipeline.refused.contains_key(&PID));
}

/// The ring is read up to a record that a program is still filling: an end waits for the records of its process after that one.
#[test]
fn an_end_waits_for_the_last_record() {
    let (mut pipeline, notes, layout) = pipeline();
    pipeline.snapshot(Point::GcStart, &snapshot(&layout, 1, 0));
    let exit = exit(2, monotonic_ns());
    pipeline.lives.push_back((Kind::Exit, exit));
    pipeline.lives_that_are_complete();
    assert_eq!(*notes.borrow(), ["process"]);
    pipeline.snapshot(Point::GcStart, &snapshot(&layout, 2, 0));
    pipeline.lives_that_are_complete();
    assert_eq!(*notes.borrow(), ["process", "cycle", "cycle", "ended"]);
    assert_eq!((pipeline.counts.lost_records, pipeline.counts.processes), (0, 1));
}

/// The same for a process whose first record is among them.
#[test]
fn an_end_waits_for_the_first_record() {
    let (mut pipeline, notes, layout) = pipeline();
    pipeline.lives.push_back((Kind::Exit, exit(1, monotonic_ns())));
    pipeline.lives_that_are_complete();
    pipeline.snapshot(Point::GcStart, &snapshot(&layout, 1, 0));
    pipeline.lives_that_are_complete();
    assert_eq!(*notes.borrow(), ["process", "cycle", "ended"]);
}

/// A record that the kernel lost never arrives: the end does not wait for it forever, and reports the loss.
#[test]
fn an_end_does_not_wait_for_lost_records() {
    let (mut pipeline, notes, layout) = pipeline();
    pipeline.snapshot(Point::GcStart, &snapshot(&layout, 1, 0));
    pipeline.lives.push_back((Kind::Exit, exit(3, 2)));
    pipeline.lives_that_are_complete();
    assert_eq!(*notes.borrow(), ["process", "cycle", "ended"]);
    assert_eq!(pipeline.counts.lost_records, 2);
}

/// Ends that are still pending when tracing ends are handled all the same.
#[test]
fn detaching_handles_every_end() {
    let (mut pipeline, notes, layout) = pipeline();
    pipeline.snapshot(Point::GcStart, &snapshot(&layout, 1, 0));
    pipeline.lives.push_back((Kind::Exit, exit(2, monotonic_ns())));
    pipeline.detach(monotonic_ns());
    assert_eq!(*notes.borrow(), ["process", "cycle", "ended"]);
    assert_eq!(pipeline.counts.lost_records, 1);
}

/// A record that arrives after the end of its process, but is older, does not recreate the process.
#[test]
fn a_late_record_revives_nothing() {
    let (mut pipeline, notes, layout) = pipeline();
    pipeline.snapshot(Point::GcStart, &snapshot(&layout, 1, 0));
    pipeline.life(Kind::Exit, &exit(1, 10));
    pipeline.snapshot(Point::GcStart, &snapshot(&layout, 2, 0));
    assert!(pipeline.process_of(PID, 0, "ruby", 9).is_none());
    assert_eq!(*notes.borrow(), ["process", "cycle", "ended"]);
    assert_eq!((pipeline.counts.refused_records, pipeline.counts.processes), (1, 1));
    // The next process with this pid.
    assert!(pipeline.process_of(PID, 0, "ruby", 11).is_some());
}

/// The records of a process that has chosen a GC library refer to two images; it is one process, traced by the library.
#[test]
fn two_images_of_one_process() {
    let (mut pipeline, notes, layout) = pipeline();
    let image = |index, gc| {
        let known = pipeline.images.get(0).unwrap();
        let (image, reading) = (known.image.clone(), known.reading.as_ref().unwrap());
        let reading = Reading {
            layout: reading.layout.clone(),
            pause_kinds: HashMap::new(),
            during_gc: DURING_GC,
            proven: AtomicBool::default(),
        };
        let image = Arc::new(Image { index, ..(*image).clone() });
        pipeline.images.add(KnownImage { image, reading: Some(reading), frames: None, threads: None, gc });
    };
    image(1, GcOf::Chosen);
    image(2, GcOf::LibraryOf(1));
    assert!(pipeline.process_of(PID, 1, "ruby", 1).is_none(), "the GC of the process is not known yet");
    let mut event = snapshot(&layout, 1, 0);
    event.header.image = 2;
    pipeline.snapshot(Point::GcStart, &event);
    assert_eq!(pipeline.process_of(PID, 1, "ruby", 2).unwrap().image.index, 2);
    event.header.seq = 2;
    pipeline.snapshot(Point::GcStart, &event);
    assert_eq!(*notes.borrow(), ["process", "cycle"]);
}

/// Records of a program after an exec are not attributed to the previous program, whose end waits for its last GC record, though both run the
/// same image.
#[test]
fn records_behind_an_exec_wait_for_it() {
    let (mut pipeline, notes, layout) = pipeline();
    let request = |execs| {
        let mut event = RequestEvent::new_zeroed();
        event.header = Header { execs, ..exit(0, monotonic_ns()).header };
        event.begin_ns = event.header.ts_ns - 1;
        event
    };
    let take = |pipeline: &mut Pipeline, event: &RequestEvent| {
        pipeline.unit_record(&Event::Request(RequestEnd::Closed, event));
    };
    pipeline.snapshot(Point::GcStart, &snapshot(&layout, 1, 0));
    let exec = exit(2, monotonic_ns());
    pipeline.lives.push_back((Kind::Exec, exec));
    take(&mut pipeline, &request(0));
    take(&mut pipeline, &request(1));
    let stack = OwnedEvent::Refill(RefillEvent { header: request(1).header, ..RefillEvent::new_zeroed() });
    assert!(pipeline.is_early(Record::Event(stack).header()));
    pipeline.report_requests();
    pipeline.lives_that_are_complete();
    assert_eq!(*notes.borrow(), ["process", "request"]);
    pipeline.snapshot(Point::GcStart, &snapshot(&layout, 2, 0));
    pipeline.lives_that_are_complete();
    pipeline.report_requests();
    assert_eq!(*notes.borrow(), ["process", "request", "cycle", "cycle", "ended", "process", "request"]);
    assert!(pipeline.early.is_empty());
}

/// Requests to endpoints above a process's limit are counted.
#[test]
fn other_endpoints() {
    let (mut pipeline, _, layout) = pipeline();
    pipeline.snapshot(Point::GcStart, &snapshot(&layout, 1, 0));
    for at in 0..endpoint::MAX_TEMPLATES + 3 {
        let letter = |of: usize| char::from(b'a' + (of % 26) as u8);
        let line = format!("GET /{}{} HTTP/1.1\r\n", letter(at / 26), letter(at));
        let mut event = RequestEvent::new_zeroed();
        event.header = exit(0, monotonic_ns()).header;
        event.begin_ns = event.header.ts_ns - 1;
        event.len = line.len() as u32;
        event.line[..line.len()].copy_from_slice(line.as_bytes());
        pipeline.unit_record(&Event::Request(RequestEnd::Closed, &event));
    }
    pipeline.report_requests();
    let counts = pipeline.counts().requests;
    assert_eq!((counts.requests_reported, counts.requests_other_endpoint), (503, 3));
    assert!(pipeline.traced[&PID].has_other_endpoints);
}

/// With too many waiting records the exec is handled at once.
#[test]
fn few_records_wait_for_an_exec() {
    let (mut pipeline, notes, layout) = pipeline();
    pipeline.snapshot(Point::GcStart, &snapshot(&layout, 1, 0));
    pipeline.lives.push_back((Kind::Exec, exit(2, monotonic_ns())));
    let header = Header { execs: 1, ..exit(0, monotonic_ns()).header };
    for _ in 0..=early::MOST {
        let event = RefillEvent { header, ..RefillEvent::new_zeroed() };
        pipeline.wait_for_exec(Early::Stack(Record::Event(OwnedEvent::Refill(event))));
    }
    pipeline.bound_early();
    assert!(pipeline.early.is_empty());
    assert_eq!((notes.borrow().len(), pipeline.counts.lost_records), (4, 1), "{:?}", notes.borrow());
}

/// The end of the process after this many records.
fn exit(seq: u64, ts_ns: u64) -> LifeEvent {
    let header =
        Header { kind: Kind::Exit as u32, point: 0, tgid: PID, tid: PID, ts_ns, seq, image: 0, execs: 0 };
    LifeEvent { header, other: 0, gvl: 0, begun_ns: 0, comm: [0; 16] }
}

/// Records when it was flushed.
struct Flushes(Rc<RefCell<Vec<u64>>>);

impl Exporter for Flushes {
    fn see(&mut self, _: &Process, _: Seen<'_>) -> Result<(), ExportError> {
        Ok(())
    }
    fn flush(&mut self, now_ns: u64) -> Result<(), ExportError> {
        self.0.borrow_mut().push(now_ns);
        Ok(())
    }
}

/// A recording replays a flush with the recorded time: the outputs of the run must have had the same.
#[test]
fn all_are_flushed_at_the_same_moment() {
    let moments = Rc::new(RefCell::new(Vec::new()));
    let outputs: Vec<Box<dyn Exporter>> = (0..100).map(|_| Box::new(Flushes(moments.clone())) as _).collect();
    let mut pipeline = Pipeline::new(outputs, Images::default(), None, None, None);
    pipeline.flush();
    let moments = moments.borrow();
    assert!(moments.len() == 100 && moments.iter().all(|moment| *moment == moments[0]), "{moments:?}");
}

/// A record of the ring of requests with random content after its header; with few threads and start times, so that some coincide.
fn unit_records() -> impl Strategy<Value = (u32, Header, Vec<u8>)> {
    let header = (0..3_u32, 0..4_u64, 0..2_u32, any::<u64>()).prop_map(|(tid, ts_ns, image, seq)| Header {
        kind: 0,
        point: 0,
        tgid: PID,
        tid: PID + tid,
        ts_ns: 100 + ts_ns,
        seq,
        image,
        execs: 0,
    });
    (0..3_u32, header, prop::collection::vec(any::<u8>(), 0..64))
}

/// A structure filled with these bytes repeatedly, after a header.
fn filled<T: FromBytes + IntoBytes>(header: Header, bytes: &[u8]) -> T {
    let mut event = T::new_zeroed();
    let whole = event.as_mut_bytes();
    whole.iter_mut().zip(bytes.iter().cycle()).for_each(|(to, from)| *to = *from);
    whole[..size_of::<Header>()].copy_from_slice(header.as_bytes());
    event
}

proptest! {
    /// Whatever the kernel writes about requests and jobs, each record is reported, refused or counted as one without room, exactly once.
    #[test]
    fn any_unit_record(
        records in prop::collection::vec((unit_records(), 0..4_u64, 0..5_u32), 1..40),
    ) {
        let (mut pipeline, notes, layout) = pipeline();
        pipeline.snapshot(Point::GcStart, &snapshot(&layout, 1, 0));
        let (mut units, mut states) = (0_u64, 0_u64);
        for ((kind, header, bytes), begin_ns, end) in records {
            let end = RequestEnd::from_raw(end).unwrap_or(RequestEnd::Kept);
            match kind {
                0 => {
                    let event = RequestEvent { begin_ns, ..filled(header, &bytes) };
                    pipeline.unit_record(&Event::Request(end, &event));
                    units += 1;
                }
                1 => {
                    let event = JobEvent { begin_ns, ..filled(header, &bytes) };
                    pipeline.unit_record(&Event::Job(end, &event));
                    units += 1;
                }
                _ => {
                    let event = UnitEvent { begin_ns, ..filled(header, &bytes) };
                    pipeline.unit_record(&Event::Unit(UnitPoint::End, &event));
                    states += 1;
                }
            }
            if header.seq % 3 == 0 {
                pipeline.report_requests();
            }
        }
        pipeline.detach(monotonic_ns());
        let counts = pipeline.counts().requests;
        prop_assert_eq!((counts.decoded_requests, counts.decoded_unit_states), (units, states));
        let of = [
            counts.requests_reported,
            counts.requests_refused,
            counts.requests_no_room,
            counts.jobs_returned,
        ];
        prop_assert_eq!(of.iter().sum::<u64>(), units, "{:?}", counts);
        let of = [counts.unit_states_exact, counts.unit_states_moving, counts.unit_states_refused];
        prop_assert_eq!(of.iter().sum::<u64>(), states, "{:?}", counts);
        let shown = notes.borrow().iter().filter(|what| **what == "request").count();
        prop_assert_eq!(shown as u64, counts.requests_reported);
    }
}
