//! Turns the first line of a request into its method and a template of its path. Parts that identify a person or a thing are replaced,
//! the query is ignored, and the result is visible ASCII for any input.

use std::collections::BTreeSet;

/// Maximum number of distinct templates per process.
pub const MAX_TEMPLATES: usize = 500;
/// Maximum number of further templates per process that the server was only ever seen not to have.
pub const MAX_ABSENT: usize = 100;
/// Maximum number of path segments that are kept.
const MAX_SEGMENTS: usize = 16;
/// Maximum length of a segment that may be a word.
const MAX_WORD: usize = 40;
/// Minimum length from which a segment of letters and digits is a token.
const MIN_TOKEN: usize = 16;
/// Minimum length from which hexadecimal digits are a number.
const MIN_HEX: usize = 8;

/// Stands for all paths beyond the limit.
pub const OTHER: &str = "(other)";

/// Methods of RFC 9110 (9.3) and RFC 5789.
pub const METHODS: [&str; 9] =
    ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE"];

/// Method and template of a request line, as far as they can be parsed (RFC 9112, 3). The line ends with the first CR, LF or NUL;
/// a path that is cut off by the end of `bytes` is unknown.
pub fn request_line(bytes: &[u8]) -> (Option<&'static str>, Option<String>) {
    let Some(space) = bytes.iter().position(|&byte| byte == b' ') else { return (None, None) };
    let method = METHODS.into_iter().find(|method| method.as_bytes() == &bytes[..space]);
    let target = &bytes[space + 1..];
    let ends = |byte: u8| matches!(byte, b' ' | b'?' | b'#' | b'\r' | b'\n' | 0);
    let Some(end) = target.iter().position(|&byte| ends(byte)) else { return (method, None) };
    (method, template(&target[..end]))
}

/// The status of a response, from its first bytes: `HTTP/1.1 200`.
pub fn status(line: &[u8]) -> Option<u16> {
    let rest = line.strip_prefix(b"HTTP/1.")?;
    let digits = rest.get(2..5)?;
    if rest[1] != b' ' || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let status = digits.iter().fold(0, |status, digit| status * 10 + u16::from(digit - b'0'));
    (100..600).contains(&status).then_some(status)
}

/// A path without the parts that differ between requests.
fn template(target: &[u8]) -> Option<String> {
    let path = match target.iter().position(|&byte| byte == b':') {
        // The absolute form: http://host/path. A path may contain such an address.
        Some(colon) if target[colon..].starts_with(b"://") && !target.starts_with(b"/") => {
            let rest = &target[colon + 3..];
            rest.iter().position(|&byte| byte == b'/').map_or(&b"/"[..], |slash| &rest[slash..])
        }
        _ => target,
    };
    if path == b"*" {
        return Some("*".to_owned());
    }
    let path = path.strip_prefix(b"/")?;
    let mut out = String::new();
    for (at, segment) in path.split(|&byte| byte == b'/').enumerate() {
        out.push('/');
        if at == MAX_SEGMENTS {
            out.push_str(":more");
            break;
        }
        // Strips the parameters of a segment (RFC 3986, 3.3), such as ;jsessionid=…
        let segment = segment.split(|&byte| byte == b';').next().unwrap_or_default();
        push_segment(&mut out, segment);
    }
    Some(out)
}

fn push_segment(out: &mut String, segment: &[u8]) {
    let word = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~');
    let digits = segment.iter().filter(|byte| byte.is_ascii_digit()).count();
    if !segment.iter().all(word) || segment.len() > MAX_WORD {
        // This includes percent-encoded text, e-mail addresses, and bytes that are not allowed in a URI.
        out.push_str(if is_uuid(segment) { ":uuid" } else { ":text" });
    } else if is_uuid(segment) {
        out.push_str(":uuid");
    } else if digits == segment.len() && digits > 0 {
        out.push_str(":id");
    } else if digits > 0 && segment.len() >= MIN_HEX && segment.iter().all(u8::is_ascii_hexdigit) {
        out.push_str(":hex");
    } else if digits > 1
        && segment.len() >= MIN_TOKEN
        && segment.iter().any(u8::is_ascii_alphabetic)
        && !has_parts(segment)
    {
        out.push_str(":token");
    } else if is_version(segment) {
        out.extend(segment.iter().map(|&byte| char::from(byte)));
    } else {
        let mut last_digit = false;
        for &byte in segment {
            let digit = byte.is_ascii_digit();
            match (digit, last_digit) {
                (true, false) => out.push_str(":n"),
                (true, true) => {}
                (false, _) => out.push(char::from(byte)),
            }
            last_digit = digit;
        }
    }
}

/// Whether it consists of words with separators, such as `report-2024-01.pdf`.
fn has_parts(segment: &[u8]) -> bool {
    segment
        .split(|byte| !byte.is_ascii_alphanumeric())
        .all(|part| part.iter().all(u8::is_ascii_digit) || part.iter().all(u8::is_ascii_lowercase))
}

/// `v1` to `v99`: the version of an API.
fn is_version(segment: &[u8]) -> bool {
    matches!(segment, [b'v', rest @ ..] if (1..=2).contains(&rest.len()) && rest.iter().all(u8::is_ascii_digit))
}

/// Eight, four, four, four and twelve hexadecimal digits (RFC 9562, 4).
fn is_uuid(segment: &[u8]) -> bool {
    segment.len() == 36
        && segment.iter().enumerate().all(|(at, byte)| match at {
            8 | 13 | 18 | 23 => *byte == b'-',
            _ => byte.is_ascii_hexdigit(),
        })
}

/// Whether a status says that the server has nothing at this path or for this method: 400, 404 and 405.
pub fn is_absent(status: Option<u16>) -> bool {
    matches!(status, Some(400 | 404 | 405))
}

/// Distinct endpoints, up to [`MAX_TEMPLATES`]. Those that the server was only ever seen not to have share [`MAX_ABSENT`] places of their own:
/// otherwise a scanner that asks for thousands of paths would leave no place for an endpoint that is requested later.
#[derive(Clone, Debug)]
pub struct Distinct<K> {
    known: BTreeSet<K>,
    absent: BTreeSet<K>,
}

impl<K> Default for Distinct<K> {
    fn default() -> Self {
        Self { known: BTreeSet::new(), absent: BTreeSet::new() }
    }
}

impl<K: Ord + Clone> Distinct<K> {
    /// Whether the endpoint has a place; with `room`, a new one gets one, if any is left. `status`: of the response.
    pub fn admit(&mut self, endpoint: &K, status: Option<u16>, room: bool) -> bool {
        if self.known.contains(endpoint) {
            return true;
        }
        let has_place = self.absent.contains(endpoint);
        if is_absent(status) {
            let admitted = has_place || room && self.absent.len() < MAX_ABSENT;
            if admitted && !has_place {
                self.absent.insert(endpoint.clone());
            }
            return admitted;
        }
        if !(has_place || room) || self.known.len() >= MAX_TEMPLATES {
            return has_place;
        }
        self.absent.remove(endpoint);
        self.known.insert(endpoint.clone())
    }

    /// Number of endpoints that have a place.
    pub fn count(&self) -> usize {
        self.known.len() + self.absent.len()
    }
}

/// The templates of one process.
#[derive(Debug, Default)]
pub struct Templates(Distinct<String>);

impl Templates {
    /// Returns the template of a request with this status, or [`OTHER`] if there are too many already.
    pub fn admit(&mut self, template: String, status: Option<u16>) -> String {
        if self.0.admit(&template, status, true) { template } else { OTHER.to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn path(line: &str) -> Option<String> {
        request_line(line.as_bytes()).1
    }

    /// Parts that differ between requests are replaced; words and versions stay.
    #[test]
    fn templates() {
        for (line, expected) in [
            ("GET / HTTP/1.1\r\n", "/"),
            ("GET /orders/4711 HTTP/1.1", "/orders/:id"),
            ("GET /api/v2/orders HTTP/1.1", "/api/v2/orders"),
            ("GET /u/550e8400-e29b-41d4-a716-446655440000/x HTTP/1.1", "/u/:uuid/x"),
            ("GET /blob/deadbeef01 HTTP/1.1", "/blob/:hex"),
            ("GET /page2 HTTP/1.1", "/page:n"),
            ("GET /reset/aGVsbG8gd29ybGQx9A HTTP/1.1", "/reset/:token"),
            ("GET /a%40b.example/x HTTP/1.1", "/:text/x"),
            ("GET /me@host/x HTTP/1.1", "/:text/x"),
            ("GET /x;jsessionid=ABC123 HTTP/1.1", "/x"),
            ("GET http://host:80/a/1?q HTTP/1.1", "/a/:id"),
            ("GET /proxy/http://example.com/orders/5 HTTP/1.1", "/proxy/:text//example.com/orders/:id"),
            ("GET /x://secret/y HTTP/1.1", "/:text//secret/y"),
            ("OPTIONS * HTTP/1.1", "*"),
            ("GET /docs/report-2024-01.pdf HTTP/1.1", "/docs/report-:n-:n.pdf"),
        ] {
            assert_eq!(path(line).as_deref(), Some(expected), "{line}");
        }
    }

    /// The query is ignored, whatever it contains; a truncated line gives no path.
    #[test]
    fn queries() {
        assert_eq!(path("GET /login?user=me&password=hunter HTTP/1.1").as_deref(), Some("/login"));
        assert_eq!(path("GET /login#password HTTP/1.1").as_deref(), Some("/login"));
        assert_eq!(path("GET /a/long/path/that/does/not/e"), None);
        assert_eq!(request_line(b"GET"), (None, None));
        assert_eq!(request_line(b"BREW /pot HTTP/1.1").0, None);
        assert_eq!(request_line(b"PATCH /pot HTTP/1.1").0, Some("PATCH"));
    }

    #[test]
    fn statuses() {
        assert_eq!(status(b"HTTP/1.1 200"), Some(200));
        assert_eq!(status(b"HTTP/1.0 404"), Some(404));
        assert_eq!(status(b"HTTP/1.1 999"), None);
        assert_eq!(status(b"HTTP/1.12200"), None);
        assert_eq!(status(&[0; 12]), None);
    }

    /// Paths that a server does not have leave room for those that it has; one that it has later moves there.
    #[test]
    fn absent() {
        let mut templates = Templates::default();
        let mut admitted = |path: &str, status| templates.admit(path.to_owned(), Some(status)) == path;
        for at in 0..MAX_TEMPLATES + MAX_ABSENT {
            assert_eq!(admitted(&format!("/scan{at}.php"), 404), at < MAX_ABSENT);
        }
        assert!(admitted("/orders", 200) && admitted("/orders", 404) && admitted("/scan7.php", 200));
        // The place of the one that has moved is free.
        assert!(admitted("/one", 405) && !admitted("/two", 400));
        for at in 2..MAX_TEMPLATES {
            assert!(admitted(&format!("/{at}"), 200));
        }
        // Without a place among those that the server has, it keeps its own.
        assert!(!admitted("/more", 200) && admitted("/one", 200));
    }

    /// The number of endpoints is bounded.
    #[test]
    fn capped() {
        let mut templates = Templates::default();
        for at in 0..MAX_TEMPLATES {
            assert_eq!(templates.admit(format!("/{at}"), Some(200)), format!("/{at}"));
        }
        assert_eq!(templates.admit("/more".to_owned(), None), OTHER);
        assert_eq!(templates.admit("/7".to_owned(), Some(404)), "/7");
    }

    proptest! {
        /// Any bytes result in visible ASCII of bounded length, without anything after a question mark.
        #[test]
        fn hostile(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let line = [b"GET /", bytes.as_slice(), b"?SECRETS"].concat();
            if let Some(path) = request_line(&line).1 {
                prop_assert!(path.bytes().all(|byte| matches!(byte, 0x21..=0x7e)), "{path}");
                prop_assert!(path.len() <= (MAX_SEGMENTS + 1) * (2 * MAX_WORD + 1));
                prop_assert!(!path.contains("SECRETS") && !path.contains('?'));
            }
            let _any = status(&bytes);
        }
    }
}
