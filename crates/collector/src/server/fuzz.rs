//! Fuzzing of everything between a connection and an answer: heads, framing, compression, clients that stop or disconnect
//! midway. Connections are in memory and time is tokio's paused clock, so that waiting for the server's timeouts takes no
//! time. The seed is fixed. For longer runs with other seeds:
//! `PROPTEST_CASES=100000 PROPTEST_RNG_SEED=7 cargo test -p gctrace-collector server::fuzz`.

use std::{
    sync::{Arc, Mutex, mpsc},
    time::Duration,
};

use proptest::{prelude::*, sample::select};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, duplex},
    sync::Notify,
    task::JoinSet,
    time::{Instant, sleep},
};

use self::{
    requests::{Content, Framing, content, framing, gzip, manner, request},
    world::{Slow, TOKEN, Then, WORKERS, World, each, runtime},
};
use super::{LARGE, SMALL_UNITS, Shared};
use crate::store::Store;

mod requests;
mod world;

/// Bodies and framing of every kind, before and after good ones, complete or truncated. A complete body gets exactly its expected code; an
/// incomplete one never gets 200.
#[test]
fn bodies() {
    let (runtime, world) = (runtime(), World::new(SMALL_UNITS, |store| store));
    let around = (any::<bool>(), any::<bool>(), any::<bool>());
    // In thousandths of all bytes sent.
    let cut = prop_oneof![3 => Just(1000_usize), 1 => 0..1000_usize];
    let cases = (content(), framing(), manner(), around, cut);
    each(400, &cases, |(content, framing, manner, (before, after, expect), cut)| {
        let (body, gzipped, right) = content.make(world.set);
        let (headers, body, honest) = framing.make(&body);
        let coding = if gzipped { "Content-Encoding: gzip\r\n" } else { "" };
        let expect = if expect { "Expect: 100-continue\r\n" } else { "" };
        let head = format!("POST /ruby HTTP/1.1\r\nHost: x\r\n{coding}{expect}{headers}\r\n");
        let good = request("", &world.set_as(false));
        let around = |there: bool| if there { good.as_slice() } else { &[] };
        let wire = [around(before), head.as_bytes(), &body, around(after)].concat();
        let cut = wire.len() * cut / 1000;
        runtime.block_on(async {
            let received = world.talk(&wire[..cut], &manner.pieces, manner.buffer, manner.then).await;
            let mut codes = world.judged(&received, manner.then);
            // A client that does not wait for answers may receive none.
            if manner.then == Then::Wait && cut >= good.len() && before {
                assert_eq!(codes.remove(0), 200);
            } else if before && !codes.is_empty() {
                codes.remove(0);
            }
            if manner.then == Then::Wait && cut == wire.len() && honest {
                assert!(!codes.is_empty() && right.contains(&codes[0]), "{codes:?}, not {right:?}");
                // If both headers are present, the connection must be closed afterwards (RFC 9112, 6.1).
                let followed = after && !matches!(framing, Framing::Both);
                assert_eq!(&codes[1..], if followed { &[200][..] } else { &[] });
            } else if !honest {
                assert!(codes.len() <= 2 && !codes.contains(&200), "{codes:?}");
            } else {
                assert!(codes.len() <= 1 + usize::from(after), "{codes:?}");
            }
            world.given_back().await;
        });
    });
    runtime.block_on(world.still_works(&[200, 400, 404, 426, 500, 501]));
}

/// Heads of every kind: content codings, many headers, long headers.
#[test]
fn heads() {
    let (runtime, world) = (runtime(), World::new(SMALL_UNITS, |store| store));
    let codings: Vec<(&[u8], bool, u16)> = vec![
        (b"Content-Encoding: gzip\r\n", true, 200),
        (b"content-encoding:x-gzip \r\n", true, 200),
        (b"Content-Encoding: GZip\r\n", true, 200),
        (b"Content-Encoding: identity\r\n", false, 200),
        (b"Content-Encoding: Identity\r\n", false, 200),
        (b"Content-Encoding:\r\n", false, 200),
        (b"", false, 200),
        (b"", true, 400),
        (b"Content-Encoding: identity\r\n", true, 400),
        (b"Content-Encoding: gzip\r\n", false, 400),
        (b"Content-Encoding: br\r\n", true, 400),
        (b"Content-Encoding: gzip, gzip\r\n", true, 400),
        // An unknown coding must not be treated as no coding.
        (b"Content-Encoding: \xff\r\n", false, 400),
        (b"Content-Encoding: identity\r\nContent-Encoding: br\r\n", false, 400),
        (b"Content-Encoding: gzip\r\nContent-Encoding: br\r\n", true, 400),
    ];
    let many = prop_oneof![3 => 0..10_usize, 1 => 80..130_usize, 1 => 130..3000_usize];
    let long = prop_oneof![3 => 0..200_usize, 1 => 200..60_000_usize, 1 => 65_000..200_000_usize];
    each(150, &(select(codings), many, long, manner()), |((coding, gzipped, code), many, long, manner)| {
        let more = "X: y\r\n".repeat(many) + "Y: " + &"z".repeat(long) + "\r\n";
        let body = world.set_as(gzipped);
        let end = format!("Connection: close\r\nContent-Length: {}\r\n\r\n", body.len());
        let wire = [b"POST /ruby HTTP/1.1\r\n", coding, more.as_bytes(), end.as_bytes(), &body].concat();
        let head = wire.len() - body.len();
        runtime.block_on(async {
            let received = world.talk(&wire, &manner.pieces, manner.buffer, manner.then).await;
            let codes = world.judged(&received, manner.then);
            let expected = if many > 100 || head > 64 << 10 {
                Some(431)
            } else if many < 90 && head < 60_000 {
                Some(code)
            } else {
                None
            };
            match manner.then {
                Then::Wait => {
                    assert_eq!(codes.len(), 1, "{codes:?}");
                    assert!(expected.is_none_or(|code| codes[0] == code), "{codes:?}, not {expected:?}");
                }
                _ => {
                    assert!(codes.len() <= 1 && codes.iter().all(|code| expected.is_none_or(|e| e == *code)));
                }
            }
            world.given_back().await;
        });
    });
    runtime.block_on(world.still_works(&[200, 400, 431]));
}

/// A set in two gzip members is refused for that, and not for its JSON, which the second member cuts off. Errors at its beginning are still
/// reported as such.
#[test]
fn several_members() {
    let (runtime, world) = (runtime(), World::new(SMALL_UNITS, |store| store));
    let (first, second) = world.set.split_at(world.set.len() / 3);
    for (first, expected) in [(first, "send one member"), (&b"[1"[..], "payload")] {
        let body = [gzip(first), gzip(second)].concat();
        let sent = request("Content-Encoding: gzip\r\n", &body);
        let received = runtime.block_on(world.talk(&sent, &[], 1 << 16, Then::Wait));
        let text = String::from_utf8_lossy(&received);
        assert!(text.contains(" 400 ") && text.contains(expected), "{text}");
    }
}

/// Requests that were damaged anywhere, and random bytes. The set is compressed: its checksum shows whether it is
/// unchanged.
#[test]
fn damage() {
    const PIECES: [&str; 18] = [
        "",
        "\r\n",
        "\r\n\r\n",
        "0\r\n\r\n",
        "\0",
        ":",
        " ",
        "%00",
        "HTTP/1.0",
        "Transfer-Encoding: chunked\r\n",
        "Transfer-Encoding: gzip\r\n",
        "Content-Length: 0\r\n",
        "Content-Encoding: gzip\r\n",
        "Expect: 100-continue\r\n",
        "Upgrade: h2c\r\nConnection: Upgrade\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "CONNECT x:1 HTTP/1.1\r\n\r\n",
        "GET /nothing HTTP/1.1\r\n\r\n",
    ];
    let (runtime, world) = (runtime(), World::new(SMALL_UNITS, |store| store));
    let with = prop_oneof![
        select(PIECES.to_vec()).prop_map(|piece| piece.as_bytes().to_vec()),
        any::<[u8; 1]>().prop_map(Vec::from)
    ];
    // Most of the parts where damage matters are in the first bytes.
    let at = prop_oneof![0..180_usize, 0..2000_usize];
    let changes = prop::collection::vec((at, 0..12_usize, with), 1..5);
    let noise = prop::collection::vec(any::<u8>(), 0..400);
    let cases = (any::<bool>(), prop_oneof![5 => changes.prop_map(Ok), 1 => noise.prop_map(Err)], manner());
    // Which damage yields another token depends on how the set was compressed, and is rare.
    each(1500, &cases, |(chunked, change, manner)| {
        let wire = match change {
            Err(noise) => noise,
            Ok(changes) => {
                let framing = if chunked {
                    Framing::Chunked { sizes: vec![300], extension: 0 }
                } else {
                    Framing::Length
                };
                let (headers, body, _) = framing.make(&world.set_as(true));
                let head =
                    format!("POST /ruby HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\n{headers}\r\n");
                let mut wire = [head.as_bytes(), &body].concat();
                for (at, removed, with) in changes {
                    let at = at.min(wire.len());
                    wire.splice(at..(at + removed).min(wire.len()), with);
                }
                wire
            }
        };
        runtime.block_on(async {
            let received = world.talk(&wire, &manner.pieces, manner.buffer, manner.then).await;
            // hyper closes a connection that asked for another protocol as soon as it has an answer, whether or not that was sent.
            let leaves =
                wire.windows(8).any(|eight| eight.eq_ignore_ascii_case(b"upgrade:") || eight == b"CONNECT ");
            let codes = world.judged(&received, if leaves { Then::HalfClose } else { manner.then });
            assert!(codes.iter().filter(|code| **code == 200).count() <= 1, "{codes:?}");
            world.given_back().await;
        });
    });
    runtime.block_on(world.still_works(&[200, 400, 404, 405]));
}

/// More simultaneous bodies than there is memory for: each is judged, or is asked to retry later, and all memory is released.
#[test]
fn crowds() {
    let runtime = runtime();
    let world = Arc::new(World::new(8, |store| store));
    let body = prop_oneof![1..4000_usize, 1..500_000_usize];
    let one = (any::<bool>(), body, any::<bool>(), manner());
    each(30, &prop::collection::vec(one, 2..12), |crowd| {
        runtime.block_on(async {
            let mut tasks = JoinSet::new();
            for (good, size, stops, manner) in crowd {
                let world = Arc::clone(&world);
                tasks.spawn(async move {
                    let mut body = if good { world.set_as(false) } else { format!("[[\"{TOKEN}\"").into() };
                    if !good {
                        body.resize(body.len() + size, b' ');
                    }
                    let mut wire = request("Connection: close\r\n", &body);
                    wire.truncate(wire.len() - usize::from(stops));
                    // Larger pieces, since there are many bytes.
                    let received = world.talk(&wire, &[50_000], 1 << 16, manner.then).await;
                    let codes = world.judged(&received, manner.then);
                    let right = if good && !stops { 200 } else { 400 };
                    assert!(
                        codes.iter().all(|code| *code == right || *code == 500),
                        "{codes:?}, not {right}"
                    );
                    assert_eq!(codes.len(), if manner.then == Then::Wait { 1 } else { codes.len().min(1) });
                });
            }
            while let Some(done) = tasks.join_next().await {
                done.unwrap();
            }
            world.given_back().await;
        });
    });
    runtime.block_on(world.still_works(&[200, 400, 500]));
}

/// Bodies that have all arrived in part before there is memory for the rest of any are all judged: none holds memory while it waits for more.
#[test]
fn crowds_of_announced_sizes() {
    const CROWD: usize = 20;
    // Memory for two of them.
    let world = Arc::new(World::new(16, |store| store));
    runtime().block_on(async {
        let mut tasks = JoinSet::new();
        for _ in 0..CROWD {
            let world = Arc::clone(&world);
            tasks.spawn(async move {
                let mut body = format!("[[\"{TOKEN}\"").into_bytes();
                body.resize(500_000, b' ');
                let received = world
                    .talk(&request("Connection: close\r\n", &body), &[50_000], 1 << 16, Then::Wait)
                    .await;
                assert_eq!(world.judged(&received, Then::Wait), [400]);
            });
        }
        while let Some(done) = tasks.join_next().await {
            done.unwrap();
        }
        world.still_works(&[400]).await;
    });
}

/// A keep-alive connection that is closed between requests does not count as broken; one that stops in the middle of a head does.
#[test]
fn idle_connections() {
    let world = World::new(SMALL_UNITS, |store| store);
    let whole = request("", &world.set_as(false));
    runtime().block_on(async {
        for (sent, good) in [(&whole[..], true), (&whole[..20], false)] {
            let (ours, theirs) = duplex(1 << 16);
            let client = async {
                let (mut reader, mut writer) = tokio::io::split(ours);
                writer.write_all(sent).await.unwrap();
                reader.read_to_end(&mut Vec::new()).await.unwrap();
            };
            let (complete, ()) = tokio::join!(world.serve(theirs), client);
            assert_eq!(complete, good, "{} bytes", sent.len());
        }
    });
}

/// A connection whose client does not read its answer is closed long before the maximum connection lifetime; one that reads slowly is not.
#[test]
fn unread_answers() {
    let world = World::new(SMALL_UNITS, |store| store);
    runtime().block_on(async {
        for reads in [false, true] {
            // The answer does not fit into the buffer.
            let (mut ours, theirs) = duplex(64);
            let begin = Instant::now();
            let client = async {
                ours.write_all(b"GET /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.unwrap();
                let mut left = reads;
                while left {
                    sleep(Duration::from_secs(20)).await;
                    left = ours.read(&mut [0; 50]).await.unwrap() > 0;
                }
                ours
            };
            let (complete, _ours) = tokio::join!(world.serve(theirs), client);
            assert_eq!(complete, reads);
            let took = begin.elapsed().as_secs();
            assert!(if reads { took > 60 } else { (30..40).contains(&took) }, "{took} s");
        }
    });
}

/// A set whose sender has disconnected is processed to its end, and occupies its permits until then: a client that reconnects repeatedly
/// cannot make the server work on more sets, or on more large ones, than its limits allow.
#[test]
fn the_work_of_those_who_left_counts() {
    let (go, gate) = mpsc::channel();
    let asked = Arc::new(Notify::new());
    let slow =
        |inner| Box::new(Slow { inner, asked: Arc::clone(&asked), go: Mutex::new(gate) }) as Box<dyn Store>;
    let world = World::new(SMALL_UNITS, slow);
    runtime().block_on(async {
        let (body, _, _) = Content::Size(LARGE as u32 + 1).make(world.set);
        let (mut ours, theirs) = duplex(1 << 16);
        let client = async {
            ours.write_all(&request("Content-Encoding: gzip\r\n", &body)).await.unwrap();
            asked.notified().await;
            drop(ours);
        };
        let (complete, ()) = tokio::join!(world.serve(theirs), client);
        assert!(!complete, "no client received an answer");
        let Shared { memory, workers, large, .. } = &*world.shared;
        let free = [memory.small.available_permits(), workers.available_permits(), large.available_permits()];
        assert_eq!(free, [SMALL_UNITS, WORKERS - 1, 0], "while the set is being read");
        go.send(()).unwrap();
        world.given_back().await;
        drop(go);
        world.still_works(&[]).await;
    });
}
