//! Where sample sets are kept. The server knows this trait only; each engine has its file.

use std::{fmt::Write as _, path::PathBuf};

use sha2::{Digest as _, Sha256};

use serde::Deserialize;

use crate::{
    digest::{Digest, Figures},
    tune::{Evidence, InForce, Series},
};

mod postgres;
mod sqlite;

pub use postgres::Postgres;
pub use sqlite::Sqlite;

/// SHA-256 of a token: the token itself is kept nowhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenHash(pub(crate) [u8; 32]);

impl TokenHash {
    /// Of this token. Tokens are 128 random bits, so there is nothing to guess and nothing to salt.
    pub fn of(token: &str) -> Self {
        Self(Sha256::digest(token.as_bytes()).into())
    }
}

/// An application.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct App(pub i64);

/// Sets of one application, on one series of Ruby.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// The application.
    pub app: App,
    /// The series.
    pub series: Series,
}

/// Sets that are taken together: of one group, under the same settings of `RUBY_GC_*` that Ruby follows.
#[derive(Clone, Debug, PartialEq)]
pub struct Environment {
    /// Its number in the store, which no other one ever has.
    pub id: i64,
    /// The settings, as [`InForce::key`].
    pub key: String,
    /// Number of the set that came last.
    pub latest: i64,
    /// When that was, epoch seconds.
    pub seen: f64,
}

/// The number of a set in the order in which they came, and what it says.
pub type Numbered = (i64, Evidence);

/// Name of a set: SHA-256 of its body, in hexadecimal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetId(String);

impl SetId {
    /// Of a finished hash.
    pub fn of(hash: &[u8; 32]) -> Self {
        Self(hex(hash))
    }

    /// Of a text; `None` if it is none.
    pub fn parse(text: &str) -> Option<Self> {
        let valid = text.len() == 64 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        valid.then(|| Self(text.to_owned()))
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A new token: 128 random bits in hexadecimal. `None` if the system gave no random numbers.
pub fn new_token() -> Option<String> {
    let mut bytes = [0; 16];
    let filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    (filled == Ok(bytes.len())).then(|| hex(&bytes))
}

/// Bytes in hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        // Writing to a string cannot fail.
        let _infallible = write!(text, "{byte:02x}");
        text
    })
}

/// A set to keep.
#[derive(Debug)]
pub struct NewSet<'a> {
    /// Its name.
    pub id: &'a SetId,
    /// Whose it is.
    pub group: Group,
    /// Its settings, as [`InForce::key`].
    pub in_force: &'a str,
    /// When it came, epoch seconds.
    pub received: f64,
    /// What it says.
    pub evidence: &'a Evidence,
    /// What pages show of it.
    pub digest: &'a Digest,
    /// The set itself without its token, gzip.
    pub body: &'a [u8],
}

/// How much of an application is kept at most. Beyond that its oldest sets are deleted: the latest are worth the most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// Sets.
    pub sets: u64,
    /// Bytes of their bodies and figures.
    pub bytes: u64,
}

impl Quota {
    /// No limit.
    pub const NONE: Self = Self { sets: u64::MAX, bytes: u64::MAX };

    /// How many of the oldest sets, of these sizes, must go so that `sets` sets of `bytes` bytes fit. The latest one stays.
    fn excess(self, mut sets: u64, mut bytes: u64, oldest: impl IntoIterator<Item = u64>) -> u64 {
        let mut deleted = 0;
        for size in oldest {
            if (sets <= self.sets && bytes <= self.bytes) || sets <= 1 {
                break;
            }
            sets -= 1;
            bytes = bytes.saturating_sub(size);
            deleted += 1;
        }
        deleted
    }

    fn exceeded(self, sets: u64, bytes: u64) -> bool {
        sets > self.sets || bytes > self.bytes
    }
}

/// What became of a set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Inserted {
    /// False if it was kept already.
    pub new: bool,
    /// Older sets of the application that were deleted because of its [`Quota`].
    pub deleted: u64,
}

/// Most sets that are deleted at a time, so that others need not wait for long.
pub const BATCH: u32 = 500;

/// Most slots of an application that are kept, and looked at: 46 processes that send for 30 days.
pub const MAX_SLOTS: u32 = 200_000;

/// Ten minutes of a process.
#[derive(Clone, Debug, PartialEq)]
pub struct Slot {
    /// When they began, epoch seconds.
    pub at: i64,
    /// Of its Ruby.
    pub series: Series,
    /// See [`Digest::environment`].
    pub environment: String,
    /// See [`Digest::host`].
    pub host: String,
    /// See [`Digest::pid`].
    pub pid: i64,
    /// The figures.
    pub figures: Figures,
}

/// An application and what is kept of it.
#[derive(Clone, Debug, PartialEq)]
pub struct AppInfo {
    /// Which.
    pub app: App,
    /// Its name, as it was registered: anything.
    pub name: String,
    /// Who registered it: anything.
    pub email: String,
    /// When, epoch seconds.
    pub created: f64,
    /// Sets that are kept.
    pub sets: u64,
    /// Bytes of their bodies and figures.
    pub bytes: u64,
    /// When the latest of them came, epoch seconds.
    pub last: Option<f64>,
}

/// What is in a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Applications.
    pub apps: u64,
    /// Sets.
    pub sets: u64,
    /// Samples in them.
    pub samples: u64,
}

/// Why something could not be kept or found.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The name of the store says of no engine.
    #[error("`{0}` names no store; give sqlite:PATH or postgres://USER@HOST/DATABASE")]
    Name(String),
    /// The file cannot be made.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The reason.
        #[source]
        source: std::io::Error,
    },
    /// The file is something else, or of a later version.
    #[error("{} {what}", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// The engine failed.
    #[error("the store: {0}")]
    Sqlite(#[from] rusqlite::Error),
    /// The engine failed.
    #[error("the store: {}", postgres_reason(.0))]
    Postgres(#[from] ::postgres::Error),
    /// What the host trusts is not known.
    #[error("the store: reading the certificates that this host trusts: {0}")]
    Tls(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A token cannot be made.
    #[error("no token can be made: the system gave no random numbers")]
    Random,
    /// What was kept cannot be read.
    #[error("what is kept of a set cannot be read: {0}")]
    Evidence(#[from] serde_json::Error),
}

/// Where applications and their sets are kept. All methods may block.
pub trait Store: Send + Sync {
    /// Keeps a new application.
    fn register(&self, token: TokenHash, email: &str, name: &str, now: f64) -> Result<(), StoreError>;
    /// The application with this token.
    fn app(&self, token: TokenHash) -> Result<Option<App>, StoreError>;
    /// All applications, the oldest first.
    fn apps(&self) -> Result<Vec<AppInfo>, StoreError>;
    /// Deletes an application with its token and all of its sets; false if it is not there.
    fn delete_app(&self, app: App) -> Result<bool, StoreError>;
    /// Keeps a set, safe from crashes once this returns.
    fn insert(&self, set: &NewSet<'_>, quota: Quota) -> Result<Inserted, StoreError>;
    /// The slots of an application since then (epoch seconds), the latest first; at most [`MAX_SLOTS`].
    fn slots(&self, app: App, since: i64) -> Result<Vec<Slot>, StoreError>;
    /// Deletes the slots of all applications before then (epoch seconds).
    fn prune_slots(&self, before: i64) -> Result<(), StoreError>;
    /// Deletes the oldest sets that came before this time (epoch seconds), of one application or of all; at most [`BATCH`]
    /// of them. Returns how many.
    fn prune(&self, before: f64, app: Option<App>) -> Result<u64, StoreError>;
    /// Whose a set is, and the number of its environment.
    fn group_of(&self, id: &SetId) -> Result<Option<(Group, i64)>, StoreError>;
    /// The group of the set of an application that came last.
    fn latest_group(&self, app: App) -> Result<Option<Group>, StoreError>;
    /// The environments of a group that have sets, at most so many; that of the latest set is first.
    fn environments(&self, group: Group, most: u32) -> Result<Vec<Environment>, StoreError>;
    /// What the sets of an environment that came after a number say: the latest so many, in the order in which they came.
    fn evidence(&self, environment: i64, after: i64, most: u32) -> Result<Vec<Numbered>, StoreError>;
    /// Keeps settings (`NAME=VALUE`) that were advised to a group, and forgets all but the latest so many.
    fn advise(&self, group: Group, settings: &[String], now: f64, most: u32) -> Result<(), StoreError>;
    /// The settings that were advised to a group.
    fn advised(&self, group: Group) -> Result<Vec<String>, StoreError>;
    /// What there is.
    fn totals(&self) -> Result<Totals, StoreError>;
}

/// Numbers of a slot, as they stand in both engines' tables.
const FIGURES: &str = "cycles, majors, gc_ms, gc_seconds, c0, c1, c2, c3, c4, c5, c6, c7, c8, c9, rss, slots";

/// What a further set does to a slot that is there; `is`: its table.
fn adding(is: &str, most: &str) -> String {
    let mut text = String::new();
    for name in FIGURES.split(", ") {
        // Writing to a string cannot fail.
        let _infallible = match name {
            "rss" | "slots" => write!(text, "{name} = {most}({is}.{name}, excluded.{name}), "),
            _ => write!(text, "{name} = {is}.{name} + excluded.{name}, "),
        };
    }
    text + &format!("sets = {is}.sets + 1")
}

/// The settings of a set that an earlier release has kept.
fn in_force_of(evidence: &str, series: Series) -> Result<String, serde_json::Error> {
    #[derive(Deserialize)]
    struct Kept {
        #[serde(default)]
        environment: std::collections::BTreeMap<String, String>,
    }
    let kept: Kept = serde_json::from_str(evidence)?;
    Ok(InForce::of(&kept.environment, series).key())
}

/// Opens the store with this name: `sqlite:PATH`, which is made if it is not there, or `postgres://…`.
pub fn open(name: &str) -> Result<Box<dyn Store>, StoreError> {
    if is_postgres(name) {
        return Ok(Box::new(Postgres::open(name)?));
    }
    match name.strip_prefix("sqlite:") {
        Some(path) if !path.is_empty() => Ok(Box::new(Sqlite::open(path.as_ref())?)),
        _ => Err(StoreError::Name(shown(name))),
    }
}

fn is_postgres(name: &str) -> bool {
    ["postgres://", "postgresql://"].iter().any(|scheme| name.starts_with(scheme))
}

/// The name of a store without what is secret in it.
pub(crate) fn shown(name: &str) -> String {
    let Some((scheme, rest)) = name.split_once("://") else { return name.to_owned() };
    // Parameters may hold a password, too.
    let rest = rest.split(['?', '#']).next().unwrap_or_default();
    match rest.rsplit_once('@') {
        None => format!("{scheme}://{rest}"),
        Some((user, place)) => format!("{scheme}://{}@{place}", user.split(':').next().unwrap_or_default()),
    }
}

/// What PostgreSQL says itself, which its library's errors leave to their sources.
fn postgres_reason(error: &::postgres::Error) -> String {
    if let Some(error) = error.as_db_error() {
        return format!("PostgreSQL: {} ({})", error.message(), error.code().code());
    }
    match std::error::Error::source(error) {
        Some(source) => format!("PostgreSQL: {error}: {source}"),
        None => format!("PostgreSQL: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names of stores are told without their passwords, and wrong ones are one clear error.
    #[test]
    fn names() {
        for (name, told) in [
            ("postgres://me:secr@et@db:5432/gc?password=secret", "postgres://me@db:5432/gc"),
            ("postgres://db/gc", "postgres://db/gc"),
            ("sqlite:/a/b", "sqlite:/a/b"),
        ] {
            assert_eq!(shown(name), told);
        }
        for name in ["", "sqlite:", "mysql://me:secret@db"] {
            let Err(error) = open(name) else { panic!("{name} is no store") };
            assert!(matches!(error, StoreError::Name(_)) && !error.to_string().contains("secret"), "{error}");
        }
    }
}
