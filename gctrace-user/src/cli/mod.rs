//! The command line.

mod args;
#[cfg(feature = "collector")]
mod collector;
mod commands;
mod copies;
mod documents;
mod help;
mod hints;
mod parse;
mod record;
mod reports;
mod serve;
mod settings;
mod top;
mod tune;

pub use args::{
    Args, DoctorArgs, DocumentArg, Subcommand, TuneArgs,
    diff::{DiffArgs, InfoArgs},
    profile::ProfileArgs,
    record::{RecordArgs, ReportFileArgs},
    report::ReportArgs,
    select::SelectArgs,
    serve::ServeArgs,
    top::TopArgs,
    usage::UsageError,
};
#[cfg(feature = "collector")]
pub use collector::{AppsArgs, CollectorArgs, apps, collector};
pub use commands::{By, DoctorSettings, DumpSettings, HeapSettings, MallocSettings};
pub use copies::{MergeArgs, ScrubArgs};
pub use documents::{completions, man};
pub use help::{command, parse};
pub use hints::with_hint;
pub use record::{record, report};
pub use reports::{Format, Reports};
pub use serve::{choose, live};
pub use settings::{Live, Settings, Show};
pub use top::{alone, top, top_alone};
pub use tune::tune;
