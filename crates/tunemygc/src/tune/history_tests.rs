//! What was tried before, and how it affects advice.

use super::{
    tests::{everything, value_of},
    *,
};

/// A program with these sets, under these settings.
fn episode(key: &str, seen: f64, cost: u64) -> Episode {
    let mut evidence = everything();
    (0..20).for_each(|_| evidence.each.cost.add(cost));
    Episode { in_force: InForce::parse(key, Series(3, 1)), evidence, times: Times::at(seen) }
}

/// Settings are in force until others succeed them. While both continue, the first ones are in force, unless they belong to a stray process.
#[test]
fn which_is_in_force() {
    let times = |since: f64, until: f64, sets: u64| Times { since, until, sets };
    let hour = history::GAP;
    for (all, expected) in [
        (vec![], None),
        (vec![times(5.0, 9.0, 1)], Some(0)),
        // One after the other, in any order.
        (vec![times(0.0, 8.0, 9), times(9.0, 20.0, 1)], Some(1)),
        (vec![times(9.0, 20.0, 1), times(0.0, 8.0, 9)], Some(0)),
        // Both continue.
        (vec![times(0.0, 19.0, 4), times(9.0, 20.0, 3)], Some(0)),
        (vec![times(0.0, 19.0, 3), times(9.0, 20.0, 12)], Some(0)),
        // The first one ended a while ago, or has few processes.
        (vec![times(0.0, 19.0, 4), times(9.0, 20.0 + hour, 3)], Some(1)),
        (vec![times(0.0, 19.0, 3), times(9.0, 20.0, 13)], Some(1)),
        // A trial that has ended, and a third environment after both.
        (vec![times(0.0, 19.0, 4), times(9.0, 10.0, 3), times(20.0, 21.0, 1)], Some(2)),
    ] {
        assert_eq!(history::in_force(&all), expected, "{all:?}");
    }
    let sets = vec![
        [7.0 + hour, 8.0 + hour],
        [0.0, 1.0],
        [9.0 + 2.0 * hour, 9.5 + 2.0 * hour],
        [8.5 + hour, 9.0 + hour],
    ];
    assert_eq!(Times::latest_of(sets), times(7.0 + hour, 9.5 + 2.0 * hour, 3));
    // Of two at the same time, neither was before the other; nor was a trial that has ended before the one that it accompanied.
    let at = |key: &str, since: f64, until: f64| Episode {
        times: times(since, until, 3),
        ..episode(key, 0.0, 300)
    };
    let other = "RUBY_GC_MALLOC_LIMIT=33554432";
    let report = |now, other| recommend_after(Series(3, 1), &now, &[other]);
    let both = report(at("", 0.0, 19.0), at(other, 9.0, 20.0));
    assert!(
        both.change.is_none() && both.to_string().contains("two environments are in force at the same time")
    );
    assert_eq!(
        both.to_state(Strategy::Speed, &|_, _| true)["at_the_same_time"],
        serde_json::json!([{"RUBY_GC_MALLOC_LIMIT": 33_554_432}])
    );
    let ended = report(at("", 0.0, 30.0 + hour), at(other, 9.0, 20.0));
    assert!(ended.change.is_none() && ended.concurrent().is_none());
    let replaced = report(at(other, 9.0, 30.0 + hour), at("", 0.0, 19.0));
    assert!(replaced.change.is_some() && replaced.concurrent().is_none());
}

/// A value that was tried and was no better does not rule out one that is more than twice as far away; one that was worse does.
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

/// Environments with too little evidence, such as that of a console, neither replace the previous one nor count as attempts.
#[test]
fn stray_environments() {
    let episode = |limit: u64, seen: f64, evidence: Evidence| Episode {
        in_force: InForce::parse(&format!("RUBY_GC_MALLOC_LIMIT={limit}"), Series(3, 4)),
        evidence,
        times: Times::at(seen),
    };
    let costing = |cost: u64| {
        let mut evidence = everything();
        (0..10).for_each(|_| evidence.each.cost.add(cost));
        evidence
    };
    let little = |at: u64| episode(at << 20, at as f64, Evidence { cycles: 2, ..everything() });
    let now = episode(64 << 20, 20.0, costing(300));
    let others = [episode(8 << 20, 1.0, costing(100)), little(5), little(6), little(7), little(9)];
    let report = recommend_after(Series(3, 4), &now, &others);
    assert_eq!(report.change.as_ref().unwrap().sets_before, 1);
    assert_eq!(report.speed().withdrawal.as_ref().unwrap().to, others[0].in_force);
    let report = recommend_after(Series(3, 4), &now, &others[1..]);
    assert!(report.change.is_none() && !report.speed().advice.is_empty());
    let known = [1, 2, 3, 4].map(|at| episode(at << 20, at as f64, costing(300)));
    let report = recommend_after(Series(3, 4), &now, &known);
    assert!(
        report.speed().refusals.iter().all(|refusal| refusal.reason.starts_with("4 other settings")),
        "{report}"
    );
}
