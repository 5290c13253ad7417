//! Allocation sites: the innermost line of Ruby code, and the C function that calls the allocation function.

use std::sync::Arc;

use gctrace_tunemygc::printable::printable;

use crate::{
    heap::Line,
    model::stack::{Frame, FrameKind, Stack},
};

/// Maximum number of frames above the probe that are searched for allocation functions.
const MOST_ALLOCATORS: usize = 6;
/// Prefixes of the names of CRuby's allocation functions, which only pass requests on (gc.c, gc/default/default.c).
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
    /// Its symbol, or the file and its offset in the file.
    pub(super) symbol: Arc<str>,
}

/// An allocation site.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Site {
    /// `None`: no Ruby code is on the stack, or the line is unknown.
    pub(super) line: Option<Line>,
    /// `None`: the interpreter itself, or unknown.
    pub(super) caller: Option<Caller>,
}

impl Site {
    /// The site of a stack; `above` are the native frames above the interpreter, leaf first: the first one contains the probe.
    pub(super) fn of(stack: &Stack, above: &[Arc<Frame>]) -> Self {
        let line = Line::of(stack);
        // Functions of stripped files have no names: those between the probe and a named allocation function are skipped with it.
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
    /// As text: `rb_str_resize (libruby.so.3.1)`. The symbol of a function without a name already contains the file.
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

    /// Allocation functions, named or not, are not callers; a C function has no line, so that of its Ruby caller is used.
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
