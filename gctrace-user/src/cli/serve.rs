//! `gctrace serve`: flags, and how requests for a part are understood: as `gctrace report` understands its flags.

use std::{net::SocketAddr, path::PathBuf};

use clap::Args as ClapArgs;
use gctrace_serve::{Asked, Options};

use super::{parse, record::part};
use crate::{export::window::Window, trace_file::Header};

/// Flags of `gctrace serve`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "Examples:\n  \
        gctrace serve puma.gctrace                          prints the address of the page\n  \
        gctrace serve puma.gctrace --open                   and opens it in a browser\n  \
        ssh -L 8080:127.0.0.1:8080 host gctrace serve puma.gctrace --listen 127.0.0.1:8080\n  \
        \x20                                                   a recording on another host\n\n\
        Exit status: 0 ended by SIGINT or SIGTERM, 2 error or bad usage. A damaged recording is shown up to the damage.\n\
        No privilege is needed. The address has a secret in it; only this host is listened to.")]
pub struct ServeArgs {
    /// The recording, written by `gctrace record` or --record
    #[arg(value_name = "FILE")]
    pub file: PathBuf,

    /// Address of this host and port to listen on [default: 127.0.0.1 and a free port]
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:0", hide_default_value = true)]
    pub listen: SocketAddr,

    /// Open the page in a browser, too (xdg-open)
    #[arg(long)]
    pub open: bool,
}

impl ServeArgs {
    /// What the server is to do.
    pub fn options(&self) -> Options {
        Options { file: self.file.clone(), listen: self.listen, choose }
    }
}

/// The part of a recording that a request asks for.
fn choose(header: &Header, asked: &Asked) -> Result<Window, String> {
    let moment = |name: &str, text: &Option<String>| {
        let moment = text.as_deref().map(parse::moment).transpose();
        moment.map_err(|why| format!("{name}={}: {why}", text.as_deref().unwrap_or_default()))
    };
    let (from, to) = (moment("from", &asked.from)?, moment("to", &asked.to)?);
    let pids = asked.pids.iter().map(|text| parse::pids(text).map_err(|why| format!("pid={text}: {why}")));
    let pids: Vec<_> = pids.collect::<Result<_, _>>()?;
    part(header, from, to, &pids).map_err(|error| error.to_string())
}
