//! What an address must have in it: 128 random bits.

use std::{
    io,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use subtle::ConstantTimeEq as _;

/// For how long the address that works once does.
const ONCE: Duration = Duration::from_mins(1);

/// 128 random bits in hexadecimal digits.
#[derive(Clone, Debug)]
pub(crate) struct Token(String);

impl Token {
    /// A new one.
    pub(crate) fn new() -> io::Result<Self> {
        let mut bytes = [0_u8; 16];
        let mut filled = 0;
        while filled < bytes.len() {
            filled += rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty())?;
        }
        Ok(Self(format!("{:032x}", u128::from_be_bytes(bytes))))
    }

    /// Its digits.
    pub(crate) fn text(&self) -> &str {
        &self.0
    }

    /// Whether this is it. How long that takes does not depend on how much of it is right.
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
    /// A new one.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { token: Token::new()?, since: Instant::now(), used: AtomicBool::new(false) })
    }

    /// Whether this is it, and it has not been used or grown old; it is used by that.
    pub(crate) fn takes(&self, text: &str) -> bool {
        self.token.is(text) && self.since.elapsed() < ONCE && !self.used.swap(true, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tokens differ, and only the whole one counts.
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
