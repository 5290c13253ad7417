//! Simulated programs whose users follow the advice.

use proptest::{
    prelude::*,
    test_runner::{Config, RngSeed},
};

use super::{
    Series, Strategy,
    simulation::{Process, Program, follow},
};

const SERIES: [Series; 8] = [
    Series(2, 2),
    Series(2, 7),
    Series(3, 0),
    Series(3, 1),
    Series(3, 2),
    Series(3, 3),
    Series(3, 4),
    Series(4, 0),
];

/// The rule that a program is meant for, and the first series on which it is.
type Rule = Option<(&'static str, Series)>;

/// Fourteen shapes of programs, each with its [`Rule`]; `None`: no rule.
fn shapes() -> [(&'static str, Program, Rule); 14] {
    let base = Program::default();
    // The first series that measures the time in the GC, which most rules use.
    let timed = Series(3, 1);
    [
        ("small heap", Program { live: 40_000.0, rate: 8e6, ..base.clone() }, Some(("free-slots", timed))),
        (
            "units of work",
            Program { live: 60_000.0, rate: 6e6, unit: 60_000.0, ..base.clone() },
            Some(("free-slots", Series(2, 2))),
        ),
        (
            "malloc",
            Program { bytes: 3000.0, rate: 1e6, other: 700e6, ..base.clone() },
            Some(("malloc", Series(2, 2))),
        ),
        // With Ruby's factor of 2 for old objects, a heap has too few free slots before there are too many old objects.
        (
            "old objects, few dead",
            Program { promoted: 0.02, old_dead: 0.02, live: 400_000.0, ..base.clone() },
            Some(("no-free-majors", Series(2, 7))),
        ),
        (
            "old objects, many dead",
            Program { promoted: 0.1, old_dead: 0.95, live: 400_000.0, ..base.clone() },
            None,
        ),
        (
            "no free slots",
            Program {
                live: 400_000.0,
                rate: 7e6,
                promoted: 0.05,
                old_dead: 0.5,
                other: 200e6,
                ..base.clone()
            },
            Some(("no-free-majors", Series(2, 7))),
        ),
        (
            "oldmalloc",
            Program {
                bytes: 3000.0,
                promoted: 0.5,
                old_dead: 1.0,
                live: 600_000.0,
                rate: 6e5,
                other: 3e9,
                ..base.clone()
            },
            Some(("oldmalloc", Series(2, 2))),
        ),
        (
            "no write barriers",
            Program { shady: 5, ..base.clone() },
            Some(("unprotected-objects", Series(3, 3))),
        ),
        ("fat heap", Program { live: 900_000.0, rate: 2e5, ..base.clone() }, None),
        (
            "both heaps",
            // In a smaller process the room that Ruby 3.2 allocates at once is not worth its memory.
            Program { small: 0.2, live: 300_000.0, rate: 14e6, other: 60e6, ..base.clone() },
            Some(("free-slots", Series(3, 2))),
        ),
        ("a poor trade-off", Program { rate: 1.1e6, other: 5e6, ..base.clone() }, None),
        ("healthy", Program { rate: 1e5, live: 100_000.0, ..base.clone() }, None),
        ("leaking", Program { leaked: 0.01, rate: 3e6, ..base.clone() }, None),
        ("asks for it", Program { explicit: 2, rate: 1e5, ..base }, None),
    ]
}

/// A user who follows advice for fourteen rounds is done within four steps, never returns to abandoned settings, and is not worse off; each
/// shape gets its rule.
#[test]
fn followed_advice_ends() {
    for series in SERIES {
        for (name, program, rule) in shapes() {
            let first = super::recommend(
                series,
                &Process::new(&program, series, &super::InForce::default(), 1).evidence(3),
            );
            let rules: Vec<&str> = first.speed().advice.iter().map(|advice| advice.rule).collect();
            if let Some((rule, _)) = rule.filter(|(_, from)| series >= *from) {
                assert!(rules.contains(&rule), "{name} on {series}: {rules:?}\n{first}");
            }
            if name == "both heaps" && series >= Series(3, 2) {
                // Ruby 3.2 has one variable for all heaps.
                let each = ["RUBY_GC_HEAP_0_INIT_SLOTS", "RUBY_GC_HEAP_1_INIT_SLOTS"];
                let all = ["RUBY_GC_HEAP_INIT_SLOTS"];
                for heap in if series == Series(3, 2) { &all[..] } else { &each } {
                    assert!(
                        first.speed().settings().any(|change| change.variable == *heap),
                        "{series}: {first}"
                    );
                }
            }
            for strategy in Strategy::ALL {
                let story = follow(&program, series, strategy, 14);
                let steps: Vec<String> = story.rounds.iter().map(ToString::to_string).collect();
                assert!(story.steps() <= 4, "{name} on {series} for {strategy:?}: {steps:#?}");
                assert!(story.is_done(), "{name} on {series} for {strategy:?}: {steps:#?}");
                assert!(story.returns() <= usize::from(story.withdrawn), "{name} on {series}: {steps:#?}");
                let [before, after] = story.cost;
                if strategy == Strategy::Speed && series >= Series(3, 1) {
                    assert!(after <= before * 1.10, "{name} on {series}: {before} {after} {steps:#?}");
                    // Memory is spent only for time: twice as much for a tenth of the time, plus half as much again for errors of the model.
                    let saved = (before - after) / (before + 1e9 / program.rate);
                    let [was, is] = story.peak;
                    assert!(
                        is <= was * (1.15 + 15.0 * saved.max(0.0)),
                        "{name} on {series}: {saved:.3} for {was} {is} {steps:#?}"
                    );
                }
            }
        }
    }
}

/// Healthy programs are left alone, and so are those that only request cycles themselves.
#[test]
fn nothing_to_gain() {
    for series in SERIES {
        for (name, program, _) in
            shapes().into_iter().filter(|(name, ..)| ["healthy", "asks for it"].contains(name))
        {
            let story = follow(&program, series, Strategy::Speed, 2);
            assert!(
                story.rounds[1]
                    .iter()
                    .all(|(name, _)| name.contains("INIT_SLOTS") || name.contains("GROWTH_MAX")),
                "{name} on {series}: {}",
                story.report
            );
        }
    }
}

/// A leak is reported, and no slots are added because of it.
#[test]
fn leaks_are_named() {
    for series in SERIES {
        let program = Program { leaked: 0.01, rate: 3e6, ..Program::default() };
        let mut process = Process::new(&program, series, &super::InForce::default(), 7);
        let report = super::recommend(series, &process.evidence(6));
        assert_eq!(report.leaks.len(), 1, "{report}");
        assert!(
            report.to_string().contains("leak: the live heap of 4242 on host grows steadily"),
            "{report}"
        );
        for change in report.speed().settings() {
            assert!(!change.variable.contains("SLOTS"), "{} on {series}", change.variable);
        }
        let steady = super::recommend(
            series,
            &Process::new(&Program::default(), series, &super::InForce::default(), 7).evidence(6),
        );
        assert!(steady.leaks.is_empty(), "{steady}");
    }
}

/// A change for the worse is reverted, with the reason, and is not advised again.
#[test]
fn withdrawn() {
    for series in SERIES.into_iter().filter(|series| *series >= Series(3, 1)) {
        let harmed_by = Some(("RUBY_GC_MALLOC_LIMIT", 4.0));
        let program = Program { bytes: 3000.0, rate: 1e6, other: 700e6, harmed_by, ..Program::default() };
        let story = follow(&program, series, Strategy::Speed, 8);
        assert!(story.withdrawn, "{series}: {:?}", story.rounds);
        assert!(story.steps() <= 4, "{series}: {:?}", story.rounds);
        let text = story.report.to_string();
        assert!(
            story.rounds.last().unwrap().iter().all(|(name, _)| name != "RUBY_GC_MALLOC_LIMIT"),
            "{text}"
        );
        assert!(text.contains("it was worse: GC time per million objects"), "{text}");
    }
}

/// Always the same programs, unless the environment asks for others: one in about 7 000 has a median so close to a threshold that its advice
/// changes late.
fn programs() -> Config {
    let mut config = Config::with_cases(128);
    if matches!(config.rng_seed, RngSeed::Random) {
        config.rng_seed = RngSeed::Fixed(1);
    }
    config
}

proptest! {
    #![proptest_config(programs())]

    /// Any program: at most four steps, no return to abandoned settings (except one reverted change), and an end.
    #[test]
    fn any_program(
        (rate, live, bytes) in (5.0_f64..7.0, 4.3_f64..6.0, 0.0_f64..4.5),
        (promoted, old_dead, unit) in (0.0_f64..0.2, 0.0_f64..1.0, prop_oneof![Just(0.0), 1000.0_f64..200_000.0]),
        (small, shady, noise) in (0.05_f64..0.95, prop_oneof![Just(0_u64), 3_u64..20], 0.0_f64..0.15),
        at in 0..SERIES.len(),
    ) {
        let program = Program {
            rate: 10_f64.powf(rate), live: 10_f64.powf(live), bytes: 10_f64.powf(bytes), promoted, old_dead, unit, small, shady, noise,
            ..Program::default()
        };
        for strategy in Strategy::ALL {
            let story = follow(&program, SERIES[at], strategy, 14);
            let steps: Vec<String> = story.rounds.iter().map(ToString::to_string).collect();
            prop_assert!(story.steps() <= 4 + story.returns(), "{} {strategy:?} {program:?}: {steps:#?}\n{}", SERIES[at], story.report);
            prop_assert!(story.returns() <= usize::from(story.withdrawn), "{steps:#?}");
            prop_assert!(story.is_done(), "{} {strategy:?} {program:?}: {steps:#?}\n{}", SERIES[at], story.report);
        }
    }
}
