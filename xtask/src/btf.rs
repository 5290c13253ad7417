//! The type information (BTF) of a BPF object, as far as the verifier needs it: its functions, and which of them are global.
//!
//! A global function is verified on its own, once, with unknown arguments; a static one is verified again at each call. The functions that walk
//! stacks are called in loops, so this makes the difference between 5 and 300 thousand instructions that the verifier processes. The
//! compiler would write BTF only together with line information, which differs from machine to machine.
//!
//! Format: Documentation/bpf/btf.rst.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use object::{Object as _, ObjectSection as _, ObjectSymbol as _, SymbolKind, read::File};

/// Functions with this prefix are global. They take one number, or the number of them given by a digit after it (`verified_once_3_`), and return one.
const GLOBAL: &str = "verified_once_";
/// Maximum number of arguments that a global function can take in registers.
const MOST_ARGUMENTS: u32 = 5;

const MAGIC: u16 = 0xeb9f;
const KIND_INT: u32 = 1;
const KIND_FUNC: u32 = 12;
const KIND_FUNC_PROTO: u32 = 13;
/// Size of `struct btf_header`, and of the used part of `struct btf_ext_header`.
const HEADER: u32 = 24;
/// Type ids: the number, and the prototype without arguments; the prototypes with one and more arguments follow.
const NUMBER: u32 = 1;
const NO_ARGUMENT: u32 = 2;
/// The kernel's `KSYM_NAME_LEN` was 128 before Linux 6.1.
const LONGEST_NAME: usize = 100;

/// The contents of the sections `.BTF` and `.BTF.ext`.
pub(crate) struct Sections {
    pub(crate) types: Vec<u8>,
    pub(crate) functions: Vec<u8>,
}

/// Describes the functions of an object.
pub(crate) fn describe(object: &[u8]) -> Result<Sections> {
    let file = File::parse(object).context("not an ELF file")?;
    // By section; the functions by address.
    let mut functions: BTreeMap<String, BTreeMap<u64, String>> = BTreeMap::new();
    for symbol in file.symbols().filter(|symbol| symbol.kind() == SymbolKind::Text && symbol.size() > 0) {
        let Some(index) = symbol.section_index() else { continue };
        let section = file.section_by_index(index).context("a function without a section")?;
        let section = section.name().context("a section without a name")?.to_owned();
        let name = symbol.name().context("a function without a name")?.to_owned();
        functions.entry(section).or_default().insert(symbol.address(), name);
    }
    Ok(encode(&functions))
}

fn encode(functions: &BTreeMap<String, BTreeMap<u64, String>>) -> Sections {
    let mut strings = Strings(vec![0]);
    let (number, slot) = (strings.add("u64"), strings.add("number"));
    let mut types = vec![number, KIND_INT << 24, 8, 64];
    types.extend([0, KIND_FUNC_PROTO << 24, NUMBER]);
    for arguments in 1..=MOST_ARGUMENTS {
        types.extend([0, KIND_FUNC_PROTO << 24 | arguments, NUMBER]);
        types.extend((0..arguments).flat_map(|_| [slot, NUMBER]));
    }
    let mut next = NO_ARGUMENT + MOST_ARGUMENTS + 1;
    // The size of a record comes first.
    let mut infos = vec![8];
    for (section, functions) in functions {
        infos.extend([strings.add(section), functions.len() as u32]);
        for (address, name) in functions {
            let arguments = arguments(name);
            let (global, prototype) = (arguments > 0, NO_ARGUMENT + arguments);
            let name = strings.add(&name[..name.len().min(LONGEST_NAME)]);
            types.extend([name, KIND_FUNC << 24 | u32::from(global), prototype]);
            infos.extend([*address as u32, next]);
            next += 1;
        }
    }
    let types = bytes(&types);
    let infos = bytes(&infos);
    let (types_len, strings_len, infos_len) =
        (types.len() as u32, strings.0.len() as u32, infos.len() as u32);
    Sections {
        types: [header([0, types_len, types_len, strings_len]), types, strings.0].concat(),
        // Without line information.
        functions: [header([0, infos_len, infos_len, 0]), infos].concat(),
    }
}

/// The number of arguments of a global function; 0 for others.
fn arguments(name: &str) -> u32 {
    let Some(rest) = name.strip_prefix(GLOBAL) else { return 0 };
    let digit = rest.split_once('_').and_then(|(digit, _)| digit.parse().ok());
    digit.filter(|number| (1..=MOST_ARGUMENTS).contains(number)).unwrap_or(1)
}

/// Offsets and lengths of the two parts that follow.
fn header(parts: [u32; 4]) -> Vec<u8> {
    let mut header = MAGIC.to_le_bytes().to_vec();
    // Version and flags.
    header.extend([1, 0]);
    header.extend(bytes(&[HEADER]));
    header.extend(bytes(&parts));
    header
}

fn bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

struct Strings(Vec<u8>);

impl Strings {
    fn add(&mut self, text: &str) -> u32 {
        let at = self.0.len() as u32;
        self.0.extend(text.bytes());
        self.0.push(0);
        at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Functions are identified by section and address; only those with the prefix are global and take an argument.
    #[test]
    fn functions() {
        let section =
            |list: &[(u64, &str)]| list.iter().map(|(at, name)| (*at, (*name).to_owned())).collect();
        let long = "_R".repeat(200);
        let sections = encode(&BTreeMap::from([
            (
                ".text".to_owned(),
                section(&[
                    (0, "memset"),
                    (64, "verified_once_walk"),
                    (128, &long),
                    (256, "verified_once_3_x"),
                ]),
            ),
            ("uprobe".to_owned(), section(&[(0, "gc_start")])),
        ]));
        let word = |bytes: &[u8], at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let types = &sections.types;
        let types_len = word(types, 12) as usize;
        assert_eq!(types.len(), HEADER as usize + types_len + word(types, 20) as usize);
        let strings = &types[HEADER as usize + types_len..];
        let text = |at: u32| strings[at as usize..].split(|byte| *byte == 0).next().unwrap();
        // After the types of the number and of the prototypes.
        let first = HEADER as usize + 16 + 12 + 20 + 28 + 36 + 44 + 52;
        let found: Vec<_> = (0..5)
            .map(|index| {
                let at = first + index * 12;
                (text(word(types, at)), word(types, at + 4) & 0xffff, word(types, at + 8))
            })
            .collect();
        assert_eq!(found[0], (b"memset".as_slice(), 0, NO_ARGUMENT));
        assert_eq!(found[1], (b"verified_once_walk".as_slice(), 1, NO_ARGUMENT + 1));
        assert_eq!(found[2].0.len(), LONGEST_NAME);
        assert_eq!(found[3], (b"verified_once_3_x".as_slice(), 1, NO_ARGUMENT + 3));
        assert_eq!(found[4], (b"gc_start".as_slice(), 0, NO_ARGUMENT));

        let infos = &sections.functions[HEADER as usize..];
        assert_eq!(word(&sections.functions, 12) as usize, infos.len());
        let words: Vec<u32> = infos.chunks(4).map(|bytes| word(bytes, 0)).collect();
        assert_eq!((words[0], words[2], words[12]), (8, 4, 1));
        assert_eq!((text(words[1]), text(words[11])), (b".text".as_slice(), b"uprobe".as_slice()));
        assert_eq!(words[3..11], [0, 8, 64, 9, 128, 10, 256, 11]);
        assert_eq!(words[13..], [0, 12]);
    }
}
