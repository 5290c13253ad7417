//! The end of a run, when the control thread closes the gate and detaches. That thread reads files, and a file server or a FUSE file system that does
//! not answer may hold it for ever: the end does not wait for that.

use std::{
    thread::JoinHandle,
    time::{Duration, Instant},
};

use super::Run;
use crate::{clock::monotonic_ns, console::say};

/// Maximum time that the end of a run waits for the control thread. It may be reading and attaching a large image, which takes seconds.
const PATIENCE: Duration = Duration::from_secs(30);
/// After this time the gate is closed without the control thread.
const PROMPT: Duration = Duration::from_secs(1);
/// Interval between checks while nothing happens.
const TICK: Duration = Duration::from_millis(2);

/// The result of one check.
enum Checked {
    /// What was waited for has happened.
    Over,
    /// There is more to do at once.
    Busy,
    /// Nothing has happened.
    Idle,
}

/// Checks repeatedly, at most for this time. Returns whether what was waited for has happened.
fn wait(patience: Duration, mut check: impl FnMut() -> Checked) -> bool {
    let begun = Instant::now();
    loop {
        match check() {
            Checked::Over => return true,
            _ if begun.elapsed() >= patience => return false,
            Checked::Busy => {}
            Checked::Idle => std::thread::sleep(TICK),
        }
    }
}

impl Run<'_> {
    /// Drains the rings until no further record can arrive and the control thread has told everything. Returns whether it has; if not, the user
    /// is told.
    pub(super) fn drain_until_closed(&mut self, gone: impl Fn() -> bool) -> bool {
        let begun = Instant::now();
        let mut early = None;
        let closed = wait(PATIENCE, || {
            if self.closed.is_some() || gone() {
                return Checked::Over;
            }
            if !self.over_early && begun.elapsed() >= PROMPT {
                match self.counters.close() {
                    Ok(()) => early = Some(monotonic_ns()),
                    Err(error) => log::warn!("{error}: the run ends when the control thread does"),
                }
                self.over_early = true;
            }
            let more = self.pipeline.drain(&mut self.rings);
            self.take_findings();
            self.pass_on_signals();
            if more { Checked::Busy } else { Checked::Idle }
        });
        self.take_findings();
        self.closed = early.or(self.closed);
        if !closed {
            say(&format!(
                "gctrace: the thread that reads the files of processes has not stopped within {} s, probably because a file server or a FUSE \
                 file system does not answer; the files are finished without what it may have found, and probes stay until gctrace ends",
                PATIENCE.as_secs()
            ));
        }
        closed
    }
}

/// Waits until the control thread has detached everything, if it has closed the gate in time. Returns whether it has ended: otherwise the end of
/// the process detaches.
pub(super) fn has_ended(control: &JoinHandle<()>, closed_in_time: bool) -> bool {
    let patience = if closed_in_time { PATIENCE } else { Duration::ZERO };
    let ended = wait(patience, || if control.is_finished() { Checked::Over } else { Checked::Idle });
    if !ended && closed_in_time {
        log::warn!(
            "the control thread has not ended within {} s after the gate was closed",
            PATIENCE.as_secs()
        );
    }
    ended
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    /// What never happens is not waited for longer than allowed, whether there is always more to do or never anything.
    #[test]
    fn waits_end() {
        for busy in [true, false] {
            let begun = Instant::now();
            let check = || if busy { Checked::Busy } else { Checked::Idle };
            assert!(!wait(Duration::from_millis(20), check));
            assert!(
                begun.elapsed() >= Duration::from_millis(20) && begun.elapsed() < Duration::from_secs(10)
            );
        }
        let mut checks = 0;
        assert!(wait(PATIENCE, || {
            checks += 1;
            if checks < 5 { Checked::Busy } else { Checked::Over }
        }));
        assert!(wait(Duration::ZERO, || Checked::Over), "checked once");
    }

    /// A control thread that hangs is not joined.
    #[test]
    fn threads_that_hang() {
        let (go, gone) = channel::<()>();
        let control = std::thread::spawn(move || {
            let _ended = gone.recv();
        });
        assert!(!has_ended(&control, false));
        drop(go);
        assert!(has_ended(&control, true));
        control.join().unwrap();
    }
}
