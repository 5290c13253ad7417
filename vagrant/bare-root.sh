#!/bin/sh
# Runs provision.sh, and then a test, in a Debian root. `cargo xtask provision` makes the root and calls this as root in a
# mount namespace of its own, so that what is mounted here goes away with it.
# Arguments: the root, the checkout in it, part of the name of the tests to run.
set -eu
root=$1 checkout=$2 tests=$3

# A live test needs this machine's kernel: its processes, tracefs and cgroups. The lock that keeps live tests apart is in /tmp.
for dir in proc sys dev tmp; do
    mount --rbind "/$dir" "$root/$dir"
done
cp /etc/resolv.conf /etc/hosts "$root/etc/"
# Packages must not start servers: the root shares this machine's network.
printf '#!/bin/sh\nexit 101\n' >"$root/usr/sbin/policy-rc.d"
chmod 755 "$root/usr/sbin/policy-rc.d"
# Crates that were fetched before need not be fetched again.
registry=${CARGO_HOME:-$HOME/.cargo}/registry
if [ -d "$registry" ]; then
    mkdir -p "$root/root/.cargo/registry"
    mount --bind "$registry" "$root/root/.cargo/registry"
fi

# Nothing of the caller's environment comes along. One Ruby is enough: the roots of the lab are made elsewhere.
exec chroot "$root" /usr/bin/env -i HOME=/root LANG=C.UTF-8 GCTRACE_RUBIES=/usr/bin/ruby \
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    /bin/bash -euc '
        "$1/vagrant/provision.sh" "$1"
        cd "$1"
        cargo --version
        cargo xtask test --filter "$2"
    ' bash "$checkout" "$tests"
