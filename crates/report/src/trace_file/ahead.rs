//! Reading a recording with several threads: one reads chunks from the file, some expand and decode them, and the
//! caller receives them in order.
//!
//! Chunks are independent of each other, so the decoding threads take turns: the caller waits for the one whose turn
//! it is. A chunk that the caller is done with is sent back to the thread that made it, which frees it: freeing memory
//! of another thread is what allocators are slow at.

use std::{
    io::{self, Read},
    num::NonZero,
    sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel},
    thread::{self, Scope},
};

use super::{
    ReadError, Recording, Volume,
    chunk::{Ending, Stored},
    kinds::decode::{Recorded, Tables},
    recording::{ChunkReader, damaged},
};

/// Minimum and maximum number of decoding threads. Each has one chunk queued, one being decoded, and one being consumed by the caller.
const DECODERS: [usize; 2] = [2, 4];

/// A chunk with entries.
pub(super) struct Chunk {
    /// Its start and end in the file.
    pub(super) begin: u64,
    pub(super) end: u64,
    pub(super) tables: Tables,
    pub(super) entries: Vec<Recorded>,
}

/// The next item of the file.
struct Next {
    begin: u64,
    /// How much has been read of the file, including this item.
    volume: Volume,
    what: Result<Result<Stored, Ending>, ReadError>,
}

/// The same item, decoded.
type Decoded = (Volume, Result<Result<Chunk, Ending>, ReadError>);

/// The caller's ends of the channels of a decoding thread.
struct Decoder {
    to: SyncSender<Next>,
    from: Receiver<Decoded>,
    back: Sender<Chunk>,
}

/// Passes on each chunk. `before` is called before each one is read. Returns how the recording ends, or why it cannot be read any further.
pub(super) fn each<R: Read + Send>(
    recording: &mut Recording<R>,
    mut before: impl FnMut(&mut Recording<R>) -> Result<(), ReadError> + Send,
    mut hand: impl FnMut(&Chunk),
) -> Result<Ending, ReadError> {
    let (path, by) = (recording.path().to_owned(), recording.header().gctrace.clone());
    let mut volume = recording.volume();
    let cpus = thread::available_parallelism().map_or(1, NonZero::get);
    let ended = thread::scope(|scope| {
        let failed = |source| ReadError::Io { path: path.clone(), source };
        let (mut to, mut from) = (Vec::new(), Vec::new());
        for _ in 0..cpus.clamp(DECODERS[0], DECODERS[1]) {
            let decoder = decoder(scope, &path, &by).map_err(failed)?;
            to.push(decoder.to);
            from.push((decoder.from, decoder.back));
        }
        let mut next = || {
            before(recording)?;
            let begin = recording.offset();
            Ok((begin, recording.stored()?, recording.volume()))
        };
        let reader = move || {
            for to in to.iter().cycle() {
                let next = match next() {
                    Ok((begin, what, volume)) => Next { begin, volume, what: Ok(what) },
                    Err(error) => Next { begin: 0, volume: Volume::default(), what: Err(error) },
                };
                let is_last = !matches!(next.what, Ok(Ok(_)));
                if to.send(next).is_err() || is_last {
                    return;
                }
            }
        };
        named("gctrace-ahead").spawn_scoped(scope, reader).map_err(failed)?;
        for (from, back) in from.iter().cycle() {
            // If nothing is received, the thread has panicked, and the scope panics, too.
            let Ok((read, decoded)) = from.recv() else { break };
            match decoded? {
                Ok(chunk) => {
                    volume = read;
                    hand(&chunk);
                    // If the thread has ended, the chunk is dropped here.
                    drop(back.send(chunk));
                }
                Err(ending) => {
                    volume = read;
                    return Ok(ending);
                }
            }
        }
        Ok(Ending::CutOff(0))
    });
    // Chunks after the last usable one may have been read, too.
    recording.read_only(volume);
    ended
}

fn named(name: &str) -> thread::Builder {
    thread::Builder::new().name(name.to_owned())
}

/// Starts a decoding thread.
fn decoder<'scope>(
    scope: &'scope Scope<'scope, '_>,
    path: &'scope std::path::Path,
    by: &'scope str,
) -> io::Result<Decoder> {
    let (to, nexts) = sync_channel::<Next>(1);
    let (decoded, from) = sync_channel(1);
    let (back, done) = channel::<Chunk>();
    let decode = move || {
        let mut reader = ChunkReader::default();
        for Next { begin, volume, what } in nexts {
            let what = what.and_then(|next| match next {
                Err(ending) => Ok(Err(ending)),
                Ok(stored) => {
                    let read = reader.read(&stored).map_err(|invalid| damaged(path, by, begin, invalid))?;
                    let (tables, entries) = read;
                    Ok(Ok(Chunk { begin, end: volume.stored, tables, entries }))
                }
            });
            if decoded.send((volume, what)).is_err() {
                return;
            }
            while let Ok(chunk) = done.try_recv() {
                drop(chunk);
            }
        }
    };
    named("gctrace-decode").spawn_scoped(scope, decode)?;
    Ok(Decoder { to, from, back })
}
