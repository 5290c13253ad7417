//! System calls that no library offers in a safe form.

use std::{
    ffi::{CStr, CString},
    io,
    os::{
        fd::{AsRawFd, BorrowedFd, FromRawFd as _, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
};

use aya_obj::generated::{bpf_attr, bpf_func_info, bpf_insn};

/// Borrows the descriptor of an owner that only implements `AsRawFd`.
pub(super) fn borrow_fd<T: AsRawFd>(owner: &T) -> BorrowedFd<'_> {
    // SAFETY: the owner keeps its descriptor open for as long as it is borrowed, and the result cannot outlive it.
    unsafe { BorrowedFd::borrow_raw(owner.as_raw_fd()) }
}

/// `fcntl(2)`, `include/uapi/linux/fcntl.h`. A lease belongs to the open file description and ends with it.
const F_SETLEASE: libc::c_int = 1024;
const F_GETLEASE: libc::c_int = 1025;

/// Takes a lease on a file (`F_RDLCK`: opening it for writing blocks until the lease ends), or ends it (`F_UNLCK`).
pub(super) fn set_lease(file: &impl AsRawFd, kind: libc::c_int) -> io::Result<()> {
    // SAFETY: the descriptor is open for as long as it is borrowed, and the argument is a number.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), F_SETLEASE, kind) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The lease on a file, or the one that it must be changed to because a process is waiting.
pub(super) fn lease(file: &impl AsRawFd) -> io::Result<libc::c_int> {
    // SAFETY: as above; this one takes no argument.
    let kind = unsafe { libc::fcntl(file.as_raw_fd(), F_GETLEASE) };
    if kind < 0 { Err(io::Error::last_os_error()) } else { Ok(kind) }
}

/// Attaches a program to a perf event by a link with a cookie (`BPF_LINK_CREATE`, Linux 5.15). Aya does the same
/// for the events that it opens itself. Closing the result detaches the program.
pub(super) fn link_perf_event(program: BorrowedFd<'_>, event: i32, cookie: u64) -> io::Result<OwnedFd> {
    /// `enum bpf_attach_type`.
    const BPF_PERF_EVENT: u32 = 41;

    /// `union bpf_attr`, the `link_create` member.
    #[repr(C)]
    struct LinkCreate {
        program: u32,
        target: u32,
        attach_type: u32,
        flags: u32,
        cookie: u64,
    }
    let attributes = LinkCreate {
        program: program.as_raw_fd() as u32,
        target: event as u32,
        attach_type: BPF_PERF_EVENT,
        flags: 0,
        cookie,
    };
    // SAFETY: the kernel reads `size` bytes of the attributes, which live until the call returns.
    let fd = unsafe {
        libc::syscall(libc::SYS_bpf, BPF_LINK_CREATE, &raw const attributes, size_of::<LinkCreate>())
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// `enum bpf_cmd`, include/uapi/linux/bpf.h.
const BPF_MAP_UPDATE_ELEM: libc::c_long = 2;
const BPF_PROG_LOAD: libc::c_long = 5;
const BPF_BTF_LOAD: libc::c_long = 18;
const BPF_LINK_CREATE: libc::c_long = 28;
/// `enum bpf_attach_type`.
const BPF_TRACE_UPROBE_MULTI: u32 = 48;

/// A program that returns 0.
pub(super) fn return_zero() -> [bpf_insn; 2] {
    /// `BPF_ALU64 | BPF_MOV | BPF_K`.
    const MOVE: u8 = 0xb7;
    /// `BPF_JMP | BPF_EXIT`.
    const EXIT: u8 = 0x95;
    [MOVE, EXIT].map(|code| {
        let registers = bpf_insn::new_bitfield_1(0, 0);
        bpf_insn { code, _bitfield_align_1: [], _bitfield_1: registers, off: 0, imm: 0 }
    })
}

/// Loads the BTF of a program's types and functions into the kernel.
pub(super) fn load_btf(types: &[u8]) -> io::Result<OwnedFd> {
    // SAFETY: all bytes zero is a value of every member.
    let mut attributes: bpf_attr = unsafe { std::mem::zeroed() };
    attributes.__bindgen_anon_7.btf = types.as_ptr().addr() as u64;
    attributes.__bindgen_anon_7.btf_size = types.len() as u32;
    descriptor(BPF_BTF_LOAD, &attributes)
}

/// Loads a uprobe for multi-uprobe links (Linux 6.6). `functions`: where its functions start, and their BTF.
pub(super) fn load_multi(
    name: &str,
    code: &[bpf_insn],
    functions: Option<(BorrowedFd<'_>, &[bpf_func_info])>,
) -> io::Result<OwnedFd> {
    /// `enum bpf_prog_type`.
    const BPF_PROG_TYPE_KPROBE: u32 = 2;
    /// The helpers that read memory require this licence, which is the object's.
    const LICENSE: &CStr = c"GPL";
    let mut prog_name = [0; 16];
    // The last byte stays zero, as the terminator.
    for (to, from) in prog_name.iter_mut().zip(name.bytes()).take(15) {
        *to = from as libc::c_char;
    }
    // SAFETY: all bytes zero is a value of every member.
    let mut attributes: bpf_attr = unsafe { std::mem::zeroed() };
    attributes.__bindgen_anon_3.prog_type = BPF_PROG_TYPE_KPROBE;
    attributes.__bindgen_anon_3.insn_cnt = code.len() as u32;
    attributes.__bindgen_anon_3.insns = code.as_ptr().addr() as u64;
    attributes.__bindgen_anon_3.license = LICENSE.as_ptr().addr() as u64;
    attributes.__bindgen_anon_3.prog_name = prog_name;
    attributes.__bindgen_anon_3.expected_attach_type = BPF_TRACE_UPROBE_MULTI;
    if let Some((types, functions)) = functions {
        attributes.__bindgen_anon_3.prog_btf_fd = types.as_raw_fd() as u32;
        attributes.__bindgen_anon_3.func_info = functions.as_ptr().addr() as u64;
        attributes.__bindgen_anon_3.func_info_cnt = functions.len() as u32;
        attributes.__bindgen_anon_3.func_info_rec_size = size_of::<bpf_func_info>() as u32;
    }
    descriptor(BPF_PROG_LOAD, &attributes)
}

/// Attaches a program at places of a file (file offset and cookie), for one process or for all (0). Closing the result detaches it.
pub(super) fn link_multi(
    program: BorrowedFd<'_>,
    at_return: bool,
    path: &Path,
    places: &[(u64, u64)],
    pid: u32,
) -> io::Result<OwnedFd> {
    /// `BPF_F_UPROBE_MULTI_RETURN`.
    const RETURN: u32 = 1;
    let path = CString::new(path.as_os_str().as_bytes())?;
    let (offsets, cookies): (Vec<u64>, Vec<u64>) = places.iter().copied().unzip();
    // SAFETY: as above.
    let mut attributes: bpf_attr = unsafe { std::mem::zeroed() };
    attributes.link_create.__bindgen_anon_1.prog_fd = program.as_raw_fd() as u32;
    attributes.link_create.attach_type = BPF_TRACE_UPROBE_MULTI;
    // Assigned field by field: assigning a whole value would copy its padding, which may have any content, and the kernel refuses
    // attributes with non-zero bytes behind the last field.
    attributes.link_create.__bindgen_anon_3.uprobe_multi.path = path.as_ptr().addr() as u64;
    attributes.link_create.__bindgen_anon_3.uprobe_multi.offsets = offsets.as_ptr().addr() as u64;
    attributes.link_create.__bindgen_anon_3.uprobe_multi.cookies = cookies.as_ptr().addr() as u64;
    attributes.link_create.__bindgen_anon_3.uprobe_multi.cnt = places.len() as u32;
    attributes.link_create.__bindgen_anon_3.uprobe_multi.flags = if at_return { RETURN } else { 0 };
    attributes.link_create.__bindgen_anon_3.uprobe_multi.pid = pid;
    descriptor(BPF_LINK_CREATE, &attributes)
}

/// Makes a program a tail-call stage in a `BPF_MAP_TYPE_PROG_ARRAY`.
pub(super) fn set_stage(stages: BorrowedFd<'_>, stage: u32, program: BorrowedFd<'_>) -> io::Result<()> {
    let program = program.as_raw_fd();
    // SAFETY: as above.
    let mut attributes: bpf_attr = unsafe { std::mem::zeroed() };
    attributes.__bindgen_anon_2.map_fd = stages.as_raw_fd() as u32;
    attributes.__bindgen_anon_2.key = (&raw const stage).addr() as u64;
    attributes.__bindgen_anon_2.__bindgen_anon_1.value = (&raw const program).addr() as u64;
    bpf(BPF_MAP_UPDATE_ELEM, &attributes).map(drop)
}

fn bpf(command: libc::c_long, attributes: &bpf_attr) -> io::Result<libc::c_long> {
    // SAFETY: the kernel reads `size` bytes of the attributes and what they point to, which live until the call returns.
    let result = unsafe {
        libc::syscall(libc::SYS_bpf, command, std::ptr::from_ref(attributes), size_of::<bpf_attr>())
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn descriptor(command: libc::c_long, attributes: &bpf_attr) -> io::Result<OwnedFd> {
    let fd = bpf(command, attributes)?;
    // SAFETY: the kernel has just made this descriptor for us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Returns freed pages to the kernel. The kernel's BTF, which the loader reads (about 10 MB), and the analysis of an
/// image (about 25 MB) are freed soon, but glibc keeps their pages indefinitely, in the arena of the thread that allocated them.
#[cfg(target_env = "gnu")]
pub fn give_back_memory() {
    // SAFETY: it has no preconditions, and any thread may call it (malloc_trim(3)).
    let _any_released = unsafe { libc::malloc_trim(0) };
}

/// Other allocators return freed memory by themselves.
#[cfg(not(target_env = "gnu"))]
pub fn give_back_memory() {}
