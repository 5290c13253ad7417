//! Where sample sets are kept. The server knows this trait only; each engine has its file.

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
    /// Its number in the store, which is never reused.
    pub id: i64,
    /// The settings, as [`InForce::key`].
    pub key: String,
    /// Number of the set that came last.
    pub latest: i64,
    /// When that was, epoch seconds.
    pub seen: f64,
    /// When the first set came, epoch seconds; it may be deleted by now.
    pub first: f64,
    /// Its latest period, by the times in its sets: they may come late, and in any order.
    pub times: Times,
    /// Number of the latest set in its summary, if it has one; the sets may be deleted by now.
    pub summarized: Option<i64>,
}

/// A time of which sets of an environment are, by the times in them. It ends when there are others instead, and none of its own for [`GAP`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Period {
    /// The environment.
    pub environment: i64,
    /// When the first set begins, epoch seconds.
    pub first: f64,
    /// When the last set ends, epoch seconds.
    pub last: f64,
}

/// Most periods of a group that are read; stored ones are those without any longer gap.
const MOST_PERIODS: u32 = 4096;

/// The latest `most` periods. Of the stored ones, those of an environment with nothing else between them are one: which sets lie between
/// is known only when all of them have come, so that is decided anew each time.
fn periods_of(mut stored: Vec<Period>, most: u32) -> Vec<Period> {
    stored.sort_by(|a, b| {
        a.first.total_cmp(&b.first).then(a.last.total_cmp(&b.last)).then(a.environment.cmp(&b.environment))
    });
    let mut all: Vec<Period> = Vec::new();
    // By environment: its latest period, and when it was seen last.
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

/// What was advised to a group under some settings.
#[derive(Clone, Debug, PartialEq)]
pub struct Given {
    /// The strategy.
    pub strategy: Strategy,
    /// The settings in force, as [`InForce::key`].
    pub in_force: String,
    /// The advised settings; the same as `in_force`: no change.
    pub settings: String,
    /// Whether the advice was to take back the last change.
    pub withdrawal: bool,
    /// When it was given first, epoch seconds.
    pub first: f64,
    /// When it was given last, epoch seconds.
    pub last: f64,
}

/// The number of a set in the order of arrival, and its evidence.
pub type Numbered = (i64, Evidence);

/// Name of a set: SHA-256 of its body, in hexadecimal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetId(String);

impl SetId {
    /// The name of a set with this hash.
    pub fn of(hash: &[u8; 32]) -> Self {
        Self(hex(hash))
    }

    /// The name in a text; `None` if it is not valid.
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

/// A set to keep.
#[derive(Debug)]
pub struct NewSet<'a> {
    /// Its name.
    pub id: &'a SetId,
    /// The group that it belongs to.
    pub group: Group,
    /// Its settings, as [`InForce::key`].
    pub in_force: &'a str,
    /// When it came, epoch seconds.
    pub received: f64,
    /// Its evidence.
    pub evidence: &'a Evidence,
    /// What pages show of it.
    pub digest: &'a Digest,
    /// The set itself without its token, gzip.
    pub body: &'a [u8],
}

/// How much of an application is kept at most. Beyond that its oldest sets are deleted: the latest ones are the most useful.
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

    /// How many of the oldest sets, of these sizes, must be deleted so that `sets` sets of `bytes` bytes fit. The latest one stays.
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
    /// False if it was kept already, also if it was deleted since and is still in the figures.
    pub new: bool,
    /// Older sets of the application that were deleted because of its [`Quota`].
    pub deleted: u64,
}

/// Most sets that are deleted at a time, so that others do not wait for long.
pub const BATCH: u32 = 500;

/// Most ids of deleted sets of an application that are kept: one that is sent again is still in its figures.
pub const MAX_GONE: u32 = 200_000;

/// Most slots of an application that are kept and read: some 500 processes that send for 30 days (see [`Store::roll_up`]).
pub const MAX_SLOTS: u32 = 200_000;

/// Ten minutes of a process; older ones are hours.
#[derive(Clone, Debug, PartialEq)]
pub struct Slot {
    /// When they began, epoch seconds.
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

/// An application to keep.
#[derive(Clone, Copy, Debug)]
pub struct NewApp<'a> {
    /// Its name: any text.
    pub name: &'a str,
    /// A contact address: any text.
    pub email: &'a str,
    /// The application that it is a part of, which must not be a part itself.
    pub parent: Option<App>,
    /// When, epoch seconds.
    pub created: f64,
}

/// Most bytes of a name or an address from outside.
pub const MAX_FIELD: usize = 254;

/// Whether a new name or address can be kept: one line that is not blank and not too long. Earlier releases kept others.
pub fn is_field(text: &str) -> bool {
    !text.trim().is_empty() && text.len() <= MAX_FIELD && !text.chars().any(char::is_control)
}

/// An application and what is kept of it.
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
    /// When, epoch seconds.
    pub created: f64,
    /// Sets that are kept.
    pub sets: u64,
    /// Bytes of their bodies and figures.
    pub bytes: u64,
    /// When the latest of them came, epoch seconds.
    pub last: Option<f64>,
}

impl AppInfo {
    /// Its name, after that of the application that it is a part of, if that is one of these.
    pub fn title(&self, all: &[Self]) -> String {
        let whole = self.parent.and_then(|parent| all.iter().find(|other| other.app == parent));
        whole.map_or_else(|| self.name.clone(), |whole| format!("{} / {}", whole.name, self.name))
    }

    /// The sort order in which parts follow their applications.
    pub fn order(&self) -> (i64, i64) {
        (self.parent.unwrap_or(self.app).0, self.app.0)
    }
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
    /// The name of the store matches no engine.
    #[error("`{0}` is not a store; give sqlite:PATH or postgres://USER@HOST/DATABASE")]
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
    /// There is no such file, and it is not to be made.
    #[error("{}: no such store; gctrace collector or gctrace apps add creates it", .0.display())]
    Missing(PathBuf),
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
    /// The certificates that the host trusts cannot be read.
    #[error("the store: reading the certificates that this host trusts: {0}")]
    Tls(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A token cannot be made.
    #[error("no token can be made: the system returned no random numbers")]
    Random,
    /// What is no name of an application.
    #[error("the name of an application is one line of 1 to {MAX_FIELD} bytes that is not blank")]
    AppName,
    /// What is no address of a person.
    #[error("an address is one line of at most {MAX_FIELD} bytes")]
    Address,
    /// Parts have no parts.
    #[error("application {} is a part of another one: it cannot have parts", .0.0)]
    Part(App),
    /// What was kept cannot be read.
    #[error("the stored evidence of a set cannot be read: {0}")]
    Evidence(#[from] serde_json::Error),
}

/// Where applications and their sets are kept. All methods may block.
pub trait Store: Send + Sync {
    /// Keeps a new application with its first token.
    fn register(&self, app: &NewApp<'_>, token: TokenHash, rights: Rights) -> Result<App, StoreError>;
    /// All applications, the oldest first.
    fn apps(&self) -> Result<Vec<AppInfo>, StoreError>;
    /// Deletes an application with its parts, all of their tokens and all of their sets; false if it is not there.
    fn delete_app(&self, app: App) -> Result<bool, StoreError>;
    /// What is kept of a token, also after its end.
    fn token(&self, token: TokenHash) -> Result<Option<Token>, StoreError>;
    /// All tokens, the oldest first.
    fn tokens(&self) -> Result<Vec<Token>, StoreError>;
    /// Keeps a new token.
    fn add_token(&self, token: &Token) -> Result<(), StoreError>;
    /// Lets a token end at this time (epoch seconds), or earlier if it would. False if it is not there.
    fn end_token(&self, token: TokenHash, at: f64) -> Result<bool, StoreError>;
    /// Keeps a set, safe from crashes once this returns.
    fn insert(&self, set: &NewSet<'_>, quota: Quota) -> Result<Inserted, StoreError>;
    /// The slots of an application since then (epoch seconds), the latest first; at most [`MAX_SLOTS`].
    fn slots(&self, app: App, since: i64) -> Result<Vec<Slot>, StoreError>;
    /// Adds the slots of an application in `from..before` (epoch seconds) up to slots that begin at multiples of `width` seconds.
    /// Repeating it changes nothing. Returns by how many the slots were reduced.
    fn roll_up(&self, app: App, from: i64, before: i64, width: i64) -> Result<u64, StoreError>;
    /// Deletes the slots, the ids of deleted sets, and the summaries and periods of environments, of all applications before then (epoch seconds).
    fn prune_slots(&self, before: i64) -> Result<(), StoreError>;
    /// Deletes the oldest sets that came before this time (epoch seconds), of one application or of all; at most [`BATCH`]
    /// of them. Returns how many.
    fn prune(&self, before: f64, app: Option<App>) -> Result<u64, StoreError>;
    /// The group of a set, and the number of its environment.
    fn group_of(&self, id: &SetId) -> Result<Option<(Group, i64)>, StoreError>;
    /// The group of an application's latest set, by the times in its sets.
    fn latest_group(&self, app: App) -> Result<Option<Group>, StoreError>;
    /// The environments of a group that have sets or a summary, at most `most`; that of the latest set is first, by the
    /// times in the sets.
    fn environments(&self, group: Group, most: u32) -> Result<Vec<Environment>, StoreError>;
    /// The periods of the environments of a group: the latest `most`, the earliest first.
    fn periods(&self, group: Group, most: u32) -> Result<Vec<Period>, StoreError>;
    /// An environment that has sets or a summary.
    fn environment(&self, id: i64) -> Result<Option<Environment>, StoreError>;
    /// Deletes the environments of an application that have no sets, but for the latest `most` of each group that have a summary; and the
    /// oldest ids of deleted sets beyond [`MAX_GONE`].
    fn forget_environments(&self, app: App, most: u32) -> Result<(), StoreError>;
    /// The evidence of the sets of an environment after a number: the latest `most`, in the order of arrival.
    fn evidence(&self, environment: i64, after: i64, most: u32) -> Result<Vec<Numbered>, StoreError>;
    /// Environments with sets that are not in their summary, and with later sets of others in their group; at most [`BATCH`].
    fn unsummarized(&self) -> Result<Vec<Environment>, StoreError>;
    /// Keeps the evidence of an environment's sets, for the time after they are deleted.
    fn summarize(&self, environment: &Environment, evidence: &Evidence) -> Result<(), StoreError>;
    /// The evidence kept of an environment.
    fn summary(&self, environment: i64) -> Result<Option<Evidence>, StoreError>;
    /// Keeps settings (`NAME=VALUE`) that were advised to a group, and drops all but the latest `most`.
    fn advise(&self, group: Group, settings: &[String], now: f64, most: u32) -> Result<(), StoreError>;
    /// The settings that were advised to a group.
    fn advised(&self, group: Group) -> Result<Vec<String>, StoreError>;
    /// Keeps advice given to a group: as a new entry, of which the latest `most` are kept; or, if it `replaces` one, in place of
    /// the latest entry with the same strategy and settings in force.
    fn note(&self, group: Group, given: &Given, replaces: bool, most: u32) -> Result<(), StoreError>;
    /// The advice given to a group, the earliest first.
    fn given(&self, group: Group) -> Result<Vec<Given>, StoreError>;
    /// What there is.
    fn totals(&self) -> Result<Totals, StoreError>;
}

/// Columns of a slot, in both engines' tables.
const FIGURES: &str = "cycles, majors, gc_ms, gc_seconds, c0, c1, c2, c3, c4, c5, c6, c7, c8, c9, rss, slots";

/// How a further set changes an existing slot; `is`: its table.
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

/// The numbers of several slots as those of one.
fn added_up() -> String {
    let of = |name: &str| match name {
        "rss" | "slots" => format!("max({name})"),
        _ => format!("sum({name})"),
    };
    let sums: Vec<String> = FIGURES.split(", ").map(of).collect();
    sums.join(", ")
}

/// The settings of a set that was kept by an earlier release.
fn in_force_of(evidence: &str, series: Series) -> Result<String, serde_json::Error> {
    #[derive(Deserialize)]
    struct StoredSettings {
        #[serde(default)]
        environment: std::collections::BTreeMap<String, String>,
    }
    let kept: StoredSettings = serde_json::from_str(evidence)?;
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

/// The same of a store that must be there: a wrong path makes no store.
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
    // Parameters may hold a password, too.
    let rest = rest.split(['?', '#']).next().unwrap_or_default();
    match rest.rsplit_once('@') {
        None => format!("{scheme}://{rest}"),
        Some((user, place)) => format!("{scheme}://{}@{place}", user.split(':').next().unwrap_or_default()),
    }
}

/// PostgreSQL's own message, which is only in the sources of its library's errors.
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
