//! Several recordings as one: everything once, in order, and the sum of the accounts.

use std::path::PathBuf;

use super::{
    flight::{Flight, S, cycle, keep},
    *,
};
use crate::{
    ledger::Extent,
    model::{
        GcCycle,
        seen::ProcessEnd,
        stack::{StackSample, ThreadState},
    },
};

/// Merges recordings with these bytes.
fn merged(all: &[&[u8]]) -> Result<(Vec<u8>, Merged), MergeError> {
    let dir = tempfile::tempdir().unwrap();
    let files: Vec<PathBuf> = (0..all.len()).map(|at| dir.path().join(format!("{at}.gctrace"))).collect();
    for (file, bytes) in files.iter().zip(all) {
        std::fs::write(file, bytes).unwrap();
    }
    let to = dir.path().join("all.gctrace");
    let merged = merge(&files, &to);
    assert_eq!(to.exists(), merged.is_ok());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), all.len() + usize::from(merged.is_ok()));
    Ok((std::fs::read(&to).unwrap_or_default(), merged?))
}

fn refusal(all: &[&[u8]]) -> String {
    let error = merged(all).unwrap_err().to_string();
    assert!(error.ends_with("; nothing was written"), "{error}");
    error
}

/// Counts of the replayed cycles, in order.
fn cycles(bytes: &[u8]) -> Vec<String> {
    let cycle = regex_lite::Regex::new("^Cycle.*?count: ([0-9]+),").unwrap();
    let pid = regex_lite::Regex::new("Process \\{ pid: ([0-9]+),").unwrap();
    let (result, lines) = replayed(bytes);
    result.unwrap();
    let of = |line: &String| Some(format!("{}#{}", &pid.captures(line)?[1], &cycle.captures(line)?[1]));
    lines.iter().filter_map(of).collect()
}

/// Upper bound (exclusive) of pids.
const PIDS: u32 = 1 << 22;
/// How long after the start of a cycle the memory was read, nanoseconds.
const READ_LATER_NS: u64 = 17;

/// A run on a host: a process from a given second on, with a cycle in each second.
fn run(header: &Header, pid: u32, seconds: std::ops::Range<u64>) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a");
    // Each run measures its clock.
    let (offset_ns, suspended_ns) = header.clock.offsets();
    let clock = WallClock::with_offsets(offset_ns + i64::from(pid) + seconds.end as i64, suspended_ns);
    let header = Header { clock, ..header.clone() };
    let mut outputs = Outputs::new(vec![Box::new(Recorder::create(&path, &header).unwrap())]);
    let process = process_with(pid);
    let see = |outputs: &mut Outputs, seen: Seen<'_>| outputs.hand(|exporter| exporter.see(&process, seen));
    let mut ledger = Ledger { kernel: Some(vec![0; Counter::ALL.len()]), ..Ledger::default() };
    outputs.tell(|exporter| exporter.began(seconds.start * S));
    see(&mut outputs, Seen::Process { state: None, now_ns: seconds.start * S, since_ns: seconds.start * S });
    ledger.user.pipeline.processes = 1;
    for second in seconds.clone() {
        let mut cycle = GcCycle { count: second, ..cycle(second * S + u64::from(pid), 1000) };
        let shares = cycle.start.memory.as_mut().and_then(|memory| memory.shares.as_mut()).unwrap();
        shares.read_ns = Some(cycle.start.ts_ns + READ_LATER_NS);
        see(&mut outputs, Seen::Cycle(&cycle));
        ledger.user.pipeline.cycles += 1;
        if let Some(kernel) = &mut ledger.kernel {
            kernel[Counter::Hits as usize] += 3;
        }
        outputs.tell(|exporter| exporter.account(&ledger));
        outputs.hand(|exporter| exporter.flush(second * S + S / 2 + u64::from(pid)));
    }
    let end = ProcessEnd {
        reason: crate::model::EndReason::Exited,
        ts_ns: seconds.end * S,
        since_ns: seconds.start * S,
        outside_ns: 0,
        beyond_ns: 0,
        shutdown: None,
        cycles: seconds.end - seconds.start,
        before: crate::model::seen::CyclesBefore::Unknown,
        lost: 0,
    };
    see(&mut outputs, Seen::Ended(&end));
    outputs.tell(|exporter| exporter.closed(seconds.end * S));
    outputs.hand(|exporter| exporter.finish(&ledger));
    outputs.hand(|exporter| exporter.settled(&ledger));
    std::fs::read(&path).unwrap()
}

/// Two runs on one host: all events by time, sums of the accounts, and distinct request ids.
#[test]
fn two_runs() {
    let (web, jobs) = (run(&header(), 10, 0..4), run(&header(), 20, 2..5));
    let (bytes, told) = merged(&[&jobs, &web]).unwrap();
    assert_eq!(told, Merged { notes: Vec::new(), processes: 2 });
    let expected = ["10#0", "10#1", "10#2", "20#2", "10#3", "20#3", "20#4"];
    assert_eq!(cycles(&bytes), expected);
    let ledger = replayed(&bytes).0.unwrap().ledger;
    assert_eq!((ledger.user.pipeline.cycles, ledger.user.pipeline.processes), (7, 2));
    assert_eq!(ledger.kernel.unwrap()[Counter::Hits as usize], 21);
    assert_eq!(ledger.extent, Extent::Run);
    let lines = replayed(&bytes).1;
    assert_eq!(lines.iter().filter(|line| line.starts_with("began")).collect::<Vec<_>>(), ["began 0"]);
    assert_eq!(
        lines.iter().filter(|line| line.starts_with("closed")).collect::<Vec<_>>(),
        ["closed 5000000000"]
    );
    // Each of the runs starts cycles in a request with the id 77.
    let requests: std::collections::BTreeSet<&str> =
        lines.iter().filter_map(|line| line.split("request: Some(").nth(1)?.split(')').next()).collect();
    assert_eq!(requests.len(), 2, "{requests:?}");
    // The result starts with the first recording, whichever one has the clock.
    for (one_ns, other_ns) in [(5, 42), (42, 5)] {
        let begun = |begun_ns| Header { begun_ns, ..header() };
        let (bytes, _) = merged(&[&run(&begun(one_ns), 10, 0..4), &run(&begun(other_ns), 20, 2..5)]).unwrap();
        assert_eq!(Recording::read(&bytes[..], Path::new("x")).unwrap().header().begun_ns, 5);
    }
    // Merged again, with a third recording.
    let third = run(&header(), 30, 7..8);
    let (bytes, _) = merged(&[&bytes, &third]).unwrap();
    assert_eq!(cycles(&bytes).len(), 8);
}

/// The same process at the same time is refused; at different times it is not.
#[test]
fn counted_once() {
    let all = run(&header(), 10, 0..4);
    let error = refusal(&[&all, &run(&header(), 10, 3..6)]);
    assert!(error.contains("both have process 10 at the same time"), "{error}");
    // A copy of a recording adds nothing.
    assert_eq!(cycles(&merged(&[&all, &all]).unwrap().0), cycles(&all));
    let (bytes, _) = merged(&[&all, &run(&header(), 10, 4..6)]).unwrap();
    assert_eq!(cycles(&bytes).len(), 6);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a");
    std::fs::write(&file, &all).unwrap();
    let error = merge(&[file.clone(), file.clone()], &dir.path().join("b")).unwrap_err().to_string();
    assert!(error.contains("is named twice"), "{error}");
    let error = merge(std::slice::from_ref(&file), &file).unwrap_err().to_string();
    assert!(error.contains("is one of the recordings"), "{error}");
}

/// Dumps of one flight recorder: their common part is present once.
#[test]
fn dumps() {
    let mut flight = Flight::new(keep(4, &[]));
    let mut dumps = Vec::new();
    let process = samples::process();
    flight.see(&process, Seen::Process { state: None, now_ns: 1, since_ns: 1 });
    flight.outputs.tell(|exporter| exporter.began(1));
    for second in 0..20_u64 {
        let cycle = GcCycle { count: second, ..cycle(second * S + 7, 1000) };
        flight.see(&process, Seen::Cycle(&cycle));
        flight.second((second + 1) * S);
        if [5, 7, 19].contains(&second) {
            dumps.push(flight.dump());
        }
    }
    let [one, two, later] = &dumps[..] else { panic!("{}", dumps.len()) };
    let both = [cycles(one), cycles(two)].concat();
    let (bytes, told) = merged(&[two, one]).unwrap();
    let mut expected: Vec<String> = both.clone();
    expected.dedup();
    let unique: std::collections::BTreeSet<&String> = both.iter().collect();
    assert!(unique.len() < both.len(), "{both:?}");
    assert_eq!(cycles(&bytes).len(), unique.len());
    assert!(cycles(&bytes).windows(2).all(|pair| pair[0] != pair[1]));
    assert!(told.notes[0].contains("are of one run"), "{told:?}");
    let replayed_once = replayed(&bytes).0.unwrap();
    assert_eq!(replayed_once.ledger.user.pipeline.cycles as usize, unique.len());
    assert_eq!((replayed_once.ledger.extent, told.processes), (Extent::Part, 1));
    // A dump that adds nothing, and one much later.
    let (same, _) = merged(&[one, two, one]).unwrap();
    assert_eq!(cycles(&same), cycles(&bytes));
    let (all, _) = merged(&[one, later, two]).unwrap();
    assert_eq!(cycles(&all), [cycles(&bytes), cycles(later)].concat());
    // The supposedly common part differs.
    let mut other = Flight::new(keep(4, &[]));
    other.see(&process, Seen::Process { state: None, now_ns: 1, since_ns: 1 });
    for second in 0..8_u64 {
        other.second((second + 1) * S);
    }
    assert!(refusal(&[one, &other.dump()]).contains("differ in the common part"));
}

/// A dump has the gaps in its own time in which individual waits for the GVL were not recorded, and so has the result
/// of merging dumps of one run.
#[test]
fn gaps_of_dumps() {
    let mut flight = Flight::new(keep(4, &[]));
    let process = samples::process();
    flight.see(&process, Seen::Process { state: None, now_ns: 1, since_ns: 1 });
    let mut dumps = Vec::new();
    for second in 0..9_u64 {
        flight.see(&process, Seen::Cycle(&GcCycle { count: second, ..cycle(second * S + 7, 1000) }));
        if second == 8 {
            // As at the end of a run.
            for (from, to) in [(1, 2), (7, 8)] {
                let gap = GvlGap { from_ns: from * S, to_ns: to * S, summed: true };
                flight.outputs.tell(|exporter| exporter.gvl_gap(gap));
            }
        }
        flight.second((second + 1) * S);
        if [6, 8].contains(&second) {
            dumps.push(flight.dump());
        }
    }
    let [one, later] = &dumps[..] else { panic!("{}", dumps.len()) };
    let (both, _) = merged(&[one, later]).unwrap();
    let gaps = |bytes: &[u8]| -> Vec<String> {
        replayed(bytes).1.into_iter().filter(|line| line.contains("summed: true")).collect()
    };
    let expected = [format!("{:?}", GvlGap { from_ns: 7 * S, to_ns: 8 * S, summed: true })];
    assert!(gaps(one).is_empty());
    assert_eq!((&gaps(later)[..], &gaps(&both)[..]), (&expected[..], &expected[..]));
}

/// Dumps of one run that do not overlap are merged with their gaps: these are those of the same processes.
#[test]
fn gaps_of_dumps_that_do_not_overlap() {
    let mut flight = Flight::new(keep(2, &[]));
    let process = samples::process();
    flight.see(&process, Seen::Process { state: None, now_ns: 1, since_ns: 1 });
    let mut dumps = Vec::new();
    for second in 0..20_u64 {
        flight.see(&process, Seen::Cycle(&GcCycle { count: second, ..cycle(second * S + 7, 1000) }));
        if [8, 18].contains(&second) {
            let gap = GvlGap { from_ns: (second - 1) * S, to_ns: second * S, summed: true };
            flight.outputs.tell(|exporter| exporter.gvl_gap(gap));
        }
        flight.second((second + 1) * S);
        if [8, 18].contains(&second) {
            dumps.push(flight.dump());
        }
    }
    let [one, later] = &dumps[..] else { panic!("{}", dumps.len()) };
    let (both, _) = merged(&[one, later]).unwrap();
    let gaps = replayed(&both).1.into_iter().filter(|line| line.contains("summed: true")).count();
    assert_eq!(gaps, 2);
    let other = Header { clock: WallClock::with_offsets(1, 1), ..header() };
    assert!(matches!(merged(&[one, &run(&other, 10, 0..3)]), Err(MergeError::Refused(_))));
}

/// Another boot: times are placed by the time of day, and ids are changed if they collide.
#[test]
fn other_hosts() {
    let here = header();
    let host = |boot: &str| Host { boot: Some(boot.to_owned()), ..here.host.clone() };
    let (offset_ns, suspended_ns) = here.clock.offsets();
    let there = Header {
        clock: WallClock::with_offsets(offset_ns + 1_500_000_000, suspended_ns),
        host: host("other"),
        ..here.clone()
    };
    let (one, other) = (run(&here, 10, 0..3), run(&there, 10, 0..3));
    let (bytes, told) = merged(&[&other, &one]).unwrap();
    assert_eq!(cycles(&bytes), ["10#0", "10#1", "4194314#0", "10#2", "4194314#1", "4194314#2"]);
    assert!(told.notes.iter().any(|note| note.contains("not known to be of the same boot")), "{told:?}");
    assert!(
        told.notes.iter().any(|note| note.contains("pids and thread ids are 4194304 higher")),
        "{told:?}"
    );
    let begins = |bytes: &[u8]| -> Vec<i64> {
        let time = regex_lite::Regex::new("begin_ns: ([0-9]+)").unwrap();
        let header = Recording::read(bytes, Path::new("x")).unwrap().header().clone();
        let lines = replayed(bytes).1;
        let of = |line: &String| Some(header.clock.epoch_nanos(time.captures(line)?[1].parse().unwrap()));
        lines.iter().filter(|line| line.starts_with("Cycle")).filter_map(of).collect()
    };
    let mut expected = [begins(&one), begins(&other)].concat();
    let mut found = begins(&bytes);
    expected.sort_unstable();
    found.sort_unstable();
    assert_eq!(found, expected);
    // A value that was read later than its event still is on the clock of the result.
    let later =
        regex_lite::Regex::new("start: GcState \\{ ts_ns: ([0-9]+),.*?read_ns: Some\\(([0-9]+)\\)").unwrap();
    let lines = replayed(&bytes).1;
    let later: Vec<_> = lines.iter().filter_map(|line| later.captures(line)).collect();
    assert_eq!(later.len(), 6);
    for found in later {
        let number = |at: usize| found[at].parse::<u64>().unwrap();
        assert_eq!(number(2) - number(1), READ_LATER_NS, "{found:?}");
    }
    // A recording that was merged before already has higher ids.
    let third = Header {
        clock: WallClock::with_offsets(offset_ns + 2_200_000_000, suspended_ns),
        host: host("third"),
        ..here.clone()
    };
    let (bytes, _) = merged(&[&run(&third, 10, 0..3), &bytes]).unwrap();
    let found = cycles(&bytes);
    let of = |pid: u32| found.iter().filter(|cycle| cycle.starts_with(&format!("{pid}#"))).count();
    assert_eq!((of(10), of(PIDS + 10), of(2 * PIDS + 10)), (3, 3, 3), "{found:?}");
    // Without a boot id, the name of the host and the time of the boot decide.
    let old = Header { host: Host { boot: None, ..here.host.clone() }, ..here.clone() };
    let error = refusal(&[&run(&old, 10, 0..3), &run(&old, 10, 1..2)]);
    assert!(error.contains("both have process 10"), "{error}");
}

/// Runs on one boot have one monotonic clock, although the time of day of their host was set in between, and the first recording is that of
/// another host.
#[test]
fn two_runs_of_another_host() {
    let here = header();
    let (offset_ns, suspended_ns) = here.clock.offsets();
    let host = Host { boot: Some("other".to_owned()), ..here.host.clone() };
    let there = |later_ns| Header {
        clock: WallClock::with_offsets(offset_ns + later_ns, suspended_ns),
        host: host.clone(),
        ..here.clone()
    };
    let (one, two, three) =
        (run(&here, 10, 0..3), run(&there(1_500_000_000), 20, 0..3), run(&there(1_700_000_000), 30, 0..3));
    let (bytes, _) = merged(&[&one, &two, &three]).unwrap();
    let time = regex_lite::Regex::new("begin_ns: ([0-9]+)").unwrap();
    let begins = |pid: u32| -> Vec<u64> {
        let of = format!("Process {{ pid: {pid},");
        let lines = replayed(&bytes).1;
        let cycles = lines.iter().filter(|line| line.starts_with("Cycle") && line.contains(&of));
        cycles.map(|line| time.captures(line).unwrap()[1].parse().unwrap()).collect()
    };
    let (two, three) = (begins(PIDS + 20), begins(PIDS + 30));
    // Cycles of a run begin as many nanoseconds later as its pid.
    assert_eq!((two.len(), three), (3, two.iter().map(|ns| ns + 10).collect()));
}

/// A merge whose result could not distinguish the recordings' data is refused.
#[test]
fn not_exact() {
    let one = run(&header(), 10, 0..3);
    let blind = Header { subjects: Subjects { gvl: false, ..header().subjects }, ..header() };
    let error = refusal(&[&one, &run(&blind, 20, 0..3)]);
    assert!(error.contains("was recorded with --gvl"), "{error}");
    let error = refusal(&[&one, &recorded().0]);
    assert!(error.contains("times without individual waits for the GVL"), "{error}");
    let mut damaged = one.clone();
    let at = damaged.len() / 2;
    damaged[at] ^= 1;
    assert!(refusal(&[&one, &damaged]).contains("is damaged"));
}

/// A recording that was cut off is merged up to its end, and the account says so.
#[test]
fn cut_off_parts() {
    let (one, other) = (run(&header(), 10, 0..3), run(&header(), 20, 0..3));
    let (bytes, _) = merged(&[&one[..boundaries(&one)[2]], &other]).unwrap();
    assert_eq!(replayed(&bytes).0.unwrap().ledger.extent, Extent::CutOff);
}

/// Dumps after these seconds, each of the last `kept` seconds, of a process with a cycle in each second and a thread that is off its CPU since a time.
fn dumps_with_an_open_time(kept: u64, since_ns: u64, after: &[u64]) -> Vec<Vec<u8>> {
    let mut flight = Flight::new(keep(kept, &[]));
    let process = samples::process();
    flight.see(&process, Seen::Process { state: None, now_ns: 1, since_ns: 1 });
    let mut dumps = Vec::new();
    for second in 0..=after.last().copied().unwrap_or_default() {
        flight.see(&process, Seen::Cycle(&GcCycle { count: second, ..cycle(second * S + 7, 1000) }));
        flight.second((second + 1) * S);
        if !after.contains(&second) {
            continue;
        }
        let sample = samples::sample(since_ns, Arc::from([]));
        let wall_ns = (second + 1) * S - sample.ts_ns;
        let open = StackSample { state: ThreadState::Blocked, cpu_ns: 0, wall_ns, ..sample };
        let before = flight.written();
        flight.outputs.tell(|exporter| exporter.dump_requested());
        flight.outputs.tell(|exporter| exporter.off_cpu_so_far(&[(process.clone(), open.clone())]));
        flight.outputs.tell(|exporter| exporter.account(&flight.ledger));
        let after = flight.written();
        dumps.push(std::fs::read(after.iter().find(|path| !before.contains(path)).unwrap()).unwrap());
    }
    dumps
}

/// Each dump has the off-CPU times that had not ended by then. The result of merging several has those of the last
/// one, not those of the others.
#[test]
fn open_times_of_dumps() {
    let dumps = dumps_with_an_open_time(4, 4 * S, &[5, 6, 8]);
    let open = |bytes: &[u8]| -> Vec<String> {
        let lines = replayed(bytes).1;
        let lines = lines.iter().filter(|line| line.contains("Blocked"));
        lines.filter_map(|line| Some(line.split("wall_ns: ").nth(1)?.split(',').next()?.to_owned())).collect()
    };
    let [one, two, three] = &dumps[..] else { panic!("{}", dumps.len()) };
    assert_eq!((open(one), open(three)), (vec![(2 * S).to_string()], vec![(5 * S).to_string()]));
    let (all, _) = merged(&[two, one, three]).unwrap();
    let seconds = cycles(&all);
    assert_eq!((seconds.len(), open(&all)), (7, vec![(5 * S).to_string()]), "{seconds:?}");
}

/// A thread that was off its CPU before two dumps that do not overlap is in each for the time of that dump, also after they were merged.
#[test]
fn open_times_of_separate_dumps() {
    let dumps = dumps_with_an_open_time(2, 1, &[6, 15]);
    // As a profile has them: since tracing began.
    let blocked = |bytes: &[u8]| -> u64 {
        let lines = replayed(bytes).1;
        let number = |line: &str, key: &str| -> Option<u64> {
            line.split(key).nth(1)?.split([',', ')', ' ']).next()?.parse().ok()
        };
        let began = lines.iter().find_map(|line| number(line, "now_ns: ")).unwrap();
        let times = lines.iter().filter(|line| line.contains("Blocked"));
        times
            .map(|line| {
                let (ts_ns, wall_ns) = (number(line, "ts_ns: ").unwrap(), number(line, "wall_ns: ").unwrap());
                (ts_ns + wall_ns).saturating_sub(ts_ns.max(began))
            })
            .sum()
    };
    let each: Vec<u64> = dumps.iter().map(|dump| blocked(dump)).collect();
    let (all, _) = merged(&[&dumps[0], &dumps[1]]).unwrap();
    assert!(each.iter().all(|ns| (2 * S..4 * S).contains(ns)), "{each:?}");
    assert_eq!(blocked(&all), each.iter().sum::<u64>(), "{each:?}");
}
