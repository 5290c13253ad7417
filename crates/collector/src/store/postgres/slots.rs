//! Figures of processes over time.

use postgres::{Row, Transaction};

use super::{
    super::{App, BATCH, FIGURES, MAX_SLOTS, NewSet, Slot, StoreError, added_up, adding},
    Postgres, Retry, of_group,
};
use crate::{
    digest::{CLASSES, Figures},
    tune::Series,
};

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

/// Adds the figures of a set to its slot; an application with too many slots loses its oldest ones.
pub(super) fn add(transaction: &mut Transaction<'_>, set: &NewSet<'_>) -> Result<(), postgres::Error> {
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

/// See [`Store::slots`](super::Store::slots).
pub(super) fn list(store: &Postgres, app: App, since: i64) -> Result<Vec<Slot>, StoreError> {
    let query = format!(
        "SELECT at, ruby_major, ruby_minor, environment, host, pid, {FIGURES} FROM gctrace_slot
         WHERE app = $1 AND at >= $2 ORDER BY at DESC LIMIT $3"
    );
    let rows =
        store.with(Retry::Yes, |client| client.query(&query, &[&app.0, &since, &i64::from(MAX_SLOTS)]))?;
    rows.iter().map(|row| Ok(slot(row)?)).collect()
}

/// See [`Store::roll_up`](super::Store::roll_up).
pub(super) fn roll_up(
    store: &Postgres,
    app: App,
    from: i64,
    before: i64,
    width: i64,
) -> Result<u64, StoreError> {
    // PostgreSQL's sums of integers are numeric: cast them back.
    let sums = added_up();
    let sums: Vec<String> = sums
        .split(", ")
        .map(|sum| if sum.contains("seconds") { sum.to_owned() } else { format!("{sum}::BIGINT") })
        .collect();
    let statement = format!(
        "WITH gone AS (DELETE FROM gctrace_slot WHERE app = $1 AND at >= $2 AND at < $3 AND at % $4 <> 0 RETURNING *),
             added AS (INSERT INTO gctrace_slot (app, at, ruby_major, ruby_minor, environment, host, pid, sets, {FIGURES})
                 SELECT app, at / $4 * $4 AS began, ruby_major, ruby_minor, environment, host, pid, sum(sets)::BIGINT, {}
                 FROM gone GROUP BY app, began, ruby_major, ruby_minor, environment, host, pid
                 ON CONFLICT (app, at, ruby_major, ruby_minor, environment, host, pid) DO UPDATE SET {}
                 RETURNING (xmax = 0) AS new),
             fewer AS (SELECT (SELECT count(*) FROM gone) - (SELECT count(*) FROM added WHERE new) AS slots)
         UPDATE gctrace_app SET slots = gctrace_app.slots - fewer.slots FROM fewer WHERE id = $1 RETURNING fewer.slots",
        sums.join(", "),
        adding("gctrace_slot", "greatest")
    );
    let fewer: Option<i64> = store.with(Retry::No, |client| {
        let mut transaction = client.transaction()?;
        lock(&mut transaction, app.0)?;
        let row = transaction.query_opt(&statement, &[&app.0, &from, &before, &width])?;
        transaction.commit()?;
        row.map(|row| row.try_get(0)).transpose()
    })?;
    Ok(fewer.map_or(0, i64::unsigned_abs))
}

/// Locks an application before its slots, as a set that is being stored does: otherwise the two could wait for each other.
fn lock(transaction: &mut Transaction<'_>, app: i64) -> Result<(), postgres::Error> {
    transaction.query_opt("SELECT id FROM gctrace_app WHERE id = $1 FOR NO KEY UPDATE", &[&app])?;
    Ok(())
}

/// Deletes the old slots of an application.
fn prune_of(store: &Postgres, app: i64, before: i64) -> Result<(), StoreError> {
    store.with(Retry::Yes, |client| {
        let mut transaction = client.transaction()?;
        lock(&mut transaction, app)?;
        let delete = "DELETE FROM gctrace_slot WHERE app = $1 AND at < $2";
        let gone = transaction.execute(delete, &[&app, &before])?;
        if gone > 0 {
            let count = "UPDATE gctrace_app SET slots = slots - $2 WHERE id = $1";
            transaction.execute(count, &[&app, &(gone as i64)])?;
        }
        transaction.commit()
    })
}

/// Whether the database answered. Otherwise each further attempt would wait for a connection.
fn is_answer(error: &StoreError) -> bool {
    matches!(error, StoreError::Postgres(error) if error.as_db_error().is_some())
}

/// See [`Store::prune_slots`](super::Store::prune_slots).
pub(super) fn prune(store: &Postgres, before: i64) -> Result<(), StoreError> {
    let ids = "SELECT id FROM gctrace_app a
         WHERE EXISTS (SELECT 1 FROM gctrace_slot WHERE app = a.id AND at < $1) ORDER BY id";
    let apps: Vec<i64> = store.with(Retry::Yes, |client| {
        client.query(ids, &[&before])?.iter().map(|row| row.try_get(0)).collect()
    })?;
    // One by one: their slots have an index by application, and one statement for all could exceed its time.
    let mut slots = Ok(());
    for app in apps {
        let pruned = prune_of(store, app, before);
        if pruned.as_ref().is_err_and(|error| !is_answer(error)) {
            return pruned;
        }
        slots = slots.and(pruned);
    }
    let at = before as f64;
    let rest = [
        "UPDATE gctrace_environment SET summary = NULL, summarized = NULL, seen = NULL WHERE seen < $1",
        "DELETE FROM gctrace_period WHERE last < $1",
        "DELETE FROM gctrace_gone WHERE received < $1",
    ];
    let rest =
        rest.map(|statement| store.with(Retry::Yes, |client| client.execute(statement, &[&at])).map(drop));
    // A failure does not keep the others.
    rest.into_iter().fold(slots, Result::and)
}
