//! Sets that arrive out of order or again, and numbers of deleted applications.

use super::{
    tests::{register, store},
    *,
};
use crate::{digest::Digest, tune::history::Times};

/// Periods and the environments in force follow the times in the sets, whatever the order in which the sets arrive.
#[test]
fn late_sets() {
    let of = |pairs: &[(&str, f64)]| {
        let (_dir, path) = store();
        let store = Sqlite::open(&path).unwrap();
        let group = Group { app: register(&store, "shop", None), series: Series(3, 4) };
        for (at, (key, received)) in pairs.iter().enumerate() {
            let set = NewSet {
                id: &SetId::of(&[at as u8; 32]),
                group,
                in_force: key,
                received: *received,
                evidence: &Evidence::default(),
                digest: &Digest::default(),
                body: b"",
            };
            store.insert(&set, Quota::NONE).unwrap();
        }
        let environments = store.environments(group, 9).unwrap();
        let name = |id: i64| environments.iter().find(|known| known.id == id).map(|known| known.key.clone());
        let periods = store.periods(group, 99).unwrap().into_iter();
        let periods: Vec<_> =
            periods.map(|period| (name(period.environment), period.first, period.last)).collect();
        let times: Vec<_> = environments.iter().map(|known| (known.key.clone(), known.times)).collect();
        (periods, times)
    };
    let hour = 3600.0;
    let mut sets: Vec<(&str, f64)> =
        vec![("A", 1.0), ("A", 1.5), ("A", 5.0), ("B", 7.0), ("A", 8.5), ("A", 9.2), ("B", 9.3), ("B", 12.0)]
            .into_iter()
            .map(|(key, at)| (key, at * hour))
            .collect();
    let expected = of(&sets);
    let whole = |name: &str, first: f64, last: f64| (Some(name.to_owned()), first * hour, last * hour);
    assert_eq!(
        expected.0,
        [whole("A", 1.0, 5.0), whole("B", 7.0, 7.0), whole("A", 8.5, 9.2), whole("B", 9.3, 12.0)]
    );
    let times = |since: f64, until: f64, sets| Times { since: since * hour, until: until * hour, sets };
    assert_eq!(expected.1, [("B".to_owned(), times(12.0, 12.0, 1)), ("A".to_owned(), times(8.5, 9.2, 2))]);
    let mut state = 7_u64;
    for _ in 0..30 {
        for at in (1..sets.len()).rev() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            sets.swap(at, (state >> 33) as usize % (at + 1));
        }
        assert_eq!(of(&sets), expected, "{sets:?}");
    }
}

/// The number of a deleted application is never reused, even in a store of an earlier release.
#[test]
fn numbers() {
    let (_dir, path) = store();
    let db = Sqlite::open(&path).unwrap();
    let [first, second] = ["a", "b"].map(|name| register(&db, name, None).0);
    assert_eq!([first, second], [1, 2]);
    assert!(db.delete_app(App(second)).unwrap());
    assert_eq!(register(&db, "c", None), App(3));
    let before = "DROP TABLE app_number; DROP TABLE set_number; DROP TABLE gone; PRAGMA user_version = 10";
    db.writer().unwrap().execute_batch(before).unwrap();
    drop(db);
    let db = Sqlite::open(&path).unwrap();
    assert_eq!(register(&db, "d", None), App(4));
    assert!(db.delete_app(App(4)).unwrap() && db.delete_app(App(3)).unwrap());
    drop(db);
    assert_eq!(register(&Sqlite::open(&path).unwrap(), "e", None), App(5));
}

/// A set that is sent again after it was deleted counts once in the figures; once these are deleted, it is a new one.
#[test]
fn deleted_sets() {
    let (_dir, path) = store();
    let store = Sqlite::open(&path).unwrap();
    let group = Group { app: register(&store, "shop", None), series: Series(3, 4) };
    let put = |byte: u8, received: f64, quota: Quota| {
        let mut digest = Digest::default();
        digest.figures.cycles = 10;
        let set = NewSet {
            id: &SetId::of(&[byte; 32]),
            group,
            in_force: "",
            received,
            evidence: &Evidence::default(),
            digest: &digest,
            body: b"",
        };
        store.insert(&set, quota).unwrap().new
    };
    let cycles = || store.slots(group.app, 0).unwrap().iter().map(|slot| slot.figures.cycles).sum::<u64>();
    assert!(put(1, 1e6, Quota::NONE) && put(2, 1e6, Quota { sets: 1, ..Quota::NONE }));
    assert_eq!(store.prune(2e6, Some(group.app)).unwrap(), 1);
    assert_eq!((store.totals().unwrap().sets, cycles()), (0, 20));
    assert!(!put(1, 1e6 + 9.0, Quota::NONE) && !put(2, 1e6 + 9.0, Quota::NONE));
    assert_eq!((store.totals().unwrap().sets, cycles()), (0, 20));
    store.forget_environments(group.app, 9).unwrap();
    assert!(!put(1, 1e6 + 9.0, Quota::NONE));
    store.prune_slots(3_000_000).unwrap();
    assert_eq!(cycles(), 0);
    assert!(put(1, 4e6, Quota::NONE));
    assert!(store.delete_app(group.app).unwrap());
}

/// The number of a deleted set is never reused, even if a summary of an earlier release still has it.
#[test]
fn numbers_of_sets() {
    let (_dir, path) = store();
    let db = Sqlite::open(&path).unwrap();
    let group = Group { app: register(&db, "shop", None), series: Series(3, 4) };
    let put = |db: &Sqlite, byte: u8| {
        let set = NewSet {
            id: &SetId::of(&[byte; 32]),
            group,
            in_force: "",
            received: f64::from(byte),
            evidence: &Evidence::default(),
            digest: &Digest::default(),
            body: b"",
        };
        assert!(db.insert(&set, Quota::NONE).unwrap().new);
        assert!(!db.insert(&set, Quota::NONE).unwrap().new);
        db.environments(group, 1).unwrap().remove(0)
    };
    let environment = (1..=3).map(|byte| put(&db, byte)).last().unwrap();
    assert_eq!(environment.latest, 3);
    db.summarize(&environment, &Evidence::default()).unwrap();
    assert_eq!(db.prune(100.0, None).unwrap(), 3);
    db.writer().unwrap().execute_batch("DROP TABLE set_number; PRAGMA user_version = 12").unwrap();
    drop(db);
    let db = Sqlite::open(&path).unwrap();
    assert_eq!((put(&db, 4).latest, db.prune(100.0, None).unwrap(), put(&db, 5).latest), (4, 1, 5));
}

/// A set that cannot be read, in a store of the first release, does not keep the collector from starting: it is left out of recommendations.
#[test]
fn unreadable_set() {
    let (_dir, path) = store();
    let old = Connection::open(&path).unwrap();
    old.execute_batch(MIGRATIONS[0]).unwrap();
    old.pragma_update(None, "application_id", APPLICATION_ID).unwrap();
    old.pragma_update(None, "user_version", 1).unwrap();
    old.execute("INSERT INTO app VALUES (1, x'00', 'a@b', 'shop', 0)", []).unwrap();
    let ids = [1, 2].map(|byte| SetId::of(&[byte; 32]));
    for (id, evidence) in
        ids.iter().zip(["{\"environment\": [", &serde_json::to_string(&Evidence::default()).unwrap()])
    {
        let set = params![id.as_str(), evidence];
        let insert = "INSERT INTO sample_set SELECT NULL, ?1, 1, 3, 1, 1, 1, ?2, x'00'";
        old.execute(insert, set).unwrap();
    }
    drop(old);
    let store = Sqlite::open(&path).unwrap();
    assert_eq!(store.group_of(&ids[0]).unwrap(), None);
    let (group, environment) = store.group_of(&ids[1]).unwrap().unwrap();
    assert_eq!(store.environments(group, 9).unwrap().len(), 1);
    assert_eq!(store.evidence(environment, 0, 9).unwrap().len(), 1);
    assert_eq!(store.totals().unwrap().sets, 2);
}

/// An application that does not exist, or no longer, is no failure of the store.
#[test]
fn no_such_application() {
    let (_dir, path) = store();
    let store = Sqlite::open(&path).unwrap();
    assert_eq!(store.roll_up(App(9), 0, 1_000_000, 7200).unwrap(), 0);
    let part = NewApp { name: "jobs", email: "", parent: Some(App(9)), created: 1.0 };
    let error = store.register(&part, TokenHash::of("t"), Rights::Both).unwrap_err();
    assert_eq!(error.to_string(), "there is no application 9");
}
