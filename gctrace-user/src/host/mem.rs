//! Memory of a traced process, read and never written.

use std::{fs::File, io, os::unix::fs::FileExt};

use super::{proc_root, rest::Bursts};
use crate::ruby::frames::Memory;

/// Reads the memory of one process through one open file. The process is neither stopped nor disturbed.
///
/// The file stays bound to the process that it was opened for: once that is gone, nothing can be read any more, even if its
/// pid was reused.
#[derive(Debug)]
pub struct ProcessMemory {
    file: File,
    /// For large reads: divides the work into bursts.
    bursts: Option<Bursts>,
}

impl ProcessMemory {
    /// Opens `/proc/PID/mem` (pid of the host).
    ///
    /// # Errors
    ///
    /// The process is gone, or the kernel does not let gctrace read it (it requires what `ptrace` requires: the same user and a
    /// dumpable process, or `CAP_SYS_PTRACE`).
    pub fn open(pid: u32) -> io::Result<Self> {
        Ok(Self { file: File::open(proc_root::path(pid, "mem"))?, bursts: None })
    }

    /// Like [`ProcessMemory::open`], for reading all of it: in bursts, so that a thread of the process that needs the CPU is not delayed.
    ///
    /// # Errors
    ///
    /// As for [`ProcessMemory::open`].
    pub fn open_in_bursts(pid: u32) -> io::Result<Self> {
        Ok(Self { bursts: Some(Bursts::default()), ..Self::open(pid)? })
    }

    /// The bursts that divide reading, if it is divided.
    pub fn bursts(&self) -> Option<&Bursts> {
        self.bursts.as_ref()
    }
}

/// Whether opening failed because the first thread of the process no longer has any memory (`ESRCH`, `proc_mem_open`, fs/proc/base.c). The
/// process is ending then, though other threads may still exist.
pub fn is_gone(error: &io::Error) -> bool {
    error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error())
}

impl Memory for ProcessMemory {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        if let Some(bursts) = &self.bursts {
            bursts.pause();
        }
        self.file.read_exact_at(buffer, address).is_ok()
    }
}

impl Memory for &ProcessMemory {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        ProcessMemory::read(self, address, buffer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// This process's own memory is read; unmapped memory, the end of the address space and a process that is
    /// gone are not.
    #[test]
    fn reads() {
        let words = [0x1122_3344_5566_7788_u64, 7];
        let memory = ProcessMemory::open(std::process::id()).unwrap();
        let mut bytes = [0; 16];
        assert!(memory.read(words.as_ptr().addr() as u64, &mut bytes));
        assert_eq!(bytes[..8], words[0].to_le_bytes());
        assert_eq!(bytes[8..], words[1].to_le_bytes());
        for hole in [0, 8, u64::MAX - 15, u64::MAX] {
            assert!(!memory.read(hole, &mut bytes), "{hole:#x}");
        }
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let memory = ProcessMemory::open(child.id()).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!memory.read(words.as_ptr().addr() as u64, &mut bytes));
        assert!(ProcessMemory::open(child.id()).is_err());
    }

    /// A zombie process, which has ended but is still listed, has no memory. Older kernels still open it, but nothing can be read.
    #[test]
    fn a_process_that_is_gone() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        while crate::host::proc::is_running(child.id()) {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        match ProcessMemory::open(child.id()) {
            Ok(memory) => assert!(!memory.read(0x1000, &mut [0])),
            Err(error) => assert!(is_gone(&error), "{error}"),
        }
        child.wait().unwrap();
        assert!(!is_gone(&io::Error::from_raw_os_error(rustix::io::Errno::ACCESS.raw_os_error())));
    }
}
