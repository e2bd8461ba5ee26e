#!/bin/bash
# enroot as a launcher meets it: it passes on the variables that --env names and no other, and its
# root is gone once the process that serves it has ended, as by a signal of Slurm to all processes.
# The container itself is sqshforge's.
case ${1:-} in
version) echo 4.1.2 && exit ;;
start) shift ;;
*) echo "enroot: no such command: ${1:-}" >&2 && exit 1 ;;
esac
kept=() mounts=()
while [[ ${1:-} == --* ]]; do
    case $1 in
    --rw) ;;
    --conf) shift ;;
    --env=*=*) kept+=("${1#--env=}") ;;
    --env=*) name=${1#--env=} && kept+=("$name=${!name}") ;;
    --mount=*) IFS=: read -r from to _ <<< "${1#--mount=}" && mounts+=("--mount=$from:$to") ;;
    *) echo "enroot: no such option: $1" >&2 && exit 1 ;;
    esac
    shift
done
(exec -a squashfuse sleep infinity) &
server=$! main=$$
(
    trap '' TERM HUP INT USR1 USR2
    # Dead, it is a zombie: the program above is no shell, which would wait for it.
    while [[ $(< /proc/$server/stat) == *") "[RSD]* ]] && kill -0 $main; do sleep 0.2; done
    kill -BUS $main
    kill -KILL $server
) 2> /dev/null &
exec env -i "PATH=$PATH" "HOME=$HOME" "TERM=${TERM:-}" "${kept[@]}" \
    sqshforge run --runtime=builtin "${mounts[@]}" "$1" -- "${@:2}"
