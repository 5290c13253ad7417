//! Sockets and connections.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use hyper::{server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    sync::{Semaphore, watch},
    time::{sleep, timeout},
};
use tokio_rustls::TlsAcceptor;

use crate::store::shown;

use super::{CollectorError, Shared, addresses::Addresses, routes, unread::Impatient};

/// Maximum number of simultaneous connections; further ones wait to be accepted.
const CONNECTIONS: u32 = 1024;
/// Timeout for the TLS handshake, and for the head of a request, measured from the end of the previous request.
const HEAD: Duration = Duration::from_secs(10);
/// Maximum lifetime of a connection, even if it is busy.
const LIFE: Duration = Duration::from_mins(10);
/// Timeout for requests in progress when the collector is asked to stop.
const FINISH: Duration = Duration::from_secs(15);
/// Maximum size of a request's head, bytes.
const MAX_HEAD: usize = 64 << 10;

pub(super) async fn serve(
    shared: Arc<Shared>,
    tls: Option<TlsAcceptor>,
    say: fn(&str),
) -> Result<(), CollectorError> {
    let address = shared.options.listen;
    let listen = |error| CollectorError::Listen(address, error);
    let listener = TcpListener::bind(address).await.map_err(listen)?;
    let local = listener.local_addr().map_err(listen)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(CollectorError::System)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(CollectorError::System)?;
    let scheme = if tls.is_some() { "https" } else { "http" };
    if tls.is_none() && !local.ip().is_loopback() {
        say(
            "gctrace: tokens and sample sets cross the network unencrypted; --tls-cert and --tls-key change that",
        );
    }
    say(&format!("gctrace: collector listens on {scheme}://{local}, store {}", shown(&shared.options.store)));
    let slots = Arc::new(Semaphore::new(CONNECTIONS as usize));
    let addresses = Arc::new(Addresses::new(shared.options.per_address));
    let (stop, stopped) = watch::channel(());
    loop {
        let slot = tokio::select! {
            slot = Arc::clone(&slots).acquire_owned() => slot,
            _ = interrupt.recv() => break,
            _ = terminate.recv() => break,
        };
        let Ok(slot) = slot else { break };
        let stream = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = interrupt.recv() => break,
            _ = terminate.recv() => break,
        };
        let (stream, peer) = match stream {
            Ok(accepted) => accepted,
            Err(error) => {
                // Usually there are no file descriptors left; closing other connections frees some.
                shared.failures.report_as("accepting a connection", &error);
                sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        shared.metrics.connections.fetch_add(1, Ordering::Relaxed);
        let Some(place) = addresses.enter(peer.ip()) else {
            shared.metrics.crowded.fetch_add(1, Ordering::Relaxed);
            continue;
        };
        let (shared, tls, stopped) = (Arc::clone(&shared), tls.clone(), stopped.clone());
        tokio::spawn(async move {
            let complete = match tls {
                None => connection(&shared, stream, scheme, stopped).await,
                Some(tls) => match timeout(HEAD, tls.accept(stream)).await {
                    Ok(Ok(stream)) => connection(&shared, stream, scheme, stopped).await,
                    _ => false,
                },
            };
            if !complete {
                shared.metrics.broken.fetch_add(1, Ordering::Relaxed);
            }
            drop((slot, place));
        });
    }
    drop(listener);
    drop(stop);
    if timeout(FINISH, slots.acquire_many(CONNECTIONS)).await.is_err() {
        say(
            "gctrace: some requests did not end in time and are cut off; all sets answered with 200 are stored",
        );
    }
    shared.failures.finish();
    say("gctrace: collector ended");
    Ok(())
}

/// Serves a connection to its end; returns false if it ended early. The timeout of a keep-alive connection between requests is not an
/// early end.
pub(super) async fn connection<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    shared: &Arc<Shared>,
    stream: S,
    scheme: &'static str,
    mut stopped: watch::Receiver<()>,
) -> bool {
    let answered = AtomicBool::new(false);
    let service = service_fn(|request| {
        let shared = Arc::clone(shared);
        answered.store(false, Ordering::Relaxed);
        let answered = &answered;
        async move {
            let answer = routes::answer(shared, request, scheme).await;
            answered.store(true, Ordering::Relaxed);
            Ok::<_, std::convert::Infallible>(answer)
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_buf_size(MAX_HEAD)
        // A buffer can exceed that by one read.
        .max_header_size(MAX_HEAD)
        .serve_connection(TokioIo::new(Impatient::new(stream)), service);
    let mut connection = std::pin::pin!(connection);
    let served = async {
        tokio::select! {
            result = connection.as_mut() => return result,
            // The sender never sends: it is dropped when the collector stops.
            _ = stopped.changed() => {}
        }
        connection.as_mut().graceful_shutdown();
        connection.await
    };
    match timeout(LIFE, served).await {
        Ok(Ok(())) => true,
        Ok(Err(error)) => error.is_timeout() && answered.load(Ordering::Relaxed),
        Err(_) => false,
    }
}
