//! The collector's pages: what they show, to which visitors, and that they contain no code.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::collector::{Collector, Cycle, apps, cycles, example, set};
use gctrace_tests::http::{self, Answer};
use gctrace_tests::live::Live;
use html5gum::{Token, Tokenizer};
use serde_json::json;

const HOSTILE: &str = "<script>alert(1)</script>\"' onload=x <img src=x>\u{1b}[2J";

/// An element: its name and its attributes.
type Element = (String, BTreeMap<String, String>);

/// The elements of a page, and all of its text.
fn parsed(answer: &Answer) -> Result<(Vec<Element>, String)> {
    let page = String::from_utf8(answer.body.clone())?;
    let (mut elements, mut text) = (Vec::new(), String::new());
    let string = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    for token in Tokenizer::new(&page) {
        match token? {
            Token::StartTag(tag) => {
                let attributes = tag.attributes.iter().map(|(name, value)| (string(name), string(value)));
                elements.push((string(&tag.name), attributes.collect()));
            }
            Token::String(words) => text.push_str(&string(&words)),
            Token::Error(error) => anyhow::bail!("{error:?} in {page}"),
            _ => {}
        }
    }
    Ok((elements, text))
}

/// Checks that a page runs nothing, loads nothing from elsewhere and sets no style itself.
fn harmless(path: &str, answer: &Answer) -> Result<Vec<Element>> {
    let (elements, text) = parsed(answer)?;
    ensure!(answer.headers.get("x-content-type-options").is_some_and(|value| value == "nosniff"));
    let policy = answer.headers.get("content-security-policy").context("no policy")?;
    ensure!(policy.starts_with("default-src 'none'; style-src 'self';"), "{policy}");
    ensure!(!text.contains('\u{1b}'), "{path} controls terminals");
    for (name, attributes) in &elements {
        ensure!(
            !["script", "img", "style", "iframe", "object"].contains(&name.as_str()),
            "{path} has a {name}"
        );
        for (key, value) in attributes {
            ensure!(!key.starts_with("on") && key != "style", "{path}: {name} {key}");
            let is_address = ["href", "src", "action"].contains(&key.as_str());
            ensure!(
                !is_address || value.starts_with('/') || value.starts_with('?'),
                "{path}: {name} {key}={value}"
            );
        }
    }
    Ok(elements)
}

fn busy(token: &str, ruby: &str, environment: &serde_json::Value, host: &str) -> String {
    let cycle = |by, major| Cycle { by, major, old_after: 99_000 };
    let mixed = cycles(&[(cycle("newobj", None), 300), (cycle("newobj", Some("oldgen")), 40)]);
    let mut set = set(token, ruby, environment, &mixed);
    set[0][8] = json!(host);
    set.to_string()
}

/// Every page can be reached from the list of applications. Names from outside are text on all of them. There are charts and advice, and two
/// environments are compared.
#[test]
fn every_page() -> Result<()> {
    let live = Live::without_gctrace()?;
    let path = live.path("sets.db");
    let collector = Collector::start(&path, &[])?;
    let (elements, text) = parsed(&collector.get("/")?)?;
    ensure!(text.contains("There are none yet") && elements.iter().any(|(name, _)| name == "pre"), "{text}");
    let store = format!("sqlite:{}", path.display());
    let token = apps(&store, &["add", &HOSTILE.replace('\u{1b}', "")])?.trim().to_owned();
    apps(&store, &["add", "empty"])?;
    for name in ["", " ", HOSTILE] {
        ensure!(apps(&store, &["add", name]).is_err(), "{name:?} is a name");
    }
    ensure!(collector.send(&busy(&token, "3.3.5", &json!({}), HOSTILE))?.code == 200);
    let tuned = json!({"RUBY_GC_HEAP_INIT_SLOTS": "10000", "RUBY_GC_<b>": "1"});
    let later = busy(&token, "3.4.1", &tuned, "web-1").replace("1700000", "1700001");
    ensure!(collector.send(&later)?.code == 200);

    let mut left: Vec<String> = vec!["/".to_owned()];
    let mut seen = BTreeMap::new();
    while let Some(path) = left.pop() {
        if seen.contains_key(&path) || seen.len() > 100 {
            continue;
        }
        let answer = collector.get(&path)?;
        ensure!(answer.code == 200, "{path}: {}", answer.code);
        if path != "/style.css" {
            for (_, attributes) in harmless(&path, &answer)? {
                let Some(to) = attributes.get("href") else { continue };
                let base = path.split('?').next().unwrap_or_default();
                left.push(if to.starts_with('?') { format!("{base}{to}") } else { to.clone() });
            }
        }
        seen.insert(path, answer);
    }
    ensure!(seen.len() > 15, "only {:?}", seen.keys());
    let (elements, text) = parsed(&seen["/app/1"])?;
    ensure!(elements.iter().filter(|(name, _)| name == "svg").count() == 4, "four charts");
    ensure!(
        elements.iter().any(|(name, attributes)| name == "rect" && attributes["class"] == "heat"),
        "no stop is there"
    );
    for words in [
        "<script>alert(1)</script>",
        "no RUBY_GC_* variables",
        "RUBY_GC_HEAP_INIT_SLOTS=10000",
        "The latest environment compared with the one before",
        // 30 ms in each of the cycles, of which ten run per second.
        "30.0 %",
        "< 50 ms",
        "web-1 4242",
    ] {
        ensure!(text.contains(words), "no {words} in {text}");
    }
    ensure!(!text.contains("RUBY_GC_<b>"), "a name that is none is shown");
    // Recommendations for each Ruby that was seen, and for both strategies; without a choice, for that of the latest set.
    for (path, series) in
        [("/app/1", "3.4"), ("/app/1?days=1&ruby=3.3", "3.3"), ("/app/1?days=1&ruby=3.4", "3.4")]
    {
        let (elements, text) = parsed(seen.get(path).with_context(|| format!("no page leads to {path}"))?)?;
        ensure!(text.contains("Ruby 3.3") && text.contains("Ruby 3.4"), "{path}: {text}");
        ensure!(text.contains(&format!("Ruby {series}: ")), "not for {series}: {text}");
        ensure!(text.contains("or less memory") && text.contains("or speed"), "{path}: {text}");
        let is_chosen = |(_, attributes): &&Element| attributes.get("aria-current").is_some();
        let chosen = elements.iter().filter(is_chosen).filter_map(|(_, attributes)| attributes.get("href"));
        ensure!(chosen.into_iter().any(|to| to.ends_with(&format!("&ruby={series}"))), "{path}");
    }
    compared(&collector, &elements)?;
    let (_, text) = parsed(&seen["/app/2"])?;
    ensure!(text.contains("No sample set arrived") && text.contains("Nothing has arrived yet"), "{text}");
    for path in ["/app/3", "/app/x", "/app/", "/app/1/../2"] {
        ensure!(collector.get(path)?.code == 404, "{path}");
    }
    ensure!(http::post(collector.address, "/", &[], b"")?.code == 405);
    Ok(())
}

/// Any two environments, Ruby versions or hosts that were seen can be chosen and are compared. Unknown ones have no figures, and nothing in
/// the query is interpreted as code.
fn compared(collector: &Collector, elements: &[Element]) -> Result<()> {
    let ways: Vec<&str> = elements
        .iter()
        .filter(|(name, attributes)| {
            name == "input" && attributes.get("name").is_some_and(|name| name == "compare")
        })
        .filter_map(|(_, attributes)| attributes.get("value").map(String::as_str))
        .collect();
    ensure!(ways == ["env", "ruby", "host"], "{ways:?}");
    let ask = |query: &str| -> Result<String> {
        let path = format!("/app/1?days=7&{query}");
        let answer = collector.get(&path)?;
        ensure!(answer.code == 200, "{path}: {}", answer.code);
        harmless(&path, &answer)?;
        Ok(parsed(&answer)?.1)
    };
    let text = ask("compare=env&a=&b=RUBY_GC_HEAP_INIT_SLOTS%3D10000")?;
    for words in
        ["A: no RUBY_GC_* variables", "B: RUBY_GC_HEAP_INIT_SLOTS=10000", "A: share of the time in GC"]
    {
        ensure!(text.contains(words), "no {words} in {text}");
    }
    // The same host on both sides has a ratio of 1.
    let text = ask("compare=host&a=web-1&b=web-1")?;
    ensure!(text.contains("A: web-1") && text.contains("× 1.00"), "{text}");
    let text = ask("compare=host&a=web-1&b=%3Cscript%3Ealert(2)%3C/script%3E")?;
    ensure!(text.contains("No sample set of <script>alert(2)</script> arrived in this time"), "{text}");
    let plain = ask("compare=other&a=1&b=2")?;
    ensure!(!plain.contains("A: ") && !plain.contains("No sample set"), "{plain}");
    Ok(())
}

/// If two environments are in the same ten minutes, the one whose set arrived later is the latest, whatever their names.
#[test]
fn two_in_one_slot() -> Result<()> {
    let live = Live::without_gctrace()?;
    let path = live.path("sets.db");
    let collector = Collector::start(&path, &[])?;
    let store = format!("sqlite:{}", path.display());
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.as_secs_f64();
    // The start of a ten-minute slot that is over.
    let slot = (now / 600.0).floor() * 600.0 - 1200.0;
    let settings = |slots: &str| json!({ "RUBY_GC_HEAP_INIT_SLOTS": slots });
    let name = |slots: &str| match slots {
        "" => "no RUBY_GC_* variables".to_owned(),
        slots => format!("RUBY_GC_HEAP_INIT_SLOTS={slots}"),
    };
    let pairs = [["", "130062"], ["130062", ""], ["130062", "200000"], ["200000", "130062"]];
    for (app, pair) in (1..).zip(pairs) {
        let token = apps(&store, &["add", "shop"])?.trim().to_owned();
        for (pid, slots) in (1..).zip(pair) {
            let environment = if slots.is_empty() { json!({}) } else { settings(slots) };
            let mut set: serde_json::Value =
                serde_json::from_str(&busy(&token, "3.1.2", &environment, "web"))?;
            set[0][10] = json!(pid);
            for sample in set.as_array_mut().context("a set")?.iter_mut().skip(1) {
                let at = sample[0].as_f64().context("a time")? - 1_700_000_000.0;
                sample[0] = json!(slot + 40.0 * f64::from(pid) + at);
            }
            ensure!([200, 412].contains(&collector.send(&set.to_string())?.code));
        }
        let answer = collector.get(&format!("/app/{app}"))?;
        let (elements, text) = parsed(&answer)?;
        let [before, after] = pair.map(name);
        ensure!(
            text.contains(&format!("Before: Ruby 3.1, {before}.After: Ruby 3.1, {after}.")),
            "{before}, then {after}: {text}"
        );
        // The offered choice is the same, and so is the order of processes.
        let chosen: Vec<&str> = elements
            .iter()
            .filter(|(name, attributes)| name == "option" && attributes.contains_key("selected"))
            .filter_map(|(_, attributes)| attributes.get("value").map(String::as_str))
            .collect();
        let values = pair.map(|slots| if slots.is_empty() { String::new() } else { name(slots) });
        ensure!(chosen == values, "{chosen:?}, not {values:?}");
        let of = |pid: u32| text.find(&format!("web {pid}")).context("a process");
        ensure!(of(2)? < of(1)?, "{text}");
    }
    Ok(())
}

/// On loopback no sign-in is needed. Through a proxy, under another name or from elsewhere it is needed, and visitors see only their own data.
#[test]
fn sign_in() -> Result<()> {
    let live = Live::without_gctrace()?;
    let path = live.path("sets.db");
    let store = format!("sqlite:{}", path.display());
    let get = |collector: &Collector, path: &str, headers: &[(&str, &str)]| {
        http::exchange(collector.address, "GET", path, headers, b"")
    };
    let collector = Collector::start(&path, &[])?;
    let tokens =
        ["shop", "mail"].map(|name| apps(&store, &["add", name]).map(|token| token.trim().to_owned()));
    let [shop, _mail] = tokens;
    let shop = shop?;
    ensure!(collector.get("/app/2")?.code == 200);
    for header in ["X-Forwarded-For", "Forwarded", "Via", "X-Real-IP"] {
        ensure!(get(&collector, "/app/2", &[(header, "x")])?.code == 401, "{header}");
    }
    let mut stream = http::connect(collector.address)?;
    stream.write_all(b"GET / HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n")?;
    ensure!(http::read(&stream)?.code == 401, "a page from elsewhere may ask by its own name");
    let public = Collector::start(&path, &["--public-url", "https://gc.example"])?;
    ensure!(public.get("/")?.code == 401);
    // Browsers reach it through TLS, which the proxy terminates.
    let answer = public.form("/sign-in", &format!("token={shop}"))?;
    let cookie = &answer.headers["set-cookie"];
    ensure!(cookie.starts_with("__Host-gctrace=") && cookie.ends_with("; Secure"), "{cookie}");
    let cookie = cookie.split(';').next().context("a cookie")?;
    ensure!(get(&public, "/app/1", &[("Cookie", cookie)])?.code == 200);

    let open = Collector::on("0.0.0.0:0", &path, &[])?;
    let answer = open.get("/app/1")?;
    ensure!(answer.code == 401);
    let elements = harmless("/app/1", &answer)?;
    let fields: BTreeSet<_> = elements.iter().filter_map(|(_, attributes)| attributes.get("name")).collect();
    ensure!(fields.contains(&"token".to_owned()), "{elements:?}");
    for wrong in ["", "token=", "token=0123", "token=%0d%0aX%3a+y", "other=1"] {
        let answer = open.form("/sign-in", wrong)?;
        let cookie = answer.headers.get("set-cookie");
        ensure!(cookie.is_none_or(|cookie| cookie.starts_with("gctrace=; Max-Age=0")), "{wrong}: {cookie:?}");
    }
    let answer = open.form("/sign-in", &format!("token={shop}"))?;
    ensure!(answer.code == 303 && answer.headers["location"] == "/", "{answer:?}");
    let cookie = &answer.headers["set-cookie"];
    ensure!(cookie.contains("; HttpOnly; SameSite=Strict"), "{cookie}");
    let cookie = cookie.split(';').next().context("a cookie")?;
    let (_, text) = parsed(&get(&open, "/", &[("Cookie", &format!("other=1; {cookie}"))])?)?;
    ensure!(text.contains("shop") && !text.contains("mail"), "{text}");
    ensure!(get(&open, "/app/1", &[("Cookie", cookie)])?.code == 200);
    ensure!(get(&open, "/app/2", &[("Cookie", cookie)])?.code == 404);
    ensure!(get(&open, "/", &[("Cookie", "gctrace=0123")])?.code == 401);
    // A page of another site can neither sign a visitor in (as somebody else) nor sign them out.
    for body in [format!("token={shop}"), String::new()] {
        for header in [("Sec-Fetch-Site", "cross-site"), ("Origin", "https://evil.example")] {
            let headers = [("Content-Type", "application/x-www-form-urlencoded"), header];
            let answer = http::post(open.address, "/sign-in", &headers, body.as_bytes())?;
            ensure!(
                answer.code == 403 && !answer.headers.contains_key("set-cookie"),
                "{header:?}: {answer:?}"
            );
        }
    }
    // Deleted, and signed out.
    apps(&store, &["delete", "1"])?;
    ensure!(get(&open, "/app/1", &[("Cookie", cookie)])?.code == 401);
    ensure!(open.send(&example(&shop, 1)?.to_string())?.code == 404);
    Ok(())
}
