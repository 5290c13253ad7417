//! The wire format of sample sets, both ways.
//!
//! Header: 11 elements (readers also accept the agent's 12, which carry the spy ids at position 8). Samples: 8
//! elements (readers also accept 7, from before thread ids). Times are epoch seconds.

use std::fmt::Write as _;

use serde_json::{Map, Value, json};

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
}

impl EventName {
    const ALL: [(Self, &'static str); 6] = [
        (Self::Booted, "BOOTED"),
        (Self::GcCycleStarted, "GC_CYCLE_STARTED"),
        (Self::GcCycleEnded, "GC_CYCLE_ENDED"),
        (Self::ProcessingStarted, "PROCESSING_STARTED"),
        (Self::ProcessingEnded, "PROCESSING_ENDED"),
        (Self::Terminated, "TERMINATED"),
    ];

    /// The name on the wire.
    pub fn as_str(self) -> &'static str {
        Self::ALL[self as usize].1
    }

    fn parse(text: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, name)| *name == text).map(|(event, _)| *event)
    }
}

/// First element of a set.
#[derive(Clone, Debug, PartialEq)]
pub struct Header {
    /// Application token.
    pub token: Option<String>,
    /// Ruby version.
    pub ruby_version: String,
    /// Rails version, `0.0` where there is none.
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
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Epoch seconds.
    pub ts: f64,
    /// Bytes; `None` if the process was gone before its memory could be read even once.
    pub peak_rss: Option<u64>,
    /// Bytes.
    pub current_rss: Option<u64>,
    /// Which event.
    pub event: EventName,
    /// `GC.stat` values in the order of the header's keys.
    pub stat: Vec<u64>,
    /// `GC.latest_gc_info`.
    pub latest_gc_info: Map<String, Value>,
    /// Anything.
    pub meta: Value,
    /// Thread; `None` is the main thread.
    pub thread_id: Option<u64>,
}

/// A header and its samples.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleSet {
    /// The header.
    pub header: Header,
    /// The samples, in time order.
    pub samples: Vec<Sample>,
}

/// What in a set violates the protocol.
#[derive(Debug, thiserror::Error)]
pub enum ProtocolError {
    /// It is no JSON.
    #[error("not JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// An element is not what the protocol says.
    #[error("{place}: {problem}")]
    Field {
        /// Which element.
        place: String,
        /// What is wrong with it.
        problem: &'static str,
    },
}

fn bad(place: impl Into<String>, problem: &'static str) -> ProtocolError {
    ProtocolError::Field { place: place.into(), problem }
}

impl SampleSet {
    /// Reads a set of either dialect.
    pub fn from_json(text: &str) -> Result<Self, ProtocolError> {
        let Value::Array(elements) = serde_json::from_str(text)? else {
            return Err(bad("payload", "is not an array"));
        };
        let mut elements = elements.into_iter();
        let header = Header::from_value(elements.next().ok_or_else(|| bad("payload", "has no header"))?)?;
        let samples = elements
            .enumerate()
            .map(|(at, value)| Sample::from_value(at, value, header.stat_keys.len()))
            .collect::<Result<_, _>>()?;
        Ok(Self { header, samples })
    }

    /// The set on the wire.
    pub fn to_json(&self) -> String {
        let mut text = format!("[{}", self.header.to_value());
        for sample in &self.samples {
            // Writing to a string cannot fail.
            let _infallible = write!(text, ",{}", sample.to_value());
        }
        text.push(']');
        text
    }
}

impl Header {
    fn to_value(&self) -> Value {
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
        Value::Array(fields)
    }

    fn from_value(value: Value) -> Result<Self, ProtocolError> {
        let Value::Array(mut fields) = value else { return Err(bad("header", "is not an array")) };
        let spy_ids = match fields.len() {
            11 => None,
            12 => Some(string("header[8] (spy ids)", fields.remove(8))?),
            _ => return Err(bad("header", "has neither 11 nor 12 elements")),
        };
        let mut fields = fields.into_iter();
        let mut next = || fields.next().unwrap_or_default();
        Ok(Self {
            token: match next() {
                Value::Null => None,
                other => Some(string("header[0] (token)", other)?),
            },
            ruby_version: string("header[1] (Ruby version)", next())?,
            rails_version: string("header[2] (Rails version)", next())?,
            gc_env: object("header[3] (environment)", next())?,
            agent_version: string("header[4] (agent version)", next())?,
            gc_opts: array("header[5] (GC::OPTS)", next())?,
            gc_constants: object("header[6] (GC::INTERNAL_CONSTANTS)", next())?,
            stat_keys: array("header[7] (GC.stat keys)", next())?
                .into_iter()
                .map(|key| string("header[7] (GC.stat keys)", key))
                .collect::<Result<_, _>>()?,
            spy_ids,
            hostname: string("header (hostname)", next())?,
            ppid: integer("header (ppid)", &next())?,
            pid: integer("header (pid)", &next())?,
        })
    }
}

impl Sample {
    fn to_value(&self) -> Value {
        json!([
            self.ts,
            self.peak_rss,
            self.current_rss,
            self.event.as_str(),
            self.stat,
            self.latest_gc_info,
            self.meta,
            self.thread_id,
        ])
    }

    fn from_value(at: usize, value: Value, keys: usize) -> Result<Self, ProtocolError> {
        let place = |field: &str| format!("sample {at} ({field})");
        let Value::Array(fields) = value else { return Err(bad(place("tuple"), "is not an array")) };
        if !(7..=8).contains(&fields.len()) {
            return Err(bad(place("tuple"), "has neither 8 nor 7 elements"));
        }
        let mut fields = fields.into_iter();
        let mut next = || fields.next().unwrap_or_default();
        let ts = next()
            .as_f64()
            .filter(|ts| ts.is_finite())
            .ok_or_else(|| bad(place("timestamp"), "is no number"))?;
        let bytes = |value: Value, field: &str| match value {
            Value::Null => Ok(None),
            other => integer(place(field), &other).map(Some),
        };
        let peak_rss = bytes(next(), "peak RSS")?;
        let current_rss = bytes(next(), "current RSS")?;
        let event = EventName::parse(&string(place("event"), next())?)
            .ok_or_else(|| bad(place("event"), "is not one of the protocol's names"))?;
        let stat: Vec<u64> = array(place("GC.stat values"), next())?
            .iter()
            .map(|value| integer(place("GC.stat values"), value))
            .collect::<Result<_, _>>()?;
        if stat.len() != keys {
            return Err(bad(place("GC.stat values"), "has another length than the header's keys"));
        }
        let latest_gc_info = object(place("latest_gc_info"), next())?;
        let meta = next();
        let thread_id = match next() {
            Value::Null => None,
            other => Some(integer(place("thread id"), &other)?),
        };
        Ok(Self { ts, peak_rss, current_rss, event, stat, latest_gc_info, meta, thread_id })
    }
}

fn string(place: impl Into<String>, value: Value) -> Result<String, ProtocolError> {
    match value {
        Value::String(text) => Ok(text),
        _ => Err(bad(place, "is not a string")),
    }
}

fn array(place: impl Into<String>, value: Value) -> Result<Vec<Value>, ProtocolError> {
    match value {
        Value::Array(values) => Ok(values),
        _ => Err(bad(place, "is not an array")),
    }
}

fn object(place: impl Into<String>, value: Value) -> Result<Map<String, Value>, ProtocolError> {
    match value {
        Value::Object(map) => Ok(map),
        _ => Err(bad(place, "is not an object")),
    }
}

fn integer(place: impl Into<String>, value: &Value) -> Result<u64, ProtocolError> {
    value.as_u64().ok_or_else(|| bad(place, "is not a non-negative integer"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample(stat: Vec<u64>) -> Sample {
        Sample {
            ts: 1_422_023_921.481_364,
            peak_rss: Some(132_255_744),
            current_rss: Some(132_255_744),
            event: EventName::GcCycleStarted,
            stat,
            latest_gc_info: Map::from_iter([("gc_by".to_owned(), json!("newobj"))]),
            meta: Value::Null,
            thread_id: None,
        }
    }

    fn set(samples: Vec<Sample>) -> SampleSet {
        let header = Header {
            token: None,
            ruby_version: "3.1.2".into(),
            rails_version: "0.0".into(),
            gc_env: Map::new(),
            agent_version: "0.1.0".into(),
            gc_opts: vec![],
            gc_constants: Map::new(),
            stat_keys: vec!["count".into(), "time".into()],
            spy_ids: None,
            hostname: "vm".into(),
            ppid: 1,
            pid: 153,
        };
        SampleSet { header, samples }
    }

    /// What we write we read back, to the microsecond and the byte.
    #[test]
    fn round_trip() {
        let set = set(vec![sample(vec![1, 2]), sample(vec![3, u64::MAX])]);
        let text = set.to_json();
        assert_eq!(SampleSet::from_json(&text).unwrap(), set);
        let value: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((value[0].as_array().unwrap().len(), value[1].as_array().unwrap().len()), (11, 8));
    }

    /// The agent's 12-element header and the old 7-element samples are read; wrong shapes are refused by field.
    #[test]
    fn dialects() {
        let mut value: Value = serde_json::from_str(&set(vec![sample(vec![1, 2])]).to_json()).unwrap();
        value[0].as_array_mut().unwrap().insert(8, json!("manual"));
        value[1].as_array_mut().unwrap().pop();
        let read = SampleSet::from_json(&value.to_string()).unwrap();
        assert_eq!(read.header.spy_ids.as_deref(), Some("manual"));
        assert_eq!(read.header.pid, 153);
        value[1][4] = json!([1]);
        let error = SampleSet::from_json(&value.to_string()).unwrap_err().to_string();
        assert!(error.contains("sample 0 (GC.stat values)"), "{error}");
        value[1] = json!([1]);
        assert!(SampleSet::from_json(&value.to_string()).is_err());
    }

    proptest! {
        /// No text makes the reader panic.
        #[test]
        fn hostile_text(text in "\\PC{0,200}") {
            let _any = SampleSet::from_json(&text);
        }

        /// No nesting of JSON values makes the reader panic.
        #[test]
        fn hostile_values(fields in proptest::collection::vec(0_u8..6, 0..16)) {
            let values: Vec<Value> = fields.iter().map(|kind| match kind {
                0 => Value::Null,
                1 => json!(-1),
                2 => json!("BOOTED"),
                3 => json!([1, 2]),
                4 => json!({"a": 1}),
                _ => json!(1.5e300),
            }).collect();
            let _any = SampleSet::from_json(&json!([values.clone(), values]).to_string());
        }
    }
}
