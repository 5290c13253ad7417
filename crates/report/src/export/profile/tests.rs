//! The sums of every format equal what was recorded, whatever the names and stacks are.

use std::{collections, io::Read as _, sync::Arc};

use proptest::prelude::*;
use serde_json::Value;

use super::*;
use crate::export::sink::Sink;
use crate::{
    model::{
        GcCycle, GcState, Image, Memory, Pause,
        stack::{Frame, FrameKind, GcActivity, StackSample, ThreadState},
    },
    ruby::{RubyVersion, fallback::Method, stat::GcInfo},
};

mod alloc;
mod callgrind;
mod endpoints;
mod filters;
mod firefox;
mod gvl;
mod hottest;
mod malloc;
mod paths;
mod perfetto;
mod pprof;
mod pyroscope;
mod requests;
mod speedscope;

use self::{
    callgrind::check_callgrind,
    firefox::check_firefox,
    paths::{check_flamegraph, check_folded},
    pprof::check_pprof,
    speedscope::check_speedscope,
};

/// Names that formats might mishandle.
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
        gc_env: Some(BTreeMap::new()),
        gc_env_refused: Vec::new(),
        origin: Arc::default(),
        image: Arc::new(image),
    }
}

/// A sample at `ts_ns`, and its process.
pub(in crate::export) fn a_sample(ts_ns: u64) -> (Process, StackSample) {
    let sample = StackSample {
        span: None,
        ts_ns,
        tid: 1,
        comm: Arc::from("ruby"),
        state: ThreadState::Running,
        cpu_ns: 1,
        wall_ns: 1,
        gc: GcActivity::None,
        request: None,
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

/// The input of a test.
#[derive(Clone, Debug)]
struct Input {
    pid: u32,
    tid: u32,
    ts_ns: u64,
    state: ThreadState,
    cpu_ns: u64,
    wall_ns: u64,
    stack: Vec<(usize, u32)>,
    /// Recursion: the number of times the stack is repeated.
    times: usize,
    /// Pauses of a cycle that starts here.
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
            span: None,
            ts_ns: self.ts_ns,
            tid: self.tid,
            comm: Arc::from(NAMES[self.tid as usize % NAMES.len()]),
            state: self.state,
            cpu_ns: self.cpu_ns,
            wall_ns: self.wall_ns,
            gc: if self.tid.is_multiple_of(3) { GcActivity::Marking } else { GcActivity::None },
            request: None,
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
            span: None,
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
    let mut recorder =
        Recorder { recording: Rc::new(RefCell::new(Recording::new(true, limits, Filter::default()))) };
    recorder.began(0);
    for pid in inputs.iter().map(|input| input.pid).collect::<collections::BTreeSet<_>>() {
        recorder.see(&process(pid), Seen::Process { state: None, now_ns: 0, since_ns: 0 }).unwrap();
    }
    for input in inputs {
        input.record(&mut recorder);
    }
    recorder
}

fn written(recorder: &Recorder, format: Format, name: &str) -> (Vec<u8>, u64) {
    let (ledger, clock) = (Ledger::default(), WallClock::measure());
    let filtered = recorder.recording.borrow().filtered().text(recorder.recording.borrow().filter());
    let context = Context {
        ledger: &ledger,
        clock,
        began_ns: 1_000,
        ended_ns: 2_000_001_000,
        gvl: true,
        wall: true,
        filtered,
        said: None,
    };
    let mut bytes = Vec::new();
    let left = write(
        format,
        name.rsplit('.').next() == Some("gz"),
        &recorder.recording.borrow(),
        &context,
        &mut bytes,
    )
    .unwrap();
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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Every format contains the whole input, also with small limits.
    #[test]
    fn sums_stay(inputs in inputs(), few in any::<bool>()) {
        let limits = if few {
            Limits { nodes: 9, sums: 3, threads: 2, ..Limits::default() }
        } else {
            Limits::default()
        };
        let recorder = recorded(&inputs, limits);
        check_pprof(&recorder, &inputs);
        check_callgrind(&recorder, &inputs);
        check_folded(&recorder, &inputs);
        check_flamegraph(&recorder, &inputs);
        check_speedscope(&recorder, &inputs);
        check_firefox(&recorder, &inputs);
        let merged = recorder.recording.borrow().merged;
        prop_assert!(few || merged == 0, "{} merged", merged);
    }
}

/// Timelines end at the limit and report how much they leave out; sums contain everything.
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

    // 12 events fit: 3 cycles with a pause and 2 points of memory each. 17 cycles do not.
    let (bytes, left) = written(&recorder, Format::Firefox, "x.json");
    let file: Value = serde_json::from_slice(&bytes).unwrap();
    assert_eq!(left, 8 + 17 * 4);
    assert_eq!(file["threads"][0]["samples"]["weight"].as_array().unwrap().len(), 13);
    assert_eq!(file["threads"][0]["markers"]["length"].as_u64(), Some(6));
    assert!(file["meta"]["extra"].to_string().contains("68"), "{}", file["meta"]["extra"]);
    check_pprof(&recorder, &inputs);
    check_folded(&recorder, &inputs);
}

/// A file is written only at a path where a regular file exists or can be created, never over a device or a pipe.
#[test]
fn special_files_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for path in ["-", "/dev/stdout", "/dev/null", "/dev/new", "/proc/new", dir.path().to_str().unwrap()] {
        let files = [(PathBuf::from(path), Format::Pprof)];
        assert!(
            exporters(&files, &Filter::default(), None, (false, false), WallClock::measure()).is_err(),
            "{path}"
        );
    }
    let files = [(dir.path().join("new"), Format::Pprof)];
    assert_eq!(
        exporters(&files, &Filter::default(), Some(Sink::Stdout), (false, false), WallClock::measure())
            .unwrap()
            .len(),
        3
    );
}

/// The recording starts when everything that was requested is being traced. What came before is counted but not
/// included; of an off-CPU time that spans the start, only the later part is included.
#[test]
fn nothing_before_the_beginning() {
    let mut recorder = Recorder {
        recording: Rc::new(RefCell::new(Recording::new(true, Limits::default(), Filter::default()))),
    };
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
