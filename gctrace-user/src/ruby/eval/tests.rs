//! The evaluator on real code.

use std::fs::File;

use super::*;
use crate::elf::ElfImage;
use crate::elf::tests::DEBIAN_LIBRUBY;
use crate::ruby::code::Code;

fn evaluate(image: &ElfImage, function: &str) -> Value {
    let address = image.symbol(function).unwrap().address;
    Machine::new(&Code::new(image), 0).run(address)
}

/// Accessors become the expressions that their source says, through slots of the global offset table.
#[test]
fn accessors() {
    let image = ElfImage::read(&File::open(DEBIAN_LIBRUBY).unwrap()).unwrap();
    let vm_ptr = image.symbol("ruby_current_vm_ptr").unwrap().address;
    let count = evaluate(&image, "rb_gc_count");
    assert_eq!(count.to_string(), format!("[[[@{vm_ptr}+0x0]:8+0x450]:8+0x1b8]:8"));
}

/// `rb_thread_current` starts from the thread-local `ruby_current_ec`, over `__tls_get_addr`.
#[test]
fn thread_local() {
    let image = ElfImage::read(&File::open(DEBIAN_LIBRUBY).unwrap()).unwrap();
    let offset = image.symbol("ruby_current_ec").unwrap().address;
    let mut value = evaluate(&image, "rb_thread_current");
    while let Value::Load { base, .. } = value {
        value = (*base).clone();
    }
    assert_eq!(value, Value::TlsAddress(offset.0 as i64));
}
