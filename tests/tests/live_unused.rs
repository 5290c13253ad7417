//! Images that no process uses any more hold no resources: no disk space, no file system, no index.

use std::{
    ffi::OsString,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::{
    child::Guarded,
    gctrace::{Gctrace, Invocation},
    ledger,
    live::Live,
    memory::status_kb,
    puma::Puma,
    ruby::Ruby,
    script::Script,
};

/// Maximum time until gctrace notices.
const PATIENCE: Duration = Duration::from_mins(1);

/// Copies the main Ruby to this directory.
fn copied(root: &Path) -> Result<()> {
    let ruby = Ruby::main()?;
    std::fs::create_dir_all(root)?;
    std::fs::copy(std::fs::canonicalize(ruby.exe())?, root.join("program"))?;
    let library = ruby.library()?;
    let name = library.file_name().context("no name")?.to_string_lossy().into_owned();
    std::fs::copy(&library, root.join(&name))?;
    let soname = &name[..name.rfind('.').context("no release")?];
    Ok(std::os::unix::fs::symlink(&name, root.join(soname))?)
}

/// Starts a program of that copy, which collects on request.
fn started(root: &Path) -> Result<Guarded> {
    const PROGRAM: &str =
        "$stdout.sync = true; puts 'up'; gets; 5.times { GC.start }; puts \"collected #{GC.count}\"; gets";
    let mut command = Command::new(root.join("program"));
    command.args(["--disable-gems", "-e", PROGRAM]).env("LD_LIBRARY_PATH", root);
    let mut child = Guarded::start("a copy of Ruby", &mut command)?;
    child.wait_stdout(PATIENCE, "up", |line| line == "up")?;
    Ok(child)
}

/// Runs it. Returns its pid and its number of collections.
fn run(root: &Path, gctrace: &mut Gctrace) -> Result<(u32, u64)> {
    let mut child = started(root)?;
    let pid = child.pid();
    // Its Ruby is probed before this line.
    gctrace.wait_line("process", pid)?;
    child.say("go")?;
    let line = child.wait_stdout(PATIENCE, "collected", |line| line.starts_with("collected "))?;
    child.say("end")?;
    ensure!(child.finish(PATIENCE)?.status.success());
    Ok((pid, line.trim_start_matches("collected ").parse()?))
}

fn waits_until(what: &str, mut is: impl FnMut() -> Result<bool>) -> Result<()> {
    let begin = Instant::now();
    while !is()? {
        ensure!(begin.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

/// A Ruby on its own file system is traced, ends and is deleted: its disk space is freed and the file system can be unmounted while gctrace
/// continues to run. Tested twice, with the same path, and with the same device and inode numbers as far as the kernel reuses them. A Ruby
/// that is still running continues to be traced although it was deleted.
#[test]
fn deleted_images_are_given_back() -> Result<()> {
    let live = Live::idle_beside_others()?;
    let disk = live.dir("disk")?;
    let mount = |args: &[&str]| -> Result<bool> {
        Ok(Command::new(args[0]).args(&args[1..]).arg(&disk).stderr(Stdio::null()).status()?.success())
    };
    let used = || -> Result<u64> {
        let state = rustix::fs::statvfs(&disk)?;
        Ok((state.f_blocks - state.f_bfree) * state.f_frsize)
    };
    let root = disk.join("ruby");
    // The profile has native stacks, whose unwind tables come from the same files.
    let profile = live.path("profile.pb.gz").into_os_string();
    let flags = ["--name", "program", "--gvl", "--pprof"].map(OsString::from);
    let mut gctrace = Invocation::jsonl([&flags[..], &[profile]].concat())?.start_ready()?;
    let mut expected = Vec::new();
    for kept_on in [true, false] {
        ensure!(mount(&["mount", "-t", "tmpfs", "tmpfs"])?, "mount");
        let found = (|| {
            copied(&root)?;
            let full = used()?;
            let kept = kept_on.then(|| started(&root)).transpose()?;
            expected.push(run(&root, &mut gctrace)?);
            std::fs::remove_dir_all(&root)?;
            if let Some(mut kept) = kept {
                std::thread::sleep(Duration::from_secs(11));
                ensure!(used()? * 2 > full, "{} of {full} bytes are in use while it runs", used()?);
                kept.say("go")?;
                let collected =
                    kept.wait_stdout(PATIENCE, "collected", |line| line.starts_with("collected "))?;
                expected.push((kept.pid(), collected.trim_start_matches("collected ").parse()?));
                ensure!(!mount(&["umount"])?, "it was unmounted below a program");
                kept.say("end")?;
                ensure!(kept.finish(PATIENCE)?.status.success());
            }
            waits_until("its disk space is free", || Ok(used()? * 20 < full))?;
            waits_until("it is unmounted", || mount(&["umount"]))
        })();
        if found.is_err() {
            mount(&["umount", "--lazy"])?;
        }
        found?;
    }
    let report = gctrace.stop()?;
    for (pid, collected) in expected {
        let counts: Vec<u64> = report.gcs_of(pid).map(|line| line.count).collect();
        ensure!(
            counts.len() >= 5 && counts.last() == Some(&collected),
            "{pid}: {counts:?}, {collected} in all"
        );
        ensure!(counts.windows(2).all(|two| two[1] == two[0] + 1), "{pid}: {counts:?}");
    }
    ledger::check(&report)
}

/// When a server ends, its probes are detached, although no other server starts: they would keep the files of its libraries in use.
#[test]
fn probes_of_ended_servers_are_detached() -> Result<()> {
    let live = Live::beside_others()?;
    let mut command = Ruby::main()?.command()?;
    // Without it the run would end with the server.
    let mut other =
        Guarded::start("another Ruby", command.args(["-e", "$stdout.sync = true; puts 'up'; gets"]))?;
    other.wait_stdout(PATIENCE, "up", |line| line == "up")?;
    let attached = |gctrace: u32| -> Result<usize> {
        let descriptors = std::fs::read_dir(format!("/proc/{gctrace}/fd"))?;
        let targets = descriptors.filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok());
        Ok(targets.filter(|target| target.as_os_str() == "anon_inode:bpf_link").count())
    };
    // Links are closed one after the other, in the background.
    let standing = |gctrace: u32| -> Result<usize> {
        let (mut before, mut equal) = (attached(gctrace)?, Instant::now());
        waits_until("the number of its probes does not change", || {
            let now = attached(gctrace)?;
            if now != before {
                (before, equal) = (now, Instant::now());
            }
            Ok(equal.elapsed() > Duration::from_secs(2))
        })?;
        Ok(before)
    };
    let (mut with, mut without) = (Vec::new(), Vec::new());
    for _twice in 0..2 {
        let puma = Puma::start(&live, "load.ru", "0")?;
        let pids = format!("{},{}", puma.process.pid(), other.pid());
        let gctrace = Invocation::jsonl(["--pid", &pids, "--requests"])?.start_ready()?;
        // The parser, the socket library and the C library of the server.
        waits_until("its probes are attached", || Ok(attached(gctrace.pid())? >= 3))?;
        with.push(standing(gctrace.pid())?);
        drop(puma);
        let before = with[with.len() - 1];
        waits_until("its probes are detached", || Ok(attached(gctrace.pid())? + 3 <= before))?;
        without.push(standing(gctrace.pid())?);
        ledger::check(&gctrace.stop()?)?;
    }
    ensure!(with[0] == with[1] && without[0] == without[1], "{with:?}, {without:?}");
    Ok(())
}

/// Memory for loading the programs and analysing an image is given back: otherwise the allocator would keep some 35 MB of free pages.
#[test]
fn memory_of_analyses_is_given_back() -> Result<()> {
    const MOST_KB: u64 = 16 << 10;
    let live = Live::beside_others()?;
    Ruby::each(|ruby| {
        let mut script = Script::unwitnessed(&live, ruby, "steady.rb")?.start()?;
        script.wait_for("ready")?;
        let pid = script.pid().to_string();
        let gctrace = Invocation::jsonl(["--no-cache", "--pid", &pid])?.start_ready()?;
        let since = Instant::now();
        loop {
            let kb = status_kb(gctrace.pid(), "RssAnon")?;
            if kb <= MOST_KB {
                break;
            }
            ensure!(since.elapsed() < PATIENCE, "{kb} kB");
            std::thread::sleep(Duration::from_millis(100));
        }
        gctrace.stop()?;
        Ok(())
    })
}
