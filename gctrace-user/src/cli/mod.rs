//! The command line.

mod args;
#[cfg(feature = "collector")]
mod collector;
mod commands;
mod copies;
mod diff;
mod documents;
mod heap_args;
mod help;
mod hints;
mod keep_args;
mod look_args;
mod malloc_args;
mod output_args;
mod parse;
mod profile_args;
mod record;
mod reports;
mod select_args;
mod serve;
mod settings;
mod top;
mod top_args;
mod tune;
mod usage;

pub use args::{Args, DoctorArgs, DocumentArg, Subcommand, TuneArgs};
#[cfg(feature = "collector")]
pub use collector::{AppsArgs, CollectorArgs, apps, collector};
pub use commands::{By, DoctorSettings, DumpSettings, HeapSettings, MallocSettings};
pub use copies::{MergeArgs, ScrubArgs};
pub use diff::{DiffArgs, InfoArgs};
pub use documents::{completions, man};
pub use help::{command, parse};
pub use hints::with_hint;
pub use profile_args::ProfileArgs;
pub use record::{RecordArgs, ReportFileArgs, record, report};
pub use reports::{ReportArgs, Reports};
pub use select_args::SelectArgs;
pub use serve::{ServeArgs, choose, live};
pub use settings::{Format, Live, Settings, Show};
pub use top::{alone, top, top_alone};
pub use top_args::TopArgs;
pub use tune::tune;
pub use usage::UsageError;
