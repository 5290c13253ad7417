//! The kernel's view of a thread: its state, the system call in which it sleeps, its CPU time.

use std::fs;

use super::proc_root;

/// The activity of a thread, from `/proc/PID/task/TID`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Doing {
    /// The state letter in `stat`: `R` running or runnable, `S` asleep, `D` in uninterruptible sleep, `T` stopped, `t` traced, `Z` ended.
    pub state: Option<char>,
    /// The system call in which it sleeps.
    pub call: Option<Call>,
    /// The kernel function in which it sleeps (`wchan`).
    pub wchan: Option<String>,
    /// CPU time so far, in nanoseconds (`schedstat`).
    pub cpu_ns: Option<u64>,
}

/// A system call in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// Its number.
    pub number: i64,
    /// Its first argument: the address for a futex call, a file descriptor for most other calls.
    pub first: u64,
    /// The stack pointer of the thread.
    pub sp: u64,
    /// The address at which the thread continues in user space.
    pub pc: u64,
}

/// System calls in which threads sleep.
const CALLS: [(i64, &str); 44] = [
    (libc::SYS_futex, "futex"),
    (libc::SYS_read, "read"),
    (libc::SYS_write, "write"),
    (libc::SYS_readv, "readv"),
    (libc::SYS_writev, "writev"),
    (libc::SYS_pread64, "pread64"),
    (libc::SYS_pwrite64, "pwrite64"),
    (libc::SYS_ppoll, "ppoll"),
    (libc::SYS_pselect6, "pselect6"),
    (libc::SYS_epoll_pwait, "epoll_pwait"),
    (libc::SYS_accept, "accept"),
    (libc::SYS_accept4, "accept4"),
    (libc::SYS_connect, "connect"),
    (libc::SYS_recvfrom, "recvfrom"),
    (libc::SYS_recvmsg, "recvmsg"),
    (libc::SYS_recvmmsg, "recvmmsg"),
    (libc::SYS_sendto, "sendto"),
    (libc::SYS_sendmsg, "sendmsg"),
    (libc::SYS_sendfile, "sendfile"),
    (libc::SYS_nanosleep, "nanosleep"),
    (libc::SYS_clock_nanosleep, "clock_nanosleep"),
    (libc::SYS_wait4, "wait4"),
    (libc::SYS_waitid, "waitid"),
    (libc::SYS_flock, "flock"),
    (libc::SYS_fcntl, "fcntl"),
    (libc::SYS_fsync, "fsync"),
    (libc::SYS_fdatasync, "fdatasync"),
    (libc::SYS_openat, "openat"),
    (libc::SYS_close, "close"),
    (libc::SYS_ioctl, "ioctl"),
    (libc::SYS_getdents64, "getdents64"),
    (libc::SYS_copy_file_range, "copy_file_range"),
    (libc::SYS_splice, "splice"),
    (libc::SYS_io_uring_enter, "io_uring_enter"),
    (libc::SYS_rt_sigtimedwait, "rt_sigtimedwait"),
    (libc::SYS_rt_sigsuspend, "rt_sigsuspend"),
    (libc::SYS_restart_syscall, "restart_syscall"),
    (libc::SYS_sched_yield, "sched_yield"),
    (libc::SYS_mmap, "mmap"),
    (libc::SYS_munmap, "munmap"),
    (libc::SYS_madvise, "madvise"),
    (libc::SYS_clone, "clone"),
    (libc::SYS_execve, "execve"),
    (libc::SYS_exit_group, "exit_group"),
];
/// More of these calls, which newer architectures do not have.
#[cfg(target_arch = "x86_64")]
const OLD_CALLS: [(i64, &str); 6] = [
    (libc::SYS_poll, "poll"),
    (libc::SYS_select, "select"),
    (libc::SYS_epoll_wait, "epoll_wait"),
    (libc::SYS_open, "open"),
    (libc::SYS_pause, "pause"),
    (libc::SYS_vfork, "vfork"),
];
#[cfg(not(target_arch = "x86_64"))]
const OLD_CALLS: [(i64, &str); 0] = [];
/// The calls whose first argument is a file descriptor.
const ON_FILES: [&str; 21] = [
    "read",
    "write",
    "readv",
    "writev",
    "pread64",
    "pwrite64",
    "accept",
    "accept4",
    "connect",
    "recvfrom",
    "recvmsg",
    "recvmmsg",
    "sendto",
    "sendmsg",
    "flock",
    "fcntl",
    "fsync",
    "fdatasync",
    "ioctl",
    "getdents64",
    "close",
];

impl Call {
    /// Its name: `futex`; `None` if it is not in the table of calls in which programs usually sleep.
    pub fn name(&self) -> Option<&'static str> {
        let mut all = CALLS.iter().chain(&OLD_CALLS);
        all.find(|(number, _)| *number == self.number).map(|(_, name)| *name)
    }

    /// The file descriptor that it operates on.
    pub fn descriptor(&self) -> Option<i32> {
        self.name().filter(|name| ON_FILES.contains(name))?;
        i32::try_from(self.first).ok()
    }

    /// The address of the futex on which it waits.
    pub fn futex(&self) -> Option<u64> {
        (self.number == libc::SYS_futex).then_some(self.first)
    }

    /// `/proc/PID/task/TID/syscall` (fs/proc/base.c): `running`, `-1 SP PC`, or number, six arguments, SP and PC.
    fn parse(text: &str) -> Option<Self> {
        let mut words = text.split_whitespace();
        let number = words.next()?.parse().ok().filter(|&number| number >= 0)?;
        let hex = |word: &str| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok();
        let rest = words.map(hex).collect::<Option<Vec<u64>>>()?;
        match rest.as_slice() {
            &[first, _, _, _, _, _, sp, pc] => Some(Self { number, first, sp, pc }),
            _ => None,
        }
    }
}

impl Doing {
    /// Reads the state of a thread. Parts that may not be read are absent.
    pub fn look(pid: u32, tid: u32) -> Self {
        let read = |name: &str| proc_root::text(pid, &format!("task/{tid}/{name}")).ok();
        let wchan = read("wchan").filter(|name| !name.is_empty() && name != "0");
        Self {
            state: read("stat").as_deref().and_then(state),
            call: read("syscall").as_deref().and_then(Call::parse),
            wchan,
            cpu_ns: cpu_ns(pid, tid),
        }
    }
}

impl Doing {
    /// Reads only `state` and `wchan`, which the kernel shows even if the memory of the process may not be read.
    pub fn look_briefly(pid: u32, tid: u32) -> Self {
        let read = |name: &str| proc_root::text(pid, &format!("task/{tid}/{name}")).ok();
        Self { state: read("stat").as_deref().and_then(state), wchan: read("wchan"), ..Self::default() }
    }
}

/// The letter after the name of a thread; the name may contain anything.
fn state(stat: &str) -> Option<char> {
    stat.rsplit_once(')')?.1.trim_start().chars().next()
}

/// CPU time of a thread so far, in nanoseconds; `None`: the thread is gone, or the kernel does not count it.
pub fn cpu_ns(pid: u32, tid: u32) -> Option<u64> {
    let text = fs::read_to_string(proc_root::path(pid, &format!("task/{tid}/schedstat"))).ok()?;
    text.split_whitespace().next()?.parse().ok()
}

/// The target of a file descriptor of a process: a path, `pipe:[123]`, `socket:[123]`.
pub fn open_on(pid: u32, descriptor: i32) -> Option<String> {
    let link = fs::read_link(proc_root::path(pid, &format!("fd/{descriptor}"))).ok()?;
    Some(link.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As in Linux 6.18.
    #[test]
    fn calls() {
        let text = "202 0x7f2b0c000b88 0x189 0x0 0x0 0x0 0xffffffff 0x7f2b137fdc40 0x7f2b2a0a4d16\n";
        let call = Call::parse(text).unwrap();
        assert_eq!((call.first, call.sp, call.pc), (0x7f2b_0c00_0b88, 0x7f2b_137f_dc40, 0x7f2b_2a0a_4d16));
        #[cfg(target_arch = "x86_64")]
        assert_eq!((call.name(), call.futex(), call.descriptor()), (Some("futex"), Some(call.first), None));
        for other in ["running\n", "-1 0x7ffd 0x55e\n", "", "0 0x3", "x 0 0 0 0 0 0 0 0", "0 1 2 3 4 5 6 7 8"]
        {
            assert_eq!(Call::parse(other), None, "{other}");
        }
    }

    /// Brackets and spaces in a name do not affect the state.
    #[test]
    fn states() {
        assert_eq!(state("17 (a) S (b)) D 1 17"), Some('D'));
        assert_eq!(state("17 (ruby"), None);
    }

    /// For a thread of this process that reads from a pipe, the call and the file are found.
    #[test]
    fn reading() {
        let (reader, writer) = std::io::pipe().unwrap();
        let fd = std::os::fd::AsRawFd::as_raw_fd(&reader);
        let (say, said) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            say.send(rustix::thread::gettid().as_raw_nonzero().get() as u32).unwrap();
            let mut reader = reader;
            std::io::Read::read(&mut reader, &mut [0; 8]).unwrap()
        });
        let tid = said.recv().unwrap();
        let pid = std::process::id();
        let doing = loop {
            let doing = Doing::look(pid, tid);
            if doing.call.is_some_and(|call| call.name() == Some("read")) {
                break doing;
            }
            std::thread::yield_now();
        };
        assert_eq!(doing.call.unwrap().descriptor(), Some(fd));
        assert!(open_on(pid, fd).unwrap().starts_with("pipe:["));
        assert_eq!(doing.state, Some('S'));
        drop(writer);
        assert_eq!(thread.join().unwrap(), 0);
    }
}
