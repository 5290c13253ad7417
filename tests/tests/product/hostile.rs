//! A recording of a program whose names are hostile.

use std::sync::Arc;

use gctrace_user::{
    export::{ExportError, Exporter},
    ledger::Ledger,
    model::{
        GcCycle, Process,
        request::Request,
        seen::{AllocStack, Seen},
        stack::{Frame, Stack, StackSample},
    },
    trace_file::Recorder,
};

/// The thread name of a program that wants to run a script in its reader's browser.
pub(crate) const HOSTILE: &str = "</text></svg><script>alert(1)</script>\"'><img src=x onerror=alert(2)>";

/// The same stack with hostile names of methods and files. A part of the original name follows, so that they stay distinct.
fn stack(of: &Stack) -> Stack {
    let frame = |frame: &Arc<Frame>| {
        let name = |name: &str| Arc::from(format!("{HOSTILE}{name}"));
        Arc::new(Frame {
            name: name(&frame.name),
            file: frame.file.as_deref().map(name),
            ..Frame::clone(frame)
        })
    };
    of.iter().map(frame).collect()
}

/// Records everything under hostile names.
pub(crate) struct Hostile(pub(crate) Recorder);

impl Exporter for Hostile {
    fn see(&mut self, process: &Process, seen: Seen<'_>) -> Result<(), ExportError> {
        let mut process = process.clone();
        HOSTILE.clone_into(&mut process.comm);
        process.cmdline = Some(vec![HOSTILE.to_owned()]);
        match seen {
            Seen::Cycle(cycle) => self.0.see(
                &process,
                Seen::Cycle(&GcCycle {
                    comm: HOSTILE.to_owned(),
                    trigger: cycle.trigger.as_ref().map(stack),
                    ..cycle.clone()
                }),
            ),
            Seen::Stack(sample) => self.0.see(
                &process,
                Seen::Stack(&StackSample {
                    comm: HOSTILE.into(),
                    stack: stack(&sample.stack),
                    ..sample.clone()
                }),
            ),
            Seen::GvlSpan(span) => {
                let mut span = span.clone();
                span.who.comm = HOSTILE.into();
                self.0.see(&process, Seen::GvlSpan(&span))
            }
            Seen::GvlWait(wait) => {
                let mut wait = wait.clone();
                wait.who.comm = HOSTILE.into();
                wait.stack = wait.stack.as_ref().map(stack);
                if let Some(blocker) = &mut wait.blocker {
                    blocker.hold.who.comm = HOSTILE.into();
                    blocker.until = blocker.until.as_ref().map(stack);
                    blocker.ran.iter_mut().for_each(|(_, ran)| *ran = stack(ran));
                }
                self.0.see(&process, Seen::GvlWait(&wait))
            }
            Seen::AllocStack(alloc) => {
                let (comm, stack) = (HOSTILE.into(), stack(&alloc.stack));
                self.0.see(&process, Seen::AllocStack(&AllocStack { comm, stack, ..alloc.clone() }))
            }
            Seen::Request(request) => {
                let path = request.path.as_ref().map(|path| format!("{HOSTILE}{path}"));
                self.0.see(&process, Seen::Request(&Request { path, ..request.clone() }))
            }
            seen => self.0.see(&process, seen),
        }
    }
    fn began(&mut self, ts_ns: u64) {
        self.0.began(ts_ns);
    }
    fn closed(&mut self, ts_ns: u64) {
        self.0.closed(ts_ns);
    }
    fn finish(&mut self, ledger: &Ledger) -> Result<(), ExportError> {
        self.0.finish(ledger)
    }
    fn settled(&mut self, ledger: &Ledger) -> Result<(), ExportError> {
        self.0.settled(ledger)
    }
}
