//! Call paths: folded stacks and flame graphs.

use std::collections::HashSet;

use super::*;

pub(super) fn check_folded(recorder: &Recorder, inputs: &[Input]) {
    for grouping in [Grouping::Process, Grouping::Thread, Grouping::None] {
        let (bytes, _) = written(recorder, Format::Folded(grouping), "x");
        let text = String::from_utf8(bytes).unwrap();
        let lines: Vec<(&str, u64)> = text
            .lines()
            .map(|line| line.rsplit_once(' ').unwrap())
            .map(|(path, count)| (path, count.parse().unwrap()))
            .collect();
        assert_eq!(
            lines.iter().map(|line| line.1).sum::<u64>(),
            sum(inputs, Input::time_ns),
            "{grouping:?}\n{text}"
        );
        assert_eq!(lines.iter().map(|line| line.0).collect::<HashSet<_>>().len(), lines.len());
        assert!(lines.iter().all(|line| !line.0.is_empty()));
        // Process, thread and state are names, too, and so is what stands for no stack at all.
        let frames = inputs.iter().map(|input| (input.stack.len() * input.times).max(1));
        let depths = frames.max().unwrap() + 3;
        assert!(lines.iter().all(|line| line.0.split(';').count() <= depths));
    }
}

pub(super) fn check_flamegraph(recorder: &Recorder, inputs: &[Input]) {
    let (bytes, _) = written(recorder, Format::FlameGraph(Grouping::Process), "x.svg");
    let text = String::from_utf8(bytes).unwrap();
    let mut reader = quick_xml::Reader::from_str(&text);
    let (mut total, mut scripts, mut depth) = (None, 0, 0_i32);
    loop {
        match reader.read_event().unwrap() {
            quick_xml::events::Event::Start(tag) => {
                depth += 1;
                scripts += i32::from(tag.name().as_ref() == b"script");
                for attribute in tag.attributes() {
                    let attribute = attribute.unwrap();
                    if attribute.key.as_ref() == b"total_samples" {
                        total = Some(String::from_utf8(attribute.value.to_vec()).unwrap());
                    }
                }
            }
            quick_xml::events::Event::End(_) => depth -= 1,
            quick_xml::events::Event::Eof => break,
            _ => {}
        }
    }
    assert_eq!(depth, 0);
    let expected = sum(inputs, Input::time_ns);
    assert_eq!(scripts, i32::from(expected > 0), "a name became a script");
    assert_eq!(text.contains("<g id=\"legend\">"), expected > 0, "what the colours mean");
    assert_eq!(total, (expected > 0).then(|| expected.to_string()));
    assert!(!text.contains(|c: char| c.is_control() && c != '\n' && c != '\r' && c != '\t'));
}

/// Characters that hide, move or reverse text are escaped wherever the program chose the name: methods, files, threads and
/// processes. The rest of the name is left as it is.
#[test]
fn hidden_characters_are_escaped() {
    let hidden =
        ['\u{202a}', '\u{202e}', '\u{2066}', '\u{2069}', '\u{200f}', '\u{61c}', '\u{feff}', '\u{9b}', '\x1b'];
    let mut recorder = recorded(&[], Limits::default());
    for c in hidden {
        let (mut process, sample) = a_sample(5);
        process.comm = format!("puma{c}");
        let kinds = [FrameKind::Ruby, FrameKind::CFunction, FrameKind::Native, FrameKind::Kernel];
        let frames = kinds.map(|kind| {
            let (name, file) = (Arc::from(format!("Größe#{c}bar")), Some(Arc::from(format!("/srv/a{c}.rb"))));
            Arc::new(Frame { kind, name, file, line: 2, first_line: 1, address: 0 })
        });
        // Wide enough to be drawn with its name.
        let sample = StackSample {
            comm: Arc::from(format!("worker{c}")),
            cpu_ns: 1_000_000,
            stack: Arc::new(frames),
            ..sample
        };
        recorder.see(&process, Seen::Process { state: None, now_ns: 0 }).unwrap();
        recorder.see(&process, Seen::Stack(&sample)).unwrap();
    }
    for format in [Format::Folded(Grouping::Thread), Format::FlameGraph(Grouping::Thread)] {
        let text = String::from_utf8(written(&recorder, format, "x").0).unwrap();
        let raw = text.chars().find(|c| hidden.contains(c));
        assert_eq!(raw, None, "{format:?}");
        for c in hidden {
            let escaped = c.escape_unicode();
            for name in ["puma", "worker", "Größe#", "a"].map(|name| format!("{name}{escaped}")) {
                assert!(text.contains(&name), "{format:?}: no {name}");
            }
        }
    }
}
