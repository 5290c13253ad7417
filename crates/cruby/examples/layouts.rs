//! Writes the committed structure layouts (`src/ruby/tables/layouts.txt`) from Rubies with debug information, through this
//! crate's own DWARF reader: `cargo xtask layouts FILE...`.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail, ensure};
use gctrace_cruby::{
    elf::{ElfImage, dwarf},
    ruby::{
        RubyVersion,
        tables::{self, Release, Struct, Variant},
    },
};

/// Write the committed structure layouts from Rubies with debug information.
#[derive(clap::Parser)]
#[command(name = "cargo xtask layouts", bin_name = "cargo xtask layouts")]
struct Args {
    /// Compare with what is committed and change nothing.
    #[arg(long)]
    check: bool,
    /// Rubies with DWARF: libruby, a static ruby, or `gcc -shared` of gc.o, vm.o, iseq.o, cont.o and version.o.
    #[arg(required = true)]
    files: Vec<PathBuf>,
}

/// A series: the releases that were examined, and the releases in it that changed a structure.
struct Series {
    from: Release,
    to: Release,
    /// Tag of a structure and the first release with a different layout.
    changes: &'static [(&'static str, Release)],
    /// Tag of a structure and the last release for which its layout is known, where that is beyond the series' last release.
    longer: &'static [(&'static str, Release)],
}

const fn series(from: Release, to: Release, changes: &'static [(&'static str, Release)]) -> Series {
    Series { from, to, changes, longer: &[] }
}

/// The structures read for the object space and for frame names, known up to this release.
const fn longer(to: Release) -> [(&'static str, Release); 16] {
    [
        ("rb_objspace", to),
        ("rb_iseq_struct", to),
        ("rb_iseq_constant_body", to),
        ("rb_iseq_location_struct", to),
        ("iseq_insn_info_entry", to),
        ("succ_index_table", to),
        ("succ_dict_block", to),
        ("rb_method_entry_struct", to),
        ("rb_callable_method_entry_struct", to),
        ("rb_method_definition_struct", to),
        ("RBasic", to),
        ("RString", to),
        ("RArray", to),
        ("RClass", to),
        ("RClass_and_rb_classext_t", to),
        ("rb_classext_struct", to),
    ]
}

/// Found by comparing the definitions of these structures (and of all structures and limits they are made of) over
/// every release tag of CRuby's repository. Changes that do not move anything in a table were left out after comparing
/// the DWARF of the releases on both sides. Two files of one range must have the same layout, so every further release
/// given to this command checks the list.
const SERIES: &[Series] = &[
    series((2, 6, 0), (2, 6, 10), &[]),
    series((2, 7, 0), (2, 7, 8), &[("rb_method_definition_struct", (2, 7, 6))]),
    series(
        (3, 0, 0),
        (3, 0, 7),
        &[
            ("rb_vm_struct", (3, 0, 1)),
            ("rb_ractor_struct", (3, 0, 3)),
            ("ractor_newobj_cache", (3, 0, 3)),
            ("rb_objspace", (3, 0, 4)),
            ("rb_ractor_struct", (3, 0, 4)),
            ("rb_method_definition_struct", (3, 0, 4)),
        ],
    ),
    series((3, 1, 0), (3, 1, 7), &[("rb_method_definition_struct", (3, 1, 1)), ("rb_vm_struct", (3, 1, 5))]),
    series(
        (3, 2, 0),
        (3, 2, 11),
        &[
            ("rb_vm_struct", (3, 2, 3)),
            ("rb_method_definition_struct", (3, 2, 3)),
            ("rb_vm_struct", (3, 2, 4)),
            ("rb_vm_struct", (3, 2, 7)),
        ],
    ),
    // Debian's 3.3.13, 3.3.14 and 3.4.11 have no public tags. Their machine code has the same offsets for everything that GC.stat
    // reads, every key equals the witness's, and every frame of every thread gets the name that Ruby itself reports.
    Series {
        longer: &longer((3, 3, 14)),
        ..series((3, 3, 0), (3, 3, 11), &[("rb_vm_struct", (3, 3, 1)), ("rb_vm_struct", (3, 3, 7))])
    },
    Series { longer: &longer((3, 4, 11)), ..series((3, 4, 0), (3, 4, 9), &[]) },
    series((4, 0, 0), (4, 0, 5), &[("rb_classext_struct", (4, 0, 4))]),
];

/// The contents of one input file.
struct Input {
    version: RubyVersion,
    source: String,
    structs: Vec<Struct>,
}

fn main() -> Result<()> {
    let args = <Args as clap::Parser>::parse();
    let mut variants = tables::variants().to_vec();
    let mut seen: Vec<Variant> = Vec::new();
    for path in &args.files {
        let input = read(path).with_context(|| path.display().to_string())?;
        eprintln!("xtask: {}: CRuby {}, {} structures", path.display(), input.version, input.structs.len());
        for layout in input.structs {
            let (from, to) = range(input.version, layout.name)?;
            let new = Variant { from, to, source: input.source.clone(), layout };
            if let Some(earlier) = seen.iter().find(|known| same_place(known, &new)) {
                let differences = earlier.layout.differences(&new.layout);
                ensure!(
                    differences.is_empty(),
                    "{} and {} should share a layout: {}; state the change in crates/cruby/examples/layouts.rs",
                    earlier.source,
                    new.source,
                    differences.join("; ")
                );
            } else {
                seen.push(new);
            }
        }
    }
    let mut changed = 0;
    for new in seen {
        match variants.iter_mut().find(|known| same_place(known, &new)) {
            Some(known) if known.layout == new.layout => {}
            Some(known) => {
                for difference in known.layout.differences(&new.layout) {
                    eprintln!("xtask: {}: committed or new: {difference}", new.source);
                }
                *known = new;
                changed += 1;
            }
            None => {
                variants.push(new);
                changed += 1;
            }
        }
    }
    if args.check {
        ensure!(changed == 0, "{changed} committed layouts differ");
        eprintln!("xtask: the committed layouts agree");
        return Ok(());
    }
    let order: Vec<&str> = tables::tags();
    variants
        .sort_by_key(|v| (v.from.0, v.from.1, order.iter().position(|tag| *tag == v.layout.name), v.from));
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/ruby/tables/layouts.txt");
    fs::write(&target, tables::print(&variants)).with_context(|| target.display().to_string())?;
    eprintln!("xtask: {}: {changed} entries rewritten, {} in all", target.display(), variants.len());
    Ok(())
}

fn same_place(one: &Variant, two: &Variant) -> bool {
    one.layout.name == two.layout.name && one.from <= two.to && two.from <= one.to
}

fn read(path: &Path) -> Result<Input> {
    let file = File::open(path)?;
    let image = ElfImage::read(&file)?;
    let version = RubyVersion::of_image(&image).context("no ruby_version in it; is version.o linked?")?;
    let found = dwarf::read_structs(&file, None, &tables::tags(), tables::UNITS)?;
    let build_id = image.build_id().context("no build id; link with -Wl,--build-id")?;
    let producer = found.producer.as_deref().unwrap_or("an unnamed compiler");
    // "GNU C11 12.2.0 -mtune=generic …": keep the compiler, drop its options; options that move members show in the layout itself.
    let compiler: Vec<&str> = producer.split(' ').take_while(|word| !word.starts_with('-')).collect();
    Ok(Input {
        version,
        source: format!("{version}, {}, build id {build_id}", compiler.join(" ")),
        structs: tables::structs_of(&found)?,
    })
}

/// The releases that share the layout of a structure with this one.
fn range(version: RubyVersion, tag: &str) -> Result<(Release, Release)> {
    let release = (version.major, version.minor, version.teeny);
    let Some(series) = SERIES.iter().find(|series| series.from <= release && release <= series.to) else {
        bail!(
            "CRuby {version} belongs to no series in crates/cruby/examples/layouts.rs; look at its changes and add it"
        );
    };
    let changes = || series.changes.iter().filter(|(name, _)| *name == tag).map(|&(_, at)| at);
    let from = changes().filter(|at| *at <= release).max().unwrap_or(series.from);
    let next = changes().filter(|at| *at > release).min();
    let longer = series.longer.iter().find(|(name, _)| *name == tag).map_or(series.to, |&(_, to)| to);
    let to = next.map_or(longer, |(major, minor, teeny)| (major, minor, teeny - 1));
    Ok((from, to))
}
