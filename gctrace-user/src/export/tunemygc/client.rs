//! Sending sets to a collector. Tracing hands a set over and goes on; a thread of its own puts it on disk, sends it, and
//! tries again.

use std::{
    io::{self, Write as _},
    num::NonZeroU32,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use flate2::{Compression, write::GzEncoder};
use gctrace_tunemygc::printable::printable;
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    flag::register_conditional_shutdown,
};
use ureq::{
    Agent,
    http::{HeaderMap, header},
};

use super::spool::Spool;
use super::tokens::Tokens;
use crate::{
    export::upload::{self, agent, jitter},
    ledger::UserCounts,
};

/// Bytes of sets that wait to be put on disk.
const QUEUE: usize = 64 << 20;
/// Bytes of sets that wait on disk.
const SPOOL: u64 = 256 << 20;
/// For one exchange, and for its connection alone.
const TIMEOUT: Duration = Duration::from_secs(30);
const CONNECT: Duration = Duration::from_secs(5);
/// Between attempts: the first pause, doubled each time up to the last one.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LAST_PAUSE: Duration = Duration::from_mins(2);
/// For what is left when tracing ends. What is still left then waits on disk for the next run.
const FINISH: Duration = Duration::from_secs(20);
/// Before anything is said about that.
const PROMPT: Duration = Duration::from_millis(500);
/// An answer longer than this is cut off.
const MAX_ANSWER: u64 = 4096;

/// Where sets are sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Address of the collector, without `/ruby`.
    pub url: String,
    /// Tokens of the applications.
    pub tokens: Tokens,
    /// Directory in which sets wait.
    pub spool: PathBuf,
    /// After so many cycles of a process its set is sent and begun anew.
    pub cycles: Option<NonZeroU32>,
}

impl Target {
    /// An address with nothing behind it that belongs to the protocol; `None` if it is no http:// or https:// address.
    pub fn url(text: &str) -> Option<String> {
        let url = text.trim_end_matches('/');
        upload::address(url.strip_suffix("/ruby").unwrap_or(url))
    }

    /// The part of the spool where the sets for this address wait: what was meant for one collector is never sent to another one.
    fn spool_name(&self) -> String {
        let name: String = self
            .url
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() || "-.".contains(c) { c } else { '_' })
            .collect();
        let sum = crc32fast::hash(self.url.as_bytes());
        format!("{}-{sum:08x}", name.get(..80).unwrap_or(&name))
    }
}

/// What became of sets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    /// Handed over in this run, or left by an earlier one.
    made: u64,
    sent: u64,
    refused: u64,
    dropped: u64,
    /// Neither yet: in the queue or on disk.
    waiting: u64,
}

fn lock(counts: &Mutex<Counts>) -> MutexGuard<'_, Counts> {
    counts.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The sending thread, as tracing sees it.
pub(super) struct Client {
    queue: Option<Sender<String>>,
    queued: Arc<AtomicUsize>,
    counts: Arc<Mutex<Counts>>,
    overflowed: AtomicUsize,
    ended: Receiver<()>,
    thread: Option<JoinHandle<()>>,
    spool: PathBuf,
    say: fn(&str),
}

impl Client {
    /// Starts the thread. Sets that an earlier run left are sent, too.
    pub(super) fn start(target: &Target, say: fn(&str)) -> Result<Self, (PathBuf, io::Error)> {
        let spool = Spool::open(&target.spool, &target.spool_name(), SPOOL)
            .map_err(|error| (target.spool.clone(), error))?;
        let dir = spool.dir().to_owned();
        if in_the_clear(&target.url) {
            say(&format!("gctrace: {}: the token and sample sets cross the network unencrypted", target.url));
        }
        let left = spool.len();
        if left > 0 {
            say(&format!(
                "gctrace: {left} sample sets of earlier runs wait in {}; sending them, too",
                dir.display()
            ));
        }
        let (sender, queue) = channel();
        let (alive, ended) = channel();
        let queued = Arc::new(AtomicUsize::new(0));
        let (left, dropped) = (left as u64, spool.dropped());
        let counts = Counts { made: left + dropped, dropped, waiting: left, ..Counts::default() };
        let counts = Arc::new(Mutex::new(counts));
        let worker = Worker {
            url: format!("{}/ruby", target.url),
            agent: agent(TIMEOUT, CONNECT),
            spool,
            queued: Arc::clone(&queued),
            counts: Arc::clone(&counts),
            gzip: false,
            failures: 0,
            next: Instant::now(),
            sent: 0,
            refused: 0,
            unkept: 0,
            say,
        };
        let thread = std::thread::Builder::new()
            .name("gctrace-send".to_owned())
            .spawn(move || {
                worker.run(&queue);
                drop(alive);
            })
            .map_err(|error| (dir.clone(), error))?;
        let (queue, overflowed, thread, spool) = (Some(sender), AtomicUsize::new(0), Some(thread), dir);
        Ok(Self { queue, queued, counts, overflowed, ended, thread, spool, say })
    }

    /// Hands a set over. Never waits: if too much is in the queue the set is dropped and counted.
    pub(super) fn send(&self, text: String) {
        let size = text.len();
        let Some(queue) = &self.queue else { return };
        {
            let mut counts = lock(&self.counts);
            counts.made += 1;
            counts.waiting += 1;
        }
        let full = self.queued.fetch_add(size, Ordering::Relaxed) + size > QUEUE;
        if full || queue.send(text).is_err() {
            self.queued.fetch_sub(size, Ordering::Relaxed);
            self.overflowed.fetch_add(1, Ordering::Relaxed);
            let mut counts = lock(&self.counts);
            counts.waiting -= 1;
            counts.dropped += 1;
        }
    }

    /// Adds what became of its sets.
    pub(super) fn add_counts(&self, to: &mut UserCounts) {
        let counts = *lock(&self.counts);
        to.sets += counts.made;
        to.sets_sent += counts.sent;
        to.sets_refused += counts.refused;
        to.sets_dropped += counts.dropped;
        to.sets_waiting += counts.waiting;
    }

    /// Sends what is left, for a while.
    pub(super) fn finish(&mut self) {
        if self.queue.take().is_none() {
            return;
        }
        let mut ended = self.ended.recv_timeout(PROMPT);
        if ended == Err(RecvTimeoutError::Timeout) {
            (self.say)("gctrace: sending the last sample sets; Ctrl-C leaves them for the next run");
            leave_at_once();
            ended = self.ended.recv_timeout(FINISH);
        }
        match ended {
            Err(RecvTimeoutError::Timeout) => (self.say)(&format!(
                "gctrace: the collector takes too long; what is left waits in {} for the next run",
                self.spool.display()
            )),
            _ => {
                if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
                    (self.say)("gctrace: the sending thread panicked; please report this");
                }
            }
        }
        let overflowed = self.overflowed.load(Ordering::Relaxed);
        if overflowed > 0 {
            (self.say)(&format!(
                "gctrace: {overflowed} sample sets were dropped: they came faster than the disk took them"
            ));
        }
    }
}

/// Lets the next signal end the process: all that is left to do is to send what is on disk already.
fn leave_at_once() {
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        let always = Arc::new(AtomicBool::new(true));
        if let Err(error) = register_conditional_shutdown(signal, 2, always) {
            log::warn!("signal {signal} will be answered late: {error}");
        }
    }
}

/// Whether others can read what is sent there.
fn in_the_clear(url: &str) -> bool {
    let Some(host) = url.strip_prefix("http://") else { return false };
    !["127.", "localhost", "[::1]"].iter().any(|local| host.starts_with(local))
}

/// What came of sending a set.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Outcome {
    /// It is kept, and this is where its recommendation is.
    Accepted(String),
    /// It will never be taken.
    Refused(String),
    /// It may be taken another time.
    Again(String),
}

/// What an answer means. Like the agent, gctrace sends again what is answered with 500; besides what says by itself that
/// it is for now only.
fn meaning(code: u16, body: &str) -> Outcome {
    let body = printable(body.trim()).into_owned();
    match code {
        200..=299 => Outcome::Accepted(body),
        400 => Outcome::Refused(format!("invalid payload ({body})")),
        404 => Outcome::Refused("invalid application token".to_owned()),
        412 => Outcome::Refused(format!("the program is tuned by environment variables already ({body})")),
        426 => Outcome::Refused(format!("an agent of version {body} or later is required")),
        501 => Outcome::Refused(format!("this version of Ruby or Rails is not supported ({body})")),
        429 | 500 | 502..=504 => Outcome::Again(format!("the collector answered {code} ({body})")),
        _ => Outcome::Refused(format!("unexpected answer {code} ({body})")),
    }
}

struct Worker {
    url: String,
    agent: Agent,
    spool: Spool,
    queued: Arc<AtomicUsize>,
    counts: Arc<Mutex<Counts>>,
    /// Whether the server has said that it takes gzip.
    gzip: bool,
    /// Attempts in a row that failed for now.
    failures: u32,
    next: Instant,
    sent: u64,
    refused: u64,
    /// Sets that could not be put on disk.
    unkept: u64,
    say: fn(&str),
}

impl Worker {
    fn run(mut self, queue: &Receiver<String>) {
        let mut open = true;
        loop {
            open = open && self.take(queue);
            if self.spool.len() == 0 {
                if !open {
                    break;
                }
                match queue.recv() {
                    Ok(text) => self.keep(&text),
                    Err(_) => open = false,
                }
                continue;
            }
            let now = Instant::now();
            if now >= self.next || !open {
                // At the end each set has one more chance, and the first one that has to wait ends it.
                if !self.send_front() && !open {
                    break;
                }
            } else {
                match queue.recv_timeout(self.next - now) {
                    Ok(text) => self.keep(&text),
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => open = false,
                }
            }
        }
        let (left, dropped) = (self.spool.len(), self.spool.dropped() + self.unkept);
        let left = match left {
            0 => String::new(),
            left => format!("; {left} wait in {} for the next run", self.spool.dir().display()),
        };
        let dropped = match dropped {
            0 => String::new(),
            dropped => format!("; {dropped} were dropped: too many waited, or the disk did not take them"),
        };
        let line =
            format!("gctrace: {} sample sets were sent, {} refused{left}{dropped}", self.sent, self.refused);
        (self.say)(&line);
    }

    /// Puts what is in the queue on disk; false once nothing more can come.
    fn take(&mut self, queue: &Receiver<String>) -> bool {
        loop {
            match queue.try_recv() {
                Ok(text) => self.keep(&text),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    fn keep(&mut self, text: &str) {
        self.queued.fetch_sub(text.len(), Ordering::Relaxed);
        let dropped = self.spool.dropped();
        let kept = self.spool.push(text);
        self.count_dropped(self.spool.dropped() - dropped + u64::from(kept.is_err()));
        if let Err(error) = kept {
            self.unkept += 1;
            let dir = self.spool.dir().display();
            (self.say)(&format!("gctrace: a sample set is lost: it cannot be put into {dir}: {error}"));
        }
    }

    fn count_dropped(&self, sets: u64) {
        let mut counts = lock(&self.counts);
        counts.waiting -= sets;
        counts.dropped += sets;
    }

    /// Sends the set at the front. False if it has to wait.
    fn send_front(&mut self) -> bool {
        let dropped = self.spool.dropped();
        let front = self.spool.front();
        self.count_dropped(self.spool.dropped() - dropped);
        let Some(bytes) = front else { return true };
        let outcome = match self.post(&bytes) {
            Ok(outcome) => outcome,
            Err(error) => Outcome::Again(error.to_string()),
        };
        match outcome {
            Outcome::Accepted(address) => {
                self.sent += 1;
                lock(&self.counts).sent += 1;
                self.failures = 0;
                (self.say)(&format!("gctrace: a sample set was sent; recommendations: {address}"));
            }
            Outcome::Refused(reason) => {
                self.refused += 1;
                lock(&self.counts).refused += 1;
                self.failures = 0;
                (self.say)(&format!("gctrace: {} refused a sample set: {reason}", self.url));
            }
            Outcome::Again(reason) => {
                let pause = (FIRST_PAUSE * 2_u32.saturating_pow(self.failures.min(16))).min(LAST_PAUSE);
                if self.failures == 0 {
                    (self.say)(&format!("gctrace: {}: {reason}; trying again", self.url));
                }
                self.failures += 1;
                self.next = Instant::now() + pause + jitter(pause);
                return false;
            }
        }
        lock(&self.counts).waiting -= 1;
        self.spool.pop();
        true
    }

    fn post(&mut self, bytes: &[u8]) -> Result<Outcome, ureq::Error> {
        let request = self
            .agent
            .post(&self.url)
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::ACCEPT, "application/json");
        let mut response = if self.gzip {
            let mut body = GzEncoder::new(Vec::new(), Compression::default());
            body.write_all(bytes)?;
            request.header(header::CONTENT_ENCODING, "gzip").send(&body.finish()?)?
        } else {
            request.send(bytes)?
        };
        self.gzip = takes_gzip(response.headers());
        let body = response.body_mut().with_config().limit(MAX_ANSWER).lossy_utf8(true).read_to_string();
        // What is too long to read is too long to show.
        Ok(meaning(response.status().as_u16(), &body.unwrap_or_default()))
    }
}

/// Whether the answer says that gzip is welcome (RFC 7694).
fn takes_gzip(headers: &HeaderMap) -> bool {
    let list = headers.get_all(header::ACCEPT_ENCODING).into_iter().filter_map(|value| value.to_str().ok());
    list.flat_map(|value| value.split(',')).any(|coding| coding.trim().eq_ignore_ascii_case("gzip"))
}

/// Where sets wait if nothing else is said.
pub fn default_spool() -> Option<PathBuf> {
    if rustix::process::geteuid().is_root() {
        return Some(Path::new("/var/lib/gctrace/spool").to_owned());
    }
    std::env::var_os("HOME").map(|home| Path::new(&home).join(".local/state/gctrace/spool"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every code of the protocol is told apart, and only what is for now is sent again.
    #[test]
    fn meanings() {
        assert_eq!(meaning(200, "http://x/configs/1\n"), Outcome::Accepted("http://x/configs/1".to_owned()));
        for code in [500, 502, 503, 504, 429] {
            assert!(matches!(meaning(code, "later"), Outcome::Again(_)), "{code}");
        }
        for (code, word) in [
            (400, "payload (sample 1)"),
            (404, "token"),
            (412, "environment variables already (sample 1)"),
            (426, "version sample 1"),
            (501, "not supported (sample 1)"),
            (302, "unexpected answer 302"),
            (413, "unexpected answer 413"),
        ] {
            let Outcome::Refused(reason) = meaning(code, "sample\u{1b}1".replace('\u{1b}', " ").as_str())
            else {
                panic!("{code} is final");
            };
            assert!(reason.contains(word), "{reason}");
        }
        assert_eq!(meaning(400, "\u{1b}[2J"), Outcome::Refused("invalid payload (\\u{1b}[2J)".to_owned()));
    }

    /// Addresses are taken with and without what the protocol adds, and nothing else is.
    #[test]
    fn addresses() {
        for text in ["http://h:1", "http://h:1/", "http://h:1/ruby", "http://h:1/ruby/"] {
            assert_eq!(Target::url(text).as_deref(), Some("http://h:1"), "{text}");
        }
        for text in ["", "h:1", "ftp://h", "https://", "http:///x"] {
            assert_eq!(Target::url(text), None, "{text}");
        }
        let dir = |url: &str| {
            Target { url: url.into(), tokens: Tokens::default(), spool: "/s".into(), cycles: None }
                .spool_name()
        };
        assert_ne!(dir("http://a/b"), dir("http://a_b"));
        assert!(!dir("http://../..").contains('/'), "one component");
    }
}
