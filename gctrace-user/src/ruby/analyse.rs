//! From an ELF image to everything that probing its GC needs, or to the reason why not.

use std::borrow::Cow;

use gctrace_common::config::ThreadPath;
use gctrace_common::event::Point;
use serde::{Deserialize, Serialize};

use super::accept::{Check, Outcome, accept};
use super::code::Code;
use super::derive::{Derivation, ThreadLayout};
use super::sites::{self, GvlSites, RefillSites, Site, ThreadSites, find};
use super::version::{RubyVersion, description};
use super::vm_path::{VmPath, VmPathError};
use crate::elf::{BuildId, ElfImage, Machine};

/// What is known of one Ruby image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RubyAnalysis {
    /// Version of the interpreter.
    pub version: RubyVersion,
    /// What `ruby -v` prints, as far as the image holds it.
    pub description: String,
    /// Build id of the file.
    pub build_id: Option<BuildId>,
    /// Way to the object space.
    pub vm: VmPath,
    /// Where to probe, ordered by event and address.
    pub sites: Vec<Site>,
    /// The acceptance checks, all passed or not applicable.
    pub checks: Vec<Check>,
    /// Whether the file has a symbol table.
    pub has_symbols: bool,
    /// Static probes of the provider `ruby` that the build announces (USDT; 4.1 has `gc__enter` and `gc__exit`). They
    /// are named here and not attached.
    pub static_probes: Vec<String>,
    /// Where threads wait for, get and give up the GVL (from 3.2 on). Not attached yet, and never a reason to refuse.
    pub thread: ThreadSites,
    /// The same up to 3.1, by other means. Not attached yet, and never a reason to refuse.
    pub gvl: GvlSites,
    /// Where a thread takes a page of free slots. Not attached yet, and never a reason to refuse.
    pub refill: RefillSites,
    /// What the code tells of the layout.
    pub derived: Derivation,
}

impl RubyAnalysis {
    /// The way to what the VM keeps per thread, where it is known.
    pub fn thread_path(&self) -> Option<ThreadPath> {
        self.derived.thread.as_ref().ok().map(ThreadLayout::path)
    }
}

/// Why an image is not probed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// Another processor.
    #[error("the image is made for {0:?}; probe sites are only known for x86-64")]
    Machine(Machine),
    /// Not a Ruby.
    #[error("the image has no ruby_version")]
    NotRuby,
    /// A version outside the range in which the internal events exist as described.
    #[error("Ruby {0} is not supported (2.6 to 4.x are)")]
    Version(RubyVersion),
    /// CRuby's GC is in a library of its own, or may be (`--with-modular-gc`, from 3.4 on): `RUBY_GC_LIBRARY` in the
    /// environment of each process decides which GC runs, so the image alone does not tell where its events are.
    #[error(
        "modular GC: this Ruby was built --with-modular-gc and each process chooses its GC by RUBY_GC_LIBRARY; \
         its events cannot be found in this file"
    )]
    ModularGc,
    /// A GC for such a Ruby.
    #[error("modular GC: this is a GC library (librubygc) for a Ruby built --with-modular-gc, not a Ruby")]
    GcLibrary,
    /// The object space was not found.
    #[error("the object space was not found: {0}")]
    VmPath(#[from] VmPathError),
    /// Nothing to start the search from.
    #[error("the image exports no GC functions")]
    NoGcFunctions,
    /// An acceptance check failed.
    #[error("check failed: {name}: {reason}")]
    Check {
        /// Name of the check.
        name: Cow<'static, str>,
        /// What is wrong.
        reason: String,
    },
}

const OLDEST: RubyVersion = RubyVersion::new(2, 6, 0);
/// The first version that can be built with a modular GC. (3.4 named it shared GC in its previews.)
const FIRST_MODULAR: RubyVersion = RubyVersion::new(3, 4, 0);
const TOO_NEW: RubyVersion = RubyVersion::new(5, 0, 0);

/// Finds version, object space and event sites of a Ruby image. A pure function of the image.
pub fn analyse(image: &ElfImage) -> Result<RubyAnalysis, Refusal> {
    if image.machine() != Machine::X86_64 {
        return Err(Refusal::Machine(image.machine()));
    }
    let Some(version) = RubyVersion::of_image(image) else {
        let exported = |name| image.dynamic_symbols().find(name).is_some();
        let gc_library = exported("rb_gc_impl_objspace_alloc") && exported("rb_gc_impl_start");
        return Err(if gc_library { Refusal::GcLibrary } else { Refusal::NotRuby });
    };
    if version < OLDEST || version >= TOO_NEW {
        return Err(Refusal::Version(version));
    }
    // ruby_modular_gc_init (gc.c) reads the variable; nothing else names it.
    if version >= FIRST_MODULAR && !image.find_c_string("RUBY_GC_LIBRARY").is_empty() {
        return Err(Refusal::ModularGc);
    }
    let mut code = Code::new(image);
    let vm = VmPath::derive(&code)?;
    let findings = find(&mut code, version, &vm).ok_or(Refusal::NoGcFunctions)?;
    let checks = accept(&code, &vm, &findings);
    for check in &checks {
        if let Outcome::Failed(reason) = &check.outcome {
            return Err(Refusal::Check { name: check.name.clone(), reason: reason.clone() });
        }
    }
    let thread = sites::thread::find(&mut code, version);
    let gvl = sites::gvl::find(&mut code, version);
    let sweepers = findings.owners(Point::GcEndSweep);
    let refill = sites::refill::find(&mut code, version, &findings.searched, &sweepers);
    Ok(RubyAnalysis {
        version,
        description: description(image).unwrap_or_default().to_owned(),
        build_id: image.build_id().cloned(),
        vm,
        sites: findings.sites,
        checks,
        has_symbols: !image.symbols().is_empty(),
        static_probes: image
            .usdt()
            .iter()
            .filter(|probe| probe.provider == "ruby")
            .map(|probe| probe.name.clone())
            .collect(),
        thread,
        gvl,
        refill,
        derived: Derivation::of(&code, &vm),
    })
}
