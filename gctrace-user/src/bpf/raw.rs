//! What no library offers in a safe form.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd as _, OwnedFd},
};

/// Borrows the descriptor of an owner that only knows `AsRawFd`.
pub(super) fn borrow_fd<T: AsRawFd>(owner: &T) -> BorrowedFd<'_> {
    // SAFETY: the owner keeps its descriptor open for as long as it is borrowed, and the result cannot outlive it.
    unsafe { BorrowedFd::borrow_raw(owner.as_raw_fd()) }
}

/// Attaches a program to a perf event by a link that carries a cookie (`BPF_LINK_CREATE`, Linux 5.15). Aya does the same
/// for the events that it opens itself. Closing the result detaches.
pub(super) fn link_perf_event(program: BorrowedFd<'_>, event: i32, cookie: u64) -> io::Result<OwnedFd> {
    /// `enum bpf_cmd`, include/uapi/linux/bpf.h.
    const BPF_LINK_CREATE: libc::c_long = 28;
    /// `enum bpf_attach_type`.
    const BPF_PERF_EVENT: u32 = 41;

    /// `union bpf_attr`, the `link_create` member.
    #[repr(C)]
    struct LinkCreate {
        program: u32,
        target: u32,
        attach_type: u32,
        flags: u32,
        cookie: u64,
    }
    let attributes = LinkCreate {
        program: program.as_raw_fd() as u32,
        target: event as u32,
        attach_type: BPF_PERF_EVENT,
        flags: 0,
        cookie,
    };
    // SAFETY: the kernel reads `size` bytes of the attributes, which live until the call returns.
    let fd = unsafe {
        libc::syscall(libc::SYS_bpf, BPF_LINK_CREATE, &raw const attributes, size_of::<LinkCreate>())
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}
