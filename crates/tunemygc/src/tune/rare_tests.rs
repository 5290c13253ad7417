//! Rare events accumulate in any program that is observed for long enough: that must not lead to new advice.

use super::{
    tests::{everything, value_of},
    *,
};

fn refusal(series: Series, evidence: &Evidence, rule: &str) -> Option<String> {
    let report = recommend(series, evidence);
    let refused = report.speed().refusals.iter().find(|refusal| refusal.rule == rule);
    refused.map(|refusal| refusal.reason.clone())
}

/// If the time in the GC is not measured, a cause of fewer than one in 100 cycles is left alone.
#[test]
fn causes() {
    let series = Series(2, 7);
    let often = Evidence { time: None, cycles: 9_000, ..everything() };
    let rarely = Evidence { cycles: 9_001, ..often.clone() };
    assert_eq!(refusal(series, &often, "oldmalloc"), None);
    let reason = refusal(series, &rarely, "oldmalloc").unwrap();
    assert!(
        reason.ends_with("malloc of old objects: 90 of 9001 cycles, which is too few to matter"),
        "{reason}"
    );
    // Here its cost is known.
    let counted = Evidence { time: everything().time, ..rarely };
    assert_eq!(refusal(Series(3, 1), &counted, "oldmalloc"), None);
}

/// Steps of growth matter only if there is at least one for every two sets.
#[test]
fn growth() {
    let grew = |sets: u64| refusal(Series(3, 1), &Evidence { sets, ..everything() }, "growth-step");
    assert_eq!(grew(200), None);
    assert_eq!(grew(201).unwrap(), "the heap grew only 100 times in 201 sets");
}

/// A heap that seems settled in only one of many sets.
#[test]
fn settled_by_chance() {
    let found = |settled: u64, growing: u64| {
        refusal(Series(3, 1), &Evidence { sets: 9, settled, growing, ..everything() }, "free-slots")
    };
    assert_eq!((found(1, 0), found(2, 2)), (None, None));
    assert_eq!(found(0, 2).unwrap(), "the heap was still growing: trace for longer");
    assert_eq!(found(1, 2).unwrap(), "the heap was still growing in 2 sets, and had its size only in 1");
}

/// A heap that has about the advised size from the start keeps it.
#[test]
fn small_steps() {
    const NAME: &str = "RUBY_GC_HEAP_INIT_SLOTS";
    // It was given this size, and should have room for 150 000 more objects.
    let of = |slots: u64| {
        let mut evidence = everything();
        evidence.available = distribution::Distribution::default();
        (0..100).for_each(|_| evidence.available.add(slots));
        evidence.environment.insert(NAME.to_owned(), slots.to_string());
        recommend(Series(3, 1), &evidence)
    };
    assert_eq!(value_of(&of(1_400_000), 0, NAME), Some(Setting::Size(1_550_110)));
    let report = of(1_600_000);
    assert_eq!(value_of(&report, 0, NAME), None);
    let reason = &report.speed().refusals.iter().find(|refusal| refusal.rule == "free-slots").unwrap().reason;
    assert_eq!(reason, "it already starts with 1600000 slots, and 1750111 are not much more");
}

/// If saving the cycles at the start may make other cycles longer, they are saved only if they matter.
#[test]
fn few_cycles_at_the_start() {
    // 100 processes with 25 such cycles each.
    let of = |series: Series, cycles: u64| {
        refusal(series, &Evidence { time: None, cycles, ..everything() }, "initial-heap")
    };
    for series in [Series(2, 7), Series(3, 1)] {
        assert_eq!(of(series, 125_000), None);
        let reason = of(series, 126_000).unwrap();
        let expected = "not worth it: 2500 of 126000 cycles are at the start, at most 2.0 % of the time; at least 2.0 % must be saved";
        assert!(reason.starts_with(expected), "{reason}");
    }
}
