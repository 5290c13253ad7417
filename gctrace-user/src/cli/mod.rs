//! The command line.

mod args;
mod settings;

pub use args::Args;
pub use settings::{Format, Settings, UsageError};
