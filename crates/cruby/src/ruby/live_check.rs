//! Proof of a layout on the live process: invariants of CRuby's own counters that a wrong layout violates.

use gctrace_common::{
    config::Span,
    event::{Point, SLOT_BYTES, SLOTS},
};

use super::{layout::ObjspaceLayout, stat::Mode};

/// A check that a live process did not pass.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the live check `{check}` failed ({detail}): the GC state of this Ruby is not at the offsets of its version; \
     nothing is reported for it"
)]
pub struct FailedProof {
    /// Name of the check.
    pub check: &'static str,
    /// The values seen.
    pub detail: String,
}

/// The check of the number of live slots.
const LIVE: &str = "live + final ≤ available slots";

impl FailedProof {
    /// Whether a correct layout can fail in this way: Ractors add to `total_allocated_objects` without a lock (`newobj_slowpath`, gc.c 3.0;
    /// `rb_gc_impl_new_obj`, gc/default 3.4), so additions get lost and the number of live objects can become negative, as in `GC.stat` itself.
    pub fn may_be_lost_counts(&self, layout: &ObjspaceLayout) -> bool {
        self.check == LIVE && layout.has_ractors
    }
}

/// Copies the layout's spans into snapshot form with a memory reader. Per-thread data stays zero.
pub fn read_spans(
    layout: &ObjspaceLayout,
    objspace: u64,
    mut read: impl FnMut(u64, &mut [u8]) -> bool,
) -> Option<Vec<u8>> {
    let mut data = vec![0; SLOTS * SLOT_BYTES];
    for (slot, span) in layout.spans.iter().enumerate() {
        let base = match span.via {
            Span::DIRECT => objspace,
            Span::CACHE | Span::LOCAL => continue,
            via => {
                let mut pointer = [0; 8];
                if !read(objspace.wrapping_add(u64::from(via)), &mut pointer) {
                    return None;
                }
                u64::from_le_bytes(pointer)
            }
        };
        if base == 0 {
            continue;
        }
        let start = slot * SLOT_BYTES;
        let target = &mut data[start..start + usize::from(span.len)];
        if !read(base.wrapping_add(u64::from(span.offset)), target) {
            return None;
        }
    }
    Some(data)
}

/// The failure that `count` cycles in a row have started outside any pause.
pub fn starts_outside_pauses(count: u32) -> FailedProof {
    FailedProof {
        check: "cycles start inside a pause",
        detail: format!("{count} in a row started outside of one"),
    }
}

/// The GC mode of a snapshot.
pub fn mode(layout: &ObjspaceLayout, flags: u32) -> Mode {
    Mode::from_bits((flags & layout.mode_mask()) >> layout.mode_bits.0)
}

/// Whether the VM is not inside a GC pause. (A lazily swept cycle may be running: the program's own `GC.stat` is
/// called in that state, too.) `during_gc` is the mask of that bit in the flags.
pub fn is_outside_gc(layout: &ObjspaceLayout, data: &[u8], during_gc: u32) -> bool {
    layout.flags.read(data).is_some_and(|flags| flags as u32 & during_gc == 0)
}

/// Whether the heap has been set up. The VM pointer is set earlier, with an objspace full of zeros.
pub fn is_set_up(layout: &ObjspaceLayout, data: &[u8]) -> bool {
    let available = layout.keys.iter().find(|key| key.name == "heap_available_slots");
    available.and_then(|key| key.value(data)).is_some_and(|slots| slots > 0)
}

/// Whether two snapshots lie between the same two GC pauses.
pub fn no_gc_between(layout: &ObjspaceLayout, first: &[u8], second: &[u8]) -> bool {
    layout.flags.read(first) == layout.flags.read(second)
        && layout.count.read(first) == layout.count.read(second)
}

/// Whether, between two snapshots without a GC in between, objects were allocated and none was freed, as a correct layout must show.
pub fn only_allocates(layout: &ObjspaceLayout, first: &[u8], second: &[u8]) -> bool {
    let value = |name: &str, data| layout.keys.iter().find(|key| key.name == name)?.value(data);
    let grew = |name| Some(value(name, second)?.wrapping_sub(value(name, first)?));
    grew("total_freed_objects") == Some(0)
        && grew("total_allocated_objects").is_some_and(|objects| (1..1 << 32).contains(&objects))
}

/// Checks a snapshot taken outside any pause.
pub fn outside_gc(layout: &ObjspaceLayout, data: &[u8]) -> Result<(), FailedProof> {
    kinds_add_up(layout, data, 0)?;
    heap_is_consistent(layout, data)
}

/// Checks a snapshot taken at a GC event. `during_gc` is the mask of that bit in the flags.
pub fn at_event(
    layout: &ObjspaceLayout,
    point: Point,
    data: &[u8],
    during_gc: u32,
) -> Result<(), FailedProof> {
    let flags = layout.flags.read(data).unwrap_or_default() as u32;
    let mode = mode(layout, flags);
    if point != Point::GcEnter && flags & during_gc == 0 {
        return Err(FailedProof {
            check: "during_gc is set at a GC event",
            detail: format!("flags {flags:#x}"),
        });
    }
    let (expected, pending) = match point {
        // gc_start increments profile.count before the event, and the kind's counter after it (gc_marks_start).
        Point::GcStart => (Mode::None, 1),
        Point::GcEndSweep => (Mode::Sweeping, 0),
        _ => (Mode::None, 0),
    };
    let mode_fits = mode == expected || (point == Point::GcEndSweep && mode == Mode::Compacting);
    if !mode_fits {
        return Err(FailedProof {
            check: "GC mode at the event",
            detail: format!("{} at {}, expected {}", mode.state(), point.name(), expected.state()),
        });
    }
    kinds_add_up(layout, data, pending)?;
    heap_is_consistent(layout, data)
}

/// `count = minor + major (+ 1 for a cycle whose kind is not counted yet)`.
fn kinds_add_up(layout: &ObjspaceLayout, data: &[u8], pending: u64) -> Result<(), FailedProof> {
    let values = (|| {
        Some((layout.count.read(data)?, layout.minor_gc_count.read(data)?, layout.major_gc_count.read(data)?))
    })();
    let Some((count, minor, major)) = values else {
        return Err(FailedProof {
            check: "the snapshot holds the counters",
            detail: "it is too short".into(),
        });
    };
    if minor.checked_add(major).and_then(|sum| sum.checked_add(pending)) == Some(count) {
        return Ok(());
    }
    Err(FailedProof {
        check: "count = minor_gc_count + major_gc_count",
        detail: format!("count {count}, minor {minor}, major {major}, not yet counted {pending}"),
    })
}

/// `0 ≤ live ≤ available`, and no key has an absurd value.
fn heap_is_consistent(layout: &ObjspaceLayout, data: &[u8]) -> Result<(), FailedProof> {
    let key = |name: &str| layout.keys.iter().find(|key| key.name == name);
    let value = |name: &str| key(name).and_then(|key| key.value(data));
    // Ruby 4.0 counts allocations per thread: if those counters cannot be found, the number of live slots is unknown.
    let live = match key("heap_live_slots") {
        Some(key) => key.value(data),
        None => Some(0),
    };
    let (Some(live), Some(available), Some(last_slots)) =
        (live, value("heap_available_slots"), value("heap_final_slots"))
    else {
        return Err(FailedProof {
            check: "the snapshot holds the heap counters",
            detail: "it is too short".into(),
        });
    };
    let used = live.checked_add(last_slots);
    if available > 0 && available < 1 << 40 && used.is_some_and(|used| used <= available) {
        return Ok(());
    }
    Err(FailedProof {
        check: LIVE,
        detail: format!("live {live}, final {last_slots}, available {available}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ruby::RubyVersion;

    fn filled(version: RubyVersion, words: &[(u32, u64)]) -> (ObjspaceLayout, Vec<u8>) {
        let layout = ObjspaceLayout::of(version, false).unwrap();
        let mut memory = vec![0_u8; 4096];
        for &(offset, value) in words {
            memory[offset as usize..offset as usize + 8].copy_from_slice(&value.to_le_bytes());
        }
        let data = read_spans(&layout, 0x1000, |address, buffer| {
            let start = (address - 0x1000) as usize;
            buffer.copy_from_slice(&memory[start..start + buffer.len()]);
            true
        });
        (layout, data.unwrap())
    }

    /// A healthy 3.1 objspace at `GC_START` passes; the same bytes read with a shifted layout do not.
    #[test]
    fn wrong_layouts_fail() {
        let version = RubyVersion::new(3, 1, 2);
        // count, minor, major, eden total_slots, allocated, freed, flags (during_gc, mode none)
        let words = [(440, 10), (384, 6), (392, 3), (120, 20_000), (24, 50_000), (448, 40_000), (16, 0x20)];
        let (layout, data) = filled(version, &words);
        assert_eq!(at_event(&layout, Point::GcStart, &data, 0x20), Ok(()));
        for shift in [8, 16, 24] {
            let moved: Vec<(u32, u64)> =
                words.iter().map(|&(offset, value)| (offset + shift, value)).collect();
            let (layout, data) = filled(version, &moved);
            assert!(at_event(&layout, Point::GcStart, &data, 0x20).is_err(), "shift {shift}");
        }
    }

    /// With Ractors the number of live objects may seem negative. That alone proves nothing; before 3.0 it cannot happen. Such a snapshot
    /// is accepted if the next one shows that objects were allocated in between and none was freed.
    #[test]
    fn lost_counts() {
        let words = |allocated| {
            [(440, 9), (384, 6), (392, 3), (120, 20_000), (24, allocated), (448, 40_000), (16, 0)]
        };
        let version = RubyVersion::new(3, 1, 2);
        let (layout, data) = filled(version, &words(39_000));
        let error = outside_gc(&layout, &data).unwrap_err();
        assert!(error.may_be_lost_counts(&layout) && error.detail.starts_with("live 18446744073709550616, "));
        assert!(!error.may_be_lost_counts(&ObjspaceLayout::of(RubyVersion::new(2, 7, 4), false).unwrap()));
        let (_, later) = filled(version, &words(39_001));
        assert!(only_allocates(&layout, &data, &later));
        assert!(!only_allocates(&layout, &data, &data) && !only_allocates(&layout, &later, &data));
        let mut freed = words(39_001);
        freed[5].1 += 1;
        assert!(!only_allocates(&layout, &data, &filled(version, &freed).1));
        let mut other = words(39_000);
        other[0].1 = 10;
        assert!(!outside_gc(&layout, &filled(version, &other).1).unwrap_err().may_be_lost_counts(&layout));
    }

    /// Without the counters of threads (4.0 on a kernel without BTF) the number of live slots is not among the keys; the other keys are checked.
    #[test]
    fn without_live_slots() {
        let words = [(440, 10), (384, 6), (392, 3), (120, 20_000), (24, 50_000), (448, 40_000), (16, 0x20)];
        let (mut layout, data) = filled(RubyVersion::new(3, 1, 2), &words);
        layout.keys.retain(|key| key.name != "heap_live_slots");
        assert_eq!(at_event(&layout, Point::GcStart, &data, 0x20), Ok(()));
        layout.keys.retain(|key| key.name != "heap_available_slots");
        assert!(at_event(&layout, Point::GcStart, &data, 0x20).is_err());
    }

    /// An `END_SWEEP` site that is really something else is detected by the mode.
    #[test]
    fn wrong_event_fails() {
        let words = [(440, 9), (384, 6), (392, 3), (120, 20_000), (24, 50_000), (448, 40_000), (16, 0x20)];
        let (layout, data) = filled(RubyVersion::new(3, 1, 2), &words);
        let error = at_event(&layout, Point::GcEndSweep, &data, 0x20).unwrap_err();
        assert_eq!(error.check, "GC mode at the event");
        assert!(at_event(&layout, Point::GcEndSweep, &data, 0x40).is_err());
    }
}
