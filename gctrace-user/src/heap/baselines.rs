//! What processes share with others when they are first seen, read by a separate thread soon after their fork.

use std::{
    collections::HashMap,
    io,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use crate::host::{
    residency::mappings,
    sharing::{SharedPages, SharingError},
};

/// Maximum number of processes remembered at a time: each is an open file.
const MOST: usize = 256;
/// The thread rests this many times as long as it has read, so that a server that forks for each job does not keep it busy.
const REST: u32 = 1;

/// What a process shared at first.
enum Baseline {
    /// Not read yet.
    Wanted,
    Read(SharedPages),
    Unknown(String),
}

type Known = Arc<Mutex<HashMap<u32, Baseline>>>;

/// Reads and remembers what processes share.
pub(super) struct Baselines {
    known: Known,
    wanted: Option<SyncSender<u32>>,
    thread: Option<JoinHandle<()>>,
    over: Arc<AtomicBool>,
}

impl Baselines {
    /// Starts the thread.
    pub(super) fn start() -> io::Result<Self> {
        let (wanted, receiver) = sync_channel(MOST);
        let (known, over) = (Known::default(), Arc::new(AtomicBool::new(false)));
        let (of_thread, until) = (Arc::clone(&known), Arc::clone(&over));
        let name = std::thread::Builder::new().name("gctrace-sharing".to_owned());
        let thread = name.spawn(move || read(&receiver, &of_thread, &until))?;
        Ok(Self { known, wanted: Some(wanted), thread: Some(thread), over })
    }

    /// A process has been seen; only the first call for it counts.
    pub(super) fn want(&self, pid: u32) {
        let mut known = lock(&self.known);
        if known.contains_key(&pid) {
            return;
        }
        let room = known.len() < MOST;
        // The queue has room for all remembered processes, unless they come and go faster than they are read.
        let queued = room && self.wanted.as_ref().is_some_and(|wanted| wanted.try_send(pid).is_ok());
        if queued {
            known.insert(pid, Baseline::Wanted);
        }
    }

    /// The process has ended.
    pub(super) fn forget(&self, pid: u32) {
        lock(&self.known).remove(&pid);
    }

    /// Stops reading and joins the thread.
    pub(super) fn end(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        drop(self.wanted.take());
        let Some(thread) = self.thread.take() else { return };
        thread.thread().unpark();
        if thread.join().is_err() {
            log::warn!("the thread that reads what processes share has failed");
        }
    }

    /// What the process shared at first, or why that is unknown.
    pub(super) fn take(&self, pid: u32) -> Result<SharedPages, String> {
        match lock(&self.known).remove(&pid) {
            Some(Baseline::Read(pages)) => Ok(pages),
            Some(Baseline::Unknown(reason)) => Err(reason),
            Some(Baseline::Wanted) => Err("the run ended before it was read".to_owned()),
            None => Err(format!(
                "too many processes: the shared memory of at most {MOST} at a time is remembered"
            )),
        }
    }
}

impl Drop for Baselines {
    fn drop(&mut self) {
        self.end();
    }
}

fn lock(known: &Known) -> std::sync::MutexGuard<'_, HashMap<u32, Baseline>> {
    known.lock().unwrap_or_else(PoisonError::into_inner)
}

fn read(wanted: &Receiver<u32>, known: &Known, over: &AtomicBool) {
    for pid in wanted {
        if over.load(Ordering::Relaxed) {
            return;
        }
        let begin = Instant::now();
        let pages = mappings(pid).map_err(SharingError::from).and_then(|maps| SharedPages::read(pid, &maps));
        let baseline = pages.map_or_else(|error| Baseline::Unknown(error.to_string()), Baseline::Read);
        // The process may have ended meanwhile.
        if let Some(known) = lock(known).get_mut(&pid) {
            *known = baseline;
            log::info!("pid {pid}: what it shares has been read");
        }
        pause(rest(begin.elapsed()), over);
    }
}

/// The time to rest after so much reading.
fn rest(read: Duration) -> Duration {
    read * REST
}

/// Rests until the time is over, or the end of the run wakes the thread.
fn pause(time: Duration, over: &AtomicBool) {
    let begin = Instant::now();
    while let Some(left) = time.checked_sub(begin.elapsed()).filter(|left| !left.is_zero())
        && !over.load(Ordering::Relaxed)
    {
        std::thread::park_timeout(left);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The thread rests at least as long as it reads, however long that takes; the end of the run does not wait for it.
    #[test]
    fn rests() {
        for read in [1, 150, 200, 201, 60_000].map(Duration::from_millis) {
            assert!(rest(read) >= read, "{read:?}");
        }
        let over = Arc::new(AtomicBool::new(false));
        let of_thread = Arc::clone(&over);
        let thread = std::thread::spawn(move || pause(Duration::from_hours(1), &of_thread));
        over.store(true, Ordering::Relaxed);
        thread.thread().unpark();
        thread.join().unwrap();
        let begin = Instant::now();
        pause(Duration::from_millis(5), &AtomicBool::new(false));
        assert!(begin.elapsed() >= Duration::from_millis(5));
    }

    /// For a process that is gone, was forgotten, or exceeded the limit, there is a reason why its baseline is unknown.
    #[test]
    fn reasons() {
        let mut baselines = Baselines::start().unwrap();
        let gone = u32::MAX >> 2;
        baselines.want(gone);
        while matches!(lock(&baselines.known).get(&gone), Some(Baseline::Wanted)) {
            std::thread::yield_now();
        }
        assert!(baselines.take(gone).unwrap_err().contains("cannot be read"));
        for pid in 0..1000 {
            baselines.want(gone - pid);
        }
        assert!(lock(&baselines.known).len() <= MOST);
        baselines.forget(gone - 1);
        baselines.end();
        assert!(baselines.take(gone - 1).unwrap_err().contains("too many processes"));
    }
}
