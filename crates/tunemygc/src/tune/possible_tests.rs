//! Sizes of heaps that are impossible, or that do not suit all processes.

use super::{
    tests::{everything, value_of},
    *,
};
use crate::wire::SampleSet;

/// No size is advised for processes that differ by more than a factor of 2, nor one that is much more than they have ever had.
#[test]
fn one_size_for_all() {
    const NAME: &str = "RUBY_GC_HEAP_INIT_SLOTS";
    let refusal = |evidence: &Evidence| {
        let report = recommend(Series(3, 1), evidence);
        let rule = report.speed().refusals.iter().find(|refusal| refusal.rule == "free-slots").cloned();
        assert_eq!(value_of(&report, 0, NAME).is_none(), rule.is_some(), "{report}");
        rule.map_or_else(String::new, |rule| rule.reason)
    };
    let mut evidence = everything();
    evidence.minors.insert("malloc".to_owned(), 0);
    (0..5).for_each(|_| evidence.each.slots.add(400_000));
    (0..5).for_each(|_| evidence.each.peak.add(60 << 20));
    assert_eq!(refusal(&evidence), "");
    let mut mixed = evidence.clone();
    mixed.each.slots.add(4_000_000);
    (0..200).for_each(|_| mixed.available.add(4_000_000));
    assert!(refusal(&mixed).starts_with("processes of different sizes (4"), "{}", refusal(&mixed));
    assert!(refusal(&mixed).contains("its own token"));
    let mut large = evidence.clone();
    (large.available, large.live, large.each.slots) = Default::default();
    for _ in 0..100 {
        large.available.add(20_000_000);
        large.live.add(10_000_000);
    }
    for peak in [None, Some(60_u64 << 20)] {
        large.each.peak = distribution::Distribution::default();
        if let Some(peak) = peak {
            large.each.peak.add(peak);
        }
        assert!(refusal(&large).starts_with("the heap would begin with"), "{}", refusal(&large));
    }
    large.each.peak.add(2 << 30);
    large.each.peak.add(2 << 30);
    assert_eq!(refusal(&large), "");
}

/// A set whose heap does not fit into its memory is left out, and counted; the other sets give the same advice as without it.
#[test]
fn impossible_sets() {
    let process = |pid: u64, slots: u64, rss: Option<u64>| {
        let keys = [
            "count",
            "heap_available_slots",
            "heap_live_slots",
            "total_allocated_objects",
            "old_objects",
            "time",
        ];
        let mut set =
            vec![serde_json::json!(["t", "3.1.2", "0.0", {}, "1.0.71", [], {}, keys, "host", 1, pid])];
        for n in 0..60_u64 {
            let info = serde_json::json!({"gc_by": "newobj", "major_by": if n % 5 == 0 { Some("oldgen") } else { None }, "state": "none"});
            let stat = |live: u64, ms: u64| {
                serde_json::json!([n + 1, slots, live, (n + 1) * 80_000, 50_000, n * 60 + ms])
            };
            let ts = 1e9 + n as f64 / 10.0;
            set.push(serde_json::json!([
                ts,
                rss,
                rss,
                "GC_CYCLE_STARTED",
                stat(200_000, 0),
                info,
                null,
                null
            ]));
            set.push(serde_json::json!([
                ts + 0.05,
                rss,
                rss,
                "GC_CYCLE_ENDED",
                stat(120_000, 60),
                info,
                null,
                null
            ]));
        }
        let set = SampleSet::from_json(&serde_json::Value::Array(set).to_string()).unwrap();
        let mut fold = Fold::new(&set.header).unwrap();
        set.samples.iter().for_each(|sample| fold.add(sample));
        fold.finish()
    };
    let mut sane = Evidence::default();
    (0..5).for_each(|pid| sane.merge(&process(pid, 200_000, Some(100 << 20))));
    let expected = recommend(Series(3, 1), &sane);
    assert!(value_of(&expected, 0, "RUBY_GC_HEAP_INIT_SLOTS").is_some(), "{expected}");
    for (slots, rss) in [
        (1 << 62, Some(100 << 20)),
        (1 << 40, Some(100 << 20)),
        (1_000_000_000, Some(100 << 20)),
        (1 << 62, None),
    ] {
        let mut sum = sane.clone();
        sum.merge(&process(66, slots, rss));
        assert_eq!((sum.sets, sum.impossible), (5, 1), "{slots}");
        let report = recommend(Series(3, 1), &sum);
        assert_eq!(report.plans, expected.plans);
        assert!(report.to_string().contains("1 sample set is left out"), "{report}");
        assert_eq!(report.to_state(Strategy::Speed, &|_, _| true)["left_out"], 1);
    }
    // Much of the heap may be swapped out, and a set may not include its memory.
    for (slots, rss) in [(2_000_000, Some(40 << 20)), (2_000_000, None), (200_000, Some(0))] {
        assert_eq!(process(1, slots, rss).impossible, 0, "{slots}");
    }
}
