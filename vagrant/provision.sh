#!/usr/bin/env bash
# Puts Rust on a fresh machine; everything else is the business of `cargo xtask setup`.
set -euo pipefail
cd "${1:?usage: provision.sh CHECKOUT}"

apt_install() {
    sudo DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@"
}

if ! cargo --version >/dev/null 2>&1; then
    sudo apt-get update -q
    apt_install gcc libc6-dev
    if apt_install rustup; then
        rustup default 1.95
    else
        # Debian 12: the current Rust of its security updates.
        apt_install cargo-web rustc-web rustfmt-web rust-web-clippy
    fi
fi

cargo xtask setup --for test --for lab
