//! Pushing to a server while tracing continues: payloads for the [`engine`], over HTTP or gRPC. Payloads that exceed
//! the queue, or are not accepted in time, are dropped and counted.

use std::{io, time::Duration};

use bytes::Bytes;
use ureq::http::{HeaderMap, HeaderName, HeaderValue};

use crate::{ledger::UserCounts, words::percent_decoded};

mod address;
pub(super) mod engine;
mod grpc;
mod http;
mod memory;
mod notices;

pub use address::{Address, Protocol, shown, web as address};
pub(super) use http::{agent, gzip, read_answer, retry_after};
pub(super) use notices::Reason;

pub(super) use engine::Receipt;
use engine::{Counts, Engine, FIRST_PAUSE, Failing, Outcome, Peer, Policy};
use memory::{Item, Memory};

/// Maximum number of queued payloads.
const QUEUE: usize = 1024;
/// Timeouts of one exchange, and of establishing its connection.
const TIMEOUT: Duration = Duration::from_secs(20);
const CONNECT: Duration = Duration::from_secs(5);
/// Maximum pause, whatever the server asks for.
const LAST_PAUSE: Duration = Duration::from_secs(30);
/// Maximum number of attempts for one payload.
const ATTEMPTS: u32 = 6;
/// Time limit for sending what remains when tracing ends.
const FINISH: Duration = Duration::from_secs(10);

/// Something to send.
pub(super) trait Payload: Send {
    /// The part after the server's address: for HTTP a path, for gRPC a method.
    fn path(&self, protocol: Protocol) -> &'static str;
    /// Its `Content-Type` for HTTP.
    fn content_type(&self) -> &'static str;
    /// Its bytes; empty if there is nothing to send after all.
    fn encode(&self) -> Vec<u8>;
    /// Whether servers usually reject it as too large: it is split before it is sent. Called after [`Payload::encode`].
    fn is_too_large(&self) -> bool {
        false
    }
    /// The payload as two smaller ones, if it can be split: for servers that reject it as too large. Called after [`Payload::encode`].
    fn halves(&self) -> Option<[Box<dyn Payload>; 2]> {
        None
    }
    /// What the server says of a payload that it accepted.
    fn receipt(&self, _answer: &[u8]) -> Receipt {
        Receipt::Whole(None)
    }
}

/// The tracer's handle to a server that is pushed to.
pub(super) struct Uploader(Engine<Box<dyn Payload>>);

impl Uploader {
    /// Starts the thread for a server. `name` is its name in messages.
    pub(super) fn start(
        name: &'static str,
        address: &Address,
        headers: HeaderMap,
        say: fn(&str),
    ) -> io::Result<Self> {
        let policy = Policy {
            name,
            jobs: ["request", "requests"],
            thread: "gctrace-push",
            capacity: QUEUE,
            failing: Failing::Drop(ATTEMPTS),
            first_pause: FIRST_PAUSE,
            last_pause: LAST_PAUSE,
            finish: FINISH,
        };
        let (transport, prepare): (_, fn(Vec<u8>) -> Bytes) = match address.protocol {
            Protocol::Http => {
                (Transport::Http(http::Server::new(&address.url, headers)), |body| gzip(&body).into())
            }
            // gRPC compresses each message.
            Protocol::Grpc => (Transport::Grpc(grpc::Server::new(&address.url, headers)?), Bytes::from),
        };
        let server = Server { url: address.shown(), transport };
        Engine::start(policy, Memory::new(prepare), server, say).map(Self)
    }

    /// Queues a payload. Never blocks.
    pub(super) fn send(&self, payload: Box<dyn Payload>) {
        self.0.send(payload, 1);
    }

    /// Counts a payload that was dropped before it was made.
    pub(super) fn give_up(&self) {
        self.0.give_up();
    }

    /// Adds the counters of its payloads.
    pub(super) fn add_counts(&self, to: &mut UserCounts) {
        let Counts { made, sent, partial, refused, dropped, empty, waiting } = self.0.counts();
        to.uploads.uploads += made;
        to.uploads.uploads_sent += sent;
        to.uploads.uploads_partial += partial;
        to.uploads.uploads_refused += refused;
        to.uploads.uploads_dropped += dropped;
        to.uploads.uploads_empty += empty;
        to.uploads.uploads_waiting += waiting;
    }

    /// Accepts no more payloads, and starts sending what remains.
    pub(super) fn close(&self) {
        self.0.close();
    }

    /// Sends what remains, up to a time limit, and reports the outcome of all payloads.
    pub(super) fn finish(&self) {
        self.0.finish(|| {});
    }
}

/// A server.
struct Server {
    /// Its address as shown to the user.
    url: String,
    transport: Transport,
}

/// How requests are sent.
enum Transport {
    Http(http::Server),
    Grpc(grpc::Server),
}

impl Peer<Memory> for Server {
    fn send(&mut self, Item { payload, body }: Item<'_>) -> Outcome<Receipt> {
        let outcome = match &self.transport {
            Transport::Http(server) => {
                server.post(payload.path(Protocol::Http), payload.content_type(), body)
            }
            Transport::Grpc(server) => server.call(payload.path(Protocol::Grpc), body),
        };
        outcome.map(|answer| payload.receipt(&answer))
    }

    fn url(&self) -> &str {
        &self.url
    }
}

/// Additional headers from an environment variable: `Name=value,Name=value`, values percent-encoded (OpenTelemetry's
/// specification of exporters). An error names what is not a header; it never quotes values, which may be secrets.
pub(crate) fn headers(variable: &str) -> Result<HeaderMap, String> {
    let list = std::env::var(variable).unwrap_or_default();
    let mut headers = HeaderMap::new();
    for pair in list.split(',').filter(|pair| !pair.trim().is_empty()) {
        let (name, value) = pair.split_once('=').ok_or("an entry without `=`")?;
        let name = name.trim();
        let key = HeaderName::try_from(name).map_err(|_| format!("`{name}` is not a header name"))?;
        let value = HeaderValue::try_from(percent_decoded(value.trim()));
        let mut value = value.map_err(|_| format!("the value of `{name}` cannot be sent"))?;
        value.set_sensitive(true);
        headers.append(key, value);
    }
    Ok(headers)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

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

        fn receipt(&self, _: &[u8]) -> Receipt {
            Receipt::Partial(Reason::quoting("1 points", "\x1b[2J\u{202e}nope"))
        }
    }

    /// A server that rejects a part of each request is quoted once, and its text cannot control the terminal.
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
                // The body is a gzip file of one byte, so it arrives together with the headers.
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
        let address = Address { url: url.clone(), protocol: Protocol::Http };
        let say = |line: &str| SAID.lock().unwrap().push(line.to_owned());
        let uploader = Uploader::start("test", &address, HeaderMap::new(), say).unwrap();
        for _ in 0..3 {
            uploader.send(Box::new(Rejected));
        }
        uploader.finish();
        let counts = uploader.0.counts();
        assert_eq!((counts.sent, counts.partial), (3, 3), "{counts:?}");
        let said = SAID.lock().unwrap();
        let quoted: Vec<&String> = said.iter().filter(|line| line.contains("nope")).collect();
        let text = format!(
            "gctrace: test: {url} rejected part of a request: 1 points (\\u{{1b}}[2J\\u{{202e}}nope)"
        );
        assert_eq!(quoted, [&text, &format!("{text} [2 more times]")], "{said:?}");
    }

    /// Without a server, queueing does not block, the queue is bounded, and every payload is counted.
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
        let before = uploader.0.counts();
        assert!(before.dropped >= QUEUE as u64 / 2 && before.waiting <= QUEUE as u64 + 1, "{before:?}");
        uploader.finish();
        let counts = uploader.0.counts();
        assert_eq!((counts.waiting, counts.sent), (0, 0));
        assert_eq!(counts.made, counts.dropped + counts.refused, "{counts:?}");
    }
}
