//! Development commands of gctrace: `cargo xtask <command>`.
//!
//! Each command installs what it lacks, says on stderr what it does, and leaves its results under the build directory.

mod bench;
mod deb;
mod demo;
mod ebpf;
mod elf;
mod lab;
mod layouts;
mod provision;
mod setup;
mod test;
mod toolchain;
mod util;
mod vm;

use std::process::ExitCode;

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
    Layouts(layouts::Args),
    /// Trace a bundled Ruby workload for ten seconds and show what comes out.
    Demo,
    /// Make roots with Debian's Rubies 2.7, 3.1, 3.3 and 3.4 to test on.
    Lab(lab::Args),
    /// Build everything and run all tests; those on real Rubies as root.
    Test(test::Args),
    /// Make a Debian package of the release build (needs cargo-deb).
    Deb(deb::Args),
    /// Run live tests on other kernels, each in an emulated machine.
    Vm(vm::Args),
    /// Run what `vagrant up` runs in a bare root of Debian, and there a test.
    Provision(provision::Args),
    /// Measure what gctrace costs: paired runs of Ruby scripts with and without it.
    Bench(bench::Args),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Setup(args) => setup::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Ebpf(args) => ebpf::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Layouts(args) => layouts::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Demo => demo::run_demo().map(|()| ExitCode::SUCCESS),
        Command::Lab(args) => lab::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Test(args) => test::run_tests(&args),
        Command::Deb(args) => deb::run_deb(&args).map(|()| ExitCode::SUCCESS),
        Command::Vm(args) => vm::run_matrix(&args),
        Command::Provision(args) => provision::run_provision(&args).map(|()| ExitCode::SUCCESS),
        Command::Bench(args) => bench::run(&args).map(|()| ExitCode::SUCCESS),
    };
    result.unwrap_or_else(|error| {
        eprintln!("xtask: error: {error:#}");
        ExitCode::FAILURE
    })
}
