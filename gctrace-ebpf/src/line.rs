//! Lines for debugging a program: `debug_line!(ctx, "{} …", …)`, at the level debug. They exist in objects that
//! `cargo xtask ebpf --log` has built, and expand to nothing in others: their arguments are not evaluated, either.

/// Sends a line through aya-log.
#[cfg(feature = "bpf-log")]
macro_rules! debug_line {
    ($ctx:expr, $($text:tt)*) => { aya_log_ebpf::debug!($ctx, $($text)*) };
}

/// Nothing.
#[cfg(not(feature = "bpf-log"))]
macro_rules! debug_line {
    ($ctx:expr, $($text:tt)*) => {};
}

pub(crate) use debug_line;
