//! Whether a process listens.

use std::collections::HashSet;

use procfs::{
    net::TcpState,
    process::{FDTarget, Process},
};

use super::proc_root;

/// Whether a process has a TCP socket that listens. `false` where that cannot be read.
pub fn on_tcp(pid: u32) -> bool {
    proc_root::process(pid).is_ok_and(|process| has_listening_socket(&process))
}

/// Whether a process has a Unix socket that listens. `false` where that cannot be read.
pub fn on_unix(pid: u32) -> bool {
    let own = proc_root::process(pid).map(|process| sockets(&process)).unwrap_or_default();
    // The list of a host's sockets can be long.
    !own.is_empty()
        && std::fs::read(proc_root::path(pid, "net/unix"))
            .is_ok_and(|list| listening(&list).any(|inode| own.contains(&inode)))
}

/// Inodes of the listening ones in `/proc/PID/net/unix` (`unix_seq_show`): address, references, protocol, flags, type,
/// state, inode and, if it has one, a name, which may be of any bytes.
fn listening(list: &[u8]) -> impl Iterator<Item = u64> {
    /// `__SO_ACCEPTCON` (include/uapi/linux/net.h).
    const LISTENS: u32 = 1 << 16;
    list.split(|&byte| byte == b'\n').filter_map(|line| {
        let mut words = line.split(|&byte| byte == b' ').filter(|word| !word.is_empty());
        let flags = u32::from_str_radix(str::from_utf8(words.nth(3)?).ok()?, 16).ok()?;
        let inode = str::from_utf8(words.nth(2)?).ok()?.parse().ok()?;
        (flags & LISTENS != 0).then_some(inode)
    })
}

/// Inodes of a process's sockets.
fn sockets(process: &Process) -> HashSet<u64> {
    let inode = |target| match target {
        FDTarget::Socket(inode) => Some(inode),
        _ => None,
    };
    let descriptors = process.fd().into_iter().flatten().flatten();
    descriptors.filter_map(|fd| inode(fd.target)).collect()
}

fn has_listening_socket(process: &Process) -> bool {
    let own = sockets(process);
    // The list of a host's connections can be long.
    if own.is_empty() {
        return false;
    }
    let connections = [process.tcp(), process.tcp6()];
    connections
        .into_iter()
        .flatten()
        .flatten()
        .any(|connection| connection.state == TcpState::Listen && own.contains(&connection.inode))
}

#[cfg(test)]
mod tests {
    use std::{
        net::TcpListener,
        os::unix::net::{UnixListener, UnixStream},
    };

    use super::*;

    /// Only sockets that listen count, and names may be of any bytes.
    #[test]
    fn unix_sockets() {
        let list = b"Num RefCount Protocol Flags Type St Inode Path\n\
            000000006c1b1b6a: 00000002 00000000 00010000 0001 01 17 /run/a b\n\
            0000000033d1ad5f: 00000003 00000000 00000000 0001 03 18\n\
            00000000c1d61e6a: 00000002 00000000 00010000 0005 01  19 @\xff\n\
            : 00010000 00010000 00010000\n\x00";
        assert_eq!(listening(list).collect::<Vec<_>>(), [17, 19]);

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let mut child = std::process::Command::new("sleep").arg("5").spawn().unwrap();
        assert!(!on_unix(child.id()));
        child.kill().unwrap();
        child.wait().unwrap();
        let _listener = UnixListener::bind(&path).unwrap();
        let _client = UnixStream::connect(&path).unwrap();
        assert!(on_unix(std::process::id()));
        assert!(!on_unix(u32::MAX));
    }

    /// Its own sockets count, by IPv4 and IPv6. (Other tests of this process may listen, too, so it is never seen not to.)
    #[test]
    fn own_sockets() {
        let _v4 = TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(on_tcp(std::process::id()));
        let mut child = std::process::Command::new("sleep").arg("5").spawn().unwrap();
        assert!(!on_tcp(child.id()));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!on_tcp(u32::MAX));
    }
}
