//! `gctrace serve`: a recording as a web page, and the live page of a run.

use std::{io::Write as _, process::Child};

use gctrace_serve::{Addresses, Listening, LiveOptions, LivePage};
use rustix::event::{PollFd, PollFlags, poll};

use super::{Failure, system};
use crate::{
    cli::{self, Live, ServeArgs},
    command::Program,
    console::say,
    export::Exporter,
    signals::Signals,
    sudo::User,
    trace_file::Header,
};

/// Serves until a signal ends it. Returns the exit status.
///
/// # Errors
///
/// The recording cannot be read, or the address cannot be listened on.
pub fn serve(args: &ServeArgs) -> Result<u8, Failure> {
    let options = args.options()?;
    let user = User::of_sudo().map_err(Failure::Control)?;
    gctrace_serve::run(&options, |addresses| ready(addresses, args.open, user))?;
    Ok(0)
}

/// Prints the address of the page, and opens it if requested.
fn ready(addresses: &Addresses, open: bool, user: Option<User>) {
    print(addresses);
    say("gctrace: serving the recording to users of this host who know the full address; Ctrl-C ends it");
    if !open {
        return;
    }
    if let Some(mut child) = browser(addresses, user) {
        // The program that opens it ends soon; nothing depends on when.
        drop(std::thread::spawn(move || {
            if let Ok(status) = child.wait()
                && !status.success()
            {
                say(&format!("gctrace: xdg-open failed ({status}); open the address above"));
            }
        }));
    }
}

fn print(addresses: &Addresses) {
    let mut out = std::io::stdout().lock();
    if let Err(error) = writeln!(out, "{}", addresses.page).and_then(|()| out.flush()) {
        say(&format!("gctrace: writing the address of the page to standard output: {error}"));
    }
}

/// Starts a browser.
fn browser(addresses: &Addresses, user: Option<User>) -> Option<Child> {
    let argv = vec!["xdg-open".into(), addresses.once.clone().into()];
    // The browser keeps running and may write to standard output.
    let started = Program { argv, user, data_on_stdout: true }.start();
    started
        .inspect_err(|error| {
            say(&format!("gctrace: starting xdg-open: {error}; open the address that is printed"));
        })
        .ok()
}

/// The page of a run, before and during the run.
pub(super) struct Page {
    listening: Option<Listening>,
    /// The page once it is served.
    served: Option<LivePage>,
    addresses: Addresses,
    browser: Option<Child>,
}

impl Page {
    /// Listens, and starts a browser, which waits for a response. The privileges that this needs are dropped before tracing starts.
    pub(super) fn listen(live: &Live, user: Option<User>) -> Result<Self, Failure> {
        let listening = Listening::new(live.listen)?;
        let addresses = listening.addresses();
        let browser = if live.open { browser(&addresses, user) } else { None };
        Ok(Self { listening: Some(listening), served: None, addresses, browser })
    }

    /// Starts to respond. Returns the exporters of the run that fill the page.
    pub(super) fn start(&mut self, live: &Live, header: Header) -> Result<Vec<Box<dyn Exporter>>, Failure> {
        let &Live { keep_ns, keep_bytes, .. } = live;
        let Some(listening) = self.listening.take() else { return Ok(Vec::new()) };
        let mut page = listening.live(LiveOptions { header, keep_ns, keep_bytes, choose: cli::choose })?;
        let mut exporters = page.exporters();
        exporters.push(Box::new(Announcer(self.addresses.clone())));
        self.served = Some(page);
        Ok(exporters)
    }

    /// The run is over; keeps serving its page until the user ends it.
    pub(super) fn stay(mut self, signals: &Signals) -> Result<(), Failure> {
        if signals.ended_by().is_some() {
            return Ok(());
        }
        self.look_after();
        say("gctrace: tracing has ended; the page shows what was kept, until Ctrl-C");
        let end = signals.end_fd();
        loop {
            match poll(&mut [PollFd::from_borrowed_fd(end, PollFlags::IN)], None) {
                Err(rustix::io::Errno::INTR) => {}
                Ok(_) => return Ok(()),
                Err(error) => return Err(system("waiting for the end")(error.into())),
            }
        }
    }

    /// Reports if the browser failed.
    fn look_after(&mut self) {
        let ended = self.browser.as_mut().and_then(|child| child.try_wait().ok().flatten());
        if let Some(status) = ended {
            self.browser = None;
            if !status.success() {
                say(&format!("gctrace: xdg-open failed ({status}); open the address that is printed"));
            }
        }
    }
}

/// Prints the address of the page when there is something to see.
struct Announcer(Addresses);

impl Exporter for Announcer {
    fn began(&mut self, _ts_ns: u64) {
        print(&self.0);
        say("gctrace: serving what is traced to users of this host who know the full address");
    }
}
