//! Quantiles of requests and pauses.

use super::*;
use crate::aggregate::service_requests::tests;

/// A few slow requests are beyond the median, but not beyond the 95 % quantile.
#[test]
fn quantiles() {
    /// Number of requests in a recording, and of additional slow ones: 7.7 % of the total.
    const ALL: u64 = AS_EVER.seconds * 20;
    const SLOW: u64 = ALL / 12;
    let with_slow = |name, seed| {
        let mut side = record(name, AS_EVER, seed);
        for at in 0..SLOW {
            let begin_ns = BEGAN + at * AS_EVER.seconds * SECOND / SLOW;
            let request = tests::request(Some("/slow"), None, Some(200));
            let end_ns = Some(begin_ns + 10 * SECOND);
            side.see(&process("shop"), Seen::Request(&Request { begin_ns, end_ns, ..request }));
        }
        side
    };
    let comparison = Comparison::of(&mut record("A", AS_EVER, 1), &mut with_slow("B", 2));
    let seconds = |metric: &str| {
        let Figure { a, b, .. } = figure(&comparison, metric);
        [a, b].map(|ns| ns.unwrap() / SECOND as f64)
    };
    let [[median_of_a, median_of_b], [p95_of_a, p95_of_b]] = ["request.p50", "request.p95"].map(seconds);
    assert!(median_of_a < 0.1 && median_of_b < 0.1, "{median_of_a} {median_of_b}");
    assert!(p95_of_a < 1.0 && (p95_of_b - 10.0).abs() < 0.5, "{p95_of_a} {p95_of_b}");
}

/// A quantile of few requests is not compared with a bound, whichever side of the bound it is on.
#[test]
fn of_few() {
    let few = Program { seconds: 4, ..AS_EVER };
    let comparison = Comparison::of(&mut record("A", AS_EVER, 1), &mut record("B", few, 2));
    assert!(figure(&comparison, "request.p95").b.is_some());
    for condition in ["request.p95 > 1us", "request.p95 > 1000s", "request.p95 > +1%"] {
        let judged = condition.parse::<Condition>().unwrap().judge(&comparison);
        assert_eq!(
            (judged.outcome, judged.why.as_str()),
            (Outcome::Unknown, "not tested: too few"),
            "{condition}"
        );
    }
}

/// A bound just below a figure is exceeded, but by no more than noise.
#[test]
fn just_below() {
    let comparison = compared(AS_EVER, Program { pause: 1.5, ..AS_EVER }, 13);
    let p50 = figure(&comparison, "gc.pause.p50").b.unwrap();
    let condition = format!("gc.pause.p50 > {}us", p50 / 1e3 * 0.9999);
    let judged = condition.parse::<Condition>().unwrap().judge(&comparison);
    assert_eq!((judged.outcome, judged.within_noise), (Outcome::Held, true), "{judged:?}");
}
