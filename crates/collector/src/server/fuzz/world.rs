//! A server in memory, and clients that talk to it.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, mpsc},
    time::Duration,
};

use proptest::{
    prelude::*,
    test_runner::{Config, RngSeed, TestRunner},
};
use sha2::{Digest as _, Sha256};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex},
    runtime::Runtime,
    sync::{Notify, Semaphore, watch},
    task::yield_now,
    time::timeout,
};

use super::{
    super::{
        Options, Shared, advice::Sums, body::Memory, failures::Failures, listen, metrics::Metrics,
        unread::Unread,
    },
    requests::{gzip, request},
};
use crate::store::{
    self, App, AppInfo, Environment, Given, Group, Inserted, NewApp, NewSet, Numbered, Period, Quota, Rights,
    SetId, Slot, Store, StoreError, Token, TokenHash, Totals,
};
use crate::tune::Evidence;

const EXAMPLE: &str = include_str!("../../../../../tests/fixtures/tunemygc_seed.json");
pub(super) const TOKEN: &str = "09dddb3e2e9d5d16ec093cd313f4ff80";
pub(super) const WORKERS: usize = 2;
const URL: &str = "http://collector";
/// Longer than any timeout of the server. The clock does not advance while the server works.
const PATIENCE: Duration = Duration::from_hours(1);

/// The only two temporary failures: those that are not the sender's mistake.
const PASSING: [&str; 2] = [
    "payload: did not arrive in time; send it again",
    "too many large payloads at a time; send it again later",
];

/// A server with one application, and the one set that it may store.
pub(super) struct World {
    pub(super) shared: Arc<Shared>,
    units: usize,
    /// Kept alive: the server stops when it is dropped.
    _stop: watch::Sender<()>,
    stopped: watch::Receiver<()>,
    pub(super) set: &'static [u8],
    /// The body of an answer with code 200.
    address: String,
    /// Number of answers by code.
    seen: Mutex<BTreeMap<u16, u64>>,
    _dir: tempfile::TempDir,
}

/// What a client does when it has sent everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Then {
    /// It reads until the server closes the connection.
    Wait,
    /// It closes its side of the connection, and reads.
    HalfClose,
    /// It disconnects.
    Leave,
}

impl World {
    pub(super) fn new(units: usize, wrap: impl FnOnce(Box<dyn Store>) -> Box<dyn Store>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = format!("sqlite:{}", dir.path().join("sets.db").display());
        let options = Options {
            listen: ([127, 0, 0, 1], 0).into(),
            store: store.clone(),
            tls: None,
            public_url: Some(URL.to_owned()),
            registration: None,
            quota: Quota::NONE,
            keep: None,
            per_address: None,
            min_agent: "1.0.15".to_owned(),
        };
        let store = store::open(&store).unwrap();
        let app = NewApp { name: "shop", email: "me@example.com", parent: None, created: 0.0 };
        store.register(&app, TokenHash::of(TOKEN), Rights::Both).unwrap();
        let shared = Arc::new(Shared {
            store: wrap(store),
            options,
            metrics: Metrics::default(),
            failures: Failures::default(),
            sums: Sums::default(),
            memory: Memory::new(units, units),
            unread: Unread::default(),
            workers: Arc::new(Semaphore::new(WORKERS)),
            large: Arc::new(Semaphore::new(1)),
            pages: Semaphore::new(1),
        });
        let set = EXAMPLE.trim_end().as_bytes();
        let address = format!("{URL}/configs/{}", SetId::of(&Sha256::digest(set).into()).as_str());
        let (stop, stopped) = watch::channel(());
        Self { shared, units, _stop: stop, stopped, set, address, seen: Mutex::default(), _dir: dir }
    }

    pub(super) fn serve(&self, stream: DuplexStream) -> impl Future<Output = bool> {
        let (shared, stopped) = (Arc::clone(&self.shared), self.stopped.clone());
        async move { listen::connection(&shared, stream, "http", stopped).await }
    }

    /// Sends these bytes on one connection, in pieces of these sizes; returns what was received.
    pub(super) async fn talk(&self, sent: &[u8], pieces: &[usize], buffer: usize, then: Then) -> Vec<u8> {
        let (ours, theirs) = duplex(buffer);
        let client = async move {
            let (mut reader, mut writer) = tokio::io::split(ours);
            let write = async move {
                let (mut left, mut sizes) = (sent, pieces.iter().cycle());
                while !left.is_empty() {
                    let size = sizes.next().map_or(left.len(), |size| (*size).clamp(1, left.len()));
                    // The server may have closed the connection.
                    if writer.write_all(&left[..size]).await.is_err() {
                        break;
                    }
                    left = &left[size..];
                    yield_now().await;
                }
                if then == Then::HalfClose {
                    let _closed = writer.shutdown().await;
                }
                // Dropping both halves closes the connection.
                writer
            };
            let mut received = Vec::new();
            if then == Then::Leave {
                drop(write.await);
            } else {
                let (_writer, read) = tokio::join!(write, reader.read_to_end(&mut received));
                read.expect("pipes in memory do not fail");
            }
            received
        };
        let (_, received) = tokio::join!(self.serve(theirs), client);
        received
    }

    /// Waits until all resources of requests are released, including those of abandoned requests.
    pub(super) async fn given_back(&self) {
        let Shared { memory, workers, large, .. } = &*self.shared;
        for (what, semaphore, all) in [
            ("memory", &*memory.small, self.units),
            ("memory for large bodies", &*memory.large, self.units),
            ("workers", workers, WORKERS),
            ("large", large, 1),
        ] {
            let all_of_it = timeout(PATIENCE, semaphore.acquire_many(all as u32)).await;
            assert!(all_of_it.is_ok(), "{what}: {} of {all} are there", semaphore.available_permits());
            drop(all_of_it);
            assert_eq!(semaphore.available_permits(), all, "{what}");
        }
    }

    /// Asserts that all these codes occurred, and that the server works and has stored only the one good set.
    pub(super) async fn still_works(&self, seen: &[u16]) {
        let answered = self.seen.lock().unwrap().clone();
        assert!(seen.iter().all(|code| answered.contains_key(code)), "{seen:?} are not all in {answered:?}");
        self.given_back().await;
        let received = self.talk(&request("", &self.set_as(false)), &[], 1 << 16, Then::Wait).await;
        assert_eq!(self.judged(&received, Then::Wait), [200]);
        self.given_back().await;
        assert_eq!(self.shared.store.totals().unwrap(), Totals { apps: 1, sets: 1, samples: 10 });
    }

    pub(super) fn set_as(&self, gzipped: bool) -> Vec<u8> {
        if gzipped { gzip(self.set) } else { self.set.to_vec() }
    }

    /// The codes of the answers. Asserts that the answers are complete, that nothing else was received, and that each is one that the server
    /// may give: a 200 means that exactly the good set is stored, and a 500 that the same request may succeed another time.
    pub(super) fn judged(&self, received: &[u8], then: Then) -> Vec<u16> {
        let judge = |(code, text): (u16, String)| {
            match code {
                200 => assert_eq!(text, self.address),
                500 => assert!(PASSING.contains(&text.as_str()), "{text}"),
                _ => assert!([400, 404, 405, 414, 426, 431, 501].contains(&code), "{code} {text}"),
            }
            *self.seen.lock().unwrap().entry(code).or_default() += 1;
            code
        };
        answers(received, then == Then::Wait).into_iter().map(judge).collect()
    }
}

/// Splits received bytes into answers. Unless `whole`, the last one may be truncated.
pub(super) fn answers(mut bytes: &[u8], whole: bool) -> Vec<(u16, String)> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let Some((code, body, rest)) = first_answer(bytes) else {
            assert!(!whole, "half an answer: {}", String::from_utf8_lossy(bytes));
            break;
        };
        bytes = rest;
        if code != 100 {
            found.push((code, String::from_utf8(body.to_vec()).unwrap()));
        }
    }
    found
}

/// The code and the body of the first answer, and the bytes that follow it.
pub(super) fn first_answer(bytes: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let end = bytes.windows(4).position(|four| four == b"\r\n\r\n")? + 4;
    let (head, rest) = bytes.split_at(end);
    let head = std::str::from_utf8(head).unwrap().to_ascii_lowercase();
    let code = ["http/1.1 ", "http/1.0 "].iter().find_map(|version| head.strip_prefix(version));
    let code = code.expect("an answer").get(..3).unwrap().parse().unwrap();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let (body, rest) = rest.split_at_checked(length.map_or(0, |length| length.parse().unwrap()))?;
    Some((code, body, rest))
}

pub(super) fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap()
}

/// Runs `test` on cases of `strategy`: always the same ones unless the environment asks for others.
pub(super) fn each<S: Strategy>(cases: u32, strategy: &S, test: impl Fn(S::Value)) {
    let mut config = Config { failure_persistence: None, ..Config::default() };
    let asked = std::env::var_os("PROPTEST_CASES").is_some();
    config.cases = if asked { config.cases.max(cases) } else { cases };
    if matches!(config.rng_seed, RngSeed::Random) {
        config.rng_seed = RngSeed::Fixed(1);
    }
    let ran = TestRunner::new(config).run(strategy, |case| {
        test(case);
        Ok(())
    });
    if let Err(error) = ran {
        panic!("{error}");
    }
}

/// A store whose token lookup waits until the test lets it continue.
pub(super) struct Slow {
    pub(super) inner: Box<dyn Store>,
    pub(super) asked: Arc<Notify>,
    pub(super) go: Mutex<mpsc::Receiver<()>>,
}

impl Store for Slow {
    fn token(&self, token: TokenHash) -> Result<Option<Token>, StoreError> {
        self.asked.notify_one();
        let _gone = self.go.lock().unwrap().recv();
        self.inner.token(token)
    }
    fn tokens(&self) -> Result<Vec<Token>, StoreError> {
        self.inner.tokens()
    }
    fn add_token(&self, token: &Token) -> Result<(), StoreError> {
        self.inner.add_token(token)
    }
    fn end_token(&self, token: TokenHash, at: f64) -> Result<bool, StoreError> {
        self.inner.end_token(token, at)
    }
    fn register(&self, app: &NewApp<'_>, token: TokenHash, rights: Rights) -> Result<App, StoreError> {
        self.inner.register(app, token, rights)
    }
    fn apps(&self) -> Result<Vec<AppInfo>, StoreError> {
        self.inner.apps()
    }
    fn delete_app(&self, app: App) -> Result<bool, StoreError> {
        self.inner.delete_app(app)
    }
    fn insert(&self, set: &NewSet<'_>, quota: Quota) -> Result<Inserted, StoreError> {
        self.inner.insert(set, quota)
    }
    fn slots(&self, app: App, since: i64) -> Result<Vec<Slot>, StoreError> {
        self.inner.slots(app, since)
    }
    fn roll_up(&self, app: App, from: i64, before: i64, width: i64) -> Result<u64, StoreError> {
        self.inner.roll_up(app, from, before, width)
    }
    fn prune_slots(&self, before: i64) -> Result<(), StoreError> {
        self.inner.prune_slots(before)
    }
    fn prune(&self, before: f64, app: Option<App>) -> Result<u64, StoreError> {
        self.inner.prune(before, app)
    }
    fn newest(&self) -> Result<Option<f64>, StoreError> {
        self.inner.newest()
    }
    fn group_of(&self, id: &SetId) -> Result<Option<(Group, i64)>, StoreError> {
        self.inner.group_of(id)
    }
    fn latest_group(&self, app: App) -> Result<Option<Group>, StoreError> {
        self.inner.latest_group(app)
    }
    fn environments(&self, group: Group, most: u32) -> Result<Vec<Environment>, StoreError> {
        self.inner.environments(group, most)
    }
    fn periods(&self, group: Group, most: u32) -> Result<Vec<Period>, StoreError> {
        self.inner.periods(group, most)
    }
    fn evidence(&self, environment: i64, after: i64, most: u32) -> Result<Vec<Numbered>, StoreError> {
        self.inner.evidence(environment, after, most)
    }
    fn environment(&self, id: i64) -> Result<Option<Environment>, StoreError> {
        self.inner.environment(id)
    }

    fn forget_environments(&self, app: App, most: u32) -> Result<(), StoreError> {
        self.inner.forget_environments(app, most)
    }

    fn unsummarized(&self) -> Result<Vec<Environment>, StoreError> {
        self.inner.unsummarized()
    }
    fn summarize(&self, environment: &Environment, evidence: &Evidence) -> Result<(), StoreError> {
        self.inner.summarize(environment, evidence)
    }
    fn summary(&self, environment: i64) -> Result<Option<Evidence>, StoreError> {
        self.inner.summary(environment)
    }
    fn advise(&self, group: Group, settings: &[String], now: f64, most: u32) -> Result<(), StoreError> {
        self.inner.advise(group, settings, now, most)
    }
    fn advised(&self, app: App) -> Result<HashMap<String, f64>, StoreError> {
        self.inner.advised(app)
    }
    fn note(&self, group: Group, given: &Given, replaces: bool, most: u32) -> Result<(), StoreError> {
        self.inner.note(group, given, replaces, most)
    }
    fn given(&self, group: Group) -> Result<Vec<Given>, StoreError> {
        self.inner.given(group)
    }
    fn totals(&self) -> Result<Totals, StoreError> {
        self.inner.totals()
    }
}
