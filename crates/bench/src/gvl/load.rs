//! The traced Puma, and wrk, which sends requests to it.

use std::{
    ffi::OsString,
    fs,
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use gctrace_tests::live::rubies_dir;
use rustix::process::Signal;

use xtask::util::{Running, output, which};

const PATIENCE: Duration = Duration::from_mins(1);

/// Kinds of requests to the server's program: path, and the kind of work.
pub(super) const ENDPOINTS: [(&str, &str); 2] = [("cpu", "computes"), ("io", "sleeps for 5 ms")];

/// Fails on a machine on which this cannot be measured.
pub(in super::super) fn check() -> Result<()> {
    for name in ["puma", "wrk"] {
        if which(name).is_none() {
            bail!(
                "there is no {name} here: install the package {name} (`apt install {name}`), or all that tests need (`cargo xtask setup --for test`)"
            );
        }
    }
    Ok(())
}

/// A server of one process with five threads.
pub(in super::super) struct Puma {
    process: Running,
    port: u16,
    log: PathBuf,
}

impl Puma {
    /// Starts the server and waits until it answers; its output goes to `log`.
    pub(in super::super) fn start(log: &Path) -> Result<Self> {
        Self::start_with("threads.ru", &[], log)
    }

    /// Starts the server with this application and these environment variables.
    pub(in super::super) fn start_with(
        application: &str,
        environment: &[(OsString, OsString)],
        log: &Path,
    ) -> Result<Self> {
        let port = TcpListener::bind("127.0.0.1:0").context("no free port")?.local_addr()?.port();
        let file = fs::File::create(log).with_context(|| format!("cannot create {}", log.display()))?;
        let web = rubies_dir().join("web");
        let mut command = Command::new("puma");
        command.args(["-q", "-t", "5:5", "-b"]).arg(format!("tcp://127.0.0.1:{port}"));
        command.arg(web.join(application)).current_dir(&web).env("RACK_ENV", "production");
        command.envs(environment.iter().map(|(name, value)| (name, value)));
        command.stdin(std::process::Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let mut puma = Self { process: Running::start(&mut command)?, port, log: log.into() };
        let since = Instant::now();
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            puma.check()?;
            ensure!(since.elapsed() < PATIENCE, "puma does not listen: {}", puma.said());
            thread::sleep(Duration::from_millis(20));
        }
        Ok(puma)
    }

    pub(in super::super) fn pid(&self) -> u32 {
        self.process.pid()
    }

    fn said(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    fn check(&mut self) -> Result<()> {
        match self.process.ended()? {
            Some(status) => bail!("puma ended by itself ({status}): {}", self.said()),
            None => Ok(()),
        }
    }

    /// Sends requests from eight connections for this number of seconds.
    pub(in super::super) fn load(&mut self, endpoint: &str, seconds: u32) -> Result<Load> {
        self.load_from(8, endpoint, seconds)
    }

    /// Sends requests from this number of connections.
    pub(in super::super) fn load_from(
        &mut self,
        connections: u32,
        endpoint: &str,
        seconds: u32,
    ) -> Result<Load> {
        let mut wrk = Command::new("wrk");
        wrk.args(["-t1", "--latency", "--timeout", "20s"]);
        wrk.arg(format!("-c{connections}")).arg(format!("-d{seconds}s"));
        wrk.arg(format!("http://127.0.0.1:{}/{endpoint}", self.port));
        let text = output(&mut wrk)?;
        self.check()?;
        Load::read(&text).with_context(|| format!("what wrk said: {text}"))
    }

    /// The body of the answer to one request.
    pub(in super::super) fn get(&self, path: &str) -> Result<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        write!(stream, "GET /{path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let (head, body) = answer.split_once("\r\n\r\n").with_context(|| format!("no answer: {answer:?}"))?;
        ensure!(head.starts_with("HTTP/1.1 200"), "{head}");
        Ok(body.to_owned())
    }

    /// Terminates the server and waits for its end.
    pub(in super::super) fn end(mut self) -> Result<()> {
        self.process.signal(Signal::TERM)?;
        self.process.wait(PATIENCE)?;
        Ok(())
    }
}

/// wrk's report of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in super::super) struct Load {
    /// Number of answers.
    pub(in super::super) requests: u64,
    /// Answers per second.
    pub(in super::super) per_second: f64,
    /// Median time of an answer, microseconds.
    pub(in super::super) p50_us: Option<f64>,
    /// 99th percentile of the time of an answer, microseconds.
    pub(in super::super) p99_us: Option<f64>,
}

impl Load {
    /// Parses wrk's report. Runs with error answers or without requests are refused: they measure nothing.
    fn read(text: &str) -> Result<Self> {
        let lines = || text.lines().map(str::trim);
        for line in lines() {
            ensure!(!line.starts_with("Non-2xx") && !line.starts_with("Socket errors"), "{line}");
        }
        let requests = lines().find_map(|line| line.split_once(" requests in ")?.0.parse().ok());
        let requests = requests.context("it does not report the number of requests")?;
        ensure!(requests > 0, "no request was answered");
        let per_second = lines().find_map(|line| line.strip_prefix("Requests/sec:")?.trim().parse().ok());
        let per_second = per_second.context("it does not report requests per second")?;
        let within = |share| lines().find_map(|line| microseconds(line.strip_prefix(share)?.trim()));
        Ok(Self { requests, per_second, p50_us: within("50%"), p99_us: within("99%") })
    }
}

/// Parses a time as wrk writes it: `830.00us`, `4.06ms`, `1.20s`, `1.01m`.
fn microseconds(text: &str) -> Option<f64> {
    let (number, unit) = text.split_at(text.find(|c: char| c.is_ascii_alphabetic())?);
    let factor = match unit {
        "us" => 1.0,
        "ms" => 1e3,
        "s" => 1e6,
        "m" => 6e7,
        _ => return None,
    };
    Some(number.parse::<f64>().ok()? * factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: &str = "Running 20s test @ http://127.0.0.1:9292/cpu
  1 threads and 8 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency     4.06ms    1.21ms  31.11ms   96.39%
    Req/Sec     1.99k    99.87     2.12k    70.30%
  Latency Distribution
     50%    3.96ms
     75%    4.20ms
     90%    4.52ms
     99%    7.33ms
  39637 requests in 20.02s, 3.20MB read
Requests/sec:   1979.68
Transfer/sec:    163.50KB
";

    /// Answers, answers per second and percentiles, which an old wrk or one without `--latency` does not report.
    #[test]
    fn what_wrk_says() {
        let load = Load { requests: 39_637, per_second: 1979.68, p50_us: Some(3960.0), p99_us: Some(7330.0) };
        assert_eq!(Load::read(SAID).unwrap(), load);
        let without = SAID.replace("     99%    7.33ms\n", "");
        assert_eq!(Load::read(&without).unwrap(), Load { p99_us: None, ..load });
    }

    /// Errors do not count as answers.
    #[test]
    fn what_is_no_measure() {
        let refused = |said: &str| Load::read(said).unwrap_err().to_string();
        let wrong = format!("{SAID}  Non-2xx or 3xx responses: 12\n");
        assert_eq!(refused(&wrong), "Non-2xx or 3xx responses: 12");
        let wrong = format!("  Socket errors: connect 0, read 3, write 0, timeout 8\n{SAID}");
        assert_eq!(refused(&wrong), "Socket errors: connect 0, read 3, write 0, timeout 8");
        assert_eq!(refused(&SAID.replace("  39637 requests", "  0 requests")), "no request was answered");
        assert!(Load::read("").is_err() && Load::read(&SAID.replace("Requests/sec", "x")).is_err());
    }

    /// All units of wrk.
    #[test]
    fn times() {
        let read = |text| microseconds(text).map(f64::round);
        assert_eq!((read("830.00us"), read("4.06ms")), (Some(830.0), Some(4060.0)));
        assert_eq!((read("1.20s"), read("1.50m")), (Some(1_200_000.0), Some(90_000_000.0)));
        assert_eq!((read("7"), read("7.0days"), read("ms")), (None, None, None));
    }
}
