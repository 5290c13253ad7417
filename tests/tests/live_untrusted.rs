//! Hostile users other than root: the names of their variables, and files where gctrace writes as root.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt as _, lchown, symlink};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::child::Guarded;
use gctrace_tests::gctrace::{Invocation, read};
use gctrace_tests::live::{Live, gctrace_binary};

const NOBODY: u32 = 65_534;
/// Collects often enough for a sample set.
const PROGRAM: &str =
    "600.times { 20_000.times { Object.new } }; $stdout.puts 'idle'; $stdout.flush; $stdin.gets";

/// A directory that all users may enter, below the system's directory for temporary files.
fn open_dir() -> Result<tempfile::TempDir> {
    let dir = tempfile::Builder::new().prefix("gctrace-test-").tempdir()?;
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755))?;
    Ok(dir)
}

fn chown(path: &Path) -> Result<()> {
    Ok(lchown(path, Some(NOBODY), Some(NOBODY))?)
}

fn hidden(text: &str) -> Vec<char> {
    let bad = |c: &char| {
        (c.is_control() && *c != '\n')
            || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    text.chars().filter(bad).collect()
}

/// A variable whose name is a paragraph of advice, and a value with terminal escapes, do not reach anything that root reads: not
/// gctrace's own output, not the sets, and not the report made from them.
#[test]
fn forged_environment() -> Result<()> {
    let live = Live::begin()?;
    let ruby = std::env::var("GCTRACE_RUBIES").unwrap_or_else(|_| "ruby".to_owned());
    let ruby = std::env::split_paths(&ruby).next().context("a Ruby")?;
    let forged = "RUBY_GC_X\n\n  For speed:\n    export LD_PRELOAD=x.so    # 's default: 0\n      why: ";
    let sets = live.path("sets");
    let gctrace =
        Invocation::jsonl([Path::new("--all-ruby"), "--tunemygc".as_ref(), &sets])?.start_ready()?;
    let mut command = Command::new(ruby);
    command.args(["-e", PROGRAM]).uid(NOBODY).gid(NOBODY).current_dir("/");
    command.env(forged, "\x1b[8m").env("RUBY_GC_HEAP_GROWTH", "\x1b[8m\u{9b}2J").env("RUBY_GC_\u{202e}", "1");
    command.env("OTEL_SERVICE_NAME", "shop\u{202e}\u{2066}\x1b[2J");
    let mut program = Guarded::start("ruby", &mut command)?;
    program.wait_stdout(Duration::from_mins(2), "idle", |line| line == "idle")?;
    program.say("end")?;
    program.finish(Duration::from_mins(1))?;
    let finished = gctrace.interrupt()?;
    let report = read(&finished)?;
    let errors = finished.errors();
    ensure!(!errors.contains("\n  For speed") && hidden(&errors).is_empty(), "{errors:?}");
    ensure!(errors.contains("ignored 2 environment variables with names that Ruby never reads"), "{errors}");
    let lines = finished.stdout.join("\n");
    ensure!(hidden(&lines).is_empty(), "{:?}", hidden(&lines));
    let ledger = report.ledger.as_ref().context("a ledger")?;
    ensure!(ledger.user["variables_refused"] == 2, "{ledger:?}");
    for file in fs::read_dir(&sets)? {
        let text = fs::read_to_string(file?.path())?;
        ensure!(!text.contains("LD_PRELOAD") && hidden(&text).is_empty(), "{text}");
    }
    for format in ["text", "json"] {
        let output =
            Command::new(gctrace_binary()?).args(["tune", "--format", format]).arg(&sets).output()?;
        let text = String::from_utf8(output.stdout)?;
        ensure!(text.contains("3.") || text.contains("2."), "no report:\n{text}");
        ensure!(!text.contains("LD_PRELOAD") && hidden(&text).is_empty(), "{text:?}");
    }
    Ok(())
}

/// Runs gctrace with these arguments on a program that ends at once. Returns whether it succeeded, and its messages.
fn run(args: &[&Path]) -> Result<(bool, String)> {
    let mut all: Vec<PathBuf> = ["--duration", "5s"].map(PathBuf::from).to_vec();
    all.extend(args.iter().map(|arg| arg.to_path_buf()));
    all.extend(["--", "ruby", "-e", "GC.start"].map(PathBuf::from));
    let finished = Invocation::new(all)?.run()?;
    Ok((finished.status.success(), finished.errors()))
}

/// A spool that belongs to another user, or that is a link, is refused: no file of root's is read, created or removed.
#[test]
fn foreign_spool() -> Result<()> {
    let _live = Live::beside_others()?;
    let dir = open_dir()?;
    let secret = dir.path().join("secret.json");
    fs::write(&secret, "[\"of root\"]")?;
    fs::set_permissions(&secret, Permissions::from_mode(0o600))?;
    // A collector that would receive the secret.
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    listener.set_nonblocking(true)?;
    let url = format!("http://{}", listener.local_addr()?);
    let spool = dir.path().join("spool");
    let args = [
        Path::new("--tunemygc-url"),
        Path::new(&url),
        Path::new("--tunemygc-token"),
        Path::new("t"),
        Path::new("--tunemygc-spool"),
        &spool,
    ];
    // The name of the part follows from the address: root creates it once, then it is found in the attacker's directory.
    // Each attempt to send is disconnected at once, or the run would wait for an answer.
    let over = AtomicBool::new(false);
    let (_, errors) = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                drop(listener.accept());
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        let ran = run(&args);
        over.store(true, Ordering::Relaxed);
        ran
    })?;
    let part = fs::read_dir(&spool).context(errors)?.next().context("a part")??.file_name();
    for made in [&spool, &spool.join(&part)] {
        ensure!(fs::metadata(made)?.permissions().mode() & 0o777 == 0o700, "{}", made.display());
    }
    while listener.accept().is_ok() {}
    fs::remove_dir_all(&spool)?;
    fs::create_dir_all(spool.join(&part))?;
    symlink(&secret, spool.join(&part).join("0001.json"))?;
    symlink(dir.path().join("new"), spool.join(&part).join("lock"))?;
    for path in [spool.clone(), spool.join(&part)] {
        chown(&path)?;
        fs::set_permissions(&path, Permissions::from_mode(0o777))?;
    }
    let attack = |what: &str, why: &str| -> Result<()> {
        let (fine, errors) = run(&args)?;
        // One remedy, and nothing after it.
        let line = format!("gctrace: {} cannot be written: {why}", spool.display());
        ensure!(!fine && errors.lines().any(|said| said == line), "{what}: no `{line}` in {errors}");
        ensure!(listener.accept().is_err(), "{what}: something was sent");
        ensure!(!dir.path().join("new").exists(), "{what}: a file was made");
        ensure!(spool.join(&part).join("0001.json").symlink_metadata().is_ok(), "{what}: a link was removed");
        ensure!(secret.exists(), "{what}");
        Ok(())
    };
    let foreign =
        format!("it belongs to uid {NOBODY} and gctrace runs as uid 0: `chown` it, or name another one");
    attack("a foreign spool", &foreign)?;
    // Root's own directory, with a part that belongs to the attacker.
    lchown(&spool, Some(0), Some(0))?;
    fs::set_permissions(&spool, Permissions::from_mode(0o755))?;
    attack("a foreign part", &foreign)?;
    // A link instead of the spool.
    let real = dir.path().join("real");
    fs::rename(&spool, &real)?;
    symlink(&real, &spool)?;
    chown(&spool)?;
    attack("a link", "it is not a directory, or it is a symbolic link; name the directory itself")
}

/// Sets are not written through another user's link.
#[test]
fn foreign_link_as_directory() -> Result<()> {
    let _live = Live::begin()?;
    let dir = open_dir()?;
    let target = dir.path().join("of-root");
    fs::create_dir(&target)?;
    let theirs = dir.path().join("theirs");
    fs::create_dir(&theirs)?;
    chown(&theirs)?;
    let link = theirs.join("sets");
    symlink(&target, &link)?;
    chown(&link)?;
    for path in [link.clone(), link.join("")] {
        let (fine, errors) = run(&[Path::new("--tunemygc"), &path])?;
        ensure!(!fine && errors.contains("symbolic link"), "{errors}");
        ensure!(fs::read_dir(&target)?.count() == 0, "something was written through the link");
    }
    Ok(())
}

/// Pipes as arguments are errors, not endless waits.
#[test]
fn pipes() -> Result<()> {
    let live = Live::begin()?;
    let pipe = live.path("pipe.json");
    ensure!(Command::new("mkfifo").arg(&pipe).status()?.success());
    let store = format!("sqlite:{}", pipe.display());
    let pipe = pipe.to_string_lossy().into_owned();
    let cases: [&[&str]; 2] =
        [&["tune", &pipe], &["collector", "--listen", "127.0.0.1:0", "--store", &store]];
    for args in cases {
        let mut gctrace = Guarded::start("gctrace", Command::new(gctrace_binary()?).args(args))?;
        gctrace.wait_stderr(Duration::from_secs(20), "a reason", |line| {
            line.contains("is not a regular file")
        })?;
        let finished = gctrace.finish(Duration::from_secs(20))?;
        ensure!(finished.status.code() == Some(2), "{args:?}: {}", finished.status);
    }
    Ok(())
}
