//! HTTP for scrapes: a thread of its own with everything in it.

use std::{
    convert::Infallible,
    io,
    net::{SocketAddr, TcpListener},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Incoming},
    header::{ACCEPT, ALLOW, CONTENT_TYPE, HeaderMap},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{sync::Semaphore, time::timeout};

use super::{Shared, text};
use crate::clock::monotonic_ns;

/// Connections at a time; more wait to be accepted.
const CONNECTIONS: usize = 32;
/// For the head of a request.
const HEAD: Duration = Duration::from_secs(10);
/// For a connection, however busy: scrapers keep theirs open.
const LIFE: Duration = Duration::from_mins(30);
/// Bytes of a request's head.
const MAX_HEAD: usize = 16 << 10;
/// If the data thread was not heard of for so long, something is wrong.
const STALE: Duration = Duration::from_secs(10);

const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const CLASSIC: &str = "text/plain; version=0.0.4; charset=utf-8";
const PLAIN: &str = "text/plain; charset=utf-8";

/// Listens, and answers until the process ends. Returns where.
pub(super) fn start(address: SocketAddr, shared: Arc<Shared>) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    let local = listener.local_addr()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
    std::thread::Builder::new().name("gctrace-metrics".to_owned()).spawn(move || {
        runtime.block_on(async move {
            match tokio::net::TcpListener::from_std(listener) {
                Ok(listener) => accept(&listener, shared).await,
                Err(error) => log::error!("metrics: {error}"),
            }
        });
    })?;
    Ok(local)
}

async fn accept(listener: &tokio::net::TcpListener, shared: Arc<Shared>) {
    let slots = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { return };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                log::warn!("metrics: accepting a connection: {error}");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let shared = Arc::clone(&shared);
        tokio::spawn(async move {
            let service = service_fn(|request| {
                let answer = answer(&shared, &request);
                async move { Ok::<_, Infallible>(answer) }
            });
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD)
                .max_buf_size(MAX_HEAD)
                .serve_connection(TokioIo::new(stream), service);
            // A scraper that goes away is its own affair.
            let _gone = timeout(LIFE, connection).await;
            drop(slot);
        });
    }
}

fn answer(shared: &Shared, request: &Request<Incoming>) -> Response<Full<Bytes>> {
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let mut answer = respond(StatusCode::METHOD_NOT_ALLOWED, PLAIN, "use GET\n".to_owned());
        answer.headers_mut().insert(ALLOW, hyper::header::HeaderValue::from_static("GET, HEAD"));
        return answer;
    }
    match request.uri().path() {
        "/metrics" => metrics(shared, request.headers()),
        "/healthz" => healthz(shared),
        _ => respond(StatusCode::NOT_FOUND, PLAIN, "there are /metrics and /healthz\n".to_owned()),
    }
}

fn metrics(shared: &Shared, headers: &HeaderMap) -> Response<Full<Bytes>> {
    let (services, ledger) = shared.lock().clone();
    let text = match text::openmetrics(services, ledger) {
        Ok(text) => text,
        Err(error) => return respond(StatusCode::INTERNAL_SERVER_ERROR, PLAIN, format!("{error}\n")),
    };
    let wanted = headers.get_all(ACCEPT).into_iter().filter_map(|value| value.to_str().ok());
    if wanted.into_iter().any(|value| value.contains("application/openmetrics-text")) {
        return respond(StatusCode::OK, OPENMETRICS, text);
    }
    respond(StatusCode::OK, CLASSIC, text::classic(&text))
}

fn healthz(shared: &Shared) -> Response<Full<Bytes>> {
    let silent = Duration::from_nanos(monotonic_ns().saturating_sub(shared.alive_ns.load(Ordering::Relaxed)));
    if silent > STALE {
        let text = format!("no events were handled for {} s\n", silent.as_secs());
        return respond(StatusCode::SERVICE_UNAVAILABLE, PLAIN, text);
    }
    respond(StatusCode::OK, PLAIN, "ok\n".to_owned())
}

fn respond(status: StatusCode, kind: &'static str, body: String) -> Response<Full<Bytes>> {
    let mut answer = Response::new(Full::new(Bytes::from(body)));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, hyper::header::HeaderValue::from_static(kind));
    answer
}
