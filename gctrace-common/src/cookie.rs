//! The attach cookie: what the kernel hands back at every hit of a probe (`bpf_get_attach_cookie`, Linux 5.15).
//!
//! Bit layout: 63..52 image id, 51..48 register that holds the objspace pointer, 47..0 stated virtual address of
//! the probed instruction. The point (GC start, end of marking …) follows from the program, not from the cookie.

/// Largest image id a cookie can carry.
pub const MAX_IMAGE: u16 = 0xfff;
/// Register field of a site at which no register is known to hold the objspace pointer. Number 4 is the stack
/// pointer in the x86-64 encoding, which is never an objspace.
pub const NO_REGISTER: u8 = 4;

const ADDRESS_BITS: u32 = 48;

/// A decoded attach cookie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cookie {
    /// Index into the `IMAGES` map.
    pub image: u16,
    /// At a probe of a [`WorkPhase`](crate::event::WorkPhase), its number. Otherwise the hardware number of the register (x86-64 encoding
    /// order: 0 rax, 1 rcx, 2 rdx, 3 rbx, 5 rbp, 6 rsi, 7 rdi, 8–15 r8–r15).
    pub register: u8,
    /// Stated virtual address of the probed instruction; the run-time `ip` minus this is the load bias.
    pub address: u64,
}

impl Cookie {
    /// Packs the cookie; fields beyond their width are masked; [`Cookie::fits`] checks that beforehand.
    pub const fn pack(self) -> u64 {
        ((self.image & MAX_IMAGE) as u64) << 52
            | ((self.register & 0xf) as u64) << ADDRESS_BITS
            | (self.address & ((1 << ADDRESS_BITS) - 1))
    }

    /// The inverse of [`Cookie::pack`]; never fails.
    pub const fn unpack(raw: u64) -> Self {
        Self {
            image: (raw >> 52) as u16,
            register: ((raw >> ADDRESS_BITS) & 0xf) as u8,
            address: raw & ((1 << ADDRESS_BITS) - 1),
        }
    }

    /// Whether every field fits its width, so that packing loses nothing.
    pub const fn fits(self) -> bool {
        self.image <= MAX_IMAGE && self.register <= 0xf && self.address < 1 << ADDRESS_BITS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every field survives the round trip at its extremes.
    #[test]
    fn round_trip() {
        for image in [0, 1, MAX_IMAGE] {
            for register in [0, NO_REGISTER, 15] {
                for address in [0, 0x1_2345, (1 << 48) - 1] {
                    let cookie = Cookie { image, register, address };
                    assert!(cookie.fits());
                    assert_eq!(Cookie::unpack(cookie.pack()), cookie);
                }
            }
        }
        assert!(!Cookie { image: MAX_IMAGE + 1, register: 0, address: 0 }.fits());
        assert!(!Cookie { image: 0, register: 0, address: 1 << 48 }.fits());
    }
}
