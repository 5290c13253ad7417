//! PostgreSQL: one database for several collectors, which hold no state themselves.

use std::{
    collections::HashMap,
    env, fmt,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use postgres::{Client, Config, NoTls, Row, Transaction, config::SslMode};
use rustls::ClientConfig;
use rustls_platform_verifier::ConfigVerifierExt as _;
use tokio_postgres_rustls::MakeRustlsConnect;

use super::{
    App, AppInfo, BATCH, Environment, Given, Group, Inserted, NewApp, NewSet, Numbered, Period, Quota,
    Rights, SetId, Slot, Store, StoreError, Token, TokenHash, Totals,
};
use crate::tune::{Evidence, Series};

mod apps;
mod environments;
mod slots;
mod tables;

use tables::MIGRATIONS;

/// Timeout for connecting.
const CONNECT: Duration = Duration::from_secs(5);
/// Timeout for a server that stopped responding.
const SILENCE: Duration = Duration::from_secs(20);
/// Maximum number of idle connections kept; more are opened under load.
const KEPT: usize = 16;
/// Key of the advisory lock by which collectors that start together create the tables one after the other: "gctr".
const LOCK: i64 = 0x6763_7472;

/// Data is on disk before the answer is sent, whatever the server's configuration, and no statement waits forever.
const SESSION: &str =
    "SET synchronous_commit = on; SET statement_timeout = '30s'; SET application_name = 'gctrace collector'";

/// The first version of the tables in which sets have an environment.
const WITH_ENVIRONMENTS: i32 = 4;

/// A store in a PostgreSQL database.
pub struct Postgres {
    config: Config,
    tls: Option<MakeRustlsConnect>,
    idle: Mutex<Vec<Client>>,
}

impl fmt::Debug for Postgres {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The configuration contains a password.
        f.debug_struct("Postgres").finish_non_exhaustive()
    }
}

impl Postgres {
    /// Connects to the database `postgres://USER:PASSWORD@HOST:PORT/DATABASE?sslmode=require`, and creates the tables if
    /// they do not exist. If the address has no password, `PGPASSWORD` is used.
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
            // Encryption without verification of the server would only look secure.
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

    /// Runs `work` with a connection. A restarted server has closed the idle connections, which is noticed only when
    /// they are used; then `work` is retried if `retry` permits.
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
        // Closing a connection blocks, which is not allowed on a thread of the server's runtime.
        let idle = std::mem::take(&mut *self.idle());
        let _panicked = std::thread::spawn(move || drop(idle)).join();
    }
}

/// Whether work may be repeated if it is unknown whether it was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Retry {
    Yes,
    No,
}

/// Migrates the tables. Returns their version; if that is later than ours, nothing is changed.
fn migrate(transaction: &mut Transaction<'_>) -> Result<i32, postgres::Error> {
    // A step may read all rows, and another collector may be doing so: a limit would let a large store never be upgraded.
    transaction.batch_execute("SET LOCAL statement_timeout = 0")?;
    transaction.execute("SELECT pg_advisory_xact_lock($1)", &[&LOCK])?;
    // A change that waits for a reader of a table, such as a backup, makes all others wait behind it, also the collectors that run.
    transaction.batch_execute("SET LOCAL lock_timeout = '10s'")?;
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

/// Number of sets whose sizes are read first when some must be deleted.
const FEW: i64 = 8;

/// Deletes the oldest sets of an application that exceeds its quota, until it no longer does. Returns the number of deleted sets.
fn make_room(
    transaction: &mut Transaction<'_>,
    app: i64,
    quota: Quota,
    sets: u64,
    bytes: u64,
) -> Result<u64, postgres::Error> {
    let oldest = "SELECT (octet_length(body) + octet_length(evidence))::BIGINT FROM gctrace_sample_set
         WHERE app = $1 ORDER BY number LIMIT $2";
    let mut most = 0;
    // An application at its quota loses one set for each new one: usually the further sets need not be read.
    for looked_at in [FEW, i64::from(BATCH)] {
        let rows = transaction.query(oldest, &[&app, &looked_at])?;
        let sizes = rows.iter().map(|row| row.try_get::<_, i64>(0).map(i64::unsigned_abs));
        most = quota.excess(sets, bytes, sizes.collect::<Result<Vec<_>, _>>()?) as i64;
        if most < looked_at {
            break;
        }
    }
    let oldest = "SELECT number FROM gctrace_sample_set WHERE app = $1 ORDER BY number LIMIT $2 FOR UPDATE SKIP LOCKED";
    delete(transaction, oldest, &[&app, &most])
}

/// Deletes the sets whose numbers a query selects, and subtracts them from the counts of their applications.
fn delete(
    transaction: &mut Transaction<'_>,
    numbers: &str,
    params: &[&(dyn postgres::types::ToSql + Sync)],
) -> Result<u64, postgres::Error> {
    // In order of the applications' ids: two collectors that do this concurrently wait for each other, but cannot deadlock.
    let delete = format!(
        "WITH gone AS (DELETE FROM gctrace_sample_set WHERE number IN ({numbers})
             RETURNING app, samples, octet_length(body) + octet_length(evidence) AS bytes, id, received),
         noted AS (INSERT INTO gctrace_gone (id, app, received) SELECT decode(id, 'hex'), app, received FROM gone
             ON CONFLICT (id) DO NOTHING)
         SELECT app, count(*), sum(bytes)::BIGINT, sum(samples)::BIGINT FROM gone GROUP BY app ORDER BY app"
    );
    let mut deleted = 0;
    for row in transaction.query(&delete, params)? {
        let (app, sets): (i64, i64) = (row.try_get(0)?, row.try_get(1)?);
        let (bytes, samples): (i64, i64) = (row.try_get(2)?, row.try_get(3)?);
        let count = "UPDATE gctrace_app SET sets = sets - $2, bytes = bytes - $3, samples = samples - $4 WHERE id = $1";
        transaction.execute(count, &[&app, &sets, &bytes, &samples])?;
        deleted += sets.unsigned_abs();
    }
    Ok(deleted)
}

impl Store for Postgres {
    fn register(&self, app: &NewApp<'_>, token: TokenHash, rights: Rights) -> Result<App, StoreError> {
        apps::register(self, app, token, rights)
    }

    fn apps(&self) -> Result<Vec<AppInfo>, StoreError> {
        apps::list(self)
    }

    fn delete_app(&self, app: App) -> Result<bool, StoreError> {
        apps::delete(self, app)
    }

    fn token(&self, token: TokenHash) -> Result<Option<Token>, StoreError> {
        apps::token(self, token)
    }

    fn tokens(&self) -> Result<Vec<Token>, StoreError> {
        apps::tokens(self)
    }

    fn add_token(&self, token: &Token) -> Result<(), StoreError> {
        self.with(Retry::No, |client| apps::add_token(client, token))
    }

    fn end_token(&self, token: TokenHash, at: f64) -> Result<bool, StoreError> {
        apps::end_token(self, token, at)
    }

    fn insert(&self, set: &NewSet<'_>, quota: Quota) -> Result<Inserted, StoreError> {
        let evidence = serde_json::to_string(set.evidence)?;
        let (app, major, minor) = of_group(set.group);
        let samples = set.evidence.samples as i64;
        let insert = "INSERT INTO gctrace_sample_set (id, app, ruby_major, ruby_minor, received, samples, evidence, body, environment)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9) ON CONFLICT (id) DO NOTHING";
        let count = "UPDATE gctrace_app SET sets = sets + 1, bytes = bytes + $2, samples = samples + $3 WHERE id = $1 RETURNING sets, bytes";
        let size = (set.body.len() + evidence.len()) as i64;
        let id = set.id.as_str();
        self.with(Retry::Yes, |client| {
            let mut transaction = client.transaction()?;
            // The lock makes the numbers of an application's sets follow the order in which others see them: sums resume after a number. An
            // environment found now is also not deleted before it has this set.
            transaction.query_opt("SELECT id FROM gctrace_app WHERE id = $1 FOR NO KEY UPDATE", &[&app])?;
            let gone = "SELECT 1 FROM gctrace_gone WHERE id = decode($1, 'hex')";
            if transaction.query_opt(gone, &[&id])?.is_some() {
                return Ok(Inserted::default());
            }
            let environment = environments::id_of(&mut transaction, set.group, set.in_force, set.received)?;
            let rows = transaction.execute(
                insert,
                &[&id, &app, &major, &minor, &set.received, &samples, &evidence, &set.body, &environment],
            )?;
            if rows == 0 {
                return Ok(Inserted::default());
            }
            let row = transaction.query_one(count, &[&app, &size, &samples])?;
            let of = |at| row.try_get::<_, i64>(at).map(i64::unsigned_abs);
            let (sets, bytes) = (of(0)?, of(1)?);
            let deleted = if quota.exceeded(sets, bytes) {
                make_room(&mut transaction, app, quota, sets, bytes)?
            } else {
                0
            };
            environments::seen_at(&mut transaction, environment, set.digest.span(set.received))?;
            slots::add(&mut transaction, set)?;
            transaction.commit()?;
            Ok(Inserted { new: true, deleted })
        })
    }

    fn slots(&self, app: App, since: i64) -> Result<Vec<Slot>, StoreError> {
        slots::list(self, app, since)
    }

    fn roll_up(&self, app: App, from: i64, before: i64, width: i64) -> Result<u64, StoreError> {
        slots::roll_up(self, app, from, before, width)
    }

    fn prune_slots(&self, before: i64) -> Result<(), StoreError> {
        slots::prune(self, before)
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

    fn newest(&self) -> Result<Option<f64>, StoreError> {
        let query = "SELECT max(received) FROM gctrace_sample_set";
        self.with(Retry::Yes, |client| client.query_one(query, &[])?.try_get(0))
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
        let query = "SELECT e.app, e.ruby_major, e.ruby_minor FROM gctrace_environment e
             JOIN gctrace_sample_set s ON s.number = (SELECT max(number) FROM gctrace_sample_set WHERE environment = e.id)
             WHERE e.app = $1
             ORDER BY coalesce(e.until, s.received) DESC, s.number DESC LIMIT 1";
        self.with(Retry::Yes, |client| client.query_opt(query, &[&app.0])?.as_ref().map(group).transpose())
    }

    fn environments(&self, group: Group, most: u32) -> Result<Vec<Environment>, StoreError> {
        environments::list(self, group, most)
    }

    fn periods(&self, group: Group, most: u32) -> Result<Vec<Period>, StoreError> {
        environments::periods(self, group, most)
    }

    fn evidence(&self, environment: i64, after: i64, most: u32) -> Result<Vec<Numbered>, StoreError> {
        environments::evidence(self, environment, after, most)
    }

    fn environment(&self, id: i64) -> Result<Option<Environment>, StoreError> {
        environments::find(self, id)
    }

    fn forget_environments(&self, app: App, most: u32) -> Result<(), StoreError> {
        environments::forget(self, app, most)
    }

    fn unsummarized(&self) -> Result<Vec<Environment>, StoreError> {
        environments::unsummarized(self)
    }

    fn summarize(&self, environment: &Environment, evidence: &Evidence) -> Result<(), StoreError> {
        environments::summarize(self, environment, evidence)
    }

    fn summary(&self, environment: i64) -> Result<Option<Evidence>, StoreError> {
        environments::summary(self, environment)
    }

    fn advise(&self, group: Group, settings: &[String], now: f64, most: u32) -> Result<(), StoreError> {
        environments::advise(self, group, settings, now, most)
    }

    fn advised(&self, app: App) -> Result<HashMap<String, f64>, StoreError> {
        environments::advised(self, app)
    }

    fn note(&self, group: Group, given: &Given, replaces: bool, most: u32) -> Result<(), StoreError> {
        environments::note(self, group, given, replaces, most)
    }

    fn given(&self, group: Group) -> Result<Vec<Given>, StoreError> {
        environments::given(self, group)
    }

    fn totals(&self) -> Result<Totals, StoreError> {
        let query = "SELECT count(*), coalesce(sum(sets), 0)::BIGINT, coalesce(sum(samples), 0)::BIGINT FROM gctrace_app";
        let row = self.with(Retry::Yes, |client| client.query_one(query, &[]))?;
        let count = |at| row.try_get::<_, i64>(at).map(i64::unsigned_abs);
        Ok(Totals { apps: count(0)?, sets: count(1)?, samples: count(2)? })
    }
}
