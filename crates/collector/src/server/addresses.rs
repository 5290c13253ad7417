//! Counts connections per address, so that no client can occupy all of them.

use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Default limit on the simultaneous connections of one address.
pub(super) const DEFAULT: u32 = 256;

/// The number of open connections of each address.
#[derive(Debug)]
pub(super) struct Addresses {
    /// The operator's limit; 0 means no limit.
    limit: Option<u32>,
    open: Mutex<HashMap<IpAddr, u32>>,
}

/// One of an address's connections. Dropping it releases the connection.
#[derive(Debug)]
pub(super) struct AddressSlot {
    of: Option<(Arc<Addresses>, IpAddr)>,
}

impl Addresses {
    /// Without `limit`, the limit is [`DEFAULT`], except for loopback, which has no limit: all clients of a proxy on this host
    /// connect from there.
    pub(super) fn new(limit: Option<u32>) -> Self {
        Self { limit, open: Mutex::default() }
    }

    fn open(&self) -> MutexGuard<'_, HashMap<IpAddr, u32>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes one of the connections of an address; `None` if that address is at its limit.
    pub(super) fn enter(self: &Arc<Self>, address: IpAddr) -> Option<AddressSlot> {
        let address = network(address);
        let limit = match self.limit {
            Some(0) => return Some(AddressSlot { of: None }),
            Some(limit) => limit,
            None if address.is_loopback() => return Some(AddressSlot { of: None }),
            None => DEFAULT,
        };
        let mut open = self.open();
        let count = open.entry(address).or_default();
        if *count >= limit {
            return None;
        }
        *count += 1;
        Some(AddressSlot { of: Some((Arc::clone(self), address)) })
    }
}

impl Drop for AddressSlot {
    fn drop(&mut self) {
        let Some((addresses, address)) = self.of.take() else { return };
        let mut open = addresses.open();
        if let Some(count) = open.get_mut(&address) {
            *count -= 1;
            if *count == 0 {
                open.remove(&address);
            }
        }
    }
}

/// The network of one owner: an IPv4 address, or the /64 of an IPv6 address, since a single host may use a whole /64.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(six) if !six.is_loopback() => IpAddr::V6((u128::from(six) & (u128::MAX << 64)).into()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each address has its own connections, which are released; all addresses of a /64 count as one, as do an address and its mapped form;
    /// loopback has no limit unless one is set.
    #[test]
    fn places() {
        let at = |text: &str| text.parse::<IpAddr>().unwrap();
        let few = Arc::new(Addresses::new(Some(2)));
        let first = few.enter(at("10.0.0.1"));
        let second = few.enter(at("::ffff:10.0.0.1"));
        assert!(first.is_some() && second.is_some() && few.enter(at("10.0.0.1")).is_none());
        assert!(few.enter(at("10.0.0.2")).is_some());
        drop(second);
        assert!(few.enter(at("10.0.0.1")).is_some());
        let _six = [few.enter(at("2001:db8::1")), few.enter(at("2001:db8::ffff:1"))];
        assert!(few.enter(at("2001:db8::2")).is_none() && few.enter(at("2001:db8:0:1::2")).is_some());
        drop(first);
        assert_eq!(few.open().len(), 1, "only the /64 has connections");
        let default = Arc::new(Addresses::new(None));
        let many = |address: &str| {
            (0..2 * DEFAULT).filter_map(|_| default.enter(at(address))).collect::<Vec<_>>().len()
        };
        assert_eq!((many("10.0.0.1"), many("127.0.0.1"), many("::1")), (256, 512, 512));
        assert!(default.open().is_empty());
        let none = Arc::new(Addresses::new(Some(0)));
        assert_eq!((0..1000).filter_map(|_| none.enter(at("10.0.0.1"))).count(), 1000);
    }
}
