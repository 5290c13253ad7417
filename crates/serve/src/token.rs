//! The secret that an address must contain: 128 random bits.

use std::{
    io,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use subtle::ConstantTimeEq as _;

/// How long the one-time address is valid.
const ONCE: Duration = Duration::from_mins(1);

/// 128 random bits in hexadecimal digits.
#[derive(Clone, Debug)]
pub(crate) struct Token(String);

impl Token {
    /// Generates a token.
    pub(crate) fn new() -> io::Result<Self> {
        let mut bytes = [0_u8; 16];
        let mut filled = 0;
        while filled < bytes.len() {
            filled += rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty())?;
        }
        Ok(Self(format!("{:032x}", u128::from_be_bytes(bytes))))
    }

    /// Its hexadecimal digits.
    pub(crate) fn text(&self) -> &str {
        &self.0
    }

    /// Whether `text` is this token, compared in constant time.
    pub(crate) fn is(&self, text: &str) -> bool {
        self.0.as_bytes().ct_eq(text.as_bytes()).into()
    }
}

/// A token that opens the page once.
#[derive(Debug)]
pub(crate) struct Once {
    pub(crate) token: Token,
    since: Instant,
    used: AtomicBool,
}

impl Once {
    /// Generates a one-time token.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { token: Token::new()?, since: Instant::now(), used: AtomicBool::new(false) })
    }

    /// Whether `text` is this token, not used before and not expired; this uses it up.
    pub(crate) fn takes(&self, text: &str) -> bool {
        self.token.is(text) && self.since.elapsed() < ONCE && !self.used.swap(true, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tokens differ, and only a complete one is accepted.
    #[test]
    fn tokens() {
        let (token, other) = (Token::new().unwrap(), Token::new().unwrap());
        assert_eq!(token.text().len(), 32);
        assert!(token.is(token.text()) && !token.is(other.text()));
        for wrong in ["", &token.text()[..31], &format!("{}0", token.text())] {
            assert!(!token.is(wrong), "{wrong}");
        }
        let once = Once::new().unwrap();
        let text = once.token.text().to_owned();
        assert!(!once.takes("x") && once.takes(&text) && !once.takes(&text));
    }
}
