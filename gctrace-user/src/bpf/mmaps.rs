//! New executable mappings of every process, as the kernel makes them (`PERF_RECORD_MMAP2`, Linux 3.16): the moment
//! at which a Ruby image enters a process. If native stacks are walked, also forks and exits, which change the code of a
//! process.

use std::{collections::BTreeMap, os::fd::BorrowedFd};

use perf_event::{Builder, Sampler, data::Record, events::Software};

use super::{cpus::OnlineCpus, errors::brief, raw};

/// Bytes of one CPU's buffer; a mapping record is about 100 bytes.
const BUFFER_BYTES: usize = 64 << 10;

/// A file, as a mapping record identifies it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId {
    /// Major and minor number of its device.
    pub device: (u32, u32),
    /// Its inode number on the device.
    pub inode: u64,
    /// The inode generation: distinguishes files that reuse the number.
    pub generation: u64,
}

/// An executable mapping that a process has just made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExecMapping {
    /// The process, in the pid namespace of gctrace; 0 if it is not in that namespace.
    pub pid: u32,
    /// Start address of the mapping in the process.
    pub address: u64,
    /// Length in bytes.
    pub len: u64,
    /// File offset of the start.
    pub offset: u64,
    /// File name as the process sees it.
    pub file: Vec<u8>,
    /// The file.
    pub file_id: Option<FileId>,
}

/// An event of the watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Watched {
    /// A new executable mapping.
    Mapping(ExecMapping),
    /// A process was forked.
    Fork {
        /// The parent process.
        parent: u32,
        /// The new process.
        child: u32,
    },
    /// The main thread of a process ended.
    Exit {
        /// The process.
        pid: u32,
    },
}

/// Why mappings cannot be watched.
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    /// The kernel refused the event.
    #[error(
        "watching for new mappings on CPU {cpu} (perf_event_open): {source} (run gctrace as root; a security policy such as seccomp may refuse it, too)"
    )]
    Open {
        /// The CPU.
        cpu: u32,
        /// The kernel's answer.
        #[source]
        source: std::io::Error,
    },
    /// The CPUs could not be listed.
    #[error("listing the online CPUs: {0}")]
    Cpus(#[source] std::io::Error),
}

/// Mapping records of all CPUs.
pub struct MappingWatch {
    /// By CPU.
    samplers: BTreeMap<u32, Sampler>,
    /// Samplers of CPUs found offline at the last check; they may still have records until they are drained.
    gone: Vec<Sampler>,
    cpus: OnlineCpus,
    tasks: bool,
    lost: u64,
}

impl MappingWatch {
    /// Starts watching on every online CPU; `tasks`: watch forks and exits as well.
    pub fn start(tasks: bool) -> Result<Self, WatchError> {
        let cpus = OnlineCpus::now().map_err(WatchError::Cpus)?;
        let samplers = cpus.known().map(|cpu| Ok((cpu, sampler(cpu, tasks)?)));
        let samplers = samplers.collect::<Result<_, WatchError>>()?;
        Ok(Self { samplers, gone: Vec::new(), cpus, tasks, lost: 0 })
    }

    /// Starts watching on CPUs that have come online; checks at most once a second. Returns whether there are any: mappings made
    /// on them until now have no records, so the caller scans `/proc`.
    pub fn look_at_cpus(&mut self) -> Result<bool, WatchError> {
        let Some(change) = self.cpus.change().map_err(WatchError::Cpus)? else { return Ok(false) };
        self.gone = change.gone.iter().filter_map(|cpu| self.samplers.remove(cpu)).collect();
        let mut come = false;
        for cpu in change.come {
            match sampler(cpu, self.tasks) {
                Ok(sampler) => {
                    come = true;
                    self.samplers.insert(cpu, sampler);
                }
                Err(error) if self.cpus.retry(cpu) => {
                    log::warn!(
                        "{}; Ruby processes that start on this CPU are not seen until a retry succeeds",
                        brief(&error)
                    );
                }
                Err(_) => {}
            }
        }
        Ok(come)
    }

    /// Descriptors that become readable when there are records.
    pub fn fds(&self) -> Vec<BorrowedFd<'_>> {
        self.samplers.values().map(raw::borrow_fd).collect()
    }

    /// Number of mapping records lost because they were not read in time; each may hide an image, so the caller scans `/proc`.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Passes all pending records to `sink`.
    pub fn drain(&mut self, mut sink: impl FnMut(Watched)) {
        for sampler in self.samplers.values_mut().chain(&mut self.gone) {
            while let Some(record) = sampler.next_record() {
                match record.parse_record() {
                    Ok(Record::Mmap2(map)) => sink(Watched::Mapping(ExecMapping {
                        pid: map.pid,
                        address: map.addr,
                        len: map.len,
                        offset: map.pgoff,
                        file: map.filename.to_vec(),
                        file_id: map.ino().zip(map.ino_generation()).map(|(inode, generation)| FileId {
                            device: (map.maj().unwrap_or_default(), map.min().unwrap_or_default()),
                            inode,
                            generation,
                        }),
                    })),
                    Ok(Record::Fork(task)) if task.pid != task.ppid => {
                        sink(Watched::Fork { parent: task.ppid, child: task.pid });
                    }
                    Ok(Record::Exit(task)) if task.pid == task.tid => sink(Watched::Exit { pid: task.pid }),
                    Ok(Record::Lost(lost)) => self.lost += lost.lost,
                    Ok(_) => {}
                    Err(error) => {
                        log::debug!("a perf record could not be parsed: {error}");
                        self.lost += 1;
                    }
                }
            }
        }
    }
}

/// Opens the mapping records of one CPU; `tasks`: forks and exits as well.
fn sampler(cpu: u32, tasks: bool) -> Result<Sampler, WatchError> {
    let open = |source| WatchError::Open { cpu, source };
    let mut counter = Builder::new(Software::DUMMY)
        .any_pid()
        .one_cpu(cpu as usize)
        .mmap(true)
        .mmap2(true)
        .task(tasks)
        .exclude_kernel(true)
        .exclude_hv(true)
        .wakeup_watermark(1)
        .build()
        .map_err(open)?;
    counter.enable().map_err(open)?;
    counter.sampled(BUFFER_BYTES).map_err(open)
}
