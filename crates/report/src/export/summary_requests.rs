//! The requests of a process, in the summary for people.

use std::io::Write;

use super::{summary::row, text::duration};
use crate::{
    aggregate::request_summary::RequestSummary,
    words::{percent, plural},
};

/// Endpoints that are shown, those with most time.
const SHOWN: usize = 10;
/// Columns of an endpoint's figures.
const FIGURES: usize = 62;

/// How many there were, and the endpoints that took most time.
pub(super) fn write(out: &mut impl Write, width: usize, requests: &RequestSummary) -> std::io::Result<()> {
    let endpoints = requests.by_time();
    if endpoints.is_empty() {
        return Ok(());
    }
    let known = plural(endpoints.len() as u64, "endpoint");
    row(out, width, "requests", &format!("{} to {known}, those with most time first:", requests.count()))?;
    let name_width = width.saturating_sub(12 + FIGURES).clamp(14, 40);
    let head = format!(
        "{:<name_width$} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>6}",
        "", "count", "p50", "p95", "p99", "max", "of it GC", "5xx"
    );
    row(out, width, "", &head)?;
    for (name, of) in endpoints.iter().take(SHOWN) {
        let time = |quantile| match of.times.count() {
            0 => "?".to_owned(),
            _ => duration(of.times.quantile_ns(quantile)),
        };
        let shown: String = match name.char_indices().nth(name_width) {
            Some(_) => name.chars().take(name_width - 1).chain(['…']).collect(),
            None => (*name).to_owned(),
        };
        let text = format!(
            "{shown:<name_width$} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>6}",
            of.count,
            time(0.5),
            time(0.95),
            time(0.99),
            duration(of.times.max_ns()),
            percent(of.gc_ns, of.ns),
            of.failed
        );
        row(out, width, "", &text)?;
    }
    if endpoints.len() > SHOWN {
        row(out, width, "", &format!("{} more", plural((endpoints.len() - SHOWN) as u64, "endpoint")))?;
    }
    Ok(())
}
