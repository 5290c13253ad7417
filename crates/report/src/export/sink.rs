//! The destination of lines: standard output, or the file of `--output`.

use std::{
    fs::File,
    io::{self, Write},
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{
    ExportError, Exporter, file,
    file::{Named, note_begun, note_whole},
};
use crate::{console, ledger::Ledger};

/// Writing lines to a file failed.
#[derive(Debug, thiserror::Error)]
#[error("writing {}: {error}", path.display())]
struct FileError {
    path: PathBuf,
    error: io::Error,
}

/// Describes a failed write, with the destination.
pub(super) fn failed(error: &io::Error) -> String {
    match error.get_ref() {
        Some(inner) if inner.is::<FileError>() => inner.to_string(),
        _ => format!("writing to standard output: {error}"),
    }
}

/// A destination of lines whose reader has closed it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Closed {
    Stdout,
    Pipe(PathBuf),
}

impl Closed {
    pub(super) fn by(error: &io::Error) -> Option<Self> {
        let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<FileError>());
        let closed = || inner.map_or(Self::Stdout, |inner| Self::Pipe(inner.path.clone()));
        (error.kind() == io::ErrorKind::BrokenPipe).then(closed)
    }
}

impl std::fmt::Display for Closed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Stdout => f.write_str("standard output"),
            Self::Pipe(path) => write!(f, "{}", path.display()),
        }
    }
}

/// A stream of lines. Unlike other outputs, it is not written as a whole at the end: lines appear as things happen,
/// and each write consists of whole lines.
#[derive(Clone, Debug)]
pub enum Sink {
    /// Standard output.
    Stdout,
    /// A file, shared by all its writers.
    File(PathBuf, Arc<File>),
}

/// Reports at the end of a run that the file of a [`Sink`] was removed. It may have been renamed, as log files are.
struct Kept {
    path: PathBuf,
    file: Arc<File>,
    named: Named,
}

impl Exporter for Kept {
    fn settled(&mut self, _ledger: &Ledger) -> Result<(), ExportError> {
        if self.file.metadata().is_ok_and(|now| self.named.is_lost(&now)) {
            let what =
                "it was removed during the run, and the lines that were written to it are lost".to_owned();
            return Err(ExportError::Disturbed { path: self.path.clone(), what });
        }
        if self.file.metadata().is_ok_and(|now| now.is_file()) {
            note_whole(&self.path);
        }
        Ok(())
    }
}

impl Sink {
    /// Opens the sink. An existing file is truncated, as by the shell's `>`, unless another gctrace writes to it
    /// (`flock`). A pipe is written to.
    pub fn open(path: Option<&Path>) -> Result<Self, ExportError> {
        let Some(path) = path else { return Ok(Self::Stdout) };
        let unwritable = |source| ExportError::Unwritable { path: path.to_owned(), source };
        let opened = file::open_alone(path, 0o666, file::Links::Follow, "another gctrace writes to it")?;
        if opened.metadata().is_ok_and(|data| data.is_file()) {
            opened.set_len(0).map_err(unwritable)?;
            note_begun(path);
        }
        Ok(Self::File(path.to_owned(), Arc::new(opened)))
    }

    /// An exporter that fails at the end of a run if the file was removed and its lines are lost.
    pub fn kept(&self) -> Option<Box<dyn Exporter>> {
        let Self::File(path, file) = self else { return None };
        Some(Box::new(Kept { path: path.clone(), file: Arc::clone(file), named: Named::now(file) }))
    }
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Stdout => {
                console::make_way_for_data();
                io::stdout().write(bytes)
            }
            Self::File(path, file) => (&**file)
                .write(bytes)
                .map_err(|error| io::Error::new(error.kind(), FileError { path: path.clone(), error })),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Stdout => io::stdout().flush(),
            Self::File(..) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The error names what failed.
    #[test]
    fn full() {
        let mut full = Sink::open(Some(Path::new("/dev/full"))).unwrap();
        let error = ExportError::Stdout(full.write_all(b"line\n").unwrap_err());
        assert_eq!(error.to_string(), "writing /dev/full: No space left on device (os error 28)");
        let error = ExportError::Stdout(io::Error::from_raw_os_error(28));
        assert_eq!(error.to_string(), "writing to standard output: No space left on device (os error 28)");
    }

    /// All writers share one position, and the previous content is gone.
    #[test]
    fn shared() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lines");
        std::fs::write(&path, "something longer from before").unwrap();
        let mut one = Sink::open(Some(&path)).unwrap();
        let mut other = one.clone();
        one.write_all(b"1\n").unwrap();
        other.write_all(b"2\n").unwrap();
        one.write_all(b"3\n").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "1\n2\n3\n");
        assert!(matches!(Sink::open(Some(dir.path())), Err(ExportError::Unwritable { .. })));
        // Lines of two runs would be interleaved.
        let error = Sink::open(Some(&path)).unwrap_err().to_string();
        assert!(
            error.ends_with("cannot be written: another gctrace writes to it; name another path"),
            "{error}"
        );
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "1\n2\n3\n");
        drop((one, other));
        Sink::open(Some(&path)).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "");
    }

    /// A log file may be truncated (`copytruncate`) or renamed during a run; its removal is reported at the end.
    #[test]
    fn rotated() {
        let dir = tempfile::tempdir().unwrap();
        let (path, renamed) = (dir.path().join("lines"), dir.path().join("lines.1"));
        let mut sink = Sink::open(Some(&path)).unwrap();
        let mut kept = sink.kept().unwrap();
        sink.write_all(b"1\n").unwrap();
        File::options().write(true).truncate(true).open(&path).unwrap();
        sink.write_all(b"2\n").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"2\n");
        std::fs::rename(&path, &renamed).unwrap();
        sink.write_all(b"3\n").unwrap();
        kept.settled(&Ledger::default()).unwrap();
        assert_eq!(std::fs::read(&renamed).unwrap(), b"2\n3\n");
        std::fs::remove_file(&renamed).unwrap();
        sink.write_all(b"4\n").unwrap();
        let error = kept.settled(&Ledger::default()).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{}: it was removed during the run", path.display())), "{error}");
        // These never had a name, or are not files.
        let unnamed = tempfile::tempfile().unwrap();
        let fd = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&unnamed));
        for path in [&*fd, "/dev/null"] {
            let mut kept = Sink::open(Some(Path::new(path))).unwrap().kept().unwrap();
            kept.settled(&Ledger::default()).unwrap();
        }
        assert!(Sink::Stdout.kept().is_none());
    }
}
