//! Reading bodies: bounded in size, in time and, over all connections, in memory.

use std::{sync::Arc, time::Duration};

use http_body_util::BodyExt as _;
use hyper::{Request, body::Body as _, body::Incoming, header};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, timeout, timeout_at},
};

use super::MAX_BODY;

/// Memory is given out in pieces of this many bytes.
pub(super) const UNIT: usize = 64 << 10;
/// For a whole body.
const TOTAL: Duration = Duration::from_mins(1);
/// Between two pieces of a body.
const IDLE: Duration = Duration::from_secs(10);
/// For memory, while other bodies have it.
const MEMORY: Duration = Duration::from_secs(15);
/// A body that is too large is read to its end up to this size, so that its sender reads the answer.
const DRAINED: u64 = 2 * MAX_BODY as u64;

/// A body, and the memory that it was given.
pub(super) struct Body {
    pub(super) bytes: Vec<u8>,
    /// Given back with the body.
    memory: Option<OwnedSemaphorePermit>,
}

/// Why there is no body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BodyError {
    /// More bytes than allowed.
    TooLarge,
    /// The connection broke off.
    Broken,
    /// It did not come in time.
    Late,
    /// Other bodies take all the memory.
    Busy,
}

/// Reads the body of a request of at most `limit` bytes.
pub(super) async fn read(
    request: Request<Incoming>,
    limit: usize,
    memory: &Arc<Semaphore>,
) -> Result<Body, BodyError> {
    let waits = request.headers().contains_key(header::EXPECT);
    let mut incoming = request.into_body();
    let announced = incoming.size_hint().exact();
    if announced.is_some_and(|size| size > limit as u64) {
        // Its sender has not begun yet: it need not.
        if !waits {
            drain(&mut incoming, announced.unwrap_or(0)).await;
        }
        return Err(BodyError::TooLarge);
    }
    let deadline = Instant::now() + TOTAL;
    let mut body = Body { bytes: Vec::new(), memory: None };
    loop {
        let next = timeout_at(deadline.min(Instant::now() + IDLE), incoming.frame());
        let Some(frame) = next.await.map_err(|_| BodyError::Late)? else { return Ok(body) };
        let Ok(data) = frame.map_err(|_| BodyError::Broken)?.into_data() else { continue };
        if body.bytes.len() + data.len() > limit {
            drop(body);
            drain(&mut incoming, DRAINED).await;
            return Err(BodyError::TooLarge);
        }
        body.reserve(data.len(), limit, memory).await?;
        body.bytes.extend_from_slice(&data);
    }
}

impl Body {
    /// Makes room for so many more bytes, with memory that is there.
    async fn reserve(&mut self, more: usize, limit: usize, memory: &Arc<Semaphore>) -> Result<(), BodyError> {
        let (len, capacity) = (self.bytes.len(), self.bytes.capacity());
        if len + more <= capacity {
            return Ok(());
        }
        let wanted = (len + more).max(2 * capacity).min(limit).next_multiple_of(UNIT);
        let units = (wanted / UNIT - capacity / UNIT) as u32;
        let permit = timeout(MEMORY, Arc::clone(memory).acquire_many_owned(units))
            .await
            .map_err(|_| BodyError::Busy)?
            .map_err(|_| BodyError::Busy)?;
        match &mut self.memory {
            Some(mine) => mine.merge(permit),
            none => *none = Some(permit),
        }
        self.bytes.reserve_exact(wanted - len);
        Ok(())
    }
}

/// Throws away what comes, within limits of size and time.
async fn drain(incoming: &mut Incoming, mut left: u64) {
    let deadline = Instant::now() + TOTAL;
    left = left.min(DRAINED);
    while left > 0 {
        match timeout_at(deadline.min(Instant::now() + IDLE), incoming.frame()).await {
            Ok(Some(Ok(frame))) => {
                left = left.saturating_sub(frame.data_ref().map_or(0, |data| data.len() as u64));
            }
            _ => return,
        }
    }
}
