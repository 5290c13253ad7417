//! Pushing to a server while tracing goes on. Tracing hands a payload over and never waits: a thread encodes it, sends it, and tries
//! again. What does not fit into the queue, or is not taken in time, is dropped and counted.

use std::{
    cell::RefCell,
    io::{self, Write as _},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, channel, sync_channel},
    },
    thread::JoinHandle,
    time::Duration,
};

use flate2::{Compression, write::GzEncoder};
use ureq::{
    Agent,
    http::{HeaderMap, header},
    tls::{RootCerts, TlsConfig},
};

use crate::ledger::UserCounts;

/// Payloads that wait.
const QUEUE: usize = 1024;
/// For one exchange, and for its connection alone.
const TIMEOUT: Duration = Duration::from_secs(20);
const CONNECT: Duration = Duration::from_secs(5);
/// Before the second attempt; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// The longest pause, whatever the server asks for.
const LAST_PAUSE: Duration = Duration::from_secs(30);
/// Attempts for one payload.
const ATTEMPTS: u32 = 6;
/// For what is left when tracing ends.
const FINISH: Duration = Duration::from_secs(10);
/// An answer longer than this is cut off.
const MAX_ANSWER: u64 = 64 << 10;
/// How often a pause looks whether tracing has ended.
const LOOK: Duration = Duration::from_millis(50);

/// Something to send.
pub(super) trait Payload: Send {
    /// What follows the server's address.
    fn path(&self) -> String;
    /// Its `Content-Type`.
    fn content_type(&self) -> &'static str;
    /// Its bytes; empty if there is nothing to send after all.
    fn encode(&self) -> Vec<u8>;
    /// The same as two smaller ones, where it can be halved: for servers that find it too large.
    fn halves(&self) -> Option<[Box<dyn Payload>; 2]> {
        None
    }
    /// What the server did not take of what it accepted, by its answer.
    fn rejected(&self, _answer: &[u8]) -> Option<String> {
        None
    }
}

/// What became of payloads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    /// Handed over; halves count as one more.
    made: u64,
    /// Accepted; those of which a part was rejected, too.
    sent: u64,
    /// Of them, those of which a part was rejected.
    partly: u64,
    /// Refused for good.
    refused: u64,
    /// Given up: the queue was full, or the server could not be reached for too long.
    dropped: u64,
    /// Neither yet.
    waiting: u64,
}

/// The uploading thread, as tracing sees it.
pub(super) struct Uploader {
    name: &'static str,
    queue: RefCell<Option<SyncSender<Box<dyn Payload>>>>,
    counts: Arc<Mutex<Counts>>,
    ending: Arc<AtomicBool>,
    ended: Receiver<()>,
    thread: RefCell<Option<JoinHandle<()>>>,
    say: fn(&str),
}

fn lock(counts: &Mutex<Counts>) -> MutexGuard<'_, Counts> {
    counts.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Uploader {
    /// Starts the thread for a server. `name` is how it is called in messages.
    pub(super) fn start(
        name: &'static str,
        url: &str,
        headers: Vec<(String, String)>,
        say: fn(&str),
    ) -> io::Result<Self> {
        let (queue, payloads) = sync_channel(QUEUE);
        let (alive, ended) = channel();
        let counts = Arc::new(Mutex::new(Counts::default()));
        let ending = Arc::new(AtomicBool::new(false));
        let worker = Worker {
            name,
            url: url.to_owned(),
            headers,
            agent: agent(TIMEOUT, CONNECT),
            counts: Arc::clone(&counts),
            ending: Arc::clone(&ending),
            complained: false,
            say,
        };
        let thread = std::thread::Builder::new().name("gctrace-push".to_owned()).spawn(move || {
            worker.run(&payloads);
            drop(alive);
        })?;
        let (queue, thread) = (RefCell::new(Some(queue)), RefCell::new(Some(thread)));
        Ok(Self { name, queue, counts, ending, ended, thread, say })
    }

    /// Hands a payload over. Never waits.
    pub(super) fn send(&self, payload: Box<dyn Payload>) {
        let queue = self.queue.borrow();
        let Some(queue) = queue.as_ref() else { return };
        {
            let mut counts = lock(&self.counts);
            counts.made += 1;
            counts.waiting += 1;
        }
        if let Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) = queue.try_send(payload) {
            let mut counts = lock(&self.counts);
            counts.waiting -= 1;
            counts.dropped += 1;
        }
    }

    /// Counts a payload that there is no room for.
    pub(super) fn give_up(&self) {
        let mut counts = lock(&self.counts);
        counts.made += 1;
        counts.dropped += 1;
    }

    /// Adds what became of its payloads.
    pub(super) fn add_counts(&self, to: &mut UserCounts) {
        let counts = *lock(&self.counts);
        to.uploads += counts.made;
        to.uploads_sent += counts.sent;
        to.uploads_partly += counts.partly;
        to.uploads_refused += counts.refused;
        to.uploads_dropped += counts.dropped;
        to.uploads_waiting += counts.waiting;
    }

    /// Sends what is left, for a while, and tells what became of all.
    pub(super) fn finish(&self) {
        if self.queue.borrow_mut().take().is_none() {
            return;
        }
        self.ending.store(true, Ordering::Relaxed);
        let late = matches!(self.ended.recv_timeout(FINISH), Err(RecvTimeoutError::Timeout));
        if !late && self.thread.borrow_mut().take().is_some_and(|thread| thread.join().is_err()) {
            (self.say)(&format!("gctrace: {}: the sending thread panicked; please report this", self.name));
        }
        let Counts { sent, partly, refused, dropped, waiting, .. } = *lock(&self.counts);
        let partly = if partly > 0 { format!(" ({partly} of them in part)") } else { String::new() };
        let late = if waiting > 0 { format!(", {waiting} given up at the end") } else { String::new() };
        (self.say)(&format!(
            "gctrace: {}: {sent} requests were accepted{partly}, {refused} refused, {dropped} dropped{late}",
            self.name
        ));
    }
}

struct Worker {
    name: &'static str,
    url: String,
    headers: Vec<(String, String)>,
    agent: Agent,
    counts: Arc<Mutex<Counts>>,
    ending: Arc<AtomicBool>,
    /// Whether the trouble that there is has been told.
    complained: bool,
    say: fn(&str),
}

/// What came of an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Outcome {
    Accepted(Vec<u8>),
    TooLarge,
    Refused(String),
    /// It may be taken another time; not before this.
    Again(String, Option<Duration>),
}

impl Worker {
    fn run(mut self, payloads: &Receiver<Box<dyn Payload>>) {
        while let Ok(payload) = payloads.recv() {
            let mut left = vec![payload];
            while let Some(payload) = left.pop() {
                if let Some(halves) = self.deliver(payload.as_ref()) {
                    lock(&self.counts).made += 1;
                    lock(&self.counts).waiting += 1;
                    left.extend(halves);
                }
            }
        }
    }

    /// Sends a payload, or gives it up. Returns its halves where the server finds it too large.
    fn deliver(&mut self, payload: &dyn Payload) -> Option<[Box<dyn Payload>; 2]> {
        let body = payload.encode();
        if body.is_empty() {
            self.count(|counts| counts.made -= 1);
            return None;
        }
        let body = gzip(&body);
        let (mut pause, mut last) = (FIRST_PAUSE, false);
        for attempt in 1.. {
            let (reason, after) = match self.post(payload, &body) {
                Outcome::Accepted(answer) => {
                    self.complained = false;
                    let rejected = payload.rejected(&answer);
                    if let Some(why) = &rejected {
                        self.complain(&format!("did not take all of a request: {why}"));
                    }
                    self.count(|counts| {
                        counts.sent += 1;
                        counts.partly += u64::from(rejected.is_some());
                    });
                    return None;
                }
                Outcome::TooLarge => {
                    if let Some(halves) = payload.halves() {
                        return Some(halves);
                    }
                    self.complain(&format!("finds a request of {} bytes too large", body.len()));
                    self.count(|counts| counts.refused += 1);
                    return None;
                }
                Outcome::Refused(reason) => {
                    self.complain(&format!("refused a request: {reason}"));
                    self.count(|counts| counts.refused += 1);
                    return None;
                }
                Outcome::Again(reason, after) => (reason, after),
            };
            self.complain(&format!("{reason}; trying again"));
            if attempt == ATTEMPTS || last {
                break;
            }
            // When tracing ends there is one more chance, at once.
            last = self.pause(after.unwrap_or(pause + jitter(pause)).min(LAST_PAUSE));
            pause *= 2;
        }
        self.count(|counts| counts.dropped += 1);
        None
    }

    /// A payload has come to its end.
    fn count(&self, how: impl FnOnce(&mut Counts)) {
        let mut counts = lock(&self.counts);
        counts.waiting -= 1;
        how(&mut counts);
    }

    /// Tells the first of a series of troubles.
    fn complain(&mut self, what: &str) {
        if !std::mem::replace(&mut self.complained, true) {
            (self.say)(&format!("gctrace: {}: {} {what}", self.name, self.url));
        }
    }

    /// Waits. Returns whether tracing has ended: then there is no time for further attempts.
    fn pause(&self, mut time: Duration) -> bool {
        while !time.is_zero() && !self.ending.load(Ordering::Relaxed) {
            let step = time.min(LOOK);
            std::thread::sleep(step);
            time -= step;
        }
        self.ending.load(Ordering::Relaxed)
    }

    fn post(&self, payload: &dyn Payload, body: &[u8]) -> Outcome {
        let mut request = self
            .agent
            .post(format!("{}{}", self.url, payload.path()))
            .header(header::CONTENT_TYPE, payload.content_type())
            .header(header::CONTENT_ENCODING, "gzip");
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        let mut response = match request.send(body) {
            Ok(response) => response,
            Err(error) => return Outcome::Again(error.to_string(), None),
        };
        let after = retry_after(response.headers());
        let answer = response.body_mut().with_config().limit(MAX_ANSWER).read_to_vec().unwrap_or_default();
        meaning(response.status().as_u16(), answer, after)
    }
}

/// What an answer means (OTLP specification, "OTLP/HTTP Response").
fn meaning(code: u16, answer: Vec<u8>, after: Option<Duration>) -> Outcome {
    let text = || {
        let text = String::from_utf8_lossy(&answer);
        let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(200).collect();
        format!("answered {code} ({})", text.trim())
    };
    match code {
        200..=299 => Outcome::Accepted(answer),
        413 => Outcome::TooLarge,
        429 | 502..=504 => Outcome::Again(text(), after),
        _ => Outcome::Refused(text()),
    }
}

/// `Retry-After` in seconds; a date is not heeded, the usual pause is.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(header::RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds))
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut out = GzEncoder::new(Vec::with_capacity(bytes.len() / 4), Compression::fast());
    // Writing to memory does not fail.
    out.write_all(bytes).and_then(|()| out.finish()).unwrap_or_default()
}

/// A client that trusts the certificates that the host trusts, so that a company's own authority works.
pub(super) fn agent(timeout: Duration, connect: Duration) -> Agent {
    let tls = TlsConfig::builder().root_certs(RootCerts::PlatformVerifier).build();
    Agent::config_builder()
        .timeout_global(Some(timeout))
        .timeout_connect(Some(connect))
        .http_status_as_error(false)
        .max_redirects(0)
        .max_redirects_will_error(false)
        .user_agent(concat!("gctrace/", env!("CARGO_PKG_VERSION")))
        .tls_config(tls)
        .build()
        .into()
}

/// Up to a quarter of a pause, so that hosts that lost their server together do not come back together.
pub(super) fn jitter(pause: Duration) -> Duration {
    let nanos =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().subsec_nanos();
    pause.mul_f64(f64::from(nanos % 1000) / 4000.0)
}

/// An http:// or https:// address without a `/` at its end; `None` if it is none.
pub(crate) fn address(text: &str) -> Option<String> {
    let url = text.trim_end_matches('/');
    let host = url.strip_prefix("https://").or_else(|| url.strip_prefix("http://"))?;
    (!host.is_empty() && !host.starts_with('/')).then(|| url.to_owned())
}

/// Further headers from an environment variable: `Name=value,Name=value` (OpenTelemetry's specification of exporters).
pub(crate) fn headers(variable: &str) -> Vec<(String, String)> {
    let list = std::env::var(variable).unwrap_or_default();
    let pairs = list.split(',').filter_map(|pair| pair.split_once('='));
    pairs.map(|(name, value)| (name.trim().to_owned(), value.trim().replace("%20", " "))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Only what OTLP calls retryable is sent again.
    #[test]
    fn meanings() {
        assert_eq!(meaning(200, b"x".to_vec(), None), Outcome::Accepted(b"x".to_vec()));
        assert_eq!(meaning(413, Vec::new(), None), Outcome::TooLarge);
        for code in [429, 502, 503, 504] {
            let after = Some(Duration::from_secs(3));
            assert!(
                matches!(meaning(code, Vec::new(), after), Outcome::Again(_, when) if when == after),
                "{code}"
            );
        }
        for code in [301, 400, 401, 404, 500] {
            let outcome = meaning(code, b"\x1b[2Jno".to_vec(), None);
            assert_eq!(outcome, Outcome::Refused(format!("answered {code} ([2Jno)")), "{code}");
        }
    }

    /// Addresses are taken with and without a slash at the end.
    #[test]
    fn addresses() {
        assert_eq!(address("http://h:1/a/").as_deref(), Some("http://h:1/a"));
        for text in ["", "h:1", "ftp://h", "https://", "http:///x"] {
            assert_eq!(address(text), None, "{text}");
        }
    }

    struct Bytes(&'static [u8]);

    impl Payload for Bytes {
        fn path(&self) -> String {
            "/x".to_owned()
        }

        fn content_type(&self) -> &'static str {
            "text/plain"
        }

        fn encode(&self) -> Vec<u8> {
            self.0.to_vec()
        }
    }

    /// With nobody there, handing over does not wait, the queue has its bound, and every payload is accounted for.
    #[test]
    fn bounded() {
        let uploader = Uploader::start("test", "http://127.0.0.1:1", Vec::new(), |_| {}).unwrap();
        let began = std::time::Instant::now();
        for _ in 0..2 * QUEUE {
            uploader.send(Box::new(Bytes(b"x")));
        }
        uploader.send(Box::new(Bytes(b"")));
        assert!(began.elapsed() < Duration::from_secs(1));
        let before = *lock(&uploader.counts);
        assert!(before.dropped >= QUEUE as u64 / 2 && before.waiting <= QUEUE as u64 + 1, "{before:?}");
        uploader.finish();
        let counts = *lock(&uploader.counts);
        assert_eq!((counts.waiting, counts.sent), (0, 0));
        assert_eq!(counts.made, counts.dropped + counts.refused, "{counts:?}");
    }
}
