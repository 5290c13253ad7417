//! What advice costs, as ranges: where the sets give no better figure, the range is wide.
//!
//! Measured: six programs on 2.7 to 3.4, and a web application (docs/collector.md, "How good are the predictions?").

use super::{Case, share, trade_off::trade_off};
use crate::tune::{Advice, Evidence, Price, Series};

/// Bytes of the smallest slot.
const SLOT: f64 = 40.0;
/// Factor from the raise of malloc's limits to the growth of the memory peak, from the least to the most that was measured.
/// Garbage of several cycles waits to be swept, and the allocator keeps holes.
const GARBAGE: [f64; 2] = [-0.6, 8.0];
/// The likely one.
const LIKELY_GARBAGE: f64 = 3.0;
/// Two runs of the same program differ by as much.
const NOISE: f64 = 1.05;
/// Factor on majors when minors became fewer: objects that outlive more garbage are found old by majors.
const MAJORS: [f64; 2] = [0.3, 7.0];
/// The same where the heap has more room: there are fewer that find too few free slots.
const MAJORS_WITH_ROOM: [f64; 2] = [0.0, 2.5];
/// The likely one.
const LIKELY_MAJORS: f64 = 0.4;
/// Malloc starts one of this many cycles, or more.
const MALLOC_PART: u64 = 4;
/// How much of the time of a minor cycle is saved with it: the least, what is likely, and the most. Sweeping stays the same work for the
/// same garbage, what survives is marked in fewer cycles as well, and a larger heap misses the caches of the CPU more often.
const MINOR: [f64; 3] = [-0.3, 0.33, 0.95];
/// The least in a heap that fits into such a cache, until it has more room.
const CACHED: f64 = -0.6;
/// The largest such heap, bytes.
const CACHE: f64 = 4_194_304.0;
/// How much of the time of a major cycle is saved with it. Most of it is marking everything that lives.
const MAJOR: [f64; 3] = [0.6, 0.85, 1.0];

/// How much more than asked for heaps of 4.0 grow at most: a loop of requests was advised 401,310 and 64,622 slots of two heaps and had 538,703 and
/// 64,592, and 55 empty pages instead of 21 (4.0.5; peak of 57 instead of 25 MiB). On 3.3 and 3.4 they grew as asked for.
const BEYOND: f64 = 2.5;

/// Factor on the time in the GC where a heap of one slot size has its final size from the beginning (up to 3.1): a program that runs for
/// long saves the cycles at its start; the cycles of short ones took 1.2 to 2.0 times as long (docs/collector.md).
const INITIAL: [f64; 2] = [0.5, 2.0];

/// Factor on the peak of the memory there. Fewer cycles at the start leave more garbage of malloc: × 1.0 to 1.2 were measured.
const INITIAL_PEAK: [f64; 2] = [0.85, 1.3];

/// The heap has its final size from the beginning.
pub(super) fn initial(case: &Case<'_>) -> Price {
    let price = nothing(case.evidence);
    Price {
        gc_time: may_take_longer(case).then_some(INITIAL),
        peak_rss: price.peak_rss_now.map(|now| INITIAL_PEAK.map(|times| now * times)),
        ..price
    }
}

/// Whether cycles of short programs take longer in a heap that is large from the beginning.
pub(super) fn may_take_longer(case: &Case<'_>) -> bool {
    case.series <= Series(3, 1)
}

/// The same memory and time as before.
pub(super) fn nothing(evidence: &Evidence) -> Price {
    let now = peak(evidence);
    Price {
        peak_rss: now.map(|now| [now * 0.85, now * 1.1]),
        peak_rss_now: now,
        likely_peak_rss: now,
        ..Price::default()
    }
}

/// Whether the time in the GC depends on how much of the CPU's caches the program gets, so that only its range can be said: up to 3.1, in a heap that
/// such a cache holds in part and with more room does not. A loop of requests (3.1.2, a heap of 8 MB that got 15) took × 0.89 to 1.12 of its time in
/// the GC within one day on the same machine, with a quarter of the majors; × 0.60 would have been likely.
pub(super) fn depends_on_caches(case: &Case<'_>) -> bool {
    may_take_longer(case) && heap(case.evidence) < 3.0 * CACHE
}

/// The same price with only the range of the time in the GC.
pub(super) fn without_likely_time(price: &mut Price) {
    (price.likely_gc_time, price.trade_off) = (None, None);
}

/// Bytes of all slots.
fn heap(evidence: &Evidence) -> f64 {
    evidence.available.median().unwrap_or(0) as f64 * per_slot(evidence, 0.0).0
}

/// This many more slots; `factor` is on the cycles that a lack of slots starts.
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

/// Whether malloc starts a part of the cycles. In a larger heap such a cycle can find fewer free slots than it should have, and the next one
/// is major because of that (`gc_marks_finish`): long strings on 3.1 had × 1.7 and × 1.9 majors, and × 1.31 and × 1.23 of the time.
fn malloc_starts_some(evidence: &Evidence) -> bool {
    let by_malloc = evidence.minors_by("malloc") + evidence.majors_by("oldmalloc");
    by_malloc * MALLOC_PART >= evidence.all_minors() + evidence.all_majors()
}

/// Up to this many more slots, because major cycles for lack of slots make the heap grow further: there are fewer of those.
pub(super) fn for_majors(case: &Case<'_>, size: u64) -> Price {
    let fewer = Fewer::of(majors(case.evidence, Some("nofree")), [1.0, 0.5, 0.0], MAJOR);
    // From a goal of 40 % free slots to one of 50 %.
    growth(case, size / 5, size.saturating_mul(2) / 3, fewer)
}

/// More slots, likely and at most.
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

/// This many slots less, at best; all of them may stay.
pub(super) fn shrinking(case: &Case<'_>, less: u64) -> Price {
    let evidence = case.evidence;
    let known = case.share_of_time().is_some();
    // More cycles, which sweep less each.
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

/// Bytes of a slot, and the bytes outside the heap for each slot now: garbage in further ones holds about as much.
fn per_slot(evidence: &Evidence, now: f64) -> (f64, f64) {
    let (bytes, slots) = evidence.heaps.iter().fold((0.0, 0.0), |(bytes, slots), heap| {
        let n = heap.slots.median().unwrap_or(0) as f64;
        (bytes + n * heap.slot as f64, slots + n)
    });
    let slot = if slots > 0.0 { bytes / slots } else { SLOT };
    let size = evidence.available.median().unwrap_or(0).max(1) as f64;
    (slot, (now / size - slot).max(0.0))
}

/// What garbage likely adds, where the time in the GC is counted. Up to 3.0 the growth of the peak was between -0.6 and 8 times the raise: there
/// only the range is meant.
fn likely(evidence: &Evidence, peak: Option<f64>) -> Option<f64> {
    peak.filter(|_| evidence.counted_time().is_some())
}

/// Limits of malloc that are higher by `more` bytes; the number of cycles that they start is multiplied by `factor`.
pub(super) fn garbage(evidence: &Evidence, more: f64, factor: f64) -> Price {
    let now = peak(evidence);
    let mut minor = MINOR;
    // Majors may become more.
    minor[0] = CACHED;
    let time = Fewer::of(minors(evidence, "malloc"), [factor; 3], minor);
    let price = Price {
        peak_rss: now.map(|now| GARBAGE.map(|times| (now + times * more).max(0.0))),
        peak_rss_now: now,
        likely_peak_rss: likely(evidence, now.map(|now| now + LIKELY_GARBAGE * more)),
        ..Price::default()
    };
    time.price(price).with_majors(MAJORS)
}

/// The limit of old objects' malloc is higher by `more` bytes; the number of major cycles that it starts is multiplied by `factor`. What dies
/// meanwhile is at most what may be allocated meanwhile; the allocator keeps holes as with other garbage.
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

/// What several advices cost and save together: memory is added up, and so are the parts of the time that they save. What one of them
/// does not know is not known of all, except for majors and time that it leaves as they are.
pub(super) fn together(advice: &[Advice], share: Option<f64>) -> Option<Price> {
    let prices = || advice.iter().map(|advice| &advice.effect.price);
    let now = prices().find_map(|price| price.peak_rss_now);
    let memory = |of: &dyn Fn(&Price) -> Option<f64>| -> Option<f64> {
        let now = now?;
        // What several save together can be more than there is.
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

/// By which shares of it the time in the GC decreases: least, likely, most; `None` where it is not counted.
#[derive(Clone, Copy, Debug)]
struct Fewer(Option<[f64; 3]>);

impl Fewer {
    /// The number of cycles that take this part of the time is multiplied by `factor`, and this much of each one's time is saved with it;
    /// both at the least, likely and at the most.
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

/// Part of the time in the GC that minor cycles for this reason take; `None` where it is not counted.
fn minors(evidence: &Evidence, reason: &str) -> Option<f64> {
    let time = evidence.counted_time()?;
    let part = share(time.minor_ms, time.minor_ms.saturating_add(time.major_ms));
    Some(part * share(evidence.minors_by(reason), evidence.all_minors()))
}

/// The same of major cycles; of all but those that were asked for, without a reason.
fn majors(evidence: &Evidence, reason: Option<&str>) -> Option<f64> {
    let time = evidence.counted_time()?;
    let part = share(time.major_ms, time.minor_ms.saturating_add(time.major_ms));
    let all = evidence.all_majors();
    let wanted =
        reason.map_or_else(|| all - evidence.majors_by("force"), |reason| evidence.majors_by(reason));
    Some(part * share(wanted, all))
}

/// The peak of resident memory of most sets, bytes.
pub(super) fn peak_rss(evidence: &Evidence) -> Option<u64> {
    evidence.each.peak.quantile(0.9).or_else(|| (evidence.rss.n() > 0).then(|| evidence.rss.max()))
}

fn peak(evidence: &Evidence) -> Option<f64> {
    peak_rss(evidence).map(|peak| peak as f64)
}

#[cfg(test)]
mod tests {
    use crate::tune::{Evidence, Series, recommend, tests::everything};

    /// What more garbage likely adds to the peak is said only where the time in the GC is counted; its range always.
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
