//! `cargo xtask provision`: checks that a fresh Debian machine can be turned into one on which the tests run.
//!
//! `vagrant up` runs `vagrant/provision.sh` on a machine; here it is run in a root of Debian that contains only its
//! essential packages and apt. Then a live test, built there by its own compiler, must pass. This machine's
//! toolchain is not visible inside; its kernel is.

use std::{
    fs,
    process::{Command, Stdio},
    time::Instant,
};

use anyhow::{Context as _, Result, ensure};

use crate::{
    lab,
    setup::{self, Purpose},
    util::{as_root, cache_dirs, line, progress, root, run, run_quiet, short, status},
};

/// Arguments of `provision`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Run the tests whose name contains this.
    #[arg(long, value_name = "NAME", default_value = "pressure_equals_the_witness")]
    filter: String,
    /// Keep the root (about 8 GB), to inspect it.
    #[arg(long)]
    keep: bool,
}

/// The release of the box in `vagrant/Vagrantfile`.
const SUITE: &str = "bookworm";
/// The path of the checkout inside the root.
const CHECKOUT: &str = "/srv/gctrace";

/// Runs the command.
pub(crate) fn run_provision(args: &Args) -> Result<()> {
    setup::ensure(&[Purpose::Lab, Purpose::Vm])?;
    let started = Instant::now();
    let dir = cache_dirs("provision")?.into_iter().next().context("no folder for the root")?;
    fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let bare = dir.join(SUITE);
    let why = "make a Debian root";
    let remove = || run_quiet(as_root("rm", why)?.args(["-rf", "--one-file-system", "--"]).arg(&bare));
    remove()?;

    progress(format!("provision: making a root of {SUITE} (about 30 s)"));
    // The script installs a compiler that was released with security updates.
    let sources = lab::updated_sources(SUITE)?;
    run_quiet(lab::mmdebstrap("minbase", lab::AMD64)?.arg(SUITE).arg(&bare).args(sources))?;

    let checkout = bare.join(CHECKOUT.trim_start_matches('/'));
    run_quiet(as_root("mkdir", why)?.arg("-p").arg(&checkout))?;
    let mut list = Command::new("git");
    list.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]).current_dir(root());
    let mut listing =
        list.stdout(Stdio::piped()).spawn().with_context(|| format!("cannot run `{}`", line(&list)))?;
    let mut copy = as_root("cpio", why)?;
    copy.args(["--null", "--pass-through", "--make-directories", "--quiet"]).arg(&checkout);
    copy.current_dir(root()).stdin(listing.stdout.take().context("no output of git")?);
    let copied = status(&mut copy)?;
    ensure!(listing.wait()?.success() && copied.success(), "the checkout could not be copied");

    progress(format!("provision: running vagrant/provision.sh and tests in {} (10 to 30 min)", short(&bare)));
    let mut inside = as_root("unshare", why)?;
    inside.args(["--mount", "--propagation=private"]).arg(root().join("vagrant/bare-root.sh"));
    run(inside.arg(&bare).args([CHECKOUT, &args.filter]))?;
    progress(format!("provision: passed after {} s", started.elapsed().as_secs()));
    if args.keep { Ok(()) } else { remove() }
}
