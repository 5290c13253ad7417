//! The development commands. The benchmarks use this library, too.

mod btf;
mod deb;
pub mod demo;
mod dist;
mod ebpf;
mod elf;
mod lab;
mod programs;
mod provision;
mod recordings;
pub mod setup;
mod test;
mod toolchain;
pub mod util;
mod vm;

use std::{ffi::OsString, process::ExitCode};

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Development commands of gctrace.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Install what the other commands need (through apt, only what is missing).
    Setup(setup::Args),
    /// Rebuild the committed BPF objects, or check that they belong to the sources.
    Ebpf(ebpf::Args),
    /// Write the committed structure layouts from Rubies with debug information.
    #[command(disable_help_flag = true)]
    Layouts(Forwarded),
    /// Trace a bundled Ruby workload for ten seconds and show what comes out.
    Demo,
    /// Make roots with Debian's Rubies 2.7, 3.1, 3.3 and 3.4 to test on.
    Lab(lab::Args),
    /// Build everything and run all tests; those on real Rubies as root.
    Test(test::Args),
    /// Write what each output is to make of the committed recordings; with --again the recordings first.
    Recordings(recordings::Args),
    /// Make a Debian package of the release build (needs cargo-deb).
    Deb(deb::Args),
    /// Make one static executable for hosts without cargo, and a container image of it.
    Dist(dist::Args),
    /// Run live tests on other kernels, each in an emulated machine.
    Vm(vm::Args),
    /// Run what `vagrant up` runs in a bare root of Debian, and there a test.
    Provision(provision::Args),
    /// Measure what gctrace costs: paired runs of Ruby scripts with and without it.
    #[command(disable_help_flag = true)]
    Bench(Forwarded),
}

/// Arguments of a command that is a separate program, built on demand.
#[derive(clap::Args)]
struct Forwarded {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<OsString>,
}

/// Runs the command that the arguments of this process name.
pub fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Setup(args) => setup::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Ebpf(args) => ebpf::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Layouts(args) => {
            run_program(&["run", "--package", "gctrace-cruby", "--example", "layouts", "--"], &args.args)
        }
        Command::Demo => demo::run_demo().map(|()| ExitCode::SUCCESS),
        Command::Lab(args) => lab::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Test(args) => test::run_tests(&args),
        Command::Recordings(args) => recordings::run_recordings(&args).map(|()| ExitCode::SUCCESS),
        Command::Deb(args) => deb::run_deb(&args).map(|()| ExitCode::SUCCESS),
        Command::Dist(args) => dist::run_dist(&args).map(|()| ExitCode::SUCCESS),
        Command::Vm(args) => vm::run_matrix(&args),
        Command::Provision(args) => provision::run_provision(&args).map(|()| ExitCode::SUCCESS),
        Command::Bench(args) => run_program(&["run", "--package", "gctrace-bench", "--"], &args.args),
    };
    result.unwrap_or_else(|error| {
        eprintln!("xtask: error: {error:#}");
        ExitCode::FAILURE
    })
}

/// Builds and runs another program of the workspace.
fn run_program(cargo_args: &[&str], args: &[OsString]) -> Result<ExitCode> {
    let passed = util::status(util::cargo().args(cargo_args).args(args))?.success();
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
