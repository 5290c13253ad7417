//! SQLite: one file, one writer, no server.

use std::{
    collections::{BTreeMap, HashMap},
    fs::{self, File},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use rusqlite::{Connection, OptionalExtension as _, Transaction, TransactionBehavior, params};

use super::{
    App, AppInfo, BATCH, Environment, Given, Group, Inserted, NewApp, NewSet, Numbered, Period, Quota,
    Rights, SetId, Slot, Store, StoreError, Token, TokenHash, Totals,
};
use crate::tune::{Evidence, Series};

mod apps;
mod environments;
#[cfg(test)]
mod late_tests;
mod slots;
mod tables;
#[cfg(test)]
mod tests;

/// Distinguishes our stores from other databases: "gctr".
const APPLICATION_ID: i32 = 0x6763_7472;
/// Timeout for another process that is writing.
const BUSY: Duration = Duration::from_secs(10);

use tables::MIGRATIONS;

/// The first version of the tables in which sets have an environment.
const WITH_ENVIRONMENTS: usize = 4;

/// A store in an SQLite file.
#[derive(Debug)]
pub struct Sqlite {
    path: PathBuf,
    /// Device and inode of the open file.
    identity: (u64, u64),
    writer: Mutex<Connection>,
    reader: Mutex<Connection>,
}

impl Sqlite {
    /// Opens a file, or creates it, readable by its owner only.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let failed = |source| StoreError::File { path: path.to_owned(), source };
        if fs::metadata(path).is_ok_and(|known| !known.is_file()) {
            let what = "is not a regular file".to_owned();
            return Err(StoreError::Foreign { path: path.to_owned(), what });
        }
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            // If it has been replaced by a pipe meanwhile, opening it does not block.
            .custom_flags(rustix::fs::OFlags::NONBLOCK.bits().cast_signed())
            .open(path)
            .map_err(failed)?;
        if file.metadata().map_err(failed)?.len() == 0 {
            // Another user may have created the file, but it is still empty.
            file.set_permissions(fs::Permissions::from_mode(0o600)).map_err(failed)?;
        }
        let identity = identity(&file.metadata().map_err(failed)?);
        // Before SQLite locks the file: closing any descriptor of it would release the locks of the whole process.
        drop(file);
        let mut writer = connect(path).map_err(|error| foreign(path, &error))?;
        // Sums over many rows need temporary files. /tmp may be small or absent: a container may be able to write to its volume only.
        let directory =
            path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let unusable = |error| foreign(path, &error);
        writer.pragma_update(None, "temp_store_directory", directory.to_string_lossy()).map_err(unusable)?;
        migrate(&mut writer, path).map_err(|error| match error {
            StoreError::Sqlite(error) => foreign(path, &error),
            error => error,
        })?;
        // This mode persists in the file, so it is set only once the file is known to be ours.
        writer.pragma_update(None, "journal_mode", "WAL").map_err(unusable)?;
        let reader = connect(path).map_err(unusable)?;
        Ok(Self { path: path.to_owned(), identity, writer: Mutex::new(writer), reader: Mutex::new(reader) })
    }

    /// The lock may be poisoned: a panic elsewhere has rolled its transaction back.
    fn writer(&self) -> Result<MutexGuard<'_, Connection>, StoreError> {
        self.check_in_place()?;
        Ok(self.writer.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn reader(&self) -> Result<MutexGuard<'_, Connection>, StoreError> {
        self.check_in_place()?;
        Ok(self.reader.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Checks that the file is still in place. Data written to a removed file is lost with the last process that has it open, without an error.
    fn check_in_place(&self) -> Result<(), StoreError> {
        let what = match fs::metadata(&self.path) {
            Ok(now) if identity(&now) == self.identity => return Ok(()),
            Ok(_) => "was replaced by another file",
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => "was removed",
            Err(source) => return Err(StoreError::File { path: self.path.clone(), source }),
        };
        let what = format!("{what} while it was in use: new data is not stored; restart gctrace collector");
        Err(StoreError::Foreign { path: self.path.clone(), what })
    }
}

/// Device and inode.
fn identity(file: &fs::Metadata) -> (u64, u64) {
    (file.dev(), file.ino())
}

fn connect(path: &Path) -> Result<Connection, rusqlite::Error> {
    let connection = Connection::open(path)?;
    connection.busy_timeout(BUSY)?;
    // Data is on disk before the answer is sent, so a power failure loses nothing either.
    connection.pragma_update(None, "synchronous", "FULL")?;
    connection.pragma_update(None, "foreign_keys", true)?;
    Ok(connection)
}

/// The error for a file that could not be opened as a store.
fn foreign(path: &Path, error: &rusqlite::Error) -> StoreError {
    let what = match error.sqlite_error_code() {
        Some(rusqlite::ErrorCode::NotADatabase) => "is not an SQLite database".to_owned(),
        Some(rusqlite::ErrorCode::DatabaseCorrupt) => {
            format!("is a damaged SQLite database ({error}): restore a copy, or name another file")
        }
        _ => format!("cannot be used as a store: {error}"),
    };
    StoreError::Foreign { path: path.to_owned(), what }
}

fn migrate(connection: &mut Connection, path: &Path) -> Result<(), StoreError> {
    let refused = |what: String| StoreError::Foreign { path: path.to_owned(), what };
    let transaction = Transaction::new(connection, TransactionBehavior::Immediate)
        .map_err(|error| foreign(path, &error))?;
    let pragma = |name: &str| transaction.pragma_query_value(None, name, |row| row.get::<_, i32>(0));
    let version = usize::try_from(pragma("user_version")?).unwrap_or(usize::MAX);
    let tables: u64 = transaction.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
    if pragma("application_id")? != APPLICATION_ID && tables > 0 {
        return Err(refused("is a database of another program".to_owned()));
    }
    let Some(steps) = MIGRATIONS.get(version..) else {
        return Err(refused(format!("was written by a later gctrace (version {version} of its tables)")));
    };
    for step in steps {
        transaction.execute_batch(step)?;
    }
    if version < WITH_ENVIRONMENTS {
        environments::name_all(&transaction)?;
    }
    transaction.pragma_update(None, "application_id", APPLICATION_ID)?;
    transaction.pragma_update(None, "user_version", MIGRATIONS.len())?;
    Ok(transaction.commit()?)
}

fn group(row: &rusqlite::Row<'_>) -> Result<Group, rusqlite::Error> {
    Ok(Group { app: App(row.get(0)?), series: Series(row.get(1)?, row.get(2)?) })
}

/// Deletes the oldest sets of an application that exceeds its quota, until it no longer does. Returns the number of deleted sets.
fn make_room(
    transaction: &Transaction<'_>,
    app: App,
    quota: Quota,
    sets: u64,
    bytes: u64,
) -> Result<u64, rusqlite::Error> {
    let mut oldest = transaction.prepare_cached(
        "SELECT length(body) + octet_length(evidence) FROM sample_set WHERE app = ?1 ORDER BY number LIMIT ?2",
    )?;
    let mut failed = None;
    // Row by row: an application at its quota loses one set for each new one, so the further sets need not be read.
    let sizes = oldest.query_map(params![app.0, BATCH], |row| row.get::<_, u64>(0))?;
    let sizes = sizes.map_while(|size| size.map_err(|error| failed = Some(error)).ok());
    let most = quota.excess(sets, bytes, sizes);
    if let Some(error) = failed {
        return Err(error);
    }
    let oldest = "SELECT number FROM sample_set WHERE app = ?1 ORDER BY number LIMIT ?2";
    delete(transaction, oldest, &[&app.0, &most])
}

/// Deletes the sets whose numbers a query selects, and subtracts them from the counts of their applications.
fn delete(
    transaction: &Transaction<'_>,
    numbers: &str,
    params: &[&dyn rusqlite::ToSql],
) -> Result<u64, rusqlite::Error> {
    let mut delete = transaction.prepare_cached(&format!(
        "DELETE FROM sample_set WHERE number IN ({numbers}) RETURNING app, length(body) + octet_length(evidence), samples, id, received"
    ))?;
    let mut note = transaction
        .prepare_cached("INSERT OR IGNORE INTO gone (id, app, received) VALUES (unhex(?1), ?2, ?3)")?;
    let mut rows = delete.query(params)?;
    let mut gone: BTreeMap<i64, (u64, u64, u64)> = BTreeMap::new();
    while let Some(row) = rows.next()? {
        let (sets, bytes, samples) = gone.entry(row.get(0)?).or_default();
        *sets += 1;
        *bytes += row.get::<_, u64>(1)?;
        *samples += row.get::<_, u64>(2)?;
        note.execute(params![row.get::<_, String>(3)?, row.get::<_, i64>(0)?, row.get::<_, f64>(4)?])?;
    }
    let mut count = transaction.prepare_cached(
        "UPDATE app SET sets = sets - ?2, bytes = bytes - ?3, samples = samples - ?4 WHERE id = ?1",
    )?;
    for (app, (sets, bytes, samples)) in &gone {
        count.execute(params![app, sets, bytes, samples])?;
    }
    Ok(gone.values().map(|(sets, ..)| sets).sum())
}

impl Store for Sqlite {
    fn register(&self, app: &NewApp<'_>, token: TokenHash, rights: Rights) -> Result<App, StoreError> {
        apps::register(&mut *self.writer()?, app, token, rights)
    }

    fn apps(&self) -> Result<Vec<AppInfo>, StoreError> {
        apps::list(&*self.reader()?)
    }

    fn delete_app(&self, app: App) -> Result<bool, StoreError> {
        apps::delete(&mut *self.writer()?, app)
    }

    fn token(&self, token: TokenHash) -> Result<Option<Token>, StoreError> {
        apps::token(&*self.reader()?, token)
    }

    fn tokens(&self) -> Result<Vec<Token>, StoreError> {
        apps::tokens(&*self.reader()?)
    }

    fn add_token(&self, token: &Token) -> Result<(), StoreError> {
        apps::add_token(&*self.writer()?, token)
    }

    fn end_token(&self, token: TokenHash, at: f64) -> Result<bool, StoreError> {
        apps::end_token(&*self.writer()?, token, at)
    }

    fn insert(&self, set: &NewSet<'_>, quota: Quota) -> Result<Inserted, StoreError> {
        let evidence = serde_json::to_string(set.evidence)?;
        let mut writer = self.writer()?;
        let transaction = Transaction::new(&mut writer, TransactionBehavior::Immediate)?;
        let inserted = {
            let mut gone = transaction.prepare_cached("SELECT 1 FROM gone WHERE id = unhex(?1)")?;
            if gone.exists([set.id.as_str()])? {
                return Ok(Inserted::default());
            }
            let mut insert = transaction.prepare_cached(
                "INSERT INTO sample_set (number, id, app, ruby_major, ruby_minor, received, samples, evidence, body, environment)
                 VALUES (?10, ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9) ON CONFLICT (id) DO NOTHING",
            )?;
            // Summaries say by number which sets they include, so the number of a deleted set must never be reused.
            let mut next = transaction.prepare_cached(
                "UPDATE set_number SET last = max(last, (SELECT coalesce(max(number), 0) FROM sample_set)) + 1 RETURNING last",
            )?;
            let number: i64 = next.query_row([], |row| row.get(0))?;
            let Series(major, minor) = set.group.series;
            let app = set.group.app;
            let environment = environments::id_of(&transaction, set.group, set.in_force, set.received)?;
            let rows = insert.execute(params![
                set.id.as_str(),
                app.0,
                major,
                minor,
                set.received,
                set.evidence.samples,
                evidence,
                set.body,
                environment,
                number
            ])?;
            if rows == 0 {
                return Ok(Inserted::default());
            }
            let mut count = transaction.prepare_cached(
                "UPDATE app SET sets = sets + 1, bytes = bytes + ?2, samples = samples + ?3 WHERE id = ?1 RETURNING sets, bytes",
            )?;
            let size = (set.body.len() + evidence.len()) as u64;
            let (sets, bytes) = count.query_row(params![app.0, size, set.evidence.samples], |row| {
                Ok((row.get(0)?, row.get(1)?))
            })?;
            let deleted = if quota.exceeded(sets, bytes) {
                make_room(&transaction, app, quota, sets, bytes)?
            } else {
                0
            };
            environments::seen_at(&transaction, environment, set.digest.span(set.received))?;
            slots::add(&transaction, set)?;
            Inserted { new: true, deleted }
        };
        transaction.commit()?;
        Ok(inserted)
    }

    fn slots(&self, app: App, since: i64) -> Result<Vec<Slot>, StoreError> {
        slots::list(&*self.reader()?, app, since)
    }

    fn roll_up(&self, app: App, from: i64, before: i64, width: i64) -> Result<u64, StoreError> {
        slots::roll_up(&mut *self.writer()?, app, from, before, width)
    }

    fn prune_slots(&self, before: i64) -> Result<(), StoreError> {
        slots::prune(&mut *self.writer()?, before)
    }

    fn prune(&self, before: f64, app: Option<App>) -> Result<u64, StoreError> {
        let mut writer = self.writer()?;
        let transaction = Transaction::new(&mut writer, TransactionBehavior::Immediate)?;
        let deleted = {
            let oldest = match app {
                None => "SELECT number FROM sample_set WHERE received < ?1 ORDER BY received LIMIT ?3",
                Some(_) => {
                    "SELECT number FROM sample_set WHERE app = ?2 AND received < ?1 ORDER BY number LIMIT ?3"
                }
            };
            let app = app.map(|app| app.0);
            delete(&transaction, oldest, &[&before, &app, &BATCH])?
        };
        transaction.commit()?;
        Ok(deleted)
    }

    fn newest(&self) -> Result<Option<f64>, StoreError> {
        let reader = self.reader()?;
        let mut query = reader.prepare_cached("SELECT max(received) FROM sample_set")?;
        Ok(query.query_row([], |row| row.get(0))?)
    }

    fn group_of(&self, id: &SetId) -> Result<Option<(Group, i64)>, StoreError> {
        let reader = self.reader()?;
        let mut query = reader.prepare_cached(
            "SELECT app, ruby_major, ruby_minor, environment FROM sample_set
             WHERE id = ?1 AND environment IS NOT NULL",
        )?;
        Ok(query.query_row([id.as_str()], |row| Ok((group(row)?, row.get(3)?))).optional()?)
    }

    fn latest_group(&self, app: App) -> Result<Option<Group>, StoreError> {
        let reader = self.reader()?;
        let mut query = reader.prepare_cached(
            "SELECT e.app, e.ruby_major, e.ruby_minor FROM environment e
             JOIN sample_set s ON s.number = (SELECT max(number) FROM sample_set WHERE environment = e.id)
             WHERE e.app = ?1
             ORDER BY coalesce(e.until, s.received) DESC, s.number DESC LIMIT 1",
        )?;
        Ok(query.query_row([app.0], group).optional()?)
    }

    fn environments(&self, group: Group, most: u32) -> Result<Vec<Environment>, StoreError> {
        environments::list(&*self.reader()?, group, most)
    }

    fn periods(&self, group: Group, most: u32) -> Result<Vec<Period>, StoreError> {
        environments::periods(&*self.reader()?, group, most)
    }

    fn evidence(&self, environment: i64, after: i64, most: u32) -> Result<Vec<Numbered>, StoreError> {
        environments::evidence(&*self.reader()?, environment, after, most)
    }

    fn environment(&self, id: i64) -> Result<Option<Environment>, StoreError> {
        environments::find(&*self.reader()?, id)
    }

    fn forget_environments(&self, app: App, most: u32) -> Result<(), StoreError> {
        environments::forget(&*self.writer()?, app, most)
    }

    fn unsummarized(&self) -> Result<Vec<Environment>, StoreError> {
        environments::unsummarized(&*self.reader()?)
    }

    fn summarize(&self, environment: &Environment, evidence: &Evidence) -> Result<(), StoreError> {
        environments::summarize(&*self.writer()?, environment, evidence)
    }

    fn summary(&self, environment: i64) -> Result<Option<Evidence>, StoreError> {
        environments::summary(&*self.reader()?, environment)
    }

    fn advise(&self, group: Group, settings: &[String], now: f64, most: u32) -> Result<(), StoreError> {
        environments::advise(&mut *self.writer()?, group, settings, now, most)
    }

    fn advised(&self, app: App) -> Result<HashMap<String, f64>, StoreError> {
        environments::advised(&*self.reader()?, app)
    }

    fn note(&self, group: Group, given: &Given, replaces: bool, most: u32) -> Result<(), StoreError> {
        environments::note(&mut *self.writer()?, group, given, replaces, most)
    }

    fn given(&self, group: Group) -> Result<Vec<Given>, StoreError> {
        environments::given(&*self.reader()?, group)
    }

    fn totals(&self) -> Result<Totals, StoreError> {
        let reader = self.reader()?;
        let mut query = reader
            .prepare_cached("SELECT count(*), coalesce(sum(sets), 0), coalesce(sum(samples), 0) FROM app")?;
        Ok(query
            .query_row([], |row| Ok(Totals { apps: row.get(0)?, sets: row.get(1)?, samples: row.get(2)? }))?)
    }
}
