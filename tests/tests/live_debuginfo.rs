//! Separate debug information: in a process's own root, and from a slow server.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};

use anyhow::{Context as _, Result, bail, ensure};
use gctrace_tests::doctor::diagnose;
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::live::Live;
use gctrace_tests::report::Report;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::{Running, Script};
use gctrace_tests::{compare, ledger};

fn output(program: &str, args: &[&str]) -> Result<String> {
    let output =
        Command::new(program).args(args).output().with_context(|| format!("cannot run {program}"))?;
    ensure!(output.status.success(), "{program} failed: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

fn build_id(library: &str) -> Result<String> {
    let notes = output("readelf", &["-n", library])?;
    let id = notes.lines().find_map(|line| line.trim().strip_prefix("Build ID: ").map(str::to_owned));
    id.with_context(|| format!("{library} has no build id"))
}

/// Symbols that belong to the library and claim that all of its code is one function, which is not a GC function.
fn lying_symbols(library: &str, to: &Path) -> Result<()> {
    let exports = output("nm", &["-D", "--defined-only", library])?;
    let export = exports.lines().find_map(|line| line.strip_suffix(" T rb_gc_count"));
    let export = export.with_context(|| format!("{library} does not export rb_gc_count"))?;
    let function = |name: &str, at: &str, size: &str| {
        format!(".globl {name}\n.type {name},@function\n{name} = 0x{at}\n.size {name}, {size}\n")
    };
    let assembly = to.with_extension("s");
    fs::write(&assembly, function("rb_gc_count", export, "1") + &function("vm_exec", "1", "0x40000000"))?;
    let id = format!("-Wl,--build-id=0x{}", build_id(library)?);
    output("cc", &["-shared", "-nostdlib", &id, &assembly.to_string_lossy(), "-o", &to.to_string_lossy()])?;
    Ok(fs::remove_file(&assembly)?)
}

fn waiting(live: &Live, ruby: &Ruby) -> Result<Running> {
    let mut running = Script::new(live, ruby, "explicit.rb")?.arg("15").waiting().start()?;
    running.wait_for("ready")?;
    Ok(running)
}

/// A debug package in the root of a process, installed after its Ruby was analysed, contradicts the analysis:
/// doctor and a run refuse the Ruby and name the file. Without the package, both work.
#[test]
fn debug_package_in_the_process_root() -> Result<()> {
    let live = Live::beside_others()?;
    let rooted = Ruby::rooted()?;
    let ruby = rooted.first().context("no root")?.copied(&live.path("root"))?;
    let library = ruby.library()?.to_string_lossy().into_owned();
    let id = build_id(&library)?;
    let inside = format!("/usr/lib/debug/.build-id/{}/{}.debug", &id[..2], &id[2..]);
    let package = ruby.host_path(&inside);
    let cache = live.path("cache");
    let mut script = waiting(&live, &ruby)?;
    let pid = script.pid().to_string();

    let before = diagnose(&cache, ["--pid", &pid])?;
    ensure!(before.image()?["works"] == true && before.image()?["symbols_from"].is_null(), "{before:?}");
    fs::create_dir_all(package.parent().context("a folder")?)?;
    lying_symbols(&library, &package)?;
    let lied = diagnose(&cache, ["--pid", &pid])?;
    let reason = lied.image()?["refused"]["reason"].as_str().context("not refused")?.to_owned();
    ensure!(reason.contains(&inside) && reason.contains("`vm_exec`"), "{reason}");
    ensure!(lied.image()?["refused"]["remedy"].is_string(), "{lied:?}");
    let cache_arg = cache.to_string_lossy();
    let run = ["--pid", &pid, "--probes", "sites", "--cache-dir", &cache_arg, "--duration", "200ms"];
    let refused = Report::parse(&Invocation::jsonl(run)?.run()?.stdout)?;
    let told = refused.refused.iter().find(|line| line.pid == Some(script.pid()));
    ensure!(told.is_some_and(|line| line.reason == reason), "{:?}, doctor says {reason}", refused.refused);

    fs::remove_file(&package)?;
    let after = diagnose(&cache, ["--pid", &pid])?;
    ensure!(after.image()?["works"] == true && after.image()?["cached"] == true, "{after:?}");
    script.say("go")?;
    script.finish()?;
    Ok(())
}

/// `--layout-from` takes the debug information of the file that it names, and of no other: here of another build, which is refused.
#[test]
fn a_file_of_another_build() -> Result<()> {
    let live = Live::beside_others()?;
    let mut script = waiting(&live, &Ruby::main()?)?;
    let pid = script.pid().to_string();
    let own = Ruby::main()?.library()?.to_string_lossy().into_owned();
    let (source, other) = (live.path("other.c"), live.path("other.so").to_string_lossy().into_owned());
    fs::write(&source, "int other;\n")?;
    output("cc", &["-g", "-shared", "-Wl,--build-id", &source.to_string_lossy(), "-o", &other])?;
    let args = |file| ["--pid", &pid, "--no-cache", "--duration", "200ms", "--layout-from", file];
    let finished = Invocation::new(args(&other))?.run()?;
    let said = finished.errors();
    ensure!(!finished.status.success(), "{}: {said}", finished.status);
    for part in ["--layout-from belongs to another build".to_owned(), build_id(&own)?, build_id(&other)?] {
        ensure!(said.contains(&part), "no {part}: {said}");
    }
    script.say("go")?;
    script.finish()?;
    Ok(())
}

/// A debuginfod server that does not answer until it is released, and then has no files.
struct Stalling {
    url: String,
    asked: Arc<AtomicUsize>,
    release: std::sync::mpsc::Sender<()>,
}

impl Stalling {
    fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let url = format!("http://{}", listener.local_addr()?);
        let asked = Arc::new(AtomicUsize::new(0));
        let (release, released) = channel();
        let counter = Arc::clone(&asked);
        std::thread::spawn(move || serve(&listener, &counter, &released));
        Ok(Self { url, asked, release })
    }
}

/// Answers requests one at a time, once the other end of the channel is closed.
fn serve(listener: &TcpListener, asked: &AtomicUsize, released: &Receiver<()>) {
    for mut stream in listener.incoming().flatten() {
        asked.fetch_add(1, Ordering::SeqCst);
        let _gone = released.recv();
        let lines = BufReader::new(&stream).lines().map_while(Result::ok);
        lines.take_while(|line| !line.is_empty()).for_each(drop);
        let answer = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
        let _closed = stream.write_all(answer);
    }
}

/// While gctrace waits for a server's symbols of one Ruby, a Ruby that needs no request (it has no build id) is traced
/// exactly. The first one is traced once the server has answered, or is reported as refused if the run ends earlier.
#[test]
fn slow_server() -> Result<()> {
    let live = Live::begin()?;
    let asked_about = Ruby::main()?;
    let dir = live.dir("prefix")?;
    let soname = asked_about.config("LIBRUBY_ALIASES").split_whitespace().next().context("no soname")?;
    let mut bytes = fs::read(asked_about.library()?)?;
    // The type of the 20-byte NT_GNU_BUILD_ID note with owner GNU is replaced by an unknown type.
    let note = [4, 0, 0, 0, 20, 0, 0, 0, 3, 0, 0, 0, b'G', b'N', b'U', 0];
    let at = bytes.windows(note.len()).position(|window| window == note).context("no build id")?;
    bytes[at + 8] = 0x63;
    fs::write(dir.join(soname), bytes)?;

    for released in [true, false] {
        let server = Stalling::start()?;
        let env = vec![("DEBUGINFOD_URLS".into(), server.url.clone().into())];
        let mut waits = waiting(&live, &asked_about)?;
        let mut gctrace = Invocation::jsonl(["--all-ruby", "--no-cache"])?.envs(env).start()?;
        let script = Script::new(&live, &asked_about, "explicit.rb")?.arg("15").waiting();
        let mut other = script.env("LD_LIBRARY_PATH", &dir).start()?;
        other.wait_for("ready")?;
        gctrace.wait_line("process", other.pid())?;
        other.say("go")?;
        let other = other.finish()?;
        gctrace.wait_line("exit", other.pid)?;
        ensure!(server.asked.load(Ordering::SeqCst) == 1, "the server was asked in parallel, or not at all");
        let about_it = |line: &String| line.contains(&format!("\"pid\":{}", waits.pid()));
        if let Some(line) = gctrace.stdout_so_far().into_iter().find(about_it) {
            bail!("reported before the server has answered: {line}");
        }
        let waits = if released {
            drop(server.release);
            gctrace.wait_line("process", waits.pid())?;
            gctrace.wait_ready()?;
            waits.say("go")?;
            waits.finish()?
        } else {
            waits.say("go")?;
            waits.finish()?
        };
        let (report, finished) = gctrace.stop_by(rustix::process::Signal::INT)?;
        ledger::check_lossless(&report)?;
        let lines = report.gcs_of(other.pid).collect::<Vec<_>>();
        compare::cycles(&lines, other.log()?).demand_equal()?;
        let refused = report.refused.iter().filter(|line| line.pid == Some(waits.pid)).count();
        let lines = report.gcs_of(waits.pid).collect::<Vec<_>>();
        if released {
            compare::cycles(&lines, waits.log()?).demand_equal()?;
            ensure!(refused == 0 && server.asked.load(Ordering::SeqCst) >= 2, "{:?}", report.refused);
        } else {
            ensure!(refused == 1 && lines.is_empty(), "{:?}", report.refused);
            ensure!(!finished.errors().contains("gctrace: ready:"), "{}", finished.errors());
        }
    }
    Ok(())
}
