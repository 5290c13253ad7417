//! Names of the classes that objects belong to.

use std::sync::Arc;

use crate::ruby::frames::{FrameLayout, Memory, Namer};

/// Names classes of one process.
pub struct ClassNames<M>(Namer<M>);

impl<M: Memory> ClassNames<M> {
    /// For the process behind `memory`, whose image has this load bias.
    pub fn new(memory: M, layout: Arc<FrameLayout>, bias: u64) -> Self {
        Self(Namer::new(memory, layout, bias))
    }

    /// The name of the class that `Object#class` gives for an object with this class pointer: singleton classes and
    /// included modules are passed over. `None`: the class has no name, or it cannot be read.
    pub fn name(&mut self, class: u64) -> Option<Arc<str>> {
        self.0.class_name(class)
    }
}
