//! What a collector accepts, from which clients, and for how long it keeps it.

use std::io::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::PATIENCE;
use gctrace_tests::child::Guarded;
use gctrace_tests::collector::{Collector, Cycle, apps, cycles, each_store, example, set};
use gctrace_tests::http;
use gctrace_tests::live::{Live, gctrace_binary};
use gctrace_tests::postgres::Postgres;
use serde_json::json;

const FORM: &str = "email=someone%40example.com&app=shop";

/// A collector that can be reached from elsewhere accepts no registrations by default. Its operator adds applications, even while it runs.
#[test]
fn registration() -> Result<()> {
    let live = Live::without_gctrace()?;
    let path = live.path("sets.db");
    let store = format!("sqlite:{}", path.display());
    for (listen, args, code) in [
        ("127.0.0.1:0", &[][..], 200),
        ("127.0.0.1:0", &["--no-registration"], 422),
        ("0.0.0.0:0", &[], 422),
        ("0.0.0.0:0", &["--registration"], 200),
    ] {
        let collector = Collector::on(listen, &path, args)?;
        let answer = collector.form("/accounts", FORM)?;
        ensure!(answer.code == code, "{listen} {args:?}: {answer:?}");
    }
    // Listening only on loopback is not sufficient: a proxy forwards everybody, and a browser runs the pages of other sites.
    let public = Collector::start(&path, &["--public-url", "https://gc.example"])?;
    ensure!(public.form("/accounts", FORM)?.code == 422);
    let local = Collector::start(&path, &[])?;
    let opened = Collector::on("0.0.0.0:0", &path, &["--registration"])?;
    for (collector, header, code) in [
        (&local, ("X-Forwarded-For", "192.0.2.1"), 422),
        (&local, ("Origin", "https://evil.example"), 422),
        (&local, ("Sec-Fetch-Site", "cross-site"), 422),
        (&local, ("Sec-Fetch-Site", "none"), 200),
        (&opened, ("X-Forwarded-For", "192.0.2.1"), 200),
        (&opened, ("Origin", "null"), 422),
    ] {
        let headers = [("Content-Type", "application/x-www-form-urlencoded"), header];
        let answer = http::post(collector.address, "/accounts", &headers, FORM.as_bytes())?;
        ensure!(answer.code == code, "{header:?}: {answer:?}");
    }
    let mut stream = http::connect(local.address)?;
    let length = FORM.len();
    write!(
        stream,
        "POST /accounts HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{FORM}"
    )?;
    ensure!(http::read(&stream)?.code == 422, "another name of this address");
    drop((public, local, opened));
    let collector = Collector::on("0.0.0.0:0", &path, &[])?;
    let token = apps(&store, &["add", "mail", "--email", "me@example.com"])?;
    let token = token.trim();
    ensure!(collector.send(&example(token, 1)?.to_string())?.code == 200);
    let list = apps(&store, &["list"])?;
    let entry = list.lines().find(|line| line.contains("mail")).context("mail")?;
    ensure!(
        entry.split_whitespace().nth(1) == Some("1") && entry.ends_with("mail (me@example.com)"),
        "{list}"
    );
    let number = entry.split_whitespace().next().context("a number")?;
    ensure!(apps(&store, &["delete", number])?.ends_with(": deleted, with 1 set\n"));
    ensure!(collector.send(&example(token, 1)?.to_string())?.code == 404);
    ensure!(apps(&store, &["delete", number]).is_err(), "it is not there any more");
    ensure!(collector.metric("gctrace_collector_stored_sets")? == 0);
    Ok(())
}

/// An application keeps its latest sets, within its quota, on either engine. Old sets are deleted automatically.
#[test]
fn quotas_and_ages() -> Result<()> {
    let live = Live::without_gctrace()?;
    let path = live.path("sets.db");
    let postgres = Postgres::start()?;
    for store in [format!("sqlite:{}", path.display()), postgres.address()] {
        let execute = |statement: &str| -> Result<()> {
            if store.starts_with("sqlite:") {
                rusqlite::Connection::open(&path)?.execute_batch(statement)?;
            } else {
                postgres.query(&statement.replace("sample_set", "gctrace_sample_set"))?;
            }
            Ok(())
        };
        let collector = Collector::with_store("127.0.0.1:0", &store, &["--app-sets", "3"])?;
        let (shop, mail) = (collector.register()?, collector.register()?);
        ensure!(collector.send(&example(&mail, 99)?.to_string())?.code == 200);
        let mut addresses = Vec::new();
        for pid in 1..6 {
            let answer = collector.send(&example(&shop, pid)?.to_string())?;
            let path = answer.text().split_once("/configs/").context("an address")?.1.to_owned();
            addresses.push(format!("/configs/{path}"));
        }
        let codes = addresses.iter().map(|path| Ok(collector.get(path)?.code)).collect::<Result<Vec<_>>>()?;
        ensure!(codes == [404, 404, 200, 200, 200], "{codes:?}");
        ensure!(collector.metric("gctrace_collector_over_quota_sets_total")? == 2);
        ensure!(collector.metric("gctrace_collector_stored_sets")? == 4);
        collector.stop()?;

        // Prunes the whole application but no other application; new sets stay.
        ensure!(apps(&store, &["prune", "1", "--older-than", "1h"])?.ends_with(" 0 sets deleted\n"));
        execute(
            "UPDATE sample_set SET received = received - 86400 WHERE number < (SELECT max(number) FROM sample_set)",
        )?;
        ensure!(apps(&store, &["prune", "1", "--older-than", "1h"])?.ends_with(" 2 sets deleted\n"));
        let collector = Collector::with_store("127.0.0.1:0", &store, &["--keep", "12h"])?;
        let begun = Instant::now();
        while collector.metric("gctrace_collector_expired_sets_total")? != 1 {
            ensure!(begun.elapsed() < Duration::from_secs(20), "the old set is kept");
            std::thread::sleep(Duration::from_millis(50));
        }
        ensure!(collector.metric("gctrace_collector_stored_sets")? == 1);
        let list = apps(&store, &["list"])?;
        let counts: Vec<_> = list.lines().skip(1).filter_map(|line| line.split_whitespace().nth(1)).collect();
        ensure!(counts == ["1", "0"], "{list}");
        collector.stop()?;

        // The same for the quota in bytes.
        let bytes = |query: &str| -> Result<u64> {
            if store.starts_with("sqlite:") {
                Ok(rusqlite::Connection::open(&path)?.query_row(query, [], |row| row.get(0))?)
            } else {
                Ok(postgres.query(&query.replace("sample_set", "gctrace_sample_set"))?.parse()?)
            }
        };
        let collector = Collector::with_store("127.0.0.1:0", &store, &["--app-mib", "1"])?;
        let large = collector.register()?;
        let stored = |answer: http::Answer| -> Result<String> {
            ensure!(answer.code == 200, "{answer:?}");
            Ok(format!("/configs/{}", answer.text().split_once("/configs/").context("an address")?.1))
        };
        let sets =
            (0..SETS).map(|pid| stored(collector.send(&bulky(&large, pid)?)?)).collect::<Result<Vec<_>>>()?;
        let deleted = collector.metric("gctrace_collector_over_quota_sets_total")?;
        let codes = sets.iter().map(|path| Ok(collector.get(path)?.code)).collect::<Result<Vec<_>>>()?;
        let kept = (0..SETS).map(|pid| if pid < deleted { 404 } else { 200 });
        ensure!(deleted > 0 && codes.iter().copied().eq(kept), "{deleted}: {codes:?}");
        // Figures count towards the quota, too.
        let kept = bytes("SELECT sum(length(body)) FROM sample_set")?;
        ensure!((700 << 10..=1 << 20).contains(&kept), "{kept} bytes of bodies");
        ensure!(collector.metric("gctrace_collector_stored_sets")? == SETS - deleted + 1, "one is another's");
        collector.stop()?;
    }
    Ok(())
}

/// Number of sets that exceeds the quota of an application with a limit of 1 MiB.
const SETS: u64 = 120;

/// A set that takes about 12 KiB, however it is compressed.
fn bulky(token: &str, pid: u64) -> Result<String> {
    let mut set = example(token, pid)?;
    let mut random = pid.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let text: String = std::iter::repeat_with(|| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        char::from(b'0' + (random >> 58) as u8)
    })
    .take(16_000)
    .collect();
    // No quotes and no backslashes, which would need to be escaped.
    set[1][6] = text.replace('\\', "~").into();
    Ok(set.to_string())
}

/// On a full disk, sets are refused with a 500, which agents retry, and the log has one line about it (and later one with the number of
/// repetitions). Recommendations can be read, although they cannot be noted. Once there is room, sets are accepted again, and every accepted set is present.
#[test]
fn full_disk() -> Result<()> {
    let live = Live::without_gctrace()?;
    let disk = live.dir("disk")?;
    let run = |args: &[&str]| -> Result<()> {
        let done = std::process::Command::new(args[0]).args(&args[1..]).arg(&disk).status()?;
        ensure!(done.success(), "{args:?}: {done}");
        Ok(())
    };
    run(&["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs"])?;
    let found = on_full_disk(&disk);
    run(&["umount"])?;
    found
}

fn on_full_disk(disk: &Path) -> Result<()> {
    let (store, filler) = (disk.join("sets.db"), disk.join("filler"));
    let mut collector = Collector::start(&store, &[])?;
    let (advised, token) = (collector.register()?, collector.register()?);
    let kinds = [("newobj", None, 300), ("malloc", None, 60), ("newobj", Some("oldgen"), 40)]
        .map(|(by, major, n)| (Cycle { by, major, old_after: 99_000 }, n));
    let answer = collector.send(&set(&advised, "3.4.7", &json!({}), &cycles(&kinds)).to_string())?;
    ensure!(answer.code == 200, "{answer:?}");
    let advised_id = answer.text().split_once("/configs/").context("an address")?.1.to_owned();
    std::fs::write(&filler, vec![7; 8 << 20])?;
    let mut accepted = vec![advised_id.clone()];
    let mut pid = 0;
    let mut send = |collector: &Collector, accepted: &mut Vec<String>| -> Result<u16> {
        pid += 1;
        let answer = collector.send(&bulky(&token, pid)?)?;
        if answer.code == 200 {
            let id = answer.text().split_once("/configs/").context("an address")?.1.to_owned();
            accepted.push(id);
        }
        Ok(answer.code)
    };
    for round in 0..2 {
        let before = accepted.len();
        let mut code = 200;
        while code == 200 {
            ensure!(accepted.len() < 5_000, "the disk is never full");
            code = send(&collector, &mut accepted)?;
        }
        // More than the write-ahead log holds: it went into the database file itself.
        ensure!(accepted.len() > before + 50, "{} before the disk was full", accepted.len() - before);
        let mut refused = 0;
        for _ in 0..50 {
            let code = send(&collector, &mut accepted)?;
            ensure!(code == 200 || code == 500, "{code} while the disk is full");
            refused += u32::from(code == 500);
        }
        ensure!(refused > 40, "only {refused} of 50 were refused on a full disk");
        ensure!(collector.get("/healthz")?.code == 200, "what is there can be read");
        for path in [format!("/apps/{advised}"), "/app/1".to_owned(), format!("/configs/{advised_id}")] {
            let answer = collector.get(&path)?;
            ensure!(
                answer.code == 200 && answer.text().replace("<wbr>", "").contains("RUBY_GC_"),
                "{path} on a full disk: {answer:?}"
            );
        }
        let stored = collector.metric("gctrace_collector_stored_sets")?;
        ensure!(stored == accepted.len() as u64, "{stored} of {} are stored", accepted.len());
        if round == 0 {
            std::fs::write(&filler, vec![7; 4 << 20])?;
            ensure!(send(&collector, &mut accepted)? == 200, "there is room again");
        }
    }
    let finished = collector.stop()?;
    let errors = finished.errors();
    let full: Vec<&str> = errors.lines().filter(|line| line.contains("disk is full")).collect();
    ensure!(full.len() == 2 && full[1].contains("more times]"), "{errors}");

    std::fs::remove_file(&filler)?;
    collector = Collector::start(&store, &[])?;
    for _ in 0..3 {
        ensure!(send(&collector, &mut accepted)? == 200);
    }
    for id in &accepted {
        let answer = collector.get(&format!("/configs/{id}.json"))?;
        ensure!(answer.code == 200, "{id} was accepted, and is lost: {answer:?}");
    }
    ensure!(collector.metric("gctrace_collector_stored_sets")? == accepted.len() as u64);
    collector.stop()?;
    let verdict: String =
        rusqlite::Connection::open(&store)?.query_row("PRAGMA integrity_check", [], |row| row.get(0))?;
    ensure!(verdict == "ok", "{verdict}");
    Ok(())
}

/// CPU time used by a process so far.
fn cpu(of: &Collector) -> Result<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", of.pid()?.as_raw_nonzero()))?;
    let fields: Vec<&str> = stat.rsplit_once(')').context("a name")?.1.split_whitespace().collect();
    let ticks = fields[11].parse::<u64>()? + fields[12].parse::<u64>()?;
    // In user space, a second has 100 ticks on all architectures (USER_HZ).
    Ok(Duration::from_millis(10 * ticks))
}

/// A set with `RUBY_GC_*` variables, for which the advice must be known, takes less than 2.5 times the CPU time of a set without them, even
/// with 500 stored sets of the application.
#[test]
fn variables_cost_little() -> Result<()> {
    const STORED: u64 = 500;
    const TURNS: u64 = 10;
    const SETS: u64 = 100;
    let live = Live::without_gctrace()?;
    let collector = Collector::start(&live.path("sets.db"), &[])?;
    // A hundred samples.
    let kind = Cycle { by: "newobj", major: None, old_after: 0 };
    let environments =
        [json!({}), json!({"RUBY_GC_HEAP_INIT_SLOTS": "400000", "RUBY_GC_MALLOC_LIMIT": "33554432"})];
    let mut sets = Vec::new();
    for environment in environments {
        sets.push(set(&collector.register()?, "3.4.7", &environment, &cycles(&[(kind, 50)])));
    }
    let mut pid = 0;
    let mut send = |set: &mut serde_json::Value| -> Result<()> {
        pid += 1;
        set[0][10] = json!(pid);
        let answer = collector.send(&set.to_string())?;
        ensure!([200, 412].contains(&answer.code), "{answer:?}");
        Ok(())
    };
    for set in &mut sets {
        (0..STORED).try_for_each(|_| send(set))?;
    }
    let mut taken = [Duration::ZERO; 2];
    for _ in 0..TURNS {
        for (set, taken) in sets.iter_mut().zip(&mut taken) {
            let before = cpu(&collector)?;
            (0..SETS).try_for_each(|_| send(set))?;
            *taken += cpu(&collector)?.saturating_sub(before);
        }
    }
    let [without, with] = taken.map(|taken| taken.as_secs_f64() * 1e3 / (TURNS * SETS) as f64);
    eprintln!("{without:.2} ms of processor time without variables, {with:.2} ms with them");
    ensure!(with < 2.5 * without, "{with:.2} ms of processor time with variables, {without:.2} ms without");
    Ok(())
}

/// The files for a collector in `packaging/` work: their commands start a collector, which listens.
#[test]
fn packaging() -> Result<()> {
    let live = Live::without_gctrace()?;
    let packaging = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging");
    let unit = std::fs::read_to_string(packaging.join("gctrace-collector.service"))?;
    let start = unit
        .lines()
        .find_map(|line| line.strip_prefix("ExecStart=/usr/bin/gctrace "))
        .context("ExecStart")?;
    let manifest = std::fs::read_to_string(packaging.join("collector.yaml"))?;
    let command = manifest
        .lines()
        .find_map(|line| line.trim().strip_prefix("command: [gctrace, "))
        .context("command")?;
    let command = command.trim_end_matches(']').replace(['"', ','], "");
    for (arguments, directory) in [(start, "/var/lib/gctrace-collector"), (&command, "/data")] {
        let here = live.path("").to_string_lossy().into_owned();
        let arguments =
            arguments.replace(directory, here.trim_end_matches('/')).replace("0.0.0.0:9292", "127.0.0.1:0");
        let mut words: Vec<&str> = arguments.split(' ').collect();
        if !words.contains(&"--listen") {
            words.extend(["--listen", "127.0.0.1:0"]);
        }
        let mut process =
            Guarded::start("collector", std::process::Command::new(gctrace_binary()?).args(&words))?;
        process.wait_stderr(PATIENCE, "its address", |line| line.contains("collector listens on"))?;
    }
    Ok(())
}

/// A set that is sent again after it was deleted is counted only once. The number of a deleted application is never reused.
#[test]
fn deleted() -> Result<()> {
    each_store(|store| {
        let collector = Collector::with_store("127.0.0.1:0", store, &["--app-sets", "2"])?;
        let token = collector.register()?;
        let send = |pid: u64| -> Result<()> {
            let answer = collector.send(&example(&token, pid)?.to_string())?;
            ensure!(answer.code == 200, "{answer:?}");
            Ok(())
        };
        (0..4).try_for_each(send)?;
        (0..4).try_for_each(send)?;
        ensure!(collector.metric("gctrace_collector_duplicate_sets_total")? == 4);
        ensure!(collector.metric("gctrace_collector_stored_sets")? == 2);
        ensure!(apps(store, &["add", "second"]).is_ok());
        apps(store, &["delete", "2"])?;
        apps(store, &["add", "third"])?;
        let list = apps(store, &["list"])?;
        let third = list.lines().find(|line| line.contains("third")).unwrap_or_default();
        ensure!(third.split_whitespace().next() == Some("3"), "{list}");
        Ok(())
    })
}

/// SIGUSR2, which users send to every gctrace of a host to have recordings dumped, does not end a collector.
#[test]
fn survives_requests_for_dumps() -> Result<()> {
    let live = Live::without_gctrace()?;
    let collector = Collector::start(&live.path("sets.db"), &[])?;
    for _ in 0..3 {
        rustix::process::kill_process(collector.pid()?, rustix::process::Signal::USR2)?;
        std::thread::sleep(Duration::from_millis(100));
        ensure!(collector.get("/")?.code == 200);
    }
    collector.stop().map(drop)
}
