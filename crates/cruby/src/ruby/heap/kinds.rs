//! Types of objects.

/// `RUBY_T_MASK` (`include/ruby/internal/value_type.h`).
const T_MASK: u64 = 0x1f;

/// Type of an object (`enum ruby_value_type`, `include/ruby/internal/value_type.h`), by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectType(u8);

impl ObjectType {
    /// `T_OBJECT`.
    pub const OBJECT: Self = Self(0x01);
    /// `T_CLASS`.
    pub const CLASS: Self = Self(0x02);
    /// `T_MODULE`.
    pub const MODULE: Self = Self(0x03);
    /// `T_STRING`.
    pub const STRING: Self = Self(0x05);
    /// `T_ARRAY`.
    pub const ARRAY: Self = Self(0x07);

    /// The type in the flags of a slot that is not free.
    pub fn of_flags(flags: u64) -> Self {
        Self((flags & T_MASK) as u8)
    }

    /// Its name, as in `ObjectSpace.count_objects`.
    pub fn name(self) -> &'static str {
        match self.0 {
            0x00 => "T_NONE",
            0x01 => "T_OBJECT",
            0x02 => "T_CLASS",
            0x03 => "T_MODULE",
            0x04 => "T_FLOAT",
            0x05 => "T_STRING",
            0x06 => "T_REGEXP",
            0x07 => "T_ARRAY",
            0x08 => "T_HASH",
            0x09 => "T_STRUCT",
            0x0a => "T_BIGNUM",
            0x0b => "T_FILE",
            0x0c => "T_DATA",
            0x0d => "T_MATCH",
            0x0e => "T_COMPLEX",
            0x0f => "T_RATIONAL",
            0x14 => "T_SYMBOL",
            0x1a => "T_IMEMO",
            0x1b => "T_NODE",
            0x1c => "T_ICLASS",
            0x1d => "T_ZOMBIE",
            0x1e => "T_MOVED",
            _ => "unknown type",
        }
    }

    /// Whether Ruby code never sees objects of this type (`internal_object_p`, gc.c).
    pub fn is_internal(self) -> bool {
        matches!(self.0, 0x00 | 0x1a..=0x1e)
    }
}
