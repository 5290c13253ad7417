//! The differences between the guests' architectures.

use std::path::Path;
use std::process::Command;

/// A processor.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum Arch {
    /// The one that the tests are developed on.
    #[value(name = "x86_64")]
    X86_64,
    /// 64-bit ARM: everything is compiled for it here, and always emulated.
    Aarch64,
}

impl Arch {
    /// Debian's name for it.
    pub(crate) fn debian(self) -> &'static str {
        match self {
            Self::X86_64 => "amd64",
            Self::Aarch64 => "arm64",
        }
    }

    /// The subdirectory for files that are specific to it.
    pub(crate) fn folder(self) -> &'static str {
        match self {
            Self::X86_64 => "",
            Self::Aarch64 => "aarch64",
        }
    }

    /// Whether the BPF programs load on that kernel (docs/aarch64.md).
    pub(crate) fn loads_on(self, kernel: &str) -> bool {
        self == Self::X86_64 || kernel != "5.10"
    }

    /// The package with its kernel image.
    pub(crate) fn kernel_package(self) -> String {
        format!("linux-image-cloud-{}", self.debian())
    }

    /// The roots of the lab whose Rubies are tested by default.
    pub(crate) fn usual_rubies(self) -> &'static [&'static str] {
        match self {
            Self::X86_64 => &["bullseye", "experimental"],
            Self::Aarch64 => &["bookworm"],
        }
    }

    /// The serial lines for the kernel's messages and for results, by their names in the guest.
    pub(crate) fn terminals(self) -> (&'static str, &'static str) {
        match self {
            Self::X86_64 => ("ttyS0", "ttyS1"),
            // The board has only one serial line; the second one is an expansion card.
            Self::Aarch64 => ("ttyAMA0", "ttyS0"),
        }
    }

    /// The emulator, with CPU options and with serial lines that write to these files.
    pub(crate) fn emulator(self, kvm: bool, console: &Path, results: &Path) -> Command {
        let mut qemu;
        match self {
            Self::X86_64 => {
                qemu = Command::new("qemu-system-x86_64");
                if kvm {
                    qemu.args(["-accel", "kvm", "-cpu", "host"]);
                } else {
                    // QEMU 7.2 corrupts the flags after an emulated cmpxchg16b. With one thread per CPU it may also execute
                    // guest code that another CPU has replaced since ("accel/tcg: Always lock pages before
                    // translation", QEMU 8.1): Linux 7.2 died of an int3 that it had already removed from __schedule.
                    qemu.args(["-accel", "tcg,thread=single", "-cpu", "qemu64,-cx16"]);
                }
                qemu.arg("-serial").arg(format!("file:{}", console.display()));
                qemu.arg("-serial").arg(format!("file:{}", results.display()));
            }
            Self::Aarch64 => {
                qemu = Command::new("qemu-system-aarch64");
                qemu.args(["-machine", "virt", "-accel", "tcg", "-cpu", "cortex-a57"]);
                qemu.arg("-serial").arg(format!("file:{}", console.display()));
                qemu.arg("-chardev").arg(format!("file,id=results,path={}", results.display()));
                qemu.args(["-device", "pci-serial,chardev=results"]);
            }
        }
        qemu
    }
}
