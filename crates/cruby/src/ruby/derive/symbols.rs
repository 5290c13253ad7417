//! The symbols that a function creates for its keys on its first call, and the variables that hold them.

use std::collections::BTreeMap;
use std::rc::Rc;

use super::{LIMITS, NotDerived, Session};
use crate::address::Svma;
use crate::ruby::eval::{Machine, STATIC_SYMBOL, SYMBOL_SHIFT, Value};

/// A symbol and the variable that holds it.
#[derive(Clone, Debug)]
pub(super) struct Symbol {
    pub(super) slot: Svma,
    /// The number that represents it.
    pub(super) value: i64,
    pub(super) name: String,
}

/// The symbols of one function, in the order of their variables.
#[derive(Clone, Debug)]
pub(super) struct Symbols {
    pub(super) all: Vec<Symbol>,
}

/// Values of a variable before the first call: 0, or `Qnil` (8 up to 3.1, 4 from 3.2 on).
const UNSET: [u64; 3] = [0, 8, 4];
/// A symbol that no function knows.
const STRANGER: i64 = 1 << 48 | STATIC_SYMBOL;

impl Symbols {
    /// Runs a function with its variables unset, so that it creates its symbols (`setup_gc_stat_symbols` in gc.c and similar
    /// functions).
    pub(super) fn of(session: &Session<'_>, name: &'static str) -> Result<Self, NotDerived> {
        let function = session.function(name)?;
        let runs = UNSET.map(|unset| {
            let mut assumptions = session.assumptions(BTreeMap::new(), 0);
            assumptions.global = unset;
            let mut machine = Machine::assuming(&session.program, &Rc::new(assumptions), None, LIMITS);
            session.set_key(&mut machine, STRANGER);
            // How it ends does not matter: up to 2.7 the function looks an unknown symbol up among the old keys.
            machine.run_to_end(function);
            found(session, &machine)
        });
        match runs.into_iter().max_by_key(Vec::len) {
            Some(all) if !all.is_empty() => Ok(Self { all }),
            _ => Err(NotDerived::NoSymbols(name.into())),
        }
    }

    /// The symbol with this name.
    pub(super) fn named(&self, name: &str) -> Option<&Symbol> {
        self.all.iter().find(|symbol| symbol.name == name)
    }

    /// The name of the symbol that this number represents.
    pub(super) fn name_of(&self, value: i64) -> Option<&str> {
        Some(&self.all.iter().find(|symbol| symbol.value == value)?.name)
    }
}

fn found(session: &Session<'_>, machine: &Machine<'_>) -> Vec<Symbol> {
    let symbol = |(slot, value): (Svma, &Value)| {
        let Value::Constant(value) = *value else { return None };
        let address = Svma((value >> SYMBOL_SHIFT).cast_unsigned());
        let is_symbol = value & ((1 << SYMBOL_SHIFT) - 1) == STATIC_SYMBOL;
        let name = session.image().c_string(address).filter(|_| is_symbol)?;
        let identifier = name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
        (identifier && !name.is_empty()).then(|| Symbol { slot, value, name: name.to_owned() })
    };
    let mut all: Vec<Symbol> = machine.globals().filter_map(symbol).collect();
    all.sort_by_key(|symbol| symbol.slot);
    all
}
