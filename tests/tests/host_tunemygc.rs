//! gctrace's reader of sample sets reads the protocol's examples.

mod product;

use anyhow::{Context as _, Result};
use serde_json::Value;

/// The protocol's example of a complete set. Its samples have seven elements (from before thread ids).
const SET: &str = include_str!("../fixtures/tunemygc_seed.json");
/// The protocol's examples of a header and of single samples, which have eight elements.
const SAMPLES: &str = include_str!("../fixtures/tunemygc_seed_samples.json");

/// The protocol's example set parses, and keeps every value.
#[test]
fn example_set() -> Result<()> {
    let theirs: Value = serde_json::from_str(SET)?;
    let mut expected = theirs.as_array().context("a list")?.clone();
    for sample in &mut expected[1..] {
        let sample = sample.as_array_mut().context("a list")?;
        assert_eq!(sample.len(), 7);
        // No thread id: the main thread.
        sample.push(Value::Null);
    }
    assert_eq!(product::reread(SET)?, Value::Array(expected));
    Ok(())
}

/// The protocol's single examples parse, and keep every value.
#[test]
fn example_samples() -> Result<()> {
    let theirs: Value = serde_json::from_str(SAMPLES)?;
    assert!(
        theirs.as_array().context("a list")?[1..]
            .iter()
            .all(|sample| sample.as_array().map(Vec::len) == Some(8))
    );
    assert_eq!(product::reread(SAMPLES)?, theirs);
    Ok(())
}

/// A header of the agent itself, with the ids of its spies as the ninth element.
#[test]
fn agent_dialect() -> Result<()> {
    let mut theirs: Value = serde_json::from_str(SAMPLES)?;
    theirs[0].as_array_mut().context("a list")?.insert(8, "manual".into());
    let again = product::reread(&theirs.to_string())?;
    assert_eq!(again[0][8], "manual");
    assert_eq!(again[0].as_array().map(Vec::len), Some(12));
    Ok(())
}

/// Violations of the protocol are refused.
#[test]
fn refusals() -> Result<()> {
    let theirs: Value = serde_json::from_str(SAMPLES)?;
    let spoilt = |change: &dyn Fn(&mut Value)| {
        let mut set = theirs.clone();
        change(&mut set);
        product::reread(&set.to_string()).is_err()
    };
    assert!(product::reread("").is_err(), "nothing");
    assert!(product::reread("[]").is_err(), "no header");
    assert!(product::reread("{}").is_err(), "not a list");
    assert!(product::reread(&SAMPLES[..SAMPLES.len() / 2]).is_err(), "half a file");
    assert!(spoilt(&|set| drop(set[0].as_array_mut().map(Vec::pop))), "a header element less");
    assert!(spoilt(&|set| drop(set[1][4].as_array_mut().map(Vec::pop))), "a stat value less");
    assert!(spoilt(&|set| set[1][4][0] = "1".into()), "a stat value that is not a number");
    assert!(spoilt(&|set| set[1][3] = "PROCESSED".into()), "an unknown event");
    assert!(spoilt(&|set| set[1][0] = Value::Null), "no time");
    assert!(spoilt(&|set| set[1] = Value::Null), "no sample");
    Ok(())
}
