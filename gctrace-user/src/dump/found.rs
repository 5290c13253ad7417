//! The state of a process at one moment, and which thread waits for which.

use std::sync::Arc;

use gctrace_common::stack::NativeEnd;

use crate::{
    host::{doing::Doing, last_run::LastRun},
    model::stack::Frame,
    native::missing,
};

/// The threads of one process.
#[derive(Debug, Default)]
pub struct Dump {
    /// Its pid.
    pub pid: u32,
    /// Its command line.
    pub command: Option<String>,
    /// Version of its Ruby.
    pub ruby: String,
    /// Whether it was in a GC pause, if the state was the same before and after its threads were read; `None` otherwise, or if unknown.
    pub collecting: Option<bool>,
    /// Why there are no Ruby stacks, if there are none.
    pub no_stacks: Option<String>,
    /// Main thread first, then Ruby threads by tid, then native threads.
    pub threads: Vec<Thread>,
    /// Circles of threads, each of which waits for the next one; indices.
    pub deadlocks: Vec<Vec<usize>>,
}

/// A thread.
#[derive(Debug, Default)]
pub struct Thread {
    /// Its tid in the host's pid namespace; `None`: a Ruby thread that is on no native thread now (M:N).
    pub tid: Option<u32>,
    /// Whether it is a Ruby thread that changed its native thread each time it was read (M:N), so that its state is unknown.
    pub moved: bool,
    /// Its tid in its own pid namespace.
    pub own_tid: Option<u32>,
    /// Its name in the kernel.
    pub comm: String,
    /// Its state according to the kernel.
    pub doing: Doing,
    /// What the file descriptor of its system call refers to.
    pub open_on: Option<String>,
    /// CPU time that it used while the process was read, nanoseconds.
    pub cpu_ns: Option<u64>,
    /// When it last ran, if it sleeps.
    pub(super) last_run: Option<LastRun>,
    /// Minimum time since it last ran when it was seen asleep, nanoseconds; `None`: it runs, or the time is unknown or was not requested.
    pub not_run_ns: Option<u64>,
    /// Its state according to the VM; `None`: it is not a Ruby thread.
    pub ruby: Option<RubySide>,
    /// Its native stack, if requested.
    pub native: Option<NativeSide>,
}

/// The native stack of a thread.
#[derive(Clone, Debug, Default)]
pub struct NativeSide {
    /// Frames, leaf first: of a Ruby thread its frames of both kinds, of another thread its native frames.
    pub frames: Vec<Arc<Frame>>,
    /// How complete it is.
    pub read: NativeRead,
}

/// How complete a native stack is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NativeRead {
    /// Complete, in true order with the Ruby frames.
    InOrder,
    /// Complete, but native and Ruby frames cannot be put into one order; the Ruby frames have only the native leaf above them.
    LeafOnly,
    /// The thread slept, but the callers of some frame are unknown; the Ruby frames have only the native leaf above them.
    Cut(NativeEnd),
    /// The thread ran.
    #[default]
    Ran,
    /// The mappings of the process could not be read.
    NoMappings,
}

impl NativeRead {
    /// The name in JSON output.
    pub fn name(self) -> &'static str {
        match self {
            Self::InOrder => "in_order",
            Self::LeafOnly => "leaf_only",
            Self::Cut(_) => "cut",
            Self::Ran => "ran",
            Self::NoMappings => "no_mappings",
        }
    }

    /// What is missing and why; `None` if nothing is.
    pub fn missing(self) -> Option<String> {
        match self {
            Self::InOrder => None,
            Self::LeafOnly => {
                Some("native callers are left out: their order with the Ruby frames is not known".to_owned())
            }
            Self::Cut(end) => missing(end).map(|why| format!("native callers are not known: {why}")),
            Self::Ran => Some("no native frames: it ran".to_owned()),
            Self::NoMappings => {
                Some("no native frames: the mappings of the process cannot be read".to_owned())
            }
        }
    }
}

/// The state of a thread according to the VM.
#[derive(Debug, Default)]
pub struct RubySide {
    /// Address of its `rb_thread_t`, which distinguishes threads that are on no native thread.
    pub address: u64,
    /// `Thread#name`.
    pub name: Option<Arc<str>>,
    /// Whether it is the main thread.
    pub main: bool,
    /// Frames, leaf first.
    pub frames: Vec<Arc<Frame>>,
    /// How reliably they were read.
    pub read: StackRead,
    /// Its relation to its GVL.
    pub gvl: Option<Gvl>,
    /// The `Mutex` that it waits for.
    pub wants: Option<LockWait>,
    /// Number of `Mutex`es that it holds; `None`: unknown.
    pub locks: Option<usize>,
}

/// How a stack was read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StackRead {
    /// The thread slept the whole time.
    Slept,
    /// It runs; two consecutive reads agreed.
    Agreed,
    /// It runs, and its inner frames changed too fast to be read: they are missing.
    RootOnly,
    /// There is no stack.
    #[default]
    None,
}

impl StackRead {
    /// The name in JSON output.
    pub fn name(self) -> &'static str {
        match self {
            Self::Slept => "slept",
            Self::Agreed => "agreed",
            Self::RootOnly => "root_only",
            Self::None => "none",
        }
    }
}

/// A thread and its GVL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gvl {
    /// Whether the thread held it.
    pub held: bool,
    /// Whether the thread waited for it: proven by its condition variable.
    pub waits: bool,
    /// Index of the thread that held it.
    pub holder: Option<usize>,
}

/// A lock that a thread waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockWait {
    /// Index of the thread that holds it; `None`: none of the threads that were read.
    pub holder: Option<usize>,
}

/// The state of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It used CPU time while the process was read.
    Running,
    /// It was runnable, but used no CPU time.
    Runnable,
    /// It waits for the GVL.
    GvlWait,
    /// It waits for a `Mutex`.
    MutexWait,
    /// It sleeps in the kernel.
    Blocked,
    /// It sleeps in the kernel, and signals do not wake it.
    Uninterruptible,
    /// A signal stopped it.
    Stopped,
    /// A debugger stopped it.
    Traced,
    /// It has ended.
    Ended,
    /// It is on no native thread (M:N).
    Detached,
    /// Its state is unknown.
    Unknown,
}

impl State {
    /// Whether a thread in this state cannot be on a CPU.
    pub fn is_asleep(self) -> bool {
        matches!(
            self,
            Self::GvlWait
                | Self::MutexWait
                | Self::Blocked
                | Self::Uninterruptible
                | Self::Stopped
                | Self::Traced
        )
    }

    /// The name in JSON output.
    pub fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Runnable => "runnable",
            Self::GvlWait => "gvl_wait",
            Self::MutexWait => "mutex_wait",
            Self::Blocked => "blocked",
            Self::Uninterruptible => "uninterruptible",
            Self::Stopped => "stopped",
            Self::Traced => "traced",
            Self::Ended => "ended",
            Self::Detached => "detached",
            Self::Unknown => "unknown",
        }
    }
}

impl Thread {
    /// Its state.
    pub fn state(&self) -> State {
        let ruby = self.ruby.as_ref();
        match self.doing.state {
            _ if self.moved => State::Unknown,
            _ if self.tid.is_none() => State::Detached,
            Some('R') if self.cpu_ns.is_some_and(|ns| ns > 0) => State::Running,
            Some('R') => State::Runnable,
            Some('S') if ruby.is_some_and(|ruby| ruby.gvl.is_some_and(|gvl| gvl.waits)) => State::GvlWait,
            Some('S') if self.wants_lock() => State::MutexWait,
            Some('S' | 'I') => State::Blocked,
            Some('D') => State::Uninterruptible,
            Some('T') => State::Stopped,
            Some('t') => State::Traced,
            Some('Z' | 'X' | 'x') => State::Ended,
            _ => State::Unknown,
        }
    }

    /// Whether it is locking a `Mutex` according to the VM.
    pub(super) fn wants_lock(&self) -> bool {
        self.ruby.as_ref().is_some_and(|ruby| ruby.wants.is_some())
    }

    /// Its frames, with native ones if these were requested and are known.
    pub fn frames(&self) -> &[Arc<Frame>] {
        let native = self.native.as_ref().filter(|native| !native.frames.is_empty());
        match (native, &self.ruby) {
            (Some(native), _) => &native.frames,
            (None, Some(ruby)) => &ruby.frames,
            (None, None) => &[],
        }
    }

    /// Its id, unique in the process: its tid, or the address of its `rb_thread_t` if it is on no native thread.
    pub fn id(&self) -> String {
        match (self.tid, self.address()) {
            (Some(tid), _) => tid.to_string(),
            (None, Some(address)) => address,
            (None, None) => "-".to_owned(),
        }
    }

    /// The address of its `rb_thread_t`; `None` if it is not a Ruby thread.
    pub fn address(&self) -> Option<String> {
        let address = self.ruby.as_ref().map(|ruby| ruby.address).filter(|&address| address != 0);
        address.map(|address| format!("{address:#x}"))
    }

    /// `Thread#name`, otherwise its name in the kernel.
    pub fn name(&self) -> &str {
        let name = self.ruby.as_ref().and_then(|ruby| ruby.name.as_deref());
        name.unwrap_or(&self.comm)
    }
}

/// The circles among threads that each wait for at most one other thread. Each circle begins with its smallest index.
pub(super) fn circles(waits_for: &[Option<usize>]) -> Vec<Vec<usize>> {
    let mut found = Vec::new();
    // 0: not visited; otherwise the number of the walk that visited it.
    let mut seen = vec![0; waits_for.len()];
    for start in 0..waits_for.len() {
        let mut at = start;
        while seen[at] == 0 {
            seen[at] = start + 1;
            match waits_for[at].filter(|&next| next < seen.len()) {
                Some(next) => at = next,
                None => break,
            }
        }
        // If the walk came back to a thread that it had visited itself, that thread is in the circle; it may also have stopped there.
        let Some(second) = waits_for[at].filter(|&next| next < seen.len() && seen[at] == start + 1) else {
            continue;
        };
        if seen[second] != start + 1 || found.iter().any(|circle: &Vec<usize>| circle.contains(&at)) {
            continue;
        }
        let mut circle = vec![at];
        let mut next = second;
        while next != at && circle.len() <= waits_for.len() {
            circle.push(next);
            match waits_for[next] {
                Some(after) => next = after,
                None => break,
            }
        }
        if next == at {
            let least = circle.iter().enumerate().min_by_key(|(_, thread)| **thread).map_or(0, |(at, _)| at);
            circle.rotate_left(least);
            found.push(circle);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two circles, a tail that leads into one, a thread that waits for itself, and threads that wait for no other thread.
    #[test]
    fn who_waits_for_whom() {
        assert_eq!(circles(&[]), Vec::<Vec<usize>>::new());
        assert_eq!(circles(&[None, Some(0), Some(1)]), Vec::<Vec<usize>>::new());
        assert_eq!(circles(&[Some(1), Some(0)]), [vec![0, 1]]);
        assert_eq!(circles(&[Some(2), Some(0), Some(3), Some(2)]), [vec![2, 3]]);
        assert_eq!(circles(&[Some(0), Some(4), None, Some(1), Some(3), Some(2)]), [vec![0], vec![1, 4, 3]]);
        // An invalid index.
        assert_eq!(circles(&[Some(7)]), Vec::<Vec<usize>>::new());
    }

    /// The kernel's state letter decides; for a sleeping thread a proven wait for the GVL takes precedence over its lock.
    #[test]
    fn states() {
        let thread = |letter, cpu_ns, waits, wants: bool| Thread {
            tid: Some(7),
            doing: Doing { state: Some(letter), ..Doing::default() },
            cpu_ns,
            ruby: Some(RubySide {
                gvl: Some(Gvl { held: false, waits, holder: None }),
                wants: wants.then_some(LockWait { holder: None }),
                ..RubySide::default()
            }),
            ..Thread::default()
        };
        assert_eq!(thread('R', Some(9), false, true).state(), State::Running);
        assert_eq!(thread('R', Some(0), false, false).state(), State::Runnable);
        assert_eq!(thread('R', None, false, false).state(), State::Runnable);
        assert_eq!(thread('S', Some(0), true, true).state(), State::GvlWait);
        assert_eq!(thread('S', Some(0), false, true).state(), State::MutexWait);
        assert_eq!(thread('S', Some(0), false, false).state(), State::Blocked);
        assert_eq!(thread('D', Some(0), false, false).state(), State::Uninterruptible);
        assert_eq!(Thread { tid: None, ..thread('S', None, false, false) }.state(), State::Detached);
        assert_eq!(Thread { tid: Some(7), ..Thread::default() }.state(), State::Unknown);
        assert_eq!(Thread { moved: true, ..Thread::default() }.state(), State::Unknown);
    }
}
