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

/// One in which the same waits for the GVL were watched as in others, and there were none.
fn watching(name: &'static str) -> Side {
    let mut side = idle(name);
    side.gvl.only_blocked.insert(false);
    side
}

/// A bound of B does not fail to be tested because of A.
#[test]
fn reasons_of_b() {
    let (few, many) = (Program { seconds: 4, ..AS_EVER }, AS_EVER);
    let judged = |a: &mut Side, b: &mut Side, text: &str| {
        text.parse::<Condition>().unwrap().judge(&Comparison::of(a, b))
    };
    let why = |a: &mut Side, b: &mut Side, text: &str| judged(a, b, text).why;
    let p95 = "request.p95 > 50ms";
    assert_eq!(why(&mut idle("A"), &mut record("B", few, 1), p95), "not tested: too few");
    assert_eq!(why(&mut record("A", few, 1), &mut idle("B"), p95), "not tested: no value in B");
    assert_eq!(why(&mut idle("A"), &mut idle("B"), p95), "not tested: no value in B");
    for metric in ["request.p95 > 5s", "request.gc.share > 99%", "gvl.wait.share > 99%"] {
        let judged = judged(&mut watching("A"), &mut record("B", many, 1), metric);
        assert_eq!((judged.outcome, judged.why.as_str()), (Outcome::Held, ""), "{metric}");
    }
    let shares = "gvl.wait.share > 99%";
    let short = Program { seconds: 1, ..AS_EVER };
    assert_eq!(why(&mut watching("A"), &mut record("B", short, 1), shares), "not tested: too short");
    // The change cannot be tested for another reason.
    let changes = "request.p95 > +50ms";
    assert_eq!(why(&mut idle("A"), &mut record("B", few, 1), changes), "not tested: no value in A");
}

/// If both figures of a table are lacking, a condition gives the reason of its own.
#[test]
fn reasons_of_one() {
    let mut b = record("B", AS_EVER, 1);
    b.account(&Ledger { extent: Extent::Part, ..b.ledger.clone() });
    let share = "B is a part of a run: it lacks the sums of threads that continued to run";
    let rate = "A has no waits by second of the chosen processes";
    let comparison = Comparison::of(&mut watching("A"), &mut b);
    let why = |condition: &str| condition.parse::<Condition>().unwrap().judge(&comparison).why;
    assert_eq!(why("gvl.wait.rate > +20%"), format!("waits a second: {rate}"));
    assert_eq!(why("gvl.wait.share > +20%"), format!("share of threads' time: {share}"));
    let table = comparison.tables.iter().find(|table| table.key == "gvl").unwrap();
    assert_eq!(table.absent, [format!("share of threads' time: {share}"), format!("waits a second: {rate}")]);
}
