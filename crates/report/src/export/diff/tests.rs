//! The output is safe to display and can be parsed.

use serde_json::Value;

use super::*;
use crate::diff::{Condition, Table};

fn compared(conditions: &[&str]) -> (String, Value) {
    let chosen = Chosen::default();
    let looked = Looked { samples: true, ..Looked::default() };
    let sides = ["A", "B"].map(|name| Gathered::new(name, looked, chosen.clone(), true));
    for (side, every) in sides.iter().zip([2, 6]) {
        let mut exporter = side.exporter();
        let (mut process, _) = crate::export::profile::a_sample(0);
        process.comm = "\u{1b}[31mred".to_owned();
        let state = Seen::Process { state: None, now_ns: 0, since_ns: 0 };
        exporter.see(&process, state).unwrap();
        exporter.began(1);
        for at in 0..600_u64 {
            let (_, mut sample) = crate::export::profile::a_sample(2 + at * 10_000_000);
            let name = if at % every == 0 { "a\u{202e}b <i>" } else { "steady" };
            let frame = crate::model::stack::Frame { name: name.into(), ..(*sample.stack[0]).clone() };
            sample.stack = std::sync::Arc::new([std::sync::Arc::new(frame)]);
            exporter.see(&process, Seen::Stack(&sample)).unwrap();
        }
        let end = crate::model::seen::ProcessEnd {
            reason: crate::model::EndReason::Detached,
            ts_ns: 6_000_000_000,
            since_ns: 0,
            outside_ns: 0,
            beyond_ns: 0,
            shutdown: None,
            cycles: 0,
            before: crate::model::seen::CyclesBefore::Unknown,
            lost: 0,
        };
        exporter.see(&process, Seen::Ended(&end)).unwrap();
        exporter.closed(6_000_000_000);
        let kernel = Some(vec![0; gctrace_common::stats::Counter::ALL.len()]);
        exporter.settled(&Ledger { kernel, ..Ledger::default() }).unwrap();
    }
    let comparison = compare(&sides[0], &sides[1]);
    let judged: Vec<Judged> =
        conditions.iter().map(|text| text.parse::<Condition>().unwrap().judge(&comparison)).collect();
    let about = ["A", "B"].map(|file| About {
        file: format!("{file}\n.gctrace"),
        began: Some(1_700_000_000.0),
        seconds: 6.0,
        cut_off: file == "B",
    });
    let svg = tempfile::NamedTempFile::new().unwrap();
    write_graph(svg.path(), &sides[0], &sides[1]).unwrap();
    let svg = std::fs::read_to_string(svg.path()).unwrap();
    assert!(svg.contains("its own time shrank") && !svg.contains("<i>"), "{svg}");
    // The shrunken frame has every sixth sample of B, and had every second one of A. Red grew, blue shrank, and the
    // squares of the legend have the same colours.
    let colour = |text: &str| -> [u8; 3] {
        let rgb = text.rsplit("fill=\"rgb(").next().unwrap().split(')').next().unwrap();
        rgb.split(',').map(|part| part.parse().unwrap()).collect::<Vec<_>>().try_into().unwrap()
    };
    let frame = |name: &str| {
        let behind =
            svg.split(&format!("<title>{name}")).nth(1).unwrap_or_else(|| panic!("no {name}: {svg}"));
        colour(behind.split("/>").next().unwrap())
    };
    let square = |words: &str| colour(svg.split(words).next().unwrap());
    for (what, [r, _, b], grew) in [
        ("steady", frame("steady"), true),
        ("the other one", frame("a"), false),
        ("square", square("its own time grew"), true),
        ("square", square("its own time shrank"), false),
    ] {
        assert_eq!((r == 255, b == 255, r != b), (grew, !grew, true), "{what}: {r} {b}");
    }
    let [a, b] = &sides;
    a.with(|a| {
        b.with(|b| {
            let compared = Compared { about, sides: [a, b], comparison: &comparison, judged: &judged };
            let (mut text, mut json) = (Vec::new(), Vec::new());
            write_text(&mut text, &compared).unwrap();
            write_json(&mut json, &compared).unwrap();
            let shown = std::str::from_utf8(&json).unwrap();
            assert!(!shown.contains(['\u{202e}', '\u{1b}', '\u{9b}']), "{shown}");
            (String::from_utf8(text).unwrap(), serde_json::from_slice(&json).unwrap())
        })
    })
}

/// Changes come first, absent figures are named, and no text from outside can move the cursor.
#[test]
fn text() {
    let (text, _) = compared(&["cpu > +10%", "gvl.wait.share > 3%"]);
    assert!(text.starts_with("A  A\\u{a}.gctrace: 2023-11-14 22:13:20Z, 6.0 s\n"), "{text}");
    assert!(text.contains("6.0 s, cut off") && text.contains("\\u{1b}[31mred: 1 process"), "{text}");
    assert!(text.contains("a\\u{202e}b <i>"), "{text}");
    assert!(text.contains("not compared: GVL: each was recorded without --gvl"), "{text}");
    assert!(text.contains("ok: cpu > +10%: ") && text.contains("UNKNOWN: gvl.wait.share > 3%: "), "{text}");
    assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{text}");
    assert!(text.lines().count() < 50, "{text}");
}

/// "not compared" precedes only what is not compared; JSON has both kinds of notes.
#[test]
fn notes() {
    let sides = ["A", "B"].map(|name| Side::new(name, Looked::default(), Chosen::default()));
    let table = |key, lacks: &[&str], notes: &[&str]| {
        let [lacks, notes] = [lacks, notes].map(|texts| texts.iter().map(|&text| text.to_owned()).collect());
        Table { key, title: "T", rows: Vec::new(), absent: Vec::new(), lacks, notes }
    };
    let comparison = Comparison {
        tables: vec![table("gvl", &["waits a second: why"], &["B was watched for a time"])],
        blocks: [None, None],
        only: [Vec::new(), Vec::new()],
        nothing: Vec::new(),
    };
    let about =
        ["A", "B"].map(|file| About { file: file.to_owned(), began: None, seconds: 6.0, cut_off: false });
    let compared = Compared { about, sides: [&sides[0], &sides[1]], comparison: &comparison, judged: &[] };
    let (mut text, mut json) = (Vec::new(), Vec::new());
    write_text(&mut text, &compared).unwrap();
    write_json(&mut json, &compared).unwrap();
    let text = String::from_utf8(text).unwrap();
    assert!(text.contains("\nnot compared: waits a second: why\nB was watched for a time\n"), "{text}");
    let json: Value = serde_json::from_slice(&json).unwrap();
    let expected = serde_json::json!(["waits a second: why", "B was watched for a time"]);
    assert_eq!(json["tables"][0]["notes"], expected);
}

/// The same comparison as JSON.
#[test]
fn json() {
    let (_, json) = compared(&["cpu > +10%"]);
    assert_eq!((json["a"]["seconds"].as_f64(), json["b"]["cut_off"].as_bool()), (Some(6.0), Some(true)));
    let table = |key: &str| {
        json["tables"].as_array().unwrap().iter().find(|table| table["table"] == key).unwrap().clone()
    };
    let methods = table("methods");
    let row = &methods["rows"][1];
    assert_eq!(row["method"], "a\u{202e}b <i>", "{methods}");
    let figure = &row["figures"][0];
    assert_eq!((figure["what"].as_str(), figure["verdict"].as_str()), (Some("self"), Some("shrank")));
    assert!((figure["a"].as_f64().unwrap() - 0.5).abs() < 1e-9);
    assert_eq!(json["conditions"][0]["outcome"], "ok");
    assert_eq!(table("gvl")["absent"][0], "A was recorded without --gvl");
}
