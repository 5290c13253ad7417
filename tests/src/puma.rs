//! A Puma that serves one of the applications in `tests/rubies/web`.

use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::PATIENCE;
use crate::child::Guarded;
use crate::live::{Live, rubies_dir};

/// A server that listens.
pub struct Puma {
    /// Its process; of a cluster, the master.
    pub process: Guarded,
    /// What the application logs of itself goes to this file.
    pub truth: PathBuf,
    /// Where it listens, on 127.0.0.1.
    pub port: u16,
}

impl Puma {
    /// Starts one for this application, such as `requests.ru`, and waits until it listens. Without `workers` it is a single process.
    pub fn start(live: &Live, application: &str, workers: &str) -> Result<Self> {
        let truth = live.path("truth");
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let web = rubies_dir().join("web");
        let path = |name: &str| web.join(name).to_string_lossy().into_owned();
        let (config, bound) = (path("requests.rb"), format!("tcp://127.0.0.1:{port}"));
        let args = ["-C", &config, "-b", &bound, "-w", workers, &path(application)];
        let mut command = Command::new("puma");
        command.args(args).current_dir(&web).env("GCTRACE_TEST_ARGS", args.join("\n"));
        command.env("GCTRACE_TEST_TRUTH", &truth).env("RACK_ENV", "production");
        let server = Self { process: Guarded::start("puma", &mut command)?, truth, port };
        server.wait_until_it_listens()?;
        Ok(server)
    }

    /// Waits until it does.
    pub fn wait_until_it_listens(&self) -> Result<()> {
        let since = Instant::now();
        while TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            ensure!(since.elapsed() < PATIENCE, "puma does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// A connection.
    pub fn connect(&self) -> Result<TcpStream> {
        let stream = TcpStream::connect(("127.0.0.1", self.port))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }
}
