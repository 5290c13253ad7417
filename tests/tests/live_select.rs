//! Which processes are selected: a pid, name or unit selects all processes of a program, now and later.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::child::{Finished, Guarded};
use gctrace_tests::container::Cgroup;
use gctrace_tests::gctrace::{Invocation, read};
use gctrace_tests::live::{Live, rubies_dir};
use gctrace_tests::report::Report;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::{Running, Script};
use gctrace_tests::{PATIENCE, compare, ledger};
use rustix::process::Signal;

/// The script `cluster.rb`: a master with existing workers, including a renamed one, and one that it forks later.
struct Cluster {
    master: Guarded,
    workers: Vec<u32>,
}

impl Cluster {
    fn start(ruby: &Ruby) -> Result<Self> {
        let mut command = ruby.command()?;
        command.arg(rubies_dir().join("cluster.rb"));
        let mut master = Guarded::start("cluster.rb", &mut command)?;
        let line = master.wait_stdout(PATIENCE, "ready", |line| line.starts_with("ready "))?;
        let workers = line.split(' ').skip(1).map(str::parse).collect::<Result<_, _>>()?;
        Ok(Self { master, workers })
    }

    fn pid(&self) -> u32 {
        self.master.pid()
    }

    /// Makes all of them collect. Returns the pids, and the `GC.count`s at begin and end, that they print.
    fn work(mut self) -> Result<Vec<(u32, u64, u64)>> {
        self.master.say("go")?;
        let finished = self.master.finish(PATIENCE)?;
        ensure!(finished.status.success(), "{}", finished.errors());
        let lines = finished.stdout.iter().filter_map(|line| line.strip_prefix("done "));
        let parse = |line: &str| {
            let mut numbers = line.split(' ').map(str::parse::<u64>);
            let mut next = || Ok::<_, anyhow::Error>(numbers.next().context("too few numbers")??);
            Ok((u32::try_from(next()?)?, next()?, next()?))
        };
        lines.map(parse).collect()
    }
}

/// Checks that every cycle between the two counts is reported once.
fn all_there(report: &Report, (pid, first, last): (u32, u64, u64)) -> Result<()> {
    let counts: Vec<u64> = report.gcs_of(pid).map(|line| line.count).collect();
    for count in first + 1..=last {
        let times = counts.iter().filter(|&&other| other == count).count();
        ensure!(times == 1, "cycle {count} of {pid} is there {times} times: {counts:?}");
    }
    Ok(())
}

/// The pid of a master selects its workers, those that it forks later, and what they start. gctrace ends with the last one.
#[test]
fn pid_of_a_master() -> Result<()> {
    let _live = Live::beside_others()?;
    Ruby::first_and_last(|ruby| {
        let cluster = Cluster::start(ruby)?;
        let master = cluster.pid();
        let existing = cluster.workers.clone();
        let gctrace = Invocation::jsonl([master.to_string()])?.start_ready()?;
        let done = cluster.work()?;
        let (report, finished) = gctrace.done()?;
        ensure!(done.len() == existing.len() + 3, "{done:?}");
        ensure!(existing.iter().all(|pid| done.iter().any(|(other, ..)| other == pid)), "{done:?}");
        for one in done {
            all_there(&report, one)?;
        }
        ledger::check_lossless(&report)?;
        let last = format!("gctrace: pid {master} ended");
        ensure!(finished.stderr.contains(&last), "not {last:?} in:\n{}", finished.errors());
        Ok(())
    })
}

/// A worker's pid selects no sibling. `--only-pid` selects no child, neither an existing one nor one that is forked later.
#[test]
fn a_part_of_a_tree() -> Result<()> {
    let _live = Live::beside_others()?;
    let cluster = Cluster::start(&Ruby::main()?)?;
    let (master, worker) = (cluster.pid(), cluster.workers[0]);
    let alone = Invocation::jsonl(["--only-pid", &master.to_string()])?.start_ready()?;
    let part = Invocation::jsonl(["--pid", &worker.to_string()])?.start_ready()?;
    let done = cluster.work()?;
    for (gctrace, selected) in [(alone, master), (part, worker)] {
        let (report, _) = gctrace.done()?;
        let one = done.iter().find(|(pid, ..)| *pid == selected).context("it did not report")?;
        all_there(&report, *one)?;
        ensure!(report.gcs.iter().all(|line| line.pid == selected), "others than {selected} were traced");
        ensure!(report.processes.iter().all(|process| process.pid == selected), "{:?}", report.processes);
    }
    Ok(())
}

/// A name selects running programs and those that start later, and no others.
#[test]
fn by_name() -> Result<()> {
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    let running = Cluster::start(&ruby)?;
    let mut other = Script::unwitnessed(&live, &ruby, "explicit.rb")?.waiting().start()?;
    other.wait_for("ready")?;
    let gctrace = Invocation::jsonl(["--name", "cluster"])?.start_ready()?;
    let mut done = running.work()?;
    let later = Cluster::start(&ruby)?;
    done.extend(later.work()?);
    other.say("go")?;
    let other = other.finish()?;
    let report = gctrace.stop()?;
    for one in done {
        all_there(&report, one)?;
    }
    ensure!(report.gcs_of(other.pid).count() == 0, "a program of another name was traced");
    ensure!(report.processes_of(other.pid).count() == 0, "{:?}", report.processes);
    Ok(())
}

/// A title that a program sets after it was inspected also selects it.
#[test]
fn by_a_later_title() -> Result<()> {
    let _live = Live::beside_others()?;
    let mut command = Ruby::main()?.command()?;
    command.args(["-e", "$stdin.gets; $0 = 'latecomer: master [x]'; loop { GC.start; sleep 0.05 }"]);
    let mut script = Guarded::start("ruby", &mut command)?;
    let mut gctrace = Invocation::jsonl(["--name", "latecomer"])?.start_ready()?;
    script.say("go")?;
    gctrace.wait_line("gc", script.pid())?;
    gctrace.stop().map(drop)
}

/// Lists of pids, as `pgrep` prints them, and short forms.
#[test]
fn lists() -> Result<()> {
    let live = Live::beside_others()?;
    let ruby = Ruby::main()?;
    for form in 0..3 {
        let mut scripts = Vec::new();
        for _ in 0..2 {
            let mut script = Script::unwitnessed(&live, &ruby, "explicit.rb")?.waiting().start()?;
            script.wait_for("ready")?;
            scripts.push(script);
        }
        let [first, second] = [0, 1].map(|at| scripts[at].pid().to_string());
        let args = match form {
            0 => vec!["--pid".to_owned(), format!("{first}\n{second}\n")],
            1 => vec!["-p".to_owned(), format!("{first},{second}")],
            _ => vec![first, second],
        };
        let gctrace = Invocation::jsonl(args)?.start_ready()?;
        for script in &mut scripts {
            script.say("go")?;
        }
        let done: Vec<_> = scripts.into_iter().map(Running::finish).collect::<Result<_>>()?;
        let (report, finished) = gctrace.done()?;
        for done in &done {
            let lines: Vec<_> = report.gcs_of(done.pid).collect();
            compare::program(&lines, &done.report)?;
        }
        ensure!(finished.stderr.iter().any(|line| line.ends_with(" ended")), "{}", finished.errors());
    }
    Ok(())
}

/// gctrace runs as long as one of several selected processes runs, and ends soon after the last one.
#[test]
fn ends_with_the_last() -> Result<()> {
    let live = Live::beside_others()?;
    let ruby = Ruby::main()?;
    let start = || -> Result<_> {
        let mut script = Script::unwitnessed(&live, &ruby, "explicit.rb")?.waiting().start()?;
        script.wait_for("ready")?;
        Ok(script)
    };
    let (mut first, mut last) = (start()?, start()?);
    let pids = format!("{},{}", first.pid(), last.pid());
    let gctrace = Invocation::jsonl(["--pid", &pids])?.start_ready()?;
    first.say("go")?;
    let first = first.finish()?;
    std::thread::sleep(Duration::from_secs(1));
    last.say("go")?;
    let last = last.finish()?;
    let since = Instant::now();
    let (report, _) = gctrace.done()?;
    ensure!(since.elapsed() < PATIENCE / 2, "it took {:?}", since.elapsed());
    for done in [&first, &last] {
        // The second one collected long after the first had ended.
        compare::program(&report.gcs_of(done.pid).collect::<Vec<_>>(), &done.report)?;
    }
    Ok(())
}

/// For a word that is not a pid, gctrace suggests what may be meant; likewise for flags with other names.
#[test]
fn words() -> Result<()> {
    let cases: [(&[&str], &[&str]); 9] = [
        (&["puma"], &["--name puma", "-- puma"]),
        (&["top"], &["needs a terminal", "--once"]),
        (&["attach"], &["no subcommand `attach`"]),
        (&["record"], &["--output <FILE>"]),
        (&["12x"], &["`12x` is not a pid"]),
        (&["--all"], &["--all-ruby"]),
        (&["--pid", "ruby"], &["`ruby` is not a pid", "--name"]),
        (&["--pid", ""], &["is the program running"]),
        (&["--all-ruby", "--rate", "1000"], &["from 1 to 999"]),
    ];
    for (args, words) in cases {
        let Finished { status, stdout, stderr } = Invocation::new(args)?.run()?;
        let text = stderr.join("\n");
        ensure!(status.code() == Some(2), "{args:?}: {status}\n{text}");
        ensure!(stdout.is_empty(), "{args:?}: {stdout:?}");
        for word in words {
            ensure!(text.contains(word), "{args:?}: no {word:?} in:\n{text}");
        }
    }
    Ok(())
}

/// A systemd unit is the cgroup with its name, anywhere in the hierarchy, and may start later.
#[test]
fn by_unit() -> Result<()> {
    let live = Live::beside_others()?;
    let ruby = Ruby::main()?;
    let slice = Cgroup::new(None, "unit.slice")?;
    let cgroup = slice.below("gctrace-test-puma.service")?;
    let mut other = Script::unwitnessed(&live, &ruby, "explicit.rb")?.waiting().start()?;
    other.wait_for("ready")?;
    let mut script = Script::unwitnessed(&live, &ruby, "explicit.rb")?.waiting().start()?;
    script.wait_for("ready")?;
    cgroup.take(script.pid())?;
    let gctrace = Invocation::jsonl(["--unit", "gctrace-test-puma"])?.start_ready()?;
    script.say("go")?;
    other.say("go")?;
    let (script, other) = (script.finish()?, other.finish()?);
    let finished = gctrace.interrupt()?;
    let report = read(&finished)?;
    compare::program(&report.gcs_of(script.pid).collect::<Vec<_>>(), &script.report)?;
    ensure!(report.gcs_of(other.pid).count() == 0, "a process outside of the unit was traced");
    let absent = Invocation::new(["--unit", "gctrace-test-absent", "--duration", "100ms"])?.run()?;
    let expected = "the systemd unit gctrace-test-absent.service is not running";
    ensure!(absent.errors().contains(expected), "{}", absent.errors());
    Ok(())
}

/// The id of a thread is refused, and the error names its process: events carry process ids, so nothing would be seen.
#[test]
fn ids_of_threads() -> Result<()> {
    let live = Live::beside_others()?;
    let ruby = Ruby::main()?;
    let source = "Thread.new { sleep }; $stdout.sync = true; puts 'ready'; sleep 600";
    let mut program = Guarded::start("ruby", ruby.command()?.args(["-e", source]))?;
    program.wait_stdout(PATIENCE, "ready", |line| line == "ready")?;
    let pid = program.pid().to_string();
    let ids = std::fs::read_dir(format!("/proc/{pid}/task"))?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<Result<Vec<_>>>()?;
    let thread = ids.iter().find(|id| **id != pid).context("no second thread")?;
    let cache = live.path("cache").to_string_lossy().into_owned();
    let words = [
        &["--pid", thread, "--duration", "1s", "--cache-dir", &cache][..],
        &["--only-pid", thread, "--duration", "1s", "--cache-dir", &cache],
        &["heap", "--pid", thread, "--cache-dir", &cache],
        &["malloc", "--pid", thread, "--duration", "1s", "--cache-dir", &cache],
        &["dump", "--pid", thread, "--cache-dir", &cache],
    ];
    for words in words {
        let finished = Invocation::new(words.iter().copied())?.run()?;
        let expected = format!("pid {thread}: it is a thread of process {pid}: give --pid {pid}");
        ensure!(finished.status.code() == Some(1), "{words:?}: {}", finished.status);
        ensure!(finished.errors().contains(&expected), "{words:?}: {}", finished.errors());
    }
    Ok(())
}

/// A process that has exited and still has its pid is named as what it is, by each command.
#[test]
fn zombies() -> Result<()> {
    let _live = Live::beside_others()?;
    let mut command = Command::new("sh");
    command.args(["-c", "sleep 0 & echo $!; exec sleep 600"]);
    let mut parent = Guarded::start("sh", &mut command)?;
    let pid = parent.wait_stdout(PATIENCE, "a pid", |_| true)?;
    let deadline = Instant::now() + PATIENCE;
    while !std::fs::read_to_string(format!("/proc/{pid}/stat"))?.contains(") Z ") {
        ensure!(Instant::now() < deadline, "it is no zombie");
        std::thread::sleep(Duration::from_millis(10));
    }
    let of = ["--pid", &pid];
    for words in [&of[..], &["heap", "--pid", &pid], &["malloc", "--pid", &pid], &["dump", "--pid", &pid]] {
        let finished = Invocation::new(words.iter().copied())?.run()?;
        let said = finished.errors();
        ensure!(finished.status.code() == Some(1) && said.contains("it is a zombie"), "{words:?}: {said}");
    }
    Ok(())
}

/// A pid whose tree has no Ruby is reported and followed: the run ends with the tree, without a match.
#[test]
fn a_tree_without_ruby() -> Result<()> {
    let _live = Live::beside_others()?;
    let mut shell = shell("sleep 600 & echo ready; read line; kill $!")?;
    let gctrace = Invocation::new(["--pid", &shell.pid().to_string()])?.start_ready()?;
    shell.say("go")?;
    let finished = gctrace.wait()?;
    let text = finished.errors();
    ensure!(finished.status.code() == Some(1), "{}\n{text}", finished.status);
    ensure!(
        text.contains("not a Ruby process")
            && text.contains("none of its descendants is a Ruby process, either")
            && text.contains(" ended\n")
            && text.contains("nothing matched"),
        "{text}"
    );
    // A pid above the kernel's largest never has one.
    let finished = Invocation::new(["--pid", "4194305"])?.run()?;
    ensure!(finished.status.code() == Some(1), "{}\n{}", finished.status, finished.errors());
    ensure!(finished.errors().contains("no such process"), "{}", finished.errors());
    Ok(())
}

/// A shell that has printed `ready`.
fn shell(program: &str) -> Result<Guarded> {
    let mut shell = Guarded::start("sh", Command::new("sh").args(["-c", program]))?;
    shell.wait_stdout(PATIENCE, "ready", |line| line == "ready")?;
    Ok(shell)
}

/// A pid that has no Ruby yet is followed, alone or beside a Ruby: the Ruby that it starts later is traced, and the run ends with the last.
#[test]
fn a_ruby_that_starts_later() -> Result<()> {
    let live = Live::beside_others()?;
    let ruby = Ruby::main()?;
    let source = "first = GC.count; 5.times { GC.start }; puts \"done #{$$} #{first} #{GC.count}\"";
    for beside in [false, true] {
        let words = ruby.argv()?.into_iter().map(|word| word.to_string_lossy().into_owned());
        let words = words.chain(["-e".to_owned(), source.to_owned()]);
        let mut command = Command::new("sh");
        command.args(["-c", "echo ready; read line; \"$@\"; exit 0", "sh"]).args(words);
        let mut shell = Guarded::start("sh", &mut command)?;
        shell.wait_stdout(PATIENCE, "ready", |line| line == "ready")?;
        let other = beside.then(|| Script::unwitnessed(&live, &ruby, "explicit.rb")?.waiting().start());
        let mut other = other.transpose()?;
        let mut pids = vec![shell.pid()];
        if let Some(other) = &mut other {
            other.wait_for("ready")?;
            pids.push(other.pid());
        }
        let pids = pids.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        let gctrace = Invocation::jsonl(["--pid", &pids])?.start_ready()?;
        if let Some(mut other) = other {
            other.say("go")?;
            other.finish()?;
        }
        shell.say("go")?;
        let finished = shell.finish(PATIENCE)?;
        let done = finished.stdout.iter().find_map(|line| line.strip_prefix("done "));
        let numbers = done.context("the Ruby did not run")?.split(' ').map(str::parse);
        let numbers: Vec<u64> = numbers.collect::<Result<_, _>>()?;
        let (report, _) = gctrace.done()?;
        all_there(&report, (u32::try_from(numbers[0])?, numbers[1], numbers[2]))?;
    }
    Ok(())
}

/// Many programs that live for milliseconds: the kernel compares the name of the main thread when a program starts, so none of that name is
/// missed. By the name of a script some are, and these are counted.
#[test]
fn short_programs() -> Result<()> {
    const PROCESSES: usize = 40;
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    let script = live.path("fleeting.rb");
    std::fs::write(&script, "GC.start; GC.start; puts \"#{$$} #{GC.count}\"")?;
    let executable = Path::new(ruby.exe()).file_name().context("no name")?.to_string_lossy().into_owned();
    for name in [executable.as_str(), "fleeting"] {
        let gctrace = Invocation::jsonl(["--name", name])?.start_ready()?;
        let run = || -> Result<Vec<(u32, u64)>> {
            let mut done = Vec::new();
            for _ in 0..PROCESSES / 2 {
                let output = ruby.command()?.arg("--disable-gems").arg(&script).output()?;
                let printed = String::from_utf8(output.stdout)?;
                let (pid, count) = printed.trim().split_once(' ').context("no numbers")?;
                done.push((pid.parse()?, count.parse()?));
            }
            Ok(done)
        };
        let done = std::thread::scope(|scope| {
            let runs = [scope.spawn(run), scope.spawn(run)];
            runs.map(|run| run.join().map_err(|_| anyhow::anyhow!("a thread has panicked"))?)
                .into_iter()
                .collect::<Result<Vec<_>>>()
        })?;
        let (report, finished) = gctrace.stop_by(Signal::INT)?;
        let unread = ledger::kernel(&report, "names_unread")?;
        let done = done.concat();
        if name == executable {
            for (pid, count) in done {
                all_there(&report, (pid, 0, count))?;
            }
            continue;
        }
        let seen = done.iter().filter(|(pid, _)| report.processes_of(*pid).count() > 0).count() as u64;
        ensure!(seen + unread >= PROCESSES as u64, "{seen} seen, {unread} counted");
        let said = finished.errors().contains("ended before");
        ensure!(said == (unread > 0), "{unread}: {}", finished.errors());
    }
    Ok(())
}
