//! What a thread off its CPU waited for, as a row below its stack. Each row is correct, or left out: the system call
//! and the innermost method of CRuby itself show what was called, and `--gvl` whether the thread waited for the GVL
//! instead, which every call may do before it returns.

use super::rows;
use crate::{
    aggregate::call_tree::{CallTree, NodeId},
    model::stack::{Frame, FrameKind, ThreadState},
};

const SLEEPS: &str = "(sleep)";
const PROCESS: &str = "(process wait)";
const CONDITION: &str = "(ConditionVariable wait)";
const QUEUE: &str = "(Queue wait)";
const MUTEX: &str = "(Mutex wait)";
const MONITOR: &str = "(Monitor wait)";
const IO: &str = "(I/O wait)";
const IO_OR_TIMEOUT: &str = "(I/O or timeout wait)";

/// The row for a stack in this state; `None` if the thread ran.
pub(super) fn row(tree: &CallTree, node: NodeId, state: ThreadState) -> Option<&'static str> {
    let known = match state {
        ThreadState::Running => return None,
        ThreadState::Runnable => return Some("(CPU wait)"),
        ThreadState::GvlWait => return Some("(GVL wait)"),
        ThreadState::OtherWait => true,
        ThreadState::Blocked => false,
    };
    let frames = tree.path(node).map(|(_, frame)| tree.frame(frame));
    Some(wait(frames, known).unwrap_or("(blocked)"))
}

/// What a thread with these frames, leaf first, waits for. `known`: it is known not to wait for the GVL.
fn wait<'a>(frames: impl Iterator<Item = &'a Frame>, known: bool) -> Option<&'static str> {
    let mut frames = frames.peekable();
    let mut kernel = Vec::new();
    while let Some(frame) = frames.next_if(|frame| frame.kind == FrameKind::Kernel) {
        kernel.push(frame);
    }
    let by_method = || {
        let mut methods = frames.filter(|frame| frame.kind != FrameKind::Native).map(own_method);
        method(methods.next()??, methods.next().flatten())
    };
    // The outermost known call.
    let call = kernel.iter().rev().find_map(|frame| Call::of(rows::call(frame)));
    match call {
        Some(Call::Wait(row)) => Some(row),
        Some(Call::Poll) => Some(by_method().unwrap_or(IO_OR_TIMEOUT)),
        // The only call in which threads wait for the GVL.
        Some(Call::Futex) => known.then(by_method).flatten(),
        // The kernel hides its functions, or the stack was read without them.
        None if kernel.iter().all(|frame| &*frame.name == "[kernel]") => known.then(by_method).flatten(),
        None => None,
    }
}

/// What a system call reveals.
enum Call {
    /// It waits for this.
    Wait(&'static str),
    /// It waits for I/O, or sleeps.
    Poll,
    /// It waits until another thread wakes it.
    Futex,
}

impl Call {
    fn of(name: &str) -> Option<Self> {
        Some(match name {
            "futex" => Self::Futex,
            "poll" | "ppoll" | "select" | "pselect" | "pselect6" | "epoll_wait" | "epoll_pwait"
            | "epoll_pwait2" => Self::Poll,
            "nanosleep" | "clock_nanosleep" | "common_nsleep" | "hrtimer_nanosleep" => Self::Wait(SLEEPS),
            "wait4" | "waitid" => Self::Wait(PROCESS),
            "read" | "readv" | "pread64" | "preadv" | "preadv2" | "write" | "writev" | "pwrite64"
            | "pwritev" | "pwritev2" | "recvfrom" | "recvmsg" | "recvmmsg" | "sendto" | "sendmsg"
            | "sendmmsg" | "accept" | "accept4" | "connect" | "sendfile" | "sendfile64" | "splice"
            | "copy_file_range" | "fsync" | "fdatasync" => Self::Wait(IO),
            _ => return None,
        })
    }
}

/// The name of a method of CRuby itself, without the module that its class has been in since some version.
fn own_method(frame: &Frame) -> Option<&str> {
    let internal = || frame.file.as_deref().is_some_and(|file| file.starts_with("<internal:"));
    let own = match frame.kind {
        FrameKind::CFunction => true,
        FrameKind::Ruby => internal(),
        _ => false,
    };
    own.then(|| frame.name.strip_prefix("Thread::").unwrap_or(&frame.name))
}

/// By the innermost method and its caller (`thread_sync.c`, `thread.c`, `process.c` and ext/monitor).
fn method(name: &str, caller: Option<&str>) -> Option<&'static str> {
    Some(match name {
        "Mutex#sleep" if caller == Some("ConditionVariable#wait") => CONDITION,
        "ConditionVariable#wait" => CONDITION,
        "Mutex#sleep" | "Kernel#sleep" | "Kernel.sleep" | "Thread.stop" => SLEEPS,
        "Mutex#lock" | "Mutex#synchronize" => MUTEX,
        "Monitor#enter" | "Monitor#mon_enter" | "Monitor#synchronize" | "Monitor#mon_synchronize" => MONITOR,
        "Queue#pop" | "Queue#shift" | "Queue#deq" | "SizedQueue#pop" | "SizedQueue#shift"
        | "SizedQueue#deq" | "SizedQueue#push" | "SizedQueue#enq" | "SizedQueue#<<" => QUEUE,
        "Thread#join" | "Thread#value" => "(thread wait)",
        "Process.wait"
        | "Process.wait2"
        | "Process.waitpid"
        | "Process.waitpid2"
        | "Process.waitall"
        | "Process::Status.wait" => PROCESS,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn frame(kind: FrameKind, name: &str, file: Option<&str>) -> Frame {
        Frame { kind, name: name.into(), file: file.map(Arc::from), line: 0, first_line: 0, address: 0 }
    }

    /// The wait for a Ruby leaf and its caller, native code, and a system call given by its kernel functions.
    fn waits(call: &[&str], methods: &[&str], known: bool) -> Option<&'static str> {
        let kernel = call.iter().map(|name| frame(FrameKind::Kernel, name, None));
        let native = [frame(FrameKind::Native, "pthread_cond_wait", Some("libc.so.6"))];
        let methods = methods.iter().map(|name| frame(FrameKind::CFunction, name, None));
        let ruby = [frame(FrameKind::Ruby, "Mutex#lock", Some("app.rb"))];
        let frames: Vec<Frame> = kernel.chain(native).chain(methods).chain(ruby).collect();
        wait(frames.iter(), known)
    }

    const FUTEX: &[&str] = &["schedule", "futex_do_wait", "__x64_sys_futex", "do_syscall_64"];

    /// A wait in a futex may be a wait for the GVL.
    #[test]
    fn methods() {
        for (frames, row) in [
            (&["Thread::Mutex#lock"][..], Some(MUTEX)),
            (&["Mutex#synchronize"], Some(MUTEX)),
            (&["Monitor#synchronize"], Some(MONITOR)),
            (&["Thread::Queue#pop"], Some(QUEUE)),
            (&["Thread::Mutex#sleep", "Thread::ConditionVariable#wait"], Some(CONDITION)),
            (&["Thread::Mutex#sleep"], Some(SLEEPS)),
            (&["Integer#times", "Thread::Queue#pop"], None),
            // A method of the application with such a name, see `waits`.
            (&[], None),
        ] {
            assert_eq!(waits(FUTEX, frames, true), row, "{frames:?}");
            assert_eq!(waits(FUTEX, frames, false), None, "{frames:?}");
            assert_eq!(waits(&[], frames, true), row, "{frames:?}");
            assert_eq!(waits(&["[kernel]"], frames, true), row, "{frames:?}");
            assert_eq!(waits(&["schedule", "exc_page_fault", "asm_exc_page_fault"], frames, true), None);
        }
        let internal = [frame(FrameKind::Ruby, "Thread::Queue#pop", Some("<internal:thread_sync>"))];
        assert_eq!(wait(internal.iter(), true), Some(QUEUE));
    }

    /// For other system calls, the result does not depend on the GVL.
    #[test]
    fn calls() {
        for known in [false, true] {
            let of =
                |call: &str, methods: &[&str]| waits(&["schedule", call, "x64_sys_call"], methods, known);
            assert_eq!(of("__x64_sys_read", &["IO#read"]), Some(IO));
            assert_eq!(of("__arm64_sys_recvfrom", &[]), Some(IO));
            assert_eq!(of("ksys_read", &[]), Some(IO));
            assert_eq!(of("__sys_accept4", &[]), Some(IO));
            assert_eq!(of("__x64_sys_poll", &["IO.select"]), Some(IO_OR_TIMEOUT));
            assert_eq!(of("__x64_sys_ppoll", &["Kernel#sleep"]), Some(SLEEPS));
            assert_eq!(of("__x64_sys_wait4", &["Kernel#system"]), Some(PROCESS));
            assert_eq!(of("kernel_wait4", &["Kernel#system"]), Some(PROCESS));
            assert_eq!(of("do_epoll_wait", &[]), Some(IO_OR_TIMEOUT));
            assert_eq!(of("__x64_sys_io_destroy", &["Thread::Queue#pop"]), None);
        }
    }
}
