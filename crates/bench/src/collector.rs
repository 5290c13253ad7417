//! `cargo xtask bench --collector`: the rate at which a collector accepts sample sets, on SQLite, uncompressed and compressed by gzip (what
//! gctrace sends), and on PostgreSQL.
//!
//! Agents are threads of this program; each sends its sets one after the other, each on a new connection, as the protocol's
//! agent does, and waits for each answer. Collector, agents and PostgreSQL share the machine, so the work per core is computed from
//! the CPU time of the collector's process.

use std::{
    fmt::Write as _,
    fs,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    process::Command,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use flate2::{Compress, Compression, Crc, FlushCompress};
use gctrace_tests::{PATIENCE, child::Guarded, postgres::Postgres};
use rustix::process::Signal;

use super::cpu_ticks;
use xtask::util::{progress, target_dir};

/// Number of simultaneous agents.
const AGENTS: usize = 500;
/// Number of sets that each agent sends.
const SETS: usize = 4;
/// Number of samples in a set: the maximum that the protocol's agent sends.
const SAMPLES: usize = 2000;
/// How long an agent retries a set that is answered with 500. gctrace retries for longer, and keeps its sets meanwhile.
const INSISTS: Duration = Duration::from_mins(5);
/// Timeout for an answer, on an overloaded machine.
const TIMEOUT: Duration = Duration::from_mins(5);

struct Measured {
    store: &'static str,
    seconds: f64,
    collector_cpu: f64,
    /// Number of retries: memory is limited, and sets beyond the limit are answered with 500.
    repeated: u64,
    /// Seconds per set, including retries, sorted.
    answers: Vec<f64>,
    set_bytes: usize,
    stored_bytes: u64,
}

/// Runs the measurement.
pub(super) fn run(json: bool) -> Result<()> {
    let scratch = target_dir()?.join("bench-collector");
    let file = scratch.join("sets.db");
    let sqlite = |name: &'static str, gzip: bool| {
        fs::create_dir_all(&scratch).with_context(|| format!("cannot create {}", scratch.display()))?;
        let measured = measure(name, gzip, &format!("sqlite:{}", file.display()), || {
            let size = |name: &str| fs::metadata(scratch.join(name)).map_or(0, |data| data.len());
            Ok(size("sets.db") + size("sets.db-wal"))
        })?;
        fs::remove_dir_all(&scratch).with_context(|| format!("cannot remove {}", scratch.display()))?;
        anyhow::Ok(measured)
    };
    let show = |measured: Measured| println!("{}", if json { measured.json() } else { measured.text() });
    show(sqlite("SQLite", false)?);
    show(sqlite("SQLite, gzip", true)?);
    let server = Postgres::start()?;
    show(measure("PostgreSQL", false, &server.address(), || {
        Ok(server.query("SELECT pg_total_relation_size('gctrace_sample_set')")?.parse()?)
    })?);
    Ok(())
}

fn measure(
    store: &'static str,
    gzip: bool,
    name: &str,
    stored: impl Fn() -> Result<u64>,
) -> Result<Measured> {
    progress(format!("bench: {AGENTS} agents, {SETS} sets of {SAMPLES} samples each, {store}"));
    let mut command = Command::new(target_dir()?.join("release/gctrace"));
    command.args(["collector", "--listen", "127.0.0.1:0", "--store", name]);
    let mut collector = Guarded::start("collector", &mut command)?;
    let line = collector.wait_stderr(PATIENCE, "its address", |line| line.contains("listens on"))?;
    let address = line.split("://").nth(1).and_then(|rest| rest.split(',').next()?.parse().ok());
    let address: SocketAddr = address.context(line)?;
    let form = "Content-Type: application/x-www-form-urlencoded";
    let token = post(address, "/accounts", form, &[b"email=a%40b&app=bench"])?;
    let samples = samples();
    let compressed = if gzip { Some(Deflated::of(samples.as_bytes(), FlushCompress::Finish)?) } else { None };
    let set_bytes = match &compressed {
        None => header(&token, 0).len() + samples.len(),
        Some(samples) => samples.set(&header(&token, 0))?.concat().len(),
    };
    let answers = Mutex::new(Vec::new());
    let failure = Mutex::new(None);
    let repeated = AtomicU64::new(0);
    let (cpu_before, began) = (cpu(&collector)?, Instant::now());
    thread::scope(|scope| {
        for agent in 0..AGENTS {
            let (answers, failure, repeated) = (&answers, &failure, &repeated);
            let (token, samples, compressed) = (&token, &samples, &compressed);
            scope.spawn(move || {
                for set in 0..SETS {
                    let header = header(token, agent * SETS + set);
                    let gzip = compressed.as_ref().map(|samples| samples.set(&header).expect("it is memory"));
                    let (fields, body) = match &gzip {
                        None => (JSON, vec![header.as_bytes(), samples.as_bytes()]),
                        Some(set) => (GZIP, set.iter().map(Vec::as_slice).collect()),
                    };
                    let sent = Instant::now();
                    let mut answer = post(address, "/ruby", fields, &body);
                    while answer.is_err() && sent.elapsed() < INSISTS {
                        repeated.fetch_add(1, Ordering::Relaxed);
                        // A random pause, so that agents that were refused together do not retry together.
                        thread::sleep(Duration::from_millis(fastrand::u64(500..4000)));
                        answer = post(address, "/ruby", fields, &body);
                    }
                    let seconds = sent.elapsed().as_secs_f64();
                    match answer {
                        Ok(_) => answers.lock().expect("no panic").push(seconds),
                        Err(error) => {
                            failure.lock().expect("no panic").get_or_insert(error);
                        }
                    }
                }
            });
        }
    });
    let (seconds, collector_cpu) = (began.elapsed().as_secs_f64(), cpu(&collector)? - cpu_before);
    let failure = failure.into_inner().expect("no panic");
    let mut answers = answers.into_inner().expect("no panic");
    let accepted = answers.len();
    if let Some(error) = failure {
        let text = format!("only {accepted} of {} sets were accepted", AGENTS * SETS);
        return Err(error.context(text));
    }
    answers.sort_by(f64::total_cmp);
    let stored_bytes = stored()?;
    collector.signal(Signal::TERM)?;
    let finished = collector.finish(PATIENCE)?;
    ensure!(finished.status.success(), "{}", finished.errors());
    Ok(Measured {
        store,
        seconds,
        collector_cpu,
        repeated: repeated.into_inner(),
        answers,
        set_bytes,
        stored_bytes,
    })
}

impl Measured {
    fn samples(&self) -> f64 {
        (self.answers.len() * SAMPLES) as f64
    }

    fn quantile(&self, percent: usize) -> f64 {
        self.answers[(self.answers.len() - 1) * percent / 100]
    }

    fn text(&self) -> String {
        format!(
            "{:<14}{:>10.0} samples/s, {:>10.0} per second of the collector's CPU, answer {:.2} s (median) {:.2} s (P99), {} sent again, \
             {} bytes a set sent, {:.0} bytes a sample stored",
            self.store,
            self.samples() / self.seconds,
            self.samples() / self.collector_cpu,
            self.quantile(50),
            self.quantile(99),
            self.repeated,
            self.set_bytes,
            self.stored_bytes as f64 / self.samples()
        )
    }

    fn json(&self) -> String {
        format!(
            r#"{{"store":"{}","samples_per_s":{:.0},"samples_per_cpu_s":{:.0},"median_s":{:.3},"p99_s":{:.3},"repeated":{},"set_bytes":{},"stored_bytes_per_sample":{:.1}}}"#,
            self.store,
            self.samples() / self.seconds,
            self.samples() / self.collector_cpu,
            self.quantile(50),
            self.quantile(99),
            self.repeated,
            self.set_bytes,
            self.stored_bytes as f64 / self.samples()
        )
    }
}

/// CPU time of a process, seconds.
fn cpu(process: &Guarded) -> Result<f64> {
    let stat = fs::read_to_string(format!("/proc/{}/stat", process.pid()))?;
    let ticks = cpu_ticks(&stat).context("its CPU time")?;
    Ok(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// Header fields of an uncompressed set (`JSON`), and of a compressed one (`GZIP`).
const JSON: &str = "Content-Type: application/json";
const GZIP: &str = "Content-Type: application/json\r\nContent-Encoding: gzip";

/// A part of a gzip file: agents have their own headers but the same samples, which are compressed once.
struct Deflated {
    bytes: Vec<u8>,
    crc: Crc,
}

impl Deflated {
    /// Compresses as gctrace does.
    fn of(text: &[u8], flush: FlushCompress) -> Result<Self> {
        let mut compress = Compress::new(Compression::fast(), false);
        let mut bytes = Vec::with_capacity(text.len() + 1024);
        compress.compress_vec(text, &mut bytes, flush)?;
        ensure!(compress.total_in() == text.len() as u64, "all of it is compressed");
        let mut crc = Crc::new();
        crc.update(text);
        Ok(Self { bytes, crc })
    }

    /// The gzip file of a set with this header and these samples, in parts.
    fn set(&self, header: &str) -> Result<Vec<Vec<u8>>> {
        // The header ends at a byte boundary, where the samples continue.
        let Self { bytes, mut crc } = Self::of(header.as_bytes(), FlushCompress::Sync)?;
        crc.combine(&self.crc);
        let end = [crc.sum().to_le_bytes(), crc.amount().to_le_bytes()].concat();
        Ok(vec![vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255], bytes, self.bytes.clone(), end])
    }
}

/// Sends a request on a new connection, its body in pieces. Returns the body of a 200.
fn post(address: SocketAddr, path: &str, fields: &str, body: &[&[u8]]) -> Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_nodelay(true)?;
    let length: usize = body.iter().map(|piece| piece.len()).sum();
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\n{fields}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(head.as_bytes())?;
    for piece in body {
        stream.write_all(piece)?;
    }
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("an answer")?;
    ensure!(head.starts_with("HTTP/1.1 200"), "{head} {body}");
    Ok(body.to_owned())
}

const KEYS: [&str; 29] = [
    "count",
    "time",
    "heap_allocated_pages",
    "heap_sorted_length",
    "heap_allocatable_pages",
    "heap_available_slots",
    "heap_live_slots",
    "heap_free_slots",
    "heap_final_slots",
    "heap_marked_slots",
    "heap_eden_pages",
    "heap_tomb_pages",
    "total_allocated_pages",
    "total_freed_pages",
    "total_allocated_objects",
    "total_freed_objects",
    "malloc_increase_bytes",
    "malloc_increase_bytes_limit",
    "minor_gc_count",
    "major_gc_count",
    "compact_count",
    "read_barrier_faults",
    "total_moved_objects",
    "remembered_wb_unprotected_objects",
    "remembered_wb_unprotected_objects_limit",
    "old_objects",
    "old_objects_limit",
    "oldmalloc_increase_bytes",
    "oldmalloc_increase_bytes_limit",
];

/// The start of a set; each process has its own.
fn header(token: &str, pid: usize) -> String {
    let keys = KEYS.map(|key| format!("{key:?}")).join(",");
    format!(
        r#"[["{token}","3.1.2","7.0.4",{{}},"1.0.71",["USE_RGENGC"],{{"RVALUE_SIZE":40}},[{keys}],"host",1,{pid}]"#
    )
}

/// The rest of a set: cycles of a program with a steady heap.
fn samples() -> String {
    let mut text = String::new();
    let mut random = 1_u64;
    for at in 0..SAMPLES as u64 {
        // Numbers that compress like real ones: they increase, and their last digits are random.
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let noise = (random >> 33) % 5000;
        let (cycle, ends) = (at / 2 + 1, at % 2 == 1);
        let (live, allocated) = (380_000 + noise, 400_000 + at * 30_000 + noise);
        let stat = [
            cycle,
            cycle * 2,
            960,
            960,
            0,
            391_000,
            live,
            391_000 - live % 391_000,
            0,
            200_000 + noise,
            960,
            0,
            960,
            0,
            allocated,
            allocated - live % 380_000,
            noise * 1000,
            16_777_216,
            cycle - cycle / 10,
            cycle / 10,
            0,
            0,
            0,
            2_000 + noise % 100,
            4_000,
            150_000 + noise,
            300_000,
            noise * 3000,
            16_777_216,
        ];
        let stat = stat.map(|value| value.to_string()).join(",");
        let (ts, rss, event) = (
            1_700_000_000.0 + at as f64 / 100.0 + noise as f64 / 1e6,
            90_000_000 + noise * 4096,
            if ends { "GC_CYCLE_ENDED" } else { "GC_CYCLE_STARTED" },
        );
        // Writing to a string cannot fail.
        let _infallible = write!(
            text,
            r#",[{ts:.9},{rss},{rss},"{event}",[{stat}],{{"major_by":null,"gc_by":"newobj","have_finalizer":false,"immediate_sweep":false,"state":"none"}},null,null]"#
        );
    }
    text.push(']');
    text
}
