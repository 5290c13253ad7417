//! `GC.latest_gc_info` (gc.c, from 3.4 on gc/default/default.c: `gc_info_decode`): which words of the objspace it
//! decodes. A word is accepted if every flag in it makes the function return the meaning of that flag, and if no other
//! word does.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use serde::{Deserialize, Serialize};

use super::symbols::Symbols;
use super::{NotDerived, Session};
use crate::address::Svma;
use crate::ruby::eval::{Ending, Value};
use crate::ruby::formula::{Formula, Piece};
use crate::ruby::stat::{Sign, gpr};
use crate::ruby::vm_path::VmPath;

const FUNCTION: &str = "rb_gc_latest_gc_info";
/// `Qtrue` and `Qfalse` (`special_consts.h`).
const TRUE: i64 = 0x14;
const FALSE: i64 = 0;
/// `Qnil`: 8 up to 3.1, 4 from 3.2 on.
const NIL: [i64; 2] = [8, 4];
/// Maximum number of words that one key may read.
const MAX_WORDS: usize = 8;

/// The words that `GC.latest_gc_info` reads, as byte offsets in the objspace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InfoLayout {
    /// The 32-bit word `profile.latest_gc_info`.
    pub latest_gc_info: Result<u32, NotDerived>,
    /// The 32-bit word `rgengc.need_major_gc` (3.2 and later).
    pub need_major_gc: Result<u32, NotDerived>,
    /// First bit of `flags.mode` in the flags word; the field has two bits.
    pub mode_bit: Result<u32, NotDerived>,
    /// `profile.weak_references_count` (3.3 and later).
    pub weak_references_count: Result<Piece, NotDerived>,
    /// `profile.retained_weak_references_count` (3.3 and later).
    pub retained_weak_references_count: Result<Piece, NotDerived>,
}

/// What the function must return for a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Symbol(&'static str),
    Bool(bool),
    Nil,
}

pub(super) fn derive(session: &Session<'_>, vm: &VmPath) -> InfoLayout {
    let decoder = session
        .function(FUNCTION)
        .and_then(|function| Ok(Decoder { session, function, symbols: Symbols::of(session, FUNCTION)? }));
    let with = |derive: &dyn Fn(&Decoder<'_>) -> Result<u32, NotDerived>| {
        decoder.as_ref().map_err(Clone::clone).and_then(derive)
    };
    let count = |name| decoder.as_ref().map_err(Clone::clone).and_then(|decoder| decoder.count(name));
    InfoLayout {
        latest_gc_info: with(&|decoder| decoder.latest_gc_info()),
        need_major_gc: with(&|decoder| decoder.word("need_major_by", &flags(&gpr::MAJOR_BY))),
        mode_bit: with(&|decoder| decoder.mode_bit(vm.flags)),
        weak_references_count: count("weak_references_count"),
        retained_weak_references_count: count("retained_weak_references_count"),
    }
}

/// Each flag alone gives its symbol; no flag gives nil.
fn flags(names: &[(u32, &'static str)]) -> Vec<(u32, Answer)> {
    let all = names.iter().fold(0, |all, (flag, _)| all | flag);
    let each = names.iter().map(|&(flag, name)| (flag, Answer::Symbol(name)));
    each.chain([(0, Answer::Nil), (!all, Answer::Nil)]).collect()
}

/// The flag gives true, all other flags without it false.
fn flag(flag: u32) -> Vec<(u32, Answer)> {
    vec![(flag, Answer::Bool(true)), (0, Answer::Bool(false)), (!flag, Answer::Bool(false))]
}

struct Decoder<'a> {
    session: &'a Session<'a>,
    function: Svma,
    symbols: Symbols,
}

impl Decoder<'_> {
    /// The word with the reason, finalizers and sweeping of the latest GC; all four keys must agree on it.
    fn latest_gc_info(&self) -> Result<u32, NotDerived> {
        let found = [
            ("have_finalizer", self.word("have_finalizer", &flag(gpr::HAVE_FINALIZE))?),
            ("immediate_sweep", self.word("immediate_sweep", &flag(gpr::IMMEDIATE_SWEEP))?),
            ("major_by", self.word("major_by", &flags(&gpr::MAJOR_BY))?),
            ("gc_by", self.word("gc_by", &flags(&gpr::BY))?),
        ];
        let [(name, offset), rest @ ..] = found;
        match rest.iter().find(|(_, other)| *other != offset) {
            None => Ok(offset),
            Some((other, elsewhere)) => Err(NotDerived::Contradiction(format!(
                "`{name}` is read at {offset:#x} and `{other}` at {elsewhere:#x}"
            ))),
        }
    }

    /// The only word of the objspace for which the key's value matches the cases.
    fn word(&self, key: &'static str, cases: &[(u32, Answer)]) -> Result<u32, NotDerived> {
        let words = self.words_read(key)?;
        let mut fitting = words.into_iter().filter(|&word| self.answers(key, word, cases));
        match (fitting.next(), fitting.next()) {
            (Some(word), None) => u32::try_from(word).map_err(|_| NotDerived::Lost(FUNCTION.into())),
            _ => Err(NotDerived::Contradiction(format!("no single word of the objspace decides `{key}`"))),
        }
    }

    /// `state` is decoded from two neighbouring bits of the flags word (`enum gc_mode`).
    fn mode_bit(&self, flags: u32) -> Result<u32, NotDerived> {
        let cases = |bit: u32| {
            [
                (1 << bit, Answer::Symbol("marking")),
                (2 << bit, Answer::Symbol("sweeping")),
                (3 << bit, Answer::Symbol("sweeping")),
                (0, Answer::Symbol("none")),
                (!(3 << bit), Answer::Symbol("none")),
            ]
        };
        let mut fitting = (0..31).filter(|&bit| self.answers("state", flags.into(), &cases(bit)));
        match (fitting.next(), fitting.next()) {
            (Some(bit), None) => Ok(bit),
            _ => {
                Err(NotDerived::Contradiction("`state` is not decoded from two bits of the flags".to_owned()))
            }
        }
    }

    /// A counter that is returned as a Fixnum.
    fn count(&self, key: &'static str) -> Result<Piece, NotDerived> {
        let value = self.run(key, BTreeMap::new())?;
        let size = value.clone().fixnum().ok_or_else(|| NotDerived::Shape(value.to_string()))?;
        let formula = Formula::of(&size, self.session)?;
        match (&formula.terms[..], &formula) {
            ([(Sign::Plus, piece)], Formula { divisor: 1, outside: 0, .. }) => Ok(*piece),
            _ => Err(NotDerived::Shape(formula.to_string())),
        }
    }

    fn answers(&self, key: &'static str, word: i64, cases: &[(u32, Answer)]) -> bool {
        cases.iter().all(|&(bits, answer)| {
            let words = BTreeMap::from([(word, bits)]);
            let assumptions = self.session.assumptions(words.clone(), 0);
            let Ok(value) = self.run(key, words) else { return false };
            let Some(number) = assumptions.number(&value).map(u64::cast_signed) else { return false };
            match answer {
                Answer::Symbol(name) => self.symbols.name_of(number) == Some(name),
                Answer::Bool(truth) => number == if truth { TRUE } else { FALSE },
                Answer::Nil => NIL.contains(&number),
            }
        })
    }

    /// The 32-bit words of the objspace that the key's value may depend on.
    fn words_read(&self, key: &'static str) -> Result<BTreeSet<i64>, NotDerived> {
        let symbol = self.symbols.named(key).ok_or(NotDerived::UnknownKey(FUNCTION.into()))?;
        let assumptions = Rc::new(self.session.assumptions(BTreeMap::new(), 0));
        let run = self.session.run(self.function, &self.symbols, symbol.value, &assumptions, None);
        let Ending::Returned(value) = run.ending else { return Err(NotDerived::Lost(FUNCTION.into())) };
        let mut words = BTreeSet::new();
        for value in run.guards.iter().flat_map(|guard| guard.flags.values()).chain([&value]) {
            value.for_each_load(&mut |base, offset, size| {
                if *base == self.session.objspace {
                    words.insert(offset & !3);
                    words.insert(offset.saturating_add(i64::from(size) - 1) & !3);
                }
            });
        }
        if words.len() > MAX_WORDS {
            return Err(NotDerived::Contradiction(format!("`{key}` depends on {} words", words.len())));
        }
        Ok(words)
    }

    fn run(&self, key: &'static str, words: BTreeMap<i64, u32>) -> Result<Value, NotDerived> {
        let symbol = self.symbols.named(key).ok_or(NotDerived::UnknownKey(FUNCTION.into()))?;
        let assumptions = Rc::new(self.session.assumptions(words, 0));
        match self.session.run(self.function, &self.symbols, symbol.value, &assumptions, None).ending {
            Ending::Returned(value) => Ok(value),
            Ending::Left => Err(NotDerived::UnknownKey(FUNCTION.into())),
            Ending::Lost => Err(NotDerived::Lost(FUNCTION.into())),
        }
    }
}
