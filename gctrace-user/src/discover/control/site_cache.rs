//! The sites found in files that servers map; each file is searched once.

use std::{collections::HashMap, fs::File};

use super::super::{identity::ImageKey, mappings::ExecutableMapping};
use crate::{
    elf::{ElfError, ElfImage},
    host::root_file,
    ruby::requests::RequestRefusal,
};

/// Maximum number of files; the results of earlier ones are then forgotten. A host that deploys often maps new files all the time.
const MOST: usize = 4096;

/// The sites of each file, or why its content has none.
pub(super) struct SiteCache<S>(HashMap<ImageKey, Result<Vec<S>, String>>);

/// Why a file was not searched.
enum Unsearched {
    /// Because of its content, which stays as it is.
    Content(String),
    /// It could not be read; it may be the next time.
    Unreadable(String),
}

/// A mapped file: its identity, an open descriptor, and its sites.
pub(super) type Found<S> = (ImageKey, File, Vec<S>);

impl<S> Default for SiteCache<S> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<S: Clone> SiteCache<S> {
    /// The sites of a file that a process has mapped. `Err`: the file, and why it has none.
    pub(super) fn of(
        &mut self,
        pid: u32,
        mapping: &ExecutableMapping,
        find: impl FnOnce(&ElfImage) -> Result<Vec<S>, RequestRefusal>,
    ) -> Result<Found<S>, String> {
        let shown = mapping.path.display();
        let gone = |error: std::io::Error| format!("{shown}: {error}");
        let path = mapping.open_path(pid).map_err(gone)?;
        let key = ImageKey::of(&path).map_err(gone)?;
        let file = root_file::open(&path).map_err(gone)?;
        let sites = self.remembered(key, || {
            let image = ElfImage::read(&file).map_err(|error| match error {
                ElfError::Io { .. } => Unsearched::Unreadable(format!("{shown}: {error}")),
                error => Unsearched::Content(format!("{shown}: {error}")),
            })?;
            find(&image).map_err(|error| Unsearched::Content(format!("{shown}: {error}")))
        })?;
        Ok((key, file, sites))
    }
    /// The known result for a file, or that of a search.
    fn remembered(
        &mut self,
        key: ImageKey,
        search: impl FnOnce() -> Result<Vec<S>, Unsearched>,
    ) -> Result<Vec<S>, String> {
        if let Some(known) = self.0.get(&key) {
            return known.clone();
        }
        let result = match search() {
            Err(Unsearched::Unreadable(why)) => return Err(why),
            Err(Unsearched::Content(why)) => Err(why),
            Ok(sites) => Ok(sites),
        };
        if self.0.len() >= MOST {
            self.0.clear();
        }
        self.0.insert(key, result.clone());
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the content of a file says is kept, a failure to read it is not, and the number of files is limited.
    #[test]
    fn what_is_kept() {
        let key = |inode| ImageKey::sample(inode);
        let mut cache = SiteCache::default();
        let unreadable = || Err(Unsearched::Unreadable("x: too many open files".to_owned()));
        assert!(cache.remembered(key(1), unreadable).is_err());
        assert_eq!(cache.remembered(key(1), || Ok(vec![7])), Ok(vec![7]));
        assert_eq!(cache.remembered(key(1), || unreachable!("it is known")), Ok(vec![7]));
        let refused = || Err(Unsearched::Content("x: more than 64 calls".to_owned()));
        assert!(cache.remembered(key(2), refused).is_err());
        assert!(cache.remembered(key(2), || unreachable!("it is known")).is_err());
        for inode in 3..3 * MOST as u64 {
            assert!(cache.remembered(key(inode), || Ok(vec![7])).is_ok());
            assert!(cache.0.len() <= MOST);
        }
    }
}
