//! What the kernel side needs from an image to walk the Ruby stacks of its threads.
//!
//! The members' offsets come from the table; those that the code of the image reveals must agree, or its stacks are not
//! walked.

use gctrace_common::config::StackPath;

use super::{
    RubyAnalysis, RubyVersion,
    derive::{CurrentEc, NotDerived},
    frames::FrameLayout,
    tables::{self, Struct, Table},
};
use crate::elf::Machine;

/// Why the stacks of an image cannot be walked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoStacks {
    /// The tables are for x86-64; on other processors structures that contain locks have other sizes.
    #[error("Ruby stacks are walked on x86-64 only")]
    Machine,
    /// No table covers the release.
    #[error("{0}")]
    Unknown(String),
    /// A GC library: threads and frames are in the Ruby that has loaded it.
    #[error(
        "the process runs a GC library (RUBY_GC_LIBRARY), and stacks are walked only with the compiled-in GC"
    )]
    GcLibrary,
    /// The kernel does not report where a thread's own memory starts.
    #[error(
        "the kernel does not describe its types (CONFIG_DEBUG_INFO_BTF), so threads cannot be distinguished"
    )]
    ThreadPointer,
    /// The path to the running context was not found in the code.
    #[error("the running thread's execution context was not found: {0}")]
    Context(NotDerived),
    /// The variable is thread-local and its module is not known from the image.
    #[error("the running thread's execution context is in a TLS block that the code does not name")]
    Module,
    /// The C library is unknown, and each locates thread-local variables in its own way.
    #[error("the C library that the image needs is neither glibc nor musl")]
    Libc,
    /// The table lacks a member: a mistake in gctrace.
    #[error("the layout table of CRuby {0} lacks `{1}`")]
    Missing(RubyVersion, &'static str),
    /// Table and code disagree: another build configuration or a patched Ruby.
    #[error("the code takes `{member}` from offset {derived} and the layout table says {table}")]
    Disagree {
        /// Member.
        member: &'static str,
        /// The code's offset.
        derived: u32,
        /// The table's offset.
        table: u32,
    },
    /// Its frames could not be named.
    #[error("{0}")]
    Names(String),
    /// A structure does not have the shape that the kernel side reads.
    #[error("`{0}` has an unknown shape")]
    Shape(&'static str),
}

/// Whether `ruby_current_execution_context_ptr` of a release is one global for all threads.
fn is_global(version: RubyVersion) -> bool {
    !version.at_least(3, 0)
}

/// How the stacks of an image are walked, and how their frames are named.
pub fn stacks(
    analysis: &RubyAnalysis,
    own: Option<&Table>,
    reads_threads: bool,
) -> Result<(StackPath, FrameLayout), NoStacks> {
    if analysis.machine != Machine::X86_64 {
        return Err(NoStacks::Machine);
    }
    if analysis.vm.anchor.is_some() {
        return Err(NoStacks::GcLibrary);
    }
    let table = match own {
        Some(table) => table,
        None => Table::of(analysis.version).map_err(|error| NoStacks::Unknown(error.to_string()))?,
    };
    let path = stack_path(analysis, table, reads_threads)?;
    let frames = FrameLayout::of(analysis, table).map_err(NoStacks::Names)?;
    Ok((frames.with_labels(path), frames))
}

/// The path to the Ruby stack of a thread of this image. `reads_threads`: whether the kernel side can find a thread's own memory.
fn stack_path(analysis: &RubyAnalysis, table: &Table, reads_threads: bool) -> Result<StackPath, NoStacks> {
    let version = analysis.version;
    if !reads_threads {
        return Err(NoStacks::ThreadPointer);
    }
    let derived = &analysis.derived.ec;
    let (place, module, context) = match derived.current_ec.clone().map_err(NoStacks::Context)? {
        CurrentEc::Tls(_) if derived.dtv_entry == 0 => return Err(NoStacks::Libc),
        CurrentEc::Tls(offset) => (StackPath::TLS, derived.module.ok_or(NoStacks::Module)?.0, offset),
        CurrentEc::ThreadPointer(offset) => (StackPath::THREAD_POINTER, 0, offset),
        CurrentEc::Global(address) => (StackPath::GLOBAL, 0, address.0 as i64),
    };
    if (place == StackPath::GLOBAL) != is_global(version) {
        return Err(NoStacks::Shape("ruby_current_ec"));
    }
    // Releases without public sources have tables of fewer structures. The members of these three that the walk uses are
    // proven by every context that it finds (thread and context point to each other, a whole number of control frames lies
    // between the current one and the end of the stack, the stack's bounds hold), so the series' newest table suffices.
    let structure = |tag| {
        let known = table.structure(tag).or_else(|| tables::newest_structure(version, tag));
        known.ok_or(NoStacks::Missing(version, tag))
    };
    let ec = structure("rb_execution_context_struct")?;
    let frame = structure("rb_control_frame_struct")?;
    let thread = structure("rb_thread_struct")?;
    let entry = structure("rb_callable_method_entry_struct")?;
    let member = |of: &Struct, name: &'static str| {
        of.field(name).map(|field| field.offset).ok_or(NoStacks::Missing(version, name))
    };
    let agreed = |of: &Struct, name: &'static str, code: &Result<u32, NotDerived>| {
        let table = member(of, name)?;
        match code {
            Ok(derived) if *derived != table => {
                Err(NoStacks::Disagree { member: name, derived: *derived, table })
            }
            // Members that the code does not reveal come from the table; with a wrong one no context is consistent.
            _ => Ok(table),
        }
    };
    // The kernel side reads flags and `def` in one read.
    if member(entry, "def")? != 16 {
        return Err(NoStacks::Shape("rb_callable_method_entry_t"));
    }
    let path = StackPath {
        place,
        dtv_entry: derived.dtv_entry,
        module,
        context,
        ec_stack: member(ec, "vm_stack")?,
        ec_stack_size: member(ec, "vm_stack_size")?,
        ec_frame: agreed(ec, "cfp", &derived.cfp)?,
        ec_thread: agreed(ec, "thread_ptr", &derived.thread_ptr)?,
        thread_ec: member(thread, "ec")?,
        thread_id: if place == StackPath::GLOBAL { member(thread, "thread_id")? } else { 0 },
        frame_size: frame.size,
        frame_pc: member(frame, "pc")?,
        frame_iseq: member(frame, "iseq")?,
        frame_ep: member(frame, "ep")?,
        frame_jit: frame.field("jit_return").map_or(0, |field| field.offset),
        mode_shift: table.mode_bits.0,
        compacting_mask: table.bit_field("flags.during_compacting").map_or(0, |bit| 1 << bit.first),
        // The members for names are added later.
        ..StackPath::default()
    };
    let last_word = path.frame_size.checked_sub(8).ok_or(NoStacks::Shape("rb_control_frame_t"))?;
    let members = [path.frame_pc, path.frame_iseq, path.frame_ep, path.frame_jit];
    // A chunk of control frames holds a whole number of frames only at 56 and 64 bytes.
    if ![56, 64].contains(&path.frame_size)
        || members.iter().any(|&at| at > last_word || !at.is_multiple_of(8))
    {
        return Err(NoStacks::Shape("rb_control_frame_t"));
    }
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every release with a table has what a walk needs, in the shape that the kernel side reads; if the three structures of
    /// the walk are known, they equal those of the series.
    #[test]
    fn every_table() {
        for table in tables::tables() {
            let (major, minor, teeny) = table.to;
            let version = RubyVersion::new(major, minor, teeny);
            let structure = |tag| tables::newest_structure(version, tag).unwrap();
            let frame = structure("rb_control_frame_struct");
            assert!([56, 64].contains(&frame.size), "{version}: {}", frame.size);
            for name in ["pc", "iseq", "ep"] {
                let at = frame.field(name).unwrap().offset;
                assert!(at.is_multiple_of(8) && at + 8 <= frame.size, "{version}: {name} at {at}");
            }
            assert_eq!(frame.field("jit_return").is_some(), version.at_least(3, 1), "{version}");
            let ec = structure("rb_execution_context_struct");
            for name in ["vm_stack", "vm_stack_size", "cfp", "thread_ptr"] {
                assert!(ec.field(name).is_some(), "{version}: {name}");
            }
            let thread = structure("rb_thread_struct");
            assert!(thread.field("ec").is_some(), "{version}");
            assert!(version.at_least(3, 0) || thread.field("thread_id").is_some(), "{version}");
            for tag in ["rb_control_frame_struct", "rb_execution_context_struct", "rb_thread_struct"] {
                if let Some(own) = table.structure(tag) {
                    assert!(own.differences(structure(tag)).is_empty(), "{version}: {tag}");
                }
            }
        }
    }
}
