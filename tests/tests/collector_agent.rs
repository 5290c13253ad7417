//! The documented exchange of the TuneMyGC agent, replayed by a Ruby program over plain HTTP and over TLS.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::PATIENCE;
use gctrace_tests::child::Guarded;
use gctrace_tests::collector::{Collector, Cycle, cycles, set};
use gctrace_tests::live::{Live, gctrace_binary, rubies_dir};
use serde_json::{Value, json};

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

/// The agent's handling of a set that it sends with this token, as its last message: status code, words, and number of attempts.
fn send(collector: &Collector, token: &str, set: &Path) -> Result<Value> {
    let set = set.to_str().context("a path that is text")?;
    let said = agent(&["send", &format!("http://{}", collector.address), token, set])?;
    serde_json::from_str(&said).with_context(|| said.clone())
}

/// Checks that the agent handles each answer to its sets correctly, except those that need other sets or a broken store.
fn replay(collector: &Collector, scheme: &str, authority: &[&str]) -> Result<String> {
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
    said["token"].as_str().map(ToOwned::to_owned).context("a token")
}

/// The exchange works over plain HTTP and over TLS, where the agent checks the certificate.
#[test]
fn agents_exchange() -> Result<()> {
    let live = Live::without_gctrace()?;
    let store = live.path("plain.db");
    let collector = Collector::start(&store, &[])?;
    let token = replay(&collector, "http", &[])?;
    // Already tuned, to much less than the advice.
    let cycle = |major| Cycle { by: "malloc", major, old_after: 99_000 };
    let env = json!({"RUBY_GC_MALLOC_LIMIT": "64m", "RUBY_GC_OLDMALLOC_LIMIT": "20m"});
    let tuned = live.path("tuned.json");
    let full = cycles(&[(cycle(None), 300), (cycle(Some("oldmalloc")), 150)]);
    std::fs::write(&tuned, set(&token, "3.1.2", &env, &full).to_string())?;
    let words = "already tuned by environment variables (RUBY_GC_MALLOC_LIMIT,RUBY_GC_OLDMALLOC_LIMIT)";
    let did = send(&collector, &token, &tuned)?;
    ensure!(did == json!([412, words, 1]), "{did}");
    // A store that fails: the agent tries three times, and again when it has the next set.
    let somebody = rusqlite::Connection::open(&store)?;
    somebody.execute_batch("ALTER TABLE sample_set RENAME TO elsewhere")?;
    let example = Path::new(&fixture()?).to_owned();
    let did = send(&collector, &token, &example)?;
    let words = did[1].as_str().unwrap_or_default();
    ensure!(did[0] == 500 && words.starts_with("Sync failed after retries: ") && did[2] == 3, "{did}");
    somebody.execute_batch("ALTER TABLE elsewhere RENAME TO sample_set")?;
    let did = send(&collector, &token, &example)?;
    ensure!(did[0] == 200 && did[2] == 1, "{did}");

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
    replay(&collector, "https", &[&authority])?;
    Ok(())
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
    let (cert, its_key, strange) =
        (file("chain.pem"), file("key.pem"), other.join("key.pem").display().to_string());
    let no_key = "holds no private key in PEM (-----BEGIN PRIVATE KEY-----); give the key";
    // The file that is named, and the words about it.
    for (chain, key, named, word) in [
        (&its_key, &its_key, &its_key, "holds no certificate"),
        (&cert, &file("ca.pem"), &file("ca.pem"), no_key),
        (&file("no.pem"), &its_key, &file("no.pem"), "No such file"),
        (&cert, &file("no.pem"), &file("no.pem"), "No such file"),
        (&cert, &strange, &cert, "cannot be used with the key"),
        (&cert, &strange, &strange, "cannot be used with the key"),
    ] {
        let path = live.path("x.db");
        let store = format!("sqlite:{}", path.display());
        let mut command = Command::new(gctrace_binary()?);
        command.args(["collector", "--listen", "127.0.0.1:0", "--store", &store]);
        command.args(["--tls-cert", chain, "--tls-key", key]);
        let finished = Guarded::start("collector", &mut command)?.finish(PATIENCE)?;
        let said = finished.errors();
        ensure!(
            finished.status.code() == Some(2) && finished.stderr.len() == 1 && said.contains(word),
            "{:?} {said}",
            finished.status
        );
        ensure!(said.contains(named.as_str()), "{named} is not named: {said}");
        ensure!(!path.exists(), "a store was created first: {said}");
    }
    Ok(())
}
