//! What a recording lacks, in words: figures based on incomplete data are not shown.

use gctrace_common::stats::Family;
use gctrace_tunemygc::printable::printable;

use super::gather::Side;
use crate::{ledger::Extent, words::plural};

/// Maximum share of stacks that may be lost. Shares are shown in tenths of a percent, so a larger loss would be visible.
const STACKS: f64 = 0.001;

/// Why figures are absent; `None`: they are complete.
pub(super) type Lack = Option<String>;

impl Side {
    pub(super) fn lacks(&self, what: &str) -> String {
        format!("{} {what}", self.name)
    }

    /// Losses are unknown if no account was written.
    fn unaccounted(&self) -> Lack {
        self.ledger.kernel.is_none().then(|| self.lacks("has no account of losses: it was cut off too early"))
    }

    fn lost_of(&self, family: Family, more: u64, noun: &str) -> Lack {
        let lost = self.ledger.lost_of(family) + more;
        (lost > 0).then(|| self.lacks(&format!("lost {}", plural(lost, noun)))).or_else(|| self.unaccounted())
    }

    /// Why there is no data of the chosen processes.
    pub(super) fn empty(&self) -> Lack {
        if self.grid.began_ns().is_none() {
            return Some(self.lacks("ends before tracing had fully started"));
        }
        let is_chosen = self.chosen.pid.is_some() || self.chosen.program.is_some();
        let what = if is_chosen { "has no such process" } else { "contains no Ruby process" };
        self.programs.is_empty().then(|| self.lacks(what))
    }

    pub(super) fn without_gc(&self) -> Lack {
        if let Some(program) = self.without_cycles.first() {
            let program = printable(program);
            return Some(self.lacks(&format!(
                "has no GC events of {program}: its Ruby was traced by functions or USDT probes"
            )));
        }
        self.lost_of(Family::Gc, self.ledger.user.pipeline.undecodable, "GC event")
    }

    /// The share of all stacks that was lost, or why there are no shares.
    pub(super) fn without_samples(&self) -> Result<f64, String> {
        if !self.looked.samples {
            return Err(self.lacks("has no CPU samples"));
        }
        if let Some(why) = self.unaccounted() {
            return Err(why);
        }
        let lost = self.ledger.lost_of(Family::Stacks) + self.ledger.user.stacks.undecodable_stacks;
        let part = lost as f64 / (self.cpu.stacks + lost).max(1) as f64;
        if part > STACKS {
            let all = self.cpu.stacks + lost;
            return Err(self.lacks(&format!("lost {} of {all}", plural(lost, "stack"))));
        }
        Ok(part)
    }

    pub(super) fn without_wall(&self) -> Lack {
        if !self.looked.wall {
            return Some(self.lacks("was recorded without --wall"));
        }
        if let Err(why) = self.without_samples() {
            return Some(why);
        }
        // An off-CPU time is recorded when it or the run ends; in a part of a run, at the end of the part.
        if self.ledger.extent == Extent::CutOff {
            return Some(self.lacks("was cut off: threads that were off the CPU at that point are missing"));
        }
        let stacks = &self.ledger.user.stacks;
        let part = stacks.off_cpu_ns_without_stack as f64 / stacks.off_cpu_ns.max(1) as f64;
        (part > STACKS)
            .then(|| self.lacks(&format!("has no stack for {:.1} % of the off-CPU time", part * 100.0)))
    }

    pub(super) fn without_gvl(&self) -> Lack {
        if !self.looked.gvl {
            return Some(self.lacks("was recorded without --gvl"));
        }
        self.lost_of(Family::Gvl, 0, "GVL event")
    }

    /// A thread's sums are written when it or the run ends: other recordings lack the sums of threads that continued to run.
    pub(super) fn without_gvl_sums(&self) -> Lack {
        match self.ledger.extent {
            Extent::Run => None,
            Extent::CutOff => {
                Some(self.lacks("was cut off: it lacks the sums of threads that were still running"))
            }
            Extent::Part => {
                Some(self.lacks("is a part of a run: it lacks the sums of threads that continued to run"))
            }
        }
    }

    /// Rates of waits need the watched time.
    pub(super) fn without_gvl_rates(&self) -> Lack {
        if self.gvl_watched().is_some() {
            None
        } else {
            self.without_gvl_sums().or_else(|| self.without_holders())
        }
    }

    /// Share of the time for which the GVL was watched, 0 to 1; `None`: unknown.
    pub(super) fn gvl_watched(&self) -> Option<f64> {
        match self.gvl.unwatched_ns {
            0 => Some(1.0),
            // Only the sums of all threads say how much of their time it was.
            _ if self.without_gvl_sums().is_some() => None,
            _ => (self.gvl.watched_ns > 0).then(|| self.gvl.watched_ns as f64 / self.gvl.wall_ns as f64),
        }
    }

    pub(super) fn without_holders(&self) -> Lack {
        self.without_gvl().or_else(|| {
            let seconds = self.gvl.gap_ns as f64 / 1e9;
            (self.gvl.gap_ns > 0).then(|| {
                self.lacks(&format!("did not report individual waits for {seconds:.1} s (CPU budget)"))
            })
        })
    }

    pub(super) fn without_requests(&self) -> Lack {
        if !self.looked.requests {
            return Some(self.lacks("was recorded without --requests"));
        }
        let requests = &self.ledger.user.requests;
        let more = requests.requests_no_room + requests.undecodable_requests;
        self.lost_of(Family::Requests, more, "request")
    }

    pub(super) fn without_alloc(&self) -> Lack {
        if !self.looked.alloc {
            return Some(self.lacks("was recorded without --alloc"));
        }
        self.lost_of(Family::Alloc, self.refills_lost, "refill")
    }
}

/// What either side lacks.
pub(super) fn either(a: &Side, b: &Side, of: impl Fn(&Side) -> Lack) -> Vec<String> {
    [of(a), of(b)].into_iter().flatten().collect()
}
