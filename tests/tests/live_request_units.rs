//! Requests as units of work in TuneMyGC sample sets: the values of `GC.stat` at the begin and end of each, compared with what the
//! application of a Puma reads by itself.

use std::collections::HashMap;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::ledger;
use gctrace_tests::live::Live;
use gctrace_tests::puma::Puma;
use gctrace_tests::tunemygc::{Sample, Set};
use serde_json::Value;

/// Minimum number of objects that a request of the application allocates, and maximum number that the server and reading the truth add.
const OBJECTS: u64 = 20_000;
const MORE_OBJECTS: u64 = 3_000;
/// Number of sequential requests on kept connections and on connections that are closed, and then of each of four concurrent clients.
const KEPT: usize = 24;
const CLOSED: usize = 16;
const AT_ONCE: usize = 20;

/// The application's own record of a request: its thread, and time, objects and cycles at begin and end.
struct Truth {
    tid: u64,
    begin: [u64; 3],
    end: [u64; 3],
}

fn truths(server: &Puma) -> Result<HashMap<String, Truth>> {
    let text = std::fs::read_to_string(&server.truth)?;
    let truth = |line: &str| {
        let (name, rest) = line.split_once(' ').context("a name")?;
        let numbers = rest.split(' ').map(str::parse).collect::<Result<Vec<u64>, _>>()?;
        let &[tid, ref moments @ ..] = &numbers[..] else { anyhow::bail!("line {line}") };
        let (begin, end) = moments.split_at_checked(3).with_context(|| format!("line {line}"))?;
        Ok((name.to_owned(), Truth { tid, begin: begin.try_into()?, end: end.try_into()? }))
    };
    text.lines().map(truth).collect()
}

/// A name without digits.
fn name(client: usize, number: usize) -> String {
    [client, number / 20, number % 20].into_iter().map(|at| char::from(b'g' + at as u8)).collect()
}

/// Sends this many requests, one after the other.
fn ask(server: &Puma, client: usize, count: usize, close: bool) -> Result<()> {
    let mut stream: Option<TcpStream> = None;
    for number in 0..count {
        // Puma 5.6 may silently close a kept connection after its tenth request if other clients wait.
        if close || number % 8 == 0 {
            stream = Some(server.connect()?);
        }
        let stream = stream.as_mut().context("a connection")?;
        let (how, name) = (if close { "close" } else { "keep-alive" }, name(client, number));
        let text = format!("GET /work/{name}?q=SECRET HTTP/1.1\r\nHost: x\r\nConnection: {how}\r\n\r\n");
        stream.write_all(text.as_bytes())?;
        let (mut got, mut buffer) = (Vec::new(), [0; 1024]);
        while !got.ends_with(b"\r\n\r\nOK") {
            let read = stream.read(&mut buffer)?;
            ensure!(read > 0, "closed after {}", String::from_utf8_lossy(&got));
            got.extend_from_slice(&buffer[..read]);
        }
    }
    Ok(())
}

/// The units of a set by the name in their path: the samples of begin and end.
fn units(set: &Set) -> Result<HashMap<String, (&Sample, &Sample)>> {
    let mut open: HashMap<Option<u64>, &Sample> = HashMap::new();
    let mut units = HashMap::new();
    for sample in &set.samples {
        match sample.event.as_str() {
            "PROCESSING_STARTED" => {
                ensure!(open.insert(sample.thread, sample).is_none(), "two units on a thread");
            }
            "PROCESSING_ENDED" => {
                let begin = open.remove(&sample.thread).context("an end without a begin")?;
                let path = sample.meta["path"].as_str().context("no path")?;
                let name = path.strip_prefix("GET /work/").with_context(|| format!("path {path}"))?;
                ensure!(begin.meta == sample.meta, "{begin:?} {sample:?}");
                ensure!(units.insert(name.to_owned(), (begin, sample)).is_none(), "{name} is there twice");
            }
            _ => {}
        }
    }
    ensure!(open.is_empty(), "units without an end");
    Ok(units)
}

/// Every unit has the values of its moments: the values that the application reads lie between them, and if no other thread allocates, they
/// differ by what the request allocates. What is left out is counted, and `gctrace tune` uses the units.
#[test]
fn units_have_their_own_values() -> Result<()> {
    let live = Live::beside_others()?;
    let server = Puma::start(&live, "units.ru", "0")?;
    let pid = server.process.pid();
    let dir = live.path("sets");
    let sets = dir.to_string_lossy().into_owned();
    let gctrace =
        Invocation::jsonl(["--pid", &pid.to_string(), "--requests", "--tunemygc", &sets])?.start_ready()?;
    ask(&server, 0, KEPT, false)?;
    ask(&server, 1, CLOSED, true)?;
    gctrace.wait_requests(KEPT + CLOSED)?;
    std::thread::scope(|scope| -> Result<()> {
        let server = &server;
        let clients: Vec<_> =
            (2..6).map(|client| scope.spawn(move || ask(server, client, AT_ONCE, client % 2 == 0))).collect();
        clients.into_iter().try_for_each(|client| client.join().expect("a client panicked"))
    })?;
    gctrace.wait_requests(KEPT + CLOSED + 4 * AT_ONCE)?;
    let report = gctrace.stop()?;
    ledger::check_lossless(&report)?;
    let sets = Set::read_dir(&dir)?;
    let [set] = &sets[..] else { anyhow::bail!("{} sets", sets.len()) };
    ensure!(!set.text.contains("SECRET"), "a secret came out");
    ensure!(set.samples[0].event == "BOOTED" && set.samples[0].meta["process_age"].is_f64(), "no BOOTED");

    let (truths, units) = (truths(&server)?, units(set)?);
    let without = ledger::user(&report, "requests_without_states")? as usize;
    ensure!(truths.len() == report.requests.len(), "{} requests", report.requests.len());
    ensure!(units.len() + without == truths.len(), "{} units, {without} without states", units.len());
    println!("{} units, {without} without states", units.len());
    let column = |key: &str| set.keys.iter().position(|of| of == key).with_context(|| format!("no {key}"));
    // A client has the response before the thread has finished: only on the same connection does the next request wait for that.
    let alone: Vec<String> =
        (0..KEPT).filter(|number| (1..7).contains(&(number % 8))).map(|number| name(0, number)).collect();
    let (objects, count) = (column("total_allocated_objects")?, column("count")?);
    for (name, (begin, end)) in &units {
        let truth = truths.get(name).with_context(|| format!("{name} was not served"))?;
        let of = |sample: &Sample, key: usize| sample.stat[key];
        for (key, at) in [(objects, 1), (count, 2)] {
            let values = [of(begin, key), truth.begin[at], truth.end[at], of(end, key)];
            ensure!(values.is_sorted(), "{name}: {} {values:?}", set.keys[key]);
        }
        ensure!(begin.thread.unwrap_or(u64::from(pid)) == truth.tid, "{name}: {:?}", begin.thread);
        ensure!(begin.rss.is_some() && end.rss.is_some(), "{name}: no memory");
        let allocated = of(end, objects) - of(begin, objects);
        let own = truth.end[1] - truth.begin[1];
        ensure!(own >= OBJECTS, "{name}: {own} objects");
        ensure!(
            !alone.contains(name) || allocated - own <= MORE_OBJECTS,
            "{name}: {allocated}, of which {own} its own"
        );
    }
    // A thread that takes a request, or keeps a connection, holds the GVL.
    let kept = (0..KEPT).filter(|number| units.contains_key(&name(0, *number))).count();
    ensure!(kept == KEPT, "{kept} of {KEPT} on kept connections");
    ensure!((0..CLOSED).any(|number| units.contains_key(&name(1, number))), "none that was closed");

    let tuned = Invocation::new(["tune", "--format", "json", &dir.to_string_lossy()])?.run()?;
    let report: Value = serde_json::from_str(&tuned.stdout.join("\n"))?;
    let evidence = &report["programs"][0]["report"]["evidence"];
    ensure!(evidence["units"].as_u64() == Some(units.len() as u64), "{evidence}");
    let size = evidence["objects_in_a_unit"].as_u64().context("no size of units")?;
    ensure!((OBJECTS..OBJECTS + MORE_OBJECTS + OBJECTS / 10).contains(&size), "units of {size} objects");
    Ok(())
}
