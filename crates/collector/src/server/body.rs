//! Reading bodies, with limits on size, time and the total memory over all connections.
//!
//! The first [`FIRST`] bytes of a body are free: the number of connections is limited, and so is the sum of these bytes. Memory beyond
//! them is only for senders with a known token, and comes from one of two shares, so that large bodies cannot
//! take the memory of small ones. A body whose size is announced gets all of its memory at once: if bodies got their memory step by step,
//! those that arrive together would hold all of it while each waits for the others.

use std::{sync::Arc, time::Duration};

use http_body_util::BodyExt as _;
use hyper::{
    Request,
    body::{Body as _, Bytes, Incoming},
    header,
};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, timeout, timeout_at},
};

use super::{LARGE, MAX_BODY};

/// Memory is allocated in units of this many bytes.
pub(super) const UNIT: usize = 64 << 10;
/// Bytes of a body that are read before its sender is known.
pub(super) const FIRST: usize = UNIT;
/// Timeout for a whole body.
const TOTAL: Duration = Duration::from_mins(1);
/// In each window of this length, an incomplete body must deliver at least [`LEAST`] bytes, and at least half the rate at which its
/// announced size arrives in time.
const WINDOW: Duration = Duration::from_secs(10);
/// See [`WINDOW`].
const LEAST: usize = 64 << 10;
/// The announced size divided by this must arrive in each [`WINDOW`].
const PART: usize = 12;
/// Timeout for getting memory while other bodies occupy it.
const MEMORY: Duration = Duration::from_secs(15);
/// A refused body is read to its end up to this size, so that its sender reads the answer.
const DRAINED: u64 = 2 * MAX_BODY as u64;

/// Memory for the bodies of all connections, in units of [`UNIT`].
#[derive(Debug)]
pub(super) struct Memory {
    /// For bodies of up to [`LARGE`] bytes.
    pub(super) small: Arc<Semaphore>,
    /// For larger ones.
    pub(super) large: Arc<Semaphore>,
}

impl Memory {
    /// Creates the shares for small and large bodies, with this many units each.
    pub(super) fn new(small: usize, large: usize) -> Self {
        Self { small: Arc::new(Semaphore::new(small)), large: Arc::new(Semaphore::new(large)) }
    }
}

/// A body, and the memory allocated to it.
pub(super) struct Body {
    pub(super) bytes: Vec<u8>,
    /// Released when the body is dropped.
    _memory: Option<OwnedSemaphorePermit>,
}

/// Why a body could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BodyError {
    /// More bytes than allowed.
    TooLarge,
    /// The connection broke off.
    Broken,
    /// The body did not arrive in time.
    Late,
    /// Other bodies occupy all memory.
    Busy,
}

/// A body that is being received.
pub(super) struct Reader {
    incoming: Incoming,
    limit: usize,
    /// Its size, if the head announces it. No more bytes are read then.
    announced: Option<usize>,
    bytes: Vec<u8>,
    /// Received, but not yet in `bytes`.
    pending: Bytes,
    whole: bool,
    memory: Option<OwnedSemaphorePermit>,
    /// Whether `memory` comes from the share for large bodies.
    large: bool,
    deadline: Instant,
    window: Instant,
    in_window: usize,
}

impl Reader {
    /// Starts to read the body of a request, of at most `limit` bytes: all of it, or its first [`FIRST`] bytes.
    pub(super) async fn begin(request: Request<Incoming>, limit: usize) -> Result<Self, BodyError> {
        let waits = request.headers().contains_key(header::EXPECT);
        let incoming = request.into_body();
        let announced = incoming.size_hint().exact();
        let now = Instant::now();
        let mut reader = Self {
            incoming,
            limit,
            announced: announced.and_then(|size| size.try_into().ok()),
            bytes: Vec::new(),
            pending: Bytes::new(),
            whole: false,
            memory: None,
            large: announced.is_some_and(|size| size > LARGE as u64),
            deadline: now + TOTAL,
            window: now,
            in_window: 0,
        };
        if announced.is_some_and(|size| size > limit as u64) {
            // A sender that waits for `100 Continue` need not send the body.
            if !waits {
                reader.drain().await;
            }
            return Err(BodyError::TooLarge);
        }
        while reader.bytes.len() < FIRST.min(limit) {
            let Some(mut data) = reader.frame().await? else { return Ok(reader) };
            let room = data.len().min(FIRST.min(limit) - reader.bytes.len());
            reader.bytes.extend_from_slice(&data.split_to(room));
            reader.pending = data;
        }
        Ok(reader)
    }

    /// `Ok` with the whole body if all of it has arrived, else `Err` with its beginning.
    pub(super) fn so_far(&self) -> Result<&[u8], &[u8]> {
        if self.whole { Ok(&self.bytes) } else { Err(&self.bytes) }
    }

    /// Reads the rest of the body.
    pub(super) async fn rest(mut self, memory: &Memory) -> Result<Body, BodyError> {
        while !self.whole {
            let data = std::mem::take(&mut self.pending);
            if self.bytes.len() + data.len() > self.limit {
                self.drain().await;
                return Err(BodyError::TooLarge);
            }
            self.reserve(data.len(), memory).await?;
            self.bytes.extend_from_slice(&data);
            if let Some(data) = self.frame().await? {
                self.pending = data;
            }
        }
        Ok(Body { bytes: self.bytes, _memory: self.memory })
    }

    /// Reads the next piece; `None` at the end.
    async fn frame(&mut self) -> Result<Option<Bytes>, BodyError> {
        loop {
            let until = self.deadline.min(self.window + WINDOW);
            match timeout_at(until, self.incoming.frame()).await {
                Err(_) if until == self.deadline || self.in_window < self.least() => {
                    return Err(BodyError::Late);
                }
                Err(_) => self.open_window(),
                Ok(None) => {
                    self.whole = true;
                    return Ok(None);
                }
                Ok(Some(Err(_))) => return Err(BodyError::Broken),
                Ok(Some(Ok(frame))) => {
                    let Ok(data) = frame.into_data() else { continue };
                    self.in_window += data.len();
                    return Ok(Some(data));
                }
            }
        }
    }

    /// Minimum number of bytes that must arrive in the current [`WINDOW`].
    fn least(&self) -> usize {
        self.announced.map_or(LEAST, |size| LEAST.max(size / PART))
    }

    fn open_window(&mut self) {
        self.window = Instant::now();
        self.in_window = 0;
    }

    /// Allocates memory for `more` bytes, or for the whole announced size, once enough is available.
    async fn reserve(&mut self, more: usize, memory: &Memory) -> Result<(), BodyError> {
        let (len, capacity) = (self.bytes.len(), self.bytes.capacity());
        if len + more <= capacity {
            return Ok(());
        }
        let size = self.announced.unwrap_or(2 * capacity);
        let wanted = (len + more).max(size).min(self.limit).next_multiple_of(UNIT);
        let mut units = wanted / UNIT - self.memory.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        if wanted > LARGE && !self.large && self.memory.is_some() {
            // Once it has memory for large bodies, it releases its memory for small ones.
            units = wanted / UNIT;
        }
        self.large |= wanted > LARGE;
        let share = if self.large { &memory.large } else { &memory.small };
        let permit = timeout(MEMORY, Arc::clone(share).acquire_many_owned(units as u32))
            .await
            .map_err(|_| BodyError::Busy)?
            .map_err(|_| BodyError::Busy)?;
        match &mut self.memory {
            Some(mine) if Arc::ptr_eq(mine.semaphore(), share) => mine.merge(permit),
            other => *other = Some(permit),
        }
        self.bytes.reserve_exact(wanted - len);
        // The time during which the server did not read does not count.
        self.open_window();
        Ok(())
    }

    /// Discards what has arrived and what still arrives, within the limits on size and time.
    pub(super) async fn drain(&mut self) {
        self.bytes = Vec::new();
        self.pending = Bytes::new();
        self.memory = None;
        let mut left = DRAINED.min(self.incoming.size_hint().upper().unwrap_or(DRAINED));
        while left > 0 {
            match self.frame().await {
                Ok(Some(data)) => left = left.saturating_sub(data.len() as u64),
                _ => return,
            }
        }
    }
}
