//! The socket and its connections, up to the end.

use std::{convert::Infallible, net::SocketAddr, sync::Arc, time::Duration};

use gctrace_report::{console::say, trace_file::ReadError};
use hyper::{server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::{TcpListener, TcpStream},
    signal::unix::{SignalKind, signal},
    sync::Semaphore,
    time::{sleep, timeout},
};

use crate::{
    Addresses, ServeError,
    routes::{self, Shared},
};

/// Connections at a time; more wait to be accepted.
const CONNECTIONS: usize = 64;
/// Time for the head of a request, from the end of the one before.
const HEAD: Duration = Duration::from_secs(30);
/// Bytes of a request's head.
const MAX_HEAD: usize = 16 << 10;
/// How long a small recording may take before its address is there: what is wrong with it is told instead.
const FIRST: Duration = Duration::from_millis(500);

pub(crate) async fn serve(
    address: SocketAddr,
    shared: Arc<Shared>,
    ready: impl FnOnce(&Addresses),
) -> Result<(), ServeError> {
    let mut interrupt = signal(SignalKind::interrupt()).map_err(ServeError::System)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(ServeError::System)?;
    let listen = |error| ServeError::Listen(address, error);
    let listener = TcpListener::bind(address).await.map_err(listen)?;
    let local = listener.local_addr().map_err(listen)?;
    let source = Arc::clone(&shared.source);
    let reader = Arc::clone(&source);
    let mut reading = tokio::task::spawn_blocking(move || reader.read());
    let mut is_read = false;
    if let Ok(result) = timeout(FIRST, &mut reading).await {
        told(result)?;
        is_read = true;
    }
    ready(&Addresses {
        page: format!("http://{local}/{}/", shared.token.text()),
        once: format!("http://{local}/once/{}", shared.once.token.text()),
    });
    let slots = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let accepted = tokio::select! {
            accepted = accept(&listener, &slots) => accepted,
            result = &mut reading, if !is_read => {
                // Its address is known by now: the page says what is wrong.
                if let Err(error) = told(result) {
                    say(&format!("gctrace: {error}"));
                    source.failed(&error.to_string());
                }
                is_read = true;
                continue;
            }
            _ = interrupt.recv() => return Ok(()),
            _ = terminate.recv() => return Ok(()),
        };
        let Some((stream, slot)) = accepted else {
            sleep(Duration::from_millis(100)).await;
            continue;
        };
        let shared = Arc::clone(&shared);
        tokio::spawn(async move {
            connection(shared, stream).await;
            drop(slot);
        });
    }
}

/// The result of reading the recording.
fn told(result: Result<Result<(), ReadError>, tokio::task::JoinError>) -> Result<(), ServeError> {
    match result {
        Ok(result) => result.map_err(ServeError::from),
        Err(error) => Err(ServeError::System(std::io::Error::other(error))),
    }
}

async fn accept(
    listener: &TcpListener,
    slots: &Arc<Semaphore>,
) -> Option<(TcpStream, tokio::sync::OwnedSemaphorePermit)> {
    let slot = Arc::clone(slots).acquire_owned().await.ok()?;
    match listener.accept().await {
        Ok((stream, _)) => Some((stream, slot)),
        Err(error) => {
            // Usually there are no descriptors left: other connections will be closed.
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
