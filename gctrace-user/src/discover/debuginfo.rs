//! What debug information adds to the analysis of an image: symbols as a witness, and layouts of exactly this build.

use std::{
    collections::BTreeSet,
    fs::File,
    path::{Path, PathBuf},
};

use crate::{
    elf::{
        BuildId, ElfImage, ReadAt,
        debug::{self, DebugFile, Search, Servers},
        dwarf::{self, DwarfError},
    },
    ruby::{
        RubyAnalysis, RubyVersion,
        plan::PlanError,
        tables::{self, Table},
        witness,
    },
};

/// Debug information that may be used.
#[derive(Debug, Default)]
pub struct DebugInfo {
    servers: Option<Servers>,
    given: Vec<Given>,
    /// Images that no given file belongs to are read as if none was given, instead of being refused.
    lenient: bool,
}

/// A debug file that the user named.
#[derive(Debug)]
struct Given {
    path: PathBuf,
    build_id: BuildId,
    file: DebugFile,
}

/// Where an image comes from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place<'a> {
    /// Path as its process sees it.
    pub(super) path: &'a Path,
    /// Root folders to look below: that of its process, then the host's.
    pub(super) roots: &'a [PathBuf],
}

impl DebugInfo {
    /// Opens the files that the user named (`--layout-from`) and takes the servers from the text of `DEBUGINFOD_URLS`.
    /// `lenient`: images that no file belongs to are traced too, because the user did not choose them one by one.
    pub fn open(files: &[PathBuf], servers: Option<&str>, lenient: bool) -> Result<Self, String> {
        let mut given = Vec::new();
        for path in files {
            let advice = "give the unstripped library or its separate debug file";
            let (file, build_id) =
                debug::open_given(path).map_err(|e| format!("--layout-from {e}; {advice}"))?;
            let no_id = || {
                format!(
                    "--layout-from {}: it has no build id, so that nothing shows what it belongs to",
                    path.display()
                )
            };
            given.push(Given { path: path.clone(), build_id: build_id.ok_or_else(no_id)?, file });
        }
        let (servers, invalid) = Servers::parse(servers.unwrap_or_default());
        invalid.iter().for_each(|server| log::warn!("{server}"));
        Ok(Self { servers, given, lenient })
    }

    /// Has the symbols of an image, its own or others that belong to it, confirm the sites. Without any there is no
    /// witness, and the sites stand on their own checks.
    pub(super) fn witness(
        &self,
        image: &ElfImage,
        source: &File,
        place: Place<'_>,
        analysis: &mut RubyAnalysis,
    ) -> Result<(), PlanError> {
        if !image.symbols().is_empty() {
            witness(&analysis.sites, image.symbols())?;
            return Ok(());
        }
        let located = debug::symbols(image, source, &self.search(image.build_id(), place));
        for miss in &located.misses {
            log::debug!("{}: symbols: {miss}", place.path.display());
        }
        let Some((symbols, origin)) = located.found else { return Ok(()) };
        let found = witness(&analysis.sites, &symbols)?;
        log::info!(
            "{}: symbols from {origin} confirm {} sites in {} functions",
            place.path.display(),
            analysis.sites.len(),
            found.owners.iter().collect::<BTreeSet<_>>().len()
        );
        for (site, owner) in analysis.sites.iter_mut().zip(found.owners) {
            site.owner_name = Some(owner);
        }
        Ok(())
    }

    /// The layout of exactly this build: from a file that the user named, or, if no layout is known of the release,
    /// from the image's own or separate debug information. `None`: use the committed layout.
    pub(super) fn table(
        &self,
        build_id: Option<&BuildId>,
        source: &File,
        place: Place<'_>,
        version: RubyVersion,
    ) -> Result<Option<Table>, PlanError> {
        if let Some(given) = self.given.iter().find(|given| Some(&given.build_id) == build_id) {
            let shown = given.path.display().to_string();
            if !tables::knows_series(version) {
                return Err(PlanError::DebugInformation(format!(
                    "{shown}: it tells the layout, but what GC.stat of CRuby {version} is made of is not known; \
                     upgrade gctrace"
                )));
            }
            let table = read(version, &given.file.file, given.file.alt.as_ref(), &shown)?;
            if let Ok(committed) = Table::of(version) {
                for difference in committed.differences(&table) {
                    log::info!("{shown}: the known layout of CRuby {version} or this build: {difference}");
                }
            }
            return Ok(Some(table));
        }
        if !self.given.is_empty() && !self.lenient {
            return Err(PlanError::OtherBuild(self.mismatch(build_id)));
        }
        if Table::of(version).is_ok() || !tables::knows_series(version) {
            return Ok(None);
        }
        match read(version, source, None, &place.path.display().to_string()) {
            Ok(table) => return Ok(Some(table)),
            Err(error) => log::debug!("{}: {error}", place.path.display()),
        }
        let located = debug::types(source, &self.search(build_id, place));
        for miss in &located.misses {
            log::debug!("{}: layout: {miss}", place.path.display());
        }
        let Some((found, origin)) = located.found else { return Ok(None) };
        read(version, &found.file, found.alt.as_ref(), &origin.to_string()).map(Some)
    }

    fn search<'a>(&'a self, build_id: Option<&'a BuildId>, place: Place<'a>) -> Search<'a> {
        Search { build_id, path: place.path, roots: place.roots, servers: self.servers.as_ref() }
    }

    fn mismatch(&self, build_id: Option<&BuildId>) -> String {
        let image = build_id.map_or_else(|| "no build id".to_owned(), |id| format!("build id {id}"));
        let files = self.given.iter().map(|given| format!("{} has {}", given.path.display(), given.build_id));
        format!(
            "--layout-from belongs to another build: the image has {image}, {}",
            files.collect::<Vec<_>>().join(", ")
        )
    }
}

fn read(version: RubyVersion, file: &File, alt: Option<&File>, shown: &str) -> Result<Table, PlanError> {
    let failed = |reason: String| PlanError::DebugInformation(format!("{shown}: {reason}"));
    let alt = alt.map(|file| file as &dyn ReadAt);
    let structs = dwarf::read_structs(file, alt, &tables::tags(), tables::UNITS)
        .map_err(|error: DwarfError| failed(error.to_string()))?;
    Table::from_dwarf(version, shown.to_owned(), &structs).map_err(|error| failed(error.to_string()))
}
