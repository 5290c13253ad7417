//! Assigns samples, cycles and allocation stacks to endpoints. Each names its request, and the endpoint is known only when the request
//! ends: until then it waits. What waits too long, or for a request whose end was not seen, gets the unknown endpoint.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::Arc,
};

use crate::{aggregate::endpoint::OTHER, model::trace::Trace};

/// Index of an endpoint in a recording.
pub type EndpointIndex = u32;
/// The endpoint of requests whose endpoint is unknown.
pub(super) const UNKNOWN: EndpointIndex = 0;

/// The endpoint of requests that `--endpoint` leaves out: they need no names, whose number is limited.
pub(super) const LEFT_OUT: EndpointIndex = EndpointIndex::MAX;

/// Maximum number of distinguished endpoints; the rest are one.
const MAX_ENDPOINTS: usize = 1000;
/// Maximum number of ended requests that are remembered: their stacks may arrive later.
const MAX_ENDED: usize = 1 << 14;
/// Maximum number of things that wait for the end of a request.
const MAX_WAITING: usize = 1 << 16;
/// Maximum time that they wait, nanoseconds.
const PATIENCE_NS: u64 = 60_000_000_000;

/// What is known about a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Of {
    /// Its endpoint.
    pub(super) endpoint: EndpointIndex,
    /// Its trace, if one is known.
    pub(super) trace: Option<Trace>,
}

/// Whether the endpoint of something is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum At {
    /// It belongs to no request.
    None,
    /// The endpoint and trace of its request.
    Known(Of),
    /// Its request, with this number, has not ended.
    Waits(u64),
}

/// What waits for the end of a request.
#[derive(Debug)]
struct Waiting<T> {
    pid: u32,
    since_ns: u64,
    last_ns: u64,
    kept: Vec<T>,
}

/// What no longer waits for the end of a request.
#[derive(Debug)]
pub(super) struct GivenUp<T> {
    /// From the first to the last of it, nanoseconds: the request took at least this long.
    pub(super) lasted_ns: u64,
    pub(super) kept: Vec<T>,
}

impl<T> From<Waiting<T>> for GivenUp<T> {
    fn from(waiting: Waiting<T>) -> Self {
        Self { lasted_ns: waiting.last_ns.saturating_sub(waiting.since_ns), kept: waiting.kept }
    }
}

/// The endpoints of a recording, and what waits for them.
#[derive(Debug)]
pub(super) struct Endpoints<T> {
    names: Vec<Arc<str>>,
    numbers: HashMap<Arc<str>, EndpointIndex>,
    ended: HashMap<u64, Of>,
    ended_order: VecDeque<u64>,
    /// By request number: the first has waited longest, or nearly so.
    waiting: BTreeMap<u64, Waiting<T>>,
    count: usize,
}

impl<T> Default for Endpoints<T> {
    fn default() -> Self {
        Self {
            names: vec![Arc::from("(unknown)")],
            numbers: HashMap::from([(Arc::from("(unknown)"), UNKNOWN)]),
            ended: HashMap::new(),
            ended_order: VecDeque::new(),
            waiting: BTreeMap::new(),
            count: 0,
        }
    }
}

impl<T> Endpoints<T> {
    /// The name of an endpoint.
    pub(super) fn name(&self, index: EndpointIndex) -> &str {
        self.names.get(index as usize).map_or("(unknown)", |name| name)
    }

    /// Whether the endpoint of a request is known.
    pub(super) fn of(&self, request: Option<u64>) -> At {
        match request {
            None => At::None,
            Some(0) => At::Known(Of { endpoint: UNKNOWN, trace: None }),
            Some(id) => self.ended.get(&id).map_or(At::Waits(id), |of| At::Known(*of)),
        }
    }

    /// Lets something wait for the end of a request. Returns what has waited too long at `ts_ns`, or what exceeds the limit.
    pub(super) fn wait(&mut self, id: u64, pid: u32, ts_ns: u64, kept: T) -> Vec<GivenUp<T>> {
        let first = || Waiting { pid, since_ns: ts_ns, last_ns: ts_ns, kept: Vec::new() };
        let waiting = self.waiting.entry(id).or_insert_with(first);
        waiting.last_ns = waiting.last_ns.max(ts_ns);
        waiting.kept.push(kept);
        self.count += 1;
        let mut overdue = Vec::new();
        while let Some(first) = self.waiting.first_entry()
            && (self.count > MAX_WAITING || first.get().since_ns.saturating_add(PATIENCE_NS) < ts_ns)
        {
            let given_up = GivenUp::from(first.remove());
            self.count -= given_up.kept.len();
            overdue.push(given_up);
        }
        overdue
    }

    /// A request has ended; without an endpoint it is left out. Returns what is known about it, and what has waited for it.
    pub(super) fn ended(&mut self, id: u64, endpoint: Option<String>, trace: Option<Trace>) -> (Of, Vec<T>) {
        let of = Of { endpoint: endpoint.map_or(LEFT_OUT, |endpoint| self.number(endpoint)), trace };
        if self.ended_order.len() >= MAX_ENDED
            && let Some(oldest) = self.ended_order.pop_front()
        {
            self.ended.remove(&oldest);
        }
        if self.ended.insert(id, of).is_none() {
            self.ended_order.push_back(id);
        }
        let kept = self.waiting.remove(&id).map_or_else(Vec::new, |waiting| waiting.kept);
        self.count -= kept.len();
        (of, kept)
    }

    /// Returns what waits for requests of one process, or of all processes (`None`).
    pub(super) fn give_up(&mut self, of: Option<u32>) -> Vec<GivenUp<T>> {
        let is_gone = |_: &u64, waiting: &mut Waiting<T>| of.is_none_or(|pid| pid == waiting.pid);
        let gone: Vec<_> =
            self.waiting.extract_if(.., is_gone).map(|(_, waiting)| GivenUp::from(waiting)).collect();
        self.count -= gone.iter().map(|given_up| given_up.kept.len()).sum::<usize>();
        gone
    }

    /// The same ended requests with their endpoints, for a recording that continues this one. Endpoints of no such request are forgotten:
    /// they leave room for others.
    pub(super) fn go_on(&self) -> Self {
        let mut next = Self { ended_order: self.ended_order.clone(), ..Self::default() };
        for (id, of) in self.ended_order.iter().filter_map(|id| self.ended.get_key_value(id)) {
            let endpoint = match of.endpoint {
                LEFT_OUT => LEFT_OUT,
                known => next.number(self.name(known).to_owned()),
            };
            next.ended.insert(*id, Of { endpoint, ..*of });
        }
        next
    }

    fn number(&mut self, endpoint: String) -> EndpointIndex {
        if let Some(index) = self.numbers.get(endpoint.as_str()) {
            return *index;
        }
        if self.names.len() >= MAX_ENDPOINTS && endpoint != OTHER {
            return self.number(OTHER.to_owned());
        }
        let (index, name) = (self.names.len() as EndpointIndex, Arc::<str>::from(endpoint));
        self.names.push(Arc::clone(&name));
        self.numbers.insert(name, index);
        index
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::trace::TraceOrigin;

    fn number<T>(given_up: &[GivenUp<T>]) -> usize {
        given_up.iter().map(|of| of.kept.len()).sum()
    }

    /// Events that arrive before and after the end of a request both get its endpoint.
    #[test]
    fn ends() {
        let mut endpoints = Endpoints::default();
        let unknown = Of { endpoint: UNKNOWN, trace: None };
        assert_eq!((endpoints.of(None), endpoints.of(Some(0))), (At::None, At::Known(unknown)));
        assert_eq!(endpoints.of(Some(7)), At::Waits(7));
        assert!(endpoints.wait(7, 1, 100, 1).is_empty());
        assert!(endpoints.wait(8, 1, 110, 2).is_empty());
        let trace = Some(Trace { trace_id: 1, caller: None, origin: TraceOrigin::Thread });
        let (of, kept) = endpoints.ended(7, Some("GET /a".to_owned()), trace);
        assert_eq!((endpoints.name(of.endpoint), kept.len(), endpoints.count), ("GET /a", 1, 1));
        assert_eq!((endpoints.of(Some(7)), of.trace), (At::Known(of), trace));
        assert_eq!(endpoints.ended(9, Some("GET /a".to_owned()), None).0, Of { trace: None, ..of });
        assert_eq!(endpoints.ended(10, Some("(unknown)".to_owned()), None).0, unknown);
        assert_eq!(endpoints.go_on().of(Some(7)), At::Known(of));
    }

    /// Nothing waits forever: not beyond a maximum time, and not after its process is gone.
    #[test]
    fn gives_up() {
        let mut endpoints = Endpoints::default();
        endpoints.wait(1, 5, 100, 1);
        endpoints.wait(2, 5, 200, 2);
        assert_eq!(number(&endpoints.wait(2, 5, 101 + PATIENCE_NS, 3)), 1);
        assert_eq!(endpoints.count, 2);
        endpoints.wait(3, 6, 300, 4);
        let given_up = endpoints.give_up(Some(5));
        assert_eq!((number(&given_up), given_up[0].lasted_ns, endpoints.count), (2, PATIENCE_NS - 99, 1));
        assert_eq!((number(&endpoints.give_up(None)), endpoints.count), (1, 0));
    }

    /// Memory is bounded, however much arrives.
    #[test]
    fn bounded() {
        let mut endpoints = Endpoints::default();
        let overdue: usize =
            (0..MAX_WAITING as u64 + 10).map(|n| number(&endpoints.wait(n / 2 + 1, 1, 5, n))).sum();
        assert_eq!((overdue, endpoints.count), (10, MAX_WAITING));
        for n in 0..MAX_ENDED as u64 + 10 {
            endpoints.ended(1_000_000 + n, Some(format!("GET /{n}")), None);
        }
        assert_eq!((endpoints.ended.len(), endpoints.ended_order.len()), (MAX_ENDED, MAX_ENDED));
        assert_eq!(endpoints.names.len(), MAX_ENDPOINTS + 1);
        assert_eq!(endpoints.name(MAX_ENDPOINTS as u32), OTHER);
        assert_eq!(endpoints.of(Some(1_000_000)), At::Waits(1_000_000));
        // What continues it knows the endpoints of these requests, and has room for others once these are forgotten.
        let is = |endpoints: &Endpoints<u64>, id: u64, name: &str| {
            let At::Known(of) = endpoints.of(Some(id)) else { return false };
            endpoints.name(of.endpoint) == name
        };
        endpoints.ended(1, Some("GET /one".to_owned()), None);
        assert!(is(&endpoints, 1, OTHER));
        for n in 0..MAX_ENDED as u64 {
            endpoints.ended(2_000_000 + n, Some("GET /many".to_owned()), None);
        }
        let mut endpoints = endpoints.go_on();
        endpoints.ended(1, Some("GET /one".to_owned()), None);
        assert!(is(&endpoints, 1, "GET /one") && is(&endpoints, 2_000_001, OTHER));
        assert_eq!(endpoints.names.len(), 3);
    }
}
