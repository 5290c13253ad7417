//! The collector: TuneMyGC's protocol over HTTP/1.1, plain or TLS, in front of a [`Store`].
//!
//! * [`listen`]: sockets, connections and their limits; [`addresses`]: connections per address; [`tls`]: certificates;
//!   [`unread`]: answers that clients do not read
//! * [`routes`]: maps requests to [`answer`]s; [`pages`]: answers for people; [`body`]: reading bodies within limits
//! * [`access`]: rights of a token; [`advice`], [`recommended`]: recommendations; [`history`]: earlier ones and their effect
//! * [`ingest`]: processing of a set; [`retention`]: deletion of old sets; [`metrics`]: counters; [`failures`]: failures in the log

use std::{net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use tokio::sync::Semaphore;

use crate::{
    now,
    store::{self, Quota, Store, StoreError},
};

mod access;
mod addresses;
mod advice;
mod answer;
mod body;
mod failures;
#[cfg(test)]
mod fuzz;
mod history;
mod ingest;
mod listen;
mod metrics;
mod pages;
mod public_url;
mod recommended;
mod retention;
mod routes;
mod tls;
mod unread;

pub use ingest::agent_version;
pub use public_url::public_url;
pub use tls::TlsError;

/// Maximum size of a body, and of a set after decompression, bytes: the protocol's 50 MB.
pub const MAX_BODY: usize = 50_000_000;
/// Sets above this size, in bytes, are processed one at a time.
const LARGE: usize = 4_000_000;
/// Memory for bodies that are being received, beyond their first piece, in units of [`body::UNIT`]: shared by all bodies of up to
/// [`LARGE`] bytes.
const SMALL_UNITS: usize = 768;
/// Memory for larger bodies, in units of [`body::UNIT`]. See [`SMALL_UNITS`].
const LARGE_UNITS: usize = 1280;

/// Maximum number of application pages built at a time.
const PAGES: usize = 2;

/// The options of a collector.
#[derive(Clone, Debug)]
pub struct Options {
    /// The address to listen on.
    pub listen: SocketAddr,
    /// Name of the store: see [`store::open`].
    pub store: String,
    /// Certificate chain and key, PEM, for TLS.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// The prefix of addresses in answers, if it differs from the address of the request.
    pub public_url: Option<String>,
    /// Whether `POST /accounts` creates applications. `None`: only for requests from this host.
    pub registration: Option<bool>,
    /// Maximum amount of data stored per application.
    pub quota: Quota,
    /// How long sets are kept; `None`: forever.
    pub keep: Option<Duration>,
    /// Limit on the simultaneous connections of one address (for IPv6, of a /64); 0: no limit. `None`: 256, but no limit on loopback.
    pub per_address: Option<u32>,
    /// Agents below this version are asked to update.
    pub min_agent: String,
}

impl Options {
    /// The scheme by which browsers reach pages, if the listener has this scheme: a proxy may add TLS.
    fn pages_scheme(&self, scheme: &'static str) -> &'static str {
        if self.public_url.as_ref().is_some_and(|url| url.starts_with("https://")) { "https" } else { scheme }
    }
}

/// Why a collector cannot run.
#[derive(Debug, thiserror::Error)]
pub enum CollectorError {
    /// The store cannot be opened.
    #[error("opening the store: {0}")]
    Store(#[from] StoreError),
    /// The certificate or the key cannot be used.
    #[error("{0}")]
    Tls(#[from] TlsError),
    /// The address cannot be listened on.
    #[error("listening on {0}: {1}; is another collector running there? (--listen names another address)")]
    Listen(SocketAddr, #[source] std::io::Error),
    /// The operating system refused a basic operation.
    #[error("starting: {0}")]
    System(#[source] std::io::Error),
}

/// State shared by all connections.
struct Shared {
    store: Box<dyn Store>,
    options: Options,
    metrics: metrics::Metrics,
    failures: failures::Failures,
    sums: advice::Sums,
    /// Memory for bodies.
    memory: body::Memory,
    /// Memory for answers.
    unread: unread::Unread,
    /// One permit for each set being processed.
    workers: Arc<Semaphore>,
    /// The permit to process a large set: only one of those sets may be large.
    large: Arc<Semaphore>,
    /// One permit for each application page being built: each reads up to 200 000 rows.
    pages: Semaphore,
}

/// Runs until SIGINT or SIGTERM. `say` reports progress, line by line.
pub fn run(options: Options, say: fn(&str)) -> Result<(), CollectorError> {
    let tls = options.tls.as_ref().map(|(chain, key)| tls::load(chain, key)).transpose()?;
    let store = store::open(&options.store)?;
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(cpus.min(4))
        .max_blocking_threads(2 * cpus + 8)
        .thread_name("gctrace-http")
        .enable_io()
        .enable_time()
        .build()
        .map_err(CollectorError::System)?;
    let shared = Arc::new(Shared {
        store,
        options,
        metrics: metrics::Metrics::default(),
        failures: failures::Failures::default(),
        sums: advice::Sums::default(),
        memory: body::Memory::new(SMALL_UNITS, LARGE_UNITS),
        unread: unread::Unread::default(),
        workers: Arc::new(Semaphore::new(cpus)),
        large: Arc::new(Semaphore::new(1)),
        pages: Semaphore::new(PAGES),
    });
    runtime.spawn(retention::run(Arc::clone(&shared)));
    runtime.block_on(listen::serve(shared, tls, say))
}
