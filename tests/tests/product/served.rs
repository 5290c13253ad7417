//! A running `gctrace serve`, and the invariants of each of its pages.

use std::{collections::BTreeMap, net::SocketAddr, process::Command};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::{
    PATIENCE,
    child::{Finished, Guarded},
    http::{self, Answer},
};
use html5gum::{Token, Tokenizer};
use rustix::process::Signal;

/// An element: its name and its attributes.
pub(crate) type Element = (String, BTreeMap<String, String>);

/// A running `gctrace serve`. Dropping it kills it.
pub(crate) struct Served {
    process: Guarded,
    pub(crate) address: SocketAddr,
    /// `/TOKEN/`.
    pub(crate) base: String,
}

impl Served {
    /// Starts it and waits until it prints its address.
    pub(crate) fn with(command: &mut Command) -> Result<Self> {
        let mut process = Guarded::start("serve", command)?;
        let line = process.wait_stdout(PATIENCE, "its address", |line| line.starts_with("http://"))?;
        let (address, base) = line.trim_start_matches("http://").split_once('/').context("a path")?;
        let (address, base) = (address.parse()?, format!("/{base}"));
        Ok(Self { process, address, base })
    }

    /// Sends a `GET` for a path below the page.
    pub(crate) fn get(&self, path: &str) -> Result<Answer> {
        http::get(self.address, &format!("{}{path}", self.base))
    }

    pub(crate) fn page(&self, path: &str) -> Result<(Vec<Element>, String)> {
        let answer = self.get(path)?;
        ensure!(answer.code == 200, "{path}: {} {}", answer.code, answer.text());
        harmless(path, &answer)
    }

    pub(crate) fn stop(self, signal: Signal) -> Result<Finished> {
        self.process.signal(signal)?;
        self.process.finish(PATIENCE)
    }
}

/// The elements of a page, and all of its text. Checks that it runs only its own script, loads nothing from elsewhere and sets no style.
pub(crate) fn harmless(path: &str, answer: &Answer) -> Result<(Vec<Element>, String)> {
    let header = |name: &str| answer.headers.get(name).map(String::as_str).unwrap_or_default();
    ensure!(header("content-type") == "text/html; charset=utf-8", "{path}: {:?}", answer.headers);
    ensure!(header("x-content-type-options") == "nosniff" && header("referrer-policy") == "no-referrer");
    ensure!(header("cache-control") == "no-store", "{path}");
    let policy = header("content-security-policy");
    ensure!(policy.starts_with("default-src 'none'; style-src 'self'; script-src 'self';"), "{policy}");
    ensure!(!policy.contains("unsafe"), "{policy}");
    let page = String::from_utf8(answer.body.clone())?;
    let (mut elements, mut text) = (Vec::new(), String::new());
    let string = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    for token in Tokenizer::new(&page) {
        match token? {
            Token::StartTag(tag) => {
                let attributes = tag.attributes.iter().map(|(name, value)| (string(name), string(value)));
                elements.push((string(&tag.name), attributes.collect::<BTreeMap<_, _>>()));
            }
            Token::String(words) => text.push_str(&string(&words)),
            Token::Error(error) => anyhow::bail!("{error:?} in {page}"),
            _ => {}
        }
    }
    for (name, attributes) in &elements {
        ensure!(!["img", "style", "object", "embed", "base"].contains(&name.as_str()), "{path} has a {name}");
        ensure!(
            name != "script"
                || attributes.get("src").is_some_and(|src| ["brush.js", "live.js"].contains(&src.as_str())),
            "{path}: {attributes:?}"
        );
        ensure!(
            name != "iframe"
                || ["flamegraph.svg", "diff.svg"].iter().any(|svg| attributes["src"].starts_with(svg)),
            "{path}: {attributes:?}"
        );
        for (key, value) in attributes {
            ensure!(!key.starts_with("on") && key != "style", "{path}: {name} {key}");
            let is_address = ["href", "src", "action"].contains(&key.as_str());
            ensure!(
                !is_address || !value.contains(':') && !value.starts_with('/'),
                "{path}: {name} {key}={value}"
            );
        }
    }
    Ok((elements, text))
}
