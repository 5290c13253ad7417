//! `gctrace top --once`: one table for scripts.

use std::io::{self, Write};

use serde::Serialize;

use super::rows::{Column, Row, Traced};

/// One row as JSON. Unknown values are `null`.
#[derive(Serialize)]
struct Line<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    pid: Option<u32>,
    processes: usize,
    name: &'a str,
    service: &'a str,
    container: Option<&'a str>,
    ruby: &'a str,
    cpu_percent: Option<f64>,
    gc_percent: Option<f64>,
    pause_p99_ns: Option<u64>,
    pause_max_ns: Option<u64>,
    gvl_wait_percent: Option<f64>,
    allocations_per_second: Option<f64>,
    rss_bytes: Option<u64>,
    heap_live_slots: Option<u64>,
    heap_free_slots: Option<u64>,
    requests_per_second: Option<f64>,
    request_p99_ns: Option<u64>,
    requests: Option<u64>,
    cycles: Option<u64>,
}

/// Writes the rows as a table with fixed columns.
pub(super) fn text(out: &mut impl Write, rows: &[Row]) -> io::Result<()> {
    let width = |column: Column| usize::from(column.width());
    let line = |of: &dyn Fn(Column) -> String| {
        let cells = Column::ALL.into_iter().map(|column| match column {
            Column::Name => format!("  {}", of(column)),
            _ => format!("{:>1$}", of(column), width(column)),
        });
        cells.collect::<String>()
    };
    writeln!(out, "{}", line(&|column| column.heading().to_owned()))?;
    for row in rows {
        writeln!(out, "{}", line(&|column| column.text(row)))?;
    }
    Ok(())
}

/// Writes the rows as JSON lines.
pub(super) fn jsonl(out: &mut impl Write, rows: &[Row], traced: Traced) -> io::Result<()> {
    for row in rows {
        let line = Line {
            kind: "top",
            pid: row.pid,
            processes: row.processes,
            name: &row.name,
            service: &row.service,
            container: row.container.as_deref(),
            ruby: &row.ruby,
            cpu_percent: row.cpu,
            gc_percent: row.gc,
            pause_p99_ns: row.p99_ns,
            pause_max_ns: row.max_ns,
            gvl_wait_percent: row.gvl,
            allocations_per_second: row.alloc,
            rss_bytes: row.rss,
            heap_live_slots: row.live,
            heap_free_slots: row.free,
            requests_per_second: row.requests,
            request_p99_ns: row.request_p99_ns,
            requests: Some(row.requests_seen).filter(|_| traced.requests),
            cycles: row.cycles,
        };
        let json = serde_json::to_string(&line)?;
        writeln!(out, "{}", gctrace_tunemygc::printable::printable_json(&json))?;
    }
    Ok(())
}
