//! What a flight recorder writes equals the end of a whole recording.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use super::*;
use crate::{
    ledger::Extent,
    model::{
        GcCycle, Pause,
        gvl::{GvlProcessSummary, GvlSums, GvlThreadSummary, GvlTimes, GvlWho},
        gvl_so_far::GvlSoFar,
        seen::{CyclesBefore, ProcessEnd},
        stack::{StackSample, ThreadState},
    },
};

pub(super) const S: u64 = 1_000_000_000;

pub(super) fn keep(seconds: u64, triggers: &[&str]) -> Keep {
    let triggers = triggers.iter().map(|text| text.parse().unwrap()).collect();
    Keep { ns: seconds * S, bytes: 64 << 20, triggers, cooldown_ns: 5 * S, most: 2 }
}

/// A flight recorder, what it received, and where it writes.
pub(super) struct Flight {
    dir: tempfile::TempDir,
    pub(super) outputs: Outputs,
    log: Log,
    pub(super) ledger: Ledger,
}

impl Flight {
    pub(super) fn new(keep: Keep) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let log = Log::default();
        let recorder = FlightRecorder::create(&dir.path().join("f.gctrace"), &header(), keep).unwrap();
        let outputs = Outputs::new(vec![Box::new(recorder), Box::new(log.clone())]);
        let ledger = Ledger { kernel: Some(vec![0; Counter::ALL.len()]), ..Ledger::default() };
        Self { dir, outputs, log, ledger }
    }

    pub(super) fn see(&mut self, process: &Process, seen: Seen<'_>) {
        match seen {
            Seen::Process { .. } => self.ledger.user.pipeline.processes += 1,
            Seen::Cycle(_) => self.ledger.user.pipeline.cycles += 1,
            _ => {}
        }
        self.outputs.hand(|exporter| exporter.see(process, seen));
    }

    /// Advances by a second.
    pub(super) fn second(&mut self, now_ns: u64) {
        self.outputs.hand(|exporter| exporter.flush(now_ns));
        self.outputs.tell(|exporter| {
            exporter.account_follows();
        });
        self.outputs.tell(|exporter| exporter.account(&self.ledger));
    }

    /// Waits for the files being written.
    pub(super) fn written(&mut self) -> Vec<PathBuf> {
        while self.counts().dumps_waiting > 0 {
            std::thread::sleep(std::time::Duration::from_millis(1));
            self.outputs.hand(|exporter| exporter.flush(0));
        }
        let mut files: Vec<_> =
            fs::read_dir(self.dir.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        files
    }

    /// Writes what is kept now.
    pub(super) fn dump(&mut self) -> Vec<u8> {
        let before = self.written();
        self.outputs.tell(|exporter| exporter.dump_requested());
        self.outputs.tell(|exporter| exporter.account(&self.ledger));
        let after = self.written();
        assert_eq!(after.len(), before.len() + 1, "{:?}", self.outputs.failures());
        fs::read(after.iter().find(|path| !before.contains(path)).unwrap()).unwrap()
    }

    /// The counters, after checking that they balance.
    fn counts(&self) -> RecordingCounts {
        let mut counts = UserCounts::default();
        self.outputs.add_counts(&mut counts);
        let ledger = Ledger {
            user: UserCounts { recording: counts.recording, ..UserCounts::default() },
            ..self.ledger.clone()
        };
        assert_eq!(ledger.imbalances(), Vec::<String>::new());
        counts.recording
    }

    fn names(&mut self) -> Vec<String> {
        self.written().iter().map(|path| path.file_name().unwrap().to_str().unwrap().to_owned()).collect()
    }
}

fn dump_of(bytes: &[u8]) -> Dump {
    Recording::read(bytes, Path::new("test")).unwrap().header().dump.clone().unwrap()
}

/// Lines except those of accounts, whose counters start with the dump, and of the end.
fn events(lines: &[String]) -> Vec<&String> {
    let kind = |line: &&String| {
        !["account ", "finish ", "settled ", "closed "].iter().any(|other| line.starts_with(other))
    };
    lines.iter().filter(kind).collect()
}

/// A cycle with one stop.
pub(super) fn cycle(at_ns: u64, stop_ns: u64) -> GcCycle {
    let pause = Pause {
        tid: 7,
        begin_ns: at_ns,
        ns: stop_ns,
        kind: None,
        mark_ns: stop_ns,
        sweep_ns: 0,
        other_ns: 0,
    };
    GcCycle { pauses: vec![pause], lost: 0, ..samples::cycle(at_ns) }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]
    /// However much is dropped, the file contains exactly what the exporters received from its start on.
    #[test]
    fn any_tail(seconds in proptest::collection::vec(0_usize..3, 1..25), keep_s in 1_u64..12) {
        let mut flight = Flight::new(keep(keep_s, &[]));
        let mut begins = vec![0];
        for (at, rounds) in seconds.iter().enumerate() {
            let at = at as u64 * S;
            for round in 0..*rounds {
                samples::all(at + round as u64, &mut |process, seen| flight.see(process, seen));
            }
            flight.second(at + S);
            begins.push(flight.log.lines().len());
        }
        let bytes = flight.dump();
        let dump = dump_of(&bytes);
        let first = (seconds.len() as u64).saturating_sub(keep_s) as usize;
        // The times in the header are 42 ns after 0.
        prop_assert_eq!(dump.from_ns / S, first as u64);
        let (result, lines) = replayed(&bytes);
        prop_assert_eq!(result.unwrap().ending, Ending::Complete);
        let handed = flight.log.lines();
        let end = begins[begins.len() - 1];
        let (expected, found) = (events(&handed[begins[first]..end]), events(&lines));
        prop_assert_eq!(found.len(), expected.len());
        prop_assert_eq!(found, expected);
    }
}

/// A dump has processes from the time when they were traced, not from when they were found, and none of their cycles is older than that.
#[test]
fn traced_before_it_was_found() {
    let mut flight = Flight::new(keep(60, &[]));
    let (one, two) = (process_with(1), process_with(2));
    flight.see(&one, Seen::Process { state: None, now_ns: S, since_ns: S / 2 });
    flight.see(&two, Seen::Process { state: None, now_ns: S, since_ns: S });
    for process in [&one, &two] {
        flight.see(process, Seen::Cycle(&samples::cycle(S / 2 + 7)));
    }
    flight.second(2 * S);
    let (result, lines) = replayed(&flight.dump());
    assert_eq!(result.unwrap().ending, Ending::Complete);
    let since: Vec<&str> = lines
        .iter()
        .filter_map(|line| line.split("Ended(").nth(1)?.split("since_ns: ").nth(1)?.split(',').next())
        .collect();
    assert_eq!(since, ["500000000", "500000007"]);
}

/// Times off the CPU that have not ended are in a dump if a part of them lies in it. A later dump has them only as
/// they are handed over then.
#[test]
fn open_times() {
    let mut flight = Flight::new(keep(2, &[]));
    let process = process_with(4242);
    flight.see(&process, Seen::Process { state: None, now_ns: 42, since_ns: 42 });
    for second in 1..=5 {
        flight.second(second * S);
    }
    let wanted = |flight: &mut Flight| {
        let mut wanted = false;
        flight.outputs.tell(|exporter| wanted |= exporter.account_follows());
        wanted
    };
    assert!(!wanted(&mut flight), "nothing is about to be read");
    flight.outputs.tell(|exporter| exporter.dump_requested());
    assert!(wanted(&mut flight));
    let blocked = |tid, ts_ns, wall_ns| {
        let sample = samples::sample(ts_ns, Arc::from([]));
        StackSample { tid, state: ThreadState::Blocked, cpu_ns: 0, wall_ns, ..sample }
    };
    let open = [blocked(1, S, 4 * S), blocked(2, 4 * S + S / 2, S / 2), blocked(3, 1, S)];
    let open: Vec<_> = open.into_iter().map(|sample| (process.clone(), sample)).collect();
    flight.outputs.tell(|exporter| exporter.off_cpu_so_far(&open));
    flight.outputs.tell(|exporter| exporter.account(&flight.ledger));
    let file = flight.written().pop().unwrap();
    let of = |bytes: &[u8]| {
        let (result, lines) = replayed(bytes);
        assert_eq!(result.unwrap().ending, Ending::Complete);
        lines.into_iter().filter(|line| line.contains("Blocked")).collect::<Vec<_>>()
    };
    let lines = of(&fs::read(&file).unwrap());
    let has = |ts_ns: u64, wall_ns: u64| {
        let has = |line: &&String| {
            line.contains(&format!("ts_ns: {ts_ns},")) && line.contains(&format!("wall_ns: {wall_ns},"))
        };
        lines.iter().filter(has).count()
    };
    assert_eq!((lines.len(), has(S, 4 * S), has(4 * S + S / 2, S / 2)), (2, 1, 1), "{lines:#?}");
    flight.see(&process, Seen::Stack(&blocked(2, 4 * S + S / 2, S)));
    flight.second(6 * S);
    assert_eq!(of(&flight.dump()).len(), 1);
}

/// A live recording has the off-CPU times that have not ended: all states of each, up to when it was last read,
/// until the time is handed over in full.
#[test]
fn open_times_of_a_run() {
    let (mut recorder, recording) = LiveRecorder::new(header(), 600 * S, 64 << 20);
    let (process, other) = (process_with(4242), process_with(4243));
    for of in [&process, &other] {
        recorder.see(of, Seen::Process { state: None, now_ns: 42, since_ns: 42 }).unwrap();
    }
    let sample = |tid, state, ts_ns, wall_ns| StackSample {
        tid,
        state,
        cpu_ns: 0,
        wall_ns,
        ..samples::sample(ts_ns, Arc::from([]))
    };
    let second = |recorder: &mut LiveRecorder, now_ns: u64, open: &[(&Process, StackSample)]| {
        recorder.flush(now_ns).unwrap();
        assert!(recorder.account_follows());
        let open: Vec<_> =
            open.iter().map(|(process, sample)| ((*process).clone(), sample.clone())).collect();
        recorder.off_cpu_so_far(&open);
        recorder.account(&Ledger::default());
    };
    let shown = || {
        let snapshot = recording.snapshot().unwrap();
        let (result, lines) = replayed(&snapshot.parts.concat());
        assert_eq!(result.unwrap().ending, Ending::Complete);
        let times = |line: &String| {
            let after = |name: &str| line.split_once(name)?.1.split_once([',', ' '])?.0.parse::<u64>().ok();
            let wall_ns = after("wall_ns: ").filter(|ns| *ns > 0)?;
            Some((after("tid: ")?, after("ts_ns: ")?, wall_ns))
        };
        let mut times: Vec<_> = lines.iter().filter_map(times).collect();
        times.sort_unstable();
        times
    };
    // Waiting for the GVL, then for a CPU, is one time; a thread with the same id belongs to another process.
    let gvl = sample(7, ThreadState::GvlWait, S, S / 2);
    let runnable = sample(7, ThreadState::Runnable, S + S / 2, S / 2);
    let blocked = |wall_ns| sample(7, ThreadState::Blocked, S / 4, wall_ns);
    let first = [(&process, gvl.clone()), (&process, runnable.clone()), (&other, blocked(2 * S - S / 4))];
    second(&mut recorder, 2 * S, &first);
    let of_first = [(7, S / 4, 2 * S - S / 4), (7, S, S / 2), (7, S + S / 2, S / 2)];
    assert_eq!(shown(), of_first);
    assert_eq!(shown(), of_first, "each snapshot has them");
    // The other process's thread stays blocked; the first one runs again, which hands over its states. They are readable
    // in full from the next account on.
    recorder.see(&process, Seen::Stack(&sample(7, ThreadState::Running, 2 * S, 0))).unwrap();
    recorder.see(&process, Seen::Stack(&gvl)).unwrap();
    recorder.see(&process, Seen::Stack(&sample(7, ThreadState::Runnable, S + S / 2, S))).unwrap();
    assert_eq!(shown(), of_first);
    let over = [(7, S, S / 2), (7, S + S / 2, S)];
    second(&mut recorder, 3 * S, &[(&other, blocked(3 * S - S / 4))]);
    assert_eq!(shown(), [(7, S / 4, 3 * S - S / 4), over[0], over[1]]);
    // Or once their chunk is full: at any moment each one is present exactly once.
    recorder.see(&other, Seen::Stack(&blocked(3 * S))).unwrap();
    let mut cycles = 0;
    while shown()[0].2 != 3 * S {
        assert_eq!(shown(), [(7, S / 4, 3 * S - S / 4), over[0], over[1]]);
        for _ in 0..100 {
            recorder.see(&process, Seen::Cycle(&cycle(3 * S, 1))).unwrap();
            cycles += 1;
        }
        assert!(cycles < 1_000_000, "no chunk is full");
    }
    assert_eq!(shown(), [(7, S / 4, 3 * S), over[0], over[1]]);
    // At the end all of them have been handed over.
    second(&mut recorder, 5 * S, &[(&process, blocked(S))]);
    recorder.finish(&Ledger::default()).unwrap();
    assert_eq!(shown(), [(7, S / 4, 3 * S), over[0], over[1]]);
}

/// A process that has existed for long is present in a dump, with the counts of the dump's own time.
#[test]
fn carried() {
    let mut flight = Flight::new(keep(3, &[]));
    let (one, two) = (process_with(1), process_with(2));
    flight.outputs.tell(|exporter| exporter.began(50));
    flight.outputs.hand(|exporter| exporter.refused(Some(8), "/ruby", "why"));
    flight.see(&one, Seen::Process { state: None, now_ns: 60, since_ns: 60 });
    flight.see(&two, Seen::Process { state: None, now_ns: 60, since_ns: 60 });
    let mut so_far = GvlSoFar::default();
    for at in 0..10 {
        flight.see(&one, Seen::Cycle(&cycle(at * S, 1000)));
        so_far.wait_ns += 100 + at;
        flight.see(&one, Seen::GvlSoFar(&so_far));
        if at == 8 {
            let end = ProcessEnd {
                reason: crate::model::EndReason::Exited,
                ts_ns: 8 * S,
                since_ns: 60,
                outside_ns: 5,
                beyond_ns: 0,
                shutdown: None,
                cycles: 900,
                before: CyclesBefore::Earlier(3),
                lost: 7,
            };
            flight.see(&two, Seen::GvlProcess(&GvlProcessSummary::default()));
            flight.see(&two, Seen::Ended(&end));
        }
        flight.second((at + 1) * S);
    }
    let bytes = flight.dump();
    let dump = dump_of(&bytes);
    assert_eq!((dump.why.as_str(), dump.at_ns, dump.from_ns), ("SIGUSR2", 10 * S, 7 * S));
    assert_eq!(dump.carried, 6, "begin, two processes, a refusal, sums of the GVL, an account");
    let (result, lines) = replayed(&bytes);
    let found = |part: &str| lines.iter().filter(|line| line.contains(part)).cloned().collect::<Vec<_>>();
    assert_eq!(lines[0], format!("began {}", 7 * S));
    assert_eq!(found("Process { state: None, now_ns: 7000000000, since_ns: 7000000000 }").len(), 2);
    assert_eq!((found("refused Some(8)").len(), found("GvlProcess").len()), (1, 0));
    assert_eq!(found("Cycle(").len(), 3);
    let waited: Vec<u64> = lines
        .iter()
        .filter_map(|line| line.split_once("wait_ns: ")?.1.split(',').next()?.parse().ok())
        .collect();
    assert_eq!(waited, [107, 215, 324], "since the dump begins");
    let ended = found("Ended(");
    assert_eq!(ended.len(), 2);
    let of_two = "reason: Exited, ts_ns: 8000000000, since_ns: 7000000000, outside_ns: 0, beyond_ns: 0, shutdown: None, cycles: 0, before: Unknown, lost: 0";
    assert!(ended[0].contains(of_two), "{}", ended[0]);
    assert!(ended[1].contains("reason: Detached") && ended[1].contains("cycles: 3,"), "{}", ended[1]);
    let ledger = result.unwrap().ledger;
    assert_eq!((ledger.user.pipeline.cycles, ledger.user.pipeline.processes), (3, 2));
    assert_eq!(ledger.extent, Extent::Part);
    assert!(ledger.summary().ends_with("a part of a run"), "{}", ledger.summary());
    // The run itself continues, and the next dump has its own time.
    flight.second(11 * S);
    assert_eq!(dump_of(&flight.dump()).from_ns, 8 * S);
}

/// A run that is shorter than the kept time is recorded in full.
#[test]
fn whole() {
    let mut flight = Flight::new(keep(60, &["end"]));
    hand(&mut flight.outputs);
    let handed = flight.log.lines();
    let names = flight.names();
    assert_eq!(names.len(), 1);
    assert!(names[0].starts_with("f-20231114T2213") && names[0].ends_with("Z-end.gctrace"), "{names:?}");
    let path = flight.dir.path().join(&names[0]);
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let bytes = fs::read(path).unwrap();
    assert_eq!((dump_of(&bytes).carried, dump_of(&bytes).why.as_str()), (0, "the run ended"));
    let (result, lines) = replayed(&bytes);
    assert_eq!(result.unwrap().ledger.extent, Extent::Run);
    assert_eq!(lines, handed);
}

/// A trigger writes what led to it, once per cooldown, and a limited number of times; the user may always request a dump.
#[test]
fn triggers() {
    let mut flight = Flight::new(keep(3, &["gc.pause > 200ms", "gc.share > 90%"]));
    let one = process_with(1);
    flight.see(&one, Seen::Process { state: None, now_ns: 60, since_ns: 60 });
    for at in 0..20 {
        flight.see(&one, Seen::Cycle(&cycle(at * S, 200_000_000)));
        flight.second((at + 1) * S);
    }
    assert!(flight.names().is_empty(), "200 ms are not more than 200 ms");
    let long = |flight: &mut Flight, at: u64| {
        flight.see(&one, Seen::Cycle(&cycle(at * S, 300_000_000)));
        flight.second((at + 1) * S);
        flight.names().len()
    };
    assert_eq!(long(&mut flight, 20), 1);
    let bytes = fs::read(&flight.written()[0]).unwrap();
    let dump = dump_of(&bytes);
    assert_eq!(dump.why, "gc.pause > 200ms: 300.0ms, pid 1 (shop)");
    assert_eq!((dump.at_ns, dump.from_ns), (20 * S, 18 * S));
    let stops: Vec<String> = replayed(&bytes).1.into_iter().filter(|line| line.contains("Cycle(")).collect();
    assert_eq!(
        stops.iter().map(|line| line.contains(" ns: 300000000")).collect::<Vec<_>>(),
        [false, false, true]
    );
    for at in 21..25 {
        assert_eq!(long(&mut flight, at), 1, "{at}");
    }
    assert_eq!(long(&mut flight, 25), 2);
    for at in 30..40 {
        assert_eq!(long(&mut flight, at), 2, "that is all");
    }
    let counts = flight.counts();
    assert_eq!((counts.dump_requests, counts.dumps_written, counts.dumps_suppressed), (16, 2, 14));
    flight.dump();
    flight.dump();
    let names = flight.names();
    assert_eq!(names.len(), 4);
    assert!(
        names[2].ends_with("Z-SIGUSR2-2.gctrace") && names[3].ends_with("Z-SIGUSR2.gctrace"),
        "{names:?}"
    );
}

/// A level fires when it is first exceeded, and again after it has been below.
#[test]
fn levels() {
    let mut flight = Flight::new(Keep { cooldown_ns: 0, most: 99, ..keep(3, &["gc.share > 25%"]) });
    let one = process_with(1);
    flight.see(&one, Seen::Process { state: None, now_ns: 60, since_ns: 60 });
    for at in 1..50 {
        if at < 10 || (30..35).contains(&at) {
            flight.see(&one, Seen::Cycle(&cycle(at * S, 900_000_000)));
        }
        flight.second((at + 1) * S);
        let expected = if at < 3 { 0 } else { 1 + usize::from(at >= 32) };
        assert_eq!(flight.names().len(), expected, "{at}");
    }
    let why = dump_of(&fs::read(&flight.written()[0]).unwrap()).why;
    assert_eq!(why, "gc.share > 25%: 27.0 %, pid 1 (shop)");
}

/// Each metric reads what its name says.
#[test]
fn metrics() {
    for (trigger, fires) in [
        ("gc.pause > 0ns", true),
        ("gc.pause.p99 > 0ns", true),
        ("gvl.wait > 0ns", true),
        ("gvl.wait.p99 > 0ns", true),
        ("rss > 0B", true),
        ("request > 0ns", true),
        ("gc.pause > 1000m", false),
        ("gvl.wait > 1000m", false),
        ("rss > 1000TiB", false),
        ("request > 1000m", false),
    ] {
        let mut flight = Flight::new(keep(100, &[trigger]));
        for at in 0..2 {
            samples::all(at * S, &mut |process, seen| {
                // The times of this sample add up to more than there are, and its process ends before the second is over.
                if !matches!(seen, Seen::Ended(_)) {
                    flight.see(process, seen);
                }
            });
            flight.see(&samples::process(), Seen::Cycle(&cycle(at * S, 5000)));
            flight.second((at + 1) * S);
        }
        let names = flight.names();
        assert_eq!(names.len(), usize::from(fires), "{trigger}");
        let name = trigger.split(' ').next().unwrap();
        assert!(names.iter().all(|file| file.ends_with(&format!("Z-{name}.gctrace"))), "{names:?}");
    }
}

/// What is kept stays within its size, and what is dropped is counted.
#[test]
fn bounded() {
    let most = 40_000;
    let mut flight = Flight::new(Keep { bytes: most, ..keep(3600, &[]) });
    for at in 0..60 {
        samples::all(at * S, &mut |process, seen| flight.see(process, seen));
        flight.second((at + 1) * S);
    }
    let counts = flight.counts();
    assert!(
        counts.recorded_displaced > 0 && counts.recorded_kept > 0 && counts.recorded_expired == 0,
        "{counts:?}"
    );
    let bytes = flight.dump();
    assert!(bytes.len() as u64 <= most + 2000, "{} bytes", bytes.len());
    assert!(dump_of(&bytes).from_ns > 30 * S);
    assert!(replayed(&bytes).0.is_ok());
}

/// If nothing can be written, that is reported once per file, nothing is left behind, and recording continues.
#[test]
fn unwritable() {
    let missing = FlightRecorder::create(Path::new("/nowhere/f.gctrace"), &header(), keep(3, &[]));
    assert!(missing.unwrap_err().to_string().contains("/nowhere/f.gctrace cannot be written: No such file"));
    let mut flight = Flight::new(keep(3, &["gc.pause > 1ms"]));
    fs::remove_dir(flight.dir.path()).unwrap();
    let one = process_with(1);
    flight.see(&one, Seen::Cycle(&cycle(S, 300_000_000)));
    flight.second(2 * S);
    while flight.counts().dumps_waiting > 0 {
        flight.outputs.hand(|exporter| exporter.flush(2 * S));
    }
    let [failure] = flight.outputs.failures() else { panic!("{:?}", flight.outputs.failures()) };
    assert!(
        failure.contains("Z-gc.pause.gctrace: No such file") && failure.contains("was not written"),
        "{failure}"
    );
    assert_eq!(flight.counts().dumps_failed, 1);
    fs::create_dir(flight.dir.path()).unwrap();
    assert_eq!(flight.dump()[..8], MAGIC);
}

/// A damaged dump is read up to the damage, and its initial state may be anything.
#[test]
fn damaged() {
    let mut flight = Flight::new(keep(2, &[]));
    flight.see(&process_with(1), Seen::Process { state: None, now_ns: 1, since_ns: 1 });
    for at in 0..5 {
        samples::all(at * S, &mut |process, seen| flight.see(process, seen));
        flight.second((at + 1) * S);
    }
    let bytes = flight.dump();
    for at in (0..bytes.len()).step_by(7) {
        let mut flipped = bytes.clone();
        flipped[at] ^= 1 << (at % 8);
        let (result, _) = replayed(&flipped);
        assert!(!matches!(result, Ok(Replayed { ending: Ending::Complete, .. })), "{at}");
        assert!(replayed(&bytes[..at]).0.is_err() || at > 12);
    }
    let dump = dump_of(&bytes);
    let rest = &bytes[boundaries(&bytes)[1]..];
    for (from_ns, carried) in [(0, 0), (0, 1), (u64::MAX, 2), (5, u64::MAX)] {
        let dump = Some(Dump { from_ns, carried, ..dump.clone() });
        let header = wire::Header::of(&Header { dump, ..header() });
        let head = stored(Kind::Header, &prost::Message::encode_to_vec(&header)).unwrap();
        let (result, _) = replayed(&[&chunk::beginning(), &head, rest].concat());
        assert_eq!(result.unwrap().ending, Ending::Complete);
    }
}

/// Sums of a thread that started before the file cover another time, and are left out; those of a thread that started within it are not.
#[test]
fn threads_from_before() {
    let mut flight = Flight::new(keep(3, &[]));
    let one = process_with(1);
    flight.outputs.tell(|exporter| exporter.began(50));
    flight.see(&one, Seen::Process { state: None, now_ns: 60, since_ns: 60 });
    for at in 0..60 {
        flight.see(&one, Seen::Cycle(&cycle(at * S, 1000)));
        flight.second((at + 1) * S);
    }
    for (tid, begin_ns) in [(1, 60), (2, 59 * S)] {
        let wall_ns = 60 * S - begin_ns;
        let wait = GvlTimes { count: 10, ns: wall_ns / 2, max_ns: S };
        flight.see(
            &one,
            Seen::GvlThread(&GvlThreadSummary {
                coverage: crate::model::gvl::GvlCoverage::default(),
                who: GvlWho { tid, comm: "puma".into() },
                id: u64::from(tid),
                last: None,
                thread: None,
                begin_ns,
                end_ns: 60 * S,
                ended: false,
                sums: GvlSums { wall_ns, watched_ns: wall_ns, wait, ..GvlSums::default() },
            }),
        );
    }
    flight.second(61 * S);
    let (_, lines) = replayed(&flight.dump());
    let threads: Vec<_> = lines.iter().filter(|line| line.contains("GvlThread")).collect();
    assert!(threads.len() == 1 && threads[0].contains("tid: 2"), "{threads:?}");
}

/// What is waited for before there is a file.
#[test]
fn first_file() {
    let words = |triggers: &[&str]| super::super::flight::waits_for(&keep(9, triggers).triggers);
    assert_eq!(words(&[]), "no --dump-on: nothing is written by itself");
    assert_eq!(words(&["end"]), "waits until the run ends");
    assert_eq!(
        words(&["gc.pause>200ms", "rss > 1GiB", "end"]),
        "waits until gc.pause > 200ms or rss > 1GiB or the run ends"
    );
}
