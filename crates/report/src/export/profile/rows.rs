//! The rows of a stack that an image shows. Frames that every system call passes through carry no information, and
//! neither do addresses in code without symbols: such rows are left out or merged into one. Data files have all of them.

use super::label;
use crate::model::stack::{Frame, FrameKind, ThreadState};

/// Prefixes of the kernel's functions for individual system calls, on all processors.
const CALLS: [&str; 6] =
    ["__x64_sys_", "__ia32_sys_", "__ia32_compat_sys_", "__arm64_sys_", "__se_sys_", "__do_sys_"];

/// Whether a kernel function is part of the entry of every system call, interrupt or exception.
fn is_entry(name: &str) -> bool {
    ["entry_", "asm_", "el0_", "el0t_", "do_el0_", "el1_", "el1h_"]
        .iter()
        .any(|begin| name.starts_with(begin))
        || matches!(
            name,
            "do_syscall_64"
                | "x64_sys_call"
                | "do_int80_emulation"
                | "invoke_syscall"
                | "invoke_syscall.constprop.0"
        )
}

/// The rows of the kernel's frames (leaf first), in root-first order. A thread off its CPU has a single row, the
/// system call: all further frames lead to the scheduler.
pub(super) fn kernel(frames: &[&Frame], state: ThreadState) -> Vec<String> {
    let mut inner = frames.iter().rev().skip_while(|frame| is_entry(&frame.name)).peekable();
    if inner.peek().is_none() {
        return frames.first().map(|leaf| label::method(leaf)).into_iter().collect();
    }
    let called = |frame: &Frame| {
        let name = CALLS.iter().find_map(|prefix| frame.name.strip_prefix(prefix));
        name.map_or_else(|| label::method(frame), |name| format!("{}_[k]", label::text(name)))
    };
    let rows = inner.map(|frame| called(frame));
    if state == ThreadState::Running { rows.collect() } else { rows.take(1).collect() }
}

/// The name of a system call without the kernel's prefixes. Some calls end in a tail call, so the function called has the first frame.
pub(super) fn call(frame: &Frame) -> &str {
    let prefixes = CALLS.iter().chain(&["do_sys_", "ksys_", "__sys_", "kernel_", "kern_", "do_"]);
    let mut names = prefixes.filter_map(|prefix| frame.name.strip_prefix(prefix));
    names.next().unwrap_or(&frame.name)
}

/// The row for all code of a file without a symbol: `[libruby.so.3.1]`.
pub(super) fn unnamed(frame: &Frame) -> Option<String> {
    let file = label::base_name(frame.file.as_deref().filter(|_| frame.kind == FrameKind::Native)?);
    let offset = frame.name.strip_prefix(file)?.strip_prefix("+0x")?;
    offset.bytes().all(|byte| byte.is_ascii_hexdigit()).then(|| format!("[{}]", label::text(file)))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn frame(kind: FrameKind, name: &str, file: Option<&str>) -> Frame {
        Frame { kind, name: name.into(), file: file.map(Arc::from), line: 0, first_line: 0, address: 0 }
    }

    /// Only kernel frames that distinguish calls remain, and at least one.
    #[test]
    fn of_the_kernel() {
        let frames = |names: &[&str]| -> Vec<Frame> {
            names.iter().map(|name| frame(FrameKind::Kernel, name, None)).collect()
        };
        let rows = |names: &[&str], state| kernel(&frames(names).iter().collect::<Vec<_>>(), state);
        let futex = [
            "__schedule",
            "schedule",
            "futex_wait",
            "__x64_sys_futex",
            "do_syscall_64",
            "entry_SYSCALL_64_after_hwframe",
        ];
        assert_eq!(rows(&futex, ThreadState::Blocked), ["futex_[k]"]);
        assert_eq!(
            rows(&futex, ThreadState::Running),
            ["futex_[k]", "futex_wait_[k]", "schedule_[k]", "__schedule_[k]"]
        );
        assert_eq!(rows(&["clear_page", "asm_exc_page_fault"], ThreadState::Running), ["clear_page_[k]"]);
        assert_eq!(rows(&["entry_SYSCALL_64"], ThreadState::Running), ["entry_SYSCALL_64_[k]"]);
        assert_eq!(rows(&["[kernel]"], ThreadState::Blocked), ["[kernel]_[k]"]);
        assert!(rows(&[], ThreadState::Blocked).is_empty());
    }

    /// Only offsets in the frame's own file count as unnamed.
    #[test]
    fn without_symbols() {
        let row = |kind, name, file| unnamed(&frame(kind, name, Some(file)));
        let file = "/usr/lib/libthing.so.1";
        assert_eq!(
            row(FrameKind::Native, "libthing.so.1+0x24b550", file).as_deref(),
            Some("[libthing.so.1]")
        );
        assert_eq!(row(FrameKind::Native, "rb_ary_each", file), None);
        assert_eq!(row(FrameKind::Native, "libthing.so.1+0xyz", file), None);
        assert_eq!(row(FrameKind::Ruby, "libthing.so.1+0x24b550", file), None);
    }
}
