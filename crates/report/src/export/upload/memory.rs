//! Payloads queued in memory.

use std::{collections::VecDeque, io};

use bytes::Bytes;

use super::{
    Payload,
    engine::{Backlog, Gone, Room},
};

/// Queued payloads. Each is encoded once, when it reaches the front.
pub(super) struct Memory {
    waiting: VecDeque<Entry>,
    /// Prepares an encoded payload for sending; called once per payload.
    prepare: fn(Vec<u8>) -> Bytes,
    gone: Gone,
}

struct Entry {
    payload: Box<dyn Payload>,
    body: Option<Bytes>,
    attempts: u32,
    /// Of two halves, only one has it.
    room: Option<Room>,
}

/// A payload and its bytes.
pub(super) struct Item<'a> {
    pub(super) payload: &'a dyn Payload,
    pub(super) body: &'a Bytes,
}

impl Memory {
    pub(super) fn new(prepare: fn(Vec<u8>) -> Bytes) -> Self {
        Self { waiting: VecDeque::new(), prepare, gone: Gone::default() }
    }

    fn replace_front(&mut self, halves: [Box<dyn Payload>; 2]) {
        let mut room = self.waiting.pop_front().and_then(|entry| entry.room);
        for payload in halves.into_iter().rev() {
            self.waiting.push_front(Entry { payload, body: None, attempts: 0, room: room.take() });
        }
    }
}

impl Backlog for Memory {
    type Job = Box<dyn Payload>;
    type Item<'a> = Item<'a>;

    fn push(&mut self, payload: Self::Job, room: Room) -> io::Result<()> {
        self.waiting.push_back(Entry { payload, body: None, attempts: 0, room: Some(room) });
        Ok(())
    }

    fn front(&mut self) -> Option<Item<'_>> {
        while let Some(entry) = self.waiting.front_mut()
            && entry.body.is_none()
        {
            let bytes = entry.payload.encode();
            if bytes.is_empty() {
                self.gone.empty += 1;
                self.waiting.pop_front();
            } else if entry.payload.is_too_large()
                && let Some(halves) = entry.payload.halves()
            {
                self.gone.added += 1;
                self.replace_front(halves);
            } else {
                entry.body = Some((self.prepare)(bytes));
            }
        }
        let entry = self.waiting.front()?;
        entry.body.as_ref().map(|body| Item { payload: entry.payload.as_ref(), body })
    }

    fn failed(&mut self) -> u32 {
        self.waiting.front_mut().map_or(0, |entry| {
            entry.attempts += 1;
            entry.attempts
        })
    }

    fn pop(&mut self) {
        self.waiting.pop_front();
    }

    fn requeue(&mut self) {
        if !self.waiting.is_empty() {
            self.waiting.rotate_left(1);
        }
    }

    fn halve(&mut self) -> bool {
        let Some(halves) = self.waiting.front().and_then(|entry| entry.payload.halves()) else {
            return false;
        };
        self.replace_front(halves);
        true
    }

    fn len(&self) -> usize {
        self.waiting.len()
    }

    fn take_gone(&mut self) -> Gone {
        std::mem::take(&mut self.gone)
    }

    fn keeps_in(&self) -> Option<String> {
        None
    }
}
