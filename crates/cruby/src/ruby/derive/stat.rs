//! `GC.stat` (gc.c: `gc_stat_internal`; from 3.4 on gc/default/default.c: `rb_gc_impl_stat`), key by key.

use std::collections::BTreeMap;
use std::rc::Rc;

use gctrace_common::config::Span;
use iced_x86::ConditionCode;
use serde::{Deserialize, Serialize};

use super::ec::CurrentEc;
use super::formula;
use super::symbols::Symbols;
use super::{MAX_GUARDS, NotDerived, Session};
use crate::address::Svma;
use crate::ruby::eval::{Assumptions, Ending, Flags, Guard, Value};
use crate::ruby::formula::{Formula, Piece};
use crate::ruby::stat::Sign;
use crate::ruby::vm_path::VmPath;

const FUNCTION: &str = "rb_gc_stat";
const FIRST: &str = "count";
/// Assumed value of every counter: no pointer is null, and no counter exceeds a Fixnum.
const COUNTER: u64 = 0x40;

/// A key of `GC.stat` as the code computes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DerivedKey {
    /// Its name.
    pub name: String,
    /// Its formula, or the reason why there is none.
    pub formula: Result<Formula, NotDerived>,
}

/// The keys in the order of their variables, which is the order in which `GC.stat` returns them up to 4.0.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DerivedStat {
    /// The keys.
    pub keys: Vec<DerivedKey>,
}

impl DerivedStat {
    /// The formula of this key.
    pub fn formula(&self, name: &str) -> Option<&Formula> {
        self.keys.iter().find(|key| key.name == name)?.formula.as_ref().ok()
    }

    /// Why this key has no formula.
    pub(in crate::ruby) fn reason(&self, name: &str) -> String {
        match self.keys.iter().find(|key| key.name == name) {
            Some(DerivedKey { formula: Err(reason), .. }) => reason.to_string(),
            _ => NotDerived::UnknownKey(FUNCTION.into()).to_string(),
        }
    }

    /// Number of keys with a formula.
    pub fn derived(&self) -> usize {
        self.keys.iter().filter(|key| key.formula.is_ok()).count()
    }
}

pub(super) fn derive(session: &Session<'_>, vm: &VmPath) -> Result<DerivedStat, NotDerived> {
    let function = session.function(FUNCTION)?;
    let symbols = Symbols::of(session, FUNCTION)?;
    let assumptions = Rc::new(session.assumptions(BTreeMap::new(), COUNTER));
    // Other symbols of gc.c may precede the array of the keys, which starts with `count`.
    let first = symbols.all.iter().position(|symbol| symbol.name == FIRST).unwrap_or(symbols.all.len());
    let mut keys: Vec<DerivedKey> = symbols.all[first..]
        .iter()
        .map(|symbol| DerivedKey {
            name: symbol.name.clone(),
            formula: key(session, function, &symbols, symbol.value, &assumptions),
        })
        // Names that only older releases have, or that only have a symbol.
        .filter(|key| key.formula != Err(NotDerived::UnknownKey(FUNCTION.into())))
        .collect();
    refuse_shared(&mut keys);
    check_first(&keys, vm)?;
    Ok(DerivedStat { keys })
}

/// The formula of one key; it must be the same on every path through the code.
fn key(
    session: &Session<'_>,
    function: Svma,
    symbols: &Symbols,
    key: i64,
    assumptions: &Rc<Assumptions>,
) -> Result<Formula, NotDerived> {
    let run = session.run(function, symbols, key, assumptions, None);
    let value = match session.number(run.ending) {
        Ending::Returned(value) => value,
        Ending::Left => return Err(NotDerived::UnknownKey(FUNCTION.into())),
        Ending::Lost => return Err(NotDerived::Lost(FUNCTION.into())),
    };
    let mut formula = Formula::of(&value, session)?;
    if run.guards.len() > MAX_GUARDS {
        return Err(NotDerived::Condition(format!("{} of them", run.guards.len())));
    }
    for guard in &run.guards {
        let other = session.run(function, symbols, key, assumptions, Some(guard.clone()));
        let same = match &session.number(other.ending) {
            // It raises, or makes a Bignum.
            Ending::Left => true,
            Ending::Lost => false,
            Ending::Returned(Value::Constant(0)) => guards_pointer(guard, &formula, &session.objspace),
            Ending::Returned(value) => Formula::of(value, session).is_ok_and(|other| {
                formula.outside = formula.outside.max(other.outside);
                other.agrees_with(&formula) || adds_nothing(guard, &formula, &other, session)
            }),
        };
        if !same {
            return Err(NotDerived::Condition(describe(guard)));
        }
    }
    if let Some((place, guard)) = run.guards.iter().find_map(|guard| Some((thread_local(guard)?, guard))) {
        match local_use(session, function, symbols, key) {
            Some(LocalUse::None) => {}
            Some(LocalUse::Added)
                if formula.divisor == 1 && session.thread.borrow_mut().meets_local(place) =>
            {
                formula.terms.push((Sign::Signed, Piece { via: Span::LOCAL, offset: 0, size: 4 }));
                formula.terms.sort_unstable();
                formula.outside = 0;
            }
            _ => return Err(NotDerived::Condition(describe(guard))),
        }
    }
    Ok(formula)
}

/// How a thread-local variable affects a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LocalUse {
    None,
    /// It is added; the sum is clamped at 0.
    Added,
}

/// From 4.0 on each thread has a signed count of its own that is added to a counter when the counter is read; the
/// result is clamped at 0 (`malloc_increase_local_flush`). Runs the code with several numbers to see whether the key is
/// such a counter.
fn local_use(session: &Session<'_>, function: Svma, symbols: &Symbols, key: i64) -> Option<LocalUse> {
    let with = |number: i32| {
        let mut assumptions = session.assumptions(BTreeMap::new(), COUNTER);
        assumptions.narrow = u64::from(number.cast_unsigned());
        let assumptions = Rc::new(assumptions);
        match session.number(session.run(function, symbols, key, &assumptions, None).ending) {
            Ending::Returned(value) => assumptions.number(&value),
            _ => None,
        }
    };
    let (without, less, more) = (with(0)?, with(-5)?, with(5)?);
    if (less, more) == (without, without) {
        return Some(LocalUse::None);
    }
    let added = less.checked_add(5) == Some(without) && without + 5 == more && with(-5000)? == 0;
    added.then_some(LocalUse::Added)
}

/// The place of a 32-bit thread-local variable that the condition tests.
fn thread_local(guard: &Guard) -> Option<CurrentEc> {
    let mut found = None;
    for value in guard.flags.values() {
        value.for_each_load(&mut |base, offset, size| {
            if size == 4 && !matches!(base, Value::Image(_)) {
                found = found.or(CurrentEc::at(base, offset));
            }
        });
    }
    found
}

/// Whether the condition tests the pointer that the formula follows for null, in which case the value is 0 (`rb_darray_size`).
fn guards_pointer(guard: &Guard, formula: &Formula, objspace: &Value) -> bool {
    let Flags::Compare { left, right: Value::Constant(0), size: 8 } = &guard.flags else { return false };
    let [(Sign::Plus, Piece { via, .. })] = formula.terms[..] else { return false };
    guard.code == ConditionCode::e && *left == Value::load(objspace.clone(), via.into(), 8)
}

/// Whether the condition is that a term of the formula is 0, and the other formula is the same without that term: the
/// count of a cache is added only if it is not 0 (`gc_bump_flush_alloc_count`, from 4.1 on).
fn adds_nothing(guard: &Guard, formula: &Formula, other: &Formula, session: &Session<'_>) -> bool {
    let Flags::Compare { left, right: Value::Constant(0), size: 8 } = &guard.flags else { return false };
    let Some(term) = formula::field(left, session).filter(|_| guard.code == ConditionCode::e) else {
        return false;
    };
    let mut rest = formula.clone();
    let Some(at) = rest.terms.iter().position(|&(_, piece)| piece == term) else { return false };
    rest.terms.remove(at);
    rest.terms.iter().all(|&(_, piece)| piece != term) && other.agrees_with(&rest)
}

fn describe(guard: &Guard) -> String {
    let values: Vec<String> = guard.flags.values().map(ToString::to_string).collect();
    let text = format!("{:?} of {}", guard.code, values.join(" and "));
    text.chars().take(160).collect()
}

/// Refuses two keys with the same formula: the code was misread somewhere.
fn refuse_shared(keys: &mut [DerivedKey]) {
    for index in 1..keys.len() {
        let (before, rest) = keys.split_at_mut(index);
        let Ok(formula) = &rest[0].formula else { continue };
        let same = |key: &&mut DerivedKey| key.formula.as_ref().is_ok_and(|other| other.agrees_with(formula));
        if let Some(first) = before.iter_mut().find(same) {
            first.formula = Err(NotDerived::Shared(rest[0].name.clone()));
            rest[0].formula = Err(NotDerived::Shared(first.name.clone()));
        }
    }
}

/// The first key must be what `rb_gc_count` returns. This guards against names and formulas that are shifted against
/// each other.
fn check_first(keys: &[DerivedKey], vm: &VmPath) -> Result<(), NotDerived> {
    let expected = Formula::new(vec![(Sign::Plus, Piece::direct(vm.count, 8))], 1);
    let first = keys.first().ok_or(NotDerived::NoSymbols(FUNCTION.into()))?;
    match &first.formula {
        Err(reason) => {
            Err(NotDerived::Condition(format!("the first key of {FUNCTION} is not derived: {reason}")))
        }
        Ok(formula) if !formula.agrees_with(&expected) => Err(NotDerived::Contradiction(format!(
            "its first key is {formula}, and rb_gc_count returns {expected}"
        ))),
        Ok(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::debian::libruby_bytes;
    use crate::elf::ElfImage;
    use crate::ruby::code::Code;

    /// The formula of a key that this code computes, with the objspace in rdx.
    fn formula(code: &[u8]) -> Result<Formula, NotDerived> {
        let mut bytes = libruby_bytes().to_vec();
        let image = ElfImage::read(&bytes[..]).unwrap();
        let vm = VmPath::derive(&Code::new(&image)).unwrap();
        let function = image.symbol("rb_gc_stat").unwrap().address;
        let slot = image.slots_of(vm.vm_ptr).next().unwrap();
        let distance = slot.0.wrapping_sub(function.0 + 7) as u32;
        // mov rax, [rip+slot]; mov rax, [rax]; mov rdx, [rax+objspace]
        let head = [&[0x48, 0x8b, 0x05][..], &distance.to_le_bytes(), &[0x48, 0x8b, 0x00, 0x48, 0x8b, 0x90]];
        let code = [&head.concat(), &vm.vm_objspace.to_le_bytes()[..], code].concat();
        let at = image.svma_to_file_offset(function).unwrap().0 as usize;
        bytes[at..at + code.len()].copy_from_slice(&code);
        let image = ElfImage::read(&bytes[..]).unwrap();
        let code = Code::new(&image);
        let session = Session::new(&code, &vm);
        let assumptions = Rc::new(session.assumptions(BTreeMap::new(), COUNTER));
        key(&session, function, &Symbols { all: Vec::new() }, 0, &assumptions)
    }

    /// A counter that is added only if it is not 0 belongs to the sum; one that is added only if another is not 0 makes
    /// the sum depend on a condition.
    #[test]
    fn added_if_not_zero() {
        // mov rax, [rdx+16]; mov rcx, [rdx+24]
        let load = [0x48, 0x8b, 0x42, 16, 0x48, 0x8b, 0x4a, 24];
        // test rcx, rcx; je +3; add rax, rcx; ret
        let own = [0x48, 0x85, 0xc9, 0x74, 3, 0x48, 0x01, 0xc8, 0xc3];
        let sum =
            Formula::new(vec![(Sign::Plus, Piece::direct(16, 8)), (Sign::Plus, Piece::direct(24, 8))], 1);
        assert_eq!(formula(&[&load[..], &own].concat()), Ok(sum));
        // cmp qword [rdx+32], 0; je +3; add rax, rcx; ret
        let other = [0x48, 0x83, 0x7a, 32, 0, 0x74, 3, 0x48, 0x01, 0xc8, 0xc3];
        let reason = formula(&[&load[..], &other].concat()).unwrap_err();
        assert!(matches!(reason, NotDerived::Condition(_)), "{reason}");
        // test rcx, rcx; je +6; add rax, rcx; add rax, rcx; ret
        let twice = [0x48, 0x85, 0xc9, 0x74, 6, 0x48, 0x01, 0xc8, 0x48, 0x01, 0xc8, 0xc3];
        assert!(formula(&[&load[..], &twice].concat()).is_err());
    }
}
