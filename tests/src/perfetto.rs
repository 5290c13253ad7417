//! A reader of Perfetto traces that decodes the protobuf encoding by itself: gctrace's output is not read by the code that writes it.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};

/// A slice of a track.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Name of its track.
    pub track: String,
    /// Number of its track.
    pub uuid: u64,
    /// Its name.
    pub name: String,
    /// Begin, nanoseconds of the trace's clock.
    pub begin_ns: u64,
    /// End, likewise.
    pub end_ns: u64,
}

/// A trace.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// Slices, by track and begin.
    pub slices: Vec<Slice>,
    /// Arrows: track and time of the begin, and of the end.
    pub arrows: Vec<((u64, u64), (u64, u64))>,
    /// Values of counters by name of the track, in the order of the file: time and value.
    pub counters: BTreeMap<String, Vec<(u64, u64)>>,
    /// Moments with their notes (instant events with their annotations).
    pub moments: Vec<Moment>,
}

/// A moment on a track.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moment {
    /// Name of its track.
    pub track: String,
    /// Its name.
    pub name: String,
    /// Time, nanoseconds of the trace's clock.
    pub ts_ns: u64,
    /// Its notes: numbers as text.
    pub notes: BTreeMap<String, String>,
}

/// A field's value.
enum Value<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

impl<'a> Value<'a> {
    fn number(&self) -> Result<u64> {
        match self {
            Self::Number(number) => Ok(*number),
            Self::Bytes(_) => bail!("a message instead of a number"),
        }
    }

    fn bytes(&self) -> Result<&'a [u8]> {
        match self {
            Self::Bytes(bytes) => Ok(bytes),
            Self::Number(_) => bail!("a number instead of a message"),
        }
    }

    fn text(&self) -> Result<String> {
        Ok(String::from_utf8(self.bytes()?.to_vec())?)
    }
}

/// The fields of a message: number and value.
fn fields(mut bytes: &[u8]) -> Result<Vec<(u64, Value<'_>)>> {
    fn varint(bytes: &mut &[u8]) -> Result<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let (&byte, rest) = bytes.split_first().context("cut off in a number")?;
            *bytes = rest;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        bail!("a number of more than 64 bits")
    }
    fn take<'a>(bytes: &mut &'a [u8], count: usize) -> Result<&'a [u8]> {
        let (taken, rest) = bytes.split_at_checked(count).context("cut off")?;
        *bytes = rest;
        Ok(taken)
    }
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let tag = varint(&mut bytes)?;
        let value = match tag & 7 {
            0 => Value::Number(varint(&mut bytes)?),
            1 => Value::Number(u64::from_le_bytes(take(&mut bytes, 8)?.try_into()?)),
            2 => {
                let count = usize::try_from(varint(&mut bytes)?)?;
                Value::Bytes(take(&mut bytes, count)?)
            }
            other => bail!("wire type {other}"),
        };
        found.push((tag >> 3, value));
    }
    Ok(found)
}

/// Decodes a note: its name and its text. `texts` holds the interned texts by id.
fn note(bytes: &[u8], texts: &BTreeMap<u64, String>) -> Result<(String, String)> {
    let (mut name, mut text) = (String::new(), String::new());
    // DebugAnnotation: 3 uint_value, 6 string_value, 10 name, 17 string_value_iid.
    for (field, value) in fields(bytes)? {
        match field {
            3 => text = value.number()?.to_string(),
            6 => text = value.text()?,
            10 => name = value.text()?,
            17 => text.clone_from(texts.get(&value.number()?).context("a note without text")?),
            _ => {}
        }
    }
    Ok((name, text))
}

/// Decodes the interned texts, to which notes refer by id.
fn interned(bytes: &[u8], texts: &mut BTreeMap<u64, String>) -> Result<()> {
    // InternedData: 29 debug_annotation_string_values, each an InternedString: 1 iid, 2 str.
    for (_, text) in fields(bytes)?.into_iter().filter(|(field, _)| *field == 29) {
        let (mut iid, mut string) = (0, String::new());
        for (field, value) in fields(text.bytes()?)? {
            match field {
                1 => iid = value.number()?,
                2 => string = value.text()?,
                _ => {}
            }
        }
        ensure!(texts.insert(iid, string).is_none(), "text {iid} comes twice");
    }
    Ok(())
}

impl Trace {
    /// Reads a file. Slices of a track must not overlap, each slice must end, and each arrow must begin and end once.
    pub fn open(path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
        let mut tracks: BTreeMap<u64, String> = BTreeMap::new();
        let mut open: BTreeMap<u64, (String, u64)> = BTreeMap::new();
        let mut leaves: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
        let mut texts = BTreeMap::new();
        let mut trace = Self::default();
        for (_, packet) in fields(&bytes)? {
            let (mut ts, mut happened, mut described) = (0, None, None);
            // TracePacket: 8 timestamp, 11 track_event, 12 interned_data, 60 track_descriptor.
            for (field, value) in fields(packet.bytes()?)? {
                match field {
                    8 => ts = value.number()?,
                    11 => happened = Some(value.bytes()?),
                    12 => interned(value.bytes()?, &mut texts)?,
                    60 => described = Some(value.bytes()?),
                    _ => {}
                }
            }
            if let Some(descriptor) = described {
                let (mut uuid, mut name) = (0, String::new());
                // TrackDescriptor: 1 uuid, 2 name.
                for (field, value) in fields(descriptor)? {
                    match field {
                        1 => uuid = value.number()?,
                        2 => name = value.text()?,
                        _ => {}
                    }
                }
                tracks.insert(uuid, name);
            }
            let Some(event) = happened else { continue };
            let (mut kind, mut uuid, mut name, mut flows, mut ends) = (0, 0, None, Vec::new(), Vec::new());
            let (mut notes, mut counted) = (BTreeMap::new(), None);
            // TrackEvent: 4 debug_annotations, 9 type, 11 track_uuid, 23 name, 30 counter_value, 47 flow_ids,
            // 48 terminating_flow_ids.
            for (field, value) in fields(event)? {
                match field {
                    4 => notes.extend([note(value.bytes()?, &texts)?]),
                    9 => kind = value.number()?,
                    11 => uuid = value.number()?,
                    23 => name = Some(value.text()?),
                    30 => counted = Some(value.number()?),
                    47 => flows.push(value.number()?),
                    48 => ends.push(value.number()?),
                    _ => {}
                }
            }
            let on = tracks.get(&uuid).context("an event of no track")?;
            match kind {
                1 => {
                    let name = name.context("a slice without a name")?;
                    let before = open.insert(uuid, (name, ts));
                    ensure!(before.is_none(), "{before:?} overlaps with another at {ts} on {on}");
                }
                2 => {
                    let (name, begin_ns) = open.remove(&uuid).context("an end without a begin")?;
                    ensure!(begin_ns <= ts, "{name} ends before it begins");
                    trace.slices.push(Slice { track: on.clone(), uuid, name, begin_ns, end_ns: ts });
                }
                3 => trace.moments.push(Moment {
                    track: on.clone(),
                    name: name.unwrap_or_default(),
                    ts_ns: ts,
                    notes,
                }),
                4 => {
                    let value = counted.context("a counter without value")?;
                    trace.counters.entry(on.clone()).or_default().push((ts, value));
                }
                other => bail!("an event of type {other}"),
            }
            for flow in flows {
                ensure!(leaves.insert(flow, (uuid, ts)).is_none(), "arrow {flow} begins twice");
            }
            trace.arrows.extend(ends.into_iter().map(|flow| ((flow, 0), (uuid, ts))));
        }
        // A process may end in the middle of a cycle, whose slice then stays open.
        open.retain(|_, (name, _)| !name.ends_with(" GC"));
        ensure!(open.is_empty(), "slices without end: {open:?}");
        for arrow in &mut trace.arrows {
            arrow.0 =
                leaves.remove(&arrow.0.0).with_context(|| format!("an arrow from nowhere: {arrow:?}"))?;
        }
        ensure!(leaves.is_empty(), "arrows to nowhere: {leaves:?}");
        trace.slices.sort_by_key(|slice| (slice.uuid, slice.begin_ns));
        Ok(trace)
    }
}
