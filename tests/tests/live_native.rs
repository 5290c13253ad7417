//! Native frames among Ruby frames, compared with the program's own report of what must be there.

use std::ffi::OsStr;
use std::io::Read as _;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use gctrace_tests::PATIENCE;
use gctrace_tests::ensure_times;
use gctrace_tests::gctrace::Invocation;
use gctrace_tests::ledger;
use gctrace_tests::live::Live;
use gctrace_tests::pprof::{Frame, Profile, Sample};
use gctrace_tests::receiver::Receiver;
use gctrace_tests::ruby::Ruby;
use gctrace_tests::script::Script;

/// Minimum share of a method's CPU time that must have its native frames. The rest are samples between two instructions.
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

/// Whether the block that the extension calls is above the extension, and the extension above the method.
fn calls_back(stack: &[Frame]) -> bool {
    let inner = position(stack, |frame| frame.name.ends_with("write") && frame.line > 0);
    let extension = position(stack, |frame| frame.native && frame.file.ends_with("/zlib.so"));
    let Some((inner, first)) = inner.zip(extension) else { return false };
    let between = stack[inner..].iter().position(|frame| frame.native && frame.file.ends_with("/zlib.so"));
    let method = position(stack, |frame| frame.name.ends_with("opening"));
    first < inner && between.is_some_and(|at| method.is_some_and(|method| inner + at < method))
}

/// Waits until gctrace walks through the library that the script keeps calling, which it does once the unwind tables are loaded: then a profile
/// contains the extension that called the library. Before that, stacks have only their innermost native frame.
fn wait_for_tables(receiver: &Receiver) -> Result<()> {
    // Skip the next two pushes: they may contain the script's start, in which the extension's own code runs.
    let before = receiver.pushes().len() + 2;
    let since = Instant::now();
    let mut read = before;
    loop {
        let pushes = receiver.pushes();
        for push in pushes.iter().skip(read) {
            let mut body = Vec::new();
            flate2::read::GzDecoder::new(push.body.as_slice()).read_to_end(&mut body)?;
            if body.windows(8).any(|part| part == b"/zlib.so") {
                return Ok(());
            }
        }
        read = read.max(pushes.len());
        ensure!(since.elapsed() < PATIENCE, "no walk in {} windows", read.saturating_sub(before));
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Frames of libraries and extensions are where they were called. Below the last Ruby frame nothing is native.
#[test]
fn native_frames_are_in_order() -> Result<()> {
    let live = Live::begin()?;
    Ruby::each(|ruby| {
        let path = live.path(&format!("natives-{}.pb.gz", ruby.label()));
        let receiver = Receiver::start(|_, _| (200, "", b""))?;
        let url = format!("http://{}", receiver.address);
        let mut args: Vec<&OsStr> = ["--all-ruby", "--rate", "499"].map(OsStr::new).to_vec();
        args.extend(
            ["--otlp", &url, "--otlp-signals", "profiles", "--push-interval", "200ms"].map(OsStr::new),
        );
        args.extend([OsStr::new("--pprof"), path.as_os_str()]);
        let gctrace = Invocation::jsonl(args)?.start_ready()?;
        let mut script = Script::unwitnessed(&live, ruby, "natives.rb")?.start()?;
        script.wait_for("warming")?;
        wait_for_tables(&receiver)?;
        script.say("go")?;
        let done = script.finish()?;
        let report = gctrace.stop()?;
        ledger::check(&report)?;
        // At least Ruby, libc and zlib have tables, and there was room for all of them; most frames have a symbol or a file.
        let [all, unmapped, images, full] =
            ["native_frames", "native_frames_unmapped", "unwind_images", "unwind_tables_full"]
                .map(|name| ledger::user(&report, name));
        let (all, unmapped, images) = (all?, unmapped?, images?);
        ensure!(images >= 3 && full? == 0, "{images} images with tables");
        ensure_times!(all > 1000 && unmapped * 10 < all, "{unmapped} of {all} native frames are in no file");
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
            ensure_times!(all > 200, "only {all} ms in {method}");
            ensure_times!(
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
