//! Recognises, by their command lines, the servers whose requests or jobs `--requests` finds. No I/O.

use super::Process;

/// The known programs, by the name of their script, with the name that they are given in messages. Their process titles begin with the same name.
const KNOWN: [(&str, &str); 5] = [
    ("puma", "puma"),
    ("unicorn", "unicorn"),
    ("unicorn_rails", "unicorn_rails"),
    ("sidekiq", "sidekiq"),
    ("sidekiqswarm", "sidekiq"),
];
/// Options of Ruby whose argument is the next word (`proc_options`, ruby.c).
const WITH_ARGUMENT: [&str; 15] = [
    "-C",
    "-I",
    "-r",
    "-E",
    "-X",
    "--encoding",
    "--external-encoding",
    "--internal-encoding",
    "--source-encoding",
    "--enable",
    "--disable",
    "--parser",
    "--dump",
    "--backtrace-limit",
    "--crash-report",
];

/// The title that a program has set, if this is one: a single word with a space, such as `puma: cluster worker 0: 17 [shop]`. Where it is shorter
/// than the arguments were, empty words follow.
pub fn title(cmdline: &[String]) -> Option<&str> {
    let (first, rest) = cmdline.split_first()?;
    let first = first.trim();
    (rest.iter().all(String::is_empty) && first.contains(' ')).then_some(first)
}

/// The script of a command line that begins with Ruby, as it is written there, and the words after it; `None` if it names none (`ruby -e CODE`),
/// or begins with something else.
pub fn script(cmdline: &[String]) -> Option<(&str, &[String])> {
    let (first, mut rest) = cmdline.split_first()?;
    if !file_name(first).starts_with("ruby") {
        return None;
    }
    while let Some((word, later)) = rest.split_first() {
        rest = match word.as_str() {
            // The program is the argument itself.
            word if word.starts_with("-e") => return None,
            word if WITH_ARGUMENT.contains(&word) => later.get(1..)?,
            word if word.starts_with('-') => later,
            word => return Some((word, later)),
        };
    }
    None
}

/// The name of the program that a command line runs: that of its script, of what Bundler runs, of the executable, or the first word of the title
/// that it has set.
pub fn named(cmdline: &[String]) -> Option<&str> {
    let first = cmdline.first()?.trim();
    if title(cmdline).is_some() || cmdline[1..].iter().all(String::is_empty) {
        // `puma 6.4.2 (tcp://0.0.0.0:9292) [shop]`, `puma: cluster worker 0: 4711 [shop]`
        return first.split([' ', ':']).next().map(file_name);
    }
    if !file_name(first).starts_with("ruby") {
        return Some(file_name(first));
    }
    let (script, words) = script(cmdline)?;
    match (file_name(script), words) {
        ("bundle" | "bundler", [exec, words @ ..]) if exec == "exec" => {
            words.iter().find(|word| !word.starts_with('-')).map(|word| file_name(word))
        }
        (name, _) => Some(name),
    }
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

impl Process {
    /// The program whose requests or jobs `--requests` would find, if its command line names one.
    pub fn server(&self) -> Option<&'static str> {
        let name = named(self.cmdline.as_deref()?)?;
        KNOWN.into_iter().find(|(known, _)| *known == name).map(|(_, server)| server)
    }

    /// Whether its command line is that of Puma: in single mode, a worker of a cluster, or the master of one.
    pub fn is_puma(&self) -> bool {
        self.server() == Some("puma")
    }

    /// Whether its command line says that it is a worker of a Puma cluster (`Cluster::Worker#run`, `lib/puma/cluster/worker.rb`). A worker that
    /// was forked while its master was traced may have its master's command line.
    pub fn is_puma_worker(&self) -> bool {
        let first = self.cmdline.as_deref().and_then(|words| words.first());
        first.is_some_and(|title| title.starts_with("puma: cluster worker"))
    }
}

#[cfg(test)]
mod tests {
    use crate::aggregate::services::tests::process;

    #[test]
    fn command_lines() {
        let server = |words: &[&str]| {
            let mut of = process(1, "shop");
            of.cmdline = Some(words.iter().map(|word| (*word).to_owned()).collect());
            of.server()
        };
        for title in
            ["puma 5.6.5 (tcp://0.0.0.0:9292) [shop]", "puma: cluster worker 0: 4711 [shop]", "/usr/bin/puma"]
        {
            assert_eq!(server(&[title]), Some("puma"), "{title}");
        }
        let mut of = process(1, "shop");
        let mut is = |title: &str| {
            of.cmdline = Some(vec![title.to_owned()]);
            (of.is_puma(), of.is_puma_worker())
        };
        assert_eq!(is("puma 5.6.5 (tcp://0.0.0.0:9292) [shop]"), (true, false));
        assert_eq!(is("puma: cluster worker 0: 4711 [shop]"), (true, true));
        assert_eq!(is("unicorn worker[0] -c x"), (false, false));
        assert_eq!(server(&["/usr/bin/ruby", "/usr/bin/unicorn", "-p", "80"]), Some("unicorn"));
        assert_eq!(server(&["unicorn_rails worker[0] -c x"]), Some("unicorn_rails"));
        assert_eq!(server(&["sidekiq 6.5.7 shop [0 of 5 busy]"]), Some("sidekiq"));
        assert_eq!(server(&["ruby", "-W0", "bin/sidekiq"]), Some("sidekiq"));
        for words in [
            &["sidekiq 6.4.1 shop [0 of 5 busy]", ""][..],
            &["ruby", "-W0", "/usr/local/bin/bundle", "exec", "sidekiq"],
            &[
                "ruby",
                "-W0",
                "--yjit",
                "-I",
                "lib",
                "-S",
                "bundle",
                "exec",
                "--keep-file-descriptors",
                "sidekiq",
            ],
            &["ruby", "bin/sidekiqswarm"],
            &["ruby", "--disable", "gems", "--enable=frozen-string-literal", "bin/sidekiq"],
        ] {
            assert_eq!(server(words), Some("sidekiq"), "{words:?}");
        }
        for words in [
            &[][..],
            &["ruby", "puma.rb"],
            &["ruby", "-e", "1", "puma"],
            &["puma-dev"],
            // What a task or a test is called, or what it is about, is not the program.
            &["ruby", "bin/rake", "sidekiq:clear"],
            &["ruby", "/usr/bin/cap", "production", "puma:restart"],
            &["ruby", "bin/rspec", "spec/sidekiq"],
            &["ruby", "worker.rb", "sidekiq"],
            &["ruby", "-r", "puma", "app.rb"],
            &["ruby", "bin/bundle", "exec", "rspec", "spec/puma"],
            &["ruby", "-I"],
            &["ruby"],
        ] {
            assert_eq!(server(words), None, "{words:?}");
        }
    }
}
