//! PostgreSQL: one database for several collectors, none of which holds anything.

use std::{
    env, fmt,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use postgres::{Client, Config, NoTls, Row, Transaction, config::SslMode};
use rustls::ClientConfig;
use rustls_platform_verifier::ConfigVerifierExt as _;
use tokio_postgres_rustls::MakeRustlsConnect;

use super::{
    App, AppInfo, BATCH, Environment, FIGURES, Group, Inserted, MAX_SLOTS, NewSet, Numbered, Quota, SetId,
    Slot, Store, StoreError, TokenHash, Totals, adding,
};
use crate::{
    digest::{CLASSES, Figures},
    tune::Series,
};

mod environments;

/// For a connection.
const CONNECT: Duration = Duration::from_secs(5);
/// For a server that has gone away without a word.
const SILENCE: Duration = Duration::from_secs(20);
/// Connections that are kept; more are made while there is more to do.
const KEPT: usize = 16;
/// Collectors that start together make the tables one after the other: "gctr".
const LOCK: i64 = 0x6763_7472;

/// On the disk before the answer goes out, whatever the server's configuration says; and no statement waits for ever.
const SESSION: &str =
    "SET synchronous_commit = on; SET statement_timeout = '30s'; SET application_name = 'gctrace collector'";

/// Steps from each version of the tables to the next one; a step that was released is never changed.
const MIGRATIONS: [&str; 4] = [
    "
    CREATE TABLE gctrace_app (
        id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        token_hash BYTEA NOT NULL UNIQUE,
        email TEXT NOT NULL,
        name TEXT NOT NULL,
        created DOUBLE PRECISION NOT NULL
    );
    CREATE TABLE gctrace_sample_set (
        number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        app BIGINT NOT NULL REFERENCES gctrace_app (id),
        ruby_major INTEGER NOT NULL,
        ruby_minor INTEGER NOT NULL,
        received DOUBLE PRECISION NOT NULL,
        samples BIGINT NOT NULL,
        evidence TEXT NOT NULL,
        body BYTEA NOT NULL
    );
    -- The body is compressed already.
    ALTER TABLE gctrace_sample_set ALTER COLUMN body SET STORAGE EXTERNAL;
    CREATE INDEX gctrace_sample_set_group ON gctrace_sample_set (app, ruby_major, ruby_minor, number);
    CREATE INDEX gctrace_sample_set_app ON gctrace_sample_set (app, number);
",
    "
    ALTER TABLE gctrace_app ADD COLUMN sets BIGINT NOT NULL DEFAULT 0, ADD COLUMN bytes BIGINT NOT NULL DEFAULT 0;
    UPDATE gctrace_app SET sets = counted.sets, bytes = counted.bytes FROM (
        SELECT app, count(*) AS sets, sum(octet_length(body) + octet_length(evidence)) AS bytes
        FROM gctrace_sample_set GROUP BY app
    ) AS counted WHERE counted.app = gctrace_app.id;
    CREATE INDEX gctrace_sample_set_received ON gctrace_sample_set (received);
",
    "
    ALTER TABLE gctrace_app ADD COLUMN slots BIGINT NOT NULL DEFAULT 0;
    CREATE TABLE gctrace_slot (
        app BIGINT NOT NULL REFERENCES gctrace_app (id),
        at BIGINT NOT NULL,
        ruby_major INTEGER NOT NULL,
        ruby_minor INTEGER NOT NULL,
        environment TEXT NOT NULL,
        host TEXT NOT NULL,
        pid BIGINT NOT NULL,
        sets BIGINT NOT NULL,
        cycles BIGINT NOT NULL,
        majors BIGINT NOT NULL,
        gc_ms BIGINT NOT NULL,
        gc_seconds DOUBLE PRECISION NOT NULL,
        c0 BIGINT NOT NULL, c1 BIGINT NOT NULL, c2 BIGINT NOT NULL, c3 BIGINT NOT NULL, c4 BIGINT NOT NULL,
        c5 BIGINT NOT NULL, c6 BIGINT NOT NULL, c7 BIGINT NOT NULL, c8 BIGINT NOT NULL, c9 BIGINT NOT NULL,
        rss BIGINT NOT NULL,
        slots BIGINT NOT NULL,
        PRIMARY KEY (app, at, ruby_major, ruby_minor, environment, host, pid)
    );
",
    "
    CREATE TABLE gctrace_environment (
        id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        app BIGINT NOT NULL REFERENCES gctrace_app (id) ON DELETE CASCADE,
        ruby_major INTEGER NOT NULL,
        ruby_minor INTEGER NOT NULL,
        in_force TEXT NOT NULL,
        UNIQUE (app, ruby_major, ruby_minor, in_force)
    );
    ALTER TABLE gctrace_sample_set ADD COLUMN environment BIGINT;
    CREATE INDEX gctrace_sample_set_environment ON gctrace_sample_set (environment, number);
    CREATE TABLE gctrace_advised (
        app BIGINT NOT NULL REFERENCES gctrace_app (id) ON DELETE CASCADE,
        ruby_major INTEGER NOT NULL,
        ruby_minor INTEGER NOT NULL,
        setting TEXT NOT NULL,
        given DOUBLE PRECISION NOT NULL,
        PRIMARY KEY (app, ruby_major, ruby_minor, setting)
    );
",
];

/// The version from which on sets have their environment.
const WITH_ENVIRONMENTS: i32 = 4;

/// A store in a PostgreSQL database.
pub struct Postgres {
    config: Config,
    tls: Option<MakeRustlsConnect>,
    idle: Mutex<Vec<Client>>,
}

impl fmt::Debug for Postgres {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The configuration holds a password.
        f.debug_struct("Postgres").finish_non_exhaustive()
    }
}

impl Postgres {
    /// Connects to the database of an address, `postgres://USER:PASSWORD@HOST:PORT/DATABASE?sslmode=require`, and makes the tables if
    /// they are not there. A password that is not in the address is taken from `PGPASSWORD`.
    pub fn open(address: &str) -> Result<Self, StoreError> {
        let mut config: Config = address.parse()?;
        if config.get_password().is_none()
            && let Ok(password) = env::var("PGPASSWORD")
        {
            config.password(password);
        }
        config.connect_timeout(CONNECT).tcp_user_timeout(SILENCE).keepalives_idle(SILENCE);
        let tls = if config.get_ssl_mode() == SslMode::Require {
            let verified =
                ClientConfig::with_platform_verifier().map_err(|error| StoreError::Tls(error.into()))?;
            Some(MakeRustlsConnect::new(verified))
        } else {
            // To encrypt for whoever answers would only look safe.
            config.ssl_mode(SslMode::Disable);
            None
        };
        let store = Self { config, tls, idle: Mutex::new(Vec::new()) };
        store
            .with(Retry::No, |client| {
                let mut transaction = client.transaction()?;
                let version = migrate(&mut transaction)?;
                transaction.commit()?;
                Ok(version)
            })
            .and_then(|version| {
                if version > MIGRATIONS.len() as i32 {
                    let what = format!("was written by a later gctrace (version {version} of its tables)");
                    return Err(StoreError::Foreign { path: "the database".into(), what });
                }
                Ok(store)
            })
    }

    fn connect(&self) -> Result<Client, postgres::Error> {
        let mut client = match &self.tls {
            Some(tls) => self.config.connect(tls.clone())?,
            None => self.config.connect(NoTls)?,
        };
        client.batch_execute(SESSION)?;
        Ok(client)
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<Client>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something with a connection. A server that was restarted has closed those that were kept, which shows only when
    /// they are used.
    fn with<T>(
        &self,
        retry: Retry,
        mut work: impl FnMut(&mut Client) -> Result<T, postgres::Error>,
    ) -> Result<T, StoreError> {
        loop {
            let kept = self.idle().pop();
            let fresh = kept.is_none();
            let mut client = match kept {
                Some(client) if client.is_closed() => continue,
                Some(client) => client,
                None => self.connect()?,
            };
            let done = work(&mut client);
            if !client.is_closed() {
                let mut idle = self.idle();
                if idle.len() < KEPT {
                    idle.push(client);
                }
                return Ok(done?);
            }
            if done.is_ok() || fresh || retry == Retry::No {
                return Ok(done?);
            }
        }
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        // A connection ends itself by blocking, which it must not do on a thread of the server's runtime.
        let idle = std::mem::take(&mut *self.idle());
        let _panicked = std::thread::spawn(move || drop(idle)).join();
    }
}

/// Whether work may be done once more where it is not known if it was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Retry {
    Yes,
    No,
}

/// Makes the tables what they should be. Returns their version, which may be later than ours: then nothing is done.
fn migrate(transaction: &mut Transaction<'_>) -> Result<i32, postgres::Error> {
    transaction.execute("SELECT pg_advisory_xact_lock($1)", &[&LOCK])?;
    transaction.batch_execute("CREATE TABLE IF NOT EXISTS gctrace_version (version INTEGER NOT NULL)")?;
    let found = transaction.query_opt("SELECT version FROM gctrace_version", &[])?;
    let version: i32 = match &found {
        Some(row) => row.try_get(0)?,
        None => 0,
    };
    let Some(steps) = usize::try_from(version).ok().and_then(|version| MIGRATIONS.get(version..)) else {
        return Ok(version);
    };
    for step in steps {
        transaction.batch_execute(step)?;
    }
    if (1..WITH_ENVIRONMENTS).contains(&version) {
        environments::name_all(transaction)?;
    }
    let now = MIGRATIONS.len() as i32;
    match found {
        Some(_) => transaction.execute("UPDATE gctrace_version SET version = $1", &[&now])?,
        None => transaction.execute("INSERT INTO gctrace_version (version) VALUES ($1)", &[&now])?,
    };
    Ok(now)
}

fn group(row: &Row) -> Result<Group, postgres::Error> {
    let number = |at| row.try_get::<_, i32>(at).map(i32::unsigned_abs);
    Ok(Group { app: App(row.try_get(0)?), series: Series(number(1)?, number(2)?) })
}

fn of_group(group: Group) -> (i64, i32, i32) {
    let Series(major, minor) = group.series;
    (group.app.0, major as i32, minor as i32)
}

/// PostgreSQL's texts cannot hold NUL.
fn text(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}

fn slot(row: &Row) -> Result<Slot, postgres::Error> {
    let count = |at| row.try_get::<_, i64>(at).map(i64::unsigned_abs);
    let number = |at| row.try_get::<_, i32>(at).map(i32::unsigned_abs);
    let mut classes = [0; CLASSES];
    for (at, class) in classes.iter_mut().enumerate() {
        *class = count(10 + at)?;
    }
    Ok(Slot {
        at: row.try_get(0)?,
        series: Series(number(1)?, number(2)?),
        environment: row.try_get(3)?,
        host: row.try_get(4)?,
        pid: row.try_get(5)?,
        figures: Figures {
            cycles: count(6)?,
            majors: count(7)?,
            gc_ms: count(8)?,
            gc_seconds: row.try_get(9)?,
            classes,
            rss: count(20)?,
            slots: count(21)?,
        },
    })
}

/// Adds the figures of a set to its ten minutes; an application that has too many of them loses its oldest ones.
fn add_to_slot(transaction: &mut Transaction<'_>, set: &NewSet<'_>) -> Result<(), postgres::Error> {
    let (digest, figures) = (set.digest, &set.digest.figures);
    let add = format!(
        "INSERT INTO gctrace_slot (app, at, ruby_major, ruby_minor, environment, host, pid, sets, {FIGURES})
         VALUES ($1, $2, $3, $4, $5, $6, $7, 1, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23)
         ON CONFLICT (app, at, ruby_major, ruby_minor, environment, host, pid) DO UPDATE SET {} RETURNING sets",
        adding("gctrace_slot", "greatest")
    );
    let (app, major, minor) = of_group(set.group);
    let at = digest.slot(set.received);
    let [cycles, majors, ms, rss, slots] =
        [figures.cycles, figures.majors, figures.gc_ms, figures.rss, figures.slots]
            .map(|number| number as i64);
    let c = figures.classes.map(|number| number as i64);
    let row = transaction.query_one(
        &add,
        &[
            &app,
            &at,
            &major,
            &minor,
            &digest.environment,
            &digest.host,
            &digest.pid,
            &cycles,
            &majors,
            &ms,
            &figures.gc_seconds,
            &c[0],
            &c[1],
            &c[2],
            &c[3],
            &c[4],
            &c[5],
            &c[6],
            &c[7],
            &c[8],
            &c[9],
            &rss,
            &slots,
        ],
    )?;
    if row.try_get::<_, i64>(0)? > 1 {
        return Ok(());
    }
    let count = "UPDATE gctrace_app SET slots = slots + 1 WHERE id = $1 RETURNING slots";
    if transaction.query_one(count, &[&app])?.try_get::<_, i64>(0)? > i64::from(MAX_SLOTS) {
        let delete = "DELETE FROM gctrace_slot WHERE app = $1
             AND at <= (SELECT at FROM gctrace_slot WHERE app = $1 ORDER BY at LIMIT 1 OFFSET $2)";
        let deleted = transaction.execute(delete, &[&app, &i64::from(BATCH)])? as i64;
        transaction.execute("UPDATE gctrace_app SET slots = slots - $2 WHERE id = $1", &[&app, &deleted])?;
    }
    Ok(())
}

/// Deletes the oldest sets of an application until it is within its quota, which it is not. Returns how many.
fn make_room(
    transaction: &mut Transaction<'_>,
    app: i64,
    quota: Quota,
    sets: u64,
    bytes: u64,
) -> Result<u64, postgres::Error> {
    let oldest = "SELECT (octet_length(body) + octet_length(evidence))::BIGINT FROM gctrace_sample_set
         WHERE app = $1 ORDER BY number LIMIT $2";
    let rows = transaction.query(oldest, &[&app, &i64::from(BATCH)])?;
    let sizes = rows.iter().map(|row| row.try_get::<_, i64>(0).map(i64::unsigned_abs));
    let most = quota.excess(sets, bytes, sizes.collect::<Result<Vec<_>, _>>()?) as i64;
    let oldest = "SELECT number FROM gctrace_sample_set WHERE app = $1 ORDER BY number LIMIT $2 FOR UPDATE SKIP LOCKED";
    delete(transaction, oldest, &[&app, &most])
}

/// Deletes the sets of which a query gives the numbers, and takes them off the counts of their applications.
fn delete(
    transaction: &mut Transaction<'_>,
    numbers: &str,
    params: &[&(dyn postgres::types::ToSql + Sync)],
) -> Result<u64, postgres::Error> {
    // In the order of their ids: two collectors that do this at a time wait for each other, but not in a circle.
    let delete = format!(
        "WITH gone AS (DELETE FROM gctrace_sample_set WHERE number IN ({numbers})
             RETURNING app, octet_length(body) + octet_length(evidence) AS bytes)
         SELECT app, count(*), sum(bytes)::BIGINT FROM gone GROUP BY app ORDER BY app"
    );
    let mut deleted = 0;
    for row in transaction.query(&delete, params)? {
        let (app, sets, bytes): (i64, i64, i64) = (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
        let count = "UPDATE gctrace_app SET sets = sets - $2, bytes = bytes - $3 WHERE id = $1";
        transaction.execute(count, &[&app, &sets, &bytes])?;
        deleted += sets.unsigned_abs();
    }
    Ok(deleted)
}

impl Store for Postgres {
    fn register(&self, token: TokenHash, email: &str, name: &str, now: f64) -> Result<(), StoreError> {
        let (email, name) = (text(email), text(name));
        let insert = "INSERT INTO gctrace_app (token_hash, email, name, created) VALUES ($1, $2, $3, $4)";
        self.with(Retry::No, |client| client.execute(insert, &[&token.0.as_slice(), &email, &name, &now]))?;
        Ok(())
    }

    fn app(&self, token: TokenHash) -> Result<Option<App>, StoreError> {
        let query = "SELECT id FROM gctrace_app WHERE token_hash = $1";
        self.with(Retry::Yes, |client| {
            client.query_opt(query, &[&token.0.as_slice()])?.map(|row| row.try_get(0).map(App)).transpose()
        })
    }

    fn apps(&self) -> Result<Vec<AppInfo>, StoreError> {
        let query = "SELECT id, name, email, created, sets, bytes,
                 (SELECT received FROM gctrace_sample_set AS s WHERE s.app = a.id ORDER BY number DESC LIMIT 1)
             FROM gctrace_app AS a ORDER BY id";
        let info = |row: &Row| -> Result<AppInfo, postgres::Error> {
            Ok(AppInfo {
                app: App(row.try_get(0)?),
                name: row.try_get(1)?,
                email: row.try_get(2)?,
                created: row.try_get(3)?,
                sets: row.try_get::<_, i64>(4)?.unsigned_abs(),
                bytes: row.try_get::<_, i64>(5)?.unsigned_abs(),
                last: row.try_get(6)?,
            })
        };
        self.with(Retry::Yes, |client| client.query(query, &[])?.iter().map(info).collect())
    }

    fn delete_app(&self, app: App) -> Result<bool, StoreError> {
        let rows = self.with(Retry::Yes, |client| {
            let mut transaction = client.transaction()?;
            // Nobody adds a set meanwhile.
            transaction.execute("SELECT 1 FROM gctrace_app WHERE id = $1 FOR UPDATE", &[&app.0])?;
            transaction.execute("DELETE FROM gctrace_sample_set WHERE app = $1", &[&app.0])?;
            transaction.execute("DELETE FROM gctrace_slot WHERE app = $1", &[&app.0])?;
            let rows = transaction.execute("DELETE FROM gctrace_app WHERE id = $1", &[&app.0])?;
            transaction.commit()?;
            Ok(rows)
        })?;
        Ok(rows == 1)
    }

    fn insert(&self, set: &NewSet<'_>, quota: Quota) -> Result<Inserted, StoreError> {
        let evidence = serde_json::to_string(set.evidence)?;
        let (app, major, minor) = of_group(set.group);
        let samples = set.evidence.samples as i64;
        let insert = "INSERT INTO gctrace_sample_set (id, app, ruby_major, ruby_minor, received, samples, evidence, body, environment)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9) ON CONFLICT (id) DO NOTHING";
        let count =
            "UPDATE gctrace_app SET sets = sets + 1, bytes = bytes + $2 WHERE id = $1 RETURNING sets, bytes";
        let size = (set.body.len() + evidence.len()) as i64;
        let id = set.id.as_str();
        self.with(Retry::Yes, |client| {
            let mut transaction = client.transaction()?;
            let environment = environments::id_of(&mut transaction, set.group, set.in_force)?;
            let rows = transaction.execute(
                insert,
                &[&id, &app, &major, &minor, &set.received, &samples, &evidence, &set.body, &environment],
            )?;
            if rows == 0 {
                return Ok(Inserted::default());
            }
            // Last of all: it holds up the other sets of the application until all of this is on the disk.
            let row = transaction.query_one(count, &[&app, &size])?;
            let of = |at| row.try_get::<_, i64>(at).map(i64::unsigned_abs);
            let (sets, bytes) = (of(0)?, of(1)?);
            let deleted = if quota.exceeded(sets, bytes) {
                make_room(&mut transaction, app, quota, sets, bytes)?
            } else {
                0
            };
            add_to_slot(&mut transaction, set)?;
            transaction.commit()?;
            Ok(Inserted { new: true, deleted })
        })
    }

    fn slots(&self, app: App, since: i64) -> Result<Vec<Slot>, StoreError> {
        let query = format!(
            "SELECT at, ruby_major, ruby_minor, environment, host, pid, {FIGURES} FROM gctrace_slot
             WHERE app = $1 AND at >= $2 ORDER BY at DESC LIMIT $3"
        );
        let rows =
            self.with(Retry::Yes, |client| client.query(&query, &[&app.0, &since, &i64::from(MAX_SLOTS)]))?;
        rows.iter().map(|row| Ok(slot(row)?)).collect()
    }

    fn prune_slots(&self, before: i64) -> Result<(), StoreError> {
        self.with(Retry::Yes, |client| {
            client.execute(
                "WITH gone AS (DELETE FROM gctrace_slot WHERE at < $1 RETURNING app),
                     counted AS (SELECT app, count(*) AS slots FROM gone GROUP BY app)
                 UPDATE gctrace_app SET slots = gctrace_app.slots - counted.slots FROM counted WHERE counted.app = id",
                &[&before],
            )
        })?;
        Ok(())
    }

    fn prune(&self, before: f64, app: Option<App>) -> Result<u64, StoreError> {
        let most = i64::from(BATCH);
        self.with(Retry::Yes, |client| {
            let mut transaction = client.transaction()?;
            let deleted = match app {
                None => {
                    let oldest = "SELECT number FROM gctrace_sample_set WHERE received < $1
                         ORDER BY received LIMIT $2 FOR UPDATE SKIP LOCKED";
                    delete(&mut transaction, oldest, &[&before, &most])
                }
                Some(app) => {
                    let oldest = "SELECT number FROM gctrace_sample_set WHERE app = $3 AND received < $1
                         ORDER BY number LIMIT $2 FOR UPDATE SKIP LOCKED";
                    delete(&mut transaction, oldest, &[&before, &most, &app.0])
                }
            }?;
            transaction.commit()?;
            Ok(deleted)
        })
    }

    fn group_of(&self, id: &SetId) -> Result<Option<(Group, i64)>, StoreError> {
        let query = "SELECT app, ruby_major, ruby_minor, environment FROM gctrace_sample_set
             WHERE id = $1 AND environment IS NOT NULL";
        self.with(Retry::Yes, |client| {
            let row = client.query_opt(query, &[&id.as_str()])?;
            row.map(|row| Ok((group(&row)?, row.try_get(3)?))).transpose()
        })
    }

    fn latest_group(&self, app: App) -> Result<Option<Group>, StoreError> {
        let query = "SELECT app, ruby_major, ruby_minor FROM gctrace_sample_set
             WHERE app = $1 ORDER BY number DESC LIMIT 1";
        self.with(Retry::Yes, |client| client.query_opt(query, &[&app.0])?.as_ref().map(group).transpose())
    }

    fn environments(&self, group: Group, most: u32) -> Result<Vec<Environment>, StoreError> {
        environments::list(self, group, most)
    }

    fn evidence(&self, environment: i64, after: i64, most: u32) -> Result<Vec<Numbered>, StoreError> {
        environments::evidence(self, environment, after, most)
    }

    fn advise(&self, group: Group, settings: &[String], now: f64, most: u32) -> Result<(), StoreError> {
        environments::advise(self, group, settings, now, most)
    }

    fn advised(&self, group: Group) -> Result<Vec<String>, StoreError> {
        environments::advised(self, group)
    }

    fn totals(&self) -> Result<Totals, StoreError> {
        let query = "SELECT (SELECT count(*) FROM gctrace_app), count(*), coalesce(sum(samples), 0)::BIGINT
             FROM gctrace_sample_set";
        let row = self.with(Retry::Yes, |client| client.query_one(query, &[]))?;
        let count = |at| row.try_get::<_, i64>(at).map(i64::unsigned_abs);
        Ok(Totals { apps: count(0)?, sets: count(1)?, samples: count(2)? })
    }
}
