//! Layout of tables and mappings in chunks. Pure functions.

use gctrace_common::unwind::{
    CHUNK_MAPPINGS, CHUNK_WORDS, Chunk, MAPPING_WORDS, PAGE_BYTES, PageWord, UnwindMapping, UnwindRow,
};

/// Maximum number of pages of an image: 256 MiB of code, for which the page words alone take 8 MiB.
const MAX_PAGES: u32 = 1 << 20;

/// A table in the form in which it is written into a run of chunks.
pub(super) struct Layout {
    pub chunks: Vec<Box<Chunk>>,
    pub pages: u32,
}

/// Lays out a table (rows sorted by address); `None`: it is too large.
pub(super) fn table(rows: &[UnwindRow]) -> Option<Layout> {
    let pages = rows.last().map_or(0, |row| row.pc / PAGE_BYTES + 1);
    if pages > MAX_PAGES {
        return None;
    }
    let mut words = vec![0; pages as usize];
    // The row in effect at the start of a page.
    let mut before = UnwindRow::default();
    let mut rest = rows;
    for page in 0..pages {
        let start = page * PAGE_BYTES;
        let count = rest.partition_point(|row| row.pc - start < PAGE_BYTES);
        let (mut inside, behind) = rest.split_at(count);
        rest = behind;
        if let Some((first, others)) = inside.split_first()
            && first.pc == start
        {
            before = *first;
            inside = others;
        }
        // Consecutive pages without rows of their own share one row.
        let repeated =
            inside.is_empty() && words.len() > pages as usize && words.last() == Some(&before.to_word());
        if !repeated {
            let room = CHUNK_WORDS - words.len() % CHUNK_WORDS;
            if room < inside.len() + 1 {
                words.resize(words.len() + room, 0);
            }
            words.push(before.to_word());
        }
        let first = words.len() as u32 - 1;
        words[page as usize] = PageWord { first, more: inside.len() as u32 }.to_word();
        words.extend(inside.iter().map(|row| row.to_word()));
        before = inside.last().copied().unwrap_or(before);
    }
    let filled = |words: &[u64]| {
        let mut chunk = Box::new([0; CHUNK_WORDS]);
        chunk[..words.len()].copy_from_slice(words);
        chunk
    };
    Some(Layout { chunks: words.chunks(CHUNK_WORDS).map(filled).collect(), pages })
}

/// Lays out the mappings of a process, sorted by address; those that exceed the capacity of a chunk are left out.
pub(super) fn mappings(mappings: &[UnwindMapping]) -> Box<Chunk> {
    let mut chunk = Box::new([UnwindMapping::END; CHUNK_WORDS]);
    for (words, mapping) in chunk.chunks_exact_mut(MAPPING_WORDS).zip(mappings).take(CHUNK_MAPPINGS) {
        words.copy_from_slice(&mapping.to_words());
    }
    chunk
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use proptest::prelude::*;

    use super::*;
    use crate::elf::UnwindTable;

    /// The search algorithm of the BPF programs.
    fn find(layout: &Layout, offset: u32) -> Option<UnwindRow> {
        let page = offset / PAGE_BYTES;
        if page >= layout.pages {
            return None;
        }
        let at = |word: u32| layout.chunks[word as usize / CHUNK_WORDS][word as usize % CHUNK_WORDS];
        let page = PageWord::from_word(at(page));
        assert!((page.first as usize % CHUNK_WORDS) + (page.more as usize) < CHUNK_WORDS);
        let mut base = 0;
        let mut half = PAGE_BYTES / 2;
        while half > 0 {
            let probe = base + half;
            if probe <= page.more && at(page.first + probe) as u32 <= offset {
                base += half;
            }
            half /= 2;
        }
        Some(UnwindRow::from_word(at(page.first + base)))
    }

    fn linear(rows: &[UnwindRow], offset: u32) -> UnwindRow {
        rows.iter().rev().find(|row| row.pc <= offset).copied().unwrap_or_default()
    }

    proptest! {
        /// Every address finds the same row as a linear search, however dense or sparse the rows are.
        #[test]
        fn search(
            gaps in prop::collection::vec(prop_oneof![4 => 1_u32..3, 3 => 1_u32..40, 1 => 1_u32..5000], 1..1500),
            probes in prop::collection::vec(any::<prop::sample::Index>(), 200),
        ) {
            let mut pc = gaps[0] - 1;
            let mut rows = Vec::new();
            for (i, gap) in gaps.iter().enumerate() {
                rows.push(UnwindRow { pc, cfa: i as i16, kind: UnwindRow::RSP, rbp: -2 });
                pc += gap;
            }
            let layout = table(&rows).unwrap();
            let end = rows.last().unwrap().pc as usize;
            for probe in probes {
                let offset = probe.index(end + 1) as u32;
                prop_assert_eq!(find(&layout, offset), Some(linear(&rows, offset)));
            }
            for row in &rows {
                prop_assert_eq!(find(&layout, row.pc), Some(*row));
            }
            prop_assert_eq!(find(&layout, end as u32 + PAGE_BYTES), None);
        }
    }

    /// A real library: every row is found, and the page words take little space.
    #[test]
    fn library() {
        let table_of = UnwindTable::read(&File::open("/lib/x86_64-linux-gnu/libc.so.6").unwrap()).unwrap();
        let layout = table(&table_of.rows).unwrap();
        for row in &table_of.rows {
            assert_eq!(find(&layout, row.pc), Some(*row));
        }
        let (bytes, raw) = (layout.chunks.len() * size_of::<Chunk>(), table_of.rows.len() * 8);
        println!("libc: {raw} bytes of rows, {bytes} laid out");
        assert!(bytes < raw * 3 / 2, "{bytes} {raw}");
    }

    /// An empty table, and one that is too large.
    #[test]
    fn bounds() {
        assert_eq!(table(&[]).unwrap().chunks.len(), 0);
        let far = UnwindRow { pc: u32::MAX, ..UnwindRow::default() };
        assert!(table(&[far]).is_none());
    }

    /// The entries after the last mapping are beyond every address.
    #[test]
    fn mapping_chunk() {
        let one = UnwindMapping { start: 0x1000, end: 0x2000, base: 0x1000, chunk: 7, pages: 1 };
        let chunk = mappings(&[one]);
        assert_eq!(chunk[..4], [0x1000, 0x2000, 0x1000, 7 | 1 << 32]);
        assert!(chunk[4..].iter().all(|word| *word == UnwindMapping::END));
        assert_eq!(mappings(&vec![one; CHUNK_MAPPINGS + 9])[1020], 0x1000);
    }
}
