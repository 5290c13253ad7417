//! Environments of sets, and the advice given.

use std::collections::HashMap;

use rusqlite::{Connection, OptionalExtension as _, Row, params};

use super::{
    super::{
        App, BATCH, Environment, Given, Group, MAX_GONE, MOST_PERIODS, Numbered, Period, StoreError,
        in_force_of, periods_of,
    },
    group,
};
use crate::tune::{
    Evidence, Series, Strategy,
    history::{GAP, Times},
};

/// Assigns environments to the sets of an earlier release. Unreadable sets get none, and are left out of recommendations.
pub(super) fn name_all(connection: &Connection) -> Result<(), StoreError> {
    let mut sets = connection.prepare(
        "SELECT app, ruby_major, ruby_minor, number, evidence, received FROM sample_set ORDER BY number",
    )?;
    let mut rows = sets.query([])?;
    while let Some(row) = rows.next()? {
        let group = group(row)?;
        let text = row.get_ref(4)?.as_str();
        let Some(key) = text.ok().and_then(|text| in_force_of(text, group.series).ok()) else { continue };
        let environment = id_of(connection, group, &key, row.get(5)?)?;
        seen_at(connection, environment, [row.get(5)?; 2])?;
        let number: i64 = row.get(3)?;
        connection
            .prepare_cached("UPDATE sample_set SET environment = ?1 WHERE number = ?2")?
            .execute([environment, number])?;
    }
    Ok(())
}

/// The id of an environment, which is created if it does not exist; its first set arrived at `received`.
pub(super) fn id_of(
    connection: &Connection,
    group: Group,
    key: &str,
    received: f64,
) -> Result<i64, StoreError> {
    let Series(major, minor) = group.series;
    let names = params![group.app.0, major, minor, key];
    let mut find = connection.prepare_cached(
        "SELECT id FROM environment WHERE app = ?1 AND ruby_major = ?2 AND ruby_minor = ?3 AND in_force = ?4",
    )?;
    if let Some(id) = find.query_row(names, |row| row.get(0)).optional()? {
        return Ok(id);
    }
    let mut insert = connection.prepare_cached(
        "INSERT INTO environment (app, ruby_major, ruby_minor, in_force, first) VALUES (?1, ?2, ?3, ?4, ?5)
         ON CONFLICT (app, ruby_major, ruby_minor, in_force) DO UPDATE SET in_force = in_force RETURNING id",
    )?;
    Ok(insert.query_row(params![group.app.0, major, minor, key, received], |row| row.get(0))?)
}

/// Records a set of this environment: the periods within [`GAP`] of it are merged, whatever the order in which sets arrive.
pub(super) fn seen_at(
    connection: &Connection,
    environment: i64,
    [first, last]: [f64; 2],
) -> Result<(), rusqlite::Error> {
    type Touched = (Option<i64>, Option<f64>, Option<f64>, i64);
    let near = "environment = ?1 AND first <= ?3 + ?4 AND last >= ?2 - ?4";
    let touched =
        format!("SELECT min(id), min(first), max(last), coalesce(sum(sets), 0) FROM period WHERE {near}");
    let params = params![environment, first, last, GAP];
    let (id, begin, end, sets): Touched = connection
        .prepare_cached(&touched)?
        .query_row(params, |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?)))?;
    let (begin, end) = (begin.map_or(first, |begin| begin.min(first)), end.map_or(last, |end| end.max(last)));
    let sets = sets + 1;
    if let Some(id) = id {
        connection
            .prepare_cached(&format!("DELETE FROM period WHERE {near} AND id != ?5"))?
            .execute(params![environment, first, last, GAP, id])?;
        connection
            .prepare_cached("UPDATE period SET first = ?2, last = ?3, sets = ?4 WHERE id = ?1")?
            .execute(params![id, begin, end, sets])?;
    } else {
        connection
            .prepare_cached("INSERT INTO period (environment, first, last, sets) VALUES (?1, ?2, ?3, ?4)")?
            .execute(params![environment, begin, end, sets])?;
    }
    connection
        .prepare_cached(
            "UPDATE environment SET since = ?2, until = ?3, stretch = ?4 WHERE id = ?1 AND coalesce(until <= ?3, true)",
        )?
        .execute(params![environment, begin, end, sets])?;
    Ok(())
}

/// See [`Store::periods`](super::super::Store::periods).
pub(super) fn periods(reader: &Connection, group: Group, most: u32) -> Result<Vec<Period>, StoreError> {
    let mut query = reader.prepare_cached(
        "SELECT p.environment, p.first, p.last FROM period p JOIN environment e ON e.id = p.environment
         WHERE e.app = ?1 AND e.ruby_major = ?2 AND e.ruby_minor = ?3 ORDER BY p.last DESC LIMIT ?4",
    )?;
    let Series(major, minor) = group.series;
    let rows = query.query_map(params![group.app.0, major, minor, MOST_PERIODS], |row| {
        Ok(Period { environment: row.get(0)?, first: row.get(1)?, last: row.get(2)? })
    })?;
    Ok(periods_of(rows.collect::<Result<_, _>>()?, most))
}

/// The columns of an environment `e`, whose latest set is `s`.
const ENVIRONMENT: &str = "e.id, e.in_force, coalesce(s.number, e.summarized), coalesce(s.received, e.seen),
         coalesce(e.first, s.received, e.seen), e.summarized, coalesce(e.since, s.received, e.seen),
         coalesce(e.until, s.received, e.seen) AS at, coalesce(e.stretch, 1)";
/// The latest set of an environment.
const LATEST: &str = "(SELECT number FROM sample_set WHERE environment = e.id ORDER BY number DESC LIMIT 1)";

fn environment(row: &Row<'_>) -> Result<Environment, rusqlite::Error> {
    Ok(Environment {
        id: row.get(0)?,
        key: row.get(1)?,
        latest: row.get(2)?,
        seen: row.get(3)?,
        first: row.get(4)?,
        summarized: row.get(5)?,
        times: Times { since: row.get(6)?, until: row.get(7)?, sets: row.get(8)? },
    })
}

/// See [`Store::environments`](super::super::Store::environments).
pub(super) fn list(reader: &Connection, group: Group, most: u32) -> Result<Vec<Environment>, StoreError> {
    // By the sets' own times: sets may arrive late, and set numbers restart if all sets were deleted.
    let mut query = reader.prepare_cached(&format!(
        "SELECT {ENVIRONMENT} FROM environment e LEFT JOIN sample_set s ON s.number = {LATEST}
         WHERE e.app = ?1 AND e.ruby_major = ?2 AND e.ruby_minor = ?3 AND coalesce(s.number, e.summarized) IS NOT NULL
         ORDER BY at DESC, s.number DESC LIMIT ?4"
    ))?;
    let Series(major, minor) = group.series;
    let rows = query.query_map(params![group.app.0, major, minor, most], environment)?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// See [`Store::environment`](super::super::Store::environment).
pub(super) fn find(reader: &Connection, id: i64) -> Result<Option<Environment>, StoreError> {
    let mut query = reader.prepare_cached(&format!(
        "SELECT {ENVIRONMENT} FROM environment e LEFT JOIN sample_set s ON s.number = {LATEST}
         WHERE e.id = ?1 AND coalesce(s.number, e.summarized) IS NOT NULL"
    ))?;
    Ok(query.query_row([id], environment).optional()?)
}

/// See [`Store::forget_environments`](super::super::Store::forget_environments).
pub(super) fn forget(writer: &Connection, app: App, most: u32) -> Result<(), StoreError> {
    writer.execute(
        "DELETE FROM environment WHERE id IN (SELECT id FROM (
             SELECT id, seen, row_number() OVER (PARTITION BY ruby_major, ruby_minor ORDER BY seen DESC NULLS LAST) AS place
             FROM environment e WHERE app = ?1 AND NOT EXISTS (SELECT 1 FROM sample_set s WHERE s.environment = e.id)
         ) WHERE seen IS NULL OR place > ?2)",
        params![app.0, most],
    )?;
    writer.execute(
        "DELETE FROM gone WHERE app = ?1 AND place <=
             (SELECT place FROM gone WHERE app = ?1 ORDER BY place DESC LIMIT 1 OFFSET ?2)",
        params![app.0, MAX_GONE],
    )?;
    Ok(())
}

/// See [`Store::unsummarized`](super::super::Store::unsummarized).
pub(super) fn unsummarized(reader: &Connection) -> Result<Vec<Environment>, StoreError> {
    let mut query = reader.prepare_cached(&format!(
        "SELECT {ENVIRONMENT} FROM environment e JOIN sample_set s ON s.number = {LATEST}
         WHERE e.summarized IS NOT s.number AND s.number < (SELECT max(number) FROM sample_set o
             WHERE o.app = e.app AND o.ruby_major = e.ruby_major AND o.ruby_minor = e.ruby_minor) LIMIT ?1"
    ))?;
    let rows = query.query_map([BATCH], environment)?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// See [`Store::summarize`](super::super::Store::summarize).
pub(super) fn summarize(
    writer: &Connection,
    environment: &Environment,
    evidence: &Evidence,
) -> Result<(), StoreError> {
    writer.execute(
        "UPDATE environment SET summary = ?2, summarized = ?3, seen = ?4 WHERE id = ?1",
        params![environment.id, serde_json::to_string(evidence)?, environment.latest, environment.seen],
    )?;
    Ok(())
}

/// See [`Store::summary`](super::super::Store::summary).
pub(super) fn summary(reader: &Connection, environment: i64) -> Result<Option<Evidence>, StoreError> {
    let mut query = reader.prepare_cached("SELECT summary FROM environment WHERE id = ?1")?;
    let text: Option<Option<String>> = query.query_row([environment], |row| row.get(0)).optional()?;
    Ok(text.flatten().map(|text| serde_json::from_str(&text)).transpose()?)
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
pub(super) fn advised(reader: &Connection, app: App) -> Result<HashMap<String, f64>, StoreError> {
    let mut query =
        reader.prepare_cached("SELECT setting, max(given) FROM advised WHERE app = ?1 GROUP BY setting")?;
    let rows = query.query_map([app.0], |row| Ok((row.get(0)?, row.get(1)?)))?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// See [`Store::note`](super::super::Store::note).
pub(super) fn note(
    writer: &mut Connection,
    group: Group,
    given: &Given,
    replaces: bool,
    most: u32,
) -> Result<(), StoreError> {
    let transaction = writer.transaction()?;
    let Series(major, minor) = group.series;
    let strategy = given.strategy.name();
    if replaces {
        transaction.execute(
            "UPDATE given SET settings = ?6, last = ?7 WHERE id = (SELECT max(id) FROM given
                 WHERE app = ?1 AND ruby_major = ?2 AND ruby_minor = ?3 AND strategy = ?4 AND in_force = ?5)",
            params![group.app.0, major, minor, strategy, given.in_force, given.settings, given.last],
        )?;
    } else {
        transaction.execute(
            "INSERT INTO given (app, ruby_major, ruby_minor, strategy, in_force, settings, withdrawal, first, last)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
            params![
                group.app.0,
                major,
                minor,
                strategy,
                given.in_force,
                given.settings,
                given.withdrawal,
                given.first,
                given.last
            ],
        )?;
        transaction.execute(
            "DELETE FROM given WHERE app = ?1 AND ruby_major = ?2 AND ruby_minor = ?3 AND id NOT IN
                 (SELECT id FROM given WHERE app = ?1 AND ruby_major = ?2 AND ruby_minor = ?3
                  ORDER BY id DESC LIMIT ?4)",
            params![group.app.0, major, minor, most],
        )?;
    }
    Ok(transaction.commit()?)
}

/// See [`Store::given`](super::super::Store::given).
pub(super) fn given(reader: &Connection, group: Group) -> Result<Vec<Given>, StoreError> {
    let mut query = reader.prepare_cached(
        "SELECT strategy, in_force, settings, withdrawal, first, last FROM given
         WHERE app = ?1 AND ruby_major = ?2 AND ruby_minor = ?3 ORDER BY id",
    )?;
    let Series(major, minor) = group.series;
    let rows = query.query_map(params![group.app.0, major, minor], |row| {
        let strategy = Strategy::parse(&row.get::<_, String>(0)?);
        Ok(strategy.zip(Some((row.get(1)?, row.get(2)?, row.get(3)?, row.get(4)?, row.get(5)?))))
    })?;
    let mut all = Vec::new();
    for row in rows {
        // Strategies added by a later release are left out.
        let Some((strategy, (in_force, settings, withdrawal, first, last))) = row? else { continue };
        all.push(Given { strategy, in_force, settings, withdrawal, first, last });
    }
    Ok(all)
}
