//! Recordings that are derived from a committed one: longer, and with hostile names.

use std::{path::Path, sync::Arc};

use gctrace_report::{
    export::{ExportError, Exporter, Outputs},
    ledger::Ledger,
    model::{
        GcCycle, GcState, Process,
        gvl::GvlGap,
        request::{Request, RequestMemory, States},
        seen::{AllocStack, AllocSum, ProcessEnd, Seen},
        stack::{Frame, FrameKind, Stack, StackSample},
    },
    trace_file::{self, Recorder, Recording},
};

use super::GOLDEN;

/// Number of consecutive copies that belong to one process.
pub(super) const LIFE: u64 = 4;
/// Time from one copy to the next.
const EACH_NS: u64 = 3_000_000_000;

/// Records what it receives again, at a later time or under other names.
struct Again {
    recorder: Recorder,
    later_ns: u64,
    name: Option<&'static str>,
    /// Whether this is the first copy, and whether it is the last.
    ends: [bool; 2],
    /// Whether the process begins in this copy, and whether it ends.
    life: [bool; 2],
    /// Offset that is added to its pid.
    pid: u32,
    requests: u64,
}

impl Again {
    fn text(&self, text: &str) -> Arc<str> {
        Arc::from(self.name.unwrap_or(text))
    }

    fn stack(&self, stack: &Stack) -> Stack {
        let frame = |frame: &Arc<Frame>| match self.name {
            None => Arc::clone(frame),
            Some(name) => Arc::new(Frame {
                name: Arc::from(name),
                file: frame.file.as_ref().map(|_| Arc::from(format!("/srv/{name}.rb"))),
                ..(**frame).clone()
            }),
        };
        stack.iter().map(frame).collect()
    }

    fn state(&self, state: &GcState) -> GcState {
        GcState { ts_ns: state.ts_ns + self.later_ns, ..state.clone() }
    }

    fn process(&self, process: &Process) -> Process {
        let mut process = process.clone();
        process.pid += self.pid;
        if let Some(name) = self.name {
            process.comm = name.to_owned();
            process.cmdline = Some(vec![name.to_owned(); 2]);
            process.hostname = Some(name.to_owned());
            let mut origin = (*process.origin).clone();
            origin.service = name.to_owned();
            process.origin = Arc::new(origin);
        }
        process
    }
}

impl Exporter for Again {
    fn see(&mut self, process: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        let process = &self.process(process);
        let later_ns = self.later_ns;
        let [first, last] = self.life;
        match seen {
            Seen::Process { state, now_ns, since_ns } if first => {
                let state = state.map(|state| self.state(state));
                self.recorder.see(
                    process,
                    Seen::Process {
                        state: state.as_ref(),
                        now_ns: now_ns + later_ns,
                        since_ns: since_ns + later_ns,
                    },
                )
            }
            Seen::Ended(end) if last => {
                let ts_ns = end.ts_ns + later_ns;
                self.recorder.see(process, Seen::Ended(&ProcessEnd { ts_ns, ..end.clone() }))
            }
            Seen::Cycle(cycle) => {
                let mut pauses = cycle.pauses.clone();
                for pause in &mut pauses {
                    pause.begin_ns += later_ns;
                }
                let cycle = GcCycle {
                    comm: self.text(&cycle.comm).to_string(),
                    start: self.state(&cycle.start),
                    end: cycle.end.as_ref().map(|end| self.state(end)),
                    pauses,
                    trigger: cycle.trigger.as_ref().map(|stack| self.stack(stack)),
                    ..cycle.clone()
                };
                self.recorder.see(process, Seen::Cycle(&cycle))
            }
            Seen::Stack(sample) => {
                if self.name.is_some() {
                    self.requests += 1;
                    let request = request(self.requests, sample.tid, sample.ts_ns + later_ns);
                    self.recorder.see(process, Seen::Request(&request))?;
                }
                let sample = StackSample {
                    ts_ns: sample.ts_ns + later_ns,
                    comm: self.text(&sample.comm),
                    stack: self.stack(&sample.stack),
                    ..sample.clone()
                };
                self.recorder.see(process, Seen::Stack(&sample))
            }
            Seen::Alloc(sum) => {
                let (begin_ns, end_ns) = (sum.begin_ns + later_ns, sum.end_ns + later_ns);
                self.recorder.see(process, Seen::Alloc(&AllocSum { begin_ns, end_ns, ..sum.clone() }))
            }
            Seen::AllocStack(alloc) => {
                let ts_ns = alloc.ts_ns + later_ns;
                let (comm, stack) = (self.text(&alloc.comm), self.stack(&alloc.stack));
                self.recorder
                    .see(process, Seen::AllocStack(&AllocStack { ts_ns, comm, stack, ..alloc.clone() }))
            }
            Seen::GvlWait(wait) => {
                let mut wait = wait.clone();
                wait.begin_ns += later_ns;
                wait.who.comm = self.text(&wait.who.comm);
                wait.stack = wait.stack.map(|stack| self.stack(&stack));
                if let Some(blocker) = &mut wait.blocker {
                    blocker.hold.begin_ns += later_ns;
                    blocker.hold.who.comm = self.text(&blocker.hold.who.comm);
                    blocker.until = blocker.until.as_ref().map(|stack| self.stack(stack));
                    blocker.ran.iter_mut().for_each(|(_, stack)| *stack = self.stack(stack));
                }
                self.recorder.see(process, Seen::GvlWait(&wait))
            }
            Seen::GvlThread(thread) if last => {
                let mut thread = thread.clone();
                thread.who.comm = self.text(&thread.who.comm);
                self.recorder.see(process, Seen::GvlThread(&thread))
            }
            Seen::GvlSpan(span) => {
                let mut span = span.clone();
                span.begin_ns += later_ns;
                span.who.comm = self.text(&span.who.comm);
                self.recorder.see(process, Seen::GvlSpan(&span))
            }
            Seen::GvlProcess(_) if last => self.recorder.see(process, seen),
            _ => Ok(()),
        }
    }

    fn began(&mut self, ts_ns: u64) {
        if self.ends[0] {
            self.recorder.began(ts_ns + self.later_ns);
        }
    }

    fn closed(&mut self, ts_ns: u64) {
        if self.ends[1] {
            self.recorder.closed(ts_ns + self.later_ns);
        }
    }

    fn gvl_gap(&mut self, gap: GvlGap) {
        self.recorder.gvl_gap(gap);
    }

    fn account(&mut self, ledger: &Ledger) {
        self.recorder.account(ledger);
    }

    fn flush(&mut self, now_ns: u64) -> Result<(), ExportError> {
        self.recorder.flush(now_ns + self.later_ns)
    }

    fn finish(&mut self, ledger: &Ledger) -> Result<(), ExportError> {
        if self.ends[1] { self.recorder.finish(ledger) } else { Ok(()) }
    }

    fn settled(&mut self, ledger: &Ledger) -> Result<(), ExportError> {
        if self.ends[1] { self.recorder.settled(ledger) } else { Ok(()) }
    }
}

fn request(id: u64, tid: u32, begin_ns: u64) -> Request {
    Request {
        id,
        tid,
        begin_ns,
        end_ns: Some(begin_ns + 1_000_000),
        method: Some("GET"),
        path: Some("/<script>alert(3)</script>\"><img/onerror=alert(4)>".to_owned()),
        status: Some(500),
        queue_ns: None,
        first_byte_ns: None,
        last_byte_ns: None,
        response_bytes: None,
        gcs: None,
        gc_ns: None,
        gc_pauses: None,
        gc_other: None,
        gvl_wait_ns: None,
        // Known only for every second request.
        states: id.is_multiple_of(2).then_some(States {
            cpu_ns: 120_000,
            runnable_ns: 250_000,
            blocked_ns: 630_000,
        }),
        alloc: None,
        memory: RequestMemory::default(),
        job: None,
        is_run: false,
        handler: Some(Arc::new(Frame {
            kind: FrameKind::Ruby,
            name: "Orders<Controller>#show".into(),
            file: Some("/srv/orders.rb".into()),
            line: 12,
            first_line: 12,
            address: 0,
        })),
        split: None,
        gc_states: None,
        trace: None,
    }
}

/// Writes a recording of `copies` copies of the committed one, one after the other.
pub(super) fn write(path: &Path, copies: u64, name: Option<&'static str>) {
    let mut header = Recording::open(Path::new(GOLDEN)).unwrap().header().clone();
    if let Some(name) = name {
        header.subjects.requests = true;
        header.gctrace = name.to_owned();
        header.host.name = Some(name.to_owned());
        header.host.kernel = Some(name.to_owned());
    }
    let mut recorder = Some(Recorder::create(path, &header).unwrap());
    for copy in 0..copies {
        let again = Again {
            recorder: recorder.take().unwrap(),
            later_ns: copy * EACH_NS,
            name,
            ends: [copy == 0, copy + 1 == copies],
            life: [copy % LIFE == 0, copy % LIFE == LIFE - 1 || copy + 1 == copies],
            pid: (copy / LIFE) as u32,
            requests: 0,
        };
        let shared = std::rc::Rc::new(std::cell::RefCell::new(Some(again)));
        let mut recording = Recording::open(Path::new(GOLDEN)).unwrap();
        let mut outputs = Outputs::new(vec![Box::new(Handing(shared.clone()))]);
        trace_file::replay(&mut recording, &mut outputs).unwrap();
        assert!(outputs.failures().is_empty(), "{:?}", outputs.failures());
        recorder = shared.take().map(|again| again.recorder);
    }
}

/// Forwards to a recorder that is taken out of it at the end.
struct Handing(std::rc::Rc<std::cell::RefCell<Option<Again>>>);

impl Handing {
    fn with<T>(&self, by: impl FnOnce(&mut Again) -> T) -> T {
        by(self.0.borrow_mut().as_mut().unwrap())
    }
}

impl Exporter for Handing {
    fn see(&mut self, process: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        self.with(|again| again.see(process, seen))
    }
    fn began(&mut self, ts_ns: u64) {
        self.with(|again| again.began(ts_ns));
    }
    fn closed(&mut self, ts_ns: u64) {
        self.with(|again| again.closed(ts_ns));
    }
    fn gvl_gap(&mut self, gap: GvlGap) {
        self.with(|again| again.gvl_gap(gap));
    }
    fn account(&mut self, ledger: &Ledger) {
        self.with(|again| again.account(ledger));
    }
    fn flush(&mut self, now_ns: u64) -> Result<(), ExportError> {
        self.with(|again| again.flush(now_ns))
    }
    fn finish(&mut self, ledger: &Ledger) -> Result<(), ExportError> {
        self.with(|again| again.finish(ledger))
    }
    fn settled(&mut self, ledger: &Ledger) -> Result<(), ExportError> {
        self.with(|again| again.settled(ledger))
    }
}
