"""A node's cores: as the kernel writes them, and in the order in which they are shared out."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from training.job.files import content

CPU, NODE = Path("sys/devices/system/cpu"), Path("sys/devices/system/node")


def parse(text: str) -> tuple[int, ...]:
    """Read a list of cores: `0-2,8` is 0, 1, 2, 8. Raises ValueError."""
    found: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found += range(int(first), int(last or first) + 1)
    return tuple(found)


def listed(cores: Iterable[int]) -> str:
    """Write a list of cores as the kernel does: the opposite of `parse`."""
    runs = itertools.groupby(enumerate(sorted(cores)), lambda pair: pair[1] - pair[0])
    spans = [[core for _, core in run] for _, run in runs]
    return ",".join(f"{run[0]}-{run[-1]}" if run[1:] else f"{run[0]}" for run in spans)


def domains(root: Path, allowed: Collection[int]) -> dict[int, tuple[int, ...]]:
    """Look up the cores of each NUMA node that this task may use; a node without any is left out.

    root: where /sys is looked for. The two threads of a core stand side by side, so that a part of
    the list has whole cores.
    """
    found = {}
    for folder in (root / NODE).glob("node[0-9]*"):
        own = set(parse(content(folder / "cpulist"))) & set(allowed)
        if own:
            number = int(re.sub(r"\D", "", folder.name))
            found[number] = tuple(sorted(own, key=lambda core: (_first(root, core), core)))
    return dict(sorted(found.items()))


def _first(root: Path, core: int) -> int:
    """The lowest number among the threads of a core."""
    threads = parse(content(root / CPU / f"cpu{core}" / "topology" / "thread_siblings_list"))
    return min(threads, default=core)
