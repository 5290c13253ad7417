//! Properties of an ELF file that are read before any of its code is loaded.

use super::headers::Headers;
use super::image::build_id;
use super::{BuildId, ElfError, LoadSegment, ReadAt};
use crate::address::Svma;

/// The identity of an image and where its contents lie in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageHead {
    /// Size of the whole file, bytes.
    pub file_size: u64,
    /// Its build id, if it has one.
    pub build_id: Option<BuildId>,
    /// The loadable segments, in file order.
    pub segments: Vec<LoadSegment>,
}

impl ImageHead {
    /// Reads headers and build id, which takes well under a millisecond.
    pub fn read(source: &(impl ReadAt + ?Sized)) -> Result<Self, ElfError> {
        let headers = Headers::read(source)?;
        let file_size = source.size().map_err(|source| ElfError::Io { what: "the file size", source })?;
        Ok(Self { file_size, build_id: build_id(source, &headers)?, segments: headers.segments })
    }

    /// Fills `buffer` with the file's bytes at a stated address; `false` if the file does not hold that many bytes there.
    pub fn read_at(&self, source: &(impl ReadAt + ?Sized), address: Svma, buffer: &mut [u8]) -> bool {
        let len = buffer.len() as u64;
        let offset = self.segments.iter().find_map(|segment| {
            let at = address.0.checked_sub(segment.address.0)?;
            let inside = at.checked_add(len)? <= segment.file_size;
            inside.then(|| segment.offset.0.checked_add(at))?
        });
        offset.is_some_and(|offset| source.read_exact_at(buffer, offset).is_ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::debian::{libruby_file, libruby_image};

    /// The head agrees with the fully read image, and reads the same bytes.
    #[test]
    fn agrees_with_the_image() {
        let file = libruby_file();
        let (head, image) = (ImageHead::read(&file).unwrap(), libruby_image());
        assert_eq!(head.segments, image.segments());
        assert_eq!(head.build_id.as_ref(), image.build_id());
        assert_eq!(head.file_size, file.metadata().unwrap().len());
        let version = image.symbol("ruby_version").unwrap().address;
        let expected = image.c_string(version).unwrap().as_bytes();
        assert!(expected.starts_with(b"3.1."));
        let mut text = vec![0xff; expected.len() + 1];
        assert!(head.read_at(&file, version, &mut text));
        assert_eq!(text, [expected, &[0]].concat());
        assert!(!head.read_at(&file, Svma(u64::MAX - 2), &mut text));
    }
}
