//! Memory of malloc, with the sample types of Go's heap profiles: memory requested, and memory still allocated at the end.

use std::io::{self, Write};

use flate2::{Compression, write::GzEncoder};
use prost::Message as _;

use super::{Allocation, Builder, Head, Labels, PIECE, proto};
use crate::{
    aggregate::recording::{MallocKey, MallocSum, Recording},
    clock::WallClock,
};

/// Sample types and their units.
const TYPES: [(&str, &str); 4] = [
    ("alloc_objects", "count"),
    ("alloc_space", "bytes"),
    ("inuse_objects", "count"),
    ("inuse_space", "bytes"),
];
/// The sample type shown by default.
const DEFAULT: &str = "alloc_space";

/// Writes the whole recording.
pub(in crate::export::profile) fn write(
    recording: &Recording,
    said: &str,
    (clock, (began_ns, ended_ns)): (WallClock, (u64, u64)),
    period: u64,
    out: &mut dyn Write,
) -> io::Result<()> {
    let mut out = GzEncoder::new(out, Compression::default());
    let comment = said.to_owned();
    let head = Head {
        comment,
        clock,
        began_ns,
        ended_ns,
        gvl: false,
        alloc: Allocation::None,
        wall: false,
        labels: Labels::All,
    };
    let mut builder = Builder::new(recording, &head, &|_| true);
    let sample_type = TYPES.map(|(r#type, unit)| builder.value_type(r#type, unit)).into();
    let begin = proto::Profile {
        sample_type,
        time_nanos: clock.epoch_nanos(began_ns),
        duration_nanos: ended_ns.saturating_sub(began_ns) as i64,
        period_type: Some(builder.value_type("space", "bytes")),
        period: period as i64,
        comment: vec![builder.text(&head.comment)],
        default_sample_type: builder.text(DEFAULT),
        ..proto::Profile::default()
    };
    out.write_all(&begin.encode_to_vec())?;
    let mut sums: Vec<(&MallocKey, &MallocSum)> = recording.mallocs.iter().collect();
    sums.sort_unstable_by_key(|(key, _)| **key);
    for piece in sums.chunks(PIECE) {
        let sample = piece.iter().map(|(key, sum)| sample(&mut builder, **key, sum)).collect();
        out.write_all(&proto::Profile { sample, ..proto::Profile::default() }.encode_to_vec())?;
    }
    out.write_all(&builder.tables().encode_to_vec())?;
    out.finish()?.flush()
}

fn sample(builder: &mut Builder<'_>, key: MallocKey, sum: &MallocSum) -> proto::Sample {
    let (thread, process) = builder.recording.thread_facts(key.thread);
    let label = builder.who(thread, process);
    let value = [sum.asked.calls, sum.asked.bytes, sum.left.calls, sum.left.bytes];
    let value = value.iter().map(|estimate| estimate.rounded() as i64).collect();
    proto::Sample { location_id: builder.path(process, key.node), value, label }
}
