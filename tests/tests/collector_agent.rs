//! The documented exchange of the TuneMyGC agent, replayed by a Ruby program over plain HTTP and over TLS; and that every
//! Ruby takes what is recommended for it.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::collector::{Collector, Cycle, cycles, set};
use gctrace_tests::live::{Live, gctrace_binary, rubies_dir};
use gctrace_tests::ruby::Ruby;
use serde_json::{Value, json};

/// Runs the agent's program with Debian's Ruby and returns what it says.
fn agent(args: &[&str]) -> Result<String> {
    let output = Command::new("ruby").arg(rubies_dir().join("tunemygc_agent.rb")).args(args).output()?;
    ensure!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

fn fixture() -> Result<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tunemygc_seed.json");
    Ok(path.to_str().context("a path that is text")?.to_owned())
}

/// The agent does for each answer what it is meant to do.
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

/// Plain and over TLS, where the certificate is checked.
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
    // Somebody who does not speak TLS gets no answer, and nobody else is bothered.
    ensure!(collector.get("/healthz").is_err());
    replay(&collector, "https", &[&authority])
}

/// Files that are no certificate or key end it at once, by name.
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
        (file("chain.pem"), file("ca.pem"), "the key"),
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

/// What is advised to programs of several kinds on this version of Ruby, by variable.
fn advised(live: &Live, version: &str) -> Result<BTreeMap<String, String>> {
    let cycle = |by, major, old_after| Cycle { by, major, old_after };
    let programs = [
        cycles(&[
            (cycle("newobj", None, 0), 300),
            (cycle("malloc", None, 0), 60),
            (cycle("newobj", Some("oldgen"), 99_000), 40),
            (cycle("newobj", Some("shady"), 99_000), 15),
            (cycle("malloc", Some("oldmalloc"), 99_000), 15),
        ]),
        cycles(&[(cycle("method", None, 0), 200), (cycle("newobj", Some("nofree"), 99_000), 40)]),
        cycles(&[(cycle("newobj", None, 0), 900), (cycle("newobj", Some("oldgen"), 30_000), 12)]),
    ];
    let dir = live.dir(&format!("sets-{version}"))?;
    for (at, program) in programs.iter().enumerate() {
        let set = set("", version, &json!({}), program);
        std::fs::write(dir.join(format!("{at}.json")), set.to_string())?;
    }
    let output = Command::new(gctrace_binary()?).args(["tune", "--format", "json"]).arg(&dir).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let said: Value = serde_json::from_slice(&output.stdout)?;
    let mut all = BTreeMap::new();
    for program in said["programs"].as_array().context("programs")? {
        ensure!(program["report"]["insufficient"] == json!([]), "{program}");
        for plan in program["report"]["plans"].as_array().context("plans")? {
            for advice in plan["advice"].as_array().context("advice")? {
                for change in advice["set"].as_array().context("set")? {
                    let name = change["variable"].as_str().context("a name")?;
                    all.insert(name.to_owned(), change["value"].to_string());
                }
            }
        }
    }
    Ok(all)
}

/// Every Ruby names every variable that is recommended for it with the value that was recommended, and warns of nothing.
#[test]
fn rubies_take_what_is_recommended() -> Result<()> {
    let live = Live::without_gctrace()?;
    Ruby::each(|ruby| {
        let advised = advised(&live, ruby.version())?;
        ensure!(advised.len() >= 5, "only {advised:?}");
        let mut command = ruby.command()?;
        let output = command.args(["--disable-gems", "-W2", "-e", "exit"]).envs(&advised).output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "{said}");
        let mut lines: Vec<&str> = said.lines().collect();
        for (name, value) in &advised {
            let taken =
                |line: &&str| line.strip_prefix(name.as_str()).is_some_and(|rest| rest.starts_with('='));
            let at = lines.iter().position(taken).with_context(|| format!("{name} is ignored: {said}"))?;
            let told_line = lines.remove(at);
            let told =
                told_line.split_once('=').and_then(|(_, rest)| rest.split(' ').next()).unwrap_or_default();
            let (told, meant): (f64, f64) = (told.parse()?, value.parse()?);
            ensure!((told - meant).abs() < 1e-6, "{name} shall be {meant}: {told_line}");
            ensure!(told_line.contains("(default value:"), "{told_line}");
        }
        ensure!(lines.is_empty(), "it says besides: {lines:?}");
        Ok(())
    })
}
