//! Operator commands on the store: add, list and delete applications. The server may be running meanwhile.

use std::{fmt::Write as _, time::Duration};

use crate::{
    now,
    printable::printable,
    store::{App, AppInfo, BATCH, NewApp, Rights, Store, StoreError, Token, TokenHash, is_field, new_token},
};

/// A table of all applications, each followed by its parts.
pub fn list(store: &dyn Store) -> Result<String, StoreError> {
    let mut apps = store.apps()?;
    apps.sort_by_key(AppInfo::order);
    Ok(table(&apps, now()))
}

/// Adds an application, or a part of one. Returns its token, or `None` if the parent application does not exist.
pub fn add(
    store: &dyn Store,
    name: &str,
    email: &str,
    parent: Option<App>,
    rights: Rights,
) -> Result<Option<String>, StoreError> {
    if !is_field(name) {
        return Err(StoreError::AppName);
    }
    if !email.is_empty() && !is_field(email) {
        return Err(StoreError::Address);
    }
    if let Some(parent) = parent
        && find(store, parent)?.is_none()
    {
        return Ok(None);
    }
    let token = new_token().ok_or(StoreError::Random)?;
    store.register(&NewApp { name, email, parent, created: now() }, TokenHash::of(&token), rights)?;
    Ok(Some(token + "\n"))
}

/// Adds a token and returns it, or `None` if the application does not exist.
pub fn add_token(store: &dyn Store, app: Option<App>, rights: Rights) -> Result<Option<String>, StoreError> {
    if let Some(app) = app
        && find(store, app)?.is_none()
    {
        return Ok(None);
    }
    let token = new_token().ok_or(StoreError::Random)?;
    store.add_token(&Token { hash: TokenHash::of(&token), app, rights, created: now(), ends: None })?;
    Ok(Some(token + "\n"))
}

/// Replaces a token by a new one with the same rights and returns the new one; `None` if no valid token has this id. The old token stays
/// valid for `old_valid`.
pub fn rotate(store: &dyn Store, id: &str, old_valid: Duration) -> Result<Option<String>, StoreError> {
    let Some(old) = find_token(store, id)? else { return Ok(None) };
    let token = new_token().ok_or(StoreError::Random)?;
    let now = now();
    store.add_token(&Token { hash: TokenHash::of(&token), created: now, ends: None, ..old })?;
    let ended = store.end_token(old.hash, now + old_valid.as_secs_f64())?;
    Ok(ended.then(|| token + "\n"))
}

/// Revokes a token at once; `None` if no valid token has this id.
pub fn revoke(store: &dyn Store, id: &str) -> Result<Option<String>, StoreError> {
    let Some(token) = find_token(store, id)? else { return Ok(None) };
    let ended = store.end_token(token.hash, now())?;
    Ok(ended.then(|| format!("{}: revoked\n", token.hash.id())))
}

/// A table of all tokens, or of one application's tokens; `None` if that application does not exist. Tokens are shown by their ids.
pub fn tokens(store: &dyn Store, app: Option<App>) -> Result<Option<String>, StoreError> {
    if let Some(app) = app
        && find(store, app)?.is_none()
    {
        return Ok(None);
    }
    let mut tokens = store.tokens()?;
    tokens.retain(|token| app.is_none() || token.app == app);
    Ok(Some(token_table(&tokens, now())))
}

/// The token with this id (see [`TokenHash::id`]) if it is still valid.
fn find_token(store: &dyn Store, id: &str) -> Result<Option<Token>, StoreError> {
    let now = now();
    Ok(store.tokens()?.into_iter().find(|token| token.is_valid(now) && token.hash.id() == id))
}

fn token_table(tokens: &[Token], now: f64) -> String {
    let mut text = format!("{:<12} {:>6} {:<8} {:>9}  VALID\n", "ID", "APP", "MAY", "MADE");
    for token in tokens {
        let app = token.app.map_or_else(|| "all".to_owned(), |app| app.0.to_string());
        let valid = match token.ends {
            None => "yes".to_owned(),
            Some(ends) if now < ends => format!("for {}", length(ends - now)),
            Some(ends) => format!("ended {}", age(now - ends)),
        };
        // Writing to a string cannot fail.
        let _infallible = writeln!(
            text,
            "{} {app:>6} {:<8} {:>9}  {valid}",
            token.hash.id(),
            token.rights.name(),
            age(now - token.created),
        );
    }
    text
}

/// Deletes an application with its parts and all their data; `None` if it does not exist.
pub fn delete(store: &dyn Store, app: App) -> Result<Option<String>, StoreError> {
    // In batches, as no statement may take long; what arrives meanwhile goes with the application.
    let family = family(store, app)?;
    let mut all = 0;
    for info in &family {
        all += prune_all(store, f64::INFINITY, info.app)?;
    }
    let family = self::family(store, app)?;
    let Some((info, parts)) = family.split_first() else { return Ok(None) };
    all += family.iter().map(|info| info.sets).sum::<u64>();
    let gone = store.delete_app(app)?;
    let parts: Vec<_> = parts.iter().map(|part| printable(&part.name).into_owned()).collect();
    let parts = match parts.len() {
        0 => String::new(),
        1 => format!("its part {} and ", parts.join(", ")),
        n => format!("its {n} parts {} and ", parts.join(", ")),
    };
    Ok(gone.then(|| format!("{}: deleted, with {parts}{}\n", printable(&info.name), sets(all))))
}

/// An application and its parts; empty if it does not exist.
fn family(store: &dyn Store, app: App) -> Result<Vec<AppInfo>, StoreError> {
    let mut family = store.apps()?;
    family.retain(|info| info.app == app || info.parent == Some(app));
    family.sort_by_key(|info| info.app != app);
    Ok(family)
}

/// Deletes an application's sets that arrived longer ago than `older_than`; `None` if the application does not exist.
pub fn prune(store: &dyn Store, app: App, older_than: Duration) -> Result<Option<String>, StoreError> {
    let Some(info) = find(store, app)? else { return Ok(None) };
    let deleted = prune_all(store, now() - older_than.as_secs_f64(), app)?;
    Ok(Some(format!("{}: {} deleted\n", printable(&info.name), sets(deleted))))
}

/// Deletes an application's sets that arrived before this time, epoch seconds, in batches.
fn prune_all(store: &dyn Store, before: f64, app: App) -> Result<u64, StoreError> {
    let mut all = 0;
    loop {
        let deleted = store.prune(before, Some(app))?;
        all += deleted;
        if deleted < u64::from(BATCH) {
            return Ok(all);
        }
    }
}

fn sets(n: u64) -> String {
    if n == 1 { "1 set".to_owned() } else { format!("{n} sets") }
}

fn find(store: &dyn Store, app: App) -> Result<Option<AppInfo>, StoreError> {
    Ok(store.apps()?.into_iter().find(|info| info.app == app))
}

fn table(apps: &[AppInfo], now: f64) -> String {
    let mut text = format!("{:>6} {:>8} {:>9} {:>9}  NAME (EMAIL)\n", "APP", "SETS", "MIB", "LATEST");
    for info in apps {
        let latest = info.last.map_or_else(|| "never".to_owned(), |last| age(now - last));
        let mib = info.bytes as f64 / f64::from(1 << 20);
        let email =
            if info.email.is_empty() { String::new() } else { format!(" ({})", printable(&info.email)) };
        // Writing to a string cannot fail.
        let _infallible = writeln!(
            text,
            "{:>6} {:>8} {mib:>9.1} {latest:>9}  {}{email}",
            info.app.0,
            info.sets,
            printable(&info.title(apps))
        );
    }
    text
}

/// Formats a number of seconds as a time in the past.
fn age(seconds: f64) -> String {
    format!("{} ago", length(seconds))
}

/// Formats a number of seconds in its largest unit.
fn length(seconds: f64) -> String {
    let units = [(86_400.0, "d"), (3600.0, "h"), (60.0, "min")];
    let unit = units.into_iter().find(|(length, _)| seconds >= *length);
    let (length, name) = unit.unwrap_or((1.0, "s"));
    format!("{:.0} {name}", (seconds / length).floor().max(0.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A name must be one visible line, as it must over HTTP.
    #[test]
    fn names() {
        let dir = tempfile::tempdir().unwrap();
        let store = crate::store::Sqlite::open(&dir.path().join("sets.db")).unwrap();
        let add = |name: &str, email: &str| add(&store, name, email, None, Rights::Both);
        for name in ["", " ", "a\nb", "a\x1b[2Jb", &"x".repeat(255)] {
            assert!(matches!(add(name, ""), Err(StoreError::AppName)), "{name:?}");
        }
        for email in [" ", "a@b\nc", &"x".repeat(255)] {
            assert!(matches!(add("shop", email), Err(StoreError::Address)), "{email:?}");
        }
        assert!(store.apps().unwrap().is_empty());
        assert!(
            add("shop & söhne", "").unwrap().is_some() && add(&"x".repeat(254), "a@b").unwrap().is_some()
        );
    }

    /// What is deleted is all that the application and its parts have, and the parts are named.
    #[test]
    fn deletes() {
        use crate::{digest::Digest, store::*, tune::*};
        let dir = tempfile::tempdir().unwrap();
        let store = Sqlite::open(&dir.path().join("sets.db")).unwrap();
        let add = |name: &str, parent| {
            add(&store, name, "", parent, Rights::Both).unwrap().unwrap();
            store.apps().unwrap().last().unwrap().app
        };
        let put = |app, sets: u32| {
            let before = store.totals().unwrap().sets as u32;
            for at in before..before + sets {
                let mut id = [0; 32];
                id[..4].copy_from_slice(&at.to_le_bytes());
                let set = NewSet {
                    id: &SetId::of(&id),
                    group: Group { app, series: Series(3, 4) },
                    in_force: "",
                    received: 1.7e9,
                    evidence: &Evidence::default(),
                    digest: &Digest::default(),
                    body: b"",
                };
                assert!(store.insert(&set, Quota::NONE).unwrap().new);
            }
        };
        let (mail, shop) = (add("mail", None), add("shop", None));
        put(mail, 3);
        put(shop, BATCH + 1);
        for name in ["web", "jobs"] {
            put(add(name, Some(shop)), 2);
        }
        let text = delete(&store, shop).unwrap().unwrap();
        assert_eq!(text, format!("shop: deleted, with its 2 parts web, jobs and {} sets\n", BATCH + 5));
        assert_eq!((delete(&store, shop).unwrap(), store.totals().unwrap().sets), (None, 3));
        put(add("web", Some(mail)), 0);
        assert_eq!(delete(&store, mail).unwrap().unwrap(), "mail: deleted, with its part web and 3 sets\n");
        assert!(store.apps().unwrap().is_empty());
    }

    /// A name that an earlier release stored can be any text, and stays on its line.
    #[test]
    fn tables() {
        let app = |id, name: &str, last| AppInfo {
            app: App(id),
            parent: (id == 2).then_some(App(1)),
            name: name.to_owned(),
            email: String::new(),
            created: 0.0,
            sets: 12,
            bytes: 3 << 19,
            last,
        };
        let text = table(&[app(1, "shop", Some(1000.0)), app(2, "a\n\x1b[2Jb", None)], 1000.0 + 7300.0);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        assert_eq!(lines[1], "     1       12       1.5   2 h ago  shop");
        assert!(lines[2].starts_with("     2       12       1.5     never  shop / a"), "{text}");
        assert!(!text.contains('\x1b'));
        assert_eq!(table(&[], 0.0).lines().count(), 1);
        let ages = [-1.0, 59.0, 60.0, 86_399.0, 86_400.0].map(age);
        assert_eq!(ages, ["0 s ago", "59 s ago", "1 min ago", "23 h ago", "1 d ago"]);
    }
}
