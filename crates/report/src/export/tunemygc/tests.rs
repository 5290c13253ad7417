//! The client against servers that misbehave in the ways it must tolerate.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{SocketAddr, TcpListener},
    path::Path,
    sync::{Mutex, PoisonError},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use super::{
    Dialect, EventName, SampleSet, Tokens, TuneMyGc,
    client::{Client, Target},
};
use crate::{
    clock::WallClock,
    export::Exporter as _,
    ledger::{Ledger, UserCounts},
    model::{GcCycle, Process, seen::Seen},
    trace_file::samples,
};

/// What a server received: whether it was gzip, and the set.
type Got = (bool, String);

/// A server that gives these responses, one per request, each with its headers.
fn server(listener: TcpListener, answers: Vec<(u16, &'static str, &'static str)>) -> JoinHandle<Vec<Got>> {
    std::thread::spawn(move || {
        let mut all = Vec::new();
        for (code, headers, body) in answers {
            let (stream, _) = listener.accept().unwrap();
            let mut reader = BufReader::new(&stream);
            let mut head = String::new();
            while !head.ends_with("\r\n\r\n") {
                assert!(reader.read_line(&mut head).unwrap() > 0, "a whole head");
            }
            assert!(head.starts_with("POST /ruby HTTP/1.1\r\n"), "{head}");
            let head = head.to_ascii_lowercase();
            assert!(head.contains("\r\nuser-agent: gctrace/"), "{head}");
            let length = head.split("content-length: ").nth(1).unwrap().lines().next().unwrap();
            let mut bytes = vec![0; length.parse().unwrap()];
            reader.read_exact(&mut bytes).unwrap();
            let gzip = head.contains("\r\ncontent-encoding: gzip\r\n");
            let mut text = String::new();
            if gzip {
                flate2::read::GzDecoder::new(&bytes[..]).read_to_string(&mut text).unwrap();
            } else {
                text = String::from_utf8(bytes).unwrap();
            }
            all.push((gzip, text));
            let length = body.len();
            write!(
                &stream,
                "HTTP/1.1 {code} X\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n{body}"
            )
            .unwrap();
        }
        all
    })
}

fn target(address: SocketAddr, spool: &Path) -> Target {
    let tokens = Tokens { default: Some("t".to_owned()), ..Tokens::default() };
    Target { url: format!("http://{address}"), tokens, spool: spool.to_owned(), cycles: None, units: None }
}

fn local() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// Number of files waiting below a directory.
fn waiting(dir: &Path) -> usize {
    let dirs = std::fs::read_dir(dir).unwrap().flatten();
    let files = dirs.flat_map(|dir| std::fs::read_dir(dir.path()).unwrap().flatten());
    files.filter(|file| file.path().extension().is_some_and(|extension| extension == "json")).count()
}

/// A set that always gets a 500 does not hold up the sets behind it: they are sent after its third attempt, and it is kept for the next run.
#[test]
fn one_that_fails() {
    static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());
    fn say(line: &str) {
        SAID.lock().unwrap_or_else(PoisonError::into_inner).push(line.to_owned());
    }
    let dir = tempfile::tempdir().unwrap();
    let (listener, address) = local();
    let (busy, accepted) = ((500, "", "no"), (200, "", "http://x/configs/1"));
    let server = server(listener, vec![busy, busy, busy, accepted, accepted, accepted, busy]);
    let client = Client::start(&target(address, dir.path()), say).unwrap();
    for n in 0..4 {
        client.send(format!("[set {n}]"), None);
    }
    let begun = Instant::now();
    // All are on disk before the first has been sent.
    while waiting(dir.path()) != 4 && begun.elapsed() < Duration::from_secs(1) {
        std::thread::sleep(Duration::from_millis(1));
    }
    while waiting(dir.path()) > 1 {
        assert!(begun.elapsed() < Duration::from_mins(1), "{:?}", SAID.lock().unwrap());
        std::thread::sleep(Duration::from_millis(10));
    }
    client.finish();
    let got: Vec<String> = server.join().unwrap().into_iter().map(|(_, text)| text).collect();
    assert_eq!(got[..6], ["[set 0]", "[set 0]", "[set 0]", "[set 1]", "[set 2]", "[set 3]"]);
    assert_eq!(got[6], "[set 0]");
    let mut counts = UserCounts::default();
    client.add_counts(&mut counts);
    let sets = counts.sets;
    assert_eq!((sets.sets, sets.sets_sent, sets.sets_dropped, sets.sets_waiting), (4, 3, 0, 1));
    assert_eq!(waiting(dir.path()), 1);
}

/// Every response is handled and reported: a 500 and a broken connection are retried, the others are final; gzip is
/// sent only right after a response that permits it.
#[test]
fn answers() {
    static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());
    fn say(line: &str) {
        SAID.lock().unwrap_or_else(PoisonError::into_inner).push(line.to_owned());
    }
    const GZIP: &str = "Accept-Encoding: identity, gzip\r\n";
    let dir = tempfile::tempdir().unwrap();
    let (listener, address) = local();
    let server = server(
        listener,
        vec![
            (500, "", "busy"),
            (200, GZIP, "http://x/configs/1"),
            (404, "", "Invalid application token"),
            (412, "", "{\"RUBY_GC_MALLOC_LIMIT\":\"1\"}"),
            (426, "", "1.0.15"),
            (501, "", "Ruby 9"),
            (400, "", "sample 0 (timestamp): is not a number"),
            (302, "Location: http://127.0.0.1:1/\r\n", "elsewhere"),
            (204, "", ""),
        ],
    );
    let client = Client::start(&target(address, dir.path()), say).unwrap();
    let sets: Vec<String> = (0..8).map(|n| format!("[set {n}]")).collect();
    for set in &sets {
        client.send(set.clone(), None);
    }
    // The pause after the 500 must be over before the end: then each set has only one attempt left.
    let begun = Instant::now();
    while waiting(dir.path()) > 0 || begun.elapsed() < Duration::from_millis(300) {
        assert!(begun.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(begun.elapsed() >= Duration::from_secs(1), "it did not wait after the 500");
    client.finish();
    let got = server.join().unwrap();
    let texts: Vec<&str> = got.iter().map(|(_, text)| text.as_str()).collect();
    assert_eq!(texts[0], sets[0]);
    assert_eq!(texts[1..], sets.iter().map(String::as_str).collect::<Vec<_>>());
    let gzip: Vec<bool> = got.iter().map(|(gzip, _)| *gzip).collect();
    assert_eq!(gzip, [false, false, true, false, false, false, false, false, false]);
    let said = SAID.lock().unwrap().join("\n");
    for words in [
        "a sample set is tried again: answered 500 (busy)",
        "recommendations: http://x/configs/1",
        "invalid application token",
        "already tuned by environment variables ({\"RUBY_GC_MALLOC_LIMIT\":\"1\"})",
        "a later version of the agent is required (1.0.15)",
        "not supported (Ruby 9)",
        "invalid payload (sample 0 (timestamp): is not a number)",
        "unexpected answer 302",
        "3 sample sets were accepted, 5 refused, 0 dropped",
    ] {
        assert!(said.contains(words), "{words} was not said:\n{said}");
    }
}

/// What cannot be sent is kept on disk, and another run sends it: the same sets, in order, once each.
#[test]
fn restarts() {
    static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());
    fn say(line: &str) {
        SAID.lock().unwrap_or_else(PoisonError::into_inner).push(line.to_owned());
    }
    let dir = tempfile::tempdir().unwrap();
    let (listener, address) = local();
    drop(listener);
    let client = Client::start(&target(address, dir.path()), say).unwrap();
    client.send("[1]".to_owned(), None);
    client.send("[2]".to_owned(), None);
    let begun = Instant::now();
    client.finish();
    assert!(begun.elapsed() < Duration::from_secs(10), "no collector is there: {:?}", begun.elapsed());
    assert_eq!(waiting(dir.path()), 2);
    // Another collector does not receive them.
    let (other, elsewhere) = local();
    other.set_nonblocking(true).unwrap();
    Client::start(&target(elsewhere, dir.path()), say).unwrap().finish();
    assert!(other.accept().is_err());
    let server = server(TcpListener::bind(address).unwrap(), vec![(200, "", "x"); 3]);
    let client = Client::start(&target(address, dir.path()), say).unwrap();
    client.send("[3]".to_owned(), None);
    client.finish();
    let texts: Vec<String> = server.join().unwrap().into_iter().map(|(_, text)| text).collect();
    assert_eq!(texts, ["[1]", "[2]", "[3]"]);
    assert_eq!(waiting(dir.path()), 0);
    let said = SAID.lock().unwrap().join("\n");
    for words in [
        "0 sample sets were accepted, 0 refused, 0 dropped; 2 wait in",
        "2 sample sets of earlier runs wait",
        "3 sample sets were accepted, 0 refused, 0 dropped",
    ] {
        assert!(said.contains(words), "{words} was not said:\n{said}");
    }
}

/// A server that never responds does not block tracing; what exceeds the queue is dropped and counted.
#[test]
fn never_waits() {
    let dir = tempfile::tempdir().unwrap();
    let (listener, address) = local();
    let client = Client::start(&target(address, dir.path()), |_| {}).unwrap();
    client.send("[0]".to_owned(), None);
    let (silent, _) = listener.accept().unwrap();
    // The thread is waiting for the response now, so nothing is taken out of the queue.
    let large = "x".repeat(1 << 20);
    let begun = Instant::now();
    for _ in 0..100 {
        client.send(large.clone(), None);
    }
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    let counted = |client: &Client| {
        let mut counts = UserCounts::default();
        client.add_counts(&mut counts);
        let counts = counts.sets;
        (counts.sets, counts.sets_sent, counts.sets_refused, counts.sets_dropped, counts.sets_waiting)
    };
    assert_eq!(counted(&client), (101, 0, 0, 36, 65), "64 of 100 MB are kept");
    drop((silent, listener));
    client.finish();
    assert_eq!(waiting(dir.path()), 65);
    assert_eq!(counted(&client), (101, 0, 0, 36, 65));
}

/// A set is sent after a number of units of work, complete: the start and the end of each unit are in the same set.
#[test]
fn sync_units() {
    let dir = tempfile::tempdir().unwrap();
    let (listener, address) = local();
    let server = server(listener, vec![(200, "", "x"); 3]);
    let target = Target { units: std::num::NonZeroU32::new(2), ..target(address, dir.path()) };
    let clock = WallClock::with_offsets(1_700_000_000_000_000_000, 0);
    let mut sets = TuneMyGc::sending(&target, Dialect::Spec, clock, |_| {}).unwrap();
    let process = samples::process();
    sets.see(&process, Seen::Process { state: None, now_ns: 1, since_ns: 1 }).unwrap();
    for at in 1..=5 {
        sets.see(&process, Seen::Request(&samples::request(at * 1_000_000))).unwrap();
    }
    sets.finish(&Ledger::default()).unwrap();
    let units = |(_, text): (bool, String)| {
        let set = SampleSet::from_json(&text).unwrap();
        let of = |event| set.samples.iter().filter(|sample| sample.event == event).count();
        (of(EventName::Booted), of(EventName::ProcessingStarted), of(EventName::ProcessingEnded))
    };
    let got: Vec<_> = server.join().unwrap().into_iter().map(units).collect();
    assert_eq!(got, [(1, 2, 2), (0, 2, 2), (0, 1, 1)]);
}

/// A process whose environment is unknown has no set: a set without variables would say that it runs with Ruby's defaults.
#[test]
fn unknown_environment() {
    let dir = tempfile::tempdir().unwrap();
    let clock = WallClock::with_offsets(1_700_000_000_000_000_000, 0);
    let mut sets = TuneMyGc::new(dir.path(), None, Dialect::Spec, clock).unwrap();
    let known = Process { gc_env: Some(std::collections::BTreeMap::new()), ..samples::process() };
    for process in [Process { pid: 5, ns_pid: None, gc_env: None, ..samples::process() }, known] {
        sets.see(&process, Seen::Process { state: None, now_ns: 1, since_ns: 1 }).unwrap();
        sets.see(&process, Seen::Cycle(&cycle(1_000_000))).unwrap();
    }
    sets.finish(&Ledger::default()).unwrap();
    let mut counts = UserCounts::default();
    sets.add_counts(&mut counts);
    assert_eq!(counts.sets.sets_environment_unknown, 1);
    let written: Vec<_> = std::fs::read_dir(dir.path()).unwrap().flatten().collect();
    let set = SampleSet::from_json(&std::fs::read_to_string(written[0].path()).unwrap()).unwrap();
    assert_eq!((written.len(), set.header.pid, set.header.gc_env.len()), (1, 1, 0));
}

/// The pids in a header are of one namespace: that of the process. 0: the parent is not in it, or unknown.
#[test]
fn pids_of_one_namespace() {
    let dir = tempfile::tempdir().unwrap();
    let clock = WallClock::with_offsets(1_700_000_000_000_000_000, 0);
    let mut sets = TuneMyGc::new(dir.path(), None, Dialect::Spec, clock).unwrap();
    let of = |pid, ns_pid, ppid, container: Option<&str>| {
        let mut process = Process { pid, ns_pid, ppid: Some(ppid), ..samples::process() };
        process.container.id = container.map(ToOwned::to_owned);
        process
    };
    let all = [
        (of(100, Some(1), 50, Some("c")), (1, 0)),
        (of(101, Some(7), 100, Some("c")), (7, 1)),
        (of(102, Some(8), 100, Some("d")), (8, 0)),
        (of(103, Some(103), 100, None), (103, 100)),
        (of(104, None, 100, None), (104, 100)),
    ];
    for (process, wanted) in all {
        sets.see(&process, Seen::Process { state: None, now_ns: 1, since_ns: 1 }).unwrap();
        let header = &sets.open[&process.pid].header;
        assert_eq!((header.pid, header.ppid), wanted);
    }
}

/// A cycle that begins at this time, nanoseconds.
fn cycle(at: u64) -> GcCycle {
    let mut found = None;
    samples::all(at, &mut |_, seen| {
        if let Seen::Cycle(cycle) = seen {
            found.get_or_insert_with(|| cycle.clone());
        }
    });
    found.unwrap()
}

/// However many processes there are, their unfinished sets together have a limit: the longest is written first, and no sample is lost.
#[test]
fn limit_of_all() {
    const CYCLES: u64 = 60;
    let dir = tempfile::tempdir().unwrap();
    let clock = WallClock::with_offsets(1_700_000_000_000_000_000, 0);
    let mut sets = TuneMyGc::new(dir.path(), None, Dialect::Spec, clock).unwrap();
    sets.most_held = 500;
    let processes: Vec<Process> =
        (1..=20).map(|pid| Process { pid, ns_pid: None, ..samples::process() }).collect();
    for process in &processes {
        sets.see(process, Seen::Process { state: None, now_ns: 1, since_ns: 1 }).unwrap();
    }
    for at in 1..=CYCLES {
        for process in &processes {
            let cycle = cycle(at * 1_000_000);
            sets.see(process, Seen::Cycle(&cycle)).unwrap();
            let held: usize = sets.open.values().map(|open| open.samples.len()).sum();
            assert!(held <= 500 && held == sets.held, "{held}, {}", sets.held);
        }
        // A process that ends takes its samples with it.
        if at == CYCLES / 2 {
            sets.write(20, true).unwrap();
        }
    }
    sets.finish(&Ledger::default()).unwrap();
    assert_eq!((sets.held, sets.open.len()), (0, 0));
    let mut count = std::collections::BTreeMap::<u64, (usize, usize)>::new();
    for file in std::fs::read_dir(dir.path()).unwrap() {
        let set = SampleSet::from_json(&std::fs::read_to_string(file.unwrap().path()).unwrap()).unwrap();
        let (booted, cycles) = count.entry(set.header.pid).or_default();
        let of = |event| set.samples.iter().filter(|sample| sample.event == event).count();
        *booted += of(EventName::Booted);
        *cycles += of(EventName::GcCycleStarted);
    }
    let ended = count.remove(&20).unwrap();
    assert_eq!(ended, (1, CYCLES as usize / 2));
    assert_eq!(count.len(), 19);
    assert!(count.values().all(|of| *of == (1, CYCLES as usize)), "{count:?}");
}

/// A process that has become idle is reported, too: its set is sent after ten minutes without a further event.
#[test]
fn idle() {
    let dir = tempfile::tempdir().unwrap();
    let (listener, address) = local();
    let server = server(listener, vec![(200, "", "x"); 2]);
    let clock = WallClock::with_offsets(1_700_000_000_000_000_000, 0);
    let mut sets = TuneMyGc::sending(&target(address, dir.path()), Dialect::Spec, clock, |_| {}).unwrap();
    let (process, calm) = (samples::process(), Process { pid: 99, ..samples::process() });
    for process in [&process, &calm] {
        let state = samples::state(1_000_000);
        sets.see(process, Seen::Process { state: Some(&state), now_ns: 1, since_ns: 1 }).unwrap();
    }
    for at in 2..=3 {
        sets.see(&process, Seen::Cycle(&cycle(at * 1_000_000))).unwrap();
    }
    let minutes = |minutes: u64| minutes * 60_000_000_000;
    let held = |sets: &TuneMyGc| sets.open[&process.pid].samples.len();
    sets.flush(minutes(9)).unwrap();
    assert_eq!(held(&sets), 5);
    sets.flush(minutes(11)).unwrap();
    assert_eq!(held(&sets), 0);
    // Of the other one only its state is known: that can wait.
    assert_eq!(sets.open[&calm.pid].samples.len(), 1);
    sets.flush(minutes(40)).unwrap();
    sets.finish(&Ledger::default()).unwrap();
    let got = server.join().unwrap();
    let lengths: Vec<usize> =
        got.iter().map(|(_, text)| SampleSet::from_json(text).unwrap().samples.len()).collect();
    assert_eq!(lengths, [5, 1]);
}
