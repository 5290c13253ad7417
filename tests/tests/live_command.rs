//! The command that gctrace starts: who runs it, where its output goes, how it ends, and what its status becomes.

use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::PATIENCE;
use gctrace_tests::child::Finished;
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::live::Live;
use gctrace_tests::report::Report;
use gctrace_tests::ruby::Ruby;
use rustix::process::Signal;

/// The user who calls sudo in these tests: `nobody`, whom every system has.
const USER: (u32, u32) = (65_534, 65_534);

fn ruby() -> Result<String> {
    Ok(Ruby::main()?.exe().to_string_lossy().into_owned())
}

/// gctrace with these flags on a Ruby script of one line.
fn on(flags: &[&str], script: &str) -> Result<Invocation> {
    let ruby = ruby()?;
    Invocation::new([flags, &["--", &ruby, "-e", script]].concat())
}

fn status(finished: &Finished) -> Option<i32> {
    finished.status.code()
}

/// The command's status is gctrace's, also if a signal ended it; gctrace's own errors come first.
#[test]
fn exit_status() -> Result<()> {
    let live = Live::begin()?;
    for (script, expected) in
        [("GC.start; exit 7", 7), ("GC.start; Process.kill(:KILL, $$); sleep", 137), ("GC.start", 0)]
    {
        let finished = on(&["-q"], script)?.run()?;
        ensure!(status(&finished) == Some(expected), "{script}: {}\n{}", finished.status, finished.errors());
    }
    let file = live.path("out.folded");
    let script = format!("GC.start; Dir.mkdir({:?}); exit 7", file.display().to_string());
    let finished = on(&["-q", "--folded", &file.to_string_lossy()], &script)?.run()?;
    ensure!(status(&finished) == Some(2), "{}\n{}", finished.status, finished.errors());
    Ok(())
}

/// Lines and the command's output never share a stream: nothing on standard output is not JSON.
#[test]
fn output_of_the_command() -> Result<()> {
    let live = Live::begin()?;
    let script = "puts 'hello'; $stderr.puts 'there'; GC.start";
    let finished = on(&["--format", "jsonl"], script)?.run()?;
    let report = Report::parse(&finished.stdout)?;
    ensure!(!report.gcs.is_empty() && finished.stdout.iter().all(|line| line.starts_with('{')));
    for word in ["hello", "there"] {
        ensure!(finished.stderr.iter().any(|line| line == word), "{word}: {}", finished.errors());
    }
    // With a file for the lines, standard output is the command's.
    let path = live.path("lines.jsonl");
    std::fs::write(&path, "from before\n")?;
    let finished = on(&["--format", "jsonl", "-o", &path.to_string_lossy()], script)?.run()?;
    ensure!(finished.stdout == ["hello"], "{:?}", finished.stdout);
    let text = std::fs::read_to_string(&path)?;
    let lines: Vec<String> = text.lines().map(ToOwned::to_owned).collect();
    ensure!(!Report::parse(&lines)?.gcs.is_empty(), "{text}");
    Ok(())
}

/// The file of `--output` grows while the run goes on.
#[test]
fn output_grows() -> Result<()> {
    let live = Live::begin()?;
    let path = live.path("lines.jsonl");
    let script = "loop { GC.start; sleep 0.05 }";
    let gctrace = on(&["--format", "jsonl", "--output", &path.to_string_lossy()], script)?.start()?;
    let since = std::time::Instant::now();
    while !std::fs::read_to_string(&path).unwrap_or_default().contains(r#""type":"gc""#) {
        ensure!(since.elapsed() < PATIENCE, "no cycle in the file");
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    let finished = gctrace.interrupt()?;
    // Interrupt, passed on to the command.
    ensure!(status(&finished) == Some(130), "{}\n{}", finished.status, finished.errors());
    Ok(())
}

/// After `--duration` the files are written, and the command is waited for; a signal that is sent to gctrace is passed on.
#[test]
fn outlives_the_duration() -> Result<()> {
    let live = Live::begin()?;
    let file = live.path("out.folded");
    let flags = ["-q", "--duration", "300ms", "--folded", &file.to_string_lossy()];
    let script = "trap(:TERM) { exit 9 }; puts $$; $stdout.flush; loop { GC.start; sleep 0.01 }";
    let mut gctrace = on(&flags, script)?.start()?;
    let told = gctrace.wait_error("waiting for the command (pid ")?;
    ensure!(file.is_file(), "the file is not there yet");
    let pid = gctrace.stdout_so_far().first().context("no pid")?.clone();
    ensure!(told.contains(&format!("pid {pid}")), "{told}: not {pid}");
    ensure!(Path::new("/proc").join(&pid).exists(), "the command was ended");
    gctrace.signal(Signal::TERM)?;
    let finished = gctrace.wait()?;
    ensure!(status(&finished) == Some(9), "{}\n{}", finished.status, finished.errors());
    Ok(())
}

/// Under sudo the command runs as the caller, with its groups and environment, and all files are the caller's.
#[test]
fn sudo() -> Result<()> {
    let _live = Live::begin()?;
    // A place that the user can reach.
    let dir = tempfile::Builder::new().prefix("gctrace-test-").tempdir()?;
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755))?;
    let path = |name: &str| dir.path().join(name).to_string_lossy().into_owned();
    let (sets, folded, lines) = (path("sets"), path("out.folded"), path("lines"));
    let files = ["--tunemygc", &sets, "--folded", &folded, "--output", &lines];
    let script = "GC.start; puts [Process.uid, Process.euid, Process.gid, Process.groups.sort.uniq.inspect, \
                  ENV['HOME'], ENV['USER'], ENV['LOGNAME'], ENV['SUDO_UID'].inspect, \
                  File.read('/proc/self/status')[/CapEff:\\s*(\\h+)/, 1].to_i(16)].join(' ')";
    let run = |flags: &[&str]| -> Result<Finished> {
        let invocation = on(&[flags, &files].concat(), script)?.with(|command| {
            command.envs([("SUDO_UID", USER.0.to_string()), ("SUDO_GID", USER.1.to_string())]);
            command.env("SUDO_USER", "nobody").env("HOME", "/root").env("USER", "root").current_dir("/");
        });
        let finished = invocation.run()?;
        ensure!(status(&finished) == Some(0), "{}\n{}", finished.status, finished.errors());
        Ok(finished)
    };
    let entry = Command::new("getent").args(["passwd", "nobody"]).output()?;
    let home = String::from_utf8(entry.stdout)?.split(':').nth(5).context("no home")?.to_owned();
    let told = run(&[])?.stdout;
    let expected = format!("65534 65534 65534 [65534] {home} nobody nobody nil 0");
    ensure!(told == [expected.as_str()], "{told:?}, not {expected}");
    let set = std::fs::read_dir(&sets)?.next().context("no set")??.path();
    for file in [Path::new(&sets), &set, Path::new(&folded), Path::new(&lines)] {
        let data = std::fs::metadata(file)?;
        ensure!((data.uid(), data.gid()) == USER, "{}: {}", file.display(), data.uid());
    }
    let told = run(&["--as-root"])?.stdout;
    ensure!(told[0].starts_with("0 0 0 "), "{told:?}");
    ensure!(std::fs::metadata(&folded)?.uid() == 0, "a file of root's run was given away");
    Ok(())
}

/// gctrace's own token is a secret that the command has no use for.
#[test]
fn token() -> Result<()> {
    let _live = Live::begin()?;
    let finished = on(&["-q"], "GC.start; puts ENV.fetch('RUBY_GC_TOKEN', 'none'); puts ENV['OTHER']")?
        .with(|command| {
            command.env("RUBY_GC_TOKEN", "secret").env("OTHER", "kept");
        })
        .run()?;
    ensure!(finished.stdout == ["none", "kept"], "{:?}", finished.stdout);
    Ok(())
}

/// A command without a Ruby: its status, or that nothing matched.
#[test]
fn without_ruby() -> Result<()> {
    let _live = Live::begin()?;
    for (script, expected) in [("exit 3", 3), ("exit 0", 1)] {
        let finished = Invocation::new(["--", "sh", "-c", script])?.run()?;
        ensure!(status(&finished) == Some(expected), "{script}: {}\n{}", finished.status, finished.errors());
    }
    Ok(())
}
