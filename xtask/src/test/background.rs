//! Commands that run beside the tests, and are stopped while a test needs the whole machine.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
    time::Duration,
};

use anyhow::{Context as _, Result};
use rustix::process::{Pid, Signal, kill_process};

use crate::util::line;

/// The file that such a test locks (`Quiet` in tests/src/timing.rs), in the directory for temporary files.
const LOCK: &str = "gctrace-live-tests.quiet";
/// Interval at which the lock is checked. The test waits for a few of these.
const STEP: Duration = Duration::from_millis(50);

/// Runs a command to its end. The command and its descendants are stopped (`SIGSTOP`) while a test holds the lock.
pub(super) fn run(command: &mut Command) -> Result<ExitStatus> {
    run_beside(command, &std::env::temp_dir().join(LOCK))
}

fn run_beside(command: &mut Command, lock: &Path) -> Result<ExitStatus> {
    let mut child = command.spawn().with_context(|| format!("cannot run `{}`", line(command)))?;
    let mut held: Vec<u32> = Vec::new();
    loop {
        if let Some(status) =
            child.try_wait().with_context(|| format!("cannot wait for `{}`", line(command)))?
        {
            signal(&held, Signal::CONT);
            return Ok(status);
        }
        if is_locked(lock) {
            // Repeated each time, to find processes that were just being started.
            held = tree(child.id());
            signal(&held, Signal::STOP);
        } else {
            signal(&std::mem::take(&mut held), Signal::CONT);
        }
        std::thread::sleep(STEP);
    }
}

/// Whether the lock is held; false if the file does not exist.
fn is_locked(path: &Path) -> bool {
    let Ok(file) = File::open(path) else { return false };
    matches!(file.try_lock(), Err(fs::TryLockError::WouldBlock))
}

/// A process of ours and all its descendants (proc(5), `children`; empty if the kernel was built without that list).
fn tree(root: u32) -> Vec<u32> {
    let mut found = vec![root];
    let mut at = 0;
    while let Some(pid) = found.get(at).copied() {
        at += 1;
        let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { continue };
        let lists = tasks.flatten().map(|task| -> PathBuf { task.path().join("children") });
        for list in lists.filter_map(|path| fs::read_to_string(path).ok()) {
            found.extend(list.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
        }
    }
    found
}

/// Sends a signal to these processes; those that have ended meanwhile are ignored.
fn signal(pids: &[u32], signal: Signal) {
    for pid in pids.iter().filter_map(|pid| Pid::from_raw(i32::try_from(*pid).ok()?)) {
        let _ended = kill_process(pid, signal);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    fn state(pid: &str) -> String {
        let text = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        text.rsplit(") ").next().and_then(|rest| rest.split(' ').next()).unwrap_or("none").to_owned()
    }

    /// Waits until a process is in one of these states (proc(5)).
    fn wait(pid: &str, states: &str) {
        let since = Instant::now();
        while !states.contains(&state(pid)) {
            assert!(since.elapsed() < Duration::from_secs(20), "{pid} is {}, not {states}", state(pid));
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// A command and its child do not run while the lock is held, twice, and run to their end afterwards.
    #[test]
    fn held() {
        let dir = std::env::temp_dir().join(format!("gctrace-xtask-held-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let (lock, pids, go) = (dir.join("lock"), dir.join("pids"), dir.join("go"));
        let text = "sleep 1000 & echo $$ $! > \"$0.new\"; mv \"$0.new\" \"$0\"; \
                    while [ ! -e \"$1\" ]; do sleep 0.01; done; kill $!; exit 7";
        let mut command = Command::new("sh");
        command.args(["-c", text]).args([&pids, &go]);
        let at = lock.clone();
        let run = std::thread::spawn(move || run_beside(&mut command, &at));
        while !pids.exists() {
            std::thread::sleep(Duration::from_millis(10));
        }
        let text = fs::read_to_string(&pids).unwrap();
        let pids: Vec<&str> = text.split_whitespace().collect();
        for _ in 0..2 {
            let file = File::create(&lock).unwrap();
            file.lock_shared().unwrap();
            for pid in &pids {
                wait(pid, "T");
            }
            drop(file);
            for pid in &pids {
                wait(pid, "RSD");
            }
        }
        fs::write(&go, "").unwrap();
        assert_eq!(run.join().unwrap().unwrap().code(), Some(7));
        fs::remove_dir_all(&dir).unwrap();
    }
}
