//! Sets that were answered with 200 are kept, however the collector ends.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::collector::{Collector, example, wait_accepted};
use gctrace_tests::live::Live;

/// The collector is killed three times under load from eight clients; no accepted set is lost.
#[test]
fn nothing_accepted_is_lost() -> Result<()> {
    let live = Live::without_gctrace()?;
    let store = live.path("sets.db");
    let mut collector = Collector::start(&store, &[])?;
    let token = collector.register()?;
    let accepted = Mutex::new(Vec::new());
    let pids = AtomicU64::new(1);
    for round in 1..=3 {
        let pid = collector.pid()?;
        let over = AtomicBool::new(false);
        let before = accepted.lock().expect("no panic").len();
        let killed = std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    while !over.load(Ordering::Relaxed) {
                        let pid = pids.fetch_add(1, Ordering::Relaxed);
                        let set = example(&token, pid).expect("the example").to_string();
                        // If the collector was killed meanwhile, it gave no answer and promised nothing.
                        let Ok(answer) = collector.send(&set) else { continue };
                        assert_eq!(answer.code, 200, "{}", answer.text());
                        accepted.lock().expect("no panic").push(answer.text());
                    }
                });
            }
            wait_accepted(&accepted, before, 21, Duration::from_millis(500));
            let killed = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            over.store(true, Ordering::Relaxed);
            killed
        });
        killed.context("killing the collector")?;
        drop(collector);
        let now = accepted.lock().expect("no panic").clone();
        ensure!(now.len() > before + 20, "only {} sets in round {round}", now.len() - before);
        collector = Collector::start(&store, &[])?;
        let database = rusqlite::Connection::open(&store)?;
        let whole = "SELECT count(*) FROM sample_set WHERE id = ?1 AND samples = 10 AND length(body) > 500";
        let mut whole = database.prepare(whole)?;
        // The sets of earlier rounds are checked only in the last round.
        for address in &now[if round < 3 { before } else { 0 }..] {
            let id = address.split_once("/configs/").context("an address")?.1;
            let found: u64 = whole.query_row([id], |row| row.get(0))?;
            ensure!(found == 1, "{id} is lost in round {round}");
        }
        let last = now.last().and_then(|address| address.split_once("/configs/")).context("an address")?.1;
        ensure!(collector.get(&format!("/configs/{last}"))?.code == 200, "{last} is not found");
        let kept = collector.metric("gctrace_collector_stored_sets")?;
        ensure!(kept >= now.len() as u64, "{kept} sets are kept, {} were accepted", now.len());
    }
    let verdict: String =
        rusqlite::Connection::open(&store)?.query_row("PRAGMA integrity_check", [], |row| row.get(0))?;
    ensure!(verdict == "ok", "{verdict}");
    Ok(())
}

/// A store file that is removed or replaced stores nothing more: until it is back, sets are refused and the health check fails.
#[test]
fn removed_store() -> Result<()> {
    let live = Live::without_gctrace()?;
    let (store, aside) = (live.path("sets.db"), live.path("aside.db"));
    let collector = Collector::start(&store, &[])?;
    let token = collector.register()?;
    let codes = |pid| -> Result<(u16, u16)> {
        let sent = collector.send(&example(&token, pid)?.to_string())?.code;
        Ok((sent, collector.get("/healthz")?.code))
    };
    ensure!(codes(1)? == (200, 200));
    std::fs::rename(&store, &aside)?;
    let removed = codes(2)?;
    ensure!(removed == (500, 500), "without its file it answers {removed:?}");
    std::fs::write(&store, "")?;
    let replaced = codes(3)?;
    ensure!(replaced == (500, 500), "with another file it answers {replaced:?}");
    std::fs::rename(&aside, &store)?;
    ensure!(codes(4)? == (200, 200), "its file is there again");
    let finished = collector.stop()?;
    for what in ["sets.db was removed while it was in use", "sets.db was replaced by another file"] {
        ensure!(finished.errors().contains(what), "{}", finished.errors());
    }
    Ok(())
}
