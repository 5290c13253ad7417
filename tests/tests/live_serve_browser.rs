//! `gctrace serve --live` in Chromium: its script keeps the page up to date, holds it on request, does not change what is being read, and
//! shows when gctrace is gone.

use std::{
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::{
    PATIENCE,
    browser::{Browser, View},
    child::Guarded,
    ensure_times,
    live::{Live, gctrace_binary, work_dir},
    ruby::Ruby,
    timing::settled,
};
use rustix::process::Signal;

use super::live_serve::served::Served;

const VIEWS: [View; 3] = [
    View { name: "light", width: 1280, scale: 1, dark: false },
    View { name: "dark", width: 1280, scale: 1, dark: true },
    View { name: "narrow", width: 530, scale: 1, dark: false },
];

/// A title that a browser must treat as text only.
const HOSTILE: &str = "<img src=x onerror=alert(1)></script>";
/// Given a number, it collects that often, and prints the number of collections since its start.
const PROGRAM: &str = "$stdout.sync = true
    $0 = ARGV[0]
    first = GC.count
    puts 'ready'
    while (line = $stdin.gets)
      GC.disable
      line.to_i.times { 20_000.times.map { |i| \"s#{i}\" }; GC.start }
      puts \"counted #{GC.count - first}\"
      GC.enable
    end";

/// Makes the program collect, and returns its total number of collections.
fn collect(program: &mut Guarded, cycles: u32) -> Result<u64> {
    let before = program.stdout_so_far().len();
    program.say(&cycles.to_string())?;
    let since = Instant::now();
    loop {
        if let Some(line) = program.stdout_so_far().get(before) {
            return line.strip_prefix("counted ").context("no count")?.parse().context("a number");
        }
        ensure!(since.elapsed() < PATIENCE, "it does not answer");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Waits until an expression in the page has the wanted value.
fn until(browser: &mut Browser, expression: &str, wanted: &str) -> Result<Duration> {
    let since = Instant::now();
    loop {
        let found = browser.evaluate(&format!("String({expression})"))?;
        if found == wanted {
            return Ok(since.elapsed());
        }
        ensure!(since.elapsed() < PATIENCE, "{expression} is {found}, not {wanted}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

const CYCLES: &str = "document.getElementById('live').dataset.cycles";
const PART: &str = "document.getElementById('part').dataset.cycles";
/// The number of major collections; all collections of the program are major.
const MAJORS: &str = "document.getElementById('live').dataset.majors";
const SHOWN: &str = "document.getElementById('live').innerText";
const STATE: &str = "document.getElementById('live').dataset.state";

#[test]
fn kept_up_to_date() -> Result<()> {
    let _live = Live::idle_beside_others()?;
    settled(page_is_kept_up_to_date)
}

fn page_is_kept_up_to_date() -> Result<()> {
    let mut program = Guarded::start("ruby", Ruby::main()?.command()?.args(["-e", PROGRAM, HOSTILE]))?;
    program.wait_stdout(PATIENCE, "ready", |line| line == "ready")?;
    let mut serve = Command::new(gctrace_binary()?);
    serve.args(["serve", "--live", "--gvl", "--pid", &program.pid().to_string()]);
    let served = Served::with(&mut serve)?;
    let (url, mut browser) = (format!("http://{}{}", served.address, served.base), Browser::start()?);
    let first = collect(&mut program, 5)?;
    ensure!(first == 5, "{first}");
    let said = browser.load(&url, VIEWS[0])?;
    ensure!(said.is_empty(), "{said:?}");
    until(&mut browser, CYCLES, "5")?;
    until(&mut browser, PART, "5")?;
    // From here on the page is not reloaded, and what was opened or closed in it stays so.
    browser.evaluate("window.mine = true")?;
    browser.evaluate(
        "window.title = (one) => one.querySelector('summary').textContent;
         window.details = () => Array.from(document.querySelectorAll('#part details'));
         details().forEach((one) => { one.open = !one.open; });
         window.chosen = new Map(details().map((one) => [title(one), one.open])); 0",
    )?;
    let shown = browser.evaluate(SHOWN)?;
    collect(&mut program, 3)?;
    let took = until(&mut browser, CYCLES, "8")?;
    ensure_times!(took < Duration::from_secs(30), "{took:?} until the page had what stands now");
    until(&mut browser, MAJORS, "8")?;
    ensure!(browser.evaluate(SHOWN)? != shown, "what stands now is not shown: {shown}");
    until(&mut browser, PART, "8")?;
    let [there, other] = ["has(title(one))", "get(title(one)) === !one.open"]
        .map(|is| browser.evaluate(&format!("details().filter((one) => chosen.{is}).map(title).join(', ')")));
    let (there, other) = (there?, other?);
    ensure!(there != "" && other == "", "of {there} these were opened or closed: {other}");

    // What is being read does not change; the current totals do.
    browser.evaluate("document.querySelector('#part a, #part summary').focus()")?;
    collect(&mut program, 2)?;
    until(&mut browser, CYCLES, "10")?;
    std::thread::sleep(Duration::from_secs(12));
    let part = browser.evaluate(PART)?;
    ensure!(part == "8", "the part is {part} while it is being read");
    browser.evaluate("document.activeElement.blur()")?;
    until(&mut browser, PART, "10")?;
    // Selected text does not change, either.
    let selected =
        "getSelection().selectAllChildren(document.querySelector('#part h2')); getSelection().isCollapsed";
    ensure!(browser.evaluate(selected)? == false, "nothing is selected");
    collect(&mut program, 1)?;
    until(&mut browser, CYCLES, "11")?;
    std::thread::sleep(Duration::from_secs(12));
    let part = browser.evaluate(PART)?;
    ensure!(part == "10", "the part is {part} while its text is selected");
    browser.evaluate("getSelection().removeAllRanges()")?;
    until(&mut browser, PART, "11")?;

    // By keyboard: hold and release.
    browser.evaluate("document.getElementById('hold').focus()")?;
    browser.enter("\n")?;
    until(&mut browser, "document.getElementById('hold').getAttribute('aria-pressed')", "true")?;
    collect(&mut program, 2)?;
    std::thread::sleep(Duration::from_secs(3));
    let held = browser.evaluate(CYCLES)?;
    ensure!(held == "11", "{held} cycles on a page that is held");
    browser.enter("\n")?;
    until(&mut browser, CYCLES, "13")?;

    // A page on which a part is being selected is held, too.
    browser.evaluate("document.querySelector('#live svg').dataset.drag = ''")?;
    collect(&mut program, 1)?;
    std::thread::sleep(Duration::from_secs(3));
    let held = browser.evaluate(CYCLES)?;
    ensure!(held == "13", "{held} cycles on a page on which a part is being chosen");
    browser.evaluate("delete document.querySelector('#live svg').dataset.drag")?;
    until(&mut browser, CYCLES, "14")?;

    // While gctrace cannot be reached, its figures are marked as stale.
    browser
        .evaluate("window.reached = fetch; window.fetch = () => Promise.reject(new Error('planted')); 0")?;
    until(&mut browser, STATE, "stale")?;
    until(&mut browser, "document.getElementById('stale').hidden", "false")?;
    browser.evaluate("window.fetch = window.reached; 0")?;
    until(&mut browser, STATE, "live")?;
    until(&mut browser, "document.getElementById('stale').hidden", "true")?;
    let (same, images) = (
        browser.evaluate("window.mine")?,
        browser.evaluate("document.querySelectorAll('img, script:not([src])').length")?,
    );
    ensure!(same == true && images == 0, "loaded again: {same}; {images} elements that names made");
    let text = browser.evaluate("document.body.textContent")?;
    ensure!(text.as_str().is_some_and(|text| text.contains(HOSTILE)), "{text}");
    let wrong = browser.wrong()?;
    ensure!(wrong.is_empty(), "{wrong:?}");

    let dir = work_dir()?.join("pages/live");
    std::fs::create_dir_all(&dir)?;
    for view in VIEWS {
        let said = browser.load(&url, view)?;
        ensure!(said.is_empty(), "{said:?}");
        until(&mut browser, CYCLES, "14")?;
        browser.picture(&dir.join(format!("{}.png", view.name)))?;
        let wide = browser.evaluate("document.documentElement.scrollWidth")?.as_u64().context("a number")?;
        ensure!(wide <= u64::from(view.width), "{}: {wide} pixels", view.name);
    }
    ensure!(browser.evaluate(STATE)? == "live" && program.running()?);

    // When gctrace is killed, the page says that its figures are stale.
    served.stop(Signal::KILL)?;
    until(&mut browser, STATE, "stale")?;
    until(&mut browser, "document.getElementById('stale').hidden", "false")?;
    let shown = browser.evaluate("document.getElementById('stale').innerText")?;
    ensure!(shown.as_str().is_some_and(|text| text.len() > 10), "{shown}");
    browser.picture(&dir.join("stale.png"))?;
    Ok(())
}
