//! A server on a Unix socket that serves `tests/rubies/web/unix.ru`.

use std::collections::HashMap;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};

use crate::PATIENCE;
use crate::child::Guarded;
use crate::free_port;
use crate::live::{Live, rubies_dir};
use crate::ruby::Ruby;

const PUMA: &str = "/usr/bin/puma";
const UNICORN: &str = "/usr/bin/unicorn";

/// A server that is listening.
pub struct UnixServer {
    /// Its process; for a cluster, the master.
    pub process: Guarded,
    /// The file to which the application logs what it does.
    pub truth: PathBuf,
    /// The socket that it listens on.
    pub socket: PathBuf,
    /// The port on 127.0.0.1 that it also listens on, if it is a Puma.
    pub port: u16,
    _redis: Guarded,
}

/// The application's own record of a request.
#[derive(Clone, Debug)]
pub struct Truth {
    /// Its thread.
    pub tid: u32,
    /// When the application was called, `CLOCK_MONOTONIC` nanoseconds.
    pub begin_ns: u64,
    /// When it returned.
    pub end_ns: u64,
    /// Its method.
    pub method: String,
    /// The status of its response.
    pub status: u16,
    /// The header `traceparent` that it saw.
    pub traceparent: Option<String>,
}

impl UnixServer {
    /// Starts a Puma with four threads on this Ruby, which has one. With `workers` of 0 it is a single process.
    pub fn puma(live: &Live, ruby: &Ruby, workers: &str) -> Result<Self> {
        let port = free_port()?;
        let (name, mut command) = (format!("puma-{port}"), ruby.command()?);
        let socket = live.path(&name).with_extension("sock");
        command.args([PUMA, "-C", &web("unix.rb"), "-w", workers]);
        command.args(["-b", &format!("tcp://127.0.0.1:{port}")]);
        command.args(["-b", &format!("unix://{}", socket.display()), &web("unix.ru")]);
        Self::start(live, &name, &mut command, socket, port)
    }

    /// Starts a Unicorn with two workers.
    pub fn unicorn(live: &Live, ruby: &Ruby) -> Result<Self> {
        let port = free_port()?;
        let (name, mut command) = (format!("unicorn-{port}"), ruby.command()?);
        let socket = live.path(&name).with_extension("sock");
        command.args([UNICORN, "-E", "production", "-c", &web("unicorn_two.rb"), "-l"]);
        command.arg(&socket).arg(web("unix.ru"));
        Self::start(live, &name, &mut command, socket, 0)
    }

    /// The Rubies that have a Unicorn, or a Puma.
    pub fn rubies(unicorn: bool) -> Result<Vec<Ruby>> {
        let program = if unicorn { UNICORN } else { PUMA };
        let rubies: Vec<Ruby> =
            Ruby::all()?.into_iter().filter(|ruby| ruby.host_path(program).is_file()).collect();
        ensure!(!rubies.is_empty(), "no Ruby has {program}: run `cargo xtask setup --for test`");
        Ok(rubies)
    }

    fn start(live: &Live, name: &str, command: &mut Command, socket: PathBuf, port: u16) -> Result<Self> {
        let (truth, redis) = (live.path(name), live.path(name).with_extension("redis"));
        let mut database = Command::new("redis-server");
        database.args(["--port", "0", "--save", "", "--appendonly", "no", "--unixsocket"]);
        let database = Guarded::start("redis-server", database.arg(&redis))?;
        command.current_dir(rubies_dir().join("web")).env("RACK_ENV", "production");
        command.env("GCTRACE_TEST_TRUTH", &truth).env("GCTRACE_TEST_PROC", "1");
        command.env("GCTRACE_TEST_REDIS", &redis);
        let process = Guarded::start(name, command)?;
        let server = Self { process, truth, socket, port, _redis: database };
        wait_until_somebody_listens(&redis)?;
        server.wait_until_it_listens()
    }

    fn wait_until_it_listens(mut self) -> Result<Self> {
        let since = Instant::now();
        while UnixStream::connect(&self.socket).is_err() {
            if !self.process.running()? {
                bail!("it has ended: {}", self.process.finish(PATIENCE)?.errors());
            }
            ensure!(since.elapsed() < PATIENCE, "it does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(self)
    }

    /// Opens a connection.
    pub fn connect(&self) -> Result<UnixStream> {
        let stream = UnixStream::connect(&self.socket)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(stream)
    }

    /// Opens a TCP connection.
    pub fn connect_tcp(&self) -> Result<TcpStream> {
        let stream = TcpStream::connect(("127.0.0.1", self.port))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }

    /// What the application logged, by name of the request.
    pub fn truths(&self) -> Result<HashMap<String, Truth>> {
        let mut truths = HashMap::new();
        for line in std::fs::read_to_string(&self.truth)?.lines() {
            let words: Vec<&str> = line.split(' ').collect();
            let [name, tid, begin, end, method, status, trace] = words[..] else { bail!("line {line}") };
            let truth = Truth {
                tid: tid.parse()?,
                begin_ns: begin.parse()?,
                end_ns: end.parse()?,
                method: method.to_owned(),
                status: status.parse()?,
                traceparent: (trace != "-").then(|| trace.to_owned()),
            };
            ensure!(truths.insert(name.to_owned(), truth).is_none(), "{name} was served twice");
        }
        Ok(truths)
    }
}

fn wait_until_somebody_listens(path: &Path) -> Result<()> {
    let since = Instant::now();
    while UnixStream::connect(path).is_err() {
        ensure!(since.elapsed() < PATIENCE, "nobody listens on {}", path.display());
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

fn web(name: &str) -> String {
    rubies_dir().join("web").join(name).to_string_lossy().into_owned()
}
