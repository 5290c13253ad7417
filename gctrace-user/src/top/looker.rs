//! Reads the threads of the process that is shown in detail, in a separate thread: the kernel may block it.

use std::{
    path::PathBuf,
    sync::mpsc::{Receiver, Sender, TryRecvError, channel},
    time::{Duration, Instant},
};

use crate::dump::{Dump, Looker as Threads};

/// Time for which the kernel may block the thread before that is reported, and before another process gets a new thread.
const PATIENCE: Duration = Duration::from_secs(5);
/// Maximum number of blocked threads: one for each process that cannot be read.
const MOST_WAITING: usize = 8;

/// A thread that reads processes on request.
struct Worker {
    ask: Sender<u32>,
    answers: Receiver<(u32, Result<Dump, String>)>,
    /// The process that it is reading, and since when.
    busy: Option<(u32, Instant)>,
}

/// The current thread, blocked ones, and the last result.
pub(super) struct Looker {
    cache_dir: Option<PathBuf>,
    worker: Worker,
    /// Threads that were left behind blocked.
    waiting: Vec<Worker>,
    /// The last result, and its process.
    pub(super) last: Option<(u32, Result<Dump, String>)>,
}

impl Worker {
    fn start(cache_dir: Option<PathBuf>) -> std::io::Result<Self> {
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
        Ok(Self { ask, answers, busy: None })
    }
}

fn blocked(pid: u32, since: Instant) -> Result<Dump, String> {
    let seconds = since.elapsed().as_secs();
    Err(format!("the kernel has blocked reading pid {pid} for {seconds} s: a thread of it may be in state D"))
}

impl Looker {
    /// Starts the thread.
    pub(super) fn start(cache_dir: Option<PathBuf>) -> std::io::Result<Self> {
        let worker = Worker::start(cache_dir.clone())?;
        Ok(Self { cache_dir, worker, waiting: Vec::new(), last: None })
    }

    /// Takes results, and requests a read of the process unless one is in progress; `again`: also if its threads are known.
    pub(super) fn look(&mut self, pid: u32, again: bool) {
        while let Ok(found) = self.worker.answers.try_recv() {
            self.worker.busy = None;
            self.last = Some(found);
        }
        if self.last.as_ref().is_some_and(|(last, _)| *last != pid) {
            self.last = None;
        }
        // Results of blocked threads are outdated. A thread ends when its channels are dropped.
        self.waiting.retain(|worker| matches!(worker.answers.try_recv(), Err(TryRecvError::Empty)));
        let late = |worker: &Worker| worker.busy.filter(|(_, since)| since.elapsed() >= PATIENCE);
        if let Some((_, since)) = self.waiting.iter().filter_map(late).find(|(asked, _)| *asked == pid) {
            self.last = Some((pid, blocked(pid, since)));
            return;
        }
        if let Some((asked, since)) = late(&self.worker) {
            if asked == pid || self.waiting.len() >= MOST_WAITING {
                self.last = Some((pid, blocked(asked, since)));
                return;
            }
            match Worker::start(self.cache_dir.clone()) {
                Ok(worker) => self.waiting.push(std::mem::replace(&mut self.worker, worker)),
                Err(error) => {
                    self.last = Some((pid, Err(format!("cannot start a thread that reads it: {error}"))));
                    return;
                }
            }
        }
        if self.worker.busy.is_none() && (again || self.last.is_none()) && self.worker.ask.send(pid).is_ok() {
            self.worker.busy = Some((pid, Instant::now()));
        }
    }

    /// Whether the threads of a process are known.
    pub(super) fn knows(&self, pid: u32) -> bool {
        self.last.as_ref().is_some_and(|(last, _)| *last == pid)
    }
}
