//! Symbol tables (`.dynsym`, `.symtab`), kept compact: names stay in their string table.

use object::LittleEndian as LE;
use object::elf;

use super::headers::Headers;
use super::raw::{Section, records, string_at};
use super::{ElfError, ReadAt};
use crate::address::Svma;

/// Maximum bytes of a symbol or string table; no Ruby has 32 MiB of them.
const MAX_TABLE: u64 = 32 << 20;

/// A defined symbol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Symbol<'a> {
    /// Its name, without a version.
    pub name: &'a str,
    /// Its stated address; for a thread-local symbol, the offset in the TLS block.
    pub address: Svma,
    /// Its size in bytes, 0 if the file does not state it.
    pub size: u64,
}

#[derive(Clone, Copy, Debug)]
struct Record {
    address: u64,
    size: u32,
    name: u32,
    kind: RecordKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RecordKind {
    Undefined,
    Function,
    ThreadLocal,
    Other,
}

/// One symbol table.
#[derive(Debug, Default)]
pub struct SymbolTable {
    /// In file order, because relocations refer to symbols by index.
    records: Vec<Record>,
    /// Hash of the name and index of the defined symbols, sorted: cheaper to build than an index sorted by name.
    by_name: Vec<(u32, u32)>,
    /// Indices of the defined symbols with an address, sorted by address.
    by_address: Vec<u32>,
    strings: Vec<u8>,
}

impl SymbolTable {
    /// Reads the table in `section` with its linked string table.
    pub fn read(
        source: &(impl ReadAt + ?Sized),
        headers: &Headers,
        section: &Section,
    ) -> Result<Self, ElfError> {
        let what = "a symbol table";
        let bytes = section.read(source, what, MAX_TABLE)?;
        let strings = headers
            .linked(section)
            .ok_or_else(|| ElfError::malformed(what, "no string table"))?
            .read(source, "a symbol string table", MAX_TABLE)?;
        Ok(Self::parse(&bytes, strings))
    }

    /// The functions and objects among the records of a symbol table (`Elf64_Sym`), with names from its string table.
    pub fn parse(bytes: &[u8], strings: Vec<u8>) -> Self {
        let records: Vec<Record> = records::<elf::Sym64<LE>>(bytes).iter().map(Record::from_elf).collect();
        let mut table = Self { records, by_name: Vec::new(), by_address: Vec::new(), strings };
        let hashed = |i: u32| match table.records[i as usize].kind {
            RecordKind::Undefined => None,
            _ => Some((hash(table.name(i)?), i)),
        };
        let mut by_name: Vec<(u32, u32)> = (0..table.records.len() as u32).filter_map(hashed).collect();
        let mut by_address: Vec<u32> = by_name
            .iter()
            .map(|&(_, i)| i)
            .filter(|&i| table.records[i as usize].kind != RecordKind::ThreadLocal)
            .collect();
        by_name.sort_unstable();
        by_address.sort_by_key(|&i| table.records[i as usize].address);
        table.by_name = by_name;
        table.by_address = by_address;
        table
    }

    /// Whether the table has no defined symbol.
    pub fn is_empty(&self) -> bool {
        self.by_name.is_empty()
    }

    /// The defined symbol of that name.
    pub fn find(&self, name: &str) -> Option<Symbol<'_>> {
        let wanted = hash(name);
        let first = self.by_name.partition_point(|&(hash, _)| hash < wanted);
        self.by_name[first..]
            .iter()
            .take_while(|&&(hash, _)| hash == wanted)
            .filter_map(|&(_, i)| self.symbol(i))
            .find(|symbol| symbol.name == name)
    }

    /// The defined thread-local variable of that name.
    pub(crate) fn thread_local(&self, name: &str) -> Option<Symbol<'_>> {
        let wanted = hash(name);
        let first = self.by_name.partition_point(|&(hash, _)| hash < wanted);
        let is_it = |&&(_, i): &&(u32, u32)| {
            self.records[i as usize].kind == RecordKind::ThreadLocal && self.name(i) == Some(name)
        };
        let found = self.by_name[first..].iter().take_while(|&&(hash, _)| hash == wanted).find(is_it)?;
        self.symbol(found.1)
    }

    /// All defined symbols that have an address in memory, in order of address.
    pub fn iter(&self) -> impl Iterator<Item = Symbol<'_>> {
        self.by_address.iter().filter_map(|&i| self.symbol(i))
    }

    /// The defined symbols at exactly that address.
    pub fn at(&self, address: Svma) -> impl Iterator<Item = Symbol<'_>> {
        let first = self.by_address.partition_point(|&i| self.records[i as usize].address < address.0);
        self.by_address[first..]
            .iter()
            .filter_map(|&i| self.symbol(i))
            .take_while(move |symbol| symbol.address == address)
    }

    /// The function symbol whose extent covers the address; the innermost if there are several.
    pub fn function_covering(&self, address: Svma) -> Option<Symbol<'_>> {
        /// Maximum number of aliases and nested symbols checked before giving up.
        const LOOK_BACK: usize = 16;
        let end = self.by_address.partition_point(|&i| self.records[i as usize].address <= address.0);
        let covering = |&&i: &&u32| {
            let record = self.records[i as usize];
            record.kind == RecordKind::Function && address.0 - record.address < u64::from(record.size)
        };
        let found = self.by_address[..end].iter().rev().take(LOOK_BACK).find(covering)?;
        self.symbol(*found)
    }

    /// Name of the symbol with this index and, if it is defined here, its address (TLS offset).
    pub(crate) fn by_index(&self, index: u32) -> Option<(&str, Option<Svma>)> {
        let record = self.records.get(index as usize)?;
        let address = (record.kind != RecordKind::Undefined).then_some(Svma(record.address));
        Some((self.name(index)?, address))
    }

    fn symbol(&self, index: u32) -> Option<Symbol<'_>> {
        let record = self.records.get(index as usize)?;
        Some(Symbol { name: self.name(index)?, address: Svma(record.address), size: record.size.into() })
    }

    fn name(&self, index: u32) -> Option<&str> {
        string_at(&self.strings, self.records.get(index as usize)?.name as usize).filter(|n| !n.is_empty())
    }
}

/// FNV-1a, 32 bit.
fn hash(name: &str) -> u32 {
    name.bytes().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

impl Record {
    fn from_elf(symbol: &elf::Sym64<LE>) -> Self {
        let kind = match symbol.st_info.st_type() {
            _ if symbol.st_shndx.get(LE) == elf::SHN_UNDEF => RecordKind::Undefined,
            elf::STT_FUNC | elf::STT_GNU_IFUNC => RecordKind::Function,
            elf::STT_TLS => RecordKind::ThreadLocal,
            elf::STT_SECTION | elf::STT_FILE => RecordKind::Undefined,
            _ => RecordKind::Other,
        };
        Self {
            address: symbol.st_value.get(LE),
            size: u32::try_from(symbol.st_size.get(LE)).unwrap_or(u32::MAX),
            name: symbol.st_name.get(LE),
            kind,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn symbol(name: u32, kind: u8, section: u16, value: u64, size: u64) -> Vec<u8> {
        let mut bytes = name.to_le_bytes().to_vec();
        bytes.extend([kind, 0]);
        bytes.extend(section.to_le_bytes());
        bytes.extend(value.to_le_bytes());
        bytes.extend(size.to_le_bytes());
        bytes
    }

    /// Lookups by name, by address and by extent agree, and undefined symbols are only found by index.
    #[test]
    fn lookups() {
        let bytes = [
            symbol(0, 0, 0, 0, 0),
            symbol(1, 0x12, 1, 0x100, 0x20),
            symbol(5, 0x12, 1, 0x100, 0x20),
            symbol(9, 0x12, 0, 0, 0),
            symbol(13, 0x16, 2, 8, 8),
            symbol(99, 0x12, 1, 0x100, 8),
        ]
        .concat();
        let table = SymbolTable::parse(&bytes, b"\0foo\0bar\0ext\0tls\0".to_vec());
        assert_eq!(table.find("foo").unwrap().address, Svma(0x100));
        assert_eq!(table.find("tls").unwrap().address, Svma(8));
        assert!(table.find("ext").is_none());
        assert!(table.find("zzz").is_none());
        assert_eq!(table.by_index(3), Some(("ext", None)));
        assert_eq!(table.by_index(9), None);
        assert_eq!(table.at(Svma(0x100)).count(), 2);
        assert_eq!(table.at(Svma(8)).count(), 0);
        assert!(table.function_covering(Svma(0x11f)).is_some());
        assert!(table.function_covering(Svma(0x120)).is_none());
        assert!(table.function_covering(Svma(0xff)).is_none());
    }
}
