//! Costs of advice, as ranges: if the sets give no better figure, the range is wide.
//!
//! Measured: six programs on 2.7 to 3.4, and a web application (docs/collector.md, "How good are the predictions?").

use super::{Case, SLOT, share, trade_off::trade_off};
use crate::tune::{Advice, Evidence, Price, Series};

/// Growth of the memory peak as a multiple of the raise of the malloc limits: the smallest and the largest that were measured.
/// Garbage of several cycles waits to be swept, and the allocator leaves holes.
const GARBAGE: [f64; 2] = [-0.6, 8.0];
/// The likely multiple.
const LIKELY_GARBAGE: f64 = 3.0;
/// The likely multiple on 3.2, where more was measured than on its neighbours (7.4 instead of 4.6 to 5.3 for the same program).
const LIKELY_GARBAGE_OF_3_2: f64 = 5.0;
/// Factor by which two runs of the same program differ.
const NOISE: f64 = 1.05;
/// Factor on the number of majors when there are fewer minors: objects that outlive more garbage are found old by majors.
const MAJORS: [f64; 2] = [0.3, 7.0];
/// Factor on the number of majors when the heap has more room: fewer cycles find too few free slots.
const MAJORS_WITH_ROOM: [f64; 2] = [0.0, 2.5];
/// The likely factor on the number of majors when the heap has more room.
const LIKELY_MAJORS: f64 = 0.4;
/// Malloc counts as a cause if it starts at least one in this many cycles.
const MALLOC_PART: u64 = 4;
/// Share of the time of a minor cycle that is saved by avoiding it: least, likely and most. Sweeping remains the same work for the
/// same garbage, survivors are marked in fewer cycles as well, and a larger heap has more misses in the caches of the CPU.
const MINOR: [f64; 3] = [-0.3, 0.33, 0.95];
/// The least share in a heap that fits into such a cache until it has more room.
const CACHED: f64 = -0.6;
/// The largest such heap, bytes.
const CACHE: f64 = 4_194_304.0;
/// Share of the time of a major cycle that is saved by avoiding it. Most of it is marking everything that lives.
const MAJOR: [f64; 3] = [0.6, 0.85, 1.0];

/// Maximum factor by which heaps of 4.0 grow beyond the requested size: a loop of requests was advised 401,310 and 64,622 slots of two heaps and had
/// 538,703 and 64,592, and 55 empty pages instead of 21 (4.0.5; peak of 57 instead of 25 MiB). On 3.3 and 3.4 they grew as requested.
const BEYOND: f64 = 2.5;

/// Factor on the time in the GC if a heap of one slot size has its final size from the start (up to 3.1): a long-running program
/// saves the cycles at its start; the cycles of short ones took 1.2 to 2.0 times as long (docs/collector.md).
const INITIAL: [f64; 2] = [0.5, 2.0];

/// Factor on the memory peak in that case. Fewer cycles at the start leave more garbage of malloc: × 1.0 to 1.2 were measured.
const INITIAL_PEAK: [f64; 2] = [0.85, 1.3];

/// Price of a heap that has its final size from the start.
pub(super) fn initial(case: &Case<'_>) -> Price {
    let price = nothing(case.evidence);
    Price {
        gc_time: may_take_longer(case).then_some(INITIAL),
        peak_rss: price.peak_rss_now.map(|now| INITIAL_PEAK.map(|times| now * times)),
        ..price
    }
}

/// Whether cycles of short programs take longer in a heap that is large from the start.
pub(super) fn may_take_longer(case: &Case<'_>) -> bool {
    case.series <= Series(3, 1)
}

/// Price of a change that leaves memory and time as they are.
pub(super) fn nothing(evidence: &Evidence) -> Price {
    let now = peak(evidence);
    Price {
        peak_rss: now.map(|now| [now * 0.85, now * 1.1]),
        peak_rss_now: now,
        likely_peak_rss: now,
        ..Price::default()
    }
}

/// Whether the time in the GC depends on the share of the CPU's caches that the program gets, so that only its range is known: up to 3.1, in a heap
/// that such a cache holds in part, and no longer holds with more room. A loop of requests (3.1.2, a heap of 8 MB that got 15) took × 0.89 to 1.12 of
/// its time in the GC within one day on the same machine, with a quarter of the majors; × 0.60 would have been likely.
pub(super) fn depends_on_caches(case: &Case<'_>) -> bool {
    may_take_longer(case) && heap(case.evidence) < 3.0 * CACHE
}

/// Removes the likely time in the GC from a price, so that only its range remains.
pub(super) fn without_likely_time(price: &mut Price) {
    (price.likely_gc_time, price.trade_off) = (None, None);
}

/// Total bytes of all slots.
fn heap(evidence: &Evidence) -> f64 {
    evidence.available.median().unwrap_or(0) as f64 * per_slot(evidence, 0.0).0
}

/// Price of `more` slots; `factor` applies to the number of cycles that a lack of slots starts.
pub(super) fn slots(case: &Case<'_>, more: u64, factor: f64) -> Price {
    let evidence = case.evidence;
    let mut minor = MINOR;
    if heap(evidence) < CACHE {
        minor[0] = CACHED;
    }
    let fewer = Fewer::of(minors(evidence, "newobj"), [factor; 3], minor);
    let [least, most] = MAJORS_WITH_ROOM;
    let [worst, likely] = if malloc_starts_some(evidence) { [most, 1.0] } else { [1.0, LIKELY_MAJORS] };
    let time = fewer + Fewer::of(majors(evidence, None), [worst, likely, least], MAJOR);
    let beyond = if case.series >= Series(4, 0) { BEYOND } else { 1.0 };
    growth(case, more, (more as f64 * beyond) as u64, time).with_majors(MAJORS_WITH_ROOM)
}

/// Whether malloc starts a relevant part of the cycles. In a larger heap such a cycle can find fewer free slots than required, which makes the
/// next one major (`gc_marks_finish`): long strings on 3.1 had × 1.7 and × 1.9 majors, and × 1.31 and × 1.23 of the time.
fn malloc_starts_some(evidence: &Evidence) -> bool {
    let by_malloc = evidence.minors_by("malloc") + evidence.majors_by("oldmalloc");
    by_malloc * MALLOC_PART >= evidence.all_minors() + evidence.all_majors()
}

/// Price of a heap of `size` slots that grows further at major cycles for lack of free slots, of which there are then fewer.
pub(super) fn for_majors(case: &Case<'_>, size: u64) -> Price {
    let fewer = Fewer::of(majors(case.evidence, Some("nofree")), [1.0, 0.5, 0.0], MAJOR);
    // From a goal of 40 % free slots to one of 50 %.
    growth(case, size / 5, size.saturating_mul(2) / 3, fewer)
}

/// Price of more slots: the likely and the maximum number.
fn growth(case: &Case<'_>, likely: u64, most: u64, time: Fewer) -> Price {
    let evidence = case.evidence;
    let Some(now) = peak(evidence) else { return time.price(Price::default()) };
    let (slot, outside) = per_slot(evidence, now);
    let (likely, most) = (likely as f64, most as f64);
    time.price(Price {
        peak_rss: Some([(now + likely * slot * 0.5) / NOISE, now * NOISE + most * (slot + outside * 1.5)]),
        peak_rss_now: Some(now),
        likely_peak_rss: Some(now + likely * (slot + outside / 2.0)),
        ..Price::default()
    })
}

/// Price of at most `less` fewer slots; possibly all of them stay.
pub(super) fn shrinking(case: &Case<'_>, less: u64) -> Price {
    let evidence = case.evidence;
    let known = case.share_of_time().is_some();
    // More cycles, each of which sweeps less.
    let time = Price {
        gc_time: known.then_some([1.0, 2.0]),
        likely_gc_time: known.then_some(1.3),
        ..Price::default()
    };
    let Some(now) = peak(evidence) else { return time };
    let less = (less as f64 * per_slot(evidence, now).0).min(now * 0.9);
    Price {
        peak_rss: Some([now - less, now]),
        peak_rss_now: Some(now),
        likely_peak_rss: Some(now - less / 2.0),
        ..time
    }
}

/// Bytes per slot, and bytes outside the heap per slot at a memory of `now` bytes: garbage in additional slots holds about as much.
fn per_slot(evidence: &Evidence, now: f64) -> (f64, f64) {
    let (bytes, slots) = evidence.heaps.iter().fold((0.0, 0.0), |(bytes, slots), heap| {
        let n = heap.slots.median().unwrap_or(0) as f64;
        (bytes + n * heap.slot as f64, slots + n)
    });
    let slot = if slots > 0.0 { bytes / slots } else { SLOT as f64 };
    let size = evidence.available.median().unwrap_or(0).max(1) as f64;
    (slot, (now / size - slot).max(0.0))
}

/// The likely peak with more garbage, if the time in the GC is measured. Up to 3.0 the peak grew by -0.6 to 8 times the raise, so only
/// the range is given there.
fn likely(evidence: &Evidence, peak: Option<f64>) -> Option<f64> {
    peak.filter(|_| evidence.counted_time().is_some())
}

/// Price of malloc limits that are higher by `more` bytes, which multiplies the number of cycles that they start by `factor`.
pub(super) fn garbage(case: &Case<'_>, more: f64, factor: f64) -> Price {
    let evidence = case.evidence;
    let now = peak(evidence);
    let times = if case.series == Series(3, 2) { LIKELY_GARBAGE_OF_3_2 } else { LIKELY_GARBAGE };
    let mut minor = MINOR;
    // There may be more majors.
    minor[0] = CACHED;
    let time = Fewer::of(minors(evidence, "malloc"), [factor; 3], minor);
    let price = Price {
        peak_rss: now.map(|now| GARBAGE.map(|times| (now + times * more).max(0.0))),
        peak_rss_now: now,
        likely_peak_rss: likely(evidence, now.map(|now| now + times * more)),
        ..Price::default()
    };
    time.price(price).with_majors(MAJORS)
}

/// Price of a limit of old objects' malloc that is higher by `more` bytes, which multiplies the number of major cycles that it starts by `factor`.
/// At most what may be allocated meanwhile dies meanwhile; the allocator leaves holes as with other garbage.
pub(super) fn old_garbage(evidence: &Evidence, more: f64, factor: f64) -> Price {
    let now = peak(evidence);
    let time = Fewer::of(majors(evidence, Some("oldmalloc")), [1.0, factor, factor / 2.0], MAJOR);
    let price = Price {
        peak_rss: now.map(|now| GARBAGE.map(|times| (now + times * more).max(0.0))),
        peak_rss_now: now,
        likely_peak_rss: likely(evidence, now.map(|now| now + more)),
        ..Price::default()
    };
    time.price(price).with_majors([0.0, 1.0])
}

impl Price {
    fn with_majors(self, majors: [f64; 2]) -> Self {
        Self { majors: Some(majors), ..self }
    }
}

/// Total costs and savings of several pieces of advice: memory is summed, and so are the shares of time that they save. A memory figure that is
/// unknown for one of them is unknown in total; majors and time that one of them does not state count as unchanged by it.
pub(super) fn together(advice: &[Advice], share: Option<f64>) -> Option<Price> {
    let prices = || advice.iter().map(|advice| &advice.effect.price);
    let now = prices().find_map(|price| price.peak_rss_now);
    let memory = |of: &dyn Fn(&Price) -> Option<f64>| -> Option<f64> {
        let now = now?;
        // Several savings together can exceed the memory in use.
        prices().try_fold(now, |sum, price| Some(sum + of(price)? - now)).map(|sum| sum.max(0.0))
    };
    let time = |of: &dyn Fn(&Price) -> Option<f64>| -> Option<f64> {
        let known = prices().any(|price| of(price).is_some());
        known.then(|| prices().fold(1.0, |left, price| left - (1.0 - of(price).unwrap_or(1.0))).max(0.0))
    };
    let pair = |low: Option<f64>, high: Option<f64>| Some([low?, high?]);
    let majors = prices().filter_map(|price| price.majors);
    let mut sum = Price {
        peak_rss: pair(memory(&|price| Some(price.peak_rss?[0])), memory(&|price| Some(price.peak_rss?[1]))),
        peak_rss_now: now,
        majors: majors.reduce(|[low, high], [less, more]| [low * less, high * more]),
        gc_time: pair(time(&|price| Some(price.gc_time?[0])), time(&|price| Some(price.gc_time?[1]))),
        likely_peak_rss: memory(&|price| price.likely_peak_rss),
        likely_gc_time: time(&|price| price.likely_gc_time),
        trade_off: None,
    };
    sum.trade_off = trade_off(&sum, share);
    (!advice.is_empty()).then_some(sum)
}

/// Shares by which the time in the GC decreases: least, likely, most; `None` if it is not measured.
#[derive(Clone, Copy, Debug)]
struct Fewer(Option<[f64; 3]>);

impl Fewer {
    /// The number of cycles that take the share `part` of the time in the GC is multiplied by `factor`, and avoiding a cycle saves the share
    /// `saved` of its time. The elements of both arrays are for the least, the likely and the most time saved.
    fn of(part: Option<f64>, factor: [f64; 3], saved: [f64; 3]) -> Self {
        Self(part.map(|part| {
            let [least, likely, most] = [0, 1, 2].map(|at| part * (1.0 - factor[at]) * saved[at]);
            [least.min(likely), likely, most.max(likely)]
        }))
    }

    fn price(self, price: Price) -> Price {
        let [least, likely, most] = match self.0 {
            None => return price,
            Some(shares) => shares.map(|share| (1.0 - share).max(0.0)),
        };
        Price { gc_time: Some([most, least]), likely_gc_time: Some(likely), ..price }
    }
}

impl std::ops::Add for Fewer {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self(self.0.zip(other.0).map(|(one, other)| [0, 1, 2].map(|at| one[at] + other[at])))
    }
}

/// Share of the time in the GC spent in minor cycles for this reason; `None` if the time is not measured.
fn minors(evidence: &Evidence, reason: &str) -> Option<f64> {
    let time = evidence.counted_time()?;
    let part = share(time.minor_ms, time.minor_ms.saturating_add(time.major_ms));
    Some(part * share(evidence.minors_by(reason), evidence.all_minors()))
}

/// The same for major cycles; without a reason, for all but those that the program requested.
fn majors(evidence: &Evidence, reason: Option<&str>) -> Option<f64> {
    let time = evidence.counted_time()?;
    let part = share(time.major_ms, time.minor_ms.saturating_add(time.major_ms));
    let all = evidence.all_majors();
    let wanted =
        reason.map_or_else(|| all - evidence.majors_by("force"), |reason| evidence.majors_by(reason));
    Some(part * share(wanted, all))
}

/// The P90 of the sets' peaks of resident memory, bytes; `None` if no memory is known.
pub(super) fn peak_rss(evidence: &Evidence) -> Option<u64> {
    evidence.each.peak.quantile(0.9).or_else(|| (evidence.rss.n() > 0).then(|| evidence.rss.max()))
}

fn peak(evidence: &Evidence) -> Option<f64> {
    peak_rss(evidence).map(|peak| peak as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tune::{InForce, Strategy, recommend, tests::everything};

    /// Peaks in MiB before and after the limits of malloc were raised by 32 MiB, as measured with a program that makes long strings: each is in its
    /// range, and not far from the likely one.
    #[test]
    fn measured_garbage() {
        for (series, now, measured) in [
            (Series(3, 1), 86, 241),
            (Series(3, 2), 88, 325),
            (Series(3, 4), 95, 266),
            (Series(4, 0), 89, 235),
        ] {
            let mut evidence = everything();
            evidence.each.peak.add(now << 20);
            let in_force = InForce::default();
            let case = Case {
                series,
                evidence: &evidence,
                in_force: &in_force,
                strategy: Strategy::Speed,
                leaks: &[],
                growth_step: None,
            };
            let price = garbage(&case, f64::from(32 << 20), 0.5);
            let measured = f64::from(measured << 20);
            assert!(price.peak_rss.is_some_and(|[low, high]| (low..=high).contains(&measured)), "{price:?}");
            let off = measured / price.likely_peak_rss.unwrap();
            assert!((1.0 / 1.5..1.5).contains(&off), "Ruby {series}: {off}");
        }
    }

    /// The likely growth of the peak by garbage is given only if the time in the GC is measured; its range always is.
    #[test]
    fn garbage_where_time_is_not_counted() {
        let mut counted = everything();
        counted.each.peak.add(3 << 30);
        let uncounted = Evidence { time: None, ..counted.clone() };
        for (series, evidence, is_known) in [(Series(2, 7), uncounted, false), (Series(3, 1), counted, true)]
        {
            let report = recommend(series, &evidence);
            for rule in ["malloc", "oldmalloc"] {
                let advice = report.speed().advice.iter().find(|advice| advice.rule == rule).unwrap();
                let price = &advice.effect.price;
                assert_eq!(
                    (price.likely_peak_rss.is_some(), price.peak_rss.is_some()),
                    (is_known, true),
                    "{report}"
                );
            }
            let all = report.speed().price.as_ref().unwrap();
            assert_eq!((all.likely_peak_rss.is_some(), all.peak_rss.is_some()), (is_known, true), "{report}");
            assert!(report.to_string().contains("(now 3072)") != is_known, "{report}");
        }
    }
}
