//! The initial environment of a process.

use std::fs;

use super::proc_root;

/// `NAME=value` entries, each terminated by a NUL; `None` if they cannot be read or no longer exist: a program that sets a
/// title longer than its command line (`$0 = …`, `Process.setproctitle`) overwrites its environment with the rest and with NULs, permanently
/// (`missing/setproctitle.c` of CRuby).
pub(crate) fn read(pid: u32) -> Option<Vec<u8>> {
    fs::read(proc_root::path(pid, "environ")).ok().filter(|bytes| is_whole(bytes))
}

/// Whether every entry looks like one of an environment.
fn is_whole(environ: &[u8]) -> bool {
    let Some(entries) = environ.strip_suffix(b"\0") else { return environ.is_empty() };
    entries.split(|&byte| byte == 0).all(|entry| entry.contains(&b'='))
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead as _, BufReader, Write as _},
        process::{Command, Stdio},
    };

    use super::*;

    /// The remainder that a title leaves of an environment is not an environment.
    #[test]
    fn overwritten() {
        assert!(is_whole(b"") && is_whole(b"A=1\0B=\0=x\0") && is_whole(b"A=1\0"));
        for title in ["\0", "\0\0\0", "f 5 busy]\0\0\0", "f 5 busy]\0", "A=1\0\0", "A=1", "x\0A=1\0"] {
            assert!(!is_whole(title.as_bytes()), "{title:?}");
        }
    }

    /// The environment of a Ruby is known until it sets a long title.
    #[test]
    fn of_a_process() {
        let program = "puts 1; $stdin.gets; $0 = 'x' * 9000; puts 2; $stdin.gets";
        let mut ruby = Command::new("ruby")
            .args(["-e", &format!("$stdout.sync = true; {program}")])
            .env("RUBY_GC_HEAP_GROWTH_FACTOR", "1.5")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (mut orders, mut said) =
            (ruby.stdin.take().unwrap(), BufReader::new(ruby.stdout.take().unwrap()));
        let mut next = || said.read_line(&mut String::new()).unwrap();
        next();
        let before = read(ruby.id()).unwrap();
        assert!(before.split(|&byte| byte == 0).any(|entry| entry == b"RUBY_GC_HEAP_GROWTH_FACTOR=1.5"));
        writeln!(orders).unwrap();
        next();
        assert_eq!(read(ruby.id()), None);
        writeln!(orders).unwrap();
        assert!(ruby.wait().unwrap().success());
    }
}
