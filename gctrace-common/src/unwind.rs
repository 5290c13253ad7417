//! Unwind tables as the kernel side reads them: rows that user space computes from `.eh_frame`.
//!
//! Tables are stored in chunks of one size. An image has a run of chunks: first one word for each [`PAGE_BYTES`] of code that says
//! where the rows of that page are ([`PageWord`]), then the rows. The first row of a page is the one that applies at the start of the
//! page, and all rows of a page are in one chunk; so a search touches three or four cache lines, whatever its result. A
//! process has one chunk of mappings, which forked processes share.

/// Words in a chunk: page words, rows, or mappings.
pub const CHUNK_WORDS: usize = 1024;
/// Words of an [`UnwindMapping`].
pub const MAPPING_WORDS: usize = 4;
/// Mappings in a chunk.
pub const CHUNK_MAPPINGS: usize = CHUNK_WORDS / MAPPING_WORDS;
/// The contents of a chunk.
pub type Chunk = [u64; CHUNK_WORDS];
/// Bytes of code in a page, and so the maximum number of rows of a page.
pub const PAGE_BYTES: u32 = 256;
/// Maximum number of chunks at one time: 8 MiB, a million rows. Chunk 0 is not used.
pub const MAX_CHUNKS: u32 = 1024;
/// Maximum number of processes whose native stacks are unwound at one time.
pub const MAX_UNWOUND: u32 = 8192;

/// Where the rows of a page are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageWord {
    /// Word of the first row, counted from the start of the table.
    pub first: u32,
    /// Number of further rows of the page, which follow it.
    pub more: u32,
}

impl PageWord {
    /// Encodes it as a word of a chunk.
    #[inline]
    pub const fn to_word(self) -> u64 {
        self.first as u64 | (self.more as u64) << 32
    }

    /// Decodes a word of a chunk.
    #[inline]
    pub const fn from_word(word: u64) -> Self {
        Self { first: word as u32, more: (word >> 32) as u32 }
    }
}

/// How the caller of a frame is found, from an address on. x86-64: the return address is at CFA − 8, the caller's `rsp` is
/// the CFA.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnwindRow {
    /// First address, relative to the table's base.
    pub pc: u32,
    /// The offset used by `kind`, in words of 8 bytes.
    pub cfa: i16,
    /// One of the constants below; [`UnwindRow::DEREF_RSP`] and [`UnwindRow::DEREF_RBP`] have a number of words to add in the upper
    /// four bits.
    pub kind: u8,
    /// Where the caller's `rbp` is stored: words from the CFA (negative), or one of the `RBP` constants.
    pub rbp: i8,
}

impl UnwindRow {
    /// No function: from here on the table has no rule.
    pub const NONE: u8 = 0;
    /// CFA = rsp + offset.
    pub const RSP: u8 = 1;
    /// CFA = rbp + offset.
    pub const RBP: u8 = 2;
    /// A procedure linkage table: CFA = rsp + 8, plus 8 from byte `cfa` of each 16-byte stub on.
    pub const PLT: u8 = 3;
    /// CFA = *(rsp + offset) + words to add.
    pub const DEREF_RSP: u8 = 4;
    /// CFA = *(rbp + offset) + words to add.
    pub const DEREF_RBP: u8 = 5;
    /// The kernel's signal frame: `rsp` points to a `struct ucontext`, which has the interrupted registers.
    pub const SIGNAL: u8 = 6;
    /// The outermost function of a thread: it has no caller.
    pub const OUTERMOST: u8 = 7;
    /// A rule that the kernel side does not evaluate.
    pub const UNSUPPORTED: u8 = 8;
    /// The bits of `kind` that hold the constant.
    pub const KIND_MASK: u8 = 15;

    /// In `rbp`: unchanged.
    pub const RBP_SAME: i8 = 0;
    /// In `rbp`: it cannot be determined.
    pub const RBP_LOST: i8 = 1;
    /// In `rbp`: stored where `rbp` points.
    pub const RBP_AT_RBP: i8 = 2;

    /// Encodes it as a word of a chunk.
    #[inline]
    pub const fn to_word(self) -> u64 {
        self.pc as u64
            | (self.cfa as u16 as u64) << 32
            | (self.kind as u64) << 48
            | (self.rbp as u8 as u64) << 56
    }

    /// Decodes a word of a chunk.
    #[inline]
    pub const fn from_word(word: u64) -> Self {
        Self {
            pc: word as u32,
            cfa: (word >> 32) as u16 as i16,
            kind: (word >> 48) as u8,
            rbp: (word >> 56) as u8 as i8,
        }
    }
}

/// An executable mapping of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnwindMapping {
    /// First address. After the last mapping of a chunk, [`UnwindMapping::END`].
    pub start: u64,
    /// First address after the mapping.
    pub end: u64,
    /// Run-time address of the table's base.
    pub base: u64,
    /// Number of the table's first chunk.
    pub chunk: u32,
    /// Number of pages of the table.
    pub pages: u32,
}

impl UnwindMapping {
    /// [`UnwindMapping::start`] after the last mapping.
    pub const END: u64 = i64::MAX as u64;

    /// Encodes it as words of a chunk.
    #[inline]
    pub const fn to_words(self) -> [u64; MAPPING_WORDS] {
        [self.start, self.end, self.base, self.chunk as u64 | (self.pages as u64) << 32]
    }
}
