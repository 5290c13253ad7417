//! Images about which debuginfod servers are asked, on a thread of its own: a slow server holds up only the images that
//! wait for its answer.

use std::{
    fs::File,
    io::{self, Read as _, Write as _},
    os::{
        fd::{AsFd as _, BorrowedFd},
        unix::net::UnixStream,
    },
    path::PathBuf,
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, TryRecvError, channel, sync_channel},
    },
};

use gctrace_common::config::MAX_IMAGES;

use super::{
    debuginfo::{Around, DebugInfo},
    identity::ImageKey,
    place::Place,
    planned::{Abilities, Choice, choose},
};
use crate::{cache::Cache, ruby::last_resort::Method};

/// An image that waits for an answer.
pub(super) struct Question {
    /// Its identity.
    pub(super) key: ImageKey,
    /// It, open: its process may exit meanwhile.
    pub(super) file: File,
    /// The path that messages name.
    pub(super) shown: PathBuf,
    /// Where it comes from.
    pub(super) place: Place,
}

/// What came of it.
pub(super) struct Answer {
    /// The image.
    pub(super) question: Question,
    /// How it is traced, everything considered.
    pub(super) choice: Choice,
}

/// What the thread needs.
pub(super) struct Means {
    pub(super) info: Arc<DebugInfo>,
    pub(super) cache: Cache,
    pub(super) methods: &'static [Method],
    pub(super) abilities: Abilities,
}

/// The thread, which ends with this (after the answer that it waits for, which takes half a minute at most).
pub(super) struct Asking {
    questions: SyncSender<Question>,
    answers: Receiver<Answer>,
    /// Becomes readable when there is an answer.
    awake: UnixStream,
}

impl Asking {
    /// Starts it.
    pub(super) fn start(means: Means) -> io::Result<Self> {
        let (awake, mut wake) = UnixStream::pair()?;
        awake.set_nonblocking(true)?;
        // No more images than that can be traced.
        let (questions, asked) = sync_channel::<Question>(MAX_IMAGES as usize);
        let (answer, answers) = channel();
        std::thread::Builder::new().name("gctrace-debuginfod".to_owned()).spawn(move || {
            let Means { info, mut cache, methods, abilities } = means;
            for question in asked {
                let around = Around { info: &info, place: &question.place, later: None };
                let choice = choose(&question.file, &question.shown, methods, abilities, &mut cache, around);
                let told = answer.send(Answer { question, choice }).is_ok();
                if !told || wake.write_all(&[0]).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self { questions, answers, awake })
    }

    /// Has a question asked, in its turn. `false`: there are too many, or the thread has ended.
    pub(super) fn ask(&self, question: Question) -> bool {
        self.questions.try_send(question).is_ok()
    }

    /// Readable when there is an answer, or never will be one.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.awake.as_fd()
    }

    /// The next answer, if there is one; `Err` if the thread has ended.
    pub(super) fn answer(&self) -> Result<Option<Answer>, ()> {
        let mut bytes = [0; 64];
        while (&self.awake).read(&mut bytes).is_ok_and(|n| n == bytes.len()) {}
        match self.answers.try_recv() {
            Ok(answer) => Ok(Some(answer)),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => Err(()),
        }
    }
}
