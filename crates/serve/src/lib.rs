//! `gctrace serve`: a recording as a web page, or a run while it goes on, for the user of this host.
//!
//! * [`listen`]: the socket, connections, the end; [`routes`]: which request gets which answer; [`token`]: who may ask;
//!   [`wanted`]: what for
//! * [`source`]: the recording, read once as a whole and again for parts that are asked for; [`medium`]: where its bytes are; [`live`]: a
//!   run that goes on, of which the last minutes are such a recording
//! * [`figures`]: what the page shows, added up in [`columns`] of time ([`lanes`], and [`held`]: memory and heaps); [`page`]: the page;
//!   [`graph`]: flame graphs; [`compare`]: one part against another
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

/// A part of a recording, as a request asks for it, in the words of `gctrace report`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Asked {
    /// `--from`.
    pub from: Option<String>,
    /// `--to`.
    pub to: Option<String>,
    /// Of a run that goes on: this time up to now.
    pub last: Option<String>,
    /// Begin and end of the part that it is compared with.
    pub a_from: Option<String>,
    /// The same.
    pub a_to: Option<String>,
    /// `--pid`.
    pub pids: Vec<String>,
}

/// What `gctrace report` takes these words for; or what is wrong with them.
pub type Choose = fn(&Header, &Asked) -> Result<Window, String>;

/// What is served, and where.
#[derive(Clone, Debug)]
pub struct Options {
    /// The recording.
    pub file: PathBuf,
    /// One from before, which it is compared with.
    pub against: Option<PathBuf>,
    /// An address of loopback; port 0: a free one.
    pub listen: SocketAddr,
    /// How requests are understood.
    pub choose: Choose,
}

/// Why it cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The recording cannot be read.
    #[error("{0}")]
    Recording(#[from] ReadError),
    /// Others could read it.
    #[error(
        "--listen {0}: this is not an address of this host alone, and pages are not encrypted; listen on 127.0.0.1, and from elsewhere \
         use ssh -L"
    )]
    NotLoopback(SocketAddr),
    /// The address cannot be listened on.
    #[error("listening on {0}: {1}; name another port, or none")]
    Listen(SocketAddr, #[source] io::Error),
    /// The operating system refused something basic.
    #[error("starting: {0}")]
    System(#[source] io::Error),
}

/// The addresses of what is served.
#[derive(Clone, Debug)]
pub struct Addresses {
    /// Of the page.
    pub page: String,
    /// Leads to the page once, within a minute: what a browser is started with can be read by every user of the host.
    pub once: String,
}

/// An address that is listened on, and the secrets that are asked for there. Nothing is answered yet.
#[derive(Debug)]
pub struct Listening {
    listener: TcpListener,
    local: SocketAddr,
    token: token::Token,
    once: token::Once,
}

impl Listening {
    /// Listens on an address of loopback; port 0: a free one.
    ///
    /// # Errors
    ///
    /// It is another address, or cannot be listened on.
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

    /// Serves a run that is about to begin.
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

/// How a run is shown while it goes on.
#[derive(Clone, Debug)]
pub struct LiveOptions {
    /// What holds for the whole run.
    pub header: Header,
    /// For how long is kept what was seen, nanoseconds.
    pub keep_ns: u64,
    /// How much of it, compressed bytes.
    pub keep_bytes: u64,
    /// How requests are understood.
    pub choose: Choose,
}

/// A page that is served until this is dropped.
pub struct LivePage {
    runtime: Option<Runtime>,
    exporters: Vec<Box<dyn Exporter>>,
}

impl LivePage {
    /// The outputs of the run that fill it. There are none the second time.
    pub fn exporters(&mut self) -> Vec<Box<dyn Exporter>> {
        std::mem::take(&mut self.exporters)
    }
}

impl Drop for LivePage {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // A request that is still being answered is not waited for.
            runtime.shutdown_background();
        }
    }
}

fn runtime() -> Result<Runtime, ServeError> {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(2).max_blocking_threads(8).thread_name("gctrace-http");
    runtime.enable_io().enable_time().build().map_err(ServeError::System)
}

/// Serves a recording until SIGINT or SIGTERM. `ready` gets the addresses.
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
    // A request that still reads the recording is not waited for.
    runtime.shutdown_background();
    served
}
