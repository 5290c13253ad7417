//! Colours where the reader prefers dark ones, and sizes of text on narrow screens. What the drawing library writes is for light, wide ones.

/// Attributes of an element give way to rules of a style. Frames keep their colours, and dark text.
const RULES: &str = "
#search { opacity: 0.6 }
@media (prefers-color-scheme: dark) {
  #background stop { stop-color: #0d1117 }
  #title, #subtitle, #details, #unzoom, #search, #matched, #legend text { fill: #e6edf3 }
  #frames > *:hover { stroke: white }
  .parent { opacity: 0.75 }
}
@media (max-width: 40rem) {
  #title { font-size: 12px }
  #subtitle { font-size: 8px }
  #legend text { font-size: 9px }
}
";

/// The graph with these rules. One that does not look as expected is left as it is.
pub(super) fn added(svg: &str) -> String {
    svg.replacen("</style>", &format!("{RULES}</style>"), 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rules come last, where they replace others; names of frames come later.
    #[test]
    fn rules() {
        let svg = "<svg><style>.parent { opacity:0.5; }</style><text>&lt;/style></text></svg>";
        let themed = added(svg);
        let (style, rest) = themed.split_once("</style>").unwrap();
        assert!(style.ends_with(RULES) && rest == "<text>&lt;/style></text></svg>", "{themed}");
        assert_eq!(added("<svg/>"), "<svg/>");
    }
}
