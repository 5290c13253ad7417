//! The load of servers: threads that serve requests, and unaccepted connections according to the kernel's list of sockets.

use std::collections::HashMap;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::gctrace::{Gctrace, Invocation};
use gctrace_tests::live::{Live, rubies_dir};
use gctrace_tests::puma::Puma;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::{PATIENCE, child::Guarded, http, ledger};
use serde_json::Value;

/// Waits for a reading of this process that was made after this call and has these figures.
fn wait_load(gctrace: &mut Gctrace, pid: u32, busy: Option<u64>, queue: Option<u64>) -> Result<()> {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.as_secs_f64();
    let wanted = |line: &Value| {
        line["ts"].as_f64() > Some(since)
            && line["busy_threads"].as_u64() == busy
            && line["accept_queue"].as_u64() == queue
    };
    gctrace.wait_line_with("load", pid, wanted).with_context(|| format!("busy {busy:?}, queue {queue:?}"))
}

/// Sends a request on a connection that the server closes after it.
fn request(puma: &Puma, path: &str) -> Result<TcpStream> {
    let mut client = puma.connect()?;
    write!(client, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")?;
    Ok(client)
}

fn response(mut client: TcpStream) -> Result<()> {
    let mut text = String::new();
    client.read_to_string(&mut text)?;
    ensure!(text.starts_with("HTTP/1.1 200 "), "{text}");
    Ok(())
}

/// Number of connections to a port for which no process has a descriptor: they have no inode (proc(5)).
fn unaccepted(port: u16) -> Result<u64> {
    let local = format!(":{port:04X}");
    let list = std::fs::read_to_string("/proc/net/tcp")?;
    let words = list.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
    Ok(words.filter(|words| words[1].ends_with(&local) && words[3] == "01" && words[9] == "0").count() as u64)
}

/// The same number, once it has not changed for a while.
fn settled_queue(port: u16) -> Result<u64> {
    let since = Instant::now();
    let mut last = (unaccepted(port)?, Instant::now());
    while last.1.elapsed() < Duration::from_millis(500) {
        std::thread::sleep(Duration::from_millis(20));
        let now = unaccepted(port)?;
        if now != last.0 {
            last = (now, Instant::now());
        }
        ensure!(since.elapsed() < PATIENCE, "what waits changes all the time");
    }
    Ok(last.0)
}

/// A Puma with four threads: three are busy, then all of them, with more connections, which wait. Three rounds, the first with requests that are
/// older than tracing.
#[test]
fn a_puma_without_a_free_thread() -> Result<()> {
    let live = Live::idle_beside_others()?;
    Ruby::two_of(Puma::rubies()?, |ruby| {
        let puma = Puma::start_on(&live, ruby, "load.ru")?;
        let pid = puma.process.pid();
        let mut clients: Vec<_> = (0..3).map(|_| request(&puma, "/hold")).collect::<Result<_>>()?;
        std::thread::sleep(Duration::from_millis(500));
        let mut gctrace = Invocation::jsonl(["--pid", &pid.to_string(), "--requests"])?.start_ready()?;
        for round in 0..3 {
            let go = puma.truth.with_extension("go");
            let _may_be_absent = std::fs::remove_file(&go);
            // In the first round, three threads serve a request that gctrace has not seen them take: the number of busy threads is unknown
            // until each of them has been seen to take another one.
            let unknown = round == 0;
            if !unknown {
                response(request(&puma, "/now")?)?;
                wait_load(&mut gctrace, pid, Some(0), Some(0))?;
                clients = (0..3).map(|_| request(&puma, "/hold")).collect::<Result<_>>()?;
            }
            wait_load(&mut gctrace, pid, (!unknown).then_some(3), Some(0))?;
            for _ in 0..7 {
                clients.push(request(&puma, "/hold")?);
            }
            let waiting = settled_queue(puma.port)?;
            // Puma may take some into its own queue.
            ensure!((1..=6).contains(&waiting), "{waiting} wait");
            wait_load(&mut gctrace, pid, (!unknown).then_some(4), Some(waiting))?;
            std::fs::write(&go, "")?;
            clients.drain(..).try_for_each(response)?;
            // Now each thread serves a request that it was seen to take.
            for client in (0..8).map(|_| request(&puma, "/brief")).collect::<Result<Vec<_>>>()? {
                response(client)?;
            }
            wait_load(&mut gctrace, pid, Some(0), Some(0)).with_context(|| format!("round {round}"))?;
        }
        let report = gctrace.stop()?;
        ledger::check_lossless(&report)?;
        ensure!(
            report.loads.iter().all(|load| load.pid == pid && load.busy_threads <= Some(4)),
            "{:?}",
            report.loads
        );
        Ok(())
    })
}

/// For a listening program that is not a known server, gctrace does not claim that no thread is busy. Two processes share the socket: the waiting
/// connections of a service count once.
#[test]
fn a_shared_socket() -> Result<()> {
    let _live = Live::idle_beside_others()?;
    Ruby::two_at_a_time(|ruby| {
        let mut command = ruby.command()?;
        command.arg(rubies_dir().join("accept_queue.rb")).env("OTEL_SERVICE_NAME", "shared");
        let mut process = Guarded::start("accept_queue.rb", &mut command)?;
        let text = process.wait_stdout(PATIENCE, "its port", |line| line.contains(' '))?;
        let (port, child) = text.trim().split_once(' ').context("two numbers")?;
        let (port, child): (u16, u32) = (port.parse()?, child.parse()?);
        let pids = format!("{},{child}", process.pid());
        let args = ["--pid", &pids, "--requests", "--prometheus", "127.0.0.1:0"];
        let mut gctrace = Invocation::jsonl(args)?.start()?;
        let served = gctrace.wait_error("metrics on")?;
        let address = served.split("http://").nth(1).and_then(|rest| rest.split('/').next());
        let address: SocketAddr = address.with_context(|| served.clone())?.parse()?;
        gctrace.wait_ready()?;
        let pid = process.pid();
        let mut clients = Vec::new();
        for count in [0, 5, 9] {
            while clients.len() < count {
                clients.push(TcpStream::connect(("127.0.0.1", port))?);
            }
            for pid in [pid, child] {
                wait_load(&mut gctrace, pid, None, Some(count as u64))?;
            }
            let metrics = http::get(address, "/metrics")?.text();
            let wanted = format!("cruby_server_accept_queue{{service=\"shared\",container=\"\"}} {count}");
            ensure!(
                metrics.contains(&wanted) && !metrics.contains("threads_busy{"),
                "no {wanted}: {metrics}"
            );
        }
        let report = gctrace.stop()?;
        let mut of: HashMap<u32, u64> = HashMap::new();
        for load in &report.loads {
            *of.entry(load.pid).or_default() += 1;
        }
        ensure!(of.len() == 2 && of.values().all(|count| *count >= 3), "{of:?}");
        Ok(())
    })
}
