//! Room in the heap for more objects between two cycles.

use super::{
    Case, GC_GOAL, GC_SHARE, MIN_UNITS, RATIOS, Verdict,
    heap::{initial_sizes, is_other},
    hundredths, percent, price, quantile, share,
    trade_off::{is_gamble, worth},
};
use crate::tune::{Advice, Change, Effect, Evidence, Measure, Series, Setting, heaps::Heap};

/// Makes room for more objects between two cycles.
pub(super) fn free_slots(case: &Case<'_>) -> Verdict {
    case.speed()?;
    let evidence = case.evidence;
    let by_slots = share(evidence.minors_by("newobj"), evidence.all_minors());
    case.often(evidence.minors_by("newobj"), "minor cycles that began because no free slot was left")?;
    if by_slots < 0.5 {
        return Err(format!(
            "only {} of the minor cycles begin because no free slot is left",
            percent(by_slots)
        ));
    }
    let interval = quantile(&evidence.intervals, 0.5, "pairs of neighbouring cycles")?.max(1);
    let (size, live) = case.heap()?;
    let (wanted, why, mut measures) = wanted_room(case, interval)?;
    // At most twice the heap, and at most four times the live slots, so that repeated raises do not accumulate.
    let (twice, fourfold) = (2 * size, live.saturating_mul(4).max(size));
    let most = twice.min(fourfold).saturating_sub(live);
    let until = until_malloc(evidence, interval);
    let how = How::of(case);
    let room = if how == How::Ratios { wanted.min(most) } else { wanted.min(most).min(until) };
    let least = interval + interval / 4;
    if room < least {
        return Err(if wanted < least {
            format!("{why}: room for {wanted} would be less than a quarter more")
        } else if how != How::Ratios && until < most {
            format!(
                "malloc begins a cycle about every {until} objects; raise the limits of malloc first, then trace again"
            )
        } else if twice <= fourfold {
            "the heap would have to become more than twice as large".to_owned()
        } else {
            format!("the heap would have to become more than four times as large as its {live} live slots")
        });
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
    if how != How::Ratios {
        measures.push(Measure {
            metric: "heap_available_slots (P90, settled)",
            value: size as f64,
            n: evidence.available.n(),
        });
    }
    let minors = Minors { interval, size, live, until };
    // Half or a quarter of the room may be worth its price if all of it is not. An allowance is not a size: the price of a part of it
    // is unknown.
    let parts: &[f64] = if how == How::Allowance { &[1.0] } else { &[1.0, 0.5, 0.25] };
    let mut poor = None;
    for part in parts {
        let room = interval + ((room - interval) as f64 * part) as u64;
        if room < least {
            break;
        }
        let (set, slots) = match minors.with_room(case, how, room) {
            Ok(sizes) => sizes,
            Err(reason) => return Err(poor.unwrap_or(reason)),
        };
        let factor = interval as f64 / room as f64;
        let advice = Advice {
            rule: "",
            set,
            why: why.clone(),
            evidence: measures.clone(),
            effect: Effect {
                text: format!(
                    "about {:.0} % fewer minor cycles that begin because no free slot is left; the heap grows from {size} to about {slots} slots; \
                     sweeping remains the same work",
                    (1.0 - factor) * 100.0
                ),
                metric: "minor cycles by newobj",
                factor: Some(factor),
                price: price::slots(case, slots.saturating_sub(size), factor),
            },
            confidence: case.confidence(evidence.intervals.n()),
        };
        if is_gamble(case, &advice.effect.price) {
            poor.get_or_insert_with(|| {
                "not worth it: little of the time would likely be saved, and it may take longer by more than that".to_owned()
            });
            continue;
        }
        match worth(case, advice) {
            Ok(advice) => return Ok(advice),
            Err(reason) => _ = poor.get_or_insert(reason),
        }
    }
    Err(poor.unwrap_or_default())
}

/// Figures of the cycles that begin because no free slot is left.
#[derive(Clone, Copy, Debug)]
struct Minors {
    /// Objects allocated between two cycles.
    interval: u64,
    /// Slots of the heap.
    size: u64,
    /// Live slots after major cycles.
    live: u64,
    /// Objects allocated between two cycles that malloc starts.
    until: u64,
}

impl Minors {
    /// The settings for this much room, and the resulting number of slots of the heap.
    fn with_room(self, case: &Case<'_>, how: How<'_>, room: u64) -> Result<(Vec<Change>, u64), String> {
        let Self { interval, size, live, until } = self;
        Ok(match how {
            How::Initial => {
                // A full heap holds the objects that one interval allocates, those that are live, and those not found dead.
                let slots = case.series.whole_pages(size.saturating_sub(interval) + room);
                let current = case.value("RUBY_GC_HEAP_INIT_SLOTS");
                if !is_other(slots as f64, current) {
                    return Err(format!(
                        "it already starts with {current} slots, and {slots} are not much more"
                    ));
                }
                (vec![case.change("RUBY_GC_HEAP_INIT_SLOTS", Setting::Size(slots))?], slots)
            }
            How::Allowance => {
                let slots = case.series.whole_pages(room);
                if !is_other(slots as f64, case.value("RUBY_GC_HEAP_INIT_SLOTS")) {
                    return Err(format!("{slots} slots of each heap are free after a cycle already"));
                }
                let set = vec![case.change("RUBY_GC_HEAP_INIT_SLOTS", Setting::Size(slots))?];
                (set, (live + room).max(size))
            }
            How::EachHeap(heaps) => {
                let times = room as f64 / interval as f64;
                let set = initial_sizes(case, heaps, &|heap| with_room(heap, times))?;
                let more: u64 =
                    heaps.iter().map(|heap| ((times - 1.0) * heap.interval() as f64) as u64).sum();
                (set, size.saturating_add(more))
            }
            How::Ratios => {
                // Room that is never used up is harmful here: malloc starts a cycle first, which finds fewer free slots than required and
                // therefore requests a major one (`gc_marks_finish`); but the heap grows only if a program runs out of slots.
                if room > until {
                    return Err(format!(
                        "malloc begins a cycle about every {until} objects, before room for {room} is used, and Ruby would begin major \
                         cycles for the slots that it misses; raise the limits of malloc first, then trace again"
                    ));
                }
                // From 3.2 on HEAP_FREE_SLOTS makes no heap grow: `gc_marks_finish` only requests a major cycle because of it.
                // A heap grows by its own ratio of free slots (`gc_sweep_finish_heap`).
                (ratios(case, room as f64 / (live + room) as f64)?, (live + room).max(size))
            }
        })
    }
}

/// The means by which a Ruby is given room.
#[derive(Clone, Copy, Debug, PartialEq)]
enum How<'a> {
    /// Up to 3.1 the single heap begins with `HEAP_INIT_SLOTS` and never releases these pages (`gc_marks_finish`: `max_free_slots`).
    /// `HEAP_FREE_SLOTS` is no alternative: the heap grows to it by major cycles, and each cycle that finds fewer makes another one major.
    Initial,
    /// On 3.2 each heap may grow until `HEAP_INIT_SLOTS` of its slots are free after a cycle (`gc_sweep_finish_size_pool`): an allowance of
    /// pages, used only by the heaps that need it.
    Allowance,
    /// From 3.3 on each heap has its own `HEAP_i_INIT_SLOTS`, to which it grows without a cycle, and which it never releases.
    EachHeap(&'a [Heap]),
    /// [`Self::EachHeap`] for sets without the sizes of heaps: a share of free slots.
    Ratios,
}

impl<'a> How<'a> {
    fn of(case: &Case<'a>) -> Self {
        match case.heaps() {
            _ if case.series <= Series(3, 1) => Self::Initial,
            _ if case.series == Series(3, 2) => Self::Allowance,
            Some(heaps) => Self::EachHeap(heaps),
            None => Self::Ratios,
        }
    }

    /// Maximum factor on room. It may be larger if only heaps that are short of slots use it.
    fn most_times(self) -> f64 {
        match self {
            Self::Initial | Self::Ratios => 4.0,
            Self::Allowance | Self::EachHeap(_) => 16.0,
        }
    }
}

/// The size of a heap that has room for `times` as much as it allocates in an interval.
fn with_room(heap: &Heap, times: f64) -> u64 {
    let size = heap.slots.quantile(0.9).unwrap_or(0);
    size.saturating_add(((times - 1.0) * heap.interval() as f64) as u64)
}

/// Number of objects allocated between two cycles that malloc started: one interval for each cycle in between that a lack of slots started, and
/// half of another one.
fn until_malloc(evidence: &Evidence, interval: u64) -> u64 {
    let by_malloc = evidence.minors_by("malloc") + evidence.majors_by("oldmalloc");
    if by_malloc == 0 {
        return u64::MAX;
    }
    (interval as f64 * (evidence.minors_by("newobj") as f64 / by_malloc as f64 + 0.5)) as u64
}

/// Number of objects that should fit between two cycles, with the reason and the figures behind it.
fn wanted_room(case: &Case<'_>, interval: u64) -> Result<(u64, String, Vec<Measure>), String> {
    let evidence = case.evidence;
    if evidence.unit_objects.n() >= MIN_UNITS {
        let unit = quantile(&evidence.unit_objects, 0.9, "units of work")?;
        let together = evidence.concurrency.quantile(0.9).unwrap_or(1).max(1);
        let room = unit.saturating_mul(together);
        if room <= interval {
            // Small units in a program that spends much of its time in the GC: HTML of fragments from a large cache, 1,600 objects per
            // request and 20 % of the time (docs/collector.md).
            let fits =
                format!("a unit of work ({unit} objects, {together} at a time) fits between two cycles");
            return room_by_share(case, interval).map_err(|why| format!("{fits}, and {why}"));
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
    room_by_share(case, interval).map_err(|why| match case.share_of_time() {
        Some(_) => why,
        None => format!(
            "{why}; usable units of work: {}; at least {MIN_UNITS} are needed",
            evidence.unit_objects.n()
        ),
    })
}

/// [`wanted_room`], derived from the share of time in the GC.
fn room_by_share(case: &Case<'_>, interval: u64) -> Result<(u64, String, Vec<Measure>), String> {
    let time = case.share_of_time().ok_or_else(|| case.no_time())?;
    if time <= GC_SHARE {
        return Err(format!(
            "the GC takes {} of the time; below {} there is little to win",
            percent(time),
            percent(GC_SHARE)
        ));
    }
    let times = (time / GC_GOAL).clamp(2.0, How::of(case).most_times());
    let why = format!(
        "the GC takes {} of the time, and most cycles begin because no free slot is left",
        percent(time)
    );
    let measure = Measure { metric: "share of time in the GC", value: time, n: case.evidence.cycles };
    Ok(((interval as f64 * times) as u64, why, vec![measure]))
}

/// Sets the minimum share of free slots of each heap after a cycle. The other two of the three variables must not be below it.
fn ratios(case: &Case<'_>, least: f64) -> Result<Vec<Change>, String> {
    let [min, goal, max] = RATIOS;
    let least = least.min(0.75);
    if least <= case.value(min) {
        return Err(format!("{min} is {:.2} already", case.value(min)));
    }
    // Ruby accepts GOAL only between the other two, and nothing above 1.
    let aim = case.value(goal).max(least + 0.05).min(0.90);
    let most = case.value(max).max(aim + 0.10).min(1.0);
    Ok(vec![
        case.change(min, hundredths(least))?,
        case.change(goal, hundredths(aim))?,
        case.change(max, hundredths(most))?,
    ])
}

#[cfg(test)]
mod tests {
    use crate::tune::{
        Evidence, Series, Setting, Strategy,
        distribution::Distribution,
        evidence::GcTime,
        heaps::Heap,
        recommend,
        tests::{everything, value_of},
    };

    /// The reason for no advice is what prevents it.
    #[test]
    fn reasons() {
        const UNIT: &str = "a unit of work allocates 60000 objects, but after 50000 the next cycle begins";
        let refusal = |series, strategy, rule: &str, evidence: &Evidence| {
            let report = recommend(series, evidence);
            let refusal = report.plan(strategy).refusals.iter().find(|refusal| refusal.rule == rule).cloned();
            refusal.unwrap_or_else(|| panic!("{rule} is given: {report}")).reason
        };
        let room = |series, evidence: &Evidence| refusal(series, Strategy::Speed, "free-slots", evidence);
        let of = |value: u64| {
            let mut all = Distribution::default();
            (0..100).for_each(|_| all.add(value));
            all
        };
        for (minors, series) in [(400, Series(3, 1)), (400, Series(3, 4)), (1900, Series(3, 1))] {
            let mut evidence = everything();
            evidence.minors.insert("malloc".to_owned(), minors);
            evidence.unit_objects = of(60_000);
            let expected = format!("{UNIT}: room for 60000 would be less than a quarter more");
            assert_eq!(room(series, &evidence), expected);
        }
        // Malloc is no bound of ratios; what they lack is slots.
        let mut full = everything();
        (full.available, full.live) = (of(60_000), of(60_000));
        full.minors.insert("malloc".to_owned(), 1_950);
        full.majors.insert("oldmalloc".to_owned(), 1_000);
        let twice = "the heap would have to become more than twice as large";
        assert_eq!(room(Series(3, 4), &full), twice);
        full.live = of(12_000);
        full.available = of(50_000);
        let fourfold = "the heap would have to become more than four times as large as its 12000 live slots";
        assert_eq!(room(Series(3, 4), &full), fourfold);
        let mut evidence = everything();
        evidence.environment.insert("RUBY_GC_HEAP_FREE_SLOTS_MAX_RATIO".to_owned(), "0.40".to_owned());
        evidence.environment.insert("RUBY_GC_HEAP_FREE_SLOTS_GOAL_RATIO".to_owned(), "0.30".to_owned());
        let max = refusal(Series(3, 4), Strategy::Memory, "return-memory", &evidence);
        assert_eq!(max, "RUBY_GC_HEAP_FREE_SLOTS_MAX_RATIO is 0.40 already");
        evidence.free_share = of(300);
        let little = refusal(Series(3, 4), Strategy::Memory, "return-memory", &evidence);
        assert_eq!(little, "30.0 % of the heap is free after major cycles");
    }

    /// A cache of 400 000 strings on Ruby 3.2, as measured: 60 % of the time in the GC, because the heap of 80-byte slots is full
    /// while the total of all heaps hides that. `HEAP_INIT_SLOTS=400000` took 0.16 times as long in the GC, and 118 MB instead of 78; the ratio
    /// of free slots made it slower.
    #[test]
    fn full_heap_among_others() {
        let mut evidence = Evidence {
            sets: 3,
            samples: 6_600,
            seconds: 48.0,
            cycles: 3_300,
            settled: 3,
            minors: [("newobj".to_owned(), 3_234)].into(),
            majors: [("oldgen".to_owned(), 36), ("nofree".to_owned(), 30)].into(),
            time: Some(GcTime { minor_ms: 26_000, major_ms: 2_800, seconds: 48.0 }),
            objects: 3_300 * 22_000,
            ..Evidence::default()
        };
        for _ in 0..100 {
            evidence.intervals.add(22_000);
            evidence.available.add(634_000);
            evidence.live.add(600_000);
            evidence.free_share.add(54);
            evidence.old_kept.add(700);
        }
        evidence.each.peak.add(78 << 20);
        for (at, slots) in [22_000, 594_000, 9_000, 6_000, 3_000].into_iter().enumerate() {
            let mut heap = Heap { slot: 40 << at, cycles: 3_300, ..Heap::default() };
            heap.slots.add(slots);
            evidence.heaps.push(heap);
        }
        let report = recommend(Series(3, 2), &evidence);
        let Some(Setting::Size(slots)) = value_of(&report, 0, "RUBY_GC_HEAP_INIT_SLOTS") else {
            panic!("what helps is refused: {report}")
        };
        assert!((200_000..=800_000).contains(&slots), "{slots}");
        assert!(report.speed().settings().all(|change| !change.variable.ends_with("_RATIO")), "{report}");
        let advice = report.speed().advice.iter().find(|advice| advice.rule == "free-slots").unwrap();
        let price = &advice.effect.price;
        assert!(advice.effect.factor.unwrap() < 0.10 && price.likely_gc_time.unwrap() < 0.8, "{report}");
        assert!(
            price.gc_time.is_some_and(|[least, _]| least <= 0.16),
            "what was measured is in the range: {report}"
        );
        let peak = price.peak_rss.unwrap().map(|bytes| bytes / 1_048_576.0);
        assert!(peak[0] <= 118.0 && peak[1] >= 118.0, "what was measured is in the range: {report}");
        // If it is in force, it is not advised again.
        evidence.environment.insert("RUBY_GC_HEAP_INIT_SLOTS".to_owned(), slots.to_string());
        assert_eq!(value_of(&recommend(Series(3, 2), &evidence), 0, "RUBY_GC_HEAP_INIT_SLOTS"), None);
    }
}
