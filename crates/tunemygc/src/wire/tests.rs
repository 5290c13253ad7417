use proptest::prelude::*;

use super::*;

fn sample(stat: Vec<u64>) -> Sample {
    Sample {
        ts: 1_422_023_921.481_364,
        peak_rss: Some(132_255_744),
        current_rss: Some(132_255_744),
        event: EventName::GcCycleStarted,
        stat,
        latest_gc_info: Map::from_iter([("gc_by".to_owned(), json!("newobj"))]),
        meta: None,
        thread_id: None,
    }
}

fn set(samples: Vec<Sample>) -> SampleSet {
    let header = Header {
        token: None,
        ruby_version: "3.1.2".into(),
        rails_version: "0.0".into(),
        gc_env: Map::new(),
        agent_version: "0.1.0".into(),
        gc_opts: vec![],
        gc_constants: Map::new(),
        stat_keys: vec!["count".into(), "time".into()],
        spy_ids: None,
        hostname: "vm".into(),
        ppid: 1,
        pid: 153,
    };
    SampleSet { header, samples }
}

fn value() -> Value {
    serde_json::from_str(&set(vec![sample(vec![1, 2]), sample(vec![1, 2])]).to_json()).unwrap()
}

/// The text of the error that this change to a valid set causes.
fn refusal(change: impl FnOnce(&mut Value)) -> String {
    let mut value = value();
    change(&mut value);
    SampleSet::from_json(&value.to_string()).unwrap_err().to_string()
}

/// What is written is read back exactly, to the microsecond and the byte.
#[test]
fn round_trip() {
    let mut last = sample(vec![3, u64::MAX]);
    last.meta = Some(RawValue::from_string(r#"{"path":"/","n":[1,{"deep":null}]}"#.into()).unwrap());
    last.thread_id = Some(70_201_748_333_020_u64.into());
    let set = set(vec![sample(vec![1, 2]), last]);
    let text = set.to_json();
    assert_eq!(SampleSet::from_json(&text).unwrap(), set);
    let value: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((value[0].as_array().unwrap().len(), value[1].as_array().unwrap().len()), (11, 8));
    // A stream is read like memory.
    let mut streamed = Samples(Vec::new());
    let header = read(text.as_bytes(), &mut streamed).unwrap();
    assert_eq!(SampleSet { header, samples: streamed.0 }, set);
}

/// The agent's 12-element header and the old 7-element samples are read.
#[test]
fn dialects() {
    let mut value = value();
    value[0].as_array_mut().unwrap().insert(8, json!("manual"));
    value[1].as_array_mut().unwrap().pop();
    let read = SampleSet::from_json(&value.to_string()).unwrap();
    assert_eq!(read.header.spy_ids.as_deref(), Some("manual"));
    assert_eq!((read.header.hostname.as_str(), read.header.pid), ("vm", 153));
}

/// Violations of the protocol are refused, with the name of the field.
#[test]
fn refusals() {
    for (at, wrong, name) in [
        (0, json!(5), "header [0] (token)"),
        (1, json!(null), "header [1] (Ruby version)"),
        (3, json!({"RUBY_GC_X": 1}), "header [3] (environment)"),
        (5, json!([1]), "header [5] (GC::OPTS)"),
        (6, json!([]), "header [6] (GC::INTERNAL_CONSTANTS)"),
        (7, json!(["count", "count"]), "header [7] (GC.stat keys)"),
        (10, json!(-1), "header (pid)"),
    ] {
        let error = refusal(|set| set[0][at] = wrong);
        assert!(error.starts_with(&format!("{name}: ")), "{error}");
    }
    for (at, wrong, name) in [
        (0, json!("now"), "timestamp"),
        (0, json!(-1.0), "timestamp"),
        (0, json!(1e9), "timestamp"),
        (1, json!(1.5), "peak RSS"),
        (2, json!(-4), "current RSS"),
        (3, json!("PROCESSED"), "event"),
        (4, json!([1]), "GC.stat values"),
        (4, json!([1, 2, 3]), "GC.stat values"),
        (4, json!([1, "2"]), "GC.stat values"),
        (5, json!({"gc_by": {}}), "latest_gc_info"),
        (5, json!(null), "latest_gc_info"),
        (7, json!("main"), "thread id"),
    ] {
        let error = refusal(|set| set[2][at] = wrong);
        assert!(error.starts_with(&format!("sample 1 ({name}): ")), "{error}");
    }
    let shorter = |count| refusal(|set| set[1].as_array_mut().unwrap().truncate(count));
    assert!(shorter(6).starts_with("sample 0 (tuple): ends before meta"), "{}", shorter(6));
    assert!(refusal(|set| set[1].as_array_mut().unwrap().push(json!(1))).contains("more than 8"));
    assert!(refusal(|set| set[0].as_array_mut().unwrap().push(json!(1))).starts_with("header"));
    assert!(refusal(|set| set[0].as_array_mut().unwrap().truncate(8)).starts_with("header (tuple)"));
    assert!(refusal(|set| *set = json!([])).starts_with("payload: has no header"));
    assert!(refusal(|set| *set = json!({})).starts_with("payload: "));
    for text in ["", "[", "NaN", "[[NaN]]", "[1e999]", "[] x", &"[".repeat(100_000)] {
        let error = SampleSet::from_json(text).unwrap_err().to_string();
        assert!(error.starts_with("payload: ") || error.starts_with("header"), "{error}");
    }
}

/// Long strings, long lists and large hashes are refused in place.
#[test]
fn limits() {
    let long = "x".repeat(MAX_STRING + 1);
    assert!(refusal(|set| set[0][8] = json!(long)).contains("more than 4096 bytes"));
    let many: Vec<String> = (0..=MAX_KEYS).map(|n| n.to_string()).collect();
    assert!(refusal(|set| set[0][7] = json!(many)).starts_with("header [7]"));
    let large: Map<String, Value> = (0..=MAX_ENTRIES).map(|n| (n.to_string(), json!("1"))).collect();
    assert!(refusal(|set| set[1][5] = json!(large)).contains("more than 512 entries"));
    assert!(refusal(|set| set[0][3] = json!(large)).contains("more than 512 entries"));
}

proptest! {
    /// No text makes the reader panic.
    #[test]
    fn hostile_text(text in "\\PC{0,200}") {
        let _any = SampleSet::from_json(&text);
    }

    /// No bytes inserted into a valid set make the reader panic, and what it accepts it writes unchanged.
    #[test]
    fn hostile_bytes(at in 0_usize..400, with in proptest::collection::vec(any::<u8>(), 0..8)) {
        let mut bytes = set(vec![sample(vec![1, 2])]).to_json().into_bytes();
        let at = at.min(bytes.len());
        let end = (at + with.len()).min(bytes.len());
        bytes.splice(at..end, with);
        let mut samples = Samples(Vec::new());
        if let Ok(header) = read_slice(&bytes, &mut samples) {
            let set = SampleSet { header, samples: samples.0 };
            prop_assert_eq!(SampleSet::from_json(&set.to_json()).unwrap(), set);
        }
    }

    /// No nesting of JSON values makes the reader panic.
    #[test]
    fn hostile_values(fields in proptest::collection::vec(0_u8..6, 0..16)) {
        let values: Vec<Value> = fields.iter().map(|kind| match kind {
            0 => Value::Null,
            1 => json!(-1),
            2 => json!("BOOTED"),
            3 => json!([1, 2]),
            4 => json!({"a": 1}),
            _ => json!(1.5e300),
        }).collect();
        let _any = SampleSet::from_json(&json!([values.clone(), values]).to_string());
    }
}
