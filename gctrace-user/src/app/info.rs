//! `gctrace info`: the contents of a recording.

use std::io::Write as _;

use super::{Failure, diff::looked};
use crate::{
    cli::{DocumentArg, InfoArgs},
    export::{
        ExportError, Outputs,
        contents::{Contents, End, Found},
    },
    trace_file::{self, Ending, FORMAT, ReadError, Recording},
};

/// Reads the recording to its end and prints its contents. Returns the exit status.
///
/// # Errors
///
/// The recording cannot be read, or is damaged; what precedes the damage is printed.
pub fn info(args: &InfoArgs) -> Result<u8, Failure> {
    let mut recording = Recording::open(&args.file)?;
    let contents = Contents::default();
    let mut outputs = Outputs::new(vec![contents.exporter()]);
    let replayed = trace_file::replay(&mut recording, &mut outputs);
    let (header, volume) = (recording.header(), recording.volume());
    let found = Found {
        file: args.file.display().to_string(),
        size: std::fs::metadata(&args.file).ok().filter(std::fs::Metadata::is_file).map(|data| data.len()),
        format: FORMAT,
        gctrace: header.gctrace.clone(),
        clock: header.clock,
        begun_ns: header.begun_ns,
        dump: header.dump.as_ref().map(|dump| (dump.why.clone(), dump.at_ns)),
        looked: looked(header),
        host: header.host.name.clone(),
        kernel: header.host.kernel.clone(),
        machine: header.host.machine.clone(),
        cpus: header.host.cpus,
        chunks: volume.chunks,
        stored: volume.stored,
        expanded: volume.expanded,
        end: match &replayed {
            Ok(replayed) => match replayed.ending {
                Ending::Complete => End::Complete,
                Ending::CutOff(bytes) => End::CutOff(bytes),
            },
            Err(error @ ReadError::Unknown { .. }) => End::Unknown(error.to_string()),
            Err(error) => End::Damaged(error.to_string()),
        },
    };
    let mut text = Vec::new();
    let written = match args.format {
        DocumentArg::Text => contents.write_text(&found, &mut text),
        DocumentArg::Json => contents.write_json(&found, &mut text),
    };
    let mut out = std::io::stdout().lock();
    match written.and_then(|()| out.write_all(&text)).and_then(|()| out.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            return Err(ExportError::Stdout(error).into());
        }
        _ => {}
    }
    replayed.map(|_| 0).map_err(Failure::from)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// The contents of a whole, a truncated and a damaged recording are printed; other files give one message.
    #[test]
    fn recordings() {
        let dir = tempfile::tempdir().unwrap();
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/recordings/3.4.gctrace");
        let bytes = std::fs::read(golden).unwrap();
        let file = dir.path().join("x.gctrace");
        for format in [DocumentArg::Text, DocumentArg::Json] {
            let of = |content: &[u8]| {
                std::fs::write(&file, content).unwrap();
                info(&InfoArgs { file: file.clone(), format })
            };
            assert_eq!(of(&bytes).unwrap(), 0);
            assert_eq!(of(&bytes[..bytes.len() - 3]).unwrap(), 0);
            let mut damaged = bytes.clone();
            damaged[bytes.len() / 2] ^= 1;
            let failure = of(&damaged).unwrap_err();
            assert!(failure.to_string().contains("is damaged") && failure.exit_status() == 2, "{failure}");
            assert!(of(b"").unwrap_err().to_string().contains("it is not a gctrace recording"));
        }
    }
}
