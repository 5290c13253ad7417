//! Colours for readers who prefer dark ones, and text sizes for narrow screens. The output of the drawing library is
//! made for light, wide screens.

/// Style rules override attributes of an element. Frames keep their colours, and dark text.
const RULES: &str = "
#search { opacity: 0.6 }
@media (prefers-color-scheme: dark) {
  #background stop { stop-color: #0d1117 }
  #title, #subtitle, #details, #unzoom, #search, #matched, #legend text { fill: #e6edf3 }
  #frames > *:hover { stroke: white }
  .parent { opacity: 0.75 }
}
";

/// Rules for narrow screens, with those of the titles. The number of search matches does not cover the details of the row under the pointer.
const NARROW: &str = "  #subtitle { font-size: 9px }
  #legend text { font-size: 9px }
  #details { font-size: 11px; transform: translateY(-4px) }
  #matched { font-size: 11px; transform: translateY(11px) }
";

/// Adds these rules to the graph, and `titles` for narrow screens. An unexpected SVG is returned unchanged.
pub(super) fn added(svg: &str, titles: &str) -> String {
    svg.replacen("</style>", &format!("{RULES}@media (max-width: 40rem) {{\n{titles}{NARROW}}}\n</style>"), 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rules come last in the style, where they override others; names of frames come later.
    #[test]
    fn rules() {
        let svg = "<svg><style>.parent { opacity:0.5; }</style><text>&lt;/style></text></svg>";
        let themed = added(svg, "  #title { font-size: 9px }\n");
        let (style, rest) = themed.split_once("</style>").unwrap();
        assert!(style.contains(RULES) && style.ends_with("}\n}\n") && style.contains(NARROW));
        assert!(
            style.contains("{\n  #title { font-size: 9px }\n") && rest == "<text>&lt;/style></text></svg>",
            "{themed}"
        );
        assert_eq!(added("<svg/>", ""), "<svg/>");
    }
}
