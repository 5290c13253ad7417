//! Decides which frames are shown, and caches what is known about them.

use std::{
    collections::{BTreeSet, HashMap, hash_map::Entry},
    sync::Arc,
};

use gctrace_common::stack::RubyFrame;

use super::{
    At, Frame, FrameKind, Leaf, Memory,
    cache::Cache,
    checked::{Checked, Trust},
    class::{self, Owner},
    constants,
    globals::{self, Global},
    iseq::{Body, Kind},
    label::Label,
    layout::{AsC, FrameLayout, VariablesAt},
    locals::{self, LocalTable},
    method::{self, MethodEntry},
    other_variables,
    read::{Failure, Reader, Result, T_CLASS, object_type},
    symbol, variables,
};

/// Capacity of each of the two generations of a cache, entries.
const CAPACITY: usize = 16 << 10;
/// Prefix of the paths of Ruby code inside CRuby.
const INTERNAL: &str = "<internal:";

/// The name of the instance variable that holds the variables of a thread (`idLocals`, id.def).
const THREAD_VARIABLES: &str = "locals";

/// A resulting frame.
pub(super) struct Shown {
    pub(super) frame: Arc<Frame>,
    pub(super) fate: std::result::Result<(), Unnamed>,
}

/// Why a frame has no name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unnamed {
    Stale,
    Unreadable,
    NoSymbols,
}

impl From<Failure> for Unnamed {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Stale => Self::Stale,
            Failure::Unreadable => Self::Unreadable,
        }
    }
}

/// An instruction sequence.
struct Code {
    /// Distinguishes it from everything else that was read.
    number: u64,
    body: Body,
    label: Label,
    path: Arc<str>,
    /// Whether backtraces show it as if it were a C function.
    as_c: bool,
    /// Whether backtraces show the method that contains it in that way.
    local_as_c: bool,
}

/// A method entry.
struct Method {
    number: u64,
    entry: MethodEntry,
    owner: Option<Owner>,
    /// For C functions: the name.
    name: Option<Arc<str>>,
}

/// Key of a frame of Ruby code: code, method, position.
type FrameKey = (u64, u64, Option<u32>);

/// Data read for the stack that is being named. Objects move, so it is not kept longer: an address alone does not identify
/// an object.
#[derive(Default)]
struct Lately {
    bodies: HashMap<u64, Body>,
    paths: HashMap<u64, Arc<str>>,
    owners: HashMap<u64, Option<Owner>>,
}

impl Lately {
    fn clear(&mut self) {
        self.bodies.clear();
        self.paths.clear();
        self.owners.clear();
    }
}

/// What is known of one process.
pub(super) struct Names<M> {
    reader: Reader<M>,
    lately: Lately,
    layout: Arc<FrameLayout>,
    bias: u64,
    numbers: u64,
    trust: Trust,
    codes: Cache<u64, Checked<Code>>,
    methods: Cache<u64, Checked<Method>>,
    /// Objects that environments hold in the place of a method entry, and the entry behind each.
    behind: Cache<u64, Checked<Option<u64>>>,
    /// Names of ids; they never change.
    ids: Cache<u64, Arc<str>>,
    units: symbol::Units,
    /// Address of the pointer to the table of global variables.
    globals: Option<u64>,
    frames: Cache<FrameKey, Arc<Frame>>,
    interned: BTreeSet<Arc<Frame>>,
}

impl<M: Memory> Names<M> {
    pub(super) fn new(memory: M, layout: Arc<FrameLayout>, bias: u64) -> Self {
        let alive = bias.wrapping_add(layout.vm_ptr.0);
        Self {
            reader: Reader { memory, alive },
            lately: Lately::default(),
            layout,
            bias,
            numbers: 0,
            trust: Trust::default(),
            codes: Cache::new(CAPACITY),
            methods: Cache::new(CAPACITY),
            behind: Cache::new(CAPACITY),
            ids: Cache::new(CAPACITY),
            units: symbol::Units::new(),
            globals: None,
            frames: Cache::new(CAPACITY),
            interned: BTreeSet::new(),
        }
    }

    /// The name of an object's class.
    pub(super) fn class_name(&mut self, class: u64) -> Option<Arc<str>> {
        let Self { reader, layout, bias, ids, units, .. } = self;
        let mut id_name = |id| id_name(reader, layout, *bias, ids, units, id);
        class::real_name(reader, class, layout, &mut id_name).ok().flatten()
    }

    /// The class of an object with this class pointer; `None` if there is none, or if the place of superclasses is not known.
    pub(super) fn real_class(&self, class: u64) -> Option<u64> {
        let real = class::real(&self.reader, class, &self.layout).ok().flatten()?;
        let flags = self.reader.word(real).ok()?;
        (object_type(flags) == T_CLASS).then_some(real)
    }

    /// Passes the key and the value of each constant of a class or module to `visit`; `None` if they cannot be read.
    pub(super) fn constants(&mut self, class: u64, visit: &mut dyn FnMut(u32, u64)) -> Option<()> {
        constants::each(&self.reader, class, self.layout.class.constants, visit).ok().flatten()
    }

    /// The name of a constant by its key in a table.
    pub(super) fn constant_name(&mut self, key: u32) -> Option<Arc<str>> {
        let Self { reader, layout, bias, ids, units, .. } = self;
        constants::ids(key)
            .into_iter()
            .find_map(|id| id_name(reader, layout, *bias, ids, units, id).ok().flatten())
    }

    /// Names of the variables of a class or module that have a wanted value. Hidden variables have other names, or no name.
    pub(super) fn class_variables(
        &mut self,
        class: u64,
        is_wanted: &mut dyn FnMut(u64) -> bool,
    ) -> Option<Vec<Arc<str>>> {
        let Self { reader, layout, bias, ids, units, .. } = self;
        let found = variables::find(reader, class, *bias, layout.class.variables, is_wanted).ok()??;
        let names = found.into_iter().filter_map(|id| id_name(reader, layout, *bias, ids, units, id).ok()?);
        Some(names.filter(|name| name.starts_with('@')).collect())
    }

    /// The global variables that have a value; `None` if they cannot be read.
    pub(super) fn globals(&mut self) -> Option<Vec<Global>> {
        let at = self.layout.globals?;
        let (pointer, found) = globals::read(&self.reader, &at, self.bias, self.globals).ok()??;
        self.globals = Some(pointer);
        Some(found)
    }

    /// The name of a global variable by its id.
    pub(super) fn global_name(&mut self, id: u64) -> Option<Arc<str>> {
        let Self { reader, layout, bias, ids, units, .. } = self;
        id_name(reader, layout, *bias, ids, units, id).ok()?.filter(|name| name.starts_with('$'))
    }

    /// The names of thread locals that have a wanted value.
    pub(super) fn local_names(
        &mut self,
        table: LocalTable,
        is_wanted: &mut dyn FnMut(u64) -> bool,
    ) -> Option<Vec<Arc<str>>> {
        let Self { reader, layout, bias, ids, units, .. } = self;
        let found = locals::find(reader, table, is_wanted).ok()?;
        let mut name = |id| id_name(reader, layout, *bias, ids, units, id).ok().flatten();
        Some(found.into_iter().filter_map(|ids| ids.into_iter().find_map(&mut name)).collect())
    }

    /// Whether a hash is the instance variable of a `Thread` into which `Thread#thread_variable_set` stores (`idLocals`, thread.c).
    pub(super) fn has_thread_variables(&mut self, thread: u64, hash: u64) -> Option<bool> {
        /// `Qundef` up to 3.1: an unset variable that other objects of the class have.
        const UNDEF: u64 = 0x34;
        let Self { reader, layout, bias, ids, units, .. } = self;
        let is_hash = &mut |value| value == hash;
        let in_table =
            |reader| other_variables::values(reader, layout.other_variables?, *bias, thread).ok()?;
        let found = match layout.class.variables? {
            // Only its class knows the index of the variable. The variable exists once the thread has any: if it is the only one, it is the hash.
            VariablesAt::Table { .. } => {
                let mut values = in_table(reader)?.into_iter().filter(|value| *value != UNDEF);
                return Some(values.next() == Some(hash) && values.next().is_none());
            }
            VariablesAt::Shapes { list, shape, .. } => {
                let (flags, values) = (reader.word(thread).ok()?, in_table(reader)?);
                variables::of_shape(reader, flags, &values, *bias, (list, shape), is_hash).ok()?
            }
            VariablesAt::Fields { list, shape, .. } => {
                let at = thread.checked_add(variables::FIELDS_OF_DATA)?;
                variables::of_fields(reader, (thread, at), *bias, (list, shape), is_hash).ok()?
            }
        };
        let mut named = |id| id_name(reader, layout, *bias, ids, units, id).ok().flatten();
        Some(found.into_iter().any(|id| named(id).as_deref() == Some(THREAD_VARIABLES)))
    }

    /// The name of a `Symbol`.
    pub(super) fn symbol_name(&mut self, symbol: u64) -> Option<Arc<str>> {
        let Self { reader, layout, bias, ids, units, .. } = self;
        let mut id_name = |id| id_name(reader, layout, *bias, ids, units, id);
        symbol::of_value(reader, symbol, layout, &mut id_name).ok()?
    }

    /// The name of a class or module itself (`rb_mod_name`, variable.c); a singleton class has no name.
    pub(super) fn own_name(&mut self, class: u64) -> Option<Arc<str>> {
        let Self { reader, layout, bias, ids, units, .. } = self;
        let mut id_name = |id| id_name(reader, layout, *bias, ids, units, id);
        let Owner { path, separator } = class::owner(reader, class, layout, &mut id_name).ok()??;
        (separator != '.').then_some(path)
    }

    /// The Ruby expression for a class or module, or for the singleton class of one.
    pub(super) fn class_expression(&mut self, class: u64) -> Option<String> {
        let Self { reader, layout, bias, ids, units, .. } = self;
        let mut id_name = |id| id_name(reader, layout, *bias, ids, units, id);
        let Owner { path, separator } = class::owner(reader, class, layout, &mut id_name).ok()??;
        Some(if separator == '.' { format!("{path}.singleton_class") } else { path.to_string() })
    }

    /// Label, file and first line of the code at an address.
    pub(super) fn code_place(&mut self, iseq: u64) -> Option<(String, Arc<str>, u32)> {
        self.lately.clear();
        let code = self.code(iseq, 0).ok()?;
        let Label { prefix, base, .. } = &code.label;
        Some((format!("{prefix}{base}"), Arc::clone(&code.path), code.body.first_line))
    }

    /// The text of a `String`.
    pub(super) fn text(&mut self, value: u64) -> Option<Arc<str>> {
        self.reader.string(value, &self.layout).ok()
    }

    /// The frames that a backtrace shows (`rb_ec_partial_backtrace_object`, `vm_backtrace.c`).
    pub(super) fn stack(&mut self, frames: &[RubyFrame], epoch: u64, leaf: Leaf, out: &mut Vec<Shown>) {
        let rules = self.layout.rules;
        let mut next = leaf == Leaf::Allocates && rules.counts_behind_leaf_instructions;
        self.lately.clear();
        let mut hidden = false;
        // Number of frames at the end of `out` that are shown as C functions.
        let mut as_c = 0;
        for (at, frame) in frames.iter().enumerate() {
            let takes_next = std::mem::take(&mut next);
            if frame.iseq & RubyFrame::CFUNC != 0 {
                out.push(self.c_function(frame, epoch));
                as_c += 1;
                continue;
            }
            let at = leaf.at(at);
            if frame.pc == 0 && at == At::Calls {
                continue;
            }
            let mut named = self.ruby(frame, epoch, (at, takes_next));
            if self.trust.retries(&named) {
                named = self.ruby(frame, epoch, (at, takes_next));
                self.trust = Trust::default();
            }
            match named {
                // A block that is implemented in C, or a frame that is being set up.
                Err(_) if frame.pc == 0 => {}
                Ok((named, code)) => {
                    if !hidden {
                        let internal = rules.as_c == AsC::Internal && code.as_c;
                        if internal {
                            out.truncate(out.len() - as_c);
                            as_c = 0;
                        }
                        out.push(Shown { frame: named, fate: Ok(()) });
                        as_c = if internal { as_c + 1 } else { 0 };
                    }
                    hidden =
                        rules.hides_below_clause && matches!(code.body.kind, Kind::Rescue | Kind::Ensure);
                }
                Err(failure) => {
                    if !hidden {
                        out.push(self.unnamed(failure.into()));
                        as_c = 0;
                    }
                    hidden = false;
                }
            }
        }
    }

    fn unnamed(&mut self, why: Unnamed) -> Shown {
        let name = if why == Unnamed::NoSymbols { "(C function)" } else { "(unnamed)" };
        let frame = Frame {
            kind: FrameKind::Missing,
            name: name.into(),
            file: None,
            line: 0,
            first_line: 0,
            address: 0,
        };
        Shown { frame: self.intern(frame), fate: Err(why) }
    }

    fn intern(&mut self, frame: Frame) -> Arc<Frame> {
        if let Some(known) = self.interned.get(&frame) {
            return known.clone();
        }
        if self.interned.len() >= 2 * CAPACITY {
            self.interned.clear();
        }
        let frame = Arc::new(frame);
        self.interned.insert(frame.clone());
        frame
    }

    fn c_function(&mut self, frame: &RubyFrame, epoch: u64) -> Shown {
        let mut named = self.c_function_name(frame, epoch);
        if self.trust.retries(&named) {
            named = self.c_function_name(frame, epoch);
            self.trust = Trust::default();
        }
        match named.map_err(Unnamed::from).and_then(|name| name.ok_or(Unnamed::NoSymbols)) {
            Ok(name) => Shown { frame: self.intern(c_frame(name)), fate: Ok(()) },
            Err(why) => self.unnamed(why),
        }
    }

    /// Its name; `None` if the table of symbols is not known.
    fn c_function_name(&mut self, frame: &RubyFrame, epoch: u64) -> Result<Option<Arc<str>>> {
        let address = frame.method & !RubyFrame::METHOD_FLAGS;
        let method = self.method(address, epoch)?;
        if frame.method & RubyFrame::METHOD_LOST != 0
            || !matches!(method.entry.kind, method::Kind::C(_))
            || method.entry.definition != frame.pc
        {
            return Err(Failure::Stale);
        }
        Ok(method.name.as_ref().map(|name| with_owner("", method.owner.as_ref(), name)))
    }

    /// A frame of Ruby code, and the code.
    fn ruby(
        &mut self,
        frame: &RubyFrame,
        epoch: u64,
        (at, takes_next): (At, bool),
    ) -> Result<(Arc<Frame>, Arc<Code>)> {
        let iseq = frame.iseq & !RubyFrame::FLAGS;
        let code = self.code(iseq, epoch)?;
        let position = match code.body.position(frame.pc) {
            Some(own) if takes_next && !code.body.leaves_at(&self.reader, frame.pc)? => {
                Some(code.body.position(frame.pc + 8).unwrap_or(own))
            }
            None if at == At::Calls => return Err(Failure::Stale),
            position => position,
        };
        let method = self.method_around(frame.method, epoch)?;
        // Without a counter that fits, only the method proves that the code is still the one that runs.
        if position.is_none() && method.is_none() {
            return Err(Failure::Stale);
        }
        let key = (code.number, method.as_ref().map_or(0, |method| method.number), position);
        if let Some(known) = self.frames.get(&key) {
            return Ok((known.clone(), code));
        }
        // The method must be the one that contains the code, or something else took the place of either.
        let method = method.as_deref();
        if let Some(method) = method
            && !self.fits(&method.entry, iseq, &code.body)?
        {
            return Err(Failure::Stale);
        }
        let label = &code.label;
        let owner = method.and_then(|method| method.owner.as_ref());
        let as_method = code.local_as_c
            && method.is_some_and(|method| matches!(method.entry.kind, method::Kind::Ruby(_)));
        let named = if as_method {
            c_frame(with_owner("", owner, &label.base))
        } else {
            let name = with_owner(&label.prefix, owner.filter(|_| label.of_method), &label.base);
            if code.as_c {
                c_frame(name)
            } else {
                let line = match position {
                    Some(position) => code.body.line(&self.reader, position, &self.layout)?,
                    None => 0,
                };
                // The table of lines is freed with the code.
                if Body::read_at(&self.reader, code.body.address, &self.layout)? != code.body {
                    return Err(Failure::Stale);
                }
                Frame {
                    kind: FrameKind::Ruby,
                    name,
                    file: Some(code.path.clone()),
                    line,
                    first_line: code.body.first_line,
                    address: 0,
                }
            }
        };
        let named = self.intern(named);
        self.frames.insert(key, named.clone());
        Ok((named, code))
    }

    /// The method of a frame of Ruby code: the entry that its environment holds, or the entry behind an `svar` there
    /// (`check_method_entry`, `vm_insnhelper.c`).
    fn method_around(&mut self, method: u64, epoch: u64) -> Result<Option<Arc<Method>>> {
        let address = method & !RubyFrame::METHOD_FLAGS;
        if address == 0 || method & RubyFrame::METHOD_LOST != 0 {
            return Ok(None);
        }
        if let Some(cached) = self.behind.get(&address)
            && let Some(known) = cached.at(epoch, &mut self.trust)
        {
            let behind = *known;
            return behind.map(|entry| self.method(entry, epoch)).transpose();
        }
        match self.method(address, epoch) {
            Err(Failure::Stale) if method & RubyFrame::METHOD_RAW != 0 => {
                let behind = method::behind(&self.reader, address)?;
                self.behind.insert(address, Checked::new(epoch, false, behind));
                behind.map(|entry| self.method(entry, epoch)).transpose()
            }
            found => found.map(Some),
        }
    }

    /// Whether a frame of this code can belong to the method, or to a block in it.
    fn fits(&self, entry: &MethodEntry, iseq: u64, body: &Body) -> Result<bool> {
        /// Maximum number of nested blocks that are followed.
        const MAX_NESTING: usize = 256;
        match entry.kind {
            method::Kind::Ruby(code) => Ok(code == body.local),
            method::Kind::Block(code) => {
                let (mut at, mut outer) = (iseq, body.parent);
                for _ in 0..MAX_NESTING {
                    if at == code {
                        return Ok(true);
                    }
                    if at == body.local || outer == 0 {
                        break;
                    }
                    at = outer;
                    outer = Body::read(&self.reader, at, &self.layout)?.parent;
                }
                Ok(false)
            }
            method::Kind::C(_) | method::Kind::Other => Ok(false),
        }
    }

    fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    /// The instruction sequence at an address, read again if that has not happened yet in this epoch.
    fn code(&mut self, iseq: u64, epoch: u64) -> Result<Arc<Code>> {
        let cached = self.codes.get(&iseq);
        if let Some(known) = cached.as_ref().and_then(|cached| cached.at(epoch, &mut self.trust)) {
            return Ok(known);
        }
        let (flags, body) = Body::read_object(&self.reader, iseq, &self.layout)?;
        let old = self.layout.rules.is_old(flags);
        if let Some(cached) = cached
            && cached.known.body == body
        {
            return Ok(cached.found_again(epoch, old));
        }
        let layout = self.layout.clone();
        let Self { reader, lately: Lately { bodies, paths, .. }, .. } = self;
        let mut read_body = |iseq| match bodies.entry(iseq) {
            Entry::Occupied(known) => Ok(*known.get()),
            Entry::Vacant(new) => Body::read(reader, iseq, &layout).map(|body| *new.insert(body)),
        };
        let local = if body.local == iseq { body } else { read_body(body.local)? };
        let label = Label::read(reader, iseq, &body, &local, &layout, &mut read_body)?;
        let path = match paths.entry(body.pathobj) {
            Entry::Occupied(known) => known.get().clone(),
            Entry::Vacant(new) => new.insert(reader.path(body.pathobj, &layout)?).clone(),
        };
        // Strings were read through addresses that the collector may have changed in the meantime.
        if Body::read_at(reader, body.address, &layout)? != body {
            return Err(Failure::Stale);
        }
        let as_c = |body: &Body| match layout.rules.as_c {
            AsC::Nothing => false,
            AsC::Attribute => body.c_trace,
            AsC::Internal => path.starts_with(INTERNAL),
        };
        let (as_c, local_as_c) = (as_c(&body), as_c(&local));
        let code = Code { number: self.number(), body, label, path, as_c, local_as_c };
        let checked = Checked::new(epoch, old, code);
        let known = Arc::clone(&checked.known);
        self.codes.insert(iseq, checked);
        Ok(known)
    }

    /// The method entry at an address, read again if that has not happened yet in this epoch.
    fn method(&mut self, address: u64, epoch: u64) -> Result<Arc<Method>> {
        let cached = self.methods.get(&address);
        if let Some(known) = cached.and_then(|cached| cached.at(epoch, &mut self.trust)) {
            return Ok(known);
        }
        let (flags, entry) = MethodEntry::read(&self.reader, address, &self.layout)?;
        let Self { reader, layout, bias, ids, units, lately, .. } = self;
        let mut id_name = |id| id_name(reader, layout, *bias, ids, units, id);
        let owner = match lately.owners.entry(entry.owner) {
            Entry::Occupied(known) => known.get().clone(),
            Entry::Vacant(new) => {
                new.insert(class::owner(reader, entry.owner, layout, &mut id_name)?).clone()
            }
        };
        let name = match entry.kind {
            method::Kind::C(id) => id_name(id)?,
            _ => None,
        };
        // A class without a name may get one at any time; a class with a name keeps it.
        let old = self.layout.rules.is_old(flags) && owner.is_some();
        let cached = self.methods.get(&address);
        if let Some(cached) = cached
            && cached.known.entry == entry
            && cached.known.owner == owner
        {
            return Ok(cached.found_again(epoch, old));
        }
        // The names of its class and of itself were read through it.
        if MethodEntry::read(&self.reader, address, &self.layout)?.1 != entry {
            return Err(Failure::Stale);
        }
        let checked = Checked::new(epoch, old, Method { number: self.number(), entry, owner, name });
        let known = Arc::clone(&checked.known);
        self.methods.insert(address, checked);
        Ok(known)
    }
}

fn id_name<M: Memory>(
    reader: &Reader<M>,
    layout: &FrameLayout,
    bias: u64,
    ids: &mut Cache<u64, Arc<str>>,
    units: &mut symbol::Units,
    id: u64,
) -> Result<Option<Arc<str>>> {
    if let Some(known) = ids.get(&id) {
        return Ok(Some(known.clone()));
    }
    let name = symbol::name(reader, id, bias, layout, units)?;
    if let Some(name) = &name {
        ids.insert(id, name.clone());
    }
    Ok(name)
}

fn with_owner(prefix: &str, owner: Option<&Owner>, base: &str) -> Arc<str> {
    match owner {
        Some(Owner { path, separator }) => format!("{prefix}{path}{separator}{base}").into(),
        None => format!("{prefix}{base}").into(),
    }
}

fn c_frame(name: Arc<str>) -> Frame {
    Frame { kind: FrameKind::CFunction, name, file: None, line: 0, first_line: 0, address: 0 }
}
