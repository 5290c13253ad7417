//! `cargo xtask bench --retention DIR`: the size of a collector's store, and its response times, after many agents sent sets for weeks.
//!
//! The sets are written to the store directly, as the collector writes them, with simulated times; figures are summed and quotas
//! applied as the collector does. Then a collector is started on the store and queried.

use std::{
    fs,
    path::Path,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, Result, ensure};
use gctrace_collector::{
    digest::{Digest, Figures},
    store::{Group, NewApp, NewSet, Quota, Rights, SetId, Sqlite, Store as _, TokenHash},
};
use gctrace_tests::collector::{Collector, Cycle, cycles, set};
use gctrace_tunemygc::{
    tune::{Evidence, Fold, Series},
    wire::SampleSet,
};
use serde_json::json;
use xtask::util::progress;

/// The simulated fleet.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Simulated {
    /// Processes that send a set every ten minutes.
    #[arg(long, default_value_t = 500, requires = "retention")]
    agents: u32,
    /// Applications that these belong to.
    #[arg(long, default_value_t = 1, requires = "retention")]
    apps: u32,
    /// For how many days.
    #[arg(long, default_value_t = 30, requires = "retention")]
    days: u32,
    /// Sets kept of an application, as the collector's option; its default
    #[arg(long, default_value_t = 100_000, requires = "retention")]
    app_sets: u64,
}

const TICK: u64 = 600;
const DAY: u64 = 86_400;
const SERIES: Series = Series(3, 4);
/// The collector's default.
const APP_BYTES: u64 = 1 << 30;
/// Settings of the first, second and last third of the time.
const ENVIRONMENTS: [&str; 3] =
    ["", "RUBY_GC_MALLOC_LIMIT=33554432", "RUBY_GC_MALLOC_LIMIT=33554432 RUBY_GC_MALLOC_LIMIT_MAX=67108864"];
/// Number of requests per page.
const TURNS: u32 = 5;

/// Runs the measurement with the store in this directory, where it remains.
pub(super) fn run(dir: &Path, options: &Simulated) -> Result<()> {
    fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let path = dir.join("sets.db");
    ensure!(!path.exists(), "{} is there already", path.display());
    let tokens = fill(&path, options)?;
    let size = |name: &str| fs::metadata(dir.join(name)).map_or(0, |data| data.len());
    println!("store: {:.0} MiB", (size("sets.db") + size("sets.db-wal")) as f64 / 1_048_576.0);
    let collector = Collector::start(&path, &[])?;
    let token = tokens.first().context("an application")?;
    let paths =
        ["/", "/app/1?days=1", "/app/1?days=7", "/app/1?days=30", "/metrics", &format!("/apps/{token}")];
    for path in paths {
        let mut times = Vec::new();
        for _ in 0..TURNS {
            let begin = Instant::now();
            let answer = collector.get(path)?;
            times.push(begin.elapsed());
            ensure!([200, 204].contains(&answer.code), "{path}: {answer:?}");
        }
        let first = times.first().copied().unwrap_or_default();
        times.sort();
        let shown = |time: Duration| format!("{:.3} s", time.as_secs_f64());
        let median = times.get(times.len() / 2).copied().unwrap_or_default();
        println!("{}: first {}, median {}", path.replace(token, "TOKEN"), shown(first), shown(median));
    }
    Ok(())
}

/// Fills a store. Returns the tokens of its applications.
fn fill(path: &Path, options: &Simulated) -> Result<Vec<String>> {
    let store = Sqlite::open(path)?;
    let evidence = evidence()?;
    let body = vec![0xaa; 1000];
    let quota = Quota { sets: options.app_sets, bytes: APP_BYTES };
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs() / TICK * TICK;
    let (mut tokens, mut groups) = (Vec::new(), Vec::new());
    for number in 0..options.apps {
        let token = format!("{number:032x}");
        let app = NewApp { name: &format!("app-{number}"), email: "", parent: None, created: 0.0 };
        let app = store.register(&app, TokenHash::of(&token), Rights::Both)?;
        groups.push(Group { app, series: SERIES });
        tokens.push(token);
    }
    let begin = now - u64::from(options.days) * DAY;
    let ticks = u64::from(options.days) * DAY / TICK;
    let clock = Instant::now();
    for tick in 0..ticks {
        let at = begin + tick * TICK;
        let environment = ENVIRONMENTS[(tick * ENVIRONMENTS.len() as u64 / ticks) as usize];
        for agent in 0..options.agents {
            let mut id = [0; 32];
            id[..8].copy_from_slice(&tick.to_le_bytes());
            id[8..12].copy_from_slice(&agent.to_le_bytes());
            let mut digest = Digest::default();
            (digest.host, digest.pid) = (format!("web-{agent:03}.example.com"), i64::from(1000 + agent));
            environment.clone_into(&mut digest.environment);
            digest.figures = figures(tick + u64::from(agent));
            let group = groups[agent as usize % groups.len()];
            let new = NewSet {
                id: &SetId::of(&id),
                group,
                in_force: environment,
                received: at as f64,
                evidence: &evidence[(tick + u64::from(agent)) as usize % evidence.len()],
                digest: &digest,
                body: &body,
            };
            store.insert(&new, quota)?;
        }
        if (tick + 1) % (DAY / TICK) == 0 {
            // As the collector does.
            for group in &groups {
                for (age, width) in [(25 * 3600, 2 * 3600), (8 * DAY, 6 * 3600)] {
                    let before = at.saturating_sub(age) / width * width;
                    store.roll_up(group.app, 0, before as i64, width as i64)?;
                }
            }
            let (day, size) = ((tick + 1) * TICK / DAY, fs::metadata(path)?.len() >> 20);
            progress(format!("bench: day {day}: {size} MiB, {:.0} s", clock.elapsed().as_secs_f64()));
        }
    }
    let totals = store.totals()?;
    println!("{} of {} sets are kept", totals.sets, ticks * u64::from(options.agents));
    Ok(tokens)
}

fn figures(seed: u64) -> Figures {
    Figures {
        cycles: 120 + seed % 60,
        majors: 3,
        gc_ms: 900 + seed % 400,
        gc_seconds: 590.0,
        classes: [20, 40, 30, 20, 10, 0, 0, 0, 0, seed % 2],
        rss: (200 + seed % 50) << 20,
        slots: 400_000 + seed % 1000 * 10,
    }
}

/// The evidence of sets of 120 cycles.
fn evidence() -> Result<Vec<Evidence>> {
    let kinds = [("newobj", None, 100), ("newobj", Some("oldgen"), 12), ("malloc", None, 8)];
    let kinds = kinds.map(|(by, major, n)| (Cycle { by, major, old_after: 99_000 }, n));
    (0..16_u64)
        .map(|number| {
            let mut set = set("", "3.4.7", &json!({}), &cycles(&kinds));
            for sample in set.as_array_mut().context("a list")?.iter_mut().skip(1) {
                let time = sample[4][5].as_u64().context("a time")?;
                sample[4][5] = json!(time * (100 + number) / 100);
            }
            let set = SampleSet::from_json(&set.to_string())?;
            let mut fold = Fold::new(&set.header)?;
            set.samples.iter().for_each(|sample| fold.add(sample));
            Ok(fold.finish())
        })
        .collect()
}
