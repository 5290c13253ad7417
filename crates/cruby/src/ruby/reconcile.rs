//! What is known of an image's layout, and from which source: the table of its release compared with its code.
//!
//! If both have a value, they must agree. A release without a table of its own is read as far as its code reveals.

use std::borrow::Cow;
use std::fmt;

use gctrace_common::config::Span;

use super::derive::{Derivation, NotDerived};
use super::formula::{Formula, Piece};
use super::layout::{LayoutError, ObjspaceLayout, Wanted};
use super::stat::{self, Sign};
use super::tables::Table;
use super::{RubyAnalysis, RubyVersion, VmPath};
use crate::elf::Machine;

/// Why the layout of an image is not known.
#[derive(Debug, thiserror::Error)]
pub enum Unproven {
    /// No layout is known for the version, or the code does not give what a snapshot needs.
    #[error("{0}")]
    Layout(#[from] LayoutError),
    /// The table and the machine code disagree: another build configuration or a patched Ruby.
    #[error(
        "the code of this CRuby {version} computes `{field}` from {derived} and the layout table says {table}: \
         a build with other options; its objspace cannot be read exactly"
    )]
    Disagrees {
        /// Version.
        version: RubyVersion,
        /// Member or key.
        field: String,
        /// The code's value, as offsets in the objspace and sizes.
        derived: String,
        /// The table's value, in the same form.
        table: String,
    },
}

/// The source of a fact about a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Table and code agree.
    Confirmed,
    /// From the table; the code did not reveal it.
    Table,
    /// From the code; no table has it.
    Code,
}

impl Source {
    /// The word used on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::Confirmed => "table and code",
            Self::Table => "table",
            Self::Code => "code",
        }
    }
}

/// A key that is not read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Absent {
    /// Its name.
    pub name: String,
    /// Why not.
    pub reason: String,
}

/// The source of each part of a layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Knowledge {
    /// First and last release of the table that applies to this release, if there is one.
    pub table: Option<[RubyVersion; 2]>,
    /// Whether the table was read from the debug information of exactly this build.
    pub own: bool,
    /// Fields other than the keys.
    pub fields: Vec<(&'static str, Source)>,
    /// The `GC.stat` keys.
    pub keys: Vec<(&'static str, Source)>,
    /// Keys of this Ruby that are not read.
    pub absent: Vec<Absent>,
}

impl Knowledge {
    /// Number of keys with this source.
    pub fn keys_by(&self, source: Source) -> usize {
        self.keys.iter().filter(|(_, its)| *its == source).count()
    }

    /// Whether this very build reveals how it counts its live slots, by its code or by its debug information.
    pub fn shows_live_slots(&self) -> bool {
        let shown = |(name, source): &(&str, Source)| *name == "heap_live_slots" && *source != Source::Table;
        self.own || self.keys.iter().any(shown)
    }
}

impl fmt::Display for Knowledge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.table {
            Some([from, to]) => {
                if self.own {
                    write!(f, "debug information of this build")?;
                } else {
                    write!(f, "table {from}–{to}")?;
                }
                let confirmed = self.keys_by(Source::Confirmed);
                write!(f, ", {confirmed} of {} keys confirmed by the code", self.keys.len())?;
            }
            None => write!(f, "no table for this release, {} keys derived from the code", self.keys.len())?,
        }
        match self.absent.len() {
            0 => Ok(()),
            absent => write!(f, ", {absent} keys absent"),
        }
    }
}

/// The layout of an image. `own`: the layout of exactly this build, from its debug information. `per_thread`: see
/// [`ObjspaceLayout::of`].
pub(super) fn settle(
    analysis: &RubyAnalysis,
    own: Option<&Table>,
    per_thread: bool,
) -> Result<(ObjspaceLayout, Knowledge), Unproven> {
    let version = analysis.version;
    let evidence = Evidence {
        machine: analysis.machine,
        version,
        vm: &analysis.vm,
        derived: &analysis.derived,
        per_thread,
    };
    let (wanted, knowledge) = match (own, Table::of(version)) {
        (Some(own), _) => {
            let (wanted, knowledge) = evidence.confirm(own)?;
            (wanted, Knowledge { own: true, ..knowledge })
        }
        (None, Ok(table)) => evidence.confirm(table)?,
        (None, Err(unknown)) => evidence.derive(Table::newest_of_series(version), &unknown)?,
    };
    Ok((ObjspaceLayout::bind(version, wanted)?, knowledge))
}

/// Name of a field, its structure and its possible names there, and the place that the code reveals.
type Around = (&'static str, (&'static str, &'static [&'static str]), Option<Piece>);

/// Facts from the code of an image.
#[derive(Clone, Copy)]
pub(super) struct Evidence<'a> {
    pub(super) machine: Machine,
    pub(super) version: RubyVersion,
    pub(super) vm: &'a VmPath,
    pub(super) derived: &'a Derivation,
    pub(super) per_thread: bool,
}

impl Evidence<'_> {
    /// The facts of the release's table, unless the code contradicts them.
    pub(super) fn confirm(&self, table: &Table) -> Result<(Wanted, Knowledge), Unproven> {
        let mut wanted = Wanted::of_table(self.version, table, self.per_thread)?;
        let info = &self.derived.info;
        let word = |offset: &Result<u32, NotDerived>| offset.as_ref().ok().map(|at| Piece::direct(*at, 4));
        let mut fields = Vec::new();
        let mut field = |name, code: Option<String>, table: Option<String>| {
            let Some(table) = table else { return Ok(()) };
            fields.push((name, if code.is_some() { Source::Confirmed } else { Source::Table }));
            match code {
                Some(code) if code != table => Err(self.disagreement(name, code, table)),
                _ => Ok(()),
            }
        };
        let shown = |piece: Option<Piece>| piece.map(|piece| piece.to_string());
        let (weak, retained) = wanted.weak_references.unzip();
        let count = Piece::direct(self.vm.count, 8);
        field("profile.count", shown(Some(count)), shown(Some(wanted.count)))?;
        let flags = Piece::direct(self.vm.flags, 4);
        field("flags", shown(Some(flags)), shown(Some(Piece::direct(wanted.flags, 4))))?;
        let mode = |bit| format!("2 bits from bit {bit}");
        let (bit, bits) = wanted.mode_bits;
        let table_mode = if bits == 2 { mode(bit) } else { format!("{bits} bits from bit {bit}") };
        field("flags.mode", info.mode_bit.as_ref().ok().map(|&bit| mode(bit)), Some(table_mode))?;
        let latest = shown(word(&info.latest_gc_info));
        field("profile.latest_gc_info", latest, shown(Some(wanted.latest_gc_info)))?;
        field("rgengc.need_major_gc", shown(word(&info.need_major_gc)), shown(wanted.need_major_gc))?;
        let code = shown(info.weak_references_count.clone().ok());
        field("profile.weak_references_count", code, shown(weak))?;
        let code = shown(info.retained_weak_references_count.clone().ok());
        field("profile.retained_weak_references_count", code, shown(retained.flatten()))?;

        // These are not read for a snapshot, but the code itself goes through them.
        for (name, (structure, members), code) in self.around() {
            // The tables are for x86-64. The objspace has the same layout everywhere. Of these structures, those that contain
            // locks do not (glibc's have other sizes on aarch64), and only the code shows them.
            if code.is_none() || self.machine != Machine::X86_64 {
                continue;
            }
            let table = table.structure(structure).and_then(|s| members.iter().find_map(|m| s.field(m)));
            field(name, shown(code), shown(table.map(|its| Piece::direct(its.offset, its.size))))?;
        }

        if let Err(contradiction @ NotDerived::Contradiction(_)) = &self.derived.stat {
            return Err(self.disagreement("GC.stat", contradiction.to_string(), wanted.count.to_string()));
        }
        let mut keys = Vec::with_capacity(wanted.keys.len());
        for (name, formula) in &wanted.keys {
            let source = match self.formula(name) {
                Some(code) if code == formula => Source::Confirmed,
                // Terms that lie elsewhere were not understood; the rest must be equal.
                Some(code) if code.outside > 0 && in_objspace(code) == in_objspace(formula) => Source::Table,
                Some(code) => return Err(self.disagreement(*name, code.to_string(), formula.to_string())),
                None => Source::Table,
            };
            keys.push((*name, source));
        }
        let mut absent: Vec<Absent> = wanted.absent.iter().map(|name| per_thread(name)).collect();
        // Keys that this build has and its series lacks.
        let has =
            |name: &str| wanted.keys.iter().any(|(key, _)| *key == name) || wanted.absent.contains(&name);
        let (extra, unread) = self.keys_of_code(|name| !has(name));
        keys.extend(extra.iter().map(|(name, _)| (*name, Source::Code)));
        absent.extend(unread);
        wanted.keys.extend(extra);
        let range = [table.from, table.to].map(|(major, minor, teeny)| RubyVersion::new(major, minor, teeny));
        Ok((wanted, Knowledge { table: Some(range), own: false, fields, keys, absent }))
    }

    /// Fields of other structures that the code reveals: name, structure and members in a table, place.
    fn around(&self) -> [Around; 7] {
        let pointer = |offset: Option<u32>| offset.map(|offset| Piece::direct(offset, 8));
        let derived = |offset: &Result<u32, NotDerived>| pointer(offset.as_ref().ok().copied());
        let thread = self.derived.thread.as_ref().ok();
        let ec = &self.derived.ec;
        let (execution_context, rb_thread) = ("rb_execution_context_struct", "rb_thread_struct");
        [
            (
                "vm.objspace",
                ("rb_vm_struct", &["objspace", "gc.objspace"]),
                pointer(Some(self.vm.vm_objspace)),
            ),
            ("ec.thread_ptr", (execution_context, &["thread_ptr"]), derived(&ec.thread_ptr)),
            ("ec.cfp", (execution_context, &["cfp"]), derived(&ec.cfp)),
            ("ec.errinfo", (execution_context, &["errinfo"]), derived(&ec.errinfo)),
            ("thread.self", (rb_thread, &["self"]), derived(&ec.thread_self)),
            ("thread.ractor", (rb_thread, &["ractor"]), pointer(thread.map(|its| its.thread_ractor))),
            (
                "ractor.newobj_cache",
                ("rb_ractor_struct", &["newobj_cache"]),
                pointer(thread.map(|its| its.ractor_cache)),
            ),
        ]
    }

    /// The facts proven by the code alone. The table of another release of the series only says which keys to look for.
    pub(super) fn derive(
        &self,
        hypothesis: Option<&Table>,
        unknown: &LayoutError,
    ) -> Result<(Wanted, Knowledge), Unproven> {
        let refuse = |field: &'static str, reason: &dyn fmt::Display| {
            Unproven::Layout(LayoutError::NotProven {
                unknown: unknown.to_string(),
                field,
                reason: reason.to_string(),
            })
        };
        let stat = self.derived.stat.as_ref().map_err(|reason| refuse("GC.stat", reason))?;
        let info = &self.derived.info;
        let counter = |name: &'static str| match stat.formula(name) {
            Some(Formula { terms, divisor: 1, outside: 0 }) => match terms[..] {
                [(Sign::Plus, piece)] => Ok(piece),
                _ => Err(refuse(name, &"it is not a single field")),
            },
            Some(_) => Err(refuse(name, &"it is not a single field")),
            None => Err(refuse(name, &stat.reason(name))),
        };
        let word = |name, offset: &Result<u32, NotDerived>| match offset {
            Ok(at) => Ok(Piece::direct(*at, 4)),
            Err(reason) => Err(refuse(name, reason)),
        };
        let mode_bit = info.mode_bit.as_ref().map_err(|reason| refuse("flags.mode", reason))?;
        let weak = || {
            let retained = match &info.retained_weak_references_count {
                Ok(retained) => Some(*retained),
                // Removed in 4.1.
                Err(NotDerived::UnknownKey(_)) => None,
                Err(_) => return None,
            };
            Some((*info.weak_references_count.as_ref().ok()?, retained))
        };
        let (keys, mut absent) = self.keys_of_code(|_| true);
        for name in PROVING {
            if keys.iter().all(|(key, _)| *key != name) {
                let reason = absent.iter().find(|key| key.name == name).map(|key| key.reason.clone());
                return Err(refuse(name, &reason.unwrap_or_else(|| stat.reason(name))));
            }
        }
        let series = hypothesis.map(|_| stat::keys(self.version)).unwrap_or_default();
        let missing = series.iter().filter(|key| stat.keys.iter().all(|found| found.name != key.name));
        absent.extend(missing.map(|key| Absent {
            name: key.name.to_owned(),
            reason: "the code of this release does not know it".to_owned(),
        }));
        let wanted = Wanted {
            flags: self.vm.flags,
            mode_bits: (*mode_bit, 2),
            count: counter("count")?,
            minor_gc_count: counter("minor_gc_count")?,
            major_gc_count: counter("major_gc_count")?,
            latest_gc_info: word("profile.latest_gc_info", &info.latest_gc_info)?,
            need_major_gc: word("rgengc.need_major_gc", &info.need_major_gc).ok(),
            weak_references: weak(),
            heaps: Vec::new(),
            absent: absent.iter().filter_map(|absent| known_name(&absent.name)).collect(),
            keys,
        };
        let mut fields = vec!["profile.count", "flags", "flags.mode", "profile.latest_gc_info"];
        fields.extend(wanted.need_major_gc.map(|_| "rgengc.need_major_gc"));
        if let Some((_, retained)) = wanted.weak_references {
            fields.push("profile.weak_references_count");
            fields.extend(retained.map(|_| "profile.retained_weak_references_count"));
        }
        let fields = fields.into_iter().map(|name| (name, Source::Code)).collect();
        let sources = wanted.keys.iter().map(|(name, _)| (*name, Source::Code)).collect();
        Ok((wanted, Knowledge { table: None, own: false, fields, keys: sources, absent }))
    }

    /// The keys that the code computes, and those of its keys that are not read, in the code's order.
    fn keys_of_code(&self, wants: impl Fn(&str) -> bool) -> (Vec<(&'static str, Formula)>, Vec<Absent>) {
        let (mut keys, mut absent) = (Vec::new(), Vec::new());
        let derived = self.derived.stat.iter().flat_map(|stat| &stat.keys).filter(|key| wants(&key.name));
        for key in derived {
            let reason: Cow<'_, str> = match (&key.formula, known_name(&key.name)) {
                (_, None) => "gctrace does not know this key".into(),
                (Err(reason), _) => reason.to_string().into(),
                (Ok(formula), _) if formula.outside > 0 => "part of it lies outside the objspace".into(),
                (Ok(formula), _) if !self.per_thread && is_per_thread(formula) => PER_THREAD.into(),
                (Ok(formula), Some(name)) => {
                    keys.push((name, formula.clone()));
                    continue;
                }
            };
            absent.push(Absent { name: key.name.clone(), reason: reason.into_owned() });
        }
        (keys, absent)
    }

    fn formula(&self, key: &str) -> Option<&Formula> {
        self.derived.stat.as_ref().ok()?.formula(key)
    }

    fn disagreement(&self, name: impl Into<String>, derived: String, table: String) -> Unproven {
        Unproven::Disagrees { version: self.version, field: name.into(), derived, table }
    }
}

/// Keys that prove the layout on every process (`live_check`).
const PROVING: [&str; 3] = ["heap_available_slots", "heap_live_slots", "heap_final_slots"];

const PER_THREAD: &str = "a part of it is per thread, and the path to it is not known";

fn per_thread(name: &str) -> Absent {
    Absent { name: name.to_owned(), reason: PER_THREAD.to_owned() }
}

/// The part of a formula that lies in the objspace.
fn in_objspace(formula: &Formula) -> Formula {
    let terms = formula.terms.iter().filter(|(_, piece)| !matches!(piece.via, Span::CACHE | Span::LOCAL));
    Formula::new(terms.copied().collect(), formula.divisor)
}

fn is_per_thread(formula: &Formula) -> bool {
    formula.terms.iter().any(|(_, piece)| matches!(piece.via, Span::CACHE | Span::LOCAL))
}

/// Keys that only releases without a table have so far.
const NEWER_KEYS: [&str; 3] = ["total_malloc_bytes", "total_free_bytes", "heap_allocatable_bytes"];

/// The key with this name, if any series has it.
fn known_name(name: &str) -> Option<&'static str> {
    const SERIES: [(u16, u16); 8] = [(2, 6), (2, 7), (3, 0), (3, 1), (3, 2), (3, 3), (3, 4), (4, 0)];
    let keys = SERIES.into_iter().flat_map(|(major, minor)| stat::keys(RubyVersion::new(major, minor, 0)));
    keys.map(|key| key.name).chain(NEWER_KEYS).find(|known| *known == name)
}

#[cfg(test)]
mod tests;
