//! Layouts derived from the code of the image: the fields that `GC.stat` sums and `GC.latest_gc_info` decodes, read from
//! the functions that do so.
//!
//! `rb_gc_stat` and `rb_gc_latest_gc_info` are exported by every CRuby. They are run symbolically once per key, with
//! that key as their argument; the return value is the key's formula over the objspace. Every condition on memory that
//! the run reached is also tried the other way, and a key counts as derived only if the formula stays the same.

mod ec;
mod formula;
mod globals;
mod info;
mod shapes;
mod stat;
mod symbol_table;
mod symbols;
#[cfg(test)]
mod tests;
mod thread;

pub use ec::{CurrentEc, EcLayout};
pub use globals::{DataRange, Functions, GlobalTable};
pub use info::InfoLayout;
pub use shapes::ShapeList;
pub use stat::{DerivedKey, DerivedStat};
pub use symbol_table::SymbolTable;
pub use thread::ThreadLayout;

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use serde::{Deserialize, Serialize};

use super::code::Code;
use super::eval::{Assumptions, Ending, Guard, Limits, Machine, Program, Value};
use super::vm_path::{Accessors, VmPath};
use crate::address::Svma;
use crate::elf::ElfImage;
use symbols::Symbols;

/// Maximum number of instructions for all runs over one image together; the largest unoptimised build needs a third of them.
const STEPS: u32 = 400_000;
/// Limits of one run. Functions that serve one key are small; those that know all keys reach 30 KiB in unoptimised
/// builds.
const LIMITS: Limits =
    Limits { steps: 30_000, depth: 8, function: 0x10000, callee: 0x10000, exported: is_accessor };
/// Maximum number of conditions of one run that are tried the other way; a run with more cannot be derived.
const MAX_GUARDS: usize = 24;

/// Why something could not be derived.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum NotDerived {
    /// A function from which the derivation starts is not in the image.
    #[error("no function {0}")]
    Missing(Cow<'static, str>),
    /// The code could not be followed to the end.
    #[error("the code of {0} could not be followed")]
    Lost(Cow<'static, str>),
    /// The function's keys were not found.
    #[error("{0} does not create symbols for its keys")]
    NoSymbols(Cow<'static, str>),
    /// The key is unknown to this function.
    #[error("{0} does not know this key")]
    UnknownKey(Cow<'static, str>),
    /// The returned value is not a sum over the objspace.
    #[error("it is {0}, which is not a sum over the objspace")]
    Shape(String),
    /// This release does not have it.
    #[error("it is not part of this release")]
    NoSuch,
    /// It depends on a condition that is not understood.
    #[error("it depends on a condition: {0}")]
    Condition(String),
    /// Another key has the same formula.
    #[error("{0} is computed in the same way")]
    Shared(String),
    /// The code contradicts a known fact.
    #[error("{0}")]
    Contradiction(String),
}

/// Whether an exported function is on the path to the objspace or the running context; all others do something else.
fn is_accessor(name: &str) -> bool {
    ["rb_gc_", "rb_current_", "rb_ec_"].iter().any(|prefix| name.starts_with(prefix))
}

/// Everything that was derived from one image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Derivation {
    /// The `GC.stat` keys.
    pub stat: Result<DerivedStat, NotDerived>,
    /// The words that `GC.latest_gc_info` reads.
    pub info: InfoLayout,
    /// The path to the running thread and its frames.
    pub ec: EcLayout,
    /// The path to the VM's per-thread and per-Ractor data (4.0 and later).
    pub thread: Result<ThreadLayout, NotDerived>,
    /// Where the names of methods are.
    pub symbols: Result<SymbolTable, NotDerived>,
    /// Where the shapes of objects are (3.2 and later).
    pub shapes: Result<ShapeList, NotDerived>,
    /// Where the table of global variables can be.
    pub globals: Result<GlobalTable, NotDerived>,
    /// Where the table of the instance variables of objects of C code can be (up to 3.4).
    pub other_variables: Result<DataRange, NotDerived>,
    /// Number of instructions that were run.
    pub steps: u32,
}

impl Derivation {
    /// Derives everything from the code of the image. A pure function of the image.
    pub(super) fn of(code: &Code<'_>, vm: &VmPath) -> Self {
        let session = Session::new(code, vm);
        let stat = stat::derive(&session, vm);
        let info = info::derive(&session, vm);
        let ec = ec::derive(code);
        let thread = thread::layout(&session, &ec);
        let symbols = symbol_table::derive(&session);
        let shapes = shapes::derive(code);
        let globals = globals::globals(code.image);
        let other_variables = globals::other_variables(code.image);
        let steps = STEPS - session.program.steps_left();
        Self { stat, info, ec, thread, symbols, shapes, globals, other_variables, steps }
    }

    /// The same for a GC library; everything outside the GC is taken from the Ruby that it belongs to.
    pub(super) fn of_library(code: &Code<'_>, vm: &VmPath, ruby: &Self, landmark: Svma) -> Self {
        let session = Session::new(code, vm);
        let stat = stat::derive(&session, vm);
        let info = info::derive(&session, vm);
        let thread = thread::library_layout(&session, &ruby.thread, landmark);
        let steps = STEPS - session.program.steps_left();
        let (ec, symbols, shapes) = (ruby.ec.clone(), ruby.symbols.clone(), ruby.shapes.clone());
        let (globals, other_variables) = (ruby.globals.clone(), ruby.other_variables.clone());
        Self { stat, info, ec, thread, symbols, shapes, globals, other_variables, steps }
    }
}

/// The objspace as `rb_gc_count` reaches it, or as a GC implementation receives it as an argument.
fn objspace(vm: &VmPath) -> Value {
    if let Accessors::Implementation = vm.accessors() {
        return Value::Argument(0);
    }
    let vm_pointer = Value::load(Value::Image(vm.vm_ptr.0), 0, 8);
    Value::load(vm_pointer, vm.vm_objspace.into(), 8)
}

/// The runs over one image.
struct Session<'a> {
    program: Rc<Program<'a>>,
    objspace: Value,
    accessors: Accessors,
    /// What the formulas have shown so far of the path to per-thread data.
    thread: RefCell<thread::Seen>,
}

/// How a run ended, and the conditions on which it depended.
struct Run {
    ending: Ending,
    guards: Vec<Guard>,
}

/// `Qundef` (`special_consts.h`): a GC implementation does not know the key.
const UNDEFINED: i64 = 0x24;

impl<'a> Session<'a> {
    fn new(code: &'a Code<'a>, vm: &VmPath) -> Self {
        let program = Rc::new(Program::new(code, STEPS));
        Session { program, objspace: objspace(vm), accessors: vm.accessors(), thread: RefCell::default() }
    }

    /// Passes a key to a function that decodes keys.
    fn set_key(&self, machine: &mut Machine<'_>, key: i64) {
        let index = match self.accessors {
            Accessors::Vm => 0,
            Accessors::Implementation => 1,
        };
        machine.set_argument(index, Value::Constant(key));
    }

    /// The number with which a run over the function behind `GC.stat` ended: `rb_gc_stat` returns it, an implementation
    /// converts it to a Fixnum.
    fn number(&self, ending: Ending) -> Ending {
        match (self.accessors, ending) {
            (Accessors::Implementation, Ending::Returned(Value::Constant(UNDEFINED))) => Ending::Left,
            (Accessors::Implementation, Ending::Returned(value)) => {
                value.fixnum().map_or(Ending::Lost, Ending::Returned)
            }
            (_, ending) => ending,
        }
    }

    fn image(&self) -> &'a ElfImage {
        self.program.image()
    }

    fn function(&self, name: &'static str) -> Result<Svma, NotDerived> {
        let name = self.accessors.function(name);
        Ok(self.image().symbol(name).ok_or(NotDerived::Missing(name.into()))?.address)
    }

    /// Assumed contents of memory: given words of the objspace, and one number for every other field of it. Everything else
    /// is a pointer to an object.
    fn assumptions(&self, words: BTreeMap<i64, u32>, field: u64) -> Assumptions {
        const POINTER: u64 = 0x7d12_3456_7800;
        Assumptions {
            object: self.objspace.clone(),
            words,
            field,
            global: POINTER,
            other: POINTER,
            narrow: 0,
        }
    }

    /// Runs a function that decodes a key.
    fn run(
        &self,
        function: Svma,
        symbols: &Symbols,
        key: i64,
        assumptions: &Rc<Assumptions>,
        other_way: Option<Guard>,
    ) -> Run {
        let mut machine = Machine::assuming(&self.program, assumptions, other_way, LIMITS);
        for symbol in &symbols.all {
            machine.set_global(symbol.slot, Value::Constant(symbol.value));
        }
        self.set_key(&mut machine, key);
        let ending = machine.run_to_end(function);
        Run { ending, guards: machine.guards().to_vec() }
    }
}
