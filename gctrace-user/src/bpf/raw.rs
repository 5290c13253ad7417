//! What no library offers in a safe form.

use std::os::fd::{AsRawFd, BorrowedFd};

/// Borrows the descriptor of an owner that only knows `AsRawFd`.
pub(super) fn borrow_fd<T: AsRawFd>(owner: &T) -> BorrowedFd<'_> {
    // SAFETY: the owner keeps its descriptor open for as long as it is borrowed, and the result cannot outlive it.
    unsafe { BorrowedFd::borrow_raw(owner.as_raw_fd()) }
}
