//! Debug output of programs: `debug_line!(ctx, "{} …", …)`, at level debug. The lines exist in objects that
//! `cargo xtask ebpf --log` has built; in other objects they expand to nothing, and their arguments are not evaluated.

/// Sends a line through aya-log.
#[cfg(feature = "bpf-log")]
macro_rules! debug_line {
    ($ctx:expr, $($text:tt)*) => { aya_log_ebpf::debug!($ctx, $($text)*) };
}

/// Expands to nothing.
#[cfg(not(feature = "bpf-log"))]
macro_rules! debug_line {
    ($ctx:expr, $($text:tt)*) => {};
}

pub(crate) use debug_line;
