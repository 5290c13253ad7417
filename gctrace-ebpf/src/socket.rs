//! When the kernel received data on the connections of servers. A program in the cgroup of each server sees their packets; packets of
//! other cgroups are not inspected, and no packet is changed or held up.

use aya_ebpf::{
    EbpfContext as _,
    helpers::{bpf_get_current_task, bpf_get_socket_cookie, bpf_ktime_get_ns, bpf_probe_read_kernel},
    programs::SkBuffContext,
};
use gctrace_common::request::{SENT_UNKNOWN, SocketLayout, Written};

use crate::maps::{ARRIVALS, closed, socket_layout};

/// `S_IFMT` and `S_IFSOCK` (include/uapi/linux/stat.h).
const FILE_TYPE: u16 = 0o170_000;
const SOCKET: u16 = 0o140_000;
/// `IPPROTO_TCP` (include/uapi/linux/in.h).
const TCP: u8 = 6;

/// A packet has arrived for a socket of the cgroup. Records the time if the packet has data.
#[inline(always)]
pub fn received(ctx: &SkBuffContext) {
    if closed() {
        return;
    }
    let data = data_bytes(ctx);
    if data == Some(0) {
        return;
    }
    // SAFETY: plain helper calls, the first with the program's own context.
    let (cookie, now) = unsafe { (bpf_get_socket_cookie(ctx.as_ptr()), bpf_ktime_get_ns()) };
    if data.is_some()
        && let Some(known) = ARRIVALS.get_ptr_mut(&cookie)
    {
        // SAFETY: a map value pointer, valid while the program runs, 8-byte aligned. Cheaper than an insertion, which takes an element and
        // frees one.
        unsafe { known.write_volatile(now) };
        return;
    }
    // An older time must not stand for data that arrived later.
    if data.is_none() || ARRIVALS.insert(&cookie, &now, 0).is_err() {
        let _may_not_be_there = ARRIVALS.remove(&cookie);
    }
}

/// Number of data bytes in a TCP segment; `None`: it is not TCP, or its headers are not supported. The context begins at the IP header.
#[inline(always)]
fn data_bytes(ctx: &SkBuffContext) -> Option<u32> {
    let version = ctx.load::<u8>(0).ok()?;
    let (protocol, head) = match version >> 4 {
        4 => (ctx.load::<u8>(9), u32::from(version & 15) * 4),
        // Extension headers before TCP are not followed.
        6 => (ctx.load::<u8>(6), 40),
        _ => return None,
    };
    if protocol != Ok(TCP) {
        return None;
    }
    let offset = ctx.load::<u8>(head as usize + 12).ok()?;
    ctx.len().checked_sub(head + u32::from(offset >> 4) * 4)
}

/// When the last data arrived on a TCP connection of the current process, nanoseconds; 0 if not seen. Records how much has been written on it.
#[inline(always)]
pub fn arrival_ns(fd: u32, written: &mut Written) -> u64 {
    written.sock = 0;
    let layout = socket_layout();
    if layout.task_files == 0 {
        return 0;
    }
    let Some(Socket { sock, inode }) = socket(&layout, fd) else { return 0 };
    if note_written(&layout, sock, written) {
        (written.sock, written.inode) = (sock, inode);
    }
    let Some(cookie) = kernel::<u64>(sock, layout.sock_cookie) else { return 0 };
    // SAFETY: the value is copied out at once.
    unsafe { ARRIVALS.get(&cookie).copied() }.unwrap_or(0)
}

/// Number of bytes written on a connection since `earlier`; [`SENT_UNKNOWN`] if unknown, or if the descriptor now belongs to another socket.
#[inline(always)]
pub fn sent_bytes(fd: u32, earlier: &Written) -> u64 {
    if earlier.sock == 0 {
        return SENT_UNKNOWN;
    }
    let layout = socket_layout();
    let mut now = Written::default();
    match socket(&layout, fd) {
        Some(Socket { sock, inode })
            if (sock, inode) == (earlier.sock, earlier.inode) && note_written(&layout, sock, &mut now) =>
        {
            now.since(*earlier)
        }
        _ => SENT_UNKNOWN,
    }
}

#[inline(always)]
fn note_written(layout: &SocketLayout, sock: u64, to: &mut Written) -> bool {
    if layout.tcp_written == 0 || layout.tcp_acked == 0 {
        return false;
    }
    let state = kernel::<u8>(sock, layout.sock_state);
    let (Some(state), Some(sequence), Some(acked)) =
        (state, kernel(sock, layout.tcp_written), kernel(sock, layout.tcp_acked))
    else {
        return false;
    };
    (to.state, to.sequence, to.acked) = (u32::from(state), sequence, acked);
    true
}

/// The peer's port of a TCP connection of the current process, in network byte order; `None` if unknown.
#[inline(always)]
pub fn peer_port(fd: u32) -> Option<u16> {
    let layout = socket_layout();
    if layout.task_files == 0 || layout.sock_port == 0 {
        return None;
    }
    kernel(socket(&layout, fd)?.sock, layout.sock_port)
}

/// A TCP socket: the kernel address of its `sock`, and its inode number.
struct Socket {
    sock: u64,
    inode: u64,
}

/// The TCP socket of a descriptor of the current process; `None` if it is not one.
#[inline(always)]
fn socket(layout: &SocketLayout, fd: u32) -> Option<Socket> {
    // SAFETY: a plain helper call.
    let task = unsafe { bpf_get_current_task() };
    let files: u64 = kernel(task, layout.task_files)?;
    let table: u64 = kernel(files, layout.files_table)?;
    let len: u32 = kernel(table, layout.table_len)?;
    if fd >= len {
        return None;
    }
    let entries: u64 = kernel(table, layout.table_entries)?;
    let file: u64 = kernel(entries.wrapping_add(u64::from(fd) * 8), 0)?;
    let inode: u64 = kernel(file, layout.file_inode)?;
    let mode: u16 = kernel(inode, layout.inode_mode)?;
    if mode & FILE_TYPE != SOCKET {
        return None;
    }
    let socket: u64 = kernel(file, layout.file_private)?;
    let sock: u64 = kernel(socket, layout.socket_sock)?;
    let protocol: u16 = kernel(sock, layout.sock_protocol)?;
    if protocol != u16::from(TCP) {
        return None;
    }
    Some(Socket { sock, inode: kernel(inode, layout.inode_number)? })
}

/// Reads one plain value of the kernel.
#[inline(always)]
fn kernel<T>(base: u64, offset: u32) -> Option<T> {
    let address = base.wrapping_add(u64::from(offset));
    // SAFETY: the helper checks the address; T is an integer everywhere this is used.
    unsafe { bpf_probe_read_kernel(address as *const T) }.ok()
}
