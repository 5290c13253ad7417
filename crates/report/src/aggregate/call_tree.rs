//! A tree of call paths: one node per distinct path. A stack is stored as one number, however deep it is.

use std::{collections::HashMap, sync::Arc};

// `SipHash` would take longer than the work done with each lookup. This hasher, too, has secrets of its own for each table.
use foldhash::fast::RandomState as FastHash;

use crate::model::stack::{Frame, FrameKind};

/// A call path: its last frame, and the path of that frame's caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(u32);

impl NodeId {
    /// The empty path, the root of all paths.
    pub const ROOT: Self = Self(0);
    /// A path of one frame that represents all paths beyond the limit.
    pub const BEYOND: Self = Self(1);

    /// Its index in a table of all nodes.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A distinct frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FrameId(u32);

impl FrameId {
    /// Its index in a table of all frames.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

#[derive(Clone, Copy, Debug)]
struct Node {
    parent: NodeId,
    frame: FrameId,
}

/// Maximum number of frames known by address; the table is emptied when it would exceed it.
const KNOWN_ADDRESSES: usize = 1 << 20;

/// All distinct call paths of a run, up to a limit.
#[derive(Debug)]
pub struct CallTree {
    frames: Vec<Arc<Frame>>,
    by_content: HashMap<Arc<Frame>, FrameId>,
    /// Frames are interned, so most are found by their address. Each frame is kept alive here, so that its address is not reused.
    by_address: HashMap<usize, (Arc<Frame>, FrameId), FastHash>,
    nodes: Vec<Node>,
    children: HashMap<(NodeId, FrameId), NodeId, FastHash>,
    limit: usize,
}

impl CallTree {
    /// A tree of at most `limit` nodes.
    pub fn new(limit: usize) -> Self {
        let beyond = Arc::new(Frame {
            kind: FrameKind::Missing,
            name: Arc::from("(beyond gctrace's limit of different stacks)"),
            file: None,
            line: 0,
            first_line: 0,
            address: 0,
        });
        let mut tree = Self {
            frames: Vec::new(),
            by_content: HashMap::new(),
            by_address: HashMap::default(),
            nodes: Vec::new(),
            children: HashMap::default(),
            limit: limit.max(2),
        };
        let frame = tree.add_frame(&beyond);
        // The root has no frame; this one is never read.
        tree.nodes.push(Node { parent: NodeId::ROOT, frame });
        tree.nodes.push(Node { parent: NodeId::ROOT, frame });
        tree.children.insert((NodeId::ROOT, frame), NodeId::BEYOND);
        tree
    }

    /// The path of a stack (leaf first). A path beyond the limit is [`NodeId::BEYOND`].
    pub fn insert(&mut self, stack: &[Arc<Frame>]) -> NodeId {
        let mut node = NodeId::ROOT;
        for frame in stack.iter().rev() {
            let full = self.nodes.len() >= self.limit;
            let Some(frame) = self.find_frame(frame).or_else(|| (!full).then(|| self.add_frame(frame)))
            else {
                return NodeId::BEYOND;
            };
            node = match self.children.get(&(node, frame)) {
                Some(&child) => child,
                None if full => return NodeId::BEYOND,
                None => {
                    let child = NodeId(self.nodes.len() as u32);
                    self.nodes.push(Node { parent: node, frame });
                    self.children.insert((node, frame), child);
                    child
                }
            };
        }
        node
    }

    fn find_frame(&mut self, frame: &Arc<Frame>) -> Option<FrameId> {
        let address = Arc::as_ptr(frame) as usize;
        if let Some(&(_, id)) = self.by_address.get(&address) {
            return Some(id);
        }
        let id = *self.by_content.get(frame)?;
        if self.by_address.len() >= KNOWN_ADDRESSES {
            self.by_address.clear();
        }
        self.by_address.insert(address, (frame.clone(), id));
        Some(id)
    }

    fn add_frame(&mut self, frame: &Arc<Frame>) -> FrameId {
        let id = FrameId(self.frames.len() as u32);
        self.frames.push(frame.clone());
        self.by_content.insert(frame.clone(), id);
        id
    }

    /// The frames of a path with their nodes, leaf first.
    pub fn path(&self, node: NodeId) -> impl Iterator<Item = (NodeId, FrameId)> {
        let mut next = node;
        std::iter::from_fn(move || {
            let Node { parent, frame } = *self.nodes.get(next.index()).filter(|_| next != NodeId::ROOT)?;
            Some((std::mem::replace(&mut next, parent), frame))
        })
    }

    /// The path of the caller of the last frame of `node`.
    pub fn parent(&self, node: NodeId) -> NodeId {
        self.nodes.get(node.index()).map_or(NodeId::ROOT, |node| node.parent)
    }

    /// A frame by its number.
    pub fn frame(&self, id: FrameId) -> &Frame {
        &self.frames[id.index()]
    }

    /// All distinct frames, in the order of their numbers.
    pub fn frames(&self) -> impl Iterator<Item = &Frame> {
        self.frames.iter().map(AsRef::as_ref)
    }

    /// Number of nodes.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Whether no stack has been inserted.
    pub fn is_empty(&self) -> bool {
        self.nodes.len() <= 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(name: &str) -> Arc<Frame> {
        let name = Arc::from(name);
        Arc::new(Frame { kind: FrameKind::Ruby, name, file: None, line: 1, first_line: 1, address: 0 })
    }

    fn names(tree: &CallTree, node: NodeId) -> Vec<String> {
        tree.path(node).map(|(_, frame)| tree.frame(frame).name.to_string()).collect()
    }

    /// Equal stacks are one path, whether or not their frames are the same allocation; recursion keeps its depth.
    #[test]
    fn paths() {
        let mut tree = CallTree::new(100);
        let (a, b) = (frame("a"), frame("b"));
        let one = tree.insert(&[b.clone(), a.clone()]);
        assert_eq!(one, tree.insert(&[frame("b"), frame("a")]));
        assert_eq!(names(&tree, one), ["b", "a"]);
        let deep = tree.insert(&[a.clone(), a.clone(), a.clone()]);
        assert_eq!(names(&tree, deep), ["a", "a", "a"]);
        assert_eq!(tree.insert(&[]), NodeId::ROOT);
        assert!(names(&tree, NodeId::ROOT).is_empty());
        // root, beyond, a, a-b, a-a, a-a-a
        assert_eq!((tree.len(), tree.frames().count()), (6, 3));
    }

    /// Beyond the limit, known paths are still found and others are reported as not kept.
    #[test]
    fn limit() {
        let mut tree = CallTree::new(4);
        let kept = tree.insert(&[frame("b"), frame("a")]);
        assert_eq!(tree.insert(&[frame("c"), frame("a")]), NodeId::BEYOND);
        assert_eq!(tree.insert(&[frame("b"), frame("a")]), kept);
        assert!(names(&tree, NodeId::BEYOND)[0].contains("limit"));
        assert_eq!((tree.len(), tree.frames().count()), (4, 3));
    }
}
