//! What an application is told to set, beside what its user has set.

use std::collections::BTreeMap;

use super::{
    tests::{ALL, everything},
    *,
};

/// The settings as Ruby reads them when they are set as told.
fn followed(state: &State, series: Series) -> InForce {
    let texts = state.set.iter().map(|(name, value)| (name.to_owned(), in_force::shown(name, value)));
    InForce::of(&texts.collect::<BTreeMap<_, _>>(), series)
}

/// Ruby follows every setting that is printed, whatever of it the user has set himself.
#[test]
fn ruby_follows_it() {
    const RATIOS: [&str; 3] = [
        "RUBY_GC_HEAP_FREE_SLOTS_MIN_RATIO",
        "RUBY_GC_HEAP_FREE_SLOTS_GOAL_RATIO",
        "RUBY_GC_HEAP_FREE_SLOTS_MAX_RATIO",
    ];
    let mut environments: Vec<BTreeMap<String, String>> = Vec::new();
    for variable in &ruby::VARIABLES {
        for text in ["0.05", "0.60", "1.2", "5", "1m", "64m"] {
            environments.push(BTreeMap::from([(variable.name.to_owned(), text.to_owned())]));
        }
    }
    let shares = ["", "0.05", "0.30", "0.45", "0.60", "0.90"];
    for all in shares.into_iter().flat_map(|min| shares.map(|goal| (min, goal))) {
        for max in shares {
            let set = RATIOS.into_iter().zip([all.0, all.1, max]).filter(|(_, text)| !text.is_empty());
            environments.push(set.map(|(name, text)| (name.to_owned(), text.to_owned())).collect());
        }
    }
    let mut given = 0;
    for environment in environments {
        for series in ALL {
            let report = recommend(series, &Evidence { environment: environment.clone(), ..everything() });
            for (strategy, own) in Strategy::ALL.into_iter().flat_map(|of| [(of, false), (of, true)]) {
                let state = report.plan(strategy).state(&report.in_force, &|_, _| own);
                assert_eq!(
                    followed(&state, series),
                    state.set,
                    "{environment:?} on {series}, {strategy:?}, {own}"
                );
                given += usize::from(state.set != report.in_force);
            }
        }
    }
    assert!(given > 1000, "{given}");
}

/// Settings that belong together are set together, or not at all.
#[test]
fn all_of_it_or_nothing() {
    let mut evidence = everything();
    let set = ("RUBY_GC_HEAP_FREE_SLOTS_GOAL_RATIO".to_owned(), "0.60".to_owned());
    evidence.environment.extend([set]);
    let report = recommend(Series(3, 4), &evidence);
    let advice = report.plan(Strategy::Memory).advice.iter().find(|advice| advice.rule == "return-memory");
    assert_eq!(advice.map(|advice| advice.set.len()), Some(3), "{report}");
    let exports = |own: bool| report.to_exports(Strategy::Memory, &|_, _| own);
    let ratios = |text: &str| text.lines().filter(|line| line.contains("_RATIO=")).count();
    assert!(exports(false).contains("GOAL_RATIO=0.60\n"), "{}", exports(false));
    assert_eq!((ratios(&exports(false)), ratios(&exports(true))), (1, 3));
    let left = report.to_state(Strategy::Memory, &|_, _| false)["left_as_set"].clone();
    assert_eq!(left, serde_json::json!(["RUBY_GC_HEAP_FREE_SLOTS_GOAL_RATIO"]));
}
