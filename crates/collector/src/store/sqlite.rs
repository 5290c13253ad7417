//! SQLite: one file, one writer, no server.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _},
    path::Path,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use rusqlite::{Connection, OptionalExtension as _, Transaction, TransactionBehavior, params};

use super::{
    App, AppInfo, BATCH, Environment, FIGURES, Group, Inserted, MAX_SLOTS, NewSet, Numbered, Quota, SetId,
    Slot, Store, StoreError, TokenHash, Totals, adding,
};
use crate::{
    digest::{CLASSES, Figures},
    tune::Series,
};

mod environments;
#[cfg(test)]
mod tests;

/// Tells a store of ours from other databases: "gctr".
const APPLICATION_ID: i32 = 0x6763_7472;
/// For another process that writes.
const BUSY: Duration = Duration::from_secs(10);

/// Steps from each version of the tables to the next one; a step that was released is never changed.
const MIGRATIONS: [&str; 4] = [
    "
    CREATE TABLE app (
        id INTEGER PRIMARY KEY,
        token_hash BLOB NOT NULL UNIQUE,
        email TEXT NOT NULL,
        name TEXT NOT NULL,
        created REAL NOT NULL
    ) STRICT;
    CREATE TABLE sample_set (
        number INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        app INTEGER NOT NULL REFERENCES app (id),
        ruby_major INTEGER NOT NULL,
        ruby_minor INTEGER NOT NULL,
        received REAL NOT NULL,
        samples INTEGER NOT NULL,
        evidence TEXT NOT NULL,
        body BLOB NOT NULL
    ) STRICT;
    CREATE INDEX sample_set_group ON sample_set (app, ruby_major, ruby_minor, number, samples);
",
    "
    ALTER TABLE app ADD COLUMN sets INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE app ADD COLUMN bytes INTEGER NOT NULL DEFAULT 0;
    UPDATE app SET
        sets = (SELECT count(*) FROM sample_set WHERE sample_set.app = app.id),
        bytes = (SELECT coalesce(sum(length(body) + octet_length(evidence)), 0) FROM sample_set WHERE sample_set.app = app.id);
    CREATE INDEX sample_set_app ON sample_set (app, number);
    CREATE INDEX sample_set_received ON sample_set (received);
",
    "
    ALTER TABLE app ADD COLUMN slots INTEGER NOT NULL DEFAULT 0;
    CREATE TABLE slot (
        app INTEGER NOT NULL REFERENCES app (id),
        at INTEGER NOT NULL,
        ruby_major INTEGER NOT NULL,
        ruby_minor INTEGER NOT NULL,
        environment TEXT NOT NULL,
        host TEXT NOT NULL,
        pid INTEGER NOT NULL,
        sets INTEGER NOT NULL,
        cycles INTEGER NOT NULL,
        majors INTEGER NOT NULL,
        gc_ms INTEGER NOT NULL,
        gc_seconds REAL NOT NULL,
        c0 INTEGER NOT NULL, c1 INTEGER NOT NULL, c2 INTEGER NOT NULL, c3 INTEGER NOT NULL, c4 INTEGER NOT NULL,
        c5 INTEGER NOT NULL, c6 INTEGER NOT NULL, c7 INTEGER NOT NULL, c8 INTEGER NOT NULL, c9 INTEGER NOT NULL,
        rss INTEGER NOT NULL,
        slots INTEGER NOT NULL,
        PRIMARY KEY (app, at, ruby_major, ruby_minor, environment, host, pid)
    ) STRICT, WITHOUT ROWID;
",
    "
    CREATE TABLE environment (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        app INTEGER NOT NULL REFERENCES app (id) ON DELETE CASCADE,
        ruby_major INTEGER NOT NULL,
        ruby_minor INTEGER NOT NULL,
        in_force TEXT NOT NULL,
        UNIQUE (app, ruby_major, ruby_minor, in_force)
    ) STRICT;
    ALTER TABLE sample_set ADD COLUMN environment INTEGER;
    CREATE INDEX sample_set_environment ON sample_set (environment, number);
    CREATE TABLE advised (
        app INTEGER NOT NULL REFERENCES app (id) ON DELETE CASCADE,
        ruby_major INTEGER NOT NULL,
        ruby_minor INTEGER NOT NULL,
        setting TEXT NOT NULL,
        given REAL NOT NULL,
        PRIMARY KEY (app, ruby_major, ruby_minor, setting)
    ) STRICT, WITHOUT ROWID;
",
];

/// The version from which on sets have their environment.
const WITH_ENVIRONMENTS: usize = 4;

/// A store in an SQLite file.
#[derive(Debug)]
pub struct Sqlite {
    writer: Mutex<Connection>,
    reader: Mutex<Connection>,
}

impl Sqlite {
    /// Opens a file, or makes it, readable by its owner only.
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
            // Should it have become a pipe by now, opening it does not wait.
            .custom_flags(rustix::fs::OFlags::NONBLOCK.bits().cast_signed())
            .open(path)
            .map_err(failed)?;
        if file.metadata().map_err(failed)?.len() == 0 {
            // Somebody has made the file, but there is nothing of theirs in it yet.
            file.set_permissions(fs::Permissions::from_mode(0o600)).map_err(failed)?;
        }
        let mut writer = connect(path).map_err(|error| foreign(path, error))?;
        migrate(&mut writer, path)?;
        let reader = connect(path)?;
        Ok(Self { writer: Mutex::new(writer), reader: Mutex::new(reader) })
    }

    /// A panic elsewhere rolled its transaction back.
    fn writer(&self) -> MutexGuard<'_, Connection> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reader(&self) -> MutexGuard<'_, Connection> {
        self.reader.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn connect(path: &Path) -> Result<Connection, rusqlite::Error> {
    let connection = Connection::open(path)?;
    connection.busy_timeout(BUSY)?;
    connection.pragma_update(None, "journal_mode", "WAL")?;
    // On the disk before the answer goes out: a power failure loses nothing either.
    connection.pragma_update(None, "synchronous", "FULL")?;
    connection.pragma_update(None, "foreign_keys", true)?;
    Ok(connection)
}

fn foreign(path: &Path, error: rusqlite::Error) -> StoreError {
    match error.sqlite_error_code() {
        Some(rusqlite::ErrorCode::NotADatabase) => {
            StoreError::Foreign { path: path.to_owned(), what: "is no SQLite database".to_owned() }
        }
        _ => error.into(),
    }
}

fn migrate(connection: &mut Connection, path: &Path) -> Result<(), StoreError> {
    let foreign = |what: String| StoreError::Foreign { path: path.to_owned(), what };
    let transaction = Transaction::new(connection, TransactionBehavior::Immediate)?;
    let pragma = |name: &str| transaction.pragma_query_value(None, name, |row| row.get::<_, i32>(0));
    let version = usize::try_from(pragma("user_version")?).unwrap_or(usize::MAX);
    let tables: u64 = transaction.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
    if pragma("application_id")? != APPLICATION_ID && tables > 0 {
        return Err(foreign("is a database of another program".to_owned()));
    }
    let Some(steps) = MIGRATIONS.get(version..) else {
        return Err(foreign(format!("was written by a later gctrace (version {version} of its tables)")));
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

/// Adds the figures of a set to its ten minutes; an application that has too many of them loses its oldest ones.
fn add_to_slot(transaction: &Transaction<'_>, set: &NewSet<'_>) -> Result<(), rusqlite::Error> {
    let (digest, figures) = (set.digest, &set.digest.figures);
    let mut add = transaction.prepare_cached(&format!(
        "INSERT INTO slot (app, at, ruby_major, ruby_minor, environment, host, pid, sets, {FIGURES})
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, 1, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19, ?20, ?21, ?22, ?23)
         ON CONFLICT DO UPDATE SET {} RETURNING sets",
        adding("slot", "max")
    ))?;
    let (Group { app, series: Series(major, minor) }, c) = (set.group, figures.classes);
    let at = digest.slot(set.received);
    let sets: u64 = add.query_row(
        params![
            app.0,
            at,
            major,
            minor,
            digest.environment,
            digest.host,
            digest.pid,
            figures.cycles,
            figures.majors,
            figures.gc_ms,
            figures.gc_seconds,
            c[0],
            c[1],
            c[2],
            c[3],
            c[4],
            c[5],
            c[6],
            c[7],
            c[8],
            c[9],
            figures.rss,
            figures.slots
        ],
        |row| row.get(0),
    )?;
    if sets > 1 {
        return Ok(());
    }
    let mut count =
        transaction.prepare_cached("UPDATE app SET slots = slots + 1 WHERE id = ?1 RETURNING slots")?;
    let slots: u32 = count.query_row([app.0], |row| row.get(0))?;
    if slots > MAX_SLOTS {
        let mut delete = transaction.prepare_cached(
            "DELETE FROM slot WHERE app = ?1 AND at <= (SELECT at FROM slot WHERE app = ?1 ORDER BY at LIMIT 1 OFFSET ?2)",
        )?;
        let deleted = delete.execute(params![app.0, BATCH])?;
        let mut count = transaction.prepare_cached("UPDATE app SET slots = slots - ?2 WHERE id = ?1")?;
        count.execute(params![app.0, deleted])?;
    }
    Ok(())
}

/// Deletes the oldest sets of an application until it is within its quota, which it is not. Returns how many.
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
    let sizes =
        oldest.query_map(params![app.0, BATCH], |row| row.get(0))?.collect::<Result<Vec<u64>, _>>()?;
    let most = quota.excess(sets, bytes, sizes);
    let oldest = "SELECT number FROM sample_set WHERE app = ?1 ORDER BY number LIMIT ?2";
    delete(transaction, oldest, &[&app.0, &most])
}

/// Deletes the sets of which a query gives the numbers, and takes them off the counts of their applications.
fn delete(
    transaction: &Transaction<'_>,
    numbers: &str,
    params: &[&dyn rusqlite::ToSql],
) -> Result<u64, rusqlite::Error> {
    let mut delete = transaction.prepare_cached(&format!(
        "DELETE FROM sample_set WHERE number IN ({numbers}) RETURNING app, length(body) + octet_length(evidence)"
    ))?;
    let mut rows = delete.query(params)?;
    let mut gone: BTreeMap<i64, (u64, u64)> = BTreeMap::new();
    while let Some(row) = rows.next()? {
        let (sets, bytes) = gone.entry(row.get(0)?).or_default();
        *sets += 1;
        *bytes += row.get::<_, u64>(1)?;
    }
    let mut count =
        transaction.prepare_cached("UPDATE app SET sets = sets - ?2, bytes = bytes - ?3 WHERE id = ?1")?;
    for (app, (sets, bytes)) in &gone {
        count.execute(params![app, sets, bytes])?;
    }
    Ok(gone.values().map(|(sets, _)| sets).sum())
}

impl Store for Sqlite {
    fn register(&self, token: TokenHash, email: &str, name: &str, now: f64) -> Result<(), StoreError> {
        self.writer().execute(
            "INSERT INTO app (token_hash, email, name, created) VALUES (?1, ?2, ?3, ?4)",
            params![token.0, email, name, now],
        )?;
        Ok(())
    }

    fn app(&self, token: TokenHash) -> Result<Option<App>, StoreError> {
        let reader = self.reader();
        let mut query = reader.prepare_cached("SELECT id FROM app WHERE token_hash = ?1")?;
        Ok(query.query_row([token.0], |row| Ok(App(row.get(0)?))).optional()?)
    }

    fn apps(&self) -> Result<Vec<AppInfo>, StoreError> {
        let reader = self.reader();
        let mut query = reader.prepare_cached(
            "SELECT id, name, email, created, sets, bytes,
                 (SELECT received FROM sample_set WHERE app = app.id ORDER BY number DESC LIMIT 1)
             FROM app ORDER BY id",
        )?;
        let apps = query.query_map([], |row| {
            Ok(AppInfo {
                app: App(row.get(0)?),
                name: row.get(1)?,
                email: row.get(2)?,
                created: row.get(3)?,
                sets: row.get(4)?,
                bytes: row.get(5)?,
                last: row.get(6)?,
            })
        })?;
        Ok(apps.collect::<Result<_, _>>()?)
    }

    fn delete_app(&self, app: App) -> Result<bool, StoreError> {
        let mut writer = self.writer();
        let transaction = Transaction::new(&mut writer, TransactionBehavior::Immediate)?;
        transaction.execute("DELETE FROM sample_set WHERE app = ?1", [app.0])?;
        transaction.execute("DELETE FROM slot WHERE app = ?1", [app.0])?;
        let rows = transaction.execute("DELETE FROM app WHERE id = ?1", [app.0])?;
        transaction.commit()?;
        Ok(rows == 1)
    }

    fn insert(&self, set: &NewSet<'_>, quota: Quota) -> Result<Inserted, StoreError> {
        let evidence = serde_json::to_string(set.evidence)?;
        let mut writer = self.writer();
        let transaction = Transaction::new(&mut writer, TransactionBehavior::Immediate)?;
        let inserted = {
            let mut insert = transaction.prepare_cached(
                "INSERT INTO sample_set (id, app, ruby_major, ruby_minor, received, samples, evidence, body, environment)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9) ON CONFLICT (id) DO NOTHING",
            )?;
            let Series(major, minor) = set.group.series;
            let app = set.group.app;
            let rows = insert.execute(params![
                set.id.as_str(),
                app.0,
                major,
                minor,
                set.received,
                set.evidence.samples,
                evidence,
                set.body,
                environments::id_of(&transaction, set.group, set.in_force)?
            ])?;
            if rows == 0 {
                return Ok(Inserted::default());
            }
            let mut count = transaction.prepare_cached(
                "UPDATE app SET sets = sets + 1, bytes = bytes + ?2 WHERE id = ?1 RETURNING sets, bytes",
            )?;
            let size = (set.body.len() + evidence.len()) as u64;
            let (sets, bytes) =
                count.query_row(params![app.0, size], |row| Ok((row.get(0)?, row.get(1)?)))?;
            let deleted = if quota.exceeded(sets, bytes) {
                make_room(&transaction, app, quota, sets, bytes)?
            } else {
                0
            };
            add_to_slot(&transaction, set)?;
            Inserted { new: true, deleted }
        };
        transaction.commit()?;
        Ok(inserted)
    }

    fn slots(&self, app: App, since: i64) -> Result<Vec<Slot>, StoreError> {
        let reader = self.reader();
        let mut query = reader.prepare_cached(&format!(
            "SELECT at, ruby_major, ruby_minor, environment, host, pid, {FIGURES} FROM slot
             WHERE app = ?1 AND at >= ?2 ORDER BY at DESC LIMIT ?3"
        ))?;
        let slots = query.query_map(params![app.0, since, MAX_SLOTS], |row| {
            let mut classes = [0; CLASSES];
            for (at, class) in classes.iter_mut().enumerate() {
                *class = row.get(10 + at)?;
            }
            Ok(Slot {
                at: row.get(0)?,
                series: Series(row.get(1)?, row.get(2)?),
                environment: row.get(3)?,
                host: row.get(4)?,
                pid: row.get(5)?,
                figures: Figures {
                    cycles: row.get(6)?,
                    majors: row.get(7)?,
                    gc_ms: row.get(8)?,
                    gc_seconds: row.get(9)?,
                    classes,
                    rss: row.get(20)?,
                    slots: row.get(21)?,
                },
            })
        })?;
        Ok(slots.collect::<Result<_, _>>()?)
    }

    fn prune_slots(&self, before: i64) -> Result<(), StoreError> {
        let mut writer = self.writer();
        let transaction = Transaction::new(&mut writer, TransactionBehavior::Immediate)?;
        transaction.execute("DELETE FROM slot WHERE app IN (SELECT id FROM app) AND at < ?1", [before])?;
        transaction
            .execute("UPDATE app SET slots = (SELECT count(*) FROM slot WHERE slot.app = app.id)", [])?;
        Ok(transaction.commit()?)
    }

    fn prune(&self, before: f64, app: Option<App>) -> Result<u64, StoreError> {
        let mut writer = self.writer();
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

    fn group_of(&self, id: &SetId) -> Result<Option<(Group, i64)>, StoreError> {
        let reader = self.reader();
        let mut query = reader.prepare_cached(
            "SELECT app, ruby_major, ruby_minor, environment FROM sample_set WHERE id = ?1",
        )?;
        Ok(query.query_row([id.as_str()], |row| Ok((group(row)?, row.get(3)?))).optional()?)
    }

    fn latest_group(&self, app: App) -> Result<Option<Group>, StoreError> {
        let reader = self.reader();
        let mut query = reader.prepare_cached(
            "SELECT app, ruby_major, ruby_minor FROM sample_set WHERE app = ?1 ORDER BY number DESC LIMIT 1",
        )?;
        Ok(query.query_row([app.0], group).optional()?)
    }

    fn environments(&self, group: Group, most: u32) -> Result<Vec<Environment>, StoreError> {
        environments::list(&self.reader(), group, most)
    }

    fn evidence(&self, environment: i64, after: i64, most: u32) -> Result<Vec<Numbered>, StoreError> {
        environments::evidence(&self.reader(), environment, after, most)
    }

    fn advise(&self, group: Group, settings: &[String], now: f64, most: u32) -> Result<(), StoreError> {
        environments::advise(&mut self.writer(), group, settings, now, most)
    }

    fn advised(&self, group: Group) -> Result<Vec<String>, StoreError> {
        environments::advised(&self.reader(), group)
    }

    fn totals(&self) -> Result<Totals, StoreError> {
        let reader = self.reader();
        let mut query = reader.prepare_cached(
            "SELECT (SELECT count(*) FROM app), count(*), coalesce(sum(samples), 0) FROM sample_set",
        )?;
        Ok(query
            .query_row([], |row| Ok(Totals { apps: row.get(0)?, sets: row.get(1)?, samples: row.get(2)? }))?)
    }
}
