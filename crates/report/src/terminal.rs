//! What standard output is: a terminal of some width, or something else.

use std::io::{self, IsTerminal as _};

/// Where text for people goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Screen {
    terminal: bool,
    /// Whether to use colours.
    pub colour: bool,
}

/// Colours for parts of a line that stand out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Colour {
    /// Worth a look.
    Yellow,
    /// Worse.
    Red,
    /// Of less interest.
    Dim,
}

impl Screen {
    /// Standard output. `NO_COLOR` (not empty) and `TERM=dumb` turn colours off.
    pub fn stdout() -> Self {
        let terminal = io::stdout().is_terminal();
        Self { terminal, colour: terminal && colours() }
    }

    /// A pipe or a file.
    pub fn none() -> Self {
        Self::default()
    }

    /// Number of columns, if it is a terminal. It may change at any time.
    pub fn width(self) -> Option<usize> {
        if !self.terminal {
            return None;
        }
        let size = rustix::termios::tcgetwinsize(io::stdout()).ok()?;
        (size.ws_col > 0).then(|| usize::from(size.ws_col))
    }

    /// The text in a colour, if colours are wanted.
    pub fn paint(self, text: String, colour: Option<Colour>) -> String {
        let code = match colour.filter(|_| self.colour) {
            None => return text,
            Some(Colour::Yellow) => 33,
            Some(Colour::Red) => 31,
            Some(Colour::Dim) => 2,
        };
        format!("\x1b[{code}m{text}\x1b[0m")
    }
}

/// Whether colours are allowed, that is, the user has not asked for plain text.
pub fn colours() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
        && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}
