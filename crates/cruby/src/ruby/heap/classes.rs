//! Names of the classes of objects.

use std::sync::Arc;

use crate::ruby::frames::{FrameLayout, LocalTable, Memory, Namer};

/// Names classes of one process.
pub struct ClassNames<M>(Namer<M>);

impl<M: Memory> ClassNames<M> {
    /// For the process behind `memory`, whose image has this load bias.
    pub fn new(memory: M, layout: Arc<FrameLayout>, bias: u64) -> Self {
        Self(Namer::new(memory, layout, bias))
    }

    /// The name of the class that `Object#class` returns for an object with this class pointer: singleton classes and
    /// included modules are skipped. `None`: the class has no name, or it cannot be read.
    pub fn name(&mut self, class: u64) -> Option<Arc<str>> {
        self.0.class_name(class)
    }

    /// The address of the class that `Object#class` returns for an object with this class pointer. `None`: it cannot be read.
    pub fn real_class(&self, class: u64) -> Option<u64> {
        self.0.real_class(class)
    }

    /// The name of the class or module at this address. `None`: it has no permanent name, like a singleton class, or it cannot be read.
    pub fn own_name(&mut self, class: u64) -> Option<Arc<str>> {
        self.0.own_name(class)
    }

    /// Passes the constants of the class or module at this address to `visit`, each as a key for [`Self::constant`] and its
    /// value. `None`: they cannot be read, as in releases before 2.7 and after 4.0.
    pub fn constants(&mut self, class: u64, visit: &mut dyn FnMut(u32, u64)) -> Option<()> {
        self.0.constants(class, visit)
    }

    /// Label, file and first line of the code at an address; `None`: there is no code, or it cannot be read.
    pub fn code(&mut self, iseq: u64) -> Option<(String, Arc<str>, u32)> {
        self.0.code_place(iseq)
    }

    /// Names of the instance variables (`@cache`) and class variables (`@@cache`) of a class or module whose value satisfies
    /// `is_wanted`. `None`: they cannot be read, as in releases before 2.7 and after 4.0.
    pub fn variables(&mut self, class: u64, is_wanted: &mut dyn FnMut(u64) -> bool) -> Option<Vec<Arc<str>>> {
        self.0.class_variables(class, is_wanted)
    }

    /// Names of the global variables (`$cache`) from which Ruby code reads a value that satisfies `is_wanted`. `None`: they cannot be read,
    /// as in releases before 2.7 and after 4.0.
    pub fn global_names(&mut self, is_wanted: &mut dyn FnMut(u64) -> bool) -> Option<Vec<Arc<str>>> {
        self.0.global_names(is_wanted)
    }

    /// The names under which `Thread#[]` reads a value that satisfies `is_wanted`. `None`: they cannot be read.
    pub fn local_names(
        &mut self,
        table: LocalTable,
        is_wanted: &mut dyn FnMut(u64) -> bool,
    ) -> Option<Vec<Arc<str>>> {
        self.0.local_names(table, is_wanted)
    }

    /// The text of a `String`. `None`: it is not a `String`, or cannot be read.
    pub fn text(&mut self, value: u64) -> Option<Arc<str>> {
        self.0.text(value)
    }

    /// Whether a hash is the one in which `Thread#thread_variable_set` stores the variables of this `Thread`. `None`: that cannot be read, as in
    /// releases before 2.7 and after 4.0. Up to 3.1 it is `false` for a `Thread` that also has other instance variables.
    pub fn has_thread_variables(&mut self, thread: u64, hash: u64) -> Option<bool> {
        self.0.has_thread_variables(thread, hash)
    }

    /// The name of a `Symbol`. `None`: it is not a `Symbol`, or cannot be read.
    pub fn symbol_name(&mut self, symbol: u64) -> Option<Arc<str>> {
        self.0.symbol_name(symbol)
    }

    /// What the collector marks through global variables: their values, and the blocks that trace them. `None`: they cannot be read.
    pub fn global_values(&mut self) -> Option<Vec<u64>> {
        self.0.global_values()
    }

    /// The Ruby expression for a class or module: `Order`, or `Order.singleton_class`. `None`: it has no name.
    pub fn expression(&mut self, class: u64) -> Option<String> {
        self.0.class_expression(class)
    }

    /// The Ruby expression for a constant: `CACHE` for one of `Object`, else `Order::CACHE`. `None`: it or its class has no name.
    pub fn constant(&mut self, class: u64, key: u32) -> Option<String> {
        let (class, name) = (self.0.class_expression(class)?, self.0.constant_name(key)?);
        Some(if class == "Object" { name.to_string() } else { format!("{class}::{name}") })
    }
}
