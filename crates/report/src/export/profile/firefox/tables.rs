//! Columns of one thread: strings, functions, frames, stacks, samples.

use std::collections::HashMap;

use serde::{Serialize, Serializer, ser::SerializeMap as _};

use super::{
    super::{label, waits},
    Category, View,
};
use crate::{
    aggregate::{
        call_tree::{CallTree, FrameId, NodeId},
        recording::Moment,
    },
    model::stack::{Frame, FrameKind, ThreadState},
};

/// A column with the same value in every row.
struct Same<T>(T, usize);

impl<T: Serialize> Serialize for Same<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(std::iter::repeat_n(&self.0, self.1))
    }
}

/// The tables that samples and markers refer to.
pub(super) struct Tables<'a> {
    tree: &'a CallTree,
    strings: Vec<String>,
    string_ids: HashMap<String, u32>,
    funcs: Vec<Func>,
    func_ids: HashMap<Func, u32>,
    frames: Vec<TableFrame>,
    frame_ids: HashMap<FrameId, u32>,
    state_frames: HashMap<&'static str, u32>,
    stacks: Vec<(Option<u32>, u32)>,
    stack_ids: HashMap<NodeId, u32>,
    state_stacks: HashMap<(Option<u32>, u32), u32>,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Func {
    name: u32,
    file: Option<u32>,
    line: Option<u32>,
}

#[derive(Clone, Copy)]
struct TableFrame {
    func: u32,
    category: Category,
    line: Option<u32>,
}

impl<'a> Tables<'a> {
    pub(super) fn new(tree: &'a CallTree) -> Self {
        Self {
            tree,
            strings: Vec::new(),
            string_ids: HashMap::new(),
            funcs: Vec::new(),
            func_ids: HashMap::new(),
            frames: Vec::new(),
            frame_ids: HashMap::new(),
            state_frames: HashMap::new(),
            stacks: Vec::new(),
            stack_ids: HashMap::new(),
            state_stacks: HashMap::new(),
        }
    }

    pub(super) fn string(&mut self, text: &str) -> u32 {
        if let Some(&id) = self.string_ids.get(text) {
            return id;
        }
        let id = self.strings.len() as u32;
        self.strings.push(text.to_owned());
        self.string_ids.insert(text.to_owned(), id);
        id
    }

    /// The Ruby frame nearest to the leaf: `Foo#bar app.rb:12`.
    pub(super) fn ruby_frame(&self, node: NodeId) -> Option<String> {
        let mut frames = self.tree.path(node).map(|(_, frame)| self.tree.frame(frame));
        frames.find(|frame| frame.kind == FrameKind::Ruby).map(|frame| {
            let file = frame.file.as_deref().unwrap_or("?");
            format!("{} {}{}", label::text(&frame.name), label::text(file), frame.colon_line())
        })
    }

    /// The stack of a path; `None` for the empty path.
    pub(super) fn stack(&mut self, node: NodeId) -> Option<u32> {
        let mut way = Vec::new();
        let mut at = None;
        for (node, frame) in self.tree.path(node) {
            if let Some(&known) = self.stack_ids.get(&node) {
                at = Some(known);
                break;
            }
            way.push((node, frame));
        }
        for (node, frame) in way.into_iter().rev() {
            let frame = self.frame(frame);
            let id = self.stacks.len() as u32;
            self.stacks.push((at, frame));
            self.stack_ids.insert(node, id);
            at = Some(id);
        }
        at
    }

    /// The stack of a sample; if the thread is off the CPU, a frame says so.
    fn sample_stack(&mut self, node: NodeId, state: ThreadState) -> Option<u32> {
        let stack = self.stack(node);
        let Some(row) = waits::row(self.tree, node, state) else { return stack };
        let category = match state {
            ThreadState::Blocked | ThreadState::OtherWait => Category::Idle,
            ThreadState::Running | ThreadState::Runnable | ThreadState::GvlWait => Category::Waiting,
        };
        let frame = self.state_frames.get(row).copied().unwrap_or_else(|| {
            let name = self.string(row);
            let func = self.func(Func { name, file: None, line: None });
            self.add_frame(TableFrame { func, category, line: None })
        });
        self.state_frames.insert(row, frame);
        let stacks = &mut self.stacks;
        let id = *self.state_stacks.entry((stack, frame)).or_insert_with(|| {
            stacks.push((stack, frame));
            stacks.len() as u32 - 1
        });
        Some(id)
    }

    fn frame(&mut self, id: FrameId) -> u32 {
        if let Some(&known) = self.frame_ids.get(&id) {
            return known;
        }
        let tree = self.tree;
        let frame: &Frame = tree.frame(id);
        let name = self.string(&label::text(&frame.name));
        let file = frame.file.as_deref().map(|file| match frame.kind {
            // Shown after each name: the name of the library matters more than its directory.
            FrameKind::Native => label::text(label::base_name(file)),
            _ => label::text(file),
        });
        let file = file.map(|file| self.string(&file));
        let some = |line: u32| Some(line).filter(|&line| line > 0);
        let func = self.func(Func { name, file, line: some(frame.first_line) });
        let category = match frame.kind {
            FrameKind::Ruby => Category::Ruby,
            FrameKind::CFunction => Category::CFunction,
            FrameKind::Native => Category::Native,
            FrameKind::Kernel => Category::Kernel,
            FrameKind::Vm => Category::Gc,
            FrameKind::Missing => Category::Missing,
        };
        let frame = self.add_frame(TableFrame { func, category, line: some(frame.line) });
        self.frame_ids.insert(id, frame);
        frame
    }

    fn add_frame(&mut self, frame: TableFrame) -> u32 {
        self.frames.push(frame);
        self.frames.len() as u32 - 1
    }

    fn func(&mut self, func: Func) -> u32 {
        let funcs = &mut self.funcs;
        *self.func_ids.entry(func).or_insert_with(|| {
            funcs.push(func);
            funcs.len() as u32 - 1
        })
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct FrameTable<'a> {
    length: usize,
    address: Same<i32>,
    inline_depth: Same<u8>,
    category: Vec<Category>,
    subcategory: Same<u8>,
    func: Vec<u32>,
    native_symbol: Same<()>,
    #[serde(rename = "innerWindowID")]
    inner_window_id: Same<u8>,
    line: &'a [Option<u32>],
    column: Same<()>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct FuncTable {
    length: usize,
    name: Vec<u32>,
    #[serde(rename = "isJS")]
    is_js: Same<bool>,
    #[serde(rename = "relevantForJS")]
    relevant_for_js: Same<bool>,
    resource: Same<i32>,
    file_name: Vec<Option<u32>>,
    line_number: Vec<Option<u32>>,
    column_number: Same<()>,
}

#[derive(Serialize)]
struct StackTable {
    length: usize,
    prefix: Vec<Option<u32>>,
    frame: Vec<u32>,
}

#[derive(Serialize, Default)]
#[serde(rename_all = "camelCase")]
struct NoResources {
    length: usize,
    lib: [(); 0],
    name: [(); 0],
    host: [(); 0],
    r#type: [(); 0],
}

#[derive(Serialize, Default)]
#[serde(rename_all = "camelCase")]
struct NoSymbols {
    length: usize,
    address: [(); 0],
    function_size: [(); 0],
    lib_index: [(); 0],
    name: [(); 0],
}

impl Serialize for Tables<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (frames, funcs) = (self.frames.len(), self.funcs.len());
        let lines: Vec<Option<u32>> = self.frames.iter().map(|frame| frame.line).collect();
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry(
            "frameTable",
            &FrameTable {
                length: frames,
                address: Same(-1, frames),
                inline_depth: Same(0, frames),
                category: self.frames.iter().map(|frame| frame.category).collect(),
                subcategory: Same(0, frames),
                func: self.frames.iter().map(|frame| frame.func).collect(),
                native_symbol: Same((), frames),
                inner_window_id: Same(0, frames),
                line: &lines,
                column: Same((), frames),
            },
        )?;
        map.serialize_entry(
            "funcTable",
            &FuncTable {
                length: funcs,
                name: self.funcs.iter().map(|func| func.name).collect(),
                is_js: Same(false, funcs),
                relevant_for_js: Same(false, funcs),
                resource: Same(-1, funcs),
                file_name: self.funcs.iter().map(|func| func.file).collect(),
                line_number: self.funcs.iter().map(|func| func.line).collect(),
                column_number: Same((), funcs),
            },
        )?;
        map.serialize_entry(
            "stackTable",
            &StackTable {
                length: self.stacks.len(),
                prefix: self.stacks.iter().map(|stack| stack.0).collect(),
                frame: self.stacks.iter().map(|stack| stack.1).collect(),
            },
        )?;
        map.serialize_entry("resourceTable", &NoResources::default())?;
        map.serialize_entry("nativeSymbols", &NoSymbols::default())?;
        map.serialize_entry("stringArray", &self.strings)?;
        map.end()
    }
}

/// The samples of a thread.
#[derive(Serialize, Default)]
#[serde(rename_all = "camelCase")]
pub(super) struct Samples {
    length: usize,
    weight_type: &'static str,
    stack: Vec<Option<u32>>,
    time: Vec<f64>,
    weight: Vec<f64>,
    #[serde(rename = "threadCPUDelta")]
    cpu: Vec<u64>,
}

impl Samples {
    /// Samples in chronological order.
    pub(super) fn of(view: View<'_>, tables: &mut Tables<'_>, moments: &[Moment]) -> Self {
        let mut samples = Self { weight_type: "tracing-ms", ..Self::default() };
        let mut last: Option<&Moment> = None;
        for moment in moments {
            let on_cpu = |moment: &Moment| moment.key.state == ThreadState::Running;
            // The viewer spreads CPU time over the time since the previous sample. Between two clock ticks that are not
            // consecutive, the thread was not seen on a CPU: that gap must not look like work.
            let gap_begin = moment.ts_ns.saturating_sub(moment.cpu_ns);
            let gap = last.is_none_or(|last| on_cpu(last) && last.ts_ns + moment.cpu_ns / 2 < gap_begin);
            if on_cpu(moment) && gap {
                samples.push(None, view.ms(gap_begin), 0, 0);
            }
            let stack = tables.sample_stack(moment.key.node, moment.key.state);
            samples.push(stack, view.ms(moment.ts_ns), moment.time_ns(), moment.cpu_ns);
            last = Some(moment);
        }
        samples
    }

    fn push(&mut self, stack: Option<u32>, time: f64, weight_ns: u64, cpu_ns: u64) {
        self.length += 1;
        self.stack.push(stack);
        self.time.push(time);
        self.weight.push(weight_ns as f64 / 1e6);
        self.cpu.push(cpu_ns);
    }
}
