//! Looks at the threads of the process that is shown in detail, on a thread of its own: the kernel may make it wait.

use std::{
    path::PathBuf,
    sync::mpsc::{Receiver, Sender, channel},
};

use crate::dump::{Dump, Looker as Threads};

/// The thread, and what it has found.
pub(super) struct Looker {
    ask: Sender<u32>,
    answers: Receiver<(u32, Result<Dump, String>)>,
    /// Whether it is looking.
    busy: bool,
    /// What it found last, and of which process.
    pub(super) last: Option<(u32, Result<Dump, String>)>,
}

impl Looker {
    /// Starts the thread.
    pub(super) fn start(cache_dir: Option<PathBuf>) -> std::io::Result<Self> {
        let (ask, asked) = channel::<u32>();
        let (answer, answers) = channel();
        std::thread::Builder::new().name("gctrace-looker".to_owned()).spawn(move || {
            let mut threads = Threads::new(cache_dir.as_deref());
            for pid in asked {
                let dump = threads.look(pid).map_err(|failure| failure.to_string());
                if answer.send((pid, dump)).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self { ask, answers, busy: false, last: None })
    }

    /// Takes what was found, and asks for the process unless that is under way; `again`: also if its threads are known.
    pub(super) fn look(&mut self, pid: u32, again: bool) {
        while let Ok(found) = self.answers.try_recv() {
            self.busy = false;
            self.last = Some(found);
        }
        if self.last.as_ref().is_some_and(|(last, _)| *last != pid) {
            self.last = None;
        }
        if !self.busy && (again || self.last.is_none()) {
            self.busy = self.ask.send(pid).is_ok();
        }
    }

    /// Whether the threads of a process are known.
    pub(super) fn knows(&self, pid: u32) -> bool {
        self.last.as_ref().is_some_and(|(last, _)| *last == pid)
    }
}
