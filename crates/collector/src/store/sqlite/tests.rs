//! A store in a file: what is put in comes out, what must go goes, and other files are left alone.

use super::*;
use crate::{digest::Digest, tune::Evidence};

fn store() -> (tempfile::TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sets.db");
    (dir, path)
}

/// What is put in comes out, after reopening as well; the same set is kept once; groups are kept apart.
#[test]
fn keeps() {
    let (_dir, path) = store();
    let token = TokenHash::of("secret' OR 1=1 --");
    let id = |byte: u8| SetId::of(&[byte; 32]);
    {
        let store = Sqlite::open(&path).unwrap();
        assert_eq!(store.app(token).unwrap(), None);
        store.register(token, "a@b'); DROP TABLE app; --", "shop", 1.0).unwrap();
        assert!(store.register(token, "again", "again", 1.0).is_err());
        let app = store.app(token).unwrap().unwrap();
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
    let app = store.app(token).unwrap().unwrap();
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
    assert_eq!(store.advised(group).unwrap(), ["B=2", "C=3"]);
    assert!(store.advised(Group { app, series: Series(3, 3) }).unwrap().is_empty());
    assert_eq!(store.totals().unwrap(), Totals { apps: 1, sets: 3, samples: 30 });
    let mode = std::os::unix::fs::MetadataExt::mode(&fs::metadata(&path).unwrap());
    assert_eq!(mode & 0o777, 0o600);
}

/// Beyond its quota an application loses its oldest sets and others lose nothing; ages and applications are deleted;
/// the counts are those of what is there, also in a store from before there were counts.
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
    for name in ["shop", "mail"] {
        store.register(TokenHash::of(name), "a@b", name, 1.0).unwrap();
    }
    let [shop, mail] = ["shop", "mail"].map(|name| store.app(TokenHash::of(name)).unwrap().unwrap());
    put(&store, mail, 50, Quota::NONE);
    let few = Quota { sets: 3, bytes: u64::MAX };
    let deleted: Vec<u64> = (1..6).map(|byte| put(&store, shop, byte, few).deleted).collect();
    assert_eq!((deleted, known(&store)), (vec![0, 0, 0, 1, 1], vec![3, 4, 5, 50]));
    // Of one that is sent again nothing follows.
    assert_eq!(put(&store, shop, 5, Quota { sets: 1, bytes: 1 }), Inserted::default());
    let each = counted(&store)[1].1;
    assert!(each > 1000);
    assert_eq!(put(&store, shop, 6, Quota { sets: 100, bytes: 2 * each }).deleted, 2);
    assert_eq!(counted(&store), [(2, 2 * each), (1, each)]);
    // The latest one stays, however small the quota is.
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
    // As an earlier gctrace left it.
    let before = "DROP TABLE environment; DROP TABLE advised; DROP INDEX sample_set_environment;
        ALTER TABLE sample_set DROP COLUMN environment; DROP INDEX sample_set_app; DROP INDEX sample_set_received;
        DROP TABLE slot; ALTER TABLE app DROP COLUMN slots; ALTER TABLE app DROP COLUMN sets; ALTER TABLE app DROP COLUMN bytes; PRAGMA user_version = 1";
    store.writer().execute_batch(before).unwrap();
    drop(store);
    let store = Sqlite::open(&path).unwrap();
    assert_eq!(counted(&store), [(10, 10 * each), (1, each)]);
    assert!(store.delete_app(shop).unwrap() && !store.delete_app(shop).unwrap());
    assert_eq!((known(&store), counted(&store)), (vec![50], vec![(1, each)]));
    assert_eq!(store.app(TokenHash::of("shop")).unwrap(), None);
}

/// Sets of the same ten minutes of a process are added up, others are not; what is old goes.
#[test]
fn slots() {
    let (_dir, path) = store();
    let store = Sqlite::open(&path).unwrap();
    store.register(TokenHash::of("shop"), "a@b", "shop", 1.0).unwrap();
    let app = store.app(TokenHash::of("shop")).unwrap().unwrap();
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

/// A store that is written to and deleted from for long keeps its size.
#[test]
fn stays_flat() {
    let (_dir, path) = store();
    let store = Sqlite::open(&path).unwrap();
    store.register(TokenHash::of("shop"), "a@b", "shop", 1.0).unwrap();
    let group = Group { app: store.app(TokenHash::of("shop")).unwrap().unwrap(), series: Series(3, 4) };
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
        store.writer().query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).unwrap();
        sizes.push(fs::metadata(&path).unwrap().len());
    }
    assert!(sizes[9] <= sizes[0] + (64 << 10), "{sizes:?}");
}

/// Files of somebody else, and of the future, are refused and left as they are.
#[test]
fn foreign_files() {
    let (dir, path) = store();
    fs::write(&path, "not a database, but long enough to be taken for one".repeat(100)).unwrap();
    let error = Sqlite::open(&path).unwrap_err().to_string();
    assert!(error.ends_with("is no SQLite database"), "{error}");
    let other = dir.path().join("other.db");
    Connection::open(&other).unwrap().execute_batch("CREATE TABLE theirs (x)").unwrap();
    let error = Sqlite::open(&other).unwrap_err().to_string();
    assert!(error.ends_with("is a database of another program"), "{error}");
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

/// Sets of the first release are given their environments.
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
}
