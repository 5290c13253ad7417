//! Requests over HTTP/1.1.

use std::{
    io::{self, Read as _, Write as _},
    time::{Duration, SystemTime},
};

use flate2::{Compression, write::GzEncoder};
use ureq::{
    Agent,
    http::{HeaderMap, header},
};

use bytes::Bytes;

use super::{CONNECT, Reason, TIMEOUT, engine::Outcome};
use crate::tls;

/// Maximum bytes read of a response; a longer one is cut off.
const MAX_ANSWER: u64 = 64 << 10;
/// A connection that breaks during a larger request may be the receiver's answer to its size.
const LARGE: usize = 256 << 10;
/// What an answer of 400 says if the request is too large: Go's `http.MaxBytesReader`, in a `google.rpc.Status` of the OpenTelemetry Collector
/// (receiver/otlpreceiver/otlphttp.go, `readAndCloseBody`), and Grafana Pyroscope (pkg/validation/validate.go, `ValidateProfile`).
const TOO_LARGE: [&str; 3] = [
    "http: request body too large",
    "exceeds the size limit (max_profile_size_byte,",
    "exceeds the samples count limit (max_profile_stacktrace_samples,",
];

/// A server.
pub(super) struct Server {
    url: String,
    headers: HeaderMap,
    agent: Agent,
}

impl Server {
    pub(super) fn new(url: &str, headers: HeaderMap) -> Self {
        Self { url: url.to_owned(), headers, agent: agent(TIMEOUT, CONNECT) }
    }

    /// Sends a body that is already compressed.
    pub(super) fn post(&self, path: &str, content_type: &str, body: &[u8]) -> Outcome<Bytes> {
        let mut request = self
            .agent
            .post(format!("{}{path}", self.url))
            .header(header::CONTENT_TYPE, content_type)
            .header(header::CONTENT_ENCODING, "gzip");
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        let mut response = match request.send(body) {
            Ok(response) => response,
            Err(error) => {
                let reason = Reason::new(&tls::failed(&self.url, &error));
                let cut_off = body.len() > LARGE && is_cut_off(&error);
                return if cut_off { Outcome::CutOff(reason) } else { Outcome::Unreachable(reason) };
            }
        };
        let after = retry_after(response.headers());
        let answer = read_answer(response.body_mut(), MAX_ANSWER);
        meaning(response.status().as_u16(), answer, after)
    }
}

/// The first bytes of a response, at most this many; if it breaks off, what has arrived.
pub(in crate::export) fn read_answer(body: &mut ureq::Body, most: u64) -> Vec<u8> {
    let mut answer = Vec::new();
    if let Err(error) = body.as_reader().take(most).read_to_end(&mut answer) {
        log::debug!("a response broke off after {} bytes: {error}", answer.len());
    }
    answer
}

/// Whether the receiver closed the connection before it had read the whole request. If it answered first, the answer is lost: a reset discards
/// what has not been read yet.
fn is_cut_off(error: &ureq::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset};
    matches!(error, ureq::Error::Io(error) if matches!(error.kind(), BrokenPipe | ConnectionReset | ConnectionAborted))
}

/// The meaning of a response (OTLP specification, "OTLP/HTTP Response").
fn meaning(code: u16, answer: Vec<u8>, after: Option<Duration>) -> Outcome<Bytes> {
    let text = String::from_utf8_lossy(&answer);
    let reason = || Reason::quoting(&format!("answered {code}"), &text);
    match code {
        200..=299 => Outcome::Accepted(answer.into()),
        413 => Outcome::TooLarge,
        400 if TOO_LARGE.iter().any(|why| text.contains(why)) => Outcome::TooLarge,
        429 if is_beyond_rate(&text).unwrap_or(false) => Outcome::TooLarge,
        429 | 502..=504 => Outcome::Again(reason(), after),
        _ => Outcome::Refused(reason()),
    }
}

/// Whether a request is larger than what Grafana Pyroscope accepts in a second, from its answer (pkg/distributor/distributor.go, `rateLimit`): it
/// would be refused again.
fn is_beyond_rate(answer: &str) -> Option<bool> {
    let (_, rate) = answer.split_once("push rate limit (")?;
    let (rate, size) = rate.split_once(") exceeded while adding ")?;
    Some(bytes(size)? > bytes(rate)?)
}

/// The size at the start of a text as `humanize.IBytes` of Go writes it: `4.0 MiB`.
fn bytes(text: &str) -> Option<f64> {
    let (number, unit) = text.split_once(' ')?;
    let power = ["B", "KiB", "MiB", "GiB", "TiB"].iter().position(|known| unit.starts_with(known))?;
    Some(number.parse::<f64>().ok()? * 1024_f64.powi(power as i32))
}

/// `Retry-After` (RFC 9110, section 10.2.3): seconds, or a date, which is compared with the peer's own clock if its
/// response has the time. For anything else the usual pause applies.
pub(in crate::export) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = |name| Some(headers.get(name)?.to_str().ok()?.trim());
    let wanted = text(header::RETRY_AFTER)?;
    if let Ok(seconds) = wanted.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = httpdate::parse_http_date(wanted).ok()?;
    let now = text(header::DATE).and_then(|date| httpdate::parse_http_date(date).ok());
    Some(date.duration_since(now.unwrap_or_else(SystemTime::now)).unwrap_or_default())
}

pub(in crate::export) fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut out = GzEncoder::new(Vec::with_capacity(bytes.len() / 4), Compression::fast());
    // Writing to memory cannot fail.
    out.write_all(bytes).and_then(|()| out.finish()).unwrap_or_default()
}

/// A client that returns every response, including errors and redirects.
pub(in crate::export) fn agent(timeout: Duration, connect: Duration) -> Agent {
    tls::http(timeout, connect)
        .http_status_as_error(false)
        .max_redirects(0)
        .max_redirects_will_error(false)
        .build()
        .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Seconds and dates; a date is relative to the clock of the peer, which may be wrong.
    #[test]
    fn pauses() {
        let after = |headers: &[(header::HeaderName, &str)]| {
            let headers = headers.iter().map(|(name, value)| (name.clone(), value.parse().unwrap()));
            retry_after(&headers.collect())
        };
        let retry = header::RETRY_AFTER;
        assert_eq!(after(&[(retry.clone(), " 120 ")]), Some(Duration::from_mins(2)));
        let (date, later) = ("Fri, 31 Dec 1999 23:59:29 GMT", "Fri, 31 Dec 1999 23:59:59 GMT");
        assert_eq!(after(&[(retry.clone(), later), (header::DATE, date)]), Some(Duration::from_secs(30)));
        assert_eq!(after(&[(retry.clone(), date), (header::DATE, later)]), Some(Duration::ZERO));
        assert_eq!(after(&[(retry.clone(), later)]), Some(Duration::ZERO), "long ago by our clock");
        for other in ["-1", "1.5", "soon", "99999999999999999999999", ""] {
            assert_eq!(after(&[(retry.clone(), other)]), None, "{other}");
        }
        assert_eq!(after(&[]), None);
    }

    /// What has come of a response counts: one that is too long is cut off, and one may break off.
    #[test]
    fn answers() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let server = Server::new(&url, HeaderMap::new());
        let post = |code: u16, length: usize, sent: usize| {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let (mut peer, _) = listener.accept().unwrap();
                    let mut request = [0; 4096];
                    while !request.windows(4).any(|end| end == b"body") {
                        assert!(peer.read(&mut request).unwrap() > 0);
                    }
                    let head =
                        format!("HTTP/1.1 {code} x\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n");
                    // The client closes the connection where it stops reading.
                    let answer = [head.into_bytes(), vec![b'y'; sent]].concat();
                    peer.write_all(&answer).unwrap_or_default();
                });
                server.post("/", "text/plain", b"body")
            })
        };
        for (length, sent) in [(100_000, 100_000), (100_000, 70_000)] {
            let answer = vec![b'y'; MAX_ANSWER as usize];
            assert_eq!(post(200, length, sent), Outcome::Accepted(answer.into()), "{sent} of {length}");
        }
        assert_eq!(post(200, 1000, 3), Outcome::Accepted(b"yyy".as_slice().into()));
        let Outcome::Refused(reason) = post(400, 1000, 3) else { panic!("400 is final") };
        assert_eq!(reason.to_string(), "answered 400 (yyy)");
    }

    /// A receiver that closes the connection within a large request may have answered that it is too large, and one that breaks off within a small
    /// one has not.
    #[test]
    fn broken_off() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let server = Server::new(&url, HeaderMap::new());
        let post = |size: usize| {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let (mut peer, _) = listener.accept().unwrap();
                    // It has read a part only: the rest makes the kernel reset the connection when it is closed.
                    peer.read_exact(&mut [0; 16]).unwrap();
                });
                server.post("/", "text/plain", &vec![b'x'; size])
            })
        };
        let large = post(64 << 20);
        assert!(matches!(large, Outcome::CutOff(_)), "{large:?}");
        let small = post(1000);
        assert!(matches!(small, Outcome::Unreachable(_)), "{small:?}");
    }

    /// Only what OTLP calls retryable is retried.
    #[test]
    fn meanings() {
        assert_eq!(meaning(200, b"x".to_vec(), None), Outcome::Accepted(b"x".as_slice().into()));
        assert_eq!(meaning(413, Vec::new(), None), Outcome::TooLarge);
        let status = b"\x08\x03\x12\x1chttp: request body too large".to_vec();
        assert_eq!(meaning(400, status, None), Outcome::TooLarge, "the OpenTelemetry Collector");
        let invalid = |what: &str| {
            let text = format!(
                "{{\"code\":\"invalid_argument\",\"message\":\"the profile with labels '{{}}' {what})\"}}"
            );
            meaning(400, text.into_bytes(), None)
        };
        for what in [
            "exceeds the size limit (max_profile_size_byte, actual: 5000000, limit: 4194304",
            "exceeds the samples count limit (max_profile_stacktrace_samples, actual: 16001, limit: 16000",
        ] {
            assert_eq!(invalid(what), Outcome::TooLarge, "Pyroscope: {what}");
        }
        let labels =
            "exceeds the sample labels limit (max_profile_stacktrace_sample_labels, actual: 3, limit: 2";
        assert!(matches!(invalid(labels), Outcome::Refused(_)));
        let limited = |size: &str| {
            let text = format!("{{\"message\":\"push rate limit (4.0 MiB) exceeded while adding {size}\"}}");
            meaning(429, text.into_bytes(), None)
        };
        for size in ["5.2 MiB", "12 MiB", "1.0 GiB"] {
            assert_eq!(limited(size), Outcome::TooLarge, "{size} in a second");
        }
        for size in ["4.0 MiB", "900 KiB", "12 B", "much", "9 lives"] {
            assert!(matches!(limited(size), Outcome::Again(..)), "{size}");
        }
        for code in [429, 502, 503, 504] {
            let after = Some(Duration::from_secs(3));
            assert!(
                matches!(meaning(code, Vec::new(), after), Outcome::Again(_, when) if when == after),
                "{code}"
            );
        }
        for code in [301, 400, 401, 404, 500] {
            let outcome = meaning(code, b"\x1b[2Jno".to_vec(), None);
            let Outcome::Refused(reason) = outcome else { panic!("{code}: {outcome:?}") };
            assert_eq!(reason.to_string(), format!("answered {code} (\\u{{1b}}[2Jno)"));
        }
    }
}
