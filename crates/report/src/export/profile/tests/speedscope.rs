//! speedscope: sums, and real times.

use std::collections::HashSet;

use super::*;

pub(super) fn check_speedscope(recorder: &Recorder, inputs: &[Input]) {
    let (bytes, left) = written(recorder, Format::Speedscope, "x.json");
    let file: Value = serde_json::from_slice(&bytes).unwrap();
    let frames = file["shared"]["frames"].as_array().unwrap().len() as u64;
    let (mut total, mut together) = (0, None);
    for profile in file["profiles"].as_array().unwrap() {
        let (samples, weights) =
            (profile["samples"].as_array().unwrap(), profile["weights"].as_array().unwrap());
        assert_eq!(samples.len(), weights.len());
        let sum: u64 = weights.iter().map(|weight| weight.as_u64().unwrap()).sum();
        assert_eq!(profile["endValue"].as_u64().unwrap(), sum);
        let gaps = samples.iter().zip(weights).filter(|(sample, _)| sample.as_array().unwrap().is_empty());
        let sum = sum - gaps.map(|(_, weight)| weight.as_u64().unwrap()).sum::<u64>();
        let numbers = samples.iter().flat_map(|sample| sample.as_array().unwrap());
        assert!(numbers.into_iter().all(|number| number.as_u64().unwrap() < frames));
        if profile["name"].as_str().unwrap().starts_with("all threads") {
            together = Some(sum);
        } else {
            total += sum;
            // From the start to the end, or beyond it if the samples represent more time.
            assert!(profile["endValue"].as_u64().unwrap() >= 2_000_000_000);
        }
    }
    assert_eq!((total, left), (sum(inputs, Input::time_ns), 0));
    let threads = inputs.iter().map(|input| (input.pid, input.tid)).collect::<HashSet<_>>().len();
    assert!(together.is_none_or(|together| threads > 1 && together == total), "{together:?}");
}

/// A timeline has real times: two bursts with a second of nothing between them are a second apart, and a thread that
/// starts late appears late. Threads are sorted by name.
#[test]
fn speedscope_has_real_time() {
    let running = |tid, ts_ms: u64, stack| Input {
        pid: 1,
        tid,
        ts_ns: 1_000 + ts_ms * 1_000_000,
        state: ThreadState::Running,
        cpu_ns: 10_000_000,
        wall_ns: 10_000_000,
        stack: vec![(stack, 1)],
        times: 1,
        pauses: Vec::new(),
    };
    let inputs =
        [running(3, 500, 1), running(2, 10, 1), running(2, 20, 1), running(2, 1020, 1), running(2, 1021, 0)];
    let recorder = recorded(&inputs, Limits::default());
    let (bytes, _) = written(&recorder, Format::Speedscope, "x.json");
    let file: Value = serde_json::from_slice(&bytes).unwrap();
    let profiles = file["profiles"].as_array().unwrap();
    let names: Vec<&str> = profiles.iter().map(|profile| profile["name"].as_str().unwrap()).collect();
    assert!(names[0].starts_with("all threads"), "{names:?}");
    // The names of 2 and 3 start with `<` and `A`.
    assert!(names[1].ends_with("[2]") && names[2].ends_with("[3]"), "{names:?}");
    let spans = |at: usize| -> Vec<(bool, u64)> {
        let list = |key: &str| profiles[at][key].as_array().unwrap().clone();
        let pairs = list("samples").into_iter().zip(list("weights"));
        pairs.map(|(s, w)| (s.as_array().unwrap().is_empty(), w.as_u64().unwrap() / 1_000_000)).collect()
    };
    // Consecutive samples with the same stack are merged; the fourth and fifth would overlap.
    assert_eq!(spans(1), [(false, 20), (true, 990), (false, 10), (false, 10), (true, 970)]);
    assert_eq!(spans(2), [(true, 490), (false, 10), (true, 1500)]);
    assert_eq!(profiles[1]["endValue"].as_u64(), Some(2_000_000_000));
}
