//! Recordings whose writer is killed while it writes as fast as it can.

use std::{
    env,
    io::Read as _,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use super::*;

/// Set to the path of the file in the process that writes it.
const FILE: &str = "GCTRACE_CRASH_FILE";

/// Random bytes.
fn random(bytes: &mut [u8]) {
    std::fs::File::open("/dev/urandom").unwrap().read_exact(bytes).unwrap();
}

/// The process that is killed: it writes one chunk after another, each with one numbered entry.
#[test]
#[ignore = "killed_at_50_moments runs it"]
fn writer() {
    let path = env::var_os(FILE).expect("killed_at_50_moments sets it");
    let mut recorder = Recorder::create(Path::new(&path), &header()).unwrap();
    let mut noise = vec![0; 1 << 15];
    for number in 0.. {
        random(&mut noise);
        let reason: String = noise.iter().map(|byte| char::from(b' ' + byte % 64)).collect();
        recorder.refused(Some(number), "/ruby", &reason).unwrap();
        for second in [0, 1] {
            recorder.flush((u64::from(number) * 2 + second) * CHUNK_NS).unwrap();
        }
    }
}

/// After a kill at 50 random moments, everything up to the last whole chunk is present, in order, and nothing more;
/// the end of it is reported.
#[test]
fn killed_at_50_moments() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("k.gctrace");
    let (mut entries, mut incomplete) = (0, 0);
    for _ in 0..50 {
        let mut command = Command::new(env::current_exe().unwrap());
        command
            .args(["--ignored", "--exact", "trace_file::tests::crash::writer"])
            .env(FILE, &path)
            .stdout(Stdio::null());
        let mut child = command.spawn().unwrap();
        let begun = std::time::Instant::now();
        while std::fs::metadata(&path).map_or(0, |data| data.len()) == 0 {
            assert!(begun.elapsed() < Duration::from_mins(1) && child.try_wait().unwrap().is_none());
            thread::sleep(Duration::from_micros(200));
        }
        let mut moment = [0; 2];
        random(&mut moment);
        thread::sleep(Duration::from_micros(u64::from(u16::from_le_bytes(moment))));
        child.kill().unwrap();
        assert!(!child.wait().unwrap().success());
        let bytes = std::fs::read(&path).unwrap();
        let ends = boundaries(&bytes);
        let whole = ends.iter().filter(|end| **end <= bytes.len()).count();
        let (result, lines) = replayed(&bytes);
        let numbers = lines.iter().filter_map(|line| line.strip_prefix("refused Some(")?.split(')').next());
        let numbers: Vec<usize> = numbers.map(|number| number.parse().unwrap()).collect();
        // The first of all chunks is the header.
        assert_eq!(numbers, (0..whole - 2).collect::<Vec<_>>(), "of {} bytes", bytes.len());
        let left = (bytes.len() - ends[whole - 1]) as u64;
        assert_eq!(result.unwrap().ending, Ending::CutOff(left));
        entries += numbers.len();
        incomplete += u64::from(left > 0);
        std::fs::remove_file(&path).unwrap();
    }
    assert!(entries > 0, "nothing was written");
    eprintln!("{entries} entries, {incomplete} recordings end within a chunk");
}
