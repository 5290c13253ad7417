//! Planted changes are found, and nothing is found where none were planted. All data is synthetic, with a fixed seed.

use std::{collections::BTreeMap, sync::Arc};

use gctrace_common::{gvl::BUCKETS, stats::Counter};

use super::*;
use crate::{
    ledger::{Extent, Ledger},
    model::{
        Container, EndReason, GcCycle, GcState, Image, Origin, Pause, Process,
        gvl::{GvlBlocker, GvlDoing, GvlGap, GvlSpan, GvlSums, GvlThreadSummary, GvlTimes, GvlWait, GvlWho},
        gvl_so_far::GvlSoFar,
        request::{Request, RequestMemory},
        seen::{AllocStack, AllocSum, CyclesBefore, Observer as _, ProcessEnd, Seen},
        stack::{Frame, FrameKind, GcActivity, Stack, StackSample, ThreadState},
    },
    ruby::{
        RubyVersion,
        fallback::Method as Tracing,
        stat::{GcInfo, Mode},
    },
};

mod empty;
mod gvl_waits;
mod off_cpu;
mod quantiles;

const SECOND: u64 = 1_000_000_000;
const MS: u64 = 1_000_000;
const BEGAN: u64 = 100 * SECOND;

struct Random(u64);

impl Random {
    /// A number from 0 to 1.
    fn part(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mixed = (self.0 ^ (self.0 >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// A number around the mean, often smaller and sometimes much larger.
    fn around(&mut self, mean: f64) -> u64 {
        let spread = (self.part() + self.part() + self.part() - 1.5) * 0.8;
        (mean * spread.exp()) as u64
    }
}

fn frame(name: &str, line: u32) -> Arc<Frame> {
    let file = Some(Arc::from(format!("/srv/shop-{line}/order.rb")));
    Arc::new(Frame { kind: FrameKind::Ruby, name: Arc::from(name), file, line, first_line: line, address: 0 })
}

fn stack(name: &str, line: u32) -> Stack {
    Arc::from([frame(name, line), frame("Shop#call", line), frame("<main>", line)])
}

fn process(service: &str) -> Process {
    let image = Image {
        index: 1,
        path: "/usr/lib/libruby.so".into(),
        version: RubyVersion { major: 3, minor: 4, teeny: 1 },
        build_id: None,
        stat_keys: Vec::new(),
        heap_keys: Vec::new(),
        method: Tracing::Sites,
        probes: 1,
        gvl: None,
        has_symbols: false,
    };
    Process {
        pid: 7,
        ns_pid: None,
        ppid: None,
        comm: "ruby".to_owned(),
        cmdline: None,
        start_ts: None,
        uid: None,
        hostname: None,
        container: Container::default(),
        gc_env: Some(BTreeMap::new()),
        gc_env_refused: Vec::new(),
        origin: Arc::new(Origin { service: service.to_owned(), ..Origin::default() }),
        image: Arc::new(image),
    }
}

/// What a program does.
#[derive(Clone, Copy)]
struct Program {
    seconds: u64,
    rate: u64,
    /// Duration of `Order#total`, relative to its usual duration.
    total: f64,
    /// Bytes that `Order#tax` allocates, likewise.
    tax_bytes: f64,
    /// Time for which `Stock#update` holds the GVL, likewise.
    lock: f64,
    /// The GVL is watched during one of every `watched` seconds.
    watched: u64,
    /// Length of a pause, likewise.
    pause: f64,
    /// How often a sample is like the one before.
    sticky: f64,
    line: u32,
}

const AS_EVER: Program = Program {
    seconds: 60,
    rate: 499,
    total: 1.0,
    tax_bytes: 1.0,
    lock: 1.0,
    watched: 1,
    pause: 1.0,
    sticky: 0.5,
    line: 10,
};

fn all() -> Looked {
    Looked { samples: true, wall: false, gvl: true, requests: true, alloc: true }
}

fn state(ts_ns: u64) -> GcState {
    let info = GcInfo::decode(0x100, None, Mode::None, None);
    GcState { ts_ns, tid: 7, stat: vec![], heaps: vec![], info, memory: None }
}

fn who() -> GvlWho {
    GvlWho { tid: 7, comm: Arc::from("worker") }
}

/// Records a run of a program.
fn record(name: &'static str, program: Program, seed: u64) -> Side {
    let mut random = Random(seed);
    let mut side = Side::new(name, all(), Chosen::default());
    let ended = BEGAN + program.seconds * SECOND;
    let process = process("shop");
    side.see(&process, Seen::Process { state: None, now_ns: BEGAN - 5, since_ns: BEGAN - 5 });
    side.began(BEGAN);
    samples(&mut side, &process, program, &mut random);
    cycles(&mut side, &process, program, &mut random);
    gvl(&mut side, &process, program, &mut random);
    allocation(&mut side, &process, program, &mut random);
    requests(&mut side, &process, program, &mut random);
    let end = ProcessEnd {
        reason: EndReason::Detached,
        ts_ns: ended,
        since_ns: BEGAN - SECOND,
        outside_ns: 0,
        beyond_ns: 0,
        shutdown: None,
        cycles: 0,
        before: CyclesBefore::Unknown,
        lost: 0,
    };
    side.see(&process, Seen::Ended(&end));
    side.closed(ended);
    side.account(&Ledger { kernel: Some(vec![0; Counter::ALL.len()]), ..Ledger::default() });
    side
}

fn samples(side: &mut Side, process: &Process, program: Program, random: &mut Random) {
    let times = [
        ("Order#total", 0.25 * program.total),
        ("Order#tax", 0.2),
        ("Cart#render", 0.35),
        ("JSON.generate", 0.2),
    ];
    let stacks: Vec<Stack> = times.iter().map(|(name, _)| stack(name, program.line)).collect();
    let sum: f64 = times.iter().map(|(_, time)| time).sum();
    let mut at = 0;
    for tick in 0..program.seconds * program.rate {
        if random.part() >= program.sticky {
            let mut part = random.part() * sum;
            at = times
                .iter()
                .position(|(_, time)| {
                    part -= time;
                    part < 0.0
                })
                .unwrap_or(0);
        }
        let period = SECOND / program.rate;
        let sample = StackSample {
            span: None,
            ts_ns: BEGAN + tick * period,
            tid: 7,
            comm: Arc::from("worker"),
            state: ThreadState::Running,
            cpu_ns: period,
            wall_ns: period,
            gc: GcActivity::None,
            stack: stacks[at].clone(),
            request: None,
        };
        side.see(process, Seen::Stack(&sample));
    }
}

fn cycles(side: &mut Side, process: &Process, program: Program, random: &mut Random) {
    let mut ts_ns = BEGAN;
    loop {
        ts_ns += random.around(60e6);
        if ts_ns > BEGAN + program.seconds * SECOND {
            return;
        }
        let ns = random.around(3e6 * program.pause);
        let pause = Pause { tid: 7, begin_ns: ts_ns, ns, kind: None, mark_ns: ns, sweep_ns: 0, other_ns: 0 };
        let trigger = if random.part() < 0.5 { "Order#tax" } else { "Cart#render" };
        let cycle = GcCycle {
            span: None,
            comm: "worker".to_owned(),
            count: 1,
            start: state(ts_ns),
            end: None,
            pauses: vec![pause],
            trigger: Some(stack(trigger, program.line)),
            request: None,
            lost: 0,
        };
        side.see(process, Seen::Cycle(&cycle));
    }
}

fn gvl(side: &mut Side, process: &Process, program: Program, random: &mut Random) {
    let (mut wait_ns, mut counts) = (0, [0; BUCKETS]);
    for ms in (0..program.seconds * 1000).step_by(100) {
        if ms % 1000 == 0 && ms / 1000 % program.watched != 0 {
            let from_ns = BEGAN + ms * MS;
            side.now(from_ns + SECOND);
            side.gvl_gap(GvlGap { from_ns, to_ns: from_ns + SECOND, summed: false });
        }
        if ms / 1000 % program.watched != 0 {
            continue;
        }
        let begin_ns = BEGAN + ms * MS + random.around(30e6);
        for (holder, mean) in [("Stock#update", 20e6 * program.lock), ("Cart#render", 10e6)] {
            let ns = random.around(mean);
            let hold = GvlSpan { who: who(), id: 2, doing: GvlDoing::Holding, begin_ns, ns };
            let until = Some(stack(holder, program.line));
            let blocker = Some(GvlBlocker { hold, until, ran: Vec::new(), first: true });
            let wait = GvlWait {
                who: who(),
                id: 1,
                thread: None,
                request: None,
                begin_ns,
                ns,
                blocker,
                stack: None,
            };
            side.see(process, Seen::GvlWait(&wait));
            wait_ns += ns;
            counts[0] += 1;
        }
        if (ms + 100) % 1000 == 0 {
            side.now(BEGAN + (ms + 100) * MS);
            let so_far = GvlSoFar::of_counts(Box::new(counts), wait_ns, 0);
            side.see(process, Seen::GvlSoFar(&so_far));
        }
    }
    // Each report contained everything so far.
    let told = side.gvl.waited.total();
    assert!((told / wait_ns as f64 - 1.0).abs() < 1e-6, "{told} of {wait_ns}");
    let sums = GvlSums {
        wall_ns: 2 * program.seconds * SECOND,
        watched_ns: 2 * program.seconds * SECOND / program.watched,
        wait: GvlTimes { count: 1, ns: wait_ns, max_ns: 1 },
        ..GvlSums::default()
    };
    let thread = GvlThreadSummary {
        coverage: crate::model::gvl::GvlCoverage::default(),
        who: who(),
        id: 1,
        last: None,
        thread: None,
        begin_ns: BEGAN,
        end_ns: BEGAN + program.seconds * SECOND,
        ended: false,
        sums,
    };
    side.see(process, Seen::GvlThread(&thread));
}

fn allocation(side: &mut Side, process: &Process, program: Program, random: &mut Random) {
    for second in 0..program.seconds {
        let mut slots = 0;
        for at in 0..40 {
            let (name, mean) = match at % 4 {
                0 => ("Order#tax", 2000.0 * program.tax_bytes),
                1 => ("Order#total", 3000.0),
                _ => ("Cart#render", 2500.0),
            };
            let taken = random.around(mean);
            slots += taken;
            let alloc = AllocStack {
                span: None,
                ts_ns: BEGAN + second * SECOND + at * 25 * MS,
                tid: 7,
                comm: Arc::from("worker"),
                slot_size: 40,
                slots: taken,
                stack: stack(name, program.line),
                request: None,
            };
            side.see(process, Seen::AllocStack(&alloc));
        }
        let begin_ns = BEGAN + second * SECOND;
        let slots = BTreeMap::from([(40, slots)]);
        let sum = AllocSum { begin_ns, end_ns: begin_ns + SECOND, slots, refills: 40, lost: 0 };
        side.see(process, Seen::Alloc(&sum));
    }
}

fn requests(side: &mut Side, process: &Process, program: Program, random: &mut Random) {
    for at in 0..program.seconds * 20 {
        let begin_ns = BEGAN + at * 50 * MS;
        let (path, mean) = if at % 3 == 0 { ("/orders", 40e6 * program.total) } else { ("/", 10e6) };
        let ns = random.around(mean);
        let request = Request {
            id: at,
            tid: 7,
            begin_ns,
            end_ns: Some(begin_ns + ns),
            method: Some("GET"),
            path: Some(path.to_owned()),
            status: Some(200),
            queue_ns: None,
            first_byte_ns: None,
            last_byte_ns: None,
            response_bytes: None,
            gcs: Some(1),
            gc_ns: Some(random.around(1e6)),
            gc_pauses: None,
            gc_other: None,
            gvl_wait_ns: None,
            states: None,
            split: None,
            alloc: None,
            memory: RequestMemory::default(),
            job: None,
            is_run: false,
            handler: None,
            gc_states: None,
            trace: None,
        };
        side.see(process, Seen::Request(&request));
    }
}

fn compared(a: Program, b: Program, seed: u64) -> Comparison {
    Comparison::of(&mut record("A", a, seed), &mut record("B", b, seed + 1))
}

/// What has changed in a table, in the order of its rows.
fn changed(comparison: &Comparison, key: &str) -> Vec<(String, &'static str, Verdict)> {
    let real = comparison.figures().filter(|(table, _, figure)| table.key == key && figure.verdict.is_real());
    real.map(|(_, row, figure)| {
        let name = match &row.kind {
            Kind::Method(Method::Of { name, .. }) => name.to_string(),
            Kind::Endpoint(name) => name.clone(),
            _ => String::new(),
        };
        (name, figure.what, figure.verdict)
    })
    .collect()
}

fn every_change(comparison: &Comparison) -> Vec<String> {
    let real = comparison.figures().filter(|(_, _, figure)| figure.verdict.is_real());
    real.map(|(table, row, figure)| format!("{} {:?} {figure:?}", table.key, row.kind)).collect()
}

fn figure<'a>(comparison: &'a Comparison, metric: &str) -> &'a Figure {
    comparison.figures().find(|(_, _, figure)| figure.metric == metric).expect(metric).2
}

/// A method that takes 30 % longer is named first, although its lines have moved; methods whose share is smaller as a result have shrunk.
#[test]
fn slower_method() {
    let comparison = compared(AS_EVER, Program { total: 1.3, line: 99, ..AS_EVER }, 1);
    let found = changed(&comparison, "methods");
    assert_eq!(found[0], ("Order#total".to_owned(), "self", Verdict::Grew), "{found:?}");
    assert!(found.iter().all(|(name, _, verdict)| name == "Order#total" || *verdict == Verdict::Shrank));
    let row = &comparison.tables.iter().find(|table| table.key == "methods").unwrap().rows[0];
    let change = row.figures[0].change().unwrap();
    // 32.5 of 107.5 against 25 of 100.
    assert!((change - 0.0523).abs() < 2.0 * row.figures[0].margin.unwrap(), "{change}");
    let found = changed(&comparison, "endpoints");
    assert!(found.contains(&("GET /orders".to_owned(), "p50", Verdict::Grew)), "{found:?}");
    assert!(found.iter().all(|(name, ..)| name == "GET /orders"), "{found:?}");
    assert!(changed(&comparison, "gc").is_empty() && changed(&comparison, "allocating").is_empty());
}

/// A method on fewer than 20 stacks of both recordings together is not tested.
#[test]
fn rare_method() {
    for (times, tested) in [(19, false), (20, true)] {
        let mut b = record("B", AS_EVER, 2);
        for at in 0..times {
            let sample = StackSample {
                span: None,
                ts_ns: BEGAN + SECOND + at * 100 * MS,
                tid: 7,
                comm: Arc::from("worker"),
                state: ThreadState::Running,
                cpu_ns: SECOND,
                wall_ns: SECOND,
                gc: GcActivity::None,
                stack: stack("Rare#work", 1),
                request: None,
            };
            b.see(&process("shop"), Seen::Stack(&sample));
        }
        let comparison = Comparison::of(&mut record("A", AS_EVER, 1), &mut b);
        let is_rare =
            |row: &Row| matches!(&row.kind, Kind::Method(Method::Of { name, .. }) if **name == *"Rare#work");
        let methods = comparison.tables.iter().find(|table| table.key == "methods").unwrap();
        let row = methods.rows.iter().find(|row| is_rare(row)).unwrap();
        assert_eq!(!matches!(row.figures[0].verdict, Verdict::Untested(_)), tested, "{times}: {row:?}");
    }
}

/// A method that allocates more is named.
#[test]
fn extra_allocation() {
    let comparison = compared(AS_EVER, Program { tax_bytes: 2.0, ..AS_EVER }, 5);
    let found = changed(&comparison, "allocating");
    assert_eq!(found[0], ("Order#tax".to_owned(), "self", Verdict::Grew), "{found:?}");
    assert_eq!(figure(&comparison, "alloc.objects.rate").verdict, Verdict::Grew);
    assert!(changed(&comparison, "methods").is_empty());
}

/// Longer pauses show as longer pauses and more time in GC, not as more cycles.
#[test]
fn longer_pauses() {
    let comparison = compared(AS_EVER, Program { pause: 1.5, ..AS_EVER }, 13);
    for metric in ["gc.share", "gc.pause.p50", "gc.pause.p99"] {
        let figure = figure(&comparison, metric);
        assert_eq!(figure.verdict, Verdict::Grew, "{figure:?}");
        assert!((figure.relative().unwrap() - 0.5).abs() < 0.15, "{figure:?}");
    }
    assert_eq!(figure(&comparison, "gc.minor.rate").verdict, Verdict::Noise);
    for (condition, expected) in [
        ("gc.share > +20%", Outcome::Failed),
        ("gc.share > +80%", Outcome::Held),
        ("gc.share > +1pp", Outcome::Failed),
        ("gc.share < -20%", Outcome::Held),
        ("gc.pause.p50 > 3ms", Outcome::Failed),
        ("gc.pause.p50 > 9ms", Outcome::Held),
        ("gc.minor.rate > +0%", Outcome::Held),
        ("gc.major.rate > 5", Outcome::Held),
    ] {
        let judged = condition.parse::<Condition>().unwrap().judge(&comparison);
        assert_eq!(judged.outcome, expected, "{judged:?}");
        assert!(!judged.within_noise || condition == "gc.minor.rate > +0%", "{judged:?}");
    }
}

/// Swapped recordings give the opposite answer.
#[test]
fn swapped() {
    let slow = Program { total: 1.3, pause: 1.5, ..AS_EVER };
    let (mut a, mut b) = (record("A", AS_EVER, 1), record("B", slow, 2));
    let there = Comparison::of(&mut a, &mut b);
    let back = Comparison::of(&mut b, &mut a);
    for (_, _, one) in there.figures().filter(|(.., figure)| !figure.metric.is_empty()) {
        let other = figure(&back, one.metric);
        assert_eq!(
            (one.p, one.verdict == Verdict::Grew),
            (other.p, other.verdict == Verdict::Shrank),
            "{one:?}"
        );
    }
}

/// False alarms are no more frequent than declared: with samples that are correlated for a while and pauses of all
/// lengths, over 100 pairs of runs of 20 s.
#[test]
fn false_alarms() {
    let mut alarms = Vec::new();
    for pair in 0..100 {
        let sticky = f64::from(pair % 10) / 10.0;
        let program = Program { seconds: 20, rate: 99, sticky, ..AS_EVER };
        let found = every_change(&compared(program, program, 1000 + u64::from(pair as u32) * 2));
        alarms.extend((!found.is_empty()).then_some(found));
    }
    // 5 % of 100 are 5.
    assert!(alarms.len() <= 5, "{} of 100: {alarms:#?}", alarms.len());
}

/// A recording does not differ from itself.
#[test]
fn itself() {
    let comparison = compared(AS_EVER, AS_EVER, 3);
    let (mut a, mut b) = (record("A", AS_EVER, 3), record("B", AS_EVER, 3));
    let same = Comparison::of(&mut a, &mut b);
    assert!(every_change(&same).is_empty());
    assert!(same.figures().all(|(.., figure)| figure.change().is_none_or(|change| change == 0.0)));
    assert!(comparison.tables.iter().filter(|table| table.absent.is_empty()).count() >= 9);
}

/// What either recording lacks, or has lost, is named in place of figures.
#[test]
fn absent() {
    let looked = Looked { samples: true, ..Looked::default() };
    let mut a = record("A", AS_EVER, 1);
    let mut b = record("B", AS_EVER, 2);
    b.looked = looked;
    let mut kernel = vec![0; Counter::ALL.len()];
    kernel[Counter::SnapshotRingFull as usize] = 3;
    kernel[Counter::StackRingFull as usize] = 10;
    b.account(&Ledger { kernel: Some(kernel.clone()), ..Ledger::default() });
    let comparison = Comparison::of(&mut a, &mut b);
    let absent = |comparison: &Comparison, key: &str| {
        comparison.tables.iter().find(|table| table.key == key).unwrap().absent.join("; ")
    };
    assert_eq!(absent(&comparison, "gc"), "B lost 3 GC events");
    assert_eq!(absent(&comparison, "gvl"), "B was recorded without --gvl");
    assert_eq!(absent(&comparison, "alloc"), "B was recorded without --alloc");
    assert_eq!(absent(&comparison, "requests"), "B was recorded without --requests");
    assert_eq!(
        absent(&comparison, "off_cpu"),
        "A was recorded without --wall; B was recorded without --wall"
    );
    // 10 of 30 000 stacks do not show in tenths of a percent; 100 do.
    assert_eq!(absent(&comparison, "methods"), "");
    kernel[Counter::StackRingFull as usize] = 100;
    b.account(&Ledger { kernel: Some(kernel), ..Ledger::default() });
    let comparison = Comparison::of(&mut a, &mut b);
    assert_eq!(absent(&comparison, "methods"), "B lost 100 stacks of 30040");
    let judged = "gc.share > +20%".parse::<Condition>().unwrap().judge(&comparison);
    assert_eq!((judged.outcome, judged.why.as_str()), (Outcome::Unknown, "B lost 3 GC events"));
    let mut a = record("A", AS_EVER, 1);
    a.gvl_gap(GvlGap { from_ns: BEGAN, to_ns: BEGAN + 2 * SECOND, summed: true });
    let comparison = Comparison::of(&mut a, &mut record("B", AS_EVER, 2));
    assert_eq!(absent(&comparison, "holders"), "A did not report individual waits for 2.0 s (CPU budget)");
    assert_eq!(absent(&comparison, "gvl"), "");
    for (extent, why) in [
        (Extent::CutOff, "B was cut off: it lacks the sums of threads that were still running"),
        (Extent::Part, "B is a part of a run: it lacks the sums of threads that continued to run"),
    ] {
        let (mut a, mut b) = (record("A", AS_EVER, 1), record("B", AS_EVER, 2));
        b.account(&Ledger { extent, ..b.ledger.clone() });
        let comparison = Comparison::of(&mut a, &mut b);
        let table = comparison.tables.iter().find(|table| table.key == "gvl").unwrap();
        let metrics: Vec<&str> =
            table.rows.iter().flat_map(|row| &row.figures).map(|figure| figure.metric).collect();
        assert_eq!(metrics, ["gvl.wait.rate"]);
        assert_eq!(table.lacks, [format!("share of threads' time: {why}")]);
        let judged = "gvl.wait.share > +20%".parse::<Condition>().unwrap().judge(&comparison);
        assert_eq!(
            (judged.outcome, judged.why),
            (Outcome::Unknown, format!("share of threads' time: {why}"))
        );
        // The GVL was not watched for a while: the sums of threads that have ended do not tell the rate of all.
        b.gvl_gap(GvlGap { from_ns: BEGAN, to_ns: BEGAN + SECOND, summed: false });
        assert_eq!(absent(&Comparison::of(&mut a, &mut b), "gvl"), why);
    }
    b.account(&Ledger::default());
    let comparison = Comparison::of(&mut a, &mut b);
    assert_eq!(absent(&comparison, "gc"), "B has no account of losses: it was cut off too early");
}

/// A recording that is too short has figures but no verdicts.
#[test]
fn short() {
    let short = Program { seconds: 1, ..AS_EVER };
    let comparison = compared(short, AS_EVER, 1);
    assert_eq!(comparison.blocks[0], None);
    assert!(comparison.figures().all(|(.., figure)| matches!(figure.verdict, Verdict::Untested(_))));
    assert!(figure(&comparison, "gc.share").change().is_some());
    let judged = "gc.share > +20%".parse::<Condition>().unwrap().judge(&comparison);
    assert_eq!((judged.outcome, judged.why.as_str()), (Outcome::Unknown, "not tested: too short"));
}

/// Programs are matched by name; if one is chosen, only it counts.
#[test]
fn programs() {
    let mut side = Side::new("A", all(), Chosen { pid: None, program: Some("shop".to_owned()) });
    side.began(BEGAN);
    for service in ["shop", "worker"] {
        side.see(&process(service), Seen::Process { state: None, now_ns: BEGAN, since_ns: BEGAN });
    }
    assert_eq!(side.programs().keys().collect::<Vec<_>>(), ["shop"]);
    let mut other = Side::new("B", all(), Chosen { pid: Some(8), program: None });
    other.began(BEGAN);
    other.see(&process("shop"), Seen::Process { state: None, now_ns: BEGAN, since_ns: BEGAN });
    let comparison = Comparison::of(&mut side, &mut other);
    assert_eq!(comparison.nothing, ["B has no such process"]);
    assert_eq!(comparison.only[0], ["shop"]);
    let never = Comparison::of(&mut side, &mut Side::new("B", all(), Chosen::default()));
    assert_eq!(never.nothing, ["B ends before tracing had fully started"]);
}
