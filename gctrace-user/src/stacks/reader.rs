//! Turns stack records into stacks with named Ruby frames, on a separate thread: a moment later the process may be gone, or its objects
//! moved. Everything that can wait is left to the data thread.

use std::{
    collections::{HashMap, VecDeque},
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::JoinHandle,
    time::Duration,
};

use gctrace_common::{
    config::{AwayEntry, RubyEntry},
    event::{Header, Kind},
    stack::{Cause, GcActivity, MAX_KERNEL_FRAMES, NativeEnd, RubyFrame, StackEvent},
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::synthetic::SyntheticFrames;
use crate::{
    bpf::StackRing,
    decode::{self, Event, OwnedEvent, StackRecord},
    host::mem::ProcessMemory,
    images::Images,
    ledger::StackCounts,
    model::{stack::Frame, trace::Span},
    ruby::{
        frames::{FrameLayout, Leaf, Namer},
        threads::{Walked, loops},
    },
};

/// Maximum number of stacks that wait for the data thread; above it the ring fills, and what it loses is counted.
const MAX_TAKEN: usize = 1 << 15;
/// Maximum number of native records that wait for their stack: each CPU can have one in progress.
const MAX_PENDING: usize = 4096;
/// Maximum time that records which do not wake the reader stay in the ring while others arrive.
const BUSY: Timespec = Timespec { tv_sec: 0, tv_nsec: 5_000_000 };
/// The same after a period without records.
const IDLE: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
/// How long the thread sleeps when its results are not taken.
const FULL: Duration = Duration::from_millis(2);

/// A record of the ring, in ring order.
#[derive(Debug)]
pub enum Record {
    /// An event that shares the ring with the stacks that belong to it.
    Event(OwnedEvent),
    /// A stack.
    Stack(Box<NamedStack>),
}

impl Record {
    /// The header of the record.
    pub fn header(&self) -> &Header {
        match self {
            Self::Stack(stack) => &stack.header,
            Self::Event(event) => event.header(),
        }
    }
}

/// A stack with named Ruby frames, and the other data of its record.
#[derive(Debug)]
pub struct NamedStack {
    pub(super) header: Header,
    pub(super) cause: Cause,
    pub(super) gc: GcActivity,
    pub(super) comm: [u8; 16],
    /// CPU time that it represents, in nanoseconds.
    pub(super) weight_ns: u64,
    /// Whether its thread held the GVL while another thread waited for it.
    pub(super) blocks: bool,
    /// When the request served by its thread began, in nanoseconds; 0: no known request.
    pub(super) request_ns: u64,
    /// The span that was active on its thread.
    pub(super) span: Option<Span>,
    pub(super) stack: Unmixed,
}

impl NamedStack {
    /// The process, the thread, and when the request it serves began, in nanoseconds; 0: no known request.
    pub fn unit(&self) -> (u32, u32, u64) {
        (self.header.tgid, self.header.tid, self.request_ns)
    }

    /// The span that was active on its thread.
    pub fn span(&self) -> Option<Span> {
        self.span
    }

    /// The frames of Ruby methods, leaf first, with the marker of missing ones.
    pub fn ruby_frames(&self) -> impl Iterator<Item = &Arc<Frame>> {
        self.stack.groups.iter().flatten().chain(&self.stack.missing)
    }
}

/// A stack with named Ruby frames, before the native and kernel frames are mixed in.
#[derive(Debug)]
pub(super) struct Unmixed {
    pub(super) bias: u64,
    pub(super) cut: bool,
    pub(super) kernel: Vec<u64>,
    pub(super) native: Option<(NativeEnd, Vec<u64>)>,
    pub(super) gc: Vec<Arc<Frame>>,
    /// Frames by invocation of the interpreter loop; a single group without native frames.
    pub(super) groups: Vec<Vec<Arc<Frame>>>,
    pub(super) missing: Option<Arc<Frame>>,
}

/// A thread that was asleep when its process was found.
#[derive(Clone, Copy, Debug)]
pub struct Sleeper {
    /// The programs' entry of its process.
    pub ruby: RubyEntry,
    /// The entry to be added for the thread.
    pub away: AwayEntry,
    /// Thread id in the host's pid namespace.
    pub tid: u32,
}

/// Reads the ring until it is dropped.
pub struct Reader {
    stage: Arc<Mutex<Stage>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Reader {
    /// Starts the thread. Without `native`, records of native frames are discarded.
    pub fn start(ring: StackRing, images: Images, native: bool) -> std::io::Result<Self> {
        let fd = ring.fd()?;
        let stage = Arc::new(Mutex::new(Stage { ring, naming: Naming::new(images, native), came: false }));
        let stop = Arc::new(AtomicBool::new(false));
        let (its_stage, its_stop) = (stage.clone(), stop.clone());
        let thread = std::thread::Builder::new()
            .name("gctrace-stacks".to_owned())
            .spawn(move || read(&fd, &its_stage, &its_stop))?;
        Ok(Self { stage, stop, thread: Some(thread) })
    }

    /// Reads what is in the ring now and returns everything read so far.
    pub(super) fn take(&self, counts: &mut StackCounts) -> Vec<Record> {
        let mut stage = lock(&self.stage);
        stage.drain();
        counts.add(&std::mem::take(&mut stage.naming.counts));
        std::mem::take(&mut stage.naming.taken)
    }

    /// Adds the stack of a thread that was asleep when its process was found.
    pub(super) fn sleeper(&self, sleeper: &Sleeper, walked: &Walked) {
        lock(&self.stage).naming.sleeper(sleeper, walked);
    }

    /// Forgets a process that is gone or has become another program.
    pub(super) fn forget(&self, pid: u32) {
        lock(&self.stage).naming.namers.remove(&pid);
    }

    /// No further records can arrive: counts native frames without their stack.
    pub(super) fn finish(&self, counts: &mut StackCounts) {
        counts.natives_orphaned += std::mem::take(&mut lock(&self.stage).naming.pending).len() as u64;
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the thread that reads stacks panicked; please report this");
        }
    }
}

fn lock(stage: &Mutex<Stage>) -> MutexGuard<'_, Stage> {
    stage.lock().unwrap_or_else(PoisonError::into_inner)
}

fn read(fd: &OwnedFd, stage: &Mutex<Stage>, stop: &AtomicBool) {
    let mut period = IDLE;
    while !stop.load(Relaxed) {
        if let Err(error) = poll(&mut [PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)], Some(&period))
            && error != rustix::io::Errno::INTR
        {
            return log::error!(
                "waiting for stacks: {error}; they are read with a delay, and some may be lost or stay without names"
            );
        }
        let (full, came) = {
            let mut stage = lock(stage);
            let full = stage.drain();
            (full, std::mem::take(&mut stage.came))
        };
        // Records are arriving, no matter which of the two threads has read the latest ones.
        period = if came { BUSY } else { IDLE };
        if full {
            std::thread::sleep(FULL);
        }
    }
}

/// The ring and the stacks made from it.
struct Stage {
    ring: StackRing,
    naming: Naming,
    /// Whether records have arrived since the thread last checked.
    came: bool,
}

impl Stage {
    /// Reads what is in the ring. Returns whether there is no room for more.
    fn drain(&mut self) -> bool {
        let Self { ring, naming, came } = self;
        let room = MAX_TAKEN.saturating_sub(naming.taken.len());
        let read = ring.drain(room, |bytes| naming.record(bytes));
        *came |= read > 0;
        read == room
    }
}

struct Naming {
    images: Images,
    native: bool,
    namers: HashMap<u32, Named>,
    frames: SyntheticFrames,
    /// Native frames whose stack record has not arrived yet. It follows at once, unless it was lost.
    pending: VecDeque<Pending>,
    taken: Vec<Record>,
    counts: StackCounts,
}

/// Native frames that wait for their stack record.
struct Pending {
    pid: u32,
    tid: u32,
    ts_ns: u64,
    end: NativeEnd,
    addresses: Vec<u64>,
}

/// The frames of a process between two execs.
struct Named {
    execs: u32,
    image: u32,
    namer: Option<Namer<ProcessMemory>>,
}

impl Naming {
    fn new(images: Images, native: bool) -> Self {
        Self {
            images,
            native,
            namers: HashMap::new(),
            frames: SyntheticFrames::new(),
            pending: VecDeque::new(),
            taken: Vec::new(),
            counts: StackCounts::default(),
        }
    }

    fn record(&mut self, bytes: &[u8]) {
        match decode::decode(bytes) {
            Ok(Event::Stack(record)) => {
                self.counts.decoded_stacks += 1;
                let taken = self.stack(&record);
                self.taken.push(Record::Stack(Box::new(taken)));
            }
            Ok(Event::Native(end, event, addresses)) => {
                self.counts.decoded_natives += 1;
                self.native(&event.header, end, addresses);
            }
            Ok(event) => match event.owned() {
                Some((kind, event)) => {
                    self.counts.decoded(kind);
                    self.taken.push(Record::Event(event));
                }
                None => self.counts.undecodable_stacks += 1,
            },
            Err(error) => {
                self.counts.undecodable_stacks += 1;
                log::warn!("a stack record could not be decoded: {error}");
            }
        }
    }

    /// Keeps the native frames for the stack record that follows.
    fn native(&mut self, header: &Header, end: NativeEnd, addresses: &[u64]) {
        // A thread has one stack at a time: the stack record of earlier frames was lost.
        let before = self.pending.len();
        self.pending.retain(|p| (p.pid, p.tid) != (header.tgid, header.tid));
        if self.pending.len() >= MAX_PENDING {
            self.pending.pop_front();
        }
        self.counts.natives_orphaned += (before - self.pending.len()) as u64;
        let (pid, tid, ts_ns) = (header.tgid, header.tid, header.ts_ns);
        self.pending.push_back(Pending { pid, tid, ts_ns, end, addresses: addresses.to_vec() });
    }

    /// Creates the record that the kernel side would have made when the thread left its CPU.
    fn sleeper(&mut self, sleeper: &Sleeper, walked: &Walked) {
        let Sleeper { ruby, away, tid } = sleeper;
        let header = Header {
            kind: Kind::Stack as u32,
            point: Cause::OffCpu as u32,
            tgid: away.tgid,
            tid: *tid,
            ts_ns: away.begin_ns,
            seq: 0,
            image: away.image,
            execs: away.execs,
        };
        let event = StackEvent {
            header,
            bias: ruby.bias,
            weight_ns: 0,
            epoch: ruby.epoch,
            // It was asleep before its process was found.
            request_ns: 0,
            trace_id: [0; 2],
            span_id: 0,
            comm: away.comm,
            flags: walked.flags,
            gc: GcActivity::None as u32,
            ruby: walked.frames.len() as u32,
            kernel: 0,
            kernel_frames: [0; MAX_KERNEL_FRAMES],
        };
        let (cause, gc) = (Cause::OffCpu, GcActivity::None);
        let record = StackRecord { cause, gc, event: &event, kernel: &[], ruby: &walked.frames };
        self.counts.sleeper_stacks += 1;
        let taken = self.stack(&record);
        self.taken.push(Record::Stack(Box::new(taken)));
    }

    /// Names the Ruby frames of a record.
    fn stack(&mut self, record: &StackRecord<'_>) -> NamedStack {
        let event = record.event;
        let header = &event.header;
        let at = self
            .pending
            .iter()
            .position(|p| (p.pid, p.tid, p.ts_ns) == (header.tgid, header.tid, header.ts_ns));
        let native = at.and_then(|at| self.pending.remove(at)).filter(|_| self.native);
        let ruby = record.ruby;
        let allocates = matches!(record.cause, Cause::GcStart | Cause::Malloc | Cause::Refill);
        let mut leaf = if allocates { Leaf::Allocates } else { Leaf::Runs };
        let mut groups = Vec::new();
        if native.is_some() {
            for group in loops(ruby) {
                groups.push(self.named(event, group, leaf));
                leaf = Leaf::Calls;
            }
        } else {
            groups.push(self.named(event, ruby, leaf));
        }
        let missing = match self.frames.missing(event.flags) {
            // The VM is being set up or torn down, and nothing else is known about the thread.
            None if record.ruby.is_empty() && native.is_none() => Some(self.frames.no_frames.clone()),
            missing => missing,
        };
        let stack = Unmixed {
            bias: event.bias,
            // A stack without its root end lacks groups, so the numbers of groups cannot be compared.
            cut: event.flags & (StackEvent::TRUNCATED | StackEvent::READ_FAILED) != 0,
            kernel: record.kernel.to_vec(),
            native: native.map(|pending| (pending.end, pending.addresses)),
            gc: if record.cause == Cause::GcStart {
                Vec::new()
            } else {
                self.frames.gc(record.gc, event.flags)
            },
            groups,
            missing,
        };
        let (cause, gc, comm, weight_ns) = (record.cause, record.gc, event.comm, event.weight_ns);
        let blocks = event.flags & StackEvent::BLOCKS != 0;
        NamedStack {
            header: *header,
            cause,
            gc,
            comm,
            weight_ns,
            blocks,
            request_ns: event.request_ns,
            span: (event.flags & StackEvent::SPAN != 0)
                .then(|| Span::of_words(event.trace_id, event.span_id))
                .flatten(),
            stack,
        }
    }

    fn named(&mut self, event: &StackEvent, ruby: &[RubyFrame], leaf: Leaf) -> Vec<Arc<Frame>> {
        let mut frames = Vec::new();
        if ruby.is_empty() {
            return frames;
        }
        let Some(namer) = Self::namer(&mut self.namers, &self.images, event) else {
            // The process is gone, or access to its memory is denied: count as many frames as the walk found.
            self.counts.frames += ruby.len() as u64;
            self.counts.frames_unreadable += ruby.len() as u64;
            frames.resize(ruby.len(), Arc::clone(&self.frames.unreadable));
            return frames;
        };
        let before = namer.counts();
        namer.name(ruby, event.epoch, leaf, &mut frames);
        let after = namer.counts();
        let counts = &mut self.counts;
        counts.frames += after.asked - before.asked;
        counts.frames_named += after.named - before.named;
        counts.frames_stale += after.stale - before.stale;
        counts.frames_unreadable += after.unreadable - before.unreadable;
        counts.frames_without_symbols += after.no_symbols - before.no_symbols;
        frames
    }

    /// The namer for the process as of the time of the record; `None` if its frames cannot be named.
    fn namer<'a>(
        namers: &'a mut HashMap<u32, Named>,
        images: &Images,
        event: &StackEvent,
    ) -> Option<&'a mut Namer<ProcessMemory>> {
        let header = &event.header;
        let fresh = || Named { execs: header.execs, image: header.image, namer: None };
        let named = namers.entry(header.tgid).or_insert_with(fresh);
        if (named.execs, named.image) != (header.execs, header.image) {
            *named = fresh();
        }
        if named.namer.is_none() {
            let memory = ProcessMemory::open(header.tgid).ok()?;
            let layout: Arc<FrameLayout> = images.get(header.image)?.frames.clone()?;
            named.namer = Some(Namer::new(memory, layout, event.bias));
        }
        named.namer.as_mut()
    }
}
