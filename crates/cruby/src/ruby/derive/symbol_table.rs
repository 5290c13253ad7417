//! The VM's table of symbols (`ruby_global_symbols`, symbol.c), which no library exports: `rb_id2str` reads it.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use serde::{Deserialize, Serialize};

use super::{LIMITS, NotDerived, Session};
use crate::address::Svma;
use crate::ruby::eval::{Ending, Machine, Value};

const FUNCTION: &str = "rb_id2str";
/// An id that is not an operator's.
const ID: i64 = 0x4321 << 4;
/// Byte offset of `ids` in `rb_symbols_t`, behind `last_id` (`next_id` from 4.0 on) and one pointer (2.6–4.0).
const IDS: u32 = 16;

/// Where the names of ids are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SymbolTable {
    /// The variable `ruby_global_symbols`.
    pub address: Svma,
    /// Byte offset in it of the array of names.
    pub ids: u32,
}

/// Global variables that a run read.
#[derive(Default)]
struct Reads {
    /// Variables of four bytes.
    narrow: BTreeSet<u64>,
    /// Variables that point to something else that was read.
    pointers: BTreeSet<u64>,
}

impl Reads {
    fn note(&mut self, value: &Value) {
        match value {
            Value::Load { base, offset, size } => {
                if let (Value::Image(address), 4) = (&**base, size) {
                    self.narrow.insert(address.wrapping_add_signed(*offset));
                }
                self.note_pointers(base);
                self.note(base);
            }
            Value::Bit { word: inner, .. } | Value::Low { value: inner, .. } => self.note(inner),
            Value::Sum(sum) => sum.terms.iter().for_each(|(_, value)| self.note(value)),
            Value::Binary(_, left, right) => {
                self.note(left);
                self.note(right);
            }
            _ => {}
        }
    }

    fn note_pointers(&mut self, base: &Value) {
        match base {
            Value::Load { base, offset, size: 8 } => {
                if let Value::Image(address) = **base {
                    self.pointers.insert(address.wrapping_add_signed(*offset));
                }
            }
            Value::Sum(sum) => sum.terms.iter().for_each(|(_, value)| self.note_pointers(value)),
            _ => {}
        }
    }
}

/// Runs `rb_id2str`: it compares the number of the symbol with the 32-bit number of all symbols, and then reads the
/// array of names. The table is the only variable used in both ways.
pub(super) fn derive(session: &Session<'_>) -> Result<SymbolTable, NotDerived> {
    let function = session.function(FUNCTION)?;
    let assumptions = Rc::new(session.assumptions(BTreeMap::new(), 0));
    let mut machine = Machine::assuming(&session.program, &assumptions, None, LIMITS);
    machine.set_argument(0, Value::Constant(ID));
    let ending = machine.run_to_end(function);
    let mut reads = Reads::default();
    machine.guards().iter().flat_map(|guard| guard.flags.values()).for_each(|value| reads.note(value));
    if let Ending::Returned(value) = &ending {
        reads.note(value);
    }
    let is_table = |address: &u64| reads.pointers.contains(&address.wrapping_add(IDS.into()));
    let mut found = reads.narrow.iter().copied().filter(is_table);
    let (Some(address), None) = (found.next(), found.next()) else {
        return Err(NotDerived::Lost(FUNCTION.into()));
    };
    let address = Svma(address);
    let named = session.image().symbol("ruby_global_symbols");
    if named.is_some_and(|symbol| symbol.address != address) {
        return Err(NotDerived::Contradiction(format!(
            "{FUNCTION} reads another table than ruby_global_symbols"
        )));
    }
    Ok(SymbolTable { address, ids: IDS })
}
