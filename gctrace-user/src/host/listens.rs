//! Whether a process listens, and the length of its accept queues.

use std::{
    collections::{HashMap, HashSet, hash_map::Entry},
    fs::File,
    io::{BufRead, BufReader},
    os::unix::fs::MetadataExt as _,
};

use procfs::process::{FDTarget, Process};

use super::proc_root;
use crate::model::load::AcceptQueue;

/// Whether a process has a listening TCP socket. `false` if that cannot be read.
pub fn on_tcp(pid: u32) -> bool {
    let own = proc_root::process(pid).map(|process| sockets(&process)).unwrap_or_default();
    // Check this first: most processes have none.
    !own.is_empty()
        && (0..LISTS.len())
            .filter_map(|list| read_list(pid, list))
            .flatten()
            .any(|queue| own.contains(&queue.inode))
}

/// Whether a process has a listening Unix socket. `false` if that cannot be read.
pub fn on_unix(pid: u32) -> bool {
    let own = proc_root::process(pid).map(|process| sockets(&process)).unwrap_or_default();
    // Check this first: the list of a host's sockets may be long.
    !own.is_empty()
        && std::fs::read(proc_root::path(pid, "net/unix"))
            .is_ok_and(|list| listening(&list).any(|inode| own.contains(&inode)))
}

/// The accept queues of the TCP sockets on which a process listens.
#[derive(Default)]
pub struct AcceptQueues {
    /// The network namespace of the process, by its inode, as of the lookup.
    namespace: u64,
    /// Inodes of these sockets in each of [`LISTS`], as of the lookup.
    own: [HashSet<u64>; LISTS.len()],
}

impl AcceptQueues {
    /// Looks up the listening sockets of a process. That takes longer than reading their queues: it may have many connections.
    pub fn of(pid: u32, lists: &mut ListenLists) -> Self {
        let Some(namespace) = namespace_of(pid) else { return Self::default() };
        let mut own = [0, 1].map(|list| lists.inodes(pid, namespace, list));
        if own.iter().any(|listening| !listening.is_empty()) {
            let sockets = proc_root::process(pid).map(|process| sockets(&process)).unwrap_or_default();
            for listening in &mut own {
                listening.retain(|inode| sockets.contains(inode));
            }
        }
        Self { namespace, own }
    }

    /// Reads the queues of those sockets that still listen, in the order of their inodes; none if one of the lists they are in is too long.
    pub fn read(&self, pid: u32, lists: &mut ListenLists) -> Vec<AcceptQueue> {
        let mut queues = Vec::new();
        // A list without a socket of this process is not read.
        for (list, own) in self.own.iter().enumerate().filter(|(_, own)| !own.is_empty()) {
            let Some(all) = lists.read(pid, self.namespace, list) else { return Vec::new() };
            queues.extend(all.iter().copied().filter(|queue| own.contains(&queue.inode)));
        }
        queues.sort_unstable_by_key(|queue| queue.inode);
        queues
    }
}

/// The lists of TCP sockets of a network namespace, by IPv4 and IPv6.
const LISTS: [&str; 2] = ["net/tcp", "net/tcp6"];
/// Maximum number of listening sockets in a list: anybody in the namespace can create more.
const MOST: usize = 4096;
/// Bytes that are asked for at a time: about two lines (150 bytes in `net/tcp`). The kernel fills the buffer with connections, if there is room,
/// and to find them it searches its hash table of all connections (`established_get_first`, `net/ipv4/tcp_ipv4.c`): 7 ms for 262,144 buckets.
const READ_BYTES: usize = 300;

/// The listening sockets of network namespaces at one moment. Processes in the same namespace share a list, which is read once: the workers of a
/// cluster, for example.
#[derive(Default)]
pub struct ListenLists(HashMap<(u64, usize), Option<Vec<AcceptQueue>>>);

impl ListenLists {
    /// The queues in a list, read through a process of the namespace; `None` if they are too many or cannot be read.
    fn read(&mut self, pid: u32, namespace: u64, list: usize) -> Option<&[AcceptQueue]> {
        let entry = match self.0.entry((namespace, list)) {
            Entry::Occupied(entry) => entry.into_mut(),
            // If the process has left it or ended, another process of the namespace may still be there.
            Entry::Vacant(_) if namespace_of(pid) != Some(namespace) => return None,
            Entry::Vacant(entry) => entry.insert(bounded(read_list(pid, list)?)),
        };
        entry.as_deref()
    }

    fn inodes(&mut self, pid: u32, namespace: u64, list: usize) -> HashSet<u64> {
        let all = self.read(pid, namespace, list).unwrap_or_default();
        all.iter().map(|queue| queue.inode).collect()
    }
}

/// The network namespace of a process, by its inode; `None` if it cannot be read.
fn namespace_of(pid: u32) -> Option<u64> {
    std::fs::metadata(proc_root::path(pid, "ns/net")).map(|namespace| namespace.ino()).ok()
}

/// The listening sockets in a list of the network namespace of a process; `None` if it cannot be opened.
fn read_list(pid: u32, list: usize) -> Option<impl Iterator<Item = AcceptQueue>> {
    let file = File::open(proc_root::path(pid, LISTS[list])).ok()?;
    Some(queues(BufReader::with_capacity(READ_BYTES, file)))
}

/// All queues, or `None` if there are too many: part of them would give a wrong sum.
fn bounded(all: impl Iterator<Item = AcceptQueue>) -> Option<Vec<AcceptQueue>> {
    let read: Vec<_> = all.take(MOST + 1).collect();
    (read.len() <= MOST).then_some(read)
}

/// The queues in one list. Listening sockets come before all connections (`tcp_seek_last_pos`, `net/ipv4/tcp_ipv4.c`), of which there may be
/// very many: reading stops at the first connection.
fn queues(list: impl BufRead) -> impl Iterator<Item = AcceptQueue> {
    /// `TCP_LISTEN` (`include/net/tcp_states.h`).
    const LISTENS: &str = "0A";
    let lines = list.split(b'\n').skip(1).map_while(Result::ok);
    lines.map_while(|line| {
        let mut words = str::from_utf8(&line).ok()?.split_ascii_whitespace();
        // Number, addresses, state, queues (in bytes; for a listening socket the second is `sk_ack_backlog`: `get_tcp4_sock`), timer,
        // retransmits, user, probes, inode.
        let listens = words.nth(3)? == LISTENS;
        let (_, waiting) = words.next()?.split_once(':')?;
        let waiting = u32::from_str_radix(waiting, 16).ok()?;
        let inode = words.nth(4)?.parse().ok()?;
        listens.then_some(AcceptQueue { inode, waiting })
    })
}

/// Inodes of the listening sockets in `/proc/PID/net/unix` (`unix_seq_show`): address, references, protocol, flags, type,
/// state, inode and optionally a name, which may contain any bytes.
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

#[cfg(test)]
mod tests {
    use std::{
        net::{TcpListener, TcpStream},
        os::unix::net::{UnixListener, UnixStream},
    };

    use super::*;

    /// Only listening sockets count, and names may contain any bytes.
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

    /// The queue length of each listening socket, and nothing else: no connections, no garbage, no other process's sockets.
    #[test]
    fn accept_queues() {
        let list = b"  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n\
            \x20  0: 0100007F:1F90 00000000:0000 0A 00000000:00000011 00:00000000 00000000     0        0 31 1 0000000000000000 100 0 0 10 0\n\
            \x20  1: 0100007F:1F91 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 32 1 0000000000000000 100 0 0 10 0\n\
            \x20  2: 0100007F:1F90 0100007F:9C40 01 00000000:00000005 00:00000000 00000000     0        0 33 1 0000000000000000 20 4 30 10 -1\n\
            \x20  3: 0100007F:1F90 00000000:0000 0A 00000000:00000011 00:00000000 00000000     0        0 34 1 0000000000000000 100 0 0 10 0\n";
        let found: Vec<_> = queues(list.as_slice()).collect();
        assert_eq!(found, [(31, 17), (32, 0)].map(|(inode, waiting)| AcceptQueue { inode, waiting }));
        for cut in 0..list.len() {
            let part: Vec<_> = queues(&list[..cut]).collect();
            assert!(part.len() <= found.len());
        }
        assert_eq!(queues(b"a\n\xff 0A\n".as_slice()).count(), 0);

        let many = |count: u64| {
            bounded((0..count).map(|inode| AcceptQueue { inode, waiting: 1 })).map(|all| all.len())
        };
        assert_eq!((many(MOST as u64), many(MOST as u64 + 1), many(u64::MAX)), (Some(MOST), None, None));

        let own = TcpListener::bind("127.0.0.1:0").unwrap();
        let six = TcpListener::bind("[::1]:0").ok();
        let pid = std::process::id();
        let of = AcceptQueues::of(pid, &mut ListenLists::default());
        let read = |pid| of.read(pid, &mut ListenLists::default());
        let before: u64 = read(pid).iter().map(|queue| u64::from(queue.waiting)).sum();
        let clients: Vec<_> =
            [Some(&own), Some(&own), six.as_ref()].into_iter().flatten().map(connected).collect();
        let waiting: u64 = read(pid).iter().map(|queue| u64::from(queue.waiting)).sum();
        // Other tests of this process may also listen and accept.
        assert!(waiting >= before.max(clients.len() as u64), "{waiting} of {before} and {}", clients.len());
        let mut child = std::process::Command::new("sleep").arg("5").spawn().unwrap();
        let lists = &mut ListenLists::default();
        assert_eq!(AcceptQueues::of(child.id(), lists).read(child.id(), lists), []);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(AcceptQueues::of(u32::MAX, lists).read(u32::MAX, lists), []);
        assert_eq!(read(u32::MAX), []);
        // The child is in the same namespace: its lookup has read both lists, and they are not read again.
        let again = of.read(u32::MAX, lists);
        let again: u64 = again.iter().map(|queue| u64::from(queue.waiting)).sum();
        assert!(again >= clients.len() as u64, "{again} of {}", clients.len());
    }

    fn connected(to: &TcpListener) -> TcpStream {
        TcpStream::connect(to.local_addr().unwrap()).unwrap()
    }

    /// The process's own sockets count, by IPv4 and IPv6. (Other tests of this process may listen as well, so the negative case is not tested.)
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
