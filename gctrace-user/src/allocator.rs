//! Memory that the allocator holds and nothing uses.

/// Gives pages that were freed back to the kernel. The descriptions of the kernel's types, which the loader reads (about 10 MB), and an analysis of an
/// image (about 25 MB) are freed after a moment, but glibc keeps their pages for good, in the arena of the thread that needed them.
#[cfg(target_env = "gnu")]
#[expect(unsafe_code, reason = "no library wraps it")]
pub fn give_back() {
    // SAFETY: it has no requirements, and any thread may call it (malloc_trim(3)).
    let _any_released = unsafe { libc::malloc_trim(0) };
}

/// Other allocators give back what they free.
#[cfg(not(target_env = "gnu"))]
pub fn give_back() {}
