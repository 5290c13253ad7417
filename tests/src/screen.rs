//! A headless terminal: tmux with its own server.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};

use crate::PATIENCE;
use crate::live::Live;

/// A terminal in which a command runs. Dropping it ends both.
pub struct Screen {
    socket: PathBuf,
}

impl Screen {
    /// Starts a command in a terminal of this size. The shell splits the command.
    pub fn start(live: &Live, (width, height): (u16, u16), command: &str) -> Result<Self> {
        let screen = Self { socket: live.path("tmux") };
        let (width, height) = (width.to_string(), height.to_string());
        // The last output of the command can be read after its end.
        let command = format!("{command}; echo ended with $?; cat");
        screen.tmux(&["-f", "/dev/null", "new-session", "-d", "-x", &width, "-y", &height, &command])?;
        Ok(screen)
    }

    fn tmux(&self, args: &[&str]) -> Result<String> {
        let mut command = Command::new("tmux");
        command.arg("-S").arg(&self.socket).args(args).env("LC_ALL", "C.UTF-8").env_remove("TMUX");
        let output = command.output().context("tmux")?;
        ensure!(output.status.success(), "tmux {args:?}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// What the terminal shows.
    pub fn shown(&self) -> Result<String> {
        self.tmux(&["capture-pane", "-p"])
    }

    /// Presses keys, by tmux's names of keys.
    pub fn press(&self, keys: &[&str]) -> Result<()> {
        self.tmux(&[&["send-keys"], keys].concat()).map(drop)
    }

    /// Clicks on a cell (counted from 0), as terminals report it in xterm's SGR mode.
    pub fn click(&self, x: usize, y: usize) -> Result<()> {
        let (x, y) = (x + 1, y + 1);
        self.press(&["-l", &format!("\x1b[<0;{x};{y}M\x1b[<0;{x};{y}m")])
    }

    /// Kills the terminal at once, as if its window had crashed.
    pub fn kill(self) -> Result<()> {
        let server = self.tmux(&["display-message", "-p", "#{pid}"])?;
        let server = server.trim().parse().ok().and_then(Pid::from_raw).context("no pid of tmux")?;
        Ok(kill_process(server, Signal::KILL)?)
    }

    /// Waits until the content of the terminal satisfies a condition.
    pub fn wait(&self, what: &str, wanted: impl Fn(&str) -> bool) -> Result<String> {
        let since = Instant::now();
        loop {
            let shown = self.shown()?;
            if wanted(&shown) {
                return Ok(shown);
            }
            ensure!(since.elapsed() < PATIENCE, "no {what}:\n{shown}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // This is the test's own server: no other terminals end.
        let _gone = self.tmux(&["kill-server"]);
    }
}
