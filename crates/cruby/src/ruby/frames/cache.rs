//! A map that drops entries which have not been used recently, so that its size stays bounded.

use std::{collections::HashMap, hash::Hash};

/// Two generations: when the young one is full it becomes the old one, and the previous old one is dropped.
#[derive(Debug)]
pub(super) struct Cache<K, V> {
    young: HashMap<K, V>,
    old: HashMap<K, V>,
    capacity: usize,
}

impl<K: Eq + Hash, V> Cache<K, V> {
    /// A cache that holds at most twice `capacity` entries.
    pub(super) fn new(capacity: usize) -> Self {
        Self { young: HashMap::new(), old: HashMap::new(), capacity }
    }

    /// The entry of a key; it is moved to the young generation.
    pub(super) fn get(&mut self, key: &K) -> Option<&mut V> {
        if let Some((key, value)) = self.old.remove_entry(key) {
            self.insert(key, value);
        }
        self.young.get_mut(key)
    }

    /// Adds or replaces an entry.
    pub(super) fn insert(&mut self, key: K, value: V) {
        if self.young.len() >= self.capacity && !self.young.contains_key(&key) {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(key, value);
    }

    /// Number of entries held.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.young.len() + self.old.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Used entries stay, unused ones are dropped, and the size is bounded.
    #[test]
    fn forgets() {
        let mut cache = Cache::new(10);
        for number in 0..1000 {
            cache.insert(number, number * 2);
            assert_eq!(cache.get(&0), Some(&mut 0), "{number}");
            assert!(cache.len() <= 20);
        }
        assert_eq!(cache.get(&1), None);
        assert_eq!(cache.get(&999), Some(&mut 1998));
    }
}
