//! Recognises, by their command lines, the servers whose requests or jobs `--requests` finds. No I/O.

use super::Process;

/// The known programs, by the name of their script. Their process titles begin with the same name.
const KNOWN: [&str; 4] = ["puma", "unicorn", "unicorn_rails", "sidekiq"];
/// Number of words of a command line that are searched: the interpreter, `bundle exec` and the script come first.
const WORDS: usize = 4;

impl Process {
    /// The program whose requests or jobs `--requests` would find, if its command line names one.
    pub fn server(&self) -> Option<&'static str> {
        let words = self.cmdline.as_deref()?.iter();
        // Words after `-e CODE` are arguments to the code.
        words.take_while(|word| *word != "-e").take(WORDS).find_map(|word| {
            // A process title is a single word: `puma 6.4.2 (tcp://0.0.0.0:9292) [shop]`, `puma: cluster worker 0: 4711 [shop]`.
            let name = word.split([' ', ':']).next()?;
            let name = name.rsplit('/').next()?;
            KNOWN.into_iter().find(|known| *known == name)
        })
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
        let others: [&[&str]; 4] = [&[], &["ruby", "puma.rb"], &["ruby", "-e", "1", "puma"], &["puma-dev"]];
        for words in others {
            assert_eq!(server(words), None, "{words:?}");
        }
    }
}
