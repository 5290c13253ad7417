//! Processing of a set: read, judge, store and answer. A set is stored only if all of it is valid.

use std::{
    borrow::Cow,
    io::{self, BufWriter, Read, Write as _},
    sync::atomic::Ordering,
};

use flate2::{Compression, bufread::GzDecoder, write::GzEncoder};
use hyper::StatusCode;
use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};

use super::{LARGE, MAX_BODY, Shared, access, advice::Advice, answer::Answer, body::Body, now};
use crate::{
    digest::{Digest, EPOCH},
    store::{App, Group, NewSet, SetId, StoreError, TokenHash},
    tune::{Fold, InForce, environment::is_name},
    wire::{self, Header, Sample, Sink, gzip},
};

/// A body to be processed.
pub(super) struct Work {
    pub(super) body: Body,
    pub(super) gzip: bool,
    /// Size of the set, bytes.
    pub(super) size: usize,
    /// Whether to check the agent's version. False for sets from gctrace, whose versions are not comparable.
    pub(super) judge_version: bool,
    /// The prefix of the address in the answer: scheme and host.
    pub(super) base: String,
}

/// The first bytes of every gzip file.
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// The size of a set after decompression, or the answer that refuses it. A gzip file states the size in its last four bytes, and is never
/// decompressed beyond it.
pub(super) fn announced_size(body: &[u8], gzip: bool) -> Result<usize, Answer> {
    let size = match body.last_chunk::<4>() {
        _ if !gzip => body.len(),
        // Without the gzip signature, the last bytes are not a size.
        _ if !body.starts_with(&GZIP) => return Err(Answer::bad("payload: is not gzip")),
        Some(last) => u32::from_le_bytes(*last) as usize,
        None => return Err(Answer::bad("payload: is not gzip")),
    };
    if size > MAX_BODY {
        let gzip = if gzip { ", or a gzip file that was cut off" } else { "" };
        return Err(Answer::bad(format!("payload: is larger than {MAX_BODY} bytes{gzip}")));
    }
    Ok(size)
}

/// The token of a set, from the set's first bytes: it is the first element of its first element.
pub(super) fn token(beginning: &[u8], gzip: bool) -> Result<TokenHash, Answer> {
    // Tokens are short, and a few blanks before them are allowed.
    const ENOUGH: u64 = 8 << 10;
    if gzip && !beginning.starts_with(&GZIP) {
        return Err(Answer::bad("payload: is not gzip"));
    }
    let mut text = Vec::new();
    if gzip {
        // Damage after the token is detected later.
        let _cut = GzDecoder::new(beginning).take(ENOUGH).read_to_end(&mut text);
    } else {
        text.extend(beginning.iter().take(ENOUGH as usize));
    }
    let inside = |text: &[u8]| text.trim_ascii_start().strip_prefix(b"[").map(<[u8]>::to_vec);
    let token = inside(&text).and_then(|text| inside(&text)).and_then(|text| {
        serde_json::Deserializer::from_slice(&text).into_iter::<Option<String>>().next()?.ok()
    });
    match token {
        Some(token) => Ok(TokenHash::of(&token.unwrap_or_default())),
        None => Err(Answer::bad(format!("payload: has no token in its first {ENOUGH} bytes"))),
    }
}

/// Processes a set.
pub(super) fn set(shared: &Shared, work: &Work) -> Result<Answer, StoreError> {
    let received = now();
    if !is_set(received) {
        shared.failures.report(&"the clock of this host is not set: sets are refused until it is");
        // Agents send it again, but only after this code. With that time it would be deleted as too old once the clock is right.
        let text = "the collector's clock is not set; send it again later";
        return Ok(Answer::new(StatusCode::INTERNAL_SERVER_ERROR, text));
    }
    let mut intake = Intake { shared, work, judged: None, refusal: None, rewrites: false };
    let bytes = work.body.bytes.as_slice();
    let split = if work.gzip && work.size <= LARGE { gzip::split(bytes, work.size) } else { None };
    // Reading it from memory takes half the time of reading a stream.
    let text = match &split {
        Some(split) => Some(Cow::Borrowed(split.text.as_slice())),
        None if !work.gzip => Some(Cow::Borrowed(bytes)),
        None if work.size > LARGE => None,
        None => expanded(bytes, work.size).map(Cow::Owned),
    };
    let mut followed = false;
    let (read, hash) = if let Some(text) = &text {
        (wire::read_slice(text, &mut intake), Sha256::digest(text))
    } else {
        intake.rewrites = true;
        let mut stream =
            Stream { inner: GzDecoder::new(bytes).take(work.size as u64 + 1), hash: Sha256::new() };
        let read = wire::read(io::BufReader::with_capacity(64 << 10, &mut stream), &mut intake);
        if read.is_ok()
            && let Some(problem) = stream.problem()
        {
            return Ok(Answer::bad(format!("payload: {problem}")));
        }
        followed = read.is_err() && stream.is_followed();
        (read, stream.hash.finalize())
    };
    let Intake { judged, refusal, .. } = intake;
    if let Some(refusal) = refusal {
        return refusal;
    }
    let Some(Judged { app, fold, digest, header, rewritten, variables }) = judged.filter(|_| read.is_ok())
    else {
        return Ok(Answer::bad(match read {
            // A second member cuts the JSON off, but the error is not in the JSON.
            Err(_) if followed => format!("payload: {BEHIND}"),
            Err(error) => error.to_string(),
            Ok(_) => "payload: has no header".to_owned(),
        }));
    };
    shared.metrics.set_bytes.fetch_add(work.size as u64, Ordering::Relaxed);
    let id = SetId::of(&hash.into());
    let group = Group { app, series: fold.series() };
    let evidence = fold.finish();
    let body = match (&split, &text) {
        (Some(split), _) => Some(split.with_header(header.as_bytes())),
        (None, Some(text)) => {
            let mut body = begun(&header);
            gzip::after_header(text)
                .and_then(|samples| body.write_all(samples).and_then(|()| body.into_inner()?.finish()).ok())
        }
        (None, None) => rewritten.and_then(|body| complete(body).ok()),
    };
    let Some(body) = body else {
        // Writing to memory does not fail.
        return Ok(Answer::new(StatusCode::INTERNAL_SERVER_ERROR, "compressing the set failed"));
    };
    let in_force = InForce::of(&evidence.environment, group.series);
    let key = in_force.key();
    let set = NewSet {
        id: &id,
        group,
        in_force: &key,
        received,
        evidence: &evidence,
        digest: &digest,
        body: &body,
    };
    let inserted = shared.store.insert(&set, shared.options.quota)?;
    if inserted.new {
        shared.metrics.sets.fetch_add(1, Ordering::Relaxed);
        shared.metrics.samples.fetch_add(evidence.samples, Ordering::Relaxed);
    } else {
        shared.metrics.duplicates.fetch_add(1, Ordering::Relaxed);
    }
    shared.metrics.over_quota.fetch_add(inserted.deleted, Ordering::Relaxed);
    if !in_force.is_default() && clobbers(shared, group, &id)? {
        return Ok(Answer::json(StatusCode::PRECONDITION_FAILED, serde_json::to_string(&variables)?));
    }
    Ok(Answer::new(StatusCode::OK, format!("{}/configs/{}", work.base, id.as_str())))
}

/// Whether the clock of this host, epoch seconds, can be right. Without a battery it is near 1970 after a start.
fn is_set(now: f64) -> bool {
    now >= EPOCH
}

/// Starts to compress a set anew: writes its header.
fn begun(header: &str) -> BufWriter<GzEncoder<Vec<u8>>> {
    // Each write into an encoder has a fixed cost.
    let mut body = BufWriter::with_capacity(64 << 10, GzEncoder::new(Vec::new(), Compression::fast()));
    // Writing to memory does not fail.
    let _infallible = body.write_all(header.as_bytes());
    body
}

/// Finishes a rewritten set.
fn complete(mut body: BufWriter<GzEncoder<Vec<u8>>>) -> io::Result<Vec<u8>> {
    body.write_all(b"]")?;
    body.into_inner()?.finish()
}

/// Whether the advice for the environment of a set would change the user's settings too much.
fn clobbers(shared: &Shared, group: Group, id: &SetId) -> Result<bool, StoreError> {
    let environment = shared.store.group_of(id)?.map(|(_, environment)| environment);
    let Some(advice) = Advice::of(shared, group, environment)? else { return Ok(false) };
    let own = |name: &str, value: f64| advice.is_own(name, value);
    Ok(!advice.report.speed().clobbers(&advice.report.in_force, &own).is_empty())
}

/// The `RUBY_GC_*` variables of a header, without its token.
fn variables(header: &Header) -> Map<String, Value> {
    let shown = |name: &str| name.starts_with("RUBY_GC_") && name != "RUBY_GC_TOKEN" && is_name(name);
    header
        .gc_env
        .iter()
        .filter(|(name, _)| shown(name))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect()
}

/// The content of a gzip file that announces `size` bytes; `None` if its size differs, it is damaged, or other data follows it.
fn expanded(file: &[u8], size: usize) -> Option<Vec<u8>> {
    let mut stream = GzDecoder::new(file).take(size as u64 + 1);
    let mut text = Vec::with_capacity(size + 1);
    stream.read_to_end(&mut text).ok()?;
    (text.len() == size && stream.get_ref().get_ref().is_empty()).then_some(text)
}

/// The error for a file of several gzip members, or with other bytes after the first one.
const BEHIND: &str = "has data after the end of its gzip member; send one member";

/// A decompressed stream, hashed as it is read.
struct Stream<R> {
    inner: io::Take<R>,
    hash: Sha256,
}

impl<R: Read> Read for Stream<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.hash.update(buffer.get(..read).unwrap_or_default());
        Ok(read)
    }
}

impl Stream<GzDecoder<&[u8]>> {
    /// Whether the gzip member was read to its end and other data follows it. If the error is elsewhere, nothing more is decompressed.
    fn is_followed(&mut self) -> bool {
        matches!(self.inner.read(&mut [0]), Ok(0))
            && self.inner.limit() > 0
            && !self.inner.get_ref().get_ref().is_empty()
    }

    /// The error in the file after the set that was read, if any.
    fn problem(&mut self) -> Option<&'static str> {
        // Read to the end, where the checksum is.
        match io::copy(self, &mut io::sink()) {
            Err(_) => Some("is not gzip, or was damaged"),
            Ok(_) if self.inner.limit() == 0 => Some("is larger than it states, or is truncated"),
            Ok(_) if !self.inner.get_ref().get_ref().is_empty() => Some(BEHIND),
            Ok(_) => None,
        }
    }
}

/// A set from a known sender.
struct Judged {
    app: App,
    fold: Fold,
    digest: Digest,
    /// The opening bracket of the set, and its header without the token.
    header: String,
    /// The set without its token, if its text is not in memory as a whole.
    rewritten: Option<BufWriter<GzEncoder<Vec<u8>>>>,
    /// The `RUBY_GC_*` variables of its environment.
    variables: Map<String, Value>,
}

/// Judges a set while it is read, and rewrites it if `rewrites`.
struct Intake<'a> {
    shared: &'a Shared,
    work: &'a Work,
    judged: Option<Judged>,
    refusal: Option<Result<Answer, StoreError>>,
    /// Whether samples are written as they are read; otherwise their text is available afterwards.
    rewrites: bool,
}

impl Intake<'_> {
    fn judge(&self, header: &Header) -> Result<Result<Judged, Answer>, StoreError> {
        let token = header.token.as_deref().unwrap_or_default();
        let app = match access::writes(self.shared, TokenHash::of(token))? {
            Ok(app) => app,
            Err(refusal) => return Ok(Err(refusal.answer())),
        };
        let minimum = &self.shared.options.min_agent;
        if self.work.judge_version && older(&header.agent_version, minimum) {
            return Ok(Err(Answer::new(StatusCode::UPGRADE_REQUIRED, minimum)));
        }
        let fold = match Fold::new(header) {
            Ok(fold) => fold,
            Err(error) => {
                return Ok(Err(Answer::new(StatusCode::NOT_IMPLEMENTED, error.to_string())));
            }
        };
        let mut kept = Header { token: None, ..header.clone() };
        if let Some(token) = kept.gc_env.get_mut("RUBY_GC_TOKEN") {
            *token = "(redacted)".into();
        }
        let (digest, variables) = (Digest::new(header), variables(header));
        let header = format!("[{}", kept.to_json());
        let rewritten = self.rewrites.then(|| begun(&header));
        Ok(Ok(Judged { app, fold, digest, header, rewritten, variables }))
    }
}

impl Sink for Intake<'_> {
    fn header(&mut self, header: &Header) -> Result<(), String> {
        match self.judge(header) {
            Ok(Ok(judged)) => {
                self.judged = Some(judged);
                return Ok(());
            }
            Ok(Err(answer)) => self.refusal = Some(Ok(answer)),
            Err(error) => self.refusal = Some(Err(error)),
        }
        Err("is refused".to_owned())
    }

    fn sample(&mut self, sample: &Sample) -> Result<(), String> {
        let Some(judged) = &mut self.judged else { return Ok(()) };
        judged.fold.add(sample);
        judged.digest.add(sample);
        let Some(body) = &mut judged.rewritten else { return Ok(()) };
        let written = body.write_all(b",").and_then(|()| Ok(serde_json::to_writer(body, sample)?));
        written.map_err(|error| error.to_string())
    }
}

/// Checks that an agent's version consists of numbers: any other part would count as 0, and no agent would be asked to update.
pub fn agent_version(text: &str) -> Result<String, String> {
    let number = |part: &str| {
        !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()) && part.parse::<u64>().is_ok()
    };
    if text.split('.').all(number) {
        Ok(text.to_owned())
    } else {
        Err("give a version in numbers, such as 1.0.15".to_owned())
    }
}

/// Whether a version is older than another one, compared number by number. Anything that is not a number counts as 0.
fn older(version: &str, minimum: &str) -> bool {
    let parts = |text: &str| -> Vec<u64> { text.split('.').map(|part| part.parse().unwrap_or(0)).collect() };
    let (mut ours, mut least) = (parts(version), parts(minimum));
    let length = ours.len().max(least.len());
    ours.resize(length, 0);
    least.resize(length, 0);
    ours < least
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::{Compression, GzEncoder, agent_version, announced_size, expanded, is_set, older, token};

    /// An intact file is read from memory. Other files yield nothing that way: their errors are found while they are streamed.
    #[test]
    fn expands() {
        let mut file = GzEncoder::new(Vec::new(), Compression::fast());
        file.write_all(b"[[null,\"3.1\"]]").unwrap();
        let file = file.finish().unwrap();
        assert_eq!(expanded(&file, 14).as_deref(), Some(&b"[[null,\"3.1\"]]"[..]));
        assert_eq!((expanded(&file, 13), expanded(&file, 15)), (None, None));
        assert_eq!(expanded(&[&file[..], b"x"].concat(), 14), None);
        for at in 0..file.len() {
            assert_eq!(expanded(&file[..at], 14), None, "{at}");
        }
        let mut damaged = file.clone();
        let sum = damaged.len() - 8;
        damaged[sum] ^= 1;
        assert_eq!(expanded(&damaged, 14), None);
    }

    /// A body that is not a gzip file is reported as such, whatever size its last four bytes would state.
    #[test]
    fn not_gzip() {
        let answer = |body: &[u8]| announced_size(body, true).map_err(|answer| answer.text);
        for body in [b"[[null,\"3.1\"]]zzzz".as_slice(), b"", b"\x1f", b"\xff\xff\xff\xff"] {
            assert_eq!(answer(body), Err("payload: is not gzip".to_owned()));
        }
        // The beginning of a large body is checked first.
        let large = [b"[[\"token\",\"3.1\"]".as_slice(), &b" ".repeat(70_000), b"]"].concat();
        let of_beginning = |gzip| token(&large[..65_536], gzip).map(|_| ()).map_err(|answer| answer.text);
        assert_eq!(of_beginning(true), Err("payload: is not gzip".to_owned()));
        assert_eq!(of_beginning(false), Ok(()));
        assert_eq!(answer(b"\x1f\x8b\x08\x00\x07\x00\x00\x00"), Ok(7));
        assert!(answer(b"\x1f\x8b\x08\x00\xff\xff\xff\xff").unwrap_err().contains("is larger than"));
    }

    /// A clock that counts from 1970 since the host started is not set.
    #[test]
    fn clocks() {
        assert!(!is_set(0.0) && !is_set(86_400.0 * 365.0) && is_set(1.7e9) && is_set(super::now()));
    }

    /// Versions are compared as numbers.
    #[test]
    fn versions() {
        for text in ["1.0.15", "2", "1.0.15.0"] {
            assert_eq!(agent_version(text).as_deref(), Ok(text));
        }
        for text in ["", "abc", "1.", "1..2", "v1.0", "1.0-rc", "1 ", "99999999999999999999"] {
            assert!(agent_version(text).is_err(), "{text:?}");
        }
        for (version, minimum, below) in [
            ("1.0.9", "1.0.15", true),
            ("1.0.15", "1.0.15", false),
            ("1.0.71", "1.0.15", false),
            ("1.1", "1.0.15", false),
            ("1", "1.0.15", true),
            ("2", "1.0.15", false),
            ("", "1.0.15", true),
            ("x.y", "0.0", false),
        ] {
            assert_eq!(older(version, minimum), below, "{version} < {minimum}");
        }
    }
}
