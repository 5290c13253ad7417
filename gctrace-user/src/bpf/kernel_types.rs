//! Byte offsets of members of kernel structures, from the kernel's own type information (BTF, in
//! `/sys/kernel/btf/vmlinux` since Linux 5.4, if `CONFIG_DEBUG_INFO_BTF` is set). The BPF programs are not relocated
//! against kernel types (Rust has no CO-RE), so the offsets that they need are looked up here.
//!
//! Format: Documentation/bpf/btf.rst.

use std::{fs, path::Path, sync::OnceLock};

use gctrace_common::{memory::MemoryLayout, request::SocketLayout};

mod memory;

pub(super) use self::memory::deepest as deepest_memory;

/// Why an offset is unknown.
#[derive(Debug, thiserror::Error)]
pub(super) enum BtfError {
    /// The BTF could not be read.
    #[error("reading {path}: {source} (this kernel was built without CONFIG_DEBUG_INFO_BTF?)")]
    Read {
        /// The file.
        path: String,
        /// The reason.
        #[source]
        source: std::io::Error,
    },
    /// The BTF violates its format.
    #[error("the kernel's BTF is not understood: {0}")]
    Malformed(&'static str),
    /// A type or member does not exist.
    #[error("the kernel's BTF has no `{0}`")]
    Missing(String),
}

/// The kernel's BTF.
const VMLINUX: &str = "/sys/kernel/btf/vmlinux";

/// The offsets, each looked up separately: a missing one does not affect the others.
struct Offsets {
    thread_pointer: Result<u32, BtfError>,
    stack: Result<u32, BtfError>,
    members: Result<[u32; 3], BtfError>,
    memory: Result<MemoryLayout, BtfError>,
    faults: Result<u32, BtfError>,
    signal: Result<[u32; 2], BtfError>,
    socket: Result<SocketLayout, BtfError>,
}

/// Offset of the user thread pointer (`fs` base on x86-64) in `task_struct`.
pub(super) fn task_thread_pointer() -> Result<u32, &'static BtfError> {
    offsets()?.thread_pointer.as_ref().copied()
}

/// Offset of the pointer to the kernel stack in `task_struct`.
pub(super) fn task_stack() -> Result<u32, &'static BtfError> {
    offsets()?.stack.as_ref().copied()
}

/// Offsets in `task_struct` of `pid`, of the state (`state` before Linux 5.14) and of the CPU time charged.
pub(super) fn task_members() -> Result<[u32; 3], &'static BtfError> {
    offsets()?.members.as_ref().copied()
}

/// Offsets of `signal` in `task_struct`, and of `live` (the number of threads) in `signal_struct`.
pub(super) fn task_signal() -> Result<[u32; 2], &'static BtfError> {
    offsets()?.signal.as_ref().copied()
}

/// The offsets that lead from a file descriptor to the kernel's state of its TCP connection.
pub(super) fn socket() -> Result<SocketLayout, &'static BtfError> {
    offsets()?.socket.as_ref().copied()
}

/// The location of a process's memory counters.
pub(super) fn memory() -> Result<MemoryLayout, &'static BtfError> {
    offsets()?.memory.as_ref().copied()
}

/// Offset in `task_struct` of `min_flt`, which `maj_flt` follows, both of 8 bytes: the page faults of a thread.
pub(super) fn task_faults() -> Result<u32, &'static BtfError> {
    offsets()?.faults.as_ref().copied()
}

/// The BTF has five megabytes and does not change while the kernel runs, so it is read once.
fn offsets() -> Result<&'static Offsets, &'static BtfError> {
    static OFFSETS: OnceLock<Result<Offsets, BtfError>> = OnceLock::new();
    OFFSETS.get_or_init(|| Offsets::read(Path::new(VMLINUX))).as_ref()
}

impl Offsets {
    fn read(path: &Path) -> Result<Self, BtfError> {
        let bytes = read(path)?;
        let btf = Btf::parse(&bytes)?;
        let task = btf.structure("task_struct").ok_or_else(|| BtfError::Missing("task_struct".to_owned()))?;
        let member = |names: &[&str]| btf.offset_in(task, "task_struct", names);
        let thread_pointer: &[&str] =
            if cfg!(target_arch = "x86_64") { &["thread", "fsbase"] } else { &["thread", "uw", "tp_value"] };
        let state = || member(&["__state"]).or_else(|_| member(&["state"]));
        let members = || Ok([member(&["pid"])?, state()?, member(&["se", "sum_exec_runtime"])?]);
        let signal = || {
            let of = "signal_struct";
            let id = btf.structure(of).ok_or_else(|| BtfError::Missing(of.to_owned()))?;
            Ok([member(&["signal"])?, btf.offset_in(id, of, &["live"])?])
        };
        Ok(Self {
            thread_pointer: member(thread_pointer),
            stack: member(&["stack"]),
            members: members(),
            memory: memory::layout(&btf, task, memory::summed_cpus()),
            faults: faults(&btf, task),
            signal: signal(),
            socket: socket_layout(&btf),
        })
    }
}

/// `unsigned long min_flt; unsigned long maj_flt;` (include/linux/sched.h). `task`: the type `task_struct`.
fn faults(btf: &Btf<'_>, task: u32) -> Result<u32, BtfError> {
    let place = |name| btf.place_in(task, "task_struct", &[name]);
    let ((minor, number), (major, other)) = (place("min_flt")?, place("maj_flt")?);
    if btf.size(number) != Some(8) || btf.size(other) != Some(8) || minor.checked_add(8) != Some(major) {
        return Err(BtfError::Malformed("`task_struct.min_flt` and `maj_flt` are not adjacent words"));
    }
    Ok(minor)
}

fn socket_layout(btf: &Btf<'_>) -> Result<SocketLayout, BtfError> {
    let member = |of: &str, names: &[&str]| {
        let id = btf.structure(of).ok_or_else(|| BtfError::Missing(of.to_owned()))?;
        btf.offset_in(id, of, names)
    };
    Ok(SocketLayout {
        task_files: member("task_struct", &["files"])?,
        files_table: member("files_struct", &["fdt"])?,
        table_len: member("fdtable", &["max_fds"])?,
        table_entries: member("fdtable", &["fd"])?,
        file_inode: member("file", &["f_inode"])?,
        file_private: member("file", &["private_data"])?,
        inode_mode: member("inode", &["i_mode"])?,
        inode_number: member("inode", &["i_ino"])?,
        socket_sock: member("socket", &["sk"])?,
        sock_protocol: member("sock", &["sk_protocol"])?,
        sock_cookie: member("sock", &["__sk_common", "skc_cookie"])?,
        sock_state: member("sock", &["__sk_common", "skc_state"])?,
        // Only needed for the ends of jobs.
        sock_port: member("sock", &["__sk_common", "skc_dport"]).unwrap_or(0),
        // Only needed for the size of responses.
        tcp_written: member("tcp_sock", &["write_seq"]).unwrap_or(0),
        tcp_acked: member("tcp_sock", &["bytes_acked"]).unwrap_or(0),
    })
}

/// Whether the kernel has a raw tracepoint of that name: BTF also describes the types of their functions.
pub(super) fn has_raw_tracepoint(name: &str) -> Result<bool, BtfError> {
    let bytes = read(Path::new(VMLINUX))?;
    let function = format!("btf_trace_{name}");
    Ok(bytes.split(|byte| *byte == 0).any(|text| text == function.as_bytes()))
}

fn read(path: &Path) -> Result<Vec<u8>, BtfError> {
    fs::read(path).map_err(|source| BtfError::Read { path: path.display().to_string(), source })
}

const KIND_INT: u32 = 1;
const KIND_ARRAY: u32 = 3;
const KIND_STRUCT: u32 = 4;
const KIND_UNION: u32 = 5;
const KIND_ENUM: u32 = 6;
/// Typedef, volatile, const, restrict, type tag: a name for another type.
const ALIASES: [u32; 5] = [8, 9, 10, 11, 18];
/// Maximum nesting of structures; deeper ones are malformed.
const MAX_DEPTH: u32 = 16;

struct Btf<'a> {
    /// Offset of each type in `types`, by id − 1.
    starts: Vec<u32>,
    types: &'a [u8],
    strings: &'a [u8],
}

#[derive(Clone, Copy)]
struct Type {
    name: u32,
    kind: u32,
    members: u32,
    /// Member offsets carry a bit-field size in their upper byte.
    bit_fields: bool,
    target: u32,
}

impl<'a> Btf<'a> {
    fn parse(bytes: &'a [u8]) -> Result<Self, BtfError> {
        const MAGIC: u32 = 0xeb9f;
        let word = |at| word(bytes, at).ok_or(BtfError::Malformed("the header is cut off"));
        if word(0)? & 0xffff != MAGIC {
            return Err(BtfError::Malformed("the magic number is wrong"));
        }
        let header = word(4)?;
        let section = |at: usize| -> Result<&'a [u8], BtfError> {
            let start = u64::from(header) + u64::from(word(at)?);
            let end = start + u64::from(word(at + 4)?);
            bytes.get(start as usize..end as usize).ok_or(BtfError::Malformed("a section is cut off"))
        };
        let mut btf = Self { starts: Vec::new(), types: section(8)?, strings: section(16)? };
        let mut at = 0;
        while at < btf.types.len() {
            let kind = btf.read(at).ok_or(BtfError::Malformed("a type is cut off"))?;
            btf.starts.push(at as u32);
            let extra = match kind.kind {
                KIND_INT | 14 | 17 => 4,
                KIND_ARRAY => 12,
                KIND_STRUCT | KIND_UNION | 15 | 19 => kind.members as usize * 12,
                KIND_ENUM | 13 => kind.members as usize * 8,
                2 | 7..=12 | 16 | 18 => 0,
                _ => return Err(BtfError::Malformed("a kind of type is unknown")),
            };
            at += 12 + extra;
        }
        Ok(btf)
    }

    fn read(&self, at: usize) -> Option<Type> {
        let info = word(self.types, at + 4)?;
        Some(Type {
            name: word(self.types, at)?,
            kind: info >> 24 & 0x1f,
            members: info & 0xffff,
            bit_fields: info >> 31 != 0,
            target: word(self.types, at + 8)?,
        })
    }

    fn by_id(&self, id: u32) -> Option<(usize, Type)> {
        let start = *self.starts.get(id.checked_sub(1)? as usize)? as usize;
        Some((start, self.read(start)?))
    }

    fn name(&self, offset: u32) -> &[u8] {
        let rest = self.strings.get(offset as usize..).unwrap_or_default();
        rest.split(|byte| *byte == 0).next().unwrap_or_default()
    }

    /// The id of a structure.
    fn structure(&self, name: &str) -> Option<u32> {
        (1..=self.starts.len() as u32).find(|&id| {
            self.by_id(id)
                .is_some_and(|(_, t)| t.kind == KIND_STRUCT && self.is_named(t.name, name.as_bytes()))
        })
    }

    /// Whether a name equals `name`, without searching for the terminator of each other name.
    fn is_named(&self, offset: u32, name: &[u8]) -> bool {
        let rest = self.strings.get(offset as usize..).unwrap_or_default();
        rest.strip_prefix(name).is_some_and(|rest| rest.first().is_none_or(|&byte| byte == 0))
    }

    /// Byte offset of a member of a structure with this id and name, following the path through nested structures.
    fn offset_in(&self, id: u32, structure: &str, members: &[&str]) -> Result<u32, BtfError> {
        self.place_in(id, structure, members).map(|(offset, _)| offset)
    }

    /// Like [`Btf::offset_in`], with the type of the member.
    fn place_in(&self, mut id: u32, structure: &str, members: &[&str]) -> Result<(u32, u32), BtfError> {
        let missing = || BtfError::Missing(format!("{structure}.{}", members.join(".")));
        let mut bits = 0_u32;
        for member in members {
            let (offset, target) = self.member(id, member.as_bytes(), MAX_DEPTH).ok_or_else(missing)?;
            bits = bits.checked_add(offset).ok_or_else(missing)?;
            id = target;
        }
        Ok((bits / 8, id))
    }

    /// A type after resolving aliases.
    fn resolved(&self, mut id: u32) -> Option<(u32, Type)> {
        for _ in 0..MAX_DEPTH {
            let (_, kind) = self.by_id(id)?;
            if !ALIASES.contains(&kind.kind) {
                return Some((id, kind));
            }
            id = kind.target;
        }
        None
    }

    /// Element type and length of an array.
    fn array(&self, id: u32) -> Option<(u32, u32)> {
        let (id, kind) = self.resolved(id)?;
        if kind.kind != KIND_ARRAY {
            return None;
        }
        let (start, _) = self.by_id(id)?;
        Some((word(self.types, start + 12)?, word(self.types, start + 20)?))
    }

    /// Size in bytes of a structure, union or integer.
    fn size(&self, id: u32) -> Option<u32> {
        let (_, kind) = self.resolved(id)?;
        // These kinds store the size where others store the target.
        matches!(kind.kind, KIND_INT | KIND_STRUCT | KIND_UNION).then_some(kind.target)
    }

    /// The name of a type after resolving aliases.
    fn type_name(&self, id: u32) -> Option<&[u8]> {
        self.resolved(id).map(|(_, kind)| self.name(kind.name))
    }

    /// The id of the enumeration with this enumerator.
    fn enumeration(&self, with: &str) -> Option<u32> {
        (1..=self.starts.len() as u32).find(|&id| self.enumerator(id, with).is_some())
    }

    /// The value of an enumerator.
    fn enumerator(&self, id: u32, wanted: &str) -> Option<u32> {
        let (start, kind) = self.by_id(id)?;
        if kind.kind != KIND_ENUM {
            return None;
        }
        (0..kind.members as usize).find_map(|index| {
            let at = start + 12 + index * 8;
            let name = word(self.types, at)?;
            if self.is_named(name, wanted.as_bytes()) { word(self.types, at + 4) } else { None }
        })
    }

    /// Bit offset and type of a member, including members of anonymous structures and unions.
    fn member(&self, id: u32, wanted: &[u8], depth: u32) -> Option<(u32, u32)> {
        let depth = depth.checked_sub(1)?;
        let (start, kind) = self.by_id(id)?;
        if ALIASES.contains(&kind.kind) {
            return self.member(kind.target, wanted, depth);
        }
        if !matches!(kind.kind, KIND_STRUCT | KIND_UNION) {
            return None;
        }
        (0..kind.members as usize).find_map(|index| {
            let at = start + 12 + index * 12;
            let name = self.name(word(self.types, at)?);
            let target = word(self.types, at + 4)?;
            let offset = word(self.types, at + 8)?;
            let offset = if kind.bit_fields { offset & 0x00ff_ffff } else { offset };
            if name == wanted {
                return Some((offset, target));
            }
            if !name.is_empty() {
                return None;
            }
            let (inner, target) = self.member(target, wanted, depth)?;
            Some((offset + inner, target))
        })
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_ne_bytes(bytes.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    impl Btf<'_> {
        fn member_offset(&self, structure: &str, members: &[&str]) -> Result<u32, BtfError> {
            let id = self.structure(structure).ok_or_else(|| BtfError::Missing(structure.to_owned()))?;
            self.offset_in(id, structure, members)
        }
    }

    /// Builds BTF with some types.
    #[derive(Default)]
    pub(super) struct Sample {
        strings: Vec<u8>,
        types: Vec<u32>,
        number: u32,
    }

    impl Sample {
        fn name(&mut self, text: &str) -> u32 {
            if self.strings.is_empty() {
                self.strings.push(0);
            }
            if text.is_empty() {
                return 0;
            }
            let at = self.strings.len() as u32;
            self.strings.extend(text.as_bytes());
            self.strings.push(0);
            at
        }

        fn add(&mut self, name: &str, info: u32, size: u32, more: &[u32]) -> u32 {
            let name = self.name(name);
            self.types.extend([name, info, size]);
            self.types.extend(more);
            self.number += 1;
            self.number
        }

        pub(super) fn number(&mut self, name: &str, bytes: u32) -> u32 {
            self.add(name, KIND_INT << 24, bytes, &[bytes * 8])
        }

        pub(super) fn array(&mut self, element: u32, length: u32) -> u32 {
            self.add("", KIND_ARRAY << 24, 0, &[element, element, length])
        }

        /// Members: name, type and byte offset.
        pub(super) fn structure(&mut self, name: &str, size: u32, members: &[(&str, u32, u32)]) -> u32 {
            let mut words = Vec::new();
            for (name, target, offset) in members {
                words.extend([self.name(name), *target, offset * 8]);
            }
            self.add(name, KIND_STRUCT << 24 | members.len() as u32, size, &words)
        }

        pub(super) fn enumeration(&mut self, values: &[(&str, u32)]) -> u32 {
            let mut words = Vec::new();
            for (name, value) in values {
                words.extend([self.name(name), *value]);
            }
            self.add("", KIND_ENUM << 24 | values.len() as u32, 4, &words)
        }

        pub(super) fn bytes(&self) -> Vec<u8> {
            let types: Vec<u8> = self.types.iter().flat_map(|w| w.to_ne_bytes()).collect();
            let len = types.len() as u32;
            let header = [0x0001_eb9f, 24, 0, len, len, self.strings.len() as u32];
            let mut bytes: Vec<u8> = header.iter().flat_map(|w| w.to_ne_bytes()).collect();
            bytes.extend(types);
            bytes.extend(&self.strings);
            bytes
        }
    }

    /// `struct inner { u64 a; u64 fsbase; }; struct task_struct { u32; struct { struct inner thread; }; }`, the last with
    /// offsets of bit fields.
    fn sample() -> Vec<u8> {
        let mut btf = Sample::default();
        let int = btf.number("int", 8);
        let inner = btf.structure("inner", 16, &[("", int, 0), ("fsbase", int, 8)]);
        let anonymous = btf.structure("", 16, &[("thread", inner, 0)]);
        let int_name = btf.name("int");
        let bits = 1 << 31 | KIND_STRUCT << 24 | 2;
        btf.add("task_struct", bits, 24, &[int_name, int, 4 << 24, 0, anonymous, 64]);
        btf.bytes()
    }

    /// Members are found inside anonymous structures, and their offsets add up.
    #[test]
    fn nested_members() {
        let bytes = sample();
        let btf = Btf::parse(&bytes).unwrap();
        assert_eq!(btf.member_offset("task_struct", &["thread", "fsbase"]).unwrap(), 16);
        assert!(btf.member_offset("task_struct", &["thread", "gsbase"]).is_err());
        assert!(btf.member_offset("nothing", &["thread"]).is_err());
        assert_eq!((btf.size(1), btf.array(1), btf.enumeration("int")), (Some(8), None, None));
    }

    /// Numbers of page faults that are not two adjacent words are refused.
    #[test]
    fn page_faults() {
        let of = |bytes, minor: u32, major: u32| {
            let mut btf = Sample::default();
            let long = btf.number("unsigned long", bytes);
            btf.structure("task_struct", 4096, &[("min_flt", long, minor), ("maj_flt", long, major)]);
            let bytes = btf.bytes();
            let btf = Btf::parse(&bytes).unwrap();
            faults(&btf, btf.structure("task_struct").unwrap()).ok()
        };
        assert_eq!(of(8, 1200, 1208), Some(1200));
        assert_eq!([of(8, 1208, 1200), of(8, 1200, 1216), of(4, 1200, 1208)], [None; 3]);
    }

    /// This machine's kernel, if it has BTF: the thread pointer's offset is plausible and aligned.
    #[test]
    fn this_kernel() {
        if !Path::new(VMLINUX).exists() {
            return;
        }
        let offset = task_thread_pointer().unwrap();
        assert!(offset > 0 && offset.is_multiple_of(8), "{offset}");
        let offset = task_faults().unwrap();
        assert!(offset > 0 && offset.is_multiple_of(8), "{offset}");
    }

    proptest! {
        /// Damaged BTF causes errors, never panics.
        #[test]
        fn damage(at in 0_usize..260, byte: u8, cut in 0_usize..260) {
            let mut bytes = sample();
            let end = bytes.len();
            bytes[at % end] = byte;
            bytes.truncate(end - cut % end);
            if let Ok(btf) = Btf::parse(&bytes) {
                let _either = btf.member_offset("task_struct", &["thread", "fsbase"]);
            }
        }
    }
}
