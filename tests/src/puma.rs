//! A Puma that serves one of the applications in `tests/rubies/web`.

use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::PATIENCE;
use crate::child::Guarded;
use crate::free_port;
use crate::live::{Live, rubies_dir};
use crate::ruby::Ruby;

const PROGRAM: &str = "/usr/bin/puma";

/// A server that is listening.
pub struct Puma {
    /// Its process; for a cluster, the master.
    pub process: Guarded,
    /// The file to which the application logs what it does.
    pub truth: PathBuf,
    /// The port that it listens on, on 127.0.0.1.
    pub port: u16,
}

impl Puma {
    /// Starts a Puma with this application, e.g. `requests.ru`, and waits until it listens. With `workers` of 0 it is a single process.
    pub fn start(live: &Live, application: &str, workers: &str) -> Result<Self> {
        Self::run(live, Command::new("puma"), application, workers, true)
    }

    /// Starts a single process that knows the application only by name, so that its paths contain nothing about this machine.
    pub fn start_by_name(live: &Live, application: &str) -> Result<Self> {
        Self::run(live, Command::new("puma"), application, "0", false)
    }

    /// Starts a single process with this Ruby, which has a Puma.
    pub fn start_on(live: &Live, ruby: &Ruby, application: &str) -> Result<Self> {
        Self::run(live, Self::command_of(ruby)?, application, "0", true)
    }

    /// Like [`Self::start_on`], but serves TLS with this key and certificate.
    pub fn start_with_tls(
        live: &Live,
        ruby: &Ruby,
        application: &str,
        (key, certificate): (&Path, &Path),
    ) -> Result<Self> {
        let query = format!("?key={}&cert={}&verify_mode=none", key.display(), certificate.display());
        Self::bound(live, Self::command_of(ruby)?, application, "0", true, ("ssl", &query))
    }

    fn command_of(ruby: &Ruby) -> Result<Command> {
        let mut command = ruby.command()?;
        // Applications look up the ids of their threads in `/proc`.
        command.arg(PROGRAM).env("GCTRACE_TEST_PROC", "1");
        Ok(command)
    }

    /// The Rubies that have a Puma: Puma 5 with 3.1 and Puma 6 with 3.3, whose libc is that of Debian 13.
    pub fn rubies() -> Result<Vec<Ruby>> {
        let rubies: Vec<Ruby> =
            Ruby::all()?.into_iter().filter(|ruby| ruby.host_path(PROGRAM).is_file()).collect();
        ensure!(!rubies.is_empty(), "no Ruby has a Puma: run `cargo xtask setup --for test`");
        Ok(rubies)
    }

    /// `whole`: with absolute paths, else with names relative to the directory of the applications.
    fn run(live: &Live, command: Command, application: &str, workers: &str, whole: bool) -> Result<Self> {
        Self::bound(live, command, application, workers, whole, ("tcp", ""))
    }

    /// Like [`Self::run`], listening with this scheme and this query.
    fn bound(
        live: &Live,
        mut command: Command,
        application: &str,
        workers: &str,
        whole: bool,
        (scheme, query): (&str, &str),
    ) -> Result<Self> {
        let port = free_port()?;
        let truth = live.path(&format!("truth-{port}"));
        let web = rubies_dir().join("web");
        let path = |name: &str| {
            if whole { web.join(name).to_string_lossy().into_owned() } else { name.to_owned() }
        };
        let (config, bound) = (path("requests.rb"), format!("{scheme}://127.0.0.1:{port}{query}"));
        let args = ["-C", &config, "-b", &bound, "-w", workers, &path(application)];
        command.args(args).current_dir(&web).env("GCTRACE_TEST_ARGS", args.join("\n"));
        command.env("GCTRACE_TEST_TRUTH", &truth).env("RACK_ENV", "production");
        let server = Self { process: Guarded::start("puma", &mut command)?, truth, port };
        server.wait_until_it_listens()?;
        Ok(server)
    }

    /// Waits until it listens.
    pub fn wait_until_it_listens(&self) -> Result<()> {
        let since = Instant::now();
        while TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            ensure!(since.elapsed() < PATIENCE, "puma does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Opens a connection.
    pub fn connect(&self) -> Result<TcpStream> {
        let stream = TcpStream::connect(("127.0.0.1", self.port))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }
}
