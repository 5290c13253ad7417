//! Running `gctrace heap` and parsing its output.

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::{child::Finished, gctrace::Invocation, live::Live};

/// Runs `gctrace heap` on a process with these flags.
pub fn heap(live: &Live, pid: u32, flags: &[&str]) -> Result<Finished> {
    let cache = live.path("cache").to_string_lossy().into_owned();
    let pid = pid.to_string();
    let args = ["heap", "--pid", &pid, "--cache-dir", &cache];
    Invocation::new(args.iter().chain(flags))?.run()
}

/// The first line of a census and its rows, without the `keeper` rows, which report what keeps pages.
pub fn parsed(finished: &Finished) -> Result<(Value, Vec<Value>)> {
    ensure!(finished.status.success(), "{:?}\n{}", finished.status, finished.errors());
    let mut lines: Vec<Value> =
        finished.stdout.iter().map(|line| serde_json::from_str(line)).collect::<Result<_, _>>()?;
    lines.retain(|line| line["type"] != "keeper");
    let (first, rows) = lines.split_first().context("no line")?;
    ensure!(first["type"] == "census" && rows.iter().all(|row| row["type"] == "heap"), "{lines:?}");
    Ok((first.clone(), rows.to_vec()))
}

/// A census grouped by `by`: its first line and its rows.
pub fn census(live: &Live, pid: u32, by: &str) -> Result<(Value, Vec<Value>)> {
    parsed(&heap(live, pid, &["--by", by, "--format", "jsonl"])?)
}

/// The count in the row with this name.
pub fn count(rows: &[Value], name: &str) -> Option<u64> {
    rows.iter().find(|row| row["name"] == name)?["count"].as_u64()
}

/// The sum of this field over all rows.
pub fn sum(rows: &[Value], field: &str) -> u64 {
    rows.iter().filter_map(|row| row[field].as_u64()).sum()
}
