//! Unwind tables as the kernel side reads them: rows made from `.eh_frame` in user space.
//!
//! Tables lie in chunks of one size. An image has a run of chunks: first one word for each [`PAGE_BYTES`] of code that says
//! where the rows of that page are ([`PageWord`]), then the rows. The first row of a page is the one in force where the page
//! begins, and all rows of a page lie in one chunk; so a search touches three or four cache lines, wherever it leads. A
//! process has one chunk of mappings, which forked processes share.

/// Words in a chunk: page words, rows, or mappings.
pub const CHUNK_WORDS: usize = 1024;
/// Words of an [`UnwindMapping`].
pub const MAPPING_WORDS: usize = 4;
/// Mappings in a chunk.
pub const CHUNK_MAPPINGS: usize = CHUNK_WORDS / MAPPING_WORDS;
/// The contents of a chunk.
pub type Chunk = [u64; CHUNK_WORDS];
/// Bytes of code in a page, and so rows in one at most.
pub const PAGE_BYTES: u32 = 256;
/// Chunks at one time: 8 MiB, a million rows. The first is not used.
pub const MAX_CHUNKS: u32 = 1024;
/// Processes whose native stacks are unwound at one time.
pub const MAX_UNWOUND: u32 = 8192;

/// Where the rows of a page are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageWord {
    /// Word of the first row, counted from the beginning of the table.
    pub first: u32,
    /// Rows behind it that belong to the page as well.
    pub more: u32,
}

impl PageWord {
    /// As it is kept in a chunk.
    #[inline]
    pub const fn to_word(self) -> u64 {
        self.first as u64 | (self.more as u64) << 32
    }

    /// From a chunk.
    #[inline]
    pub const fn from_word(word: u64) -> Self {
        Self { first: word as u32, more: (word >> 32) as u32 }
    }
}

/// From an address on: how a frame's caller is found. x86-64: the return address is at CFA − 8, the caller's `rsp` is
/// the CFA.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnwindRow {
    /// First address, counted from the table's base.
    pub pc: u32,
    /// Offset that `kind` speaks of, in words of 8 bytes.
    pub cfa: i16,
    /// One of the constants; [`UnwindRow::DEREF_RSP`] and [`UnwindRow::DEREF_RBP`] carry words to add in the upper four
    /// bits.
    pub kind: u8,
    /// Where the caller's `rbp` is: words from the CFA (negative), or one of the `RBP` constants.
    pub rbp: i8,
}

impl UnwindRow {
    /// No function: the table says nothing from here on.
    pub const NONE: u8 = 0;
    /// CFA = rsp + offset.
    pub const RSP: u8 = 1;
    /// CFA = rbp + offset.
    pub const RBP: u8 = 2;
    /// A procedure linkage table: CFA = rsp + 8, and 8 more from that byte of each 16-byte stub on that `cfa` says.
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
    /// The bits of `kind` that say which.
    pub const KIND_MASK: u8 = 15;

    /// In `rbp`: it has not changed.
    pub const RBP_SAME: i8 = 0;
    /// In `rbp`: it cannot be determined.
    pub const RBP_LOST: i8 = 1;
    /// In `rbp`: where `rbp` points.
    pub const RBP_AT_RBP: i8 = 2;

    /// As it is kept in a chunk.
    #[inline]
    pub const fn to_word(self) -> u64 {
        self.pc as u64
            | (self.cfa as u16 as u64) << 32
            | (self.kind as u64) << 48
            | (self.rbp as u8 as u64) << 56
    }

    /// From a chunk.
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
    /// First address. Behind the last mapping of a chunk it is [`UnwindMapping::END`].
    pub start: u64,
    /// First address behind it.
    pub end: u64,
    /// Actual address of the table's base.
    pub base: u64,
    /// Number of the table's first chunk.
    pub chunk: u32,
    /// Pages that the table has.
    pub pages: u32,
}

impl UnwindMapping {
    /// [`UnwindMapping::start`] behind the last mapping.
    pub const END: u64 = i64::MAX as u64;

    /// As it is kept in a chunk.
    #[inline]
    pub const fn to_words(self) -> [u64; MAPPING_WORDS] {
        [self.start, self.end, self.base, self.chunk as u64 | (self.pages as u64) << 32]
    }
}
