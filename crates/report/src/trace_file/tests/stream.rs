//! The outcome of the entries of a recording whose reader is slow, or disconnects.

use std::{
    path::Path,
    sync::mpsc::{Receiver, sync_channel},
    time::{Duration, Instant},
};

use super::{
    super::destination::{Destination, Stream, tests::Narrow},
    *,
};

fn begun() -> (Recorder, Receiver<Vec<u8>>) {
    // It accepts nothing that is not read at once.
    let (to, reader) = sync_channel(0);
    let stream = Destination::Stream(Stream::to(Narrow(to)).unwrap());
    (Recorder::begin(Path::new("-"), stream, &header()).unwrap(), reader)
}

fn counts(recorder: &Recorder) -> RecordingCounts {
    let mut counts = UserCounts::default();
    recorder.add_counts(&mut counts);
    counts.recording
}

/// Waits for the writing thread to make progress.
fn until(recorder: &Recorder, is: impl Fn(&RecordingCounts) -> bool) -> RecordingCounts {
    let begun = Instant::now();
    loop {
        let counts = counts(recorder);
        if is(&counts) {
            return counts;
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "{counts:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Two entries, and the end of their chunk.
fn chunk(recorder: &mut Recorder, at: u64) {
    recorder.flush(at * 10_000_000_000).unwrap();
    recorder.flush(at * 10_000_000_000 + CHUNK_NS).unwrap();
}

/// Entries are pending until their chunk is taken. What a disconnecting reader has not taken is dropped, like everything after it.
#[test]
fn unread_entries_are_dropped() {
    let (mut recorder, reader) = begun();
    chunk(&mut recorder, 1);
    chunk(&mut recorder, 2);
    let waiting = RecordingCounts { recorded: 4, recorded_waiting: 4, ..RecordingCounts::default() };
    assert_eq!(counts(&recorder), waiting);
    // The header, and the first chunk.
    let mut taken = reader.recv().unwrap();
    taken.extend(reader.recv().unwrap());
    let partly = until(&recorder, |counts| counts.recorded_written > 0);
    let expected = RecordingCounts { recorded_written: 2, recorded_waiting: 2, ..waiting };
    assert_eq!(partly, expected);
    let (_, lines) = replayed(&taken);
    let flushes = lines.into_iter().filter(|line| line.starts_with("flush ")).collect::<Vec<_>>();
    assert_eq!(flushes, ["flush 10000000000", "flush 11000000000"]);
    drop(reader);
    let failed = (3..1000).find_map(|at| {
        std::thread::sleep(Duration::from_millis(1));
        recorder.flush(at * 10_000_000_000).err()
    });
    assert!(matches!(failed, Some(ExportError::Stdout(_))), "{failed:?}");
    recorder.began(7);
    let RecordingCounts { recorded, recorded_written, recorded_waiting, recorded_dropped, .. } =
        counts(&recorder);
    assert_eq!((recorded_written, recorded_waiting), (2, 0));
    assert!(recorded > 5 && recorded_dropped == recorded - 2, "{recorded_dropped} of {recorded}");
}

/// If a reader stops reading at the end of a run, nothing of the rest counts as written.
#[test]
fn stuck_at_the_end() {
    let (mut recorder, reader) = begun();
    chunk(&mut recorder, 1);
    let ledger = Ledger::default();
    recorder.finish(&ledger).unwrap();
    let error = recorder.settled(&ledger).unwrap_err().to_string();
    assert!(error.contains("read nothing for 10 s"), "{error}");
    assert!(recorder.is_full(), "a run whose recording nobody reads is to end");
    let expected = RecordingCounts { recorded: 4, recorded_dropped: 4, ..RecordingCounts::default() };
    assert_eq!(counts(&recorder), expected);
    drop(reader);
}
