//! `gctrace serve`: a recording as a web page.

use std::io::Write as _;

use gctrace_serve::Addresses;

use super::Failure;
use crate::{cli::ServeArgs, command::Program, console::say, sudo::User};

/// Serves until a signal ends it. Returns the exit status.
///
/// # Errors
///
/// The recording cannot be read, or the address cannot be listened on.
pub fn serve(args: &ServeArgs) -> Result<u8, Failure> {
    let user = User::of_sudo().map_err(Failure::Control)?;
    gctrace_serve::run(&args.options(), |addresses| ready(addresses, args.open, user))?;
    Ok(0)
}

/// Says where the page is, and opens it if that is wanted.
fn ready(Addresses { page, once }: &Addresses, open: bool, user: Option<User>) {
    let mut out = std::io::stdout().lock();
    if let Err(error) = writeln!(out, "{page}").and_then(|()| out.flush()) {
        say(&format!("gctrace: writing the address of the page to standard output: {error}"));
    }
    say("gctrace: serving the recording to users of this host who have its whole address; Ctrl-C ends it");
    if !open {
        return;
    }
    // A browser keeps running and may write to standard output.
    let program = Program { argv: vec!["xdg-open".to_owned(), once.clone()], user, data_on_stdout: true };
    match program.start() {
        // Whoever opened it is gone soon; nothing depends on when.
        Ok(mut child) => drop(std::thread::spawn(move || {
            if let Ok(status) = child.wait()
                && !status.success()
            {
                say(&format!("gctrace: xdg-open failed ({status}); open the address above"));
            }
        })),
        Err(error) => say(&format!("gctrace: starting xdg-open: {error}; open the address above")),
    }
}
