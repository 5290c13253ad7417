//! Finds where to observe requests of servers in which one thread reads, serves and answers with blocking calls: Unicorn and WEBrick.
//!
//! The data that a thread has read is visible in libc, at the jump after the system call, where the kernel's calling convention defines
//! the registers. From glibc 2.41 on that jump does not exist (its `read` calls a function shared by all system calls). The data is then
//! visible in the files that call `read`, at the jump that tests the result. All sites are instructions that the kernel emulates.

use gctrace_common::blocking::BlockingPoint;
use iced_x86::{FlowControl, Register};

use super::{
    code::Code,
    emulation::{behind_system_calls, entry_with_arguments, is_emulated},
    jobs::result_test,
    requests::{RequestFile, RequestRefusal},
};
use crate::{
    address::{FileOffset, Svma},
    elf::{ElfImage, Machine},
};

/// Maximum number of sites in one file.
const MAX_SITES: usize = 64;

/// A file in which such requests are observed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BlockingFile {
    /// `unicorn_http.so`: identifies a process as a Unicorn. Nothing is probed in it.
    Unicorn,
    /// Ruby's `socket.so`.
    Socket,
    /// The C library, or its thread library (glibc before 2.34).
    Libc,
    /// A file that reads from connections through libc: the interpreter, and `kgio_ext.so`, which Unicorn uses.
    Reader,
}

impl BlockingFile {
    /// The kind of a file by its name; `None` for other files.
    pub fn of_name(name: &str) -> Option<Self> {
        match name {
            "unicorn_http.so" => Some(Self::Unicorn),
            "socket.so" => Some(Self::Socket),
            "kgio_ext.so" => Some(Self::Reader),
            _ if RequestFile::of_name(name) == Some(RequestFile::Libc) => Some(Self::Libc),
            _ if name.starts_with("libpthread-2.") || name == "libpthread.so.0" => Some(Self::Libc),
            _ => (name.starts_with("libruby") && name.contains(".so")).then_some(Self::Reader),
        }
    }
}

/// A probe site.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockingSite {
    /// What happens there.
    pub point: BlockingPoint,
    /// Stated address.
    pub address: Svma,
    /// File offset of that address.
    pub file_offset: FileOffset,
}

/// Finds all sites of a file; [`needed`] selects those that are needed.
///
/// # Errors
///
/// The file is for another processor, or has too many sites.
pub fn blocking_sites(image: &ElfImage, file: BlockingFile) -> Result<Vec<BlockingSite>, RequestRefusal> {
    use BlockingPoint as P;
    if image.machine() != Machine::X86_64 {
        return Err(RequestRefusal::Machine);
    }
    let sites = match file {
        BlockingFile::Unicorn => Vec::new(),
        BlockingFile::Socket => call_sites(
            image,
            &[
                ("listen", P::Listen),
                ("getsockname", P::Announce),
                ("accept4", P::Accept),
                ("rb_update_max_fd", P::Open),
            ],
        ),
        BlockingFile::Libc => libc_sites(image),
        BlockingFile::Reader => call_sites(
            image,
            &[("read", P::Read), ("recv", P::Read), ("accept", P::Accepted), ("accept4", P::Accepted)],
        ),
    };
    if sites.len() > MAX_SITES {
        return Err(RequestRefusal::TooMany);
    }
    Ok(sites)
}

/// Selects the needed sites among those of all files of a process.
///
/// # Errors
///
/// A needed point has no site in any of the files.
pub fn needed(
    mut sites: Vec<Vec<BlockingSite>>,
    webrick: bool,
) -> Result<Vec<Vec<BlockingSite>>, RequestRefusal> {
    use BlockingPoint as P;
    let has = |sites: &[Vec<BlockingSite>], point| sites.iter().flatten().any(|site| site.point == point);
    let in_libc = has(&sites, P::Received);
    let keeps = |point| match point {
        P::Listen => false,
        P::Announce | P::Wait => webrick,
        P::Read | P::HasRead | P::Accept | P::Open => !in_libc,
        _ => true,
    };
    for sites in &mut sites {
        sites.retain(|site| keeps(site.point));
    }
    let result = if in_libc { P::Received } else { P::HasRead };
    if !has(&sites, result) {
        return Err(RequestRefusal::NoResult("read"));
    }
    let sees_connections = has(&sites, P::Accepted) || has(&sites, P::Accept) && has(&sites, P::Open);
    if !sees_connections {
        return Err(RequestRefusal::NoResult("accept"));
    }
    let always = [("write", P::Write), ("writev", P::WriteVector), ("close", P::Close)];
    let of_webrick = [("getsockname", P::Announce), ("poll", P::Wait)];
    for (name, point) in always.into_iter().chain(of_webrick.into_iter().filter(|_| webrick)) {
        if !has(&sites, point) {
            return Err(RequestRefusal::NoCall(name));
        }
    }
    Ok(sites)
}

/// The jumps after calls of `listen`, at which a process may have become a server.
///
/// # Errors
///
/// There is no such jump.
pub fn listen_sites(sites: &[BlockingSite]) -> Result<Vec<BlockingSite>, RequestRefusal> {
    let found: Vec<BlockingSite> =
        sites.iter().filter(|site| site.point == BlockingPoint::Listen).copied().collect();
    if found.is_empty() { Err(RequestRefusal::NoResult("listen")) } else { Ok(found) }
}

fn site(image: &ElfImage, point: BlockingPoint, address: Svma) -> Option<BlockingSite> {
    Some(BlockingSite { point, address, file_offset: image.svma_to_file_offset(address)? })
}

/// Calls of imported functions; if the result matters, the jumps after the calls that test it.
fn call_sites(image: &ElfImage, calls: &[(&str, BlockingPoint)]) -> Vec<BlockingSite> {
    let code = Code::new(image);
    let mut sites = Vec::new();
    for function in 0..image.functions().len() {
        let instructions = code.decode(function);
        for (index, instruction) in instructions.iter().enumerate() {
            let calls_or_jumps =
                matches!(instruction.flow_control(), FlowControl::Call | FlowControl::UnconditionalBranch);
            if !calls_or_jumps || !is_emulated(instruction) {
                continue;
            }
            let Some(name) = code.callee(instruction).name else { continue };
            let Some(&(_, point)) = calls.iter().find(|(called, _)| *called == name) else { continue };
            let call = site(image, point, Svma(instruction.ip()));
            let test = |point| site(image, point, Svma(result_test(&instructions[index + 1..])?.ip()));
            match point {
                // A call whose result is not tested is ignored: it does not read from a connection.
                BlockingPoint::Read => {
                    sites.extend(
                        test(BlockingPoint::HasRead)
                            .and_then(|test| Some([call?, test]))
                            .into_iter()
                            .flatten(),
                    );
                }
                // A process that is examined while it calls `listen` may not be listening yet.
                BlockingPoint::Accepted | BlockingPoint::Listen => sites.extend(test(point)),
                _ => sites.extend(call),
            }
        }
    }
    sites
}

/// Entries of libc functions, and jumps after their system calls.
fn libc_sites(image: &ElfImage) -> Vec<BlockingSite> {
    use BlockingPoint as P;
    let arguments = [Register::RDI, Register::RSI, Register::RDX];
    let begins: [(&str, P, usize); 8] = [
        ("write", P::Write, 3),
        ("send", P::Write, 3),
        ("sendto", P::Write, 3),
        ("writev", P::WriteVector, 3),
        ("sendmsg", P::SendMessage, 3),
        ("close", P::Close, 1),
        ("poll", P::Wait, 2),
        ("ppoll", P::Wait, 2),
    ];
    let results =
        [("read", P::Received), ("recv", P::Received), ("accept", P::Accepted), ("accept4", P::Accepted)];
    let code = Code::new(image);
    let mut sites: Vec<BlockingSite> = Vec::new();
    let mut add = |point, address| {
        if !sites.iter().any(|site: &BlockingSite| site.address == address) {
            sites.extend(site(image, point, address));
        }
    };
    let body = |name| {
        let symbol = image.dynamic_symbols().find(name)?;
        Some((symbol.address, code.body(image.function_index(symbol.address)?)))
    };
    // Several functions stand for the same point: if one of them cannot be probed, the point is dropped.
    let mut unseen = Vec::new();
    for (name, point, count) in begins {
        let Some((start, body)) = body(name) else { continue };
        let (address, emulated) = entry_with_arguments(&body, start, &arguments[..count]);
        if emulated {
            add(point, address);
        } else {
            unseen.push(point);
        }
    }
    // `sendfile` has no buffer: nothing can be read at the address where the buffer would be.
    for (name, point) in results.into_iter().chain([("sendfile", P::Write)]) {
        let Some((_, body)) = body(name) else { continue };
        for address in behind_system_calls(&body.instructions) {
            add(point, address);
        }
    }
    sites.retain(|site| !unseen.contains(&site.point));
    sites
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapped() -> Option<Vec<(BlockingFile, ElfImage)>> {
        let files = std::process::Command::new("ruby")
            .args(["-rsocket", "-e", "puts File.read('/proc/self/maps')"])
            .output();
        let maps = String::from_utf8(files.ok()?.stdout).unwrap();
        let paths: std::collections::BTreeSet<&str> =
            maps.lines().filter_map(|line| line.split_whitespace().nth(5)).collect();
        let file = |path: &str| BlockingFile::of_name(path.rsplit('/').next()?);
        let image = |path: &str| ElfImage::read(&std::fs::File::open(path).unwrap()).unwrap();
        Some(paths.into_iter().filter_map(|path| Some((file(path)?, image(path)))).collect())
    }

    #[test]
    fn names() {
        for (name, expected) in [
            ("unicorn_http.so", Some(BlockingFile::Unicorn)),
            ("socket.so", Some(BlockingFile::Socket)),
            ("kgio_ext.so", Some(BlockingFile::Reader)),
            ("libruby-3.1.so.3.1", Some(BlockingFile::Reader)),
            ("libc.so.6", Some(BlockingFile::Libc)),
            ("libpthread-2.31.so", Some(BlockingFile::Libc)),
            ("libpthread.so.0", Some(BlockingFile::Libc)),
            ("puma_http11.so", None),
            ("librubyx", None),
            ("libpthread_nonshared.a", None),
        ] {
            assert_eq!(BlockingFile::of_name(name), expected, "{name}");
        }
    }

    /// Everything needed for either server is in the files of this machine's Ruby, at instructions that the kernel emulates; without
    /// libc, or without `socket.so` for WEBrick, it is refused.
    #[test]
    fn this_ruby() {
        let Some(files) = mapped().filter(|_| Machine::HOST == Machine::X86_64) else { return };
        let sites = |wanted: &dyn Fn(BlockingFile) -> bool| -> Vec<Vec<BlockingSite>> {
            let files = files.iter().filter(|(file, _)| wanted(*file));
            files.map(|(file, image)| blocking_sites(image, *file).unwrap()).collect()
        };
        for (file, image) in &files {
            let sites = blocking_sites(image, *file).unwrap();
            assert!(sites.iter().all(|site| super::super::emulation::is_emulated_at(image, site.address)));
            assert_eq!(listen_sites(&sites).is_ok(), *file == BlockingFile::Socket);
        }
        for webrick in [false, true] {
            let found = needed(sites(&|_| true), webrick).unwrap();
            let has = |point| found.iter().flatten().any(|site| site.point == point);
            assert_eq!((has(BlockingPoint::Announce), has(BlockingPoint::Wait)), (webrick, webrick));
            assert!(has(BlockingPoint::Received) != has(BlockingPoint::HasRead));
            assert!(needed(sites(&|file| file != BlockingFile::Libc), webrick).is_err());
        }
        assert!(needed(sites(&|file| file != BlockingFile::Socket), true).is_err());
    }
}
