//! Loads another BPF object than the committed one and logs the lines that its programs send, for debugging them. Only built
//! with the feature `bpf-log` (CONTRIBUTING.md).

use std::{fs, time::Duration};

use aya::{Ebpf, EbpfLoader};
use aya_log::EbpfLogger;

/// Environment variable with the path of the object.
const OBJECT: &str = "GCTRACE_BPF_OBJECT";
/// Interval at which lines are read from the ring.
const INTERVAL: Duration = Duration::from_millis(50);

/// The object that the environment names; `committed` if it names none or the object cannot be read.
pub(super) fn object(committed: &'static [u8]) -> &'static [u8] {
    let Some(path) = std::env::var_os(OBJECT) else { return committed };
    match fs::read(&path) {
        // Leaked once per load, in a build that is not shipped.
        Ok(bytes) => Vec::leak(bytes),
        Err(error) => {
            log::warn!("{OBJECT} {}: {error}; the committed object is loaded", path.display());
            committed
        }
    }
}

/// Makes the programs send lines of the levels that `RUST_LOG` enables.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "the loader keeps the reference until it loads")]
pub(super) fn configure<'a>(loader: &mut EbpfLoader<'a>, level: &'a u8) {
    loader.override_global(aya_log::LEVEL, level, false);
}

/// Logs the lines of the programs until gctrace ends.
pub(super) fn start(ebpf: &mut Ebpf) {
    let mut lines = match EbpfLogger::init(ebpf) {
        Ok(lines) => lines,
        Err(error) => return log::info!("the BPF object sends no lines: {error}"),
    };
    let logged = move || {
        loop {
            lines.flush();
            std::thread::sleep(INTERVAL);
        }
    };
    if let Err(error) = std::thread::Builder::new().name("gctrace-bpf-log".to_owned()).spawn(logged) {
        log::warn!("starting a thread for the lines of BPF programs: {error}");
    }
}
