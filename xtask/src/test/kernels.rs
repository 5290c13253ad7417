//! Work beside the live tests on this kernel, which mostly wait: the tests on other kernels, in emulated guests, and the build of the unit tests.

use std::{
    ffi::OsStr,
    fs::{self, File},
    path::PathBuf,
    process::Command,
    sync::mpsc,
    thread,
};

use anyhow::{Context as _, Result, ensure};

use super::{HOST, background, failures};
use crate::util::{cargo, line, progress, root, target_dir};

/// The commands that run guests, one after the other. Live tests count what all Rubies of this machine do, so none may run for a guest.
const GUESTS: [&[&str]; 2] = [
    // The oldest and the newest kernel; one Ruby, to save time.
    &["vm", "--witnesses-built", "--ruby", "trixie", "5.10", "newest"],
    // The oldest kernel with attach cookies, whose verifier allows the least stack. This only loads the programs.
    &[
        "vm",
        "--witnesses-built",
        "--ruby",
        "trixie",
        "--test",
        "live_kernel::verifier_is_far_from_its_limit",
        "6.1",
    ],
];

/// The log of the guests' output, relative to the target directory.
const LOG: &str = "xtask/kernels.log";

/// Runs the live tests, beside those that run one after the other the guests, and then the build. Guests and build get only otherwise idle CPU time:
/// a test on this machine does not wait for them. (Beside several concurrent tests there is almost none: guests took minutes to boot.) A test whose
/// times did not agree is repeated without them. `live` receives a function to call when the guests may start. Returns whether the live tests and
/// the guests passed. The output of the guests is printed at the end, unless only the live tests failed: then the end is the list of those.
pub(super) fn beside(live: impl FnOnce(Box<dyn FnOnce()>) -> Result<bool>) -> Result<(bool, bool)> {
    let log = target_dir()?.join(LOG);
    fs::create_dir_all(log.with_file_name("")).with_context(|| format!("cannot create {}", log.display()))?;
    progress(format!("test: other kernels run beside the live tests, into {}", log.display()));
    let (ran, guests) = thread::scope(|scope| {
        let (may_begin, begin) = mpsc::channel::<()>();
        let log = &log;
        let guests = scope.spawn(move || {
            // Nothing is sent: the sender is dropped when the guests may start, or if the live tests did not get that far.
            let _gone = begin.recv();
            guests(log)
        });
        let ran = live(Box::new(move || drop(may_begin)));
        progress("test: waiting for the other kernels");
        (ran, guests.join().map_err(|_| anyhow::anyhow!("the thread of the guests has panicked")))
    });
    let passed = guests?;
    let live_passed = ran?;
    if live_passed || passed.is_err() {
        let text = fs::read(&log).with_context(|| format!("cannot read {}", log.display()))?;
        eprintln!("{}", String::from_utf8_lossy(&text));
    }
    if let Err(error) = &passed {
        progress(format!("test: {error:#}"));
    }
    Ok((live_passed, passed.is_ok()))
}

/// Prints why the guests failed, at the very end.
pub(super) fn print_failures() -> Result<()> {
    let log = target_dir()?.join(LOG);
    let text = fs::read(&log).with_context(|| format!("cannot read {}", log.display()))?;
    for line in failures::lines(&String::from_utf8_lossy(&text)) {
        eprintln!("  {line}");
    }
    Ok(())
}

fn guests(log: &PathBuf) -> Result<()> {
    let xtask = std::env::current_exe().context("cannot find the path of this program")?;
    let file = File::create(log).with_context(|| format!("cannot create {}", log.display()))?;
    let idle = |program: &OsStr| -> Result<Command> {
        let mut command = Command::new("chrt");
        command.args(["--idle", "0"]).arg(program).current_dir(root());
        command.stdout(file.try_clone()?).stderr(file.try_clone()?);
        Ok(command)
    };
    for args in GUESTS {
        let mut command = idle(xtask.as_os_str())?;
        ensure!(background::run(command.args(args))?.success(), "`{}` failed", line(&command));
    }
    // Whether the build succeeds shows when the tests are run.
    let cargo = cargo();
    let mut build = idle(cargo.get_program())?;
    for (name, _) in cargo.get_envs().filter(|(_, value)| value.is_none()) {
        build.env_remove(name);
    }
    background::run(build.args(["test", "--no-run"]).args(HOST)).map(drop)
}
