//! `gctrace top`: the numbers of its table compared with `/proc` and the program's own, and its screen in a terminal.

use std::{
    collections::BTreeSet,
    io::{Read as _, Write as _},
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, ensure};
use gctrace_tests::child::Guarded;
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::live::Live;
use gctrace_tests::live::gctrace_binary;
use gctrace_tests::memory::status_kb;
use gctrace_tests::puma::Puma;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::screen::Screen;
use gctrace_tests::script::Script;
use gctrace_tests::timing::settled;
use gctrace_tests::{PATIENCE, ensure_times};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Maximum size of the pages that breakpoints in an idle program make resident, kB.
const MOST_WITH_BREAKPOINTS_KB: u64 = 64;

/// A program that allocates all the time and an idle one, side by side.
#[test]
fn one_table() -> Result<()> {
    settled(compare_one_table)
}

fn compare_one_table() -> Result<()> {
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    let mut busy = Script::unwitnessed(&live, &ruby, "steady.rb")?.start()?;
    busy.wait_for("ready")?;
    let mut idle = Script::unwitnessed(&live, &ruby, "dumped.rb")?.start()?;
    idle.wait_for("dumped")?;
    let pids = format!("{},{}", busy.pid(), idle.pid());
    // Read VmRSS meanwhile: pages with a breakpoint are resident while it exists, and some are not afterwards. top reads its last value while
    // breakpoints are being removed one by one, so that it may be between two of these values, but not outside of their range.
    let (pid, done) = (idle.pid(), AtomicBool::new(false));
    let (looked, seen) = thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut seen = BTreeSet::new();
            while !done.load(Ordering::Relaxed) {
                seen.insert(status_kb(pid, "VmRSS")?);
                thread::sleep(Duration::from_millis(2));
            }
            seen.insert(status_kb(pid, "VmRSS")?);
            anyhow::Ok(seen)
        });
        let invocation =
            Invocation::new(["top", "--once", "--interval", "3s", "--format", "jsonl", "--pid", &pids]);
        let looked = invocation.and_then(Invocation::run);
        done.store(true, Ordering::Relaxed);
        (looked, reader.join())
    });
    let (looked, seen) = (looked?, seen.map_err(|_| anyhow!("reading VmRSS panicked"))??);
    busy.say("stop")?;
    idle.say("")?;
    busy.finish_any()?;
    idle.finish()?;
    ensure!(looked.status.success(), "{:?} {}", looked.status, looked.errors());
    let rows: Vec<Value> =
        looked.stdout.iter().map(|line| serde_json::from_str(line)).collect::<Result<_, _>>()?;
    ensure!(rows.len() == 2 && rows.iter().all(|row| row["type"] == "top"), "{rows:?}");
    // Sorted by CPU: the busy one comes first.
    let (first, second) = (&rows[0], &rows[1]);
    ensure!(first["cycles"].as_u64() > Some(0), "{first}");
    for known in ["cpu_percent", "gc_percent", "pause_max_ns", "allocations_per_second", "heap_live_slots"] {
        ensure!(first[known].as_f64().is_some_and(|value| value > 0.0), "{known}: {first}");
    }
    ensure!(first["pause_p99_ns"].as_u64() <= first["pause_max_ns"].as_u64(), "{first}");
    ensure_times!(
        first["gc_percent"].as_f64() <= first["cpu_percent"].as_f64().map(|cpu| cpu + 10.0),
        "{first}"
    );
    // The other one sleeps: it had no GC, so its heap is unknown, and its memory is the kernel's value.
    ensure!(second["cycles"] == 0 && second["pause_max_ns"].is_null(), "{second}");
    ensure!(second["allocations_per_second"].is_null() && second["gvl_wait_percent"].is_null(), "{second}");
    let (lowest, highest) = (seen.first().context("VmRSS")?, seen.last().context("VmRSS")?);
    ensure!(highest - lowest <= MOST_WITH_BREAKPOINTS_KB, "it was idle, VmRSS {seen:?} kB");
    ensure!(
        second["gc_percent"] == 0.0
            && second["rss_bytes"].as_u64().is_some_and(|rss| (*lowest..=*highest).contains(&(rss / 1024))),
        "{second}, VmRSS {seen:?} kB"
    );
    Ok(())
}

/// Without a terminal, it says what to do.
#[test]
fn no_terminal() -> Result<()> {
    let _live = Live::begin()?;
    let finished = Invocation::new(["top"])?.run()?;
    ensure!(
        finished.status.code() == Some(2) && finished.errors().contains("--once"),
        "{}",
        finished.errors()
    );
    Ok(())
}

/// If its terminal goes away, for example because a window crashes, it ends in an orderly way, even if SIGHUP is ignored.
#[test]
fn terminal_goes_away() -> Result<()> {
    let live = Live::beside_others()?;
    let mut idle = Script::unwitnessed(&live, &Ruby::main()?, "idle.rb")?.start()?;
    idle.wait_for("idle")?;
    let (told, cache, ended) = (live.path("pid"), live.path("cache"), live.path("status"));
    let gctrace = gctrace_binary()?;
    // The outer shell survives to see how it ends.
    for (outer, before) in [("trap : HUP; ", ""), ("trap \"\" HUP; ", "trap \"\" HUP; ")] {
        let command = format!(
            "{outer}sh -c '{before}echo $$ > {}; exec {} top --pid {} --cache-dir {}'; echo $? > {}",
            told.display(),
            gctrace.display(),
            idle.pid(),
            cache.display(),
            ended.display()
        );
        let screen = Screen::start(&live, (80, 24), &command)?;
        screen.wait("screen", |shown| shown.contains("q quit"))?;
        let pid: u32 = std::fs::read_to_string(&told)?.trim().parse()?;
        let running = || Path::new("/proc").join(pid.to_string()).join("exe").exists();
        ensure!(running(), "no process {pid}");
        // By then it is waiting for input.
        thread::sleep(Duration::from_millis(1500));
        screen.kill()?;
        let since = Instant::now();
        while running() {
            ensure!(since.elapsed() < PATIENCE, "{before}it is still there without a terminal");
            thread::sleep(Duration::from_millis(20));
        }
        let mut status = String::new();
        while !status.ends_with('\n') {
            ensure!(since.elapsed() < PATIENCE, "{before}no exit status");
            thread::sleep(Duration::from_millis(20));
            status = std::fs::read_to_string(&ended).unwrap_or_default();
        }
        ensure!(status == "0\n", "{before}exit status {status}");
        std::fs::remove_file(&ended)?;
    }
    Ok(())
}

/// `SIGQUIT` from outside ends it in an orderly way, and the terminal is restored.
#[test]
fn quit_signal() -> Result<()> {
    let live = Live::beside_others()?;
    let mut idle = Script::unwitnessed(&live, &Ruby::main()?, "idle.rb")?.start()?;
    idle.wait_for("idle")?;
    let (told, cache) = (live.path("pid"), live.path("cache"));
    let command = format!(
        "sh -c 'echo $$ > {}; exec {} top --pid {} --cache-dir {}'; echo status $?; stty -a",
        told.display(),
        gctrace_binary()?.display(),
        idle.pid(),
        cache.display()
    );
    let screen = Screen::start(&live, (80, 24), &command)?;
    screen.wait("screen", |shown| shown.contains("q quit"))?;
    let pid = std::fs::read_to_string(&told)?.trim().parse().ok().and_then(Pid::from_raw).context("pid")?;
    kill_process(pid, Signal::QUIT)?;
    let ended = screen.wait("end", |shown| shown.contains("ended with 0"))?;
    ensure!(ended.contains("status 0"), "{ended}");
    let modes: Vec<&str> = ended.split([' ', ';', '\n']).collect();
    for mode in ["icanon", "echo", "isig", "opost"] {
        ensure!(modes.contains(&mode), "the terminal lacks {mode}:\n{ended}");
    }
    ensure!(!ended.contains("q quit"), "the other screen is still there:\n{ended}");
    Ok(())
}

/// Sends these requests, one after the other on one connection. Returns the time of each response, nanoseconds.
fn ask(puma: &Puma, kinds: &[&str], name: &str) -> Result<Vec<u64>> {
    let mut times = Vec::new();
    for kind in kinds {
        let mut stream = puma.connect()?;
        let since = Instant::now();
        let request = format!("GET /{kind}/{name} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes())?;
        stream.read_to_end(&mut Vec::new())?;
        times.push(since.elapsed().as_nanos() as u64);
    }
    Ok(times)
}

/// Every request is counted, and the 99th percentile lies between what the application and what the client measured.
#[test]
fn requests() -> Result<()> {
    settled(compare_requests)
}

fn compare_requests() -> Result<()> {
    let live = Live::begin()?;
    let puma = Puma::start(&live, "requests.ru", "0")?;
    let pid = puma.process.pid().to_string();
    let args = ["top", "--once", "--requests", "--interval", "6s", "--format", "jsonl", "--only-pid", &pid];
    let mut gctrace = Invocation::new(args)?.start_ready()?;
    // The second in which tracing starts is not part of any rate.
    thread::sleep(Duration::from_millis(1200));
    let client: Vec<u64> = (0..20)
        .map(|_| ask(&puma, &["plain", "slow", "missing"], "name"))
        .collect::<Result<Vec<_>>>()?
        .concat();
    ensure_times!(gctrace.running()?, "60 requests took longer than the time that is looked at");
    let finished = gctrace.wait()?;
    ensure!(finished.status.success(), "{}", finished.errors());
    let row: Value = serde_json::from_str(finished.stdout.first().context("no row")?)?;
    let times = |text: &str| {
        let words: Vec<u64> = text.split(' ').filter_map(|word| word.parse().ok()).collect();
        words.get(2).zip(words.get(1)).map(|(end, begin)| end.saturating_sub(*begin))
    };
    let truth = std::fs::read_to_string(&puma.truth)?;
    let truth: Vec<u64> = truth.lines().filter_map(times).collect();
    ensure!(truth.len() == 60 && row["requests"] == 60, "{} requests: {row}", truth.len());
    let p99 = row["request_p99_ns"].as_u64().context("p99")?;
    let (least, most) = (truth.iter().max(), client.iter().max());
    // Of 60 requests, the 99th percentile is the longest. After the response, the server still has to close the connection.
    ensure!(Some(&p99) >= least, "{p99} {truth:?}");
    ensure_times!(Some(p99) <= most.map(|ns| ns + 50_000_000), "{p99} {client:?}");
    let rate = row["requests_per_second"].as_f64().context("rate")?;
    // All requests, divided by a number of whole seconds.
    let seconds = 60.0 / rate;
    ensure_times!((seconds - seconds.round()).abs() < 1e-6 && (3.0..=6.0).contains(&seconds), "{row}");
    Ok(())
}

/// In a terminal of 80×24: a Puma with its requests; keys and clicks sort, open a process, show its endpoints and which thread waits for which,
/// and go back. On 200×50 all of that is shown at once. At the end the terminal is restored.
#[test]
fn screen() -> Result<()> {
    let live = Live::beside_others()?;
    let puma = Puma::start(&live, "requests.ru", "0")?;
    let (pid, done) = (puma.process.pid(), AtomicBool::new(false));
    let command = |size| {
        let gctrace = gctrace_binary()?;
        let cache = live.path("cache");
        let command =
            format!("{} top --requests --gvl --cache-dir {} -p {pid}", gctrace.display(), cache.display());
        Screen::start(&live, size, &command)
    };
    thread::scope(|scope| {
        let load = scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                ask(&puma, &["lazy", "gc", "slow"], "name")?;
            }
            anyhow::Ok(())
        });
        let looked = small(&command((80, 24))?, pid).and_then(|()| large(&command((200, 50))?, pid));
        done.store(true, Ordering::Relaxed);
        load.join().map_err(|_| anyhow!("the client panicked"))??;
        looked
    })
}

/// Without arguments, on a terminal, it shows all Ruby processes.
#[test]
fn without_arguments() -> Result<()> {
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    let mut program =
        Guarded::start("ruby", ruby.command()?.args(["-e", "puts 'waits'; $stdout.flush; $stdin.gets"]))?;
    program.wait_stdout(PATIENCE, "waits", |line| line == "waits")?;
    let screen = Screen::start(&live, (80, 24), &gctrace_binary()?.display().to_string())?;
    let pid = program.pid().to_string();
    let is_row = |line: &str| line.split_whitespace().next() == Some(&pid);
    screen.wait("its row", |shown| shown.lines().any(is_row) && shown.contains("q quit"))?;
    screen.press(&["q"])?;
    screen.wait("end", |shown| shown.contains("ended with 0")).map(drop)
}

fn small(screen: &Screen, pid: u32) -> Result<()> {
    let pid = pid.to_string();
    let has =
        |parts: &'static [&'static str]| move |shown: &str| parts.iter().all(|part| shown.contains(part));
    let row = |shown: &str| shown.lines().position(|line| line.split_whitespace().next() == Some(&pid));
    let serves = |shown: &str| {
        let cell =
            |name: &str| shown.lines().nth(1)?.split_whitespace().position(|head| head.starts_with(name));
        let line = shown.lines().nth(row(shown)?)?;
        let rate = line.split_whitespace().nth(cell("REQ/s")?)?.parse::<f64>().ok()?;
        Some(rate > 0.0)
    };
    let table = screen.wait("requests", |shown| serves(shown) == Some(true))?;
    eprintln!("{table}");
    ensure!(table.lines().all(|line| line.chars().count() <= 80), "{table}");
    // When held, the screen does not change. A filter hides what does not match.
    screen.press(&["p"])?;
    screen.wait("the hold", has(&["HELD (p: continue)", "q quit"]))?;
    // By then, a drawing in progress is complete.
    thread::sleep(Duration::from_secs(1));
    let held = screen.shown()?;
    thread::sleep(Duration::from_secs(3));
    ensure!(screen.shown()? == held, "it does not stand still:\n{held}\n{}", screen.shown()?);
    screen.press(&["p", "/", "z", "z", "z"])?;
    screen.wait("no rows", |shown| shown.contains("filter: zzz") && row(shown).is_none())?;
    screen.press(&["Escape"])?;
    screen.wait("all rows", |shown| !shown.contains("filter: zzz") && row(shown).is_some())?;
    // A click on a heading sorts; a click on the row under the cursor opens it.
    let x = table.lines().nth(1).and_then(|line| line.find("REQ/s")).context("REQ/s")?;
    screen.click(x, 1)?;
    let sorted = screen.wait("order", has(&["processes by REQ/s"]))?;
    screen.click(20, row(&sorted).context("its row")?)?;
    screen.wait("threads", has(&["AND WHAT EACH DOES   (Tab: 2 more)", "puma srv tp"]))?;
    screen.press(&["Tab"])?;
    let endpoints =
        screen.wait("endpoints", has(&["REQUESTS, LAST MINUTE", "GET /lazy/name", "GET /slow/name"]))?;
    eprintln!("{endpoints}");
    screen.press(&["Tab"])?;
    screen.wait("waits", has(&["WHO WAITED LONG FOR THE GVL"]))?;
    screen.press(&["q", "g", "g", "g"])?;
    let grouped = screen.wait("endpoints as rows", has(&["endpoints by", "GET /gc/name"]))?;
    eprintln!("{grouped}");
    screen.press(&["?"])?;
    screen.wait("help", has(&["keys and columns", "reverse the order"]))?;
    screen.press(&["x", "q"])?;
    let ended = screen.wait("end", has(&["ended with 0"]))?;
    ensure!(!ended.contains("REQ/s"), "the terminal was not given back:\n{ended}");
    Ok(())
}

fn large(screen: &Screen, pid: u32) -> Result<()> {
    screen
        .wait("the table", |shown| shown.contains("PAUSES, LAST 30 s") && shown.contains(&pid.to_string()))?;
    screen.press(&["Enter"])?;
    let parts = ["AND WHAT EACH DOES", "GET /slow/name", "WHO WAITED LONG FOR THE GVL", "LAST GCs"];
    let page = screen.wait("all panels", |shown| parts.iter().all(|part| shown.contains(part)))?;
    eprintln!("{page}");
    screen.press(&["C-c"])?;
    screen.wait("end", |shown| shown.contains("ended with 0")).map(drop)
}
