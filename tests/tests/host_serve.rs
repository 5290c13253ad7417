//! `gctrace serve`: access, the content of pages, and files equal to those of `gctrace report`. Uses committed recordings, without root.

#[path = "product/hostile.rs"]
mod hostile;
#[path = "product/served.rs"]
mod served;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::{
    PATIENCE,
    gctrace::Invocation,
    http::{self, Answer},
    live::gctrace_binary,
};
use gctrace_user::{
    export::Outputs,
    trace_file::{self, Recorder, Recording},
};
use hostile::{HOSTILE, Hostile};
use rustix::process::Signal;
use served::{Served, harmless};

/// A committed recording.
fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/recordings").join(format!("{name}.gctrace"))
}

fn start(file: &Path) -> Result<Served> {
    Served::with(Command::new(gctrace_binary()?).arg("serve").arg(file))
}

/// Without the complete token every request gets a 404. Other host names than this host's, other methods and overlong requests are
/// refused.
#[test]
fn who_gets_an_answer() -> Result<()> {
    let served = start(&golden("3.4"))?;
    let token = served.base.trim_matches('/').to_owned();
    ensure!(token.len() == 32 && token.bytes().all(|byte| byte.is_ascii_hexdigit()), "{token}");
    ensure!(served.address.ip().is_loopback(), "{}", served.address);
    let other = start(&golden("3.4"))?;
    ensure!(other.base != served.base, "the same token twice");
    for path in [
        "/",
        "/style.css",
        "/favicon.ico",
        &other.base,
        &format!("/{}/", &token[..31]),
        &format!("/{token}0/"),
        "/once/",
        "/once/x",
        &format!("//x/{token}/"),
    ] {
        let answer = http::get(served.address, path)?;
        ensure!(answer.code == 404 && !answer.text().contains("golden"), "{path}: {}", answer.code);
    }
    for path in ["x", "save/", "save/x", "../", "flamegraph", "save/pprof/x"] {
        ensure!(served.get(path)?.code == 404, "{path}");
    }
    let head = http::get(served.address, &format!("/{token}"))?;
    ensure!(head.code == 303 && head.headers["location"] == served.base, "{head:?}");

    let asked = |bytes: &[u8]| -> Result<Answer> {
        let mut stream = http::connect(served.address)?;
        stream.write_all(bytes)?;
        http::read(&stream)
    };
    for (host, code) in [
        ("localhost:80", 200),
        ("127.0.0.1", 200),
        ("[::1]:8080", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example:80", 403),
        ("10.0.0.1", 403),
        ("", 403),
    ] {
        let request = format!("GET {} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n", served.base);
        let answer = asked(request.as_bytes())?;
        ensure!(answer.code == code, "{host}: {}", answer.code);
        ensure!(code == 200 || !answer.text().contains("golden"), "{host}");
    }
    for method in ["POST", "PUT", "DELETE", "OPTIONS", "TRACE"] {
        let answer = http::exchange(served.address, method, &served.base, &[], b"x=1")?;
        ensure!(answer.code == 405 && answer.headers["allow"] == "GET, HEAD", "{method}: {answer:?}");
    }
    let long = format!("{}?from={}", served.base, "1".repeat(5000));
    ensure!(http::get(served.address, &long)?.code == 414);
    let longer = format!("{}?from={}", served.base, "1".repeat(40_000));
    ensure!([414, 431].contains(&http::get(served.address, &longer)?.code));
    ensure!(asked(b"nonsense\r\n\r\n")?.code == 400);

    let mut stream = http::connect(served.address)?;
    write!(stream, "HEAD {} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", served.base, served.address)?;
    let mut text = String::new();
    std::io::Read::read_to_string(&mut stream, &mut text)?;
    let (head, body) = text.split_once("\r\n\r\n").context("a head")?;
    ensure!(head.starts_with("HTTP/1.1 200") && body.is_empty(), "{text}");
    Ok(())
}

/// A program that gets the address in its arguments gets one that works only once.
#[test]
fn opens_once() -> Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = tempfile::tempdir()?;
    let (browser, told) = (dir.path().join("xdg-open"), dir.path().join("told"));
    fs::write(&browser, format!("#!/bin/sh\necho \"$1\" > {0}.new; mv {0}.new {0}\n", told.display()))?;
    fs::set_permissions(&browser, fs::Permissions::from_mode(0o755))?;
    let path = format!("{}:{}", dir.path().display(), std::env::var("PATH").unwrap_or_default());
    let mut command = Command::new(gctrace_binary()?);
    command.args(["serve", "--open"]).arg(golden("3.1")).env("PATH", path);
    let served = Served::with(&mut command)?;
    let since = std::time::Instant::now();
    while !told.exists() {
        ensure!(since.elapsed() < PATIENCE, "no browser was started");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let url = fs::read_to_string(told)?;
    let once =
        url.trim().strip_prefix(&format!("http://{}", served.address)).context("its address")?.to_owned();
    ensure!(
        !url.contains(served.base.trim_matches('/')),
        "the token is in the arguments of the browser: {url}"
    );
    let first = http::get(served.address, &once)?;
    ensure!(first.code == 303 && first.headers["location"] == served.base, "{first:?}");
    ensure!(http::get(served.address, &once)?.code == 404);
    ensure!(served.stop(Signal::INT)?.status.success());
    Ok(())
}

/// Every page that the first page links to exists and runs nothing, and so do others that these link to. The first page has everything. SIGTERM ends the server with status 0.
#[test]
fn every_page() -> Result<()> {
    for name in ["2.7", "3.1", "3.3", "3.4"] {
        let served = start(&golden(name))?;
        let (mut left, mut seen) = (VecDeque::from([String::new()]), BTreeMap::new());
        let mut first = BTreeSet::new();
        while let Some(path) = left.pop_front() {
            // Each window of time has pages of its own.
            if seen.contains_key(&path) || (seen.len() > 60 && !first.contains(&path)) {
                continue;
            }
            let answer = served.get(&path)?;
            ensure!(answer.code == 200, "{path}: {}", answer.code);
            let is_page = path.is_empty() || path.starts_with('?');
            if is_page {
                for (_, attributes) in harmless(&path, &answer)?.0 {
                    for to in ["href", "src"].iter().filter_map(|key| attributes.get(*key)) {
                        let to = to.split('#').next().context("a link")?.trim_start_matches("./").to_owned();
                        first.extend(path.is_empty().then(|| to.clone()));
                        left.push_back(to);
                    }
                }
            }
            seen.insert(path, answer);
        }
        ensure!(first.len() > 10 && first.iter().all(|path| seen.contains_key(path)), "{first:?}");
        for path in ["style.css", "brush.js", "save/pprof?", "save/perfetto?"] {
            ensure!(seen.contains_key(path), "{path} not in {:?}", seen.keys());
        }
        ensure!(seen.keys().any(|path| path.contains("of=alloc")) && seen.len() > 20, "{:?}", seen.keys());
        let (elements, text) = served.page("")?;
        for words in [
            "golden",
            &format!("Ruby {name}"),
            "Longest GC pauses",
            "block in Order#total -e:2",
            "Threads",
            "Who blocks whom",
            "nothing lost",
            "GC pauses by time and length",
            "Methods with most CPU time",
            "Thread activity over time",
            "Holding the GVL for long",
            "Live slots",
        ] {
            ensure!(text.contains(words), "{name}: no {words} in {text}");
        }
        ensure!(!text.contains("Requests"), "requests were not recorded");
        // Two charts of lengths each for GC pauses and for waits; the time line, threads, heaps.
        ensure!(elements.iter().filter(|(name, _)| name == "svg").count() == 7, "{name}: seven charts");
        for (_, attributes) in elements.iter().filter(|(name, _)| name == "svg") {
            ensure!(attributes.get("aria-label").is_some_and(|label| label.len() > 20), "{attributes:?}");
        }
        let graph = served.get("flamegraph.svg?of=gc")?;
        let policy = &graph.headers["content-security-policy"];
        ensure!(graph.headers["content-type"] == "image/svg+xml", "{:?}", graph.headers);
        ensure!(
            policy.contains("default-src 'none'") && policy.contains("script-src 'unsafe-hashes' 'sha256-"),
            "{policy}"
        );
        ensure!(!policy.contains("script-src 'unsafe-inline'"), "{policy}");
        let finished = served.stop(Signal::TERM)?;
        ensure!(finished.status.success(), "{}: {}", finished.status, finished.errors());
    }
    Ok(())
}

/// The files of a part equal those of `gctrace report` with the same flags, byte for byte.
#[test]
fn files() -> Result<()> {
    let dir = tempfile::tempdir()?;
    for name in ["2.7", "3.1", "3.3", "3.4"] {
        let served = start(&golden(name))?;
        let pid = pid_of(&golden(name))?;
        let parts: [&[(&str, &str)]; 6] = [
            &[],
            &[("from", "0.9s")],
            &[("from", "0"), ("to", "0.92s")],
            &[("from", "0.9s"), ("to", "0.93s")],
            &[("pid", &pid)],
            &[("from", "0.85s"), ("to", "0.95s"), ("pid", &pid)],
        ];
        for part in parts {
            let query: Vec<String> = part.iter().map(|(key, value)| format!("{key}={value}")).collect();
            let flags: Vec<String> = part.iter().map(|(key, value)| format!("--{key}={value}")).collect();
            for (of, flag, file) in [
                ("pprof", "--pprof", "x.pb.gz"),
                ("firefox", "--firefox", "x.json.gz"),
                ("speedscope", "--speedscope", "x.json"),
                ("perfetto", "--perfetto", "x.pftrace"),
                ("flamegraph", "--flamegraph", "x.svg"),
                ("folded", "--folded", "x.folded"),
                ("folded&of=gc", "--flamegraph-of=gc --folded", "x.folded"),
                ("flamegraph&of=gvl-wait", "--flamegraph-of=gvl-wait --flamegraph", "x.svg"),
                ("folded&of=alloc", "--flamegraph-of=alloc --folded", "x.folded"),
            ] {
                let (of, more) = of.split_once('&').unwrap_or((of, ""));
                let path = format!("save/{of}?{}&{more}", query.join("&"));
                let answer = served.get(&path)?;
                ensure!(answer.code == 200, "{name} {path}: {} {}", answer.code, answer.text());
                ensure!(
                    answer.headers["content-disposition"]
                        .starts_with(&format!("attachment; filename=\"{name}."))
                );
                let file = dir.path().join(file);
                let mut args: Vec<PathBuf> = ["report"].map(PathBuf::from).into();
                args.extend(flags.iter().map(PathBuf::from));
                args.extend(flag.split(' ').map(PathBuf::from));
                args.extend([file.clone(), golden(name)]);
                let finished = Invocation::new(args)?.run()?;
                ensure!([Some(0), Some(1)].contains(&finished.status.code()), "{}", finished.errors());
                ensure!(fs::read(&file)? == answer.body, "{name} {path} differs from {flags:?} {flag}");
            }
        }
    }
    Ok(())
}

/// The pid of the only process of a recording.
fn pid_of(recording: &Path) -> Result<String> {
    let args = [Path::new("info"), Path::new("--format=json"), recording];
    let finished = Invocation::new(args)?.run()?;
    let info: serde_json::Value = serde_json::from_str(&finished.stdout.join("\n"))?;
    Ok(info["processes"][0]["pid"].to_string())
}

/// A part in which nothing happened says so. A part that cannot be parsed is refused with the reason.
#[test]
fn parts() -> Result<()> {
    let served = start(&golden("3.4"))?;
    for query in ["?from=1h", "?from=2200-01-01T00:00:00Z", "?pid=1", "?from=0&to=1ms"] {
        let (elements, text) = served.page(query)?;
        ensure!(text.contains("This part of the recording contains nothing"), "{query}: {text}");
        ensure!(
            elements.iter().any(|(name, _)| name == "form") && text.contains("Whole recording"),
            "{query}"
        );
    }
    for (query, why) in [
        ("?from=x", "from=x"),
        ("?from=3s&to=1s", "--to"),
        ("?pid=0", "pid=0"),
        ("?pid=%3Cscript%3E", "pid=<script>"),
        ("?of=x", "expected cpu, wall, gc, gvl-wait, alloc"),
        ("?of=wall", "not recorded"),
    ] {
        let answer = served.get(query)?;
        ensure!(answer.code == 400, "{query}: {}", answer.code);
        let (_, text) = harmless(query, &answer)?;
        ensure!(text.contains(why), "{query}: {text}");
    }
    let (_, whole) = served.page("?from=&to=&pid=")?;
    ensure!(whole.contains("18 cycles, 1 major"), "empty fields are no choice: {whole}");
    let (_, part) = served.page("?from=0.9s")?;
    ensure!(!part.contains("18 cycles, 1 major") && part.contains("Longest GC pauses"), "{part}");
    Ok(())
}

/// The titles of the rows of a flame graph.
fn rows(svg: &str) -> BTreeSet<&str> {
    svg.split("<title>").skip(1).filter_map(|rest| rest.split("</title>").next()).collect()
}

/// Two recordings are compared as by `gctrace diff`, and so are parts of one recording.
#[test]
fn comparisons() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let svg = dir.path().join("x.svg");
    let (a, b) = (golden("3.1"), golden("3.4"));
    let served = Served::with(Command::new(gctrace_binary()?).arg("serve").args([&a, &b]))?;
    let diff = ["diff".into(), "--flamegraph".into(), svg.clone(), a, b];
    let diff = Invocation::new(diff)?.run()?;
    ensure!(diff.status.success(), "{}", diff.errors());
    let (_, text) = served.page("")?;
    ensure!(text.contains("What has changed from A to B"), "{text}");
    // The columns of the text are cells of the page.
    let mut same = 0;
    for line in diff.stdout.iter().filter(|line| line.starts_with("  ") && line.is_char_boundary(28)) {
        let (what, figures) = line.split_at(28);
        let figures: Vec<&str> = figures.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect();
        if !["pause, p50", "pause, p99", "minor cycles a second", "share of time in GC"]
            .contains(&what.trim())
        {
            continue;
        }
        let [a, b, change, ..] = figures[..] else { anyhow::bail!("{line}") };
        ensure!(text.contains(&format!("{}{a}{b}{change}", what.trim())), "{line}: {text}");
        same += 1;
    }
    ensure!(same == 4, "{:?}", diff.stdout);
    let graph = served.get("diff.svg")?;
    ensure!(graph.code == 200, "{}", graph.code);
    // The rows of the file are those of the page, which has its roots at the top.
    let (page, file) = (String::from_utf8(graph.body)?, fs::read_to_string(&svg)?);
    ensure!(rows(&file).len() > 10 && rows(&page) == rows(&file), "{:?} {:?}", rows(&page), rows(&file));
    ensure!(page.contains("inverted = true;") && file.contains("inverted = false;"), "{page}");
    let policy = &graph.headers["content-security-policy"];
    ensure!(
        policy.contains("script-src 'unsafe-hashes' 'sha256-")
            && !policy.contains("script-src 'unsafe-inline'"),
        "{policy}"
    );
    ensure!(served.stop(Signal::TERM)?.status.success());

    let served = start(&golden("3.4"))?;
    let (_, text) = served.page("?from=0.9s&to=1s&afrom=0.8s&ato=0.9s")?;
    ensure!(
        text.contains("What has changed from A to B") && text.contains("from 0.800 s to 0.900 s"),
        "{text}"
    );
    ensure!(text.contains("Nothing was tested"), "{text}");
    ensure!(served.get("diff.svg?from=0.9s&to=1s&afrom=0.8s&ato=0.9s")?.code == 200);
    let (_, text) = served.page("?afrom=0.8s&ato=0.9s")?;
    ensure!(text.contains("A is marked") && !text.contains("What has changed"), "{text}");
    ensure!(served.get("diff.svg?from=0.9s")?.code == 404, "nothing to compare with");
    for (query, why) in [("?afrom=x", "A: from=x"), ("?from=1s&afrom=3s&ato=2s", "--to must be later")] {
        let answer = served.get(query)?;
        ensure!(
            answer.code == 400 && harmless(query, &answer)?.1.contains(why),
            "{query}: {}",
            answer.text()
        );
    }
    ensure!(served.stop(Signal::TERM)?.status.success());
    Ok(())
}

/// A truncated or damaged recording is served up to its last complete chunk, with a note. Any other file is one error, and no address is printed.
#[test]
fn broken_files() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("x.gctrace");
    let bytes = fs::read(golden("3.4"))?;
    fs::write(&file, &bytes[..bytes.len() - 40])?;
    let served = start(&file)?;
    let (_, text) = served.page("")?;
    ensure!(text.contains("This recording was cut off"), "{text}");
    ensure!(served.get("save/pprof")?.code == 200);
    // The served content does not change, even when the file is gone.
    fs::remove_file(&file)?;
    ensure!(served.page("?from=1.1s")?.1.contains("cut off"));
    let said = served.stop(Signal::TERM)?.errors();
    ensure!(said.matches("x.gctrace was cut off: it ends after ").count() == 1, "{said}");

    // A damaged chunk follows the complete ones.
    let (begin, end) = last_entries(&bytes);
    let mut damaged = [&bytes[..end], &bytes[begin..]].concat();
    let begin = end;
    damaged[begin + 100] ^= 1;
    fs::write(&file, &damaged)?;
    let served = start(&file)?;
    let (_, text) = served.page("")?;
    ensure!(
        text.contains("This recording cannot be read to its end") && text.contains(&format!("byte {begin}")),
        "{text}"
    );
    ensure!(text.contains("Longest GC pauses"), "what comes before is there: {text}");
    let answer = served.get("save/folded?of=gc")?;
    let folded = dir.path().join("x.folded");
    let words = ["report", "--flamegraph-of=gc", "--folded"].map(PathBuf::from);
    let report = Invocation::new(words.into_iter().chain([folded.clone(), file.clone()]))?.run()?;
    ensure!(report.status.code() == Some(2), "{}", report.errors());
    ensure!(fs::read(&folded)? == answer.body && !answer.body.is_empty(), "{}", answer.text());
    let finished = served.stop(Signal::TERM)?;
    ensure!(finished.status.success(), "{}", finished.status);
    ensure!(finished.errors().contains("is damaged: its checksum is"), "{}", finished.errors());

    for (content, words) in [
        (Some(&b""[..]), "it is not a gctrace recording"),
        (Some(&b"GCTRACE\n\x09\0\0\0"[..]), "version 9"),
        (Some(&b"\x7fELF everything else"[..]), "it is not a gctrace recording"),
        (None, "No such file"),
    ] {
        match content {
            Some(content) => fs::write(&file, content)?,
            None => fs::remove_file(&file)?,
        }
        refused(&[file.as_os_str()], words)?;
    }
    refused(&[dir.path().as_os_str()], "not a regular file")?;
    refused(&["--listen=0.0.0.0:0".as_ref(), golden("3.4").as_os_str()], "ssh -L")?;
    let taken = std::net::TcpListener::bind("127.0.0.1:0")?;
    let listen = format!("--listen={}", taken.local_addr()?);
    refused(&[listen.as_ref(), golden("3.4").as_os_str()], "name another port")
}

/// Where the last chunk with entries begins and ends (docs/recording.md); the end chunk follows it.
fn last_entries(bytes: &[u8]) -> (usize, usize) {
    let mut places = Vec::new();
    let mut at = 12;
    while at < bytes.len() {
        let stored: [u8; 4] = bytes[at + 4..at + 8].try_into().expect("four bytes");
        let end = at + 16 + u32::from_le_bytes(stored) as usize;
        places.push((at, end));
        at = end;
    }
    assert!(places.len() > 2, "a header, entries, an end: {places:?}");
    places[places.len() - 2]
}

/// Checks that `gctrace serve` prints one line with these words, and exits with status 2.
fn refused(args: &[&std::ffi::OsStr], words: &str) -> Result<()> {
    let mut all = vec![std::ffi::OsStr::new("serve")];
    all.extend(args);
    let finished = Invocation::new(all)?.run()?;
    ensure!(finished.status.code() == Some(2), "{words}: {}", finished.status);
    ensure!(finished.stdout.is_empty() && finished.stderr.len() == 1, "{words}: {finished:?}");
    ensure!(
        finished.stderr[0].starts_with("gctrace: ") && finished.stderr[0].contains(words),
        "{finished:?}"
    );
    Ok(())
}

/// Thread names are text in the chart of what threads did, too. Every query is answered: with a page, or with the reason for a refusal.
#[test]
fn hostile_names_and_queries() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("x.gctrace");
    let mut recording = Recording::open(&golden("3.4"))?;
    let hostile = Hostile(Recorder::create(&file, recording.header())?);
    trace_file::replay(&mut recording, &mut Outputs::new(vec![Box::new(hostile)]))?;
    let served = start(&file)?;
    let (elements, text) = served.page("")?;
    // Names are truncated there.
    let rows = text.matches(&HOSTILE[..40]).count();
    ensure!(elements.iter().any(|(name, _)| name == "path") && rows > 10, "{rows}: {text}");
    let pieces = [
        "from=",
        "&to=",
        "&pid=",
        "&of=",
        "&afrom=",
        "&ato=",
        "%3Cscript%3Ealert(9)%3C/script%3E",
        "%22%3E",
        "%00",
        "%ff",
        "%",
        "+",
        "=",
        "1",
        "0.9s",
        "99h",
        "-1",
        "1e9",
        "18446744073709551616",
        "2026-11-23T14:00:00Z",
        "gc",
        "cpu",
        ",",
    ];
    let mut codes = BTreeMap::new();
    // Random sequences, from a generator that is the same on every run.
    let mut state = 1_u64;
    for _ in 0..150 {
        let mut query = String::from("?");
        for _ in 0..6 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            query.push_str(pieces[(state >> 33) as usize % pieces.len()]);
        }
        let answer = served.get(&query)?;
        ensure!([200, 400].contains(&answer.code), "{query}: {} {}", answer.code, answer.text());
        harmless(&query, &answer)?;
        *codes.entry(answer.code).or_insert(0) += 1;
    }
    ensure!(codes.len() == 2, "both pages and refusals: {codes:?}");
    ensure!(served.stop(Signal::TERM)?.status.success());
    Ok(())
}
