//! Pushing to a server while tracing goes on. Tracing hands a payload over and never waits: a thread encodes it, sends it, and tries
//! again. What does not fit into the queue, or is not taken in time, is dropped and counted.

use std::{
    cell::{Cell, RefCell},
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, channel, sync_channel},
    },
    thread::JoinHandle,
    time::Duration,
};

use bytes::Bytes;
use gctrace_tunemygc::printable::printable_part;
use ureq::http::{HeaderMap, HeaderName, HeaderValue};

use crate::{host::origin, ledger::UserCounts};

mod address;
mod grpc;
mod http;

pub(crate) use address::{Address, Protocol, web as address};
pub(super) use http::agent;

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
/// How often a pause looks whether tracing has ended.
const LOOK: Duration = Duration::from_millis(50);

/// Something to send.
pub(super) trait Payload: Send {
    /// What follows the server's address: of HTTP a path, of gRPC a method.
    fn path(&self, protocol: Protocol) -> &'static str;
    /// Its `Content-Type` where it is sent over HTTP.
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
    /// What became of all, once nothing more is waited for.
    last: Cell<Option<Counts>>,
    say: fn(&str),
}

fn lock(counts: &Mutex<Counts>) -> MutexGuard<'_, Counts> {
    counts.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Uploader {
    /// Starts the thread for a server. `name` is how it is called in messages.
    pub(super) fn start(
        name: &'static str,
        address: &Address,
        headers: HeaderMap,
        say: fn(&str),
    ) -> io::Result<Self> {
        let (queue, payloads) = sync_channel(QUEUE);
        let (alive, ended) = channel();
        let counts = Arc::new(Mutex::new(Counts::default()));
        let ending = Arc::new(AtomicBool::new(false));
        let worker = Worker {
            name,
            url: address.url.clone(),
            server: match address.protocol {
                Protocol::Http => Server::Http(http::Server::new(&address.url, headers)),
                Protocol::Grpc => Server::Grpc(grpc::Server::new(&address.url, headers)?),
            },
            counts: Arc::clone(&counts),
            ending: Arc::clone(&ending),
            complained: false,
            told_partly: false,
            say,
        };
        let thread = std::thread::Builder::new().name("gctrace-push".to_owned()).spawn(move || {
            worker.run(&payloads);
            drop(alive);
        })?;
        let (queue, thread) = (RefCell::new(Some(queue)), RefCell::new(Some(thread)));
        Ok(Self { name, queue, counts, ending, ended, thread, last: Cell::new(None), say })
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
        let counts = self.last.get().unwrap_or_else(|| *lock(&self.counts));
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
        let counts = *lock(&self.counts);
        let Counts { sent, partly, refused, dropped, waiting, .. } = counts;
        self.last.set(Some(Counts { dropped: dropped + waiting, waiting: 0, ..counts }));
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
    server: Server,
    counts: Arc<Mutex<Counts>>,
    ending: Arc<AtomicBool>,
    /// Whether the trouble that there is has been told.
    complained: bool,
    /// Whether it has been told that the server rejects parts of requests: it may do so with each of them.
    told_partly: bool,
    say: fn(&str),
}

/// How requests get to a server.
enum Server {
    Http(http::Server),
    Grpc(grpc::Server),
}

impl Server {
    /// A payload's bytes as they are sent, however often.
    fn prepare(&self, body: Vec<u8>) -> Bytes {
        match self {
            Self::Http(_) => http::gzip(&body).into(),
            // Compressed by message.
            Self::Grpc(_) => body.into(),
        }
    }

    fn post(&self, payload: &dyn Payload, body: &Bytes) -> Outcome {
        match self {
            Self::Http(server) => server.post(payload.path(Protocol::Http), payload.content_type(), body),
            Self::Grpc(server) => server.call(payload.path(Protocol::Grpc), body),
        }
    }
}

/// What came of an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Outcome {
    Accepted(Bytes),
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
        let body = self.server.prepare(body);
        let (mut pause, mut last) = (FIRST_PAUSE, false);
        for attempt in 1.. {
            let (reason, after) = match self.server.post(payload, &body) {
                Outcome::Accepted(answer) => {
                    self.complained = false;
                    let rejected = payload.rejected(&answer);
                    if let Some(why) = rejected.as_ref().filter(|_| !self.told_partly) {
                        self.told_partly = true;
                        let why = printable(why);
                        (self.say)(&format!(
                            "gctrace: {}: {} rejected part of a request: {why} (said once; the last line has the count)",
                            self.name, self.url
                        ));
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
}

/// What a server said, fit for a line on a terminal.
fn printable(text: &str) -> String {
    printable_part(text.trim(), 200)
}

/// Up to a quarter of a pause, so that hosts that lost their server together do not come back together.
pub(super) fn jitter(pause: Duration) -> Duration {
    let nanos =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().subsec_nanos();
    pause.mul_f64(f64::from(nanos % 1000) / 4000.0)
}

/// Further headers from an environment variable: `Name=value,Name=value`, values percent-encoded (OpenTelemetry's specification
/// of exporters). An error is what is no header; values are not repeated, they may be secrets.
pub(crate) fn headers(variable: &str) -> Result<HeaderMap, String> {
    let list = std::env::var(variable).unwrap_or_default();
    let mut headers = HeaderMap::new();
    for pair in list.split(',').filter(|pair| !pair.trim().is_empty()) {
        let (name, value) = pair.split_once('=').ok_or("an entry without `=`")?;
        let name = name.trim();
        let key = HeaderName::try_from(name).map_err(|_| format!("`{name}` is no name of a header"))?;
        let value = HeaderValue::try_from(origin::decoded(value.trim()));
        let mut value = value.map_err(|_| format!("what `{name}` is set to cannot be sent"))?;
        value.set_sensitive(true);
        headers.append(key, value);
    }
    Ok(headers)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Text(&'static [u8]);

    impl Payload for Text {
        fn path(&self, _: Protocol) -> &'static str {
            "/x"
        }

        fn content_type(&self) -> &'static str {
            "text/plain"
        }

        fn encode(&self) -> Vec<u8> {
            self.0.to_vec()
        }
    }

    struct Rejected;

    impl Payload for Rejected {
        fn path(&self, _: Protocol) -> &'static str {
            "/x"
        }

        fn content_type(&self) -> &'static str {
            "text/plain"
        }

        fn encode(&self) -> Vec<u8> {
            vec![b'x']
        }

        fn rejected(&self, _: &[u8]) -> Option<String> {
            Some("1 points: \x1b[2J\u{202e}nope".to_owned())
        }
    }

    /// A server that rejects a part of each request is quoted once, and nothing that it says controls the terminal.
    #[test]
    fn rejected_in_part() {
        static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let mut read = [0; 4096];
                let mut request = Vec::new();
                // The body is a gzip file of one byte: it fits into what comes first.
                while !request.windows(4).any(|end| end == b"\r\n\r\n") {
                    let n = io::Read::read(&mut stream, &mut read).unwrap();
                    request.extend_from_slice(&read[..n]);
                }
                io::Write::write_all(
                    &mut stream,
                    b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx",
                )
                .unwrap();
            }
        });
        let address = Address { url, protocol: Protocol::Http };
        let say = |line: &str| SAID.lock().unwrap().push(line.to_owned());
        let uploader = Uploader::start("test", &address, HeaderMap::new(), say).unwrap();
        for _ in 0..3 {
            uploader.send(Box::new(Rejected));
        }
        uploader.finish();
        let counts = uploader.last.get().unwrap();
        assert_eq!((counts.sent, counts.partly), (3, 3), "{counts:?}");
        let said = SAID.lock().unwrap();
        let quoted: Vec<&String> = said.iter().filter(|line| line.contains("nope")).collect();
        assert_eq!(quoted.len(), 1, "{said:?}");
        assert!(quoted[0].contains("1 points: \\u{1b}[2J\\u{202e}nope"), "{quoted:?}");
    }

    /// With nobody there, handing over does not wait, the queue has its bound, and every payload is accounted for.
    #[test]
    fn bounded() {
        for protocol in [Protocol::Http, Protocol::Grpc] {
            bounded_over(protocol);
        }
    }

    fn bounded_over(protocol: Protocol) {
        let nobody = Address { url: "http://127.0.0.1:1".to_owned(), protocol };
        let uploader = Uploader::start("test", &nobody, HeaderMap::new(), |_| {}).unwrap();
        let began = std::time::Instant::now();
        for _ in 0..2 * QUEUE {
            uploader.send(Box::new(Text(b"x")));
        }
        uploader.send(Box::new(Text(b"")));
        assert!(began.elapsed() < Duration::from_secs(1));
        let before = *lock(&uploader.counts);
        assert!(before.dropped >= QUEUE as u64 / 2 && before.waiting <= QUEUE as u64 + 1, "{before:?}");
        uploader.finish();
        let counts = uploader.last.get().unwrap();
        assert_eq!((counts.waiting, counts.sent), (0, 0));
        assert_eq!(counts.made, counts.dropped + counts.refused, "{counts:?}");
    }
}
