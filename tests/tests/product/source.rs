//! Source text for the tests that read it.

/// The text without comments and without the items that only tests compile.
pub(crate) fn without_tests(text: &str) -> String {
    let mut code = String::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if line.trim_start().starts_with("//") {
            continue;
        }
        if line.trim() == "#[cfg(test)]" {
            // Skip the following item: up to the closing brace at the same depth, or to its semicolon.
            let indent = line.len() - line.trim_start().len();
            let mut item = lines.next().unwrap_or_default();
            while item.trim_start().starts_with("#[") {
                item = lines.next().unwrap_or_default();
            }
            if !item.trim_end().ends_with([';', '}']) {
                let end = format!("{}}}", " ".repeat(indent));
                lines.by_ref().find(|line| line.starts_with(&end));
            }
            continue;
        }
        code.push_str(line);
        code.push('\n');
    }
    code
}
