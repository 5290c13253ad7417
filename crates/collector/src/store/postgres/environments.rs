//! Environments of sets, and the advice given.

use std::collections::HashMap;

use postgres::{GenericClient, Row, Transaction};

use super::{
    super::{
        App, BATCH, Environment, Given, Group, MAX_GONE, MOST_PERIODS, Numbered, Period, StoreError,
        in_force_of, periods_of,
    },
    Postgres, Retry, group, of_group,
};
use crate::tune::{
    Evidence, Strategy,
    history::{GAP, Times},
};

/// Assigns environments to the sets of an earlier release. Unreadable sets get none, and are left out of recommendations.
pub(super) fn name_all(transaction: &mut Transaction<'_>) -> Result<(), postgres::Error> {
    const AT_A_TIME: i64 = 1000;
    let mut after = 0_i64;
    loop {
        let rows = transaction.query(
            "SELECT app, ruby_major, ruby_minor, number, evidence, received FROM gctrace_sample_set
             WHERE number > $1 ORDER BY number LIMIT $2",
            &[&after, &AT_A_TIME],
        )?;
        let Some(last) = rows.last() else { return Ok(()) };
        after = last.try_get(3)?;
        for row in &rows {
            let group = group(row)?;
            let Ok(key) = in_force_of(row.try_get(4)?, group.series) else { continue };
            let id = id_of(transaction, group, &key, row.try_get(5)?)?;
            seen_at(transaction, id, [row.try_get(5)?; 2])?;
            let number: i64 = row.try_get(3)?;
            transaction.execute(
                "UPDATE gctrace_sample_set SET environment = $1 WHERE number = $2",
                &[&id, &number],
            )?;
        }
    }
}

/// The id of an environment, which is created if it does not exist; its first set arrived at `received`.
pub(super) fn id_of(
    client: &mut impl GenericClient,
    group: Group,
    key: &str,
    received: f64,
) -> Result<i64, postgres::Error> {
    let (app, major, minor) = of_group(group);
    let find = "SELECT id FROM gctrace_environment
         WHERE app = $1 AND ruby_major = $2 AND ruby_minor = $3 AND in_force = $4";
    if let Some(row) = client.query_opt(find, &[&app, &major, &minor, &key])? {
        return row.try_get(0);
    }
    let insert = "INSERT INTO gctrace_environment (app, ruby_major, ruby_minor, in_force, first) VALUES ($1, $2, $3, $4, $5)
         ON CONFLICT (app, ruby_major, ruby_minor, in_force) DO UPDATE SET in_force = excluded.in_force RETURNING id";
    client.query_one(insert, &[&app, &major, &minor, &key, &received])?.try_get(0)
}

/// Records a set of this environment: the periods within [`GAP`] of it are merged, whatever the order in which sets arrive.
pub(super) fn seen_at(
    client: &mut impl GenericClient,
    environment: i64,
    [first, last]: [f64; 2],
) -> Result<(), postgres::Error> {
    let near =
        "environment = $1 AND first <= $3 + $4::DOUBLE PRECISION AND last >= $2 - $4::DOUBLE PRECISION";
    let touched = format!(
        "SELECT min(id), least(min(first), $2), greatest(max(last), $3), coalesce(sum(sets), 0)::BIGINT
         FROM gctrace_period WHERE {near}"
    );
    let row = client.query_one(&touched, &[&environment, &first, &last, &GAP])?;
    let (id, begin, end, sets): (Option<i64>, f64, f64, i64) =
        (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?, row.try_get(3)?);
    let sets = sets + 1;
    if let Some(id) = id {
        let others = format!("DELETE FROM gctrace_period WHERE {near} AND id <> $5");
        client.execute(&others, &[&environment, &first, &last, &GAP, &id])?;
        let go_on = "UPDATE gctrace_period SET first = $2, last = $3, sets = $4 WHERE id = $1";
        client.execute(go_on, &[&id, &begin, &end, &sets])?;
    } else {
        let new = "INSERT INTO gctrace_period (environment, first, last, sets) VALUES ($1, $2, $3, $4)";
        client.execute(new, &[&environment, &begin, &end, &sets])?;
    }
    let latest = "UPDATE gctrace_environment SET since = $2, until = $3, stretch = $4
         WHERE id = $1 AND coalesce(until <= $3, true)";
    client.execute(latest, &[&environment, &begin, &end, &sets])?;
    Ok(())
}

/// See [`Store::periods`](super::super::Store::periods).
pub(super) fn periods(store: &Postgres, group: Group, most: u32) -> Result<Vec<Period>, StoreError> {
    let (app, major, minor) = of_group(group);
    let query = "SELECT p.environment, p.first, p.last FROM gctrace_period p
             JOIN gctrace_environment e ON e.id = p.environment
         WHERE e.app = $1 AND e.ruby_major = $2 AND e.ruby_minor = $3 ORDER BY p.last DESC LIMIT $4";
    store.with(Retry::Yes, |client| {
        let rows = client.query(query, &[&app, &major, &minor, &i64::from(MOST_PERIODS)])?;
        let period = |row: &Row| {
            Ok(Period { environment: row.try_get(0)?, first: row.try_get(1)?, last: row.try_get(2)? })
        };
        Ok(periods_of(rows.iter().map(period).collect::<Result<_, postgres::Error>>()?, most))
    })
}

/// The columns of an environment `e`, whose latest set is `s`.
const ENVIRONMENT: &str = "e.id, e.in_force, coalesce(s.number, e.summarized), coalesce(s.received, e.seen),
         coalesce(e.first, s.received, e.seen), e.summarized, coalesce(e.since, s.received, e.seen),
         coalesce(e.until, s.received, e.seen) AS at, coalesce(e.stretch, 1)";
/// The latest set of an environment.
const LATEST: &str = "LATERAL (SELECT number, received FROM gctrace_sample_set
         WHERE environment = e.id ORDER BY number DESC LIMIT 1) s ON true";

fn environment(row: &Row) -> Result<Environment, postgres::Error> {
    Ok(Environment {
        id: row.try_get(0)?,
        key: row.try_get(1)?,
        latest: row.try_get(2)?,
        seen: row.try_get(3)?,
        first: row.try_get(4)?,
        summarized: row.try_get(5)?,
        times: Times {
            since: row.try_get(6)?,
            until: row.try_get(7)?,
            sets: row.try_get::<_, i64>(8)?.unsigned_abs(),
        },
    })
}

/// See [`Store::environments`](super::super::Store::environments).
pub(super) fn list(store: &Postgres, group: Group, most: u32) -> Result<Vec<Environment>, StoreError> {
    let (app, major, minor) = of_group(group);
    let query = format!(
        "SELECT {ENVIRONMENT} FROM gctrace_environment e LEFT JOIN {LATEST}
         WHERE e.app = $1 AND e.ruby_major = $2 AND e.ruby_minor = $3 AND coalesce(s.number, e.summarized) IS NOT NULL
         ORDER BY at DESC, s.number DESC NULLS LAST LIMIT $4"
    );
    store.with(Retry::Yes, |client| {
        let rows = client.query(&query, &[&app, &major, &minor, &i64::from(most)])?;
        rows.iter().map(environment).collect()
    })
}

/// See [`Store::environment`](super::super::Store::environment).
pub(super) fn find(store: &Postgres, id: i64) -> Result<Option<Environment>, StoreError> {
    let query = format!(
        "SELECT {ENVIRONMENT} FROM gctrace_environment e LEFT JOIN {LATEST}
         WHERE e.id = $1 AND coalesce(s.number, e.summarized) IS NOT NULL"
    );
    store.with(Retry::Yes, |client| client.query_opt(&query, &[&id])?.as_ref().map(environment).transpose())
}

/// See [`Store::forget_environments`](super::super::Store::forget_environments).
pub(super) fn forget(store: &Postgres, app: App, most: u32) -> Result<(), StoreError> {
    let forget = "DELETE FROM gctrace_environment WHERE id IN (SELECT id FROM (
             SELECT id, seen, row_number() OVER (PARTITION BY ruby_major, ruby_minor ORDER BY seen DESC NULLS LAST) AS place
             FROM gctrace_environment e
             WHERE app = $1 AND NOT EXISTS (SELECT 1 FROM gctrace_sample_set s WHERE s.environment = e.id)
         ) AS without WHERE seen IS NULL OR place > $2)";
    store.with(Retry::Yes, |client| {
        let mut transaction = client.transaction()?;
        // A set that is being stored may use an environment that has no sets now.
        transaction.query_opt("SELECT id FROM gctrace_app WHERE id = $1 FOR NO KEY UPDATE", &[&app.0])?;
        transaction.execute(forget, &[&app.0, &i64::from(most)])?;
        let gone = "DELETE FROM gctrace_gone WHERE app = $1 AND place <=
             (SELECT place FROM gctrace_gone WHERE app = $1 ORDER BY place DESC LIMIT 1 OFFSET $2)";
        transaction.execute(gone, &[&app.0, &i64::from(MAX_GONE)])?;
        transaction.commit()
    })
}

/// See [`Store::unsummarized`](super::super::Store::unsummarized).
pub(super) fn unsummarized(store: &Postgres) -> Result<Vec<Environment>, StoreError> {
    let query = format!(
        "SELECT {ENVIRONMENT} FROM gctrace_environment e JOIN {LATEST}
         WHERE e.summarized IS DISTINCT FROM s.number AND s.number < (SELECT max(number) FROM gctrace_sample_set o
             WHERE o.app = e.app AND o.ruby_major = e.ruby_major AND o.ruby_minor = e.ruby_minor) LIMIT $1"
    );
    store.with(Retry::Yes, |client| {
        client.query(&query, &[&i64::from(BATCH)])?.iter().map(environment).collect()
    })
}

/// See [`Store::summarize`](super::super::Store::summarize).
pub(super) fn summarize(
    store: &Postgres,
    environment: &Environment,
    evidence: &Evidence,
) -> Result<(), StoreError> {
    let text = serde_json::to_string(evidence)?;
    let update = "UPDATE gctrace_environment SET summary = $2, summarized = $3, seen = $4 WHERE id = $1";
    store.with(Retry::Yes, |client| {
        client.execute(update, &[&environment.id, &text, &environment.latest, &environment.seen])
    })?;
    Ok(())
}

/// See [`Store::summary`](super::super::Store::summary).
pub(super) fn summary(store: &Postgres, environment: i64) -> Result<Option<Evidence>, StoreError> {
    let query = "SELECT summary FROM gctrace_environment WHERE id = $1";
    let text: Option<String> = store.with(Retry::Yes, |client| {
        Ok(client.query_opt(query, &[&environment])?.map(|row| row.try_get(0)).transpose()?.flatten())
    })?;
    Ok(text.map(|text| serde_json::from_str(&text)).transpose()?)
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
pub(super) fn advised(store: &Postgres, app: App) -> Result<HashMap<String, f64>, StoreError> {
    let query = "SELECT setting, max(given) FROM gctrace_advised WHERE app = $1 GROUP BY setting";
    store.with(Retry::Yes, |client| {
        client.query(query, &[&app.0])?.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect()
    })
}

/// See [`Store::note`](super::super::Store::note).
pub(super) fn note(
    store: &Postgres,
    group: Group,
    given: &Given,
    replaces: bool,
    most: u32,
) -> Result<(), StoreError> {
    let (app, major, minor) = of_group(group);
    let (strategy, in_force, settings) = (given.strategy.name(), &given.in_force, &given.settings);
    store.with(Retry::Yes, |client| {
        if replaces {
            let update = "UPDATE gctrace_given SET settings = $6, last = $7 WHERE id = (SELECT max(id) FROM gctrace_given
                 WHERE app = $1 AND ruby_major = $2 AND ruby_minor = $3 AND strategy = $4 AND in_force = $5)";
            client.execute(update, &[&app, &major, &minor, &strategy, in_force, settings, &given.last])?;
            return Ok(());
        }
        let mut transaction = client.transaction()?;
        transaction.execute(
            "INSERT INTO gctrace_given (app, ruby_major, ruby_minor, strategy, in_force, settings, withdrawal, first, last)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)",
            &[
                &app,
                &major,
                &minor,
                &strategy,
                in_force,
                settings,
                &given.withdrawal,
                &given.first,
                &given.last,
            ],
        )?;
        transaction.execute(
            "DELETE FROM gctrace_given WHERE app = $1 AND ruby_major = $2 AND ruby_minor = $3 AND id NOT IN
                 (SELECT id FROM gctrace_given WHERE app = $1 AND ruby_major = $2 AND ruby_minor = $3
                  ORDER BY id DESC LIMIT $4)",
            &[&app, &major, &minor, &i64::from(most)],
        )?;
        transaction.commit()
    })
}

/// See [`Store::given`](super::super::Store::given).
pub(super) fn given(store: &Postgres, group: Group) -> Result<Vec<Given>, StoreError> {
    let (app, major, minor) = of_group(group);
    let query = "SELECT strategy, in_force, settings, withdrawal, first, last FROM gctrace_given
         WHERE app = $1 AND ruby_major = $2 AND ruby_minor = $3 ORDER BY id";
    store.with(Retry::Yes, |client| {
        let mut all = Vec::new();
        for row in client.query(query, &[&app, &major, &minor])? {
            // Strategies added by a later release are left out.
            let Some(strategy) = Strategy::parse(row.try_get(0)?) else { continue };
            all.push(Given {
                strategy,
                in_force: row.try_get(1)?,
                settings: row.try_get(2)?,
                withdrawal: row.try_get(3)?,
                first: row.try_get(4)?,
                last: row.try_get(5)?,
            });
        }
        Ok(all)
    })
}
