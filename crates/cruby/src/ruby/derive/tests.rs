//! Tests of the derivations on real images.

use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::debian::{libruby_bytes, libruby_image, libruby_offset};
use crate::ruby::RubyAnalysis;
use crate::ruby::modular::{self, Modular};
use crate::ruby::tests::{analysed, table_of_libruby};

/// Calls with a session over Debian's library.
pub(super) fn session<T>(call: impl FnOnce(&Session<'_>) -> T) -> T {
    let image = libruby_image();
    let code = Code::new(&image);
    let vm = VmPath::derive(&code).unwrap();
    call(&Session::new(&code, &vm))
}

/// Place of the thread-local `ruby_current_ec`, by its symbol.
fn current_ec(image: &ElfImage) -> CurrentEc {
    CurrentEc::Tls(image.symbol("ruby_current_ec").unwrap().address.0.try_into().unwrap())
}

fn of_image(image: &ElfImage) -> Derivation {
    let code = Code::new(image);
    let vm = VmPath::derive(&code).unwrap();
    Derivation::of(&code, &vm)
}

/// Everything derived from Debian's library; the offsets are those in the DWARF of a build of the upstream sources.
#[test]
fn debian_libruby() {
    let (image, table) = (libruby_image(), table_of_libruby());
    let derived = of_image(&image);
    let member = |name: &str| table.fields.iter().find(|field| field.name == name).unwrap().offset;
    let word = |name: &str| format!("[{:#x}]:8", member(name));
    let pools = table.pools.as_ref().unwrap();
    let in_pool = |name: &str| {
        let field = pools.fields.iter().find(|field| field.name == name).unwrap();
        format!("[{:#x}]:8", pools.offset + field.offset)
    };
    let stat = derived.stat.unwrap();
    assert_eq!((stat.keys.len(), stat.derived()), (29, 29));
    let formula = |name: &str| stat.formula(name).unwrap().to_string();
    assert_eq!(formula("count"), word("profile.count"));
    assert_eq!(formula("time"), format!("{}, divided by 1000000", word("profile.total_time_ns")));
    let (allocated, freed) = (word("total_allocated_objects"), word("profile.total_freed_objects"));
    let final_slots = word("heap_pages.final_slots");
    assert_eq!(formula("heap_live_slots"), format!("{allocated} - {final_slots} - {freed}"));
    let (eden, tomb) = (in_pool("eden_heap.total_slots"), in_pool("tomb_heap.total_slots"));
    assert_eq!(formula("heap_free_slots"), format!("{eden} + {tomb} + {freed} - {allocated}"));
    assert_eq!(derived.info.latest_gc_info, Ok(member("profile.latest_gc_info")));
    assert_eq!(derived.info.mode_bit, Ok(table.mode_bits.0));
    // These keys were added in 3.2 and 3.3.
    let unknown = || NotDerived::UnknownKey("rb_gc_latest_gc_info".into());
    assert_eq!(derived.info.need_major_gc, Err(unknown()));
    assert_eq!(derived.info.weak_references_count, Err(unknown()));
    let ec = derived.ec;
    assert_eq!(ec.current_ec, Ok(current_ec(&image)));
    let of = |tag: &str, name: &str| Ok(table.structure(tag).unwrap().field(name).unwrap().offset);
    let of_context = |name: &str| of("rb_execution_context_struct", name);
    let offsets = ["thread_ptr", "errinfo", "cfp"].map(of_context);
    assert_eq!([ec.thread_ptr, ec.errinfo, ec.cfp], offsets);
    assert_eq!(ec.thread_self, of("rb_thread_struct", "self"));
    assert_eq!(derived.thread, Err(NotDerived::NoSuch));
    // The table is in the part of the data that the file holds: it starts with the number of symbols, which is not 0 from
    // the beginning.
    let symbols = derived.symbols.unwrap();
    let at = libruby_offset(symbols.address);
    let known = u32::from_le_bytes(libruby_bytes()[at..at + 4].try_into().unwrap());
    assert!((200..1000).contains(&known), "{known}");
    assert_eq!(symbols.ids, 16);
    // Debian strips the symbol of the table of global variables, so the data is searched for it.
    let globals = derived.globals.unwrap();
    let (data, bss) = (globals.data, image.bss());
    assert!(data.from.0.is_multiple_of(8) && data.from.0 - bss.start.0 < 8 && data.to == bss.end);
    assert_eq!(derived.other_variables, Ok(data));
    let named = |address| image.function_name(address).unwrap();
    assert_eq!(named(globals.own.marker), "rb_gvar_val_marker");
    assert_eq!(named(globals.pointed.getter), "rb_gvar_var_getter");
}

/// For every image that the environment names (`GCTRACE_RUBY_IMAGES`, separated by colons) all keys are derived, in
/// time; `GCTRACE_SHOW_DERIVED` prints them.
#[test]
#[ignore = "needs GCTRACE_RUBY_IMAGES"]
fn images_of_the_environment() {
    let paths = std::env::var("GCTRACE_RUBY_IMAGES").expect("GCTRACE_RUBY_IMAGES names images");
    for path in paths.split(':').filter(|path| !path.is_empty()) {
        let (image, analysis) = analysed(path, |_| {});
        let RubyAnalysis { derived, version, vm, .. } =
            analysis.unwrap_or_else(|why| panic!("{path}: {why}"));
        let mut code = Code::new(&image);
        if modular::is_modular(&image) {
            Modular::of(&mut code).unwrap();
        }
        let begun = processor_time();
        let again = Derivation::of(&code, &vm);
        let took = processor_time().saturating_sub(begun);
        // What a GC library takes from its Ruby is not derived again.
        assert!(vm.anchor.is_some() || again == derived, "{path}");
        if std::env::var_os("GCTRACE_SHOW_DERIVED").is_some() {
            show(path, &derived, took);
        }
        assert!(took < Duration::from_millis(200), "{path}: {took:?}");
        let stat = derived.stat.unwrap_or_else(|reason| panic!("{path}: {reason}"));
        for key in &stat.keys {
            assert!(key.formula.is_ok(), "{path}: {key:?}");
        }
        let expected = match (version.major, version.minor) {
            (2, 6) => 25,
            (2, _) => 26,
            (3, 0) => 28,
            (3, 1 | 2) => 29,
            (3, 3) => 31,
            _ => 30,
        };
        assert_eq!(stat.keys.len(), expected, "{path}");
        assert!(derived.info.latest_gc_info.is_ok() && derived.info.mode_bit.is_ok(), "{path}");
        assert!(derived.info.need_major_gc.is_ok() == version.at_least(3, 2), "{path}");
        assert!(derived.info.weak_references_count.is_ok() == version.at_least(3, 3), "{path}");
        assert!(derived.thread.is_ok() == version.at_least(4, 0), "{path}: {:?}", derived.thread);
        // Libraries that were linked from only some of the objects have no symbols.
        assert!(
            derived.symbols.is_ok() == image.symbol("rb_id2str").is_some(),
            "{path}: {:?}",
            derived.symbols
        );
        assert!(derived.shapes.is_ok() == version.at_least(3, 2), "{path}: {:?}", derived.shapes);
        assert!(
            derived.globals.is_ok() == image.symbol("rb_gvar_val_getter").is_some(),
            "{path}: {:?}",
            derived.globals
        );
    }
}

/// CPU time of this thread: other work on the machine does not count.
fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn show(path: &str, derived: &Derivation, took: Duration) {
    println!("{path}: {} instructions in {took:?}", derived.steps);
    match &derived.stat {
        Ok(stat) => stat.keys.iter().for_each(|key| match &key.formula {
            Ok(formula) => println!("  {}: {formula}", key.name),
            Err(reason) => println!("  {}: not derived: {reason}", key.name),
        }),
        Err(reason) => println!("  not derived: {reason}"),
    }
    println!("  {:?}\n  {:?}\n  {:?}\n  {:?}", derived.info, derived.ec, derived.thread, derived.symbols);
}

/// The bytes of Debian's library with other code in place of `rb_gc_stat`, `rb_gc_latest_gc_info` and the code around them.
fn with_code(code: &[u8]) -> (ElfImage, VmPath) {
    let mut bytes = libruby_bytes().to_vec();
    let image = ElfImage::read(&bytes[..]).unwrap();
    let vm = VmPath::derive(&Code::new(&image)).unwrap();
    for name in ["rb_gc_stat", "rb_gc_latest_gc_info"] {
        let start = image.symbol(name).unwrap().address;
        let at = image.svma_to_file_offset(start).unwrap().0 as usize;
        let index = image.function_index(start).unwrap();
        let room = image.functions()[index].size() as usize;
        // Most of the function is behind a jump: let the code continue into what follows.
        for (target, byte) in bytes[at..at + room.max(code.len())].iter_mut().zip(code.iter().cycle()) {
            *target = *byte;
        }
    }
    (ElfImage::read(&bytes[..]).unwrap(), vm)
}

/// The thread-local variable is found in every TLS model that code uses.
#[test]
fn tls_models() {
    /// Type of the slot's relocation, code before the use of the slot, opcode of that use, code after it, expected result.
    type Model<'a> = (u8, &'a [u8], Option<&'a [u8; 3]>, &'a [u8], CurrentEc);
    let mut bytes = libruby_bytes().to_vec();
    let image = ElfImage::read(&bytes[..]).unwrap();
    let function = image.symbol("rb_thread_current").unwrap().address;
    let code = Code::new(&image);
    let program = Rc::new(Program::new(&code, STEPS));
    let nothing = BTreeMap::new();
    let assumptions =
        Assumptions { object: Value::Unknown, words: nothing, field: 0, global: 0, other: 0, narrow: 0 };
    Machine::assuming(&program, &Rc::new(assumptions), None, LIMITS).run(function);
    let slot = program.tls_module().unwrap();
    // The record of that slot: r_offset, r_info with the relocation's type in its low half.
    let record = |window: &[u8]| window[..8] == slot.0.to_le_bytes() && window[8..12] == [16, 0, 0, 0];
    let kind = bytes.windows(24).position(record).unwrap() + 8;

    // mov rax, [rax+0x30]; mov rax, [rax+0x10]; ret
    let rest = [0x48, 0x8b, 0x40, 0x30, 0x48, 0x8b, 0x40, 0x10, 0xc3];
    // Models as instructions; one of them has the distance to the slot as its last four bytes.
    let (load, add, lea) = (&[0x48, 0x8b, 0x05], &[0x48, 0x03, 0x05], &[0x48, 0x8d, 0x05]);
    let thread_pointer: &[u8] = &[0x64, 0x48, 0x8b, 0x04, 0x25, 0, 0, 0, 0];
    let models: [Model<'_>; 5] = [
        // Local executable: mov rax, fs:[-8]; and mov rax, fs:0; mov rax, [rax-8]
        (
            16,
            &[0x64, 0x48, 0x8b, 0x04, 0x25, 0xf8, 0xff, 0xff, 0xff],
            None,
            &[],
            CurrentEc::ThreadPointer(-8),
        ),
        (16, thread_pointer, None, &[0x48, 0x8b, 0x40, 0xf8], CurrentEc::ThreadPointer(-8)),
        // Initial executable: mov rax, [rip+slot]; mov rax, fs:[rax]; and mov rax, fs:0; add rax, [rip+slot];
        // mov rax, [rax]
        (18, &[], Some(load), &[0x64, 0x48, 0x8b, 0x00], current_ec(&image)),
        (18, thread_pointer, Some(add), &[0x48, 0x8b, 0x00], current_ec(&image)),
        // Descriptor: lea rax, [rip+slot]; call [rax]; mov rax, fs:[rax]
        (36, &[], Some(lea), &[0xff, 0x10, 0x64, 0x48, 0x8b, 0x00], current_ec(&image)),
    ];
    let at = image.svma_to_file_offset(function).unwrap().0 as usize;
    for (relocation, before, through_slot, after, expected) in models {
        let mut code = before.to_vec();
        if let Some(opcode) = through_slot {
            code.extend(opcode);
            let next = function.0 + code.len() as u64 + 4;
            code.extend((slot.0.wrapping_sub(next) as u32).to_le_bytes());
        }
        code.extend(after);
        code.extend(rest);
        bytes[kind] = relocation;
        bytes[at..at + code.len()].copy_from_slice(&code);
        let image = ElfImage::read(&bytes[..]).unwrap();
        let ec = ec::derive(&Code::new(&image));
        assert_eq!(ec.current_ec, Ok(expected), "relocation {relocation}");
        assert_eq!((ec.thread_ptr, ec.thread_self), (Ok(0x30), Ok(0x10)));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Whatever the code is, the evaluation ends within its bounds, and nonsense gives no result.
    #[test]
    fn random_code(code in proptest::collection::vec(any::<u8>(), 1..600)) {
        let (image, vm) = with_code(&code);
        let derived = Derivation::of(&Code::new(&image), &vm);
        prop_assert!(derived.steps <= STEPS);
        prop_assert!(derived.stat.is_err());
        prop_assert!(derived.info.latest_gc_info.is_err());
    }
}

/// Loops, recursion and growing values end within the bounds, too.
#[test]
fn endless_code() {
    // jmp self; call self, ret; add rax, rax, jmp; mul rdi, jmp; push rax, jmp; mov rax, [rax], jmp;
    // lea rax, [rax+rax], mov [rdi], rax, add rdi, 8, jmp
    let programs: [&[u8]; 7] = [
        &[0xeb, 0xfe],
        &[0xe8, 0xfb, 0xff, 0xff, 0xff, 0xc3],
        &[0x48, 0x01, 0xc0, 0xeb, 0xfb],
        &[0x48, 0xf7, 0xe7, 0xeb, 0xfb],
        &[0x50, 0xeb, 0xfd],
        &[0x48, 0x8b, 0x00, 0xeb, 0xfb],
        &[0x48, 0x8d, 0x04, 0x00, 0x48, 0x89, 0x07, 0x48, 0x83, 0xc7, 0x08, 0xeb, 0xf3],
    ];
    for program in programs {
        let (image, vm) = with_code(program);
        let begun = processor_time();
        let derived = Derivation::of(&Code::new(&image), &vm);
        let took = processor_time().saturating_sub(begun);
        assert!(derived.stat.is_err() && derived.steps <= STEPS, "{program:x?}");
        assert!(took < Duration::from_secs(2), "{program:x?}: {took:?}");
    }
}
