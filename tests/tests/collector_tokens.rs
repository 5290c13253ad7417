//! The rights of tokens (writing, reading, operator), their expiry, and parts of applications; on both kinds of store.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::PATIENCE;
use gctrace_tests::collector::{Collector, Cycle, apps, cycles, each_store, example, set};
use gctrace_tests::http;
use gctrace_tests::postgres::Postgres;
use serde_json::{Value, json};

/// A collector that requires a token from all clients.
fn collector(store: &str) -> Result<Collector> {
    Collector::with_store("127.0.0.1:0", store, &["--public-url", "https://gc.example"])
}

fn token(store: &str, args: &[&str]) -> Result<String> {
    let token = apps(store, args)?.trim().to_owned();
    ensure!(token.len() == 32 && token.bytes().all(|byte| byte.is_ascii_hexdigit()), "{args:?}: {token}");
    Ok(token)
}

/// The id under which a token is listed: the beginning of its SHA-256.
fn id(token: &str) -> Result<String> {
    use std::io::Write as _;
    use std::process::{Command, Stdio};
    let mut sum = Command::new("sha256sum").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    sum.stdin.take().context("a pipe")?.write_all(token.as_bytes())?;
    Ok(String::from_utf8(sum.wait_with_output()?.stdout)?.chars().take(12).collect())
}

/// A program that needs different settings than [`allocating`].
fn mallocing(token: &str) -> Value {
    set(token, "3.4.7", &json!({}), &cycles(&[(Cycle { by: "malloc", major: None, old_after: 0 }, 100)]))
}

fn allocating(token: &str) -> Value {
    let kinds = [("newobj", None, 300), ("newobj", Some("oldgen"), 40)];
    let kinds = kinds.map(|(by, major, n)| (Cycle { by, major, old_after: 99_000 }, n));
    set(token, "3.4.7", &json!({}), &cycles(&kinds))
}

/// Signs in and returns the text of the page, or `None` if the token is refused.
fn page(collector: &Collector, token: &str, path: &str) -> Result<Option<String>> {
    let answer = collector.form("/sign-in", &format!("token={token}"))?;
    if answer.code != 303 {
        ensure!(answer.code == 401 && !answer.headers.contains_key("set-cookie"), "{answer:?}");
        return Ok(None);
    }
    let cookie = answer.headers["set-cookie"].split(';').next().context("a cookie")?.to_owned();
    let answer = http::exchange(collector.address, "GET", path, &[("Cookie", &cookie)], b"")?;
    // Each page has the sign-out form, which has no fields.
    let form = r#"<form method="post" action="/sign-in"><button>Sign out</button></form>"#;
    ensure!(answer.text().contains(form), "no way out: {}", answer.text());
    let out = collector.form("/sign-in", "")?;
    ensure!(out.code == 303 && out.headers["set-cookie"].contains("gctrace=; Max-Age=0"), "{out:?}");
    ensure!(!collector.get("/")?.text().contains("Sign out"), "nobody is signed in");
    Ok(Some(format!("{} {}", answer.code, answer.text())))
}

/// Each kind of token has exactly its rights, whatever the size of the body. No list shows a token.
#[test]
fn rights() -> Result<()> {
    each_store(|store| {
        let collector = collector(store)?;
        let both = token(store, &["add", "shop"])?;
        let mail = token(store, &["add", "mail", "--may", "read"])?;
        let write = token(store, &["token", "1", "--may", "write"])?;
        let read = token(store, &["token", "1", "--may", "read"])?;
        let operator = token(store, &["operator"])?;
        ensure!(apps(store, &["token", "9", "--may", "read"]).is_err(), "no such application");

        let large = |token: &str| {
            let many = cycles(&[(Cycle { by: "malloc", major: None, old_after: 0 }, 2000)]);
            set(token, "3.4.7", &json!({}), &many).to_string()
        };
        for refused in [&read, &mail, &operator] {
            for set in [example(refused, 1)?.to_string(), large(refused)] {
                let answer = collector.send(&set)?;
                ensure!(answer.code == 403 && answer.text().contains("for reading only"), "{answer:?}");
            }
        }
        ensure!(collector.metric("gctrace_collector_stored_sets")? == 0, "a set was stored");
        for allowed in [&both, &write] {
            ensure!(collector.send(&mallocing(allowed).to_string())?.code == 200);
        }
        ensure!(collector.send(&large(&write))?.code == 200);
        ensure!(collector.metric("gctrace_collector_stored_sets")? == 3);

        let answer = collector.get(&format!("/apps/{write}"))?;
        ensure!(answer.code == 403 && answer.text().contains("for sending sets only"), "{answer:?}");
        ensure!(page(&collector, &write, "/")?.is_none(), "a token for writing reads pages");
        for allowed in [&both, &read] {
            let answer = collector.get(&format!("/apps/{allowed}"))?;
            ensure!(answer.code == 200 && answer.text().contains("RUBY_GC_MALLOC_LIMIT="), "{answer:?}");
            let first = page(&collector, allowed, "/")?.context("let in")?;
            ensure!(first.contains("shop") && !first.contains("mail"), "{first}");
        }
        ensure!(collector.get(&format!("/apps/{mail}"))?.code == 204, "nothing came");
        ensure!(collector.get(&format!("/apps/{mail}?app=1"))?.code == 404, "another one's");
        ensure!(collector.get(&format!("/apps/{operator}"))?.code == 400, "which one?");
        ensure!(collector.get(&format!("/apps/{operator}?app=1"))?.code == 200);
        ensure!(collector.get(&format!("/apps/{operator}?app=9"))?.code == 404);
        let first = page(&collector, &operator, "/")?.context("let in")?;
        ensure!(first.contains("shop") && first.contains("mail"), "{first}");

        let list = apps(store, &["tokens"])?;
        for (token, may) in
            [(&both, "both"), (&mail, "read"), (&write, "write"), (&read, "read"), (&operator, "operator")]
        {
            let id = id(token)?;
            let line = list.lines().find(|line| line.starts_with(&id));
            ensure!(line.is_some_and(|line| line.contains(may)) && !list.contains(token.as_str()), "{list}");
        }
        ensure!(apps(store, &["tokens", "2"])?.lines().count() == 2, "a head and one token");
        Ok(())
    })
}

/// A rotated token works beside its successor until it expires. A revoked token ends at once. Ended tokens stay in the list.
#[test]
fn ends() -> Result<()> {
    each_store(|store| {
        let collector = collector(store)?;
        let first = token(store, &["add", "shop", "--may", "write"])?;
        let second = token(store, &["rotate", &id(&first)?])?;
        let works = |token: &str, pid| -> Result<bool> {
            let answer = collector.send(&example(token, pid)?.to_string())?;
            ensure!(answer.code == 200 || answer.text().contains("no longer valid"), "{answer:?}");
            ensure!(answer.code == 200 || answer.code == 403, "{answer:?}");
            Ok(answer.code == 200)
        };
        ensure!(works(&first, 1)? && works(&second, 2)?, "both are valid");
        ensure!(apps(store, &["tokens"])?.contains("for 6 d"), "{}", apps(store, &["tokens"])?);
        let answer = collector.get(&format!("/apps/{second}"))?;
        ensure!(answer.code == 403, "the new one has the rights of the old one: {answer:?}");

        let third = token(store, &["rotate", &id(&second)?, "--old-valid", "1s"])?;
        let deadline = Instant::now() + PATIENCE;
        while works(&second, 3)? {
            ensure!(Instant::now() < deadline, "it never ends");
            std::thread::sleep(Duration::from_millis(100));
        }
        ensure!(works(&first, 4)? && works(&third, 5)?, "others end, too");

        apps(store, &["revoke", &id(&first)?])?;
        apps(store, &["revoke", &id(&third)?])?;
        ensure!(!works(&first, 6)? && !works(&third, 7)?, "it is revoked");
        for ended in [&first, &second, &third] {
            ensure!(apps(store, &["rotate", &id(ended)?]).is_err(), "nothing follows from what has ended");
        }
        ensure!(apps(store, &["tokens"])?.matches("ended").count() == 3);
        ensure!(collector.send(&example(&"0".repeat(32), 1)?.to_string())?.code == 404, "never valid");
        let fourth = token(store, &["token", "1", "--may", "write"])?;
        ensure!(works(&fourth, 8)?, "the application is still there");
        Ok(())
    })
}

/// The web part and the jobs part of an application have separate sets, advice and tokens. The application's own token also reads its parts.
/// All parts are deleted together.
#[test]
fn parts() -> Result<()> {
    each_store(|store| {
        let collector = collector(store)?;
        let shop = token(store, &["add", "shop"])?;
        let jobs = token(store, &["add", "jobs", "--part-of", "1"])?;
        let mail = token(store, &["add", "mail"])?;
        ensure!(apps(store, &["add", "x", "--part-of", "2"]).is_err(), "parts have no parts");
        ensure!(apps(store, &["add", "x", "--part-of", "9"]).is_err(), "no such application");
        ensure!(collector.send(&mallocing(&shop).to_string())?.code == 200);
        ensure!(collector.send(&allocating(&jobs).to_string())?.code == 200);
        let text = |path: String| collector.get(&path).map(|answer| answer.text());
        let web = text(format!("/apps/{shop}"))?;
        ensure!(web.contains("MALLOC_LIMIT=") && !web.contains("OLDOBJECT"), "{web}");
        let background = text(format!("/apps/{jobs}"))?;
        ensure!(background.contains("OLDOBJECT") && !background.contains("MALLOC_LIMIT"), "{background}");
        ensure!(text(format!("/apps/{shop}?app=2"))? == background, "the whole reads about its parts");
        for (token, app) in [(&jobs, 1), (&mail, 1), (&mail, 2), (&shop, 3)] {
            ensure!(collector.get(&format!("/apps/{token}?app={app}"))?.code == 404, "{app}");
        }
        let first = page(&collector, &shop, "/")?.context("let in")?;
        ensure!(first.contains("shop / jobs") && !first.contains("mail"), "{first}");
        ensure!(page(&collector, &shop, "/app/2")?.context("let in")?.starts_with("200"));
        ensure!(page(&collector, &jobs, "/app/1")?.context("let in")?.starts_with("404"));
        ensure!(apps(store, &["list"])?.contains("shop / jobs"));

        apps(store, &["delete", "1"])?;
        for gone in [&shop, &jobs] {
            ensure!(collector.send(&mallocing(gone).to_string())?.code == 404, "it is deleted");
        }
        ensure!(collector.metric("gctrace_collector_stored_sets")? == 0);
        ensure!(collector.send(&mallocing(&mail).to_string())?.code == 200);
        Ok(())
    })
}

/// In a PostgreSQL store from before rights existed, each token keeps both rights, even after the collector restarts.
#[test]
fn earlier_postgres() -> Result<()> {
    let postgres = Postgres::start()?;
    let store = postgres.address();
    let shop = token(&store, &["add", "shop"])?;
    postgres.query(
        "ALTER TABLE gctrace_app DROP COLUMN parent, ADD COLUMN token_hash BYTEA UNIQUE;
         UPDATE gctrace_app SET token_hash = (SELECT hash FROM gctrace_token WHERE app = gctrace_app.id);
         DROP TABLE gctrace_token; DROP TABLE gctrace_given; DROP TABLE gctrace_period; ALTER TABLE gctrace_environment DROP COLUMN first, DROP COLUMN summary, DROP COLUMN summarized,
             DROP COLUMN seen, DROP COLUMN since, DROP COLUMN until, DROP COLUMN stretch; DROP TABLE gctrace_gone;
         ALTER TABLE gctrace_app DROP COLUMN samples;
         UPDATE gctrace_version SET version = 4",
    )?;
    for pid in [1, 2] {
        let collector = collector(&store)?;
        ensure!(collector.send(&example(&shop, pid)?.to_string())?.code == 200);
        ensure!(collector.get(&format!("/apps/{shop}"))?.code == 204, "too little for advice");
    }
    ensure!(apps(&store, &["tokens"])?.contains(" both "));
    Ok(())
}
