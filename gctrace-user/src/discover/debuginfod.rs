//! Queries debuginfod servers about images, on a separate thread: a slow server delays only the images that
//! wait for its response.

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

/// An image to query.
pub(super) struct Request {
    /// Its identity.
    pub(super) key: ImageKey,
    /// The open file: its process may exit meanwhile.
    pub(super) file: File,
    /// Its paths.
    pub(super) image: ImageFile,
}

/// The outcome of a request.
pub(super) struct Response {
    /// The request.
    pub(super) request: Request,
    /// The tracing method, taking everything into account.
    pub(super) choice: Choice,
}

/// Input of the thread.
pub(super) struct Context {
    pub(super) info: Arc<DebugInfo>,
    pub(super) cache: Cache,
    pub(super) methods: &'static [Method],
    pub(super) abilities: Abilities,
}

/// The thread, which ends when this is dropped (after the pending response, which takes at most half a minute).
pub(super) struct Lookup {
    requests: SyncSender<Request>,
    responses: Receiver<Response>,
    /// Readable when there is a response.
    awake: UnixStream,
}

impl Lookup {
    /// Starts the thread.
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

    /// Queues a request. `false`: the queue is full, or the thread has ended.
    pub(super) fn request(&self, request: Request) -> bool {
        self.requests.try_send(request).is_ok()
    }

    /// A descriptor that is readable when there is a response, or when the thread has ended.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.awake.as_fd()
    }

    /// The next response, if there is one; `Err` if the thread has ended.
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
