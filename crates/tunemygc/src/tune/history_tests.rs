//! What was tried before, and how it counts.

use super::{
    tests::{everything, value_of},
    *,
};

/// A program of these sets, under these settings.
fn episode(key: &str, seen: f64, cost: u64) -> Episode {
    let mut evidence = everything();
    (0..20).for_each(|_| evidence.each.cost.add(cost));
    Episode { in_force: InForce::parse(key, Series(3, 1)), evidence, seen }
}

/// A value that was tried and was no better says nothing of one that is more than twice as far away; one that was worse does.
#[test]
fn steps_that_were_too_small() {
    const NAME: &str = "RUBY_GC_HEAP_INIT_SLOTS";
    let now = episode("", 20.0, 300);
    let advised = |slots: u64, cost: u64| {
        let tried = episode(&format!("{NAME}={slots}"), 10.0, cost);
        let report = recommend_after(Series(3, 1), &now, &[tried]);
        match value_of(&report, 0, NAME) {
            Some(Setting::Size(slots)) => Ok(slots),
            _ => Err(report.to_string()),
        }
    };
    let slots = advised(20_000, 300).unwrap();
    assert!(slots > 400_000, "{slots}");
    let half = 10_000 + (slots - 10_000) / 2;
    assert_eq!(advised(half - 1_000, 300), Ok(slots));
    for (tried, cost, word) in
        [(half + 1_000, 300, "no better"), (slots * 2, 300, "no better"), (20_000, 600, "worse")]
    {
        let report = advised(tried, cost).unwrap_err();
        assert!(report.contains(&format!("with HEAP_INIT_SLOTS={tried} it was {word}")), "{report}");
    }
}
