//! `gctrace doctor` compared with Ruby, readelf and the kernel, and the cache that it shares with a run.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use gctrace_tests::PATIENCE;
use gctrace_tests::child::{Finished, Guarded};
use gctrace_tests::doctor::{Diagnosis, diagnose, read};
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::live::{Live, gctrace_binary};
use gctrace_tests::memory::changed_code;
use gctrace_tests::report::Report;
use gctrace_tests::ruby::Ruby;

/// A Ruby whose heap does not change, with its own figures: `GC.count` and `heap_available_slots`.
struct Still {
    process: Guarded,
    count: u64,
    slots: u64,
}

impl Still {
    fn start(change: impl FnOnce(&mut Command)) -> Result<Self> {
        let mut command = Command::new(Ruby::main()?.exe());
        let script = "GC.start; GC.disable; a = GC.stat; $stdout.sync = true; \
                      puts \"still #{a[:count]} #{a[:heap_available_slots]}\"; $stdin.gets";
        command.args(["--disable-gems", "-e", script]);
        change(&mut command);
        let mut process = Guarded::start("ruby", &mut command)?;
        let line = process.wait_stdout(PATIENCE, "its heap", |line| line.starts_with("still "))?;
        let mut words = line.split(' ').skip(1).map(str::parse);
        let mut next = || words.next().context("too few words")?.context("no number");
        Ok(Self { process, count: next()?, slots: next()? })
    }

    fn pid(&self) -> String {
        self.process.pid().to_string()
    }
}

/// The output of an installed program.
fn output(program: &str, args: &[&str]) -> Result<String> {
    let output =
        Command::new(program).args(args).output().with_context(|| format!("cannot run {program}"))?;
    ensure!(output.status.success(), "{program} failed: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

/// The cache directory of this test.
fn cache(live: &Live) -> PathBuf {
    live.path("cache")
}

fn image_path(diagnosis: &Diagnosis) -> Result<PathBuf> {
    Ok(PathBuf::from(diagnosis.image()?["path"].as_str().context("no path")?))
}

/// Checks the exit status and the words of a text report.
fn expect_text(finished: &Finished, code: i32, words: &[&str]) -> Result<()> {
    let text = finished.stdout.join("\n");
    ensure!(finished.status.code() == Some(code), "{}:\n{text}\n{}", finished.status, finished.errors());
    for word in words {
        ensure!(text.contains(word), "no word of {word:?} in:\n{text}");
    }
    ensure!(!text.contains('\x1b'), "colours in a pipe");
    Ok(())
}

/// Version, build id and live values equal those of `ruby -v`, `readelf` and the program itself.
#[test]
fn agrees_with_the_witnesses() -> Result<()> {
    let live = Live::beside_others()?;
    let still = Still::start(|_| ())?;
    let diagnosis = diagnose(&cache(&live), ["--pid", &still.pid()])?;
    ensure!(diagnosis.finished.status.success(), "{:?}", diagnosis.finished);
    let image = diagnosis.image()?;
    let ruby = Ruby::main()?;
    let said = output(&ruby.exe().to_string_lossy(), &["-v"])?;
    // An active JIT or parser adds its mark to the output of `ruby -v`.
    let plain = |text: &str| text.trim().replace(" +PRISM", "").replace(" +YJIT", "");
    ensure!(plain(image["description"].as_str().unwrap_or_default()) == plain(&said), "{image} but {said}");
    ensure!(image["ruby"] == ruby.version(), "{image} but {}", ruby.version());
    let path = image_path(&diagnosis)?;
    let notes = output("readelf", &["-n", &path.to_string_lossy()])?;
    let build_id = notes.lines().find_map(|line| line.trim().strip_prefix("Build ID: "));
    let build_id = build_id.with_context(|| format!("{} has no build id", path.display()))?;
    ensure!(image["build_id"] == build_id, "{} but {build_id:?}", image["build_id"]);
    let [process] = &diagnosis.processes[..] else { bail!("{:?}", diagnosis.processes) };
    ensure!(process["proof"] == "passed" && process["works"] == true, "{process}");
    ensure!(process["gc_count"] == still.count, "{process} but count {}", still.count);
    ensure!(process["heap_available_slots"] == still.slots, "{process} but {} slots", still.slots);
    let features = image["features"].as_array().context("features")?;
    ensure!(features.len() > 3 && features.iter().all(|feature| feature["works"] == true), "{image}");

    let text = Invocation::new(["doctor", "--no-cache", "--pid", &still.pid()])?.run()?;
    let count = format!("GC.count {}", still.count);
    expect_text(&text, 0, &[ruby.version(), build_id, &still.pid(), &count, "works", "gctrace can run"])?;
    // A run does what doctor reports as possible.
    let traced = Invocation::jsonl(["--pid", &still.pid(), "--duration", "100ms"])?.run()?;
    ensure!(traced.status.success() && traced.stdout.join("").contains(build_id), "{}", traced.errors());
    Ok(())
}

/// Nothing is attached to Ruby and nothing in it is changed: its code equals the file, byte for byte, and it continues to run.
#[test]
fn harms_nothing() -> Result<()> {
    let live = Live::begin()?;
    let mut still = Still::start(|_| ())?;
    let (pid, dir) = (still.process.pid(), cache(&live));
    let doctor = std::thread::spawn(move || diagnose(&dir, ["--pid", &pid.to_string()]));
    let mut looks = 0;
    while !doctor.is_finished() {
        ensure!(changed_code(pid)?.is_empty(), "a probe is on Ruby");
        looks += 1;
    }
    ensure!(looks > 10, "{looks} looks are too few");
    let diagnosis = doctor.join().map_err(|_| anyhow!("doctor's thread panicked"))??;
    ensure!(diagnosis.finished.status.success(), "{:?}", diagnosis.finished);
    still.process.say("")?;
    let finished = still.process.finish(PATIENCE)?;
    ensure!(finished.status.success(), "{}", finished.status);
    Ok(())
}

/// A second examination, and a run, use the analysis of the first one. A damaged analysis is reported, not used, and replaced.
#[test]
fn cache_is_used_and_checked() -> Result<()> {
    let live = Live::beside_others()?;
    let dir = cache(&live);
    let still = Still::start(|_| ())?;
    let args = ["--pid", &still.pid()];
    let first = diagnose(&dir, args)?;
    let second = diagnose(&dir, args)?;
    ensure!(first.image()?["cached"] == false && second.image()?["cached"] == true, "{:?}", second.images);
    ensure!(second.summary["images_cached"] == 1, "{}", second.summary);
    for key in ["ruby", "description", "build_id", "sites", "checks", "layout", "stat_keys", "features"] {
        ensure!(
            first.image()?[key] == second.image()?[key],
            "{key} differs: {:?} {:?}",
            first.images,
            second.images
        );
    }
    let dir_arg = dir.to_string_lossy().into_owned();
    let run = ["--pid", &still.pid(), "--duration", "100ms", "--cache-dir", &dir_arg];
    let traced = Invocation::jsonl(run)?.envs(vec![("RUST_LOG".into(), "info".into())]).run()?;
    ensure!(traced.status.success() && traced.errors().contains("is used"), "{}", traced.errors());

    let entries: Vec<PathBuf> = fs::read_dir(&dir)?.flatten().map(|entry| entry.path()).collect();
    let [entry] = &entries[..] else { bail!("{entries:?}") };
    let mut bytes = fs::read(entry)?;
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x10;
    fs::write(entry, &bytes)?;
    let third = diagnose(&dir, args)?;
    let warnings: Vec<&String> =
        third.finished.stderr.iter().filter(|line| line.contains(&*entry.to_string_lossy())).collect();
    ensure!(warnings.len() == 1 && warnings[0].contains("checksum"), "{:?}", third.finished.stderr);
    ensure!(
        third.image()?["cached"] == false && third.image()?["sites"] == first.image()?["sites"],
        "{:?}",
        third.images
    );
    ensure!(diagnose(&dir, args)?.image()?["cached"] == true, "the damaged entry was not replaced");

    let none =
        Invocation::new(["doctor", "--format", "jsonl", "--no-cache", "--pid", &still.pid()])?.run()?;
    ensure!(read(none)?.image()?["cached"] == false, "--no-cache does not hold");
    Ok(())
}

/// A cache directory that other users can write to is not used; everything else works.
#[test]
fn unsafe_cache_directory() -> Result<()> {
    let live = Live::beside_others()?;
    let dir = live.dir("open")?;
    fs::set_permissions(&dir, Permissions::from_mode(0o777))?;
    let still = Still::start(|_| ())?;
    let diagnosis = diagnose(&dir, ["--pid", &still.pid()])?;
    ensure!(diagnosis.finished.status.success(), "{:?}", diagnosis.finished);
    ensure!(diagnosis.finished.errors().contains(&*dir.to_string_lossy()), "{}", diagnosis.finished.errors());
    ensure!(fs::read_dir(&dir)?.count() == 0, "something was stored there");
    Ok(())
}

/// Replaces the only occurrence of one of these patterns.
fn damage(bytes: &mut [u8], patterns: &[(&[u8], &[u8])]) -> Result<()> {
    let mut places = Vec::new();
    for (old, new) in patterns {
        let found = bytes.windows(old.len()).enumerate().filter(|(_, window)| window == old);
        places.extend(found.map(|(at, _)| (at, *new)));
    }
    let [(at, new)] = places[..] else { bail!("{} places to damage", places.len()) };
    bytes[at..at + new.len()].copy_from_slice(new);
    Ok(())
}

/// An image with a damaged event site, or with an unknown version, is refused with the reason.
#[test]
fn damaged_images() -> Result<()> {
    let live = Live::beside_others()?;
    let still = Still::start(|_| ())?;
    let healthy = diagnose(&cache(&live), ["--pid", &still.pid()])?;
    let original = fs::read(image_path(&healthy)?)?;
    let copy = live.path("libruby-damaged.so");

    // `test byte [reg+0x16], 0x40` (up to 3.3) with another displacement, or the constant before the call (3.4).
    let mut site = original.clone();
    let tests: Vec<(Vec<u8>, Vec<u8>)> =
        (0x40..0x48_u8).map(|reg| (vec![0xf6, reg, 0x16, 0x40], vec![0xf6, reg, 0x1a, 0x40])).collect();
    let tests: Vec<(&[u8], &[u8])> = tests.iter().map(|(old, new)| (&old[..], &new[..])).collect();
    let calls = [(&b"\xbe\x00\x00\x40\x00"[..], &b"\xbe\x00\x00\x80\x00"[..])];
    let has_tests = tests.iter().any(|(old, _)| site.windows(old.len()).any(|window| window == *old));
    damage(&mut site, if has_tests { &tests } else { &calls })?;
    // The exported version string.
    let mut version = original;
    let text = format!("\0{}\0", Ruby::main()?.version());
    let other = format!("\09{}", &text[2..]);
    damage(&mut version, &[(text.as_bytes(), other.as_bytes())])?;

    for (bytes, word) in [(site, "check failed: "), (version, " is not supported")] {
        fs::write(&copy, bytes)?;
        // The cache holds an analysis under this build id and size.
        let diagnosis = diagnose(&cache(&live), [&copy])?;
        let image = diagnosis.image()?;
        let reason = image["refused"]["reason"].as_str().unwrap_or_default();
        ensure!(image["works"] == false && reason.contains(word), "{image}");
        ensure!(image["refused"]["remedy"].is_string() && image["sites"].is_null(), "{image}");
        // With USDT probes or symbols, the duration of GC work can still be seen; doctor must not promise anything else.
        let (confidence, verdict) = match image["method"].as_str() {
            None => ("none", "is not traced"),
            Some(method) => {
                ensure!(method != "sites", "{image}");
                ("partial", "only the time of its GC work is seen")
            }
        };
        ensure!(image["confidence"] == confidence, "{image}");
        let features = image["features"].as_array().context("no features")?;
        let working: Vec<_> = features.iter().filter(|f| f["works"] == true).map(|f| &f["name"]).collect();
        ensure!(working.iter().all(|name| *name == "gc_work"), "{image}");
        ensure!(diagnosis.finished.status.code() == Some(2), "{:?}", diagnosis.finished);
        let file = copy.to_string_lossy();
        let finished = Invocation::new(["doctor", "--no-cache", &file])?.run()?;
        expect_text(&finished, 2, &[word, &file, verdict, "what to do:"])?;
    }
    Ok(())
}

/// Files and processes that are not Ruby, or are gone, are named; everything else works.
#[test]
fn misses() -> Result<()> {
    let live = Live::beside_others()?;
    let sleep = Guarded::start("sleep", Command::new("sleep").arg("600"))?;
    let mut gone = Command::new("true").spawn()?;
    gone.wait()?;
    let (sleep, gone) = (sleep.pid().to_string(), gone.id().to_string());
    for (args, words) in [
        (vec!["--pid", &sleep], vec![&*sleep, "not a Ruby process"]),
        (vec!["--pid", &gone], vec![&*gone, "no such process"]),
        (vec!["/bin/ls"], vec!["/bin/ls", "neither"]),
    ] {
        let finished = Invocation::new(["doctor", "--no-cache"].iter().chain(&args))?.run()?;
        expect_text(&finished, 1, &words).with_context(|| format!("{args:?}"))?;
    }
    let finished = Invocation::new(["doctor", "--no-cache", "/no/such/file"])?.run()?;
    expect_text(&finished, 2, &["/no/such/file", "No such file"])?;

    for (flag, of) in [("--name", "no-such-program"), ("--unit", "no-such.service")] {
        let finished = Invocation::new(["doctor", "--no-cache", flag, of])?.run()?;
        // A unit can only be looked for where there are cgroups.
        let reason = match finished.status.code() {
            Some(1) => "no Ruby process of it runs now",
            Some(2) if flag == "--unit" => "",
            _ => bail!("{flag}: {finished:?}"),
        };
        let is_said = |line: &String| line.contains(&format!("{flag} {of}")) && line.contains(reason);
        ensure!(finished.stdout.iter().any(is_said), "{finished:?}");
    }
    // By name, and by a pid without a flag; what is no Ruby in a group is nobody's question.
    let named = live.path("named_for_doctor.rb");
    fs::write(&named, "$stdout.puts 'up'; $stdout.flush; $stdin.gets")?;
    let mut program = Guarded::start("ruby", Ruby::main()?.command()?.arg(&named))?;
    program.wait_stdout(PATIENCE, "its start", |line| line == "up")?;
    let pid = program.pid().to_string();
    for args in [vec!["--name", "named_for_doctor"], vec![&*pid]] {
        let diagnosis = diagnose(&cache(&live), args.clone())?;
        let found: Vec<_> = diagnosis.processes.iter().map(|process| process["pid"].as_u64()).collect();
        ensure!(found == [Some(program.pid().into())], "{args:?}: {diagnosis:?}");
        ensure!(diagnosis.summary["misses"].as_array().is_some_and(Vec::is_empty), "{}", diagnosis.summary);
    }

    let still = Still::start(|_| ())?;
    let diagnosis = diagnose(&cache(&live), ["--pid", &still.pid(), "--pid", &sleep])?;
    ensure!(diagnosis.processes.len() == 1 && diagnosis.processes[0]["works"] == true, "{diagnosis:?}");
    ensure!(diagnosis.summary["misses"][0]["pid"].as_u64() == sleep.parse().ok(), "{}", diagnosis.summary);
    Ok(())
}

/// A non-Ruby program that maps this file as code.
fn mapper(file: &Path) -> Result<Guarded> {
    let script = "import mmap, os, sys; f = os.open(sys.argv[1], os.O_RDONLY); \
                  m = mmap.mmap(f, 0, prot=mmap.PROT_READ | mmap.PROT_EXEC, flags=mmap.MAP_PRIVATE); \
                  print('mapped', flush=True); sys.stdin.read()";
    let mut process = Guarded::start("python3", Command::new("python3").args(["-c", script]).arg(file))?;
    process.wait_stdout(PATIENCE, "its mapping", |line| line == "mapped")?;
    Ok(process)
}

/// Doctor and a run give the same verdict on the same process: a Ruby; a program that maps a damaged Ruby, or a file that only has the
/// name of one; and a program without any Ruby.
#[test]
fn same_verdict_as_a_run() -> Result<()> {
    let live = Live::beside_others()?;
    let still = Still::start(|_| ())?;
    let library = fs::read(image_path(&diagnose(&cache(&live), ["--pid", &still.pid()])?)?)?;
    let file = |name: &str, bytes: &[u8]| {
        let path = live.path(name);
        fs::write(&path, bytes).map(|()| path)
    };
    let cut = mapper(&file("libruby-cut.so.3.1", &library[..library.len() / 2])?)?;
    let no_elf = mapper(&file("libruby-text.so.3.1", &[b'x'; 8192])?)?;
    let other = mapper(&file("libother.so", &library[..library.len() / 2])?)?;
    let mut refused = 0;
    for (pid, is_ruby) in
        [(still.process.pid(), true), (cut.pid(), true), (no_elf.pid(), false), (other.pid(), false)]
    {
        let diagnosis = diagnose(&cache(&live), ["--pid", &pid.to_string()])?;
        let args = ["--pid", &pid.to_string(), "--no-cache", "--duration", "1ms"];
        let finished = Invocation::jsonl(args)?.run()?;
        ensure!(diagnosis.images.is_empty() != is_ruby, "{diagnosis:?}");
        if diagnosis.images.is_empty() {
            let reason = diagnosis.summary["misses"][0]["reason"].as_str().context("no reason")?;
            ensure!(reason.contains("not a Ruby process"), "{reason}");
            ensure!(finished.errors().contains(reason), "doctor: {reason}\nrun: {}", finished.errors());
            continue;
        }
        let image = diagnosis.image()?;
        let report = Report::parse(&finished.stdout)?;
        match image["refused"]["reason"].as_str() {
            Some(reason) if image["method"].is_null() => {
                let said: Vec<_> = report.refused.iter().map(|line| line.reason.as_str()).collect();
                ensure!(said == [reason] && report.processes.is_empty(), "doctor: {reason}\nrun: {said:?}");
                refused += 1;
            }
            _ => {
                let [process] = &report.processes[..] else { bail!("{:?}", report.processes) };
                ensure!(image["path"] == process.image.as_str(), "{image} but {process:?}");
                ensure!(image["method"] == process.method.as_str(), "{image} but {process:?}");
                ensure!(report.refused.is_empty(), "{:?}", report.refused);
            }
        }
    }
    ensure!(refused > 0, "nothing was refused");
    Ok(())
}

/// A copy of the binary that all users may run, in a directory that all users may enter.
fn public_binary() -> Result<(tempfile::TempDir, PathBuf)> {
    let dir = tempfile::Builder::new().prefix("gctrace-test-").tempdir()?;
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755))?;
    let binary = dir.path().join("gctrace");
    fs::copy(gctrace_binary()?, &binary)?;
    Ok((dir, binary))
}

/// Without privileges, doctor names the missing ones and still examines what it can: files, and the user's own Rubies.
#[test]
fn not_root() -> Result<()> {
    const NOBODY: u32 = 65_534;
    let _live = Live::beside_others()?;
    let (dir, binary) = public_binary()?;
    let still = Still::start(|command| {
        command.uid(NOBODY).gid(NOBODY).current_dir("/");
    })?;
    let args = ["doctor", "--no-cache", "--format", "jsonl", "--pid", &still.pid()];
    let unprivileged = |command: &mut Command| {
        command.uid(NOBODY).gid(NOBODY).current_dir(dir.path());
    };
    let diagnosis = read(Invocation::of(&binary, args).with(unprivileged).run()?)?;
    ensure!(diagnosis.finished.status.code() == Some(3), "{:?}", diagnosis.finished);
    for name in ["cap_sys_admin", "cap_sys_ptrace", "cap_dac_read_search"] {
        let check = diagnosis.check(name)?;
        ensure!(check["status"] == "missing" && check["remedy"].is_string(), "{check}");
    }
    for name in ["bpf_programs", "uprobe_attach", "tracepoint sched:sched_process_exit"] {
        let check = diagnosis.check(name)?;
        ensure!(
            check["status"] == "unknown" && check["detail"].as_str().is_some_and(|d| d.contains("privilege")),
            "{check}"
        );
    }
    let [process] = &diagnosis.processes[..] else { bail!("{:?}", diagnosis.processes) };
    ensure!(process["proof"] == "passed" && process["gc_count"] == still.count, "{process}");
    let text = Invocation::of(&binary, ["doctor", "--no-cache"]).with(unprivileged).run()?;
    expect_text(&text, 3, &["gctrace cannot run", "cap_sys_admin", "sudo", "cannot be inspected"])?;
    Ok(())
}

/// Doctor and a run name each missing capability; doctor names no other one.
#[test]
fn each_capability() -> Result<()> {
    let live = Live::beside_others()?;
    let still = Still::start(|_| ())?;
    for (name, dropped) in [
        ("cap_sys_admin", "-sys_admin"),
        ("cap_sys_ptrace", "-sys_ptrace"),
        ("cap_dac_read_search", "-dac_read_search,-dac_override"),
    ] {
        let without = |args: &[&str]| -> Result<Finished> {
            let mut command = Command::new("setpriv");
            command.arg(format!("--bounding-set={dropped}")).arg(gctrace_binary()?).args(args);
            Guarded::start("setpriv", &mut command)?.finish(PATIENCE)
        };
        let cache = cache(&live);
        let cache = cache.to_string_lossy();
        let diagnosis =
            read(without(&["doctor", "--format", "jsonl", "--cache-dir", &cache, "--pid", &still.pid()])?)?;
        ensure!(diagnosis.finished.status.code() == Some(3), "{name}: {:?}", diagnosis.finished);
        let checks = diagnosis.host["checks"].as_array().context("no checks")?;
        let missing: Vec<&str> = checks
            .iter()
            .filter(|check| check["status"] == "missing")
            .filter_map(|c| c["name"].as_str())
            .collect();
        ensure!(missing == [name], "without {name}: {missing:?}");
        let run = without(&["--pid", &still.pid(), "--duration", "100ms"])?;
        let told = run.errors().to_lowercase();
        ensure!(run.status.code() == Some(3) && told.contains(name), "{name}: {} {told}", run.status);
    }
    Ok(())
}

/// The capabilities that doctor requires are sufficient: a user other than root who has all of them can trace.
#[test]
fn capabilities_are_enough() -> Result<()> {
    let _live = Live::beside_others()?;
    let (_dir, binary) = public_binary()?;
    let mut script = Command::new(Ruby::main()?.exe());
    script.args(["--disable-gems", "-e", "loop { GC.start; sleep 0.05 }"]);
    let ruby = Guarded::start("ruby", &mut script)?;
    let capable = |args: &[&str]| -> Result<Finished> {
        let mut command = Command::new("setpriv");
        let capabilities = "+sys_admin,+sys_ptrace,+dac_read_search";
        command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]);
        command.args([format!("--inh-caps={capabilities}"), format!("--ambient-caps={capabilities}")]);
        command.arg(&binary).args(args).current_dir("/");
        Guarded::start("setpriv", &mut command)?.finish(PATIENCE)
    };
    let pid = ruby.pid().to_string();
    let diagnosis = read(capable(&["doctor", "--no-cache", "--format", "jsonl", "--pid", &pid])?)?;
    ensure!(diagnosis.finished.status.success(), "{:?}", diagnosis.finished);
    let run = capable(&["--no-cache", "--format", "jsonl", "--pid", &pid, "--duration", "1s"])?;
    let report = gctrace_tests::gctrace::read(&run)?;
    ensure!(report.gcs.len() >= 3, "{} cycles: {}", report.gcs.len(), run.errors());
    Ok(())
}

/// Usage errors are reported as by other commands.
#[test]
fn bad_usage() -> Result<()> {
    for (args, word) in [(&["doctor", "--pid", "x"][..], "x"), (&["doctor", "--nonsense"], "--nonsense")] {
        let finished = Invocation::new(args)?.run()?;
        ensure!(finished.status.code() == Some(2) && finished.errors().contains(word), "{finished:?}");
    }
    let help = Invocation::new(["doctor", "--help"])?.run()?;
    ensure!(help.status.success() && help.stdout.join("\n").contains("Exit status"), "{help:?}");
    Ok(())
}

/// If tracefs is not mounted, doctor says so and does not mount it.
#[test]
fn without_tracefs() -> Result<()> {
    let live = Live::beside_others()?;
    let still = Still::start(|_| ())?;
    let mut command = Command::new("unshare");
    let script = "umount /sys/kernel/tracing; umount /sys/kernel/debug/tracing; umount /sys/kernel/debug; \
                  \"$@\"; status=$?; grep -q tracefs /proc/self/mounts && exit 99; exit $status";
    command.args(["--mount", "sh", "-c", script, "sh"]).arg(gctrace_binary()?);
    command
        .args(["doctor", "--format", "jsonl", "--cache-dir"])
        .arg(cache(&live))
        .args(["--pid", &still.pid()]);
    let diagnosis = read(Guarded::start("unshare", &mut command)?.finish(PATIENCE)?)?;
    ensure!(
        diagnosis.check("tracefs")?["detail"].as_str().is_some_and(|d| d.contains("not mounted")),
        "{diagnosis:?}"
    );
    ensure!(diagnosis.check("bpf_programs")?["status"] == "ok", "{diagnosis:?}");
    ensure!(diagnosis.finished.status.success(), "{:?}", diagnosis.finished);
    Ok(())
}

/// A process that ends while it is examined is not an error.
#[test]
fn short_lived() -> Result<()> {
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    let mut command = Command::new("sh");
    let loop_ = "while :; do \"$0\" --disable-gems -e 1; done";
    command.args(["-c", loop_]).arg(ruby.exe());
    let _busy = Guarded::start("sh", &mut command)?;
    for _ in 0..5 {
        let diagnosis = diagnose(&cache(&live), ["--all-ruby"])?;
        let status = diagnosis.finished.status.code();
        ensure!(status == Some(0), "{status:?}: {:?} {:?}", diagnosis.processes, diagnosis.summary);
    }
    Ok(())
}

/// In a separate pid namespace the kernel's pids are meaningless: doctor and a run say so.
#[test]
fn inside_a_container() -> Result<()> {
    let live = Live::beside_others()?;
    let inside = |args: &[&str]| -> Result<Finished> {
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--mount-proc"]).arg(gctrace_binary()?).args(args);
        Guarded::start("unshare", &mut command)?.finish(PATIENCE)
    };
    let cache = cache(&live);
    let diagnosis = read(inside(&["doctor", "--format", "jsonl", "--cache-dir", &cache.to_string_lossy()])?)?;
    let check = diagnosis.check("pid_namespace")?;
    ensure!(check["status"] == "missing" && diagnosis.finished.status.code() == Some(3), "{check}");
    let run = inside(&["--all-ruby", "--duration", "100ms"])?;
    ensure!(run.status.code() == Some(3) && run.errors().contains("container"), "{run:?}");
    // Its own /proc is not the host's, and neither is any other directory.
    for (proc, word) in [("/proc", "another pid namespace"), ("/tmp", "cannot be inspected")] {
        let run = inside(&["--all-ruby", "--proc", proc])?;
        ensure!(run.status.code() == Some(3) && run.errors().contains(word), "{proc}: {run:?}");
    }
    Ok(())
}
