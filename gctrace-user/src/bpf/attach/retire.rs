//! Images and the links of their probes: from the reservation of an index until its release.

use std::{collections::VecDeque, thread::JoinHandle};

use gctrace_common::config::{ImageConfig, MAX_IMAGES};

use super::Probes;
use crate::bpf::{
    errors::AttachError,
    links::{self, Link},
};

/// The links of an image's probes.
#[derive(Default)]
pub(super) struct ImageLinks {
    pub(super) links: Vec<Link>,
    /// Number of probes.
    sites: usize,
}

impl Probes {
    /// Reserves an index: an unused one while there are any, then the one released longest ago. So by then all records of its
    /// previous image have been read. Waits until the probes of that image are detached.
    pub fn reserve_image(&mut self) -> Result<u32, AttachError> {
        let reserved = reserve(&mut self.next_image, &mut self.free_images);
        let (index, detaching) = reserved.ok_or(AttachError::TooManyImages)?;
        if let Some(Err(panic)) = detaching.map(JoinHandle::join) {
            std::panic::resume_unwind(panic);
        }
        Ok(index)
    }

    /// How many more images fit.
    pub fn spare_images(&self) -> usize {
        (MAX_IMAGES - self.next_image) as usize + self.free_images.len()
    }

    /// Closes an image to events, detaches its probes and releases its index. Another thread detaches the probes, because the kernel
    /// takes a while (see [`links`]).
    pub fn retire_image(&mut self, index: u32) {
        let closed = self.images.set(index, ImageConfig::default(), 0);
        let ImageLinks { mut links, sites } = self.links.remove(&index).unwrap_or_default();
        self.attached -= sites;
        links.extend(self.take_gvl(index));
        // If no thread can be spawned, the closure is dropped here and with it the links.
        let detaching =
            std::thread::Builder::new().name("gctrace-detach".to_owned()).spawn(move || links::detach(links));
        if let Err(error) = closed {
            log::warn!("closing an image: {error}; its index is not used again");
            return drop(detaching.map(JoinHandle::join));
        }
        self.free_images.push_back((index, detaching.ok()));
    }

    /// Waits until the probes of all retired images are detached.
    pub fn await_detached(&mut self) {
        for (_, detaching) in &mut self.free_images {
            if let Some(Err(panic)) = detaching.take().map(JoinHandle::join) {
                std::panic::resume_unwind(panic);
            }
        }
    }

    /// Stores the links of an image's probes.
    pub(super) fn keep(&mut self, image: u32, sites: usize, links: Vec<Link>) {
        let kept = self.links.entry(image).or_default();
        kept.sites += sites;
        kept.links.extend(links);
        self.attached += sites;
    }
}

/// Returns an index and the handle to wait for, if any.
fn reserve<T>(next: &mut u32, free: &mut VecDeque<(u32, Option<T>)>) -> Option<(u32, Option<T>)> {
    if *next < MAX_IMAGES {
        *next += 1;
        return Some((*next - 1, None));
    }
    free.pop_front()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An index is reused only when all have been used, the one released first first, along with its handle to wait for.
    #[test]
    fn indices() {
        let (mut next, mut free) = (0, VecDeque::new());
        assert_eq!(reserve(&mut next, &mut free), Some((0, None)));
        free.push_back((0, Some('a')));
        let rest: Vec<_> = (1..MAX_IMAGES).map(|_| reserve(&mut next, &mut free).unwrap()).collect();
        assert!(rest.into_iter().eq((1..MAX_IMAGES).map(|index| (index, None))));
        free.push_back((7, None));
        assert_eq!(
            [0; 3].map(|_| reserve(&mut next, &mut free)),
            [Some((0, Some('a'))), Some((7, None)), None]
        );
    }
}
