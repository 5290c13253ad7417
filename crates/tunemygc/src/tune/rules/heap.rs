//! Size of the heap.

use super::{
    Case, HEAPS, MIN_UNITS, Verdict, enough, percent, price, quantile, share, trade_off::LEAST_TIME,
};
use crate::tune::{
    Advice, Change, Confidence, Effect, Measure, Series, Setting, Strategy, evidence::SLOT, heaps::Heap,
    ruby::variable,
};

/// Gives the heap its final size from the start.
pub(super) fn initial_heap(case: &Case<'_>) -> Verdict {
    case.speed()?;
    let evidence = case.evidence;
    if case.series == Series(3, 2) {
        return Err(
            "the HEAP_INIT_SLOTS of Ruby 3.2 is not an initial size but the number of free slots after each cycle".into()
        );
    }
    let (size, _) = case.heap()?;
    // In a heap that is large from the start, cycles caused by malloc sweep more, and find too few free slots more often.
    case.malloc_follows("a larger heap would not reduce the number of cycles")?;
    let warmup = quantile(&evidence.warmup, 0.5, "processes that grew to their final size")?;
    let (set, from, to) = if case.series >= Series(3, 3) {
        let Some(heaps) = case.heaps() else { return Err(case.no_heaps()) };
        let slots = |heap: &Heap| heap.slots.quantile(0.9).unwrap_or(0);
        let set = initial_sizes(case, heaps, &slots)?;
        let sum = |of: &dyn Fn(&Change) -> f64| set.iter().map(of).sum::<f64>();
        let (from, to) = (sum(&|change| change.current), sum(&|change| change.value.number()));
        (set, from, to)
    } else {
        let slots = case.series.whole_pages(size);
        let current = case.value("RUBY_GC_HEAP_INIT_SLOTS");
        if !is_other(slots as f64, current) {
            return Err(format!("it already starts with its final size of {slots} slots"));
        }
        (vec![case.change("RUBY_GC_HEAP_INIT_SLOTS", Setting::Size(slots))?], current, slots as f64)
    };
    let longer = if price::may_take_longer(case) {
        worth_the_start(case, warmup)?;
        "; in a short program the others may take up to twice as long"
    } else {
        ""
    };
    Ok(Advice {
        rule: "",
        set,
        why: format!("every process grows its heap from {from} to {to} slots, by {warmup} cycles"),
        evidence: vec![
            Measure {
                metric: "heap_available_slots (P90, settled)",
                value: size as f64,
                n: evidence.available.n(),
            },
            Measure {
                metric: "cycles until the heap had its size (median)",
                value: warmup as f64,
                n: evidence.warmup.n(),
            },
        ],
        effect: Effect {
            text: format!(
                "up to {warmup} cycles less at the start of each process; memory as before, but at once{longer}"
            ),
            metric: "cycles at the start",
            factor: Some(0.0),
            price: price::initial(case),
        },
        confidence: case.confidence(evidence.warmup.n()),
    })
}

/// If a heap that is large from the start may make cycles longer, the cycles that it saves must be a relevant share of the time: a loop that
/// creates rows spent 1.2 times as much time in the GC with it (2.7 and 3.1, docs/collector.md).
fn worth_the_start(case: &Case<'_>, warmup: u64) -> Result<(), String> {
    let evidence = case.evidence;
    let all = evidence.cycles + evidence.missing;
    let at_start = (warmup * evidence.warmup.n()).min(all);
    let saved = at_start as f64 / all.max(1) as f64 * case.share_of_time().unwrap_or(1.0);
    if saved >= LEAST_TIME {
        return Ok(());
    }
    Err(format!(
        "not worth it: {at_start} of {all} cycles are at the start, at most {} of the time; at least {} must be saved, as others may take longer",
        percent(saved),
        percent(LEAST_TIME)
    ))
}

/// Whether a size differs enough to change it: by at least 10 % and 2 000 slots.
pub(super) fn is_other(wanted: f64, current: f64) -> bool {
    (wanted - current).abs() >= (current * 0.10).max(2_000.0)
}

/// The initial sizes of the heaps that should have a clearly larger one than now.
pub(super) fn initial_sizes(
    case: &Case<'_>,
    heaps: &[Heap],
    wanted: &dyn Fn(&Heap) -> u64,
) -> Result<Vec<Change>, String> {
    let mut set = Vec::new();
    for (name, heap) in HEAPS.into_iter().zip(heaps) {
        let page = (65_536 / heap.slot.max(1)).max(1);
        let slots = wanted(heap).div_ceil(page).saturating_mul(page);
        // A heap that is smaller than its configured size is not filled: an excess costs nothing.
        if slots as f64 > case.value(name) && is_other(slots as f64, case.value(name)) {
            set.push(case.change(name, Setting::Size(slots))?);
        }
    }
    if set.is_empty() { Err("every heap already starts with its size".to_owned()) } else { Ok(set) }
}

/// Avoids major cycles that ran because a minor one left too few free slots.
pub(super) fn no_free_majors(case: &Case<'_>) -> Verdict {
    case.speed()?;
    let (n, all) = (case.evidence.majors_by("nofree"), case.evidence.all_majors());
    case.often(n, "major cycles because of too few free slots")?;
    if share(n, all) <= 0.30 {
        return Err(format!(
            "only {} of the major cycles are because of too few free slots",
            percent(share(n, all))
        ));
    }
    let (size, _) = case.heap()?;
    // A heap grows only if the program runs out of slots; otherwise a higher goal is missed again and again (see `How::Ratios`).
    case.malloc_follows("the heap would not grow")?;
    let goal = case.value("RUBY_GC_HEAP_FREE_SLOTS_GOAL_RATIO");
    if goal >= 0.5 {
        return Err(format!("RUBY_GC_HEAP_FREE_SLOTS_GOAL_RATIO is {goal:.2} already"));
    }
    let (min, max) =
        (case.value("RUBY_GC_HEAP_FREE_SLOTS_MIN_RATIO"), case.value("RUBY_GC_HEAP_FREE_SLOTS_MAX_RATIO"));
    // Ruby accepts a goal above the minimum and at most the maximum (`rb_gc_impl_set_params`).
    if min >= 0.5 || max < 0.5 {
        return Err(format!(
            "the ratios of free slots are set to {min:.2} and {max:.2}; 0.50 is not between them"
        ));
    }
    goal_counts(case, size, goal, min)?;
    Ok(Advice {
        rule: "",
        set: vec![case.change("RUBY_GC_HEAP_FREE_SLOTS_GOAL_RATIO", Setting::Hundredths(50))?],
        why: format!(
            "{} of the major cycles are because a minor one left too few free slots{}",
            percent(share(n, all)),
            needless(&case.evidence.ruby_version)
        ),
        evidence: vec![Measure { metric: "share of major cycles by nofree", value: share(n, all), n: all }],
        effect: Effect {
            text: "the heap grows further when it grows, so it runs short less often".to_owned(),
            metric: "major cycles by nofree",
            factor: None,
            price: price::for_majors(case, size),
        },
        confidence: Confidence::Low,
    })
}

/// A note for the Rubies that request a major cycle even where the heap may grow without one: the releases after them compare
/// `allocatable_slots` with what is missing (`gc_sweep_finish_heap`).
fn needless(version: &str) -> &'static str {
    let mut parts = version.split('.').map(|part| part.parse::<u32>().ok());
    match [(); 3].map(|()| parts.next().flatten()) {
        [Some(3), Some(4), Some(..=8)] => "; some of them are an error of Ruby, which 3.4.9 corrects",
        [Some(4), Some(0), Some(..=1)] => "; some of them are an error of Ruby, which 4.0.2 corrects",
        _ => "",
    }
}

/// Checks that a heap grows as far as the goal says: by `(1 - free) / (1 - goal)`, where less than the minimum is free, unless something limits it
/// (`heap_extend_pages` in gc.c up to 3.3, `heap_allocatable_slots_expand` from 3.4).
fn goal_counts(case: &Case<'_>, size: u64, goal: f64, min: f64) -> Result<(), String> {
    let factor = case.value("RUBY_GC_HEAP_GROWTH_FACTOR");
    if goal <= 0.0 {
        return Err(format!(
            "RUBY_GC_HEAP_FREE_SLOTS_GOAL_RATIO is 0: the heap grows by RUBY_GC_HEAP_GROWTH_FACTOR ({factor:.2}) instead"
        ));
    }
    let least = (1.0 - min) / (1.0 - goal);
    if factor <= least {
        return Err(format!(
            "RUBY_GC_HEAP_GROWTH_FACTOR is {factor:.2}: the heap does not grow further with a higher goal"
        ));
    }
    let of_heaps = case.evidence.heaps.iter().filter_map(|heap| {
        let slots = heap.slots.quantile(0.9)?;
        // Up to 3.3 the step is one of pages (`growth_max_slots / HEAP_PAGE_OBJ_LIMIT`), of which a heap of larger slots has fewer slots.
        Some(if case.series < Series(3, 4) { slots * heap.slot / SLOT } else { slots })
    });
    let of_heaps = of_heaps.max();
    let heap = of_heaps.filter(|_| case.series >= Series(3, 2)).unwrap_or(size);
    let (name, in_force) = if case.series >= Series(4, 1) {
        let name = "RUBY_GC_HEAP_GROWTH_MAX_BYTES";
        (name, case.value(name) / SLOT as f64)
    } else {
        let name = "RUBY_GC_HEAP_GROWTH_MAX_SLOTS";
        (name, case.value(name))
    };
    let step = case.growth_step.unwrap_or(in_force);
    if step > 0.0 && step <= heap as f64 * (least - 1.0) {
        let whose = if case.growth_step.is_some() { "in this plan" } else { "in force" };
        return Err(format!(
            "{name} ({whose}) limits each step to {step} slots: the heap does not grow further with a higher goal"
        ));
    }
    Ok(())
}

/// Returns unneeded pages to the system.
pub(super) fn return_memory(case: &Case<'_>) -> Verdict {
    case.memory()?;
    let evidence = case.evidence;
    enough(evidence.free_share.n(), "ends of major cycles that were seen")?;
    let free = quantile(&evidence.free_share, 0.5, "ends of major cycles")? as f64 / 1000.0;
    let (size, live) = case.heap()?;
    let max = case.value("RUBY_GC_HEAP_FREE_SLOTS_MAX_RATIO");
    if free <= 0.45 {
        return Err(format!("{} of the heap is free after major cycles", percent(free)));
    }
    if max <= 0.40 {
        return Err(format!("RUBY_GC_HEAP_FREE_SLOTS_MAX_RATIO is {max:.2} already"));
    }
    let set = vec![
        case.change("RUBY_GC_HEAP_FREE_SLOTS_MIN_RATIO", Setting::Hundredths(10))?,
        case.change("RUBY_GC_HEAP_FREE_SLOTS_GOAL_RATIO", Setting::Hundredths(20))?,
        case.change("RUBY_GC_HEAP_FREE_SLOTS_MAX_RATIO", Setting::Hundredths(40))?,
    ];
    let (floor, by) = kept_free(case);
    let (by_ratio, kept) = ((live as f64 / 0.6) as u64, live.saturating_add(floor));
    let slots = by_ratio.max(kept);
    if kept > by_ratio && (kept > size || !is_other(kept as f64, size as f64)) {
        return Err(format!(
            "the heap of {size} slots would keep {slots}: Ruby releases none of the last {floor} free slots{by}"
        ));
    }
    Ok(Advice {
        rule: "",
        set,
        why: format!("{} of the heap is free after major cycles", percent(free)),
        evidence: vec![
            Measure {
                metric: "free share of the heap after major cycles (median)",
                value: free,
                n: evidence.free_share.n(),
            },
            Measure {
                metric: "heap_live_slots after major cycles (median)",
                value: live as f64,
                n: evidence.live.n(),
            },
        ],
        effect: Effect {
            text: format!(
                "the heap shrinks from {size} to {slots} slots at best: only pages without any live object go back; more cycles"
            ),
            metric: "heap slots",
            factor: Some(slots as f64 / size.max(1) as f64),
            price: price::shrinking(case, size.saturating_sub(slots)),
        },
        confidence: case.confidence(evidence.free_share.n()),
    })
}

/// The number of free slots that Ruby always keeps (`if (max_free_slots < total_init_slots)` in `gc_marks_finish`), and the variables that make it
/// larger than by default. 4.1 counts in bytes, of which no rule knows enough yet.
fn kept_free(case: &Case<'_>) -> (u64, String) {
    let names: &[&str] = match case.series {
        series if series <= Series(3, 2) => &["RUBY_GC_HEAP_INIT_SLOTS"],
        series if series <= Series(4, 0) => &HEAPS,
        _ => &[],
    };
    let values: Vec<(&str, f64, f64)> =
        names.iter().filter_map(|name| Some((*name, case.value(name), variable(name)?.default))).collect();
    let raised = values.iter().filter(|(_, value, default)| value > default);
    let raised: Vec<String> = raised.map(|(name, value, _)| format!("{name} is {value}")).collect();
    let by = if raised.is_empty() { String::new() } else { format!(" ({})", raised.join(", ")) };
    (values.iter().map(|(_, value, _)| *value as u64).fold(0, u64::saturating_add), by)
}

/// Keeps the heap from growing by more than it needs.
pub(super) fn growth_step(case: &Case<'_>) -> Verdict {
    const NAME: &str = "RUBY_GC_HEAP_GROWTH_MAX_SLOTS";
    let evidence = case.evidence;
    let (steps, sets) = (evidence.growth.n(), evidence.sets);
    if steps < 3 {
        return Err(format!("steps of growth of the heap: {steps}; at least 3 are needed"));
    }
    // Any program reaches three if it is observed for long enough.
    if steps.saturating_mul(2) < sets {
        return Err(format!("the heap grew only {steps} times in {sets} sets"));
    }
    let (size, _) = case.heap()?;
    let (unit, n, metric) = if evidence.unit_objects.n() >= MIN_UNITS {
        let unit = quantile(&evidence.unit_objects, 0.9, "units of work")?;
        (unit, evidence.unit_objects.n(), "objects allocated in a unit of work (P90)")
    } else {
        // The objects allocated until malloc starts a cycle do not show the number of slots needed.
        let (malloc, slots) = (evidence.minors_by("malloc"), evidence.minors_by("newobj"));
        if malloc > slots {
            return Err(format!(
                "malloc begins {malloc} minor cycles and a lack of free slots only {slots}: how many slots are needed at once is not known"
            ));
        }
        let interval = quantile(&evidence.intervals, 0.5, "pairs of neighbouring cycles")?;
        (interval, evidence.intervals.n(), "objects allocated between two cycles (median)")
    };
    let wanted = if case.strategy == Strategy::Speed { unit } else { unit / 2 };
    let slots = wanted.min(size / 4).max(10 * case.series.page_slots());
    let step = evidence.growth.max();
    let change = case.change(NAME, Setting::Size(slots))?;
    // A value that was derived from other figures of the same program is acceptable, too.
    if change.current > 0.0 && change.current <= slots as f64 * 4.0 {
        return Err(format!("{NAME} is {} already", change.current));
    }
    if step <= slots.saturating_mul(2) {
        return Err(format!("the largest step of growth was {step} slots, which is acceptable"));
    }
    Ok(Advice {
        rule: "",
        set: vec![change],
        why: format!("the heap grew by up to {step} slots at once"),
        evidence: vec![
            Measure { metric: "largest step of growth, slots", value: step as f64, n: evidence.growth.n() },
            Measure { metric, value: unit as f64, n },
        ],
        effect: Effect {
            text: format!("the heap overshoots by at most {slots} slots instead of {step}"),
            metric: "largest step of growth",
            factor: Some(slots as f64 / step as f64),
            price: price::nothing(evidence),
        },
        confidence: case.confidence(evidence.growth.n()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tune::{Evidence, Report, recommend, tests::everything};

    /// A heap of this size that has so many live slots after major cycles.
    fn sized(size: u64, live: u64, environment: &[(&str, &str)]) -> Evidence {
        let mut evidence = everything();
        (evidence.available, evidence.live) = Default::default();
        for _ in 0..100 {
            evidence.available.add(size);
            evidence.live.add(live);
        }
        let set = environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        evidence.environment = set.collect();
        evidence
    }

    /// What a rule says in the plan for a strategy: its effect, or why it gives no advice.
    fn says(report: &Report, strategy: Strategy, rule: &str) -> Result<String, String> {
        let plan = report.plans.iter().find(|plan| plan.strategy == strategy).unwrap();
        let advice = plan.advice.iter().find(|advice| advice.rule == rule);
        advice
            .map(|advice| advice.effect.text.clone())
            .ok_or_else(|| plan.refusals.iter().find(|refusal| refusal.rule == rule).unwrap().reason.clone())
    }

    /// Ruby keeps as many free slots as it starts with: a heap that needs them anyway does not shrink.
    #[test]
    fn slots_that_ruby_keeps() {
        let says = |series, size, live, environment: &[_]| {
            let report = recommend(series, &sized(size, live, environment));
            says(&report, Strategy::Memory, "return-memory")
        };
        let millions = [("RUBY_GC_HEAP_INIT_SLOTS", "1000000")];
        let refusal = says(Series(3, 1), 1_000_000, 400_000, &millions).unwrap_err();
        assert_eq!(
            refusal,
            "the heap of 1000000 slots would keep 1400000: Ruby releases none of the last 1000000 free slots (RUBY_GC_HEAP_INIT_SLOTS is 1000000)"
        );
        let refusal = says(Series(3, 4), 80_000, 40_000, &[]).unwrap_err();
        assert!(
            refusal.ends_with("would keep 90000: Ruby releases none of the last 50000 free slots"),
            "{refusal}"
        );
        let advised = |environment: &[_]| says(Series(3, 4), 1_000_000, 400_000, environment).unwrap();
        assert!(advised(&[]).contains(" to 666666 slots"), "{}", advised(&[]));
        let one = [("RUBY_GC_HEAP_0_INIT_SLOTS", "300000")];
        assert!(advised(&one).contains(" to 740000 slots"), "{}", advised(&one));
        assert!(says(Series(3, 1), 1_000_000, 400_000, &[]).is_ok());
    }

    /// A higher goal of free slots is advised only where the heap grows as far as the goal says.
    #[test]
    fn goals_without_effect() {
        const STEP: &str = "RUBY_GC_HEAP_GROWTH_MAX_SLOTS";
        // Room is not needed: no other rule sets the ratios.
        let steady = |environment: &[_]| {
            let mut evidence = sized(400_000, 200_000, environment);
            (evidence.growth, evidence.intervals) = Default::default();
            evidence.minors.insert("newobj".to_owned(), 900);
            evidence
        };
        let says = |series, environment: &[_]| {
            says(&recommend(series, &steady(environment)), Strategy::Speed, "no-free-majors")
        };
        for series in [Series(2, 4), Series(3, 1)] {
            assert!(says(series, &[]).is_ok(), "{:?}", says(series, &[]));
            for (name, value, why) in [
                ("RUBY_GC_HEAP_FREE_SLOTS_GOAL_RATIO", "0", "GOAL_RATIO is 0: the heap grows by"),
                ("RUBY_GC_HEAP_GROWTH_FACTOR", "1.3", "FACTOR is 1.30: the heap does not grow further"),
                (STEP, "100000", "MAX_SLOTS (in force) limits each step to 100000 slots"),
            ] {
                let refusal = says(series, &[(name, value)]).unwrap_err();
                assert!(refusal.contains(why), "{series}: {refusal}");
            }
            assert!(says(series, &[("RUBY_GC_HEAP_GROWTH_FACTOR", "1.5")]).is_ok());
            assert!(says(series, &[(STEP, "200000")]).is_ok());
        }
        for series in [Series(2, 4), Series(2, 7), Series(3, 1)] {
            let report = recommend(series, &everything());
            let plan = report.speed();
            assert!(plan.advice.iter().any(|advice| advice.rule == "growth-step"), "{report}");
            assert!(plan.advice.iter().all(|advice| advice.rule != "no-free-majors"), "{report}");
            let refusal = self::says(&report, Strategy::Speed, "no-free-majors").unwrap_err();
            assert!(refusal.contains("(in this plan) limits each step"), "{refusal}");
        }
    }

    /// Some releases request major cycles by an error of their own.
    #[test]
    fn needless_majors() {
        for (version, corrected) in [
            ("3.4.1", "3.4.9"),
            ("3.4.8", "3.4.9"),
            ("4.0.0", "4.0.2"),
            ("4.0.1", "4.0.2"),
            ("3.4.9", ""),
            ("4.0.2", ""),
            ("3.3.8", ""),
            ("3.4", ""),
            ("", ""),
        ] {
            let note = needless(version);
            assert_eq!(note.is_empty(), corrected.is_empty(), "{version}");
            assert!(note.contains(corrected), "{version}: {note}");
        }
    }
}
