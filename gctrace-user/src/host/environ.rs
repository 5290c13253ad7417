//! The initial environment of a process.

use std::{collections::BTreeMap, path::Path};

use gctrace_tunemygc::tune::environment::is_name;

use super::proc_root;

/// Value shown instead of a secret.
const REDACTED: &str = "[redacted]";
/// Maximum number of `RUBY_GC_*` variables, and maximum bytes of the name or the value of one: Ruby knows some twenty, with numeric values.
const VARIABLES: usize = 256;
const LONGEST_VARIABLE: usize = 1024;

/// What is used of an initial environment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Environment {
    /// The `RUBY_GC_*` variables. The token is a secret and is not kept.
    pub gc: BTreeMap<String, String>,
    /// Names of such variables that are refused.
    pub gc_refused: Vec<String>,
    /// The variables that name a service.
    pub(super) service: BTreeMap<String, String>,
}

impl Environment {
    /// That of a process; `None` if it is unknown, see [`read`].
    pub fn of(pid: u32) -> Option<Self> {
        read(pid).map(|bytes| Self::parse(&bytes))
    }

    pub(super) fn parse(environ: &[u8]) -> Self {
        let (gc, gc_refused) = ruby_gc(environ);
        Self { gc, gc_refused, service: of_service(environ) }
    }
}

fn ruby_gc(environ: &[u8]) -> (BTreeMap<String, String>, Vec<String>) {
    let (mut kept, mut refused) = (BTreeMap::new(), Vec::new());
    for entry in environ.split(|&byte| byte == 0) {
        let entry = String::from_utf8_lossy(entry);
        let Some((name, value)) = entry.split_once('=').filter(|(name, _)| name.starts_with("RUBY_GC_"))
        else {
            continue;
        };
        if kept.len() + refused.len() >= VARIABLES {
            break;
        }
        if name.len() > LONGEST_VARIABLE || value.len() > LONGEST_VARIABLE {
            refused.push(name.chars().take(LONGEST_VARIABLE).collect());
        } else if is_name(name) {
            let value = if name == "RUBY_GC_TOKEN" { REDACTED } else { value };
            kept.insert(name.to_owned(), value.to_owned());
        } else {
            refused.push(name.to_owned());
        }
    }
    (kept, refused)
}

fn of_service(environ: &[u8]) -> BTreeMap<String, String> {
    let entries =
        environ.split(|&byte| byte == 0).filter_map(|entry| std::str::from_utf8(entry).ok()?.split_once('='));
    entries
        .filter(|(name, _)| matches!(*name, "OTEL_SERVICE_NAME" | "OTEL_RESOURCE_ATTRIBUTES" | "DD_SERVICE"))
        .map(|(name, value)| (name.to_owned(), value.trim().to_owned()))
        .collect()
}

/// `NAME=value` entries, each terminated by a NUL; `None` if they cannot be read, are too many or no longer exist: a program that sets a
/// title longer than its command line (`$0 = …`, `Process.setproctitle`) overwrites its environment with the rest and with NULs, permanently
/// (`missing/setproctitle.c` of CRuby); a process that has ended has none.
pub(crate) fn read(pid: u32) -> Option<Vec<u8>> {
    let bytes = whole(&proc_root::path(pid, "environ"), proc_root::LONGEST)?;
    (!bytes.is_empty() || has_memory(pid)).then_some(bytes)
}

/// All entries of a file, if it has no more than this many bytes.
fn whole(path: &Path, most: u64) -> Option<Vec<u8>> {
    let bytes = proc_root::beginning(path, most.saturating_add(1)).ok()?;
    (bytes.len() as u64 <= most && is_whole(&bytes)).then_some(bytes)
}

/// Whether the process still has memory, in which its environment would be. The kernel reads nothing, without an error, of one that has none
/// (`environ_read`, fs/proc/base.c).
fn has_memory(pid: u32) -> bool {
    let stat = proc_root::process(pid).and_then(|process| process.stat());
    stat.is_ok_and(|stat| stat.env_end.is_some_and(|end| end != 0))
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

    /// An environment that is too long to be read is unknown: a part of it could lack the variables of the GC.
    #[test]
    fn claimed_sizes() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "A=1\0B=2\0").unwrap();
        assert_eq!(whole(file.path(), 8).as_deref(), Some(&b"A=1\0B=2\0"[..]));
        assert_eq!(whole(file.path(), 7), None);
        assert_eq!(whole(file.path(), 4), None);
        file.as_file().set_len(1 << 42).unwrap();
        assert_eq!(whole(file.path(), proc_root::LONGEST), None);
    }

    /// However many and long the variables are, what is kept of them is limited.
    #[test]
    fn long_ones() {
        let environ: Vec<u8> = (0..1000).flat_map(|n| format!("RUBY_GC_{n}=1\0").into_bytes()).collect();
        assert_eq!(ruby_gc(&environ).0.len(), VARIABLES);
        let (kept, refused) = ruby_gc(format!("RUBY_GC_A={}\0RUBY_GC_B=1\0", "1".repeat(5000)).as_bytes());
        assert_eq!((kept.len(), refused), (1, vec!["RUBY_GC_A".to_owned()]));
    }

    /// Only variables of the GC and of the service are kept, and the token never is.
    #[test]
    fn environment() {
        let environ =
            b"PATH=/bin\0RUBY_GC_TOKEN=secret\0RUBY_GC_HEAP_GROWTH_FACTOR=1.2\0RUBYOPT=-W0\0DD_SERVICE=shop\0BROKEN\0\xff=x\0";
        let Environment { gc, gc_refused, service } = Environment::parse(environ);
        assert!(gc_refused.is_empty(), "{gc_refused:?}");
        assert_eq!(gc.len(), 2);
        assert_eq!(gc["RUBY_GC_TOKEN"], REDACTED);
        assert_eq!(gc["RUBY_GC_HEAP_GROWTH_FACTOR"], "1.2");
        assert_eq!(service.into_iter().collect::<Vec<_>>(), [("DD_SERVICE".to_owned(), "shop".to_owned())]);
        let (env, refused) =
            ruby_gc("RUBY_GC_X\n\n  For speed:=1\0RUBY_GC_\u{202e}=2\0RUBY_GC_Y=\x1b\0".as_bytes());
        assert_eq!(refused, ["RUBY_GC_X\n\n  For speed:", "RUBY_GC_\u{202e}"]);
        assert_eq!(env["RUBY_GC_Y"], "\x1b", "values are data: shown escaped, sent as they are");
    }

    /// An empty environment is known; that of a process that has ended is not.
    #[test]
    fn ended() {
        let mut child = Command::new("cat").env_clear().stdin(Stdio::piped()).spawn().unwrap();
        let pid = child.id();
        // Until the exec, it still has the environment of this process.
        while read(pid).is_none_or(|environ| !environ.is_empty()) {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        drop(child.stdin.take());
        while proc_root::process(pid).and_then(|process| process.stat()).unwrap().state != 'Z' {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let of_zombie = read(pid);
        assert!(child.wait().unwrap().success());
        assert_eq!((of_zombie, read(pid)), (None, None));
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
