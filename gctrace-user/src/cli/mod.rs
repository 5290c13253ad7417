//! The command line.

mod args;
mod collector;
mod documents;
mod hints;
mod parse;
mod settings;
mod tune;

pub use args::{Args, CollectorArgs, DoctorArgs, Subcommand, TuneArgs};
pub use collector::collector;
pub use documents::{completions, man};
pub use hints::with_hint;
pub use settings::{DoctorSettings, Format, Settings, UsageError};
pub use tune::tune;
