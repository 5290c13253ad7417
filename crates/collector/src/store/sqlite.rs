//! SQLite: one file, one writer, no server.

use std::{
    fs::{self, File},
    os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _},
    path::Path,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use rusqlite::{Connection, OptionalExtension as _, Transaction, TransactionBehavior, params};

use super::{App, Group, NewSet, SetId, Store, StoreError, TokenHash, Totals};
use crate::tune::{Evidence, Series};

/// Tells a store of ours from other databases: "gctr".
const APPLICATION_ID: i32 = 0x6763_7472;
/// For another process that writes.
const BUSY: Duration = Duration::from_secs(10);

/// Steps from each version of the tables to the next one; a step that was released is never changed.
const MIGRATIONS: [&str; 1] = ["
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
"];

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
    transaction.pragma_update(None, "application_id", APPLICATION_ID)?;
    transaction.pragma_update(None, "user_version", MIGRATIONS.len())?;
    Ok(transaction.commit()?)
}

fn group(row: &rusqlite::Row<'_>) -> Result<Group, rusqlite::Error> {
    Ok(Group { app: App(row.get(0)?), series: Series(row.get(1)?, row.get(2)?) })
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

    fn insert(&self, set: &NewSet<'_>) -> Result<bool, StoreError> {
        let evidence = serde_json::to_string(set.evidence)?;
        let writer = self.writer();
        let mut insert = writer.prepare_cached(
            "INSERT INTO sample_set (id, app, ruby_major, ruby_minor, received, samples, evidence, body)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8) ON CONFLICT (id) DO NOTHING",
        )?;
        let Series(major, minor) = set.group.series;
        let rows = insert.execute(params![
            set.id.as_str(),
            set.group.app.0,
            major,
            minor,
            set.received,
            set.evidence.samples,
            evidence,
            set.body
        ])?;
        Ok(rows == 1)
    }

    fn group_of(&self, id: &SetId) -> Result<Option<Group>, StoreError> {
        let reader = self.reader();
        let mut query =
            reader.prepare_cached("SELECT app, ruby_major, ruby_minor FROM sample_set WHERE id = ?1")?;
        Ok(query.query_row([id.as_str()], group).optional()?)
    }

    fn latest_group(&self, app: App) -> Result<Option<Group>, StoreError> {
        let reader = self.reader();
        let mut query = reader.prepare_cached(
            "SELECT app, ruby_major, ruby_minor FROM sample_set WHERE app = ?1 ORDER BY number DESC LIMIT 1",
        )?;
        Ok(query.query_row([app.0], group).optional()?)
    }

    fn evidence(&self, group: Group, sets: u32) -> Result<Evidence, StoreError> {
        let reader = self.reader();
        let mut query = reader.prepare_cached(
            "SELECT evidence FROM (
                 SELECT number, evidence FROM sample_set
                 WHERE app = ?1 AND ruby_major = ?2 AND ruby_minor = ?3 ORDER BY number DESC LIMIT ?4
             ) ORDER BY number",
        )?;
        let Series(major, minor) = group.series;
        let mut rows = query.query(params![group.app.0, major, minor, sets])?;
        let mut sum = Evidence::default();
        while let Some(row) = rows.next()? {
            sum.merge(&serde_json::from_str(row.get_ref(0)?.as_str().map_err(rusqlite::Error::from)?)?);
        }
        Ok(sum)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn store() -> (tempfile::TempDir, std::path::PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sets.db");
        (dir, path)
    }

    /// What is put in comes out, after reopening as well; the same set is kept once; groups are kept apart.
    #[test]
    fn keeps() {
        let (_dir, path) = store();
        let token = TokenHash::of("secret' OR 1=1 --");
        let id = |byte: u8| SetId::of(&[byte; 32]);
        {
            let store = Sqlite::open(&path).unwrap();
            assert_eq!(store.app(token).unwrap(), None);
            store.register(token, "a@b'); DROP TABLE app; --", "shop", 1.0).unwrap();
            assert!(store.register(token, "again", "again", 1.0).is_err());
            let app = store.app(token).unwrap().unwrap();
            assert_eq!(store.latest_group(app).unwrap(), None);
            for (byte, series) in [(1, Series(3, 3)), (2, Series(3, 4)), (3, Series(3, 4))] {
                let evidence = Evidence { sets: 1, samples: 10, ..Evidence::default() };
                let (id, group) = (id(byte), Group { app, series });
                let set = NewSet { id: &id, group, received: 2.0, evidence: &evidence, body: b"body" };
                assert!(store.insert(&set).unwrap());
                assert!(!store.insert(&set).unwrap());
            }
        }
        let store = Sqlite::open(&path).unwrap();
        let app = store.app(token).unwrap().unwrap();
        let group = Group { app, series: Series(3, 4) };
        assert_eq!(store.latest_group(app).unwrap(), Some(group));
        assert_eq!(store.group_of(&id(1)).unwrap().unwrap().series, Series(3, 3));
        assert_eq!(store.group_of(&id(9)).unwrap(), None);
        assert_eq!(store.evidence(group, 100).unwrap().sets, 2);
        assert_eq!(store.evidence(group, 1).unwrap().sets, 1);
        assert_eq!(store.totals().unwrap(), Totals { apps: 1, sets: 3, samples: 30 });
        let mode = std::os::unix::fs::MetadataExt::mode(&fs::metadata(&path).unwrap());
        assert_eq!(mode & 0o777, 0o600);
    }

    /// Files of somebody else, and of the future, are refused and left as they are.
    #[test]
    fn foreign_files() {
        let (dir, path) = store();
        fs::write(&path, "not a database, but long enough to be taken for one".repeat(100)).unwrap();
        let error = Sqlite::open(&path).unwrap_err().to_string();
        assert!(error.ends_with("is no SQLite database"), "{error}");
        let other = dir.path().join("other.db");
        Connection::open(&other).unwrap().execute_batch("CREATE TABLE theirs (x)").unwrap();
        let error = Sqlite::open(&other).unwrap_err().to_string();
        assert!(error.ends_with("is a database of another program"), "{error}");
        let later = dir.path().join("later.db");
        drop(Sqlite::open(&later).unwrap());
        Connection::open(&later).unwrap().pragma_update(None, "user_version", 99).unwrap();
        assert!(Sqlite::open(&later).unwrap_err().to_string().contains("later gctrace"));
        assert!(Sqlite::open(&dir.path().join("no/sets.db")).is_err());
        let fifo = dir.path().join("pipe.db");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let error = Sqlite::open(&fifo).unwrap_err().to_string();
        assert!(error.ends_with("is not a regular file"), "{error}");
        let empty = dir.path().join("empty.db");
        fs::write(&empty, "").unwrap();
        fs::set_permissions(&empty, fs::Permissions::from_mode(0o644)).unwrap();
        drop(Sqlite::open(&empty).unwrap());
        assert_eq!(fs::metadata(&empty).unwrap().permissions().mode() & 0o777, 0o600);
        for name in ["sets.db", "sqlite:", "mysql://x"] {
            assert!(matches!(super::super::open(name), Err(StoreError::Name(_))), "{name}");
        }
    }
}
