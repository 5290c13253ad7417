//! A PostgreSQL for one test: a new cluster on a free port, run by a user other than root.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::PATIENCE;
use crate::child::Guarded;
use crate::free_port;

/// A running cluster. Dropping it kills it and removes its data.
#[derive(Debug)]
pub struct Postgres {
    process: Option<Guarded>,
    port: u16,
    programs: PathBuf,
    dir: TempDir,
    tls: bool,
}

impl Postgres {
    /// Creates a cluster and starts it.
    pub fn start() -> Result<Self> {
        Self::new(None)
    }

    /// Like [`Self::start`], with TLS by `chain.pem` and `key.pem` in this directory. Unencrypted connections are refused.
    pub fn start_tls(certificates: &Path) -> Result<Self> {
        Self::new(Some(certificates))
    }

    fn new(certificates: Option<&Path>) -> Result<Self> {
        let programs = programs()?;
        // Only root can enter the build's directory.
        let mut dir = tempfile::Builder::new().prefix("gctrace-pg-").tempdir()?;
        run(Command::new("chown").arg("postgres").arg(dir.path()))?;
        let mut initdb = as_postgres(&programs.join("initdb"));
        initdb.args(["--auth=trust", "--username=gctrace", "--no-sync", "--encoding=UTF8", "-D"]);
        run(initdb.arg(dir.path().join("data")))?;
        if let Some(certificates) = certificates {
            for name in ["chain.pem", "key.pem"] {
                // PostgreSQL requires a key that no other user can read.
                let mut install = Command::new("install");
                install.args(["-o", "postgres", "-m", "600"]).arg(certificates.join(name));
                run(install.arg(dir.path().join("data")))?;
            }
            let rules = "local all all trust\nhostssl all all all trust\n";
            std::fs::write(dir.path().join("data/pg_hba.conf"), rules)?;
        }
        let tls = certificates.is_some();
        let mut last = None;
        for _ in 0..5 {
            // Another program may take the port in the meantime.
            let port = free_port()?;
            let mut cluster = Self { process: None, port, programs: programs.clone(), dir, tls };
            match cluster.resume() {
                Ok(()) => return Ok(cluster),
                Err(error) => last = Some(error),
            }
            dir = cluster.dir;
        }
        last.map_or_else(|| bail!("no attempt"), Err)
    }

    /// The address of its database, for collectors.
    pub fn address(&self) -> String {
        format!("postgres://gctrace@127.0.0.1:{}/postgres", self.port)
    }

    /// Kills it without a chance to clean up.
    pub fn kill(&mut self) -> Result<()> {
        let process = self.process.take().context("it runs")?;
        process.signal(Signal::KILL)?;
        drop(process);
        Ok(())
    }

    /// Starts it in the same directory and on the same port. May be called again after [`Self::kill`].
    pub fn resume(&mut self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        // The processes of a killed server end one by one, and keep its shared memory until then.
        while Instant::now() < deadline {
            let mut command = as_postgres(&self.programs.join("postgres"));
            command.arg("-D").arg(self.dir.path().join("data")).arg("-k").arg(self.dir.path());
            command.args(["-h", "127.0.0.1", "-p", &self.port.to_string(), "-c", "shared_buffers=64MB"]);
            if self.tls {
                command.args(["-c", "ssl=on", "-c", "ssl_cert_file=chain.pem", "-c", "ssl_key_file=key.pem"]);
            }
            let mut process = Guarded::start("postgres", &mut command)?;
            let ready = |line: &str| line.contains("ready to accept connections");
            if process.wait_stderr(Duration::from_secs(20), "its readiness", ready).is_ok() {
                self.process = Some(process);
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        bail!("PostgreSQL does not start")
    }

    /// The output of `psql` for a query, without headers or alignment.
    pub fn query(&self, query: &str) -> Result<String> {
        let mut psql = Command::new(self.programs.join("psql"));
        psql.args(["--no-psqlrc", "--tuples-only", "--no-align", "--command", query, &self.address()]);
        run(&mut psql).map(|text| text.trim().to_owned())
    }
}

/// The directory with the programs of Debian's newest PostgreSQL.
fn programs() -> Result<PathBuf> {
    let versions = std::fs::read_dir("/usr/lib/postgresql");
    let versions = versions.context("no PostgreSQL; `cargo xtask setup` installs it")?.flatten();
    let newest = versions.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok()).max();
    Ok(Path::new("/usr/lib/postgresql").join(newest.context("a version")?.to_string()).join("bin"))
}

fn as_postgres(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--reuid=postgres", "--regid=postgres", "--clear-groups", "--pdeathsig=KILL"]).arg(program);
    command.current_dir("/").env("LC_ALL", "C.UTF-8");
    command
}

fn run(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot start {command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}
