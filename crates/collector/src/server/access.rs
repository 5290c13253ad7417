//! What a token gives access to.

use hyper::StatusCode;

use super::{Shared, answer::Answer, now};
use crate::store::{App, AppInfo, Rights, StoreError, Token, TokenHash};

/// Why a token gives no access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The token never existed.
    Unknown,
    /// The token was revoked, or replaced by another one.
    Ended,
    /// The token has only these rights.
    Rights(Rights),
}

impl Refusal {
    /// The message for the user.
    pub(super) fn text(self) -> &'static str {
        match self {
            // The protocol's wording.
            Self::Unknown => "Invalid application token",
            Self::Ended => "this token is no longer valid: it was revoked, or replaced by another one",
            Self::Rights(Rights::Write) => "this token is for sending sets only; reading needs another one",
            Self::Rights(_) => "this token is for reading only; sending sets needs another one",
        }
    }

    /// The answer to the request. For a token that never existed it is the protocol's 404.
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
    /// Whether this application is among them.
    pub(super) fn sees(self, info: &AppInfo) -> bool {
        match self {
            Self::All => true,
            Self::Of(app) => info.app == app || info.parent == Some(app),
        }
    }
}

/// The application to which sets sent with a token belong.
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
