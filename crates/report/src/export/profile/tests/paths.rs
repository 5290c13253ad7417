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
