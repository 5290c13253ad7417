//! The evaluator on real code.

use super::*;
use crate::debian::{libruby_bytes, libruby_image};
use crate::elf::ElfImage;
use crate::ruby::code::Code;
use crate::ruby::tests::table_of_libruby;

fn evaluate(image: &ElfImage, function: &str) -> Value {
    let address = image.symbol(function).unwrap().address;
    Machine::new(&Code::new(image), 0).run(address)
}

/// Accessors evaluate to the expressions in their source, through slots of the global offset table.
#[test]
fn accessors() {
    let image = libruby_image();
    let vm_ptr = image.symbol("ruby_current_vm_ptr").unwrap().address;
    let table = table_of_libruby();
    let objspace = table.structure("rb_vm_struct").unwrap().field("objspace").unwrap().offset;
    let profile_count = table.fields.iter().find(|field| field.name == "profile.count").unwrap().offset;
    let count = evaluate(&image, "rb_gc_count");
    assert_eq!(count.to_string(), format!("[[[@{vm_ptr}+0x0]:8+{objspace:#x}]:8+{profile_count:#x}]:8"));
}

/// `rb_thread_current` starts from the thread-local `ruby_current_ec`, through `__tls_get_addr`.
#[test]
fn thread_local() {
    let image = libruby_image();
    let offset = image.symbol("ruby_current_ec").unwrap().address;
    let mut value = evaluate(&image, "rb_thread_current");
    while let Value::Load { base, .. } = value {
        value = (*base).clone();
    }
    assert_eq!(value, Value::TlsAddress(offset.0 as i64));
}

/// What a function stores in globals, by their distance from it, when it runs this code in place of `rb_gc_stat`.
fn stored(code: &[u8]) -> Vec<(u64, Value)> {
    let mut bytes = libruby_bytes().to_vec();
    let image = ElfImage::read(&bytes[..]).unwrap();
    let function = image.symbol("rb_gc_stat").unwrap().address;
    let at = image.svma_to_file_offset(function).unwrap().0 as usize;
    bytes[at..at + code.len()].copy_from_slice(code);
    let image = ElfImage::read(&bytes[..]).unwrap();
    let code = Code::new(&image);
    let mut machine = Machine::new(&code, 0);
    machine.run_to_end(function);
    machine.globals().map(|(slot, value)| (slot.0.wrapping_sub(function.0), value.clone())).collect()
}

/// Structures are zeroed and copied by string instructions; after one of unknown length nothing is known.
#[test]
fn strings() {
    // mov [rsp-16], rsi; mov qword [rsp-8], 7
    let fill = [0x48, 0x89, 0x74, 0x24, 0xf0, 0x48, 0xc7, 0x44, 0x24, 0xf8, 7, 0, 0, 0];
    // lea rsi, [rsp-16]; lea rdi, [rip]
    let ends = [0x48, 0x8d, 0x74, 0x24, 0xf0, 0x48, 0x8d, 0x3d, 0, 0, 0, 0];
    // rep movsq; ret
    let copy = [0xf3, 0x48, 0xa5, 0xc3];
    // mov ecx, 2
    let known = [&fill[..], &ends, &[0xb9, 2, 0, 0, 0], &copy].concat();
    let base = (fill.len() + ends.len()) as u64;
    assert_eq!(stored(&known), [(base, Value::Argument(1)), (base + 8, Value::Constant(7))]);
    // mov ecx, edx
    let unknown = [&fill[..], &ends, &[0x89, 0xd1], &copy].concat();
    assert_eq!(stored(&unknown), []);
    // lea rdi, [rip]; xor eax, eax; mov ecx, 1; rep stosq; ret
    let zeroed = [0x48, 0x8d, 0x3d, 0, 0, 0, 0, 0x31, 0xc0, 0xb9, 1, 0, 0, 0, 0xf3, 0x48, 0xab, 0xc3];
    assert_eq!(stored(&zeroed), [(7, Value::Constant(0))]);
}
