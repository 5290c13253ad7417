//! A heap in the format of `ObjectSpace.dump_all`: a JSON line for each object, in the order of pages. Documented in docs/heap.md.
//!
//! Source: `dump_object` (`ext/objspace/objspace_dump.c`). Values that cannot be read exactly are omitted from a line. Only one page is in
//! memory at a time, and lines are written as they are produced.

use std::{
    borrow::Cow,
    collections::{BTreeMap, HashMap},
    io::{self, Write},
    path::Path,
    sync::Arc,
};

use gctrace_tunemygc::printable::printable;
use serde::Serialize;

use super::{
    count::same_moment,
    failure::HeapFailure,
    jsonl::{self, Address, OfPlaces},
    places::{self, Known},
    target::Target,
};
use crate::{
    export,
    host::rest::Restful,
    ruby::{
        RubyVersion,
        frames::Memory,
        heap::{ClassNames, HeapError, NoPlaces, ObjectType, Origin, Places, Referred, Tracing, each_placed},
    },
    words::plural,
};

/// Maximum number of attempts; the dump is written again if a GC ran meanwhile.
const TRIES: u32 = 3;
/// `FL_FREEZE` (`include/ruby/internal/fl_type.h`).
const FROZEN: u64 = 1 << 11;
/// The kind of an internal object in its flags (`IMEMO_MASK`, internal/imemo.h), and `imemo_fields`, which exists from 4.0 on.
const IMEMO_SHIFT: u32 = 12;
const IMEMO_MASK: u64 = 0xf;
const IMEMO_FIELDS: u64 = 13;
/// Maximum number of references written for one object.
const MOST_REFERENCES: usize = 1 << 22;

/// The result of a dump.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Dumped {
    objects: u64,
    consistent: bool,
    gc_count: u64,
    gc_count_after: u64,
    allocated_meanwhile: Option<u64>,
    /// Number of objects, by type, whose references are not in the file because they cannot be read exactly.
    references_unknown: BTreeMap<&'static str, u64>,
    /// Number of objects that changed while they were read.
    changed: u64,
    /// Number of objects with an allocation site.
    allocated_at: u64,
    #[serde(flatten)]
    table: OfPlaces,
    /// The text if the dump is not consistent.
    #[serde(skip)]
    inconsistent: &'static str,
    /// Notes on the allocation sites.
    #[serde(skip)]
    places: Vec<String>,
}

impl Dumped {
    /// Whether no GC ran while it was written, and the table of allocation sites was not replaced meanwhile.
    fn is_whole(&self) -> bool {
        self.gc_count == self.gc_count_after && !self.table.is_changed()
    }
}

#[derive(Serialize)]
struct Line<'a> {
    address: Address,
    r#type: &'static str,
    slot_size: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    class: Option<Address>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    frozen: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    #[serde(flatten)]
    made: Option<Made<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    references: Option<&'a [Address]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    memsize: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    flags: Option<Flags>,
}

/// Where and when an object was allocated.
#[derive(Serialize)]
struct Made<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    line: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    method: Option<&'a str>,
    generation: u64,
}

#[derive(Serialize)]
struct Flags {
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    wb_protected: bool,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    old: bool,
    age: u8,
}

/// Objects that are held from outside the heap.
#[derive(Serialize)]
struct Held<'a> {
    r#type: &'static str,
    root: &'static str,
    references: &'a [Address],
}

/// The last line: a root without references, so that readers of such files skip it.
#[derive(Serialize)]
struct End<'a> {
    r#type: &'static str,
    root: &'static str,
    references: [u64; 0],
    #[serde(flatten)]
    dumped: &'a Dumped,
}

/// Writes the heap of the process to a file.
pub(super) fn write(target: &Target, path: &Path) -> Result<Dumped, HeapFailure> {
    let mut last: Option<Dumped> = None;
    let mut unread = None;
    let mut tracing = None;
    for _ in 0..TRIES {
        let mut failed = None;
        let written = export::write_atomically(path, |out| match dump(target, &mut tracing, out) {
            Ok(dumped) => {
                last = Some(dumped);
                Ok(())
            }
            Err(Stopped::Output(error)) => Err(error),
            Err(Stopped::Heap(source)) => {
                failed = Some(source);
                Err(io::Error::other("the heap could not be read"))
            }
        });
        match (written, failed) {
            (Ok(()), _) if last.as_ref().is_some_and(Dumped::is_whole) => break,
            (Ok(()), _) => {}
            // A page may have been given back meanwhile. A file from an earlier attempt still exists.
            (Err(_), Some(source)) => unread = Some(source),
            (Err(source), None) => return Err(HeapFailure::File { path: path.to_owned(), source }),
        }
    }
    last.ok_or_else(|| target.failure(unread.unwrap_or(HeapError::Layout)))
}

enum Stopped {
    Output(io::Error),
    Heap(HeapError),
}

impl From<HeapError> for Stopped {
    fn from(source: HeapError) -> Self {
        Self::Heap(source)
    }
}

fn dump(
    target: &Target,
    tracing: &mut Option<Result<Tracing, NoPlaces>>,
    out: &mut dyn Write,
) -> Result<Dumped, Stopped> {
    let mut restful;
    let out: &mut dyn Write = match target.memory.bursts() {
        Some(bursts) => {
            restful = Restful::new(out, bursts);
            &mut restful
        }
        None => out,
    };
    let layout = target.layout()?;
    let mut names = target.names();
    let mut references = target.references(&layout);
    // Each value, and whether it is an object of the heap. Values of global variables of C code may be anything.
    let globals = names.as_mut().and_then(ClassNames::global_values).unwrap_or_default();
    let mut globals: BTreeMap<u64, bool> = globals.into_iter().map(|value| (value, false)).collect();
    let mut dumped = Dumped::default();
    let mut referred = Vec::new();
    let mut failed = Ok(());
    let (objspace, before) = target.state()?;
    let tracing = match tracing {
        Some(tracing) => *tracing,
        None => *tracing.insert(places::find(target, objspace, &layout)?),
    };
    let places = places::read(target, tracing, &before);
    let (_, state) = target.state()?;
    let mut reader = places.as_ref().ok().map(|places| places::placed(target, places, &state));
    let mut methods = Methods::default();
    each_placed(&target.memory, objspace, &layout, reader.as_mut(), |slot, origin| {
        if failed.is_err() {
            return;
        }
        dumped.objects += 1;
        if let Some(seen) = globals.get_mut(&slot.address) {
            *seen = true;
        }
        referred.clear();
        let kind = slot.kind();
        let has_class = has_class(kind, slot.flags(), target.plan.analysis.version);
        let known = references.as_mut().map_or(Referred::Unknown, |references| {
            references.each(&target.memory, slot, &mut |value| {
                if referred.len() < MOST_REFERENCES {
                    referred.push(Address(value));
                }
            })
        });
        let known = if referred.len() < MOST_REFERENCES { known } else { Referred::Unknown };
        match known {
            Referred::Exactly => {}
            // A part of the references is not written: readers take what is there for all of them.
            Referred::Partly | Referred::Unknown => {
                *dumped.references_unknown.entry(short(kind)).or_default() += 1;
            }
            Referred::Changed => dumped.changed += 1,
        }
        let name = if matches!(kind, ObjectType::CLASS | ObjectType::MODULE) {
            names.as_mut().and_then(|names| names.own_name(slot.address))
        } else {
            None
        };
        let exactly = known == Referred::Exactly && !referred.is_empty();
        let (made, plain) = match (&places, origin) {
            (Ok(places), Some(origin)) => methods.made(places, origin, names.as_mut()),
            _ => (None, true),
        };
        dumped.allocated_at += u64::from(made.is_some());
        let line = Line {
            made,
            address: Address(slot.address),
            r#type: short(kind),
            slot_size: slot.bytes.len() as u64,
            class: (has_class && slot.class() != 0).then(|| Address(slot.class())),
            frozen: has_class && slot.flags() & FROZEN != 0,
            name: name.as_deref(),
            references: exactly.then_some(&referred),
            memsize: slot
                .owned(&layout)
                .filter(|_| !slot.has_other_variables(&layout))
                .map(|owned| owned + slot.bytes.len() as u64),
            flags: slot.marks.map(|marks| Flags {
                wb_protected: !marks.unprotected,
                old: marks.is_old(),
                age: marks.age,
            }),
        };
        failed = match line.name {
            // It contains no text from outside, or only harmless text; an object with a million references is not held as a text.
            None if plain => jsonl::plain_line(out, &line),
            _ => jsonl::line(out, &line),
        };
    })?;
    failed.map_err(Stopped::Output)?;
    let known = match (&places, &reader) {
        (Ok(places), Some(reader)) => Ok(Known::of(places, reader)),
        (Err(reason), _) => Err(*reason),
        (Ok(_), None) => Err(NoPlaces::Release),
    };
    (dumped.table, dumped.places) = (OfPlaces::of(known), known.map(Known::words).unwrap_or_default());
    drop(reader);
    globals.retain(|_, seen| *seen);
    if !globals.is_empty() {
        let references: Vec<Address> = globals.into_keys().map(Address).collect();
        let root = Held { r#type: "ROOT", root: "global_tbl", references: &references };
        jsonl::plain_line(out, &root).map_err(Stopped::Output)?;
    }
    let (_, after) = target.state()?;
    if places.is_ok() && places::is_left_behind(&target.plan, &after) {
        return Err(HeapError::Implausible("its heap was compacted meanwhile".to_owned()).into());
    }
    let moment = same_moment(&target.plan, &before, &after);
    (dumped.consistent, dumped.inconsistent) = (moment.consistent(), moment.words());
    [dumped.gc_count, dumped.gc_count_after] = moment.gc_count;
    dumped.allocated_meanwhile = moment.allocated;
    let end = End { r#type: "ROOT", root: "gctrace", references: [], dumped: &dumped };
    jsonl::line(out, &end).map_err(Stopped::Output)?;
    Ok(dumped)
}

/// Method names of allocation sites, each read once.
#[derive(Default)]
struct Methods(HashMap<u32, (Option<Arc<str>>, bool)>);

impl Methods {
    /// Where and when an object was allocated, and whether that can be printed without escaping.
    fn made<'a, M: Memory>(
        &'a mut self,
        places: &'a Places,
        origin: Origin,
        names: Option<&mut ClassNames<M>>,
    ) -> (Option<Made<'a>>, bool) {
        let Some(place) = places.place(origin.place) else { return (None, true) };
        let file = places.file(place).map(AsRef::as_ref);
        let (method, plain) = self.0.entry(origin.place).or_insert_with(|| {
            let method = names.and_then(|names| names.symbol_name(place.method));
            let plain = |text: &str| matches!(printable(text), Cow::Borrowed(_));
            let both = file.is_none_or(plain) && method.as_deref().is_none_or(plain);
            (method, both)
        });
        let line = (place.line > 0).then_some(place.line);
        (Some(Made { file, line, method: method.as_deref(), generation: origin.generation }), *plain)
    }
}

/// Whether Ruby's own dump has a class for this object: most internal objects have something else in its place. Objects with the instance
/// variables of others (`imemo_fields`, 4.0) have their owner there, and `dump_object` writes it.
fn has_class(kind: ObjectType, flags: u64, version: RubyVersion) -> bool {
    match kind.name() {
        "T_IMEMO" => version.at_least(4, 0) && flags >> IMEMO_SHIFT & IMEMO_MASK == IMEMO_FIELDS,
        "T_NODE" | "T_ZOMBIE" | "T_MOVED" | "T_NONE" => false,
        _ => true,
    }
}

/// The type without `T_`.
fn short(kind: ObjectType) -> &'static str {
    kind.name().trim_start_matches("T_")
}

/// The summary of a dump as lines of text.
pub(super) fn summary(path: &Path, dumped: &Dumped) -> Vec<String> {
    let mut lines = vec![format!("{} written to {}", plural(dumped.objects, "object"), path.display())];
    if !dumped.consistent {
        lines.push(dumped.inconsistent.to_owned());
    }
    lines.extend_from_slice(&dumped.places);
    let unknown: u64 = dumped.references_unknown.values().sum();
    if unknown > 0 {
        let kinds: Vec<&str> = dumped.references_unknown.keys().copied().collect();
        let objects = plural(unknown, "object");
        lines.push(format!("without the references of {objects} that cannot be read ({})", kinds.join(", ")));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of internal objects, only those with the instance variables of others have a class, from 4.0 on.
    #[test]
    fn classes() {
        let has = |flags: u64, major: u16, minor: u16| {
            has_class(ObjectType::of_flags(flags), flags, RubyVersion::new(major, minor, 0))
        };
        let (string, imemo, fields) = (0x5, 0x1a | 10 << 12, 0x1a | 13 << 12);
        assert_eq!([(3, 4), (4, 0)].map(|(major, minor)| has(string, major, minor)), [true, true]);
        assert_eq!([(3, 4), (4, 0)].map(|(major, minor)| has(imemo, major, minor)), [false, false]);
        assert_eq!([(3, 4), (4, 0)].map(|(major, minor)| has(fields, major, minor)), [false, true]);
        assert!(!has(0x1b, 4, 0) && !has(0x1d, 4, 0));
    }
}
