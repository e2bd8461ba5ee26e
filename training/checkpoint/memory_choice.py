"""Whether a run keeps copies of checkpoints in the nodes' memory: decided once, and logged."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from training.checkpoint.free_memory import free_in, is_tmpfs
from training.checkpoint.in_memory import Copies, size
from training.checkpoint.memory_folder import STARTS, VARIABLE
from training.config.config import Config
from training.errors import RequestError
from training.process_group import Group

NAME = "checkpoint_in_memory"
COPIES = 2
"""The newest complete copy stays while a new one is made."""
COMFORTABLE, MOST = 4, 2
"""Divisors of a node's free memory: copies may take a quarter of it, or half if asked for."""
NO_AGENT = "nothing is restarted in place without training.launch and RESTARTS"
NO_TMPFS = "neither /dev/shm nor TMPDIR is a tmpfs that can be written to"


@dataclass(frozen=True)
class Room:
    """The memory that one node has for copies, as one of its ranks sees it, in bytes."""

    folder: str  # empty: there is none
    why_not: str = ""
    free: int = 0  # including what copies already take


@dataclass(frozen=True)
class Choice:
    """Whether copies are kept, why, and how many bytes a node's copies may take."""

    on: bool
    why: str
    most: int = 0


def choose(
    asked: bool | None, takes: int, rooms: Sequence[Room], *, refuses: bool = True
) -> Choice:
    """Decide, the same for all nodes.

    asked: the setting, None for auto. takes: bytes of a node's part of a checkpoint. rooms: one for
    each rank. refuses: raise RequestError if copies were asked for and cannot be kept, instead of
    going without.
    """
    without = next((number for number, one in enumerate(rooms) if not one.folder), None)
    if without is not None:
        one = rooms[without]
        where = "" if one.why_not == NO_AGENT else f" on the node of rank {without}"
        why = f"{one.why_not}{where}"
        if asked and refuses:
            raise RequestError(
                f"{NAME}: {why}; fix: start the run by a launcher or by training.launch with "
                f"RESTARTS=3, in containers with a tmpfs on /dev/shm, or leave {NAME} at auto"
            )
        return Choice(False, why)
    least = min(range(len(rooms)), key=lambda number: rooms[number].free)
    free, need = rooms[least].free, COPIES * takes
    part, word = (MOST, "half") if asked else (COMFORTABLE, "a quarter")
    if part * need > free:
        short = (
            f"two copies of a node's part of a checkpoint take {size(need)}, more than {word} of "
            f"the {size(free)} that the node of rank {least} has free in {_place(rooms[least])}"
        )
        if asked and refuses:
            raise RequestError(
                f"{NAME}: {short}; fix: give the job more memory (--mem of sbatch, the size of "
                f"/dev/shm) or more nodes, or leave {NAME} at auto"
            )
        return Choice(False, short)
    place = _place(rooms[least])
    why = f"two copies take {size(need)} of the {size(free)} that a node has free in {place}"
    return Choice(True, why, free // part)


def open_copies(
    config: Config, group: Group, takes: int, say: Callable[[str], None]
) -> Copies | None:
    """Decide, and return this rank's copies; None if there are to be none (a collective call).

    takes: bytes of a whole checkpoint. Raises RequestError as `choose` does.
    """
    asked = config.run.checkpoint_in_memory
    if asked is False or config.run.compile_only:
        return None
    room = _look()
    part = -(-takes * group.local_world_size // group.world_size)
    # Fewer nodes, or a spare, may have less memory, but lack of copies must not end a running job.
    goes_on = group.any(is_restarted())  # on a spare, these are the first ranks
    choice = choose(asked, part, group.gather(room), refuses=not goes_on)
    setting = "auto" if asked is None else "True"
    say(f"{NAME}={setting}: {'on' if choice.on else 'off'}, as {choice.why}")
    if not choice.on:
        return None
    return Copies(Path(room.folder), _job(), group, choice.most)


def is_restarted() -> bool:
    """Tell whether the node's agent has restarted these ranks in place."""
    return int(os.environ.get(STARTS) or 0) > 1


def _look() -> Room:
    folder = os.environ.get(VARIABLE)
    if folder is None:
        return Room("", NO_AGENT)
    if not folder or not is_tmpfs(Path(folder)):
        return Room("", NO_TMPFS)
    try:
        held = sum(one.stat().st_size for one in Path(folder).rglob("*") if one.is_file())
        return Room(folder, free=free_in(Path(folder)) + held)
    except OSError as error:
        return Room("", f"{folder} cannot be read: {error.strerror}")


def _place(room: Room) -> Path:
    return Path(room.folder).parent


def _job() -> str:
    """Name this start of the job, as Slurm numbers it."""
    restarts = os.environ.get("SLURM_RESTART_COUNT") or "0"
    return f"{os.environ.get('SLURM_JOB_ID') or 'local'}.{restarts}"
