//! What a token gives access to.

use hyper::StatusCode;

use super::{Shared, answer::Answer, now};
use crate::store::{App, AppInfo, Rights, StoreError, Token, TokenHash};

/// Why a token gives no access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// It never existed.
    Unknown,
    /// It was revoked, or replaced by another one.
    Ended,
    /// It has other rights.
    Rights(Rights),
}

impl Refusal {
    /// For people.
    pub(super) fn text(self) -> &'static str {
        match self {
            // The protocol's words.
            Self::Unknown => "Invalid application token",
            Self::Ended => "this token is no longer valid: it was revoked, or replaced by another one",
            Self::Rights(Rights::Write) => "this token is for sending sets only; reading needs another one",
            Self::Rights(_) => "this token is for reading only; sending sets needs another one",
        }
    }

    /// As an answer. A token that was never valid is the protocol's 404.
    pub(super) fn answer(self) -> Answer {
        let code = if self == Self::Unknown { StatusCode::NOT_FOUND } else { StatusCode::FORBIDDEN };
        Answer::new(code, self.text())
    }
}

/// The applications that a token may read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sight {
    /// All of them.
    All,
    /// This one and its parts.
    Of(App),
}

impl Sight {
    /// Whether this application is one of them.
    pub(super) fn sees(self, info: &AppInfo) -> bool {
        match self {
            Self::All => true,
            Self::Of(app) => info.app == app || info.parent == Some(app),
        }
    }
}

/// The application to which sets with a token belong.
pub(super) fn writes(shared: &Shared, token: TokenHash) -> Result<Result<App, Refusal>, StoreError> {
    Ok(valid(shared.store.token(token)?, now()).and_then(|token| match token.app {
        Some(app) if token.rights.may_write() => Ok(app),
        _ => Err(Refusal::Rights(token.rights)),
    }))
}

/// What may be read with a token.
pub(super) fn reads(shared: &Shared, token: TokenHash) -> Result<Result<Sight, Refusal>, StoreError> {
    Ok(valid(shared.store.token(token)?, now()).and_then(|token| match (token.rights, token.app) {
        (Rights::Operator, _) => Ok(Sight::All),
        (rights, Some(app)) if rights.may_read() => Ok(Sight::Of(app)),
        (rights, _) => Err(Refusal::Rights(rights)),
    }))
}

fn valid(token: Option<Token>, now: f64) -> Result<Token, Refusal> {
    match token {
        None => Err(Refusal::Unknown),
        Some(token) if token.is_valid(now) => Ok(token),
        Some(_) => Err(Refusal::Ended),
    }
}
