//! Unary calls over gRPC. Messages are encoded by the payload, and responses are returned as bytes, which the payload interprets.

use std::{fmt::Write as _, io, time::Duration};

use bytes::{Buf as _, BufMut as _, Bytes};
use hyper_util::rt::TokioIo;
use prost::Message as _;
use rustix::net::sockopt;
use rustls::pki_types::ServerName;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    runtime::{Builder, Runtime},
};
use tokio_rustls::TlsConnector;
use tonic::{
    Code, Request, Status,
    client::Grpc,
    codec::{Codec, CompressionEncoding, DecodeBuf, Decoder, EncodeBuf, Encoder},
    metadata::MetadataMap,
    transport::{Channel, Endpoint, Uri},
};
use ureq::http::{HeaderMap, uri::PathAndQuery};

use super::{CONNECT, Reason, TIMEOUT, engine::Outcome};
use crate::tls;

/// The largest message that receivers accept by default (gRPC's default).
const USUAL_LIMIT: usize = 4 << 20;

/// A server.
pub(super) struct Server {
    /// It has a thread of its own, which keeps the connection alive while there is nothing to send.
    runtime: Runtime,
    channel: Channel,
    metadata: MetadataMap,
}

/// A byte stream, encrypted or not.
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

impl Server {
    pub(super) fn new(url: &str, headers: HeaderMap) -> io::Result<Self> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("gctrace-grpc")
            .enable_io()
            .enable_time()
            .build()?;
        let endpoint = Endpoint::from_shared(url.to_owned())
            .and_then(|endpoint| endpoint.user_agent(tls::USER_AGENT))
            .map_err(io::Error::other)?
            .timeout(TIMEOUT)
            .connect_timeout(CONNECT);
        let tls = url.starts_with("https://").then(|| tls::client(b"h2").map(TlsConnector::from));
        let tls = tls.transpose().map_err(io::Error::other)?;
        let connector = tower::service_fn(move |uri: Uri| connect(uri, tls.clone()));
        let guard = runtime.enter();
        let channel = endpoint.connect_with_connector_lazy(connector);
        drop(guard);
        Ok(Self { runtime, channel, metadata: MetadataMap::from_headers(headers) })
    }

    /// Calls a method once.
    pub(super) fn call(&self, method: &'static str, message: &Bytes) -> Outcome<Bytes> {
        let mut client = Grpc::new(self.channel.clone())
            .send_compressed(CompressionEncoding::Gzip)
            .accept_compressed(CompressionEncoding::Gzip);
        let mut request = Request::new(message.clone());
        *request.metadata_mut() = self.metadata.clone();
        let answer = self.runtime.block_on(async {
            client.ready().await.map_err(|error| Status::from_error(Box::new(error)))?;
            client.unary(request, PathAndQuery::from_static(method), Raw).await
        });
        match answer {
            Ok(answer) => Outcome::Accepted(answer.into_inner()),
            Err(status) => meaning(&status, message.len()),
        }
    }
}

async fn connect(uri: Uri, tls: Option<TlsConnector>) -> io::Result<TokioIo<Box<dyn Stream>>> {
    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
    let port = uri.port_u16().unwrap_or(if tls.is_some() { 443 } else { 80 });
    let stream = TcpStream::connect((host, port)).await?;
    stream.set_nodelay(true)?;
    // Otherwise data sent into a connection whose other end vanished silently would be retransmitted for a quarter of an
    // hour (tcp(7), `tcp_retries2`), and each call meanwhile would end in its timeout.
    let unanswered_ms = u32::try_from(TIMEOUT.as_millis()).map_err(io::Error::other)?;
    sockopt::set_tcp_user_timeout(&stream, unanswered_ms)?;
    let stream: Box<dyn Stream> = match tls {
        None => Box::new(stream),
        Some(tls) => {
            let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
            Box::new(tls.connect(name, stream).await?)
        }
    };
    Ok(TokioIo::new(stream))
}

/// The meaning of a response to a message of `size` bytes (OTLP specification, "OTLP/gRPC Response").
fn meaning(status: &Status, size: usize) -> Outcome<Bytes> {
    if let Some(reason) = unreached(status) {
        return Outcome::Unreachable(reason);
    }
    let reason = Reason::quoting(&format!("answered {:?}", status.code()), status.message());
    let asked = retry_delay(status.details());
    let after = asked.filter(|delay| !delay.is_zero());
    match status.code() {
        // The server itself reports it as temporary.
        Code::ResourceExhausted if asked.is_some() => Outcome::Again(reason, after),
        // The specification has no code for this. gRPC's libraries report it in these ways.
        Code::ResourceExhausted | Code::OutOfRange if says_too_large(status.message()) => Outcome::TooLarge,
        Code::ResourceExhausted if size > USUAL_LIMIT => Outcome::TooLarge,
        Code::Cancelled
        | Code::DeadlineExceeded
        | Code::Aborted
        | Code::OutOfRange
        | Code::Unavailable
        | Code::DataLoss => Outcome::Again(reason, after),
        _ => Outcome::Refused(reason),
    }
}

/// Why there was no response; `None` if there was one.
fn unreached(status: &Status) -> Option<Reason> {
    let mut cause = std::error::Error::source(status)?;
    let mut text = cause.to_string();
    while let Some(next) = cause.source() {
        // Writing to a string cannot fail.
        let _infallible = write!(text, ": {next}");
        cause = next;
    }
    Some(Reason::new(&tls::why(&text)))
}

fn says_too_large(message: &str) -> bool {
    // grpc-go and gRPC core; tonic; grpc-java.
    ["larger than max", "length too large", "exceeds maximum size"].iter().any(|text| message.contains(text))
}

/// The delay before a retry that the server asks for in its `google.rpc.RetryInfo`; 0 if that has no delay.
fn retry_delay(details: &[u8]) -> Option<Duration> {
    let status = RpcStatus::decode(details).ok()?;
    let info = status.details.iter().find(|any| any.type_url.ends_with("/google.rpc.RetryInfo"))?;
    let delay = RetryInfo::decode(info.value.as_slice()).ok()?.retry_delay.unwrap_or_default();
    let seconds = u64::try_from(delay.seconds).unwrap_or_default();
    Some(Duration::new(seconds, u32::try_from(delay.nanos).unwrap_or_default().min(999_999_999)))
}

// googleapis: google/rpc/status.proto, error_details.proto; protobuf: any.proto, duration.proto.

#[derive(Clone, PartialEq, Eq, prost::Message)]
struct RpcStatus {
    #[prost(message, repeated, tag = "3")]
    details: Vec<Any>,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
struct Any {
    #[prost(string, tag = "1")]
    type_url: String,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
struct RetryInfo {
    #[prost(message, optional, tag = "1")]
    retry_delay: Option<Delay>,
}

#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
struct Delay {
    #[prost(int64, tag = "1")]
    seconds: i64,
    #[prost(int32, tag = "2")]
    nanos: i32,
}

/// Bytes as they are.
#[derive(Clone, Copy)]
struct Raw;

impl Codec for Raw {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, message: Bytes, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        to.put(message);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(from.copy_to_bytes(from.remaining())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn details(delay: Option<Delay>) -> Bytes {
        let value = RetryInfo { retry_delay: delay }.encode_to_vec();
        let other = Any { type_url: "type.googleapis.com/google.rpc.Help".to_owned(), value: vec![1] };
        let info = Any { type_url: "type.googleapis.com/google.rpc.RetryInfo".to_owned(), value };
        RpcStatus { details: vec![other, info] }.encode_to_vec().into()
    }

    /// Only what OTLP calls retryable is retried, after the delay that the server asks for.
    #[test]
    fn meanings() {
        use Code::*;
        for code in [Cancelled, DeadlineExceeded, Aborted, OutOfRange, Unavailable, DataLoss] {
            let outcome = meaning(&Status::new(code, "x"), 1);
            assert_eq!(outcome, Outcome::Again(Reason::quoting(&format!("answered {code:?}"), "x"), None));
        }
        for code in [
            Unknown,
            InvalidArgument,
            NotFound,
            AlreadyExists,
            PermissionDenied,
            Unauthenticated,
            FailedPrecondition,
            Unimplemented,
            Internal,
            ResourceExhausted,
        ] {
            let outcome = meaning(&Status::new(code, "\x1b[2Jno"), USUAL_LIMIT);
            let Outcome::Refused(reason) = outcome else { panic!("{code:?}: {outcome:?}") };
            assert_eq!(reason.to_string(), format!("answered {code:?} (\\u{{1b}}[2Jno)"));
        }
        for (delay, wanted) in [
            (Some(Delay { seconds: 3, nanos: 500_000_000 }), Some(Duration::from_millis(3500))),
            (Some(Delay { seconds: -1, nanos: -1 }), None),
            (None, None),
        ] {
            for code in [Unavailable, ResourceExhausted] {
                let status = Status::with_details(code, "larger than max", details(delay));
                assert!(
                    matches!(meaning(&status, 1), Outcome::Again(_, after) if after == wanted),
                    "{status:?}"
                );
            }
        }
        let text = "grpc: received message larger than max (5 vs. 4)";
        assert_eq!(meaning(&Status::new(ResourceExhausted, text), 5), Outcome::TooLarge);
        assert_eq!(meaning(&Status::new(ResourceExhausted, "quota"), USUAL_LIMIT + 1), Outcome::TooLarge);
        let text = "Error, decoded message length too large: found 5 bytes, the limit is: 4 bytes";
        assert_eq!(meaning(&Status::new(OutOfRange, text), 5), Outcome::TooLarge);
        let gone = Status::from_error(Box::new(io::Error::other("gone")));
        assert_eq!(meaning(&gone, 5), Outcome::Unreachable(Reason::new("gone")));
    }
}
