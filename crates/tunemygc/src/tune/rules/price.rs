//! What advice costs, as ranges: where the sets give no better figure, the range is wide.
//!
//! Measured: loops of 60 kB strings with the limits of malloc doubled, on 2.7 to 4.0 (docs/collector.md).

use super::Case;
use crate::tune::{Evidence, Price};

/// Bytes of the smallest slot.
const SLOT: f64 = 40.0;
/// Factor from the raise of malloc's limits to the growth of the memory peak, from the least to the most that was measured.
/// Garbage of several cycles waits to be swept, and the allocator keeps holes.
const GARBAGE: [f64; 2] = [0.4, 8.0];
/// Factor on majors when minors became fewer: objects that outlive more garbage are found old by majors.
const MAJORS: [f64; 2] = [0.5, 7.0];

/// The same memory and time as before.
pub(super) fn nothing(evidence: &Evidence) -> Price {
    let now = peak(evidence);
    Price { peak_rss: now.map(|now| [now, now * 1.1]), peak_rss_now: now, majors: None, gc_time: None }
}

/// This many more slots; `factor` is on the cycles that they save.
pub(super) fn slots(case: &Case<'_>, more: u64, factor: f64) -> Price {
    // Marking decreases with the cycles, sweeping stays the same work.
    Price { gc_time: Some([factor * 0.7, 1.0]), majors: Some([0.3, 1.2]), ..growth(case, more) }
}

/// This many more slots.
pub(super) fn growth(case: &Case<'_>, more: u64) -> Price {
    let evidence = case.evidence;
    let Some(now) = peak(evidence) else { return Price::default() };
    let heaps = &evidence.heaps;
    let (bytes, slots) = heaps.iter().fold((0.0, 0.0), |(bytes, slots), heap| {
        let n = heap.slots.median().unwrap_or(0) as f64;
        (bytes + n * heap.slot as f64, slots + n)
    });
    let slot = if slots > 0.0 { bytes / slots } else { SLOT };
    let size = evidence.available.median().unwrap_or(0).max(1) as f64;
    // Garbage in the added slots holds memory outside the heap, at most as much as each object does now.
    let outside = (now / size - slot).max(0.0);
    let more = more as f64;
    Price {
        peak_rss: Some([now + more * slot * 0.5, now + more * (slot + outside)]),
        peak_rss_now: Some(now),
        majors: None,
        gc_time: None,
    }
}

/// Limits of malloc that are higher by `more` bytes; the number of cycles that they start is multiplied by `factor`.
pub(super) fn garbage(evidence: &Evidence, more: f64, factor: f64) -> Price {
    let now = peak(evidence);
    Price {
        peak_rss: now.map(|now| GARBAGE.map(|times| now + times * more)),
        peak_rss_now: now,
        majors: Some(MAJORS),
        gc_time: Some([factor * 0.7, 1.0]),
    }
}

/// The peak of resident memory of most sets, bytes.
fn peak(evidence: &Evidence) -> Option<f64> {
    let peak =
        evidence.each.peak.quantile(0.9).or_else(|| (evidence.rss.n() > 0).then(|| evidence.rss.max()));
    peak.map(|peak| peak as f64)
}
