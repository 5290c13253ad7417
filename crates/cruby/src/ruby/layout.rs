//! Turns a table of offsets into a plan: which bytes of the objspace a snapshot copies, and where in the copy each
//! field lies.

use gctrace_common::{
    config::Span,
    event::{SLOT_BYTES, SLOTS},
};

use super::{
    RubyVersion,
    formula::{Formula, Piece},
    stat::{self, Key, Sign, Term},
    tables::{self, Array, Table},
};

/// Why no layout could be made for a version.
#[derive(Debug, thiserror::Error)]
pub enum LayoutError {
    /// No table covers the release.
    #[error("no layout is known for CRuby {0} (known: {1}); upgrade gctrace")]
    UnknownVersion(RubyVersion, String),
    /// No table covers the release, and its code does not reveal enough.
    #[error("{unknown}; its code does not show `{field}` either: {reason}")]
    NotProven {
        /// The error that no table covers it.
        unknown: String,
        /// The field that the code does not reveal.
        field: &'static str,
        /// Why not.
        reason: String,
    },
    /// A table lacks a field that a `GC.stat` key of its series needs: a mistake in gctrace.
    #[error("the layout table of CRuby {0} lacks `{1}`")]
    MissingField(RubyVersion, &'static str),
    /// The fields are spread too widely for one snapshot: a mistake in gctrace.
    #[error("the layout of CRuby {0} needs {1} spans, a snapshot has {SLOTS}")]
    TooManySpans(RubyVersion, usize),
}

/// Where a value lies in a snapshot's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnapshotField {
    at: usize,
    size: u8,
}

impl SnapshotField {
    /// Reads the value, zero extended; `None` if the data is too short for it.
    pub fn read(self, data: &[u8]) -> Option<u64> {
        let bytes = data.get(self.at..self.at + usize::from(self.size))?;
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        Some(u64::from_le_bytes(word))
    }
}

/// A `GC.stat` key bound to places in a snapshot: the sum of its terms, divided.
#[derive(Clone, Debug)]
pub struct BoundKey {
    /// The key's name.
    pub name: &'static str,
    terms: Vec<(Sign, SnapshotField)>,
    divisor: u64,
}

impl BoundKey {
    /// The value, in C's `size_t` arithmetic.
    pub fn value(&self, data: &[u8]) -> Option<u64> {
        let mut sum = 0_u64;
        for &(sign, place) in &self.terms {
            let value = place.read(data)?;
            sum = match sign {
                Sign::Plus => sum.wrapping_add(value),
                Sign::Minus => sum.wrapping_sub(value),
                Sign::Signed => sum.saturating_add_signed(i64::from(value as i32)),
            };
        }
        Some(sum / self.divisor)
    }
}

/// The objspace layout of one release, bound to the spans of a snapshot.
#[derive(Clone, Debug)]
pub struct ObjspaceLayout {
    /// First bit and number of bits of `flags.mode`.
    pub mode_bits: (u32, u32),
    /// The spans that the kernel copies, in slot order.
    pub spans: Vec<Span>,
    /// `GC.stat` keys in the order in which this Ruby returns them.
    pub keys: Vec<BoundKey>,
    /// `GC.stat_heap` keys of each heap, in this Ruby's order; empty before 3.2.
    pub heaps: Vec<Vec<BoundKey>>,
    /// Keys of this Ruby that are not read: the path to the VM's per-thread data is not known, or neither a table nor the
    /// code shows how they are computed.
    pub absent: Vec<&'static str>,
    /// Whether the spans include per-thread data: [`Span::CACHE`] or [`Span::LOCAL`].
    pub per_thread: bool,
    /// Whether the release has Ractors (≥ 3.0), which count their allocations concurrently and without a lock.
    pub has_ractors: bool,
    /// The `flags` word.
    pub flags: SnapshotField,
    /// `profile.count`.
    pub count: SnapshotField,
    /// `profile.minor_gc_count`.
    pub minor_gc_count: SnapshotField,
    /// `profile.major_gc_count`.
    pub major_gc_count: SnapshotField,
    /// `profile.latest_gc_info`.
    pub latest_gc_info: SnapshotField,
    /// `rgengc.need_major_gc`, for series whose `GC.latest_gc_info` reports it (≥ 3.2).
    pub need_major_gc: Option<SnapshotField>,
    /// `profile.weak_references_count` (≥ 3.3) and `profile.retained_weak_references_count` (3.3 to 4.0).
    pub weak_references: Option<(SnapshotField, Option<SnapshotField>)>,
}

impl RubyVersion {
    /// Whether this is release `major.minor.0` or later.
    pub fn at_least(self, major: u16, minor: u16) -> bool {
        (self.major, self.minor) >= (major, minor)
    }
}

impl Table {
    /// The table of a release.
    pub fn of(version: RubyVersion) -> Result<&'static Self, LayoutError> {
        let v = (version.major, version.minor, version.teeny);
        let covers = |table: &&Self| table.from <= v && v <= table.to;
        let found = tables::tables().iter().find(covers);
        found.ok_or_else(|| LayoutError::UnknownVersion(version, tables::known()))
    }

    /// Byte offset of a member of the objspace itself.
    pub fn offset(&self, name: &str) -> Option<u32> {
        self.fields.iter().find(|f| f.name == name).map(|f| f.offset)
    }

    /// The newest table of a series.
    pub(super) fn newest_of_series(version: RubyVersion) -> Option<&'static Self> {
        let same = |table: &&Self| (table.to.0, table.to.1) == (version.major, version.minor);
        tables::tables().iter().filter(same).max_by_key(|table| table.to)
    }

    /// A member of the objspace itself.
    pub(super) fn piece(&self, name: &str) -> Option<Piece> {
        let field = self.fields.iter().find(|f| f.name == name)?;
        Some(Piece { via: Span::DIRECT, offset: field.offset, size: field.size })
    }

    /// The pieces whose sum is the term's value.
    fn pieces(&self, term: &Term) -> Option<Vec<Piece>> {
        match *term {
            Term::Plus(name) | Term::Minus(name) => Some(vec![self.piece(name)?]),
            Term::PlusEach(name) | Term::MinusEach(name) => {
                let pools = self.pools.as_ref()?;
                let field = pools.fields.iter().find(|f| f.name == name)?;
                let each = |i| pools.offset + i * pools.stride + field.offset;
                Some(
                    (0..pools.count)
                        .map(|i| Piece { via: Span::DIRECT, offset: each(i), size: field.size })
                        .collect(),
                )
            }
            Term::FirstWordBehind(name) => {
                let pointer = self.piece(name)?;
                Some(vec![Piece { via: u16::try_from(pointer.offset).ok()?, offset: 0, size: 8 }])
            }
            Term::PlusCached(name) | Term::MinusCached(name) => {
                (0..self.caches()?.count).map(|heap| self.cached(heap, name)).collect()
            }
            Term::PlusLocal => Some(vec![Piece { via: Span::LOCAL, offset: 0, size: 4 }]),
        }
    }

    /// The piece of one heap's key.
    fn heap_piece(&self, heap: u32, term: &Term) -> Option<Piece> {
        match *term {
            Term::Plus(name) | Term::Minus(name) => {
                let pools = self.pools.as_ref()?;
                let field = pools.fields.iter().find(|f| f.name == name)?;
                let offset = pools.offset + heap * pools.stride + field.offset;
                Some(Piece { via: Span::DIRECT, offset, size: field.size })
            }
            Term::PlusCached(name) | Term::MinusCached(name) => self.cached(heap, name),
            _ => None,
        }
    }

    /// The per-heap array in the object cache of each Ractor.
    fn caches(&self) -> Option<&Array> {
        self.structure("ractor_newobj_cache")?.array("heap_caches")
    }

    fn cached(&self, heap: u32, name: &str) -> Option<Piece> {
        let heaps = self.caches()?;
        let field = heaps.fields.iter().find(|f| f.name == name)?;
        let offset = heaps.offset + heap * heaps.stride + field.offset;
        Some(Piece { via: Span::CACHE, offset, size: field.size })
    }
}

/// A `GC.stat` or `GC.stat_heap` key and how it is computed.
pub(super) type WantedKey = (&'static str, Formula);

/// The wanted fields of an objspace, before they are bound to spans.
#[derive(Clone, Debug)]
pub(super) struct Wanted {
    pub(super) flags: u32,
    pub(super) mode_bits: (u32, u32),
    pub(super) count: Piece,
    pub(super) minor_gc_count: Piece,
    pub(super) major_gc_count: Piece,
    pub(super) latest_gc_info: Piece,
    pub(super) need_major_gc: Option<Piece>,
    pub(super) weak_references: Option<(Piece, Option<Piece>)>,
    pub(super) keys: Vec<WantedKey>,
    pub(super) heaps: Vec<Vec<WantedKey>>,
    pub(super) absent: Vec<&'static str>,
}

impl Wanted {
    /// The fields of a release according to a table. Without `per_thread`, keys that need per-thread data of the VM are
    /// absent.
    pub(super) fn of_table(
        version: RubyVersion,
        table: &Table,
        per_thread: bool,
    ) -> Result<Self, LayoutError> {
        let mut absent = Vec::new();
        let mut wants = |keys: Vec<Key>| -> Vec<Key> {
            let (kept, dropped): (Vec<Key>, Vec<Key>) =
                keys.into_iter().partition(|key| per_thread || !key.terms.iter().any(Term::is_per_thread));
            absent.extend(dropped.iter().map(|key| key.name));
            kept
        };
        let keys = wants(stat::keys(version));
        let heap_keys = wants(stat::heap_keys(version));
        absent.sort_unstable();
        absent.dedup();
        let missing = |name| LayoutError::MissingField(version, name);
        let named = |name| table.piece(name).ok_or(missing(name));
        let weak = || {
            Some((
                table.piece("profile.weak_references_count")?,
                Some(table.piece("profile.retained_weak_references_count")?),
            ))
        };
        let heap_count = if heap_keys.is_empty() { 0 } else { table.pools.as_ref().map_or(0, |p| p.count) };
        let heap = |heap| -> Result<Vec<WantedKey>, LayoutError> {
            let wanted = |key: &Key| {
                let piece = |term: &Term| {
                    Ok((term.sign(), table.heap_piece(heap, term).ok_or(missing(term.name()))?))
                };
                let terms = key.terms.iter().map(piece).collect::<Result<_, LayoutError>>()?;
                Ok((key.name, Formula::new(terms, key.divisor)))
            };
            heap_keys.iter().map(wanted).collect()
        };
        Ok(Self {
            flags: table.flags,
            mode_bits: table.mode_bits,
            count: named("profile.count")?,
            minor_gc_count: named("profile.minor_gc_count")?,
            major_gc_count: named("profile.major_gc_count")?,
            latest_gc_info: named("profile.latest_gc_info")?,
            need_major_gc: version.at_least(3, 2).then(|| table.piece("rgengc.need_major_gc")).flatten(),
            weak_references: version.at_least(3, 3).then(weak).flatten(),
            keys: keys
                .iter()
                .map(|key| Ok((key.name, pieces_of(table, key).map_err(missing)?)))
                .collect::<Result<_, LayoutError>>()?,
            heaps: (0..heap_count).map(heap).collect::<Result<_, _>>()?,
            absent,
        })
    }

    fn pieces(&self) -> Vec<Piece> {
        let flags = Piece::direct(self.flags, 4);
        let fixed =
            [flags, self.count, self.minor_gc_count, self.major_gc_count, self.latest_gc_info].into_iter();
        let weak = self.weak_references.iter().flat_map(|&(a, b)| std::iter::once(a).chain(b));
        let keys = self.keys.iter().chain(self.heaps.iter().flatten());
        let terms = keys.flat_map(|(_, formula)| formula.terms.iter().map(|&(_, piece)| piece));
        fixed.chain(self.need_major_gc).chain(weak).chain(terms).collect()
    }
}

impl ObjspaceLayout {
    /// Plans the snapshot of a release from its table alone. Without `per_thread`, keys that need per-thread data of the VM
    /// are absent.
    pub fn of(version: RubyVersion, per_thread: bool) -> Result<Self, LayoutError> {
        Self::bind(version, Wanted::of_table(version, Table::of(version)?, per_thread)?)
    }

    /// Plans the snapshot of the wanted fields.
    pub(super) fn bind(version: RubyVersion, wanted: Wanted) -> Result<Self, LayoutError> {
        let spans = pack(wanted.pieces());
        if spans.len() > SLOTS {
            return Err(LayoutError::TooManySpans(version, spans.len()));
        }
        let place = |piece: Piece| locate(&spans, piece);
        let named = |name, piece| place(piece).ok_or(LayoutError::MissingField(version, name));
        let bind = |keys: Vec<WantedKey>| -> Result<Vec<BoundKey>, LayoutError> {
            keys.into_iter()
                .map(|(name, formula)| {
                    let terms = formula.terms.into_iter();
                    let terms = terms.map(|(sign, piece)| Ok((sign, named(name, piece)?)));
                    Ok(BoundKey { name, terms: terms.collect::<Result<_, _>>()?, divisor: formula.divisor })
                })
                .collect()
        };
        Ok(Self {
            mode_bits: wanted.mode_bits,
            keys: bind(wanted.keys)?,
            heaps: wanted.heaps.into_iter().map(bind).collect::<Result<_, _>>()?,
            absent: wanted.absent,
            has_ractors: version.at_least(3, 0),
            per_thread: spans.iter().any(|span| matches!(span.via, Span::CACHE | Span::LOCAL)),
            flags: named("flags", Piece::direct(wanted.flags, 4))?,
            count: named("profile.count", wanted.count)?,
            minor_gc_count: named("profile.minor_gc_count", wanted.minor_gc_count)?,
            major_gc_count: named("profile.major_gc_count", wanted.major_gc_count)?,
            latest_gc_info: named("profile.latest_gc_info", wanted.latest_gc_info)?,
            need_major_gc: wanted.need_major_gc.and_then(place),
            weak_references: wanted.weak_references.and_then(|(a, b)| Some((place(a)?, b.and_then(place)))),
            spans,
        })
    }

    /// Byte offset of `profile.latest_gc_info` in the objspace, if it lies in the objspace itself.
    pub fn latest_gc_info_offset(&self) -> Option<u32> {
        let at = self.latest_gc_info.at;
        let span = self.spans.get(at / SLOT_BYTES).filter(|span| span.via == Span::DIRECT)?;
        Some(u32::from(span.offset) + (at % SLOT_BYTES) as u32)
    }

    /// Mask of `flags.mode` inside the `flags` word.
    pub fn mode_mask(&self) -> u32 {
        let (bit, bits) = self.mode_bits;
        ((1 << bits) - 1) << bit
    }
}

fn pieces_of(table: &Table, key: &Key) -> Result<Formula, &'static str> {
    let mut all = Vec::new();
    for term in key.terms {
        let pieces = table.pieces(term).ok_or(term.name())?;
        all.extend(pieces.into_iter().map(|piece| (term.sign(), piece)));
    }
    Ok(Formula::new(all, key.divisor))
}

/// Packs the wanted pieces into as few spans as a greedy sweep finds; a span is at most one slot long.
fn pack(mut wanted: Vec<Piece>) -> Vec<Span> {
    wanted.sort_unstable();
    let mut spans: Vec<Span> = Vec::new();
    for piece in wanted {
        let (start, end) = (piece.offset, piece.offset + u32::from(piece.size));
        if let Some(last) = spans.last_mut()
            && last.via == piece.via
            && end - u32::from(last.offset) <= SLOT_BYTES as u32
        {
            last.len = last.len.max((end - u32::from(last.offset)) as u16);
            continue;
        }
        spans.push(Span { offset: start as u16, len: u16::from(piece.size), via: piece.via, reserved: 0 });
    }
    spans
}

fn locate(spans: &[Span], piece: Piece) -> Option<SnapshotField> {
    spans.iter().enumerate().find_map(|(slot, span)| {
        let start = piece.offset.checked_sub(u32::from(span.offset))?;
        let inside = span.via == piece.via && start + u32::from(piece.size) <= u32::from(span.len);
        inside.then_some(SnapshotField { at: slot * SLOT_BYTES + start as usize, size: piece.size })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(major: u16, minor: u16, teeny: u16) -> RubyVersion {
        RubyVersion { major, minor, teeny }
    }

    /// Every table can be planned at both ends of its range, fits a snapshot, and has as many keys as a Ruby of that series
    /// returns.
    #[test]
    fn every_table_is_complete() {
        let expected = [
            ((2, 6), 25),
            ((2, 7), 26),
            ((3, 0), 28),
            ((3, 1), 29),
            ((3, 2), 29),
            ((3, 3), 31),
            ((3, 4), 30),
            ((4, 0), 30),
        ];
        for table in tables::tables() {
            for (major, minor, teeny) in [table.from, table.to] {
                let layout = ObjspaceLayout::of(version(major, minor, teeny), true).unwrap();
                let keys = expected.iter().find(|e| e.0 == (major, minor)).unwrap().1;
                assert_eq!(layout.keys.len(), keys, "CRuby {major}.{minor}");
                assert_eq!(layout.keys[0].name, "count");
                for span in &layout.spans {
                    assert!(usize::from(span.len) <= SLOT_BYTES);
                    assert!(span.via != Span::DIRECT || u32::from(span.offset + span.len) <= table.size);
                }
            }
        }
    }

    /// Ranges do not overlap, and versions outside all of them are refused with an error that names them.
    #[test]
    fn unknown_versions_are_refused() {
        for pair in tables::tables().windows(2) {
            assert!(pair[0].to < pair[1].from);
        }
        for (major, minor, teeny) in [(2, 5, 9), (3, 1, 8), (4, 1, 0), (9, 9, 9)] {
            let error = ObjspaceLayout::of(version(major, minor, teeny), false).unwrap_err().to_string();
            assert!(error.contains(&format!("{major}.{minor}.{teeny}")), "{error}");
        }
    }

    /// A key is the wrapping sum of its terms: free slots = available − allocated + freed (3.1).
    #[test]
    fn values_are_summed_from_the_snapshot() {
        let layout = ObjspaceLayout::of(version(3, 1, 2), false).unwrap();
        let table = Table::of(version(3, 1, 2)).unwrap();
        let mut data = vec![0; SLOTS * SLOT_BYTES];
        let mut put = |name: &str, pool: bool, value: u64| {
            let piece = if pool {
                table.pieces(&Term::PlusEach(Box::leak(name.to_owned().into_boxed_str()))).unwrap()[0]
            } else {
                table.piece(name).unwrap()
            };
            let place = locate(&layout.spans, piece).unwrap();
            data[place.at..place.at + 8].copy_from_slice(&value.to_le_bytes());
        };
        put("eden_heap.total_slots", true, 1_000);
        put("tomb_heap.total_slots", true, 100);
        put("total_allocated_objects", false, 5_000);
        put("profile.total_freed_objects", false, 4_200);
        put("heap_pages.final_slots", false, 7);
        put("profile.total_time_ns", false, 2_999_999);
        let get = |name: &str| layout.keys.iter().find(|k| k.name == name).unwrap().value(&data).unwrap();
        assert_eq!(get("heap_available_slots"), 1_100);
        assert_eq!(get("heap_live_slots"), 793);
        assert_eq!(get("heap_free_slots"), 300);
        assert_eq!(get("time"), 2);
    }
}
