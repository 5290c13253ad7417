//! Analyses an ELF image: the result is everything that probing its GC needs, or the reason why it cannot be probed.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;

use gctrace_common::config::ThreadPath;
use gctrace_common::event::Point;
use serde::{Deserialize, Serialize};

use super::accept::{Check, accept};
use super::code::{Code, Explored};
use super::derive::{Derivation, ThreadLayout};
use super::modular::{self, Modular};
use super::outcome::Outcome;
use super::sites::{self, Findings, GvlSites, RefillSites, Site, ThreadSites, find};
use super::version::{RubyVersion, description};
use super::vm_path::{VmPath, VmPathError};
use crate::address::Svma;
use crate::elf::{BuildId, ElfImage, Machine};

/// The result of analysing one Ruby image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RubyAnalysis {
    /// The processor that the image is built for.
    pub machine: Machine,
    /// Version of the interpreter.
    pub version: RubyVersion,
    /// What `ruby -v` prints, as far as the image holds it.
    pub description: String,
    /// Build id of the file.
    pub build_id: Option<BuildId>,
    /// Path to the object space.
    pub vm: VmPath,
    /// Probe sites, ordered by event and address.
    pub sites: Vec<Site>,
    /// The acceptance checks, all passed or not applicable.
    pub checks: Vec<Check>,
    /// Whether the file has a symbol table.
    pub has_symbols: bool,
    /// Static probes (USDT) of the provider `ruby` in the build (4.1 has `gc__enter` and `gc__exit`). They are attached only
    /// if the event sites are refused ([`fallback`](super::fallback)).
    pub static_probes: Vec<String>,
    /// Where threads wait for, acquire and release the GVL (from 3.2 on). Never a reason to refuse.
    pub thread: ThreadSites,
    /// The same for releases up to 3.1, found by other means. Never a reason to refuse.
    pub gvl: GvlSites,
    /// Where a thread takes a page of free slots. Not attached yet, and never a reason to refuse.
    pub refill: RefillSites,
    /// Layout facts derived from the code.
    pub derived: Derivation,
    /// The selection of a GC, if it is a Ruby built `--with-modular-gc`.
    pub modular: Option<Modular>,
}

impl RubyAnalysis {
    /// The path to the VM's per-thread data, if known.
    pub fn thread_path(&self) -> Option<ThreadPath> {
        self.derived.thread.as_ref().ok().map(ThreadLayout::path)
    }

    /// The slot with the TLS module id of a GC library that keeps per-thread data.
    pub fn local_module(&self) -> Option<Svma> {
        self.derived.thread.as_ref().ok()?.local_module
    }
}

/// Why an image is not probed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// Another processor.
    #[error("the image is made for another processor, {0:?}")]
    Machine(Machine),
    /// A version whose events cannot be found on aarch64.
    #[error(
        "on aarch64 the event sites of Ruby {0} are not supported yet (2.6 to 3.4 are traced, 3.4 without a modular GC)"
    )]
    Aarch64(RubyVersion),
    /// Not a Ruby.
    #[error("the image has no ruby_version")]
    NotRuby,
    /// A version outside the range in which the internal events are known to exist in this form.
    #[error("Ruby {0} is not supported (2.6 to 4.x are)")]
    Version(RubyVersion),
    /// CRuby's GC may be in a library (`--with-modular-gc`, from 3.4 on), and the code that selects it was not understood.
    #[error("modular GC: this Ruby was built --with-modular-gc, and {0} was not found in the known form")]
    ModularGc(&'static str),
    /// A GC library for such a Ruby, analysed without the Ruby that loads it.
    #[error(
        "modular GC: this is a GC library (librubygc) for a Ruby built --with-modular-gc; it is traced in the \
         processes that have loaded it, together with their Ruby"
    )]
    GcLibrary,
    /// A GC library that is not CRuby's own GC.
    #[error(
        "modular GC: this is the GC `{0}`, which a process chooses by RUBY_GC_LIBRARY; only CRuby's own, `default`, has \
         the events and counters that are traced"
    )]
    ForeignGc(String),
    /// A GC library in which the path to the VM was not found.
    #[error("modular GC: {0} was not found in this GC library in the known form")]
    Library(&'static str),
    /// The object space was not found.
    #[error("the object space was not found: {0}")]
    VmPath(#[from] VmPathError),
    /// No function from which the search can start.
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
/// The first version that can be built with a modular GC. (The previews of 3.4 called it shared GC.)
const FIRST_MODULAR: RubyVersion = RubyVersion::new(3, 4, 0);
/// From 4.0 on the events are tested in a global variable.
const FIRST_UNKNOWN_ON_AARCH64: RubyVersion = RubyVersion::new(4, 0, 0);
const TOO_NEW: RubyVersion = RubyVersion::new(5, 0, 0);

/// The remaining analysis of an image whose GC has been analysed ([`analyse_gc`]), with the knowledge of its code so far.
pub struct Rest {
    code: Explored,
    searched: BTreeSet<usize>,
}

impl fmt::Debug for Rest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rest").finish_non_exhaustive()
    }
}

impl Rest {
    /// Finds where threads acquire and release the GVL and where they take slots. `image` and `analysis` must be those of the
    /// [`analyse_gc`] call that returned this.
    pub fn complete(self, image: &ElfImage, analysis: &mut RubyAnalysis) {
        let Self { code, searched } = self;
        let mut code = Code::with(image, code);
        let version = analysis.version;
        if analysis.machine == Machine::X86_64 {
            analysis.thread = sites::thread::find(&mut code, version);
            analysis.gvl = sites::gvl::find(&mut code, version);
            analysis.refill = sites::refill::find(&mut code, version, &searched, &sweepers(&analysis.sites));
        }
    }
}

/// Finds version, object space, event sites and thread sites of a Ruby image. A pure function of the image.
pub fn analyse(image: &ElfImage) -> Result<RubyAnalysis, Refusal> {
    let (mut analysis, rest) = analyse_gc(image)?;
    rest.complete(image, &mut analysis);
    Ok(analysis)
}

/// The same without the sites of threads and of page refills. [`Rest::complete`] finds those later, while the GC can
/// already be probed; they are never a reason to refuse.
pub fn analyse_gc(image: &ElfImage) -> Result<(RubyAnalysis, Rest), Refusal> {
    // A probe is an instruction of the running machine; in code of another machine it would be a different instruction.
    if image.machine() != Machine::HOST {
        return Err(Refusal::Machine(image.machine()));
    }
    gc_of_any(image)
}

/// [`analyse`] for either processor.
#[cfg(test)]
pub(super) fn analyse_any(image: &ElfImage) -> Result<RubyAnalysis, Refusal> {
    let (mut analysis, rest) = gc_of_any(image)?;
    rest.complete(image, &mut analysis);
    Ok(analysis)
}

/// [`analyse_gc`] for either processor.
fn gc_of_any(image: &ElfImage) -> Result<(RubyAnalysis, Rest), Refusal> {
    let Some(version) = RubyVersion::of_image(image) else {
        let library = modular::is_library(image);
        return Err(if library { Refusal::GcLibrary } else { Refusal::NotRuby });
    };
    if version < OLDEST || version >= TOO_NEW {
        return Err(Refusal::Version(version));
    }
    let machine = image.machine();
    let modular = version >= FIRST_MODULAR && modular::is_modular(image);
    if machine == Machine::Aarch64 && (version >= FIRST_UNKNOWN_ON_AARCH64 || modular) {
        return Err(Refusal::Aarch64(version));
    }
    let mut code = Code::new(image);
    let modular = if modular { Some(Modular::of(&mut code).map_err(Refusal::ModularGc)?) } else { None };
    let vm = VmPath::derive(&code)?;
    let (findings, checks) = accepted(&mut code, version, &vm)?;
    let later = || match machine {
        Machine::X86_64 => Outcome::NotApplicable("not searched for".to_owned()),
        Machine::Aarch64 => Outcome::NotApplicable("searched for on x86-64 only".to_owned()),
    };
    let derived = Derivation::of(&code, &vm);
    let analysis = RubyAnalysis {
        machine,
        version,
        description: description(image).unwrap_or_default().to_owned(),
        build_id: image.build_id().cloned(),
        vm,
        sites: findings.sites,
        checks,
        has_symbols: !image.symbols().is_empty(),
        static_probes: static_probes(image),
        thread: ThreadSites { sites: Vec::new(), outcome: later() },
        gvl: GvlSites { sites: Vec::new(), fields: None, outcome: later() },
        refill: RefillSites { sites: Vec::new(), page: None, dropped: Vec::new(), outcome: later() },
        derived,
        modular,
    };
    Ok((analysis, Rest { code: code.explored(), searched: findings.searched }))
}

/// The functions that end a sweep.
fn sweepers(sites: &[Site]) -> BTreeSet<Svma> {
    sites.iter().filter(|site| site.point == Point::GcEndSweep).map(|site| site.owner).collect()
}

/// The same for a GC library that an analysed Ruby has loaded.
pub fn analyse_library(image: &ElfImage, ruby: &RubyAnalysis) -> Result<RubyAnalysis, Refusal> {
    if image.machine() != Machine::HOST {
        return Err(Refusal::Machine(image.machine()));
    }
    if image.machine() == Machine::Aarch64 {
        return Err(Refusal::Aarch64(ruby.version));
    }
    if !modular::is_library(image) {
        return Err(Refusal::Library("the interface of a GC"));
    }
    let modular = ruby.modular.as_ref().ok_or(Refusal::Library("a Ruby built --with-modular-gc"))?;
    let mut code = Code::new(image);
    match modular::library_name(&code) {
        Some(modular::DEFAULT) => {}
        Some(name) => return Err(Refusal::ForeignGc(name.to_owned())),
        None => return Err(Refusal::Library("its name")),
    }
    let anchor = modular::anchor(image).ok_or(Refusal::Library("a reference to rb_mGC"))?;
    let version = ruby.version;
    let vm = VmPath::derive_library(&code, &ruby.vm, modular.landmark, anchor)?;
    let (findings, checks) = accepted(&mut code, version, &vm)?;
    let refill = sites::refill::find(&mut code, version, &findings.searched, &sweepers(&findings.sites));
    let elsewhere = || Outcome::NotApplicable("it is in the Ruby that loads this GC library".to_owned());
    Ok(RubyAnalysis {
        machine: image.machine(),
        version,
        description: ruby.description.clone(),
        build_id: image.build_id().cloned(),
        derived: Derivation::of_library(&code, &vm, &ruby.derived, modular.landmark),
        vm,
        sites: findings.sites,
        checks,
        has_symbols: !image.symbols().is_empty(),
        static_probes: static_probes(image),
        thread: ThreadSites { sites: Vec::new(), outcome: elsewhere() },
        gvl: GvlSites { sites: Vec::new(), fields: None, outcome: elsewhere() },
        refill,
        modular: None,
    })
}

/// The sites, if they pass the checks.
fn accepted(
    code: &mut Code<'_>,
    version: RubyVersion,
    vm: &VmPath,
) -> Result<(Findings, Vec<Check>), Refusal> {
    let findings = find(code, version, vm).ok_or(Refusal::NoGcFunctions)?;
    let checks = accept(code, vm, &findings);
    for check in &checks {
        if let Outcome::Failed(reason) = &check.outcome {
            return Err(Refusal::Check { name: check.name.clone(), reason: reason.clone() });
        }
    }
    Ok((findings, checks))
}

fn static_probes(image: &ElfImage) -> Vec<String> {
    let own = image.usdt().iter().filter(|probe| probe.provider == "ruby");
    own.map(|probe| probe.name.clone()).collect()
}
