//! The documented exchange of the TuneMyGC agent, replayed by a Ruby program over plain HTTP and over TLS.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::collector::Collector;
use gctrace_tests::live::{Live, gctrace_binary, rubies_dir};
use serde_json::Value;

/// Runs the agent's program with Debian's Ruby and returns its output.
fn agent(args: &[&str]) -> Result<String> {
    let output = Command::new("ruby").arg(rubies_dir().join("tunemygc_agent.rb")).args(args).output()?;
    ensure!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

fn fixture() -> Result<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tunemygc_seed.json");
    Ok(path.to_str().context("a path that is text")?.to_owned())
}

/// Checks that the agent handles each answer correctly.
fn replay(collector: &Collector, scheme: &str, authority: &[&str]) -> Result<()> {
    let url = format!("{scheme}://{}", collector.address);
    let said = agent(&[&["agent", &url, &fixture()?], authority].concat())?;
    let said: Value = serde_json::from_str(&said).with_context(|| said.clone())?;
    let expect = |name: &str, code: u64, word: &str| {
        let did = &said["codes"][name];
        let right = did[0] == code && did[1].as_str().is_some_and(|text| text.contains(word)) && did[2] == 1;
        ensure!(right, "{name}: {did}, not {code} {word} at once");
        Ok(())
    };
    expect("200", 200, &format!("Please visit {url}/configs/"))?;
    expect("404", 404, "Invalid application token")?;
    expect("501", 501, "not supported")?;
    expect("426", 426, "Agent version 1.0.15 required")?;
    expect("400", 400, "Invalid payload (sample 0 (timestamp): ")?;
    ensure!(said["codes"]["again"] == said["codes"]["200"], "{said}");
    ensure!(said["apps"][0] == 204 && said["unknown"][0] == 404, "{said}");
    ensure!(said["config"][0] == 200 && said["json"][0] == 200, "{said}");
    let config: Value = serde_json::from_str(said["json"][1].as_str().context("a body")?)?;
    ensure!(config["Speed"].is_object() && config["Memory"].is_object(), "{config}");
    Ok(())
}

/// The exchange works over plain HTTP and over TLS, where the agent checks the certificate.
#[test]
fn agents_exchange() -> Result<()> {
    let live = Live::without_gctrace()?;
    replay(&Collector::start(&live.path("plain.db"), &[])?, "http", &[])?;
    let dir = live.dir("tls")?;
    let file = |name: &str| dir.join(name).display().to_string();
    agent(&["certificate", &dir.display().to_string()])?;
    let (chain, key, authority) = (file("chain.pem"), file("key.pem"), file("ca.pem"));
    let store = live.path("tls.db");
    let collector = Collector::start(&store, &["--tls-cert", &chain, "--tls-key", &key])?;
    replay(&collector, "https", &[&authority])?;
    let url = format!("https://{}", collector.address);
    let unknown = agent(&["agent", &url, &fixture()?]).expect_err("an unknown authority").to_string();
    ensure!(unknown.contains("certificate verify failed"), "{unknown}");
    // A client that does not speak TLS gets no answer and does not affect other clients.
    ensure!(collector.get("/healthz").is_err());
    replay(&collector, "https", &[&authority])
}

/// If a file is not a certificate or key, the collector exits at once and names the file.
#[test]
fn wrong_certificates() -> Result<()> {
    let live = Live::without_gctrace()?;
    let dir = live.dir("tls")?;
    agent(&["certificate", &dir.display().to_string()])?;
    let file = |name: &str| dir.join(name).display().to_string();
    let other = live.dir("other")?;
    agent(&["certificate", &other.display().to_string()])?;
    for (chain, key, word) in [
        (file("key.pem"), file("key.pem"), "holds no certificate"),
        (
            file("chain.pem"),
            file("ca.pem"),
            "ca.pem: holds no private key in PEM (-----BEGIN PRIVATE KEY-----); give the key",
        ),
        (file("no.pem"), file("key.pem"), "no.pem"),
        (file("chain.pem"), other.join("key.pem").display().to_string(), "cannot be used with this key"),
    ] {
        let store = format!("sqlite:{}", live.path("x.db").display());
        let output = Command::new(gctrace_binary()?)
            .args([
                "collector",
                "--listen",
                "127.0.0.1:0",
                "--store",
                &store,
                "--tls-cert",
                &chain,
                "--tls-key",
                &key,
            ])
            .output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.code() == Some(2) && said.contains(word), "{:?} {said}", output.status);
    }
    Ok(())
}
