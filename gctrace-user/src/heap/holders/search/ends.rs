//! Ends of paths: named holders in Ruby code that hold one object forever, or as long as a thread lives.

use std::{collections::BTreeSet, sync::Arc};

use super::{
    super::{
        ClassVariable, End, Holder, Local, NamedEnd, Path, Several,
        step::{Named, Step},
    },
    Search,
};
use crate::{
    host::tasks::{self, Task},
    ruby::{
        frames::Memory as _,
        heap::{FiberLocals, ObjectType, Slot},
        threads::RubyThread,
    },
};

impl Search<'_> {
    /// Notes named holders, in a class or a thread, of wanted objects. If these cannot be read, the paths continue as if there were none.
    pub(super) fn see_names(&mut self, slot: &Slot<'_>, steps: &mut [Step]) {
        if [ObjectType::CLASS, ObjectType::MODULE].contains(&slot.kind()) {
            self.of_class(slot.address, steps);
        } else if let Some(found) = self.threads.as_mut().and_then(|of| of.locals(&self.target.memory, slot))
        {
            if found.has_variables {
                self.with_variables.insert(slot.address, found.thread);
            }
            if let Some(storage) = found.storage {
                let known = self.storages.entry(storage).or_insert((found.thread, found.by_fiber));
                known.1 &= found.by_fiber;
            }
            self.of_thread(&found, steps);
        }
    }

    /// Notes constants and variables of a class that refer to wanted objects.
    fn of_class(&mut self, class: u64, steps: &mut [Step]) {
        let Some(names) = self.names.as_mut() else { return };
        let wanted = &self.wanted;
        let mut constants = Vec::new();
        let _read = names.constants(class, &mut |key, value| {
            if wanted.contains(&value) {
                constants.push((key, value));
            }
        });
        for (key, value) in constants {
            for step in steps.iter_mut().filter(|step| step.is_unnamed(value)) {
                step.named.insert(value, Named::Constant(class, key));
            }
        }
        let mut values = BTreeSet::new();
        let _read = names.variables(class, &mut |value| {
            let found = wanted.contains(&value) && steps.iter().any(|step| step.is_unnamed(value));
            if found {
                values.insert(value);
            }
            found
        });
        for value in values {
            let name = names.variables(class, &mut |other| other == value);
            let Some(name) = name.and_then(|names| names.into_iter().next()) else { continue };
            for step in steps.iter_mut().filter(|step| step.is_unnamed(value)) {
                step.named.insert(value, Named::Variable(class, Arc::clone(&name)));
            }
        }
    }

    /// Notes variables that `Thread#[]` reads and that refer to wanted objects.
    fn of_thread(&mut self, found: &FiberLocals, steps: &mut [Step]) {
        let Some(names) = self.names.as_mut() else { return };
        let wanted = &self.wanted;
        let mut values = BTreeSet::new();
        let _read = names.local_names(found.table, &mut |value| {
            let found = wanted.contains(&value) && steps.iter().any(|step| step.is_open(value));
            if found {
                values.insert(value);
            }
            found
        });
        for value in values {
            let name = names.local_names(found.table, &mut |other| other == value);
            let Some(name) = name.and_then(|names| names.into_iter().next()) else { continue };
            for step in steps.iter_mut().filter(|step| step.is_open(value)) {
                let local = Named::Local(found.thread, found.by_fiber, Arc::clone(&name));
                step.named.insert(value, local);
            }
        }
    }

    /// The path of one object, if it ends at a named holder; `None`: there is no such holder, or only a constant without a name.
    pub(super) fn ends_at(&mut self, step: &mut Step) -> Option<Path> {
        if !step.is_single() {
            return None;
        }
        self.name_globals(step);
        let (_, named) = step.named.pop_first().unzip();
        match named {
            Some(named) => {
                let end = self.named(named)?;
                Some(end.of_one(Path::new(step.holders.clone(), End::NotReadable)))
            }
            None => self.in_hash(step),
        }
    }

    /// The path of several objects, if it ends at named holders of some of them.
    pub(super) fn ends_at_several(&mut self, step: &mut Step) -> Option<Path> {
        self.name_globals(step);
        let named: Vec<NamedEnd> =
            std::mem::take(&mut step.named).into_values().filter_map(|named| self.named(named)).collect();
        let end = named.first()?.end();
        let several = Several { of: step.wanted.len(), named };
        Some(Path { several: Some(several), ..Path::new(step.holders.clone(), end) })
    }

    /// Searches global variables for objects that no constant and no variable of a class refers to.
    fn name_globals(&mut self, step: &mut Step) {
        let Some(names) = self.names.as_mut() else { return };
        let mut values = BTreeSet::new();
        let _read = names.global_names(&mut |value| {
            let found = step.is_unnamed(value);
            if found {
                values.insert(value);
            }
            found
        });
        for value in values {
            let name = names.global_names(&mut |other| other == value);
            if let Some(name) = name.and_then(|names| names.into_iter().next()) {
                step.named.insert(value, Named::Global(name));
            }
        }
    }

    /// The named holder in the terms of Ruby code; `None`: a constant without a name.
    fn named(&mut self, by: Named) -> Option<NamedEnd> {
        let names = self.names.as_mut()?;
        Some(match by {
            Named::Constant(class, key) => NamedEnd::Constant(names.constant(class, key)?),
            Named::Variable(class, name) => {
                let class = names.expression(class);
                NamedEnd::Variable(ClassVariable { name: name.to_string(), class })
            }
            Named::Global(name) => NamedEnd::Global(name.to_string()),
            Named::Local(thread, by_fiber, name) => {
                NamedEnd::ThreadLocal(self.local(thread, by_fiber, &name))
            }
        })
    }

    /// The path, if it ends at a variable of a thread or in the storage of a fiber. The hash of these variables is not visible to Ruby code,
    /// so it is omitted from the path.
    fn in_hash(&mut self, step: &Step) -> Option<Path> {
        let [before @ .., held, hash] = step.holders.as_slice() else { return None };
        let address = hash.address.0;
        if held.objects > 1 || hash.kind != "T_HASH" || !step.wanted.contains(&address) {
            return None;
        }
        let (thread, fiber, end) = if let Some(&(thread, by_fiber)) = self.storages.get(&address) {
            (thread, by_fiber, End::FiberStorage)
        } else {
            let names = self.names.as_mut()?;
            let mut threads = self.with_variables.iter();
            let mut is_of = |thread: u64| names.has_thread_variables(thread, address) == Some(true);
            let (_, &thread) = threads.find(|(thread, _)| is_of(**thread))?;
            (thread, false, End::ThreadVariable)
        };
        let name = self.key_of(hash, held.address.0)?;
        let holders = [before, std::slice::from_ref(held)].concat();
        Some(Path { local: Some(self.local(thread, fiber, &name)), ..Path::new(holders, end) })
    }

    /// The symbol that is the key of an object in a hash.
    fn key_of(&mut self, hash: &Holder, value: u64) -> Option<Arc<str>> {
        let mut bytes = vec![0; hash.size];
        if !self.target.memory.read(hash.address.0, &mut bytes) {
            return None;
        }
        let mut key = None;
        let slot = Slot { address: hash.address.0, bytes: &bytes, marks: None };
        let _read = self.references.pairs(&self.target.memory, &slot, &mut |name, found| {
            if found == value {
                key = Some(name);
            }
        });
        self.names.as_mut()?.symbol_name(key?)
    }

    /// Describes a variable of a thread, and the thread.
    fn local(&mut self, thread: u64, fiber: bool, name: &str) -> Local {
        let target = self.target;
        let mut local = Local { name: name.to_owned(), tid: None, thread: None, main: false, fiber };
        let Some(threads) = &target.plan.threads else { return local };
        let Some(tid) = threads.native(&target.memory, thread) else { return local };
        let all = tasks::tids(target.pid).unwrap_or_default().into_iter();
        let task = all.filter_map(|tid| Task::look(target.pid, tid)).find(|task| task.own_tid == tid);
        local.tid = task.map(|task| task.tid);
        if let Some(state) = threads.state(&target.memory, target.bias, RubyThread { address: thread, tid }) {
            local.main = state.main;
            local.thread =
                self.names.as_mut().and_then(|names| names.text(state.name)).map(|name| name.to_string());
        }
        local
    }
}
