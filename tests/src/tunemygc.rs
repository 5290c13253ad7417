//! An independent, strict reader of TuneMyGC sample sets as gctrace writes them.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Map, Value};

/// Number of elements of a header.
const HEADER: usize = 11;
/// Number of elements of a sample.
const SAMPLE: usize = 8;
/// The protocol's events.
const EVENTS: [&str; 6] =
    ["BOOTED", "GC_CYCLE_STARTED", "GC_CYCLE_ENDED", "PROCESSING_STARTED", "PROCESSING_ENDED", "TERMINATED"];

/// One sample set: what happened in one process.
#[derive(Clone, Debug)]
pub struct Set {
    /// The file's text.
    pub text: String,
    /// The raw header.
    pub header: Vec<Value>,
    /// Ruby version of the header.
    pub ruby: String,
    /// `RUBY_GC_*` of the header.
    pub env: Map<String, Value>,
    /// `GC.stat` keys of the header.
    pub keys: Vec<String>,
    /// Pid of the header.
    pub pid: u32,
    /// Parent's pid of the header.
    pub ppid: u32,
    /// Samples in order.
    pub samples: Vec<Sample>,
}

/// One sample.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Epoch seconds.
    pub ts: f64,
    /// Peak resident memory, bytes; `None` if the process had ended before it could be read even once.
    pub peak_rss: Option<u64>,
    /// Resident memory, bytes; `None` if the peak is.
    pub rss: Option<u64>,
    /// The event's name.
    pub event: String,
    /// Values of `GC.stat` in the order of the header's keys.
    pub stat: Vec<u64>,
    /// `GC.latest_gc_info`.
    pub info: Map<String, Value>,
    /// Metadata: null or an object.
    pub meta: Value,
    /// Thread id; `None` on the main thread.
    pub thread: Option<u64>,
}

impl Set {
    /// Reads a set; any deviation from the protocol is an error.
    pub fn parse(text: &str) -> Result<Self> {
        let value: Value = serde_json::from_str(text)?;
        let list = value.as_array().context("not a list")?;
        let (header, samples) = list.split_first().context("no header")?;
        let header = header.as_array().context("the header is no list")?.clone();
        ensure!(header.len() == HEADER, "{} elements in the header", header.len());
        for index in [1, 2, 4, 8] {
            ensure!(header[index].is_string(), "header element {index} is no string: {}", header[index]);
        }
        ensure!(header[0].is_string() || header[0].is_null(), "the token is neither string nor null");
        ensure!(header[5].is_array(), "GC::OPTS is no list");
        ensure!(header[6].is_object(), "GC::INTERNAL_CONSTANTS is no hash");
        let text_of = |value: &Value| value.as_str().map(ToOwned::to_owned);
        let keys = header[7].as_array().context("the keys are no list")?;
        let keys = keys.iter().map(text_of).collect::<Option<Vec<_>>>().context("a key is no string")?;
        ensure!(!keys.is_empty(), "no keys");
        let pid_of = |index: usize| {
            header[index].as_u64().and_then(|n| u32::try_from(n).ok()).context("a pid is not a number")
        };
        let samples = samples
            .iter()
            .enumerate()
            .map(|(index, sample)| {
                Sample::parse(sample, keys.len()).with_context(|| format!("sample {index}: {sample}"))
            })
            .collect::<Result<Vec<_>>>()?;
        for pair in samples.windows(2) {
            ensure!(pair[0].ts <= pair[1].ts, "time goes backwards from {} to {}", pair[0].ts, pair[1].ts);
        }
        Ok(Self {
            text: text.to_owned(),
            ruby: text_of(&header[1]).unwrap_or_default(),
            env: header[3].as_object().context("the environment is no hash")?.clone(),
            keys,
            ppid: pid_of(9)?,
            pid: pid_of(10)?,
            header,
            samples,
        })
    }

    /// Reads all sets in a directory, which must contain nothing else.
    pub fn read_dir(dir: &Path) -> Result<Vec<Self>> {
        files(dir)?
            .iter()
            .map(|path| {
                let name = path.display();
                ensure!(path.extension().is_some_and(|e| e == "json"), "{name} is no finished sample set");
                let text = std::fs::read_to_string(path)?;
                Self::parse(&text).with_context(|| format!("sample set {name}"))
            })
            .collect()
    }

    /// The samples of one event.
    pub fn of<'a>(&'a self, event: &'a str) -> impl Iterator<Item = &'a Sample> {
        self.samples.iter().filter(move |sample| sample.event == event)
    }
}

impl Sample {
    fn parse(value: &Value, keys: usize) -> Result<Self> {
        let list = value.as_array().context("not a list")?;
        ensure!(list.len() == SAMPLE, "{} elements", list.len());
        let event = list[3].as_str().context("the event is no string")?;
        ensure!(EVENTS.contains(&event), "unknown event {event}");
        let stat = list[4].as_array().context("stat is no list")?;
        let stat =
            stat.iter().map(Value::as_u64).collect::<Option<Vec<_>>>().context("a stat is not a number")?;
        ensure!(stat.len() == keys, "{} stat values for {keys} keys", stat.len());
        ensure!(list[6].is_null() || list[6].is_object(), "meta is neither null nor hash");
        let thread = match &list[7] {
            Value::Null => None,
            Value::Number(number) => Some(number.as_u64().context("the thread is no whole number")?),
            other => bail!("the thread is {other}"),
        };
        let sample = Self {
            ts: list[0].as_f64().context("the time is not a number")?,
            peak_rss: bytes(&list[1]).context("the peak")?,
            rss: bytes(&list[2]).context("the RSS")?,
            event: event.to_owned(),
            stat,
            info: list[5].as_object().context("latest_gc_info is no hash")?.clone(),
            meta: list[6].clone(),
            thread,
        };
        ensure!(sample.ts > 1e9, "{} is no epoch time", sample.ts);
        ensure!(sample.peak_rss.is_some() == sample.rss.is_some(), "only one of peak and RSS");
        ensure!(sample.peak_rss >= sample.rss, "peak {:?} below RSS {:?}", sample.peak_rss, sample.rss);
        Ok(sample)
    }
}

/// A number or null.
fn bytes(value: &Value) -> Result<Option<u64>> {
    Ok(if value.is_null() { None } else { Some(value.as_u64().context("is not a number")?) })
}

/// All entries of a directory, sorted.
pub fn files(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    paths.sort();
    Ok(paths)
}
