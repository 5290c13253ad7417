//! What is made from the definition of the command line: completions and the manual page.

use std::io;

use clap::{Command, CommandFactory as _};
use clap_complete::Shell;
use clap_mangen::Man;

use super::Args;

/// The completion script for a shell.
pub fn completions(shell: Shell) -> Vec<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Args::command(), "gctrace", &mut script);
    script
}

/// The manual page, in roff: gctrace(1), with its subcommands' flags at the end.
pub fn man() -> io::Result<Vec<u8>> {
    let command = Args::command();
    let mut page = Vec::new();
    Man::new(command.clone()).render(&mut page)?;
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        let name = format!("gctrace {}", sub.get_name());
        let sub: Command = sub.clone().bin_name(name.clone());
        page.extend(format!(".SH \"{}\"\n", name.to_uppercase()).into_bytes());
        let part = Man::new(sub);
        part.render_description_section(&mut page)?;
        part.render_options_section(&mut page)?;
    }
    Ok(page)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every shell has a script that knows the flags, and the page has those of the run and of the subcommands.
    #[test]
    fn made() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let script = String::from_utf8(completions(shell)).unwrap();
            assert!(script.contains("container") && script.contains("doctor"), "{shell}");
        }
        let page = String::from_utf8(man().unwrap()).unwrap();
        for word in ["container", "all\\-ruby", "GCTRACE DOCTOR", "GCTRACE COLLECTOR"] {
            assert!(page.contains(word), "{word}");
        }
    }
}
