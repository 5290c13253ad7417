//! Finds out which Ruby a command will run before it is started, so that its first GC cycles are seen.
//!
//! Only the command itself decides in the end; this covers the usual ways: `PATH`, `#!` lines, `env`, shells
//! and other programs that start what their arguments name, and shims of version managers, whose Rubies are in known places.
//! A Ruby that is found in vain costs only its analysis.

use std::{
    collections::BTreeSet,
    env,
    ffi::OsString,
    fs::{self, File},
    io::Read as _,
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use super::installed;

/// Maximum length of a chain of programs that start each other.
const DEPTH: usize = 8;
/// Maximum number of words examined in arguments and shell scripts.
const WORDS: usize = 64;
/// Maximum number of bytes read of a script.
const SCRIPT: u64 = 16 << 10;
/// Maximum length of a `#!` line in bytes (`BINPRM_BUF_SIZE`, include/uapi/linux/binfmts.h).
const SHEBANG: usize = 256;

/// Files with the Rubies that a command may run.
pub(super) fn images_of_command(command: &[OsString]) -> BTreeSet<PathBuf> {
    // A program whose path is not UTF-8 is found when it maps its Ruby.
    let command: Vec<String> = command.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let mut search = Search {
        path: env::var_os("PATH").unwrap_or_default(),
        libraries: env::var_os("LD_LIBRARY_PATH").unwrap_or_default(),
        found: BTreeSet::new(),
        looked: 0,
    };
    search.command(&command, DEPTH);
    search.found
}

struct Search {
    path: OsString,
    libraries: OsString,
    found: BTreeSet<PathBuf>,
    /// Number of commands examined so far.
    looked: usize,
}

impl Search {
    fn command(&mut self, command: &[String], depth: usize) {
        let Some((program, args)) = command.split_first() else { return };
        self.looked += 1;
        if depth == 0 || self.looked > WORDS {
            return;
        }
        let Some((path, mut file)) = self.find(program) else { return };
        let mut head = Vec::new();
        if file.by_ref().take(SCRIPT).read_to_end(&mut head).is_err() {
            return;
        }
        if let Some(line) = head.strip_prefix(b"#!") {
            return self.script(line, &head, &path, args, depth);
        }
        let images = installed::images_of_with(&path, &self.libraries);
        if !images.is_empty() {
            self.found.extend(images);
            return;
        }
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        if name == "env" || name == "coreutils" {
            return self.env(args, depth);
        }
        // A shell, a wrapper such as `timeout 10`, or a program unrelated to Ruby.
        for word in args.iter().flat_map(|arg| words(arg)).take(WORDS) {
            if !word.starts_with('-') && !word.contains('=') {
                self.command(&[word.to_owned()], depth - 1);
            }
        }
    }

    /// A script: its interpreter, and if that is a shell, the programs that its lines name by absolute paths.
    fn script(&mut self, line: &[u8], text: &[u8], path: &Path, args: &[String], depth: usize) {
        let line = line.split(|&byte| byte == b'\n').next().unwrap_or_default();
        let line = String::from_utf8_lossy(&line[..line.len().min(SHEBANG)]).into_owned();
        let line = line.trim();
        // The kernel passes everything after the interpreter as one argument.
        let (interpreter, argument) = line.split_once([' ', '\t']).unwrap_or((line, ""));
        let mut command = vec![interpreter.to_owned()];
        command.extend((!argument.trim().is_empty()).then(|| argument.trim().to_owned()));
        let before = self.found.len();
        command.push(path.to_string_lossy().into_owned());
        command.extend_from_slice(args);
        // As an argument of a shell, the script itself would be examined again.
        let is_shell = interpreter.ends_with("sh");
        if !is_shell {
            self.command(&command, depth - 1);
        }
        if is_shell || self.found.len() == before {
            for word in words(&String::from_utf8_lossy(text)).filter(|word| word.starts_with('/')).take(WORDS)
            {
                if word != interpreter {
                    self.command(&[word.to_owned()], depth - 1);
                }
            }
            // A shim: the Rubies that it chooses from are in known places. A wrapper: it starts another program by its name.
            let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
            self.found.extend(name.iter().flat_map(|name| installed::images_named(name, &self.libraries)));
            if is_shell && String::from_utf8_lossy(text).contains("ruby") {
                self.command(&["ruby".to_owned()], depth.min(2) - 1);
            }
        }
    }

    /// `env [OPTION…] [NAME=VALUE…] COMMAND…`.
    fn env(&mut self, args: &[String], depth: usize) {
        let mut args = args.to_vec();
        let mut at = 0;
        while let Some(arg) = args.get(at).cloned() {
            let split = arg.strip_prefix("-S").or_else(|| arg.strip_prefix("--split-string="));
            if let Some(rest) = split {
                let rest = if rest.is_empty() {
                    args.get(at + 1).cloned().unwrap_or_default()
                } else {
                    rest.to_owned()
                };
                let taken = if arg == "-S" { 2 } else { 1 };
                let end = (at + taken).min(args.len());
                args.splice(at..end, rest.split_whitespace().map(ToOwned::to_owned));
            } else if matches!(arg.as_str(), "-u" | "--unset" | "-C" | "--chdir") {
                at += 2;
            } else if arg.starts_with('-') {
                at += 1;
            } else if let Some((name, value)) = arg.split_once('=') {
                match name {
                    "PATH" => self.path = value.into(),
                    "LD_LIBRARY_PATH" => self.libraries = value.into(),
                    _ => {}
                }
                at += 1;
            } else {
                return self.command(&args[at..], depth - 1);
            }
        }
    }

    /// Resolves a program to its file, opened. Only regular, executable files qualify.
    fn find(&self, program: &str) -> Option<(PathBuf, File)> {
        if program.contains('/') {
            return open(Path::new(program));
        }
        env::split_paths(&self.path).find_map(|dir| open(&dir.join(program)))
    }
}

/// Opens a regular, executable file. Opening never blocks, not even on a FIFO.
fn open(path: &Path) -> Option<(PathBuf, File)> {
    let is_program = |data: &fs::Metadata| data.is_file() && data.mode() & 0o111 != 0;
    if !fs::metadata(path).is_ok_and(|data| is_program(&data)) {
        return None;
    }
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path).ok()?;
    file.metadata().is_ok_and(|data| is_program(&data)).then(|| (path.to_owned(), file))
}

/// The words of a shell fragment.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| c.is_whitespace() || "\"'`;|&()<>{}$".contains(c)).filter(|word| !word.is_empty())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    /// The library of this machine's Ruby, which identifies results.
    fn library() -> PathBuf {
        installed::images_of(Path::new("/usr/bin/ruby")).pop().unwrap()
    }

    fn resolve(argv: &[&str]) -> BTreeSet<PathBuf> {
        images_of_command(&argv.iter().map(OsString::from).collect::<Vec<_>>())
    }

    fn script(dir: &Path, name: &str, text: &str) -> String {
        let path = dir.join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path.to_string_lossy().into_owned()
    }

    /// A Ruby in another place: an executable without the system's library.
    fn copied(dir: &Path) -> (String, PathBuf) {
        let (bin, lib) = (dir.join("bin"), dir.join("lib"));
        fs::create_dir_all(&bin).unwrap();
        fs::create_dir_all(&lib).unwrap();
        let executable = fs::canonicalize("/usr/bin/ruby").unwrap();
        fs::copy(executable, bin.join("ruby")).unwrap();
        let library = library();
        let soname = library.file_name().unwrap().to_str().unwrap();
        let copy = lib.join(soname);
        fs::copy(&library, &copy).unwrap();
        // The soname ends before the patch release.
        symlink(&copy, lib.join(&soname[..soname.rfind('.').unwrap()])).unwrap();
        (bin.join("ruby").to_string_lossy().into_owned(), copy)
    }

    /// Programs by name and path, scripts, `env` with all its options, shells and wrappers lead to the Ruby.
    #[test]
    fn ways() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name, text: &str| script(dir.path(), name, text);
        let direct = file("direct", "#!/usr/bin/ruby -w\n");
        let by_env = file("by_env", "#!/usr/bin/env ruby\nputs 1\n");
        let split = file("split", "#!/usr/bin/env -S RUBYOPT=-w ruby -W0\n");
        let wrapper = file("wrapper", "#!/bin/sh\nexec /usr/bin/ruby \"$@\"\n");
        let by_name = file("by_name", "#!/bin/bash\nset -e\nexec ruby -S rails \"$@\"\n");
        let expected = BTreeSet::from([library()]);
        for argv in [
            &["ruby", "-e", "1"][..],
            &["/usr/bin/ruby"],
            &[&direct],
            &[&by_env],
            &[&split],
            &[&wrapper],
            &[&by_name],
            &["env", "-i", "-u", "X", "A=b", "ruby"],
            &["env", "-S", "ruby -w"],
            &["sh", "-c", "cd /tmp && exec ruby x.rb"],
            &["timeout", "-k", "1", "10", "ruby", "x.rb"],
            &["nice", "env", "ruby"],
        ] {
            assert_eq!(resolve(argv), expected, "{argv:?}");
        }
        for argv in [&["/bin/true"][..], &["no-such-program"], &[], &["sleep", "1"]] {
            assert!(resolve(argv).is_empty(), "{argv:?}");
        }
    }

    /// The library is the one that the command will load.
    #[test]
    fn elsewhere() {
        let dir = tempfile::tempdir().unwrap();
        let (ruby, copy) = copied(dir.path());
        let libraries = format!("LD_LIBRARY_PATH={}", dir.path().join("lib").display());
        let found = resolve(&["env", &libraries, &ruby, "x.rb"]);
        assert!(found.contains(&fs::canonicalize(copy).unwrap()), "{found:?}");
    }

    /// Cyclic links, scripts that are each other's interpreters, pipes and damaged files end the search.
    #[test]
    fn hostile() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        symlink(path("b"), path("a")).unwrap();
        symlink(path("a"), path("b")).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            path("pipe"),
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RWXU,
            0,
        )
        .unwrap();
        let one = format!("#!{}\n", path("two").display());
        let two = format!("#!{}\n", path("one").display());
        script(dir.path(), "one", &one);
        script(dir.path(), "two", &two);
        let many = format!("#!/bin/sh\n{}", "/bin/sh ".repeat(5000));
        script(dir.path(), "many", &many);
        let damaged = script(dir.path(), "damaged", "\x7fELF nonsense");
        for name in ["a", "pipe", "one", "many"] {
            assert!(resolve(&[&path(name).to_string_lossy()]).is_empty(), "{name}");
        }
        assert!(resolve(&[&damaged]).is_empty());
    }
}
