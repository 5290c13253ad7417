//! Links, which keep programs attached.
//!
//! Each detach waits for all CPUs in the kernel, so several threads detach what is detached at the same time.

use aya::{
    Ebpf,
    programs::{Program, ProgramError},
};

use super::errors::LoadError;

/// Maximum number of threads that close links in parallel.
const CLOSERS: usize = 64;

/// Keeps a program attached at one or many places. Dropping it detaches the program, which takes up to 0.1 s:
/// use [`detach`] for more than one.
pub(super) struct Link {
    _detaches_when_dropped: Box<dyn Send>,
}

impl Link {
    /// Wraps a link that detaches when it is dropped.
    pub(super) fn of(link: impl Send + 'static) -> Self {
        Self { _detaches_when_dropped: Box::new(link) }
    }

    /// Attaches a program to an ordinary or raw tracepoint.
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

    /// Like [`Link::to_tracepoint`], for a program that a run requires.
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

/// Drops links in parallel.
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
            // If no thread can be spawned, the closure is dropped here and with it the share.
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

    /// All links are detached when it returns, however many they are.
    #[test]
    fn all() {
        for count in [0, 1, CLOSERS, 3 * CLOSERS + 1] {
            let dropped = Arc::new(AtomicUsize::new(0));
            detach((0..count).map(|_| Link::of(Counted(dropped.clone()))).collect());
            assert_eq!(dropped.load(Relaxed), count);
        }
    }
}
