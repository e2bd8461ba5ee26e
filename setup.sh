#!/bin/sh
# Set up this machine: packages and .venv. What is there already is left alone.
# usage: ./setup.sh quickstart|test|dev|venv|torch22|composer|composer-image|xla|doctor
#
# quickstart  what building, packing and running an image takes
# test        that, and what the tests take: docker, a registry, Slurm, linters, torch
# dev         only the .venv of that: what editing takes, and the tests that start no engine
# venv        only the .venv of quickstart
# torch22     what quickstart takes, and .venv22: the oldest torch that training/ runs on
# composer    what quickstart takes, and .venvcomposer: MosaicML's Composer and the torch it takes
# composer-image  the same in .venvcomposer-image, with the versions that composer-mamba has
# xla         what composer makes, and .venvxla: torch-xla beside that torch (Composer changes where
#             it finds it)
# doctor      nothing: it tells what is missing, and needs only a Python
#
# Packages are installed by apt-get, as root or by sudo, which is used for nothing else. Without
# apt-get, what is missing is named. Python packages come from where pip is configured to get them,
# by uv where it can. It can be interrupted anywhere: the next call goes on.
set -eu
cd "$(dirname "$0")"

fail() { # what, how to fix
    printf 'error: %s\n  fix:   %s\n' "$1" "$2" >&2
    exit 3
}

case "${1:-}" in
quickstart | test | dev | venv | torch22 | composer | composer-image | xla | doctor) goal=$1 ;;
*)
    echo "usage: ./setup.sh quickstart|test|dev|venv|torch22|composer|composer-image|xla|doctor" >&2
    exit 2
    ;;
esac

stamp() { # what an environment is made for
    printf '%s\n' "$version"
    for file in pyproject.toml constraints/*.txt; do
        if [ -e "$file" ]; then cksum "$file"; fi
    done
}

log=
trap '[ -z "$log" ] || rm -f "$log"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

export PIP_USER=0 # whatever pip is configured with: an environment takes no --user install

# Programs of administrators, which are not on every user's PATH.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
# shellcheck source=/dev/null
distribution=$(. /etc/os-release 2>/dev/null && echo "${ID:-}") || distribution=
if [ "$(id -u)" = 0 ]; then
    as_root="" may_install=1
elif command -v sudo >/dev/null; then
    as_root="sudo " may_install=1
else
    as_root="sudo " may_install=
fi
if command -v apt-get >/dev/null; then manager="apt-get"; else manager="dnf"; fi

python=
for name in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
        python=$(command -v "$name")
        break
    fi
done
if [ -z "$python" ]; then
    found=$(python3 -c 'import sys; print(sys.executable, "is", sys.version.split()[0])' 2>/dev/null) ||
        found="python3 is not installed"
    if [ "$manager" = dnf ]; then
        fail "Python 3.10 or later is needed; $found" "${as_root}dnf install python3.11"
    fi
    fail "Python 3.10 or later is needed; $found" \
        "${as_root}apt-get install python3 (Debian 12, Ubuntu 22.04 and later have one that fits)"
fi

if [ "$goal" = doctor ]; then
    if .venv/bin/python -c '' 2>/dev/null; then python=.venv/bin/python; fi
    exec "$python" -B -m sqshforge.doctor
fi

kind=$goal # of environment
case $goal in
test | dev) kind=test venv=.venv extra="[test]" ;;
quickstart | venv) kind=quickstart venv=.venv extra="" ;;
torch22) venv=.venv22 extra="[torch22]" ;;
composer | composer-image) venv=.venv$goal extra="[$goal]" ;;
xla) venv=.venvxla extra="[xla]" ;;
esac

# What is needed, with its package for apt-get and for dnf ("-": none), and what goes without it
# ("-": nothing does).
wanted() {
    echo "certificates ca-certificates ca-certificates -"
    echo "venv python3-venv python3-libs -"
    case $goal in dev | venv) return 0 ;; esac
    squashfuse=squashfuse overlay=fuse-overlayfs builder=buildah engine=buildah without_engine=-
    # Amazon Linux 2023 packages neither buildah nor these two (docs/start/machines.md).
    if [ "$distribution" = amzn ]; then squashfuse=- overlay=- engine=docker; fi
    case $(docker --version 2>/dev/null) in
    "Docker version "*) # and not podman by that name
        if has buildah; then
            :
        elif has docker-daemon; then
            without_engine="ENGINE=buildah"
        elif [ "$engine" = docker ]; then # its package is here already
            builder=docker-daemon engine=-
        fi
        ;;
    esac
    echo "$builder buildah $engine $without_engine"
    echo "netavark netavark netavark -"
    echo "mksquashfs squashfs-tools squashfs-tools -"
    echo "mmdebstrap mmdebstrap - making the base image where no registry answers"
    echo "newuidmap uidmap shadow-utils building with buildah as an ordinary user"
    echo "squashfuse squashfuse $squashfuse running a squash file as an ordinary user"
    echo "fuse-overlayfs fuse-overlayfs $overlay running one on Linux before 6.6"
    [ "$goal" = test ] || return 0
    echo "docker-registry docker-registry - -"
    echo "dockerd docker.io - -"
    echo "ip iproute2 iproute -"
    echo "setcap libcap2-bin libcap -"
    echo "munged munge munge -"
    echo "ssh-keygen openssh-client openssh -"
    echo "patch patch patch -"
    # What the benchmarks of cold starts run.
    echo "nbdkit nbdkit nbdkit -"
    echo "nbdfuse libnbd-bin nbdfuse -"
    echo "rsync rsync rsync -"
    echo "zstd zstd zstd -"
    echo "skopeo skopeo skopeo -"
    echo "slurmctld slurm-wlm slurm-slurmctld -"
    echo "slurmd slurm-wlm slurm-slurmd -"
}

has() { # what `wanted` names
    case $1 in
    certificates)
        [ -e /etc/ssl/certs/ca-certificates.crt ] || [ -e /etc/pki/tls/certs/ca-bundle.crt ]
        ;;
    netavark) # from 1.35 on buildah starts nothing without it; Debian's package only recommends it
        case $(buildah --version 2>/dev/null) in
        "" | *" version 1."[0-9].* | *" version 1."[12][0-9].* | *" version 1.3"[0-4].*) return 0 ;;
        esac
        for folder in /usr/local/libexec /usr/local/lib /usr/libexec /usr/lib; do
            if [ -x "$folder/podman/netavark" ]; then return 0; fi
        done
        return 1
        ;;
    docker-daemon) docker version >/dev/null 2>&1 ;;
    venv) .venv/bin/python -c '' 2>/dev/null || "$python" -c 'import ensurepip, venv' 2>/dev/null ;;
    *) command -v "$1" >/dev/null ;;
    esac
}

start_docker() { # how to have docker's daemon answer
    case $(docker version 2>&1) in
    *"permission denied"*) echo "sudo usermod -aG docker $(id -un), then log in again" ;;
    *) echo "${as_root}systemctl enable --now docker" ;;
    esac
}

# Look at what is missing: the names that nothing goes without, the packages that bring all of it,
# and a line for each thing that goes without the rest.
survey() {
    required='' packages='' notes=''
    while read -r name apt dnf feature; do
        if has "$name"; then continue; fi
        if [ "$manager" = dnf ]; then package=$dnf; else package=$apt; fi
        case " $packages " in
        *" $package "*) ;;
        *) [ "$package" = - ] || packages="$packages${packages:+ }$package" ;;
        esac
        [ "$name" != docker-daemon ] || name="docker's daemon"
        if [ "$feature" = - ]; then
            required="$required${required:+, }$name"
        else
            notes="$notes
note: $name is missing, which is needed for $feature"
        fi
    done <<END
$(wanted)
END
    case " $packages :$distribution" in
    *" squashfuse "*:rocky | *" squashfuse "*:almalinux | *" squashfuse "*:centos | *" squashfuse "*:rhel)
        packages="epel-release && ${as_root}dnf install $packages" # where squashfuse is
        ;;
    esac
}

privileged() { if [ -n "$as_root" ]; then sudo "$@"; else "$@"; fi >"$log" 2>&1; }

apt() { privileged env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=600 "$@"; }

# Install packages; those that no index has are left to the next survey.
install() {
    : "${log:=$(mktemp)}"
    if [ -n "$(ls -A /var/lib/dpkg/updates 2>/dev/null)" ]; then # it was interrupted
        privileged dpkg --configure -a || return 1
    fi
    tries=120 # apt-get waits for the lock of dpkg by itself, and not for that of its lists
    until apt update; do
        tries=$((tries - 1))
        if [ "$tries" = 0 ] || ! grep -q lists/lock "$log"; then break; fi
        [ "$tries" != 119 ] || echo "waiting for another apt-get"
        sleep 5
    done
    known=
    for package in $1; do
        if apt-cache show "$package" >/dev/null 2>&1; then known="$known $package"; fi
    done
    [ -n "$known" ] || return 1
    echo "installing:$known"
    # Word splitting is what makes one argument of each name.
    # shellcheck disable=SC2086
    apt install -y --no-install-recommends $known
}

own_python() { # the version of the environment's Python; nothing where it is not this checkout's
    # What a copied or moved checkout brings starts the programs of its old place, and imports them.
    if [ -e "$venv/bin/pip" ] && ! grep -qF "$(pwd -P)/$venv/bin/" "$venv/bin/pip"; then return; fi
    "$venv/bin/python" -c 'import sys; print(sys.version)' 2>/dev/null || :
}

# Whose environment it is: that of another user works, as long as it need not be changed.
version=$(own_python)
made=
for mark in "$venv/made-for-test" "$venv/made-for-$kind"; do
    if [ -n "$version" ] && [ "$(cat "$mark" 2>/dev/null)" = "$(stamp)" ]; then made=1; fi
done

survey
if [ -n "$made" ] && [ -z "$required" ]; then exit 0; fi
if [ -n "$packages" ] && [ "$manager" = apt-get ] && [ -n "$may_install" ]; then
    before=$packages
    if install "$packages"; then
        survey # what was installed may need more
        if [ -n "$packages" ] && [ "$packages" != "$before" ]; then install "$packages" || :; fi
    fi
    survey
    if [ -n "$required" ]; then
        [ -z "$log" ] || tail -n 12 "$log" >&2
        fail "apt-get could not install them: $required" \
            "see above; then run this again, after
         ${as_root}apt-get install $packages"
    fi
fi
if [ -n "$required" ]; then
    if [ "$manager" = apt-get ]; then
        fail "packages are missing and this is neither root nor a user with sudo ($required)" \
            "as root: apt-get install $packages"
    fi
    if [ "$goal" = test ]; then
        fail "the tests need what is not here: $required" \
            "run them on Debian 12 or later, or Ubuntu 22.04 or later"
    fi
    fix="${packages:+${as_root}dnf install $packages}"
    case $required in
    *"docker's daemon"*) fix="$fix${fix:+ && }$(start_docker)" ;;
    esac
    fail "this machine has no apt-get, and is without: $required" \
        "$fix  (see docs/start/machines.md)"
fi

[ -z "$made" ] || exit 0
user=$(id -un 2>/dev/null) || user=$(id -u)
case $([ -w . ] || stat -c '%u %A' .) in
"$(id -u) drw"*) # only a file system keeps an owner out who has the right to write
    fail "$PWD is on a read-only file system" \
        "cp -R '$PWD' ~/sqshforge && cd ~/sqshforge && ./setup.sh $goal"
    ;;
esac
[ -w . ] || fail "$PWD belongs to $(stat -c %U .), and $user cannot write there" \
    "use a checkout of your own, or: sudo chown -R $user '$PWD'"
closed=$(find "$venv" ./*.egg-info -type d ! -writable -print -quit 2>/dev/null) || :
[ -z "$closed" ] || fail "$PWD/$closed belongs to $(stat -c %U "$closed"), not to $user" \
    "sudo chown -R $user '$PWD'"

# Only one at a time; what a killed one has left running (pip, say) holds the lock on. Over NFS only
# a file that is open for writing can be locked, and a script that is cannot be started.
if [ -z "${SQSHFORGE_SETUP:-}" ] && command -v flock >/dev/null; then
    export SQSHFORGE_SETUP=locked
    if (exec 9<>pyproject.toml) 2>/dev/null; then exec 9<>pyproject.toml; else exec 9<pyproject.toml; fi
    refused=0
    flock --nonblock 9 2>/dev/null || refused=$?
    case $refused in
    0) ;;
    1) # another one holds it
        echo "waiting for another set-up of this checkout"
        flock 9
        exec ./setup.sh "$goal" # it may be done
        ;;
    *)
        echo "note: this file system has no locks: set up this checkout from one place at a time" >&2
        ;;
    esac
fi

[ -z "$notes" ] || echo "${notes#?}" >&2
case $goal in
quickstart | venv) ;;
dev) ./setup.sh venv ;; # uv is in .venv
xla) ./setup.sh composer ;;
*) ./setup.sh quickstart ;; # uv is in .venv
esac
version=$(own_python)
echo "making $venv${extra:+ for $kind}"
# An environment without any mark was left half made; one that is only old is brought up to date.
whole=
for mark in "$venv"/made-for-*; do
    if [ -n "$version" ] && [ "$(head -n 1 "$mark" 2>/dev/null)" = "$version" ]; then whole=1; fi
done
if [ -z "$whole" ]; then
    if [ -L "$venv" ]; then rm "$venv"; fi # venv would empty another checkout's, then refuse a link
    rm -f "$venv"/made-for-*
    "$python" -m venv --clear "$venv"
fi
rm -f "$venv"/made-for-*
if [ "$goal" = xla ]; then
    site='import sysconfig; print(sysconfig.get_path("purelib"))'
    .venvcomposer/bin/python -c "$site" >"$("$venv/bin/python" -c "$site")/composer.pth"
fi
: "${log:=$(mktemp)}"
by_uv() { # what uv cannot get, pip may; and only pip sees what composer.pth brings
    [ "$goal" != xla ] || return
    [ "$kind" != quickstart ] ||
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --retries 0 "$@" uv ||
        return
    .venv/bin/python -m sqshforge.venv install "$venv" ".$extra" "$@"
}
by_pip() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@" --editable ".$extra"
}
set -- # the versions that are tested, which not every package index has
[ ! -e "constraints/$kind.txt" ] || set -- --constraint "constraints/$kind.txt"
if ! by_uv "$@" >"$log" 2>&1 && ! by_pip "$@" >"$log" 2>&1; then
    if [ $# = 0 ] || ! by_pip >>"$log" 2>&1; then
        tail -n 12 "$log" >&2
        fail "pip could not install the Python packages" "see above; then run this again"
    fi
    echo "note: the package index lacks versions of constraints/$kind.txt; others were installed" >&2
fi
version=$("$venv/bin/python" -c 'import sys; print(sys.version)')
stamp >"$venv/.made" && mv "$venv/.made" "$venv/made-for-$kind"
