//! Conditions are parsed as intended, and evaluate to the truth for each record.

use proptest::prelude::*;

use super::*;
use crate::{model::GcCycle, trace_file::samples};

fn condition(text: &str) -> Condition {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// The verdicts on every kind of observation, in the order of the observations.
fn judged(text: &str) -> Vec<(Kind, Verdict)> {
    let condition = condition(text);
    let mut found = Vec::new();
    samples::all(5, &mut |process, seen| {
        let (kind, verdict) = (Kind::of(&seen), condition.judge(process, &seen));
        assert!(
            kind == Kind::Process || (verdict != Verdict::Untouched) == condition.applies_to(kind),
            "{text}: {kind:?}"
        );
        found.push((kind, verdict));
    });
    found
}

/// The verdicts on records of a kind, which are all the same.
fn verdict(text: &str, kind: Kind) -> Verdict {
    let found: Vec<_> =
        judged(text).into_iter().filter(|(of, _)| *of == kind).map(|(_, verdict)| verdict).collect();
    assert!(!found.is_empty() && found.iter().all(|verdict| *verdict == found[0]), "{text}: {found:?}");
    found[0]
}

/// Each field is that of the record; the cycle in the samples has two pauses of 60 ns.
#[test]
fn fields() {
    use Verdict::{False, True, Unknown, Untouched};
    for (text, kind, expected) in [
        ("gc.pause = 60ns", Kind::Cycle, True),
        ("gc.pause > 60ns", Kind::Cycle, False),
        ("gc.pause >= 0.06us", Kind::Cycle, True),
        ("gc.total = 120ns", Kind::Cycle, True),
        ("gc.kind = major", Kind::Cycle, True),
        ("gc.kind != major", Kind::Cycle, False),
        ("gc.reason ~ nofree", Kind::Cycle, True),
        ("gc.pause > 60ns", Kind::Sample, Untouched),
        ("endpoint = 'PATCH /orders/:id'", Kind::Request, True),
        ("endpoint ~ /^PATCH .*:id$/", Kind::Request, True),
        ("endpoint !~ orders", Kind::Request, False),
        ("request.duration < 4ns", Kind::Request, True),
        ("request.status = 418", Kind::Request, True),
        ("request.queue <= 6ns", Kind::Request, False),
        ("request.alloc = 600", Kind::Request, True),
        ("request.alloc > 600", Kind::Request, False),
        ("request.minor_faults = 21", Kind::Request, True),
        ("request.major_faults > 22", Kind::Request, False),
        ("request.rss_growth = -94208", Kind::Request, True),
        ("request.rss_growth < -94208", Kind::Request, False),
        ("request.rss_growth < 0", Kind::Request, True),
        ("request.rss_growth > 18446744073709551615", Kind::Request, False),
        ("gvl.wait = 4ns", Kind::GvlWait, True),
        ("gvl.wait < 4ns", Kind::GvlWait, False),
        ("thread = worker", Kind::Sample, True),
        ("thread = 12", Kind::Sample, True),
        ("thread = 13", Kind::Sample, False),
        ("thread ~ work", Kind::AllocStack, True),
        ("thread = starter", Kind::Cycle, True),
        ("thread = 'thread 1'", Kind::GvlWait, True),
        ("thread = 2", Kind::Request, True),
        ("thread = worker", Kind::Process, Untouched),
        ("thread ~ worker", Kind::Request, Unknown),
        ("service = shop", Kind::Process, True),
        ("service = other or gc.pause > 1h", Kind::Process, Untouched),
        ("service = other and gc.pause > 1h", Kind::Process, False),
        ("pid = 7", Kind::Cycle, False),
        // The part of a condition that a kind has fields for applies to it.
        ("gc.kind = minor or endpoint ~ orders", Kind::Cycle, False),
        ("gc.kind = minor or endpoint ~ orders", Kind::Request, True),
        ("gc.kind = minor or endpoint ~ orders", Kind::Sample, Untouched),
        ("gc.pause > 1h and thread ~ worker", Kind::Sample, True),
        ("not (gc.pause > 1h)", Kind::Sample, Untouched),
        ("not (gc.pause > 1h) AND NOT gc.kind = minor", Kind::Cycle, True),
        ("gc.kind=major and gc.pause>1h or gc.total>1ns", Kind::Cycle, True),
        ("gc.kind=major and (gc.pause>1h or gc.total>1h)", Kind::Cycle, False),
    ] {
        assert_eq!(verdict(text, kind), expected, "{text} of {kind:?}");
    }
}

/// How long a cycle stopped its program is unknown if no pause of it was seen: the program was killed in the first one.
#[test]
fn unknown_pauses() {
    let process = samples::process();
    let cycle = GcCycle { pauses: Vec::new(), ..samples::cycle(7) };
    for text in ["gc.pause < 1h", "not gc.pause > 1h", "gc.total < 1h", "not gc.total > 1h"] {
        assert_eq!(condition(text).judge(&process, &Seen::Cycle(&cycle)), Verdict::Unknown, "{text}");
    }
    assert!(!cycle.is_shorter_than(u64::MAX));
}

/// An unknown value is neither true nor false.
#[test]
fn unknown() {
    let process = samples::process();
    let request = crate::model::request::Request {
        id: 1,
        tid: 2,
        begin_ns: 3,
        end_ns: None,
        method: None,
        path: None,
        status: None,
        queue_ns: None,
        first_byte_ns: None,
        last_byte_ns: None,
        response_bytes: None,
        gcs: None,
        gc_ns: None,
        gc_pauses: None,
        gc_other: None,
        gvl_wait_ns: None,
        states: None,
        split: None,
        alloc: None,
        memory: crate::model::request::RequestMemory::default(),
        job: None,
        is_run: false,
        handler: None,
        gc_states: None,
        trace: None,
    };
    for (text, expected) in [
        ("request.alloc > 0", Verdict::Unknown),
        ("request.major_faults = 0", Verdict::Unknown),
        ("request.rss_growth < 0", Verdict::Unknown),
        ("request.duration > 1s", Verdict::Unknown),
        ("not request.duration > 1s", Verdict::Unknown),
        ("request.status != 200", Verdict::Unknown),
        ("endpoint !~ x", Verdict::Unknown),
        ("request.duration > 1s or thread = 2", Verdict::True),
        ("request.duration > 1s and thread = 2", Verdict::Unknown),
        ("thread = 2 and request.duration > 1s", Verdict::Unknown),
        ("request.duration > 1s and thread = 3", Verdict::False),
    ] {
        assert_eq!(condition(text).judge(&process, &Seen::Request(&request)), expected, "{text}");
    }
}

/// Errors name the mistake.
#[test]
fn mistakes() {
    for (text, expected) in [
        ("", "unexpected end: a field was expected"),
        ("gc.paus > 1ms", "`gc.paus` is not a field; fields are pid, service"),
        ("gc.pause", "unexpected end: an operator was expected"),
        ("gc.pause > ", "unexpected end: a value was expected"),
        ("gc.pause > 1", "`1` is not a time: give a number and ns"),
        ("gc.pause > 1.ms", "is not a time"),
        ("gc.pause > 99999999999h", "is not a time"),
        ("gc.pause ~ 1ms", "gc.pause is a number"),
        ("gc.kind > major", "gc.kind is a text"),
        ("gc.kind != mayor", "gc.kind is `minor` or `major`, not `mayor`"),
        ("pid = x", "`x` is not a whole number"),
        ("pid = 1 pid = 2", "`and`, `or` or the end was expected, not `pid`"),
        ("(pid = 1", "a `)` is missing"),
        ("pid = 1)", "the end was expected, not `)`"),
        ("pid = (1)", "a value was expected, not `(`"),
        ("service = 'x", "no closing '"),
        ("service ~ /x", "no closing /"),
        ("service ~ /(/", "service: "),
        ("service ! x", "unexpected `!`"),
        ("thread ~ ''", "thread: give a part of a name"),
    ] {
        let error = text.parse::<Condition>().unwrap_err();
        assert!(error.contains(expected), "{text}: {error}");
    }
    let deep = format!("{}pid = 1{}", "(".repeat(100), ")".repeat(100));
    assert!(deep.parse::<Condition>().unwrap_err().contains("nested more than 64 deep"));
}

fn expression() -> impl Strategy<Value = String> {
    let test = prop::sample::select(vec![
        "pid = 4242",
        "pid != 4242",
        "gc.pause > 1ms",
        "gc.kind = major",
        "thread ~ work",
        "request.duration >= 1ns",
        "gvl.wait < 1s",
        "service = 'shop'",
        "endpoint ~ /x/",
    ]);
    test.prop_map(str::to_owned).prop_recursive(5, 24, 3, |inner| {
        prop_oneof![
            inner.clone().prop_map(|one| format!("not ({one})")),
            (inner.clone(), inner.clone()).prop_map(|(one, other)| format!("({one}) and ({other})")),
            (inner.clone(), inner).prop_map(|(one, other)| format!("({one}) or ({other})")),
        ]
    })
}

proptest! {
    /// Any text is either a condition or an error.
    #[test]
    fn any_text(text in "[ a-z.<>=!~()'\"/0-9µ]{0,60}|.{0,40}") {
        let _either = text.parse::<Condition>();
    }

    /// The laws of logic hold for every record.
    #[test]
    fn logic(one in expression(), other in expression()) {
        prop_assert_eq!(judged(&format!("not (not ({one}))")), judged(&one));
        prop_assert_eq!(judged(&format!("({one}) and ({other})")), judged(&format!("({other}) and ({one})")));
        prop_assert_eq!(
            judged(&format!("not (({one}) or ({other}))")),
            judged(&format!("not ({one}) and not ({other})"))
        );
        prop_assert_eq!(judged(&format!("({one}) or ({one})")), judged(&one));
    }
}
