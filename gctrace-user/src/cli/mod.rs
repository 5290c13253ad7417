//! The command line.

mod args;
#[cfg(feature = "collector")]
mod collector;
mod commands;
mod documents;
mod heap_args;
mod help;
mod hints;
mod parse;
mod reports;
mod select_args;
mod settings;
mod top;
mod top_args;
mod tune;

pub use args::{Args, DoctorArgs, Subcommand, TuneArgs};
#[cfg(feature = "collector")]
pub use collector::{AppsArgs, CollectorArgs, apps, collector};
pub use commands::{By, DoctorSettings, DumpSettings, HeapSettings};
pub use documents::{completions, man};
pub use help::{command, parse};
pub use hints::with_hint;
pub use reports::{ReportArgs, Reports};
pub use select_args::SelectArgs;
pub use settings::{Format, Settings, Show, UsageError};
pub use top::{alone, top, top_alone};
pub use top_args::TopArgs;
pub use tune::tune;
