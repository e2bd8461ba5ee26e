"""Run every benchmark, one after the other, and print a summary at the end.

usage: python -m benchmarks [--small] [NAME ...]

A benchmark that misses its goal does not stop the others. Exits 1 if any benchmark failed or missed
a goal. Use an otherwise idle machine, as root, with docker.io and buildah; start also needs
squashfuse, nbdkit and libnbd-bin, and delta needs rsync, casync and zstd. hot, start, first_step
and delta measure build/cpu-mamba.sqsh, so run `make sqsh` first. --small only checks that the
benchmarks themselves work; it does not need that file.
"""

from __future__ import annotations

import argparse
import sys
import time

from benchmarks import options
from benchmarks.options import ROOT
from sqshforge.errors import SqshforgeError
from sqshforge.host.programs import Programs

# The arguments after `python -m benchmarks.`, for each benchmark.
ALL = {
    "rebuild": ("rebuild",),
    "pack": ("pack",),
    "hot": ("hot",),
    "start": ("start",),
    "first_step": ("first_step",),
    "delta": ("delta",),
    "models": ("models",),
    "train": ("train",),
    "data": ("data",),
    "wait": ("wait",),
    "tokenize": ("tokenize",),
    "save": ("save",),
    "meet": ("meet",),
    "scale_sim": ("scale_sim",),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ALL)}")
    parser.add_argument("--small", action="store_true", help="short runs, to try the benchmarks")
    given = parser.parse_args()
    unknown = sorted(set(given.names) - set(ALL))
    if unknown:
        parser.error(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(ALL)}")
    verdicts = {}
    for name in given.names or ALL:
        print(f"== {name}", flush=True)
        verdicts[name] = run(name, small=given.small)
    print("\n" + "\n".join(f"{name:<10} {verdict}" for name, verdict in verdicts.items()))
    return 0 if all(one.startswith("ok") for one in verdicts.values()) else 1


def run(name: str, *, small: bool) -> str:
    """Run one benchmark, pass its output through, and return its verdict."""
    module, *words = ALL[name]
    if small and name != "scale_sim":  # the simulation has only one size
        words.append("--small")
    since = time.monotonic()
    try:
        Programs().follow([sys.executable, "-m", f"benchmarks.{module}", *words], print, cwd=ROOT)
    except SqshforgeError as error:
        return f"FAILED after {time.monotonic() - since:.0f} s: {error.what.splitlines()[0]}"
    return f"ok, {time.monotonic() - since:.0f} s"


if __name__ == "__main__":
    options.run(main)
