//! Size and room of the heap.

use super::{Case, GC_GOAL, GC_SHARE, MIN_UNITS, Verdict, enough, hundredths, percent, quantile, share};
use crate::tune::{Advice, Change, Confidence, Effect, Evidence, Measure, Series, Setting, Strategy};

/// A heap that has its final size from the beginning.
pub(super) fn initial_heap(case: &Case<'_>) -> Verdict {
    case.speed()?;
    let evidence = case.evidence;
    match case.series {
        Series(3, 2) => {
            return Err(
                "Ruby 3.2 gives HEAP_INIT_SLOTS to each of its five heaps alike, which wastes most of it"
                    .into(),
            );
        }
        series if series >= Series(3, 3) => {
            return Err(format!(
                "Ruby {series} wants a size for each of its heaps (GC.stat_heap), which sample sets do not tell"
            ));
        }
        _ => {}
    }
    let (size, _) = case.heap()?;
    let warmup = quantile(&evidence.warmup, 0.5, "processes that grew to their final size")?;
    let slots = case.series.whole_pages(size);
    let set = vec![case.change("RUBY_GC_HEAP_INIT_SLOTS", Setting::Size(slots))?];
    let current = case.value("RUBY_GC_HEAP_INIT_SLOTS");
    if (slots as f64 - current).abs() < (current * 0.01).max(1000.0) {
        return Err(format!("it has its final size of {slots} slots from the beginning"));
    }
    Ok(Advice {
        rule: "",
        set,
        why: format!("every process grows its heap from {current} to {slots} slots, by {warmup} cycles"),
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
                "up to {warmup} cycles less at the start of each process; memory as before, but at once"
            ),
            metric: "cycles at the start",
            factor: Some(0.0),
        },
        confidence: case.confidence(evidence.warmup.n()),
    })
}

/// Room for more objects between two cycles.
pub(super) fn free_slots(case: &Case<'_>) -> Verdict {
    case.speed()?;
    let evidence = case.evidence;
    let by_slots = share(evidence.minors_by("newobj"), evidence.all_minors());
    enough(evidence.minors_by("newobj"), "minor cycles began because no free slot was left")?;
    if by_slots < 0.5 {
        return Err(format!(
            "only {} of the minor cycles begin because no free slot is left",
            percent(by_slots)
        ));
    }
    let interval = quantile(&evidence.intervals, 0.5, "pairs of neighbouring cycles")?.max(1);
    let (size, live) = case.heap()?;
    let (wanted, why, mut measures) = wanted_room(case, interval)?;
    // Never more than twice the heap.
    let most = (2 * size).saturating_sub(live);
    let until = until_malloc(evidence, interval);
    let room = if grows_with_initial(case.series) { wanted.min(most).min(until) } else { wanted.min(most) };
    if room < interval + interval / 4 {
        let malloc = format!(
            "malloc begins a cycle about every {until} objects; raise the limits of malloc first, then trace again"
        );
        let size = "the heap would have to become more than twice as large".to_owned();
        return Err(if until < most { malloc } else { size });
    }
    measures.push(Measure {
        metric: "objects allocated between two cycles (median)",
        value: interval as f64,
        n: evidence.intervals.n(),
    });
    measures.push(Measure {
        metric: "heap_live_slots after major cycles (median)",
        value: live as f64,
        n: evidence.live.n(),
    });
    let (set, slots) = if grows_with_initial(case.series) {
        measures.push(Measure {
            metric: "heap_available_slots (P90, settled)",
            value: size as f64,
            n: evidence.available.n(),
        });
        // A full heap holds what one interval allocates, and what lives or has not been found dead.
        let slots = case.series.whole_pages(size.saturating_sub(interval) + room);
        (vec![case.change("RUBY_GC_HEAP_INIT_SLOTS", Setting::Size(slots))?], slots)
    } else {
        // Room that is never used up does harm there: malloc begins a cycle first, which finds fewer free slots than demanded and asks
        // for a major one because of that (`gc_marks_finish`); but the heap grows only where a program runs out of slots.
        if room > until {
            return Err(format!(
                "malloc begins a cycle about every {until} objects, before room for {room} is used, and Ruby would begin major \
                 cycles for the slots that it misses; raise the limits of malloc first, then trace again"
            ));
        }
        // From 3.2 on HEAP_FREE_SLOTS makes no heap grow: `gc_marks_finish` only asks for a major cycle because of it.
        // What grows a heap is its own ratio of free slots (`gc_sweep_finish_heap`).
        (ratios(case, room as f64 / (live + room) as f64)?, (live + room).max(size))
    };
    let factor = interval as f64 / room as f64;
    Ok(Advice {
        rule: "",
        set,
        why,
        evidence: measures,
        effect: Effect {
            text: format!(
                "about {:.0} % fewer minor cycles that begin because no free slot is left; the heap grows from {size} to about {slots} slots; \
                 sweeping remains the same work",
                (1.0 - factor) * 100.0
            ),
            metric: "minor cycles by newobj",
            factor: Some(factor),
        },
        confidence: case.confidence(evidence.intervals.n()),
    })
}

/// Whether the one heap begins with `HEAP_INIT_SLOTS` and never gives these pages back (`gc_marks_finish`: `max_free_slots`).
/// `HEAP_FREE_SLOTS` would not do instead: the heap grows to that by major cycles, and each cycle that finds fewer makes another one major.
fn grows_with_initial(series: Series) -> bool {
    series <= Series(3, 1)
}

/// How many objects are allocated between two cycles that malloc began: as many intervals as cycles that slots began, and the
/// beginning of another one.
fn until_malloc(evidence: &Evidence, interval: u64) -> u64 {
    let by_malloc = evidence.minors_by("malloc") + evidence.majors_by("oldmalloc");
    if by_malloc == 0 {
        return u64::MAX;
    }
    (interval as f64 * (evidence.minors_by("newobj") as f64 / by_malloc as f64 + 0.5)) as u64
}

/// How many objects should fit between two cycles.
fn wanted_room(case: &Case<'_>, interval: u64) -> Result<(u64, String, Vec<Measure>), String> {
    let evidence = case.evidence;
    if evidence.unit_objects.n() >= MIN_UNITS {
        let unit = quantile(&evidence.unit_objects, 0.9, "units of work")?;
        let together = evidence.concurrency.quantile(0.9).unwrap_or(1).max(1);
        let room = unit.saturating_mul(together);
        if room <= interval {
            return Err(format!(
                "a unit of work ({unit} objects, {together} at a time) fits between two cycles"
            ));
        }
        let measures = vec![
            Measure {
                metric: "objects allocated in a unit of work (P90)",
                value: unit as f64,
                n: evidence.unit_objects.n(),
            },
            Measure { metric: "units at a time (P90)", value: together as f64, n: evidence.concurrency.n() },
        ];
        let why =
            format!("a unit of work allocates {unit} objects, but after {interval} the next cycle begins");
        return Ok((room, why, measures));
    }
    let time = case.share_of_time().ok_or_else(|| {
        format!(
            "Ruby {} does not count its time in the GC (3.1 and later do), and there are {} units of work to go by, at \
             least {MIN_UNITS} are needed",
            case.series,
            evidence.unit_objects.n()
        )
    })?;
    if time <= GC_SHARE {
        return Err(format!(
            "the GC takes {} of the time; below {} there is little to win",
            percent(time),
            percent(GC_SHARE)
        ));
    }
    let times = (time / GC_GOAL).clamp(2.0, 4.0);
    let why = format!(
        "the GC takes {} of the time, and most cycles begin because no free slot is left",
        percent(time)
    );
    let measure = Measure { metric: "share of time in the GC", value: time, n: evidence.cycles };
    Ok(((interval as f64 * times) as u64, why, vec![measure]))
}

/// At least this share of each heap is free after a cycle. The others of the three must not be below.
fn ratios(case: &Case<'_>, least: f64) -> Result<Vec<Change>, String> {
    let [min, goal, max] = [
        "RUBY_GC_HEAP_FREE_SLOTS_MIN_RATIO",
        "RUBY_GC_HEAP_FREE_SLOTS_GOAL_RATIO",
        "RUBY_GC_HEAP_FREE_SLOTS_MAX_RATIO",
    ];
    let least = least.min(0.75);
    if least <= case.value(min) {
        return Err(format!("{min} is {:.2} already", case.value(min)));
    }
    // Ruby takes GOAL only between the other two, and nothing above 1.
    let aim = case.value(goal).max(least + 0.05).min(0.90);
    let most = case.value(max).max(aim + 0.10).min(1.0);
    Ok(vec![
        case.change(min, hundredths(least))?,
        case.change(goal, hundredths(aim))?,
        case.change(max, hundredths(most))?,
    ])
}

/// Major cycles because a minor one left too few free slots.
pub(super) fn no_free_majors(case: &Case<'_>) -> Verdict {
    case.speed()?;
    let (n, all) = (case.evidence.majors_by("nofree"), case.evidence.all_majors());
    enough(n, "major cycles because of too few free slots")?;
    if share(n, all) <= 0.30 {
        return Err(format!(
            "only {} of the major cycles are because of too few free slots",
            percent(share(n, all))
        ));
    }
    case.heap()?;
    // A heap grows only where the program runs out of slots, so a higher goal is missed again and again (see `before_malloc`).
    let (slots, malloc) = (case.evidence.minors_by("newobj"), case.evidence.minors_by("malloc"));
    if malloc > slots {
        return Err(format!(
            "malloc begins {malloc} minor cycles and want of a slot only {slots}, so the heap would not grow; raise the limits \
             of malloc first, then trace again"
        ));
    }
    let goal = case.value("RUBY_GC_HEAP_FREE_SLOTS_GOAL_RATIO");
    if goal >= 0.5 {
        return Err(format!("RUBY_GC_HEAP_FREE_SLOTS_GOAL_RATIO is {goal:.2} already"));
    }
    let (min, max) =
        (case.value("RUBY_GC_HEAP_FREE_SLOTS_MIN_RATIO"), case.value("RUBY_GC_HEAP_FREE_SLOTS_MAX_RATIO"));
    if !(min..=max).contains(&0.5) {
        return Err(format!(
            "the ratios of free slots are set to {min:.2} and {max:.2}; 0.50 is not between them"
        ));
    }
    Ok(Advice {
        rule: "",
        set: vec![case.change("RUBY_GC_HEAP_FREE_SLOTS_GOAL_RATIO", Setting::Hundredths(50))?],
        why: format!(
            "{} of the major cycles are because a minor one left too few free slots",
            percent(share(n, all))
        ),
        evidence: vec![Measure { metric: "share of major cycles by nofree", value: share(n, all), n: all }],
        effect: Effect {
            text: "the heap grows further when it grows, so it runs short less often".to_owned(),
            metric: "major cycles by nofree",
            factor: None,
        },
        confidence: Confidence::Low,
    })
}

/// Pages that are not needed go back to the system.
pub(super) fn return_memory(case: &Case<'_>) -> Verdict {
    case.memory()?;
    let evidence = case.evidence;
    enough(evidence.free_share.n(), "ends of major cycles were seen")?;
    let free = quantile(&evidence.free_share, 0.5, "ends of major cycles")? as f64 / 1000.0;
    let (size, live) = case.heap()?;
    let max = case.value("RUBY_GC_HEAP_FREE_SLOTS_MAX_RATIO");
    if free <= 0.45 || max <= 0.40 {
        return Err(format!("{} of the heap is free after major cycles", percent(free)));
    }
    let set = vec![
        case.change("RUBY_GC_HEAP_FREE_SLOTS_MIN_RATIO", Setting::Hundredths(10))?,
        case.change("RUBY_GC_HEAP_FREE_SLOTS_GOAL_RATIO", Setting::Hundredths(20))?,
        case.change("RUBY_GC_HEAP_FREE_SLOTS_MAX_RATIO", Setting::Hundredths(40))?,
    ];
    let slots = (live as f64 / 0.6) as u64;
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
        },
        confidence: case.confidence(evidence.free_share.n()),
    })
}

/// A heap that does not grow by more than it needs.
pub(super) fn growth_step(case: &Case<'_>) -> Verdict {
    const NAME: &str = "RUBY_GC_HEAP_GROWTH_MAX_SLOTS";
    let evidence = case.evidence;
    if evidence.growth.n() < 3 {
        return Err(format!("the heap grew {} times, at least 3 are needed", evidence.growth.n()));
    }
    let (size, _) = case.heap()?;
    let (unit, n, metric) = if evidence.unit_objects.n() >= MIN_UNITS {
        let unit = quantile(&evidence.unit_objects, 0.9, "units of work")?;
        (unit, evidence.unit_objects.n(), "objects allocated in a unit of work (P90)")
    } else {
        let interval = quantile(&evidence.intervals, 0.5, "pairs of neighbouring cycles")?;
        (interval, evidence.intervals.n(), "objects allocated between two cycles (median)")
    };
    let wanted = if case.strategy == Strategy::Speed { unit } else { unit / 2 };
    let slots = wanted.min(size / 4).max(10 * case.series.page_slots());
    let step = evidence.growth.max();
    let change = case.change(NAME, Setting::Size(slots))?;
    if change.current > 0.0 && change.current <= slots as f64 {
        return Err(format!("{NAME} is {} already", change.current));
    }
    if step <= slots.saturating_mul(2) {
        return Err(format!("the largest step of growth was {step} slots, which is in order"));
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
        },
        confidence: case.confidence(evidence.growth.n()),
    })
}
