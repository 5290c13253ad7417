//! A request that a server has served.

/// One HTTP request. What is not known is `None`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Its number in this run.
    pub id: u64,
    /// The thread that served it.
    pub tid: u32,
    /// When that thread took it, `CLOCK_MONOTONIC` nanoseconds.
    pub begin_ns: u64,
    /// When the thread was done with it; not seen where the connection was handed to somebody else.
    pub end_ns: Option<u64>,
    /// Its method, one of those of RFC 9110 and 5789; another one is not known.
    pub method: Option<&'static str>,
    /// Its path without what differs from request to request, visible ASCII. `(other)`: the process has too many.
    pub path: Option<String>,
    /// Status of the response, 200 to 599 (or 101).
    pub status: Option<u16>,
    /// From taking it to the first bytes of the response, nanoseconds.
    pub first_byte_ns: Option<u64>,
    /// From taking it to the last bytes, nanoseconds.
    pub last_byte_ns: Option<u64>,
    /// GC cycles that it started.
    pub gcs: u32,
    /// GC pauses of its thread meanwhile, nanoseconds.
    pub gc_ns: u64,
}

impl Request {
    /// From taking it to being done with it, nanoseconds.
    pub fn duration_ns(&self) -> Option<u64> {
        self.end_ns.map(|end_ns| end_ns.saturating_sub(self.begin_ns))
    }

    /// Method and path as one text, such as `GET /orders/:id`.
    pub fn endpoint(&self) -> String {
        match (self.method, &self.path) {
            (Some(method), Some(path)) => format!("{method} {path}"),
            (None, Some(path)) => path.clone(),
            _ => "(unknown)".to_owned(),
        }
    }
}
