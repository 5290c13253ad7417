//! Applications and their tokens.

use postgres::{GenericClient, Row};

use super::{
    super::{App, AppInfo, NewApp, Rights, StoreError, Token, TokenHash},
    Postgres, Retry, text,
};

/// See [`Store::register`](super::Store::register).
pub(super) fn register(
    store: &Postgres,
    app: &NewApp<'_>,
    token: TokenHash,
    rights: Rights,
) -> Result<App, StoreError> {
    let (email, name) = (text(app.email), text(app.name));
    let insert =
        "INSERT INTO gctrace_app (email, name, created, parent) VALUES ($1, $2, $3, $4) RETURNING id";
    store.with(Retry::No, |client| {
        let mut transaction = client.transaction()?;
        if let Some(parent) = app.parent {
            let is_part = "SELECT parent IS NOT NULL FROM gctrace_app WHERE id = $1";
            match transaction.query_opt(is_part, &[&parent.0])?.map(|row| row.try_get(0)).transpose()? {
                None => return Ok(Err(StoreError::Unknown(parent))),
                Some(true) => return Ok(Err(StoreError::Part(parent))),
                Some(false) => {}
            }
        }
        let parent = app.parent.map(|parent| parent.0);
        let row = transaction.query_one(insert, &[&email, &name, &app.created, &parent])?;
        let id = App(row.try_get(0)?);
        let token = Token { hash: token, app: Some(id), rights, created: app.created, ends: None };
        add_token(&mut transaction, &token)?;
        transaction.commit()?;
        Ok(Ok(id))
    })?
}

/// See [`Store::apps`](super::Store::apps).
pub(super) fn list(store: &Postgres) -> Result<Vec<AppInfo>, StoreError> {
    let query = "SELECT id, name, email, created, sets, bytes,
             (SELECT received FROM gctrace_sample_set AS s WHERE s.app = a.id ORDER BY number DESC LIMIT 1), parent
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
            parent: row.try_get::<_, Option<i64>>(7)?.map(App),
        })
    };
    store.with(Retry::Yes, |client| client.query(query, &[])?.iter().map(info).collect())
}

/// See [`Store::delete_app`](super::Store::delete_app).
pub(super) fn delete(store: &Postgres, app: App) -> Result<bool, StoreError> {
    let rows = store.with(Retry::Yes, |client| {
        let mut transaction = client.transaction()?;
        // Prevents a set or a part from being added meanwhile.
        let lock = "SELECT id FROM gctrace_app WHERE id = $1 OR parent = $1 ORDER BY id FOR UPDATE";
        let ids: Vec<i64> =
            transaction.query(lock, &[&app.0])?.iter().map(|row| row.try_get(0)).collect::<Result<_, _>>()?;
        for table in ["gctrace_sample_set", "gctrace_slot"] {
            transaction.execute(&format!("DELETE FROM {table} WHERE app = ANY($1)"), &[&ids])?;
        }
        // Its parts, tokens, environments and advice are deleted with it.
        let rows = transaction.execute("DELETE FROM gctrace_app WHERE id = $1", &[&app.0])?;
        transaction.commit()?;
        Ok(rows)
    })?;
    Ok(rows == 1)
}

const TOKEN: &str = "hash, app, rights, created, ends";

fn token_of(row: &Row) -> Result<Option<Token>, postgres::Error> {
    let hash: &[u8] = row.try_get(0)?;
    // Rights added by a later release count as no rights here; hashes have 32 bytes.
    let (Some(rights), Ok(hash)) = (Rights::parse(row.try_get(2)?), hash.try_into()) else { return Ok(None) };
    Ok(Some(Token {
        hash: TokenHash(hash),
        app: row.try_get::<_, Option<i64>>(1)?.map(App),
        rights,
        created: row.try_get(3)?,
        ends: row.try_get(4)?,
    }))
}

/// See [`Store::token`](super::Store::token).
pub(super) fn token(store: &Postgres, token: TokenHash) -> Result<Option<Token>, StoreError> {
    let query = format!("SELECT {TOKEN} FROM gctrace_token WHERE hash = $1");
    store.with(Retry::Yes, |client| {
        let row = client.query_opt(&query, &[&token.0.as_slice()])?;
        Ok(row.as_ref().map(token_of).transpose()?.flatten())
    })
}

/// See [`Store::tokens`](super::Store::tokens).
pub(super) fn tokens(store: &Postgres) -> Result<Vec<Token>, StoreError> {
    let query = format!("SELECT {TOKEN} FROM gctrace_token ORDER BY created, hash");
    store.with(Retry::Yes, |client| {
        client.query(&query, &[])?.iter().filter_map(|row| token_of(row).transpose()).collect()
    })
}

/// See [`Store::add_token`](super::Store::add_token).
pub(super) fn add_token(client: &mut impl GenericClient, token: &Token) -> Result<(), postgres::Error> {
    let insert = format!("INSERT INTO gctrace_token ({TOKEN}) VALUES ($1, $2, $3, $4, $5)");
    let (hash, app) = (token.hash.0.as_slice(), token.app.map(|app| app.0));
    client.execute(&insert, &[&hash, &app, &token.rights.name(), &token.created, &token.ends])?;
    Ok(())
}

/// See [`Store::end_token`](super::Store::end_token).
pub(super) fn end_token(store: &Postgres, token: TokenHash, at: f64) -> Result<bool, StoreError> {
    // `least` ignores NULL.
    let update = "UPDATE gctrace_token SET ends = least(ends, $2) WHERE hash = $1";
    let rows = store.with(Retry::Yes, |client| client.execute(update, &[&token.0.as_slice(), &at]))?;
    Ok(rows == 1)
}
