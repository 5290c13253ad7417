//! The host's processes, as seen from where gctrace runs: below `/proc`, or where the host's is mounted according to `--proc`.
//!
//! All reads about other processes go through here. What gctrace reads about itself (`/proc/self/fd`,
//! `/proc/self/mountinfo`) and about the kernel (`/proc/sys`) is in its own `/proc`.

use std::{
    fs,
    io::{self, Read as _},
    path::{Path, PathBuf},
    sync::OnceLock,
};

use procfs::{ProcError, process::Process};

/// Where processes are by default.
const PROC: &str = "/proc";
/// The first pid namespace (`PROC_PID_INIT_INO`, `include/linux/proc_ns.h`).
const HOST_PIDS: &str = "pid:[4026531836]";

/// The host's first processes: init, and the kernel thread that starts kernel threads. Some
/// hosts deny access to init.
const FIRST: [u32; 2] = [1, 2];

/// Maximum bytes read of a command line or an environment. A process decides where its own begin and end (`PR_SET_MM_MAP`), and may claim its whole
/// address space; the kernel lets programs start with 6 MiB of both (`bprm_stack_limits`, fs/exec.c).
pub(super) const LONGEST: u64 = 8 << 20;

/// Set once, from the command line, before anything is read.
static ROOT: OnceLock<PathBuf> = OnceLock::new();

/// Reads processes below this folder, where the host's proc file system is mounted. Only the first call has an effect.
pub fn read_below(root: &Path) {
    // If it is already set, processes have been read there.
    let _already = ROOT.set(root.to_owned());
}

/// The folder below which processes are read.
pub fn root() -> &'static Path {
    ROOT.get().map_or(Path::new(PROC), PathBuf::as_path)
}

/// Whether that folder was named by the user.
pub fn is_named() -> bool {
    ROOT.get().is_some()
}

/// The path of a file of a process: `proc_root::path(17, "maps")`.
pub fn path(pid: u32, name: &str) -> PathBuf {
    let mut path = root().join(pid.to_string());
    path.push(name);
    path
}

/// The text of a file of a process. The names in it (of threads, of files) may be any bytes: the kernel truncates the name of a thread to 15
/// bytes, even within a character.
///
/// # Errors
///
/// The process is gone, or access is denied.
pub fn text(pid: u32, name: &str) -> io::Result<String> {
    Ok(String::from_utf8_lossy(&fs::read(path(pid, name))?).into_owned())
}

/// The command line of a process: its arguments, or the title that it has set. Bytes that are not UTF-8 are replaced. Empty trailing arguments
/// cannot be distinguished from what a title leaves of the arguments. What follows the first [`LONGEST`] bytes is left out.
///
/// # Errors
///
/// The process is gone, or access is denied.
pub fn cmdline(pid: u32) -> io::Result<Vec<String>> {
    Ok(arguments(&beginning(&path(pid, "cmdline"), LONGEST)?))
}

/// The beginning of a file: at most this many bytes.
pub(super) fn beginning(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    fs::File::open(path)?.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn arguments(bytes: &[u8]) -> Vec<String> {
    let end = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    let words = bytes[..end].split(|byte| *byte == 0).filter(|_| end > 0);
    words.map(|word| String::from_utf8_lossy(word).into_owned()).collect()
}

/// Opens a process.
///
/// # Errors
///
/// The process is gone, or access is denied.
pub fn process(pid: u32) -> Result<Process, ProcError> {
    Process::new_with_root(root().join(pid.to_string()))
}

/// The pids of all processes.
///
/// # Errors
///
/// The folder cannot be listed.
pub fn pids() -> Result<impl Iterator<Item = u32>, ProcError> {
    let processes = procfs::process::all_processes_with_root(root())?;
    Ok(processes.flatten().map(|process| process.pid as u32))
}

/// The pids of all processes, without opening any: none is missed, even if file descriptors are exhausted.
///
/// # Errors
///
/// The folder cannot be listed completely.
pub fn listed() -> io::Result<Vec<u32>> {
    let mut pids = Vec::new();
    for entry in fs::read_dir(root())? {
        pids.extend(entry?.file_name().to_str().and_then(|name| name.parse::<u32>().ok()));
    }
    Ok(pids)
}

/// The process of a thread, if this is a thread id other than that of its process. `/proc/ID` opens for threads, too, although the kernel does not
/// list them there (`proc_pid(5)`).
pub fn process_of_thread(tid: u32) -> Option<u32> {
    let [pid] = status(tid, ["Tgid"]).ok()?;
    let pid = pid?.parse().ok()?;
    (pid != tid).then_some(pid)
}

/// Values of a process's status, in the order of these names; `None`: it has no such line. The name of the process comes first there and may be
/// cut within a character.
pub(super) fn status<const N: usize>(pid: u32, names: [&str; N]) -> io::Result<[Option<String>; N]> {
    let status = text(pid, "status")?;
    Ok(names.map(|name| {
        let value = |line: &str| Some(line.strip_prefix(name)?.strip_prefix(':')?.trim().to_owned());
        status.lines().find_map(value)
    }))
}

/// Whether a process is certainly gone, and not a zombie.
pub fn is_gone(pid: u32) -> bool {
    fs::metadata(root().join(pid.to_string())).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// Whether a process has at most one thread.
pub fn is_single(pid: u32) -> bool {
    fs::read_dir(path(pid, "task")).map_or_else(|_| is_gone(pid), |tasks| tasks.count() <= 1)
}

/// gctrace's own pid as in the kernel's events: `self` is a link to the reader's pid in the pid namespace of the mounted
/// proc file system.
pub fn own_pid() -> u32 {
    let link = fs::read_link(root().join("self")).ok();
    link.and_then(|link| link.to_str()?.parse().ok()).unwrap_or_else(std::process::id)
}

/// The tid of the calling thread, likewise.
pub fn own_tid() -> u32 {
    let link = fs::read_link(root().join("thread-self")).ok();
    let tid = link.and_then(|link| link.file_name()?.to_str()?.parse().ok());
    tid.unwrap_or_else(|| rustix::thread::gettid().as_raw_nonzero().get() as u32)
}

/// The root of the host's files: that of a first process, if gctrace has its own mount namespace, as in a container.
pub fn file_root() -> PathBuf {
    let own = fs::read_link("/proc/self/ns/mnt").ok();
    let first = FIRST.into_iter().find_map(|pid| Some((pid, fs::read_link(path(pid, "ns/mnt")).ok()?)));
    match first {
        Some((pid, its)) if own.is_some_and(|own| own != its) && shows_the_host().unwrap_or(false) => {
            path(pid, "root")
        }
        _ => PathBuf::from("/"),
    }
}

/// Whether gctrace itself is in the host's pid namespace, so that the pids that the kernel gives it are the host's.
pub fn shares_pids() -> bool {
    // If /proc hides the link, the user may not read anything else there, either.
    fs::read_link("/proc/self/ns/pid").map_or(true, |link| link.as_os_str() == HOST_PIDS)
}

/// Whether the processes that are read are those of the host.
///
/// # Errors
///
/// The folder contains no proc file system, or none of its processes can be read.
pub fn shows_the_host() -> io::Result<bool> {
    if !is_named() {
        return Ok(shares_pids());
    }
    let mut failed = None;
    let mut others = false;
    // A pid namespace shows its own processes and those of descendant namespaces, but never one of the host's.
    let all = pids().map_err(|error| io::Error::other(error.to_string()))?;
    for pid in FIRST.into_iter().chain(all) {
        match fs::read_link(path(pid, "ns/pid")) {
            Ok(link) if link.as_os_str() == HOST_PIDS => return Ok(true),
            Ok(_) => others = true,
            Err(error) => drop(failed.get_or_insert(error)),
        }
    }
    let none = || io::Error::new(io::ErrorKind::NotFound, "there are no processes in it");
    if others { Ok(false) } else { Err(failed.unwrap_or_else(none)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Empty arguments and those that are not UTF-8 are arguments; the zero bytes after a title are not.
    #[test]
    fn command_lines() {
        let of = |bytes: &[u8]| arguments(bytes);
        assert_eq!(of(b"ruby\0zap.rb\0\0x\0"), ["ruby", "zap.rb", "", "x"]);
        assert_eq!(of(b"ruby\0a\xff.rb\0"), ["ruby", "a\u{fffd}.rb"]);
        assert_eq!(of(b"puma: cluster worker 0\0\0\0\0"), ["puma: cluster worker 0"]);
        assert_eq!(of(b"\0\0"), Vec::<String>::new());
        assert_eq!(of(b""), Vec::<String>::new());
    }

    /// A process may claim that its command line is terabytes long: only the beginning of a file is read.
    #[test]
    fn claimed_sizes() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "ruby\0zap.rb\0").unwrap();
        file.as_file().set_len(1 << 42).unwrap();
        let read = beginning(file.path(), LONGEST).unwrap();
        assert_eq!(
            (read.len() as u64, arguments(&read)),
            (LONGEST, vec!["ruby".to_owned(), "zap.rb".to_owned()])
        );
    }

    /// Without `--proc` everything is in `/proc`, and this process is itself.
    #[test]
    fn as_it_is() {
        let own = own_pid();
        assert_eq!(own, std::process::id());
        assert_eq!(path(own, "maps"), PathBuf::from(format!("/proc/{own}/maps")));
        assert!(pids().unwrap().any(|pid| pid == own));
        assert_eq!(process(own).unwrap().stat().unwrap().pid, own as i32);
    }
}
