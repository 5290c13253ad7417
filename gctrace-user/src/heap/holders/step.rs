//! One step from objects towards their holders: collects candidates in one pass over the heap, and chooses among them.
//!
//! Usually one object, such as an array, holds all samples. But each leaked object may have its own holder, for example a string that is an
//! instance variable of an order: then not a single order is reported, but that orders hold them.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::Arc,
};

use super::{End, Holder};
use crate::ruby::heap::ObjectType;

/// Maximum number of old objects of a class whose holders are searched, and of objects of a group that the path continues with.
const SAMPLES: usize = 64;
/// Maximum number of groups kept in a pass.
const GROUPS: usize = 4096;

/// An object that holds others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HeapObject {
    pub(super) address: u64,
    pub(super) kind: ObjectType,
    /// Address of its class; 0: hidden.
    pub(super) class: u64,
    /// For a Proc, or variables that a closure keeps: the address of the code.
    pub(super) code: Option<u64>,
    pub(super) refers: u64,
    pub(super) old: bool,
    /// Bytes of its slot.
    pub(super) size: usize,
}

impl HeapObject {
    pub(super) fn likeness(&self) -> Likeness {
        (self.kind, self.class, self.code)
    }
}

/// What the objects of one group have in common: type, class, and code.
pub(super) type Likeness = (ObjectType, u64, Option<u64>);

/// Similar objects that hold some of the samples.
#[derive(Clone, Debug)]
pub(super) struct Group {
    /// The samples that they hold.
    held: BTreeSet<u64>,
    /// A random sample of the objects.
    pub(super) holders: Samples<HeapObject>,
}

/// The holder of the objects of a step.
#[derive(Debug)]
pub(super) enum Choice {
    /// One object, and how many of the samples it holds.
    One(HeapObject, usize),
    /// Similar objects, and how many of the samples they hold.
    Alike(Samples<HeapObject>, usize),
    /// No holder can be reported.
    End(End),
}

/// A named holder in Ruby code of one of the objects.
#[derive(Clone, Debug)]
pub(super) enum Named {
    /// The class, and the key of a constant.
    Constant(u64, u32),
    /// The class, and the name of a variable.
    Variable(u64, Arc<str>),
    /// The thread, whether it was found through a fiber, and the name.
    Local(u64, bool, Arc<str>),
    /// A global variable.
    Global(Arc<str>),
}

/// What refers to the objects (`wanted`) of one step of a path.
#[derive(Debug)]
pub(super) struct Step {
    /// Index of the class of the path.
    pub(super) suspect: usize,
    /// The holders found so far.
    pub(super) holders: Vec<Holder>,
    pub(super) wanted: BTreeSet<u64>,
    /// The objects of the earlier steps, which are skipped: circular references lead nowhere.
    pub(super) seen: HashSet<u64>,
    /// The object that holds most of them, and how many.
    best: Option<(HeapObject, usize)>,
    /// Whether other objects hold equally many.
    tied: bool,
    /// Whether the object of this step may be garbage that no collection has found yet: nothing shows that it is held.
    doubtful: bool,
    groups: HashMap<Likeness, Group>,
    /// The objects that anything holds.
    reached: BTreeSet<u64>,
    /// Named holders, by the object that they hold.
    pub(super) named: BTreeMap<u64, Named>,
}

impl Step {
    /// The first step, from samples.
    pub(super) fn new(suspect: usize, wanted: impl IntoIterator<Item = u64>) -> Self {
        Self {
            suspect,
            holders: Vec::new(),
            wanted: wanted.into_iter().collect(),
            seen: HashSet::new(),
            best: None,
            tied: false,
            doubtful: false,
            groups: HashMap::new(),
            reached: BTreeSet::new(),
            named: BTreeMap::new(),
        }
    }

    /// The next step, from the holder found. A single object may be a replaced copy, unless it is old and no other one holds as many.
    pub(super) fn next(self, holder: Holder, old: bool, wanted: impl IntoIterator<Item = u64>) -> Self {
        let Self { suspect, mut holders, wanted: before, mut seen, tied, .. } = self;
        seen.extend(before);
        let doubtful = holder.objects == 1 && (tied || !old);
        holders.push(holder);
        Self { holders, seen, doubtful, ..Self::new(suspect, wanted) }
    }

    /// Discards the results of a pass that was not completed.
    pub(super) fn again(&mut self) {
        self.best = None;
        self.tied = false;
        self.groups.clear();
        self.reached.clear();
        self.named.clear();
    }

    /// Whether the step has a single object, so that its holder holds everything that the path came from.
    pub(super) fn is_single(&self) -> bool {
        self.wanted.len() == 1
    }

    /// Whether one of the objects is at this address, and no named holder is known except possibly a local variable of a thread, which
    /// is reported only if there is no other.
    pub(super) fn is_unnamed(&self, address: u64) -> bool {
        self.wanted.contains(&address) && matches!(self.named.get(&address), None | Some(Named::Local(..)))
    }

    /// The same for noting a local variable of a thread: one that was found through a fiber may still be replaced.
    pub(super) fn is_open(&self, address: u64) -> bool {
        self.wanted.contains(&address)
            && matches!(self.named.get(&address), None | Some(Named::Local(_, true, _)))
    }

    /// Notes an object that holds some of the objects. Among those that hold equally many, an old one is preferred: others may be gone soon.
    pub(super) fn offer(&mut self, object: HeapObject, held: &BTreeSet<u64>) {
        if self.wanted.contains(&object.address) || self.seen.contains(&object.address) {
            return;
        }
        let held = || held.iter().filter(|address| self.wanted.contains(address)).copied();
        let holds = held().count();
        if holds == 0 {
            return;
        }
        let rank = |object: &HeapObject, holds: usize| (holds, object.old, object.refers, object.address);
        let most = self.best.map_or(0, |(_, most)| most);
        self.tied = holds == most || (self.tied && holds < most);
        if self.best.as_ref().is_none_or(|(best, most)| rank(best, *most) < rank(&object, holds)) {
            self.best = Some((object, holds));
        }
        // A single object is held by any one member of a group as much as by the whole group.
        if self.wanted.len() > 1 {
            self.reached.extend(held());
            let likeness = object.likeness();
            if self.groups.len() < GROUPS || self.groups.contains_key(&likeness) {
                let group = || Group { held: BTreeSet::new(), holders: Samples::default() };
                let group = self.groups.entry(likeness).or_insert_with(group);
                group.held.extend(held());
                group.holders.see(object.address, object);
            }
        }
    }

    /// The end of the path if no holder is found.
    fn nothing(&self) -> End {
        // Variables of threads are searched only if the path is at the single hash that contains them.
        if !self.is_single() {
            return End::Several;
        }
        if self.doubtful { End::Doubtful } else { End::NotReadable }
    }

    /// Chooses what the path continues with: an object or a group that holds more than half of the samples, otherwise an object that holds at
    /// least a quarter. Chance does not yield that many, but the samples of a common class include objects that do not leak. For the same reason
    /// an object with a quarter of the samples comes before its group if it holds more than half of what all of the group hold: the others hold
    /// what does not leak.
    pub(super) fn choose(&mut self) -> Choice {
        let of = self.wanted.len();
        let Some((best, holds)) = self.best else { return Choice::End(self.nothing()) };
        if holds * 2 > of {
            return Choice::One(best, holds);
        }
        let most = self.groups.drain().max_by_key(|(likeness, group)| (group.held.len(), *likeness));
        if let Some((likeness, Group { held, holders })) = most
            && held.len() * 2 > of
            && !(likeness == best.likeness() && holds * 4 >= of && holds * 2 > held.len())
        {
            return Choice::Alike(holders, held.len());
        }
        if holds > 1 && holds * 4 >= of {
            return Choice::One(best, holds);
        }
        let few = self.reached.len() * 2 <= of;
        Choice::End(if few { self.nothing() } else { End::Scattered })
    }
}

/// A random sample of everything seen, in bounded memory: the objects whose addresses have the smallest hashes. Every object is equally
/// likely to be included, regardless of the order of addresses or allocations. Taking every n-th object would not do, because programs
/// allocate in repeating patterns.
#[derive(Clone, Debug)]
pub(super) struct Samples<T> {
    by_hash: BTreeMap<u64, T>,
    pub(super) seen: u64,
}

impl<T> Default for Samples<T> {
    fn default() -> Self {
        Self { by_hash: BTreeMap::new(), seen: 0 }
    }
}

impl<T> Samples<T> {
    pub(super) fn see(&mut self, address: u64, one: T) {
        self.seen += 1;
        let hash = hash(address);
        if self.by_hash.len() < SAMPLES {
            self.by_hash.insert(hash, one);
        } else if let Some(last) = self.by_hash.last_entry()
            && hash < *last.key()
        {
            last.remove();
            self.by_hash.insert(hash, one);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_hash.is_empty()
    }

    pub(super) fn kept(self) -> impl Iterator<Item = T> {
        self.by_hash.into_values()
    }
}

/// The output function of `SplitMix64` (Steele, Lea, Flood 2014): a different number for each address; each of its bits depends on the
/// whole address.
fn hash(address: u64) -> u64 {
    let mixed = address.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::jsonl::Address;

    /// If there are few objects, all are kept; of many, some of each part of the heap are, in whatever order they are seen.
    #[test]
    fn samples() {
        let of = |addresses: &mut dyn Iterator<Item = u64>| {
            let (mut samples, mut count) = (Samples::default(), 0);
            for address in addresses {
                samples.see(address, address);
                count += 1;
            }
            assert_eq!((samples.seen, samples.is_empty()), (count, count == 0));
            let mut kept: Vec<u64> = samples.kept().collect();
            kept.sort_unstable();
            kept
        };
        assert!(of(&mut (0..0)).is_empty());
        assert_eq!(of(&mut (0..64)), (0..64).collect::<Vec<u64>>());
        let many = of(&mut (0..100_000));
        assert_eq!(many.len(), 64);
        assert!(many[0] < 20_000 && many[63] > 80_000, "{many:?}");
        assert_eq!(of(&mut (0..100_000).rev()), many);
    }

    /// Objects that are allocated in a repeating pattern are drawn in proportion: every third, fourth, … object of a heap, starting at any
    /// slot. The heaps are fixed, so the draws are, too.
    #[test]
    fn samples_of_a_pattern() {
        for period in [2_u64, 3, 4, 5, 8, 16, 64] {
            let mut drawn = 0;
            let heaps = 400_u64;
            for heap in 0..heaps {
                let mut samples = Samples::default();
                for object in 0..2000 {
                    samples.see(0x7f00_0000_0010 + heap * 0x1_0000_0000 + object * 40, object);
                }
                drawn += samples.kept().filter(|object| object % period == 0).count() as u64;
            }
            let (mean, all) = (heaps * 64 / period, (heaps * 64) as f64);
            let share = 1.0 / period as f64;
            let deviation = (all * share * (1.0 - share)).sqrt();
            assert!((drawn as f64 - mean as f64).abs() < 4.0 * deviation, "{period}: {drawn} of {all}");
        }
    }

    const ORDER: u64 = 0x10;
    const HASH: u64 = 0x20;

    fn object(address: u64, class: u64, refers: u64) -> HeapObject {
        let kind = ObjectType::OBJECT;
        HeapObject { address, kind, class, code: None, refers, old: true, size: 40 }
    }

    fn step(samples: u64, holders: impl IntoIterator<Item = (HeapObject, Vec<u64>)>) -> Step {
        let mut step = Step::new(0, 0..samples);
        for (object, held) in holders {
            step.offer(object, &held.into_iter().collect());
        }
        step
    }

    /// One order for each of 39 of the 52 strings; a hash with many references holds one of the other strings.
    fn own(orders: u64) -> impl Iterator<Item = (HeapObject, Vec<u64>)> {
        let orders = (0..orders).map(|i| (object(0x1000 + i, ORDER, 2), vec![i]));
        orders.chain([(object(0x9000, HASH, 3072), vec![51])])
    }

    /// If each sample has its own holder, their class holds most, and the path continues from these holders, not from an object with
    /// many references that holds one sample.
    #[test]
    fn holders_of_their_own() {
        let Choice::Alike(orders, holds) = step(52, own(39)).choose() else { panic!("no group") };
        assert_eq!((holds, orders.seen), (39, 39));
        let orders: Vec<HeapObject> = orders.kept().collect();
        assert!(orders.iter().all(|order| order.class == ORDER));
        assert_eq!(orders.len(), 39);
        // Blocks are distinguished by their code; their variables are all of one type.
        let blocks = |code| move |i| (HeapObject { code, ..object(0x1000 + i, 0, 2) }, vec![i]);
        let two = (0..30).map(blocks(Some(1))).chain((30..52).map(blocks(Some(2))));
        let Choice::Alike(most, 30) = step(52, two).choose() else { panic!("not 30") };
        assert!(most.kept().all(|object| object.code == Some(1)));
    }

    /// A single object that holds more than half of the samples is their holder, whatever else holds them.
    #[test]
    fn one_holder() {
        let array = object(0x8000, HASH, 900);
        let both = own(39).chain([(array, (0..27).collect())]);
        assert!(matches!(step(52, both).choose(), Choice::One(found, 27) if found == array));
        // Some samples of a common class have other holders.
        let few = [(array, (0..13).collect())];
        assert!(matches!(step(52, few.clone()).choose(), Choice::One(_, 13)));
        assert!(matches!(step(53, few).choose(), Choice::End(End::Several)));
        // Whatever holds the only sample is its holder.
        assert!(matches!(step(1, [(array, vec![0])]).choose(), Choice::One(found, 1) if found == array));
    }

    /// Half of the old strings are in the hash that grows, some of the others each in a hash of its own. The one that grows is the holder,
    /// whether its share of the samples is a little more than half or less. If two hashes grow, both are reported.
    #[test]
    fn one_among_others_alike() {
        let hash = object(0x8000, HASH, 8000);
        let others = |from: u64| (from..64).map(|i| (object(0x9000 + i, HASH, 9), vec![i]));
        for held in [40, 33, 32, 31, 25] {
            let all = [(hash, (0..held).collect())].into_iter().chain(others(56));
            let Choice::One(found, holds) = step(64, all).choose() else { panic!("{held}: not one") };
            assert_eq!((found, holds), (hash, held as usize));
        }
        let second = object(0x8001, HASH, 8000);
        let both = [(hash, (0..26).collect()), (second, (26..52).collect())];
        let Choice::Alike(both, 60) = step(64, both.into_iter().chain(others(56))).choose() else {
            panic!("not both")
        };
        assert_eq!(both.seen, 10);
    }

    /// No holder is reported if no class of holders holds most of the samples, or if most have no readable holder.
    #[test]
    fn scattered() {
        let of_classes = |classes: u64, held: u64| {
            (0..held).map(move |i| (object(0x1000 + i, 0x100 + i % classes, 2), vec![i]))
        };
        assert!(matches!(step(52, of_classes(4, 52)).choose(), Choice::End(End::Scattered)));
        assert!(matches!(step(52, of_classes(2, 52)).choose(), Choice::End(End::Scattered)));
        assert!(matches!(step(52, of_classes(4, 26)).choose(), Choice::End(End::Several)));
        assert!(matches!(step(52, of_classes(4, 0)).choose(), Choice::End(End::Several)));
        assert!(matches!(step(2, of_classes(2, 2)).choose(), Choice::End(End::Scattered)));
        // The number of groups is bounded, but an existing group continues to be counted.
        let step = &mut step(52, of_classes(1, 30));
        for class in 0..10_000 {
            step.offer(object(0x9000 + class, 0x1000 + class, 2), &BTreeSet::from([51]));
        }
        assert_eq!(step.groups.len(), GROUPS);
        assert!(matches!(step.choose(), Choice::Alike(_, 30)));
    }

    /// A pass that was not completed leaves nothing behind.
    #[test]
    fn again() {
        let mut step = step(52, own(39));
        step.again();
        assert!(matches!(step.choose(), Choice::End(End::Several)));
    }

    /// An object without a holder is held by something unreadable, or is garbage: a replaced copy is not old, or one of several.
    #[test]
    fn replaced() {
        let holder = Holder {
            address: Address(0x1000),
            kind: "T_ARRAY",
            class: None,
            hidden: true,
            code: None,
            refers: 3,
            size: 40,
            objects: 1,
            holds: 3,
            of: 3,
        };
        let array = |address| (object(address, ORDER, 3), vec![0, 1, 2]);
        let end = |copies: u64, old| {
            let found = step(3, (0..copies).map(|copy| array(0x1000 + copy)));
            let Choice::End(end) = found.next(holder.clone(), old, [0x1000]).choose() else { panic!("held") };
            end
        };
        assert_eq!(end(1, true), End::NotReadable);
        assert_eq!(end(1, false), End::Doubtful);
        assert_eq!(end(2, true), End::Doubtful);
        // Only ties for the largest number count.
        let mut found =
            step(3, [(object(0x900, HASH, 1), vec![1]), array(0x1000), (object(0x901, HASH, 1), vec![1])]);
        assert!(!found.tied);
        found.offer(object(0x902, HASH, 1), &BTreeSet::from([0, 1, 2]));
        assert!(found.tied);
    }

    /// Objects of earlier steps are not holders.
    #[test]
    fn circles() {
        let holder = Holder {
            address: Address(0x1000),
            kind: "T_OBJECT",
            class: None,
            hidden: true,
            code: None,
            refers: 2,
            size: 40,
            objects: 2,
            holds: 3,
            of: 3,
        };
        let mut next = step(3, own(3)).next(holder.clone(), true, [0x1000, 0x1001]);
        assert_eq!(next.holders, [holder]);
        next.offer(object(0, HASH, 2), &BTreeSet::from([0x1000]));
        next.offer(object(0x1001, HASH, 2), &BTreeSet::from([0x1000]));
        assert!(matches!(next.choose(), Choice::End(End::Several)));
        next.offer(object(0x5000, HASH, 2), &BTreeSet::from([0x1000, 0x1001]));
        assert!(matches!(next.choose(), Choice::One(_, 2)));
    }
}
