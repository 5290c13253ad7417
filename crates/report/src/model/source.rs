//! Classifies the code of a Ruby file by its path.

use super::stack::{Frame, FrameKind};

/// Whose code a file contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source<'a> {
    /// The application's own: neither in a gem, nor in Ruby's library, nor in the VM.
    App,
    /// A gem's, `NAME-VERSION`.
    Gem(&'a str),
    /// Ruby's standard library, or code that a distribution installs next to it.
    Library,
    /// Ruby code built into the VM.
    Internal,
}

impl<'a> Source<'a> {
    /// Classifies the file with this path.
    pub fn of(path: &'a str) -> Self {
        if path.starts_with("<internal:") {
            return Self::Internal;
        }
        if let Some(gem) = gem(path) {
            return Self::Gem(gem);
        }
        let parts: Vec<&str> = path.split('/').collect();
        let library = parts.windows(2).any(|pair| {
            // /usr/lib/ruby/3.1.0/set.rb, /usr/lib/x86_64-linux-gnu/ruby/3.1.0/rbconfig.rb, /usr/lib/ruby/vendor_ruby/rack.rb
            let ruby =
                pair[0] == "ruby" && (matches!(pair[1], "vendor_ruby" | "site_ruby") || is_series(pair[1]));
            // /usr/lib/ruby/gems/3.1.0/specifications/default/racc-1.6.0.gemspec
            ruby || (pair[0] == "gems" && is_series(pair[1]))
        });
        if path.starts_with('/') && library { Self::Library } else { Self::App }
    }
}

/// Whether a part of a path is the folder of a release series, such as `3.1.0`.
fn is_series(part: &str) -> bool {
    part.split('.').count() == 3 && part.split('.').all(|number| number.parse::<u8>().is_ok())
}

/// The last `NAME-VERSION` that follows a gems folder: `/gems/rack-2.2.7/`, `/bundler/gems/rack-0ab1c2d3e4f5/`.
fn gem(path: &str) -> Option<&str> {
    path.rmatch_indices("/gems/").find_map(|(at, folder)| {
        let name = path[at + folder.len()..].split_once('/')?.0;
        let (_, version) = name.rsplit_once('-')?;
        let commit = path[..at].ends_with("/bundler") && version.bytes().all(|b| b.is_ascii_hexdigit());
        // A platform may follow the version: nokogiri-1.15.4-x86_64-linux.
        let released = name.split('-').skip(1).any(|part| part.starts_with(|c: char| c.is_ascii_digit()));
        (commit || released).then_some(name)
    })
}

/// The last two parts of a path: `models/user.rb`.
pub fn last_two(path: &str) -> &str {
    path.rmatch_indices('/').nth(1).map_or(path, |(at, _)| &path[at + 1..])
}

/// The innermost Ruby frame: the line that runs.
pub fn ruby_frame<F: AsRef<Frame>>(stack: &[F]) -> Option<&F> {
    stack.iter().find(|frame| frame.as_ref().kind == FrameKind::Ruby)
}

/// The innermost frame in the application's own code.
pub fn app_frame<F: AsRef<Frame>>(stack: &[F]) -> Option<&F> {
    stack.iter().find(|frame| {
        let frame = frame.as_ref();
        let app = |file: &str| Source::of(file) == Source::App;
        frame.kind == FrameKind::Ruby && frame.file.as_deref().is_some_and(app)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Paths as on Debian, and under version managers and Bundler.
    #[test]
    fn paths() {
        for (path, source) in [
            ("/srv/shop/app/models/order.rb", Source::App),
            ("app.rb", Source::App),
            ("-e", Source::App),
            ("(eval)", Source::App),
            ("/home/me/src/ruby/tools/gems/list.rb", Source::App),
            ("<internal:gc>", Source::Internal),
            ("/usr/lib/ruby/3.1.0/set.rb", Source::Library),
            ("/usr/lib/x86_64-linux-gnu/ruby/3.1.0/rbconfig.rb", Source::Library),
            ("/usr/lib/ruby/vendor_ruby/sinatra/base.rb", Source::Library),
            ("/usr/lib/ruby/gems/3.1.0/specifications/default/etc-1.3.0.gemspec", Source::Library),
            ("/home/me/.rbenv/versions/3.3.0/lib/ruby/3.3.0/json/common.rb", Source::Library),
            ("/var/lib/gems/3.1.0/gems/sinatra-3.0.5/lib/sinatra/base.rb", Source::Gem("sinatra-3.0.5")),
            (
                "/srv/shop/vendor/bundle/ruby/3.2.0/gems/nokogiri-1.15.4-x86_64-linux/lib/nokogiri.rb",
                Source::Gem("nokogiri-1.15.4-x86_64-linux"),
            ),
            (
                "/srv/shop/vendor/bundle/ruby/3.2.0/bundler/gems/rails-0ab1c2d3e4f5/lib/rails.rb",
                Source::Gem("rails-0ab1c2d3e4f5"),
            ),
            ("/usr/share/rubygems-integration/all/gems/rack-2.2.7/lib/rack.rb", Source::Gem("rack-2.2.7")),
        ] {
            assert_eq!(Source::of(path), source, "{path}");
        }
        assert_eq!(last_two("/srv/app/models/user.rb"), "models/user.rb");
        assert_eq!(last_two("/a.rb"), "/a.rb");
        assert_eq!(last_two("(eval)"), "(eval)");
    }
}
