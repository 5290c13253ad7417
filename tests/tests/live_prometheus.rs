//! What a real Prometheus reads from a real run.

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use gctrace_tests::PATIENCE;
use gctrace_tests::child::Guarded;
use gctrace_tests::free_port;
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::http;
use gctrace_tests::live::Live;
use gctrace_tests::puma::Puma;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::Script;
use gctrace_tests::slowness;
use serde_json::Value;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").to_owned()
}

fn promtool(args: &[&str]) -> Result<String> {
    let output =
        Command::new("promtool").args(args).output().context("promtool; `cargo xtask setup` installs it")?;
    let (said, errors) =
        (String::from_utf8(output.stdout)?, String::from_utf8_lossy(&output.stderr).into_owned());
    ensure!(output.status.success(), "promtool {args:?}: {said}{errors}");
    Ok(said)
}

/// A Prometheus that scrapes one target five times per second.
struct Prometheus {
    _process: Guarded,
    url: String,
}

impl Prometheus {
    fn start(live: &Live, target: &str) -> Result<Self> {
        let config = live.path("prometheus.yml");
        let rules = repository().join("deploy/prometheus/gctrace.rules.yml");
        let text = format!(
            "global: {{scrape_interval: 200ms, evaluation_interval: 1s}}\nrule_files: ['{}']\nscrape_configs:\n\
             - job_name: gctrace\n  static_configs: [{{targets: ['{target}']}}]\n",
            rules.display()
        );
        std::fs::write(&config, text)?;
        let mut last = None;
        for attempt in 0..5 {
            // Another program may take the port in the meantime.
            let port = free_port()?;
            let data = live.path(&format!("prometheus-{port}-{attempt}"));
            let mut command = Command::new("prometheus");
            command.arg(format!("--config.file={}", config.display()));
            command.arg(format!("--storage.tsdb.path={}", data.display()));
            command.arg(format!("--web.listen-address=127.0.0.1:{port}"));
            let mut process = Guarded::start("prometheus", &mut command)?;
            let ready = |line: &str| line.contains("Server is ready");
            match process.wait_stderr(PATIENCE, "its readiness", ready) {
                Ok(_) => return Ok(Self { _process: process, url: format!("http://127.0.0.1:{port}") }),
                Err(error) => last = Some(error),
            }
        }
        last.map_or_else(|| bail!("no attempt"), Err)
    }

    /// The values of a query.
    fn query(&self, query: &str) -> Result<Vec<f64>> {
        let said = promtool(&["query", "instant", "--format=json", &self.url, query])?;
        let found: Value = serde_json::from_str(&said).with_context(|| said.clone())?;
        let one = |sample: &Value| sample["value"][1].as_str()?.parse().ok();
        found
            .as_array()
            .with_context(|| said.clone())?
            .iter()
            .map(|one_of| one(one_of).context("a value"))
            .collect()
    }

    /// Waits until a query has exactly this value.
    fn wait(&self, query: &str, wanted: f64) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let found = self.query(query)?;
            if found == [wanted] {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "{query} is {found:?}, not {wanted}");
            std::thread::sleep(Duration::from_millis(200));
        }
    }
}

/// Prometheus has as many collections as `GC.count` and as many objects as `GC.stat`, and every query of the dashboard
/// works.
#[test]
fn figures_are_the_programs_own() -> Result<()> {
    let live = Live::begin()?;
    // The server and the dashboard do not depend on the release.
    let main = Ruby::main()?.label();
    Ruby::first_and_last(|ruby| figures(&live, ruby, ruby.label() == main))
}

/// Compares the figures of one run; `server`: also tests the dashboard and the server itself.
fn figures(live: &Live, ruby: &Ruby, server: bool) -> Result<()> {
    let mut gctrace = Invocation::new(["--all-ruby", "--quiet", "--prometheus", "127.0.0.1:0"])?
        .with(|command| {
            command.env_remove("OTEL_SERVICE_NAME");
        })
        .start()?;
    let told = gctrace.wait_error("metrics on")?;
    let listens = told.split("http://").nth(1).and_then(|rest| rest.split('/').next());
    let listens = listens.context(told.clone())?.to_owned();
    gctrace.wait_ready()?;
    let prometheus = Prometheus::start(live, &listens)?;
    let service = format!("shop {} \"\\", ruby.version());
    let script = Script::unwitnessed(live, ruby, "scraped.rb")?
        .arg("40")
        .arg("stay")
        .env("OTEL_SERVICE_NAME", &service);
    let selector = format!("{{service=\"shop {} \\\"\\\\\"}}", ruby.version());
    let one = |query: String| -> Result<f64> {
        let found = prometheus.query(&query)?;
        found.first().copied().filter(|_| found.len() == 1).with_context(|| format!("{query}: {found:?}"))
    };
    let collections = format!("sum(cruby_gc_collections_total{selector})");
    let objects = || -> Result<[u64; 2]> {
        let total = |what: &str| one(format!("cruby_{what}_objects_total{selector}"));
        Ok([total("allocated")? as u64, total("freed")? as u64])
    };
    let mut running = script.waiting().start()?;
    let told = running.wait_for_end("settled")?;
    running.wait_for("ready")?;
    prometheus.wait(&collections, told.split_whitespace().next().context("a number")?.parse()?)?;
    let before = objects()?;
    running.say("go")?;
    running.wait_for("worked")?;
    let outputs = running.outputs();
    let (report, _) = outputs.read("")?;
    let count = report.after["count"].as_u64().context("GC.count")?;
    prometheus.wait(&collections, count as f64)?;
    let stat = |key: &str| report.after.get(key).and_then(Value::as_u64).context(key.to_owned());
    let majors = format!("{},type=\"major\"}}", selector.trim_end_matches('}'));
    prometheus.wait(&format!("sum(cruby_gc_collections_total{majors})"), stat("major_gc_count")? as f64)?;
    // Both times the last GC event is the end of a collection, after which the program allocated nothing before it read GC.stat.
    let settled = report.extra["settled"].as_object().context("GC.stat before the work")?;
    let after = objects()?;
    for (at, key) in ["total_allocated_objects", "total_freed_objects"].into_iter().enumerate() {
        let grown = stat(key)? - settled[key].as_u64().context(key)?;
        ensure!(
            after[at] - before[at] == grown && grown > 100_000,
            "{key}: from {} to {}, but it grew by {grown}",
            before[at],
            after[at]
        );
    }
    // Allocations before the first GC event are not seen.
    let all = stat("total_allocated_objects")?;
    ensure!(after[0] <= all, "{} <= {all}", after[0]);
    let pauses = one(format!("sum(cruby_gc_pause_seconds_count{selector})"))?;
    ensure!(pauses >= count as f64, "{pauses} pauses of {count} cycles");
    if report.after.contains_key("time") {
        // Both are the time of the same pauses. Ruby reads its clock between the probes, and counts CPU time, which a preemption does not
        // add to. gctrace reads its own a moment earlier at both ends.
        let seconds = one(format!("sum(cruby_gc_time_seconds_total{selector})"))?;
        let theirs = stat("time")? as f64 / 1000.0;
        println!("{seconds} s in {pauses} pauses, {theirs} s by GC.stat");
        ensure!(
            theirs > 0.01 && seconds >= theirs - pauses * 20e-6 * slowness() as f64,
            "{seconds} s in {pauses} pauses, {theirs} s by GC.stat"
        );
    }
    let longest =
        one(format!("histogram_quantile(1, sum by (le) (cruby_gc_pause_seconds_bucket{selector}))"))?;
    ensure!(longest > 0.0 && longest.is_finite(), "a longest pause of {longest} s");
    let rss = one(format!("cruby_resident_memory_bytes{selector}"))?;
    ensure!((4e6..4e9).contains(&rss), "{rss} bytes");
    prometheus.wait(&format!("cruby_processes{selector}"), 1.0)?;
    if server {
        dashboard_works(&prometheus, "shop.*", |query| !OPTIONAL.iter().any(|name| query.contains(name)))?;
        server_answers(live, &listens)?;
    }

    // The counts of an ended process stay, but it no longer counts as running.
    running.say("")?;
    running.finish()?;
    prometheus.wait(&format!("cruby_processes{selector}"), 0.0)?;
    let last = one(collections)?;
    ensure!(last >= count as f64, "{last} collections after the end, {count} before");
    let finished = gctrace.interrupt()?;
    ensure!(finished.status.success(), "{}", finished.errors());
    Ok(())
}

/// Parts of names of metrics that exist only with a flag, or only of some Rubies.
const OPTIONAL: [&str; 7] = [
    "cruby_gvl",
    "cruby_request",
    "cruby_server",
    "cruby_handed_out",
    "cruby_proportional",
    "cruby_private_dirty",
    "cruby_heap_pool",
];

/// Every query of the dashboard that is `wanted` finds something of a service.
fn dashboard_works(prometheus: &Prometheus, service: &str, wanted: impl Fn(&str) -> bool) -> Result<()> {
    let dashboard = std::fs::read_to_string(repository().join("deploy/grafana/ruby-gc.json"))?;
    let dashboard: Value = serde_json::from_str(&dashboard)?;
    for panel in dashboard["panels"].as_array().context("panels")? {
        for target in panel["targets"].as_array().context("targets")? {
            let query = target["expr"].as_str().context("a query")?;
            if !wanted(query) {
                continue;
            }
            let query = query.replace("$service", service).replace("$__rate_interval", "1m");
            // A rate needs two scrapes.
            let deadline = Instant::now() + PATIENCE;
            while prometheus.query(&query)?.is_empty() {
                ensure!(Instant::now() < deadline, "{query} finds nothing");
                std::thread::sleep(Duration::from_millis(200));
            }
        }
    }
    Ok(())
}

/// Every panel has data of a server under load, except those of long waits, queue times and jobs.
#[test]
fn dashboard_of_a_server() -> Result<()> {
    let live = Live::beside_others()?;
    let newest = Puma::rubies()?.pop().context("no Ruby with Puma")?;
    let puma = Puma::start_on(&live, &newest, "requests.ru")?;
    let pid = puma.process.pid().to_string();
    let flags = ["--requests", "--alloc", "--shares", "--gvl", "--gvl-budget=100", "--quiet"];
    let args = ["--pid", &pid, "--prometheus", "127.0.0.1:0"];
    let mut gctrace = Invocation::new(args.iter().chain(&flags))?
        .with(|command| {
            command.env_remove("OTEL_SERVICE_NAME");
        })
        .start()?;
    let told = gctrace.wait_error("metrics on")?;
    let listens = told.split("http://").nth(1).and_then(|rest| rest.split('/').next());
    let listens = listens.context(told.clone())?.to_owned();
    gctrace.wait_ready()?;
    let prometheus = Prometheus::start(&live, &listens)?;
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let client = scope.spawn(|| -> Result<()> {
            for path in ["/gc/a", "/lazy/a", "/slow/a"].into_iter().cycle() {
                if over.load(Ordering::Relaxed) {
                    return Ok(());
                }
                ensure!(http::get(SocketAddr::from(([127, 0, 0, 1], puma.port)), path)?.code == 200);
            }
            Ok(())
        });
        // Long waits for the GVL need contention, queue times a server in a cgroup of its own, and jobs Sidekiq.
        let absent = |query: &str| {
            ["cruby_gvl_long", "cruby_request_queue", "method=\"(job)\""]
                .iter()
                .any(|part| query.contains(part))
        };
        let works = dashboard_works(&prometheus, ".*", |query| !absent(query));
        over.store(true, Ordering::Relaxed);
        works.and(client.join().expect("a client panicked"))
    })?;
    let finished = gctrace.interrupt()?;
    ensure!(finished.status.success(), "{}", finished.errors());
    Ok(())
}

/// The server answers as Prometheus demands, and only what it has.
fn server_answers(live: &Live, listens: &str) -> Result<()> {
    let address = listens.parse()?;
    let text = http::get(address, "/metrics")?;
    ensure!(text.headers["content-type"].starts_with("text/plain; version=0.0.4"), "{:?}", text.headers);
    let file = live.path("metrics.txt");
    std::fs::write(&file, &text.body)?;
    let checked =
        Command::new("promtool").args(["check", "metrics"]).stdin(std::fs::File::open(&file)?).output()?;
    ensure!(
        checked.status.success() && checked.stderr.is_empty(),
        "promtool check metrics: {}",
        String::from_utf8_lossy(&checked.stderr)
    );
    ensure!(http::get(address, "/healthz")?.code == 200 && http::get(address, "/")?.code == 404);
    ensure!(http::post(address, "/metrics", &[], b"x")?.code == 405);
    Ok(())
}

/// The alert rules pass their own tests.
#[test]
fn alert_rules() -> Result<()> {
    let rules = repository().join("deploy/prometheus");
    let path = |name: &str| rules.join(name).to_string_lossy().into_owned();
    promtool(&["check", "rules", &path("gctrace.rules.yml")])?;
    promtool(&["test", "rules", &path("gctrace.rules.test.yml")])?;
    Ok(())
}

/// An address in use leads to one clear error, before anything is attached.
#[test]
fn taken_address() -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?.to_string();
    let _turn = Live::begin()?;
    let finished = Invocation::new(["--all-ruby", "--prometheus", &address])?.run()?;
    ensure!(
        finished.status.code() == Some(2) && finished.errors().contains(&format!("listening on {address}")),
        "{finished:?}"
    );
    Ok(())
}
