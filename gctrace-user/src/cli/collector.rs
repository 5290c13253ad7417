//! `gctrace collector` and `gctrace apps`: converts flags to options of the server, and works on its store.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use gctrace_collector::{
    admin,
    server::{self, CollectorError, Options},
    store::{self, App, Quota, Rights, StoreError},
};

use super::parse;
use crate::console::say;

/// Flags of `gctrace collector`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
        gctrace collector --store sqlite:sets.db\n  \
        gctrace collector --listen 0.0.0.0:9292 --store sqlite:/var/lib/gctrace/sets.db \\\n    \
        --tls-cert chain.pem --tls-key key.pem\n  \
        gctrace apps --store sqlite:sets.db add shop               a token for an application\n  \
        curl http://127.0.0.1:9292/apps/TOKEN                      what to set\n\n\
        Exit status: 0 ended by SIGINT or SIGTERM, 2 error.")]
pub struct CollectorArgs {
    /// Address and port to listen on
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:9292", value_parser = super::parse::listen)]
    pub listen: SocketAddr,

    /// Where sets are kept: sqlite:PATH, a file, created if missing; or `postgres://USER@HOST/DATABASE`, for several
    /// collectors at a time (password: PGPASSWORD; TLS: add ?sslmode=require)
    #[arg(long, value_name = "STORE", env = "GCTRACE_STORE", hide_env_values = true)]
    pub store: String,

    /// Certificate chain, PEM, the server's own first; with it the collector speaks TLS only
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,

    /// Key of the certificate, PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,

    /// What addresses in answers begin with, e.g. `https://gc.example.com` [default: the address that was asked]
    #[arg(long, value_name = "URL", value_parser = server::public_url)]
    pub public_url: Option<String>,

    /// Let anyone register applications (POST /accounts) [default: only requests from this machine]
    #[arg(long, conflicts_with = "no_registration")]
    pub registration: bool,

    /// Refuse to register applications over HTTP; only `gctrace apps add` does it
    #[arg(long)]
    pub no_registration: bool,

    /// Delete sets that are older: a time such as 30d, or `forever`
    #[arg(long, value_name = "TIME", default_value = "30d", value_parser = keep)]
    pub keep: Keep,

    /// Limit of stored MiB per application; above it the oldest sets are deleted (0: no limit)
    #[arg(long, value_name = "MIB", default_value_t = 1024)]
    pub app_mib: u64,

    /// Limit of stored sets per application; above it the oldest sets are deleted (0: no limit)
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    pub app_sets: u64,

    /// Concurrent connections per client address (IPv6: per /64); 0: no limit [default: 256; loopback: no limit]
    #[arg(long, value_name = "N")]
    pub per_address: Option<u32>,

    /// Ask agents of the TuneMyGC gem below this version to be updated
    #[arg(long, value_name = "VERSION", default_value = "1.0.15", value_parser = server::agent_version)]
    pub min_agent: String,
}

/// How long sets are kept; `None`: forever.
#[derive(Clone, Copy, Debug)]
pub struct Keep(Option<Duration>);

/// Minimum of `--keep`: recommendations need sets of more than a few minutes.
const SHORTEST: Duration = Duration::from_hours(1);

fn keep(text: &str) -> Result<Keep, String> {
    if text == "forever" {
        return Ok(Keep(None));
    }
    let time = age(text)?;
    if time < SHORTEST {
        return Err("nearly all sets would be deleted; give at least 1h, such as 30d, or forever".to_owned());
    }
    Ok(Keep(Some(time)))
}

/// A time after which something is deleted or expires. Elsewhere a bare number means seconds; here it more likely means days, so it is refused.
fn age(text: &str) -> Result<Duration, String> {
    let number = text.trim();
    if !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.') {
        return Err(format!(
            "has no unit; give {number}d for days, {number}h for hours, or {number}s for seconds"
        ));
    }
    parse::duration(text)
}

/// Flags of `gctrace apps`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
        gctrace apps --store sqlite:sets.db add shop               prints the new application's token\n  \
        gctrace apps --store sqlite:sets.db list\n  \
        gctrace apps --store sqlite:sets.db prune 3 --older-than 7d\n  \
        gctrace apps --store sqlite:sets.db delete 3\n  \
        gctrace apps --store sqlite:sets.db add jobs --part-of 3   the jobs of application 3, with a token of their own\n  \
        gctrace apps --store sqlite:sets.db token 3 --may write    for agents: sends sets, reads nothing\n  \
        gctrace apps --store sqlite:sets.db rotate 1f0c5b7a9e42    a new token for an old one (ids: `tokens`)\n\n\
        gctrace apps can be used while the collector runs.\n\
        Exit status: 0 done, 1 no such application or token, 2 error.")]
pub struct AppsArgs {
    /// The collector's store: sqlite:PATH or `postgres://USER@HOST/DATABASE`
    #[arg(long, value_name = "STORE", env = "GCTRACE_STORE", hide_env_values = true)]
    pub store: String,

    /// What to do.
    #[command(subcommand)]
    pub action: AppsAction,
}

/// What `gctrace apps` does.
#[derive(Debug, clap::Subcommand)]
pub enum AppsAction {
    /// List applications: number, name, sets, size, age of the latest set
    List,
    /// Add an application and print its token
    Add {
        /// Its name
        name: String,
        /// Whom to ask about it
        #[arg(long, value_name = "ADDRESS", default_value = "", hide_default_value = true)]
        email: String,
        /// Number of the application that it is a part of (web, jobs): its sets and recommendations are its own, but tokens
        /// of the application read them, too
        #[arg(long, value_name = "APP")]
        part_of: Option<i64>,
        /// What the token is good for
        #[arg(long, value_enum, default_value_t = RightsArg::Both)]
        may: RightsArg,
    },
    /// List tokens: id, application, rights, age, expiry. The tokens themselves are not stored
    Tokens {
        /// Of this application only, by its number
        app: Option<i64>,
    },
    /// Add a token to an application and print it
    Token {
        /// Its number
        app: i64,
        /// What the token is good for
        #[arg(long, value_enum)]
        may: RightsArg,
    },
    /// Add an operator's token, which reads about all applications, and print it
    Operator,
    /// Replace a token: print a new one with the same rights; the old one stays valid for a while
    Rotate {
        /// Its id
        id: String,
        /// For how long the old one is valid
        #[arg(long, value_name = "TIME", value_parser = age, default_value = "7d")]
        old_valid: Duration,
    },
    /// End a token at once
    Revoke {
        /// Its id
        id: String,
    },
    /// Delete an application, its parts, their tokens and all of their sets
    Delete {
        /// Its number
        app: i64,
    },
    /// Delete old sets of an application
    Prune {
        /// Its number
        app: i64,
        /// Sets that came longer ago
        #[arg(long, value_name = "TIME", value_parser = age)]
        older_than: Duration,
    },
}

/// What an application's token is good for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum RightsArg {
    /// Sending sets and reading recommendations
    Both,
    /// Sending sets only
    Write,
    /// Reading recommendations and pages only
    Read,
}

impl From<RightsArg> for Rights {
    fn from(arg: RightsArg) -> Self {
        match arg {
            RightsArg::Both => Self::Both,
            RightsArg::Write => Self::Write,
            RightsArg::Read => Self::Read,
        }
    }
}

impl From<CollectorArgs> for Options {
    fn from(args: CollectorArgs) -> Self {
        let limit = |number: u64| if number == 0 { u64::MAX } else { number };
        Self {
            listen: args.listen,
            store: args.store,
            tls: args.tls_cert.zip(args.tls_key),
            public_url: args.public_url,
            registration: (args.registration || args.no_registration).then_some(args.registration),
            keep: args.keep.0,
            quota: Quota { sets: limit(args.app_sets), bytes: limit(args.app_mib.saturating_mul(1 << 20)) },
            per_address: args.per_address,
            min_agent: args.min_agent,
        }
    }
}

/// Runs a collector until SIGINT or SIGTERM.
pub fn collector(args: CollectorArgs) -> Result<(), CollectorError> {
    server::run(args.into(), say)
}

/// Runs an action on a store. Returns the text to print, or `None` if the application or token does not exist.
pub fn apps(args: &AppsArgs) -> Result<Option<String>, StoreError> {
    let store = match args.action {
        AppsAction::Add { .. } | AppsAction::Operator => store::open(&args.store)?,
        _ => store::open_existing(&args.store)?,
    };
    let store = store.as_ref();
    match &args.action {
        AppsAction::List => admin::list(store).map(Some),
        AppsAction::Add { name, email, part_of, may } => {
            admin::add(store, name, email, part_of.map(App), (*may).into())
        }
        AppsAction::Tokens { app } => admin::tokens(store, app.map(App)),
        AppsAction::Token { app, may } => admin::add_token(store, Some(App(*app)), (*may).into()),
        AppsAction::Operator => admin::add_token(store, None, Rights::Operator),
        AppsAction::Rotate { id, old_valid } => admin::rotate(store, id, *old_valid),
        AppsAction::Revoke { id } => admin::revoke(store, id),
        AppsAction::Delete { app } => admin::delete(store, App(*app)),
        AppsAction::Prune { app, older_than } => admin::prune(store, App(*app), *older_than),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A value that would delete nearly everything by mistake is refused, and the error says what to write.
    #[test]
    fn ages() {
        for text in ["30", "1", "7", "0.5", " 30 "] {
            let days = format!("give {}d for days", text.trim());
            assert!(age(text).unwrap_err().contains(&days), "{text}");
            assert!(keep(text).unwrap_err().contains(&days), "{text}");
        }
        assert_eq!(age("1s"), Ok(Duration::from_secs(1)));
        assert!(age("").is_err() && age("d").is_err());
        for (text, hours) in [("1h", 1), ("60m", 1), ("30d", 720)] {
            assert_eq!(keep(text).unwrap().0, Some(Duration::from_hours(hours)), "{text}");
        }
        for text in ["59m", "30s", "1ms"] {
            assert!(keep(text).unwrap_err().contains("at least 1h"), "{text}");
        }
        assert!(keep("forever").unwrap().0.is_none());
    }
}
