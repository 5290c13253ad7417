//! A census as JSON lines: one `census`, then a `heap` line for each row. Documented in docs/heap.md.

use std::io::{self, Write};

use serde::Serialize;

use super::report::Report;
use crate::cli::By;

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Line<'a> {
    Census {
        pid: u32,
        command: Option<&'a str>,
        ruby: &'a str,
        gc_count: u64,
        gc_count_after: u64,
        allocated_meanwhile: Option<u64>,
        sweeping: bool,
        consistent: bool,
        pages: u64,
        slots: u64,
        live: u64,
        live_bytes: u64,
        free: u64,
        free_bytes: u64,
    },
    Heap {
        pid: u32,
        by: &'static str,
        name: &'a str,
        count: u64,
        bytes: u64,
        #[serde(skip_serializing_if = "Option::is_none")]
        free: Option<u64>,
    },
}

pub(super) fn write(out: &mut impl Write, report: &Report) -> io::Result<()> {
    let pid = report.who.pid;
    line(
        out,
        &Line::Census {
            pid,
            command: report.who.command.as_deref(),
            ruby: &report.who.ruby,
            gc_count: report.gc_count[0],
            gc_count_after: report.gc_count[1],
            allocated_meanwhile: report.allocated,
            sweeping: report.sweeping,
            consistent: report.consistent(),
            pages: report.pages,
            slots: report.total,
            live: report.live.count,
            live_bytes: report.live.bytes,
            free: report.free.count,
            free_bytes: report.free.bytes,
        },
    )?;
    let by = report.who.by.name();
    let mut row =
        |name: &str, count, bytes, free| line(out, &Line::Heap { pid, by, name, count, bytes, free });
    for found in &report.rows {
        row(&found.name, found.count, found.bytes, found.free)?;
    }
    if report.who.by == By::Type {
        row("FREE", report.free.count, report.free.bytes, None)?;
        row("TOTAL", report.total, report.live.bytes + report.free.bytes, None)?;
    }
    Ok(())
}

fn line(out: &mut impl Write, line: &Line<'_>) -> io::Result<()> {
    let text = serde_json::to_string(line)?;
    writeln!(out, "{}", gctrace_tunemygc::printable::printable_json(&text))
}
