//! Where objects that still exist were allocated.
//!
//! The kernel takes the stack at some refills and follows the object that is allocated there ([`gctrace_common::leak`]): the object in its
//! slot is that object, unless the slot was seen free, or the heap was compacted. So a reported line is the line of that object,
//! not of an earlier one in the same slot.

use std::{
    collections::{BTreeMap, HashMap},
    num::NonZeroU32,
    os::fd::AsRawFd as _,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use gctrace_common::leak::{LeakCount, LeakTarget};
use serde::Serialize;

use super::{
    line::Line,
    passes, retried,
    target::{Target, key},
};
use crate::{
    bpf::{self, AttachError, LeakProbes, Scope},
    discover::site_image,
    host::proc_root,
    images::{GcOf, Images, KnownImage},
    preflight,
    ruby::{
        frames::Memory,
        heap::{HeapError, HeapLayout, Slot, each_object},
        plan::OptionalEvent,
    },
    stacks::{Reader, Record, StackOf, Stacks},
};

/// Minimum number of major collections that an object must have survived to count as a survivor; it must also be old.
const SURVIVED: u64 = 2;
/// Limit of stacks per second, above which half as many refills are drawn: at 25 microseconds each, 1 % of the time of a CPU.
const MOST_STACKS: u64 = 400;
/// Maximum number of objects that are remembered; above it half as many refills are drawn.
const MOST_SAMPLES: usize = 1 << 15;
/// Interval at which these limits are checked.
const LOOK: Duration = Duration::from_secs(1);

/// An object whose allocation was seen.
struct Sample {
    address: u64,
    ts_ns: u64,
    line: Option<Line>,
    /// Upper bound of the number of major collections that had ended when it was allocated; `None`: not known yet.
    major: Option<u64>,
}

/// Sampled surviving objects of a class by the line that allocated them; most first. `None`: no line of Ruby code, or unknown.
pub(super) type Lines = Vec<(Option<Line>, u64)>;

/// Sampled surviving objects of a class.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Allocated {
    pub(super) lines: Lines,
    /// Number of objects by the minimum number of major collections that they survived.
    pub(super) survived: BTreeMap<u64, u64>,
}

impl Allocated {
    /// Sums up samples that still exist after `major` major collections.
    fn of(samples: &[&Sample], major: u64) -> Self {
        let mut lines: BTreeMap<Option<&Line>, u64> = BTreeMap::new();
        let mut survived = BTreeMap::new();
        for sample in samples {
            *lines.entry(sample.line.as_ref()).or_default() += 1;
            let then = sample.major.unwrap_or(major);
            *survived.entry(major.saturating_sub(then)).or_default() += 1;
        }
        let mut lines: Lines = lines.into_iter().map(|(line, count)| (line.cloned(), count)).collect();
        lines.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        Self { lines, survived }
    }

    /// Number of the objects.
    pub(super) fn all(&self) -> u64 {
        self.survived.values().sum()
    }

    /// The smallest and the largest number of survived collections, and the number that at least half of the objects survived.
    pub(super) fn range(&self) -> Option<(u64, u64, u64)> {
        let (first, last) = (self.survived.keys().next()?, self.survived.keys().next_back()?);
        let mut older = 0;
        let median = self.survived.iter().rev().find(|(_, count)| {
            older += **count;
            older * 2 >= self.all()
        })?;
        Some((*first, *last, *median.0))
    }
}

/// What became of the objects that were drawn. Each is followed, or not, for one of three reasons; a followed object was freed, became
/// unreadable, or is left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Account {
    /// Hits of the probe at refills, including those without a page.
    hits: u64,
    /// In the end one in this many refills was drawn. Earlier samples were thinned out accordingly.
    one_in: u64,
    drawn: u64,
    followed: u64,
    page_full: u64,
    map_full: u64,
    not_free: u64,
    freed: u64,
    gone: u64,
    left: u64,
    /// Followed objects whose stack was lost.
    stacks_lost: u64,
    /// Refills whose page could not be read; if there are any, nothing is known of any object.
    unread: u64,
    adds_up: bool,
}

/// The result.
pub(super) struct Origins {
    /// Survivors by class, or why they are unknown.
    pub(super) lines: Result<BTreeMap<String, Allocated>, String>,
    pub(super) account: Option<Account>,
}

impl Origins {
    /// No result, for this reason.
    pub(super) fn missing(why: String) -> Self {
        Self { lines: Err(why), account: None }
    }

    /// The survivors of a class.
    pub(super) fn of(&self, class: &str) -> Option<&Allocated> {
        const NONE: &Allocated = &Allocated { lines: Vec::new(), survived: BTreeMap::new() };
        self.lines.as_ref().ok().map(|lines| lines.get(class).unwrap_or(NONE))
    }
}

/// Objects that are followed.
pub(super) struct Following {
    probes: LeakProbes,
    stacks: Stacks,
    target: LeakTarget,
    objspace: u64,
    compactions: Option<u64>,
    samples: Vec<Sample>,
    lines: HashMap<Line, Line>,
    random: u64,
    came: u64,
    looked: (Instant, u64),
}

impl Following {
    /// Attaches the probe. `Err`: why that is not possible.
    pub(super) fn start(target: &Target) -> Result<Self, String> {
        preflight::check().map_err(|missing| missing.to_string())?;
        let (pid, plan) = (target.pid, &target.plan);
        let refills = plan.optional(OptionalEvent::Refill)?;
        let page = plan.analysis.refill.page.ok_or("where heap pages have their free slots is not known")?;
        plan.frames.as_ref().map_err(|why| format!("stacks have no Ruby frames: {why}"))?;
        let layout = target.layout().map_err(|error| error.to_string())?;
        let (file, shown) = target.file()?;
        let (objspace, data) = target.state().map_err(|error| error.to_string())?;
        let mut probes = LeakProbes::load()
            .map_err(|error| format!("{} (needs Linux 5.15 or later)", bpf::brief(&error)))?;
        let ring = probes.take_stacks().ok_or("there is no ring for stacks")?;
        let images = Images::default();
        images.add(KnownImage {
            image: Arc::new(site_image(0, &shown, plan)),
            reading: None,
            frames: plan.frames.as_ref().ok().cloned(),
            threads: None,
            gc: GcOf::Itself,
        });
        let reader = Reader::start(ring, images, false)
            .map_err(|error| format!("starting the thread that reads stacks: {error}"))?;
        let config = &plan.config;
        let leak = LeakTarget {
            gc_count: objspace.wrapping_add(u64::from(config.count)),
            flags: objspace.wrapping_add(u64::from(config.flags)),
            tgid: pid,
            mode_mask: config.mode_mask,
            mode_shift: config.stack.mode_shift,
            page: u32::try_from(layout.page_bytes()).map_err(|error| error.to_string())?,
            mask: 0,
            freelist: page.freelist.into(),
        };
        // The kernel expects pids of gctrace's own namespace.
        let scope = NonZeroU32::new(pid).filter(|_| proc_root::shares_pids()).map_or(Scope::All, Scope::One);
        let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        probes
            .attach(leak, (target.bias, config), refills, (&path, scope))
            .map_err(|error| bpf::brief(&error.of_file(&shown)))?;
        Ok(Self {
            probes,
            stacks: Stacks::new(Some(reader), None),
            target: leak,
            objspace,
            compactions: key(plan, "compact_count", &data),
            samples: Vec::new(),
            lines: HashMap::new(),
            random: 0x9e37_79b9_7f4a_7c15,
            came: 0,
            looked: (Instant::now(), 0),
        })
    }

    /// Takes the stacks that have arrived. `major` is the number of completed major collections, read just before.
    pub(super) fn take(&mut self, major: u64) -> Result<(), AttachError> {
        // These samples arrived before the number was read.
        for sample in self.samples.iter_mut().rev().take_while(|sample| sample.major.is_none()) {
            sample.major = Some(major);
        }
        self.drain();
        if self.samples.len() > MOST_SAMPLES {
            self.prune();
        }
        let stacks = self.came - self.looked.1;
        if self.looked.0.elapsed() >= LOOK || stacks > MOST_STACKS {
            let per_second = stacks as f64 / self.looked.0.elapsed().max(LOOK).as_secs_f64();
            if per_second > MOST_STACKS as f64 || self.samples.len() > MOST_SAMPLES {
                self.thin()?;
            }
            self.looked = (Instant::now(), self.came);
        }
        Ok(())
    }

    fn drain(&mut self) {
        for record in self.stacks.take() {
            let Record::Stack(named) = record else { continue };
            let Some(finished) = self.stacks.finish(*named) else { continue };
            if finished.of != StackOf::Refill {
                continue;
            }
            self.came += 1;
            let line = Line::of(&finished.stack).map(|line| self.known(line));
            self.samples.push(Sample { address: finished.weight, ts_ns: finished.ts_ns, line, major: None });
        }
    }

    /// Interns a line, so that equal lines share their texts.
    fn known(&mut self, line: Line) -> Line {
        self.lines.entry(line).or_insert_with_key(Clone::clone).clone()
    }

    /// Drops samples that are no longer followed.
    fn prune(&mut self) {
        let Self { probes, target, .. } = self;
        self.samples.retain(|sample| is_followed(probes, target, sample));
    }

    /// Halves the rate: from now on half as many refills are drawn, and a random half of the samples is kept.
    fn thin(&mut self) -> Result<(), AttachError> {
        self.target.mask = self.target.mask << 1 | 1;
        self.probes.set(self.target)?;
        let random = &mut self.random;
        self.samples.retain(|_| {
            // Xorshift.
            *random ^= *random << 13;
            *random ^= *random >> 7;
            *random ^= *random << 17;
            *random >> 63 == 0
        });
        Ok(())
    }

    /// The allocation sites of objects for which `class_of` returns a name. `major` is the number of completed major collections.
    pub(super) fn finish(
        mut self,
        target: &Target,
        major: u64,
        class_of: impl FnMut(&Slot<'_>) -> Option<String>,
    ) -> Origins {
        let lines = self.survivors(target, major, class_of);
        let account = self.account();
        let lines = match (&account, lines) {
            (_, Err(why)) => Err(why),
            (Err(error), _) => Err(bpf::brief(error)),
            (Ok(account), _) if account.unread > 0 => {
                Err("a page could not be read when it was refilled".to_owned())
            }
            (Ok(account), _) if !account.adds_up => {
                Err("the account of the followed objects does not add up".to_owned())
            }
            (Ok(_), Ok(lines)) => Ok(lines),
        };
        Origins { lines, account: account.ok() }
    }

    fn survivors(
        &mut self,
        target: &Target,
        major: u64,
        mut class_of: impl FnMut(&Slot<'_>) -> Option<String>,
    ) -> Result<BTreeMap<String, Allocated>, String> {
        let text = |error: HeapError| error.to_string();
        // Of several samples at an address only the last one can still exist.
        let wanted: HashMap<u64, &Sample> = self
            .samples
            .iter()
            .filter(|sample| sample.major.is_some_and(|then| then + SURVIVED <= major))
            .map(|sample| (sample.address, sample))
            .collect();
        let layout = target.layout().map_err(text)?;
        let mut there = old_objects(&target.memory, self.objspace, &layout, |slot| {
            let sample = wanted.get(&slot.address)?;
            Some((class_of(slot)?, *sample))
        })
        .map_err(text)?;
        // Checked after the heap was read: an object that is followed now was in its slot then.
        there.retain(|(_, sample)| is_followed(&self.probes, &self.target, sample));
        let (objspace, data) = target.state().map_err(text)?;
        if objspace != self.objspace {
            return Err("the process replaced its program".to_owned());
        }
        let compactions = key(&target.plan, "compact_count", &data);
        if compactions.is_none() || compactions != self.compactions {
            return Err("the heap was compacted meanwhile, which moves objects".to_owned());
        }
        let mut found: BTreeMap<String, Vec<&Sample>> = BTreeMap::new();
        for (class, sample) in there {
            found.entry(class).or_default().push(sample);
        }
        Ok(found.into_iter().map(|(class, samples)| (class, Allocated::of(&samples, major))).collect())
    }

    /// Closes the gate and sums up.
    fn account(&mut self) -> Result<Account, AttachError> {
        self.probes.close()?;
        // A program run that has passed the gate finishes within a microsecond; its stack is read within a tick of the reader.
        std::thread::sleep(Duration::from_millis(50));
        self.drain();
        let count = |count| self.probes.count(count);
        let mut account = Account {
            hits: count(LeakCount::Hits)?,
            one_in: u64::from(self.target.mask) + 1,
            drawn: count(LeakCount::Drawn)?,
            followed: count(LeakCount::Followed)?,
            page_full: count(LeakCount::PageFull)?,
            map_full: count(LeakCount::MapFull)?,
            not_free: count(LeakCount::NotFree)?,
            freed: count(LeakCount::Freed)?,
            gone: count(LeakCount::Gone)?,
            left: self.probes.followed()?,
            stacks_lost: count(LeakCount::Followed)?.saturating_sub(self.came),
            unread: count(LeakCount::Unread)?,
            adds_up: false,
        };
        account.adds_up = account.adds_up();
        Ok(account)
    }
}

/// What `of` returns for each old object of a heap, which is read again if its pages change meanwhile.
fn old_objects<M: Memory, T>(
    memory: &M,
    objspace: u64,
    layout: &HeapLayout,
    mut of: impl FnMut(&Slot<'_>) -> Option<T>,
) -> Result<Vec<T>, HeapError> {
    retried(passes, || {
        let mut found = Vec::new();
        each_object(memory, objspace, layout, |slot| {
            if slot.marks.is_some_and(|marks| marks.is_old() && !marks.dead) {
                found.extend(of(slot));
            }
        })?;
        Ok(found)
    })
}

impl Account {
    fn adds_up(&self) -> bool {
        self.drawn == self.followed + self.page_full + self.map_full + self.not_free
            && self.followed == self.freed + self.gone + self.left
    }
}

fn is_followed(probes: &LeakProbes, target: &LeakTarget, sample: &Sample) -> bool {
    let page = sample.address & !u64::from(target.page.wrapping_sub(1));
    probes.follows(page, sample.address, sample.ts_ns)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ruby::RubyVersion;

    /// At least half of the objects are as old as the third number, or older.
    #[test]
    fn ages() {
        let of = |survived: &[(u64, u64)]| {
            let survived = survived.iter().copied().collect();
            Allocated { survived, ..Allocated::default() }.range()
        };
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[(4, 1)]), Some((4, 4, 4)));
        assert_eq!(of(&[(2, 1), (9, 1)]), Some((2, 9, 9)));
        assert_eq!(of(&[(2, 2), (9, 1)]), Some((2, 9, 2)));
        assert_eq!(of(&[(2, 10), (3, 10), (7, 1), (9, 9)]), Some((2, 9, 3)));
    }

    /// A heap that cannot be read because its pages change is read again, a few times, and nothing of an incomplete reading is left.
    #[test]
    fn read_again() {
        use std::cell::Cell;

        /// The heap of a process without pages; the first reads fail.
        struct Fickle(Cell<u32>);
        impl Memory for Fickle {
            fn read(&self, _: u64, buffer: &mut [u8]) -> bool {
                buffer.fill(0);
                self.0.replace(self.0.get().saturating_sub(1)) == 0
            }
        }
        let layout = HeapLayout::of(RubyVersion::new(3, 1, 2)).unwrap();
        let read =
            |failing| old_objects(&Fickle(Cell::new(failing)), 0x1000, &layout, |slot| Some(slot.address));
        for failing in [0, 1, 2] {
            assert_eq!(read(failing), Ok(Vec::new()), "{failing}");
        }
        assert!(matches!(read(3), Err(HeapError::Unreadable { .. })));
    }

    /// Every drawn object is in exactly one category.
    #[test]
    fn accounts() {
        let mut account = Account { drawn: 10, followed: 7, page_full: 2, not_free: 1, ..Account::default() };
        (account.freed, account.left) = (3, 4);
        assert!(account.adds_up());
        account.left = 5;
        assert!(!account.adds_up());
        account = Account { drawn: 1, ..Account::default() };
        assert!(!account.adds_up());
    }
}
