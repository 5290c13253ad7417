//! The threads of a process, from `/proc`.

use std::{fs, io};

use super::proc_root;

/// A snapshot of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Task {
    /// Its id in the host's pid namespace.
    pub tid: u32,
    /// Its id in its own pid namespace.
    pub own_tid: u32,
    /// Whether it was off its CPU and not runnable: asleep, blocked in the kernel, or stopped.
    pub asleep: bool,
    /// Number of voluntary and involuntary context switches: if these are unchanged and the thread is still asleep, it has not run.
    pub switches: (u64, u64),
}

impl Task {
    /// Reads the state of a thread; `None` if it is gone.
    pub fn look(pid: u32, tid: u32) -> Option<Self> {
        let status = proc_root::text(pid, &format!("task/{tid}/status")).ok()?;
        Self::parse(tid, &status)
    }

    fn parse(tid: u32, status: &str) -> Option<Self> {
        let line = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let number = |name| line(name)?.trim().parse().ok();
        // Kernels without pid namespaces have no such line.
        let own_tid = line("NSpid").and_then(|ids| ids.split_whitespace().last()?.parse().ok());
        Some(Self {
            tid,
            own_tid: own_tid.unwrap_or(tid),
            // `task_state_array` (fs/proc/array.c).
            asleep: matches!(line("State")?.trim().chars().next()?, 'S' | 'D' | 'I' | 'T' | 't'),
            switches: (number("voluntary_ctxt_switches")?, number("nonvoluntary_ctxt_switches")?),
        })
    }

    /// Whether the thread has been asleep ever since.
    pub fn still_sleeps(self, pid: u32) -> bool {
        self.asleep && Self::look(pid, self.tid) == Some(self)
    }
}

/// The ids of the threads of a process.
///
/// # Errors
///
/// The process is gone, or access is denied.
pub fn tids(pid: u32) -> io::Result<Vec<u32>> {
    let entries = fs::read_dir(proc_root::path(pid, "task"))?;
    Ok(entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect())
}

/// The name of a thread, NUL padded, as in the kernel's records.
pub fn comm(pid: u32, tid: u32) -> [u8; 16] {
    let mut comm = [0; 16];
    if let Ok(name) = fs::read(proc_root::path(pid, &format!("task/{tid}/comm"))) {
        let name = name.strip_suffix(b"\n").unwrap_or(&name);
        let len = name.len().min(comm.len() - 1);
        comm[..len].copy_from_slice(&name[..len]);
    }
    comm
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As written by Linux 6.18 for a thread in a container.
    #[test]
    fn status() {
        let text = "Name:\tworker\nUmask:\t0022\nState:\tS (sleeping)\nTgid:\t700\nNgid:\t0\nPid:\t705\nNSpid:\t705\t12\n\
                    voluntary_ctxt_switches:\t31\nnonvoluntary_ctxt_switches:\t4\n";
        let task = Task::parse(705, text).unwrap();
        assert_eq!(task, Task { tid: 705, own_tid: 12, asleep: true, switches: (31, 4) });
        assert!(!Task::parse(705, &text.replace("S (sleeping)", "R (running)")).unwrap().asleep);
        assert_eq!(Task::parse(705, "State:\tS (sleeping)\n"), None);
    }

    /// A sleeping thread is distinguished from one that has run since, and from a running one.
    #[test]
    fn sleeping() {
        let pid = std::process::id();
        let (wake, woken) = std::sync::mpsc::channel::<()>();
        let (say, said) = std::sync::mpsc::channel();
        let thread = std::thread::Builder::new().name("a-sleeper".to_owned()).spawn(move || {
            // Truncated within a character, as the kernel does it.
            rustix::thread::set_name(c"\xd0\x9e\xd0\xb1\xd1").unwrap();
            while woken.recv().is_ok() {
                say.send(rustix::thread::gettid().as_raw_nonzero().get() as u32).unwrap();
            }
        });
        wake.send(()).unwrap();
        let tid = said.recv().unwrap();
        let asleep = loop {
            match Task::look(pid, tid).unwrap() {
                task if task.asleep => break task,
                _ => std::thread::yield_now(),
            }
        };
        assert!(asleep.still_sleeps(pid));
        assert_eq!(&comm(pid, tid), b"\xd0\x9e\xd0\xb1\xd1\0\0\0\0\0\0\0\0\0\0\0");
        assert!(tids(pid).unwrap().contains(&tid));
        wake.send(()).unwrap();
        said.recv().unwrap();
        assert!(!asleep.still_sleeps(pid));
        drop(wake);
        thread.unwrap().join().unwrap();
        assert!(!asleep.still_sleeps(pid));
        let own = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        assert!(!Task::look(pid, own).unwrap().asleep);
    }
}
