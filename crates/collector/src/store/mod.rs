//! Storage of sample sets. The server uses only this trait; each engine has its own file.

use std::{collections::HashMap, fmt::Write as _, path::PathBuf};

use serde::Deserialize;

use crate::{
    digest::{Digest, Figures},
    tune::{Evidence, InForce, Series, Strategy, history::Times},
};

mod postgres;
mod sqlite;
mod token;

pub use postgres::Postgres;
pub use sqlite::Sqlite;
pub use token::{Rights, Token, TokenHash, new_token};

/// An application, by its number in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct App(pub i64);

/// The sets of one application on one series of Ruby.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// The application.
    pub app: App,
    /// The series.
    pub series: Series,
}

/// Sets that are evaluated together: those of one group under the same settings of the `RUBY_GC_*` variables that Ruby follows.
#[derive(Clone, Debug, PartialEq)]
pub struct Environment {
    /// Its number in the store, which is never reused.
    pub id: i64,
    /// The settings, as [`InForce::key`].
    pub key: String,
    /// Number of the set that arrived last.
    pub latest: i64,
    /// When that set arrived, epoch seconds.
    pub seen: f64,
    /// When the first set arrived, epoch seconds; that set may be deleted by now.
    pub first: f64,
    /// Its latest period, by the times in its sets, which may arrive late and in any order.
    pub times: Times,
    /// Number of the latest set in its summary, if it has one; the summarized sets may be deleted by now.
    pub summarized: Option<i64>,
}

/// A period covered by sets of an environment, by their own times. It ends when others take over and it has no set for
/// [`GAP`](gctrace_tunemygc::tune::history::GAP).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Period {
    /// The environment.
    pub environment: i64,
    /// When its first set begins, epoch seconds.
    pub first: f64,
    /// When its last set ends, epoch seconds.
    pub last: f64,
}

/// Maximum number of stored periods of a group that are read. A stored period has no gap longer than
/// [`GAP`](gctrace_tunemygc::tune::history::GAP).
const MOST_PERIODS: u32 = 4096;

/// The latest `most` periods. Stored periods of one environment with no other environment between them are merged. Which sets lie between
/// them is known only when all have arrived, so the merge is repeated on each call.
fn periods_of(mut stored: Vec<Period>, most: u32) -> Vec<Period> {
    stored.sort_by(|a, b| {
        a.first.total_cmp(&b.first).then(a.last.total_cmp(&b.last)).then(a.environment.cmp(&b.environment))
    });
    let mut all: Vec<Period> = Vec::new();
    // By environment: the index of its latest period, and when it was seen last.
    let mut latest: HashMap<i64, (usize, f64)> = HashMap::new();
    for period in stored {
        let before = latest.get(&period.environment).copied().filter(|(_, last)| {
            !latest.iter().any(|(other, seen)| *other != period.environment && seen.1 > *last)
        });
        let at = if let Some((at, _)) = before {
            all[at].last = all[at].last.max(period.last);
            at
        } else {
            all.push(period);
            all.len() - 1
        };
        latest.insert(period.environment, (at, all[at].last));
    }
    let left = all.len().saturating_sub(most as usize);
    all.split_off(left)
}

/// Settings that were advised to a group while some settings were in force.
#[derive(Clone, Debug, PartialEq)]
pub struct Given {
    /// The strategy.
    pub strategy: Strategy,
    /// The settings in force, as [`InForce::key`].
    pub in_force: String,
    /// The advised settings; equal to `in_force` if no change was advised.
    pub settings: String,
    /// Whether the advice was to revert the last change.
    pub withdrawal: bool,
    /// When it was given first, epoch seconds.
    pub first: f64,
    /// When it was given last, epoch seconds.
    pub last: f64,
}

/// The number of a set, in order of arrival, and its evidence.
pub type Numbered = (i64, Evidence);

/// Name of a set: SHA-256 of its decompressed text as it was received, in hexadecimal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetId(String);

impl SetId {
    /// The name of a set with this hash.
    pub fn of(hash: &[u8; 32]) -> Self {
        Self(hex(hash))
    }

    /// Parses the name of a set; `None` if it is not valid.
    pub fn parse(text: &str) -> Option<Self> {
        let valid = text.len() == 64 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        valid.then(|| Self(text.to_owned()))
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Bytes in hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        // Writing to a string cannot fail.
        let _infallible = write!(text, "{byte:02x}");
        text
    })
}

/// A set to store.
#[derive(Debug)]
pub struct NewSet<'a> {
    /// Its name.
    pub id: &'a SetId,
    /// The group that it belongs to.
    pub group: Group,
    /// Its settings, as [`InForce::key`].
    pub in_force: &'a str,
    /// When it arrived, epoch seconds.
    pub received: f64,
    /// Its evidence.
    pub evidence: &'a Evidence,
    /// What pages show of it.
    pub digest: &'a Digest,
    /// The set itself without its token, gzip-compressed.
    pub body: &'a [u8],
}

/// Maximum amount of data stored per application. Above it, the oldest sets are deleted: the latest ones are the most useful.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// Number of sets.
    pub sets: u64,
    /// Bytes of their bodies and figures.
    pub bytes: u64,
}

impl Quota {
    /// No limit.
    pub const NONE: Self = Self { sets: u64::MAX, bytes: u64::MAX };

    /// How many of the oldest sets, of these sizes, must be deleted so that `sets` sets of `bytes` bytes fit. The latest set always stays.
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

/// The outcome of storing a set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Inserted {
    /// False if the set was stored before, even if it has been deleted since and only its figures remain.
    pub new: bool,
    /// Number of older sets of the application that were deleted because of its [`Quota`].
    pub deleted: u64,
}

/// Maximum number of sets deleted at a time, so that other work does not wait for long.
pub const BATCH: u32 = 500;

/// Maximum number of ids kept of an application's deleted sets: the figures still include a set that is sent again.
pub const MAX_GONE: u32 = 200_000;

/// Maximum number of slots of an application that are kept and read: some 500 processes that send for 30 days (see [`Store::roll_up`]).
pub const MAX_SLOTS: u32 = 200_000;

/// The figures of ten minutes of a process; older slots span hours.
#[derive(Clone, Debug, PartialEq)]
pub struct Slot {
    /// When the slot begins, epoch seconds.
    pub at: i64,
    /// The series of its Ruby.
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

/// An application to add.
#[derive(Clone, Copy, Debug)]
pub struct NewApp<'a> {
    /// Its name: any text.
    pub name: &'a str,
    /// A contact address: any text.
    pub email: &'a str,
    /// The application that it is a part of, which must not be a part itself.
    pub parent: Option<App>,
    /// When it was created, epoch seconds.
    pub created: f64,
}

/// Maximum bytes of a name or an address from outside.
pub const MAX_FIELD: usize = 254;

/// Whether a new name or address is acceptable: one line that is not blank and not too long. Earlier releases stored others as well.
pub fn is_field(text: &str) -> bool {
    !text.trim().is_empty() && text.len() <= MAX_FIELD && !text.chars().any(char::is_control)
}

/// An application and the amount of its stored data.
#[derive(Clone, Debug, PartialEq)]
pub struct AppInfo {
    /// The application.
    pub app: App,
    /// The application that it is a part of.
    pub parent: Option<App>,
    /// Its name, as it was registered: any text.
    pub name: String,
    /// Who registered it: any text.
    pub email: String,
    /// When it was registered, epoch seconds.
    pub created: f64,
    /// Number of sets stored.
    pub sets: u64,
    /// Bytes of their bodies and figures.
    pub bytes: u64,
    /// When the latest of them arrived, epoch seconds.
    pub last: Option<f64>,
}

impl AppInfo {
    /// Its name, after that of its parent application if `all` contains it.
    pub fn title(&self, all: &[Self]) -> String {
        let whole = self.parent.and_then(|parent| all.iter().find(|other| other.app == parent));
        whole.map_or_else(|| self.name.clone(), |whole| format!("{} / {}", whole.name, self.name))
    }

    /// The sort key that puts parts after their applications.
    pub fn order(&self) -> (i64, i64) {
        (self.parent.unwrap_or(self.app).0, self.app.0)
    }
}

/// The numbers of entries in a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Applications.
    pub apps: u64,
    /// Sets.
    pub sets: u64,
    /// Samples in those sets.
    pub samples: u64,
}

/// Why something could not be stored or found.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The name of the store matches no engine.
    #[error("`{0}` is not a store; give sqlite:PATH or postgres://USER@HOST/DATABASE")]
    Name(String),
    /// The file cannot be created.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The reason.
        #[source]
        source: std::io::Error,
    },
    /// The file does not exist, and is not to be created.
    #[error("{}: no such store; gctrace collector or gctrace apps add creates it", .0.display())]
    Missing(PathBuf),
    /// The file is not a store, or is one of a later version.
    #[error("{} {what}", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What is wrong with the file.
        what: String,
    },
    /// The engine failed.
    #[error("the store: {0}")]
    Sqlite(#[from] rusqlite::Error),
    /// The engine failed.
    #[error("the store: {}", postgres_reason(.0))]
    Postgres(#[from] ::postgres::Error),
    /// The certificates that the host trusts cannot be read.
    #[error("the store: reading the certificates that this host trusts: {0}")]
    Tls(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A token cannot be generated.
    #[error("no token can be made: the system returned no random numbers")]
    Random,
    /// The text is not a valid name of an application.
    #[error("the name of an application is one line of 1 to {MAX_FIELD} bytes that is not blank")]
    AppName,
    /// The text is not a valid contact address.
    #[error("an address is one line of at most {MAX_FIELD} bytes")]
    Address,
    /// The application does not exist.
    #[error("there is no application {}", .0.0)]
    Unknown(App),
    /// A part cannot have parts.
    #[error("application {} is a part of another one: it cannot have parts", .0.0)]
    Part(App),
    /// Stored evidence cannot be read.
    #[error("the stored evidence of a set cannot be read: {0}")]
    Evidence(#[from] serde_json::Error),
}

/// Storage of applications and their sets. All methods may block.
pub trait Store: Send + Sync {
    /// Stores a new application with its first token.
    fn register(&self, app: &NewApp<'_>, token: TokenHash, rights: Rights) -> Result<App, StoreError>;
    /// All applications, oldest first.
    fn apps(&self) -> Result<Vec<AppInfo>, StoreError>;
    /// Deletes an application with its parts, all their tokens and all their sets; false if it does not exist.
    fn delete_app(&self, app: App) -> Result<bool, StoreError>;
    /// The stored record of a token, even after its end.
    fn token(&self, token: TokenHash) -> Result<Option<Token>, StoreError>;
    /// All tokens, oldest first.
    fn tokens(&self) -> Result<Vec<Token>, StoreError>;
    /// Stores a new token.
    fn add_token(&self, token: &Token) -> Result<(), StoreError>;
    /// Ends a token at this time (epoch seconds), unless it ends earlier. False if it does not exist.
    fn end_token(&self, token: TokenHash, at: f64) -> Result<bool, StoreError>;
    /// Stores a set, durably once this returns.
    fn insert(&self, set: &NewSet<'_>, quota: Quota) -> Result<Inserted, StoreError>;
    /// The slots of an application since `since` (epoch seconds), latest first; at most [`MAX_SLOTS`].
    fn slots(&self, app: App, since: i64) -> Result<Vec<Slot>, StoreError>;
    /// Merges the slots of an application in `from..before` (epoch seconds) into slots that begin at multiples of `width` seconds.
    /// Idempotent. Returns by how many the number of slots decreased.
    fn roll_up(&self, app: App, from: i64, before: i64, width: i64) -> Result<u64, StoreError>;
    /// Deletes, for all applications, the slots, ids of deleted sets, and summaries and periods of environments from before `before` (epoch seconds).
    fn prune_slots(&self, before: i64) -> Result<(), StoreError>;
    /// Deletes the oldest sets that arrived before this time (epoch seconds), of one application or of all; at most [`BATCH`]
    /// of them. Returns the number of deleted sets.
    fn prune(&self, before: f64, app: Option<App>) -> Result<u64, StoreError>;
    /// When the set that arrived last by the clock of then did, epoch seconds; `None` without sets.
    fn newest(&self) -> Result<Option<f64>, StoreError>;
    /// The group of a set, and the id of its environment.
    fn group_of(&self, id: &SetId) -> Result<Option<(Group, i64)>, StoreError>;
    /// The group of an application's latest set, by the sets' own times.
    fn latest_group(&self, app: App) -> Result<Option<Group>, StoreError>;
    /// The environments of a group that have sets or a summary, at most `most`; the environment of the latest set is first, by the
    /// sets' own times.
    fn environments(&self, group: Group, most: u32) -> Result<Vec<Environment>, StoreError>;
    /// The periods of the environments of a group: the latest `most`, oldest first.
    fn periods(&self, group: Group, most: u32) -> Result<Vec<Period>, StoreError>;
    /// An environment by its id, if it has sets or a summary.
    fn environment(&self, id: i64) -> Result<Option<Environment>, StoreError>;
    /// Deletes the environments of an application that have no sets, except the latest `most` of each group that have a summary; and the
    /// oldest ids of deleted sets above [`MAX_GONE`].
    fn forget_environments(&self, app: App, most: u32) -> Result<(), StoreError>;
    /// The evidence of an environment's sets with numbers above `after`: the latest `most`, in order of arrival.
    fn evidence(&self, environment: i64, after: i64, most: u32) -> Result<Vec<Numbered>, StoreError>;
    /// Environments with sets that are not in their summary, if another environment of the group has later sets; at most [`BATCH`].
    fn unsummarized(&self) -> Result<Vec<Environment>, StoreError>;
    /// Stores the evidence of an environment's sets as its summary, which remains after they are deleted.
    fn summarize(&self, environment: &Environment, evidence: &Evidence) -> Result<(), StoreError>;
    /// The summary of an environment.
    fn summary(&self, environment: i64) -> Result<Option<Evidence>, StoreError>;
    /// Stores settings (`NAME=VALUE`) that were advised to a group, and deletes all but the latest `most`.
    fn advise(&self, group: Group, settings: &[String], now: f64, most: u32) -> Result<(), StoreError>;
    /// The settings that were advised to an application on any series, and when they were advised last, epoch seconds.
    fn advised(&self, app: App) -> Result<HashMap<String, f64>, StoreError>;
    /// Stores advice given to a group: as a new entry, of which the latest `most` are kept; or, if it `replaces` one, in place of
    /// the latest entry with the same strategy and settings in force.
    fn note(&self, group: Group, given: &Given, replaces: bool, most: u32) -> Result<(), StoreError>;
    /// The advice given to a group, oldest first.
    fn given(&self, group: Group) -> Result<Vec<Given>, StoreError>;
    /// The numbers of stored applications, sets and samples.
    fn totals(&self) -> Result<Totals, StoreError>;
}

/// Columns of a slot's figures, in both engines' tables.
const FIGURES: &str = "cycles, majors, gc_ms, gc_seconds, c0, c1, c2, c3, c4, c5, c6, c7, c8, c9, rss, slots";

/// SQL that adds a further set to an existing slot. `is` is the slot's table, `most` the engine's function for the maximum.
fn adding(is: &str, most: &str) -> String {
    let mut text = String::new();
    for name in FIGURES.split(", ") {
        // Writing to a string cannot fail.
        let _infallible = match name {
            "rss" | "slots" => write!(text, "{name} = {most}({is}.{name}, excluded.{name}), "),
            _ => write!(text, "{name} = {is}.{name} + excluded.{name}, "),
        };
    }
    text + &format!("sets = {is}.sets + excluded.sets")
}

/// SQL that sums the figures of several slots into one.
fn added_up() -> String {
    let of = |name: &str| match name {
        "rss" | "slots" => format!("max({name})"),
        _ => format!("sum({name})"),
    };
    let sums: Vec<String> = FIGURES.split(", ").map(of).collect();
    sums.join(", ")
}

/// The settings, as [`InForce::key`], of a set that an earlier release stored.
fn in_force_of(evidence: &str, series: Series) -> Result<String, serde_json::Error> {
    #[derive(Deserialize)]
    struct StoredSettings {
        #[serde(default)]
        environment: std::collections::BTreeMap<String, String>,
    }
    let kept: StoredSettings = serde_json::from_str(evidence)?;
    Ok(InForce::of(&kept.environment, series).key())
}

/// Opens the store with this name: `sqlite:PATH`, which is created if it does not exist, or `postgres://…`.
pub fn open(name: &str) -> Result<Box<dyn Store>, StoreError> {
    if is_postgres(name) {
        return Ok(Box::new(Postgres::open(name)?));
    }
    match name.strip_prefix("sqlite:") {
        Some(path) if !path.is_empty() => Ok(Box::new(Sqlite::open(path.as_ref())?)),
        _ => Err(StoreError::Name(shown(name))),
    }
}

/// Opens a store that must exist: a wrong path creates no store.
pub fn open_existing(name: &str) -> Result<Box<dyn Store>, StoreError> {
    if let Some(path) = name.strip_prefix("sqlite:").filter(|path| !path.is_empty())
        && std::fs::symlink_metadata(path).is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound)
    {
        return Err(StoreError::Missing(path.into()));
    }
    open(name)
}

fn is_postgres(name: &str) -> bool {
    ["postgres://", "postgresql://"].iter().any(|scheme| name.starts_with(scheme))
}

/// The name of a store without secrets.
pub(crate) fn shown(name: &str) -> String {
    let Some((scheme, rest)) = name.split_once("://") else { return name.to_owned() };
    // Parameters may contain a password, too.
    let rest = rest.split(['?', '#']).next().unwrap_or_default();
    match rest.rsplit_once('@') {
        None => format!("{scheme}://{rest}"),
        Some((user, place)) => format!("{scheme}://{}@{place}", user.split(':').next().unwrap_or_default()),
    }
}

/// The server's own message, which is only in the source of the library's error.
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

    /// Names of stores are shown without their passwords, and wrong ones give one clear error.
    #[test]
    fn names() {
        for (name, expected) in [
            ("postgres://me:secr@et@db:5432/gc?password=secret", "postgres://me@db:5432/gc"),
            ("postgres://db/gc", "postgres://db/gc"),
            ("sqlite:/a/b", "sqlite:/a/b"),
        ] {
            assert_eq!(shown(name), expected);
        }
        for name in ["", "sqlite:", "mysql://me:secret@db"] {
            let Err(error) = open(name) else { panic!("{name} is not a store") };
            assert!(matches!(error, StoreError::Name(_)) && !error.to_string().contains("secret"), "{error}");
        }
    }
}
