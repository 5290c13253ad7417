//! Where Sidekiq's jobs are observed: in Ruby's `socket.so`, through which the Redis clients written in Ruby send and receive, and, up to
//! 3.2, where a Ruby thread starts. All sites are instructions that the kernel emulates.

use gctrace_common::job::JobPoint;
use iced_x86::{FlowControl, Instruction, InstructionInfoFactory, Register};

use super::{
    code::Code, emulation::is_emulated, requests::RequestRefusal, version::RubyVersion,
    x86::written_registers,
};
use crate::{
    address::{FileOffset, Svma},
    elf::{ElfImage, Machine},
};

/// Maximum number of sites in one file.
const MAX_SITES: usize = 64;
/// Maximum number of instructions after a call within which its result is tested.
const MAX_DISTANCE: usize = 8;
/// From this version on a native thread ends with its Ruby thread.
const THREADS_END: (u16, u16) = (3, 3);

/// A probe site.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobSite {
    /// What happens there.
    pub point: JobPoint,
    /// Stated address.
    pub address: Svma,
    /// File offset of that address.
    pub file_offset: FileOffset,
}

/// Finds the sites in `socket.so`.
///
/// # Errors
///
/// A call is missing or not in a form that the kernel can emulate, or the result of receiving cannot be observed.
pub fn socket_sites(image: &ElfImage) -> Result<Vec<JobSite>, RequestRefusal> {
    let calls = [("send", JobPoint::Send), ("recv", JobPoint::Receive), ("connect", JobPoint::Connect)];
    let sites = sites(image, &calls)?;
    let count = |point| sites.iter().filter(|site| site.point == point).count();
    for (name, point) in calls {
        if count(point) == 0 {
            return Err(RequestRefusal::NoCall(name));
        }
    }
    if count(JobPoint::Receive) != count(JobPoint::Received) {
        return Err(RequestRefusal::NoResult("recv"));
    }
    Ok(sites)
}

/// Finds the sites in the interpreter, if they are needed.
///
/// # Errors
///
/// The file is not an interpreter, or the call is missing or not in a form that the kernel can emulate.
pub fn thread_sites(image: &ElfImage) -> Result<Vec<JobSite>, RequestRefusal> {
    let version = RubyVersion::of_image(image).ok_or(RequestRefusal::Version)?;
    if (version.major, version.minor) >= THREADS_END {
        return Ok(Vec::new());
    }
    let sites = sites(image, &[("pthread_setname_np", JobPoint::Name)])?;
    if sites.is_empty() {
        return Err(RequestRefusal::NoCall("pthread_setname_np"));
    }
    Ok(sites)
}

fn sites(image: &ElfImage, calls: &[(&'static str, JobPoint)]) -> Result<Vec<JobSite>, RequestRefusal> {
    if image.machine() != Machine::X86_64 {
        return Err(RequestRefusal::Machine);
    }
    let code = Code::new(image);
    let mut sites = Vec::new();
    let mut add = |point, instruction: &Instruction| {
        let address = Svma(instruction.ip());
        let file_offset = image.svma_to_file_offset(address);
        sites.extend(file_offset.map(|file_offset| JobSite { point, address, file_offset }));
    };
    for function in 0..image.functions().len() {
        let instructions = code.decode(function);
        for (index, instruction) in instructions.iter().enumerate() {
            let calls_or_jumps =
                matches!(instruction.flow_control(), FlowControl::Call | FlowControl::UnconditionalBranch);
            let name = if calls_or_jumps { code.callee(instruction).name } else { None };
            let Some(&(name, point)) = calls.iter().find(|(called, _)| Some(*called) == name) else {
                continue;
            };
            if !is_emulated(instruction) {
                return Err(RequestRefusal::NoCall(name));
            }
            add(point, instruction);
            if point == JobPoint::Receive
                && let Some(test) = result_test(&instructions[index + 1..])
            {
                add(JobPoint::Received, test);
            }
        }
    }
    if sites.len() > MAX_SITES {
        return Err(RequestRefusal::TooMany);
    }
    Ok(sites)
}

/// The first jump after a call, if the kernel emulates it and rax still holds the return value.
pub(super) fn result_test(behind: &[Instruction]) -> Option<&Instruction> {
    let mut factory = InstructionInfoFactory::new();
    for instruction in behind.iter().take(MAX_DISTANCE) {
        if instruction.flow_control() == FlowControl::ConditionalBranch {
            return is_emulated(instruction).then_some(instruction);
        }
        let written = written_registers(&mut factory, instruction);
        if instruction.flow_control() != FlowControl::Next || written.contains(&Register::RAX) {
            return None;
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use iced_x86::{Decoder, DecoderOptions};

    use super::*;

    fn jump(bytes: &[u8]) -> Option<u64> {
        let code: Vec<Instruction> =
            Decoder::with_ip(64, bytes, 0x1000, DecoderOptions::NONE).into_iter().collect();
        result_test(&code).map(|jump| jump.ip() - 0x1000)
    }

    /// The jump after a call is used only if the result is in its register, and if it cannot be reached in any other way.
    #[test]
    fn results() {
        // mov r13, rax; test rax, rax; jns.
        assert_eq!(jump(&[0x49, 0x89, 0xc5, 0x48, 0x85, 0xc0, 0x79, 0x10]), Some(6));
        // mov eax, 0; jns. An inner jump, a call, a return, and no jump at all.
        for bytes in [
            &[0xb8, 0, 0, 0, 0, 0x79, 0x10][..],
            &[0xeb, 0x10, 0x79, 0x10],
            &[0xe8, 0, 0, 0, 0, 0x79, 0x10],
            &[0xc3, 0x79, 0x10],
            &[[0x90].repeat(9), vec![0x79, 0x10]].concat(),
            &[0xe2, 0x10],
        ] {
            assert_eq!(jump(bytes), None, "{bytes:x?}");
        }
    }

    /// This machine's `socket.so` and interpreter have their sites; another file is refused.
    #[test]
    fn this_ruby() {
        let files = std::process::Command::new("ruby")
            .args(["-rsocket", "-e", "puts File.read('/proc/self/maps')"])
            .output();
        let Ok(files) = files else { return };
        if Machine::HOST != Machine::X86_64 {
            return;
        }
        let maps = String::from_utf8(files.stdout).unwrap();
        let find = |part: &str| maps.split_whitespace().find(|word| word.contains(part));
        let image = |path: &str| ElfImage::read(&std::fs::File::open(path).unwrap()).unwrap();
        let Some(socket) = find("/socket.so").map(image) else { return };
        let sites = socket_sites(&socket).unwrap();
        for point in [JobPoint::Send, JobPoint::Receive, JobPoint::Received, JobPoint::Connect] {
            assert!(sites.iter().any(|site| site.point == point), "{point:?} {sites:?}");
        }
        assert!(sites.iter().all(|site| super::super::emulation::is_emulated_at(&socket, site.address)));
        assert!(matches!(thread_sites(&socket), Err(RequestRefusal::Version)));
        if let Some(ruby) = find("/libruby").map(image) {
            let sites = thread_sites(&ruby).unwrap();
            let version = RubyVersion::of_image(&ruby).unwrap();
            assert_eq!(sites.is_empty(), (version.major, version.minor) >= THREADS_END, "{sites:?}");
            assert!(matches!(socket_sites(&ruby), Err(RequestRefusal::NoCall(_))));
        }
    }
}
