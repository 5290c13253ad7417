use std::collections::VecDeque;

use super::*;

/// A job that turns out to be empty when it is to be sent.
const EMPTY: u32 = 0;

/// Jobs in memory, as a spool would keep them.
#[derive(Default)]
struct Jobs {
    waiting: VecDeque<(u32, u32)>,
    empty: u64,
}

impl Backlog for Jobs {
    type Job = u32;
    type Item<'a> = u32;

    fn push(&mut self, job: u32, _: Room) -> io::Result<()> {
        if job == u32::MAX {
            return Err(io::Error::other("disk full"));
        }
        self.waiting.push_back((job, 0));
        Ok(())
    }

    fn front(&mut self) -> Option<u32> {
        while self.waiting.front().is_some_and(|job| job.0 == EMPTY) {
            self.pop();
            self.empty += 1;
        }
        self.waiting.front().map(|job| job.0)
    }

    fn failed(&mut self) -> u32 {
        self.waiting[0].1 += 1;
        self.waiting[0].1
    }

    fn pop(&mut self) {
        self.waiting.pop_front();
    }

    fn requeue(&mut self) {
        self.waiting.rotate_left(1);
    }

    /// Only even jobs can be split.
    fn halve(&mut self) -> bool {
        let job = self.waiting[0].0;
        if job.is_multiple_of(2) {
            self.pop();
            self.waiting.push_front((job / 2, 0));
            self.waiting.push_front((job / 2, 0));
        }
        job.is_multiple_of(2)
    }

    fn len(&self) -> usize {
        self.waiting.len()
    }

    fn take_gone(&mut self) -> Gone {
        Gone { empty: std::mem::take(&mut self.empty), ..Gone::default() }
    }

    fn keeps_in(&self) -> Option<String> {
        Some("/spool".to_owned())
    }
}

/// Responds by a function, and records what it was sent.
struct Scripted(fn(u32) -> Outcome<Receipt>, Arc<Mutex<Vec<u32>>>);

impl Peer<Jobs> for Scripted {
    fn send(&mut self, job: u32) -> Outcome<Receipt> {
        self.1.lock().unwrap().push(job);
        (self.0)(job)
    }

    fn url(&self) -> &'static str {
        "http://h"
    }
}

const ACCEPTED: Outcome<Receipt> = Outcome::Accepted(Receipt::Whole(None));

fn again() -> Outcome<Receipt> {
    Outcome::Again(Reason::new("answered 500"), None)
}

fn policy(failing: Failing) -> Policy {
    Policy {
        name: "test",
        jobs: ["job", "jobs"],
        thread: "test",
        capacity: 100,
        failing,
        first_pause: Duration::from_millis(1),
        last_pause: Duration::from_millis(2),
        finish: Duration::from_secs(10),
    }
}

/// Sends these jobs; returns what the peer received, and the counts.
fn run(failing: Failing, jobs: &[u32], answer: fn(u32) -> Outcome<Receipt>) -> (Vec<u32>, Counts) {
    let got = Arc::new(Mutex::new(Vec::new()));
    let peer = Scripted(answer, Arc::clone(&got));
    let engine = Engine::start(policy(failing), Jobs::default(), peer, |_| {}).unwrap();
    for job in jobs {
        engine.send(*job, 1);
    }
    engine.finish(|| {});
    let counts = engine.counts();
    let Counts { made, sent, refused, dropped, empty, waiting, .. } = counts;
    assert_eq!(made, sent + refused + dropped + empty + waiting, "{counts:?}");
    (std::mem::take(&mut got.lock().unwrap()), counts)
}

/// A job that the peer never accepts moves to the end of the queue: other jobs pass it, while tracing continues and at the end.
#[test]
fn others_pass() {
    let got = Arc::new(Mutex::new(Vec::new()));
    let answer = |job| if job == 1 { again() } else { ACCEPTED };
    let peer = Scripted(answer, Arc::clone(&got));
    let engine = Engine::start(policy(Failing::Requeue(3)), Jobs::default(), peer, |_| {}).unwrap();
    for job in 1..=5 {
        engine.send(job, 1);
    }
    let begun = Instant::now();
    while engine.counts().sent < 4 {
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", got.lock());
        std::thread::sleep(Duration::from_millis(1));
    }
    engine.finish(|| {});
    let counts = engine.counts();
    assert_eq!((counts.sent, counts.waiting, counts.dropped), (4, 1, 0), "{counts:?}");
    let got = got.lock().unwrap();
    assert!(got.iter().filter(|job| **job == 1).count() > 3, "{got:?}");
    let others: Vec<u32> = got.iter().copied().filter(|job| *job != 1).collect();
    assert_eq!(others, [2, 3, 4, 5]);

    let (got, counts) = run(Failing::Requeue(100), &[1, 2, 3], answer);
    assert!(got.ends_with(&[2, 3]) || got.ends_with(&[2, 3, 1]), "each has its chance at the end: {got:?}");
    assert_eq!((counts.sent, counts.waiting), (2, 1));
}

/// If a peer asks for a pause of 0, the usual pause applies; otherwise it would be retried without delay.
#[test]
fn no_pause_is_not_none() {
    let got = Arc::new(Mutex::new(Vec::new()));
    let peer =
        Scripted(|_| Outcome::Again(Reason::new("answered 503"), Some(Duration::ZERO)), Arc::clone(&got));
    let slow = Policy {
        first_pause: Duration::from_millis(100),
        last_pause: Duration::from_millis(100),
        finish: Duration::ZERO,
        ..policy(Failing::Requeue(u32::MAX))
    };
    let engine = Engine::start(slow, Jobs::default(), peer, |_| {}).unwrap();
    engine.send(1, 1);
    std::thread::sleep(Duration::from_millis(250));
    let asked = got.lock().unwrap().len();
    assert!((1..=3).contains(&asked), "asked {asked} times in 250 ms");
    engine.finish(|| {});
}

/// A pause that a peer asks for holds at the end of the run, too: a short one is waited for, and nothing is sent within a longer one.
#[test]
fn asked_pauses_at_the_end() {
    static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());
    static FIRST: Mutex<Option<Instant>> = Mutex::new(None);
    let run = |asked: fn(u32) -> Outcome<Receipt>, finish| {
        let got = Arc::new(Mutex::new(Vec::new()));
        let patient =
            Policy { last_pause: Duration::from_mins(1), finish, ..policy(Failing::Drop(u32::MAX)) };
        let say = |text: &str| SAID.lock().unwrap().push(text.to_owned());
        let engine = Engine::start(patient, Jobs::default(), Scripted(asked, Arc::clone(&got)), say).unwrap();
        engine.send(1, 1);
        while got.lock().unwrap().is_empty() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let begun = Instant::now();
        (2..=3).for_each(|job| engine.send(job, 1));
        engine.finish(|| {});
        let took = begun.elapsed();
        (engine.counts(), got.lock().unwrap().clone(), took)
    };
    let long = |_| Outcome::Again(Reason::new("answered 503"), Some(Duration::from_secs(30)));
    let (counts, got, took) = run(long, Duration::from_secs(5));
    assert_eq!((got, counts.sent, counts.waiting), (vec![1], 0, 3));
    assert!(took < Duration::from_secs(4), "it waited {took:?} for a pause that is longer than the end");
    let said = SAID.lock().unwrap().join("\n");
    assert!(said.contains("the server asked for a longer pause") && said.contains("3 wait in"), "{said}");

    let short = |_| match *FIRST.lock().unwrap() {
        Some(first) if first.elapsed() >= Duration::from_millis(400) => ACCEPTED,
        Some(first) => panic!("sent again after {:?}", first.elapsed()),
        ref mut none => {
            *none = Some(Instant::now());
            Outcome::Again(Reason::new("answered 503"), Some(Duration::from_millis(400)))
        }
    };
    let (counts, got, _) = run(short, Duration::from_secs(20));
    assert_eq!((got, counts.sent, counts.dropped), (vec![1, 1, 2, 3], 3, 0));
}

/// After the final report nothing more is sent and nothing is reported, whatever the outcome of the job in flight.
#[test]
fn the_account_is_the_end() {
    static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let got = Arc::new(Mutex::new(Vec::new()));
    let answer = |_| {
        std::thread::sleep(PROMPT + Duration::from_millis(700));
        again()
    };
    let impatient = Policy { finish: Duration::ZERO, ..policy(Failing::Drop(9)) };
    let say = |text: &str| SAID.lock().unwrap().push(text.to_owned());
    let engine = Engine::start(impatient, Jobs::default(), Scripted(answer, Arc::clone(&got)), say).unwrap();
    for job in 1..=3 {
        engine.send(job, 1);
    }
    engine.finish(|| {});
    let counts = engine.counts();
    assert_eq!((counts.sent, counts.waiting), (0, 3), "{counts:?}");
    let thread = engine.thread.borrow_mut().take().unwrap();
    thread.join().unwrap();
    assert_eq!(*got.lock().unwrap(), [1]);
    assert_eq!(engine.counts(), counts);
    let said = SAID.lock().unwrap();
    assert!(matches!(&said[..], [account] if account.contains("0 jobs were accepted")), "{said:?}");
}

/// Several peers that do not respond at the end take no longer than one of them.
#[test]
fn at_the_same_time() {
    let patient = Policy { finish: Duration::from_secs(3), ..policy(Failing::Drop(9)) };
    let silent = |_| {
        std::thread::sleep(Duration::from_secs(10));
        again()
    };
    let start = || Engine::start(patient, Jobs::default(), Scripted(silent, Arc::default()), |_| {}).unwrap();
    let engines = [start(), start(), start()];
    for engine in &engines {
        engine.send(1, 1);
    }
    let begun = Instant::now();
    engines.iter().for_each(Engine::close);
    let late = Cell::new(0);
    for engine in &engines {
        engine.finish(|| late.set(late.get() + 1));
        assert_eq!((engine.counts().sent, engine.counts().waiting), (0, 1));
    }
    let took = begun.elapsed();
    assert!(patient.finish <= took && took < 2 * patient.finish, "{took:?}");
    assert_eq!(late.get(), 3);
    // After that nothing is handed over, nor reported a second time.
    engines.iter().for_each(Engine::close);
    engines[0].finish(|| panic!("the end is over"));
}

/// Without a peer, no time is spent on every job at the end, and no kept job is lost.
#[test]
fn nobody() {
    let away = |_| Outcome::Unreachable(Reason::new("refused"));
    let (got, counts) = run(Failing::Requeue(1), &[1, 2, 3], away);
    assert!(got.iter().all(|job| *job == 1), "{got:?}");
    assert_eq!((counts.waiting, counts.dropped), (3, 0));
    let (_, counts) = run(Failing::Drop(2), &[1, 2, 3], away);
    assert_eq!((counts.waiting, counts.dropped), (0, 3));
}

/// The same job twice, refused jobs, halves, one that cannot be kept, more than the capacity, and no jobs.
#[test]
fn accounted() {
    let (got, counts) = run(Failing::Drop(2), &[7, 7], |_| ACCEPTED);
    assert_eq!((got, counts.sent), (vec![7, 7], 2));
    let (_, counts) = run(Failing::Drop(2), &[7], |_| Outcome::Refused(Reason::new("no")));
    assert_eq!((counts.made, counts.refused), (1, 1));
    let small = |job| if job > 2 { Outcome::TooLarge } else { ACCEPTED };
    let (got, counts) = run(Failing::Drop(2), &[8, 5, 1], small);
    assert_eq!(got, [8, 4, 2, 2, 4, 2, 2, 5, 1]);
    assert_eq!((counts.made, counts.sent, counts.refused), (6, 5, 1));
    let cut = |job| if job > 2 { Outcome::CutOff(Reason::new("broken pipe")) } else { ACCEPTED };
    let (got, counts) = run(Failing::Drop(2), &[4, 5, 1], cut);
    assert_eq!((&got[..3], counts.made, counts.sent, counts.dropped), (&[4, 2, 2][..], 4, 3, 1), "{got:?}");
    let (_, counts) = run(Failing::Drop(2), &[u32::MAX, 1], |_| ACCEPTED);
    assert_eq!((counts.made, counts.sent, counts.dropped), (2, 1, 1));
    assert_eq!(run(Failing::Drop(2), &[], |_| ACCEPTED).1, Counts::default());
    // The count of jobs handed over never decreases: it is a counter of a server that is scraped.
    let (got, counts) = run(Failing::Drop(2), &[EMPTY, 7, EMPTY], |_| ACCEPTED);
    assert_eq!((got, counts.made, counts.sent, counts.empty), (vec![7], 3, 1, 2));
    let engine = Engine::start(
        policy(Failing::Drop(1)),
        Jobs::default(),
        Scripted(|_| ACCEPTED, Arc::default()),
        |_| {},
    )
    .unwrap();
    engine.send(1, 101);
    engine.give_up();
    engine.finish(|| {});
    engine.send(1, 1);
    let counts = engine.counts();
    assert_eq!((counts.made, counts.dropped), (2, 2));
}
