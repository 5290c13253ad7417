//! Headless Chromium, driven by the `DevTools` protocol over two pipes: JSON messages, each followed by a zero byte.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::PATIENCE;

/// How a page is displayed.
#[derive(Clone, Copy, Debug)]
pub struct View {
    /// Used in the names of its screenshots.
    pub name: &'static str,
    /// Width of the window, CSS pixels.
    pub width: u32,
    /// Device pixels per CSS pixel. Zooming in raises this, in a window of correspondingly fewer CSS pixels.
    pub scale: u32,
    /// Whether the reader prefers dark colours.
    pub dark: bool,
}

/// A running Chromium with one page. Dropping it kills it.
#[derive(Debug)]
pub struct Browser {
    process: Child,
    to: ChildStdin,
    from: Receiver<Value>,
    asked: u64,
    session: Option<String>,
    events: Vec<Value>,
    _profile: TempDir,
}

impl Browser {
    /// Starts Chromium. It connects only to the servers that it is sent to.
    pub fn start() -> Result<Self> {
        let profile = tempfile::tempdir()?;
        // Chromium reads from descriptor 3 and writes to descriptor 4.
        let mut command = Command::new("sh");
        command.args(["-c", r#"exec chromium "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1"#, "sh"]);
        command.args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]);
        command.args(["--disable-background-networking", "--disable-component-update", "--disable-sync"]);
        command.args(["--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe"]);
        command.arg(format!("--user-data-dir={}", profile.path().display()));
        // Chromium leaves a socket here, which it does not remove when it is killed.
        command.env("TMPDIR", profile.path());
        let mut process =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("cannot start sh")?;
        let to = process.stdin.take().context("no input")?;
        let output = process.stdout.take().context("no output")?;
        let (send, from) = channel();
        std::thread::spawn(move || {
            for message in BufReader::new(output).split(0).map_while(Result::ok) {
                let Ok(value) = serde_json::from_slice(&message) else { break };
                if send.send(value).is_err() {
                    break;
                }
            }
        });
        let events = Vec::new();
        let mut browser = Self { process, to, from, asked: 0, session: None, events, _profile: profile };
        let target = browser.call("Target.createTarget", &json!({"url": "about:blank"})).context(
            "Chromium does not run: is the package chromium installed? `cargo xtask test` does it",
        )?;
        let attach = json!({"targetId": target["targetId"], "flatten": true});
        let session = browser.call("Target.attachToTarget", &attach)?;
        browser.session = Some(session["sessionId"].as_str().context("a session")?.to_owned());
        for domain in ["Page", "Runtime", "Log", "Network"] {
            browser.call(&format!("{domain}.enable"), &json!({}))?;
        }
        Ok(browser)
    }

    /// Calls a method of the protocol.
    pub fn call(&mut self, method: &str, params: &Value) -> Result<Value> {
        self.asked += 1;
        let mut message = json!({"id": self.asked, "method": method, "params": params});
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        let mut bytes = serde_json::to_vec(&message)?;
        bytes.push(0);
        self.to.write_all(&bytes).and_then(|()| self.to.flush()).context("Chromium has ended")?;
        loop {
            let answer = self.next().with_context(|| format!("no answer to {method}"))?;
            if answer["id"] == self.asked {
                ensure!(answer["error"].is_null(), "{method}: {}", answer["error"]);
                return Ok(answer["result"].clone());
            }
        }
    }

    /// The next message. Events are kept.
    fn next(&mut self) -> Result<Value> {
        let message = self.from.recv_timeout(PATIENCE).context("Chromium says nothing")?;
        if message["method"].is_string() {
            self.events.push(message.clone());
        }
        Ok(message)
    }

    /// Drags the mouse from one position to another, in CSS pixels of the window.
    pub fn drag(&mut self, from: (f64, f64), to: (f64, f64)) -> Result<()> {
        self.events.clear();
        let between = (f64::midpoint(from.0, to.0), f64::midpoint(from.1, to.1));
        for (kind, (x, y), buttons) in [
            ("mouseMoved", from, 0),
            ("mousePressed", from, 1),
            ("mouseMoved", between, 1),
            ("mouseMoved", to, 1),
            ("mouseReleased", to, 0),
        ] {
            let button = if kind == "mouseMoved" && buttons == 0 { "none" } else { "left" };
            let params =
                json!({"type": kind, "x": x, "y": y, "button": button, "buttons": buttons, "clickCount": 1});
            self.call("Input.dispatchMouseEvent", &params)?;
        }
        Ok(())
    }

    /// Waits until the next page is loaded.
    pub fn loaded(&mut self) -> Result<()> {
        let since = Instant::now();
        while !self.events.iter().any(|event| event["method"] == "Page.loadEventFired") {
            ensure!(since.elapsed() < PATIENCE, "no page is loaded");
            self.next()?;
        }
        Ok(())
    }

    /// Loads a page and everything that it needs. Returns its problems: console messages (including violations of the
    /// content security policy), exceptions, dialogs and failed requests.
    pub fn load(&mut self, url: &str, view: View) -> Result<Vec<String>> {
        let View { width, scale, dark, .. } = view;
        let metrics = json!({"width": width, "height": 1000, "deviceScaleFactor": scale, "mobile": false});
        self.call("Emulation.setDeviceMetricsOverride", &metrics)?;
        let scheme = if dark { "dark" } else { "light" };
        let features = json!([{"name": "prefers-color-scheme", "value": scheme}]);
        self.call("Emulation.setEmulatedMedia", &json!({"features": features}))?;
        self.events.clear();
        let answer = self.call("Page.navigate", &json!({"url": url}))?;
        ensure!(answer["errorText"].is_null(), "{url}: {}", answer["errorText"]);
        let since = Instant::now();
        while !self.events.iter().any(|event| event["method"] == "Page.loadEventFired") {
            if self.events.iter().any(|event| event["method"] == "Page.javascriptDialogOpening") {
                break;
            }
            ensure!(since.elapsed() < PATIENCE, "{url} is not loaded");
            self.next()?;
        }
        self.wrong()
    }

    /// The problems since the page was loaded.
    pub fn wrong(&mut self) -> Result<Vec<String>> {
        // Events sent before this answer have been read once the answer is here.
        self.call("Page.getNavigationHistory", &json!({}))?;
        let mut wrong = Vec::new();
        for event in &self.events {
            let params = &event["params"];
            match event["method"].as_str().unwrap_or_default() {
                // Chromium recommends a user name field beside each password field; the page has none.
                "Log.entryAdded" if params["entry"]["source"] == "recommendation" => {}
                "Log.entryAdded" => wrong.push(format!("{}", params["entry"])),
                name @ ("Runtime.consoleAPICalled"
                | "Runtime.exceptionThrown"
                | "Page.javascriptDialogOpening"
                | "Network.loadingFailed") => wrong.push(format!("{name} {params}")),
                "Network.responseReceived" if params["response"]["status"].as_u64() >= Some(400) => {
                    wrong.push(format!("{} {}", params["response"]["status"], params["response"]["url"]));
                }
                _ => {}
            }
        }
        Ok(wrong)
    }

    /// The value of an expression in the page.
    pub fn evaluate(&mut self, expression: &str) -> Result<Value> {
        let params = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let answer = self.call("Runtime.evaluate", &params)?;
        ensure!(answer["exceptionDetails"].is_null(), "{expression}: {}", answer["exceptionDetails"]);
        Ok(answer["result"]["value"].clone())
    }

    /// Presses a key.
    pub fn press(&mut self, key: &str, code: u32) -> Result<()> {
        for kind in ["rawKeyDown", "keyUp"] {
            let params = json!({"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code});
            self.call("Input.dispatchKeyEvent", &params)?;
        }
        Ok(())
    }

    /// Types a text, key by key; a line feed is the Enter key.
    pub fn enter(&mut self, text: &str) -> Result<()> {
        for letter in text.chars() {
            let (key, text, code) = match letter {
                '\n' => ("Enter".to_owned(), "\r".to_owned(), 13),
                letter => (letter.to_string(), letter.to_string(), letter.to_ascii_uppercase() as u32),
            };
            for kind in ["keyDown", "keyUp"] {
                let mut params = json!({"type": kind, "key": key, "windowsVirtualKeyCode": code});
                if kind == "keyDown" {
                    params["text"] = json!(text);
                }
                self.call("Input.dispatchKeyEvent", &params)?;
            }
        }
        Ok(())
    }

    /// Presses Enter on the focused element and waits for the page that it leads to.
    pub fn follow(&mut self) -> Result<()> {
        self.events.clear();
        self.enter("\n")?;
        self.loaded()
    }

    /// Writes a screenshot of the whole page to a PNG file.
    pub fn picture(&mut self, to: &Path) -> Result<()> {
        let size = self.call("Page.getLayoutMetrics", &json!({}))?["cssContentSize"].clone();
        let clip = json!({"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1});
        let params = json!({"format": "png", "captureBeyondViewport": true, "clip": clip});
        let answer = self.call("Page.captureScreenshot", &params)?;
        let bytes = from_base64(answer["data"].as_str().context("a picture")?)?;
        std::fs::write(to, bytes).with_context(|| format!("cannot write {}", to.display()))
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Its other processes end with it. It may already have ended by itself.
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

fn from_base64(text: &str) -> Result<Vec<u8>> {
    let (mut bytes, mut bits, mut held) = (Vec::new(), 0_u32, 0);
    for byte in text.bytes().filter(|byte| *byte != b'=') {
        let six = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => bail!("{byte} is not base64"),
        };
        bits = bits << 6 | u32::from(six);
        held += 6;
        if held >= 8 {
            held -= 8;
            bytes.push((bits >> held & 0xff) as u8);
        }
    }
    Ok(bytes)
}
