//! Environments of sets, and what was advised to whom.

use rusqlite::{Connection, OptionalExtension as _, params};

use super::{
    super::{Environment, Group, Numbered, StoreError, in_force_of},
    group,
};
use crate::tune::Series;

/// Gives the sets of an earlier release their environments.
pub(super) fn name_all(connection: &Connection) -> Result<(), StoreError> {
    let mut sets =
        connection.prepare("SELECT app, ruby_major, ruby_minor, number, evidence FROM sample_set")?;
    let mut rows = sets.query([])?;
    while let Some(row) = rows.next()? {
        let group = group(row)?;
        let text = row.get_ref(4)?.as_str().map_err(rusqlite::Error::from)?;
        let environment = id_of(connection, group, &in_force_of(text, group.series)?)?;
        let number: i64 = row.get(3)?;
        connection
            .prepare_cached("UPDATE sample_set SET environment = ?1 WHERE number = ?2")?
            .execute([environment, number])?;
    }
    Ok(())
}

/// The number of an environment, which is made if it is not there.
pub(super) fn id_of(connection: &Connection, group: Group, key: &str) -> Result<i64, StoreError> {
    let Series(major, minor) = group.series;
    let names = params![group.app.0, major, minor, key];
    let mut find = connection.prepare_cached(
        "SELECT id FROM environment WHERE app = ?1 AND ruby_major = ?2 AND ruby_minor = ?3 AND in_force = ?4",
    )?;
    if let Some(id) = find.query_row(names, |row| row.get(0)).optional()? {
        return Ok(id);
    }
    let mut insert = connection.prepare_cached(
        "INSERT INTO environment (app, ruby_major, ruby_minor, in_force) VALUES (?1, ?2, ?3, ?4)
         ON CONFLICT (app, ruby_major, ruby_minor, in_force) DO UPDATE SET in_force = in_force RETURNING id",
    )?;
    Ok(insert.query_row(names, |row| row.get(0))?)
}

/// See [`Store::environments`](super::super::Store::environments).
pub(super) fn list(reader: &Connection, group: Group, most: u32) -> Result<Vec<Environment>, StoreError> {
    let mut query = reader.prepare_cached(
        "SELECT e.id, e.in_force, s.number, s.received FROM environment e JOIN sample_set s ON s.number =
             (SELECT number FROM sample_set WHERE environment = e.id ORDER BY number DESC LIMIT 1)
         WHERE e.app = ?1 AND e.ruby_major = ?2 AND e.ruby_minor = ?3 ORDER BY s.number DESC LIMIT ?4",
    )?;
    let Series(major, minor) = group.series;
    let rows = query.query_map(params![group.app.0, major, minor, most], |row| {
        Ok(Environment { id: row.get(0)?, key: row.get(1)?, latest: row.get(2)?, seen: row.get(3)? })
    })?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// See [`Store::evidence`](super::super::Store::evidence).
pub(super) fn evidence(
    reader: &Connection,
    environment: i64,
    after: i64,
    most: u32,
) -> Result<Vec<Numbered>, StoreError> {
    let mut query = reader.prepare_cached(
        "SELECT number, evidence FROM sample_set WHERE environment = ?1 AND number > ?2 ORDER BY number DESC LIMIT ?3",
    )?;
    let mut rows = query.query(params![environment, after, most])?;
    let mut sets = Vec::new();
    while let Some(row) = rows.next()? {
        let text = row.get_ref(1)?.as_str().map_err(rusqlite::Error::from)?;
        sets.push((row.get(0)?, serde_json::from_str(text)?));
    }
    sets.reverse();
    Ok(sets)
}

/// See [`Store::advise`](super::super::Store::advise).
pub(super) fn advise(
    writer: &mut Connection,
    group: Group,
    settings: &[String],
    now: f64,
    most: u32,
) -> Result<(), StoreError> {
    let transaction = writer.transaction()?;
    let Series(major, minor) = group.series;
    for setting in settings {
        transaction.execute(
            "INSERT INTO advised (app, ruby_major, ruby_minor, setting, given) VALUES (?1, ?2, ?3, ?4, ?5)
             ON CONFLICT DO UPDATE SET given = excluded.given",
            params![group.app.0, major, minor, setting, now],
        )?;
    }
    transaction.execute(
        "DELETE FROM advised WHERE app = ?1 AND ruby_major = ?2 AND ruby_minor = ?3 AND setting NOT IN
             (SELECT setting FROM advised WHERE app = ?1 AND ruby_major = ?2 AND ruby_minor = ?3
              ORDER BY given DESC LIMIT ?4)",
        params![group.app.0, major, minor, most],
    )?;
    Ok(transaction.commit()?)
}

/// See [`Store::advised`](super::super::Store::advised).
pub(super) fn advised(reader: &Connection, group: Group) -> Result<Vec<String>, StoreError> {
    let mut query = reader.prepare_cached(
        "SELECT setting FROM advised WHERE app = ?1 AND ruby_major = ?2 AND ruby_minor = ?3",
    )?;
    let Series(major, minor) = group.series;
    let rows = query.query_map(params![group.app.0, major, minor], |row| row.get(0))?;
    Ok(rows.collect::<Result<_, _>>()?)
}
