//! `gctrace serve --live`: during a run, the page shows what Ruby itself counts, says what it dropped, and ends with gctrace.

#[path = "product/served.rs"]
pub(super) mod served;

use std::{process::Command, time::Instant};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::{
    PATIENCE,
    child::Guarded,
    live::{Live, gctrace_binary},
    ruby::Ruby,
};
use rustix::process::Signal;
use served::{Element, Served, harmless};

/// A title that a browser must treat as text only.
const HOSTILE: &str = "<img src=x onerror=alert(1)></script>";
/// Given a number, it collects at least that often, and prints the wall-clock interval, the growth of `GC.count` in it, and the value of
/// `GC.count`. It does not collect where it reads the clock.
const PROGRAM: &str = "$stdout.sync = true
    $0 = ARGV[0]
    look = -> { sleep 0.03; found = [Time.now, GC.count]; sleep 0.03; found }
    time = -> (at) { at.utc.strftime('%Y-%m-%dT%H:%M:%S.%NZ') }
    puts 'ready'
    while (line = $stdin.gets)
      GC.start
      from, before = look.call
      line.to_i.times { 20_000.times.map { |i| \"s#{i}\" }; GC.start }
      to, after = look.call
      puts \"counted #{time.(from)} #{time.(to)} #{after - before} #{after}\"
    end";

/// What a program counted.
#[derive(Debug)]
struct Counted {
    from: String,
    to: String,
    grown: u64,
    count: u64,
}

fn program(ruby: &Ruby) -> Result<Guarded> {
    let mut program = Guarded::start("ruby", ruby.command()?.args(["-e", PROGRAM, HOSTILE]))?;
    program.wait_stdout(PATIENCE, "ready", |line| line == "ready")?;
    Ok(program)
}

fn collects(program: &mut Guarded, cycles: u32) -> Result<Counted> {
    let before = program.stdout_so_far().len();
    program.say(&cycles.to_string())?;
    let since = Instant::now();
    loop {
        if let Some(line) = program.stdout_so_far().get(before) {
            let words: Vec<&str> = line.split(' ').collect();
            let [_, from, to, grown, count] = words[..] else { anyhow::bail!("{line}") };
            let (from, to) = (from.to_owned(), to.to_owned());
            return Ok(Counted { from, to, grown: grown.parse()?, count: count.parse()? });
        }
        ensure!(since.elapsed() < PATIENCE, "it does not answer");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

fn live(flags: &[&str]) -> Result<Served> {
    Served::with(Command::new(gctrace_binary()?).args(["serve", "--live"]).args(flags))
}

/// A number among the current totals.
fn standing(served: &Served, key: &str) -> Result<u64> {
    let (elements, _) = harmless("live", &served.get("live")?)?;
    data(&elements, key)?.parse().with_context(|| key.to_owned())
}

fn data(elements: &[Element], key: &str) -> Result<String> {
    data_of(elements, "live", key)
}

/// The value of this `data-` attribute of the element with this id.
fn data_of(elements: &[Element], id: &str, key: &str) -> Result<String> {
    let found = elements.iter().find(|(_, attributes)| attributes.get("id").is_some_and(|of| of == id));
    let (_, attributes) = found.with_context(|| format!("no {id}"))?;
    attributes.get(key).cloned().with_context(|| format!("no {key} in {attributes:?}"))
}

/// Queries until a condition holds, and returns the last answer.
fn until<T: std::fmt::Debug>(
    what: &str,
    mut ask: impl FnMut() -> Result<T>,
    is: impl Fn(&T) -> bool,
) -> Result<T> {
    let since = Instant::now();
    loop {
        let answer = ask()?;
        if is(&answer) {
            return Ok(answer);
        }
        ensure!(since.elapsed() < PATIENCE, "{what}: {answer:?}");
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}

/// The number of cycles in a part, according to its page.
fn cycles(served: &Served, Counted { from, to, .. }: &Counted) -> Result<u64> {
    let (elements, _) = served.page(&format!("?from={from}&to={to}"))?;
    data_of(&elements, "part", "data-cycles")?.parse().context("a number")
}

/// The page has exactly the collections that Ruby counts, in each part of the time and since the beginning. Ctrl-C ends it.
#[test]
fn counts_what_ruby_counts() -> Result<()> {
    let _live = Live::beside_others()?;
    let mut program = program(&Ruby::main()?)?;
    let served = live(&["--gvl", "--pid", &program.pid().to_string()])?;
    let first = collects(&mut program, 3)?;
    ensure!(first.grown >= 3, "{first:?}");
    until("cycles of the first part", || cycles(&served, &first), |found| *found == first.grown)?;
    let before = standing(&served, "data-cycles")?;
    let second = collects(&mut program, 7)?;
    until("cycles of the second part", || cycles(&served, &second), |found| *found == second.grown)?;
    ensure!(cycles(&served, &first)? == first.grown, "the first part stays what it was");
    let grown = standing(&served, "data-cycles")? - before;
    ensure!(grown == second.count - first.count, "{grown} cycles, of {first:?} {second:?}");
    // One part compared with the other one.
    let query = format!("?from={}&to={}&afrom={}&ato={}", second.from, second.to, first.from, first.to);
    let (_, text) = served.page(&query)?;
    ensure!(
        text.contains("What has changed from A to B") && text.contains("major cycles a second"),
        "{text}"
    );
    ensure!(served.get(&format!("diff.svg{query}"))?.code == 200);
    // Names are text, the script exists, and the current totals are on the page itself.
    let (elements, text) = served.page("?last=5m")?;
    ensure!(text.contains("<img src=x") && data(&elements, "data-state")? == "live", "{text}");
    ensure!(standing(&served, "data-dropped")? == 0);
    for (path, code) in
        [("live.js", 200), ("brush.js", 200), ("?last=x", 400), ("live?last=x", 400), ("flamegraph.svg", 200)]
    {
        ensure!(served.get(path)?.code == code, "{path}");
    }
    let policy = &served.get("")?.headers["content-security-policy"];
    ensure!(policy.ends_with("; connect-src 'self'") && !policy.contains("unsafe"), "{policy}");
    ensure!(served.get("save/pprof")?.body.len() > 100);
    let address = served.address;
    let finished = served.stop(Signal::INT)?;
    ensure!(finished.status.success(), "{}: {}", finished.status, finished.errors());
    ensure!(finished.errors().contains("nothing lost"), "{}", finished.errors());
    ensure!(std::net::TcpStream::connect(address).is_err(), "nobody listens any more");
    ensure!(program.running()?, "the program goes on");
    Ok(())
}

/// What is older than `--keep` is dropped, and the page says so. When the program has ended, what was kept stays available.
#[test]
fn drops_and_stays() -> Result<()> {
    let _live = Live::beside_others()?;
    let mut program = program(&Ruby::main()?)?;
    let served = live(&["--keep=6s", &program.pid().to_string()])?;
    let early = collects(&mut program, 2)?;
    until("something is dropped", || standing(&served, "data-dropped"), |dropped| *dropped > 0)?;
    let gone = format!("?from={}&to={}", early.from, early.to);
    until(
        "the early part is dropped",
        || Ok(served.page(&gone)?.1),
        |text| text.contains("This part is no longer kept"),
    )?;
    let last = collects(&mut program, 4)?;
    ensure!(standing(&served, "data-cycles")? >= early.grown, "what is counted since the begin stays");
    until("cycles of the last part", || cycles(&served, &last), |found| *found == last.grown)?;
    let pid = program.pid();
    program.signal(Signal::TERM)?;
    until(
        "tracing ends",
        || {
            let (elements, _) = harmless("live", &served.get("live")?)?;
            data(&elements, "data-state")
        },
        |state| state == "ended",
    )?;
    let (_, text) = served.page("")?;
    ensure!(text.contains("Tracing has ended") && text.contains(&pid.to_string()), "{text}");
    let finished = served.stop(Signal::TERM)?;
    ensure!(finished.status.success(), "{}: {}", finished.status, finished.errors());
    Ok(())
}

/// What cannot be served is reported before anything is traced. Flags of a run require one.
#[test]
fn refusals() -> Result<()> {
    let _live = Live::beside_others()?;
    let taken = std::net::TcpListener::bind("127.0.0.1:0")?;
    let taken = taken.local_addr()?.to_string();
    for (flags, words) in [
        (&["--live", "--listen", &taken][..], "name another port"),
        (&["--live", "--listen", "0.0.0.0:0"], "ssh -L"),
        (&["--gvl", "x.gctrace"], "--live"),
        (&["--keep", "1m", "x.gctrace"], "--live"),
        (&["a.gctrace", "b.gctrace", "c.gctrace"], "compares two"),
    ] {
        let mut command = Command::new(gctrace_binary()?);
        let finished = Guarded::start("serve", command.arg("serve").args(flags))?.finish(PATIENCE)?;
        ensure!(finished.status.code() == Some(2), "{flags:?}: {}", finished.status);
        ensure!(finished.errors().contains(words), "{flags:?}: {}", finished.errors());
    }
    Ok(())
}
