//! The upload engine: a queue in front of a peer that may be slow, unreachable or hostile. The tracer hands over jobs and never blocks;
//! one thread sends them, in order, and retries with back-off. Users of the engine define where jobs are queued ([`Backlog`]: in memory
//! or on disk) and how one is sent ([`Peer`]); the engine does the counts, the retries, the limits and the messages about them.

use std::{
    cell::{Cell, RefCell},
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use super::notices::{Notices, Reason};

/// The usual [`Policy::first_pause`].
pub(in crate::export) const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// How long the thread waits for a job before it tends the backlog.
const IDLE: Duration = Duration::from_mins(1);
/// The final wait is announced after this time.
const PROMPT: Duration = Duration::from_millis(500);

/// The queue of jobs.
pub(in crate::export) trait Backlog: Send + 'static {
    /// What the tracer hands over.
    type Job: Send + 'static;
    /// What the peer receives.
    type Item<'a>;
    /// Appends a job. `room` is its share of the memory queue, until it is dropped.
    fn push(&mut self, job: Self::Job, room: Room) -> io::Result<()>;
    /// The item at the front. Items that cannot be sent any more are removed first ([`Backlog::take_gone`]).
    fn front(&mut self) -> Option<Self::Item<'_>>;
    /// Counts a failed attempt to send the front; returns the number of failed attempts.
    fn failed(&mut self) -> u32;
    /// Removes the front.
    fn pop(&mut self);
    /// Moves the front to the end.
    fn requeue(&mut self);
    /// Replaces the front by its two halves, if it can be split; returns whether it was.
    fn halve(&mut self) -> bool;
    /// Number of queued jobs.
    fn len(&self) -> usize;
    /// What was removed without being sent, or added by itself, since the last call.
    fn take_gone(&mut self) -> Gone;
    /// Called about once a minute, or more often.
    fn tend(&mut self) {}
    /// Where jobs remain queued after the end, for messages; `None` if they are lost with the process.
    fn keeps_in(&self) -> Option<String>;
}

/// Counts of jobs that a [`Backlog`] removed or added by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::export) struct Gone {
    /// Dropped: no space, or unreadable.
    pub(in crate::export) dropped: u64,
    /// Nothing to send after all.
    pub(in crate::export) empty: u64,
    /// Added: another run left it, or one was split in two.
    pub(in crate::export) added: u64,
}

/// Sends one item.
pub(in crate::export) trait Peer<B: Backlog>: Send + 'static {
    /// Makes one attempt. May block for as long as its own timeout.
    fn send(&mut self, item: B::Item<'_>) -> Outcome<Receipt>;
    /// Its address for messages, without a password.
    fn url(&self) -> &str;
}

/// The outcome of an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::export) enum Outcome<A> {
    /// The peer accepted it.
    Accepted(A),
    /// The peer accepts only smaller items.
    TooLarge,
    /// The peer closed the connection while it was sent a large item, perhaps because of its size.
    CutOff(Reason),
    /// The peer will never accept it.
    Refused(Reason),
    /// The peer is reachable, but does not accept it now. The duration is the minimum delay before a retry, if the peer gives one.
    Again(Reason, Option<Duration>),
    /// The peer is unreachable: other items need not be tried.
    Unreachable(Reason),
}

impl<A> Outcome<A> {
    /// The same outcome, with the value of an acceptance mapped by `of`.
    pub(in crate::export) fn map<B>(self, of: impl FnOnce(A) -> B) -> Outcome<B> {
        match self {
            Self::Accepted(answer) => Outcome::Accepted(of(answer)),
            Self::TooLarge => Outcome::TooLarge,
            Self::CutOff(reason) => Outcome::CutOff(reason),
            Self::Refused(reason) => Outcome::Refused(reason),
            Self::Again(reason, after) => Outcome::Again(reason, after),
            Self::Unreachable(reason) => Outcome::Unreachable(reason),
        }
    }
}

/// How a peer took what it accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::export) enum Receipt {
    /// Entirely; with a line for the user.
    Whole(Option<String>),
    /// Entirely, with a warning.
    Warned(Reason),
    /// It rejected a part.
    Partial(Reason),
}

/// What happens to a job that keeps failing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::export) enum Failing {
    /// Dropped after this many attempts.
    Drop(u32),
    /// After this many attempts while the peer was reachable, it moves to the end of the queue, so that other jobs pass.
    /// It is never dropped.
    Requeue(u32),
}

/// Limits and names of an engine.
#[derive(Clone, Copy, Debug)]
pub(in crate::export) struct Policy {
    /// Name of the peer in messages.
    pub(in crate::export) name: &'static str,
    /// Name of a job in messages: singular and plural.
    pub(in crate::export) jobs: [&'static str; 2],
    /// Name of the thread.
    pub(in crate::export) thread: &'static str,
    /// Capacity of the memory queue, in the units of [`Engine::send`]'s weight.
    pub(in crate::export) capacity: usize,
    /// What happens to a job that keeps failing.
    pub(in crate::export) failing: Failing,
    /// Pause before the second attempt; doubled with each consecutive failure.
    pub(in crate::export) first_pause: Duration,
    /// Maximum pause, whatever the peer asks for.
    pub(in crate::export) last_pause: Duration,
    /// Time limit for sending what remains when tracing ends.
    pub(in crate::export) finish: Duration,
}

/// The outcomes of jobs. All are monotonic except `waiting`. `made` is the sum of the others without `partial`, which is a part of `sent`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::export) struct Counts {
    /// Handed over, or left by an earlier run; splitting a job counts one more.
    pub(in crate::export) made: u64,
    /// Accepted.
    pub(in crate::export) sent: u64,
    /// Accepted, but a part was rejected.
    pub(in crate::export) partial: u64,
    /// Refused for good.
    pub(in crate::export) refused: u64,
    /// Dropped: no space, unreadable, or too many failures.
    pub(in crate::export) dropped: u64,
    /// Had nothing to send after all.
    pub(in crate::export) empty: u64,
    /// Not yet sent.
    pub(in crate::export) waiting: u64,
}

/// A job's share of the memory queue; dropping it makes room.
#[derive(Debug)]
pub(in crate::export) struct Room {
    used: Arc<AtomicUsize>,
    weight: usize,
}

impl Drop for Room {
    fn drop(&mut self) {
        self.used.fetch_sub(self.weight, Ordering::Relaxed);
    }
}

/// The tracer's handle to an uploading thread.
pub(in crate::export) struct Engine<J> {
    policy: Policy,
    queue: RefCell<Option<Sender<(J, Room)>>>,
    used: Arc<AtomicUsize>,
    counts: Arc<Mutex<Counts>>,
    overflowed: AtomicU64,
    ended: Receiver<()>,
    /// When handing over was closed.
    closed: Cell<Option<Instant>>,
    /// Nothing more may be sent: the outcome of all jobs has been reported.
    given_up: Arc<AtomicBool>,
    thread: RefCell<Option<JoinHandle<()>>>,
    keeps_in: Option<String>,
    /// The final counts, once the engine has stopped waiting.
    last: Cell<Option<Counts>>,
    say: fn(&str),
}

fn lock(counts: &Mutex<Counts>) -> MutexGuard<'_, Counts> {
    counts.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<J: Send + 'static> Engine<J> {
    /// Starts the thread. Jobs already in the backlog are sent, too.
    pub(in crate::export) fn start<B: Backlog<Job = J>>(
        policy: Policy,
        mut backlog: B,
        peer: impl Peer<B>,
        say: fn(&str),
    ) -> io::Result<Self> {
        let (waiting, gone) = (backlog.len() as u64, backlog.take_gone());
        let counts =
            Counts { made: waiting + gone.dropped, dropped: gone.dropped, waiting, ..Counts::default() };
        let counts = Arc::new(Mutex::new(counts));
        let keeps_in = backlog.keeps_in();
        let (queue, jobs) = channel();
        let (alive, ended) = channel();
        let given_up = Arc::new(AtomicBool::new(false));
        let worker = Worker {
            policy,
            backlog,
            peer,
            given_up: Arc::clone(&given_up),
            counts: Arc::clone(&counts),
            notices: Notices::new(policy.name, say),
            failures: 0,
            next: Instant::now(),
            asked: None,
            chances: 0,
        };
        let thread = std::thread::Builder::new().name(policy.thread.to_owned()).spawn(move || {
            worker.run(&jobs);
            drop(alive);
        })?;
        Ok(Self {
            policy,
            queue: RefCell::new(Some(queue)),
            used: Arc::new(AtomicUsize::new(0)),
            counts,
            overflowed: AtomicU64::new(0),
            ended,
            closed: Cell::new(None),
            given_up,
            thread: RefCell::new(Some(thread)),
            keeps_in,
            last: Cell::new(None),
            say,
        })
    }

    /// Hands over a job. Never blocks: if the queue is full, the job is dropped and counted.
    pub(in crate::export) fn send(&self, job: J, weight: usize) {
        let queue = self.queue.borrow();
        let Some(queue) = queue.as_ref() else { return };
        {
            let mut counts = lock(&self.counts);
            counts.made += 1;
            counts.waiting += 1;
        }
        let full = self.used.fetch_add(weight, Ordering::Relaxed) + weight > self.policy.capacity;
        let room = Room { used: Arc::clone(&self.used), weight };
        if full || queue.send((job, room)).is_err() {
            self.overflowed.fetch_add(1, Ordering::Relaxed);
            let mut counts = lock(&self.counts);
            counts.waiting -= 1;
            counts.dropped += 1;
        }
    }

    /// Counts a job that is dropped before it is handed over.
    pub(in crate::export) fn give_up(&self) {
        let mut counts = lock(&self.counts);
        counts.made += 1;
        counts.dropped += 1;
    }

    /// The outcomes of the jobs so far.
    pub(in crate::export) fn counts(&self) -> Counts {
        self.last.get().unwrap_or_else(|| *lock(&self.counts))
    }

    /// Accepts no more jobs, and starts sending what remains: its time limit runs from now on.
    pub(in crate::export) fn close(&self) {
        if self.queue.borrow_mut().take().is_some() {
            self.closed.set(Some(Instant::now()));
        }
    }

    /// Sends what remains, up to a time limit, and reports the outcome of all jobs. `late` runs if that is not done at once.
    pub(in crate::export) fn finish(&self, late: impl FnOnce()) {
        self.close();
        let Some(closed) = self.closed.take() else { return };
        let mut ended = self.ended.recv_timeout(PROMPT.saturating_sub(closed.elapsed()));
        if ended == Err(RecvTimeoutError::Timeout) {
            late();
            ended = self.ended.recv_timeout(self.policy.finish.saturating_sub(closed.elapsed()));
        }
        let in_time = ended != Err(RecvTimeoutError::Timeout);
        self.given_up.store(!in_time, Ordering::Relaxed);
        if in_time && self.thread.borrow_mut().take().is_some_and(|thread| thread.join().is_err()) {
            (self.say)(&format!(
                "gctrace: {}: the sending thread panicked; please report this",
                self.policy.name
            ));
        }
        let mut counts = *lock(&self.counts);
        let left = std::mem::take(&mut counts.waiting);
        let left = match &self.keeps_in {
            _ if left == 0 => String::new(),
            Some(place) => {
                counts.waiting = left;
                format!("; {left} wait in {place} for the next run")
            }
            None => {
                counts.dropped += left;
                format!(" ({left} of them unsent at the end)")
            }
        };
        self.last.set(Some(counts));
        let Counts { sent, partial, refused, dropped, .. } = counts;
        let partial = if partial > 0 { format!(" ({partial} of them in part)") } else { String::new() };
        let full = match self.overflowed.load(Ordering::Relaxed) {
            0 => String::new(),
            full => format!(" ({full} of them because the queue was full)"),
        };
        let [one, many] = self.policy.jobs;
        let accepted = if sent == 1 { format!("1 {one} was") } else { format!("{sent} {many} were") };
        (self.say)(&format!(
            "gctrace: {}: {accepted} accepted{partial}, {refused} refused, {dropped} dropped{full}{left}",
            self.policy.name
        ));
    }
}

struct Worker<B, P> {
    policy: Policy,
    backlog: B,
    peer: P,
    counts: Arc<Mutex<Counts>>,
    given_up: Arc<AtomicBool>,
    notices: Notices,
    /// Number of consecutive failed attempts.
    failures: u32,
    /// Earliest time of the next attempt.
    next: Instant,
    /// The time until which the peer asked for no further attempt.
    asked: Option<Instant>,
    /// Attempts that are due to jobs which were split or added.
    chances: usize,
}

impl<B: Backlog, P: Peer<B>> Worker<B, P> {
    fn run(mut self, jobs: &Receiver<(B::Job, Room)>) {
        while self.accept(jobs) {
            self.backlog.tend();
            self.count_gone();
            let pause = self.next.saturating_duration_since(Instant::now());
            let job = if self.backlog.len() == 0 {
                jobs.recv_timeout(IDLE)
            } else if pause.is_zero() {
                self.attempt(false);
                continue;
            } else {
                jobs.recv_timeout(pause)
            };
            if let Ok((job, room)) = job {
                self.keep(job, room);
            }
        }
        // Tracing has ended: every job gets one more attempt, without a pause unless the peer asked for one.
        let end = Instant::now() + self.policy.finish;
        let mut chances = self.backlog.len();
        self.chances = 0;
        while chances > 0 && self.backlog.len() > 0 && self.may_go_on(end) {
            if !self.attempt(true) {
                break;
            }
            // Each of two halves has its own attempt.
            chances = chances - 1 + std::mem::take(&mut self.chances);
        }
        if !self.given_up.load(Ordering::Relaxed) {
            self.notices.finish();
        }
    }

    /// Waits as long as the peer asked for; returns false if that is later than the end.
    fn may_go_on(&mut self, end: Instant) -> bool {
        let Some(asked) = self.asked.take_if(|asked| *asked > Instant::now()) else { return true };
        if asked >= end {
            let (url, job) = (self.peer.url(), self.policy.jobs[0]);
            self.notices.report(
                &format!("{url}: a {job} is not tried again: the server asked for a longer pause"),
                "",
            );
            return false;
        }
        std::thread::sleep(asked.saturating_duration_since(Instant::now()));
        true
    }

    /// Takes the jobs handed over; returns false once no more can come.
    fn accept(&mut self, jobs: &Receiver<(B::Job, Room)>) -> bool {
        loop {
            match jobs.try_recv() {
                Ok((job, room)) => self.keep(job, room),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    fn keep(&mut self, job: B::Job, room: Room) {
        let kept = self.backlog.push(job, room);
        self.count_gone();
        let Err(error) = kept else { return };
        self.count(|counts| counts.dropped += 1);
        let place = self.backlog.keeps_in().unwrap_or_default();
        let job = self.policy.jobs[0];
        self.notices.report(&format!("a {job} is lost: it cannot be put into {place}"), &error.to_string());
    }

    /// Counts the jobs that the backlog removed as finished.
    fn count_gone(&mut self) {
        let Gone { dropped, empty, added } = self.backlog.take_gone();
        self.chances += added as usize;
        let mut counts = lock(&self.counts);
        counts.made += added;
        counts.waiting += added;
        counts.waiting -= dropped + empty;
        counts.dropped += dropped;
        counts.empty += empty;
    }

    /// Counts a job as finished.
    fn count(&self, how: impl FnOnce(&mut Counts)) {
        let mut counts = lock(&self.counts);
        counts.waiting -= 1;
        how(&mut counts);
    }

    /// Makes one attempt for the front. `last`: tracing has ended. Returns false if trying other jobs is useless.
    fn attempt(&mut self, last: bool) -> bool {
        let given_up = |of: &Self| of.given_up.load(Ordering::Relaxed);
        if given_up(self) {
            return false;
        }
        let outcome = self.backlog.front().map(|item| self.peer.send(item));
        // A job in flight at the end has been counted as not sent. If it was accepted, it is not kept for the next run.
        if given_up(self) {
            if matches!(outcome, Some(Outcome::Accepted(_))) {
                self.done(|counts| counts.sent += 1);
            }
            return false;
        }
        self.count_gone();
        let Some(outcome) = outcome else { return true };
        let (url, job) = (self.peer.url(), self.policy.jobs[0]);
        let (reason, after, answered) = match outcome {
            Outcome::Accepted(receipt) => {
                let partial = matches!(receipt, Receipt::Partial(_));
                match receipt {
                    Receipt::Whole(None) => {}
                    Receipt::Whole(Some(line)) => self.notices.say(&line),
                    Receipt::Warned(why) => {
                        self.notices.because(&format!("{url} accepted a {job} with a warning"), &why);
                    }
                    Receipt::Partial(why) => {
                        self.notices.because(&format!("{url} rejected part of a {job}"), &why);
                    }
                }
                self.done(|counts| {
                    counts.sent += 1;
                    counts.partial += u64::from(partial);
                });
                return true;
            }
            Outcome::TooLarge | Outcome::CutOff(_) if self.backlog.halve() => {
                // The attempt that this was is not one of its halves'.
                self.chances += 2;
                let mut counts = lock(&self.counts);
                counts.made += 1;
                counts.waiting += 1;
                return true;
            }
            Outcome::TooLarge => {
                self.notices.report(&format!("{url} rejects a {job} as too large"), "");
                self.done(|counts| counts.refused += 1);
                return true;
            }
            Outcome::Refused(why) => {
                self.notices.because(&format!("{url} refused a {job}"), &why);
                self.done(|counts| counts.refused += 1);
                return true;
            }
            Outcome::Again(reason, after) => (reason, after, true),
            Outcome::CutOff(reason) | Outcome::Unreachable(reason) => (reason, None, false),
        };
        self.notices.because(&format!("{url}: a {job} is tried again"), &reason);
        let doubled = 2_u32.saturating_pow(self.failures.min(16));
        let pause = (self.policy.first_pause * doubled).min(self.policy.last_pause);
        // Some servers round the delay down to whole seconds: 0 is not a request for immediate retries.
        let after = after.filter(|asked| !asked.is_zero());
        self.asked = after.map(|asked| Instant::now() + asked.min(self.policy.last_pause));
        self.next = Instant::now() + after.unwrap_or(pause + jitter(pause)).min(self.policy.last_pause);
        self.failures += 1;
        let attempts = self.backlog.failed();
        match self.policy.failing {
            Failing::Drop(most) if attempts >= most || last => self.done(|counts| counts.dropped += 1),
            Failing::Requeue(most) if answered && (attempts >= most || last) => self.backlog.requeue(),
            Failing::Requeue(_) if !answered && last => return false,
            Failing::Drop(_) | Failing::Requeue(_) => {}
        }
        true
    }

    /// Removes the front, and counts it as finished.
    fn done(&mut self, how: impl FnOnce(&mut Counts)) {
        self.backlog.pop();
        self.count(how);
        self.failures = 0;
    }
}

/// Up to a quarter of a pause, so that hosts that lost their server at the same time do not reconnect at the same time.
fn jitter(pause: Duration) -> Duration {
    let nanos =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().subsec_nanos();
    pause.mul_f64(f64::from(nanos % 1000) / 4000.0)
}

#[cfg(test)]
mod tests;
