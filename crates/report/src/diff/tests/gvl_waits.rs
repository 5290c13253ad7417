//! Waits for the GVL.

use super::*;

/// A lock that is held longer is attributed to its holder.
#[test]
fn longer_lock() {
    let comparison = compared(AS_EVER, Program { lock: 1.5, ..AS_EVER }, 9);
    assert_eq!(changed(&comparison, "holders"), [("Stock#update".to_owned(), "self", Verdict::Grew)]);
    let share = figure(&comparison, "gvl.wait.share");
    assert_eq!(share.verdict, Verdict::Grew, "{share:?}");
    assert!((share.relative().unwrap() - 1.0 / 3.0).abs() < 0.1, "{share:?}");
}

/// If the CPU budget prevented watching the GVL for most of a recording, the recording is compared by what was seen in the rest.
#[test]
fn watched_in_part() {
    let comparison = compared(AS_EVER, Program { watched: 4, ..AS_EVER }, 9);
    for metric in ["gvl.wait.rate", "gvl.wait.share"] {
        let figure = figure(&comparison, metric);
        assert!(!figure.verdict.is_real(), "{figure:?}");
        assert!(figure.relative().unwrap().abs() < 0.15, "{figure:?}");
    }
    assert!((figure(&comparison, "gvl.wait.rate").a.unwrap() - 20.0).abs() < 1.0);
    let gvl = comparison.tables.iter().find(|table| table.key == "gvl").unwrap();
    assert!(gvl.lacks.is_empty(), "{:?}", gvl.lacks);
    assert_eq!(gvl.notes, ["B was watched for 25.0 % of the time (CPU budget)"]);
    // A part of the recording has no sums of threads, which would say how long it was watched.
    let mut part = record("B", Program { watched: 4, ..AS_EVER }, 10);
    part.account(&Ledger {
        extent: Extent::Part,
        kernel: Some(vec![0; Counter::ALL.len()]),
        ..Ledger::default()
    });
    part.gvl.watched_ns = 0;
    let comparison = Comparison::of(&mut record("A", AS_EVER, 9), &mut part);
    assert!(comparison.figures().all(|(.., figure)| figure.metric != "gvl.wait.rate"));
}
