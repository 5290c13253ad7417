#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod address;
#[cfg(test)]
mod damaged;
#[cfg(test)]
mod debian;
pub mod elf;
pub mod ruby;
