//! Flags that choose what profiles show.

use std::time::Duration;

use clap::{Args as ClapArgs, ValueEnum};

use super::usage::UsageError;
use crate::{
    aggregate::recording::{Filter, Pattern},
    cli::parse::nanos,
    export::profile::Measure,
};

/// The flags.
#[derive(Clone, Debug, ClapArgs)]
pub struct ProfileArgs {
    /// What --flamegraph, --folded and --top-lines show [default: cpu, with --wall wall]
    #[arg(long, value_enum, value_name = "WHAT")]
    pub flamegraph_of: Option<MeasureArg>,

    /// Profiles contain only threads whose name contains this text or matches this /expression/, or with this id
    /// (repeatable)
    #[arg(long = "thread", value_name = "PATTERN|TID")]
    pub threads: Vec<Pattern>,

    /// Profiles contain only stacks with a frame whose method or file contains this text or matches this /expression/,
    /// e.g. Order#total or app/models/ (repeatable)
    #[arg(long, value_name = "PATTERN")]
    pub focus: Vec<Pattern>,

    /// Profiles contain only what belongs to requests whose endpoint contains this text or matches this /expression/, e.g. 'GET /orders/:id'
    /// (repeatable)
    // It requires --requests where that is a flag, which `command` adds.
    #[arg(long = "endpoint", value_name = "PATTERN")]
    pub endpoints: Vec<Pattern>,

    /// Leave frames out of profiles whose method or file contains this text or matches this /expression/; their time
    /// goes to their caller (repeatable)
    #[arg(long, value_name = "PATTERN")]
    pub hide: Vec<Pattern>,

    /// Profiles contain only frames of the application's own Ruby code, and those of the GC: no gems, no standard library, no C
    #[arg(long)]
    pub app_only: bool,
}

/// `--flamegraph-of`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MeasureArg {
    /// CPU time
    Cpu,
    /// Time on and off the CPU (needs --wall)
    Wall,
    /// GC pauses, under the stack that started the cycle
    Gc,
    /// Waits for the GVL, under the stack that waited (needs --gvl)
    GvlWait,
    /// Bytes of the slots of new objects, under the stack that allocates (needs --alloc)
    Alloc,
}

impl ProfileArgs {
    /// The filter that these flags describe. `slower_than`: the same of requests.
    pub(in crate::cli) fn filter(&self, slower_than: Option<Duration>) -> Filter {
        let Self { threads, focus, endpoints, hide, app_only, .. } = self.clone();
        Filter { threads, focus, endpoints, slower_than_ns: slower_than.map(nanos), hide, app_only }
    }

    /// What flame graphs show, in a run with or without --wall, --gvl and --alloc.
    pub(in crate::cli) fn measure(&self, wall: bool, gvl: bool, alloc: bool) -> Result<Measure, UsageError> {
        match self.flamegraph_of {
            Some(MeasureArg::Wall) if !wall => Err(UsageError::GraphNeeds("wall", "--wall")),
            Some(MeasureArg::GvlWait) if !gvl => Err(UsageError::GraphNeeds("gvl-wait", "--gvl")),
            Some(MeasureArg::Alloc) if !alloc => Err(UsageError::GraphNeeds("alloc", "--alloc")),
            Some(MeasureArg::Alloc) => Ok(Measure::Alloc),
            Some(MeasureArg::Wall) => Ok(Measure::Wall),
            None if wall => Ok(Measure::Wall),
            Some(MeasureArg::Cpu) | None => Ok(Measure::Cpu),
            Some(MeasureArg::Gc) => Ok(Measure::Gc),
            Some(MeasureArg::GvlWait) => Ok(Measure::GvlWait),
        }
    }
}
