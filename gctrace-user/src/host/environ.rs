//! The initial environment of a process.

use std::fs;

use super::proc_root;

/// `NAME=value` entries, each with a NUL behind it; `None` if they cannot be read, or are not there any more: a program that gives itself
/// a title longer than its command line (`$0 = …`, `Process.setproctitle`) overwrites its environment with the rest and with NULs, for good
/// (`missing/setproctitle.c` of CRuby).
pub(crate) fn read(pid: u32) -> Option<Vec<u8>> {
    fs::read(proc_root::path(pid, "environ")).ok().filter(|bytes| is_whole(bytes))
}

/// Whether each entry is one of an environment.
fn is_whole(environ: &[u8]) -> bool {
    let Some(entries) = environ.strip_suffix(b"\0") else { return environ.is_empty() };
    entries.split(|&byte| byte == 0).all(|entry| entry.contains(&b'='))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a title has left of an environment is none.
    #[test]
    fn overwritten() {
        assert!(is_whole(b"") && is_whole(b"A=1\0B=\0=x\0") && is_whole(b"A=1\0"));
        for title in ["\0", "\0\0\0", "f 5 busy]\0\0\0", "f 5 busy]\0", "A=1\0\0", "A=1", "x\0A=1\0"] {
            assert!(!is_whole(title.as_bytes()), "{title:?}");
        }
    }

    /// Of a process that has a long title nothing is known.
    #[test]
    fn of_a_process() {
        let own = read(proc_root::own_pid());
        assert!(own.is_some_and(|environ| environ.windows(5).any(|word| word == b"PATH=")));
    }
}
