#!/bin/sh
# Set up this machine: packages and .venv. What already exists is left alone.
# usage: ./setup.sh quickstart|test|dev|venv|torch22|composer|composer-image|xla|doctor
#
# quickstart  what building, packing and running an image needs
# test        quickstart, and what the tests need: docker, a registry, Slurm, linters, torch
# dev         only the .venv of test: enough for editing and for the tests that start no engine
# venv        only the .venv of quickstart
# torch22     quickstart, and .venv22: the oldest torch that training/ runs on
# composer    quickstart, and .venvcomposer: MosaicML's Composer and the torch that it needs
# composer-image  the same in .venvcomposer-image, with the versions of the composer-mamba image
# xla         composer, and .venvxla: torch-xla for that torch (apart, because Composer behaves
#             differently if it finds torch-xla)
# doctor      nothing: reports what is missing, and needs only Python
#
# apt-get installs the packages, as root or with sudo, which is used for nothing else. Without
# apt-get, the missing packages are reported. Python packages come from where pip is configured to
# get them, by uv if it can. An interrupted call is completed by the next one.
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

stamp() { # what an environment depends on: its Python, pyproject.toml, constraints
    printf '%s\n' "$version"
    for file in pyproject.toml constraints/*.txt; do
        if [ -e "$file" ]; then cksum "$file"; fi
    done
}

log=
trap '[ -z "$log" ] || rm -f "$log"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

export PIP_USER=0 # whatever pip's configuration says: an environment takes no --user install

# System programs in sbin are not on every user's PATH.
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

# Prints what is needed: its name, its packages for apt-get and for dnf ("-": none), and the feature
# that needs it ("-": all of them).
wanted() {
    echo "certificates ca-certificates ca-certificates -"
    echo "venv python3-venv python3-libs -"
    case $goal in dev | venv) return 0 ;; esac
    squashfuse=squashfuse overlay=fuse-overlayfs builder=buildah engine=buildah without_engine=-
    # Amazon Linux 2023 packages neither buildah nor these two (docs/start/machines.md).
    if [ "$distribution" = amzn ]; then squashfuse=- overlay=- engine=docker; fi
    case $(docker --version 2>/dev/null) in
    "Docker version "*) # and not podman under that name
        if has buildah; then
            :
        elif has docker-daemon; then
            without_engine="ENGINE=buildah"
        elif [ "$engine" = docker ]; then # its package is already installed
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
    # For the benchmarks of cold starts.
    echo "nbdkit nbdkit nbdkit -"
    echo "nbdfuse libnbd-bin nbdfuse -"
    echo "rsync rsync rsync -"
    echo "zstd zstd zstd -"
    echo "skopeo skopeo skopeo -"
    echo "slurmctld slurm-wlm slurm-slurmctld -"
    echo "slurmd slurm-wlm slurm-slurmd -"
}

has() { # a name that `wanted` prints
    case $1 in
    certificates)
        [ -e /etc/ssl/certs/ca-certificates.crt ] || [ -e /etc/pki/tls/certs/ca-bundle.crt ]
        ;;
    netavark) # buildah 1.35 and later need it to start anything; Debian only recommends it
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

start_docker() { # prints how to get an answer from docker's daemon
    case $(docker version 2>&1) in
    *"permission denied"*) echo "sudo usermod -aG docker $(id -un), then log in again" ;;
    *) echo "${as_root}systemctl enable --now docker" ;;
    esac
}

# Find what is missing: $required, the names that every feature needs; $packages, which install all
# that is missing; $notes, a line for each name that only one feature needs.
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
        packages="epel-release && ${as_root}dnf install $packages" # EPEL has squashfuse
        ;;
    esac
}

privileged() { if [ -n "$as_root" ]; then sudo "$@"; else "$@"; fi >"$log" 2>&1; }

apt() { privileged env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=600 "$@"; }

# Install packages; those that apt does not know are left for the next survey to report.
install() {
    : "${log:=$(mktemp)}"
    if [ -n "$(ls -A /var/lib/dpkg/updates 2>/dev/null)" ]; then # dpkg was interrupted
        privileged dpkg --configure -a || return 1
    fi
    tries=120 # apt-get itself waits for the lock of dpkg, but not for the lock of its lists
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
    # Word splitting makes each name an argument.
    # shellcheck disable=SC2086
    apt install -y --no-install-recommends $known
}

own_python() { # prints the version of the environment's Python, if it belongs to this checkout
    # In a copied or moved checkout, an environment runs and imports the programs of the old place.
    if [ -e "$venv/bin/pip" ] && ! grep -qF "$(pwd -P)/$venv/bin/" "$venv/bin/pip"; then return; fi
    "$venv/bin/python" -c 'import sys; print(sys.version)' 2>/dev/null || :
}

# Another user's environment works too, as long as it need not be changed.
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
        survey # the new packages may need others
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
"$(id -u) drw"*) # the owner has the right to write, so the file system is read-only
    fail "$PWD is on a read-only file system" \
        "cp -R '$PWD' ~/sqshforge && cd ~/sqshforge && ./setup.sh $goal"
    ;;
esac
[ -w . ] || fail "$PWD belongs to $(stat -c %U .), and $user cannot write there" \
    "use a checkout of your own, or: sudo chown -R $user '$PWD'"
closed=$(find "$venv" ./*.egg-info -type d ! -writable -print -quit 2>/dev/null) || :
[ -z "$closed" ] || fail "$PWD/$closed belongs to $(stat -c %U "$closed"), not to $user" \
    "sudo chown -R $user '$PWD'"

# Only one at a time. Processes that a killed set-up left running, such as pip, still hold the lock.
# Over NFS only a file that is open for writing can be locked, and a script that is open for writing
# cannot be started, so the lock is on pyproject.toml.
if [ -z "${SQSHFORGE_SETUP:-}" ] && command -v flock >/dev/null; then
    export SQSHFORGE_SETUP=locked
    if (exec 9<>pyproject.toml) 2>/dev/null; then exec 9<>pyproject.toml; else exec 9<pyproject.toml; fi
    refused=0
    flock --nonblock 9 2>/dev/null || refused=$?
    case $refused in
    0) ;;
    1) # another set-up holds it
        echo "waiting for another set-up of this checkout"
        flock 9
        exec ./setup.sh "$goal" # perhaps nothing is left to do
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
# An environment without any mark is incomplete and made anew; one that is only old is updated.
whole=
for mark in "$venv"/made-for-*; do
    if [ -n "$version" ] && [ "$(head -n 1 "$mark" 2>/dev/null)" = "$version" ]; then whole=1; fi
done
if [ -z "$whole" ]; then
    if [ -L "$venv" ]; then rm "$venv"; fi # venv would empty the link's target, then refuse it
    rm -f "$venv"/made-for-*
    "$python" -m venv --clear "$venv"
fi
rm -f "$venv"/made-for-*
if [ "$goal" = xla ]; then
    site='import sysconfig; print(sysconfig.get_path("purelib"))'
    .venvcomposer/bin/python -c "$site" >"$("$venv/bin/python" -c "$site")/composer.pth"
fi
: "${log:=$(mktemp)}"
by_uv() { # pip is tried for what uv cannot get; only pip sees the packages of composer.pth
    [ "$goal" != xla ] || return
    [ "$kind" != quickstart ] ||
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --retries 0 "$@" uv ||
        return
    .venv/bin/python -m sqshforge.venv install "$venv" ".$extra" "$@"
}
by_pip() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@" --editable ".$extra"
}
set -- # the tested versions, which not every package index has
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
