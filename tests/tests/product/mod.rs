//! The one place where the tests use gctrace's own code: its reader of sample sets.

use anyhow::{Result, ensure};
use gctrace_user::export::tunemygc::SampleSet;
use serde_json::Value;

/// Reads a set with gctrace's reader and writes it again. The result must read as the same set.
pub(crate) fn reread(text: &str) -> Result<Value> {
    let set = SampleSet::from_json(text)?;
    let again = set.to_json();
    ensure!(SampleSet::from_json(&again)? == set, "what was read does not survive being written: {again}");
    Ok(serde_json::from_str(&again)?)
}
