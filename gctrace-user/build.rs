//! Passes a hash of the sources that analyses depend on to the crate: a cached analysis is used only by the same code
//! that made it.

use std::path::Path;

#[path = "src/cache/sources.rs"]
mod sources;

fn main() {
    let root = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_default();
    let root = Path::new(&root);
    for path in sources::PATHS {
        println!("cargo:rerun-if-changed={}", root.join(path).display());
    }
    println!("cargo:rustc-env=GCTRACE_SOURCES={}", sources::hash(root).expect("the crate's sources"));
}
