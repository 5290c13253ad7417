//! The `gc` line of JSON lines.

use serde::{Serialize, Serializer, ser::SerializeMap};

use crate::{
    model::{Memory, Pause},
    ruby::{PauseKind, stat::GcInfo},
};

#[derive(Serialize)]
#[expect(clippy::struct_field_names, reason = "the names are the wire format")]
pub(super) struct Gc<'a> {
    pub(super) ts: f64,
    pub(super) pid: u32,
    pub(super) tid: u32,
    pub(super) comm: &'a str,
    pub(super) ruby: String,
    pub(super) container: Option<&'a str>,
    pub(super) count: u64,
    pub(super) kind: &'static str,
    pub(super) gc_by: Option<&'static str>,
    pub(super) major_by: Option<&'static str>,
    pub(super) compacting: Option<bool>,
    /// This and the next two members are `None` if no pause of the cycle was seen.
    pub(super) pause_ns: Option<u64>,
    pub(super) max_pause_ns: Option<u64>,
    pub(super) phases: Option<Phases>,
    pub(super) steps: usize,
    pub(super) mark_steps: usize,
    pub(super) sweep_steps: usize,
    pub(super) complete: bool,
    pub(super) end_ts: Option<f64>,
    /// The members that `--brief` leaves out.
    #[serde(flatten)]
    pub(super) details: Option<Details<'a>>,
    pub(super) rss: Option<u64>,
    pub(super) peak_rss: Option<u64>,
    pub(super) rss_end: Option<u64>,
    pub(super) peak_rss_end: Option<u64>,
    pub(super) rss_source: Option<&'static str>,
    pub(super) memory: Option<Parts>,
    pub(super) memory_end: Option<Parts>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) pss_end: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) private_dirty_end: Option<u64>,
    /// When `pss_end` and `private_dirty_end` were read, epoch seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) shares_ts: Option<f64>,
    pub(super) request: Option<u64>,
    pub(super) stack: Option<Vec<String>>,
    pub(super) lost: u64,
}

#[derive(Serialize)]
pub(super) struct Details<'a> {
    pub(super) pauses: Vec<PauseSpan>,
    pub(super) stat: Stat<'a>,
    pub(super) stat_end: Option<Stat<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) stat_heap: Option<StatHeap<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) stat_heap_end: Option<StatHeap<'a>>,
    pub(super) latest_gc_info: Info,
    pub(super) latest_gc_info_end: Option<Info>,
}

#[derive(Serialize)]
#[expect(clippy::struct_field_names, reason = "the names are the wire format")]
pub(super) struct Phases {
    pub(super) mark_ns: u64,
    pub(super) sweep_ns: u64,
    pub(super) other_ns: u64,
}

/// The parts of resident memory, and the part in swap; bytes.
#[derive(Serialize)]
pub(super) struct Parts {
    pub(super) anon: u64,
    pub(super) file: u64,
    pub(super) shmem: u64,
    pub(super) swap: u64,
}

impl Parts {
    pub(super) fn of(memory: Memory) -> Self {
        let Memory { anon, file, shmem, swap, .. } = memory;
        Self { anon, file, shmem, swap }
    }
}

#[derive(Serialize)]
pub(super) struct PauseSpan {
    pub(super) begin_ns: u64,
    pub(super) ns: u64,
    pub(super) kind: Option<&'static str>,
    pub(super) mark_ns: u64,
    pub(super) sweep_ns: u64,
}

impl PauseSpan {
    pub(super) fn of(pause: &Pause) -> Self {
        let Pause { begin_ns, ns, kind, mark_ns, sweep_ns, .. } = *pause;
        Self { begin_ns, ns, kind: kind.map(PauseKind::name), mark_ns, sweep_ns }
    }
}

/// `GC.stat_heap`: an object with each heap's number and its keys.
pub(in crate::export) struct StatHeap<'a> {
    pub(in crate::export) keys: &'a [&'static str],
    pub(in crate::export) heaps: &'a [Vec<u64>],
}

impl Serialize for StatHeap<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let heap = |values| Stat { keys: self.keys, values };
        serializer.collect_map(self.heaps.iter().enumerate().map(|(at, values)| (at, heap(values))))
    }
}

/// `GC.stat` as an object, in the order of its Ruby.
pub(super) struct Stat<'a> {
    pub(super) keys: &'a [&'static str],
    pub(super) values: &'a [u64],
}

impl Serialize for Stat<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.keys.iter().zip(self.values))
    }
}

/// `GC.latest_gc_info` in the order and with the keys of its Ruby.
pub(super) struct Info(pub(super) GcInfo);

impl Serialize for Info {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let info = &self.0;
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("major_by", &info.major_by)?;
        if let Some(need) = info.need_major_by {
            map.serialize_entry("need_major_by", &need)?;
        }
        map.serialize_entry("gc_by", &info.gc_by)?;
        map.serialize_entry("have_finalizer", &info.have_finalizer)?;
        map.serialize_entry("immediate_sweep", &info.immediate_sweep)?;
        map.serialize_entry("state", info.state)?;
        if let Some((weak, retained)) = info.weak_references {
            map.serialize_entry("weak_references_count", &weak)?;
            if let Some(retained) = retained {
                map.serialize_entry("retained_weak_references_count", &retained)?;
            }
        }
        map.end()
    }
}
