//! The address at which people and agents reach the collector.

/// Checks the prefix of public addresses: a scheme and a host. It has no path, because pages link to each other from the root.
///
/// # Errors
///
/// The text is anything else; the message says what it should be.
pub fn public_url(text: &str) -> Result<String, String> {
    const USAGE: &str = "give http:// or https:// and a host, with a port (up to 65535) where that is not the usual one, such as https://gc.example.com; a path \
                         in front of the collector is not supported";
    let url = text.parse::<hyper::Uri>().map_err(|_| USAGE.to_owned())?;
    let is_web = matches!(url.scheme_str(), Some("http" | "https"));
    let is_host = url.authority().is_some_and(|of| !of.host().is_empty() && !of.as_str().contains('@'));
    // A port above 65535 parses, but is none.
    let port = url.authority().and_then(|of| of.as_str().strip_prefix(of.host())?.strip_prefix(':'));
    let is_port = port.is_none_or(str::is_empty) || url.port_u16().is_some();
    if is_web && is_host && is_port && url.path() == "/" && url.query().is_none() {
        return Ok(text.trim_end_matches('/').to_owned());
    }
    Err(USAGE.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A text that is not a valid prefix of addresses is refused, so that agents never receive it.
    #[test]
    fn public_urls() {
        for (text, url) in [
            ("https://gc.example", "https://gc.example"),
            ("https://gc.example.com/", "https://gc.example.com"),
            ("http://[::1]:9292", "http://[::1]:9292"),
        ] {
            assert_eq!(public_url(text).as_deref(), Ok(url));
        }
        for wrong in [
            "",
            "foo",
            "gc.example:443",
            "javascript:x",
            "https://",
            "https://gc.example/x/",
            "https://gc.example?x",
            "https://me:secret@gc.example",
            "https://gc.example\u{1b}[2J",
            "ftp://gc.example",
            "http://gc.example:65536",
            "https://[::1]:70000",
        ] {
            assert!(public_url(wrong).is_err(), "{wrong}");
        }
    }
}
