//! Parses the query of a request.

use gctrace_report::{
    export::{profile::Measure, window::Window},
    trace_file::Header,
};

use crate::{
    Asked, Choose,
    graph::{self, MEASURES},
};

/// What a request asks for.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    pub(crate) asked: Asked,
    pub(crate) window: Window,
    pub(crate) of: Measure,
    /// The part to compare it with: now, or once a part is chosen.
    pub(crate) other: Option<Window>,
}

impl Wanted {
    /// Parses a query, or returns what is wrong with it.
    /// `against` is the header of another recording, a part of which it is compared with.
    pub(crate) fn of(
        query: &str,
        header: &Header,
        against: Option<&Header>,
        choose: Choose,
    ) -> Result<Self, String> {
        let (mut asked, mut of) = (Asked::default(), None);
        for (key, value) in form_urlencoded::parse(query.as_bytes()) {
            let value = value.trim();
            // Form fields that were left empty.
            if value.is_empty() {
                continue;
            }
            match &*key {
                "from" => asked.from = Some(value.to_owned()),
                "to" => asked.to = Some(value.to_owned()),
                "last" => asked.last = Some(value.to_owned()),
                "afrom" => asked.a_from = Some(value.to_owned()),
                "ato" => asked.a_to = Some(value.to_owned()),
                "pid" => asked.pids.push(value.to_owned()),
                "of" => of = Some(value.to_owned()),
                _ => {}
            }
        }
        let window = choose(header, &asked)?;
        let marked = asked.a_from.is_some() || asked.a_to.is_some();
        let other = (marked || against.is_some()).then(|| {
            // Another recording has other processes.
            let pids = if against.is_some() { Vec::new() } else { asked.pids.clone() };
            let (from, to) = (asked.a_from.clone(), asked.a_to.clone());
            let other = choose(against.unwrap_or(header), &Asked { from, to, pids, ..Asked::default() });
            other.map_err(|why| format!("A: {why}"))
        });
        let other = other.transpose()?;
        let of = match of {
            None => graph::first(header.subjects),
            Some(word) => {
                let found = MEASURES.into_iter().find(|(_, name, _)| *name == word);
                let (measure, ..) = found.ok_or_else(|| {
                    let words: Vec<&str> = MEASURES.iter().map(|(_, name, _)| *name).collect();
                    format!("of={word}: expected {}", words.join(", "))
                })?;
                measure
            }
        };
        if !graph::is_recorded(of, header.subjects) {
            return Err(format!("of={}: that was not recorded", graph::word(of)));
        }
        Ok(Self { asked, window, of, other })
    }
}
