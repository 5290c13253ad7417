//! Pushes to OTLP receivers and to Pyroscope: decoded by other tools, valid, and equal to the lines.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::child::Guarded;
use gctrace_tests::gctrace::{self, Invocation};
use gctrace_tests::ledger;
use gctrace_tests::live::{Live, rubies_dir};
use gctrace_tests::pprof::Profile;
use gctrace_tests::python;
use gctrace_tests::receiver::{Answer, Push, Receiver};
use gctrace_tests::report::{GvlSumsLine, Report};
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::{Report as ScriptReport, Script};
use gctrace_tests::timing::settled;
use gctrace_tests::{ensure_times, witness};
use serde_json::Value;

const OK: Answer = (200, "", b"");
const METRICS: &str = "/v1/metrics";
const PROFILES: &str = "/v1development/profiles";

/// Runs gctrace with these options and jsonl output on a script that creates garbage.
fn run(live: &Live, ruby: &Ruby, options: &[&str]) -> Result<(Report, String, ScriptReport)> {
    run_script(Script::unwitnessed(live, ruby, "scraped.rb")?.arg("3s"), options)
}

fn run_script(script: Script, options: &[&str]) -> Result<(Report, String, ScriptReport)> {
    run_with(script, options, &[])
}

fn run_with(
    script: Script,
    options: &[&str],
    variables: &[(&str, PathBuf)],
) -> Result<(Report, String, ScriptReport)> {
    let (command, env, outputs) = script.into_parts()?;
    let mut args: Vec<OsString> = options.iter().map(Into::into).collect();
    args.push("--".into());
    args.extend(command);
    let finished = Invocation::jsonl(args)?
        .envs(env)
        .with(|command| {
            command.env("OTEL_SERVICE_NAME", "shop");
            command.env("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test%20bed,service.name=no");
            command.env("OTEL_EXPORTER_OTLP_HEADERS", "X-Key=secret%20word");
            command.envs(variables.iter().map(|(name, value)| (name, value)));
        })
        .run()?;
    let (script, _) = outputs.read("")?;
    Ok((gctrace::read(&finished)?, finished.errors(), script))
}

/// The accepted pushes, decoded by the official Python package, which must find no errors in them.
fn decoded(live: &Live, pushes: &[Push]) -> Result<Value> {
    let mut files: Vec<PathBuf> = Vec::new();
    for (at, push) in pushes.iter().enumerate().filter(|(_, push)| push.code == 200) {
        let kind = if push.path == METRICS { "metrics" } else { "profiles" };
        ensure!(kind == "metrics" || push.path == PROFILES, "a push to {}", push.path);
        ensure!(push.head.contains("content-type: application/x-protobuf"), "{}", push.head);
        ensure!(push.head.contains("x-key: secret word"), "{}", push.head);
        files.push(live.path(&format!("{at}.{kind}")));
        std::fs::write(&files[files.len() - 1], &push.body)?;
    }
    obeying(&files)
}

/// The content of files, decoded by the official Python package, which must find no errors in them.
fn obeying(files: &[PathBuf]) -> Result<Value> {
    let found = python::script("otlp.py", files)?;
    ensure!(found["errors"].as_array().is_some_and(Vec::is_empty), "against the rules: {}", found["errors"]);
    Ok(found)
}

/// Checks that the profiles of each kind add up to the lines, which count and measure every pause.
fn totals_agree(found: &Value, report: &Report, pid: u32) -> Result<()> {
    let (mut pauses, mut ns) = (0, 0);
    for line in report.gcs_of(pid) {
        pauses += line.pauses.len() as u64;
        ns += line.pauses.iter().map(|pause| pause.ns).sum::<u64>();
    }
    let kinds = &found["profiles"]["shop"];
    let total = |kind: &str| kinds[kind]["total"].as_u64().unwrap_or_default();
    ensure!(
        pauses > 0 && total("gc_pauses") == pauses,
        "{} pauses, the lines have {pauses}",
        total("gc_pauses")
    );
    ensure!(total("gc") == ns, "{} ns of pauses, the lines have {ns}", total("gc"));
    Ok(())
}

/// Objects and bytes allocated according to the lines.
fn allocated(report: &Report) -> Result<(u64, u64)> {
    let sum = report.allocs.iter().fold((0, 0), |sum, line| (sum.0 + line.objects, sum.1 + line.bytes));
    ensure!(sum.0 > 0, "no allocation");
    Ok(sum)
}

/// Everything is decoded by the official definition, obeys its rules, and equals the lines and the program's report.
#[test]
fn otlp() -> Result<()> {
    let live = Live::beside_others()?;
    Ruby::first_and_last(|ruby| {
        let receiver = Receiver::start(|_, _| OK)?;
        let url = format!("http://{}/", receiver.address);
        let (report, said, script) =
            run(&live, ruby, &["--otlp", &url, "--push-interval", "500ms", "--wall", "--alloc"])?;
        let pushes = receiver.pushes();
        ensure!(pushes.iter().filter(|push| push.path == PROFILES).count() > 1, "only one window");
        ensure!(
            said.contains(&format!("OTLP: {} requests were accepted, 0 refused, 0 dropped", pushes.len())),
            "{said}"
        );
        let found = decoded(&live, &pushes)?;
        totals_agree(&found, &report, script.pid)?;
        let kinds = &found["profiles"]["shop"];
        let slots = ["alloc_objects", "alloc_space"].map(|kind| kinds[kind]["total"].as_u64());
        let (objects, bytes) = allocated(&report)?;
        ensure!(slots == [Some(objects), Some(bytes)], "{slots:?}; the lines: {objects} in {bytes}");
        for name in ["cpu", "wall", "gc"] {
            let kind = &found["profiles"]["shop"][name];
            let (total, method) = (&kind["total"], &kind["Object#produce_garbage"]);
            let share = method.as_f64().unwrap_or_default() / total.as_f64().unwrap_or(1.0);
            ensure!(
                share > 0.05,
                "the method that makes the garbage has {share} of {name}: {}",
                found["profiles"]
            );
        }
        // Metrics are cumulative: the last ones count.
        let metrics = &found["metrics"]["shop"];
        let sum = |name: &str| -> Result<f64> {
            let points = metrics[name].as_object().with_context(|| format!("no {name} in {metrics:#}"))?;
            Ok(points.values().filter_map(Value::as_f64).sum())
        };
        let lines: Vec<_> = report.gcs_of(script.pid).collect();
        ensure!(sum("cruby.gc.collections")? as usize == lines.len(), "{metrics:#}, {} lines", lines.len());
        let pauses: usize = lines.iter().map(|line| line.pauses.len()).sum();
        ensure!(sum("cruby.gc.pause.duration")? as usize == pauses, "{pauses} pauses: {metrics:#}");
        ensure!(sum("cruby.processes")? as u64 == 0 && sum("cruby.processes.seen")? as u64 == 1);
        ensure!(found["metrics"]["gctrace"]["gctrace.events.lost"].is_object(), "nothing of gctrace itself");
        let resources = found["resources"].as_array().context("resources")?;
        let about =
            resources.iter().find(|about| about["process.pid"] == script.pid).context("the process")?;
        ensure!(about["deployment.environment.name"] == "test bed", "{about}");
        ensure!(about["process.runtime.version"] == script.ruby, "{about}");
        Ok(())
    })
}

/// A server that is busy, that rejects requests as too large, that accepts only a part, or that refuses: each request is sent as often as
/// useful, nothing is delivered twice, and everything is counted.
#[test]
fn otlp_trouble() -> Result<()> {
    let live = Live::beside_others()?;
    let ruby = Ruby::main()?;
    let profiles = AtomicUsize::new(0);
    let receiver = Receiver::start(move |push, before| match push.path.as_str() {
        _ if before == 0 => (503, "Retry-After: 1\r\n", b"busy"),
        METRICS => (400, "", b"no \x1b[2Jmetrics"),
        _ => match profiles.fetch_add(1, Ordering::Relaxed) {
            // The first request as a whole, and then one of its halves, as the OpenTelemetry Collector says it.
            0 => (413, "", b""),
            1 => (400, "", b"\x08\x03\x12\x1chttp: request body too large"),
            // ExportProfilesServiceResponse{partial_success{rejected_profiles: 1, error_message: "why"}}
            _ => (200, "", b"\x0a\x07\x08\x01\x12\x03why"),
        },
    })?;
    let url = format!("http://{}", receiver.address);
    let (report, said, script) = run(&live, &ruby, &["--otlp", &url, "--push-interval", "1s"])?;
    let pushes = receiver.pushes();
    let answered = |code: u16| pushes.iter().filter(|push| push.code == code).count();
    ensure!(answered(413) == 1 && answered(503) == 1 && answered(400) > 1, "{said}");
    // A halved request arrived in parts, which together are the whole.
    let found = decoded(&live, &pushes)?;
    totals_agree(&found, &report, script.pid)?;
    let first = pushes.first().context("a push")?;
    ensure!(
        pushes.iter().skip(1).any(|push| push.body == first.body),
        "what was answered with 503 did not come again"
    );
    let account = said.lines().find(|line| line.contains("requests were accepted")).context(said.clone())?;
    let (accepted, refused) = (answered(200), answered(400) - 1);
    let wanted = format!(
        "{accepted} requests were accepted ({accepted} of them in part), {refused} refused, 0 dropped"
    );
    ensure!(account.contains(&wanted), "{account}, not {wanted}");
    ensure!(!said.contains('\u{1b}'), "an escape sequence of the server's reaches the terminal: {said:?}");
    Ok(())
}

/// A gRPC receiver made of the official packages.
struct GrpcReceiver {
    server: Guarded,
    dir: PathBuf,
    port: u64,
}

impl GrpcReceiver {
    /// Starts a receiver that answers according to `plan` (see `otlp_grpc.py`), and accepts messages of up to `limit` bytes.
    fn start(live: &Live, name: &str, plan: &str, limit: usize, tls: Option<&Path>) -> Result<Self> {
        let dir = live.dir(name)?;
        let mut args: Vec<OsString> = vec![dir.clone().into(), plan.into(), limit.to_string().into()];
        args.extend(tls.iter().flat_map(|dir| [dir.join("chain.pem").into(), dir.join("key.pem").into()]));
        let mut server = python::server("otlp_grpc.py", args)?;
        let first = server.wait_stdout(Duration::from_mins(1), "its port", |line| line.contains("port"))?;
        let first: Value = serde_json::from_str(&first)?;
        Ok(Self { server, dir, port: first["port"].as_u64().context("a port")? })
    }

    /// The calls so far.
    fn calls(&self) -> Result<Vec<Value>> {
        let lines = self.server.stdout_so_far();
        lines.iter().skip(1).map(|line| Ok(serde_json::from_str(line)?)).collect()
    }

    /// The file with the message of a call.
    fn file(&self, call: &Value) -> Result<PathBuf> {
        let text = |key: &str| call[key].as_str().context("a text");
        Ok(self.dir.join(format!("{}.{}.{}", call["call"], text("answer")?, text("kind")?)))
    }

    /// The message of a call.
    fn message(&self, call: &Value) -> Result<Vec<u8>> {
        let mut message = Vec::new();
        let file = std::fs::File::open(self.file(call)?)?;
        std::io::Read::read_to_end(&mut flate2::read::GzDecoder::new(file), &mut message)?;
        Ok(message)
    }

    /// The accepted calls, decoded; there must be no errors in them.
    fn accepted(&self) -> Result<Value> {
        let calls = self.calls()?;
        let taken = calls.iter().filter(|call| call["answer"] == "ok" || call["answer"] == "partly");
        obeying(&taken.map(|call| self.file(call)).collect::<Result<Vec<_>>>()?)
    }
}

/// Waits for the GVL: the profile equals the lines, wait by wait, and the metrics have them by length, even during the
/// run.
#[test]
fn otlp_gvl() -> Result<()> {
    let live = Live::beside_others()?;
    Ruby::first_and_last(|ruby| {
        let receiver = Receiver::start(|_, _| OK)?;
        let url = format!("http://{}", receiver.address);
        let script = Script::unwitnessed(&live, ruby, "gvl_holder.rb")?
            .seeing_proc()
            .env("GCTRACE_TEST_SLEEPS", "24")
            .env("GCTRACE_TEST_GVL_WITNESS", witness::gvl_extension(ruby)?);
        let gvl = ["--gvl", "--gvl-threshold", "0.000001ms", "--gvl-budget", "100"];
        let options = [&["--otlp", &url, "--push-interval", "200ms"][..], &gvl].concat();
        let (report, said, script) = run_script(script, &options)?;
        ledger::check_lossless(&report)?;
        ensure!(said.contains(" 0 refused, 0 dropped"), "{said}");
        let pushes = receiver.pushes();
        let found = decoded(&live, &pushes)?;
        let of_pid = |line: &&GvlSumsLine| line.pid == script.pid;
        let sums = report.gvl_processes.iter().find(of_pid).context("no sums of the process")?;
        let told: u64 = report.gvl_waits.iter().map(|line| line.wait_ns).sum();
        let waits = &found["profiles"]["shop"]["gvl_wait"];
        ensure!(
            told > 1_000_000_000 && waits["total"] == told,
            "{told} ns are reported, the profile: {waits}"
        );
        ensure!(waits["(GVL wait)"] == told, "{waits}");
        ensure!(waits.as_object().is_some_and(|frames| frames.len() > 3), "no stacks: {waits}");
        let metrics = &found["metrics"]["shop"];
        let count = |metrics: &Value, name: &str| metrics[name]["{}"].as_f64().unwrap_or_default();
        for name in ["cruby.gvl.wait.duration", "cruby.gvl.long_wait.duration"] {
            ensure!(count(metrics, name) as u64 == sums.waits, "{} waits, {metrics:#}", sums.waits);
        }
        let held = count(metrics, "cruby.gvl.held");
        // Including what the threads held when the process ended.
        let hold_ns = sums.hold_ns.context("no holds")? as f64;
        ensure!(
            held > 1.0 && (held * 1e9 - hold_ns).abs() <= 1.0,
            "{held} s held, the line has {hold_ns} ns"
        );
        // In the middle of the run, some waits have been reported, but not all.
        let all: Vec<Push> = pushes.into_iter().filter(|push| push.path == METRICS).collect();
        let before: Vec<u64> = all
            .iter()
            .map(|push| {
                let found = decoded(&live, std::slice::from_ref(push))?;
                Ok(count(&found["metrics"]["shop"], "cruby.gvl.wait.duration") as u64)
            })
            .collect::<Result<_>>()?;
        ensure!(before.is_sorted(), "waits were taken back: {before:?}");
        ensure!(before.iter().any(|waits| (1..sums.waits).contains(waits)), "only at the end: {before:?}");
        Ok(())
    })
}

const LARGE: usize = 64 << 20;

/// gRPC over TLS delivers the same as HTTP. A certificate authority that the host does not know is not trusted.
#[test]
fn otlp_grpc() -> Result<()> {
    let live = Live::beside_others()?;
    let ruby = Ruby::main()?;
    let dir = live.dir("tls")?;
    let program = rubies_dir().join("tunemygc_agent.rb");
    ensure!(Command::new("ruby").arg(program).arg("certificate").arg(&dir).status()?.success());
    let receiver = GrpcReceiver::start(&live, "taken", "ok", LARGE, Some(&dir))?;
    let url = format!("grpcs://127.0.0.1:{}", receiver.port);
    let options = ["--otlp", &url, "--push-interval", "500ms"];
    let script = Script::unwitnessed(&live, &ruby, "scraped.rb")?.arg("3s");
    let (report, said, script) = run_with(script, &options, &[("SSL_CERT_FILE", dir.join("ca.pem"))])?;
    let calls = receiver.calls()?;
    ensure!(calls.iter().all(|call| call["key"] == "secret word"), "{calls:?}");
    let profiles = calls.iter().filter(|call| call["kind"] == "profiles").count();
    ensure!(profiles > 1 && calls.len() > profiles, "{calls:?}");
    ensure!(
        said.contains(&format!("OTLP: {} requests were accepted, 0 refused, 0 dropped", calls.len())),
        "{said}"
    );
    let found = receiver.accepted()?;
    totals_agree(&found, &report, script.pid)?;
    let counted = found["metrics"]["shop"]["cruby.gc.collections"].as_object().context("no collections")?;
    let counted: f64 = counted.values().filter_map(Value::as_f64).sum();
    ensure!(counted as usize == report.gcs_of(script.pid).count(), "{counted} collections");

    let (_, said, _) = run(&live, &ruby, &options)?;
    ensure!(
        said.contains("invalid peer certificate") && said.contains("OTLP: 0 requests were accepted"),
        "{said}"
    );
    ensure!(receiver.calls()?.len() == calls.len(), "something was sent to a stranger");
    Ok(())
}

/// The specification's rules for each status: after a temporary failure the same request is sent again; after any other failure it is not.
/// The final account has no waiting requests.
#[test]
fn otlp_grpc_trouble() -> Result<()> {
    let live = Live::beside_others()?;
    let ruby = Ruby::main()?;
    // While the server fails, fewer requests wait than the limit of waiting requests.
    let plan = "unavailable,later,exhausted,invalid,partly*";
    let receiver = GrpcReceiver::start(&live, "trouble", plan, LARGE, None)?;
    let url = format!("http://127.0.0.1:{}", receiver.port);
    let options = ["--otlp", &url, "--otlp-protocol", "grpc", "--push-interval", "1s"];
    let (report, said, _) = run(&live, &ruby, &options)?;
    let calls = receiver.calls()?;
    let answers: Vec<_> = calls.iter().filter_map(|call| call["answer"].as_str()).collect();
    ensure!(answers.starts_with(&["unavailable", "later", "exhausted", "invalid", "partly"]), "{answers:?}");
    let first = receiver.message(&calls[0])?;
    ensure!(!first.is_empty());
    for call in &calls[1..3] {
        ensure!(
            receiver.message(call)? == first,
            "what was not taken came again as something else: {calls:?}"
        );
    }
    for call in &calls[3..] {
        ensure!(receiver.message(call)? != first, "what was refused came again: {calls:?}");
    }
    receiver.accepted()?;
    let partly = answers.len() - 4;
    let requests = if partly == 1 { "request was" } else { "requests were" };
    let wanted = format!("{partly} {requests} accepted ({partly} of them in part), 2 refused, 0 dropped");
    ensure!(said.contains(&wanted), "no `{wanted}` in {said}");
    ensure!(!said.contains('\u{1b}'), "an escape sequence of the server's reaches the terminal: {said:?}");
    let user = &report.ledger.as_ref().context("no ledger")?.user;
    let count = |name: &str| user[name].as_u64().unwrap_or(u64::MAX);
    ensure!(count("uploads_waiting") == 0 && count("uploads_sent") == partly as u64, "{user:?}");
    ensure!(count("uploads") == partly as u64 + 2 && count("uploads_refused") == 2, "{user:?}");
    Ok(())
}

/// A gRPC server that accepts only small messages receives small messages, and all of the data.
#[test]
fn otlp_grpc_too_large() -> Result<()> {
    let live = Live::beside_others()?;
    let ruby = Ruby::main()?;
    // One window, so one message unless it is halved.
    let push = |name: &str, limit: usize| -> Result<_> {
        let receiver = GrpcReceiver::start(&live, name, "ok", limit, None)?;
        let url = format!("grpc://127.0.0.1:{}", receiver.port);
        let options = ["--otlp", &url, "--otlp-signals", "profiles", "--no-native", "--push-interval", "60s"];
        let (report, said, script) = run(&live, &ruby, &options)?;
        let calls = receiver.calls()?;
        let sizes: Vec<usize> =
            calls.iter().filter_map(|call| call["bytes"].as_u64()?.try_into().ok()).collect();
        Ok((receiver.accepted()?, report, said, script.pid, sizes))
    };
    let (.., whole) = push("large", LARGE)?;
    let [whole] = whole[..] else { anyhow::bail!("not one message: {whole:?}") };
    // Messages of different runs differ in size, and most of a message is a profile of one kind, which is not halved.
    for percent in [95, 90, 85, 80] {
        let (accepted, report, said, pid, sizes) = push(&format!("small{percent}"), whole * percent / 100)?;
        if sizes.len() > 1 {
            let wanted = format!("OTLP: {} requests were accepted, 0 refused, 0 dropped", sizes.len());
            ensure!(said.contains(&wanted), "{sizes:?}: {said}");
            return totals_agree(&accepted, &report, pid);
        }
    }
    anyhow::bail!("nothing was halved; the whole is {whole} bytes")
}

/// Without a server, tracing continues and ends, and reports what was not delivered.
#[test]
fn nobody_there() -> Result<()> {
    let live = Live::beside_others()?;
    let ruby = Ruby::main()?;
    let options =
        ["--otlp", "http://127.0.0.1:9", "--pyroscope", "http://127.0.0.1:9", "--push-interval", "200ms"];
    let (report, said, script) = run(&live, &ruby, &options)?;
    ensure!(report.gcs_of(script.pid).count() as u64 >= script.after["count"].as_u64().context("count")?);
    for name in ["OTLP", "Pyroscope"] {
        ensure!(said.contains(&format!("gctrace: {name}: 0 requests were accepted, 0 refused, ")), "{said}");
        ensure!(
            !said.contains(&format!("{name}: 0 requests were accepted, 0 refused, 0 dropped\n")),
            "{said}"
        );
    }
    Ok(())
}

/// The length-delimited fields with this number of a protobuf message.
fn fields(mut message: &[u8], wanted: u64) -> Result<Vec<&[u8]>> {
    fn varint(message: &mut &[u8]) -> Result<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let (byte, rest) = message.split_first().context("cut off")?;
            *message = rest;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                break;
            }
        }
        Ok(value)
    }
    let mut found = Vec::new();
    while !message.is_empty() {
        let key = varint(&mut message)?;
        ensure!(key & 7 == 2, "a field of wire type {}", key & 7);
        let length = usize::try_from(varint(&mut message)?)?;
        let (field, rest) = message.split_at_checked(length).context("cut off")?;
        message = rest;
        if key >> 3 == wanted {
            found.push(field);
        }
    }
    Ok(found)
}

/// Names and profiles of the series in these pushes. Pyroscope must accept them: the rules of its pkg/validation/validate.go
/// (`ValidateProfile`, `SanitizeLegacyLabelName`; text labels of samples become labels of series, pkg/model/pprofsplit).
fn pushed_series(live: &Live, pushes: &[Push]) -> Result<Vec<(String, Profile)>> {
    let is_name = |name: &str| {
        let mut bytes = name.bytes();
        bytes.next().is_some_and(|first| first.is_ascii_alphabetic() || first == b'_')
            && bytes.all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
    };
    let mut found = Vec::new();
    for (at, push) in pushes.iter().enumerate() {
        ensure!(push.path == "/push.v1.PusherService/Push", "{}", push.path);
        ensure!(push.head.contains("content-type: application/proto"), "{}", push.head);
        let mut body = Vec::new();
        std::io::Read::read_to_end(&mut flate2::read::GzDecoder::new(push.body.as_slice()), &mut body)?;
        for series in fields(&body, 1)? {
            let mut labels = Vec::new();
            for label in fields(series, 1)? {
                let text =
                    |number| Ok::<_, anyhow::Error>(String::from_utf8(fields(label, number)?.concat())?);
                labels.push((text(1)?, text(2)?));
            }
            ensure!(labels.iter().all(|(name, _)| is_name(name)), "{labels:?}");
            let of =
                |name: &str| labels.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str());
            let name = of("__name__").context("no name")?.to_owned();
            ensure!(name == "memory" || name == "process_cpu", "{labels:?}");
            ensure!(of("service_name") == Some("shop"), "{labels:?}");
            ensure!(of("__delta__") == Some("false"), "values of the window are no totals: {labels:?}");
            for sample in fields(series, 2)? {
                let file = live.path(&format!("{at}.pb.gz"));
                std::fs::write(&file, fields(sample, 1)?.concat())?;
                let profile = Profile::open(&file)?;
                ensure!(profile.types.iter().all(|of| !of.contains('-')), "{:?}", profile.types);
                // The name of a series ends with it.
                let period = if name == "memory" { "space bytes" } else { "cpu nanoseconds" };
                ensure!(profile.period_type == period, "the period of {name} is {:?}", profile.period_type);
                for sample in &profile.samples {
                    ensure!(sample.label_names().all(is_name), "labels {}", sample.labels);
                    let bounded = ["state", "wait", "gc_phase", "endpoint"];
                    let of_series = |name| bounded.contains(&name);
                    ensure!(
                        sample.label_names().all(of_series),
                        "each value makes a series: {}",
                        sample.labels
                    );
                }
                found.push((name.clone(), profile));
            }
        }
    }
    Ok(found)
}

/// A thread that sleeps all the time is in each window with the time that it slept meanwhile, also while it has not come back; all windows
/// together are the profile of the whole run.
#[test]
fn sleeping_threads_in_windows() -> Result<()> {
    settled(windows_of_sleeping_threads)
}

fn windows_of_sleeping_threads() -> Result<()> {
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    let receiver = Receiver::start(|_, _| OK)?;
    let url = format!("http://{}", receiver.address);
    let whole = live.path("whole.pb.gz");
    let mut args: Vec<OsString> =
        ["--quiet", "--wall", "--pyroscope", &url, "--push-interval", "1s", "--pprof"].map(Into::into).into();
    args.extend([whole.clone().into(), "--".into()]);
    args.extend(ruby.argv()?);
    args.extend(["-e".into(), "Thread.new { 50.times { sleep 0.1 } }; sleep 6".into()]);
    let finished = Invocation::new(args)?
        .with(|command| {
            command.env("OTEL_SERVICE_NAME", "shop");
        })
        .run()?;
    ensure!(finished.status.success(), "{}", finished.errors());
    let mut windows = Vec::new();
    for (_, profile) in pushed_series(&live, &receiver.pushes())? {
        windows.push(profile.total("wall/nanoseconds")?);
    }
    let whole = Profile::open(&whole)?.total("wall/nanoseconds")?;
    ensure!(windows.iter().sum::<u64>() == whole, "{windows:?} are not {whole}");
    let (last, others) = windows.split_last().context("no window")?;
    ensure!(others.len() >= 3, "{} windows: {}", windows.len(), finished.errors());
    // The main thread and another one; Ruby's timer thread may be a third.
    let second = 1_000_000_000;
    ensure_times!(others.iter().all(|ns| (second..5 * second).contains(ns)), "{windows:?}");
    ensure_times!(*last < 5 * second, "{windows:?}");
    Ok(())
}

/// Pyroscope receives profiles that `go tool pprof` can read, with the labels that it expects, and all windows together cover the run.
#[test]
fn pyroscope() -> Result<()> {
    let live = Live::beside_others()?;
    let ruby = Ruby::main()?;
    let receiver = Receiver::start(|_, _| OK)?;
    let url = format!("http://{}", receiver.address);
    let (report, _, script) =
        run(&live, &ruby, &["--pyroscope", &url, "--push-interval", "500ms", "--alloc"])?;
    let pushes = receiver.pushes();
    ensure!(pushes.len() > 1, "{} pushes", pushes.len());
    let (mut pauses, mut ns, mut cpu) = (0, 0, 0);
    let mut slots = (0, 0);
    for (series, profile) in pushed_series(&live, &pushes)? {
        if series == "memory" {
            let types = ["alloc_objects/count", "alloc_space/bytes"];
            ensure!(profile.types == types, "{:?}", profile.types);
            slots = (slots.0 + profile.total(types[0])?, slots.1 + profile.total(types[1])?);
            continue;
        }
        pauses += profile.total("gc_pauses/count")?;
        ns += profile.total("gc/nanoseconds")?;
        cpu += profile.total("cpu/nanoseconds")?;
    }
    let lines: Vec<_> = report.gcs_of(script.pid).collect();
    let told: usize = lines.iter().map(|line| line.pauses.len()).sum();
    let told_ns: u64 = lines.iter().flat_map(|line| &line.pauses).map(|pause| pause.ns).sum();
    ensure!(
        pauses == told as u64 && ns == told_ns,
        "{pauses} pauses of {ns} ns; the lines: {told} of {told_ns}"
    );
    ensure!(cpu > 0, "no CPU time");
    let told = allocated(&report)?;
    ensure!(slots == told, "{slots:?} objects and bytes; the lines: {told:?}");
    Ok(())
}
