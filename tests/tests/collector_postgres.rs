//! Several collectors on one PostgreSQL act as one collector, and lose nothing, whichever is killed.

use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use gctrace_collector::digest::Digest;
use gctrace_collector::store::{self, App, Group, NewApp, NewSet, Quota, Rights, SetId, TokenHash};
use gctrace_tests::PATIENCE;
use gctrace_tests::collector::{Collector, Cycle, apps, cycles, example, set, wait_accepted};
use gctrace_tests::postgres::Postgres;
use gctrace_tunemygc::tune::{Evidence, Series};
use serde_json::{Value, json};

const ANY: &str = "127.0.0.1:0";

/// What is stored, except times, tokens and ids derived from these: for each table an array of rows, whose columns are arrays of JSON. Both
/// stores have the same tables and columns; those of PostgreSQL have a prefix.
const STORED: [(&str, &str); 6] = [
    ("app", "id, email, name, sets, samples, bytes, parent"),
    ("sample_set", "number, app, ruby_major, ruby_minor, samples, evidence, environment"),
    (
        "slot",
        "app, at, ruby_major, ruby_minor, environment, host, pid, sets, cycles, majors, gc_ms, gc_seconds, rss, slots",
    ),
    ("environment", "id, app, ruby_major, ruby_minor, in_force, summarized, stretch"),
    ("advised", "app, ruby_major, ruby_minor, setting"),
    ("given", "app, ruby_major, ruby_minor, strategy, in_force, settings, CAST(withdrawal AS integer)"),
];

/// The body of a stored set.
fn body(compressed: &[u8]) -> Result<Value> {
    Ok(serde_json::from_reader(flate2::read::GzDecoder::new(compressed))?)
}

/// Bytes from hexadecimal digits.
fn bytes(hexadecimal: &str) -> Result<Vec<u8>> {
    let pairs = hexadecimal.as_bytes().chunks(2);
    pairs.map(|pair| Ok(u8::from_str_radix(std::str::from_utf8(pair)?, 16)?)).collect()
}

/// The rows of both stores are the same, and so are the bodies of the sets, which contain everything that was sent except the token.
fn same_rows(postgres: &Postgres, sqlite: &Path, sent: &Value) -> Result<()> {
    let sqlite = rusqlite::Connection::open(sqlite)?;
    for (table, columns) in STORED {
        let rows = postgres.query(&format!(
            "SELECT json_build_array({columns}) FROM gctrace_{table} ORDER BY json_build_array({columns})::text"
        ))?;
        let mut rows: Vec<Value> =
            rows.lines().map(serde_json::from_str).collect::<Result<_, serde_json::Error>>()?;
        let mut statement = sqlite.prepare(&format!("SELECT json_array({columns}) FROM {table}"))?;
        let found = statement.query_map([], |row| row.get(0))?.collect::<Result<Vec<String>, _>>()?;
        let mut found: Vec<Value> =
            found.iter().map(|row| serde_json::from_str(row)).collect::<Result<_, serde_json::Error>>()?;
        for rows in [&mut rows, &mut found] {
            rows.sort_by_key(Value::to_string);
        }
        ensure!(!rows.is_empty() && rows == found, "{table} ({columns}): {rows:?}, in SQLite {found:?}");
    }
    // As a reader of its text sees it, who may round a float differently.
    let mut expected: Value = serde_json::from_str(&sent.to_string())?;
    expected[0][0] = Value::Null;
    expected[0][3]["RUBY_GC_TOKEN"] = json!("(redacted)");
    let one = postgres.query("SELECT encode(body, 'hex') FROM gctrace_sample_set")?;
    let other: Vec<u8> = sqlite.query_row("SELECT body FROM sample_set", [], |row| row.get(0))?;
    for (store, body) in [("PostgreSQL", body(&bytes(&one)?)?), ("SQLite", body(&other)?)] {
        let (kept, sent) = (body.as_array().context("a list")?, expected.as_array().context("a list")?);
        let other = kept.iter().zip(sent).find(|(one, other)| one != other);
        ensure!(other.is_none() && kept.len() == sent.len(), "{store} has another body: {other:?}");
    }
    Ok(())
}

/// Each collector knows what the other one stored: applications, sets, duplicates, recommendations. The stored data equal those in
/// SQLite, and contain no token.
#[test]
fn one_of_two() -> Result<()> {
    let postgres = Postgres::start()?;
    let store = postgres.address();
    // Both create the tables at the same time.
    let [first, second] = std::thread::scope(|scope| {
        let start = || Collector::with_store(ANY, &store, &[]);
        let other = scope.spawn(start);
        [start(), other.join().expect("no panic")]
    });
    let (first, second) = (first?, second?);
    let token = first.register()?;
    let cycle = |by, major| Cycle { by, major, old_after: 99_000 };
    let starving = cycles(&[
        (cycle("newobj", None), 300),
        (cycle("malloc", None), 60),
        (cycle("newobj", Some("oldgen")), 40),
    ]);
    let starving = |token: &str| set(token, "3.4.7", &json!({"RUBY_GC_TOKEN": token}), &starving);
    let text = starving(&token).to_string();
    let sent = second.send(&text)?;
    ensure!(sent.code == 200, "{sent:?}");
    let again = first.send(&text)?;
    ensure!(again.code == 200 && first.metric("gctrace_collector_duplicate_sets_total")? == 1, "{again:?}");
    ensure!(first.send(&example(&"0".repeat(32), 1)?.to_string())?.code == 404);
    let path = format!("/configs/{}.json", sent.text().split_once("/configs/").context("an address")?.1);
    let (one, other): (Value, Value) =
        (serde_json::from_slice(&first.get(&path)?.body)?, serde_json::from_slice(&second.get(&path)?.body)?);
    ensure!(
        one == other && one["Speed"].as_object().is_some_and(|speed| !speed.is_empty()),
        "{one}, {other}"
    );
    let advice = [first.get(&format!("/apps/{token}"))?, second.get(&format!("/apps/{token}"))?];
    ensure!(
        advice.iter().all(|answer| answer.code == 200 && answer.text().contains("export RUBY_GC_"))
            && advice[0].body == advice[1].body,
        "{advice:?}"
    );

    // The same sets in SQLite lead to the same rows and the same advice.
    let live = gctrace_tests::live::Live::without_gctrace()?;
    let path = live.path("sets.db");
    let single = Collector::start(&path, &[])?;
    let its = single.register()?;
    let receipt = single.send(&starving(&its).to_string())?;
    let config = format!("/configs/{}.json", receipt.text().split_once("/configs/").context("an address")?.1);
    ensure!(
        serde_json::from_slice::<Value>(&single.get(&config)?.body)? == one,
        "SQLite's advice is another one"
    );
    let answer = single.get(&format!("/apps/{its}"))?;
    ensure!(answer.body == advice[0].body, "{}, in SQLite {}", advice[0].text(), answer.text());
    same_rows(&postgres, &path, &starving(&token))?;

    // SQL in any text stays text. NUL, which PostgreSQL's texts cannot hold, is refused in names and replaced in sets.
    let sql = "x'); DROP TABLE gctrace_app; --";
    let form = |app: &str| first.form("/accounts", &format!("email=a%40b&app={app}"));
    let (evil, with_nul) = (form("x%27%29%3B+DROP+TABLE+gctrace_app%3B+--")?, form("x%00")?);
    ensure!(evil.code == 200 && with_nul.code == 422, "{evil:?} {with_nul:?}");
    let mut hostile = starving(&evil.text());
    hostile[0][8] = json!(format!("{sql}\0"));
    let answer = first.send(&hostile.to_string())?;
    ensure!(answer.code == 200, "{answer:?}");
    let kept =
        postgres.query("SELECT name, host FROM gctrace_app JOIN gctrace_slot ON app = id WHERE id = 2")?;
    ensure!(kept == format!("{sql}|{sql}\u{fffd}"), "{kept}");
    ensure!(second.metric("gctrace_collector_stored_sets")? == 2, "two sets");
    no_token(&postgres, &evil.text())?;
    no_token(&postgres, &token)
}

/// A collector waits while another one changes the tables, also for longer than any of its other statements may take.
#[test]
fn waits_for_a_long_upgrade() -> Result<()> {
    const SECONDS: u64 = 32;
    let postgres = Postgres::start()?;
    let address = postgres.address();
    std::thread::scope(|scope| {
        // "gctr", as the collector has it.
        let upgrade = format!("SELECT pg_advisory_lock({}), pg_sleep({SECONDS})", 0x6763_7472);
        let (postgres, begun) = (&postgres, Instant::now());
        let other = scope.spawn(move || postgres.query(&upgrade));
        while postgres.query("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")? == "0" {
            ensure!(begun.elapsed() < PATIENCE, "it is not locked");
            std::thread::sleep(Duration::from_millis(20));
        }
        let opened = store::open(&address);
        let took = begun.elapsed();
        other.join().expect("no panic")?;
        opened?;
        ensure!(took > Duration::from_secs(SECONDS - 1), "it waited for {took:?} only");
        Ok(())
    })
}

/// An application is deleted with all its sets and those of its parts, in statements of limited size: each may take 30 s.
#[test]
fn large_applications() -> Result<()> {
    const COPIES: u64 = 1_100;
    let postgres = Postgres::start()?;
    let store = postgres.address();
    let collector = Collector::with_store(ANY, &store, &[])?;
    let token = collector.register()?;
    let part = apps(&store, &["add", "jobs", "--part-of", "1"])?;
    for token in [&token, part.trim()] {
        ensure!(collector.send(&example(token, 1)?.to_string())?.code == 200);
    }
    let columns = "app, ruby_major, ruby_minor, received, samples, evidence, body, environment";
    postgres.query(&format!(
        "INSERT INTO gctrace_sample_set (id, {columns})
             SELECT lpad(to_hex(app * 10000 + n), 64, '0'), {columns} FROM gctrace_sample_set, generate_series(1, {COPIES}) AS n;
         UPDATE gctrace_app SET sets = sets + {COPIES}, bytes = (
             SELECT sum(octet_length(body) + octet_length(evidence)) FROM gctrace_sample_set AS s WHERE s.app = gctrace_app.id);
         CREATE FUNCTION refuse_many() RETURNS trigger LANGUAGE plpgsql AS $$
             BEGIN
                 IF (SELECT count(*) FROM gone) > {} THEN RAISE EXCEPTION 'too many at a time'; END IF;
                 RETURN NULL;
             END $$;
         CREATE TRIGGER few AFTER DELETE ON gctrace_sample_set REFERENCING OLD TABLE AS gone
             FOR EACH STATEMENT EXECUTE FUNCTION refuse_many()",
        store::BATCH
    ))?;
    let text = apps(&store, &["delete", "1"])?;
    ensure!(text == format!("shop: deleted, with its part jobs and {} sets\n", 2 * (COPIES + 1)), "{text}");
    for table in ["app", "sample_set", "slot", "gone"] {
        let left = postgres.query(&format!("SELECT count(*) FROM gctrace_{table}"))?;
        ensure!(left == "0", "{left} rows in {table}");
    }
    collector.stop()?;
    Ok(())
}

/// No column of any table contains the token: as text, as its bytes, or in a compressed set.
fn no_token(postgres: &Postgres, token: &str) -> Result<()> {
    let tables =
        "SELECT string_agg(query_to_xml(format('SELECT * FROM %I', tablename), true, true, '')::text, '')
         FROM pg_tables WHERE schemaname = 'public'";
    let dump = postgres.query(&format!("SET xmlbinary = hex; {tables}"))?.to_lowercase();
    ensure!(dump.contains("someone@example.com") && dump.contains("<body>1f8b"), "not all tables: {dump}");
    let text = postgres.query(&format!("SELECT encode('{token}'::bytea, 'hex')"))?;
    ensure!(!dump.contains(token) && !dump.contains(&text), "the token is in the database");
    for compressed in postgres.query("SELECT encode(body, 'hex') FROM gctrace_sample_set")?.lines() {
        ensure!(!body(&bytes(compressed)?)?.to_string().contains(token), "the token is in a set");
    }
    Ok(())
}

/// With `sslmode=require` the connection to the database uses TLS, and only if the host trusts the certificate. Nothing is sent
/// unencrypted to a server that requires TLS.
#[test]
fn over_tls() -> Result<()> {
    let live = gctrace_tests::live::Live::without_gctrace()?;
    let dir = live.dir("tls")?;
    let program = gctrace_tests::live::rubies_dir().join("tunemygc_agent.rb");
    ensure!(Command::new("ruby").arg(program).arg("certificate").arg(&dir).status()?.success());
    let postgres = Postgres::start_tls(&dir)?;
    let collector = |mode: &str, authority: &str| {
        let mut command = Command::new(gctrace_tests::live::gctrace_binary()?);
        command.env("SSL_CERT_FILE", dir.join(authority));
        Collector::with_command(command, ANY, &format!("{}?sslmode={mode}", postgres.address()), &[])
    };
    let good = collector("require", "ca.pem")?;
    let token = good.register()?;
    ensure!(good.send(&example(&token, 1)?.to_string())?.code == 200);
    let encrypted = "SELECT count(*), bool_and(ssl) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) \
                     WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()";
    let found = postgres.query(encrypted)?;
    ensure!(found.ends_with("|t") && !found.starts_with('0'), "connections: {found}");
    drop(good);
    let other = live.dir("other")?;
    let program = gctrace_tests::live::rubies_dir().join("tunemygc_agent.rb");
    ensure!(Command::new("ruby").arg(program).arg("certificate").arg(&other).status()?.success());
    let stranger = other.join("ca.pem").display().to_string();
    let refused = collector("require", &stranger).expect_err("an unknown authority").to_string();
    ensure!(refused.contains("certificate"), "{refused}");
    let plain = collector("disable", "ca.pem").expect_err("no TLS").to_string();
    ensure!(plain.contains("no encryption"), "{plain}");
    Ok(())
}

/// Collectors and the database are killed under load from eight clients: sets that were answered with 200 are kept, and the other sets were
/// answered with 500 or not at all. A collector survives the end of its database.
#[test]
fn nothing_accepted_is_lost() -> Result<()> {
    let mut postgres = Postgres::start()?;
    let store = postgres.address();
    let mut collectors = [Collector::with_store(ANY, &store, &[])?, Collector::with_store(ANY, &store, &[])?];
    let token = collectors[0].register()?;
    let accepted = Mutex::new(Vec::new());
    let refused = AtomicU64::new(0);
    let pids = AtomicU64::new(1);
    for round in 0..4 {
        let over = AtomicBool::new(false);
        let before = accepted.lock().expect("no panic").len();
        let done: Result<()> = std::thread::scope(|scope| {
            for client in 0..8 {
                let (collectors, accepted, refused, over) = (&collectors, &accepted, &refused, &over);
                let (token, pids) = (&token, &pids);
                scope.spawn(move || {
                    while !over.load(Ordering::Relaxed) {
                        let pid = pids.fetch_add(1, Ordering::Relaxed);
                        let set = example(token, pid).expect("the example").to_string();
                        // If the collector was killed meanwhile, it gave no answer and promised nothing.
                        let Ok(answer) = collectors[client % 2].send(&set) else { continue };
                        assert!(
                            answer.code == 200 || answer.code == 500,
                            "{} {}",
                            answer.code,
                            answer.text()
                        );
                        if answer.code == 200 {
                            accepted.lock().expect("no panic").push(answer.text());
                        } else {
                            refused.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
            }
            wait_accepted(&accepted, before, 21, Duration::from_millis(700));
            let killed = if round % 2 == 0 {
                postgres.kill().and_then(|()| {
                    std::thread::sleep(Duration::from_millis(300));
                    postgres.resume()
                })
            } else {
                let pid = collectors[0].pid()?;
                rustix::process::kill_process(pid, rustix::process::Signal::KILL)
                    .context("killing a collector")
            };
            std::thread::sleep(Duration::from_millis(300));
            over.store(true, Ordering::Relaxed);
            killed
        });
        done?;
        if round % 2 == 1 {
            collectors[0] = Collector::with_store(ANY, &store, &[])?;
        }
        let now = accepted.lock().expect("no panic").clone();
        ensure!(now.len() > before + 20, "only {} sets in round {round}", now.len() - before);
        let kept =
            postgres.query("SELECT id FROM gctrace_sample_set WHERE samples = 10 AND length(body) > 500")?;
        let kept: std::collections::HashSet<&str> = kept.lines().collect();
        for address in &now {
            let id = address.split_once("/configs/").context("an address")?.1;
            ensure!(kept.contains(id), "{id} is lost in round {round}");
        }
        for collector in &collectors {
            ensure!(collector.get("/healthz")?.code == 200, "a collector is ill after round {round}");
        }
    }
    ensure!(refused.load(Ordering::Relaxed) > 0, "nothing was refused although the database was away");
    Ok(())
}

/// If the database cannot be reached, there is one clear error, without the password.
#[test]
fn no_database() -> Result<()> {
    let error = Collector::with_store(ANY, "postgres://me:geheim@127.0.0.1:9/gc", &[])
        .err()
        .context("it cannot start")?;
    let error = format!("{error:#}");
    ensure!(error.contains("opening the store") && error.contains("refused"), "{error}");
    ensure!(!error.contains("geheim"), "the password is shown: {error}");
    Ok(())
}

/// Older figures are aggregated once, whichever collector does it. The sums do not change, and the latest day is left alone.
#[test]
fn figures_are_added_up() -> Result<()> {
    let postgres = Postgres::start()?;
    let store = postgres.address();
    apps(&store, &["add", "shop"])?;
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.as_secs();
    postgres.query(&format!(
        "INSERT INTO gctrace_slot SELECT 1, at, 3, 4, '', 'web', pid, 1, 2, 1, 5, 0.5, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, at, 3
         FROM generate_series({} / 600 * 600, {now}, 600) AS at, generate_series(1, 3) AS pid;
         UPDATE gctrace_app SET slots = (SELECT count(*) FROM gctrace_slot)",
        now - 12 * 86_400
    ))?;
    let sums = "SELECT sum(sets), sum(cycles), sum(majors), sum(gc_ms), sum(gc_seconds), sum(c0), sum(c9), max(rss), max(slots)
         FROM gctrace_slot";
    let before = postgres.query(sums)?;
    let recent = format!("SELECT count(*) FROM gctrace_slot WHERE at > {}", now - 24 * 3600);
    let day = postgres.query(&recent)?;
    let _both = [Collector::with_store(ANY, &store, &[])?, Collector::with_store(ANY, &store, &[])?];
    let fine = format!(
        "SELECT count(*) FROM gctrace_slot WHERE (at < {} AND at % 7200 <> 0) OR (at < {} AND at % 21600 <> 0)",
        now - 28 * 3600,
        now - 9 * 86_400
    );
    let deadline = Instant::now() + PATIENCE;
    while postgres.query(&fine)? != "0" {
        ensure!(Instant::now() < deadline, "{} slots are left as they are", postgres.query(&fine)?);
        std::thread::sleep(Duration::from_millis(50));
    }
    ensure!(postgres.query(sums)? == before, "{before} became {}", postgres.query(sums)?);
    ensure!(postgres.query(&recent)? == day, "the latest day");
    let counted = postgres.query("SELECT slots = (SELECT count(*) FROM gctrace_slot) FROM gctrace_app")?;
    ensure!(counted == "t", "{}", postgres.query("SELECT slots FROM gctrace_app")?);
    let left: u64 = postgres.query("SELECT count(*) FROM gctrace_slot")?.parse()?;
    ensure!(left < 3 * 300, "{left} slots of {}", 3 * 12 * 144);
    Ok(())
}

/// However many sets an application has above its quota, they are deleted when the next set is stored.
#[test]
fn quotas() -> Result<()> {
    let postgres = Postgres::start()?;
    let collector = Collector::with_store(ANY, &postgres.address(), &[])?;
    let token = collector.register()?;
    let send = |collector: &Collector, pid| -> Result<()> {
        ensure!(collector.send(&example(&token, pid)?.to_string())?.code == 200);
        Ok(())
    };
    (0..20).try_for_each(|pid| send(&collector, pid))?;
    let small = Collector::with_store(ANY, &postgres.address(), &["--app-sets", "12"])?;
    for (pid, app_sets) in [(20, 12), (21, 12)] {
        send(&small, pid)?;
        ensure!(small.metric("gctrace_collector_stored_sets")? == app_sets, "{pid}");
    }
    let smaller = Collector::with_store(ANY, &postgres.address(), &["--app-sets", "2"])?;
    send(&smaller, 30)?;
    ensure!(smaller.metric("gctrace_collector_stored_sets")? == 2);
    ensure!(postgres.query("SELECT sets FROM gctrace_app")? == "2");
    Ok(())
}

/// SQL that adds slots of an application: each of these processes has one every ten minutes from `from` to `until`.
fn slots(app: App, pids: u32, from: i64, until: i64) -> String {
    format!(
        "SELECT id FROM gctrace_app WHERE id = {0} FOR NO KEY UPDATE;
         INSERT INTO gctrace_slot SELECT {0}, at, 3, 4, '', 'web', pid, 1, 2, 1, 5, 0.5, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, at, 3
         FROM generate_series({from}, {until}, 600) AS at, generate_series(1, {pids}) AS pid ON CONFLICT DO NOTHING;
         UPDATE gctrace_app AS a SET slots = (SELECT count(*) FROM gctrace_slot WHERE app = a.id)",
        app.0
    )
}

fn new_app(store: &dyn store::Store, name: &str) -> Result<App> {
    let app = NewApp { name, email: "a@b", parent: None, created: 1.0 };
    Ok(store.register(&app, TokenHash::of(name), Rights::Both)?)
}

/// Old figures are deleted application by application; one that fails keeps neither those of the others nor anything else.
#[test]
fn old_figures_are_deleted() -> Result<()> {
    let postgres = Postgres::start()?;
    let store = store::open(&postgres.address())?;
    let [shop, mail] = [new_app(&*store, "shop")?, new_app(&*store, "mail")?];
    for app in [shop, mail] {
        postgres.query(&slots(app, 3, 1_000_000_200, 1_000_005_600))?;
    }
    let counts = "SELECT string_agg(a.slots || '/' || (SELECT count(*) FROM gctrace_slot WHERE app = a.id), ' ' ORDER BY id)
         FROM gctrace_app AS a";
    ensure!(postgres.query(counts)? == "30/30 30/30", "{}", postgres.query(counts)?);
    store.prune_slots(1_000_002_000)?;
    ensure!(postgres.query(counts)? == "21/21 21/21", "{}", postgres.query(counts)?);
    postgres.query(&format!(
        "INSERT INTO gctrace_gone (id, app, received) VALUES (decode('00', 'hex'), {0}, 1), (decode('01', 'hex'), {0}, 2000000000);
         CREATE FUNCTION refuse() RETURNS trigger AS 'BEGIN RAISE EXCEPTION ''no''; END' LANGUAGE plpgsql;
         CREATE TRIGGER refuse BEFORE DELETE ON gctrace_slot FOR EACH ROW WHEN (OLD.app = {0}) EXECUTE FUNCTION refuse()",
        shop.0
    ))?;
    let error = store.prune_slots(1_000_005_600).err().context("a failure is reported")?.to_string();
    ensure!(error.contains("no (P0001)"), "{error}");
    ensure!(postgres.query(counts)? == "21/21 3/3", "{}", postgres.query(counts)?);
    ensure!(postgres.query("SELECT count(*) FROM gctrace_gone")? == "1");
    let part = NewApp { name: "jobs", email: "", parent: Some(App(99)), created: 1.0 };
    let error = store.register(&part, TokenHash::of("t"), Rights::Both).err().context("no parent")?;
    ensure!(error.to_string() == "there is no application 99", "{error}");
    ensure!(store.roll_up(App(99), 0, 2_000_000_000, 7200)? == 0);
    Ok(())
}

/// Sets that arrive late get into the slots that are being added up, and neither fails because it waits for the other.
#[test]
fn late_sets_and_older_figures() -> Result<()> {
    let postgres = Postgres::start()?;
    let store = store::open(&postgres.address())?;
    let app = new_app(&*store, "shop")?;
    let (from, until) = (1_000_000_800, 1_000_040_800);
    let is_over = AtomicBool::new(false);
    let arrived = AtomicU32::new(0);
    std::thread::scope(|scope| -> Result<()> {
        let late = scope.spawn(|| -> Result<()> {
            let mut n = 0_u32;
            while !is_over.load(Ordering::Relaxed) {
                n += 1;
                let mut digest = Digest::default();
                digest.host = "web".to_owned();
                digest.pid = i64::from(n % 200 + 1);
                let set = NewSet {
                    id: &SetId::of(&std::array::from_fn(|at| n.to_le_bytes()[at % 4])),
                    group: Group { app, series: Series(3, 4) },
                    in_force: "",
                    received: (from + i64::from(n % 66) * 600) as f64,
                    evidence: &Evidence::default(),
                    digest: &digest,
                    body: b"",
                };
                store.insert(&set, Quota::NONE)?;
                arrived.store(n, Ordering::Relaxed);
            }
            Ok(())
        });
        let mut added = Ok(());
        // Long enough that many sets arrive meanwhile.
        let mut rounds = 0;
        while !late.is_finished() && (rounds < 4 || arrived.load(Ordering::Relaxed) <= 20) {
            rounds += 1;
            postgres.query(&slots(app, 200, from, until))?;
            added = store.roll_up(app, 0, 2_000_000_000, 7200).map(drop);
            if added.is_err() {
                break;
            }
        }
        is_over.store(true, Ordering::Relaxed);
        late.join().map_err(|_| anyhow::anyhow!("a panic"))??;
        Ok(added?)
    })?;
    store.roll_up(app, 0, 2_000_000_000, 7200)?;
    let counted = postgres.query("SELECT slots = (SELECT count(*) FROM gctrace_slot) FROM gctrace_app")?;
    ensure!(counted == "t", "{}", postgres.query("SELECT slots FROM gctrace_app")?);
    Ok(())
}
