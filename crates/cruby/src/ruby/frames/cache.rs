//! A map that forgets what has not been asked for lately, so that it stays small.

use std::{collections::HashMap, hash::Hash};

/// Two generations: when the young one is full it becomes the old one, and what was old is forgotten.
#[derive(Debug)]
pub(super) struct Cache<K, V> {
    young: HashMap<K, V>,
    old: HashMap<K, V>,
    capacity: usize,
}

impl<K: Eq + Hash, V> Cache<K, V> {
    /// A cache that holds at most twice as many entries.
    pub(super) fn new(capacity: usize) -> Self {
        Self { young: HashMap::new(), old: HashMap::new(), capacity }
    }

    /// The entry of a key, which is then among the young.
    pub(super) fn get(&mut self, key: &K) -> Option<&mut V> {
        if let Some((key, value)) = self.old.remove_entry(key) {
            self.insert(key, value);
        }
        self.young.get_mut(key)
    }

    /// Remembers an entry.
    pub(super) fn insert(&mut self, key: K, value: V) {
        if self.young.len() >= self.capacity && !self.young.contains_key(&key) {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(key, value);
    }

    /// Entries that are held.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.young.len() + self.old.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is asked for stays, what is not goes, and the size is bounded.
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
