//! The terminal while `gctrace top` uses it, and the thread that draws.

use std::{
    io, panic,
    sync::{
        Arc, Mutex, Once, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use crossterm::{
    event::{self, DisableMouseCapture, EnableMouseCapture, Event, KeyEventKind},
    execute,
    terminal::{EnterAlternateScreen, enable_raw_mode},
};
use ratatui::{
    DefaultTerminal, Terminal,
    backend::CrosstermBackend,
    layout::{Position, Rect},
};
use rustix::{
    event::{PollFd, PollFlags, Timespec},
    io::Errno,
};

use signal_hook::consts::SIGQUIT;

use super::{
    board::{Board, Detail, Sample},
    draw::{Shown, draw},
    looker::Looker,
    place,
    rows::Row,
    view::{Answer, View},
};
use crate::{clock::monotonic_ns, console, host::proc, terminal::colours};

/// Interval at which values are read and drawn.
const EVERY: Duration = Duration::from_secs(1);
/// How long a message is shown.
const MESSAGE: Duration = Duration::from_secs(6);
/// Maximum time of one wait for a key.
const PATIENCE: Duration = Duration::from_millis(100);

/// The screen, until it is dropped.
pub(super) struct Screen {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Screen {
    /// Takes over the terminal. Until it is restored, messages are drawn or held back.
    /// `mouse`: whether gctrace captures the mouse; the terminal does not select text with it then.
    pub(super) fn start(
        board: Arc<Mutex<Board>>,
        mut looker: Looker,
        view: View,
        mouse: bool,
    ) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        // By default SIGQUIT would end gctrace without restoring the terminal. It has that effect again once the terminal is restored.
        let (quit, given_back) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        signal_hook::flag::register_conditional_default(SIGQUIT, given_back.clone())?;
        signal_hook::flag::register(SIGQUIT, quit.clone())?;
        let at_failure = given_back.clone();
        let mut terminal = take(mouse).inspect_err(|_| {
            give_back();
            at_failure.store(true, Relaxed);
        })?;
        console::divert();
        let thread = std::thread::Builder::new().name("gctrace-screen".to_owned()).spawn(move || {
            let ended = run(&mut terminal, &board, &mut looker, view, &[&stopped, &quit]);
            give_back();
            given_back.store(true, Relaxed);
            if let Err(error) = &ended {
                console::say(&format!("gctrace: the terminal: {error}"));
            }
            if !stopped.load(Relaxed) {
                // The user has quit, or the terminal is gone: end the run gracefully.
                let _ends = signal_hook::low_level::raise(signal_hook::consts::SIGTERM);
            }
        });
        match thread {
            Ok(thread) => Ok(Self { stop, thread: Some(thread) }),
            Err(error) => {
                give_back();
                at_failure.store(true, Relaxed);
                Err(error)
            }
        }
    }
}

/// Takes over the terminal. A panic in any thread restores it before the panic is reported.
fn take(mouse: bool) -> io::Result<DefaultTerminal> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let report = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            give_back();
            report(info);
        }));
    });
    enable_raw_mode()?;
    execute!(io::stdout(), EnterAlternateScreen)?;
    if mouse {
        execute!(io::stdout(), EnableMouseCapture)?;
    }
    Terminal::new(CrosstermBackend::new(io::stdout()))
}

/// Restores the terminal, if it still exists. `ratatui::restore` prints an error otherwise, which panics if standard error was that terminal;
/// and the hook of `ratatui::init` is called by that panic, which ends the program by SIGABRT.
fn give_back() {
    // These fail if the terminal is gone, which does not matter.
    let _gone = execute!(io::stdout(), DisableMouseCapture);
    let _gone = ratatui::try_restore();
    console::revert();
}

impl Drop for Screen {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            give_back();
            log::error!("the thread that draws panicked; please report this");
        }
    }
}

/// Reads the periodic values of a process.
pub(super) fn sample(pid: u32) -> Sample {
    let rss = proc::MemoryReader::open(pid).ok().and_then(|reader| reader.read()).map(|memory| memory.rss);
    Sample { cpu_ns: proc::cpu_ns(pid), rss }
}

/// Waits briefly for a key, the mouse, or a resize of the terminal. Returns whether there is such an event.
///
/// If the terminal is gone and reports end of file, crossterm 0.29 reads in a loop (`event/source/unix/mio.rs`) and
/// never returns. So it is called only while the terminal exists.
fn wait_for_input() -> io::Result<bool> {
    // First an event that crossterm has already read, then new input, or the signal of a resize.
    for patience in [Duration::ZERO, PATIENCE] {
        wait_for_terminal(patience)?;
        if event::poll(Duration::ZERO)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Waits until the terminal has input, at most for this time.
fn wait_for_terminal(patience: Duration) -> io::Result<()> {
    let stdout = io::stdout();
    let mut terminal = [PollFd::new(&stdout, PollFlags::IN)];
    let patience = Timespec { tv_sec: 0, tv_nsec: patience.subsec_nanos().into() };
    match rustix::event::poll(&mut terminal, Some(&patience)) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    if terminal[0].revents().intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL) {
        return Err(io::Error::new(io::ErrorKind::BrokenPipe, "it is gone"));
    }
    Ok(())
}

fn run(
    terminal: &mut DefaultTerminal,
    board: &Mutex<Board>,
    looker: &mut Looker,
    mut view: View,
    stop: &[&AtomicBool],
) -> io::Result<()> {
    let board = || board.lock().unwrap_or_else(PoisonError::into_inner);
    let mut ticked: Option<Instant> = None;
    let mut due = true;
    let mut rows: Vec<Row> = Vec::new();
    // Number of processes, and number of those that were dropped.
    let mut number = (0, 0);
    let mut held = None;
    let mut detail: Option<(u32, Option<Detail>)> = None;
    let mut message: Option<(String, Instant)> = None;
    while !stop.iter().any(|stop| stop.load(Relaxed)) {
        if ticked.is_none_or(|last| last.elapsed() >= EVERY) {
            ticked = Some(Instant::now());
            board().tick(monotonic_ns(), true, sample);
            due = true;
        }
        if due {
            due = false;
            let opened = view.detail.is_some() && view.detail != detail.as_ref().map(|(pid, _)| *pid);
            if !view.paused || opened {
                // Only the rows of the held time are kept, so an opened process is shown as it is now.
                held = None;
            }
            let now_ns = *held.get_or_insert_with(monotonic_ns);
            {
                let board = board();
                if !view.paused || rows.is_empty() {
                    rows = board.rows(now_ns, view.group);
                    number = (board.len(), board.not_shown());
                }
                // A held screen does not change, unless another process is opened.
                if !view.paused || view.detail != detail.as_ref().map(|(pid, _)| *pid) {
                    detail = view.detail.map(|pid| (pid, board.detail(pid, now_ns)));
                }
            }
            let arranged = view.arranged(rows.clone());
            if let Some(pid) = view.detail.filter(|&pid| !view.paused || !looker.knows(pid)) {
                looker.look(pid, !view.paused);
            }
            let threads = looker.last.as_ref().filter(|(pid, _)| Some(*pid) == view.detail);
            if let Some(said) = console::diverted()
                && message.as_ref().is_none_or(|(last, _)| *last != said)
            {
                message = Some((said, Instant::now()));
            }
            let message = message.as_ref().filter(|(_, at)| at.elapsed() < MESSAGE);
            terminal.draw(|frame| {
                let shown = Shown {
                    rows: &arranged,
                    view: &view,
                    processes: number.0,
                    dropped: number.1,
                    message: message.map(|(text, _)| text.as_str()),
                    now_ns,
                    detail: detail.as_ref().and_then(|(_, detail)| detail.as_ref()),
                    threads: threads.map(|(_, dump)| dump),
                    colour: colours(),
                };
                draw(frame, &shown);
            })?;
        }
        if !wait_for_input()? {
            continue;
        }
        let (group, arranged) = (view.group, view.arranged(rows.clone()));
        match event::read()? {
            Event::Key(key) if key.kind != KeyEventKind::Release => {
                if view.key(key.code, key.modifiers, &arranged) == Answer::Quit {
                    return Ok(());
                }
                due = true;
            }
            Event::Mouse(mouse) => {
                let screen = Rect::from((Position::ORIGIN, terminal.size()?));
                let spot = place::spot(screen, &view, arranged.len(), (mouse.column, mouse.row));
                due |= view.mouse(mouse.kind, spot, &arranged);
            }
            Event::Resize(..) => due = true,
            _ => {}
        }
        if view.group != group {
            rows = board().rows(monotonic_ns(), view.group);
        }
    }
    Ok(())
}
