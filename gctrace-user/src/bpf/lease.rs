//! Files that must not change while they are probed.
//!
//! The kernel keeps a probe by inode and offset (kernel/events/uprobes.c). If such a file is written in place, every process that maps it from
//! then on has a breakpoint in the new code, possibly in the middle of an instruction. A lease (`F_SETLEASE`, fcntl(2)) blocks writers in open(2)
//! or truncate(2) until the probes are detached; the kernel waits at most /proc/sys/fs/lease-break-time seconds for that. Files that are replaced
//! (a new file is renamed over the old one) are not affected.

use std::{
    fs::{File, Metadata},
    io,
    os::{fd::AsRawFd as _, unix::fs::MetadataExt as _},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use super::raw;

/// File systems whose leases depend on what a server grants (include/uapi/linux/magic.h): NFS, SMB.
const REMOTE: [u32; 4] = [0x6969, 0x517b, 0xff53_4d42, 0xfe53_4d42];

/// Minimum age of a change whose state is accepted: a write just after it may have the same times.
const SETTLED: Duration = Duration::from_secs(2);

/// The metadata that a write changes: size, modification time and change time.
type State = (u64, (i64, i64), (i64, i64));

/// Content of a file: its size and a checksum.
pub type Content = (u64, u32);

/// A file whose modification is blocked or noticed.
#[derive(Debug)]
pub struct Lease {
    file: File,
    /// The last state in which the file had its content.
    state: Mutex<State>,
    /// Whether writers are blocked. Not every file system supports leases, and a lease on another user's file needs `CAP_LEASE`.
    held: bool,
    /// Whether writers have been released.
    ended: AtomicBool,
    /// The content of the file; `None` if it could not be read.
    content: Option<Content>,
}

impl Lease {
    /// Blocks writers from now on, if the file system supports leases.
    ///
    /// # Errors
    ///
    /// `EAGAIN`: a process has the file open for writing.
    pub fn take(file: File) -> io::Result<Self> {
        let held = match raw::set_lease(&file, libc::F_RDLCK) {
            Ok(()) => true,
            Err(error) if error.raw_os_error() == Some(libc::EAGAIN) && !is_remote(&file) => {
                return Err(error);
            }
            Err(error) => {
                log::debug!("no lease ({error}): writing to the file is noticed seconds later");
                false
            }
        };
        // Read the state after taking the lease, so that earlier writes are included.
        let state = Mutex::new(state(&file)?);
        Ok(Self { file, state, held, ended: AtomicBool::new(false), content: None })
    }

    /// A file without a lease: it may be written to, because its probes are in a single process, which has already mapped it.
    ///
    /// # Errors
    ///
    /// The metadata of the file cannot be read.
    pub fn without(file: File) -> io::Result<Self> {
        let state = Mutex::new(state(&file)?);
        Ok(Self { file, state, held: false, ended: AtomicBool::new(false), content: None })
    }

    /// Sets the content of the file, read after the lease was taken.
    #[must_use]
    pub fn with(mut self, content: Option<Content>) -> Self {
        self.content = content;
        self
    }

    /// Whether `content` equals the known content of the file; false if either is unknown.
    pub fn has_held(&self, content: Option<Content>) -> bool {
        self.content.is_some() && self.content == content
    }

    /// Whether a writer is waiting for the lease.
    pub fn is_awaited(&self) -> bool {
        self.held && raw::lease(&self.file).is_ok_and(|kind| kind != libc::F_RDLCK)
    }

    /// Whether the file has been written to. A new link, owner, mode or modification time alone does not count: `content` reads the content
    /// of the file if its modification time has changed.
    pub fn is_written(&self, content: impl FnOnce(&File) -> Option<Content>) -> bool {
        let mut known = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let Ok(now) = state(&self.file) else { return false };
        if (now.0, now.1) == (known.0, known.1) {
            return false;
        }
        if now.0 != known.0 {
            return true;
        }
        match (self.content, content(&self.file)) {
            (Some(before), Some(now)) if before != now => return true,
            (Some(_), Some(_)) => {}
            // Whoever opens the file for writing is noticed by the lease.
            _ if self.held => {}
            _ => return true,
        }
        if is_settled(now.2) {
            *known = now;
        }
        false
    }

    /// Whether anything about the file has changed. Unlike its other times, the change time cannot be set by anybody.
    pub fn is_changed(&self) -> bool {
        let known = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state(&self.file).map_or(true, |now| now != *known)
    }

    /// The current metadata of the file. On overlayfs the device number is that of the mount through which it was opened, the change time that
    /// of the layer's file.
    pub fn metadata(&self) -> Option<Metadata> {
        self.file.metadata().ok()
    }

    /// Whether the file was deleted.
    pub fn is_deleted(&self) -> bool {
        self.file.metadata().is_ok_and(|file| file.nlink() == 0)
    }

    /// Ends the lease and releases writers.
    pub fn end(&self) {
        if !self.held || self.ended.swap(true, Ordering::Relaxed) {
            return;
        }
        match raw::set_lease(&self.file, libc::F_UNLCK) {
            Ok(()) => {}
            // The kernel has ended the lease because a writer had waited too long (`generic_delete_lease`, fs/locks.c).
            Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {
                log::debug!("the lease of {} has ended by itself", self.path());
            }
            Err(error) => log::warn!("ending the lease of {}: {error}", self.path()),
        }
    }

    fn path(&self) -> String {
        let path = std::fs::read_link(format!("/proc/self/fd/{}", self.file.as_raw_fd()));
        path.map_or_else(|_| "a file".to_owned(), |path| path.display().to_string())
    }
}

impl Drop for Lease {
    /// Ends the lease explicitly: other descriptors of the same open file would keep it alive.
    fn drop(&mut self) {
        self.end();
    }
}

fn is_remote(file: &File) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|fs| REMOTE.contains(&(fs.f_type as u32)))
}

/// Whether a change at this time is old enough that a later one has another time.
fn is_settled((seconds, nanoseconds): (i64, i64)) -> bool {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let at = Duration::new(seconds.try_into().unwrap_or(0), nanoseconds.try_into().unwrap_or(0));
    now.checked_sub(at).is_some_and(|age| age >= SETTLED)
}

fn state(file: &File) -> io::Result<State> {
    let data = file.metadata()?;
    Ok((data.size(), (data.mtime(), data.mtime_nsec()), (data.ctime(), data.ctime_nsec())))
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, OpenOptions},
        process::{Command, Stdio},
        time::{Duration, Instant},
    };

    use super::*;

    /// Opening a leased file for writing blocks until the lease has ended; reading it, renaming over it or deleting it does not.
    #[test]
    fn writers_wait() {
        // The signal that the kernel sends would terminate this program.
        let (_wakes, wake) = std::os::unix::net::UnixStream::pair().unwrap();
        signal_hook::low_level::pipe::register(libc::SIGIO, wake).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "old").unwrap();
        let lease = Lease::take(File::open(&path).unwrap()).unwrap();
        assert!(lease.held && !lease.is_awaited() && !lease.is_changed());
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert!(!lease.is_awaited());
        let (replaced, new) = (dir.path().join("replaced"), dir.path().join("new"));
        fs::write(&replaced, "old").unwrap();
        let of_replaced = Lease::take(File::open(&replaced).unwrap()).unwrap();
        fs::write(&new, "new").unwrap();
        fs::rename(&new, &replaced).unwrap();
        assert!(of_replaced.held && !of_replaced.is_awaited() && of_replaced.is_deleted());
        let mut writer = Command::new("sh")
            .args(["-c", "echo newer > \"$0\""])
            .arg(&path)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let begin = Instant::now();
        while !lease.is_awaited() {
            assert!(begin.elapsed() < Duration::from_secs(20), "nobody waits");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(writer.try_wait().unwrap().is_none() && !lease.is_written(|_| None));
        assert_eq!(fs::read(&path).unwrap(), b"old");
        lease.end();
        assert!(writer.wait().unwrap().success());
        // The lease was ended, and only once: the kernel would refuse a second time.
        assert!(raw::set_lease(&lease.file, libc::F_UNLCK).is_err() && lease.ended.load(Ordering::Relaxed));
        lease.end();
        assert!(lease.is_written(|_| None) && lease.is_changed() && !lease.is_deleted());
        fs::remove_file(&path).unwrap();
        assert!(lease.is_deleted());
    }

    /// A changed modification time alone is no write. Without a lease and a known content it may be one.
    #[test]
    fn touched() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "old").unwrap();
        let open = || File::open(&path).unwrap();
        let [leased, unknown, compared] =
            [Lease::take(open()), Lease::without(open()), Lease::without(open())];
        let (leased, unknown) = (leased.unwrap(), unknown.unwrap());
        let compared = compared.unwrap().with(Some((3, 7)));
        let time = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        open().set_modified(time(1)).unwrap();
        assert!(!leased.is_awaited() && !leased.is_written(|_| None));
        assert!(unknown.is_written(|_| Some((3, 7))));
        assert!(!compared.is_written(|_| Some((3, 7))) && compared.is_written(|_| Some((3, 8))));
        assert!(compared.is_written(|_| None));
        // The same content is not read for ever.
        std::thread::sleep(SETTLED);
        assert!(!compared.is_written(|_| Some((3, 7))) && !compared.is_written(|_| unreachable!()));
        open().set_modified(time(2)).unwrap();
        assert!(compared.is_written(|_| Some((3, 8))));
    }

    /// A file that is open for writing gets no lease; a file without a lease is compared.
    #[test]
    fn open_for_writing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "old").unwrap();
        let writer = OpenOptions::new().write(true).open(&path).unwrap();
        let refused = Lease::take(File::open(&path).unwrap()).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EAGAIN));
        drop(writer);
        let lease = Lease::without(File::open(&path).unwrap()).unwrap();
        fs::hard_link(&path, dir.path().join("link")).unwrap();
        assert!(!lease.is_written(|_| None) && lease.is_changed());
        fs::write(&path, "newer").unwrap();
        assert!(lease.is_written(|_| None));
        // Unreadable content never compares equal.
        assert!(!lease.has_held(None) && !lease.has_held(Some((3, 7))));
        let lease = lease.with(Some((3, 7)));
        assert!(lease.has_held(Some((3, 7))) && !lease.has_held(Some((3, 8))) && !lease.has_held(None));
    }
}
