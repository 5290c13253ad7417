//! The wire format of TuneMyGC sample sets: reading and writing.
//!
//! Header: 11 elements (readers also accept the agent's 12, which have the spy ids at position 8). Samples: 8
//! elements (readers also accept 7, from before thread ids). Sets are written with times since the epoch; agents since
//! 1.0.70 write `CLOCK_MONOTONIC`, which [`Sample::ts`] keeps unchanged.
//!
//! Reading is bounded: every header field and every `latest_gc_info` has a limit on its content, so that a set
//! takes a small multiple of its size in memory, and a stream of samples almost nothing.

use serde::{Serialize, ser::SerializeTuple as _};
use serde_json::{Map, Number, Value, json, value::RawValue};

mod fields;
pub mod gzip;
mod read;
#[cfg(test)]
mod tests;

pub use read::{Sink, read, read_slice};

/// Maximum number of `GC.stat` keys of a header; Ruby has about thirty.
pub const MAX_KEYS: usize = 128;
/// Maximum number of entries of any other list or hash.
pub const MAX_ENTRIES: usize = 512;
/// Maximum bytes of a string in the header or of a name in a sample.
pub const MAX_STRING: usize = 4096;
/// Maximum bytes of a sample's `meta`, which may be any JSON.
pub const MAX_META: usize = 16 << 10;

/// Name of a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventName {
    /// Tracing of the process begins.
    Booted,
    /// State at `GC_START`.
    GcCycleStarted,
    /// State at `GC_END_SWEEP`.
    GcCycleEnded,
    /// A unit of work begins.
    ProcessingStarted,
    /// A unit of work ends.
    ProcessingEnded,
    /// The VM begins to shut down.
    Terminated,
    /// One of the events that forks of the agent add; it is ignored.
    Other(&'static str),
}

impl EventName {
    const ALL: [Self; 10] = [
        Self::Booted,
        Self::GcCycleStarted,
        Self::GcCycleEnded,
        Self::ProcessingStarted,
        Self::ProcessingEnded,
        Self::Terminated,
        Self::Other("GC_CYCLE_ENTERED"),
        Self::Other("GC_CYCLE_EXITED"),
        Self::Other("GC_CYCLE_MARK_ENDED"),
        Self::Other("GC_CYCLE_SWEEP_ENDED"),
    ];

    /// The name on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Booted => "BOOTED",
            Self::GcCycleStarted => "GC_CYCLE_STARTED",
            Self::GcCycleEnded => "GC_CYCLE_ENDED",
            Self::ProcessingStarted => "PROCESSING_STARTED",
            Self::ProcessingEnded => "PROCESSING_ENDED",
            Self::Terminated => "TERMINATED",
            Self::Other(name) => name,
        }
    }

    fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|event| event.as_str() == text)
    }
}

/// First element of a set.
#[derive(Clone, Debug, PartialEq)]
pub struct Header {
    /// Application token.
    pub token: Option<String>,
    /// Ruby version.
    pub ruby_version: String,
    /// Rails version; `0.0` without Rails.
    pub rails_version: String,
    /// `RUBY_GC_*` variables.
    pub gc_env: Map<String, Value>,
    /// Version of the agent.
    pub agent_version: String,
    /// `GC::OPTS`.
    pub gc_opts: Vec<Value>,
    /// `GC::INTERNAL_CONSTANTS`.
    pub gc_constants: Map<String, Value>,
    /// `GC.stat` keys.
    pub stat_keys: Vec<String>,
    /// Spy ids, in 12-element headers.
    pub spy_ids: Option<String>,
    /// Host name.
    pub hostname: String,
    /// Parent pid.
    pub ppid: u64,
    /// Pid in the process's own namespace.
    pub pid: u64,
}

/// A further element of a set.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Time in seconds, of the epoch or of `CLOCK_MONOTONIC`.
    pub ts: f64,
    /// Peak of resident memory, bytes; `None` if the process was gone before its memory could be read even once.
    pub peak_rss: Option<u64>,
    /// Resident memory, bytes.
    pub current_rss: Option<u64>,
    /// The event.
    pub event: EventName,
    /// `GC.stat` values in the order of the header's keys.
    pub stat: Vec<u64>,
    /// `GC.latest_gc_info`; values are scalars.
    pub latest_gc_info: Map<String, Value>,
    /// Any JSON but null, unchanged.
    pub meta: Option<Box<RawValue>>,
    /// Thread; `None` is the main thread.
    pub thread_id: Option<Number>,
}

impl PartialEq for Sample {
    fn eq(&self, other: &Self) -> bool {
        fn meta(sample: &Sample) -> Option<&str> {
            sample.meta.as_deref().map(RawValue::get)
        }
        self.ts.to_bits() == other.ts.to_bits()
            && (self.peak_rss, self.current_rss, self.event)
                == (other.peak_rss, other.current_rss, other.event)
            && self.stat == other.stat
            && self.latest_gc_info == other.latest_gc_info
            && meta(self) == meta(other)
            && self.thread_id == other.thread_id
    }
}

/// A header and its samples.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleSet {
    /// The header.
    pub header: Header,
    /// The samples, in time order.
    pub samples: Vec<Sample>,
}

/// How a set violates the protocol.
#[derive(Debug, thiserror::Error)]
pub enum ProtocolError {
    /// It is not JSON.
    #[error("payload: is not JSON: {0}")]
    Json(String),
    /// An element violates the protocol.
    #[error("{place}: {problem}")]
    Field {
        /// The element.
        place: String,
        /// What is wrong with it.
        problem: String,
    },
}

/// A sink that keeps all samples.
struct Samples(Vec<Sample>);

impl Sink for Samples {
    fn header(&mut self, _: &Header) -> Result<(), String> {
        Ok(())
    }

    fn sample(&mut self, sample: &Sample) -> Result<(), String> {
        self.0.push(sample.clone());
        Ok(())
    }
}

impl SampleSet {
    /// Reads a set of either dialect.
    pub fn from_json(text: &str) -> Result<Self, ProtocolError> {
        let mut samples = Samples(Vec::new());
        let header = read_slice(text.as_bytes(), &mut samples)?;
        Ok(Self { header, samples: samples.0 })
    }

    /// The set on the wire.
    pub fn to_json(&self) -> String {
        set_to_json(&self.header, self.samples.iter().map(Sample::to_json))
    }
}

/// The set on the wire, of samples as they are on the wire.
pub fn set_to_json(header: &Header, samples: impl IntoIterator<Item = String>) -> String {
    let mut text = format!("[{}", header.to_json());
    for sample in samples {
        text.push(',');
        text.push_str(&sample);
    }
    text.push(']');
    text
}

impl Header {
    /// The header on the wire: 11 elements, or 12 if there are spy ids.
    pub fn to_json(&self) -> String {
        let mut fields = vec![
            json!(self.token),
            json!(self.ruby_version),
            json!(self.rails_version),
            json!(self.gc_env),
            json!(self.agent_version),
            json!(self.gc_opts),
            json!(self.gc_constants),
            json!(self.stat_keys),
        ];
        fields.extend(self.spy_ids.as_ref().map(|ids| json!(ids)));
        fields.extend([json!(self.hostname), json!(self.ppid), json!(self.pid)]);
        Value::Array(fields).to_string()
    }
}

impl Serialize for Sample {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut tuple = serializer.serialize_tuple(8)?;
        tuple.serialize_element(&self.ts)?;
        tuple.serialize_element(&self.peak_rss)?;
        tuple.serialize_element(&self.current_rss)?;
        tuple.serialize_element(self.event.as_str())?;
        tuple.serialize_element(&self.stat)?;
        tuple.serialize_element(&self.latest_gc_info)?;
        tuple.serialize_element(&self.meta)?;
        tuple.serialize_element(&self.thread_id)?;
        tuple.end()
    }
}

impl Sample {
    /// An empty sample to read into.
    fn blank() -> Self {
        Self {
            ts: 0.0,
            peak_rss: None,
            current_rss: None,
            event: EventName::Booted,
            stat: Vec::new(),
            latest_gc_info: Map::new(),
            meta: None,
            thread_id: None,
        }
    }

    /// The sample on the wire.
    pub fn to_json(&self) -> String {
        // This cannot fail: only numbers, strings and maps with string keys.
        serde_json::to_string(self).unwrap_or_default()
    }
}
