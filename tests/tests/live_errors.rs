//! gctrace's messages and exit status when it cannot do what was requested.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::PATIENCE;
use gctrace_tests::child::{Finished, Guarded};
use gctrace_tests::gctrace::{Invocation, read};
use gctrace_tests::ledger;
use gctrace_tests::live::{Live, gctrace_binary};
use gctrace_tests::report::Report;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::Script;

/// Checks the status, and that standard error contains each of these words.
fn expect(finished: &Finished, code: i32, words: &[&str]) -> Result<()> {
    let text = finished.errors();
    ensure!(finished.status.code() == Some(code), "status {} instead of {code}:\n{text}", finished.status);
    for word in words {
        ensure!(text.to_lowercase().contains(&word.to_lowercase()), "no word of {word:?} in:\n{text}");
    }
    ensure!(!text.contains("panicked"), "a panic:\n{text}");
    Ok(())
}

/// The binary in a directory that every user can read, as the build directory may not be.
fn for_everyone() -> Result<(tempfile::TempDir, PathBuf)> {
    let dir = tempfile::Builder::new().prefix("gctrace-test-").tempdir()?;
    std::fs::set_permissions(dir.path(), Permissions::from_mode(0o755))?;
    let binary = dir.path().join("gctrace");
    std::fs::copy(gctrace_binary()?, &binary)?;
    Ok((dir, binary))
}

/// The binary with these arguments, run by `nobody`.
fn as_nobody(binary: &Path, args: &[&str]) -> Invocation {
    Invocation::of(binary, args).with(|command| {
        command.uid(65_534).gid(65_534).current_dir("/");
    })
}

/// Help and version need no privileges and succeed, for each command.
#[test]
fn help_and_version() -> Result<()> {
    let (_dir, binary) = for_everyone()?;
    let help = as_nobody(&binary, &["--help"]).run()?;
    ensure!(help.status.success() && help.stderr.is_empty(), "{}: {}", help.status, help.errors());
    let text = help.stdout.join("\n");
    for word in ["--all-ruby", "--pid", "--duration", "--format", "--tunemygc", "--pprof", "--quiet"] {
        ensure!(text.contains(word), "{word} is not in the help:\n{text}");
    }
    let version = as_nobody(&binary, &["--version"]).run()?;
    ensure!(version.status.success() && version.stdout.join("").contains("gctrace"), "{version:?}");
    for command in ["record", "report", "top", "doctor", "heap", "dump", "tune", "collector"] {
        ensure!(text.contains(command), "{command} is not in the help:\n{text}");
        let help = as_nobody(&binary, &[command, "--help"]).run()?;
        ensure!(help.status.success() && help.stderr.is_empty(), "{command}: {}", help.errors());
        let usage = format!("gctrace {command}");
        ensure!(help.stdout.iter().any(|line| line.contains(&usage)), "{command}: {:#?}", help.stdout);
    }
    Ok(())
}

/// Usage errors have status 2, and the message contains the wrong word.
#[test]
fn bad_usage() -> Result<()> {
    let _live = Live::begin()?;
    let cases: [(&[&str], &[&str]); 8] = [
        (&[], &["--all-ruby"]),
        (&["--nonsense"], &["--nonsense"]),
        (&["--all-ruby", "--duration", "soon"], &["soon"]),
        (&["--all-ruby", "--format", "xml"], &["xml"]),
        (&["--pid", "ruby"], &["ruby"]),
        (&["--pid", "-1"], &["-1"]),
        (&["--all-ruby", "--pprof"], &["--pprof"]),
        (&["--", "/no/such/program"], &["/no/such/program"]),
    ];
    for (args, words) in cases {
        let finished = Invocation::new(args)?.run()?;
        expect(&finished, 2, words).with_context(|| format!("gctrace {args:?}"))?;
        ensure!(finished.stdout.is_empty(), "diagnostics belong to standard error: {:?}", finished.stdout);
    }
    Ok(())
}

/// Without privileges: status 3, and a message that says how to get them.
#[test]
fn not_root() -> Result<()> {
    let live = Live::beside_others()?;
    let (_dir, binary) = for_everyone()?;
    let mut script = Script::unwitnessed(&live, &Ruby::main()?, "idle.rb")?.start()?;
    script.wait_for("idle")?;
    let pid = script.pid().to_string();
    for args in [&["--all-ruby"][..], &["--pid", &pid]] {
        expect(&as_nobody(&binary, args).run()?, 3, &["root", "sudo"])
            .with_context(|| format!("gctrace {args:?}"))?;
    }
    script.say("end")?;
    script.finish()?;
    Ok(())
}

/// If none of the selected pids is a Ruby: status 1, and one line for each.
#[test]
fn nothing_matched_by_pid() -> Result<()> {
    let _live = Live::beside_others()?;
    let sleeper = || Guarded::start("sleep", Command::new("sleep").arg("600"));
    let others = [sleeper()?, sleeper()?];
    let pids = others.each_ref().map(|other| other.pid().to_string());
    let finished = Invocation::new(["--pid", &pids.join(","), "--duration", "2s"])?.run()?;
    expect(&finished, 1, &["ruby"])?;
    for pid in &pids {
        let names = |line: &&String| line.split(|c: char| !c.is_ascii_digit()).any(|word| word == pid);
        let lines = finished.stderr.iter().filter(names).count();
        ensure!(lines == 1, "{lines} lines about {pid}:\n{}", finished.errors());
    }
    Ok(())
}

/// No Ruby at all during --duration: status 1.
#[test]
fn no_ruby_found() -> Result<()> {
    let _live = Live::begin()?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        let finished = Invocation::jsonl(["--all-ruby", "--duration", "1s"])?.run()?;
        if finished.status.code() == Some(1) {
            return expect(&finished, 1, &["ruby"]);
        }
        // Other Rubies may be running on this machine.
        let report = read(&finished)?;
        ensure!(!report.processes.is_empty(), "status 0, but no process was found:\n{}", finished.errors());
        ensure!(Instant::now() < deadline, "other Rubies run on this machine: {:?}", report.processes);
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// An output that cannot be written is reported at once, with its path, before anything is traced.
#[test]
fn unwritable_outputs() -> Result<()> {
    let live = Live::begin()?;
    let file = live.path("file");
    std::fs::write(&file, "in the way")?;
    let below_a_file = file.join("sets");
    let nowhere = live.path("no/such/dir/gc.pb.gz");
    let cases: [(&str, &Path); 4] = [
        ("--tunemygc", &file),
        ("--tunemygc", &below_a_file),
        ("--pprof", &nowhere),
        ("--pprof", &below_a_file),
    ];
    for (option, path) in cases {
        let args = [
            "--all-ruby".as_ref(),
            "--duration".as_ref(),
            "600s".as_ref(),
            option.as_ref(),
            path.as_os_str(),
        ];
        let finished = Invocation::new(args)?.run()?;
        let name = path.to_string_lossy();
        expect(&finished, 2, &[&name]).with_context(|| format!("{option} {name}"))?;
        ensure!(!finished.errors().contains("gctrace: ready"), "traced first: {}", finished.errors());
    }
    ensure!(std::fs::read_to_string(&file)? == "in the way", "a file of the user was overwritten");
    Ok(())
}

/// If a command fails, what was seen is still reported.
#[test]
fn failing_command() -> Result<()> {
    let _live = Live::beside_others()?;
    let ruby = Ruby::main()?;
    let program = ruby.exe().to_string_lossy().into_owned();
    let args = ["--", &program, "-e", "3.times { GC.start }; exit 9"];
    let finished = Invocation::jsonl(args)?.run()?;
    expect(&finished, 9, &[])?;
    let report = Report::parse(&finished.stdout)?;
    ledger::check(&report)?;
    ensure!(report.gcs.len() >= 3, "{} cycles of at least 3", report.gcs.len());
    Ok(())
}

/// A user namespace, or a missing `/sys` or `/proc`, is named with what to do, by a run and by doctor: nothing is claimed about the kernel or about
/// processes.
#[test]
fn wrong_surroundings() -> Result<()> {
    let live = Live::beside_others()?;
    let mut script = Script::unwitnessed(&live, &Ruby::main()?, "idle.rb")?.start()?;
    script.wait_for("idle")?;
    let (binary, pid) = (gctrace_binary()?, script.pid().to_string());
    let hidden = |dir: &str| {
        vec![
            "--mount".to_owned(),
            "sh".into(),
            "-c".into(),
            format!("mount -t tmpfs none {dir}; exec \"$@\""),
            "sh".into(),
        ]
    };
    let users = ["--user", "--map-root-user"].map(str::to_owned).to_vec();
    for (unshare, words) in [
        (users, ["user namespace", "run gctrace on the host"]),
        (hidden("/sys"), ["/sys is not mounted", "mount -t sysfs"]),
        (hidden("/proc"), ["/proc is not mounted", "mount -t proc"]),
    ] {
        let run = ["--pid", &pid, "--duration", "1s"];
        let commands = [
            &run[..],
            &["doctor", "-v", "--no-cache", "--pid", &pid],
            &["heap", "--pid", &pid],
            &["dump", "--pid", &pid],
        ];
        for command in commands {
            // Only BPF needs what these commands do without.
            if words[0].starts_with("/sys") && ["heap", "dump"].contains(&command[0]) {
                continue;
            }
            let mut all = Command::new("unshare");
            all.args(&unshare).arg(&binary).args(command);
            let finished = Guarded::start("unshare", &mut all)?.finish(PATIENCE)?;
            let text = [finished.stdout.join("\n"), finished.errors()].concat();
            let all_there = words.iter().all(|word| text.contains(word));
            let status = finished.status.code();
            ensure!(all_there && status == Some(3), "{unshare:?} {command:?}: {status:?}: {text}");
            for wrong in [
                "CONFIG_",
                "boot ",
                "no such process",
                "dmesg",
                "check the security policy",
                "cap_sys_admin: held;",
            ] {
                let expected = command[0] == "doctor"
                    && wrong == "cap_sys_admin: held;"
                    && !words[0].starts_with("user");
                ensure!(expected || !text.contains(wrong), "{unshare:?} {command:?}: {wrong}: {text}");
            }
        }
    }
    script.say("end")?;
    script.finish()?;
    Ok(())
}

/// If tracefs is not mounted, gctrace works without it, mounts it, or says what to do.
#[test]
fn without_tracefs() -> Result<()> {
    let live = Live::beside_others()?;
    let mut script = Script::unwitnessed(&live, &Ruby::main()?, "idle.rb")?.start()?;
    script.wait_for("idle")?;
    let binary = gctrace_binary()?;
    let mut command = Command::new("unshare");
    // A separate mount namespace, so that nothing changes outside.
    command.args(["--mount", "sh", "-c"]);
    command.arg(
        "umount /sys/kernel/tracing; umount /sys/kernel/debug/tracing; umount /sys/kernel/debug; \
         ! mountpoint -q /sys/kernel/tracing && ! mountpoint -q /sys/kernel/debug || exit 99; exec \"$@\"",
    );
    command.args(["sh".as_ref(), binary.as_os_str()]);
    command.args(["--pid", &script.pid().to_string(), "--duration", "1s"]);
    let finished = Guarded::start("unshare", &mut command)?.finish(PATIENCE)?;
    script.say("end")?;
    script.finish()?;
    match finished.status.code() {
        Some(0) => Ok(()),
        _ => expect(&finished, 3, &["tracefs", "mount"]),
    }
}
