//! The socket and its connections, until shutdown.

use std::{convert::Infallible, sync::Arc, time::Duration};

use gctrace_report::{console::say, trace_file::ReadError};
use hyper::{server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::{TcpListener, TcpStream},
    signal::unix::{SignalKind, signal},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{sleep, timeout},
};

use crate::{
    ServeError,
    routes::{self, Shared},
    source::Source,
};

/// Maximum number of simultaneous connections; further ones wait to be accepted.
const CONNECTIONS: usize = 64;
/// Timeout for the head of a request, from the end of the previous one: clients that only keep connections open must not block others for long.
const HEAD: Duration = Duration::from_secs(5);
/// Maximum size of a request's head, bytes.
const MAX_HEAD: usize = 16 << 10;
/// How long to wait for a small recording to be read before its address is printed: if reading fails, the error is printed instead.
const FIRST: Duration = Duration::from_millis(500);

/// Serves a recording, which is read in the background, until a signal ends it.
pub(crate) async fn serve(
    listener: std::net::TcpListener,
    shared: Arc<Shared>,
    (source, against): (Arc<Source>, Option<Arc<Source>>),
    ready: impl FnOnce(),
) -> Result<(), ServeError> {
    let mut interrupt = signal(SignalKind::interrupt()).map_err(ServeError::System)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(ServeError::System)?;
    let listener = TcpListener::from_std(listener).map_err(ServeError::System)?;
    let reader = Arc::clone(&source);
    let mut reading = tokio::task::spawn_blocking(move || {
        reader.read()?;
        against
            .map_or(Ok(()), |against| against.read().inspect_err(|error| against.failed(&error.to_string())))
    });
    let mut is_read = false;
    if let Ok(result) = timeout(FIRST, &mut reading).await {
        checked(result)?;
        is_read = true;
    }
    ready();
    let slots = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        tokio::select! {
            accepted = accept(&listener, &slots) => serve_one(accepted, &shared).await,
            result = &mut reading, if !is_read => {
                // The address has been printed by now, so the page reports the error.
                if let Err(error) = checked(result) {
                    say(&format!("gctrace: {error}"));
                    source.failed(&error.to_string());
                }
                is_read = true;
            }
            _ = interrupt.recv() => return Ok(()),
            _ = terminate.recv() => return Ok(()),
        }
    }
}

/// Serves a run in progress until the runtime ends.
pub(crate) async fn serve_live(listener: std::net::TcpListener, shared: Arc<Shared>) {
    let listener = match TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => return say(&format!("gctrace: serving the page failed: {error}")),
    };
    let slots = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        serve_one(accept(&listener, &slots).await, &shared).await;
    }
}

async fn serve_one(accepted: Option<(TcpStream, OwnedSemaphorePermit)>, shared: &Arc<Shared>) {
    let Some((stream, slot)) = accepted else { return sleep(Duration::from_millis(100)).await };
    let shared = Arc::clone(shared);
    tokio::spawn(async move {
        connection(shared, stream).await;
        drop(slot);
    });
}

/// The result of reading the recording.
fn checked(result: Result<Result<(), ReadError>, tokio::task::JoinError>) -> Result<(), ServeError> {
    match result {
        Ok(result) => result.map_err(ServeError::from),
        Err(error) => Err(ServeError::System(std::io::Error::other(error))),
    }
}

async fn accept(listener: &TcpListener, slots: &Arc<Semaphore>) -> Option<(TcpStream, OwnedSemaphorePermit)> {
    let slot = Arc::clone(slots).acquire_owned().await.ok()?;
    match listener.accept().await {
        Ok((stream, _)) => Some((stream, slot)),
        Err(error) => {
            // Usually there are no file descriptors left; closing other connections frees some.
            log::warn!("accepting a connection: {error}");
            None
        }
    }
}

async fn connection(shared: Arc<Shared>, stream: TcpStream) {
    let service = service_fn(|request| {
        let shared = Arc::clone(&shared);
        async move { Ok::<_, Infallible>(routes::answer(shared, request).await) }
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_buf_size(MAX_HEAD)
        .serve_connection(TokioIo::new(stream), service)
        .await;
    if let Err(error) = served {
        log::debug!("a connection ended: {error}");
    }
}
