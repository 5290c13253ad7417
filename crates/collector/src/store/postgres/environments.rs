//! Environments of sets, and what was advised to whom.

use postgres::{GenericClient, Row, Transaction};

use super::{
    super::{Environment, Group, Numbered, StoreError, in_force_of},
    Postgres, Retry, group, of_group,
};

/// Gives the sets of an earlier release their environments. What cannot be read has none, and is left out of recommendations.
pub(super) fn name_all(transaction: &mut Transaction<'_>) -> Result<(), postgres::Error> {
    const AT_A_TIME: i64 = 1000;
    let mut after = 0_i64;
    loop {
        let rows = transaction.query(
            "SELECT app, ruby_major, ruby_minor, number, evidence FROM gctrace_sample_set
             WHERE number > $1 ORDER BY number LIMIT $2",
            &[&after, &AT_A_TIME],
        )?;
        let Some(last) = rows.last() else { return Ok(()) };
        after = last.try_get(3)?;
        for row in &rows {
            let group = group(row)?;
            let Ok(key) = in_force_of(row.try_get(4)?, group.series) else { continue };
            let id = id_of(transaction, group, &key)?;
            let number: i64 = row.try_get(3)?;
            transaction.execute(
                "UPDATE gctrace_sample_set SET environment = $1 WHERE number = $2",
                &[&id, &number],
            )?;
        }
    }
}

/// The number of an environment, which is made if it is not there.
pub(super) fn id_of(
    client: &mut impl GenericClient,
    group: Group,
    key: &str,
) -> Result<i64, postgres::Error> {
    let (app, major, minor) = of_group(group);
    let find = "SELECT id FROM gctrace_environment
         WHERE app = $1 AND ruby_major = $2 AND ruby_minor = $3 AND in_force = $4";
    if let Some(row) = client.query_opt(find, &[&app, &major, &minor, &key])? {
        return row.try_get(0);
    }
    let insert = "INSERT INTO gctrace_environment (app, ruby_major, ruby_minor, in_force) VALUES ($1, $2, $3, $4)
         ON CONFLICT (app, ruby_major, ruby_minor, in_force) DO UPDATE SET in_force = excluded.in_force RETURNING id";
    client.query_one(insert, &[&app, &major, &minor, &key])?.try_get(0)
}

/// See [`Store::environments`](super::super::Store::environments).
pub(super) fn list(store: &Postgres, group: Group, most: u32) -> Result<Vec<Environment>, StoreError> {
    let (app, major, minor) = of_group(group);
    let query = "SELECT e.id, e.in_force, s.number, s.received FROM gctrace_environment e
         CROSS JOIN LATERAL (SELECT number, received FROM gctrace_sample_set
             WHERE environment = e.id ORDER BY number DESC LIMIT 1) s
         WHERE e.app = $1 AND e.ruby_major = $2 AND e.ruby_minor = $3 ORDER BY s.number DESC LIMIT $4";
    store.with(Retry::Yes, |client| {
        let rows = client.query(query, &[&app, &major, &minor, &i64::from(most)])?;
        let environment = |row: &Row| {
            Ok(Environment {
                id: row.try_get(0)?,
                key: row.try_get(1)?,
                latest: row.try_get(2)?,
                seen: row.try_get(3)?,
            })
        };
        rows.iter().map(environment).collect()
    })
}

/// See [`Store::evidence`](super::super::Store::evidence).
pub(super) fn evidence(
    store: &Postgres,
    environment: i64,
    after: i64,
    most: u32,
) -> Result<Vec<Numbered>, StoreError> {
    let query = "SELECT number, evidence FROM gctrace_sample_set
         WHERE environment = $1 AND number > $2 ORDER BY number DESC LIMIT $3";
    let rows =
        store.with(Retry::Yes, |client| client.query(query, &[&environment, &after, &i64::from(most)]))?;
    let numbered = |row: &Row| Ok((row.try_get(0)?, serde_json::from_str(row.try_get(1)?)?));
    rows.iter().rev().map(numbered).collect()
}

/// See [`Store::advise`](super::super::Store::advise).
pub(super) fn advise(
    store: &Postgres,
    group: Group,
    settings: &[String],
    now: f64,
    most: u32,
) -> Result<(), StoreError> {
    let (app, major, minor) = of_group(group);
    store.with(Retry::Yes, |client| {
        let mut transaction = client.transaction()?;
        for setting in settings {
            transaction.execute(
                "INSERT INTO gctrace_advised (app, ruby_major, ruby_minor, setting, given)
                 VALUES ($1, $2, $3, $4, $5)
                 ON CONFLICT (app, ruby_major, ruby_minor, setting) DO UPDATE SET given = excluded.given",
                &[&app, &major, &minor, setting, &now],
            )?;
        }
        transaction.execute(
            "DELETE FROM gctrace_advised WHERE app = $1 AND ruby_major = $2 AND ruby_minor = $3 AND setting NOT IN
                 (SELECT setting FROM gctrace_advised WHERE app = $1 AND ruby_major = $2 AND ruby_minor = $3
                  ORDER BY given DESC LIMIT $4)",
            &[&app, &major, &minor, &i64::from(most)],
        )?;
        transaction.commit()
    })
}

/// See [`Store::advised`](super::super::Store::advised).
pub(super) fn advised(store: &Postgres, group: Group) -> Result<Vec<String>, StoreError> {
    let (app, major, minor) = of_group(group);
    let query = "SELECT setting FROM gctrace_advised WHERE app = $1 AND ruby_major = $2 AND ruby_minor = $3";
    store.with(Retry::Yes, |client| {
        client.query(query, &[&app, &major, &minor])?.iter().map(|row| row.try_get(0)).collect()
    })
}
