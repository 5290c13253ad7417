//! What chunks have in common: most have the names, frames and Rubies of the previous one. They share these, so that
//! nothing is copied for each chunk, and readers can recognise them by address.

use std::{collections::HashSet, sync::Arc};

use super::{Invalid, WORDS};
use crate::model::{Image, stack::Frame};

/// Maximum number of names, and of frames, kept; above it, all of them are forgotten.
const MOST: usize = 1 << 16;
/// Maximum bytes of these names.
const MOST_BYTES: usize = 16 << 20;
/// Maximum number of Rubies kept.
const IMAGES: usize = 64;

/// A text in the tables of a chunk.
#[derive(Clone, Debug)]
pub(super) struct Text {
    pub(super) text: Arc<str>,
    /// The same word as a constant of the model, if it is one.
    pub(super) word: Option<&'static str>,
}

/// The shared contents of earlier chunks.
#[derive(Debug, Default)]
pub(in crate::trace_file) struct Known {
    texts: HashSet<Arc<str>>,
    bytes: usize,
    frames: HashSet<Arc<Frame>>,
    images: Vec<Arc<Image>>,
    /// The latest entry at each index of the tables.
    last_texts: Vec<Text>,
    last_frames: Vec<Arc<Frame>>,
}

/// Remembers the entry at an index, up to a maximum index.
fn note<T>(last: &mut Vec<T>, at: usize, one: T) {
    if let Some(before) = last.get_mut(at) {
        *before = one;
    } else if last.len() < MOST {
        last.push(one);
    }
}

impl Known {
    /// The text at this index of a table.
    pub(super) fn text(&mut self, at: usize, text: &[u8]) -> Result<Text, Invalid> {
        if let Some(last) = self.last_texts.get(at)
            && last.text.as_bytes() == text
        {
            return Ok(last.clone());
        }
        let text = str::from_utf8(text).map_err(|_| Invalid::new("a text is not UTF-8".to_owned()))?;
        let shared = if let Some(known) = self.texts.get(text) {
            Arc::clone(known)
        } else {
            if self.texts.len() >= MOST || self.bytes + text.len() > MOST_BYTES {
                self.texts.clear();
                self.last_texts.clear();
                self.bytes = 0;
            }
            let new = Arc::<str>::from(text);
            self.bytes += text.len();
            self.texts.insert(Arc::clone(&new));
            new
        };
        let text = Text { word: WORDS.get(&*shared).copied(), text: shared };
        note(&mut self.last_texts, at, text.clone());
        Ok(text)
    }

    /// The frame at this index of a table.
    pub(super) fn frame(&mut self, at: usize, frame: Frame) -> Arc<Frame> {
        if let Some(last) = self.last_frames.get(at)
            && **last == frame
        {
            return Arc::clone(last);
        }
        let shared = if let Some(known) = self.frames.get(&frame) {
            Arc::clone(known)
        } else {
            if self.frames.len() >= MOST {
                self.frames.clear();
                self.last_frames.clear();
            }
            let new = Arc::new(frame);
            self.frames.insert(Arc::clone(&new));
            new
        };
        note(&mut self.last_frames, at, Arc::clone(&shared));
        shared
    }

    /// A Ruby, shared with earlier chunks.
    pub(super) fn image(&mut self, image: Image) -> Arc<Image> {
        if let Some(known) = self.images.iter().find(|known| ***known == image) {
            return Arc::clone(known);
        }
        let image = Arc::new(image);
        if self.images.len() < IMAGES {
            self.images.push(Arc::clone(&image));
        }
        image
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::stack::FrameKind;

    /// Equal texts and frames of different chunks are shared, whatever their index; the number kept is bounded.
    #[test]
    fn shares() {
        let mut known = Known::default();
        let one = known.text(0, b"major").unwrap();
        assert_eq!(one.word, WORDS.get("major").copied());
        assert!(Arc::ptr_eq(&one.text, &known.text(0, b"major").unwrap().text));
        assert!(Arc::ptr_eq(&one.text, &known.text(5, b"major").unwrap().text));
        assert_eq!(&*known.text(0, b"Orders#show").unwrap().text, "Orders#show");
        assert!(Arc::ptr_eq(&one.text, &known.text(0, b"major").unwrap().text));
        assert!(known.text(0, &[0xff]).is_err());
        let frame = |line| Frame {
            kind: FrameKind::Ruby,
            name: Arc::clone(&one.text),
            file: None,
            line,
            first_line: 1,
            address: 0,
        };
        let first = known.frame(0, frame(1));
        assert!(!Arc::ptr_eq(&first, &known.frame(0, frame(2))));
        assert!(Arc::ptr_eq(&first, &known.frame(0, frame(1))));
        for n in 0..MOST as u32 + 10 {
            let text = known.text(n as usize, n.to_string().as_bytes()).unwrap();
            assert_eq!((&*text.text, known.frame(n as usize, frame(n)).line), (&*n.to_string(), n));
        }
        assert!(known.texts.len() <= MOST && known.frames.len() <= MOST);
        assert!(known.last_texts.len() <= MOST && known.last_frames.len() <= MOST);
        let large = vec![b'x'; MOST_BYTES];
        known.text(1, &large).unwrap();
        known.text(2, &large[1..]).unwrap();
        assert_eq!((known.texts.len(), known.bytes), (1, MOST_BYTES - 1));
    }
}
