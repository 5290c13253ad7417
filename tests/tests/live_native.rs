//! Native frames among those of Ruby, where the program's own report says what must be there.

use anyhow::{Result, ensure};
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::ledger;
use gctrace_tests::live::Live;
use gctrace_tests::pprof::{Frame, Profile, Sample};
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::Script;

/// The least share of a method's CPU time that must have its native frames. The rest: samples from before the
/// tables were there, and between two instructions.
const ENOUGH: f64 = 0.8;

fn position(stack: &[Frame], wanted: impl Fn(&Frame) -> bool) -> Option<usize> {
    stack.iter().position(wanted)
}

/// Whether the frames of libz are above those of the extension, those above the C function, and that above the method.
fn compresses(stack: &[Frame]) -> bool {
    let libz = position(stack, |frame| frame.native && frame.name == "deflate");
    let extension = position(stack, |frame| frame.native && frame.file.ends_with("/zlib.so"));
    let function = position(stack, |frame| !frame.native && frame.name.ends_with("deflate"));
    let method = position(stack, |frame| frame.name.ends_with("compressing"));
    let places = [libz, extension, function, method];
    places.iter().all(Option::is_some) && places.is_sorted()
}

/// Whether the block that the extension calls is above the extension, and that above the method.
fn calls_back(stack: &[Frame]) -> bool {
    let inner = position(stack, |frame| frame.name.ends_with("write") && frame.line > 0);
    let extension = position(stack, |frame| frame.native && frame.file.ends_with("/zlib.so"));
    let Some((inner, first)) = inner.zip(extension) else { return false };
    let between = stack[inner..].iter().position(|frame| frame.native && frame.file.ends_with("/zlib.so"));
    let method = position(stack, |frame| frame.name.ends_with("opening"));
    first < inner && between.is_some_and(|at| method.is_some_and(|method| inner + at < method))
}

/// Frames of libraries and extensions are where they were called; nothing is native below the last Ruby frame.
#[test]
fn native_frames_are_in_order() -> Result<()> {
    let live = Live::begin()?;
    Ruby::each(|ruby| {
        let path = live.path(&format!("natives-{}.pb.gz", ruby.label()));
        let gctrace = Invocation::jsonl([
            "--all-ruby".as_ref(),
            "--rate".as_ref(),
            "499".as_ref(),
            "--pprof".as_ref(),
            path.as_os_str(),
        ])?
        .start_ready()?;
        let done = Script::unwitnessed(&live, ruby, "natives.rb")?.run()?;
        let report = gctrace.stop()?;
        ledger::check(&report)?;
        // Ruby, libc and zlib at least have tables, and there was room for all; most frames have a symbol or a file.
        let [all, unmapped, images, full] =
            ["native_frames", "native_frames_unmapped", "unwind_images", "unwind_tables_full"]
                .map(|name| ledger::user(&report, name));
        let (all, unmapped, images) = (all?, unmapped?, images?);
        ensure!(images >= 3 && full? == 0, "{images} images with tables");
        ensure!(all > 1000 && unmapped * 10 < all, "{unmapped} of {all} native frames are in no file");
        let pid = done.pid.to_string();
        let profile = Profile::open(&path)?;
        let cpu = profile.index("cpu/nanoseconds")?;
        let mut samples = profile.samples;
        samples.retain(|sample: &Sample| sample.label("pid") == Some(&pid));
        for (method, fits) in [("compressing", compresses as fn(&[Frame]) -> bool), ("opening", calls_back)] {
            let of_method = |sample: &&Sample| {
                let inner = position(&sample.stack, |frame| frame.name.ends_with("crc32") && !frame.native);
                let wanted = method == "compressing" || inner.is_some();
                wanted && sample.stack.iter().any(|frame| frame.name.ends_with(method))
            };
            let ms = |fitting: bool| {
                let counted = samples.iter().filter(of_method).filter(|s| !fitting || fits(&s.stack));
                counted.map(|sample| sample.values[cpu] / 1_000_000).sum::<u64>()
            };
            let (all, right) = (ms(false), ms(true));
            ensure!(all > 200, "only {all} ms in {method}");
            ensure!(
                right as f64 >= ENOUGH * all as f64,
                "{right} of {all} ms in {method} have their native frames; one that has not: {:#?}",
                samples
                    .iter()
                    .filter(of_method)
                    .find(|sample| !fits(&sample.stack))
                    .map(|sample| &sample.stack)
            );
        }
        for sample in &samples {
            let root = sample.stack.iter().rposition(|frame| !frame.native && frame.line > 0);
            let below = root.map_or(&[][..], |root| &sample.stack[root..]);
            ensure!(below.iter().all(|frame| !frame.native), "{:#?}", sample.stack);
        }
        Ok(())
    })
}
