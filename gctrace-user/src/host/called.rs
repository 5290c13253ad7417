//! The names by which a program is selected.

use std::path::Path;

use super::{origin, proc_root};

/// `TASK_COMM_LEN` without the terminating zero (include/linux/sched.h).
const COMM: usize = 15;

/// Whether a process has one of these names at this moment.
pub fn is_any(pid: u32, names: &[String]) -> bool {
    let Ok(process) = proc_root::process(pid) else { return false };
    let Ok(stat) = process.stat() else { return false };
    let cmdline = proc_root::cmdline(pid).unwrap_or_default();
    names.iter().any(|name| is(name, &stat.comm, &cmdline))
}

/// Whether a program is called so: by the name of its main thread (which the kernel cuts off at 15 characters), by its
/// executable, by its script with or without `.rb`, or by the first word of a title that it has set.
fn is(name: &str, comm: &str, cmdline: &[String]) -> bool {
    let cut = comm.len() == COMM && name.as_bytes().get(..COMM) == Some(comm.as_bytes());
    let executable = cmdline.first().and_then(|first| Path::new(first).file_name()?.to_str());
    let script = origin::program(comm, cmdline);
    cut || comm == name
        || executable == Some(name)
        || script == name
        || script.strip_suffix(".rb") == Some(name)
}

/// Programs that run Sidekiq's jobs.
const SIDEKIQ: [&str; 2] = ["sidekiq", "sidekiqswarm"];
/// How many words of a command line are looked at for one of them: `ruby -W0 /usr/bin/bundle exec sidekiq`.
const WORDS: usize = 6;
/// Programs that serve requests or run jobs in a way that gctrace does not see: what they are called, and in words what is not seen.
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

/// Whether a process is a Sidekiq by the title that it sets, or is about to be one by its command line.
pub fn is_sidekiq(pid: u32) -> bool {
    proc_root::cmdline(pid).is_ok_and(|cmdline| names_sidekiq(&cmdline))
}

/// What a process does that is not seen, by its title or its command line: `requests to Falcon`.
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
    titled.map(|(_, work)| work).or_else(|| cmdline.iter().take(WORDS).find_map(|word| known(name(word)?)))
}

/// The name of the file that a word of a command line is the path of.
fn name(word: &str) -> Option<&str> {
    Path::new(word).file_name()?.to_str()
}

fn names_sidekiq(cmdline: &[String]) -> bool {
    let is_one = |word: &str| name(word).is_some_and(|name| SIDEKIQ.contains(&name));
    let title = cmdline.first().and_then(|first| first.split([' ', ':']).next());
    title.is_some_and(is_one) || cmdline.iter().take(WORDS).any(|word| is_one(word))
}

/// Whether Ruby threads of a process may change from one native thread to another (`RUBY_MN_THREADS`, from Ruby 3.3 on).
pub fn has_mn_threads(pid: u32) -> bool {
    let environ = proc_root::process(pid).and_then(|process| process.environ());
    let value = |environ: std::collections::HashMap<std::ffi::OsString, std::ffi::OsString>| {
        environ.get(std::ffi::OsStr::new("RUBY_MN_THREADS")).is_some_and(|value| value != "0")
    };
    environ.is_ok_and(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By title, script or the words of Bundler; names that only begin so are others.
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
        for words in [&["ruby", "sidekiq.rb"][..], &["puma: cluster sidekiq"], &["sidekiqmon"], &[]] {
            assert!(!is(words), "{words:?}");
        }
    }

    /// By title, script or task; what only sounds so is nothing.
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
            (&["ruby", "falconry.rb"], None),
            (&["resque-scheduler"], None),
            (&["ruby", "-e", "puts 1"], None),
            (&[], None),
        ] {
            assert_eq!(work(words), expected, "{words:?}");
        }
    }

    /// Scripts, titles, executables and names of threads; parts of them do not count.
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
}
