//! What goes in comes out: sums of every format equal what was recorded, whatever the names and stacks are.

use std::{
    collections::{self, HashSet},
    io::Read as _,
    path::Path,
    sync::Arc,
};

use proptest::prelude::*;
use prost::Message as _;
use serde_json::Value;

use super::*;
use crate::export::sink::Sink;
use crate::{
    model::{
        GcCycle, GcState, Image, Memory, Pause,
        seen::{CyclesBefore, ProcessEnd},
        stack::{Frame, FrameKind, GcActivity, StackSample, ThreadState},
    },
    ruby::{RubyVersion, fallback::Method, stat::GcInfo},
};

mod gvl;

/// Names that formats could stumble over.
const NAMES: [&str; 14] = [
    "Foo#bar",
    "block in <main>",
    "<top (required)>",
    "A::B.c<D>",
    "semi;colon",
    "two\nlines\r\n",
    "\"quotes\" & <script>alert('x')</script>",
    "ends with a number 42",
    "# comment",
    "",
    "\u{0}\u{1}\u{fffe}\u{2028}",
    "Größe#größer？ 🦀",
    "_[k]",
    "--",
];

fn frame(at: usize, line: u32) -> Arc<Frame> {
    let kinds = [
        FrameKind::Ruby,
        FrameKind::CFunction,
        FrameKind::Native,
        FrameKind::Kernel,
        FrameKind::Vm,
        FrameKind::Missing,
    ];
    let files = [None, Some("/srv/app/models/foo.rb"), Some("(eval at a;b.rb:3)"), Some("")];
    let file = files[at % files.len()].map(Arc::from);
    let kind = kinds[at % kinds.len()];
    let native = matches!(kind, FrameKind::Native | FrameKind::Kernel);
    let (name, address) = (Arc::from(NAMES[at % NAMES.len()]), if native { 0x1000 + at as u64 } else { 0 });
    Arc::new(Frame { kind, name, file, line, first_line: line / 2, address })
}

fn process(pid: u32) -> Process {
    let image = Image {
        index: pid % 2,
        path: format!("/usr/lib/libruby.so.3.{}", pid % 2).into(),
        version: RubyVersion { major: 3, minor: (pid % 2) as u16, teeny: 0 },
        build_id: Some("ab".to_owned()),
        stat_keys: Vec::new(),
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
        comm: NAMES[pid as usize % NAMES.len()].to_owned(),
        cmdline: None,
        uid: None,
        start_ts: None,
        hostname: None,
        container: crate::model::Container::default(),
        gc_env: BTreeMap::new(),
        gc_env_refused: Vec::new(),
        origin: Arc::default(),
        image: Arc::new(image),
    }
}

/// A sample at that time, and its process.
pub(in crate::export) fn a_sample(ts_ns: u64) -> (Process, StackSample) {
    let sample = StackSample {
        ts_ns,
        tid: 1,
        comm: Arc::from("ruby"),
        state: ThreadState::Running,
        cpu_ns: 1,
        wall_ns: 1,
        gc: GcActivity::None,
        stack: Arc::new([frame(0, 1)]),
    };
    (process(1), sample)
}

fn state(ts_ns: u64, tid: u32, rss: u64) -> GcState {
    let info = GcInfo {
        major_by: (ts_ns % 2 == 1).then_some("nofree"),
        need_major_by: None,
        gc_by: Some("newobj"),
        have_finalizer: false,
        immediate_sweep: false,
        state: "none",
        weak_references: None,
    };
    let memory = Some(Memory { rss, peak_rss: rss, ..Memory::default() });
    GcState { ts_ns, tid, stat: Vec::new(), heaps: Vec::new(), info, memory }
}

/// What a test puts in.
#[derive(Clone, Debug)]
struct Input {
    pid: u32,
    tid: u32,
    ts_ns: u64,
    state: ThreadState,
    cpu_ns: u64,
    wall_ns: u64,
    stack: Vec<(usize, u32)>,
    /// Recursion: how often the stack is repeated.
    times: usize,
    /// Pauses of a cycle that begins here.
    pauses: Vec<(u64, u64, u64)>,
}

impl Input {
    fn stack(&self) -> Arc<[Arc<Frame>]> {
        let one = self.stack.iter().map(|&(at, line)| frame(at, line)).collect::<Vec<_>>();
        std::iter::repeat_n(one, self.times).flatten().collect()
    }

    fn time_ns(&self) -> u64 {
        if self.state == ThreadState::Running { self.cpu_ns } else { self.wall_ns }
    }

    fn record(&self, recorder: &mut Recorder) {
        let process = process(self.pid);
        let sample = StackSample {
            ts_ns: self.ts_ns,
            tid: self.tid,
            comm: Arc::from(NAMES[self.tid as usize % NAMES.len()]),
            state: self.state,
            cpu_ns: self.cpu_ns,
            wall_ns: self.wall_ns,
            gc: if self.tid.is_multiple_of(3) { GcActivity::Marking } else { GcActivity::None },
            stack: self.stack(),
        };
        recorder.see(&process, Seen::Stack(&sample)).unwrap();
        if self.pauses.is_empty() {
            return;
        }
        let pauses = self.pauses.iter().map(|&(mark_ns, sweep_ns, other_ns)| Pause {
            tid: self.tid,
            begin_ns: self.ts_ns,
            ns: mark_ns + sweep_ns + other_ns,
            kind: None,
            mark_ns,
            sweep_ns,
            other_ns,
        });
        let cycle = GcCycle {
            comm: "ruby".to_owned(),
            count: 7,
            start: state(self.ts_ns, self.tid, 1 << 20),
            end: self.tid.is_multiple_of(2).then(|| state(self.ts_ns + 5_000_000, self.tid, 1 << 21)),
            pauses: pauses.collect(),
            trigger: self.pid.is_multiple_of(2).then(|| self.stack()),
            request: None,
            lost: 0,
        };
        recorder.see(&process, Seen::Cycle(&cycle)).unwrap();
    }
}

fn recorded(inputs: &[Input], limits: Limits) -> Recorder {
    let mut recorder = Recorder { recording: Rc::new(RefCell::new(Recording::new(true, limits))) };
    recorder.began(0);
    for pid in inputs.iter().map(|input| input.pid).collect::<collections::BTreeSet<_>>() {
        recorder.see(&process(pid), Seen::Process { state: None, now_ns: 0 }).unwrap();
    }
    for input in inputs {
        input.record(&mut recorder);
    }
    recorder
}

fn written(recorder: &Recorder, format: Format, name: &str) -> (Vec<u8>, u64) {
    let (ledger, clock) = (Ledger::default(), WallClock::measure());
    let context =
        Context { ledger: &ledger, clock, began_ns: 1_000, ended_ns: 2_000_001_000, gvl: true, wall: true };
    let mut bytes = Vec::new();
    let left = write(format, Path::new(name), &recorder.recording.borrow(), &context, &mut bytes).unwrap();
    (bytes, left)
}

fn gunzip(bytes: &[u8]) -> Vec<u8> {
    let mut plain = Vec::new();
    flate2::read::GzDecoder::new(bytes).read_to_end(&mut plain).unwrap();
    plain
}

fn inputs() -> impl Strategy<Value = Vec<Input>> {
    let states = prop_oneof![
        4 => Just(ThreadState::Running),
        1 => Just(ThreadState::Runnable),
        1 => Just(ThreadState::Blocked)
    ];
    let frames = prop::collection::vec((0_usize..28, 0_u32..5), 0..6);
    let pauses = prop::collection::vec((0_u64..9_000_000, 0_u64..9_000, 0_u64..90), 0..3);
    let one = (
        (1_u32..4, 0_u32..4, 2_000_u64..9_000_000_000),
        states,
        (0_u64..30_000_000, 0_u64..900_000_000),
        frames,
        prop_oneof![8 => Just(1_usize), 1 => Just(400_usize)],
        pauses,
    );
    let one = one.prop_map(|((pid, thread, ts_ns), state, (cpu, wall_ns), stack, times, pauses)| {
        let cpu_ns = if state == ThreadState::Running { cpu } else { 0 };
        Input { pid, tid: pid + thread, ts_ns, state, cpu_ns, wall_ns, stack, times, pauses }
    });
    prop::collection::vec(one, 1..30)
}

fn sum(inputs: &[Input], of: impl Fn(&Input) -> u64) -> u64 {
    inputs.iter().map(of).sum()
}

fn check_pprof(recorder: &Recorder, inputs: &[Input]) {
    let profile =
        pprof::proto::Profile::decode(&*gunzip(&written(recorder, Format::Pprof, "x.pb.gz").0)).unwrap();
    let text = |at: i64| profile.string_table[at as usize].as_str();
    let types = profile.sample_type.iter().map(|known| (text(known.r#type), text(known.unit)));
    let total = |at: usize| profile.sample.iter().map(|sample| sample.value[at] as u64).sum::<u64>();
    let pauses = |input: &Input| input.pauses.iter().map(|(a, b, c)| a + b + c).sum();
    let expected = [
        ("samples", "count", inputs.len() as u64),
        ("cpu", "nanoseconds", sum(inputs, |input| input.cpu_ns)),
        ("wall", "nanoseconds", sum(inputs, |input| input.wall_ns)),
        ("gc-pauses", "count", sum(inputs, |input| input.pauses.len() as u64)),
        ("gc", "nanoseconds", sum(inputs, pauses)),
        ("gvl-waits", "count", 0),
        ("gvl-wait", "nanoseconds", 0),
        ("gvl-hold", "nanoseconds", 0),
    ];
    let found: Vec<_> = types.enumerate().map(|(at, (name, unit))| (name, unit, total(at))).collect();
    assert_eq!(found, expected);
    assert_eq!(text(0), "");
    assert_eq!(text(profile.default_sample_type), "cpu");

    // Every number leads somewhere, and equal samples are merged.
    let ids = |found: Vec<u64>| found.into_iter().collect::<HashSet<u64>>();
    let mappings = ids(profile.mapping.iter().map(|mapping| mapping.id).collect());
    let functions = ids(profile.function.iter().map(|function| function.id).collect());
    let locations = ids(profile.location.iter().map(|location| location.id).collect());
    assert!(!text(profile.mapping[0].filename).contains("libruby"), "the program comes first");
    for location in &profile.location {
        // The process that stands for those beyond the limit has no Ruby.
        assert!(location.mapping_id == 0 || mappings.contains(&location.mapping_id));
        assert!(location.line.iter().all(|line| functions.contains(&line.function_id)));
    }
    let mut seen = HashSet::new();
    for sample in &profile.sample {
        assert!(!sample.location_id.is_empty(), "`go tool pprof -raw` leaves such out");
        assert!(sample.location_id.iter().all(|id| locations.contains(id)));
        let labels: Vec<_> = sample.label.iter().map(|label| (text(label.key), text(label.str))).collect();
        assert_eq!(
            labels.iter().map(|label| label.0).collect::<HashSet<_>>().len(),
            labels.len(),
            "{labels:?}"
        );
        assert!(seen.insert((sample.location_id.clone(), labels)), "a sample occurs twice");
    }
}

fn check_folded(recorder: &Recorder, inputs: &[Input]) {
    for grouping in [Grouping::Process, Grouping::Thread, Grouping::None] {
        let (bytes, _) = written(recorder, Format::Folded(grouping), "x");
        let text = String::from_utf8(bytes).unwrap();
        let lines: Vec<(&str, u64)> = text
            .lines()
            .map(|line| line.rsplit_once(' ').unwrap())
            .map(|(path, count)| (path, count.parse().unwrap()))
            .collect();
        assert_eq!(
            lines.iter().map(|line| line.1).sum::<u64>(),
            sum(inputs, Input::time_ns),
            "{grouping:?}\n{text}"
        );
        assert_eq!(lines.iter().map(|line| line.0).collect::<HashSet<_>>().len(), lines.len());
        assert!(lines.iter().all(|line| !line.0.is_empty()));
        // Process, thread and state are names, too, and so is what stands for no stack at all.
        let frames = inputs.iter().map(|input| (input.stack.len() * input.times).max(1));
        let depths = frames.max().unwrap() + 3;
        assert!(lines.iter().all(|line| line.0.split(';').count() <= depths));
    }
}

fn check_flamegraph(recorder: &Recorder, inputs: &[Input]) {
    let (bytes, _) = written(recorder, Format::FlameGraph(Grouping::Process), "x.svg");
    let text = String::from_utf8(bytes).unwrap();
    let mut reader = quick_xml::Reader::from_str(&text);
    let (mut total, mut scripts, mut depth) = (None, 0, 0_i32);
    loop {
        match reader.read_event().unwrap() {
            quick_xml::events::Event::Start(tag) => {
                depth += 1;
                scripts += i32::from(tag.name().as_ref() == b"script");
                for attribute in tag.attributes() {
                    let attribute = attribute.unwrap();
                    if attribute.key.as_ref() == b"total_samples" {
                        total = Some(String::from_utf8(attribute.value.to_vec()).unwrap());
                    }
                }
            }
            quick_xml::events::Event::End(_) => depth -= 1,
            quick_xml::events::Event::Eof => break,
            _ => {}
        }
    }
    assert_eq!(depth, 0);
    let expected = sum(inputs, Input::time_ns);
    assert_eq!(scripts, i32::from(expected > 0), "a name became a script");
    assert_eq!(text.contains("<g id=\"legend\">"), expected > 0, "what the colours mean");
    assert_eq!(total, (expected > 0).then(|| expected.to_string()));
    assert!(!text.contains(|c: char| c.is_control() && c != '\n' && c != '\r' && c != '\t'));
}

fn check_speedscope(recorder: &Recorder, inputs: &[Input]) {
    let (bytes, left) = written(recorder, Format::Speedscope, "x.json");
    let file: Value = serde_json::from_slice(&bytes).unwrap();
    let frames = file["shared"]["frames"].as_array().unwrap().len() as u64;
    let (mut total, mut together) = (0, None);
    for profile in file["profiles"].as_array().unwrap() {
        let (samples, weights) =
            (profile["samples"].as_array().unwrap(), profile["weights"].as_array().unwrap());
        assert_eq!(samples.len(), weights.len());
        let sum: u64 = weights.iter().map(|weight| weight.as_u64().unwrap()).sum();
        assert_eq!(profile["endValue"].as_u64().unwrap(), sum);
        let gaps = samples.iter().zip(weights).filter(|(sample, _)| sample.as_array().unwrap().is_empty());
        let sum = sum - gaps.map(|(_, weight)| weight.as_u64().unwrap()).sum::<u64>();
        let numbers = samples.iter().flat_map(|sample| sample.as_array().unwrap());
        assert!(numbers.into_iter().all(|number| number.as_u64().unwrap() < frames));
        if profile["name"].as_str().unwrap().starts_with("all threads") {
            together = Some(sum);
        } else {
            total += sum;
            // From the beginning to the end, or beyond it where the samples are more than the time.
            assert!(profile["endValue"].as_u64().unwrap() >= 2_000_000_000);
        }
    }
    assert_eq!((total, left), (sum(inputs, Input::time_ns), 0));
    let threads = inputs.iter().map(|input| (input.pid, input.tid)).collect::<HashSet<_>>().len();
    assert!(together.is_none_or(|together| threads > 1 && together == total), "{together:?}");
}

/// A timeline has real times: two bursts with a second of nothing between them are a second apart, and a thread that comes late
/// begins late. Threads are in the order of their names.
#[test]
fn speedscope_has_real_time() {
    let running = |tid, ts_ms: u64, stack| Input {
        pid: 1,
        tid,
        ts_ns: 1_000 + ts_ms * 1_000_000,
        state: ThreadState::Running,
        cpu_ns: 10_000_000,
        wall_ns: 10_000_000,
        stack: vec![(stack, 1)],
        times: 1,
        pauses: Vec::new(),
    };
    let inputs =
        [running(3, 500, 1), running(2, 10, 1), running(2, 20, 1), running(2, 1020, 1), running(2, 1021, 0)];
    let recorder = recorded(&inputs, Limits::default());
    let (bytes, _) = written(&recorder, Format::Speedscope, "x.json");
    let file: Value = serde_json::from_slice(&bytes).unwrap();
    let profiles = file["profiles"].as_array().unwrap();
    let names: Vec<&str> = profiles.iter().map(|profile| profile["name"].as_str().unwrap()).collect();
    assert!(names[0].starts_with("all threads"), "{names:?}");
    // The names of 2 and 3 begin with `<` and `A`.
    assert!(names[1].ends_with("[2]") && names[2].ends_with("[3]"), "{names:?}");
    let spans = |at: usize| -> Vec<(bool, u64)> {
        let list = |key: &str| profiles[at][key].as_array().unwrap().clone();
        let pairs = list("samples").into_iter().zip(list("weights"));
        pairs.map(|(s, w)| (s.as_array().unwrap().is_empty(), w.as_u64().unwrap() / 1_000_000)).collect()
    };
    // Samples of the same stack that follow each other are one; the fourth and fifth would overlap.
    assert_eq!(spans(1), [(false, 20), (true, 990), (false, 10), (false, 10), (true, 970)]);
    assert_eq!(spans(2), [(true, 490), (false, 10), (true, 1500)]);
    assert_eq!(profiles[1]["endValue"].as_u64(), Some(2_000_000_000));
}

fn check_firefox(recorder: &Recorder, inputs: &[Input]) {
    let (bytes, left) = written(recorder, Format::Firefox, "x.json.gz");
    let file: Value = serde_json::from_slice(&gunzip(&bytes)).unwrap();
    let (mut time, mut cpu, mut markers) = (0, 0, 0);
    for thread in file["threads"].as_array().unwrap() {
        for table in ["samples", "markers", "stackTable", "frameTable", "funcTable"] {
            let table = thread[table].as_object().unwrap();
            let length = table["length"].as_u64().unwrap() as usize;
            for (name, column) in table.iter().filter_map(|(name, column)| Some((name, column.as_array()?))) {
                assert_eq!(column.len(), length, "{name}");
            }
        }
        let column = |table: &str, name: &str| thread[table][name].as_array().unwrap().clone();
        let below = |table: &str, name: &str, of: &str| {
            let limit = thread[of]["length"].as_u64().unwrap();
            assert!(column(table, name).iter().filter_map(Value::as_u64).all(|at| at < limit));
        };
        below("samples", "stack", "stackTable");
        below("stackTable", "frame", "frameTable");
        below("frameTable", "func", "funcTable");
        for (at, prefix) in column("stackTable", "prefix").iter().enumerate() {
            assert!(prefix.as_u64().is_none_or(|prefix| prefix < at as u64));
        }
        let times: Vec<f64> = column("samples", "time").iter().map(|time| time.as_f64().unwrap()).collect();
        assert!(times.is_sorted(), "{times:?}");
        let weights = column("samples", "weight");
        time += weights.iter().map(|weight| (weight.as_f64().unwrap() * 1e6).round() as u64).sum::<u64>();
        cpu += column("samples", "threadCPUDelta").iter().map(|delta| delta.as_u64().unwrap()).sum::<u64>();
        markers += thread["markers"]["length"].as_u64().unwrap();
        let strings = thread["stringArray"].as_array().unwrap().len() as u64;
        let names = [column("funcTable", "name"), column("markers", "name")].concat();
        assert!(names.iter().all(|name| name.as_u64().unwrap() < strings));
    }
    assert_eq!((time, cpu, left), (sum(inputs, Input::time_ns), sum(inputs, |input| input.cpu_ns), 0));
    let cycles = inputs.iter().filter(|input| !input.pauses.is_empty());
    assert_eq!(markers, cycles.map(|input| 1 + input.pauses.len() as u64).sum::<u64>());
    let threads = file["threads"].as_array().unwrap();
    for counter in file["counters"].as_array().unwrap() {
        let main = &threads[counter["mainThreadIndex"].as_u64().unwrap() as usize];
        assert_eq!((&main["pid"], &main["isMainThread"]), (&counter["pid"], &Value::Bool(true)));
        let changes = counter["samples"]["count"].as_array().unwrap();
        let last: i64 = changes.iter().map(|change| change.as_i64().unwrap()).sum();
        assert!([1 << 20, 1 << 21].contains(&last));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Every format says what went in, also where little is kept.
    #[test]
    fn sums_stay(inputs in inputs(), few in any::<bool>()) {
        let limits = if few {
            Limits { nodes: 9, sums: 3, threads: 2, ..Limits::default() }
        } else {
            Limits::default()
        };
        let recorder = recorded(&inputs, limits);
        check_pprof(&recorder, &inputs);
        check_folded(&recorder, &inputs);
        check_flamegraph(&recorder, &inputs);
        check_speedscope(&recorder, &inputs);
        check_firefox(&recorder, &inputs);
        let merged = recorder.recording.borrow().merged;
        prop_assert!(few || merged == 0, "{} merged", merged);
    }
}

/// Timelines end at the limit and say how much they leave out; sums have all of it.
#[test]
fn timelines_are_bounded() {
    let inputs: Vec<Input> = (0..20)
        .map(|at| Input {
            pid: 4,
            tid: 4,
            ts_ns: 10_000 + at * 1_000,
            state: ThreadState::Running,
            cpu_ns: 1_000,
            wall_ns: 1_000,
            stack: vec![(1, 1), (0, 2)],
            times: 1,
            pauses: vec![(10, 5, 0)],
        })
        .collect();
    let recorder = recorded(&inputs, Limits { timeline: 12, ..Limits::default() });
    let (bytes, left) = written(&recorder, Format::Speedscope, "x");
    let file: Value = serde_json::from_slice(&bytes).unwrap();
    assert_eq!((left, file["profiles"][0]["endValue"].as_u64()), (8, Some(8_000 + 12_000)));
    assert!(file["name"].as_str().unwrap().contains("8 later samples"), "{}", file["name"]);

    // Of events, 12 fit: 3 cycles with a pause and 2 points of memory each. 17 cycles do not.
    let (bytes, left) = written(&recorder, Format::Firefox, "x.json");
    let file: Value = serde_json::from_slice(&bytes).unwrap();
    assert_eq!(left, 8 + 17 * 4);
    assert_eq!(file["threads"][0]["samples"]["weight"].as_array().unwrap().len(), 13);
    assert_eq!(file["threads"][0]["markers"]["length"].as_u64(), Some(6));
    assert!(file["meta"]["extra"].to_string().contains("68"), "{}", file["meta"]["extra"]);
    check_pprof(&recorder, &inputs);
    check_folded(&recorder, &inputs);
}

/// A program that replaces itself is two processes, which a viewer must not take for one.
#[test]
fn after_exec() {
    let mut recorder = recorded(&[], Limits::default());
    for rss in [1_u64 << 20, 2 << 20] {
        let end = ProcessEnd {
            reason: crate::model::EndReason::Execed,
            ts_ns: rss,
            since_ns: 0,
            outside_ns: 0,
            shutdown: None,
            cycles: 0,
            before: CyclesBefore::Unknown,
            lost: 0,
        };
        let state = state(rss, 4, rss);
        recorder.see(&process(4), Seen::Process { state: Some(&state), now_ns: 0 }).unwrap();
        recorder.see(&process(4), Seen::Ended(&end)).unwrap();
    }
    let (bytes, _) = written(&recorder, Format::Firefox, "x.json");
    let file: Value = serde_json::from_slice(&bytes).unwrap();
    for list in ["threads", "counters"] {
        let pids: Vec<_> = file[list].as_array().unwrap().iter().map(|one| &one["pid"]).collect();
        assert_eq!(pids, ["4", "4.1"], "{list}");
    }
    assert_eq!(file["threads"][1]["tid"], "4.1");
}

/// The summary: time of its own goes to the innermost method, native code below included; recursion counts once; waiting
/// is not CPU time.
#[test]
fn hottest_methods() {
    let frame = |kind, name: &str| {
        let file = (kind == FrameKind::Ruby).then(|| Arc::from("/srv/app/models/order.rb"));
        Arc::new(Frame { kind, name: Arc::from(name), file, line: 5, first_line: 3, address: 0 })
    };
    let (fib, each) = (frame(FrameKind::Ruby, "Order.fib"), frame(FrameKind::CFunction, "Array#each"));
    let (native, gc) = (frame(FrameKind::Native, "memcpy"), frame(FrameKind::Vm, "(marking)"));
    let mut recorder = recorded(&[], Limits::default());
    for (stack, state, ms) in [
        (vec![fib.clone(), fib.clone(), each.clone()], ThreadState::Running, 60_u64),
        (vec![native.clone(), each.clone()], ThreadState::Running, 20),
        (vec![gc, fib.clone()], ThreadState::Running, 15),
        (vec![native], ThreadState::Running, 5),
        (vec![each], ThreadState::Blocked, 1_000),
    ] {
        let cpu_ns = if state == ThreadState::Running { ms * 1_000_000 } else { 0 };
        let sample = StackSample {
            ts_ns: ms,
            tid: 14,
            comm: Arc::from("worker"),
            state,
            cpu_ns,
            wall_ns: ms * 1_000_000,
            gc: GcActivity::None,
            stack: stack.into(),
        };
        recorder.see(&process(14), Seen::Stack(&sample)).unwrap();
    }
    let mut hottest = hottest::Hottest { recording: recorder.recording, out: Vec::new() };
    hottest.finish(&Ledger::default()).unwrap();
    let text = String::from_utf8(hottest.out).unwrap();
    let expected = "
Foo#bar (14), Ruby 3.0.0: 0.10 s of CPU time in 4 samples
  SELF  TOTAL  METHOD
 60.0%  75.0%  Order.fib  models/order.rb:3
 20.0%  80.0%  Array#each
 15.0%  15.0%  (garbage collection)
  5.0%   5.0%  (outside of Ruby methods)
";
    assert_eq!(text, expected);
}

/// A file is written only where a regular file is or can be, never over a device or a pipe.
#[test]
fn special_files_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for path in ["-", "/dev/stdout", "/dev/null", "/dev/new", "/proc/new", dir.path().to_str().unwrap()] {
        let files = [(PathBuf::from(path), Format::Pprof)];
        assert!(exporters(&files, None, (false, false), WallClock::measure()).is_err(), "{path}");
    }
    let files = [(dir.path().join("new"), Format::Pprof)];
    assert_eq!(exporters(&files, Some(Sink::Stdout), (false, false), WallClock::measure()).unwrap().len(), 3);
}

/// The recording begins when all that was asked for is being traced: what came before is counted and not in it, and of a time
/// off the CPU that spans its beginning the later part is.
#[test]
fn nothing_before_the_beginning() {
    let mut recorder = Recorder { recording: Rc::new(RefCell::new(Recording::new(true, Limits::default()))) };
    let input = |ts_ns, state, wall_ns| Input {
        pid: 2,
        tid: 2,
        ts_ns,
        state,
        cpu_ns: if state == ThreadState::Running { wall_ns } else { 0 },
        wall_ns,
        stack: vec![(1, 1)],
        times: 1,
        pauses: vec![(5, 5, 0)],
    };
    let running = ThreadState::Running;
    input(500, running, 100).record(&mut recorder);
    recorder.began(1_000);
    for early in [input(900, running, 100), input(700, ThreadState::Blocked, 200)] {
        early.record(&mut recorder);
    }
    let seen = [input(800, ThreadState::Blocked, 700), input(1_000, running, 100)];
    for seen in &seen {
        seen.record(&mut recorder);
    }
    recorder.closed(3_000);
    let recording = recorder.recording.borrow();
    assert_eq!(recording.span(9_999), (1_000, 3_000));
    // Three samples with a cycle each, and the cycle at 800.
    assert_eq!((recording.early_samples, recording.early_events), (3, 4));
    let sum = |of: fn(&crate::aggregate::recording::SampleSum) -> u64| {
        recording.samples.values().map(of).sum::<u64>()
    };
    assert_eq!((sum(|sum| sum.samples), sum(|sum| sum.cpu_ns), sum(|sum| sum.wall_ns)), (2, 100, 600));
    assert_eq!(recording.pauses.values().map(|sum| sum.ns).sum::<u64>(), 10);
    let timeline = recording.timeline.as_ref().unwrap();
    assert!(timeline.samples.iter().all(|sample| sample.ts_ns >= 1_000));
    assert_eq!(timeline.cycles.len(), 1);
    assert!(timeline.memory.iter().all(|memory| memory.ts_ns >= 1_000));
}

/// Blocks of one class are different functions of a pprof, and so are top levels of different files; methods are not.
#[test]
fn blocks_have_their_line() {
    let ruby = |name: &str, file: &str, line, first_line| {
        let (kind, name, file) = (FrameKind::Ruby, Arc::from(name), Some(Arc::from(file)));
        Arc::new(Frame { kind, name, file, line, first_line, address: 0 })
    };
    let mut recorder = recorded(&[], Limits::default());
    let stacks = [
        [ruby("block in <class:App>", "/srv/app.rb", 41, 40), ruby("<top (required)>", "/srv/app.rb", 3, 0)],
        [
            ruby("block in <class:App>", "/srv/app.rb", 51, 50),
            ruby("<top (required)>", "/srv/other.rb", 3, 0),
        ],
        [ruby("App#call", "/srv/app.rb", 61, 60), ruby("<main>", "/srv/main.rb", 3, 0)],
        [ruby("App#call", "/srv/patch.rb", 7, 6), ruby("<main>", "/srv/main.rb", 4, 0)],
    ];
    for stack in stacks {
        let sample = StackSample { stack: Arc::new(stack), ..a_sample(5).1 };
        recorder.see(&process(2), Seen::Stack(&sample)).unwrap();
    }
    let profile =
        pprof::proto::Profile::decode(&*gunzip(&written(&recorder, Format::Pprof, "x.pb.gz").0)).unwrap();
    let text = |at: i64| profile.string_table[at as usize].as_str();
    let mut names: Vec<&str> = profile.function.iter().map(|function| text(function.name)).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(
        names,
        [
            "<main>",
            "<top (required)> app.rb",
            "<top (required)> other.rb",
            "App#call",
            "block in <class:App> app.rb:40",
            "block in <class:App> app.rb:50"
        ]
    );
}

/// A Perfetto trace describes processes with their arguments and threads, the main one first, and a pause is on the thread that
/// stood, which need not be the one that started the cycle.
#[test]
fn perfetto_has_threads() {
    let mut recorder = recorded(&[], Limits::default());
    let mut process = process(2);
    process.cmdline = Some(vec!["ruby".to_owned(), "app.rb".to_owned()]);
    for (tid, name) in [(9, "b"), (2, "main"), (8, "a")] {
        let sample = StackSample { tid, comm: Arc::from(name), ..a_sample(5).1 };
        recorder.see(&process, Seen::Stack(&sample)).unwrap();
    }
    let pause =
        |tid, begin_ns| Pause { tid, begin_ns, ns: 10, kind: None, mark_ns: 10, sweep_ns: 0, other_ns: 0 };
    let cycle = GcCycle {
        comm: "b".to_owned(),
        count: 7,
        start: state(100, 9, 1),
        end: Some(state(300, 9, 1)),
        pauses: vec![pause(9, 100), pause(2, 200), pause(8, 250)],
        trigger: None,
        request: None,
        lost: 0,
    };
    recorder.see(&process, Seen::Cycle(&cycle)).unwrap();
    let (bytes, _) = written(&recorder, Format::Perfetto, "x");
    let (process, threads) = perfetto::tests::described(&bytes);
    assert_eq!(process, [(2, vec!["ruby".to_owned(), "app.rb".to_owned()])]);
    let thread = |tid, name: &str, begins: u64| (2, tid, name.to_owned(), vec![begins]);
    assert_eq!(threads, [thread(2, "main", 200), thread(8, "a", 250), thread(9, "b", 100)]);
}
