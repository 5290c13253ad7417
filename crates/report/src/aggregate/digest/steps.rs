//! What in a digest deserves a closer look: one rule per kind of problem, each based on one figure. Pure.

use super::{Digest, LongPause, ProcessDigest};
use crate::aggregate::request_summary::{Group, GroupSummary};

/// Minimum share of a process's time for GC to be reported, if there were at least [`CYCLES`] cycles.
pub const GC_SHARE: f64 = 0.1;
const CYCLES: u64 = 10;
/// Minimum length of a pause that users notice, nanoseconds.
pub const PAUSE_NS: u64 = 100_000_000;
/// Average number of threads waiting for the GVL from which the GVL is reported as contended.
pub const WAITING: f64 = 0.5;
/// Minimum growth of resident memory in a recording: in bytes, as a share of the initial memory, and the minimum time in nanoseconds.
pub const GROWTH_BYTES: u64 = 32 << 20;
const GROWTH_SHARE: f64 = 0.1;
const GROWTH_NS: u64 = 30_000_000_000;
/// Minimum number of failed requests of an endpoint, and their minimum share of its requests.
const FAILED: u64 = 5;
const FAILED_SHARE: f64 = 0.01;

/// Something that stands out.
#[derive(Debug)]
pub enum Step<'a> {
    /// A process spends much of its time in the GC.
    Gc(&'a ProcessDigest),
    /// A pause was long.
    Pause(&'a LongPause),
    /// Threads wait for each other.
    Gvl(&'a ProcessDigest),
    /// Resident memory has grown.
    Growth(&'a ProcessDigest),
    /// Requests of an endpoint failed.
    Failing(&'a Group, &'a GroupSummary),
}

impl Digest {
    /// What stands out: at most one finding of each kind.
    pub fn steps(&self) -> Vec<Step<'_>> {
        [self.gc(), self.pause(), self.gvl(), self.growth(), self.failing()].into_iter().flatten().collect()
    }

    fn most(
        &self,
        applies: impl Fn(&&ProcessDigest) -> bool,
        by: impl Fn(&ProcessDigest) -> f64,
    ) -> Option<&ProcessDigest> {
        self.processes.iter().filter(applies).max_by(|a, b| by(a).total_cmp(&by(b)))
    }

    fn gc(&self) -> Option<Step<'_>> {
        let much = |of: &&ProcessDigest| of.cycles.max(of.pauses) >= CYCLES && of.gc_share() >= GC_SHARE;
        self.most(much, ProcessDigest::gc_share).map(Step::Gc)
    }

    fn pause(&self) -> Option<Step<'_>> {
        self.worst.first().filter(|pause| pause.ns >= PAUSE_NS).map(Step::Pause)
    }

    fn gvl(&self) -> Option<Step<'_>> {
        let waiting = |of: &ProcessDigest| of.gvl.as_ref().map_or(0.0, |gvl| gvl.waiting);
        self.most(|of| waiting(of) >= WAITING, waiting).map(Step::Gvl)
    }

    fn growth(&self) -> Option<Step<'_>> {
        let growth = |of: &ProcessDigest| of.rss.map_or(0, |rss| rss.last.saturating_sub(rss.first));
        let grew = |of: &&ProcessDigest| {
            let share = growth(of) as f64 / of.rss.map_or(1, |rss| rss.first.max(1)) as f64;
            of.span_ns >= GROWTH_NS && growth(of) >= GROWTH_BYTES && share >= GROWTH_SHARE && !of.over
        };
        self.most(grew, |of| growth(of) as f64).map(Step::Growth)
    }

    fn failing(&self) -> Option<Step<'_>> {
        let groups = self.requests.by_time().into_iter();
        let fails = |of: &GroupSummary| {
            of.failed >= FAILED && of.failed as f64 / of.count.max(1) as f64 >= FAILED_SHARE
        };
        let most = groups.filter(|(_, of)| fails(of)).max_by_key(|(_, of)| of.failed);
        most.map(|(group, of)| Step::Failing(group, of))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aggregate::{
        digest::GvlDigest, gc_summary::Rss, service_requests::tests::request, services::tests::process,
    };

    fn names(digest: &Digest) -> Vec<String> {
        let name = |step: Step<'_>| match step {
            Step::Gc(of) => format!("gc {}", of.process.pid),
            Step::Pause(pause) => format!("pause {}", pause.pid),
            Step::Gvl(of) => format!("gvl {}", of.process.pid),
            Step::Growth(of) => format!("growth {}", of.process.pid),
            Step::Failing(endpoint, _) => format!("failing {}", endpoint.name),
        };
        digest.steps().into_iter().map(name).collect()
    }

    fn one(pid: u32, change: impl FnOnce(&mut ProcessDigest)) -> ProcessDigest {
        let mut of = ProcessDigest::new(&process(pid, "shop"));
        of.span_ns = 60_000_000_000;
        change(&mut of);
        of
    }

    /// Each rule applies from its limit on, and not below it; of several processes it names the worst one.
    #[test]
    fn limits() {
        let with = |processes: Vec<ProcessDigest>| names(&Digest { processes, ..Digest::default() });
        let gc = |pid, cycles, share: f64| {
            one(pid, |of| (of.cycles, of.stopped_ns) = (cycles, (share * of.span_ns as f64) as u64))
        };
        assert!(with(vec![]).is_empty());
        assert!(with(vec![gc(1, 9, 0.5), gc(2, 1000, 0.099)]).is_empty());
        assert_eq!(with(vec![gc(1, 10, 0.1), gc(2, 10, 0.3), gc(3, 10, 0.2)]), ["gc 2"]);
        let rss = |pid, first, last, over| {
            one(pid, |of| (of.rss, of.over) = (Some(Rss { first, last, peak: last }), over))
        };
        let mib = 1 << 20;
        assert!(
            with(vec![rss(1, 10 * mib, 41 * mib, false), rss(2, 400 * mib, 432 * mib, false)]).is_empty()
        );
        assert!(with(vec![rss(1, 10 * mib, 90 * mib, true), rss(2, 90 * mib, 10 * mib, false)]).is_empty());
        assert_eq!(with(vec![rss(1, 10 * mib, 42 * mib, false)]), ["growth 1"]);
        let mut brief = rss(1, 10 * mib, 90 * mib, false);
        brief.span_ns = GROWTH_NS - 1;
        assert!(with(vec![brief]).is_empty());
        let gvl = |pid, waiting| {
            one(pid, |of| {
                of.gvl =
                    Some(GvlDigest { wait_ns: 1, watched_ns: 1, wall_ns: 1, waiting, blocked: Vec::new() });
            })
        };
        assert!(with(vec![gvl(1, 0.49), one(2, |_| ())]).is_empty());
        assert_eq!(with(vec![gvl(1, 0.5), gvl(2, 3.0)]), ["gvl 2"]);
    }

    /// Failed requests are reported from a minimum number and a minimum share on.
    #[test]
    fn failing() {
        let with = |good: u64, bad: u64| {
            let mut digest = Digest::default();
            for n in 0..good + bad {
                let status = Some(if n < bad { 500 } else { 200 });
                digest.requests.add(&request(Some("/orders"), Some(1000), status));
            }
            names(&digest).len()
        };
        assert_eq!([with(0, 4), with(496, 5), with(0, 0)], [0, 0, 0]);
        assert_eq!([with(0, 5), with(495, 5)], [1, 1]);
    }
}
