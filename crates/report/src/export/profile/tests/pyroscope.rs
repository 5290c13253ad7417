//! Pushes to Pyroscope: few samples for many threads, and parts that its limits allow.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    net::{TcpListener, TcpStream},
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use prost::Message as _;

use super::*;
use crate::{
    aggregate::recording::ProcessIndex,
    export::{
        profile::pprof::proto,
        pyroscope,
        upload::{Address, Protocol, Uploader},
        windows::Window,
    },
    ledger::UserCounts,
    model::seen::AllocStack,
};

/// Threads that have the same stacks.
const THREADS: u32 = 40;

/// Each thread was seen with each of so many stacks, had a pause and allocated slots of two sizes there.
fn busy(stacks: u32) -> Recorder {
    let mut recorder = recorded(&[], Limits { timeline: 0, ..Limits::default() });
    for thread in 0..THREADS {
        let tid = 1 + 3 * thread;
        for line in 0..stacks {
            let input = Input {
                pid: 2,
                tid,
                ts_ns: 10_000,
                state: ThreadState::Running,
                cpu_ns: u64::from(line + 1),
                wall_ns: u64::from(line + 1),
                stack: vec![(0, line), (6, 1)],
                times: 1,
                pauses: vec![(u64::from(line + thread), 0, 0)],
            };
            input.record(&mut recorder);
            for slot_size in [40, 80] {
                let alloc = AllocStack {
                    span: None,
                    ts_ns: 10_000,
                    tid,
                    comm: Arc::from(format!("worker {thread}")),
                    slot_size,
                    slots: u64::from(thread + 1),
                    request: None,
                    stack: input.stack(),
                };
                recorder.see(&process(2), Seen::AllocStack(&alloc)).unwrap();
            }
        }
    }
    recorder
}

fn window(recorder: Recorder) -> (Arc<Window>, Vec<ProcessIndex>) {
    let recording = Rc::try_unwrap(recorder.recording).unwrap().into_inner();
    let processes = (0..recording.processes.len()).collect();
    let window = Window {
        recording: Arc::new(recording),
        clock: WallClock::measure(),
        began_ns: 1_000,
        ended_ns: 60_000_001_000,
        account: String::new(),
        wall: true,
    };
    (Arc::new(window), processes)
}

/// The profiles of a request by the name of their series.
fn profiles(sent: &[u8]) -> Vec<(String, proto::Profile)> {
    let series = pyroscope::tests::series(sent);
    series.into_iter().map(|(name, raw)| (name, proto::Profile::decode(&*gunzip(&raw)).unwrap())).collect()
}

/// The totals of profiles by type of their samples.
fn totals(all: &[(String, proto::Profile)]) -> BTreeMap<String, u64> {
    let mut totals = BTreeMap::new();
    for (_, profile) in all {
        for (at, of) in profile.sample_type.iter().enumerate() {
            let total: i64 = profile.sample.iter().map(|sample| sample.value[at]).sum();
            *totals.entry(profile.string_table[of.r#type as usize].clone()).or_default() += total as u64;
        }
    }
    totals
}

/// The totals of [`busy`].
fn expected(stacks: u32) -> BTreeMap<String, u64> {
    let (threads, stacks) = (u64::from(THREADS), u64::from(stacks));
    let (lines, numbers) = (stacks * (stacks - 1) / 2, threads * (threads - 1) / 2);
    let slots = 2 * stacks * (numbers + threads);
    let totals = [
        ("samples", threads * stacks),
        ("cpu", threads * (lines + stacks)),
        ("wall", threads * (lines + stacks)),
        ("gc_pauses", threads * stacks),
        ("gc", threads * lines + stacks * numbers),
        ("alloc_objects", slots),
        ("alloc_space", slots * 60),
    ];
    totals.into_iter().map(|(name, total)| (name.to_owned(), total)).collect()
}

/// What only tells threads apart is added up, exactly: a sample for each stack, not one for each thread.
#[test]
fn threads_are_merged() {
    let (window, processes) = window(busy(1_000));
    let push = pyroscope::make(window, processes);
    let all = profiles(&push.encode());
    let samples = |name: &str| -> usize {
        all.iter().filter(|(of, _)| of == name).map(|(_, profile)| profile.sample.len()).sum()
    };
    // Samples and pauses; one pause, of no time, begins in no phase.
    assert!((1_999..=2_001).contains(&samples("process_cpu")), "{}", samples("process_cpu"));
    assert_eq!(samples("memory"), 1_000);
    assert!(!push.is_too_large());
    assert_eq!(totals(&all), expected(1_000));
}

/// A receiver that answers as Pyroscope does where a profile has more than so many samples; it keeps what it accepts.
struct Receiver {
    url: String,
    accepted: Arc<Mutex<Vec<Vec<u8>>>>,
    refused: Arc<AtomicUsize>,
}

impl Receiver {
    fn start(most: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (accepted, refused) = (Arc::default(), Arc::default());
        let receiver = Self { url, accepted: Arc::clone(&accepted), refused: Arc::clone(&refused) };
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                serve(&stream.unwrap(), most, &accepted, &refused);
            }
        });
        receiver
    }
}

fn serve(stream: &TcpStream, most: usize, accepted: &Mutex<Vec<Vec<u8>>>, refused: &AtomicUsize) {
    let mut reader = BufReader::new(stream);
    loop {
        let (mut length, mut line) = (0, String::new());
        while reader.read_line(&mut line).unwrap_or(0) > 2 {
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().unwrap();
            }
            line.clear();
        }
        if line.is_empty() {
            return;
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).unwrap();
        let body = gunzip(&body);
        let largest = profiles(&body).iter().map(|(_, profile)| profile.sample.len()).max().unwrap();
        let (code, answer) = if largest > most {
            refused.fetch_add(1, Ordering::Relaxed);
            let text = format!(
                "{{\"code\":\"invalid_argument\",\"message\":\"the profile with labels '{{}}' exceeds the samples count limit (max_profile_stacktrace_samples, actual: {largest}, limit: {most})\"}}"
            );
            (400, text)
        } else {
            accepted.lock().unwrap().push(body);
            (200, String::new())
        };
        let head = format!("HTTP/1.1 {code} x\r\nContent-Length: {}\r\n\r\n", answer.len());
        let mut stream = stream;
        stream.write_all(&[head, answer].concat().into_bytes()).unwrap();
    }
}

/// Pushes [`busy`] to a receiver; returns what arrived, and how often it refused.
fn pushed(stacks: u32, most: usize) -> (Vec<(String, proto::Profile)>, usize) {
    let receiver = Receiver::start(most);
    let address = Address { url: receiver.url, protocol: Protocol::Http };
    let headers = crate::export::upload::headers("GCTRACE_NO_SUCH_VARIABLE").unwrap();
    let uploader = Uploader::start("test", &address, headers, |_| {}).unwrap();
    let (window, processes) = window(busy(stacks));
    uploader.send(pyroscope::make(window, processes));
    uploader.finish();
    let mut counts = UserCounts::default();
    uploader.add_counts(&mut counts);
    let accepted = receiver.accepted.lock().unwrap();
    let uploads = counts.uploads;
    assert_eq!((uploads.uploads_refused, uploads.uploads_dropped, uploads.uploads_waiting), (0, 0, 0));
    assert_eq!(uploads.uploads_sent, accepted.len() as u64);
    assert_eq!(uploads.uploads, uploads.uploads_sent + uploads.uploads_empty);
    (accepted.iter().flat_map(|body| profiles(body)).collect(), receiver.refused.load(Ordering::Relaxed))
}

/// All arrives, once, and each part of a series has a time of its own.
fn complete(all: &[(String, proto::Profile)], stacks: u32) {
    assert_eq!(totals(all), expected(stacks));
    let mut times: Vec<_> =
        all.iter().map(|(name, profile)| (name, profile.time_nanos / 1_000_000)).collect();
    times.sort_unstable();
    assert!(times.windows(2).all(|pair| pair[0] != pair[1]), "copies for Pyroscope: {times:?}");
}

/// A receiver with lower limits is sent smaller parts.
#[test]
fn refused_for_its_size() {
    let (all, refused) = pushed(300, 100);
    assert!(refused >= 3, "{refused}");
    assert!(all.iter().all(|(_, profile)| profile.sample.len() <= 100));
    complete(&all, 300);
}

/// More than Pyroscope accepts by default is split before it is sent.
#[test]
fn split_before_sending() {
    let (all, refused) = pushed(9_000, 16_000);
    assert_eq!(refused, 0);
    assert!(all.len() > 2, "{} profiles", all.len());
    complete(&all, 9_000);
}
