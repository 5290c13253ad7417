//! Labels of Ruby code: `block in foo`, `<main>`, `rescue in foo`.

use std::sync::Arc;

use super::{
    Memory,
    iseq::{Body, Kind},
    layout::FrameLayout,
    read::{Failure, Reader, Result},
};

/// Maximum nesting of instruction sequences that is followed; Ruby's own parser does not nest nearly as deep.
const MAX_NESTING: usize = 256;

/// A label in two parts; the class of a method is inserted between them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Label {
    /// `block in `, or empty.
    pub(super) prefix: String,
    /// `foo`, `<main>`.
    pub(super) base: Arc<str>,
    /// Whether the base is the name of a method.
    pub(super) of_method: bool,
}

impl Label {
    /// The label of the code, as the release shows it. `local` is the method, class body or file that contains it;
    /// `read_body` reads other bodies.
    pub(super) fn read<M: Memory>(
        reader: &Reader<M>,
        iseq: u64,
        body: &Body,
        local: &Body,
        layout: &FrameLayout,
        read_body: &mut impl FnMut(u64) -> Result<Body>,
    ) -> Result<Self> {
        if layout.rules.composed {
            return composed(reader, iseq, body, layout, read_body);
        }
        let label = reader.string(body.label, layout)?;
        if local.kind != Kind::Method {
            return Ok(Self { prefix: String::new(), base: label, of_method: false });
        }
        let base = if body.base_label == body.label {
            label.clone()
        } else {
            reader.string(body.base_label, layout)?
        };
        Ok(match label.strip_suffix(&*base) {
            Some(prefix) => Self { prefix: prefix.to_owned(), base, of_method: true },
            None => Self { prefix: String::new(), base: label, of_method: false },
        })
    }
}

/// `calculate_iseq_label` (`vm_backtrace.c`, 3.4 and later).
fn composed<M: Memory>(
    reader: &Reader<M>,
    iseq: u64,
    body: &Body,
    layout: &FrameLayout,
    read_body: &mut impl FnMut(u64) -> Result<Body>,
) -> Result<Label> {
    let (mut at, mut code) = (iseq, *body);
    let mut prefix = String::new();
    let mut steps = 0..MAX_NESTING;
    let mut outwards = |at: &mut u64, code: &mut Body| {
        steps.next().ok_or(Failure::Stale)?;
        *at = code.parent;
        *code = read_body(*at)?;
        Ok(())
    };
    loop {
        match code.kind {
            Kind::Top | Kind::Class | Kind::Main | Kind::Method => break,
            Kind::Rescue | Kind::Ensure | Kind::Eval => {
                if code.parent == 0 {
                    break;
                }
                outwards(&mut at, &mut code)?;
            }
            Kind::Block | Kind::Plain => {
                let (start, local) = (at, code.local);
                let mut levels = 0;
                if code.parent != 0 {
                    while at != local {
                        levels += u32::from(code.kind == Kind::Block);
                        outwards(&mut at, &mut code)?;
                    }
                }
                if levels <= 1 {
                    prefix.push_str("block in ");
                } else {
                    prefix = format!("{prefix}block ({levels} levels) in ");
                }
                if at == start {
                    break;
                }
            }
        }
    }
    let base = reader.string(code.label, layout)?;
    Ok(Label { prefix, base, of_method: code.kind == Kind::Method })
}
