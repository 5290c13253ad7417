use super::*;
use crate::wire::SampleSet;

/// Series with their own rules, and their neighbours.
pub(super) const ALL: [Series; 10] = [
    Series(2, 2),
    Series(2, 4),
    Series(2, 7),
    Series(3, 0),
    Series(3, 1),
    Series(3, 2),
    Series(3, 3),
    Series(3, 4),
    Series(4, 0),
    Series(4, 1),
];

/// A program on this Ruby that gives every rule a reason to advise.
pub(crate) fn everything() -> Evidence {
    let mut evidence =
        Evidence { sets: 1, samples: 9000, seconds: 1000.0, cycles: 4000, settled: 1, ..Evidence::default() };
    for (reason, n) in [("newobj", 2000), ("malloc", 400)] {
        evidence.minors.insert(reason.to_owned(), n);
    }
    for (reason, n) in [("oldgen", 600), ("nofree", 500), ("oldmalloc", 90), ("shady", 150), ("force", 20)] {
        evidence.majors.insert(reason.to_owned(), n);
    }
    evidence.majors.insert("oldgen".to_owned(), 800);
    evidence.time = Some(evidence::GcTime { minor_ms: 90_000, major_ms: 40_000, seconds: 1000.0 });
    for _ in 0..100 {
        evidence.intervals.add(50_000);
        evidence.available.add(400_000);
        evidence.growth.add(300_000);
        evidence.live.add(200_000);
        evidence.free_share.add(700);
        evidence.old_kept.add(990);
        evidence.warmup.add(25);
    }
    evidence
}

pub(super) fn value_of(report: &Report, strategy: usize, name: &str) -> Option<Setting> {
    report.plans[strategy].settings().find(|change| change.variable == name).map(|change| change.value)
}

/// The number of slots that a program needs at once is unknown if malloc starts most cycles, unless it has units of work.
#[test]
fn growth_that_malloc_hides() {
    const NAME: &str = "RUBY_GC_HEAP_GROWTH_MAX_SLOTS";
    let mut evidence = everything();
    assert!(value_of(&recommend(Series(3, 1), &evidence), 0, NAME).is_some());
    evidence.minors.insert("malloc".to_owned(), 10_000);
    let report = recommend(Series(3, 1), &evidence);
    for (strategy, plan) in report.plans.iter().enumerate() {
        let refusal = plan.refusals.iter().find(|refusal| refusal.rule == "growth-step").unwrap();
        assert!(refusal.reason.starts_with("malloc begins 10000 minor cycles"), "{}", refusal.reason);
        assert_eq!(value_of(&report, strategy, NAME), None);
    }
    (0..100).for_each(|_| evidence.unit_objects.add(20_000));
    assert!(value_of(&recommend(Series(3, 1), &evidence), 0, NAME).is_some());
}

/// Every advice has a variable that the series reads and a value that Ruby accepts, with a reason and a confidence; every
/// rule either gives advice or a reason against it; no variable is set twice.
#[test]
fn advice_is_complete() {
    let mut kept = everything();
    kept.old_kept = distribution::Distribution::default();
    (0..50).for_each(|_| kept.old_kept.add(300));
    kept.time = Some(evidence::GcTime { minor_ms: 90_000, major_ms: 40_000, seconds: 10_000.0 });
    for series in ALL {
        for evidence in [&everything(), &kept, &Evidence::default()] {
            let report = recommend(series, evidence);
            for plan in &report.plans {
                let rules = plan.advice.len() + plan.refusals.len();
                assert!(rules == 10 || !report.insufficient.is_empty());
                let mut seen = Vec::new();
                for change in plan.settings() {
                    let variable = ruby::variable(change.variable).unwrap();
                    assert!(variable.is_read_by(series), "{} on {series}", change.variable);
                    assert_eq!(
                        variable.parse(&change.value.to_string(), series),
                        Some(change.value.number())
                    );
                    assert!(!seen.contains(&change.variable), "{} twice", change.variable);
                    seen.push(change.variable);
                }
                for advice in &plan.advice {
                    assert!(
                        !advice.evidence.is_empty() && advice.evidence.iter().all(|measure| measure.n > 0)
                    );
                    assert!(advice.effect.factor.is_none_or(f64::is_finite));
                }
            }
        }
        assert!(!recommend(series, &everything()).speed().advice.is_empty());
    }
}

/// The formulas of docs/collector.md, in figures.
#[test]
fn formulas() {
    let report = recommend(Series(2, 7), &everything());
    // 13 % of the time in the GC gives four times the room: 400 000 - 50 000 + 200 000 slots, in whole pages.
    assert_eq!(value_of(&report, 0, "RUBY_GC_HEAP_INIT_SLOTS"), Some(Setting::Size(550_105)));
    assert_eq!(value_of(&report, 0, "RUBY_GC_HEAP_FREE_SLOTS"), None);
    let mut calm = everything();
    calm.time = None;
    let size = value_of(&recommend(Series(2, 7), &calm), 0, "RUBY_GC_HEAP_INIT_SLOTS");
    assert_eq!(size, Some(Setting::Size(400_002)), "what it grows to anyway");
    assert_eq!(value_of(&report, 0, "RUBY_GC_MALLOC_LIMIT"), Some(Setting::Size(32 << 20)));
    assert_eq!(value_of(&report, 0, "RUBY_GC_MALLOC_LIMIT_MAX"), Some(Setting::Size(64 << 20)));
    assert_eq!(value_of(&report, 0, "RUBY_GC_OLDMALLOC_LIMIT"), Some(Setting::Size(64 << 20)));
    assert_eq!(value_of(&report, 0, "RUBY_GC_OLDMALLOC_LIMIT_MAX"), Some(Setting::Size(512 << 20)));
    assert_eq!(
        value_of(&recommend(Series(2, 7), &calm), 0, "RUBY_GC_OLDMALLOC_LIMIT_MAX"),
        Some(Setting::Size(256 << 20))
    );
    // There is always a limit: nothing else may free the memory of dead old objects.
    let limit = |max: &str| {
        let mut raised = everything();
        raised.environment.insert("RUBY_GC_OLDMALLOC_LIMIT_MAX".to_owned(), max.to_owned());
        value_of(&recommend(Series(2, 7), &raised), 0, "RUBY_GC_OLDMALLOC_LIMIT_MAX")
    };
    assert_eq!((limit("400m"), limit("512m")), (Some(Setting::Size(512 << 20)), None));
    assert_eq!(value_of(&report, 0, "RUBY_GC_HEAP_OLDOBJECT_LIMIT_FACTOR"), Some(Setting::Hundredths(380)));
    // The same room as a share of free slots.
    let report = recommend(Series(3, 4), &everything());
    assert_eq!(value_of(&report, 0, "RUBY_GC_HEAP_FREE_SLOTS_MIN_RATIO"), Some(Setting::Hundredths(50)));
    assert_eq!(value_of(&report, 0, "RUBY_GC_HEAP_FREE_SLOTS_GOAL_RATIO"), Some(Setting::Hundredths(55)));
    assert_eq!(value_of(&report, 0, "RUBY_GC_HEAP_FREE_SLOTS"), None);
    assert_eq!(value_of(&report, 1, "RUBY_GC_HEAP_FREE_SLOTS_MAX_RATIO"), Some(Setting::Hundredths(40)));
    assert_eq!(value_of(&report, 1, "RUBY_GC_MALLOC_LIMIT"), None);
    assert_eq!(
        value_of(&report, 0, "RUBY_GC_HEAP_REMEMBERED_WB_UNPROTECTED_OBJECTS_LIMIT_RATIO"),
        None,
        "150 of 1560 are not more than 10 %"
    );
    // Advice starts from the settings of the environment.
    let mut tuned = everything();
    tuned.environment.insert("RUBY_GC_MALLOC_LIMIT".to_owned(), "64m".to_owned());
    let report = recommend(Series(3, 4), &tuned);
    assert_eq!(value_of(&report, 0, "RUBY_GC_MALLOC_LIMIT"), Some(Setting::Size(128 << 20)));
    let clobbers = |report: &Report, own: bool| report.speed().clobbers(&report.in_force, &|_, _| own);
    assert!(clobbers(&report, false).is_empty(), "twice is not too much");
    tuned.environment.insert("RUBY_GC_OLDMALLOC_LIMIT".to_owned(), "64m".to_owned());
    let report = recommend(Series(3, 4), &tuned);
    assert_eq!(clobbers(&report, false), ["RUBY_GC_OLDMALLOC_LIMIT"]);
    assert!(clobbers(&report, true).is_empty(), "what was advised may be changed");
    let state = report.speed().state(&report.in_force, &|_, _| false);
    assert_eq!(state.left, ["RUBY_GC_OLDMALLOC_LIMIT"]);
    let value = |name: &str| state.set.value(ruby::variable(name).unwrap());
    assert_eq!(
        (value("RUBY_GC_OLDMALLOC_LIMIT"), value("RUBY_GC_MALLOC_LIMIT")),
        (67_108_864.0, 134_217_728.0)
    );
    tuned.environment.insert("RUBY_GC_OLDMALLOC_LIMIT".to_owned(), "16m".to_owned());
    assert!(clobbers(&recommend(Series(3, 4), &tuned), false).is_empty(), "Ruby's default");
}

/// Units of work take precedence over shares of time.
#[test]
fn units() {
    let mut evidence = everything();
    evidence.time = None;
    let refusals = &recommend(Series(3, 0), &evidence).plans[0].refusals;
    assert!(
        refusals.iter().any(|refusal| refusal.reason.contains("does not count its time")),
        "{refusals:?}"
    );
    (0..200).for_each(|_| evidence.unit_objects.add(63));
    let refusals = &recommend(Series(3, 0), &evidence).plans[0].refusals;
    assert!(
        refusals.iter().any(|refusal| refusal.reason.contains("fits between two cycles")),
        "{refusals:?}"
    );
    // Small units in a program that spends much of its time in the GC: its share of time decides.
    evidence.time = everything().time;
    let report = recommend(Series(3, 0), &evidence);
    let by_share = |advice: &Advice| advice.rule == "free-slots" && advice.why.contains("of the time");
    assert!(report.plans[0].advice.iter().any(by_share), "{report}");
    evidence.time = None;
    evidence.unit_objects = distribution::Distribution::default();
    (0..200).for_each(|_| evidence.unit_objects.add(100_000));
    let report = recommend(Series(3, 0), &evidence);
    assert_eq!(value_of(&report, 0, "RUBY_GC_HEAP_INIT_SLOTS"), Some(Setting::Size(450_309)));
    let advice = report.plans[0].advice.iter().find(|advice| advice.rule == "free-slots").unwrap();
    let factor = advice.effect.factor.unwrap();
    assert!((factor - 0.5).abs() < 0.02, "{factor}");
}

/// A program that would save little time for much memory is left as it is, with both figures in the reason; it is advised
/// if it spends more of its time in the GC, or needs less memory.
#[test]
fn poor_trade_offs() {
    let program = |share: u64, mib: u64| {
        let mut evidence = everything();
        evidence.intervals = distribution::Distribution::default();
        evidence.available = distribution::Distribution::default();
        for _ in 0..100 {
            evidence.intervals.add(150_000);
            evidence.available.add(350_000);
        }
        evidence.time =
            Some(evidence::GcTime { minor_ms: share * 8_000, major_ms: share * 2_000, seconds: 1000.0 });
        evidence.each.peak.add(mib << 20);
        evidence
    };
    let rule = |report: &Report, strategy: usize, rule: &str| -> Result<Advice, String> {
        let plan = &report.plans[strategy];
        let refused = plan.refusals.iter().find(|refusal| refusal.rule == rule);
        match refused {
            Some(refusal) => Err(refusal.reason.clone()),
            None => Ok(plan.advice.iter().find(|advice| advice.rule == rule).cloned().unwrap()),
        }
    };
    for series in [Series(3, 1), Series(3, 2), Series(3, 4), Series(4, 0)] {
        let refusal = rule(&recommend(series, &program(7, 30)), 0, "free-slots").unwrap_err();
        assert!(
            refusal.starts_with("not worth it: about 1.")
                && refusal.contains(" of the 7.0 % in the GC would be saved, for ")
        );
        assert!(refusal.ends_with(" % more memory; at least 2.0 % must be"), "{refusal}");
        let advice = rule(&recommend(series, &program(35, 30)), 0, "free-slots").unwrap();
        let TradeOff { time_saved, memory_added } = advice.effect.price.trade_off.unwrap();
        assert!(
            time_saved > 0.02 && memory_added <= 10.0 * time_saved,
            "{series}: {time_saved} {memory_added}"
        );
        // Less room if all of it costs too much.
        let less = rule(&recommend(series, &program(16, 30)), 0, "free-slots");
        if series == Series(3, 2) {
            assert!(less.unwrap_err().contains("; that may cost at most "));
        } else {
            assert!(less.unwrap().effect.factor.unwrap() > advice.effect.factor.unwrap(), "{series}");
        }
        // Limits of malloc in a small process, and in a large one.
        let refusal = rule(&recommend(series, &program(12, 30)), 0, "malloc").unwrap_err();
        assert!(refusal.starts_with("not worth it: "), "{refusal}");
        assert!(rule(&recommend(series, &program(25, 3000)), 0, "malloc").is_ok(), "{series}");
        // Pages are not returned at the price of much time.
        let report = recommend(series, &program(40, 100));
        let refusal = rule(&report, 1, "return-memory").unwrap_err();
        assert!(
            refusal.starts_with("not worth it: about ") && refusal.contains(" less memory, for "),
            "{refusal}"
        );
        assert!(rule(&recommend(series, &program(1, 20)), 1, "return-memory").is_ok(), "{series}");
        let text = recommend(series, &program(35, 30)).to_string();
        assert!(text.contains("      trade-off: -") && text.contains(" of the program's time, +"), "{text}");
    }
}

/// Insufficient data is reported, with what is missing.
#[test]
fn insufficient() {
    let little = Evidence { cycles: 29, missing: 5, seconds: 4.0, ..everything() };
    let report = recommend(Series(3, 4), &little);
    assert_eq!(report.insufficient.len(), 3, "{:?}", report.insufficient);
    assert!(report.plans.iter().all(|plan| plan.advice.is_empty()));
    let config = report.to_config();
    assert_eq!(config["Speed"], serde_json::json!({}));
    assert!(config["explanation"][0].as_str().unwrap().starts_with("insufficient data: 29 GC cycles"));
    assert_eq!(report.to_exports(Strategy::Speed, &|_, _| false), "");
}

/// The protocol's example set yields the counts that can be verified by hand.
#[test]
fn example_set() {
    let set = SampleSet::from_json(include_str!("../../../../tests/fixtures/tunemygc_seed.json")).unwrap();
    let mut fold = Fold::new(&set.header).unwrap();
    set.samples.iter().for_each(|sample| fold.add(sample));
    assert_eq!(fold.series(), Series(2, 2));
    let evidence = fold.finish();
    let starts = set.samples.iter().filter(|sample| sample.event == crate::wire::EventName::GcCycleStarted);
    assert_eq!(evidence.cycles, starts.count() as u64);
    assert_eq!(evidence.samples, set.samples.len() as u64);
    assert_eq!(evidence.all_minors() + evidence.all_majors(), evidence.cycles);
    assert!(evidence.environment.is_empty(), "all its variables are the agent's");
    assert!(!recommend(Series(2, 2), &evidence).insufficient.is_empty());
    // It is the same after it is stored and read again, and adding it to empty evidence changes nothing.
    let kept: Evidence = serde_json::from_str(&serde_json::to_string(&evidence).unwrap()).unwrap();
    assert_eq!(kept, evidence);
    let mut sum = Evidence { environment: evidence.environment.clone(), ..Evidence::default() };
    sum.merge(&evidence);
    assert_eq!(sum, evidence);
}

/// A program that is not CRuby, or not a known version, is refused with its name.
#[test]
fn unsupported() {
    let set = SampleSet::from_json(include_str!("../../../../tests/fixtures/tunemygc_seed.json")).unwrap();
    let mut header = set.header.clone();
    header.ruby_version = "4.2.0".to_owned();
    assert_eq!(Fold::new(&header).unwrap_err(), Unsupported::Version("4.2.0".to_owned()));
    let mut header = set.header;
    header.stat_keys[4] = "committed".to_owned();
    assert!(Fold::new(&header).unwrap_err().to_string().contains("has no heap_available_slots"));
}

/// The evidence of any program.
fn any_evidence() -> impl proptest::strategy::Strategy<Value = Evidence> {
    use proptest::prelude::*;
    let reasons = proptest::collection::vec(0_u64..500, 10);
    let sizes = proptest::collection::vec(0_u32..40, 8);
    let settings = proptest::collection::vec((0_usize..ruby::VARIABLES.len(), 0_u32..130, 0_u32..30), 0..6);
    (reasons, sizes, settings, 0_u64..2_000_000).prop_map(|(reasons, sizes, settings, ms)| {
        let mut evidence = everything();
        let names = ["newobj", "malloc", "method", "capi", "stress"];
        evidence.minors = names.iter().map(ToString::to_string).zip(reasons[..5].iter().copied()).collect();
        let names = ["nofree", "oldgen", "shady", "force", "oldmalloc"];
        evidence.majors = names.iter().map(ToString::to_string).zip(reasons[5..].iter().copied()).collect();
        evidence.time =
            (ms > 1000).then_some(evidence::GcTime { minor_ms: ms, major_ms: ms / 7, seconds: 1000.0 });
        let of = |bits: u32| {
            let mut distribution = distribution::Distribution::default();
            (0..40).for_each(|n| distribution.add((1_u64 << bits) + n));
            distribution
        };
        evidence.intervals = of(sizes[0]);
        evidence.available = of(sizes[1]);
        evidence.growth = of(sizes[2]);
        evidence.live = of(sizes[3]);
        evidence.warmup = of(sizes[4]);
        evidence.old_kept = of(sizes[5] % 11);
        evidence.free_share = of(sizes[6] % 10);
        evidence.unit_objects =
            if sizes[7] % 2 == 0 { of(sizes[7]) } else { distribution::Distribution::default() };
        // Memory is optional, too.
        if sizes[5] % 3 > 0 {
            evidence.each.peak = of(sizes[6] % 30);
        }
        // The sizes of heaps are present or absent.
        evidence.heaps = (0..if sizes[4] % 2 == 0 { 5 } else { 0 })
            .map(|at| heaps::Heap {
                slot: 40 << at,
                slots: of(sizes[at as usize] % 24),
                allocated: 1 << sizes[6],
                cycles: 1 << (sizes[5] % 16),
            })
            .collect();
        for (at, hundredths, size) in settings {
            let variable = &ruby::VARIABLES[at];
            let value = match variable.kind {
                ruby::Kind::Size => (1_u64 << size).to_string(),
                _ => Setting::Hundredths(hundredths.into()).to_string(),
            };
            evidence.environment.insert(variable.name.to_owned(), value);
        }
        evidence
    })
}

proptest::proptest! {
    // Some of the faults that this found occurred in fewer than one in 1,000 cases.
    #![proptest_config(proptest::test_runner::Config::with_cases(4096))]

    /// Whatever a program does and has set: its Ruby reads and accepts all advised settings, together with those already
    /// set, and each advice changes something.
    #[test]
    #[expect(clippy::float_cmp, reason = "a setting that Ruby reads back is the same number to the last bit")]
    fn advice_is_always_valid(evidence in any_evidence(), minor in 0_u32..5) {
        for series in [Series(2, 2), Series(2, 7), Series(3, minor), Series(4, 0), Series(4, 1)] {
            for plan in &recommend(series, &evidence).plans {
                let mut environment = evidence.environment.clone();
                environment.extend(plan.settings().map(|change| (change.variable.to_owned(), change.value.to_string())));
                let in_force = InForce::of(&environment, series);
                let [min, goal, max] = ["MIN", "GOAL", "MAX"]
                    .map(|name| in_force.value(ruby::variable(&format!("RUBY_GC_HEAP_FREE_SLOTS_{name}_RATIO")).unwrap()));
                let touches = plan.settings().any(|change| change.variable.ends_with("_RATIO") && change.variable.contains("FREE_SLOTS"));
                proptest::prop_assert!(!touches || (min <= goal && goal <= max && max <= 1.0), "{series}: {min} {goal} {max}");
                for change in plan.settings() {
                    let variable = ruby::variable(change.variable).unwrap();
                    proptest::prop_assert!(variable.is_read_by(series), "{} on {series}", change.variable);
                    // Together with those already set.
                    proptest::prop_assert_eq!(in_force.value(variable), change.value.number(), "{} on {}", change.variable, series);
                    let text = change.value.to_string();
                    proptest::prop_assert_eq!(variable.parse(&text, series), Some(change.value.number()), "{}={}", change.variable, text);
                }
                for advice in &plan.advice {
                    for change in &advice.set {
                        let pair = (advice.rule, change.variable);
                        proptest::prop_assert!(rules::settable(series).any(|known| known == pair), "{pair:?} on {series}");
                    }
                    proptest::prop_assert!(
                        advice.set.iter().any(|change| (change.value.number() - change.current).abs() > 1e-9),
                        "{} changes nothing", advice.rule
                    );
                    // No rule spends memory without enough time for it.
                    let price = &advice.effect.price;
                    if let Some(trade_off) = price.trade_off
                        && plan.strategy == Strategy::Speed
                    {
                        proptest::prop_assert!(trade_off.memory_added <= (trade_off.time_saved * 10.0).max(0.05), "{}: {trade_off:?}", advice.rule);
                        proptest::prop_assert!(trade_off.memory_added <= 0.05 || trade_off.time_saved >= 0.02, "{}: {trade_off:?}", advice.rule);
                    }
                    let known = |range: Option<[f64; 2]>| range.is_some_and(|[low, high]| low <= high && low >= 0.0);
                    for range in [price.peak_rss, price.gc_time, price.majors] {
                        proptest::prop_assert!(range.is_none() || known(range), "{}: {price:?}", advice.rule);
                    }
                    let factor = advice.effect.factor.unwrap_or(0.5);
                    proptest::prop_assert!(factor.is_finite() && factor >= 0.0, "{}: {factor}", advice.rule);
                }
            }
        }
    }
}

/// The settings that rules declare are read by the series for which they declare them.
#[test]
fn declared_variables() {
    for series in ALL {
        let all: Vec<_> = rules::settable(series).collect();
        assert!(all.len() >= 7, "{series}: {all:?}");
        for (rule, name) in &all {
            let variable = ruby::variable(name).unwrap();
            assert!(variable.is_read_by(series), "{rule}: {name} on {series}");
            assert_eq!(
                all.iter().filter(|other| **other == (*rule, *name)).count(),
                1,
                "{rule}: {name} twice"
            );
        }
    }
}

/// If malloc starts a cycle before the additional room would be used, no room is advised.
#[test]
fn no_room_that_malloc_leaves_unused() {
    let room = |series: Series, evidence: &Evidence| {
        let report = recommend(series, evidence);
        report.speed().advice.iter().find(|advice| advice.rule == "free-slots")?.effect.factor
    };
    let mut evidence = everything();
    assert_eq!(room(Series(3, 1), &evidence), Some(0.25));
    assert_eq!(room(Series(3, 4), &evidence), Some(0.25));
    evidence.minors.insert("malloc".to_owned(), 1800);
    let report = recommend(Series(3, 1), &evidence);
    let refusal = report.speed().refusals.iter().find(|refusal| refusal.rule == "free-slots").unwrap();
    assert!(refusal.reason.contains("it may take longer by more than that"), "{}", refusal.reason);
    // If there is more to save, it is worth the risk.
    evidence.time = Some(evidence::GcTime { minor_ms: 600_000, major_ms: 80_000, seconds: 1000.0 });
    // A heap that has its size from the start may become as large as can be used.
    let until = evidence.minors_by("newobj") as f64 / (1800 + evidence.majors_by("oldmalloc")) as f64 + 0.5;
    let factor = room(Series(3, 1), &evidence).unwrap();
    assert!((factor * until - 1.0).abs() < 0.01 && factor > 0.25, "{factor} {until}");
    assert_eq!(room(Series(3, 4), &evidence), None);
    let report = recommend(Series(3, 4), &evidence);
    let refusal = report.speed().refusals.iter().find(|refusal| refusal.rule == "free-slots").unwrap();
    assert!(refusal.reason.starts_with("malloc begins a cycle about every "), "{}", refusal.reason);
    assert!(report.speed().advice.iter().any(|advice| advice.rule == "malloc"));
    evidence.minors.insert("malloc".to_owned(), 3000);
    let report = recommend(Series(3, 1), &evidence);
    for rule in ["no-free-majors", "initial-heap"] {
        let refusal = report.speed().refusals.iter().find(|refusal| refusal.rule == rule).unwrap();
        assert!(refusal.reason.starts_with("malloc begins 3000 minor cycles"), "{}", refusal.reason);
    }
    assert_eq!(value_of(&report, 0, "RUBY_GC_HEAP_INIT_SLOTS"), None);
}

/// A heap that releases pages and allocates them again has its final size; one that keeps growing does not.
#[test]
fn heaps_that_breathe() {
    let set = SampleSet::from_json(include_str!("../../../../tests/fixtures/tunemygc_seed.json")).unwrap();
    let start =
        set.samples.iter().find(|sample| sample.event == crate::wire::EventName::GcCycleStarted).unwrap();
    let fold = |slots: &dyn Fn(u64) -> u64| {
        let mut fold = Fold::new(&set.header).unwrap();
        for count in 1..=64 {
            let mut sample = start.clone();
            sample.ts += count as f64;
            sample.stat[0] = count;
            sample.stat[4] = slots(count);
            fold.add(&sample);
        }
        fold.finish()
    };
    let settled = |slots: &dyn Fn(u64) -> u64| fold(slots).settled;
    assert_eq!(settled(&|count| 400_000 + count.min(10) * 10_000), 1, "grows, then stays");
    assert_eq!(
        settled(&|count| if count < 4 { 90_000 } else { 750_000 + count % 4 * 100_000 }),
        1,
        "breathes"
    );
    assert_eq!(settled(&|count| 400_000 + count * 1_000), 0, "grows by 16 %");
    assert_eq!(settled(&|count| 400_000 + count * 10_000 + count % 4 * 50_000), 0, "breathes and grows");
    let warmup = |slots: &dyn Fn(u64) -> u64| fold(slots).warmup.max();
    assert_eq!(warmup(&|count| if count < 8 { 90_000 } else { 750_000 }), 8);
    let breathes = |count: u64| 750_000 + count % 4 * 10_000;
    assert_eq!(warmup(&breathes), 0, "a part of a long life is no warm-up");
}

/// The cycles per object of single sets do not depend on their length.
#[test]
fn rates_of_short_sets() {
    let set = SampleSet::from_json(include_str!("../../../../tests/fixtures/tunemygc_seed.json")).unwrap();
    let start =
        set.samples.iter().find(|sample| sample.event == crate::wire::EventName::GcCycleStarted).unwrap();
    let at = |key: &str| set.header.stat_keys.iter().position(|known| known == key).unwrap();
    let (count, allocated) = (at("count"), at("total_allocated_objects"));
    let rates = |cycles: u64| {
        let mut fold = Fold::new(&set.header).unwrap();
        for cycle in 1..=cycles {
            let mut sample = start.clone();
            sample.stat[count] = cycle;
            sample.stat[allocated] = cycle * 10_000;
            fold.add(&sample);
        }
        let each = fold.finish().each;
        (each.minors.max() + each.majors.max(), each.minors.n())
    };
    assert_eq!(
        (rates(4), rates(5), rates(6), rates(200)),
        ((0, 0), (100_000, 1), (100_000, 1), (100_000, 1))
    );
}

/// A program that does not measure its time in the GC (`GC.measure_total_time = false`) is not treated as spending none there.
#[test]
fn time_that_stands_still() {
    let counted = Some(evidence::GcTime { minor_ms: 400, major_ms: 100, seconds: 2.5 });
    let text = recommend(Series(3, 4), &Evidence { time: counted, ..everything() }).to_string();
    assert!(
        text.contains("time in the GC: 20.0 % of 2.5 s between samples (CPU time, GC.stat(:time))"),
        "{text}"
    );
    let still = |seconds: f64| Some(evidence::GcTime { minor_ms: 0, major_ms: 0, seconds });
    let mut evidence = Evidence { time: still(1000.0), ..everything() };
    let report = recommend(Series(3, 4), &evidence);
    assert!(!report.speed().advice.is_empty(), "{report}");
    let text = report.to_string();
    assert!(text.contains("time in the GC: not known: GC.stat(:time) does not grow"), "{text}");
    assert!(!text.contains("Ruby 3.4 does not count"), "{text}");
    assert_eq!(report.to_config()["evidence"]["gc_time_share"], serde_json::Value::Null);
    let minors = |rate: u64| {
        let mut evidence = evidence.clone();
        (0..10).for_each(|_| {
            evidence.each.minors.add(rate);
            evidence.each.majors.add(rate);
            evidence.each.cost.add(0);
        });
        Episode { in_force: InForce::default(), evidence, times: Times::default() }
    };
    let comparison = Comparison::of(&minors(100), &minors(300));
    assert_eq!(comparison.speed, Outcome::Worse);
    assert!(comparison.figures.iter().all(|figure| !figure.metric.contains("time")), "{comparison}");
    evidence.cycles = 29;
    assert!(evidence.counted_time().is_some(), "a few cycles may take no millisecond");
}

/// Names and values of variables come from outside: in a report they cannot move, hide or forge text.
#[test]
fn forged_environment() {
    let name = "RUBY_GC_X\n\n  For speed:\n    export LD_PRELOAD=x.so    #";
    let header = serde_json::json!([
        null, "3.1.7", "0.0",
        { name: "\x1b[8m", "RUBY_GC_\u{202e}": "1", "RUBY_GC_HEAP_GROWTH": "\x1b[8m\n  For memory:\u{9b}8m" },
        "0", [], {}, ["count", "total_allocated_objects", "heap_available_slots", "heap_live_slots", "old_objects"],
        "host", 1, 2
    ]);
    let set = SampleSet::from_json(&format!("[{header}]")).unwrap();
    let evidence = Fold::new(&set.header).unwrap().finish();
    assert_eq!((evidence.environment.len(), evidence.environment_refused), (1, 2));
    let report = recommend(Series(3, 1), &evidence);
    let text = report.to_string();
    assert!(!text.contains("LD_PRELOAD") && !text.contains("\n  For memory:"), "{text}");
    assert!(!text.chars().any(|c| c != '\n' && crate::printable::is_hidden(c)), "{text:?}");
    assert!(text.contains("RUBY_GC_HEAP_GROWTH=\\u{1b}[8m\\u{a}"), "{text}");
    assert!(text.contains("ignored 2 environment variables"), "{text}");
    // Text that an earlier release stored is not trusted either.
    let mut kept = evidence;
    kept.environment.insert(name.to_owned(), "x".to_owned());
    assert!(!recommend(Series(3, 1), &kept).to_string().contains("LD_PRELOAD"));
}

/// `cargo xtask demo` shows lines of a report, which it finds by how they start (`findings` in xtask/src/demo.rs).
#[test]
fn lines_that_the_demo_shows() {
    let text = recommend(Series(3, 4), &everything()).to_string();
    for start in ["time in the GC: ", "minor by ", "major by ", "export "] {
        assert!(text.lines().any(|line| line.trim().starts_with(start)), "no line `{start}`:\n{text}");
    }
}
