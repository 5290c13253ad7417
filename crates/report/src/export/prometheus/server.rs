//! HTTP for scrapes, on a thread of its own.

use std::{
    collections::VecDeque,
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
use tokio::{task::JoinHandle, time::timeout};

use super::{Shared, text};
use crate::clock::monotonic_ns;

/// Maximum number of connections. Above it, the oldest one is closed.
const CONNECTIONS: usize = 64;
/// Timeout for the head of a request.
const HEAD: Duration = Duration::from_secs(5);
/// Maximum lifetime of a connection, however busy: scrapers keep theirs open.
const LIFE: Duration = Duration::from_mins(30);
/// Maximum size of a request's head, bytes.
const MAX_HEAD: usize = 16 << 10;
/// A data thread that has been silent for this long is considered stalled.
const STALE: Duration = Duration::from_secs(10);

const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const CLASSIC: &str = "text/plain; version=0.0.4; charset=utf-8";
const PLAIN: &str = "text/plain; charset=utf-8";

/// Listens, and answers requests until the process ends. Returns the address.
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
    let mut open: VecDeque<JoinHandle<()>> = VecDeque::new();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                log::warn!("metrics: accepting a connection: {error}");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        open.retain(|connection| !connection.is_finished());
        if open.len() >= CONNECTIONS
            && let Some(oldest) = open.pop_front()
        {
            // Responses take almost no time, so the oldest connection is idle. Scrapers reconnect.
            oldest.abort();
        }
        let shared = Arc::clone(&shared);
        open.push_back(tokio::spawn(async move {
            let service = service_fn(|request| {
                let answer = answer(&shared, &request);
                async move { Ok::<_, Infallible>(answer) }
            });
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD)
                .max_buf_size(MAX_HEAD)
                .serve_connection(TokioIo::new(stream), service);
            // A scraper may disconnect at any time.
            let _gone = timeout(LIFE, connection).await;
        }));
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
    if wants_openmetrics(wanted) {
        return respond(StatusCode::OK, OPENMETRICS, text);
    }
    respond(StatusCode::OK, CLASSIC, text::classic(&text))
}

/// Whether OpenMetrics is accepted with at least the weight of plain text (RFC 9110, section 12.5.1). Clients that
/// name neither get plain text.
fn wants_openmetrics<'a>(accept: impl Iterator<Item = &'a str>) -> bool {
    let (mut openmetrics, mut plain) = (0.0_f32, 0.0_f32);
    for range in accept.flat_map(|value| value.split(',')) {
        let mut parts = range.split(';').map(str::trim);
        let kind = parts.next().unwrap_or_default();
        let weight = parts.find_map(|part| part.strip_prefix("q=").or_else(|| part.strip_prefix("Q=")));
        let weight = weight.map_or(1.0, |weight| weight.trim().parse().unwrap_or(0.0));
        let of = if kind.eq_ignore_ascii_case("application/openmetrics-text") {
            &mut openmetrics
        } else if kind.eq_ignore_ascii_case("text/plain") {
            &mut plain
        } else {
            continue;
        };
        *of = of.max(weight);
    }
    openmetrics > 0.0 && openmetrics >= plain
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

#[cfg(test)]
mod tests {
    use std::{
        io::{Read as _, Write as _},
        net::TcpStream,
        sync::{Mutex, atomic::AtomicU64},
        time::Instant,
    };

    use super::*;
    use crate::{aggregate::services::Services, ledger::Ledger};

    /// What Prometheus, agents and people send; a weight of zero is a refusal.
    #[test]
    fn formats() {
        let prometheus = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;\
                          version=0.0.1;q=0.5,text/plain;version=1.0.0;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        assert!(wants_openmetrics([prometheus].into_iter()));
        assert!(wants_openmetrics(["text/plain;q=0.5", "Application/OpenMetrics-Text"].into_iter()));
        let plain = [
            "*/*",
            "",
            "text/plain",
            "application/openmetrics-text;q=0",
            "application/openmetrics-text; q=0.0, */*",
            "application/openmetrics-text;q=0.2, text/plain;q=0.3",
            "application/openmetrics-textual",
            "application/openmetrics-text;q=high",
        ];
        for accept in plain {
            assert!(!wants_openmetrics([accept].into_iter()), "{accept}");
        }
    }

    /// Hundreds of clients that connect and send nothing, or half a request, do not block other clients.
    #[test]
    fn idle_connections() {
        let shared = Arc::new(Shared {
            figures: Mutex::new((Services::new(false), Ledger::default())),
            alive_ns: AtomicU64::new(monotonic_ns()),
        });
        let address = start(([127, 0, 0, 1], 0).into(), shared).unwrap();
        let mut idle = Vec::new();
        for n in 0..300 {
            let mut stream = TcpStream::connect(address).unwrap();
            let _may_be_closed = stream.write_all(if n % 2 == 0 { b"" } else { b"GET /metrics HT" });
            idle.push(stream);
        }
        let begun = Instant::now();
        for path in ["/healthz", "/metrics"] {
            let mut stream = TcpStream::connect(address).unwrap();
            write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        }
        assert!(begun.elapsed() < HEAD, "{:?}", begun.elapsed());
        drop(idle);
    }
}
