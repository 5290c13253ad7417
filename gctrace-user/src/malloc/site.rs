//! Where memory is asked for: the innermost line of Ruby code, and the C function that calls the allocation function.

use std::sync::Arc;

use gctrace_tunemygc::printable::printable;

use crate::{
    heap::Line,
    model::stack::{Frame, FrameKind, Stack},
};

/// How many frames above the probe are looked at for allocation functions.
const MOST_ALLOCATORS: usize = 6;
/// Prefixes of the names of CRuby's allocation functions, which only pass on what they are asked for (gc.c, gc/default/default.c).
const ALLOCATORS: [&str; 9] = [
    "ruby_x",
    "ruby_sized_x",
    "rb_xmalloc",
    "rb_xcalloc",
    "rb_xrealloc",
    "objspace_x",
    "rb_gc_impl_malloc",
    "rb_gc_impl_calloc",
    "rb_gc_impl_realloc",
];

/// A C function.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Caller {
    pub(super) library: Arc<str>,
    /// Its symbol, or the file and where it begins in that.
    pub(super) symbol: Arc<str>,
}

/// Where memory is asked for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Site {
    /// `None`: no Ruby code is on the stack, or it is not known.
    pub(super) line: Option<Line>,
    /// `None`: the interpreter itself, or it is not known.
    pub(super) caller: Option<Caller>,
}

impl Site {
    /// Of a stack; `above` are the native frames above the interpreter, leaf first: the first one has the probe.
    pub(super) fn of(stack: &Stack, above: &[Arc<Frame>]) -> Self {
        let line = Line::of(stack);
        // Functions of stripped files have no names: what is between the probe and a named one is passed over with it.
        let last = above.iter().take(MOST_ALLOCATORS).rposition(|frame| is_allocator(&frame.name));
        let caller = above.get(last.unwrap_or(0) + 1).and_then(|frame| {
            let library = frame.file.clone().filter(|_| frame.kind == FrameKind::Native)?;
            Some(Caller { library, symbol: frame.name.clone() })
        });
        Self { line, caller }
    }
}

fn is_allocator(name: &str) -> bool {
    ALLOCATORS.iter().any(|prefix| name.starts_with(prefix))
}

impl Caller {
    /// `rb_str_resize (libruby.so.3.1)`; a function without a name has the file in what replaces that.
    pub(super) fn text(&self) -> String {
        let library = self.library.rsplit('/').next().unwrap_or_default();
        if self.symbol.starts_with(library) {
            return printable(&self.symbol).into_owned();
        }
        format!("{} ({})", printable(&self.symbol), printable(library))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: FrameKind, name: &str, file: &str, line: u32) -> Arc<Frame> {
        let file = (!file.is_empty()).then(|| Arc::from(file));
        Arc::new(Frame { kind, name: name.into(), file, line, first_line: 1, address: 0 })
    }

    /// Allocation functions, named or not, are no callers; a C function has no line, its Ruby caller has.
    #[test]
    fn of_a_stack() {
        let native = |name: &str| frame(FrameKind::Native, name, "/usr/lib/libruby-3.1.so.3.1", 0);
        let stack: Stack = [
            native("ruby_xmalloc"),
            frame(FrameKind::CFunction, "String#*", "", 0),
            frame(FrameKind::Ruby, "Shop#all", "/srv/app/models/shop.rb", 12),
            frame(FrameKind::Ruby, "<main>", "/srv/app/app.rb", 3),
        ]
        .into();
        let of = |names: &[&str]| {
            let above: Vec<_> = names.iter().map(|name| native(name)).collect();
            Site::of(&stack, &above).caller.map(|caller| caller.text())
        };
        let line = Site::of(&stack, &[]).line.unwrap();
        assert_eq!(line.text(), "Shop#all (models/shop.rb:12)");
        let resize = Some("rb_str_resize (libruby-3.1.so.3.1)".to_owned());
        assert_eq!(of(&["libruby-3.1.so.3.1+0x7", "ruby_xmalloc", "rb_str_resize", "rb_str_times"]), resize);
        assert_eq!(of(&["objspace_xmalloc0", "rb_str_resize"]), resize);
        assert_eq!(of(&["libruby-3.1.so.3.1+0x7", "rb_str_resize", "ruby_xfree"]), None);
        assert_eq!(
            of(&["ruby_xmalloc2", "libruby-3.1.so.3.1+0x8"]).as_deref(),
            Some("libruby-3.1.so.3.1+0x8")
        );
        assert_eq!((of(&["ruby_xmalloc"]), of(&[])), (None, None));
    }
}
