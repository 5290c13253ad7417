//! Documents generated from the definition of the command line: completions and the manual page.

use std::io::{self, Write as _};

use clap::{ArgGroup, Command, Id};
use clap_complete::Shell;
use clap_mangen::Man;

use super::help::command;

/// The completion script for a shell.
pub fn completions(shell: Shell) -> Vec<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut visible(&command()), "gctrace", &mut script);
    script
}

/// The same command without the hidden options, which are for tests: `clap_complete` would include them.
fn visible(command: &Command) -> Command {
    let args = || command.get_arguments().filter(|arg| arg.is_positional() || !arg.is_hide_set());
    let known: Vec<Id> = args().map(|arg| arg.get_id().clone()).collect();
    let groups = command.get_groups().map(|group| {
        let of = group.get_args().filter(|id| known.contains(id)).cloned();
        ArgGroup::new(group.get_id()).args(of).multiple(true)
    });
    // clap takes `'static` names. The process writes one script and exits, so the leak does not matter.
    let name = |text: &str| -> &'static str { Box::leak(text.to_owned().into_boxed_str()) };
    let mut shown = Command::new(name(command.get_name()))
        .args(args())
        .groups(groups)
        .disable_help_subcommand(true)
        .visible_aliases(command.get_visible_aliases().map(name).collect::<Vec<_>>())
        .subcommands(command.get_subcommands().map(visible));
    if let Some(about) = command.get_about() {
        shown = shown.about(about.clone());
    }
    if let Some(version) = command.get_version() {
        shown = shown.version(name(version));
    }
    shown
}

/// Usage lines: subcommand and its arguments.
const SYNOPSIS: [(&str, &str); 18] = [
    ("", "[SELECTION...] [OPTIONS] [-- COMMAND ARGS...]"),
    ("doctor", "[OPTIONS] [SELECTION...] [FILE...]"),
    ("top", "[SELECTION...] [OPTIONS]"),
    ("dump", "[OPTIONS] --pid PID|--all-ruby|--name NAME|--unit UNIT|--cgroup PATH|--container ID"),
    ("heap", "[OPTIONS] PID|--pid PID|--diff FILE..."),
    ("malloc", "[OPTIONS] --pid PID|--all-ruby|--name NAME|--unit UNIT|--cgroup PATH|--container ID"),
    ("record", "[SELECTION...] [OPTIONS] -o FILE [-- COMMAND ARGS...]"),
    ("report", "[OPTIONS] FILE"),
    ("diff", "[OPTIONS] A B"),
    ("serve", "[OPTIONS] [A] FILE|--live [SELECTION...] [-- COMMAND ARGS...]"),
    ("info", "[OPTIONS] FILE"),
    ("merge", "FILE FILE... -o FILE"),
    ("scrub", "[OPTIONS] FILE -o FILE"),
    ("tune", "[OPTIONS] DIR|FILE..."),
    ("collector", "[OPTIONS] --store STORE"),
    ("apps", "--store STORE list|add|tokens|token|operator|rotate|revoke|delete|prune"),
    ("completions", "SHELL"),
    ("man", ""),
];

/// The manual page gctrace(1) in roff, with the flags of the subcommands at the end.
pub fn man() -> io::Result<Vec<u8>> {
    let command = command();
    let mut page = Vec::new();
    let main = Man::new(complete(command.clone()));
    main.render_title(&mut page)?;
    main.render_name_section(&mut page)?;
    writeln!(page, ".SH SYNOPSIS")?;
    for (sub, arguments) in SYNOPSIS {
        if sub.is_empty() || command.find_subcommand(sub).is_some() {
            writeln!(page, "\\fBgctrace {sub}\\fR {}\n.br", escaped(arguments))?;
        }
    }
    main.render_description_section(&mut page)?;
    main.render_options_section(&mut page)?;
    if let Some(after) = command.get_after_long_help() {
        writeln!(page, ".SH \"EXAMPLES AND EXIT STATUS\"\n.nf")?;
        for line in after.to_string().lines() {
            writeln!(page, "{}", escaped(line))?;
        }
        writeln!(page, ".fi")?;
    }
    subcommands(&command, "gctrace", &mut page)?;
    Ok(page)
}

/// The sections of the subcommands of a command, and of theirs.
fn subcommands(command: &Command, called: &str, page: &mut Vec<u8>) -> io::Result<()> {
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set() && sub.get_name() != "help") {
        let name = format!("{called} {}", sub.get_name());
        writeln!(page, ".SH \"{}\"", name.to_uppercase())?;
        if let Some(about) = sub.get_long_about().or_else(|| sub.get_about()) {
            writeln!(page, "{}", escaped(&about.to_string()))?;
        }
        let shown = complete(sub.clone().bin_name(name.as_str()));
        if shown.get_arguments().any(|arg| !arg.is_hide_set()) {
            Man::new(shown).render_options_section(page)?;
        }
        subcommands(sub, &name, page)?;
    }
    Ok(())
}

/// The same command with the options that `-h` omits.
fn complete(command: Command) -> Command {
    command.mut_args(|arg| arg.hide_short_help(false))
}

/// Escapes text for roff: dashes are ASCII hyphen-minus, and no line is taken as a request.
fn escaped(text: &str) -> String {
    let text = text.replace('\\', "\\\\").replace('-', "\\-");
    if text.starts_with(['.', '\'']) { format!("\\&{text}") } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A command, its subcommands, and theirs.
    fn with_subcommands(command: &Command) -> Vec<&Command> {
        std::iter::once(command).chain(command.get_subcommands().flat_map(with_subcommands)).collect()
    }

    /// Every shell has a script that knows the flags.
    #[test]
    fn scripts() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let script = String::from_utf8(completions(shell)).unwrap();
            assert!(script.contains("container") && script.contains("doctor"), "{shell}");
            let top = command();
            for arg in with_subcommands(&top).into_iter().flat_map(Command::get_arguments) {
                let Some(flag) = arg.get_long() else { continue };
                assert_eq!(script.contains(flag), !arg.is_hide_set(), "{shell} --{flag}");
            }
        }
    }

    /// Every option of every command is on some page of the documentation, and those of a run are on the page of options.
    #[test]
    fn documented() {
        let docs = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
        let read = |path: &std::path::Path| std::fs::read_to_string(path).unwrap();
        let pages = std::fs::read_dir(&docs).unwrap().map(|entry| entry.unwrap().path());
        let pages = pages.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
        let all: String = pages.map(|path| read(&path)).collect();
        let of_runs = read(&docs.join("options.md"));
        let is_in = |text: &str, flag: &str| {
            let found = format!("--{flag}");
            let ends =
                |at: usize| !text[at + found.len()..].starts_with(|c: char| c.is_alphanumeric() || c == '-');
            text.match_indices(&found).any(|(at, _)| ends(at))
        };
        let top = command();
        for command in with_subcommands(&top) {
            for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
                let Some(flag) = arg.get_long().filter(|flag| !["help", "version"].contains(flag)) else {
                    continue;
                };
                let page = if command.get_name() == "gctrace" { &of_runs } else { &all };
                assert!(is_in(page, flag), "--{flag} of {}", command.get_name());
            }
        }
    }

    /// Every option that is in `--help`, of the run and of each subcommand, is on the page with its text.
    #[test]
    fn complete_page() {
        let page = String::from_utf8(man().unwrap()).unwrap();
        let page: String =
            page.replace("\\-", "-").replace("\\fB", "").replace("\\fR", "").replace("\\fI", "");
        let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        let all = words(&page);
        let top = command();
        for command in with_subcommands(&top) {
            for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
                let Some(flag) = arg.get_long() else { continue };
                assert!(all.contains(&format!("--{flag}")), "{flag} of {}", command.get_name());
                let help = arg.get_long_help().or_else(|| arg.get_help()).map(ToString::to_string);
                let help = words(&help.unwrap_or_default());
                let first: String = help.split(['\'', '`', '\\', '"']).next().unwrap_or_default().to_owned();
                assert!(
                    !first.is_empty() && all.contains(&first),
                    "{flag} of {}: {first}",
                    command.get_name()
                );
            }
        }
        for absent in ["gctrace-doctor(1)", "EXTRA"] {
            assert!(!page.contains(absent), "{absent}");
        }
        assert!(
            page.contains("GCTRACE DOCTOR")
                && page.contains("GCTRACE APPS PRUNE")
                && page.contains("[-- COMMAND ARGS...]")
        );
    }
}
