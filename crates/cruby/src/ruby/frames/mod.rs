//! Turns the addresses of a Ruby stack into names: iseqs, method entries, symbols, classes and lines, read from the process.
//!
//! A frame is named as the running Ruby's own `caller_locations` would: the same frames, the same label, path and line.
//! On every release the method's class precedes its name, by the rule that CRuby itself follows from 3.4 on:
//! `Class#method`, `Class.method` for singleton methods of classes and modules, and no class if the class has no
//! permanent name or the singleton class belongs to something else. Frames of C functions have only a name, without file
//! and line: Ruby shows those of the caller there, which is the next Ruby frame.
//!
//! Up to 3.3 the label is the one that the compiler stored (`rescue in Foo#bar`), from 3.4 on the one that is composed
//! on demand (`Foo#bar` for the same frame). A method whose entry was not found ([`RubyFrame::METHOD_LOST`])
//! is named without class.
//!
//! Frames are read after they were sampled. Garbage collection may have freed or moved what they point to, so everything
//! is checked before it is used: the program counter must lie in the code found, the method entry must belong to that
//! code, a C function's entry must still have the same definition, the name of an id must be stored beside the symbol
//! with that id, and earlier results are read again once the process has been through another collection. Failures are
//! counted as stale. One case is not detected: code and method entry were both freed, and another matching pair took the
//! places of both, down to the same address of the instructions.

mod cache;
mod checked;
mod class;
mod constants;
mod frame;
mod globals;
mod id_table;
mod iseq;
mod label;
mod layout;
mod locals;
mod method;
mod namer;
mod other_variables;
mod read;
mod symbol;
#[cfg(test)]
mod tests;
mod variables;
#[cfg(test)]
pub(crate) mod words;

use std::sync::Arc;

use gctrace_common::stack::RubyFrame;

pub use frame::{Frame, FrameKind};
pub use layout::FrameLayout;
pub use locals::LocalTable;
use namer::Shown;

/// Reads memory of one process. Implemented over `/proc/PID/mem` in `host` of the agent, and over byte images in tests.
pub trait Memory {
    /// Fills `buffer` from `address`; `false` if any byte of it could not be read.
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool;
}

/// Numbers of frames that were named or could not be named.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NameCounts {
    /// Frames to be named, without those that Ruby's own backtraces omit.
    pub asked: u64,
    /// Of these, named.
    pub named: u64,
    /// Of these, not named: the data at their address was not (or no longer) that of the frame that ran.
    pub stale: u64,
    /// Of these, not named: the process's memory could not be read (it has exited).
    pub unreadable: u64,
    /// Of these, not named: C functions in an image whose table of symbols is not known.
    pub no_symbols: u64,
}

/// What the leaf of a stack was doing when the stack was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaf {
    /// Anything.
    Runs,
    /// It allocated, or started a collection: one of its instructions was running.
    Allocates,
    /// It called something that is not among these frames: they are the outer part of a stack.
    Calls,
}

impl Leaf {
    /// What the frame at this index of the stack, from the leaf on, does.
    fn at(self, index: usize) -> At {
        if index == 0 && self == Self::Runs { At::Innermost } else { At::Calls }
    }
}

/// What a frame of Ruby code does.
#[derive(Clone, Copy, PartialEq, Eq)]
enum At {
    /// It calls the frame above, or is interrupted by it: its program counter is behind the call.
    Calls,
    /// It runs. Code of a just-in-time compiler does not store its counter when it begins, nor at each instruction: what is there may be zero, or
    /// the counter of code that ran at this place before (`gen_push_frame`, yjit/src/codegen.rs; "written by the callee frame on side-exits,
    /// non-leaf calls, or calls with GC", zjit/src/codegen.rs).
    Innermost,
}

/// Names the frames of one process and caches the results.
pub struct Namer<M> {
    names: namer::Names<M>,
    counts: NameCounts,
    shown: Vec<Shown>,
}

impl<M: Memory> Namer<M> {
    /// A namer for the process behind `memory`, whose image has this load bias.
    pub fn new(memory: M, layout: Arc<FrameLayout>, bias: u64) -> Self {
        Self {
            names: namer::Names::new(memory, layout, bias),
            counts: NameCounts::default(),
            shown: Vec::new(),
        }
    }

    /// Names a stack that was taken in this epoch ([`gctrace_common::stack::StackEvent::epoch`]) of the process, leaf
    /// first. The number of resulting frames is that of Ruby's own `caller`.
    ///
    /// Up to 3.2 the program counter of a frame that allocates points to the running instruction if that instruction calls no method, and
    /// behind it otherwise (`if (!leaf) ADD_PC`, `tool/ruby_vm/views/_insn_entry.erb`; from 3.3 on always behind it). With [`Leaf::Allocates`] the
    /// line is then the one that CRuby reports for allocations and GC events, that of the next instruction (`gc_event_hook_body`, gc.c: "increment PC
    /// because source line is calculated with PC-1"), but never that of a `leave`, which does not allocate: a method whose last expression allocates
    /// is not attributed to its `end`.
    pub fn name(&mut self, frames: &[RubyFrame], epoch: u64, leaf: Leaf, out: &mut Vec<Arc<Frame>>) {
        self.shown.clear();
        self.names.stack(frames, epoch, leaf, &mut self.shown);
        for shown in self.shown.drain(..) {
            self.counts.asked += 1;
            match shown.fate {
                Ok(()) => self.counts.named += 1,
                Err(namer::Unnamed::Stale) => self.counts.stale += 1,
                Err(namer::Unnamed::Unreadable) => self.counts.unreadable += 1,
                Err(namer::Unnamed::NoSymbols) => self.counts.no_symbols += 1,
            }
            out.push(shown.frame);
        }
    }

    /// The name of a class or module itself; `None`: it has no permanent name, like a singleton class, or it cannot be read.
    pub(in crate::ruby) fn own_name(&mut self, class: u64) -> Option<Arc<str>> {
        self.names.own_name(class)
    }

    /// The name of the class that `Object#class` returns for an object with this class pointer.
    pub(in crate::ruby) fn class_name(&mut self, class: u64) -> Option<Arc<str>> {
        self.names.class_name(class)
    }

    /// Passes the key and the value of each constant of a class or module to `visit`; `None` if they cannot be read.
    pub(in crate::ruby) fn constants(&mut self, class: u64, visit: &mut dyn FnMut(u32, u64)) -> Option<()> {
        self.names.constants(class, visit)
    }

    /// The name of a constant by its key.
    pub(in crate::ruby) fn constant_name(&mut self, key: u32) -> Option<Arc<str>> {
        self.names.constant_name(key)
    }

    /// Names of the instance variables and class variables of a class or module whose value satisfies `is_wanted`; `None` if
    /// they cannot be read.
    pub(in crate::ruby) fn class_variables(
        &mut self,
        class: u64,
        is_wanted: &mut dyn FnMut(u64) -> bool,
    ) -> Option<Vec<Arc<str>>> {
        self.names.class_variables(class, is_wanted)
    }

    /// Names of the global variables from which Ruby code reads a value that satisfies `is_wanted`; `None` if they cannot be read.
    pub(in crate::ruby) fn global_names(
        &mut self,
        is_wanted: &mut dyn FnMut(u64) -> bool,
    ) -> Option<Vec<Arc<str>>> {
        let mut found = self.names.globals()?;
        found.retain(|global| global.is_read && is_wanted(global.value));
        Some(found.into_iter().filter_map(|global| self.names.global_name(global.id)).collect())
    }

    /// The names under which `Thread#[]` reads a value that satisfies `is_wanted`; `None` if they cannot be read.
    pub(in crate::ruby) fn local_names(
        &mut self,
        table: LocalTable,
        is_wanted: &mut dyn FnMut(u64) -> bool,
    ) -> Option<Vec<Arc<str>>> {
        self.names.local_names(table, is_wanted)
    }

    /// Whether a hash holds the variables of the given `Thread`; `None` if that cannot be read.
    pub(in crate::ruby) fn has_thread_variables(&mut self, thread: u64, hash: u64) -> Option<bool> {
        self.names.has_thread_variables(thread, hash)
    }

    /// The class of an object with this class pointer; `None` if it cannot be read.
    pub(in crate::ruby) fn real_class(&self, class: u64) -> Option<u64> {
        self.names.real_class(class)
    }

    /// The name of a `Symbol`; `None`: it is not a `Symbol`, or it cannot be read.
    pub(in crate::ruby) fn symbol_name(&mut self, symbol: u64) -> Option<Arc<str>> {
        self.names.symbol_name(symbol)
    }

    /// The values that the collector marks through global variables; `None` if they cannot be read.
    pub(in crate::ruby) fn global_values(&mut self) -> Option<Vec<u64>> {
        Some(self.names.globals()?.into_iter().map(|global| global.value).collect())
    }

    /// The Ruby expression for a class or module: `Order`, or `Order.singleton_class`. `None`: it has no permanent name.
    pub(in crate::ruby) fn class_expression(&mut self, class: u64) -> Option<String> {
        self.names.class_expression(class)
    }

    /// Label, file and first line of the code at an address.
    pub(in crate::ruby) fn code_place(&mut self, iseq: u64) -> Option<(String, Arc<str>, u32)> {
        self.names.code_place(iseq)
    }

    /// The text of a `String`; `None`: it is not a `String`, or it cannot be read.
    pub fn text(&mut self, value: u64) -> Option<Arc<str>> {
        self.names.text(value)
    }

    /// The counts of all frames so far.
    pub fn counts(&self) -> NameCounts {
        self.counts
    }
}
