//! A store of 1,000 applications after 30 days: each page is returned within a second.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, ensure};
use gctrace_collector::{
    digest::{Digest, Figures},
    store::{App, Group, NewApp, NewSet, Quota, Rights, SetId, Store, TokenHash, open},
};
use gctrace_tests::collector::{Collector, Cycle, cycles, set};
use gctrace_tests::ensure_times;
use gctrace_tests::postgres::Postgres;
use gctrace_tests::timing::settled;
use gctrace_tunemygc::{
    tune::{Evidence, Fold, Series},
    wire::SampleSet,
};
use serde_json::json;

const APPS: u64 = 1000;
const DAYS: i64 = 30;
const DAY: i64 = 86_400;
const TICK: i64 = 600;
const SERIES: Series = Series(3, 4);
/// The collector's defaults.
const QUOTA: Quota = Quota { sets: 100_000, bytes: 1 << 30 };
/// The settings in each third of the time.
const SETTINGS: [&str; 3] =
    ["", "RUBY_GC_MALLOC_LIMIT=33554432", "RUBY_GC_MALLOC_LIMIT=33554432 RUBY_GC_MALLOC_LIMIT_MAX=67108864"];
/// The columns that are copied with rows of `slot`.
const COLUMNS: &str = "at, ruby_major, ruby_minor, environment, host, pid, sets, cycles, majors, gc_ms, gc_seconds, \
    c0, c1, c2, c3, c4, c5, c6, c7, c8, c9, rss, slots";

/// The evidence of a set of 120 cycles.
fn evidence() -> Result<Evidence> {
    let kinds = [("newobj", None, 100), ("newobj", Some("oldgen"), 12), ("malloc", None, 8)];
    let kinds = kinds.map(|(by, major, n)| (Cycle { by, major, old_after: 99_000 }, n));
    let set = SampleSet::from_json(&set("", "3.4.7", &json!({}), &cycles(&kinds)).to_string())?;
    let mut fold = Fold::new(&set.header)?;
    set.samples.iter().for_each(|sample| fold.add(sample));
    Ok(fold.finish())
}

/// Stores a set that a process of an application sent at this time. `part` is the elapsed part (0 to 1) of the 30 days.
fn insert(store: &dyn Store, app: App, pid: i64, at: i64, part: f64, evidence: &Evidence) -> Result<()> {
    let mut id = [0; 32];
    for (place, number) in [app.0, pid, at].into_iter().enumerate() {
        id[place * 8..][..8].copy_from_slice(&number.to_le_bytes());
    }
    let seed = (at / TICK + pid) as u64;
    let mut digest = Digest::default();
    (digest.host, digest.pid) = (format!("web-{}.example.com", pid % 5), pid);
    SETTINGS[((part * 3.0) as usize).min(2)].clone_into(&mut digest.environment);
    digest.figures = Figures {
        cycles: 120 + seed % 60,
        majors: 3,
        gc_ms: 900 + seed % 400,
        gc_seconds: 590.0,
        classes: [20, 40, 30, 20, 10, 0, 0, 0, 0, seed % 2],
        rss: (200 + seed % 50) << 20,
        slots: 400_000 + seed % 1000 * 10,
    };
    let id = SetId::of(&id);
    let group = Group { app, series: SERIES };
    let body = [0xaa; 1000];
    let in_force = &digest.environment.clone();
    let new =
        NewSet { id: &id, group, in_force, received: at as f64, evidence, digest: &digest, body: &body };
    store.insert(&new, QUOTA)?;
    Ok(())
}

/// Fills a store. The first application has `processes` processes that sent a set every ten minutes for 30 days; its figures are aggregated
/// as the collector does it every day. Each other application has copies of the figures of two of these processes, and `sets` sets.
fn fill(store: &dyn Store, processes: i64, sets: i64, execute: &dyn Fn(&str) -> Result<()>) -> Result<()> {
    let evidence = evidence()?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs() as i64 / TICK * TICK;
    let mut apps = Vec::new();
    for number in 0..APPS {
        let app = NewApp { name: &format!("app-{number}"), email: "", parent: None, created: 0.0 };
        apps.push(store.register(&app, TokenHash::of(&format!("{number:032x}")), Rights::Both)?);
    }
    let ticks = DAYS * DAY / TICK;
    for tick in 0..ticks {
        let at = now - (ticks - 1 - tick) * TICK;
        for pid in 1..=processes {
            insert(store, apps[0], pid, at, tick as f64 / ticks as f64, &evidence)?;
        }
        if (tick + 1) % (DAY / TICK) == 0 {
            for (age, width) in [(25 * 3600, 2 * 3600), (8 * DAY, 6 * 3600)] {
                store.roll_up(apps[0], 0, (at - age) / width * width, width)?;
            }
        }
    }
    execute(&format!(
        "INSERT INTO slot (app, {COLUMNS}) SELECT app.id, {} FROM app, slot WHERE app.id > 1 AND slot.app = 1 AND pid <= 2",
        COLUMNS.split(", ").map(|name| format!("slot.{name}")).collect::<Vec<_>>().join(", "),
    ))?;
    execute("UPDATE app SET slots = (SELECT count(*) FROM slot WHERE slot.app = app.id) WHERE id > 1")?;
    for app in &apps[1..] {
        for tick in 0..sets {
            insert(store, *app, 1, now - tick * TICK, 1.0, &evidence)?;
        }
    }
    Ok(())
}

/// Requests pages of a collector on such a store, each three times: the fastest of the three takes less than a second. What else runs on the
/// machine can only make one slower.
fn look(name: &str, processes: i64, sets: i64, execute: &dyn Fn(&str) -> Result<()>) -> Result<()> {
    let begun = Instant::now();
    let store = open(name)?;
    fill(&*store, processes, sets, execute)?;
    let slots = store.slots(App(1), 0)?;
    // Ten-minute slots for 25 hours, two-hour slots until eight days ago, six-hour slots before that.
    let left = slots.len() as i64 / processes;
    ensure!((300..350).contains(&left), "{left} rows of a process are left");
    let host = slots[0].host.clone();
    let pid = slots[0].pid;
    drop(store);
    eprintln!("{name}: filled in {:.1} s", begun.elapsed().as_secs_f64());
    let collector = Collector::with_store("127.0.0.1:0", name, &[])?;
    let counted = |n: i64| if n == 1 { "1 process, ".to_owned() } else { format!("{n} processes, ") };
    let pages = [
        ("/".to_owned(), ">app-999</a>".to_owned()),
        ("/app/1?days=1".to_owned(), counted(processes)),
        ("/app/1?days=30".to_owned(), counted(processes)),
        ("/app/500?days=30".to_owned(), counted(processes.min(2))),
        (format!("/app/1?days=30&host={host}&pid={pid}"), format!(", process <strong>{pid}")),
    ];
    settled(|| get(&collector, &pages))
}

fn get(collector: &Collector, pages: &[(String, String)]) -> Result<()> {
    let mut slow = Vec::new();
    for (path, words) in pages {
        let mut fastest = Duration::MAX;
        for _ in 0..3 {
            let begun = Instant::now();
            let answer = collector.get(path)?;
            let took = begun.elapsed();
            let text = answer.text();
            ensure!(
                answer.code == 200 && text.contains(words),
                "{path}: {}: no {words} in {text}",
                answer.code
            );
            eprintln!("{path}: {took:?}, {} kB", text.len() >> 10);
            fastest = fastest.min(took);
        }
        if fastest >= Duration::from_secs(1) {
            slow.push((path, fastest));
        }
    }
    ensure_times!(slow.is_empty(), "{slow:?}");
    Ok(())
}

#[test]
fn sqlite() -> Result<()> {
    // In memory: the speed of a disk must not decide how long filling the store takes.
    let dir = tempfile::tempdir_in("/dev/shm").context("no /dev/shm")?;
    let path = dir.path().join("sets.db");
    let execute = |statement: &str| Ok(rusqlite::Connection::open(&path)?.execute_batch(statement)?);
    look(&format!("sqlite:{}", path.display()), 20, 12, &execute)
}

/// The same with fewer sets, because PostgreSQL takes milliseconds to store one.
#[test]
fn postgres() -> Result<()> {
    let postgres = Postgres::start()?;
    let execute = |statement: &str| -> Result<()> {
        // Replace the names of the tables, not those of columns.
        let words = statement.split(' ').map(|word| match word {
            "slot" | "app" => format!("gctrace_{word} AS {word}"),
            "app," => "gctrace_app AS app,".to_owned(),
            _ => word.to_owned(),
        });
        postgres.query(&words.collect::<Vec<_>>().join(" "))?;
        Ok(())
    };
    look(&postgres.address(), 1, 1, &execute)
}
