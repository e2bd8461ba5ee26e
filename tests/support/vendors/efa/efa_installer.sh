#!/bin/bash
# In the place of EFA's installer @VERSION@: the options, the packages of Debian's and what it leaves
# behind are those of the real one, as far as an image looks at them.
set -eu
version=@VERSION@

fail() {
    echo "efa_installer.sh: $*" >&2
    exit 1
}

yes='' verify=1 modules=1 limits=1
words=$(getopt -o :dnuylkmg \
    --long debug-packages,no-verify,uninstall,yes,skip-limit-conf,skip-kmod,minimal,enable-gdr \
    -- "$@")
eval "set -- $words"
while [ "$1" != -- ]; do
    case "$1" in
        -y | --yes) yes=1 ;;
        -n | --no-verify) verify='' ;;
        -l | --skip-limit-conf) limits='' ;;
        -k | --skip-kmod) modules='' ;;
        -g | --enable-gdr) ;;
        *) fail "an image has no use for $1" ;;
    esac
    shift
done
[ -n "$yes" ] || fail "nobody is there to answer"
[ -z "$modules" ] || fail "unable to detect installed kernels"
[ -z "$verify$limits" ] || fail "an image has no card and no limits"
[ -f common.sh ] || fail "Please cd into the installer directory."

# What it asks for by itself, and what its packages need. All of it is named by the recipe: a build
# without a network has no more.
before=$(dpkg-query --show --showformat='${Package}\n')
apt-cache show tcl >/dev/null || fail "apt has no lists"
apt-get install -y pciutils environment-modules tcl \
    libnl-3-200 libnl-3-dev libnl-route-3-200 libnl-route-3-dev
apt-get install -y --allow-downgrades ./DEBS/rdma-core/*.deb
new=$(dpkg-query --show --showformat='${Package}\n' | grep -vxF "$before" | paste -sd' ')
[ "$new" = "$(cat DEBS/names)" ] || fail "more than it brings was installed: $new"

library() { # FILE [LIBRARY ...]: compiled from standard input
    cc -shared -fPIC -Wl,-soname,"${1##*/}" -o "$1" -x c - -x none "${@:2}"
}

efa=/opt/amazon/efa
mkdir -p $efa/{bin,include/rdma,lib} /opt/amazon/openmpi/{bin,lib}
printf '%s\n' '#define FI_MAJOR_VERSION 1' '#define FI_MINOR_VERSION 20' 'int fi_getinfo(void);' \
    >$efa/include/rdma/fabric.h
# libfabric needs a library of rdma-core's, which lies in the system's own folder.
verbs=/usr/lib/$(uname -m)-linux-gnu/libibverbs.so.1
echo 'int ibv_open_device(void) { return 0; }' | library "$verbs"
echo 'int ibv_open_device(void); int fi_getinfo(void) { return ibv_open_device(); }' |
    library $efa/lib/libfabric.so.1 "$verbs"
ln -s libfabric.so.1 $efa/lib/libfabric.so
echo $efa/lib >/etc/ld.so.conf.d/000_efa.conf
printf '%s\n' "# EFA installer version: $version" "# Debug packages installed: no" \
    "# Packages installed:" >/opt/amazon/efa_installed_packages
if [ "$version" = 1.48.0 ]; then # which brings NCCL's plugin along
    plugin=/opt/amazon/ofi-nccl/lib
    mkdir -p $plugin
    echo 'const char version[] = "NET/OFI Initializing aws-ofi-nccl 1.19.0";' |
        library $plugin/libnccl-net.so
    echo $plugin >/etc/ld.so.conf.d/100_ofinccl.conf
fi
