//! Containers and cgroups: which processes are traced, what is reported about them, and that nothing counts twice.

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::child::Guarded;
use gctrace_tests::container::{Cgroup, Container, Done, Engine, as_seen_inside};
use gctrace_tests::gctrace::{Gctrace, Invocation};
use gctrace_tests::live::{Live, gctrace_binary};
use gctrace_tests::report::{GcLine, Report};
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::{self, Script};
use gctrace_tests::{PATIENCE, compare, ledger, slowness};

/// The Ruby whose root becomes the image of the containers.
fn boxed() -> Result<Ruby> {
    Ruby::rooted()?.pop().context("no Ruby of the lab")
}

/// Checks that every cycle of the container is reported once, as its witness saw it, with the container's id.
fn all_counted(report: &Report, done: &Done, pid: u32, id: &str) -> Result<()> {
    let lines: Vec<&GcLine> = report.gcs_of(pid).collect();
    ensure!(lines.iter().all(|line| line.container.as_deref() == Some(id)), "container of a gc line");
    let inside = as_seen_inside(&lines, pid, done.report.pid);
    let inside: Vec<&GcLine> = inside.iter().collect();
    compare::program(&inside, &done.report)?;
    compare::cycles(&inside, done.witness.as_ref().context("no witness")?).demand_equal()
}

/// Two containers of one image: their files are the same, though on two file systems. One exists before gctrace starts,
/// the other starts later. Each is reported with its id, name, host name and pid inside.
#[test]
fn two_of_one_image() -> Result<()> {
    let live = Live::begin()?;
    let ruby = boxed()?;
    let engine = Engine::of(&live, &ruby)?;
    let script = || Ok::<_, anyhow::Error>(Script::new(&live, &ruby, "explicit.rb")?.arg("30").waiting());
    let names = ["first", "second"].map(|suffix| engine.name(suffix));
    let mut first = engine.start(&names[0], script()?, "")?;
    let gctrace = Gctrace::all_ruby(&live)?;
    let mut second = engine.start(&names[1], script()?, "")?;
    first.say("go")?;
    second.say("go")?;
    let told = [(first.pid, first.id.clone()), (second.pid, second.id.clone())];
    let done = [first.finish()?, second.finish()?];
    let report = gctrace.stop()?;
    ledger::check_lossless(&report)?;
    compare::one_life(&report, told[1].0)?;
    for ((done, (pid, id)), name) in done.iter().zip(&told).zip(&names) {
        all_counted(&report, done, *pid, id)?;
        let process = report.processes_of(*pid).next().context("no process line")?;
        assert_eq!(process.container.as_ref(), Some(id));
        assert_eq!(process.container_runtime.as_deref(), Some("podman"));
        assert_eq!(process.container_name.as_ref(), Some(name));
        assert_eq!(process.ns_pid, Some(1));
        assert_eq!(process.hostname, Some(format!("host-{name}")));
        assert_eq!(process.ruby, ruby.version());
    }
    Ok(())
}

/// Two of three containers are selected: a running one by a prefix of its id, and a later one by its name.
/// All of their cycles are reported, and nothing else is.
#[test]
fn some_of_many() -> Result<()> {
    let live = Live::beside_others()?;
    let ruby = boxed()?;
    let engine = Engine::of(&live, &ruby)?;
    let script = || Ok::<_, anyhow::Error>(Script::new(&live, &ruby, "explicit.rb")?.arg("30").waiting());
    let [by_id, by_name, other] = ["by-id", "by-name", "other"].map(|suffix| engine.name(suffix));
    let mut first = engine.start(&by_id, script()?, "")?;
    let mut third = engine.start(&other, script()?, "")?;
    let gctrace =
        Invocation::jsonl(["--container", &first.id[..12], "--container", &by_name])?.start_ready()?;
    let mut second = engine.start(&by_name, script()?, "")?;
    for container in [&mut first, &mut second, &mut third] {
        container.say("go")?;
    }
    let told = [(first.pid, first.id.clone()), (second.pid, second.id.clone())];
    let done = [first.finish()?, second.finish()?];
    let ignored = third.finish()?;
    let (report, finished) = gctrace.stop_by(rustix::process::Signal::INT)?;
    ensure!(finished.errors().contains(&by_name), "nothing is said of the container that was not there");
    ledger::check_lossless(&report)?;
    for (done, (pid, id)) in done.iter().zip(&told) {
        all_counted(&report, done, *pid, id)?;
    }
    let selected = told.map(|(pid, _)| pid);
    ensure!(report.gcs.iter().all(|line| selected.contains(&line.pid)), "cycles of what is not selected");
    ensure!(report.processes.iter().all(|process| selected.contains(&process.pid)), "a process too many");
    ensure!(ignored.report.growth("count")? >= 30, "the other container did not collect");
    Ok(())
}

/// A short-lived container from its first to its last cycle: when gctrace started, only its Ruby existed.
#[test]
fn comes_and_goes() -> Result<()> {
    let live = Live::beside_others()?;
    let ruby = boxed()?;
    let engine = Engine::of(&live, &ruby)?;
    let resident = engine.start(&engine.name("resident"), idle(&live, &ruby)?, "")?;
    let name = engine.name("short");
    let gctrace = Invocation::jsonl(["--container", &name])?.start_ready()?;
    let done = engine.begin(&name, Script::new(&live, &ruby, "explicit.rb")?.arg("5"), "")?.finish()?;
    let report = gctrace.stop()?;
    drop(resident);
    ledger::check_lossless(&report)?;
    let [process] = report.processes.as_slice() else { anyhow::bail!("processes {:?}", report.processes) };
    let id = process.container.clone().context("no container")?;
    assert_eq!(process.container_name.as_ref(), Some(&name));
    all_counted(&report, &done, process.pid, &id)?;
    compare::one_life(&report, process.pid)
}

fn idle(live: &Live, ruby: &Ruby) -> Result<Script> {
    Ok(Script::unwitnessed(live, ruby, "explicit.rb")?.arg("1").waiting())
}

/// The same path with a different file: a container that has replaced its library, one that has only changed the
/// file's mode (which makes a copy with the same inode number), and one whose file is deleted. Each is traced once, whichever was found first.
#[test]
fn changed_files() -> Result<()> {
    let live = Live::begin()?;
    let ruby = boxed()?;
    let engine = Engine::of(&live, &ruby)?;
    let replace = "cp -p \"$LIB\" \"$LIB.new\"; mv \"$LIB.new\" \"$LIB\"";
    let as_is = ("as-is", "");
    let mode = ("mode", "chmod 755 \"$LIB\"");
    let others = [("replaced", replace), ("gone", replace)];
    for (round, first) in ["first", "again"].into_iter().zip([[as_is, mode], [mode, as_is]]) {
        changed(&live, &ruby, &engine, round, &[first, others].concat())?;
    }
    Ok(())
}

/// Traces containers, the last of which has its file deleted.
fn changed(live: &Live, ruby: &Ruby, engine: &Engine, round: &str, changes: &[(&str, &str)]) -> Result<()> {
    let mut containers: Vec<Container> = Vec::new();
    for (suffix, change) in changes {
        let script = Script::new(live, ruby, "explicit.rb")?.arg("20").waiting();
        containers.push(engine.start(&engine.name(&format!("{round}-{suffix}")), script, change)?);
    }
    // Its file is deleted while it runs.
    let library = ruby.library()?;
    let inside = library.strip_prefix(ruby.root().context("no root")?)?;
    let pid = containers.last().context("no container")?.pid;
    std::fs::remove_file(Path::new(&format!("/proc/{pid}/root")).join(inside))?;
    let gctrace = Gctrace::all_ruby(live)?;
    for container in &mut containers {
        container.say("go")?;
    }
    let mut done = Vec::new();
    for container in containers {
        let (pid, id, name) = (container.pid, container.id.clone(), container.name.clone());
        done.push((pid, id, name, container.finish()?));
    }
    let report = gctrace.stop()?;
    ledger::check_lossless(&report)?;
    for (pid, id, name, done) in &done {
        all_counted(&report, done, *pid, id).with_context(|| name.clone())?;
    }
    Ok(())
}

/// Starts gctrace in a container with these options, and waits until it is ready.
fn within(engine: &Engine, options: &[&str], args: &[&str]) -> Result<Gctrace> {
    let binary = gctrace_binary()?;
    let mut run: Vec<OsString> = ["run", "--rm", "--privileged", "--cgroupns=host"].map(Into::into).into();
    run.extend(["--name", &engine.name("gctrace"), "-v"].map(Into::into));
    run.extend(["/sys/kernel/tracing:/sys/kernel/tracing", "-v"].map(Into::into));
    run.push(format!("{}:/gctrace:ro", binary.display()).into());
    run.extend(options.iter().map(Into::into));
    run.extend([engine.image(), "/gctrace", "--no-cache", "--format", "jsonl"].map(Into::into));
    run.extend(args.iter().map(Into::into));
    let invocation = Invocation::of(Path::new("podman"), run).with(|command| {
        command.env("CONTAINERS_CONF", engine.settings());
    });
    invocation.start_ready()
}

/// gctrace itself in a container with the host's pid namespace: it traces programs outside, and programs in another container.
#[test]
fn gctrace_inside() -> Result<()> {
    let live = Live::begin()?;
    let ruby = boxed()?;
    let engine = Engine::of(&live, &ruby)?;
    // Started before gctrace: inside the container, this machine's Ruby is in no usual place.
    let mut outside = Script::new(&live, &Ruby::main()?, "explicit.rb")?.arg("20").waiting().start()?;
    outside.wait_for("ready")?;
    let gctrace = within(&engine, &["--pid=host"], &["--all-ruby"])?;
    let script = Script::new(&live, &ruby, "explicit.rb")?.arg("20").waiting();
    let name = engine.name("other");
    let mut boxed = engine.start(&name, script, "")?;
    outside.say("go")?;
    boxed.say("go")?;
    let (pid, id) = (boxed.pid, boxed.id.clone());
    let (outside, boxed) = (outside.finish()?, boxed.finish()?);
    let report = gctrace.stop()?;
    ledger::check_lossless(&report)?;
    all_counted(&report, &boxed, pid, &id)?;
    let process = report.processes_of(pid).next().context("no process line")?;
    assert_eq!(process.container_name.as_ref(), Some(&name), "a name from the host's files");
    all_of(&report, &outside)
}

/// Checks that every cycle of a program outside of containers is reported once.
fn all_of(report: &Report, done: &script::Done) -> Result<()> {
    let lines: Vec<&GcLine> = report.gcs_of(done.pid).collect();
    compare::program(&lines, &done.report)?;
    compare::cycles(&lines, done.log()?).demand_equal()
}

/// gctrace in a container with its own pid namespace, with the host's `/proc` mounted elsewhere: it traces programs that ran
/// before, programs in a container of an image that gctrace knows, and programs with a Ruby that it has not seen, for which
/// the kernel's mapping records have no pid.
#[test]
fn with_the_hosts_proc() -> Result<()> {
    let live = Live::begin()?;
    let ruby = boxed()?;
    let unseen = Ruby::rooted()?.into_iter().next().context("no Ruby of the lab")?;
    ensure!(unseen.version() != ruby.version(), "two Rubies of the lab are needed");
    let engine = Engine::of(&live, &ruby)?;
    let mut outside = Script::new(&live, &Ruby::main()?, "explicit.rb")?.arg("20").waiting().start()?;
    outside.wait_for("ready")?;
    let options = ["-v", "/proc:/host/proc:ro"];
    let mut gctrace = within(&engine, &options, &["--all-ruby", "--proc", "/host/proc"])?;
    let script = |ruby| Ok::<_, anyhow::Error>(Script::new(&live, ruby, "explicit.rb")?.arg("20").waiting());
    let name = engine.name("other");
    let mut boxed = engine.start(&name, script(&ruby)?, "")?;
    let mut later = script(&unseen)?.start()?;
    later.wait_for("ready")?;
    gctrace.wait_line("process", later.pid())?;
    outside.say("go")?;
    boxed.say("go")?;
    later.say("go")?;
    let (pid, id) = (boxed.pid, boxed.id.clone());
    let (outside, boxed, later) = (outside.finish()?, boxed.finish()?, later.finish()?);
    let report = gctrace.stop()?;
    ledger::check_lossless(&report)?;
    all_counted(&report, &boxed, pid, &id)?;
    all_of(&report, &outside)?;
    all_of(&report, &later)?;
    for (pid, ns_pid, container) in [(pid, 1, Some(&name)), (later.pid, later.pid, None)] {
        let process = report.processes_of(pid).next().context("no process line")?;
        assert_eq!((process.ns_pid, process.container_name.as_ref()), (Some(ns_pid), container));
    }
    Ok(())
}

/// In such a container, a pid of the host and the name of a container select their programs and nothing else.
#[test]
fn selected_with_the_hosts_proc() -> Result<()> {
    let live = Live::beside_others()?;
    let ruby = boxed()?;
    let engine = Engine::of(&live, &ruby)?;
    let script = |ruby| Ok::<_, anyhow::Error>(Script::new(&live, ruby, "explicit.rb")?.arg("10").waiting());
    let main = Ruby::main()?;
    let (mut wanted, mut other) = (script(&main)?.start()?, script(&main)?.start()?);
    wanted.wait_for("ready")?;
    other.wait_for("ready")?;
    let name = engine.name("wanted");
    let pid = wanted.pid().to_string();
    let options = ["-v", "/proc:/host/proc:ro", "-v", "/sys/fs/cgroup:/sys/fs/cgroup:ro"];
    let args = ["--proc", "/host/proc", "--pid", &pid, "--container", &name];
    let gctrace = within(&engine, &options, &args)?;
    let mut boxed = engine.start(&name, script(&ruby)?, "")?;
    wanted.say("go")?;
    other.say("go")?;
    boxed.say("go")?;
    let (boxed_pid, id) = (boxed.pid, boxed.id.clone());
    let (wanted, other, boxed) = (wanted.finish()?, other.finish()?, boxed.finish()?);
    let report = gctrace.stop()?;
    ledger::check_lossless(&report)?;
    all_counted(&report, &boxed, boxed_pid, &id)?;
    all_of(&report, &wanted)?;
    ensure!(report.gcs_of(other.pid).next().is_none(), "cycles of what is not selected");
    Ok(())
}

/// A Ruby that collects only when requested.
struct SteppedRuby {
    process: Guarded,
    phases: usize,
}

impl SteppedRuby {
    const PROGRAM: &str = "GC.disable; $stdout.sync = true; puts 'ready'
        while (line = gets)
          phase, times = line.split.map(&:to_i)
          before = GC.count
          times.times { GC.start }
          puts \"phase #{phase} #{before} #{GC.count}\"
        end";

    fn start() -> Result<Self> {
        let mut command = Ruby::main()?.command()?;
        command.args(["--disable-gems", "-e", Self::PROGRAM]);
        let mut process = Guarded::start("told", &mut command)?;
        process.wait_stdout(PATIENCE, "ready", |line| line == "ready")?;
        Ok(Self { process, phases: 0 })
    }

    /// Makes it collect `times` times. Returns the counts of these cycles.
    fn collect(&mut self, times: u64) -> Result<Vec<u64>> {
        self.phases += 1;
        self.process.say(&format!("{} {times}", self.phases))?;
        let start = format!("phase {} ", self.phases);
        let line = self.process.wait_stdout(PATIENCE, &start, |line| line.starts_with(&start))?;
        let numbers: Vec<u64> = line.split(' ').skip(2).map(str::parse).collect::<Result<_, _>>()?;
        let [before, after] = numbers[..] else { anyhow::bail!("phase line {line}") };
        ensure!(after - before == times, "{line}, told to do {times}");
        // Lines and log count from 0, while GC.count is the number of cycles that have started.
        Ok((before + 1..=after).collect())
    }
}

/// Exactly the cycles of those phases are reported in which the program was in a selected cgroup, or in one below it.
fn membership(controller: Option<&str>, settle: Duration) -> Result<()> {
    let _live = Live::begin()?;
    let outer = Cgroup::new(controller, "outer")?;
    let inner = outer.below("inner")?;
    let (mut program, mut outside) = (SteppedRuby::start()?, SteppedRuby::start()?);
    let pid = program.process.pid();
    let path = outer.path().to_string_lossy().into_owned();
    let gctrace = Invocation::jsonl(["--cgroup", &path])?.start_ready()?;
    let mut expected = Vec::new();
    let mut phase = |times, selected: bool| {
        std::thread::sleep(settle);
        outside.collect(3)?;
        let counts = program.collect(times)?;
        if selected {
            expected.extend(counts);
        }
        Ok::<_, anyhow::Error>(())
    };
    phase(3, false)?;
    inner.take(pid)?;
    phase(5, true)?;
    inner.release(pid)?;
    phase(7, false)?;
    outer.take(pid)?;
    phase(4, true)?;
    // A cgroup that is created while its parent is selected.
    let later = inner.below("later")?;
    later.take(pid)?;
    phase(6, true)?;
    later.release(pid)?;
    phase(2, false)?;
    let report = gctrace.stop()?;
    ledger::check_lossless(&report)?;
    let seen: Vec<u64> = report.gcs.iter().map(|line| line.count).collect();
    ensure!(report.gcs.iter().all(|line| line.pid == pid), "cycles of a program outside");
    ensure!(seen == expected, "cycles {seen:?}, but these were inside: {expected:?}");
    Ok(())
}

/// For v2, the kernel decides at each event, so the selection is exact without any waiting. Kernels that cannot query ancestors have to
/// be informed of a cgroup that is created while its parent is selected.
#[test]
fn cgroup_v2() -> Result<()> {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let old = ["5.8.", "5.9.", "5.10.", "5.11.", "5.12.", "5.13.", "5.14."];
    let told = old.iter().any(|series| release.starts_with(series));
    membership(None, if told { Duration::from_secs(slowness().min(3)) } else { Duration::ZERO })
}

/// For v1, the processes of a hierarchy are listed ten times per second.
#[test]
fn cgroup_v1() -> Result<()> {
    membership(Some("pids"), Duration::from_secs(1))
}

/// A cgroup that does not exist yet is reported as missing, and is traced once it is created.
#[test]
fn cgroup_to_come() -> Result<()> {
    let _live = Live::beside_others()?;
    let path = {
        let cgroup = Cgroup::new(None, "later")?;
        cgroup.path().to_owned()
    };
    let mut program = SteppedRuby::start()?;
    let pid = program.process.pid();
    let mut gctrace =
        Invocation::jsonl(["--cgroup".as_ref(), path.as_os_str()])?.informing().start_ready()?;
    program.collect(3)?;
    let cgroup = Cgroup::new(None, "later")?;
    cgroup.take(pid)?;
    // New cgroups are noticed with a delay, not at once.
    gctrace.wait_error("-later is selected")?;
    let expected = program.collect(4)?;
    drop(program);
    let (report, finished) = gctrace.stop_by(rustix::process::Signal::INT)?;
    ensure!(finished.errors().contains("there is no cgroup"), "{}", finished.errors());
    let seen: Vec<u64> = report.gcs.iter().map(|line| line.count).collect();
    ensure!(seen == expected, "cycles {seen:?}, but these were inside: {expected:?}");
    Ok(())
}

/// The pod of a container has its name if its folder is below `--kube-root`.
#[test]
fn pods_have_names() -> Result<()> {
    const UID: &str = "01234567-89ab-cdef-0123-456789abcdef";
    let live = Live::beside_others()?;
    live.dir(&format!("var/log/pods/shop_web-1_{UID}"))?;
    let outer = Cgroup::new(None, "kubepods")?;
    let pod = outer.below(&format!("pod{UID}"))?;
    let container = pod.below(&"c".repeat(64))?;
    let mut program = SteppedRuby::start()?;
    let pid = program.process.pid();
    container.take(pid)?;
    let (pid_text, root) = (pid.to_string(), live.path(""));
    let mut found = Vec::new();
    for more in [&[][..], &["--kube-root".as_ref(), root.as_os_str()]] {
        let args = ["--pid".as_ref(), pid_text.as_ref()].into_iter().chain(more.iter().copied());
        let mut gctrace = Invocation::jsonl::<[&std::ffi::OsStr; 0]>([])?
            .with(|command| {
                command.args(args);
            })
            .start_ready()?;
        program.collect(1)?;
        gctrace.wait_line("process", pid)?;
        let (_, finished) = gctrace.stop_by(rustix::process::Signal::INT)?;
        let process = finished.stdout.iter().find(|line| line.starts_with(r#"{"type":"process""#));
        let process: serde_json::Value = serde_json::from_str(process.context("no process line")?)?;
        found.push(["pod", "pod_namespace", "pod_uid"].map(|name| process[name].as_str().map(str::to_owned)));
    }
    container.release(pid)?;
    let uid = Some(UID.to_owned());
    let expected = [[None, None, uid.clone()], [Some("web-1".to_owned()), Some("shop".to_owned()), uid]];
    ensure!(found == expected, "{found:?}");
    Ok(())
}

/// Creates or removes cgroups below another one: 40 nested ones with the name of a unit, and 25 nested ones with long names.
const NEST: &str = "import os, sys
for names in ['gctrace-hostile.service'] * 40, ['x' * 200] * 25:
    os.chdir(sys.argv[2])
    for name in names:
        sys.argv[1] == 'make' and os.mkdir(name)
        os.chdir(name)
    for name in reversed(names):
        os.chdir('..')
        sys.argv[1] == 'remove' and os.rmdir(name)
";

fn nest(what: &str, below: &Cgroup) -> Result<()> {
    let done = Command::new("python3").args(["-c", NEST, what]).arg(below.path()).output()?;
    ensure!(done.status.success(), "{what}: {}", String::from_utf8_lossy(&done.stderr));
    Ok(())
}

/// Cgroups that any user can create do not end a run: cgroups that are nested too deeply to be selected, although they have the name of a
/// selected unit, and cgroups whose path is too long to be watched. Both are reported.
#[test]
fn hostile_cgroups() -> Result<()> {
    let _live = Live::beside_others()?;
    let (deep, selected) = (Cgroup::new(None, "deep")?, Cgroup::new(None, "selected")?);
    let mut program = SteppedRuby::start()?;
    selected.take(program.process.pid())?;
    // Created while gctrace runs, and before it starts.
    for before in [false, true] {
        if before {
            nest("make", &deep)?;
        }
        let args = ["--unit", "gctrace-hostile.service", "--cgroup", &selected.path().to_string_lossy()];
        let mut gctrace = Invocation::jsonl(args)?.start_ready()?;
        if !before {
            nest("make", &deep)?;
            gctrace.wait_error("levels deep")?;
            gctrace.wait_error("File name too long")?;
        }
        let expected = program.collect(3)?;
        let (report, finished) = gctrace.stop_by(rustix::process::Signal::INT)?;
        nest("remove", &deep)?;
        let said = finished.errors();
        for reason in ["levels deep", "File name too long"] {
            let line =
                finished.stderr.iter().any(|line| line.contains("is skipped") && line.contains(reason));
            ensure!(line, "{reason}, made before: {before}: {said}");
        }
        let seen: Vec<u64> = report.gcs.iter().map(|line| line.count).collect();
        ensure!(seen == expected, "made before: {before}: cycles {seen:?} of {expected:?}");
    }
    selected.release(program.process.pid())
}

/// Selected cgroups that lie too deep are said, each; nothing claims that they do not exist. `/sys/fs/cgroup` is the root, however the hierarchies
/// are mounted.
#[test]
fn deep_cgroups_and_the_root() -> Result<()> {
    let _live = Live::begin()?;
    let deep = Cgroup::new(None, "levels")?;
    let mut folders = vec![deep.path().to_owned()];
    for level in 0..34 {
        let next = folders[level].join(format!("{level}"));
        std::fs::create_dir(&next)?;
        folders.push(next);
    }
    let named: Vec<String> =
        folders.iter().rev().take(2).map(|folder| folder.to_string_lossy().into_owned()).collect();
    let args = ["--cgroup", &named[0], "--cgroup", &named[1], "--duration", "1s"];
    let finished = Invocation::new(args)?.run();
    for folder in folders.iter().skip(1).rev() {
        std::fs::remove_dir(folder)?;
    }
    let said = finished?.errors();
    for folder in &named {
        ensure!(
            said.contains(&format!("the cgroup {folder} is more than 32 levels deep")),
            "{folder}: {said}"
        );
    }
    ensure!(!said.contains("there is no cgroup"), "{said}");
    let mut program = SteppedRuby::start()?;
    let gctrace = Invocation::jsonl(["--cgroup", "/sys/fs/cgroup"])?.start_ready()?;
    let expected = program.collect(2)?;
    let report = gctrace.stop()?;
    let seen: Vec<u64> = report.gcs_of(program.process.pid()).map(|line| line.count).collect();
    ensure!(seen == expected, "cycles {seen:?} of {expected:?}");
    Ok(())
}

/// A selection that can match nothing is refused at once.
#[test]
fn empty_names() -> Result<()> {
    for flag in ["--container", "--cgroup"] {
        let finished = Invocation::new([flag, ""])?.run()?;
        ensure!(finished.status.code() == Some(2), "{}", finished.status);
        ensure!(finished.errors().contains("value"), "{}", finished.errors());
    }
    Ok(())
}
