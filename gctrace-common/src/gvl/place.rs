//! How the GVL of an image is found, and what its probes need to know.

#[cfg(feature = "user")]
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// How the threads of an image are distinguished and how their GVL is found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct GvlPath {
    /// One of the constants below.
    pub by: u32,
    /// Byte offset of `ractor` in `rb_thread_t`; 0: the GVL is an argument of the probed function.
    pub thread_ractor: u32,
    /// Where the condition variable is on which a thread waits for the GVL. Zero unless futexes are watched.
    pub futex: FutexPath,
}

/// How a wait for the GVL is recognised by the futex that the thread waits on. Offsets are in `rb_thread_t` unless stated otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, Immutable, IntoBytes, KnownLayout))]
#[repr(C)]
pub struct FutexPath {
    /// Byte offset of the condition variable in `rb_thread_t` (`native_thread_data.cond.gvlq`, up to 3.1), or in
    /// `rb_native_thread` (`cond.readyq`, from 3.2 on).
    pub cond: u32,
    /// Byte offset of `nt`; 0: the condition variable is in `rb_thread_t`.
    pub native: u32,
    /// Byte offset of `thread_id`, a `pthread_t`; used if the condition variable is in `rb_thread_t`.
    pub thread_id: u32,
    /// Byte offset of `sched.node.readyq` (from 3.3 on): a thread that waits for the GVL is in that list, one that sleeps on the
    /// same condition variable is not. 0: `unblock` distinguishes them.
    pub ready: u32,
    /// Byte offset of `unblock.func` (up to 3.2): null in a thread that waits for the GVL, set in one that sleeps.
    pub unblock: u32,
    /// Byte offset of the pointer to the structure that contains `owner`: the VM or the Ractor.
    pub owner_in: u32,
    /// Byte offset of the holder of the GVL in that structure (up to 3.2).
    pub owner: u32,
    /// Zero.
    pub reserved: u32,
}

/// A thread that waits again on its condition variable within this time, nanoseconds, had not acquired the GVL if the GVL had a
/// holder when the thread woke.
pub const GOES_ON_NS: u64 = 1_000_000;

impl GvlPath {
    /// [`GvlPath::by`]: the GVL of this image is not watched.
    pub const NONE: u32 = 0;
    /// By `rb_thread_t *`: a thread can move from one native thread to another (3.3 and later).
    pub const BY_THREAD: u32 = 1;
    /// By tid: each thread has a native thread of its own.
    pub const BY_TID: u32 = 2;
    /// By tid, and only waits that block on a futex are seen.
    pub const BY_FUTEX: u32 = 3;
}

/// What happens at a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum GvlPoint {
    /// A thread starts.
    Started = 0,
    /// It requests the GVL.
    Ready = 1,
    /// It has acquired the GVL.
    Resumed = 2,
    /// It releases the GVL.
    Suspended = 3,
    /// It ends.
    Exited = 4,
}

impl GvlPoint {
    /// All points, in the order of their numbers.
    pub const ALL: [Self; 5] = [Self::Started, Self::Ready, Self::Resumed, Self::Suspended, Self::Exited];

    /// The word used in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Started => "STARTED",
            Self::Ready => "READY",
            Self::Resumed => "RESUMED",
            Self::Suspended => "SUSPENDED",
            Self::Exited => "EXITED",
        }
    }
}

/// The attach cookie of a probe at a GVL point: the image, where to find the thread, and the instruction.
///
/// Bit layout: 63..56 image, 55..52 register, 51 whether the thread is in memory, 50..36 displacement from the register's value
/// in bytes (signed), 35..0 stated address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GvlCookie {
    /// Index into the `IMAGES` map.
    pub image: u8,
    /// Hardware number of the register (0 rax … 4 rsp … 15 r15).
    pub register: u8,
    /// Whether the thread is in the eight bytes of memory that the register leads to, instead of in the register.
    pub in_memory: bool,
    /// Byte offset of those eight bytes from the address in the register.
    pub displacement: i16,
    /// Stated address of the probed instruction.
    pub address: u64,
}

impl GvlCookie {
    const ADDRESS: u64 = (1 << 36) - 1;
    const DISPLACEMENT: u64 = (1 << 15) - 1;

    /// Packs the cookie; [`GvlCookie::fits`] says beforehand whether its fields fit.
    pub const fn pack(self) -> u64 {
        (self.image as u64) << 56
            | (self.register as u64 & 15) << 52
            | (self.in_memory as u64) << 51
            | (self.displacement as u64 & Self::DISPLACEMENT) << 36
            | self.address & Self::ADDRESS
    }

    /// The inverse of [`GvlCookie::pack`]; never fails.
    pub const fn unpack(raw: u64) -> Self {
        Self {
            image: (raw >> 56) as u8,
            register: (raw >> 52) as u8 & 15,
            in_memory: raw >> 51 & 1 != 0,
            // The shift to the left and back extends the sign.
            displacement: ((raw >> 36 & Self::DISPLACEMENT) as i16) << 1 >> 1,
            address: raw & Self::ADDRESS,
        }
    }

    /// Whether every field fits its width, so that packing loses nothing.
    pub const fn fits(self) -> bool {
        self.register < 16
            && self.displacement >= -(1 << 14)
            && self.displacement < 1 << 14
            && self.address <= Self::ADDRESS
    }
}

const _: () = assert!(size_of::<GvlPath>() == 40);

#[cfg(test)]
mod tests {
    use super::*;

    /// Every field survives the round trip at its extremes.
    #[test]
    fn cookies() {
        for image in [0, 255] {
            for (register, in_memory) in [(0, false), (4, true), (15, true)] {
                for displacement in [0, 8, -8, (1 << 14) - 1, -(1 << 14)] {
                    for address in [0, 0x1234_5678, (1 << 36) - 1] {
                        let cookie = GvlCookie { image, register, in_memory, displacement, address };
                        assert!(cookie.fits());
                        assert_eq!(GvlCookie::unpack(cookie.pack()), cookie);
                    }
                }
            }
        }
        let cookie = GvlCookie { image: 0, register: 0, in_memory: true, displacement: 1 << 14, address: 0 };
        assert!(!cookie.fits());
        assert!(!GvlCookie { displacement: 0, address: 1 << 36, ..cookie }.fits());
    }
}
