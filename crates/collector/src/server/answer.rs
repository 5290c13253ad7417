//! Answers to requests.

use std::borrow::Cow;

use hyper::{StatusCode, header};

use crate::printable::{printable, printable_json, printable_lines};

/// An answer that has not been sent yet.
pub(super) struct Answer {
    pub(super) code: StatusCode,
    pub(super) text: String,
    pub(super) kind: &'static str,
    pub(super) headers: Vec<(header::HeaderName, String)>,
}

const TEXT: &str = "text/plain; charset=utf-8";
const JSON: &str = "application/json";
const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const OPENMETRICS: &str = "text/plain; version=0.0.4; charset=utf-8";

impl Answer {
    pub(super) fn new(code: StatusCode, text: impl Into<String>) -> Self {
        Self { code, text: text.into(), kind: TEXT, headers: Vec::new() }
    }

    pub(super) fn bad(text: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, text)
    }

    pub(super) fn json(code: StatusCode, text: impl Into<String>) -> Self {
        Self { kind: JSON, ..Self::new(code, text) }
    }

    /// Counters in Prometheus' text format.
    pub(super) fn openmetrics(text: String) -> Self {
        Self { kind: OPENMETRICS, ..Self::new(StatusCode::OK, text) }
    }

    /// A page. Names from outside must already be escaped.
    pub(super) fn page(code: StatusCode, text: String) -> Self {
        let headers = vec![
            (header::CONTENT_SECURITY_POLICY, gctrace_pages::POLICY.to_owned()),
            (header::CACHE_CONTROL, "no-store".to_owned()),
            // With `no-referrer`, browsers would send forms with the origin `null`.
            (header::REFERRER_POLICY, "same-origin".to_owned()),
        ];
        Self { kind: HTML, headers, ..Self::new(code, text) }
    }

    /// The style sheet of pages.
    pub(super) fn style() -> Self {
        let headers = vec![(header::CACHE_CONTROL, "max-age=3600".to_owned())];
        Self { kind: CSS, headers, ..Self::new(StatusCode::OK, gctrace_pages::STYLE) }
    }

    /// A redirect to another page, with a new cookie.
    pub(super) fn elsewhere(to: &str, cookie: String) -> Self {
        let headers = vec![(header::LOCATION, to.to_owned()), (header::SET_COOKIE, cookie)];
        Self { headers, ..Self::new(StatusCode::SEE_OTHER, "") }
    }

    /// The text, made printable: text from outside in it cannot control a terminal. Only reports have several lines.
    pub(super) fn shown(&self) -> Cow<'_, str> {
        match self.kind {
            JSON => printable_json(&self.text),
            HTML | CSS => Cow::Borrowed(&self.text),
            _ if self.code.is_success() => printable_lines(&self.text),
            _ => printable(&self.text),
        }
    }

    /// The answer when the store failed. Agents retry after a 500, and only then.
    pub(super) fn failed() -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "the collector's store failed; send it again")
    }
}
