//! Folding of events into what users read. Pure: no I/O, no clock; time comes with the events.

pub mod gc_cycle;
