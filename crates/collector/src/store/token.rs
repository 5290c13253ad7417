//! Tokens: who may send sets of an application, and who may read its reports.

use sha2::{Digest as _, Sha256};

use super::{App, hex};

/// SHA-256 of a token; the token itself is stored nowhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenHash(pub(crate) [u8; 32]);

impl TokenHash {
    /// The hash of this token. Tokens are 128 random bits, so they cannot be guessed and need no salt.
    pub fn of(token: &str) -> Self {
        Self(Sha256::digest(token.as_bytes()).into())
    }

    /// The first 48 bits in hexadecimal: enough to identify a token, too few to act as one.
    pub fn id(&self) -> String {
        hex(&self.0[..6])
    }
}

/// A new token: 128 random bits in hexadecimal. `None` if the system returned no random numbers.
pub fn new_token() -> Option<String> {
    let mut bytes = [0; 16];
    let filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    (filled == Ok(bytes.len())).then(|| hex(&bytes))
}

/// The rights of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rights {
    /// To send sets of its application and to read its reports: what agents of the protocol expect.
    Both,
    /// To send sets of its application.
    Write,
    /// To read the reports of its application and of that application's parts.
    Read,
    /// To read the reports of all applications.
    Operator,
}

impl Rights {
    const ALL: [Self; 4] = [Self::Both, Self::Write, Self::Read, Self::Operator];

    /// Its name in the store.
    pub fn name(self) -> &'static str {
        match self {
            Self::Both => "both",
            Self::Write => "write",
            Self::Read => "read",
            Self::Operator => "operator",
        }
    }

    /// Parses its name in the store.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|rights| rights.name() == name)
    }

    /// Whether this permits sending sets.
    pub fn may_write(self) -> bool {
        matches!(self, Self::Both | Self::Write)
    }

    /// Whether this permits reading reports.
    pub fn may_read(self) -> bool {
        self != Self::Write
    }
}

/// The stored record of a token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Token {
    /// Its hash.
    pub hash: TokenHash,
    /// Its application; `None` for all of them ([`Rights::Operator`]).
    pub app: Option<App>,
    /// Its rights.
    pub rights: Rights,
    /// When it was created, epoch seconds.
    pub created: f64,
    /// When it stops being valid, epoch seconds; `None`: never.
    pub ends: Option<f64>,
}

impl Token {
    /// Whether it is valid at this time (epoch seconds).
    pub fn is_valid(&self, now: f64) -> bool {
        self.ends.is_none_or(|ends| now < ends)
    }
}
