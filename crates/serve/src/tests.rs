//! Pages and files of recordings that are made from a committed one: longer, and with hostile names.

use std::{path::Path, sync::Arc};

use gctrace_report::{
    export::{
        ExportError, Exporter, Outputs,
        profile::{Format, Graph, Grouping, Measure},
        window::Window,
    },
    ledger::Ledger,
    model::{
        GcCycle, GcState, Process,
        gvl::GvlGap,
        request::Request,
        seen::{AllocStack, AllocSum, ProcessEnd, Seen},
        stack::{Frame, Stack, StackSample},
    },
    trace_file::{self, Recorder, Recording},
};

use crate::{
    Asked, graph, page,
    source::{Source, View, Whole},
    wanted::Wanted,
};

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/recordings/3.4.gctrace");
const HOSTILE: &str =
    "</title></script><script>alert(1)</script>\"'><img src=x onerror=alert(2)>\u{202e}\u{1b}[2J";
/// Copies that are of one process.
const LIFE: u64 = 4;
/// From one copy to the next.
const EACH_NS: u64 = 3_000_000_000;

/// Records what it gets again, later or under other names.
struct Again {
    recorder: Recorder,
    later_ns: u64,
    name: Option<&'static str>,
    /// Whether this is the first copy, and the last.
    ends: [bool; 2],
    /// Whether the process begins in this copy, and ends.
    life: [bool; 2],
    /// Added to its pid.
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
            Seen::Process { state, now_ns } if first => {
                let state = state.map(|state| self.state(state));
                self.recorder.see(process, Seen::Process { state: state.as_ref(), now_ns: now_ns + later_ns })
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
                    let request = request(self.requests, sample.tid, sample.ts_ns);
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
        gcs: None,
        gc_ns: None,
        gc_pauses: None,
        gc_other: None,
        gvl_wait_ns: None,
        states: None,
        job: None,
        gc_states: None,
    }
}

/// Writes a recording of so many copies of the committed one, one after the other.
fn write(path: &Path, copies: u64, name: Option<&'static str>) {
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

/// Hands on to what is taken out of it at the end.
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

fn served(path: &Path) -> (Source, Arc<Whole>) {
    let source = Source::open(path).unwrap();
    source.read().unwrap();
    let whole = source.whole(std::time::Duration::ZERO).unwrap();
    (source, whole)
}

fn shown(source: &Source, whole: &Whole, view: &View, of: Measure) -> (String, String) {
    let drawn = view.graphs.of(&view.kept, of).unwrap();
    let asked = Asked { pids: vec![HOSTILE.to_owned()], ..Asked::default() };
    let wanted = Wanted { asked, window: view.window.clone(), of };
    (page::page(source, whole, view, &wanted, &drawn), String::from_utf8(drawn.svg.clone()).unwrap())
}

/// Names of everything are text, on the page, in graphs, and where something is wrong with a request.
#[test]
fn hostile() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(format!("{}.gctrace", HOSTILE.replace('/', "\u{2215}")));
    write(&path, 1, Some(HOSTILE));
    let (source, whole) = served(&path);
    let mut texts = vec![page::refused(&source, HOSTILE), page::reading(&source)];
    for (of, ..) in graph::MEASURES {
        let (page, svg) = shown(&source, &whole, &whole.view, of);
        assert!(page.matches("&lt;script&gt;alert(1)").count() > 10, "{page}");
        assert!(page.contains("&lt;script&gt;alert(3)"), "the endpoint is there: {page}");
        // A browser that takes the name as XML.
        let elements = svg.matches("<script").count();
        assert!(elements <= 1 && !svg.contains("<img"), "{elements}: {svg}");
        assert!(!svg.contains(['\u{202e}', '\u{1b}']), "{svg}");
        texts.push(page);
    }
    for text in texts {
        let scripts = text.matches("<script").count();
        assert_eq!(scripts, text.matches("<script src=\"brush.js\" defer></script>").count(), "{text}");
        assert!(!text.contains("<img") && !text.contains(['\u{202e}', '\u{1b}']), "{text}");
        assert!(!text.contains("\"'>"), "an attribute ends there: {text}");
    }
}

/// A part that is read by the index has what it has of the whole file, and is read without the rest.
#[test]
fn parts_by_the_index() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("long.gctrace");
    write(&path, 40, None);
    let (source, whole) = served(&path);
    let begun_ns = source.header.begun_ns;
    let folded = Format::Folded(Graph { grouping: Grouping::default(), of: Measure::Cpu });
    let all = &whole.view;
    assert_eq!(all.figures.cycles, 40 * 18);
    for (from, to) in [
        (0, 2500),
        (30_800, 31_000),
        (30_900, 31_000),
        (31_900, 64_000),
        (60_000, 60_100),
        (119_000, 300_000),
        (400_000, 500_000),
    ] {
        let at = |ms: u64| Some(begun_ns + ms * 1_000_000);
        let window = Window { from_ns: at(from), to_ns: at(to), ..Window::default() };
        let (needed, of) = whole.needed(&window);
        assert!(of >= 40 && (to - from > 30_000 || needed <= 25), "{needed} of {of} chunks");
        let view = source.with_times(&whole, &window).unwrap();
        let plain = source.without_index(&window).unwrap();
        for format in [folded, Format::Pprof, Format::Firefox, Format::Perfetto, Format::Speedscope] {
            let bytes = |view: &View| {
                let mut bytes = Vec::new();
                view.kept.write(format, &mut bytes).unwrap();
                bytes
            };
            assert!(bytes(&view) == bytes(&plain), "{from} {to} {format:?}");
        }
        assert_eq!(view.processes, plain.processes);
        assert_eq!(view.figures.cycles, plain.figures.cycles);
        let cells = |view: &View| view.figures.columns.cells.clone();
        assert_eq!(cells(&view), cells(&plain));
        // Nothing of a process that was never seen.
        let nobody = Window { pids: [7].into(), ..window.clone() };
        assert!(whole.needed(&nobody).0 <= 24, "{:?}", whole.needed(&nobody));
        // The same again is not read again.
        let first = source.view(&whole, &window).unwrap();
        assert!(Arc::ptr_eq(&first, &source.view(&whole, &window).unwrap()));
    }
    let of = |pids: &[u32]| Window { pids: pids.iter().copied().collect(), ..Window::default() };
    let pid = all.figures.processes[0].pid;
    let pids: Vec<u32> = (0..10).map(|n| pid + n).collect();
    assert!(Arc::ptr_eq(all, &source.view(&whole, &of(&pids)).unwrap()), "all processes are the whole");
    for chosen in [&[pid + 3][..], &[pid, pid + 9]] {
        let window = of(chosen);
        let (needed, of) = whole.needed(&window);
        assert!(needed < of * 3 / 4, "{needed} of {of} chunks");
        let plain = source.without_index(&window).unwrap();
        let view = source.with_times(&whole, &window).unwrap();
        assert_eq!(
            (view.processes, view.figures.cycles),
            (chosen.len() as u64, 18 * LIFE * chosen.len() as u64)
        );
        let bytes = |view: &View| {
            let mut bytes = Vec::new();
            view.kept.write(Format::Firefox, &mut bytes).unwrap();
            bytes
        };
        assert!(bytes(&view) == bytes(&plain), "{chosen:?}");
    }
    // Numbers of other processes, one of which has the same bit.
    for pid in [7, pid + 64] {
        assert!(source.view(&whole, &of(&[pid])).unwrap().figures.is_empty());
    }
}
