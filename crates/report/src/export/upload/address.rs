//! Addresses of servers, as entered by users.

use ureq::http::Uri;

/// The protocol of a server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.1.
    #[default]
    Http,
    /// gRPC.
    Grpc,
}

/// The destination of uploads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// `http://` or `https://` address without a trailing `/`.
    pub url: String,
    /// The protocol.
    pub protocol: Protocol,
}

/// Default port of OTLP/gRPC.
const OTLP_PORT: u16 = 4317;

impl Address {
    /// A server reached over HTTP. `None` if it is not a valid http:// or https:// address (see [`web`]).
    pub fn http(url: &str) -> Option<Self> {
        web(url).map(|url| Self { url, protocol: Protocol::Http })
    }

    /// A server reached over gRPC. `None` if it is not a grpc://, grpcs://, http:// or https:// address of a host.
    pub fn grpc(text: &str) -> Option<Self> {
        let text = text.trim_end_matches('/');
        let own = text.strip_prefix("grpcs://").map(|host| ("https", host));
        let own = own.or_else(|| text.strip_prefix("grpc://").map(|host| ("http", host)));
        let url = match own {
            Some((scheme, host)) => {
                let uri = parse(&format!("{scheme}://{host}"))?;
                let port = if uri.port().is_none() { format!(":{OTLP_PORT}") } else { String::new() };
                format!("{scheme}://{host}{port}")
            }
            None => web(text)?,
        };
        // gRPC has methods, and no paths before them.
        let uri: Uri = url.parse().ok()?;
        (uri.host().is_some_and(|host| !host.is_empty()) && uri.path() == "/" && uri.query().is_none())
            .then_some(Self { url, protocol: Protocol::Grpc })
    }

    /// The address for messages, without user name and password.
    pub(super) fn shown(&self) -> String {
        let shown = shown(&self.url);
        match self.protocol {
            Protocol::Http => shown,
            Protocol::Grpc => shown.replacen("http", "grpc", 1),
        }
    }

    /// An OTLP receiver. The protocol is that of the address's scheme, otherwise that of the flag, otherwise that of
    /// OpenTelemetry's environment variable, otherwise HTTP. An error says what is wrong.
    pub fn otlp(text: &str, flag: Option<Protocol>, environment: Option<&str>) -> Result<Self, String> {
        let is_grpc = text.starts_with("grpc://") || text.starts_with("grpcs://");
        if is_grpc && flag == Some(Protocol::Http) {
            return Err(format!("`{}` speaks gRPC, --otlp-protocol says HTTP", shown(text)));
        }
        let protocol = match (flag, environment) {
            _ if is_grpc => Protocol::Grpc,
            (Some(flag), _) => flag,
            (None, None | Some("" | "http/protobuf")) => Protocol::Http,
            (None, Some("grpc")) => Protocol::Grpc,
            (None, Some(other)) => {
                return Err(format!(
                    "OTEL_EXPORTER_OTLP_PROTOCOL is `{other}`, gctrace speaks grpc and http/protobuf: give --otlp-protocol"
                ));
            }
        };
        match protocol {
            Protocol::Http => Self::http(text).ok_or_else(|| {
                format!(
                    "`{}` is not an http:// or https:// address (or grpc://, grpcs://) without query and with a port, if any, up to 65535",
                    shown(text)
                )
            }),
            Protocol::Grpc => Self::grpc(text).ok_or_else(|| {
                format!("`{}` is not a gRPC address, such as grpc://localhost:4317", shown(text))
            }),
        }
    }
}

/// An http:// or https:// address without a trailing `/`, to which paths are appended; `None` if it is not one, or has
/// a query, a fragment or characters that are invalid in an address.
pub fn web(text: &str) -> Option<String> {
    let url = text.trim_end_matches('/');
    let host = url.strip_prefix("https://").or_else(|| url.strip_prefix("http://"))?;
    let is_plain = !host.is_empty() && !host.starts_with('/') && !url.contains(['?', '#']);
    (is_plain && parse(url).is_some()).then(|| url.to_owned())
}

/// Parses an address. `None` if it is not valid, or its port is none: [`Uri`] takes any digits and then has no port, so that data would go
/// to the usual port of the scheme.
fn parse(url: &str) -> Option<Uri> {
    let uri: Uri = url.parse().ok()?;
    let port = uri.authority().and_then(|authority| {
        let text = authority.as_str();
        let host = text.rsplit_once('@').map_or(text, |(_, host)| host);
        host.strip_prefix(authority.host())?.strip_prefix(':')
    });
    (port.is_none_or(str::is_empty) || uri.port_u16().is_some()).then_some(uri)
}

/// An address for messages, without user name and password.
pub fn shown(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let host = rest[..end].rsplit_once('@').map_or(0, |(user, _)| user.len() + 1);
    format!("{scheme}://{}", &rest[host..])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Addresses whose port is none: data for them would go to the usual port of their scheme.
    const NO_PORTS: [&str; 5] = [
        "http://h:65536",
        "http://h:99999/x",
        "https://[::1]:70000",
        "http://u:p@h:4294967377",
        "http://6:65536",
    ];

    /// Neither name nor password is shown, and nothing else is missing.
    #[test]
    fn without_user() {
        for (url, expected) in [
            ("https://u:p@w@h:1/a@b?c", "https://h:1/a@b?c"),
            ("http://token@[::1]", "http://[::1]"),
            ("http://h/@x", "http://h/@x"),
            ("http://h?u@x", "http://h?u@x"),
            ("h", "h"),
        ] {
            assert_eq!(shown(url), expected);
        }
    }

    /// A gRPC address is shown as one.
    #[test]
    fn schemes() {
        for (text, expected) in [
            ("grpc://u:p@h", "grpc://h:4317"),
            ("grpcs://h:1", "grpcs://h:1"),
            ("https://u@h:1/x", "https://h:1/x"),
        ] {
            assert_eq!(Address::otlp(text, None, None).unwrap().shown(), expected);
        }
        for text in ["http://u:secret@h/x?y=1", "grpc://u:secret@h/x#y"] {
            let error = Address::otlp(text, None, None).unwrap_err();
            assert!(!error.contains("secret"), "{error}");
        }
    }

    /// Addresses are accepted with and without a trailing slash.
    #[test]
    fn addresses() {
        assert_eq!(web("http://h:1/a/").as_deref(), Some("http://h:1/a"));
        for text in
            ["", "h:1", "ftp://h", "https://", "http:///x", "http://h/x?y=1", "http://h/x#y", "http://h/a b"]
        {
            assert_eq!(web(text), None, "{text}");
        }
        for text in NO_PORTS {
            assert_eq!(web(text), None, "{text}");
        }
    }

    /// The scheme precedes the flag, which precedes the environment; contradictions are refused.
    #[test]
    fn otlp() {
        let of = |text, flag, environment| Address::otlp(text, flag, environment);
        let (http, grpc) = (Some(Protocol::Http), Some(Protocol::Grpc));
        for (text, flag, environment, url, protocol) in [
            ("http://h:4318/", None, None, "http://h:4318", Protocol::Http),
            ("http://h:4318/x", None, Some("http/protobuf"), "http://h:4318/x", Protocol::Http),
            ("http://h:4317", None, Some("grpc"), "http://h:4317", Protocol::Grpc),
            ("https://h:4317/", grpc, Some("http/protobuf"), "https://h:4317", Protocol::Grpc),
            ("http://h:4318", http, Some("grpc"), "http://h:4318", Protocol::Http),
            ("grpc://h", None, Some("http/protobuf"), "http://h:4317", Protocol::Grpc),
            ("grpc://h:1/", grpc, None, "http://h:1", Protocol::Grpc),
            ("grpcs://[::1]", None, None, "https://[::1]:4317", Protocol::Grpc),
        ] {
            assert_eq!(of(text, flag, environment), Ok(Address { url: url.to_owned(), protocol }), "{text}");
        }
        for (text, flag, environment) in [
            ("grpc://h", http, None),
            ("grpc://h/path", None, None),
            ("http://h/v1", grpc, None),
            ("grpc://", None, None),
            ("grpc:///x", None, None),
            ("h:4317", grpc, None),
            ("http://h:4318", None, Some("http/json")),
        ] {
            assert!(of(text, flag, environment).is_err(), "{text}: {:?}", of(text, flag, environment));
        }
        for text in NO_PORTS {
            for (text, flag) in
                [(text.to_owned(), http), (text.to_owned(), grpc), (text.replacen("http", "grpc", 1), None)]
            {
                assert!(Address::otlp(&text, flag, None).is_err(), "{text}");
            }
        }
    }
}
