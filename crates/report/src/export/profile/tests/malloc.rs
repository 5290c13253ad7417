//! Memory of malloc: all formats have the same estimates.

use prost::Message as _;

use super::*;
use crate::{
    aggregate::recording::MallocCall,
    export::profile::{MallocProfile, pprof},
    model::stack::Stack,
};

/// One stack whose calls are always taken, and one whose calls represent ten each. One block of each is left, and one whose stack was lost.
fn profile() -> MallocProfile {
    let process = process(7);
    let mut profile = MallocProfile::new(WallClock::measure(), 100, 1_000);
    profile.add(&process, 100);
    let mut asked = |name: usize, bytes: u64, probability: f64| {
        let (stack, comm): (Stack, Arc<str>) = ([frame(name, 3), frame(0, 9)].into(), "main".into());
        let call = MallocCall { ts_ns: 200, tid: 7, comm: &comm, stack: &stack, bytes, probability };
        profile.asked(&process, &call)
    };
    let exact = asked(1, 5_000, 1.0);
    asked(1, 6_000, 1.0);
    let estimated = asked(2, 100, 0.1);
    asked(2, 100, 0.1);
    profile.left(&process, Some(exact), 300, (5_000, 1.0));
    profile.left(&process, Some(estimated), 300, (100, 0.1));
    profile.left(&process, None, 300, (400, 0.4));
    profile.close(1_100);
    profile
}

#[test]
fn formats_have_the_same() {
    let profile = profile();
    let [asked, left] = profile.totals();
    assert_eq!((asked.taken, asked.calls.rounded(), asked.bytes.rounded()), (4, 22, 13_000));
    assert_eq!((left.taken, left.bytes.rounded()), (3, 7_000));

    let mut bytes = Vec::new();
    profile.write(Format::Pprof, &mut bytes).unwrap();
    let read = pprof::proto::Profile::decode(&*gunzip(&bytes)).unwrap();
    let text = |at: i64| read.string_table[at as usize].as_str();
    let total = |at: usize| read.sample.iter().map(|sample| sample.value[at]).sum::<i64>();
    let types: Vec<_> = read
        .sample_type
        .iter()
        .enumerate()
        .map(|(at, of)| (text(of.r#type), text(of.unit), total(at)))
        .collect();
    let expected = [
        ("alloc_objects", "count", 22),
        ("alloc_space", "bytes", 13_000),
        // 1 and 10 whose stacks are known, and 2.5.
        ("inuse_objects", "count", 14),
        ("inuse_space", "bytes", 7_000),
    ];
    assert_eq!(types, expected);
    assert_eq!((read.period, text(read.default_sample_type)), (1_000, "alloc_space"));
    assert_eq!(read.duration_nanos, 1_000);
    assert!(read.sample.iter().all(|sample| !sample.location_id.is_empty()));

    for (of, total) in [(Measure::Malloc, 13_000), (Measure::MallocLive, 7_000)] {
        let graph = Graph { of, ..Graph::default() };
        let mut lines = Vec::new();
        profile.write(Format::Folded(graph), &mut lines).unwrap();
        let lines = String::from_utf8(lines).unwrap();
        let sum: u64 =
            lines.lines().map(|line| line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap()).sum();
        assert_eq!(sum, total, "{lines}");
        assert!(!lines.contains("(no stack)") || of == Measure::MallocLive, "{lines}");
        let mut svg = Vec::new();
        profile.write(Format::FlameGraph(graph), &mut svg).unwrap();
        let svg = String::from_utf8(svg).unwrap();
        assert!(svg.contains(of.title()) && svg.contains("estimated from"), "{svg}");
    }
    assert!(profile.write(Format::Speedscope, &mut Vec::new()).is_err());
}

/// Each process has its own calls, and dropping a process removes only its own.
#[test]
fn several_processes() {
    let mut profile = profile();
    let other = process(8);
    profile.add(&other, 150);
    let (stack, comm): (Stack, Arc<str>) = ([frame(1, 3), frame(0, 9)].into(), "main".into());
    let call = MallocCall { ts_ns: 200, tid: 8, comm: &comm, stack: &stack, bytes: 700, probability: 1.0 };
    let key = profile.asked(&other, &call);
    profile.left(&other, Some(key), 300, (700, 1.0));
    profile.left(&other, None, 300, (40, 1.0));
    let bytes = |profile: &MallocProfile| profile.totals().map(|total| total.bytes.rounded());
    assert_eq!(bytes(&profile), [13_700, 7_740]);
    profile.forget(8);
    assert_eq!(bytes(&profile), [13_000, 7_000]);
    profile.forget(7);
    assert_eq!(bytes(&profile), [0, 0]);
}
