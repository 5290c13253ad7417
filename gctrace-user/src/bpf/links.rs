//! What keeps programs attached.
//!
//! The kernel waits for all its CPUs at each detaching, so everything that is detached at one time is detached by several threads.

use aya::{
    Ebpf,
    programs::{Program, ProgramError},
};

use super::errors::LoadError;

/// Links that are closed at the same time.
const CLOSERS: usize = 16;

/// What keeps a program attached somewhere, at one place or many. It is detached when this is dropped, which takes up to 0.1 s:
/// [`detach`] is faster for more than one.
pub(super) struct Link {
    _detaches_when_dropped: Box<dyn Send>,
}

impl Link {
    /// Of a link that detaches when it is dropped.
    pub(super) fn of(link: impl Send + 'static) -> Self {
        Self { _detaches_when_dropped: Box::new(link) }
    }

    /// Attaches a program for ordinary or raw tracepoints.
    ///
    /// # Errors
    ///
    /// The kernel refuses it, or the program is of another type.
    pub(super) fn to_tracepoint(
        program: &mut Program,
        category: &str,
        name: &str,
    ) -> Result<Self, ProgramError> {
        match program {
            Program::TracePoint(program) => {
                let link = program.attach(category, name)?;
                program.take_link(link).map(Self::of)
            }
            Program::RawTracePoint(program) => {
                let link = program.attach(name)?;
                program.take_link(link).map(Self::of)
            }
            _ => Err(ProgramError::UnexpectedProgramType),
        }
    }

    /// The same of a program that must be there for a run to begin.
    ///
    /// # Errors
    ///
    /// The object lacks the program, or the kernel refuses it.
    pub(super) fn at_tracepoint(
        ebpf: &mut Ebpf,
        program: &'static str,
        category: &str,
        name: &str,
    ) -> Result<Self, LoadError> {
        let program = ebpf.program_mut(program).ok_or(LoadError::Missing(program))?;
        Self::to_tracepoint(program, category, name)
            .map_err(|source| LoadError::Tracepoint { tracepoint: format!("{category}:{name}"), source })
    }
}

/// Drops links, several at a time.
pub(super) fn detach(links: Vec<Link>) {
    let mut shares: Vec<Vec<Link>> = Vec::new();
    for (at, link) in links.into_iter().enumerate() {
        match shares.get_mut(at % CLOSERS) {
            Some(share) => share.push(link),
            None => shares.push(vec![link]),
        }
    }
    std::thread::scope(|scope| {
        for share in shares {
            // Without a thread it is dropped with the closure, here.
            let _spawned = std::thread::Builder::new().spawn_scoped(scope, move || drop(share));
        }
    });
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    };

    use super::*;

    struct Counted(Arc<AtomicUsize>);

    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.fetch_add(1, Relaxed);
        }
    }

    /// All are detached when it returns, however many there are.
    #[test]
    fn all() {
        for count in [0, 1, CLOSERS, 3 * CLOSERS + 1] {
            let dropped = Arc::new(AtomicUsize::new(0));
            detach((0..count).map(|_| Link::of(Counted(dropped.clone()))).collect());
            assert_eq!(dropped.load(Relaxed), count);
        }
    }
}
