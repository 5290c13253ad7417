//! Named holders in Ruby code, at which paths end.

use serde::Serialize;

use super::{End, Path};

/// A class variable, or an instance variable of a class or module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(in crate::heap) struct ClassVariable {
    /// `@@cache` or `@cache`.
    pub(in crate::heap) name: String,
    /// The class or module as Ruby code names it; `None`: it has no name.
    pub(in crate::heap) class: Option<String>,
}

/// A thread local, a thread variable, or an entry in the storage of a fiber.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(in crate::heap) struct Local {
    pub(in crate::heap) name: String,
    /// Tid of the native thread in gctrace's own pid namespace; `None`: there is none, or it is unknown.
    pub(in crate::heap) tid: Option<u32>,
    /// `Thread#name`.
    pub(in crate::heap) thread: Option<String>,
    /// Whether it is the main thread of the process.
    pub(in crate::heap) main: bool,
    /// Whether it belongs to a fiber that was not running on its thread at that moment.
    pub(in crate::heap) fiber: bool,
}

/// A named holder of an object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(in crate::heap) enum NamedEnd {
    Constant(String),
    Variable(ClassVariable),
    Global(String),
    ThreadLocal(Local),
}

impl NamedEnd {
    pub(in crate::heap) fn end(&self) -> End {
        match self {
            Self::Constant(_) => End::Constant,
            Self::Variable(_) => End::ClassVariable,
            Self::Global(_) => End::GlobalVariable,
            Self::ThreadLocal(_) => End::ThreadLocal,
        }
    }

    /// The path of one object that ends at this holder.
    pub(super) fn of_one(self, path: Path) -> Path {
        let path = Path { end: self.end(), ..path };
        match self {
            Self::Constant(name) => Path { constant: Some(name), ..path },
            Self::Variable(variable) => Path { variable: Some(variable), ..path },
            Self::Global(name) => Path { global: Some(name), ..path },
            Self::ThreadLocal(local) => Path { local: Some(local), ..path },
        }
    }
}

/// Several objects, some of which have a named holder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(in crate::heap) struct Several {
    /// The holders: one for each object that has one.
    pub(in crate::heap) named: Vec<NamedEnd>,
    /// Number of the objects.
    pub(in crate::heap) of: usize,
}
