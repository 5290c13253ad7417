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

fn has_listening_socket(process: &Process) -> bool {
    let Ok(descriptors) = process.fd() else { return false };
    let inode = |target| match target {
        FDTarget::Socket(inode) => Some(inode),
        _ => None,
    };
    let own: HashSet<u64> = descriptors.flatten().filter_map(|fd| inode(fd.target)).collect();
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
    use std::net::TcpListener;

    use super::*;

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
