//! What debug information adds to the analysis of an image: symbols that confirm its sites, and layouts of exactly this build.

use std::{cell::Cell, collections::BTreeSet, fs::File, os::unix::fs::MetadataExt as _, path::PathBuf};

use super::image_file::ImageFile;
use crate::{
    debuginfo::{self, DebugFile, Origin, Search, Servers},
    elf::{
        BuildId, ElfImage, ReadAt, SymbolTable,
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
    given: Vec<DebugFileOption>,
    /// Images that match none of the given files are read as if none was given, instead of being refused.
    lenient: bool,
}

/// A debug file that the user named.
#[derive(Debug)]
struct DebugFileOption {
    path: PathBuf,
    build_id: BuildId,
    file: DebugFile,
}

/// The debug information that may be used for one image, and where more of it may be found.
#[derive(Clone, Copy, Debug)]
pub(super) struct Around<'a> {
    /// The debug files and servers that the user gave.
    pub(super) info: &'a DebugInfo,
    /// The image.
    pub(super) image: &'a ImageFile,
    /// If given, no server is queried now; it is set to true if one would have been.
    pub(super) later: Option<&'a Cell<bool>>,
}

/// Which symbols confirm the sites of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Symbols {
    /// No symbols: only the sites' own checks prove them.
    None,
    /// The symbols of the file itself.
    Own,
    /// Symbols of a separate file.
    Separate(Origin),
    /// Symbols of a separate file that was found in an earlier analysis of the image.
    Earlier,
}

impl DebugInfo {
    /// Opens the files that the user named (`--layout-from`) and takes the servers from the text of `DEBUGINFOD_URLS`.
    /// `lenient`: images that match no file are traced, too, because the user did not choose them individually.
    pub fn open(files: &[PathBuf], servers: Option<&str>, lenient: bool) -> Result<Self, String> {
        let mut given = Vec::new();
        for path in files {
            let advice = "give the unstripped library or its separate debug file";
            let (file, build_id) =
                debuginfo::open_given(path).map_err(|e| format!("--layout-from {e}; {advice}"))?;
            let no_id = || {
                format!(
                    "--layout-from {}: it has no build id, so the image that it belongs to is unknown",
                    path.display()
                )
            };
            given.push(DebugFileOption { path: path.clone(), build_id: build_id.ok_or_else(no_id)?, file });
        }
        Ok(Self { given, lenient, ..Self::of_servers(servers) })
    }

    /// Debug information on this host and on the servers in the text of `DEBUGINFOD_URLS`.
    pub fn of_servers(servers: Option<&str>) -> Self {
        let (servers, invalid) = Servers::parse(servers.unwrap_or_default());
        for server in &invalid {
            log::warn!("{server}");
        }
        Self { servers, ..Self::default() }
    }

    /// The servers, if they may be queried now.
    fn servers(&self, later: Option<&Cell<bool>>) -> Option<&Servers> {
        let servers = self.servers.as_ref();
        match later {
            Some(wanted) => {
                wanted.set(wanted.get() || servers.is_some());
                None
            }
            None => servers,
        }
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

impl<'a> Around<'a> {
    /// Confirms the sites by symbols that belong to the image: its own, or separate ones, which may have been installed
    /// after the image was analysed. Without symbols only the sites' own checks prove them. `image` is
    /// `None` for an analysis from the cache, and read if needed; `earlier`: symbols have confirmed that analysis before.
    pub(super) fn witness(
        &self,
        image: &mut Option<ElfImage>,
        source: &File,
        analysis: &mut RubyAnalysis,
        earlier: bool,
    ) -> Result<Symbols, PlanError> {
        if analysis.has_symbols {
            // For a cached analysis this is not repeated: the symbols are part of the file, and an image that they contradict is not cached.
            if let Some(image) = image {
                witness(&analysis.sites, image.symbols())?;
            }
            return Ok(Symbols::Own);
        }
        let path = self.image.in_root.display();
        let id = analysis.build_id.clone();
        let before = if earlier { Symbols::Earlier } else { Symbols::None };
        let search = self.search(id.as_ref(), source);
        let mut located = None;
        if debuginfo::may_be_at_hand(source, &search) {
            let image = self.read(image, source)?;
            located = self.symbols(image, source, &search);
        }
        // One response of a server is enough: it serves what belongs to the build id.
        if located.is_none()
            && !earlier
            && id.is_some()
            && let Some(servers) = self.info.servers(self.later)
        {
            let image = self.read(image, source)?;
            located = self.symbols(image, source, &Search { roots: &[], servers: Some(servers), ..search });
        }
        let Some((symbols, origin)) = located else { return Ok(before) };
        let found = witness(&analysis.sites, &symbols).map_err(|disagreement| {
            PlanError::SymbolsDisagree { origin: origin.to_string(), disagreement }
        })?;
        log::info!(
            "{path}: symbols from {origin} confirm {} sites in {} functions",
            analysis.sites.len(),
            found.owners.iter().collect::<BTreeSet<_>>().len()
        );
        for (site, owner) in analysis.sites.iter_mut().zip(found.owners) {
            site.owner_name = Some(owner);
        }
        Ok(Symbols::Separate(origin))
    }

    fn read<'i>(&self, image: &'i mut Option<ElfImage>, source: &File) -> Result<&'i ElfImage, PlanError> {
        let elf = |source| PlanError::Elf { path: self.image.in_root.clone(), source };
        Ok(match image {
            Some(image) => image,
            None => image.insert(ElfImage::read(source).map_err(elf)?),
        })
    }

    fn symbols(&self, image: &ElfImage, source: &File, search: &Search<'_>) -> Option<(SymbolTable, Origin)> {
        let located = debuginfo::symbols(image, source, search);
        for miss in &located.misses {
            log::debug!("{}: symbols: {miss}", self.image.in_root.display());
        }
        located.found
    }

    /// The layout of exactly this build: from a file that the user named, or, if no layout of the release is known,
    /// from the image's own or separate debug information. `None`: use the committed layout.
    pub(super) fn table(
        &self,
        build_id: Option<&BuildId>,
        source: &File,
        version: RubyVersion,
    ) -> Result<Option<Table>, PlanError> {
        let info = self.info;
        if let Some(given) = info.given.iter().find(|given| Some(&given.build_id) == build_id) {
            let shown = given.path.display().to_string();
            if !tables::knows_series(version) {
                return Err(PlanError::DebugInformation(format!(
                    "{shown}: it describes the layout, but the keys of GC.stat of CRuby {version} are not known; \
                     upgrade gctrace"
                )));
            }
            let table = read(version, &given.file.file, given.file.alt.as_ref(), &shown)?;
            if let Ok(committed) = Table::of(version) {
                for difference in committed.differences(&table) {
                    log::info!(
                        "{shown}: the known layout of CRuby {version} and this build differ: {difference}"
                    );
                }
            }
            return Ok(Some(table));
        }
        if !info.given.is_empty() && !info.lenient {
            return Err(PlanError::OtherBuild(info.mismatch(build_id)));
        }
        if Table::of(version).is_ok() || !tables::knows_series(version) {
            return Ok(None);
        }
        let path = self.image.in_root.display();
        match read(version, source, None, &path.to_string()) {
            Ok(table) => return Ok(Some(table)),
            Err(error) => log::debug!("{path}: {error}"),
        }
        let local = self.search(build_id, source);
        let mut found = self.types(source, &local);
        if found.is_none()
            && build_id.is_some()
            && let Some(servers) = info.servers(self.later)
        {
            found = self.types(source, &Search { roots: &[], servers: Some(servers), ..local });
        }
        let Some((found, origin)) = found else { return Ok(None) };
        read(version, &found.file, found.alt.as_ref(), &origin.to_string()).map(Some)
    }

    fn types(&self, source: &File, search: &Search<'_>) -> Option<(DebugFile, Origin)> {
        let located = debuginfo::types(source, search);
        for miss in &located.misses {
            log::debug!("{}: layout: {miss}", self.image.in_root.display());
        }
        located.found
    }

    /// A search on this host.
    fn search<'s>(&self, build_id: Option<&'s BuildId>, source: &File) -> Search<'s>
    where
        'a: 's,
    {
        let ImageFile { in_root, roots, .. } = self.image;
        let owner = source.metadata().ok().map(|file| file.uid());
        Search { build_id, path: in_root, owner, roots, servers: None }
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
    use std::{path::Path, process::Command};

    use super::*;
    use crate::{
        cache::Cache,
        discover::tracing_method::{Planned, plan_file},
    };

    fn run(program: &str, args: &[&str]) {
        let status = Command::new(program).args(args).status().expect(program);
        assert!(status.success(), "{program} {args:?}");
    }

    fn planned(path: &Path, shown: &Path, root: &Path, debug: &DebugInfo) -> Result<Planned, PlanError> {
        planned_with(path, shown, root, debug, &mut Cache::none())
    }

    fn planned_with(
        path: &Path,
        shown: &Path,
        root: &Path,
        info: &DebugInfo,
        cache: &mut Cache,
    ) -> Result<Planned, PlanError> {
        let file = File::open(path).unwrap();
        let image = ImageFile { roots: vec![root.to_owned()], ..ImageFile::on_host(shown) };
        let mut planned = plan_file(&file, true, cache, Around { info, image: &image, later: None })?;
        planned.finish(&file, cache);
        Ok(planned)
    }

    /// What is attached and how it is read, without how it was named and found.
    fn essence(planned: &Planned) -> String {
        let plan = &planned.plan;
        format!("{:x?} {:?} {:?} {:?}", plan.sites, plan.config, plan.layout.keys, plan.layout.heaps)
    }

    fn owners_named(planned: &Planned) -> Vec<Option<&str>> {
        planned.plan.analysis.sites.iter().map(|site| site.owner_name.as_deref()).collect()
    }

    fn committed(planned: &Planned) -> bool {
        !planned.plan.knowledge.own
    }

    /// Every unstripped Ruby listed in the environment (`GCTRACE_RUBY_IMAGES`, separated by colons) gives the same plan
    /// with its own symbols, with a separate debug file made by each tool and found in each place, from a debuginfod
    /// server, and fully stripped; and its own debug information gives the committed layout.
    #[test]
    #[ignore = "needs GCTRACE_RUBY_IMAGES"]
    fn one_build_one_plan() {
        let images = std::env::var("GCTRACE_RUBY_IMAGES").expect("GCTRACE_RUBY_IMAGES names images");
        let plain = DebugInfo::default();
        for image in images.split(':').filter(|path| !path.is_empty() && !path.contains('@')) {
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
            assert!(owners_named(&bare).iter().any(Option::is_none), "{image}");

            // Debug files are found by the build id; without one there is nothing to test.
            let Some(id) = whole.plan.analysis.build_id.as_ref().map(ToString::to_string) else { continue };
            let by_id = root.join(format!("usr/lib/debug/.build-id/{}/{}.debug", &id[..2], &id[2..]));
            std::fs::create_dir_all(by_id.parent().unwrap()).unwrap();

            // Some builds have symbols but no type information.
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
                assert_eq!(owners_named(&beside), owners_named(&whole), "{image}: {tool} {args:?}");

                if !described {
                    continue;
                }
                let given = DebugInfo::open(std::slice::from_ref(&by_id), None, false).unwrap();
                let own = planned(&at("bare"), shown, &root, &given).unwrap();
                assert_eq!(essence(&own), essence(&whole), "{image}: --layout-from {args:?}");
                assert!(!committed(&own) && committed(&whole), "{image}");
                let version = whole.plan.analysis.version;
                let found = read(version, &File::open(&by_id).unwrap(), None, "test").unwrap();
                assert_eq!(found.differences(Table::of(version).unwrap()), Vec::<String>::new());
            }
            std::fs::remove_file(&by_id).unwrap();

            // A real server, if one was started over a folder with this image (see docs/debuginfo.md).
            if let Ok(url) = std::env::var("GCTRACE_TEST_DEBUGINFOD") {
                let served = DebugInfo::open(&[], Some(&url), false).unwrap();
                let asked = planned(&at("bare"), shown, &root, &served).unwrap();
                assert_eq!(essence(&asked), essence(&whole), "{image}: {url}");
                assert_eq!(owners_named(&asked), owners_named(&whole), "{image}: {url}");
            }
        }
    }

    /// A separate symbol table for an image: one of its exports, and functions with these names, addresses and sizes.
    fn symbol_file(image: &ElfImage, functions: &[(&str, u64, u64)], path: &Path) {
        let export = image.symbol("rb_gc_count").unwrap().address.0;
        let functions = [functions, &[("rb_gc_count", export, 1)]].concat();
        let functions = functions.iter().map(|(name, at, size)| {
            format!(".globl {name}\n.type {name},@function\n{name} = {at}\n.size {name}, {size}\n")
        });
        let text = functions.collect::<Vec<_>>().concat();
        let assembly = path.with_extension("s");
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&assembly, text).unwrap();
        let id = format!("-Wl,--build-id=0x{}", image.build_id().unwrap());
        let (from, to) = (assembly.to_str().unwrap(), path.to_str().unwrap());
        run("gcc", &["-shared", "-nostdlib", &id, from, "-o", to]);
        std::fs::remove_file(assembly).unwrap();
    }

    /// Symbols that are installed after an image was analysed confirm the cached analysis, which is remembered, or refuse
    /// it, naming their origin.
    #[test]
    fn cached_analyses_are_witnessed() {
        let ruby = crate::debian::libruby();
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        std::fs::create_dir(&root).unwrap();
        let mut cache = Cache::at(&dir.path().join("cache"));
        let plain = DebugInfo::default();
        let mut look = || planned_with(ruby, ruby, &root, &plain, &mut cache);

        let first = look().unwrap();
        assert_eq!((first.cached, &first.symbols), (false, &Symbols::None));
        let second = look().unwrap();
        assert_eq!((second.cached, &second.symbols), (true, &Symbols::None));

        let image = ElfImage::read(&File::open(ruby).unwrap()).unwrap();
        let id = image.build_id().unwrap().to_string();
        let by_id = root.join(format!("usr/lib/debug/.build-id/{}/{}.debug", &id[..2], &id[2..]));
        let owners: BTreeSet<u64> = first.plan.analysis.sites.iter().map(|site| site.owner.0).collect();
        let names: Vec<String> = (0..owners.len()).map(|number| format!("gc_start_{number}")).collect();
        let functions: Vec<_> = names.iter().zip(&owners).map(|(name, &at)| (name.as_str(), at, 1)).collect();
        symbol_file(&image, &functions, &by_id);
        let third = look().unwrap();
        assert_eq!(
            (third.cached, &third.symbols),
            (true, &Symbols::Separate(Origin::BuildId(by_id.clone())))
        );
        assert_eq!(essence(&third), essence(&first));
        std::fs::remove_file(&by_id).unwrap();
        let fourth = look().unwrap();
        assert_eq!((fourth.cached, &fourth.symbols), (true, &Symbols::Earlier));
        assert_eq!(owners_named(&fourth), owners_named(&third));

        symbol_file(&image, &[("vm_exec", 1, 1 << 30)], &by_id);
        let refused = look().unwrap_err();
        assert!(matches!(refused, PlanError::SymbolsDisagree { .. }), "{refused}");
        let text = refused.to_string();
        assert!(text.contains(by_id.to_str().unwrap()) && text.contains("`vm_exec`"), "{text}");
        std::fs::remove_file(&by_id).unwrap();
        assert!(look().unwrap().cached);
    }

    /// A debug file of another build is refused, naming both build ids; for images that were not chosen individually it is
    /// ignored.
    #[test]
    fn other_builds_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (source, library) = (dir.path().join("gc.c"), dir.path().join("other.so"));
        std::fs::write(&source, "int x;").unwrap();
        let args =
            ["-g", "-shared", "-Wl,--build-id", source.to_str().unwrap(), "-o", library.to_str().unwrap()];
        run("gcc", &args);
        let ruby = crate::debian::libruby();
        let files = [library.clone()];
        let strict = DebugInfo::open(&files, None, false).unwrap();
        let error = planned(ruby, ruby, dir.path(), &strict).unwrap_err().to_string();
        let image = ElfImage::read(&File::open(ruby).unwrap()).unwrap();
        let given = debuginfo::open_given(&library).unwrap().1.unwrap();
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
