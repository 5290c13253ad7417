//! The mappings of a process, as the kernel lists them in `/proc/PID/maps` and `smaps` (`proc_pid_maps(5)`). The paths in these lists may be any
//! bytes, also where others choose them: the name of a memory file (`memfd_create`), a folder in another encoding.

use std::{
    fs::File,
    io::{self, BufRead, BufReader},
    path::Path,
};

use procfs::ProcError;

use super::proc_root;

/// One mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mapping<'a> {
    /// First address, and one past the last.
    pub range: (u64, u64),
    /// `r`, `w`, `x` or `-` for each, then `p` (private) or `s` (shared).
    permissions: &'a [u8],
    /// File offset of the first address.
    pub offset: u64,
    /// Inode of the file; 0 without a file.
    pub inode: u64,
    /// Path of the file, a name in brackets, or nothing.
    pub name: &'a [u8],
}

impl<'a> Mapping<'a> {
    /// The mapping that a line describes.
    pub(super) fn of_line(line: &'a [u8]) -> Option<Self> {
        let number = |digits: &[u8], radix| u64::from_str_radix(str::from_utf8(digits).ok()?, radix).ok();
        let mut fields = line.splitn(6, |&byte| byte == b' ');
        let mut range = fields.next()?.splitn(2, |&byte| byte == b'-');
        let range = (number(range.next()?, 16)?, number(range.next()?, 16)?);
        let permissions = fields.next()?;
        let offset = number(fields.next()?, 16)?;
        let _device = fields.next()?;
        let inode = number(fields.next()?, 10)?;
        let name = fields.next().unwrap_or_default();
        // Names are aligned.
        let name = &name[name.iter().position(|&byte| byte != b' ').unwrap_or(name.len())..];
        Some(Self { range, permissions, offset, inode, name })
    }

    /// Whether the process may read it.
    pub(super) fn is_readable(&self) -> bool {
        self.permissions.contains(&b'r')
    }

    /// Whether the process may execute it.
    pub(super) fn is_executable(&self) -> bool {
        self.permissions.contains(&b'x')
    }

    /// Whether writes stay private to the process.
    pub(super) fn is_private(&self) -> bool {
        self.permissions.contains(&b'p')
    }

    /// Whether it is of a file.
    pub(super) fn is_of_file(&self) -> bool {
        let in_brackets = self.name.starts_with(b"[") && self.name.ends_with(b"]");
        !self.name.is_empty() && !in_brackets
    }
}

/// What `found` makes of each mapping of a process, in address order.
pub(super) fn each<T>(pid: u32, found: impl FnMut(&Mapping<'_>) -> Option<T>) -> Result<Vec<T>, ProcError> {
    let mut found = found;
    let mut all = Vec::new();
    lines(pid, "maps", |line| all.extend(Mapping::of_line(line).and_then(|mapping| found(&mapping))))?;
    Ok(all)
}

/// Reads a file of a process line by line.
pub(super) fn lines(pid: u32, name: &str, mut seen: impl FnMut(&[u8])) -> Result<(), ProcError> {
    let path = proc_root::path(pid, name);
    let failed = |error| failed(error, &path);
    let mut file = BufReader::new(File::open(&path).map_err(failed)?);
    let mut line = Vec::new();
    while file.read_until(b'\n', &mut line).map_err(failed)? > 0 {
        seen(line.strip_suffix(b"\n").unwrap_or(&line));
        line.clear();
    }
    Ok(())
}

/// An error about a file of a process. `ESRCH`: the process is gone.
fn failed(error: io::Error, path: &Path) -> ProcError {
    let path = Some(path.to_owned());
    match error.kind() {
        io::ErrorKind::PermissionDenied => ProcError::PermissionDenied(path),
        io::ErrorKind::NotFound => ProcError::NotFound(path),
        _ if error.raw_os_error() == Some(libc::ESRCH) => ProcError::NotFound(path),
        _ => ProcError::Io(error, path),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::{
        io::{BufRead as _, BufReader},
        process::{Child, Command, Stdio},
    };

    use super::*;

    /// A child that has an executable mapping of a memory file whose name is not UTF-8. It ends with its input.
    pub(crate) fn child_with_odd_name() -> Child {
        let program = "import mmap, os, sys\n\
            file = os.memfd_create(b'\\xff')\n\
            os.ftruncate(file, 4096)\n\
            kept = mmap.mmap(file, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC)\n\
            print(flush=True)\n\
            sys.stdin.read()\n";
        let mut child = Command::new("python3")
            .args(["-c", program])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = String::new();
        assert!(BufReader::new(child.stdout.take().unwrap()).read_line(&mut said).unwrap() > 0);
        child
    }

    /// Lines with and without a name, with spaces and any bytes in it, and what is no such line.
    #[test]
    fn lines_of_maps() {
        let of = |line: &'static [u8]| Mapping::of_line(line);
        let file = of(b"7f00-8f00 r-xp 00001000 fd:01 99                       /srv/a b\xff").unwrap();
        assert_eq!((file.range, file.offset, file.inode), ((0x7f00, 0x8f00), 0x1000, 99));
        assert_eq!(file.name, b"/srv/a b\xff");
        assert!(file.is_of_file() && file.is_readable() && file.is_executable() && file.is_private());
        let anonymous = of(b"7f00-8f00 ---s 00000000 00:00 0").unwrap();
        assert_eq!(anonymous.name, b"");
        assert!(!anonymous.is_of_file() && !anonymous.is_readable() && !anonymous.is_private());
        let kernel = of(b"7f00-8f00 r-xp 00000000 00:00 0                          [vdso]").unwrap();
        assert!(kernel.name == b"[vdso]" && !kernel.is_of_file());
        for line in [&b""[..], b"x", b"7f00 r-xp 0 0 0", b"7f00-\xff r-xp 0 00:00 0 x", b"Size:   4 kB"] {
            assert_eq!(Mapping::of_line(line), None, "{line:?}");
        }
    }
}
