//! Hand-written HTTP/1.1: the exact bytes of the test are sent, even where a library would not allow them.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};

use anyhow::{Context as _, Result, ensure};

use crate::PATIENCE;

/// A response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Status code.
    pub code: u16,
    /// Headers by lower-case name.
    pub headers: BTreeMap<String, String>,
    /// Body.
    pub body: Vec<u8>,
}

impl Answer {
    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// Opens a connection.
pub fn connect(address: SocketAddr) -> Result<TcpStream> {
    let stream = TcpStream::connect(address).with_context(|| format!("cannot connect to {address}"))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// `GET path`.
pub fn get(address: SocketAddr, path: &str) -> Result<Answer> {
    exchange(address, "GET", path, &[], b"")
}

/// `POST path` with these additional headers.
pub fn post(address: SocketAddr, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Result<Answer> {
    exchange(address, "POST", path, headers, body)
}

/// One request on a new connection.
pub fn exchange(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Result<Answer> {
    let mut head = Vec::new();
    write!(head, "{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n")?;
    for (name, value) in headers {
        write!(head, "{name}: {value}\r\n")?;
    }
    write!(head, "Content-Length: {}\r\n\r\n", body.len())?;
    let mut stream = connect(address)?;
    stream.write_all(&head)?;
    // A server that rejects a body early may close the connection before all of it is sent; the response counts.
    let written = stream.write_all(body);
    read(&stream).with_context(|| format!("{method} {path}, the body being {written:?}"))
}

/// Reads a response.
pub fn read(stream: &TcpStream) -> Result<Answer> {
    let mut reader = BufReader::new(stream);
    let status = line(&mut reader)?;
    let code = status.split(' ').nth(1).and_then(|code| code.parse().ok());
    let code = code.with_context(|| format!("no status line: {status:?}"))?;
    let headers = headers(&mut reader)?;
    let mut body = Vec::new();
    match headers.get("content-length") {
        Some(length) => {
            reader.take(length.parse()?).read_to_end(&mut body)?;
            ensure!(body.len().to_string() == *length, "{} of {length} bytes came", body.len());
        }
        None => ensure!(code == 204, "an answer {code} without length"),
    }
    Ok(Answer { code, headers, body })
}

fn line(reader: &mut impl BufRead) -> Result<String> {
    let mut line = String::new();
    ensure!(reader.read_line(&mut line)? > 0, "the connection was closed");
    Ok(line.trim_end().to_owned())
}

fn headers(reader: &mut impl BufRead) -> Result<BTreeMap<String, String>> {
    let mut headers = BTreeMap::new();
    loop {
        let line = line(reader)?;
        if line.is_empty() {
            return Ok(headers);
        }
        let (name, value) = line.split_once(':').with_context(|| format!("no header: {line:?}"))?;
        headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
}
