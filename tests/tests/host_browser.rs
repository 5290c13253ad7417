//! The pages of the collector and of `gctrace serve` in Chromium: light, dark, narrow, at 200 % zoom and by keyboard, with hostile names.

#[path = "product/hostile.rs"]
mod hostile;
#[expect(dead_code, reason = "others read pages by themselves")]
#[path = "product/served.rs"]
mod served;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use gctrace_tests::browser::{Browser, View};
use gctrace_tests::collector::{Collector, Cycle, apps, cycles, set};
use gctrace_tests::live::{Live, gctrace_binary, work_dir};
use gctrace_user::{
    export::Outputs,
    trace_file::{self, Recorder, Recording},
};
use hostile::{HOSTILE, Hostile};
use serde_json::{Value, json};
use served::{Served, harmless};

const VIEWS: [View; 5] = [
    View { name: "light", width: 1280, scale: 1, dark: false },
    View { name: "dark", width: 1280, scale: 1, dark: true },
    View { name: "narrow", width: 530, scale: 1, dark: false },
    View { name: "telephone", width: 360, scale: 1, dark: true },
    // 1280 pixels at 200 % zoom.
    View { name: "zoom", width: 640, scale: 2, dark: false },
];

/// Reports elements that extend beyond the right edge of the window, if the page can be scrolled there; text in charts that is smaller than 9
/// pixels or covers other text; rows of long text that must be scrolled to be read, or whose words are broken although a line has room
/// for them; names of variables that are broken anywhere but after a `_`; and text whose contrast to its background is below WCAG's 4.5.
const LOOK: &str = r"(() => {
  const found = [], root = document.documentElement, wide = root.clientWidth;
  const name = e => `${e.tagName} ${e.getAttribute('class') || ''} ${(e.textContent || '').trim().slice(0, 40)}`;
  if (root.scrollWidth > wide) {
    found.push(`${root.scrollWidth} pixels in a window of ${wide}`);
    for (const e of document.body.querySelectorAll('*'))
      if (e.getBoundingClientRect().right > wide + 1) found.push('too wide: ' + name(e));
  }
  for (const svg of document.querySelectorAll('svg')) {
    const texts = [...svg.querySelectorAll('text')].filter(t => t.textContent.trim() && t.getClientRects().length);
    const boxes = texts.map(t => t.getBoundingClientRect());
    texts.forEach((t, i) => {
      const scale = svg.getScreenCTM().a, size = parseFloat(getComputedStyle(t).fontSize) * scale;
      if (size < 9) found.push(`text of ${size} pixels: ` + name(t));
      boxes.forEach((b, j) => {
        const a = boxes[i];
        const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (j > i && across > 1 && down > 4) found.push(`covered: ${name(t)} by ${name(texts[j])}`);
      });
    });
  }
  for (const table of document.querySelectorAll('.stacked')) {
    const box = table.parentElement;
    if (box.scrollWidth > box.clientWidth + 1) found.push(`${box.scrollWidth} pixels of rows in ${box.clientWidth}`);
    const texts = document.createTreeWalker(table, NodeFilter.SHOW_TEXT);
    for (let text; (text = texts.nextNode());) {
      // Names of methods and threads are broken where Unicode allows it, e.g. after a slash.
      if (text.parentElement.closest('bdi')) continue;
      for (const word of text.data.matchAll(/[^\s-]+-?/g)) {
        const range = document.createRange();
        range.setStart(text, word.index);
        range.setEnd(text, word.index + word[0].length);
        const parts = [...range.getClientRects()], lines = new Set(parts.map(part => Math.round(part.top)));
        const length = parts.reduce((sum, part) => sum + part.width, 0);
        if (lines.size > 1 && length < wide * 0.8) found.push('broken: ' + word[0]);
      }
    }
  }
  // Names of variables end a line only behind an underscore.
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text; (text = texts.nextNode());) {
    if (text.parentElement.closest('option, svg') || document.contentType === 'text/plain') continue;
    for (const part of text.data.matchAll(/[A-Z]{2,}[_=]?/g)) {
      const range = document.createRange();
      range.setStart(text, part.index);
      range.setEnd(text, part.index + part[0].length);
      const lines = new Set([...range.getClientRects()].map(r => Math.round(r.top)));
      if (lines.size > 1) found.push(`broken: ${part[0]} of ${text.data.slice(0, 60)}`);
    }
  }
  // The browser shows plain text in colours of its own.
  if (document.contentType === 'text/plain') return found;
  const numbers = c => (c.match(/[\d.]+/g) || []).map(Number);
  const light = c => { const [r, g, b] = c.map(v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  for (const e of document.body.querySelectorAll('*')) {
    if (e.closest('svg') || ![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())) continue;
    if (!e.getClientRects().length) continue;
    let behind = e, colour = [];
    for (; behind; behind = behind.parentElement) {
      colour = numbers(getComputedStyle(behind).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) break;
    }
    if (!behind) { found.push('no background behind ' + name(e)); continue; }
    const [a, b] = [numbers(getComputedStyle(e).color), colour].map(c => light(c.slice(0, 3)));
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) found.push(`contrast ${contrast.toFixed(2)}: ` + name(e));
  }
  return found;
})()";

/// Reports text beside a flame graph that is cut off at an edge of the window, covers other text or the graph, or is smaller than 9 pixels, while
/// the buttons and labels of a zoom, a search and a pointed-at frame are shown.
const FLAME: &str = r"(() => {
  document.getElementById('unzoom').classList.remove('hide');
  document.getElementById('matched').firstChild.nodeValue = 'Matched: 100.0%';
  document.getElementById('details').firstChild.nodeValue = 'Frame: Order#total (order.rb:12) (12.34 ms, 56.78%)';
  const found = [], wide = document.documentElement.clientWidth, graph = document.getElementById('frames');
  const rows = [...graph.querySelectorAll('rect')].map(r => r.getBoundingClientRect());
  const top = Math.min(...rows.map(r => r.top)), bottom = Math.max(...rows.map(r => r.bottom));
  const texts = [...document.querySelectorAll('text')].filter(t => !graph.contains(t) && t.textContent.trim() && t.getClientRects().length);
  const boxes = texts.map(t => t.getBoundingClientRect());
  texts.forEach((t, i) => {
    const a = boxes[i], name = `${t.id} ${t.textContent.slice(0, 40)}`;
    if (a.left < 0 || a.right > wide + 0.5) found.push(`cut: ${name} from ${a.left} to ${a.right} of ${wide}`);
    if (a.bottom > top + 2 && a.top < bottom - 2) found.push('covers the graph: ' + name);
    if (a.bottom > document.documentElement.getBoundingClientRect().bottom + 2) found.push('below the picture: ' + name);
    if (parseFloat(getComputedStyle(t).fontSize) < 9) found.push('small: ' + name);
    boxes.forEach((b, j) => {
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (j > i && across > 1 && down > 2) found.push(`covered: ${name} by ${texts[j].textContent.slice(0, 40)}`);
    });
  });
  return texts.length < 6 ? ['no texts'] : found;
})()";

/// Elements that the keyboard can reach: one radio button of each group, and nothing that is folded.
const REACHABLE: &str = r"(() => {
  window.left = new Set([...document.querySelectorAll('a[href], button, input:not([type=hidden]), select, textarea, summary')]
    .filter(e => e.getClientRects().length && !e.disabled && !(e.type === 'radio')));
  return window.left.size;
})()";

/// Records the focused element. Returns whether it is the page itself, and what is wrong with its appearance.
const FOCUSED: &str = r"(() => {
  const e = document.activeElement;
  if (!e || e === document.body) return [true, null];
  window.left.delete(e);
  const s = getComputedStyle(e), box = e.getBoundingClientRect();
  const seen = s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) > 0 || s.boxShadow !== 'none' || e.tagName === 'IFRAME';
  const inside = box.bottom > 0 && box.top < innerHeight;
  return [false, seen && inside ? null : `${e.outerHTML.slice(0, 80)}: ${seen ? `out of sight, ${box.top} to ${box.bottom} of ${innerHeight}` : 'no mark'}`];
})()";

/// The directory of the screenshots.
fn pictures(of: &str) -> Result<PathBuf> {
    let dir = work_dir()?.join("pages").join(of);
    std::fs::create_dir_all(&dir)?;
    eprintln!("pictures of the pages: {}", dir.display());
    Ok(dir)
}

/// Checks a page in all views and walks through it by keyboard. Adds what is wrong.
fn look(browser: &mut Browser, dir: &Path, name: &str, url: &str, wrong: &mut Vec<String>) -> Result<()> {
    for view in VIEWS {
        let said = browser.load(url, view)?;
        let mut found: Vec<String> = said;
        let of_page = browser.evaluate(LOOK)?;
        found.extend(of_page.as_array().context("a list")?.iter().map(Value::to_string));
        let foreign = browser.evaluate("document.querySelectorAll('img, script:not([src])').length")?;
        ensure!(foreign == 0, "{url}: {foreign} elements that names made");
        browser.picture(&dir.join(format!("{name}-{}.png", view.name)))?;
        wrong.extend(found.into_iter().map(|what| format!("{name}, {}: {what}", view.name)));
    }
    browser.load(url, VIEWS[0])?;
    let all = browser.evaluate(REACHABLE)?.as_u64().context("a number")?;
    let mut steps = 0;
    loop {
        browser.press("Tab", 9)?;
        let state = browser.evaluate(FOCUSED)?;
        if let Some(what) = state[1].as_str() {
            wrong.push(format!("{name}, keyboard: {what}"));
        }
        steps += 1;
        // After the last element, the focus moves to the window itself.
        if state[0] == true || steps > all + 200 {
            break;
        }
    }
    let left = browser.evaluate("[...window.left].map(e => e.outerHTML.slice(0, 80))")?;
    if left != json!([]) {
        wrong.push(format!("{name}, keyboard: not reached in {steps} of {all} steps: {left}"));
    }
    wrong.extend(browser.wrong()?.into_iter().map(|what| format!("{name}, keyboard: {what}")));
    Ok(())
}

fn nothing(wrong: &[String]) -> Result<()> {
    ensure!(wrong.is_empty(), "{} things:\n{}", wrong.len(), wrong.join("\n"));
    Ok(())
}

/// The checks work in the browser: they report each fault of a page that has all of them.
#[test]
fn what_is_wrong_is_seen() -> Result<()> {
    let mut browser = Browser::start()?;
    let page = "<!DOCTYPE html><meta http-equiv=Content-Security-Policy content=\"script-src 'none'\">\
        <body style='background:white'><script>document.title='ran'</script><p style='width:3000px'>wide</p>\
        <p style='color:silver'>pale</p><a href='/' style='outline:none'>unmarked</a>\
        <p style='width:9em;overflow-wrap:anywhere'>RUBY_GC_UNPROTECTED</p><div style='width:9em;overflow:auto'><table class=stacked><tr><td style='max-width:4em;overflow-wrap:anywhere'>unbreakable\
        <td><p style='width:9em'>x</table></div>\
        <svg width=100 height=40 viewBox='0 0 400 160'><text x=0 y=80>one</text><text x=2 y=80>two</text></svg>";
    let mut url = "data:text/html,".to_owned();
    for byte in page.bytes() {
        write!(url, "%{byte:02x}")?;
    }
    let said = browser.load(&url, VIEWS[0])?.join("\n");
    ensure!(said.contains("Content Security Policy"), "{said}");
    let found = browser.evaluate(LOOK)?.to_string();
    for words in [
        "in a window of 1280",
        "too wide: P",
        "text of 4 pixels",
        "covered: text",
        "contrast 1.8",
        "pixels of rows in",
        "broken: unbreakable",
        "broken: UNPROTECTED",
    ] {
        ensure!(found.contains(words), "no {words} in {found}");
    }
    browser.evaluate(REACHABLE)?;
    browser.press("Tab", 9)?;
    let focused = browser.evaluate(FOCUSED)?;
    ensure!(focused[1].as_str().is_some_and(|what| what.contains("no mark")), "{focused}");
    let alert = "data:text/html,<script>alert(1)</script>";
    let said = browser.load(alert, VIEWS[0]);
    let said = format!("{said:?}");
    ensure!(said.contains("javascriptDialogOpening") || said.contains("no answer"), "{said}");
    Ok(())
}

#[test]
fn collector() -> Result<()> {
    let live = Live::without_gctrace()?;
    let path = live.path("sets.db");
    let collector = Collector::start(&path, &[])?;
    let store = format!("sqlite:{}", path.display());
    let token = apps(&store, &["add", HOSTILE])?.trim().to_owned();
    apps(&store, &["add", "empty"])?;
    let cycle = |by, major| Cycle { by, major, old_after: 99_000 };
    let mixed = cycles(&[(cycle("newobj", None), 300), (cycle("newobj", Some("oldgen")), 40)]);
    // The charts show the last few days.
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.as_secs();
    let mut id = String::new();
    // The longest name, and several others, for the advice and its effect.
    let long = json!({"RUBY_GC_HEAP_REMEMBERED_WB_UNPROTECTED_OBJECTS_LIMIT_RATIO": "0.02",
        "RUBY_GC_HEAP_OLDOBJECT_LIMIT_FACTOR": "3.8", "RUBY_GC_MALLOC_LIMIT_MAX": "64m"});
    for (hours, ruby, environment, host) in [
        (20, "3.3.5", json!({}), HOSTILE),
        (9, "3.3.5", json!({}), "web-1"),
        (3, "3.4.1", json!({"RUBY_GC_HEAP_INIT_SLOTS": "10000"}), "web-1"),
        (2, "3.4.1", long, "web-1"),
    ] {
        let mut set = set(&token, ruby, &environment, &mixed);
        set[0][8] = json!(host);
        for sample in set.as_array_mut().context("a set")?.iter_mut().skip(1) {
            let ts = sample[0].as_f64().context("a time")? - 1_700_000_000.0;
            sample[0] = json!((now - hours * 3600) as f64 + ts);
        }
        let answer = collector.send(&set.to_string())?;
        ensure!(answer.code == 200, "{answer:?}");
        id = answer.text().trim().rsplit('/').next().unwrap_or_default().to_owned();
    }
    let (dir, mut browser, mut wrong) = (pictures("collector")?, Browser::start()?, Vec::new());
    let host = "compare=host&a=web-1&b=%3Cscript%3Ealert(2)%3C/script%3E";
    let environment = "compare=env&a=&b=RUBY_GC_HEAP_INIT_SLOTS%3D10000";
    for (name, path) in [
        ("list", "/".to_owned()),
        ("application", "/app/1".to_owned()),
        ("month", "/app/1?days=30".to_owned()),
        ("compared", format!("/app/1?days=7&{environment}")),
        ("unknown", format!("/app/1?days=7&{host}")),
        ("empty", "/app/2".to_owned()),
        ("advice", format!("/configs/{id}")),
    ] {
        let url = format!("http://{}{path}", collector.address);
        look(&mut browser, &dir, name, &url, &mut wrong)?;
        if name == "application" {
            let rows = browser.evaluate("document.querySelectorAll('.stacked tbody tr').length")?;
            ensure!(rows.as_u64() >= Some(3), "{rows} rows of what was advised, and its effect");
        }
        if name == "list" {
            let text = browser.evaluate("document.body.innerText")?;
            ensure!(text.as_str().is_some_and(|text| text.contains("<script>alert(1)</script>")), "{text}");
        }
    }
    nothing(&wrong)
}

/// Presses Tab until the focused element satisfies a condition, an expression about `e`.
fn tab_to(browser: &mut Browser, condition: &str) -> Result<()> {
    for _ in 0..200 {
        browser.press("Tab", 9)?;
        if browser.evaluate(&format!("(e => !!({condition}))(document.activeElement)"))? == true {
            return Ok(());
        }
    }
    anyhow::bail!("the keyboard does not reach {condition}")
}

/// Half a day of two processes, and half a day with a larger heap, in which they spend a quarter of the earlier share of time in GC.
fn a_day(collector: &Collector, token: &str) -> Result<()> {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.as_secs_f64();
    let cycle = |by, major| Cycle { by, major, old_after: 99_000 };
    let mixed = cycles(&[(cycle("newobj", None), 60), (cycle("newobj", Some("oldgen")), 8)]);
    for part in 0..96_u32 {
        let (environment, slower) = if part < 48 {
            (json!({}), 1.5)
        } else {
            (json!({"RUBY_GC_HEAP_INIT_SLOTS": "600000", "RUBY_GC_HEAP_OLDOBJECT_LIMIT_FACTOR": "3.8"}), 6.0)
        };
        // As if the load were higher at noon.
        let slower = slower * (1.0 + f64::from(part.abs_diff(48)) / 60.0);
        for pid in [4242, 4243] {
            let mut set = set(token, "3.4.7", &environment, &mixed);
            set[0][8] = json!("web-1");
            set[0][10] = json!(pid);
            for sample in set.as_array_mut().context("a set")?.iter_mut().skip(1) {
                let since = sample[0].as_f64().context("a time")? - 1_700_000_000.0;
                sample[0] = json!(now - 86_000.0 + f64::from(part) * 890.0 + since * slower);
            }
            let answer = collector.send(&set.to_string())?;
            ensure!([200, 412].contains(&answer.code), "{answer:?}");
        }
    }
    Ok(())
}

/// With the keyboard only: signs in, first with a wrong token, opens the application and then one of its processes.
#[test]
fn collector_by_keyboard() -> Result<()> {
    let live = Live::without_gctrace()?;
    let path = live.path("sets.db");
    let collector = Collector::on("0.0.0.0:0", &path, &[])?;
    let token = apps(&format!("sqlite:{}", path.display()), &["add", "shop"])?.trim().to_owned();
    a_day(&collector, &token)?;
    let (dir, mut browser, mut wrong) = (pictures("keyboard")?, Browser::start()?, Vec::new());
    let url = format!("http://127.0.0.1:{}", collector.address.port());
    look(&mut browser, &dir, "sign-in", &format!("{url}/app/1"), &mut wrong)?;
    // The page is the collector's answer to visitors who have not signed in.
    wrong.retain(|what| !what.contains(" 401 "));

    browser.load(&url, VIEWS[0])?;
    for (typed, title) in [("wrong", "Sign in"), (&token, "Applications")] {
        tab_to(&mut browser, "e.name === 'token'")?;
        browser.enter(typed)?;
        browser.follow()?;
        let there = browser.evaluate(
            "[document.querySelector('h1').textContent, document.querySelectorAll('[role=alert]').length]",
        )?;
        ensure!(there == json!([title, u8::from(typed == "wrong")]), "after {typed:?}: {there}");
    }
    tab_to(&mut browser, "e.textContent === 'shop'")?;
    browser.follow()?;
    ensure!(browser.evaluate("location.pathname")? == "/app/1");
    tab_to(&mut browser, "e.textContent === 'web-1 4243'")?;
    browser.follow()?;
    let text = browser.evaluate("document.querySelector('main').innerText")?;
    let text = text.as_str().context("a text")?;
    ensure!(text.contains("Host web-1, process 4243") && !text.contains("4242"), "{text}");
    ensure!(browser.evaluate("document.querySelectorAll('.charts svg').length")? == 4);
    let said = browser.wrong()?;
    ensure!(said.is_empty(), "{said:?}");
    let process = browser.evaluate("location.href")?;
    for (name, url) in [
        ("process", process.as_str().context("an address")?),
        ("application", &format!("{url}/app/1")),
        ("list", &url),
    ] {
        look(&mut browser, &dir, name, url, &mut wrong)?;
        ensure!(browser.evaluate("document.querySelector('[name=token]')")?.is_null(), "signed out");
    }
    nothing(&wrong)
}

/// Titles, legend and buttons of flame graphs fit windows of all widths. The note about what filters dropped is shown in full.
#[test]
fn flame_graphs() -> Result<()> {
    let live = Live::without_gctrace()?;
    let (dir, mut browser, mut wrong) = (pictures("flamegraphs")?, Browser::start()?, Vec::new());
    for (name, flags, files) in [
        ("cpu", vec![], &["3.4"][..]),
        ("filtered", vec!["--focus=Order", "--hide=sort", "--thread=-e", "--stack-lines"], &["3.1"]),
        ("gvl", vec!["--flamegraph-of=gvl-wait"], &["2.7"]),
        ("alloc", vec!["--flamegraph-of=alloc"], &["3.3"]),
        ("compared", vec![], &["3.3", "3.4"]),
    ] {
        let svg = live.path(&format!("{name}.svg"));
        let mut command = Command::new(gctrace_binary()?);
        command.args(if files.len() == 2 { &["diff"][..] } else { &["report", "-q"] });
        command.args(&flags).arg("--flamegraph").arg(&svg).args(files.iter().map(|file| golden(file)));
        let output = command.output()?;
        ensure!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
        for (view, width, dark) in [
            ("narrow", 400, false),
            ("narrow-dark", 400, true),
            ("wide", 1200, false),
            ("wide-dark", 1200, true),
        ] {
            let said = browser
                .load(&format!("file://{}", svg.display()), View { name: view, width, scale: 1, dark })?;
            // The graph is laid out after it was loaded.
            browser.evaluate("new Promise(done => setTimeout(done, 50))")?;
            browser.picture(&dir.join(format!("{name}-{view}.png")))?;
            let found = browser.evaluate(FLAME)?;
            let found = found.as_array().context("a list")?.iter().map(Value::to_string);
            wrong.extend(said.into_iter().chain(found).map(|what| format!("{name}, {view}: {what}")));
        }
        if name == "filtered" {
            let text = browser.evaluate("document.getElementById('subtitle').textContent")?;
            let whole = text
                .as_str()
                .is_some_and(|text| text.contains("dropped by --thread") && text.ends_with(" frame"));
            ensure!(whole, "{text}");
        }
    }
    nothing(&wrong)
}

/// A committed recording.
fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/recordings").join(format!("{name}.gctrace"))
}

/// A copy of a recording in which every name is hostile.
fn hostile_copy(of: &Path, to: &Path) -> Result<()> {
    let mut recording = Recording::open(of)?;
    let hostile = Hostile(Recorder::create(to, recording.header())?);
    trace_file::replay(&mut recording, &mut Outputs::new(vec![Box::new(hostile)]))?;
    Ok(())
}

/// The pages of recordings, with and without requests, under their own names and under hostile names, and of two compared recordings.
#[test]
fn recording() -> Result<()> {
    let live = Live::without_gctrace()?;
    let (hostile, hostile_puma) = (live.path("x.gctrace"), live.path("puma.gctrace"));
    hostile_copy(&golden("3.4"), &hostile)?;
    hostile_copy(&golden("puma"), &hostile_puma)?;
    let (dir, mut browser, mut wrong) = (pictures("serve")?, Browser::start()?, Vec::new());
    for (name, files) in [
        ("golden", vec![golden("3.4")]),
        ("hostile", vec![hostile]),
        ("puma", vec![golden("puma")]),
        ("hostile-puma", vec![hostile_puma]),
        ("compared", vec![golden("3.3"), golden("3.4")]),
    ] {
        let served = Served::with(Command::new(gctrace_binary()?).arg("serve").args(&files))?;
        harmless("", &served.get("")?)?;
        let url = format!("http://{}{}", served.address, served.base);
        look(&mut browser, &dir, name, &url, &mut wrong)?;
        if name.starts_with("hostile") {
            let text = browser.evaluate("document.body.textContent")?;
            let shown = text.as_str().is_some_and(|text| text.contains(&HOSTILE[..40]));
            ensure!(shown, "{text}");
        }
        if name.ends_with("puma") {
            let text = browser.evaluate("document.body.textContent")?;
            ensure!(text.as_str().is_some_and(|text| text.contains("Requests")), "{text}");
        }
        if name == "compared" {
            continue;
        }
        // Limited to allocations.
        look(&mut browser, &dir, &format!("{name}-alloc"), &format!("{url}?of=alloc"), &mut wrong)?;
        // The graph alone: it has its own script, which may run, and all kinds of names.
        for of in ["cpu", "gc", "gvl-wait", "alloc"] {
            let said = browser.load(&format!("{url}flamegraph.svg?of={of}"), VIEWS[0])?;
            wrong.extend(said.into_iter().map(|what| format!("{name}, flame graph of {of}: {what}")));
            let seen = browser.evaluate(
                "[document.querySelectorAll('script').length, document.querySelectorAll('img').length, \
                 document.querySelectorAll('#frames rect').length > 3, document.documentElement.textContent]",
            )?;
            ensure!(seen[0] == 1 && seen[1] == 0 && seen[2] == true, "{name}, {of}: {seen}");
            let shown = seen[3].as_str().is_some_and(|text| text.contains("alert(1)"));
            ensure!(shown == name.starts_with("hostile"), "{name}, {of}: {seen}");
        }
    }
    nothing(&wrong)
}

/// The time line of a page: its box, and the times of its first and its last column in seconds.
const TIMELINE: &str = r"(() => {
  const svg = document.querySelector('.timeline svg'), d = svg.dataset;
  svg.scrollIntoView({block: 'center'});
  const b = svg.getBoundingClientRect();
  return [b.left + b.width * d.left, b.left + b.width * d.right, b.top + b.height / 2, +d.from, +d.to];
})()";

/// Dragging over the time line opens the page of that part: from left to right, from right to left, and over its edges. A click does nothing.
/// The page has the same cycles that `report` has for that part.
#[test]
fn brush() -> Result<()> {
    let file = golden("3.4");
    let served = Served::with(Command::new(gctrace_binary()?).arg("serve").arg(&file))?;
    let url = format!("http://{}{}", served.address, served.base);
    let mut browser = Browser::start()?;
    for (name, from, to) in [("right", 0.5, 0.75), ("left", 0.8, 0.7), ("edges", 0.72, 1.4)] {
        let said = browser.load(&url, VIEWS[0])?;
        ensure!(said.is_empty(), "{said:?}");
        let line: Vec<f64> = serde_json::from_value(browser.evaluate(TIMELINE)?)?;
        let [left, right, y, first, last] = line[..] else { anyhow::bail!("{line:?}") };
        let x = |part: f64| left + part * (right - left);
        browser.drag((x(0.3), y), (x(0.3) + 1.0, y))?;
        ensure!(browser.evaluate("location.search")? == "", "a click leads somewhere");
        browser.drag((x(from), y), (x(to), y))?;
        browser.loaded()?;
        let part: Vec<String> = serde_json::from_value(
            browser.evaluate("['from', 'to'].map(name => new URLSearchParams(location.search).get(name))")?,
        )?;
        let pixel = (last - first) / (right - left);
        for (text, at) in part.iter().zip([from.min(to), from.max(to).min(1.0)]) {
            let seconds: f64 = text.strip_suffix('s').context("no seconds")?.parse()?;
            let wanted = first + at * (last - first);
            ensure!((seconds - wanted).abs() <= pixel, "{name}: {text}, not {wanted} s, to {pixel} s");
        }
        let mut report = Command::new(gctrace_binary()?);
        report.args(["report", "--format", "jsonl", "--from", &part[0], "--to", &part[1]]).arg(&file);
        let output = report.output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let lines = String::from_utf8(output.stdout)?;
        let cycles = lines.lines().filter(|line| line.starts_with(r#"{"type":"gc""#)).count();
        let text = browser.evaluate("document.body.innerText")?;
        let word = if cycles == 1 { "cycle" } else { "cycles" };
        let shown = text.as_str().is_some_and(|text| text.contains(&format!("{cycles} {word}, ")));
        ensure!(shown && cycles > 1 && cycles < 18, "{name}: no {cycles} {word} in {text}");
        // The part can be subdivided further.
        let line: Vec<f64> = serde_json::from_value(browser.evaluate(TIMELINE)?)?;
        ensure!(line[3] >= first && line[4] <= last + pixel && line[4] - line[3] < last - first, "{line:?}");
    }
    Ok(())
}
