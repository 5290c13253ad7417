//! Requests and jobs of one process: how many end per second, and how long they take, in total and by endpoint. It reads no clock,
//! and its size is bounded.

use std::{
    collections::{HashMap, VecDeque},
    ops::Range,
    sync::Arc,
};

use super::{SECOND, SHARES, WINDOW};
use crate::{
    aggregate::request_summary::Handlers,
    model::{request::Request, stack::Frame},
};

/// Maximum number of requests whose times are kept, over all endpoints.
const MOST: usize = 4096;
/// The same for one endpoint.
const MOST_OF_ENDPOINT: usize = 512;
/// Maximum number of endpoints.
const MOST_ENDPOINTS: usize = 512;
/// Number of seconds for which requests are counted: those that a rate covers, the current one, and those by which requests are late.
const SECONDS: usize = 16;
/// A request is reported when all records of its time have been read: the last second may be incomplete.
pub(in crate::top) const LATE: u64 = 1;

/// Times of one request, nanoseconds.
#[derive(Clone, Copy, Debug)]
struct Served {
    end_ns: u64,
    ns: u64,
    /// Time during which it was stopped for GC, by its own thread or by another one.
    gc_ns: Option<u64>,
    /// Time spent waiting for the GVL.
    gvl_ns: Option<u64>,
}

/// Requests of one kind.
#[derive(Debug, Default)]
pub(in crate::top) struct Times {
    /// Second since boot, and number of requests that ended in it.
    seconds: [(u64, u64); SECONDS],
    last: VecDeque<Served>,
    /// Their handlers; recorded for single endpoints only.
    handlers: Handlers,
}

/// Figures of several [`Times`].
#[derive(Clone, Debug, Default, PartialEq)]
pub(in crate::top) struct Figures {
    /// Requests per second, over the last [`SHARES`] seconds.
    pub rate: Option<f64>,
    /// Number of requests of the last minute whose times are kept.
    pub count: usize,
    /// The median of their times, nanoseconds.
    pub p50_ns: Option<u64>,
    /// The 99th percentile, nanoseconds.
    pub p99_ns: Option<u64>,
    /// The longest, nanoseconds.
    pub max_ns: Option<u64>,
    /// Share of their time in which they were stopped for GC, percent.
    pub gc: Option<f64>,
    /// Share of their time in which they waited for the GVL, percent.
    pub gvl: Option<f64>,
}

/// All requests of a process.
#[derive(Debug, Default)]
pub(in crate::top) struct Requests {
    all: Times,
    endpoints: HashMap<Arc<str>, Times>,
    /// Number of requests seen so far.
    pub seen: u64,
    /// Number of these whose end was not seen: they have no time and are in no rate.
    pub unended: u64,
    /// Number of these whose endpoint exceeded the limit.
    pub no_room: u64,
}

impl Times {
    fn add(&mut self, served: Served, most: usize) {
        let at = served.end_ns / SECOND;
        let second = &mut self.seconds[at as usize % SECONDS];
        if second.0 != at {
            *second = (at, 0);
        }
        second.1 += 1;
        super::bounded(&mut self.last, served, most);
    }

    fn ended_in(&self, seconds: &Range<u64>) -> u64 {
        self.seconds.iter().filter(|(at, _)| seconds.contains(at)).map(|(_, count)| count).sum()
    }

    /// The handler of all these requests whose handler was seen; `None` if none was, or there are several.
    pub(in crate::top) fn handler(&self) -> Option<&Frame> {
        self.handlers.one()
    }

    fn recent(&self, now_ns: u64) -> impl Iterator<Item = &Served> {
        let from = now_ns.saturating_sub(WINDOW as u64 * SECOND);
        self.last.iter().filter(move |served| served.end_ns >= from)
    }
}

/// The combined figures of `all`, each of which comes with the time since which it is traced. `whole`: whether all requests of the last ten
/// seconds were seen, and all requests of the last minute.
pub(in crate::top) fn figures(all: &[(&Times, u64)], now_ns: u64, whole: (bool, bool)) -> Figures {
    let rate = |(times, since_ns): &(&Times, u64)| {
        let seconds = seconds(*since_ns, now_ns);
        let wall = seconds.end.checked_sub(seconds.start).filter(|&wall| wall > 0)?;
        Some(times.ended_in(&seconds) as f64 / wall as f64)
    };
    let served: Vec<&Served> = all.iter().flat_map(|(times, _)| times.recent(now_ns)).collect();
    let mut times: Vec<u64> = served.iter().map(|served| served.ns).collect();
    times.sort_unstable();
    let quantile = |percent: usize| {
        let rank = (times.len() * percent).div_ceil(100);
        rank.checked_sub(1).and_then(|at| times.get(at).copied()).filter(|_| whole.1)
    };
    let wall: u64 = times.iter().sum();
    let share = |of: fn(&Served) -> Option<u64>| {
        let sum = served.iter().map(|served| of(served)).sum::<Option<u64>>()?;
        (wall > 0).then(|| sum as f64 * 100.0 / wall as f64)
    };
    Figures {
        rate: all.iter().map(rate).sum::<Option<f64>>().filter(|_| whole.0 && !all.is_empty()),
        count: times.len(),
        p50_ns: quantile(50),
        p99_ns: quantile(99),
        max_ns: quantile(100),
        gc: share(|served| served.gc_ns),
        gvl: share(|served| served.gvl_ns),
    }
}

/// The whole seconds that a rate covers.
fn seconds(since_ns: u64, now_ns: u64) -> Range<u64> {
    let end = (now_ns / SECOND).saturating_sub(LATE);
    since_ns.div_ceil(SECOND).max(end.saturating_sub(SHARES as u64))..end
}

impl Requests {
    /// A request has been served.
    pub(in crate::top) fn see(&mut self, request: &Request) {
        self.seen += 1;
        let (Some(end_ns), Some(ns)) = (request.end_ns, request.duration_ns()) else {
            self.unended += 1;
            return;
        };
        let gc_ns = request.gc_ns.zip(request.gc_other).map(|(own, other)| own + other.ns);
        let served = Served { end_ns, ns, gc_ns, gvl_ns: request.gvl_wait_ns };
        self.all.add(served, MOST);
        let endpoint: Arc<str> = request.endpoint().into();
        if self.endpoints.len() < MOST_ENDPOINTS || self.endpoints.contains_key(&endpoint) {
            let times = self.endpoints.entry(endpoint).or_default();
            times.add(served, MOST_OF_ENDPOINT);
            times.handlers.add(request.handler.as_ref());
        } else {
            self.no_room += 1;
        }
    }

    /// Drops endpoints without requests in the last minute.
    pub(in crate::top) fn forget(&mut self, now_ns: u64) {
        self.endpoints.retain(|_, times| times.recent(now_ns).next().is_some());
    }

    /// The times of all requests.
    pub(in crate::top) fn all(&self) -> &Times {
        &self.all
    }

    /// Endpoints of the last minute.
    pub(in crate::top) fn endpoints(&self, now_ns: u64) -> impl Iterator<Item = (&Arc<str>, &Times)> {
        self.endpoints.iter().filter(move |(_, times)| times.recent(now_ns).next().is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(path: &str, end_ns: u64, ns: u64) -> Request {
        Request {
            trace: None,
            id: 1,
            tid: 1,
            begin_ns: end_ns - ns,
            end_ns: Some(end_ns),
            method: Some("GET"),
            path: Some(path.to_owned()),
            status: None,
            queue_ns: None,
            first_byte_ns: None,
            last_byte_ns: None,
            response_bytes: None,
            gcs: None,
            gc_ns: Some(ns / 10),
            gc_pauses: None,
            gc_other: Some(crate::model::request::GcTime { pauses: 1, ns: ns / 10 }),
            gvl_wait_ns: None,
            states: None,
            split: None,
            alloc: None,
            memory: crate::model::request::RequestMemory::default(),
            job: None,
            is_run: false,
            handler: None,
            gc_states: None,
        }
    }

    /// Rates cover whole, completed seconds, and times the last minute; a value that is unknown for one request is unknown for all.
    #[test]
    fn figures_of_some() {
        const MS: u64 = SECOND / 1000;
        let mut requests = Requests::default();
        // 20 per second, of 1 to 100 ms, from the first second on.
        for n in 0..100 {
            requests.see(&request("/a", 100 * SECOND + n * 50 * MS, (n + 1) * MS));
        }
        requests.see(&request("/b", 104 * SECOND, 500 * MS));
        requests.see(&Request { end_ns: None, ..request("/a", 104 * SECOND, MS) });
        let of = |now_ns, whole| figures(&[(requests.all(), 100 * SECOND - MS)], now_ns, whole);
        let all = of(106 * SECOND + MS, (true, true));
        // There are 101 in the five seconds from 100 to 105.
        assert_eq!((all.rate, all.count), (Some(101.0 / 5.0), 101));
        assert_eq!((all.p50_ns, all.p99_ns, all.max_ns), (Some(51 * MS), Some(100 * MS), Some(500 * MS)));
        assert_eq!((all.gc.map(f64::round), all.gvl), (Some(20.0), None));
        assert_eq!((requests.seen, requests.unended), (102, 1));
        // The seconds 100 and 101 are over.
        assert_eq!(of(103 * SECOND, (true, true)).rate, Some(20.0));
        assert_eq!(of(101 * SECOND, (true, true)).rate, None);
        assert_eq!(of(150 * SECOND, (true, true)).rate, Some(0.0));
        assert_eq!(of(170 * SECOND, (true, true)).p99_ns, None);
        let lossy = of(106 * SECOND, (false, true));
        assert_eq!((lossy.rate, lossy.max_ns), (None, Some(500 * MS)));
        assert_eq!(of(106 * SECOND, (true, false)).p99_ns, None);
        assert_eq!(figures(&[], 1, (true, true)), Figures::default());
        let mut names: Vec<_> = requests.endpoints(106 * SECOND).map(|(name, _)| &**name).collect();
        names.sort_unstable();
        assert_eq!(names, ["GET /a", "GET /b"]);
    }

    /// However many endpoints and requests there are, memory is bounded, and requests above the limit are counted.
    #[test]
    fn bounds() {
        let mut requests = Requests::default();
        for n in 0..2000 {
            requests.see(&request(&format!("/{n}"), SECOND + n, 1));
            requests.see(&request("/0", SECOND + n, 1));
        }
        assert_eq!(requests.endpoints.len(), MOST_ENDPOINTS);
        assert_eq!(requests.no_room, 2000 - MOST_ENDPOINTS as u64);
        assert_eq!(requests.endpoints["GET /0"].last.len(), MOST_OF_ENDPOINT);
        for _ in 0..10_000 {
            requests.see(&request("/0", SECOND, 1));
        }
        assert_eq!(requests.all.last.len(), MOST);
        requests.forget(100 * SECOND);
        assert!(requests.endpoints.is_empty());
    }
}
