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
    App, AppInfo, BATCH, Group, Inserted, NewSet, Quota, SetId, Store, StoreError, TokenHash, Totals,
};
use crate::tune::{Evidence, Series};

/// Tells a store of ours from other databases: "gctr".
const APPLICATION_ID: i32 = 0x6763_7472;
/// For another process that writes.
const BUSY: Duration = Duration::from_secs(10);

/// Steps from each version of the tables to the next one; a step that was released is never changed.
const MIGRATIONS: [&str; 2] = [
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
];

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
                "INSERT INTO sample_set (id, app, ruby_major, ruby_minor, received, samples, evidence, body)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8) ON CONFLICT (id) DO NOTHING",
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
                set.body
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
            Inserted { new: true, deleted }
        };
        transaction.commit()?;
        Ok(inserted)
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
                assert!(store.insert(&set, Quota::NONE).unwrap().new);
                assert!(!store.insert(&set, Quota::NONE).unwrap().new);
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

    /// Beyond its quota an application loses its oldest sets and others lose nothing; ages and applications are deleted;
    /// the counts are those of what is there, also in a store from before there were counts.
    #[test]
    fn deletes() {
        let (_dir, path) = store();
        let evidence = Evidence { sets: 1, samples: 10, ..Evidence::default() };
        let put = |store: &Sqlite, app, byte: u8, quota| {
            let (id, group) = (SetId::of(&[byte; 32]), Group { app, series: Series(3, 4) });
            let received = f64::from(byte);
            let body = vec![0; 1000];
            store
                .insert(&NewSet { id: &id, group, received, evidence: &evidence, body: &body }, quota)
                .unwrap()
        };
        let known = |store: &Sqlite| -> Vec<u8> {
            let there = |byte: &u8| store.group_of(&SetId::of(&[*byte; 32])).unwrap().is_some();
            (0..100).filter(there).collect()
        };
        let counted = |store: &Sqlite| -> Vec<(u64, u64)> {
            store.apps().unwrap().iter().map(|app| (app.sets, app.bytes)).collect()
        };
        let store = Sqlite::open(&path).unwrap();
        for name in ["shop", "mail"] {
            store.register(TokenHash::of(name), "a@b", name, 1.0).unwrap();
        }
        let [shop, mail] = ["shop", "mail"].map(|name| store.app(TokenHash::of(name)).unwrap().unwrap());
        put(&store, mail, 50, Quota::NONE);
        let few = Quota { sets: 3, bytes: u64::MAX };
        let deleted: Vec<u64> = (1..6).map(|byte| put(&store, shop, byte, few).deleted).collect();
        assert_eq!((deleted, known(&store)), (vec![0, 0, 0, 1, 1], vec![3, 4, 5, 50]));
        // Of one that is sent again nothing follows.
        assert_eq!(put(&store, shop, 5, Quota { sets: 1, bytes: 1 }), Inserted::default());
        let each = counted(&store)[1].1;
        assert!(each > 1000);
        assert_eq!(put(&store, shop, 6, Quota { sets: 100, bytes: 2 * each }).deleted, 2);
        assert_eq!(counted(&store), [(2, 2 * each), (1, each)]);
        // The latest one stays, however small the quota is.
        assert_eq!(put(&store, shop, 7, Quota { sets: 0, bytes: 0 }).deleted, 2);
        assert_eq!(put(&store, shop, 8, Quota::NONE), Inserted { new: true, deleted: 0 });
        assert_eq!(store.prune(8.0, Some(mail)).unwrap(), 0);
        assert_eq!(store.prune(8.0, Some(shop)).unwrap(), 1);
        assert_eq!(store.prune(50.0, None).unwrap(), 1);
        assert_eq!((known(&store), counted(&store)), (vec![50], vec![(0, 0), (1, each)]));
        for byte in 10..20 {
            put(&store, shop, byte, Quota::NONE);
        }
        let latest = store.apps().unwrap()[0].clone();
        assert_eq!(
            (latest.app, latest.name.as_str(), latest.sets, latest.last),
            (shop, "shop", 10, Some(19.0))
        );
        // As an earlier gctrace left it.
        let before = "DROP INDEX sample_set_app; DROP INDEX sample_set_received;
            ALTER TABLE app DROP COLUMN sets; ALTER TABLE app DROP COLUMN bytes; PRAGMA user_version = 1";
        store.writer().execute_batch(before).unwrap();
        drop(store);
        let store = Sqlite::open(&path).unwrap();
        assert_eq!(counted(&store), [(10, 10 * each), (1, each)]);
        assert!(store.delete_app(shop).unwrap() && !store.delete_app(shop).unwrap());
        assert_eq!((known(&store), counted(&store)), (vec![50], vec![(1, each)]));
        assert_eq!(store.app(TokenHash::of("shop")).unwrap(), None);
    }

    /// A store that is written to and deleted from for long keeps its size.
    #[test]
    fn stays_flat() {
        let (_dir, path) = store();
        let store = Sqlite::open(&path).unwrap();
        store.register(TokenHash::of("shop"), "a@b", "shop", 1.0).unwrap();
        let group = Group { app: store.app(TokenHash::of("shop")).unwrap().unwrap(), series: Series(3, 4) };
        let evidence = Evidence { sets: 1, samples: 10, ..Evidence::default() };
        let quota = Quota { sets: 10, bytes: u64::MAX };
        let mut sizes = Vec::new();
        for day in 0..10_u8 {
            for n in 0..20_u8 {
                let (id, body) = (SetId::of(&[[day, n]; 16].concat().try_into().unwrap()), vec![n; 20_000]);
                store
                    .insert(
                        &NewSet { id: &id, group, received: 0.0, evidence: &evidence, body: &body },
                        quota,
                    )
                    .unwrap();
            }
            store.writer().query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).unwrap();
            sizes.push(fs::metadata(&path).unwrap().len());
        }
        assert!(sizes[9] <= sizes[0] + (64 << 10), "{sizes:?}");
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
