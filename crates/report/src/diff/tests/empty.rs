//! Recordings in which there was nothing of what is compared.

use super::*;

/// A recording of 20 seconds of a process that did nothing.
fn idle(name: &'static str) -> Side {
    let mut side = Side::new(name, all(), Chosen::default());
    let (process, ended) = (process("shop"), BEGAN + 20 * SECOND);
    side.see(&process, Seen::Process { state: None, now_ns: BEGAN - 5, since_ns: BEGAN - 5 });
    side.began(BEGAN);
    let end = ProcessEnd {
        reason: EndReason::Detached,
        ts_ns: ended,
        since_ns: BEGAN,
        outside_ns: 0,
        beyond_ns: 0,
        shutdown: None,
        cycles: 0,
        before: CyclesBefore::Unknown,
        lost: 0,
    };
    side.see(&process, Seen::Ended(&end));
    side.closed(ended);
    side.account(&Ledger { kernel: Some(vec![0; Counter::ALL.len()]), ..Ledger::default() });
    side
}

/// Every condition that cannot be judged says why, and what does not exist is not too short.
#[test]
fn reasons() {
    let comparison = Comparison::of(&mut idle("A"), &mut idle("B"));
    let judged = |text: String| text.parse::<Condition>().unwrap().judge(&comparison);
    for (metric, unit, _) in METRICS {
        for bound in [
            "+20%",
            if unit == Unit::Time {
                "50ms"
            } else if unit == Unit::Share {
                "3%"
            } else {
                "12"
            },
        ] {
            let judged = judged(format!("{metric} > {bound}"));
            assert_eq!(judged.outcome == Outcome::Unknown, !judged.why.is_empty(), "{judged:?}");
            assert!(!judged.why.contains("too short"), "{judged:?}");
        }
    }
    let why = |metric| judged(format!("{metric} > +20%")).why;
    assert_eq!(why("request.gc.share"), "not tested: no value in A and B");
    assert_eq!(why("gvl.wait.share"), "not tested: no value in A and B");
    assert_eq!(why("request.p95"), "not tested: no value in A and B");
    let rate = ["A", "B"]
        .map(|name| format!("waits a second: {name} has no waits by second of the chosen processes"));
    assert_eq!(why("gvl.wait.rate"), rate.join("; "));
    let one = Comparison::of(&mut record("A", AS_EVER, 1), &mut idle("B"));
    let judged = "request.gc.share > +20%".parse::<Condition>().unwrap().judge(&one);
    assert_eq!(judged.why, "not tested: no value in B");
}
