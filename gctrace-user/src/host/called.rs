//! The names by which a program is selected.

use std::path::Path;

use super::{origin, proc_root};

/// `TASK_COMM_LEN` without the terminating zero (include/linux/sched.h).
const COMM: usize = 15;

/// Whether a process has one of these names at this moment.
pub fn is_any(pid: u32, names: &[String]) -> bool {
    let Ok(process) = proc_root::process(pid) else { return false };
    let Ok(stat) = process.stat() else { return false };
    let cmdline = process.cmdline().unwrap_or_default();
    names.iter().any(|name| is(name, &stat.comm, &cmdline))
}

/// Whether a program is called so: by the name of its main thread (which the kernel cuts off at 15 characters), by its
/// executable, by its script with or without `.rb`, or by the first word of a title that it has set.
fn is(name: &str, comm: &str, cmdline: &[String]) -> bool {
    let cut = comm.len() == COMM && name.as_bytes().get(..COMM) == Some(comm.as_bytes());
    let executable = cmdline.first().and_then(|first| Path::new(first).file_name()?.to_str());
    let script = origin::program(comm, cmdline);
    cut || comm == name
        || executable == Some(name)
        || script == name
        || script.strip_suffix(".rb") == Some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Scripts, titles, executables and names of threads; parts of them do not count.
    #[test]
    fn names() {
        let words = |line: &str| line.split(' ').map(ToOwned::to_owned).collect::<Vec<_>>();
        let script = words("/usr/bin/ruby3.1 -I lib /srv/bin/worker.rb puma");
        for name in ["ruby", "ruby3.1", "worker.rb", "worker"] {
            assert!(is(name, "ruby", &script), "{name}");
        }
        for name in ["puma", "work", "rub", "", "/srv/bin/worker.rb"] {
            assert!(!is(name, "ruby", &script), "{name}");
        }
        let title = ["puma: cluster worker 0: 17 [shop]".to_owned()];
        assert!(is("puma", "ruby", &title) && !is("shop", "ruby", &title));
        assert!(is("a-very-long-program", "a-very-long-pro", &[]));
        assert!(!is("a-very-long-pr", "a-very-long-pro", &[]));
    }
}
