#!/usr/bin/env bash
# Puts Rust on a fresh Debian machine; everything else is the business of `cargo xtask setup`. `vagrant up` runs it as a
# user with sudo, `cargo xtask provision` as root in a root that holds nothing else.
set -euo pipefail
cd "${1:?usage: provision.sh CHECKOUT}"

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

apt_install() {
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@"
}

if ! cargo --version >/dev/null 2>&1; then
    as_root apt-get update -q
    # What cargo itself uses: a linker, and whom to trust on the network.
    apt_install gcc libc6-dev ca-certificates
    if apt-cache policy rustup | grep -q 'Candidate: [0-9]'; then
        apt_install rustup
        rustup default 1.95
    else
        # Debian 12: the current Rust of its security updates.
        apt_install cargo-web rustc-web rustfmt-web rust-web-clippy
    fi
fi

cargo xtask setup --for test --for lab
