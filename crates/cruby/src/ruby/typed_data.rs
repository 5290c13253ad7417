//! `struct RTypedData`, objects with data of the VM or of a C extension (include/ruby/internal/core/rtypeddata.h; ruby/ruby.h in 2.7).

use super::RubyVersion;

/// Byte offset of the first of the two words that describe the data: the type and `typed_flag`, from 4.0 on the object with the instance
/// variables and the type.
pub(super) const HEAD: usize = 16;
/// Byte offset of the word that says whether the data is embedded: `typed_flag`, from 4.0 on `type`.
pub(super) const EMBEDDED_AT: u32 = 24;
/// Byte offset of the pointer to the data, or of the data itself (2.6 to 4.0).
pub(super) const DATA: u32 = 32;
/// `RUBY_TYPED_FL_IS_TYPED_DATA` (4.0): the flags say that there is a type; up to 3.4 `typed_flag` does.
const IS_TYPED: u64 = 1 << 6;

/// How such an object is read in one release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TypedDataLayout {
    is_4: bool,
    /// `TYPED_DATA_EMBEDDED`, a bit of the word at [`EMBEDDED_AT`]: the data is in the slot. 0 before 3.3, where it never is.
    pub(super) embedded: u64,
}

/// What an object says about its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TypedData {
    /// Address of the `rb_data_type_t`.
    pub(super) kind: u64,
    /// Whether the data is in the slot.
    pub(super) embedded: bool,
    /// The object with the instance variables (4.0), 0 if there are none or they are elsewhere.
    pub(super) fields: u64,
}

impl TypedDataLayout {
    pub(super) fn of(version: RubyVersion) -> Self {
        let is_4 = version.at_least(4, 0);
        let embedded = match (is_4, version.at_least(3, 3)) {
            (true, _) => 1,
            (false, true) => 2,
            (false, false) => 0,
        };
        Self { is_4, embedded }
    }

    /// Reads the flags of an object and the two words at [`HEAD`]; `None`: its data has no type.
    pub(super) fn read(self, flags: u64, [first, second]: [u64; 2]) -> Option<TypedData> {
        let embedded = second & self.embedded != 0;
        let rest = second & !self.embedded;
        if self.is_4 {
            return (flags & IS_TYPED != 0).then_some(TypedData { kind: rest, embedded, fields: first });
        }
        (rest == 1).then_some(TypedData { kind: first, embedded, fields: 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The type and the embedded bit are in other words from 4.0 on, and the bit is another one.
    #[test]
    fn releases() {
        let read = |release: (u16, u16), flags, words| {
            TypedDataLayout::of(RubyVersion::new(release.0, release.1, 0)).read(flags, words)
        };
        let of = |kind, embedded, fields| Some(TypedData { kind, embedded, fields });
        for release in [(2, 7), (3, 1), (3, 2)] {
            assert_eq!(read(release, 0xc, [0x8000, 1]), of(0x8000, false, 0), "{release:?}");
            assert_eq!(read(release, 0xc, [0x8000, 3]), None, "{release:?}: no data is embedded there");
        }
        for release in [(3, 3), (3, 4)] {
            assert_eq!(read(release, 0xc, [0x8000, 1]), of(0x8000, false, 0), "{release:?}");
            assert_eq!(read(release, 0xc, [0x8000, 3]), of(0x8000, true, 0), "{release:?}");
            assert_eq!(read(release, 0xc, [0x8000, 0]), None, "{release:?}: without a type");
        }
        let typed = 0xc | IS_TYPED;
        assert_eq!(read((4, 0), typed, [0x6000, 0x8000]), of(0x8000, false, 0x6000));
        assert_eq!(read((4, 0), typed, [0, 0x8001]), of(0x8000, true, 0));
        assert_eq!(read((4, 0), 0xc, [0, 0x8001]), None, "without a type");
    }
}
