//! The report of a census: rows by type, class, slot size, age or occupancy of pages.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use super::{
    count::Counted,
    places::{Known, Traced},
    target::{Target, key},
};
use crate::{
    cli::By,
    ruby::{
        frames::Memory,
        heap::{ByClass, Census, ClassNames, HeapError, Keeper, NoPlaces, ObjectType, Page, Tally},
    },
};

/// The process, and the kind of report.
pub(super) struct Who {
    pub(super) pid: u32,
    pub(super) command: Option<String>,
    pub(super) ruby: String,
    pub(super) by: By,
}

/// A row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) name: String,
    /// Number of objects; if rows represent pages, of pages.
    pub(super) count: u64,
    /// Bytes of slots.
    pub(super) bytes: u64,
    /// Number of free slots among them, if rows represent slots or pages.
    pub(super) free: Option<u64>,
    /// Sums over the objects, if rows represent objects.
    pub(super) objects: Option<Tally>,
    /// If rows represent classes: number of classes with this name, if more than one.
    pub(super) classes: Option<u64>,
    /// If rows represent lines: the line, and the class of the objects.
    pub(super) line: Option<Allocated>,
}

/// The line and class of allocated objects.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Allocated {
    /// File and line; `None`: outside Ruby code.
    pub(super) place: Option<(Arc<str>, u32)>,
    pub(super) class: String,
}

/// Objects that keep nearly empty pages from being given back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct KeeperRow {
    pub(super) name: String,
    pub(super) keeper: Keeper,
}

/// The data to print.
pub(super) struct Report {
    pub(super) who: Who,
    /// Rows, largest first.
    pub(super) rows: Vec<Row>,
    /// With `--by page`: what keeps nearly empty pages, most pages first.
    pub(super) keepers: Vec<KeeperRow>,
    /// Number of nearly empty pages.
    pub(super) nearly_empty: u64,
    pub(super) live: Tally,
    pub(super) free: Tally,
    pub(super) total: u64,
    pub(super) pages: u64,
    pub(super) gc_count: [u64; 2],
    pub(super) allocated: Option<u64>,
    pub(super) sweeping: bool,
    /// Whether no collection began, continued or ended meanwhile, and no slot was freed.
    pub(super) still: bool,
    pub(super) consistent: bool,
    /// The text if it is not.
    pub(super) inconsistent: &'static str,
    pub(super) known: ObjectBits,
    /// With `--by line`: notes on the table of allocation sites, or why there is none.
    pub(super) places: Option<Result<Known, NoPlaces>>,
}

/// The text for a heap that was compacted between the census and the reading of the names of classes.
pub(super) const COMPACTED: &str =
    "not of one moment: the heap was compacted meanwhile, and rows may have names of other classes";

/// Which bits of objects are known for this Ruby.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ObjectBits {
    /// Age, write barriers and death.
    pub(super) bits: bool,
    /// Pins.
    pub(super) pins: bool,
}

impl Report {
    /// Reports a census.
    ///
    /// # Errors
    ///
    /// The process ended, or became another program, before the names of classes were read.
    pub(super) fn of(target: &Target, by: By, counted: &Counted) -> Result<Self, HeapError> {
        Self::made(target, by, counted, true)
    }

    /// The same without the number of classes that share the name of a row, for which each class would be read once more: a census must end
    /// before the next collection.
    pub(super) fn brief(target: &Target, by: By, counted: &Counted) -> Result<Self, HeapError> {
        Self::made(target, by, counted, false)
    }

    fn made(target: &Target, by: By, counted: &Counted, classes: bool) -> Result<Self, HeapError> {
        let who = Who { pid: target.pid, command: target.command.clone(), ruby: target.ruby(), by };
        let mut report = match target.names() {
            Some(mut names) => Self::with(who, counted, |class| {
                let name = class_name(&mut names, &target.memory, class);
                (name, if classes { names.real_class(class) } else { None })
            }),
            None => Self::with(who, counted, |class| (Some(format!("(class at {class:#x})").into()), None)),
        };
        let (_, state) = target.state()?;
        // Classes are named after the objects were counted.
        if key(&target.plan, "compact_count", &state) != counted.compactions {
            report.consistent = false;
            report.inconsistent = COMPACTED;
        }
        Ok(report)
    }

    fn with(who: Who, counted: &Counted, class_name: impl FnMut(u64) -> Named) -> Self {
        let census = &counted.census;
        let live = census.live();
        let mut labels = Labels { class_name, known: HashMap::new() };
        let mut rows = match who.by {
            By::Type => by_type(counted),
            By::Class => by_class(&census.by_class, &mut labels),
            By::Line => by_line(census, counted.places.as_ref(), &mut labels),
            By::Size => by_size(&census.pages),
            By::Page => by_occupancy(&census.pages),
            By::Age if counted.knows_bits => by_age(&live),
            By::Age | By::Memory => Vec::new(),
        };
        if matches!(who.by, By::Type | By::Class | By::Line) {
            rows.sort_by(|one, two| two.count.cmp(&one.count).then_with(|| one.name.cmp(&two.name)));
        }
        let keepers = if who.by == By::Page { keepers(&census.keepers, &mut labels) } else { Vec::new() };
        Self {
            rows,
            keepers,
            nearly_empty: census.pages.iter().filter(|page| page.nearly_empty()).count() as u64,
            live,
            free: census.free,
            total: census.total(),
            pages: census.pages.len() as u64,
            gc_count: counted.moment.gc_count,
            allocated: counted.moment.allocated,
            sweeping: counted.moment.sweeping,
            still: counted.moment.still,
            consistent: counted.moment.consistent(),
            inconsistent: counted.moment.words(),
            places: counted
                .places
                .as_ref()
                .map(|places| places.as_ref().map(|traced| traced.known).map_err(|reason| *reason)),
            known: ObjectBits { bits: counted.knows_bits, pins: counted.knows_bits && counted.knows_pins },
            who,
        }
    }
}

/// The name of a class, and the address of the class that `Object#class` returns.
type Named = (Option<Arc<str>>, Option<u64>);

/// Names of rows for classes, each read once.
struct Labels<F> {
    class_name: F,
    known: HashMap<u64, (Arc<str>, Option<u64>)>,
}

impl<F: FnMut(u64) -> Named> Labels<F> {
    /// The name of the row. Objects of one class are one row, whatever their type. Objects that Ruby code never sees are reported by type.
    fn of(&mut self, kind: ObjectType, class: u64) -> String {
        self.label(kind, class).0.as_ref().to_owned()
    }

    /// The same, and the address of the class, if it has a name.
    fn label(&mut self, kind: ObjectType, class: u64) -> (Arc<str>, Option<u64>) {
        if class == 0 {
            return (class_label(kind, 0, |_| None).into(), None);
        }
        let Self { class_name, known } = self;
        let label = known.entry(class).or_insert_with(|| {
            let (name, real) = class_name(class);
            let real = real.filter(|_| name.as_ref().is_some_and(|name| !name.starts_with('(')));
            (class_label(kind, class, |_| name.clone()).into(), real)
        });
        (Arc::clone(&label.0), label.1)
    }
}

/// The name of the class of objects with this class pointer; `None`: the class has no name. If there is no class at that address, for example
/// because the program continued and freed it, the returned name says so.
pub(super) fn class_name<M: Memory>(
    names: &mut ClassNames<M>,
    memory: &impl Memory,
    class: u64,
) -> Option<Arc<str>> {
    names.name(class).or_else(|| (!is_class(memory, class)).then(|| "(class that cannot be read)".into()))
}

/// Whether a class, or the stand-in for an included module, is at an address.
fn is_class(memory: &impl Memory, address: u64) -> bool {
    let mut flags = [0; 8];
    if !memory.read(address, &mut flags) {
        return false;
    }
    let kind = ObjectType::of_flags(u64::from_le_bytes(flags));
    ["T_CLASS", "T_ICLASS"].contains(&kind.name())
}

/// The name of the row for an object of this type and class; `class` is 0 for hidden objects.
pub(super) fn class_label(
    kind: ObjectType,
    class: u64,
    mut name: impl FnMut(u64) -> Option<Arc<str>>,
) -> String {
    if class == 0 {
        return format!("(internal {})", kind.name());
    }
    name(class).map_or_else(|| "(class without a name)".to_owned(), |name| name.as_ref().to_owned())
}

fn row(name: String, tally: &Tally) -> Row {
    Row { name, count: tally.count, bytes: tally.bytes, objects: Some(*tally), ..Row::default() }
}

fn by_type(counted: &Counted) -> Vec<Row> {
    counted.census.by_type.iter().map(|(kind, tally)| row(kind.name().to_owned(), tally)).collect()
}

fn by_class<F: FnMut(u64) -> Named>(classes: &ByClass<Tally>, labels: &mut Labels<F>) -> Vec<Row> {
    let mut rows: BTreeMap<Arc<str>, (Tally, BTreeSet<u64>)> = BTreeMap::new();
    for (&(kind, class), tally) in classes {
        let (name, real) = labels.label(kind, class);
        let (sum, classes) = rows.entry(name).or_default();
        sum.absorb(tally);
        classes.extend(real);
    }
    let rows = rows.into_iter().map(|(name, (tally, classes))| Row {
        classes: Some(classes.len() as u64).filter(|count| *count > 1),
        ..row(name.as_ref().to_owned(), &tally)
    });
    rows.collect()
}

/// Objects without an allocation site are one row, whatever their class.
fn by_line<F: FnMut(u64) -> Named>(
    census: &Census,
    traced: Option<&Result<Traced, NoPlaces>>,
    labels: &mut Labels<F>,
) -> Vec<Row> {
    let mut rows: BTreeMap<Option<Allocated>, Tally> = BTreeMap::new();
    let Some(Ok(Traced { places, .. })) = traced else {
        return vec![row(NOT_TRACED.to_owned(), &census.live())];
    };
    for (&(place, kind, class), tally) in &census.by_place {
        let line = place.and_then(|place| places.place(place)).map(|place| Allocated {
            place: places.file(place).map(|file| (Arc::clone(file), place.line)),
            class: labels.of(kind, class),
        });
        rows.entry(line).or_default().absorb(tally);
    }
    let rows = rows.into_iter().map(|(line, tally)| {
        let name = line.as_ref().map_or_else(|| NOT_TRACED.to_owned(), Allocated::name);
        Row { line, ..row(name, &tally) }
    });
    rows.collect()
}

/// The row of objects without an allocation site.
const NOT_TRACED: &str = "(not traced)";

impl Allocated {
    /// File and line.
    pub(super) fn line(&self) -> String {
        match &self.place {
            Some((file, line)) => format!("{file}:{line}"),
            None => "(outside of Ruby code)".to_owned(),
        }
    }

    /// The name of the row, which is unique.
    fn name(&self) -> String {
        format!("{} {}", self.line(), self.class)
    }
}

/// A page with objects of several classes of the same name is counted for each of the classes.
fn keepers<F: FnMut(u64) -> Named>(keepers: &ByClass<Keeper>, labels: &mut Labels<F>) -> Vec<KeeperRow> {
    let name = |(&(kind, class), keeper): (&(ObjectType, u64), &Keeper)| KeeperRow {
        name: if class == 0 {
            labels.of(kind, class)
        } else {
            format!("{} ({})", labels.of(kind, class), kind.name())
        },
        keeper: *keeper,
    };
    let mut rows: Vec<KeeperRow> = keepers.iter().map(name).collect();
    let rank = |row: &KeeperRow| std::cmp::Reverse((row.keeper.pages, row.keeper.tally.count));
    rows.sort_by(|one, two| rank(one).cmp(&rank(two)).then_with(|| one.name.cmp(&two.name)));
    rows
}

fn by_age(live: &Tally) -> Vec<Row> {
    const NAMES: [&str; 4] = ["0 (new)", "1", "2", "3 (old)"];
    let row = |(name, count): (&&str, u64)| Row { name: (*name).to_owned(), count, ..Row::default() };
    NAMES.iter().zip(live.ages).map(row).collect()
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
        ..Row::default()
    };
    sizes.into_iter().map(row).collect()
}

/// A page is given back to the system only when it is empty: nearly empty pages are the cost of fragmentation.
fn by_occupancy(pages: &[Page]) -> Vec<Row> {
    const NAMES: [&str; 6] = ["empty", "1-25 %", "26-50 %", "51-75 %", "76-99 %", "full"];
    let mut rows = NAMES.map(|name| Row { name: name.to_owned(), free: Some(0), ..Row::default() });
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
        Page { start: 0x1000, slot_size: 40, slots, live, old: 0, pinned: 0 }
    }

    /// Each page is in exactly the row of its occupancy.
    #[test]
    fn occupancy() {
        let pages = [page(100, 0), page(100, 1), page(100, 25), page(100, 26), page(400, 399), page(7, 7)];
        let counts: Vec<u64> = by_occupancy(&pages).iter().map(|row| row.count).collect();
        assert_eq!(counts, [1, 2, 1, 0, 1, 1]);
        let free: u64 = by_occupancy(&pages).iter().filter_map(|row| row.free).sum();
        assert_eq!(free, 100 + 99 + 75 + 74 + 1);
        let nearly: Vec<bool> = pages.iter().map(Page::nearly_empty).collect();
        assert_eq!(nearly, [false, true, true, false, false, false]);
    }

    /// A class without a name is recognised; an unreadable or free slot, or another object, is not a class.
    #[test]
    fn classes() {
        struct Words(BTreeMap<u64, u64>);
        impl Memory for Words {
            fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
                self.0.get(&address).map(|word| buffer.copy_from_slice(&word.to_le_bytes())).is_some()
            }
        }
        let flags = [(0x10, 0x1000_0062), (0x20, 0x1c), (0x30, 0), (0x40, 0x03), (0x50, 0x61)];
        let memory = Words(flags.into());
        let classes = [0x10, 0x20, 0x30, 0x40, 0x50, 0x60].map(|address| is_class(&memory, address));
        assert_eq!(classes, [true, true, false, false, false, false]);
    }

    /// Classes of the same name are one row, which says how many there are; a singleton class does not count as another class.
    #[test]
    fn classes_of_one_name() {
        // 0x11 is the singleton class of an object of 0x10; 0x30 and 0x31 have no name, and 0x40 cannot be read.
        let class_name = |class: u64| match class {
            0x10..0x20 => (Some("Dup".into()), Some(0x10)),
            0x20..0x30 => (Some("Dup".into()), Some(class)),
            0x30 | 0x31 => (None, Some(class)),
            _ => (Some("(class that cannot be read)".into()), Some(class)),
        };
        let mut labels = Labels { class_name, known: HashMap::new() };
        let tally = Tally { count: 1, ..Tally::default() };
        let rows = |labels: &mut Labels<_>, classes: &[u64]| {
            let kinds = [ObjectType::OBJECT, ObjectType::ARRAY];
            let classes = classes.iter().flat_map(|class| kinds.map(|kind| ((kind, *class), tally)));
            let rows = by_class(&classes.collect(), labels);
            rows.into_iter().map(|row| (row.name, row.count, row.classes)).collect::<Vec<_>>()
        };
        let row = |name: &str, count, classes| (name.to_owned(), count, classes);
        assert_eq!(rows(&mut labels, &[0x10, 0x11]), [row("Dup", 4, None)]);
        assert_eq!(rows(&mut labels, &[0x10, 0x11, 0x20, 0x21]), [row("Dup", 8, Some(3))]);
        assert_eq!(
            rows(&mut labels, &[0x30, 0x31, 0x40, 0x41]),
            [row("(class that cannot be read)", 4, None), row("(class without a name)", 4, None)]
        );
    }

    /// Slots in use and free slots are separate.
    #[test]
    fn sizes() {
        let rows = by_size(&[page(100, 60), Page { slot_size: 160, ..page(10, 10) }, page(100, 0)]);
        assert_eq!((rows[0].name.as_str(), rows[0].count, rows[0].free), ("40", 60, Some(140)));
        assert_eq!((rows[1].bytes, rows[1].free), (1600, Some(0)));
    }
}
