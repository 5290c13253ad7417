//! What requests allocate, compared with what they were told to allocate.

use std::io::{Read as _, Write as _};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::ledger;
use gctrace_tests::live::Live;
use gctrace_tests::puma::Puma;
use gctrace_tests::report::{Report, RequestLine};
use gctrace_tests::ruby::Ruby;

/// Number of objects that the application allocates, by the first part of the path.
const KINDS: [(&str, u64); 3] = [("none", 0), ("some", 20_000), ("much", 200_000)];
/// An upper bound of what Puma and Rack themselves allocate for a request.
const AROUND: u64 = 2_000;
/// Number of requests of each kind, first one after the other, then by each of several clients.
const EACH: usize = 4;
const CLIENTS: usize = 3;

fn ask(server: &Puma, kind: &str) -> Result<()> {
    let mut stream = server.connect()?;
    let request = format!("GET /{kind}/x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes())?;
    let mut got = Vec::new();
    stream.read_to_end(&mut got)?;
    ensure!(got.ends_with(b"OK"), "{}", String::from_utf8_lossy(&got));
    Ok(())
}

fn ask_all(server: &Puma) -> Result<()> {
    (0..EACH).flat_map(|_| KINDS).try_for_each(|(kind, _)| ask(server, kind))
}

/// The objects that the application allocated in a request.
fn truth(line: &RequestLine) -> Result<u64> {
    let kind = line.path.as_deref().and_then(|path| path.split('/').nth(1));
    let known = KINDS.iter().find(|(name, _)| Some(*name) == kind);
    Ok(known.with_context(|| format!("{line:?}"))?.1)
}

/// The number of slots of one page of each size that was used: pages have 64 KiB since 3.2 (`HEAP_PAGE_ALIGN_LOG`, gc.c), and 16 KiB before.
fn one_page_of_each(report: &Report) -> Result<u64> {
    let mut sizes: Vec<u64> = Vec::new();
    for size in report.allocs.iter().flat_map(|line| line.slots.keys()) {
        sizes.push(size.parse()?);
    }
    sizes.sort_unstable();
    sizes.dedup();
    Ok(sizes.iter().map(|size| 65_536 / size).sum())
}

/// Sequential requests each took what they allocated, except for the rest of the pages that were open at their begin and end. Concurrent
/// requests use each other's pages, so each kind took that in total.
#[test]
fn slots_are_those_of_the_objects() -> Result<()> {
    let live = Live::beside_others()?;
    for ruby in Puma::rubies()? {
        compare(&live, &ruby).with_context(|| ruby.label())?;
    }
    Ok(())
}

fn compare(live: &Live, ruby: &Ruby) -> Result<()> {
    let server = Puma::start_on(live, ruby, "allocate.ru")?;
    let pid = server.process.pid().to_string();
    let gctrace = Invocation::jsonl(["--pid", &pid, "--requests", "--alloc"])?.start_ready()?;
    // It is unknown whether slots are seen to be taken until some were.
    ask(&server, "some")?;
    ask_all(&server)?;
    gctrace.wait_requests(1 + EACH * KINDS.len())?;
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(|| ask_all(&server))).collect();
        clients.into_iter().try_for_each(|client| client.join().expect("a client panicked"))
    })?;
    let all = 1 + (1 + CLIENTS) * EACH * KINDS.len();
    gctrace.wait_requests(all)?;
    let report = gctrace.stop()?;
    ledger::check_lossless(&report)?;
    ensure!(report.requests.len() == all, "{} of {all} requests", report.requests.len());
    let open = one_page_of_each(&report)?;
    let mut lines: Vec<&RequestLine> = report.requests.iter().collect();
    lines.sort_unstable_by_key(|line| line.begin_ns);
    let mut unknown = 0;
    for line in &lines[..=EACH * KINDS.len()] {
        let Some(objects) = line.alloc_objects else {
            unknown += 1;
            continue;
        };
        let truth = truth(line)?;
        ensure!(objects + open >= truth && objects <= truth + AROUND + open, "{truth}, {open}: {line:?}");
        let bytes = line.alloc_bytes.context("no bytes")?;
        ensure!(bytes >= objects * 40 && bytes <= objects * 640, "{line:?}");
    }
    ensure!(unknown <= 1, "{unknown} are not known");
    let together = &lines[1 + EACH * KINDS.len()..];
    for (kind, objects) in KINDS {
        let of_it: Vec<_> = together.iter().filter(|line| truth(line).ok() == Some(objects)).collect();
        ensure!(of_it.len() == CLIENTS * EACH, "{} of {kind}", of_it.len());
        let taken = of_it.iter().map(|line| line.alloc_objects).sum::<Option<u64>>();
        let taken = taken.with_context(|| format!("not known of all: {of_it:?}"))?;
        let (count, truth) = (of_it.len() as u64, objects * of_it.len() as u64);
        println!("{} {kind}: {taken} taken for {truth} objects", ruby.label());
        ensure!(taken.abs_diff(truth) <= truth / 10 + count * AROUND, "{kind}: {taken}, {truth}");
    }
    // The slots of all requests are among those of the process.
    let of_requests: u64 = lines.iter().filter_map(|line| line.alloc_objects).sum();
    let of_process: u64 = report.allocs.iter().map(|line| line.objects).sum();
    ensure!(of_requests <= of_process, "{of_requests} of {of_process}");
    Ok(())
}

/// The summary names the endpoint that allocates most. Without `--alloc` it says nothing about allocation.
#[test]
fn summary() -> Result<()> {
    let live = Live::beside_others()?;
    let server = Puma::start(&live, "allocate.ru", "0")?;
    let pid = server.process.pid().to_string();
    for more in [&["--alloc"][..], &[]] {
        let args = ["--pid", &pid, "--requests"];
        let gctrace = Invocation::new(args.iter().chain(more))?.start_ready()?;
        ask(&server, "some")?;
        ask_all(&server)?;
        // The last request is reported when its connection is closed.
        std::thread::sleep(std::time::Duration::from_millis(500));
        let text = gctrace.interrupt()?.stdout.join("\n");
        let row = text.lines().find(|line| line.trim_start().starts_with("allocated "));
        ensure!(row.is_some() != more.is_empty() && text.contains("alloc/req") != more.is_empty(), "{text}");
        ensure!(row.is_none_or(|row| row.ends_with(": GET /much/x")), "{text}");
    }
    Ok(())
}
