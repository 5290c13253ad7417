//! Where the resident memory of a process is: what of it is the heap of objects, and what the rest.

use std::{
    collections::BTreeMap,
    io::{self, Write},
};

use serde::Serialize;

use super::{count::Counted, jsonl, report::Report, target::Target};
use crate::{
    cli::Format,
    host::residency::{PageMap, Region, mappings},
    words::{file_size, percent},
};

/// The account of a process; bytes that are resident.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Account {
    rss: u64,
    swap: u64,
    objects: u64,
    /// Of them, in pages that only this process maps.
    objects_own: u64,
    /// Bytes of slots in use and of free ones, resident or not.
    slots: [u64; 2],
    regions: BTreeMap<Region, u64>,
}

impl Account {
    /// Adds up what is resident. Mappings that come and go meanwhile can make parts overlap: `None`.
    pub(super) fn of(target: &Target, counted: &Counted, page: u64) -> io::Result<Option<Self>> {
        let mut account = Self { slots: slots(counted), ..Self::default() };
        let maps = mappings(target.pid).map_err(io::Error::other)?;
        let pages = PageMap::open(target.pid)?;
        let mut in_map = vec![0; maps.len()];
        for found in &counted.census.pages {
            let start = found.start / page * page;
            let there = pages.look(start, page)?;
            account.objects += there.resident;
            account.objects_own += there.exclusive;
            let at = maps.partition_point(|map| map.range.1 <= start);
            match maps.get(at) {
                Some(map) if map.range.0 <= start => in_map[at] += there.resident,
                _ => return Ok(None),
            }
        }
        for (map, objects) in maps.iter().zip(in_map) {
            account.rss += map.rss;
            account.swap += map.swap;
            let Some(rest) = map.rss.checked_sub(objects) else { return Ok(None) };
            *account.regions.entry(map.region).or_default() += rest;
        }
        Ok(Some(account))
    }

    fn rows(&self) -> Vec<Row> {
        // Each without the pages of objects in it.
        const SOURCES: [(Region, &str, &str); 5] = [
            (Region::Break, "allocated (break)", "smaps: [heap]"),
            (Region::Anonymous, "other anonymous", "smaps: without a file"),
            (Region::File, "programs, libraries, files", "smaps: mappings of files"),
            (Region::Stack, "main stack", "smaps: [stack]"),
            (Region::Kernel, "kernel's own", "smaps: [vdso], [vvar]"),
        ];
        let objects = Row { name: "pages of objects", bytes: self.objects, source: "census and pagemap" };
        let of = |(region, name, source)| Row {
            name,
            bytes: self.regions.get(&region).copied().unwrap_or(0),
            source,
        };
        std::iter::once(objects).chain(SOURCES.map(of)).collect()
    }

    fn sentence(&self) -> String {
        let rows = self.rows();
        let parts: Vec<String> = rows
            .iter()
            .filter(|row| row.bytes > 0)
            .map(|row| format!("{} {}", row.name, file_size(row.bytes)))
            .collect();
        let mut text = format!("RSS {}", file_size(self.rss));
        let mut width = text.len();
        for (index, part) in parts.iter().enumerate() {
            // Lines fit a terminal of 80 columns.
            if width + part.len() + 3 > 78 {
                text.push_str("\n   ");
                width = 3;
            }
            text.push_str(if index == 0 { " = " } else { " + " });
            text.push_str(part);
            width += part.len() + 3;
        }
        text
    }
}

fn slots(counted: &Counted) -> [u64; 2] {
    [counted.census.live().bytes, counted.census.free.bytes]
}

struct Row {
    name: &'static str,
    bytes: u64,
    source: &'static str,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Line<'a> {
    Memory {
        pid: u32,
        rss: u64,
        swap: u64,
        objects: u64,
        objects_shared: u64,
        slots_live: u64,
        slots_free: u64,
        gc_count: u64,
        consistent: bool,
    },
    MemoryPart {
        pid: u32,
        name: &'a str,
        bytes: u64,
        source: &'a str,
    },
}

/// Writes the account.
pub(super) fn write(
    out: &mut impl Write,
    report: &Report,
    account: &Account,
    format: Format,
) -> io::Result<()> {
    let pid = report.who.pid;
    let shared = account.objects - account.objects_own;
    if let Format::Jsonl = format {
        let line = Line::Memory {
            pid,
            rss: account.rss,
            swap: account.swap,
            objects: account.objects,
            objects_shared: shared,
            slots_live: account.slots[0],
            slots_free: account.slots[1],
            gc_count: report.gc_count[0],
            consistent: report.consistent,
        };
        jsonl::line(out, &line)?;
        for Row { name, bytes, source } in account.rows() {
            jsonl::line(out, &Line::MemoryPart { pid, name, bytes, source })?;
        }
        return Ok(());
    }
    super::text::head(out, report)?;
    writeln!(out, "\n{}\n", account.sentence())?;
    writeln!(out, "{:>14}{:>13}  PART (SOURCE)", "BYTES", "SHARE")?;
    for Row { name, bytes, source } in account.rows() {
        writeln!(out, "{bytes:>14}{:>13}  {name} ({source})", percent(bytes, account.rss))?;
    }
    let [live, free] = account.slots;
    writeln!(out, "\nslots: {} in use, {} free", file_size(live), file_size(free))?;
    if shared > 0 {
        let share = percent(shared, account.objects);
        let shared = file_size(shared);
        writeln!(
            out,
            "pages of objects: {shared} ({share}) shared with other processes, copied when written"
        )?;
    }
    if account.swap > 0 {
        writeln!(out, "in swap: {}", file_size(account.swap))?;
    }
    Ok(())
}
