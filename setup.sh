#!/bin/sh
# Set up this machine: Debian packages and .venv. What is there already is left alone.
# usage: ./setup.sh quickstart|test|torch22|composer|xla
#
# quickstart  what building, packing and running an image takes
# test        that, and what the tests take: docker, a registry, Slurm, linters, torch
# torch22     what quickstart takes, and .venv22: the oldest torch that training/ runs on
# composer    what quickstart takes, and .venvcomposer: MosaicML's Composer and the torch it takes
# xla         that, and .venvxla: torch-xla beside that torch (Composer changes where it finds it)
#
# Python packages come from where pip is configured to get them, by uv where it can.
set -eu
cd "$(dirname "$0")"

fail() { # what, how to mend
    printf 'error: %s\n  mend:  %s\n' "$1" "$2" >&2
    exit 3
}

case "${1:-}" in
quickstart | test | torch22 | composer | xla) goal=$1 ;;
*)
    echo "usage: ./setup.sh quickstart|test|torch22|composer|xla" >&2
    exit 2
    ;;
esac

python=$(command -v python3) || fail "python3 is not installed" "apt-get install python3"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "Python 3.10 or later is needed; $python is older" "install a newer python3"
command -v apt-get >/dev/null ||
    fail "this machine has no apt-get" "use Debian 12, Ubuntu 22.04 or later (docs/machines.md)"

packages="buildah ca-certificates debian-archive-keyring fuse-overlayfs mmdebstrap
    squashfs-tools squashfuse uidmap"
"$python" -c 'import ensurepip, venv' 2>/dev/null || packages="$packages python3-venv"
if [ "$goal" = test ]; then
    packages="$packages docker-registry docker.io iproute2 libcap2-bin munge openssh-client
        patch skopeo slurm-wlm"
fi

# Word splitting is what makes one argument of each name.
# shellcheck disable=SC2086
missing=$(dpkg-query -W -f '${Package} ${db:Status-Status}\n' $packages 2>/dev/null |
    awk -v wanted="$packages" '
        $2 == "installed" { have[$1] }
        END { n = split(wanted, names); for (i = 1; i <= n; i++) if (!(names[i] in have)) printf "%s ", names[i] }')

if [ -n "$missing" ]; then
    if [ "$(id -u)" = 0 ]; then
        sudo=
    elif command -v sudo >/dev/null; then
        sudo=sudo
    else
        # shellcheck disable=SC2086
        fail "packages are missing and this is neither root nor a user with sudo" \
            "as root: apt-get install $missing"
    fi
    # shellcheck disable=SC2086
    echo "installing:" $missing
    log=$(mktemp)
    # shellcheck disable=SC2086
    if ! { $sudo apt-get update -qq &&
        $sudo env DEBIAN_FRONTEND=noninteractive \
            apt-get install -y -qq --no-install-recommends $missing; } >"$log" 2>&1; then
        tail -n 12 "$log" >&2
        rm -f "$log"
        fail "apt-get could not install them" "see above; then run this again"
    fi
    rm -f "$log"
fi

case $goal in
test) venv=.venv extra="[test]" ;;
torch22) venv=.venv22 extra="[torch22]" ;;
composer) venv=.venvcomposer extra="[composer]" ;;
xla)
    ./setup.sh composer
    venv=.venvxla extra="[xla]"
    ;;
*) venv=.venv extra="" ;;
esac
# The stamp says what it was made for; a changed pyproject.toml or Python makes it anew.
stamp=$("$python" -c 'import sys; print(sys.version)'; cksum pyproject.toml)
for made in "$venv/made-for-test" "$venv/made-for-$goal"; do
    if [ -f "$made" ] && [ "$(cat "$made")" = "$stamp" ]; then exit 0; fi
done
echo "making $venv"
if ! "$venv/bin/python" -c '' 2>/dev/null; then "$python" -m venv --clear "$venv"; fi
if [ "$goal" = xla ]; then
    site='import sysconfig; print(sysconfig.get_path("purelib"))'
    .venvcomposer/bin/python -c "$site" >"$("$venv/bin/python" -c "$site")/composer.pth"
fi
log=$(mktemp)
by_uv() { # what uv cannot get, pip may; and only pip sees what composer.pth brings
    [ "$goal" != quickstart ] && [ "$goal" != xla ] && ./setup.sh quickstart &&
        .venv/bin/python -m sqshforge.venv "$venv" ".$extra"
}
if ! by_uv >"$log" 2>&1 &&
    ! "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable ".$extra" \
        >"$log" 2>&1; then
    tail -n 12 "$log" >&2
    rm -f "$log"
    fail "pip could not install the Python packages" "see above; then run this again"
fi
rm -f "$log"
printf '%s\n' "$stamp" >"$venv/made-for-$goal"
