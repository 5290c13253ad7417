//! The load of servers, read about once a second.

use std::collections::{BTreeMap, HashMap};

use super::Pipeline;
use crate::{
    clock::monotonic_ns,
    host::{
        listens::{AcceptQueues, ListenLists},
        tasks,
    },
    model::{load::ServerLoad, seen::Seen},
};

/// Interval at which the load is read.
const INTERVAL_NS: u64 = 1_000_000_000;
/// Interval at which the listening sockets of a process are looked up.
const LOOK_NS: u64 = 10_000_000_000;

/// Prefix of the thread names of a Puma's pool (`ThreadPool#spawn_thread`, `lib/puma/thread_pool.rb` of 5.0 to 8.0). Threads that serve
/// have a number after it, other threads a word.
const POOL: &[u8] = b"puma srv tp ";

/// When loads and sockets were last read.
#[derive(Default)]
pub(super) struct Loads {
    /// When the loads were last read, in `CLOCK_MONOTONIC` nanoseconds.
    read_ns: u64,
    /// Sockets of the processes, and when they were looked up.
    queues: HashMap<u32, (u64, AcceptQueues)>,
}

impl Loads {
    /// Forgets a process that is gone or has become another program.
    pub(super) fn forget(&mut self, pid: u32) {
        self.queues.remove(&pid);
    }
}

/// Number of threads of a Puma's pool that are serving a request. `None`: the state of one of them is unknown, because it has not been seen to take
/// a request yet, or the process has no such threads.
fn busy(pid: u32, serving: &BTreeMap<u32, Option<bool>>) -> Option<u32> {
    let mut busy = None;
    let serves_requests =
        |tid: &u32| tasks::comm(pid, *tid).strip_prefix(POOL).is_some_and(|rest| rest[0].is_ascii_digit());
    for tid in tasks::tids(pid).ok()?.into_iter().filter(serves_requests) {
        let serves = serving.get(&tid).copied().flatten()?;
        busy = Some(busy.unwrap_or(0) + u32::from(serves));
    }
    busy
}

impl Pipeline {
    /// Reports the load of every traced process for which it is known, if requests are traced and the interval has passed.
    pub(super) fn report_loads(&mut self) {
        let now_ns = monotonic_ns();
        let Some(requests) = &self.requests else { return };
        if now_ns.saturating_sub(self.loads.read_ns) < INTERVAL_NS {
            return;
        }
        self.loads.read_ns = now_ns;
        let serving = requests.serving();
        let mut pids: Vec<u32> = self.traced.keys().copied().collect();
        pids.sort_unstable();
        let mut lists = ListenLists::default();
        for pid in pids {
            let Some(process) = self.traced.get(&pid).map(|traced| traced.process.clone()) else { continue };
            let (looked_ns, queues) = self.loads.queues.entry(pid).or_default();
            if *looked_ns == 0 || now_ns.saturating_sub(*looked_ns) >= LOOK_NS {
                (*looked_ns, *queues) = (now_ns, AcceptQueues::of(pid, &mut lists));
            }
            let busy = serving.get(&pid).and_then(|threads| busy(pid, threads));
            let load = ServerLoad { ts_ns: now_ns, busy, queues: queues.read(pid, &mut lists) };
            if load.busy.is_some() || !load.queues.is_empty() {
                self.see(&process, Seen::Load(&load));
            }
        }
    }
}
