//! What an operator does with the store: applications are added, listed and deleted. The server may run meanwhile.

use std::{fmt::Write as _, time::Duration};

use crate::{
    now,
    printable::printable,
    store::{App, AppInfo, BATCH, Store, StoreError, TokenHash, new_token},
};

/// A table of all applications.
pub fn list(store: &dyn Store) -> Result<String, StoreError> {
    Ok(table(&store.apps()?, now()))
}

/// Adds an application. The text is its token.
pub fn add(store: &dyn Store, name: &str, email: &str) -> Result<String, StoreError> {
    let token = new_token().ok_or(StoreError::Random)?;
    store.register(TokenHash::of(&token), email, name, now())?;
    Ok(token + "\n")
}

/// Deletes an application with everything; `None` if it is not there.
pub fn delete(store: &dyn Store, app: App) -> Result<Option<String>, StoreError> {
    let Some(info) = find(store, app)? else { return Ok(None) };
    let gone = store.delete_app(app)?;
    Ok(gone.then(|| format!("{}: deleted, with {} sets\n", printable(&info.name), info.sets)))
}

/// Deletes the sets of an application that came longer ago than this; `None` if it is not there.
pub fn prune(store: &dyn Store, app: App, older_than: Duration) -> Result<Option<String>, StoreError> {
    let Some(info) = find(store, app)? else { return Ok(None) };
    let before = now() - older_than.as_secs_f64();
    let mut all = 0;
    loop {
        let deleted = store.prune(before, Some(app))?;
        all += deleted;
        if deleted < u64::from(BATCH) {
            return Ok(Some(format!("{}: {all} sets deleted\n", printable(&info.name))));
        }
    }
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
            printable(&info.name)
        );
    }
    text
}

/// A time that has passed, in its largest unit.
fn age(seconds: f64) -> String {
    let units = [(86_400.0, "d"), (3600.0, "h"), (60.0, "min")];
    let unit = units.into_iter().find(|(length, _)| seconds >= *length);
    let (length, name) = unit.unwrap_or((1.0, "s"));
    format!("{:.0} {name} ago", (seconds / length).floor().max(0.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names are anything, and stay on their line.
    #[test]
    fn tables() {
        let app = |id, name: &str, last| AppInfo {
            app: App(id),
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
        assert!(lines[2].starts_with("     2       12       1.5     never  a"), "{text}");
        assert!(!text.contains('\x1b'));
        assert_eq!(table(&[], 0.0).lines().count(), 1);
        let ages = [-1.0, 59.0, 60.0, 86_399.0, 86_400.0].map(age);
        assert_eq!(ages, ["0 s ago", "59 s ago", "1 min ago", "23 h ago", "1 d ago"]);
    }
}
