//! A census as JSON lines: one `census`, then a `heap` line for each row, and with pages a `keeper` line for each class on nearly
//! empty ones. Documented in docs/heap.md.

use std::io::{self, Write};

use serde::{Serialize, de::DeserializeOwned};

use super::{
    places::Known,
    report::{Allocated, KeeperRow, Report},
};
use crate::{
    cli::By,
    ruby::heap::{NoPlaces, Tally},
};

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
        #[serde(flatten)]
        objects: Objects,
        #[serde(flatten)]
        places: Option<OfPlaces>,
    },
    Heap {
        pid: u32,
        by: &'static str,
        name: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        file: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        line: Option<u32>,
        #[serde(skip_serializing_if = "Option::is_none")]
        class: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        classes: Option<u64>,
        count: u64,
        /// Absent for ages: objects of one age have slots of several sizes.
        #[serde(skip_serializing_if = "Option::is_none")]
        bytes: Option<u64>,
        #[serde(skip_serializing_if = "Option::is_none")]
        free: Option<u64>,
        #[serde(flatten)]
        objects: Option<Objects>,
    },
    Keeper {
        pid: u32,
        name: &'a str,
        pages: u64,
        alone: u64,
        count: u64,
        bytes: u64,
        #[serde(flatten)]
        objects: Objects,
    },
}

/// What is known of the table of allocation sites.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct OfPlaces {
    #[serde(skip_serializing_if = "Option::is_none")]
    tracing: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    traced_objects: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    entries_of_others: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    table_changed: Option<bool>,
    /// Why there is no table.
    #[serde(skip_serializing_if = "Option::is_none")]
    no_places: Option<String>,
}

impl OfPlaces {
    /// Whether the table was replaced while the heap was read.
    pub(super) fn is_changed(&self) -> bool {
        self.table_changed == Some(true)
    }

    pub(super) fn of(places: Result<Known, NoPlaces>) -> Self {
        match places {
            Ok(known) => Self {
                tracing: Some(known.tracing()),
                traced_objects: Some(known.entries),
                entries_of_others: Some(known.others),
                table_changed: Some(known.changed),
                no_places: None,
            },
            Err(reason) => Self { no_places: Some(reason.to_string()), ..Self::default() },
        }
    }
}

/// Sums over objects; values that are unknown for this Ruby are omitted.
#[derive(Serialize)]
struct Objects {
    owned_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    ages: Option<[u64; 4]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    old: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    unprotected: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dead: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pinned: Option<u64>,
}

impl Objects {
    fn of(tally: &Tally, report: &Report) -> Self {
        let bits = |n| report.known.bits.then_some(n);
        Self {
            owned_bytes: tally.owned,
            ages: report.known.bits.then_some(tally.ages),
            old: bits(tally.old()),
            unprotected: bits(tally.unprotected),
            dead: bits(tally.dead),
            pinned: report.known.pins.then_some(tally.pinned),
        }
    }
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
            consistent: report.consistent,
            pages: report.pages,
            slots: report.total,
            live: report.live.count,
            live_bytes: report.live.bytes,
            free: report.free.count,
            free_bytes: report.free.bytes,
            objects: Objects::of(&report.live, report),
            places: report.places.map(OfPlaces::of),
        },
    )?;
    let by = report.who.by.name();
    let mut row = |name: &str, classes, allocated: Option<&Allocated>, count, bytes, free, objects| {
        let bytes = (report.who.by != By::Age).then_some(bytes);
        let place = allocated.and_then(|allocated| allocated.place.as_ref());
        let heap = Line::Heap {
            pid,
            by,
            name,
            file: place.map(|(file, _)| file.as_ref()),
            line: place.map(|(_, line)| *line),
            class: allocated.map(|allocated| allocated.class.as_str()),
            classes,
            count,
            bytes,
            free,
            objects,
        };
        line(out, &heap)
    };
    for found in &report.rows {
        let objects = found.objects.as_ref().map(|tally| Objects::of(tally, report));
        row(&found.name, found.classes, found.line.as_ref(), found.count, found.bytes, found.free, objects)?;
    }
    if report.who.by == By::Type {
        row("FREE", None, None, report.free.count, report.free.bytes, None, None)?;
        row("TOTAL", None, None, report.total, report.live.bytes + report.free.bytes, None, None)?;
    }
    for KeeperRow { name, keeper } in &report.keepers {
        let (tally, objects) = (&keeper.tally, Objects::of(&keeper.tally, report));
        let (pages, alone, count, bytes) = (keeper.pages, keeper.alone, tally.count, tally.bytes);
        line(out, &Line::Keeper { pid, name, pages, alone, count, bytes, objects })?;
    }
    Ok(())
}

/// An address in the process, in hexadecimal as `ObjectSpace.dump_all` writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Address(pub(super) u64);

impl Serialize for Address {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{:#x}", self.0))
    }
}

/// Writes a line, escaped for a terminal.
pub(super) fn line(out: &mut (impl Write + ?Sized), line: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_string(line)?;
    writeln!(out, "{}", gctrace_tunemygc::printable::printable_json(&text))
}

/// Writes a line that contains no text from outside, unescaped and without buffering it: it may be long.
pub(super) fn plain_line(mut out: &mut (impl Write + ?Sized), line: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer(&mut out, line)?;
    out.write_all(b"\n")
}

/// Parses a saved line.
pub(super) fn parsed<T: DeserializeOwned>(line: &str) -> io::Result<T> {
    Ok(serde_json::from_str(line)?)
}
