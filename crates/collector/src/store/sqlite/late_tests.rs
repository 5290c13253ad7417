//! Sets that come in another order than that of their times.

use super::{
    tests::{register, store},
    *,
};
use crate::{digest::Digest, tune::history::Times};

/// Periods and what is in force are those of the times in the sets, whatever the order in which the sets come.
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
