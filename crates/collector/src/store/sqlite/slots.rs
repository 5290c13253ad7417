//! Figures of processes over time.

use rusqlite::{Connection, OptionalExtension as _, Transaction, TransactionBehavior, params};

use super::super::{App, BATCH, FIGURES, Group, MAX_SLOTS, NewSet, Slot, StoreError, added_up, adding};
use crate::{
    digest::{CLASSES, Figures},
    tune::Series,
};

/// Adds the figures of a set to its slot; an application with too many slots loses its oldest ones.
pub(super) fn add(transaction: &Transaction<'_>, set: &NewSet<'_>) -> Result<(), rusqlite::Error> {
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

/// See [`Store::slots`](super::Store::slots).
pub(super) fn list(reader: &Connection, app: App, since: i64) -> Result<Vec<Slot>, StoreError> {
    let mut query = reader.prepare_cached(&format!(
        "SELECT at, ruby_major, ruby_minor, environment, host, pid, {FIGURES} FROM slot
         WHERE app = ?1 AND at >= ?2 ORDER BY at DESC LIMIT ?3"
    ))?;
    let mut rows = query.query(params![app.0, since, MAX_SLOTS])?;
    let mut slots = Vec::new();
    while let Some(row) = rows.next()? {
        let mut classes = [0; CLASSES];
        for (at, class) in classes.iter_mut().enumerate() {
            *class = row.get(10 + at)?;
        }
        slots.push(Slot {
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
        });
    }
    Ok(slots)
}

/// See [`Store::roll_up`](super::Store::roll_up).
pub(super) fn roll_up(
    writer: &mut Connection,
    app: App,
    from: i64,
    before: i64,
    width: i64,
) -> Result<u64, StoreError> {
    const FINER: &str = "app = ?1 AND at >= ?2 AND at < ?3 AND at % ?4 != 0";
    let range = params![app.0, from, before, width];
    let transaction = Transaction::new(writer, TransactionBehavior::Immediate)?;
    let known = "SELECT slots FROM app WHERE id = ?1";
    let slots: Option<u64> = transaction.query_row(known, [app.0], |row| row.get(0)).optional()?;
    // It may have been deleted since the applications were listed.
    let Some(slots) = slots else { return Ok(0) };
    let added = format!(
        "INSERT INTO slot (app, at, ruby_major, ruby_minor, environment, host, pid, sets, {FIGURES})
         SELECT app, at / ?4 * ?4 AS began, ruby_major, ruby_minor, environment, host, pid, sum(sets), {}
         FROM slot WHERE {FINER} GROUP BY began, ruby_major, ruby_minor, environment, host, pid
         ON CONFLICT DO UPDATE SET {}",
        added_up(),
        adding("slot", "max")
    );
    transaction.prepare_cached(&added)?.execute(range)?;
    let gone = transaction.prepare_cached(&format!("DELETE FROM slot WHERE {FINER}"))?.execute(range)?;
    if gone == 0 {
        return Ok(0);
    }
    let count =
        "UPDATE app SET slots = (SELECT count(*) FROM slot WHERE app = ?1) WHERE id = ?1 RETURNING slots";
    let left: u64 = transaction.query_row(count, [app.0], |row| row.get(0))?;
    transaction.commit()?;
    Ok(slots.saturating_sub(left))
}

/// See [`Store::prune_slots`](super::Store::prune_slots).
pub(super) fn prune(writer: &mut Connection, before: i64) -> Result<(), StoreError> {
    let transaction = Transaction::new(writer, TransactionBehavior::Immediate)?;
    transaction.execute("DELETE FROM slot WHERE app IN (SELECT id FROM app) AND at < ?1", [before])?;
    transaction.execute("UPDATE app SET slots = (SELECT count(*) FROM slot WHERE slot.app = app.id)", [])?;
    let forget = "UPDATE environment SET summary = NULL, summarized = NULL, seen = NULL WHERE seen < ?1";
    transaction.execute(forget, [before])?;
    transaction.execute("DELETE FROM period WHERE last < ?1", [before])?;
    transaction.execute("DELETE FROM gone WHERE received < ?1", [before])?;
    Ok(transaction.commit()?)
}
