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
        for server in &invalid {
            log::warn!("{server}");
        }
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

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::{
        cache::Cache,
        discover::planned::{Around, Planned, plan_file},
    };

    fn run(program: &str, args: &[&str]) {
        let status = Command::new(program).args(args).status().expect(program);
        assert!(status.success(), "{program} {args:?}");
    }

    fn planned(path: &Path, shown: &Path, root: &Path, debug: &DebugInfo) -> Result<Planned, PlanError> {
        let file = File::open(path).unwrap();
        let around = Around { info: debug, roots: &[root.to_owned()] };
        plan_file(&file, shown, true, &mut Cache::none(), around)
    }

    /// What is attached and how it is read; not how it was named and found.
    fn essence(planned: &Planned) -> String {
        let plan = &planned.plan;
        format!("{:x?} {:?} {:?} {:?}", plan.sites, plan.config, plan.layout.keys, plan.layout.heaps)
    }

    fn owners(planned: &Planned) -> Vec<Option<&str>> {
        planned.plan.analysis.sites.iter().map(|site| site.owner_name.as_deref()).collect()
    }

    fn committed(planned: &Planned) -> bool {
        !planned.plan.knowledge.own
    }

    /// Every unstripped Ruby that the environment names (`GCTRACE_RUBY_IMAGES`, separated by colons) gives the same plan
    /// with its own symbols, with a separate debug file made by each tool and found in each place, from a debuginfod
    /// server, and stripped bare; and its own debug information gives the committed layout.
    #[test]
    fn one_build_one_plan() {
        let Ok(images) = std::env::var("GCTRACE_RUBY_IMAGES") else { return };
        let plain = DebugInfo::default();
        for image in images.split(':').filter(|path| !path.is_empty()) {
            let dir = tempfile::tempdir().unwrap();
            let at = |name: &str| dir.path().join(name);
            let text = |name: &str| at(name).to_str().unwrap().to_owned();
            std::fs::copy(image, at("whole")).unwrap();
            let (root, shown) = (at("root"), Path::new("/usr/lib/libruby.so"));
            std::fs::create_dir(&root).unwrap();
            let whole =
                planned(&at("whole"), shown, &root, &plain).unwrap_or_else(|e| panic!("{image}: {e}"));
            if !whole.plan.analysis.has_symbols {
                continue;
            }
            run("objcopy", &["--strip-all", &text("whole"), &text("bare")]);
            let bare = planned(&at("bare"), shown, &root, &plain).unwrap();
            assert_eq!(essence(&bare), essence(&whole), "{image}: stripped");
            // Exported functions keep their names in a stripped file; those of the GC are internal.
            assert!(owners(&bare).iter().any(Option::is_none), "{image}");

            // Without a build id nothing is found by it.
            let Some(id) = whole.plan.analysis.build_id.as_ref().map(ToString::to_string) else { continue };
            let by_id = root.join(format!("usr/lib/debug/.build-id/{}/{}.debug", &id[..2], &id[2..]));
            std::fs::create_dir_all(by_id.parent().unwrap()).unwrap();

            // Some builds have symbols but no types.
            let file = File::open(at("whole")).unwrap();
            let described = dwarf::read_structs(&file, None, &tables::tags(), tables::UNITS)
                .is_ok_and(|found| found.by_tag.contains_key("rb_objspace"));
            let whole_text = text("whole");
            let separate: [(&str, &[&str]); 4] = [
                ("eu-strip", &["-f", "DEBUG", "-o", "STRIPPED", "WHOLE"]),
                ("objcopy", &["--only-keep-debug", "WHOLE", "DEBUG"]),
                ("objcopy", &["--only-keep-debug", "--compress-debug-sections=zlib", "WHOLE", "DEBUG"]),
                ("objcopy", &["--only-keep-debug", "--compress-debug-sections=zstd", "WHOLE", "DEBUG"]),
            ];
            for (tool, args) in separate {
                let (debug, stripped) = (by_id.to_str().unwrap().to_owned(), text("stripped"));
                let args: Vec<&str> = args
                    .iter()
                    .map(|arg| match *arg {
                        "WHOLE" => whole_text.as_str(),
                        "DEBUG" => debug.as_str(),
                        "STRIPPED" => stripped.as_str(),
                        other => other,
                    })
                    .collect();
                run(tool, &args);
                let beside = planned(&at("bare"), shown, &root, &plain).unwrap();
                assert_eq!(essence(&beside), essence(&whole), "{image}: {tool} {args:?}");
                assert_eq!(owners(&beside), owners(&whole), "{image}: {tool} {args:?}");

                if !described {
                    continue;
                }
                let given = DebugInfo::open(std::slice::from_ref(&by_id), None, false).unwrap();
                let own = planned(&at("bare"), shown, &root, &given).unwrap();
                assert_eq!(essence(&own), essence(&whole), "{image}: --layout-from {args:?}");
                assert!(!committed(&own) && committed(&whole), "{image}");
                let version = whole.plan.analysis.version;
                let told = read(version, &File::open(&by_id).unwrap(), None, "test").unwrap();
                assert_eq!(told.differences(Table::of(version).unwrap()), Vec::<String>::new());
            }
            std::fs::remove_file(&by_id).unwrap();

            // A real server, where one was started over a folder with this image (see docs/debuginfo.md).
            if let Ok(url) = std::env::var("GCTRACE_TEST_DEBUGINFOD") {
                let served = DebugInfo::open(&[], Some(&url), false).unwrap();
                let asked = planned(&at("bare"), shown, &root, &served).unwrap();
                assert_eq!(essence(&asked), essence(&whole), "{image}: {url}");
                assert_eq!(owners(&asked), owners(&whole), "{image}: {url}");
            }
        }
    }

    /// A debug file of another build is refused with both build ids; for images that were not chosen one by one it is
    /// passed over.
    #[test]
    fn other_builds_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (source, library) = (dir.path().join("gc.c"), dir.path().join("other.so"));
        std::fs::write(&source, "int x;").unwrap();
        let args =
            ["-g", "-shared", "-Wl,--build-id", source.to_str().unwrap(), "-o", library.to_str().unwrap()];
        run("gcc", &args);
        let ruby = Path::new(crate::elf::tests::DEBIAN_LIBRUBY);
        let files = [library.clone()];
        let strict = DebugInfo::open(&files, None, false).unwrap();
        let error = planned(ruby, ruby, dir.path(), &strict).unwrap_err().to_string();
        let image = ElfImage::read(&File::open(ruby).unwrap()).unwrap();
        let given = debug::open_given(&library).unwrap().1.unwrap();
        for expected in
            [image.build_id().unwrap().to_string(), given.to_string(), library.display().to_string()]
        {
            assert!(error.contains(&expected), "{error}");
        }
        let lenient = DebugInfo::open(&files, None, true).unwrap();
        assert!(planned(ruby, ruby, dir.path(), &lenient).is_ok());
        let nothing = DebugInfo::open(&[dir.path().join("none")], None, true).unwrap_err();
        assert!(nothing.starts_with("--layout-from ") && nothing.contains("none"), "{nothing}");
    }
}
