//! Maps requests to answers.

use std::{sync::Arc, time::Duration};

use gctrace_report::export::{
    profile::{Format, Graph, Measure},
    window::Window,
};
use gctrace_tunemygc::printable::printable;
use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Incoming},
    header::{self, HeaderName, HeaderValue},
};

use crate::{
    Choose,
    compare::Compared,
    graph::Drawn,
    live::{Live, Now},
    page,
    source::{Source, Whole},
    token::{Once, Token},
    wanted::Wanted,
};

/// How long a request waits for the recording to be read before the page shows the progress.
const PATIENCE: Duration = Duration::from_millis(600);
/// Maximum length of a query, bytes.
const QUERY: usize = 4096;
/// The policy of pages: their own script and style sheet, and graphs in a frame.
const POLICY: &str = "default-src 'none'; style-src 'self'; script-src 'self'; frame-src 'self'; form-action 'self'; base-uri 'none'; \
     frame-ancestors 'none'";
/// An addition for live pages: their script requests new figures.
const LIVE_POLICY: &str = "; connect-src 'self'";
const TEXT: &str = "text/plain; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const HTML: &str = "text/html; charset=utf-8";

/// What is served.
#[derive(Debug)]
pub(crate) enum Served {
    /// A recording, and optionally one to compare it with.
    File { source: Arc<Source>, against: Option<Arc<Source>> },
    /// A run in progress.
    Live(Box<Live>),
}

/// State shared by all connections.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) served: Served,
    pub(crate) token: Token,
    pub(crate) once: Once,
    pub(crate) choose: Choose,
}

/// An answer that has not been sent yet.
#[derive(Debug)]
struct Answer {
    code: StatusCode,
    kind: &'static str,
    body: Bytes,
    headers: Vec<(HeaderName, String)>,
}

impl Answer {
    fn new(code: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Self {
        let headers = vec![(header::CONTENT_SECURITY_POLICY, "default-src 'none'".to_owned())];
        Self { code, kind, body: body.into(), headers }
    }

    fn text(code: StatusCode, text: impl Into<String>) -> Self {
        Self::new(code, TEXT, text.into())
    }

    /// A page. Names from outside must already be escaped.
    fn page(code: StatusCode, text: String) -> Self {
        Self::new(code, HTML, text).with(header::CONTENT_SECURITY_POLICY, POLICY.to_owned())
    }

    fn with(mut self, name: HeaderName, value: String) -> Self {
        self.headers.retain(|(other, _)| *other != name);
        self.headers.push((name, value));
        self
    }

    fn to(address: String) -> Self {
        Self::text(StatusCode::SEE_OTHER, "").with(header::LOCATION, address)
    }

    fn failed(what: &str, error: &dyn std::fmt::Display) -> Self {
        log::error!("{what}: {error}");
        Self::text(StatusCode::INTERNAL_SERVER_ERROR, format!("{what}: {}\n", printable(&error.to_string())))
    }
}

/// A file that can be downloaded.
struct Save {
    /// The last part of its address.
    name: &'static str,
    /// The extension of such files.
    extension: &'static str,
    kind: &'static str,
    format: Format,
    /// Whether it needs the times of samples.
    times: bool,
}

/// The files besides flame graphs.
const SAVES: [Save; 4] = [
    Save { name: "pprof", extension: "pb.gz", kind: "application/gzip", format: Format::Pprof, times: false },
    Save {
        name: "firefox",
        extension: "firefox.json.gz",
        kind: "application/gzip",
        format: Format::Firefox,
        times: true,
    },
    Save {
        name: "speedscope",
        extension: "speedscope.json",
        kind: "application/json",
        format: Format::Speedscope,
        times: true,
    },
    Save {
        name: "perfetto",
        extension: "pftrace",
        kind: "application/octet-stream",
        format: Format::Perfetto,
        times: true,
    },
];

/// Answers a request.
pub(crate) async fn answer(shared: Arc<Shared>, request: Request<Incoming>) -> Response<Full<Bytes>> {
    let answer = route(shared, &request).await;
    let mut response = Response::new(Full::new(answer.body));
    *response.status_mut() = answer.code;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(answer.kind));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert("cross-origin-resource-policy", HeaderValue::from_static("same-origin"));
    headers.insert("cross-origin-opener-policy", HeaderValue::from_static("same-origin"));
    for (name, value) in answer.headers {
        // A value that is not valid in a header is omitted.
        if let Ok(value) = HeaderValue::from_str(&value) {
            headers.insert(name, value);
        }
    }
    response
}

/// Whether a request addresses this host by a loopback name. A page from elsewhere can make a browser use a name of its
/// own that resolves to this host.
fn is_local(host: Option<&HeaderValue>) -> bool {
    let Some(host) = host.and_then(|host| host.to_str().ok()) else { return false };
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.parse::<u16>().is_ok() => name,
        _ => host,
    };
    ["127.0.0.1", "localhost", "[::1]"].iter().any(|local| name.eq_ignore_ascii_case(local))
        || name.parse::<std::net::Ipv4Addr>().is_ok_and(|address| address.is_loopback())
}

fn none() -> Answer {
    Answer::text(
        StatusCode::NOT_FOUND,
        "there is nothing; the whole address is needed, as gctrace printed it\n",
    )
}

async fn route(shared: Arc<Shared>, request: &Request<Incoming>) -> Answer {
    if !is_local(request.headers().get(header::HOST)) {
        return Answer::text(
            StatusCode::FORBIDDEN,
            "ask for 127.0.0.1 or localhost, as gctrace printed it\n",
        );
    }
    let path = request.uri().path().trim_start_matches('/').to_owned();
    let (first, rest) =
        path.split_once('/').map_or((path.as_str(), None), |(first, rest)| (first, Some(rest)));
    let get = matches!(*request.method(), Method::GET | Method::HEAD);
    if first == "once" && get {
        // A HEAD request, as for link previews, does not use it up.
        let opens = *request.method() == Method::GET && shared.once.takes(rest.unwrap_or_default());
        return if opens { Answer::to(format!("/{}/", shared.token.text())) } else { none() };
    }
    if !shared.token.is(first) {
        return none();
    }
    if !get {
        return Answer::text(StatusCode::METHOD_NOT_ALLOWED, "pages are read by GET and HEAD\n")
            .with(header::ALLOW, "GET, HEAD".to_owned());
    }
    let Some(rest) = rest.map(ToOwned::to_owned) else {
        return Answer::to(format!("/{}/", shared.token.text()));
    };
    let query = request.uri().query().unwrap_or_default().to_owned();
    if query.len() > QUERY {
        return Answer::text(StatusCode::URI_TOO_LONG, "the query is too long\n");
    }
    match rest.as_str() {
        "style.css" => return Answer::new(StatusCode::OK, "text/css; charset=utf-8", gctrace_pages::STYLE),
        "brush.js" => return Answer::new(StatusCode::OK, SCRIPT, include_str!("brush.js")),
        "live.js" if matches!(shared.served, Served::Live(_)) => {
            return Answer::new(StatusCode::OK, SCRIPT, include_str!("live.js"));
        }
        _ => {}
    }
    let done = tokio::task::spawn_blocking(move || from_recording(&shared, &rest, &query)).await;
    done.unwrap_or_else(|error| Answer::failed("the request failed; please report it", &error))
}

fn from_recording(shared: &Shared, path: &str, query: &str) -> Answer {
    let known = ["", "flamegraph.svg", "diff.svg"].contains(&path) || path.starts_with("save/");
    match &shared.served {
        Served::File { source, against } if known => {
            from_source(shared, (source, against.as_deref()), path, query, None)
        }
        Served::Live(live) if path == "live" => standing(shared, live, query),
        Served::Live(live) if known => match live.source() {
            Ok(source) => from_source(shared, (&source, None), path, query, Some(&live.now())),
            Err(error) => Answer::failed("reading what is kept", &error),
        },
        _ => none(),
    }
}

/// The current state, for a script: the part of a live page that changes each second.
fn standing(shared: &Shared, live: &Live, query: &str) -> Answer {
    let header = live.header();
    match Wanted::of(query, &header, None, shared.choose) {
        Ok(wanted) => Answer::page(StatusCode::OK, page::now(&header, &live.now(), &wanted).into_string()),
        Err(why) => Answer::text(StatusCode::BAD_REQUEST, printable(&why)),
    }
}

fn from_source(
    shared: &Shared,
    (source, against): (&Source, Option<&Source>),
    path: &str,
    query: &str,
    live: Option<&Now>,
) -> Answer {
    let save = path.strip_prefix("save/");
    let wanted = match Wanted::of(query, &source.header, against.map(|other| &other.header), shared.choose) {
        Ok(wanted) => wanted,
        Err(why) => return Answer::page(StatusCode::BAD_REQUEST, page::refused(source, &why)),
    };
    let whole = match source.whole(PATIENCE) {
        Ok(Some(whole)) => whole,
        Ok(None) => {
            let code = if path.is_empty() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
            return Answer::page(code, page::reading(source));
        }
        Err(why) => return Answer::page(StatusCode::INTERNAL_SERVER_ERROR, page::failed(source, &why)),
    };
    let Wanted { window, of, .. } = &wanted;
    if let Some(name) = save {
        return saved(source, &whole, name, window, *of);
    }
    let compared = match compared(&wanted, source, &whole, against) {
        Ok(Some(compared)) => compared,
        Ok(None) => return Answer::page(StatusCode::OK, page::reading(against.unwrap_or(source))),
        Err(why) => return Answer::failed("comparing", &why),
    };
    if path == "diff.svg" {
        return compared.map_or_else(none, |compared| graph(&compared.graph));
    }
    let view = match source.view(&whole, window) {
        Ok(view) => view,
        Err(error) => return Answer::failed("reading the recording", &error),
    };
    let drawn = match view.graphs.of(&view.kept, *of) {
        Ok(drawn) => drawn,
        Err(error) => return Answer::failed("drawing the flame graph", &error),
    };
    if path.is_empty() {
        let page = Answer::page(
            StatusCode::OK,
            page::page(source, &whole, &view, &wanted, &drawn, (live, compared.as_deref())),
        );
        return match live {
            Some(_) => page.with(header::CONTENT_SECURITY_POLICY, format!("{POLICY}{LIVE_POLICY}")),
            None => page,
        };
    }
    graph(&drawn)
}

fn graph(drawn: &Drawn) -> Answer {
    Answer::new(StatusCode::OK, "image/svg+xml", drawn.svg.clone())
        .with(header::CONTENT_SECURITY_POLICY, drawn.policy.clone())
}

/// The requested comparison, if any; the outer `None` means that the other recording is still being read.
#[expect(clippy::option_option, reason = "there may be none to wait for")]
fn compared(
    wanted: &Wanted,
    source: &Source,
    whole: &Whole,
    against: Option<&Source>,
) -> Result<Option<Option<Arc<Compared>>>, String> {
    let Wanted { window, other: Some(other), .. } = wanted else { return Ok(Some(None)) };
    let Some(against) = against else {
        // If A is marked and B is not, there is nothing to compare yet.
        let chosen = window.cuts_time();
        return chosen.then(|| source.compared(whole, window, (source, whole, other))).transpose().map(Some);
    };
    let Some(its) = against.whole(PATIENCE)? else { return Ok(None) };
    source.compared(whole, window, (against, &its, other)).map(|compared| Some(Some(compared)))
}

/// A file with the bytes that `gctrace report` writes.
fn saved(source: &Source, whole: &Whole, name: &str, window: &Window, of: Measure) -> Answer {
    let graph = Graph { of, ..Graph::default() };
    let flame = Save {
        name: "flamegraph",
        extension: "svg",
        kind: "image/svg+xml",
        format: Format::FlameGraph(graph),
        times: false,
    };
    let folded =
        Save { name: "folded", extension: "folded", kind: TEXT, format: Format::Folded(graph), times: false };
    let Some(save) = SAVES.into_iter().chain([flame, folded]).find(|save| save.name == name) else {
        return none();
    };
    let view =
        if save.times { source.with_times(whole, window).map(Arc::new) } else { source.view(whole, window) };
    let view = match view {
        Ok(view) => view,
        Err(error) => return Answer::failed("reading the recording", &error),
    };
    // A page can say what it lacks; a file cannot.
    if let Some(why) = &view.damage {
        return Answer::failed("reading the recording", why);
    }
    let mut bytes = Vec::new();
    if let Err(error) = view.kept.write(save.format, &mut bytes) {
        return Answer::failed("writing the file", &error);
    }
    Answer::new(StatusCode::OK, save.kind, bytes).with(
        header::CONTENT_DISPOSITION,
        format!("attachment; filename=\"{}.{}\"", plain(&source.name()), save.extension),
    )
}

/// A file name that is valid on any host: other characters become `_`.
fn plain(name: &str) -> String {
    let name = name.strip_suffix(".gctrace").unwrap_or(name);
    let keep = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    let text: String = name.chars().map(keep).take(100).collect();
    let text = text.trim_start_matches('.');
    if text.is_empty() { "recording".to_owned() } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Only loopback names are accepted as names of this host.
    #[test]
    fn hosts() {
        let is = |host: &str| is_local(Some(&HeaderValue::from_str(host).unwrap()));
        for local in
            ["127.0.0.1:8080", "127.0.0.1", "localhost:1", "LOCALHOST", "[::1]:80", "[::1]", "127.3.2.1:9"]
        {
            assert!(is(local), "{local}");
        }
        for other in [
            "",
            "example.com:80",
            "127.0.0.1.example.com",
            "localhost.",
            "10.0.0.1:80",
            "127.0.0.1:x",
            "::1",
            "a@127.0.0.1",
        ] {
            assert!(!is(other), "{other}");
        }
        assert!(!is_local(None));
    }

    /// File names cannot escape their directory or the header.
    #[test]
    fn names() {
        assert_eq!(plain("puma-1.gctrace"), "puma-1");
        assert_eq!(plain("../a\"b\r\n.gctrace"), "_a_b__");
        assert_eq!((plain(".gctrace"), plain("ü")), ("recording".to_owned(), "_".to_owned()));
    }
}
