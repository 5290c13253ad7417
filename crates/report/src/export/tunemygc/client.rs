//! Sends sets to a collector, through the upload engine with an on-disk spool as its queue.

use std::{
    io,
    net::IpAddr,
    num::NonZeroU32,
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use gctrace_tunemygc::wire::gzip;
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    flag::register_conditional_shutdown,
};
use ureq::{
    Agent, Timeout,
    http::{HeaderMap, Uri, header},
};

use super::journal::{Draft, Journal};
use super::spool::{Handed, Spool};
use super::tokens::Tokens;
use crate::{
    export::upload::{
        self, Reason, agent,
        engine::{Backlog as _, Counts, Engine, FIRST_PAUSE, Failing, Outcome, Peer, Policy, Receipt},
        shown,
    },
    ledger::UserCounts,
    private_dir::PrivateDir,
    tls,
    words::plural,
};

/// Maximum bytes of sets that wait to be written to disk.
const QUEUE: usize = 64 << 20;
/// Maximum bytes of sets in the spool.
const SPOOL: u64 = 256 << 20;
/// Timeouts of one exchange (in addition to what its body needs) and of establishing its connection.
const TIMEOUT: Duration = Duration::from_secs(30);
const CONNECT: Duration = Duration::from_secs(5);
/// Throughput of the slowest usable link, bytes per second.
const SLOWEST: usize = 16_000;
/// Number of attempts before the next set is tried.
const ATTEMPTS: u32 = 3;
/// Maximum pause between attempts.
const LAST_PAUSE: Duration = Duration::from_mins(2);
/// Time limit for sending what remains when tracing ends. What still remains then is kept on disk for the next run.
const FINISH: Duration = Duration::from_secs(20);
/// Maximum bytes read of a response; a longer one is cut off.
const MAX_ANSWER: u64 = 4096;

/// Where sets are sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Address of the collector, without `/ruby`.
    pub url: String,
    /// Tokens of the applications.
    pub tokens: Tokens,
    /// Directory of the spool.
    pub spool: PathBuf,
    /// A set is sent, and a new one started, after this many cycles of a process.
    pub cycles: Option<NonZeroU32>,
    /// The same after this many units of work.
    pub units: Option<NonZeroU32>,
}

impl Target {
    /// An address without the path of the protocol; `None` if it is not an http:// or https:// address.
    pub fn url(text: &str) -> Option<String> {
        let url = text.trim_end_matches('/');
        upload::address(url.strip_suffix("/ruby").unwrap_or(url))
    }

    /// The subdirectory of the spool for this address: sets for one collector are never sent to another one.
    fn spool_name(&self) -> String {
        let url = shown(&self.url);
        let name: String = url
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() || "-.".contains(c) { c } else { '_' })
            .collect();
        let sum = crc32fast::hash(url.as_bytes());
        format!("{}-{sum:08x}", name.get(..80).unwrap_or(&name))
    }
}

impl Target {
    /// The journal of unfinished sets, in the subdirectory of the spool for this address.
    pub(super) fn journal(&self) -> io::Result<Journal> {
        let dir = PrivateDir::create(&self.spool).and_then(|base| base.child(&self.spool_name()));
        Ok(Journal::new(dir?))
    }
}

/// The tracer's handle to the sending thread.
pub(super) struct Client {
    engine: Engine<Handed>,
    say: fn(&str),
}

impl Client {
    /// Starts the thread. Sets left by an earlier run are sent, too.
    pub(super) fn start(target: &Target, say: fn(&str)) -> Result<Self, (PathBuf, io::Error)> {
        let spool = Spool::open(&target.spool, &target.spool_name(), SPOOL)
            .map_err(|error| (target.spool.clone(), error))?;
        let dir = spool.dir().to_owned();
        if in_the_clear(&target.url) {
            say(&format!(
                "gctrace: {}: the token and sample sets cross the network unencrypted",
                shown(&target.url)
            ));
        }
        let left = spool.len();
        if left > 0 {
            let [wait, them] = if left == 1 { ["waits", "it"] } else { ["wait", "them"] };
            say(&format!(
                "gctrace: {} of earlier runs {wait} in {}; sending {them}, too",
                plural(left as u64, "sample set"),
                dir.display()
            ));
        }
        let policy = Policy {
            name: "TuneMyGC",
            jobs: ["sample set", "sample sets"],
            thread: "gctrace-send",
            capacity: QUEUE,
            failing: Failing::Requeue(ATTEMPTS),
            first_pause: FIRST_PAUSE,
            last_pause: LAST_PAUSE,
            finish: FINISH,
        };
        let engine = Engine::start(policy, spool, Collector::new(&target.url, TIMEOUT), say)
            .map_err(|error| (dir, error))?;
        Ok(Self { engine, say })
    }

    /// Queues a set, with its draft. Never blocks: if the queue is full, the set is dropped and counted.
    pub(super) fn send(&self, text: String, draft: Option<Draft>) {
        let size = text.len();
        self.engine.send(Handed { text, draft }, size);
    }

    /// Adds the counters of its sets.
    pub(super) fn add_counts(&self, to: &mut UserCounts) {
        let Counts { made, sent, partial: _, refused, dropped, empty: _, waiting } = self.engine.counts();
        to.sets.sets += made;
        to.sets.sets_sent += sent;
        to.sets.sets_refused += refused;
        to.sets.sets_dropped += dropped;
        to.sets.sets_waiting += waiting;
    }

    /// Sends what remains, up to a time limit.
    pub(super) fn finish(&self) {
        self.engine.finish(|| {
            (self.say)("gctrace: sending the last sample sets; Ctrl-C leaves them for the next run");
            leave_at_once();
        });
    }
}

/// Lets the next signal end the process: only sets that are on disk already remain to be sent.
fn leave_at_once() {
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        let always = Arc::new(AtomicBool::new(true));
        if let Err(error) = register_conditional_shutdown(signal, 2, always) {
            log::warn!("signal {signal} will be answered late: {error}");
        }
    }
}

/// Whether what is sent there can be read by others.
fn in_the_clear(url: &str) -> bool {
    let Ok(url) = url.parse::<Uri>() else { return true };
    let host = url.host().unwrap_or_default();
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    let local = host.eq_ignore_ascii_case("localhost") || address.is_ok_and(|address| address.is_loopback());
    url.scheme_str() == Some("http") && !local
}

/// The start of the protocol's response to an unknown token.
const UNKNOWN_TOKEN: &str = "invalid application token";

/// Whether a response reports an unknown token, whatever follows.
fn is_unknown_token(body: &str) -> bool {
    let begin = body.trim_start().get(..UNKNOWN_TOKEN.len());
    begin.is_some_and(|begin| begin.eq_ignore_ascii_case(UNKNOWN_TOKEN))
}

/// The meaning of a response from this address. Like the protocol's agent, gctrace retries after a 500; it also does
/// so after statuses that are temporary by definition.
fn meaning(url: &str, code: u16, body: &str, after: Option<Duration>) -> Outcome<Receipt> {
    let refused = |what: &str| Outcome::Refused(Reason::quoting(what, body));
    match code {
        200..=299 => {
            let address = if body.trim().is_empty() {
                String::new()
            } else {
                format!("; recommendations: {}", Reason::new(body))
            };
            Outcome::Accepted(Receipt::Whole(Some(format!("a sample set was accepted{address}"))))
        }
        400 => refused("invalid payload"),
        404 if is_unknown_token(body) => Outcome::Refused(Reason::new(UNKNOWN_TOKEN)),
        // Possibly from another server, or from a path without a collector: this says nothing about the set, which is kept
        // for the right one.
        404 => {
            let why = format!("{url} answered 404 without naming the token: check the URL");
            Outcome::Again(Reason::quoting(&why, body), after)
        }
        // The set was read, and is not sent again.
        412 => {
            let why = "no recommendation: the program is already tuned by environment variables";
            let line = format!("a sample set was accepted; {}", Reason::quoting(why, body));
            Outcome::Accepted(Receipt::Whole(Some(line)))
        }
        426 => refused("a later version of the agent is required"),
        501 => refused("this version of Ruby or Rails is not supported"),
        408 | 429 | 500 | 502..=504 => {
            Outcome::Again(Reason::quoting(&format!("answered {code}"), body), after)
        }
        _ => refused(&format!("unexpected answer {code}")),
    }
}

/// The collector.
struct Collector {
    address: String,
    /// Its address as shown to the user.
    url: String,
    agent: Agent,
    /// Timeout of an exchange, in addition to what its body needs.
    timeout: Duration,
    /// Whether the last response said that gzip is accepted.
    gzip: bool,
}

impl Peer<Spool> for Collector {
    fn send(&mut self, set: Vec<u8>) -> Outcome<Receipt> {
        self.post(&set).unwrap_or_else(|error| {
            let reason = Reason::new(&tls::failed(&self.address, &error));
            // Other sets may still be accepted: one that is too large for its link, or for a proxy, does not block them.
            if was_connected(&error) { Outcome::Again(reason, None) } else { Outcome::Unreachable(reason) }
        })
    }

    fn url(&self) -> &str {
        &self.url
    }
}

impl Collector {
    fn new(url: &str, timeout: Duration) -> Self {
        let address = format!("{url}/ruby");
        Self { url: shown(&address), address, agent: agent(timeout, CONNECT), timeout, gzip: false }
    }

    fn post(&mut self, bytes: &[u8]) -> Result<Outcome<Receipt>, ureq::Error> {
        let packed = self.gzip;
        let mut answer = self.exchange(bytes, packed)?;
        // A proxy may limit the size. It does not know what the collector accepts, and the set is refused otherwise.
        if answer.code == 413 && !packed {
            answer = self.exchange(bytes, true)?;
        } else if packed && !answer.accepts_gzip && matches!(answer.code, 400 | 415 | 500) {
            // The collector may be another one than the one that accepted gzip.
            answer = self.exchange(bytes, false)?;
        }
        let Answer { code, body, after, .. } = answer;
        Ok(meaning(&self.url, code, &body, after))
    }

    /// Sends a set once, compressed with gzip if `packed`.
    fn exchange(&mut self, bytes: &[u8], packed: bool) -> Result<Answer, ureq::Error> {
        let packed = packed.then(|| gzip::compress(bytes));
        let body = packed.as_deref().unwrap_or(bytes);
        let request = self
            .agent
            .post(&self.address)
            .config()
            .timeout_resolve(Some(CONNECT))
            .timeout_global(Some(self.timeout + time_for(body.len())))
            .build()
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::ACCEPT, "application/json");
        let request =
            if packed.is_some() { request.header(header::CONTENT_ENCODING, "gzip") } else { request };
        let mut response = request.send(body)?;
        let code = response.status().as_u16();
        let body = upload::read_answer(response.body_mut(), MAX_ANSWER);
        let (body, headers) = (String::from_utf8_lossy(&body), response.headers());
        // Other answers without the header may be those of a proxy, such as 502 while the collector starts.
        let of_collector = matches!(code, 200..=299 | 412) || (code == 404 && is_unknown_token(&body));
        if of_collector || headers.contains_key(header::ACCEPT_ENCODING) {
            self.gzip = takes_gzip(headers);
        }
        let after = upload::retry_after(headers);
        let accepts_gzip = takes_gzip(headers);
        Ok(Answer { code, body: body.into_owned(), after, accepts_gzip })
    }
}

/// A response.
struct Answer {
    code: u16,
    body: String,
    /// The minimum delay before a retry, if one is given.
    after: Option<Duration>,
    /// Whether its headers say that gzip is accepted.
    accepts_gzip: bool,
}

/// Additional time for a body of this size.
fn time_for(size: usize) -> Duration {
    Duration::from_secs((size / SLOWEST) as u64)
}

/// Whether an exchange failed after the peer was connected.
fn was_connected(error: &ureq::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    match error {
        ureq::Error::Timeout(of) => !matches!(of, Timeout::Resolve | Timeout::Connect),
        ureq::Error::Io(error) => {
            matches!(error.kind(), BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof)
        }
        _ => false,
    }
}

/// Whether the response says that gzip is accepted (RFC 7694).
fn takes_gzip(headers: &HeaderMap) -> bool {
    let list = headers.get_all(header::ACCEPT_ENCODING).into_iter().filter_map(|value| value.to_str().ok());
    list.flat_map(|value| value.split(',')).any(|coding| coding.trim().eq_ignore_ascii_case("gzip"))
}

/// The default spool directory.
pub fn default_spool() -> Option<PathBuf> {
    if rustix::process::geteuid().is_root() {
        return Some(Path::new("/var/lib/gctrace/spool").to_owned());
    }
    std::env::var_os("HOME").map(|home| Path::new(&home).join(".local/state/gctrace/spool"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every status of the protocol has its meaning, and only temporary failures are retried.
    #[test]
    fn meanings() {
        let meaning = |code, body| meaning("http://h/ruby", code, body, None);
        let Outcome::Accepted(Receipt::Whole(Some(line))) = meaning(200, "http://x/configs/1\n") else {
            panic!("200 is acceptance")
        };
        assert_eq!(line, "a sample set was accepted; recommendations: http://x/configs/1");
        let Outcome::Accepted(Receipt::Whole(Some(line))) = meaning(412, "{\"RUBY_GC_MALLOC_LIMIT\":1}")
        else {
            panic!("412 is an answer to a set that was read")
        };
        assert!(
            line.ends_with("already tuned by environment variables ({\"RUBY_GC_MALLOC_LIMIT\":1})"),
            "{line}"
        );
        for code in [500, 502, 503, 504, 429, 408] {
            assert!(matches!(meaning(code, "later"), Outcome::Again(..)), "{code}");
        }
        for (code, word) in [
            (400, "payload (sample 1)"),
            (426, "later version of the agent is required (sample 1)"),
            (501, "not supported (sample 1)"),
            (302, "unexpected answer 302"),
            (413, "unexpected answer 413"),
        ] {
            let Outcome::Refused(reason) = meaning(code, "sample 1") else { panic!("{code} is final") };
            assert!(reason.to_string().contains(word), "{reason}");
        }
        let of_protocol = "Invalid application token. Contact us at tunemygc@bearmetal.eu to resolve";
        for body in ["Invalid application token\n", of_protocol] {
            let Outcome::Refused(reason) = meaning(404, body) else { panic!("404 of a collector is final") };
            assert_eq!(reason.to_string(), "invalid application token");
        }
        for body in ["", "token", "Invalid application tokeé"] {
            assert!(matches!(meaning(404, body), Outcome::Again(..)), "{body}");
        }
        let Outcome::Again(reason, _) = meaning(404, "<h1>nginx</h1>\u{1b}[2J") else {
            panic!("404 of another server says nothing of the set")
        };
        let expected =
            "http://h/ruby answered 404 without naming the token: check the URL (<h1>nginx</h1>\\u{1b}[2J)";
        assert_eq!(reason.to_string(), expected);
        let Outcome::Refused(reason) = meaning(400, "\u{1b}[2J") else { panic!("400 is final") };
        assert_eq!(reason.to_string(), "invalid payload (\\u{1b}[2J)");
    }

    /// Addresses are accepted with and without what the protocol adds; anything else is refused.
    #[test]
    fn addresses() {
        for text in ["http://h:1", "http://h:1/", "http://h:1/ruby", "http://h:1/ruby/"] {
            assert_eq!(Target::url(text).as_deref(), Some("http://h:1"), "{text}");
        }
        for text in ["", "h:1", "ftp://h", "https://", "http:///x"] {
            assert_eq!(Target::url(text), None, "{text}");
        }
        let dir = |url: &str| {
            Target {
                url: url.into(),
                tokens: Tokens::default(),
                spool: "/s".into(),
                cycles: None,
                units: None,
            }
            .spool_name()
        };
        assert_ne!(dir("http://a/b"), dir("http://a_b"));
        assert!(!dir("http://../..").contains('/'), "one component");
        assert_eq!(dir("http://u:secret@h"), dir("http://h"));
    }

    /// Only an address of this machine counts as not sent in the clear, whatever other addresses begin with.
    #[test]
    fn clear() {
        for local in [
            "http://127.0.0.1:1",
            "http://127.9.9.9",
            "http://LOCALHOST/a",
            "http://[::1]:1",
            "http://u:p@localhost",
        ] {
            assert!(!in_the_clear(local), "{local}");
        }
        for far in [
            "http://127.evil.example",
            "http://localhost@evil",
            "http://localhost.evil",
            "http://10.0.0.1",
            "http://h",
        ] {
            assert!(in_the_clear(far), "{far}");
        }
        assert!(!in_the_clear("https://h"));
    }

    /// Sets are compressed from the first answer of the collector on that accepts it, whatever proxies answer meanwhile, and once more where a proxy
    /// finds a set too large.
    #[test]
    fn compressed() {
        const TAKES: &str = "Accept-Encoding: gzip\r\n";
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let mut collector = Collector::new(&url, TIMEOUT);
        // The answers to a set; returns whether its requests were compressed, and whether it was accepted.
        let mut send = |answers: &[(u16, &str)]| {
            std::thread::scope(|scope| {
                let server = scope.spawn(|| {
                    let mut packed = Vec::new();
                    for (code, further) in answers {
                        let (mut peer, _) = listener.accept().unwrap();
                        let (mut head, mut byte) = (Vec::new(), [0]);
                        while !head.ends_with(b"\r\n\r\n") {
                            io::Read::read_exact(&mut peer, &mut byte).unwrap();
                            head.push(byte[0]);
                        }
                        let head = String::from_utf8(head).unwrap().to_ascii_lowercase();
                        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
                        let mut body = vec![0; length.unwrap().parse().unwrap()];
                        io::Read::read_exact(&mut peer, &mut body).unwrap();
                        packed.push(head.contains("content-encoding: gzip"));
                        let answer = format!(
                            "HTTP/1.1 {code} x\r\nConnection: close\r\nContent-Length: 0\r\n{further}\r\n"
                        );
                        io::Write::write_all(&mut peer, answer.as_bytes()).unwrap();
                    }
                    packed
                });
                let accepted = matches!(collector.send(b"[]".to_vec()), Outcome::Accepted(_));
                (server.join().unwrap(), accepted)
            })
        };
        assert_eq!(send(&[(502, "")]), (vec![false], false));
        assert_eq!(send(&[(413, ""), (200, TAKES)]), (vec![false, true], true));
        assert_eq!(send(&[(502, "")]), (vec![true], false));
        assert_eq!(send(&[(404, "")]), (vec![true], false), "of a proxy");
        assert_eq!(send(&[(413, "")]), (vec![true], false), "it cannot become smaller");
        assert_eq!(send(&[(200, "")]), (vec![true], true), "it accepts it no longer");
        assert_eq!(send(&[(500, TAKES)]), (vec![false], false));
        assert_eq!(send(&[(500, ""), (500, "")]), (vec![true, false], false));
        assert_eq!(send(&[(400, ""), (200, "")]), (vec![true, false], true), "another collector");
        assert_eq!(send(&[(200, TAKES)]), (vec![false], true));
        assert_eq!(send(&[(412, "")]), (vec![true], true));
        assert_eq!(send(&[(413, ""), (413, "")]), (vec![false, true], false));
    }

    /// A reachable peer that does not accept a set in time does not count as unreachable: other sets pass.
    #[test]
    fn slow() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let send = |url: &str| Collector::new(url, Duration::from_millis(100)).send(b"[]".to_vec());
        assert!(matches!(send(&url), Outcome::Again(..)), "it does not answer");
        let resets = std::thread::spawn(move || {
            // The previous connection, and the current one.
            for _ in 0..2 {
                drop(listener.accept());
            }
        });
        assert!(matches!(send(&url), Outcome::Again(..)), "it closes the connection");
        resets.join().unwrap();
        assert!(matches!(send(&url), Outcome::Unreachable(_)), "it is away");
        assert_eq!(time_for(50_000_000), Duration::from_secs(3125));
        let collector = Collector::new("http://u:secret@h", TIMEOUT);
        assert_eq!(
            (collector.url(), collector.address.as_str()),
            ("http://h/ruby", "http://u:secret@h/ruby")
        );
    }
}
