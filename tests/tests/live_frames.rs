//! Names of Ruby frames compared with Ruby's own: threads sleep in all kinds of methods, the kernel side's walk, compiled
//! for this host, reads their control frames, and the names must equal those of `Thread#backtrace_locations`.

use std::{
    cell::Cell,
    collections::{BTreeMap, BTreeSet},
    fs::File,
    process::Command,
    rc::Rc,
    sync::Arc,
};

use anyhow::{Context as _, Result, ensure};
use gctrace_cruby::{
    elf::ElfImage,
    ruby::{
        self, RubyAnalysis, RubyVersion,
        frames::{Frame, FrameKind, FrameLayout, Leaf, Memory, Namer},
        plan::{AttachPlan, plan},
        tables::{self, Table},
    },
};
use gctrace_tests::{PATIENCE, child::Guarded, live::rubies_dir, memory, ruby::Ruby};
use gctrace_user::host::mem::ProcessMemory;

#[path = "product/kernel_side.rs"]
mod kernel_side;
#[path = "product/stack.rs"]
mod stack;
use stack::{RubyFrame, Walker};

/// A frame as Ruby describes it.
#[derive(Clone, Debug)]
struct Described {
    label: String,
    base_label: String,
    /// Possible prefixes of the method's name according to reflection: `Class#`, `Class.`, or nothing; `None` if the script does
    /// not know the method.
    owners: Option<Vec<String>>,
    path: String,
    line: u32,
}

/// Stacks by Ractor and by number of the thread in it.
type Stacks<F> = BTreeMap<(usize, usize), Vec<F>>;

/// A process whose threads are asleep.
struct Sleeping {
    child: Guarded,
    described: Stacks<Described>,
    analysis: RubyAnalysis,
    plan: AttachPlan,
    bias: u64,
}

impl Sleeping {
    fn start(ruby: &Ruby) -> Result<Self> {
        let mut command: Command = ruby.command()?;
        command.args(["--disable-gems", "-W0"]).arg(rubies_dir().join("frames.rb"));
        let mut child = Guarded::start("frames.rb", &mut command)?;
        child.wait_stdout(PATIENCE, "ready", |line| line == "ready")?;
        if ruby.is_at_least(3, 0) {
            child.wait_stdout(PATIENCE, "ractor", |line| line == "ractor")?;
        }
        let mut described = Stacks::new();
        for line in child.stdout_so_far() {
            let fields: Vec<&str> = line.split('\t').collect();
            let ["frame", ractor, thread, label, base_label, owner, path, line] = fields[..] else {
                continue;
            };
            let owners =
                (owner != "?").then(|| owner.split('|').map(|owner| owner.replace('-', "")).collect());
            described.entry((ractor.parse()?, thread.parse()?)).or_default().push(Described {
                label: label.to_owned(),
                base_label: base_label.to_owned(),
                owners,
                path: path.to_owned(),
                line: line.parse()?,
            });
        }
        let code = memory::ruby_code(child.pid())?.into_iter().next().context("no code")?;
        let image = ElfImage::read(&File::open(&code.path)?)?;
        let analysis = ruby::analyse(&image)?;
        let segment = image
            .segments()
            .iter()
            .find(|segment| segment.executable)
            .context("the image has no executable segment")?;
        let first = segment.address.0.wrapping_sub(segment.offset.0).wrapping_add(code.offset);
        let plan = plan(image.segments(), analysis.clone(), true)?;
        Ok(Self { child, described, analysis, plan, bias: code.start.wrapping_sub(first) })
    }

    fn memory(&self) -> Result<ProcessMemory> {
        Ok(ProcessMemory::open(self.child.pid())?)
    }

    fn layout(&self) -> Result<Arc<FrameLayout>> {
        let table = table(self.analysis.version)?;
        Ok(Arc::new(FrameLayout::of(&self.analysis, table).map_err(anyhow::Error::msg)?))
    }

    fn namer(&self) -> Result<Namer<ProcessMemory>> {
        Ok(Namer::new(self.memory()?, self.layout()?, self.bias))
    }

    /// The control frames of all threads.
    fn stacks(&self) -> Result<Stacks<RubyFrame>> {
        let vm_ptr = self.analysis.vm.vm_ptr.0.wrapping_add(self.bias);
        Walker::new(self.memory()?, &self.plan).stacks(vm_ptr)
    }
}

fn table(version: RubyVersion) -> Result<&'static Table> {
    let release = (version.major, version.minor, version.teeny);
    let found = tables::tables().iter().find(|table| table.from <= release && release <= table.to);
    found.with_context(|| format!("no table for {version}"))
}

/// The class in a name: what remains after the parts of the label are removed.
fn without_owner(name: &str, label: &str, base: &str) -> Option<String> {
    let prefix = label.strip_suffix(base)?;
    let rest = name.strip_prefix(prefix)?;
    rest.strip_suffix(base).map(ToOwned::to_owned)
}

/// Describes the difference between a frame and its description, if there is one.
fn difference(ruby: &Ruby, frame: &Frame, described: &Described) -> Option<String> {
    let label = if ruby.is_at_least(3, 4) {
        (*frame.name == *described.label).then(String::new)
    } else {
        without_owner(&frame.name, &described.label, &described.base_label)
    };
    let Some(owner) = label else {
        return Some(format!("named {:?}, labelled {:?}", frame.name, described.label));
    };
    // From 3.4 on, Ruby's own labels contain the class. A frame without a method (a file, a class body) has no owner.
    if !ruby.is_at_least(3, 4)
        && let Some(owners) = &described.owners
        && !owners.contains(&owner)
    {
        return Some(format!("{:?} has the owner {owner:?}, not one of {owners:?}", frame.name));
    }
    match frame.kind {
        FrameKind::CFunction if frame.file.is_none() && frame.line == 0 => None,
        FrameKind::Ruby
            if frame.file.as_deref() == Some(&*described.path) && frame.line == described.line =>
        {
            None
        }
        _ => Some(format!("{frame:?} is {described:?}")),
    }
}

fn compare(ruby: &Ruby, names: &[Arc<Frame>], described: &[Described]) -> Vec<String> {
    let mut found: Vec<String> = names
        .iter()
        .zip(described)
        .filter_map(|(frame, described)| difference(ruby, frame, described))
        .collect();
    if names.len() != described.len() {
        let names: Vec<&str> = names.iter().map(|frame| &*frame.name).collect();
        let labels: Vec<&str> = described.iter().map(|frame| &*frame.label).collect();
        found.push(format!("{} frames, not {}: {names:?}, {labels:?}", names.len(), labels.len()));
    }
    found
}

/// Every frame of every thread has the name, file and line that Ruby itself gives it; the second time from the cache.
#[test]
fn names_are_those_of_ruby() -> Result<()> {
    Ruby::each(|ruby| {
        let sleeping = Sleeping::start(ruby)?;
        let stacks = sleeping.stacks()?;
        let mut namer = sleeping.namer()?;
        let mut wrong = Vec::new();
        let mut frames = 0;
        for (thread, described) in &sleeping.described {
            let raw = stacks.get(thread).with_context(|| format!("no thread {thread:?} was found"))?;
            let mut shown = Vec::new();
            namer.name(raw, 1, Leaf::Runs, &mut shown);
            wrong.extend(
                compare(ruby, &shown, described).into_iter().map(|what| format!("{thread:?}: {what}")),
            );
            let mut again = Vec::new();
            namer.name(raw, 1, Leaf::Runs, &mut again);
            ensure!(shown.iter().zip(&again).all(|(one, two)| Arc::ptr_eq(one, two)), "not interned");
            frames += shown.len();
        }
        let counts = namer.counts();
        println!("{}: {frames} frames of {} threads, {counts:?}", ruby.version(), sleeping.described.len());
        ensure!(wrong.is_empty(), "{} differences:\n{}", wrong.len(), wrong.join("\n"));
        ensure!(counts.asked == counts.named && frames > 300, "{counts:?}");
        Ok(())
    })
}

/// Whether a frame has its correct name and place. The class may be missing, because the owner may be gone.
fn is_right(ruby: &Ruby, frame: &Frame, described: &Described) -> bool {
    let named = if ruby.is_at_least(3, 4) {
        *frame.name == *described.label || *frame.name == *without_class(&described.label)
    } else {
        without_owner(&frame.name, &described.label, &described.base_label).is_some_and(|owner| {
            owner.is_empty() || described.owners.as_ref().is_none_or(|owners| owners.contains(&owner))
        })
    };
    let placed = frame.kind == FrameKind::CFunction
        || frame.file.as_deref() == Some(&*described.path) && frame.line == described.line;
    named && placed
}

/// A label of 3.4 and later without its class: `block in Foo::Bar#baz` is `block in baz`.
fn without_class(label: &str) -> String {
    let (prefix, rest) = label.rfind(" in ").map_or(("", label), |at| label.split_at(at + 4));
    let name = rest.rsplit(['#', '.']).next().unwrap_or(rest);
    format!("{prefix}{name}")
}

/// The address of the instructions of a frame's code, and the code according to its method entry (0 without one), in a process.
fn instructions(memory: &ProcessMemory, table: &Table, frame: &RubyFrame) -> Option<(u64, u64)> {
    let word = |at: u64| {
        let mut bytes = [0; 8];
        memory.read(at, &mut bytes).then(|| u64::from_le_bytes(bytes))
    };
    let at = |tag: &str, name: &str| Some(u64::from(table.structure(tag)?.field(name)?.offset));
    let body = word((frame.iseq & !RubyFrame::FLAGS) + at("rb_iseq_struct", "body")?)?;
    let method = frame.method & !RubyFrame::METHOD_FLAGS;
    let entry = if method == 0 { 0 } else { word(method + at("rb_callable_method_entry_struct", "def")?)? };
    Some((word(body + at("rb_iseq_constant_body", "iseq_encoded")?)?, entry))
}

/// Code is redefined, freed and moved before the stacks are named: frames that can no longer be named are counted, and named frames have
/// the correct name. A namer that has seen the code before notices in all cases. A namer that has not cannot notice if other code and another
/// method entry took the same places, down to the address of the instructions (see `ruby::frames`): only then a name is wrong.
#[test]
fn stale_frames_are_never_named_wrongly() -> Result<()> {
    /// Meanwhile the process runs major GCs.
    const LATER: u64 = gctrace_common::stack::MAJOR_EPOCH + 2;
    Ruby::each(|ruby| {
        let mut sleeping = Sleeping::start(ruby)?;
        let stacks = sleeping.stacks()?;
        let (mut before, mut after) = (sleeping.namer()?, sleeping.namer()?);
        let mut out = Vec::new();
        for raw in stacks.values() {
            before.name(raw, 1, Leaf::Runs, &mut out);
        }
        ensure!(before.counts().stale == 0, "{:?}", before.counts());
        let (memory, table) = (sleeping.memory()?, table(sleeping.analysis.version)?);
        let raw = || stacks.values().flatten().filter(|raw| raw.iseq & RubyFrame::CFUNC == 0);
        let known: Vec<_> = raw().map(|raw| instructions(&memory, table, raw)).collect();
        ensure!(known.iter().all(Option::is_some), "code that cannot be read");
        sleeping.child.say("redefine")?;
        sleeping.child.wait_stdout(PATIENCE, "redefined", |line| line == "redefined")?;
        let same_place: Vec<_> = raw()
            .zip(&known)
            .filter(|(raw, known)| instructions(&memory, table, raw) == **known)
            .map(|(raw, _)| *raw)
            .collect();
        let (mut wrong, mut alone) = (Vec::new(), sleeping.namer()?);
        for (namer, saw) in [(&mut before, true), (&mut after, false)] {
            let known = namer.counts();
            for (thread, described) in &sleeping.described {
                let raw = stacks.get(thread).with_context(|| format!("no thread {thread:?}"))?;
                let mut shown = Vec::new();
                namer.name(raw, LATER, Leaf::Runs, &mut shown);
                for name in shown.iter().filter(|name| name.kind != FrameKind::Missing) {
                    if described.iter().any(|described| is_right(ruby, name, described)) {
                        continue;
                    }
                    let mut replaced = raw.iter().filter(|raw| same_place.contains(raw));
                    let is_replaced = replaced.any(|raw| {
                        let mut one = Vec::new();
                        alone.name(&[*raw], LATER, Leaf::Runs, &mut one);
                        one.iter().any(|one| one.name == name.name)
                    });
                    if saw || !is_replaced {
                        wrong.push(format!("{thread:?}: {name:?}"));
                    }
                }
            }
            let counts = namer.counts();
            println!("{}: {counts:?}", ruby.version());
            ensure!(counts.stale - known.stale > 30, "{counts:?}");
            ensure!(counts.unreadable == 0 && counts.named + counts.stale == counts.asked, "{counts:?}");
        }
        ensure!(wrong.is_empty(), "{} wrong names:\n{}", wrong.len(), wrong.join("\n"));
        Ok(())
    })
}

/// Once the process has ended, its frames are counted as unreadable, even those that were named before.
#[test]
fn frames_of_a_process_that_is_gone() -> Result<()> {
    Ruby::first_and_last(|ruby| {
        let sleeping = Sleeping::start(ruby)?;
        let stacks = sleeping.stacks()?;
        let mut namer = sleeping.namer()?;
        let mut out = Vec::new();
        drop(sleeping);
        for raw in stacks.values() {
            out.clear();
            namer.name(raw, 1, Leaf::Runs, &mut out);
            let missing = out.iter().filter(|frame| frame.kind == FrameKind::Missing).count();
            ensure!(!out.is_empty() && missing == out.len(), "{missing} are missing: {out:?}");
        }
        let counts = namer.counts();
        ensure!(counts.unreadable == counts.asked && counts.asked > 300, "{counts:?}");
        Ok(())
    })
}

/// Memory that counts reads.
struct Counting {
    memory: ProcessMemory,
    reads: Rc<Cell<u64>>,
}

impl Memory for Counting {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        self.reads.set(self.reads.get() + 1);
        self.memory.read(address, buffer)
    }
}

/// The cost of naming: about ten reads for a new frame, none for a known one, and few for one that
/// is checked again after a collection.
#[test]
fn reads_are_few() -> Result<()> {
    Ruby::each(|ruby| {
        let sleeping = Sleeping::start(ruby)?;
        let stacks = sleeping.stacks()?;
        let reads = Rc::new(Cell::new(0));
        let memory = Counting { memory: sleeping.memory()?, reads: reads.clone() };
        let mut namer = Namer::new(memory, sleeping.layout()?, sleeping.bias);
        let mut cost = |epoch| {
            let before = reads.replace(0);
            let mut out = Vec::new();
            for raw in stacks.values() {
                namer.name(raw, epoch, Leaf::Runs, &mut out);
            }
            let distinct: BTreeSet<_> = out.into_iter().collect();
            ensure!(before == 0, "there were other reads");
            Ok((reads.replace(0), distinct.len() as u64))
        };
        let (first, distinct) = cost(1)?;
        let (again, _) = cost(1)?;
        let (checked, _) = cost(2)?;
        println!(
            "{}: {distinct} distinct frames: {first} reads at first, {again} again, {checked} after a collection",
            ruby.version()
        );
        // The first reads include those that read code and method again, after the data that depend on them.
        ensure!(again == 0 && first <= 13 * distinct && checked <= 6 * distinct);
        Ok(())
    })
}
