//! Answers that clients do not read: their total memory is limited, and their connections are closed.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use hyper::body::Bytes;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Sleep, sleep},
};

use super::body::UNIT;

/// Memory for unsent answers, in units of [`UNIT`]. Answers of up to one unit take none of it, since the number of connections is limited.
const UNITS: usize = 1024;
/// A connection is closed if its peer accepts no bytes of the answer for this time.
const PATIENCE: Duration = Duration::from_secs(30);

/// Memory for the answers of all connections.
#[derive(Debug)]
pub(super) struct Unread(Arc<Semaphore>);

impl Default for Unread {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(UNITS)))
    }
}

/// An answer, and the memory allocated to it.
struct Held {
    text: String,
    /// Released once the answer is sent, or can no longer be sent.
    _memory: OwnedSemaphorePermit,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        self.text.as_bytes()
    }
}

impl Unread {
    /// Allocates memory for an answer to be sent; `None` if other answers occupy it.
    pub(super) fn hold(&self, text: String) -> Option<Bytes> {
        if text.len() <= UNIT {
            return Some(text.into());
        }
        let units = text.len().div_ceil(UNIT).min(UNITS) as u32;
        let memory = Arc::clone(&self.0).try_acquire_many_owned(units).ok()?;
        Some(Bytes::from_owner(Held { text, _memory: memory }))
    }
}

/// A stream whose writes fail once the peer has accepted nothing for [`PATIENCE`].
#[derive(Debug)]
pub(super) struct Impatient<S> {
    stream: S,
    /// Set while the peer accepts nothing.
    until: Option<Pin<Box<Sleep>>>,
}

impl<S> Impatient<S> {
    pub(super) fn new(stream: S) -> Self {
        Self { stream, until: None }
    }

    fn in_time<T>(&mut self, context: &mut Context<'_>, taken: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if taken.is_ready() {
            self.until = None;
            return taken;
        }
        let until = self.until.get_or_insert_with(|| Box::pin(sleep(PATIENCE)));
        until.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Impatient<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Impatient<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let taken = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.in_time(context, taken)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let taken = Pin::new(&mut self.stream).poll_write_vectored(context, pieces);
        self.in_time(context, taken)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let taken = Pin::new(&mut self.stream).poll_flush(context);
        self.in_time(context, taken)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let taken = Pin::new(&mut self.stream).poll_shutdown(context);
        self.in_time(context, taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Large unsent answers take all of the memory and no more; small ones need none of it.
    #[test]
    fn bounded() {
        let unread = Unread::default();
        let text = |units: usize| "x".repeat(units * UNIT);
        let most = unread.hold(text(UNITS - 1)).unwrap();
        // A part of an answer that is being sent holds the memory of the whole answer.
        let part = most.slice(1..2);
        drop(most);
        assert!(unread.hold(text(2)).is_none());
        assert!(unread.hold(text(1)).is_some());
        drop(part);
        let all = unread.hold(text(UNITS + 1)).unwrap();
        assert_eq!(all.len(), (UNITS + 1) * UNIT);
        assert!(unread.hold(text(2)).is_none());
        assert!(unread.hold(text(1)).is_some());
    }
}
