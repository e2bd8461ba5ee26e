#!/bin/bash
# enroot as a launcher meets it: it passes on the variables that --env names and no other, and its
# root is gone once the process that serves it has ended, as by a signal of Slurm to all processes:
# TERM ends it, and CONT wakes the stopped shell that holds it. The container itself is sqshforge's.
# squashfuse is the one of stand_in_enroot/, which must be on the PATH, too.
case ${1:-} in
version) echo 4.1.2 && exit ;;
start) shift ;;
*) echo "enroot: no such command: ${1:-}" >&2 && exit 1 ;;
esac
kept=() mounts=() conf=''
while [[ ${1:-} == --* ]]; do
    case $1 in
    --rw) ;;
    --conf) shift && conf=$1 ;;
    --env=*=*) kept+=("${1#--env=}") ;;
    --env=*) name=${1#--env=} && kept+=("$name=${!name}") ;;
    --mount=*) IFS=: read -r from to _ <<< "${1#--mount=}" && mounts+=("--mount=$from:$to") ;;
    *) echo "enroot: no such option: $1" >&2 && exit 1 ;;
    esac
    shift
done
STAND_IN=$(mktemp -d)
export STAND_IN ENROOT_RUNTIME_PATH=$STAND_IN ENROOT_PID=$$
set -m
# shellcheck disable=SC2016
(exec -a fuse-shim "$BASH" <<< '
    trap "kill -KILL 0 2> /dev/null" EXIT
    squashfuse &
    until [[ -s $STAND_IN/server ]]; do sleep 0.01; done
    kill -STOP $$
') > /dev/null 2>&1 &
wait $! > /dev/null 2>&1
set +m
server=$(< "$STAND_IN/server") main=$$
(
    trap '' TERM HUP INT USR1 USR2
    # Dead, it is a zombie: the program above is no shell, which would wait for it.
    while [[ $(< "/proc/$server/stat") == *") "[RSD]* ]] && kill -0 $main; do sleep 0.2; done
    kill -BUS $main
    rm -r "$STAND_IN"
) 2> /dev/null &
if [[ -n $conf ]]; then
    # shellcheck source=/dev/null
    (source "$conf" && hooks)
fi
exec env -i "PATH=$PATH" "HOME=$HOME" "TERM=${TERM:-}" "${kept[@]}" \
    sqshforge run --runtime=builtin "${mounts[@]}" "$1" -- "${@:2}"
