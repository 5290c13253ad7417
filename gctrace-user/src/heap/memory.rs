//! Parts of the resident memory of a process: the heap of objects, and the rest.

use std::{
    collections::{BTreeMap, HashSet},
    io::{self, Write},
};

use serde::Serialize;

use super::{
    anonymous::{Anonymous, Use},
    count::Counted,
    jsonl,
    report::Report,
    target::Target,
};
use crate::{
    cli::Format,
    host::{
        proc::MemoryReader,
        residency::{PageMap, Pages, Region, Resident, mappings},
        tasks::{self, Task},
    },
    words::{data_size, percent, plural},
};

/// The account of a process: resident bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Account {
    rss: u64,
    swap: u64,
    objects: u64,
    /// Of `objects`, bytes in pages that only this process maps.
    objects_own: u64,
    /// Of `objects`, bytes in pages without slots, which Ruby keeps for reuse (3.4 and later).
    objects_empty: u64,
    /// Bytes of slots in use and of free slots, resident or not.
    slots: [u64; 2],
    /// The other parts, without the pages of objects.
    parts: BTreeMap<Part, PartBytes>,
    /// Which part an address belongs to.
    pub(super) places: Places,
    /// Number of threads; `stacks` is the number of them whose stack was recognised.
    threads: u64,
    stacks: u64,
    /// The kernel's own count (`VmRSS`) before and after the mappings were read.
    vm_rss: [Option<u64>; 2],
}

/// Sizes of a part, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct PartBytes {
    rss: u64,
    /// Of `rss`, memory that a fork left shared with other processes and nobody has written since; `None` if it changed while it was read.
    shared: Option<u64>,
}

/// Locations of the parts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Places {
    /// First addresses of the pages of objects, sorted, and their size.
    objects: (Vec<u64>, u64),
    /// Mappings in order of addresses.
    maps: Vec<((u64, u64), Part)>,
    /// The mappings themselves.
    pub(super) mappings: Vec<Resident>,
}

impl Places {
    /// The index in [`PARTS`] of the part that contains this address now.
    pub(super) fn part(&self, address: u64) -> Option<usize> {
        let (starts, size) = &self.objects;
        let before = starts.partition_point(|start| *start <= address);
        if before.checked_sub(1).is_some_and(|index| address - starts[index] < *size) {
            return Some(0);
        }
        let ((start, _), part) = self.maps.get(self.maps.partition_point(|((_, end), _)| *end <= address))?;
        (*start <= address).then_some(1 + *part as usize)
    }
}

/// The names of the parts, in the order of their indices.
pub(super) const PARTS: [&str; 9] = {
    let mut names = [OBJECTS; 9];
    let mut at = 0;
    while at < Part::ALL.len() {
        names[at + 1] = Part::ALL[at].1;
        at += 1;
    }
    names
};

const OBJECTS: &str = "pages of objects";

/// A part of the resident memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    Break,
    Arenas,
    Blocks,
    Stacks,
    Anonymous,
    File,
    MainStack,
    Kernel,
}

impl Part {
    /// All parts, with name and source. None of them includes the pages of objects in its mappings.
    const ALL: [(Self, &'static str, &'static str); 8] = [
        (Self::Break, "allocated (break)", "smaps: [heap]"),
        (Self::Arenas, "allocated (arenas of threads)", "smaps: mappings that begin like an arena of glibc"),
        (Self::Blocks, "allocated (large blocks)", "smaps: mappings that are blocks of glibc, end to end"),
        (Self::Stacks, "thread stacks", "smaps: mappings with a guard and the thread's control block"),
        (Self::Anonymous, "other anonymous", "smaps: without a file"),
        (Self::File, "programs, libraries, files", "smaps: mappings of files"),
        (Self::MainStack, "main stack", "smaps: [stack]"),
        (Self::Kernel, "kernel's own", "smaps: [vdso], [vvar]"),
    ];

    fn of(region: Region, found: Option<Use>) -> Self {
        match (region, found) {
            (Region::Break, _) => Self::Break,
            (Region::Anonymous, Some(Use::Arena)) => Self::Arenas,
            (Region::Anonymous, Some(Use::Blocks)) => Self::Blocks,
            (Region::Anonymous, Some(Use::Stack(_))) => Self::Stacks,
            (Region::Anonymous, None) => Self::Anonymous,
            (Region::File, _) => Self::File,
            (Region::Stack, _) => Self::MainStack,
            (Region::Kernel, _) => Self::Kernel,
        }
    }
}

impl Account {
    /// Sums up resident memory. `None`: mappings came and went meanwhile, so that parts overlap.
    pub(super) fn of(target: &Target, counted: &Counted, page: u64) -> io::Result<Option<Self>> {
        let mut account = Self { slots: slots(counted), ..Self::default() };
        let status = MemoryReader::open(target.pid)?;
        let vm_rss = || status.read().map(|memory| memory.rss);
        let before = vm_rss();
        let maps = mappings(target.pid)?;
        account.vm_rss = [before, vm_rss()];
        let pages = PageMap::open(target.pid)?;
        let own_tid = |tid: u32| Task::look(target.pid, tid).map(|task| task.own_tid);
        let threads: HashSet<u32> = tasks::tids(target.pid)?.into_iter().filter_map(own_tid).collect();
        account.threads = threads.len() as u64;
        let with_slots = counted.census.pages.iter().map(|found| (found.start / page * page, false));
        let mut starts: Vec<(u64, bool)> =
            with_slots.chain(counted.census.empty.iter().map(|start| (*start, true))).collect();
        starts.sort_unstable();
        let mut in_map = vec![Pages::default(); maps.len()];
        for &(start, empty) in &starts {
            let there = pages.look(start, page)?;
            account.objects += there.resident;
            account.objects_own += there.exclusive;
            account.objects_empty += if empty { there.resident } else { 0 };
            let at = maps.partition_point(|map| map.range.1 <= start);
            match maps.get(at) {
                Some(map) if map.range.0 <= start => {
                    in_map[at].resident += there.resident;
                    in_map[at].exclusive += there.exclusive;
                }
                _ => return Ok(None),
            }
        }
        let starts: Vec<u64> = starts.into_iter().map(|(start, _)| start).collect();
        let anonymous = Anonymous {
            memory: &target.memory,
            pages: &pages,
            threads: &threads,
            page: rustix::param::page_size() as u64,
            objects: (&starts, page),
        };
        account.places.maps.reserve_exact(maps.len());
        let mut below: Option<&Resident> = None;
        for (map, objects) in maps.iter().zip(in_map) {
            let found = match map.region {
                Region::Anonymous if map.rss > 0 => anonymous.look(map, below)?,
                _ => None,
            };
            below = Some(map);
            account.stacks += u64::from(matches!(found, Some(Use::Stack(_))));
            account.rss += map.rss;
            account.swap += map.swap;
            let Some(rss) = map.rss.checked_sub(objects.resident) else { return Ok(None) };
            let part = Part::of(map.region, found);
            let shared = shared(&pages, map, objects)?;
            let sum = account.parts.entry(part).or_insert(PartBytes { rss: 0, shared: Some(0) });
            sum.rss += rss;
            sum.shared = sum.shared.zip(shared).map(|(sum, more)| sum + more);
            account.places.maps.push((map.range, part));
        }
        account.places.objects = (starts, page);
        account.places.mappings = maps;
        Ok(Some(account))
    }

    fn rows(&self) -> Vec<Row> {
        let shared = Some(self.objects - self.objects_own);
        let objects = Row { name: OBJECTS, bytes: self.objects, shared, source: "census and pagemap" };
        let of = |(part, name, source)| {
            let none = PartBytes { rss: 0, shared: Some(0) };
            let PartBytes { rss, shared } = self.parts.get(&part).copied().unwrap_or(none);
            Row { name, bytes: rss, shared, source }
        };
        std::iter::once(objects).chain(Part::ALL.map(of)).collect()
    }

    fn sentence(&self) -> String {
        let rows = self.rows();
        let parts: Vec<String> = rows
            .iter()
            .filter(|row| row.bytes > 0)
            .map(|row| format!("{} {}", row.name, data_size(row.bytes)))
            .collect();
        let mut text = format!("RSS {}", data_size(self.rss));
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

/// The difference of another count to the sum of the parts: `12 kB more`.
fn difference(other: u64, rss: u64) -> String {
    match other.cmp(&rss) {
        std::cmp::Ordering::Equal => "the same".to_owned(),
        std::cmp::Ordering::Less => format!("{} less", data_size(rss - other)),
        std::cmp::Ordering::Greater => format!("{} more", data_size(other - rss)),
    }
}

fn slots(counted: &Counted) -> [u64; 2] {
    [counted.census.live().bytes, counted.census.free.bytes]
}

/// Bytes of a mapping, without pages of objects, that a fork left shared with other processes. The kernel reports the sum, except for
/// mappings of files, where pages of the file, which are shared in any case, lie between.
fn shared(pages: &PageMap, map: &Resident, objects: Pages) -> io::Result<Option<u64>> {
    if !map.is_forked() {
        return Ok(Some(0));
    }
    if map.region != Region::File {
        return Ok(map.shared.checked_sub(objects.resident - objects.exclusive));
    }
    let size = pages.page();
    let mut shared = 0;
    pages.each(map.range.0, map.range.1 - map.range.0, |_, entry| {
        shared += if entry.is_shared_anonymous() { size } else { 0 };
    })?;
    Ok(Some(shared))
}

struct Row {
    name: &'static str,
    bytes: u64,
    shared: Option<u64>,
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
        objects_empty: u64,
        slots_live: u64,
        slots_free: u64,
        threads: u64,
        thread_stacks: u64,
        #[serde(skip_serializing_if = "Option::is_none")]
        vm_rss_before: Option<u64>,
        #[serde(skip_serializing_if = "Option::is_none")]
        vm_rss_after: Option<u64>,
        gc_count: u64,
        consistent: bool,
    },
    MemoryPart {
        pid: u32,
        name: &'a str,
        bytes: u64,
        shared: Option<u64>,
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
            objects_empty: account.objects_empty,
            slots_live: account.slots[0],
            slots_free: account.slots[1],
            threads: account.threads,
            thread_stacks: account.stacks,
            vm_rss_before: account.vm_rss[0],
            vm_rss_after: account.vm_rss[1],
            gc_count: report.gc_count[0],
            consistent: report.consistent,
        };
        jsonl::line(out, &line)?;
        for Row { name, bytes, shared, source } in account.rows() {
            jsonl::line(out, &Line::MemoryPart { pid, name, bytes, shared, source })?;
        }
        return Ok(());
    }
    super::text::head(out, report)?;
    writeln!(out, "\n{}\n", account.sentence())?;
    writeln!(out, "{:>14}{:>13}{:>14}  PART (SOURCE)", "BYTES", "SHARE", "FORKED")?;
    for Row { name, bytes, shared, source } in account.rows() {
        let shared = shared.map_or("-".to_owned(), |bytes| bytes.to_string());
        writeln!(out, "{bytes:>14}{:>13}{shared:>14}  {name} ({source})", percent(bytes, account.rss))?;
    }
    writeln!(out, "\nFORKED: of it, shared with other processes since a fork; copied when written")?;
    let [live, free] = account.slots;
    writeln!(out, "\nslots: {} in use, {} free", data_size(live), data_size(free))?;
    if account.objects_empty > 0 {
        let empty = data_size(account.objects_empty);
        writeln!(out, "pages of objects: {empty} in pages without slots, which Ruby keeps for reuse")?;
    }
    if shared > 0 {
        let share = percent(shared, account.objects);
        let shared = data_size(shared);
        writeln!(
            out,
            "pages of objects: {shared} ({share}) shared with other processes, copied when written"
        )?;
    }
    // The stack of the main thread is a separate part.
    let others = account.threads.saturating_sub(1);
    if account.stacks < others {
        writeln!(
            out,
            "thread stacks: of {} of {}; the others are in other anonymous",
            account.stacks,
            plural(others, "thread")
        )?;
    }
    if let [Some(before), Some(after)] = account.vm_rss {
        let [before, after] = [before, after].map(|rss| difference(rss, account.rss));
        writeln!(out, "read while it ran: VmRSS was {before} before and {after} after")?;
    }
    if account.swap > 0 {
        writeln!(out, "in swap: {}", data_size(account.swap))?;
    }
    Ok(())
}
