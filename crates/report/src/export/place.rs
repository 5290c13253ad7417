//! Code locations and process names in compact form.

use std::sync::Arc;

use gctrace_tunemygc::printable::printable;

use crate::{
    model::{
        Process,
        source::{Source, app_frame, last_two, ruby_frame},
        stack::Frame,
    },
    words::UNNAMED,
};

/// Maximum number of characters of a method name shown.
const NAME: usize = 60;
/// Maximum number of characters of a file name shown.
const FILE: usize = 60;

/// The file in a form that distinguishes files: `models/order.rb:12`, `gem sinatra-3.0.5 base.rb:1874`.
fn file_and_line(frame: &Frame) -> Option<String> {
    let file = frame.file.as_deref()?;
    let name = file.rsplit('/').next().unwrap_or(file);
    Some(match Source::of(file) {
        Source::Gem(gem) => format!("gem {} {}{}", clip(gem, FILE), clip(name, FILE), frame.colon_line()),
        Source::App | Source::Library => format!("{}{}", clip(last_two(file), FILE), frame.colon_line()),
        Source::Internal => format!("{}{}", clip(file, FILE), frame.colon_line()),
    })
}

/// The first `width` characters, all of them printable.
pub(super) fn clip(text: &str, width: usize) -> String {
    printable(text).chars().take(width).collect()
}

/// Like [`clip`], with a mark if something was cut off.
pub(super) fn shorten(text: &str, width: usize) -> String {
    let text = printable(text);
    match text.char_indices().nth(width) {
        None => text.to_string(),
        Some(_) => text.chars().take(width.saturating_sub(1)).chain(['…']).collect(),
    }
}

/// `Order#total models/order.rb:12`.
pub fn place(frame: &Frame) -> String {
    let name = clip(&frame.name, NAME);
    match file_and_line(frame) {
        Some(at) => format!("{name} {at}"),
        None => name,
    }
}

/// [`place`] in at most `width` columns: the line number is kept in preference to the method name.
pub(super) fn place_within(frame: &Frame, width: usize) -> String {
    let full = place(frame);
    if full.chars().count() <= width {
        return full;
    }
    let Some(at) = file_and_line(frame) else { return clip(&full, width) };
    if at.chars().count() <= width {
        return at;
    }
    let short = at.rsplit(['/', ' ']).next().unwrap_or(&at).to_owned();
    clip(&short, width)
}

/// What started a cycle: the Ruby line, and if that is not application code, also the application line that led there.
pub fn started_by(stack: &[Arc<Frame>]) -> Option<String> {
    let leaf = ruby_frame(stack)?;
    Some(match app_frame(stack) {
        Some(app) if !Arc::ptr_eq(app, leaf) => format!("{} for {}", place(leaf), place(app)),
        _ => place(leaf),
    })
}

/// [`started_by`] in at most `width` columns: only the application line.
pub(super) fn started_by_within(stack: &[Arc<Frame>], width: usize) -> Option<String> {
    app_frame(stack).or_else(|| ruby_frame(stack)).map(|frame| place_within(frame, width))
}

/// The display name of the program: its service, and the part of its title in brackets (`puma[shop]`).
pub fn program(process: &Process) -> String {
    program_of(&process.origin.service, &process.comm, process.cmdline.as_deref().unwrap_or_default())
}

/// Like [`program`], from a service, the name of the main thread, and the arguments.
pub(super) fn program_of(service: &str, comm: &str, cmdline: &[String]) -> String {
    let tag = match cmdline {
        [title] if title.starts_with(service) => {
            let inner = title.trim_end().strip_suffix(']').and_then(|title| title.rsplit_once('['));
            inner.map(|(_, tag)| tag).filter(|tag| !tag.is_empty())
        }
        _ => None,
    };
    match (service, tag) {
        ("", _) if comm.is_empty() => UNNAMED.to_owned(),
        ("", _) => clip(comm, FILE),
        (service, Some(tag)) => clip(&format!("{service}[{tag}]"), FILE),
        (service, None) => clip(service, FILE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::stack::FrameKind;

    fn frame(kind: FrameKind, name: &str, file: Option<&str>) -> Arc<Frame> {
        let (name, file) = (Arc::from(name), file.map(Arc::from));
        Arc::new(Frame { kind, name, file, line: 12, first_line: 10, address: 0 })
    }

    /// The trigger is the innermost Ruby frame (below the C function that allocated), with the line being executed.
    #[test]
    fn triggers() {
        let stack = [
            frame(FrameKind::Native, "newobj_slowpath", Some("/lib/libruby.so.3.3")),
            frame(FrameKind::CFunction, "String#*", None),
            frame(FrameKind::Ruby, "Base#call\n", Some("/gems/sinatra-3.0.5/lib/base.rb")),
            frame(FrameKind::Ruby, "Set#add", Some("/usr/lib/ruby/3.1.0/set.rb")),
            frame(FrameKind::Ruby, "Foo#bar", Some("/srv/app/lib/app.rb")),
            frame(FrameKind::Ruby, "<main>", Some("/srv/app/main.rb")),
        ];
        assert_eq!(
            started_by(&stack).unwrap(),
            "Base#call\\u{a} gem sinatra-3.0.5 base.rb:12 for Foo#bar lib/app.rb:12"
        );
        assert_eq!(started_by(&stack[4..]).unwrap(), "Foo#bar lib/app.rb:12");
        assert_eq!(started_by(&stack[3..4]).unwrap(), "Set#add 3.1.0/set.rb:12");
        assert_eq!(started_by(&stack[..2]), None);
    }

    /// A narrower column shows less; the line number is kept longest.
    #[test]
    fn narrow() {
        let stack = [frame(FrameKind::Ruby, "Foo#bar", Some("/srv/app/lib/app.rb"))];
        let within = |width| started_by_within(&stack, width).unwrap();
        assert_eq!(within(21), "Foo#bar lib/app.rb:12");
        assert_eq!((within(20).as_str(), within(12).as_str()), ("lib/app.rb:12", "app.rb:12"));
        assert_eq!(within(4), "app.");
    }
}
