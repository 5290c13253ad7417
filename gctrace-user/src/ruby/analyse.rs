//! From an ELF image to everything that probing its GC needs, or to the reason why not.

use std::borrow::Cow;

use gctrace_common::config::ThreadPath;
use serde::{Deserialize, Serialize};

use super::accept::{Check, Outcome, accept};
use super::code::Code;
use super::sites::{Site, find};
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
}

impl RubyAnalysis {
    /// The way to what the VM keeps per thread, where it is known. Not derived yet.
    pub fn thread_path(&self) -> Option<ThreadPath> {
        None
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
const TOO_NEW: RubyVersion = RubyVersion::new(5, 0, 0);

/// Finds version, object space and event sites of a Ruby image. A pure function of the image.
pub fn analyse(image: &ElfImage) -> Result<RubyAnalysis, Refusal> {
    if image.machine() != Machine::X86_64 {
        return Err(Refusal::Machine(image.machine()));
    }
    let version = RubyVersion::of_image(image).ok_or(Refusal::NotRuby)?;
    if version < OLDEST || version >= TOO_NEW {
        return Err(Refusal::Version(version));
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
    Ok(RubyAnalysis {
        version,
        description: description(image).unwrap_or_default().to_owned(),
        build_id: image.build_id().cloned(),
        vm,
        sites: findings.sites,
        checks,
        has_symbols: !image.symbols().is_empty(),
    })
}
