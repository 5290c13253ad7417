//! A server that receives pushes and sends the answers that the test defines.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context as _, Result};

/// A request that was pushed.
#[derive(Clone, Debug)]
pub struct Push {
    /// Path of the request.
    pub path: String,
    /// Its head, in lower case.
    pub head: String,
    /// Its body as received.
    pub body: Vec<u8>,
    /// The status of the answer.
    pub code: u16,
}

/// An answer: status, additional header lines, body.
pub type Answer = (u16, &'static str, &'static [u8]);

/// The server. It runs until the test ends.
#[derive(Debug)]
pub struct Receiver {
    /// The address that it listens on.
    pub address: SocketAddr,
    pushes: Arc<Mutex<Vec<Push>>>,
}

impl Receiver {
    /// Starts a server on a free port. `answer` gets the request (with code 0) and the number of requests before it.
    pub fn start(answer: impl Fn(&Push, usize) -> Answer + Send + Sync + 'static) -> Result<Self> {
        Self::on(TcpListener::bind("127.0.0.1:0")?, answer)
    }

    /// Like [`Self::start`], on a port that is already bound.
    pub fn on(
        listener: TcpListener,
        answer: impl Fn(&Push, usize) -> Answer + Send + Sync + 'static,
    ) -> Result<Self> {
        let address = listener.local_addr()?;
        let pushes = Arc::new(Mutex::new(Vec::new()));
        let (known, answer) = (Arc::clone(&pushes), Arc::new(answer));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (known, answer) = (Arc::clone(&known), Arc::clone(&answer));
                // A client that disconnects ends only its own thread.
                std::thread::spawn(move || drop(serve(&stream, &known, answer.as_ref())));
            }
        });
        Ok(Self { address, pushes })
    }

    /// The pushes received so far.
    pub fn pushes(&self) -> Vec<Push> {
        lock(&self.pushes).clone()
    }
}

fn lock(pushes: &Mutex<Vec<Push>>) -> MutexGuard<'_, Vec<Push>> {
    pushes.lock().unwrap_or_else(PoisonError::into_inner)
}

fn serve(
    stream: &TcpStream,
    known: &Mutex<Vec<Push>>,
    answer: &(dyn Fn(&Push, usize) -> Answer + Send + Sync),
) -> Result<()> {
    let mut reader = BufReader::new(stream);
    loop {
        let mut head = String::new();
        loop {
            let before = head.len();
            if reader.read_line(&mut head)? == 0 {
                return Ok(());
            }
            if head[before..].trim().is_empty() {
                break;
            }
        }
        let path = head.split(' ').nth(1).context("a path")?.to_owned();
        let head = head.to_ascii_lowercase();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length:"));
        let mut body = vec![0; length.context("a length")?.trim().parse()?];
        reader.read_exact(&mut body)?;
        let mut push = Push { path, head, body, code: 0 };
        let (code, further, body) = {
            let mut known = lock(known);
            let answer = answer(&push, known.len());
            push.code = answer.0;
            known.push(push);
            answer
        };
        let mut stream = stream;
        write!(stream, "HTTP/1.1 {code} x\r\nContent-Length: {}\r\n{further}\r\n", body.len())?;
        stream.write_all(body)?;
    }
}
