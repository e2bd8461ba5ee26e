"""Which cores a process gets: its share of those that are near to its accelerator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def shares(
    domains: Mapping[int, Sequence[int]], places: Sequence[int], processes: int
) -> list[tuple[int, ...]]:
    """Share the cores of each NUMA node among the processes whose accelerators are there.

    domains: the cores of each NUMA node, the threads of a core side by side; places: the NUMA node
    of each process's accelerator. Empty where there is nothing to choose, or not all is known.
    """
    near = list(places[:processes])
    if len(domains) < 2 or len(near) < processes or not set(near) <= domains.keys():
        return []
    if any(near.count(place) > len(domains[place]) for place in near):
        return []
    found = []
    for number, place in enumerate(near):
        cores, among = domains[place], near.count(place)
        mine = near[:number].count(place)
        first, end = mine * len(cores) // among, (mine + 1) * len(cores) // among
        found.append(tuple(cores[first:end]))
    return found
