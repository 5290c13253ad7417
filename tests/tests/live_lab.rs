//! Rubies of several generations in separate roots, and the places and states in which their files can be.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::PATIENCE;
use gctrace_tests::child::Guarded;
use gctrace_tests::gctrace::{Gctrace, Invocation};
use gctrace_tests::live::{Live, rubies_dir};
use gctrace_tests::report::Report;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::{Done, Running, Script};
use gctrace_tests::{compare, ledger};

/// Checks that the cycles of one script are all reported and equal to the witness's, including pauses.
fn exact(report: &Report, done: &Done) -> Result<()> {
    let lines = report.gcs_of(done.pid).collect::<Vec<_>>();
    compare::program(&lines, &done.report)?;
    let compared = compare::cycles(&lines, done.log()?);
    compared.demand_equal()?;
    let pauses = compare::pauses(&lines, done.log()?)?;
    // It asks for 15 collections.
    ensure!(compared.starts >= 10 && compared.ends >= 10 && pauses >= 10, "{compared:?}, {pauses} pauses");
    Ok(())
}

/// A script with a witness that has started and waits for a line.
fn waiting(live: &Live, ruby: &Ruby) -> Result<Running> {
    let mut running = Script::new(live, ruby, "explicit.rb")?.arg("15").waiting().start()?;
    running.wait_for("ready")?;
    Ok(running)
}

/// A directory with a copy of the library under the name that the dynamic linker looks for.
fn prefix(live: &Live, ruby: &Ruby) -> Result<PathBuf> {
    let dir = live.dir(&format!("prefix-{}", ruby.label()))?;
    let soname = ruby.config("LIBRUBY_ALIASES").split_whitespace().next().context("no soname")?;
    fs::copy(ruby.library()?, dir.join(soname))?;
    Ok(dir)
}

/// All Rubies at once under one gctrace: the cycles of each are exact.
#[test]
fn all_rubies_at_once() -> Result<()> {
    let live = Live::begin()?;
    let rubies = Ruby::all()?;
    ensure!(rubies.len() > 1, "only one Ruby here: run `cargo xtask lab`");
    let mut scripts = rubies.iter().map(|ruby| waiting(&live, ruby)).collect::<Result<Vec<_>>>()?;
    let gctrace = Gctrace::all_ruby(&live)?;
    for script in &mut scripts {
        script.say("go")?;
    }
    let done = scripts.into_iter().map(Running::finish).collect::<Result<Vec<_>>>()?;
    let report = gctrace.stop()?;
    ledger::check_lossless(&report)?;
    for (ruby, done) in rubies.iter().zip(&done) {
        exact(&report, done).with_context(|| format!("Ruby {} ({})", ruby.version(), ruby.label()))?;
        let process = report.processes_of(done.pid).next().context("no process line")?;
        ensure!(process.ruby == ruby.version(), "{process:?}");
    }
    Ok(())
}

/// The library of a running process is removed and replaced by another file, as in an upgrade: the process is still
/// traced, and so is a process with the new file, whose inode needs probes of its own. A gctrace that starts later also finds the removed one.
#[test]
fn library_removed_and_replaced() -> Result<()> {
    let live = Live::begin()?;
    let rooted = Ruby::rooted()?;
    let original = rooted.first().context("no root")?;
    let root = live.path("root");
    let ruby = original.copied(&root)?;
    let path = ruby.library()?;
    let spare = live.path("libruby");
    fs::copy(&path, &spare)?;

    let mut first = waiting(&live, &ruby)?;
    let mut gctrace = Gctrace::all_ruby(&live)?;
    let inode = fs::metadata(&path)?.ino();
    fs::remove_file(&path)?;
    fs::copy(&spare, &path)?;
    ensure!(fs::metadata(&path)?.ino() != inode, "it is the same file");
    let mut second = waiting(&live, &ruby)?;
    gctrace.wait_line("process", second.pid())?;
    first.say("go")?;
    second.say("go")?;
    let (first, second) = (first.finish()?, second.finish()?);
    let report = gctrace.stop()?;
    ledger::check_lossless(&report)?;
    exact(&report, &first).context("the process whose library was replaced")?;
    exact(&report, &second).context("the process with the new library")?;

    let mut orphan = waiting(&live, &ruby)?;
    fs::remove_file(&path)?;
    let gctrace = Gctrace::all_ruby(&live)?;
    orphan.say("go")?;
    let orphan = orphan.finish()?;
    exact(&gctrace.stop()?, &orphan).context("the process whose library is gone")
}

/// A Ruby under another name, with its library in an unusual directory.
#[test]
fn other_name_and_other_prefix() -> Result<()> {
    let live = Live::begin()?;
    Ruby::each(|ruby| {
        let dir = prefix(&live, ruby)?;
        let program = dir.join("myapp");
        let installed = Command::new("which").arg(ruby.exe()).output()?;
        let installed = match ruby.root() {
            Some(_) => ruby.host_path(&ruby.exe().to_string_lossy()),
            None => PathBuf::from(String::from_utf8(installed.stdout)?.trim()),
        };
        fs::copy(installed, &program)?;
        let renamed = ruby.renamed(&program);
        let script = Script::new(&live, ruby, "explicit.rb")?.on(&renamed).env("LD_LIBRARY_PATH", &dir);
        let mut script = script.waiting().start()?;
        let mut gctrace = Invocation::jsonl(["--all-ruby"])?.start_ready()?;
        script.wait_for("ready")?;
        gctrace.wait_line("process", script.pid())?;
        script.say("go")?;
        let done = script.finish()?;
        let report = gctrace.stop()?;
        exact(&report, &done)?;
        let process = report.processes_of(done.pid).next().context("no process line")?;
        ensure!(process.comm == "myapp", "{process:?}");
        // Seen from the host the directory is below the root; seen from the process it is not.
        let folder = Path::new(&process.image).parent().context("a folder")?;
        ensure!(
            folder.ends_with(dir.strip_prefix("/")?),
            "the image is {}, not in {}",
            process.image,
            dir.display()
        );
        Ok(())
    })
}

/// A function that damages a file.
type Spoil<'a> = &'a dyn Fn(&File) -> std::io::Result<()>;

/// The program that maps a file as code.
fn mapper(live: &Live) -> Result<PathBuf> {
    let program = live.path("mapper");
    let output =
        Command::new("cc").arg("-o").arg(&program).arg(rubies_dir().join("mapper/mapper.c")).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(program)
}

/// Processes that map damaged copies of a Ruby library: each one is refused once, by name and with a reason, and the
/// healthy process beside them is traced exactly.
#[test]
fn damaged_libraries() -> Result<()> {
    let live = Live::begin()?;
    let ruby = Ruby::main()?;
    let healthy = ruby.library()?;
    let length = fs::metadata(&healthy)?.len();
    let damage: [(&str, Spoil<'_>); 4] = [
        ("half", &|file| file.set_len(length / 2)),
        // Most of the code, including the collector's; everything that makes it an ELF file and a Ruby is intact.
        ("no-code", &|file| file.write_all_at(&vec![0; length as usize / 2], length / 8)),
        // The table of program headers is beyond the end of the file.
        ("headers", &|file| file.write_all_at(&(length * 2).to_le_bytes(), 32)),
        ("noise", &|file| {
            let noise =
                (0..length - 4096).map(|at| (at.wrapping_mul(0x9e37_79b9) >> 13) as u8).collect::<Vec<_>>();
            file.write_all_at(&noise, 4096)
        }),
    ];
    let program = mapper(&live)?;
    let dir = live.dir("damaged")?;
    let mut mappers = Vec::new();
    for (name, spoil) in damage {
        let path = dir.join(format!("libruby-{name}.so"));
        fs::copy(&healthy, &path)?;
        spoil(&File::options().write(true).open(&path)?)?;
        let mut mapper = Guarded::start(name, Command::new(&program).arg(&path))?;
        mapper.wait_stdout(PATIENCE, "mapped", |line| line == "mapped")?;
        mappers.push((name, path, mapper));
    }
    let mut script = waiting(&live, &ruby)?;
    let gctrace = Gctrace::all_ruby(&live)?;
    script.say("go")?;
    let done = script.finish()?;
    let (report, finished) = gctrace.stop_by(rustix::process::Signal::INT)?;
    exact(&report, &done)?;
    ensure!(!finished.errors().contains("panicked"), "{}", finished.errors());
    for (name, path, mapper) in &mut mappers {
        let pid = mapper.pid();
        ensure!(mapper.running()?, "the process with the library {name} has ended");
        ensure!(report.gcs_of(pid).count() == 0, "{name}: cycles of a process that is no Ruby");
        let refused = report.refused.iter().filter(|line| line.pid == Some(pid)).collect::<Vec<_>>();
        ensure!(refused.len() == 1, "{name}: {} refusals: {refused:?}\n{}", refused.len(), finished.errors());
        ensure!(!refused[0].reason.is_empty(), "{name}: {refused:?}");
        let file = path.to_string_lossy();
        let told = finished.stderr.iter().filter(|line| line.contains(&*file)).collect::<Vec<_>>();
        ensure!(told.len() == 1, "{name}: told {} times: {told:?}", told.len());
    }
    Ok(())
}
