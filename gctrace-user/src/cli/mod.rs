//! The command line.

mod args;
mod settings;

pub use args::{Args, DoctorArgs, Subcommand};
pub use settings::{DoctorSettings, Format, Settings, UsageError};
