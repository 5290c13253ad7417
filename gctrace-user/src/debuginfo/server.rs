//! debuginfod: debug information over HTTP, by build id. Only used if servers are named; otherwise nothing is ever sent.

use std::fs::File;
use std::io::{self, Read, Seek as _, Write as _};
use std::time::Duration;

use ureq::Agent;

use super::Reject;
use crate::elf::{BuildId, SymbolTable};
use crate::tls;

/// Maximum size in bytes of a symbol or string table; no Ruby's is larger.
const MAX_SECTION: u64 = 32 << 20;
/// Maximum size in bytes of a debug file; the download of a larger one is aborted.
const MAX_FILE: u64 = 512 << 20;
/// Timeout of one response, from the DNS lookup to the last byte.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Timeout of the connection alone: an unreachable server should not cost more.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// debuginfod servers.
#[derive(Clone, Debug)]
pub struct Servers {
    urls: Vec<String>,
    agent: Agent,
}

/// An invalid server name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` in DEBUGINFOD_URLS is not an http:// or https:// URL; it is ignored")]
pub struct InvalidServer(String);

impl Servers {
    /// The servers in the text of `DEBUGINFOD_URLS`: URLs separated by spaces. `None` if there are none.
    /// Invalid ones are reported and left out.
    pub fn parse(text: &str) -> (Option<Self>, Vec<InvalidServer>) {
        Self::with_timeout(text, TIMEOUT)
    }

    /// Like [`Servers::parse`], with another time limit for one response.
    pub fn with_timeout(text: &str, timeout: Duration) -> (Option<Self>, Vec<InvalidServer>) {
        let known = |url: &&str| url.starts_with("http://") || url.starts_with("https://");
        let (urls, others): (Vec<&str>, Vec<&str>) = text.split_ascii_whitespace().partition(known);
        let urls: Vec<String> = urls.iter().map(|url| url.trim_end_matches('/').to_owned()).collect();
        let invalid = others.into_iter().map(|url| InvalidServer(url.to_owned())).collect();
        let agent = tls::http(timeout, CONNECT_TIMEOUT).build().into();
        ((!urls.is_empty()).then_some(Self { urls, agent }), invalid)
    }

    /// Their URLs, in the order in which they are queried.
    pub fn urls(&self) -> &[String] {
        &self.urls
    }

    fn get(&self, url: &str, limit: u64) -> Result<impl Read + use<>, Reject> {
        let mut response = self.agent.get(url).call().map_err(|error| match error {
            ureq::Error::StatusCode(404) => Reject::Absent,
            error => Reject::Server(tls::why(&error.to_string()).into_owned()),
        })?;
        let size = response.body().content_length().unwrap_or(0);
        if size > limit {
            return Err(Reject::TooLarge(size, limit));
        }
        let body = std::mem::replace(response.body_mut(), ureq::Body::builder().data(Vec::new()));
        // One byte more than allowed shows that the response is too long.
        Ok(body.into_with_config().limit(limit + 1).reader().take(limit + 1))
    }
}

/// Requests a symbol table: the two sections alone if the server supports it (some 300 KB), otherwise the whole file.
pub(super) fn symbols(servers: &Servers, url: &str, id: &BuildId) -> Result<SymbolTable, Reject> {
    let section = |name: &str| {
        let mut bytes = Vec::new();
        servers
            .get(&format!("{url}/buildid/{id}/section/{name}"), MAX_SECTION)?
            .read_to_end(&mut bytes)
            .map_err(|error| broken(&error))?;
        let size = bytes.len() as u64;
        if size > MAX_SECTION { Err(Reject::TooLarge(size, MAX_SECTION)) } else { Ok(bytes) }
    };
    match section(".symtab").and_then(|symbols| Ok((symbols, section(".strtab")?))) {
        Ok((symbols, strings)) => {
            let table = SymbolTable::parse(&symbols, strings);
            if table.is_empty() { Err(Reject::NoSymbols) } else { Ok(table) }
        }
        // Old servers do not support sections.
        Err(Reject::Absent) => {
            let file = debug_file(servers, url, id)?;
            match super::build_id_of(&file)? {
                Some(found) if found == *id => super::symtab(&file),
                Some(found) => Err(Reject::OtherBuild { found, wanted: id.clone() }),
                None => Err(Reject::Server("the file that it sent has no build id".to_owned())),
            }
        }
        Err(reject) => Err(reject),
    }
}

/// Downloads a debug file to a nameless temporary file.
pub(super) fn debug_file(servers: &Servers, url: &str, id: &BuildId) -> Result<File, Reject> {
    let mut body = servers.get(&format!("{url}/buildid/{id}/debuginfo"), MAX_FILE)?;
    let mut file = tempfile::tempfile()?;
    let mut buffer = vec![0; 1 << 16];
    let mut size = 0;
    loop {
        let read = body.read(&mut buffer).map_err(|error| broken(&error))?;
        if read == 0 {
            break;
        }
        size += read as u64;
        if size > MAX_FILE {
            return Err(Reject::TooLarge(size, MAX_FILE));
        }
        file.write_all(&buffer[..read])?;
    }
    file.rewind()?;
    Ok(file)
}

fn broken(error: &io::Error) -> Reject {
    Reject::Server(format!("the response was cut off: {error}"))
}
