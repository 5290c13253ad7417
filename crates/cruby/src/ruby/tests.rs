//! Tests of the analysis on real images.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::iter;
use std::path::Path;

use gctrace_common::event::Point;
use iced_x86::{Code as Opcode, Decoder, DecoderOptions, Register};

use super::accept::accept;
use super::analyse::analyse_any;
use super::code::Code;
use super::dwarf_oracle::{Instance, Line, Truth};
use super::outcome::Outcome;
use super::sites::find;
use super::tables::Table;
use super::vm_path::VmPath;
use super::{
    PauseKind, Refusal, RubyAnalysis, RubyVersion, Site, SiteForm, ThreadEvent, analyse, analyse_library,
};
use crate::address::Svma;
use crate::damaged::Damaged;
use crate::debian::{
    Known, known_libruby, libruby, libruby_analysis, libruby_bytes, libruby_image, libruby_offset,
    libruby_section,
};
use crate::elf::tests::Noise;
use crate::elf::{ElfImage, Machine, RubyPresence, probe_ruby};

/// The path in a Ruby of the series 3.1; any path will do for files that are not a Ruby.
const VM: VmPath = VmPath {
    vm_ptr: Svma(0x1000),
    vm_objspace: 0x450,
    count: 0x1b8,
    flags: 0x10,
    during_gc_bit: 5,
    dont_gc_bit: Some(3),
    anchor: None,
};

/// The layouts of the release of Debian's library, from the DWARF of a build of the upstream sources. A release newer than the tables
/// gets those of the newest release of its series.
pub(super) fn table_of_libruby() -> &'static Table {
    let version = libruby_analysis().version;
    Table::of(version).ok().or_else(|| Table::newest_of_series(version)).unwrap()
}

fn image(path: impl AsRef<Path>) -> ElfImage {
    ElfImage::read(&File::open(path).unwrap()).unwrap()
}

/// The analysis of an entry of `GCTRACE_RUBY_IMAGES`: an image, or a GC library with the Ruby that loads it
/// (`library@ruby`). `prepare` modifies the image first.
pub(super) fn analysed(
    entry: &str,
    prepare: impl Fn(&mut ElfImage),
) -> (ElfImage, Result<RubyAnalysis, Refusal>) {
    let read = |path: &str| {
        let mut image = image(path);
        prepare(&mut image);
        image
    };
    match entry.split_once('@') {
        None => {
            let image = read(entry);
            let analysis = analyse_any(&image);
            (image, analysis)
        }
        Some((library, ruby)) => {
            let library = read(library);
            let analysis = analyse(&read(ruby)).and_then(|ruby| analyse_library(&library, &ruby));
            (library, analysis)
        }
    }
}

impl RubyAnalysis {
    fn addresses(&self) -> Vec<(Point, u64)> {
        self.sites.iter().map(|site| (site.point, site.address.0)).collect()
    }
}

fn sites(analysis: &RubyAnalysis, point: Point) -> Vec<&Site> {
    analysis.sites.iter().filter(|site| site.point == point).collect()
}

/// Bits of the events in the objspace's `hook_events` (`RUBY_INTERNAL_EVENT_*`, include/ruby/internal/event.h).
const EVENT_BITS: [(Point, u32); 5] = [
    (Point::GcStart, 22),
    (Point::GcEndMark, 23),
    (Point::GcEndSweep, 24),
    (Point::GcEnter, 25),
    (Point::GcExit, 26),
];

/// All instructions `test [register+offset], bit` of an image that test an event's bit in the word at this offset, found
/// only by decoding everything.
fn event_tests(image: &ElfImage, hook_events: u64) -> BTreeSet<(&'static str, u64)> {
    let (start, text) = image.text();
    let decoder = Decoder::with_ip(64, text, start.0, DecoderOptions::NONE);
    let tests = decoder.into_iter().filter_map(|instruction| {
        let is_test = matches!(instruction.code(), Opcode::Test_rm8_imm8 | Opcode::Test_rm32_imm32);
        // Locals are tested, too.
        if !is_test || matches!(instruction.memory_base(), Register::None | Register::RSP | Register::RIP) {
            return None;
        }
        let byte = instruction.memory_displacement64().checked_sub(hook_events).filter(|&byte| byte < 4)?;
        let tested = u64::from(instruction.immediate32()) << (byte * 8);
        let point = EVENT_BITS.iter().find(|(_, bit)| tested == 1 << bit)?.0;
        Some((point.name(), instruction.ip()))
    });
    tests.collect()
}

/// Debian's stripped library gives the sites in its code: all instructions that test an event, and no others.
#[test]
fn debian_libruby() {
    let (image, analysis) = (libruby_image(), libruby_analysis());
    assert_eq!(Some(analysis.version), RubyVersion::of_image(&image));
    assert!(analysis.description.starts_with(&format!("ruby {}p", analysis.version)));
    assert!(!analysis.has_symbols);
    assert!(analysis.static_probes.iter().any(|probe| probe == "gc__mark__begin"));

    let (vm, table) = (&analysis.vm, table_of_libruby());
    let field = |name: &str| table.fields.iter().find(|field| field.name == name).unwrap().offset;
    let objspace = table.structure("rb_vm_struct").unwrap().field("objspace").unwrap().offset;
    let bit = |name: &str| u32::from(table.bit_field(name).unwrap().first);
    assert_eq!((vm.vm_objspace, vm.count, vm.flags), (objspace, field("profile.count"), table.flags));
    assert_eq!((vm.during_gc_bit, vm.dont_gc_bit), (bit("flags.during_gc"), Some(bit("flags.dont_gc"))));

    let guards = analysis.sites.iter().map(|site| (site.point.name(), site.guard.0)).collect();
    assert_eq!(event_tests(&image, field("hook_events").into()), guards);
    assert_eq!(analysis.sites.len(), guards.len());
    assert!(analysis.sites.iter().all(|site| site.form == SiteForm::Guard && site.register.is_some()));

    // As in gc.c: one place for each event of a cycle; `gc_enter` and `gc_exit` are inlined into their callers.
    let counts = Point::ALL.map(|point| sites(analysis, point).len());
    assert_eq!(counts[..3], [1, 1, 1]);
    assert!(counts[3] >= 3 && counts[4] >= 3, "{counts:?}");
    let pauses: Vec<_> = sites(analysis, Point::GcEnter).iter().filter_map(|site| site.pause).collect();
    assert!(pauses.contains(&PauseKind::Start) && pauses.contains(&PauseKind::Rest), "{pauses:?}");
    let in_memory_error = |site: &&Site| site.owner_name.as_deref() == Some("rb_memerror");
    assert_eq!(sites(analysis, Point::GcExit).into_iter().filter(in_memory_error).count(), 1);

    match known_libruby() {
        Some(known) => assert_known(analysis, known),
        None => println!("{} is not a known build", analysis.description),
    }
}

/// In a known build everything is where it was located by other means.
fn assert_known(analysis: &RubyAnalysis, known: &Known) {
    assert_eq!(analysis.version, known.version);
    let at = |point| sites(analysis, point).iter().map(|site| site.address.0).collect::<Vec<_>>();
    assert_eq!(Point::ALL.map(at), known.sites.map(<[u64]>::to_vec));
    let register = |point| sites(analysis, point)[0].register;
    let points = [Point::GcStart, Point::GcEndMark, Point::GcEndSweep];
    assert_eq!(points.map(register), known.registers.map(Some));
    let pauses: Vec<_> = sites(analysis, Point::GcEnter).iter().map(|site| site.pause).collect();
    assert_eq!(pauses[..3], [Some(PauseKind::Start), Some(PauseKind::Start), Some(PauseKind::Rest)]);
    assert!(pauses[3..].iter().all(Option::is_none));
}

/// Images that must be refused (`GCTRACE_RUBY_REFUSED`: path=text in the message, separated by colons).
#[test]
#[ignore = "needs GCTRACE_RUBY_REFUSED"]
fn refused_images_of_the_environment() {
    let list = std::env::var("GCTRACE_RUBY_REFUSED").expect("GCTRACE_RUBY_REFUSED names images");
    for (path, text) in list.split(':').filter_map(|entry| entry.split_once('=')) {
        let refusal = analysed(path, |_| {}).1.expect_err(path).to_string();
        assert!(refusal.contains(text), "{path}: {refusal}");
    }
}

/// The functions whose bodies hold the events (gc.c, gc/default/default.c).
const EVENT_FUNCTIONS: [(Point, &str); 5] = [
    (Point::GcStart, "gc_start"),
    (Point::GcEndMark, "gc_marks_finish"),
    (Point::GcEndSweep, "gc_sweep_finish"),
    (Point::GcEnter, "gc_enter"),
    (Point::GcExit, "gc_exit"),
];

/// Every image that the environment names (`GCTRACE_RUBY_IMAGES`, separated by colons) is accepted. With DWARF, the
/// sites are exactly the copies of the functions that hold the events, inlined ones included; with symbols alone, the
/// start of a cycle is in `gc_start`.
#[test]
#[ignore = "needs GCTRACE_RUBY_IMAGES"]
fn images_of_the_environment() {
    let paths = std::env::var("GCTRACE_RUBY_IMAGES").expect("GCTRACE_RUBY_IMAGES names images");
    let mut wrong = Vec::new();
    for path in paths.split(':').filter(|path| !path.is_empty()) {
        let entry = path;
        let path = entry.split('@').next().unwrap_or(entry);
        let name = Path::new(path).file_name().unwrap().to_string_lossy();
        let (_, with_symbols) = analysed(entry, |_| {});
        let (image, mut stripped) = analysed(entry, ElfImage::forget_symbols);
        if stripped.is_err() && with_symbols.is_ok() {
            println!("{name:28} refused without symbols: {}", stripped.unwrap_err());
            stripped = with_symbols.clone();
        }
        let analysis = match stripped {
            Ok(analysis) => analysis,
            Err(refusal) => {
                println!("{name:28} refused: {refusal}");
                wrong.push(format!("{path}: {refusal}"));
                continue;
            }
        };
        let counts = Point::ALL.map(|point| sites(&analysis, point).len().to_string()).join("/");
        let by_register = analysis.version < RubyVersion::new(3, 4, 0);
        let lost = analysis.sites.iter().filter(|site| by_register && site.register.is_none()).count();
        if with_symbols.as_ref().map(RubyAnalysis::addresses) != Ok(analysis.addresses()) {
            wrong.push(format!("{path}: other sites with symbols: {:?}", with_symbols.err()));
        }
        let names = EVENT_FUNCTIONS.map(|(_, name)| name);
        let truth = Truth::read(&std::fs::read(path).unwrap(), &names);
        let errors = truth.as_ref().map_or_else(Vec::new, |truth| differences(&analysis, truth));
        let checked = if truth.is_some() { "DWARF" } else { "no DWARF" };
        println!("{name:28} {counts:14} no register: {lost}  {checked}, {} differences", errors.len());
        wrong.extend(errors.into_iter().map(|error| format!("{path}: {error}")));
        let counts = ThreadEvent::ALL.map(|e| analysis.thread.sites.iter().filter(|s| s.event == e).count());
        let thread = truth.as_ref().map(|truth| thread_differences(&analysis, truth)).unwrap_or_default();
        println!("    threads {counts:?} {}, {} differences", analysis.thread.outcome, thread.len());
        wrong.extend(thread.into_iter().map(|error| format!("{path}: {error}")));
        let kinds = sites(&analysis, Point::GcEnter).iter().map(|s| s.pause).collect::<Vec<_>>();
        println!("    pauses {kinds:?}");
        let symbol = image.symbol("gc_start").map(|symbol| symbol.address);
        let owner = sites(&analysis, Point::GcStart)[0].owner;
        if symbol.is_some_and(|symbol| symbol != owner) {
            wrong.push(format!("{path}: GC_START is in {owner}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Thread sites whose source line is that of another event and, if the finder claims to have all, source lines that have
/// code but no site.
fn thread_differences(analysis: &RubyAnalysis, truth: &Truth) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut texts: HashMap<String, Vec<String>> = HashMap::new();
    let mut event_of = |line: &Line| -> Option<ThreadEvent> {
        let lines = texts.entry(line.file.clone()).or_insert_with(|| {
            // Distributions make the paths relative to the source directory, which the environment then names.
            let source = std::env::var("GCTRACE_RUBY_SOURCE").unwrap_or_default();
            let text = std::fs::read_to_string(Path::new(&source).join(&line.file)).unwrap_or_default();
            text.lines().map(str::to_owned).collect()
        });
        let text = lines.get((line.number as usize).checked_sub(1)?)?;
        let event = text.split_once("RB_INTERNAL_THREAD_HOOK(RUBY_INTERNAL_THREAD_EVENT_")?.1;
        ThreadEvent::ALL.into_iter().find(|e| event.starts_with(&format!("{e:?}").to_uppercase()))
    };
    let mut covered = BTreeSet::new();
    for site in &analysis.thread.sites {
        let line = truth.line(site.address.0);
        let found = line.and_then(&mut event_of);
        if found != Some(site.event) {
            wrong.push(format!("{:?} at {} is at line {line:?}", site.event, site.address));
        }
        covered.extend(line.map(|line| (line.file.clone(), line.number)));
    }
    if analysis.thread.outcome == Outcome::Passed {
        for line in truth.lines() {
            if event_of(line).is_some() && !covered.contains(&(line.file.clone(), line.number)) {
                wrong.push(format!("no thread site for {line:?}"));
            }
        }
    }
    wrong
}

/// Sites outside every copy of their function, and copies without a site.
fn differences(analysis: &RubyAnalysis, truth: &Truth) -> Vec<String> {
    let mut wrong = Vec::new();
    for (point, name) in EVENT_FUNCTIONS {
        let instances = truth.instances(name);
        let sites = sites(analysis, point);
        if instances.is_empty() {
            wrong.push(format!("no copy of {name} in the DWARF"));
        }
        let within = |site: &Site, instance: &Instance| {
            instance.contains(site.address.0) || instance.contains(site.guard.0)
        };
        for site in &sites {
            // If clang merges two copies into one, it gives the code line 0 and leaves it out of both.
            let merged = [site.address, site.guard]
                .iter()
                .all(|address| truth.line(address.0).is_some_and(|line| line.number == 0));
            if !merged && !instances.iter().any(|instance| within(site, instance)) {
                wrong.push(format!("{} at {} is in no copy of {name}", point.name(), site.address));
            }
        }
        for instance in instances {
            // The cold part of a function that the compiler split belongs to the hot part.
            if instance.caller.as_deref() == Some(name) {
                continue;
            }
            if !sites.iter().any(|site| within(site, instance)) {
                wrong.push(format!("no {} site in a copy of {name}: {instance:x?}", point.name()));
            }
        }
    }
    for site in sites(analysis, Point::GcEnter) {
        let Some(found) = site.pause else { continue };
        let around = truth.instances("gc_enter").into_iter().filter(|i| i.contains(site.guard.0));
        let callers: Vec<&str> =
            around.filter_map(|i| i.caller.as_deref()).filter(|c| *c != "gc_enter").collect();
        let expected = match callers[..] {
            ["gc_start"] => Some(PauseKind::Start),
            ["gc_rest"] => Some(PauseKind::Rest),
            ["gc_continue" | "gc_marks_continue" | "gc_sweep_continue"] => Some(PauseKind::Continue),
            ["rb_objspace_call_finalizer" | "rb_gc_impl_shutdown_call_finalizer"] => {
                Some(PauseKind::Finalizer)
            }
            _ => None,
        };
        if expected != Some(found) {
            wrong.push(format!("GC_ENTER at {} begins {found:?}, its caller is {callers:?}", site.address));
        }
    }
    wrong
}

/// Programs and libraries that are not Ruby are refused with the right reason.
#[test]
fn other_files_are_refused() {
    for path in ["/bin/ls", "/lib/x86_64-linux-gnu/libc.so.6", "/usr/bin/ruby3.1", "/proc/self/exe"] {
        assert_eq!(analyse(&image(path)), Err(Refusal::NotRuby), "{path}");
    }
}

/// None of the host's programs and libraries is mistaken for a Ruby, whatever its code looks like, and checking them costs
/// next to nothing.
#[test]
fn unrelated_files_of_the_host() {
    /// Maximum number of files per directory; more would only take longer.
    const FILES: usize = 150;
    let mut looked_at = 0;
    let start = std::time::Instant::now();
    for folder in ["/usr/bin", "/usr/lib/x86_64-linux-gnu"] {
        let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().flatten().map(|e| e.path()).collect();
        paths.sort();
        let files = paths.into_iter().filter(|path| path.is_file() && !path.is_symlink());
        let elf = |path: &std::path::PathBuf| {
            let mut magic = [0; 4];
            let read = |mut file: File| std::io::Read::read_exact(&mut file, &mut magic);
            File::open(path).and_then(read).is_ok() && magic == *b"\x7fELF"
        };
        for path in files.filter(elf).step_by(3).take(FILES) {
            let file = File::open(&path).unwrap();
            let is_ruby = path.file_name().unwrap().to_string_lossy().starts_with("libruby");
            let defines = matches!(probe_ruby(&file), Ok(Some(RubyPresence::Defines)));
            assert_eq!(defines, is_ruby, "{}", path.display());
            if let Ok(image) = ElfImage::read(&file) {
                assert_eq!(analyse(&image).is_ok(), is_ruby, "{}", path.display());
                if image.machine() == Machine::X86_64 && !is_ruby {
                    let mut code = Code::new(&image);
                    let found = find(&mut code, RubyVersion::new(3, 1, 2), &VM);
                    let checks = found.map(|findings| accept(&code, &VM, &findings));
                    let passed = checks.is_some_and(|checks| {
                        checks.iter().all(|check| !matches!(check.outcome, Outcome::Failed(_)))
                    });
                    assert!(!passed, "{}", path.display());
                }
            }
            looked_at += 1;
        }
    }
    println!("{looked_at} files in {:?}", start.elapsed());
    assert!(looked_at > 50);
}

/// Prints time and memory of one analysis, for each image of the environment, else for Debian's.
#[test]
fn cost_of_an_analysis() {
    let debian = || libruby().to_str().unwrap().to_owned();
    let paths = std::env::var("GCTRACE_RUBY_IMAGES").unwrap_or_else(|_| debian());
    for path in paths.split(':').filter(|path| !path.is_empty()) {
        let start = std::time::Instant::now();
        let image = image(path);
        let read = start.elapsed();
        let accepted = analyse(&image).is_ok();
        println!("{path}: read {read:?}, all {:?}, accepted: {accepted}", start.elapsed());
    }
}

/// Without section headers the program headers lead to the same sites; without program headers there is no image.
#[test]
fn without_section_headers() {
    let bytes = libruby_bytes();
    // e_shoff, and e_shnum with e_shstrndx.
    let patches = (0x28..0x30).chain(0x3c..0x40).map(|at| (at, 0)).collect();
    let analysis = analyse(&ElfImage::read(&Damaged { bytes, patches }).unwrap()).unwrap();
    let whole = libruby_analysis();
    let RubyAnalysis { static_probes, .. } = whole.clone();
    assert_eq!(&RubyAnalysis { static_probes, ..analysis }, whole);

    // e_phnum too.
    let patches = (0x28..0x30).chain(0x38..0x3a).chain(0x3c..0x40).map(|at| (at, 0)).collect();
    assert!(ElfImage::read(&Damaged { bytes, patches }).is_err());
}

/// Damage to code and tables gives a refusal or sites that still pass every check, never a panic.
#[test]
fn damaged_images() {
    let bytes = libruby_bytes();
    // The code around the sites (that of gc.c), then symbols, relocations, constants, unwind table.
    let start = libruby_analysis().sites.iter().find(|site| site.point == Point::GcStart).unwrap();
    let start = libruby_offset(start.address);
    let tables = [".dynsym", ".rela.dyn", ".rela.plt", ".rodata", ".eh_frame"];
    let regions = iter::once(start - 0x9000..start + 0x7000).chain(tables.map(libruby_section));
    let mut noise = Noise(0x1234_5678_9abc);
    for region in regions {
        for _ in 0..10 {
            let patches = (0..40).flat_map(|_| noise.patches(region.clone())).collect();
            let Ok(image) = ElfImage::read(&Damaged { bytes, patches }) else { continue };
            let Ok(analysis) = analyse(&image) else { continue };
            assert!(analysis.sites.iter().all(|site| image.svma_to_file_offset(site.address).is_some()));
        }
    }
}

/// A site whose guard reads a word other than `hook_events` (a shifted field in the code) makes the whole image refused.
#[test]
fn contradiction_is_refused() {
    let bytes = libruby_bytes();
    let start = libruby_analysis().sites.iter().find(|site| site.point == Point::GcStart).unwrap();
    // `test byte [r14+0x16], 0x40`, or with another register, with its displacement changed to 0x1a.
    let guard = libruby_offset(start.guard);
    let displacement = (guard..guard + 5).find(|&at| bytes[at..at + 2] == [0x16, 0x40]).unwrap();
    let damaged = Damaged { bytes, patches: vec![(displacement, 0x1a)] };
    let refusal = analyse(&ElfImage::read(&damaged).unwrap()).unwrap_err();
    assert!(matches!(refusal, Refusal::Check { .. }), "{refusal}");
}
