//! Reading sets, one sample at a time.

use std::{cell::RefCell, fmt, io::Read, marker::PhantomData};

use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value, value::RawValue};

use super::{EventName, Header, MAX_ENTRIES, MAX_KEYS, MAX_META, MAX_STRING, ProtocolError, Sample};

/// How far time may go backwards between samples, seconds: agents queue them from several threads.
const BACKWARDS: f64 = 1.0;

/// Takes a set while it is being read. The text of an error is the problem of the current element.
pub trait Sink {
    /// The header, before any sample.
    fn header(&mut self, header: &Header) -> Result<(), String>;
    /// The next sample.
    fn sample(&mut self, sample: Sample) -> Result<(), String>;
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

/// What is being read.
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
        for at in 0.. {
            place.at(Some(at), "tuple");
            let seed = SampleSeed { place, keys: header.stat_keys.len() };
            let Some(sample) = seq.next_element_seed(seed)? else { break };
            place.field("timestamp");
            if sample.ts < last - BACKWARDS {
                return Err(A::Error::custom("is before that of an earlier sample"));
            }
            last = last.max(sample.ts);
            place.field("sample");
            self.sink.sample(sample).map_err(A::Error::custom)?;
        }
        place.field("");
        Ok(header)
    }
}

/// Makes a seed from a function on deserialisers.
macro_rules! seed {
    ($name:ident $(<$lt:lifetime>)?, $value:ty) => {
        impl<'de $(, $lt)?> DeserializeSeed<'de> for $name $(<$lt>)? {
            type Value = $value;
            fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<$value, D::Error> {
                deserializer.deserialize_seq(self)
            }
        }
    };
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

struct SampleSeed<'a> {
    place: &'a Position,
    keys: usize,
}
seed!(SampleSeed<'a>, Sample);

impl<'de> Visitor<'de> for SampleSeed<'_> {
    type Value = Sample;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of 8 elements")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Sample, A::Error> {
        let Self { place, keys } = self;
        place.field("timestamp");
        let ts = element(&mut seq, place, Real)?;
        if !(0.0..1e11).contains(&ts) {
            return Err(A::Error::custom(format!("{ts} is not a time in seconds")));
        }
        place.field("peak RSS");
        let peak_rss = element(&mut seq, place, Optional(Whole))?;
        place.field("current RSS");
        let current_rss = element(&mut seq, place, Optional(Whole))?;
        place.field("event");
        let event = element(&mut seq, place, Event)?;
        place.field("GC.stat values");
        let stat = element(&mut seq, place, Wholes(keys))?;
        place.field("latest_gc_info");
        let latest_gc_info = element(&mut seq, place, Hash { strings: false })?;
        place.field("meta");
        let meta = element(&mut seq, place, Optional(PhantomData::<Box<RawValue>>))?;
        if meta.as_ref().is_some_and(|meta| meta.get().len() > MAX_META) {
            return Err(A::Error::custom(format!("has more than {MAX_META} bytes")));
        }
        place.field("thread id");
        let thread_id = seq.next_element_seed(Optional(PhantomData::<Number>))?.flatten();
        place.field("tuple");
        if seq.next_element::<IgnoredAny>()?.is_some() {
            return Err(A::Error::custom("has more than 8 elements"));
        }
        Ok(Sample { ts, peak_rss, current_rss, event, stat, latest_gc_info, meta, thread_id })
    }
}

/// The next element of a tuple, which must be there.
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

/// A value or null.
struct Optional<T>(T);

impl<'de, T: DeserializeSeed<'de>> DeserializeSeed<'de> for Optional<T> {
    type Value = Option<T::Value>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_option(self)
    }
}

impl<'de, T: DeserializeSeed<'de>> Visitor<'de> for Optional<T> {
    type Value = Option<T::Value>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value or null")
    }

    fn visit_none<E>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        self.0.deserialize(deserializer).map(Some)
    }
}

/// A seed for scalars: its name, and the value for each kind of JSON value.
macro_rules! scalar {
    ($name:ident, $value:ty, $call:ident, $expects:literal, { $($visit:item)* }) => {
        struct $name;
        impl<'de> DeserializeSeed<'de> for $name {
            type Value = $value;
            fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<$value, D::Error> {
                deserializer.$call(self)
            }
        }
        impl<'de> Visitor<'de> for $name {
            type Value = $value;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str($expects)
            }
            $($visit)*
        }
    };
}

scalar!(Whole, u64, deserialize_u64, "a non-negative integer", {
    fn visit_u64<E>(self, value: u64) -> Result<u64, E> {
        Ok(value)
    }
});

scalar!(Real, f64, deserialize_f64, "a number", {
    fn visit_f64<E>(self, value: f64) -> Result<f64, E> {
        Ok(value)
    }
    fn visit_u64<E>(self, value: u64) -> Result<f64, E> {
        Ok(value as f64)
    }
    fn visit_i64<E>(self, value: i64) -> Result<f64, E> {
        Ok(value as f64)
    }
});

scalar!(Event, EventName, deserialize_str, "the name of an event", {
    fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<EventName, E> {
        EventName::parse(value).ok_or_else(|| E::custom("is not one of the protocol's names"))
    }
});

scalar!(Text, Option<String>, deserialize_any, "a string", {
    fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<Option<String>, E> {
        short(value).map(Some)
    }
    fn visit_unit<E>(self) -> Result<Option<String>, E> {
        Ok(None)
    }
});

scalar!(TextOrWhole, Value, deserialize_any, "a string or a non-negative integer", {
    fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<Value, E> {
        short(value).map(Value::String)
    }
    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }
});

scalar!(Scalar, Value, deserialize_any, "a string, number, boolean or null", {
    fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<Value, E> {
        short(value).map(Value::String)
    }
    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }
    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }
    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }
    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }
    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }
});

fn short<E: serde::de::Error>(value: &str) -> Result<String, E> {
    if value.len() > MAX_STRING {
        return Err(E::custom(format!("has a string of more than {MAX_STRING} bytes")));
    }
    Ok(value.to_owned())
}

/// A list of at most this many strings.
struct Strings(usize);
seed!(Strings, Vec<String>);

impl<'de> Visitor<'de> for Strings {
    type Value = Vec<String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an array of at most {} strings", self.0)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<String>, A::Error> {
        let mut list = Vec::new();
        while let Some(text) = seq.next_element_seed(Text)? {
            if list.len() == self.0 {
                return Err(A::Error::custom(format!("has more than {} entries", self.0)));
            }
            list.push(text.ok_or_else(|| A::Error::custom("has a null where a string should be"))?);
        }
        Ok(list)
    }
}

/// Exactly this many integers.
struct Wholes(usize);
seed!(Wholes, Vec<u64>);

impl<'de> Visitor<'de> for Wholes {
    type Value = Vec<u64>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an array of {} non-negative integers", self.0)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<u64>, A::Error> {
        let other = |than| A::Error::custom(format!("has {than} the header's {} keys", self.0));
        let mut list = Vec::with_capacity(self.0);
        while let Some(value) = seq.next_element_seed(Whole)? {
            if list.len() == self.0 {
                return Err(other("more values than"));
            }
            list.push(value);
        }
        if list.len() < self.0 { Err(other("fewer values than")) } else { Ok(list) }
    }
}

/// A hash of scalars, or only of strings.
struct Hash {
    strings: bool,
}

impl<'de> DeserializeSeed<'de> for Hash {
    type Value = Map<String, Value>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Hash {
    type Value = Map<String, Value>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Self::Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = access.next_key_seed(Text)? {
            if map.len() == MAX_ENTRIES {
                return Err(A::Error::custom(format!("has more than {MAX_ENTRIES} entries")));
            }
            let value = access.next_value_seed(Scalar)?;
            if self.strings && !value.is_string() {
                return Err(A::Error::custom("has a value that is not a string"));
            }
            map.insert(key.unwrap_or_default(), value);
        }
        Ok(map)
    }
}
