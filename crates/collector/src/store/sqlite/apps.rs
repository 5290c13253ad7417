//! Applications and their tokens.

use rusqlite::{Connection, OptionalExtension as _, Row, Transaction, TransactionBehavior, params};

use super::super::{App, AppInfo, NewApp, Rights, StoreError, Token, TokenHash};

/// See [`Store::register`](super::Store::register).
pub(super) fn register(
    writer: &mut Connection,
    app: &NewApp<'_>,
    token: TokenHash,
    rights: Rights,
) -> Result<App, StoreError> {
    let transaction = Transaction::new(writer, TransactionBehavior::Immediate)?;
    if let Some(parent) = app.parent {
        let query = "SELECT parent IS NOT NULL FROM app WHERE id = ?1";
        match transaction.query_row(query, [parent.0], |row| row.get(0)).optional()? {
            None => return Err(StoreError::Unknown(parent)),
            Some(true) => return Err(StoreError::Part(parent)),
            Some(false) => {}
        }
    }
    // Bookmarks and scripts contain numbers, so the number of a deleted application must never be reused.
    let id: i64 = transaction.query_row(
        "UPDATE app_number SET last = max(last, (SELECT coalesce(max(id), 0) FROM app)) + 1 RETURNING last",
        [],
        |row| row.get(0),
    )?;
    // The hash column is left over from an earlier release (see the tables).
    let insert = "INSERT INTO app (id, token_hash, email, name, created, parent)
         VALUES (?1, randomblob(32), ?2, ?3, ?4, ?5)";
    let parent = app.parent.map(|parent| parent.0);
    transaction.execute(insert, params![id, app.email, app.name, app.created, parent])?;
    let id = App(id);
    add_token(&transaction, &Token { hash: token, app: Some(id), rights, created: app.created, ends: None })?;
    transaction.commit()?;
    Ok(id)
}

/// See [`Store::apps`](super::Store::apps).
pub(super) fn list(reader: &Connection) -> Result<Vec<AppInfo>, StoreError> {
    let mut query = reader.prepare_cached(
        "SELECT id, name, email, created, sets, bytes,
             (SELECT received FROM sample_set WHERE app = app.id ORDER BY number DESC LIMIT 1), parent
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
            parent: row.get::<_, Option<i64>>(7)?.map(App),
        })
    })?;
    Ok(apps.collect::<Result<_, _>>()?)
}

/// See [`Store::delete_app`](super::Store::delete_app).
pub(super) fn delete(writer: &mut Connection, app: App) -> Result<bool, StoreError> {
    let transaction = Transaction::new(writer, TransactionBehavior::Immediate)?;
    for table in ["sample_set", "slot"] {
        let delete =
            format!("DELETE FROM {table} WHERE app IN (SELECT id FROM app WHERE id = ?1 OR parent = ?1)");
        transaction.execute(&delete, [app.0])?;
    }
    // Its parts, tokens, environments and advice are deleted with it.
    let rows = transaction.execute("DELETE FROM app WHERE id = ?1", [app.0])?;
    transaction.commit()?;
    Ok(rows == 1)
}

const TOKEN: &str = "hash, app, rights, created, ends";

fn token_of(row: &Row<'_>) -> Result<Option<Token>, rusqlite::Error> {
    // Rights added by a later release count as no rights here.
    let Some(rights) = Rights::parse(&row.get::<_, String>(2)?) else { return Ok(None) };
    Ok(Some(Token {
        hash: TokenHash(row.get(0)?),
        app: row.get::<_, Option<i64>>(1)?.map(App),
        rights,
        created: row.get(3)?,
        ends: row.get(4)?,
    }))
}

/// See [`Store::token`](super::Store::token).
pub(super) fn token(reader: &Connection, token: TokenHash) -> Result<Option<Token>, StoreError> {
    let mut query = reader.prepare_cached(&format!("SELECT {TOKEN} FROM token WHERE hash = ?1"))?;
    Ok(query.query_row([token.0], token_of).optional()?.flatten())
}

/// See [`Store::tokens`](super::Store::tokens).
pub(super) fn tokens(reader: &Connection) -> Result<Vec<Token>, StoreError> {
    let mut query = reader.prepare_cached(&format!("SELECT {TOKEN} FROM token ORDER BY created, hash"))?;
    let tokens = query.query_map([], token_of)?;
    Ok(tokens.filter_map(Result::transpose).collect::<Result<_, _>>()?)
}

/// See [`Store::add_token`](super::Store::add_token).
pub(super) fn add_token(writer: &Connection, token: &Token) -> Result<(), StoreError> {
    writer.execute(
        &format!("INSERT INTO token ({TOKEN}) VALUES (?1, ?2, ?3, ?4, ?5)"),
        params![token.hash.0, token.app.map(|app| app.0), token.rights.name(), token.created, token.ends],
    )?;
    Ok(())
}

/// See [`Store::end_token`](super::Store::end_token).
pub(super) fn end_token(writer: &Connection, token: TokenHash, at: f64) -> Result<bool, StoreError> {
    let update = "UPDATE token SET ends = min(coalesce(ends, ?2), ?2) WHERE hash = ?1";
    Ok(writer.execute(update, params![token.0, at])? == 1)
}
