//! Facts from `/proc`. Every reader returns `None` for a process that is gone.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::{FileExt, MetadataExt as _},
    path::Path,
    sync::Arc,
};

use gctrace_common::memory::{MM_ANON, MM_FILE, MM_SHMEM, MM_SWAP, MemoryPages};
use gctrace_tunemygc::printable::printable;
use procfs::process::StatFlags;

use super::{environ::Environment, origin, proc_root, root_file};
use crate::{
    clock::{WallClock, boottime_ns, monotonic_ns},
    model::{Container, Image, Memory, MemorySource, Process, Shares},
};

/// Reads the resident memory of one process repeatedly through one open file.
#[derive(Debug)]
pub struct MemoryReader {
    status: File,
}

impl MemoryReader {
    /// Opens `/proc/PID/status`.
    pub fn open(pid: u32) -> io::Result<Self> {
        Ok(Self { status: File::open(proc_root::path(pid, "status"))? })
    }

    /// The current memory; `None` once the process is gone.
    pub fn read(&self) -> Option<Memory> {
        /// A user may be in 65 536 groups, which are listed before the memory.
        const LONGEST: usize = 1 << 20;
        let mut buffer = [0; 4096];
        let mut len = self.status.read_at(&mut buffer, 0).ok()?;
        if len < buffer.len() {
            return parse_memory(&String::from_utf8_lossy(&buffer[..len]));
        }
        let mut status = buffer.to_vec();
        while len > 0 && status.len() < LONGEST {
            len = self.status.read_at(&mut buffer, status.len() as u64).ok()?;
            status.extend_from_slice(&buffer[..len]);
        }
        parse_memory(&String::from_utf8_lossy(&status))
    }
}

fn parse_memory(status: &str) -> Option<Memory> {
    let rss = kib(status, "VmRSS:")?;
    Some(Memory {
        rss,
        // The two counters are batched differently, so the current value may exceed the peak.
        peak_rss: kib(status, "VmHWM:")?.max(rss),
        anon: kib(status, "RssAnon:")?,
        file: kib(status, "RssFile:")?,
        shmem: kib(status, "RssShmem:")?,
        swap: kib(status, "VmSwap:")?,
        source: MemorySource::Proc,
        shares: None,
    })
}

/// The memory that the programs read at an event, if any.
pub fn at_event(pages: &MemoryPages) -> Option<Memory> {
    let source = match pages.source {
        MemoryPages::WHOLE => MemorySource::Kernel,
        MemoryPages::APPROXIMATE => MemorySource::KernelApproximate,
        _ => return None,
    };
    let page = rustix::param::page_size() as u64;
    let bytes = |counter| pages.count(counter).saturating_mul(page);
    let rss = pages.resident().saturating_mul(page);
    Some(Memory {
        rss,
        // The kernel updates the peak only when the size is about to shrink (`task_mem`, fs/proc/task_mmu.c).
        peak_rss: pages.peak.saturating_mul(page).max(rss),
        anon: bytes(MM_ANON),
        file: bytes(MM_FILE),
        shmem: bytes(MM_SHMEM),
        swap: bytes(MM_SWAP),
        source,
        shares: None,
    })
}

/// Reads how the memory of a process is shared. The kernel walks its page tables for that, during which the process cannot
/// map memory, so do not call it often.
pub fn shares(pid: u32) -> Option<Shares> {
    let text = proc_root::text(pid, "smaps_rollup").ok()?;
    let (pss, private_dirty) = (kib(&text, "Pss:")?, kib(&text, "Private_Dirty:")?);
    Some(Shares { pss, private_dirty, read_ns: Some(monotonic_ns()) })
}

/// Whether the process has a shadow stack: a second copy of its return addresses, which the processor compares (`x86_Thread_features` of
/// `/proc/PID/status`, Linux 6.6: arch/x86/kernel/shstk.c). A call that the kernel emulates may be missing on it.
pub(crate) fn has_shadow_stack(pid: u32) -> bool {
    proc_root::text(pid, "status").is_ok_and(|status| lists_shadow_stack(&status))
}

fn lists_shadow_stack(status: &str) -> bool {
    let features = status.lines().find_map(|line| line.strip_prefix("x86_Thread_features:"));
    features.is_some_and(|features| features.split_whitespace().any(|one| one == "shstk"))
}

fn kib(status: &str, field: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(field))?;
    let number: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(number * 1024)
}

/// `PF_EXITING` (include/linux/sched.h): set before the kernel reports the exit (`sched_process_exit`).
const PF_EXITING: u32 = 0x4;

/// Whether the process has exited and still has its pid.
pub fn is_zombie(pid: u32) -> bool {
    let state = proc_root::process(pid).and_then(|process| process.stat()).map(|stat| stat.state);
    state.is_ok_and(|state| state == 'Z') && !is_running(pid)
}

/// Whether the process exists and its exit has not been reported yet. Its first thread may end before others: it does when
/// another thread calls exec and then takes its place (`de_thread`, fs/exec.c).
pub fn is_running(pid: u32) -> bool {
    let Ok(process) = proc_root::process(pid) else { return false };
    let lives =
        |stat: &procfs::process::Stat| stat.flags & PF_EXITING == 0 && !matches!(stat.state, 'Z' | 'X' | 'x');
    let leader_lives = || process.stat().is_ok_and(|stat| lives(&stat));
    let thread_lives = || {
        let tasks = process.tasks().into_iter().flatten().flatten();
        tasks.filter_map(|task| task.stat().ok()).any(|stat| lives(&stat))
    };
    // Check the leader again, in case it was replaced while the other threads were checked.
    leader_lives() || thread_lives() || leader_lives()
}

/// CPU time of all threads of a process so far, in nanoseconds; a multiple of clock ticks (10 ms).
pub fn cpu_ns(pid: u32) -> Option<u64> {
    let stat = proc_root::process(pid).and_then(|process| process.stat()).ok()?;
    Some((stat.utime + stat.stime) * (1_000_000_000 / procfs::ticks_per_second()))
}

/// How the program of a process started.
#[derive(Clone, Copy, Debug)]
pub struct ProgramStart {
    /// When the process started, in nanoseconds since boot, rounded down to a tick of 10 ms.
    pub process_ns: u64,
    /// Whether the process has called exec since, so that its program is not its parent's: `PF_FORKNOEXEC`
    /// (include/linux/sched.h), which `copy_process` sets and `begin_new_exec` (fs/exec.c) clears.
    pub by_exec: bool,
}

/// How the program of a process started.
pub fn program_start(pid: u32) -> Option<ProgramStart> {
    let stat = proc_root::process(pid).and_then(|process| process.stat()).ok()?;
    Some(ProgramStart {
        process_ns: stat.starttime * (1_000_000_000 / procfs::ticks_per_second()),
        // Newer kernels have flags that `Stat::flags` rejects.
        by_exec: stat.flags & StatFlags::PF_FORKNOEXEC.bits() == 0,
    })
}

/// The start time of a process, as [`ProgramStart::process_ns`].
pub fn start_ns(pid: u32) -> Option<u64> {
    program_start(pid).map(|start| start.process_ns)
}

/// The current time on the clock of [`ProgramStart::process_ns`].
pub fn boot_ns() -> Option<u64> {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Some(u64::try_from(now.tv_sec).ok()? * 1_000_000_000 + u64::try_from(now.tv_nsec).ok()?)
}

/// The command line of a process as one line, or the name of its main thread.
pub fn command_line(pid: u32) -> Option<String> {
    let process = proc_root::process(pid).ok()?;
    let words = proc_root::cmdline(pid).ok().filter(|words| !words.is_empty());
    let line = words.map(|words| words.join(" ")).or_else(|| Some(process.stat().ok()?.comm))?;
    // Programs may write anything there, for example when they set a title.
    Some(printable(line.trim_end()).into_owned())
}

/// When a process was started, in `CLOCK_MONOTONIC` nanoseconds, rounded down to a clock tick (10 ms).
pub fn started_ns(pid: u32) -> Option<u64> {
    let ticks = proc_root::process(pid).ok()?.stat().ok()?.starttime;
    let since_boot = u128::from(ticks) * 1_000_000_000 / u128::from(procfs::ticks_per_second());
    // The kernel counts in boot time, which continues while the machine is suspended.
    let asleep = boottime_ns().saturating_sub(monotonic_ns());
    Some(u64::try_from(since_boot).ok()?.saturating_sub(asleep))
}

/// Describes a process, as far as its data can be read. `environment`: its initial environment, if known; `clock`: that of the run.
pub fn describe(
    pid: u32,
    comm: &str,
    image: Arc<Image>,
    container: Container,
    environment: Option<&Environment>,
    clock: WallClock,
) -> Process {
    let process = proc_root::process(pid).ok();
    let stat = process.as_ref().and_then(|p| p.stat().ok());
    let (uid, ns_pid) = ids(pid);
    let suspended_ns = boottime_ns().saturating_sub(monotonic_ns());
    let start_ts = stat.as_ref().map(|stat| start_seconds(stat.starttime, clock, suspended_ns));
    let comm = stat.as_ref().map_or_else(|| comm.to_owned(), |stat| stat.comm.clone());
    let cmdline = proc_root::cmdline(pid).ok().filter(|args| !args.is_empty());
    let cmdline = cmdline.map(shortened);
    let described = Process {
        pid,
        ns_pid,
        ppid: stat.as_ref().map(|stat| stat.ppid as u32),
        comm,
        cmdline,
        start_ts,
        uid,
        hostname: hostname(pid, container.id.is_some() || has_own_root(pid)),
        container,
        gc_env: None,
        gc_env_refused: Vec::new(),
        origin: Arc::default(),
        image,
    };
    with_environment(described, environment)
}

/// The real user id of a process, and its pid in its own pid namespace.
fn ids(pid: u32) -> (Option<u32>, Option<u32>) {
    let [uids, pids] = proc_root::status(pid, ["Uid", "NSpid"]).unwrap_or_default();
    let mut uids = uids.iter().flat_map(|uids| uids.split_ascii_whitespace());
    let pids = pids.iter().flat_map(|pids| pids.split_ascii_whitespace());
    (uids.next().and_then(|uid| uid.parse().ok()), pids.last().and_then(|pid| pid.parse().ok()))
}

/// Describes a process by an initial environment that is known from elsewhere.
pub fn with_environment(process: Process, environment: Option<&Environment>) -> Process {
    let Process { pid, ref comm, ref cmdline, ref container, .. } = process;
    let origin = origin::read(pid, comm, cmdline.as_deref().unwrap_or_default(), container, environment);
    Process {
        gc_env: environment.map(|environment| environment.gc.clone()),
        gc_env_refused: environment.map_or_else(Vec::new, |environment| environment.gc_refused.clone()),
        origin: Arc::new(origin),
        ..process
    }
}

/// The address of a process's arguments. It changes at each `exec` and is the same in a forked child.
pub fn arguments_at(pid: u32) -> Option<u64> {
    proc_root::process(pid).ok()?.stat().ok()?.arg_start.filter(|at| *at != 0)
}

/// Arguments up to a limit, since a program may have megabytes of them. A note replaces the omitted ones.
fn shortened(mut args: Vec<String>) -> Vec<String> {
    const BYTES: usize = 32 << 10;
    const ARGUMENTS: usize = 4096;
    let mut left = BYTES;
    let fits = |arg: &&mut String| match left.checked_sub(arg.len()) {
        Some(rest) => {
            left = rest;
            true
        }
        None => false,
    };
    let kept = args.iter_mut().take(ARGUMENTS).take_while(fits).count();
    if kept == args.len() {
        return args;
    }
    let cut = args.len() - kept;
    let rest: usize = args.drain(kept..).map(|arg| arg.len()).sum();
    args.push(format!("... ({cut} more arguments, {rest} bytes)"));
    args
}

/// Whether gctrace currently ignores a signal.
pub fn is_ignored(signal: i32) -> bool {
    let status = procfs::process::Process::myself().and_then(|process| process.status());
    status.is_ok_and(|status| is_in(status.sigign, signal))
}

/// Whether a signal mask in the format of `/proc` contains a signal.
fn is_in(mask: u64, signal: i32) -> bool {
    u32::try_from(signal - 1).is_ok_and(|bit| mask.checked_shr(bit).is_some_and(|rest| rest & 1 == 1))
}

/// Converts a start time in ticks since boot to epoch seconds on a clock, with a precision of one clock tick. (The boot time in `/proc/stat` has
/// whole seconds.) `suspended_ns`: for how long the host had been suspended by then.
fn start_seconds(ticks: u64, clock: WallClock, suspended_ns: u64) -> f64 {
    let per_second = procfs::ticks_per_second();
    let start_ns = u128::from(ticks) * 1_000_000_000 / u128::from(per_second);
    let start = clock.epoch_of_boottime(u64::try_from(start_ns).unwrap_or(u64::MAX), suspended_ns);
    // Rounded so that two reads of a process give the same time, unless it is near the boundary of a rounding interval.
    (start * per_second as f64).round() / per_second as f64
}

/// Host name of the process's UTS namespace: gctrace's own if the namespace is the same; in a container otherwise the name in its root (runtimes
/// write the name they set to /etc/hostname). Elsewhere that file is the host's, and does not name another namespace.
fn hostname(pid: u32, in_container: bool) -> Option<String> {
    let theirs = fs::read_link(proc_root::path(pid, "ns/uts")).ok()?;
    let ours = fs::read_link("/proc/self/ns/uts").ok()?;
    if theirs == ours {
        return Some(rustix::system::uname().nodename().to_string_lossy().into_owned());
    }
    in_container.then(|| root_file::line(pid, "etc/hostname")).flatten()
}

/// Whether the root directory of a process is not that of gctrace, as in containers of runtimes that cgroups do not show.
fn has_own_root(pid: u32) -> bool {
    let root = |path: &Path| fs::metadata(path).map(|data| (data.dev(), data.ino()));
    match (root(&proc_root::path(pid, "root")), root(Path::new("/"))) {
        (Ok(theirs), Ok(ours)) => theirs != ours,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bit 0 of a mask is signal 1.
    #[test]
    fn masks() {
        assert!(is_in(1, 1) && is_in(0b10, 2) && is_in(u64::MAX, 64));
        assert!(!is_in(0b10, 1) && !is_in(u64::MAX, 0) && !is_in(u64::MAX, 65) && !is_in(0, 64));
    }

    /// The start of a process is on the clock of the run, whatever the host's clock is now, also if it was before the host was suspended.
    #[test]
    fn starts() {
        let per_second = procfs::ticks_per_second();
        let clock = WallClock::with_offsets(1_000_000_000_000, 0);
        assert!((start_seconds(50 * per_second, clock, 0) - 1050.0).abs() < 1e-6);
        assert!((start_seconds(50 * per_second + 1, clock, 60_000_000_000) - 990.01).abs() < 1e-6);
        assert!((start_seconds(50 * per_second, clock, 2_000_000_000_000) + 950.0).abs() < 1e-6);
    }

    /// However long the arguments of a program are, what is kept of them is limited.
    #[test]
    fn long_ones() {
        let args =
            |lengths: &[usize]| -> Vec<String> { lengths.iter().map(|len| "x".repeat(*len)).collect() };
        for short in [&[][..], &[0, 0], &[5, 32_000, 763]] {
            assert_eq!(shortened(args(short)), args(short));
        }
        assert_eq!(shortened(args(&[4, 32_768, 1])), ["xxxx", "... (2 more arguments, 32769 bytes)"]);
        assert_eq!(shortened(args(&[1 << 20])), ["... (1 more arguments, 1048576 bytes)"]);
        assert_eq!(shortened(args(&vec![0; 5000])).len(), 4097);
    }

    /// The user and the pid of a process are known whatever it is called: names are cut after 15 bytes, also within a character.
    #[test]
    fn cut_names() {
        let program = "import ctypes, sys\n\
            ctypes.CDLL(None).prctl(15, b'\\xc3\\xa9' * 8)\n\
            print(flush=True)\n\
            sys.stdin.read()\n";
        let mut child = std::process::Command::new("python3")
            .args(["-c", program])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = io::BufReader::new(child.stdout.take().unwrap());
        assert!(io::BufRead::read_line(&mut said, &mut String::new()).unwrap() > 0);
        let (pid, comm) = (child.id(), fs::read(proc_root::path(child.id(), "comm")).unwrap());
        let (of_child, of_self) = (ids(pid), ids(std::process::id()));
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success());
        assert!(String::from_utf8(comm).is_err());
        let uid = rustix::process::getuid().as_raw();
        assert_eq!(of_child, (Some(uid), Some(pid)));
        assert_eq!(of_self, (Some(uid), Some(std::process::id())));
        assert_eq!(ids(u32::MAX), (None, None));
    }

    /// A process is running as long as one of its threads is, even if its first thread has ended.
    #[test]
    fn first_thread_ended() {
        let exit = if cfg!(target_arch = "x86_64") { 60 } else { 93 };
        let program = format!("Thread.new {{ sleep }}; sleep 0.01; $VERBOSE = nil; syscall({exit}, 0)");
        let mut child = std::process::Command::new("ruby").args(["-e", &program]).spawn().unwrap();
        let pid = child.id();
        let state = || proc_root::process(pid).and_then(|process| process.stat()).unwrap().state;
        while state() != 'Z' {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let was_running = is_running(pid);
        child.kill().unwrap();
        assert!(was_running);
        let since = std::time::Instant::now();
        while is_running(pid) {
            assert!(since.elapsed().as_secs() < 10, "it runs still");
        }
        child.wait().unwrap();
    }

    /// As written by Linux 6.6 and later with and without shadow stacks, and by kernels that do not support them.
    #[test]
    fn shadow_stacks() {
        assert!(lists_shadow_stack(
            "Name:\truby\nx86_Thread_features:\tshstk wrss \nx86_Thread_features_locked:\t\n"
        ));
        assert!(!lists_shadow_stack("x86_Thread_features:\t\nx86_Thread_features_locked:\tshstk wrss \n"));
        assert!(!lists_shadow_stack("Name:\tshstk\nVmRSS:\t10 kB\n"));
        assert!(!has_shadow_stack(0));
    }

    /// Values read in the kernel are converted to bytes; the peak is never below the current value, as in the kernel.
    #[test]
    fn memory_at_an_event() {
        let page = rustix::param::page_size() as u64;
        let pages = MemoryPages { counters: [100, 900, 30, -1], peak: 950, source: MemoryPages::WHOLE };
        let memory = at_event(&pages).unwrap();
        assert_eq!((memory.rss, memory.peak_rss), (1000 * page, 1000 * page));
        assert_eq!(
            (memory.file, memory.anon, memory.swap, memory.shmem),
            (100 * page, 900 * page, 30 * page, 0)
        );
        assert_eq!(memory.source, MemorySource::Kernel);
        let pages = MemoryPages { peak: 2000, source: MemoryPages::APPROXIMATE, ..pages };
        let memory = at_event(&pages).unwrap();
        assert_eq!((memory.peak_rss, memory.source), (2000 * page, MemorySource::KernelApproximate));
        assert_eq!(at_event(&MemoryPages { source: MemoryPages::NONE, ..pages }), None);
    }

    /// Memory of this process is plausible, and absent for a process that is gone.
    #[test]
    fn memory() {
        let memory = MemoryReader::open(std::process::id()).unwrap().read().unwrap();
        assert!(memory.rss > 0 && memory.peak_rss >= memory.rss);
        assert_eq!(memory.rss, memory.anon + memory.file + memory.shmem);
        assert_eq!(memory.source, MemorySource::Proc);
        let shares = shares(std::process::id()).unwrap();
        assert!(shares.pss > 0 && shares.private_dirty > 0, "{shares:?}");
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let reader = MemoryReader::open(child.id()).unwrap();
        child.wait().unwrap();
        assert!(reader.read().is_none());
    }
}
