//! What is reported of a census: rows by type, class, slot size or occupancy of pages.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use super::Counted;
use crate::{
    cli::By,
    ruby::heap::{Page, Tally},
};

/// Whose heap it is, and how it is to be reported.
pub(super) struct Who {
    pub(super) pid: u32,
    pub(super) command: Option<String>,
    pub(super) ruby: String,
    pub(super) by: By,
}

/// A row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) name: String,
    /// Objects; of pages, pages.
    pub(super) count: u64,
    /// Bytes of slots.
    pub(super) bytes: u64,
    /// Free slots among them, where a row stands for slots or pages.
    pub(super) free: Option<u64>,
}

/// What is printed.
pub(super) struct Report {
    pub(super) who: Who,
    /// Rows, largest first.
    pub(super) rows: Vec<Row>,
    pub(super) live: Tally,
    pub(super) free: Tally,
    pub(super) total: u64,
    pub(super) pages: u64,
    pub(super) gc_count: [u64; 2],
    pub(super) allocated: Option<u64>,
    pub(super) sweeping: bool,
}

impl Report {
    pub(super) fn of(
        who: Who,
        counted: &Counted,
        mut class_name: impl FnMut(u64) -> Option<Arc<str>>,
    ) -> Self {
        let census = &counted.census;
        let mut rows = match who.by {
            By::Type => by_type(counted),
            By::Class => by_class(counted, &mut class_name),
            By::Size => by_size(&census.pages),
            By::Page => by_occupancy(&census.pages),
        };
        if matches!(who.by, By::Type | By::Class) {
            rows.sort_by(|one, two| two.count.cmp(&one.count).then_with(|| one.name.cmp(&two.name)));
        }
        Self {
            rows,
            live: census.live(),
            free: census.free,
            total: census.total(),
            pages: census.pages.len() as u64,
            gc_count: counted.gc_count,
            allocated: counted.allocated,
            sweeping: counted.sweeping,
            who,
        }
    }

    /// Whether the sums belong to one moment: no GC ran and nothing was allocated while the heap was read.
    pub(super) fn consistent(&self) -> bool {
        self.gc_count[0] == self.gc_count[1] && self.allocated == Some(0) && !self.sweeping
    }
}

fn by_type(counted: &Counted) -> Vec<Row> {
    let row = |(kind, tally): (&crate::ruby::heap::ObjectType, &Tally)| Row {
        name: kind.name().to_owned(),
        count: tally.count,
        bytes: tally.bytes,
        free: None,
    };
    counted.census.by_type.iter().map(row).collect()
}

/// Objects of one class are one row, whatever their type. Objects that Ruby code never sees are reported by type.
fn by_class(counted: &Counted, class_name: &mut impl FnMut(u64) -> Option<Arc<str>>) -> Vec<Row> {
    let mut names: HashMap<u64, Arc<str>> = HashMap::new();
    let mut rows: BTreeMap<String, Tally> = BTreeMap::new();
    for (&(kind, class), tally) in &counted.census.by_class {
        let name = if class == 0 {
            format!("(internal {})", kind.name())
        } else {
            let name = names
                .entry(class)
                .or_insert_with(|| class_name(class).unwrap_or_else(|| Arc::from("(class without a name)")));
            name.as_ref().to_owned()
        };
        let row = rows.entry(name).or_default();
        row.count += tally.count;
        row.bytes += tally.bytes;
    }
    let row =
        |(name, tally): (String, Tally)| Row { name, count: tally.count, bytes: tally.bytes, free: None };
    rows.into_iter().map(row).collect()
}

fn by_size(pages: &[Page]) -> Vec<Row> {
    let mut sizes: BTreeMap<u16, (u64, u64)> = BTreeMap::new();
    for page in pages {
        let (live, free) = sizes.entry(page.slot_size).or_default();
        *live += u64::from(page.live);
        *free += u64::from(page.slots - page.live);
    }
    let row = |(size, (live, free)): (u16, (u64, u64))| Row {
        name: size.to_string(),
        count: live,
        bytes: live * u64::from(size),
        free: Some(free),
    };
    sizes.into_iter().map(row).collect()
}

/// A page is given back to the system only when it is empty: nearly empty ones are what fragmentation costs.
fn by_occupancy(pages: &[Page]) -> Vec<Row> {
    const NAMES: [&str; 6] = ["empty", "1-25 %", "26-50 %", "51-75 %", "76-99 %", "full"];
    let mut rows = NAMES.map(|name| Row { name: name.to_owned(), count: 0, bytes: 0, free: Some(0) });
    for page in pages {
        let (live, slots) = (u32::from(page.live), u32::from(page.slots));
        let bucket = match live {
            0 => 0,
            _ if live == slots => 5,
            _ => (live * 100).div_ceil(slots).div_ceil(25).clamp(1, 4) as usize,
        };
        let row = &mut rows[bucket];
        row.count += 1;
        row.bytes += u64::from(page.slots) * u64::from(page.slot_size);
        row.free = row.free.map(|free| free + u64::from(page.slots - page.live));
    }
    rows.to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(slots: u16, live: u16) -> Page {
        Page { start: 0x1000, slot_size: 40, slots, live }
    }

    /// Each page is in the one row that its occupancy belongs to.
    #[test]
    fn occupancy() {
        let pages = [page(100, 0), page(100, 1), page(100, 25), page(100, 26), page(400, 399), page(7, 7)];
        let counts: Vec<u64> = by_occupancy(&pages).iter().map(|row| row.count).collect();
        assert_eq!(counts, [1, 2, 1, 0, 1, 1]);
        let free: u64 = by_occupancy(&pages).iter().filter_map(|row| row.free).sum();
        assert_eq!(free, 100 + 99 + 75 + 74 + 1);
    }

    /// Slots in use and free ones stand apart.
    #[test]
    fn sizes() {
        let rows = by_size(&[page(100, 60), Page { slot_size: 160, ..page(10, 10) }, page(100, 0)]);
        assert_eq!((rows[0].name.as_str(), rows[0].count, rows[0].free), ("40", 60, Some(140)));
        assert_eq!((rows[1].bytes, rows[1].free), (1600, Some(0)));
    }
}
