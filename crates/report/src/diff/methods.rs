//! Sums by method: a weight for the innermost method of a stack, and one for each method on it.

use std::{collections::HashMap, sync::Arc};

use super::blocks::{Bin, Series};
use crate::model::stack::{Frame, FrameKind};

/// Maximum number of distinguished methods.
const MOST: usize = 1 << 16;
/// Maximum number of frames known by their address; the table is emptied when it would exceed it.
const KNOWN: usize = 1 << 18;

/// A method, as it is recognised in another recording: without lines, which move between versions of a program.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Method {
    /// A method in Ruby or C.
    Of {
        /// Its name, as seen.
        name: Arc<str>,
        /// The last component of its file's path.
        file: Option<Arc<str>>,
    },
    /// The garbage collector.
    Gc,
    /// No method: native code and the kernel with no method below, or no stack.
    Outside,
    /// Methods beyond the limit, together.
    Beyond,
}

impl Method {
    /// The method of a frame.
    fn of(frame: &Frame) -> Option<Self> {
        let file = || frame.file.as_deref().map(|path| Arc::from(path.rsplit('/').next().unwrap_or(path)));
        match frame.kind {
            FrameKind::Ruby | FrameKind::CFunction => {
                Some(Self::Of { name: frame.name.clone(), file: file() })
            }
            FrameKind::Vm => Some(Self::Gc),
            FrameKind::Native | FrameKind::Kernel | FrameKind::Missing => None,
        }
    }
}

/// A method's sums.
#[derive(Clone, Debug, Default)]
pub(super) struct Sums {
    /// Weight of stacks on which it was the innermost method.
    pub(super) own: Series,
    /// Weight of stacks that contain it.
    pub(super) total: Series,
    /// Number of stacks that contain it.
    pub(super) stacks: u64,
}

/// Sums by method.
#[derive(Clone, Debug, Default)]
pub(super) struct ByMethod {
    numbers: HashMap<Method, usize>,
    pub(super) sums: Vec<Sums>,
    /// Total weight, including stacks without any method.
    pub(super) all: Series,
    /// Number of stacks.
    pub(super) stacks: u64,
    /// Methods by address of a frame, which is kept alive.
    known: HashMap<usize, (Arc<Frame>, Option<usize>)>,
    seen: Vec<usize>,
}

impl ByMethod {
    /// Adds a stack, leaf first.
    pub(super) fn add(&mut self, bin: Bin, stack: &[Arc<Frame>], weight: f64) {
        self.meet(stack);
        self.put(bin, weight);
    }

    /// Adds a stack whose weight is then added with [`Self::put`], in any number of parts.
    pub(super) fn meet(&mut self, stack: &[Arc<Frame>]) {
        self.seen.clear();
        for frame in stack {
            if let Some(number) = self.of_frame(frame)
                && !self.seen.contains(&number)
            {
                self.seen.push(number);
            }
        }
        if self.seen.is_empty() {
            let outside = self.number(Method::Outside);
            self.seen.push(outside);
        }
        self.count();
    }

    /// Adds weight to a single method.
    pub(super) fn charge(&mut self, bin: Bin, method: Option<&Frame>, weight: f64) {
        let number = self.number(method.and_then(Method::of).unwrap_or(Method::Outside));
        self.seen.clear();
        self.seen.push(number);
        self.count();
        self.put(bin, weight);
    }

    fn count(&mut self) {
        self.stacks += 1;
        for number in &self.seen {
            self.sums[*number].stacks += 1;
        }
    }

    /// Adds weight to the last stack.
    pub(super) fn put(&mut self, bin: Bin, weight: f64) {
        self.all.add(bin, weight);
        for (depth, number) in self.seen.iter().enumerate() {
            let sums = &mut self.sums[*number];
            sums.total.add(bin, weight);
            if depth == 0 {
                sums.own.add(bin, weight);
            }
        }
    }

    fn of_frame(&mut self, frame: &Arc<Frame>) -> Option<usize> {
        let address = Arc::as_ptr(frame) as usize;
        if let Some((_, number)) = self.known.get(&address) {
            return *number;
        }
        let number = Method::of(frame).map(|method| self.number(method));
        if self.known.len() >= KNOWN {
            self.known.clear();
        }
        self.known.insert(address, (frame.clone(), number));
        number
    }

    fn number(&mut self, method: Method) -> usize {
        let full = self.numbers.len() >= MOST;
        let method = if full && !self.numbers.contains_key(&method) { Method::Beyond } else { method };
        let next = self.sums.len();
        let number = *self.numbers.entry(method).or_insert(next);
        if number == next {
            self.sums.push(Sums::default());
        }
        number
    }

    /// A method's sums.
    pub(super) fn get(&self, method: &Method) -> Option<&Sums> {
        self.numbers.get(method).map(|number| &self.sums[*number])
    }

    /// All methods.
    pub(super) fn methods(&self) -> impl Iterator<Item = &Method> {
        self.numbers.keys()
    }
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "sums of whole numbers are exact")]
mod tests {
    use super::{super::blocks::Grid, *};

    fn frame(kind: FrameKind, name: &str, file: &str, line: u32) -> Arc<Frame> {
        let file = Some(Arc::from(file));
        Arc::new(Frame { kind, name: Arc::from(name), file, line, first_line: line, address: 0 })
    }

    /// The innermost method has the weight, its callers have it once each, and neither lines nor folders distinguish methods.
    #[test]
    fn own_and_total() {
        let mut grid = Grid::default();
        grid.begin(0);
        let bin = grid.bin(1).unwrap();
        let ruby = |name, file, line| frame(FrameKind::Ruby, name, file, line);
        let mut sums = ByMethod::default();
        let native = frame(FrameKind::Native, "memcpy", "libc.so.6", 0);
        let recursive = ruby("Foo#bar", "/srv/1/foo.rb", 3);
        sums.add(bin, &[native.clone(), recursive.clone(), recursive, ruby("<main>", "/a.rb", 1)], 2.0);
        sums.add(bin, &[ruby("<main>", "/b/a.rb", 9), ruby("Foo#bar", "/srv/2/foo.rb", 4)], 1.0);
        sums.add(bin, &[native], 4.0);
        let of = |name: &str, file: &str| {
            let sums = sums.get(&Method::Of { name: Arc::from(name), file: Some(Arc::from(file)) }).unwrap();
            (sums.own.total(), sums.total.total(), sums.stacks)
        };
        assert_eq!((of("Foo#bar", "foo.rb"), of("<main>", "a.rb")), ((2.0, 3.0, 2), (1.0, 3.0, 2)));
        assert_eq!(sums.get(&Method::Outside).unwrap().own.total(), 4.0);
        assert_eq!((sums.all.total(), sums.stacks), (7.0, 3));
    }

    /// Methods beyond the limit are one.
    #[test]
    fn bounded() {
        let mut grid = Grid::default();
        grid.begin(0);
        let bin = grid.bin(1).unwrap();
        let mut sums = ByMethod::default();
        for at in 0..MOST + 10 {
            sums.add(bin, &[frame(FrameKind::CFunction, &format!("m{at}"), "x", 0)], 1.0);
        }
        assert!(sums.sums.len() <= MOST + 1);
        assert_eq!(sums.get(&Method::Beyond).unwrap().own.total(), 10.0);
        assert_eq!(sums.all.total(), (MOST + 10) as f64);
    }
}
