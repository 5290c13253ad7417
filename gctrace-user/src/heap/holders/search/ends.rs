//! Where paths end: at what has a name in Ruby code and holds one object for ever, or as long as a thread lives.

use std::sync::Arc;

use super::{
    super::{
        ClassVariable, End, Holder, Local, Path,
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

/// Whether a path may end at a thread, if nothing else is found: it may have been found by another fiber, too.
fn is_open(step: &Step) -> bool {
    step.is_single() && matches!(step.named, None | Some(Named::Local(_, true, _)))
}

impl Search<'_> {
    /// Notes what of a class or of a thread holds what one of the paths is at. Where it cannot be read, the paths go on as if there were none.
    pub(super) fn see_names(&mut self, slot: &Slot<'_>, steps: &mut [Step]) {
        if [ObjectType::CLASS, ObjectType::MODULE].contains(&slot.kind()) {
            let single =
                |step: &&mut Step| step.is_single() && matches!(step.named, None | Some(Named::Local(..)));
            self.of_class(slot.address, steps.iter_mut().filter(single).collect());
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

    /// A constant or a variable of a class that is one of the objects.
    fn of_class(&mut self, class: u64, mut steps: Vec<&mut Step>) {
        let Some(names) = self.names.as_mut().filter(|_| !steps.is_empty()) else { return };
        let wanted = &self.wanted;
        let mut constants = Vec::new();
        let _read = names.constants(class, &mut |key, value| {
            if wanted.contains(&value) {
                constants.push((key, value));
            }
        });
        steps.retain_mut(|step| {
            let constant = constants.iter().find(|(_, value)| step.wanted.contains(value));
            if let Some((key, _)) = constant {
                step.named = Some(Named::Constant(class, *key));
            }
            constant.is_none()
        });
        let any = |step: &&mut Step, value| step.wanted.contains(&value);
        let mut is_wanted = |value| wanted.contains(&value) && steps.iter().any(|step| any(step, value));
        if names.variables(class, &mut is_wanted).is_none_or(|names| names.is_empty()) {
            return;
        }
        for step in steps {
            let names = names.variables(class, &mut |value| step.wanted.contains(&value));
            if let Some(name) = names.and_then(|names| names.into_iter().next()) {
                step.named = Some(Named::Variable(class, name));
            }
        }
    }

    /// What `Thread#[]` reads there and is one of the objects.
    fn of_thread(&mut self, found: &FiberLocals, steps: &mut [Step]) {
        let Some(names) = self.names.as_mut() else { return };
        for step in steps.iter_mut().filter(|step| is_open(step)) {
            let names = names.local_names(found.table, &mut |value| step.wanted.contains(&value));
            if let Some(name) = names.and_then(|names| names.into_iter().next()) {
                step.named = Some(Named::Local(found.thread, found.by_fiber, name));
            }
        }
    }

    /// The path that ends there; `None`: nothing was found, or a constant without a name.
    pub(super) fn ends_at(&mut self, step: &mut Step) -> Option<Path> {
        let path = |end| Path::new(step.holders.clone(), end);
        let names = self.names.as_mut()?;
        let local = match step.named.take() {
            Some(Named::Constant(class, key)) => {
                let constant = Some(names.constant(class, key)?);
                return Some(Path { constant, ..path(End::Constant) });
            }
            Some(Named::Variable(class, name)) => {
                let variable = ClassVariable { name: name.to_string(), class: names.expression(class) };
                return Some(Path { variable: Some(variable), ..path(End::ClassVariable) });
            }
            Some(Named::Local(thread, by_fiber, name)) => Some((thread, by_fiber, name)),
            None => None,
        };
        if !step.is_single() {
            return None;
        }
        let globals = names.global_names(&mut |value| step.wanted.contains(&value));
        if let Some(global) = globals.and_then(|names| names.into_iter().next()) {
            return Some(Path { global: Some(global.to_string()), ..path(End::GlobalVariable) });
        }
        if let Some((thread, by_fiber, name)) = local {
            let local = Some(self.local(thread, by_fiber, &name));
            return Some(Path { local, ..path(End::ThreadLocal) });
        }
        self.in_hash(step)
    }

    /// The path that ends at a variable of a thread or in the storage of a fiber. The hash that has these is no object that Ruby code knows,
    /// so it is left out.
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

    /// What is told of a thread.
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
