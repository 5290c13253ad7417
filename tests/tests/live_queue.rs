//! How long requests wait for a thread: the time at which their last bytes arrived is compared with the time at which the client sent them.

use std::collections::HashMap;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use gctrace_tests::child::Guarded;
use gctrace_tests::container::Cgroup;
use gctrace_tests::ensure_times;
use gctrace_tests::free_port;
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::live::{Live, rubies_dir};
use gctrace_tests::report::{Report, RequestLine};
use gctrace_tests::timing::settled;
use gctrace_tests::{PATIENCE, ledger};
use rustix::process::Signal;
use rustix::time::{ClockId, clock_gettime};

/// The response of the application.
const BODY: &str = "SECRETBODY";

fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Starts a Puma with four threads in a cgroup. A socket belongs to the cgroup of the process that creates it.
fn start(live: &Live, cgroup: &Path, workers: &str) -> Result<(Guarded, u16)> {
    let port = free_port()?;
    let web = rubies_dir().join("web");
    let mut command = Command::new("sh");
    command.args(["-c", r#"echo $$ > "$0" && exec puma "$@""#]).arg(cgroup.join("cgroup.procs"));
    command.args([
        "-C",
        "requests.rb",
        "-b",
        &format!("tcp://127.0.0.1:{port}"),
        "-w",
        workers,
        "requests.ru",
    ]);
    command.current_dir(&web).env("GCTRACE_TEST_TRUTH", live.path("truth")).env("RACK_ENV", "production");
    let process = Guarded::start("puma", &mut command)?;
    let since = Instant::now();
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        ensure!(since.elapsed() < PATIENCE, "puma does not listen");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok((process, port))
}

/// When the last bytes of a request were sent: between `before` and `after`.
#[derive(Clone, Copy)]
struct Sent {
    before: u64,
    after: u64,
    /// By this time the kernel on the other side had acknowledged them, so they had arrived.
    acknowledged: u64,
}

/// Waits until everything sent on this connection is acknowledged: `tx_queue` of `/proc/net/tcp` counts unacknowledged bytes.
fn acknowledged(stream: &TcpStream) -> Result<u64> {
    let text = |address: SocketAddr| match address {
        // As the kernel prints it: the bytes of the address as a number in this machine's byte order.
        SocketAddr::V4(v4) => Ok(format!("{:08X}:{:04X}", u32::from_ne_bytes(v4.ip().octets()), v4.port())),
        SocketAddr::V6(v6) => bail!("{v6}"),
    };
    let (own, other) = (text(stream.local_addr()?)?, text(stream.peer_addr()?)?);
    let since = Instant::now();
    while since.elapsed() < PATIENCE {
        let table = std::fs::read_to_string("/proc/net/tcp")?;
        // Number, both addresses, state, `tx_queue:rx_queue`. A row may be missing if other rows are removed meanwhile.
        let empty = table.lines().any(|line| {
            let words: Vec<&str> = line.split_whitespace().take(5).collect();
            matches!(words[..], [_, one, two, _, queues]
                if one == own && two == other && queues.starts_with("00000000:"))
        });
        if empty {
            return Ok(now_ns());
        }
        // The table is long, and the response acknowledges the bytes, too.
        std::thread::sleep(Duration::from_millis(4));
    }
    bail!("{own} to {other} is not acknowledged")
}

struct Client {
    stream: TcpStream,
    sent: Vec<(String, Sent)>,
}

impl Client {
    fn connect(port: u16) -> Result<Self> {
        let stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, sent: Vec::new() })
    }

    /// Sends a request in pieces of this many bytes, and waits for the response.
    fn request(&mut self, kind: &str, name: &str, body: &str, piece: usize) -> Result<()> {
        let method = if body.is_empty() { "GET" } else { "POST" };
        let text = format!(
            "{method} /{kind}/{name} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        let (mut before, mut after) = (0, 0);
        for piece in text.as_bytes().chunks(piece) {
            if before != 0 {
                std::thread::sleep(Duration::from_millis(3));
            }
            before = now_ns();
            self.stream.write_all(piece)?;
            after = now_ns();
        }
        let acknowledged = acknowledged(&self.stream)?;
        self.sent.push((name.to_owned(), Sent { before, after, acknowledged }));
        let (mut text, mut buffer) = (Vec::new(), [0; 4096]);
        while String::from_utf8_lossy(&text).matches(BODY).count() < 3 {
            let read = self.stream.read(&mut buffer)?;
            ensure!(read > 0, "closed after {}", String::from_utf8_lossy(&text));
            text.extend_from_slice(&buffer[..read]);
        }
        Ok(())
    }
}

/// A name consisting of letters, which no template replaces.
fn name(number: usize) -> String {
    let letter = |at: usize| char::from(b'g' + (at % 20) as u8);
    [number / 400, number / 20, number].into_iter().map(letter).collect()
}

/// Twelve concurrent clients for four threads: keep-alive, new connections, heads and bodies in pieces.
fn load(port: u16, round: usize) -> Result<HashMap<String, Sent>> {
    let client = move |number: usize| -> Result<Vec<(String, Sent)>> {
        let first = (round * 12 + number) * 12;
        let mut client = Client::connect(port)?;
        for at in 0..6 {
            let kind = if at % 2 == 0 { "slow" } else { "plain" };
            client.request(kind, &name(first + at), "", usize::MAX)?;
        }
        client.request("plain", &name(first + 6), "", 40)?;
        client.request("plain", &name(first + 7), "a body of some length", 60)?;
        for at in 8..12 {
            let mut other = Client::connect(port)?;
            other.request("slow", &name(first + at), "", usize::MAX)?;
            client.sent.append(&mut other.sent);
        }
        Ok(client.sent)
    };
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..12).map(|number| scope.spawn(move || client(number))).collect();
        let mut sent = HashMap::new();
        for client in clients {
            sent.extend(client.join().expect("a client panicked")?);
        }
        Ok(sent)
    })
}

fn trace(
    pid: u32,
    port: u16,
    rounds: std::ops::Range<usize>,
) -> Result<(Report, Vec<String>, HashMap<String, Sent>)> {
    let gctrace = Invocation::jsonl(["--pid", &pid.to_string(), "--requests"])?.start_ready()?;
    let mut sent = HashMap::new();
    for round in rounds {
        sent.extend(load(port, round)?);
    }
    gctrace.wait_requests(sent.len())?;
    let (report, finished) = gctrace.stop_by(Signal::INT)?;
    ledger::check_lossless(&report)?;
    Ok((report, finished.stderr, sent))
}

/// The lines of the requests that were sent.
fn lines<'a>(report: &'a Report, sent: &HashMap<String, Sent>) -> Result<Vec<(&'a RequestLine, Sent)>> {
    let line = |line: &'a RequestLine| Some((line, *sent.get(line.path.as_deref()?.rsplit('/').next()?)?));
    let lines: Vec<_> = report.requests.iter().filter_map(line).collect();
    ensure!(lines.len() == sent.len(), "{} of {} requests", lines.len(), sent.len());
    Ok(lines)
}

/// The last bytes arrived after the client started to send them, before their acknowledgement, and mostly as soon as they were sent. The
/// reported time is from then until a thread took the request: sockets waiting to be accepted, busy threads, and clients that send in
/// pieces. Tested twice.
#[test]
fn queue_times_are_those_of_the_client() -> Result<()> {
    settled(compare_queue_times)
}

fn compare_queue_times() -> Result<()> {
    let live = Live::begin()?;
    let cgroup = Cgroup::new(None, "queue")?;
    let (server, port) = start(&live, cgroup.path(), "0")?;
    for round in [0..2, 2..4] {
        let (report, _, sent) = trace(server.pid(), port, round)?;
        let mut late = Vec::new();
        let mut waited = Vec::new();
        for (line, Sent { before, after, acknowledged }) in lines(&report, &sent)? {
            let queue_ns = line.queue_ns.with_context(|| format!("no queue time: {line:?}"))?;
            let arrival = line.begin_ns - queue_ns;
            ensure!(arrival >= before, "{line:?} had come {} ns before it was sent", before - arrival);
            ensure!(
                arrival <= acknowledged,
                "{line:?} had come {} ns after it was acknowledged",
                arrival - acknowledged
            );
            late.push(arrival.saturating_sub(after));
            waited.push(queue_ns);
        }
        late.sort_unstable();
        waited.sort_unstable();
        let quantile = |of: &[u64], share: usize| of[of.len() * share / 100];
        // The kernel hands over the bytes within the sender's own call, unless it is busy; then it may take any time.
        ensure_times!(quantile(&late, 50) == 0, "{late:?}");
        // Requests take 30 ms, and there are three times as many clients as threads.
        ensure_times!(quantile(&waited, 75) > 20_000_000, "nobody waited: {waited:?}");
    }
    server.signal(Signal::TERM)?;
    server.finish(PATIENCE)?;
    Ok(())
}

/// The workers of a cluster share the socket that their master opened.
#[test]
fn queue_times_in_a_cluster() -> Result<()> {
    let live = Live::beside_others()?;
    let cgroup = Cgroup::new(None, "queue-cluster")?;
    let (server, port) = start(&live, cgroup.path(), "2")?;
    let (report, _, sent) = trace(server.pid(), port, 0..2)?;
    for (line, Sent { before, acknowledged, .. }) in lines(&report, &sent)? {
        let queue_ns = line.queue_ns.with_context(|| format!("no queue time: {line:?}"))?;
        ensure!((before..=acknowledged).contains(&(line.begin_ns - queue_ns)), "{line:?}");
    }
    server.signal(Signal::TERM)?;
    server.finish(PATIENCE)?;
    Ok(())
}

/// In the root cgroup, the packets of all programs would have to be inspected: the time is unknown, and the reason is reported once for
/// all processes of a cluster.
#[test]
fn no_queue_times_in_the_root_cgroup() -> Result<()> {
    let live = Live::beside_others()?;
    let cgroup = Cgroup::new(None, "queue-root")?;
    let root = cgroup.path().parent().context("the cgroup is the root")?;
    let (server, port) = start(&live, root, "2")?;
    let (report, stderr, sent) = trace(server.pid(), port, 0..1)?;
    for (line, _) in lines(&report, &sent)? {
        ensure!(line.queue_ns.is_none(), "{line:?}");
    }
    let said = stderr.iter().filter(|line| line.contains("root cgroup")).count();
    ensure!(said == 1, "{stderr:?}");
    server.signal(Signal::TERM)?;
    server.finish(PATIENCE)?;
    Ok(())
}
