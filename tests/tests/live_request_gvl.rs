//! How long a request waited for the GVL, compared with the individual waits that are reported, and with what its thread reports about its CPU
//! time.

use std::io::{Read as _, Write as _};

use anyhow::{Context as _, Result, bail, ensure};
use gctrace_tests::ensure_times;
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::ledger;
use gctrace_tests::live::Live;
use gctrace_tests::puma::Puma;
use gctrace_tests::report::{GvlSplitLine, Report, RequestLine};
use gctrace_tests::ruby::Ruby;
use gctrace_tests::timing::{settled, stolen_ns};

const CLIENTS: usize = 4;
const EACH: usize = 15;
/// By how much the CPU time of one request may differ from the thread's own clock: the kernel switches before the clock stops and after it
/// starts.
const CLOCKS_NS: u64 = 500_000;
/// Number of requests that are compared part by part.
const PARTED: usize = 12;
/// What else the parts contain: Puma's own work, and Zlib's holding of the GVL when it returns its result.
const BESIDES_NS: u64 = 10_000_000;
/// If the kernel does not show a switch to a thread, the CPU time that it has charged may be one tick old.
const TICK_NS: u64 = 4_000_000;

fn spin(server: &Puma) -> Result<()> {
    std::thread::scope(|scope| {
        let client = |at: usize| {
            scope.spawn(move || -> Result<()> {
                let mut stream = server.connect()?;
                for n in 0..EACH {
                    // Puma 5.6 may close a kept connection after its tenth request.
                    if n == 8 {
                        stream = server.connect()?;
                    }
                    let letter = |n: usize| char::from(b'g' + n as u8);
                    let (first, second) = (letter(at), letter(n));
                    let text = format!("GET /spin/{first}{second}x HTTP/1.1\r\nHost: x\r\n\r\n");
                    stream.write_all(text.as_bytes())?;
                    let (mut got, mut buffer) = (Vec::new(), [0; 1024]);
                    while !got.ends_with(b"\r\n\r\nOK") {
                        let read = stream.read(&mut buffer)?;
                        ensure!(read > 0, "closed");
                        got.extend_from_slice(&buffer[..read]);
                    }
                }
                Ok(())
            })
        };
        let clients: Vec<_> = (0..CLIENTS).map(client).collect();
        clients.into_iter().try_for_each(|client| client.join().expect("a client panicked"))
    })
}

/// The sum equals that of the individually reported waits of its thread. It is at most the time for which the thread had no CPU, and a large
/// part of it.
#[test]
fn waits_of_requests() -> Result<()> {
    settled(compare_waits_of_requests)
}

fn compare_waits_of_requests() -> Result<()> {
    let live = Live::begin()?;
    let server = Puma::start(&live, "spin.ru", "0")?;
    let pid = server.process.pid().to_string();
    let args = ["--pid", &pid, "--requests", "--gvl", "--gvl-threshold", "0.001ms", "--gvl-budget", "100"];
    let gctrace = Invocation::jsonl(args)?.start_ready()?;
    let stolen = stolen_ns()?;
    spin(&server)?;
    // The thread's own clock stops while a hypervisor has its CPU (`update_rq_clock_task`, kernel/sched/core.c); the kernel
    // sees no switch then.
    let stolen = stolen_ns()?.saturating_sub(stolen) + CLOCKS_NS;
    gctrace.wait_requests(CLIENTS * EACH)?;
    let report = gctrace.stop()?;
    ledger::check_lossless(&report)?;
    waits_name_their_requests(&report)?;
    let truth = std::fs::read_to_string(&server.truth)?;
    let (mut known, mut waited_ns, mut without_cpu_ns) = (0, 0, 0);
    let (mut divided, mut on_cpu_ns, mut charged_ns, mut outside_ns) = (0, 0, 0, 0);
    for line in &report.requests {
        let Some(gvl_ns) = line.gvl_wait_ns else { continue };
        known += 1;
        let end_ns = line.begin_ns + line.duration_ns.context("no duration")?;
        let of_it = report.gvl_waits.iter().filter(|wait| {
            wait.tid == line.tid && wait.begin_ns >= line.begin_ns && wait.begin_ns + wait.wait_ns <= end_ns
        });
        let (count, sum) = of_it.fold((0, 0), |(count, sum), wait| (count + 1, sum + wait.wait_ns));
        // Shorter waits are not reported individually; there are not many more of them.
        ensure_times!(
            sum <= gvl_ns && gvl_ns - sum <= 1000 * (count + 50),
            "{line:?}: {count} waits, {sum} ns"
        );
        let name = line.path.as_deref().and_then(|path| path.rsplit('/').next()).context("a path")?;
        let words = truth.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        let words = words.into_iter().find(|words| words[0] == name).with_context(|| name.to_owned())?;
        let [tid, begin, end, cpu] = [1, 2, 3, 4].map(|at| words[at].parse::<u64>());
        let (tid, begin, end, cpu) = (tid?, begin?, end?, cpu?);
        ensure!(tid == u64::from(line.tid), "{line:?}");
        // Time outside of the application may be waits, too.
        let outside = line.duration_ns.unwrap_or(0).saturating_sub(end - begin);
        let without = (end - begin).saturating_sub(cpu) + outside;
        // A thread that is woken runs before it acquires the GVL, through two probes.
        let awake = 100_000 * (count + 2);
        ensure_times!(gvl_ns <= without + awake, "{line:?}: CPU {cpu}");
        let states = line.cpu_ns.zip(line.runnable_ns).zip(line.blocked_ns);
        let Some(((cpu_ns, runnable_ns), blocked_ns)) = states else { continue };
        divided += 1;
        let duration_ns = line.duration_ns.unwrap_or(0);
        ensure!(cpu_ns + runnable_ns + blocked_ns == duration_ns, "{line:?}");
        // The thread reads its CPU clock within the request, so the rest of its CPU time is at most the time outside.
        ensure_times!(cpu_ns + CLOCKS_NS >= cpu && cpu_ns <= cpu + outside + stolen, "{line:?}: CPU {cpu}");
        on_cpu_ns += cpu_ns;
        charged_ns += cpu;
        outside_ns += outside;
        waited_ns += gvl_ns;
        without_cpu_ns += without;
    }
    ensure!(divided + 4 >= known, "of {known}, {divided} are divided");
    // Single requests differ by what a CPU switch costs; all of them together do not.
    let most = charged_ns + outside_ns + stolen;
    let within = (charged_ns - charged_ns / 50..=most + charged_ns / 50).contains(&on_cpu_ns);
    ensure_times!(within, "{on_cpu_ns} ns on a CPU, {charged_ns} to {most} of the threads' own clocks");
    // The first request of each thread may have no sum: whether all of its waits are seen is known only once the thread acquires the GVL.
    ensure!(known >= CLIENTS * EACH - 8, "{known} are known");
    // Four threads share a GVL; other programs on the machine also take CPUs.
    ensure_times!(waited_ns * 4 >= without_cpu_ns, "{waited_ns} of {without_cpu_ns} ns");
    println!(
        "{known} known, {waited_ns} of {without_cpu_ns} ns; {divided} divided, CPU {on_cpu_ns} and {charged_ns} ns"
    );
    Ok(())
}

/// What a request does in Ruby, in native code without the GVL, and asleep counts towards the right part of its time, and the parts add up.
#[test]
fn parts_of_requests() -> Result<()> {
    settled(compare_parts)
}

fn compare_parts() -> Result<()> {
    let live = Live::begin()?;
    let rubies = Puma::rubies()?;
    ensure!(rubies.len() >= 2, "{} Rubies", rubies.len());
    rubies.iter().try_for_each(|ruby| parts_on(&live, ruby))
}

fn parts_on(live: &Live, ruby: &Ruby) -> Result<()> {
    let server = Puma::start_on(live, ruby, "parts.ru")?;
    let pid = server.process.pid().to_string();
    let args = ["--pid", &pid, "--requests", "--gvl", "--gvl-budget", "100"];
    let gctrace = Invocation::jsonl(args)?.start_ready()?;
    for n in 0..PARTED {
        let mut stream = server.connect()?;
        let letter = char::from(b'g' + n as u8);
        let text = format!("GET /parts/x{letter}y HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(text.as_bytes())?;
        let mut got = Vec::new();
        stream.read_to_end(&mut got)?;
        ensure!(got.ends_with(b"OK"), "{}", String::from_utf8_lossy(&got));
    }
    gctrace.wait_requests(PARTED)?;
    let report = gctrace.stop()?;
    ledger::check_lossless(&report)?;
    let truth = std::fs::read_to_string(&server.truth)?;
    let mut known = 0;
    for line in &report.requests {
        let Some(split) = &line.split else { continue };
        known += 1;
        let name = line.path.as_deref().and_then(|path| path.rsplit('/').next()).context("a path")?;
        let mut words = truth.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        let words = words.find(|words| words[0] == name).with_context(|| name.to_owned())?;
        let [ruby_ns, native_ns, slept_ns] = [1, 2, 3].map(|at| words[at].parse::<u64>());
        are_parts(line, split, [ruby_ns?, native_ns?, slept_ns?])?;
    }
    println!("{}: {known} of {PARTED} requests are divided", ruby.label());
    // Each thread of the server may have a request before it was seen to acquire the GVL.
    ensure!(known * 2 >= PARTED, "{}: {known} requests are divided", ruby.label());
    Ok(())
}

/// How long `parts.ru` sleeps.
const ASLEEP_NS: u64 = 50_000_000;

/// Compares with the application's own times: in Ruby, in native code, asleep.
fn are_parts(line: &RequestLine, split: &GvlSplitLine, [ruby, native, slept]: [u64; 3]) -> Result<()> {
    let [wait, hold, away] = [&split.wait, &split.hold, &split.away];
    ensure!(Some(split.all().sum()) == line.duration_ns, "{line:?}");
    ensure!(Some(split.all().cpu_ns) == line.cpu_ns, "{line:?}");
    let close = |ours: u64, theirs: u64| ours + TICK_NS + CLOCKS_NS >= theirs && ours <= theirs + BESIDES_NS;
    ensure_times!(close(hold.cpu_ns, ruby), "in Ruby {ruby}: {line:?}");
    ensure_times!(close(away.cpu_ns, native), "without the GVL {native}: {line:?}");
    // The application's clock includes the time for which it was runnable again, without a CPU.
    let asleep = away.blocked_ns + TICK_NS + CLOCKS_NS >= ASLEEP_NS && away.blocked_ns <= slept + BESIDES_NS;
    ensure_times!(asleep, "asleep {slept}: {line:?}");
    let not_running = away.blocked_ns + away.runnable_ns + wait.sum();
    ensure_times!(not_running + TICK_NS + CLOCKS_NS >= slept, "asleep {slept}: {line:?}");
    // The sum of its individual waits is the same, except for what the scheduler does between two probes.
    let waited = wait.sum();
    ensure_times!(line.gvl_wait_ns.is_none_or(|ns| ns.abs_diff(waited) <= CLOCKS_NS), "{waited}: {line:?}");
    Ok(())
}

/// The request of a wait is the one that its thread was serving when the wait ended, and every wait within a request names it.
fn waits_name_their_requests(report: &Report) -> Result<()> {
    let (mut named, mut unnamed) = (0, 0);
    for wait in &report.gvl_waits {
        let got_ns = wait.begin_ns + wait.wait_ns;
        let serves = |line: &&RequestLine| {
            line.tid == wait.tid
                && line.duration_ns.is_some_and(|ns| (line.begin_ns..line.begin_ns + ns).contains(&got_ns))
        };
        match (wait.request, report.requests.iter().find(serves)) {
            (Some(id), Some(line)) if id == line.id => named += 1,
            (None, None) => unnamed += 1,
            // A request ends with its last write, but gctrace knows that only when the thread does the next thing.
            (Some(id), None) if report.requests.iter().any(|line| line.id == id && line.tid == wait.tid) => {
                named += 1;
            }
            (request, line) => bail!("{request:?} is not {line:?}: {wait:?}"),
        }
    }
    println!("{named} waits in requests, {unnamed} in none");
    ensure!(named > CLIENTS * EACH, "{named} waits in requests");
    Ok(())
}

/// Without `--gvl`, or if only blocked threads are observed (`--gvl=futex`), there is no sum.
#[test]
fn not_watched() -> Result<()> {
    let live = Live::beside_others()?;
    let server = Puma::start(&live, "spin.ru", "0")?;
    let pid = server.process.pid().to_string();
    for more in [&[][..], &["--gvl=futex"]] {
        let args = ["--pid", &pid, "--requests"];
        let gctrace = Invocation::jsonl(args.iter().chain(more))?.start_ready()?;
        spin(&server)?;
        gctrace.wait_requests(CLIENTS * EACH)?;
        let report = gctrace.stop()?;
        ensure!(
            report.requests.iter().all(|line| line.gvl_wait_ns.is_none() && line.cpu_ns.is_none()),
            "{:?}",
            report.requests
        );
    }
    Ok(())
}
