//! The command line.

mod args;
#[cfg(feature = "collector")]
mod collector;
mod commands;
mod documents;
mod help;
mod hints;
mod parse;
mod reports;
mod settings;
mod tune;

#[cfg(feature = "collector")]
pub use args::CollectorArgs;
pub use args::{Args, DoctorArgs, Subcommand, TuneArgs};
#[cfg(feature = "collector")]
pub use collector::collector;
pub use commands::{By, DoctorSettings, HeapSettings};
pub use documents::{completions, man};
pub use help::{command, parse};
pub use hints::with_hint;
pub use reports::{ReportArgs, Reports};
pub use settings::{Format, Settings, UsageError};
pub use tune::tune;
