//! Which exporters push to which servers.

use std::{rc::Rc, time::Duration};

use super::{
    ExportError, Exporter, otlp, pyroscope,
    upload::{self, Address, Uploader},
    windows::{LastUploads, Make, Windows},
};
use crate::{aggregate::recording::Filter, clock::WallClock};

pub use otlp::Agent;

/// Servers to push to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Servers {
    /// Address of an OTLP receiver, without `/v1/...`.
    pub otlp: Option<Address>,
    /// Whether metrics are pushed there.
    pub metrics: bool,
    /// Whether profiles are pushed there.
    pub profiles: bool,
    /// Address of a Pyroscope.
    pub pyroscope: Option<Address>,
    /// Push interval.
    pub interval: Duration,
    /// Whether threads off their CPU are recorded.
    pub wall: bool,
    /// Filter for the profiles.
    pub filter: Filter,
}

impl Servers {
    /// Whether any server needs stacks.
    pub fn wants_stacks(&self) -> bool {
        (self.otlp.is_some() && self.profiles) || self.pyroscope.is_some()
    }

    /// Whether any server is configured.
    pub fn any(&self) -> bool {
        self.otlp.is_some() || self.pyroscope.is_some()
    }
}

/// The exporters that push to these servers. They must be used together, in this order.
pub fn exporters(
    servers: &Servers,
    clock: WallClock,
    agent: &Agent,
    say: fn(&str),
) -> Result<Vec<Box<dyn Exporter>>, ExportError> {
    let mut exporters: Vec<Box<dyn Exporter>> = Vec::new();
    let mut uploaders = Vec::new();
    let mut sinks: Vec<(Rc<Uploader>, Make)> = Vec::new();
    let start = |name, address: &Address, variable| {
        let headers = upload::headers(variable).map_err(|why| ExportError::Headers { variable, why })?;
        Uploader::start(name, address, headers, say).map(Rc::new).map_err(ExportError::Thread)
    };
    if let Some(address) = &servers.otlp {
        let uploader = start("OTLP", address, "OTEL_EXPORTER_OTLP_HEADERS")?;
        if servers.metrics {
            exporters.push(Box::new(otlp::OtlpMetrics::new(
                Rc::clone(&uploader),
                servers.interval,
                clock,
                agent.clone(),
            )));
        }
        if servers.profiles {
            sinks.push((Rc::clone(&uploader), otlp::profiles));
        }
        uploaders.push(uploader);
    }
    if let Some(address) = &servers.pyroscope {
        let uploader = start("Pyroscope", address, "GCTRACE_PYROSCOPE_HEADERS")?;
        sinks.push((Rc::clone(&uploader), pyroscope::make));
        uploaders.push(uploader);
    }
    if !sinks.is_empty() {
        // Pyroscope is not sent traces: it would make a series of each.
        let traces = servers.otlp.is_some() && servers.profiles;
        let shown = (servers.wall, traces);
        exporters.push(Box::new(Windows::new(sinks, servers.interval, shown, &servers.filter)));
    }
    if !uploaders.is_empty() {
        exporters.push(Box::new(LastUploads::new(uploaders)));
    }
    Ok(exporters)
}
