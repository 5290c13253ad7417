//! Sets as gzip files whose samples can be extracted without decompressing and recompressing them.
//!
//! If a compressor discards its state after the header (a full flush), the samples begin at a byte boundary and refer to nothing before
//! them. A receiver then stores these bytes after another header.

use flate2::{Compress, Compression, Crc, Decompress, FlushCompress, FlushDecompress, Status};
use serde::de::IgnoredAny;

/// The start of a gzip file without a name or other extra fields (RFC 1952, 2.3.1): no time, fastest compression, unknown system.
const BEGIN: [u8; 10] = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 4, 255];
/// Bytes of the checksum and the size at its end.
const END: usize = 8;
/// The last bytes that a flush writes: the lengths of an empty uncompressed block (RFC 1951, 3.2.4).
const FLUSHED: [u8; 4] = [0, 0, 0xff, 0xff];
/// Number of compressed bytes in which the start of the samples is searched. Compressed headers are shorter.
const NEAR: usize = 32 << 10;

/// The bytes after the header of a set: the samples and the end. `None` if there is no header.
pub fn after_header(set: &[u8]) -> Option<&[u8]> {
    let inside = set.trim_ascii_start().strip_prefix(b"[")?;
    let mut header = serde_json::Deserializer::from_slice(inside).into_iter::<IgnoredAny>();
    header.next()?.ok()?;
    inside.get(header.byte_offset()..)
}

/// Compresses a set to such a file; any other text becomes an ordinary gzip file.
pub fn compress(set: &[u8]) -> Vec<u8> {
    let samples = after_header(set).unwrap_or_default();
    let header = set.get(..set.len() - samples.len()).unwrap_or_default();
    let mut crc = Crc::new();
    crc.update(set);
    let mut compress = Compress::new(Compression::fast(), false);
    let mut file = Vec::with_capacity(set.len() / 4 + 1024);
    file.extend_from_slice(&BEGIN);
    deflate(&mut compress, header, FlushCompress::Full, &mut file);
    deflate(&mut compress, samples, FlushCompress::Finish, &mut file);
    file.extend_from_slice(&end(&crc));
    file
}

/// The contents of a file made by [`compress`], or of the same form.
#[derive(Debug)]
pub struct Split<'a> {
    /// The decompressed set.
    pub text: Vec<u8>,
    /// The bytes after the header, compressed.
    samples: &'a [u8],
    /// Checksum and size of their text.
    crc: Crc,
}

/// Decompresses a file whose set has `size` bytes, and never more than these. `None` if it is damaged, has another size, or does not have the
/// form that [`compress`] produces.
pub fn split(file: &[u8], size: usize) -> Option<Split<'_>> {
    let (begin, rest) = file.split_first_chunk::<{ BEGIN.len() }>()?;
    let (data, sums) = rest.split_last_chunk::<END>()?;
    // Any time, compression level and system are accepted; extra fields are not.
    if begin[..4] != BEGIN[..4] {
        return None;
    }
    let near = &data[..data.len().min(NEAR)];
    let at = near.windows(FLUSHED.len()).position(|bytes| bytes == FLUSHED)? + FLUSHED.len();
    let (header, samples) = data.split_at(at);
    let mut text = Vec::with_capacity(size + 1);
    // Both parts are decompressed independently, so the samples cannot refer to anything before them.
    let ended = inflate(header, &mut text)?;
    let length = text.len();
    if ended || !inflate(samples, &mut text)? || text.len() != size {
        return None;
    }
    let (mut whole, mut crc) = (Crc::new(), Crc::new());
    whole.update(&text[..length]);
    crc.update(&text[length..]);
    whole.combine(&crc);
    let found = after_header(&text)?.len();
    // Samples that would be larger than their text are refused, so that they are compressed again.
    let good = end(&whole) == *sums && found == text.len() - length && samples.len() <= found;
    good.then_some(Split { text, samples, crc })
}

impl Split<'_> {
    /// The file with another header, which includes the opening bracket before it.
    pub fn with_header(&self, header: &[u8]) -> Vec<u8> {
        let mut file = Vec::with_capacity(self.samples.len() + header.len() / 2 + 1024);
        file.extend_from_slice(&BEGIN);
        deflate(&mut Compress::new(Compression::fast(), false), header, FlushCompress::Full, &mut file);
        file.extend_from_slice(self.samples);
        let mut crc = Crc::new();
        crc.update(header);
        crc.combine(&self.crc);
        file.extend_from_slice(&end(&crc));
        file
    }
}

/// The last bytes of a file: checksum and size.
fn end(crc: &Crc) -> [u8; END] {
    (u64::from(crc.amount()) << 32 | u64::from(crc.sum())).to_le_bytes()
}

/// Compresses all of a text, and flushes.
fn deflate(compress: &mut Compress, text: &[u8], flush: FlushCompress, file: &mut Vec<u8>) {
    let before = compress.total_in();
    loop {
        file.reserve(1024 + text.len() / 4);
        let taken = (compress.total_in() - before) as usize;
        // In memory it fails only if it is called in the wrong order.
        match compress.compress_vec(text.get(taken..).unwrap_or_default(), file, flush) {
            Ok(Status::StreamEnd) | Err(_) => return,
            // If there is capacity left, everything has been written.
            Ok(_) if flush != FlushCompress::Finish && file.len() < file.capacity() => return,
            Ok(_) => {}
        }
    }
}

/// Decompresses data into the spare capacity of a text. Returns whether the stream ended with the data; `None` if it is damaged, ended
/// earlier, or exceeds the capacity.
fn inflate(data: &[u8], text: &mut Vec<u8>) -> Option<bool> {
    let mut inflate = Decompress::new(false);
    let status = inflate.decompress_vec(data, text, FlushDecompress::Sync).ok()?;
    let all = inflate.total_in() == data.len() as u64 && text.len() < text.capacity();
    all.then_some(status == Status::StreamEnd)
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use flate2::{read::GzDecoder, write::GzEncoder};

    use super::*;

    const EXAMPLE: &[u8] = include_bytes!("../../../../tests/fixtures/tunemygc_seed.json");

    fn expanded(file: &[u8]) -> Vec<u8> {
        let mut text = Vec::new();
        GzDecoder::new(file).read_to_end(&mut text).unwrap();
        text
    }

    /// Any gzip reader can decompress the compressed file, and the file with another header.
    #[test]
    fn another_header() {
        let set = EXAMPLE.trim_ascii_end();
        let samples = after_header(set).unwrap();
        // Many samples: more than fit into the first buffers.
        let more = samples[..samples.len() - 1].repeat(50);
        let set = [&set[..set.len() - 1], &more, b"]"].concat();
        let file = compress(&set);
        assert_eq!(expanded(&file), set);
        let split = split(&file, set.len()).unwrap();
        assert_eq!(split.text, set);
        for header in [b"[[null]".to_vec(), b"x".repeat(200_000)] {
            let other = split.with_header(&header);
            assert_eq!(expanded(&other), [&header, after_header(&set).unwrap()].concat());
        }
        for text in [b"".as_slice(), b"[", b"no set", b"[[1]]"] {
            assert_eq!(expanded(&compress(text)), text);
        }
    }

    /// Nothing is taken from a file that is damaged, has another size, or has samples that refer to its header.
    #[test]
    fn others() {
        let set = EXAMPLE.trim_ascii_end();
        let file = compress(set);
        let taken = |file: &[u8], size| split(file, size).map(|split| split.text);
        assert_eq!(taken(&file, set.len()).as_deref(), Some(set));
        assert_eq!((taken(&file, set.len() - 1), taken(&file, set.len() + 1)), (None, None));
        assert_eq!(taken(&[&file[..], b"x"].concat(), set.len()), None);
        for at in 0..file.len() {
            assert_eq!(taken(&file[..at], set.len()), None, "{at}");
            let mut damaged = file.clone();
            damaged[at] ^= 1;
            let text = taken(&damaged, set.len());
            assert!(text.is_none() || text.as_deref() == Some(set), "{at}");
        }
        // Files of an ordinary compressor, with and without a flush in the middle; and two files.
        let mut other = GzEncoder::new(Vec::new(), Compression::fast());
        std::io::Write::write_all(&mut other, set).unwrap();
        let other = other.finish().unwrap();
        assert_eq!(taken(&other, set.len()), None);
        let samples = after_header(set).unwrap();
        let mut flushed = GzEncoder::new(Vec::new(), Compression::fast());
        std::io::Write::write_all(&mut flushed, &set[..set.len() - samples.len()]).unwrap();
        std::io::Write::flush(&mut flushed).unwrap();
        std::io::Write::write_all(&mut flushed, &set[..set.len() - samples.len()]).unwrap();
        let flushed = flushed.finish().unwrap();
        assert_eq!(taken(&flushed, expanded(&flushed).len()), None);
        assert_eq!(taken(&[&file[..], &file[..]].concat(), set.len()), None);
    }
}
