//! `gctrace serve`: shows a recording, or a run in progress, as a web page for the user of this host.
//!
//! * [`listen`]: the socket, connections, shutdown; [`routes`]: maps requests to answers; [`token`]: authenticates requests;
//!   [`wanted`]: parses queries
//! * [`source`]: the recording, read once as a whole and again for requested parts; [`medium`]: where its bytes are stored; [`live`]: a
//!   run in progress, whose last minutes are such a recording
//! * [`figures`]: the figures of the page, summed in [`columns`] of time ([`lanes`], and [`held`]: memory and heaps); [`page`]: the page;
//!   [`graph`]: flame graphs; [`compare`]: compares parts
#![forbid(unsafe_code)]

mod columns;
mod compare;
mod figures;
mod graph;
mod held;
mod lanes;
mod listen;
mod live;
mod medium;
mod page;
mod routes;
mod source;
#[cfg(test)]
mod tests;
mod token;
mod wanted;

use std::{
    io,
    net::{SocketAddr, TcpListener},
    path::PathBuf,
    sync::{Arc, Mutex},
};

use gctrace_report::{
    export::{Exporter, window::Window},
    trace_file::{Header, LiveRecorder, ReadError},
};
use tokio::runtime::Runtime;

pub use source::LIVE;

/// A part of a recording as a request specifies it, in the syntax of `gctrace report`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Asked {
    /// `--from`.
    pub from: Option<String>,
    /// `--to`.
    pub to: Option<String>,
    /// For a run in progress: this much time up to now.
    pub last: Option<String>,
    /// Start of the part to compare with.
    pub a_from: Option<String>,
    /// End of the part to compare with.
    pub a_to: Option<String>,
    /// `--pid`.
    pub pids: Vec<String>,
}

/// Interprets a request as `gctrace report` would. Returns an error message if it is not valid.
pub type Choose = fn(&Header, &Asked) -> Result<Window, String>;

/// What to serve, and where.
#[derive(Clone, Debug)]
pub struct Options {
    /// The recording.
    pub file: PathBuf,
    /// An earlier recording to compare it with.
    pub against: Option<PathBuf>,
    /// A loopback address; port 0 selects a free port.
    pub listen: SocketAddr,
    /// Interprets requests.
    pub choose: Choose,
}

/// Why a recording cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The recording cannot be read.
    #[error("{0}")]
    Recording(#[from] ReadError),
    /// The address is not a loopback address: others could read the recording.
    #[error(
        "--listen {0}: this is not an address of this host alone, and pages are not encrypted; listen on 127.0.0.1, and from elsewhere \
         use ssh -L"
    )]
    NotLoopback(SocketAddr),
    /// The address cannot be listened on.
    #[error("listening on {0}: {1}; name another port, or none")]
    Listen(SocketAddr, #[source] io::Error),
    /// The operating system refused a basic operation.
    #[error("starting: {0}")]
    System(#[source] io::Error),
}

/// The addresses of the page.
#[derive(Clone, Debug)]
pub struct Addresses {
    /// The address with the token.
    pub page: String,
    /// An address that opens the page once, within a minute: every user of the host can read the arguments of a browser.
    pub once: String,
}

/// A listening address, and the secrets that requests to it must contain. Nothing is answered yet.
#[derive(Debug)]
pub struct Listening {
    listener: TcpListener,
    local: SocketAddr,
    token: token::Token,
    once: token::Once,
}

impl Listening {
    /// Listens on a loopback address; port 0 selects a free port.
    ///
    /// # Errors
    ///
    /// The address is not a loopback address, or cannot be listened on.
    pub fn new(address: SocketAddr) -> Result<Self, ServeError> {
        if !address.ip().is_loopback() {
            return Err(ServeError::NotLoopback(address));
        }
        let listen = |error| ServeError::Listen(address, error);
        let listener = TcpListener::bind(address).map_err(listen)?;
        listener.set_nonblocking(true).map_err(listen)?;
        let local = listener.local_addr().map_err(listen)?;
        let token = token::Token::new().map_err(ServeError::System)?;
        let once = token::Once::new().map_err(ServeError::System)?;
        Ok(Self { listener, local, token, once })
    }

    /// The addresses of the page.
    pub fn addresses(&self) -> Addresses {
        let Self { local, token, once, .. } = self;
        Addresses {
            page: format!("http://{local}/{}/", token.text()),
            once: format!("http://{local}/once/{}", once.token.text()),
        }
    }

    /// Serves a run that is about to start.
    ///
    /// # Errors
    ///
    /// Threads cannot be started.
    pub fn live(self, options: LiveOptions) -> Result<LivePage, ServeError> {
        let LiveOptions { header, keep_ns, keep_bytes, choose } = options;
        let rolling = Arc::new(Mutex::new(live::Rolling::new(header.begun_ns, keep_ns)));
        let (recorder, recording) = LiveRecorder::new(header, keep_ns, keep_bytes);
        let served = routes::Served::Live(Box::new(live::Live::new(recording, Arc::clone(&rolling))));
        let shared = Arc::new(routes::Shared { served, token: self.token, once: self.once, choose });
        let runtime = runtime()?;
        drop(runtime.spawn(listen::serve_live(self.listener, shared)));
        let exporters: Vec<Box<dyn Exporter>> = vec![Box::new(recorder), Box::new(live::Watcher(rolling))];
        Ok(LivePage { runtime: Some(runtime), exporters })
    }
}

/// The options for showing a run in progress.
#[derive(Clone, Debug)]
pub struct LiveOptions {
    /// The header of the whole run.
    pub header: Header,
    /// How long events are kept, nanoseconds.
    pub keep_ns: u64,
    /// Maximum amount of kept events, compressed bytes.
    pub keep_bytes: u64,
    /// Interprets requests.
    pub choose: Choose,
}

/// A page that is served until this is dropped.
pub struct LivePage {
    runtime: Option<Runtime>,
    exporters: Vec<Box<dyn Exporter>>,
}

impl LivePage {
    /// The outputs of the run that fill the page. The second call returns none.
    pub fn exporters(&mut self) -> Vec<Box<dyn Exporter>> {
        std::mem::take(&mut self.exporters)
    }
}

impl Drop for LivePage {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // This does not wait for a request that is still being answered.
            runtime.shutdown_background();
        }
    }
}

fn runtime() -> Result<Runtime, ServeError> {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(2).max_blocking_threads(8).thread_name("gctrace-http");
    runtime.enable_io().enable_time().build().map_err(ServeError::System)
}

/// Serves a recording until SIGINT or SIGTERM. `ready` receives the addresses.
///
/// # Errors
///
/// The recording cannot be read, or the address cannot be listened on.
pub fn run(options: &Options, ready: impl FnOnce(&Addresses)) -> Result<(), ServeError> {
    let source = Arc::new(source::Source::open(&options.file)?);
    let against = options.against.as_deref().map(source::Source::open).transpose()?.map(Arc::new);
    let listening = Listening::new(options.listen)?;
    let addresses = listening.addresses();
    let Listening { listener, token, once, .. } = listening;
    let runtime = runtime()?;
    let served = routes::Served::File { source: Arc::clone(&source), against: against.clone() };
    let shared = Arc::new(routes::Shared { served, token, once, choose: options.choose });
    let served = runtime.block_on(listen::serve(listener, shared, (source, against), || ready(&addresses)));
    // This does not wait for a request that is still reading the recording.
    runtime.shutdown_background();
    served
}
