//! Reading sets, one sample at a time.

use std::{cell::RefCell, fmt, io::Read, marker::PhantomData};

use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, SeqAccess, Visitor};
use serde_json::{Number, Value, value::RawValue};

use super::{
    Header, MAX_ENTRIES, MAX_KEYS, MAX_META, ProtocolError, Sample,
    fields::{Event, Hash, Info, Optional, Real, Strings, Text, TextOrWhole, Whole, Wholes, seed},
};

/// Maximum number of seconds by which time may go backwards between samples: agents queue them from several threads.
const BACKWARDS: f64 = 1.0;

/// Receives a set while it is being read. The text of an error states the problem with the current element.
pub trait Sink {
    /// Receives the header, before any sample.
    fn header(&mut self, header: &Header) -> Result<(), String>;
    /// Receives the next sample; the reader reuses its memory for later samples.
    fn sample(&mut self, sample: &Sample) -> Result<(), String>;
}

/// Reads a set from memory.
pub fn read_slice(bytes: &[u8], sink: &mut impl Sink) -> Result<Header, ProtocolError> {
    run(serde_json::Deserializer::from_slice(bytes), sink)
}

/// Reads a set from a stream.
pub fn read(reader: impl Read, sink: &mut impl Sink) -> Result<Header, ProtocolError> {
    run(serde_json::Deserializer::from_reader(reader), sink)
}

fn run<'de, R: serde_json::de::Read<'de>>(
    mut json: serde_json::Deserializer<R>,
    sink: &mut impl Sink,
) -> Result<Header, ProtocolError> {
    let place = Position::default();
    let set = Set { place: &place, sink };
    let result = json.deserialize_seq(set).and_then(|header| json.end().map(|()| header));
    result.map_err(|error| {
        let (line, column, text) = (error.line(), error.column(), error.to_string());
        let problem = text.strip_suffix(&format!(" at line {line} column {column}")).unwrap_or(&text);
        match error.classify() {
            serde_json::error::Category::Data => {
                ProtocolError::Field { place: place.to_string(), problem: problem.to_owned() }
            }
            _ => ProtocolError::Json(text),
        }
    })
}

/// The element that is being read.
#[derive(Default)]
struct Position(RefCell<(Option<usize>, &'static str)>);

impl Position {
    fn at(&self, sample: Option<usize>, field: &'static str) {
        *self.0.borrow_mut() = (sample, field);
    }

    fn field(&self, field: &'static str) {
        self.0.borrow_mut().1 = field;
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self.0.borrow() {
            (_, "") => f.write_str("payload"),
            (None, field) => write!(f, "header {field}"),
            (Some(at), field) => write!(f, "sample {at} ({field})"),
        }
    }
}

struct Set<'a, S> {
    place: &'a Position,
    sink: &'a mut S,
}

impl<'de, S: Sink> Visitor<'de> for Set<'_, S> {
    type Value = Header;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array: a header, then samples")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Header, A::Error> {
        let place = self.place;
        place.at(None, "(tuple)");
        let Some(header) = seq.next_element_seed(HeaderSeed(place))? else {
            place.field("");
            return Err(A::Error::custom("has no header"));
        };
        self.sink.header(&header).map_err(A::Error::custom)?;
        let mut last = f64::NEG_INFINITY;
        let mut sample = Sample::blank();
        for at in 0.. {
            place.at(Some(at), "tuple");
            let seed = SampleSeed { place, keys: header.stat_keys.len(), sample: &mut sample };
            let Some(()) = seq.next_element_seed(seed)? else { break };
            place.field("timestamp");
            if sample.ts < last - BACKWARDS {
                return Err(A::Error::custom("is before that of an earlier sample"));
            }
            last = last.max(sample.ts);
            place.field("sample");
            self.sink.sample(&sample).map_err(A::Error::custom)?;
        }
        place.field("");
        Ok(header)
    }
}

struct HeaderSeed<'a>(&'a Position);
seed!(HeaderSeed<'a>, Header);

impl<'de> Visitor<'de> for HeaderSeed<'_> {
    type Value = Header;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of 11 or 12 elements")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Header, A::Error> {
        let place = self.0;
        let token = {
            place.field("[0] (token)");
            element(&mut seq, place, Text)?
        };
        let mut next = |field| {
            place.field(field);
            element(&mut seq, place, Text)?.ok_or_else(|| A::Error::custom("is null, not a string"))
        };
        let ruby_version = next("[1] (Ruby version)")?;
        let rails_version = next("[2] (Rails version)")?;
        place.field("[3] (environment)");
        let gc_env = element(&mut seq, place, Hash { strings: true })?;
        place.field("[4] (agent version)");
        let agent_version =
            element(&mut seq, place, Text)?.ok_or_else(|| A::Error::custom("is null, not a string"))?;
        place.field("[5] (GC::OPTS)");
        let gc_opts = element(&mut seq, place, Strings(MAX_ENTRIES))?;
        place.field("[6] (GC::INTERNAL_CONSTANTS)");
        let gc_constants = element(&mut seq, place, Hash { strings: false })?;
        place.field("[7] (GC.stat keys)");
        let stat_keys = element(&mut seq, place, Strings(MAX_KEYS))?;
        if let Some(key) = stat_keys.iter().enumerate().find(|(at, key)| stat_keys[..*at].contains(key)) {
            return Err(A::Error::custom(format!("has `{}` twice", key.1)));
        }
        place.field("[8] (spy ids or hostname)");
        let eighth = element(&mut seq, place, Text)?;
        place.field("[9] (hostname or parent's pid)");
        let (spy_ids, hostname, ppid) = match element(&mut seq, place, TextOrWhole)? {
            Value::String(hostname) => {
                place.field("[10] (parent's pid)");
                (Some(eighth.unwrap_or_default()), hostname, element(&mut seq, place, Whole)?)
            }
            number => {
                let hostname = eighth.ok_or_else(|| A::Error::custom("the hostname before it is null"))?;
                (None, hostname, number.as_u64().unwrap_or_default())
            }
        };
        place.field("(pid)");
        let own_pid = element(&mut seq, place, Whole)?;
        place.field("(tuple)");
        if seq.next_element::<IgnoredAny>()?.is_some() {
            return Err(A::Error::custom("has neither 11 nor 12 elements, but more"));
        }
        Ok(Header {
            token,
            ruby_version,
            rails_version,
            gc_env,
            agent_version,
            gc_opts: gc_opts.into_iter().map(Value::String).collect(),
            gc_constants,
            stat_keys,
            spy_ids,
            hostname,
            ppid,
            pid: own_pid,
        })
    }
}

/// Reads a sample into the previous one: most samples have the same strings, and all have the same number of values.
struct SampleSeed<'a> {
    place: &'a Position,
    keys: usize,
    sample: &'a mut Sample,
}
seed!(SampleSeed<'a>, ());

impl<'de> Visitor<'de> for SampleSeed<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of 8 elements")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let Self { place, keys, sample } = self;
        place.field("timestamp");
        sample.ts = element(&mut seq, place, Real)?;
        if !(0.0..1e11).contains(&sample.ts) {
            return Err(A::Error::custom(format!("{} is not a time in seconds", sample.ts)));
        }
        place.field("peak RSS");
        sample.peak_rss = element(&mut seq, place, Optional(Whole))?;
        place.field("current RSS");
        sample.current_rss = element(&mut seq, place, Optional(Whole))?;
        place.field("event");
        sample.event = element(&mut seq, place, Event)?;
        place.field("GC.stat values");
        element(&mut seq, place, Wholes { list: &mut sample.stat, count: keys })?;
        place.field("latest_gc_info");
        element(&mut seq, place, Info(&mut sample.latest_gc_info))?;
        place.field("meta");
        sample.meta = element(&mut seq, place, Optional(PhantomData::<Box<RawValue>>))?;
        if sample.meta.as_ref().is_some_and(|meta| meta.get().len() > MAX_META) {
            return Err(A::Error::custom(format!("has more than {MAX_META} bytes")));
        }
        place.field("thread id");
        sample.thread_id = seq.next_element_seed(Optional(PhantomData::<Number>))?.flatten();
        place.field("tuple");
        if seq.next_element::<IgnoredAny>()?.is_some() {
            return Err(A::Error::custom("has more than 8 elements"));
        }
        Ok(())
    }
}

/// The next element of a tuple; an error if it is missing.
fn element<'de, A: SeqAccess<'de>, T: DeserializeSeed<'de>>(
    seq: &mut A,
    place: &Position,
    seed: T,
) -> Result<T::Value, A::Error> {
    if let Some(value) = seq.next_element_seed(seed)? {
        return Ok(value);
    }
    let (sample, missing) = *place.0.borrow();
    let (tuple, length) = if sample.is_some() { ("tuple", "8") } else { ("(tuple)", "11 or 12") };
    place.field(tuple);
    Err(A::Error::custom(format!("ends before {missing}; it must have {length} elements")))
}
