//! Suggests what a user may have meant by a flag that does not exist.

use clap::{
    Error,
    error::{ContextKind, ContextValue},
};

/// Flags of other tools and likely first guesses, each with the equivalent flag of gctrace.
const MEANT: [(&str, &str); 6] = [
    ("--all", "--all-ruby"),
    ("--process", "--name"),
    ("--pids", "--pid"),
    ("--service", "--unit"),
    ("--file", "--output"),
    ("--time", "--duration"),
];

/// Returns the error with a better suggestion than the flag with the most similar spelling.
#[must_use]
pub fn with_hint(mut error: Error) -> Error {
    let meant = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(given)) => MEANT.iter().find(|(flag, _)| flag == given),
        _ => None,
    };
    if let Some((_, flag)) = meant {
        error.insert(ContextKind::SuggestedArg, ContextValue::String((*flag).to_owned()));
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Args;
    use clap::{CommandFactory as _, Parser as _};

    /// The suggestion is the equivalent flag, and every suggested flag exists.
    #[test]
    fn suggestions() {
        for (given, meant) in MEANT {
            let error = with_hint(Args::try_parse_from(["gctrace", given]).unwrap_err());
            assert!(error.to_string().contains(&format!("'{meant}'")), "{error}");
            let command = Args::command();
            let known = command.get_arguments().any(|arg| arg.get_long() == meant.strip_prefix("--"));
            assert!(known, "{meant}");
        }
    }
}
