//! A store in a file: what is stored is read back, deletion deletes, and other files are left alone.

use super::*;
use crate::{
    digest::{Digest, Figures},
    tune::{Evidence, history::Times},
};

pub(super) fn store() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sets.db");
    (dir, path)
}

pub(super) fn register(store: &Sqlite, name: &str, parent: Option<App>) -> App {
    let app = NewApp { name, email: "a@b", parent, created: 1.0 };
    store.register(&app, TokenHash::of(name), Rights::Both).unwrap()
}

/// What is stored is read back, even after reopening; the same set is stored once; groups are kept apart.
#[test]
fn keeps() {
    let (_dir, path) = store();
    let token = TokenHash::of("secret' OR 1=1 --");
    let id = |byte: u8| SetId::of(&[byte; 32]);
    {
        let store = Sqlite::open(&path).unwrap();
        assert_eq!(store.token(token).unwrap(), None);
        let new = NewApp { name: "shop", email: "a@b'); DROP TABLE app; --", parent: None, created: 1.0 };
        let app = store.register(&new, token, Rights::Both).unwrap();
        assert!(store.register(&new, token, Rights::Both).is_err(), "a token is one application's");
        assert_eq!(store.latest_group(app).unwrap(), None);
        for (byte, series) in [(1, Series(3, 3)), (2, Series(3, 4)), (3, Series(3, 4))] {
            let evidence = Evidence { sets: 1, samples: 10, ..Evidence::default() };
            let (id, group) = (id(byte), Group { app, series });
            let set = NewSet {
                id: &id,
                group,
                in_force: if byte == 3 { "RUBY_GC_MALLOC_LIMIT=1" } else { "" },
                received: 2.0,
                evidence: &evidence,
                digest: &Digest::default(),
                body: b"body",
            };
            assert!(store.insert(&set, Quota::NONE).unwrap().new);
            assert!(!store.insert(&set, Quota::NONE).unwrap().new);
        }
    }
    let store = Sqlite::open(&path).unwrap();
    let app = store.token(token).unwrap().unwrap().app.unwrap();
    let group = Group { app, series: Series(3, 4) };
    assert_eq!(store.latest_group(app).unwrap(), Some(group));
    assert_eq!(store.group_of(&id(1)).unwrap().unwrap().0.series, Series(3, 3));
    assert_eq!(store.group_of(&id(9)).unwrap(), None);
    let environments = store.environments(group, 9).unwrap();
    let keys: Vec<&str> = environments.iter().map(|environment| environment.key.as_str()).collect();
    assert_eq!(keys, ["RUBY_GC_MALLOC_LIMIT=1", ""], "that of the latest set is first");
    assert_eq!(store.environments(group, 1).unwrap(), environments[..1]);
    assert_eq!(store.group_of(&id(3)).unwrap(), Some((group, environments[0].id)));
    let numbers = |after, most| -> Vec<i64> {
        let sets = store.evidence(environments[1].id, after, most).unwrap();
        sets.into_iter().map(|(number, _)| number).collect()
    };
    assert_eq!((numbers(0, 9), numbers(2, 9), numbers(0, 0)), (vec![2], vec![], vec![]));
    for (at, settings) in [["A=1", "B=2"], ["B=2", "C=3"]].into_iter().enumerate() {
        store.advise(group, &settings.map(ToOwned::to_owned), at as f64, 2).unwrap();
    }
    store.advise(Group { app, series: Series(3, 3) }, &["C=3".to_owned(), "D=4".to_owned()], 5.0, 2).unwrap();
    let advised = [("B=2", 1.0), ("C=3", 5.0), ("D=4", 5.0)].map(|(name, at)| (name.to_owned(), at));
    assert_eq!(store.advised(app).unwrap(), HashMap::from(advised), "on any series");
    assert!(store.advised(App(99)).unwrap().is_empty());
    assert_eq!(store.totals().unwrap(), Totals { apps: 1, sets: 3, samples: 30 });
    let mode = std::os::unix::fs::MetadataExt::mode(&fs::metadata(&path).unwrap());
    assert_eq!(mode & 0o777, 0o600);
}

/// Above its quota an application loses its oldest sets and others lose nothing; sets are deleted by age, and with their application;
/// the counts match what is stored, even in a store from before there were counts.
#[test]
fn deletes() {
    let (_dir, path) = store();
    let evidence = Evidence { sets: 1, samples: 10, ..Evidence::default() };
    let put = |store: &Sqlite, app, byte: u8, quota| {
        let (id, group) = (SetId::of(&[byte; 32]), Group { app, series: Series(3, 4) });
        let received = f64::from(byte);
        let body = vec![0; 1000];
        store
            .insert(
                &NewSet {
                    id: &id,
                    group,
                    in_force: "",
                    received,
                    evidence: &evidence,
                    digest: &Digest::default(),
                    body: &body,
                },
                quota,
            )
            .unwrap()
    };
    let known = |store: &Sqlite| -> Vec<u8> {
        let there = |byte: &u8| store.group_of(&SetId::of(&[*byte; 32])).unwrap().is_some();
        (0..100).filter(there).collect()
    };
    let counted = |store: &Sqlite| -> Vec<(u64, u64)> {
        store.apps().unwrap().iter().map(|app| (app.sets, app.bytes)).collect()
    };
    let store = Sqlite::open(&path).unwrap();
    let [shop, mail] = ["shop", "mail"].map(|name| register(&store, name, None));
    put(&store, mail, 50, Quota::NONE);
    let few = Quota { sets: 3, bytes: u64::MAX };
    let deleted: Vec<u64> = (1..6).map(|byte| put(&store, shop, byte, few).deleted).collect();
    assert_eq!((deleted, known(&store)), (vec![0, 0, 0, 1, 1], vec![3, 4, 5, 50]));
    // A set that is sent again changes nothing.
    assert_eq!(put(&store, shop, 5, Quota { sets: 1, bytes: 1 }), Inserted::default());
    let each = counted(&store)[1].1;
    assert!(each > 1000);
    assert_eq!(put(&store, shop, 6, Quota { sets: 100, bytes: 2 * each }).deleted, 2);
    assert_eq!(counted(&store), [(2, 2 * each), (1, each)]);
    // The latest set stays, however small the quota is.
    assert_eq!(put(&store, shop, 7, Quota { sets: 0, bytes: 0 }).deleted, 2);
    assert_eq!(put(&store, shop, 8, Quota::NONE), Inserted { new: true, deleted: 0 });
    assert_eq!(store.prune(8.0, Some(mail)).unwrap(), 0);
    assert_eq!(store.prune(8.0, Some(shop)).unwrap(), 1);
    assert_eq!(store.prune(50.0, None).unwrap(), 1);
    assert_eq!((known(&store), counted(&store)), (vec![50], vec![(0, 0), (1, each)]));
    for byte in 10..20 {
        put(&store, shop, byte, Quota::NONE);
    }
    let latest = store.apps().unwrap()[0].clone();
    assert_eq!((latest.app, latest.name.as_str(), latest.sets, latest.last), (shop, "shop", 10, Some(19.0)));
    // The state in which an earlier gctrace left it.
    let before = "UPDATE app SET token_hash = (SELECT hash FROM token WHERE app = app.id); DROP TABLE token;
        ALTER TABLE app DROP COLUMN parent; DROP TABLE given; DROP TABLE period; DROP TABLE environment; DROP TABLE advised; DROP INDEX sample_set_environment;
        ALTER TABLE sample_set DROP COLUMN environment; DROP INDEX sample_set_app; DROP INDEX sample_set_received;
        DROP TABLE app_number; DROP TABLE set_number; DROP TABLE gone; DROP TABLE slot; ALTER TABLE app DROP COLUMN slots; ALTER TABLE app DROP COLUMN sets; ALTER TABLE app DROP COLUMN bytes;
        ALTER TABLE app DROP COLUMN samples; PRAGMA user_version = 1";
    let totals = store.totals().unwrap();
    store.writer().unwrap().execute_batch(before).unwrap();
    drop(store);
    let store = Sqlite::open(&path).unwrap();
    assert_eq!(counted(&store), [(10, 10 * each), (1, each)]);
    assert_eq!(store.totals().unwrap(), totals);
    let token = store.token(TokenHash::of("shop")).unwrap().unwrap();
    assert_eq!((token.app, token.rights, token.ends), (Some(shop), Rights::Both, None));
    assert!(store.delete_app(shop).unwrap() && !store.delete_app(shop).unwrap());
    assert_eq!((known(&store), counted(&store)), (vec![50], vec![(1, each)]));
    assert_eq!(store.token(TokenHash::of("shop")).unwrap(), None);
}

/// Sets in the same ten minutes of a process are summed, others are not; old ones are deleted.
#[test]
fn slots() {
    let (_dir, path) = store();
    let store = Sqlite::open(&path).unwrap();
    let app = register(&store, "shop", None);
    let evidence = Evidence::default();
    let base = 999_999_600;
    for (byte, after, host) in [(1, 100.0, "a"), (2, 500.0, "a"), (3, 700.0, "a"), (4, 700.0, "b")] {
        let figures = Figures {
            cycles: 2,
            gc_ms: 5,
            classes: [1; 10],
            rss: 10 * u64::from(byte),
            ..Figures::default()
        };
        let mut digest = Digest::default();
        (digest.host, digest.figures) = (host.to_owned(), figures);
        let (id, group) = (SetId::of(&[byte; 32]), Group { app, series: Series(3, 4) });
        let set = NewSet {
            id: &id,
            group,
            in_force: "",
            received: base as f64 + after,
            evidence: &evidence,
            digest: &digest,
            body: b"",
        };
        assert!(store.insert(&set, Quota::NONE).unwrap().new);
        assert!(!store.insert(&set, Quota::NONE).unwrap().new);
    }
    let slots = store.slots(app, 0).unwrap();
    let found: Vec<_> = slots.iter().map(|slot| (slot.at, slot.host.as_str(), slot.figures.cycles)).collect();
    assert_eq!(found, [(base + 600, "b", 2), (base + 600, "a", 2), (base, "a", 4)]);
    assert_eq!((slots[2].figures.rss, slots[2].figures.gc_ms, slots[2].figures.classes), (20, 10, [2; 10]));
    store.prune_slots(base + 600).unwrap();
    assert_eq!(store.slots(app, 0).unwrap().len(), 2);
    assert!(store.delete_app(app).unwrap());
}

/// Older slots are summed: totals are unchanged, other slots are left alone, and repeating it changes nothing.
#[test]
fn roll_up() {
    let (_dir, path) = store();
    let store = Sqlite::open(&path).unwrap();
    let (app, other) = (register(&store, "shop", None), register(&store, "mail", None));
    let begin = 1_000_080_000;
    assert_eq!(begin % 21_600, 0);
    for (at, app) in (0..180_u32).flat_map(|at| [(at, app), (at, other)]) {
        for pid in [7, 8] {
            let figures = Figures {
                cycles: u64::from(at),
                gc_ms: 5,
                gc_seconds: 0.5,
                classes: [u64::from(at % 3); 10],
                rss: u64::from(at),
                ..Figures::default()
            };
            let mut digest = Digest::default();
            (digest.pid, digest.figures) = (pid, figures);
            let set = NewSet {
                id: &SetId::of(&std::array::from_fn(|n| [at as u8, app.0 as u8, pid as u8][n % 3])),
                group: Group { app, series: Series(3, 4) },
                in_force: "",
                received: f64::from(begin + at as i32 * 600 + 7),
                evidence: &Evidence::default(),
                digest: &digest,
                body: b"",
            };
            assert!(store.insert(&set, Quota::NONE).unwrap().new);
        }
    }
    let sum = |slots: &[Slot]| {
        let mut sum = Figures::default();
        for slot in slots {
            sum.merge(&slot.figures);
        }
        sum
    };
    let before = store.slots(app, 0).unwrap();
    assert_eq!(before.len(), 360);
    let end = i64::from(begin) + 20 * 3600;
    // 20 hours of six slots each become 20 slots per process; ten hours stay.
    assert_eq!(store.roll_up(app, 0, end, 3600).unwrap(), 200);
    assert_eq!(store.roll_up(app, 0, end, 3600).unwrap(), 0);
    let after = store.slots(app, 0).unwrap();
    assert_eq!((after.len(), sum(&after)), (160, sum(&before)));
    let first = after.last().unwrap();
    assert_eq!(
        (first.at, first.figures.cycles, first.figures.rss, first.figures.classes[0]),
        (begin.into(), 15, 5, 6)
    );
    // Six hours become one slot: three per process, and two hours stay.
    store.roll_up(app, 0, end - 2 * 3600, 21_600).unwrap();
    let after = store.slots(app, 0).unwrap();
    assert_eq!((after.len(), sum(&after)), (2 * (3 + 2 + 60), sum(&before)));
    assert_eq!(store.slots(other, 0).unwrap().len(), 360, "another one's");
    let counted: u64 = store
        .reader()
        .unwrap()
        .query_row("SELECT slots FROM app WHERE id = ?1", [app.0], |row| row.get(0))
        .unwrap();
    assert_eq!(counted, after.len() as u64);
}

/// A store that is written to and deleted from for a long time does not grow.
#[test]
fn stays_flat() {
    let (_dir, path) = store();
    let store = Sqlite::open(&path).unwrap();
    let group = Group { app: register(&store, "shop", None), series: Series(3, 4) };
    let evidence = Evidence { sets: 1, samples: 10, ..Evidence::default() };
    let quota = Quota { sets: 10, bytes: u64::MAX };
    let mut sizes = Vec::new();
    for day in 0..10_u8 {
        for n in 0..20_u8 {
            let (id, body) = (SetId::of(&[[day, n]; 16].concat().try_into().unwrap()), vec![n; 20_000]);
            store
                .insert(
                    &NewSet {
                        id: &id,
                        group,
                        in_force: "",
                        received: 0.0,
                        evidence: &evidence,
                        digest: &Digest::default(),
                        body: &body,
                    },
                    quota,
                )
                .unwrap();
        }
        store.writer().unwrap().query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).unwrap();
        sizes.push(fs::metadata(&path).unwrap().len());
    }
    assert!(sizes[9] <= sizes[0] + (64 << 10), "{sizes:?}");
}

/// Files of other programs, and of later versions, are refused and not changed.
#[test]
fn foreign_files() {
    let (dir, path) = store();
    fs::write(&path, "not a database, but long enough to be mistaken for one".repeat(100)).unwrap();
    let error = Sqlite::open(&path).unwrap_err().to_string();
    assert!(error.ends_with("is not an SQLite database"), "{error}");
    let other = dir.path().join("other.db");
    Connection::open(&other).unwrap().execute_batch("CREATE TABLE theirs (x)").unwrap();
    let before = fs::read(&other).unwrap();
    let error = Sqlite::open(&other).unwrap_err().to_string();
    assert!(fs::read(&other).unwrap() == before, "it is changed");
    assert!(error.ends_with("is a database of another program"), "{error}");
    let short = dir.path().join("short.db");
    drop(Sqlite::open(&short).unwrap());
    File::options().write(true).open(&short).unwrap().set_len(5000).unwrap();
    let error = Sqlite::open(&short).unwrap_err().to_string();
    assert!(error.starts_with(&format!("{} is a damaged SQLite database (", short.display())), "{error}");
    let later = dir.path().join("later.db");
    drop(Sqlite::open(&later).unwrap());
    Connection::open(&later).unwrap().pragma_update(None, "user_version", 99).unwrap();
    assert!(Sqlite::open(&later).unwrap_err().to_string().contains("later gctrace"));
    assert!(Sqlite::open(&dir.path().join("no/sets.db")).is_err());
    let fifo = dir.path().join("pipe.db");
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    let error = Sqlite::open(&fifo).unwrap_err().to_string();
    assert!(error.ends_with("is not a regular file"), "{error}");
    let empty = dir.path().join("empty.db");
    fs::write(&empty, "").unwrap();
    fs::set_permissions(&empty, fs::Permissions::from_mode(0o644)).unwrap();
    drop(Sqlite::open(&empty).unwrap());
    assert_eq!(fs::metadata(&empty).unwrap().permissions().mode() & 0o777, 0o600);
    for name in ["sets.db", "sqlite:", "mysql://x"] {
        assert!(matches!(crate::store::open(name), Err(StoreError::Name(_))), "{name}");
    }
}

/// Sets of the first release are assigned their environments.
#[test]
fn first_release() {
    let (_dir, path) = store();
    let old = Connection::open(&path).unwrap();
    old.execute_batch(MIGRATIONS[0]).unwrap();
    old.pragma_update(None, "application_id", APPLICATION_ID).unwrap();
    old.pragma_update(None, "user_version", 1).unwrap();
    old.execute("INSERT INTO app VALUES (1, x'00', 'a@b', 'shop', 0)", []).unwrap();
    for (number, limit) in [(1, "16m"), (2, "32m"), (3, "33554432")] {
        let mut evidence = serde_json::to_value(Evidence::default()).unwrap();
        evidence["environment"]["RUBY_GC_MALLOC_LIMIT"] = limit.into();
        for later in ["objects", "each", "trends", "heaps"] {
            evidence.as_object_mut().unwrap().remove(later);
        }
        let set = params![number, evidence.to_string()];
        old.execute("INSERT INTO sample_set VALUES (?1, ?1, 1, 3, 1, 1, 1, ?2, x'00')", set).unwrap();
    }
    drop(old);
    let store = Sqlite::open(&path).unwrap();
    let group = Group { app: App(1), series: Series(3, 1) };
    let environments = store.environments(group, 9).unwrap();
    let keys: Vec<&str> = environments.iter().map(|environment| environment.key.as_str()).collect();
    assert_eq!(keys, ["RUBY_GC_MALLOC_LIMIT=33554432", ""]);
    assert_eq!(store.evidence(environments[0].id, 0, 9).unwrap().len(), 2);
    assert_eq!((environments[0].first, environments[1].first), (1.0, 1.0));
}

/// Advice stays one entry while it is replaced, and only the latest entries are kept; each environment knows its first set.
#[test]
fn given() {
    let (_dir, path) = store();
    let store = Sqlite::open(&path).unwrap();
    let group = Group { app: register(&store, "shop", None), series: Series(3, 4) };
    let given = |in_force: &str, settings: &str, at: f64| Given {
        strategy: crate::tune::Strategy::Speed,
        in_force: in_force.to_owned(),
        settings: settings.to_owned(),
        withdrawal: false,
        first: at,
        last: at,
    };
    store.note(group, &given("", "A=1", 1.0), false, 2).unwrap();
    store.note(group, &given("A=1", "A=1", 2.0), false, 2).unwrap();
    store.note(group, &given("", "A=2", 3.0), true, 2).unwrap();
    let replaced = Given { first: 1.0, ..given("", "A=2", 3.0) };
    assert_eq!(store.given(group).unwrap(), [replaced, given("A=1", "A=1", 2.0)]);
    store.note(group, &given("", "B=1", 4.0), false, 2).unwrap();
    assert_eq!(store.given(group).unwrap(), [given("A=1", "A=1", 2.0), given("", "B=1", 4.0)]);
    assert!(store.given(Group { series: Series(3, 3), ..group }).unwrap().is_empty());
    let evidence = Evidence::default();
    for (byte, received) in [(1, 7.0), (2, 9.0)] {
        let set = NewSet {
            id: &SetId::of(&[byte; 32]),
            group,
            in_force: "",
            received,
            evidence: &evidence,
            digest: &Digest::default(),
            body: b"",
        };
        store.insert(&set, Quota::NONE).unwrap();
    }
    let environment = store.environments(group, 9).unwrap().remove(0);
    assert_eq!((environment.first, environment.seen), (7.0, 9.0));
    assert!(store.delete_app(group.app).unwrap() && store.given(group).unwrap().is_empty());
}

/// The evidence of an environment's sets is kept when they are deleted, but only for environments that are no longer in force; it is
/// deleted when it is too old.
#[test]
fn summaries() {
    let (_dir, path) = store();
    let store = Sqlite::open(&path).unwrap();
    let group = Group { app: register(&store, "shop", None), series: Series(3, 4) };
    let put = |byte: u8, in_force: &str| {
        let evidence = Evidence { sets: 1, cycles: u64::from(byte), ..Evidence::default() };
        let set = NewSet {
            id: &SetId::of(&[byte; 32]),
            group,
            in_force,
            received: f64::from(byte),
            evidence: &evidence,
            digest: &Digest::default(),
            body: b"",
        };
        assert!(store.insert(&set, Quota::NONE).unwrap().new);
    };
    put(1, "");
    put(2, "");
    assert!(store.unsummarized().unwrap().is_empty(), "it is in force");
    put(3, "A=1");
    let left = store.unsummarized().unwrap();
    assert_eq!(left.iter().map(|environment| environment.latest).collect::<Vec<_>>(), [2]);
    let said = Evidence { sets: 2, cycles: 3, ..Evidence::default() };
    store.summarize(&left[0], &said).unwrap();
    assert!(store.unsummarized().unwrap().is_empty(), "all of it is kept");
    assert_eq!(store.prune(3.0, None).unwrap(), 2);
    let environments = store.environments(group, 9).unwrap();
    let facts: Vec<_> = environments
        .iter()
        .map(|environment| (environment.key.as_str(), environment.seen, environment.summarized))
        .collect();
    assert_eq!(facts, [("A=1", 3.0, None), ("", 2.0, Some(2))]);
    assert_eq!(store.summary(environments[1].id).unwrap(), Some(said));
    assert_eq!((store.summary(environments[0].id).unwrap(), store.summary(99).unwrap()), (None, None));
    // It is in force again, and then no longer is.
    put(4, "");
    assert_eq!(store.environments(group, 9).unwrap()[0].latest, 4);
    put(5, "A=1");
    assert_eq!(store.unsummarized().unwrap().len(), 1);
    store.prune(5.0, None).unwrap();
    store.prune_slots(2).unwrap();
    assert_eq!(store.environments(group, 9).unwrap().len(), 2);
    store.prune_slots(3).unwrap();
    assert_eq!(store.environments(group, 9).unwrap().len(), 1);
}

/// The lock of an open store is effective: without it, another program that opens the file may delete the log of an open store.
#[test]
fn stays_locked() {
    use std::os::unix::fs::MetadataExt as _;
    let (_dir, path) = store();
    let _store = Sqlite::open(&path).unwrap();
    let inode = fs::metadata(&path).unwrap().ino();
    // The last one is that of SQLite's SHARED lock.
    let ours = [u64::from(std::process::id()), inode, 1_073_741_826].map(|number| number.to_string());
    // The kernel lists locks in several reads: while other tests take and release theirs, a listing may lack one.
    let held = (0..100).any(|_| {
        fs::read_to_string("/proc/locks").unwrap().lines().any(|line| {
            let fields = line.split_whitespace().skip(4).take(3).map(|field| field.rsplit(':').next());
            fields.eq(ours.iter().map(|own| Some(own.as_str())))
        })
    });
    assert!(held, "no lock of {ours:?}:\n{}", fs::read_to_string("/proc/locks").unwrap());
}

/// Tokens end permanently, whatever their number; parts are deleted with their application, and nothing else is.
#[test]
fn tokens_and_parts() {
    let (_dir, path) = store();
    let store = Sqlite::open(&path).unwrap();
    let (shop, mail) = (register(&store, "shop", None), register(&store, "mail", None));
    let jobs = register(&store, "jobs", Some(shop));
    let nested = NewApp { name: "x", email: "", parent: Some(jobs), created: 1.0 };
    let error = store.register(&nested, TokenHash::of("x"), Rights::Both).unwrap_err();
    assert!(matches!(error, StoreError::Part(app) if app == jobs), "{error}");
    let read = Token {
        hash: TokenHash::of("read"),
        app: Some(shop),
        rights: Rights::Read,
        created: 2.0,
        ends: None,
    };
    let operator =
        Token { hash: TokenHash::of("all"), app: None, rights: Rights::Operator, created: 3.0, ends: None };
    for token in [&read, &operator] {
        store.add_token(token).unwrap();
        assert!(store.add_token(token).is_err(), "twice");
    }
    assert_eq!(store.token(read.hash).unwrap(), Some(read));
    assert!(store.end_token(read.hash, 100.0).unwrap() && store.end_token(read.hash, 200.0).unwrap());
    assert_eq!(store.token(read.hash).unwrap().unwrap().ends, Some(100.0), "an end is never put off");
    assert!(store.end_token(read.hash, 50.0).unwrap() && !store.end_token(TokenHash::of("no"), 1.0).unwrap());
    let ended = store.token(read.hash).unwrap().unwrap();
    assert!(ended.is_valid(49.0) && !ended.is_valid(50.0));
    // Reopening does not repeat the migration.
    drop(store);
    let store = Sqlite::open(&path).unwrap();
    assert_eq!(store.tokens().unwrap().len(), 5);
    assert!(store.delete_app(shop).unwrap());
    let left: Vec<App> = store.apps().unwrap().iter().map(|info| info.app).collect();
    assert_eq!(left, [mail]);
    let left: Vec<_> = store.tokens().unwrap().iter().map(|token| (token.app, token.rights)).collect();
    assert_eq!(left, [(Some(mail), Rights::Both), (None, Rights::Operator)]);
}

/// A wrong path creates no store where one must exist.
#[test]
fn no_store() {
    let (_dir, path) = store();
    let name = format!("sqlite:{}", path.display());
    let error = crate::store::open_existing(&name).err().unwrap().to_string();
    assert!(error.contains("no such store"), "{error}");
    assert!(!path.exists());
    drop(crate::store::open(&name).unwrap());
    assert!(crate::store::open_existing(&name).is_ok());
}

/// Environments have periods: a period continues unless other sets replaced its own for a while; data from before periods existed gets one each.
#[test]
fn periods() {
    let (_dir, path) = store();
    let store = Sqlite::open(&path).unwrap();
    let group = Group { app: register(&store, "shop", None), series: Series(3, 4) };
    let put = |byte: u8, key: &str, received: f64| {
        let set = NewSet {
            id: &SetId::of(&[byte; 32]),
            group,
            in_force: key,
            received,
            evidence: &Evidence::default(),
            digest: &Digest::default(),
            body: b"",
        };
        store.insert(&set, Quota::NONE).unwrap()
    };
    let known = |store: &Sqlite| -> Vec<(i64, f64, f64)> {
        let periods = store.periods(group, 9).unwrap();
        periods.iter().map(|period| (period.environment, period.first, period.last)).collect()
    };
    // No other sets arrived for a day; then both kinds arrived while programs were restarted.
    for (byte, key, received) in
        [(1, "A", 0.0), (2, "A", 86_400.0), (3, "B", 86_500.0), (4, "A", 90_000.0), (5, "B", 90_050.0)]
    {
        put(byte, key, received);
    }
    assert_eq!(known(&store), [(1, 0.0, 90_000.0), (2, 86_500.0, 90_050.0)]);
    put(6, "A", 99_000.0);
    let all = [(1, 0.0, 90_000.0), (2, 86_500.0, 90_050.0), (1, 99_000.0, 99_000.0)];
    assert_eq!(known(&store), all);
    assert_eq!(put(6, "A", 200_000.0), Inserted::default());
    assert_eq!(known(&store), all, "a set that is sent again");
    let latest = store.periods(group, 1).unwrap();
    assert_eq!(latest, [Period { environment: 1, first: 99_000.0, last: 99_000.0 }]);
    let before = "DROP TABLE period; DROP TABLE app_number; DROP TABLE set_number; DROP TABLE gone; ALTER TABLE environment DROP COLUMN since; ALTER TABLE environment DROP COLUMN until;
        ALTER TABLE environment DROP COLUMN stretch; PRAGMA user_version = 8";
    store.writer().unwrap().execute_batch(before).unwrap();
    drop(store);
    let store = Sqlite::open(&path).unwrap();
    let times = |at: usize| store.environments(group, 9).unwrap()[at].times;
    assert_eq!(times(0), Times { since: 0.0, until: 99_000.0, sets: 4 });
    assert_eq!(times(1), Times { since: 86_500.0, until: 90_050.0, sets: 2 });
    assert_eq!(known(&store), [(1, 0.0, 99_000.0), (2, 86_500.0, 90_050.0)]);
    store.prune_slots(96_000).unwrap();
    assert_eq!(known(&store).len(), 1);
}

/// Environments without sets are deleted, except the latest that have a summary; those with sets stay, and totals match.
#[test]
fn forgotten_environments() {
    let (_dir, path) = store();
    let store = Sqlite::open(&path).unwrap();
    let group = Group { app: register(&store, "shop", None), series: Series(3, 4) };
    for byte in 1..=9_u8 {
        let set = NewSet {
            id: &SetId::of(&[byte; 32]),
            group,
            in_force: &format!("A={byte}"),
            received: f64::from(byte),
            evidence: &Evidence { samples: 10, ..Evidence::default() },
            digest: &Digest::default(),
            body: b"",
        };
        store.insert(&set, Quota::NONE).unwrap();
    }
    assert_eq!(store.totals().unwrap(), Totals { apps: 1, sets: 9, samples: 90 });
    for environment in store.unsummarized().unwrap().iter().filter(|known| known.seen > 3.0) {
        store.summarize(environment, &Evidence::default()).unwrap();
    }
    store.prune(8.0, None).unwrap();
    assert_eq!(store.totals().unwrap(), Totals { apps: 1, sets: 2, samples: 20 });
    let first = store.environments(group, 20).unwrap().pop().unwrap();
    assert_eq!(store.environment(first.id).unwrap().as_ref(), Some(&first));
    store.forget_environments(group.app, 2).unwrap();
    let kept = store.environments(group, 20).unwrap();
    let rows = "SELECT count(*) FROM environment";
    let rows: usize = store.reader().unwrap().query_row(rows, [], |row| row.get(0)).unwrap();
    let seen: Vec<f64> = kept.iter().map(|environment| environment.seen).collect();
    assert_eq!((seen, rows), (vec![9.0, 8.0, 7.0, 6.0], 4));
    assert_eq!(store.environment(first.id).unwrap(), None);
}
