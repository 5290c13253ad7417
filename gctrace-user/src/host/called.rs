//! Program names: those by which processes are selected, and those of known servers and job runners.

use std::{fs, path::Path};

use super::{environ, origin, proc::is_running, proc_root};
use crate::{model::server, ruby::RubyVersion};

/// `TASK_COMM_LEN` without the terminating zero (include/linux/sched.h).
const COMM: usize = 15;

/// Whether a process currently has one of these names; `None` if that cannot be read: it is ending.
pub fn is_any(pid: u32, names: &[String]) -> Option<bool> {
    let stat = proc_root::process(pid).and_then(|process| process.stat()).ok()?;
    let cmdline = proc_root::cmdline(pid).unwrap_or_default();
    let is = names.iter().any(|name| is(name, &stat.comm, &cmdline))
        || executable(pid).is_some_and(|file| names.contains(&file));
    (is || is_running(pid)).then_some(is)
}

/// The name of the executable file of a process, whatever link or title it was started by.
fn executable(pid: u32) -> Option<String> {
    let path = fs::read_link(proc_root::path(pid, "exe")).ok()?;
    let name = path.file_name()?.to_str()?;
    Some(name.strip_suffix(" (deleted)").unwrap_or(name).to_owned())
}

/// Whether a program has this name: as the name of its main thread (which the kernel truncates to 15 characters), as its
/// first argument, as its script with or without `.rb`, or as the first word of a title that it has set.
fn is(name: &str, comm: &str, cmdline: &[String]) -> bool {
    let cut = comm.len() == COMM && name.as_bytes().get(..COMM) == Some(comm.as_bytes());
    let executable = cmdline.first().and_then(|first| Path::new(first).file_name()?.to_str());
    let script = origin::program(comm, cmdline);
    cut || comm == name
        || executable == Some(name)
        || script == name
        || script.strip_suffix(".rb") == Some(name)
}

/// Programs that run Sidekiq jobs.
const SIDEKIQ: [&str; 2] = ["sidekiq", "sidekiqswarm"];
/// Maximum number of words of a command line that are searched for the name of a task: `ruby -W0 /usr/bin/bundle exec rake resque:work`.
const WORDS: usize = 6;
/// Programs, and tasks of Rake, whose requests or jobs gctrace cannot trace: their name, and a description of what is not traced.
const UNSEEN: [(&str, &str); 8] = [
    ("falcon", "requests to Falcon"),
    ("resque:work", "jobs of Resque"),
    ("resque", "jobs of Resque"),
    ("good_job", "jobs of Good Job"),
    ("delayed_job", "jobs of Delayed Job"),
    ("jobs:work", "jobs of Delayed Job"),
    ("solid_queue:start", "jobs of Solid Queue"),
    ("solid-queue", "jobs of Solid Queue"),
];

/// Whether a process is a Sidekiq by the title that it has set, or is about to become one by its command line.
pub fn is_sidekiq(pid: u32) -> bool {
    proc_root::cmdline(pid).is_ok_and(|cmdline| names_sidekiq(&cmdline))
}

/// The untraceable work of a process, from its title or its command line: `requests to Falcon`.
pub fn unseen_work(pid: u32) -> Option<&'static str> {
    names_unseen(&proc_root::cmdline(pid).ok()?)
}

fn names_unseen(cmdline: &[String]) -> Option<&'static str> {
    let known = |word: &str| UNSEEN.into_iter().find(|(name, _)| *name == word).map(|(_, work)| work);
    // `resque-2.4.0: Waiting for default`, `solid-queue-worker(1.1.0): waiting for jobs`
    let title = cmdline.first()?;
    let titled = UNSEEN.into_iter().find(|(name, _)| {
        title.strip_prefix(name).is_some_and(|rest| rest.starts_with(['-', ' ']) && rest.contains(' '))
    });
    let task = || cmdline.iter().take(WORDS).filter(|word| word.contains(':')).find_map(|word| known(word));
    titled.map(|(_, work)| work).or_else(|| known(server::named(cmdline)?)).or_else(task)
}

fn names_sidekiq(cmdline: &[String]) -> bool {
    server::named(cmdline).is_some_and(|name| SIDEKIQ.contains(&name))
}

/// Whether the environment of a Ruby makes threads of its main Ractor give up their native thread while they wait, from 3.3 on: as
/// `Init_native_thread` decides (`thread_pthread.c`), by `atoi`. Threads of other Ractors always do, but whether a program has any is unknown
/// here. `version`: `None` if it is unknown.
pub fn shares_native_threads(version: Option<RubyVersion>, environ: &[u8]) -> bool {
    let set = environ.split(|&byte| byte == 0).find_map(|entry| entry.strip_prefix(b"RUBY_MN_THREADS="));
    let number = set.map(|value| {
        let value = value.trim_ascii_start();
        let value = value.strip_prefix(b"+").unwrap_or(value);
        let digits = value.iter().take_while(|byte| byte.is_ascii_digit());
        digits.copied().any(|digit| digit != b'0')
    });
    version.is_none_or(|version| version >= RubyVersion::new(3, 3, 0)) && number == Some(true)
}

/// [`shares_native_threads`] of a process that maps these files. Its version is in the name of a libruby (`libruby-3.1.so.3.1`, `libruby.so.3.4`).
/// An environment that a title has overwritten shows nothing.
pub fn has_mn_threads<'a>(pid: u32, mut mapped: impl Iterator<Item = &'a Path>) -> bool {
    let version = mapped.find_map(|path| version_of(path.file_name()?.to_str()?));
    environ::read(pid).is_some_and(|environ| shares_native_threads(version, &environ))
}

/// The version in the name of a libruby.
fn version_of(name: &str) -> Option<RubyVersion> {
    let (_, numbers) = name.strip_prefix("libruby")?.split_once(".so.")?;
    let mut numbers = numbers.split('.');
    Some(RubyVersion::new(numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?, 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By title, script or the words of Bundler; names that only start the same way do not count.
    #[test]
    fn sidekiq() {
        let is =
            |words: &[&str]| names_sidekiq(&words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>());
        for words in [
            &["sidekiq 6.4.1 shop [0 of 5 busy]", ""][..],
            &["sidekiq 7.3.2  [0 of 5 busy]"],
            &["/usr/bin/ruby", "/usr/bin/sidekiq", "-r", "./app.rb"],
            &["ruby", "-W0", "/usr/local/bin/bundle", "exec", "sidekiq"],
            &["ruby", "bin/sidekiqswarm"],
        ] {
            assert!(is(words), "{words:?}");
        }
        for words in [
            &["ruby", "sidekiq.rb"][..],
            &["puma: cluster sidekiq"],
            &["sidekiqmon"],
            &["ruby", "bin/rspec", "spec/sidekiq"],
            &[],
        ] {
            assert!(!is(words), "{words:?}");
        }
    }

    /// By title, script or task; names that only look similar do not count.
    #[test]
    fn unseen() {
        let work =
            |words: &[&str]| names_unseen(&words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>());
        for (words, expected) in [
            (&["ruby", "/usr/local/bin/falcon", "serve"][..], Some("requests to Falcon")),
            (&["resque-2.4.0: Waiting for default"], Some("jobs of Resque")),
            (&["ruby", "/usr/bin/rake", "resque:work"], Some("jobs of Resque")),
            (&["solid-queue-worker(1.1.0): waiting for jobs"], Some("jobs of Solid Queue")),
            (&["ruby", "bin/delayed_job", "run"], Some("jobs of Delayed Job")),
            (&["ruby", "-W0", "/usr/bin/bundle", "exec", "good_job", "start"], Some("jobs of Good Job")),
            (&["ruby", "bin/rspec", "spec/resque"], None),
            (&["ruby", "falconry.rb"], None),
            (&["resque-scheduler"], None),
            (&["ruby", "-e", "puts 1"], None),
            (&[], None),
        ] {
            assert_eq!(work(words), expected, "{words:?}");
        }
    }

    /// A program that was started by a link has the name of its file, too.
    #[test]
    fn linked() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("called-so");
        let sleep = fs::canonicalize("/bin/sleep").unwrap();
        std::os::unix::fs::symlink(&sleep, &link).unwrap();
        let mut child = std::process::Command::new(&link).arg("60").spawn().unwrap();
        let file = sleep.file_name().unwrap().to_str().unwrap().to_owned();
        for (name, matches) in [("called-so".to_owned(), true), (file, true), ("60".to_owned(), false)] {
            assert_eq!(is_any(child.id(), std::slice::from_ref(&name)), Some(matches), "{name}");
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Scripts, titles, executables and names of threads match; parts of them do not.
    #[test]
    fn names() {
        let words = |line: &str| line.split(' ').map(ToOwned::to_owned).collect::<Vec<_>>();
        let script = words("/usr/bin/ruby3.1 -I lib /srv/bin/worker.rb puma");
        for name in ["ruby", "ruby3.1", "worker.rb", "worker"] {
            assert!(is(name, "ruby", &script), "{name}");
        }
        for name in ["puma", "work", "rub", "", "/srv/bin/worker.rb"] {
            assert!(!is(name, "ruby", &script), "{name}");
        }
        let title = ["puma: cluster worker 0: 17 [shop]".to_owned()];
        assert!(is("puma", "ruby", &title) && !is("shop", "ruby", &title));
        assert!(is("a-very-long-program", "a-very-long-pro", &[]));
        assert!(!is("a-very-long-pr", "a-very-long-pro", &[]));
    }

    /// The variable is parsed as Ruby does it.
    #[test]
    fn native_threads() {
        let of = |minor, environ: &str| {
            shares_native_threads(Some(RubyVersion::new(3, minor, 0)), environ.replace(' ', "\0").as_bytes())
        };
        for set in ["A=1 RUBY_MN_THREADS=1 ", "RUBY_MN_THREADS=+2x ", "RUBY_MN_THREADS=01 "] {
            assert!(of(3, set) && of(4, set) && !of(2, set), "{set}");
        }
        for not in [
            "",
            "A=1 ",
            "RUBY_MN_THREADS= ",
            "RUBY_MN_THREADS=0 ",
            "RUBY_MN_THREADS=no1 ",
            "XRUBY_MN_THREADS=1 ",
        ] {
            assert!(!of(3, not), "{not}");
        }
    }

    /// The version of a libruby is in its name.
    #[test]
    fn versions() {
        for (name, expected) in [
            ("libruby-3.1.so.3.1", Some((3, 1))),
            ("libruby.so.3.4", Some((3, 4))),
            ("libruby.so.4.0", Some((4, 0))),
            ("libruby-2.7.so.2.7", Some((2, 7))),
            ("libruby.so", None),
            ("ruby", None),
            ("librubygems.so", None),
        ] {
            assert_eq!(
                version_of(name),
                expected.map(|(major, minor)| RubyVersion::new(major, minor, 0)),
                "{name}"
            );
        }
    }
}
