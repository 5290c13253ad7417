//! Images about which debuginfod servers are asked, on a thread of its own: a slow server holds up only the images that
//! wait for its answer.

use std::{
    fs::File,
    io::{self, Read as _, Write as _},
    os::{
        fd::{AsFd as _, BorrowedFd},
        unix::net::UnixStream,
    },
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, TryRecvError, channel, sync_channel},
    },
};

use gctrace_common::config::MAX_IMAGES;

use super::{
    debuginfo::{Around, DebugInfo},
    identity::ImageKey,
    image_file::ImageFile,
    tracing_method::{Abilities, Choice, choose},
};
use crate::{cache::Cache, ruby::fallback::Method};

/// An image that waits for an answer.
pub(super) struct Request {
    /// Its identity.
    pub(super) key: ImageKey,
    /// It, open: its process may exit meanwhile.
    pub(super) file: File,
    /// How it is called and found.
    pub(super) image: ImageFile,
}

/// What came of it.
pub(super) struct Response {
    /// The image.
    pub(super) request: Request,
    /// How it is traced, everything considered.
    pub(super) choice: Choice,
}

/// What the thread needs.
pub(super) struct Context {
    pub(super) info: Arc<DebugInfo>,
    pub(super) cache: Cache,
    pub(super) methods: &'static [Method],
    pub(super) abilities: Abilities,
}

/// The thread, which ends with this (after the answer that it waits for, which takes half a minute at most).
pub(super) struct Lookup {
    requests: SyncSender<Request>,
    responses: Receiver<Response>,
    /// Becomes readable when there is an answer.
    awake: UnixStream,
}

impl Lookup {
    /// Starts it.
    pub(super) fn start(context: Context) -> io::Result<Self> {
        let (awake, mut wake) = UnixStream::pair()?;
        awake.set_nonblocking(true)?;
        // No more images than that can be traced.
        let (requests, received) = sync_channel::<Request>(MAX_IMAGES as usize);
        let (response, responses) = channel();
        std::thread::Builder::new().name("gctrace-debuginfod".to_owned()).spawn(move || {
            let Context { info, mut cache, methods, abilities } = context;
            for request in received {
                let around = Around { info: &info, image: &request.image, later: None };
                let choice = choose(&request.file, methods, abilities, &mut cache, around);
                let sent = response.send(Response { request, choice }).is_ok();
                if !sent || wake.write_all(&[0]).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self { requests, responses, awake })
    }

    /// Queues a request. `false`: there are too many, or the thread has ended.
    pub(super) fn request(&self, request: Request) -> bool {
        self.requests.try_send(request).is_ok()
    }

    /// Readable when there is an answer, or never will be one.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.awake.as_fd()
    }

    /// The next answer, if there is one; `Err` if the thread has ended.
    pub(super) fn response(&self) -> Result<Option<Response>, ()> {
        let mut bytes = [0; 64];
        while (&self.awake).read(&mut bytes).is_ok_and(|n| n == bytes.len()) {}
        match self.responses.try_recv() {
            Ok(answer) => Ok(Some(answer)),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => Err(()),
        }
    }
}
