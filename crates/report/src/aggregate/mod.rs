//! Aggregates events into what users read. Pure: no I/O, no clock; times come with the events.

pub mod call_tree;
pub mod condition;
pub mod digest;
pub mod endpoint;
pub mod estimate;
mod gaps;
pub mod gc_cycle;
mod gc_pauses;
pub mod gc_summary;
pub mod gvl;
pub mod gvl_budget;
pub mod gvl_held;
pub mod gvl_pairs;
pub mod gvl_so_far;
pub mod handler;
pub mod heap_figures;
pub mod job;
pub mod mix;
pub mod recording;
pub mod request_summary;
pub mod server_load;
pub mod service_requests;
pub mod services;
mod times;
pub mod units;
