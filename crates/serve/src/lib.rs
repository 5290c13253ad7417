//! `gctrace serve`: a recording as a web page, for the user of this host.
//!
//! * [`listen`]: the socket, connections, the end; [`routes`]: which request gets which answer; [`token`]: who may ask;
//!   [`wanted`]: what for
//! * [`source`]: the recording, read once as a whole and again for parts that are asked for
//! * [`figures`]: what the page shows, added up in [`columns`] of time ([`held`]: memory and heaps); [`page`]: the page; [`graph`]: flame
//!   graphs
#![forbid(unsafe_code)]

mod columns;
mod figures;
mod graph;
mod held;
mod listen;
mod page;
mod routes;
mod source;
#[cfg(test)]
mod tests;
mod token;
mod wanted;

use std::{io, net::SocketAddr, path::PathBuf, sync::Arc};

use gctrace_report::{
    export::window::Window,
    trace_file::{Header, ReadError},
};

/// A part of a recording, as a request asks for it, in the words of `gctrace report`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Asked {
    /// `--from`.
    pub from: Option<String>,
    /// `--to`.
    pub to: Option<String>,
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

/// Serves until SIGINT or SIGTERM. `ready` gets the addresses.
///
/// # Errors
///
/// The recording cannot be read, or the address cannot be listened on.
pub fn run(options: &Options, ready: impl FnOnce(&Addresses)) -> Result<(), ServeError> {
    if !options.listen.ip().is_loopback() {
        return Err(ServeError::NotLoopback(options.listen));
    }
    let source = Arc::new(source::Source::open(&options.file)?);
    let token = token::Token::new().map_err(ServeError::System)?;
    let once = token::Once::new().map_err(ServeError::System)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(8)
        .thread_name("gctrace-http")
        .enable_io()
        .enable_time()
        .build()
        .map_err(ServeError::System)?;
    let shared = Arc::new(routes::Shared { source, token, once, choose: options.choose });
    let served = runtime.block_on(listen::serve(options.listen, shared, ready));
    // A request that still reads the recording is not waited for.
    runtime.shutdown_background();
    served
}
