//! The sites found in files that servers map; each file is searched once.

use std::{collections::HashMap, fs::File};

use super::super::{identity::ImageKey, mappings::ExecutableMapping};
use crate::{elf::ElfImage, host::root_file, ruby::requests::RequestRefusal};

/// The sites of each file, or why it has none.
pub(super) struct SiteCache<S>(HashMap<ImageKey, Result<Vec<S>, String>>);

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
        let search = || {
            let image = ElfImage::read(&file).map_err(|error| format!("{shown}: {error}"))?;
            find(&image).map_err(|error| format!("{shown}: {error}"))
        };
        let sites = self.0.entry(key).or_insert_with(search).clone()?;
        Ok((key, file, sites))
    }
}
