//! Flame graphs: rendered once for each part and measure, and shown in a frame under a policy that allows only their own script.

use std::{
    collections::HashMap,
    io,
    sync::{Arc, Mutex, PoisonError},
};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use gctrace_report::{
    export::profile::{Format, Graph, Kept, Measure},
    trace_file::Subjects,
};
use sha2::{Digest as _, Sha256};

/// The measures that a graph can show: each with its value of `--flamegraph-of`, and its name.
pub(crate) const MEASURES: [(Measure, &str, &str); 5] = [
    (Measure::Cpu, "cpu", "CPU time"),
    (Measure::Wall, "wall", "Wall time"),
    (Measure::Gc, "gc", "GC pauses"),
    (Measure::GvlWait, "gvl-wait", "Waits for the GVL"),
    (Measure::Alloc, "alloc", "Allocation"),
];

/// Whether a recording of these subjects has a graph of this measure.
pub(crate) fn is_recorded(measure: Measure, subjects: Subjects) -> bool {
    match measure {
        Measure::Cpu => subjects.samples,
        Measure::Wall => subjects.wall,
        Measure::Gc => true,
        Measure::GvlWait => subjects.gvl,
        Measure::Alloc => subjects.alloc,
        // `gctrace malloc` makes no recordings.
        Measure::Malloc | Measure::MallocLive => false,
    }
}

/// The default measure: that of `gctrace report`, or GC pauses if there are no samples.
pub(crate) fn first(subjects: Subjects) -> Measure {
    match subjects {
        Subjects { wall: true, .. } => Measure::Wall,
        Subjects { samples: true, .. } => Measure::Cpu,
        _ => Measure::Gc,
    }
}

/// The value of `--flamegraph-of` for a measure.
pub(crate) fn word(measure: Measure) -> &'static str {
    MEASURES.iter().find(|(of, ..)| *of == measure).map_or("cpu", |(_, word, _)| word)
}

/// A rendered graph.
#[derive(Debug)]
pub(crate) struct Drawn {
    pub(crate) svg: Vec<u8>,
    /// Its height, pixels.
    pub(crate) height: u32,
    /// The `Content-Security-Policy` under which it is shown.
    pub(crate) policy: String,
}

impl Drawn {
    /// Wraps a rendered SVG.
    pub(crate) fn of(svg: Vec<u8>) -> Self {
        let text = String::from_utf8_lossy(&svg);
        let (height, policy) = (height(&text).unwrap_or(600), policy(&text));
        Self { svg, height, policy }
    }
}

/// The rendered graphs of a part, by measure.
#[derive(Debug, Default)]
pub(crate) struct Graphs(Mutex<HashMap<&'static str, Arc<Drawn>>>);

impl Graphs {
    /// A graph as `gctrace report --flamegraph` writes it, but with its roots at the top, where its frame begins.
    pub(crate) fn of(&self, kept: &Kept, measure: Measure) -> io::Result<Arc<Drawn>> {
        let mut graphs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(drawn) = graphs.get(word(measure)) {
            return Ok(Arc::clone(drawn));
        }
        let mut svg = Vec::new();
        kept.write(
            Format::FlameGraph(Graph { of: measure, roots_on_top: true, ..Graph::default() }),
            &mut svg,
        )?;
        let drawn = Arc::new(Drawn::of(svg));
        graphs.insert(word(measure), Arc::clone(&drawn));
        Ok(drawn)
    }
}

fn height(svg: &str) -> Option<u32> {
    let (_, rest) = svg.split_once("<svg ")?;
    let (_, rest) = rest.split_once(" height=\"")?;
    rest.split_once('"')?.0.parse().ok()
}

/// The policy for a graph: it allows its first script, which precedes any name, and the call of that script when the picture is loaded.
fn policy(svg: &str) -> String {
    let script = script(svg).map(|text| format!(" {}", hash(&text))).unwrap_or_default();
    let call = hash("init(evt)");
    format!(
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-hashes' {call}{script}; base-uri 'none'; \
         form-action 'none'; frame-ancestors 'self'"
    )
}

/// The text of the first script, as a browser interprets it.
fn script(svg: &str) -> Option<String> {
    let (_, rest) = svg.split_once("<script")?;
    let (_, rest) = rest.split_once('>')?;
    let (text, _) = rest.split_once("</script>")?;
    Some(text.replace("<![CDATA[", "").replace("]]>", ""))
}

fn hash(text: &str) -> String {
    format!("'sha256-{}'", BASE64_STANDARD.encode(Sha256::digest(text.as_bytes())))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Only the graph's own script, which comes first, is allowed.
    #[test]
    fn policies() {
        let svg = "<svg a=\"1\" height=\"70\"><script type=\"x\"><![CDATA[a();]]><![CDATA[b();]]></script><script>evil()</script></svg>";
        assert_eq!((height(svg), script(svg).as_deref()), (Some(70), Some("a();b();")));
        let policy = policy(svg);
        assert!(policy.contains(&hash("a();b();")) && !policy.contains(&hash("evil()")), "{policy}");
        assert!(!policy.contains("script-src 'unsafe-inline'"), "{policy}");
    }
}
