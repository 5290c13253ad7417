//! Where the bytes of a recording are stored: in a file, or in memory for a run in progress.

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    os::unix::fs::FileExt as _,
    sync::Arc,
};

/// Bytes that do not change, for any number of readers.
#[derive(Clone, Debug)]
pub(crate) enum Medium {
    File(Arc<File>),
    Memory(Arc<Pieces>),
}

/// Consecutive pieces of a recording.
#[derive(Debug)]
pub(crate) struct Pieces {
    /// Each piece with the offset of its end.
    pieces: Vec<(u64, Arc<[u8]>)>,
}

impl Pieces {
    pub(crate) fn new(pieces: Vec<Arc<[u8]>>) -> Self {
        let mut end = 0;
        let pieces = pieces.into_iter().map(|piece| {
            end += piece.len() as u64;
            (end, piece)
        });
        Self { pieces: pieces.collect() }
    }

    pub(crate) fn length(&self) -> u64 {
        self.pieces.last().map_or(0, |(end, _)| *end)
    }

    fn read_at(&self, to: &mut [u8], at: u64) -> usize {
        let number = self.pieces.partition_point(|(end, _)| *end <= at);
        let Some((end, piece)) = self.pieces.get(number) else { return 0 };
        // The rest of the piece, which is at most its length.
        let rest = &piece[piece.len() - (*end - at) as usize..];
        let read = rest.len().min(to.len());
        to[..read].copy_from_slice(&rest[..read]);
        read
    }
}

impl Medium {
    fn read_at(&self, to: &mut [u8], at: u64) -> io::Result<usize> {
        match self {
            Self::File(file) => file.read_at(to, at),
            Self::Memory(pieces) => Ok(pieces.read_at(to, at)),
        }
    }

    /// A reader of the first `end` bytes.
    pub(crate) fn part(&self, end: u64) -> Part {
        Part { medium: self.clone(), at: 0, end }
    }
}

/// A reader with its own position, which ends at a fixed offset even if the file grows.
#[derive(Debug)]
pub(crate) struct Part {
    medium: Medium,
    at: u64,
    end: u64,
}

impl Read for Part {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let room = usize::try_from(self.end.saturating_sub(self.at)).unwrap_or(usize::MAX).min(to.len());
        let read = self.medium.read_at(&mut to[..room], self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}

impl Seek for Part {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let at = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
            SeekFrom::End(by) => self.end.checked_add_signed(by),
        };
        self.at = at.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pieces of any lengths are read as one, from any offset.
    #[test]
    fn pieces() {
        let lengths = [3_usize, 0, 1, 7, 0, 5];
        let whole: Vec<u8> = (0..16).collect();
        let mut rest = &whole[..];
        let pieces = lengths.map(|length| {
            let (piece, left) = rest.split_at(length);
            rest = left;
            Arc::from(piece)
        });
        let medium = Medium::Memory(Arc::new(Pieces::new(pieces.to_vec())));
        for from in 0..=17_u64 {
            for end in [0, 5, 16, 99] {
                let mut part = medium.part(end);
                part.seek(SeekFrom::Start(from)).unwrap();
                let mut read = Vec::new();
                part.read_to_end(&mut read).unwrap();
                let expected = whole.get(from as usize..(end as usize).min(16)).unwrap_or_default();
                assert_eq!(read, expected, "{from} {end}");
            }
        }
    }
}
