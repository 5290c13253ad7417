//! What was recorded is replayed, up to the last whole chunk of any damaged file.

use std::{
    cell::RefCell, collections::BTreeMap, os::unix::fs::PermissionsExt as _, path::Path, rc::Rc, sync::Arc,
};

use gctrace_common::stats::Counter;
use proptest::prelude::*;
use prost::Message as _;

use super::{
    chunk::{Kind, stored},
    kinds::{encode, wire},
    *,
};
use crate::{
    export::{ExportError, Exporter, Outputs},
    ledger::{Ledger, RecordingCounts, UserCounts},
    model::{Process, gvl::GvlGap, seen::Seen},
};

mod crash;
mod flight;
mod merge;
pub(crate) mod samples;
mod stream;

/// Logs everything that it receives.
#[derive(Clone, Default)]
pub(super) struct Log(Rc<RefCell<Vec<String>>>);

impl Log {
    fn add(&self, line: String) {
        self.0.borrow_mut().push(line);
    }

    pub(super) fn lines(&self) -> Vec<String> {
        self.0.borrow().clone()
    }
}

impl Exporter for Log {
    fn see(&mut self, process: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        self.add(format!("{seen:?} {process:?}"));
        Ok(())
    }
    fn refused(&mut self, pid: Option<u32>, path: &str, reason: &str) -> Result<(), ExportError> {
        self.add(format!("refused {pid:?} {path} {reason}"));
        Ok(())
    }
    fn began(&mut self, ts_ns: u64) {
        self.add(format!("began {ts_ns}"));
    }
    fn closed(&mut self, ts_ns: u64) {
        self.add(format!("closed {ts_ns}"));
    }
    fn gvl_gap(&mut self, gap: GvlGap) {
        self.add(format!("{gap:?}"));
    }
    fn account(&mut self, ledger: &Ledger) {
        self.add(format!("account {ledger:?}"));
    }
    fn finish(&mut self, ledger: &Ledger) -> Result<(), ExportError> {
        self.add(format!("finish {ledger:?}"));
        Ok(())
    }
    fn settled(&mut self, ledger: &Ledger) -> Result<(), ExportError> {
        self.add(format!("settled {ledger:?}"));
        Ok(())
    }
    fn flush(&mut self, now_ns: u64) -> Result<(), ExportError> {
        self.add(format!("flush {now_ns}"));
        Ok(())
    }
}

/// Passes one of everything to the outputs, twice, three seconds apart.
fn hand(outputs: &mut Outputs) {
    let mut ledger = Ledger { kernel: Some(vec![0; Counter::ALL.len()]), ..Ledger::default() };
    for round in 0..2_u64 {
        let at = round * 3_000_000_000;
        samples::all(at, &mut |process, seen| outputs.hand(|exporter| exporter.see(process, seen)));
        outputs.hand(|exporter| exporter.refused(Some(9), "/opt/\u{fffd}ruby", "why not"));
        outputs.hand(|exporter| exporter.refused(None, "/opt/ruby", ""));
        outputs.tell(|exporter| exporter.began(at + 1));
        outputs.tell(|exporter| exporter.gvl_gap(GvlGap { from_ns: at + 42, to_ns: u64::MAX, summed: true }));
        ledger.user.pipeline.cycles = 17 + round;
        ledger.user.requests.decoded_requests = u64::MAX;
        if let Some(kernel) = &mut ledger.kernel {
            kernel[Counter::Hits as usize] = 5 + round;
        }
        outputs.tell(|exporter| exporter.account(&ledger));
        outputs.hand(|exporter| exporter.flush(at + 2));
    }
    outputs.tell(|exporter| exporter.closed(7_000_000_000));
    outputs.hand(|exporter| exporter.finish(&ledger));
    outputs.hand(|exporter| exporter.settled(&ledger));
}

/// A process with this pid.
pub(super) fn process_with(pid: u32) -> Process {
    Process { pid, cmdline: None, ..samples::process() }
}

pub(super) fn header() -> Header {
    Header {
        gctrace: "1.2.3".to_owned(),
        clock: WallClock::with_offsets(1_700_000_000_123_456_789, -5),
        begun_ns: 42,
        subjects: Subjects { samples: true, wall: false, gvl: true, requests: false, alloc: true },
        host: Host {
            name: Some("db-1".to_owned()),
            kernel: Some("6.1.0".to_owned()),
            machine: Some(String::new()),
            cpus: Some(3),
            boot: Some("1b2c3d4e-5f60".to_owned()),
        },
        dump: None,
    }
}

/// A recording of everything, and what the recorder received.
pub(super) fn recorded() -> (Vec<u8>, Vec<String>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.gctrace");
    let log = Log::default();
    let recorder = Recorder::create(&path, &header()).unwrap();
    let mut outputs = Outputs::new(vec![Box::new(recorder), Box::new(log.clone())]);
    hand(&mut outputs);
    assert!(outputs.failures().is_empty());
    let mut counts = UserCounts::default();
    outputs.add_counts(&mut counts);
    let all = log.lines().len() as u64;
    let written = RecordingCounts { recorded: all, recorded_written: all, ..RecordingCounts::default() };
    assert_eq!(counts.recording, written);
    (std::fs::read(&path).unwrap(), log.lines())
}

/// A counter of a later version is named with both versions; the file is not called damaged.
#[test]
fn of_a_later_gctrace() {
    let mut filling = encode::Filling::default();
    let mut account = filling.account(&Ledger::default());
    account.kernel.push(wire::Count { name_text: filling.text("of_tomorrow"), count: 1 });
    filling.push(None, wire::What::Account(Box::new(account)));
    let header = Header { gctrace: "9.9.9".to_owned(), ..header() };
    let bytes = [
        chunk::beginning(),
        stored(Kind::Header, &wire::Header::of(&header).encode_to_vec()).unwrap(),
        stored(Kind::Entries, &filling.take()).unwrap(),
    ]
    .concat();
    let mut recording = Recording::read(&bytes[..], Path::new("a.gctrace")).unwrap();
    let error = recording.next().err().unwrap().to_string();
    for part in ["the counter \"of_tomorrow\"", "gctrace 9.9.9", crate::export::VERSION] {
        assert!(error.contains(part) && !error.contains("damaged"), "{error}");
    }
}

/// Two runs cannot record to one file: the second one is refused.
#[test]
fn one_writer() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.gctrace");
    let first = Recorder::create(&path, &header()).unwrap();
    let begun = std::fs::read(&path).unwrap();
    let second = Recorder::create(&path, &header()).unwrap_err().to_string();
    assert!(second.contains("another gctrace records to it"), "{second}");
    assert_eq!(std::fs::read(&path).unwrap(), begun);
    drop(first);
    Recorder::create(&path, &header()).unwrap();
}

/// An older recording stays until there is something to record: a run that fails during its start leaves it.
#[test]
fn older_recordings() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.gctrace");
    let older = [recorded().0, vec![0; 100_000]].concat();
    std::fs::write(&path, &older).unwrap();
    drop(Recorder::create(&path, &header()).unwrap());
    assert!(std::fs::read(&path).unwrap() == older, "a failed run has changed it");
    let mut recorder = Recorder::create(&path, &header()).unwrap();
    recorder.flush(0).unwrap();
    recorder.account(&Ledger::default());
    recorder.flush(5 * CHUNK_NS).unwrap();
    drop(recorder);
    assert!(std::fs::read(&path).unwrap() == older, "a run that was stopped during its start has changed it");
    let recorder = Recorder::create(&path, &header()).unwrap();
    hand(&mut Outputs::new(vec![Box::new(recorder)]));
    let newer = std::fs::read(&path).unwrap();
    assert!(newer == recorded().0, "{} bytes", newer.len());
    // An empty file is replaced by one that only its owner can read, too.
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();
    let recorder = Recorder::create(&path, &header()).unwrap();
    hand(&mut Outputs::new(vec![Box::new(recorder)]));
    assert!((mode(&path), std::fs::read(&path).unwrap()) == (0o600, newer.clone()));
    // A run that sees nothing leaves a recording, too.
    let mut recorder = Recorder::create(&path, &header()).unwrap();
    recorder.finish(&Ledger::default()).unwrap();
    recorder.settled(&Ledger::default()).unwrap();
    let empty = std::fs::read(&path).unwrap();
    assert!(empty.len() < newer.len() && replayed(&empty).1.len() == 3, "{:?}", replayed(&empty).1);
    assert_eq!(replayed(&empty).0.unwrap().ending, Ending::Complete);
}

/// A recording that is no longer at its path, or is incomplete, is not reported as recorded.
#[test]
fn disturbed() {
    type Disturb = fn(&Path);
    let truncate: Disturb = |path| drop(std::fs::File::create(path).unwrap());
    let append: Disturb = |path| {
        let mut file = std::fs::File::options().append(true).open(path).unwrap();
        std::io::Write::write_all(&mut file, b"foreign").unwrap();
    };
    let away: Disturb = |path| std::fs::rename(path, path.with_file_name("b")).unwrap();
    let cases: [(Disturb, &str); 7] = [
        (|path| std::fs::remove_file(path).unwrap(), "it was removed during the run"),
        (|path| std::fs::remove_dir_all(path.parent().unwrap()).unwrap(), "it was removed during the run"),
        (away, "it was moved during the run"),
        (
            |path| {
                std::fs::rename(path, path.with_file_name("b")).unwrap();
                std::fs::write(path, "another").unwrap();
            },
            "it was moved during the run",
        ),
        (
            |path| {
                std::fs::write(path.with_file_name("b"), "another").unwrap();
                std::fs::rename(path.with_file_name("b"), path).unwrap();
            },
            "it was replaced by another file during the run",
        ),
        (truncate, "somebody has truncated it during the run"),
        (append, "somebody else has written to it during the run"),
    ];
    // Before more is written, and after the last chunk.
    for (late, (disturb, said)) in [false, true].into_iter().flat_map(|late| cases.map(|case| (late, case))) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("below/a.gctrace");
        std::fs::create_dir(path.parent().unwrap()).unwrap();
        let mut recorder = Recorder::create(&path, &header()).unwrap();
        recorder.flush(0).unwrap();
        recorder.flush(CHUNK_NS).unwrap();
        let results = if late {
            recorder.finish(&Ledger::default()).unwrap();
            disturb(&path);
            vec![recorder.settled(&Ledger::default())]
        } else {
            disturb(&path);
            vec![recorder.finish(&Ledger::default()), recorder.settled(&Ledger::default())]
        };
        let errors: Vec<String> =
            results.into_iter().filter_map(|result| Some(result.err()?.to_string())).collect();
        assert_eq!(errors.len(), 1, "{said}: {errors:?}");
        assert!(errors[0].starts_with(&format!("{}: {said}", path.display())), "{late} {errors:?}");
        // Nothing is appended to a truncated file.
        if said.contains("truncated") {
            assert_eq!(std::fs::metadata(&path).unwrap().len(), 0);
        }
    }
}

/// The result of replaying these bytes.
fn replayed(bytes: &[u8]) -> (Result<Replayed, ReadError>, Vec<String>) {
    let log = Log::default();
    let mut outputs = Outputs::new(vec![Box::new(log.clone())]);
    let result = Recording::read(bytes, Path::new("test"))
        .and_then(|mut recording| replay(&mut recording, &mut outputs));
    (result, log.lines())
}

/// Start offsets of the chunks, and the end.
fn boundaries(bytes: &[u8]) -> Vec<usize> {
    let mut found = vec![12];
    while let Some(head) = bytes.get(found[found.len() - 1]..).filter(|rest| rest.len() >= 16) {
        let stored = u32::from_le_bytes([head[4], head[5], head[6], head[7]]) as usize;
        found.push(found[found.len() - 1] + 16 + stored);
    }
    found
}

/// What was replayed is a prefix of what was handed over; only ends follow.
fn assert_beginning(replayed: &[String], handed: &[String]) {
    let same = replayed.iter().zip(handed).take_while(|(one, other)| one == other).count();
    for line in &replayed[same..] {
        let ends = ["Ended(", "closed ", "finish ", "settled "];
        assert!(ends.iter().any(|end| line.starts_with(end)), "{line}");
    }
}

/// Everything is read back as it was, in order, with the header.
#[test]
fn everything() {
    let (bytes, handed) = recorded();
    let recording = Recording::read(&bytes[..], Path::new("test")).unwrap();
    assert_eq!(recording.header(), &header());
    let (result, lines) = replayed(&bytes);
    for (one, other) in lines.iter().zip(&handed) {
        assert_eq!(one, other);
    }
    assert_eq!(lines.len(), handed.len());
    let result = result.unwrap();
    assert_eq!((result.ending, result.last_ns), (Ending::Complete, 7_000_000_000));
    assert!(boundaries(&bytes).len() >= 4, "several chunks: {:?}", boundaries(&bytes));
}

/// Cut off anywhere, a recording has the contents of its whole chunks, and reports the number of bytes that were not read.
#[test]
fn cut_off() {
    let (bytes, handed) = recorded();
    let boundaries = boundaries(&bytes);
    for length in 0..bytes.len() {
        let (result, lines) = replayed(&bytes[..length]);
        if length < boundaries[1] {
            assert!(matches!(result, Err(ReadError::Unreadable { .. })), "{length}: {result:?}");
            continue;
        }
        let last = boundaries.iter().rfind(|at| **at <= length).unwrap();
        let ending = result.unwrap().ending;
        assert_eq!(ending, Ending::CutOff((length - last) as u64), "{length}");
        assert_beginning(&lines, &handed);
        let whole = boundaries.iter().filter(|at| **at <= length).count() - 2;
        assert_eq!(lines.iter().any(|line| line.starts_with("flush")), whole > 0, "{length}");
    }
}

/// A flipped bit is detected wherever it is, and everything before its chunk is read.
#[test]
fn flipped() {
    let (bytes, handed) = recorded();
    for at in 0..bytes.len() {
        let mut bytes = bytes.clone();
        bytes[at] ^= 1 << (at % 8);
        let (result, lines) = replayed(&bytes);
        match result {
            Ok(replayed) => assert!(matches!(replayed.ending, Ending::CutOff(1..)), "{at}: {replayed:?}"),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
        assert_beginning(&lines, &handed);
    }
}

/// Another format is named in the error.
#[test]
fn others() {
    let (mut bytes, _) = recorded();
    bytes[8] = 9;
    let error = replayed(&bytes).0.unwrap_err().to_string();
    assert_eq!(error, "test: it has version 9 of the format; this gctrace reads version 1");
    let error = replayed(b"{\"type\":\"header\"}").0.unwrap_err().to_string();
    assert_eq!(error, "test: it is not a gctrace recording");
    bytes[8] = 1;
    bytes.extend([0]);
    let error = replayed(&bytes).0.unwrap_err().to_string();
    assert!(error.contains("bytes follow the end"), "{error}");
}

/// A chunk that expands to more than its head says is not expanded further.
#[test]
fn bombs() {
    let mut bomb = stored(Kind::Entries, &vec![0; MAX_CHUNK_BYTES]).unwrap();
    bomb[8..12].copy_from_slice(&10_u32.to_le_bytes());
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&bomb[..12]);
    hasher.update(&bomb[16..]);
    bomb[12..16].copy_from_slice(&hasher.finalize().to_le_bytes());
    let (bytes, _) = recorded();
    let bytes = [&bytes[..boundaries(&bytes)[1]], &bomb].concat();
    let error = replayed(&bytes).0.unwrap_err().to_string();
    assert!(error.contains("does not expand to the 10 bytes"), "{error}");
}

/// A file that cannot be written to any more keeps its whole chunks.
#[test]
fn an_output_that_cannot_be_a_file() {
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(Recorder::create(dir.path(), &header()), Err(ExportError::Unwritable { .. })));
    let error = Recorder::create(&dir.path().join("none/x"), &header());
    assert!(matches!(error, Err(ExportError::Unwritable { .. })));
}

/// The contents of the chunks of a recording.
fn contents() -> &'static [Vec<u8>] {
    static CONTENTS: std::sync::OnceLock<Vec<Vec<u8>>> = std::sync::OnceLock::new();
    CONTENTS.get_or_init(|| {
        let (bytes, _) = recorded();
        let mut chunks = chunk::Chunks::open(&bytes[..]).unwrap();
        let mut found = Vec::new();
        loop {
            match chunks.next().unwrap() {
                chunk::Next::Header(bytes) => found.push(bytes),
                chunk::Next::Entries(chunk) => found.push(chunk::Expander::default().expand(&chunk).unwrap()),
                chunk::Next::Ended(_) => return found,
            }
        }
    })
}

proptest! {
    /// Chunks with a correct checksum and any content are read or refused. For a longer run:
    /// `PROPTEST_CASES=1000000 cargo test -p gctrace-report hostile_chunks`.
    #[test]
    fn hostile_chunks(
        which in 0_usize..3,
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0_u8..3), 1..8),
    ) {
        let mut content = contents()[which % contents().len()].clone();
        for (at, byte, how) in changes {
            let at = at.index(content.len());
            match how {
                0 => content[at] = byte,
                1 => content.insert(at, byte),
                _ => drop(content.remove(at)),
            }
            if content.is_empty() {
                break;
            }
        }
        let (bytes, _) = recorded_once();
        let head = &bytes[..boundaries(bytes)[1]];
        let chunk = stored(Kind::Entries, &content).unwrap();
        // It must not panic.
        let (result, _) = replayed(&[head, &chunk].concat());
        if let Err(error) = result {
            prop_assert!(matches!(error, ReadError::Damaged { .. } | ReadError::Unknown { .. }), "{error}");
        }
    }
}

/// An unknown environment stays unknown, and an empty one empty.
#[test]
fn environments() {
    let (bytes, _) = recorded_once();
    let head = &bytes[..boundaries(bytes)[1]];
    for gc_env in [None, Some(BTreeMap::new()), samples::process().gc_env] {
        let process = Process { gc_env, gc_env_refused: Vec::new(), ..samples::process() };
        let mut filling = encode::Filling::default();
        let index = filling.process(&process);
        let sum = kinds::alloc::SumMessage { end_ns: 1, refills: 1, ..kinds::alloc::SumMessage::default() };
        filling.push(Some(index), wire::What::Alloc(Box::new(sum)));
        let (result, lines) = replayed(&[head, &stored(Kind::Entries, &filling.take()).unwrap()].concat());
        result.unwrap();
        let wanted = format!("{process:?}");
        assert!(lines.iter().any(|line| line.contains(&wanted)), "{lines:?}");
    }
}

/// Times and counts whose sums would overflow are damage.
#[test]
fn bounds() {
    let (bytes, _) = recorded_once();
    let head = &bytes[..boundaries(bytes)[1]];
    let with = |what: wire::What| {
        let mut filling = encode::Filling::default();
        let process = filling.process(&samples::process());
        filling.push(Some(process), what);
        replayed(&[head, &stored(Kind::Entries, &filling.take()).unwrap()].concat()).0
    };
    let alloc = |begin_ns, refills| {
        let slots = [(40, 7)].into();
        wire::What::Alloc(Box::new(kinds::alloc::SumMessage {
            begin_ns,
            end_ns: begin_ns,
            slots,
            refills,
            lost: 0,
        }))
    };
    let slots = |slots, end_ns| {
        let slots = [(40, slots)].into();
        wire::What::Alloc(Box::new(kinds::alloc::SumMessage {
            begin_ns: 10,
            end_ns,
            slots,
            refills: 1,
            lost: 0,
        }))
    };
    assert!(with(alloc(1 << 61, 1 << 39)).is_ok());
    assert!(with(slots(1 << 39, 10)).is_ok());
    // A job that has allocated for hours, and a thousand threads that have waited for forty days, a million times a second.
    let job =
        wire::Request { alloc_slots: Some(1 << 36), alloc_bytes: Some(1 << 45), ..wire::Request::default() };
    assert!(with(wire::What::Request(Box::new(job))).is_ok());
    let seconds = 40 * 86_400;
    let waits = vec![10 * seconds * 100_000];
    let so_far = wire::GvlSoFar { waits, wait_ns: 1000 * seconds * 1_000_000_000, hold_ns: 1 };
    assert!(with(wire::What::GvlSoFar(Box::new(so_far))).is_ok());
    let faults =
        wire::Request { minor_faults: Some(0), major_faults: Some(1 << 40), ..wire::Request::default() };
    let growth = wire::Request { rss_growth: Some(i64::MIN), ..wire::Request::default() };
    for (what, why) in [
        (wire::What::Request(Box::new(faults)), "1099511627776 is not a possible count"),
        (wire::What::Request(Box::new(growth)), "9223372036854775808 is not a possible growth of memory"),
        (wire::What::Closed(u64::MAX), "18446744073709551615 is not a possible time"),
        (alloc(1 << 62, 1), "4611686018427387904 is not a possible time"),
        (alloc(0, 1 << 40), "1099511627776 is not a possible count"),
        (slots(1 << 40, 10), "1099511627776 is not a possible count"),
        (slots(1, 9), "10 is not a possible start of an interval"),
    ] {
        let error = with(what).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
}

/// A few bytes that would expand to much memory are damage: many references to one text, and many histograms.
#[test]
fn small_chunks_of_much() {
    let (bytes, _) = recorded_once();
    let head = &bytes[..boundaries(bytes)[1]];
    let read = |chunk: &wire::Chunk| {
        replayed(&[head, &stored(Kind::Entries, &chunk.encode_to_vec()).unwrap()].concat()).0
    };
    let refused = |chunk: &wire::Chunk| {
        let error = read(chunk).unwrap_err().to_string();
        assert!(error.contains("expand to more than"), "{error}");
    };
    let mut filling = encode::Filling::default();
    let process = filling.process(&samples::process());
    let plain = wire::Chunk::decode(&filling.take()[..]).unwrap();
    let text = plain.texts.len() as u32;
    let mut texts = plain.clone();
    texts.texts.push("x".repeat(1 << 20));
    texts.processes[process as usize].cmdline = Some(wire::Texts { texts: vec![text; 10] });
    assert!(read(&texts).is_ok());
    texts.processes[process as usize].cmdline = Some(wire::Texts { texts: vec![text; 100_000] });
    refused(&texts);
    let entry = wire::Entry { process: Some(process), what: Some(wire::What::GvlSoFar(Box::default())) };
    let mut histograms = wire::Chunk { entries: vec![entry.clone(); 1000], ..plain };
    assert!(read(&histograms).is_ok());
    histograms.entries = vec![entry; 100_000];
    refused(&histograms);
}

fn recorded_once() -> &'static (Vec<u8>, Vec<String>) {
    static RECORDED: std::sync::OnceLock<(Vec<u8>, Vec<String>)> = std::sync::OnceLock::new();
    RECORDED.get_or_init(recorded)
}

/// The same stack is written once, and other stacks share its callers.
#[test]
fn stacks_are_shared() {
    let frames: Vec<_> = (0..100).map(samples::frame).collect();
    let mut filling = encode::Filling::default();
    let process = samples::process();
    let index = filling.process(&process);
    for _ in 0..1000 {
        let sample = samples::sample(1, Arc::from(frames.clone()));
        let sample = filling.sample(&sample);
        filling.push(Some(index), wire::What::Sample(Box::new(sample)));
    }
    let other = filling.sample(&samples::sample(1, Arc::from(frames[1..].to_vec())));
    assert_eq!(other.stack, 99);
    let bytes = filling.take();
    assert!(bytes.len() < 50_000, "{}", bytes.len());
}
