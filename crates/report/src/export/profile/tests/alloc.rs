//! Allocation under stacks.

use prost::Message as _;

use super::*;
use crate::{
    aggregate::recording::ProcessFacts,
    export::{
        otlp,
        profile::{
            Graph, Measure,
            perfetto::tests::{allocation, counters},
            pprof::proto,
        },
        pyroscope,
        windows::Window,
    },
    model::{
        Origin,
        seen::{AllocStack, AllocSum},
    },
};

/// Objects and bytes by the name of the allocating method.
type ByMethod = BTreeMap<String, (u64, u64)>;

fn seen(recorder: &mut Recorder, ts_ns: u64, slot_size: u32, slots: u64, stack: &[usize]) {
    let stack = stack.iter().map(|&at| frame(at, 1)).collect();
    let alloc = AllocStack {
        span: None,
        ts_ns,
        tid: 9,
        comm: Arc::from("worker"),
        slot_size,
        slots,
        request: None,
        stack,
    };
    recorder.see(&process(2), Seen::AllocStack(&alloc)).unwrap();
}

/// All slots and all bytes are in each format, including those without a stack; what came before the recording began is in none.
#[test]
fn sums() {
    let mut recorder = recorded(&[], Limits::default());
    recorder.began(1_000);
    seen(&mut recorder, 999, 40, 7, &[0]);
    seen(&mut recorder, 1_000, 40, 10, &[0, 1]);
    seen(&mut recorder, 2_000, 40, 5, &[0, 1]);
    seen(&mut recorder, 3_000, 640, 1, &[0, 1]);
    seen(&mut recorder, 4_000, 80, 2, &[]);
    let graph = Graph { of: Measure::Alloc, ..Graph::default() };
    let (bytes, _) = written(&recorder, Format::Folded(graph), "x");
    let text = String::from_utf8(bytes).unwrap();
    let mut weights: Vec<&str> = text.lines().map(|line| line.rsplit_once(' ').unwrap().1).collect();
    weights.sort_unstable();
    assert_eq!(weights, ["1240", "160"], "{text}");
    assert!(text.contains(";(no stack) 160\n"), "{text}");
    let (bytes, _) = written(&recorder, Format::FlameGraph(graph), "x");
    let svg = String::from_utf8(bytes).unwrap();
    assert!(svg.contains("18 slots in 1 KiB, measured") && svg.contains("by 4 stacks"), "{svg}");

    let (bytes, _) = written(&recorder, Format::Pprof, "x");
    let profile = proto::Profile::decode(&*gunzip(&bytes)).unwrap();
    let text = |at: i64| profile.string_table[at as usize].as_str();
    let types: Vec<&str> = profile.sample_type.iter().map(|of| text(of.r#type)).collect();
    let total = |name: &str| -> i64 {
        let at = types.iter().position(|of| *of == name).unwrap();
        profile.sample.iter().map(|sample| sample.value[at]).sum()
    };
    assert_eq!((total("alloc_objects"), total("alloc_space"), total("cpu")), (18, 1400, 0));
    assert_eq!(profile.sample.len(), 3, "by slot size and stack");
}

/// Like [`seen`], in the given thread.
fn seen_of(recorder: &mut Recorder, tid: u32, ts_ns: u64, (slot_size, slots): (u32, u64), stack: &[usize]) {
    let stack = stack.iter().map(|&at| frame(at, 1)).collect();
    let comm = Arc::from(format!("thread {tid}"));
    let alloc = AllocStack { span: None, ts_ns, tid, comm, slot_size, slots, request: None, stack };
    recorder.see(&process(2), Seen::AllocStack(&alloc)).unwrap();
}

/// Several threads, sizes and stacks, not in chronological order.
fn several() -> Recorder {
    let mut recorder = recorded(&[], Limits::default());
    recorder.began(1_000);
    for (at, (tid, stack)) in
        [(2, &[0_usize, 6][..]), (9, &[0, 6]), (9, &[1]), (0, &[]), (9, &[0, 6]), (2, &[13, 0, 6])]
            .into_iter()
            .enumerate()
    {
        let ts_ns = 9_000 - 1_000 * at as u64;
        seen_of(&mut recorder, tid, ts_ns, ([40, 80, 640][at % 3], 100 + at as u64), stack);
    }
    recorder
}

fn of_pprof(bytes: &[u8]) -> (ByMethod, proto::Profile) {
    let profile = proto::Profile::decode(&*gunzip(bytes)).unwrap();
    let text = |at: i64| profile.string_table[at as usize].as_str();
    let types: Vec<&str> = profile.sample_type.iter().map(|of| text(of.r#type)).collect();
    let at = |name: &str| types.iter().position(|of| *of == name).unwrap();
    let (objects, bytes) = (at("alloc_objects"), at("alloc_space"));
    let mut sums = ByMethod::new();
    for sample in profile.sample.iter().filter(|sample| sample.value[objects] > 0) {
        let location = &profile.location[sample.location_id[0] as usize - 1];
        let function = &profile.function[location.line[0].function_id as usize - 1];
        let sum = sums.entry(text(function.name).to_owned()).or_default();
        sum.0 += sample.value[objects] as u64;
        sum.1 += sample.value[bytes] as u64;
    }
    (sums, profile)
}

/// Every format has the same objects and bytes for each method as the pprof file.
#[test]
fn formats_agree() {
    let recorder = several();
    let (expected, _) = of_pprof(&written(&recorder, Format::Pprof, "x").0);
    assert_eq!(expected.len(), 4, "{expected:?}");
    assert_eq!(expected.values().map(|sum| sum.0).sum::<u64>(), 615);

    // speedscope: a profile of bytes and one of objects, for all threads.
    let (bytes, left) = written(&recorder, Format::Speedscope, "x.json");
    let file: Value = serde_json::from_slice(&bytes).unwrap();
    assert_eq!(left, 0);
    let mut sums = ByMethod::new();
    for profile in file["profiles"].as_array().unwrap() {
        let (unit, weights) = (profile["unit"].as_str().unwrap(), profile["weights"].as_array().unwrap());
        for (stack, weight) in profile["samples"].as_array().unwrap().iter().zip(weights) {
            let stack = stack.as_array().unwrap();
            let name = |at: &Value| {
                let frame = &file["shared"]["frames"][at.as_u64().unwrap() as usize];
                frame["name"].as_str().unwrap().to_owned()
            };
            assert!(name(&stack[0]).contains("thread "), "the thread is at the root");
            let leaf = name(stack.last().unwrap());
            let sum = sums.entry(leaf.trim_end_matches("_[k]").to_owned()).or_default();
            match unit {
                "bytes" => sum.1 += weight.as_u64().unwrap(),
                "none" => sum.0 += weight.as_u64().unwrap(),
                unit => panic!("{unit}"),
            }
        }
    }
    assert_eq!(sums, expected.clone().into_iter().map(named).collect(), "speedscope");

    // Firefox: bytes only.
    let (bytes, _) = written(&recorder, Format::Firefox, "x.json");
    let file: Value = serde_json::from_slice(&bytes).unwrap();
    let mut sums: BTreeMap<String, u64> = BTreeMap::new();
    for thread in file["threads"].as_array().unwrap() {
        let Some(table) = thread["nativeAllocations"].as_object() else { continue };
        assert_eq!((&table["weightType"], table.len()), (&Value::from("bytes"), 5));
        let column = |name: &str| table[name].as_array().unwrap();
        let times: Vec<f64> = column("time").iter().map(|time| time.as_f64().unwrap()).collect();
        assert!(times.is_sorted() && Some(times.len() as u64) == table["length"].as_u64());
        for (stack, weight) in column("stack").iter().zip(column("weight")) {
            let at = |table: &str, column: &str, at: &Value| {
                thread[table][column][at.as_u64().unwrap() as usize].clone()
            };
            let name = at("funcTable", "name", &at("frameTable", "func", &at("stackTable", "frame", stack)));
            let name = thread["stringArray"][name.as_u64().unwrap() as usize].as_str().unwrap().to_owned();
            *sums.entry(name).or_default() += weight.as_u64().unwrap();
        }
    }
    let bytes_of = |sums: &ByMethod| -> BTreeMap<String, u64> {
        sums.clone().into_iter().map(named).map(|(name, sum)| (name, sum.1)).collect()
    };
    assert_eq!(sums, bytes_of(&expected), "Firefox");

    // Perfetto: instants with annotations.
    let mut sums = ByMethod::new();
    let (bytes, _) = written(&recorder, Format::Perfetto, "x");
    for (stack, objects, bytes) in allocation(&bytes) {
        let leaf = stack.lines().next().unwrap_or_default();
        let leaf =
            leaf.split(" /srv").next().unwrap().split(" (eval").next().unwrap().trim_end_matches(" :1");
        let sum = sums.entry(leaf.to_owned()).or_default();
        *sum = (sum.0 + objects, sum.1 + bytes);
    }
    assert_eq!(sums, expected.into_iter().map(named).collect(), "Perfetto");
}

/// The name of a function in a pprof file contains its line if the name is ambiguous.
fn named((name, sum): (String, (u64, u64))) -> (String, (u64, u64)) {
    (name.split(" foo.rb").next().unwrap().to_owned(), sum)
}

/// What exceeds the limit of a timeline is counted, and is in the sums.
#[test]
fn bounded() {
    let mut recorder = recorded(&[], Limits { timeline: 2, ..Limits::default() });
    for at in 0..5 {
        seen(&mut recorder, 2_000 + at, 40, 1, &[0]);
    }
    for format in [Format::Speedscope, Format::Firefox, Format::Perfetto] {
        assert_eq!(written(&recorder, format, "x").1, 3, "{format:?}");
    }
    let (sums, _) = of_pprof(&written(&recorder, Format::Pprof, "x").0);
    assert_eq!(sums.values().map(|sum| sum.0).sum::<u64>(), 5);
}

/// Pyroscope receives a series of its own, like Go's heap profiles, and none of CPU time if there are no samples.
#[test]
fn pushed_to_pyroscope() {
    let recorder = several();
    let (expected, _) = of_pprof(&written(&recorder, Format::Pprof, "x").0);
    let recording = Rc::try_unwrap(recorder.recording).unwrap().into_inner();
    let processes: Vec<ProcessIndex> = (0..recording.processes.len()).collect();
    let (clock, account) = (WallClock::measure(), String::new());
    let window = Window {
        recording: Arc::new(recording),
        clock,
        began_ns: 1_000,
        ended_ns: 9_000,
        account,
        wall: false,
    };
    let sent = pyroscope::make(Arc::new(window), processes).encode();
    let series = pyroscope::tests::series(&sent);
    let names: Vec<&str> = series.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["memory"]);
    let (sums, profile) = of_pprof(&series[0].1);
    assert_eq!(sums, expected);
    let text = |at: i64| profile.string_table[at as usize].as_str();
    let of = |of: &proto::ValueType| (text(of.r#type).to_owned(), text(of.unit).to_owned());
    let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
    let types: Vec<_> = profile.sample_type.iter().map(of).collect();
    assert_eq!(types, [pair("alloc_objects", "count"), pair("alloc_space", "bytes")]);
    assert_eq!(profile.period_type.as_ref().map(of), Some(pair("space", "bytes")));
}

/// The labels of a series say where its service runs, under the names that Grafana Alloy uses: taken from any process
/// that knows it, as text without control characters, of bounded length; what is unknown has no label.
#[test]
fn labels_of_pyroscope() {
    let labels = |change: &dyn Fn(&mut Vec<ProcessFacts>)| {
        let mut recording = Rc::try_unwrap(several().recording).unwrap().into_inner();
        change(&mut recording.processes);
        let processes: Vec<ProcessIndex> = (0..recording.processes.len()).collect();
        let (clock, account) = (WallClock::measure(), String::new());
        let window = Window {
            recording: Arc::new(recording),
            clock,
            began_ns: 1_000,
            ended_ns: 9_000,
            account,
            wall: false,
        };
        let mut all = pyroscope::tests::labels(&pyroscope::make(Arc::new(window), processes).encode());
        assert_eq!(all.len(), 1);
        all.remove(0)
    };
    let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    let service = pair("service_name", "unknown_service");
    assert_eq!(labels(&|_| ()), std::slice::from_ref(&service));
    let id = "3f4b8d3e5c6a7f8091a2b3c4d5e6f708192a3b4c5d6e7f8091a2b3c4d5e6f708";
    let in_container = |facts: &mut Vec<ProcessFacts>| {
        for process in facts {
            process.origin = Origin { container: Some(id.to_owned()), ..Origin::default() }.into();
        }
    };
    assert_eq!(labels(&in_container), [service.clone(), pair("container", id), pair("container_id", id)]);
    let in_pod = |facts: &mut Vec<ProcessFacts>| {
        in_container(facts);
        let last = facts.last_mut().unwrap();
        last.container.name = Some("puma\u{1b}[2J".to_owned());
        last.container.pod = Some("s".repeat(5000));
        last.container.namespace = Some("shop".to_owned());
        last.hostname = Some("web-1".to_owned());
    };
    let in_unit = |facts: &mut Vec<ProcessFacts>| {
        for process in facts {
            process.container.unit = Some("puma.service".to_owned());
        }
    };
    assert_eq!(labels(&in_unit), [service.clone(), pair("unit", "puma.service")]);
    // A worker of another unit, or one whose unit is unknown.
    for other in [Some("puma@2.service".to_owned()), None] {
        let in_two = |facts: &mut Vec<ProcessFacts>| {
            facts.push(facts[0].clone());
            in_unit(facts);
            facts[1].container.unit.clone_from(&other);
        };
        assert_eq!(labels(&in_two), std::slice::from_ref(&service));
    }
    assert_eq!(
        labels(&in_pod),
        [
            service,
            pair("container", r"puma\u{1b}[2J"),
            pair("container_id", id),
            pair("pod", &"s".repeat(200)),
            pair("namespace", "shop"),
            pair("hostname", "web-1"),
        ]
    );
}

/// OTLP has a profile of objects and one of bytes, with the slot size of each sample.
#[test]
fn pushed_by_otlp() {
    let recorder = several();
    let (expected, _) = of_pprof(&written(&recorder, Format::Pprof, "x").0);
    let recording = Rc::try_unwrap(recorder.recording).unwrap().into_inner();
    let processes: Vec<ProcessIndex> = (0..recording.processes.len()).collect();
    let (clock, account) = (WallClock::measure(), String::new());
    let window = Window {
        recording: Arc::new(recording),
        clock,
        began_ns: 1_000,
        ended_ns: 9_000,
        account,
        wall: false,
    };
    let sent = otlp::profiles(Arc::new(window), processes).encode();
    let [objects, bytes] = &*otlp::sent_profiles(&sent) else { panic!("not two profiles") };
    assert_eq!((objects.kind.as_str(), bytes.kind.as_str()), ("alloc_objects/count", "alloc_space/bytes"));
    let mut sums = ByMethod::new();
    for (one, other) in objects.samples.iter().zip(&bytes.samples) {
        let (name, keys, slots) = one;
        assert_eq!(keys, &["thread.id", "thread.name", "cruby.slot.size"]);
        assert_eq!((name, keys), (&other.0, &other.1));
        let sum = sums.entry(name.clone()).or_default();
        *sum = (sum.0 + *slots as u64, sum.1 + other.2 as u64);
    }
    assert_eq!(sums, expected.into_iter().map(named).collect());
}

/// The totals of intervals grow from 0 in Perfetto, and are one marker each in Firefox. An interval that spans the
/// start is shown from there on, as the stacks have all of it; one before the start is not shown.
#[test]
fn intervals() {
    let mut recorder = recorded(&[], Limits::default());
    recorder.began(1_000);
    for (begin_ns, slots) in [(300, 7000), (600, 1), (1_100, 20), (2_000, 300)] {
        let slots = BTreeMap::from([(40, slots), (80, slots)]);
        let sum = AllocSum { begin_ns, end_ns: begin_ns + 500, slots, refills: 1, lost: 0 };
        recorder.see(&process(2), Seen::Alloc(&sum)).unwrap();
    }
    let (bytes, _) = written(&recorder, Format::Perfetto, "x");
    let counters = counters(&bytes);
    let of = |name: &str| counters[&(2, name.to_owned())].clone();
    assert_eq!(of("allocated objects"), [(1_000, 0), (1_100, 2), (1_600, 42), (2_500, 642)]);
    assert_eq!(of("allocated bytes of slots"), [(1_000, 0), (1_100, 120), (1_600, 2_520), (2_500, 38_520)]);
    let (bytes, _) = written(&recorder, Format::Firefox, "x.json");
    let file: Value = serde_json::from_slice(&bytes).unwrap();
    let data = file["threads"][0]["markers"]["data"].as_array().unwrap();
    let objects: Vec<&Value> = data.iter().map(|data| &data["objects"]).collect();
    assert_eq!(objects, [2, 40, 600]);
    assert_eq!(recorder.recording.borrow().early_events, 1);
}
