//! `gctrace collector`: flags into options of the server.

use gctrace_collector::server::{self, CollectorError, Options};

use super::args::CollectorArgs;
use crate::console::say;

impl From<CollectorArgs> for Options {
    fn from(args: CollectorArgs) -> Self {
        let CollectorArgs {
            listen,
            store,
            tls_cert,
            tls_key,
            public_url,
            no_registration,
            per_address,
            min_agent,
        } = args;
        Self {
            listen,
            store,
            tls: tls_cert.zip(tls_key),
            public_url,
            registration: !no_registration,
            per_address,
            min_agent,
        }
    }
}

/// Runs a collector until SIGINT or SIGTERM.
pub fn collector(args: CollectorArgs) -> Result<(), CollectorError> {
    server::run(args.into(), say)
}
