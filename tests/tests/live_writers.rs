//! Files that are written in place while they are probed: no writer gets a breakpoint into the new code.

use std::{
    fs::{File, OpenOptions},
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant, SystemTime},
};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::{
    child::Guarded,
    gctrace::{Gctrace, Invocation},
    ledger,
    live::Live,
    ruby::Ruby,
};
use rustix::process::Signal;
use serde_json::Value;

/// Maximum time that gctrace, or a writer, may take.
const PATIENCE: Duration = Duration::from_mins(1);

/// A copy of the main Ruby.
struct Copy {
    root: PathBuf,
    library: PathBuf,
}

impl Copy {
    fn make(root: PathBuf) -> Result<Self> {
        let ruby = Ruby::main()?;
        std::fs::create_dir_all(&root)?;
        std::fs::copy(std::fs::canonicalize(ruby.exe())?, root.join("program"))?;
        let library = ruby.library()?;
        let name = library.file_name().context("no name")?.to_string_lossy().into_owned();
        std::fs::copy(&library, root.join(&name))?;
        let soname = &name[..name.rfind('.').context("no release")?];
        std::os::unix::fs::symlink(&name, root.join(soname))?;
        Ok(Self { library: root.join(name), root })
    }

    /// Starts a program of the copy. For each line `contend` two of its threads contend for the GVL; then it collects five times.
    fn start(&self) -> Result<Guarded> {
        const PROGRAM: &str = "$stdout.sync = true; puts 'up'; n = 0; now = -> { Process.clock_gettime(Process::CLOCK_MONOTONIC) }; \
                               work = -> { stop = now.() + 0.3; 0 until now.() > stop }; \
                               (Thread.new(&work); work.(); puts n += 1) while gets == \"contend\\n\"; \
                               5.times { GC.start }; puts 'collected'; gets";
        let mut command = Command::new(self.root.join("program"));
        command.args(["--disable-gems", "-e", PROGRAM]).env("LD_LIBRARY_PATH", &self.root);
        let mut child = Guarded::start("a copy of Ruby", &mut command)?;
        child.wait_stdout(PATIENCE, "up", |line| line == "up")?;
        Ok(child)
    }
}

/// Makes it collect and end.
fn end(mut child: Guarded) -> Result<()> {
    child.say("go")?;
    child.wait_stdout(PATIENCE, "collected", |line| line == "collected")?;
    child.say("end")?;
    ensure!(child.finish(PATIENCE)?.status.success());
    Ok(())
}

/// Number of bytes in which the mapped code of a file in a process differs from the file, because of breakpoints.
fn breakpoints(pid: u32, path: &Path) -> Result<usize> {
    let (memory, file) = (File::open(format!("/proc/{pid}/mem"))?, File::open(path)?);
    let shown = path.to_string_lossy();
    let (mut mapped, mut differing) = (0, 0);
    for line in std::fs::read_to_string(format!("/proc/{pid}/maps"))?.lines() {
        if !line.ends_with(&*shown) || !line.contains(" r-xp ") {
            continue;
        }
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (start, end) = fields[0].split_once('-').context("no range")?;
        let (start, end) = (u64::from_str_radix(start, 16)?, u64::from_str_radix(end, 16)?);
        let offset = u64::from_str_radix(fields[2], 16)?;
        let stated_bytes = file.metadata()?.len().saturating_sub(offset).min(end - start);
        let (mut now, mut stated) = (vec![0; stated_bytes as usize], vec![0; stated_bytes as usize]);
        memory.read_exact_at(&mut now, start)?;
        file.read_exact_at(&mut stated, offset)?;
        mapped += now.len();
        differing += now.iter().zip(&stated).filter(|(now, stated)| now != stated).count();
    }
    ensure!(mapped > 0, "{pid} has not mapped {}", path.display());
    Ok(differing)
}

fn waits_until(what: &str, mut is: impl FnMut() -> Result<bool>) -> Result<()> {
    let begin = Instant::now();
    while !is()? {
        ensure!(begin.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Writes another version into the existing file, as `rsync --inplace` does. (`cp` truncates the file first, which takes the memory
/// away from processes that have it mapped.) The new version differs in the name of a section, which only debuggers read.
fn overwrite(path: &Path) -> Result<Duration> {
    const NAME: &[u8] = b"\0.shstrtab\0";
    let mut bytes = std::fs::read(path)?;
    let at = bytes.windows(NAME.len()).rposition(|bytes| bytes == NAME).context("no names of sections")?;
    bytes[at + NAME.len() - 2] = b'B';
    write_in_place(path, &bytes)
}

/// Writes these bytes into the file, and returns how long that took.
fn write_in_place(path: &Path, bytes: &[u8]) -> Result<Duration> {
    let copy = path.with_extension("copy");
    std::fs::write(&copy, bytes)?;
    let begin = Instant::now();
    let status = Command::new("dd")
        .arg(format!("if={}", copy.display()))
        .arg(format!("of={}", path.display()))
        .args(["conv=notrunc", "status=none"])
        .stdin(Stdio::null())
        .status()?;
    ensure!(status.success(), "{status}");
    Ok(begin.elapsed())
}

/// A writer that overwrites a Ruby waits until no process has a breakpoint in it. Programs of that Ruby continue to run, and so do those that
/// start later. None is traced any more, and all are reported.
#[test]
fn overwritten_ruby() -> Result<()> {
    let live = Live::begin()?;
    let copy = Copy::make(live.dir("overwritten")?)?;
    let mut gctrace = Invocation::jsonl(["--all-ruby"])?.start_ready()?;
    let before = copy.start()?;
    gctrace.wait_line("process", before.pid())?;
    ensure!(breakpoints(before.pid(), &copy.library)? > 0, "it has no probes, so that nothing is tested");
    // Reading does not affect the probes.
    std::fs::copy(&copy.library, live.path("elsewhere"))?;
    std::thread::sleep(Duration::from_secs(1));
    ensure!(breakpoints(before.pid(), &copy.library)? > 0, "its probes are detached without need");
    let took = overwrite(&copy.library)?;
    ensure!(took < Duration::from_secs(20), "the writer has waited {took:?}");
    ensure!(breakpoints(before.pid(), &copy.library)? == 0, "a breakpoint is left");
    let after = copy.start()?;
    let refused = format!("pid {}: {} is not traced", after.pid(), copy.library.display());
    let refused = gctrace.wait_error(&refused)?;
    ensure!(refused.contains("the file was written to in place"), "{refused}");
    let again = format!("pid {}: {} is not traced: the file was", before.pid(), copy.library.display());
    gctrace.wait_error(&again)?;
    ensure!(breakpoints(after.pid(), &copy.library)? == 0, "new code has a breakpoint");
    let pids = [before.pid(), after.pid()];
    end(before)?;
    end(after)?;
    let (report, finished) = gctrace.stop_by(Signal::INT)?;
    for pid in pids {
        ensure!(report.gcs_of(pid).next().is_none(), "{pid} is traced");
    }
    // One of them was refused twice: when it was abandoned, and when it was inspected again.
    ensure!(finished.errors().contains("2 candidates not traced"), "{}", finished.errors());
    ensure!(!finished.errors().contains("ending the lease"), "{}", finished.errors());
    ledger::check(&report)
}

/// A file of which only the times changed, or into which the same content was written, counts as unchanged: its programs are traced again, and so
/// are later ones.
#[test]
fn unchanged_content() -> Result<()> {
    let live = Live::begin()?;
    let copy = Copy::make(live.dir("unchanged")?)?;
    let mut gctrace = Invocation::jsonl(["--all-ruby"])?.start_ready()?;
    let mut programs = vec![copy.start()?];
    gctrace.wait_line("process", programs[0].pid())?;
    let touch = || -> Result<()> {
        let status = Command::new("touch").arg(&copy.library).status()?;
        ensure!(status.success(), "{status}");
        Ok(())
    };
    let write = || write_in_place(&copy.library, &std::fs::read(&copy.library)?).map(drop);
    let changes: [&dyn Fn() -> Result<()>; 3] = [&touch, &touch, &write];
    for change in changes {
        let before: Vec<usize> =
            programs.iter().map(|program| described(&gctrace, program.pid())).collect::<Result<_>>()?;
        change()?;
        for (program, before) in programs.iter().zip(before) {
            waits_until("it is traced again", || Ok(described(&gctrace, program.pid())? > before))?;
        }
        let new = copy.start()?;
        gctrace.wait_line("process", new.pid())?;
        programs.push(new);
    }
    let pids: Vec<u32> = programs.iter().map(Guarded::pid).collect();
    programs.into_iter().try_for_each(end)?;
    let (report, finished) = gctrace.stop_by(Signal::INT)?;
    for pid in pids {
        // More would mean that there are two sets of probes.
        ensure!(report.gcs_of(pid).count() == 5, "{pid}: {} cycles", report.gcs_of(pid).count());
    }
    for said in ["was written to in place", "ending the lease"] {
        ensure!(!finished.errors().contains(said), "{}", finished.errors());
    }
    ledger::check(&report)
}

/// The modification time of a file is changed without opening it for writing, as `touch -c` and `rsync --times` do: it is not probed a second
/// time for programs that begin then, and its probes stay.
#[test]
fn changed_times() -> Result<()> {
    let live = Live::begin()?;
    let copy = Copy::make(live.dir("times")?)?;
    let mut gctrace = Invocation::jsonl(["--all-ruby"])?.start_ready()?;
    let mut programs = Vec::new();
    for age in [0, 3600, 7200] {
        if age > 0 {
            File::open(&copy.library)?.set_modified(SystemTime::now() - Duration::from_secs(age))?;
        }
        let program = copy.start()?;
        gctrace.wait_line("process", program.pid())?;
        programs.push(program);
    }
    // Times are compared every five seconds.
    std::thread::sleep(Duration::from_secs(7));
    for program in &programs {
        ensure!(breakpoints(program.pid(), &copy.library)? > 0, "its probes are detached without need");
    }
    let pids: Vec<u32> = programs.iter().map(Guarded::pid).collect();
    programs.into_iter().try_for_each(end)?;
    let (report, finished) = gctrace.stop_by(Signal::INT)?;
    for pid in pids {
        ensure!(report.gcs_of(pid).count() == 5, "{pid}: {} cycles", report.gcs_of(pid).count());
        let exits: Vec<_> =
            report.exits.iter().filter(|line| line.pid == pid).map(|line| &line.reason).collect();
        ensure!(exits == ["exited"], "{pid}: {exits:?}");
    }
    ensure!(!finished.errors().contains("for writing"), "{}", finished.errors());
    ensure!(ledger::user(&report, "lost_records")? == 0, "records are said to be lost");
    ledger::check(&report)
}

/// Number of lines of a type about a process.
fn lines_of(gctrace: &Gctrace, kind: &str, pid: u32) -> Result<usize> {
    let lines = gctrace.stdout_so_far();
    let lines =
        lines.iter().map(|line| serde_json::from_str::<Value>(line)).collect::<Result<Vec<_>, _>>()?;
    Ok(lines.iter().filter(|line| line["type"] == kind && line["pid"] == pid).count())
}

/// Number of `process` lines of a process: there is one each time tracing of it starts.
fn described(gctrace: &Gctrace, pid: u32) -> Result<usize> {
    lines_of(gctrace, "process", pid)
}

/// A file that was opened for writing but not written to is probed again, and its programs are traced again; twice.
#[test]
fn opened_for_writing() -> Result<()> {
    let live = Live::begin()?;
    let copy = Copy::make(live.dir("opened")?)?;
    let mut gctrace = Invocation::jsonl(["--all-ruby", "--gvl"])?.start_ready()?;
    let mut program = copy.start()?;
    gctrace.wait_line("process", program.pid())?;
    // Its main thread must be seen before the gap: for a thread first seen after it, everything that was seen is reported.
    let mut times = 0;
    waits_until("its GVL is watched", || {
        times += 1;
        program.say("contend")?;
        program.wait_stdout(PATIENCE, "contended", |line| line == times.to_string())?;
        Ok(lines_of(&gctrace, "gvl", program.pid())? > 0)
    })?;
    for before in [1, 2] {
        let open = OpenOptions::new().write(true).open(&copy.library)?;
        ensure!(breakpoints(program.pid(), &copy.library)? == 0, "a breakpoint is left");
        // It is not probed while it may be written to.
        std::thread::sleep(Duration::from_millis(1500));
        ensure!(breakpoints(program.pid(), &copy.library)? == 0, "it is probed while it is open for writing");
        drop(open);
        waits_until("it is traced again", || Ok(described(&gctrace, program.pid())? > before))?;
        ensure!(breakpoints(program.pid(), &copy.library)? > 0, "it is not probed again");
    }
    let pid = program.pid();
    end(program)?;
    let report = gctrace.stop()?;
    ensure!(report.gcs_of(pid).count() >= 5, "{} cycles", report.gcs_of(pid).count());
    // What its threads did with the GVL has gaps, and is not attributed to another program.
    let exits = report.exits.iter().filter(|line| line.pid == pid);
    let exits: Vec<_> = exits.map(|line| (line.reason.as_str(), line.lost)).collect();
    ensure!(exits == [("detached", 0), ("detached", 0), ("exited", 0)], "{exits:?}");
    ensure!(ledger::user(&report, "lost_records")? == 0, "records are said to be lost");
    ensure!(report.gvl_processes.iter().all(|line| line.pid != pid), "{:?}", report.gvl_processes);
    ledger::check(&report)
}

/// The library of a server is overwritten: its probes are detached before that.
#[test]
fn overwritten_library() -> Result<()> {
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    let folder = live.dir("library")?;
    let library = folder.join("socket.so");
    std::fs::copy(Path::new(ruby.config("archdir")).join("socket.so"), &library)?;
    let mut gctrace = Invocation::jsonl(["--all-ruby", "--requests"])?.start_ready()?;
    let program = "$stdout.sync = true; require 'socket'; server = TCPServer.new('127.0.0.1', 0); puts 'up'; gets; \
                   Socket.tcp('127.0.0.1', server.addr[1]) { |out| server.accept.close; out.read }; puts 'served'";
    let mut command = Command::new(ruby.exe());
    command.arg("-I").arg(&folder).args(["-e", program]);
    let mut server = Guarded::start("a server", &mut command)?;
    server.wait_stdout(PATIENCE, "up", |line| line == "up")?;
    let pid = server.pid();
    waits_until("it is probed", || Ok(breakpoints(pid, &library)? > 0))?;
    let took = overwrite(&library)?;
    ensure!(took < Duration::from_secs(20), "the writer has waited {took:?}");
    ensure!(breakpoints(pid, &library)? == 0, "a breakpoint is left");
    server.say("go")?;
    server.wait_stdout(PATIENCE, "served", |line| line == "served")?;
    ensure!(server.finish(PATIENCE)?.status.success());
    ensure!(gctrace.running()?);
    ledger::check(&gctrace.stop()?)
}
