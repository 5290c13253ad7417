//! Where requests are observed: at calls that a web server makes anyway, in files that hardly any other process has, or in its libc.
//!
//! Puma's parser (`ext/puma_http11`) is called through its exported functions. `socket.so` is Ruby's. All sites
//! except those in libc are `call` instructions, which the kernel emulates.

use gctrace_common::request::RequestPoint;
use iced_x86::{FlowControl, Register};

use super::{
    code::Code,
    emulation::{behind_system_calls, entry_with_arguments, is_emulated},
};
use crate::{
    address::{FileOffset, Svma},
    elf::{ElfImage, Machine},
};

/// Maximum number of sites in one file; a server's files have fewer.
const MAX_SITES: usize = 64;

/// A file in which requests are observed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RequestFile {
    /// `puma_http11.so`: identifies a process as a server.
    Puma,
    /// `socket.so`.
    Socket,
    /// The C library.
    Libc,
}

impl RequestFile {
    /// The kind of a file by its name; `None` for other files.
    pub fn of_name(name: &str) -> Option<Self> {
        match name {
            "puma_http11.so" => Some(Self::Puma),
            "socket.so" => Some(Self::Socket),
            "libc.so.6" => Some(Self::Libc),
            // glibc before 2.34.
            _ => {
                let version = name.strip_prefix("libc-2.")?.strip_suffix(".so")?;
                version.bytes().all(|byte| byte.is_ascii_digit()).then_some(Self::Libc)
            }
        }
    }

    /// The functions called there, and whether requests cannot be observed without the call.
    fn calls(self) -> &'static [(&'static str, RequestPoint, bool)] {
        use RequestPoint as P;
        match self {
            Self::Puma => &[
                ("puma_parser_execute", P::Parse, true),
                ("puma_parser_init", P::Reset, true),
                // Puma may be built without TLS.
                ("SSL_write", P::Encrypt, false),
            ],
            Self::Socket => &[
                ("getsockopt", P::Take, true),
                ("accept4", P::Accept, true),
                ("rb_update_max_fd", P::Open, true),
            ],
            Self::Libc => &[
                ("write", P::Write, true),
                ("send", P::Write, true),
                ("sendto", P::Write, true),
                ("writev", P::WriteVector, true),
                ("sendmsg", P::SendMessage, true),
                ("close", P::Close, true),
            ],
        }
    }
}

/// A probe site.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestSite {
    /// What happens there.
    pub point: RequestPoint,
    /// Stated address.
    pub address: Svma,
    /// File offset of that address.
    pub file_offset: FileOffset,
}

/// Why requests cannot be observed in a file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestRefusal {
    /// The file is for another processor.
    #[error("requests are traced on x86-64 only")]
    Machine,
    /// A function does not exist or is not called.
    #[error("no call of {0} that the kernel can emulate")]
    NoCall(&'static str),
    /// The return value of a function cannot be observed.
    #[error("no test of the return value of {0} that the kernel can emulate")]
    NoResult(&'static str),
    /// The file is not an interpreter.
    #[error("the file has no ruby_version")]
    Version,
    /// There are too many calls.
    #[error("more than {MAX_SITES} calls")]
    TooMany,
}

/// Finds the sites of a file.
///
/// # Errors
///
/// A call is missing or not in a form that the kernel can emulate.
pub fn request_sites(image: &ElfImage, file: RequestFile) -> Result<Vec<RequestSite>, RequestRefusal> {
    if image.machine() != Machine::X86_64 {
        return Err(RequestRefusal::Machine);
    }
    let (sites, entered) = match file {
        RequestFile::Puma | RequestFile::Socket => (call_sites(image, file.calls()), None),
        RequestFile::Libc => {
            let (sites, names) = entries(image, file.calls());
            (sites, Some(names))
        }
    };
    if sites.len() > MAX_SITES {
        return Err(RequestRefusal::TooMany);
    }
    for &(name, point, needed) in file.calls() {
        // Several functions of libc stand for the same point.
        let is_there = match &entered {
            Some(names) => names.contains(&name),
            None => sites.iter().any(|site| site.point == point),
        };
        if needed && !is_there {
            return Err(RequestRefusal::NoCall(name));
        }
    }
    Ok(sites)
}

/// Finds where `Thread#[]=` sets a thread-local variable: in the interpreter, the call of `rb_thread_local_aset` after one of `rb_to_id`
/// (thread.c, `rb_thread_aset`; 2.7 to 3.4).
///
/// # Errors
///
/// The call is missing, there are several, or it is not in a form that the kernel can emulate.
pub fn local_sites(image: &ElfImage) -> Result<Vec<RequestSite>, RequestRefusal> {
    const CALLED: &str = "rb_thread_local_aset";
    if image.machine() != Machine::X86_64 {
        return Err(RequestRefusal::Machine);
    }
    let code = Code::new(image);
    let mut sites = Vec::new();
    for function in 0..image.functions().len() {
        let mut has_id = false;
        for instruction in code.decode(function) {
            let calls_or_jumps =
                matches!(instruction.flow_control(), FlowControl::Call | FlowControl::UnconditionalBranch);
            match code.callee(&instruction).name.filter(|_| calls_or_jumps) {
                Some("rb_to_id") => has_id = true,
                Some(CALLED) if has_id && is_emulated(&instruction) => {
                    sites.extend(site(image, RequestPoint::Local, Svma(instruction.ip())));
                }
                Some(CALLED) if has_id => return Err(RequestRefusal::NoCall(CALLED)),
                _ => {}
            }
        }
    }
    match sites.len() {
        0 => Err(RequestRefusal::NoCall(CALLED)),
        1 => Ok(sites),
        _ => Err(RequestRefusal::TooMany),
    }
}

fn site(image: &ElfImage, point: RequestPoint, address: Svma) -> Option<RequestSite> {
    Some(RequestSite { point, address, file_offset: image.svma_to_file_offset(address)? })
}

/// Calls of imported or exported functions.
fn call_sites(image: &ElfImage, calls: &[(&'static str, RequestPoint, bool)]) -> Vec<RequestSite> {
    let code = Code::new(image);
    let mut sites = Vec::new();
    for function in 0..image.functions().len() {
        for instruction in code.decode(function) {
            // A jump to a function is a tail call.
            let calls_or_jumps =
                matches!(instruction.flow_control(), FlowControl::Call | FlowControl::UnconditionalBranch);
            if !calls_or_jumps || !is_emulated(&instruction) {
                continue;
            }
            let Some(name) = code.callee(&instruction).name else { continue };
            let Some(&(_, point, _)) = calls.iter().find(|(called, ..)| *called == name) else { continue };
            sites.extend(site(image, point, Svma(instruction.ip())));
        }
    }
    sites
}

/// Entries of exported functions: the first instruction that the kernel emulates, with the arguments still unchanged.
fn entries(
    image: &ElfImage,
    functions: &[(&'static str, RequestPoint, bool)],
) -> (Vec<RequestSite>, Vec<&'static str>) {
    let code = Code::new(image);
    let mut sites: Vec<RequestSite> = Vec::new();
    let mut names = Vec::new();
    for &(name, point, _) in functions {
        let Some(symbol) = image.dynamic_symbols().find(name) else { continue };
        let Some(function) = image.function_index(symbol.address) else { continue };
        let arguments = [Register::RDI, Register::RSI, Register::RDX];
        // `close` has one argument.
        let arguments = if point == RequestPoint::Close { &arguments[..1] } else { &arguments };
        let (address, emulated) = entry_with_arguments(&code.body(function), symbol.address, arguments);
        if !emulated {
            continue;
        }
        if !sites.iter().any(|site| site.address == address) {
            sites.extend(site(image, point, address));
        }
        if sites.iter().any(|site| site.address == address) {
            names.push(name);
        }
    }
    // It sends files. It has no buffer: nothing can be read at the address where the buffer would be.
    let send_file = image.dynamic_symbols().find("sendfile");
    if let Some(function) = send_file.and_then(|symbol| image.function_index(symbol.address)) {
        let behind = behind_system_calls(&code.body(function).instructions);
        sites.extend(behind.into_iter().filter_map(|address| site(image, RequestPoint::Write, address)));
    }
    (sites, names)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file is recognised by its exact name; similar names are not.
    #[test]
    fn names() {
        for (name, expected) in [
            ("puma_http11.so", Some(RequestFile::Puma)),
            ("socket.so", Some(RequestFile::Socket)),
            ("libc.so.6", Some(RequestFile::Libc)),
            ("libc-2.31.so", Some(RequestFile::Libc)),
            ("libc-2.31.so.1", None),
            ("libc-2.x.so", None),
            ("libcap.so.2", None),
            ("", None),
        ] {
            assert_eq!(RequestFile::of_name(name), expected, "{name}");
        }
    }

    /// Of the two calls of `rb_thread_local_aset` in libruby, the site is the tail call of `Thread#[]=`, with the arguments in their
    /// registers; a library without it is refused.
    #[test]
    fn thread_variables() {
        if Machine::HOST != Machine::X86_64 {
            return;
        }
        let image = crate::debian::libruby_image();
        let sites = local_sites(&image).unwrap();
        assert!(matches!(&sites[..], [RequestSite { point: RequestPoint::Local, .. }]), "{sites:?}");
        assert!(super::super::emulation::is_emulated_at(&image, sites[0].address));
        let other = std::fs::read_to_string("/proc/self/maps").unwrap();
        let mut paths = other.lines().filter_map(|line| line.split_whitespace().nth(5));
        let other = paths.find(|path| path.ends_with("/libc.so.6")).unwrap();
        let other = ElfImage::read(&std::fs::File::open(other).unwrap()).unwrap();
        assert!(matches!(local_sites(&other), Err(RequestRefusal::NoCall(_))));
    }

    /// The C library of this machine has all of its sites, at instructions that the kernel emulates; it is not a server's parser.
    #[test]
    fn this_libc() {
        if Machine::HOST != Machine::X86_64 {
            return;
        }
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let path = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
        let mut libc = path.filter(|path| {
            let name = path.rsplit('/').next().unwrap_or_default();
            RequestFile::of_name(name) == Some(RequestFile::Libc)
        });
        let image = ElfImage::read(&std::fs::File::open(libc.next().unwrap()).unwrap()).unwrap();
        let sites = request_sites(&image, RequestFile::Libc).unwrap();
        assert!(sites.len() >= 6, "{sites:?}");
        assert!(sites.iter().all(|site| super::super::emulation::is_emulated_at(&image, site.address)));
        assert!(matches!(request_sites(&image, RequestFile::Puma), Err(RequestRefusal::NoCall(_))));
    }
}
