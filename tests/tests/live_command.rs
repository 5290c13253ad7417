//! The command that gctrace starts: its user, its output, how it ends, and how its status is passed on.

use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::child::{Finished, Guarded};
use gctrace_tests::gctrace::{Gctrace, Invocation};
use gctrace_tests::live::{Live, gctrace_binary};
use gctrace_tests::report::Report;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::Script;
use gctrace_tests::{PATIENCE, ledger};
use rustix::process::Signal;

/// The user who calls sudo in these tests: `nobody`, who exists on every system.
const USER: (u32, u32) = (65_534, 65_534);

fn ruby() -> Result<String> {
    Ok(Ruby::main()?.exe().to_string_lossy().into_owned())
}

/// gctrace with these flags on a one-line Ruby script.
fn on(flags: &[&str], script: &str) -> Result<Invocation> {
    let ruby = ruby()?;
    Invocation::new([flags, &["--", &ruby, "-e", script]].concat())
}

fn status(finished: &Finished) -> Option<i32> {
    finished.status.code()
}

/// The status of the command becomes gctrace's, even if a signal ended it. gctrace's own errors take precedence.
#[test]
fn exit_status() -> Result<()> {
    let live = Live::beside_others()?;
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

/// A limit of open files below what gctrace itself has open applies to the command only and does not end gctrace, nor does a limit of file sizes.
/// An argument can contain any bytes.
#[test]
fn low_limits_and_any_bytes() -> Result<()> {
    let live = Live::beside_others()?;
    let (script, file) = (live.path("any.rb"), live.path("any.folded"));
    std::fs::write(
        &script,
        "GC.start; p Process.getrlimit(:NOFILE)[0], ARGV[0].bytes, ARGV[1], Signal.trap(:XFSZ, 'DEFAULT')",
    )?;
    let argument = std::ffi::OsStr::from_bytes(b"a\xff");
    let mut command = Command::new("prlimit");
    command
        .args(["--nofile=40:4096", "--fsize=100:100"])
        .arg(gctrace_binary()?)
        .args(["-q", "--gvl", "--folded"]);
    command.arg(&file).args(["--", &ruby()?]).arg(&script).arg(argument).arg("");
    let finished = Guarded::start("gctrace", &mut command)?.finish(PATIENCE)?;
    let said = finished.stdout.iter().chain(&finished.stderr).map(String::as_str).collect::<Vec<_>>();
    for line in ["40", "[97, 255]", "\"\"", "\"SYSTEM_DEFAULT\""] {
        ensure!(said.contains(&line), "no {line}: {said:#?}");
    }
    // The profile is larger than 100 bytes.
    let errors = finished.errors();
    ensure!(
        status(&finished) == Some(2) && errors.contains("File too large"),
        "{}: {errors}",
        finished.status
    );
    ensure!(!file.exists(), "a part of a profile is there");
    Ok(())
}

/// The command has the limits of its user, and ignores the signals that it would ignore without gctrace: then a hangup does not end it (`nohup`).
#[test]
fn surroundings_of_the_command() -> Result<()> {
    let _live = Live::beside_others()?;
    let script =
        format!("grep SigIgn /proc/self/status; ulimit -Sn; {} -e 'GC.start'; echo done; read line", ruby()?);
    for (option, ignored) in [("--ignore-signal=HUP", 1), ("--default-signal=HUP", 0)] {
        let binary = gctrace_binary()?.to_string_lossy().into_owned();
        let args = ["--nofile=700:4096", "env", option, &binary, "-q", "--", "sh", "-c", &script];
        let mut command = Command::new("prlimit");
        let mut gctrace = Guarded::start("gctrace", command.args(args))?;
        gctrace.wait_stderr(PATIENCE, "done", |line| line == "done")?;
        gctrace.signal(Signal::HUP)?;
        if ignored == 1 {
            std::thread::sleep(Duration::from_millis(300));
            ensure!(gctrace.running()?, "a hangup ended it");
            gctrace.say("end")?;
        }
        let finished = gctrace.finish(PATIENCE)?;
        let lines = &finished.stderr;
        let mask = lines.iter().find_map(|line| line.strip_prefix("SigIgn:")).context("no SigIgn")?;
        let mask = u64::from_str_radix(mask.trim(), 16)?;
        ensure!(mask & 1 == ignored && lines.iter().any(|line| line == "700"), "{option}: {lines:?}");
        let expected = if ignored == 1 { 0 } else { 128 + 1 };
        ensure!(status(&finished) == Some(expected), "{option}: {}\n{}", finished.status, finished.errors());
    }
    Ok(())
}

/// Lines and the command's output never share a stream: standard output contains only JSON.
#[test]
fn output_of_the_command() -> Result<()> {
    let live = Live::beside_others()?;
    let script = "puts 'hello'; $stderr.puts 'there'; GC.start";
    let finished = on(&["--format", "jsonl"], script)?.run()?;
    let report = Report::parse(&finished.stdout)?;
    ensure!(!report.gcs.is_empty() && finished.stdout.iter().all(|line| line.starts_with('{')));
    for word in ["hello", "there"] {
        ensure!(finished.stderr.iter().any(|line| line == word), "{word}: {}", finished.errors());
    }
    // If the lines go to a file, standard output belongs to the command.
    let path = live.path("lines.jsonl");
    std::fs::write(&path, "from before\n")?;
    let finished = on(&["--format", "jsonl", "-o", &path.to_string_lossy()], script)?.run()?;
    ensure!(finished.stdout == ["hello"], "{:?}", finished.stdout);
    let text = std::fs::read_to_string(&path)?;
    let lines: Vec<String> = text.lines().map(ToOwned::to_owned).collect();
    ensure!(!Report::parse(&lines)?.gcs.is_empty(), "{text}");
    Ok(())
}

/// The file of `--output` grows during the run.
#[test]
fn output_grows() -> Result<()> {
    let live = Live::beside_others()?;
    let path = live.path("lines.jsonl");
    let script = "loop { GC.start; sleep 0.05 }";
    let gctrace = on(&["--format", "jsonl", "--output", &path.to_string_lossy()], script)?;
    // In the foreground of a terminal, gctrace leaves it to the terminal to interrupt the command.
    let in_background = |command: &mut Command| {
        command.process_group(0);
    };
    let gctrace = gctrace.with(in_background).start()?;
    let since = std::time::Instant::now();
    while !std::fs::read_to_string(&path).unwrap_or_default().contains(r#""type":"gc""#) {
        ensure!(since.elapsed() < PATIENCE, "no cycle in the file");
        std::thread::sleep(Duration::from_millis(50));
    }
    let finished = gctrace.interrupt()?;
    // The interrupt was forwarded to the command.
    ensure!(status(&finished) == Some(130), "{}\n{}", finished.status, finished.errors());
    Ok(())
}

/// After `--duration` the files are written, and gctrace waits for the command. A signal to gctrace is forwarded to it.
#[test]
fn outlives_the_duration() -> Result<()> {
    let live = Live::beside_others()?;
    let file = live.path("out.folded");
    let flags = ["-q", "--duration", "300ms", "--folded", &file.to_string_lossy()];
    let script = "trap(:TERM) { exit 9 }; warn \"own pid #{$$}\"; loop { GC.start; sleep 0.01 }";
    let mut gctrace = on(&flags, script)?.start()?;
    let own = gctrace.wait_error("own pid ")?;
    let told = gctrace.wait_error("waiting for the command (pid ")?;
    ensure!(file.is_file(), "the file is not there yet");
    let pid = own.trim_start_matches("own pid ").to_owned();
    ensure!(told.contains(&format!("pid {pid}")), "{told}: not {pid}");
    ensure!(Path::new("/proc").join(&pid).exists(), "the command was ended");
    gctrace.signal(Signal::TERM)?;
    let finished = gctrace.wait()?;
    ensure!(status(&finished) == Some(9), "{}\n{}", finished.status, finished.errors());
    Ok(())
}

/// Under sudo, the command runs as the caller, with the caller's groups and environment, and all files belong to the caller.
#[test]
fn sudo() -> Result<()> {
    let live = Live::beside_others()?;
    // A directory that the user can access.
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
    // Files that are there already, of root: what replaces them is the caller's; what is only written to keeps its owner.
    let (other, link) = (path("other"), path("link"));
    std::fs::write(&lines, "older")?;
    std::os::unix::fs::chown(&lines, Some(0), Some(0))?;
    std::os::unix::fs::symlink(&other, &link)?;
    for output in [&lines, &link] {
        let (recording, graph) = (path("a.gctrace"), path("a.svg"));
        for file in [&recording, &graph] {
            std::fs::write(file, "older")?;
            std::os::unix::fs::chown(file, Some(0), Some(0))?;
        }
        let finished = on(&["--record", &recording, "--flamegraph", &graph, "--output", output], "GC.start")?
            .with(|command| {
                command
                    .envs([("SUDO_UID", USER.0.to_string()), ("SUDO_GID", USER.1.to_string())])
                    .current_dir("/");
            })
            .run()?;
        ensure!(status(&finished) == Some(0), "{}\n{}", finished.status, finished.errors());
        for (file, owner) in [(&recording, USER), (&graph, USER), (output, (0, 0))] {
            let data = std::fs::metadata(file)?;
            ensure!((data.uid(), data.gid()) == owner, "{file}: {}", data.uid());
        }
    }
    // Commands that look at a running process.
    let mut script = Script::unwitnessed(&live, &Ruby::main()?, "heap_large.rb")?.arg("1000").start()?;
    script.wait_for("running")?;
    let pid = script.pid().to_string();
    let file = path("looked");
    for (flags, kept) in [
        (&["heap", "--svg"][..], &[][..]),
        (&["heap", "--dump"], &[]),
        (&["malloc", "--folded"], &["--duration", "100ms", "--sample", "1KiB"]),
    ] {
        for (as_root, owner) in [(&[][..], USER), (&["--as-root"], (0, 0))] {
            let args = [flags, &[&file], &["--pid", &pid], kept, as_root].concat();
            let finished = Invocation::new(&args)?
                .with(|command| {
                    command
                        .envs([("SUDO_UID", USER.0.to_string()), ("SUDO_GID", USER.1.to_string())])
                        .current_dir("/");
                })
                .run()?;
            ensure!(status(&finished) == Some(0), "{args:?}: {}\n{}", finished.status, finished.errors());
            let data = std::fs::metadata(&file)?;
            ensure!((data.uid(), data.gid()) == owner, "{args:?}: {}", data.uid());
            std::fs::remove_file(&file)?;
        }
    }
    script.say("end")?;
    // What the kernel takes for "no change" is no id.
    for (uid, gid) in [("4294967295", "1"), ("1", "4294967295")] {
        let finished = on(&["--folded", &folded], "GC.start")?
            .with(|command| {
                command.env("SUDO_UID", uid).env("SUDO_GID", gid);
            })
            .run()?;
        let said = finished.errors();
        ensure!(status(&finished) == Some(2) && said.contains("is not an id"), "{}: {said}", finished.status);
    }
    let told = run(&["--as-root"])?.stdout;
    ensure!(told[0].starts_with("0 0 0 "), "{told:?}");
    ensure!(std::fs::metadata(&folded)?.uid() == 0, "a file of root's run was given away");
    Ok(())
}

/// gctrace's own token is a secret, so the command does not get it.
#[test]
fn token() -> Result<()> {
    let _live = Live::beside_others()?;
    let finished = on(&["-q"], "GC.start; warn ENV.fetch('RUBY_GC_TOKEN', 'none'), ENV['OTHER']")?
        .with(|command| {
            command.env("RUBY_GC_TOKEN", "secret").env("OTHER", "kept");
        })
        .run()?;
    let told = |word: &str| finished.stderr.iter().any(|line| line == word);
    ensure!(told("none") && told("kept") && !finished.errors().contains("secret"), "{}", finished.errors());
    Ok(())
}

/// A command without a Ruby: gctrace exits with its status, or reports that nothing matched.
#[test]
fn without_ruby() -> Result<()> {
    let _live = Live::beside_others()?;
    for (script, expected) in [("exit 3", 3), ("exit 0", 1)] {
        let finished = Invocation::new(["--", "sh", "-c", script])?.run()?;
        ensure!(status(&finished) == Some(expected), "{script}: {}\n{}", finished.status, finished.errors());
    }
    Ok(())
}

/// Copies this machine's Ruby (executable and library) to an unknown directory. Returns the path of the library.
fn copied(root: &Path) -> Result<std::path::PathBuf> {
    let (bin, lib) = (root.join("bin"), root.join("lib"));
    std::fs::create_dir_all(&bin)?;
    std::fs::create_dir_all(&lib)?;
    let ruby = Ruby::main()?;
    std::fs::copy(std::fs::canonicalize(ruby.exe())?, bin.join("ruby"))?;
    let library = ruby.library()?;
    let name = library.file_name().context("no name")?.to_string_lossy().into_owned();
    std::fs::copy(&library, lib.join(&name))?;
    // The name by which it is loaded ends before the patch release.
    let soname = &name[..name.rfind('.').context("no release")?];
    std::os::unix::fs::symlink(&name, lib.join(soname))?;
    Ok(bin.join("ruby"))
}

/// Writes an executable script.
fn executable(path: &Path, text: &str) -> Result<()> {
    std::fs::create_dir_all(path.parent().context("no folder")?)?;
    std::fs::write(path, text)?;
    Ok(std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755))?)
}

/// Checks that all cycles of a script are reported, from the first on; the script prints their number.
fn all_from_the_first(invocation: Invocation, library: &Path) -> Result<()> {
    let finished = invocation.run()?;
    ensure!(status(&finished) == Some(0), "{}\n{}", finished.status, finished.errors());
    let printed = finished.stderr.iter().find_map(|line| line.strip_prefix("collected "));
    let collected: u64 = printed.with_context(|| finished.errors())?.parse()?;
    let report = Report::parse(&finished.stdout)?;
    let [process] = &report.processes[..] else { anyhow::bail!("{:?}", report.processes) };
    ensure!(
        Path::new(&process.image).starts_with(library),
        "{} is not below {}",
        process.image,
        library.display()
    );
    let counts: Vec<u64> = report.gcs.iter().map(|line| line.count).collect();
    ensure!(collected > 20 && counts.len() as u64 >= collected, "{collected} cycles: {counts:?}");
    ensure!(counts.iter().zip(1..).all(|(count, expected)| *count == expected), "{counts:?}");
    Ok(())
}

/// Collects while it boots, and prints the number of collections at its end.
const COLLECTING: &str = "20.times { GC.start }; warn \"collected #{GC.count}\"";

/// The Ruby that COMMAND will run is found before it starts, wherever it is: all cycles are reported, the first time and the second.
#[test]
fn first_cycles_of_a_copy() -> Result<()> {
    let live = Live::beside_others()?;
    let root = live.dir("myruby")?;
    let ruby = copied(&root)?;
    let cache = live.dir("cache")?;
    let library = format!("LD_LIBRARY_PATH={}", root.join("lib").display());
    for _ in 0..2 {
        let (cache, ruby) = (cache.to_string_lossy(), ruby.to_string_lossy());
        let args = ["--cache-dir", &cache, "--", "env", &library, &ruby, "-e", COLLECTING];
        all_from_the_first(Invocation::jsonl(args)?, &root)?;
    }
    Ok(())
}

/// The count of the first reported cycle, and the numbers of cycles before it and of missed cycles in the exit line.
fn before(report: &Report, pid: u32) -> Result<(u64, Option<u64>, Option<u64>)> {
    let first = report.gcs_of(pid).next().context("no cycle")?.count;
    let exit = report.exits.iter().find(|line| line.pid == pid).context("no exit line")?;
    Ok((first, exit.cycles_before, exit.cycles_missed))
}

/// Lets a command that reads a line continue until it has said something, and returns that. gctrace is stopped meanwhile, so it has not probed
/// its Ruby by then.
fn while_stopped(gctrace: &mut Gctrace, said: &str) -> Result<String> {
    gctrace.wait_error("shell waits for go")?;
    gctrace.signal(Signal::STOP)?;
    gctrace.say("go")?;
    let said = gctrace.wait_error(said)?;
    gctrace.signal(Signal::CONT)?;
    Ok(said)
}

/// A Ruby that could not be found in advance is probed while it runs. The cycles until then are counted as missed and as cycles before the first.
#[test]
fn missed_cycles_are_counted() -> Result<()> {
    let live = Live::beside_others()?;
    let root = live.dir("hidden")?;
    copied(&root)?;
    let (root, flag) = (root.display().to_string(), live.path("flag"));
    let collect = format!(
        "30.times {{ GC.start }}; warn \"pid #{{$$}}\"; sleep 0.01 until File.exist?({:?}); 5.times {{ GC.start }}; \
         warn \"collected #{{GC.count}}\"",
        flag.display().to_string()
    );
    let hidden = "echo shell waits for go >&2; read go; root=$1; LD_LIBRARY_PATH=$root/lib exec $root/b''in/ru''by -e \"$2\"";
    // The shell assembles the path of the Ruby.
    let args = ["--no-cache", "--", "sh", "-c", hidden, "sh", &root, &collect];
    let mut gctrace = Invocation::jsonl(args)?.start_ready()?;
    let said = while_stopped(&mut gctrace, "pid ")?;
    let pid: u32 = said.trim_start_matches("pid ").parse()?;
    gctrace.wait_line("process", pid)?;
    std::fs::write(&flag, "")?;
    let (report, finished) = gctrace.done()?;
    let printed = finished.stderr.iter().find_map(|line| line.strip_prefix("collected "));
    let collected: u64 = printed.context("it printed no number")?.parse()?;
    let (first, behind, missed) = before(&report, pid)?;
    ensure!(
        first > 1 && (behind, missed) == (Some(first - 1), Some(first - 1)),
        "{first} {behind:?} {missed:?}"
    );
    ensure!(ledger::user(&report, "cycles_missed")? == first - 1);
    ensure!(report.gcs_of(pid).count() as u64 + first > collected, "{collected} in all, {first} first");
    let said = format!("{} cycles before tracing began", first - 1);
    ensure!(finished.errors().contains(&said), "not {said:?} in:\n{}", finished.errors());
    Ok(())
}

/// Cycles that a program ran before gctrace started do not count as missed.
#[test]
fn earlier_cycles_are_told() -> Result<()> {
    let live = Live::beside_others()?;
    let mut script = Script::unwitnessed(&live, &Ruby::main()?, "explicit.rb")?.waiting().start()?;
    script.wait_for("ready")?;
    let gctrace = Invocation::jsonl([script.pid().to_string()])?.start_ready()?;
    script.say("go")?;
    let done = script.finish()?;
    let (report, finished) = gctrace.done()?;
    let begin = *done.report.counts()?.start();
    let (first, behind, missed) = before(&report, done.pid)?;
    ensure!(
        first == begin && behind == Some(begin - 1) && missed == Some(0),
        "{begin} {first} {behind:?} {missed:?}"
    );
    ensure!(ledger::user(&report, "cycles_before_run")? == begin - 1);
    ensure!(!finished.errors().contains("before tracing began"), "{}", finished.errors());
    Ok(())
}

/// No cycle of a child forked from a traced program is missed, however many cycles its parent has run.
#[test]
fn forked_children_miss_nothing() -> Result<()> {
    let live = Live::beside_others()?;
    let (command, env, outputs) = Script::new(&live, &Ruby::main()?, "forker.rb")?.into_parts()?;
    let args = std::iter::once("--".into()).chain(command);
    let (report, _) = Invocation::jsonl(args)?.envs(env).start()?.done()?;
    for suffix in ["", ".child", ".grandchild"] {
        let (script, _) = outputs.read(suffix)?;
        let (_, _, missed) = before(&report, script.pid)?;
        ensure!(missed == Some(0), "{suffix}: {missed:?}");
    }
    ensure!(ledger::user(&report, "cycles_missed")? == 0);
    Ok(())
}

/// The count of a child includes the cycles of its parent. If the parent was not seen at the fork, their number is unknown, so nothing is
/// reported about cycles before the child's first one. The missed cycles of the parent itself are counted.
#[test]
fn children_of_unseen_parents() -> Result<()> {
    let live = Live::beside_others()?;
    let root = live.dir("hidden")?;
    copied(&root)?;
    let (root, flag) = (root.display().to_string(), live.path("flag"));
    // The child is seen at its first collection after its image was probed, so it needs to collect.
    let wait = format!(
        "(sleep 0.01; Array.new(1000) {{ +'' }}) until File.exist?({:?})",
        flag.display().to_string()
    );
    let program = format!(
        "3.times {{ GC.start }}; child = fork {{ {wait}; 5.times {{ GC.start }} }}; \
         warn \"pids #{{$$}} #{{child}}\"; Process.wait(child); warn \"collected #{{GC.count}}\""
    );
    let hidden = "echo shell waits for go >&2; read go; root=$1; LD_LIBRARY_PATH=$root/lib exec $root/b''in/ru''by --disable-gems -e \"$2\"";
    let args = ["--no-cache", "--", "sh", "-c", hidden, "sh", &root, &program];
    let mut gctrace = Invocation::jsonl(args)?.start_ready()?;
    let pids = while_stopped(&mut gctrace, "pids ")?;
    let mut pids = pids.trim_start_matches("pids ").split(' ').map(str::parse);
    let parent: u32 = pids.next().context("no pid")??;
    let child: u32 = pids.next().context("no child")??;
    gctrace.wait_line("process", child)?;
    std::fs::write(&flag, "")?;
    let (report, finished) = gctrace.done()?;
    let printed = finished.stderr.iter().find_map(|line| line.strip_prefix("collected "));
    let collected: u64 = printed.context("it printed no number")?.parse()?;
    let (_, behind, missed) = before(&report, child)?;
    ensure!((behind, missed) == (None, None), "{behind:?} {missed:?}");
    let exit = report.exits.iter().find(|line| line.pid == parent).context("no exit line")?;
    ensure!(exit.cycles_missed == Some(collected), "{:?}, {collected} in all", exit.cycles_missed);
    ensure!(ledger::user(&report, "cycles_missed")? == collected);
    Ok(())
}

/// A version manager's shim, which starts one of the Rubies in the user's home, and a program with a `#!` line that uses `env`.
#[test]
fn first_cycles_behind_a_shim() -> Result<()> {
    let live = Live::beside_others()?;
    let home = live.dir("home")?;
    let version = home.join(".rbenv/versions/9.9.9");
    copied(&version)?;
    let shims = home.join(".rbenv/shims");
    let shim = "#!/usr/bin/env bash\nset -e\nversion=9.9.9\nroot=\"$HOME/.rbenv/versions/$version\"\n\
                LD_LIBRARY_PATH=\"$root/lib\" exec \"$root/bin/${0##*/}\" \"$@\"\n";
    executable(&shims.join("ruby"), shim)?;
    let program = home.join("program");
    executable(&program, &format!("#!/usr/bin/env -S ruby -W1\n{COLLECTING}\n"))?;
    let path = format!("{}:{}", shims.display(), std::env::var("PATH")?);
    for command in [
        vec!["ruby".to_owned(), "-e".to_owned(), COLLECTING.to_owned()],
        vec![program.to_string_lossy().into_owned()],
    ] {
        let cache = live.path("cache").to_string_lossy().into_owned();
        let args = [vec!["--cache-dir".to_owned(), cache, "--".to_owned()], command].concat();
        let invocation = Invocation::jsonl(args)?.with(|gctrace| {
            gctrace.env("HOME", &home).env("PATH", &path);
        });
        all_from_the_first(invocation, &version)?;
    }
    Ok(())
}

/// The command gets signals that come after the first one, also while gctrace only waits for it. It ignores one and ends by the other.
#[test]
fn later_signals() -> Result<()> {
    let _live = Live::beside_others()?;
    let ruby = ruby()?;
    let script = format!(
        "trap '' HUP; trap 'exit 5' TERM; echo trapped >&2; {ruby} -e 'GC.start; sleep 0.2; GC.start'; while :; do sleep 0.1; done"
    );
    let args = ["-q", "--duration", "1s", "--", "sh", "-c", &script];
    let mut gctrace = Invocation::new(args)?.start_ready()?;
    gctrace.wait_error("trapped")?;
    gctrace.wait_error("waiting for the command")?;
    gctrace.signal(Signal::HUP)?;
    std::thread::sleep(Duration::from_secs(2));
    ensure!(gctrace.running()?, "it has ended by a signal that the command ignores");
    gctrace.signal(Signal::TERM)?;
    let finished = gctrace.wait()?;
    ensure!(status(&finished) == Some(5), "{}\n{}", finished.status, finished.errors());
    Ok(())
}
